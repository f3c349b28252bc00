"""Operators of com.microsoft on indices and images: what drawn nodes do not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.microsoft_nodes import check_gradients, ours, theirs

from singa_backend import OperatorError
from singa_backend.engines.oracle import Oracle

RNG = np.random.default_rng(6)
F = np.float32
LOWEST = np.finfo(F).min


def test_unique_values_keep_their_order_and_each_nan_is_another(oracle: Oracle) -> None:
    x = np.array([2, 1, 1, 3, 4, 3, np.nan, np.nan, -0.0, 0.0], F)
    names = ("y", "idx", "counts")
    found, expected = ours("Unique", [x], names), theirs(oracle, "Unique", [x], names)
    assert found[1].tolist() == [0, 1, 1, 2, 3, 2, 4, 5, 6, 6] and found[2].tolist() == [1, 2, 2, 1, 1, 1, 2]
    assert np.signbit(found[0][6])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(OperatorError, match="must be a vector"):
        ours("Unique", [np.zeros((2, 2), F)], names)


def test_negative_axes_count_in_the_result(oracle: Oracle) -> None:
    x = RNG.standard_normal((2, 3)).astype(F)
    for axis, shape in ((-1, (2, 3, 1)), (-3, (1, 2, 3)), (1, (2, 1, 3))):
        inputs = [x, np.array(axis, np.int32)]
        assert ours("ExpandDims", inputs)[0].shape == theirs(oracle, "ExpandDims", inputs)[0].shape == shape
    with pytest.raises(OperatorError, match="axis must be in") as caught:
        ours("ExpandDims", [x, np.array(3, np.int32)])
    assert caught.value.code == "SX408"


def test_windows_are_the_last_axis() -> None:
    x = np.arange(10, dtype=F).reshape(5, 2)
    assert ours("UnfoldTensor", [x], dim=0, size=3, step=2)[0].tolist() == [[[0, 2, 4], [1, 3, 5]], [[4, 6, 8], [5, 7, 9]]]
    with pytest.raises(OperatorError, match=r"size must be in \[1, 2\]"):
        ours("UnfoldTensor", [x], size=3)


def test_the_step_of_a_range_is_one_by_default() -> None:
    assert ours("Range", [np.array([0.5], F), np.array(3, F)])[0].tolist() == [0.5, 1.5, 2.5]
    with pytest.raises(OperatorError, match="delta must not be 0"):
        ours("Range", [np.array(0), np.array(3), np.array(0)])


def test_nearest_pixels_round_half_up(oracle: Oracle) -> None:
    """The middle one of three rows over four is 1.5, and so row 2; places outside the image have the other value."""
    x = np.arange(16, dtype=F).reshape(1, 1, 4, 4)
    rois = np.array([[0, 0, 1, 1], [-0.5, 0, 1.2, 1], [1, 1, 0, 0]], F)
    inputs = [x, rois, np.zeros(3, np.int32), np.array([3, 3], np.int32)]
    given: dict[str, Any] = {"mode": "nearest", "extrapolation_value": -1.0}
    expected = [[[0, 2, 3], [8, 10, 11], [12, 14, 15]], [[-1] * 3, [4, 6, 7], [-1] * 3], [[15, 14, 12], [11, 10, 8], [3, 2, 0]]]
    for found in (ours("CropAndResize", inputs, **given), theirs(oracle, "CropAndResize", inputs, **given)):
        assert found[0][:, 0].tolist() == expected
    with pytest.raises(OperatorError) as caught:
        ours("CropAndResize", [x, rois, np.array([0, 1, 0], np.int32), inputs[3]])
    assert caught.value.code == "SX401"


def test_a_row_of_a_window_ends_at_its_first_masked_value(oracle: Oracle) -> None:
    x = np.arange(16, dtype=F).reshape(1, 1, 4, 4)
    mask = np.array([[1, 0, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0], [1, 1, 0, 0]], np.int32)[None, None]
    expected = [[4, LOWEST, 7], [4, LOWEST, 10], [13, 13, 10]]
    for found in (ours("MaxpoolWithMask", [x, mask], kernel_shape=[2, 2]),
                  theirs(oracle, "MaxpoolWithMask", [x, mask], kernel_shape=[2, 2])):  # fmt: skip
        assert found[0][0, 0].tolist() == expected
    nothing = [x, np.zeros_like(mask)]  # the first cell of the image is never masked
    for found in (ours("MaxpoolWithMask", nothing, kernel_shape=[2, 2], strides=[2, 2]),
                  theirs(oracle, "MaxpoolWithMask", nothing, kernel_shape=[2, 2], strides=[2, 2])):  # fmt: skip
        assert found[0].reshape(-1).tolist() == [0, LOWEST, LOWEST, LOWEST]


def test_a_mask_of_several_channels_is_refused() -> None:
    """onnxruntime reads it from an element on that depends on the channel, not from the channel's own mask."""
    with pytest.raises(OperatorError, match=r"the mask must have shape \(1, 1, 4\), got \(1, 2, 4\)"):
        ours("MaxpoolWithMask", [np.ones((1, 2, 4), F), np.ones((1, 2, 4), np.int32)], kernel_shape=[2])


def test_images_and_grids_are_floats() -> None:
    with pytest.raises(OperatorError, match="must be floats of one type, got int32 and int32") as caught:
        ours("GridSample", [np.ones((1, 1, 2, 2), np.int32), np.ones((1, 1, 1, 2), np.int32)])
    assert caught.value.code == "SX406"


def test_one_of_many_values_is_not_finite() -> None:
    good, nan, inf = np.ones(3, F), np.array([0, np.nan], F), np.array([[np.inf]], F)
    assert ours("IsAllFinite", [good, good])[0].tolist() is True
    for bad in (nan, inf):
        assert ours("IsAllFinite", [good, bad])[0].tolist() is False
    assert ours("IsAllFinite", [nan], isinf_only=1)[0].tolist() is True
    assert ours("IsAllFinite", [inf], isnan_only=1)[0].tolist() is True


def test_the_gradient_of_a_table_leaves_the_padding_out() -> None:
    from singa_backend.autodiff.tape import Tape
    from singa_backend.interpreters.eager import Eager

    table, places = np.zeros((4, 2)), np.array([[0, 1], [1, 3]])
    for more, expected in (([np.array(1)], [1, 0, 0, 1]), ([np.array(-1)], [1, 2, 0, 0]), ([None, np.array(True)], [1, 1, 0, 1]),
                           ([], [1, 2, 0, 1])):  # fmt: skip
        tape = Tape(Eager())
        x = tape.variable(table)
        y = tape.call("TorchEmbedding", [x, places, *more], {}, 1, "com.microsoft")[0]
        found = tape.gradients([y], [np.ones((2, 2, 2))], [x])[0]
        assert found.tolist() == [[v, v] for v in expected]


SHIFTED = np.arange(16, dtype=np.float64).reshape(1, 1, 4, 4) ** 1.5


@pytest.mark.parametrize(
    ("name", "inputs", "which", "attributes", "outputs"),
    [("Trilu", [RNG.standard_normal((2, 3, 3)), np.array(-1)], (0,), {"upper": 0}, 1),
     ("GatherND", [RNG.standard_normal((2, 3)), np.array([[1, 2], [0, -1], [1, 2]])], (0,), {}, 1),
     ("Pad", [RNG.standard_normal((2, 3)), np.array([[1, 0, 2, -1]]), np.array([0.5])], (0, 2), {}, 1),
     ("Pad", [RNG.standard_normal((2, 3)), np.array([1, 0, 1, 2])], (0,), {"mode": "reflect"}, 1),
     ("Range", [np.array(0.5), np.array(3.2), np.array([0.75])], (0, 2), {}, 1),
     ("ExpandDims", [RNG.standard_normal((2, 3)), np.array(1, np.int32)], (0,), {}, 1),
     ("UnfoldTensor", [RNG.standard_normal((5, 2))], (0,), {"dim": 0, "size": 3, "step": 2}, 1),
     ("Unique", [np.array([2.0, 1.0, 3.0])], (0,), {}, 3),
     ("SampleOp", [RNG.standard_normal(3)], (0,), {}, 1),
     ("TorchEmbedding", [RNG.standard_normal((3, 2)), np.array([0, 2, 2])], (0,), {}, 1),
     ("GridSample", [RNG.standard_normal((1, 1, 3, 3)), RNG.uniform(-0.9, 0.9, (1, 2, 2, 2))], (0, 1), {}, 1),
     ("CropAndResize", [SHIFTED, np.array([[0.1, 0.2, 0.7, 0.9], [0.6, 0.5, 0.1, 0.3]]), np.array([0, 0], np.int32),
                        np.array([3, 2], np.int32)], (0, 1), {}, 1)],
)  # fmt: skip
def test_gradients(name: str, inputs: list[Any], which: tuple[int, ...], attributes: dict[str, Any], outputs: int) -> None:
    check_gradients(name, inputs, which, outputs, **attributes)


def test_the_gradient_of_a_masked_pool_goes_to_the_largest_values() -> None:
    from singa_backend.autodiff.tape import Tape
    from singa_backend.interpreters.eager import Eager

    tape = Tape(Eager())
    x = tape.variable(np.arange(16, dtype=F).reshape(1, 1, 4, 4))
    mask = np.ones((1, 1, 4, 4), np.int32)
    mask[0, 0, :, 3] = 0
    y = tape.call("MaxpoolWithMask", [x, mask], {"kernel_shape": (2, 2), "strides": (2, 2)}, 1, "com.microsoft")[0]
    found = tape.gradients([y], [np.array([[[[1, 2], [3, 4]]]], F)], [x])[0]
    expected = np.zeros((4, 4), F)
    expected[1, 1], expected[1, 2], expected[3, 1], expected[3, 2] = 1, 2, 3, 4
    np.testing.assert_array_equal(found[0, 0], expected)
