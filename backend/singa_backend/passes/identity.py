"""`remove_identity`: remove nodes whose output equals their input."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..dtypes import is_float
from .graph import GraphEditor, Node, Shape
from .operator_facts import axes_since, drops_nothing, get_ints, holds_only, permutation


def remove_identity(net: GraphEditor) -> int:
    """Remove nodes whose output equals an input; a node between an input and an output of the graph becomes an Identity."""
    count = 0
    for node in list(net.nodes):
        source = _same(net, node)
        if not source or not node.outputs[0]:
            continue
        if net.bypass(node, source):
            count += 1
        elif node.op_type != "Identity" and node.only_output() and node.outputs[0] not in net.pinned:
            net.rewire(node, [source])
            node.op_type, node.attributes, node.outputs = "Identity", {}, node.outputs[:1]
            count += 1
    return count


def _same(net: GraphEditor, node: Node) -> str:
    """The input that equals the node's first output; "" if there is none."""
    if not node.plain or node.domain or not node.inputs:
        return ""
    rule = _RULES.get(node.op_type)
    if rule is None or not rule(net, node):
        return _neutral(net, node) if node.op_type in _NEUTRAL else ""
    return node.inputs[0]


def _cast(net: GraphEditor, node: Node) -> bool:
    dtype = net.type(node.inputs[0]).dtype
    to = net.type(node.input(1)).dtype if node.op_type == "CastLike" else node.get("to")
    return dtype != 0 and dtype == to


def _dropout(net: GraphEditor, node: Node) -> bool:
    return drops_nothing(net, node)


def _transpose(net: GraphEditor, node: Node) -> bool:
    perm = permutation(net, node)
    return perm is not None and perm == tuple(range(len(perm)))


def _reshape(net: GraphEditor, node: Node) -> bool:
    shape, target = net.shape(node.inputs[0]), get_ints(net, node, "shape", 1, 5)[1]
    if shape is None or target is None or len(shape) != len(target):
        return False
    copies = not node.get("allowzero", 0)
    open_ = [i for i, (d, t) in enumerate(zip(shape, target, strict=True)) if not (d == t or (t == 0 and copies))]
    # One size may be inferred (-1) if none of the others can be 0: [-1, 3] of [n, 3].
    return not open_ or (len(open_) == 1 and target[open_[0]] == -1 and 0 not in shape)


def _flatten(net: GraphEditor, node: Node) -> bool:
    return net.rank(node.inputs[0]) == 2 and node.get("axis", 1) in (1, -1)


def _squeeze(net: GraphEditor, node: Node) -> bool:
    given, axes = get_ints(net, node, "axes", 1, axes_since(node))
    if not given:
        shape = net.static(node.inputs[0])
        return node.op_type == "Squeeze" and shape is not None and 1 not in shape
    return node.op_type == "Unsqueeze" and axes == ()


def _expand(net: GraphEditor, node: Node) -> bool:
    shape, target = net.shape(node.inputs[0]), get_ints(net, node, "", 1, 0)[1]
    if shape is None or target is None or len(target) > len(shape):
        return False
    return _broadcasts(target, shape)


def _broadcasts(small: tuple[int, ...], shape: Shape) -> bool:
    """Whether broadcasting with `small` does not change `shape`."""
    return all(s == 1 or s == d for s, d in zip(small[::-1], shape[::-1], strict=False))


def _tile(net: GraphEditor, node: Node) -> bool:
    repeats = get_ints(net, node, "", 1, 0)[1]
    return net.opset >= 6 and repeats is not None and all(r == 1 for r in repeats)


def _pad(net: GraphEditor, node: Node) -> bool:
    pads = get_ints(net, node, "pads", 1, 11)[1]
    return pads is not None and not any(pads)


def _slice(net: GraphEditor, node: Node) -> bool:
    parts = [get_ints(net, node, name, i, 10) for i, name in enumerate(("starts", "ends", "axes", "steps"), 1)]
    (_, starts), (_, ends), (has_axes, axes), (has_steps, steps) = parts
    shape = net.shape(node.inputs[0])
    if starts is None or ends is None or (has_axes and axes is None) or (has_steps and steps is None):
        return False
    axes = axes if axes is not None else tuple(range(len(starts)))
    if any(starts) or any(s != 1 for s in steps or ()):
        return False

    def whole(axis: int, end: int) -> bool:
        if end >= np.iinfo(np.int32).max:
            return True
        size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
        return isinstance(size, int) and end >= size

    return all(map(whole, axes, ends))


def _alone(net: GraphEditor, node: Node) -> bool:
    return len(node.inputs) == 1


def _split(net: GraphEditor, node: Node) -> bool:
    return len(node.outputs) == 1


def _clip(net: GraphEditor, node: Node) -> bool:
    """Before opset 11 the bounds had finite defaults, which clip infinities."""
    return net.opset >= 11 and not node.input(1) and not node.input(2)


_RULES: dict[str, Callable[[GraphEditor, Node], bool]] = {
    "Identity": lambda net, node: True, "Cast": _cast, "CastLike": _cast, "Dropout": _dropout, "Transpose": _transpose,
    "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _squeeze, "Expand": _expand, "Tile": _tile,
    "Pad": _pad, "Slice": _slice, "Concat": _alone, "Sum": _alone, "Max": _alone, "Min": _alone, "Split": _split, "Clip": _clip,
}  # fmt: skip

# x * 1, x / 1, x - 0 and x + -0.0 equal x, including the sign of a zero; x + 0.0 turns -0.0 into 0.0, and x * 0 is NaN for NaN.
_NEUTRAL: dict[str, tuple[float, bool]] = {
    "Mul": (1, True), "Div": (1, False), "Add": (-0.0, True), "Sub": (0.0, False), "And": (1, True), "Or": (0, True),
}  # fmt: skip


def _neutral(net: GraphEditor, node: Node) -> str:
    """The other input of a node with a neutral constant that does not change its shape; "" if there is none."""
    value, commutes = _NEUTRAL[node.op_type]
    if net.opset < 7 or len(node.inputs) != 2:
        return ""
    for x, c in ((0, 1), (1, 0)) if commutes else ((0, 1),):
        name, constant = node.inputs[x], net.constant(node.inputs[c], 1 << 20)
        if constant is None or not holds_only(constant, value):
            continue
        if node.op_type in ("Mul", "Div") and not (is_float(constant.dtype) or constant.dtype.kind in "iu"):
            continue
        shape = net.shape(name)
        if constant.ndim == 0:
            return name
        if shape is not None and constant.ndim <= len(shape) and _broadcasts(constant.shape, shape):
            return name
    return ""
