"""Ensembles of trees: a function of a tree's leaf becomes the votes of its leaves, and a sum of ensembles one ensemble."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...errors import SonnxError
from ...ir import graph as ir
from ...rewriting.constants import deterministic
from ..flat import call_of, once, operator, run
from .facts import is_pointwise
from .rewriter import PlanRewriter

ML, NAME = "ai.onnx.ml", "TreeEnsembleRegressor"
LEAVES = 1 << 16
"""The maximum number of leaves for which a function is computed."""
LONGEST = 256
"""The maximum number of calls of a function."""
NODES = 1 << 22
"""The maximum number of nodes of an ensemble that is made."""

_OF_NODES = (
    "nodes_nodeids", "nodes_featureids", "nodes_values", "nodes_modes", "nodes_truenodeids", "nodes_falsenodeids",
    "nodes_missing_value_tracks_true",
)  # fmt: skip
_OF_VOTES = ("target_nodeids", "target_ids", "target_weights")


def leaf_functions(edit: PlanRewriter) -> int:
    """For any function of the result of one tree with one vote in each leaf, let the tree vote for the results of the function.

    The function consists of LabelEncoder, of elementwise operators with constants of one element, and of Reshape to a column.  It
    is computed for each leaf by the definitions; only the sign of zeros may change.
    """
    return sum(_leaf_function(edit, tree) for tree in _ensembles(edit) if tree in edit.graph)


def summed_ensembles(edit: PlanRewriter) -> int:
    """For any sum of ensembles of the same input, use one ensemble with the trees of all of them."""
    ensembles = {call.outputs[0]: call for call in _ensembles(edit)}
    roots = [c for c in edit.named("Add", "Sum") if not _is_term(edit, c.outputs[0])] if len(ensembles) > 1 else []
    return sum(_summed(edit, root, ensembles) for root in roots if root in edit.graph)


def _ensembles(edit: PlanRewriter) -> Iterator[ir.Node]:
    """The calls of TreeEnsembleRegressor whose result is the sum of votes."""
    for call in edit.graph.named(NAME):
        given = call.attributes
        if call.domain == ML and given.get("post_transform") in (None, "NONE"):
            plain = given.get("base_values") is None and given.get("base_values_as_tensor") is None
            if plain and given.get("aggregate_function") in (None, "SUM"):
                yield call


def _ensemble(
    inputs: Sequence[ir.Value | None], value: ir.Value | None, origins: list[ir.Node], attributes: Mapping[str, Any]
) -> ir.Node:
    return call_of(NAME, inputs, (value,), origins, ML, **attributes)


# --- functions of leaves


def _leaf_function(edit: PlanRewriter, tree: ir.Node) -> bool:
    weights = _weights(tree)
    if weights is None:
        return False
    values: dict[ir.Value, np.ndarray] = {tree.results[0]: weights}
    calls = _functions(edit, tree.results[0], values)
    while True:
        exits = [v for v in values if v.is_output or not v.users.keys() <= calls.keys()]
        others = [v for v in exits if values[v].dtype != np.float32]
        if not others:
            break
        for v in others:
            call = v.producer
            if call is not None:
                calls.pop(call, None)
            del values[v]
    last = exits[0].producer if len(exits) == 1 else None
    if last is None or last is tree:
        return False
    given = {k: tree.attributes[k] for k in tree.given if k != "target_weights_as_tensor"}
    changed = {**given, "target_weights": tuple(values[exits[0]][:, 0].tolist())}
    edit.put(last, _ensemble(tree.inputs, exits[0], [last, tree], changed))
    return True


def _weights(tree: ir.Node) -> np.ndarray | None:
    """The result at the leaf of each vote, float32 [votes, 1]; None unless there is one tree, with one vote in each leaf."""
    given = tree.attributes
    modes, trees, nodes = (given.get(f"nodes_{n}") or () for n in ("modes", "treeids", "nodeids"))
    votes, ids = given.get("target_nodeids") or (), given.get("target_ids") or ()
    tensor = given.get("target_weights_as_tensor")
    weights = np.array(given.get("target_weights") or (), np.float32) if tensor is None else np.asarray(tensor).reshape(-1)
    if given.get("n_targets") not in (None, 1) or not len(modes) == len(trees) == len(nodes) or not 0 < len(votes) <= LEAVES:
        return None
    leaves = {n for n, m in zip(nodes, modes, strict=True) if m == "LEAF"}
    one_tree = len({*trees, *(given.get("target_treeids") or (None,))}) == 1
    if not one_tree or any(ids) or not len(votes) == len(ids) == len(weights) == len(leaves) or leaves != set(votes):
        return None
    return (weights.astype(np.float32) + np.float32(0))[:, None]


def _functions(edit: PlanRewriter, source: ir.Value, values: dict[ir.Value, np.ndarray]) -> dict[ir.Node, None]:
    """The calls whose inputs are functions of a leaf or constants; their results for each leaf are added to `values`."""
    calls: dict[ir.Node, None] = {}
    pending: list[tuple[int, ir.Node]] = []
    seen: set[ir.Node] = set()

    def add(value: ir.Value) -> None:
        for user in value.users:
            if user not in seen:
                seen.add(user)
                heapq.heappush(pending, (user.position, user))

    add(source)
    while pending and len(calls) < LONGEST:
        _, call = heapq.heappop(pending)
        found = _results(edit, call, values)
        if found is not None:
            calls[call] = None
            (result,) = call.results
            values[result] = found
            add(result)
    return calls


def _results(edit: PlanRewriter, call: ir.Node, values: Mapping[ir.Value, np.ndarray]) -> np.ndarray | None:
    """The results of a call for each leaf, [leaves, 1]; None if it is not a function of one leaf."""
    if len(call.outputs) != 1 or call.outputs[0] is None or call.bodies or call.operator is None or not deterministic(edit, call):
        return None
    if operator(call) == "Reshape":
        if edit.ints(call.inputs[1]) != (-1, 1) or call.inputs[0] is None:
            return None
        return values.get(call.inputs[0])
    if not is_pointwise(call) and (call.domain, call.op_type) != (ML, "LabelEncoder"):
        return None
    arrays: list[np.ndarray | None] = []
    for i in call.inputs:
        array = None if i is None else values[i] if i in values else edit.constant(i)
        if i is not None and (array is None or (i not in values and (array.size != 1 or array.ndim > 2))):
            return None
        arrays.append(array)
    try:
        with np.errstate(all="ignore"):
            (found,) = run(call, arrays)
    except (SonnxError, ArithmeticError, LookupError, TypeError, ValueError):
        return None
    shape = next(iter(values.values())).shape
    return found if isinstance(found, np.ndarray) and found.shape == shape else None


# --- sums


def _is_term(edit: PlanRewriter, value: ir.Value | None) -> bool:
    """Whether a sum reads a value, and nothing else does."""
    return once(value) and operator(edit.reader(value)) in ("Add", "Sum")


def _summed(edit: PlanRewriter, root: ir.Node, known: Mapping[ir.Value | None, ir.Node]) -> bool:
    terms = list(_terms(edit, root))
    groups: dict[tuple[Any, ...], list[ir.Value | None]] = {}
    for v in terms:
        call = known.get(v)
        if call is not None and once(v) and call.attributes.get("n_targets"):
            groups.setdefault((tuple(call.inputs), call.attributes["n_targets"]), []).append(v)
    (inputs, targets), group = max(groups.items(), key=lambda g: len(g[1]), default=(((), 0), []))
    joined = _joined([known[v].attributes for v in group]) if len(group) > 1 else None
    if joined is None:
        return False
    gone = set(group)
    rest = [v for v in terms if v not in gone]
    value = ir.Value() if rest else root.outputs[0]
    made = _ensemble(inputs, value, [root, *(known[v] for v in group)], {**joined, "n_targets": targets})
    edit.put(root, made, *([edit.call("Sum", (made.outputs[0], *rest), [root], root.outputs)] if rest else []))
    return True


def _terms(edit: PlanRewriter, root: ir.Node) -> Iterator[ir.Value | None]:
    """What a sum adds, through sums that only it reads."""
    pending = [*reversed(root.inputs)]
    while pending:
        value = pending.pop()
        before = ir.producer(value)
        if before is not None and operator(before) in ("Add", "Sum") and once(value):
            pending += reversed(before.inputs)
        else:
            yield value


def _joined(ensembles: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The attributes of the trees of all ensembles; None if some are tensors or not complete."""
    joined: dict[str, list[Any]] = {n: [] for n in ("nodes_treeids", *_OF_NODES, "target_treeids", *_OF_VOTES)}
    if sum(len(given.get("nodes_modes") or ()) for given in ensembles) > NODES:
        return None
    total = 0
    for given in ensembles:
        if any(v is not None for n, v in given.items() if n.endswith("_as_tensor")):
            return None
        count, votes = len(given.get("nodes_modes") or ()), len(given.get("target_weights") or ())
        missing = given.get("nodes_missing_value_tracks_true") or (0,) * count
        parts = {**{n: given.get(n) or () for n in joined}, "nodes_missing_value_tracks_true": missing}
        if any(len(v) != (count if n.startswith("nodes") else votes) for n, v in parts.items()) or not count:
            return None
        number = {tree: total + i for i, tree in enumerate(sorted(set(parts["nodes_treeids"])))}
        if not number.keys() >= set(parts["target_treeids"]):
            return None
        total += len(number)
        for n, v in parts.items():
            joined[n] += [number[t] for t in v] if n.endswith("treeids") else v
    return {n: tuple(v) for n, v in joined.items()}
