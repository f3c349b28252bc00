"""`insert` and `merge` against each other and against NumPy: every way in which a node uses a weight."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import ModelProto, checker, numpy_helper, parser

from singa_backend import run_model
from singa_backend.adapters import Adapter, LowRank, create, factor_inputs, insert, merge
from singa_backend.errors import InvalidInput

MS = "com.microsoft"


def draws(seed: int = 0):
    rng = np.random.default_rng(seed)
    return {
        "uniform": lambda shape, bound: rng.uniform(-bound, bound, shape),
        "normal": lambda shape, deviation: rng.normal(0, deviation, shape),
    }


def made(model: ModelProto, rank: int = 2, **options) -> Adapter:
    """An adapter whose B is not 0."""
    rng = np.random.default_rng(1)
    new = create(model, rank, **draws(), **options)
    changes = {n: LowRank(rng.normal(0, 1, c.a.shape).astype(c.a.dtype), rng.normal(0, 1, c.b.shape).astype(c.b.dtype), c.scale)
               for n, c in new.changes.items()}  # fmt: skip
    return Adapter(changes, new.values, new.base, new.settings)


def model_of(text: str, *, opset: int = 21, **weights: np.ndarray) -> ModelProto:
    """A model from ONNX's text syntax, with these initializers."""
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> {text}')
    model.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return model


rng = np.random.default_rng(7)
W = rng.normal(size=(6, 4)).astype(np.float32)
V = rng.normal(size=(5, 6)).astype(np.float32)
K = rng.normal(size=(4, 2, 3, 3)).astype(np.float32)
X = rng.normal(size=(3, 6)).astype(np.float32)
IMAGE = rng.normal(size=(2, 4, 7, 7)).astype(np.float32)

FORMS = {
    "right": (model_of("g (float[N, 6] x) => (float[N, 4] y) { y = MatMul(x, w) }", w=W), X),
    "right, more axes": (model_of("g (float[N, M, 6] x) => (float[N, M, 4] y) { y = MatMul(x, w) }", w=W), X[None]),
    "left": (model_of("g (float[N, 6, 2] x) => (float[N, 5, 2] y) { y = MatMul(w, x) }", w=V), rng.normal(size=(3, 6, 2))),
    "bias": (model_of("g (float[N, 6] x) => (float[N, 4] y) { h = MatMul(x, w) y = Add(b, h) }", w=W, b=W[0]), X),
    "transposed": (model_of("g (float[N, 6] x) => (float[N, 5] y) { t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t) }", w=V), X),
    "reshaped": (model_of(
        "g (float[N, 6] x) => (float[N, 4] y) { t = Reshape(w, s) y = MatMul(x, t) }", w=W.reshape(3, 8), s=np.array([6, -1])), X),
    "Gemm": (model_of("g (float[N, 6] x) => (float[N, 5] y) { y = Gemm <transB = 1, alpha = 0.5, beta = 2.0> (x, w, b) }",
                      w=V, b=V[:, 0]), X),
    "Gemm, left": (model_of("g (float[4, N] x) => (float[6, 4] y) { y = Gemm <transA = 1, transB = 1> (w, x) }", w=V), rng.normal(size=(4, 5))),
    "Gemm, x transposed": (model_of("g (float[6, N] x) => (float[N, 4] y) { y = Gemm <transA = 1> (x, w) }", w=W), X.T),
    "Conv": (model_of("g (float[N, 4, H, H] x) => (float[N, 4, I, J] y) { y = Conv <group = 2, strides = [2, 1], pads = [1, 0, 2, 1]> (x, w, b) }",
                      w=K, b=K[:, 0, 0, 0]), IMAGE),
    "Conv, same": (model_of('g (float[N, 2, H, H] x) => (float[N, 4, I, J] y) { y = Conv <auto_pad = "SAME_UPPER", dilations = [2, 2]> (x, w) }',
                            w=K), IMAGE[:, :2]),
    "FusedMatMul": (model_of("g (float[N, 6] x) => (float[N, 5] y) { y = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (x, w) }", w=V), X),
    "FusedMatMul, x transposed": (model_of(
        "g (float[N, 6, M] x) => (float[N, M, 4] y) { y = com.microsoft.FusedMatMul <transA = 1> (x, w) }", w=W), rng.normal(size=(2, 6, 3))),
    "Attention": (model_of(
        "g (float[N, 3, 6] x) => (float[N, 3, 6] y) { y = com.microsoft.Attention <num_heads = 2> (x, w, b) }",
        w=rng.normal(size=(6, 18)).astype(np.float32), b=np.zeros(18, np.float32)), X[None]),
    "table": (model_of("g (int64[N] x) => (float[N, 4] y) { y = Gather(w, x) }", w=W), np.array([5, 0, 3])),
    "tied": (model_of("""g (int64[N] x) => (float[N, 5] y) {
        h = Gather(w, x) t = Transpose <perm = [1, 0]> (w) y = MatMul(h, t) }""", w=V), np.array([4, 0, 2])),
    "tied, two products": (model_of("g (float[N, 6] x) => (float[N, 6] y) { h = Gemm <transB = 1> (x, w) y = MatMul(h, w) }", w=V), X),
    "tied, within an operator": (model_of("""g (float[N, 6] x) => (float[5, 6] z, float[N, 5] y) {
        t = Transpose <perm = [1, 0]> (w) y = MatMul(x, t) z = Sin(w) }""", w=V), X),
    "two uses": (model_of("g (float[N, 6] x) => (float[N, 4] y) { a = MatMul(x, w) e = Exp(x) b = MatMul(e, w) y = Add(a, b) }", w=W), X),
    "Einsum": (model_of('g (float[N, 6] x) => (float[4, N] y) { y = Einsum <equation = "ni,io->on"> (x, w) }', w=W), X),
    "float16": (model_of("g (float16[N, 6] x) => (float16[N, 4] y) { y = MatMul(x, w) }", w=W.astype(np.float16)), X.astype(np.float16)),
    "double": (model_of("g (double[N, 6] x) => (double[N, 4] y) { y = MatMul(x, w) }", w=W.astype(np.float64)), X.astype(np.float64)),
    "opset 11": (model_of("g (float[N, 6] x) => (float[N, 4] y) { y = MatMul(x, w) }", opset=11, w=W), X),
    "function": (model_of("""g (float[N, 6] x) => (float[N, 5] y) { y = own.linear(x, w) }
        <domain: "own", opset_import: ["" : 21]> linear (a, m) => (r) { t = Transpose <perm = [1, 0]> (m) r = MatMul(a, t) }""", w=V), X),
}  # fmt: skip
FORMS["function"][0].opset_import.add(domain="own", version=1)


def cast(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype == np.float64 else x


@pytest.mark.parametrize("form", FORMS)
def test_a_model_with_its_adapter_equals_the_merged_one(form: str) -> None:
    model, x = FORMS[form]
    x = x if form == "double" else cast(x)
    before = model.SerializeToString(deterministic=True)
    adapter = made(model, rank=2, target=["w"], alpha=3.0)
    assert adapter.changes["w"].scale == 1.5
    both, merged = insert(model, adapter), merge(model, adapter)
    assert model.SerializeToString(deterministic=True) == before
    for new in (both, merged):
        checker.check_model(new)
    base, got, want = (run_model(m, [x])[-1] for m in (model, both, merged))
    limit = 2e-2 if form == "float16" else 1e-12 if form == "double" else 2e-6
    assert got.dtype == want.dtype == base.dtype
    assert np.abs(base - want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=limit, atol=limit * np.abs(want).max())


@pytest.mark.parametrize("form", FORMS)
def test_a_new_adapter_changes_nothing(form: str) -> None:
    model, x = FORMS[form]
    x = x if form == "double" else cast(x)
    new = create(model, 2, **draws(), target=["w"])
    both = insert(model, new, dropout=0.5)
    by_definition = [run_model(m, [x], optimize=0)[-1] for m in (both, model)]
    np.testing.assert_array_equal(*by_definition)
    # a plan may compute a product and its bias as one call, and so with another rounding, only where no adapter is between them
    np.testing.assert_allclose(run_model(both, [x])[-1], run_model(model, [x])[-1], rtol=1e-6, atol=1e-6)


def test_factors_as_inputs() -> None:
    model, x = FORMS["Gemm"]
    adapter = made(model, target=["w"], alpha=5.0)
    open_model = insert(model, adapter, inputs=True)
    assert [i.name for i in open_model.graph.input] == ["x", "w.lora_A", "w.lora_B"]
    want = run_model(merge(model, adapter), [x])[0]
    np.testing.assert_allclose(run_model(open_model, {"x": x, **factor_inputs(adapter)})[0], want, rtol=1e-5, atol=1e-5)
    none = {n: a[:0] if n.endswith("A") else a[:, :0] for n, a in factor_inputs(adapter).items()}
    np.testing.assert_allclose(run_model(open_model, {"x": x, **none})[0], run_model(model, [x])[0], rtol=1e-6)


def test_a_scale_beyond_the_dtype_is_refused() -> None:
    model = FORMS["right"][0]
    adapter = made(model)
    changes = {n: LowRank(c.a, c.b, 1e300) for n, c in adapter.changes.items()}
    with pytest.raises(InvalidInput, match="finite in float32, got 1e\\+300") as error:
        insert(model, Adapter(changes, adapter.values, adapter.base, adapter.settings))
    assert error.value.code == "SX971"
