"""GridSample, AffineGrid and RoiAlign against plain loops over places."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest


def reflect(v, low, high):
    while low != high and not low <= v <= high:
        v = 2 * low - v if v < low else 2 * high - v
    return low if low == high else v


def taps(v, size, mode, padding, align):
    """(index, weight) pairs along an axis; an index of None reads a zero."""
    low, high = (0, size - 1) if align else (-0.5, size - 0.5)
    v = (v + 1) / 2 * (size - 1) if align else ((v + 1) * size - 1) / 2
    if mode == "nearest":
        v = round(v)  # to even, as Python does
    if not low <= v <= high and padding != "zeros":
        v = min(max(v, 0), size - 1) if padding == "border" else reflect(v, low, high)
    f = math.floor(v)
    t = v - f
    a = -0.75

    def cubic(t):
        return (a + 2) * t**3 - (a + 3) * t**2 + 1 if t <= 1 else a * (t**3 - 5 * t**2 + 8 * t - 4)

    pairs = {
        "nearest": [(v, 1.0)],
        "linear": [(f, 1 - t), (f + 1, t)],
        "cubic": [(f + k, cubic(abs(t - k))) for k in (-1, 0, 1, 2)],
    }[mode]
    out = []
    for i, w in pairs:
        i = reflect(i, low, high) if padding == "reflection" else min(max(i, 0), size - 1) if padding == "border" else i
        out.append((int(i) if 0 <= i < size else None, w))
    return out


def sample(x, grid, mode, padding, align):
    n, c, *sizes = x.shape
    y = np.zeros((n, c, *grid.shape[1:-1]))
    for place in itertools.product(*map(range, grid.shape[:-1])):
        location = grid[place].astype(np.float64)[::-1]
        for combination in itertools.product(*(taps(v, s, mode, padding, align) for v, s in zip(location, sizes, strict=True))):
            if all(i is not None for i, _ in combination):
                y[(place[0], slice(None), *place[1:])] += math.prod(w for _, w in combination) * x[
                    (place[0], slice(None), *(i for i, _ in combination))]  # fmt: skip
    return y


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("sizes", [(5,), (3, 4), (1, 3), (2, 3, 4)])
def test_grid_sample(check, padding, align, sizes):
    rng = np.random.default_rng(len(sizes))
    x = rng.standard_normal((2, 3, *sizes))
    grid = rng.uniform(-2.5, 2.5, (2, *[3] * len(sizes), len(sizes)))
    for mode in ("nearest", "linear", "cubic"):
        y = sample(x, grid, mode, padding, align)
        for opset in (20, 22):
            check("GridSample", [x, grid], [y], opset=opset, mode=mode, padding_mode=padding, align_corners=align,
                  rtol=1e-9, atol=1e-9)  # fmt: skip
        if len(sizes) == 2:
            old = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
            check("GridSample", [x.astype(np.float32), grid.astype(np.float32)], [y.astype(np.float32)], opset=16, mode=old,
                  padding_mode=padding, align_corners=align, rtol=1e-3, atol=1e-4)  # fmt: skip


def test_grid_sample_edges(check, fails):
    x = np.arange(4, dtype=np.float32).reshape(1, 1, 4)
    grid = np.array([np.inf, -np.inf, 1e30, 0], np.float32).reshape(1, 4, 1)
    check("GridSample", [x, grid], [np.array([[[0, 0, 0, 1.5]]], np.float32)], opset=20)
    check("GridSample", [x, grid], [np.array([[[3, 0, 3, 1.5]]], np.float32)], opset=20, padding_mode="border")
    at = np.array([-0.5, 0.5, 1], np.float32).reshape(1, 3, 1)
    # Integers: computed as floats, then cast; 2**60 + 1 survives where nothing is computed.
    check("GridSample", [x.astype(np.int32) * 10, at], [np.array([[[5, 25, 15]]], np.int32)], opset=20)
    big = np.array([2**60 + 1, 2**60 + 3]).reshape(1, 1, 2)
    check("GridSample", [big, at], [big[..., [0, 1, 1]]], opset=20, mode="nearest", align_corners=1)
    text = np.array(["a", "b"], object).reshape(1, 1, 2)
    check("GridSample", [text, at], [text[..., [0, 1, 1]]], opset=20, mode="nearest", padding_mode="border")
    for dtype in (ml_dtypes.bfloat16, np.float16):
        check("GridSample", [x.astype(dtype), at.astype(dtype)], [np.array([[[0.5, 2.5, 1.5]]]).astype(dtype)], opset=22)
    check("GridSample", [x.astype(np.complex64) * 1j, at], [np.array([[[0.5j, 2.5j, 1.5j]]], np.complex64)], opset=20)
    check("GridSample", [x, at[:, :0]], [np.zeros((1, 1, 0), np.float32)], opset=20)
    check("GridSample", [x[:0], at[:0]], [np.zeros((0, 1, 3), np.float32)], opset=20, padding_mode="border")
    fails("GridSample", [x, at[..., [0, 0]]], "the grid must match an input of shape", opset=20)
    fails("GridSample", [x, at], "area", opset=20, mode="area")
    fails("GridSample", [x, at], "4 axes", opset=16)
    fails("GridSample", [text, at], "strings", opset=20)


def test_affine_grid(check, fails):
    rng = np.random.default_rng(0)
    for lengths, align in itertools.product([(2, 3), (4, 1), (2, 3, 4), (1, 2, 2)], (0, 1)):
        rank = len(lengths)
        theta = rng.standard_normal((2, rank, rank + 1))
        y = np.zeros((2, *lengths, rank))
        for place in itertools.product(*map(range, lengths)):
            pairs = zip(place, lengths, strict=True)
            v = [(2 * i / (n - 1) - 1 if n > 1 else 0) if align else (2 * i + 1) / n - 1 for i, n in pairs]
            y[(slice(None), *place)] = theta @ np.array([*v[::-1], 1])
        size = np.array([2, 5, *lengths])
        check("AffineGrid", [theta, size], [y], opset=20, align_corners=align)
        check("AffineGrid", [theta.astype(np.float16), size], [y.astype(np.float16)], opset=20, align_corners=align, atol=1e-2)
    check("AffineGrid", [np.zeros((0, 2, 3), np.float32), np.array([0, 1, 2, 2])], [np.zeros((0, 2, 2, 2), np.float32)], opset=20)
    fails("AffineGrid", [np.zeros((1, 2, 3), np.float32), np.array([1, 1, 2, 2, 2])], "theta must match size", opset=20)


def align(x, roi, image, out, ratio, scale, shift, mode):
    """One region, sample by sample."""
    left, top, right, bottom = (v * scale - shift for v in roi.astype(np.float64))
    wide, high = right - left, bottom - top
    if not shift:
        wide, high = max(wide, 1), max(high, 1)
    rows, columns = (ratio, ratio) if ratio else (math.ceil(high / out[0]), math.ceil(wide / out[1]))
    h, w = x.shape[2:]
    y = np.zeros((x.shape[1], *out))
    for i, j in itertools.product(*map(range, out)):
        samples = []
        for a, b in itertools.product(range(rows), range(columns)):
            v, u = top + (i + (a + 0.5) / rows) * high / out[0], left + (j + (b + 0.5) / columns) * wide / out[1]
            if not (-1 <= v <= h and -1 <= u <= w):
                samples.append([np.zeros(x.shape[1])] * 4)
                continue
            v, u = min(max(v, 0), h - 1), min(max(u, 0), w - 1)
            v0, u0 = int(v), int(u)
            v1, u1 = min(v0 + 1, h - 1), min(u0 + 1, w - 1)
            s, t = v - v0, u - u0
            f = x[image]
            corners = ((v0, 1 - s, u0, 1 - t), (v0, 1 - s, u1, t), (v1, s, u0, 1 - t), (v1, s, u1, t))
            samples.append([f[:, p, q] * a * b for p, a, q, b in corners])
        if samples:  # the greatest is that of the weighted pixels, as in ONNX's case
            y[:, i, j] = np.sum(samples, axis=(0, 1)) / len(samples) if mode == "avg" else np.max(samples, axis=(0, 1))
    return y


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("ratio", [0, 1, 3])
def test_roi_align(check, mode, ratio):
    rng = np.random.default_rng(ratio)
    x = rng.standard_normal((3, 2, 6, 7))
    start = rng.uniform(-4, 10, (7, 2))
    rois = np.concatenate([start, start + rng.uniform(-1, 12, (7, 2))], axis=1)
    images = rng.integers(0, 3, 7)
    for opset, coordinates in ((10, None), (16, None), (16, "output_half_pixel"), (22, "half_pixel")):
        shift = 0.5 if opset > 10 and coordinates != "output_half_pixel" else 0
        y = np.array([align(x, r, i, (3, 2), ratio, 0.5, shift, mode) for r, i in zip(rois, images, strict=True)])
        more = {"coordinate_transformation_mode": coordinates} if coordinates else {}
        check("RoiAlign", [x, rois, images], [y], opset=opset, mode=mode, output_height=3, output_width=2, sampling_ratio=ratio,
              spatial_scale=0.5, **more)  # fmt: skip


def test_roi_align_edges(check, fails):
    x = np.ones((1, 2, 3, 3), np.float32)
    roi = np.array([[0, 0, 2, 2]], np.float32)
    image = np.array([0])
    check("RoiAlign", [x, roi[:0], image[:0]], [np.zeros((0, 2, 1, 1), np.float32)], opset=16)
    check("RoiAlign", [x, roi[:, [2, 3, 0, 1]], image], [np.zeros((1, 2, 1, 1), np.float32)], opset=16)  # no extent
    narrow = ml_dtypes.bfloat16
    check("RoiAlign", [x.astype(narrow), roi.astype(narrow), image], [np.ones((1, 2, 1, 1), narrow)], opset=22)
    x[0, 0, 0, 0] = np.inf  # samples outside count nothing, not 0 * inf
    check("RoiAlign", [x, roi + 10, image], [np.zeros((1, 2, 1, 1), np.float32)], opset=16)
    fails("RoiAlign", [x, roi, np.array([1])], "batch index must be in .* got 1", opset=16)
    fails("RoiAlign", [x, roi, np.array([-1])], "batch index must be in .* got -1", opset=10)
    fails("RoiAlign", [x, roi, image], "sum", opset=16, mode="sum")
    fails("RoiAlign", [x, roi, np.array([0, 0])], "shapes", opset=16)
