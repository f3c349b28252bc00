"""onnxruntime's normalizations, gates and fused dropouts: what drawn nodes cannot show."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.microsoft_nodes import body, close, ours, theirs

from singa_backend import OperatorError
from singa_backend.autodiff.tape import Tape
from singa_backend.engines.oracle import Oracle
from singa_backend.interpreters.eager import Eager
from singa_backend.proto.schemas import MICROSOFT, load_domain

RNG = np.random.default_rng(0)


def draw(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


# --- with a residual --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["SkipLayerNormalization", "SkipSimplifiedLayerNormalization"])
@pytest.mark.parametrize("skip", [(2, 3, 4), (1, 3, 4), (3, 4)])
def test_all_outputs_and_shapes_of_the_residual(oracle: Oracle, name: str, skip: tuple[int, ...]) -> None:
    inputs = [draw(2, 3, 4), draw(*skip), draw(4)]
    for outputs in (4, ["y", "", "", "sum"], ["y", "", "inverse"]):
        close(ours(name, inputs, outputs), theirs(oracle, name, inputs, outputs))


def test_the_mean_of_a_simplified_norm_is_zero(oracle: Oracle) -> None:
    """The kernel fills the output that the schema calls mean with zeros."""
    inputs = [draw(2, 3, 4) + 5, draw(2, 3, 4), draw(4)]
    for found in (
        ours("SkipSimplifiedLayerNormalization", inputs, 2),
        theirs(oracle, "SkipSimplifiedLayerNormalization", inputs, 2),
    ):
        assert found[1].shape == (2, 3, 1) and not found[1].any()


@pytest.mark.parametrize(("x", "skip"), [((2, 3), (1, 3)), ((2, 3), (3,)), ((2, 3, 4), (2, 1, 4)), ((1, 2, 3, 4), (1, 2, 3, 4))])
def test_a_residual_of_another_shape_is_refused(x: tuple[int, ...], skip: tuple[int, ...]) -> None:
    with pytest.raises(OperatorError, match="2 or 3 axes") as caught:
        ours("SkipLayerNormalization", [draw(*x), draw(*skip), draw(x[-1])])
    assert caught.value.code == "SX404"


# --- of embeddings ----------------------------------------------------------------------------------------------------


def test_the_mask_index_is_a_count(oracle: Oracle) -> None:
    """It is the number of ones, also where they are not at the left, and 0 without a mask."""
    ids, table, one = np.array([[0, 1, 2], [3, 0, 1]], np.int32), draw(4, 5), np.ones(5, np.float32)
    mask = np.array([[0, 1, 1], [1, 0, 0]], np.int32)
    for m, wanted in (([mask], [2, 1]), ([], [0, 0])):
        inputs = [ids, None, table, table, None, one, one, *m]
        found = ours("EmbedLayerNormalization", inputs, 3)
        assert found[1].tolist() == wanted and found[1].dtype == np.int32
        close(found, theirs(oracle, "EmbedLayerNormalization", inputs, 3))


def test_a_word_outside_the_table_is_refused() -> None:
    ids, table, one = np.array([[7]], np.int32), draw(4, 5), np.ones(5, np.float32)
    with pytest.raises(OperatorError):
        ours("EmbedLayerNormalization", [ids, None, table, table, None, one, one], 2)


def test_segments_need_a_table() -> None:
    ids, table, one = np.array([[1]], np.int32), draw(4, 5), np.ones(5, np.float32)
    with pytest.raises(OperatorError, match="present together") as caught:
        ours("EmbedLayerNormalization", [ids, None, table, table, table, one, one], 2)
    assert caught.value.code == "SX407"


# --- gates ------------------------------------------------------------------------------------------------------------


def test_where_a_gate_is_rounded(oracle: Oracle) -> None:
    """GatedAdd rounds the product before the sum; ScaledSiLU rounds what it multiplies."""
    half = np.float16
    x, y, gate = np.array([[1000]], half), np.array([[0.3]], half), np.array([[0.7]], half)
    wanted = [x + (y * gate)]
    close(ours("GatedAdd", [x, y, gate]), wanted, 0, 0)
    close(theirs(oracle, "GatedAdd", [x, y, gate]), wanted, 0, 0)
    z = draw(200).astype(half)
    scaled = (z.astype(np.float32) * np.float32(1.3)).astype(half)
    s = (1 / (1 + np.exp(-scaled.astype(np.float32)))).astype(half)
    wanted = [(scaled.astype(np.float32) * s.astype(np.float32)).astype(half)]
    for found in (ours("ScaledSiLU", [z], alpha=1.3), theirs(oracle, "ScaledSiLU", [z], alpha=1.3)):
        assert (found[0] == wanted[0]).mean() > 0.95  # exp of another library may differ by a bit


def test_the_gate_of_swiglu_is_rounded_if_asked() -> None:
    gate, up = draw(500).astype(ml_dtypes.bfloat16), draw(500).astype(ml_dtypes.bfloat16)
    wide = gate.astype(np.float32)
    active = wide / (1 + np.exp(-wide))
    rounded = (active.astype(ml_dtypes.bfloat16).astype(np.float32) * up.astype(np.float32)).astype(ml_dtypes.bfloat16)
    close(ours("SwiGLU", [gate, up], round_activation=1), [rounded], 0, 0)
    assert (ours("SwiGLU", [gate, up])[0] != rounded).any()


def test_swiglu_of_one_input_has_the_gate_first() -> None:
    gate, up = draw(3, 4), draw(3, 4)
    close(ours("SwiGLU", [np.concatenate([gate, up], 1)], limit=0.5), ours("SwiGLU", [gate, up], limit=0.5), 0, 0)
    with pytest.raises(OperatorError, match="must be even"):
        ours("SwiGLU", [draw(3, 5)])


def test_the_projected_gate_of_a_sum_is_rounded_in_each_step() -> None:
    x, y, a, w = (v.astype(ml_dtypes.bfloat16) for v in (draw(5, 3), draw(5, 3), draw(5, 4), draw(4, 1)))

    def wide(v: Any) -> Any:
        return v.astype(ml_dtypes.bfloat16).astype(np.float32)

    s = wide(1 / (1 + np.exp(-wide(wide(a) @ wide(w)))))
    close(ours("GatedAdd", [x, y, a, w]), [(wide(x) + wide(wide(y) * s)).astype(ml_dtypes.bfloat16)], 0, 0)


def test_flattened_streams_are_those_in_groups() -> None:
    streams, gates, scale = draw(2, 3, 4), draw(2, 3, 4), draw(12)
    flat = {"num_branches": 3}
    close(ours("HyperConnectionPreMix", [streams.reshape(2, 12), gates.reshape(2, 12)], **flat),
          ours("HyperConnectionPreMix", [streams, gates]), 0, 0)  # fmt: skip
    close([y.reshape(2, 3, 4) for y in ours("BranchwiseRMSNorm", [streams.reshape(2, 12), scale], **flat)],
          ours("BranchwiseRMSNorm", [streams, scale]), 0, 0)  # fmt: skip
    with pytest.raises(OperatorError, match="gate for each branch"):
        ours("HyperConnectionPreMix", [streams, gates.reshape(2, 12)])


# --- fused dropouts ---------------------------------------------------------------------------------------------------


def test_a_mask_is_packed_from_the_lowest_bit() -> None:
    x = draw(5, 9)
    for count in (45, 64):
        x = np.resize(x, count)
        y, packed = ours("BitmaskDropout", [x, np.array(0.5, np.float32), np.array(True)], 2, seed=3)
        plain, mask = ours("BiasDropout", [x, np.zeros_like(x), None, np.array(0.5, np.float32), np.array(True)], 2, seed=3)
        bits = np.unpackbits(packed.view(np.uint8), bitorder="little")
        assert packed.dtype == np.uint32 and packed.shape == (2,) and 0 < mask.sum() < count
        assert np.array_equal(bits[:count], mask) and not bits[count:].any()
        assert np.array_equal(y, plain) and np.array_equal(y != 0, mask & (x != 0))


@pytest.mark.parametrize("name", ["BiasDropout", "BitmaskBiasDropout"])
def test_the_body_of_a_dropout_draws_what_its_definition_draws(name: str) -> None:
    inputs = [draw(4, 6), draw(6), draw(4, 6), np.array(0.3, np.float32), np.array(True)]
    close(ours(name, inputs, 2, seed=5), body(name, inputs, 2, seed=5))


def test_the_gradient_of_a_dropout_flows_where_values_were_kept() -> None:
    load_domain(MICROSOFT)
    x, bias, residual = (v.astype(np.float64) for v in (draw(4, 6), draw(6), draw(4, 6)))
    tape = Tape(Eager())
    values = [tape.variable(v) for v in (x, bias, residual)]
    call = [*values, np.array(0.25), np.array(True)]
    y, mask = tape.call("BiasDropout", call, {"seed": 2}, 2, MICROSOFT)
    dx, db, dr = tape.gradients([y, mask], [np.ones_like(x), None], values)
    assert 0 < mask.raw.sum() < x.size
    np.testing.assert_allclose(dx, mask.raw / 0.75)
    np.testing.assert_allclose(db, dx.sum(0))
    np.testing.assert_allclose(dr, 1)


# --- diffusion --------------------------------------------------------------------------------------------------------


def test_channels_last_is_the_default_of_a_group_norm() -> None:
    x, gamma, beta = draw(2, 3, 4, 6), draw(6), draw(6)
    first = ours("GroupNorm", [np.moveaxis(x, -1, 1).copy(), gamma, beta], groups=3, activation=1, channels_last=0)
    found = ours("GroupNorm", [x, gamma, beta], groups=3, activation=1)
    close([np.moveaxis(found[0], -1, 1)], first)
    groups = x.reshape(2, 12, 3, 2)
    centred = groups - groups.mean((1, 3), keepdims=True)
    y = (centred / np.sqrt((centred**2).mean((1, 3), keepdims=True) + 1e-5)).reshape(x.shape) * gamma + beta
    close(found, [y / (1 + np.exp(-y))])


def test_the_skip_of_a_group_norm_may_be_one_value_a_channel() -> None:
    x, gamma, beta, skip = draw(2, 3, 4, 6), draw(6), draw(6), draw(2, 6)
    y, total = ours("SkipGroupNorm", [x, gamma, beta, skip], 2, groups=2, activation=0)
    close([total], [x + skip[:, None, None]])
    close([y], ours("GroupNorm", [total, gamma, beta], groups=2, activation=0))
    with pytest.raises(OperatorError, match="skip must have shape"):
        ours("SkipGroupNorm", [x, gamma, beta, draw(6)], groups=2, activation=0)


def test_a_softmax_over_several_axes() -> None:
    x, mask = draw(2, 3, 2, 4), draw(2, 1, 2, 4)
    total = (x + mask).reshape(6, 8)
    wanted = np.exp(total) / np.exp(total).sum(1, keepdims=True)
    close(ours("BiasSoftmax", [x, mask], axis=2, is_inner_broadcast=1), [wanted.reshape(x.shape)])
    with pytest.raises(OperatorError, match="must broadcast"):
        ours("BiasSoftmax", [x[:1], mask], axis=2, is_inner_broadcast=1)


def test_int8_norms_round_to_even_and_saturate() -> None:
    one = np.array(1, np.float32)
    x = np.array([[-128, -1, 0, 127]], np.int8)
    assert ours("QOrderedGelu", [x, np.array(1.5, np.float32), one])[0].tolist() == [[0, 0, 0, 127]]
    with pytest.raises(OperatorError, match="rows"):
        ours("QOrderedLayerNormalization", [x, one, np.ones(4, np.float32), None, one], order_X=0)
