"""`move_out_of_loops`: move loop-invariant nodes before a loop, and Transposes of its scan outputs after it."""

from __future__ import annotations

from onnx import helper

from ..ir.declaration import has_trait
from .graph import GraphEditor
from .index import NodeEditor, Type
from .operator_facts import deterministic, permutation

MOST = 1 << 20
"""Maximum bytes of a constant that is copied from a body to the outer graph."""


def move_out_of_loops(graph: GraphEditor) -> int:
    """Move invariant nodes out of the bodies of Loops and Scans, and Transposes of their scan outputs after them."""
    count = 0
    for node in list(graph.nodes):
        if not node.is_("Loop", "Scan") or "body" not in node.graphs or (node.is_("Scan") and graph.opset < 9):
            continue
        if _states(node) >= 0:
            body, runs = node.graphs["body"], _runs(graph, node)
            graph.release(node)  # what its body reads may change
            count += _invariant(graph, node, body, runs)
            count += sum(_scan_output(graph, node, body, i) for i in range(_states(node), len(node.outputs))) if runs else 0
            graph.attach(node)
    return count


def _states(node: NodeEditor) -> int:
    """The number of states among the node's outputs; scan outputs follow them."""
    return len(node.inputs) - (2 if node.op_type == "Loop" else node.get("num_scan_inputs", 0))


def _runs(graph: GraphEditor, node: NodeEditor) -> bool:
    """Whether the body is known to run at least once."""
    if node.op_type == "Scan":
        n = _states(node)
        axes = node.get("scan_input_axes") or (0,) * (len(node.inputs) - n)
        for name, axis in zip(node.inputs[n:], axes, strict=False):
            shape = graph.shape(name)
            size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
            if isinstance(size, int):
                return size > 0
        return False
    trips, going = (graph.constant(n) if n else None for n in (node.input(0), node.input(1)))
    if (node.input(0) and (trips is None or trips.size != 1 or trips.reshape(-1)[0] < 1)) or not (node.input(0) or node.input(1)):
        return False
    return not node.input(1) or (going is not None and going.size == 1 and bool(going.reshape(-1)[0]))


def _invariant(graph: GraphEditor, loop: NodeEditor, body: GraphEditor, runs: bool) -> int:
    """Hoist every node of the body that depends on none of its values.

    A node moves only if the body runs at least once, so that it would be computed anyway, or if it cannot fail.
    """
    count = 0
    for node in list(body.nodes):
        outer = [n for n in node.inputs if n and not body.defines(n)]
        own = [n for n in node.inputs if n and body.defines(n)]
        if not outer or node.graphs or not node.plain or node.is_("Identity", "Constant"):
            continue
        if not deterministic(body, node) or not (runs or _cannot_fail(body, node)):
            continue
        if any(not body.is_constant(n) or body.constant_bytes(n) > MOST for n in own):
            continue
        arrays = {n: body.constant(n, MOST) for n in own}
        if any(a is None for a in arrays.values()) or any(o in body.pinned for o in node.outputs):
            continue
        made = {n: graph.add_constant(a, n, body.trains(a, n)) for n, a in arrays.items() if a is not None}
        _hoist(graph, loop, body, node, made)
        count += 1
    return count


def _cannot_fail(body: GraphEditor, node: NodeEditor) -> bool:
    """Whether the node computes for all values: by its operator, or as a Transpose of a known rank."""
    if has_trait(node.domain, node.op_type, "cannot_fail"):
        return True
    perm = permutation(body, node) if node.is_("Transpose") else None
    return perm is not None and body.rank(node.input(0)) == len(perm)


def _hoist(graph: GraphEditor, loop: NodeEditor, body: GraphEditor, node: NodeEditor, constants: dict[str, str]) -> None:
    names = [graph.context.fresh(o) if o else "" for o in node.outputs]
    inputs = [constants.get(n, n) for n in node.inputs]
    new = NodeEditor(
        node.op_type, inputs, names, dict(node.attributes), node.domain, graph.context.fresh(node.name or node.op_type)
    )
    graph.insert(new, before=loop)
    types = {name: body.type(o) for o, name in zip(node.outputs, names, strict=True) if o}
    place = body.following(node)
    body.remove(node)
    for old, name in zip(node.outputs, names, strict=True):
        if not old:
            continue
        body.replace(old, name)
        if old in body.outputs:  # onnx's checker requires that a node of the body produces its output
            body.insert(NodeEditor("Identity", [name], [old]), before=place)
    graph.types.update(types)


def _scan_output(graph: GraphEditor, loop: NodeEditor, body: GraphEditor, i: int) -> int:
    """Move a Transpose of scan output `i` after the loop, where it permutes all iterations at once."""
    at = i + (1 if loop.op_type == "Loop" else 0)  # a Loop's body returns its condition first
    if at >= len(body.outputs) or not loop.outputs[i]:
        return 0
    name, out = body.outputs[at], loop.outputs[i]
    node = body.producer(name)
    if node is None or not node.is_("Transpose") or body.outputs.count(name) > 1 or name in body.pinned or body.has_users(name):
        return 0
    source, perm = node.inputs[0], permutation(body, node)
    maker = body.producer(source)
    kind = body.type(source)
    if perm is None or maker is None or not kind.dtype or out in graph.pinned:
        return 0
    axis = 0
    if loop.op_type == "Scan":
        n = len(perm) + 1
        axes = loop.get("scan_output_axes") or (0,) * (len(loop.outputs) - _states(loop))
        axis = axes[i - _states(loop)]
        axis += n if axis < 0 else 0
        if not 0 <= axis < n:
            return 0
    inner = source
    if source in body.outputs:  # one value cannot be two outputs of a body
        inner = body.context.fresh(source)
        body.insert(NodeEditor("Identity", [source], [inner]), after=maker)
    body.name_outputs([*body.outputs[:at], inner, *body.outputs[at + 1 :]])
    shape = (None,) * len(perm) if kind.shape is None else kind.shape
    sizes = [d if isinstance(d, int) else None for d in shape]
    body.retyped[at] = helper.make_tensor_type_proto(kind.dtype, sizes)
    body.remove(node)
    stacked = graph.context.fresh(out + "_stacked")
    graph.rename_output(loop, i, stacked)
    # The axis of the iterations keeps its place; the others move around it.
    others = [p + (p >= axis) for p in perm]
    whole = [*others[:axis], axis, *others[axis:]]
    graph.add("Transpose", [stacked], name=out, after=loop, type=graph.types.get(out, Type()), perm=whole)
    return 1
