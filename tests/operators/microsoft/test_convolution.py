"""Convolutions of com.microsoft: what drawn nodes do not show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.microsoft_nodes import check_gradients, ours, theirs

from singa_backend import OperatorError
from singa_backend.engines.oracle import Oracle

RNG = np.random.default_rng(4)
X, W, B = (RNG.standard_normal(s) for s in ((1, 2, 5, 5), (3, 2, 3, 3), (3,)))
F = np.float32


def test_the_summand_comes_before_the_activation(oracle: Oracle) -> None:
    z = -10 * np.ones((1, 3, 3, 3), F)
    inputs = [X.astype(F), W.astype(F), None, z]
    assert ours("FusedConv", inputs, activation="Relu")[0].max() < 1
    np.testing.assert_allclose(
        ours("FusedConv", inputs, activation="Relu")[0], theirs(oracle, "FusedConv", inputs, activation="Relu")[0], atol=1e-5
    )


def test_parameters_of_activations_are_counted(oracle: Oracle) -> None:
    inputs = [X.astype(F), W.astype(F)]
    for given in ({"activation": "LeakyRelu"}, {"activation": "Clip", "activation_params": [0.1]},
                  {"activation": "Elu", "activation_params": [0.1]}):  # fmt: skip
        with pytest.raises(OperatorError, match="activation"):
            ours("FusedConv", inputs, **given)
        with pytest.raises(Exception, match="GetFusedActivationAttr"):
            theirs(oracle, "FusedConv", inputs, **given)
    with pytest.raises(OperatorError, match=r"Z must have the shape \(1, 3, 3, 3\) of the convolution"):
        ours("FusedConv", [*inputs, None, np.ones((1, 3, 1, 1), F)])


def test_channels_last() -> None:
    z = RNG.standard_normal((1, 3, 3, 3))
    given: dict[str, Any] = {"activation": "HardSigmoid", "activation_params": [0.25, 0.5]}
    first = ours("FusedConv", [X, W, B, z], **given)[0]
    last = ours(
        "NhwcFusedConv", [np.moveaxis(X, 1, 3).astype(F), W.astype(F), B.astype(F), np.moveaxis(z, 1, 3).astype(F)], **given
    )[0]
    np.testing.assert_allclose(np.moveaxis(last, 3, 1), first, atol=1e-5)
    plain = ours("NhwcConv", [np.moveaxis(X, 1, 3), W])[0]
    np.testing.assert_allclose(np.moveaxis(plain, 3, 1), ours("FusedConv", [X, W])[0], rtol=1e-12)


def test_valid_does_not_replace_the_pads(oracle: Oracle) -> None:
    """auto_pad VALID leaves the input Pads as they are; in ConvTranspose it means that there are none."""
    x, w, pads = X.astype(F)[:, :, :4, :4], W.astype(F).transpose(1, 0, 2, 3).copy(), np.array([1, 0, 1, 2])
    plain = ours("ConvTransposeWithDynamicPads", [x, w, pads])[0]
    assert plain.shape == (1, 3, 4, 4)
    for auto in ("NOTSET", "VALID"):
        for found in (ours("ConvTransposeWithDynamicPads", [x, w, pads], auto_pad=auto),
                      theirs(oracle, "ConvTransposeWithDynamicPads", [x, w, pads], auto_pad=auto)):  # fmt: skip
            np.testing.assert_allclose(found[0], plain, atol=1e-5)
    with pytest.raises(OperatorError, match="the input Pads must be present"):
        ours("ConvTransposeWithDynamicPads", [x, w])
    with pytest.raises(Exception, match="Dynamic pads tensor is required"):
        theirs(oracle, "ConvTransposeWithDynamicPads", [x, w])


@pytest.mark.parametrize(
    ("name", "inputs", "which", "attributes"),
    [("FusedConv", [X, W, B, RNG.standard_normal((1, 3, 3, 3))], (0, 1, 2, 3), {"activation": "Tanh"}),
     ("NhwcConv", [np.moveaxis(X, 1, 3).copy(), W, B], (0, 1, 2), {"strides": (2, 2), "pads": (1, 0, 0, 1)}),
     ("NhwcFusedConv", [np.moveaxis(X, 1, 3).copy(), W, B], (0, 1, 2), {"activation": "Sigmoid"}),
     ("ConvTransposeWithDynamicPads", [X, W.transpose(1, 0, 2, 3).copy(), np.array([1, 0, 0, 2]), B], (0, 1, 3),
      {"strides": (2, 1)})],
)  # fmt: skip
def test_gradients(name: str, inputs: list[Any], which: tuple[int, ...], attributes: dict[str, Any]) -> None:
    check_gradients(name, inputs, which, **attributes)
