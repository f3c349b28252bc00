"""Elementwise calls by the expression that their definitions leave when they are traced (see `elementwise`).

One step computes a call, or several calls whose results only they read.  A part whose result is much smaller than the whole, such
as a rate or a value for each row, is computed before it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..elementwise import facts
from ..elementwise.compile import Compiled, NotCompiled, available, compiled, kept, waits
from ..elementwise.expression import FREE, ExpressionTrace, Recorded, Term, is_aligned, order
from ..elementwise.facts import Range
from ..elementwise.machine_code import MachineCode, emit, grows
from ..elementwise.numpy_form import NumpyProgram, evaluate
from ..elementwise.primitives import NotEmitted
from ..elementwise.trace import DTYPES, InputKind, substituted, traced
from ..ir.versioned import VersionedOperator, reads_on_host, versioned
from . import onednn
from .elementwise import BLOCK, ArrayCalls, collapsed, emit_calls, finiteness_of, order_of
from .table import Refused, Site, general
from .values import ANY, FINITE, INFINITE, LOW, NAN, Bound, Buffer, Value, address_of, dense, strides_of, sum_finiteness

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
        operands: for each input a value, the position of the operation that computes it, or None for an absent one.
    """

    operator: VersionedOperator
    attributes: Mapping[str, Any]
    operands: tuple[Value | int | None, ...]


def trace(site: Site, operations: Sequence[ExpressionCall]) -> tuple[list[Term], list[Value]]:
    """The terms of the results of calls, and the values of the inputs; refuses calls that are not elementwise."""
    whole = ExpressionTrace()
    inputs: dict[int, tuple[Value, Recorded]] = {}
    made: list[Recorded] = []
    for one in operations:
        operands: list[Recorded | None] = []
        kinds: list[InputKind | None] = []
        for n, v in enumerate(one.operands):
            if isinstance(v, Value) and reads_on_host(one.operator.declaration, n):
                site.require(v.constant, "an input that is read on the host is not a constant")
                kinds.append(InputKind(v.dtype, v.shape, v.array.tobytes()))
                continue
            if isinstance(v, Value):
                site.require(v.dtype in DTYPES, f"elements of {v.dtype}")
                if id(v) not in inputs:
                    inputs[id(v)] = v, whole.input(v.dtype, v.shape)
                operand: Recorded | None = inputs[id(v)][1]
            else:
                operand = None if v is None else made[v]
            operands.append(operand)
            kinds.append(None if operand is None else InputKind(operand.dtype, operand.shape))
        found = traced(one.operator, one.attributes, tuple(kinds))
        if isinstance(found, str):
            site.refuse(found)
        values = [v for v, _ in inputs.values()]
        there = [r for r in operands if r is not None]
        (y,), checks = substituted(whole, found.results, there), substituted(whole, found.checks, there)
        for bad in checks:
            used = {t.extra for t in order([bad.term]) if t.op == "input"}
            site.require(all(values[i].constant for i in used), "a value must be checked in each run")
            arrays = [v.array if i in used else None for i, v in enumerate(values)]
            site.require(not evaluate([bad.term], arrays)[0].any(), "the definition refuses a value")
        made.append(y)
    return [y.term for y in made], [v for v, _ in inputs.values()]


def compute(
    site: Site,
    results: Sequence[Term],
    inputs: Sequence[Value],
    label: str = "",
    reusable: Callable[[Value], bool] = lambda v: False,
    into: Mapping[int, Value] | None = None,
    engine: str = "",
) -> list[Value]:
    """Emit the step that computes expressions whose results have one shape.

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
    shapes = {r.shape for r in results}
    site.require(len(shapes) == 1, "the results have several shapes")
    site.require(len(order(results)) <= MOST_TERMS, "the expression is too long")
    known = ranges(site, results, inputs)
    plain = {k: inputs[r.extra] for k, r in enumerate(results) if r.op == "input"}  # such as Clip without bounds
    computed = [k for k in range(len(results)) if k not in plain]
    made: dict[int, Value] = {k: v.view(v.shape, v.strides) for k, v in plain.items()}
    if computed:
        leaves = Leaves(site, [results[k] for k in computed], inputs, label)
        wanted = {n: into[k] for n, k in enumerate(computed) if into and k in into}
        ys = _emit(site, leaves, label, reusable, wanted, engine)
        made |= dict(zip(computed, ys, strict=True))
    for k, r in enumerate(results):
        y, at = made[k], known[id(r)]
        y.finiteness, y.low = finiteness_of(r.dtype, finiteness_in(at)), ANY
        if y.finiteness == INFINITE:
            y.low = _low(r, known, inputs) if at.high < math.inf else ANY
    return [made[k] for k in range(len(results))]


def ranges(site: Site, results: Sequence[Term], inputs: Sequence[Value]) -> dict[int, Range]:
    """The range of each term."""
    return facts.ranges(list(results), {i: _range_of(site, v) for i, v in enumerate(inputs)})


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
        shape: of the results, or of what is reduced.
        kept: the shape of what is reduced, with its axes.
    """

    def __init__(
        self, site: Site, results: Sequence[Term], inputs: Sequence[Value], label: str, rows: tuple[int, ...] = (),
        shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        """Args: rows: the axes that are reduced, so that no part is computed before the others; shape: of what is reduced."""
        self._site, self._inputs, self._rows = site, inputs, rows
        self.shape = results[0].shape if shape is None else shape
        reduced = {a % len(self.shape) for a in rows}
        self.kept = tuple(1 if i in reduced else d for i, d in enumerate(self.shape))
        self._without = tuple(d for i, d in enumerate(self.shape) if i not in reduced)
        self._squeezed: set[int] = set()  # the terms that do not have the axes, which no other value may meet
        self.values: list[Value] = []
        self._trace = ExpressionTrace()
        self._places: dict[Any, Recorded] = {}
        self._done: dict[int, Recorded] = {}
        self._compute_parts(results, label)
        for t in order(results, self._done):
            if t.op != "input":
                self._done[id(t)] = self._rewritten(t)
        self.results = [self._of(r).term for r in results]

    def _compute_parts(self, results: Sequence[Term], label: str) -> None:
        """Let constants, and values that are smaller than the results, be leaves."""
        terms, size = order(results), 0 if self._rows else math.prod(self.shape)
        small = [v.array if v.constant and v.size <= BLOCK else None for v in self._inputs]
        constant = {id(t) for t in terms if t.op == "const" or (t.op == "input" and small[t.extra] is not None)}
        for t in terms:
            if t.args and all(id(a) in constant for a in t.args):
                constant.add(id(t))
        before = {id(t) for t in terms if size and t.op not in FREE and t.size * SMALLER <= size} | constant
        tops = {id(a) for t in terms if id(t) not in before for a in t.args} | {id(r) for r in results}
        parts: dict[tuple[int, ...], list[Term]] = {}
        for t in (t for t in terms if id(t) in tops & before and t.op not in ("const", "input")):
            if id(t) in constant:
                self._done[id(t)] = self._constant(evaluate([t], small)[0])
            else:
                parts.setdefault(t.shape, []).append(t)
        for several in parts.values():
            for t, v in zip(several, compute(self._site, several, self._inputs, label), strict=True):
                self._done[id(t)] = self._leaf(v, t.shape)

    def _of(self, t: Term) -> Recorded:
        """What takes the place of a term that is an input, or was rewritten before."""
        if id(t) not in self._done:
            self._done[id(t)] = self._input(t)
        return self._done[id(t)]

    def _rewritten(self, t: Term) -> Recorded:
        if t.op == "reshape" and t.args[0].op == "input":
            return self._input(t)
        args = [self._of(a) for a in t.args]
        loose = [id(a) in self._squeezed for a in t.args]
        if t.op == "reshape" and (any(loose) or not is_aligned(t, len(self.shape))):
            forms = (self.kept, self._without)
            self._site.require(self._rows and t.shape in forms and t.args[0].shape in forms, "a computed value is reshaped")
            if t.shape == self._without:
                self._squeezed.add(id(t))
        elif any(loose):
            fits = t.shape == self._without and all(x or a.size == 1 for x, a in zip(loose, t.args, strict=True))
            self._site.require(fits, "the axes are not kept, and others are read")
            self._squeezed.add(id(t))
        return args[0] if t.op == "reshape" else self._trace.term(t.op, args, t.dtype, t.shape, t.extra)

    def _constant(self, array: np.ndarray) -> Recorded:
        """A constant: a number of the expression, or a leaf."""
        if array.size == 1:
            number = array.reshape(())
            with np.errstate(all="ignore"):
                if array.dtype.kind == "b" or (abs(number) <= LITERAL and float(number * LITERAL).is_integer()):
                    return self._trace.constant(number, array.dtype)
        return self._leaf(self._site.constant(np.ascontiguousarray(array)), array.shape)

    def _input(self, t: Term) -> Recorded:
        v = self._inputs[t.extra if t.op == "input" else t.args[0].extra]
        if v.constant and v.size == 1:
            made = self._constant(v.array)
            if made.term.op == "const":
                return made
        return self._leaf(v if t.shape == v.shape else v.view(t.shape, _steps(v, t.shape)), t.shape)

    def _leaf(self, v: Value, shape: tuple[int, ...]) -> Recorded:
        v = v.view((), ()) if v.size == 1 else v
        key = (id(v.buffer), v.offset, v.shape, v.strides, v.dtype)
        if key not in self._places:
            self._places[key] = self._trace.input(v.dtype, shape)
            self.values.append(v)
        return self._places[key]


def _steps(v: Value, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a value in a shape with other axes of 1."""
    kept = iter([s for d, s in zip(v.shape, v.strides, strict=True) if d != 1])
    return tuple(next(kept) if d != 1 else v.dtype.itemsize for d in shape)


def _emit(
    site: Site, leaves: Leaves, label: str, reusable: Callable[[Value], bool], into: Mapping[int, Value], engine: str
) -> list[Value]:
    program = NumpyProgram(leaves.results)
    layout = _layout(leaves, into)
    first = program.calls[0].function
    name = getattr(first, "__name__", label) if len(program.calls) == 1 or not label else label
    code = None if engine == "numpy" else _machine_code(site, leaves, layout, len(program.calls))
    if code is None and engine == "machine":
        site.refuse(MISSING if site.wanted else "machine code would not be faster")
    ys = outputs(site, leaves, layout, reusable, into, program.may_replace if code is None else lambda k, place: True)
    if not math.prod(leaves.shape):
        return ys
    if code is not None:
        values = [*(leaves.values[i] for i in code.leaves), *ys]
        bind = framed(code.function, code.threads, code.chunk, code.sizes, code.steps, values)
        site.emit(bind, reads=leaves.values, writes=ys, kernel=f"machine.{name}")
        return ys
    calls = ArrayCalls(program.bind, program.registers, len(program.calls) > 1)
    emit_calls(site, ys, leaves.values, layout, calls, f"numpy.{name}")
    return ys


def _layout(leaves: Leaves, into: Mapping[int, Value]) -> Sequence[int]:
    """The order of the axes of the results in memory: that of what they replace, otherwise of the first input of their shape."""
    orders = (order_of(v) for v in (*into.values(), *leaves.values) if v.shape == leaves.shape)
    return next((o for o in orders if o is not None), range(len(leaves.shape)))


# --- machine code

MISSING = "its machine code is not made yet"
"""Why machine code does not compute a step in a first run."""

WORTH = 1 << 12
"""The work of a step, in elements times primitives, from which machine code is compiled; code that is kept is used for less."""

TOGETHER = 1 << 16
"""The work of all steps of an expression in this process from which its code is compiled while the program runs."""

PARALLEL = 1 << 19
"""The work from which several threads compute a step."""

CHUNK = 1 << 14
"""The elements that a thread claims at a time."""


@dataclass(frozen=True)
class _Code:
    """The machine code of an expression, and how its frame is filled.

    Attributes:
        function: the function.
        leaves: the leaves that it reads, in the order of the pointers.
        sizes: the inner, the outer and the middle size, and the depth.
        steps: for each pointer the steps along the outer, the middle, the deep and the inner axis.
        threads: the number of threads.
        chunk: what a thread claims at a time.
    """

    function: Compiled
    leaves: tuple[int, ...]
    sizes: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    threads: int
    chunk: int


def _machine_code(site: Site, leaves: Leaves, layout: Sequence[int], calls: int) -> _Code | None:
    """The machine code for an expression; None if NumPy computes it."""
    size = math.prod(leaves.shape)
    if not size or available():
        return None
    model = [Value(Buffer(0), leaves.shape, strides_of(leaves.shape, r.dtype.itemsize, layout), r.dtype) for r in leaves.results]
    dims, steps = collapsed(leaves.shape, layout, [*model, *leaves.values])
    if len(dims) > 3:
        return None
    pad = (1,) * (3 - len(dims)) + dims
    wide = [(0,) * (3 - len(s)) + s for s in steps]
    count = len(model)
    classes = movements([(0, s[2]) for s in wide[count:]], leaves.values)
    work = size * calls
    found = machine_code(site, tuple(leaves.results), classes, work)
    if found is None:
        return None
    function, used, _ = found
    threads = site.options.threads if work > PARALLEL else 1
    rows = pad[0] * pad[1]
    chunk = CHUNK if rows == 1 else max(1, CHUNK // pad[2])
    moves = tuple((*s[:2], 0, s[2]) for s in (*(wide[count + i] for i in used), *wide[:count]))
    return _Code(function, used, (pad[2], *pad[:2], 1), moves, threads, chunk)


def movements(steps: Sequence[tuple[int, int]], values: Sequence[Value]) -> tuple[str, ...]:
    """How machine code reads values that have these steps along the deep and the inner axis."""

    def one(deep: int, s: int, itemsize: int) -> str:
        return "deep " * bool(deep) + ("scalar" if s == 0 else "row" if s == itemsize else "strided")

    return tuple(one(*s, v.dtype.itemsize) for s, v in zip(steps, values, strict=True))


def framed(
    function: Compiled,
    threads: int,
    chunk: int,
    sizes: Sequence[int],
    steps: Sequence[Sequence[int]],
    values: Sequence[Value],
    scratch: Buffer | None = None,
    places: Sequence[int] = (),
) -> Callable[[], Bound]:
    """The function that binds machine code to the present addresses; see elementwise/machine_code.py for the frame.

    Args:
        function: the code.
        threads: the number of threads.
        chunk: what a thread claims at a time.
        sizes: the inner, the outer and the middle size, and the depth.
        steps: for each pointer the steps along the outer, the middle, the deep and the inner axis.
        values: the inputs and the results.
        scratch: temporary memory.
        places: the first byte of each array in it.
    """
    region = onednn.parallel_region() if threads > 1 else 0
    numbers = [chunk, *sizes, *(n for s in steps for n in s), *[0] * (len(values) + len(places))]
    frames = np.array([[0, threads if region else 1, region, *numbers], [0, 1, 0, *numbers]], np.int64)
    start, address = frames.shape[1] - len(values) - len(places), FrameAddress(frames)

    def bind() -> Bound:
        base = 0 if scratch is None or scratch.memory is None else address_of(scratch.memory)
        frames[:, start:] = [*(v.address for v in values), *(base + p for p in places)]
        return [(function.call, (address,))]

    return bind


class FrameAddress(int):
    """The address of a frame, which it keeps.

    Attributes:
        frames: the frame, and the same one for one thread.
        threads: the number of threads.
        single: the address of the one for one thread.
    """

    frames: np.ndarray
    threads: int
    single: int

    def __new__(cls, frames: np.ndarray) -> FrameAddress:
        made = super().__new__(cls, frames.ctypes.data)
        made.frames, made.threads, made.single = frames, int(frames[0, 1]), int(frames[1].ctypes.data)
        return made


Code = tuple[Compiled, tuple[int, ...], tuple[np.dtype[Any], ...]]
"""A function; the place of each input, or ~i for the size that is term i of `order`; the dtypes of its rows of scratch."""

_KNOWN: dict[str, Code | str] = {}
"""The code of each key, or why there is none."""

_ASKED: Counter[str] = Counter()
"""The work of the steps that have asked for code that is not there."""


def machine_code(
    site: Site, results: tuple[Term, ...], classes: tuple[str, ...], work: int, axes: tuple[int, ...] = (), across: bool = False
) -> Code | None:
    """The machine code of terms; None if there is none, or not yet.

    Args:
        site: the place; a plan that is deterministic does not depend on what is kept.
        results: the terms.
        classes: how each input moves.
        work: of the step.
        axes: those that are reduced, counted from the end.
        across: whether the inner axis in memory is not one of them.
    """
    if site.options.deterministic and work < WORTH:
        return None
    key = repr((_key(results, axes), classes, across))
    found = _KNOWN.get(key)
    if found is None:
        try:
            function = None if key in _ASKED else kept(key, "k")
            waited = site.options.deterministic or waits()
            if function is None:
                _ASKED[key] += work
                if work < WORTH and (waited or _ASKED[key] < TOGETHER):
                    return None
            code = emit("k", results, dict(enumerate(classes)), axes, across)
        except (NotEmitted, NotCompiled) as reason:
            _KNOWN[key] = str(reason)
            return None
        terms = {id(t): i for i, t in enumerate(order(results))}
        inputs = tuple(t.extra if t.op == "input" else ~terms[id(t)] for t in code.inputs)
        if function is not None:
            found = _KNOWN[key] = (function, inputs, code.scratch)
        elif waited:
            found = _made(key, code, inputs)
        else:
            site.wanted[key] = partial(_made, key, code, inputs)
            return None
    return None if isinstance(found, str) else found


def _made(key: str, code: MachineCode, inputs: tuple[int, ...]) -> Code | str:
    """Compile machine code; what is known of it from now on."""
    found: Code | str = "it cannot be made"
    try:
        found = (compiled(key, "k", lambda: code.text), inputs, code.scratch)
    except (NotEmitted, NotCompiled) as reason:
        found = str(reason)
    finally:
        _KNOWN[key] = found
    return found


def _key(results: Sequence[Term], axes: Sequence[int]) -> Any:
    """All on which the code of an expression depends."""
    places: dict[int, int] = {}
    rows = []
    for t in order(results):
        places[id(t)] = len(places)
        extra = t.extra
        if t.op in ("reduce", "expand", "size", "position"):
            extra = t.extra[0] if t.op == "reduce" else t.op == "expand" and grows(t, axes)
        rows.append((t.op, tuple(places[id(a)] for a in t.args), t.dtype.str, extra))
    return rows, [places[id(r)] for r in results]


def outputs(
    site: Site,
    leaves: Leaves,
    layout: Sequence[int],
    reusable: Callable[[Value], bool],
    into: Mapping[int, Value],
    may_replace: Callable[[int, int], bool],
    kept: tuple[int, ...] = (),
) -> list[Value]:
    """The values of the results: in the memory of an input where that may be; those that are smaller have the shape `kept`.

    A result of one element is always a new value: in place, NumPy takes three times as long.
    """
    shape, several = leaves.shape, math.prod(leaves.shape) != 1
    taken: set[int] = set()
    ys: list[Value] = []

    def fits(v: Value, k: int, place: int) -> bool:
        if v.shape != shape or v.dtype != leaves.results[k].dtype or id(v.buffer) in taken:
            return False
        return dense(shape, v.strides, v.dtype.itemsize, layout) and _apart(leaves, v, place, may_replace, k)

    for k, r in enumerate(leaves.results):
        found: Value | None = None
        if r.size != math.prod(shape):
            ys.append(site.new(kept, r.dtype, layout, FINITE))
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
