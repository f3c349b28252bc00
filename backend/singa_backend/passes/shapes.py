"""`simplify_shapes`: replace shape arithmetic by constants if sizes are known, and use 0 and -1 in a Reshape for open sizes.

    Shape(x) -> Gather(1) -> Unsqueeze -> Concat(.., -1) -> Reshape        x: [n, 12, 64]

Only operators that move sizes are followed; once a value is constant, `fold_constants` computes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .graph import GraphEditor, Node
from .operator_facts import axes_since, get_ints, set_ints

FEW = 64
"""Maximum entries of a vector that is followed."""


@dataclass(frozen=True)
class Size:
    """An open size: that of one axis of a value, or one that the model names."""

    name: str
    axis: int = -1


Entry = int | Size | None


@dataclass(frozen=True)
class Vector:
    """A scalar or a list of integers, as far as they are known."""

    entries: tuple[Entry, ...]
    scalar: bool = False

    @property
    def known(self) -> bool:
        return all(isinstance(e, int) for e in self.entries)


def simplify_shapes(net: GraphEditor) -> int:
    """Replace known sizes, and the shape inputs of Reshapes, by constants."""
    found: dict[str, Vector] = {}
    count = 0
    for node in list(net.nodes):
        rule = _RULES.get(node.op_type) if node.plain and not node.domain and node.only_output() else None
        vector = rule(_Reader(net, found), node) if rule is not None else None
        if vector is None or len(vector.entries) > FEW:
            continue
        out = node.outputs[0]
        found[out] = vector
        if vector.known and not node.is_("Constant") and out not in net.outputs and out not in net.pinned and net.has_users(out):
            array = np.asarray([e for e in vector.entries if isinstance(e, int)], _dtype(net, node))
            net.replace(out, net.add_constant(array.reshape(()) if vector.scalar else array, out))
            net.remove(node)
            count += 1
    for node in list(net.nodes):
        if node.is_("Reshape") and net.opset >= 5:
            count += _reshape(net, node, _Reader(net, found))
    return count


def _dtype(net: GraphEditor, node: Node) -> np.dtype[np.generic]:
    """int32 if the node's output is; all other followed values are int64."""
    return np.dtype(np.int32 if net.type(node.outputs[0]).dtype == 6 else np.int64)


class _Reader:
    def __init__(self, net: GraphEditor, found: dict[str, Vector]) -> None:
        self.net, self.found = net, found

    def vector(self, name: str) -> Vector | None:
        """What is known of a value."""
        if name in self.found:
            return self.found[name]
        if not self.net.is_constant(name) or self.net.constant_bytes(name) > 8 * FEW:
            return None
        array = self.net.constant(name)
        if array is None or array.dtype not in (np.int64, np.int32) or array.ndim > 1:
            return None
        return Vector(tuple(int(v) for v in array.reshape(-1)), array.ndim == 0)

    def sizes(self, name: str) -> tuple[Entry, ...] | None:
        """The sizes of a value; an open size without a name is identified by its axis."""
        shape = self.net.shape(name)
        if shape is None:
            return None
        return tuple(Size(d) if isinstance(d, str) else Size(name, i) if d is None else d for i, d in enumerate(shape))

    def ints(self, node: Node, name: str, index: int, since: int) -> tuple[bool, tuple[int, ...] | None]:
        return get_ints(self.net, node, name, index, since)


def _shape(r: _Reader, node: Node) -> Vector | None:
    sizes = r.sizes(node.inputs[0])
    if sizes is None:
        return None
    start, end = node.get("start", 0), node.get("end", len(sizes))
    rank = len(sizes)
    start, end = (min(max(i + rank if i < 0 else i, 0), rank) for i in (start, end))
    return Vector(sizes[start:end])


def _size(r: _Reader, node: Node) -> Vector | None:
    shape = r.net.static(node.inputs[0])
    return None if shape is None else Vector((int(np.prod(shape, dtype=np.int64)),), True)


def _same(r: _Reader, node: Node) -> Vector | None:
    return r.vector(node.inputs[0])


def _cast(r: _Reader, node: Node) -> Vector | None:
    """To an integer type that holds the values: open sizes are followed into int64 only."""
    vector, to = r.vector(node.inputs[0]), node.get("to")
    if vector is None or to not in (6, 7) or (to == 6 and not vector.known):
        return None
    fits = all(-(2**31) <= e < 2**31 for e in vector.entries if isinstance(e, int))
    return vector if to == 7 or fits else None


def _gather(r: _Reader, node: Node) -> Vector | None:
    vector, at = r.vector(node.inputs[0]), r.vector(node.inputs[1])
    if vector is None or at is None or vector.scalar or not at.known or node.get("axis", 0) not in (0, -1):
        return None
    n = len(vector.entries)
    places = [e for e in at.entries if isinstance(e, int)]
    return Vector(tuple(vector.entries[i] for i in places), at.scalar) if all(-n <= i < n for i in places) else None


def _slice(r: _Reader, node: Node) -> Vector | None:
    vector = r.vector(node.inputs[0])
    (_, starts), (_, ends), (has_axes, axes), (has_steps, steps) = (
        r.ints(node, name, i, 10) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    if vector is None or vector.scalar or starts is None or ends is None or len(starts) != 1 or len(ends) != 1:
        return None
    if (has_axes and axes not in ((0,), (-1,))) or (has_steps and steps != (1,)):
        return None
    return Vector(vector.entries[starts[0] : ends[0]])


def _concat(r: _Reader, node: Node) -> Vector | None:
    parts = [_unknown(r, n) if (v := r.vector(n)) is None else v for n in node.inputs]
    if any(p is None or p.scalar for p in parts) or node.get("axis", 0) not in (0, -1):
        return None
    return Vector(tuple(e for p in parts if p is not None for e in p.entries))


def _unknown(r: _Reader, name: str) -> Vector | None:
    """A vector of a known length and unknown entries."""
    kind, shape = r.net.type(name), r.net.static(name)
    if kind.dtype != 7 or shape is None or len(shape) != 1 or shape[0] > FEW:
        return None
    return Vector((None,) * shape[0])


def _unsqueeze(r: _Reader, node: Node) -> Vector | None:
    vector, axes = r.vector(node.inputs[0]), r.ints(node, "axes", 1, axes_since(node))[1]
    if vector is None and r.net.shape(node.inputs[0]) == () and r.net.type(node.inputs[0]).dtype == 7:
        vector = Vector((None,), True)
    return Vector(vector.entries) if vector is not None and vector.scalar and axes in ((0,), (-1,)) else None


def _squeeze(r: _Reader, node: Node) -> Vector | None:
    vector = r.vector(node.inputs[0])
    given, axes = r.ints(node, "axes", 1, axes_since(node))
    if vector is None or vector.scalar or len(vector.entries) != 1 or (given and axes not in ((0,), (-1,))):
        return None
    return Vector(vector.entries, True)


def _reshaped(r: _Reader, node: Node) -> Vector | None:
    vector, target = r.vector(node.inputs[0]), r.ints(node, "shape", 1, 5)[1]
    if vector is None or target not in ((), (-1,), (len(vector.entries),)) or target == (0,):
        return None
    return Vector(vector.entries, target == ())


_RULES: dict[str, Callable[[_Reader, Node], Vector | None]] = {
    "Shape": _shape, "Size": _size, "Identity": _same, "Cast": _cast, "Gather": _gather, "Slice": _slice, "Concat": _concat,
    "Unsqueeze": _unsqueeze, "Squeeze": _squeeze, "Reshape": _reshaped,
}  # fmt: skip


def _reshape(net: GraphEditor, node: Node, r: _Reader) -> int:
    """Write the target of a Reshape as a constant: 0 for the input's size at the same axis, -1 once."""
    vector = r.vector(node.input(1))
    if vector is None or vector.scalar or net.is_constant(node.input(1)) or node.get("allowzero", 0):
        return 0
    target = constant_target(vector.entries, r.sizes(node.inputs[0]))
    if target is None:
        return 0
    set_ints(net, node, "shape", 1, 5, target)
    return 1


def constant_target(wanted: Sequence[Entry], sizes: Sequence[Entry] | None) -> list[int] | None:
    """The target with 0 and -1 for open sizes; None if they cannot express it.

    Known sizes are written as they are.  An open size of the input's same axis is 0: [n, 12, 64] of an input [n, m, 64] is
    [0, 12, 64].  One other open size is -1, unless a 0 occurs too, because it may copy a size of zero.
    """
    target: list[int | None] = []
    for i, e in enumerate(wanted):
        own = sizes[i] if sizes is not None and i < len(sizes) else None
        target.append(e if isinstance(e, int) else 0 if e is not None and e == own else None)
    if None in target and (target.count(None) > 1 or -1 in target or 0 in target):
        return None  # the size that 0 copies may be zero, and then -1 is undefined
    return [-1 if t is None else t for t in target]
