"""Scan: runs a graph for each element along an axis, with states passed from one element to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import limits
from ..autodiff.flow import live_inputs
from ..autodiff.replay import run_subgraph, subgraph_gradients
from ..devices.namespaces import Xp
from ..dtypes import is_float, onnx_code
from ..errors import OperatorError
from ..interpreters.base import Op, Subgraph, V, element, same
from ..ir.declaration import Host, Ints, operator
from ..ir.graph import Graph
from ._api import Array, Run
from ._common import axis_of
from ._flops import unknown
from .control import Gather, namespace_of, zeros_of


def _list_attribute(name: str, given: Sequence[int] | None, count: int) -> Sequence[int]:
    """Return a list attribute of Scan, one entry per scan input or output; zeros if it is absent."""
    if given is None or len(given) == 0:
        return (0,) * count
    if len(given) != count:
        raise OperatorError(f"{name} must have {count} entries, got {len(given)}", code="SX404")
    if "direction" in name and not set(given) <= {0, 1}:
        raise OperatorError(f"{name} must hold 0 (forward) or 1 (reverse), got {list(given)}", code="SX404")
    return given


def _parts(values: Sequence[Array], num_scan_inputs: int) -> tuple[list[Array], list[Array]]:
    """Return the initial states and the scan inputs."""
    if not 1 <= num_scan_inputs <= len(values):
        raise OperatorError(
            f"num_scan_inputs must be in [1, {len(values)}], the number of inputs, got {num_scan_inputs}", code="SX404"
        )
    n = len(values) - num_scan_inputs
    return list(values[:n]), list(values[n:])


def _length(xs: Sequence[Array], axes: Sequence[int]) -> int:
    lengths = {x.shape[a] for x, a in zip(xs, axes, strict=True)}
    if len(lengths) != 1:
        raise OperatorError(f"the scan inputs must have equal lengths, got {sorted(lengths)}", code="SX404")
    return int(lengths.pop())


@operator("Scan", 9, widen=False)
def scan_9(
    xp: Xp,
    *values: Array,
    body: Graph,
    num_scan_inputs: int,
    scan_input_axes: Ints | None = None,
    scan_input_directions: Ints | None = None,
    scan_output_axes: Ints | None = None,
    scan_output_directions: Ints | None = None,
    run: Run,
) -> tuple[Array, ...]:
    """Negative axes require version 11 or later."""
    for axis in (*(scan_input_axes or ()), *(scan_output_axes or ())):
        if axis < 0:
            raise OperatorError(f"axes of Scan-9 must not be negative, got {axis}", code="SX408")
    outputs: tuple[Array, ...] = scan(
        xp,
        *values,
        body=body,
        num_scan_inputs=num_scan_inputs,
        scan_input_axes=scan_input_axes,
        scan_input_directions=scan_input_directions,
        scan_output_axes=scan_output_axes,
        scan_output_directions=scan_output_directions,
        run=run,
    )
    return outputs


@operator("Scan", 11, 16, 19, 21, 23, 24, 25, widen=False)
def scan(
    xp: Xp,
    *values: Array,
    body: Graph,
    num_scan_inputs: int,
    scan_input_axes: Ints | None = None,
    scan_input_directions: Ints | None = None,
    scan_output_axes: Ints | None = None,
    scan_output_directions: Ints | None = None,
    run: Run,
) -> tuple[Array, ...]:
    """Run a body that takes (states..., elements...) and returns (states..., scan outputs...)."""
    state, xs = _parts(values, num_scan_inputs)
    n = len(state)
    axes = [axis_of(a, x.ndim) for a, x in zip(_list_attribute("scan_input_axes", scan_input_axes, len(xs)), xs, strict=True)]
    if any(x.ndim == 0 for x in xs):
        raise OperatorError("a scan input must have at least one axis, got a scalar", code="SX408")
    backward = _list_attribute("scan_input_directions", scan_input_directions, len(xs))
    gather = Gather(xp, body, n)
    k = len(gather.declared)
    out_axes = _list_attribute("scan_output_axes", scan_output_axes, k)
    out_directions = _list_attribute("scan_output_directions", scan_output_directions, k)
    length = _length(xs, axes)
    with limits.holding(gather.values):
        for t in limits.rounds(length):
            here = [length - 1 - t if b else t for b in backward]
            elements = [x[(slice(None),) * a + (i, ...)] for x, a, i in zip(xs, axes, here, strict=True)]
            results = run(body, *state, *elements)
            state = results[:n]
            gather.take(results[n:])

    def dry() -> list[Any]:
        elements = (zeros_of(xp, x.shape[:a] + x.shape[a + 1 :], x.dtype) for x, a in zip(xs, axes, strict=True))
        return run(body, *state, *elements, dry=True)

    return (*state, *gather.outputs(dry, out_axes, out_directions))


scan.flops(unknown)


@scan.gradient
@scan_9.gradient
def scan_9_gradient(
    op: Op,
    dys: list[V],
    ys: list[V],
    values: list[V],
    body: Subgraph,
    num_scan_inputs: int,
    scan_input_axes: Ints | None,
    scan_input_directions: Ints | None,
    scan_output_axes: Ints | None,
    scan_output_directions: Ints | None,
    captured: list[V],
    needs: tuple[bool, ...],
) -> list[V]:
    """Run the scan again and keep the states as scan outputs; then scan in the opposite direction."""
    n = len(values) - num_scan_inputs
    state, xs = values[:n], values[n:]
    axes, directions = (_list_attribute("", a, num_scan_inputs) for a in (scan_input_axes, scan_input_directions))
    flow = _flow(op, dys, state, xs, body, captured, needs)
    if not (flow.floats or flow.requested or flow.requested_xs):
        return [None] * len(needs)
    slices = [op.type(x, drop=[a]) for x, a in zip(xs, axes, strict=True)]
    first = [element(op, x, a) for x, a in zip(xs, axes, strict=True)]
    graph = op.graph(flow.forward, [*map(op.type, state), *slices], [*(same(op, v) for v in state), *first])
    attributes = {"body": graph, "num_scan_inputs": len(xs), "scan_input_axes": axes, "scan_input_directions": directions}
    kept = op.call("Scan", values, attributes, 2 * n)[n:] if n else []

    dscans = [dys[n + i] for i in flow.scans]
    out_axes, out_directions = (_list_attribute("", a, len(dys) - n) for a in (scan_output_axes, scan_output_directions))
    starts = [op.zeros_like(ys[k]) if dys[k] is None else dys[k] for k in flow.floats]
    starts += [op.zeros_like(captured[i]) for i in flow.requested]
    elements = [*(op.type(k, drop=[0]) for k in kept), *slices, *(op.type(d, drop=[0]) for d in dscans)]
    firsts = [*(element(op, k) for k in kept), *first, *(element(op, d) for d in dscans)]
    graph = op.graph(flow.backward, [*map(op.type, starts), *elements], [*(same(op, v) for v in starts), *firsts])
    made = op.call(
        "Scan",
        [*starts, *kept, *xs, *dscans],
        {
            "body": graph,
            "num_scan_inputs": len(elements),
            "scan_input_axes": [*[0] * n, *axes, *(out_axes[i] for i in flow.scans)],
            "scan_input_directions": [*[1] * n, *(1 - d for d in directions), *(1 - out_directions[i] for i in flow.scans)],
            "scan_output_axes": [axes[i] for i in flow.requested_xs],
            "scan_output_directions": [1 - directions[i] for i in flow.requested_xs],
        },
        len(starts) + len(flow.requested_xs),
    )
    grads: list[V] = [None] * len(needs)
    where = [*flow.floats, *(len(values) + i for i in flow.requested), *(n + i for i in flow.requested_xs)]
    for k, g in zip(where, made, strict=True):
        grads[k] = g
    for i in flow.requested_xs:
        sizes = op.shape(xs[i])
        length = None if sizes is None else sizes[axes[i]]
        if not isinstance(length, int) or not length:  # the body does not know the sizes of an element if there is none
            grads[n + i] = op.Reshape(grads[n + i], op.Shape(xs[i]), allowzero=1)
    return grads


@dataclass
class _Flow:
    """The gradients that flow through one iteration of a Scan, and the bodies of the scans that compute them.

    Attributes:
        body: the graph that the Scan runs for each element.
        captured: the outer values that it reads.
        needs: for each input and captured value, whether its gradient is requested.
        states: the number of states.
        xs: the number of scan inputs.
        ys: the number of scan outputs.
        floats: the positions of the states that have a gradient.
        requested: the positions of the captured values whose gradients are computed.
        requested_xs: the positions of the scan inputs whose gradients are computed.
        scans: the positions of the scan outputs that have a gradient.
    """

    body: Subgraph
    captured: list[V]
    needs: tuple[bool, ...]
    states: int
    xs: int
    ys: int
    floats: list[int]
    requested: list[int]
    requested_xs: list[int]
    scans: list[int]

    def forward(self, op: Op, *here: V) -> list[V]:
        """Run the body; its states become states and, as they are before it, scan outputs."""
        n = self.states
        return [*run_subgraph(op, self.body, [*here, *self.captured])[:n], *(op.Identity(s) for s in here[:n])]

    def backward(self, op: Op, *here: V) -> list[V]:
        """Differentiate one iteration.

        It takes the gradients of the states, the sums of those of captured values, the states before the iteration, the scan
        inputs and the gradients of the scan outputs.
        """
        n, parts = self.states, iter(here)
        dstate: list[V] = [None] * n
        for k in self.floats:
            dstate[k] = next(parts)
        sums = [next(parts) for _ in self.requested]
        then, x = [next(parts) for _ in range(n)], [next(parts) for _ in range(self.xs)]
        dscans: list[V] = [None] * self.ys
        for k in self.scans:
            dscans[k] = next(parts)
        flows = [*(k in self.floats for k in range(n)), *self.needs[n:]]
        found = subgraph_gradients(op, self.body, [*then, *x, *self.captured], [*dstate, *dscans], flows)

        def grad(k: int, like: V) -> V:
            return op.zeros_like(like) if found[k] is None else found[k]

        sums = [op.add(s, found[n + self.xs + k]) for s, k in zip(sums, self.requested, strict=True)]
        return [*(grad(k, then[k]) for k in self.floats), *sums, *(grad(n + k, x[k]) for k in self.requested_xs)]


def _flow(op: Op, dys: list[V], state: list[V], xs: list[V], body: Subgraph, captured: list[V], needs: tuple[bool, ...]) -> _Flow:
    """The gradients that are requested, and do not end in the body."""
    n, after = len(state), len(state) + len(xs)
    live = live_inputs(body, [dy is not None for dy in dys], [(k, k) for k in range(n)])
    return _Flow(
        body, captured, needs, n, len(xs), len(dys) - n,
        floats=[i for i, s in enumerate(state) if is_float(op.dtype(s))],
        requested=[i for i in range(len(captured)) if needs[after + i] and after + i in live],
        requested_xs=[i for i in range(len(xs)) if needs[n + i] and n + i in live],
        scans=[i for i, d in enumerate(dys[n:]) if d is not None],
    )  # fmt: skip


@scan_9.decomposition
def scan_9_decomposition(
    op: Op,
    values: list[V],
    body: Subgraph,
    num_scan_inputs: int,
    scan_input_axes: Ints | None,
    scan_input_directions: Ints | None,
    scan_output_axes: Ints | None,
    scan_output_directions: Ints | None,
    wanted: tuple[bool, ...],
) -> list[V]:
    attributes = {"body": body, "num_scan_inputs": num_scan_inputs, "scan_input_axes": scan_input_axes,
                  "scan_input_directions": scan_input_directions, "scan_output_axes": scan_output_axes,
                  "scan_output_directions": scan_output_directions}  # fmt: skip
    return list(op.call("Scan", values, attributes, len(wanted)))


@operator("Scan", 8, widen=False)
def scan_8(
    xp: Xp,
    sequence_lens: Host[Ints] | None = None,
    *values: Array,
    body: Graph,
    directions: Ints | None = None,
    num_scan_inputs: int,
    run: Run,
) -> tuple[Array, ...]:
    """Version 8 scans axis 1 of each sample of a batch (axis 0), up to the length of the sample in `sequence_lens`.

    A reverse scan starts at the last element within the sample's length; outputs beyond that length are zero.
    """
    states, xs = _parts(values, num_scan_inputs)
    if any(x.ndim < 2 for x in xs) or any(s.ndim < 1 for s in states):
        raise OperatorError("the inputs of Scan-8 must have a batch axis 0, and its scan inputs a sequence axis 1", code="SX404")
    n = len(states)
    backward = _list_attribute("directions", directions, len(xs))
    batch, longest = _length([*states, *xs], [0] * len(values)), _length(xs, [1] * len(xs))
    lengths = sequence_lens if sequence_lens is not None else (longest,) * batch
    if len(lengths) != batch or not all(0 <= length <= longest for length in lengths):
        raise OperatorError(f"sequence_lens must have {batch} lengths in [0, {longest}], got {list(lengths)}", code="SX404")

    def body_of(state: Sequence[Array]) -> Callable[[], list[Any]]:
        return lambda: run(body, *state, *(zeros_of(xp, x.shape[2:], x.dtype) for x in xs), dry=True)

    finals: list[list[Array]] = [[] for _ in states]
    scans: list[list[Array]] = [[] for _ in body.outputs[n:]]
    for sample in limits.rounds(batch):
        length = lengths[sample]
        state = [s[sample, ...] for s in states]
        gather = Gather(xp, body, n)
        with limits.holding(finals, scans, gather.values):
            for t in limits.rounds(length):
                elements = [x[(sample, length - 1 - t if b else t, ...)] for x, b in zip(xs, backward, strict=True)]
                results = run(body, *state, *elements)
                state = results[:n]
                gather.take(results[n:])
        for kept, s in zip(finals, state, strict=True):
            kept.append(s)
        for kept, y in zip(scans, gather.outputs(body_of(state)), strict=True):
            kept.append(_padded(xp, y, longest))
    if batch:
        return tuple(namespace_of(xp, values[0]).stack(values) for values in (*finals, *scans))
    empty = Gather(xp, body, n).outputs(body_of([zeros_of(xp, s.shape[1:], s.dtype) for s in states]))
    return (*states, *(zeros_of(xp, (0, longest, *y.shape[1:]), y.dtype) for y in empty))


def _padded(xp: Xp, y: Array, length: int) -> Array:
    if len(y) == length:
        return y
    rest = zeros_of(xp, (length - len(y), *y.shape[1:]), y.dtype)
    return namespace_of(xp, y).concatenate([y, rest], 0)


@scan_8.decomposition
def scan_8_decomposition(
    op: Op,
    sequence_lens: V,
    values: list[V],
    body: Subgraph,
    directions: Ints | None,
    num_scan_inputs: int,
    wanted: tuple[bool, ...],
) -> list[V]:
    """A Scan over the samples whose body scans one of them, sliced to its length; outputs are padded with zeros."""
    states, xs = _parts(values, num_scan_inputs)
    n, scans = len(states), len(wanted) - len(states)
    backward = list(_list_attribute("directions", directions, len(xs)))
    lens = [] if sequence_lens is None else [op.Cast(sequence_lens, to=onnx_code(np.int64))]

    def sample(inner: Op, *here: V) -> list[V]:
        state, x = list(here[:n]), list(here[n : n + len(xs)])
        if lens:
            length = inner.Unsqueeze(here[n + len(xs)], [0])
            longest = inner.Shape(x[0], start=0, end=1)
            x = [inner.Slice(v, [0], length, [0]) for v in x]
        attributes = {"body": body, "num_scan_inputs": len(x), "scan_input_directions": backward}
        made = list(inner.call("Scan", [*state, *x], attributes, n + scans))
        if lens:
            padding = inner.Sub(longest, length)
            made[n:] = [inner.Pad(y, inner.Concat([0], padding, axis=0), None, [0]) for y in made[n:]]
        return made

    slices = [op.type(v, drop=[0]) for v in (*states, *xs, *lens)]
    # The initial states of the samples are scan inputs too, not states of the Scan over the samples.
    graph = op.graph(sample, slices, [element(op, v) for v in (*states, *xs, *lens)])
    return list(op.call("Scan", [*states, *xs, *lens], {"body": graph, "num_scan_inputs": len(slices)}, n + scans))
