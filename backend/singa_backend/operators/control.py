"""Control flow: If, Loop, Scan and SequenceMap run the graphs that they carry as attributes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import arrays, limits
from ..dtypes import HOST_ONLY, STRING, onnx_name
from ..errors import OperatorError, SonnxError
from ..graph import Graph, Value
from ..operator import Array, Host, Ints, Run, Xp, operator
from ._common import axis_of


@operator("If", 1, 11, 13, 16, 19, 21, 23, 24, 25, widen=False)
def if_(xp: Xp, cond: Host[bool], *, then_branch: Graph, else_branch: Graph, run: Run) -> tuple[Any, ...]:
    n, m = len(then_branch.outputs), len(else_branch.outputs)
    if n != m:
        raise OperatorError(f"then_branch has {n} outputs and else_branch {m}", code="SX407")
    return tuple(run(then_branch if cond else else_branch))


@operator("Loop", 1, 11, 13, 16, 19, 21, 23, 24, 25, widen=False)
def loop(xp: Xp, M: Host[int] | None = None, cond: Host[bool] | None = None, *v_initial: Any, body: Graph,
         run: Run) -> tuple[Any, ...]:  # fmt: skip
    """The body takes (iteration, condition, states...) and gives (condition, states..., scan outputs...).

    Where the node has no `cond`, what the body says about going on is ignored.
    """
    state = list(v_initial)
    gather = _Gather(xp, body, 1 + len(state))
    go: Any = xp.asarray(cond is None or cond, np.bool_)
    going = cond is None or cond
    with limits.holding(gather.values):
        for i in limits.rounds(_trips(M, going, cond is None, body)):
            if not going or i == M:
                break
            go, *values = run(body, xp.asarray(i, np.int64), go, *state)
            state = values[: len(state)]
            gather.take(values[len(state) :])
            if cond is not None:
                going = _truth(xp, go)
    return (*state, *gather.outputs(lambda: run(body, xp.asarray(0, np.int64), go, *state)))


def _trips(M: int | None, going: bool, unasked: bool, body: Graph) -> int | None:
    """How many rounds there will be at most, or None where only the rounds will tell.

    A loop that cannot end before its limit is known here, and so it is refused before its first round.
    """
    if not going or (M is not None and M <= 0):
        return 0
    if M is not None and limits.current().limits.iterations >= M:
        return M
    if unasked or _always(body):
        return sys.maxsize if M is None else M
    return None


def _always(body: Graph) -> bool:
    """Whether the condition that a loop's body gives is plainly true: a constant, or what it was given."""
    made = {name: node for node in body.nodes for name in node.output_names}
    name = body.outputs[0].name if body.outputs else ""
    while name in made and (made[name].domain, made[name].op_type) == ("", "Identity"):
        name = made[name].input_names[0]
    if name in made:
        node = made[name]
        value = node.attributes.get("value") if (node.domain, node.op_type) == ("", "Constant") else None
    else:
        value = body.states.get(name)
    if value is not None:
        return value.size == 1 and bool(value.reshape(-1)[0])
    return len(body.inputs) > 1 and name == body.inputs[1].name


def _truth(xp: Xp, value: Array) -> bool:
    if value.size != 1:
        raise OperatorError(f"the loop's condition must hold one value; it has shape {value.shape}", code="SX402")
    return bool(xp.to_host(value).reshape(-1)[0])


class _Gather:
    """The scan outputs of a body: its outputs from `first` on, one value of each per iteration."""

    def __init__(self, xp: Xp, body: Graph, first: int) -> None:
        if len(body.outputs) < first:
            raise OperatorError(f"the body must give {first} outputs or more; it has {len(body.outputs)}", code="SX407")
        self.xp = xp
        self.declared: Sequence[Value] = body.outputs[first:]
        self.first = first
        self.values: list[list[Array]] = [[] for _ in self.declared]

    def take(self, values: Sequence[Any]) -> None:
        """Keep the scan outputs of one iteration; views are copied, lest each keep a larger array alive."""
        for value, kept, declared in zip(values, self.values, self.declared, strict=True):
            if not hasattr(value, "dtype"):
                raise OperatorError(f"scan output {declared.name!r} is no tensor", code="SX406")
            if kept and (kept[0].shape != value.shape or kept[0].dtype != value.dtype):
                raise OperatorError(
                    f"scan output {declared.name!r} changed from {onnx_name(kept[0].dtype)}{list(kept[0].shape)} "
                    f"to {onnx_name(value.dtype)}{list(value.shape)}", code="SX404")  # fmt: skip
            kept.append(value if value.base is None else value.copy())

    def outputs(
        self, dry: Callable[[], list[Any]], axes: Sequence[int] | None = None, directions: Sequence[int] = ()
    ) -> list[Array]:
        """Each scan output, its values side by side along its axis (0 where `axes` is None), backwards where asked.

        dry: runs the body once, in case there was no iteration and the file does not say a type.
        """
        out = []
        for k, kept in enumerate(self.values):
            kept = kept or [self._like(k, dry)]
            axis = axis_of(axes[k], kept[0].ndim + 1) if axes else 0
            stacked = _namespace(self.xp, kept[0]).stack(kept[::-1] if directions and directions[k] else kept, axis)
            out.append(stacked if self.values[k] else stacked[(slice(None),) * axis + (slice(0, 0),)])
        return out

    def _like(self, k: int, dry: Callable[[], list[Any]]) -> Array:
        """A value like those that scan output `k` would have had; sizes that the file leaves open are 0."""
        declared = self.declared[k]
        if declared.dtype is not None:
            shape = tuple(d if isinstance(d, int) else 0 for d in declared.shape or ())
            return _zeros(self.xp, shape, declared.dtype)
        try:
            return dry()[self.first + k]
        except SonnxError as error:
            what = f"the body ran zero times, and its output {declared.name!r} has no declared type"
            raise OperatorError(what, code="SX404") from error


def _zeros(xp: Xp, shape: Ints, dtype: np.dtype[Any]) -> Array:
    if dtype == STRING:
        return np.full(shape, "", object)
    return np.zeros(shape, dtype) if dtype in HOST_ONLY else xp.zeros(shape, dtype)


def _namespace(xp: Xp, x: Array) -> Xp:
    """Where the value lives: strings and the like stay on the host beside a device."""
    return arrays.numpy if isinstance(x, np.ndarray) else xp


def _flags(name: str, given: Sequence[int] | None, count: int) -> Sequence[int]:
    """A list attribute of Scan, one entry per scan input or output; zeros where it is absent."""
    if given is None or len(given) == 0:
        return (0,) * count
    if len(given) != count:
        raise OperatorError(f"{name} has {len(given)} entries for {count} values", code="SX404")
    if "direction" in name and not set(given) <= {0, 1}:
        raise OperatorError(f"{name} holds 0 (forward) and 1 (backward), not {list(given)}", code="SX404")
    return given


def _parts(values: Sequence[Array], num_scan_inputs: int) -> tuple[list[Array], list[Array]]:
    """The initial states, and the scan inputs."""
    if not 1 <= num_scan_inputs <= len(values):
        raise OperatorError(f"num_scan_inputs is {num_scan_inputs}; the node has {len(values)} inputs", code="SX404")
    n = len(values) - num_scan_inputs
    return list(values[:n]), list(values[n:])


def _length(xs: Sequence[Array], axes: Sequence[int]) -> int:
    lengths = {x.shape[a] for x, a in zip(xs, axes, strict=True)}
    if len(lengths) != 1:
        raise OperatorError(f"the scan inputs have the different lengths {sorted(lengths)}", code="SX404")
    return int(lengths.pop())


@operator("Scan", 9, widen=False)
def scan_9(
    xp: Xp, *values: Array, body: Graph, num_scan_inputs: int, scan_input_axes: Ints | None = None,
    scan_input_directions: Ints | None = None, scan_output_axes: Ints | None = None,
    scan_output_directions: Ints | None = None, run: Run,
) -> tuple[Array, ...]:  # fmt: skip
    """Negative axes came with 11."""
    for axis in (*(scan_input_axes or ()), *(scan_output_axes or ())):
        if axis < 0:
            raise OperatorError(f"axis {axis}: Scan-9 counts axes from the front", code="SX408")
    outputs: tuple[Array, ...] = scan(
        xp, *values, body=body, num_scan_inputs=num_scan_inputs, scan_input_axes=scan_input_axes,
        scan_input_directions=scan_input_directions, scan_output_axes=scan_output_axes,
        scan_output_directions=scan_output_directions, run=run,
    )  # fmt: skip
    return outputs


@operator("Scan", 11, 16, 19, 21, 23, 24, 25, widen=False)
def scan(
    xp: Xp, *values: Array, body: Graph, num_scan_inputs: int, scan_input_axes: Ints | None = None,
    scan_input_directions: Ints | None = None, scan_output_axes: Ints | None = None,
    scan_output_directions: Ints | None = None, run: Run,
) -> tuple[Array, ...]:  # fmt: skip
    """The body takes (states..., elements...) and gives (states..., scan outputs...)."""
    state, xs = _parts(values, num_scan_inputs)
    n = len(state)
    axes = [axis_of(a, x.ndim) for a, x in zip(_flags("scan_input_axes", scan_input_axes, len(xs)), xs, strict=True)]
    if any(x.ndim == 0 for x in xs):
        raise OperatorError("a scan input is a scalar: it has no axis to scan", code="SX408")
    backward = _flags("scan_input_directions", scan_input_directions, len(xs))
    gather = _Gather(xp, body, n)
    k = len(gather.declared)
    out_axes = _flags("scan_output_axes", scan_output_axes, k)
    out_directions = _flags("scan_output_directions", scan_output_directions, k)
    length = _length(xs, axes)
    with limits.holding(gather.values):
        for t in limits.rounds(length):
            here = [length - 1 - t if b else t for b in backward]
            elements = [x[(slice(None),) * a + (i, ...)] for x, a, i in zip(xs, axes, here, strict=True)]
            results = run(body, *state, *elements)
            state = results[:n]
            gather.take(results[n:])

    def dry() -> list[Any]:
        return run(body, *state, *(_zeros(xp, x.shape[:a] + x.shape[a + 1 :], x.dtype) for x, a in zip(xs, axes, strict=True)))

    return (*state, *gather.outputs(dry, out_axes, out_directions))


@operator("Scan", 8, widen=False)
def scan_8(xp: Xp, sequence_lens: Host[Ints] | None = None, *values: Array, body: Graph, directions: Ints | None = None,
           num_scan_inputs: int, run: Run) -> tuple[Array, ...]:  # fmt: skip
    """Version 8 scans axis 1 of each sample of a batch (axis 0), each as long as `sequence_lens` says.

    A backward scan starts at the last element of the sample's own length; outputs beyond that length are zero.
    """
    states, xs = _parts(values, num_scan_inputs)
    if any(x.ndim < 2 for x in xs) or any(s.ndim < 1 for s in states):
        raise OperatorError("Scan-8 needs a batch axis 0 in every input, and a sequence axis 1 in the scan inputs", code="SX404")
    n = len(states)
    backward = _flags("directions", directions, len(xs))
    batch, longest = _length([*states, *xs], [0] * len(values)), _length(xs, [1] * len(xs))
    lengths = sequence_lens if sequence_lens is not None else (longest,) * batch
    if len(lengths) != batch or not all(0 <= length <= longest for length in lengths):
        raise OperatorError(f"sequence_lens {list(lengths)} does not fit {batch} sequences of at most {longest}", code="SX404")

    def body_of(state: Sequence[Array]) -> Callable[[], list[Any]]:
        return lambda: run(body, *state, *(_zeros(xp, x.shape[2:], x.dtype) for x in xs))

    finals: list[list[Array]] = [[] for _ in states]
    scans: list[list[Array]] = [[] for _ in body.outputs[n:]]
    for sample in limits.rounds(batch):
        length = lengths[sample]
        state = [s[sample, ...] for s in states]
        gather = _Gather(xp, body, n)
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
        return tuple(_namespace(xp, values[0]).stack(values) for values in (*finals, *scans))
    empty = _Gather(xp, body, n).outputs(body_of([_zeros(xp, s.shape[1:], s.dtype) for s in states]))
    return (*states, *(_zeros(xp, (0, longest, *y.shape[1:]), y.dtype) for y in empty))


def _padded(xp: Xp, y: Array, length: int) -> Array:
    if len(y) == length:
        return y
    rest = _zeros(xp, (length - len(y), *y.shape[1:]), y.dtype)
    return _namespace(xp, y).concatenate([y, rest], 0)


@operator("SequenceMap", 17, widen=False)
def sequence_map(xp: Xp, input_sequence: list[Array], *additional_inputs: Any, body: Graph, run: Run) -> tuple[list[Any], ...]:
    """Sequences among the inputs are walked together, tensors are the same for every sample."""
    for other in additional_inputs:
        if isinstance(other, list) and len(other) != len(input_sequence):
            raise OperatorError(f"sequences of {len(input_sequence)} and {len(other)} tensors do not go together", code="SX404")
    results: list[list[Any]] = []
    with limits.holding(results):
        for i in limits.rounds(len(input_sequence)):
            others = (other[i] if isinstance(other, list) else other for other in additional_inputs)
            results.append(run(body, input_sequence[i], *others))
    return tuple([r[k] for r in results] for k in range(len(body.outputs)))
