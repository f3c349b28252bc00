"""The operators that onnxruntime reads in ONNX's domain: types, absent attributes, and the opsets that have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.microsoft_nodes import close, ours, theirs

from singa_backend import OperatorError, UnsupportedModel
from singa_backend.engines.oracle import EngineFailure, Oracle

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((2, 3, 5, 6)).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Crop", {"border": [1, 0, 2, 1]}),
        ("Crop", {"border": [1, 2, 0, 0], "scale": [2, 3]}),
        ("ImageScaler", {"bias": [1.0, 2.0, 3.0], "scale": 0.5}),
        ("ScaledTanh", {"alpha": 2.0, "beta": 0.5}),
        ("ParametricSoftplus", {"alpha": 2.0, "beta": 0.5}),
    ],
)
def test_values(oracle: Oracle, name: str, attributes: dict[str, Any]) -> None:
    how = {"domain": "", "onnx_opset": 9, **attributes}
    close(ours(name, [IMAGES], **how), theirs(oracle, name, [IMAGES], **how))


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("ScaledTanh", {"alpha": 2.0}),
        ("ParametricSoftplus", {}),
        ("ImageScaler", {}),
        ("Crop", {"border": [4, 0, 4, 0]}),
        ("Crop", {"border": [0, 0, 0, 0], "scale": [2, 9]}),
    ],
)
def test_what_is_refused(oracle: Oracle, name: str, attributes: dict[str, Any]) -> None:
    """onnxruntime has no defaults for these attributes although its schemas do not require them."""
    how = {"domain": "", "onnx_opset": 9, **attributes}
    with pytest.raises(OperatorError, match=r"must|larger"):
        ours(name, [IMAGES], **how)
    with pytest.raises(EngineFailure):
        theirs(oracle, name, [IMAGES], **how)


@pytest.mark.parametrize("indices", [np.int32, np.int64])
def test_a_slice_by_inputs(oracle: Oracle, indices: Any) -> None:
    inputs = [IMAGES, np.array([1, -9], indices), np.array([-1, 99], indices), np.array([-1, 2], indices)]
    close(
        ours("DynamicSlice", inputs, domain="", onnx_opset=9),
        theirs(oracle, "DynamicSlice", inputs, domain="", onnx_opset=9),
        0,
        0,
    )


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("v", [np.float32, np.float64])
def test_a_layer_norm_of_opset_16_has_the_dtype_of_its_scale(oracle: Oracle, v: Any, axis: int) -> None:
    inputs = [IMAGES, RNG.standard_normal(IMAGES.shape[axis:]).astype(v)]
    how = {"domain": "", "onnx_opset": 16, "axis": axis}
    found = ours("LayerNormalization", inputs, 3, **how)
    assert [y.dtype for y in found] == [v, np.float32, np.float32]
    close(found, theirs(oracle, "LayerNormalization", inputs, 3, **how))


def test_a_simplified_norm_returns_the_inverse_root(oracle: Oracle) -> None:
    inputs = [IMAGES, RNG.standard_normal((5, 6)).astype(np.float32)]
    how = {"domain": "", "onnx_opset": 17, "axis": 2, "epsilon": 0.01}
    found = ours("SimplifiedLayerNormalization", inputs, 2, **how)
    close(found, theirs(oracle, "SimplifiedLayerNormalization", inputs, 2, **how))
    close(found[1:], [1 / np.sqrt((IMAGES**2).mean((2, 3), keepdims=True) + np.float32(0.01))])


def test_operators_of_the_first_releases_end_at_opset_9() -> None:
    with pytest.raises(UnsupportedModel, match="no operator ScaledTanh"):
        ours("ScaledTanh", [IMAGES], domain="", onnx_opset=10, alpha=1.0, beta=1.0)
