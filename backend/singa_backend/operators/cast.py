"""Conversion between element types: Cast, CastLike, BitCast."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
from onnx import TensorProto

from .. import dtypes
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import operator
from ..ir.shapes import Known, KnownShapes
from ..limits import admit_bytes, count_bytes
from ._api import Array
from ._shapes import LIMIT

_E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
_INTEGERS = dtypes.SUB_BYTE_INTS | {np.dtype(f"{u}int{b}") for u in ("", "u") for b in (8, 16, 32, 64)}
_NUMBER = re.compile(r"([+-]?)(?:(\d+)|\d+\.\d*(?:e[+-]?\d+)?|\.?\d+(?:e[+-]?\d+)?|inf(?:inity)?|nan)", re.IGNORECASE | re.ASCII)


def limits(dtype: dtypes.DTypeLike) -> tuple[int, int]:
    """Return the minimum and the maximum of an integer type, including sub-byte types."""
    info = dtypes.integer_info(dtype)
    return int(info.min), int(info.max)


def _largest(dtype: dtypes.DTypeLike) -> float:
    """Return the maximum finite value of a narrow float type."""
    return float(dtypes.float_info(dtype).max)


# --- to narrow floats


def _round_to_odd(xp: Xp, x: Array) -> Array:
    """Convert `x` to float32; round inexact results to the neighbour with an odd last bit.

    Rounding the result again, to a float narrower by two bits or more, returns the same as rounding `x` directly:
    1 + 2^-8 + 2^-40 must become the bfloat16 above 1, but its nearest float32 is the tie 1 + 2^-8.
    """
    if x.dtype.itemsize <= (4 if x.dtype.kind == "f" else 2):
        return x.astype(np.float32, copy=False)
    if x.dtype.itemsize == 8 and x.dtype.kind in "iu":  # float64 holds 52 bits and a sticky bit for the rest
        low = x & 0xFFF
        x = xp.where(xp.abs(x.astype(np.float64)) < 2.0**52, x, (x - low) | xp.where(low != 0, 0x1000, 0).astype(x.dtype))
    wide = x.astype(np.float64)
    near = wide.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.int32)
    toward_zero = bits - (xp.abs(back) > xp.abs(wide)).astype(np.int32)
    return xp.where((back == wide) | xp.isnan(wide), bits, toward_zero | 1).view(np.float32)


def to_float8(xp: Xp, x: Array, dtype: np.dtype[Any], saturate: bool) -> Array:
    """Convert numbers to float8 by the two tables of Cast.

    With saturate, an infinity becomes the maximum also in the FNUZ types of opsets 19 to 23.  The table of those opsets
    specifies NaN; the test cases of those releases, onnxruntime and the table of opset 24 and later have the maximum.
    """
    y = _round_to_odd(xp, x)
    if saturate:
        top = _largest(dtype)
        y = xp.clip(y, -top, top)
    return y.astype(dtype)


def to_tiny_float(xp: Xp, x: Array, dtype: np.dtype[Any], version: int) -> Array:
    """Convert numbers to float4 or float6, which saturate and lack NaN; before opset 24, NaN became the maximum float4."""
    y = _round_to_odd(xp, x)
    if version < 24:
        y = xp.where(xp.isnan(y), np.float32(_largest(dtype)), y)
    return y.astype(dtype)


def _to_tiny_int(xp: Xp, x: Array, dtype: np.dtype[Any], version: int) -> Array:
    """Convert integers by dropping their high bits.

    For floats, ONNX defines only integers in range.  Before opset 24, its test cases saturate and its reference rounds;
    in opset 24 and later, both truncate and drop the high bits.
    """
    if x.dtype.kind == "f" and version < 24:
        return xp.clip(xp.rint(xp.where(xp.isnan(x), 0, x)), *limits(dtype)).astype(np.int8).astype(dtype)
    return (xp.cast(x, np.int64) & 0xF).astype(np.int8).astype(dtype)


def _to_e8m0(x: Array, saturate: bool, round_mode: str) -> Array:
    """Convert x in [2^-127, 2^127] to its exponent; other values to the nearest bound, or to NaN without saturate.

    The sign is dropped; ONNX does not define it.  Runs on the host: devices do not support this type.
    """
    if round_mode not in ("up", "down", "nearest"):
        raise OperatorError(f"round_mode must be up, down or nearest, got {round_mode!r}", code="SX404")
    a = np.abs(x.astype(np.float64))
    finite = np.clip(np.where(np.isnan(a), 1, a), 2.0**-127, 2.0**127)
    fraction, exponent = np.frexp(finite)  # finite = fraction * 2**exponent, fraction in [0.5, 1)
    limit = {"up": 0.5, "nearest": 0.75, "down": 1.0}[round_mode]
    up = fraction >= limit if round_mode == "nearest" else fraction > limit
    y = np.asarray(exponent - 1 + up + 127).astype(np.uint8)
    lost = np.isnan(a) if saturate else np.isnan(a) | (a < 2.0**-127) | (a > 2.0**127)
    return np.where(lost, np.uint8(0xFF), y).view(_E8M0)


# --- from and to strings


def _number(text: str) -> re.Match[str]:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise OperatorError(f"a string must contain a number, got {text!r}", code="SX404")
    return found


def parse_int(text: str) -> int:
    """Parse integers exactly; truncate other numbers."""
    if _number(text)[2]:
        return int(text)
    value = float(text)
    if not np.isfinite(value):
        raise OperatorError(f"a string must contain a finite number to become an integer, got {text!r}", code="SX404")
    return int(value)


def _each(read: Any, texts: list[str]) -> list[Any] | None:
    """Apply `read` (int or float) to each text; return None if that may be wrong: Python also accepts 1_000 and other digits."""
    everything = "".join(texts)
    if not everything.isascii() or "_" in everything:
        return None
    try:
        return list(map(read, texts))
    except ValueError:
        return None


def _from_strings(x: Array, dtype: np.dtype[Any]) -> Array:
    """Convert strings to int64, uint64, bool or float64, as a first step to `dtype`."""
    flat = x.reshape(-1).tolist()
    if dtype not in _INTEGERS:
        values = np.array(_each(float, flat) or [float(_number(s)[0]) for s in flat], np.float64).reshape(x.shape)
        return values != 0 if dtype.kind == "b" else values
    numbers = _each(int, flat) or [parse_int(s) for s in flat]
    low, high = limits(dtype)
    if not low <= min(numbers, default=0) <= max(numbers, default=0) <= high:
        s = next(s for s, n in zip(flat, numbers, strict=True) if not low <= n <= high)
        raise OperatorError(
            f"a string must contain a number in the range of {dtypes.onnx_name(dtype)}, [{low}, {high}], got {s!r}", code="SX405"
        )
    return np.array(numbers, np.uint64 if low == 0 else np.int64).reshape(x.shape)


_NOT_FINITE = {"nan": "NaN", "inf": "INF", "-inf": "-INF"}


def _format(value: Any) -> str:
    """Format in positional notation with the fewest digits that identify the value: 0.00001, not 1e-05."""
    text = np.format_float_positional(value, trim="0")
    return _NOT_FINITE.get(text, text)


def _to_strings(x: Array) -> Array:
    admit_bytes(x.size * 64, "the text of the numbers")
    if x.dtype in _INTEGERS or x.dtype.kind == "b":
        texts = [str(int(v)) for v in x.reshape(-1)]
    else:
        values = x.astype(np.float32) if x.dtype in dtypes.NARROW_FLOATS and x.dtype != np.float16 else x
        texts = [_format(v) for v in values.reshape(-1)]
    count_bytes(sum(64 + len(text) for text in texts))
    y = np.empty(x.size, object)
    y[:] = texts
    return y.reshape(x.shape)


# --- the operators


def convert(xp: Xp, x: Array, dtype: np.dtype[Any], *, saturate: bool = True, round_mode: str = "up", version: int = 28) -> Array:
    """Convert `x` to another element type by the rules of Cast."""
    if x.dtype.kind == "c" or dtype.kind == "c":
        raise OperatorError(f"Cast must not have complex types, got {x.dtype} to {dtype}", code="SX406")
    if dtype == dtypes.STRING:
        return x if x.dtype == dtype else _to_strings(x)
    if x.dtype == dtypes.STRING:
        x = _from_strings(x, dtype)
    elif x.dtype == dtype and (dtype not in dtypes.FLOAT8 or dtype == _E8M0):
        return x
    elif x.dtype in dtypes.NARROW_FLOATS:
        x = x.astype(np.float32)
    elif x.dtype in dtypes.SUB_BYTE_INTS:
        x = x.astype(np.int8)
    if dtype.kind == "b":
        return x != 0
    if dtype == _E8M0:
        return _to_e8m0(x, saturate, round_mode)
    if dtype in dtypes.FLOAT8:
        return to_float8(xp, x, dtype, saturate)
    if dtype in dtypes.FLOAT4 | dtypes.FLOAT6:
        return to_tiny_float(xp, x, dtype, version)
    if dtype in dtypes.HALVES and (dtype != np.float16 or x.dtype == np.float64):
        return _round_to_odd(xp, x).astype(dtype)
    if dtype in dtypes.SUB_BYTE_INTS:
        return _to_tiny_int(xp, x, dtype, version)
    return xp.cast(x, dtype)


@operator("Cast", 24, 25, 28, widen=False, traits=("unary", "finite", "keeps_finite", "moves", "epilogue", "keeps_weights"))
def cast(xp: Xp, x: Array, *, to: int, saturate: int = 1, round_mode: str = "up") -> Array:
    return convert(xp, x, dtypes.numpy_dtype(to), saturate=bool(saturate), round_mode=round_mode)


@cast.dtypes
def cast_dtypes(known: KnownShapes[Any], call: Any) -> np.dtype[Any]:
    return dtypes.numpy_dtype(known.attribute(call, "to"))


@cast.sizes
def cast_sizes(known: KnownShapes[Any], call: Any) -> Known | None:
    sizes = known.sizes(call.inputs[0])
    numbers = sizes if isinstance(sizes, tuple) else () if sizes is None else (sizes,)
    fits = all(isinstance(n, str) or abs(n) < LIMIT for n in numbers)
    return sizes if fits and known.attribute(call, "to") in (TensorProto.INT32, TensorProto.INT64) else None


@cast.gradient
def cast_back(op: Op, dy: V, x: V) -> V:
    """Cast the gradient from float to float; a cast from or to another type has no gradient."""
    return op.cast(dy, x) if dtypes.is_float(op.dtype(x)) else None


@operator("Cast", 6, 9, 13, 19, 21, 23, widen=False)
def cast_6(xp: Xp, x: Array, *, to: int, saturate: int = 1) -> Array:
    """Before opset 24, floats are rounded and saturated to types narrower than a byte."""
    return convert(xp, x, dtypes.numpy_dtype(to), saturate=bool(saturate), version=23)


cast_6.gradient(cast_back)


@cast_6.decomposition
def cast_6_decomposition(op: Op, x: V, to: int, saturate: int) -> V:
    return op.Cast(_rounded(op, x, dtypes.numpy_dtype(to)), to=to, saturate=saturate)


def _rounded(op: Op, x: V, dtype: np.dtype[Any]) -> V:
    """Round and saturate floats, and replace NaN, as a cast to this type did before opset 24."""
    if not dtypes.is_float(op.dtype(x)) or dtype not in dtypes.SUB_BYTE_INTS | dtypes.FLOAT4 | dtypes.FLOAT6:
        return x
    wide = op.Cast(x, to=int(TensorProto.FLOAT)) if op.dtype(x) in dtypes.NARROW_FLOATS else x
    whole = dtype in dtypes.SUB_BYTE_INTS
    known = op.Where(op.IsNaN(wide), op.constant(0 if whole else _largest(dtype), op.dtype(wide)), wide)
    return op.Clip(op.Round(known), *map(float, limits(dtype))) if whole else known


@operator("Cast", 1, widen=False)
def cast_1(xp: Xp, x: Array, *, to: str) -> Array:
    """The attribute `to` is the name of the type instead of its number: FLOAT, INT64, ..."""
    code = dict(TensorProto.DataType.items()).get(to.upper(), 0)
    if not code:
        raise OperatorError(f"to must be the name of an ONNX element type, got {to!r}", code="SX404")
    return convert(xp, x, dtypes.numpy_dtype(code), version=1)


@cast_1.decomposition
def cast_1_decomposition(op: Op, x: V, to: str) -> V:
    return op.Cast(x, to=dict(TensorProto.DataType.items())[to.upper()])


@operator("CastLike", 24, 25, widen=False, traits=("unary", "moves", "keeps_weights"))
def cast_like(xp: Xp, x: Array, target_type: Array, *, saturate: int = 1, round_mode: str = "up") -> Array:
    return convert(xp, x, np.dtype(target_type.dtype), saturate=bool(saturate), round_mode=round_mode)


cast_like.gradient(cast_back)


@operator("CastLike", 15, 19, 21, 23, widen=False)
def cast_like_15(xp: Xp, x: Array, target_type: Array, *, saturate: int = 1) -> Array:
    """Cast with the rules before opset 24."""
    return convert(xp, x, np.dtype(target_type.dtype), saturate=bool(saturate), version=23)


cast_like_15.gradient(cast_back)


@cast_like_15.decomposition
def cast_like_15_decomposition(op: Op, x: V, target_type: V, saturate: int) -> V:
    return op.CastLike(_rounded(op, x, op.dtype(target_type)), target_type, saturate=saturate)


def _bits(dtype: np.dtype[Any]) -> int:
    """Return the width of one element in bits; NumPy stores each element of a sub-byte type in a byte."""
    narrow = re.fullmatch(r"u?int([24])", dtype.name)
    return int(narrow[1]) if narrow else 4 if dtype in dtypes.FLOAT4 else 6 if dtype in dtypes.FLOAT6 else 8 * dtype.itemsize


@operator("BitCast", 26, widen=False, traits=("moves",))
def bit_cast(xp: Xp, x: Array, *, to: int) -> Array:
    source, target = np.dtype(x.dtype), dtypes.numpy_dtype(to)
    if dtypes.STRING in (source, target):
        raise OperatorError("the types of BitCast must not be string", code="SX406")
    if _bits(source) != _bits(target):
        raise OperatorError(
            f"the types of BitCast must have equal widths, got {dtypes.onnx_name(source)} ({_bits(source)} bits) and "
            f"{dtypes.onnx_name(target)} ({_bits(target)} bits)",
            code="SX404",
        )
    if source == target:
        return x
    if _bits(source) < 8:
        mask = (1 << _bits(source)) - 1
        bits = x.view(np.uint8) & mask
        if target.name.startswith("int"):  # an int4 is stored sign-extended in a byte
            sign = (mask + 1) // 2
            return ((bits ^ sign).astype(np.int8) - np.int8(sign)).astype(target)
        return bits.view(target)
    return x.view(np.uint8) != 0 if target.kind == "b" else x.view(target)


bit_cast.no_gradient("undefined: the bits of a number are not a differentiable function of it")
