"""onnxruntime's linear attentions, convolutions with a state, AttnLSTM and experts: what drawn nodes cannot show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.helpers.microsoft_nodes import body, close, ours, theirs

from singa_backend import OperatorError
from singa_backend.engines.oracle import Oracle

RNG = np.random.default_rng(0)


def draw(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


# --- LinearAttention --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("past", [False, True])
def test_the_window_holds_the_state_after_each_of_the_last_tokens(window: int, past: bool) -> None:
    """onnxruntime's CPU kernel has no window: each slot is compared with the state of a call that ends there."""
    time, heads = 3, {"q_num_heads": 2, "kv_num_heads": 2}
    tokens = [draw(1, time, 4), draw(1, time, 4), draw(1, time, 6)]
    decay, beta = -np.abs(draw(1, time, 2)), np.abs(draw(1, time, 2))
    state = draw(1, 2, 2, 3) if past else None
    before = None if state is None else np.stack([np.full_like(state, np.nan)] * (window - 1) + [state])
    inputs = [*tokens, before, decay, beta]
    y, slots = ours("LinearAttention", inputs, 2, state_window=window, **heads)
    whole, _ = ours("LinearAttention", [*tokens, state, decay, beta], 2, **heads)
    close([y], [whole])
    for j in range(window):
        end = time - window + 1 + j
        cut = [x[:, : max(end, 0)] for x in (*tokens, decay, beta)]
        wanted = ours("LinearAttention", [*cut[:3], state, *cut[3:]], 2, **heads)[1] if end > 0 else np.zeros_like(slots[j])
        close([slots[j]], [wanted])
    close(body("LinearAttention", inputs, 2, state_window=window, **heads), [y, slots])


def test_more_key_heads_than_query_heads(oracle: Oracle) -> None:
    """Each query head is read by the key heads that follow each other."""
    q, k, v = draw(2, 3, 4), draw(2, 3, 8), draw(2, 3, 12)
    found = ours("LinearAttention", [q, k, v], 2, update_rule="linear", q_num_heads=2, kv_num_heads=4)
    assert found[0].shape == (2, 3, 12)
    close(found, theirs(oracle, "LinearAttention", [q, k, v], 2, update_rule="linear", q_num_heads=2, kv_num_heads=4))
    repeated = np.repeat(q.reshape(2, 3, 2, 2), 2, axis=2).reshape(2, 3, 8)
    close(found, ours("LinearAttention", [repeated, k, v], 2, update_rule="linear", q_num_heads=4, kv_num_heads=4))


@pytest.mark.parametrize(("queries", "keys", "states"), [(2, 2, 4), (2, 1, 4), (4, 1, 2), (2, 2, 6)])
def test_states_share_key_heads(oracle: Oracle, queries: int, keys: int, states: int) -> None:
    """Key heads are those of the size of a query head; as exports of Qwen 3.5 have it, fewer than states."""
    q, k, v = draw(2, 3, queries * 4), draw(2, 3, keys * 4), draw(2, 3, states * 6)
    inputs = [q / 2, k / 2, v, draw(2, states, 4, 6), -np.abs(draw(2, 3, states)), np.abs(draw(2, 3, states)) / 2]
    how = {"q_num_heads": queries, "kv_num_heads": states}
    found = ours("LinearAttention", inputs, 2, **how)
    close(found, theirs(oracle, "LinearAttention", inputs, 2, **how), atol=1e-5)
    close(found, body("LinearAttention", inputs, 2, **how), atol=1e-5)
    with pytest.raises(OperatorError, match="kv_num_heads 4 must be a multiple of the key heads, got 3"):
        ours(
            "LinearAttention",
            [draw(2, 3, 8), draw(2, 3, 12), draw(2, 3, 8)],
            2,
            q_num_heads=2,
            kv_num_heads=4,
            update_rule="linear",
        )


def test_what_a_rule_does_not_read_is_ignored(oracle: Oracle) -> None:
    """ai.onnx's operator refuses them; onnxruntime's takes them."""
    inputs = [draw(1, 3, 4), draw(1, 3, 4), draw(1, 3, 4), None, draw(1, 3, 2), draw(1, 3, 2)]
    how: dict[str, Any] = {"update_rule": "linear", "q_num_heads": 2, "kv_num_heads": 2}
    close(ours("LinearAttention", inputs, 2, **how), theirs(oracle, "LinearAttention", inputs, 2, **how))
    close(ours("LinearAttention", inputs, 2, **how), ours("LinearAttention", inputs[:3], 2, **how))
    with pytest.raises(OperatorError, match="requires decay") as caught:
        ours("LinearAttention", inputs[:3], 2, **how | {"update_rule": "gated"})
    assert caught.value.code == "SX407"


# --- GatedDeltaNet ----------------------------------------------------------------------------------------------------


def net() -> list[Any]:
    return [draw(6, 2, 3), draw(6, 2, 3), draw(6, 4, 5), None, -np.abs(draw(6, 4)), np.abs(draw(6, 4)) / 4, draw(2, 4, 5, 3)]


def test_sequences_behind_each_other_are_those_alone() -> None:
    q, k, v, _, g, b, state = net()
    found = ours("GatedDeltaNet", [q, k, v, np.array([0, 2, 6], np.int32), g, b, state], 2)
    for i, part in enumerate((slice(0, 2), slice(2, 6))):
        alone = ours("GatedDeltaNet", [q[part], k[part], v[part], None, g[part], b[part], state[i : i + 1]], 2)
        close([found[0][part], found[1][i : i + 1]], alone)


@pytest.mark.parametrize("scale", [1.0, 1e-6])
def test_what_is_added_to_the_norm_of_a_key(oracle: Oracle, scale: float) -> None:
    """The schema does not say it: onnxruntime adds 1e-12 to the sum of squares, which matters for keys of that size."""
    q, k, v, *rest = net()
    inputs = [q * np.float32(scale), k * np.float32(scale), v, *rest]
    found = ours("GatedDeltaNet", inputs, 2, qk_l2_norm=1)
    close(found, theirs(oracle, "GatedDeltaNet", inputs, 2, qk_l2_norm=1))
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)]
    apart = np.abs(found[0] - ours("GatedDeltaNet", [*unit, v, *rest], 2)[0]).max()
    assert (apart > 1e-2) == (scale < 1)


def test_captured_steps_replay_to_the_last_state(oracle: Oracle) -> None:
    """The decays, keys and deltas of all tokens make the final state of the first one."""
    q, k, v, _, g, b, state = net()
    inputs = [q[:4], k[:4], v[:4], None, g[:4], b[:4], state, None, None, np.array([2, 1], np.int32)]
    found = ours("GatedDeltaNet", inputs, 3, state_update_capacity=3)
    close(found, theirs(oracle, "GatedDeltaNet", inputs, 3, state_update_capacity=3))
    decay, keys, deltas = np.split(found[2], np.cumsum([3 * 4, 3 * 2 * 3]), axis=1)
    one = state[0].copy()
    for t in range(2):
        one *= decay[0].reshape(3, 4)[t][:, None, None]
        one += deltas[0].reshape(3, 4, 5)[t][..., None] * np.repeat(keys[0].reshape(3, 2, 3)[t], 2, axis=0)[:, None]
    close([one], [found[1][0]])
    assert not decay[1].reshape(3, 4)[1:].any()
    off = ours("GatedDeltaNet", [*inputs, np.array([0], np.int32)], 3, state_update_capacity=3)
    assert not off[2].any()


@pytest.mark.parametrize(
    ("change", "how", "code"),
    [
        ({6: None}, {}, "SX407"),
        ({4: None}, {}, "SX404"),
        ({1: None}, {}, "SX407"),
        ({}, {"gate_activation": "softplus"}, "SX407"),
        ({}, {"gate_activation": "tanh"}, "SX404"),
        ({3: np.array([0, 4, 2], np.int32)}, {}, "SX404"),
        ({}, {"state_update_capacity": 2}, "SX407"),
    ],
)
def test_inputs_that_do_not_fit_each_other(change: dict[int, Any], how: dict[str, Any], code: str) -> None:
    inputs = [change.get(i, x) for i, x in enumerate(net())]
    with pytest.raises(OperatorError) as caught:
        ours("GatedDeltaNet", inputs, 2, **how)
    assert caught.value.code == code


# --- convolutions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last", [0, 1])
def test_a_convolution_in_two_calls_is_one(oracle: Oracle, last: int) -> None:
    x, w = draw(2, 6, 3) if last else draw(2, 3, 6), draw(3, 1, 3)
    how = {"channels_last": last, "dilation": 2, "activation": "silu"}
    whole = ours("CausalConvWithState", [x, w], 2, **how)
    close(whole, theirs(oracle, "CausalConvWithState", [x, w], 2, **how))
    first, second = np.split(x, [1], axis=1 if last else 2)
    a, state = ours("CausalConvWithState", [np.ascontiguousarray(first), w], 2, **how)
    b, state = ours("CausalConvWithState", [np.ascontiguousarray(second), w, None, state], 2, **how)
    close([np.concatenate([a, b], axis=1 if last else 2), state], whole)


def test_the_window_of_a_convolution_holds_the_state_after_each_step() -> None:
    x, w = draw(1, 2, 3), draw(2, 1, 4)
    _, slots = ours("CausalConvWithState", [x, w], 2, state_window=4)
    assert not slots[0].any()
    for j in (1, 2, 3):
        close([slots[j]], ours("CausalConvWithState", [x[..., :j].copy(), w], 2)[1:], 0, 0)


def test_attributes_of_the_cuda_kernel_are_refused() -> None:
    for how in ({"ndim": 2}, {"state_length": 5}, {"input_channels": 1}, {"state_update_capacity": 1}):
        with pytest.raises(OperatorError, match="must have"):
            ours("CausalConvWithState", [draw(1, 2, 3), draw(2, 1, 2)], 2, **how)
    x, w, state, ends = draw(3, 2), draw(2, 1, 2), draw(1, 2, 1), np.array([0, 3], np.int32)
    with pytest.raises(OperatorError, match="CUDA"):
        ours("VarlenCausalConvWithState", [x, w, ends, None, state, None, draw(3, 2, 2), draw(3, 1)], 2)


# --- AttnLSTM ---------------------------------------------------------------------------------------------------------


def test_clip_does_not_bound_the_cell_state(oracle: Oracle) -> None:
    """As in onnxruntime's LSTM; ONNX's text says that clip bounds the input of every activation."""
    one, zero = np.ones((1, 1, 1), np.float32), np.zeros((1, 1, 1), np.float32)
    w = np.array([[[5, 0]] * 4], np.float32)
    inputs = [one, w, np.zeros((1, 4, 1), np.float32), None, None, None, one, None, zero, zero, zero[0], zero]
    found = ours("AttnLSTM", inputs, 3, hidden_size=1, clip=0.5)
    close(found, theirs(oracle, "AttnLSTM", inputs, 3, hidden_size=1, clip=0.5))
    gate = 1 / (1 + np.exp(-0.5))
    cell = gate + gate * np.tanh(0.5)
    assert found[2].item() == pytest.approx(cell) and found[1].item() == pytest.approx(gate * np.tanh(cell))
    assert cell > 0.5


def test_a_cell_without_memory_is_refused() -> None:
    with pytest.raises(OperatorError, match="QW, MW, V and M") as caught:
        ours("AttnLSTM", [draw(2, 1, 3), draw(1, 8, 5), draw(1, 8, 2)], 3, hidden_size=2)
    assert caught.value.code == "SX407"


# --- experts ----------------------------------------------------------------------------------------------------------


def experts() -> list[Any]:
    return [draw(5, 4), draw(5, 3), draw(3, 6, 4), None, draw(3, 4, 6)]


def test_the_weights_of_experts_sum_to_one_only_if_asked(oracle: Oracle) -> None:
    inputs = experts()
    close(ours("MoE", inputs, k=2), theirs(oracle, "MoE", inputs, k=2))
    how = {"k": 3, "normalize_routing_weights": 1}
    close(ours("MoE", inputs, **how), ours("MoE", inputs, k=3))
    p = np.exp(inputs[1]) / np.exp(inputs[1]).sum(1, keepdims=True)
    close(ours("MoE", inputs, k=1), ours("MoE", inputs, k=1, normalize_routing_weights=1)[0][None] * p.max(1)[:, None])


def test_the_sparse_mixer_changes_nothing(oracle: Oracle) -> None:
    """onnxruntime's CPU kernel does not read it."""
    inputs = experts()
    close(theirs(oracle, "MoE", inputs, k=2, use_sparse_mixer=1), theirs(oracle, "MoE", inputs, k=2), 0, 0)
    close(ours("MoE", inputs, k=2, use_sparse_mixer=1), ours("MoE", inputs, k=2), 0, 0)


def test_the_layouts_of_a_gate_agree(oracle: Oracle) -> None:
    x, router, g, _, second = experts()
    u, how = draw(3, 6, 4), {"activation_type": "swiglu", "k": 2, "swiglu_limit": 0.5, "activation_beta": 1.0}
    turns = np.stack([g, u], axis=2).reshape(3, 12, 4)
    found = ours("MoE", [x, router, turns, None, second], swiglu_fusion=1, **how)
    close(found, theirs(oracle, "MoE", [x, router, turns, None, second], swiglu_fusion=1, **how))
    close(found, ours("MoE", [x, router, np.concatenate([g, u], 1), None, second], swiglu_fusion=2, **how))
    close(found, ours("MoE", [x, router, g, None, second, None, u], **how))
    with pytest.raises(OperatorError, match="needs fc3"):
        ours("MoE", [x, router, g, None, second], **how)


def test_a_router_selects_within_its_groups_only(oracle: Oracle) -> None:
    """Of the two experts of one group three are asked: the third place stays empty."""
    inputs = [draw(4, 4), draw(4)]
    how = {"top_k": 3, "n_group": 2, "topk_group": 1, "group_topk": 1}
    found = ours("MoEGroupRouter", inputs, **how)
    close(found, theirs(oracle, "MoEGroupRouter", inputs, **how))
    assert ((found[0] > -10000).sum(1) == 2).all()
