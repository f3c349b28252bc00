"""compare, bisect and reduce of `debug`: faults planted in ten models are found, and the node that is written fails alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import AttributeProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser

from singa.cli import main
from singa_backend import InvalidInput, InvalidModel, SingaBackend, SonnxError, debug
from singa_backend.comparison.verdict import same_bits
from singa_backend.debug.spill import SpillStore
from singa_backend.ir.declaration import declarations
from singa_backend.proto import test_data
from singa_backend.proto.load import embed, open_light

HEAD = '<ir_version: 10, opset_import: ["": 21, "own": 1]>'
RNG = np.random.default_rng(7)


def build(text: str, functions: str = "", **weights: tuple[int, ...] | list[int]) -> ModelProto:
    """A model from ONNX's text syntax; weights by name: a shape to draw, or the integers themselves."""
    model = parser.parse_model(HEAD + text + functions)
    for name, value in weights.items():
        drawn = isinstance(value, tuple)
        array = 0.3 * RNG.standard_normal(value).astype(np.float32) if drawn else np.array(value, np.int64)
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(array), name))
    return model


def conv_net() -> ModelProto:
    return build(
        "g (float[n,3,8,8] x) => (float[n,5] y) { a = Conv<pads=[1,1,1,1]>(x, w1, b1)"
        " c = BatchNormalization<epsilon=1e-5>(a, s, b, m, v) d = Relu(c) e = MaxPool<kernel_shape=[2,2], strides=[2,2]>(d)"
        " f = Conv(e, w2) p = GlobalAveragePool(f) q = Flatten(p) y = Gemm(q, w3, b3) }",
        w1=(4, 3, 3, 3), b1=(4,), s=(4,), b=(4,), m=(4,), w2=(6, 4, 3, 3), w3=(6, 5), b3=(5,), v=[1, 1, 1, 1],
    )  # fmt: skip


def residual() -> ModelProto:
    return build(
        "g (float[n,4,6,6] x) => (float[n,4,6,6] y) { a = Conv<pads=[1,1,1,1]>(x, w1) b = LeakyRelu<alpha=0.1>(a)"
        " c = Conv<pads=[1,1,1,1]>(b, w2) d = Add(c, x) e = LeakyRelu<alpha=0.1>(d) f = Conv(e, w3) y = Add(f, d) }",
        w1=(4, 4, 3, 3), w2=(4, 4, 3, 3), w3=(4, 4, 1, 1),
    )  # fmt: skip


def lstm() -> ModelProto:
    return build(
        "g (float[5,n,3] x) => (float[n,2] y) { a, h, c = LSTM<hidden_size=4, direction=\"forward\">(x, w, r, b)"
        " s = Squeeze(h, zero) t = Tanh(s) y = MatMul(t, w2) }",
        w=(1, 16, 3), r=(1, 16, 4), b=(1, 32), w2=(4, 2), zero=[0],
    )  # fmt: skip


def attention() -> ModelProto:
    return build(
        "g (float[n,6,8] x) => (float[n,6,8] y) { q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
        " t = Transpose<perm=[0,2,1]>(k) s = MatMul(q, t) p = Softmax<axis=-1>(s) o = MatMul(p, v) z = Add(o, x)"
        " y = LayerNormalization<axis=-1, epsilon=1e-5>(z, g1, b1) }",
        wq=(8, 8), wk=(8, 8), wv=(8, 8), g1=(8,), b1=(8,),
    )  # fmt: skip


def loop() -> ModelProto:
    return build(
        "g (float[n,4] x) => (float[n,4] y) { go = Constant<value = bool {1}>() h = MatMul(x, w1)"
        " l = Loop(three, go, h) <body = b (int64 i, bool c, float[n,4] u) => (bool d, float[n,4] r)"
        " { d = Identity(c) t = MatMul(u, w2) r = Elu<alpha=1.0>(t) }> y = Tanh(l) }",
        w1=(4, 4), w2=(4, 4), three=[3],
    )  # fmt: skip


def branches() -> ModelProto:
    return build(
        "g (float[n,4] x) => (float[n,4] y) { s = ReduceMax<keepdims=0>(x) c = Greater(s, low)"
        " l = If(c) <then_branch = a () => (float[n,4] p) { t = MatMul(x, w1) p = Selu<alpha=1.6>(t) },"
        " else_branch = b () => (float[n,4] q) { q = Neg(x) }> y = MatMul(l, w2) }",
        w1=(4, 4), w2=(4, 4), low=(),
    )  # fmt: skip


def function() -> ModelProto:
    return build(
        "g (float[n,4] x) => (float[n,4] y) { a = MatMul(x, w1) b = own.Block<slope: float = 0.2>(a, w2) y = Softmax(b) }",
        '<domain: "own", opset_import: ["": 21]> Block<slope>(u, k) => (r)'
        " { t = MatMul(u, k) r = LeakyRelu<alpha: float = @slope>(t) }",
        w1=(4, 4), w2=(4, 4),
    )  # fmt: skip


def gru() -> ModelProto:
    return build(
        "g (float[5,n,3] x) => (float[5,n,4] y) { a, h = GRU<hidden_size=4, linear_before_reset=0>(x, w, r, b)"
        " s = Squeeze(a, one) y = Add(s, b2) }",
        w=(1, 12, 3), r=(1, 12, 4), b=(1, 24), b2=(4,), one=[1],
    )  # fmt: skip


def unet() -> ModelProto:
    return build(
        "g (float[n,2,8,8] x) => (float[n,1,8,8] y) { a = Conv<pads=[1,1,1,1]>(x, w1) b = Relu(a)"
        " d = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b) e = Conv<pads=[1,1,1,1]>(d, w2)"
        ' u = Resize<mode="nearest">(e, , sc) k = Concat<axis=1>(u, b) f = Conv(k, w3) y = Sigmoid(f) }',
        w1=(3, 2, 3, 3), w2=(3, 3, 3, 3), w3=(1, 6, 1, 1), sc=(4,),
    )  # fmt: skip


def mlp() -> ModelProto:
    return build(
        "g (float[n,6] x) => (float[n,3] y) { a = Gemm<alpha=1.0>(x, w1, b1) b = Erf(a) c = Gemm(b, w2, b2) d = Tanh(c)"
        " y = Gemm<transB=1>(d, w3, b3) }",
        w1=(6, 8), b1=(8,), w2=(8, 8), b2=(8,), w3=(3, 8), b3=(3,),
    )  # fmt: skip


TEN: list[tuple[Callable[[], ModelProto], str, str, str, str, Any]] = [
    # model, changed weight, the value where it must show, then likewise: the node (by its first output), attribute, new value
    (conv_net, "w2", "f", "c", "epsilon", 0.5),
    (residual, "w2", "c", "e", "alpha", 0.3),
    (lstm, "r", "a", "a", "direction", b"reverse"),
    (attention, "wk", "k", "p", "axis", 1),
    (loop, "w2", "l", "r", "alpha", 2.0),
    (branches, "w1", "l", "p", "alpha", 2.0),
    (function, "w2", "b", "b", "slope", 0.7),
    (gru, "r", "a", "a", "linear_before_reset", 1),
    (unet, "w3", "f", "u", "mode", b"linear"),
    (mlp, "b2", "c", "a", "alpha", 1.5),
]
NAMES = [row[0].__name__ for row in TEN]


def feeds(model: ModelProto, batch: int = 2) -> dict[str, np.ndarray]:
    shapes = {i.name: [d.dim_value or batch for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
    return {n: np.random.default_rng(1).standard_normal(s).astype(np.float32) + 0.2 for n, s in shapes.items()}


def complete(make: Callable[[], ModelProto]) -> ModelProto:
    """The model with the weights that are not drawn: variances of one in float, scales of a Resize."""
    model = make()
    for tensor in model.graph.initializer:
        if tensor.name == "v" and tensor.data_type == TensorProto.INT64:
            tensor.CopyFrom(numpy_helper.from_array(np.ones(4, np.float32), "v"))
        if tensor.name == "sc":
            tensor.CopyFrom(numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "sc"))
        if tensor.name == "low":
            tensor.CopyFrom(numpy_helper.from_array(np.float32(0), "low"))
    return model


def with_weight(model: ModelProto, name: str) -> ModelProto:
    """A copy in which one element of one weight differs."""
    copy = ModelProto.FromString(model.SerializeToString())
    tensor = next(t for t in copy.graph.initializer if t.name == name)
    array = numpy_helper.to_array(tensor).copy()
    array.reshape(-1)[0] += 4
    tensor.CopyFrom(numpy_helper.from_array(array, name))
    return copy


def nodes_of(graph: Any) -> list[NodeProto]:
    return [m for n in graph.node for m in (n, *(i for a in n.attribute if a.HasField("g") for i in nodes_of(a.g)))]


def with_attribute(model: ModelProto, output: str, name: str, value: Any) -> ModelProto:
    """A copy in which one attribute differs, of the node that computes `output` in any subgraph."""
    copy = ModelProto.FromString(model.SerializeToString())
    node = next(n for n in nodes_of(copy.graph) if n.output[0] == output)
    attribute: AttributeProto = next(a for a in node.attribute if a.name == name)
    attribute.CopyFrom(helper.make_attribute(name, value))
    return copy


def fails_alone(folder: Path) -> bool:
    """Whether the outputs of the written model, run from its files alone, differ from the written ones."""
    model = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(model)
    assert len(model.graph.node) == 1
    inputs, expected = test_data.data_set(folder / "test_data_set_0", model)
    named = dict(zip((i.name for i in model.graph.input), inputs, strict=False))
    outputs = SingaBackend.run_model(folder / "model.onnx", named, optimize=0)
    return not all(a.shape == e.shape and np.allclose(a, e, 1e-4, 1e-6) for a, e in zip(outputs, expected, strict=True))


@pytest.mark.parametrize(("make", "weight", "shows", "_o", "_a", "_v"), TEN, ids=NAMES)
def test_a_changed_weight_is_found(make: Any, weight: str, shows: str, _o: str, _a: str, _v: Any, tmp_path: Path) -> None:
    right = complete(make)
    wrong = with_weight(right, weight)
    assert debug.bisect(right, feeds(right), against=right, to=tmp_path / "none") is None
    found = debug.bisect(wrong, feeds(right), against=right, to=tmp_path)
    assert found is not None and shows in found.node.values and found.node.inputs_agreed
    assert found.alone and fails_alone(tmp_path) and not found.accumulated


@pytest.mark.parametrize(("make", "_w", "_s", "output", "name", "value"), TEN, ids=NAMES)
def test_a_changed_attribute_is_found(make: Any, _w: str, _s: str, output: str, name: str, value: Any, tmp_path: Path) -> None:
    right = complete(make)
    wrong = with_attribute(right, output, name, value)
    outer = next(n for n in right.graph.node if output in {m.output[0] for m in nodes_of(helper.make_graph([n], "g", [], []))})
    found = debug.bisect(wrong, feeds(right), against=right, to=tmp_path)
    assert found is not None and found.node.values[0] == outer.output[0] and found.node.notes
    assert found.alone and fails_alone(tmp_path)


def test_the_repro_is_the_node_with_its_opsets_weights_and_version(tmp_path: Path) -> None:
    right = complete(loop)
    debug.bisect(with_weight(right, "w2"), feeds(right), against=right, to=tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    assert (model.ir_version, model.opset_import[0].version, model.graph.node[0].op_type) == (10, 21, "Loop")
    assert {t.name for t in model.graph.initializer} == {"w2", "three", "go"}  # w2 is read inside the body only
    assert [i.name for i in model.graph.input] == ["h"]


def test_the_repro_of_a_model_from_before_ir_version_4(tmp_path: Path) -> None:
    right = complete(mlp)
    right.ir_version, right.opset_import[0].version = 3, 9
    for tensor in right.graph.initializer:
        right.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    inputs = {"x": np.ones((2, 6), np.float32)}
    found = debug.bisect(with_weight(right, "b2"), inputs, against=right, to=tmp_path)
    model = onnx.load(tmp_path / "model.onnx")
    assert found is not None and fails_alone(tmp_path)
    assert [i.name for i in model.graph.input] == ["b", "w2", "b2"] and model.ir_version == 3
    changed = inputs | {"b2": np.zeros(8, np.float32)}  # an initializer that is fed is fed to both
    assert debug.compare(with_weight(right, "b2"), changed, against=right).agrees


# --- against engines --------------------------------------------------------------------------------------------------


def patch(monkeypatch: pytest.MonkeyPatch, name: str, version: int, change: Callable[[Any], Any]) -> None:
    """Change what an operator of ours returns."""
    declaration = declarations["", name][version]
    body = declaration.body
    monkeypatch.setattr(declaration, "body", lambda xp, *args, **kwargs: change(body(xp, *args, **kwargs)))


def need(engine: str) -> None:
    if engine == "onnxruntime" and find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not installed")


def off_by_a_bit(y: Any) -> Any:
    y = y.copy()
    y.reshape(-1)[-1] += 0.01
    return y


@pytest.mark.parametrize(
    ("engine", "make", "operator", "version", "outer", "index"),
    [
        ("onnxruntime", attention, "Softmax", 13, "Softmax", 5),
        ("onnxruntime", function, "LeakyRelu", 16, "Block", 1),
        ("reference", loop, "Elu", 6, "Loop", 2),
    ],
)
def test_a_wrong_operator_is_found(engine: str, make: Any, operator: str, version: int, outer: str, index: int, tmp_path: Path,
                                   monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    need(engine)
    model = complete(make)
    patch(monkeypatch, operator, version, off_by_a_bit)
    found = debug.bisect(model, feeds(model), against=engine, to=tmp_path)
    assert found is not None and (found.node.operator, found.node.index) == (outer, index)
    assert found.alone and fails_alone(tmp_path)
    monkeypatch.undo()
    assert not fails_alone(tmp_path)  # the expected outputs are right


def test_right_models_agree_with_onnxruntime_whatever_the_chunks() -> None:
    need("onnxruntime")
    for make, budget in ((conv_net, 1), (unet, 1 << 14), (attention, 1 << 28), (branches, 1 << 28)):
        model = complete(make)
        found = debug.compare(model, feeds(model), budget=budget)
        assert found.agrees, (make.__name__, str(found.first), [str(n.failure) for n in found.not_compared])
        assert found.rows[-1].value == model.graph.output[0].name
    assert debug.compare(model, feeds(model), optimised=True).agrees


def test_a_node_that_an_engine_refuses_is_named_in_its_words_and_the_rest_is_compared() -> None:
    need("onnxruntime")
    model = build("g (double[n] x) => (double[n] y) { a = Neg(x) b = Abs(a) c = Sinh(b) d = Neg(c) y = Abs(d) }")
    found = debug.compare(model, {"x": np.array([1.0, -2.0])})
    (failed,) = found.failed
    assert (failed.operator, failed.side, failed.failure.how) == ("Sinh", "theirs", "refused") and not found.agrees
    assert "Could not find an implementation" in failed.failure.message and "Sinh_2" in failed.failure.message
    assert [r.value for r in found.rows] == ["a", "b", "d", "y"] and found.first is None


def test_a_node_that_kills_an_engine_is_found_and_written(tmp_path: Path) -> None:
    need("onnxruntime")
    model = build("g (int32[n] x, int32[n] z) => (int32[n] y) { b = Div(x, z) y = Abs(b) }")
    inputs = {"x": np.array([-(2**31)], np.int32), "z": np.array([-1], np.int32)}
    found = debug.bisect(model, inputs, to=tmp_path)
    if found is None:
        pytest.skip("this onnxruntime survives MIN / -1")
    assert found.node.operator == "Div" and found.alone and found.failure is not None and found.failure.how == "died"


def test_what_we_refuse_is_a_divergence_and_the_walk_goes_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = complete(mlp)

    def refuse(y: Any) -> Any:
        raise ValueError("no such thing")

    patch(monkeypatch, "Erf", 13, refuse)
    found = debug.compare(model, feeds(model), against="reference")
    assert found.first is not None and found.first.operator == "Erf" and "no such thing" in found.first.why
    assert {r.value for r in found.rows} == {"a", "c", "d", "y"} and not found.agrees
    repro = debug.bisect(model, feeds(model), against="reference", to=tmp_path)
    assert repro is not None and repro.alone and repro.failure is not None and repro.failure.code == "SX404"


# --- between models ---------------------------------------------------------------------------------------------------

X = {"x": np.array([[0.5, -1.0, 2.0]], np.float32)}
PLAIN = "g (float[n,3] x) => (float[n,3] y) { a = Relu(x) b = Sqrt(a) y = Neg(b) }"


@pytest.mark.parametrize(
    ("other", "verdict", "index"),
    [
        ("g (float[n,3] x) => (int64[n,3] y) { a = Relu(x) b = Sqrt(a) y = Cast<to=7>(b) }", "dtype", 2),
        ("g (float[n,3] x) => (float[n,1] y) { a = Relu(x) b = ReduceMax<keepdims=1>(a) y = Neg(b) }", "shape", 1),
        ("g (float[n,3] x) => (float[n,3] y) { a = Relu(x) b = Sqrt(x) y = Neg(b) }", "differs", 1),
        ("g (float[n,3] x) => (seq(float[n,3]) y) { a = Relu(x) b = Sqrt(a) y = SequenceConstruct(b) }", "kind", 2),
    ],
)
def test_dtypes_shapes_nan_and_kinds(other: str, verdict: str, index: int, tmp_path: Path) -> None:
    found = debug.compare(build(PLAIN), X, against=build(other))
    assert found.first is not None and found.first.index == index and found.first.inputs_agreed
    row = found.rows[index]
    assert row.difference.verdict == verdict and not found.agrees
    if verdict == "differs":
        assert row.difference.nan == (0, 1) and row.difference.outside == 1 and row.difference.at == (0, 1)
        assert found.origins == [found.first]  # y differs because b does
    repro = debug.bisect(build(PLAIN), X, against=build(other), to=tmp_path)
    assert repro is not None and repro.alone
    json.dumps(found.to_dict(), allow_nan=False), json.dumps(repro.to_dict(), allow_nan=False)


def test_values_are_matched_by_name_by_map_and_by_position() -> None:
    other = build("g (float[n,3] u) => (float[n,3] out) { fused = Relu(u) r = Sqrt(fused) out = Neg(r) }")
    found = debug.compare(build(PLAIN), X, against=other, names={"b": "r"}, align=False)
    assert found.agrees and [r.value for r in found.rows] == ["b", "y"] and [n.node for n in found.not_compared] == ["Relu_0"]
    other = build("g (float[n,3] x) => (float[n,3] y) { b = Relu(x) c = Sqrt(b) y = Neg(c) }")
    found = debug.compare(build(PLAIN), X, against=other, names={"a": "b", "b": "c"})  # here, too, there is a value b
    assert found.agrees and [r.value for r in found.rows] == ["a", "b", "y"]
    with pytest.raises(InvalidInput, match="pairs one value of the other model with several"):
        debug.compare(build(PLAIN), X, against=other, names={"a": "c", "b": "c"})
    with pytest.raises(InvalidInput, match="'q' is not a value of MODEL"):
        debug.compare(build(PLAIN), X, against=other, names={"q": "r"})
    with pytest.raises(InvalidInput, match="also has the inputs 'k'"):
        debug.compare(build(PLAIN), X, against=build("g (float[n,3] x, float[n,3] k) => (float[n,3] y) { y = Add(x, k) }"))


def test_the_repro_gives_what_the_other_model_has(tmp_path: Path) -> None:
    mine = build("g (float[4] x) => (float[2] p, float[2] q) { p, q = Split<num_outputs=2>(x) }")
    other = build("g (float[4] x) => (float[2] q) { one, two = Split<num_outputs=2>(x) q = Neg(two) }")
    found = debug.bisect(mine, {"x": np.arange(4, dtype=np.float32)}, against=other, to=tmp_path, align=False)
    assert found is not None and found.alone and list(found.differences) == ["q"]
    assert [o.name for o in onnx.load(tmp_path / "model.onnx").graph.output] == ["q"]
    assert sorted(p.name for p in (tmp_path / "test_data_set_0").iterdir()) == ["input_0.pb", "output_0.pb"]


@pytest.mark.parametrize("keys", [{"classlabels_strings": ["a", "é"]}, {"classlabels_int64s": [7, -1]}])
def test_maps_are_compared_and_written(keys: dict[str, Any], tmp_path: Path) -> None:
    kind = helper.make_map_type_proto(8 if "classlabels_strings" in keys else 7, helper.make_tensor_type_proto(1, []))

    def model(scale: float) -> onnx.ModelProto:
        nodes = [helper.make_node("Scaler", ["x"], ["s"], scale=[float(scale)], offset=[0.0], domain="ai.onnx.ml"),
                 helper.make_node("ZipMap", ["s"], ["z"], domain="ai.onnx.ml", **keys)]  # fmt: skip
        graph = helper.make_graph(nodes, "g", [helper.make_tensor_value_info("x", 1, [2, 2])],
                                  [helper.make_value_info("z", helper.make_sequence_type_proto(kind))])  # fmt: skip
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 1)], ir_version=8)

    x = {"x": np.array([[0.1, 0.2], [0.3, np.nan]], np.float32)}
    assert debug.compare(model(1 + 1e-6), x, against=model(1)).agrees  # a Python float stands for a float of 32 bits
    found = debug.compare(model(1.1), x, against=model(1))
    assert [r.difference.verdict for r in found.rows] == ["differs", "differs"] and found.rows[1].difference.nan == (1, 1)
    changed = model(1)
    for attribute in changed.graph.node[1].attribute:
        attribute.strings[:], attribute.ints[:] = [b"b"] * len(attribute.strings), [5] * len(attribute.ints)
        attribute.strings[1:], attribute.ints[1:] = [b"a"] * (len(attribute.strings) - 1), [7] * (len(attribute.ints) - 1)
    repro = debug.bisect(model(1), x, against=changed, to=tmp_path)
    assert repro is not None and repro.alone and repro.node.operator == "ZipMap" and "a map of" in str(repro)
    (expected,) = test_data.data_set(tmp_path / "test_data_set_0", onnx.load(tmp_path / "model.onnx"))[1]
    assert same_bits(expected, SingaBackend.prepare(changed).run(x)[0])


def test_a_weight_that_the_other_model_computes_and_a_spilt_value() -> None:
    folded = build("g (float[n,3] x) => (float[n,3] y) { a = Mul(x, k) z = Neg(x) y = Add(a, z) }", k=(3,))
    folded.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.full(3, 4, np.float32), "k"))
    plain = build(
        "g (float[n,3] x) => (float[n,3] y) { z = Neg(x) two = Constant<value = float {2.0}>() k = Mul(two, two)"
        " a = Mul(x, k) y = Add(a, z) }"
    )
    named = debug.compare(plain, X, against=folded, budget=1, align=False)
    assert named.rows[1].difference.verdict == "shape"  # k: [] against [3]
    found = debug.compare(folded, X, against=plain, budget=1)  # z waits on disk
    assert found.agrees and [r.value for r in found.rows] == ["a", "z", "y"]


def test_a_difference_that_only_accumulates_is_said_to(tmp_path: Path) -> None:
    nodes = " ".join(f"v{i + 1} = Mul(v{i}, w{i})" for i in range(12))
    text = f"g (float[n,3] v0) => (float[n,3] v12) {{ {nodes} }}"
    a, b = (build(text, **{f"w{i}": (3,) for i in range(12)}) for _ in range(2))
    for i, (ta, tb) in enumerate(zip(a.graph.initializer, b.graph.initializer, strict=True)):
        ta.CopyFrom(numpy_helper.from_array(np.full(3, 1.5, np.float32), ta.name))
        step = 7e-5 if i == 1 else 2e-5  # each within 1e-4 of relative tolerance
        tb.CopyFrom(numpy_helper.from_array(np.full(3, 1.5 * (1 + step), np.float32), tb.name))
    inputs = {"v0": np.ones((1, 3), np.float32)}
    found = debug.bisect(a, inputs, against=b, to=tmp_path, atol=0)
    assert found is not None and found.accumulated and not found.alone
    assert found.first is not None and found.first.index == 2 and found.node.node == "Mul_1"
    assert debug.bisect(a, inputs, against=b, to=tmp_path, atol=0, local=True) is None
    rows = debug.compare(a, inputs, against=b, atol=0, local=True).rows
    assert all(r.agrees for r in rows) and rows[-1].carried is not None and not rows[-1].carried.agrees


def test_random_values_are_shared_not_judged() -> None:
    need("onnxruntime")
    model = build("g (float[n,3] x) => (float[n,3] y) { r = RandomNormalLike(x) a = Add(r, x) y = Relu(a) }")
    found = debug.compare(model, X)
    assert found.agrees and [r.judged for r in found.rows] == [False, True, True]
    for training, judged in ((1, False), (0, True)):  # a fresh draw at each run, on either side
        dropout = build(
            f"g (float[n,3] x) => (float[n,3] y) {{ t = Constant<value = bool {{{training}}}>()"
            " r = Constant<value = float {0.5}>() d = Dropout(x, r, t) y = Relu(d) }"
        )
        found = debug.compare(dropout, X, against=dropout)
        assert found.agrees and [r.judged for r in found.rows] == [judged, True]
        assert debug.compare(dropout, X, against="sonnx", local=True).agrees


class PathLike:
    """A path that is neither a str nor a Path."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __fspath__(self) -> str:
        return self.path


def test_every_path_is_accepted(tmp_path: Path) -> None:
    path, values = tmp_path / "m.onnx", tmp_path / "y.npz"
    onnx.save(build("g (float[n,3] x) => (float[n,3] y) { y = Relu(x) }"), path)
    np.savez(values, x=X["x"], y=np.maximum(X["x"], 0))
    assert debug.ComparedModel(PathLike(path)).path == path
    for against in (PathLike(values), values, str(values), PathLike(path)):
        assert debug.compare(PathLike(path), X, against=against).agrees


# --- files and memory -------------------------------------------------------------------------------------------------


def test_a_model_opened_light_is_the_same_model(tmp_path: Path) -> None:
    model = complete(branches)
    for name in ("w1", "w2"):
        tensor = next(t for t in model.graph.initializer if t.name == name)
        tensor.CopyFrom(numpy_helper.from_array(RNG.standard_normal((4, 400)).astype(np.float32), name))
    inner = next(a.g for n in model.graph.node if n.op_type == "If" for a in n.attribute)
    inner.initializer.append(numpy_helper.from_array(np.arange(400, dtype=np.int64), "inner"))
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.ones(700, np.float32))))
    model.doc_string = "kept"
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    light, folder = open_light(path, small=0)
    assert open_light(PathLike(path), small=0) == (light, folder)
    assert folder == path.resolve().parent and len(light.SerializeToString()) < 3000 < path.stat().st_size
    embed(light, folder)
    again = numpy_helper.to_array
    assert light.graph.node == model.graph.node and light.graph.node[-1].attribute[0].t.dims == [700]
    for a, b in zip(light.graph.initializer, model.graph.initializer, strict=True):
        np.testing.assert_array_equal(again(a), again(b))
    assert light.doc_string == "kept" and inner.initializer[0].dims == [400]
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(InvalidModel):
        open_light(path, small=0)


def test_a_file_of_more_than_the_limit_is_not_walked(tmp_path: Path) -> None:
    with open(tmp_path / "model.onnx", "wb") as file:
        file.truncate((2 << 30) + 1)
    with pytest.raises(SonnxError, match="SX610"):
        open_light(tmp_path / "model.onnx")


def test_shelf(tmp_path: Path) -> None:
    with SpillStore(100) as store:
        values = [np.arange(10), np.arange(60, dtype=np.int16).reshape(3, 20), np.float64(3).reshape(()), np.zeros((0, 3)), ["a"]]
        for i, value in enumerate(values):
            store.put(str(i), value)
        for i, value in enumerate(values):
            got = store.take(str(i))
            assert got == value if isinstance(value, list) else (got.dtype == value.dtype and np.array_equal(got, value))
            assert str(i) not in store


MEMORY = """
import resource, sys
import numpy as np
from singa_backend import debug
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
if __name__ == "__main__":
    path, against = sys.argv[1:]
    debug.compare(sys.argv[1] + ".small.onnx", {"x": np.ones((2, 3), np.float32)}, against=against)
    before = peak()
    found = debug.compare(path, {"x": np.ones((2, 1024, 1024), np.float32)}, against=against)
    print(peak() - before, found.agrees, len(found.rows))
"""


def test_memory_stays_below_twice_the_weights(tmp_path: Path) -> None:
    """200 MiB of weights, 400 MiB of intermediate values on each side: run in a child, whose peak is measured."""
    need("onnxruntime")
    count = 50
    nodes = [helper.make_node("Add", [f"v{i}" if i else "x", f"w{i}"], [f"v{i + 1}"]) for i in range(count)]
    weight = np.ones((1024, 1024), np.float32)
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", f"v{count}"))
    weights = [numpy_helper.from_array(weight, f"w{i}") for i in range(count)]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)]), path)
    onnx.save(build(PLAIN), f"{path}.small.onnx")
    script = tmp_path / "measure.py"
    script.write_text(MEMORY)
    done = subprocess.run([sys.executable, script, path, "onnxruntime"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    grown, agrees, rows = done.stdout.split()
    assert (agrees, int(rows)) == ("True", count)
    assert int(grown) <= 2 * count * weight.nbytes, f"grew by {int(grown) / 2**20:.0f} MiB"


# --- reduce -----------------------------------------------------------------------------------------------------------


def chain(count: int) -> ModelProto:
    """Relu, Abs, Neg in turn, a Concat of two ends, two outputs, one Softmax in the middle."""
    operators = ["Relu", "Abs", "Neg"]
    half = count // 2
    nodes = [helper.make_node("Softmax" if i == half else operators[i % 3], [f"v{i}"], [f"v{i + 1}"]) for i in range(count)]
    nodes.append(helper.make_node("Concat", [f"v{count}", f"v{half + 1}"], ["both"], axis=0))
    infos = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("v0", f"v{count}", "both")]
    graph = helper.make_graph(nodes, "g", infos[:1], infos[1:], [numpy_helper.from_array(np.ones(3, np.float32), "unused")])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])


def test_reduce_to_the_node_that_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch(monkeypatch, "Softmax", 13, off_by_a_bit)
    x = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    found = debug.reduce(chain(30), {"v0": x}, debug.differs("reference"), to=tmp_path)
    assert found.operators == ["Softmax"] and found.nodes == (31, 1) and found.tried < 60
    assert found.shapes == {"v15": [1, 1]}
    assert fails_alone(tmp_path)


def test_reduce_to_the_node_that_raises(tmp_path: Path) -> None:
    model = build(
        "g (float[n,4] x, int64[2] s) => (float[n,4] y, float[n,4] u)"
        " { a = Relu(x) u = Abs(a) b = Reshape(a, s) c = Neg(b) y = Exp(c) }"
    )
    inputs = {"x": np.ones((2, 4), np.float32), "s": np.array([3, 3])}
    found = debug.reduce(model, inputs, debug.raises("SX404"), to=tmp_path)
    assert found.operators == ["Reshape"]
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"))
    with pytest.raises(SonnxError, match="nothing to reduce"):
        debug.reduce(model, {**inputs, "s": np.array([2, 4])}, debug.raises("SX404"), to=tmp_path)


def test_reduce_by_a_command(tmp_path: Path) -> None:
    script = tmp_path / "has.py"
    script.write_text(
        "import sys; sys.exit(b'Softmax' in open(sys.argv[1], 'rb').read() and b'Neg' in open(sys.argv[1], 'rb').read())"
    )
    predicate = debug.command(f"{sys.executable} {script} {{model}}")
    found = debug.reduce(chain(8), {"v0": np.ones((2, 3), np.float32)}, predicate, to=tmp_path / "r")
    assert sorted(found.operators) == ["Neg", "Softmax"]
    onnx.checker.check_model(onnx.load(tmp_path / "r" / "model.onnx"))


def test_a_candidate_stays_valid_whatever_the_command_says(tmp_path: Path) -> None:
    found = debug.reduce(complete(attention), feeds(attention()), debug.command("exit 1"), to=tmp_path)
    assert found.operators == ["MatMul"] and found.shapes == {"x": [1, 1, 8]}  # the 8 is the weight's


# --- the command line -------------------------------------------------------------------------------------------------


def sonnx(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    right = complete(mlp)
    paths = tmp_path / "right.onnx", tmp_path / "wrong.onnx"
    onnx.save(right, paths[0])
    onnx.save(with_weight(right, "b2"), paths[1])
    return paths


def test_compare_command(files: tuple[Path, Path]) -> None:
    right, wrong = files
    found = sonnx("compare", right, "--against", right)
    assert found.exit_code == 0 and "agree" in found.output and "5 values compared, 0 differ" in found.output
    found = sonnx("compare", wrong, "--against", right, "--size", "n=3", "--all")
    assert (
        found.exit_code == 1 and "first diverging node: Gemm 'Gemm_2'" in found.output and "weight 'b2' differs" in found.output
    )
    data = json.loads(sonnx("compare", wrong, "--against", right, "--json").stdout)
    assert data["first"]["node"] == "Gemm_2" and not data["agrees"] and len(data["rows"]) == 5
    found = sonnx("compare", right, "--device", "STRICT")
    assert found.exit_code == 0 and "sonnx on STRICT" in found.output
    assert sonnx("compare", right, "--against", "nothing").exit_code == 2
    found = sonnx("compare", right, "--against", __file__)
    assert found.exit_code == 2 and "test_debug:CLASS" in "".join(found.output.split())
    (right.parent / "damaged.onnx").write_bytes(b"\xff\xff")
    found = sonnx("compare", right, "--against", right.parent / "damaged.onnx")
    assert found.exit_code == 3 and "damaged.onnx: not an ONNX file" in " ".join(found.output.split())
    assert sonnx("compare", right, "--against", right, "--map", "a=none").exit_code == 3


def test_a_value_behind_a_difference_is_no_origin(tmp_path: Path) -> None:
    model = build("g (float[n,4] x) => (float[n,4] y) { a = Relu(x) b = Neg(a) c = Abs(b) d = Exp(c) y = Tanh(d) }")
    x = np.linspace(1, 2, 8, dtype=np.float32).reshape(2, 4)
    np.savez(tmp_path / "kept.npz", a=x + 1, d=np.exp(x + 1), y=np.tanh(np.exp(x)) + 1)
    found = debug.compare(model, {"x": x}, against=tmp_path / "kept.npz")
    assert [r.value for r in found.rows if not r.agrees] == ["a", "d", "y"]
    assert [d.operator for d in found.origins] == ["Relu"]  # the values between are not saved, but computed from a difference
    np.savez(tmp_path / "kept.npz", a=x, d=np.exp(x + 1))
    assert [(d.operator, d.inputs_agreed) for d in debug.compare(model, {"x": x}, against=tmp_path / "kept.npz").origins] == [
        ("Exp", None)
    ]


def test_bisect_command(files: tuple[Path, Path], tmp_path: Path) -> None:
    right, wrong = files
    found = sonnx("bisect", wrong, "--against", right, "--to", tmp_path / "r")
    assert found.exit_code == 1 and "reproduces alone: yes" in found.output and fails_alone(tmp_path / "r")
    assert sonnx("run", tmp_path / "r" / "model.onnx", "--data", tmp_path / "r" / "test_data_set_0").exit_code == 1
    assert sonnx("bisect", right, "--against", right).exit_code == 0
    data = json.loads(sonnx("bisect", wrong, "--against", right, "--to", tmp_path / "r", "--json").stdout)
    assert data["alone"] and data["node"]["operator"] == "Gemm"


def test_reduce_command(files: tuple[Path, Path], tmp_path: Path) -> None:
    right, _ = files
    assert sonnx("reduce", right, "--raises", "SX404", "--against", "reference").exit_code == 2
    assert sonnx("reduce", right, "--raises", "SX404").exit_code == 3
    found = sonnx("reduce", right, "--against", tmp_path / "other.onnx")
    assert found.exit_code == 2 and "`sonnx bisect` models" in found.output
    found = sonnx("reduce", right, "--command", "echo Traceback; echo 'No [m]'; exit 1", "--to", tmp_path / "r")
    assert found.exit_code == 0 and "the last failure printed: No [m]\n" in found.output
    found = sonnx("reduce", right, "--command", "exit 1", "--to", tmp_path / "r", "--json")
    assert found.exit_code == 0 and json.loads(found.stdout)["nodes"] == [5, 1]


def test_empty_values_are_not_compared(tmp_path: Path) -> None:
    """A wrong model agrees with any other on no rows: the verdict is that nothing was compared."""
    text = "g (float[N,3] x) => (float[N,3] y) { h = NAME(x) y = Relu(h) }"
    models = [build(text.replace("NAME", name)) for name in ("Neg", "Abs")]
    for i, model in enumerate(models):
        onnx.save(model, tmp_path / f"{i}.onnx")
    np.savez(tmp_path / "none.npz", x=np.zeros((0, 3), np.float32))
    found = debug.compare(models[0], {"x": np.zeros((0, 3), np.float32)}, against=models[1])
    assert found.rows and found.is_empty and not found.agrees
    with pytest.raises(InvalidInput, match=r"nothing could be compared: all \d values are empty") as caught:
        debug.bisect(models[0], {"x": np.zeros((0, 3), np.float32)}, against=models[1])
    assert caught.value.code == "SX320"
    line = [str(tmp_path / "0.onnx"), "--against", str(tmp_path / "1.onnx"), "--inputs", str(tmp_path / "none.npz")]
    told = CliRunner().invoke(main, ["compare", *line])
    assert told.exit_code == 1 and "nothing could be compared: all values are empty" in told.output
    assert CliRunner().invoke(main, ["bisect", *line]).exit_code == 3
