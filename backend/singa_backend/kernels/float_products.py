"""Products of float32 matrices, and what follows them, by machine code: see gemm/floats.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..elementwise.compile import Compiled, available, level
from ..elementwise.machine_code import AXES, FIELDS
from ..gemm.floats import BLOCK, LEAVES, PACKED, ROWS, SHORT, W_STEPS, FloatsKind, floats, packing
from ..gemm.row_products import COLUMNS, row_products
from ..gemm.tiles import HEIGHT
from ..ir.sizes import is_open, late
from ..ir.versioned import versioned
from ..proto.tensor_data import COPIED, release
from .expressions import ExpressionCall, Leaves, compute, judge, trace
from .frames import FrameAddress, InnerFrame, ReducedAxes, machine_code, movement
from .lowering import F32, aligned_array
from .machine_steps import emit_product
from .table import Follower, Site
from .values import Value, merged

SPAN = 16
"""The most tiles of a unit of work."""


def declined(site: Site) -> str:
    """Why machine code does not compute products at a site; empty if it may."""
    if reason := available():
        return reason
    return "" if site.options.precision == "float32" else "products are in bfloat16"


def require_any_bits(site: Site) -> None:
    """Decline in deterministic sessions, in which machine code has equal bits on all processors."""
    site.require(not site.options.deterministic or declined(site), "the bits would be those of one processor")


def fewest(axes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Three axes, or fewer and some of size 1, with the same elements in the same order: sizes and steps, from the outermost."""
    made: list[tuple[int, int]] = []
    for size, step in axes:
        if made and made[-1][1] == size * step:
            made[-1] = (made[-1][0] * size, step)
        elif size > 1:
            made.append((size, step))
    return [*[(1, 0)] * (3 - len(made)), *made]


@dataclass(frozen=True)
class BatchAxis:
    """An axis along which there are several products.

    Attributes:
        size: their number.
        x: the bytes from one to the next in A.
        w: in W.
        axes: those of the result; none if its columns are in parts, one for each product.
    """

    size: int
    x: int
    w: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class FloatProduct:
    """A product or a convolution.

    Attributes:
        shape: of the result.
        x: A.
        w: W.
        rows: the size and the step in A of up to three axes, from the outermost.
        row_axes: the axes of the result that are rows.
        depth: its size, and its steps in A and W.
        columns: their number in a product, and their step in W.
        column_axis: the axis of the result.
        taps: up to two axes: their sizes, and their steps in A and W.
        batch: up to two axes.
    """

    shape: tuple[int, ...]
    x: Value
    w: Value
    rows: Sequence[tuple[int, int]]
    row_axes: tuple[int, ...]
    depth: tuple[int, int, int]
    columns: tuple[int, int]
    column_axis: int
    taps: Sequence[tuple[int, int, int]] = ()
    batch: Sequence[BatchAxis] = field(default=())

    @property
    def work(self) -> int:
        """The products of two numbers."""
        return math.prod(self.shape) * math.prod(t[0] for t in self.taps) * self.depth[0]

    def steps(self, v: Value) -> tuple[int, int, int, int] | None:
        """The steps of a value that broadcasts to the result: of rows, two axes of products, columns; None if they are uneven."""
        lead = len(self.shape) - v.ndim
        along = [0] * lead + [0 if d == 1 else s for d, s in zip(v.shape, v.strides, strict=True)]

        def step(axes: tuple[int, ...]) -> int | None:
            found = merged([self.shape[a] for a in axes], [along[a] for a in axes], repeats=True)
            return found and found[1]

        column = along[self.column_axis] if self.shape[self.column_axis] != 1 else v.dtype.itemsize
        made = [step(b.axes) if b.axes else column * self.columns[0] for b in _two(self.batch)]
        found = [step(self.row_axes), *made, column]
        return None if None in found else tuple(found)  # type: ignore[return-value]  # four numbers


def _two(batch: Sequence[BatchAxis]) -> list[BatchAxis]:
    return [*[BatchAxis(1, 0, 0, ())] * (2 - len(batch)), *batch]


class FloatProductStep:
    """The step of a product.

    Attributes:
        site: the place.
        product: what is computed.
        tiles: those of one product.
        sizes: the numbers of the functions, without those of `chain`.
        chain: the axes along which products are added, and how many are before the next rows.
    """

    def __init__(self, site: Site, product: FloatProduct, adds: bool = False) -> None:
        """Args: adds: whether products are added to what the result has, not to a bias."""
        self.site, self.product = site, product
        rows = math.prod(d for d, _ in product.rows)
        threads = site.options.threads
        (b0, b1), (t0, t1) = _two(product.batch), [*[(1, 0, 0)] * (2 - len(product.taps)), *product.taps]
        r0, r1, r2 = fewest(product.rows)
        (depth, x_depth, w_depth), (n, w_column) = product.depth, product.columns
        self.tiles = -(-n // LANES)
        span = SPAN if threads == 1 else late(_span, threads, rows, self.tiles, b0.size, b1.size)
        self.sizes = {
            "rows": rows, "row1": r1[0], "row2": r2[0], "x_row0": r0[1], "x_row1": r1[1], "x_row2": r2[1],
            "taps": t0[0] * t1[0], "tap1": t1[0], "w_tap0": t0[2], "w_tap1": t1[2],
            "depth": depth, "w_depth": w_depth, "n": n, "w_column": w_column,
            "batches": b0.size * b1.size, "batch1": b1.size, "x_batch0": b0.x, "x_batch1": b1.x,
            "groups": late(lambda n, s: -(-n // s), self.tiles, span), "span": span, "height": late(_height, rows),
            "tiles": self.tiles,
            "w_batch0": 0, "w_batch1": 0, "adds": int(adds), "after": 0, "leaves": 0,
        }  # fmt: skip
        (c0, s0), (c1, s1), (c2, s2) = fewest([t0[:2], t1[:2], (depth, x_depth)])
        self.chain = {
            "taps": c0 * c1, "tap1": c1, "x_tap0": s0, "x_tap1": s1, "depth": c2, "x_depth": s2,
            "depth_block": BLOCK, "tap_block": late(lambda c: max(1, BLOCK // c), c2),
        }  # fmt: skip

    def _kind(self) -> FloatsKind:
        """The kind of code: convolutions of few products have their own."""
        sizes, wide = [self.chain[n] for n in ("taps", "tap1", "depth")], _wide()
        if self.product.taps and not is_open(sizes) and self.chain["x_depth"] in (0, F32.itemsize):
            taps, inner, depth = sizes
            if taps * depth <= SHORT:
                return FloatsKind(wide, (taps // inner, inner), depth)
        return FloatsKind(wide)

    def weights(self) -> Value:
        """W in tiles: made once for a constant, otherwise in every run."""
        site, w, s = self.site, self.product.w, self.sizes
        batch = _two(self.product.batch)
        outer, inner = (b.size if b.w else 1 for b in batch)  # along the other axes there is one for all products
        one = self.tiles * s["taps"] * s["depth"] * LANES * F32.itemsize
        s["w_batch0"], s["w_batch1"] = (n if b.w else 0 for b, n in zip(batch, (one * inner, one), strict=True))
        sizes = {**s, "w_batch0": batch[0].w, "w_batch1": batch[1].w, "batches": outer * inner, "batch1": inner}
        function = packing(s["w_column"] == F32.itemsize)
        shape = (sizes["batches"], self.tiles, s["taps"] * s["depth"], LANES)
        if not w.constant:
            y = site.new(shape, F32, finiteness=w.finiteness)
            emit_product(site, function, sizes, {"w": w, "tiled": y}, ("tiled",), w.size, "pack", sizes["batches"] * self.tiles)
            return y
        numbers = [sizes[n] for n in PACKED.numbers]

        def make() -> Value:
            made, source = aligned_array(shape, F32), w.buffer.read()
            assert source is not None
            row = LANES * s["w_column"]  # of tiles: one after the other in memory if columns are the rows of W
            apart = sizes["batches"] == 1 and s["w_column"] == max(sizes[n] for n in W_STEPS)
            each = max(COPIED // max(row, 1), 1) if apart else self.tiles
            for t in range(0, self.tiles, each):
                tiles, start = min(each, self.tiles - t), w.offset + t * row
                part = {**sizes, "tiles": tiles, "n": min(tiles * LANES, s["n"] - t * LANES)}
                places = source.ctypes.data + start, made.address + t * made.strides[1]
                frame = FrameAddress(np.array([[0, 1, 0, 1, *(part[n] for n in PACKED.numbers), *places]] * 2, np.int64))
                function.compiled().call(frame)
                release(source[start : start + tiles * row] if apart else source)
            return made

        found: Value = site.derived(w, ("tiles of floats", w.offset, *numbers), make)
        return found

    def bias(self, bias: Value | None) -> Value:
        """A number for each column of all tiles, of each product if the columns of the result are in parts."""
        site, n, columns = self.site, self.product.columns[0], self.tiles * LANES
        parts = math.prod(b.size for b in self.product.batch if not b.axes)
        self.sizes |= {"b_batch0": 0, "b_batch1": 0 if parts == 1 or bias is None else columns * F32.itemsize}
        if bias is None:
            return no_bias(site, columns)
        if bias.shape == (columns,) and parts == 1 and bias.contiguous:
            return bias
        if bias.constant:
            gap = ((0, 0), (0, columns - n))
            made: Value = site.derived(
                bias, ("bias", parts, columns), lambda: site.constant(np.pad(bias.array.reshape(parts, n), gap))
            )
            return made
        y = site.new((parts, columns), F32, finiteness=bias.finiteness)
        part, given = y.view((parts, n), y.strides), bias.view((parts, n), (n * bias.strides[-1], bias.strides[-1]))
        site.emit(lambda: [(np.copyto, (part.array, given.array))], reads=(bias,), writes=(y,), kernel="numpy.copyto")
        return y

    def emit(
        self, y: Value, bias: Value | None, calls: Sequence[Follower], needed: int, finiteness: int, weights: Value | None = None
    ) -> tuple[Value, int]:
        """Add the steps.

        Args:
            y: receives the result; its columns are adjacent.
            bias: a number for each column, or None.
            calls: what follows.
            needed: how many of the calls must be computed.
            finiteness: of the product.
            weights: W in tiles, if it is known.

        Returns:
            The result, and how many of the calls are computed.
        """
        site, steps = self.site, self.product.steps(y)
        site.require(steps is not None and steps[3] == F32.itemsize, "the rows of the result are not evenly spaced")
        assert steps is not None
        y.finiteness = finiteness
        relu = int(bool(calls) and calls[0].name == "Relu")
        after = _After.of(site, self.product, y, calls[relu:])
        values = {"x": self.product.x, "w": self.weights() if weights is None else weights, "bias": self.bias(bias), "y": y}
        sizes = {**self.sizes, **self.chain, "pitch": steps[0], "y_batch0": steps[1], "y_batch1": steps[2], "relu": relu}
        units = late(lambda b, r, h, g: b * -(-r // h) * g, *(sizes[n] for n in ("batches", "rows", "height", "groups")))
        function, work, name = floats(self._kind()), self.product.work, "product" + "+relu" * relu
        if after is None:
            emit_product(site, function, sizes, values, ("y",), work, name, units)
        else:
            sizes |= {"after": after.function.address, "leaves": len(after.frame.values)}
            values |= {"frame": after.frame.frame} | {f"leaf {i}": v for i, v in enumerate(after.reads)}
            emit_product(
                site,
                function,
                sizes,
                values,
                ("y",),
                work,
                f"{name}+{after.label}",
                units,
                (after.frame,),
                (after.function.call,),
            )
            y = after.y
        count = relu + (0 if after is None else after.count)
        if count < needed:
            y, count = _followed(site, y, calls[count:needed]), needed
        return y, count


def _followed(site: Site, y: Value, calls: Sequence[Follower]) -> Value:
    """Compute calls in the memory of the value that they follow."""
    terms, inputs = trace(site, _operations(y, calls))
    (z,) = compute(site, terms[-1:], inputs, "", lambda v: v.buffer is y.buffer, {0: y})
    site.require(z.buffer is y.buffer, "what follows is not computed in place")
    return z


FEW_ROWS = 4
"""The rows up to which a matrix of a run is read where it is."""


@dataclass(frozen=True)
class RowProductStep:
    """The step of a product of few rows; see gemm/row_products.py.

    Attributes:
        site: the place.
        product: what is computed.
        y: the result.
        steps: those of the result; see `FloatProduct.steps`.
        adjacent: whether the columns of W are adjacent.
    """

    site: Site
    product: FloatProduct
    y: Value
    steps: tuple[int, int, int, int]
    adjacent: bool

    @classmethod
    def of(cls, site: Site, product: FloatProduct, y: Value) -> RowProductStep | None:
        """The step; None if the product has another form."""
        if product.w.constant or product.taps or len(product.rows) != 1:
            return None
        (rows, _), item = product.rows[0], F32.itemsize
        if not isinstance(rows, int) or rows > FEW_ROWS:
            return None
        (_, x_depth, w_depth), (_, w_column), steps = product.depth, product.columns, product.steps(y)
        if steps is None or any(not isinstance(s, int) or s != item for s in (x_depth, steps[3])):
            return None
        adjacent = isinstance(w_column, int) and w_column == item
        dense = isinstance(w_depth, int) and w_depth == item
        return cls(site, product, y, steps, adjacent) if adjacent or dense else None

    def emit(self, calls: Sequence[Follower], finiteness: int) -> Value:
        """Add the step, and those of the calls that follow; return the result."""
        product, y, steps = self.product, self.y, self.steps
        (rows, x_row), (depth, _, w_depth), (n, w_column) = product.rows[0], product.depth, product.columns
        b0, b1 = _two(product.batch)
        groups = -(-n // COLUMNS)
        sizes = {
            "batches": b0.size * b1.size, "batch1": b1.size, "rows": rows, "depth": depth, "n": n, "groups": groups,
            "w_step": w_depth if self.adjacent else w_column, "x_row": x_row, "y_row": steps[0],
            "x_batch0": b0.x, "x_batch1": b1.x, "w_batch0": b0.w, "w_batch1": b1.w, "y_batch0": steps[1], "y_batch1": steps[2],
        }  # fmt: skip
        values = {"x": product.x, "w": product.w, "y": y}
        emit_product(
            self.site, row_products(self.adjacent), sizes, values, ("y",), product.work, "rows", sizes["batches"] * groups
        )
        y.finiteness = finiteness
        return _followed(self.site, y, calls) if calls else y


def _height(rows: int) -> int:
    """The rows of a unit: about `HEIGHT`, in equal parts."""
    parts = -(-rows // HEIGHT)
    return min(-(-rows // parts // ROWS) * ROWS, rows)


def _span(threads: int, rows: int, tiles: int, *batches: int) -> int:
    """The tiles of a unit: a wide one costs less, but there must be some units for each thread."""
    units = tiles * math.prod(batches) * -(-rows // HEIGHT) // (4 * threads)
    return max(SPAN // 4, min(SPAN, units))


MOST_COLUMNS = 1 << 18
"""The columns of a product without bias whose number is open."""


def no_bias(site: Site, columns: Any) -> Value:
    """Zeros for so many columns."""
    if not isinstance(columns, int):
        site.require(columns <= MOST_COLUMNS, "there may be too many columns")
        columns = MOST_COLUMNS
    return site.shared_constant(("no bias", columns), lambda: np.zeros(columns, F32))


def _wide() -> bool:
    return level() in ("avx512", "vnni")


def _operations(y: Value, calls: Sequence[Follower]) -> list[ExpressionCall]:
    """The calls of an expression, of which the first reads a value."""
    made: list[ExpressionCall] = []
    for f in calls:
        before: Value | int = len(made) - 1 if made else y
        operands = tuple(before if i == f.place else v for i, v in enumerate(f.inputs))
        made.append(ExpressionCall(versioned("", f.name, f.version), f.attributes, operands))
    return made


@dataclass(frozen=True)
class _After:
    """What is computed of each part of a result while it is in the cache.

    Attributes:
        function: the machine code.
        frame: its frame, with the steps of its inputs and its result along the axes.
        reads: the inputs without the product.
        count: the number of calls.
        y: the result.
        label: the operators.
    """

    function: Compiled
    frame: InnerFrame
    reads: tuple[Value, ...]
    count: int
    y: Value
    label: str

    @classmethod
    def of(cls, site: Site, product: FloatProduct, y: Value, calls: Sequence[Follower]) -> _After | None:
        """The code for as many of the calls as possible; None for none."""
        ends = (i for i, f in enumerate(calls) if f.place < 0)
        for count in range(next(ends, len(calls)), 0, -1):
            after = site.attempt(partial(cls._made, site, product, y, calls[:count]))
            if after is not None:
                return after
        return None

    @classmethod
    def _made(cls, site: Site, product: FloatProduct, y: Value, calls: Sequence[Follower]) -> _After:
        terms, inputs = trace(site, _operations(y, calls))
        last = terms[-1]
        site.require(last.dtype == F32 and last.shape == y.shape, "the result has another type")
        rows = ReducedAxes(y.shape, ())
        leaves = Leaves(site, [last], inputs, "", rows, at_once=True)  # the product, an input, is not computed yet
        moves = [product.steps(v) for v in leaves.values]
        site.require(None not in moves, "a value is not evenly spaced")
        own = product.steps(y)
        same = all(v.buffer is not y.buffer or m == own for v, m in zip(leaves.values, moves, strict=True))
        site.require(same, "the product is read in another order")
        classes = tuple(movement((m or (0,))[-1], v.dtype.itemsize) for m, v in zip(moves, leaves.values, strict=True))
        found = machine_code(site, tuple(leaves.results), classes, product.work)
        if found is None:
            site.refuse("there is no machine code for what follows")
        function, places, scratch = found
        site.require(not scratch and len(places) < LEAVES and min(places, default=0) >= 0, "the expression is not elementwise")
        read = tuple(leaves.values[i] for i in places)
        pointers = (*read, y)
        frame = aligned_array((FIELDS + (AXES + 1) * len(pointers),), np.dtype(np.int64))
        steps = [n for move in (*(moves[i] for i in places), own) for n in move or ()]
        frame.array[:FIELDS] = [0, 1, 0, 1 << 60, 0, 0, 1, 1]
        z = y.view(y.shape, y.strides)
        judge(site, last, inputs, z)
        others = tuple(v for v in read if v.buffer is not y.buffer)
        return cls(
            function, InnerFrame(frame, FIELDS, steps, pointers), others, len(calls), z, "+".join(f.name for f in calls).lower()
        )


def product_of(
    a: Value, b: Value, shape: tuple[int, ...], folded: bool, target: Sequence[int] | None = None
) -> FloatProduct | None:
    """The product of two batches of matrices; None if there are more than two axes of products.

    Args:
        a: (..., m, k), of the rank of the result, or (m, k) if it is folded.
        b: (..., k, n) in the same way.
        shape: of the result.
        folded: whether all axes of the result but the last are the rows of one product.
        target: the steps of the result; None if it is in the order of its axes.
    """
    rank, batch = len(shape), list[BatchAxis]()
    for axis in range(0 if folded else rank - 2):
        size = shape[axis]
        x, w = (0 if v.shape[axis] == 1 else v.strides[axis] for v in (a, b))
        last = batch[-1] if batch else None
        follows = last is not None and (target is None or target[last.axes[-1]] == size * target[axis])
        if last is not None and follows and (last.x, last.w) == (size * x, size * w):
            batch[-1] = BatchAxis(last.size * size, x, w, (*last.axes, axis))
        elif size > 1:
            batch.append(BatchAxis(size, x, w, (axis,)))
    (m, k), n = a.shape[-2:], b.shape[-1]
    rows, row_axes = [(m, a.strides[-2])], tuple(range(rank - 1)) if folded else (rank - 2,)
    if len(batch) == 3 and isinstance(batch[-1].w, int) and not batch[-1].w:  # products by one matrix are one product
        shared = batch.pop()
        rows, row_axes = [(shared.size, shared.x), *rows], (*shared.axes, *row_axes)
    if len(batch) > 2:
        return None
    depth, columns = (k, a.strides[-1], b.strides[-2]), (n, b.strides[-1])
    return FloatProduct(shape, a, b, rows, row_axes, depth, columns, rank - 1, (), batch)
