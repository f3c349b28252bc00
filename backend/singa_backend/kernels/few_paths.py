"""Forests for few rows, where calls cost more than tests: three forms of tables, and a choice by their cost.

`Lists`: Python follows each path.
`Switches`: all nodes of all trees are tested at once, and then each level is one `take`; for one row.
`Heaps`: complete trees of three levels, which a path passes in one stage.

Paths are numbered tree by tree.  The state of a path is the number of a node or of a heap.  At a leaf it is the place of the leaf
minus the number of places, which is negative: the `take` that follows wraps it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .forests import Forest

_PATHS = 1 << 11
"""The number of paths, one for each tree and row, up to which these tables are used for several rows."""

_LISTED = 1 << 12
"""The number of places up to which they are in lists, which are faster than views of arrays and need more memory."""

_LARGE = 1 << 14
"""The number of places from which there is one form of tables only."""

_WAITING = 0.7
"""The share of the trees that go on below which those that have ended are left out."""


@dataclass(eq=False, repr=False)
class Lists:
    """The nodes of a forest as sequences of Python's numbers: lists, or views of arrays if they are many.

    Attributes:
        feature: of each place; -1 at a leaf.
        threshold: of each place.
        failed: the place after a false test.
        passed: the place after a true one.
        low: whether a NaN passes the test; None if it passes none.
    """

    feature: Sequence[int]
    threshold: Sequence[float]
    failed: Sequence[int]
    passed: Sequence[int]
    low: Sequence[bool] | None


@dataclass(eq=False)
class Switches:
    """The nodes of a forest, feature by feature.

    Attributes:
        order: the trees, the deepest first.
        active: for each level the number of trees that have inner nodes there.
        counts: the number of nodes that test each feature, int64.
        threshold: of each node.
        failed: the state after a false test, int64.
        passed: the state after a true one, int64.
        roots: the state at each root, int64.
        places: the number of places of the forest.
    """

    order: np.ndarray
    active: tuple[int, ...]
    counts: np.ndarray
    threshold: np.ndarray
    failed: np.ndarray
    passed: np.ndarray
    roots: np.ndarray
    places: int


@dataclass(eq=False)
class Heaps:
    """The nodes of a forest in complete trees of three levels, which a path passes in one stage.

    Such a tree has seven tests in the order of a heap, and eight exits.  Row k of the tables has tree k.  Row 0 has tests that no
    number passes, for paths that are at a leaf already.

    Attributes:
        order: the trees, the deepest first.
        active: for each stage the number of trees whose paths may not be at a leaf before it.
        root: the feature and the threshold of each root, if they are not in the trees: after the test of root k a path begins in
            tree 2 k + 1 or 2 k + 2.
        feature: int64 [trees + 1, 8].
        threshold: [trees + 1, 8].
        exits: int64: at e (trees + 1) + k the state after exit e of tree k, the number of the next tree or a leaf; then the state
            at each place, for leaves.
        offsets: int64: e (trees + 1) for the results of the seven tests, one bit each.
    """

    order: np.ndarray
    active: tuple[int, ...]
    root: tuple[np.ndarray, np.ndarray] | None
    feature: np.ndarray
    threshold: np.ndarray
    exits: np.ndarray
    offsets: np.ndarray


Form = Lists | Switches | Heaps

_EXITS = np.zeros(256, np.int64)
"""The exit for the results of the seven tests."""

for _bits in range(256):
    _node = 0
    for _ in range(3):
        _node = 2 * _node + 1 + (_bits >> _node & 1)
    _EXITS[_bits] = _node - 7

_WORD, _NUMBER = np.dtype("<u8"), np.dtype("<i8")
"""Eight bytes, of which the first is the lowest one on every machine."""

_PACK = np.array(0x0102040810204080, np.uint64)
"""Its product with eight truth values, one a byte of a `_WORD`, has them as bits 56 to 63."""

_TOP = np.array(56, np.uint64)


def form_of(held: Forest, rows: int, features: int) -> type[Form] | None:
    """The form that is the fastest for so many rows; None if they are too many.

    The figures are microseconds: those of a call, of an element, and of a step of a loop, measured on x86-64.
    """
    paths, levels, places = held.trees * rows, len(held.active), len(held.threshold)
    if (rows > 1 and paths > _PATHS) or (held.groups is not None and not held.finite):
        return None
    if rows > 1 and places > _LARGE and form_of(held, 1, features) is not Heaps:
        return None
    costs: dict[type[Form], float] = {Heaps: 0.4 + max(1, levels / 3) * (1.5 + 0.0065 * paths + (0.3 if rows > 1 else 0))}
    if rows == 1:
        nodes = places if held.pairs else places // 2
        costs[Switches] = 0.8 + 0.00057 * nodes + 0.001 * features + levels * (0.12 + 0.0005 * paths)
    costs[Lists] = 0.2 + rows * 0.008 * features + paths * (0.1 + (0.05 if places <= _LISTED else 0.15) * levels)
    return min(costs, key=lambda form: costs[form])


def tables_of(form: type[Form], held: Forest, features: int) -> Form:
    """Arrange the nodes of a forest."""
    places = np.arange(len(held.threshold))[:, None]
    both = held.child.reshape(-1, 2) if held.pairs else held.child[:, None] + np.array([0, 1])
    inner = both[:, 0] != places[:, 0]  # a leaf is its own child; an inner node may have a threshold that no number passes
    if held.pairs:
        inner |= both[:, 1] != places[:, 0]
    both = np.where(inner[:, None], both, places)
    if form is Lists:
        return _lists(held, both, inner, features)
    if form is Switches:
        return _switches(held, both, inner, features)
    return _heaps(held, both, inner)


def _lists(held: Forest, both: np.ndarray, inner: np.ndarray, features: int) -> Lists:
    feature = np.where(inner, held.feature % features, -1).astype(np.int32)
    failed, passed = both.astype(np.int32).T
    low = held.feature >= features if held.copies else None
    columns: list[Any] = [feature, held.threshold, failed.copy(), passed.copy()]
    f, t, no, yes = (memoryview(a) if len(inner) > _LISTED else a.tolist() for a in columns)
    return Lists(f, t, no, yes, low if low is None else low.tolist())


def _ordered(held: Forest, both: np.ndarray, inner: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """The trees, the deepest first, and for each level the number of those that have inner nodes there."""
    if held.groups is None:
        return np.arange(held.trees), held.active
    depths = np.zeros(held.trees, np.int64)
    tree = front = np.arange(held.trees)
    while len(front):
        tree, front = tree[inner[front]], front[inner[front]]
        depths[np.unique(tree)] += 1
        tree, front = np.repeat(tree, 2), both[front].reshape(-1)
    return np.argsort(-depths, kind="stable"), tuple(int((depths > n).sum()) for n in range(len(held.active)))


def _switches(held: Forest, both: np.ndarray, inner: np.ndarray, features: int) -> Switches:
    order, active = _ordered(held, both, inner)
    places = len(inner)
    nodes = np.flatnonzero(inner)
    nodes = nodes[np.argsort(held.feature[nodes], kind="stable")]
    state = np.arange(-places, 0)
    state[nodes] = np.arange(len(nodes))
    counts = np.bincount(held.feature[nodes], minlength=features * (1 + held.copies))
    failed, passed = state[both[nodes]].T
    return Switches(order, active, counts, held.threshold[nodes], failed.copy(), passed.copy(), state[order], places)


def _heaps(held: Forest, both: np.ndarray, inner: np.ndarray) -> Heaps:
    order, active = _ordered(held, both, inner)
    places, levels = len(inner), len(active)
    alone = levels > 3 and levels % 3 == 1  # then three levels fewer are empty
    front = both[order].reshape(-1) if alone else order
    heaps, ends, total = [], [], 1
    number = np.full(places, -1)  # of the tree that begins at a place
    while total == 1 or len(front):
        number[front] = total + np.arange(len(front))
        level = front[:, None]
        tests = []
        for _ in range(3):
            tests.append(level)
            level = both[level].reshape(len(front), -1)
        heaps.append(np.concatenate(tests, axis=1))
        ends.append(level)
        total += len(front)
        front = np.unique(level[inner[level]])
        front = front[number[front] < 0]
    heap, end = np.concatenate(heaps), np.concatenate(ends)
    feature, threshold = np.zeros((total, 8), np.int64), np.full((total, 8), np.nan, held.threshold.dtype)
    feature[1:, :7], threshold[1:, :7] = np.where(inner[heap], held.feature[heap], 0), held.threshold[heap]
    exits = np.zeros(8 * total + places, np.int64)
    exits[: 8 * total].reshape(8, total)[:, 1:] = np.where(inner[end], number[end], end - places).T
    exits[8 * total :] = np.arange(-places, 0)
    stages = (held.trees, *active[3 + alone :: 3])
    root = (np.where(inner[order], held.feature[order], 0), held.threshold[order]) if alone else None
    return Heaps(order, stages, root, feature, threshold, exits, _EXITS * total)


# --- the calls of a run; x has the rows of features one after the other, and `place` has room for the state of each path


def calls_of(tables: Form, held: Forest, x: np.ndarray, place: np.ndarray, m: dict[str, np.ndarray]) -> list[Any]:
    """The calls that follow all paths to their leaves.

    Args:
        tables: the tables.
        held: the forest.
        x: the features, [rows, features], with the second copy if the forest has it and the tables are not lists.
        place: receives the states, int64 [trees, rows]; trees in the order of the tables.
        m: the arrays of `constants_of` and `room_of` by name.
    """
    if isinstance(tables, Lists):
        return [(_follow if tables.low is None else _follow_low, (tables, x, held.trees, place.reshape(-1)))]
    if isinstance(tables, Switches):
        return _switch(tables, x, place.reshape(-1), m)
    return _through(tables, x, place.reshape(-1), m)


def _follow(tables: Lists, x: np.ndarray, trees: int, place: np.ndarray) -> None:
    """Follow each path."""
    feature, threshold, failed, passed = tables.feature, tables.threshold, tables.failed, tables.passed
    rows, path = len(x), 0
    for start, row in enumerate(x.tolist()):
        path = start
        for node in range(trees):
            f = feature[node]
            while f >= 0:
                node = passed[node] if row[f] <= threshold[node] else failed[node]
                f = feature[node]
            place[path] = node
            path += rows


def _follow_low(tables: Lists, x: np.ndarray, trees: int, place: np.ndarray) -> None:
    """Follow each path, in trees where a NaN may pass a test."""
    feature, threshold, failed, passed, low = tables.feature, tables.threshold, tables.failed, tables.passed, tables.low
    assert low is not None
    rows = len(x)
    for start, row in enumerate(x.tolist()):
        path = start
        for node in range(trees):
            f = feature[node]
            while f >= 0:
                v = row[f]
                node = passed[node] if v <= threshold[node] or (v != v and low[node]) else failed[node]
                f = feature[node]
            place[path] = node
            path += rows


def constants_of(tables: Form, rows: int, width: int) -> dict[str, np.ndarray]:
    """What the calls need besides the tables, made once for a plan; `width` is the number of features, with the second copy."""
    if isinstance(tables, Lists):
        return {}
    trees = len(tables.order)
    if isinstance(tables, Switches):
        state = np.concatenate([tables.failed, np.arange(-tables.places, 0)])
        return {"state": state, "passes": np.empty(len(tables.failed), bool), "levels": np.empty((2, trees), np.int64)}
    steps = np.tile(np.arange(rows) * width, trees)
    made = {"steps": np.repeat(steps[:, None], 8, axis=1)} if rows > 1 else {}
    if tables.root is not None:
        feature, threshold = (np.repeat(a, rows) for a in tables.root)
        child = np.repeat(np.arange(1, 2 * trees, 2), rows)
        return made | {"first": child, "at": feature + steps, "limit": threshold, "which": np.zeros(trees * rows, _NUMBER)}
    feature, threshold = (np.repeat(a[1 : trees + 1], rows, axis=0) for a in (tables.feature, tables.threshold))
    return made | {"first": np.repeat(np.arange(1, trees + 1), rows), "at": feature + steps[:, None], "limit": threshold}


def _switch(tables: Switches, x: np.ndarray, place: np.ndarray, m: dict[str, np.ndarray]) -> list[Any]:
    """The calls of one row."""
    state, room = m["state"], m["levels"]
    now = state[: len(tables.failed)]
    calls: list[Any] = [
        (np.copyto, (now, tables.failed)),
        (_test, (x.reshape(-1), tables.counts, tables.threshold, m["passes"], now, tables.passed)),
    ]
    before, count = tables.roots, len(place)
    for level, active in enumerate(tables.active):
        if active < _WAITING * count:
            calls.append((np.copyto, (place[active:count], before[active:count])))
            before, count = before[:active], active
        after = place[:count] if level == len(tables.active) - 1 else room[level % 2, :count]
        calls.append((state.take, (before, None, after, "wrap")))
        before = after
    if not tables.active:
        calls.append((np.copyto, (place, before)))
    return calls


def _test(
    x: np.ndarray, counts: np.ndarray, threshold: np.ndarray, passes: np.ndarray, state: np.ndarray, passed: np.ndarray
) -> None:
    """Test all nodes, and set the states after those that pass."""
    np.less_equal(x.repeat(counts), threshold, passes)
    np.putmask(state, passes, passed)


def room_of(held: Forest, rows: int) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """The shapes and dtypes of what Heaps need."""
    paths, whole, dtype = held.trees * rows, np.dtype(np.int64), held.threshold.dtype
    return {
        "feature": ((paths, 8), whole), "value": ((paths, 8), dtype), "threshold": ((paths, 8), dtype),
        "passed": ((paths, 8), np.dtype(bool)), "bits": ((paths,), np.dtype(np.uint64)), "top": ((paths,), np.dtype(np.uint64)),
    }  # fmt: skip


def _through(tables: Heaps, x: np.ndarray, place: np.ndarray, m: dict[str, np.ndarray]) -> list[Any]:
    """The stages."""
    rows, flat, steps = len(x), x.reshape(-1), m.get("steps")
    calls: list[Any] = []
    if tables.root is not None:
        v, which = m["value"].reshape(-1)[: len(place)], m["which"]
        calls += [
            (flat.take, (m["at"], None, v, "wrap")),
            (np.less_equal, (v, m["limit"], which.view(bool)[::8])),  # the lowest byte of each
            (np.add, (m["first"], which, place)),
        ]
    for stage, active in enumerate(tables.active):
        n = active * rows
        f, v, t, p, bits, top = (m[name][:n] for name in ("feature", "value", "threshold", "passed", "bits", "top"))
        now = place[:n]
        if not stage and tables.root is None:
            now, f, t = m["first"], m["at"], m["limit"]
        else:
            calls += [(tables.feature.take, (now, 0, f, "clip")), (tables.threshold.take, (now, 0, t, "clip"))]
            if steps is not None:
                calls.append((np.add, (f, steps[:n], f)))
        offset, at = bits.view(np.int64), top.view(np.int64)
        calls += [
            (flat.take, (f, None, v, "wrap")),
            (np.less_equal, (v, t, p)),
            (np.multiply, (p.view(_WORD).reshape(-1), _PACK, bits)),
            (np.right_shift, (bits, _TOP, top)),
            (tables.offsets.take, (at, None, offset, "wrap")),
            (np.add, (now, offset, at)),
            (tables.exits.take, (at, None, place[:n], "wrap")),
        ]
    return calls
