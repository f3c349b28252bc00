"""The table of element types, and the promise of which float computes in which."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto

from singa_backend import InvalidModel, dtypes


def test_every_onnx_type_has_one_dtype_and_back() -> None:
    codes = [c for c in TensorProto.DataType.values() if c != TensorProto.UNDEFINED]
    assert [dtypes.onnx_code(dtypes.numpy_dtype(c)) for c in codes] == codes
    assert [dtypes.from_type_string(f"tensor({dtypes.onnx_name(dtypes.numpy_dtype(c))})") for c in codes] == [
        dtypes.numpy_dtype(c) for c in codes
    ]
    with pytest.raises(InvalidModel):
        dtypes.numpy_dtype(9999)


def test_double_is_not_narrow() -> None:
    assert np.dtype(np.float64) not in dtypes.NARROW_FLOATS | dtypes.HOST_ONLY
    assert {d.itemsize for d in dtypes.FLOAT8 | dtypes.FLOAT6 | dtypes.FLOAT4} == {1}
    assert len(dtypes.FLOAT8) == 5 and len(dtypes.FLOAT6) == 2 and len(dtypes.FLOAT4) == 1


def test_double_computes_in_double(check: Any) -> None:
    x = np.array([1 + 2.0**-40])
    check("Mul", [x, x], [x * x], opset=14, rtol=0, atol=0)


def test_halves_round_once(check: Any) -> None:
    x = np.array([1.0, 2.0**-9], ml_dtypes.bfloat16)
    check("ReduceSum", [np.tile(x, 256)], [np.array([256.5], ml_dtypes.bfloat16)], opset=13, keepdims=1, rtol=0, atol=0)
