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
    for name, what in (("gemm", ""), ("as SqueezeNet", "Softmax"), ("a segmentation", "Sigmoid")):
        model = net(*NETS[name][:2])
        assert last_activation(model) == what and sonnx.replace_head(model, 4).activation == what
    logarithms = net(
        "(float[n, 6] x) => (float[n, 10] y) { p = MatMul(x, fc) \n s = Softmax<axis = -1>(p) \n y = Log(s) }", {"fc": (6, 10)}
    )
    assert last_activation(logarithms) == ""  # what a loss that applies a softmax takes


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
    with pytest.raises(UnsupportedModel, match=r"(?s)LinearClassifier.*ai\.onnx\.ml.*SONNXModel"):
        sonnx.replace_head(model, 3)


@pytest.mark.parametrize(("outputs", "seed"), [(0, 0), (True, 0), (2.5, 0), (3, -1)])
def test_numbers_out_of_range_are_refused(outputs: int, seed: int) -> None:
    with pytest.raises(InvalidInput, match="SX369"):
        sonnx.replace_head(net(*NETS["gemm"][:2]), outputs, seed=seed)
