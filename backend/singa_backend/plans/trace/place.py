"""The end of a segment: its buffers get their places in an arena, and its steps are bound to them."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from typing import Any

import numpy as np

from ...kernels.frames import FrameAddress
from ...kernels.onednn import thread_switch, threads_of
from ...kernels.values import Bound, OpaqueValue, PlanStep, Value, aligned
from .. import arena as arenas
from ..contention import Pace
from ..open.caches import PASSED, PASSED_STEPS, Replaced, ZeroCopy
from .open import Opener
from .segment import Appended


class Placer(Opener):
    """Completes the segments of a trace."""

    def _finish(self, whole: bool = False) -> None:
        """Give every buffer of the segment its place in an arena, and bind the steps to it.

        Args:
            whole: whether the segment is all of the plan: only then are inputs and outputs passed without a copy.
        """
        segment = self.segment
        passed = self._passed() if whole else {}
        if self.history is not None:
            self.history.passed = tuple(passed.values())
        self.history = self.history if whole else None
        for entry in segment.outputs:
            if isinstance(entry, Value):
                entry.buffer.touch(len(segment.steps))
        self._place(passed)
        most = self._bind(passed)
        segment.passed = tuple(p for p in passed.values() if not isinstance(p, Replaced))
        segment.replaced = tuple(p for p in passed.values() if isinstance(p, Replaced))
        if self.options.adaptive and most > 1:
            segment.pace = Pace(self.options.threads, time.perf_counter() - self.began, self.single)
        times = Counter(id(e) for e in segment.outputs)
        segment.copies = tuple(
            partial(_copy, e, times[id(e)] == 1)
            if isinstance(e, OpaqueValue)
            else partial(passed[id(e.buffer)].take, times[id(e)] == 1)
            if id(e.buffer) in passed
            else partial(e.array.copy, "K" if self.options.ordered else "C")
            for e in segment.outputs
        )

    def _place(self, passed: dict[int, ZeroCopy]) -> None:
        """Give the buffers their places in an arena, and move what they hold there."""
        segment = self.segment
        used = [b for b in self.buffers if b.first >= 0 and not b.pinned and id(b) not in passed]
        segment.arena_bytes = arenas.place(used)
        segment.live_bytes = arenas.live_bytes(used)
        segment.arena = aligned(segment.arena_bytes)
        for i in passed:
            self.live.pop(i, None)
        for b in used:
            place = segment.arena[b.offset : b.offset + b.nbytes]
            if b.memory is not None and b.users > 0:
                np.copyto(place, b.memory)
            b.memory, b.pinned = place, True
            self.live.pop(id(b), None)

    def _bind(self, passed: dict[int, ZeroCopy]) -> int:
        """Bind the steps, each on the threads that it needs; return the highest number of threads."""
        segment = self.segment
        usual = at = self.options.threads
        most = 1
        moving: list[tuple[int, PlanStep, int]] = []
        updating: list[tuple[int, PlanStep, int]] = []
        unchecked = {p for p in passed.values() if self.facts.finite and p.index >= 0 and p.value.dtype.kind in "fc"}
        for index, step in enumerate(segment.steps):
            if index == self.updates:
                if self.needs_finite:
                    segment.flat += [(p.require_finite, ()) for p in unchecked]
                for p in unchecked:
                    p.checked = self.needs_finite
                unchecked, segment.update = set(), len(segment.flat)
            own = pieces = step.bind()
            needed = _threads(step, pieces, usual)
            self.facts.parallel |= needed > 0 and step.kernel != "definition"
            most = max(most, needed if step.kernel != "definition" else 1, *(_frame_threads(a) for _, a in pieces))
            if needed not in (0, at):
                pieces, at = [*thread_switch(needed), *pieces], needed
            found = [passed[i] for i in {id(v.buffer) for v in (*step.reads, *step.writes)} if i in passed]
            checked = [p for p in found if p in unchecked]
            unchecked.difference_update(checked)
            pieces = [*[(p.require_finite, ()) for p in checked], *pieces]
            if found:
                bound = (len(segment.flat) + len(pieces) - len(own), step, len(own))
                (updating if all(isinstance(p, Replaced) for p in found) else moving).append(bound)
            if step is segment.steps[-1] and at != usual:
                pieces = [*pieces, *thread_switch(usual)]
            step.count = len(pieces)
            segment.flat += pieces
        segment.moving, segment.updating = tuple(moving), tuple(updating)
        return most

    def _passed(self) -> dict[int, ZeroCopy]:
        """The large inputs and outputs which a run need not copy, by buffer; in an open plan, those of the earlier plan."""
        segment = self.segment
        if self.earlier is not None:
            entries = [*self.entries, *segment.outputs]
            return {id(p.value.buffer): p for p in self.earlier.passed if any(e is p.value for e in entries)}
        touching = Counter(i for s in segment.steps for i in {id(v.buffer) for v in (*s.reads, *s.writes)})
        written = {id(v.buffer) for s in segment.steps for v in s.writes}
        results = Counter(id(e.buffer) for e in segment.outputs if isinstance(e, Value))
        made = {}
        for index, e in enumerate(self.entries):
            if isinstance(e, Value) and e.dtype.kind in "biufc" and not results[id(e.buffer)] and id(e.buffer) not in written:
                made[id(e.buffer)] = ZeroCopy(e, index)
        made_here = written - {id(e.buffer) for e in self.entries if isinstance(e, Value)}
        for place, o in enumerate(segment.outputs):
            if not isinstance(o, Value) or o.offset or o.nbytes != o.buffer.nbytes or o.buffer.pinned:
                continue
            if not (o.is_dense if self.options.ordered else o.contiguous):
                continue
            if results[id(o.buffer)] == 1 and id(o.buffer) in made_here:
                made[id(o.buffer)] = ZeroCopy(o, place=place)
        found = {i: p for i, p in made.items() if p.value.nbytes >= PASSED and touching[i] <= PASSED_STEPS}
        if self.replaced:
            replaced = enumerate(self.entries)
            found |= {id(e.buffer): Replaced(e, n) for n, e in replaced if isinstance(e, Value) and id(e.buffer) in self.replaced}
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
    return entry.value if isinstance(entry, Appended) or (entry.fresh and once) else _copied(entry.value)


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return value.copy() if isinstance(value, (np.ndarray, dict)) else value
