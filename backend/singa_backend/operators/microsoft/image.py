"""Operators on images: sampling, crops, and pooling under a mask."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ... import dtypes, limits
from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape
from ...ir.windows import SAME, windows
from .._common import length
from .._shapes import pooled_shapes
from .._windows import spatial
from ..sampling import grid_sample_16_decomposition, grid_sample_shapes
from ._api import Array, Host, Ints, Op, V, Xp, microsoft

LOWEST = float(np.finfo(np.float32).min)


@microsoft("GridSample", 1, widen=False)
def ms_grid_sample(op: Op, x: V, grid: V, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros") -> V:
    """Sample an image at the places of a grid, as GridSample-16."""
    return grid_sample_16_decomposition(op, x, grid, align_corners, mode, padding_mode)


@ms_grid_sample.accepts
def ms_grid_sample_accepts(x: Array, grid: Array) -> None:
    if not (dtypes.is_float(x.dtype) and x.dtype == grid.dtype):
        kinds = f"{dtypes.onnx_name(x.dtype)} and {dtypes.onnx_name(grid.dtype)}"
        raise OperatorError(f"X and Grid must be floats of one type, got {kinds}", code="SX406")
    if x.ndim != 4:
        raise OperatorError(f"GridSample-16 takes 4 axes, got {x.ndim}", code="SX404")


ms_grid_sample.shapes(grid_sample_shapes)


# --- crops --------------------------------------------------------------------------------------------------------------


@microsoft("CropAndResize", 1)
def crop_and_resize(
    op: Op,
    x: V,
    rois: V,
    batch_indices: V,
    crop_size: Host[V],
    *,
    extrapolation_value: float = 0.0,
    mode: str = "bilinear",
) -> V:
    """Sample crop_size[0] x crop_size[1] places of each region [y1, x1, y2, x2], in units of the image, with both ends.

    Places outside the image have extrapolation_value; mode "nearest" rounds half up.
    """
    code = dtypes.onnx_code(np.int64)
    sizes = [length(op, x, 2), length(op, x, 3)]
    counts = op.Split(op.Reshape(op.Cast(crop_size, to=code), [-1]), axis=0, num_outputs=2, outputs=2)
    ends = op.Split(rois, axis=1, num_outputs=4, outputs=4)
    places, inside = [], []
    for axis in range(2):
        last, count = op.cast(op.Sub(sizes[axis], 1), x), op.Squeeze(counts[axis], [0])
        several, steps = op.Greater(count, 1), op.cast(op.Max(op.Sub(count, 1), 1), x)
        scale = op.Div(op.Mul(op.Sub(ends[axis + 2], ends[axis]), last), steps)
        spread = op.Add(op.Mul(ends[axis], last), op.Mul(op.cast(op.Range(0, count, 1), x), scale))
        middle = op.Mul(op.Mul(op.Add(ends[axis], ends[axis + 2]), 0.5), last)
        at = op.Unsqueeze(op.Where(several, spread, middle), [2 - axis])
        inside.append(op.And(op.GreaterOrEqual(at, op.cast(op.constant(0), at)), op.LessOrEqual(at, last)))
        places.append(op.Clip(at, op.cast(op.constant(0), at), last))
    images = op.Unsqueeze(op.Cast(batch_indices, to=code), [1, 2])
    flat = op.Reshape(op.Transpose(x, perm=[0, 2, 3, 1]), op.Concat([-1], op.Shape(x, start=1, end=2), axis=0))

    def pixel(i: V, j: V) -> V:
        row = op.Add(op.Mul(images, sizes[0]), op.Cast(i, to=code))
        return op.Gather(flat, op.Add(op.Mul(row, sizes[1]), op.Cast(j, to=code)))

    if mode == "nearest":
        y = pixel(*(op.Floor(op.Add(at, 0.5)) for at in places))
    else:
        ways = []
        for at, size in zip(places, sizes, strict=True):
            low = op.Floor(at)
            part = op.Sub(at, low)
            high = op.Min(op.Add(low, 1.0), op.cast(op.Sub(size, 1), at))
            ways.append([(low, op.Sub(1.0, part)), (high, part)])
        terms = [op.Mul(op.Unsqueeze(op.Mul(a, b), [3]), pixel(i, j)) for (i, a), (j, b) in itertools.product(*ways)]
        y = op.Sum(*terms)
    y = op.Where(op.Unsqueeze(op.And(*inside), [3]), y, op.cast(op.constant(extrapolation_value, np.float32), y))
    return op.Transpose(y, perm=[0, 3, 1, 2])


@crop_and_resize.accepts
def crop_and_resize_accepts(xp: Xp, x: Array, rois: Array, batch_indices: Array, crop_size: Array, mode: str) -> None:
    if mode not in ("bilinear", "nearest"):
        raise OperatorError(f"mode must be bilinear or nearest, got {mode!r}", code="SX404")
    sizes = crop_size.reshape(-1).tolist()
    if x.ndim != 4 or rois.shape != (len(batch_indices), 4) or len(sizes) != 2 or min(sizes) < 1:
        raise OperatorError(
            f"X must have 4 axes, rois the shape (R, 4), batch_indices (R,) and crop_size two positive values, got {x.shape}, "
            f"{rois.shape}, {batch_indices.shape} and {tuple(sizes)}",
            code="SX404",
        )
    limits.admit((len(rois), x.shape[1], *sizes), x.dtype)
    xp.indices(batch_indices, x.shape[0], negative=False)


@crop_and_resize.shapes
def crop_and_resize_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    x, rois, size = known.shape(call.inputs[0]), known.shape(call.inputs[1]), known.sizes(call.inputs[3])
    if x is None or rois is None or len(x) != 4 or not rois:
        return None
    each = size if isinstance(size, tuple) and len(size) == 2 else (known.fresh(), known.fresh())
    return (rois[0], x[1], *each)


# --- pooling under a mask -------------------------------------------------------------------------------------------------


@microsoft("MaxpoolWithMask", 1)
def maxpool_with_mask(
    op: Op,
    x: V,
    m: V,
    *,
    auto_pad: str = "NOTSET",
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    storage_order: int = 0,
    strides: Ints | None = None,
) -> V:
    """Pool the values that the mask keeps; a window without one has float32's lowest value.

    In each row of a window the values from the first masked one on are left out; the first cell of an image is never masked, but
    that of a line is.
    """
    assert kernel_shape is not None
    rank = len(kernel_shape)
    strides = tuple(strides or (1,) * rank)
    axes = list(range(2, 2 + rank))
    if auto_pad in SAME:
        had, steps = op.Shape(x, start=2), op.constant(strides, np.int64)
        count = op.Div(op.Add(had, [s - 1 for s in strides]), steps)
        more = op.Max(op.Sub(op.Add(op.Mul(op.Sub(count, 1), steps), list(kernel_shape)), had), [0])
        small = op.Div(more, 2)
        large = op.Sub(more, small)
        around = op.Concat(*((small, large) if auto_pad == "SAME_UPPER" else (large, small)), axis=0)
    else:
        around = op.constant(pads if pads and auto_pad in ("NOTSET", "") else (0,) * 2 * rank, np.int64)
    low = op.constant(LOWEST, op.dtype(x))
    kept = op.Cast(m, to=dtypes.onnx_code(np.bool_))
    if rank > 1:
        cells = op.Reshape(op.Range(0, op.ReduceProd(op.Shape(x, start=2), keepdims=0), 1), op.Shape(m))
        kept = op.Or(kept, op.Equal(cells, 0))
    kept = op.Pad(op.Cast(kept, to=dtypes.onnx_code(np.int32)), around, op.constant(1, np.int32), op.constant(axes, np.int64))
    values = op.Pad(op.Where(op.Greater(x, low), x, low), around, low, op.constant(axes, np.int64))
    steps = op.constant(strides, np.int64)
    reach = op.Add(op.Mul(op.Div(op.Sub(op.Shape(values, start=2), list(kernel_shape)), steps), steps), 1)

    def cell(array: V, offset: tuple[int, ...]) -> V:
        start = op.constant(offset, np.int64)
        return op.Slice(array, start, op.Add(start, reach), axes, list(strides))

    y = None
    for row in itertools.product(*(range(k) for k in kernel_shape[:-1])):
        alive = None
        for last in range(kernel_shape[-1]):
            here = op.Greater(cell(kept, (*row, last)), 0)
            alive = here if alive is None else op.And(alive, here)
            one = op.Where(alive, cell(values, (*row, last)), low)
            y = one if y is None else op.Max(y, one)
    return y


@maxpool_with_mask.accepts
def maxpool_with_mask_accepts(
    x: Array, m: Array, auto_pad: str, kernel_shape: Ints | None, pads: Ints | None, strides: Ints | None
) -> None:
    sizes = spatial(x)
    if not kernel_shape:
        raise OperatorError("the attribute kernel_shape must be present", code="SX404")
    if m.shape != (1, 1, *sizes):
        raise OperatorError(f"the mask must have shape {(1, 1, *sizes)}, got {m.shape}", code="SX404")
    windows(sizes, kernel_shape, strides, pads, None, auto_pad)


maxpool_with_mask.shapes(pooled_shapes)
