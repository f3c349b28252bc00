"""Control flow: If, Loop and SequenceMap, which run the graphs in their attributes (Scan is in scan.py)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import limits
from ..autodiff.flow import live_inputs
from ..autodiff.replay import run_subgraph, subgraph_gradients
from ..devices import namespaces
from ..devices.namespaces import Xp
from ..dtypes import HOST_ONLY, STRING, is_float, onnx_code, onnx_name
from ..errors import OperatorError, SonnxError
from ..interpreters.base import BOOL, FIRST, INT, Op, Subgraph, V, same
from ..ir.declaration import Host, Ints, operator
from ..ir.graph import Graph
from ..proto.values import Value
from ._api import Array, Run
from ._common import axis_of
from ._flops import unknown


@operator("If", 1, 11, 13, 16, 19, 21, 23, 24, 25, widen=False)
def if_(xp: Xp, cond: Host[bool], *, then_branch: Graph, else_branch: Graph, run: Run) -> tuple[Any, ...]:
    n, m = len(then_branch.outputs), len(else_branch.outputs)
    if n != m:
        raise OperatorError(f"then_branch and else_branch must have equal numbers of outputs, got {n} and {m}", code="SX407")
    return tuple(run(then_branch if cond else else_branch))


if_.flops(unknown)


@if_.gradient
def if_gradient(
    op: Op, dys: list[V], cond: V, then_branch: Subgraph, else_branch: Subgraph, captured: list[V], needs: tuple[bool, ...]
) -> list[V]:
    """Each branch is recomputed and differentiated; values that it does not use have a gradient of zeros."""
    first = len(then_branch.captured)
    wanted = [dy is not None for dy in dys]
    live = live_inputs(then_branch, wanted) | {first + i for i in live_inputs(else_branch, wanted)}
    asked = [i for i, need in enumerate(needs[1:]) if need and i in live]

    def branch(body: Subgraph, own: range) -> Subgraph:
        def make(inner: Op) -> list[V]:
            found = subgraph_gradients(inner, body, [captured[i] for i in own], dys, [needs[1 + i] for i in own])
            grads = dict(zip(own, found, strict=True))
            return [_or_zeros(inner, grads.get(i), captured[i]) for i in asked]

        return op.graph(make, [])

    taken = op.constant_value(cond)
    if taken is not None and taken.size == 1:  # the other branch need not be computable for these values
        body, own = (then_branch, range(first)) if taken.item() else (else_branch, range(first, len(captured)))
        found = subgraph_gradients(op, body, [captured[i] for i in own], dys, [needs[1 + i] for i in own])
        some = dict(zip(own, found, strict=True))
        return [None, *(_or_zeros(op, some.get(i), x) if i in asked else None for i, x in enumerate(captured))]
    bodies = {"then_branch": branch(then_branch, range(first)), "else_branch": branch(else_branch, range(first, len(captured)))}
    made = dict(zip(asked, op.call("If", [cond], bodies, len(asked)), strict=True)) if asked else {}
    return [None, *(made.get(i) for i in range(len(captured)))]


def _or_zeros(op: Op, gradient: V, x: V) -> V:
    """The gradient; zeros for a value that the result depends on in other runs only."""
    return op.zeros_like(x) if gradient is None else gradient


@operator("Loop", 1, 11, 13, 16, 19, 21, 23, 24, 25, widen=False)
def loop(
    xp: Xp, M: Host[int] | None = None, cond: Host[bool] | None = None, *v_initial: Any, body: Graph, run: Run
) -> tuple[Any, ...]:
    """Run a body that takes (iteration, condition, states...) and returns (condition, states..., scan outputs...).

    Iteration and condition are scalars, or vectors of one value if the body declares them so.
    If the node does not have the input `cond`, the condition of the body is ignored.
    """
    state = list(v_initial)
    gather = Gather(xp, body, 1 + len(state))
    shapes = _shapes(body)
    going = cond is None or cond
    go: Any = xp.asarray(going, np.bool_)

    def step(i: int, dry: bool = False) -> list[Any]:
        first = (x.reshape(s) for x, s in zip((xp.asarray(i, np.int64), go), shapes, strict=True))
        return run(body, *first, *state, dry=dry)

    with limits.holding(gather.values):
        for i in limits.rounds(_trips(M, going, cond is None, body)):
            if not going or i == M:
                break
            go, *values = step(i)
            state = values[: len(state)]
            gather.take(values[len(state) :])
            if cond is not None:
                going = _truth(xp, go)
    return (*state, *gather.outputs(lambda: step(0, dry=True)))


loop.flops(unknown)


def _shapes(body: Graph) -> list[tuple[int, ...]]:
    """The shapes of the iteration number and the condition that a Loop's body takes."""
    return [(1,) if v.shape is not None and len(v.shape) == 1 else () for v in body.declared_inputs[:2]]


@loop.gradient
def loop_gradient(
    op: Op,
    dys: list[V],
    ys: list[V],
    M: V,
    cond: V,
    v_initial: list[V],
    body: Subgraph,
    captured: list[V],
    needs: tuple[bool, ...],
) -> list[V]:
    """Run the loop again and keep the states of each iteration; then differentiate from the last iteration to the first."""
    n = len(v_initial)
    floats = [i for i, s in enumerate(v_initial) if is_float(op.dtype(s))]
    live = live_inputs(body, [False, *(dy is not None for dy in dys)], [(1 + k, 2 + k) for k in range(n)])
    asked = [i for i in range(len(captured)) if needs[2 + n + i] and 2 + n + i in live]
    shapes = _shapes(body.graph)

    def called(inner: Op, i: V, go: V, state: Sequence[V]) -> list[V]:
        first = [inner.Reshape(x, list(s)) if s else x for x, s in zip((i, go), shapes, strict=True)]
        return [*first, *state, *captured]

    rounds, state_at = _states(op, M, cond, v_initial, body, called)
    trips = op.constant_value(rounds)
    if trips is not None and not trips:  # no iteration, from which the ranks in the body are known
        ends = [_or_zeros(op, dys[k], s) if k in floats else None for k, s in enumerate(v_initial)]
        return [None, None, *ends, *(_or_zeros(op, None, x) if i in asked else None for i, x in enumerate(captured))]

    def backward(inner: Op, j: V, go: V, *values: V) -> list[V]:
        i = inner.Sub(inner.Sub(rounds, 1), j)
        state = state_at(inner, i)
        dstate: list[V] = [None] * n
        for k, d in zip(floats, values, strict=False):
            dstate[k] = d
        dscans = [None if d is None else inner.Gather(d, i) for d in dys[n:]]
        flows = [False, False, *(k in floats for k in range(n)), *needs[2 + n :]]
        xs = called(inner, i, inner.constant(True), state)
        found = subgraph_gradients(inner, body, xs, [None, *dstate, *dscans], flows)[2:]
        grads = [inner.zeros_like(state[k]) if found[k] is None else found[k] for k in floats]
        sums = [inner.add(d, found[n + k]) for d, k in zip(values[len(floats) :], asked, strict=True)]
        return [inner.Identity(go), *grads, *sums]

    starts = [op.zeros_like(ys[k]) if dys[k] is None else dys[k] for k in floats]
    starts += [op.zeros_like(captured[i]) for i in asked]
    graph = op.graph(backward, [INT, BOOL, *map(op.type, starts)], [*FIRST, *(same(op, s) for s in starts)])
    made = op.call("Loop", [rounds, op.constant(True), *starts], {"body": graph}, len(starts)) if starts else []
    grads: list[V] = [None] * len(needs)
    for k, g in zip([*floats, *(n + i for i in asked)], made, strict=True):
        grads[2 + k] = op.with_type(g, op.type([*v_initial, *captured][k]))
    return grads


def _states(
    op: Op, M: V, cond: V, v_initial: list[V], body: Subgraph, called: Callable[[Op, V, V, Sequence[V]], list[V]]
) -> tuple[V, Callable[[Op, V], list[V]]]:
    """Run a loop; return its number of iterations, and a function of the states before one of them.

    States whose shapes change are kept in sequences, whose elements have unknown ranks; if the rank of a state is the
    same before and after each iteration, it is set again.  A state that is a sequence cannot be an element of a sequence:
    then each iteration runs the loop again up to that point.

    called: the inputs of the body in an iteration.
    """
    n = len(v_initial)
    keeps = not any(op.is_sequence(s) for s in v_initial)
    types = [op.type(s) for s in v_initial]
    steady: list[Any] = [None] * n

    def forward(inner: Op, i: V, go: V, count: V, *values: V) -> list[V]:
        kept, state = values[: len(values) - n], values[len(values) - n :]
        go, *outs = run_subgraph(inner, body, called(inner, i, go, state))
        ranks = [[None if s is None else len(s) for s in map(inner.shape, pair)] for pair in zip(state, outs, strict=False)]
        steady[:] = [
            t if before is not None and before == after else None for t, (before, after) in zip(types, ranks, strict=True)
        ]
        return [go, inner.Add(count, 1), *map(inner.SequenceInsert, kept, state), *outs[:n]]

    empty = [op.SequenceEmpty(dtype=onnx_code(op.dtype(s))) for s in v_initial] if keeps else []
    starting = [same(op, s) for s in v_initial]
    before = [*FIRST, lambda: np.array(0, np.int64), *(same(op, e) for e in empty), *starting]
    graph = op.graph(forward, [INT, BOOL, INT, *map(op.type, empty), *types], before)
    zero = op.constant(0, np.int64)
    rounds, *kept = op.call("Loop", [M, cond, zero, *empty, *v_initial], {"body": graph}, 1 + len(empty) + n)[: 1 + len(empty)]
    rounds = op.with_type(rounds, INT)

    def state_at(inner: Op, i: V) -> list[V]:
        if keeps:
            states = [inner.with_type(inner.SequenceAt(k, i), t) for k, t in zip(kept, steady, strict=True)]
            return [inner.with_example(s, e) for s, e in zip(states, starting, strict=True)]
        again = inner.graph(
            lambda op, i, go, *state: run_subgraph(op, body, called(op, i, go, state))[: 1 + n],
            [INT, BOOL, *types],
            [*FIRST, *starting],
        )
        return list(inner.call("Loop", [i, cond, *v_initial], {"body": again}, n))

    return rounds, state_at


def _trips(M: int | None, going: bool, unasked: bool, body: Graph) -> int | None:
    """Return the maximum number of iterations, or None if it depends on the iterations themselves.

    A loop that cannot end before the limit is thus rejected before its first iteration.
    """
    if not going or (M is not None and M <= 0):
        return 0
    if M is not None and limits.current().limits.iterations >= M:
        return M
    if unasked or _always(body):
        return sys.maxsize if M is None else M
    return None


def _always(body: Graph) -> bool:
    """Return whether the output condition of the body is known to be true: a true constant, or the input condition."""
    value = body.outputs[0] if body.outputs else None
    while value is not None and (node := value.producer) is not None and (node.domain, node.op_type) == ("", "Identity"):
        value = node.inputs[0]
    if value is None:
        return False
    node, known = value.producer, value.constant
    if node is not None:
        known = node.attributes.get("value") if (node.domain, node.op_type) == ("", "Constant") else None
    if known is not None:
        return known.size == 1 and bool(known.reshape(-1)[0])
    return len(body.inputs) > 1 and value is body.inputs[1]


def _truth(xp: Xp, value: Array) -> bool:
    if value.size != 1:
        raise OperatorError(f"the loop's condition must hold one value, got shape {value.shape}", code="SX402")
    return bool(xp.to_host(value).reshape(-1)[0])


class Gather:
    """Collects the scan outputs of a body: its outputs from index `first`, one value of each per iteration."""

    def __init__(self, xp: Xp, body: Graph, first: int) -> None:
        if len(body.outputs) < first:
            raise OperatorError(f"the body must have at least {first} outputs, got {len(body.outputs)}", code="SX407")
        self.xp = xp
        self.declared: Sequence[Value] = body.declared_outputs[first:]
        self.first = first
        self.values: list[list[Array]] = [[] for _ in self.declared]

    def take(self, values: Sequence[Any]) -> None:
        """Keep the scan outputs of one iteration; a view is copied, because it would keep a larger array alive."""
        for value, kept, declared in zip(values, self.values, self.declared, strict=True):
            if not hasattr(value, "dtype"):
                raise OperatorError(f"scan output {declared.name!r} must be a tensor", code="SX406")
            if kept and (kept[0].shape != value.shape or kept[0].dtype != value.dtype):
                raise OperatorError(
                    f"scan output {declared.name!r} changed from {onnx_name(kept[0].dtype)}{list(kept[0].shape)} "
                    f"to {onnx_name(value.dtype)}{list(value.shape)}",
                    code="SX404",
                )
            kept.append(value if value.base is None else value.copy())

    def outputs(
        self, dry: Callable[[], list[Any]], axes: Sequence[int] | None = None, directions: Sequence[int] = ()
    ) -> list[Array]:
        """Stack the values of each scan output along its axis, in reverse order if its direction is 1.

        Args:
            dry: Runs the body once; called if there was no iteration and the model does not declare a type.
            axes: Axis of each scan output; None for 0.
            directions: Direction of each scan output: 0 (forward) or 1 (reverse); empty for forward.
        """
        out = []
        for k, kept in enumerate(self.values):
            kept = kept or [self._like(k, dry)]
            axis = axis_of(axes[k], kept[0].ndim + 1) if axes else 0
            stacked = namespace_of(self.xp, kept[0]).stack(kept[::-1] if directions and directions[k] else kept, axis)
            out.append(stacked if self.values[k] else stacked[(slice(None),) * axis + (slice(0, 0),)])
        return out

    def _like(self, k: int, dry: Callable[[], list[Any]]) -> Array:
        """Return a value with the declared type of scan output `k`; unknown sizes are 0."""
        declared = self.declared[k]
        if declared.dtype is not None:
            shape = tuple(d if isinstance(d, int) else 0 for d in declared.shape or ())
            return zeros_of(self.xp, shape, declared.dtype)
        try:
            return dry()[self.first + k]
        except SonnxError as error:
            what = f"the body ran zero times, and its output {declared.name!r} does not have a declared type"
            raise OperatorError(what, code="SX404") from error


def zeros_of(xp: Xp, shape: Ints, dtype: np.dtype[Any]) -> Array:
    if dtype == STRING:
        return np.full(shape, "", object)
    return np.zeros(shape, dtype) if dtype in HOST_ONLY else xp.zeros(shape, dtype)


def namespace_of(xp: Xp, x: Array) -> Xp:
    """Return the namespace of the value's array: strings and similar values stay on the host."""
    return namespaces.numpy if isinstance(x, np.ndarray) else xp


@operator("SequenceMap", 17, widen=False)
def sequence_map(xp: Xp, input_sequence: list[Array], *additional_inputs: Any, body: Graph, run: Run) -> tuple[list[Any], ...]:
    """Iterate over all input sequences in parallel; pass input tensors unchanged to every iteration."""
    for other in additional_inputs:
        if isinstance(other, list) and len(other) != len(input_sequence):
            raise OperatorError(
                f"input sequences must have equal lengths, got {len(input_sequence)} and {len(other)}", code="SX404"
            )
    results: list[list[Any]] = []
    with limits.holding(results):
        for i in limits.rounds(len(input_sequence)):
            others = (other[i] if isinstance(other, list) else other for other in additional_inputs)
            results.append(run(body, input_sequence[i], *others))
    return tuple([r[k] for r in results] for k in range(len(body.outputs)))


sequence_map.flops(unknown)


@sequence_map.gradient
def sequence_map_gradient(
    op: Op,
    dys: list[V],
    input_sequence: V,
    additional_inputs: list[V],
    body: Subgraph,
    captured: list[V],
    needs: tuple[bool, ...],
) -> list[V]:
    """Differentiate each iteration: the gradients of sequences form sequences, those of tensors are summed."""
    values = [input_sequence, *additional_inputs, *captured]
    many = [i < len(values) - len(captured) and op.is_sequence(v) for i, v in enumerate(values)]
    live = live_inputs(body, [dy is not None for dy in dys])
    asked = [i for i, need in enumerate(needs) if need and i in live]
    if not asked:
        return [None] * len(needs)

    def sample(inner: Op, i: V, go: V, *grads: V) -> list[V]:
        here = [inner.SequenceAt(v, i) if m else v for v, m in zip(values, many, strict=True)]
        dhere = [None if d is None else inner.SequenceAt(d, i) for d in dys]
        found = subgraph_gradients(inner, body, here, dhere, needs)
        out = []
        for k, grad in zip(asked, grads, strict=True):
            g = inner.zeros_like(here[k]) if found[k] is None else found[k]
            out.append(inner.SequenceInsert(grad, g) if many[k] else inner.add(grad, g))
        return [inner.Identity(go), *out]

    def nothing(k: int) -> V:
        return op.SequenceEmpty(dtype=onnx_code(op.dtype(values[k]))) if many[k] else op.zeros_like(values[k])

    length = op.SequenceLength(input_sequence)
    trips = op.constant_value(length)
    if trips is not None and not trips:  # no element, from which the ranks in the body are known
        return [nothing(i) if i in asked else None for i in range(len(values))]
    starts = [nothing(k) for k in asked]
    graph = op.graph(sample, [INT, BOOL, *map(op.type, starts)], [*FIRST, *(same(op, s) for s in starts)])
    made = op.call("Loop", [length, op.constant(True), *starts], {"body": graph}, len(starts))
    grads: list[V] = [None] * len(needs)
    for k, g in zip(asked, made, strict=True):
        grads[k] = g
    return grads
