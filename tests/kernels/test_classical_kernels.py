"""Kernels of ai.onnx.ml's vectors, features, categories and texts against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

from singa_backend import SingaBackend

ML = "ai.onnx.ml"


def model_of(name: str, xs: list[np.ndarray], outputs: list[Any], domain: str = ML, version: int = 1, **attributes: Any) -> ModelProto:
    """A model of one operator; the dtypes of its outputs; shapes are open."""
    given = [value(f"x{i}", x.dtype) for i, x in enumerate(xs)]
    made = [value(f"y{i}", d) for i, d in enumerate(outputs)]
    node = helper.make_node(name, [v.name for v in given], [v.name for v in made], domain=domain, **attributes)
    imports = [helper.make_opsetid("", 18), helper.make_opsetid(domain, version)] if domain else [helper.make_opsetid("", version)]
    return helper.make_model(helper.make_graph([node], "g", given, made), opset_imports=imports, ir_version=10)


def value(name: str, dtype: Any) -> Any:
    code = TensorProto.STRING if np.dtype(dtype) == object else helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_tensor_value_info(name, code, None)


def agree(proto: ModelProto, xs: list[np.ndarray], kernel: bool = True, tolerance: float = 4e-6) -> None:
    """Plans return what the definition returns, also for a second run of other values; `kernel`: no definition computes."""
    rep = SingaBackend.prepare(proto)
    for batch in (xs, [x[:1] if x.ndim > 1 else x for x in xs], xs):
        for turned in (batch, [x[::-1].copy() for x in batch], batch):
            expected = SingaBackend.run_model(proto, turned, optimize=0)
            for a, b in zip(rep.run(turned), expected, strict=True):
                same(a, b, tolerance)
    kernels = {s.kernel for s in rep.profile(xs).steps}
    assert not kernel or not any("definition" in k for k in kernels), [s.notes for s in rep.profile(xs).steps]


def same(a: Any, b: Any, tolerance: float) -> None:
    if isinstance(b, list):
        assert [list(m) for m in a] == [list(m) for m in b]
        a, b = (np.array([list(m.values()) for m in v]) for v in (a, b))
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype.kind == "f":
        assert np.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True), np.abs(a - b).max()
    else:
        assert np.array_equal(a, b)


def floats(rng: np.random.Generator, *shape: int, special: bool = False, dtype: Any = np.float32) -> np.ndarray:
    x = rng.standard_normal(shape).round(2)
    if special:
        x = np.where(rng.random(shape) < 0.1, rng.choice([np.nan, np.inf, -np.inf, 0], shape), x)
    return x.astype(dtype)


POST = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


# --- support vector machines


@pytest.mark.parametrize("kind", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("classes, chances, rows", [(2, False, 5), (2, True, 5), (4, True, 3), (4, True, 40), (3, False, 300), (9, True, 2)])
def test_svm_classifier(kind: str, classes: int, chances: bool, rows: int) -> None:
    rng = np.random.default_rng(classes * rows)
    sizes = rng.integers(1, 6, classes)
    total, pairs = int(sizes.sum()), classes * (classes - 1) // 2
    attributes: dict[str, Any] = {
        "kernel_type": kind, "kernel_params": [0.3, 0.1, 2.0], "vectors_per_class": sizes.tolist(),
        "support_vectors": floats(rng, total * 5).tolist(), "coefficients": floats(rng, (classes - 1) * total).tolist(),
        "rho": floats(rng, pairs).tolist(), "classlabels_ints": [7, 3, -1, 4, 5, 6, 8, 9, 10][:classes],
    }  # fmt: skip
    if chances:
        attributes |= {"prob_a": (-1 - floats(rng, pairs) ** 2).tolist(), "prob_b": floats(rng, pairs).tolist()}
    x = floats(rng, rows, 5)
    agree(model_of("SVMClassifier", [x], [np.int64, np.float32], **attributes), [x])


@pytest.mark.parametrize("post", POST)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_svm_without_supports(post: str, dtype: Any) -> None:
    rng = np.random.default_rng(1)
    x = floats(rng, 7, 4, dtype=dtype)
    coefficients = floats(rng, 12).tolist()
    proto = model_of("SVMClassifier", [x], [object, np.float32], coefficients=coefficients, rho=[0.2], post_transform=post,
                     classlabels_strings=["a", "b", "c"])  # fmt: skip
    agree(proto, [x])


@pytest.mark.parametrize("kind", ["LINEAR", "POLY", "RBF", "SIGMOID", ""])
@pytest.mark.parametrize("one_class", [0, 1])
def test_svm_regressor(kind: str, one_class: int) -> None:
    rng = np.random.default_rng(2)
    x = floats(rng, 400, 6)
    count = 300 if kind else 0
    attributes: dict[str, Any] = {"coefficients": (floats(rng, count or 6) / 10).tolist(), "rho": [0.1], "one_class": one_class}
    if kind:
        attributes |= {"kernel_type": kind, "kernel_params": [0.2, 0.5, 3.0], "n_supports": count,
                       "support_vectors": floats(rng, count * 6).tolist()}  # fmt: skip
    agree(model_of("SVMRegressor", [x], [np.float32], **attributes), [x], tolerance=2e-5)


def test_svm_of_values_that_are_not_finite() -> None:
    """Such a run is computed by the definition."""
    rng = np.random.default_rng(3)
    x = floats(rng, 9, 3, special=True)
    proto = model_of("SVMRegressor", [x], [np.float32], kernel_type="RBF", kernel_params=[0.2, 0.0, 0.0], n_supports=4,
                     support_vectors=floats(rng, 12).tolist(), coefficients=floats(rng, 4).tolist(), rho=[0.1])  # fmt: skip
    agree(proto, [x], kernel=False)


# --- linear models and features


@pytest.mark.parametrize("post", POST)
@pytest.mark.parametrize("classes", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_linear_models(post: str, classes: int, dtype: Any) -> None:
    rng = np.random.default_rng(classes)
    x = np.abs(floats(rng, 9, 4, dtype=dtype)) if post == "PROBIT" else floats(rng, 9, 4, dtype=dtype)
    both = {"coefficients": (floats(rng, 4 * classes) / 4).tolist(), "intercepts": floats(rng, classes).tolist(), "post_transform": post}
    agree(model_of("LinearRegressor", [x], [np.float32], targets=classes, **both), [x])
    labels = [5, 3, -1, 8, 9, 10, 11][: max(classes, 2)]
    agree(model_of("LinearClassifier", [x], [np.int64, np.float32], classlabels_ints=labels, **both), [x])
    texts = [f"label {v}" for v in labels]
    agree(model_of("LinearClassifier", [x], [object, np.float32], classlabels_strings=texts, **both), [x])


def test_linear_models_of_special_values_and_many_rows() -> None:
    rng = np.random.default_rng(5)
    x = floats(rng, 3000, 40, special=True)
    both = {"coefficients": (floats(rng, 40 * 3) / 4).tolist(), "intercepts": floats(rng, 3).tolist(), "post_transform": "SOFTMAX"}
    agree(model_of("LinearClassifier", [x], [np.int64, np.float32], classlabels_ints=[4, 5, 6], **both), [x], tolerance=2e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.int32])
@pytest.mark.parametrize("shape", [(6, 3), (3,)])
def test_scaler_and_normalizer(dtype: Any, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(6)
    x = floats(rng, *shape, special=np.dtype(dtype).kind == "f", dtype=dtype)
    if len(shape) == 2:
        x[2] = 0
    for attributes in ({"offset": [0.5, 1.0, -2.0], "scale": [2.0, 0.1, 3.0]}, {"offset": [0.25]}, {"scale": [0.5]}, {}):
        agree(model_of("Scaler", [x], [np.float32], **attributes), [x])
    for norm in ("MAX", "L1", "L2"):
        agree(model_of("Normalizer", [x], [np.float32], norm=norm), [x])


def test_imputer_and_binarizer() -> None:
    rng = np.random.default_rng(7)
    for dtype in (np.float32, np.float64):
        x = floats(rng, 8, 3, special=True, dtype=dtype)
        for replaced in (float("nan"), 0.0):
            for values in ([1.5], [1.0, 2.0, 3.0]):
                agree(model_of("Imputer", [x], [dtype], imputed_value_floats=values, replaced_value_float=replaced), [x])
        agree(model_of("Binarizer", [x], [dtype], threshold=0.25), [x])
    n = rng.integers(-2, 3, (8, 3))
    agree(model_of("Imputer", [n], [np.int64], imputed_value_int64s=[7, 8, 9], replaced_value_int64=-1), [n])
    agree(model_of("Binarizer", [n], [np.int64], threshold=-0.5), [n])


def test_feature_vectorizer() -> None:
    rng = np.random.default_rng(8)
    xs = [floats(rng, 5, 3), floats(rng, 5, 2), floats(rng, 5, 4)]
    agree(model_of("FeatureVectorizer", xs, [np.float32], inputdimensions=[3, 2, 4]), xs)
    agree(model_of("FeatureVectorizer", xs, [np.float32], inputdimensions=[2, 4, 4]), xs)
    whole = [rng.integers(0, 5, (5, 2))]
    agree(model_of("FeatureVectorizer", whole, [np.float32]), whole)
