"""The arena of a plan: one block of memory, in which buffers that are not live at the same time may share places."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ..kernels.values import ALIGNMENT, Buffer

FEW = 2048
"""Up to this number of buffers the largest is placed first; more are placed in the order of their first use."""


def rounded(nbytes: int) -> int:
    """The bytes that a buffer occupies."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def live_bytes(buffers: Sequence[Buffer]) -> int:
    """The lower bound of any arena: the highest sum of the sizes of buffers that are live at one step."""
    changes: dict[int, int] = {}
    for b in buffers:
        changes[b.first] = changes.get(b.first, 0) + rounded(b.nbytes)
        changes[b.last + 1] = changes.get(b.last + 1, 0) - rounded(b.nbytes)
    live = peak = 0
    for step in sorted(changes):
        live += changes[step]
        peak = max(peak, live)
    return peak


def place(buffers: Sequence[Buffer]) -> int:
    """Set the offset of each buffer so that buffers that are live at the same step do not overlap; return the bytes of all."""
    return _by_size(buffers) if len(buffers) <= FEW else _by_time(buffers)


def _by_size(buffers: Sequence[Buffer]) -> int:
    """Place the largest buffer first, each at the lowest offset that is free during its life."""
    order = sorted(buffers, key=lambda b: (-b.nbytes, b.first))
    count = len(order)
    firsts, lasts, starts, ends = (np.empty(count, np.int64) for _ in range(4))
    total = 0
    for n, b in enumerate(order):
        size = rounded(b.nbytes)
        alive = np.flatnonzero((firsts[:n] <= b.last) & (lasts[:n] >= b.first))
        alive = alive[np.argsort(starts[alive], kind="stable")]
        best, least, free = -1, -1, 0
        for start, end in zip(starts[alive].tolist(), ends[alive].tolist(), strict=True):
            gap = start - free
            if gap >= size and (least < 0 or gap < least):
                best, least = free, gap
            free = max(free, end)
        b.offset = free if best < 0 else best
        firsts[n], lasts[n], starts[n], ends[n] = b.first, b.last, b.offset, b.offset + size
        total = max(total, b.offset + size)
    return total


def _by_time(buffers: Sequence[Buffer]) -> int:
    """Place buffers in the order of their first use, each in the smallest free block that holds it."""
    free: list[tuple[int, int]] = []  # (offset, size), sorted
    active: list[tuple[int, int, int]] = []  # (last, offset, size)
    top = 0
    for b in sorted(buffers, key=lambda b: (b.first, -b.nbytes)):
        while active and active[0][0] < b.first:
            _, offset, size = heapq.heappop(active)
            free = _joined(free, offset, size)
        size = rounded(b.nbytes)
        fits = [(s, o) for o, s in free if s >= size]
        if fits:
            there, offset = min(fits)
            free.remove((offset, there))
            if there > size:
                free = sorted([*free, (offset + size, there - size)])
        elif free and free[-1][0] + free[-1][1] == top:  # extend the last block
            offset, _ = free.pop()
            top = offset + size
        else:
            offset, top = top, top + size
        b.offset = offset
        heapq.heappush(active, (b.last, offset, size))
    return top


def _joined(free: list[tuple[int, int]], offset: int, size: int) -> list[tuple[int, int]]:
    made: list[tuple[int, int]] = []
    for o, s in sorted([*free, (offset, size)]):
        if made and made[-1][0] + made[-1][1] == o:
            made[-1] = (made[-1][0], made[-1][1] + s)
        else:
            made.append((o, s))
    return made
