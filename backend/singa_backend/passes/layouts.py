"""How each operator changes if a Transpose moves from its input to its outputs: its axes, other inputs and output layouts.

Axis j of y = Transpose(x, p) is axis p[j] of x.  A rule specifies how the node computes from x what it computed from y: new
attributes and inputs, and for each output the permutation q with output = Transpose(new output, q).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..ir.declaration import has_trait, newest_declaration
from ..ir.graph import Node, Value
from ..rewriting.identity import drops_nothing
from ..rewriting.transposes import compose, invert, permutation
from .operator_facts import axes_since, get_ints, inside, set_ints
from .rewriter import ModelRewriter
from .values import Type

Perm = tuple[int, ...]
LARGEST = 1 << 24
"""Maximum bytes of a constant that is transposed."""


@dataclass
class Moved:
    """The changes of a node that a rule requires.

    Attributes:
        perms: the permutation of each output.
        attributes: new attributes; None removes one.
        others: inputs to lay out like x, by slot; None if only one input may be y.
        lists: new integer lists, (name, input, first opset as an input, values).
        after: the indices of a Gather to insert after the node, for a Shape, whose result is a vector; None for none.
    """

    perms: Sequence[Perm]
    attributes: dict[str, Any] = field(default_factory=dict)
    others: Sequence[int] | None = None
    lists: Sequence[tuple[str, int, int, Sequence[int]]] = ()
    after: Sequence[int] | None = None


Rule = Callable[[ModelRewriter, Node, Perm], Moved | None]


def moved(rewriter: ModelRewriter, node: Node, slot: int, p: Perm) -> Moved | None:
    """How a node computes from x in place of y = Transpose(x, p) in its input `slot`; None if it cannot."""
    if not movable(node):
        return None
    if has_trait("", node.op_type, "broadcasting"):
        return _broadcast(rewriter, node, slot, p)
    if node.op_type == "Concat":
        return _concat(rewriter, node, p)
    rule = _rule(node.op_type)
    if rule is None or slot != 0 or node.inputs.count(node.inputs[0]) > 1 or not all(node.outputs):
        return None
    return rule(rewriter, node, p)


# --- element by element


def _unary(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    return Moved([p])


def _dropout(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    return Moved([p] * len(node.outputs)) if drops_nothing(rewriter, node) else None


def _broadcast(rewriter: ModelRewriter, node: Node, slot: int, p: Perm) -> Moved | None:
    """All inputs get the same layout; lower ranks are padded with leading ones.  Old versions (before 7 or 8) are refused."""
    declaration = newest_declaration("", node.op_type)
    if declaration is None or rewriter.opset < declaration.versions[0] or len(node.outputs) != 1:
        return None
    others = [i for i, n in enumerate(node.inputs) if n is not node.inputs[slot]]
    if not all(can_lay_out(rewriter, node.inputs[i], len(p)) for i in others):
        return None
    return Moved([p], others=others)


def _quantized(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    """Per tensor or per axis; not per block."""
    if node.get("block_size", 0) or len(node.outputs) != 1:
        return None
    return _axis(rewriter, node, p, 1) if rewriter.opset >= 13 else Moved([p])


# --- one axis


def _axis(rewriter: ModelRewriter, node: Node, p: Perm, default: int = -1) -> Moved | None:
    axes = inside([node.get("axis", default)], len(p))
    return None if axes is None else Moved([p] * len(node.outputs), {"axis": p[axes[0]]})


def _softmax(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    """Before opset 13 `axis` and later axes were flattened: they may only move among themselves."""
    if rewriter.opset >= 13:
        return _axis(rewriter, node, p)
    axes = inside([node.get("axis", 1)], len(p))
    return Moved([p]) if axes is not None and min(p[axes[0] :], default=0) >= axes[0] else None


def _trailing(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    """Normalized over `axis` and later axes: these must not move."""
    axes = inside([node.get("axis", -1)], len(p))
    if axes is None or len(node.outputs) != 1 or any(p[j] != j for j in range(axes[0], len(p))):
        return None
    return Moved([p], {"axis": axes[0]})


def _channel(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    """Channels must stay axis 1; all but BatchNormalization also require samples at axis 0."""
    fixed = p[:2] == (0, 1) if node.op_type != "BatchNormalization" else len(p) > 1 and p[1] == 1
    return Moved([p]) if fixed and len(node.outputs) == 1 else None


def _cumulative(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    axis = rewriter.constant(node.input(1))
    axes = None if axis is None or axis.size != 1 or axis.dtype != np.int64 else inside([int(axis.reshape(-1)[0])], len(p))
    return None if axes is None else Moved([p], lists=[("axis", 1, 0, [p[axes[0]]])])


def _concat(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    axes = inside([node.get("axis", 1)], len(p))
    if axes is None or not all(rewriter.editor.rank(n) == len(p) and can_lay_out(rewriter, n, len(p)) for n in node.inputs):
        return None
    return Moved([p], {"axis": p[axes[0]]}, others=range(len(node.inputs)))


def _split(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    return _axis(rewriter, node, p, 0)


# --- lists of axes


def _reduce(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    given, axes = get_ints(rewriter, node, "axes", 1, axes_since(node))
    if (given and axes is None) or (not axes and node.get("noop_with_empty_axes", 0)):
        return None
    found = inside(axes or tuple(range(len(p))), len(p))
    if found is None:
        return None
    lists = [("axes", 1, axes_since(node), sorted(p[a] for a in found))] if axes else []
    return Moved([p if node.get("keepdims", 1) else _without(p, found)], lists=lists)


def _arg(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    axes = inside([node.get("axis", 0)], len(p))
    if axes is None:
        return None
    return Moved([p if node.get("keepdims", 1) else _without(p, axes)], {"axis": p[axes[0]]})


def _without(p: Perm, axes: Sequence[int]) -> Perm:
    """The permutation of the remaining axes when `axes` of y are removed."""
    kept = [p[j] for j in range(len(p)) if j not in axes]
    order = sorted(kept)
    return tuple(order.index(k) for k in kept)


def _squeeze(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    given, axes = get_ints(rewriter, node, "axes", 1, axes_since(node))
    if not given:
        shape = rewriter.editor.static(node.inputs[0])
        axes = None if shape is None else tuple(i for i, d in enumerate(shape) if d == 1)
    found = inside(axes, len(p))
    if found is None:
        return None
    return Moved([_without(p, found)], lists=[("axes", 1, axes_since(node), sorted(p[a] for a in found))] if given else [])


def _unsqueeze(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    axes = get_ints(rewriter, node, "axes", 1, axes_since(node))[1]
    rank = len(p) + len(axes or ())
    found = inside(axes, rank)
    if found is None:
        return None
    free = [i for i in range(rank) if i not in found]
    q = list(range(rank))
    for j, place in enumerate(free):
        q[place] = free[p[j]]
    return Moved([tuple(q)])


def _slice(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    given, axes = get_ints(rewriter, node, "axes", 3, 10)
    if given and axes is None:
        return None
    if axes is None:
        starts = get_ints(rewriter, node, "starts", 1, 10)[1]
        if starts is None:
            return None
        axes = tuple(range(len(starts)))
    found = inside(axes, len(p))
    return None if found is None else Moved([p], lists=[("axes", 3, 10, [p[a] for a in found])])


# --- one number for each axis


def _pad(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    if node.input(3):
        axes = inside(get_ints(rewriter, node, "axes", 3, 18)[1], len(p))
        return None if axes is None else Moved([p], lists=[("axes", 3, 18, [p[a] for a in axes])])
    pads = get_ints(rewriter, node, "pads", 1, 11)[1]
    if pads is None or len(pads) != 2 * len(p) or rewriter.opset < 2:
        return None
    return Moved([p], lists=[("pads", 1, 11, [*_spread(pads[: len(p)], p), *_spread(pads[len(p) :], p)])])


def _spread(values: Sequence[Any], p: Perm) -> list[Any]:
    """Reorder one value for each axis of y as one for each axis of x."""
    inverse = invert(p)
    return [values[inverse[k]] for k in range(len(p))]


def _tile(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    repeats = get_ints(rewriter, node, "", 1, 0)[1]
    if rewriter.opset < 6 or repeats is None or len(repeats) != len(p):
        return None
    return Moved([p], lists=[("repeats", 1, 0, _spread(repeats, p))])


def _expand(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    shape = get_ints(rewriter, node, "", 1, 0)[1]
    if shape is None or len(shape) > len(p):
        return None
    return Moved([p], lists=[("shape", 1, 0, _spread((1,) * (len(p) - len(shape)) + shape, p))])


def _resize(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    """Scales or sizes move with their axes.  If it interpolates, samples and channels stay first, as engines require."""
    axes = inside(node.get("axes"), len(p)) if node.get("axes") is not None else None
    if node.get("axes") is not None and axes is None:
        return None
    if node.get("coordinate_transformation_mode") == "tf_crop_and_resize":
        return None
    slot = 1 if rewriter.opset < 11 else 3 if node.input(3) else 2
    if axes is not None:
        if node.get("mode", "nearest") != "nearest" and any(p[a] < 2 for a in axes):
            return None
        return Moved([p], {"axes": [p[a] for a in axes]})
    values = rewriter.constant(node.input(slot))
    if values is None or values.size != len(p):
        return None
    spread = _spread(values.reshape(-1).tolist(), p)
    if node.get("mode", "nearest") != "nearest":
        shape = rewriter.editor.shape(node.inputs[0])
        x = [1.0] * len(p) if slot != 3 else _spread(shape, p) if shape is not None else [None] * len(p)
        if spread[:2] != list(x[:2]):
            return None
    return Moved([p], lists=[("sizes" if slot == 3 else "scales", slot, 0, spread)])


def _upsample(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    if rewriter.opset < 9:
        scales = node.get("scales")
        if scales is None or len(scales) != len(p):
            return None
        spread = _spread(scales, p)
        return Moved([p], {"scales": spread}) if node.get("mode", "nearest") == "nearest" or spread[:2] == [1, 1] else None
    return _resize(rewriter, node, p) if rewriter.opset < 10 else None


def _shape(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    """Shape(y) is Shape(x) in another order."""
    places = p[slice(node.get("start", 0), node.get("end"))]
    return Moved([()], {"start": None, "end": None}, after=places)


def _size(rewriter: ModelRewriter, node: Node, p: Perm) -> Moved | None:
    return Moved([()])


RULES: dict[str, Rule] = {
    "Dropout": _dropout, "QuantizeLinear": _quantized, "DequantizeLinear": _quantized,
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), _softmax), "LpNormalization": _axis, "CumSum": _cumulative,
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _trailing),
    **dict.fromkeys(("BatchNormalization", "InstanceNormalization", "GroupNormalization"), _channel),
    "Split": _split, "ArgMax": _arg, "ArgMin": _arg, "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze, "Slice": _slice, "Pad": _pad, "Tile": _tile, "Expand": _expand, "Resize": _resize,
    "Upsample": _upsample, "Shape": _shape, "Size": _size,
}  # fmt: skip


def _rule(name: str) -> Rule | None:
    """The rule of an operator: by its traits, or from the table."""
    if has_trait("", name, "unary"):
        return _unary
    return _reduce if has_trait("", name, "reduction") else RULES.get(name)


def movable(node: Node) -> bool:
    """Whether a Transpose may move through a node, or merge with it."""
    name = node.op_type
    if not node.plain or node.domain:
        return False
    return name in ("Concat", "Transpose") or has_trait("", name, "broadcasting") or _rule(name) is not None


# --- the other inputs


def can_lay_out(rewriter: ModelRewriter, value: Value | None, rank: int) -> bool:
    """Whether a value can get the layout of x: its rank is known and not larger, and no large constant is copied."""
    own = rewriter.editor.rank(value)
    return own is not None and own <= rank and rewriter.constant_bytes(value) <= LARGEST


def lay_out(rewriter: ModelRewriter, value: Value, p: Perm, before: Node) -> Value:
    """The value whose Transpose(p) is this value with leading ones; new nodes are inserted before `before`."""
    editor, graph = rewriter.editor, rewriter.graph
    rank, n = editor.rank(value), len(p)
    assert rank is not None
    if rank == 0:
        return value
    inverse = invert(p)
    dtype = editor.type(value).dtype
    array = rewriter.constant(value, LARGEST)
    if array is not None:
        turned = array.reshape((1,) * (n - rank) + array.shape).transpose(inverse)
        return editor.add_constant(graph, turned, value.original.name, editor.trains(array, value))
    axes = [k for k in range(n) if inverse[k] >= n - rank]  # axes of the result that come from axes of the value
    order = tuple(inverse[k] - (n - rank) for k in axes)
    maker = value.producer
    if maker is not None and maker.is_("Transpose"):
        q, x = permutation(rewriter, maker), maker.input(0)
        if q is not None and len(q) == rank and x is not None:
            value, order = x, compose(q, order)
    shape = editor.shape(value)
    if order != tuple(range(rank)):
        shape = None if shape is None else tuple(shape[i] for i in order)
        value = editor.add(graph, "Transpose", [value], before=before, like=value.original.name, perm=order)
        editor.types[value] = Type(dtype, shape)
    first = axes[0]
    ones = [k - first for k in range(first, n) if k not in axes]
    if not ones:
        return value
    full = list(shape) if shape is not None else None
    if full is not None:
        for k in ones:
            full.insert(k, 1)
    value = editor.add(graph, "Unsqueeze", [value], before=before, like=value.original.name)
    editor.types[value] = Type(dtype, None if full is None else tuple(full))
    if value.producer is not None:
        set_ints(rewriter, value.producer, "axes", 1, axes_since(value.producer), ones)
    return value
