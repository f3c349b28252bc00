"""DepthToSpace and SpaceToDepth, Col2Im, CenterCropPad."""

from __future__ import annotations

import math
from itertools import product

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, operator
from ._api import Array
from ._common import axes_of, blank, length


def _image(x: Array, blocksize: int, mode: str) -> tuple[int, int, int, int]:
    if x.ndim != 4:
        raise OperatorError(f"x must have shape (N, C, H, W), got {x.shape}", code="SX404")
    if blocksize < 1:
        raise OperatorError(f"blocksize must be at least 1, got {blocksize}", code="SX404")
    if mode not in ("DCR", "CRD"):
        raise OperatorError(f"mode must be DCR or CRD, got {mode!r}", code="SX404")
    n, c, h, w = x.shape
    return n, c, h, w


@operator("DepthToSpace", 1, 11, 13, 28, widen=False, traits=("keeps_finite", "moves", "elements_of_first"))
def depth_to_space(xp: Xp, x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    n, c, h, w = _image(x, blocksize, mode)
    s = blocksize
    if c % (s * s):
        raise OperatorError(f"the channels must be a multiple of blocksize ** 2 = {s * s}, got {c}", code="SX404")
    c //= s * s
    y = (
        x.reshape(n, s, s, c, h, w).transpose(0, 3, 4, 1, 5, 2)
        if mode == "DCR"
        else x.reshape(n, c, s, s, h, w).transpose(0, 1, 4, 2, 5, 3)
    )
    return y.reshape(n, c, h * s, w * s)


@depth_to_space.gradient
def depth_to_space_gradient(op: Op, dy: V, x: V, blocksize: int, mode: str) -> V:
    if mode == "DCR":
        return op.SpaceToDepth(dy, blocksize=blocksize)
    height, width = (op.Shape(x, start=a, end=a + 1) for a in (2, 3))  # SpaceToDepth has no attribute mode before opset 28
    shape = op.Concat(op.Shape(dy, start=0, end=2), height, [blocksize], width, [blocksize], axis=0)
    return op.Reshape(op.Transpose(op.Reshape(dy, shape, allowzero=1), perm=[0, 1, 3, 5, 2, 4]), op.Shape(x), allowzero=1)


@operator("SpaceToDepth", 1, 13, 28, widen=False, traits=("keeps_finite", "moves", "elements_of_first"))
def space_to_depth(xp: Xp, x: Array, *, blocksize: int, mode: str = "DCR") -> Array:
    n, c, h, w = _image(x, blocksize, mode)
    s = blocksize
    if h % s or w % s:
        raise OperatorError(f"height and width must be multiples of blocksize {s}, got {h} and {w}", code="SX404")
    y = x.reshape(n, c, h // s, s, w // s, s).transpose((0, 3, 5, 1, 2, 4) if mode == "DCR" else (0, 1, 3, 5, 2, 4))
    return y.reshape(n, c * s * s, h // s, w // s)


@space_to_depth.gradient
def space_to_depth_gradient(op: Op, dy: V, blocksize: int, mode: str) -> V:
    return op.DepthToSpace(dy, blocksize=blocksize, mode=mode)


@operator("Col2Im", 18)
def col2im(
    xp: Xp,
    x: Array,
    image_shape: Host[Ints],
    block_shape: Host[Ints],
    *,
    dilations: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Fold columns into an image: each column is a block, and overlapping blocks are added."""
    rank = len(image_shape)
    dilations, strides, pads = dilations or (1,) * rank, strides or (1,) * rank, pads or (0,) * 2 * rank
    if not rank == len(block_shape) == len(dilations) == len(strides) == len(pads) / 2:
        raise OperatorError(
            f"image_shape, block_shape, dilations, strides and pads must have one rank, got {image_shape}, {block_shape}, "
            f"{dilations}, {strides} and {pads}",
            code="SX404",
        )
    if min((*image_shape, *pads), default=0) < 0 or min((*block_shape, *dilations, *strides), default=1) < 1:
        raise OperatorError(
            "image_shape and pads must be at least 0; block_shape, dilations and strides must be at least 1", code="SX404"
        )
    padded = [d + front + end for d, front, end in zip(image_shape, pads[:rank], pads[rank:], strict=True)]
    counts = [
        max(0, (d - dilation * (b - 1) - 1) // stride + 1)
        for d, b, dilation, stride in zip(padded, block_shape, dilations, strides, strict=True)
    ]
    block = math.prod(block_shape)
    if x.ndim != 3 or x.shape[1] % block or x.shape[2] != math.prod(counts):
        raise OperatorError(
            f"x must have shape (N, C * {block}, {math.prod(counts)}) for {counts} blocks of {block_shape} in an image of "
            f"{image_shape}, got {x.shape}",
            code="SX404",
        )
    n, c = x.shape[0], x.shape[1] // block
    columns = x.reshape(n, c, *block_shape, *counts)
    y = blank(xp, (n, c, *padded), x.dtype)
    limits.check_rounds(block)  # before the ranges are enumerated
    for place, _ in zip(product(*map(range, block_shape)), limits.rounds(block), strict=True):
        there = tuple(slice(p * dilation, p * dilation + stride * count, stride)
                      for p, dilation, stride, count in zip(place, dilations, strides, counts, strict=True))  # fmt: skip
        y[(slice(None), slice(None), *there)] += columns[(slice(None), slice(None), *place)]
    inner = tuple(slice(front, front + d) for front, d in zip(pads[:rank], image_shape, strict=True))
    return y[(slice(None), slice(None), *inner)]


@col2im.gradient
def col2im_gradient(op: Op, dy: V, x: V, block_shape: V, dilations: Ints | None, pads: Ints | None, strides: Ints | None) -> V:
    """Gather the blocks from the image: along each axis, element i of block j is at i * dilation + j * stride."""
    rank = op.rank(dy) - 2
    dilations, strides, pads = dilations or (1,) * rank, strides or (1,) * rank, pads or (0,) * 2 * rank
    y = op.Pad(dy, [0, 0, *pads[:rank], 0, 0, *pads[rank:]])
    for i, (dilation, stride) in reversed(list(enumerate(zip(dilations, strides, strict=True)))):
        block = op.Gather(block_shape, i)
        size = length(op, y, 2 + i)
        reach = op.Add(op.Mul(op.Sub(block, 1), dilation), 1)
        count = op.Div(op.Max(op.Sub(op.Add(size, stride), reach), 0), stride)
        inner = op.Unsqueeze(op.Mul(op.Range(0, block, 1), dilation), [1])
        y = op.Gather(y, op.Add(inner, op.Mul(op.Range(0, count, 1), stride)), axis=2 + i)
    perm = [0, 1, *range(2, 2 + 2 * rank, 2), *range(3, 3 + 2 * rank, 2)]
    return op.Reshape(op.Transpose(y, perm=perm), op.Shape(x), allowzero=1)


@operator("CenterCropPad", 18, widen=False, traits=("moves",))
def center_crop_pad(xp: Xp, x: Array, shape: Host[Ints], *, axes: Ints | None = None) -> Array:
    """If the size to crop or pad is odd, the larger part is at the end."""
    axes = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    if len(shape) != len(axes) or any(d < 0 for d in shape):
        raise OperatorError(f"shape must have a non-negative size for each of the axes {axes}, got {shape}", code="SX404")
    target = list(x.shape)
    for axis, d in zip(axes, shape, strict=True):
        target[axis] = d
    x = x[tuple(slice((d - t) // 2, (d - t) // 2 + t) if t < d else slice(None) for d, t in zip(x.shape, target, strict=True))]
    if x.shape == tuple(target):
        return x
    y = blank(xp, target, x.dtype)
    y[tuple(slice((t - d) // 2, (t - d) // 2 + d) for d, t in zip(x.shape, target, strict=True))] = x
    return y


@center_crop_pad.gradient
def center_crop_pad_gradient(op: Op, dy: V, x: V, axes: Ints | None) -> V:
    """Pad where the input was cropped, and crop where it was padded."""
    sizes = op.Shape(x)
    return op.CenterCropPad(dy, sizes if axes is None else op.Gather(sizes, list(axes)), axes=axes)
