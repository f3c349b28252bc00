"""Exact products of 8-bit integers by machine code, where oneDNN has none: see gemm/integers.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..elementwise.compile import available, level
from ..gemm.integers import DEEP, IntegersKind, integers, widening
from ..gemm.tiles import TILES
from .integer_tails import INT8, INT32
from .lowering import F32, aligned_array, derived, ordered
from .machine_steps import GAP, emit_product, spread_lanes, tile_sizes
from .quantized import bound_of, centred, exact_int8, factor_of, y_zero, zero_of
from .table import Site, kernel
from .values import FINITE, Value, strides_of

WORDS = np.dtype(np.uint32)


def require_code(site: Site) -> None:
    """Decline unless machine code is the fastest exact code."""
    site.require(not available(), available())
    site.require(not exact_int8(), "oneDNN multiplies 8-bit integers exactly")


def code_zero(site: Site, x: Value, zero: Value | None, name: str) -> Value:
    """The zero point of an input; declines several."""
    one = zero_of(site, zero, x, name)
    return site.shared_constant("no zero point", lambda: np.zeros(1, np.uint8)) if one is None else one


def code_weights(site: Site, x: Value, zero: Value | None, w: Value, w_zero: Value | None, axis: int) -> tuple[Value, np.ndarray]:
    """Constant weights as int8 without a zero point, and the highest absolute sum of each channel; declines others."""
    w, offset = centred(site, w, w_zero, axis)
    site.require(not offset, "the weights minus their zero points exceed int8")
    return w, bound_of(site, w, 0, zero, x.dtype, axis)


class CodeProduct:
    """A product of A by constant weights.

    Attributes:
        site: the place.
        matrix: A as a matrix in C order.
        w: the weights, int8 without a zero point.
        zero: the zero point of A.
    """

    def __init__(self, site: Site, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> None:
        require_code(site)
        site.require(a.dtype in INT8 and b.dtype in INT8 and a.size and b.size, "an input is not of 8 bits, or empty")
        site.require(
            b.constant and b.ndim == 2 and a.ndim >= 2 and a.shape[-1] == b.shape[0], "the weights are not a constant matrix"
        )
        self.site, self.zero = site, code_zero(site, a, a_zero, "a")
        self.w, _ = code_weights(site, a, a_zero, b, b_zero, 1)
        self.a, self.rows, self.shape = a, math.prod(a.shape[:-1]), (*a.shape[:-1], b.shape[1])

    def emit(self, dtype: Any, factor: np.ndarray | None = None, shift: int = 0) -> Value:
        """Add the steps; with a factor for each column, or one for all, sums are multiplied, rounded and shifted."""
        site, w, (k, n) = self.site, self.w, self.w.shape
        kind = IntegersKind(level(), self.a.dtype.kind == "i", "sums" if factor is None else np.dtype(dtype).name)
        depth = -(-k // DEEP) * DEEP
        sizes = {**tile_sizes(self.rows, n), "pitch": n, "k": k, "depth": depth, "stride": depth * kind.element + GAP}
        columns = sizes["groups"] * TILES * LANES
        words = site.derived(w, "tiles", lambda: packed_tiles(w.read()[None], depth, columns))
        sums = derived(site, w, "sums of tiles", lambda: np.pad(w.read().sum(0, dtype=np.int32), (0, columns - n)))
        values = {"left": self._left(kind, sizes), "zero": self.zero, "w": words, "sums": sums}
        if factor is not None:
            wide = np.pad(np.broadcast_to(factor, n), (0, columns - n))
            values["factors"] = derived(site, w, ("factors", wide.tobytes()), lambda: wide)
            values["shift"] = shift_of(site, shift)
        y = site.new(self.shape, dtype, finiteness=FINITE)
        values["y"] = y.view((self.rows, n), strides_of((self.rows, n), y.dtype.itemsize))
        emit_product(site, integers(kind), sizes, values, ("y",), self.rows * k * n, "product of 8-bit integers")
        return y

    def _left(self, kind: IntegersKind, sizes: dict[str, int]) -> Value:
        """A as the code reads it, made once for all products of it."""
        site, a, function = self.site, self.a, widening(kind)

        def make() -> Value:
            matrix = ordered(site, a, range(a.ndim)).view((self.rows, a.shape[-1]), (a.shape[-1], 1))
            left = site.new((self.rows, sizes["stride"]), np.uint8, finiteness=FINITE)
            emit_product(site, function, sizes, {"x": matrix, "left": left}, ("left",), matrix.size, "copy of rows")
            return left

        return site.kept(a, function.what, make)


def packed_tiles(ws: np.ndarray, depth: int, columns: int) -> Value:
    """Matrices of weights in tiles: (matrices, tiles, words of a column, 16)."""
    (count, k, n), tiles = ws.shape, aligned_array((len(ws), columns // LANES, depth // 4, LANES), WORDS)
    rows = np.zeros((count, n, depth), np.int8)
    rows[:, :, :k] = ws.swapaxes(1, 2)
    for tile, row in zip(tiles.array, rows.view(WORDS), strict=True):
        spread_lanes(tile, row)
    return tiles


def shift_of(site: Site, shift: int) -> Value:
    """The zero point of a result as float32."""
    return site.shared_constant(("shift", shift), lambda: np.full(1, shift, F32))


@kernel("MatMulInteger", 10, on="machine")
def matmul_integer_by_code(site: Site, a: Value, b: Value, az: Value | None = None, bz: Value | None = None) -> Value:
    """A product of integers with int32 results."""
    return CodeProduct(site, a, b, az, bz).emit(INT32)


@kernel("QLinearMatMul", 10, 21, on="machine")
def qlinear_matmul_by_code(
    site: Site, a: Value, sa: Value, za: Value, b: Value, sb: Value, zb: Value, ys: Value, yz: Value
) -> Value:
    """A product of integers, times one float32 for each column, rounded."""
    one = CodeProduct(site, a, b, za, zb)
    factor, zero = factor_of(site, sa, sb, ys), y_zero(site, yz)
    site.require(factor.size in (1, b.shape[1]), "the scale of b does not fit")
    return one.emit(yz.dtype, factor, zero)
