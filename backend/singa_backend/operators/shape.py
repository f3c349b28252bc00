"""Operators that rearrange or repeat a tensor's values: reshape, transpose, concatenate, split, tile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, Wanted, operator
from ..ir.shapes import (
    Dim,
    Known,
    KnownShapes,
    Shape,
    Unsure,
    broadcast_shapes,
    integers,
    is_known,
    listed,
    open_shape,
    same_size,
    total,
    valid_axes,
)
from ._api import Array
from ._common import axes_of, axis_of, rows
from ._shapes import FIRST, reshaped, same_sizes


def _from_the_front(axes: Sequence[int], what: str) -> None:
    """Raise OperatorError for a negative axis, in the versions that exclude it."""
    if any(a < 0 for a in axes):
        raise OperatorError(f"before opset 11, axes of {what} must not be negative, got {tuple(axes)}", code="SX408")


@operator("Identity", 1, 13, 14, 16, 19, 21, 23, 24, 25, widen=False,
          traits=("unary", "cannot_fail", "keeps_finite", "moves", "elements_of_first", "view", "rearranges",
                  "keeps_weights"))  # fmt: skip
def identity(xp: Xp, x: Array) -> Array:
    """Return a tensor, in opset 14 or later also a sequence, in 16 or later also an optional, which may be empty."""
    return x


identity.sizes(same_sizes)


@identity.gradient
def identity_gradient(op: Op, dy: V) -> tuple[V]:
    return (dy,)  # without the tuple, a sequence would be interpreted as several gradients


@operator("Shape", 1, 13, 15, 19, 21, 23, 24, 25, widen=False, traits=("cannot_fail", "moves"))
def shape(xp: Xp, x: Array, *, start: int = 0, end: int | None = None) -> Array:
    # Python's slices are clamped to the rank, as in ONNX.
    return xp.asarray(np.array(x.shape[start:end], np.int64))


@shape.shapes
def shape_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    sizes = _slice_of_shape(known, call)
    return (known.fresh(),) if sizes is None else (len(sizes),)


def _slice_of_shape(known: KnownShapes[Any], call: Any) -> Shape | None:
    x = known.shape(call.inputs[0])
    return None if x is None else x[slice(known.attribute(call, "start") or 0, known.attribute(call, "end"))]


shape.sizes(_slice_of_shape)


@operator("Size", 1, 13, 19, 21, 23, 24, 25, widen=False, traits=("cannot_fail", "moves"))
def size(xp: Xp, x: Array) -> Array:
    return xp.asarray(np.array(math.prod(x.shape), np.int64))


@size.shapes
def size_shapes(known: KnownShapes[Any], call: Any) -> Shape:
    return ()


@size.sizes
def size_sizes(known: KnownShapes[Any], call: Any) -> Dim | None:
    x = known.shape(call.inputs[0])
    return None if x is None else total(x, known.fresh)


# --- the same values in the same order ------------------------------------------------------------------------------


@operator("Reshape", 5, 13, 14, 19, 21, 23, 24, 25, widen=False,
          traits=("keeps_finite", "moves", "elements_of_first", "view", "rearranges", "keeps_weights",
                  "on_sizes"))  # fmt: skip
def reshape(xp: Xp, x: Array, shape: Host[Ints], *, allowzero: int = 0) -> Array:
    def wrong(why: str) -> OperatorError:
        return OperatorError(f"cannot reshape {x.shape} to {shape}: {why}", code="SX404")

    limits.check_rank(len(shape))
    sizes = list(shape)
    if min(sizes, default=0) < -1 or sizes.count(-1) > 1:
        raise wrong("at most one dimension may be -1, and none may be less")
    if allowzero and 0 in sizes and -1 in sizes:
        raise wrong("with allowzero, -1 and 0 must not both occur")
    for i, d in enumerate(sizes):
        if d == 0 and not allowzero:
            if i >= x.ndim:
                raise wrong(f"dimension {i} to copy does not exist")
            sizes[i] = x.shape[i]
    if -1 in sizes:
        known = math.prod(d for d in sizes if d != -1)
        if known == 0 or x.size % known:
            raise wrong(f"the other dimensions must divide {x.size} elements")
        sizes[sizes.index(-1)] = x.size // known
    if math.prod(sizes) != x.size:
        raise wrong(f"the number of elements must be {x.size}, got {math.prod(sizes)}")
    return x.reshape(sizes)


@reshape.shapes
def reshape_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    given, target = listed(known, call, "shape", 1)
    if given and target is None:
        lengths = known.shape(call.inputs[1])
        return None if lengths is None else open_shape(known, *lengths)
    return reshaped(known, known.shape(call.inputs[0]), target, bool(known.attribute(call, "allowzero")))


@reshape.sizes
def reshape_sizes(known: KnownShapes[Any], call: Any) -> Known | None:
    sizes, shape = known.sizes(call.inputs[0]), known.shape(call.outputs[0])
    if sizes is None:
        return None
    flat = sizes if isinstance(sizes, tuple) else (sizes,)
    return flat if shape == (len(flat),) else flat[0] if shape == () and len(flat) == 1 else None


@reshape.gradient
def reshape_gradient(op: Op, dy: V, x: V) -> V:
    return op.Reshape(dy, op.Shape(x), allowzero=1)


@operator("Reshape", 1, widen=False)
def reshape_1(xp: Xp, x: Array, *, shape: Ints = ()) -> Array:
    return reshape(xp, x, shape)


@reshape_1.decomposition
def reshape_1_decomposition(op: Op, x: V, shape: Ints) -> V:
    return op.Reshape(x, list(shape))


@operator("Flatten", 11, 13, 21, 23, 24, 25, widen=False,
          traits=("keeps_finite", "moves", "elements_of_first", "view", "rearranges", "keeps_weights", "on_sizes"))  # fmt: skip
def flatten(xp: Xp, x: Array, *, axis: int = 1) -> Array:
    return rows(x, axis)


@flatten.shapes
def flatten_shapes(known: KnownShapes[Any], call: Any) -> Shape:
    shape, axis = known.shape(call.inputs[0]), known.attribute(call, "axis", 1)
    if shape is None:
        return known.fresh(), known.fresh()
    if not (-len(shape) if known.version(call) >= 11 else 0) <= axis <= len(shape):
        raise Unsure
    axis = axis + len(shape) if axis < 0 else axis
    return total(shape[:axis], known.fresh), total(shape[axis:], known.fresh)


@flatten.gradient
def flatten_gradient(op: Op, dy: V, x: V) -> V:
    return op.Reshape(dy, op.Shape(x), allowzero=1)


@operator("Flatten", 1, 9, widen=False)
def flatten_1(xp: Xp, x: Array, *, axis: int = 1) -> Array:
    _from_the_front([axis], "Flatten")
    return rows(x, axis)


@flatten_1.decomposition
def flatten_1_decomposition(op: Op, x: V, axis: int) -> V:
    return op.Flatten(x, axis=axis)


@operator("Squeeze", 13, 21, 23, 24, 25, widen=False,
          traits=("keeps_finite", "moves", "elements_of_first", "view", "rearranges", "keeps_weights", "on_sizes"))  # fmt: skip
def squeeze(xp: Xp, x: Array, axes: Host[Ints] | None = None) -> Array:
    """Remove axes of size 1: all of them without `axes`, none with an empty list."""
    gone = {i for i, d in enumerate(x.shape) if d == 1} if axes is None else {axis_of(a, x.ndim) for a in axes}
    if any(x.shape[a] != 1 for a in gone):
        raise OperatorError(f"axes must be of size 1, got axes {tuple(axes or ())} of shape {x.shape}", code="SX404")
    return x.reshape([d for i, d in enumerate(x.shape) if i not in gone])


def _counted(known: KnownShapes[Any], call: Any, axes: Sequence[Any], rank: int) -> tuple[int, ...]:
    """Axes counted from the front, which they must be before opset 11."""
    made = valid_axes(axes, rank)
    if made is None or (known.version(call) < 11 and made != tuple(axes)):
        raise Unsure
    return made


@squeeze.shapes
def squeeze_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, (given, axes) = known.shape(call.inputs[0]), listed(known, call, "axes", 1)
    if shape is None:
        return None
    if axes is None:
        if given or any(isinstance(d, str) for d in shape):
            return None
        return tuple(d for d in shape if d != 1)
    gone = _counted(known, call, axes, len(shape))
    if any(isinstance(shape[i], int) and shape[i] != 1 for i in gone):
        raise Unsure
    return tuple(d for i, d in enumerate(shape) if i not in gone)


@squeeze.sizes
def squeeze_sizes(known: KnownShapes[Any], call: Any) -> Dim | None:
    sizes, (given, axes) = known.sizes(call.inputs[0]), integers(known, call, "axes", 1)
    return sizes[0] if isinstance(sizes, tuple) and len(sizes) == 1 and (not given or axes in ((0,), (-1,))) else None


@squeeze.gradient
def squeeze_gradient(op: Op, dy: V, x: V) -> V:
    return op.Reshape(dy, op.Shape(x), allowzero=1)


@operator("Squeeze", 11, widen=False)
def squeeze_11(xp: Xp, x: Array, *, axes: Ints | None = None) -> Array:
    return squeeze(xp, x, axes)


@squeeze_11.decomposition
def squeeze_11_decomposition(op: Op, x: V, axes: Ints | None) -> V:
    return op.Squeeze(x, None if axes is None else list(axes))


@operator("Squeeze", 1, widen=False)
def squeeze_1(xp: Xp, x: Array, *, axes: Ints | None = None) -> Array:
    _from_the_front(axes or (), "Squeeze")
    return squeeze(xp, x, axes)


@squeeze_1.decomposition
def squeeze_1_decomposition(op: Op, x: V, axes: Ints | None) -> V:
    return op.Squeeze(x, None if axes is None else list(axes))


@operator("Unsqueeze", 13, 21, 23, 24, 25, widen=False,
          traits=("keeps_finite", "moves", "elements_of_first", "view", "rearranges", "keeps_weights", "on_sizes"))  # fmt: skip
def unsqueeze(xp: Xp, x: Array, axes: Host[Ints]) -> Array:
    """Insert axes; they are counted in the output."""
    rank = x.ndim + len(axes)
    limits.check_rank(rank)
    new = axes_of(axes, rank)
    old = iter(x.shape)
    return x.reshape([1 if i in new else next(old) for i in range(rank)])


@unsqueeze.shapes
def unsqueeze_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, (_, axes) = known.shape(call.inputs[0]), integers(known, call, "axes", 1)
    if shape is None or axes is None:
        return None
    rank = len(shape) + len(axes)
    new, rest = _counted(known, call, axes, rank), iter(shape)
    return tuple(1 if i in new else next(rest) for i in range(rank))


@unsqueeze.sizes
def unsqueeze_sizes(known: KnownShapes[Any], call: Any) -> Shape | None:
    size = known.sizes(call.inputs[0])
    return (size,) if isinstance(size, (int, str)) and integers(known, call, "axes", 1)[1] in ((0,), (-1,)) else None


@unsqueeze.gradient
def unsqueeze_gradient(op: Op, dy: V, x: V) -> V:
    return op.Reshape(dy, op.Shape(x), allowzero=1)


@operator("Unsqueeze", 11, widen=False)
def unsqueeze_11(xp: Xp, x: Array, *, axes: Ints) -> Array:
    return unsqueeze(xp, x, axes)


@operator("Unsqueeze", 1, widen=False)
def unsqueeze_1(xp: Xp, x: Array, *, axes: Ints) -> Array:
    _from_the_front(axes, "Unsqueeze")
    return unsqueeze(xp, x, axes)


@unsqueeze_1.decomposition
@unsqueeze_11.decomposition
def unsqueeze_11_decomposition(op: Op, x: V, axes: Ints) -> V:
    return op.Unsqueeze(x, list(axes))


# --- the same values in another order -------------------------------------------------------------------------------


@operator("Transpose", 1, 13, 21, 23, 24, 25, widen=False,
          traits=("keeps_finite", "moves", "elements_of_first", "view", "rearranges", "keeps_weights", "on_sizes"))  # fmt: skip
def transpose(xp: Xp, x: Array, *, perm: Ints | None = None) -> Array:
    if perm is None:
        return x.transpose()
    if sorted(perm) != list(range(x.ndim)):
        raise OperatorError(f"perm must be a permutation of the {x.ndim} axes of shape {x.shape}, got {perm}", code="SX404")
    return x.transpose(perm)


@transpose.shapes
def transpose_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, perm = known.shape(call.inputs[0]), known.attribute(call, "perm")
    if shape is None:
        return None if perm is None else tuple(known.fresh() for _ in perm)
    order = tuple(reversed(range(len(shape)))) if perm is None else tuple(perm)
    if sorted(order) != list(range(len(shape))):
        raise Unsure
    return tuple(shape[i] for i in order)


@transpose.gradient
def transpose_gradient(op: Op, dy: V, perm: Ints | None) -> V:
    back = None if perm is None else [perm.index(i) for i in range(len(perm))]
    return op.Transpose(dy, perm=back)


@operator("Concat", 4, 11, 13, widen=False, traits=("keeps_finite", "moves", "on_sizes"))
def concat(xp: Xp, *xs: Array, axis: int) -> Array:
    """Concatenate; negative axes count from the end in every version: opset 4 does not specify them, but models use them."""
    axis = axis_of(axis, xs[0].ndim)
    others = {(*x.shape[:axis], *x.shape[axis + 1 :]) if x.ndim > axis else None for x in xs}
    if len(others) > 1 or len({x.ndim for x in xs}) > 1:
        raise OperatorError(f"shapes must be equal except along axis {axis}, got {[x.shape for x in xs]}", code="SX404")
    return xp.concatenate(xs, axis=axis)


@concat.shapes
def concat_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shapes = [known.shape(i) for i in call.inputs]
    first, axis = next((s for s in shapes if s is not None), None), known.attribute(call, "axis", 1)
    if first is None:
        return None
    axis = axis_of(axis, len(first))
    if any(s is not None and len(s) != len(first) for s in shapes):
        raise Unsure
    made: list[Dim] = []
    for i in range(len(first)):
        column = [known.fresh() if s is None else s[i] for s in shapes]
        numbers = [d for d in column if isinstance(d, int)]
        if i == axis:
            made.append(column[0] if len(column) == 1 else sum(numbers) if len(numbers) == len(column) else known.fresh())
        elif len(set(numbers)) > 1:
            raise Unsure
        else:
            made.append(same_size(column))
    return tuple(made)


@concat.sizes
def concat_sizes(known: KnownShapes[Any], call: Any) -> Shape | None:
    parts = [known.sizes(i) for i in call.inputs]
    if known.attribute(call, "axis") not in FIRST or not all(isinstance(p, tuple) for p in parts):
        return None
    return tuple(d for p in parts if isinstance(p, tuple) for d in p)


@concat.gradient
def concat_gradient(op: Op, dy: V, xs: list[V], axis: int) -> list[V]:
    if len(xs) == 1:
        return [dy]
    if op.shape(xs[0]) is not None:
        axis %= op.rank(xs[0])
    sizes = op.Concat(*(op.Shape(x, start=axis, end=None if axis == -1 else axis + 1) for x in xs), axis=0)
    return list(op.Split(dy, sizes, axis=axis, outputs=len(xs)))


@operator("Concat", 1, widen=False)
def concat_1(xp: Xp, *xs: Array, axis: int = 1) -> Array:
    return concat(xp, *xs, axis=axis)


@concat_1.decomposition
def concat_1_decomposition(op: Op, xs: list[V], axis: int) -> V:
    return op.Concat(*xs, axis=axis)


def _split(x: Array, sizes: Sequence[int] | None, axis: int, wanted: Sequence[bool]) -> tuple[Array, ...]:
    """Split `x` along `axis` into parts of these sizes, or into one equal part for each output of the node."""
    axis = axis_of(axis, x.ndim)
    d, count = x.shape[axis], len(wanted)
    if sizes is None:
        if d % count:
            raise OperatorError(
                f"the size of axis {axis} must be a multiple of {count}, the number of outputs, got {d}", code="SX404"
            )
        sizes = [d // count] * count
    if len(sizes) != count or any(s < 0 for s in sizes) or sum(sizes) != d:
        raise OperatorError(
            f"split must have {count} sizes that add up to {d}, the size of axis {axis}, got {tuple(sizes)}", code="SX404"
        )
    ends = np.cumsum(sizes).tolist()
    return tuple(x[(slice(None),) * axis + (slice(end - s, end),)] for s, end in zip(sizes, ends, strict=True))


@operator("Split", 18, widen=False, traits=("keeps_finite", "moves", "elements_of_first", "view", "keeps_weights", "on_sizes"))
def split(
    xp: Xp, x: Array, split: Host[Ints] | None = None, *, axis: int = 0, num_outputs: int | None = None, wanted: Wanted
) -> tuple[Array, ...]:
    """Split; if num_outputs does not divide the size, the part size is rounded up and the last part is smaller."""
    if num_outputs is None:
        return _split(x, split, axis, wanted)
    if split is not None:
        raise OperatorError("only one of num_outputs and split must be present, got both", code="SX404")
    if num_outputs != len(wanted):
        raise OperatorError(
            f"num_outputs must be {len(wanted)}, the number of the node's outputs, got {num_outputs}", code="SX404"
        )
    d = x.shape[axis_of(axis, x.ndim)]
    part = -(-d // num_outputs)
    return _split(x, [*[part] * (num_outputs - 1), d - part * (num_outputs - 1)], axis, wanted)


@split.shapes
def split_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    shape, axis, count = known.shape(call.inputs[0]), known.attribute(call, "axis", 0), len(call.outputs)
    if shape is None:
        return None
    axis = axis_of(axis, len(shape))
    size, (given, parts), parted = shape[axis], listed(known, call, "split", 1), known.attribute(call, "num_outputs")
    if parted is not None and (given or parted != count):
        raise Unsure
    if not given and isinstance(size, int):
        if size % count and parted is None:
            raise Unsure
        part = -(-size // count)
        parts = tuple(min(part, size - i * part) for i in range(count))
    elif not given:
        parts = (known.fresh(),) * count
        if parted is not None:
            parts = (*parts[:-1], known.fresh())  # the last part may be smaller
    elif parts is None:
        parts = tuple(known.fresh() for _ in range(count))
    elif len(parts) != count or (is_known((*parts, size)) and sum(int(n) for n in parts) != size):
        raise Unsure
    return [(*shape[:axis], part, *shape[axis + 1 :]) for part in parts]


@split.gradient
def split_gradient(op: Op, dys: list[V], ys: list[V], axis: int) -> V:
    return op.Concat(*(op.zeros_like(y) if dy is None else dy for y, dy in zip(ys, dys, strict=True)), axis=axis)


@operator("Split", 13, widen=False)
def split_13(xp: Xp, x: Array, split: Host[Ints] | None = None, *, axis: int = 0, wanted: Wanted) -> tuple[Array, ...]:
    return _split(x, split, axis, wanted)


@split_13.decomposition
def split_13_decomposition(op: Op, x: V, split: V, axis: int, wanted: tuple[bool, ...]) -> list[V]:
    return _split_into(op, x, split, axis, len(wanted))


def _split_into(op: Op, x: V, sizes: V, axis: int, count: int) -> list[V]:
    """Split in the form of opset 18, which has an attribute for the number of equal parts."""
    made = op.call("Split", [x, sizes], {"axis": axis, "num_outputs": count if sizes is None else None}, count)
    return list(made)


@operator("Split", 2, 11, widen=False)
def split_2(xp: Xp, x: Array, *, axis: int = 0, split: Ints | None = None, wanted: Wanted) -> tuple[Array, ...]:
    return _split(x, split, axis, wanted)


@split_2.decomposition
def split_2_decomposition(op: Op, x: V, axis: int, split: Ints | None, wanted: tuple[bool, ...]) -> list[V]:
    return _split_into(op, x, None if split is None else list(split), axis, len(wanted))


@operator("Split", 1, widen=False, settings=("split",))
def split_1(
    xp: Xp, x: Array, sizes: Host[Ints] | None = None, *, axis: int = 0, split: Ints | None = None, wanted: Wanted
) -> tuple[Array, ...]:
    """The sizes may be an input of the data's float type; the default axis, which ONNX omits here, is 0 as in version 2."""
    return _split(x, split if sizes is None else [int(s) for s in sizes], axis, wanted)


@split_1.decomposition
def split_1_decomposition(op: Op, x: V, sizes: V, axis: int, split: Ints | None, wanted: tuple[bool, ...]) -> list[V]:
    given = None if split is None else list(split)
    return _split_into(op, x, given if sizes is None else op.Cast(sizes, to=7), axis, len(wanted))


# --- repeated values ------------------------------------------------------------------------------------------------


@operator("Expand", 8, 13, widen=False, traits=("keeps_finite", "moves", "elements_of_first", "keeps_weights"))
def expand(xp: Xp, x: Array, shape: Host[Ints]) -> Array:
    """Broadcast in both directions: where `shape` has 1, the input's size is kept."""
    limits.check_rank(len(shape))
    try:
        return xp.broadcast_to(x, np.broadcast_shapes(x.shape, shape))
    except ValueError:
        raise OperatorError(f"shapes {x.shape} and {shape} do not broadcast", code="SX404") from None


@expand.shapes
def expand_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, target, lengths = known.shape(call.inputs[0]), known.sizes(call.inputs[1]), known.shape(call.inputs[1])
    if not isinstance(target, tuple):
        target = None if lengths is None else open_shape(known, *lengths)
    if any(isinstance(d, int) and d < 0 for d in target or ()):
        raise Unsure
    return broadcast_shapes(known, [shape, target])


@expand.gradient
def expand_gradient(op: Op, dy: V, x: V) -> V:
    return op.sum_to(dy, x)


@operator("Tile", 6, 13, widen=False, traits=("keeps_finite", "moves", "elements_of_first", "keeps_weights"))
def tile(xp: Xp, x: Array, repeats: Host[Ints]) -> Array:
    if len(repeats) != x.ndim or any(r < 0 for r in repeats):
        raise OperatorError(
            f"repeats must have one non-negative value for each axis of shape {x.shape}, got {repeats}", code="SX404"
        )
    return xp.tile(x, repeats)


@tile.shapes
def tile_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, repeats = known.shape(call.inputs[0]), known.sizes(call.inputs[1])
    if shape is None or not isinstance(repeats, tuple):
        return None if shape is None else open_shape(known, len(shape))
    if len(repeats) != len(shape):
        raise Unsure
    pairs = zip(shape, repeats, strict=True)
    return tuple(d if r == 1 else d * r if isinstance(d, int) and isinstance(r, int) else known.fresh() for d, r in pairs)


@tile.gradient
def tile_gradient(op: Op, dy: V, x: V, repeats: V) -> V:
    """Reshape (r1 d1, r2 d2, ...) to (r1, d1, r2, d2, ...) and sum the copies."""
    rank = op.rank(x)
    if not rank:
        return dy
    pairs = op.Reshape(op.Concat(op.Unsqueeze(repeats, [1]), op.Unsqueeze(op.Shape(x), [1]), axis=1), [-1])
    return op.ReduceSum(op.Reshape(dy, pairs, allowzero=1), list(range(0, 2 * rank, 2)), keepdims=0)


@operator("Tile", 1, widen=False, settings=("tiles", "axis"))
def tile_1(xp: Xp, x: Array, tiles: Host[int], axis: Host[int]) -> Array:
    """Repeat one axis; `tiles` and `axis` are floats of the data's type."""
    axis = axis_of(axis, x.ndim)
    return tile(xp, x, tuple(tiles if i == axis else 1 for i in range(x.ndim)))


@tile_1.decomposition
def tile_1_decomposition(op: Op, x: V, tiles: V, axis: V) -> V:
    rank = op.rank(x)
    here = op.Equal(op.Range(0, rank, 1), op.Mod(op.Cast(axis, to=7), rank))
    return op.Tile(x, op.Where(op.Reshape(here, [-1]), op.Cast(tiles, to=7), 1))
