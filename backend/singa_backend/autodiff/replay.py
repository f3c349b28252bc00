"""Replay a graph with an interpreter, and take the gradients of subgraphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..errors import UnsupportedModel
from ..interpreters.base import FIRST, Example, Interpreter, Subgraph, element, same, same_attributes
from ..interpreters.builder import Symbol, has_rank
from ..ir.declaration import declarations
from ..ir.graph import Graph, Node
from ..ir.reader import resolve
from ..ir.run_order import run_order
from ..ir.versioned import VersionedOperator
from ..proto.schemas import schemas, version_at
from ..proto.values import Value, declared_type
from ..runtime.failures import rule_errors
from .tape import Tape, Var

Visitor: TypeAlias = Callable[[Interpreter[Any], Node, list[Any], list[Any]], list[Any]]


def replay(
    op: Interpreter[Any],
    graph: Graph,
    inputs: Sequence[Any],
    states: dict[str, Any] | None = None,
    captured: Sequence[Any] = (),
    visitor: Visitor | None = None,
) -> list[Any]:
    """Call an interpreter for each node of a graph; nodes of other opsets are rewritten at the interpreter's.

    Args:
        op: the interpreter.
        graph: the graph.
        inputs: the values of its inputs.
        states: values in place of initializers, by name; the others become constants.
        captured: the values of `graph.captured`, in order.
        visitor: called for each node in place of `visit`, which it may call.

    Returns:
        The outputs of the graph.

    Raises:
        UnsupportedModel: a node cannot be written at the interpreter's opset.
        OperatorError: a rule cannot compute with the inputs of a node.
    """
    program = run_order(graph)
    frame: list[Any] = [None] * program.size
    given = states or {}
    for name, value in graph.initializers.items():
        frame[value.slot] = given[name] if name in given else op.constant(value.constant)
    for slot, fed in zip(program.input_slots, inputs, strict=True):
        frame[slot] = fed
    for value, fed in zip(graph.captured, captured, strict=True):
        frame[value.slot] = fed
    do = visitor or visit

    def visited(node: Node, values: list[Any], here: list[Any]) -> list[Any]:
        with rule_errors(node.op_type, node=node.name, opset=node.opset, version=node.version):
            return do(op, node, values, here)

    program.walk(frame, visited)
    return [frame[s] for s in program.output_slots]


def visit(op: Interpreter[Any], node: Node, inputs: list[Any], frame: list[Any], visitor: Visitor | None = None) -> list[Any]:
    """Call an interpreter for one node; `visitor` is called for the nodes of a function."""
    if node.function is not None:
        padded = [*inputs, *[None] * (len(node.function.inputs) - len(inputs))]
        return replay(op, node.function, padded, visitor=visitor)
    assert node.operator is not None
    if node.forward_graph is not None:
        return gradient_of(op, node.forward_graph, inputs, len(node.attributes["xs"]))
    if (
        op.is_symbolic
        and (node.domain, node.op_type) == ("", "If")
        and (taken := op.constant_value(inputs[0])) is not None
        and taken.size == 1
    ):
        # Exporters write a test for size 1 and a Squeeze into the graph; later ranks are known only if the branch is chosen here.
        branch = node.attributes["then_branch" if taken.item() else "else_branch"]
        return replay(op, branch, [], captured=captured_by(node, branch, frame), visitor=visitor)
    attributes = {n: v for n, v in node.attributes.items() if n in node.given or isinstance(v, Graph)}
    for name, value in attributes.items():
        if isinstance(value, Graph):
            attributes[name] = subgraph_from_graph(op, value, captured_by(node, value, frame), body_examples(op, node, inputs))
    return apply(op, node.operator, inputs, attributes, len(node.outputs), tuple(o is not None for o in node.outputs))


def captured_by(node: Node, body: Graph, frame: list[Any]) -> list[Any]:
    """The values that a body of a node captures, from the values of the node's graph."""
    return [frame[node.captures[v].slot] for v in body.captured]


def gradient_of(op: Interpreter[Any], graph: Graph, inputs: Sequence[Any], count: int) -> list[Any]:
    """The gradients of a graph's output by its first `count` inputs, as ONNX's Gradient operator defines them."""
    tape = Tape(op)
    values = [tape.variable(x, i < count) for i, x in enumerate(inputs)]
    y = replay(tape, graph, values)[0]
    grads = tape.gradients([y], [op.full_like(y.raw, 1)], values[:count])
    return [op.zeros_like(v.raw) if g is None else g for v, g in zip(values, grads, strict=False)]


def apply(
    op: Interpreter[Any],
    operator: VersionedOperator,
    inputs: Sequence[Any],
    attributes: dict[str, Any],
    outputs: int,
    wanted: tuple[bool, ...] = (),
) -> list[Any]:
    """Call an interpreter for an operator of any version, rewritten at the interpreter's opset if needed."""
    declaration = operator.declaration
    domain, name = declaration.domain, declaration.name
    if op.runs_old_versions and (op.target is not None or not any(isinstance(v, Subgraph) for v in attributes.values())):
        return op.call_version(operator, inputs, attributes, wanted or (True,) * outputs)
    version = version_at(domain, name, op.opset)
    there = declarations.get((domain, name), {}).get(version or 0)
    versioned = "version" in declaration.services.values() and version != operator.version
    moved = versioned or (version is not None and schemas[domain, name][version].deprecated)
    if there is declaration and not (moved and declaration.decomposition_rule is not None):
        opset = op.opset if domain == "" else version or 1
        return op.call(name, inputs, same_attributes(domain, name, opset, attributes), outputs, domain)
    if declaration.decomposition_rule is None:
        raise UnsupportedModel(
            f"{name}-{operator.version} cannot be written in opset {op.opset}",
            code="SX206",
            operator=name,
            version=operator.version,
        )
    return declaration.decompose(op, operator.version, inputs, attributes, outputs)


def body_examples(op: Interpreter[Any], node: Node, inputs: Sequence[Any]) -> list[Example]:
    """Examples of the inputs of a node's graph: those of its first iteration."""
    if node.domain or node.op_type not in ("Loop", "Scan", "SequenceMap"):
        return []
    if node.op_type == "Loop":
        return [*FIRST, *(same(op, v) for v in inputs[2:])]
    if node.op_type == "SequenceMap":
        return [element(op, v) if op.is_sequence(v) else same(op, v) for v in inputs]
    if node.version == 8:
        return []
    count = int(node.attributes["num_scan_inputs"])
    axes = node.attributes.get("scan_input_axes") or [0] * count
    states, xs = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
    return [*(same(op, v) for v in states), *(element(op, v, a) for v, a in zip(xs, axes, strict=True))]


def subgraph_from_graph(
    op: Interpreter[Any], graph: Graph, captured: Sequence[Any], examples: Sequence[Example] = ()
) -> Subgraph:
    """A graph attribute for an interpreter, with the outer values that it reads."""

    def make(inner: Interpreter[Any], *inputs: Any) -> list[Any]:
        return with_declared_types(replay(inner, graph, inputs, captured=captured), graph.declared_outputs)

    return op.graph(make, [declared_type(v) for v in graph.declared_inputs], examples)


def with_declared_types(outputs: list[Any], declared: Sequence[Value]) -> list[Any]:
    """Complete the types of symbols whose rank is not known by those that a graph declares of its outputs."""
    for symbol, value in zip(outputs, declared, strict=True):
        type = declared_type(value)
        if type is not None and isinstance(symbol, Symbol) and not has_rank(symbol.type):
            symbol.type = type
    return outputs


def rebuild_subgraph(op: Interpreter[Any], body: Subgraph, captured: Sequence[Any]) -> Subgraph:
    """The same subgraph for another interpreter, with other captured values."""
    graph = resolve(body.graph)
    return op.graph(
        lambda inner, *xs: replay(inner, graph, xs, captured=captured), [declared_type(v) for v in graph.declared_inputs]
    )


def run_subgraph(op: Interpreter[Any], body: Subgraph, values: Sequence[Any]) -> list[Any]:
    """Call an interpreter for the nodes of a subgraph; values: its inputs, and then its captured values."""
    graph = resolve(body.graph)
    own = len(graph.inputs)
    return replay(op, graph, values[:own], captured=values[own:])


def subgraph_gradients(
    op: Interpreter[Any], body: Subgraph, values: Sequence[Any], dys: Sequence[Any], needs: Sequence[bool]
) -> list[Any]:
    """The gradients of a subgraph's inputs and captured values: its forward is computed again, and then its backward."""
    tape = Tape(op)
    variables = [tape.variable(x, bool(n)) for x, n in zip(values, needs, strict=True)]
    outputs = run_subgraph(tape, body, variables)
    padded = [*dys, *[None] * (len(outputs) - len(dys))]
    return tape.gradients([y if isinstance(y, Var) else tape.variable(y, False) for y in outputs], padded, variables)
