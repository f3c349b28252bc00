"""Conversions to and from tensors: dtypes, arrays, and arrays of other libraries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np

from singa_backend import dtypes
from singa_backend.devices.device import Device as Backend
from singa_backend.devices.device import cuda_ordinal, resolve
from singa_backend.errors import InvalidInput, NotExchangeable, SonnxError

from . import trace

float32, float16, int32, char, double, uchar, int64, bool_ = 0, 1, 2, 3, 4, 5, 6, 7
"""The dtypes of tensors, as SINGA numbers them; char is int8 and uchar uint8."""

DTypeLike: TypeAlias = dtypes.DTypeLike | int
"""One of the constants above, "int" (int32), "float" (float32), or what NumPy converts to a dtype."""


def from_device(data: Any, backend: Backend) -> Any:
    """An array of any library that is on a GPU, as one of the device, and shared if it is there; other values as they are."""
    with exchange(f"a {type(data).__name__}"):
        ordinal = cuda_ordinal(data)
        if ordinal is None:
            return data
        holder = resolve(f"CUDA:{ordinal}")
        array = holder.adopt(data)
    if not dtypes.known(array.dtype):
        raise InvalidInput(f"the data of a tensor must be numbers, bool or strings, got {array.dtype}", code="SX315")
    return array if str(holder) == str(backend) else backend.put(holder.get(array))


@contextmanager
def exchange(what: str) -> Iterator[None]:
    """The context of a use of DLPack; raises NotExchangeable if the other side or NumPy refuses it."""
    try:
        yield
    except trace.NotTraceable:
        raise
    except Exception as error:  # whatever the methods of another library raise
        text, hint = (error.message, error.hint) if isinstance(error, SonnxError) else (str(error), "")
        detail = " ".join(text.split())[:200]
        raise NotExchangeable(
            f"{what} cannot be passed through DLPack: {detail}", hint=hint or "convert it to a NumPy array"
        ) from None


def is_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) or (hasattr(value, "shape") and hasattr(value, "dtype") and not np.isscalar(value))


def array_of(value: Any) -> np.ndarray:
    """Convert a value to an array of a dtype that ONNX has.

    Args:
        value: An array, whose dtype is kept; or a Python number, a string, or nested lists of them: floats become float32,
            integers int32.

    Returns:
        The array, in native byte order; strings are objects.

    Raises:
        InvalidInput: The value is not an array of numbers, bool or strings, its lists have several lengths, or float32 or int32
            cannot represent a number (SX315).
    """
    plain = not hasattr(value, "__array__") and not isinstance(value, np.generic)
    try:
        array = np.asarray(value)
    except Exception as error:  # a list of lists of several lengths, or `__array__` of another library
        detail = " ".join(str(error).split())[:200]
        raise InvalidInput(
            f"the data of a tensor must be an array or nested lists of one shape: {detail}", code="SX315"
        ) from None
    if plain and array.dtype.kind in "US":  # NumPy makes strings of numbers between strings
        array = np.asarray(value, object)
        if array.size and all(isinstance(v, bytes) for v in array.flat):
            array = np.asarray(value)
    if array.dtype.kind in "US" or (array.dtype == dtypes.STRING and all(isinstance(v, str) for v in array.flat)):
        return array if array.dtype == dtypes.STRING else _texts(array)
    if array.dtype == dtypes.STRING or not dtypes.known(array.dtype.newbyteorder("=")):
        raise InvalidInput(f"the data of a tensor must be numbers, bool or strings, got {array.dtype}", code="SX315")
    if plain and array.dtype.kind in "iuf" and array.dtype.itemsize == 8:
        narrow = np.dtype(np.float32 if array.dtype.kind == "f" else np.int32)
        with np.errstate(over="ignore"):
            made = array.astype(narrow)
        wrong = ~np.isfinite(made) & np.isfinite(array) if narrow.kind == "f" else made != array
        if wrong.any():
            hint = f"pass np.array(..., np.{array.dtype}), whose dtype is kept"
            raise InvalidInput(
                f"Python numbers become {narrow}, which cannot represent {array[wrong].flat[0]}", code="SX315", hint=hint
            )
        return made
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def values_for(dtype: np.dtype[Any], values: Any) -> np.ndarray:
    """Convert values to write into a tensor to an array.

    Args:
        dtype: The dtype of the tensor, to which the caller casts them.
        values: An array, a number, or nested lists of numbers.

    Returns:
        The array, in its own dtype.

    Raises:
        InvalidInput: The values are lists of several lengths, or strings for a numeric tensor, or the reverse (SX315).
    """
    try:
        array = np.asarray(values)
    except Exception as error:  # lists of several lengths, or `__array__` of another library
        detail = " ".join(str(error).split())[:200]
        raise InvalidInput(f"values must be an array or nested lists of one shape: {detail}", code="SX315") from None
    strings = array.dtype.kind in "US" or (array.dtype == dtypes.STRING and all(isinstance(v, str) for v in array.flat))
    plain = array.dtype != dtypes.STRING and dtypes.known(array.dtype.newbyteorder("="))
    if strings != (dtype == dtypes.STRING) or not (strings or plain):
        raise InvalidInput(f"the values of a tensor of {dtype} cannot be {array.dtype}", code="SX315")
    if not isinstance(values, (np.ndarray, np.generic)) and array.dtype == np.float64 and dtypes.is_float(dtype):
        with np.errstate(over="ignore"):
            beyond = np.isinf(array.astype(dtype).astype(np.float64)) & np.isfinite(array)
        if beyond.any():
            raise InvalidInput(f"a tensor of {dtype} cannot represent {array[beyond].flat[0]}", code="SX315")
    return array


def _texts(array: np.ndarray) -> np.ndarray:
    try:
        return (np.char.decode(array, "utf-8") if array.dtype.kind == "S" else array).astype(object)
    except (UnicodeDecodeError, ValueError) as error:
        raise InvalidInput(f"the data of a tensor must be UTF-8: {error}", code="SX315") from None


_CODES: dict[int, Any] = {
    float32: np.float32, float16: np.float16, int32: np.int32, char: np.int8, double: np.float64, uchar: np.uint8,
    int64: np.int64, bool_: np.bool_,
}  # fmt: skip


def dtype_of(dtype: DTypeLike) -> np.dtype[Any]:
    """Return the NumPy dtype that a constant, a name or an object means.

    Args:
        dtype: A constant of `singa.tensor`, "int" (int32), "float" (float32), or what NumPy converts to a dtype.

    Returns:
        The NumPy dtype.

    Raises:
        InvalidInput: `dtype` is not a dtype, or ONNX does not have it (SX316).
    """
    if isinstance(dtype, int) and not isinstance(dtype, bool) and dtype in _CODES:
        found: np.dtype[Any] = np.dtype(_CODES[dtype])
        return found
    kind: Any = dtype
    if isinstance(dtype, str) and dtype in ("int", "float"):
        kind = np.int32 if dtype == "int" else np.float32
    try:
        found = np.dtype(kind)
    except TypeError:
        raise InvalidInput(
            f"dtype must be a dtype, got {dtype!r}", code="SX316", hint="pass tensor.float32, or a NumPy dtype"
        ) from None
    if not dtypes.known(found):
        raise InvalidInput(f"dtype must be an element type of ONNX, got {found}", code="SX316")
    return found


def code_of(dtype: np.dtype[Any]) -> Any:
    """Return the constant of a NumPy dtype.

    Args:
        dtype: A NumPy dtype.

    Returns:
        The constant of `singa.tensor`, an int; the dtype itself if SINGA has no constant for it.
    """
    return next((code for code, known in _CODES.items() if np.dtype(known) == dtype), dtype)
