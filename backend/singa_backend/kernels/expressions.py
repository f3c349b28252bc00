"""Elementwise calls by the expression that their definitions leave when they are traced (see `elementwise`).

One step computes a call, or several calls whose results only they read.  A part whose result is much smaller than the whole, such
as a rate or a value for each row, is computed before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..elementwise import facts
from ..elementwise.compile import available
from ..elementwise.expression import FREE, ExpressionTrace, Recorded, Term, is_aligned, order
from ..elementwise.facts import Range
from ..elementwise.numpy_form import NumpyProgram, evaluate
from ..elementwise.trace import DTYPES, InputKind, Operand, traced_calls
from ..ir.sizes import broadcast_sizes, typical
from ..ir.versioned import VersionedOperator, reads_on_host, versioned
from .elementwise import BLOCK, ArrayCalls, emit_calls, finiteness_of, order_of
from .frames import MISSING, ReducedAxes, machine_step
from .table import Refused, Site, general
from .values import ANY, FINITE, INFINITE, LOW, NAN, Value, dense, sum_finiteness

LITERAL = 64.0
"""A constant of one element is a part of the expression if it is a multiple of 1 / LITERAL up to LITERAL, otherwise an input: the
scale of each layer would be a kernel of its own."""

SMALLER = 4
"""A part is computed before the whole if its result has so many times fewer elements."""

MOST_TERMS = 400
"""The maximum number of primitives of an expression."""


@dataclass(frozen=True)
class ExpressionCall:
    """A call of an expression.

    Attributes:
        operator: the operator.
        attributes: its attributes, defaults included.
        operands: for each input a value, the position of the result that it is, or None for an absent one.
        wanted: which of the outputs are results.
    """

    operator: VersionedOperator
    attributes: Mapping[str, Any]
    operands: tuple[Value | int | None, ...]
    wanted: tuple[bool, ...] = (True,)


def trace(site: Site, operations: Sequence[ExpressionCall]) -> tuple[list[Term], list[Value]]:
    """The terms of the results of calls, and the values of the inputs; refuses calls that are not elementwise."""
    inputs: dict[int, tuple[int, Value]] = {}
    calls: list[tuple[VersionedOperator, Mapping[str, Any], tuple[Operand, ...], tuple[bool, ...]]] = []
    for one in operations:
        operands: list[Operand] = []
        for n, v in enumerate(one.operands):
            if not isinstance(v, Value):
                operands.append(None if v is None else (True, v))
            elif reads_on_host(one.operator.declaration, n):
                site.require(v.constant, "an input that is read on the host is not a constant")
                operands.append(InputKind(v.dtype, v.shape, v.array.tobytes()))
            else:
                site.require(v.dtype in DTYPES, f"elements of {v.dtype}")
                operands.append((False, inputs.setdefault(id(v), (len(inputs), v))[0]))
        calls.append((one.operator, one.attributes, tuple(operands), one.wanted))
    values = [v for _, v in inputs.values()]
    found = traced_calls(calls, tuple(InputKind(v.dtype, v.shape) for v in values))
    if isinstance(found, str):
        site.refuse(found)
    for bad in found.checks:
        used = {t.extra for t in order([bad]) if t.op == "input"}
        site.require(all(values[i].constant for i in used), "a value must be checked in each run")
        arrays = [v.array if i in used else None for i, v in enumerate(values)]
        site.require(not evaluate([bad], arrays)[0].any(), "the definition refuses a value")
    return list(found.results), values


def compute(
    site: Site,
    results: Sequence[Term],
    inputs: Sequence[Value],
    label: str = "",
    reusable: Callable[[Value], bool] = lambda v: False,
    into: Mapping[int, Value] | None = None,
    engine: str = "",
) -> list[Value]:
    """Emit the step that computes expressions of one shape, some of which may reduce the same axes.

    Args:
        site: the place.
        results: the terms.
        inputs: the values of the inputs, by place.
        label: names the step in reports, if it is more than one primitive.
        reusable: whether nothing reads the memory of an input after the step.
        into: the value in whose memory a result must be if that is possible, by the number of the result.
        engine: "machine" or "numpy"; by default machine code where there is some.

    Returns:
        The results.
    """
    site.require(all(r.dtype in DTYPES for r in results), f"elements of {results[0].dtype}")
    rows = _rows(site, results)
    site.require(all(r.shape in (rows.shape, rows.kept, rows.squeezed) for r in results), "the results have several shapes")
    site.require(len(order(results)) <= MOST_TERMS, "the expression is too long")
    known = ranges(site, results, inputs)
    plain = {k: inputs[r.extra] for k, r in enumerate(results) if r.op == "input"}  # such as Clip without bounds
    computed = [k for k in range(len(results)) if k not in plain]
    made: dict[int, Value] = {k: v.view(v.shape, v.strides) for k, v in plain.items()}
    if computed:
        leaves = Leaves(site, [results[k] for k in computed], inputs, label, rows)
        wanted = {n: into[k] for n, k in enumerate(computed) if into and k in into}
        ys = _emit(site, leaves, label, reusable, wanted, engine)
        made |= {k: _squeezed(y, results[k].shape, rows) for k, y in zip(computed, ys, strict=True)}
    for k, r in enumerate(results):
        _judge(r, known, inputs, made[k])
    return [made[k] for k in range(len(results))]


def judge(site: Site, result: Term, inputs: Sequence[Value], y: Value) -> None:
    """Set what is known of the elements of a result."""
    _judge(result, ranges(site, [result], inputs), inputs, y)


def _judge(result: Term, known: Mapping[int, Range], inputs: Sequence[Value], y: Value) -> None:
    at = known[id(result)]
    y.finiteness, y.low = finiteness_of(result.dtype, finiteness_in(at)), ANY
    if y.finiteness == INFINITE:
        y.low = _low(result, known, inputs) if at.high < math.inf else ANY


def _rows(site: Site, results: Sequence[Term]) -> ReducedAxes:
    """What expressions reduce."""
    reduced = [t for t in order(results) if t.op == "reduce"]
    if not reduced:
        return ReducedAxes(results[0].shape, ())
    kinds = {tuple(a - len(t.args[0].shape) for a in t.extra[1]) for t in reduced}
    try:
        shape = broadcast_sizes(*(t.args[0].shape for t in reduced))
    except ValueError:
        site.refuse("values of several shapes are reduced")
    site.require(len(kinds) == 1, "several axes are reduced apart")
    return ReducedAxes(shape, *kinds)


def _squeezed(y: Value, shape: tuple[int, ...], rows: ReducedAxes) -> Value:
    """A reduced value in a shape, which may lack the axes."""
    rank = len(rows.shape)
    kept = [i for i in range(rank) if i - rank not in rows.axes]
    return y.view(shape, [y.strides[i] for i in kept]) if len(shape) < y.ndim else y


def ranges(site: Site, results: Sequence[Term], inputs: Sequence[Value]) -> Mapping[int, Range]:
    """The range of each term."""
    return facts.ranges(tuple(results), tuple(_range_of(site, v) for v in inputs))


def finiteness_in(values: Range) -> int:
    """What a range says of infinities and NaN."""
    return NAN if values.nan else INFINITE if values.has_infinity else FINITE


def _range_of(site: Site, v: Value) -> Range:
    if v.dtype.kind != "f":
        return facts.FINITE
    if v.constant and v.size <= BLOCK:
        found: Range = site.derived(v, "range", lambda: facts.number_of(v.array))
        return found
    if v.finiteness == NAN:
        return facts.UNKNOWN
    if v.finiteness == FINITE:
        return facts.FINITE
    return Range(-math.inf, facts.MOST if v.low else math.inf)


def _low(t: Term, known: Mapping[int, Range], inputs: Sequence[Value]) -> int:
    """Which infinities a result without positive ones holds: a sum with finite values keeps a finite one in each row."""
    if t.op == "input":
        place: int = t.extra
        return inputs[place].low
    if t.op in ("reshape", "expand"):
        return min(_low(t.args[0], known, inputs), LOW)
    if t.op != "add":
        return LOW
    lows = [_low(a, known, inputs) if known[id(a)].has_infinity else ANY for a in t.args]
    kinds = [INFINITE if known[id(a)].has_infinity else FINITE for a in t.args]
    _, low = sum_finiteness(kinds[0], lows[0], kinds[1], lows[1])
    return low


class Leaves:
    """An expression whose inputs are values in memory, as the frame walks them.

    Attributes:
        results: the terms; the place of an input is that of a leaf.
        values: the leaves.
        rows: what is reduced.
    """

    def __init__(
        self, site: Site, results: Sequence[Term], inputs: Sequence[Value], label: str, rows: ReducedAxes, at_once: bool = False
    ) -> None:
        """Args: rows: what is reduced; then, or `at_once`, no part is computed before the others."""
        self._site, self._inputs, self.rows = site, inputs, rows
        parts = self._computed_parts(results, label, 0 if at_once or rows.axes else math.prod(rows.shape))
        places: dict[Any, tuple[int, Value]] = {}
        sources: list[tuple[Term, int | bytes]] = []
        for t in (*parts, *(t for t in order(results, {id(t) for t in parts}) if t.op == "input")):
            v = parts[t] if t in parts else inputs[t.extra]
            source: int | bytes | None = _number(v)
            if source is None:
                v = v.view((), ()) if v.size == 1 else v
                source, _ = places.setdefault((id(v.buffer), v.offset, v.shape, v.strides, v.dtype), (len(places), v))
            sources.append((t, source))
        rewritten = _over_leaves(tuple(results), tuple(sources), rows)
        if isinstance(rewritten, str):
            site.refuse(rewritten)
        self.results, leaves = rewritten
        values = [v for _, v in places.values()]
        self.values = [_viewed(values[i], shape) for i, shape in leaves]

    def _computed_parts(self, results: Sequence[Term], label: str, size: int) -> dict[Term, Value]:
        """The values of constants, and those that are so much smaller than results of this size; none is for 0."""
        terms = order(results)
        small = [v.array if v.constant and v.size <= BLOCK else None for v in self._inputs]
        constant = {t for t in terms if t.op == "const" or (t.op == "input" and small[t.extra] is not None)}
        for t in terms:
            if t.args and constant.issuperset(t.args):
                constant.add(t)
        before = set(constant)
        for t in terms:  # what is only cast is not stored
            if (
                size
                and typical(t.size) * SMALLER <= typical(size)
                and t.op not in FREE
                and (t.op != "cast" or not before.isdisjoint(t.args))
            ):
                before.add(t)
        tops = {a for t in terms if t not in before for a in t.args}.union(results)
        values: dict[Term, Value] = {}
        parts: dict[tuple[int, ...], list[Term]] = {}
        for t in (t for t in terms if t in tops and t in before and t.op not in ("const", "input")):
            if t in constant:
                values[t] = self._site.constant(np.ascontiguousarray(evaluate([t], small)[0]))
            else:
                parts.setdefault(t.shape, []).append(t)
        for several in parts.values():
            values |= dict(zip(several, compute(self._site, several, self._inputs, label), strict=True))
        return values


def _number(v: Value) -> bytes | None:
    """The bytes of a constant that is a number of the expression; None for another value."""
    if not v.constant or v.size != 1:
        return None
    number = v.array.reshape(())
    with np.errstate(all="ignore"):
        plain = v.dtype.kind == "b" or (abs(number) <= LITERAL and float(number * LITERAL).is_integer())
    return number.tobytes() if plain else None


@lru_cache(maxsize=1024)
def _over_leaves(
    results: tuple[Term, ...], sources: tuple[tuple[Term, int | bytes], ...], rows: ReducedAxes
) -> tuple[tuple[Term, ...], tuple[tuple[int, tuple[int, ...]], ...]] | str:
    """The terms of results as functions of leaves.

    Args:
        results: the terms.
        sources: for the inputs, and for what was computed before, the place of the value, or the bytes of a number.
        rows: what is reduced.

    Returns:
        The terms, and for each leaf the place of the value, and the shape as which it is read, () for one element; or why they
        are not elementwise.
    """
    whole, places = ExpressionTrace(), dict(sources)
    written: dict[Term, Recorded] = {}
    leaves: dict[tuple[int, tuple[int, ...]], Recorded] = {}

    def read(source: Term, t: Term) -> Recorded:
        """A source, in the shape of a term."""
        place = places[source]
        if isinstance(place, bytes):
            return whole.constant(np.frombuffer(place, t.dtype)[0], t.dtype)
        key = (place, t.shape if t.size != 1 else ())
        if key not in leaves:
            leaves[key] = whole.input(t.dtype, t.shape)
        return leaves[key]

    squeezed: set[Term] = set()  # those without the axes that are reduced, which no other value may meet
    forms = (rows.kept, rows.kept[next((i for i, d in enumerate(rows.kept) if d != 1), 0) :])
    for t in order(results, {id(t) for t in places}):
        if t.op == "reshape" and t.args[0].op == "input":
            written[t] = read(t.args[0], t)
            continue
        args = [written[a] if a in written else read(a, a) for a in t.args]
        written[t] = args[0] if t.op == "reshape" else whole.term(t.op, args, t.dtype, t.shape, t.extra)
        if t.op == "reshape" and t.args[0] in squeezed:
            if t.shape not in forms:
                return "a computed value is reshaped"
        elif t.op == "reshape" and not is_aligned(t, len(rows.shape)):
            if not rows.axes or t.args[0].shape not in forms or t.shape != rows.squeezed:
                return "a computed value is reshaped"
            squeezed.add(t)
        elif not squeezed.isdisjoint(t.args):
            if t.shape != rows.squeezed or not all(a in squeezed or a.size == 1 for a in t.args):
                return "the axes are not kept, and others are read"
            squeezed.add(t)
    return tuple((written[r] if r in written else read(r, r)).term for r in results), tuple(leaves)


def _viewed(v: Value, shape: tuple[int, ...]) -> Value:
    """A value in a shape with other axes of 1."""
    if shape == v.shape:
        return v
    kept = iter([s for d, s in zip(v.shape, v.strides, strict=True) if d != 1])
    return v.view(shape, tuple(next(kept) if d != 1 else v.dtype.itemsize for d in shape))


def _emit(
    site: Site, leaves: Leaves, label: str, reusable: Callable[[Value], bool], into: Mapping[int, Value], engine: str
) -> list[Value]:
    program, size = None if leaves.rows.axes else _program(leaves.results), math.prod(leaves.rows.shape)
    layout, name, count = _layout(leaves, into), label, len(order(leaves.results))
    if program is not None:
        count = len(program.calls)
        name = getattr(program.calls[0].function, "__name__", label) if count == 1 or not label else label
    step = None
    if engine != "numpy" and size >= (1 if site.options.deterministic else 2) and not available():  # a number costs a call anyway
        step = machine_step(site, leaves.results, leaves.rows, layout, leaves.values, size * count)
    if step is None and (engine == "machine" or program is None):
        site.refuse(MISSING if site.wanted else "machine code would not be faster")
    ys = _outputs(site, leaves, layout, reusable, into, _always if program is None or step is not None else program.may_replace)
    if step is not None:
        step.emit(site, ys, name)
    elif size and program is not None:
        calls = ArrayCalls(program.bind, program.registers, len(program.calls) > 1)
        emit_calls(site, ys, leaves.values, layout, calls, f"numpy.{name}")
    return ys


def _always(result: int, place: int) -> bool:
    return True


_program = lru_cache(maxsize=1024)(NumpyProgram)


def _layout(leaves: Leaves, into: Mapping[int, Value]) -> Sequence[int]:
    """The order of the axes of the results in memory: that of what they replace, otherwise of the first input of their shape."""
    orders = (order_of(v) for v in (*into.values(), *leaves.values) if v.shape == leaves.rows.shape)
    return next((o for o in orders if o is not None), range(len(leaves.rows.shape)))


def _outputs(
    site: Site,
    leaves: Leaves,
    layout: Sequence[int],
    reusable: Callable[[Value], bool],
    into: Mapping[int, Value],
    may_replace: Callable[[int, int], bool],
) -> list[Value]:
    """The values of the results: in the memory of an input where that may be.

    A result of one element is always a new value: in place, NumPy takes three times as long.
    """
    shape, several = leaves.rows.shape, math.prod(leaves.rows.shape) != 1
    taken: set[int] = set()
    ys: list[Value] = []

    def fits(v: Value, k: int, place: int) -> bool:
        if v.shape != shape or v.dtype != leaves.results[k].dtype or id(v.buffer) in taken:
            return False
        return dense(shape, v.strides, v.dtype.itemsize, layout) and _apart(leaves, v, place, may_replace, k)

    for k, r in enumerate(leaves.results):
        found: Value | None = None
        if r.size != math.prod(shape):
            ys.append(site.new(leaves.rows.kept, r.dtype, layout, FINITE))
            continue
        if k in into:
            places = [i for i, v in enumerate(leaves.values) if v.buffer is into[k].buffer]
            found = into[k] if all(fits(into[k], k, i) for i in places or (-1,)) else None
        elif several:
            there = enumerate(leaves.values)
            found = next((v for i, v in there if fits(v, k, i) and reusable(v)), None)
        if found is None:
            ys.append(site.new(shape, r.dtype, layout, FINITE))
        else:
            taken.add(id(found.buffer))
            ys.append(found.view(shape, found.strides))
    return ys


def _apart(leaves: Leaves, v: Value, place: int, may_replace: Callable[[int, int], bool], k: int) -> bool:
    """Whether a result may overwrite a leaf: nothing reads that, or another view of its memory, afterwards."""
    for i, other in enumerate(leaves.values):
        if other.buffer is v.buffer:
            same = i == place or (other.offset, other.strides) == (v.offset, v.strides)
            if not same or not may_replace(k, i):
                return False
    return True


@general("unary", "broadcasting", on="numpy")
def expression(site: Site, *inputs: Value | None) -> Value:
    """An elementwise call, and those that follow it, by NumPy."""
    terms, values, free = chained(site, inputs)
    plain = [all(t.op != "reduce" for t in order([one])) for one in terms]
    count = (*plain, False).index(False)
    site.require(count, "axes are reduced")
    site.absorb(count - 1)
    (y,) = compute(site, terms[count - 1 : count], values, label_of(site), lambda v: id(v) in free, engine="numpy")
    return y


def label_of(site: Site) -> str:
    """The operators of a call and of those that it has absorbed."""
    return "+".join([site.name, *(f.name for f in site.followers[: site.absorbed])]).lower()


def replaceable(site: Site, inputs: Sequence[Value | None]) -> set[int]:
    """The ids of the inputs in whose memory a result may be."""
    return {id(v) for place, v in enumerate(inputs) if v is not None and site.reusable(place)}


def chained(site: Site, inputs: Sequence[Value | None]) -> tuple[list[Term], list[Value], set[int]]:
    """The terms of a call and of those that follow it, which it absorbs, the inputs, and the ids of those that it may replace."""
    operations = [ExpressionCall(site.operator, site.attributes, tuple(inputs))]
    free = replaceable(site, inputs)
    for f in site.followers:
        if f.place < 0 or any(v is not None and v.dtype not in DTYPES for v in f.inputs):
            break
        operands = tuple(len(operations) - 1 if i == f.place else v for i, v in enumerate(f.inputs))
        operations.append(ExpressionCall(versioned("", f.name, f.version), f.attributes, operands))
        free |= {id(f.inputs[p]) for p in f.reusable}
    terms, values = longest(site, operations)
    site.absorb(len(terms) - 1)
    return terms, values, free


def longest(site: Site, operations: Sequence[ExpressionCall]) -> tuple[list[Term], list[Value]]:
    """The terms of as many of the calls, from the first, as are elementwise."""
    for count in range(len(operations), 1, -1):
        try:
            return trace(site, operations[:count])
        except Refused:
            continue
    return trace(site, operations[:1])
