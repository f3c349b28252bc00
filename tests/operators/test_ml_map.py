"""CastMap, DictVectorizer, ZipMap: maps are dicts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, ValueInfoProto, helper

from singa_backend import prepare

F = np.float32
ML = {"opset": 1, "domain": "ai.onnx.ml"}


@pytest.mark.parametrize(("to", "dense", "sparse"), [
    ("TO_FLOAT", np.array([[-2.75, 1.5]], F), np.array([[-2.75, 0, 0, 1.5]], F)),
    ("TO_INT64", np.array([[-2, 1]]), np.array([[-2, 0, 0, 1]])),
    ("TO_STRING", np.array([["-2.750000", "1.500000"]]), np.array([["-2.750000", "0.f", "0.f", "1.500000"]])),
])  # fmt: skip
def test_cast_map(check: Any, to: str, dense: np.ndarray, sparse: np.ndarray) -> None:
    x = {3: 1.5, 0: -2.75}
    check("CastMap", [x], [dense], cast_to=to, **ML)
    check("CastMap", [x], [sparse], cast_to=to, map_form="SPARSE", max_map=4, **ML)


def test_cast_map_of_strings(check: Any, fails: Any) -> None:
    check("CastMap", [{-1: "1.5", 7: "2"}], [np.array([[1.5, 2]], F)], **ML)
    check("CastMap", [{2: "9007199254740993"}], [np.array([[2**53 + 1]])], cast_to="TO_INT64", **ML)
    check("CastMap", [{2: "x"}], [np.array([["x"]])], cast_to="TO_STRING", **ML)
    fails("CastMap", [{3: 1.0}], r"\[0, 3\)", map_form="SPARSE", max_map=3, **ML)
    fails("CastMap", [{-1: 1.0}], r"\[0, 3\)", map_form="SPARSE", max_map=3, **ML)
    fails("CastMap", [{1: 1.0}], "got 'TO_BOOL' and 'DENSE'", cast_to="TO_BOOL", **ML)


def test_dict_vectorizer(check: Any, fails: Any) -> None:
    words = {"string_vocabulary": ["a", "c", "b", "z"], **ML}
    check("DictVectorizer", [{"a": 4, "c": 8}], [np.array([4, 8, 0, 0])], **words)
    check("DictVectorizer", [{"z": 0.5}], [np.array([0, 0, 0, 0.5], F)], **words)
    check("DictVectorizer", [{"c": np.float64(0.1)}], [np.array([0, 0.1, 0, 0])], **words)
    check("DictVectorizer", [{5: "x"}], [np.array(["", "x"])], int64_vocabulary=[1, 5], **ML)
    fails("DictVectorizer", [{"q": 1.0}], "must be in the vocabulary, got 'q'", **words)


@pytest.mark.parametrize(("code", "value", "dtype"), [
    (TensorProto.FLOAT, 0.1, np.float32), (TensorProto.DOUBLE, 0.1, np.float64), (TensorProto.INT64, 2**53 + 1, np.int64),
])  # fmt: skip
def test_a_model_says_what_its_maps_hold(code: int, value: Any, dtype: Any) -> None:
    x = ValueInfoProto(name="x")
    x.type.map_type.key_type = TensorProto.STRING
    x.type.map_type.value_type.tensor_type.elem_type = code
    node = helper.make_node("DictVectorizer", ["x"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b"])
    graph = helper.make_graph([node], "g", [x], [helper.make_tensor_value_info("y", code, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 1), helper.make_opsetid("", 18)])
    (y,) = prepare(model).run([{"b": value}])
    assert y.dtype == dtype and y.tolist() == [0, dtype(value)]


def test_zip_map(check: Any, fails: Any) -> None:
    x = np.array([[0.25, 0.75], [1, 0]], F)
    check("ZipMap", [x], [[{"n": 0.25, "p": 0.75}, {"n": 1.0, "p": 0.0}]], classlabels_strings=["n", "p"], **ML)
    check("ZipMap", [x[0]], [[{7: 0.25, 3: 0.75}]], classlabels_int64s=[7, 3], **ML)
    check("ZipMap", [x[:0]], [[]], classlabels_int64s=[7, 3], **ML)
    fails("ZipMap", [x], "one column for each key", classlabels_int64s=[7], **ML)
