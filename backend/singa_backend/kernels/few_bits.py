"""Products with weights of few bits in blocks (MatMulNBits), on integers of 8 bits.

The weights of a file are packed once, into the differences of their values and zero points as int8, in tiles of 64 rows of W
(K x N), with a float32 scale for each block.

**Few rows of A.**  Each group of 64 elements of a row, or of a block if that is larger, is rounded to a multiple of its maximum:
an integer of one, two or three digits of 8 bits.  A product of a digit and a tile is exact.  A tile of several blocks gets a left
factor with as many rows, each of which has the elements of one block and zeros: so the sum of each block stays apart until it is
multiplied by its scale.  Digits d are given as d + 128, because oneDNN multiplies bytes without sign by bytes with sign; the sums
of the weights of each group correct that.  Three digits have the 24 bits of a float32; `accuracy_level` 4 permits one digit.

**Many rows.**  Products of the identity and a tile, times the scales, are the weights as floats: for a piece that fits into the
cache, which is then a factor of an ordinary product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..proto.tensor_data import release
from . import onednn as dnn
from .lowering import F32, aligned_array, dense_desc, emit, laid_out, ordered, require_plain, strided_desc, threads_for, unset
from .onednn import Attributes, Memory, MemoryDesc, Primitive
from .quantized import exact_int8
from .rounding import BF16, NONE, rounded, rounding
from .table import Site, kernel
from .values import FINITE, Bound, Value, strides_of

DOMAIN = "com.microsoft"

INT8, UINT8 = np.dtype(np.int8), np.dtype(np.uint8)

SIDE = 64
"""The rows of a tile, and the columns that are neighbours in memory: what oneDNN's products of bytes read."""

LAYOUT = "BA16a64b4a"
"""The layout of a tile: for each 64 columns, 16 times 4 rows of them."""

DIGITS = 16
"""The number of digits of all rows up to which products of digits are faster than products of floats."""

PIECE = 1 << 19
"""The weights that are floats at a time."""

WIDEST = 1 << 12
"""The columns that are floats at a time, at most."""

PART = 1 << 21
"""The weights that are packed at a time."""

LEAST = np.float32(1e-30)
"""A smaller maximum counts as this one: its inverse is finite."""


# --- the packed form


@dataclass(frozen=True, eq=False)
class Blocks:
    """Weights in tiles of int8.

    Attributes:
        k: the rows of W.
        n: its columns.
        block: the size of a block.
        tiles: int8, (tiles, columns / 64, 16, 64, 4).
        scales: float32, (blocks, columns); the columns are padded to a multiple of 64, and small blocks to whole tiles.
        sums: float32, (groups, columns): the sum of the weights of each group.
        offsets: float32, (blocks, columns): what to subtract from the weights of a block, if int8 does not hold it; or None.
    """

    k: int
    n: int
    block: int
    tiles: Value
    scales: Value
    sums: Value
    offsets: Value | None

    @property
    def nbytes(self) -> int:
        """The bytes of all parts."""
        return sum(v.nbytes for v in (self.tiles, self.scales, self.sums, self.offsets) if v is not None)

    @property
    def count(self) -> int:
        """The number of tiles."""
        return self.tiles.shape[0]

    @property
    def columns(self) -> int:
        """The columns, padded."""
        return self.scales.shape[1]

    @property
    def joined(self) -> int:
        """The blocks of a tile; 1 for those that are larger."""
        return max(1, SIDE // self.block)

    @property
    def group(self) -> int:
        """The elements of a group: a tile or a block, the larger."""
        return max(SIDE, self.block)

    def row(self, tile: int) -> int:
        """The first row of scales of a tile."""
        return tile * SIDE // self.block


def pack(b: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, bits: int, block: int, n: int, k: int) -> Blocks:
    """Weights in the form of a node, as `Blocks`.

    Args:
        b: bytes, (n, blocks, bytes of a block).
        scales: float32, (n, blocks).
        zeros: the zero points: bytes, packed for each row, or floats, (n, blocks); None for the middle of the range.
        bits: of a weight.
        block: the size of a block.
        n: the columns of W, rows of b.
        k: the rows of W.
    """
    blocks, columns = -(-k // block), -(-n // SIDE) * SIDE
    group = max(SIDE, block)
    groups = -(-k // group)
    tiles = aligned_array((groups * group // SIDE, columns // SIDE, 16, SIDE, 4), INT8)
    made = Blocks(
        k, n, block, tiles, aligned_array((groups * group // block, columns), F32), aligned_array((groups, columns), F32),
        aligned_array((blocks, columns), F32) if zeros is not None and (bits == 8 or zeros.dtype != UINT8) else None,
    )  # fmt: skip
    words = tiles.array.view(np.int32)[..., 0]
    step = max(SIDE, PART // max(k, 1) // SIDE * SIDE)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        count, padded = rows.stop - first, -(-(rows.stop - first) // SIDE) * SIDE
        at = slice(first, first + padded)
        values = np.zeros((padded, groups * group), np.int8)
        centred, rest = _centred(b[rows], None if zeros is None else zeros[rows], bits, blocks)
        values[:count, :k] = centred.reshape(count, -1)[:, :k]
        scale = np.zeros((padded, made.scales.shape[0]), np.float32)
        scale[:count, :blocks] = scales[rows]
        made.scales.array[:, at] = scale.T
        totals = np.add.reduce(values.reshape(padded, -1, block), 2, np.int32) * scale.astype(np.float64)
        made.sums.array[:, at] = totals.reshape(padded, groups, -1).sum(2).T
        if made.offsets is not None:
            assert rest is not None
            made.offsets.array[:, at] = 0
            made.offsets.array[:, rows] = (rest * scales[rows]).T
        shape = (padded // SIDE, SIDE, made.count, 16)
        words[:, first // SIDE : (first + padded) // SIDE] = values.view(np.int32).reshape(shape).transpose(2, 0, 3, 1)
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


# --- steps


class Calls:
    """Executions of primitives that are one step."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.items: list[tuple[Primitive, dict[int, tuple[MemoryDesc, Value, int]]]] = []

    def add(self, primitive: Primitive, arguments: dict[int, tuple[MemoryDesc, Value, int]]) -> None:
        """Add one; each argument has its description, the value, and the place in it, in bytes."""
        self.items.append((primitive, arguments))

    def emit(self, writes: tuple[Value, ...], kernel_name: str) -> None:
        """Add the step."""
        site, items = self.site, self.items
        nbytes = max(p.scratchpad_nbytes for p, _ in items)
        scratch = site.scratch(nbytes) if nbytes else None
        made = {id(v) for v in writes}
        reads = {id(v): v for _, a in items for _, v, _ in a.values() if id(v) not in made}
        held: dict[Any, tuple[Memory, Value | None, int]] = {}
        bound: list[Any] = []

        def memory(md: MemoryDesc, v: Value | None, place: int, key: Any) -> Memory:
            found = held.get(key)
            if found is None:
                found = held[key] = (Memory(md, address(v, place)), v, place)
            return found[0]

        def address(v: Value | None, place: int) -> int:
            if v is not None:
                return v.address + place
            assert scratch is not None and scratch.memory is not None
            return int(scratch.memory.ctypes.data)

        def bind() -> Bound:
            library = dnn.library()
            assert library is not None
            for one, v, place in held.values():
                one.move(address(v, place))
            for p, a in items if not bound else ():
                given = {arg: memory(md, v, place, (id(md), id(v), place)) for arg, (md, v, place) in a.items()}
                if p.scratchpad_nbytes:
                    given[dnn.args.SCRATCHPAD] = memory(p.query("scratchpad"), None, 0, id(p))
                bound.append(dnn.bind(p, given, [arg for arg, (_, v, _) in a.items() if v.constant]))
            return [(library.execute, one.args) for one in bound]

        label = f"{kernel_name} {items[-1][0].implementation}"
        site.emit(bind, reads=list(reads.values()), writes=writes, kernel=label, scratch=scratch, keeps=[items])


@dataclass(frozen=True, eq=False)
class Product:
    """A call of MatMulNBits.

    Attributes:
        site: the place.
        x: A as a matrix in C order.
        form: the weights.
        bias: or None.
    """

    site: Site
    x: Value
    form: Blocks
    bias: Value | None

    @property
    def rows(self) -> int:
        """The rows of A."""
        return self.x.shape[0]

    def sums_of_blocks(self) -> Value:
        """Add the step that sums each block of A, with the opposite sign."""
        form, x = self.form, self.x
        made = self.site.new((self.rows, -(-form.k // form.block)), F32, finiteness=FINITE)
        starts = np.arange(0, form.k, form.block)

        def bind() -> Bound:
            y = made.array
            return [(np.add.reduceat, (x.array, starts, 1, None, y)), (np.negative, (y, y))]

        self.site.emit(bind, reads=(x,), writes=(made,), kernel="numpy.add.reduceat")
        return made

    def start(self, calls: Calls, y: Value) -> bool:
        """Add to a step the product that subtracts the offsets of the weights, if there are any."""
        offsets = self.form.offsets
        if offsets is None:
            return False
        sums = self.sums_of_blocks()
        given = strided_desc(F32, (sums.shape[1], self.form.n), offsets.strides)
        with threads_for(2 * math.prod(sums.shape) * self.form.n):
            made = dnn.matmul(dense_desc(F32, sums.shape), given, None, dense_desc(F32, y.shape))
        arguments = {
            dnn.args.SRC: (dense_desc(F32, sums.shape), sums, 0),
            dnn.args.WEIGHTS: (given, offsets, 0),
            dnn.args.DST: (dense_desc(F32, y.shape), y, 0),
        }
        calls.add(made, arguments)
        return True


# --- few rows


def digits_of(site: Site, x: Value, matrix: Value, form: Blocks, count: int) -> tuple[Value, Value, Value]:
    """The rows of A as integers: digits plus 128, the value of a digit, and the correction for each group.

    The steps are made once for all products of a value with the same blocks.

    Returns:
        uint8, (rows, tiles, digits, blocks of a tile, 64); float32, (rows, groups, digits); float32, (rows, groups).
    """
    rows, groups, joined = matrix.shape[0], form.sums.shape[0], form.joined
    what = ("digits", form.block, count)

    def make() -> tuple[Value, Value, Value]:
        digits = site.new((rows, form.count, count, joined, SIDE), UINT8, finiteness=FINITE)
        scales = site.new((rows, groups, count), F32, finiteness=FINITE)
        shifts = site.new((rows, groups), F32, finiteness=FINITE)
        scratch = site.scratch(8 * rows * groups * form.group + 4 * rows * groups)
        site.emit(
            lambda: [(_Rounding(matrix, digits, scales, shifts, scratch.memory, form, count), ())],
            reads=(matrix,), writes=(digits, scales, shifts), kernel="numpy digits", scratch=scratch,
        )  # fmt: skip
        return digits, scales, shifts

    made: list[tuple[Value, Value, Value]] = []

    def part(i: int) -> Callable[[], Value]:
        def of() -> Value:
            if not made:
                made.append(make())
            return made[0][i]

        return of

    a, b, c = (site.kept(x, (*what, i), part(i)) for i in range(3))
    return a, b, c


class _Rounding:
    """Rounds the rows of A: a function of no arguments on the present memory of the values."""

    def __init__(self, x: Value, digits: Value, scales: Value, shifts: Value, scratch: Any, form: Blocks, count: int) -> None:
        rows, groups = shifts.shape
        size, k = groups * form.group, form.k
        both = scratch[: 8 * rows * size].view(np.float32).reshape(2, rows, size)
        self.x, self.padding, self.copy = x.array, both[0, :, k:], both[0, :, :k] if k < size else None
        self.source = (both[0] if k < size else self.x).reshape(rows, groups, form.group)
        self.values = both[1].reshape(self.source.shape)
        self.inverse = scratch[8 * rows * size : 8 * rows * size + 4 * rows * groups].view(np.float32).reshape(rows, groups, 1)
        self.most = shifts.array.reshape(rows, groups, 1)
        self.shifts, self.scales = shifts.array, scales.array
        powers = 256.0 ** np.arange(count)
        self.limit, self.offset = np.float32(127 * powers.sum()), np.float32(128 * powers.sum())
        self.units = (powers / (127 * powers.sum())).astype(np.float32)
        self.correction = np.float32(-powers.sum() * 128 / (127 * powers.sum()))
        self.digits = digits.array
        width = min(form.block, SIDE)
        a, b, c, d, e = self.digits.strides  # block j of a tile: row j, from column j * width on
        shape = (*self.digits.shape[:4], width)
        self.targets = [
            np.lib.stride_tricks.as_strided(self.digits, shape, (a, b, c, d + width, e))[:, :, i] for i in range(count)
        ]
        blocks = (rows, form.count, form.joined, width)
        self.floats = self.values.reshape(blocks)
        self.integers = self.values.view(np.int32)
        self.bytes = [self.values.view(np.uint8).reshape(*blocks, 4)[..., i] for i in range(count)]
        self.joined = form.joined

    def __call__(self) -> None:
        if self.copy is not None:
            self.copy[...] = self.x
            self.padding[...] = 0
        source, values, most = self.source, self.values, self.most
        np.abs(source, values)
        np.maximum.reduce(values, 2, None, most, True)
        np.maximum(most, LEAST, most)
        np.divide(self.limit, most, self.inverse)
        np.multiply(source, self.inverse, values)
        np.rint(values, values)
        np.add(values, self.offset, values)
        np.multiply(most, self.units, self.scales)
        np.multiply(self.shifts, self.correction, self.shifts)
        if self.joined > 1:
            self.digits[...] = 0
        if len(self.targets) == 1:
            np.copyto(self.targets[0], self.floats, "unsafe")
            return
        np.copyto(self.integers, values, "unsafe")
        for target, given in zip(self.targets, self.bytes, strict=True):
            np.copyto(target, given)


def few_rows(product: Product, x: Value, count: int, y: Value) -> None:
    """Add the steps for few rows of A; `count` is the number of digits."""
    site, form = product.site, product.form
    digits, scales, shifts = digits_of(site, x, product.x, form, count)
    joined, columns = form.joined, form.columns
    sums = site.new((product.rows, joined, columns), F32, finiteness=FINITE)
    calls = Calls(site)
    into, left = dense_desc(F32, (joined, columns)), dense_desc(UINT8, (joined, SIDE))
    tile, one = MemoryDesc.tagged(INT8, (SIDE, columns), LAYOUT), dense_desc(F32, (1,))

    def primitive(adds: bool) -> Primitive:
        attributes = Attributes().set_scales(dnn.args.SRC, 0).append_binary("mul", into)
        if adds:
            attributes.append_sum()
        return dnn.matmul(left, tile, None, into, attributes)

    with threads_for(2 * joined * SIDE * columns):
        first, further = primitive(False), primitive(True)
    row = columns * F32.itemsize
    for t in range(form.count):
        group = t * SIDE // form.group
        for m in range(product.rows):
            for i in range(count):
                place = ((m * form.count + t) * count + i) * joined * SIDE
                unit = ((m * scales.shape[1] + group) * count + i) * F32.itemsize
                arguments = {
                    dnn.args.SRC: (left, digits, place),
                    dnn.args.WEIGHTS: (tile, form.tiles, t * SIDE * columns),
                    dnn.args.DST: (into, sums, m * joined * row),
                    dnn.args.scales(dnn.args.SRC): (one, scales, unit),
                    dnn.args.post_op(0): (into, form.scales, form.row(t) * row),
                }
                calls.add(further if t or i else first, arguments)
    calls.emit((sums,), "product of digits")
    _corrected(product, shifts, sums, y)


def _corrected(product: Product, shifts: Value, sums: Value, y: Value) -> None:
    """Add the step that adds the sums of blocks, the correction and the bias of each row."""
    form, joined = product.form, product.form.joined
    calls = Calls(product.site)
    adds = product.start(calls, y)
    line, left = dense_desc(F32, (1, form.n)), dense_desc(F32, (1, shifts.shape[1]))
    right = strided_desc(F32, (shifts.shape[1], form.n), form.sums.strides)
    attributes = Attributes()
    for _ in range(joined):
        attributes.append_binary("add", line)
    if adds:
        attributes.append_sum()
    with threads_for(2 * math.prod(right.shape)):
        made = dnn.matmul(left, right, None if product.bias is None else line, line, attributes)
    size = F32.itemsize
    for m in range(product.rows):
        arguments = {
            dnn.args.SRC: (left, shifts, m * shifts.shape[1] * size),
            dnn.args.WEIGHTS: (right, form.sums, 0),
            dnn.args.DST: (line, y, m * form.n * size),
        }
        for j in range(joined):
            arguments[dnn.args.post_op(j)] = (line, sums, (m * joined + j) * form.columns * size)
        if product.bias is not None:
            arguments[dnn.args.BIAS] = (line, product.bias, 0)
        calls.add(made, arguments)
    calls.emit((y,), "sums of blocks")


# --- many rows


def many_rows(product: Product, dtype: np.dtype[Any], y: Value) -> None:
    """Add the steps for many rows: products with pieces of the weights as floats of this dtype."""
    site, form, x = product.site, product.form, product.x
    if dtype == BF16:
        x = rounded(x).emit(site, dense_desc(F32, x.shape))
    calls = Calls(site)
    started = product.start(calls, y)
    wide = min(form.columns, WIDEST)
    deep = min(form.count, max(1, PIECE // (SIDE * wide))) * SIDE
    piece = site.new((deep, wide), dtype, finiteness=FINITE)
    size, eye = dtype.itemsize, site.shared_constant(("identity", SIDE), lambda: np.eye(SIDE, dtype=np.uint8))
    primitives: dict[Any, Primitive] = {}

    def once(key: Any, make: Callable[[], Primitive]) -> Primitive:
        if key not in primitives:
            primitives[key] = make()
        return primitives[key]

    for c, columns, k, depth in _pieces(form, wide, deep):
        cut = min(columns, form.n - c)
        _expand(calls, once, form, piece, eye, c, columns, range(k // SIDE, -(-(k + depth) // SIDE)))
        left = strided_desc(dtype, (product.rows, depth), (form.k * size, size))
        right = strided_desc(dtype, (depth, cut), (columns * size, size))
        into = strided_desc(F32, (product.rows, cut), (form.n * 4, 4))
        line = dense_desc(F32, (1, cut)) if product.bias is not None and not k else None
        adds = bool(k) or started

        def make(left: MemoryDesc = left, right: MemoryDesc = right, line: Any = line, into: MemoryDesc = into) -> Primitive:
            with threads_for(2 * product.rows * math.prod(right.shape)):
                attributes = Attributes().append_sum() if adds else Attributes()  # noqa: B023
                return dnn.matmul(left, right, line, into, attributes)

        arguments = {
            dnn.args.SRC: (left, x, k * size),
            dnn.args.WEIGHTS: (right, piece, 0),
            dnn.args.DST: (into, y, c * 4),
        }
        if line is not None:
            assert product.bias is not None
            arguments[dnn.args.BIAS] = (line, product.bias, c * 4)
        calls.add(once((cut, columns, depth, adds, line is None), make), arguments)
    calls.emit((piece, y), "product of unpacked weights")


def _pieces(form: Blocks, wide: int, deep: int) -> Iterator[tuple[int, int, int, int]]:
    """The pieces: the first column, the columns with padding, the first row, the rows without padding."""
    for c in range(0, form.columns, wide):
        for k in range(0, form.k, deep):
            yield c, min(wide, form.columns - c), k, min(deep, form.k - k)


def _expand(
    calls: Calls, once: Callable[..., Primitive], form: Blocks, piece: Value, eye: Value, c: int, columns: int, tiles: range
) -> None:
    """Add the products that write some columns of some tiles as floats."""
    rows = min(form.block, SIDE)
    left = dense_desc(UINT8, (rows, SIDE))
    tile = MemoryDesc.tagged(INT8, (SIDE, columns), LAYOUT)
    into, scale = dense_desc(piece.dtype, (rows, columns)), dense_desc(F32, (columns,))

    def make() -> Primitive:
        with threads_for(2 * rows * SIDE * columns):
            return dnn.matmul(left, tile, None, into, Attributes().set_scales(dnn.args.WEIGHTS, 2))

    made = once(("expand", columns), make)
    for n, t in enumerate(tiles):
        for j in range(form.joined):
            arguments = {
                dnn.args.SRC: (left, eye, j * rows * SIDE),
                dnn.args.WEIGHTS: (tile, form.tiles, (t * form.columns + c) * SIDE),
                dnn.args.DST: (into, piece, (n * SIDE + j * rows) * columns * piece.dtype.itemsize),
                dnn.args.scales(dnn.args.WEIGHTS): (scale, form.scales, ((form.row(t) + j) * form.columns + c) * 4),
            }
            calls.add(made, arguments)


def rounded_product(product: Product, weights: Callable[[], np.ndarray], key: Value, y: Value) -> None:
    """Add the steps of a product in bfloat16 with weights that are kept so.

    Args:
        product: the call.
        weights: computes them, (n, k).
        key: the constant that they are derived from.
        y: the result.
    """
    site, form = product.site, product.form
    left = rounded(product.x)
    into = dense_desc(F32, y.shape)
    line = None if product.bias is None else dense_desc(F32, (1, form.n))
    with threads_for(2 * product.rows * form.n * form.k):
        made = dnn.matmul(left.desc, unset(BF16, (form.k, form.n)), line, into)
    layout = made.query("weights")

    def make() -> Value:
        array = weights()
        return laid_out(array, strided_desc(BF16, (form.k, form.n), array.strides[::-1]), layout)

    arguments = {
        dnn.args.SRC: (left.desc, left.emit(site, dense_desc(F32, product.x.shape))),
        dnn.args.WEIGHTS: (layout, site.derived(key, ("few bits", "bfloat16", layout), make)),
        dnn.args.DST: (into, y),
    }
    if line is not None and product.bias is not None:
        arguments[dnn.args.BIAS] = (line, product.bias)
    emit(site, made, arguments, (y,), "product of kept weights")


# --- the kernel


LEVELS = {2: 2, 3: 2, 4: 1}
"""The digits that each `accuracy_level` needs; others need 3."""


@kernel("MatMulNBits", 1, on="onednn", domain=DOMAIN)
def matmul_nbits(
    site: Site,
    x: Value,
    b: Value,
    scales: Value,
    zeros: Value | None = None,
    g_idx: Value | None = None,
    bias: Value | None = None,
) -> Value:
    """Products of 8-bit integers for few rows, of floats for many."""
    k, n, bits, block = (site.attributes[name] for name in ("K", "N", "bits", "block_size"))
    _require(site, x, b, scales, zeros, bias)
    site.require(g_idx is None or not g_idx.size, "g_idx gives the groups")
    site.require_finite(x)
    given = _arrays(b, scales, zeros, n, k, bits, block)
    what = ("few bits", "blocks", scales.key, None if zeros is None else zeros.key, bits, block, n, k)

    def make() -> Blocks:
        made = pack(*given, bits, block, n, k)
        for array in given:
            if array is not None:
                release(array)
        return made

    form = site.derived(b, what, make)
    matrix = ordered(site, x, range(x.ndim))
    rows = x.size // k
    product = Product(site, matrix.view((rows, k), (k * F32.itemsize, F32.itemsize)), form, bias)
    y = site.new((*x.shape[:-1], n), F32)
    flat = y.view((rows, n), (n * F32.itemsize, F32.itemsize))
    level = site.attributes["accuracy_level"]
    may_round = (level in (3, 4) or site.options.precision == "bf16") and rounding() != NONE
    count = min(LEVELS.get(level, 3), 2 if site.options.precision == "bf16" else 3)
    keeps = site.options.memory == "speed" and may_round
    if rows * count <= (1 if keeps else DIGITS) or rows == 1:
        few_rows(product, x, count, flat)
    elif keeps:
        rounded_product(product, lambda: floats(*given, bits, k), b, flat)
    else:
        many_rows(product, BF16 if may_round else F32, flat)
    return y


def _require(site: Site, x: Value, b: Value, scales: Value, zeros: Value | None, bias: Value | None) -> None:
    """Decline what the kernel does not compute."""
    k, n, bits, block = (site.attributes[name] for name in ("K", "N", "bits", "block_size"))
    site.require(exact_int8(), "there are no exact products of 8-bit integers")
    require_plain(site, x, bias)
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


def _arrays(
    b: Value, scales: Value, zeros: Value | None, n: int, k: int, bits: int, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The contents of the constants, in the shapes that `pack` takes; those of a file are not copied."""
    blocks = -(-k // block)
    points = None if zeros is None else zeros.read().reshape(n, -1)
    return b.read().reshape(n, blocks, -1), scales.read().reshape(n, blocks), points
