"""Layout of a drawn graph: layers from top to bottom, few crossings, straight lines; no dependencies.

The steps are those of Sugiyama, Tagawa and Toda: layers by longest path, order within layers by barycenters, then positions
as near to the neighbors as the widths allow (least squares under a fixed order: pooling of adjacent violators).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LAYER = 78.0
"""Distance between layers in pixels."""
GAP = 22.0
"""Minimum distance between the vertices of a layer in pixels."""
FAR = 24
"""An edge across more layers than this is not routed: the page draws its two ends."""


@dataclass
class Layout:
    """Positions of vertices and edges.

    Attributes:
        x: the x of the middle of each vertex.
        layer: of each vertex.
        routes: for each (source, target) its x in every layer that it crosses, None if it is not routed.
        width: of the drawing.
        layers: the number of layers.
    """

    x: list[float]
    layer: list[int]
    routes: dict[tuple[int, int], list[float] | None]
    width: float
    layers: int


def layered(widths: Sequence[float], edges: Sequence[tuple[int, int]], sinks: frozenset[int] = frozenset()) -> Layout:
    """Lay out vertices of these widths; edges that would close a cycle are drawn and otherwise ignored.

    Args:
        widths: of the vertices.
        edges: (source, target) pairs.
        sinks: vertices without successors that are drawn below their predecessors (a graph's outputs).
    """
    count = len(widths)
    pairs = list(dict.fromkeys(e for e in edges if e[0] != e[1]))
    layer = _layers(count, pairs, sinks)
    forward = [(a, b) for a, b in pairs if layer[a] < layer[b]]
    chains, owner, spans = _bends(count, forward, layer)
    total = count + len(owner)
    place = layer + [at for _, at in owner]
    wide = [*widths, *[6.0] * len(owner)]
    up: list[list[int]] = [[] for _ in range(total)]
    down: list[list[int]] = [[] for _ in range(total)]
    for a, b in spans:
        down[a].append(b)
        up[b].append(a)
    rows: list[list[int]] = [[] for _ in range(max(place, default=-1) + 1)]
    for v in range(total):
        rows[place[v]].append(v)
    _order(rows, up, down)
    x = _places(rows, up, down, wide, count)
    _straighten(x, place)
    left = min((x[v] - wide[v] / 2 for v in range(total)), default=0.0)
    x = [round(value - left, 1) for value in x]
    routes: dict[tuple[int, int], list[float] | None] = dict.fromkeys(pairs)
    for a, b in forward:
        if layer[b] - layer[a] <= FAR:
            routes[a, b] = [x[v] for v in chains.get(a, [])[: layer[b] - layer[a] - 1]]
    width = max((x[v] + wide[v] / 2 for v in range(total)), default=0.0)
    return Layout(x[:count], layer, routes, width, len(rows))


def _layers(count: int, edges: Sequence[tuple[int, int]], sinks: frozenset[int]) -> list[int]:
    """The layer of each vertex: the longest path from a source; vertices that only later layers read move down to them."""
    down: list[list[int]] = [[] for _ in range(count)]
    up: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        down[a].append(b)
        up[b].append(a)
    waiting = [len(u) for u in up]
    ready = [v for v in range(count) if not waiting[v]]
    order: list[int] = []
    layer = [0] * count
    seen = [False] * count
    while len(order) < count:
        if not ready:  # a cycle: enter it at its first vertex
            ready.append(next(v for v in range(count) if not seen[v]))
        v = ready.pop()
        if seen[v]:
            continue
        seen[v] = True
        order.append(v)
        for b in down[v]:
            if not seen[b]:
                layer[b] = max(layer[b], layer[v] + 1)
                waiting[b] -= 1
                if not waiting[b]:
                    ready.append(b)
    for v in reversed(order):
        below = [layer[b] for b in down[v] if layer[b] > layer[v]]
        if below and len(up[v]) <= len(set(below)):  # moving down lengthens no more edges than it shortens
            layer[v] = min(below) - 1
    first = min(layer, default=0)
    for v in sinks:
        layer[v] = max((layer[a] + 1 for a in up[v]), default=layer[v])
    return [at - first for at in layer]


def _bends(
    count: int, edges: Sequence[tuple[int, int]], layer: list[int]
) -> tuple[dict[int, list[int]], list[tuple[int, int]], list[tuple[int, int]]]:
    """Create a bend in every layer that an edge crosses, shared by all edges of one source.

    Returns the bends of each source from top to bottom, (source, layer) of each bend, and the edges between adjacent layers.
    """
    reach: dict[int, int] = {}
    for a, b in edges:
        if layer[b] - layer[a] <= FAR:
            reach[a] = max(reach.get(a, 0), layer[b] - layer[a])
    chains: dict[int, list[int]] = {}
    owner: list[tuple[int, int]] = []
    spans: list[tuple[int, int]] = []
    for a, length in reach.items():
        chain = []
        for step in range(1, length):
            chain.append(count + len(owner))
            owner.append((a, layer[a] + step))
        chains[a] = chain
        spans += list(zip([a, *chain], chain, strict=False))
    for a, b in edges:
        length = layer[b] - layer[a]
        if length <= FAR:
            spans.append((chains[a][length - 2] if length > 1 else a, b))
    return chains, owner, spans


def _order(rows: list[list[int]], up: list[list[int]], down: list[list[int]]) -> None:
    """Sort each row by the mean position of its neighbors, several times down and up."""
    at: dict[int, float] = {}
    for row in rows:
        at.update((v, i) for i, v in enumerate(row))
    for sweep in range(6):
        near = up if sweep % 2 == 0 else down
        for row in rows if sweep % 2 == 0 else reversed(rows):
            for v in row:
                if near[v]:
                    at[v] = sum(at[u] for u in near[v]) / len(near[v])
            row.sort(key=at.__getitem__)
            at.update((v, i) for i, v in enumerate(row))


def _places(rows: list[list[int]], up: list[list[int]], down: list[list[int]], wide: list[float], count: int) -> list[float]:
    """Place vertices as near to their neighbors as order and widths allow; bends weigh more, so that lines are straight."""
    x = [0.0] * len(wide)
    for row in rows:
        edge = -sum(wide[v] + GAP for v in row) / 2
        for v in row:
            x[v] = edge + wide[v] / 2
            edge += wide[v] + GAP

    def pull(u: int, v: int) -> float:
        """The weight of a neighbor: a source (such as a constant) moves to its reader, not the reader to the source."""
        return 0.02 if not up[u] and u in up[v] else 1.0

    for sweep in range(10):
        near = (up, down)[sweep % 2] if sweep < 8 else None
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wish, weight = [], []
            for v in row:
                around = near[v] if near is not None else up[v] + down[v]
                pulls = [pull(u, v) for u in around]
                wish.append(sum(p * x[u] for p, u in zip(pulls, around, strict=True)) / sum(pulls) if around else x[v])
                bends = sum(u >= count for u in around) + (v >= count)
                weight.append(0.2 if not around else 1.0 + 3.0 * bends / len(around))
            for v, value in zip(row, _separated(wish, weight, [wide[v] for v in row]), strict=True):
                x[v] = value
    return x


def _straighten(x: list[float], place: list[int]) -> None:
    """Remove the slope that many small steps to one side add up to in a tall graph."""
    n = len(x)
    if n < 2:
        return
    mid, middle = sum(place) / n, sum(x) / n
    spread = sum((p - mid) ** 2 for p in place)
    slope = sum((p - mid) * (v - middle) for p, v in zip(place, x, strict=True)) / spread if spread else 0.0
    for v in range(n):
        x[v] -= slope * place[v]


def _separated(wish: list[float], weight: list[float], wide: list[float]) -> list[float]:
    """The positions nearest to the wishes (weighted least squares) that keep the order and the gaps."""
    shift, shifts = 0.0, []
    for i in range(len(wish)):
        shift += (wide[i - 1] + wide[i]) / 2 + GAP if i else 0.0
        shifts.append(shift)
    blocks: list[tuple[float, float, int]] = []  # mean, weight, size
    for w, k, s in zip(wish, weight, shifts, strict=True):
        mean, heavy, size = w - s, k, 1
        while blocks and blocks[-1][0] > mean:
            m, h, n = blocks.pop()
            mean, heavy, size = (mean * heavy + m * h) / (heavy + h), heavy + h, size + n
        blocks.append((mean, heavy, size))
    flat = [mean for mean, _, size in blocks for _ in range(size)]
    return [m + s for m, s in zip(flat, shifts, strict=True)]
