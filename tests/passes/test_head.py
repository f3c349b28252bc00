"""`sonnx.replace_head`: the last layer of a model gets another number of outputs; all else stays."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from singa import sonnx
from singa_backend import InvalidInput, UnsupportedModel
from singa_backend.passes.head import last_activation

F = np.float32
NETS = {
    "gemm": (
        "(float[n, 6] x) => (float[n, 10] y) { h = MatMul(x, w0) \n r = Relu(h) \n y = Gemm<transB = 1>(r, fc, b) }",
        {"w0": (6, 8), "fc": (10, 8), "b": (10,)}, ("fc", "b"),
    ),
    "gemm with factors, transposed": (
        "(float[n, 6] x) => (float[n, 10] y) { y = Gemm<alpha = 0.5, beta = 2.0>(x, fc, b) }",
        {"fc": (6, 10), "b": (1, 10)}, ("fc", "b"),
    ),
    "matmul and add": (
        "(float[n, 5, 6] x) => (float[n, 5, 10] y) { p = MatMul(x, fc) \n y = Add(b, p) }",
        {"fc": (6, 10), "b": (10,)}, ("fc", "b"),
    ),
    "matmul without bias, softmax": (
        "(float[n, 6] x) => (float[n, 10] y) { p = MatMul(x, fc) \n y = Softmax<axis = -1>(p) }", {"fc": (6, 10)}, ("fc",),
    ),
    "as SqueezeNet": (
        "(float[n, 3, 4, 4] x) => (float[n, 10] y) { c = Conv(x, fc, b) \n r = Relu(c) \n g = GlobalAveragePool(r) "
        "\n f = Flatten(g) \n y = Softmax(f) }",
        {"fc": (10, 3, 1, 1), "b": (10,)}, ("fc", "b"),
    ),
    "a segmentation": (
        "(float[n, 3, 4, 4] x) => (float[n, 10, 4, 4] y) { c = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(x, fc)"
        " \n a = Add(c, b) \n y = Sigmoid(a) }",
        {"fc": (10, 3, 3, 3), "b": (10, 1, 1)}, ("fc", "b"),
    ),
    "sizes of a Reshape": (
        "(float[n, 5, 6] x) => (float[n, 5, 10] y) { f = Reshape(x, s0) \n p = Gemm(f, fc, b) \n y = Reshape(p, s1) }",
        {"fc": (6, 10), "b": (10,), "s0": np.array([-1, 6]), "s1": np.array([-1, 5, 10])}, ("fc", "b"),
    ),
    "a softmax in parts": (
        "(float[n, 6] x) => (float[n, 10] y) { p = Gemm(x, fc, b) \n m = ReduceMax<axes = [1]>(p) \n z = Sub(p, m) "
        "\n e = Exp(z) \n s = ReduceSum(e, one) \n y = Div(e, s) }",
        {"fc": (6, 10), "b": (10,), "one": np.array([1])}, ("fc", "b"),
    ),
    "a softmax in parts, without its largest value": (
        "(float[n, 6] x) => (float[n, 10] y) { p = MatMul(x, fc) \n e = Exp(p) \n s = ReduceSum(e, one) \n d = Div(e, s) "
        "\n y = Identity(d) }",
        {"fc": (6, 10), "one": np.array([1])}, ("fc",),
    ),
}  # fmt: skip


def net(text: str, shapes: dict[str, object], ir: int = 10) -> ModelProto:
    made = parser.parse_model(f'<ir_version: {ir}, opset_import: ["": 17]> g {text}')
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        array = shape if isinstance(shape, np.ndarray) else rng.normal(size=shape).astype(F)  # type: ignore[call-overload]
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def values(model: ModelProto) -> dict[str, np.ndarray]:
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def sizes(value: onnx.ValueInfoProto) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("outputs", [1, 3, 10, 17])
def test_only_the_head_changes(name: str, outputs: int) -> None:
    text, shapes, parameters = NETS[name]
    model = net(text, shapes)
    before, old, wanted = values(model), sizes(model.graph.output[0]), copy.deepcopy(model)
    found = sonnx.replace_head(model, outputs, seed=3)
    onnx.checker.check_model(model, full_check=True)
    after = values(model)
    assert found.parameters == parameters and (found.before, found.outputs) == (10, outputs)
    for n, a in before.items():
        if n in parameters:
            assert after[n].shape == tuple(outputs if s == 10 else s for s in a.shape) and after[n].dtype == a.dtype
            bound = 1 / np.sqrt(found.features)
            assert np.abs(after[n]).max() <= bound and (after[n].size < 20 or np.abs(after[n]).max() > 0.8 * bound)
        elif n in after:
            assert np.array_equal(after[n], a) or n == "s1"
    assert sizes(model.graph.output[0]) == [outputs if s == 10 else s for s in old]
    assert [n.op_type for n in model.graph.node] == [n.op_type for n in wanted.graph.node]
    assert model.graph.input == wanted.graph.input
    x = np.random.default_rng(1).normal(size=[2 if s == "n" else s for s in sizes(model.graph.input[0])]).astype(F)
    assert list(sonnx.prepare(model).run([x])[0].shape) == [2 if s == "n" else s for s in sizes(model.graph.output[0])]
    again = copy.deepcopy(wanted)
    assert sonnx.replace_head(again, outputs, seed=3) == found and again == model
    other = copy.deepcopy(wanted)
    sonnx.replace_head(other, outputs, seed=4)
    assert not np.array_equal(values(other)[parameters[0]], after[parameters[0]])


def test_what_makes_probabilities_is_told() -> None:
    parts = [(n, "Softmax") for n in NETS if n.startswith("a softmax in parts")]
    for name, what in (("gemm", ""), ("as SqueezeNet", "Softmax"), ("a segmentation", "Sigmoid"), *parts):
        model = net(*NETS[name][:2])
        assert last_activation(model) == what and sonnx.replace_head(model, 4).activation == what
    logarithms = net(
        "(float[n, 6] x) => (float[n, 10] y) { p = MatMul(x, fc) \n s = Softmax<axis = -1>(p) \n y = Log(s) }", {"fc": (6, 10)}
    )
    assert last_activation(logarithms) == ""  # what a loss that applies a softmax takes


@pytest.mark.parametrize(("parts", "what"), [
    ("s = Sigmoid(p) \n q = Sub(one, s) \n y = Concat<axis = 1>(q, s)", "Softmax"),
    ("s = Sigmoid(p) \n q = Sub(one, s) \n y = Concat<axis = 1>(s, q)", "Softmax"),
    ("s = Sigmoid(p) \n q = Sigmoid(x) \n y = Concat<axis = 1>(s, q)", "Sigmoid"),
    ("s = Softmax(p) \n q = Softmax(x) \n y = Concat<axis = 1>(s, q)", ""),  # their sum is 2
    ("s = Sigmoid(p) \n y = Concat<axis = 1>(s, p)", ""),
])  # fmt: skip
def test_probabilities_that_a_concat_joins(parts: str, what: str) -> None:
    """Their number does not follow from a weight: the model is cut instead."""
    model = net(f"(float[n, 6] x) => (float[n, k] y) {{ p = MatMul(x, w) \n {parts} }}", {"w": (6, 1), "one": np.ones(1, F)})
    assert last_activation(model) == what
    with pytest.raises(UnsupportedModel, match=r"(?s)SX369.*Concat of 'y' is at the end.*--at VALUE"):
        sonnx.replace_head(model, 3)
    assert sonnx.replace_head(model, 3, at="p").at == "p" and [n.op_type for n in model.graph.node] == ["MatMul", "Gemm"]


CUTS = {
    "rows": ("h", "float[n, 6] x", "h = MatMul(x, w0)", {"w0": (6, 8)}, 8, lambda h: h),
    "tokens": ("h", "float[n, t, 6] x", "h = MatMul(x, w0)", {"w0": (6, 8)}, 8, lambda h: h),
    "images": ("h", "float[n, 3, 5, 5] x", "h = Conv(x, w0)", {"w0": (8, 3, 2, 2)}, 8, lambda h: h.mean((2, 3))),
    "signals": ("h", "float[n, 3, t] x", "h = Conv(x, w0)", {"w0": (8, 3, 2)}, 8, lambda h: h.mean(2)),
    "volumes": ("h", "float[n, 3, 5, 5, 5] x", "h = Conv(x, w0)", {"w0": (8, 3, 2, 2, 2)}, 8, lambda h: h.mean((2, 3, 4))),
}  # fmt: skip


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("opset", [7, 13, 21])
@pytest.mark.parametrize("constants", [False, True])
def test_a_cut_model_ends_in_a_new_layer(name: str, opset: int, constants: bool) -> None:
    """Nodes, outputs, inputs and weights that only the old outputs needed are gone."""
    at, x, node, shapes, features, pool = CUTS[name]
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": {opset}]> g ({x}, float[6] extra) => (float[k] y, float[l] z) '
        f"{{ {node} \n t = Tanh(h) \n y = Concat<axis = 0>(t, t) \n z = Mul(extra, old) }}"
    )
    rng = np.random.default_rng(0)
    for key, shape in (*shapes.items(), ("old", (6,))):
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(F), key))
    whole = copy.deepcopy(model)
    whole.graph.output.append(onnx.helper.make_tensor_value_info("h", 1, None))
    if constants:
        for t in reversed(model.graph.initializer):
            model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [t.name], value=t))
        del model.graph.initializer[:]
    made = sonnx.replace_head(model, 3, at=at, seed=5)
    onnx.checker.check_model(model, full_check=True)
    assert (made.features, made.before, made.outputs, made.activation, made.at) == (features, 0, 3, "", "h")
    assert [v.name for v in model.graph.input] == ["x"] and [v.name for v in model.graph.output] == ["scores"]
    assert not {"Tanh", "Concat", "Mul"} & {n.op_type for n in model.graph.node}
    feed = rng.normal(size=[{"n": 2, "t": 4}.get(str(s), s) for s in sizes(model.graph.input[0])]).astype(F)
    trained = {n: p for n, p in sonnx.SONNXModel(model).get_params().items() if p.requires_grad}
    assert set(trained) == {*shapes, *made.parameters}
    h = pool(sonnx.prepare(whole).run([feed, np.zeros(6, F)])[2].astype(np.float64))
    w, b = (np.asarray(trained[n].data, np.float64) for n in made.parameters)
    assert np.abs(w).max() <= 1 / np.sqrt(features) < 1.25 * np.abs(w).max()
    y = sonnx.prepare(model).run([feed])[0]
    np.testing.assert_allclose(y, h @ (w if w.shape[0] == features else w.T) + b, rtol=1e-5, atol=1e-5)
    assert len(sizes(model.graph.output[0])) == y.ndim and sizes(model.graph.output[0])[-1] == 3


@pytest.mark.parametrize(("at", "error", "told"), [
    ("hh", InvalidInput, "at must be a value that a node of the main graph computes, got 'hh'; did you mean 'h'?"),
    ("x", InvalidInput, "got 'x'"),
    ("i", UnsupportedModel, "'i' must be float, got int64"),
    ("s", UnsupportedModel, "'s' must have two axes or more, got shape"),
    ("v", UnsupportedModel, "'v' must have two axes or more, got an unknown rank"),
    ("u", UnsupportedModel, "axis 1 of 'u', its features, must have a known size"),
])  # fmt: skip
def test_values_that_no_layer_can_follow_are_refused(at: str, error: type[Exception], told: str) -> None:
    model = net(
        "(float[n, k] x, int64[r] r) => (float[n, 6] y) { h = MatMul(x, w) \n i = ArgMax(h) "
        "\n s = ReduceSum<keepdims = 0>(h) \n u = Abs(x) \n v = Reshape(x, r)"
        "\n y = Mul(h, s) }",
        {"w": (6, 6)},
    )
    model.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in "iuv")
    before = model.SerializeToString()
    with pytest.raises(error, match="SX369") as found:
        sonnx.replace_head(model, 3, at=at)
    assert told in str(found.value) and model.SerializeToString() == before


def test_a_declared_shape_serves_where_no_other_is_known() -> None:
    model = net("(float[n, 6] x, int64[r] r) => (float[n, 8] y) { y = Reshape(x, r) }", {})
    assert sonnx.replace_head(model, 3, at="y").features == 8 and sizes(model.graph.output[0]) == ["n", 3]


def test_a_value_of_a_softmax_that_something_else_reads_is_refused() -> None:
    model = net(
        "(float[n, 6] x) => (float[n, 6] y) { p = MatMul(x, w) \n e = Exp(p) \n s = ReduceSum(e, one) "
        "\n y = Div(e, s) \n z = Abs(e) }",
        {"w": (6, 6), "one": np.array([1])},
    )
    with pytest.raises(UnsupportedModel, match=r"'e' in the softmax of .* is used twice"):
        sonnx.replace_head(model, 3)


def test_an_initializer_that_other_nodes_read_stays() -> None:
    """A tied embedding."""
    model = net(
        "(int64[n, 5] x) => (float[n, 5, 10] y) { e = Gather(emb, x) \n t = Transpose<perm = [1, 0]>(emb) \n y = MatMul(e, t) }",
        {"emb": (10, 6)},
    )
    before = values(model)["emb"]
    found = sonnx.replace_head(model, 4)
    onnx.checker.check_model(model, full_check=True)
    assert np.array_equal(values(model)["emb"], before) and values(model)[found.weight].shape == (6, 4)
    assert [n.op_type for n in model.graph.node] == ["Gather", "MatMul"]  # nothing reads the Transpose


def test_declarations_of_initializers_have_their_sizes() -> None:
    """PyTorch's newer exporter declares them as values."""
    for name in ("sizes of a Reshape", "as SqueezeNet"):
        model = net(*NETS[name][:2])
        declared = [onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)) for t in model.graph.initializer]
        model.graph.value_info.extend(declared)
        found = sonnx.replace_head(model, 3)
        onnx.checker.check_model(model, full_check=True)
        kept = {v.name for v in declared} - set(found.parameters)
        assert kept <= {v.name for v in model.graph.value_info}


def test_initializers_that_are_inputs_keep_their_declarations() -> None:
    model = net(*NETS["gemm"][:2], ir=3)
    for t in model.graph.initializer:
        model.graph.input.append(onnx.helper.make_tensor_value_info(t.name, t.data_type, list(t.dims)))
    sonnx.replace_head(model, 3)
    onnx.checker.check_model(model, full_check=True)
    assert sizes(next(v for v in model.graph.input if v.name == "fc")) == [3, 8]


def test_the_weight_of_a_file_of_constants_stays_a_constant() -> None:
    """There Constants train; with one initializer, they would not."""
    model = net("(float[n, 6] x) => (float[n, 10] y) { h = MatMul(x, w0) \n y = MatMul(h, fc) }", {"w0": (6, 8), "fc": (8, 10)})
    for t in reversed(model.graph.initializer):
        model.graph.node.insert(0, onnx.helper.make_node("Constant", [], [t.name], value=t))
    del model.graph.initializer[:]
    assert sonnx.replace_head(model, 3).weight == "fc" and not model.graph.initializer
    params = sonnx.SONNXModel(model).get_params()
    assert {n: p.shape for n, p in params.items()} == {"w0": (6, 8), "fc": (8, 3)} and all(
        p.requires_grad for p in params.values()
    )


@pytest.mark.parametrize(("text", "shapes", "told"), [
    ("(float[n, 6] x) => (float[n, 6] y) { h = MatMul(x, w) \n y = Tanh(h) \n z = Relu(h) }", {"w": (6, 6)}, "used twice"),
    ("(float[n, 6] x) => (float[n, 6] y, float[n, 6] z) { y = MatMul(x, w) \n z = Relu(y) }", {"w": (6, 6)}, "2 outputs"),
    ("(float[n, 6] x) => (float[n, 6] y) { h = MatMul(x, w) \n y = LayerNormalization(h, s) }", {"w": (6, 6), "s": (6,)},
     "LayerNormalization of 'y'"),
    ("(float[6, 6] x) => (float[6, 6] y) { y = MatMul(x, x) }", {}, "constant weight"),
    ("(float[n, 6] x) => (float[n, 6] y) { y = Relu(x) }", {}, "in front of 'x'"),
    ("(float[n, 4, 5] x) => (float[n, 4, 3] y) { y = Conv<group = 4>(x, w) }", {"w": (4, 1, 3)}, "in groups"),
])  # fmt: skip
def test_what_has_no_head_is_refused(text: str, shapes: dict[str, Sequence[int]], told: str) -> None:
    model = net(text, dict(shapes))
    before = model.SerializeToString()
    with pytest.raises(UnsupportedModel, match="SX369") as found:
        sonnx.replace_head(model, 3)
    assert told in str(found.value) and model.SerializeToString() == before


def test_a_classifier_of_ai_onnx_ml_is_refused() -> None:
    model = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 3]> g (float[n, 2] x) => (int64[n] l, float[n, 2] s) '
        "{ l, s = ai.onnx.ml.LinearClassifier<coefficients = [1.0, 0.0, 0.0, 1.0], classlabels_ints = [0, 1]>(x) }"
    )
    with pytest.raises(UnsupportedModel, match="2 outputs"):
        sonnx.replace_head(model, 3)
    del model.graph.output[0]
    with pytest.raises(UnsupportedModel, match=r"(?s)LinearClassifier.*ai\.onnx\.ml.*--at VALUE"):
        sonnx.replace_head(model, 3)


@pytest.mark.parametrize(("outputs", "seed"), [(0, 0), (True, 0), (2.5, 0), (3, -1)])
def test_numbers_out_of_range_are_refused(outputs: int, seed: int) -> None:
    with pytest.raises(InvalidInput, match="SX369"):
        sonnx.replace_head(net(*NETS["gemm"][:2]), outputs, seed=seed)
