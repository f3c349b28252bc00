"""Kernels of ai.onnx.ml's vectors, features, categories and texts against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa_backend import SingaBackend
from singa_backend.errors import InvalidInput

ML = "ai.onnx.ml"


def model_of(
    name: str, xs: list[np.ndarray], outputs: list[Any], domain: str = ML, version: int = 1, **attributes: Any
) -> ModelProto:
    """A model of one operator; the dtypes of its outputs; shapes are open."""
    given = [value(f"x{i}", x.dtype) for i, x in enumerate(xs)]
    made = [value(f"y{i}", d) for i, d in enumerate(outputs)]
    node = helper.make_node(name, [v.name for v in given], [v.name for v in made], domain=domain, **attributes)
    imports = (
        [helper.make_opsetid("", 18), helper.make_opsetid(domain, version)] if domain else [helper.make_opsetid("", version)]
    )
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
@pytest.mark.parametrize(
    "classes, chances, rows", [(2, False, 5), (2, True, 5), (4, True, 3), (4, True, 40), (3, False, 300), (9, True, 2)]
)
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
    both = {
        "coefficients": (floats(rng, 4 * classes) / 4).tolist(),
        "intercepts": floats(rng, classes).tolist(),
        "post_transform": post,
    }
    agree(model_of("LinearRegressor", [x], [np.float32], targets=classes, **both), [x])
    labels = [5, 3, -1, 8, 9, 10, 11][: max(classes, 2)]
    agree(model_of("LinearClassifier", [x], [np.int64, np.float32], classlabels_ints=labels, **both), [x])
    texts = [f"label {v}" for v in labels]
    agree(model_of("LinearClassifier", [x], [object, np.float32], classlabels_strings=texts, **both), [x])


def test_linear_models_of_special_values_and_many_rows() -> None:
    rng = np.random.default_rng(5)
    x = floats(rng, 3000, 40, special=True)
    both = {
        "coefficients": (floats(rng, 40 * 3) / 4).tolist(),
        "intercepts": floats(rng, 3).tolist(),
        "post_transform": "SOFTMAX",
    }
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


@pytest.mark.parametrize("features", [3, 40])
def test_a_norm_that_float32_cannot_have_is_infinite(features: int) -> None:
    """The quotients are 0, as those of onnxruntime and of scikit-learn; float64 has the norm."""
    x = np.zeros((2, features), np.float32)
    x[0, :3], x[1, :3] = (3e38, 2e38, -1e38), (1e38, 1e38, -1e38)
    model = model_of("Normalizer", [x], [np.float32], norm="L1")
    wide = model_of("Normalizer", [x.astype(np.float64)], [np.float32], norm="L1")
    for rows in (x, x[:1], x[1:]):
        agree(model, [rows])
        agree(wide, [rows.astype(np.float64)])
    assert not SingaBackend.run_model(model, [x[:1]])[0].any()
    assert abs(SingaBackend.run_model(model, [x[1:]])[0][0, 0] - 1 / 3) < 1e-6
    assert SingaBackend.run_model(wide, [x[:1].astype(np.float64)])[0][0, 0] == np.float32(0.5)


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


# --- categories


def texts(rng: np.random.Generator, *shape: int, words: tuple[str, ...] = ("red", "green", "", "blue", "x")) -> np.ndarray:
    return np.array(rng.choice(words, shape), object).reshape(shape)


def tensor(values: Any, dtype: Any, name: str = "t") -> Any:
    return numpy_helper.from_array(np.array(values, dtype), name)


def test_label_encoder() -> None:
    rng = np.random.default_rng(9)
    s, n = texts(rng, 9, 2), rng.integers(-3, 8, (9, 2))
    f = np.where(rng.random((9, 2)) < 0.2, np.nan, rng.integers(-2, 3, (9, 2)) / 2).astype(np.float32)
    words, whole, real = ["red", "blue", "green", "red"], [5, -1, 3, 5], [0.5, float("nan"), -1.0, 0.5]
    for keys, name, x in ((words, "strings", s), (whole, "int64s", n), (real, "floats", f)):
        for values, other, dtype in ((["a", "b", "c", "d"], "strings", object), ([9, 8, 7, 6], "int64s", np.int64),
                                     ([0.1, 0.2, 0.3, 0.4], "floats", np.float32)):  # fmt: skip
            attributes = {f"keys_{name}": keys, f"values_{other}": values}
            agree(model_of("LabelEncoder", [x], [dtype], version=2, **attributes), [x])
    sparse = [10**9, -(10**9), 7, 8]
    agree(
        model_of("LabelEncoder", [n], [object], version=2, keys_int64s=sparse, values_strings=["a", "b", "c", "d"]),
        [n],
        kernel=False,
    )
    double = f.astype(np.float64)
    attributes = {"keys_tensor": tensor(real, np.float64), "values_tensor": tensor([1, 2, 3, 4], np.int64),
                  "default_tensor": tensor([77], np.int64)}  # fmt: skip
    agree(model_of("LabelEncoder", [double], [np.int64], version=4, **attributes), [double])
    agree(model_of("LabelEncoder", [s], [np.int64], classes_strings=["red", "x", "red"], default_int64=-5), [s])
    agree(model_of("LabelEncoder", [n], [object], classes_strings=["red", "x", "red"]), [n])
    agree(model_of("CategoryMapper", [s], [np.int64], cats_strings=words, cats_int64s=whole), [s])
    agree(model_of("CategoryMapper", [n], [object], cats_strings=words, cats_int64s=whole), [n])


@pytest.mark.parametrize("count", [3, 700])
def test_one_hot_encoder(count: int) -> None:
    rng = np.random.default_rng(10)
    s, n = texts(rng, 9, 2), rng.integers(-3, 8, (9, 2))
    f = floats(rng, 9, 2, special=True) * 3
    names = ["red", "blue", "green", *map(str, range(count - 3))]
    agree(model_of("OneHotEncoder", [s], [np.float32], cats_strings=names), [s])
    numbers = [4, -1, 0, *range(10, 7 + count)]
    for x in (n, f, n.astype(np.int32), f.astype(np.float64)):
        agree(model_of("OneHotEncoder", [x], [np.float32], cats_int64s=numbers), [x])
    known = np.array([[4], [0]])
    proto = model_of("OneHotEncoder", [known], [np.float32], cats_int64s=numbers, zeros=0)
    agree(proto, [known])
    rep = SingaBackend.prepare(proto)
    rep.run([known])
    with pytest.raises(Exception, match="must be a category"):
        rep.run([known + 1])


def test_zip_map() -> None:
    rng = np.random.default_rng(11)
    x = floats(rng, 6, 3)
    node = [helper.make_node("ZipMap", ["x"], ["y"], domain=ML, classlabels_strings=["a", "b", "c"])]
    entry = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    out = helper.make_value_info("y", helper.make_sequence_type_proto(entry))
    graph = helper.make_graph(node, "g", [helper.make_tensor_value_info("x", 1, [None, 3])], [out])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid(ML, 1)], ir_version=10)
    agree(proto, [x])


# --- neighbours


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("metric", ["euclidean", "sqeuclidean"])
def test_cdist(dtype: Any, metric: str) -> None:
    rng = np.random.default_rng(12)
    points = (floats(rng, 500, 7, dtype=dtype) + 1000).astype(dtype)
    x = np.concatenate([points[:5], (floats(rng, 200, 7) + 1000).astype(dtype)])
    proto = model_of("CDist", [x, points], [dtype], domain="com.microsoft", metric=metric)
    proto.graph.initializer.append(tensor(points, dtype, "x1"))
    del proto.graph.input[1]
    agree(proto, [x])
    assert not SingaBackend.prepare(proto).run([x])[0][np.arange(5), np.arange(5)].any()
    bad = x.copy()
    bad[1, 1] = np.nan
    agree(proto, [bad], kernel=False)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("shape, k", [((1, 2000), 5), ((40, 300), 7), ((3, 5, 64), 8), ((2, 9), 1), ((500, 131), 16)])
def test_top_k(largest: int, shape: tuple[int, ...], k: int) -> None:
    rng = np.random.default_rng(k)
    many = rng.integers(0, 50, shape).astype(np.float32)
    for x in (
        many,
        floats(rng, *shape),
        floats(rng, *shape, special=True),
        np.zeros(shape, np.float32),
        -many.astype(np.float64),
    ):
        proto = model_of("TopK", [x, np.array([k])], [x.dtype, np.int64], domain="", version=11, largest=largest)
        proto.graph.initializer.append(tensor([k], np.int64, "x1"))
        del proto.graph.input[1]
        agree(proto, [x])


def test_array_feature_extractor() -> None:
    rng = np.random.default_rng(13)
    x, y, s = floats(rng, 4, 5), np.array([[3, 0, 4]]), texts(rng, 4, 5)
    proto = model_of("ArrayFeatureExtractor", [x, y], [np.float32])
    agree(proto, [x, y])
    agree(model_of("ArrayFeatureExtractor", [x[0], y], [np.float32]), [x[0], y])
    agree(model_of("ArrayFeatureExtractor", [s, y], [object]), [s, y])
    agree(model_of("ArrayFeatureExtractor", [s[0], y], [object]), [s[0], y])
    rep = SingaBackend.prepare(proto)
    rep.run([x, y])
    with pytest.raises(Exception, match="SX401"):
        rep.run([x, y - 1])


# --- texts


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("skips", [0, 2])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 3), (2, 2), (3, 3)])
def test_tf_idf(mode: str, text: bool, skips: int, lengths: tuple[int, int]) -> None:
    rng = np.random.default_rng(14)
    words = ["a", "b", "c", "d"] if text else [3, -1, 10**12, 0]
    pool = [words[i] for i in (0, 1, 2, *(0, 1, 1, 0, 2, 2), *(0, 1, 2, 2, 1, 0))]
    attributes: dict[str, Any] = {
        "mode": mode, "ngram_counts": [0, 3, 9], "ngram_indexes": [3, 0, 1, 2, 6, 5, 4, 8], "max_skip_count": skips,
        "min_gram_length": lengths[0], "max_gram_length": lengths[1], "weights": [0.5, 1.0, 2.0, 0.25, 3.0, 1.5, 0.1, 1.0],
        "pool_strings" if text else "pool_int64s": pool,
    }  # fmt: skip
    for shape in ((20, 9), (6, 9), (5,), (3, 1)):
        x = np.array([words[i] for i in rng.integers(0, 4, shape).reshape(-1)], object if text else np.int64).reshape(shape)
        agree(model_of("TfIdfVectorizer", [x], [np.float32], domain="", version=9, **attributes), [x])


def test_tf_idf_of_many_words() -> None:
    """Pairs of so many words are searched; texts of other lengths need no other plan."""
    rng = np.random.default_rng(15)
    words = [f"w{i}" for i in range(1500)]
    pairs = sorted({(int(a), int(b)) for a, b in rng.integers(0, 1500, (900, 2))})
    pool = [*words, *(words[i] for p in pairs for i in p)]
    attributes = {"mode": "TF", "ngram_counts": [0, 1500], "ngram_indexes": list(range(1500 + len(pairs))), "max_skip_count": 0,
                  "min_gram_length": 1, "max_gram_length": 2, "pool_strings": pool}  # fmt: skip
    x = np.array([[words[i] for p in pairs[k : k + 40] for i in p] for k in range(0, 200, 20)], object)
    agree(model_of("TfIdfVectorizer", [x], [np.float32], domain="", version=9, **attributes), [x])


@pytest.mark.parametrize("expression, kernel", [("[a-zA-Z0-9_]+", True), (".", True), (r"[\w ]+", True), ("a|ab", False)])
@pytest.mark.parametrize("least", [1, 2])
def test_tokenizer(expression: str, kernel: bool, least: int) -> None:
    pytest.importorskip("re2")
    if expression == "." and least > 1:
        pytest.skip("characters")
    x = np.array(["a bc, déf", "", "x_1 9-8 \u0661 ab", "ß ab"], object)
    proto = model_of(
        "Tokenizer", [x], [object], domain="com.microsoft", tokenexp=expression, mincharnum=least, mark=0, pad_value="#"
    )
    agree(proto, [x], kernel)
    agree(proto, [x.reshape(2, 2)], kernel)


def test_string_normalizer() -> None:
    x = np.array(["Ab", "the", "THE", "Straße", ""], object)
    for case in ("NONE", "LOWER", "UPPER"):
        for stops in ({}, {"stopwords": ["the"]}, {"stopwords": ["the"], "is_case_sensitive": 1}):
            proto = model_of("StringNormalizer", [x], [object], domain="", version=10, case_change_action=case, **stops)
            agree(proto, [x])
            agree(proto, [x.reshape(1, 5)])


def test_texts_of_other_lengths() -> None:
    """A plan counts words of texts of any length."""
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["a"]),
        helper.make_node("StringNormalizer", ["a"], ["b"], case_change_action="LOWER"),
        helper.make_node("Tokenizer", ["b"], ["c"], "t", None, "com.microsoft", tokenexp="[a-z]+", mincharnum=1, mark=0,
                         pad_value="#"),
        helper.make_node("Flatten", ["c"], ["d"]),
        helper.make_node("TfIdfVectorizer", ["d"], ["y"], mode="TF", ngram_counts=[0, 3], ngram_indexes=[0, 1, 2, 3],
                         max_skip_count=0, min_gram_length=1, max_gram_length=2, pool_strings=["a", "b", "c", "a", "b"]),
    ]  # fmt: skip
    pytest.importorskip("re2")
    graph = helper.make_graph(nodes, "g", [value("x", object)], [value("y", np.float32)], [tensor([-1], np.int64, "flat")])
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
    rep = SingaBackend.prepare(proto)
    for x in (["A b", "c"], ["c c c c a b", "B"], ["", "a"], ["", ""], ["a b a b", "b a"]):
        given = np.array(x, object).reshape(2, 1)
        for a, b in zip(rep.run([given]), SingaBackend.run_model(proto, [given], optimize=0), strict=True):
            same(a, b, 0)
    assert not any("definition" in s.kernel for s in rep.profile([given]).steps)


def test_later_runs_refuse_what_is_not_a_string() -> None:
    """Plans skip checks that cannot fail for equal shapes and dtypes; elements of an array of objects may be anything."""
    counts = model_of("TfIdfVectorizer", [np.array(["a"], object)], [np.float32], "", 18, mode="TF", ngram_counts=[0],
                      ngram_indexes=[0, 1], pool_strings=["a", "b"], max_skip_count=0, min_gram_length=1,
                      max_gram_length=1)  # fmt: skip
    encoder = model_of("LabelEncoder", [np.array(["a"], object)], [np.int64], classes_strings=["a", "b"])
    for proto, expected in ((counts, [1, 1]), (encoder, [0, 1])):
        rep = SingaBackend.prepare(proto)
        given = np.array(["a", "b"], object)
        for _ in range(3):
            np.testing.assert_array_equal(rep.run([given])[0], expected)
        for wrong in (3, None, b"a", ["a"], 0.5):
            other = np.empty(2, object)
            other[:] = ["a", wrong]
            with pytest.raises(InvalidInput, match="must hold strings only"):
                rep.run([other])
        np.testing.assert_array_equal(rep.run([np.array(["a", np.str_("b")], object)])[0], expected)
        np.testing.assert_array_equal(rep.run([np.array(["a", "b"])])[0], expected)


def test_texts_that_are_outputs_and_read_again() -> None:
    """Strings between kernels are lists; outputs are arrays of their own."""
    nodes = [
        helper.make_node("Reshape", ["x", "flat"], ["a"]),
        helper.make_node("StringNormalizer", ["a"], ["b"], case_change_action="UPPER"),
        helper.make_node("StringConcat", ["b", "b"], ["c"]),
        helper.make_node("Reshape", ["b", "column"], ["d"]),
    ]
    outputs = [value(n, object) for n in "abcd"]
    shapes = [tensor([-1], np.int64, "flat"), tensor([-1, 1], np.int64, "column")]
    graph = helper.make_graph(nodes, "g", [value("x", object)], outputs, shapes)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    rep = SingaBackend.prepare(proto)
    kept = []
    for words in (["p", "q"], ["r", "s"], ["t", "u"]):
        given = np.array([words], object)
        kept.append((rep.run([given]), SingaBackend.run_model(proto, [given], optimize=0)))
        kept[-1][0][0][0] = "changed"
        assert given[0, 0] == words[0]
        kept[-1][1][0][0] = "changed"
    for found, expected in kept:
        for a, b in zip(found, expected, strict=True):
            same(a, b, 0)


def test_values_that_are_views() -> None:
    """A later run reads the values of that run, if a Transpose is a view of them."""
    rng = np.random.default_rng(5)
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Transpose", ["a"], ["b"], perm=[1, 0, 2]),
        helper.make_node("TopK", ["b", "k"], ["y0", "i0"]),
        helper.make_node("Neg", ["j"], ["c"]),
        helper.make_node("Transpose", ["c"], ["d"]),
        helper.make_node("ArrayFeatureExtractor", ["b", "d"], ["y1"], domain=ML),
    ]
    given = [value("x", np.float32), value("j", np.int64)]
    outputs = [value("y0", np.float32), value("i0", np.int64), value("y1", np.float32)]
    graph = helper.make_graph(nodes, "g", given, outputs, [tensor([2], np.int64, "k")])
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(ML, 1)]
    proto = helper.make_model(graph, opset_imports=imports, ir_version=10)
    rep = SingaBackend.prepare(proto)
    for _ in range(3):
        xs = [floats(rng, 3, 4, 40), -rng.integers(0, 40, (2, 3))]
        for a, b in zip(rep.run(xs), SingaBackend.run_model(proto, xs, optimize=0), strict=True):
            same(a, b, 0)
    assert not any("definition" in s.kernel for s in rep.profile(xs).steps)
