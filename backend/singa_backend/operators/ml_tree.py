"""Decision tree ensembles of ai.onnx.ml, evaluated level by level for all rows and all trees together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from operator import eq, ge, gt, le, lt, ne

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..ir.declaration import Derived, Ints, operator
from ._api import Array
from .ml_linear import ML, TRANSFORMS, Floats, Strings, class_labels, matrix, transform

_MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ", "BRANCH_MEMBER", "LEAF")
_COMPARE = (le, lt, ge, gt, eq, ne)
_MEMBER, _LEAF = 6, 7
_AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
_AT_ONCE, _ARRAYS = 1 << 22, 10  # maximum number of votes in memory on the host; arrays of votes that exist at once


@dataclass
class Trees:
    """The nodes of all trees in flat arrays; a leaf is its own child.

    Attributes:
        roots: Node of each tree's root.
        feature: Feature that each inner node compares.
        mode: Index in _MODES of each node.
        value: Threshold of each inner node.
        true: Child of each node if its condition is true.
        false: Child of each node if its condition is false.
        missing: Whether NaN selects the child `true`.
        targets: [nodes, votes of a leaf], padded with targets that do not count.
        weights: Weights of the votes, with the shape of `targets`.
        members: The values of all MEMBER nodes, and the sorted pairs node * len(values) + index of the value.
    """

    roots: np.ndarray
    feature: np.ndarray
    mode: np.ndarray
    value: np.ndarray
    true: np.ndarray
    false: np.ndarray
    missing: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    members: tuple[np.ndarray, np.ndarray] | None = None

    @cached_property
    def depth(self) -> int:
        """Maximum number of steps from a root to a leaf; raises OperatorError if the nodes form a cycle."""
        front, steps, seen = np.unique(self.roots), 0, 0
        for _ in limits.rounds(None):
            front = front[self.mode[front] != _LEAF]
            if not front.size:
                break
            if seen <= len(self.mode) < seen + front.size:  # a node was visited twice: it has two parents or is its own ancestor
                self._check_cycles()
            seen += front.size
            steps += 1
            front = np.unique(np.concatenate([self.true[front], self.false[front]]))
        return steps

    @cached_property
    def used(self) -> list[int]:
        """Modes of the inner nodes."""
        return [int(m) for m in np.unique(self.mode) if m != _LEAF]

    @cached_property
    def features(self) -> tuple[int, int]:
        """Minimum and maximum feature of the inner nodes."""
        inner = self.feature[self.mode != _LEAF]
        return int(inner.min(initial=0)), int(inner.max(initial=-1))

    def _check_cycles(self) -> None:
        """Raise OperatorError if nodes remain after repeated removal of the nodes without parents."""
        inner = (self.mode != _LEAF).tolist()
        children = list(zip(self.true.tolist(), self.false.tolist(), strict=True))
        parents = [0] * len(inner)
        for node, ways in enumerate(children):
            for child in ways if inner[node] else ():
                parents[child] += 1
        free = [node for node, count in enumerate(parents) if not count]
        for node in free:
            for child in children[node] if inner[node] else ():
                parents[child] -= 1
                if not parents[child]:
                    free.append(child)
        if len(free) < len(inner):
            raise OperatorError("the nodes of a tree form a cycle", code="SX404")

    def leaves(self, xp: Xp, x: Array) -> Array:
        """Return the leaf that each row reaches in each tree, [N, trees]."""
        feature, mode, value, true, false, missing = (
            xp.asarray(a) for a in (self.feature, self.mode, self.value, self.true, self.false, self.missing)
        )
        low, high = self.features
        if low < 0 or high >= x.shape[1]:
            raise OperatorError(
                f"features of nodes must be in [0, {x.shape[1]}), got {low if low < 0 else high}",
                code="SX401",
            )
        row = xp.arange(x.shape[0])[:, None]
        node = xp.broadcast_to(xp.asarray(self.roots), (x.shape[0], len(self.roots)))
        for _ in limits.rounds(self.depth if x.shape[0] else 0):
            v, t, how = x[row, feature[node]], value[node], mode[node]
            go = xp.zeros(node.shape, bool)
            for m in self.used:
                go = xp.where(how == m, self._compare(xp, m, v, t, node), go)
            go = xp.where(xp.isnan(v), missing[node], go)
            node = xp.where(go, true[node], false[node])
        return node

    def _compare(self, xp: Xp, mode: int, v: Array, t: Array, node: Array) -> Array:
        if mode != _MEMBER:
            return _COMPARE[mode](v, t)
        if self.members is None or not self.members[0].size:
            return xp.zeros(v.shape, bool)
        values, pairs = (xp.asarray(a) for a in self.members)
        number = xp.minimum(xp.searchsorted(values, v), len(values) - 1)
        pair = node * len(values) + number
        return (values[number] == v) & (pairs[xp.minimum(xp.searchsorted(pairs, pair), len(pairs) - 1)] == pair)

    def aggregate(self, xp: Xp, x: Array, count: int, how: str) -> Array:
        """Aggregate the votes of the leaves that each row reaches, for each of `count` targets: [N, count], float64."""
        if self.targets.size and not self.targets.max() < count:
            raise OperatorError(f"targets of leaves must be below {count}, got {self.targets.max()}", code="SX401")
        targets, weights = xp.asarray(np.where(self.targets < 0, count, self.targets)), xp.asarray(self.weights)
        y = xp.zeros((x.shape[0], count), np.float64)
        each = max(len(self.roots) * self.targets.shape[1], count + 1)
        step = max(1, xp.block_elements(x.shape[0] * each, _ARRAYS * 8, _AT_ONCE) // max(1, each))
        for start in limits.blocks(x.shape[0], step):
            leaf = self.leaves(xp, x[start : start + step])
            n = leaf.shape[0]
            place = (xp.arange(n)[:, None, None] * (count + 1) + targets[leaf]).reshape(-1)
            vote = weights[leaf].reshape(-1)
            if how in ("SUM", "AVERAGE"):
                total = xp.bincount(place, weights=vote, minlength=n * (count + 1))
            else:
                total = xp.full(n * (count + 1), np.inf if how == "MIN" else -np.inf)
                xp.scatter(total, (place,), vote, how.lower())
                total = xp.where(xp.bincount(place, minlength=n * (count + 1)) > 0, total, 0)
            y[start : start + step] = total.reshape(n, count + 1)[:, :count]
        return y / len(self.roots) if how == "AVERAGE" else y


def _votes(nodes: int, at: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return targets (-1 for padding) and weights, [nodes, maximum votes of a node]; vote i is of node at[i]."""
    if not len(at) == len(targets) == len(weights):
        raise OperatorError(
            f"leaves, targets and weights must have equal lengths, got {len(at)}, {len(targets)} and {len(weights)}", code="SX404"
        )
    if len(targets) and targets.min() < 0:
        raise OperatorError(f"targets must not be negative, got {targets.min()}", code="SX401")
    order = np.argsort(at, kind="stable")
    at = at[order]
    place = np.arange(len(at)) - np.searchsorted(at, at)
    shape = (nodes, int(place.max(initial=-1)) + 1)
    limits.admit(shape, np.float64)
    t, w = np.full(shape, -1), np.zeros(shape)
    t[at, place], w[at, place] = targets[order], weights[order]
    return t, w


# --- TreeEnsembleClassifier, TreeEnsembleRegressor: nodes identified by the ids of tree and node


def _numbers(floats: Floats | None, tensor: np.ndarray | None) -> np.ndarray | None:
    """Return an attribute that may be floats or a tensor."""
    if tensor is not None:
        return tensor.reshape(-1)
    return np.array(floats, np.float32) if floats else None


def _named_trees(
    values: np.ndarray | None,
    votes: tuple[Ints | None, Ints | None, Ints | None],
    weights: np.ndarray | None,
    nodes_modes: Strings | None,
    **nodes: Ints | None,
) -> Trees:
    """Build Trees; `votes` are the ids of the tree, the node and the target of each weight."""
    modes = nodes_modes or ()
    count = len(modes)
    unknown = set(modes) - set(_MODES) | set(modes) & {"BRANCH_MEMBER"}
    if unknown or not count:
        what = f"modes in nodes_modes must be known, got {min(unknown)!r}" if unknown else "nodes_modes must not be empty"
        raise OperatorError(what, code="SX404")
    mode = np.array([_MODES.index(m) for m in modes])

    def ints(name: str) -> np.ndarray:
        given = np.array(nodes[name] or (0,) * count, np.int64)
        if len(given) != count:
            raise OperatorError(f"{name} must have {count} values, one for each node, got {len(given)}", code="SX404")
        return given

    tree, name = ints("nodes_treeids"), ints("nodes_nodeids")
    ids, tree_number = np.unique(tree, return_inverse=True)
    low, span = name.min(), int(name.max() - name.min()) + 1
    keys = tree_number * span + name - low
    order = np.argsort(keys, kind="stable")
    if (np.diff(keys[order]) == 0).any():
        raise OperatorError("the node ids of a tree must be different", code="SX404")

    def find(tree_numbers: np.ndarray, names: np.ndarray, what: str) -> np.ndarray:
        key = tree_numbers * span + names - low
        at: np.ndarray = order[np.minimum(np.searchsorted(keys, key, sorter=order), count - 1)]
        if ((names < low) | (names >= low + span) | (keys[at] != key)).any():
            raise OperatorError(f"{what} must refer to a node of the same tree", code="SX404")
        return at

    leaf, own = mode == _LEAF, np.arange(count)
    way = {}
    for branch in ("nodes_truenodeids", "nodes_falsenodeids"):
        way[branch] = own.copy()
        way[branch][~leaf] = find(tree_number[~leaf], ints(branch)[~leaf], branch)
    child = np.zeros(count, bool)
    for to in way.values():
        child[to[~leaf]] = True
    first = np.full(len(ids), count)
    np.minimum.at(first, tree_number[~child], own[~child])
    if (first == count).any():
        raise OperatorError("each tree must have a root, got a cycle of nodes", code="SX404")

    if values is None:
        values = np.zeros(count, np.float32)
    if len(values) != count:
        raise OperatorError(f"nodes_values must have {count} values, one for each node, got {len(values)}", code="SX404")
    vote_tree, vote_node, vote_target = (np.array(v or (), np.int64) for v in votes)
    place = np.minimum(np.searchsorted(ids, vote_tree), len(ids) - 1)
    if len(vote_tree) != len(vote_node) or (ids[place] != vote_tree).any():
        raise OperatorError("a vote must refer to a tree of the ensemble", code="SX404")
    given = np.zeros(0) if weights is None else weights
    targets, vote_weights = _votes(count, find(place, vote_node, "a vote"), vote_target, given)
    missing = ints("nodes_missing_value_tracks_true") != 0
    feature = np.where(leaf, 0, ints("nodes_featureids"))
    true, false = way["nodes_truenodeids"], way["nodes_falsenodeids"]
    return Trees(first, feature, mode, values, true, false, missing, targets, vote_weights)


def _base(values: np.ndarray | None, count: int) -> np.ndarray | None:
    if values is not None and len(values) != count:
        raise OperatorError(f"base_values must have {count} values, one for each target, got {len(values)}", code="SX404")
    return values


@operator("TreeEnsembleRegressor", 1, 3, 5, domain=ML)
def tree_ensemble_regressor(
    xp: Xp,
    x: Array,
    *,
    n_targets: int | None = None,
    aggregate_function: str = "SUM",
    post_transform: str = "NONE",
    base_values: Floats | None = None,
    base_values_as_tensor: np.ndarray | None = None,
    nodes_treeids: Ints | None = None,
    nodes_nodeids: Ints | None = None,
    nodes_modes: Strings | None = None,
    nodes_featureids: Ints | None = None,
    nodes_values: Floats | None = None,
    nodes_values_as_tensor: np.ndarray | None = None,
    nodes_truenodeids: Ints | None = None,
    nodes_falsenodeids: Ints | None = None,
    nodes_missing_value_tracks_true: Ints | None = None,
    nodes_hitrates: Floats | None = None,
    nodes_hitrates_as_tensor: np.ndarray | None = None,
    target_treeids: Ints | None = None,
    target_nodeids: Ints | None = None,
    target_ids: Ints | None = None,
    target_weights: Floats | None = None,
    target_weights_as_tensor: np.ndarray | None = None,
    derived: Derived,
) -> Array:
    if aggregate_function not in _AGGREGATES:
        raise OperatorError(
            f"aggregate_function must be one of {', '.join(_AGGREGATES)}, got {aggregate_function!r}", code="SX404"
        )
    trees: Trees = derived(
        lambda: _named_trees(
            _numbers(nodes_values, nodes_values_as_tensor),
            (target_treeids, target_nodeids, target_ids),
            _numbers(target_weights, target_weights_as_tensor),
            nodes_modes,
            nodes_treeids=nodes_treeids,
            nodes_nodeids=nodes_nodeids,
            nodes_featureids=nodes_featureids,
            nodes_truenodeids=nodes_truenodeids,
            nodes_falsenodeids=nodes_falsenodeids,
            nodes_missing_value_tracks_true=nodes_missing_value_tracks_true,
        )
    )
    count = max(target_ids or (0,)) + 1 if n_targets is None else n_targets
    y = trees.aggregate(xp, matrix(xp, x), count, aggregate_function)
    base = _base(_numbers(base_values, base_values_as_tensor), count)
    return transform(xp, y if base is None else y + xp.asarray(base), post_transform)


tree_ensemble_regressor.no_gradient("zero")


@operator("TreeEnsembleClassifier", 1, 3, 5, domain=ML, host=True)
def tree_ensemble_classifier(
    xp: Xp,
    x: Array,
    *,
    classlabels_int64s: Ints | None = None,
    classlabels_strings: Strings | None = None,
    post_transform: str = "NONE",
    base_values: Floats | None = None,
    base_values_as_tensor: np.ndarray | None = None,
    nodes_treeids: Ints | None = None,
    nodes_nodeids: Ints | None = None,
    nodes_modes: Strings | None = None,
    nodes_featureids: Ints | None = None,
    nodes_values: Floats | None = None,
    nodes_values_as_tensor: np.ndarray | None = None,
    nodes_truenodeids: Ints | None = None,
    nodes_falsenodeids: Ints | None = None,
    nodes_missing_value_tracks_true: Ints | None = None,
    nodes_hitrates: Floats | None = None,
    nodes_hitrates_as_tensor: np.ndarray | None = None,
    class_treeids: Ints | None = None,
    class_nodeids: Ints | None = None,
    class_ids: Ints | None = None,
    class_weights: Floats | None = None,
    class_weights_as_tensor: np.ndarray | None = None,
    derived: Derived,
) -> tuple[Array, Array]:
    """Select the class with the greatest sum of votes before the transform; the first of equal ones."""
    labels = class_labels(classlabels_int64s, classlabels_strings)
    if labels is None:
        raise OperatorError("the classifier must have class labels", code="SX404")

    def make() -> tuple[Trees, set[int], bool]:
        weights = _numbers(class_weights, class_weights_as_tensor)
        trees = _named_trees(
            _numbers(nodes_values, nodes_values_as_tensor),
            (class_treeids, class_nodeids, class_ids),
            weights,
            nodes_modes,
            nodes_treeids=nodes_treeids,
            nodes_nodeids=nodes_nodeids,
            nodes_featureids=nodes_featureids,
            nodes_truenodeids=nodes_truenodeids,
            nodes_falsenodeids=nodes_falsenodeids,
            nodes_missing_value_tracks_true=nodes_missing_value_tracks_true,
        )
        return trees, set(class_ids or ()), weights is None or bool((weights >= 0).all())

    # If only one of two classes has votes, they decide: above 1/2 as probabilities, above 0 as margins (of both signs).
    trees, voted, chances = derived(make)
    z = trees.aggregate(xp, matrix(xp, x), len(labels), "SUM")
    base = _numbers(base_values, base_values_as_tensor)
    if len(labels) <= 2 and len(voted) == 1:
        s = z[:, list(voted)]
        if base is not None:
            s = s + base[-1]
        if len(labels) == 1 and classlabels_strings:
            raise OperatorError("a binary classifier must have two string labels, got one", code="SX404")
        names = labels if len(labels) == 2 else np.array([0, labels[0]])
        if len(labels) == 1:
            z = s
        elif voted == {1}:
            z = np.concatenate([np.zeros_like(s), s], axis=1)
        elif post_transform == "PROBIT" or (post_transform == "NONE" and chances):
            z = np.concatenate([1 - s, s], axis=1)
        else:
            z, chances = np.concatenate([-s, s], axis=1), False
        chosen = s[:, 0] > (0.5 if chances else 0)
        return names[chosen.astype(np.int64)], transform(xp, z, post_transform).astype(np.float32)
    if _base(base, len(labels)) is not None:
        z = z + base
    return labels[z.argmax(axis=1)], transform(xp, z, post_transform).astype(np.float32)


tree_ensemble_classifier.no_gradient("zero")


# --- TreeEnsemble: nodes and leaves identified by their index


@operator("TreeEnsemble", 5, domain=ML)
def tree_ensemble(
    xp: Xp,
    x: Array,
    *,
    tree_roots: Ints,
    nodes_featureids: Ints,
    nodes_modes: np.ndarray,
    nodes_splits: np.ndarray,
    nodes_truenodeids: Ints,
    nodes_trueleafs: Ints,
    nodes_falsenodeids: Ints,
    nodes_falseleafs: Ints,
    leaf_targetids: Ints,
    leaf_weights: np.ndarray,
    n_targets: int | None = None,
    aggregate_function: int = 1,
    post_transform: int = 0,
    nodes_missing_value_tracks_true: Ints | None = None,
    nodes_hitrates: np.ndarray | None = None,
    membership_values: np.ndarray | None = None,
    derived: Derived,
) -> Array:
    """Evaluate the trees; the leaves follow the n inner nodes: leaf i is node n + i."""
    if not 0 <= aggregate_function < len(_AGGREGATES) or not 0 <= post_transform < len(TRANSFORMS):
        known = f"below {len(_AGGREGATES)} and post_transform below {len(TRANSFORMS)}"
        got = f"{aggregate_function} and {post_transform}"
        raise OperatorError(f"aggregate_function must be {known}, neither negative, got {got}", code="SX404")

    def make() -> Trees:
        inner, leaves = len(nodes_featureids), len(leaf_targetids)
        mode = nodes_modes.reshape(-1).astype(np.int64)
        if len(mode) and not 0 <= mode.min() <= mode.max() <= _MEMBER:
            raise OperatorError(f"nodes_modes must be in [0, {_MEMBER}], got {mode.min()} to {mode.max()}", code="SX404")
        lengths = [len(v) for v in (mode, nodes_splits, nodes_truenodeids, nodes_trueleafs, nodes_falsenodeids, nodes_falseleafs)]
        if set(lengths) != {inner} or len(leaf_weights) != leaves:
            raise OperatorError(
                f"the node attributes must have {inner} values and leaf_weights {leaves}, got {lengths} and {len(leaf_weights)}",
                code="SX404",
            )
        own = np.arange(inner, inner + leaves)

        def way(ids: Ints, leaf: Ints) -> np.ndarray:
            to, ends = np.array(ids, np.int64), np.array(leaf, np.int64) != 0
            if ((to < 0) | (to >= np.where(ends, leaves, inner))).any():
                raise OperatorError("a node must refer to an existing node or leaf", code="SX401")
            return np.concatenate([to + inner * ends, own])

        roots = np.array(tree_roots, np.int64)
        if not len(roots) or not 0 <= roots.min() <= roots.max() < inner:
            got = f"{roots.min()} to {roots.max()}" if len(roots) else "none"
            raise OperatorError(f"tree_roots must have nodes in [0, {inner}), got {got}", code="SX401")
        missing = np.array(nodes_missing_value_tracks_true or (0,) * inner) != 0
        if len(missing) != inner:
            raise OperatorError(f"nodes_missing_value_tracks_true must have {inner} values, got {len(missing)}", code="SX404")
        features, values, modes = np.array(nodes_featureids, np.int64), _wide(nodes_splits), np.full(leaves, _LEAF)
        targets, weights = _votes(inner + leaves, own, np.array(leaf_targetids, np.int64), _wide(leaf_weights))
        return Trees(
            roots,
            np.pad(features, (0, leaves)),
            np.concatenate([mode, modes]),
            np.pad(values, (0, leaves)),
            way(nodes_truenodeids, nodes_trueleafs),
            way(nodes_falsenodeids, nodes_falseleafs),
            np.pad(missing, (0, leaves)),
            targets,
            weights,
            _members(mode, membership_values),
        )

    count = max(leaf_targetids, default=0) + 1 if n_targets is None else n_targets
    y = derived(make).aggregate(xp, matrix(xp, x), count, _AGGREGATES[aggregate_function])
    return transform(xp, y, TRANSFORMS[post_transform])


tree_ensemble.no_gradient("zero")


def _wide(a: np.ndarray) -> np.ndarray:
    return a.reshape(-1).astype(np.float32) if a.dtype.itemsize < 4 else a.reshape(-1)


def _members(mode: np.ndarray, values: np.ndarray | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the sets of the MEMBER nodes; in the attribute, each set ends with a NaN, in the order of the nodes."""
    nodes = np.flatnonzero(mode == _MEMBER)
    flat = np.zeros(0, np.float32) if values is None else _wide(values)
    end = np.isnan(flat)
    if len(nodes) != end.sum():
        raise OperatorError(
            f"membership_values must have {len(nodes)} sets, one for each MEMBER node, got {end.sum()}", code="SX404"
        )
    if not len(nodes):
        return None
    flat, which = flat[~end], (np.cumsum(end) - end)[~end]
    if which.size and which.max() >= len(nodes):
        raise OperatorError("membership_values must end with a NaN", code="SX404")
    unique, number = np.unique(flat, return_inverse=True)
    return unique, np.unique(nodes[which] * len(unique) + number)
