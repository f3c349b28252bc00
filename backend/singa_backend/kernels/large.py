"""Elementwise operators on large arrays, and the elementwise calls that follow them, in one pass by oneDNN."""

from __future__ import annotations

from collections.abc import Sequence

from . import onednn as dnn
from .elementwise import order_of
from .epilogue import BINARY, Epilogue, Operand, OperandLayout, is_modern, scalar
from .functions import TABLE, function_of
from .lowering import F32, emit, threads_for
from .onednn import Attributes, MemoryDesc, OneDnnError, Primitive
from .products import normal
from .table import Follower, Site, kernel
from .values import Value

PLAIN = 1 << 16
"""Elements from which an addition or a hyperbolic tangent is faster by oneDNN than by NumPy."""

CHAIN = 1 << 12
"""Elements from which two calls in one pass of oneDNN are faster than by NumPy."""

FUNCTION = 1 << 11
"""Elements from which a function that takes NumPy several passes is faster by oneDNN."""

ANY_SIZE = frozenset(["Sigmoid", "Swish"])
"""Functions that take NumPy seven passes or more, so that one call of oneDNN is faster for a single element.  Its results are
close in relation to each value; those of other functions are close in relation to the largest."""

COST = 16
"""The work of one element in FLOPs, by which the number of threads is chosen."""


def _tries(site: Site) -> tuple[Sequence[Follower], ...]:
    """The followers to try: all, then none, if oneDNN refuses a primitive with them."""
    return (site.followers, ()) if site.followers else ((),)


def _result(site: Site, post: Epilogue, x: Value, place: int, order: Sequence[int] | None) -> Value:
    """The value of the last call: in the memory of the input at `place` if nothing reads that again."""
    inside = place >= 0 and site.reusable(place)
    site.absorb(post.count)
    y = x.view(x.shape, x.strides) if inside else site.new(x.shape, F32, order)
    y.finiteness, y.low = post.finiteness, post.low
    if post.finite:
        site.needs_finite()
    return y


def _function(site: Site, x: Value, *rest: Value | None) -> Value:
    """A function of each element, and those that follow."""
    site.require(x.dtype == F32 and x.size and (x.size >= FUNCTION or site.name in ANY_SIZE), "not float32, or small")
    first = Follower(site.name, site.attributes, [None, *rest], 0, site.version)
    found = function_of(first) if is_modern(site.name, site.version) else None
    if found is None:
        site.refuse("oneDNN does not have the function")
    site.require(site.name != "Tanh" or x.size >= (CHAIN if site.followers else PLAIN), "NumPy is faster for a small input")
    order = order_of(x)
    site.require(order is not None, "the input has gaps in memory")
    flat, alone = MemoryDesc.of(F32, (x.size,)), OperandLayout(x.shape, lambda v: None)
    for followers in _tries(site):
        # the finiteness of the result is that of x followed by the function itself
        post = Epilogue(Attributes(), finiteness=x.finiteness).fuse([first, *followers], alone)
        site.require(post.count, "the input may not be finite")
        rest_of = Epilogue(Attributes()).fuse(followers[: post.count - 1], alone)
        try:
            with threads_for(COST * x.size):
                name, alpha, beta = found
                primitive = dnn.eltwise(flat, flat, algorithm=name, alpha=alpha, beta=beta, attributes=rest_of.attributes)
        except OneDnnError:
            if not followers:
                raise
            continue
        post.count -= 1
        y = _result(site, post, x, 0, order)
        emit(site, primitive, {dnn.args.SRC: (flat, x), dnn.args.DST: (flat, y)}, (y,))
        return y
    raise AssertionError


for _name, _row in TABLE.items():
    if _row.alone:
        kernel(_name, on="onednn")(_function)


def _pair(site: Site, a: Value, b: Value) -> Value:
    """A function of two arrays, and the calls that follow."""
    site.require(a.dtype == b.dtype == F32, "not float32")
    size = max(a.size, b.size)
    site.require(size >= (CHAIN if site.followers else PLAIN), "NumPy is faster for a small input")
    place = 0
    if site.name in ("Add", "Mul", "Sum") and (
        b.size > a.size or (b.size == a.size and site.reusable(1) and not site.reusable(0))
    ):
        a, b, place = b, a, 1
    wide = b.ndim <= a.ndim and all(d in (1, s) for d, s in zip(b.shape[::-1], a.shape[::-1], strict=False))
    site.require(wide and scalar(b) is None, "the first operand is broadcast, or the second is a number")
    order = order_of(a)
    site.require(order is not None, "the input has gaps in memory")
    flat = a.shape == b.shape and all(d == 1 or s == t for d, s, t in zip(a.shape, a.strides, b.strides, strict=True))

    def described(v: Value) -> MemoryDesc | None:
        """The layout of an operand, broadcast to that of a; None if oneDNN does not have it."""
        if flat:
            same = v.shape == a.shape and all(d == 1 or s == t for d, s, t in zip(a.shape, a.strides, v.strides, strict=True))
            return MemoryDesc.of(F32, (a.size,)) if same else None
        shape = (*[1] * (a.ndim - v.ndim), *v.shape)
        steps = (*[1] * (a.ndim - v.ndim), *v.steps)
        if any(s <= 0 and d != 1 for d, s in zip(shape, steps, strict=True)):
            return None
        return MemoryDesc.of(F32, shape, normal(shape, steps))

    def second(v: Value) -> Operand | None:
        md = described(v)
        return None if md is None else (md, v, None)

    first = Epilogue(Attributes(), finiteness=a.finiteness, low=a.low)
    first.worsen(Follower(site.name, {}, [None, b], 0, site.version), b)
    left, right = described(a), described(b)
    if left is None or right is None:
        site.refuse("an operand is repeated or reversed in memory")
    for followers in _tries(site):
        post = Epilogue(Attributes(), finiteness=first.finiteness, low=first.low).fuse(followers, OperandLayout(a.shape, second))
        try:
            with threads_for(COST * a.size):
                primitive: Primitive = dnn.binary(left, right, left, algorithm=BINARY[site.name], attributes=post.attributes)
        except OneDnnError:
            if not followers:
                raise
            continue
        site.require(post.count or size >= PLAIN, "NumPy is faster for a small input")
        y = _result(site, post, a, place, order)
        emit(
            site,
            primitive,
            {dnn.args.SRC: (left, a), dnn.args.SRC_1: (right, b), dnn.args.DST: (left, y), **post.operands(site)},
            (y,),
        )
        return y
    raise AssertionError


for _name in ("Add", "Sub", "Mul", "Div"):
    kernel(_name, 7, 13, 14, on="onednn")(_pair)


@kernel("Sum", 6, 8, 13, on="onednn")
def sum_(site: Site, *values: Value) -> Value:
    site.require(len(values) == 2, "not two operands")
    return _pair(site, *values)
