"""Recipes of the layers of a network: normalizations, attention, recurrence, losses."""

from __future__ import annotations

import numpy as np

from ..strategies import Draw, Skip
from .registry import recipe


@recipe("BatchNormalization")
def batch_normalization(d: Draw) -> None:
    c = d.whole(1, 4)
    shape = (d.whole(1, 3), c, *d.shape(0, 3, empty=0))
    d.put(d.array(0, shape, "tame"))
    spatial = d.attr("spatial", [1], 1)
    d.put(*(d.array(i, (c,), "tame") for i in (1, 2, 3)), d.array(4, (c,), "positive"))
    if d.has("is_test"):
        d.attributes["is_test"] = 1
    if d.v == 1:
        d.attributes["consumed_inputs"] = [0, 0, 0, 1, 1]
    d.attr("epsilon", lambda: d.real(1e-4, 1e-2), 1e-5)
    d.attr("momentum", lambda: d.real(0.5, 0.99), 0.9)
    if spatial and d.attr("training_mode", [0, 1], 0):
        d.outputs = ["y", "mean", "var"]
        if np.prod(shape) <= c:
            raise Skip


@recipe("InstanceNormalization")
def instance_normalization(d: Draw) -> None:
    c = d.whole(1, 3)
    d.put(d.array(0, (d.whole(1, 2), c, *(d.whole(2, 4) for _ in range(d.whole(1, 3)))), "tame"))
    d.put(d.array(1, (c,), "tame"), d.array(2, (c,), "tame"))
    d.attr("epsilon", lambda: d.real(1e-4, 1e-2), 1e-5)
    d.attr("consumed_inputs", lambda: [0, 0, 0], None)


@recipe("GroupNormalization")
def group_normalization(d: Draw) -> None:
    groups, each = d.whole(1, 3), d.whole(1, 3)
    d.put(d.array(0, (d.whole(1, 2), groups * each, *(d.whole(2, 4) for _ in range(d.whole(1, 2)))), "tame"))
    n = groups if d.v < 21 else groups * each
    d.put(d.array(1, (n,), "tame"), d.array(2, (n,), "tame"))
    d.attributes["num_groups"] = groups
    d.attr("epsilon", lambda: d.real(1e-4, 1e-2), 1e-5)


@recipe("LayerNormalization RMSNormalization")
def layer_normalization(d: Draw) -> None:
    shape = (*d.shape(0, 3, empty=0), d.whole(2, 6))
    axis = d.attr("axis", [d.axis(len(shape), 1)], -1)
    inner = shape[axis:] if axis >= 0 else shape[len(shape) + axis :]
    d.put(d.array(0, shape, "tame"), d.array(1, inner if d.chance(0.8) else d.broadcast(inner), "tame"))
    if d.schema.name == "LayerNormalization":
        if d.chance():
            d.put(d.array(2, inner, "tame"))
        if d.chance(0.4) and d.dtype("U") == np.float32:
            d.outputs = ["y", "mean", "inv"]
    d.attr("epsilon", lambda: d.real(1e-4, 1e-2), 1e-5)


@recipe("NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss")
def loss(d: Draw) -> None:
    n, c = d.whole(1, 3), d.whole(1, 4)
    inner = d.shape(0, 2, 3, empty=0)
    d.put(d.array(0, (n, c, *inner), "tame"))
    labels = np.asarray(d.rng.integers(0, c, (n, *inner)))
    ignored = d.attr("ignore_index", lambda: d.pick([d.whole(0, c - 1), -1]), None)
    if ignored is not None:
        labels = np.where(np.asarray(d.rng.random(labels.shape) < 0.3), ignored, labels)
    d.put(labels.astype(d.dtype(1)))
    if d.chance():
        d.put(d.array(2, (c,), "positive"))
    d.attr("reduction", ["none", "mean", "sum"], "mean")
    if d.schema.name == "SoftmaxCrossEntropyLoss" and d.chance():
        d.outputs = ["y", "log_prob"]
    if ignored is not None and (labels == ignored).all() and d.attributes.get("reduction", "mean") == "mean":
        raise Skip  # 0 / 0


# --- attention --------------------------------------------------------------------------------------------------------


@recipe("Attention")
def attention(d: Draw) -> None:
    b, kv, q, past, size, wide = d.whole(1, 2), d.whole(1, 2), d.whole(1, 4), d.whole(1, 3), d.pick([2, 4]), d.pick([2, 4])
    keys = d.whole(1, 4)
    heads = kv * d.whole(1, 2)
    flat = d.chance(0.4)
    if flat:
        d.attributes |= {"q_num_heads": heads, "kv_num_heads": kv}
        d.put(d.array(0, (b, q, heads * size), "tame"), d.array(1, (b, keys, kv * size), "tame"))
        d.put(d.array(2, (b, keys, kv * wide), "tame"))
    else:
        d.put(d.array(0, (b, heads, q, size), "tame"), d.array(1, (b, kv, keys, size), "tame"))
        d.put(d.array(2, (b, kv, keys, wide), "tame"))
    cached = d.chance(0.3)
    total = keys + (past if cached else 0)
    mask = None
    if d.chance(0.4):
        lead = d.broadcast((b, heads)) if d.chance() else ()
        mask = d.array(3, (*lead, q, total), "tame")
        if mask.dtype == np.bool_:
            mask[..., 0] = True
    d.put(mask)
    if cached:
        d.put(d.array(4, (b, kv, past, size), "tame"), d.array(5, (b, kv, past, wide), "tame"))
        d.outputs = ["y", "present_key", "present_value"]
    if d.inputs[-1] is None:
        d.inputs.pop()
    d.attr("is_causal", [0, 1], 0)
    d.attr("scale", lambda: d.real(0.1, 1), None)
    d.attr("softcap", [0.0, 2.0], 0.0)
    if d.chance(0.2):
        d.outputs = [*d.outputs, *([""] * (3 - len(d.outputs))), "scores"]
        d.attr("qk_matmul_output_mode", [0, 1, 2, 3], 0)


@recipe("LinearAttention")
def linear_attention(d: Draw) -> None:
    b, t, kv, size, wide = d.whole(1, 2), d.whole(1, 4), d.whole(1, 2), d.pick([2, 4]), d.pick([2, 4])
    heads = kv * d.whole(1, 2)
    rule = d.attr("update_rule", ["linear", "gated", "delta", "gated_delta"], "gated_delta")
    d.attributes |= {"q_num_heads": heads, "kv_num_heads": kv}
    d.put(d.array(0, (b, t, heads * size), "around"), d.array(1, (b, t, kv * size), "around"))
    d.put(d.array(2, (b, t, kv * wide), "around"), d.array(3, (b, kv, size, wide), "around") if d.chance() else None)
    if "gated" in rule or "delta" in rule:
        decay = d.array(4, (b, t, kv), "unit")
        d.put((-decay.astype(np.float32)).astype(decay.dtype) if "gated" in rule else None)
    if "delta" in rule:
        d.put(d.array(5, (b, t, kv), "unit"))
    if d.inputs[-1] is None:
        d.inputs.pop()
    d.attr("scale", lambda: d.real(0.1, 1), None)
    d.outputs = ["y", "present"]


@recipe("FlexAttention", "ai.onnx.preview")
def flex_attention(d: Draw) -> None:
    b, h, q, k, size, wide = d.whole(1, 2), d.whole(1, 2), d.whole(1, 3), d.whole(1, 4), d.whole(1, 4), d.whole(1, 4)
    d.put(d.array(0, (b, h, q, size), "tame"), d.array(1, (b, h, k, size), "tame"), d.array(2, (b, h, k, wide), "tame"))
    d.attr("scale", lambda: d.real(0.1, 1), None)


@recipe("RotaryEmbedding")
def rotary(d: Draw) -> None:
    b, t, h, size = d.whole(1, 2), d.whole(1, 3), d.whole(1, 2), d.pick([2, 4, 8])
    flat = d.chance(0.4)
    d.put(d.array(0, (b, t, h * size) if flat else (b, h, t, size), "tame"))
    if flat:
        d.attributes["num_heads"] = h
    dim = size
    if size > 2 and d.chance(0.3):
        dim = d.attributes["rotary_embedding_dim"] = size // 2
        d.attributes["num_heads"] = h
    if d.chance():
        longest = d.whole(t, 6)
        places = np.asarray(d.rng.integers(0, longest, (b, t)))
        d.put(d.array(1, (longest, dim // 2), "around"), d.array(2, (longest, dim // 2), "around"), places.astype(np.int64))
    else:
        d.put(d.array(1, (b, t, dim // 2), "around"), d.array(2, (b, t, dim // 2), "around"))
    d.attr("interleaved", [0, 1], 0)


@recipe("CausalConvWithState")
def causal_conv(d: Draw) -> None:
    b, c, t, k = d.whole(1, 2), d.whole(1, 3), d.whole(1, 5), d.whole(1, 4)
    d.put(d.array(0, (b, c, t), "tame"), d.array(1, (c, 1, k), "tame"))
    d.put(d.array(2, (c,), "tame") if d.chance() else None, d.array(3, (b, c, k - 1), "tame") if d.chance() else None)
    while d.inputs[-1] is None:
        d.inputs.pop()
    d.attr("activation", ["none", "silu", "swish"], "none")
    d.outputs = ["y", "state"]


# --- recurrence -------------------------------------------------------------------------------------------------------

ACTIVATIONS = ("Sigmoid", "Tanh", "Relu", "HardSigmoid", "Softsign", "Softplus", "LeakyRelu", "ThresholdedRelu", "Elu", "Affine")

WITH_ALPHA = frozenset(("HardSigmoid", "LeakyRelu", "ThresholdedRelu", "Elu", "Affine"))
"""The activations that have the parameter alpha."""


@recipe("RNN GRU LSTM")
def recurrent(d: Draw) -> None:
    name = d.schema.name
    gates, acts = {"RNN": (1, 1), "GRU": (3, 2), "LSTM": (4, 3)}[name]
    t, b, n, h = d.whole(1, 4), d.whole(1, 3), d.whole(1, 3), d.whole(1, 3)
    direction = d.attr("direction", ["forward", "reverse", "bidirectional"], "forward")
    if d.v == 1 and name == "GRU" and "direction" not in d.attributes:
        d.attributes["direction"] = "forward"
    dirs = 2 if direction == "bidirectional" else 1
    late = d.attr("layout", [0, 1], 0)
    d.attributes["hidden_size"] = h
    d.put(d.array(0, (b, t, n) if late else (t, b, n), "tame"))
    d.put(d.array(1, (dirs, gates * h, n), "around"), d.array(2, (dirs, gates * h, h), "around"))
    d.put(d.array(3, (dirs, 2 * gates * h), "around") if d.chance() else None)
    d.put(np.array(d.wholes(1, t, b), np.int32) if d.chance(0.4) else None)
    state = (b, dirs, h) if late else (dirs, b, h)
    d.put(d.array(5, state, "around") if d.chance() else None)
    if name == "LSTM":
        d.put(d.array(6, state, "around") if d.inputs[-1] is not None else None)
        d.put(d.array(7, (dirs, 3 * h), "around") if d.chance(0.3) else None)
        d.attr("input_forget", [0, 1], 0)
    while d.inputs[-1] is None:
        d.inputs.pop()
    if d.chance(0.4):
        chosen = [d.pick(ACTIVATIONS) for _ in range(acts * dirs)]
        d.attributes["activations"] = chosen
        if WITH_ALPHA & set(chosen):
            d.attributes["activation_alpha"] = [d.real(0.1, 1) for a in chosen if a in WITH_ALPHA]
            d.attributes["activation_beta"] = [d.real(0, 0.5) for a in chosen if a in ("HardSigmoid", "Affine")]
            if not d.attributes["activation_beta"]:
                del d.attributes["activation_beta"]
    d.attr("clip", lambda: 0.0 if d.chance(0.1) else d.real(0.5, 2), None)
    d.attr("linear_before_reset", [0, 1], 0)
    if d.has("output_sequence"):
        d.attributes["output_sequence"] = 1
    d.outputs = ["y", "y_h", "y_c"][: 3 if name == "LSTM" else 2]
