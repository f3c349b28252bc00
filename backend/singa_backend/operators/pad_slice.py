"""Slice and Pad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, Version, operator
from ..ir.shapes import KnownShapes, Shape, Unsure, integers, is_known, listed, open_shape, places
from ..ir.slices import slice_of
from ._api import Array
from ._common import axes_of, axis_of, blank


@operator("Slice", 10, 11, 13, widen=False,
          traits=("keeps_finite", "moves", "elements_of_first", "view", "keeps_weights",
                  "on_sizes"))  # fmt: skip
def slice_(
    xp: Xp, x: Array, starts: Host[Ints], ends: Host[Ints], axes: Host[Ints] | None = None, steps: Host[Ints] | None = None
) -> Array:
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    if not len(starts) == len(ends) == len(axes) == len(steps):
        raise OperatorError(
            f"starts, ends, axes and steps must have equal lengths, got {starts}, {ends}, {axes} and {steps}", code="SX404"
        )
    index = [slice(None)] * x.ndim
    for axis, start, end, step in zip(axes_of(axes, x.ndim), starts, ends, steps, strict=True):
        selected = slice_of(start, end, step, x.shape[axis])
        if selected is None:
            raise OperatorError("steps must not be 0", code="SX404")
        index[axis] = selected
    return x[tuple(index)]


@slice_.shapes
def slice_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape = known.shape(call.inputs[0])
    if shape is None:
        return None
    parts = [listed(known, call, name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1)]
    if any(given and part is None for given, part in parts):
        return tuple(known.fresh() for _ in shape)
    starts, ends, axes, steps = (part for _, part in parts)
    starts, ends, rank, made = starts or (), ends or (), len(shape), list(shape)
    axes = tuple(range(len(starts))) if axes is None else axes
    steps = (1,) * len(starts) if steps is None else steps
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if not isinstance(axis, int):
            return open_shape(known, rank)
        axis = axis_of(axis, rank)
        if step == 0:
            raise Unsure
        size = made[axis]
        if not (isinstance(start, int) and isinstance(end, int) and isinstance(step, int) and step):
            made[axis] = known.fresh()
        elif isinstance(size, int):
            made[axis] = len(places(size, start, end, step))
        elif (start, step) != (0, 1) or end < (1 << 31) - 1:
            made[axis] = known.fresh()
    return tuple(made)


@slice_.sizes
def slice_sizes(known: KnownShapes[Any], call: Any) -> Shape | None:
    sizes = known.sizes(call.inputs[0])
    (_, starts), (_, ends), (placed, axes), (stepped, steps) = (
        integers(known, call, name, i) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    steps = (1,) if not stepped else steps
    if not isinstance(sizes, tuple) or starts is None or ends is None or steps is None:
        return None
    if len(starts) != 1 or len(ends) != 1 or len(steps) != 1 or not steps[0] or (placed and axes not in ((0,), (-1,))):
        return None
    return tuple(sizes[i] for i in places(len(sizes), starts[0], ends[0], steps[0]))


@slice_.gradient
def slice_gradient(op: Op, dy: V, x: V, starts: V, ends: V, axes: V, steps: V) -> V:
    """Without steps, pad dy with zeros; otherwise scatter dy to the indices that the same slice selects."""
    if steps is None:
        starts = op.Cast(starts, to=7)
        axes = op.Range(0, op.Size(starts), 1) if axes is None else op.Cast(axes, to=7)
        size = op.Gather(op.Shape(x), axes)
        front = op.Min(op.Max(op.Where(op.Less(starts, 0), op.Add(starts, size), starts), 0), size)
        back = op.Sub(size, op.Add(front, op.Gather(op.Shape(dy), axes)))
        return op.Pad(dy, op.Concat(front, back, axis=0), None, axes)
    count = op.Size(x)
    places = op.Slice(op.Reshape(op.Range(0, count, 1), op.Shape(x), allowzero=1), starts, ends, axes, steps)
    zeros = op.ConstantOfShape(op.Reshape(count, [1]), value=np.zeros(1, op.dtype(x)))
    flat = op.ScatterElements(zeros, op.Reshape(places, [-1]), op.Reshape(dy, [-1]), axis=0)
    return op.Reshape(flat, op.Shape(x), allowzero=1)


@operator("Slice", 1, widen=False)
def slice_1(xp: Xp, x: Array, *, starts: Ints, ends: Ints, axes: Ints | None = None) -> Array:
    return slice_(xp, x, starts, ends, axes)


@slice_1.decomposition
def slice_1_decomposition(op: Op, x: V, starts: Ints, ends: Ints, axes: Ints | None) -> V:
    return op.Slice(x, list(starts), list(ends), None if axes is None else list(axes))


# --- Pad ------------------------------------------------------------------------------------------------------------


def _reflected(i: np.ndarray, size: int) -> np.ndarray:
    """Reflect indices at the first and the last value, repeatedly if necessary; neither of the two is repeated."""
    if size == 1:
        return np.zeros_like(i)
    i = i % (2 * size - 2)
    return np.where(i < size, i, 2 * size - 2 - i)


_SOURCES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "edge": lambda i, size: np.clip(i, 0, size - 1),
    "reflect": _reflected,
    "wrap": lambda i, size: i % size,
}
"""Mode -> index of the value for position i on an axis of this size; i may be outside the axis on either side."""


def _pad(xp: Xp, x: Array, pads: Sequence[int], mode: str, value: Array | None, axes: Sequence[int]) -> Array:
    """Pad `x`; `pads` has the sizes at the beginning of each axis, then those at the end of each axis.

    Negative sizes remove values before the other side is padded.
    """
    if len(pads) != 2 * len(axes):
        raise OperatorError(f"pads must have two values for each of {len(axes)} axes, got {tuple(pads)}", code="SX404")
    fronts, ends = [0] * x.ndim, [0] * x.ndim
    for axis, front, end in zip(axes, pads[: len(axes)], pads[len(axes) :], strict=True):
        fronts[axis], ends[axis] = front, end
    shape = tuple(front + d + end for front, d, end in zip(fronts, x.shape, ends, strict=True))
    if any(d < 0 for d in shape):
        raise OperatorError(f"pads must not remove more than the shape {x.shape} has, got {tuple(pads)}", code="SX404")
    limits.admit(shape, x.dtype)
    kept = [(max(0, -front), max(0, -front, d - max(0, -end))) for front, d, end in zip(fronts, x.shape, ends, strict=True)]
    x = x[tuple(slice(low, high) for low, high in kept)]
    if mode == "constant":
        if x.shape == shape:
            return x
        y = blank(xp, shape, x.dtype)
        if value is not None:
            y[...] = value
        # If more is removed than exists, nothing of x remains, and the front may still be negative.
        y[tuple(slice(max(0, front), max(0, front) + d) for front, d in zip(fronts, x.shape, strict=True))] = x
        return y
    if mode not in _SOURCES:
        raise OperatorError(f"mode must be one of constant, {', '.join(_SOURCES)}, got {mode!r}", code="SX404")
    for axis, (front, d, size) in enumerate(zip(fronts, x.shape, shape, strict=True)):
        if d == size:
            continue
        if d == 0:
            raise OperatorError(f"axis {axis} must not be empty in mode {mode!r}", code="SX404")
        limits.admit((size,), np.int64)
        source = _SOURCES[mode](np.arange(size) - max(0, front), d)
        x = xp.take(x, xp.asarray(source), axis=axis)
    return x


@operator("Pad", 11, 13, 18, 19, 21, 23, 24, 25, widen=False, traits=("keeps_finite", "moves", "keeps_weights"))
def pad(
    xp: Xp,
    x: Array,
    pads: Host[Ints],
    constant_value: Array | None = None,
    axes: Host[Ints] | None = None,
    *,
    mode: str = "constant",
    version: Version,
) -> Array:
    if mode == "wrap" and version < 19:
        raise OperatorError(f"mode 'wrap' requires Pad-19 or later, got Pad-{version}", code="SX404")
    if constant_value is not None:
        if constant_value.size != 1:
            raise OperatorError(f"constant_value must hold one value, got shape {constant_value.shape}", code="SX404")
        constant_value = constant_value.reshape(())
    return _pad(xp, x, pads, mode, constant_value, range(x.ndim) if axes is None else axes_of(axes, x.ndim))


@pad.shapes
def pad_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, (_, pads), (placed, axes) = known.shape(call.inputs[0]), listed(known, call, "pads", 1), listed(known, call, "axes", 3)
    if shape is None:
        return None
    axes = axes if placed else tuple(range(len(shape)))
    if axes is None or not is_known(axes):
        return open_shape(known, len(shape))
    at, count = axes_of(tuple(map(int, axes)), len(shape)), len(axes)
    if pads is None:
        return open_shape(known, len(shape))
    made = list(shape)
    if len(pads) != 2 * count:
        raise Unsure
    for axis, *ends in zip(at, pads, pads[count:], strict=False):
        numbers = [n for n in (made[axis], *ends) if isinstance(n, int)]
        if len(numbers) == 3 and sum(numbers) < 0:
            raise Unsure
        if not is_known(tuple(ends)) or sum(int(n) for n in ends) != 0:
            made[axis] = sum(numbers) if len(numbers) == 3 else known.fresh()
    return tuple(made)


@pad.gradient
def pad_gradient(op: Op, dy: V, x: V, pads: V, constant_value: V, axes: V, mode: str, needs: tuple[bool, ...]) -> tuple[V, V, V]:
    """Constant padding is removed by the negated pads; in the other modes, each value is added to the value it copies."""
    if mode == "constant":
        dvalue = None
        if needs[2:3] == (True,):
            frame = op.Pad(op.zeros_like(x), pads, op.cast(op.constant(1.0, np.float32), x), axes)
            dvalue = op.Reshape(op.ReduceSum(op.Mul(dy, frame), keepdims=0), op.Shape(constant_value))
        return op.Pad(dy, op.Neg(pads), None, axes), None, dvalue
    count = op.Size(x)
    places = op.Pad(op.Reshape(op.Range(0, count, 1), op.Shape(x), allowzero=1), pads, None, axes, mode=mode)
    zeros = op.ConstantOfShape(op.Reshape(count, [1]), value=np.zeros(1, op.dtype(x)))
    flat = op.ScatterElements(zeros, op.Reshape(places, [-1]), op.Reshape(dy, [-1]), axis=0, reduction="add")
    return op.Reshape(flat, op.Shape(x), allowzero=1), None, None


@operator("Pad", 2, widen=False)
def pad_2(xp: Xp, x: Array, *, pads: Ints, mode: str = "constant", value: float = 0.0) -> Array:
    if mode == "wrap":
        raise OperatorError("mode 'wrap' requires Pad-19 or later, got Pad-2", code="SX404")
    return _pad(xp, x, pads, mode, value, range(x.ndim))


@pad_2.decomposition
def pad_2_decomposition(op: Op, x: V, pads: Ints, mode: str, value: float) -> V:
    return op.Pad(x, list(pads), value, mode=mode)


@operator("Pad", 1, widen=False)
def pad_1(xp: Xp, x: Array, *, paddings: Ints, mode: str = "constant", value: float = 0.0) -> Array:
    if any(p < 0 for p in paddings):
        raise OperatorError(f"paddings must not be negative before Pad-2, got {paddings}", code="SX404")
    return pad_2(xp, x, pads=paddings, mode=mode, value=value)


@pad_1.decomposition
def pad_1_decomposition(op: Op, x: V, paddings: Ints, mode: str, value: float) -> V:
    return op.Pad(x, list(paddings), value, mode=mode)
