"""Ensembles of decision trees in flat tables: each inner node tests `x <= threshold`, and its children are next to each other.

The other tests are written with this one.  With t' the number before t, x < t is x <= t', and x == t is x <= t without x <= t';
`>=`, `>` and `!=` exchange the children; a set of values is a search tree.  A NaN takes the child of a false test.  A node whose
NaN takes the other child reads a second copy of the features, in which negative infinities replace the NaNs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .table import Refused

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
"""The tests by their numbers in TreeEnsemble; a leaf has none."""

_VOTES = 1 << 25
"""The number of votes, those of inner nodes included, from which they are left to the definition."""

_DEEPEST = 1 << 12
"""The depth from which trees are left to the definition."""

_LEQ, _LT, _GTE, _GT, _EQ, _NEQ, _MEMBER, _LEAF = range(len(MODES))


@dataclass(eq=False)
class ReadTrees:
    """The nodes of an ensemble as its attributes have them.

    Attributes:
        roots: the node of each root.
        mode: the number of each node's test.
        feature: the feature that it tests.
        value: its threshold, in the dtype of the attribute.
        true: the child if the test is true.
        false: the child otherwise.
        missing: whether a NaN takes the child `true`.
        at: the leaf of each vote.
        target: the target of each vote.
        weight: the weight of each vote.
        members: the values of each node that tests a set, by node.
    """

    roots: np.ndarray
    mode: np.ndarray
    feature: np.ndarray
    value: np.ndarray
    true: np.ndarray
    false: np.ndarray
    missing: np.ndarray
    at: np.ndarray
    target: np.ndarray
    weight: np.ndarray
    members: dict[int, np.ndarray]


def _require(condition: Any, reason: str) -> None:
    if not condition:
        raise Refused(reason)


def numbers(attributes: Mapping[str, Any], name: str) -> np.ndarray | None:
    """The values of an attribute of floats, or of the tensor that may replace it."""
    tensor = attributes.get(f"{name}_as_tensor")
    if tensor is not None:
        return np.asarray(tensor).reshape(-1)
    return np.array(attributes[name], np.float32) if attributes.get(name) else None


def values_of(attributes: Mapping[str, Any]) -> np.dtype[Any]:
    """The dtype of the thresholds of an ensemble."""
    tensor = attributes.get("nodes_values_as_tensor", attributes.get("nodes_splits"))
    return np.dtype(np.float32) if tensor is None or tensor.dtype.itemsize < 4 else tensor.dtype


def named_trees(attributes: Mapping[str, Any], kind: str) -> ReadTrees:
    """Read a TreeEnsembleClassifier ("class") or TreeEnsembleRegressor ("target"): ids of tree and node name a node."""
    modes = attributes.get("nodes_modes") or ()
    count = len(modes)
    _require(count, "there are no nodes")
    kinds = {name: i for i, name in enumerate(MODES) if i != _MEMBER}
    _require(kinds.keys() >= set(modes), "a mode is unknown")
    mode = np.array([kinds[m] for m in modes])

    def ints(name: str) -> np.ndarray:
        given = np.array(attributes.get(name) or (0,) * count, np.int64)
        _require(len(given) == count, f"{name} has another length than nodes_modes")
        return given

    ids, tree = np.unique(ints("nodes_treeids"), return_inverse=True)
    names = ints("nodes_nodeids")
    low, span = int(names.min()), int(names.max()) - int(names.min()) + 1
    keys = tree * span + (names - low)
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    _require((np.diff(ordered) > 0).all(), "two nodes of a tree have the same id")

    def find(trees: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        _require(((wanted >= low) & (wanted < low + span)).all(), "an id is of no node of the tree")
        key = trees * span + (wanted - low)
        place = np.minimum(np.searchsorted(ordered, key), count - 1)
        _require((ordered[place] == key).all(), "an id is of no node of the tree")
        found: np.ndarray = order[place]
        return found

    inner = mode != _LEAF
    true, false = np.arange(count), np.arange(count)
    true[inner] = find(tree[inner], ints("nodes_truenodeids")[inner])
    false[inner] = find(tree[inner], ints("nodes_falsenodeids")[inner])
    child = np.zeros(count, bool)
    child[true[inner]] = child[false[inner]] = True
    roots = np.flatnonzero(~child)
    first = np.full(len(ids), -1)
    first[tree[roots][::-1]] = roots[::-1]
    _require((first >= 0).all(), "a tree has no root")
    value, weight = numbers(attributes, "nodes_values"), numbers(attributes, f"{kind}_weights")
    value = np.zeros(count, np.float32) if value is None else value
    weight = np.zeros(0) if weight is None else weight
    votes = [np.array(attributes.get(f"{kind}_{name}") or (), np.int64) for name in ("treeids", "nodeids", "ids")]
    _require(len(value) == count and {len(v) for v in votes} == {len(weight)}, "lengths of attributes differ")
    place = np.minimum(np.searchsorted(ids, votes[0]), len(ids) - 1)
    _require((ids[place] == votes[0]).all(), "a vote is of no tree")
    missing = ints("nodes_missing_value_tracks_true") != 0
    at = find(place, votes[1])
    return ReadTrees(first, mode, ints("nodes_featureids"), value, true, false, missing, at, votes[2], weight, {})


def numbered_trees(attributes: Mapping[str, Any]) -> ReadTrees:
    """Read a TreeEnsemble: nodes are named by their indices, and leaf i is node i after the inner ones."""
    features = np.array(attributes["nodes_featureids"], np.int64)
    targets = np.array(attributes["leaf_targetids"], np.int64)
    inner, leaves = len(features), len(targets)
    mode = np.asarray(attributes["nodes_modes"]).reshape(-1).astype(np.int64)
    value, weight = (_wide(attributes[n]) for n in ("nodes_splits", "leaf_weights"))
    missing = np.array(attributes.get("nodes_missing_value_tracks_true") or (0,) * inner, np.int64) != 0
    ways: list[np.ndarray] = []
    for branch in ("true", "false"):
        to, ends = (np.array(attributes[f"nodes_{branch}{what}"], np.int64) for what in ("nodeids", "leafs"))
        _require(len(to) == len(ends) == inner, "lengths of attributes differ")
        _require(((to >= 0) & (to < np.where(ends != 0, leaves, inner))).all(), "a child does not exist")
        ways.append(np.concatenate([to + inner * (ends != 0), np.arange(inner, inner + leaves)]))
    lengths = {len(mode), len(value), len(missing)}
    _require(lengths == {inner} and len(weight) == leaves, "lengths of attributes differ")
    _require(((mode >= 0) & (mode <= _MEMBER)).all(), "a mode is unknown")
    roots = np.array(attributes["tree_roots"], np.int64)
    _require(((roots >= 0) & (roots < inner)).all(), "a root does not exist")
    members = _members(np.flatnonzero(mode == _MEMBER), attributes.get("membership_values"))
    pad = (0, leaves)
    kinds = np.concatenate([mode, np.full(leaves, _LEAF)])
    true, false = ways
    own = np.arange(inner, inner + leaves)
    features, value, missing = (np.pad(a, pad) for a in (features, value, missing))
    return ReadTrees(roots, kinds, features, value, true, false, missing, own, targets, weight, members)


def _wide(array: Any) -> np.ndarray:
    flat = np.asarray(array).reshape(-1)
    return flat.astype(np.float32) if flat.dtype.itemsize < 4 else flat


def _members(nodes: np.ndarray, values: Any) -> dict[int, np.ndarray]:
    """The values of each set; a NaN ends a set."""
    flat = np.zeros(0, np.float32) if values is None else _wide(values)
    ends = np.flatnonzero(np.isnan(flat))
    _require(len(ends) == len(nodes) and (not len(flat) or (len(ends) and ends[-1] == len(flat) - 1)), "the sets do not fit")
    parts = np.split(flat, ends + 1)[: len(nodes)]
    return {int(n): np.unique(p[:-1]) for n, p in zip(nodes, parts, strict=True)}


class _NodeWriter:
    """Writes the tests of nodes with `x <= threshold` only; node n + i is the i-th that was added to n nodes."""

    def __init__(self, trees: ReadTrees, dtype: np.dtype[Any]) -> None:
        value = trees.value.astype(dtype)
        inner = trees.mode != _LEAF
        compared = inner & (trees.mode != _MEMBER)
        _require(not np.isnan(value[compared]).any(), "a threshold is NaN")
        before = np.nextafter(value, dtype.type(-np.inf))
        strict = np.isin(trees.mode, (_LT, _GTE))
        _require(not np.isneginf(value[compared & strict]).any(), "a threshold is a negative infinity")
        self.threshold = np.where(strict, before, value)
        self.threshold[~inner] = np.nan  # no number passes the test, so that a leaf has one child, itself
        exchanged = np.isin(trees.mode, (_GTE, _GT))
        self.passed = np.where(exchanged, trees.false, trees.true)
        self.failed = np.where(exchanged, trees.true, trees.false)
        self.low = inner & np.where(exchanged, ~trees.missing, trees.missing)  # whether a NaN passes the test
        self.feature = np.where(inner, trees.feature, 0)
        self.inner = inner.copy()
        self.dtype = dtype
        self.added: list[tuple[Any, int, int, int, bool]] = []  # threshold, passed, failed, feature, low
        self.first = len(inner)
        for node in np.flatnonzero(np.isin(trees.mode, (_EQ, _NEQ))).tolist():
            if trees.mode[node] == _EQ:
                self._equal(node, value[node], int(trees.true[node]), int(trees.false[node]), bool(trees.missing[node]))
            else:
                self._equal(node, value[node], int(trees.false[node]), int(trees.true[node]), not trees.missing[node])
        for node, values in trees.members.items():
            self._member(node, values.astype(dtype), trees)
        if self.added:
            rows = list(zip(*self.added, strict=True))
            self.threshold = np.concatenate([self.threshold, np.array(rows[0], dtype)])
            self.passed, self.failed, self.feature = (
                np.concatenate([old, np.array(new, np.int64)])
                for old, new in zip((self.passed, self.failed, self.feature), rows[1:4], strict=True)
            )
            self.low = np.concatenate([self.low, np.array(rows[4], bool)])
            self.inner = np.concatenate([self.inner, np.ones(len(self.added), bool)])

    def _add(self, threshold: Any, passed: int, failed: int, feature: int, low: bool) -> int:
        self.added.append((threshold, passed, failed, feature, low))
        return self.first + len(self.added) - 1

    def _below(self, value: Any) -> Any:
        """The number before a value; NaN, which no number passes, if there is none."""
        return self.dtype.type(np.nan) if np.isneginf(value) else np.nextafter(value, self.dtype.type(-np.inf))

    def _equal(self, node: int, value: Any, equal: int, other: int, missing: bool) -> None:
        """Let a node test equality; `missing`: whether a NaN takes the child `equal`."""
        feature = int(self.feature[node])
        self.threshold[node], self.low[node], self.failed[node] = value, missing, other
        self.passed[node] = self._add(self._below(value), other, equal, feature, False)

    def _member(self, node: int, values: np.ndarray, trees: ReadTrees) -> None:
        """Let a node test whether a number is one of these sorted values."""
        true, false, missing = int(trees.true[node]), int(trees.false[node]), bool(trees.missing[node])
        feature = int(self.feature[node])
        _require(len(values), "a set is empty")

        def search(low: int, high: int, at: int | None) -> int:
            if high - low == 1:
                second = self._add(self._below(values[low]), false, true, feature, False)
                row = (values[low], second, false, feature, missing)
            else:
                half = (low + high) // 2
                row = (values[half - 1], search(low, half, None), search(half, high, None), feature, missing)
            if at is None:
                return self._add(*row)
            self.threshold[at], self.passed[at], self.failed[at], _, self.low[at] = row
            return at

        search(0, len(values), node)


@dataclass(eq=False)
class Forest:
    """The nodes of an ensemble in tables, level by level, the deepest trees first; a leaf is its own child.

    Attributes:
        trees: the number of trees.
        feature: the feature of each node, int64; those of the second copy follow those of the first.
        threshold: of each node.
        child: the place of the child of a false test, int32, after which the other child is; with `pairs` both, int64.
        pairs: whether nodes share children, which then cannot be next to each other.
        active: for each level the number of trees that have inner nodes there.
        copies: whether a node reads the second copy.
        weights: of the votes: float64 [places] if each tree votes for one target, or [places, targets].
        voted: whether a leaf has a vote for a target, if the aggregate is a minimum or maximum and some have none.
        groups: the first tree of each target, and the targets, if each tree votes for one of several.
        finite: whether the weights of all votes are finite.
        based: whether the weights include the base values, in the leaves of the first tree of each target.
    """

    trees: int
    feature: np.ndarray
    threshold: np.ndarray
    child: np.ndarray
    pairs: bool
    active: tuple[int, ...]
    copies: bool
    weights: np.ndarray
    voted: np.ndarray | None
    groups: tuple[np.ndarray, np.ndarray] | None
    finite: bool
    based: bool = False


def forest(trees: ReadTrees, dtype: np.dtype[Any], count: int, targets: int, how: str, base: np.ndarray | None = None) -> Forest:
    """Arrange the nodes of an ensemble.

    Args:
        trees: the ensemble.
        dtype: in which features and thresholds are compared.
        count: the number of features.
        targets: the number of targets.
        how: what is computed of the votes for a target: "SUM", "MIN" or "MAX".
        base: is added to the sum of each target, which `based` of the result reports; None if it is not to be.

    Raises:
        Refused: the ensemble is not valid, or it has a form that these tables cannot have.
    """
    made = _NodeWriter(trees, dtype)
    inner = made.inner
    used = made.feature[inner]
    _require(used.min(initial=0) >= 0 and used.max(initial=-1) < count, "a feature does not exist")
    _require(len(trees.roots) and targets > 0, "there are no trees or no targets")
    _require(len(made.inner) * targets <= _VOTES, "there are too many votes")
    made.feature[made.low] += count
    depths, shared = _depths(trees.roots, made)
    target = None if shared or targets < 2 or how != "SUM" else _targets(trees, made)
    order = np.argsort(-depths, kind="stable") if target is None else np.lexsort((-depths, target))
    levels = range(int(depths.max(initial=0)))
    active = tuple(int((depths > n).sum()) if target is None else len(depths) for n in levels)
    place, child = (_paired if shared else _adjacent)(trees.roots[order], made)
    weights, voted = _votes(trees, place, targets, how)
    groups = None
    if target is not None:
        weights = weights.sum(axis=1)
        first = np.flatnonzero(np.diff(target[order], prepend=-1))
        groups = first, target[order][first]
    elif targets == 1:
        weights = weights[:, 0]
    finite = bool(np.isfinite(trees.weight).all())
    feature, threshold, copies = made.feature[place], made.threshold[place], bool(made.low.any())
    based = base is not None and not shared and how == "SUM" and _include(base, weights, child, groups)
    return Forest(len(order), feature, threshold, child, shared, active, copies, weights, voted, groups, finite, based)


def _include(base: np.ndarray, weights: np.ndarray, child: np.ndarray, groups: tuple[np.ndarray, np.ndarray] | None) -> bool:
    """Add the base values to the weights of a tree's leaves if no sum is rounded; return whether they were added."""
    first, targets = (np.zeros(1, np.int64), None) if groups is None else groups
    added = np.zeros_like(weights)
    for i, front in enumerate(first):
        value = base.reshape(weights.shape[1:]) if targets is None else base[targets[i]]
        front = np.array([front])
        while len(front):
            ends = child[front] == front
            added[front[ends]] = value
            parents = child[front[~ends]]
            front = np.concatenate([parents, parents + 1])
    missing = 0 if targets is None else np.count_nonzero(np.delete(base, targets))
    sums = weights + added
    if missing or not (np.array_equal(sums - added, weights) and np.array_equal(sums - weights, added)):
        return False
    weights[...] = sums
    return True


def _targets(trees: ReadTrees, made: _NodeWriter) -> np.ndarray | None:
    """The target of each tree; None if a tree has votes for several, or a leaf more than one."""
    tree = np.full(len(made.inner), -1)
    number, front = np.arange(len(trees.roots)), trees.roots
    while len(front):
        tree[front] = number
        held = made.inner[front]
        number = np.concatenate([number[held], number[held]])
        front = np.concatenate([made.passed[front[held]], made.failed[front[held]]])
    at, target = tree[trees.at], trees.target
    if len(np.unique(trees.at)) < len(at) or (at < 0).any():
        return None
    low, high = np.full(len(trees.roots), np.iinfo(np.int64).max), np.full(len(trees.roots), -1)
    np.minimum.at(low, at, target)
    np.maximum.at(high, at, target)
    return high if ((low == high) & (high >= 0)).all() else None


def _depths(roots: np.ndarray, made: _NodeWriter) -> tuple[np.ndarray, bool]:
    """The depth of each tree, and whether a node has two parents, or is in two trees; raises Refused for a cycle."""
    inner = np.flatnonzero(made.inner)
    parents = np.bincount(np.concatenate([made.passed[inner], made.failed[inner], roots]), minlength=len(made.inner))
    shared = bool((parents > 1).any())
    depths = np.zeros(len(roots), np.int64)
    tree, front = np.arange(len(roots)), roots
    for _ in range(_DEEPEST):
        held = made.inner[front]
        tree, front = tree[held], front[held]
        if not len(front):
            return depths, shared
        depths[np.unique(tree)] += 1
        tree, front = np.concatenate([tree, tree]), np.concatenate([made.passed[front], made.failed[front]])
        if shared:
            tree, front = np.unique(np.stack([tree, front]), axis=1)
    raise Refused("a tree is too deep, or its nodes form a cycle")


def _adjacent(roots: np.ndarray, made: _NodeWriter) -> tuple[np.ndarray, np.ndarray]:
    """The node at each place, with the children of a node next to each other; the place of the first child."""
    levels, children = [], []
    front, start = roots, 0
    while len(front):
        held = made.inner[front]
        parents = front[held]
        child = np.arange(start, start + len(front))
        start += len(front)
        child[held] = start + 2 * np.arange(len(parents))
        levels.append(front)
        children.append(child)
        front = np.stack([made.failed[parents], made.passed[parents]], axis=1).reshape(-1)
    return np.concatenate(levels), np.concatenate(children).astype(np.int32)


def _paired(roots: np.ndarray, made: _NodeWriter) -> tuple[np.ndarray, np.ndarray]:
    """The node at each place, those that roots reach and the roots first, and the places of both children."""
    seen = np.zeros(len(made.inner), bool)
    front = np.unique(roots)
    while len(front):
        seen[front] = True
        parents = front[made.inner[front]]
        front = np.unique(np.concatenate([made.failed[parents], made.passed[parents]]))
        front = front[~seen[front]]
    rest = np.flatnonzero(seen)
    place = np.concatenate([roots, rest])
    at = np.full(len(made.inner), -1)
    at[rest] = len(roots) + np.arange(len(rest))
    both = at[np.stack([made.failed[place], made.passed[place]], axis=1)]
    own = np.arange(len(place))[:, None]
    return place, np.where(made.inner[place][:, None], both, own).reshape(-1)


def _votes(trees: ReadTrees, places: np.ndarray, count: int, how: str) -> tuple[np.ndarray, np.ndarray | None]:
    """The weights of each place for each target, [places, count]; whether there is a vote, None if every leaf has all.

    Args:
        trees: the ensemble.
        places: the node of the ensemble at each place; an added node has no votes.
        count: the number of targets.
        how: the aggregate, "SUM", "MIN" or "MAX".
    """
    nodes = len(trees.mode)
    target = trees.target
    _require(not len(target) or (target.min() >= 0 and target.max() < count), "a target does not exist")
    start = {"SUM": 0.0, "MIN": np.inf, "MAX": -np.inf}[how]
    table = np.full((nodes + 1, count), start)
    with np.errstate(all="ignore"):
        {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum}[how].at(table, (trees.at, target), trees.weight.astype(np.float64))
    places = np.minimum(places, nodes)
    if how == "SUM":
        return table[places], None
    there = np.zeros((nodes + 1, count), bool)
    there[trees.at, target] = True
    return table[places], None if there[:-1][trees.mode == _LEAF].all() else there[places]
