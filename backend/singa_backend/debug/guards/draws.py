"""Draws inputs that are the same bits on every machine: a hash of the position, and arithmetic that IEEE 754 defines.

NumPy may change the distributions of its generators between versions, so a file that stores a seed could not rely on them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ... import dtypes, limits
from ...errors import InvalidInput, ResourceExhausted

NORMAL, EDGES = "normal", "edges"

KINDS = (NORMAL, EDGES)
"""Kinds of values: floats near a normal distribution, or half of them boundary values; integers in a range, or its ends."""

_BOUNDARIES = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, -2.5, 4.0, -4.0, 8.0, -8.0, 2.0**-10, -(2.0**-10), 2.0**-24, 1.0 + 2.0**-10]
)
"""Zeros of both signs, halves (ties of a rounding), ends of activations, and numbers that vanish in a sum."""

_BLOCK = 1 << 18
"""How many elements are drawn at a time."""

INPUTS = 1 << 30
"""The maximum bytes of the inputs of all cases of a guard."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def key_of(*parts: object) -> int:
    """Derive a key of 64 bits from names and numbers."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:8], "little")


def words(key: int, positions: np.ndarray) -> np.ndarray:
    """The hash of each position (uint64) under a key: the steps of SplitMix64."""
    with np.errstate(over="ignore"):
        z = (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN + np.uint64(key)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(z ^ (z >> np.uint64(31)))


def draw(kind: str, dtype: np.dtype[Any], shape: Sequence[int], high: int, key: int) -> np.ndarray:
    """Draw an array.

    Args:
        kind: one of `KINDS`.
        dtype: of the array.
        shape: of the array.
        high: integers are below it; 2 draws masks, whose first element along the last axis is 1.
        key: of the stream.

    Returns:
        The array.
    """
    limits.admit(shape, dtype)
    count = math.prod(shape)
    drawn = np.empty(count, dtype)
    for start in limits.blocks(count, _BLOCK):
        positions = np.arange(start, min(start + _BLOCK, count), dtype=np.uint64)
        drawn[start : start + _BLOCK] = _values(kind, dtype, high, words(key, positions))
    drawn = drawn.reshape(shape)
    if high <= 2 and shape and not (dtypes.is_float(dtype) or dtype.kind in "cO"):
        drawn[..., :1] = 1
    return drawn


def _values(kind: str, dtype: np.dtype[Any], high: int, bits: np.ndarray) -> np.ndarray:
    """The values of these bits, one for each."""
    if dtype == dtypes.STRING:
        return np.array([f"s{b % 100}" for b in bits.tolist()], object)
    if dtypes.is_float(dtype) or dtype.kind == "c":
        return _floats(kind, bits).astype(dtype)
    if kind == EDGES and high <= 2:
        return np.ones(bits.shape, dtype)
    whole = bits % np.uint64(2) * np.uint64(high - 1) if kind == EDGES else bits % np.uint64(high)
    return np.asarray(whole.astype(np.int64).astype(dtype))


def _floats(kind: str, bits: np.ndarray) -> np.ndarray:
    """Sums of four uniform numbers of 16 bits, with the mean 0 and the variance 1; with `EDGES` every second is a boundary."""
    total = sum(((bits >> np.uint64(16 * i)) & np.uint64(0xFFFF)).astype(np.float64) for i in range(4))
    found = (np.asarray(total) - 131070.0) / 37837.0
    if kind == EDGES:
        chosen = _BOUNDARIES[(bits >> np.uint64(5)) % np.uint64(len(_BOUNDARIES))]
        found = np.where(bits % np.uint64(2) == 0, found, chosen)
    return np.asarray(found)


def check_inputs(inputs: Iterable[tuple[np.dtype[Any], Sequence[int]]]) -> None:
    """Raise ResourceExhausted (SX600) if inputs of these types are too large for a guard."""
    size = sum(dtype.itemsize * math.prod(shape) for dtype, shape in inputs)
    if size > INPUTS:
        text = f"the inputs of a guard must have at most {limits.format_bytes(INPUTS)}, got {limits.format_bytes(size)}"
        raise ResourceExhausted(text, code="SX600", hint="choose smaller sizes, or fewer cases")


def digest(value: np.ndarray) -> str:
    """The SHA-256 of an array's dtype, shape and bytes, in little-endian order; 16 hexadecimal digits."""
    state = hashlib.sha256(f"{dtypes.onnx_name(value.dtype)}{list(value.shape)}".encode())
    if value.dtype == dtypes.STRING:
        state.update(repr(value.tolist()).encode())
    else:
        flat = np.ascontiguousarray(value).reshape(-1)
        if flat.dtype.byteorder == ">":
            flat = flat.astype(flat.dtype.newbyteorder("<"))
        state.update(flat.view(np.uint8).data)
    return state.hexdigest()[:16]


def check_sizes(given: dict[str, int], symbols: Sequence[str]) -> None:
    """Raise InvalidInput for a size that no input declares."""
    for name in given:
        if name not in symbols:
            names = ", ".join(symbols) or "none"
            raise InvalidInput(f"the symbolic sizes of the inputs are: {names}; got {name!r}", code="SX308")
