"""The frames of a segment's machine code in one table, which is written at once for each set of sizes."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np

from ...ir.sizes import Formulas, Late
from ...kernels.frames import FrameStep, regions
from ...kernels.values import Buffer, Value, address_of


class FrameTable:
    """The frames of steps, and what is written to them.

    A word is a number, or the address of a buffer plus a number.  Only those that differ between sets of sizes are written again.

    Args:
        steps: the steps.
        places: the number of each buffer of the arena, by its id; other buffers stay where they are.
        passed: the ids of buffers that are elsewhere in each run.
        formulas: receives the numbers.

    Attributes:
        names: the variables whose values `write` needs, in order.
    """

    def __init__(self, steps: Sequence[FrameStep], places: Mapping[int, int], passed: Container[int], formulas: Formulas) -> None:
        self.names: list[str] = []
        self._known: dict[str, int] = {}
        self._places, self._passed, self._formulas = places, passed, formulas
        self._words: list[tuple[int, int]] = []
        self._addresses: list[tuple[int, int, int]] = []
        inner = {id(one): (s, one) for s in steps for one in s.inner}
        self.memory = np.zeros(sum(s.frames.size for s in steps) + sum(one.frame.size for _, one in inner.values()), np.int64)
        at = 0
        for s, one in inner.values():
            row = self.memory[at : at + one.frame.size]
            row[...] = one.frame.array
            one.frame.buffer.memory = row.view(np.uint8)
            self._add(s, at + one.start, one.numbers, one.values)
            at += row.size
        for s in steps:
            rows, width = self.memory[at : at + s.frames.size].reshape(2, -1), s.frames.shape[1]
            s.move(rows)
            if not isinstance(s.threads, int):
                self._word(at + 1, Late(_count, [s.threads]))
                self._word(at + 2, Late(_region, [s.threads]))
            offsets: list[Any] = [0]
            for length in s.lengths[:-1]:
                offsets.append(Late(_sum, [offsets[-1], length]))
            for start in (at, at + width):
                self._add(s, start + 3, s.numbers, s.values)
                if s.scratch is not None:
                    for n, offset in enumerate(offsets[: len(s.lengths)]):
                        self._address(start + s.start + len(s.values) + n, s.scratch, offset)
            s.is_written = True
            at += s.frames.size
        self._where = np.array([w for w, _ in self._words], np.intp)
        self._what = np.array([w for _, w in self._words], np.intp)
        self._pointers, self._of, self._by = (np.array([a[i] for a in self._addresses], np.intp) for i in range(3))

    def write(self, values: np.ndarray, bases: np.ndarray) -> None:
        """Write the words for values of `names` and the addresses of the buffers of the arena."""
        self.memory[self._where] = values[self._what]
        self.memory[self._pointers] = bases[self._of] + values[self._by]

    def _add(self, step: FrameStep, start: int, numbers: Sequence[Any], values: Sequence[Value]) -> None:
        for i, n in enumerate(numbers):
            if isinstance(n, int):
                self.memory[start + i] = n
            else:
                self._word(start + i, n)
        for i, v in enumerate(values, start + len(numbers)):
            if id(v.buffer) in self._passed:
                step.moved.append((self.memory[i : i + 1], v))
            else:
                self._address(i, v.buffer, v.offset)

    def _word(self, at: int, n: Any) -> None:
        self._words.append((at, self._value(n)))

    def _address(self, at: int, buffer: Buffer, offset: Any) -> None:
        place = self._places.get(id(buffer))
        if place is not None:
            self._addresses.append((at, place, self._value(offset)))
        else:
            assert buffer.memory is not None
            self.memory[at] = address_of(buffer.memory) + int(offset)

    def _value(self, n: Any) -> int:
        """The place of a number in `names`."""
        name = self._formulas.name(n)
        if name not in self._known:
            self._known[name] = len(self.names)
            self.names.append(name)
        return self._known[name]


def _count(threads: int) -> int:
    return regions(threads)[0]


def _region(threads: int) -> int:
    return regions(threads)[1]


def _sum(a: int, b: int) -> int:
    return a + b
