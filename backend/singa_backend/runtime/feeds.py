"""Convert the inputs passed to `run` to the declared types."""

from __future__ import annotations

from collections.abc import Iterable
from operator import countOf
from typing import Any

import numpy as np

from .. import dtypes
from ..devices.device import Device
from ..errors import DeviceUnavailable, InvalidInput
from ..proto.values import Value


def convert_input(declared: Value, x: Any, sizes: dict[str, tuple[int, str]], device: Device) -> Any:
    """An input of the declared type; raises InvalidInput.

    Args:
        declared: the declared type.
        x: the value that the caller passed.
        sizes: the symbolic sizes that are known so far.
        device: the device of the model, whose arrays are not copied.
    """
    if declared.kind == "optional" and x is None:
        return None
    if x is None:
        raise InvalidInput(
            f"input {declared} must have a value, got None", code="SX302", hint="only an optional input may be None"
        )
    if declared.kind == "map" or isinstance(x, dict):
        if declared.kind not in ("map", "sequence", "") or not isinstance(x, dict):
            want = "a dict" if declared.kind == "map" else "an array or a list of arrays"
            raise InvalidInput(f"input {declared} must be {want}, got a {type(x).__name__}", code="SX302")
        return _map(declared, x)
    if declared.kind == "sequence" or (declared.kind in ("optional", "") and isinstance(x, list)):
        if not isinstance(x, (list, tuple)):
            raise InvalidInput(f"input {declared} must be a list of arrays, got a {type(x).__name__}", code="SX302")
        return [_map(declared, e) if isinstance(e, dict) else _array(declared, e, device) for e in x]
    array = _array(declared, x, device)
    _check_shape(declared, array.shape, sizes)
    return array


def _map(declared: Value, x: dict[Any, Any]) -> dict[Any, Any]:
    """A map with its values in the declared dtype: a Python float may be a float or a double."""
    if declared.dtype is None or declared.dtype == dtypes.STRING:
        return dict(x)
    try:
        return {k: declared.dtype.type(v) for k, v in x.items()}
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidInput(f"input {declared}: {error}", code="SX302") from None


def _array(declared: Value, x: Any, device: Device) -> Any:
    """An array of the host or of the device, of the declared dtype; raises InvalidInput."""
    try:
        held = device.adopt(x)
        if held is not None:
            _check_known(declared, held.dtype)
            return held
        if not isinstance(x, (np.ndarray, np.generic)) and not hasattr(x, "__array__"):
            if hasattr(x, "__cuda_array_interface__"):
                hint = "copy it to the host, or prepare the model with device='CUDA'"
                raise InvalidInput(f"input {declared} must be an array of the host, got one of a GPU", code="SX302", hint=hint)
            return _from_python(declared, x)
        array = np.asarray(x)
        if array.dtype.kind == "S":
            array = np.char.decode(array, "utf-8")
    except InvalidInput:
        raise
    except DeviceUnavailable as error:
        raise InvalidInput(f"input {declared}: {error.message}", code="SX302", hint=error.hint) from None
    except Exception as error:  # also from `__array__` of CuPy and PyTorch, which refuse arrays on a device
        raise InvalidInput(f"input {declared}: {error}", code="SX302") from None
    if array.dtype.kind == "U":
        array = array.astype(object)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    _check_known(declared, array.dtype)
    if array.dtype == dtypes.STRING:
        _check_strings(declared, array)
    return array


def check_header(declared: Value, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Check an array of a file by its header, before its data are read; raises InvalidInput as `convert_input`."""
    if declared.kind == "tensor":
        _check_dtype(declared, dtypes.STRING if dtype.kind in "SU" else dtype)
        _check_shape(declared, shape, {})


def _check_known(declared: Value, dtype: np.dtype[Any]) -> None:
    _check_dtype(declared, dtype)
    if declared.dtype is None and not dtypes.known(dtype):
        raise InvalidInput(f"input {declared} must have an element type of ONNX, got {dtype}", code="SX302")


def _check_dtype(declared: Value, dtype: np.dtype[Any]) -> None:
    want = declared.dtype
    if want is not None and dtype != want:
        raise InvalidInput(
            f"input {declared} must be an array of {dtypes.onnx_name(want)}, got one of {dtypes.onnx_name(dtype)}",
            code="SX302",
            hint=f"write x.astype({_source(want)}) if that is intended",
        )


def _from_python(declared: Value, x: Any) -> np.ndarray:
    """Python numbers, strings, or lists of them, in the declared dtype; raises InvalidInput if it cannot represent them."""
    # NumPy's own string type would allocate the length of the longest string for each.
    want, natural = declared.dtype, np.asarray(x, object) if _is_text(x) else np.asarray(x)
    if natural.size == 0:
        return np.asarray(x, want)
    strings = natural.dtype.kind in "USO"
    if strings and want in (None, dtypes.STRING):
        array = np.asarray(x, object)
        _check_strings(declared, array)
        return array
    whole = want is not None and (want.kind in "iub" or want in dtypes.SUB_BYTE_INTS)
    array = np.asarray(x, want)  # raises if integers are out of range
    if strings or want == dtypes.STRING or (natural.dtype.kind == "f" and whole):
        kind = "strings" if natural.dtype.kind in "US" or _is_text(x) else "floats" if natural.dtype.kind == "f" else "numbers"
        hint = "round them first" if whole and kind == "floats" else ""
        element = "number" if want is None else dtypes.onnx_name(want)
        raise InvalidInput(f"input {declared} must hold {element} values, got Python {kind}", code="SX302", hint=hint)
    narrow = whole and (array.dtype.kind == "b" or array.dtype in dtypes.SUB_BYTE_INTS)
    if narrow and (wrong := array.astype(np.int64) != natural).any():
        raise InvalidInput(
            f"input {declared} must hold values in the range of its type, got {natural[wrong].flat[0]}", code="SX302"
        )
    return array


def _is_text(x: Any) -> bool:
    """Whether a value is a string, or lists whose first element is one."""
    while isinstance(x, (list, tuple)) and x:
        x = x[0]
    return isinstance(x, str)


def holds_strings(array: np.ndarray) -> bool:
    """Whether all elements are plain strings of Python."""
    values = array.reshape(-1).tolist()
    return countOf(map(type, values), str) == len(values)


def _check_strings(declared: Value, array: np.ndarray) -> None:
    if holds_strings(array):
        return
    for v in array.reshape(-1).tolist():
        if not isinstance(v, str):
            hint = "replace missing texts, by '' or another one" if v is None or v != v else ""
            raise InvalidInput(f"input {declared} must hold strings only, got {v!r}", code="SX302", hint=hint)


def _source(dtype: np.dtype[Any]) -> str:
    """The dtype as a Python expression."""
    if dtype == dtypes.STRING:
        return "object"
    return f"np.{dtype.name}" if hasattr(np, dtype.name) else f"ml_dtypes.{dtype.name}"


def _check_shape(declared: Value, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]) -> None:
    """Raise InvalidInput unless a shape is the declared one; each size with a name is the same in all inputs."""
    if declared.shape is None:
        return
    if len(shape) != len(declared.shape):
        text = f"input {declared} must have {len(declared.shape)} dimensions, got shape {shape}"
        raise InvalidInput(text, code="SX303", hint=_one_axis_more(declared.shape, shape))
    for have, want in zip(shape, declared.shape, strict=True):
        known = sizes.setdefault(want, (have, declared.name)) if isinstance(want, str) else (want, declared.name)
        if known[0] is not None and known[0] != have:
            where = f", and {want!r} is {known[0]} in input {known[1]!r}" if isinstance(want, str) else ""
            raise InvalidInput(f"input {declared} must have the declared shape, got shape {shape}{where}", code="SX303")


def _one_axis_more(declared: tuple[int | str | None, ...], shape: tuple[int, ...]) -> str:
    """The hint for an array that has one axis less than its input: a column, or one sample."""
    if len(shape) + 1 != len(declared):
        return ""
    if declared[-1] == 1 and _fits(declared[:-1], shape):
        return "write x[..., None]: the last axis has the size 1"
    return "write x[None] for one sample: the first axis counts them" if _fits(declared[1:], shape) else ""


def _fits(declared: tuple[int | str | None, ...], shape: tuple[int, ...]) -> bool:
    return all(not isinstance(want, int) or want == have for want, have in zip(declared, shape, strict=True))


def ids_of(values: Iterable[Any]) -> set[int]:
    """The ids of values, those of the elements of a list in its place."""
    return {id(a) for v in values for a in (v if isinstance(v, list) else (v,))}


def owned_copy(value: Any, taken: set[int]) -> Any:
    """A value that shares no memory with the model: arrays that are, or view, an input or a state are copied."""
    if isinstance(value, list):
        return [owned_copy(v, taken) for v in value]
    if hasattr(value, "dtype"):  # of the host or of a device
        if value.base is not None or id(value) in taken:
            value = value.copy()
        taken.add(id(value))
    return value


def overlaps_itself(array: np.ndarray) -> bool:
    """Whether two elements of an array share a byte: a broadcast array, or windows by `as_strided`."""
    axes = sorted((abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1)
    reach = array.itemsize
    for stride, n in axes:
        if stride < reach:
            break
        reach += stride * (n - 1)
    else:
        return False  # the elements along each axis are further apart than the axes of smaller strides reach
    span = array.itemsize + sum(stride * (n - 1) for stride, n in axes)
    if not array.size or array.nbytes > span:
        return bool(array.size)
    places = np.zeros(1, np.intp)
    for stride, n in axes:
        places = np.add.outer(places, stride * np.arange(n)).reshape(-1)
    places.sort()
    return bool((np.diff(places) < array.itemsize).any())
