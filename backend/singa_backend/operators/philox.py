"""Philox, a counter-based generator: random bits are a function of a key and a position, equal on every device.

Philox-4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import math

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..interpreters.base import Op, V
from ..ir.declaration import Host, Ints, operator
from ..proto.schemas import SINGA_DOMAIN, declare_schema
from ._api import Array

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD, _SHIFT = np.uint64((1 << 32) - 1), np.uint64(32)

declare_schema(
    "Philox",
    ["key: tensor(int64)", "shape: tensor(int64)"],
    ["bits: T"],
    types={"T": ["uint32"]},
    doc="Random 32-bit words.  key: (seed, number of the draw).  shape: shape of the result.  Word i of the flat result is word "
    "i % 4 of the block whose counter is (i // 4, draw) under the key (seed).",
)


@operator("Philox", 1, domain=SINGA_DOMAIN)
def philox(xp: Xp, key: Array, shape: Host[Ints]) -> Array:
    """Return uint32 words of this shape; key: the seed and the number of the draw, each a non-negative int64."""
    count = math.prod(shape)
    limits.admit((max(count, 1), 4), np.uint64)
    words = xp.philox_words(key, count)
    if words is not None:
        return words.reshape(shape)
    blocks = xp.arange(-(-count // 4), dtype=np.int64).astype(np.uint64)
    parts = key.reshape(-1).astype(np.uint64)
    seed, draw = parts[:1], parts[1:2]  # which broadcast
    c = [blocks & _WORD, blocks >> _SHIFT, draw & _WORD, draw >> _SHIFT]
    k = [seed & _WORD, seed >> _SHIFT]
    for _ in range(_ROUNDS):
        a, b = (c[i] * np.uint64(m) for i, m in zip((0, 2), _MULTIPLIERS, strict=True))
        c = [(b >> _SHIFT) ^ c[1] ^ k[0], b & _WORD, (a >> _SHIFT) ^ c[3] ^ k[1], a & _WORD]
        k = [(v + np.uint64(w)) & _WORD for v, w in zip(k, _WEYL, strict=True)]
    return xp.stack(c, axis=-1).reshape(-1)[:count].astype(np.uint32).reshape(shape)


@philox.decomposition
def philox_decomposition(op: Op, key: V, shape: V) -> V:
    """Compute in int64, where products of 32 by 16 bits do not overflow; BitwiseXor requires opset 18 or later."""
    count = op.ReduceProd(shape, keepdims=0)
    blocks = op.Range(0, op.Div(op.Add(count, 3), 4), 1)
    seed, draw = op.Gather(key, 0), op.Gather(key, 1)
    zeros = op.Mul(blocks, 0)
    c = [*_halves(op, blocks), *(op.Add(zeros, part) for part in _halves(op, draw))]
    k = list(_halves(op, seed))
    for _ in range(_ROUNDS):
        (a_high, a_low), (b_high, b_low) = (_product(op, c[i], m) for i, m in zip((0, 2), _MULTIPLIERS, strict=True))
        c = [op.BitwiseXor(op.BitwiseXor(b_high, c[1]), k[0]), b_low, op.BitwiseXor(op.BitwiseXor(a_high, c[3]), k[1]), a_low]
        k = [op.Mod(op.Add(v, w), 1 << 32) for v, w in zip(k, _WEYL, strict=True)]
    words = op.Reshape(op.Concat(*(op.Unsqueeze(v, [1]) for v in c), axis=1), [-1])
    return op.Reshape(op.Cast(op.Slice(words, [0], op.Reshape(count, [1])), to=12), shape, allowzero=1)


def _halves(op: Op, x: V) -> tuple[V, V]:
    """Return the low and the high 32 bits."""
    return op.Mod(x, 1 << 32), op.Div(x, 1 << 32)


def _product(op: Op, x: V, m: int) -> tuple[V, V]:
    """Return the high and the low 32 bits of a product of 32-bit words."""
    upper, lower = op.Mul(x, m >> 16), op.Mul(x, m & 0xFFFF)
    middle = op.Add(upper, op.Div(lower, 1 << 16))  # below 2**49
    low = op.Add(op.Mul(op.Mod(middle, 1 << 16), 1 << 16), op.Mod(lower, 1 << 16))
    return op.Div(middle, 1 << 16), low


philox.no_gradient("random")
