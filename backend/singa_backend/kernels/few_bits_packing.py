"""Weights of few bits, packed for machine code; see gemm/few_bits.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..gemm.tiles import TILES
from .lowering import F32, aligned_array
from .machine_steps import spread_lanes
from .rounding import BF16
from .values import Value

UINT8, UINT32 = np.dtype(np.uint8), np.dtype(np.uint32)

PART = 1 << 21
"""The weights that are packed at a time."""

LARGEST = 256
"""The size of a block of packed weights, at most: a larger one is several that have the same scale."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Weights in tiles of 16 columns; columns without weights have scales of zero.

    Attributes:
        words: uint32, (tiles, words of a column, 16).
        scales: float32, (tiles, blocks, 16).
        zeros: the zero points, uint8 or float32, (tiles, blocks, 16); None if they are the middle.
    """

    words: Value
    scales: Value
    zeros: Value | None

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(v.nbytes for v in (self.words, self.scales, self.zeros) if v is not None)

    @property
    def tiles(self) -> int:
        """The number of tiles."""
        return self.words.shape[0]


def pack(
    b: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int, block: int, change: Callable[[np.ndarray], np.ndarray]
) -> Blocks:
    """Weights in the form of a node, as `Blocks`.

    Args:
        b: bytes, (n, blocks, bytes of a block).
        scales: float32, (n, blocks).
        zeros: the zero points: bytes, packed for each row, or floats, (n, blocks); None for the middle of the range.
        bits: of a weight.
        block: the size of a block.
        change: returns other bytes for some of the weights.
    """
    n, count = scales.shape
    tiles, repeats = -(-n // (LANES * TILES)) * TILES, max(1, block // LARGEST)
    words = b.reshape(n, -1).shape[1] // 4
    shape = (tiles, count * repeats, LANES)
    packed = Blocks(
        aligned_array((tiles, words, LANES), UINT32),
        aligned_array(shape, F32),
        None if zeros is None else aligned_array(shape, zeros.dtype),
    )
    step = max(LANES, PART * bits // 32 // words // LANES * LANES)
    for first in range(0, tiles * LANES, step):
        rows, at = slice(first, min(first + step, n)), slice(first // LANES, (first + step) // LANES)
        if first < n:
            _spread(packed.words.array[at], change(b[rows].reshape(rows.stop - first, -1)).view(UINT32), 1)
            _spread(packed.scales.array[at], scales[rows], repeats)
        else:
            packed.words.array[at] = packed.scales.array[at] = 0
        if packed.zeros is not None and zeros is not None:
            points = zeros[rows] if zeros.dtype != UINT8 else unpacked(zeros[rows], bits)[:, :count]
            _spread(packed.zeros.array[at], points, repeats)
    return packed


def _spread(tiles: np.ndarray, rows: np.ndarray, repeats: int) -> None:
    """Write the elements of rows, each several times, to tiles."""
    spread_lanes(tiles, rows if repeats == 1 else rows.repeat(repeats, 1))


def signed(bits: int) -> Callable[[np.ndarray], np.ndarray]:
    """What returns bytes whose values are numbers with a sign, which are those of other bytes minus the middle."""
    mask = np.uint8(sum(1 << i + bits - 1 for i in range(0, 8, bits)))
    return lambda b: b ^ mask


def swapped(b: np.ndarray) -> np.ndarray:
    """Bytes with the lower four bits in the place of the higher ones."""
    return b >> 4 | b << 4


def unpacked(b: np.ndarray, bits: int) -> np.ndarray:
    """The values of bytes along the last axis, those of lower bits first."""
    count = 8 // bits
    made = np.empty((*b.shape, count), np.uint8)
    for i in range(count):
        np.right_shift(b, np.uint8(i * bits), made[..., i])
    if count > 1:
        np.bitwise_and(made, np.uint8(2**bits - 1), made)
    return made.reshape(*b.shape[:-1], b.shape[-1] * count)


def floats(b: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int, k: int) -> np.ndarray:
    """The weights in bfloat16, (n, k); the arguments are those of `pack`."""
    made = np.empty((b.shape[0], k), BF16)
    step = max(1, PART // max(k, 1))
    for first in range(0, b.shape[0], step):
        rows = slice(first, first + step)
        w = unpacked(b[rows], bits).astype(np.float32)
        points: Any = np.float32(2 ** (bits - 1))
        if zeros is not None:
            points = zeros[rows] if zeros.dtype != UINT8 else unpacked(zeros[rows], bits)[:, : scales.shape[1]]
            points = points.astype(np.float32)[..., None]
        w -= points
        w *= scales[rows][..., None]
        made[rows] = w.reshape(w.shape[0], -1)[:, :k]
    return made
