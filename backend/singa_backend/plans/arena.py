"""The arena of a plan: one block of memory, in which buffers that are not live at the same time may share places."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.sizes import now
from ..kernels.values import ALIGNMENT, Buffer

WORK = 60_000
"""The highest number of comparisons of two buffers in a search for places, for up to `WORK // MEAN` buffers."""

MEAN = 16
"""The highest number of comparisons for each buffer of a larger number."""

MOVES = 4
"""How often the search changes an order."""


def rounded(nbytes: int) -> int:
    """The bytes that a buffer occupies."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def live_bytes(buffers: Sequence[Buffer]) -> int:
    """The lower bound of any arena: the highest sum of the sizes of buffers that are live at one step."""
    return _peak(buffers)[0]


def _peak(buffers: Sequence[Buffer]) -> tuple[int, int]:
    """The lower bound, and the first step at which so many bytes are live."""
    changes: dict[int, int] = {}
    for b in buffers:
        nbytes = rounded(now(b.nbytes))
        changes[b.first] = changes.get(b.first, 0) + nbytes
        changes[b.last + 1] = changes.get(b.last + 1, 0) - nbytes
    live = peak = at = 0
    for step in sorted(changes):
        live += changes[step]
        if live > peak:
            peak, at = live, step
    return peak, at


def place(buffers: Sequence[Buffer]) -> int:
    """Set the offset of each buffer so that buffers that are live at the same step do not overlap; return the bytes of all.

    The buffers are placed in the order of their first use.  If that needs more than the lower bound, they are placed again, each
    at the best offset that those before it leave: in the order of size, of size times life, or of distance from the step with the
    most live bytes.  After each attempt the buffers that end above the lower bound come first.  The search ends at the lower
    bound, or after a number of comparisons that is bounded, and for many buffers proportional to their number.
    """
    bound, peak = _peak(buffers)
    best = _by_time(buffers)
    room = max(WORK, MEAN * len(buffers))
    others = _conflicts(buffers, room) if best > bound else None
    if others is None:
        return best
    attempt = len(buffers) + sum(map(len, others))
    sizes = [rounded(b.nbytes) for b in buffers]
    spans = [s * (b.last - b.first + 1) for b, s in zip(buffers, sizes, strict=True)]
    near = [-max(b.first - peak, peak - b.last, 0) for b in buffers]
    for value in (sizes, spans, near):
        order = sorted(range(len(buffers)), key=lambda i: (-value[i], -sizes[i], buffers[i].first))
        for _ in range(1 + MOVES):
            if best == bound or room < attempt:
                return best
            room -= attempt
            total, offsets = _placed(order, sizes, others)
            if total < best:
                best = total
                for b, offset in zip(buffers, offsets, strict=True):
                    b.offset = offset
            order.sort(key=lambda i: offsets[i] + sizes[i] <= bound)
    return best


@dataclass(frozen=True)
class Slots:
    """Which buffers share a place, whatever their sizes are: none of a slot are live at the same step.

    Attributes:
        slot: that of each buffer.
        count: the number of slots.
    """

    slot: Sequence[int]
    count: int


def slots(buffers: Sequence[Buffer]) -> Slots:
    """Let buffers share places: each takes the free slot whose present size is nearest to its own."""
    slot = [0] * len(buffers)
    sizes: list[int] = []
    ends: list[int] = []
    for i in sorted(range(len(buffers)), key=lambda i: (buffers[i].first, -now(buffers[i].nbytes))):
        b = buffers[i]
        size = now(b.nbytes)
        free = [s for s in range(len(sizes)) if ends[s] < b.first]
        if free:
            best = min(free, key=lambda s: (abs(sizes[s] - size), s))
        else:
            best = len(sizes)
            sizes.append(0)
            ends.append(0)
        slot[i], sizes[best], ends[best] = best, max(sizes[best], size), b.last
    return Slots(slot, len(sizes))


def _conflicts(buffers: Sequence[Buffer], most: int) -> list[list[int]] | None:
    """For each buffer the positions of those that are live at a step of its life; None if they are more than `most` in all."""
    made: list[list[int]] = [[] for _ in buffers]
    live: list[int] = []
    count = len(buffers)
    for i in sorted(range(len(buffers)), key=lambda i: buffers[i].first):
        first = buffers[i].first
        live = [n for n in live if buffers[n].last >= first]
        count += 2 * len(live)
        if count > most:
            return None
        for n in live:
            made[n].append(i)
        made[i] += live
        live.append(i)
    return made


def _placed(order: Sequence[int], sizes: Sequence[int], others: Sequence[Sequence[int]]) -> tuple[int, list[int]]:
    """Place each buffer in the smallest gap that holds it, or above all that are live with it; return bytes and offsets."""
    offsets = [-1] * len(sizes)
    total = 0
    for i in order:
        size = sizes[i]
        best, smallest, free = -1, 0, 0
        for start, end in sorted([(offsets[n], offsets[n] + sizes[n]) for n in others[i] if offsets[n] >= 0]):
            gap = start - free
            if gap >= size and (best < 0 or gap < smallest):
                best, smallest = free, gap
            if end > free:
                free = end
        offsets[i] = free if best < 0 else best
        total = max(total, offsets[i] + size)
    return total, offsets


def _by_time(buffers: Sequence[Buffer]) -> int:
    """Place buffers in the order of their first use, each in the smallest free block that holds it; return the bytes of all."""
    ends: dict[int, int] = {}  # of the free blocks, by start
    starts: dict[int, int] = {}  # by end
    by_size: list[tuple[int, int]] = []  # (size, start), sorted
    active: list[tuple[int, int, int]] = []  # (last, start, end), a heap
    top = 0

    def add(start: int, end: int) -> None:
        ends[start], starts[end] = end, start
        insort(by_size, (end - start, start))

    def take(start: int) -> int:
        end = ends.pop(start)
        del starts[end], by_size[bisect_left(by_size, (end - start, start))]
        return end

    for b in sorted(buffers, key=lambda b: (b.first, -b.nbytes)):
        while active and active[0][0] < b.first:
            _, start, end = heapq.heappop(active)
            if start in starts:
                start = starts[start]
                take(start)
            add(start, take(end) if end in ends else end)
        size = rounded(b.nbytes)
        fit = bisect_left(by_size, (size, 0))
        if fit < len(by_size):
            start = by_size[fit][1]
            end = take(start)
            if end > start + size:
                add(start + size, end)
        elif top in starts:  # extend the last block
            start = starts[top]
            take(start)
            top = start + size
        else:
            start, top = top, top + size
        b.offset = start
        heapq.heappush(active, (b.last, start, start + size))
    return top
