"""The frame of machine code for products: numbers and addresses that it is called with, and the work that threads claim.

A function takes the address of an array of int64:

    0  a counter, for the function's own use      3  the units that a thread claims at a time
    1  the number of threads                      4  the numbers, in the order in which the function names them
    2  the address of GOMP_parallel, or 0         .. the addresses

Threads claim units until none is left; no result depends on which thread computes what.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from ..elementwise.builder import LANES, METADATA, Builder, Vector
from ..elementwise.compile import Compiled, compiled
from ..elementwise.machine_code import ENTRY

FIELDS = 4
"""The values in a frame before the numbers."""


@dataclass(frozen=True)
class FrameLayout:
    """The names of what a function is called with.

    Attributes:
        numbers: those of sizes and distances.
        pointers: those of addresses.
    """

    numbers: tuple[str, ...]
    pointers: tuple[str, ...]


@dataclass(frozen=True)
class FrameFunction:
    """A function.

    Attributes:
        what: differs if the texts differ.
        layout: what it is called with.
        text: returns its module in LLVM's language, for a name.
    """

    what: str
    layout: FrameLayout
    text: Callable[[str], str]

    def compiled(self) -> Compiled:
        """The machine code, which is made if it is missed; raises NotCompiled if there is none."""
        return compiled(f"{_emitter()} {self.what}", "product", partial(self.text, "product"))


@cache
def _emitter() -> str:
    """The digest of the modules that decide on code besides those of elementwise expressions."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()


class Code(Builder):
    """The text of a function, with what products need of memory and of scalars."""

    def times(self, a: str, b: str | int) -> str:
        """The product of two numbers."""
        return self.raw(f"mul i64 {a}, {b}")

    def plus(self, a: str, b: str | int) -> str:
        """The sum of two numbers."""
        return self.raw(f"add i64 {a}, {b}")

    def minus(self, a: str, b: str | int) -> str:
        """The difference of two numbers."""
        return self.raw(f"sub i64 {a}, {b}")

    def divided(self, a: str, b: str | int) -> tuple[str, str]:
        """The quotient of two numbers that are not negative, and the remainder."""
        return self.raw(f"udiv i64 {a}, {b}"), self.raw(f"urem i64 {a}, {b}")

    def moved(self, number: str, inner: str, steps: tuple[str, str]) -> str:
        """The bytes to a place along two axes, of which the inner one has this size."""
        outer, rest = self.divided(number, inner)
        return self.plus(self.times(outer, steps[0]), self.times(rest, steps[1]))

    def most(self, a: str, b: str | int) -> str:
        """The higher of two numbers."""
        return self.raw(f"select i1 {self.raw(f'icmp sgt i64 {a}, {b}')}, i64 {a}, i64 {b}")

    def least(self, a: str, b: str | int) -> str:
        """The lower of two numbers."""
        return self.raw(f"select i1 {self.raw(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")

    def at(self, pointer: str, offset: str | int) -> str:
        """An address some bytes after another one."""
        return self.raw(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def number_at(self, pointer: str, offset: str | int) -> str:
        """The int64 some bytes after an address."""
        return self.raw(f"load i64, ptr {self.at(pointer, offset)}")

    def of(self, kind: str, pointer: str, align: int = 1) -> Vector:
        """The vector of a type at an address."""
        return self.made(f"load <{LANES} x {kind}>, ptr {pointer}, align {align}", kind)

    def write(self, x: Vector, pointer: str, align: int = 4) -> None:
        """Write a vector to an address."""
        self.emit(f"store <{LANES} x {x.type}> {x.name}, ptr {pointer}, align {align}")

    def everywhere(self, kind: str, pointer: str) -> Vector:
        """The number at an address, in every lane."""
        return self.splat(self.raw(f"load {kind}, ptr {pointer}, align 4"), kind)

    def split(self, x: Vector, lanes: int) -> list[str]:
        """The parts of a vector that have so many lanes."""
        full, found = f"<{LANES} x {x.type}>", []
        for first in range(0, LANES, lanes):
            numbers = ", ".join(f"i32 {first + i}" for i in range(lanes))
            found.append(self.raw(f"shufflevector {full} {x.name}, {full} poison, <{lanes} x i32> <{numbers}>"))
        return found

    def joined(self, parts: list[str], kind: str) -> Vector:
        """The vector whose parts are given."""
        while len(parts) > 1:
            lanes = LANES // len(parts)
            numbers, full = ", ".join(f"i32 {i}" for i in range(2 * lanes)), f"<{lanes} x {kind}>"
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [self.raw(f"shufflevector {full} {a}, {full} {b}, <{2 * lanes} x i32> <{numbers}>") for a, b in pairs]
        return Vector(self, parts[0], kind)

    def move(self, source: str, target: str, count: str, size: int) -> None:
        """Copy the first elements of a vector; none if there are none."""
        x = self.of(f"i{8 * size}", source)
        self.store(x, target, np.dtype(f"i{size}"), self.first(count))

    def repeat(self, condition: Callable[[], str], body: Callable[[], None]) -> None:
        """Run a body as long as a condition is true."""
        label = f"W{self.number()}"
        self.emit(f"br label %{label}")
        self.lines.append(f"{label}:")
        self.emit(f"br i1 {condition()}, label %{label}b, label %{label}e")
        self.lines.append(f"{label}b:")
        body()
        self.emit(f"br label %{label}")
        self.lines.append(f"{label}e:")

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Run what follows if a condition is true."""
        label = f"I{self.number()}"
        self.emit(f"br i1 {condition}, label %{label}b, label %{label}e")
        self.lines.append(f"{label}b:")
        yield
        self.emit(f"br label %{label}e")
        self.lines.append(f"{label}e:")


class LinesText:
    """Numbers along two axes, of which the inner one has a size: they are walked without a division for each.

    Args:
        k: the text.
        first: the first number.
        end: the number after the last one.
        inner: the size.
    """

    def __init__(self, k: Code, first: str, end: str, inner: str) -> None:
        self._k, self._first, self._end, self._inner = k, first, end, inner
        self._line, self._stop = (k.divided(n, inner)[0] for n in (first, k.minus(k.plus(end, inner), 1)))

    def loop(self, body: Callable[[str], Callable[[str, str], None]]) -> None:
        """Run a body for each place of the outer axis, and what it returns for each number and its place along the inner one."""
        k = self._k

        def line(i: str) -> None:
            start, each = k.times(i, self._inner), body(i)
            stop = k.least(self._end, k.plus(start, self._inner))
            k.loop(stop, 1, lambda n: each(n, k.minus(n, start)), k.most(self._first, start))

        k.loop(self._stop, 1, line, self._line)


def module(
    name: str,
    layout: FrameLayout,
    units: Callable[[Code, dict[str, str]], str],
    unit: Callable[[Code, dict[str, str], str], None],
) -> str:
    """The module of a function.

    Args:
        name: of the function.
        layout: what it is called with.
        units: writes what computes the number of units from the arguments, by name.
        unit: writes the computation of a unit.
    """
    k = Code()
    arguments: dict[str, str] = {}
    for i, n in enumerate((*layout.numbers, *layout.pointers)):
        place = k.raw(f"getelementptr i64, ptr %frame, i64 {FIELDS + i}")
        arguments[n] = k.raw(f"load {'i64' if n in layout.numbers else 'ptr'}, ptr {place}")
    chunk, whole = k.raw(f"load i64, ptr {k.at('%frame', 24)}"), units(k, arguments)
    k.emit("br label %claim")
    k.lines.append("claim:")
    start = k.times(k.raw("atomicrmw add ptr %frame, i64 1 monotonic"), chunk)
    k.emit(f"br i1 {k.raw(f'icmp slt i64 {start}, {whole}')}, label %part, label %done")
    k.lines.append("part:")
    k.loop(k.least(k.plus(start, chunk), whole), 1, lambda i: unit(k, arguments, i), start)
    k.emit("br label %claim")
    k.lines.append("done:")
    work = k.function(f"internal void @{name}.work(ptr %frame) noinline nounwind")
    return work + ENTRY.format(name=name) + "\n".join(sorted(k.declared)) + METADATA
