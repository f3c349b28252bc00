"""`optimize_transpose`: move Transposes down through layout-independent nodes until they cancel against their inverse.

Each is tried alone: it is pushed as far as possible, cloned at branches, and the trial is kept only if fewer Transposes are
left than before.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..rewriting.transposes import compose, transposes
from .graph import GraphEditor
from .index import NodeEditor, Trial, Type
from .layouts import Moved, lay_out, movable, moved
from .operator_facts import permutation, set_ints
from .view import ModelView

PUSHES = 4
"""Maximum pushes of one trial for each node of the graph, plus 50: paths can multiply where values branch and join."""

FAILED = 64
"""Maximum changes of all trials that were undone, for each node of the graph; after them a trial has at most 50 pushes."""


def optimize_transpose(graph: GraphEditor) -> int:
    """Push, merge and remove Transposes; finally those that only move axes of size 1 become Reshapes."""
    count, costs = _tidy(graph), _Costs(graph)
    wasted = 0
    for node in [n for n in graph.nodes if n.is_("Transpose")]:
        if graph.producer(node.outputs[0]) is node and _worth(graph, node):
            trial = graph.context.trial = Trial()
            try:
                pushes = _sink(graph, node, 50 + (PUSHES * len(graph) if wasted < FAILED * len(graph) else 0))
            finally:
                graph.context.trial = None
            if pushes is not None and costs.lower(graph, trial.touched):
                count += 1
            else:
                wasted += len(trial.steps)
                trial.undo()
    return count + _tidy(graph) + sum(_reshape(graph, n) for n in list(graph.nodes) if n.is_("Transpose"))


class _Costs:
    """Counts the Transposes that move data, and all Transposes; those of constants cost nothing."""

    def __init__(self, graph: GraphEditor) -> None:
        self.known: dict[NodeEditor, tuple[str, object, tuple[int, int]]] = {}
        self.counted = {n: self.of(graph, n) for n in graph.nodes if n.op_type == "Transpose"}

    def lower(self, graph: GraphEditor, touched: Iterable[NodeEditor]) -> bool:
        """Whether changes of these nodes made the total lower; the costs are noted only if they did."""
        now = {n: self.of(graph, n) if n.op_type == "Transpose" and n in graph else (0, 0) for n in touched}
        before = [self.counted.get(n, (0, 0)) for n in now]
        if tuple(map(sum, zip(*now.values(), strict=True))) >= tuple(map(sum, zip(*before, strict=True))):
            return False
        self.counted.update(now)
        return True

    def of(self, graph: GraphEditor, node: NodeEditor) -> tuple[int, int]:
        """(1 if it moves data, 1 if its input is not constant); kept until its input or permutation changes."""
        source, perm = node.input(0), node.attributes.get("perm")
        found = self.known.get(node)
        if found is None or found[0] != source or found[1] is not perm:
            free = graph.is_constant(source)
            cost = (int(not free and _only_ones(graph, node) is None), int(not free))
            found = self.known[node] = (source, perm, cost)
        return found[2]


def _worth(graph: GraphEditor, node: NodeEditor) -> bool:
    """Whether a trial is useful: a reader could take the Transpose's input."""
    readers = graph.users(node.outputs[0])
    return permutation(graph, node) is not None and any(movable(r) and not r.graphs for r in readers)


def _sink(graph: GraphEditor, first: NodeEditor, left: int) -> int | None:
    """Push a Transpose, and the new ones that result, down as far as possible; returns None if it takes too many pushes."""
    pending = [first]
    pushes = 0
    while pending:
        node = pending.pop()
        p, y = permutation(graph, node), node.outputs[0]
        if p is None:
            continue
        for reader in sorted(graph.users(y), key=graph.place):
            if pushes == left:
                return None
            if reader.graphs or y not in reader.inputs or not graph.has_users(y):
                continue
            graph.touch(reader)
            new = _merge(graph, reader, node, p) if reader.is_("Transpose") else _push(graph, reader, node, p)
            if new is not None:
                pending += new
                pushes += 1
        if not graph.used(y):
            graph.remove(node)
    return pushes or None


def _merge(graph: GraphEditor, reader: NodeEditor, node: NodeEditor, p: tuple[int, ...]) -> list[NodeEditor] | None:
    """Merge two Transposes into one, or remove both."""
    q = permutation(graph, reader)
    if q is None or len(q) != len(p):
        return None
    both, x = compose(p, q), node.inputs[0]
    if both == tuple(range(len(both))):
        if graph.bypass(reader, x):
            return []
        graph.rewire(reader, [x])
        reader.op_type, reader.attributes = "Identity", {}
        return []
    graph.rewire(reader, [x])
    reader.set(perm=both)
    return [reader]


def _push(graph: GraphEditor, reader: NodeEditor, node: NodeEditor, p: tuple[int, ...]) -> list[NodeEditor] | None:
    """Let a node read the Transpose's input; returns the new Transposes after the node."""
    x, y = node.inputs[0], node.outputs[0]
    slot = reader.inputs.index(y)  # the first: rules for a single y refuse a second one
    found = moved(graph, reader, slot, p)
    if found is None or any(o in graph.pinned for o in reader.outputs):
        return None
    known, before = {y: x}, list(reader.inputs)
    for name in [before[i] for i in found.others or ()]:
        if name not in known:
            known[name] = lay_out(graph, name, p, reader)
    graph.rewire(reader, [x if i == slot else n if found.others is None else known[n] for i, n in enumerate(before)])
    for maker in [graph.producer(n) for n in before if n != y]:
        if maker is not None and maker.is_("Transpose") and not graph.used(maker.outputs[0]):
            graph.remove(maker)  # `lay_out` used its input directly
    reader.set(**found.attributes)
    for name, index, since, values in found.lists:
        _set_numbers(graph, reader, name, index, since, list(values))
    return _relabel(graph, reader, found)


def _set_numbers(graph: GraphEditor, node: NodeEditor, name: str, index: int, since: int, values: list[float]) -> None:
    """Write a list of numbers in the dtype and shape of the old one."""
    old = graph.constant(node.input(index)) if graph.opset >= since else None
    if name == "axes" and node.op_type == "Slice" and old is None and graph.opset >= since:
        set_ints(graph, node, name, index, since, [int(v) for v in values], _index_type(graph, node))
    elif old is not None and (old.dtype.kind == "f" or old.ndim == 0 or old.dtype != "int64"):
        inputs = list(node.inputs)
        inputs[index] = graph.add_constant(old.dtype.type(values).reshape(old.shape), name)
        graph.rewire(node, inputs)
    else:
        set_ints(graph, node, name, index, since, [int(v) for v in values])


def _index_type(graph: GraphEditor, node: NodeEditor) -> type:
    """The dtype of a Slice's axes: that of its starts."""
    return np.int32 if graph.type(node.input(1)).dtype == 6 else np.int64


def _relabel(graph: GraphEditor, node: NodeEditor, found: Moved) -> list[NodeEditor]:
    """Rename the outputs of a node, and compute the old ones from them by Transposes (or a Gather)."""
    made: list[NodeEditor] = []
    for i, (old, q) in enumerate(zip(list(node.outputs), found.perms, strict=True)):
        if found.after is None and q == tuple(range(len(q))):
            continue  # the value does not change, so it keeps its name
        new, kind = graph.context.fresh(old), graph.type(old)
        graph.rename_output(node, i, new)
        if found.after is not None:
            places = graph.add_constant(np.asarray(found.after, np.int64), "places")
            graph.add("Gather", [new, places], name=old, after=node, type=kind, axis=0)
            continue
        if kind.shape is not None and len(kind.shape) == len(q):
            sizes = list(kind.shape)
            for j, k in enumerate(q):
                sizes[k] = kind.shape[j]
            graph.types[new] = Type(kind.dtype, tuple(sizes))
        else:
            graph.types[new] = Type(kind.dtype)
        made.append(graph.add("Transpose", [new], name=old, after=node, type=kind, perm=q))
    return made


# --- helpers


def _tidy(graph: GraphEditor) -> int:
    """Merge chains, remove identities, and keep one of two equal Transposes."""
    count = transposes(ModelView(graph))
    known: dict[tuple[str, tuple[int, ...]], NodeEditor] = {}
    for node in [n for n in graph.nodes if n.is_("Transpose")]:
        p = permutation(graph, node)
        if p is None:
            continue
        if p == tuple(range(len(p))) and graph.bypass(node, node.inputs[0]):
            count += 1
            continue
        first = known.setdefault((node.inputs[0], p), node)
        if first is not node and graph.producer(first.outputs[0]) is first and graph.bypass(node, first.outputs[0]):
            count += 1
    return count


def _only_ones(graph: GraphEditor, node: NodeEditor) -> list[int] | None:
    """The target of the equivalent Reshape if a Transpose moves only axes of size 1; None otherwise."""
    p, shape = permutation(graph, node), graph.shape(node.input(0))
    if p is None or shape is None or len(shape) != len(p):
        return None
    long = [i for i in p if shape[i] != 1]
    if long != sorted(long):
        return None
    target = [d if isinstance(d := shape[i], int) else -1 for i in p]
    return target if target.count(-1) <= 1 and 0 not in target else None


def _reshape(graph: GraphEditor, node: NodeEditor) -> int:
    """Replace a Transpose that moves no data by a Reshape."""
    target, p = _only_ones(graph, node), permutation(graph, node)
    if target is None or graph.opset < 5 or p == tuple(range(len(p or ()))):
        return 0
    node.op_type, node.attributes = "Reshape", {}
    set_ints(graph, node, "shape", 1, 5, target)
    return 1
