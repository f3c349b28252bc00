"""Finds the repeated blocks of a graph: consecutive nodes whose structure occurs several times, such as the layers of a network.

Nodes have labels (operator, attributes, types of weights).  A block of p nodes repeats where the labels equal those p nodes
earlier.  Blocks are the same if, besides their labels, the same nodes read each other's values.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

LONGEST = 4000
"""The number of nodes of a block at most, so that the search remains quick in graphs of many nodes."""


@dataclass(frozen=True)
class Repeat:
    """Blocks of the same structure that follow each other.

    Attributes:
        blocks: their nodes, by position, and the repeats within them.
    """

    blocks: tuple[tuple[int | Repeat, ...], ...]

    def nodes(self) -> list[int]:
        """The positions of all nodes."""
        return [n for block in self.blocks for n in members(block)]


Items = Sequence["int | Repeat"]


def members(items: Items) -> list[int]:
    """The positions of the nodes of these items, including those within repeats."""
    return [n for item in items for n in ([item] if isinstance(item, int) else item.nodes())]


def fold(labels: Sequence[Hashable], sources: Sequence[Sequence[int]], names: Sequence[str]) -> list[int | Repeat]:
    """Find the repeated blocks of a sequence of nodes.

    Args:
        labels: of the nodes; nodes of different labels are never at the same place of a block.
        sources: the positions of the nodes that each node reads, input by input; -1 for other inputs.
        names: of the nodes: blocks begin where scopes such as "/layer.1/" do, if the structure permits it.

    Returns:
        Every position once, alone or in a repeat, in order.
    """
    known: dict[Hashable, int] = {}
    codes = np.array([known.setdefault(label, len(known)) for label in labels], np.int64)
    last = list(range(len(labels)))
    for reader, producers in enumerate(sources):
        for p in producers:
            if p >= 0:
                last[p] = max(last[p], reader)
    crossing = np.zeros(len(labels) + 2, np.int64)
    for p, reader in enumerate(last):
        if reader > p:
            crossing[p + 1] += 1
            crossing[reader + 1] -= 1
    folder = _Folder(codes, sources, [scope(n) for n in names], np.cumsum(crossing))
    return folder.fold(0, len(labels))


def scope(name: str) -> tuple[str, ...]:
    """The parts of a name such as "/encoder/layer.0/MatMul"."""
    return tuple(filter(None, re.split(r"[/.:]", name)))


def common(scopes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The parts with which all of these names begin."""
    low, high = min(scopes), max(scopes)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:same]


def scoped(items: Items, names: Sequence[str]) -> list[int | Repeat]:
    """Fold the remaining nodes whose scope is that of a block of a repeat with another number, such as "/layer.4/".

    Args:
        items: the result of `fold`.
        names: of the nodes.

    Returns:
        The items; such a block that differs from the others is a repeat of one block.
    """
    scopes = [scope(n) for n in names]
    patterns = {
        _pattern(common([scopes[n][:-1] for n in members(block)]))
        for item in items
        if isinstance(item, Repeat)
        for block in item.blocks
    }
    lengths = sorted({len(p) for p in patterns if "#" in p}, reverse=True)
    found: list[int | Repeat] = []
    for key, run in groupby(items, lambda i: _block_of(scopes[i][:-1], patterns, lengths) if isinstance(i, int) else None):
        part = list(run)
        found += [Repeat((tuple(part),))] if key and len(part) >= 4 else part
    return found


def _pattern(parts: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("#" if p.isdigit() else p for p in parts)


def _block_of(parts: tuple[str, ...], patterns: set[tuple[str, ...]], lengths: Sequence[int]) -> tuple[str, ...]:
    return next((parts[:n] for n in lengths if _pattern(parts[:n]) in patterns), ())


class _Folder:
    def __init__(
        self, codes: np.ndarray, sources: Sequence[Sequence[int]], scopes: list[tuple[str, ...]], crossing: np.ndarray
    ) -> None:
        self.codes, self.sources, self.scopes, self.crossing = codes, sources, scopes, crossing

    def fold(self, start: int, stop: int, within: int = 0) -> list[int | Repeat]:
        """Fold the nodes from `start` to `stop`; blocks are shorter than `within`, if it is not 0."""
        waiting = [(-_saved(b - a, p), p, a, b) for p, a, b in self._runs(start, stop, within)]
        heapq.heapify(waiting)
        taken: dict[int, tuple[int, Repeat]] = {}
        free = np.ones(stop - start, bool)
        while waiting:
            _, p, a, b = heapq.heappop(waiting)
            rest = free[a - start : b - start]
            if not rest.all():
                for i, j in _stretches(rest):
                    if _worthy(j - i, p):
                        heapq.heappush(waiting, (-_saved(j - i, p), p, a + i, a + j))
                continue
            begin = self._begin(p, a, b)
            for first, count in self._same(p, begin, (b - begin) // p):
                if _worthy(count * p, p):
                    taken[first] = (first + count * p, Repeat(self._blocks(first, p, count)))
                    free[first - start : first + count * p - start] = False
        found: list[int | Repeat] = []
        at = start
        while at < stop:
            if at in taken:
                at, repeat = taken[at]
                found.append(repeat)
            else:
                found.append(at)
                at += 1
        return found

    def _runs(self, start: int, stop: int, within: int) -> list[tuple[int, int, int]]:
        """(p, from, to) of the stretches in which every label equals the one p nodes earlier."""
        codes = self.codes[start:stop]
        found = []
        for p in range(1, min((within or len(codes)) - 1, len(codes) // 2, LONGEST) + 1):
            for i, j in _stretches(codes[:-p] == codes[p:], p):
                if _worthy(j - i + p, p):
                    found.append((p, start + i, start + j + p))
        return found

    def _begin(self, p: int, a: int, b: int) -> int:
        """Where the first block begins: where scopes of names begin, then with most blocks, then where few values cross."""

        def cost(at: int) -> tuple[float, int, int, int]:
            count = (b - at) // p
            cuts = [at + k * p for k in range(count + 1)]
            depth = sum(len(common(self.scopes[i:j])) for i, j in pairwise(cuts))
            return -depth / count, -count, int(self.crossing[cuts].sum()), at

        return min(map(cost, range(a, min(a + p, b - 2 * p + 1))))[3] if p * (b - a) <= 1 << 20 else a

    def _same(self, p: int, begin: int, count: int) -> list[tuple[int, int]]:
        """The (first node, number of blocks) of blocks that follow each other and have the same edges within."""
        edges = [
            [tuple(s - at if at <= s < at + p else -1 for s in self.sources[at + i]) for i in range(p)]
            for at in range(begin, begin + count * p, p)
        ]
        found, first = [], 0
        for k in range(1, count + 1):
            if k == count or edges[k] != edges[k - 1]:
                found.append((begin + first * p, k - first))
                first = k
        return found

    def _blocks(self, first: int, p: int, count: int) -> tuple[tuple[int | Repeat, ...], ...]:
        inner = self.fold(first, first + p, p)
        return tuple(tuple(moved(item, k * p) for item in inner) for k in range(count))


def moved(item: int | Repeat, by: int) -> int | Repeat:
    """An item whose positions are increased."""
    if isinstance(item, int):
        return item + by
    return Repeat(tuple(tuple(moved(i, by) for i in block) for block in item.blocks))


def _stretches(flags: np.ndarray, shortest: int = 1) -> list[tuple[int, int]]:
    """The (from, to) of the stretches that are true and not shorter than `shortest`."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(np.int8), [0])))).reshape(-1, 2)
    return [(i, j) for i, j in edges[edges[:, 1] - edges[:, 0] >= shortest].tolist()]


def _saved(length: int, p: int) -> int:
    """The number of nodes that are not shown if blocks of p nodes are shown once."""
    return (length // p - 1) * p


def _worthy(length: int, p: int) -> bool:
    """Whether a picture becomes clearer: a few nodes are read faster than a folded block."""
    count = length // p
    return _saved(length, p) >= 6 and count >= (2 if p >= 5 else 3 if p > 1 else 8)
