"""The epilogue of a primitive: which of the calls that follow it computes as post-ops, and how.

One rule decides for all primitives.  They differ in how they read a second operand (`OperandLayout`), and in whether each
call has to be rounded as its definition rounds it (`Epilogue.exact`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ir.declaration import newest_declaration
from . import onednn as dnn
from .functions import TABLE, Function, function_of, scalar_of
from .lowering import dense_desc, desc, ordered, remark
from .onednn import Attributes, MemoryDesc, Primitive
from .table import Follower, Site
from .values import ANY, FINITE, INFINITE, NAN, Value, strides_of, sum_finiteness

BINARY = {"Add": "add", "Sum": "add", "Mul": "mul", "Sub": "sub", "Div": "div", "Max": "max", "Min": "min"}

SWALLOWS = ("Max", "Min")
"""Binary operators whose primitives turn NaN into a number."""

Operand = tuple[MemoryDesc, Value, tuple[int, ...] | None]
"""A second operand: its descriptor, of the rank of the destination; the value; the order of its axes in memory, None for any."""


def never(value: Value) -> bool:
    """Return False: the rule of a primitive that can use no value in this way."""
    return False


@dataclass(frozen=True)
class OperandLayout:
    """How a primitive reads second operands.

    Attributes:
        shape: of the result.
        describe: returns a second operand as the primitive reads it; None if it does not fit.
        may_replace: whether the result can take the place of this value, which is added to it.
        is_bias: whether the primitive can add this value as its bias.
    """

    shape: tuple[int, ...]
    describe: Callable[[Value], Operand | None]
    may_replace: Callable[[Value], bool] = never
    is_bias: Callable[[Value], bool] = never


@dataclass
class Epilogue:
    """Followers of a call as post-ops of its primitive.

    Attributes:
        attributes: of the primitive, with the post-ops.
        exact: whether a quotient is rounded once, as the definition's, not a product with the reciprocal; then Max, Min and PRelu
            with slopes for each channel are post-ops too, and a function needs a finite input.
        count: the number of followers that they compute.
        arguments: the second operands, by argument of the primitive.
        into: the value that a sum adds to, in whose memory the result is; None for a result in new memory.
        bias: the operand of a first addition that the primitive can add as its bias.
        finite: whether the result equals the definition's for finite inputs only.
        finiteness: of the result.
        low: whether its infinities are all negative.
    """

    attributes: Attributes
    exact: bool = False
    count: int = 0
    arguments: dict[int, Operand] = field(default_factory=dict)
    into: Value | None = None
    bias: Value | None = None
    finite: bool = False
    finiteness: int = FINITE
    low: int = ANY

    def fuse(self, followers: Sequence[Follower], layout: OperandLayout) -> Epilogue:
        """Append as many followers as possible, in order; returns itself."""
        for f in followers:
            if not is_modern(f.name, f.version) or not self.append(f, layout):
                break
            self.count += 1
        return self

    def append(self, f: Follower, layout: OperandLayout) -> bool:
        """Append one follower; returns whether it is possible, and changes nothing if it is not."""
        if f.name in BINARY:
            return self._binary(f, layout)
        if f.place != 0:
            return False
        found = function_of(f)
        if found is not None:
            return self._unary(f, found)
        return self.exact and f.name == "PRelu" and self._prelu(f, layout.shape)

    def _unary(self, f: Follower, found: Function) -> bool:
        row = TABLE[f.name]
        if row.total and not self.exact:
            self.finiteness = NAN if self.finiteness == NAN else FINITE
        elif found[0] != "linear":
            if self.finiteness == NAN or (self.finiteness != FINITE and (self.exact or not row.infinities)):
                return False
            self.finite = True
        self.attributes.append_eltwise(*found)
        self.low = ANY
        return True

    def _prelu(self, f: Follower, shape: tuple[int, ...]) -> bool:
        slope = f.inputs[1]
        if self.finiteness != FINITE or slope is None or slope.dtype != np.float32 or slope.finiteness != FINITE:
            return False
        padded = (1,) * (len(shape) - slope.ndim) + slope.shape
        if len(padded) != len(shape) or padded != (1, shape[1], *(1,) * (len(shape) - 2)) or not slope.contiguous:
            return False
        arg = dnn.args.post_op(len(self.attributes), dnn.args.WEIGHTS)
        self.attributes.append_prelu(2)
        self.arguments[arg] = (dense_desc(np.float32, padded), slope, None)
        self.finite = True
        return True

    def _binary(self, f: Follower, layout: OperandLayout) -> bool:
        if f.name == "Sum" and len(f.inputs) == 1:
            return True
        other = f.other
        if other is None or not self._fits(f, other, layout.shape):
            return False
        number = scalar(other)
        function = None if number is None else self._linear(f, number)
        if function is None:
            return self._second(f, other, layout)
        if self.finiteness == INFINITE and function[1] == 0:
            return False
        self.low = self.low if function[1] > 0 else ANY
        self.attributes.append_eltwise(*function)
        return True

    def _fits(self, f: Follower, other: Value, shape: tuple[int, ...]) -> bool:
        """Whether oneDNN has the function, and its operand can be broadcast to the result."""
        if f.name == "Div" and f.place != 0:
            return False
        if f.name in SWALLOWS and not (self.exact and self.finiteness == other.finiteness == FINITE):
            return False
        padded = _padded_shape(other, shape)
        fits = len(padded) == len(shape) and all(d in (1, s) for d, s in zip(padded, shape, strict=True))
        return fits and other.dtype == np.float32 and other.size > 0

    def _linear(self, f: Follower, number: float) -> Function | None:
        """The linear function that is an operator with a number; None if there is none."""
        match f.name:
            case "Add" | "Sum":
                return "linear", 1.0, number
            case "Mul":
                return "linear", number, 0.0
            case "Sub":
                return ("linear", -1.0, number) if f.place == 1 else ("linear", 1.0, -number)
            case "Div" if not self.exact and abs(number) > 1e-30:
                return "linear", 1 / number, 0.0
        return None

    def _second(self, f: Follower, other: Value, layout: OperandLayout) -> bool:
        """Append a function of two operands."""
        turned = f.name == "Sub" and f.place == 1  # other - x is -x + other
        name = "add" if turned else BINARY[f.name]
        if f.name in ("Add", "Sum") and not len(self.attributes) and self.bias is None and layout.is_bias(other):
            self.bias = other
        elif name == "add" and self.into is None and (1 - f.place) in f.reusable and layout.may_replace(other):
            if turned:
                self.attributes.append_eltwise("linear", -1.0, 0.0)
            self.attributes.append_sum()
            self.into = other
        else:
            found = layout.describe(other)
            if found is None:
                return False
            if turned:
                self.attributes.append_eltwise("linear", -1.0, 0.0)
            self.arguments[dnn.args.post_op(len(self.attributes))] = found
            self.attributes.append_binary(name, found[0])
        self.finite = self.finite or f.name in SWALLOWS
        self.worsen(f, other)
        return True

    def worsen(self, f: Follower, other: Value) -> None:
        """Set the finiteness of a result of two operands."""
        if f.name == "Div":
            kept = self.finiteness == other.finiteness == FINITE and other.constant and bool(other.array.all())
            self.finiteness, self.low = FINITE if kept else NAN, ANY
        elif f.name in ("Add", "Sum"):
            self.finiteness, self.low = sum_finiteness(self.finiteness, self.low, other.finiteness, other.low)
        elif not self.finiteness == other.finiteness == FINITE:
            self.finiteness, self.low = NAN, ANY

    def operands(self, site: Site) -> dict[int, tuple[MemoryDesc, Value]]:
        """The arguments of the post-ops, copied where they are read in another order."""
        return {a: (md, v if way is None else ordered(site, v, way)) for a, (md, v, way) in self.arguments.items()}


def is_modern(name: str, version: int) -> bool:
    """Whether a version of an operator of ONNX's domain has its present meaning; an old Sum only adds values of equal shapes."""
    declaration = newest_declaration("", name)
    return name == "Sum" or (declaration is not None and version >= declaration.meaning_since)


def scalar(value: Value | None) -> float | None:
    """The number that a constant of one element holds, if it is finite."""
    number = scalar_of(value)
    return number if number is not None and math.isfinite(number) else None


def dense_layout(shape: Sequence[int], order: Sequence[int], into: bool = True) -> OperandLayout:
    """The layout of a result without gaps.

    Args:
        shape: of the result.
        order: the axes of the result, from the outermost in memory to the innermost.
        into: whether the memory of a summand may become that of the result.
    """
    whole, rank = tuple(shape), len(shape)

    def describe(v: Value) -> Operand | None:
        padded = _padded_shape(v, whole)
        wide = v.view(padded, (v.dtype.itemsize,) * (rank - v.ndim) + v.strides) if v.ndim < rank else v
        if padded == whole and v.size > 1:
            return dense_desc(np.float32, whole, order), wide, tuple(order)
        if any(d != 1 and (s <= 0 or s % 4) for d, s in zip(wide.shape, wide.strides, strict=True)):
            return None
        return desc(wide), wide, None

    def may_replace(v: Value) -> bool:
        if not into or v.shape != whole or v.size <= 1 or v.constant:
            return False
        return all(d == 1 or s == t for d, s, t in zip(whole, v.strides, strides_of(whole, 4, order), strict=True))

    return OperandLayout(whole, describe, may_replace)


def _padded_shape(v: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (len(shape) - v.ndim) + v.shape


def attempts(make: Callable[[int | None, bool], Epilogue]) -> Iterator[Epilogue]:
    """The followers as post-ops, then with fewer post-ops, down to none."""
    first = make(None, True)
    yield first
    if first.into is not None:
        yield make(None, False)
    for limit in range(first.count - 1, -1, -1):
        yield make(limit, True)


def create(
    site: Site,
    build: Callable[[Attributes], Primitive],
    shape: Sequence[int],
    order: Sequence[int],
    finiteness: int,
    fpmath: str = "strict",
) -> tuple[Primitive, Epilogue]:
    """Create a primitive with as many followers as it can compute.

    Args:
        site: where the kernel is used.
        build: creates the primitive with these attributes.
        shape: of the result.
        order: the axes of the result, from the outermost in memory to the innermost.
        finiteness: of the result without followers.
        fpmath: the mode of arithmetic.

    Raises:
        Unimplemented: oneDNN has no fast code, even without followers.
    """

    def make(limit: int | None, into: bool) -> Epilogue:
        one = Epilogue(Attributes(fpmath=fpmath), exact=True, finiteness=finiteness)
        return one.fuse(site.followers[:limit], dense_layout(shape, order, into))

    refusal: Exception | None = None
    for one in attempts(make):
        try:
            return build(one.attributes), one
        except dnn.Unimplemented as error:
            refusal = error
            remark(site, error)
    assert refusal is not None
    raise refusal


def result(
    site: Site, one: Epilogue, shape: Sequence[int], order: Sequence[int]
) -> tuple[Value, dict[int, tuple[MemoryDesc, Value]]]:
    """The value of the last follower, and the arguments of the post-ops.  To be called before the step is emitted."""
    site.absorb(one.count)
    if one.finite:
        site.needs_finite()
    if one.into is None:
        y = site.new(shape, np.float32, order, one.finiteness)
    else:
        t = one.into
        y = t.view(t.shape, t.strides)
        y.finiteness = one.finiteness
    y.low = one.low
    return y, one.operands(site)
