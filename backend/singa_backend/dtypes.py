"""Conversion between ONNX's element types and NumPy's dtypes."""

from __future__ import annotations

from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
from onnx import TensorProto, helper

from .errors import InvalidModel

DTypeLike: TypeAlias = np.dtype[Any] | type[Any] | str
"""A value that `np.dtype` accepts: a dtype, a type such as `np.float32` or `ml_dtypes.bfloat16`, or a name."""

STRING = np.dtype(object)

_NUMPY: dict[int, np.dtype[Any]] = {
    code: (STRING if code == TensorProto.STRING else np.dtype(helper.tensor_dtype_to_np_dtype(code)))
    for code in TensorProto.DataType.values()
    if code != TensorProto.UNDEFINED
}
_ONNX = {dtype: code for code, dtype in _NUMPY.items()}
# A type string such as 'tensor(float16)' holds the lower-case name of the enum.
_NAMES: dict[int, str] = {code: TensorProto.DataType.Name(code).lower() for code in _NUMPY}
_BY_NAME = {name: _NUMPY[code] for code, name in _NAMES.items()}

HALVES = frozenset(np.dtype(t) for t in (np.float16, ml_dtypes.bfloat16))
FLOAT8 = frozenset(d for d in _ONNX if d.name.startswith("float8_"))
FLOAT6 = frozenset(d for d in _ONNX if d.name.startswith("float6_"))
FLOAT4 = frozenset(d for d in _ONNX if d.name.startswith("float4_"))
# Storage formats: operators compute on them in float32 and round the result once.
NARROW_FLOATS = HALVES | FLOAT8 | FLOAT6 | FLOAT4
SUB_BYTE_INTS = frozenset(np.dtype(t) for t in (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2))
FLOATS = NARROW_FLOATS | {np.dtype(np.float32), np.dtype(np.float64)}

_FP4 = np.array([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4], np.float32)
_NF4 = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip
FOUR_BIT_CODES = (np.concatenate([_FP4, -_FP4]), np.array(_NF4, np.float32))
"""The values of the 16 codes of onnxruntime's two kinds: floats of 4 bits, and quantiles of the normal distribution (QLoRA)."""

# CuPy has no arrays of these dtypes; their values stay on the host, whatever the device.
HOST_ONLY = FLOAT8 | FLOAT6 | FLOAT4 | SUB_BYTE_INTS | {STRING}


def numpy_dtype(code: int) -> np.dtype[Any]:
    """The NumPy dtype of an ONNX element type code (`TensorProto.DataType`); strings are object arrays.

    Raises:
        InvalidModel: ONNX does not define the code.
    """
    try:
        return _NUMPY[int(code)]
    except KeyError:
        raise InvalidModel(f"an element type must be a code of TensorProto.DataType, got {code}", code="SX108") from None


def is_code(code: int) -> bool:
    """Whether ONNX defines this element type code."""
    return code in _NUMPY


def onnx_code(dtype: DTypeLike) -> int:
    """The ONNX element type code of a NumPy dtype; raises KeyError if ONNX has none."""
    dtype = np.dtype(dtype)
    return _ONNX[STRING if dtype.kind in "US" else dtype]


def known(dtype: DTypeLike) -> bool:
    """Whether ONNX has an element type for this NumPy dtype."""
    return np.dtype(dtype) in _ONNX or np.dtype(dtype).kind in "US"


def onnx_name(dtype: DTypeLike) -> str:
    """ONNX's name of a NumPy dtype ('float', 'int64', 'string', ...), or NumPy's name if ONNX has none."""
    try:
        return _NAMES[onnx_code(dtype)]
    except KeyError:
        return str(np.dtype(dtype))


def from_type_string(text: str) -> np.dtype[Any] | None:
    """The dtype of a schema's type string, such as 'tensor(float)'; None if it is not a tensor type."""
    if text.startswith("tensor("):
        return _BY_NAME.get(text[7:-1])
    return None


def integer_info(dtype: DTypeLike) -> ml_dtypes.iinfo:
    """The bounds of an integer dtype, including those of 4 and 2 bits."""
    return ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]  # ml_dtypes does not annotate it


def float_info(dtype: DTypeLike) -> Any:
    """The limits of a float dtype, including those that `np.finfo` does not support."""
    return ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]  # ml_dtypes does not annotate it


def is_float(dtype: DTypeLike) -> bool:
    """Whether ONNX counts the dtype as a float (bfloat16 and the 8-, 6- and 4-bit floats included)."""
    return np.dtype(dtype) in FLOATS
