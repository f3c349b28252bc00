"""Elementwise expressions of arrays of one shape, such as the update of a parameter, in few primitives over blocks in the cache.

A primitive of oneDNN computes `a <op> b` and then further operators on the result, each with another array, a number that may
differ between runs, or a constant.  An expression becomes as few primitives as possible.  What several parts read is computed
once, into an output or a block of temporary memory.  A block passes through all primitives before the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np

from . import onednn as dnn
from .epilogue import BINARY, SWALLOWS
from .lowering import F32, dense_desc, ordered, threads_for
from .onednn import Attributes, MemoryDesc, Primitive
from .table import Site
from .values import NAN, Bound, Value, address_of

BLOCK = 1 << 17
"""The elements of a block: a primitive takes microseconds to start, so that smaller blocks cost more than the cache saves."""

OPERATORS = {n: a for n, a in BINARY.items() if n != "Sum" and n not in SWALLOWS} | {"Sqrt": "sqrt"}
"""The operators of expressions, and their algorithms."""

FACTORS = (2.0**-10, 2.0**10)
"""The range of a constant c for which c x + y is computed as c (x + y / c), in one primitive with what computes y."""


@dataclass(frozen=True)
class Elementwise:
    """A part of an expression.

    Attributes:
        op_type: the operator.
        operands: for each operand a value, or the position of the operation that computes it.
    """

    op_type: str
    operands: tuple[Value | int, ...]


@dataclass(frozen=True)
class Temporary:
    """A block of temporary memory, by its number."""

    number: int


Part = tuple[dnn.Memory, int, int]
"""The memory of a block, the position of its value, and the offset in it."""

Place = Value | Temporary
Step = tuple[str, Place | None, float, float]
"""What follows the first operator: (algorithm, operand, 0, 0), or (algorithm, None, alpha, beta) of a function."""


@dataclass(eq=False)
class Chained:
    """A call of a primitive: the first operator with its operands, the steps that follow, and where the result is."""

    algorithm: str
    a: Place
    b: Place
    steps: list[Step] = field(default_factory=list)
    target: Place | None = None

    def places(self) -> list[tuple[int, Place]]:
        """Its arguments, by number."""
        args = dnn.args
        assert self.target is not None
        more = [(args.post_op(i), step[1]) for i, step in enumerate(self.steps) if step[1] is not None]
        return [(args.SRC, self.a), (args.SRC_1, self.b), (args.DST, self.target), *[(n, p) for n, p in more if p is not None]]


class Expressions:
    """Divides expressions into primitives.

    Args:
        site: the place of the kernel.
        operations: the operations, each after those that it reads.
        results: the positions of those whose results are outputs.
        new: returns the value of an output, by its position.

    Attributes:
        calls: the primitives in order.
        placed: the place of each operation whose result is stored, by position.
        temporaries: the number of blocks of temporary memory.
    """

    def __init__(
        self, site: Site, operations: Sequence[Elementwise], results: Collection[int], new: Callable[[int], Value]
    ) -> None:
        self.site, self.operations = site, operations
        self.calls: list[Chained] = []
        self.placed: dict[int, Place] = {}
        self.temporaries = 0
        self._numbers: dict[float, Value] = {}
        readers = Counter(o for one in operations for o in one.operands if isinstance(o, int))
        for at in range(len(operations)):
            if at in results:
                self._store(at, new(at))
            elif readers[at] > 1:
                self._store(at)

    def _store(self, at: int, target: Place | None = None) -> Place:
        """Add the primitive that computes an operation into a place, by default temporary memory."""
        call = self._call(at)
        if target is None:
            self.temporaries += 1
            target = Temporary(self.temporaries - 1)
        call.target = self.placed[at] = target
        self.calls.append(call)
        return target

    def _call(self, at: int) -> Chained:
        """The primitive that computes an operation, without its target; operands that are no part of it are stored before."""
        one = self.operations[at]
        if one.op_type == "Sqrt":
            (x,) = one.operands
            call = (
                self._call(x)
                if isinstance(x, int) and x not in self.placed
                else Chained("mul", self._place(x), self._number(1.0))
            )
            call.steps.append(("sqrt", None, 0.0, 0.0))
            return call
        a, b = one.operands
        scaled = self._scaled_sum(a, b) if one.op_type == "Add" else None
        if scaled is not None:
            return scaled
        if self._is_open(a):
            other = b if isinstance(b, Value) else self._place(b)
            call = self._call(a)
            call.steps.append(self._step(OPERATORS[one.op_type], other))
            return call
        if self._is_open(b) and one.op_type != "Div":
            call = self._call(b)
            if one.op_type == "Sub":  # a - b is -b + a
                call.steps.append(("linear", None, -1.0, 0.0))
            call.steps.append(self._step("mul" if one.op_type == "Mul" else "add", self._place(a)))
            return call
        first, second = self._place(a), self._place(b)
        if not _is_number(first):
            return Chained(OPERATORS[one.op_type], first, second)
        self.site.require(one.op_type != "Div", "a number is divided by an array")
        call = Chained(OPERATORS[one.op_type], second, first)
        if one.op_type == "Sub":
            call.steps.append(("linear", None, -1.0, 0.0))
        return call

    def _scaled_sum(self, a: Value | int, b: Value | int) -> Chained | None:
        """The call for c x + y with a constant c, an array x and a y that is computed: c (x + y / c)."""
        for product, rest in ((a, b), (b, a)):
            if not self._is_open(product) or not self._is_open(rest):
                continue
            one = self.operations[product]
            for x, c in (one.operands, one.operands[::-1]) if one.op_type == "Mul" else ():
                factor = _constant(c)
                if factor is None or self._is_open(x) or _is_number(self._place(x)):
                    continue
                if FACTORS[0] <= abs(factor) <= FACTORS[1]:
                    call = self._call(rest)
                    call.steps += [
                        ("linear", None, 1 / factor, 0.0), self._step("add", self._place(x)), ("linear", None, factor, 0.0),
                    ]  # fmt: skip
                    return call
        return None

    def _is_open(self, x: Value | int) -> TypeGuard[int]:
        """Whether an operand is computed and not stored."""
        return isinstance(x, int) and x not in self.placed

    def _place(self, x: Value | int) -> Place:
        """Where an operand is; one that is not stored is stored now."""
        if isinstance(x, Value):
            return x
        return self.placed[x] if x in self.placed else self._store(x)

    def _step(self, algorithm: str, other: Place) -> Step:
        """The step that applies an operator to the result so far and another operand."""
        number = _constant(other)
        if number is None or algorithm == "div":
            return (algorithm, other, 0.0, 0.0)
        alpha, beta = (number, 0.0) if algorithm == "mul" else (1.0, number if algorithm == "add" else -number)
        return ("linear", None, alpha, beta)

    def _number(self, number: float) -> Value:
        """A constant in memory."""
        return self._numbers.setdefault(number, self.site.constant(np.array([number], F32)))


def _is_number(x: Place | int) -> bool:
    return isinstance(x, Value) and x.size == 1


def _constant(x: Place | int) -> float | None:
    """The number that an operand is in every run."""
    return float(x.array.reshape(-1)[0]) if isinstance(x, Value) and x.size == 1 and x.constant else None


def _is_repeated(x: Value) -> bool:
    """Whether all elements are one number in memory, such as the gradient of a sum."""
    return all(s == 0 or d == 1 for s, d in zip(x.strides, x.shape, strict=True))


def update(
    site: Site, operations: Sequence[Elementwise], results: Collection[int], replaced: Mapping[int, Value] | None = None
) -> dict[int, Value]:
    """Compute elementwise expressions.

    Args:
        site: the place.
        operations: the operations, each after those that it reads.
        results: the positions of those whose results are outputs.
        replaced: the values that nothing else reads, in whose memory outputs should be, by position.

    Returns:
        The outputs by position.
    """
    site.require(dnn.library() is not None, "there is no oneDNN")
    given = [o for one in operations for o in one.operands if isinstance(o, Value)]
    repeated = {id(v): v.view((1,), (F32.itemsize,)) for v in given if v.size > 1 and _is_repeated(v)}
    arrays = {id(v): v for v in given if v.size != 1 and id(v) not in repeated}
    site.require(all(v.dtype == F32 for v in given), "the values are not of float32")
    shapes = {v.shape for v in arrays.values()}
    site.require(len(shapes) == 1, "the arrays have several shapes")
    (shape,) = shapes
    site.require(0 not in shape, "there are no elements")
    own = {i: v if v.constant and v.contiguous else ordered(site, v, range(v.ndim)) for i, v in arrays.items()}
    site.require(all(v.contiguous for v in own.values()), "an array is not in C order")
    places = {**own, **repeated}

    def placed(o: Value | int) -> Value | int:
        return places.get(id(o), o) if isinstance(o, Value) else o

    moved = [Elementwise(one.op_type, tuple(map(placed, one.operands))) for one in operations]
    inside = {at: v.view(shape, v.strides) for at, v in (replaced or {}).items() if own.get(id(v)) is v}
    made = _expressions(site, moved, results, shape, inside)
    outputs = {at: v for at, v in made.placed.items() if at in results and isinstance(v, Value)}
    _emit(site, made, list(own.values()), list(outputs.values()))
    return outputs


def _expressions(
    site: Site, operations: Sequence[Elementwise], results: Collection[int], shape: tuple[int, ...], inside: dict[int, Value]
) -> Expressions:
    """The primitives, with outputs in the memory of inputs that no later primitive reads."""
    while True:

        def new(at: int) -> Value:
            made = inside.get(at)
            if made is None:
                return site.new(shape, F32, None, NAN)
            made.finiteness, made.low = NAN, False
            return made

        made = Expressions(site, operations, results, new)
        late = set()
        for number, call in enumerate(made.calls):
            read = {
                id(p.buffer)
                for c in made.calls[number + 1 :]
                for n, p in c.places()
                if isinstance(p, Value) and p is not call.target
            }
            late |= {at for at, v in inside.items() if v is call.target and id(v.buffer) in read}
        if not late:
            return made
        for at in late:
            del inside[at]


def _emit(site: Site, made: Expressions, arrays: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Add the step that runs the primitives on block after block."""
    size = outputs[0].size
    count = size if size <= 2 * BLOCK else BLOCK
    starts = range(0, size, count)
    memory = -(-count * F32.itemsize // 64) * 64
    scratch = site.scratch(memory * made.temporaries) if made.temporaries else None
    sizes = {min(count, size - start) for start in starts}
    primitives = {n: [_primitive(call, n) for call in made.calls] for n in sizes}
    numbers = [p for call in made.calls for _, p in call.places() if isinstance(p, Value) and _is_number(p)]
    values = list({id(v): v for v in (*arrays, *numbers, *outputs)}.values())
    held: list[tuple[list[Part], list[tuple[Any, ...]]]] = []
    last: list[tuple[int, ...]] = []

    def bind() -> Bound:
        library = dnn.library()
        assert library is not None
        base = 0 if scratch is None or scratch.memory is None else address_of(scratch.memory)
        places = (*(v.address for v in values), base)
        if not held:
            held.append(_bound(made.calls, primitives, starts, size, values, memory))
        if last != [places]:
            for one, at, offset in held[0][0]:
                one.move(places[at] + offset)
            last[:] = [places]
        return [(library.execute, arguments) for arguments in held[0][1]]

    kernel = f"update {primitives[min(count, size)][0].implementation}"
    site.emit(bind, reads=values[: len(values) - len(outputs)], writes=outputs, kernel=kernel, scratch=scratch)


def _bound(
    calls: Sequence[Chained],
    primitives: dict[int, list[Primitive]],
    starts: range,
    size: int,
    values: Sequence[Value],
    memory: int,
) -> tuple[list[Part], list[tuple[Any, ...]]]:
    """The memories of all blocks, and the arguments of the calls that use them."""
    at = {id(v): i for i, v in enumerate(values)}
    memories: list[Part] = []
    bound = []
    for start in starts:
        count = min(starts.step, size - start)
        known: dict[tuple[int, int], dnn.Memory] = {}
        for call, primitive in zip(calls, primitives[count], strict=True):
            given: dict[int, tuple[MemoryDesc, int] | dnn.Memory] = {}
            for number, p in call.places():
                one = isinstance(p, Value) and p.size == 1
                if isinstance(p, Temporary):
                    key = (len(values), p.number * memory)
                else:
                    key = (at[id(p)], 0 if one else start * F32.itemsize)
                if key not in known:
                    known[key] = dnn.Memory(_described(1 if one else count), 0)
                    memories.append((known[key], *key))
                given[number] = known[key]
            bound.append(dnn.bind(primitive, given).args)
    return memories, bound


def _described(count: int) -> MemoryDesc:
    return dense_desc(F32, (1, count))


def _primitive(call: Chained, count: int) -> Primitive:
    """The primitive of a call for blocks of this number of elements."""
    block, number = _described(count), _described(1)
    attributes = Attributes()
    for algorithm, other, alpha, beta in call.steps:
        if other is None:
            attributes.append_eltwise(algorithm, alpha, beta)
        else:
            attributes.append_binary(algorithm, number if _is_number(other) else block)
    second = number if _is_number(call.b) else block
    with threads_for(count * 8):
        return dnn.binary(block, second, block, algorithm=call.algorithm, attributes=attributes)
