"""DeformConv: a convolution whose windows read at positions that depend on the data."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Ints, operator
from ._api import Array
from ._common import length
from ._flops import window
from ._sampling import linear_taps, read
from .conv import filter_windows, per_channel


@operator("DeformConv", 19, 22, traits=("product", "linear"), weights={1: "the weight", 3: "the bias"})
def deform_conv(
    xp: Xp,
    x: Array,
    w: Array,
    offset: Array,
    b: Array | None = None,
    mask: Array | None = None,
    *,
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    offset_group: int = 1,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Convolve with each cell of each window moved by `offset`, interpolated linearly and multiplied by `mask`."""
    at = filter_windows(x, w, group, kernel_shape, strides, pads, dilations, "NOTSET")
    (n, c), m = x.shape[:2], w.shape[0]
    rank, cells, out = len(at.sizes), math.prod(at.kernel), math.prod(at.counts)
    if offset_group < 1 or c % offset_group:
        raise OperatorError(f"offset_group must be a positive divisor of {c} channels, got {offset_group}", code="SX404")
    for name, value, per_cell in (("offset", offset, rank), ("mask", mask, 1)):
        shape = (n, offset_group * cells * per_cell, *at.counts)
        if value is not None and tuple(value.shape) != shape:
            raise OperatorError(f"{name} must have shape {shape}, got {value.shape}", code="SX404")
    limits.admit((2**rank, n, offset_group, cells, out), np.int64)
    offset = offset.reshape(n, offset_group, cells, rank, *at.counts)
    places = []
    for axis in range(rank):
        along = tuple(count if i == axis else 1 for i, count in enumerate(at.counts))
        j = np.indices(at.kernel)[axis].reshape(cells, 1) * at.dilations[axis]
        o = np.arange(at.counts[axis]).reshape(1, -1) * at.strides[axis] - at.begins[axis]
        places.append(offset[:, :, :, axis] + xp.asarray((j + o).reshape(cells, *along).astype(x.dtype)))
    index, weight = corners(xp, places, at.sizes)
    if mask is not None:
        weight = weight * mask.reshape(1, n, offset_group, cells, *at.counts)
    index, weight = (v.reshape(2**rank, n, offset_group, cells * out) for v in (index, weight))
    planes = x.reshape(n, offset_group, c // offset_group, math.prod(at.sizes))
    filters = w.reshape(group, m // group, math.prod(w.shape[1:]))
    y = xp.zeros((n, m, *at.counts), dtype=x.dtype)
    if x.size == 0 or y.size == 0:
        index = index[:0]  # nothing to read
    for i in limits.rounds(n):
        columns = xp.zeros((offset_group, c // offset_group, cells * out), dtype=x.dtype)
        for g in range(offset_group):
            for corner in range(len(index)):
                columns[g] += xp.take(planes[i, g], index[corner, i, g], axis=1) * weight[corner, i, g]
        y[i] = xp.matmul(filters, columns.reshape(group, math.prod(w.shape[1:]), out)).reshape(m, *at.counts)
    return y if b is None else y + per_channel(b, m, y.ndim)


deform_conv.flops(window(1))


@deform_conv.decomposition
def deform_conv_decomposition(
    op: Op,
    x: V,
    w: V,
    offset: V,
    b: V,
    mask: V,
    dilations: Ints | None,
    group: int,
    offset_group: int,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    """Multiply the pixels of each window, as columns, by the filters."""
    rank = op.rank(x) - 2
    begins, steps, gaps = (pads or (0,) * rank)[:rank], strides or (1,) * rank, dilations or (1,) * rank
    kernel, counts = op.Shape(w, start=2), op.Shape(offset, start=2)
    cells, out = (op.ReduceProd(s, keepdims=1) for s in (kernel, counts))
    images = op.Mul(op.Shape(x, end=1), offset_group)
    offset = op.Reshape(offset, op.Concat(images, cells, [rank], out, axis=0), allowzero=1)
    sizes = [length(op, x, axis + 2) for axis in range(rank)]
    axes = []
    for axis, size in enumerate(sizes):
        j = op.Mul(_numbers(op, kernel, axis, rank), gaps[axis])
        o = op.Sub(op.Mul(_numbers(op, counts, axis, rank), steps[axis]), begins[axis])
        places = op.Add(op.Unsqueeze(j, [1]), o)
        at = op.Add(op.Gather(offset, axis, axis=2), op.cast(places, offset))
        axes.append(linear_taps(op, op.Flatten(at, axis=1), size))
    own = op.Div(op.Shape(x, start=1, end=2), offset_group)
    pixels = op.Reshape(x, op.Concat(images, own, op.ReduceProd(op.Shape(x, start=2), keepdims=1), axis=0), allowzero=1)
    columns = read(op, pixels, axes, sizes)
    if mask is not None:
        columns = op.Mul(columns, op.Reshape(mask, op.Concat(images, [1], op.Mul(cells, out), axis=0), allowzero=1))
    each = op.ReduceProd(op.Shape(w, start=1), keepdims=1)
    columns = op.Reshape(columns, op.Concat(op.Shape(x, end=1), [group], each, out, axis=0), allowzero=1)
    filters = op.Reshape(w, op.Concat([group], op.Div(op.Shape(w, end=1), group), each, axis=0), allowzero=1)
    y = op.Reshape(op.MatMul(filters, columns), op.Concat(op.Shape(x, end=1), op.Shape(w, end=1), counts, axis=0), allowzero=1)
    return y if b is None else op.Add(y, op.Unsqueeze(b, list(range(1, rank + 1))))


def _numbers(op: Op, shape: V, axis: int, rank: int) -> V:
    """Return the index along an axis of each cell of a box, in row-major order."""
    along = op.Unsqueeze(op.Range(0, op.Gather(shape, axis), 1), [a for a in range(rank) if a != axis])
    return op.Reshape(op.Expand(along, shape), op.ReduceProd(shape, keepdims=1), allowzero=1)


def corners(xp: Xp, places: list[Array], sizes: Ints) -> tuple[Array, Array]:
    """Return, for each corner of the unit cell around each place, the row-major index of its cell and its weight.

    The weight of a corner outside the image is 0; a place that is NaN has weights of NaN.
    """
    index, weight = [], []
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        number, share = 0, 1
        for place, size, up in zip(places, sizes, corner, strict=True):
            place = xp.clip(place, -2, size + 1)
            low = xp.floor(place)
            inside = (low >= -up) & (low < size - up)
            number = number * size + xp.where(inside, low + up, 0).astype(np.int64)
            share = share * (place - low if up else 1 - (place - low)) * inside
        index.append(number)
        weight.append(share)
    return xp.stack(index), xp.stack(weight)
