"""The last row of logits: the file that a generator runs against the whole file, both in onnxruntime."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.helpers import language_models as models
from tests.helpers.language_models import grouped, node, write

from singa import sonnx
from singa._generation.last_rows import keep_last_row
from singa_backend.engines.oracle import Oracle

WIDTH, WORDS = 32, 7
MICROSOFT = "com.microsoft"


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    pytest.importorskip("onnxruntime")
    with Oracle("onnxruntime") as engine:
        yield engine


def layers(
    *nodes: onnx.NodeProto, typed: bool = True, opset: int = 17, outputs: tuple[str, ...] = ("logits",)
) -> onnx.ModelProto:
    """A model of these nodes on x and z, of shape (batch, rows, 32), with constants; `typed`: inner values have shapes."""
    g = np.random.default_rng(0)
    held = {n: g.standard_normal((WIDTH, WIDTH)) / 6 for n in ("up", "gate", "down")}
    held |= {"head": g.standard_normal((WIDTH, WORDS)), "scale": g.uniform(0.5, 2, WIDTH), "bias": g.standard_normal(WIDTH)}
    tensors = [numpy_helper.from_array(v.astype(np.float32), n) for n, v in held.items()]
    tensors.append(numpy_helper.from_array(g.integers(0, 256, (WORDS, 1, 16), dtype=np.uint8), "words"))
    tensors.append(numpy_helper.from_array(g.uniform(0.1, 0.3, (WORDS, 1)).astype(np.float32), "scales"))
    value = helper.make_tensor_value_info
    given = [value(n, TensorProto.FLOAT, ["batch", "rows", WIDTH]) for n in "xz"]
    made = [value(n, TensorProto.FLOAT, ["batch", "rows", WORDS if n == "logits" else WIDTH]) for n in outputs]
    inner = [value(o, TensorProto.FLOAT, ["batch", "rows", WIDTH]) for n in nodes for o in n.output if o and o not in outputs]
    graph = helper.make_graph(list(nodes), "g", given, made, tensors, value_info=inner if typed else [])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


SUM = helper.make_node("SkipSimplifiedLayerNormalization", ["x", "z", "scale"], ["n0", "", "", "h0"], domain=MICROSOFT)
FEED = [node("MatMul", "n0 gate", "g0"), node("Sigmoid", "g0", "s0"), node("Mul", "g0 s0", "a0"), node("MatMul", "n0 up", "u0"),
        node("Mul", "a0 u0", "m0"), node("MatMul", "m0 down", "d0")]  # fmt: skip
NORM = helper.make_node("SkipSimplifiedLayerNormalization", ["h0", "d0", "scale"], ["n1"], domain=MICROSOFT)
FEW = node("MatMulNBits", "n1 words scales", "logits", domain=MICROSOFT, K=WIDTH, N=WORDS, bits=4, block_size=32)
PLAIN = [node("Add", "x z", "t"), node("LayerNormalization", "t scale bias", "n1", axis=-1), node("Add", "n1 bias", "n2"),
         node("MatMul", "n2 head", "logits")]  # fmt: skip

CUT: dict[str, tuple[onnx.ModelProto, list[str]]] = {
    "a layer": (layers(SUM, *FEED, NORM, FEW), ["x", "z"]),
    "a layer without shapes": (layers(SUM, *FEED, NORM, FEW, typed=False), ["n1"]),
    "a value that is an output too": (layers(SUM, *FEED, NORM, FEW, outputs=("logits", "u0")), ["n0", "u0", "h0"]),
    "ordinary operators": (layers(*PLAIN), ["x", "z"]),
    "an operator across rows": (layers(PLAIN[0], node("ReduceMax", "t", "n1", axes=[1]), *PLAIN[2:]), ["n1"]),
}


@pytest.mark.parametrize("name", CUT)
def test_the_last_row_is_that_of_the_whole_file(name: str, oracle: Oracle) -> None:
    model, sliced = CUT[name]
    g = np.random.default_rng(1)
    feeds = {n: g.standard_normal((2, 5, WIDTH)).astype(np.float32) for n in "xz"}
    wanted = oracle.run(model.SerializeToString(), feeds)
    made = keep_last_row(onnx.ModelProto.FromString(model.SerializeToString()), "logits")
    onnx.checker.check_model(made)
    found = oracle.run(made.SerializeToString(), feeds)
    assert [n.input[0] for n in made.graph.node if n.op_type == "Slice"] == sliced
    np.testing.assert_allclose(found["logits"], wanted["logits"][:, -1:], rtol=1e-5, atol=1e-5)
    for other in [o.name for o in model.graph.output if o.name != "logits"]:
        np.testing.assert_allclose(found[other], wanted[other], rtol=1e-5, atol=1e-5)


UNCHANGED: dict[str, Any] = {
    "logits of another operator": layers(*PLAIN[:3], node("MatMul", "n2 head", "w"), node("Softmax", "w", "logits"), typed=False),
    "a product of two values": layers(
        node("Transpose", "z", "zt", perm=[0, 2, 1]), node("MatMul", "x zt", "logits"), typed=False
    ),
    "opset 9": layers(*PLAIN, opset=9),
    "a subgraph that reads them": layers(
        *PLAIN,
        helper.make_node("If", ["yes"], ["other"], then_branch=helper.make_graph(
            [node("Identity", "logits", "b")], "b", [], [helper.make_tensor_value_info("b", TensorProto.FLOAT, None)])),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_files_stay_as_they_are(name: str) -> None:
    model = UNCHANGED[name]
    before = model.SerializeToString()
    assert keep_last_row(model, "logits").SerializeToString() == before
    assert keep_last_row(model, "absent").SerializeToString() == before


def test_a_generator_computes_one_row(tmp_path: Path) -> None:
    write(tmp_path, {"model": grouped()})
    decoder = sonnx.Generator(tmp_path)._first
    tokens = np.array([[1, 2, 3, 4]])
    past = {c.past: c.empty(1, 0) for c in decoder.caches}
    logits = decoder.rep.run({"input_ids": tokens, "attention_mask": np.ones_like(tokens), **past})["logits"]
    assert logits.shape == (1, 1, models.WORDS)
