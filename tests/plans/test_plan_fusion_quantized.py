"""Passes on QDQ graphs: before equals after, exactly or within one step, and plans equal the result bit for bit."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper
from tests.helpers.plan_checks import kernels_used, model_of
from tests.plans.test_plan_fusion import counted, declared, evaluate, fused, model

from singa_backend.backend import SingaBackend, SingaRep
from singa_backend.elementwise.compile import available
from singa_backend.ir.reader import read
from singa_backend.kernels import onednn
from singa_backend.kernels.quantized import exact_int8
from singa_backend.kernels.table import Options
from singa_backend.plans.flat import flat
from singa_backend.plans.fusion import fuse

F, U8, S8 = np.float32, np.uint8, np.int8
node = helper.make_node
exact = pytest.mark.skipif(not exact_int8(), reason="oneDNN is not installed, or this processor has no exact products of int8")
convolved = pytest.mark.skipif(not exact_int8() and bool(available()), reason="neither oneDNN nor machine code is exact here")


class Graph:
    """Builds a QDQ graph: every value is quantized, as onnxruntime's quantizer does."""

    def __init__(self, dtype: Any = U8) -> None:
        self.dtype, self.nodes, self.constants, self.count = dtype, [], {}, 0

    def name(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def constant(self, value: Any) -> str:
        self.constants[name := self.name()] = np.asarray(value)
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        self.nodes.append(node(kind, list(inputs), [made := self.name()], **attributes))
        return made

    def qdq(self, x: str, scale: float, zero: int, quantized: str | None = None) -> str:
        """A value that is quantized and dequantized."""
        s, z = self.constant(F(scale)), self.constant(np.array(zero, self.dtype))
        q = self.op("QuantizeLinear", x, s, z)
        if quantized is not None:
            self.nodes[-1].output[0] = q = quantized
        return self.op("DequantizeLinear", q, s, z)

    def weights(self, values: np.ndarray, scale: Any, axis: int = 0) -> str:
        """Dequantized weights."""
        zero = self.constant(np.zeros(np.shape(scale), values.dtype))
        return self.op("DequantizeLinear", self.constant(values), self.constant(np.asarray(scale, F)), zero, axis=axis)

    def model(self, feeds: dict[str, np.ndarray], *outputs: str) -> ModelProto:
        return model_of(self.nodes, feeds, outputs, self.constants, 21)


def runs(
    source: ModelProto, feeds: dict[str, np.ndarray], steps: dict[int, float] | None = None
) -> tuple[dict[str, int], list[str]]:
    """Check a model: the rewritten graph against the graph, and the plan against the definitions of the rewritten graph.

    Args:
        source: the model.
        feeds: the inputs.
        steps: for each output, the size of one step of quantization, by which results may differ near ties; {} for equal results.

    Returns:
        The operators of the rewritten graph, and the kernels of the plan.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = read(source)
        before, after = flat(graph), flat(graph)
        fuse(after, 2, declared(after))
        values = list(feeds.values())
        wanted, made = evaluate(before, values), evaluate(after, values)
        rep = SingaBackend.prepare(source)
        planned = SingaRep(rep.graph, rep.device, options=Options(threads=1))
        got = [planned.run(values) for _ in range(2)]
    for i, (w, m) in enumerate(zip(wanted, made, strict=True)):
        np.testing.assert_allclose(m.astype(F), w.astype(F), rtol=1e-6, atol=1.001 * (steps or {}).get(i, 0))
        assert np.mean(m != w) < 0.02
        for g in got:
            np.testing.assert_array_equal(g[i], m)
    return counted(after), kernels_used(planned)


def drawn(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def integers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, size=shape).astype(S8)


def test_moves_keep_the_quantized_value() -> None:
    g = Graph()
    x = g.qdq("x", 0.1, 7)
    for kind, attributes in (
        ("MaxPool", {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ("Transpose", {"perm": [0, 2, 3, 1]}),
    ):
        x = g.qdq(g.op(kind, x, **attributes), 0.1, 7)
    x = g.qdq(g.op("Reshape", x, g.constant(np.array([2, -1]))), 0.1, 7, quantized="q")
    feeds = {"x": drawn(0, 2, 5, 9, 9) * 9}
    found, _ = runs(g.model(feeds, x, "q"), feeds)
    assert found == {"QuantizeLinear": 1, "MaxPool": 1, "Transpose": 1, "Reshape": 1, "DequantizeLinear": 1}


def test_moves_keep_the_axis_of_the_scales() -> None:
    g = Graph()
    w = g.op("Transpose", g.weights(integers(0, 6, 9), np.linspace(0.1, 0.2, 6)), perm=[1, 0])
    y = g.op("MatMul", "x", w)
    feeds = {"x": drawn(1, 4, 9)}
    found = fused(g.model(feeds, y), feeds["x"])
    assert "Transpose" not in found and found["DequantizeLinear"] == 1


@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("scales", [(0.1, 0.1, 0.1), (0.1, 0.2, 0.3)])
def test_concat_and_split(dtype: Any, scales: Any) -> None:
    g = Graph(dtype)
    low = np.iinfo(dtype).min
    both = [g.qdq(x, s, low + 90 + i * (scales[0] != s)) for i, (x, s) in enumerate(zip("xz", scales, strict=False))]
    y = g.qdq(g.op("Concat", *both, axis=1), scales[2], low + 90)
    g.nodes.append(node("Split", [y, g.constant(np.array([3, 7]))], ["a", "b"], axis=1))
    outputs = [g.qdq(o, scales[2], low + 90, quantized=f"q{o}") for o in "ab"]
    feeds = {"x": drawn(0, 2, 4, 9) * 9, "z": drawn(1, 2, 6, 9) * 9}
    found, _ = runs(g.model(feeds, *outputs, "qa", "qb"), feeds)
    same = scales[0] == scales[2]
    assert (
        found["QuantizeLinear"] == 2
        and found["DequantizeLinear"] == 2
        and found.get("Gather", 0)
        == (0 if same else 2)
        + (
            2 if dtype is S8 else 0  # the outputs of the graph remain int8
        )
    )


def test_signed_values_become_unsigned() -> None:
    g = Graph(S8)
    y = g.op("Add", g.qdq("x", 0.1, -5), g.qdq("z", 0.3, -128, quantized="q"))
    feeds = {"x": drawn(0, 3, 40) * 9, "z": drawn(1, 3, 40) * 9}
    source = g.model(feeds, y, "q")
    graph = read(source)
    plan = flat(graph)
    fuse(plan, 2, declared(plan))
    zeros = [c.reads[2].constant for c in plan.nodes if c.op_type == "QuantizeLinear"]
    assert {(z.dtype.name, int(z)) for z in zeros} == {("uint8", 123), ("int8", -128)}
    runs(source, feeds)


def test_other_scales_remain() -> None:
    for scale, zero in ((0.11, 7), (0.1, 8)):
        g = Graph()
        y = g.qdq(g.op("Reshape", g.qdq("x", 0.1, 7), g.constant(np.array([-1]))), scale, zero)
        feeds = {"x": drawn(0, 6, 50) * 20}
        found, kernels = runs(g.model(feeds, y), feeds)
        assert found == {"QuantizeLinear": 1, "Cast": 1, "Gather": 1, "Reshape": 1, "DequantizeLinear": 1}
        assert "bytes.translate" in kernels or onednn.library() is None


@pytest.mark.parametrize("dtype", [U8, S8])
def test_a_function_of_one_value_becomes_a_table(dtype: Any) -> None:
    """A quantized GELU, as onnxruntime's quantizer writes it."""
    g = Graph(dtype)
    low = np.iinfo(dtype).min
    x = g.qdq("x", 0.03, low + 128)
    e = g.qdq(g.op("Erf", g.op("Div", x, g.constant(F(np.sqrt(2))))), 2 / 255, low + 127)
    one, half = (g.op("DequantizeLinear", g.constant(U8(255)), g.constant(F(v / 255)), g.constant(U8(0))) for v in (1, 0.5))
    s = g.qdq(g.op("Add", e, one), 2 / 255, low)
    m = g.qdq(g.op("Mul", half, s), 1 / 255, low)
    y = g.qdq(g.op("Mul", x, m), 0.02, low + 10)
    feeds = {"x": drawn(0, 40, 30) * 2}
    found, _ = runs(g.model(feeds, y), feeds)
    assert found == {"QuantizeLinear": 1, "Cast": 1, "Gather": 1, "DequantizeLinear": 1}


def test_every_elementwise_operator_may_be_in_a_table() -> None:
    """By the traits `unary` and `broadcasting`: no list names Sin, Mod, Greater and Where."""
    g = Graph()
    x = g.qdq("x", 0.05, 120)
    wave, rest = g.op("Sin", x), g.op("Mod", x, g.constant(F(1.5)), fmod=1)
    y = g.qdq(g.op("Where", g.op("Greater", x, g.constant(F(0.25))), wave, rest), 0.01, 90)
    feeds = {"x": drawn(0, 40, 30) * 2}
    found, _ = runs(g.model(feeds, y), feeds)
    assert found == {"QuantizeLinear": 1, "Cast": 1, "Gather": 1, "DequantizeLinear": 1}


def test_a_table_that_changes_nothing_is_removed() -> None:
    g = Graph()
    y = g.qdq(g.op("Mul", g.qdq("x", 0.1, 9), g.constant(F(0.5))), 0.05, 9)
    feeds = {"x": drawn(0, 40)}
    assert runs(g.model(feeds, y), feeds)[0] == {"QuantizeLinear": 1, "DequantizeLinear": 1}


def test_a_function_of_two_values_is_not_a_table() -> None:
    g = Graph()
    y = g.qdq(g.op("Mul", g.qdq("x", 0.1, 9), g.qdq("z", 0.2, 3)), 0.05, 9)
    feeds = {"x": drawn(0, 40), "z": drawn(1, 40)}
    assert runs(g.model(feeds, y), feeds)[0]["Mul"] == 1


def convolution(g: Graph, x: str, seed: int, o: int, c: int, k: int, sx: float, bias: str, axis: bool = True) -> str:
    scale = np.random.default_rng(seed).uniform(0.5e-3, 2e-3, o).astype(F) if axis else F(1e-3)
    inputs = [x, g.weights(integers(seed, o, c, k, k), scale)]
    if bias == "int32":
        b = np.random.default_rng(seed).integers(-3000, 3000, o).astype(np.int32)
        s = np.broadcast_to(F(sx) * scale, (o,)).astype(F)
        inputs.append(g.op("DequantizeLinear", g.constant(b), g.constant(s), g.constant(np.zeros(o, np.int32)), axis=0))
    elif bias == "float":
        inputs.append(g.constant(drawn(seed, o)))
    return g.op("Conv", *inputs, pads=[k // 2] * 4)


@convolved
@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("bias", ["", "int32", "float"])
@pytest.mark.parametrize("after", ["", "Relu", "relu6", "Relu with zero point"])
def test_conv(dtype: Any, bias: str, after: str) -> None:
    g = Graph(dtype)
    low = np.iinfo(dtype).min
    y = convolution(g, g.qdq("x", 0.03, low + 100), 1, 8, 6, 3, 0.03, bias, axis=bool(bias))
    if after == "relu6":
        y = g.op("Clip", y, g.constant(F(0)), g.constant(F(6)))
    elif after:
        y = g.op("Relu", y)
    y = g.qdq(y, 0.04, low + (0 if after == "Relu" else 120))
    feeds = {"x": drawn(0, 2, 6, 11, 7)}
    found, kernels = runs(g.model(feeds, y), feeds, {0: 0.04})
    assert found.get("QLinearConv") == 1 and "Conv" not in found
    assert ("Clip" in found) == (after in ("relu6", "Relu with zero point"))
    assert [k for k in kernels if k.startswith(("conv", "machine.conv"))]
    assert not exact_int8() or {"definition", "numpy.clip"}.isdisjoint(kernels)  # only oneDNN computes what follows too


@convolved
@pytest.mark.parametrize("form", ["matmul", "add", "add float", "gemm", "gemm transposed", "two values"])
@pytest.mark.parametrize("axis", [False, True])
def test_products(form: str, axis: bool) -> None:
    g = Graph()
    scale = np.random.default_rng(0).uniform(1e-3, 2e-3, 24).astype(F) if axis else F(1e-3)
    rank = (5, 16) if "gemm" in form else (2, 5, 16)
    x = g.qdq("x", 0.03, 100)
    feeds = {"x": drawn(0, *rank)}
    step = F(0.03) * np.broadcast_to(scale, (24,))
    bias = np.random.default_rng(3).integers(-3000, 3000, 24).astype(np.int32)
    b = g.op("DequantizeLinear", g.constant(bias), g.constant(step), g.constant(np.zeros(24, np.int32)), axis=0)
    if form == "two values":
        feeds["z"] = drawn(5, 2, 16, 24)
        y = g.op("MatMul", x, g.qdq("z", 0.05, 131))
    elif form == "gemm":
        y = g.op("Gemm", x, g.weights(integers(1, 16, 24), scale, 1), b)
    elif form == "gemm transposed":
        y = g.op("Gemm", x, g.weights(integers(1, 24, 16), scale, 0), b, transB=1)
    else:
        y = g.op("MatMul", x, g.weights(integers(1, 16, 24), scale, 1))
    if form.startswith("add"):
        y = g.op("Add", y, b if form == "add" else g.constant(drawn(7, 24) / 9))
    y = g.qdq(y, 0.04 if form == "two values" else 0.02, 120)
    found, kernels = runs(g.model(feeds, y), feeds, {0: 0.04})
    if form == "two values" and not exact_int8():  # machine code multiplies constant weights
        assert found.keys() & {"MatMul"}
        return
    assert found.keys() & {"QLinearMatMul", "MatMulInteger"} and not found.keys() & {"MatMul", "Gemm"}
    assert [k for k in kernels if k.startswith(("matmul", "machine.product of 8-bit integers"))]
    assert not [k for k in kernels if "definition" in k]


def test_weights_that_exceed_int8_after_their_zero_points_stay_floats_without_exact_code() -> None:
    g = Graph()
    x = g.qdq("x", 0.03, 100)
    w = g.op("DequantizeLinear", g.constant(np.array([[0, 255], [200, 3]], U8)), g.constant(F(0.01)), g.constant(U8(0)))
    y = g.qdq(g.op("MatMul", x, w), 0.02, 120)
    feeds = {"x": drawn(0, 3, 2)}
    found, _ = runs(g.model(feeds, y), feeds, {0: 0.04})
    assert bool(found.keys() & {"MatMul"}) != exact_int8()


@convolved
def test_a_bias_in_other_steps_is_rounded_to_those_of_the_product() -> None:
    g = Graph()
    x = g.qdq("x", 0.03, 100)
    b = g.op("DequantizeLinear", g.constant(integers(2, 8)), g.constant(F(0.01)), g.constant(S8(3)))
    y = g.qdq(g.op("Conv", x, g.weights(integers(1, 8, 6, 1, 1), F(1e-3)), b), 0.04, 120)
    feeds = {"x": drawn(0, 1, 6, 11, 7)}
    assert "QLinearConv" in runs(g.model(feeds, y), feeds, {0: 0.04})[0]


@exact
@pytest.mark.parametrize("dtype", [U8, S8])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("kind", ["block", "first block", "plain"])
def test_sums(dtype: Any, relu: bool, kind: str) -> None:
    """Residual blocks; the sum is computed by the convolution."""
    g = Graph(dtype)
    low = np.iinfo(dtype).min
    x = g.qdq("x", 0.03, low + 100)
    a = b = x
    if kind != "plain":
        a = g.qdq(convolution(g, x, 1, 6, 6, 3, 0.03, "int32"), 0.04, low + 110)
    if kind == "first block":
        b = g.qdq(convolution(g, x, 2, 6, 6, 1, 0.03, "int32"), 0.05, low + 131)
    if kind == "plain":
        b = g.qdq("z", 0.05, low + 131)
    y = g.op("Add", a, b)
    y = g.qdq(g.op("Relu", y) if relu else y, 0.05, low + (0 if relu else 120))
    feeds = {"x": drawn(0, 2, 6, 9, 9)} | ({"z": drawn(1, 2, 6, 9, 9)} if kind == "plain" else {})
    found, kernels = runs(g.model(feeds, y), feeds, {0: 0.05})
    assert found["Add"] == 1
    if kind != "plain":
        assert not [k for k in kernels if "add" in k or "binary" in k or "definition" in k], kernels


@exact
@pytest.mark.parametrize("later", [False, True])
def test_the_memory_of_a_summand_that_is_read_later_is_not_overwritten(later: bool) -> None:
    g = Graph()
    x = g.qdq("x", 0.03, 100, quantized="q")
    a = g.qdq(convolution(g, x, 1, 6, 6, 3, 0.03, ""), 0.04, 110)
    y = g.qdq(g.op("Add", a, x), 0.05, 120)
    z = g.op("Neg", x) if later else y
    feeds = {"x": drawn(0, 2, 6, 9, 9)}
    runs(g.model(feeds, y, *([z, "q"] if later else [])), feeds, {0: 0.05})


@exact
@pytest.mark.parametrize("kind", ["MatMulInteger", "ConvInteger"])
def test_dynamic_products_are_one_step(kind: str) -> None:
    """DynamicQuantizeLinear, a product of integers, Cast, Mul, Add, Relu."""
    g = Graph()
    conv = kind == "ConvInteger"
    x = drawn(0, 1, 16, 9, 9) if conv else drawn(0, 2, 9, 16)
    w = integers(1, 8, 16, 3, 3) if conv else integers(1, 16, 8)
    g.nodes.append(node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]))
    y = g.op("Cast", g.op(kind, "q", g.constant(w), "z", g.constant(S8(0))), to=1)
    y = g.op("Mul", y, g.op("Mul", "s", g.constant(F(0.01) if conv else drawn(2, 8) ** 2)))
    y = g.op("Relu", g.op("Add", y, g.constant(drawn(3, 8, 1, 1) if conv else drawn(3, 8))))
    _, kernels = runs(g.model({"x": x}, y), {"x": x})
    (one,) = [k for k in kernels if "vnni" in k or "amx" in k]
    assert kernels.index(one) == len(kernels) - 1


def test_reshapes_move_behind_products() -> None:
    body = """a = Reshape (x, s)  b = Gemm (a, w, c)  d = Gelu (b)  e = Reshape (d, t)  f = Add (e, c)  y = Reshape (f, u)"""
    text = f"g (float[2,3,4] x) => (float y) {{ {body} }}"
    known = {"s": np.array([6, 4]), "t": np.array([2, 3, 5]), "u": np.array([3, 10]), "w": drawn(1, 4, 5), "c": drawn(2, 5)}
    found = fused(model(text, 20, **known), drawn(0, 2, 3, 4), only=["reshapes", "identity"], spoil=False)
    assert found == {"MatMul": 1, "Add": 2, "Gelu": 1, "Reshape": 1}
    text = "g (float[2,3,4] x) => (float y) { a = MatMul (x, w)  b = Reshape (a, s)  y = Add (b, c) }"
    for shape, c in (([30], drawn(0, 30)), ([2, 5, 3], drawn(0, 3)), ([6, 5], drawn(0, 6, 1))):
        known = {"s": np.array(shape), "c": c, "w": drawn(1, 4, 5)}
        assert fused(model(text, 20, **known), drawn(0, 2, 3, 4), only=["reshapes"]) == {"MatMul": 1, "Reshape": 1, "Add": 1}
