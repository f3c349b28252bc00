"""Convolutions against the sums that define them, written as loops."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

RNG = np.random.default_rng(7)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


def conv(x: np.ndarray, w: np.ndarray, strides: Any, pads: Any, dilations: Any, group: int = 1) -> np.ndarray:
    """The definition, one output cell and one kernel cell at a time, in float64."""
    rank = x.ndim - 2
    x, w = x.astype(np.float64), w.astype(np.float64)
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    out = [(x.shape[2 + i] - (w.shape[2 + i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in range(rank)]
    y = np.zeros((x.shape[0], w.shape[0], *out))
    inputs, outputs = w.shape[1], w.shape[0] // group
    for m in range(w.shape[0]):
        channels = slice(m // outputs * inputs, (m // outputs + 1) * inputs)
        for o in itertools.product(*map(range, out)):
            for k in itertools.product(*map(range, w.shape[2:])):
                cell = tuple(o[i] * strides[i] + k[i] * dilations[i] for i in range(rank))
                y[(slice(None), m, *o)] += x[(slice(None), channels, *cell)] @ w[(m, slice(None), *k)]
    return y


CASES = [
    # spatial, kernel, strides, pads, dilations, channels, filters, group
    ((7,), (3,), (2,), (1, 0), (1,), 3, 4, 1),
    ((9,), (3,), (1,), (0, 2), (3,), 4, 6, 2),
    ((5, 6), (1, 1), (1, 1), (0, 0, 0, 0), (1, 1), 4, 2, 2),
    ((5, 6), (1, 1), (2, 3), (0, 0, 0, 0), (1, 1), 3, 2, 1),
    ((6, 5), (3, 2), (2, 1), (1, 0, 2, 1), (1, 2), 2, 3, 1),
    ((6, 6), (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 5, 5, 5),
    ((4, 5, 3), (2, 3, 1), (1, 2, 1), (1, 1, 0, 0, 1, 0), (2, 1, 1), 2, 4, 2),
    ((3, 3, 3, 3), (2, 1, 2, 2), (1, 1, 2, 1), (0,) * 8, (1, 1, 1, 2), 2, 2, 1),
]


@pytest.mark.parametrize("opset", [1, 11, 22])
@pytest.mark.parametrize("case", CASES)
def test_conv(check: Any, case: Any, opset: int) -> None:
    size, kernel, strides, pads, dilations, c, m, group = case
    x, w, b = normal(2, c, *size), normal(m, c // group, *kernel), normal(m)
    y = conv(x, w, strides, pads, dilations, group) + b.reshape(-1, *(1,) * len(size))
    check("Conv", [x, w, b], [y.astype(np.float32)], opset=opset, strides=strides, pads=pads, dilations=dilations, group=group,
          kernel_shape=kernel, rtol=1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize(("auto_pad", "pads"), [("SAME_UPPER", (0, 1)), ("SAME_LOWER", (1, 0)), ("VALID", (0, 0)),
                                                ("NOTSET", (0, 0))])  # fmt: skip
def test_conv_auto_pad(check: Any, auto_pad: str, pads: Any) -> None:
    x, w = normal(1, 2, 6), normal(3, 2, 3)
    y = conv(x, w, (2,), pads, (1,)).astype(np.float32)
    check("Conv", [x, w], [y], opset=11, auto_pad=auto_pad, strides=[2], rtol=1e-5, atol=1e-6)
    # A stride beyond the window leaves nothing to pad.
    check("Conv", [x, w[:, :, :1]], [conv(x, w[:, :, :1], (4,), (0, 0), (1,)).astype(np.float32)], opset=11, auto_pad=auto_pad,
          strides=[4], rtol=1e-5, atol=1e-6)  # fmt: skip


def test_conv_many_blocks(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import singa_backend.operators.conv as module

    monkeypatch.setattr(module, "BLOCK", 1)
    monkeypatch.setattr(module, "COLUMNS", 10)
    x, w = normal(2, 4, 9, 5), normal(4, 2, 3, 3)
    y = conv(x, w, (1, 1), (1, 1, 1, 1), (1, 1), 2).astype(np.float32)
    check("Conv", [x, w], [y], opset=22, pads=[1, 1, 1, 1], group=2, rtol=1e-5, atol=1e-5)


def test_conv_dtypes(check: Any) -> None:
    whole = np.arange(12).reshape(1, 2, 6)
    w = np.ones((1, 2, 2))
    y = conv(whole, w, (1,), (0, 0), (1,))
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float32, np.float64):
        check("Conv", [whole.astype(dtype), w.astype(dtype)], [y.astype(dtype)], opset=22)
    # float32 would lose the 1 next to 2**30
    check("Conv", [np.array([[[2.0**30, 1.0]]]), np.ones((1, 1, 2))], [np.array([[[2.0**30 + 1]]])], opset=11, rtol=0)
    # float16 inputs are summed in float32: 2048 + 1 + 1 is not 2048
    half = np.array([[[2048, 1, 1]]], np.float16)
    check("Conv", [half, np.ones((1, 1, 3), np.float16)], [np.array([[[2050]]], np.float16)], opset=11)


def test_conv_empty(check: Any) -> None:
    w = normal(3, 2, 3, 3)
    check("Conv", [normal(0, 2, 5, 5), w], [np.zeros((0, 3, 3, 3), np.float32)], opset=11)
    check("Conv", [normal(0, 2, 5, 5), w[:, :, :1, :1]], [np.zeros((0, 3, 5, 5), np.float32)], opset=11)
    check("Conv", [normal(1, 2, 2, 5), w], [np.zeros((1, 3, 0, 3), np.float32)], opset=11)  # floor((2 - 3) / 1) + 1 windows
    check("Conv", [normal(1, 0, 3, 3), w[:, :0]], [np.zeros((1, 3, 1, 1), np.float32)], opset=11)
    check("Conv", [normal(1, 2, 3, 3), w[:0]], [np.zeros((1, 0, 1, 1), np.float32)], opset=11)
    check("Conv", [normal(1, 2, 0, 3), w[:, :, :1]], [np.zeros((1, 3, 0, 1), np.float32)], opset=11)


def test_conv_nan_stays_in_its_windows(check: Any) -> None:
    x = np.array([[[1, np.nan, 3, 4, -np.inf]]], np.float32)
    check("Conv", [x, np.ones((1, 1, 2), np.float32)], [np.array([[[np.nan, np.nan, 7, -np.inf]]], np.float32)], opset=22)


def test_conv_fails(fails: Any) -> None:
    x, w = normal(1, 2, 4, 4), normal(3, 2, 3, 3)
    fails("Conv", [x, normal(3, 2, 7, 3)], "must fit the padded axis", opset=11)
    fails("Conv", [x, w], "strides must be at least 1", opset=11, strides=[0, 1])
    fails("Conv", [x, w], "dilations must be at least 1", opset=11, dilations=[1, -1])
    fails("Conv", [x, w], "pads must be at least 0", opset=11, pads=[0, -1, 0, 0])
    fails("Conv", [x, w], "pads", opset=11, pads=[0, 0])
    fails("Conv", [x, w], "strides must have 2 values, one for each spatial axis", opset=11, strides=[1])
    fails("Conv", [x, w], "auto_pad", opset=11, auto_pad="SAME")
    fails("Conv", [x, w], "kernel_shape", opset=11, kernel_shape=[3, 2])
    fails("Conv", [x, w], "2 groups", opset=11, group=2)
    fails("Conv", [x, w], "group must be at least 1, got 0", opset=11, group=0)
    fails("Conv", [x, w, normal(2)], "bias", opset=11)
    fails("Conv", [x, w[..., 0]], "equal ranks", opset=11)
    fails("Conv", [x[..., 0, 0], w[..., 0, 0]], "spatial axes", opset=11)


# --- integers -------------------------------------------------------------------------------------------------------


def integers(dtype: Any, *shape: int) -> np.ndarray:
    limits = np.iinfo(dtype)
    return RNG.integers(limits.min, limits.max + 1, shape).astype(dtype)


@pytest.mark.parametrize("dtypes", [(np.uint8, np.uint8), (np.uint8, np.int8), (np.int8, np.int8), (np.int8, np.uint8)])
def test_conv_integer(check: Any, dtypes: Any) -> None:
    x, w = integers(dtypes[0], 2, 4, 6, 5), integers(dtypes[1], 4, 2, 3, 2)
    x_zero, w_zero = integers(dtypes[0]), integers(dtypes[1], 4)
    args = ((2, 1), (1, 1, 0, 1), (1, 2), 2)
    attributes = {"strides": [2, 1], "pads": [1, 1, 0, 1], "dilations": [1, 2], "group": 2}
    wide = x.astype(np.int64) - x_zero.astype(np.int64)
    y = conv(wide, w.astype(np.int64) - w_zero.astype(np.int64).reshape(4, 1, 1, 1), *args)
    check("ConvInteger", [x, w, x_zero, w_zero], [y.astype(np.int32)], opset=10, **attributes)
    one = conv(wide, w.astype(np.int64) - int(w_zero[0]), *args)
    check("ConvInteger", [x, w, x_zero, w_zero[0]], [one.astype(np.int32)], opset=10, **attributes)
    check("ConvInteger", [x, w], [conv(x, w, *args).astype(np.int32)], opset=10, **attributes)
    check("ConvInteger", [x, w, x_zero.reshape(1)], [conv(wide, w, *args).astype(np.int32)], opset=10, **attributes)


def test_conv_integer_is_exact_and_wraps(check: Any) -> None:
    n = 40_000  # 40000 * 255 * 255 is above 2**31
    x, w = np.full((1, 1, n), 255, np.uint8), np.full((1, 1, n), 255, np.uint8)
    check("ConvInteger", [x, w], [np.array([[[n * 255 * 255 - 2**32]]], np.int32)], opset=10)
    x[..., 0] = w[..., 0] = 1
    check("ConvInteger", [x, w], [np.array([[[(n - 1) * 255 * 255 + 1 - 2**32]]], np.int32)], opset=10)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("per_channel", [False, True])
def test_qlinear_conv(check: Any, dtype: Any, per_channel: bool) -> None:
    x, w, b = integers(dtype, 2, 2, 5, 4), integers(np.int8, 3, 2, 3, 3), RNG.integers(-9999, 9999, 3).astype(np.int32)
    shape = (3,) if per_channel else ()
    x_zero, w_zero, y_zero = integers(dtype), integers(np.int8, *shape), integers(dtype)
    x_scale, y_scale = np.float32(0.25), np.float32(0.5)  # powers of two: the factors are exact and halves occur
    w_scale = np.array([2**-7, 2**-8, 2**-6] if per_channel else 2**-7, np.float32)
    wide = w.astype(np.int64) - w_zero.astype(np.int64).reshape(-1, 1, 1, 1)
    y = conv(x.astype(np.int64) - int(x_zero), wide, (1, 1), (1, 0, 1, 1), (1, 1)) + b.reshape(3, 1, 1)
    y = np.rint(y * (w_scale.astype(np.float64) * 0.5).reshape(-1, 1, 1)) + int(y_zero)
    limits = np.iinfo(dtype)
    inputs = [x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, b]
    check("QLinearConv", inputs, [np.clip(y, limits.min, limits.max).astype(dtype)], opset=10, pads=[1, 0, 1, 1])


def test_qlinear_conv_rounds_before_the_zero_point(check: Any) -> None:
    x = np.array([[[1, 3, 5]]], np.uint8)  # 0.5, 1.5, 2.5 round to 0, 2, 2; the zero point 3 comes after
    one, zero = np.float32(1), np.uint8(0)
    y = np.array([[[3, 5, 5]]], np.uint8)
    check("QLinearConv", [x, one, zero, np.ones((1, 1, 1), np.uint8), one, zero, np.float32(2), np.uint8(3)], [y], opset=10)


# --- transposed -----------------------------------------------------------------------------------------------------


def transpose(x: np.ndarray, w: np.ndarray, strides: Any, dilations: Any, group: int, begins: Any, out: Any) -> np.ndarray:
    """Every input cell adds its filter to the output, which is `out` cells from `begins` on."""
    rank, outputs, inputs = x.ndim - 2, w.shape[1], x.shape[1] // group
    y = np.zeros((x.shape[0], outputs * group, *out))
    for n, c in np.ndindex(*x.shape[:2]):
        for cell in np.ndindex(*x.shape[2:]):
            for k in np.ndindex(*w.shape[2:]):
                at = tuple(cell[i] * strides[i] + k[i] * dilations[i] - begins[i] for i in range(rank))
                if all(0 <= a < o for a, o in zip(at, out, strict=True)):
                    first = c // inputs * outputs
                    y[(n, slice(first, first + outputs), *at)] += float(x[(n, c, *cell)]) * w[(c, slice(None), *k)]
    return y


@pytest.mark.parametrize("opset", [1, 11, 22])
@pytest.mark.parametrize("case", [
    ((4,), (3,), (2,), (1, 0), (1,), (1,), 2, 3, 1),
    ((3, 4), (2, 3), (1, 2), (0, 1, 1, 0), (2, 1), (0, 1), 4, 2, 2),
    ((2, 3, 2), (2, 1, 3), (2, 1, 1), (0, 0, 1, 1, 0, 0), (1, 1, 2), (0, 0, 1), 3, 1, 3),
])  # fmt: skip
def test_conv_transpose(check: Any, case: Any, opset: int) -> None:
    size, kernel, strides, pads, dilations, extra, c, m, group = case
    x, w, b = normal(2, c, *size), normal(c, m, *kernel), normal(m * group)
    rank = len(size)
    full = [strides[i] * (size[i] - 1) + extra[i] + (kernel[i] - 1) * dilations[i] + 1 for i in range(rank)]
    out = [full[i] - pads[i] - pads[rank + i] for i in range(rank)]
    y = transpose(x, w, strides, dilations, group, pads[:rank], out) + b.reshape(-1, *(1,) * rank)
    check("ConvTranspose", [x, w, b], [y.astype(np.float32)], opset=opset, strides=strides, pads=pads, dilations=dilations,
          output_padding=extra, group=group, kernel_shape=kernel, rtol=1e-5, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize(("opset", "auto_pad", "odd_at_end"), [
    (1, "NOTSET", True), (1, "SAME_LOWER", True), (1, "SAME_UPPER", False),
    (11, "NOTSET", False), (11, "SAME_LOWER", False), (11, "SAME_UPPER", True), (22, "SAME_UPPER", True), (22, "VALID", False),
])  # fmt: skip
def test_conv_transpose_odd_padding(check: Any, opset: int, auto_pad: str, odd_at_end: bool) -> None:
    x, w = np.array([[[1, 2, 3]]], np.float32), np.array([[[1, 10, 100]]], np.float32)
    full = np.array([1, 10, 102, 20, 203, 30, 300], np.float32)  # one cell too many for output_shape
    y = full[:-1] if odd_at_end else full[1:]
    check("ConvTranspose", [x, w], [y.reshape(1, 1, 6)], opset=opset, auto_pad=auto_pad, strides=[2], output_shape=[6])


def test_conv_transpose_output_shape(check: Any) -> None:
    x, w = np.array([[[1, 2, 3]]], np.float32), np.array([[[1, 10]]], np.float32)
    y = np.array([[[1, 10, 0, 2, 20, 0, 3, 30, 0]]], np.float32)  # the stride outgrows the window: zeros at the end
    check("ConvTranspose", [x, w], [y], opset=11, strides=[3], auto_pad="SAME_UPPER")
    check("ConvTranspose", [x, w], [y], opset=11, strides=[3], output_shape=[9])
    check("ConvTranspose", [x, w], [y], opset=1, strides=[3], output_shape=[1, 1, 9])
    # auto_pad alone: the odd cell follows the attribute's text in every version
    w3, full = np.array([[[1, 10, 100]]], np.float32), np.array([[[1, 10, 102, 20, 203, 30, 300]]], np.float32)
    for opset in (1, 11, 22):
        check("ConvTranspose", [x, w3], [full[..., :-1]], opset=opset, strides=[2], auto_pad="SAME_UPPER")
        check("ConvTranspose", [x, w3], [full[..., 1:]], opset=opset, strides=[2], auto_pad="SAME_LOWER")
        check("ConvTranspose", [x, w3], [full], opset=opset, strides=[2], auto_pad="VALID")


def test_conv_transpose_edges(check: Any) -> None:
    x, w = normal(0, 2, 3), normal(2, 3, 2)
    check("ConvTranspose", [x, w], [np.zeros((0, 3, 4), np.float32)], opset=11)
    check("ConvTranspose", [x, w[:, :0]], [np.zeros((0, 0, 4), np.float32)], opset=11)
    check("ConvTranspose", [normal(2, 2, 3), w[:, :0]], [np.zeros((2, 0, 4), np.float32)], opset=11)
    check("ConvTranspose", [normal(2, 0, 3), w[:0]], [np.zeros((2, 3, 4), np.float32)], opset=11)
    one = np.ones((1, 1, 2))
    check("ConvTranspose", [one.astype(ml_dtypes.bfloat16)] * 2, [np.array([[[1, 2, 1]]], ml_dtypes.bfloat16)], opset=22)
    check("ConvTranspose", [one, one * (2.0**30 + 1)], [np.array([[[1, 2, 1]]]) * (2.0**30 + 1)], opset=11, rtol=0)


def test_conv_transpose_fails(fails: Any) -> None:
    x, w = normal(1, 2, 3), normal(2, 3, 2)
    fails("ConvTranspose", [x, normal(3, 1, 2)], "groups", opset=11)
    fails("ConvTranspose", [x, w], "must not exceed the unpadded output shape", opset=11, pads=[3, 2])
    for opset in (1, 11, 22):
        fails("ConvTranspose", [x, w], "output_padding", opset=opset, output_padding=[1])
    fails("ConvTranspose", [x, w], "auto_pad", opset=1, auto_pad="SOME", output_shape=[4])
    fails("ConvTranspose", [x, w], "output_shape", opset=11, output_shape=[1, 3, 4])
    fails("ConvTranspose", [x, w], "auto_pad", opset=11, auto_pad="SOME", output_shape=[4])


# --- deformable and causal ------------------------------------------------------------------------------------------


def interpolate(plane: np.ndarray, place: Any) -> float:
    """Multilinear, with zeros outside."""
    low = [int(np.floor(p)) for p in place]
    total = 0.0
    for corner in itertools.product((0, 1), repeat=plane.ndim):
        cell = tuple(a + c for a, c in zip(low, corner, strict=True))
        if all(0 <= a < s for a, s in zip(cell, plane.shape, strict=True)):
            total += plane[cell] * np.prod([1 - abs(p - a) for p, a in zip(place, cell, strict=True)])
    return total


@pytest.mark.parametrize("opset", [19, 22])
@pytest.mark.parametrize("case", [((6,), (3,), (2,), (1, 1), (1,)), ((5, 4), (2, 3), (1, 2), (1, 0, 0, 2), (2, 1)),
                                  ((3, 4, 3), (2, 1, 2), (1, 2, 1), (0, 0, 1, 1, 0, 0), (1, 1, 1))])  # fmt: skip
def test_deform_conv(check: Any, case: Any, opset: int) -> None:
    size, kernel, strides, pads, dilations = case
    rank, cells, group, groups, c, m = len(size), int(np.prod(kernel)), 2, 2, 4, 6
    out = [(size[i] + pads[i] + pads[rank + i] - (kernel[i] - 1) * dilations[i] - 1) // strides[i] + 1 for i in range(rank)]
    x, w, b = normal(2, c, *size), normal(m, c // group, *kernel), normal(m)
    offset, mask = normal(2, groups * cells * rank, *out) * np.float32(2), normal(2, groups * cells, *out)
    y = np.zeros((2, m, *out)) + b.reshape(-1, *(1,) * rank)
    for n, f in np.ndindex(2, m):
        for o in np.ndindex(*out):
            for i in range(c // group):
                channel = f // (m // group) * (c // group) + i
                g = channel // (c // groups)
                for number, k in enumerate(np.ndindex(*kernel)):
                    at = g * cells + number
                    moved = [float(offset[(n, at * rank + d, *o)]) for d in range(rank)]
                    place = [o[d] * strides[d] - pads[d] + k[d] * dilations[d] + moved[d] for d in range(rank)]
                    y[(n, f, *o)] += w[(f, i, *k)] * mask[(n, at, *o)] * interpolate(x[n, channel], place)
    check("DeformConv", [x, w, offset, b, mask], [y.astype(np.float32)], opset=opset, strides=strides, pads=pads,
          dilations=dilations, group=group, offset_group=groups, rtol=1e-4, atol=1e-4)  # fmt: skip


def test_deform_conv_edges(check: Any) -> None:
    x, w = np.array([[[1, 2, 4]]], np.float32), np.ones((1, 1, 1), np.float32)
    offset = np.array([[[-0.5, np.inf, np.nan]]], np.float32)  # half outside; far outside; nowhere
    check("DeformConv", [x, w, offset], [np.array([[[0.5, 0, np.nan]]], np.float32)], opset=19)
    check("DeformConv", [x[:0], w, offset[:0]], [np.zeros((0, 1, 3), np.float32)], opset=22)
    narrow = [v.astype(ml_dtypes.bfloat16) for v in (x, w, np.full((1, 1, 3), 0.5))]
    check("DeformConv", narrow, [np.array([[[1.5, 3, 2]]], ml_dtypes.bfloat16)], opset=22)


def test_deform_conv_fails(fails: Any) -> None:
    x, w, offset = normal(1, 1, 3), normal(1, 1, 1), normal(1, 1, 3)
    fails("DeformConv", [x, w, offset[..., :2]], "offset must have shape", opset=19)
    fails("DeformConv", [x, w, offset], "offset_group must be a positive divisor", opset=19, offset_group=2)
    fails("DeformConv", [x, w, offset, None, offset[..., :1]], "mask must have shape", opset=19)


@pytest.mark.parametrize("activation", ["none", "silu", "swish"])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(("length", "k"), [(5, 3), (1, 4), (4, 1), (0, 3)])
def test_causal_conv(check: Any, activation: str, given: bool, length: int, k: int) -> None:
    x, w, b, past = normal(2, 3, length), normal(3, 1, k), normal(3), normal(2, 3, k - 1)
    seen = np.concatenate([past if given else 0 * past, x], axis=2)
    y = np.zeros((2, 3, length))
    for t, j in np.ndindex(length, k):
        y[:, :, t] += seen[:, :, t + j] * w[:, 0, j]
    y = y + (b.reshape(3, 1) if given else 0)
    if activation != "none":
        y = y / (1 + np.exp(-y))
    check("CausalConvWithState", [x, w, b, past] if given else [x, w], [y.astype(np.float32), seen[:, :, length:]], opset=27,
          activation=activation, rtol=1e-5, atol=1e-6)  # fmt: skip


def test_causal_conv_edges(check: Any) -> None:
    x, w = normal(1, 2, 3), normal(2, 1, 3)
    for dtype in (np.float16, ml_dtypes.bfloat16):
        ones = np.ones((1, 1, 2), dtype)
        state, y = np.array([[[5]]], dtype), np.array([[[6, 2]]], dtype)
        check("CausalConvWithState", [ones, ones, None, state], [y, ones[..., :1]], opset=27)
    check("CausalConvWithState", [x[:, :0], w[:0]], [x[:, :0], np.zeros((1, 0, 2), np.float32)], opset=27)


def test_causal_conv_fails(fails: Any) -> None:
    x, w = normal(1, 2, 3), normal(2, 1, 3)
    fails("CausalConvWithState", [x, w], "activation", opset=27, outputs=2, activation="relu")
    fails("CausalConvWithState", [x, w[:1]], "C x 1 x k", opset=27, outputs=2)
    fails("CausalConvWithState", [x, w, None, normal(1, 2, 3)], "past_state", opset=27, outputs=2)


def test_equal_filters_make_equal_channels(check: Any) -> None:
    """Also where sums are so large that float32 rounds them by hundreds: BLAS kernels differ from row to row."""
    x = (np.random.default_rng(0).random((1, 512, 3, 13)) * 2e9).astype(np.float32)
    w = np.full((1000, 512, 1, 1), 0.02, np.float32)
    wide = np.float32(0.02).astype(np.float64) * x.astype(np.float64).sum(axis=1, keepdims=True)
    (y,) = check("Conv", [x, w], [np.repeat(wide, 1000, axis=1).astype(np.float32)], opset=22, rtol=2e-6)
    np.testing.assert_array_equal(y, np.repeat(y[:, :1], 1000, axis=1))
