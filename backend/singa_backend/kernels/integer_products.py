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


class CodeProduct:
    """A product of A by constant weights.

    Attributes:
        site: the place.
        matrix: A as a matrix in C order.
        w: the weights, int8 without a zero point.
        zero: the zero point of A.
    """

    def __init__(self, site: Site, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> None:
        site.require(not available(), available())
        site.require(not exact_int8(), "oneDNN multiplies 8-bit integers exactly")
        site.require(a.dtype in INT8 and b.dtype in INT8 and a.size and b.size, "an input is not of 8 bits, or empty")
        site.require(
            b.constant and b.ndim == 2 and a.ndim >= 2 and a.shape[-1] == b.shape[0], "the weights are not a constant matrix"
        )
        zero = zero_of(site, a_zero, a, "a")
        self.site, (self.w, offset) = site, centred(site, b, b_zero, 1)
        site.require(not offset, "the weights minus their zero points exceed int8")
        bound_of(site, self.w, 0, zero, a.dtype, 1)
        self.zero = site.shared_constant("no zero point", lambda: np.zeros(1, np.uint8)) if zero is None else zero
        self.a, self.rows, self.shape = a, math.prod(a.shape[:-1]), (*a.shape[:-1], b.shape[1])

    def emit(self, dtype: Any, factor: np.ndarray | None = None, shift: int = 0) -> Value:
        """Add the steps; with a factor for each column, or one for all, sums are multiplied, rounded and shifted."""
        site, w, (k, n) = self.site, self.w, self.w.shape
        kind = IntegersKind(level(), self.a.dtype.kind == "i", "sums" if factor is None else np.dtype(dtype).name)
        depth = -(-k // DEEP) * DEEP
        sizes = {**tile_sizes(self.rows, n), "k": k, "depth": depth, "stride": depth * kind.element + GAP}
        columns = sizes["groups"] * TILES * LANES
        words = site.derived(w, "tiles", lambda: _packed(w.read(), depth, columns))
        sums = derived(site, w, "sums of tiles", lambda: np.pad(w.read().sum(0, dtype=np.int32), (0, columns - n)))
        values = {"left": self._left(kind, sizes), "zero": self.zero, "w": words, "sums": sums}
        if factor is not None:
            wide = np.pad(np.broadcast_to(factor, n), (0, columns - n))
            values["factors"] = derived(site, w, ("factors", wide.tobytes()), lambda: wide)
            values["shift"] = site.shared_constant(("shift", shift), lambda: np.full(1, shift, F32))
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


def _packed(w: np.ndarray, depth: int, columns: int) -> Value:
    """Weights in tiles: (tiles, words of a column, 16)."""
    (k, n), tiles = w.shape, aligned_array((columns // LANES, depth // 4, LANES), WORDS)
    rows = np.zeros((n, depth), np.int8)
    rows[:, :k] = w.T
    spread_lanes(tiles.array, rows.view(WORDS))
    return tiles


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
