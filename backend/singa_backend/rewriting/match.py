"""Patterns: expressions that values of a graph match.

    x, epsilon = Anything(), Number()
    mean = op.ReduceMean(x, ..., keepdims=1)
    norm = over_root(x - mean, op.ReduceMean(squared(x - mean), ..., keepdims=1) + epsilon)

A pattern is the last call of what it describes.  Both orders of a commutative operator match; what an expression names twice is
one value, or two that are computed alike.  A match changes nothing: it names the values and calls that it found, and a rule
replaces the last call by one `put`.  Values in the middle must not be used elsewhere, unless they are `shared`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import EllipsisType, MappingProxyType
from typing import Any

from ..ir.graph import Node, Value
from .rewriter import Rewriter

COMMUTATIVE = frozenset(("Add", "Mul", "Max", "Min"))

FEW = 64
"""Bytes of a constant that is read for its one number."""
NONE: Mapping[str, Any] = MappingProxyType({})

Needs = frozenset[frozenset[str]]
"""Sets of operators, of each of which a graph that has a match has one."""


@dataclass(frozen=True)
class Match:
    """What a pattern found.

    Attributes:
        found: the value of each part of the pattern; the number of a `Number` or `Multiple`.
        calls: the matched calls, the last one first.
        middle: the values that only these calls may read.
    """

    found: dict[Pattern, Any]
    calls: tuple[Node, ...] = ()
    middle: tuple[Value, ...] = ()

    def __getitem__(self, part: Pattern) -> Any:
        """Return the value that a part of the pattern found."""
        return self.found[part]

    def __contains__(self, part: Pattern) -> bool:
        """Return whether a part of the pattern found a value: one of several alternatives has."""
        return part in self.found

    @property
    def root(self) -> Node:
        """The last call."""
        return self.calls[0]

    @property
    def origins(self) -> tuple[Node, ...]:
        """The matched calls, the last one last."""
        return tuple(dict.fromkeys(self.calls[::-1]))

    def bound(self, part: Pattern, value: Any) -> Match:
        """This match with one more part."""
        return replace(self, found={**self.found, part: value})


class Pattern:
    """An expression that values may match; the operators of Python build calls."""

    roots: frozenset[str] = frozenset()
    """The operators that a match ends with; empty if it may be any."""
    needs: Needs = frozenset()

    def match(self, edit: Rewriter, value: Value, reader: Node, so_far: Match) -> Iterator[Match]:
        """Every way in which a value that `reader` reads matches."""
        raise NotImplementedError

    def __or__(self, other: Pattern) -> Pattern:
        """Match either of two patterns."""
        return Either(self, other)

    def __add__(self, other: Pattern | float) -> Pattern:
        """Match a sum."""
        return Operation("Add", (self, other))

    def __sub__(self, other: Pattern | float) -> Pattern:
        """Match a difference."""
        return Operation("Sub", (self, other))

    def __mul__(self, other: Pattern | float) -> Pattern:
        """Match a product."""
        return Operation("Mul", (self, other))

    def __truediv__(self, other: Pattern | float) -> Pattern:
        """Match a quotient."""
        return Operation("Div", (self, other))

    def __rtruediv__(self, other: float) -> Pattern:
        """Match the quotient of a number and a value."""
        return Operation("Div", (other, self))

    def __neg__(self) -> Pattern:
        """Match a negation."""
        return Operation("Neg", (self,))


class Anything(Pattern):
    """Any value."""

    def match(self, edit: Rewriter, value: Value, reader: Node, so_far: Match) -> Iterator[Match]:
        """Match any value, and the same one afterwards."""
        if self not in so_far.found:
            yield so_far.bound(self, value)
        elif so_far.found[self] == value:
            yield so_far


class ConstantValue(Anything):
    """A constant tensor."""

    def match(self, edit: Rewriter, value: Value, reader: Node, so_far: Match) -> Iterator[Match]:
        """Match a constant."""
        if edit.is_constant(value):
            yield from super().match(edit, value, reader, so_far)


class Number(Pattern):
    """A constant float32 of one element that adds no axis, and does not train.

    Args:
        value: the number that it must be, if any.
        tolerance: how far it may differ, relative to the value.
    """

    def __init__(self, value: float | None = None, tolerance: float = 0.0) -> None:
        self.value, self.tolerance = value, tolerance

    def match(self, edit: Rewriter, value: Value, reader: Node, so_far: Match) -> Iterator[Match]:
        """Match a number; a match has it instead of the value."""
        found = number(edit, reader, value)
        if found is not None:
            wanted = so_far.found.get(self, found) if self.value is None else self.value
            if abs(found - wanted) <= self.tolerance * abs(wanted):
                yield so_far.bound(self, found)


class Exponent(Pattern):
    """A constant of one element of any dtype, the second operand of a Pow, that adds no axis."""

    def __init__(self, value: float) -> None:
        self.value = value

    def match(self, edit: Rewriter, value: Value, reader: Node, so_far: Match) -> Iterator[Match]:
        """Match the number."""
        array = edit.constant(value, FEW)
        if array is not None and array.size == 1 and array.reshape(-1)[0] == self.value:
            shape = edit.shape(reader.inputs[0]) if array.ndim else ()
            if shape is not None and len(shape) >= array.ndim:
                yield so_far


class Either(Pattern):
    """One of several patterns, tried in order."""

    def __init__(self, *parts: Pattern) -> None:
        self.parts = parts
        if all(p.roots for p in parts):
            self.roots = frozenset().union(*(p.roots for p in parts))
        every = frozenset().union(*(p.needs for p in parts), {self.roots} if self.roots else ())
        self.needs = frozenset(n for n in every if all(any(m <= n for m in p.needs) for p in parts))

    def match(self, edit: Rewriter, value: Value, reader: Node, so_far: Match) -> Iterator[Match]:
        """Match the parts in order."""
        if so_far.found.get(self) == value:
            yield so_far
            return
        for part in self.parts:
            for made in part.match(edit, value, reader, so_far):
                yield made.bound(self, value)

    def __or__(self, other: Pattern) -> Pattern:
        """Match one more pattern."""
        return Either(*self.parts, other)


class Operation(Pattern):
    """A call of an operator of ONNX's domain.

    Args:
        name: the operator.
        inputs: a pattern for each input, numbers as they are; after `...` there may be more.
        output: the position of the output.
        attributes: the values that attributes must have.
    """

    def __init__(
        self, name: str, inputs: Sequence[Pattern | float | EllipsisType], output: int = 0, attributes: Mapping[str, Any] = NONE
    ) -> None:
        self.name, self.output, self.attributes = name, output, attributes
        self.open, self.elsewhere = ... in inputs, False
        self.inputs = tuple(p if isinstance(p, Pattern) else Number(p) for p in inputs if not isinstance(p, EllipsisType))
        self.roots = frozenset({name})
        self.needs = frozenset({self.roots}).union(*(p.needs for p in self.inputs))
        self.orders = [_operations_first(self.inputs)]
        if name in COMMUTATIVE and len(self.inputs) == 2 and self.inputs[0] is not self.inputs[1]:
            self.orders.append(_operations_first(self.inputs[::-1]))

    def shared(self) -> Operation:
        """The same call; its result may be used elsewhere."""
        made = Operation(self.name, (*self.inputs, *((...,) if self.open else ())), self.output, self.attributes)
        made.elsewhere = True
        return made

    def match(self, edit: Rewriter, value: Value, reader: Node, so_far: Match) -> Iterator[Match]:
        """Match a call and its inputs."""
        call = value.producer
        if call is None or edit.operator(call) != self.name:
            return
        if so_far.found.get(self) == value:
            yield so_far
        elif self.output < len(call.outputs) and call.outputs[self.output] == value:
            middle = so_far.middle if self.elsewhere else (*so_far.middle, value)
            made = Match({**so_far.found, self: value}, (*so_far.calls, call), middle)
            yield from self.inside(edit, call, made)

    def inside(self, edit: Rewriter, call: Node, so_far: Match) -> Iterator[Match]:
        """Every way in which the attributes and inputs of a call match."""
        count = len(call.inputs)
        if count != len(self.inputs) and not (self.open and count > len(self.inputs)):
            return
        if all(edit.attribute(call, k) == v for k, v in self.attributes.items()):
            for order in self.orders:
                yield from _each(edit, order, call, so_far)


def _operations_first(parts: Sequence[Pattern]) -> list[tuple[int, Pattern]]:
    """The positions of inputs and their patterns, those that few values match first."""
    return sorted(enumerate(parts), key=lambda pair: not pair[1].needs)


def _each(edit: Rewriter, parts: Sequence[tuple[int, Pattern]], call: Node, so_far: Match) -> Iterator[Match]:
    """Every way in which inputs of a call match."""
    if not parts:
        yield so_far
        return
    at, part = parts[0]
    value = call.input(at)
    for made in part.match(edit, value, call, so_far) if value is not None else ():
        yield from _each(edit, parts[1:], call, made)


class Multiple(Pattern):
    """A value times numbers, which are products or quotients; a match has the factor.

    Args:
        part: the pattern of the value.
        least: the lowest number of such calls.
        most: the highest.
    """

    def __init__(self, part: Pattern, least: int = 0, most: int = 3) -> None:
        self.part, self.least, self.most = part, least, most
        self.needs = part.needs if least == 0 else part.needs | {frozenset(("Mul", "Div"))}

    def match(self, edit: Rewriter, value: Value, reader: Node, so_far: Match) -> Iterator[Match]:
        """Match the value before as many calls as possible first."""
        steps = [so_far.bound(self, 1.0)]
        values = [(value, reader)]
        while len(steps) <= self.most:
            value = values[-1][0]
            call = value.producer if value.is_used_once else None
            found = None if call is None else factor(edit, call)
            if call is None or found is None:
                break
            last = steps[-1]
            steps.append(Match({**last.found, self: last[self] * found[1]}, (*last.calls, call), (*last.middle, value)))
            values.append((found[0], call))
        for made, (source, call) in zip(steps[: self.least - 1 if self.least else None : -1], values[::-1], strict=False):
            yield from self.part.match(edit, source, call, made)


def number(edit: Rewriter, call: Node, value: Value | None) -> float | None:
    """A number that an elementwise call combines with another value, if it does not train."""
    found = edit.number(call, value)
    return None if found is None or edit.trains(value) else found


def factor(edit: Rewriter, call: Node, value: Value | None = None) -> tuple[Value, float] | None:
    """The value that a Mul or a Div multiplies by a number, and the number; `value`: the value, if it must be one."""
    name = edit.operator(call)
    if name not in ("Mul", "Div") or len(call.inputs) != 2:
        return None
    for at in (0, 1) if name == "Mul" else (0,):
        x = call.inputs[at]
        if x is not None and value in (None, x):
            found = number(edit, call, call.inputs[1 - at])
            if found is not None and (name == "Mul" or found):
                return x, found if name == "Mul" else 1 / found
    return None


class _Operators:
    """Calls by the name of their operator: `op.Relu(x)`."""

    def __getattr__(self, name: str) -> Callable[..., Operation]:
        def call(*inputs: Pattern | float | EllipsisType, output: int = 0, **attributes: Any) -> Operation:
            return Operation(name, inputs, output, attributes)

        return call


op = _Operators()
"""The operators of ONNX."""


def squared(x: Pattern) -> Pattern:
    """The square of a value."""
    return op.Mul(x, x) | op.Pow(x, Exponent(2))


def over_root(x: Pattern, variance: Pattern) -> Pattern:
    """A value divided by the root of another one."""
    return x / _root(variance) | x * inverse_root(variance)


def inverse_root(x: Pattern) -> Pattern:
    """1 divided by the root of a value."""
    return op.Reciprocal(_root(x)) | 1 / _root(x) | op.Pow(x, -0.5)


def _root(x: Pattern) -> Pattern:
    return op.Sqrt(x) | op.Pow(x, 0.5)


@dataclass(frozen=True)
class Rule:
    """What replaces a pattern.

    Attributes:
        pattern: the pattern.
        rewrite: replaces the last call of a match by one `put`; returns False, and changes nothing, if the match does not suit.
    """

    pattern: Pattern
    rewrite: Callable[[Rewriter, Match], bool]

    def apply(self, edit: Rewriter, root: Node) -> bool:
        """Rewrite a match that ends with a call, if there is one."""
        for made in matches(edit, self.pattern, root):
            if edit.inside(made.middle, made.calls) and self.rewrite(edit, made):
                return True
        return False


def matches(edit: Rewriter, pattern: Pattern, root: Node) -> Iterator[Match]:
    """The matches of a pattern that end with a call, whose result may be used anywhere."""
    for part in pattern.parts if isinstance(pattern, Either) else (pattern,):
        if isinstance(part, Operation) and part.name == edit.operator(root):
            yield from part.inside(edit, root, Match({part: root.outputs[0]}, (root,)))


class Rules:
    """Rules in order; sets of rules add up."""

    def __init__(self, *rules: Rule) -> None:
        self.rules = rules

    def __add__(self, other: Rules) -> Rules:
        """Return the rules of both, those of this set first."""
        return Rules(*self.rules, *other.rules)

    def run(self, edit: Rewriter) -> int:
        """Apply each rule to every call that it may end with; return the number of rewrites."""
        count = 0
        for rule in self.rules:
            if not all(any(edit.named(name) for name in names) for names in rule.pattern.needs):
                continue
            for root in edit.named(*sorted(rule.pattern.roots)):
                count += root in edit.graph and rule.apply(edit, root)
        return count
