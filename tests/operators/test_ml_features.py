"""ai.onnx.ml's feature operators; only ArrayFeatureExtractor, Binarizer and LabelEncoder-4 have official cases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

NAN = float("nan")
F = np.float32
ML = {"opset": 1, "domain": "ai.onnx.ml"}
X = np.array([[1, -2, 3], [-1, -4, -2], [0, 0, 0]], F)


def strings(values: Any) -> np.ndarray:
    return np.array(values, dtype=str).astype(object)


@pytest.mark.parametrize("dtype", [F, np.float64, np.int64, np.int32, object])
def test_array_feature_extractor(check: Any, fails: Any, dtype: Any) -> None:
    x = np.arange(8).reshape(2, 2, 2)
    x = strings(x) if dtype is object else x.astype(dtype)
    check("ArrayFeatureExtractor", [x, np.array([[1, 0], [1, 1]])], [x[..., [1, 0, 1, 1]]], **ML)
    check("ArrayFeatureExtractor", [x[0, 0], np.array(1)], [x[0, :1, 1:]], **ML)
    check("ArrayFeatureExtractor", [x, np.zeros(0, np.int64)], [x[..., :0]], **ML)
    fails("ArrayFeatureExtractor", [x, np.array([2])], "index must be in .* got 2", **ML)
    fails("ArrayFeatureExtractor", [x, np.array([-1])], "index must be in .* got -1", **ML)


def test_binarizer(check: Any) -> None:
    check("Binarizer", [np.array([NAN, 0.5, 0.6, -np.inf], F)], [np.array([0, 0, 1, 0], F)], threshold=0.5, **ML)
    big = np.array([2**24, 2**24 + 1, 2**53 + 1, -(2**63)])
    check("Binarizer", [big], [np.array([0, 1, 1, 0])], threshold=float(2**24), **ML)
    check("Binarizer", [big], [np.array([1, 1, 1, 1])], threshold=-1e30, **ML)
    check("Binarizer", [np.array([-1, 0], np.int32)], [np.array([0, 1], np.int32)], threshold=-0.5, **ML)
    check("Binarizer", [np.array(1.0)], [np.array(1.0)], **ML)


def test_feature_vectorizer(check: Any, fails: Any) -> None:
    two, three = np.ones((2, 2), np.int64), np.full((2, 3), 2, np.int64)
    y = np.array([[1, 1, 2, 2, 2]] * 2, F)
    check("FeatureVectorizer", [two, three], [y], inputdimensions=[2, 3], **ML)
    check("FeatureVectorizer", [two, three], [np.array([[1, 2, 2, 2, 0]] * 2, F)], inputdimensions=[1, 4], **ML)
    check("FeatureVectorizer", [two], [y[:, :2]], **ML)
    check("FeatureVectorizer", [X[0], X[1, :1]], [np.array([[1, -2, 3, -1]], F)], inputdimensions=[3, 1], **ML)
    fails("FeatureVectorizer", [two, three[:1]], "rows", inputdimensions=[2, 3], **ML)
    fails("FeatureVectorizer", [two, three], "inputdimensions", inputdimensions=[2], **ML)


def test_imputer(check: Any, fails: Any) -> None:
    x = np.array([[NAN, 1], [2, NAN]], F)
    check("Imputer", [x], [np.array([[7, 1], [2, 8]], F)], imputed_value_floats=[7.0, 8.0], replaced_value_float=NAN, **ML)
    check("Imputer", [x.astype(np.float64)], [np.array([[NAN, 9], [2, NAN]])], imputed_value_floats=[9.0],
          replaced_value_float=1.0, **ML)  # fmt: skip
    big = np.array([[2**53 + 1, 2**53]])
    check("Imputer", [big], [np.array([[-5, 2**53]])], imputed_value_int64s=[-5], replaced_value_int64=2**53 + 1, **ML)
    small = np.array([3, 4], np.int32)
    check("Imputer", [small], [np.array([1, 4], np.int32)], imputed_value_int64s=[1, 2], replaced_value_int64=3, **ML)
    check("Imputer", [small], [small], imputed_value_int64s=[1], replaced_value_int64=2**32 + 3, **ML)
    fails("Imputer", [x], "imputed_value_floats", imputed_value_int64s=[1], **ML)
    fails("Imputer", [x], "1 or 2 values for x of shape", imputed_value_floats=[1.0, 2.0, 3.0], **ML)
    fails("Imputer", [small], "must be in the range of int32", imputed_value_int64s=[2**40], **ML)


@pytest.mark.parametrize("dtype", [F, np.float64, np.int64, np.int32])
def test_normalizer(check: Any, dtype: Any) -> None:
    x = X.astype(dtype)
    rows = {"MAX": [3, -1, 1], "L1": [6, 7, 1], "L2": [14**0.5, 21**0.5, 1]}
    for norm, divisors in rows.items():
        y = (X / np.array(divisors)[:, None]).astype(F)
        check("Normalizer", [x], [y], norm=norm, **ML)
        check("Normalizer", [x[1]], [y[1]], norm=norm, **ML)
    check("Normalizer", [x[:0]], [X[:0]], norm="MAX", **ML)


def test_scaler(check: Any, fails: Any) -> None:
    check("Scaler", [X], [(X - 1) * 2], offset=[1.0], scale=[2.0], **ML)
    check("Scaler", [X], [(X - np.array([1, 2, 3], F)) * np.array([2, 0, 1], F)], offset=[1.0, 2, 3], scale=[2.0, 0, 1], **ML)
    check("Scaler", [np.array([2**24 + 1])], [np.array([1], F)], offset=[float(2**24)], scale=[1.0], **ML)
    check("Scaler", [X.astype(np.float64)], [X], **ML)
    fails("Scaler", [X], "equal lengths, got 1 and 3", offset=[1.0], scale=[1.0, 2, 3], **ML)
    fails("Scaler", [X], "1 or 3 values for x of shape", offset=[1.0, 2], scale=[1.0, 2], **ML)
    fails("Normalizer", [X], "L0", norm="L0", **ML)


def test_category_mapper(check: Any, fails: Any) -> None:
    cats = {"cats_int64s": [5, 2**60 + 1], "cats_strings": ["a", "b"], **ML}
    check("CategoryMapper", [strings([["a", "b"], ["z", ""]])], [np.array([[5, 2**60 + 1], [-1, -1]])], **cats)
    check("CategoryMapper", [np.array([2**60 + 1, 2**60])], [strings(["b", "_Unused"])], **cats)
    check("CategoryMapper", [np.array(7)], [np.array("none", object)], default_string="none", **cats)
    check("CategoryMapper", [np.zeros((0, 2), np.int64)], [np.zeros((0, 2), object)], **cats)
    fails("CategoryMapper", [np.array([1])], "keys", cats_int64s=[1], cats_strings=["a", "b"], **ML)


def test_label_encoder_1(check: Any) -> None:
    names = {"classes_strings": ["a", "b", "a"], **ML}
    check("LabelEncoder", [strings(["b", "a", "z"])], [np.array([1, 0, -1])], **names)
    check("LabelEncoder", [np.array([[2, 3], [-1, 1]])], [strings([["a", "_Unused"], ["_Unused", "b"]])], **names)
    check("LabelEncoder", [strings(["q"])], [np.array([9])], default_int64=9, **names)


@pytest.mark.parametrize("opset", [2, 3, 4])
def test_label_encoder(check: Any, opset: int) -> None:
    domain = {"opset": opset, "domain": "ai.onnx.ml"}
    floats = np.array([1, NAN, 2.5, 0], F)
    check("LabelEncoder", [floats], [np.array([1, 2, -1, 3])], keys_floats=[1.0, NAN, -0.0], values_int64s=[1, 2, 3], **domain)
    check("LabelEncoder", [floats], [np.array([0.5, 0, 0, 0], F)], keys_floats=[1.0], values_floats=[0.5], **domain)
    check("LabelEncoder", [strings(["x", "y"])], [strings(["1", "?"])], keys_strings=["x"], values_strings=["1"],
          default_string="?", **domain)  # fmt: skip
    check("LabelEncoder", [np.array([[2**53 + 1]])], [np.array([[-0.25]], F)], keys_int64s=[2**53], values_floats=[1.0],
          default_float=-0.25, **domain)  # fmt: skip
    check("LabelEncoder", [np.array([1])], [strings(["last"])], keys_int64s=[1, 1], values_strings=["first", "last"], **domain)
    out = check("LabelEncoder", [np.array([7])], [np.array([-0.0], F)], keys_int64s=[1], values_floats=[1.0], **domain)
    assert np.signbit(out[0]).all()


@pytest.mark.parametrize("key", [np.int16, np.int32, np.int64, F, np.float64, object])
@pytest.mark.parametrize("value", [np.int16, np.int32, np.int64, F, np.float64, object])
def test_label_encoder_4_tensors(check: Any, key: Any, value: Any) -> None:
    def array(values: list[int], dtype: Any) -> np.ndarray:
        return strings(values) if dtype is object else np.array(values, dtype)

    keys, values = (numpy_helper.from_array(a) for a in (array([1, 2], key), array([30, 40], value)))
    attributes = {"keys_tensor": keys, "values_tensor": values, "opset": 4, "domain": "ai.onnx.ml"}
    x = array([2, 3, 1], key)
    default = numpy_helper.from_array(array([9], value))
    check("LabelEncoder", [x], [array([40, 9, 30], value)], default_tensor=default, **attributes)
    y = array([40, -1 if value in (np.int16, np.int32, np.int64) else 0, 30], value)
    if value is object:
        y[1] = "_Unused"
    check("LabelEncoder", [x], [y], **attributes)


def test_label_encoder_refuses(fails: Any) -> None:
    domain = {"opset": 4, "domain": "ai.onnx.ml"}
    fails("LabelEncoder", [np.array([1])], "got int64 and str", keys_strings=["a"], values_int64s=[1], **domain)
    fails(
        "LabelEncoder",
        [np.array([1])],
        "keys and values must have equal lengths, got 2 and 1",
        keys_int64s=[1, 2],
        values_int64s=[1],
        **domain,
    )
    wrong = numpy_helper.from_array(np.array([1, 2]))
    fails("LabelEncoder", [np.array([1])], "default_tensor", keys_int64s=[1], values_int64s=[1], default_tensor=wrong, **domain)


@pytest.mark.parametrize("dtype", [F, np.float64, np.int64, np.int32])
def test_one_hot_encoder(check: Any, fails: Any, dtype: Any) -> None:
    cats = {"cats_int64s": [4, 1, -2], **ML}
    x = np.array([[1, 4], [5, -2]], dtype)
    y = np.array([[[0, 1, 0], [1, 0, 0]], [[0, 0, 0], [0, 0, 1]]], F)
    check("OneHotEncoder", [x], [y], **cats)
    check("OneHotEncoder", [x[0, 0]], [y[0, 0]], **cats)
    check("OneHotEncoder", [x[:0]], [y[:0]], **cats)
    fails("OneHotEncoder", [x], "zeros=0", zeros=0, **cats)
    check("OneHotEncoder", [x[0]], [y[0]], zeros=0, **cats)


def test_one_hot_encoder_of_strings_and_fractions(check: Any, fails: Any) -> None:
    check("OneHotEncoder", [strings(["b", "z"])], [np.array([[0, 1], [0, 0]], F)], cats_strings=["a", "b"], **ML)
    x = np.array([1.9, -2.5, NAN, np.inf, 0], F)
    check("OneHotEncoder", [x], [np.array([[1, 0], [0, 1], [0, 0], [0, 0], [0, 0]], F)], cats_int64s=[1, -2], **ML)
    fails("OneHotEncoder", [strings(["b"])], "categories", cats_int64s=[1], **ML)
