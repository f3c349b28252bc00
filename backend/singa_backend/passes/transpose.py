"""`optimize_transpose`: move Transposes down through layout-independent nodes until they cancel against their inverse.

Each is tried alone: it is pushed as far as possible, cloned at branches, and the trial is kept only if fewer Transposes are
left than before.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..ir.graph import Node, Value
from ..ir.journal import Journal
from ..rewriting.transposes import compose, permutation, transposes
from .layouts import Moved, lay_out, movable, moved
from .operator_facts import set_ints
from .rewriter import ModelRewriter
from .values import Type

PUSHES = 4
"""Maximum pushes of one trial for each node of the graph, plus 50: paths can multiply where values branch and join."""

FAILED = 64
"""Maximum changes of all trials that were undone, for each node of the graph; after them a trial has at most 50 pushes."""


def optimize_transpose(rewriter: ModelRewriter) -> int:
    """Push, merge and remove Transposes; finally those that only move axes of size 1 become Reshapes."""
    graph, count, costs = rewriter.graph, _tidy(rewriter), _Costs(rewriter)
    if graph.journal is None:
        graph.journal = Journal()
    journal, wasted = graph.journal, 0
    for node in _transposes(rewriter):
        if node in graph and _worth(rewriter, node):
            start = len(journal)
            journal.touched.clear()
            pushes = _sink(rewriter, node, 50 + (PUSHES * len(graph) if wasted < FAILED * len(graph) else 0))
            if pushes is not None and costs.lower(journal.touched):
                count += 1
            else:
                wasted += len(journal) - start
                journal.undo(start)
    return count + _tidy(rewriter) + sum(_reshape(rewriter, node) for node in _transposes(rewriter))


def _transposes(rewriter: ModelRewriter) -> list[Node]:
    return sorted((n for n in rewriter.graph.named("Transpose") if n.is_("Transpose")), key=lambda n: n.position)


class _Costs:
    """Counts the Transposes that move data, and all Transposes; those of constants cost nothing."""

    def __init__(self, rewriter: ModelRewriter) -> None:
        self.rewriter = rewriter
        self.known: dict[Node, tuple[Value | None, object, tuple[int, int]]] = {}
        self.counted = {n: self.of(n) for n in rewriter.graph.named("Transpose")}

    def lower(self, touched: Iterable[Node]) -> bool:
        """Whether changes of these nodes made the total lower; the costs are noted only if they did."""
        now = {n: self.of(n) if n.op_type == "Transpose" and n in self.rewriter.graph else (0, 0) for n in touched}
        before = [self.counted.get(n, (0, 0)) for n in now]
        if tuple(map(sum, zip(*now.values(), strict=True))) >= tuple(map(sum, zip(*before, strict=True))):
            return False
        self.counted.update(now)
        return True

    def of(self, node: Node) -> tuple[int, int]:
        """(1 if it moves data, 1 if its input is not constant); kept until its input or permutation changes."""
        x, perm = node.input(0), node.attributes.get("perm")
        found = self.known.get(node)
        if found is None or found[0] is not x or found[1] is not perm:
            free = self.rewriter.is_constant(x)
            cost = (int(not free and _only_ones(self.rewriter, node) is None), int(not free))
            found = self.known[node] = (x, perm, cost)
        return found[2]


def _worth(rewriter: ModelRewriter, node: Node) -> bool:
    """Whether a trial is useful: a reader could take the Transpose's input."""
    readers = node.results[0].users
    return permutation(rewriter, node) is not None and any(movable(r) and not r.bodies for r in readers)


def _sink(rewriter: ModelRewriter, first: Node, left: int) -> int | None:
    """Push a Transpose, and the new ones that result, down as far as possible; returns None if it takes too many pushes."""
    pending = [first]
    pushes = 0
    while pending:
        node = pending.pop()
        p, y = permutation(rewriter, node), node.results[0]
        if p is None:
            continue
        for reader in sorted(y.users, key=lambda n: n.position):
            if pushes == left:
                return None
            if reader.bodies or y not in reader.inputs:
                continue
            merges = reader.is_("Transpose")
            new = _merge(rewriter, reader, node, p) if merges else _push(rewriter, reader, node, p)
            if new is not None:
                pending += new
                pushes += 1
        if not y.is_used and node in rewriter.graph:
            rewriter.graph.remove(node)
    return pushes or None


def _merge(rewriter: ModelRewriter, reader: Node, node: Node, p: tuple[int, ...]) -> list[Node] | None:
    """Merge two Transposes into one, or remove both."""
    q, x = permutation(rewriter, reader), node.inputs[0]
    if q is None or len(q) != len(p) or x is None:
        return None
    both = compose(p, q)
    if both == tuple(range(len(both))):
        if not rewriter.editor.bypass(reader, x):
            reader.read([x])
            reader.change(op_type="Identity", attributes={})
        return []
    reader.read([x])
    reader.set(perm=both)
    return [reader]


def _push(rewriter: ModelRewriter, reader: Node, node: Node, p: tuple[int, ...]) -> list[Node] | None:
    """Let a node read the Transpose's input; returns the new Transposes after the node."""
    x, y = node.inputs[0], node.results[0]
    slot = reader.inputs.index(y)  # the first: rules for a single y refuse a second one
    found = moved(rewriter, reader, slot, p)
    if found is None or any(o.pinned for o in reader.results):
        return None
    known, before = {y: x}, list(reader.inputs)
    for value in [before[i] for i in found.others or ()]:
        if value is not None and value not in known:
            known[value] = lay_out(rewriter, value, p, reader)
    reader.read([x if i == slot else v if v is None or found.others is None else known[v] for i, v in enumerate(before)])
    for maker in [v.producer for v in before if v is not None and v is not y]:
        if maker is not None and maker.is_("Transpose") and maker in rewriter.graph and not maker.results[0].is_used:
            rewriter.graph.remove(maker)  # `lay_out` used its input directly
    reader.set(**found.attributes)
    for name, index, since, values in found.lists:
        _set_numbers(rewriter, reader, name, index, since, list(values))
    return _relabel(rewriter, reader, found)


def _set_numbers(rewriter: ModelRewriter, node: Node, name: str, index: int, since: int, values: list[float]) -> None:
    """Write a list of numbers in the dtype and shape of the old one."""
    old = rewriter.constant(node.input(index)) if rewriter.opset >= since else None
    if name == "axes" and node.op_type == "Slice" and old is None and rewriter.opset >= since:
        set_ints(rewriter, node, name, index, since, [int(v) for v in values], _index_type(rewriter, node))
    elif old is not None and (old.dtype.kind == "f" or old.ndim == 0 or old.dtype != "int64"):
        numbers = old.dtype.type(values).reshape(old.shape)
        node.put(index, rewriter.editor.add_constant(rewriter.graph, numbers, name))
    else:
        set_ints(rewriter, node, name, index, since, [int(v) for v in values])


def _index_type(rewriter: ModelRewriter, node: Node) -> type:
    """The dtype of a Slice's axes: that of its starts."""
    return np.int32 if rewriter.editor.type(node.input(1)).dtype == 6 else np.int64


def _relabel(rewriter: ModelRewriter, node: Node, found: Moved) -> list[Node]:
    """Let a node return new values, and compute the old ones from them by Transposes (or a Gather)."""
    editor, graph = rewriter.editor, rewriter.graph
    made: list[Node] = []
    for i, (old, q) in enumerate(zip(list(node.outputs), found.perms, strict=True)):
        if old is None or (found.after is None and q == tuple(range(len(q)))):
            continue  # the value does not change
        new, kind = Value(editor.fresh(old.name)), editor.type(old)
        node.return_(i, new)
        if found.after is not None:
            places = editor.add_constant(graph, np.asarray(found.after, np.int64), "places")
            editor.add(graph, "Gather", [new, places], output=old, after=node, axis=0)
            continue
        sizes: list[int | str | None] | None = None
        if kind.shape is not None and len(kind.shape) == len(q):
            sizes = list(kind.shape)
            for j, k in enumerate(q):
                sizes[k] = kind.shape[j]
        editor.types[new] = Type(kind.dtype, None if sizes is None else tuple(sizes))
        editor.add(graph, "Transpose", [new], output=old, after=node, perm=q)
        assert old.producer is not None
        made.append(old.producer)
    return made


# --- helpers


def _tidy(rewriter: ModelRewriter) -> int:
    """Merge chains, remove identities, and keep one of two equal Transposes."""
    count = transposes(rewriter)
    known: dict[tuple[Value, tuple[int, ...]], Node] = {}
    for node in _transposes(rewriter):
        p, x = permutation(rewriter, node), node.input(0)
        if p is None or x is None:
            continue
        if p == tuple(range(len(p))) and rewriter.editor.bypass(node, x):
            count += 1
            continue
        first = known.setdefault((x.original, p), node)
        if first is not node and first in rewriter.graph and rewriter.editor.bypass(node, first.results[0]):
            count += 1
    return count


def _only_ones(rewriter: ModelRewriter, node: Node) -> list[int] | None:
    """The target of the equivalent Reshape if a Transpose moves only axes of size 1; None otherwise."""
    p, shape = permutation(rewriter, node), rewriter.editor.shape(node.input(0))
    if p is None or shape is None or len(shape) != len(p):
        return None
    long = [i for i in p if shape[i] != 1]
    if long != sorted(long):
        return None
    target = [d if isinstance(d := shape[i], int) else -1 for i in p]
    return target if target.count(-1) <= 1 and 0 not in target else None


def _reshape(rewriter: ModelRewriter, node: Node) -> int:
    """Replace a Transpose that moves no data by a Reshape."""
    target, p = _only_ones(rewriter, node), permutation(rewriter, node)
    if target is None or rewriter.opset < 5 or p == tuple(range(len(p or ()))):
        return 0
    node.change(op_type="Reshape", attributes={})
    set_ints(rewriter, node, "shape", 1, 5, target)
    return 1
