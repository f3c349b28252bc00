"""Gather and scatter: values read from, or written to, the positions in a tensor of indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import dtypes, limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Version, operator
from ..ir.shapes import Dim, Known, KnownShapes, Shape, is_known
from ._api import Array
from ._common import axis_of, length, other_factors
from ._shapes import FIRST


@operator("Gather", 1, 11, 13, widen=False, traits=("keeps_finite", "moves", "elements_of_first", "on_sizes", "reads_quantized"))
def gather(xp: Xp, x: Array, indices: Array, *, axis: int = 0) -> Array:
    """Gather-1 does not specify negative indices; models of that time use them, so they also count from the end."""
    axis = axis_of(axis, x.ndim)
    i = xp.indices(indices, x.shape[axis])
    taken = xp.take(x, i.reshape(-1), axis=axis)
    return taken.reshape(x.shape[:axis] + i.shape + x.shape[axis + 1 :])


@gather.shapes
def gather_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    table, index, axis = known.shape(call.inputs[0]), known.shape(call.inputs[1]), known.attribute(call, "axis", 0)
    if table is None or index is None:
        return None
    axis = axis_of(axis, len(table))
    return *table[:axis], *index, *table[axis + 1 :]


@gather.sizes
def gather_sizes(known: KnownShapes[Any], call: Any) -> Known | None:
    sizes, at = known.sizes(call.inputs[0]), known.sizes(call.inputs[1])
    if not isinstance(sizes, tuple) or at is None or not is_known(at) or known.attribute(call, "axis", 0) not in FIRST:
        return None
    wanted = [int(i) for i in at] if isinstance(at, tuple) else [int(at)]
    if not all(-len(sizes) <= i < len(sizes) for i in wanted):
        return None
    return tuple(sizes[i] for i in wanted) if isinstance(at, tuple) else sizes[wanted[0]]


@gather.gradient
def gather_gradient(op: Op, dy: V, x: V, indices: V, axis: int) -> V:
    return given_back(op, dy, x, indices, axis)


def given_back(op: Op, dy: V, x: V, indices: V, axis: int) -> V:
    """Add dy to zeros at the indices; the axis is moved to the front, where ScatterND adds whole slices."""
    places = op.Unsqueeze(op.Cast(indices, to=7), [-1])
    if axis == 0:  # ranks are not needed here: that of a Loop's iteration counter, used as an index, may be unknown
        return op.ScatterND(op.zeros_like(x), places, dy, reduction="add")
    rank, more = op.rank(x), op.rank(indices)
    axis %= rank
    front = [axis, *(a for a in range(rank) if a != axis)]
    dy = op.Transpose(dy, perm=[*range(axis, axis + more), *range(axis), *range(axis + more, rank + more - 1)])
    zeros = op.Transpose(op.zeros_like(x), perm=front)
    return op.Transpose(op.ScatterND(zeros, places, dy, reduction="add"), perm=[front.index(a) for a in range(rank)])


def _grid(xp: Xp, shape: tuple[int, ...], axes: int) -> list[Array]:
    """Return the coordinates of each position along the first `axes` axes, shaped to broadcast to `shape`."""
    return [xp.arange(shape[k]).reshape((-1,) + (1,) * (len(shape) - k - 1)) for k in range(axes)]


def _elements(xp: Xp, x: Array, indices: Array, axis: int) -> tuple[Array, ...]:
    """Return the positions of GatherElements and ScatterElements: those of the indices, with `indices` along `axis`."""
    axis = axis_of(axis, x.ndim)
    if indices.ndim != x.ndim or any(n > d for k, (n, d) in enumerate(zip(indices.shape, x.shape, strict=True)) if k != axis):
        raise OperatorError(
            f"indices must have the rank of data and fit it except on axis {axis}, got shapes {indices.shape} and {x.shape}",
            code="SX404",
        )
    place = _grid(xp, indices.shape, x.ndim)
    place[axis] = xp.indices(indices, x.shape[axis])
    return tuple(place)


@operator("GatherElements", 11, 13, widen=False, traits=("keeps_finite", "moves", "on_sizes"))
def gather_elements(xp: Xp, x: Array, indices: Array, *, axis: int = 0) -> Array:
    return x[_elements(xp, x, indices, axis)]


@gather_elements.gradient
def gather_elements_gradient(op: Op, dy: V, x: V, indices: V, axis: int) -> V:
    return op.ScatterElements(op.zeros_like(x), indices, dy, axis=axis, reduction="add")


def _slices(xp: Xp, x: Array, indices: Array, batch: int = 0) -> tuple[Array, ...]:
    """Return the positions of GatherND and ScatterND: each row along the last axis of `indices` is an index into `x`."""
    depth = indices.shape[-1] if indices.ndim else 0
    if x.shape[:batch] != indices.shape[:batch] or not 1 <= depth <= x.ndim - batch or not 0 <= batch < indices.ndim:
        raise OperatorError(
            f"indices must match data with batch_dims {batch}, got shapes {indices.shape} and {x.shape}", code="SX404"
        )
    place = [xp.indices(indices[..., k], x.shape[batch + k]) for k in range(depth)]
    return (*_grid(xp, indices.shape[:-1], batch), *place)


@operator("GatherND", 11, 12, 13, widen=False, traits=("keeps_finite", "moves", "on_sizes"))
def gather_nd(xp: Xp, x: Array, indices: Array, *, batch_dims: int = 0) -> Array:
    place = _slices(xp, x, indices, batch_dims)
    limits.admit((*indices.shape[:-1], *x.shape[len(place) :]), x.dtype)
    return x[(*place, ...)]  # with the ellipsis the result is always an array, also for a single string


@gather_nd.gradient
def gather_nd_gradient(op: Op, dy: V, x: V, indices: V, batch_dims: int) -> V:
    """The batch axes become the first columns of the indices: each counts along its axis."""
    if batch_dims:
        rows = op.Concat(op.Shape(indices, start=0, end=-1), [1], axis=0)
        columns = []
        for k in range(batch_dims):
            count = op.Range(0, length(op, x, k), 1)
            columns.append(op.Expand(op.Reshape(count, [-1] + [1] * (op.rank(indices) - 1 - k)), rows))
        indices = op.Concat(*columns, indices, axis=-1)
    return op.ScatterND(op.zeros_like(x), indices, dy, reduction="add")


def _scattered(xp: Xp, x: Array, place: tuple[Array, ...], updates: Array, reduction: str, version: int) -> Array:
    """Copy `x` and write the updates at these positions or, with a reduction, combine them one after the other."""
    known = ["none", *(["add", "mul"] if version >= 16 else []), *(["max", "min"] if version >= 18 else [])]
    if reduction not in known:
        raise OperatorError(f"reduction must be one of {', '.join(known)} in version {version}, got {reduction!r}", code="SX404")
    # Narrow floats are accumulated in float32 and rounded once.
    wide = np.float32 if reduction != "none" and x.dtype in dtypes.NARROW_FLOATS else x.dtype
    y = x.astype(wide)  # a copy
    if updates.size:
        xp.scatter(y, place, updates.astype(wide, copy=False), reduction)
    return y


@operator("ScatterElements", 11, 13, 16, 18, widen=False, traits=("keeps_finite", "moves", "shape_of_first", "on_sizes"))
def scatter_elements(
    xp: Xp, x: Array, indices: Array, updates: Array, *, axis: int = 0, reduction: str = "none", version: Version
) -> Array:
    if updates.shape != indices.shape:
        raise OperatorError(f"updates and indices must have equal shapes, got {updates.shape} and {indices.shape}", code="SX404")
    return _scattered(xp, x, _elements(xp, x, indices, axis), updates, reduction, version)


@scatter_elements.gradient
def scatter_elements_gradient(op: Op, dy: V, y: V, x: V, indices: V, updates: V, axis: int, reduction: str) -> tuple[V, V, V]:
    def write(x: V, updates: V, reduction: str) -> V:
        return op.ScatterElements(x, indices, updates, axis=axis, reduction=reduction)

    return _unscattered(op, dy, y, x, updates, reduction, write, lambda x: op.GatherElements(x, indices, axis=axis))


def _unscattered(
    op: Op, dy: V, y: V, x: V, updates: V, reduction: str, write: Callable[[V, V, str], V], read: Callable[[V], V]
) -> tuple[V, V, V]:
    """Return the gradients of a scatter of updates to positions of x; `read` gathers the values at these positions."""
    if reduction == "none":  # which of several updates of a position remains is undefined: each has the gradient
        return write(dy, op.zeros_like(updates), "none"), None, read(dy)
    if reduction == "add":
        return dy, None, read(dy)
    if reduction == "mul":
        # A factor's gradient is the product of the others: that of the nonzero ones if no other is 0, otherwise 0.
        zx, zu = op.Equal(x, 0), op.Equal(updates, 0)
        product = write(op.Where(zx, 1, x), op.Where(zu, 1, updates), "mul")
        zeros = write(op.cast(zx, x), op.cast(zu, x), "add")
        vanishing = write(op.Where(zx, x, 0), op.Where(zu, updates, 0), "add")
        du = op.Mul(read(dy), other_factors(op, updates, read(product), read(zeros), read(vanishing)))
        return op.Mul(dy, other_factors(op, x, product, zeros, vanishing)), None, du
    # max, min: equal values share the gradient, as in PyTorch.
    mine, theirs = op.cast(op.Equal(x, y), x), op.cast(op.Equal(updates, read(y)), x)
    share = op.Div(dy, write(mine, theirs, "add"))
    return op.Mul(mine, share), None, op.Mul(theirs, read(share))


@operator("Scatter", 9, 11, widen=False)
def scatter(xp: Xp, x: Array, indices: Array, updates: Array, *, axis: int = 0) -> Array:
    """The old name of ScatterElements."""
    return scatter_elements(xp, x, indices, updates, axis=axis, version=11)


@scatter.decomposition
def scatter_decomposition(op: Op, x: V, indices: V, updates: V, axis: int) -> V:
    return op.ScatterElements(x, indices, updates, axis=axis)


@operator("ScatterND", 11, 13, 16, 18, widen=False, traits=("keeps_finite", "moves", "shape_of_first", "on_sizes"))
def scatter_nd(xp: Xp, x: Array, indices: Array, updates: Array, *, reduction: str = "none", version: Version) -> Array:
    if indices.shape[-1:] == (0,):  # an empty index selects all of x: add an axis with one element in front
        zeros = xp.zeros((*indices.shape[:-1], 1), np.int64)
        return scatter_nd(xp, x[None], zeros, updates, reduction=reduction, version=version)[0]
    place = _slices(xp, x, indices)
    if updates.shape != indices.shape[:-1] + x.shape[len(place) :]:
        raise OperatorError(
            f"updates must match data of shape {x.shape} and indices of shape {indices.shape}, got shape {updates.shape}",
            code="SX404",
        )
    return _scattered(xp, x, place, updates, reduction, version)


@scatter_nd.gradient
def scatter_nd_gradient(op: Op, dy: V, y: V, x: V, indices: V, updates: V, reduction: str) -> tuple[V, V, V]:
    def write(x: V, updates: V, reduction: str) -> V:
        return op.ScatterND(x, indices, updates, reduction=reduction)

    def read(x: V) -> V:
        """GatherND does not accept an empty index: an axis in front of x makes it one column."""
        column = op.Expand([0], op.Concat(op.Shape(indices, start=0, end=-1), [1], axis=0))
        return op.GatherND(op.Unsqueeze(x, [0]), op.Concat(column, indices, axis=-1))

    return _unscattered(op, dy, y, x, updates, reduction, write, read)


@operator("TensorScatter", 24, widen=False, traits=("moves",))
def tensor_scatter(
    xp: Xp, past: Array, update: Array, write_indices: Array | None = None, *, axis: int = -2, mode: str = "linear"
) -> Array:
    """Write `update` into each sample of a cache at the sample's position; "circular" continues at the front."""
    axis = axis_of(axis, past.ndim)
    if axis == 0:
        raise OperatorError("the sequence axis must not be the batch axis, 0", code="SX408")
    if mode not in ("linear", "circular"):
        raise OperatorError(f"mode must be linear or circular, got {mode!r}", code="SX404")
    batch, size, count = past.shape[0], past.shape[axis], update.shape[axis] if update.ndim == past.ndim else -1
    if update.shape != (*past.shape[:axis], count, *past.shape[axis + 1 :]) or count > size:
        raise OperatorError(
            f"update must fit a cache of shape {past.shape} along axis {axis}, got shape {update.shape}", code="SX404"
        )
    start = xp.zeros((batch,), np.int64) if write_indices is None else write_indices
    if start.shape != (batch,):
        raise OperatorError(f"write_indices must have shape ({batch},), got {start.shape}", code="SX404")
    at = start[:, None] + xp.arange(count)
    at = at % max(size, 1) if mode == "circular" else xp.indices(at, size, negative=False)
    y = past.copy()
    xp.moveaxis(y, axis, 1)[xp.arange(batch)[:, None], at] = xp.moveaxis(update, axis, 1)
    return y


@tensor_scatter.gradient
def tensor_scatter_gradient(
    op: Op, dy: V, past: V, update: V, write_indices: V, axis: int, mode: str, needs: tuple[bool, ...]
) -> tuple[V, V]:
    """Overwritten values have gradient 0; the gradient of the update is dy at the positions it was written to."""
    axis %= op.rank(past)
    dpast = op.TensorScatter(dy, op.zeros_like(update), write_indices, axis=axis, mode=mode) if needs[0] else None
    if not needs[1]:
        return dpast, None
    if write_indices is None:
        write_indices = op.Expand([0], op.Shape(past, start=0, end=1))
    count = op.Range(0, length(op, update, axis), 1)
    at = op.Add(op.Unsqueeze(write_indices, [1]), count)
    if mode == "circular":
        at = op.Mod(at, op.Shape(past, start=axis, end=axis + 1))
    perm = [0, axis, *op.axes_but(past, 0, axis)]
    taken = op.GatherND(op.Transpose(dy, perm=perm), op.Unsqueeze(at, [2]), batch_dims=1)
    return dpast, op.Transpose(taken, perm=[perm.index(a) for a in range(len(perm))])


@operator("Compress", 9, 11, 28, widen=False, traits=("moves",))
def compress(xp: Xp, x: Array, condition: Array, *, axis: int | None = None) -> Array:
    """Select slices; the condition may be shorter than the axis, and slices after its end are dropped."""
    if condition.ndim != 1:
        raise OperatorError(f"condition must have rank 1, got shape {condition.shape}", code="SX404")
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis_of(axis, x.ndim))
    return xp.take(x, xp.indices(xp.flatnonzero(condition), x.shape[axis]), axis=axis)


@compress.gradient
def compress_gradient(op: Op, dy: V, x: V, condition: V, axis: int | None) -> V:
    places = op.Squeeze(op.NonZero(condition), [0])
    if axis is not None:
        return given_back(op, dy, x, places, axis)
    return op.Reshape(given_back(op, dy, op.Reshape(x, [-1]), places, 0), op.Shape(x), allowzero=1)


@operator("NonZero", 9, 13, widen=False, traits=("moves", "on_sizes"))
def non_zero(xp: Xp, x: Array) -> Array:
    """A scalar does not have axes: the shape of its indices is (0, 1) or (0, 0)."""
    places = xp.nonzero(x.reshape(1) if x.ndim == 0 else x)
    return xp.stack(places).astype(np.int64) if x.ndim else xp.zeros((0, len(places[0])), np.int64)


@non_zero.shapes
def non_zero_shapes(known: KnownShapes[Any], call: Any) -> Shape:
    shape = known.shape(call.inputs[0])
    rank: Dim = known.fresh() if shape is None else len(shape)
    return rank, known.fresh()
