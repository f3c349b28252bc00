"""Products with weights of few bits in blocks (MatMulNBits, MatMulBnb4), by machine code; see gemm/few_bits.py.

The weights of a file are packed once for all plans.  Code that is missed is made at once, because the packing depends on it: a
few functions for all products of a model, whatever their sizes.

With `accuracy_level` 4 rows of A are rounded to bytes by blocks, and the sums of a block are exact; otherwise all is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..dtypes import FOUR_BIT_CODES
from ..elementwise.builder import LANES
from ..elementwise.compile import available, level
from ..gemm import few_bits as code
from ..gemm.few_bits import FewBitsKind
from ..gemm.frame import FrameFunction
from ..proto.tensor_data import release
from . import onednn as dnn
from .few_bits_packing import LARGEST, UINT8, Blocks, floats, pack, signed, swapped
from .lowering import F32, dense_desc, derived, emit, laid_out, ordered, require_plain, strided_desc, threads_for, unset
from .machine_steps import GAP, emit_product, tile_sizes
from .rounding import BF16, NONE, rounded, rounding
from .table import Site, kernel
from .values import FINITE, Value

DOMAIN = "com.microsoft"

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""The contents of weights, scales and zero points."""

Made = TypeVar("Made")

ROUNDED = 4
"""The `accuracy_level` that permits to round A to bytes."""


@dataclass(frozen=True, eq=False)
class Product:
    """A call.

    Attributes:
        site: the place.
        x: A.
        matrix: A as a matrix in C order.
        weights: W.
        n: the columns of W.
        block: the size of a block of packed weights.
        kind: of the code.
    """

    site: Site
    x: Value
    matrix: Value
    weights: Blocks
    n: int
    block: int
    kind: FewBitsKind

    @property
    def blocks(self) -> int:
        """The blocks of a packed column."""
        return self.weights.scales.shape[1]

    @property
    def sizes(self) -> dict[str, int]:
        """The numbers of its functions, without the distance of rows."""
        rows, k = self.matrix.shape
        steps = max(1, self.block // self.kind.deep)
        return {**tile_sizes(rows, self.n), "k": k, "block": self.block, "blocks": self.blocks, "steps": steps}

    def copied(self, function: FrameFunction, dtype: Any, name: str) -> dict[str, Value]:
        """Emit the step that writes A in the form that the code reads: rows, sums, scales."""
        site, rows = self.site, self.matrix.shape[0]
        length = self.blocks * self.block + GAP // np.dtype(dtype).itemsize
        parts = {"left": site.new((rows, length), dtype, finiteness=FINITE)}
        parts["sums"] = site.new((rows, self.blocks), np.int32 if dtype == np.int8 else F32, finiteness=FINITE)
        if dtype == np.int8:
            parts["scales"] = site.new((rows, self.blocks), F32, finiteness=FINITE)
        sizes = {**self.sizes, "stride": parts["left"].strides[0]}
        emit_product(site, function, sizes, {"x": self.matrix, **parts}, tuple(parts), rows * length, name)
        return parts

    def left(self, function: FrameFunction, dtype: Any, name: str) -> dict[str, Value]:
        """What `copied` returns, made once for all products of A with equal blocks."""
        made: dict[str, Value] = {}

        def part(which: str) -> Value:
            if not made:
                made.update(self.copied(function, dtype, name))
            return made[which]

        names = ("left", "sums", "scales") if dtype == np.int8 else ("left", "sums")
        key = (function.what, self.block, self.blocks)
        return {n: self.site.kept(self.x, (*key, n), partial(part, n)) for n in names}

    def emit(self, rounds: bool, bias: Value | None, table: Value | None, y: Value) -> None:
        """Add the steps."""
        site, kind, weights, (rows, k) = self.site, self.kind, self.weights, self.matrix.shape
        if rounds:
            function, name = code.integers(kind), "product of integers"
            left = self.left(code.rounding(kind.values), np.int8, "rounding of rows")
        else:
            function, name = (code.floats(kind), "product of a row") if rows == 1 else (code.panels(kind), "product of rows")
            left = self.left(code.copying(), np.float32, "copy of rows")
        values = {**left, "w": weights.words, "factors": weights.scales, "y": y}
        values["bias"] = _padded(site, bias, weights.tiles * LANES)
        if weights.zeros is not None:
            values["zeros"] = weights.zeros
        if table is not None:
            values["table"] = table
        sizes = {**self.sizes, "stride": left["left"].strides[0]}
        emit_product(site, function, sizes, values, ("y",), rows * k * self.n, name)


def value_table(site: Site) -> Value:
    """The numbers of four bits whose values are numbers with a sign."""
    return site.shared_constant("values of 4 bits", lambda: (np.arange(16, dtype=np.float32) + 8) % 16 - 8)


def _padded(site: Site, bias: Value | None, columns: int) -> Value:
    """A bias for all packed columns."""
    if bias is None:
        return site.shared_constant(("zeros", columns), lambda: np.zeros(columns, np.float32))
    flat = bias.view((bias.size,), (F32.itemsize,))
    if bias.constant:
        return derived(site, bias, ("padded", columns), lambda: np.pad(flat.array, (0, columns - bias.size)))
    wide = site.new((columns,), F32, finiteness=bias.finiteness)
    part = wide.view((bias.size,), (F32.itemsize,))
    site.emit(lambda: [(np.copyto, (part.array, flat.array))], reads=(bias,), writes=(wide,), kernel="numpy.copyto")
    return wide


@kernel("MatMulNBits", 1, on="machine", domain=DOMAIN)
def matmul_nbits(
    site: Site,
    x: Value,
    b: Value,
    scales: Value,
    zeros: Value | None = None,
    g_idx: Value | None = None,
    bias: Value | None = None,
) -> Value:
    """Products of 8-bit integers or of floats."""
    site.require(not available(), available())
    k, n, bits, block = (site.attributes[name] for name in ("K", "N", "bits", "block_size"))
    _require(site, x, b, scales, zeros, g_idx, bias)
    site.require(not _keeps_floats(site), "the weights are kept in bfloat16")
    site.require_finite(x)
    rounds = site.attributes["accuracy_level"] == ROUNDED
    points = "" if zeros is None else "bytes" if zeros.dtype == UINT8 else "floats"
    kind = FewBitsKind(bits, min(block, 32), points, level())
    change = _same if rounds else signed(bits)
    what = ("few bits", scales.key, None if zeros is None else zeros.key, bits, block, n, rounds)
    arrays = _arrays(b, scales, zeros, n, k, block)
    weights = packed_weights(site, b, what, arrays, lambda: pack(*arrays, bits, block, change))
    matrix, y, flat = _matrices(site, x, n)
    table = None if rounds else value_table(site)
    Product(site, x, matrix, weights, n, min(block, LARGEST), kind).emit(rounds, bias, table, flat)
    return y


@kernel("MatMulBnb4", 1, on="machine", domain=DOMAIN)
def matmul_bnb4(site: Site, x: Value, b: Value, absmax: Value) -> Value:
    """Products of floats, which are entries of a table times the scale of a block."""
    site.require(not available(), available())
    k, n, block, kind = (site.attributes[name] for name in ("K", "N", "block_size", "quant_type"))
    _require_floats(site, x, None)
    site.require(site.attributes["transB"] and kind in (0, 1), "W is not transposed, or its codes are unknown")
    site.require(block >= 16 and not block & (block - 1) and k % block == 0, "a block has parts of several rows")
    site.require(b.constant and absmax.constant and absmax.finiteness == FINITE, "the weights are not constant, or not finite")
    fits = x.shape[-1] == k and b.size == n * k // 2 and absmax.size == n * k // block and b.size
    site.require(b.dtype == UINT8 and absmax.dtype == F32 and fits, "the shapes or dtypes do not match")
    site.require_finite(x)
    what = ("few bits", absmax.key, "codes", block, n)
    matrix, y, flat = _matrices(site, x, n)
    arrays = b.read().reshape(n, k // block, -1), absmax.read().reshape(n, -1), None
    weights = packed_weights(site, b, what, arrays, lambda: pack(*arrays, 4, block, swapped))
    form = FewBitsKind(4, min(block, 32), "", level(), table=True)
    codes = FOUR_BIT_CODES[kind]
    table = site.shared_constant(("table", kind), lambda: codes)
    Product(site, x, matrix, weights, n, min(block, LARGEST), form).emit(False, None, table, flat)
    return y


def _same(b: np.ndarray) -> np.ndarray:
    return b


def packed_weights(site: Site, b: Value, what: Any, arrays: Arrays, make: Callable[[], Blocks]) -> Blocks:
    """What `make` returns for the arrays, made once for all plans."""
    found: Blocks = site.derived(b, what, lambda: _then_released(arrays, make))
    return found


def _then_released(arrays: Arrays, make: Callable[[], Made]) -> Made:
    """What `make` returns; the system may reuse the memory of the arrays of a mapped file then."""
    try:
        return make()
    finally:
        for array in arrays:
            if array is not None:
                release(array)


def _matrices(site: Site, x: Value, n: int) -> tuple[Value, Value, Value]:
    """A as a matrix in C order, the result, and the result as a matrix."""
    rows, k = math.prod(x.shape[:-1]), x.shape[-1]
    matrix = ordered(site, x, range(x.ndim)).view((rows, k), (k * F32.itemsize, F32.itemsize))
    y = site.new((*x.shape[:-1], n), F32)
    return matrix, y, y.view((rows, n), (n * F32.itemsize, F32.itemsize))


def _require_floats(site: Site, *values: Value | None) -> None:
    """Decline what is not float32, empty, or broadcast in memory."""
    for v in values:
        if v is not None:
            site.require(v.dtype == F32, f"the dtype is {v.dtype}")
            site.require(
                v.ndim and v.size and all(s > 0 for s, d in zip(v.strides, v.shape, strict=True) if d > 1),
                "an input is empty or broadcast",
            )


# --- weights in bfloat16


def _keeps_floats(site: Site) -> bool:
    """Whether weights are kept in bfloat16."""
    may_round = site.attributes["accuracy_level"] in (3, 4) or site.options.precision == "bf16"
    return site.options.memory == "speed" and may_round and rounding() != NONE and dnn.library() is not None


@kernel("MatMulNBits", 1, on="onednn", domain=DOMAIN)
def matmul_kept_floats(
    site: Site,
    x: Value,
    b: Value,
    scales: Value,
    zeros: Value | None = None,
    g_idx: Value | None = None,
    bias: Value | None = None,
) -> Value:
    """Products of weights that are kept in bfloat16."""
    require_plain(site, x, bias)
    k, n, bits, block = (site.attributes[name] for name in ("K", "N", "bits", "block_size"))
    _require(site, x, b, scales, zeros, g_idx, bias)
    site.require(_keeps_floats(site), "the weights are not kept in bfloat16")
    site.require_finite(x)
    what = ("few bits", scales.key, None if zeros is None else zeros.key, bits, block, n, k)
    matrix, y, flat = _matrices(site, x, n)
    arrays = _arrays(b, scales, zeros, n, k, block)

    weights = partial(_then_released, arrays, lambda: floats(*arrays, bits, k))
    rounded_product(site, x, matrix, bias, weights, b, what, flat)
    return y


def rounded_product(
    site: Site, x: Value, matrix: Value, bias: Value | None, weights: Callable[[], np.ndarray], source: Value, key: Any, y: Value
) -> None:
    """Add the steps of a product in bfloat16 with weights that are kept so.

    Args:
        site: the place.
        x: A; its copy in bfloat16 is made once for all products of it.
        matrix: A as a matrix in C order.
        bias: or None.
        weights: computes them, (n, k).
        source: the constant that they are derived from.
        key: what else they depend on.
        y: the result.
    """
    (rows, k), n = matrix.shape, y.shape[1]
    left = rounded(matrix)
    into = dense_desc(F32, y.shape)
    line = None if bias is None else dense_desc(F32, (1, n))
    with threads_for(2 * rows * n * k):
        made = dnn.matmul(left.desc, unset(BF16, (k, n)), line, into)
    layout = made.query("weights")

    def make() -> Value:
        array = weights()
        return laid_out(array, strided_desc(BF16, (k, n), array.strides[::-1]), layout)

    copy = site.kept(x, ("bfloat16", "rows"), lambda: left.emit(site, dense_desc(F32, matrix.shape)))
    arguments = {
        dnn.args.SRC: (left.desc, copy),
        dnn.args.WEIGHTS: (layout, site.derived(source, ("bfloat16", key, layout), make)),
        dnn.args.DST: (into, y),
    }
    if line is not None and bias is not None:
        arguments[dnn.args.BIAS] = (line, bias)
    emit(site, made, arguments, (y,), "product of kept weights")


def _require(site: Site, x: Value, b: Value, scales: Value, zeros: Value | None, g_idx: Value | None, bias: Value | None) -> None:
    """Decline what the kernel does not compute."""
    k, n, bits, block = (site.attributes[name] for name in ("K", "N", "bits", "block_size"))
    _require_floats(site, x, bias)
    site.require(g_idx is None or not g_idx.size, "g_idx gives the groups")
    site.require(not site.attributes["weight_prepacked"], "the weights have the layout of a GPU")
    site.require(bits in (2, 4, 8) and block >= 16 and not block & (block - 1), "the definition reports the form")
    site.require(b.constant and scales.constant and (zeros is None or zeros.constant), "the weights are not constant")
    site.require(b.dtype == UINT8 and scales.dtype == F32, f"the scales are {scales.dtype}")
    site.require(zeros is None or zeros.dtype in (UINT8, F32), "the zero points are neither bytes nor float32")
    site.require(scales.finiteness == FINITE and (zeros is None or zeros.finiteness == FINITE), "a scale is not finite")
    blocks = -(-k // block)
    site.require(x.shape[-1] == k and b.size == n * blocks * block * bits // 8 and b.size, "the shapes do not match")
    site.require(scales.size == n * blocks, "the shapes do not match")
    points = blocks if zeros is not None and zeros.dtype != UINT8 else -(-blocks * bits // 8)
    site.require(zeros is None or zeros.size == n * points, "the shapes do not match")
    site.require(bias is None or (bias.size == n and bias.contiguous), "the shapes do not match")


def _arrays(b: Value, scales: Value, zeros: Value | None, n: int, k: int, block: int) -> Arrays:
    """The contents of the constants, in the shapes that `pack` takes; those of a file are not copied."""
    blocks = -(-k // block)
    points = None if zeros is None else zeros.read().reshape(n, -1)
    return b.read().reshape(n, blocks, -1), scales.read().reshape(n, blocks), points
