"""The end of a segment: its buffers get their places in an arena, and its steps are bound to them."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import numpy as np

from ...ir.sizes import Formulas, SizeSpace, now, typical
from ...kernels import onednn
from ...kernels.frames import FrameAddress, FrameStep
from ...kernels.onednn import thread_switch, threads_of
from ...kernels.table import Options
from ...kernels.values import ALIGNMENT, Bound, Buffer, OpaqueValue, PlanStep, Value, address_of, aligned
from .. import arena as arenas
from ..caches import GrowingCache
from ..contention import Pace
from ..passed import PASSED, PASSED_STEPS, Replaced, ZeroCopy
from .choose import Chooser
from .exact import ExactCall, OtherSteps
from .frame_table import FrameTable
from .segment import Entry, PlanFacts, Segment

RECENT = 64
"""The number of bindings after which an arena that was more than twice as large as all of them needed is replaced."""


class Placer(Chooser):
    """Completes the segments of a trace."""

    def _finish(self, whole: bool = False) -> None:
        """Give every buffer of the segment its place in an arena, and bind the steps to it.

        Args:
            whole: whether the segment is all of the plan: only then are inputs and outputs passed without a copy.
        """
        segment = self.segment
        for entry in segment.outputs:
            if isinstance(entry, Value):
                entry.buffer.touch(len(segment.steps))
        space = self.space if self.space is not None and self.space.scope.symbols else None
        binder = Binder(
            segment, self.options, self.facts, space, self.entries if whole else None, self.buffers, self.named,
            self.replaced if self.updates is not None else {}, self.updates, self.needs_finite, self.caches, self.begins,
            self.exact, [e for e in (*self.entries, *self.env.values()) if isinstance(e, Value)],
        )  # fmt: skip
        with self.settling():
            most, passed = binder.bind(moves=True)
        for b in (*binder.placed, *(p.value.buffer for p in passed)):
            self.live.pop(id(b), None)
        if self.options.adaptive and most > 1:
            segment.pace = Pace(self.options.threads, time.perf_counter() - self.began, self.single)
        binder.seconds = time.perf_counter() - self.began
        if self.space is not None:
            segment.scope = self.space.scope
            segment.scope.seal(self.facts.largest_fixed)
        if space is not None:
            segment.binder = binder


class Binder:
    """Gives the buffers of a segment their places, and binds its steps to them: once, or for each set of sizes.

    Attributes:
        placed: the buffers that have a place in the arena.
        seconds: the time of the trace.
    """

    def __init__(
        self,
        segment: Segment,
        options: Options,
        facts: PlanFacts,
        space: SizeSpace | None,
        entries: Sequence[Entry] | None,
        buffers: Sequence[Buffer],
        named: Sequence[Value],
        replaced: Mapping[int, Any],
        updates: int | None,
        needs_finite: bool,
        caches: Mapping[int, GrowingCache],
        begins: bool,
        exact: Sequence[ExactCall],
        live: Sequence[Value],
    ) -> None:
        self._segment, self._options, self._facts, self._space = segment, options, facts, space
        self._entries, self._named, self._replaced = entries, named, replaced
        self._updates, self._needs_finite, self._caches = updates, needs_finite, caches
        self._candidates = {} if entries is None else self._passable()
        self._own = [b for b in buffers if b.first >= 0 and not b.pinned]
        self._exact = exact
        self._is_bound = False
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._results: list[Value | Callable[[], Any]] | None = None
        self._seen: list[int] | None = None
        self._loose: list[tuple[int, PlanStep, int, int]] = []
        self._table: FrameTable | None = None
        self._framed: set[int] = set()
        self._slots = None if space is None else arenas.slots(self._own)
        self._numbers = None if space is None else self._formulas(space, begins, live)
        self.placed: list[Buffer] = []
        self.seconds = 0.0

    def _formulas(self, space: SizeSpace, begins: bool, live: Sequence[Value]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """The function that returns what the frames need, the places of the buffers, and the bytes of the arena.

        Args:
            space: the sizes.
            begins: whether the segment is the first of its plan: steps of others use buffers of those before.
            live: the inputs, and what following segments may use.
        """
        formulas = Formulas(space)
        steps = [(s, s.bind) for s in self._segment.steps if begins and isinstance(s.bind, FrameStep)]
        repeated = [p for s in self._segment.steps if begins for turn in getattr(s.bind, "parts", ()) for p in turn]
        places = {id(b): i for i, b in enumerate([*self._own, *(c.value.buffer for c in self._caches.values())])}
        table = self._table = FrameTable([*(bind for _, bind in steps), *repeated], places, self._candidates, formulas)
        framed = {id(s) for s, _ in steps}
        seen = [v for s in self._segment.steps if id(s) not in framed for v in (*s.reads, *s.writes)]
        seen += [e for e in self._segment.outputs if isinstance(e, Value)]
        scratch = [s.scratch for s in self._segment.steps if id(s) not in framed and s.scratch is not None]
        scratch += [b for call in self._exact for b in call.buffers]
        self._framed = framed
        known = {id(b) for b in (*(v.buffer for v in (*seen, *live)), *scratch)}
        self._seen = [i for i, b in enumerate(self._own) if id(b) in known and id(b) not in self._candidates]
        assert self._slots is not None
        sizes: list[list[str]] = [[] for _ in range(self._slots.count)]
        for b, slot in zip(self._own, self._slots.slot, strict=True):
            sizes[slot].append("0" if id(b) in self._candidates else formulas.name(b.nbytes))
        starts, total = [], "0"
        for several in sizes:
            starts.append(total)
            largest = f"max({', '.join(dict.fromkeys(several))})" if len(set(several)) > 1 else several[0]
            total = formulas.line(f"{total} + ({largest} + {ALIGNMENT - 1} & {-ALIGNMENT})")
        return formulas.made([*table.names, *(starts[s] for s in self._slots.slot), total])

    def emit_again(self) -> None:
        """Emit the steps of kernels that see numbers for the present sizes; raises OtherSteps if others are needed."""
        with onednn.using_threads(self._options.threads) if self._exact else nullcontext():  # as in the trace
            for call in self._exact:
                call.emit_again()

    def bind(self, moves: bool = False, most: float = math.inf) -> tuple[int, tuple[ZeroCopy, ...]]:
        """Place the buffers, and bind the steps, for the present sizes.

        Args:
            most: the maximum bytes of the arena; more raise OtherSteps.
            moves: whether the buffers hold values, which move to their places.

        Returns:
            The highest number of threads of a step, and the inputs and outputs that are not copied.
        """
        segment = self._segment
        for v in self._named:
            assert v.buffer.memory is not None
            np.copyto(np.ndarray(v.shape, v.dtype, v.buffer.memory), v.array)
        for p in self._candidates.values() if not moves else ():
            if not isinstance(p, Replaced) or p.value.buffer.memory is None:  # each run binds the steps again, to its array
                p.value.buffer.memory = aligned(now(p.value.buffer.nbytes))
        self._place(moves, most)
        passed: dict[int, ZeroCopy] = {**self._candidates, **self._caches}
        if not self._bind_again(passed):
            segment.flat = []
            self._most = self._bind(passed)
        most = self._most
        segment.passed = tuple(p for p in passed.values() if not isinstance(p, Replaced))
        segment.replaced = tuple(p for p in passed.values() if isinstance(p, Replaced))
        if self._results is None:
            times = Counter(id(e) for e in segment.outputs)
            self._results = [
                partial(_copy, e, times[id(e)] == 1)
                if isinstance(e, OpaqueValue)
                else partial(passed[id(e.buffer)].take, e, times[id(e)] == 1)
                if id(e.buffer) in passed
                else e
                for e in segment.outputs
            ]
        order: Literal["K", "C"] = "K" if self._options.ordered else "C"
        segment.copies = tuple(partial(r.array.copy, order) if isinstance(r, Value) else r for r in self._results)
        if not moves:  # what is usual for other sizes, and their steps on one thread, do not hold
            segment.pace = Pace(self._options.threads, self.seconds) if self._options.adaptive and most > 1 else None
        return most, tuple(passed.values())

    def _place(self, moves: bool, most: float) -> None:
        """Give the buffers their places in an arena, and move what they hold there."""
        segment = self._segment
        used = [b for b in self._own if id(b) not in self._candidates]
        self.placed = used
        if self._numbers is None:
            segment.arena_bytes = arenas.place(used)
            segment.live_bytes = arenas.live_bytes(used)
            segment.arena = aligned(segment.arena_bytes)
            offsets = [b.offset for b in self._own]
        else:
            assert self._space is not None and self._table is not None
            *words, segment.arena_bytes = self._numbers(self._space.values)
            segment.live_bytes = segment.arena_bytes
            if segment.arena_bytes > most:
                raise OtherSteps("the plan needs more memory than the limits permit")
            self._recent.append(segment.arena_bytes)
            size = -1 if segment.arena is None else segment.arena.nbytes
            if size < segment.arena_bytes or (len(self._recent) == RECENT and size > 2 * max(self._recent)):
                for b in () if moves else used:
                    b.memory = None  # nothing keeps the other arena
                segment.arena = None
                needed = segment.arena_bytes if size < segment.arena_bytes else max(self._recent)
                segment.arena = aligned(needed if moves else needed + needed // 4)
            assert segment.arena is not None
            count = len(self._table.names)
            offsets = words[count:]
            table = np.array(words, np.int64)
            caches = np.array([c.address for c in self._caches.values()], np.int64)
            self._table.write(table[:count], np.concatenate((table[count:] + address_of(segment.arena), caches)))
        arena = segment.arena
        if not moves and self._seen is not None:  # the others are in the table only
            for i in self._seen:
                b, offset = self._own[i], offsets[i]
                b.memory = arena[offset : offset + now(b.nbytes)]
            return
        for b, offset in zip(self._own, offsets, strict=True):
            if id(b) in self._candidates:
                continue
            place = arena[offset : offset + now(b.nbytes)]
            if moves and b.memory is not None and b.users > 0:
                np.copyto(place, b.memory)
            b.memory, b.pinned = place, True

    def _bind_again(self, passed: dict[int, ZeroCopy]) -> bool:
        """Bind the steps that are not in the table to other sizes; return whether that is all."""
        if not self._is_bound:
            self._is_bound = self._numbers is not None
            return False
        flat, usual = self._segment.flat, self._options.threads
        for start, step, count, threads in self._loose:  # each run binds those that move, in the same places
            pieces = step.bind()
            if len(pieces) != count or _threads(step, pieces, usual) != threads:  # primitives run on those they were created for
                return False
            if start >= 0:
                flat[start : start + count] = pieces
        return True

    def _bind(self, passed: dict[int, ZeroCopy]) -> int:
        """Bind the steps, each on the threads that it needs; return the highest number of threads."""
        segment, facts = self._segment, self._facts
        facts.parallel |= bool(self._exact)  # of another size some may use several threads
        usual = at = self._options.threads
        most = 1
        self._loose = []
        moving: list[tuple[int, PlanStep, int]] = []
        updating: list[tuple[int, PlanStep, int]] = []
        unchecked = {p for p in passed.values() if facts.finite and p.index >= 0 and p.value.dtype.kind in "fc"}
        for index, step in enumerate(segment.steps):
            if index == self._updates:
                if self._needs_finite:
                    segment.flat += [(p.require_finite, ()) for p in unchecked]
                for p in unchecked:
                    p.checked = self._needs_finite
                unchecked, segment.update = set(), len(segment.flat)
            own = pieces = step.bind()
            needed = _threads(step, pieces, usual)
            facts.parallel |= needed > 0 and step.kernel != "definition"
            most = max(most, needed if step.kernel != "definition" else 1, *(_frame_threads(a) for _, a in pieces))
            if needed not in (0, at):
                pieces, at = [*thread_switch(needed), *pieces], needed
            found = [passed[i] for i in {id(v.buffer) for v in (*step.reads, *step.writes)} if i in passed]
            checked = unchecked.intersection(found)
            unchecked -= checked
            pieces = [*[(p.require_finite, ()) for p in checked], *pieces]
            bound = (len(segment.flat) + len(pieces) - len(own), step, len(own))
            found = [p for p in found if not (p.is_in_table and id(step) in self._framed)]
            moves = not all(isinstance(p, Replaced) for p in found)
            if self._numbers is not None and id(step) not in self._framed:
                self._loose.append((-1 if moves else bound[0], step, len(own), needed))
            if found:
                (moving if moves else updating).append(bound)
            if step is segment.steps[-1] and at != usual:
                pieces = [*pieces, *thread_switch(usual)]
            step.count = len(pieces)
            segment.flat += pieces
        segment.moving, segment.updating = tuple(moving), tuple(updating)
        return most

    def _passable(self) -> dict[int, ZeroCopy]:
        """The large inputs and outputs, which a run need not copy, by buffer."""
        segment, entries = self._segment, self._entries or ()
        touching = Counter(i for s in segment.steps for i in {id(v.buffer) for v in (*s.reads, *s.writes)})
        written = {id(v.buffer) for s in segment.steps for v in s.writes}
        results = Counter(id(e.buffer) for e in segment.outputs if isinstance(e, Value))
        made = {}
        for index, e in enumerate(entries):
            if isinstance(e, Value) and e.dtype.kind in "biufc" and not results[id(e.buffer)] and id(e.buffer) not in written:
                made[id(e.buffer)] = ZeroCopy(e, index)
        made_here = written - {id(e.buffer) for e in entries if isinstance(e, Value)}
        for place, o in enumerate(segment.outputs):
            if not isinstance(o, Value) or o.offset or o.nbytes != o.buffer.nbytes or o.buffer.pinned:
                continue
            if not (o.is_dense if self._options.ordered else o.contiguous):
                continue
            if results[id(o.buffer)] == 1 and id(o.buffer) in made_here:
                made[id(o.buffer)] = ZeroCopy(o, place=place)
        found = {i: p for i, p in made.items() if typical(p.value.nbytes) >= PASSED and touching[i] <= PASSED_STEPS}
        if self._replaced:
            replaced = enumerate(entries)
            found |= {
                id(e.buffer): Replaced(e, n) for n, e in replaced if isinstance(e, Value) and id(e.buffer) in self._replaced
            }
        return found


def _threads(step: PlanStep, pieces: Bound, usual: int) -> int:
    """The number of threads with which a step runs: those for which its primitives were created.

    oneDNN's code for small work asks for the number when it runs; with another one it would wait for idle threads.

    Returns:
        The number; 0 if the step does not use oneDNN, `usual` if that is not known.
    """
    if step.kernel.startswith(("numpy.", "machine.", "copy", "release")):
        return 0
    return max((threads_of(arguments) for _, arguments in pieces), default=0) or usual


def _frame_threads(arguments: tuple[Any, ...]) -> int:
    """The number of threads of machine code, which starts them itself; 1 for any other call."""
    return arguments[0].threads if arguments and isinstance(arguments[0], FrameAddress) else 1


def _copy(entry: OpaqueValue, once: bool) -> Any:
    return entry.value if entry.fresh and once else _copied(entry.value)


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return value.copy() if isinstance(value, (np.ndarray, dict)) else value
