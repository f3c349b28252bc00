"""Weights of few bits, packed for products of 8-bit integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .lowering import F32, aligned_array
from .onednn import MemoryDesc
from .rounding import BF16
from .values import Value

INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)

SIDE = 64
"""The least rows of a tile, and the columns that are neighbours in memory: what oneDNN's products of bytes read."""

TILE, BATCH = "BA16a64b4a", "aCB16b64c4b"
"""The layouts of a tile and of tiles one after another: for each 64 columns and 64 rows, 16 times 4 rows of the columns.  They
are those of AVX-512 with VNNI; other code reads one column after another."""

SUMS = 1 << 16
"""The sums of blocks that are computed at a time: they stay in the cache until they are added."""

WIDEST = 1 << 12
"""The columns that are computed at a time, at most."""

PART = 1 << 21
"""The weights that are packed at a time."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Weights in tiles of int8.

    The columns are padded to a multiple of 64, and divided into stripes.  All that belongs to a stripe is together in memory.

    Attributes:
        k: the rows of W.
        n: its columns.
        block: the size of a block.
        tiles: int8; of each stripe the tiles, in the layout BATCH or column by column.
        scales: float32; of each stripe (blocks of a tile, tiles, columns), for one digit (tiles, blocks, columns).
        sums: float32, (tiles, columns): the sum of the weights of each tile.
        offsets: float32, (blocks, columns): what to subtract from the weights of a block, if int8 does not hold it; or None.
        is_single: whether one digit is enough; this is the order of `scales`.
        is_plain: whether `tiles` are column by column; then `scales` have the order for one digit.
        pairs: the highest magnitude of a sum of two products of a digit and a weight.
    """

    k: int
    n: int
    block: int
    tiles: Value
    scales: Value
    sums: Value
    offsets: Value | None
    is_single: bool
    is_plain: bool
    pairs: int

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(v.nbytes for v in (self.tiles, self.scales, self.sums, self.offsets) if v is not None)

    @property
    def count(self) -> int:
        """The number of tiles of a stripe."""
        return self.sums.shape[0]

    @property
    def columns(self) -> int:
        """The columns, padded."""
        return self.sums.shape[1]

    @property
    def joined(self) -> int:
        """The blocks of a tile."""
        return max(1, SIDE // self.block)

    @property
    def depth(self) -> int:
        """The rows of a tile."""
        return max(SIDE, self.block)

    @property
    def stripes(self) -> list[tuple[int, int]]:
        """The first column and the number of columns of each stripe."""
        wide = SUMS // (self.count * self.joined) // SIDE * SIDE
        wide = min(max(wide, 4 * SIDE), WIDEST)
        return [(c, min(wide, self.columns - c)) for c in range(0, self.columns, wide)]

    def tile(self, wide: int) -> MemoryDesc:
        """The description of a tile of this width."""
        shape = (self.depth, wide)
        return MemoryDesc.of(INT8, shape, (1, self.depth)) if self.is_plain else MemoryDesc.tagged(INT8, shape, TILE)

    def lane(self, wide: int) -> MemoryDesc:
        """The description of the tiles of a stripe of this width."""
        shape = (self.count, self.depth, wide)
        steps = (self.depth * wide, 1, self.depth)
        return MemoryDesc.of(INT8, shape, steps) if self.is_plain else MemoryDesc.tagged(INT8, shape, BATCH)

    def scale_at(self, column: int, width: int, tile: int, j: int) -> int:
        """The place of the scales of a block of a tile in those of a stripe, in bytes."""
        row = tile * self.joined + j if self.is_single else j * self.count + tile
        return 4 * (column * self.count * self.joined + row * width)


def pack(
    b: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None,
    bits: int,
    block: int,
    n: int,
    k: int,
    single: bool = False,
    plain: bool = False,
) -> Blocks:
    """Weights in the form of a node, as `Blocks`.

    Args:
        b: bytes, (n, blocks, bytes of a block).
        scales: float32, (n, blocks).
        zeros: the zero points: bytes, packed for each row, or floats, (n, blocks); None for the middle of the range.
        bits: of a weight.
        block: the size of a block.
        n: the columns of W, rows of b.
        k: the rows of W.
        single: whether one digit is enough for the rows of A.
        plain: whether the tiles are column by column.
    """
    blocks, columns = -(-k // block), -(-n // SIDE) * SIDE
    depth = max(SIDE, block)
    count, joined = -(-k // depth), depth // block
    whole = zeros is None or (bits < 8 and zeros.dtype == UINT8)
    made = Blocks(
        k, n, block, aligned_array((count * depth * columns,), INT8), aligned_array((count * joined * columns,), F32),
        aligned_array((count, columns), F32), None if whole else aligned_array((blocks, columns), F32), single, plain,
        2 * 255 * (2**bits - 1 if bits < 8 else 128),
    )  # fmt: skip
    for c, wide in made.stripes:
        of = slice(count * depth * c, count * depth * (c + wide))
        words = made.tiles.array[of].view(np.int32)
        if plain:
            words = words.reshape(count, wide // SIDE, SIDE, depth // 4)
        else:
            words = words.reshape(count, wide // SIDE, depth // 4, SIDE).swapaxes(2, 3)
        of = slice(count * joined * c, count * joined * (c + wide))
        grid = made.scales.array[of].reshape((count, joined, wide) if single else (joined, count, wide))
        step = max(SIDE, PART // max(k, 1) // SIDE * SIDE)
        for first in range(c, c + wide, step):
            rows = slice(first, min(first + step, c + wide, n))
            width, cut = min(step, c + wide - first), rows.stop - first
            at, here = slice(first, first + width), slice(first - c, first - c + width)
            values = np.zeros((width, count * depth), np.int8)
            centred, rest = _centred(b[rows], None if zeros is None else zeros[rows], bits, blocks)
            values[:cut, :k] = centred.reshape(cut, -1)[:, :k]
            scale = np.zeros((width, count * joined), np.float32)
            scale[:cut, :blocks] = scales[rows]
            grid[..., here] = scale.reshape(width, count, joined).transpose((1, 2, 0) if single else (2, 1, 0))
            totals = np.add.reduce(values.reshape(width, -1, block), 2, np.int32) * scale.astype(np.float64)
            made.sums.array[:, at] = totals.reshape(width, count, joined).sum(2).T
            if made.offsets is not None:
                assert rest is not None
                made.offsets.array[:, at] = 0
                made.offsets.array[:, rows] = (rest * scales[rows]).T
            parts = values.view(np.int32).reshape(width // SIDE, SIDE, count, depth // 4)
            words[:, here.start // SIDE : here.stop // SIDE] = parts.transpose(2, 0, 1, 3)
    return made


def unpacked(b: np.ndarray, bits: int) -> np.ndarray:
    """The values of bytes along the last axis, those of lower bits first."""
    count = 8 // bits
    made = np.empty((*b.shape, count), np.uint8)
    for i in range(count):
        np.right_shift(b, np.uint8(i * bits), made[..., i])
    if count > 1:
        np.bitwise_and(made, np.uint8(2**bits - 1), made)
    return made.reshape(*b.shape[:-1], b.shape[-1] * count)


def _centred(b: np.ndarray, zeros: np.ndarray | None, bits: int, blocks: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Values minus zero points as int8; and what of the zero points is not subtracted, if anything."""
    q, middle = unpacked(b, bits), np.uint8(2 ** (bits - 1))
    if zeros is None:
        return (q - middle).view(np.int8), None
    if zeros.dtype != UINT8:
        return (q - middle).view(np.int8), zeros.astype(np.float32) - middle
    points = unpacked(zeros, bits)[:, :blocks]
    if bits == 8:
        return (q - middle).view(np.int8), points.astype(np.float32) - middle
    return (q - points[..., None]).view(np.int8), None


def floats(b: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int, k: int) -> np.ndarray:
    """The weights in bfloat16, (n, k); the arguments are those of `pack`."""
    made = np.empty((b.shape[0], k), BF16)
    step = max(1, PART // max(k, 1))
    for first in range(0, b.shape[0], step):
        rows = slice(first, first + step)
        q, rest = _centred(b[rows], None if zeros is None else zeros[rows], bits, scales.shape[1])
        w = q.astype(np.float32)
        if rest is not None:
            w -= rest[..., None]
        w *= scales[rows][..., None]
        made[rows] = w.reshape(w.shape[0], -1)[:, :k]
    return made
