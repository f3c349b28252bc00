"""Each pass of fusion: what it rewrites, with the same results, and what it must leave."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from singa_backend.plans.fusion.view import RegionView
from singa_backend.plans.region import Region, RegionCall, branch_of, region_of
from tests.helpers.growth_checks import lines
from tests.helpers.paths import TESTS

from singa_backend.conform.fuzz.graphs.generate import draw, every_node
from singa_backend.ir.graph import ABSENT, Graph
from singa_backend.ir.reader import read
from singa_backend.plans.fusion import PASSES, fuse

F = np.float32


def model(text: str, opset: int = 18, **weights: Any) -> ModelProto:
    """A model of ONNX's text; `weights` are initializers, Python floats of float32."""
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    for name, value in weights.items():
        array = np.asarray(value, F if isinstance(value, float) else None)
        made.graph.initializer.append(numpy_helper.from_array(array, name))
    return made


def evaluate(region: Region, feeds: Sequence[Any]) -> list[Any]:
    """The outputs of a region, by the definitions of its operators."""
    values = {**region.constants, **dict(zip(region.inputs, feeds, strict=True))}
    with np.errstate(all="ignore"):
        for call in region.calls:
            _run(call, values)
    return [values[o] for o in region.outputs]


def _run(call: RegionCall, values: dict[int, Any]) -> None:
    if call.is_("If"):
        attributes = call.attributes
        graph = attributes["then_branch" if bool(np.all(values[call.inputs[0]])) else "else_branch"]
        branch = Region(size=max(values) + 1000)
        outputs = branch_of(branch, graph, call.scope)
        inner = {**values, **branch.constants}
        for other in branch.calls:
            _run(other, inner)
        values.update(zip(call.outputs, (inner[o] for o in outputs), strict=True))
        return
    results = call.run([None if i == ABSENT else values[i] for i in call.inputs])
    values.update({o: r for o, r in zip(call.outputs, results, strict=False) if o != ABSENT})


def declared(region: Region, graph: Graph) -> dict[int, Any]:
    """The declared types of the inputs."""
    return {i: (v.dtype, v.shape) for i, v in zip(region.inputs, graph.inputs, strict=True) if v.kind == "tensor"}


def counted(region: Region) -> dict[str, int]:
    """The number of calls of each operator."""
    return dict(Counter(call.name for call in region.calls))


def spoiled(feeds: Sequence[Any]) -> list[Any]:
    """The inputs with NaN and infinities in some places."""
    rng, made = np.random.default_rng(7), []
    for x in feeds:
        x = np.array(x)
        if x.dtype.kind == "f" and x.size:
            for value in (np.nan, np.inf, -np.inf):
                x.reshape(-1)[rng.integers(x.size)] = value
        made.append(x)
    return made


def fused(
    source: ModelProto,
    *feeds: Any,
    only: Iterable[str] | None = None,
    types: bool = True,
    level: int = 2,
    rtol: float = 1e-5,
    spoil: bool = True,
) -> dict[str, int]:
    """Rewrite the region of a model; check that the results are the same and nothing is left to do; return its operators.

    Args:
        source: the model.
        *feeds: the inputs of the comparison, which is made a second time with NaN and infinities in them.
        only: the passes that run.
        types: whether the declared types of the inputs are known.
        level: the level of fusion.
        rtol: how far results may differ, relative to the largest of them.
        spoil: whether the second comparison is made.
    """
    graph = read(source)
    before, after = region_of(graph), region_of(graph)
    fuse(after, level, declared(after, graph) if types else None, only)
    for inputs in (feeds, spoiled(feeds)) if spoil else (feeds,):
        same(evaluate(before, inputs), evaluate(after, inputs), rtol)
    known = {v for call in after.calls for v in call.outputs} | after.constants.keys() | set(after.inputs)
    assert all(i in known for call in after.calls for i in call.reads)
    assert fuse(after, level, declared(after, graph) if types else None, only) == {}
    return counted(after)


def same(want: Sequence[Any], have: Sequence[Any], rtol: float) -> None:
    """Check that results are equal, NaN and infinities included, apart from rounding."""
    for a, b in zip(want, have, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.dtype.kind != "f" or not a.size:
            np.testing.assert_array_equal(b, a)
            continue
        finite = np.isfinite(a)
        np.testing.assert_array_equal(np.where(finite, 0, a), np.where(finite, 0, b))
        largest = float(np.abs(a[finite]).max(initial=0))
        np.testing.assert_allclose(b[finite], a[finite], rtol=0, atol=rtol * largest)


RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(F)


def unary(body: str, x: np.ndarray | None = None, opset: int = 18, shape: str = "2,5", **kwargs: Any) -> dict[str, int]:
    """The operators of a graph of one float input x and one output y."""
    known = {k: kwargs.pop(k) for k in ("only", "types", "spoil", "level") if k in kwargs}
    text = f"g (float[{shape}] x) => (float y) {{ {body} }}"
    return fused(model(text, opset, **kwargs), normal(2, 5) * 3 if x is None else x, **known)


# --- constants and identities ---


def test_calls_of_constants_are_evaluated() -> None:
    assert unary("a = Mul(w, w) b = Transpose(a) y = Add(x, b)", w=normal(5, 1)) == {"Add": 1}
    assert unary("s = Shape(w) c = ConstantOfShape(s) d = Add(c, x) y = Identity(d)", w=normal(2, 5)) == {"Add": 1}


def test_known_sizes_are_constants() -> None:
    body = "s = Shape(x) i = Gather(s, one) j = Unsqueeze(i, zero) k = Concat <axis = 0> (two, j) y = Reshape(x, k)"
    weights = {"one": np.array(1), "zero": np.array([0]), "two": np.array([-1])}
    assert unary(body, **weights, only=["sizes"]) == {"Reshape": 1}
    assert unary(body, shape="N,5", **weights, only=["sizes"]) == {"Reshape": 1}
    assert unary(body, shape="5,N", x=normal(5, 2), **weights, only=["sizes"]).keys() > {"Shape", "Concat"}
    assert unary(body, types=False, **weights, only=["sizes"]).keys() > {"Shape", "Concat"}


def test_branches_of_known_conditions_are_inlined() -> None:
    text = """g (float[2] x) => (float y) {
        a = Identity(x) z = Shape(x) s = ReduceSum(z) c = Equal(s, size)
        b = If (c) <then_branch = t () => (float p) { k = Constant <value = float {2.0}> () p = Mul(a, k) },
                    else_branch = e () => (float q) { q = Abs(a) }>
        y = Neg(b) }"""
    assert fused(model(text, size=np.array([2])), normal(2)) == {"Mul": 1, "Neg": 1}
    assert fused(model(text, size=np.array([3])), normal(2)) == {"Abs": 1, "Neg": 1}
    assert "If" in fused(model(text, size=np.array([2])), normal(2), types=False)


def test_squares_are_products() -> None:
    assert unary("y = Pow(x, k)", k=2.0) == {"Mul": 1}
    assert unary("y = Pow(x, k)", k=np.array(2)) == {"Mul": 1}
    for k in (3.0, 0.5, np.full((1, 1, 1), 2, F), normal(5)):
        assert unary("y = Pow(x, k)", k=k) == {"Pow": 1}
    assert unary("y = Pow(x, k)", k=2.0, types=False) == {"Pow": 1}


def test_large_constants_may_be_viewed() -> None:
    large = np.zeros((1 << 10, 1 << 9), F)
    graph = read(
        model("g (float[2,512] x) => (float y, float z) { t = Transpose(w) y = MatMul(x, t) z = ReduceSum(w) }", w=large)
    )
    region = region_of(graph)
    fuse(region)
    assert [c.name for c in region.calls] == ["MatMul"]
    assert np.shares_memory(region.constants[region.calls[0].inputs[1]], graph.states["w"])


def test_a_constant_output_stays_an_output() -> None:
    text = "g (float[2] x) => (float y, float z) { y = Neg(w) z = Add(x, y) }"
    assert fused(model(text, w=normal(2)), normal(2)) == {"Add": 1}


def test_random_and_failing_and_large_calls_stay() -> None:
    def calls(body: str, **weights: Any) -> dict[str, int]:
        source = read(model(f"g (float[2,5] x) => (float y) {{ {body} }}", **weights))
        region = region_of(source)
        fuse(region)
        return {c.name: 1 for c in region.calls}

    assert calls("r = RandomNormalLike(w) y = Add(x, r)", w=normal(2, 5)) == {"RandomNormalLike": 1, "Add": 1}
    assert calls("r = Reshape(w, s) y = Add(x, r)", w=normal(2, 5), s=np.array([3, 3])) == {"Reshape": 1, "Add": 1}
    assert calls("r = ConstantOfShape(s) m = ReduceSum(r) y = Add(x, m)", s=np.array([1 << 10, 1 << 10])).keys() >= {
        "ConstantOfShape"
    }
    quantized = {"q": np.ones((5, 2), np.int8), "s": 0.5, "z": np.zeros((), np.int8)}
    assert calls("w = DequantizeLinear(q, s, z) y = MatMul(x, w)", **quantized) == {"DequantizeLinear": 1, "MatMul": 1}
    assert calls("w = DequantizeLinear(q, s, z) t = Transpose(w) y = Add(x, t)", **quantized) == {"Add": 1}


IDENTITIES = [
    "a = Identity(x) b = Identity(a) y = Neg(b)", "a = Cast <to = 1> (x) y = Neg(a)", "a = Dropout(x) y = Neg(a)",
    "a = Concat <axis = 0> (x) y = Neg(a)", "a = Sum(x) y = Neg(a)", "a = Max(x) y = Neg(a)", "a = Add(x, minus) y = Neg(a)",
    "a = Sub(x, zero) y = Neg(a)", "a = Mul(x, one) y = Neg(a)", "a = Mul(ones, x) y = Neg(a)", "a = Div(x, one) y = Neg(a)",
    "a = Pow(x, one) y = Neg(a)", "a = Transpose <perm = [0, 1]> (x) y = Neg(a)", "a = Slice(x, i0, last, i0) y = Neg(a)",
    "a = Expand(x, ones_i) y = Neg(a)", "s = Shape(x) a = Reshape(x, s) y = Neg(a)", "a = Reshape(x, copy) y = Neg(a)",
    "a = Unsqueeze(x, i0) b = Squeeze(a, i0) y = Neg(b)", "a = Flatten(x) y = Neg(a)",
]  # fmt: skip
NEUTRAL = {
    "minus": np.array(-0.0, F), "zero": np.array(0.0, F), "one": np.array([1], F), "ones": np.ones((2, 5), F),
    "i0": np.array([0]), "last": np.array([2**31 - 1]), "ones_i": np.array([1, 5]), "copy": np.array([0, -1]),
}  # fmt: skip


@pytest.mark.parametrize("body", IDENTITIES)
def test_calls_that_return_their_input_are_removed(body: str) -> None:
    assert unary(body, only=["identity", "constants"], **NEUTRAL) == {"Neg": 1}


@pytest.mark.parametrize(
    "body",
    [
        "a = Add(x, zero) y = Neg(a)",  # -0 + 0 is 0
        "a = Mul(x, wide) y = Neg(a)", "a = Mul(x, more) y = Neg(a)", "a = Expand(x, larger) y = Neg(a)",
        "a = Cast <to = 10> (x) y = Neg(a)",
        "a = Slice(x, i0, one_i, i0) y = Neg(a)", "a = Transpose(x) y = Neg(a)", "a = Sub(zero, x) y = Neg(a)",
        "a = Div(one, x) y = Neg(a)",
        "a, m = Dropout(x) b = Cast <to = 1> (m) y = Add(a, b)", "a = Reshape(x, turned) y = Neg(a)",
    ],
)  # fmt: skip
def test_calls_that_change_something_stay(body: str) -> None:
    weights = {**NEUTRAL, "wide": np.ones((3, 1, 1), F), "more": np.ones((1, 2, 5), F), "larger": np.array([3, 2, 5]),
               "one_i": np.array([1]), "turned": np.array([5, 2])}  # fmt: skip
    used = {n: w for n, w in weights.items() if n in body}
    assert len(unary(body, x=normal(2, 5), spoil=False, **used)) > ("Neg" in body)


def test_without_known_shapes_only_safe_identities_are_removed() -> None:
    known = {"only": ["identity"], "types": False}
    assert unary("a = Mul(x, ones) y = Neg(a)", ones=np.ones((2, 5), F), **known) == {"Mul": 1, "Neg": 1}
    assert unary("a = Mul(x, one) y = Neg(a)", one=np.array(1, F), **known) == {"Neg": 1}
    assert unary("a = Cast <to = 1> (x) y = Neg(a)", **known) == {"Cast": 1, "Neg": 1}
    assert unary("b = Add(x, w) a = Cast <to = 1> (b) y = Neg(a)", w=normal(5), **known) == {"Add": 1, "Neg": 1}


def test_an_identity_may_be_an_output_or_be_captured() -> None:
    text = "g (float[2] x) => (float y, float z) { y = Identity(x) z = Neg(y) }"
    assert fused(model(text), normal(2)) == {"Neg": 1}
    text = """g (float[2] x, bool c) => (float y) {
        a = Identity(x)
        y = If (c) <then_branch = t () => (float p) { p = Neg(a) }, else_branch = e () => (float q) { q = Abs(a) }>
    }"""
    assert fused(model(text), normal(2), np.array(True)) == {"If": 1}
    assert fused(model(text), normal(2), np.array(False)) == {"If": 1}


def test_sums_of_two_become_additions() -> None:
    assert unary("y = Sum(x, w)", w=normal(5)) == {"Add": 1}
    assert unary("y = Sum(x, w, w)", w=normal(5)) == {"Sum": 1}


# --- padding and channels ---


IMAGE = normal(2, 3, 6, 7)


def image(body: str, x: np.ndarray = IMAGE, opset: int = 18, **kwargs: Any) -> dict[str, int]:
    return unary(body, x, opset, shape="2,3,6,7", **kwargs)


def test_padding_joins_that_of_a_convolution() -> None:
    weights = {"w": normal(4, 3, 3, 3), "p": np.array([0, 0, 1, 0, 0, 0, 2, 1]), "zero": np.array(0, F)}
    assert image("a = Pad(x, p, zero) y = Conv <pads = [0, 1, 0, 0]> (a, w)", **weights) == {"Conv": 1}
    assert image('a = Pad(x, p) y = Conv <auto_pad = "VALID", strides = [2, 1]> (a, w)', **weights) == {"Conv": 1}
    axes = {"w": normal(4, 3, 3, 3), "p": np.array([1, 2]), "axes": np.array([-1]), "zero": np.array(0, F)}
    assert image("a = Pad(x, p, zero, axes) y = Conv(a, w)", **axes) == {"Conv": 1}
    assert image("a = Pad <pads = [0, 0, 1, 0, 0, 0, 2, 1]> (x) y = Conv(a, w)", opset=9, w=weights["w"]) == {"Conv": 1}


@pytest.mark.parametrize(
    ("body", "pads", "value"),
    [
        ("a = Pad(x, p, v) y = Conv(a, w)", [0, 0, 1, 0, 0, 0, 2, 1], 1.0),
        ("a = Pad(x, p, v) y = Conv(a, w)", [1, 0, 1, 0, 0, 0, 2, 1], 0.0),
        ("a = Pad(x, p, v) y = Conv(a, w)", [0, 0, -1, 0, 0, 0, 2, 1], 0.0),
        ('a = Pad <mode = "edge"> (x, p, v) y = Conv(a, w)', [0, 0, 1, 0, 0, 0, 2, 1], 0.0),
        ('a = Pad(x, p, v) y = Conv <auto_pad = "SAME_UPPER"> (a, w)', [0, 0, 1, 0, 0, 0, 2, 1], 0.0),
        ("a = Pad(x, p, v) b = Conv(a, w) c = ReduceSum <keepdims = 0> (a) y = Add(b, c)", [0, 0, 1, 0, 0, 0, 2, 1], 0.0),
    ],
)
def test_other_padding_stays(body: str, pads: list[int], value: float) -> None:
    assert "Pad" in image(body, p=np.array(pads), v=value, w=normal(4, 3, 3, 3), only=["padding"])


def statistics(channels: int) -> dict[str, np.ndarray]:
    return {"s": normal(channels), "b": normal(channels), "m": normal(channels), "v": RNG.uniform(0.5, 2, channels).astype(F)}


LINEAR = {
    "Conv": ("a = Conv(x, w)", {"w": normal(4, 3, 3, 3)}),
    "Conv with bias": ("a = Conv(x, w, o)", {"w": normal(4, 3, 3, 3), "o": normal(4)}),
    "grouped": ("a = Conv <group = 3> (x, w)", {"w": normal(6, 1, 3, 3)}),
    "ConvTranspose": ("a = ConvTranspose <group = 3, strides = [2, 2]> (x, w, o)", {"w": normal(3, 2, 3, 3), "o": normal(6)}),
    "Gemm": ("f = Flatten(x) a = Gemm <alpha = 0.5, beta = 2.0> (f, w, o)", {"w": normal(126, 4), "o": normal(4)}),
    "Gemm transposed": ("f = Flatten(x) a = Gemm <transB = 1> (f, w)", {"w": normal(4, 126)}),
    "MatMul": ("f = Flatten(x) a = MatMul(f, w)", {"w": normal(126, 4)}),
    "MatMul with bias": ("f = Flatten(x) c = MatMul(f, w) a = Add(o, c)", {"w": normal(126, 4), "o": normal(4)}),
}


@pytest.mark.parametrize("name", LINEAR)
def test_batch_normalization_folds_into_the_weights(name: str) -> None:
    text, weights = LINEAR[name]
    count = 6 if name in ("grouped", "ConvTranspose") else 4
    left = image(f"{text} y = BatchNormalization(a, s, b, m, v)", **weights, **statistics(count))
    assert "BatchNormalization" not in left and sum(left.values()) <= 3


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("op", ["Mul(a, k)", "Mul(k, a)", "Div(a, k)", "Sub(a, k)", "Add(k, a)"])
@pytest.mark.parametrize("scalar", [True, False])
def test_scales_and_shifts_of_channels_fold_into_the_weights(name: str, op: str, scalar: bool) -> None:
    text, weights = LINEAR[name]
    count = 6 if name in ("grouped", "ConvTranspose") else 4
    tail = (1, 1) if "Conv" in name or name == "grouped" else ()
    k = np.array(1.5, F) if scalar else RNG.uniform(1, 2, (count, *tail)).astype(F)
    left = image(f"{text} y = {op}", **weights, k=k, only=["channels"])
    bias = left.pop("Add", 0) + left.pop("Sub", 0)
    assert bias <= (name.startswith("MatMul")) and not left.keys() & {"Mul", "Div"}


def test_constants_of_another_axis_or_size_stay() -> None:
    conv = {"w": normal(4, 3, 3, 3)}
    for k in (normal(4, 1), normal(5), normal(1, 1, 4, 5), normal(1, 1, 1, 1, 1), normal(2, 1, 1, 1)):
        assert image("a = Conv(x, w) y = Mul(a, k)", **conv, k=k).keys() == {"Conv", "Mul"}
    product = {"w": normal(7, 1)}
    assert image("a = MatMul(x, w) y = Mul(a, k)", **product, k=normal(4)).keys() == {"MatMul", "Mul"}
    assert image("a = MatMul(x, w) y = Mul(a, k)", **product, k=normal(6, 1)).keys() == {"MatMul", "Mul"}


def test_values_that_are_used_elsewhere_are_not_folded() -> None:
    text = "g (float[2,3,6,7] x) => (float y, float a) { a = Conv(x, w) y = Mul(a, k) }"
    assert fused(model(text, w=normal(4, 3, 3, 3), k=normal(4, 1, 1)), IMAGE).keys() == {"Conv", "Mul"}
    assert image("a = Conv(x, w) b = Mul(a, k) y = Add(b, a)", w=normal(4, 3, 3, 3), k=normal(4, 1, 1))["Mul"] == 1


def test_only_finite_weights_are_folded() -> None:
    assert image("a = Conv(x, w) y = Mul(a, k)", w=normal(4, 3, 1, 1), k=np.array(np.inf, F), spoil=False)["Mul"] == 1
    assert image("a = Conv(x, w) y = Div(a, k)", w=normal(4, 3, 1, 1), k=np.array(0, F), spoil=False)["Div"] == 1
    large = {"w": normal(4, 3, 1, 1) * F(1e30), "k": np.array(1e30, F)}
    assert image("a = Conv(x, w) y = Mul(a, k)", **large, spoil=False)["Mul"] == 1


def test_scales_fold_into_a_batch_normalization() -> None:
    body = "a = BatchNormalization(x, s, b, m, v) c = Mul(a, k) y = Add(c, k)"
    assert image(body, **statistics(3), k=normal(3, 1, 1)) == {"BatchNormalization": 1}
    assert image(body, **statistics(3), k=normal(7))["Mul"] == 1
    assert image(body, **statistics(3), k=normal(3, 1, 1), types=False)["Mul"] == 1


def test_batch_normalization_in_training_form_stays() -> None:
    text = """g (float[2,3,6,7] x) => (float y, float p) {
        a = Conv(x, w) y, p, q = BatchNormalization <training_mode = 1> (a, s, b, m, v) }"""
    assert "BatchNormalization" in fused(model(text, w=normal(4, 3, 3, 3), **statistics(4)), IMAGE, spoil=False)


def test_double_precision_weights_are_folded_in_double_precision() -> None:
    text = "g (double[2,3,6,7] x) => (double y) { a = Conv(x, w) y = BatchNormalization(a, s, b, m, v) }"
    weights = {n: a.astype(np.float64) for n, a in ({"w": normal(4, 3, 3, 3)} | statistics(4)).items()}
    assert fused(model(text, **weights), IMAGE.astype(np.float64), rtol=1e-12) == {"Conv": 1}


def test_additions_of_constants_join() -> None:
    a, b = normal(2, 1), normal(1, 5)
    assert unary("c = Add(x, a) y = Add(b, c)", a=a, b=b + np.sign(b) * 9) == {"Add": 1}
    assert unary("c = Add(x, a) y = Add(b, c)", a=np.full((2, 1), 1e8, F), b=np.full((1, 5), -1e8, F), spoil=False) == {"Add": 2}
    text = "g (float[2,5] x) => (float y, float c) { c = Add(x, a) y = Add(b, c) }"
    assert fused(model(text, a=a, b=b + np.sign(b) * 9), normal(2, 5)) == {"Add": 2}


def test_masks_of_windows_lose_their_reshapes() -> None:
    body = "a = Reshape(x, s) c = Add(a, m) y = Reshape(c, t)"
    shapes = {"s": np.array([2, 2, 3, 4, 4]), "t": np.array([4, 3, 4, 4])}
    x = normal(4, 3, 4, 4)
    assert unary(body, x, shape="4,3,4,4", **shapes, m=normal(1, 2, 1, 4, 4)) == {"Add": 1}
    assert unary(body, x, shape="4,3,4,4", **shapes, m=normal(1, 2, 1, 4, 4), types=False) == {"Add": 1, "Reshape": 2}
    assert unary(body, x, shape="4,3,4,4", s=shapes["s"], t=np.array([4, 4, 3, 4]), m=normal(1, 2, 1, 4, 4))["Reshape"] == 2


# --- activations ---


def orders(*factors: str) -> list[str]:
    """Statements that multiply the factors in every order, with the result y."""
    made = []
    for p in itertools.permutations(factors):
        made.append(f"t = Mul({p[0]}, {p[1]}) y = Mul(t, {p[2]})")
        made.append(f"t = Mul({p[1]}, {p[2]}) y = Mul({p[0]}, t)")
    return made


HALVES = {"half": 0.5, "one": 1.0, "two": 2.0, "root": math.sqrt(2), "inverse": math.sqrt(0.5)}


@pytest.mark.parametrize("tail", [*orders("half", "x", "f"), "t = Mul(x, f) y = Div(t, two)", "t = Div(x, two) y = Mul(t, f)"])
def test_gelu_of_erf(tail: str) -> None:
    for argument in ("u = Div(x, root)", "u = Mul(inverse, x)", "u = Mul(x, inverse)"):
        for shift in ("f = Add(e, one)", "f = Add(one, e)"):
            body = f"{argument} e = Erf(u) {shift} {tail}"
            used = {n: w for n, w in HALVES.items() if n in body}
            assert unary(body, spoil=True, **used) == {"Gelu": 1}


def test_gelu_of_erf_in_other_forms() -> None:
    assert unary("u = Div(x, root) e = Erf(u) g = Mul(e, half) f = Add(g, half) y = Mul(x, f)", **HALVES) == {"Gelu": 1}
    body = "u = Mul(x, inverse) e = Erf(u) h = Mul(x, half) g = Mul(h, e) y = Add(g, h)"
    assert unary(body, **HALVES) == {"Gelu": 1}
    ones = {n: np.full(1, w, F) for n, w in HALVES.items()}
    assert unary("u = Div(x, root) e = Erf(u) f = Add(e, one) t = Mul(x, f) y = Mul(t, half)", **ones) == {"Gelu": 1}


def test_other_erf_forms_stay() -> None:
    body = "u = Div(x, root) e = Erf(u) f = Add(e, one) t = Mul(x, f) y = Mul(t, half)"
    assert unary(body, **HALVES) == {"Gelu": 1}
    for name, value in (("root", 1.5), ("one", 1.1), ("half", 0.4)):
        assert "Erf" in unary(body, **{**HALVES, name: value})
    double = {n: np.asarray(w, np.float64) for n, w in HALVES.items()}
    text = f"g (double[2,5] x) => (double y) {{ {body} }}"
    assert "Erf" in fused(model(text, **double), normal(2, 5).astype(np.float64))
    wide = {**HALVES, "half": np.full((1, 1, 1), 0.5, F)}
    assert "Erf" in unary(body, **wide)  # a third axis
    assert "Erf" in unary(body.replace("t = Mul(x, f)", "z = Neg(x) t = Mul(z, f)"), **HALVES)
    text = f"g (float[2,5] x) => (float y, float f) {{ {body} }}"
    assert "Erf" in fused(model(text, **HALVES), normal(2, 5))
    text = f"g (float[2,5] x) => (float y, float u) {{ {body} }}"
    assert "Erf" in fused(model(text, **HALVES), normal(2, 5))
    assert "Erf" in unary(body.replace("y = Mul", "z = Mul") + " y = Add(z, e)", **HALVES)


CUBES = [
    "c = Pow(x, three) d = Mul(c, k) u = Add(x, d) v = Mul(u, r)",
    "q = Mul(x, x) c = Mul(q, x) d = Mul(k, c) u = Add(d, x) v = Mul(r, u)",
    "q = Mul(x, x) d = Mul(q, k) f = Add(d, one) u = Mul(x, f) v = Mul(u, r)",
    "q = Pow(x, two) d = Mul(q, rk) f = Add(r, d) v = Mul(x, f)",
]  # fmt: skip
TANH = {
    "three": 3.0,
    "two": 2.0,
    "one": 1.0,
    "half": 0.5,
    "k": 0.044715,
    "r": math.sqrt(2 / math.pi),
    "rk": 0.044715 * math.sqrt(2 / math.pi),
}


@pytest.mark.parametrize("cube", CUBES)
@pytest.mark.parametrize(
    "tail", ["h = Add(one, t) m = Mul(x, h) y = Mul(m, half)", "h = Add(t, one) m = Mul(half, h) y = Mul(m, x)"]
)
def test_gelu_of_tanh(cube: str, tail: str) -> None:
    assert unary(f"{cube} t = Tanh(v) {tail}", **TANH) == {"Gelu": 1}


def test_gelu_of_sigmoid() -> None:
    weights = {**TANH, "r": 2 * math.sqrt(2 / math.pi)}
    assert unary(f"{CUBES[0]} t = Sigmoid(v) y = Mul(x, t)", **weights) == {"Gelu": 1}


def test_other_tanh_forms_stay() -> None:
    body = f"{CUBES[0]} t = Tanh(v) h = Add(one, t) m = Mul(x, h) y = Mul(m, half)"
    assert unary(body, **TANH) == {"Gelu": 1}
    for name, value in (("three", 2.0), ("k", 0.05), ("r", 0.8), ("one", 2.0)):
        assert "Tanh" in unary(body, **{**TANH, name: value})
    assert unary("t = Tanh(x) y = Mul(x, t)") == {"Tanh": 1, "Mul": 1}


def test_swish() -> None:
    assert unary("s = Sigmoid(x) y = Mul(x, s)") == {"Swish": 1}
    assert unary("s = Sigmoid(x) y = Mul(s, x)", types=False) == {"Swish": 1}
    assert unary("a = Mul(x, k) s = Sigmoid(a) y = Mul(x, s)", k=1.702) == {"Swish": 1}
    assert unary("a = Div(x, k) s = Sigmoid(a) y = Mul(s, x)", k=0.5) == {"Swish": 1}


def test_other_sigmoids_stay() -> None:
    assert unary("s = Sigmoid(x) n = Neg(x) y = Mul(n, s)") == {"Sigmoid": 1, "Neg": 1, "Mul": 1}
    assert unary("a = Add(x, k) s = Sigmoid(a) y = Mul(x, s)", k=1.0) == {"Add": 1, "Sigmoid": 1, "Mul": 1}
    assert "Sigmoid" in unary("a = Mul(x, k) s = Sigmoid(a) y = Mul(x, s)", k=normal(5))
    assert "Sigmoid" in unary("s = Sigmoid(x) t = Mul(x, s) y = Add(t, s)")
    text = "g (float16[2,5] x) => (float16 y) { s = Sigmoid(x) y = Mul(x, s) }"
    assert "Sigmoid" in fused(model(text), normal(2, 5).astype(np.float16))


HARD = {"three": 3.0, "zero": 0.0, "six": 6.0, "sixth": 1 / 6}


@pytest.mark.parametrize(
    "tail", ["m = Mul(x, c) y = Div(m, six)", "m = Div(c, six) y = Mul(x, m)", "m = Mul(c, sixth) y = Mul(m, x)",
             "m = Div(x, six) y = Mul(m, c)"]
)  # fmt: skip
def test_hard_swish(tail: str) -> None:
    x = np.linspace(-5, 5, 10, dtype=F).reshape(2, 5)
    assert unary(f"a = Add(x, three) c = Clip(a, zero, six) {tail}", x, **HARD) == {"HardSwish": 1}
    assert unary(f"a = Add(three, x) c = Clip <min = 0.0, max = 6.0> (a) {tail}", x, 9, **HARD) == {"HardSwish": 1}
    assert unary(f"a = Add(x, three) r = Relu(a) c = Min(r, six) {tail}", x, **HARD) == {"HardSwish": 1}
    for name, value in (("three", 2.0), ("six", 5.0), ("zero", -1.0)):
        if name in tail + "three zero":
            assert "HardSwish" not in unary(f"a = Add(x, three) c = Clip(a, zero, six) {tail}", x, **{**HARD, name: value})


def test_hard_sigmoid() -> None:
    x = np.linspace(-5, 5, 10, dtype=F).reshape(2, 5)
    assert unary("a = Add(x, three) c = Clip(a, zero, six) y = Div(c, six)", x, **HARD) == {"HardSigmoid": 1}
    assert unary("a = Add(x, three) r = Relu(a) c = Min(six, r) y = Mul(sixth, c)", x, **HARD) == {"HardSigmoid": 1}
    assert "Clip" in unary("a = Add(x, three) c = Clip(a, zero, six) y = Div(six, c)", x, spoil=False, **HARD)
    body = "a = Add(x, three) c = Clip(a, zero, six) m = Div(c, six) y = Mul(x, m)"
    assert unary("h = HardSigmoid <alpha = 0.16666667, beta = 0.5> (x) y = Mul(h, x)", x) == {"HardSwish": 1}
    assert "HardSwish" not in unary("h = HardSigmoid(x) y = Mul(h, x)", x)
    assert "HardSigmoid" in unary(body.replace("y = Mul(x, m)", "n = Neg(x) y = Mul(n, m)"), x, **HARD)


def test_mish_and_softplus() -> None:
    assert unary("s = Softplus(x) t = Tanh(s) y = Mul(x, t)") == {"Mish": 1}
    assert "Mish" not in unary("s = Softplus(x) t = Tanh(s) n = Neg(x) y = Mul(n, t)")
    assert "Mish" not in unary("s = Softplus(x) t = Tanh(s) m = Mul(x, t) y = Add(m, s)")
    x = np.linspace(-30, 60, 10, dtype=F).reshape(2, 5)
    assert unary("c = Greater(x, k) s = Softplus(x) y = Where(c, x, s)", x, k=20.0) == {"Softplus": 1}
    assert "Where" in unary("c = Greater(x, k) s = Softplus(x) y = Where(c, x, s)", x, k=2.0)
    assert "Exp" in unary("e = Exp(x) a = Add(e, one) y = Log(a)", x * 3, one=1.0)  # infinity above 88, Softplus is finite


def test_leaky_relu_and_prelu() -> None:
    weights = {"k": 0.1, "zero": 0.0}
    for body in (
        "m = Mul(x, k) y = Max(x, m)", "m = Mul(k, x) y = Max(m, x)", "c = Greater(x, zero) m = Mul(x, k) y = Where(c, x, m)",
        "c = Less(x, zero) m = Mul(x, k) y = Where(c, m, x)",
    ):  # fmt: skip
        assert unary(body, **{n: w for n, w in weights.items() if n in body}) == {"LeakyRelu": 1}
    assert unary("m = Div(x, k) y = Max(m, x)", k=10.0) == {"LeakyRelu": 1}
    assert "Max" in unary("m = Mul(x, k) y = Max(x, m)", k=1.5)
    assert "Max" in unary("m = Mul(x, k) y = Max(x, m)", k=normal(5))
    assert "Where" in unary("c = Greater(x, zero) m = Mul(x, k) y = Where(c, m, x)", **weights)
    prelu = "p = Relu(x) n = Neg(x) q = Relu(n) m = Mul(q, k) y = {}(p, m)"
    assert unary(prelu.format("Sub"), k=normal(5)) == {"PRelu": 1}
    assert unary(prelu.format("Add"), k=normal(2, 1)) == {"PRelu": 1}
    assert "PRelu" not in unary(prelu.format("Add"), k=normal(3, 1, 1))
    assert "PRelu" not in unary(prelu.format("Add"), k=normal(5), types=False)


# --- normalization ---


AXES = {"axes": np.array([-1])}
NORM = {"e": 1e-5, "two": 2.0, "minus": -0.5, "one": 1.0}
MEAN = "u = ReduceMean(x, axes) d = Sub(x, u) "
SQUARES = ["q = Pow(d, two) ", "q = Mul(d, d) ", "d2 = Sub(x, u) q = Mul(d2, d2) ", "d2 = Sub(x, u) q = Pow(d2, two) "]
DIVISIONS = [
    "v = ReduceMean(q, axes) a = Add(v, e) s = Sqrt(a) n = Div(d, s) ",
    "v = ReduceMean(q, axes) a = Add(e, v) s = Sqrt(a) r = Reciprocal(s) n = Mul(d, r) ",
    "v = ReduceMean(q, axes) a = Add(v, e) s = Sqrt(a) r = Div(one, s) n = Mul(r, d) ",
    "v = ReduceMean(q, axes) a = Add(v, e) r = Pow(a, minus) n = Mul(d, r) ",
]  # fmt: skip
TAILS = ["m = Mul(n, w) y = Add(m, b)", "m = Mul(w, n) y = Add(b, m)", "y = Mul(n, w)", "y = Add(n, b)", "y = Identity(n)"]


@pytest.mark.parametrize("square", SQUARES)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("tail", TAILS)
def test_layer_norm(square: str, division: str, tail: str) -> None:
    weights = {**AXES, **NORM, "w": normal(5), "b": normal(5)}
    assert unary(MEAN + square + division + tail, **weights) == {"LayerNormalization": 1}


def test_layer_norm_of_old_opsets_several_axes_and_wide_parameters() -> None:
    mean = "u = ReduceMean <axes = [{0}]> (x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean <axes = [{0}]> (q) "
    body = mean + "a = Add(v, e) s = Sqrt(a) n = Div(d, s) m = Mul(n, w) y = Add(m, b)"
    weights = {"e": 1e-5, "w": normal(5), "b": normal(1, 5)}
    for axes in ("-1", "1"):
        assert unary(body.format(axes), opset=13, **weights) == {"LayerNormalization": 1}
    x = normal(2, 3, 4, 5)
    for axes, shape in (("2, 3", (4, 5)), ("-2, -1", (1, 4, 5)), ("3", (5,)), ("1, 2, 3", (3, 4, 5))):
        wide = {"e": 1e-5, "w": normal(*shape), "b": normal(5)}
        assert unary(body.format(axes), x, 13, shape="2,3,4,5", **wide) == {"LayerNormalization": 1}
    for axes in ("1, 2", "2, 1"):
        assert "Sqrt" in unary(body.format(axes), x, 13, shape="2,3,4,5", **weights)
    assert "Sqrt" in unary(body.format("1"), opset=13, types=False, **weights)


def test_layer_norm_of_another_axis_moves_it_to_the_end() -> None:
    mean = "u = ReduceMean <axes = [{0}]> (x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean <axes = [{0}]> (q) "
    body = mean + "a = Add(v, e) s = Sqrt(a) n = Div(d, s) m = Mul(n, w) y = Add(m, b)"
    x, weights = normal(2, 3, 4, 5), {"e": 1e-5, "w": normal(3, 1, 1), "b": normal(1, 3, 1, 1)}
    for axis in ("1", "-3"):
        assert unary(body.format(axis), x, 13, shape="2,3,4,5", **weights) == {"Transpose": 2, "LayerNormalization": 1}
    assert unary(body.format("1"), x, 13, shape="2,3,4,5", **{**weights, "w": normal(5)})["Mul"] == 1
    assert unary(body.format("1"), x, 13, shape="N,C,H,W", **weights)["Mul"] == 1
    assert "Sqrt" in unary(body.format("1"), x, 13, shape="2,3,4,5", types=False, **weights)


def test_instance_norm() -> None:
    mean = "u = ReduceMean <axes = [2, 3]> (x) d = Sub(x, u) q = Mul(d, d) v = ReduceMean <axes = [2, 3]> (q) "
    body = mean + "a = Add(v, e) s = Sqrt(a) n = Div(d, s) "
    x, weights = normal(2, 3, 4, 5), {"e": 1e-5, "w": normal(3, 1, 1), "b": normal(1, 3, 1, 1)}
    for tail in ("m = Mul(n, w) y = Add(m, b)", "y = Mul(w, n)", "y = Add(n, b)"):
        used = {n: w for n, w in weights.items() if n == "e" or f" {n})" in tail or f"({n}," in tail}
        assert unary(body + tail, x, 13, shape="2,3,4,5", **used) == {"InstanceNormalization": 1}
    other = {"e": 1e-5, "w": normal(4, 5), "b": normal(3, 1, 1)}
    assert unary(body + "m = Mul(n, w) y = Add(m, b)", x, 13, shape="2,3,4,5", **other).keys() == {"LayerNormalization", "Add"}


def test_layer_norm_leaves_parameters_that_broadcast_otherwise() -> None:
    body = MEAN + SQUARES[0] + DIVISIONS[0] + TAILS[0]
    weights = {**AXES, **NORM, "b": normal(5)}
    left = unary(body, **weights, w=normal(2, 1))
    assert left == {"LayerNormalization": 1, "Mul": 1, "Add": 1}
    left = unary(body, normal(2, 1), shape="2,1", **weights, w=normal(5))
    assert left["Mul"] == 1
    left = unary(body, shape="N,M", **weights, w=normal(5))
    assert left["Mul"] == 1
    assert unary(body, types=False, **weights, w=normal(5))["Mul"] == 1


@pytest.mark.parametrize("value", ["u", "d", "q", "v", "a", "s", "n"])
def test_layer_norm_keeps_values_that_are_used_elsewhere(value: str) -> None:
    body = MEAN + SQUARES[0] + DIVISIONS[0] + TAILS[0]
    weights = {**AXES, **NORM, "w": normal(5), "b": normal(5)}
    left = fused(model(f"g (float[2,5] x) => (float y, float {value}) {{ {body} }}", **weights), normal(2, 5))
    assert ("LayerNormalization" in left) == (value == "n")
    left = unary(body.replace("y = Add(m, b)", f"z = Add(m, b) y = Sub(z, {value})"), **weights)
    assert ("LayerNormalization" in left) == (value == "n")


def test_other_norms_stay() -> None:
    body = MEAN + SQUARES[0] + DIVISIONS[0] + TAILS[0]
    weights = {**AXES, **NORM, "w": normal(5), "b": normal(5)}
    assert "Sqrt" in unary(body, **{**weights, "two": 3.0}, spoil=False)
    assert "Sqrt" in unary(
        body.replace("ReduceMean(q, axes)", "ReduceMean <keepdims = 0> (q, axes)"), x=normal(5, 5), shape="5,5", **weights
    )
    # the mean square of d over another axis is a norm of d
    left = unary(body.replace("ReduceMean(q, axes)", "ReduceMean(q, other)"), other=np.array([0]), **weights)
    assert left.keys() >= {"RMSNormalization", "Sub"}
    assert "Sqrt" in unary(body.replace("n = Div(d, s)", "n = Div(x, s)"), **weights)
    assert "Sqrt" in unary(body.replace("n = Div(d, s)", "n = Div(s, d)"), spoil=False, **weights)
    text = f"g (double[2,5] x) => (double y) {{ {body} }}"
    double = {n: a if n == "axes" else np.asarray(a, np.float64) for n, a in weights.items()}
    assert "Sqrt" in fused(model(text, **double), normal(2, 5).astype(np.float64))


def test_layer_norm_of_keras() -> None:
    """The scale multiplies the reciprocal first."""
    body = MEAN + "q = Mul(d, d) v = ReduceMean(q, axes) a = Add(v, e) s = Sqrt(a) r = Reciprocal(s) "
    tail = "g = Mul(r, w) h = Mul(x, g) i = Mul(u, g) j = Sub(b, i) y = Add(h, j)"
    weights = {**AXES, "e": 1e-3, "w": normal(5), "b": normal(5)}
    assert unary(body + tail, **weights) == {"LayerNormalization": 1}
    plain = tail.replace("g = Mul(r, w) ", "").replace("g)", "r)")
    assert unary(body + plain, **weights) == {"LayerNormalization": 1}
    assert "Sqrt" in unary(body + tail.replace("Mul(u, g)", "Mul(x, g)"), **weights)
    assert "Sqrt" in unary(body + tail.replace("Sub(b, i)", "Sub(i, b)"), **weights)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("tail", ["y = Mul(w, n)", "y = Mul(n, w)", "y = Identity(n)"])
def test_rms_norm(division: str, tail: str) -> None:
    weights = {**AXES, **NORM, "w": normal(5)}
    for square in ("q = Pow(x, two) ", "q = Mul(x, x) "):
        text = square + division.replace("(d, ", "(x, ").replace(", d)", ", x)") + tail
        assert unary(text, **weights) == {"RMSNormalization": 1}


def test_group_norm() -> None:
    weights = {
        "s": np.array([0, 2, -1]),
        "one": np.ones(2, F),
        "zero": np.zeros(2, F),
        "w": normal(4, 1, 1),
        "b": normal(4, 1, 1),
    }
    body = "r = Reshape(x, s) n = InstanceNormalization(r, one, zero) t = Shape(x) z = Reshape(n, t) m = Mul(z, w) y = Add(m, b)"
    x = normal(2, 4, 3, 5)
    assert unary(body, x, shape="2,4,3,5", **weights) == {"GroupNormalization": 1}
    assert unary(body, x, shape="N,4,H,W", **weights) == {"GroupNormalization": 1}
    assert "InstanceNormalization" in unary(body, x, shape="2,4,3,5", types=False, **weights)
    assert "InstanceNormalization" in unary(body, x, shape="2,4,3,5", **{**weights, "one": normal(2)})
    left = unary(body, x, shape="2,4,3,5", **{**weights, "w": normal(3, 5)})
    assert left == {"GroupNormalization": 1, "Mul": 1, "Add": 1}
    shift = body.replace("m = Mul(z, w) y = Add(m, b)", "y = Add(z, b)")
    assert unary(shift, x, shape="2,4,3,5", **{n: w for n, w in weights.items() if n != "w"}) == {"GroupNormalization": 1}


def test_global_pools() -> None:
    x = normal(2, 3, 4, 5)
    for axes in ([2, 3], [-1, -2], [-2, 3]):
        assert unary("y = ReduceMean(x, axes)", x, shape="2,3,4,5", axes=np.array(axes)) == {"GlobalAveragePool": 1}
    assert "ReduceMean" in unary("y = ReduceMean(x, axes)", x, shape="2,3,4,5", axes=np.array([3]))
    assert "ReduceMean" in unary("y = ReduceMean(x, axes)", x, shape="2,3,4,5", axes=np.array([2, 3]), types=False)
    assert "ReduceMean" in unary("y = ReduceMean <keepdims = 0> (x, axes)", x, shape="2,3,4,5", axes=np.array([2, 3]))
    assert "ReduceMean" in unary("y = ReduceMean(x, axes)", axes=np.array([1]))


# --- transposes ---


def test_transposes_join_and_cancel() -> None:
    x, shape = normal(2, 3, 4), "2,3,4"
    assert unary("a = Transpose <perm = [1, 2, 0]> (x) y = Transpose <perm = [0, 2, 1]> (a)", x, shape=shape) == {"Transpose": 1}
    assert unary("a = Transpose(x) b = Transpose(a) y = Neg(b)", x, shape=shape) == {"Neg": 1}
    assert unary("a = Transpose(x) b = Transpose(a) y = Neg(b)", x, shape=shape, types=False) == {"Transpose": 2, "Neg": 1}
    middle = "a = Transpose <perm = [1, 2, 0]> (x) b = Relu(a) c = Mul(b, k) d = Clip(c, k, k) "
    body = middle + "e = Transpose <perm = [2, 0, 1]> (d) y = Neg(e)"
    assert unary(body, x, shape=shape, k=2.0) == {"Relu": 1, "Mul": 1, "Clip": 1, "Neg": 1}
    other = body.replace("[2, 0, 1]", "[1, 0, 2]")
    assert unary(other, x, shape=shape, k=2.0)["Transpose"] == 2
    text = f"g (float[2,3,4] x) => (float y, float b) {{ {body} }}"
    assert fused(model(text, k=2.0), x)["Transpose"] == 2
    assert unary(body.replace("Mul(b, k)", "Mul(b, w)"), x, shape=shape, k=2.0, w=normal(2))["Transpose"] == 2


def test_a_transpose_between_reshapes_is_one_transpose() -> None:
    body = "a = Reshape(x, s) b = Transpose <perm = [0, 2, 1]> (a) y = Reshape(b, t)"
    x, weights = normal(2, 3, 4, 5), {"s": np.array([-1, 4, 5]), "t": np.array([2, 3, 5, 4])}
    assert unary(body, x, shape="2,3,4,5", **weights) == {"Transpose": 1}
    assert unary(body, x, shape="2,3,4,5", types=False, **weights) == {"Reshape": 2, "Transpose": 1}
    assert unary(body, x, shape="2,3,4,5", **{**weights, "t": np.array([3, 2, 5, 4])})["Reshape"] == 2
    dynamic = """h = Shape <start = 0, end = 1> (x) n = Shape <start = 2, end = 3> (x) s = Concat <axis = 0> (minus, n, five)
        a = Reshape(x, s) b = Transpose <perm = [0, 2, 1]> (a) t = Concat <axis = 0> (h, three, five, n) y = Reshape(b, t)"""
    sizes = {"minus": np.array([-1]), "five": np.array([5]), "three": np.array([3])}
    assert unary(dynamic, x, shape="B,3,N,5", **sizes) == {"Transpose": 1}


# --- attention and products ---


ANGLES = "f = Mul(p, inverse) e = Concat <axis = -1> (f, f) c = Cos(e) g = Unsqueeze(c, one) i = Sin(e) h = Unsqueeze(i, one) "
HALF = {
    "split": "a, b = Split <axis = -1, num_outputs = 2> (x) n = Neg(b) t = Concat <axis = 3> (n, a) ",
    "slices": "a = Slice(x, i0, i2, i3) b = Slice(x, i2, end, i3) n = Neg(b) t = Concat <axis = -1> (n, a) ",
}
TURNED = {
    "inverse": np.array([[[1, 0.1]]], F), "one": np.array([1]), "i0": np.array([0]), "i2": np.array([2]), "i3": np.array([3]),
    "end": np.array([2**62]),
}  # fmt: skip


def rotary(body: str, shape: str = "2,3,6,4", angles: str = "2,6,1", spoil: bool = True, **weights: Any) -> dict[str, int]:
    text = f"g (float[{shape}] x, float[{angles}] p) => (float y) {{ {body} }}"
    used = {n: w for n, w in {**TURNED, **weights}.items() if n in body}
    return fused(model(text, **used), normal(2, 3, 6, 4), normal(2, 6, 1), spoil=spoil)


@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("tail", ["y = Add(j, k)", "y = Add(k, j)"])
def test_rotary_embedding(half: str, tail: str) -> None:
    body = ANGLES + HALF[half] + f"j = Mul(x, g) k = Mul(t, h) {tail}"
    assert "RotaryEmbedding" in rotary(body)
    assert "RotaryEmbedding" in rotary(body, "B,3,T,4", "B,T,1")
    assert "RotaryEmbedding" not in rotary(body, "B,3,T,4", "C,T,1")


def test_rotary_embedding_of_constant_angles() -> None:
    body = HALF["split"] + "j = Mul(x, g) k = Mul(t, h) y = Add(j, k)"
    text = f"g (float[1,3,6,4] x) => (float y) {{ {body} }}"
    wide = np.concatenate([normal(6, 2)] * 2, -1)
    assert fused(model(text, g=wide, h=wide), normal(1, 3, 6, 4)) == {"RotaryEmbedding": 1}
    other = normal(6, 4)  # the halves differ
    assert "RotaryEmbedding" not in fused(model(text, g=wide, h=other), normal(1, 3, 6, 4))
    assert "RotaryEmbedding" not in fused(model(text.replace("[1,", "[2,"), g=wide, h=wide), normal(2, 3, 6, 4))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("n = Neg(b) t = Concat <axis = 3> (n, a)", "n = Neg(a) t = Concat <axis = 3> (n, b)"),
        ("t = Concat <axis = 3> (n, a)", "t = Concat <axis = 3> (a, n)"),
        ("n = Neg(b)", "n = Identity(b)"),
        ("Concat <axis = -1> (f, f)", "Concat <axis = -1> (f, p2)"),
        ("k = Mul(t, h) y = Add(j, k)", "k = Mul(t, h) z = Add(j, k) y = Add(z, k)"),
        ("j = Mul(x, g)", "o = Neg(x) j = Mul(o, g)"),
    ],
)
def test_other_rotations_stay(old: str, new: str) -> None:
    body = ANGLES + HALF["split"] + "j = Mul(x, g) k = Mul(t, h) y = Add(j, k)"
    assert old in body
    assert "RotaryEmbedding" not in rotary(body.replace(old, new), p2=normal(2, 6, 2), spoil=False)


def heads(batch: int = 2, number: int = 3, length: int = 4, size: int = 5) -> np.ndarray:
    return normal(batch, number, length, size)


def attention(body: str, *more: Any, q: str = "2,3,4,5", k: str = "2,3,6,5", mask: str = "", **kwargs: Any) -> dict[str, int]:
    """The operators of a graph of queries q, keys k, values v, and an optional mask; the output is y."""
    known = {n: kwargs.pop(n) for n in ("only", "types", "spoil") if n in kwargs}
    text = f"g (float[{q}] q, float[{k}] k, float[{k}] v{', ' + mask if mask else ''}) => (float y) {{ {body} }}"
    feeds = [normal(*((2, 3, 4, 5)[i] if not d.isdigit() else int(d) for i, d in enumerate(q.split(","))))]
    feeds += [normal(*((2, 3, 6, 5)[i] if not d.isdigit() else int(d) for i, d in enumerate(k.split(",")))) for _ in range(2)]
    return fused(model(text, **kwargs), *feeds, *more, **known)


TURN = "t = Transpose <perm = [0, 1, 3, 2]> (k) "
END = "p = Softmax <axis = -1> (s) y = MatMul(p, v)"


@pytest.mark.parametrize(
    "middle",
    [
        "s = MatMul(q, t) ", "m = MatMul(q, t) s = Mul(m, c) ", "m = MatMul(q, t) s = Div(m, c) ",
        "a = Mul(q, c) s = MatMul(a, t) ",
        "a = Div(q, c) b = Mul(t, c) s = MatMul(a, b) ", "m = MatMul(q, t) n = Mul(c, m) s = Add(n, w) ",
        "m = MatMul(q, t) s = Add(w, m) ",
    ],
)  # fmt: skip
def test_attention(middle: str) -> None:
    weights = {n: w for n, w in {"c": 0.25, "w": normal(4, 6)}.items() if n in middle.replace("Mul", "").replace("MatMul", "")}
    left = attention(TURN + middle + END, **weights)
    assert left == {"Attention": 1}
    assert "Attention" not in attention(TURN + middle + END, types=False, **weights)


def test_attention_of_heads_out_of_reshapes() -> None:
    """The keys are transposed by one Transpose with the heads; sizes may be names."""
    text = """g (float[B,T,15] x, float[B,S,15] z) => (float y) {{
        a = Reshape(x, h) q = Transpose <perm = [0, 2, 1, 3]> (a) b = Reshape(z, h) k = Transpose <perm = [0, 2, 3, 1]> (b)
        c = Reshape(z, h) v = Transpose <perm = [0, 2, 1, 3]> (c) m = MatMul(q, k) s = Mul(m, f) {}
        w = Transpose <perm = [0, 2, 1, 3]> (n)
        y = Reshape(w, o) }}"""
    body = text.format("p = Softmax <axis = -1> (s) n = MatMul(p, v)")
    weights = {"h": np.array([0, 0, 3, 5]), "o": np.array([0, 0, 15]), "f": 0.4}
    left = fused(model(body, **weights), normal(2, 4, 15), normal(2, 6, 15))
    assert left["Attention"] == 1 and "MatMul" not in left and left["Transpose"] == 4
    other = body.replace("float[B,S,15]", "float[C,S,15]")  # another batch
    assert "Attention" not in fused(model(other, **weights), normal(2, 4, 15), normal(2, 6, 15))


def test_attention_with_repeated_heads() -> None:
    text = """g (float[2,4,3,5] q, float[2,2,6,5] k, float[2,2,6,5] v) => (float y) {
        a = Unsqueeze(k, two) b = Expand(a, wide) c = Reshape(b, full) t = Transpose <perm = [0, 1, 3, 2]> (c)
        d = Unsqueeze(v, two) e = Expand(d, wide) f = Reshape(e, full) m = MatMul(q, t) s = Mul(m, g)
        p = Softmax <axis = -1> (s) y = MatMul(p, f) }"""
    weights = {"two": np.array([2]), "wide": np.array([2, 2, 2, 6, 5]), "full": np.array([2, 4, 6, 5]), "g": 0.4}
    assert fused(model(text, **weights), normal(2, 4, 3, 5), normal(2, 2, 6, 5), normal(2, 2, 6, 5)) == {"Attention": 1}
    assert attention(TURN + "s = MatMul(q, t) " + END, k="2,1,6,5") == {"Attention": 1}


def test_attention_with_masks() -> None:
    body = TURN + "m = MatMul(q, t) n = Mul(m, c) s = Add(n, mask) " + END
    allowed = "f = Cast <to = 1> (mask) i = Sub(one, f) w = Mul(i, low) "
    added = TURN + allowed + "m = MatMul(q, t) n = Mul(m, c) s = Add(n, w) " + END
    ones = RNG.integers(0, 2, (2, 1, 1, 6))
    weights = {"c": 0.25, "one": 1.0, "low": -1e9}
    assert "Attention" in attention(added, ones, mask="int64[2,1,1,6] mask", **weights)
    assert "Attention" in attention(added, ones.astype(bool), mask="bool[2,1,1,6] mask", **{**weights, "low": -3.4e38})
    # a mask of floats, or of integers times such a number, may be all negative infinity
    assert "Attention" not in attention(body, normal(2, 1, 1, 6), mask="float[2,1,1,6] mask", c=0.25)
    assert "Attention" not in attention(added, ones, mask="int64[2,1,1,6] mask", **{**weights, "low": -3.4e38})
    where = TURN + "w = Where(mask, zero, low) m = MatMul(q, t) s = Add(m, w) " + END
    seen = np.tril(np.ones((4, 6), bool))
    assert "Attention" in attention(where, seen, mask="bool[4,6] mask", zero=0.0, low=-3.4e38)
    assert "Attention" not in attention(where, seen, mask="bool[4,6] mask", zero=0.0, low=-math.inf)
    filled = allowed.replace("w = Mul(i, low)", "b = Cast <to = 9> (i) w = Where(b, low, i)")
    assert "Attention" in attention(
        TURN + filled + "m = MatMul(q, t) s = Add(m, w) " + END, ones, mask="int64[2,1,1,6] mask", one=1.0, low=-3.4e38
    )
    constant = TURN + "m = MatMul(q, t) s = Add(m, w) " + END
    split = TURN + allowed + "l, r = Split <num_outputs = 2> (w) m = MatMul(q, t) s = Add(m, l) " + END
    wide = np.concatenate([ones, ones], 0).astype(bool)
    assert "Attention" in attention(split, wide, mask="bool[4,1,1,6] mask", one=1.0, low=-1e9)
    some = np.where(seen, 0, -np.inf).astype(F)
    assert "Attention" in attention(constant, w=some)
    nothing = some.copy()
    nothing[2] = -np.inf
    assert "Attention" not in attention(constant, w=nothing)


@pytest.mark.parametrize(
    "body",
    [
        TURN + "m = MatMul(q, t) s = Where(w, m, c) " + END,
        TURN + "s = MatMul(q, t) p = Softmax <axis = 2> (s) y = MatMul(p, v)",
        TURN + "s = MatMul(q, t) " + END + " z = ReduceSum(p)",
        TURN + "s = MatMul(q, t) p = Softmax(s) n = IsNaN(p) o = Where(n, c, p) y = MatMul(o, v)",
    ],
)
def test_other_attention_stays(body: str) -> None:
    weights: dict[str, Any] = {"w": np.tril(np.ones((4, 6), bool)), "c": 0.0}
    more = ", float p" if "z =" in body else ""
    text = f"g (float[2,3,4,5] q, float[2,3,6,5] k, float[2,3,6,5] v) => (float y{more}) {{ {body} }}"
    assert "Attention" not in fused(model(text, **weights), heads(), heads(length=6), heads(length=6))


def test_attention_refuses_masks_that_broadcast_otherwise() -> None:
    body = TURN + "m = MatMul(q, t) s = Add(m, w) " + END
    assert "Attention" in attention(body, w=normal(2, 1, 4, 6))
    assert "Attention" in attention(body, w=normal(6))
    assert "Attention" not in attention(body, q="1,3,4,5", k="1,3,6,5", w=normal(2, 1, 4, 6))
    assert "Attention" not in attention(body, w=normal(4, 1))  # for all keys; Attention takes it for a short mask


def test_scales_of_both_operands_join() -> None:
    text = "g (float[2,5] x, float[3,5] w) => (float y) { a = Mul(x, c) t = Transpose(w) b = Div(t, c) y = MatMul(a, b) }"
    assert fused(model(text.replace("Div", "Mul"), c=0.25), normal(2, 5), normal(3, 5)) == {"Mul": 1, "Transpose": 1, "MatMul": 1}
    assert fused(model(text, c=0.25), normal(2, 5), normal(3, 5)) == {"Transpose": 1, "MatMul": 1}
    text = (
        "g (float[2,5] x, float[3,5] w) => (float y, float b) { a = Mul(x, c) t = Transpose(w) b = Mul(t, c) y = MatMul(a, b) }"
    )
    assert fused(model(text, c=0.25), normal(2, 5), normal(3, 5))["Mul"] == 2


def test_products_with_several_weights_join() -> None:
    body = """a = MatMul(x, u) b = Add(a, o) c = Reshape(b, s) d = MatMul(x, v) e = Reshape(d, s) f = MatMul(x, w) g = Add(o2, f)
        h = Transpose(g)
        i = Transpose(h) j = Reshape(i, s) k = Add(c, e) y = Add(k, j)"""
    weights = {"u": normal(5, 4), "v": normal(5, 4), "w": normal(5, 4), "o": normal(4), "o2": normal(4), "s": np.array([2, 2, 2])}
    left = unary(body, **weights, only=["products"])
    assert (left["MatMul"], left["Split"], left["Add"]) == (1, 1, 3)
    assert (
        unary(body, **{**weights, "w": normal(5, 1), "o2": normal(4)}, only=["products"])["MatMul"] == 2
    )  # a bias that broadcasts
    gemm = "a = Gemm <transB = 1> (x, u, o) c = Reshape(a, s) d = Gemm(x, v) e = Reshape(d, s) y = Add(c, e)"
    left = unary(gemm, u=normal(4, 5), v=normal(5, 4), o=normal(4), s=np.array([2, 2, 2]))
    assert (left["Gemm"], left["Split"]) == (1, 1)


def test_other_products_stay() -> None:
    weights = {"u": normal(5, 4), "v": normal(5, 4), "s": np.array([2, 2, 2])}
    assert unary("a = MatMul(x, u) b = MatMul(x, v) y = Add(a, b)", u=weights["u"], v=weights["v"])["MatMul"] == 2
    body = "a = MatMul(x, u) b = Reshape(a, s) c = MatMul(x, v) y = Reshape(c, s) z = Neg(b)"
    text = f"g (float[2,5] x) => (float y, float a) {{ {body} }}"
    assert fused(model(text, **weights), normal(2, 5))["MatMul"] == 2
    gemm = "a = Gemm <alpha = 2.0> (x, u) c = Reshape(a, s) d = Gemm(x, v) e = Reshape(d, s) y = Add(c, e)"
    assert unary(gemm, **weights)["Gemm"] == 2


# --- the whole ---


def test_levels() -> None:
    body = "a = Identity(x) s = Sigmoid(a) y = Mul(a, s)"
    assert unary(body, level=0) == {"Identity": 1, "Sigmoid": 1, "Mul": 1}
    assert unary(body, level=1) == {"Sigmoid": 1, "Mul": 1}
    assert unary(body, level=2) == {"Swish": 1}


def test_functions_are_fused_in_their_callers() -> None:
    source = model("g (float[2,5] x) => (float y) { y = local.silu(x) }")
    nodes = [helper.make_node("Sigmoid", ["p"], ["q"]), helper.make_node("Mul", ["p", "q"], ["r"])]
    source.functions.append(helper.make_function("local", "silu", ["p"], ["r"], nodes, [helper.make_opsetid("", 18)]))
    source.opset_import.append(helper.make_opsetid("local", 1))
    assert fused(source, normal(2, 5)) == {"Swish": 1}


def test_calls_keep_the_nodes_that_they_replace() -> None:
    graph = read(model("g (float[2,5] x) => (float y) { s = Sigmoid(x) y = Mul(x, s) }"))
    region = region_of(graph)
    assert fuse(region) == {"activations": 1}
    assert [n.op_type for n in region.calls[0].origins] == ["Sigmoid", "Mul"]


def test_unused_constants_of_passes_are_removed() -> None:
    graph = read(
        model(
            "g (float[2,3,6,7] x) => (float y) { a = Conv(x, w) b = Mul(a, k) c = Mul(b, k) y = Mul(c, k) }",
            w=normal(4, 3, 1, 1),
            k=1.5,
        )
    )
    region = region_of(graph)
    before = set(region.constants)
    fuse(region)
    assert len(set(region.constants) - before) == 1


def test_every_pass_says_what_it_replaces() -> None:
    for name, run in PASSES.items():
        assert (run.__doc__ or "").startswith("For any "), name


def chain(op: Callable[[int], Any], count: int, **weights: Any) -> Any:
    nodes = [node for i in range(count) for node in op(i)]
    inputs = [helper.make_tensor_value_info("v0", TensorProto.FLOAT, [2, 2])]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)]
    initializers = [numpy_helper.from_array(np.asarray(w), n) for n, w in weights.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    return read(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8))


CHAINS: dict[str, Callable[[int], Any]] = {
    "identities": lambda i: [helper.make_node("Identity", [f"v{i}"], [f"v{i + 1}"])],
    "transposes": lambda i: [helper.make_node("Transpose", [f"v{i}"], [f"v{i + 1}"], perm=[1, 0])],
    "additions": lambda i: [helper.make_node("Add", [f"v{i}", "w"], [f"v{i + 1}"])],
    "products": lambda i: [helper.make_node("Mul", [f"v{i}", "k"], [f"v{i + 1}"])],
    "squares": lambda i: [helper.make_node("Mul", [f"v{i}", f"v{i}"], [f"v{i + 1}"])],
    "swish": lambda i: [
        helper.make_node("Sigmoid", [f"v{i}"], [f"s{i}"]),
        helper.make_node("Mul", [f"v{i}", f"s{i}"], [f"v{i + 1}"]),
    ],
    "roots": lambda i: [helper.make_node("Sqrt", [f"v{i}"], [f"v{i + 1}"])],
    "reshapes": lambda i: [helper.make_node("Reshape", [f"v{i}", "s"], [f"v{i + 1}"])],
    "constants": lambda i: [helper.make_node("Neg", ["w" if i == 0 else f"v{i}"], [f"v{i + 1}"])],
    "readers": lambda i: [
        helper.make_node("MatMul", ["v0", "w"], [f"m{i}"]),
        helper.make_node("Reshape", [f"m{i}", "s"], [f"v{i + 1}"]),
    ],
}


@pytest.mark.parametrize("name", CHAINS)
def test_work_grows_linearly(name: str) -> None:
    weights = {"w": np.ones((2, 2), F), "k": np.full((), 0.5, F), "s": np.array([2, 2])}
    counts = []
    for size in (100, 1000):
        graph = chain(CHAINS[name], size, **weights)
        region = region_of(graph)
        types = declared(region, graph)
        counts.append(lines(lambda r=region, t=types: fuse(r, types=t)))  # type: ignore[misc]
    assert counts[1] < 11 * counts[0] + 10_000


def test_ten_thousand_calls_of_all_kinds() -> None:
    weights = {"w": np.ones((2, 2), F), "k": np.full((), 0.5, F), "s": np.array([2, 2])}
    kinds = [CHAINS[n] for n in ("identities", "transposes", "additions", "products", "swish", "reshapes")]
    graph = chain(lambda i: kinds[i % 6](i), 8_600, **weights)
    region = region_of(graph)
    assert len(region.calls) > 10_000
    fuse(region, types=declared(region, graph))
    assert len(region.calls) < 7_500
    small = chain(lambda i: kinds[i % 6](i), 60, **weights)
    before, after = region_of(small), region_of(small)
    fuse(after, types=declared(after, small))
    x = normal(2, 2)
    same(evaluate(before, [x]), evaluate(after, [x]), 1e-5)


def test_the_editor_drops_calls_that_nothing_reads() -> None:
    graph = read(model("g (float[2] x) => (float y) { a = Neg(x) b = Abs(a) y = Relu(b) }"))
    region = region_of(graph)
    edit = RegionView(region)
    root = edit.named("Relu")[0]
    edit.put(root, edit.call("Neg", region.inputs, [root], root.outputs))
    edit.finish()
    assert [c.name for c in region.calls] == ["Neg"]


MODELS = sorted((TESTS / "models").glob("*.onnx"))


@pytest.mark.parametrize("path", MODELS, ids=[p.stem for p in MODELS])
def test_exported_models_keep_their_results(path: Path) -> None:
    source = onnx.load(path)
    stored = np.load(path.with_name(path.name.split("-")[0] + ".npz"))
    fused(source, *(stored[f"x0_{i}"] for i in range(len(source.graph.input))))


def test_generated_graphs_keep_their_results() -> None:
    changed = 0
    for index in (*range(40), 995, 3141):
        case = draw(5, index)
        if any(n.op_type in ("If", "Loop", "Scan", "SequenceMap", "RandomNormal", "Bernoulli") for n in every_node(case.model)):
            continue
        graph = read(case.model)
        before, after = region_of(graph), region_of(graph)
        changed += bool(fuse(after, types=declared(after, graph)))
        inputs = [case.feeds[v.name] for v in graph.inputs]
        for feeds in (inputs, spoiled([x if isinstance(x, np.ndarray) else np.zeros(0) for x in inputs])):
            try:
                want = evaluate(before, feeds)
            except Exception:  # an index or a shape that does not fit
                continue
            for a, b in zip(want, evaluate(after, feeds), strict=True):
                if isinstance(a, np.ndarray):
                    same([a], [b], 1e-5)
    assert changed > 12


def test_facts_hold_for_the_values_of_a_run() -> None:
    """Dtypes, shapes and sizes, of which equal names are equal numbers."""
    known = 0
    for index in (*range(30), 942, 2030, 2444):
        case = draw(3, index)
        graph = read(case.model)
        region = region_of(graph)
        if any(call.node.graphs for call in region.calls):
            continue
        facts = RegionView(region, declared(region, graph)).facts
        values = {**region.constants, **dict(zip(region.inputs, (case.feeds[v.name] for v in graph.inputs), strict=True))}
        names: dict[str, int] = {}
        with np.errstate(all="ignore"):
            for call in region.calls:
                _run(call, values)
        for value, array in values.items():
            if not isinstance(array, np.ndarray):
                continue
            assert facts.dtype(value) in (None, array.dtype)
            shape, sizes = facts.shape(value), facts.sizes(value)
            pairs = [] if shape is None else [*zip(shape, array.shape, strict=True)]
            if sizes is not None:
                pairs += zip(sizes if isinstance(sizes, tuple) else (sizes,), array.reshape(-1).tolist(), strict=True)
            for size, number in pairs:
                assert number == (size if isinstance(size, int) else names.setdefault(size, number))
            known += len(pairs)
    assert known > 300
