"""Blocks and windows of images, against loops over pixels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

F = np.float32
RNG = np.random.default_rng(13)


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int64)


@pytest.mark.parametrize("mode", [None, "DCR", "CRD"])
@pytest.mark.parametrize("s", [1, 2, 3])
def test_depth_to_space_and_back(check: Any, mode: str | None, s: int) -> None:
    """Channel c of block (i, j) is input channel (i s + j) C + c in the order DCR, and c s^2 + i s + j in CRD."""
    x = RNG.standard_normal((2, 2 * s * s, 3, 2))
    y = np.zeros((2, 2, 3 * s, 2 * s))
    for c, h, w, i, j in np.ndindex(2, 3, 2, s, s):
        y[:, c, h * s + i, w * s + j] = x[:, c * s * s + i * s + j if mode == "CRD" else (i * s + j) * 2 + c, h, w]
    options: dict[str, Any] = {"blocksize": s} | ({} if mode is None else {"mode": mode})
    for opset in (1, 11, 13, 28):
        if opset >= 11 or mode is None:
            check("DepthToSpace", [x], [y], opset=opset, **options)
    for opset in (1, 13, 28):
        if opset >= 28 or mode is None:
            check("SpaceToDepth", [y], [x], opset=opset, **options)


def test_depth_and_space_edges(check: Any, fails: Any) -> None:
    words = np.array([*"abcd"], object).reshape(1, 4, 1, 1)
    check("DepthToSpace", [words], [words.reshape(1, 1, 2, 2)], opset=13, blocksize=2)
    check("SpaceToDepth", [words.reshape(1, 1, 2, 2)], [words], opset=13, blocksize=2)
    half = np.array([1, 2, 3, 4], ml_dtypes.bfloat16).reshape(1, 4, 1, 1)
    check("DepthToSpace", [half], [half.reshape(1, 1, 2, 2)], opset=13, blocksize=2)
    check("DepthToSpace", [np.zeros((0, 4, 2, 2), F)], [np.zeros((0, 1, 4, 4), F)], opset=13, blocksize=2)
    fails("DepthToSpace", [np.zeros((1, 3, 2, 2), F)], "multiple of blocksize .* got 3", opset=13, blocksize=2)
    fails("SpaceToDepth", [np.zeros((1, 3, 2, 3), F)], "height and width must be multiples of blocksize 2", opset=13, blocksize=2)
    fails("DepthToSpace", [np.zeros((4, 2, 2), F)], r"must have shape \(N, C, H, W\)", opset=13, blocksize=2)
    fails("DepthToSpace", [np.zeros((1, 4, 2, 2), F)], "blocksize must be at least 1, got 0", opset=13, blocksize=0)
    fails("DepthToSpace", [np.zeros((1, 4, 2, 2), F)], "mode must be DCR or CRD", opset=13, blocksize=2, mode="RDC")


Ints = list[int]


def counted(image: Ints, block: Ints, strides: Ints, dilations: Ints, pads: Ints) -> Ints:
    rank = len(image)
    return [(image[k] + pads[k] + pads[k + rank] - dilations[k] * (block[k] - 1) - 1) // strides[k] + 1 for k in range(rank)]


def folded(x: np.ndarray, image: Ints, block: Ints, strides: Ints, dilations: Ints, pads: Ints) -> np.ndarray:
    rank = len(image)
    padded = [d + pads[k] + pads[k + rank] for k, d in enumerate(image)]
    counts = counted(image, block, strides, dilations, pads)
    x = x.reshape(len(x), -1, *block, *counts)
    y = np.zeros((*x.shape[:2], *padded), x.dtype)
    for at in np.ndindex(*block, *counts):
        there = [at[rank + k] * strides[k] + at[k] * dilations[k] for k in range(rank)]
        y[(..., *there)] += x[(..., *at)]
    return y[(..., *(slice(pads[k], pads[k] + d) for k, d in enumerate(image)))]


@pytest.mark.parametrize(
    ("image", "block", "strides", "dilations", "pads"),
    [([5, 5], [1, 5], [1, 1], [1, 1], [0] * 4), ([5, 6], [2, 3], [2, 1], [1, 2], [1, 0, 2, 3]), ([4], [2], [2], [1], [0, 0]),
     ([2, 3, 9], [2, 1, 3], [2, 1, 1], [1, 1, 2], [2, 2, 0, 2, 1, 0])],
)  # fmt: skip
def test_col2im(check: Any, image: Ints, block: Ints, strides: Ints, dilations: Ints, pads: Ints) -> None:
    length = np.prod(counted(image, block, strides, dilations, pads))
    for dtype in (F, np.float64, np.int32, np.float16):
        x = RNG.integers(-4, 5, (2, 3 * int(np.prod(block)), int(length))).astype(dtype)
        check("Col2Im", [x, ints(*image), ints(*block)], [folded(x, image, block, strides, dilations, pads)], opset=18,
              strides=strides, dilations=dilations, pads=pads)  # fmt: skip


def test_col2im_edges(check: Any, fails: Any) -> None:
    x = np.arange(1, 17, dtype=F).reshape(1, 4, 4)
    y = folded(x, [3, 3], [2, 2], [1, 1], [1, 1], [0] * 4)
    check("Col2Im", [x, ints(3, 3), ints(2, 2)], [y], opset=18)
    check("Col2Im", [x[:0], ints(3, 3), ints(2, 2)], [y[:0]], opset=18)
    fails("Col2Im", [x, ints(3, 4), ints(2, 2)], "for .2, 3. blocks", opset=18)
    fails("Col2Im", [x, ints(3, 3), ints(3, 2)], "for .1, 2. blocks", opset=18)
    fails("Col2Im", [x, ints(3, 3), ints(2)], "one rank", opset=18)
    fails("Col2Im", [x, ints(3, 3), ints(2, 2)], "image_shape and pads must be at least 0", opset=18, strides=[0, 1])


@pytest.mark.parametrize("shape", [(5, 4), (2, 7), (4, 9), (0, 3), (8, 1)])
def test_center_crop_pad(check: Any, shape: tuple[int, int]) -> None:
    """Cropped windows begin at the surplus halved and rounded down; so do the values in what is padded."""
    for x in (np.arange(1, 21, dtype=F).reshape(5, 4), np.full((4, 5), "w", object), np.full((2, 3), 1, ml_dtypes.bfloat16),
              np.full((6, 2), True), np.full((3, 3), 2j)):  # fmt: skip
        y = np.full(shape, "" if x.dtype == object else 0, x.dtype)
        for at in np.ndindex(*shape):
            there = [p + (d - t) // 2 if t <= d else p - (t - d) // 2 for p, d, t in zip(at, x.shape, shape, strict=True)]
            if all(0 <= p < d for p, d in zip(there, x.shape, strict=True)):
                y[at] = x[tuple(there)]
        check("CenterCropPad", [x, ints(*shape)], [y], opset=18)
        turned = np.array(shape[::-1], np.int32)
        check("CenterCropPad", [x, turned], [y], opset=18, axes=[1, -2])


def test_center_crop_pad_axes(check: Any, fails: Any) -> None:
    x = np.arange(6, dtype=F).reshape(2, 3)
    check("CenterCropPad", [x, ints(2)], [x[:, :2]], opset=18, axes=[-1])
    fails("CenterCropPad", [x, ints(2)], "must have a non-negative size for each", opset=18)
    fails("CenterCropPad", [x, ints(2, -1)], "must have a non-negative size for each", opset=18)
    fails("CenterCropPad", [x, ints(2, 2)], "axes must be different", opset=18, axes=[1, -1])
