"""Poolings against loops over windows and cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

RNG = np.random.default_rng(11)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


Cells = Iterator[tuple[Any, list[Any], int]]


def cells(size: tuple[int, ...], kernel: Any, strides: Any, pads: Any, dilations: Any, out: Any) -> Cells:
    """Each window with its cells in the image, in row-major order, and how many lie in the image or its padding."""
    rank = len(size)
    for o in np.ndindex(*out):
        inside, padded = [], 0
        for k in itertools.product(*map(range, kernel)):
            at = tuple(o[i] * strides[i] + k[i] * dilations[i] - pads[i] for i in range(rank))
            padded += all(a < size[i] + pads[rank + i] for i, a in enumerate(at))
            if all(0 <= a < s for a, s in zip(at, size, strict=True)):
                inside.append(at)
        yield o, inside, padded


CASES = [
    # spatial, kernel, strides, pads, dilations, output, output with ceil_mode
    ((8,), (3,), (2,), (1, 0), (1,), (4,), (4,)),
    ((6,), (3,), (2,), (0, 0), (1,), (2,), (3,)),
    ((7, 5), (3, 2), (2, 1), (1, 0, 1, 1), (1, 2), (4, 4), (4, 4)),
    ((4, 4), (2, 2), (3, 3), (1, 1, 1, 1), (1, 1), (2, 2), (2, 2)),  # ceil: a third window would start in the padding
    ((5, 6, 4), (2, 3, 2), (2, 2, 1), (1, 0, 0, 0, 1, 1), (2, 1, 1), (2, 3, 4), (3, 3, 4)),
    ((3, 3, 3, 3), (2, 2, 1, 3), (1, 1, 2, 1), (0,) * 8, (1,) * 4, (2, 2, 2, 1), (2, 2, 2, 1)),
]
PLAIN = [c for c in CASES if set(c[4]) == {1}]


def attributes(case: Any, ceil_mode: int = 0, dilated: bool = True) -> dict[str, Any]:
    _, kernel, strides, pads, dilations, _, _ = case
    extra = {"dilations": dilations} if dilated else {}
    return {"kernel_shape": kernel, "strides": strides, "pads": pads, **extra, **({"ceil_mode": 1} if ceil_mode else {})}


def average(x: np.ndarray, case: Any, ceil_mode: int, include: int) -> np.ndarray:
    size, kernel, strides, pads, dilations, *out = case
    y = np.zeros((*x.shape[:2], *out[ceil_mode]))
    for o, inside, padded in cells(size, kernel, strides, pads, dilations, out[ceil_mode]):
        total = sum(x[(..., *at)].astype(np.float64) for at in inside)
        y[(..., *o)] = total / (padded if include else len(inside))
    return y.astype(x.dtype)


@pytest.mark.parametrize("ceil_mode", [0, 1])
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_average_pool(check: Any, case: Any, include: int, ceil_mode: int) -> None:
    x = normal(2, 3, *case[0])
    y = average(x, case, ceil_mode, include)
    for opset in (19, 22):
        check("AveragePool", [x], [y], opset=opset, count_include_pad=include, **attributes(case, ceil_mode), atol=1e-6)


@pytest.mark.parametrize("case", PLAIN)
def test_average_pool_old(check: Any, case: Any) -> None:
    x = normal(2, 3, *case[0])
    for opset in (1, 7, 10, 11):
        plain = attributes(case, dilated=False)
        check("AveragePool", [x], [average(x, case, 0, 0)], opset=opset, **plain, atol=1e-6)
        if opset >= 7:
            check("AveragePool", [x], [average(x, case, 0, 1)], opset=opset, count_include_pad=1, **plain, atol=1e-6)
        if opset >= 10:
            ceil = attributes(case, 1, dilated=False)
            check("AveragePool", [x], [average(x, case, 1, 1)], opset=opset, count_include_pad=1, **ceil, atol=1e-6)


@pytest.mark.parametrize("opset", [1, 7, 10, 11, 19, 22])
def test_average_pool_same(check: Any, opset: int) -> None:
    x = np.array([[[1, 2, 3, 4, 5, 6]]], np.float32)
    attributes = {"kernel_shape": [3], "strides": [2], "opset": opset}
    check("AveragePool", [x], [np.array([[[2, 4, 5.5]]], np.float32)], auto_pad="SAME_UPPER", **attributes)
    check("AveragePool", [x], [np.array([[[1.5, 3, 5]]], np.float32)], auto_pad="SAME_LOWER", **attributes)
    check("AveragePool", [x], [np.array([[[2, 4]]], np.float32)], auto_pad="VALID", **attributes)
    # 5 cells make ceil(5 / 2) windows, whatever the formula of version 11 says
    check("AveragePool", [x[..., :5]], [np.array([[[1.5, 3, 4.5]]], np.float32)], auto_pad="SAME_UPPER", **attributes)
    if opset >= 7:
        y = np.array([[[2, 4, 11 / 3]]], np.float32)
        check("AveragePool", [x], [y], auto_pad="SAME_UPPER", count_include_pad=1, **attributes)


def largest(x: np.ndarray, case: Any, ceil_mode: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The maxima and their numbers by rows and by columns."""
    size, kernel, strides, pads, dilations, *out = case
    shape = (*x.shape[:2], *out[ceil_mode])
    y, rows, columns = np.zeros(shape, x.dtype), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    plane = math.prod(size)
    for n, c in np.ndindex(*x.shape[:2]):
        for o, inside, _ in cells(size, kernel, strides, pads, dilations, out[ceil_mode]):
            best = inside[0]
            for at in inside:
                if x[n, c][at] > x[n, c][best] or (np.isnan(x[n, c][at]) and not np.isnan(x[n, c][best])):
                    best = at
            first = (n * x.shape[1] + c) * plane
            y[(n, c, *o)] = x[n, c][best]
            rows[(n, c, *o)] = first + np.ravel_multi_index(best, size)
            columns[(n, c, *o)] = first + np.ravel_multi_index(best, size, order="F")
    return y, rows, columns


@pytest.mark.parametrize("ceil_mode", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_max_pool(check: Any, case: Any, ceil_mode: int) -> None:
    x = np.round(2 * normal(2, 3, *case[0])) - 3  # many ties, mostly below zero: padding must not win
    x.flat[:: x.size // 5] = np.nan
    y, rows, columns = largest(x, case, ceil_mode)
    for opset in (10, 11, 12, 22):
        check("MaxPool", [x], [y], opset=opset, **attributes(case, ceil_mode))
        check("MaxPool", [x], [y, rows], opset=opset, **attributes(case, ceil_mode))
        check("MaxPool", [x], [y, columns], opset=opset, storage_order=1, **attributes(case, ceil_mode))


@pytest.mark.parametrize("case", PLAIN)
def test_max_pool_old(check: Any, case: Any) -> None:
    x = normal(2, 3, *case[0])
    y, rows, columns = largest(x, case, 0)
    check("MaxPool", [x], [y], opset=1, **attributes(case, dilated=False))
    check("MaxPool", [x], [y, rows], opset=8, **attributes(case, dilated=False))
    check("MaxPool", [x], [y, columns], opset=8, storage_order=1, **attributes(case, dilated=False))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.float16, np.float64, ml_dtypes.bfloat16])
def test_max_pool_dtypes(check: Any, dtype: Any) -> None:
    opset = 22 if dtype is ml_dtypes.bfloat16 else 12
    case = ((6, 5), (3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (3, 3), (3, 3))
    x = RNG.integers(0, 100, (2, 2, 6, 5)).astype(dtype)
    if dtype is not np.uint8:
        x = x - dtype(110)
    y, rows, _ = largest(x, case, 0)
    check("MaxPool", [x], [y, rows], opset=opset, **attributes(case))
    check("MaxPool", [x], [y], opset=opset, **attributes(case))


def test_max_pool_lowest_values(check: Any) -> None:
    low = np.full((1, 1, 3), -np.inf, np.float32)
    shape = {"kernel_shape": [2], "pads": [1, 1]}
    at = np.array([[[0, 0, 1, 2]]])
    check("MaxPool", [low], [np.full((1, 1, 4), -np.inf, np.float32), at], opset=11, **shape)
    check("MaxPool", [np.full((1, 1, 3), -128, np.int8)], [np.full((1, 1, 4), -128, np.int8), at], opset=12, **shape)
    # The last two windows hold nothing but padding.
    y, at = np.array([[[5, 5, -np.inf, -np.inf]]], np.float32), np.array([[[0, 0, -1, -1]]])
    check("MaxPool", [y[..., :1]], [y, at], opset=11, kernel_shape=[2], pads=[1, 3])


@pytest.mark.parametrize("op", ["AveragePool", "MaxPool", "LpPool"])
def test_empty(check: Any, op: str) -> None:
    shape = {"kernel_shape": [2, 2], "strides": [2, 1]}
    check(op, [normal(0, 3, 4, 4)], [np.zeros((0, 3, 2, 3), np.float32)], opset=18, **shape)
    check(op, [normal(2, 0, 4, 4)], [np.zeros((2, 0, 2, 3), np.float32)], opset=22, **shape)
    check(op, [normal(2, 1, 4, 1)], [np.zeros((2, 1, 2, 0), np.float32)], opset=22, **shape)
    if op == "MaxPool":
        check(op, [normal(0, 3, 4, 4)], [np.zeros((0, 3, 2, 3), np.float32), np.zeros((0, 3, 2, 3), np.int64)], opset=11, **shape)


@pytest.mark.parametrize("op", ["AveragePool", "MaxPool", "LpPool"])
def test_pools_fail(fails: Any, op: str) -> None:
    x = normal(1, 1, 4)
    fails(op, [x], "must fit the padded axis", opset=11, kernel_shape=[6])
    fails(op, [x], "strides must be at least 1", opset=11, kernel_shape=[2], strides=[0])
    fails(op, [x], "pads must be at least 0", opset=11, kernel_shape=[2], pads=[-1, 0])
    fails(op, [x], "pads", opset=11, kernel_shape=[2], pads=[1])
    fails(op, [x], "kernel_shape must have 1 values, one for each spatial axis", opset=11, kernel_shape=[2, 2])
    fails(op, [x], "kernel_shape must be at least 1", opset=11, kernel_shape=[0])
    fails(op, [x], "auto_pad", opset=11, kernel_shape=[2], auto_pad="SAME")
    fails(op, [x[0]], "spatial axes", opset=11, kernel_shape=[2])


def test_more_failures(fails: Any) -> None:
    x = normal(1, 1, 4)
    fails("MaxPool", [x], "storage_order", opset=11, kernel_shape=[2], storage_order=2)
    fails("LpPool", [x], "kernel_shape must be present", opset=1)
    fails("LpPool", [x], "p must be positive and finite", opset=11, kernel_shape=[2], p=0)
    fails("GlobalLpPool", [x], "p must be positive and finite", opset=1, p=math.inf)
    fails("GlobalMaxPool", [x[0]], "spatial axes", opset=1)


# --- norms and whole images -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("p", [1, 2, 3])
def test_lp_pool(check: Any, case: Any, p: int) -> None:
    size, kernel, strides, pads, dilations, *out = case
    x = normal(2, 2, *size)

    def expected(ceil_mode: int, p: float) -> np.ndarray:
        y = np.zeros((2, 2, *out[ceil_mode]))
        for o, inside, _ in cells(size, kernel, strides, pads, dilations, out[ceil_mode]):
            y[(..., *o)] = sum(abs(x[(..., *at)].astype(np.float64)) ** p for at in inside) ** (1 / p)
        return y.astype(np.float32)

    for opset in (18, 22):
        check("LpPool", [x], [expected(1, p)], opset=opset, p=p, **attributes(case, 1), rtol=1e-5)
        check("LpPool", [x], [expected(0, p)], opset=opset, p=p, **attributes(case), rtol=1e-5)
    if set(dilations) == {1}:
        plain = attributes(case, dilated=False)
        check("LpPool", [x], [expected(0, p + 0.5)], opset=1, p=p + 0.5, **plain, rtol=1e-5)
        for opset in (2, 11):
            check("LpPool", [x], [expected(0, p)], opset=opset, p=p, **plain, rtol=1e-5)


@pytest.mark.parametrize("opset", [1, 2, 11, 18, 22])
def test_lp_pool_auto_pad(check: Any, opset: int) -> None:
    x = np.array([[[3, -4, 12, 5]]], np.float32)  # p is 2 where nothing is said
    check("LpPool", [x], [np.array([[[5, 160**0.5, 13, 5]]], np.float32)], opset=opset, kernel_shape=[2], auto_pad="SAME_UPPER")
    check("LpPool", [x], [np.array([[[3, 5, 160**0.5, 13]]], np.float32)], opset=opset, kernel_shape=[2], auto_pad="SAME_LOWER")
    wide = x.astype(np.float64)
    check("LpPool", [wide], [np.array([[[5.0, 13]]])], opset=opset, kernel_shape=[2], auto_pad="VALID", strides=[2])


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 2, 4, 3), (2, 1, 2, 3, 2), (0, 2, 3)])
def test_global_pools(check: Any, shape: tuple[int, ...]) -> None:
    x = normal(*shape)
    flat = x.reshape(*shape[:2], math.prod(shape[2:])).astype(np.float64)
    out = (*shape[:2], *(1,) * (len(shape) - 2))
    for opset in (1, 22):
        check("GlobalAveragePool", [x], [flat.mean(axis=2).reshape(out).astype(np.float32)], opset=opset)
        check("GlobalMaxPool", [x], [flat.max(axis=2).reshape(out).astype(np.float32)], opset=opset)
    for opset, p in ((1, 2.0), (1, 1.5), (2, 1), (2, 3), (22, 2), (22, 4)):
        y = ((abs(flat) ** p).sum(axis=2) ** (1 / p)).reshape(out).astype(np.float32)
        check("GlobalLpPool", [x], [y], opset=opset, p=p, rtol=1e-5)
    check("GlobalLpPool", [x], [np.sqrt((flat**2).sum(axis=2)).reshape(out).astype(np.float32)], opset=2, rtol=1e-5)


def test_global_pools_dtypes_and_nan(check: Any) -> None:
    x = np.array([[[3, np.nan], [3, 4]]], np.float32)
    check("GlobalMaxPool", [x], [np.array([[[np.nan], [4]]], np.float32)], opset=1)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64):
        y = x[:, 1:].astype(dtype)
        check("GlobalLpPool", [y], [np.array([[[5]]], dtype)], opset=22)
        check("GlobalAveragePool", [y], [np.array([[[3.5]]], dtype)], opset=22)
    big = np.full((1, 1, 8), 60000, np.float16)  # the sum does not fit float16, the mean does
    check("GlobalAveragePool", [big], [np.full((1, 1, 1), 60000, np.float16)], opset=1)
    check("AveragePool", [big], [np.full((1, 1, 1), 60000, np.float16)], opset=7, kernel_shape=[8])


# --- the way back, and regions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("opset", [9, 11, 22])
def test_max_unpool(check: Any, opset: int) -> None:
    x, at = np.array([[[[1, 2], [3, 4]]]], np.float32), np.array([[[[5, 7], [13, 15]]]])
    y = np.zeros((1, 1, 4, 4), np.float32)
    y[0, 0, 1::2, 1::2] = x[0, 0]
    shape = {"kernel_shape": [2, 2], "strides": [2, 2], "opset": opset}
    check("MaxUnpool", [x, at], [y], **shape)
    check("MaxUnpool", [x.astype(np.float16), at, np.array([1, 1, 4, 4])], [y.astype(np.float16)], **shape)
    # more than the windows reach: zeros after them, the indices still number the 4 x 4 cells
    check("MaxUnpool", [x, at, np.array([1, 1, 5, 6])], [np.pad(y, ((0, 0), (0, 0), (0, 1), (0, 2)))], **shape)
    # windows of 3 with a padding of 1 go back to 3 cells, and so does the output_shape in its place
    z = np.array([[[7, 9]]], np.float32)
    for attributes, inputs in (({"pads": [1, 1]}, []), ({}, [np.array([1, 1, 3])]), ({"pads": [0, 0]}, [np.array([1, 1, 3])])):
        check("MaxUnpool", [z, np.array([[[0, 2]]]), *inputs], [np.array([[[7, 0, 9]]], np.float32)], opset=opset,
              kernel_shape=[3], strides=[2], **attributes)  # fmt: skip
    check("MaxUnpool", [x[:0], at[:0]], [y[:0]], **shape)
    batch = normal(2, 3, 6)
    at = np.arange(2 * 3 * 12).reshape(2, 3, 12)[..., ::2] + 1  # one plane after another
    y = np.zeros((2, 3, 12), np.float32)
    y[..., 1::2] = batch
    check("MaxUnpool", [batch, at], [y], opset=opset, kernel_shape=[2], strides=[2])


def test_max_unpool_undoes_max_pool(check: Any) -> None:
    x = normal(2, 2, 6, 9)
    y, at, _ = largest(x, ((6, 9), (2, 3), (2, 3), (0, 0, 0, 0), (1, 1), (3, 3), (3, 3)), 0)
    kept = np.where(np.isin(np.arange(x.size), at).reshape(x.shape), x, 0)
    check("MaxUnpool", [y, at], [kept], opset=11, kernel_shape=[2, 3], strides=[2, 3])


def test_max_unpool_fails(fails: Any) -> None:
    x, at = normal(1, 1, 2), np.array([[[0, 3]]])
    fails("MaxUnpool", [x, at + 1], "index must be in .* got 4", opset=11, kernel_shape=[2], strides=[2])
    fails("MaxUnpool", [x, at - 1], "index must be in .* got -1", opset=11, kernel_shape=[2], strides=[2])
    fails("MaxUnpool", [x, at[..., :1]], "indices and values must have equal shapes", opset=11, kernel_shape=[2])
    fails("MaxUnpool", [x, at, np.array([1, 2, 4])], "output_shape", opset=11, kernel_shape=[2])
    fails("MaxUnpool", [x, at, np.array([4])], "output_shape", opset=11, kernel_shape=[2])
    fails("MaxUnpool", [x, at], "must not exceed the unpadded output shape", opset=11, kernel_shape=[2], pads=[3, 2])


@pytest.mark.parametrize("opset", [1, 22])
def test_max_roi_pool(check: Any, opset: int) -> None:
    x = np.arange(72, dtype=np.float32).reshape(2, 1, 6, 6)
    x[1] *= -1
    rois = np.array([[0, 0, 0, 3, 3], [1, 1, 2, 5, 4], [0, 4, 4, 2, 2], [0, 4, 4, 9, 9], [0, -3, -3, -1, -1]], np.float32)
    y = np.array([
        [[7, 9], [19, 21]],  # 4 x 4 in quarters
        [[-49, -51], [-55, -57]],  # rows 2-3, 3-4; columns 1-3, 3-5: the middle ones belong to both halves
        [[28, 28], [28, 28]],  # the wrong way round: one cell
        [[35, 0], [0, 0]],  # what lies outside the image is empty
        [[0, 0], [0, 0]],
    ], np.float32).reshape(5, 1, 2, 2)  # fmt: skip
    check("MaxRoiPool", [x, rois], [y], opset=opset, pooled_shape=[2, 2])
    # Half away from zero, after scaling: 0.5 and 2.5 become 1 and 3.
    check("MaxRoiPool", [x, np.array([[0, 1, 1, 5, 5]], np.float32)], [np.array([[[[21]]]], np.float32)], opset=opset,
          pooled_shape=[1, 1], spatial_scale=0.5)  # fmt: skip
    half = [v.astype(np.float16) for v in (x, rois[:1], y[:1])]
    check("MaxRoiPool", half[:2], half[2:], opset=opset, pooled_shape=[2, 2])
    check("MaxRoiPool", [x, rois[:0]], [y[:0]], opset=opset, pooled_shape=[2, 2])
    x[0, 0, 0, 0] = np.nan
    check("MaxRoiPool", [x, rois[:1]], [np.array([[[[np.nan]]]], np.float32)], opset=opset, pooled_shape=[1, 1])


def test_max_roi_pool_fails(fails: Any) -> None:
    x, rois = normal(1, 1, 4, 4), np.array([[1, 0, 0, 1, 1]], np.float32)
    fails("MaxRoiPool", [x, rois], "batch index of region 0 must be in .* got 1", opset=1, pooled_shape=[1, 1])
    fails("MaxRoiPool", [x, rois[:, :4]], "R x 5", opset=1, pooled_shape=[1, 1])
    fails("MaxRoiPool", [x, rois * np.nan], "must be finite", opset=1, pooled_shape=[1, 1])
    fails("MaxRoiPool", [x, rois], "pooled_shape", opset=1, pooled_shape=[0, 1])


def test_ceil_mode_holds_for_valid(check: Any) -> None:
    x = np.array([[[1, 2, 3, 4]]], np.float32)
    shape = {"kernel_shape": [3], "strides": [2], "auto_pad": "VALID", "ceil_mode": 1}
    for opset in (10, 11, 22):
        check("MaxPool", [x], [np.array([[[3, 4]]], np.float32)], opset=opset, **shape)
        check("AveragePool", [x], [np.array([[[2, 3.5]]], np.float32)], opset=opset, **shape)
        check("AveragePool", [x], [np.array([[[2, 3.5]]], np.float32)], opset=opset, count_include_pad=1, **shape)
