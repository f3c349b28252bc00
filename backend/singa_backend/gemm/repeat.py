"""Machine code that calls functions again and again, on frames some of whose words grow from one turn to the next.

The table has an entry for each function:

    0  its address                          3  the number of words of the frame
    1  the address of its frame             4  the number of words that grow
    2  the address of its first contents    .. for each of these its place in the frame, and by how much it grows
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .frame import Code, FrameFunction, FrameLayout, module

FIELDS = 5
"""The numbers of an entry before the words that grow."""

TURNS = FrameLayout(("count", "calls", "entry"), ("table",))
"""The number of turns, the functions, the bytes of an entry, and the table."""


class RepeatedCall(NamedTuple):
    """A function, and its frame in the first two turns.

    Attributes:
        function: the address of the code.
        first: the frame in the first turn.
        second: that in the second one.
    """

    function: int
    first: np.ndarray
    second: np.ndarray


def table_of(calls: Sequence[RepeatedCall]) -> tuple[np.ndarray, np.ndarray]:
    """The table of functions: the entries, the frames, and their first contents; and the places of what is added in each turn."""
    grown = [np.flatnonzero(c.first != c.second) for c in calls]
    width = FIELDS + max(2 * g.size for g in grown)
    words = sum(c.first.size for c in calls)
    memory = np.zeros(len(calls) * width + 2 * words, np.int64)
    entries, place = memory[: len(calls) * width].reshape(len(calls), width), len(calls) * width
    growth = [i * width + FIELDS + 2 * k + 1 for i, g in enumerate(grown) for k in range(g.size)]
    for entry, call, words_ in zip(entries, calls, grown, strict=True):
        size = call.first.size
        contents = place + words
        memory[contents : contents + size] = call.first
        at, of = (int(memory.ctypes.data) + 8 * p for p in (place, contents))
        entry[:FIELDS] = call.function, at, of, size, words_.size
        pairs = entry[FIELDS : FIELDS + 2 * words_.size].reshape(-1, 2)
        pairs[:, 0], pairs[:, 1] = words_, (call.second - call.first)[words_]
        place += size
    return memory, np.array(growth, np.intp)


def repeat() -> FrameFunction:
    """Calls the functions in order, `count` times."""
    return FrameFunction("repeat", TURNS, lambda name: module(name, TURNS, lambda k, a: "1", _turns))


def _turns(k: Code, a: dict[str, str], i: str) -> None:
    def entry(c: str) -> str:
        return k.at(a["table"], k.times(c, a["entry"]))

    def restore(c: str) -> None:
        e = entry(c)
        frame, contents = (k.raw(f"load ptr, ptr {k.at(e, 8 * j)}") for j in (1, 2))

        def word(w: str) -> None:
            at = k.times(w, 8)
            k.emit(f"store i64 {k.number_at(contents, at)}, ptr {k.at(frame, at)}")

        k.loop(k.number_at(e, 24), 1, word)

    def call(c: str) -> None:
        e = entry(c)
        function, frame = (k.raw(f"load ptr, ptr {k.at(e, 8 * j)}") for j in (0, 1))
        k.emit(f"call void {function}(ptr {frame})")

        def grow(m: str) -> None:
            pair = k.at(e, k.plus(k.times(m, 16), 8 * FIELDS))
            at = k.at(frame, k.times(k.number_at(pair, 0), 8))
            k.emit(f"store i64 {k.plus(k.number_at(at, 0), k.number_at(pair, 8))}, ptr {at}")

        k.loop(k.number_at(e, 32), 1, grow)

    k.loop(a["calls"], 1, restore)
    k.loop(a["count"], 1, lambda t: k.loop(a["calls"], 1, call))
