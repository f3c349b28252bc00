"""A decoder with gated delta-net layers and gated attention with a partial rotation, as onnxruntime-genai's builder writes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

import singa_backend
from singa_backend.engines.oracle import Oracle

F = np.float32
HIDDEN, HEADS, GROUPS, SIZE, ROTATED = 64, 4, 2, 32, 16
KEYS, VALUES, WIDTH, TAPS = 2, 4, 16, 4
CHANNELS = (2 * KEYS + VALUES) * WIDTH

LINEAR = """
    a{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.000001> (h{i}, norm{i})
    qkv{i} = MatMul(a{i}, wqkv{i})  z{i} = MatMul(a{i}, wz{i})  b{i} = MatMul(a{i}, wb{i})  g{i} = MatMul(a{i}, wa{i})
    across{i} = Transpose <perm=[0,2,1]> (qkv{i})
    mixed{i}, conv_out{i} = com.microsoft.CausalConvWithState <activation="silu"> (across{i}, taps{i}, shift{i}, conv{i})
    along{i} = Transpose <perm=[0,2,1]> (mixed{i})
    q{i}, k{i}, v{i} = Split <axis=-1> (along{i}, parts)
    qh{i} = Reshape(q{i}, by_head)  qn{i} = LpNormalization <axis=-1, p=2> (qh{i})  qf{i} = Reshape(qn{i}, flat)
    qs{i} = Mul(qf{i}, factor)
    kh{i} = Reshape(k{i}, by_head)  kn{i} = LpNormalization <axis=-1, p=2> (kh{i})  kf{i} = Reshape(kn{i}, flat)
    decay{i}, beta{i} = com.microsoft.LinearAttentionGate (g{i}, dt{i}, rate{i}, b{i})
    y{i}, state_out{i} = com.microsoft.LinearAttention <q_num_heads=2, kv_num_heads=4, scale=1.0, update_rule="gated_delta">
        (qs{i}, kf{i}, v{i}, state{i}, decay{i}, beta{i})
    yh{i} = Reshape(y{i}, by_value)  yn{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.000001> (yh{i}, inner{i})
    yf{i} = Reshape(yn{i}, all_values)  zs{i} = Sigmoid(z{i})  zz{i} = Mul(z{i}, zs{i})  gated{i} = Mul(yf{i}, zz{i})
    o{i} = MatMul(gated{i}, wo{i})  h{n} = Add(h{i}, o{i})"""

FULL = """
    a{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.000001> (h{i}, norm{i})
    both{i} = MatMul(a{i}, wq{i})  k{i} = MatMul(a{i}, wk{i})  v{i} = MatMul(a{i}, wv{i})
    bh{i} = Reshape(both{i}, doubled)  qh{i}, gh{i} = Split <axis=-1> (bh{i}, halves)  gate{i} = Reshape(gh{i}, hidden)
    qn{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.000001> (qh{i}, qnorm{i})  qf{i} = Reshape(qn{i}, hidden)
    kh{i} = Reshape(k{i}, groups)  kn{i} = SimplifiedLayerNormalization <axis=-1, epsilon=0.000001> (kh{i}, knorm{i})
    kf{i} = Reshape(kn{i}, keys)
    y{i}, key_out{i}, value_out{i} = com.microsoft.GroupQueryAttention <num_heads=4, kv_num_heads=2, do_rotary=1>
        (qf{i}, kf{i}, v{i}, key{i}, value{i}, last, total, cos, sin)
    s{i} = Sigmoid(gate{i})  gated{i} = Mul(y{i}, s{i})
    o{i} = MatMul(gated{i}, wo{i})  h{n} = Add(h{i}, o{i})"""

KINDS = "LLLFLF"
LINEAR_STATES, FULL_STATES = ("conv", "state"), ("key", "value")


def decoder() -> ModelProto:
    rng = np.random.default_rng(0)
    nodes = "".join((LINEAR if kind == "L" else FULL).format(i=i, n=i + 1) for i, kind in enumerate(KINDS))
    states = [(n, i) for i, kind in enumerate(KINDS) for n in (LINEAR_STATES if kind == "L" else FULL_STATES)]
    shapes = {"conv": f"b,{CHANNELS},{TAPS - 1}", "state": f"b,{VALUES},{WIDTH},{WIDTH}", "key": f"b,{GROUPS},p,{SIZE}"}
    shapes["value"] = shapes["key"]
    ins = ", ".join(f"float[{shapes[n]}] {n}{i}" for n, i in states)
    outs = ", ".join(f"float[{shapes[n].replace('p', 't')}] {n}_out{i}" for n, i in states)
    ins, outs = f"float[b,s,{HIDDEN}] h0, int32[b] last, int32 total, {ins}", f"float[b,s,{HIDDEN}] h{len(KINDS)}, {outs}"
    head = '<ir_version: 9, opset_import: ["" : 21, "com.microsoft" : 1]>'
    model = parser.parse_model(f"{head} g ({ins}) => ({outs}) {{{nodes}}}")
    weights: dict[str, Any] = {
        "parts": np.array([KEYS * WIDTH, KEYS * WIDTH, VALUES * WIDTH]), "by_head": np.array([0, 0, KEYS, WIDTH]),
        "flat": np.array([0, 0, KEYS * WIDTH]), "by_value": np.array([0, 0, VALUES, WIDTH]),
        "all_values": np.array([0, 0, VALUES * WIDTH]), "doubled": np.array([0, 0, HEADS, 2 * SIZE]),
        "halves": np.array([SIZE, SIZE]), "hidden": np.array([0, 0, HEADS * SIZE]), "groups": np.array([0, 0, GROUPS, SIZE]),
        "keys": np.array([0, 0, GROUPS * SIZE]), "factor": np.array(WIDTH**-0.5, F),
    }  # fmt: skip
    angles = np.arange(64)[:, None] / 1e4 ** (np.arange(ROTATED // 2) / (ROTATED // 2))
    weights |= {"cos": np.cos(angles).astype(F), "sin": np.sin(angles).astype(F)}

    def drawn(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0] if len(shape) == 2 else 2)).astype(F)

    for i, kind in enumerate(KINDS):
        weights[f"norm{i}"] = 1 + drawn(HIDDEN) / 4
        if kind == "L":
            values = VALUES * WIDTH
            weights |= {f"wqkv{i}": drawn(HIDDEN, CHANNELS), f"wz{i}": drawn(HIDDEN, values), f"wo{i}": drawn(values, HIDDEN)}
            weights |= {f"wa{i}": drawn(HIDDEN, VALUES), f"wb{i}": drawn(HIDDEN, VALUES), f"taps{i}": drawn(CHANNELS, 1, TAPS)}
            weights |= {f"shift{i}": np.zeros(CHANNELS, F), f"dt{i}": drawn(VALUES), f"inner{i}": 1 + drawn(WIDTH) / 4}
            weights[f"rate{i}"] = -np.exp(drawn(VALUES))
        else:
            both, keys = HEADS * SIZE, GROUPS * SIZE
            weights |= {f"wq{i}": drawn(HIDDEN, 2 * both), f"wk{i}": drawn(HIDDEN, keys), f"wv{i}": drawn(HIDDEN, keys)}
            weights |= {f"wo{i}": drawn(both, HIDDEN), f"qnorm{i}": 1 + drawn(SIZE) / 4, f"knorm{i}": 1 + drawn(SIZE) / 4}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items())
    return model


def first_states(batch: int) -> dict[str, np.ndarray]:
    made: dict[str, np.ndarray] = {}
    for i, kind in enumerate(KINDS):
        if kind == "L":
            made[f"conv{i}"] = np.zeros((batch, CHANNELS, TAPS - 1), F)
            made[f"state{i}"] = np.zeros((batch, VALUES, WIDTH, WIDTH), F)
        else:
            made |= {f"{n}{i}": np.zeros((batch, GROUPS, 0, SIZE), F) for n in FULL_STATES}
    return made


@pytest.mark.parametrize("optimize", [0, 1, 2])
def test_it_computes_as_onnxruntime_does(oracle: Oracle, optimize: int) -> None:
    """A prompt and six tokens; value heads share the heads of keys, which was refused."""
    model, rng = decoder(), np.random.default_rng(1)
    rep = singa_backend.prepare(model, optimize=optimize)
    names = [y.name for y in model.graph.output]
    states, other, total = first_states(1), first_states(1), 0
    for rows in (7, 1, 1, 1, 1, 1, 1):
        total += rows
        feeds = {"h0": rng.standard_normal((1, rows, HIDDEN)).astype(F), "last": np.array([total - 1], np.int32)}
        feeds["total"] = np.array(total, np.int32)
        found = dict(zip(names, rep.run(feeds | states), strict=True))
        expected = oracle.run(model.SerializeToString(), feeds | other)
        for name in names:
            near = 1e-4 * max(1.0, float(np.abs(expected[name]).max()))
            np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=near, err_msg=name)
        states, other = ({n.replace("_out", ""): v[n] for n in names[1:]} for v in (found, expected))
