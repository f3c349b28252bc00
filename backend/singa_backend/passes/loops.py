"""`move_out_of_loops`: move loop-invariant nodes before a loop, and Transposes of its scan outputs after it."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import helper

from ..ir.declaration import has_trait
from ..ir.graph import Graph, Node, Value
from ..rewriting.transposes import permutation
from .model import ModelEditor
from .operator_facts import deterministic
from .rewriter import ModelRewriter

MOST = 1 << 20
"""Maximum bytes of a constant that is copied from a body to the outer graph."""


def move_out_of_loops(rewriter: ModelRewriter) -> int:
    """Move invariant nodes out of the bodies of Loops and Scans, and Transposes of their scan outputs after them."""
    graph, editor, count = rewriter.graph, rewriter.editor, 0
    for node in graph.nodes:
        body = node.attributes.get("body")
        if not node.is_("Loop", "Scan") or not isinstance(body, Graph) or (node.is_("Scan") and rewriter.opset < 9):
            continue
        if _states(node) >= 0:
            runs, within = _runs(editor, node), ModelRewriter(editor, body)
            count += _invariant(graph, node, within, runs)
            if runs:
                count += sum(_scan_output(graph, node, within, i) for i in range(_states(node), len(node.outputs)))
            body.release_captured()
    return count


def _states(node: Node) -> int:
    """The number of states among the node's outputs; scan outputs follow them."""
    return len(node.inputs) - (2 if node.op_type == "Loop" else node.get("num_scan_inputs", 0))


def _runs(editor: ModelEditor, node: Node) -> bool:
    """Whether the body is known to run at least once."""
    if node.op_type == "Scan":
        n = _states(node)
        axes = node.get("scan_input_axes") or (0,) * (len(node.inputs) - n)
        for value, axis in zip(node.inputs[n:], axes, strict=False):
            shape = editor.shape(value)
            size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
            if isinstance(size, int):
                return size > 0
        return False
    first, second = node.input(0), node.input(1)
    trips, going = editor.constant(first), editor.constant(second)
    if (first is not None and (trips is None or trips.size != 1 or trips.reshape(-1)[0] < 1)) or first is second is None:
        return False
    return second is None or (going is not None and going.size == 1 and bool(going.reshape(-1)[0]))


def _invariant(graph: Graph, loop: Node, within: ModelRewriter, runs: bool) -> int:
    """Hoist every node of the body that depends on none of its values.

    A node moves only if the body runs at least once, so that it would be computed anyway, or if it cannot fail.
    """
    count, editor = 0, within.editor
    for node in within.graph.nodes:
        own = [v for v in node.inputs if v is not None and v not in loop.captures]
        outer = any(v is not None and v in loop.captures for v in node.inputs)
        if not outer or node.bodies or not node.plain or node.is_("Identity", "Constant"):
            continue
        if not deterministic(within, node) or not (runs or _cannot_fail(within, node)):
            continue
        if any(not editor.is_constant(v) or editor.constant_bytes(v) > MOST for v in own):
            continue
        arrays = {v: editor.constant(v, MOST) for v in own}
        if any(a is None for a in arrays.values()) or any(o.pinned for o in node.results):
            continue
        copies = {v: editor.add_constant(graph, a, v.name, editor.trains(a, v)) for v, a in arrays.items() if a is not None}
        _hoist(editor, graph, loop, node, loop.captures | copies)
        count += 1
    return count


def _cannot_fail(within: ModelRewriter, node: Node) -> bool:
    """Whether the node computes for all values: by its operator, or as a Transpose of a known rank."""
    if has_trait(node.domain, node.op_type, "cannot_fail"):
        return True
    perm = permutation(within, node) if node.is_("Transpose") else None
    return perm is not None and within.editor.rank(node.input(0)) == len(perm)


def _hoist(editor: ModelEditor, graph: Graph, loop: Node, node: Node, outer: Mapping[Value, Value]) -> None:
    """Move a node of the body before the loop; `outer` are the values there that it reads."""
    body = node.graph
    assert body is not None
    outputs = [None if o is None else Value(editor.fresh(o.name)) for o in node.outputs]
    inputs = [None if v is None else outer[v] for v in node.inputs]
    name = editor.fresh(node.name or node.op_type)
    graph.insert(Node(node.op_type, inputs, outputs, dict(node.attributes), node.domain, name, node.overload), loop)
    place = body.following(node)
    body.remove(node)
    for old, new in zip(node.outputs, outputs, strict=True):
        if old is None or new is None:
            continue
        editor.types[new] = editor.type(old)
        inner = body.capture(new)
        old.replace_all_uses_with(inner, outputs=False)
        if old.is_output:  # onnx's checker requires that a node of the body produces its output
            body.insert(Node("Identity", [inner], [old]), place)


def _scan_output(graph: Graph, loop: Node, within: ModelRewriter, i: int) -> int:
    """Move a Transpose of scan output `i` after the loop, where it permutes all iterations at once."""
    body, editor = within.graph, within.editor
    at = i + (1 if loop.op_type == "Loop" else 0)  # a Loop's body returns its condition first
    out = loop.outputs[i]
    if at >= len(body.outputs) or out is None:
        return 0
    inner = body.outputs[at]
    node = inner.producer
    if node is None or not node.is_("Transpose") or len(inner.uses) > 1 or inner.pinned:
        return 0
    source, perm = node.inputs[0], permutation(within, node)
    kind = editor.type(source)
    if perm is None or source is None or source.producer is None or not kind.dtype or out.pinned:
        return 0
    axis = 0
    if loop.op_type == "Scan":
        n = len(perm) + 1
        axes = loop.get("scan_output_axes") or (0,) * (len(loop.outputs) - _states(loop))
        axis = axes[i - _states(loop)]
        axis += n if axis < 0 else 0
        if not 0 <= axis < n:
            return 0
    if source in body.outputs:  # one value cannot be two outputs of a body
        copy = Value(editor.fresh(source.name))
        body.insert(Node("Identity", [source], [copy]), body.following(source.producer))
        source = copy
    body.put(at, source)
    shape = (None,) * len(perm) if kind.shape is None else kind.shape
    editor.retyped[source] = helper.make_tensor_type_proto(kind.dtype, [d if isinstance(d, int) else None for d in shape])
    body.remove(node)
    stacked = Value(editor.fresh(out.name + "_stacked"))
    loop.return_(i, stacked)
    # The axis of the iterations keeps its place; the others move around it.
    others = [p + (p >= axis) for p in perm]
    whole = [*others[:axis], axis, *others[axis:]]
    editor.add(graph, "Transpose", [stacked], output=out, after=loop, perm=whole)
    return 1
