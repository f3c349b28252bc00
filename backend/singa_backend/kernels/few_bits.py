"""Products with weights of few bits in blocks (MatMulNBits), on integers of 8 bits.

The weights of a file are packed once: the differences of their values and zero points as int8, in tiles of as many rows of W
(K x N) as a block has, at least 64; with a float32 scale for each block.

**Few rows of A.**  Each group of elements that meets a tile is rounded to a multiple of its maximum: an integer of one, two or
three digits of 8 bits.  A product of digits and a tile is exact.  If a tile has several blocks, a left factor has the elements of
one block, and zeros: so the sum of each block stays apart until it is multiplied by its scale.  One product of two batches
computes all tiles of some columns, and one more adds their results, times the values of the digits.  Digits d are given as
d + 128, because oneDNN multiplies bytes without sign by bytes with sign; the sums of the weights of each group correct that.
Three digits have the 24 bits of a float32; `accuracy_level` 4 permits one.

**Many rows.**  Products of the identity and a tile, times the scales, are the weights as floats: for a piece that fits into the
cache, which is then a factor of an ordinary product.

**Without AVX-512 and VNNI** the columns of a tile are one after another, and a copy writes them as floats.  Products add pairs of
products of bytes in 16 bits, which hold those of a digit and 4 bits.  One row and one digit are such a product; all others are
products of floats, which are faster there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..proto.tensor_data import release
from . import onednn as dnn
from .few_bits_packing import INT8, UINT8, Blocks, floats, pack
from .lowering import F32, dense_desc, emit, laid_out, ordered, require_plain, strided_desc, threads_for, unset
from .onednn import SATURATED, Attributes, Memory, MemoryDesc, Primitive
from .quantized import exact_int8
from .rounding import BF16, NONE, rounded, rounding
from .table import Site, kernel
from .values import FINITE, Bound, Value

DOMAIN = "com.microsoft"

DIGITS = 16
"""The number of digits of all rows up to which products of digits are faster than products of floats."""

PIECE = 1 << 19
"""The weights that are floats at a time."""

LEAST = np.float32(1e-30)
"""A smaller maximum counts as this one: its inverse is finite."""


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
            for one, v, place in held.values():
                one.move(address(v, place))
            for p, a in items if not bound else ():
                given = {arg: memory(md, v, place, (id(md), id(v), place)) for arg, (md, v, place) in a.items()}
                if p.scratchpad_nbytes:
                    given[dnn.args.SCRATCHPAD] = memory(p.query("scratchpad"), None, 0, id(p))
                bound.append(dnn.bind(p, given, [arg for arg, (_, v, _) in a.items() if v.constant]))
            return [(one.execute, one.args) for one in bound]

        label = f"{kernel_name} {items[-1][0].implementation}"
        notes = [note for p, _ in items for note in p.notes]
        site.emit(bind, reads=list(reads.values()), writes=writes, kernel=label, scratch=scratch, keeps=[items], notes=notes)


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
    """The rows of A as integers: digits plus 128, the values of digits, and the correction for each tile.

    The steps are made once for all products of a value with the same blocks.  The left factor that adds the products has the
    values of digits; if the rows are computed together, those of one row are zeros for the other rows.

    Returns:
        * uint8: (rows, tiles, blocks of a tile, depth) for one digit, else (blocks of a tile, tiles, rows, digits, depth).
        * float32: (rows, tiles, blocks of a tile), else (rows, blocks of a tile, tiles, rows, digits).
        * float32: (rows, tiles).
    """
    rows, tiles, joined, depth = matrix.shape[0], form.count, form.joined, form.depth

    def make() -> tuple[Value, Value, Value]:
        single = form.is_single
        shape = (rows, tiles, joined, depth) if single else (joined, tiles, rows, count, depth)
        digits = site.new(shape, UINT8, finiteness=FINITE)
        units = site.new((rows, *((tiles, joined) if single else (joined, tiles, rows, count))), F32, finiteness=FINITE)
        shifts = site.new((rows, tiles), F32, finiteness=FINITE)
        scratch = site.scratch(4 * rows * tiles * (2 * depth + 1))
        site.emit(
            lambda: [(_Rounding(matrix, digits, units, shifts, scratch.memory, form, count), ())],
            reads=(matrix,), writes=(digits, units, shifts), kernel="numpy digits", scratch=scratch,
        )  # fmt: skip
        return digits, units, shifts

    made: list[tuple[Value, Value, Value]] = []

    def part(i: int) -> Callable[[], Value]:
        def of() -> Value:
            if not made:
                made.append(make())
            return made[0][i]

        return of

    a, b, c = (site.kept(x, ("digits", form.block, count, i), part(i)) for i in range(3))
    return a, b, c


class _Rounding:
    """Rounds the rows of A: a function of no arguments on the present memory of the values."""

    def __init__(self, x: Value, digits: Value, units: Value, shifts: Value, scratch: Any, form: Blocks, count: int) -> None:
        (rows, tiles), joined, depth, k = shifts.shape, form.joined, form.depth, form.k
        size = tiles * depth
        numbers = scratch.view(np.float32)
        both, rest = numbers[: 2 * rows * size].reshape(2, rows, size), numbers[2 * rows * size :]
        self.x, self.padding, self.copy = x.array, both[0, :, k:], both[0, :, :k] if k < size else None
        self.source = (both[0] if k < size else self.x).reshape(rows, tiles, depth)
        self.values = both[1].reshape(self.source.shape)
        self.inverse = rest[: rows * tiles].reshape(rows, tiles, 1)
        self.shifts = shifts.array
        self.most = self.shifts.reshape(rows, tiles, 1)
        powers = 256.0 ** np.arange(count)
        limit = 127 * powers.sum() - (4 if count == 3 else 0)  # less than 127 in all digits by the error of a product
        self.limit, self.offset = np.float32(limit), np.float32(128 * powers.sum())
        self.unit, self.correction = (powers / limit).astype(np.float32), np.float32(-128 * powers.sum() / limit)
        self.units, self.digits = units.array, digits.array
        pieces = self.values.reshape(rows, tiles, joined, depth // joined)
        octets = pieces.view(np.uint8).reshape(*pieces.shape, 4)
        self.integers = None if count == 1 else self.values.view(np.int32)
        self.clears_units, self.clears_digits = not form.is_single and rows > 1, joined > 1
        self.targets: list[tuple[np.ndarray, np.ndarray]] = []
        if form.is_single:
            self.own = [(self.most, self.units)]
        else:
            self.own = [(self.most[m], self.units[m, :, :, m]) for m in range(rows)]
        width = depth // joined
        for j in range(joined):
            columns = slice(j * width, (j + 1) * width)
            if form.is_single:
                self.targets.append((self.digits[:, :, j, columns], pieces[:, :, j]))
                continue
            for i in range(count):
                given = pieces[:, :, j] if count == 1 else octets[:, :, j, :, i]
                self.targets.append((self.digits[j, :, :, i, columns].transpose(1, 0, 2), given))

    def __call__(self) -> None:
        if self.copy is not None:
            self.copy[...] = self.x
            self.padding[...] = 0
        source, values, most = self.source, self.values, self.most
        np.abs(source, values)
        np.maximum.reduce(values, 2, out=most, keepdims=True)
        np.maximum(most, LEAST, out=most)
        np.divide(self.limit, most, self.inverse)
        np.multiply(source, self.inverse, values)
        np.rint(values, values)
        np.add(values, self.offset, values)
        if self.clears_units:
            self.units[...] = 0
        for largest, units in self.own:
            np.multiply(largest, self.unit, units)
        np.multiply(self.shifts, self.correction, self.shifts)
        if self.clears_digits:
            self.digits[...] = 0
        if self.integers is not None:
            np.copyto(self.integers, values, "unsafe")
        for target, given in self.targets:
            np.copyto(target, given, "unsafe")


@dataclass(frozen=True, eq=False)
class _Lanes:
    """Products of a stripe of some width with rows of digits.

    Attributes:
        primitive: the product of all tiles.
        left, right, into, scale: the descriptions of its arguments.
    """

    primitive: Primitive
    left: MemoryDesc
    right: MemoryDesc
    into: MemoryDesc
    scale: MemoryDesc

    @classmethod
    def of(cls, form: Blocks, lines: int, wide: int) -> _Lanes:
        """The products; `lines` is the number of rows of the left factor of a tile."""
        tiles, depth = form.count, form.depth
        left, into = dense_desc(UINT8, (tiles, lines, depth)), dense_desc(F32, (tiles, lines, wide))
        right = form.lane(wide)
        scale = into if form.is_single else dense_desc(F32, (tiles, 1, wide))
        with threads_for(2 * tiles * lines * depth * wide):
            made = dnn.matmul(left, right, None, into, Attributes().append_binary("mul", scale), pairs=form.pairs)
        return cls(made, left, right, into, scale)


def few_rows(product: Product, x: Value, count: int, y: Value) -> None:
    """Add the steps for few rows of A; `count` is the number of digits."""
    site, form, rows = product.site, product.form, product.rows
    digits, units, shifts = digits_of(site, x, product.x, form, count)
    joined, tiles, depth = form.joined, form.count, form.depth
    if form.is_single:  # one row of A after another; the blocks of a tile together
        lines, passes, together, repeats = joined, 1, 1, rows
    else:
        lines, passes, together, repeats = rows * count, joined, rows, 1
    height = tiles * passes * lines
    sums = site.new((height, max(w for _, w in form.stripes)), F32, finiteness=FINITE)
    calls, lanes, totals = Calls(site), dict[int, _Lanes](), dict[int, Primitive]()
    _correct(product, calls, shifts, y)
    coefficients = dense_desc(F32, (together, height))
    for c, wide in form.stripes:
        cut = min(wide, form.n - c)
        if wide not in lanes:
            lanes[wide] = _Lanes.of(form, lines, wide)
        b, to = strided_desc(F32, (height, cut), (4 * wide, 4)), strided_desc(F32, (together, cut), (4 * form.n, 4))
        if cut not in totals:
            with threads_for(2 * together * height * cut):
                totals[cut] = dnn.matmul(coefficients, b, None, to, Attributes().append_sum())
        one = lanes[wide]
        for m in range(repeats):
            for j in range(passes):
                arguments = {
                    dnn.args.SRC: (one.left, digits, (m + j) * tiles * lines * depth),
                    dnn.args.WEIGHTS: (one.right, form.tiles, tiles * depth * c),
                    dnn.args.DST: (one.into, sums, 4 * j * tiles * lines * wide),
                    dnn.args.post_op(0): (one.scale, form.scales, form.scale_at(c, wide, 0, j)),
                }
                calls.add(one.primitive, arguments)
            arguments = {
                dnn.args.SRC: (coefficients, units, 4 * m * height),
                dnn.args.WEIGHTS: (b, sums, 0),
                dnn.args.DST: (to, y, 4 * (m * form.n + c)),
            }
            calls.add(totals[cut], arguments)
    calls.emit((sums, y), "product of digits")


def _correct(product: Product, calls: Calls, shifts: Value, y: Value) -> None:
    """Add to a step the product that begins the result: the correction of the digits, and the bias."""
    form = product.form
    adds = product.start(calls, y)
    left, into = dense_desc(F32, shifts.shape), dense_desc(F32, y.shape)
    right = strided_desc(F32, (form.count, form.n), form.sums.strides)
    line = None if product.bias is None else dense_desc(F32, (1, form.n))
    with threads_for(2 * product.rows * math.prod(right.shape)):
        made = dnn.matmul(left, right, line, into, Attributes().append_sum() if adds else Attributes())
    arguments = {dnn.args.SRC: (left, shifts, 0), dnn.args.WEIGHTS: (right, form.sums, 0), dnn.args.DST: (into, y, 0)}
    if line is not None and product.bias is not None:
        arguments[dnn.args.BIAS] = (line, product.bias, 0)
    calls.add(made, arguments)


# --- many rows


def many_rows(product: Product, dtype: np.dtype[Any], y: Value) -> None:
    """Add the steps for many rows: products with pieces of the weights as floats of this dtype."""
    site, form, x = product.site, product.form, product.x
    if dtype == BF16:
        x = rounded(x).emit(site, dense_desc(F32, x.shape))
    calls = Calls(site)
    started, expand = product.start(calls, y), _copies if form.is_plain else _products
    wide = max(w for _, w in form.stripes)
    deep = min(form.count, max(1, PIECE // (form.depth * wide))) * form.depth
    piece = site.new((deep, wide), dtype, finiteness=FINITE)
    size = dtype.itemsize
    primitives: dict[Any, Primitive] = {}

    def once(key: Any, make: Callable[[], Primitive]) -> Primitive:
        if key not in primitives:
            primitives[key] = make()
        return primitives[key]

    for c, columns, k, depth in _pieces(form, deep):
        cut = min(columns, form.n - c)
        expand(calls, once, form, piece, c, columns, range(k // form.depth, -(-(k + depth) // form.depth)))
        left = strided_desc(dtype, (product.rows, depth), (form.k * size, size))
        right = strided_desc(dtype, (depth, cut), (size, deep * size) if form.is_plain else (columns * size, size))
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


def _pieces(form: Blocks, deep: int) -> Iterator[tuple[int, int, int, int]]:
    """The pieces: the first column, the columns with padding, the first row, the rows without padding."""
    for c, wide in form.stripes:
        for k in range(0, form.k, deep):
            yield c, wide, k, min(deep, form.k - k)


def _copies(calls: Calls, once: Callable[..., Primitive], form: Blocks, piece: Value, c: int, wide: int, tiles: range) -> None:
    """Add the copy that writes some tiles of a stripe as floats, column by column."""
    block, depth, shape = form.block, form.depth, (len(tiles), form.joined, wide, form.block)
    given = strided_desc(INT8, shape, (depth * wide, block, depth, 1))
    into = strided_desc(piece.dtype, shape, [s * piece.dtype.itemsize for s in (depth, block, piece.shape[0], 1)])

    def make() -> Primitive:
        with threads_for(8 * math.prod(shape)):
            return dnn.reorder(given, into, attributes=Attributes().set_scales(dnn.args.FROM, 0b111))

    arguments = {
        dnn.args.FROM: (given, form.tiles, (form.count * c + tiles.start * wide) * depth),
        dnn.args.TO: (into, piece, 0),
        dnn.args.scales(dnn.args.FROM): (
            dense_desc(F32, (math.prod(shape[:3]),)),
            form.scales,
            form.scale_at(c, wide, tiles.start, 0),
        ),
    }
    calls.add(once(("expand", shape), make), arguments)


def _products(calls: Calls, once: Callable[..., Primitive], form: Blocks, piece: Value, c: int, wide: int, tiles: range) -> None:
    """Add the products that write some tiles of a stripe as floats."""
    rows, depth = form.block, form.depth
    eye = calls.site.shared_constant(("identity", depth), lambda: np.eye(depth, dtype=np.uint8))
    left, tile = dense_desc(UINT8, (rows, depth)), form.tile(wide)
    into, scale = dense_desc(piece.dtype, (rows, wide)), dense_desc(F32, (wide,))

    def make() -> Primitive:
        with threads_for(2 * rows * depth * wide):
            return dnn.matmul(left, tile, None, into, Attributes().set_scales(dnn.args.WEIGHTS, 2))

    made = once(("expand", wide), make)
    for n, t in enumerate(tiles):
        for j in range(form.joined):
            arguments = {
                dnn.args.SRC: (left, eye, j * rows * depth),
                dnn.args.WEIGHTS: (tile, form.tiles, (form.count * c + t * wide) * depth),
                dnn.args.DST: (into, piece, (n * depth + j * rows) * wide * piece.dtype.itemsize),
                dnn.args.scales(dnn.args.WEIGHTS): (scale, form.scales, form.scale_at(c, wide, t, j)),
            }
            calls.add(made, arguments)


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


# --- the kernel


def reads_tiles() -> bool:
    """Whether oneDNN reads the layout of tiles on this machine."""
    library = dnn.library()
    return library is not None and "avx512" in library.isa and exact_int8()


def _uses_digits(form: Blocks, rows: int, count: int) -> bool:
    """Whether products of digits are exact, and faster than products of floats."""
    if form.is_plain:
        return rows == count == 1 and form.pairs < SATURATED
    return rows == 1 or rows * count <= DIGITS


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
    level = site.attributes["accuracy_level"]
    count = min(LEVELS.get(level, 3), 2 if site.options.precision == "bf16" else 3)
    plain = not reads_tiles()
    single = plain or count == 1
    what = ("few bits", "blocks", scales.key, None if zeros is None else zeros.key, bits, block, n, k, single)
    rows = x.size // k

    def make() -> Blocks:
        try:
            return pack(*given, bits, block, n, k, single, plain)
        finally:
            _release(given)

    def kept() -> np.ndarray:
        try:
            return floats(*given, bits, k)
        finally:
            _release(given)

    matrix = ordered(site, x, range(x.ndim)).view((rows, k), (k * F32.itemsize, F32.itemsize))
    y = site.new((*x.shape[:-1], n), F32)
    flat = y.view((rows, n), (n * F32.itemsize, F32.itemsize))
    may_round = (level in (3, 4) or site.options.precision == "bf16") and rounding() != NONE
    if site.options.memory == "speed" and may_round:
        rounded_product(site, x, matrix, bias, kept, b, what, flat)
        return y
    product = Product(site, matrix, site.derived(b, what, make), bias)
    if _uses_digits(product.form, rows, count):
        few_rows(product, x, count, flat)
    else:
        many_rows(product, BF16 if may_round else F32, flat)
    return y


def _require(site: Site, x: Value, b: Value, scales: Value, zeros: Value | None, bias: Value | None) -> None:
    """Decline what the kernel does not compute."""
    k, n, bits, block = (site.attributes[name] for name in ("K", "N", "bits", "block_size"))
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


def _release(arrays: tuple[np.ndarray | None, ...]) -> None:
    """Let the system reuse the memory of a mapped file."""
    for array in arrays:
        if array is not None:
            release(array)


def _arrays(
    b: Value, scales: Value, zeros: Value | None, n: int, k: int, bits: int, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The contents of the constants, in the shapes that `pack` takes; those of a file are not copied."""
    blocks = -(-k // block)
    points = None if zeros is None else zeros.read().reshape(n, -1)
    return b.read().reshape(n, blocks, -1), scales.read().reshape(n, blocks), points
