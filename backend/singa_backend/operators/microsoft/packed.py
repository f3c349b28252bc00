"""Rows of a table in the packed formats of GGUF files."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ... import dtypes, limits
from ...errors import OperatorError
from ._api import Array, Xp, microsoft

LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
"""The values that the 4 bits of IQ4_NL and IQ4_XS stand for."""


def _halves(b: Array, at: int) -> Array:
    """The float16 at a byte of each block, as float32 with a last axis of 1."""
    return np.ascontiguousarray(b[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(b: Array) -> Array:
    """The low nibbles of all bytes, then the high ones."""
    return np.concatenate([b & 15, b >> 4], axis=-1)


def _q4_0(b: Array) -> Array:
    return _halves(b, 0) * (_nibbles(b[..., 2:]).astype(np.float32) - 8)


def _q5_0(b: Array) -> Array:
    high = np.unpackbits(b[..., 2:6], axis=-1, bitorder="little")
    return _halves(b, 0) * ((_nibbles(b[..., 6:]) | high << 4).astype(np.float32) - 16)


def _q8_0(b: Array) -> Array:
    return _halves(b, 0) * b[..., 2:].view(np.int8).astype(np.float32)


def _q5_k(b: Array) -> Array:
    """Eight parts of 32 values, each with a scale and a minimum of 6 bits."""
    own, high, low = b[..., 4:16], b[..., 16:48], b[..., 48:]
    first, second, third = own[..., :4], own[..., 4:8], own[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1).astype(np.float32)
    least = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1).astype(np.float32)
    values = _nibbles(low.reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    bits = high[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    whole = (values | bits << 4).astype(np.float32)
    y = (_halves(b, 0) * scales)[..., None] * whole - (_halves(b, 2) * least)[..., None]
    return y.reshape(*b.shape[:-1], 256)


def _q6_k(b: Array) -> Array:
    """Two halves of 128 values; 16 scales of 8 bits, each of 16 values."""
    lead = b.shape[:-1]
    low = b[..., :128].reshape(*lead, 2, 64)
    high = b[..., 128:192].reshape(*lead, 2, 32)
    both = np.stack([low[..., :32] & 15, low[..., 32:] & 15, low[..., :32] >> 4, low[..., 32:] >> 4], axis=-2)
    bits = np.stack([high >> 2 * i & 3 for i in range(4)], axis=-2)
    whole = (both | bits << 4).astype(np.float32) - 32
    scales = np.ascontiguousarray(b[..., 192:208]).view(np.int8).astype(np.float32)
    return ((_halves(b, 208) * scales)[..., None] * whole.reshape(*lead, 16, 16)).reshape(*lead, 256)


def _iq4_nl(b: Array) -> Array:
    return _halves(b, 0) * LEVELS[_nibbles(b[..., 2:])]


def _iq4_xs(b: Array) -> Array:
    """Eight parts of 32 values, each with a scale of 6 bits."""
    lead = b.shape[:-1]
    top = np.ascontiguousarray(b[..., 2:4]).view("<u2")
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*lead, 8)
    scales = (low | (top >> 2 * np.arange(8, dtype=np.uint16) & 3) << 4).astype(np.float32) - 32
    values = LEVELS[_nibbles(b[..., 8:].reshape(*lead, 8, 16))]
    return ((_halves(b, 0) * scales)[..., None] * values).reshape(*lead, 256)


def _floats(kind: np.dtype) -> Callable[[Array], Array]:
    return lambda b: np.ascontiguousarray(b).view(kind).astype(np.float32)


FORMATS: dict[int, tuple[str, int, int, Callable[[Array], Array]]] = {
    0: ("F32", 1, 4, _floats(np.dtype("<f4"))),
    1: ("F16", 1, 2, _floats(np.dtype("<f2"))),
    2: ("Q4_0", 32, 18, _q4_0),
    6: ("Q5_0", 32, 22, _q5_0),
    8: ("Q8_0", 32, 34, _q8_0),
    13: ("Q5_K", 256, 176, _q5_k),
    14: ("Q6_K", 256, 210, _q6_k),
    20: ("IQ4_NL", 32, 18, _iq4_nl),
    23: ("IQ4_XS", 256, 136, _iq4_xs),
    30: ("BF16", 1, 2, _floats(dtypes.numpy_dtype(16))),
}
"""packed_type -> its name in GGUF, the values and the bytes of a block, and how a block is read."""


@microsoft("GatherPacked", 1, widen=False, host=True)
def gather_packed(xp: Xp, data: Array, indices: Array, *, K: int, output_dtype: int = 16, packed_type: int) -> Array:
    """Gather rows of a packed table and unpack them; an index out of range selects row 0."""
    if packed_type not in FORMATS:
        known = ", ".join(f"{i} ({name})" for i, (name, *_) in FORMATS.items())
        raise OperatorError(f"packed_type must be one of {known}, got {packed_type}", code="SX404")
    _, values, size, unpack = FORMATS[packed_type]
    if output_dtype not in (1, 10, 16):
        raise OperatorError(f"output_dtype must be 1 (float), 10 (float16) or 16 (bfloat16), got {output_dtype}", code="SX406")
    if K < 1 or K % values or data.ndim != 2 or data.shape[1] != K // values * size or not len(data):
        raise OperatorError(
            f"K must be a positive multiple of {values}, and a row have {size} bytes for each {values} values, got K {K} and "
            f"data of shape {data.shape}",
            code="SX404",
        )
    limits.admit((*indices.shape, K), np.float32)
    rows = data[np.where((indices >= 0) & (indices < len(data)), indices, 0)]
    y = unpack(rows.reshape(*indices.shape, K // values, size)).reshape(*indices.shape, K)
    return y.astype(dtypes.numpy_dtype(output_dtype))


gather_packed.no_gradient("constant: the table holds integers")
