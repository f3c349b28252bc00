"""Matrix products: MatMul, Gemm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from ..ir.sizes import OpenSize, broadcast_sizes, is_open
from . import onednn as dnn
from .copies import emit_copy
from .elementwise import FLOATS
from .epilogue import Epilogue, Operand, OperandLayout, never
from .float_products import FloatProduct, FloatProductStep, RowProductStep, declined, product_of, require_any_bits
from .lowering import F32, emit, packed, packs_products, spaced, threads_for
from .onednn import Attributes, MemoryDesc, OneDnnError, Primitive, Unimplemented
from .rounding import BF16, Rounded, fpmath, pays, rounded
from .table import Follower, Refused, Site, kernel, worst
from .values import ANY, FINITE, NAN, Bound, Value, merged, strides_of

TINY = 2 * 64 * 64
"""A product of at most this many FLOPs without followers is faster in NumPy."""

COLUMNS = 64
"""With at least this many columns, a product of one row reads a transposed right operand without a copy."""

FEW = 32
"""With fewer rows on the left, machine code multiplies constant weights faster than oneDNN."""

LITTLE = 1 << 24
"""So it does, below AVX-512, for a product of at most this many FLOPs."""

EXACT = 2**15
"""NumPy computes a product of integers of fewer multiplications than this; the definition has faster ways for larger ones."""


def described(x: Value) -> MemoryDesc:
    """The descriptor of a value."""
    return MemoryDesc.of(x.dtype, x.shape, normal(x.shape, x.steps))


def normal(shape: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements in which those of axes of size 1 are as in an array without gaps: oneDNN compares them too."""
    made = list(steps)
    follow = extent = 1
    for axis in reversed(range(len(shape))):
        if shape[axis] == 1:
            made[axis] = extent if math.prod(shape[:axis]) == 1 else follow
        follow = max(made[axis] * shape[axis], 1)
        extent = max(extent, follow)
    return tuple(made)


def contiguous(site: Site, x: Value) -> Value:
    """A copy in C order."""
    y = site.new(x.shape, x.dtype, finiteness=x.finiteness)
    y.low = x.low
    site.emit(lambda: [(np.copyto, (y.array, x.array))], reads=(x,), writes=(y,), kernel="reorder numpy.copyto")
    return y


class MatrixProduct:
    """The product of two batches of float32 matrices by oneDNN, with what follows it.

    Args:
        site: the place.
        a: (..., m, k).
        b: (..., k, n).
        source: the constant that b is a view of.
    """

    def __init__(self, site: Site, a: Value, b: Value, source: Value | None = None) -> None:
        self.site, self.key = site, (source or b).key
        self.shape = (*broadcast_sizes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        self.flops = 2 * math.prod(self.shape) * a.shape[-1]
        rows = merged(a.shape[:-1], a.strides[:-1]) if math.prod(b.shape[:-2]) == 1 else None
        self.folded = rows is not None
        if rows is not None:  # one product of matrices in place of a batch of products with one right matrix
            a = a.view((rows[0], a.shape[-1]), (rows[1], a.strides[-1]))
            b = b.view(b.shape[-2:], b.strides[-2:])
        self.a, self.b = self._operand(a), self._operand(b)
        self.fpmath = fpmath(site.options)
        always = site.options.deterministic or dnn.library() is None
        if not always and is_open((*self.shape, a.shape[-1])):
            if site.trains:  # machine code would pack the weights in every run
                raise OpenSize("oneDNN's products need numbers for sizes that differ between runs")
            always = True
        few = always or self.a.shape[-2] < FEW or (self.flops <= LITTLE and not packs_products())
        self.by_code = not declined(site) and (always or (self.folded and self.b.constant and few))
        self.finiteness = FINITE if a.finiteness == b.finiteness == FINITE else NAN

    def _operand(self, x: Value) -> Value:
        """A matrix that has a dense axis, in a batch of the rank of the result."""
        if any(s < 0 for s in x.strides) or not any(x.strides[i] == x.dtype.itemsize or x.shape[i] == 1 for i in (-2, -1)):
            x = contiguous(self.site, x)
        rank = 2 if self.folded else len(self.shape)
        shape = [1 if not s else d for d, s in zip(x.shape[:-2], x.strides[:-2], strict=True)]
        fill = rank - x.ndim
        return x.view((*[1] * fill, *shape, *x.shape[-2:]), (*[x.dtype.itemsize] * fill, *x.strides))

    def describe(self, other: Value) -> MemoryDesc | None:
        """The descriptor of a value that broadcasts to the result."""
        fill = len(self.shape) - other.ndim
        shape = (*[1] * fill, *other.shape)
        strides = tuple(0 if d == 1 else s for d, s in zip(shape, (*[0] * fill, *other.strides), strict=True))
        if self.folded:
            full = [self.shape[i] if d == 1 else d for i, d in enumerate(shape[:-1])]
            rows = (1, 0) if not any(strides[:-1]) else merged(full, strides[:-1])
            if rows is None:
                return None
            shape, strides = (rows[0], shape[-1]), (rows[1], strides[-1])
        elif any(not s and d != 1 for d, s in zip(shape, strides, strict=True)):
            return None
        if any(s < 0 for s in strides):
            return None
        return MemoryDesc.of(F32, shape, normal(shape, [s // F32.itemsize for s in strides]))

    def _second(self, other: Value) -> Operand | None:
        """A value as the second operand of a post-op; None if no descriptor fits it."""
        md = self.describe(other)
        return None if md is None else (md, other, None)

    def is_bias(self, other: Value) -> bool:
        """Whether a value is one number for each column, without gaps."""
        return other.size == other.shape[-1] == self.shape[-1] and other.strides[-1] == F32.itemsize if other.ndim else False

    def may_replace(self, other: Value) -> bool:
        """Whether the result can take the place of a value."""
        return (
            other.shape == self.shape
            and other.strides[-1] == F32.itemsize
            and all(s > 0 for s in other.strides)
            and self.describe(other) is not None
        )

    def emit(
        self,
        followers: Sequence[Follower] = (),
        *,
        before: Sequence[tuple[str, float, float]] = (),
        added: Sequence[Value] = (),
        order: Sequence[int] | None = None,
        target: Value | None = None,
    ) -> Value:
        """Add the steps.

        Args:
            followers: the calls that may be computed too; those that are, are absorbed.
            before: functions of oneDNN, each with two parameters, that are applied to the product.
            added: are added after that, before the followers.
            order: of the axes of the result in memory, outermost first.
            target: the result is written there.

        Returns:
            The result.
        """
        if self.by_code and (y := self._by_code(followers, before, added, order, target)) is not None:
            return y
        terms = [Follower("Add", {}, [None, v], 0, 14) for v in added]
        layout = OperandLayout(self.shape, self._second, self.may_replace if target is None else never, self.is_bias)
        # with as many followers as fit, then without them, then without the added values
        for tried, needed in (([*terms, *followers], len(terms)), (terms, len(terms)), ([], 0)):
            post = Epilogue(Attributes(fpmath=self.fpmath), finiteness=self.finiteness)
            for function in before:
                post.attributes.append_eltwise(*function)
            post.fuse(tried, layout)
            try:
                if post.count >= needed:
                    y = self._emit(post, max(post.count - len(terms), 0), order, target)
                    return y if post.count >= len(terms) else self._plus(y, added)
            except Unimplemented:
                if not tried:
                    raise
        raise AssertionError

    def _by_code(
        self, followers: Sequence[Follower], before: Sequence[tuple[str, float, float]], added: Sequence[Value],
        order: Sequence[int] | None, target: Value | None,
    ) -> Value | None:  # fmt: skip
        """The result of machine code; None if it does not compute the product."""
        site = self.site
        steps = None if target is None else target.strides
        product = product_of(self.a, replace(self.b, key=self.key), self.shape, self.folded, steps)
        bias = next((v for v in added if not before and self.is_bias(v)), None)
        calls = [*map(_call_of, before), *(Follower("Add", {}, [None, v], 0, 14) for v in added if v is not bias), *followers]
        needed = len(calls) - len(followers)

        def emit(product: FloatProduct) -> tuple[Value, int]:
            y = site.new(self.shape, F32, order) if target is None else target.view(target.shape, target.strides)
            step = None if bias is not None else RowProductStep.of(site, product, y)
            if step is not None:
                return step.emit(calls[:needed], self.finiteness), needed
            return FloatProductStep(site, product).emit(y, bias, calls, needed, self.finiteness)

        emitted = None if product is None else site.attempt(partial(emit, product))
        if emitted is None:
            if target is None or not is_open(self.shape):
                return None
            apart = self._by_code(followers, before, added, order, None)
            return None if apart is None else self._moved(apart, target)
        y, count = emitted
        site.absorb(count - needed)
        return y

    def _moved(self, y: Value, target: Value) -> Value:
        """Copy the result to its target."""
        target = target.view(target.shape, target.strides)
        target.finiteness, target.low = y.finiteness, y.low
        emit_copy(self.site, y, target)
        return target

    def _plus(self, y: Value, added: Sequence[Value]) -> Value:
        """Add what no post-op can add."""
        held = list(added)
        if worst(y, *held) != FINITE:
            y.finiteness, y.low = NAN, ANY
        self.site.emit(
            lambda: [(np.add, (y.array, v.array, y.array)) for v in held], reads=(y, *held), writes=(y,), kernel="numpy.add"
        )
        return y

    def _emit(self, post: Epilogue, absorbed: int, order: Sequence[int] | None, target: Value | None) -> Value:
        site, a, b = self.site, self.a, self.b
        target = target or post.into
        strides = target.strides if target is not None else strides_of(self.shape, F32.itemsize, order)
        shape: tuple[int, ...] = self.shape
        if self.folded:
            rows = merged(shape[:-1], strides[:-1])
            if rows is None:
                site.refuse("the rows of the result are not evenly spaced")
            shape, strides = (rows[0], shape[-1]), (rows[1], strides[-1])
        into = MemoryDesc.of(F32, shape, normal(shape, [s // F32.itemsize for s in strides]))
        bias = None if post.bias is None else MemoryDesc.of(F32, (*[1] * (len(shape) - 1), shape[-1]))
        with threads_for(self.flops):
            primitive, copies = self._primitive(shape, bias, into, post)
        source, weights = described(a), described(b)
        left, right = a, b
        if copies is not None:
            left, source = copies[0].emit(site, source), copies[0].desc
        if b.constant:
            right = packed(site, replace(b, key=self.key), weights, primitive.query("weights"))
            weights = primitive.query("weights")
        elif copies is not None:
            right, weights = copies[1].emit(site, weights), copies[1].desc
        site.absorb(absorbed)
        y = site.new(self.shape, F32, order) if target is None else target.view(target.shape, target.strides)
        y.finiteness, y.low = post.finiteness, post.low
        if post.finite:
            site.needs_finite()
        arguments = {
            dnn.args.SRC: (source, left),
            dnn.args.WEIGHTS: (weights, right),
            dnn.args.DST: (into, y),
            **post.operands(site),
        }
        if post.bias is not None:
            arguments[dnn.args.BIAS] = (primitive.query("weights", 1), post.bias)
        emit(site, primitive, arguments, (y,), "matmul")
        return y

    def _primitive(
        self, shape: Sequence[int], bias: MemoryDesc | None, into: MemoryDesc, post: Epilogue
    ) -> tuple[Primitive, tuple[Rounded, Rounded] | None]:
        """The primitive, and the copies in bfloat16 that it multiplies; None if it multiplies the operands."""
        a, b = self.a, self.b
        if pays(self.site.options, self.flops, a, *([] if b.constant else [b])):
            copies = rounded(a), rounded(b)
            weights = MemoryDesc.any(BF16, b.shape) if b.constant else copies[1].desc
            try:
                return dnn.matmul(copies[0].desc, weights, bias, into, post.attributes), copies
            except Unimplemented:
                pass
        source, plain = described(a), described(b)
        made = self._open(source, plain, bias, into, post) if shape[-2] == 1 else None
        weights = spaced(b.shape) if b.constant else plain
        return made or dnn.matmul(source, weights, bias, into, post.attributes), None

    def _open(
        self, source: MemoryDesc, plain: MemoryDesc, bias: MemoryDesc | None, into: MemoryDesc, post: Epilogue
    ) -> Primitive | None:
        """A primitive for one row and a transposed right operand; None if it does not apply."""
        b = self.b
        if b.constant or bias is not None or b.strides[-2] != F32.itemsize or b.shape[-1] < COLUMNS:
            return None
        # oneDNN copies the right operand, unless its columns are counted at run time
        outer = [dnn.RUNTIME_DIM] * (b.ndim - 2)
        wide = MemoryDesc.of(F32, (*b.shape[:-1], dnn.RUNTIME_DIM), (*outer, 1, b.steps[-1]))
        row = MemoryDesc.of(F32, (*into.shape[:-1], dnn.RUNTIME_DIM), (*outer, dnn.RUNTIME_DIM, 1))
        try:
            return dnn.matmul(source, wide, None, row, post.attributes)
        except OneDnnError:
            return None


def _call_of(function: tuple[str, float, float]) -> Follower:
    """A function of oneDNN as a call."""
    name, factor, offset = function
    if name == "tanh":
        return Follower("Tanh", {}, [None], 0, 13)
    if name != "linear" or offset:
        raise Refused(f"machine code has no {name}")
    return Follower("Mul", {}, [None, Value.of(np.array(factor, F32))], 0, 14)


def _order_of(b: Value) -> list[int] | None:
    """The order of the result's axes in memory: that of the right operand, so that transposed heads meet again in the result."""
    if b.constant or b.ndim < 3:
        return None
    order = sorted(range(b.ndim), key=lambda i: -b.strides[i])
    return order if order[-1] == b.ndim - 1 and all(b.strides) else None


def _multiply(site: Site, a: Value, b: Value, followers: Sequence[Follower]) -> Value:
    """MatMul of float32 operands that may be vectors."""
    row, column = a.ndim == 1, b.ndim == 1
    left = a.view((1, *a.shape), (a.nbytes, *a.strides)) if row else a
    right = b.view((*b.shape, 1), (*b.strides, b.dtype.itemsize)) if column else b
    if row or column:
        followers = ()
    product = MatrixProduct(site, left, right, b)
    order = _order_of(right) if right.ndim == len(product.shape) else None
    y = product.emit(followers, order=order)
    gone = ([y.ndim - 2] if row else []) + ([y.ndim - 1] if column else [])
    kept = [i for i in range(y.ndim) if i not in gone]
    return y.view([y.shape[i] for i in kept], [y.strides[i] for i in kept]) if gone else y


def _check(site: Site, a: Value, b: Value) -> None:
    site.require(a.ndim and b.ndim and a.size and b.size, "a scalar or an empty operand")
    site.require(a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0], "the inner sizes differ")
    site.require(a.dtype == b.dtype, "different element types")
    try:
        broadcast_sizes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        site.refuse("the batches do not broadcast")


def _flops(a: Value, b: Value) -> int:
    return 2 * a.size * (b.shape[-1] if b.ndim > 1 else 1)


@kernel("MatMul", 1, 9, 13, on="onednn")
def matmul(site: Site, a: Value, b: Value) -> Value:
    _check(site, a, b)
    site.require(a.dtype == F32, "not float32")
    always = site.followers or site.options.deterministic or is_open((*a.shape, *b.shape))
    site.require(always or _flops(a, b) > TINY, "NumPy is faster for a small product")
    return _multiply(site, a, b, site.followers)


VECTOR = 9216
"""OpenBLAS multiplies a vector and a matrix of at most this many elements with one thread."""

CHEAP = frozenset(("Add", "Sub", "Mul", "Relu", "Clip"))
"""Followers that take NumPy as long as a post-op."""


def _row(site: Site, a: Value, b: Value) -> tuple[Value, Value]:
    """The operands of a product of one row and a small matrix, the row with one axis."""
    require_any_bits(site)
    site.require(a.ndim and a.size == a.shape[-1] == b.shape[-2 if b.ndim > 1 else 0], "not one row")  # first: it assumes nothing
    site.require(a.size and b.size and b.ndim >= 2 and b.size == b.shape[-2] * b.shape[-1], "a batch of matrices")
    site.require(a.dtype == b.dtype and a.dtype in FLOATS and not b.is_open and b.size <= VECTOR, "not floats, or not small")
    site.require(len(site.followers) <= 2 and all(f.name in CHEAP for f in site.followers), "post-ops are faster")
    return a.view((a.size,), (a.strides[-1],)), b.view(b.shape[-2:], b.strides[-2:])


@kernel("MatMul", 1, 9, 13, on="numpy", rank=1)
def matmul_row(site: Site, a: Value, b: Value) -> Value:
    _check(site, a, b)
    left, right = _row(site, a, b)
    y = site.new(_shape(a, b), a.dtype, finiteness=FINITE if worst(a, b) == FINITE else NAN)
    flat = y.view((y.size,), (y.dtype.itemsize,))
    site.emit(lambda: [(left.array.dot, (right.array, flat.array))], reads=(a, b), writes=(y,), kernel="numpy.dot")
    return y


@kernel("Gemm", 1, 6, 7, 9, 11, 13, on="numpy", rank=1)
def gemm_row(site: Site, a: Value, b: Value, c: Value | None = None) -> Value:
    alpha, left, right, shape = _gemm(site, a, b, c)
    beta = site.attributes["beta"]
    site.require(alpha == 1 and beta == 1, "a factor")
    left, right = _row(site, left, right)
    y = site.new(shape, a.dtype, finiteness=FINITE if worst(a, b, c) == FINITE else NAN)
    flat = y.view((y.size,), (y.dtype.itemsize,))
    bias = None if c is None else c.view((), ()) if c.size == 1 else c.view((c.size,), (c.strides[-1],))

    def bind() -> Bound:
        out = flat.array
        product = (left.array.dot, (right.array, out))
        return [product] if bias is None else [product, (np.add, (out, bias.array, out))]

    site.emit(bind, reads=(a, b, bias), writes=(y,), kernel="numpy.dot")
    return y


@kernel("MatMul", 1, 9, 13, on="numpy")
def matmul_numpy(site: Site, a: Value, b: Value) -> Value:
    _check(site, a, b)
    wide, exact = a.dtype.kind == "f" and a.dtype.itemsize > 2, a.dtype.kind in "iu" and _flops(a, b) < 2 * EXACT
    site.require(wide or exact, "the definition has a better way for this type")
    y = site.new(_shape(a, b), a.dtype, finiteness=FINITE if worst(a, b) == FINITE else NAN)
    function = np.dot if a.ndim == b.ndim == 2 else np.matmul
    site.emit(lambda: [(function, (a.array, b.array, y.array))], reads=(a, b), writes=(y,), kernel=f"numpy.{function.__name__}")
    return y


def _shape(a: Value, b: Value) -> tuple[int, ...]:
    batch = broadcast_sizes(a.shape[:-2], b.shape[:-2])
    return (*batch, *a.shape[-2:-1], *(b.shape[-1:] if b.ndim > 1 else ()))


@kernel("Gemm", 1, 6, 7, 9, 11, 13, on="onednn")
def gemm(site: Site, a: Value, b: Value, c: Value | None = None) -> Value:
    alpha, left, right, _ = _gemm(site, a, b, c)
    site.require(a.dtype == F32, "not float32")
    bias = c if c is not None and site.attributes["beta"] != 0 else None
    if bias is not None and site.attributes["beta"] != 1:
        bias = _scaled(site, bias, site.attributes["beta"])
    before = [] if alpha == 1 else [("linear", alpha, 0.0)]
    return MatrixProduct(site, left, right, b).emit(site.followers, before=before, added=[] if bias is None else [bias])


def _scaled(site: Site, c: Value, beta: float) -> Value:
    """C multiplied by beta."""
    if c.constant:
        found: np.ndarray = site.derived(c, ("scaled", beta), lambda: (c.array * np.float32(beta)).astype(c.dtype))
        return site.constant(found)
    y = site.new(c.shape, c.dtype)
    factor = np.array(beta, c.dtype)
    site.emit(lambda: [(np.multiply, (c.array, factor, y.array))], reads=(c,), writes=(y,), kernel="numpy.multiply")
    return y


def _gemm(site: Site, a: Value, b: Value, c: Value | None) -> tuple[float, Value, Value, tuple[int, int]]:
    """Check the operands; return alpha, the two matrices, transposed as the attributes select, and the result's shape."""
    site.require(a.ndim == b.ndim == 2 and a.size and b.size, "not matrices")
    left = a.view(a.shape[::-1], a.strides[::-1]) if site.attributes["transA"] else a
    right = b.view(b.shape[::-1], b.strides[::-1]) if site.attributes["transB"] else b
    site.require(left.shape[1] == right.shape[0] and a.dtype == b.dtype, "the operands do not match")
    site.require(math.isfinite(site.attributes["alpha"]) and math.isfinite(site.attributes["beta"]), "a factor is not finite")
    shape = (left.shape[0], right.shape[1])
    if c is not None:
        try:
            fits = broadcast_sizes(c.shape, shape) == shape and c.dtype == a.dtype and c.size
        except ValueError:
            fits = False
        site.require(fits, "C does not fit")
        site.require(site.version >= 7 or site.attributes["broadcast"] or c.shape == shape, "C does not fit")
    return site.attributes["alpha"], left, right, shape


@kernel("Gemm", 1, 6, 7, 9, 11, 13, on="numpy")
def gemm_numpy(site: Site, a: Value, b: Value, c: Value | None = None) -> Value:
    alpha, left, right, shape = _gemm(site, a, b, c)
    beta = site.attributes["beta"]
    site.require(a.dtype.kind == "f" and a.dtype.itemsize > 2, "not a float")
    bias = c if c is not None and beta != 0 else None
    if bias is not None and beta != 1:
        bias = _scaled(site, bias, beta)
    y = site.new(shape, a.dtype, finiteness=FINITE if worst(a, b, bias) == FINITE else NAN)

    def bind() -> list[tuple[object, tuple[object, ...]]]:
        made: list[tuple[object, tuple[object, ...]]] = [(np.dot, (left.array, right.array, y.array))]
        if alpha != 1:
            made.append((np.multiply, (y.array, np.array(alpha, a.dtype), y.array)))
        if bias is not None:
            made.append((np.add, (y.array, bias.array, y.array)))
        return made

    site.emit(bind, reads=(a, b, bias), writes=(y,), kernel="numpy.dot")  # type: ignore[arg-type]  # NumPy's overloads
    return y
