"""Operators that change shapes and move elements; the public module is `autograd`.

A "Source" line names the ONNX operator that defines a function; its newest version applies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor
from .formula import TensorOp, formula, known_shape, whole

__all__: list[str] = ["cat"]


@formula("Shape")
def shape(op: TensorOp, x: Any) -> Tensor:
    """The shape of x, as a Tensor.

    It has no gradient. Source: ONNX Shape.

    Args:
        x: Tensor of any dtype and shape.

    Returns:
        int64 Tensor of shape (rank of x,).
    """
    return op.Shape(x)


@formula("Reshape")
def reshape(op: TensorOp, x: Any, *, shape: Sequence[int]) -> Tensor:
    """Reshape x.

    Source: ONNX Reshape.

    Args:
        x: Tensor of any dtype and shape.
        shape: The new sizes, or an int64 Tensor of them.  0 keeps the size of x at that axis; one -1 is inferred.

    Returns:
        Tensor of the new shape, of the dtype of x.
    """
    return op.Reshape(x, shape if op.is_value(shape) else list(shape))


@formula("Flatten")
def flatten(op: TensorOp, x: Any, *, axis: int = 1, end_axis: int | None = None) -> Tensor:
    """Flatten x to a matrix, or merge several axes into one.

    Without `end_axis` the axes before `axis` become the rows and the others the columns. With it, the axes from `axis` to
    `end_axis` become one axis and the others remain. Source: ONNX Flatten, or ONNX Reshape with `end_axis`.

    Args:
        x: Tensor of any dtype and shape.
        axis: The first axis of the columns, in [-rank, rank]; with `end_axis` the first axis to merge, in [-rank, rank).
        end_axis: The last axis to merge, in [-rank, rank); None for a matrix.

    Returns:
        Tensor of rank 2, or with `end_axis` of rank - (end_axis - axis); of the dtype of x.

    Raises:
        InvalidInput: `axis` or `end_axis` is not an axis of x, or `end_axis` precedes `axis`.
    """
    if end_axis is None:
        return op.Flatten(x, axis=axis)
    rank = op.rank(x)
    first, last = (a + rank if a < 0 else a for a in (axis, end_axis))
    if not rank and axis in (0, -1) and end_axis in (0, -1):
        return op.Reshape(x, [1])
    if not 0 <= first <= last < rank:
        what = f"axis and end_axis must be axes of x in ascending order, got {axis} and {end_axis} for shape {op.shape(x)}"
        raise InvalidInput(what, code="SX333")
    sizes = known_shape(op, x)
    if 0 not in sizes and all(isinstance(n, int) for n in sizes[last + 1 :]):
        return op.Reshape(x, [*[0] * first, -1, *sizes[last + 1 :]])
    whole = op.ReduceProd(op.Shape(x, start=first, end=last + 1), [0], keepdims=1)
    parts = [op.Shape(x, start=0, end=first), whole, op.Shape(x, start=last + 1)]
    return op.Reshape(x, op.Concat(*parts, axis=0), allowzero=1)


@formula("Transpose")
def transpose(op: TensorOp, x: Any, *, shape: Sequence[int] | None = None) -> Tensor:
    """Permute the axes of x.

    Source: ONNX Transpose.

    Args:
        x: Tensor of any dtype and shape.
        shape: The axes of x in the order of the result, ONNX's perm; None to reverse them.

    Returns:
        Tensor of the dtype of x; its axis i is axis shape[i] of x.
    """
    return op.Transpose(x, perm=None if shape is None else list(shape))


@formula("Squeeze")
def squeeze(op: TensorOp, x: Any, *, axis: Any = ()) -> Tensor:
    """Remove axes of size 1.

    Source: ONNX Squeeze.

    Args:
        x: Tensor of any dtype and shape.
        axis: The axis to remove, or a sequence of axes; an empty sequence to remove every axis of size 1.

    Returns:
        Tensor without these axes, of the dtype of x.
    """
    axes = [axis] if isinstance(axis, int) else list(axis)
    return op.Squeeze(x, axes or None)


@formula("Unsqueeze")
def unsqueeze(op: TensorOp, x: Any, *, axis: Any) -> Tensor:
    """Insert axes of size 1.

    Source: ONNX Unsqueeze.

    Args:
        x: Tensor of any dtype and shape.
        axis: The position of the new axis in the result, or a sequence of positions.

    Returns:
        Tensor with these axes, of the dtype of x.
    """
    return op.Unsqueeze(x, [axis] if isinstance(axis, int) else list(axis))


@formula("Concat")
def _cat(op: TensorOp, *xs: Any, axis: int = 0) -> Tensor:
    """Concatenate tensors along an axis.

    Source: ONNX Concat.

    Args:
        *xs: One or more Tensors of one dtype, whose shapes differ at `axis` at most.
        axis: The axis, in [-rank, rank).

    Returns:
        Tensor whose size at `axis` is the sum of those of the inputs, of their dtype.
    """
    return op.Concat(*xs, axis=axis)


def cat(xs: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Concatenate tensors along an axis.

    Source: ONNX Concat.

    Args:
        xs: One or more Tensors of one dtype, whose shapes differ at `axis` at most.
        axis: The axis, in [-rank, rank).

    Returns:
        Tensor whose size at `axis` is the sum of those of the inputs, of their dtype.

    Raises:
        InvalidInput: An input is not a Tensor, or the inputs are on different devices.
        OperatorError: The dtypes of the inputs differ, the shapes differ at another axis, or `axis` is out of range.
    """
    return _cat(*xs, axis=axis)


@formula("Split")
def split(
    op: TensorOp, x: Any, *, axis: int, parts: Sequence[int] | None = None, num_output: int | None = None
) -> tuple[Tensor, ...]:
    """Split x into parts along an axis.

    Source: ONNX Split.

    Args:
        x: Tensor of any dtype and shape.
        axis: The axis, in [-rank, rank).
        parts: The size of each part at `axis`; their sum is the size of x. None to split by `num_output`.
        num_output: The number of parts of equal size, of which the last may be smaller; used if `parts` is None.

    Returns:
        A tuple of Tensors of the dtype of x; the Tensor itself if there is one part.

    Raises:
        InvalidInput: Neither `parts` nor `num_output` is set, or `parts` is empty.
    """
    count = len(parts) if parts is not None else num_output
    if not count:
        what = f"parts or num_output must be at least one part, got parts={parts} and num_output={num_output}"
        raise InvalidInput(what, code="SX333")
    made = op.call(
        "Split",
        [x, None if parts is None else list(parts)],
        {"axis": axis, "num_outputs": None if parts is not None else count},
        count,
    )
    return tuple(made)


@formula("Slice")
def slice(
    op: TensorOp,
    x: Any,
    *,
    starts: Sequence[int],
    ends: Sequence[int],
    axes: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> Tensor:
    """Slice x from `starts` to `ends` along some axes.

    Source: ONNX Slice.

    Args:
        x: Tensor of any dtype and shape.
        starts: The first index at each of the axes; a negative one counts from the end.
        ends: The index after the last one at each of the axes; clamped to the size.
        axes: The axes; None for the first `len(starts)`.
        steps: The step at each of the axes, negative to go backward; None for 1.

    Returns:
        Tensor of the rank and dtype of x.
    """
    return op.Slice(x, list(starts), list(ends), None if axes is None else list(axes), None if steps is None else list(steps))


@formula("Tile")
def tile(op: TensorOp, x: Any, *, repeats: Any) -> Tensor:
    """Repeat x along its axes.

    Source: ONNX Tile, after ONNX Unsqueeze if there are more numbers than axes.

    Args:
        x: Tensor of any dtype and shape.
        repeats: The number of repetitions at each axis, or an int for the last axis. Fewer numbers than axes apply to the last
            axes; more add axes before the first.

    Returns:
        Tensor of the dtype of x; each size is multiplied by its number of repetitions.
    """
    times = [repeats] if isinstance(repeats, int) else list(repeats)
    rank = op.rank(x)
    if len(times) > rank:
        x = op.Unsqueeze(x, list(range(len(times) - rank)))
    return op.Tile(x, [1] * (rank - len(times)) + times)


@formula("Expand")
def expand(op: TensorOp, x: Any, *, shape: Sequence[int]) -> Tensor:
    """Broadcast x with a shape.

    Source: ONNX Expand.

    Args:
        x: Tensor of any dtype and shape.
        shape: Sizes, or an int64 Tensor of them; a size of 1 keeps that of x.

    Returns:
        Tensor of the broadcast shape, of the dtype of x.

    Raises:
        ValueError: The shapes cannot be broadcast.
    """
    return op.Expand(x, shape if op.is_value(shape) else list(shape))


@formula("Pad")
def pad(op: TensorOp, x: Any, *, mode: str = "constant", pads: Sequence[int], constant: float = 0.0) -> Tensor:
    """Pad x before and after each axis.

    Source: ONNX Pad.

    Args:
        x: Tensor of any dtype and shape.
        mode: "constant" (the default), "reflect", "edge" or "wrap".
        pads: The number of values to add: first before each axis, then after each axis; a negative number removes values.
        constant: The value to add in the mode "constant".

    Returns:
        Tensor of the rank and dtype of x.
    """
    return op.Pad(x, list(pads), constant if mode == "constant" else None, mode=mode)


@formula("UpSample")
def upsample(op: TensorOp, x: Any, *, mode: str, scales: Sequence[float]) -> Tensor:
    """Resize x by a factor for each axis.

    Source: ONNX Upsample-10, as ONNX Resize with asymmetric coordinates; "nearest" rounds down.

    Args:
        x: Tensor of a numeric dtype, any shape.
        mode: "nearest", "linear" or "cubic".
        scales: The factor for each axis.

    Returns:
        Tensor of the dtype of x; each size is floor(size * scale).
    """
    factors = op.constant([float(s) for s in scales], np.float32)
    return op.Resize(x, None, factors, mode=mode, coordinate_transformation_mode="asymmetric", nearest_mode="floor")


@formula("DepthToSpace")
def depth_to_space(op: TensorOp, x: Any, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Move blocks of channels to the spatial axes.

    Source: ONNX DepthToSpace.

    Args:
        x: Tensor of any dtype, shape (N, C, H, W); C is a multiple of blocksize^2.
        blocksize: The number of rows and of columns of a block.
        mode: "DCR" (channels are (row, column, depth)) or "CRD" (channels are (depth, row, column)).

    Returns:
        Tensor of shape (N, C / blocksize^2, H blocksize, W blocksize), of the dtype of x.
    """
    return op.DepthToSpace(x, blocksize=blocksize, mode=mode)


@formula("SpaceToDepth")
def space_to_depth(op: TensorOp, x: Any, *, blocksize: int, mode: str = "DCR") -> Tensor:
    """Move spatial blocks to the channels: the inverse of `depth_to_space` in the same mode.

    Source: ONNX SpaceToDepth for "DCR"; ONNX Reshape and Transpose for "CRD".

    Args:
        x: Tensor of any dtype, shape (N, C, H, W); H and W are multiples of blocksize.
        blocksize: The number of rows and of columns of a block.
        mode: "DCR" (channels are (row, column, depth)) or "CRD" (channels are (depth, row, column)).

    Returns:
        Tensor of shape (N, C blocksize^2, H / blocksize, W / blocksize), of the dtype of x.
    """
    if mode == "DCR":
        return op.SpaceToDepth(x, blocksize=blocksize)
    n, c, h, w = (op.Shape(x, start=i, end=i + 1) for i in range(4))
    b = [blocksize]
    parts = op.Reshape(x, op.Concat(n, c, op.Div(h, blocksize), b, op.Div(w, blocksize), b, axis=0), allowzero=1)
    moved = op.Transpose(parts, perm=[0, 1, 3, 5, 2, 4])
    return op.Reshape(
        moved, op.Concat(n, op.Mul(c, blocksize**2), op.Div(h, blocksize), op.Div(w, blocksize), axis=0), allowzero=1
    )


@formula("ConstantOfShape")
def constant_of_shape(op: TensorOp, x: Any, *, value: float = 0) -> Tensor:
    """Make a tensor of a shape, filled with a value.

    It has no gradient. Source: ONNX ConstantOfShape.

    Args:
        x: Tensor of shape (rank,) with the sizes, which are cast to int64.
        value: The value of every element.

    Returns:
        Tensor of the shape x: float32 for a float, int64 for an int.
    """
    return op.ConstantOfShape(whole(op, x), value=np.array([value], np.float32 if isinstance(value, float) else np.int64))
