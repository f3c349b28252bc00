"""Resize and Upsample against plain loops over output places."""

import itertools
import math

import ml_dtypes
import numpy as np
import pytest
from onnx import parser

from singa_backend import OperatorError, SingaBackend

NOTHING = np.zeros(0, np.float32)


def kernel(t, mode, a):
    t = abs(t)
    if mode == "linear":
        return max(1 - t, 0)
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


def place(x, mode, old, new, scale, roi):
    """The formulas of the text, one number at a time."""
    width = old * scale
    return {
        "half_pixel": lambda: (x + 0.5) / scale - 0.5,
        "pytorch_half_pixel": lambda: (x + 0.5) / scale - 0.5 if new > 1 else 0.0,
        "half_pixel_symmetric": lambda: old / 2 * (1 - new / width) + (x + 0.5) / scale - 0.5,
        "align_corners": lambda: x * (old - 1) / (width - 1) if new > 1 else 0.0,
        "asymmetric": lambda: x / scale,
        "tf_half_pixel_for_nn": lambda: (x + 0.5) / scale,
        "tf_crop_and_resize": lambda: (
            roi[0] * (old - 1) + x * (roi[1] - roi[0]) * (old - 1) / (new - 1) if new > 1 else 0.5 * (roi[0] + roi[1]) * (old - 1)
        ),
    }[mode]()


def along(
    x, axis, new, scale, mode, coordinates, nearest="round_prefer_floor", a=-0.75, antialias=0, exclude=0, roi=(0, 1), fill=7.0
):
    x = np.moveaxis(np.asarray(x, np.float64), axis, 0)
    old, out = len(x), []
    for i in range(new):
        at = place(i, coordinates, old, new, scale, roi)
        if coordinates == "tf_crop_and_resize" and not 0 <= at <= old - 1:
            out.append(np.full(x.shape[1:], fill))
            continue
        if mode == "nearest":
            k = {"round_prefer_floor": math.ceil(at - 0.5), "round_prefer_ceil": math.floor(at + 0.5),
                 "floor": math.floor(at), "ceil": math.ceil(at)}[nearest]  # fmt: skip
            out.append(x[min(max(k, 0), old - 1)])
            continue
        shrink = min(scale, 1) if antialias else 1
        taps = [(k, kernel((k - at) * shrink, mode, a)) for k in range(-60, old + 60)]
        if exclude:
            taps = [(k, w) for k, w in taps if 0 <= k < old]
        total = sum(w for _, w in taps)
        out.append(sum(w / total * x[min(max(k, 0), old - 1)] for k, w in taps))
    return np.moveaxis(np.array(out), 0, axis)


@pytest.mark.parametrize("opset", [11, 13, 18, 19])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
def test_every_coordinate_mode(check, opset, mode):
    rng = np.random.default_rng(opset)
    x = rng.standard_normal((2, 5, 7)).astype(np.float32)
    modes = ["half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric", "tf_half_pixel_for_nn"]
    for coordinates, (s, t) in itertools.product(modes + ["half_pixel_symmetric"] * (opset >= 19), [(1.7, 0.45), (0.21, 2.9)]):
        scales = np.array([1, s, t], np.float32)
        y = x
        for axis in (1, 2):
            scale = float(scales[axis])
            y = along(y, axis, math.floor(x.shape[axis] * scale), scale, mode, coordinates)
        inputs = [x, NOTHING, scales] if opset == 11 else [x, None, scales]
        check("Resize", inputs, [y.astype(np.float32)], opset=opset, mode=mode, atol=1e-5,
              coordinate_transformation_mode=coordinates)  # fmt: skip


@pytest.mark.parametrize("nearest", ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"])
def test_nearest_modes_and_sizes(check, nearest):
    x = np.arange(6, dtype=np.int64) + 2**53 + 1  # no detour through floats
    for new, coordinates in itertools.product([1, 3, 4, 9, 12], ["half_pixel", "asymmetric", "align_corners"]):
        index = along(np.arange(6), 0, new, new / 6, "nearest", coordinates, nearest).astype(int)
        check("Resize", [x, None, None, np.array([new])], [x[index]], opset=13, nearest_mode=nearest,
              coordinate_transformation_mode=coordinates)  # fmt: skip


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("antialias", [0, 1])
@pytest.mark.parametrize("exclude", [0, 1])
def test_kernels(check, mode, antialias, exclude):
    x = np.random.default_rng(3).standard_normal((9, 2))
    for new in (1, 2, 4, 7, 13):
        y = along(x, 0, new, new / 9, mode, "half_pixel", a=-0.5, antialias=antialias, exclude=exclude)
        check("Resize", [x, None, None, np.array([new])], [y], opset=18, mode=mode, antialias=antialias, exclude_outside=exclude,
              cubic_coeff_a=-0.5, axes=[-2], rtol=1e-12, atol=1e-12)  # fmt: skip


def test_crop(check):
    x = np.random.default_rng(4).standard_normal((5, 6)).astype(np.float32)
    roi = np.array([0.25, -0.2, 0.75, 1.1], np.float32)
    for mode in ("nearest", "linear", "cubic"):
        y = along(x, 0, 3, 1, mode, "tf_crop_and_resize", roi=(roi[0], roi[2]))
        y = along(y, 1, 7, 1, mode, "tf_crop_and_resize", roi=(roi[1], roi[3]))
        check("Resize", [x, roi, None, np.array([3, 7])], [y.astype(np.float32)], opset=13, mode=mode, extrapolation_value=7.0,
              coordinate_transformation_mode="tf_crop_and_resize", rtol=1e-5, atol=1e-5)  # fmt: skip
    # The end of the roi is the last place exactly, whatever the rounding on the way there.
    line = np.arange(8, dtype=np.float32)
    for start in np.linspace(0, 0.9, 7, dtype=np.float32):
        y = (start * 7 + np.arange(5) * (1 - start) * 7 / 4).astype(np.float32)
        check("Resize", [line, np.array([start, 1], np.float32), None, np.array([5])], [y], opset=19, mode="linear",
              coordinate_transformation_mode="tf_crop_and_resize", extrapolation_value=-1.0, rtol=1e-5)  # fmt: skip


def test_policies(check):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for policy, shape in (("stretch", (7, 5)), ("not_larger", (4, 5)), ("not_smaller", (7, 9))):  # 5/4 and 7/3; 9.33 is 9
        scale = {"stretch": (7 / 3, 5 / 4), "not_larger": (5 / 4,) * 2, "not_smaller": (7 / 3,) * 2}[policy]
        y = along(along(x, 0, shape[0], scale[0], "linear", "half_pixel"), 1, shape[1], scale[1], "linear", "half_pixel")
        check("Resize", [x, None, None, np.array([5, 7])], [y.astype(np.float32)], opset=18, mode="linear", axes=[1, 0],
              keep_aspect_ratio_policy=policy)  # fmt: skip
    # 2 * 5/4 is 2.5, and halves go up.
    check("Resize", [np.zeros((2, 4), np.float32), None, None, np.array([9, 5])], [np.zeros((3, 5), np.float32)], opset=18,
          keep_aspect_ratio_policy="not_larger")  # fmt: skip


def test_types(check):
    two = np.array([2], np.float32)
    for dtype in (np.int8, np.uint16, np.float16, ml_dtypes.bfloat16, np.complex64, np.bool_):
        x = np.array([1, 0, 1]).astype(dtype)
        check("Resize", [x, None, two], [np.repeat(x, 2)], opset=13)
    text = np.array(["a", "b"], object)
    check("Resize", [text, None, two], [np.repeat(text, 2)], opset=13)
    half = np.array([0, 1], np.float32)
    for dtype in (np.float16, ml_dtypes.bfloat16, np.float64, np.complex64):
        y = np.array([0, 0.25, 0.75, 1]).astype(dtype)
        check("Resize", [half.astype(dtype), None, two], [y], opset=13, mode="linear")
    # Fractions are dropped; a cubic's overshoot stays within the type; a constant stays itself.
    check("Resize", [np.array([0, 10], np.int32), None, two], [np.array([0, 2, 7, 10], np.int32)], opset=13, mode="linear")
    x = np.array([0, 255, 255, 0], np.uint8)
    y = np.trunc(np.clip(along(x, 0, 8, 2.0, "cubic", "half_pixel"), 0, 255)).astype(np.uint8)
    check("Resize", [x, None, two], [y], opset=13, mode="cubic")
    for dtype in (np.int64, np.uint64):
        for bound in (np.iinfo(dtype).min, np.iinfo(dtype).max):
            check("Resize", [np.full(2, bound, dtype), None, two], [np.full(4, bound, dtype)], opset=13, mode="linear")
    check("Resize", [np.full(7, 5), None, None, np.array([23])], [np.full(23, 5)], opset=13, mode="linear")


def test_edges(check, fails):
    one = np.array([1], np.float32)
    x = np.array([np.inf, 1, np.nan, -0.0], np.float32)
    check("Resize", [x, None, one], [x], opset=13, mode="cubic")
    # A place without weight has no say: only the neighbours of infinity become infinite.
    x = np.array([0, np.inf, 0, 0, 0], np.float32)
    check("Resize", [x, None, None, np.array([9])], [np.array([0, np.inf, np.inf, np.inf, 0, 0, 0, 0, 0], np.float32)], opset=13,
          mode="linear", coordinate_transformation_mode="align_corners")  # fmt: skip
    check("Resize", [np.zeros((0, 3), np.float32), None, np.array([2, 2], np.float32)], [np.zeros((0, 6), np.float32)], opset=13)
    check("Resize", [np.ones(1, np.float32), None, np.array([0.5], np.float32)], [NOTHING], opset=13, mode="linear")
    check("Resize", [np.float32(3), None, NOTHING], [np.float32(3)], opset=13)
    check("Resize", [np.arange(10.0), None, np.array([0.7], np.float32)], [np.array([0, 2, 3, 5, 6, 7, 9.0])], opset=13)
    fails("Resize", [x], "neither", opset=13)
    fails("Resize", [x, None, one, np.array([5])], "both", opset=13)
    fails("Resize", [x, None, np.array([1, 1], np.float32)], "scales must have 1 values, .* got 2", opset=13)
    fails("Resize", [x, None, np.array([0], np.float32)], "scale of axis 0 must be positive", opset=13)
    fails("Resize", [x, None, None, np.array([-1])], "negative", opset=13)
    fails("Resize", [x[:0], None, None, np.array([3])], "cannot resize an empty tensor", opset=13)
    fails("Resize", [x, None, one], "mode must be .* got 'area'", opset=13, mode="area")
    fails("Resize", [x, None, one * 2], "must be a mode of this version", opset=13, coordinate_transformation_mode="centre")
    fails("Resize", [x, None, one * 2], "Resize-19", opset=18, coordinate_transformation_mode="half_pixel_symmetric")
    fails("Resize", [x, None, one * 2], "roi", opset=18, coordinate_transformation_mode="tf_crop_and_resize")
    fails("Resize", [x, None, one], "axis must be in .* got 1", opset=18, axes=[1])
    fails("Resize", [np.array(["a"], object), None, one * 2], "strings", opset=13, mode="linear")


def test_resize_10(check):
    x = np.arange(8, dtype=np.float32)
    check("Resize", [x, np.array([2], np.float32)], [np.repeat(x, 2)], opset=10)
    check("Resize", [x, np.array([0.6], np.float32)], [np.array([0, 2, 4, 5], np.float32)], opset=10)  # rounds up to shrink
    y = along(x, 0, 20, 2.5, "linear", "asymmetric").astype(np.float32)
    check("Resize", [x, np.array([2.5], np.float32)], [y], opset=10, mode="linear")


def test_upsample(check, fails):
    x = np.random.default_rng(5).standard_normal((1, 2, 3, 4)).astype(np.float32)
    near = np.repeat(np.repeat(x, 2, 2), 3, 3)
    line = along(along(x, 2, 6, 2, "linear", "asymmetric"), 3, 12, 3, "linear", "asymmetric").astype(np.float32)
    scales = np.array([1, 1, 2, 3], np.float32)
    for y, mode, old in ((near, "nearest", "nearest"), (line, "linear", "bilinear")):
        check("Upsample", [x], [y], opset=1, height_scale=2.0, width_scale=3.0, mode=old)
        check("Upsample", [x], [y], opset=7, scales=[1.0, 1.0, 2.0, 3.0], mode=mode)
        check("Upsample", [x, scales], [y], opset=9, mode=mode)
        check("Upsample", [x, scales], [y], opset=10, mode=mode)
    whole = np.arange(4).reshape(1, 1, 2, 2) + 2**60 + 1
    check("Upsample", [whole], [whole[:, :, [0, 0, 1]][..., [0, 0, 0, 1, 1]]], opset=1, height_scale=1.5, width_scale=2.5)
    fails("Upsample", [x, scales / 4], "scales must be at least 1", opset=9)
    fails("Upsample", [x[0]], "4 axes", opset=1, height_scale=2.0, width_scale=2.0)
    fails("Upsample", [x, scales], "cubic", opset=9, mode="cubic")


def test_a_plan_refuses_the_axes_that_the_definition_refuses():
    """Each axis, although there is a scale for each valid one."""
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[2, 4] x) => (float[m, n] y) <float[1] s = {2.0}> { y = Resize'
    made = parser.parse_model(f"{text} <axes = [0, -32768]> (x, , s) }}")
    for level in (0, 2):
        with pytest.raises(OperatorError, match="axis must be in"):
            SingaBackend.prepare(made, optimize=level).run([np.zeros((2, 4), np.float32)])
