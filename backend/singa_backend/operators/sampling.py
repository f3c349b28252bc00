"""GridSample and AffineGrid: sampling between pixels."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from onnx import TensorProto

from .. import limits
from ..devices.namespaces import Xp, host
from ..dtypes import NARROW_FLOATS, onnx_code
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, operator
from ..ir.shapes import KnownShapes, Shape, Unsure, open_shape, same_size
from ._api import Array
from ._common import length
from ._sampling import grid_taps, read
from .resize import saturated

# --- GridSample -----------------------------------------------------------------------------------------------------

_MODES = {"bilinear": "linear", "linear": "linear", "bicubic": "cubic", "cubic": "cubic", "nearest": "nearest"}


def _reflect(xp: Xp, x: Array, low: float, high: float) -> Array:
    """Reflect `x` at the borders until it is between them."""
    if low == high:
        return xp.where(xp.isnan(x), x, low)
    span = high - low
    at = xp.mod(x - low, 2 * span)
    return low + xp.where(at > span, 2 * span - at, at)


def _taps(xp: Xp, x: Array, size: int, mode: str, padding: str, align: bool) -> list[tuple[Array, Array, Array]]:
    """Return the taps of an axis at coordinates `x`: indices, whether they are inside (None: all are), and weights (None: 1)."""
    low, high = (0.0, size - 1.0) if align else (-0.5, size - 0.5)
    if mode == "nearest":
        x = xp.rint(x)
    if padding == "zeros":
        x = xp.clip(x, -3, size + 2)  # nothing is read beyond; the weights of infinity stay finite
    elif padding == "border":
        x = xp.where((x < low) | (x > high), xp.clip(x, 0, size - 1), x)
    else:
        x = xp.where((x < low) | (x > high), _reflect(xp, x, low, high), x)
    floor = xp.floor(x)
    t = x - floor
    taps: list[tuple[Array, Array]]
    if mode == "nearest":
        taps = [(x, None)]
    elif mode == "linear":
        taps = [(floor, 1 - t), (floor + 1, t)]
    else:
        a = -0.75  # the coefficient of the cubic kernel, as in PyTorch
        near, far = t + 1, 2 - t
        taps = [
            (floor - 1, ((a * near - 5 * a) * near + 8 * a) * near - 4 * a),
            (floor, ((a + 2) * t - (a + 3)) * t * t + 1),
            (floor + 1, ((a + 2) * (1 - t) - (a + 3)) * (1 - t) * (1 - t) + 1),
            (floor + 2, ((a * far - 5 * a) * far + 8 * a) * far - 4 * a),
        ]
    out = []
    for i, weight in taps:
        if padding == "reflection":
            i = _reflect(xp, i, low, high)
        inside = (i >= 0) & (i <= size - 1)
        i = xp.clip(xp.where(xp.isnan(i), 0, i), 0, size - 1).astype(np.int64)
        out.append((i, inside if padding == "zeros" else None, weight))
    return out


@operator("GridSample", 20, 22, widen=False)
def grid_sample(
    xp: Xp, x: Array, grid: Array, *, align_corners: int = 0, mode: str = "linear", padding_mode: str = "zeros"
) -> Array:
    """Move a location outside the borders first (to the border, or by reflection), then its neighbours."""
    kind = _MODES.get(mode)
    if kind is None or padding_mode not in ("zeros", "border", "reflection"):
        both = f"{mode!r} and {padding_mode!r}"
        known = "linear, cubic or nearest and padding_mode zeros, border or reflection"
        raise OperatorError(f"mode must be {known}, got {both}", code="SX404")
    rank = x.ndim - 2
    if rank < 1 or grid.ndim != x.ndim or grid.shape[-1] != rank or grid.shape[0] != x.shape[0]:
        raise OperatorError(f"the grid must match an input of shape {x.shape}, got shape {grid.shape}", code="SX404")
    n, c, sizes, places = x.shape[0], x.shape[1], x.shape[2:], grid.shape[1:-1]
    dtype = x.dtype
    if dtype.kind == "O" and (kind != "nearest" or padding_mode == "zeros"):
        raise OperatorError("for strings, mode must be nearest and padding_mode must not be zeros", code="SX404")
    if 0 in sizes:
        if padding_mode != "zeros" and 0 not in (n, c, *places):
            raise OperatorError(
                f"the input must not be empty with padding_mode {padding_mode}, got shape {x.shape}", code="SX404"
            )
        return xp.zeros((n, c, *places), dtype)
    grid = grid.astype(np.float32) if grid.dtype in NARROW_FLOATS else grid
    work = dtype
    if kind != "nearest":
        work = np.dtype(np.float32) if dtype in NARROW_FLOATS else dtype if dtype.kind in "fc" else np.dtype(np.float64)
    limits.admit((n, c, *places), work)
    axes = []
    for axis, size in enumerate(sizes):
        at = grid[..., rank - 1 - axis].reshape(n, math.prod(places))  # the innermost axis is first in the grid
        at = (at + 1) / 2 * (size - 1) if align_corners else ((at + 1) * size - 1) / 2
        axes.append(_taps(xp, at, size, kind, padding_mode, bool(align_corners)))
    pixels = xp.moveaxis(x.astype(work).reshape(n, c, math.prod(sizes)), 1, -1)
    batch = xp.arange(n)[:, None]
    y = None
    for _, taps in zip(limits.rounds(math.prod(map(len, axes))), itertools.product(*axes), strict=True):
        index, inside, weight = 0, None, None
        for (i, within, w), size in zip(taps, sizes, strict=True):
            index = index * size + i
            inside = within if inside is None else inside & within
            weight = w if weight is None else weight * w
        term = pixels[batch, index]
        if inside is not None:
            term = xp.where(inside[..., None], term, xp.zeros((), work))
        if weight is not None:
            term = term * weight.astype(pixels.real.dtype)[..., None]
        y = term if y is None else y + term
    y = xp.moveaxis(y, -1, 1).reshape(n, c, *places)
    return y if work == dtype else saturated(xp, y, dtype)


@grid_sample.shapes
def grid_sample_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    x, grid = known.shape(call.inputs[0]), known.shape(call.inputs[1])
    if x is None or grid is None:
        shape = grid if x is None else x
        return None if shape is None else open_shape(known, len(shape))
    if len(x) < 3 or len(x) != len(grid):
        raise Unsure
    return same_size([x[0], grid[0]]), x[1], *grid[1:-1]


@grid_sample.decomposition
def in_parts(op: Op, x: V, grid: V, align_corners: int, mode: str, padding_mode: str) -> V:
    """The nearest pixel does not change with the grid: its gradient is 0, as in PyTorch."""
    dtype = op.dtype(x)
    if dtype.kind in "iu" and _MODES[mode] != "nearest":
        return _cut(op, in_parts(op, op.Cast(x, to=int(TensorProto.DOUBLE)), grid, align_corners, mode, padding_mode), dtype)
    rank = op.rank(x) - 2
    sizes = [length(op, x, axis + 2) for axis in range(rank)]
    axes = []
    for axis, size in enumerate(sizes):
        at = op.Flatten(op.Gather(grid, rank - 1 - axis, axis=-1), axis=1)
        extent = op.cast(op.Sub(size, 1) if align_corners else size, at)
        scaled = op.Mul(op.Add(at, 1), extent)
        at = op.Div(scaled, 2) if align_corners else op.Div(op.Sub(scaled, 1), 2)
        axes.append(grid_taps(op, at, size, _MODES[mode], padding_mode, bool(align_corners)))
    ends = op.Shape(x, end=2)
    pixels = op.Reshape(x, op.Concat(ends, op.ReduceProd(op.Shape(x, start=2), keepdims=1), axis=0), allowzero=1)
    places = op.Shape(grid, start=1, end=rank + 1)
    return op.Reshape(read(op, pixels, axes, sizes), op.Concat(ends, places, axis=0), allowzero=1)


def _cut(op: Op, y: V, dtype: np.dtype[Any]) -> V:
    """Convert doubles to integers like `saturated`."""
    whole = op.Round(y)
    near = op.Less(op.Abs(op.Sub(y, whole)), op.Mul(op.Max(op.Abs(whole), 1.0), 1e-9))
    held = op.Clip(op.Where(near, whole, y), *(float(v) for v in (np.iinfo(dtype).min, np.iinfo(dtype).max)))
    return op.Cast(held, to=onnx_code(dtype))


@operator("GridSample", 16, widen=False)
def grid_sample_16(
    xp: Xp, x: Array, grid: Array, *, align_corners: int = 0, mode: str = "bilinear", padding_mode: str = "zeros"
) -> Array:
    """Before opset 20 the input is an image."""
    if x.ndim != 4:
        raise OperatorError(f"GridSample-16 takes 4 axes, got {x.ndim}", code="SX404")
    return grid_sample(xp, x, grid, align_corners=align_corners, mode=mode, padding_mode=padding_mode)


@grid_sample_16.decomposition
def grid_sample_16_decomposition(op: Op, x: V, grid: V, align_corners: int, mode: str, padding_mode: str) -> V:
    """The modes are renamed."""
    if op.opset < 20:
        return in_parts(op, x, grid, align_corners, mode, padding_mode)
    return op.GridSample(x, grid, align_corners=align_corners, mode=_MODES.get(mode, mode), padding_mode=padding_mode)


@operator("AffineGrid", 20)
def affine_grid(xp: Xp, theta: Array, size: Host[Ints], *, align_corners: int = 0) -> Array:
    """Return the grid; a single pixel, whose corners coincide, is at 0 as in PyTorch, which the specification refers to."""
    rank = len(size) - 2
    if rank not in (2, 3) or theta.ndim != 3 or theta.shape[0] != size[0] or theta.shape[1:] != (rank, rank + 1):
        raise OperatorError(f"theta must match size {size}, got shape {theta.shape}", code="SX404")
    if min(size) < 0:
        raise OperatorError(f"size must not be negative, got {size}", code="SX404")
    lengths = size[2:]
    limits.admit((size[0], *lengths, rank + 1), np.float64)
    lines = []
    for count in lengths:
        steps = 2 * xp.arange(count, dtype=np.float64) + 1 - count
        lines.append(steps / max(count - 1, 1) if align_corners else steps / max(count, 1))
    # x is the coordinate along the last axis; it is first in the grid.
    places = [*reversed(xp.meshgrid(*lines, indexing="ij")), xp.ones(lengths, np.float64)]
    homogeneous = xp.stack(places, axis=-1).reshape(-1, rank + 1)
    grid = xp.matmul(homogeneous, xp.swapaxes(theta.astype(np.float64), 1, 2))
    return grid.reshape(size[0], *lengths, rank).astype(theta.dtype)


@affine_grid.decomposition
def affine_grid_decomposition(op: Op, theta: V, size: V, align_corners: int) -> V:
    """ONNX's function body does not accept a batch of one and divides by 0 for a single pixel."""
    counts = [(op.shape(theta) or (None,) * 3)[1], (op.shape(size) or (None,))[0]]
    rank = next((n - more for n, more in zip(counts, (0, 2), strict=True) if isinstance(n, int)), None)
    if rank is None:
        raise ValueError("the number of axes of the grid is not known: theta and size have open sizes")
    lengths = op.Slice(size, [2], [2 + rank], [0])
    places = []
    for axis in range(rank):
        count = op.Squeeze(op.Slice(size, [2 + axis], [3 + axis], [0]), [0])
        wide = op.Cast(count, to=int(TensorProto.DOUBLE))
        steps = op.Sub(op.Add(op.Mul(op.Cast(op.Range(0, count, 1), to=int(TensorProto.DOUBLE)), 2.0), 1.0), wide)
        line = op.Div(steps, op.Max(op.Sub(wide, 1.0) if align_corners else wide, 1.0))
        others = [a for a in range(rank + 1) if a != axis]
        places.append(op.Expand(op.Unsqueeze(line, others), op.Concat(lengths, [1], axis=0)))
    ones = op.Expand(op.constant(1.0, np.float64), op.Concat(lengths, [1], axis=0))
    base = op.Reshape(op.Concat(*reversed(places), ones, axis=rank), [-1, rank + 1])
    grid = op.MatMul(base, op.swap(op.Cast(theta, to=int(TensorProto.DOUBLE))))
    return op.cast(op.Reshape(grid, op.Concat(op.Slice(size, [0], [1], [0]), lengths, [rank], axis=0), allowzero=1), theta)


@affine_grid.gradient
def affine_grid_gradient(op: Op, dy: V, theta: V, size: V, align_corners: int) -> V:
    """The grid is the product of the base grid, with a 1 appended to each place, and the transposed theta."""
    rank = op.rank(dy) - 2
    identity = op.constant(host.eye(rank, rank + 1)[None], op.dtype(dy))
    base = op.AffineGrid(identity, op.Concat([1], op.Slice(size, [1], [rank + 2]), axis=0), align_corners=align_corners)
    count = op.ReduceProd(op.Shape(base, end=rank + 1), keepdims=1)
    base = op.Reshape(base, op.Concat(count, [rank], axis=0), allowzero=1)
    flat = op.swap(op.Reshape(dy, op.Concat(op.Shape(dy, end=1), count, [rank], axis=0), allowzero=1))
    return op.cast(op.Concat(op.MatMul(flat, base), op.ReduceSum(flat, [2], keepdims=1), axis=2), theta)
