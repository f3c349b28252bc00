"""Gradients of what samples between the pixels and of ai.onnx.ml's scores: ties, borders, and values by formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from singa_backend.autodiff.tape import Tape
from singa_backend.interpreters.eager import Eager

RNG = np.random.default_rng(0)
ML = "ai.onnx.ml"


def gradients(op_type: str, inputs: list[Any], dy: Any = 1, output: int = 0, outputs: int = 1, domain: str = "",
              **attributes: Any) -> list[Any]:  # fmt: skip
    """Of every float input; dy: of one of the outputs, spread to its shape."""
    tape = Tape(Eager())
    values = [None if x is None else tape.variable(x, x.dtype.kind == "f") for x in inputs]
    ys = tape.call(op_type, values, attributes, outputs, domain)
    dys = [np.broadcast_to(np.asarray(dy, y.raw.dtype), y.raw.shape) if i == output else None for i, y in enumerate(ys)]
    return tape.gradients(ys, dys, values)


def image(*shape: int) -> Any:
    return RNG.standard_normal(shape)


def test_a_grid_that_takes_the_nearest_pixel_has_no_slope() -> None:
    x, grid = image(1, 2, 4, 4), RNG.uniform(-0.9, 0.9, (1, 3, 3, 2))
    dx, dgrid = gradients("GridSample", [x, grid], mode="nearest")
    assert dx.sum() == 2 * 9 and dgrid is None


@pytest.mark.parametrize("padding_mode", ["zeros", "border", "reflection"])
def test_outside_the_image_a_grid_reads_by_its_padding(padding_mode: str) -> None:
    """The pixel values are the row number: at the border nothing changes, and a reflection runs backward."""
    x = np.arange(4.0).reshape(1, 1, 4, 1) * np.ones((1, 1, 1, 4))
    grid = np.array([[[[0.0, 1.5]]]])  # below the image by a quarter of it: one pixel beyond the border
    dx, dgrid = gradients("GridSample", [x, grid], mode="linear", padding_mode=padding_mode)
    assert dx.sum() == pytest.approx(0 if padding_mode == "zeros" else 1)
    assert dgrid[0, 0, 0, 1] == pytest.approx({"zeros": 0, "border": 0, "reflection": -2}[padding_mode])


@pytest.mark.parametrize("padding_mode", ["border", "reflection"])
@pytest.mark.parametrize("align_corners", [0, 1])
def test_the_first_and_last_pixel_have_no_slope(padding_mode: str, align_corners: int) -> None:
    """As in PyTorch, whose clip of a coordinate passes no gradient at both ends; the slope was that inside at the first one."""
    x = np.array([0.0, 1.0, 4.0]).reshape(1, 1, 1, 3)
    ends = 1.0 if align_corners else 2 / 3
    grid = np.zeros((1, 1, 4, 2))
    grid[0, 0, :, 0] = [-ends, ends, -ends / 2, ends / 2]
    grid[0, 0, :2, 0] = np.where(align_corners, grid[0, 0, :2, 0], [np.nextafter(-ends, -1), np.nextafter(ends, 1)])
    _, dgrid = gradients("GridSample", [x, grid], mode="linear", padding_mode=padding_mode, align_corners=align_corners)
    scale = 1.0 if align_corners else 1.5  # pixels for a step of 1 in the grid
    np.testing.assert_allclose(dgrid[0, 0, :, 0], [0, 0, scale, 3 * scale], atol=1e-12)


def test_an_image_without_pixels_or_a_grid_without_places() -> None:
    dx, dgrid = gradients("GridSample", [np.zeros((1, 2, 0, 3)), np.zeros((1, 2, 2, 2))])
    assert dx.shape == (1, 2, 0, 3) and not dgrid.any()
    dx, dgrid = gradients("GridSample", [image(1, 2, 2, 3), np.zeros((1, 0, 2, 2))])
    assert not dx.any() and dgrid.shape == (1, 0, 2, 2)


def test_a_deformed_convolution_without_offsets_is_a_convolution() -> None:
    x, w, b = image(2, 4, 5, 6), image(6, 2, 3, 2), image(6)
    how = {"strides": [2, 1], "pads": [1, 0, 1, 2], "dilations": [1, 2], "group": 2}
    y = Eager().Conv(x, w, b, **how)
    offset, dy = np.zeros((2, 2 * 6, *y.shape[2:])), image(*y.shape)
    dx, dw, _, db = gradients("DeformConv", [x, w, offset, b], dy, **how)
    for found, wanted in zip((dx, dw, db), gradients("Conv", [x, w, b], dy, **how), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)


def test_a_theta_gets_the_places_of_its_grid() -> None:
    """grid = base · thetaᵀ, where the base grid of size 1 x 1 x 2 x 2 is (±1/2, ±1/2, 1)."""
    dy = image(1, 2, 2, 2)
    base = np.array([[[-0.5, -0.5, 1], [0.5, -0.5, 1]], [[-0.5, 0.5, 1], [0.5, 0.5, 1]]])
    found, _ = gradients("AffineGrid", [image(1, 2, 3), np.array([1, 1, 2, 2])], dy)
    np.testing.assert_allclose(found[0], np.einsum("hwi,hwj->ij", dy[0], base), atol=1e-12)


@pytest.mark.parametrize("sampling_ratio", [0, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
def test_every_bin_within_the_image_gives_its_gradient_back_once(mode: str, sampling_ratio: int) -> None:
    x, rois = image(2, 3, 8, 8), np.array([[1.0, 1, 6, 5], [2, 2, 3, 3.5], [0.25, 0.5, 7, 7]])
    dx, drois, _ = gradients("RoiAlign", [x, rois, np.array([0, 1, 1])], mode=mode, output_height=2, output_width=3,
                             sampling_ratio=sampling_ratio)  # fmt: skip
    assert drois.shape == rois.shape
    total = [dx[i].sum() for i in (0, 1)]
    if mode == "avg":
        np.testing.assert_allclose(total, [3 * 6, 2 * 3 * 6])
    else:  # the derivative by the greatest weighted pixel is its weight, which is at most 1
        assert 0 < total[0] < 18 and 0 < total[1] < 36


def test_equal_maxima_of_a_region_share() -> None:
    x = np.zeros((1, 1, 4, 4))
    x[0, 0, 1, 1] = x[0, 0, 1, 2] = 1.0
    dx, _ = gradients("MaxRoiPool", [x, np.array([[0.0, 0, 0, 3, 3]])], pooled_shape=[1, 1])
    np.testing.assert_array_equal(dx, x / 2)
    outside, _ = gradients("MaxRoiPool", [x, np.array([[0.0, 9, 9, 12, 12]])], pooled_shape=[2, 2])
    assert not outside.any()


W = np.array([[1.0, -2, 0.5], [0.25, 1, -1]])
X = np.array([[0.5, -1, 2], [1, 0.25, -0.5]])


def softmax(z: Any) -> Any:
    e = np.exp(z - z.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("name", ["NONE", "LOGISTIC", "SOFTMAX"])
def test_scores_of_a_linear_classifier(name: str) -> None:
    dy = np.array([[1.0, -0.5], [0.25, 2]])
    z = X @ W.T + [0.1, -0.2]
    s, p = 1 / (1 + np.exp(-z)), softmax(z)
    dz = {"NONE": dy, "LOGISTIC": dy * s * (1 - s), "SOFTMAX": p * (dy - (dy * p).sum(axis=1, keepdims=True))}[name]
    (dx,) = gradients("LinearClassifier", [X], dy, 1, 2, ML, coefficients=W.ravel().tolist(), intercepts=[0.1, -0.2],
                      classlabels_ints=[3, 4], post_transform=name)  # fmt: skip
    np.testing.assert_allclose(dx, dz @ W, rtol=1e-6)


def test_one_score_for_two_classes() -> None:
    """The other class has what is left of 1: its slope is the opposite."""
    (dx,) = gradients("LinearClassifier", [X], np.array([[1.0, 3.0]]), 1, 2, ML, coefficients=W[0].tolist(), intercepts=[0.5],
                      classlabels_strings=["no", "yes"])  # fmt: skip
    np.testing.assert_allclose(dx, np.broadcast_to(2 * W[0], X.shape), rtol=1e-6)


def test_features_get_back_their_columns() -> None:
    a, b = image(2, 3), image(2, 1)
    dy = np.arange(10.0).reshape(2, 5)
    da, db = gradients("FeatureVectorizer", [a, b], dy, domain=ML, inputdimensions=[2, 3])
    np.testing.assert_array_equal(da, [[0, 1, 0], [5, 6, 0]])
    np.testing.assert_array_equal(db, [[2], [7]])
    (da,) = gradients("FeatureVectorizer", [a[0]], dy[:1, :3], domain=ML)
    np.testing.assert_array_equal(da, [0, 1, 2])
