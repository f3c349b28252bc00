"""The bodies of onnxruntime's own operators as graphs, which plans compute in place of the calls.

A body is the decomposition of the operator's declaration for the types and attributes of a call.  The fusions and kernels of
ONNX's operators then apply; an operator that has a kernel keeps its call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import helper

from .. import dtypes, limits
from ..errors import SonnxError
from ..interpreters.builder import GraphBuilder
from ..interpreters.given import Given
from ..ir import graph as ir
from ..ir.declaration import has_trait
from ..ir.reader import resolve
from ..proto.schemas import LAX, MICROSOFT, newest
from .flat import Inliner

NODES = 4096
"""The number of nodes up to which a plan computes a body: attributes may be counts of nodes."""

KEEPING = frozenset({"random", "random_in_training", "packed_weights"})
"""The traits of operators whose bodies plans do not compute."""


def has_body(node: ir.Node) -> bool:
    """Whether plans may compute a call by its body: onnxruntime's operators, with some exceptions.

    Random numbers are drawn once, and weights of few bits stay packed: a plan would keep what a body unpacks.
    """
    if node.domain not in (MICROSOFT, LAX) or node.operator is None or node.operator.declaration.decomposition_rule is None:
        return False
    return not node.operator.declaration.host and not node.operator.declaration.traits & KEEPING


def rounds_once(call: ir.Node, given: Sequence[Given | None]) -> bool:
    """Whether the definition rounds narrow floats once, and the body would at each operator."""
    moves = has_trait(call.domain, call.op_type, "moves")
    return not moves and any(g.dtype in dtypes.NARROW_FLOATS for g in given if g is not None)


class Bodies:
    """The bodies of calls as graphs; equal calls share one."""

    def __init__(self) -> None:
        self._known: dict[Any, ir.Graph | None] = {}

    def inlined(
        self, node: ir.Node, given: Sequence[Given | None], values: Sequence[ir.Value | None]
    ) -> tuple[list[ir.Node], list[ir.Value | None]] | None:
        """The nodes of a body in place of a node, and its outputs.

        Args:
            node: the node.
            given: its inputs; None for an absent one.
            values: what the body reads in their place.

        Returns:
            New nodes; None if there is no body for these inputs, or one with bodies, for which nothing is prepared.
        """
        assert node.operator is not None
        attributes = tuple(sorted((n, repr(v)) for n, v in node.attributes.items()))
        key = (node.domain, node.op_type, node.operator.version, len(node.outputs), attributes, tuple(given))
        if key not in self._known:
            self._known[key] = _body(node, given)
        graph = self._known[key]
        if graph is None:
            return None
        sources = [v for v, g in zip(values, given, strict=True) if v is not None and g is not None and g.setting is None]
        inliner = Inliner(origins=node.origins)
        outputs = inliner.inline(graph, dict(zip(graph.inputs, sources, strict=True)))
        return inliner.nodes, outputs


def _body(node: ir.Node, given: Sequence[Given | None]) -> ir.Graph | None:
    """The decomposition of a call as a graph with its inputs and outputs; None if it does not apply."""
    operator = node.operator
    assert operator is not None
    with limits.spend(limits.current().part(nodes=NODES)):
        builder = GraphBuilder(newest(""))
    inputs: list[Any] = []
    for i, g in enumerate(given):
        if g is None:
            inputs.append(None)
        elif g.setting is not None:
            inputs.append(builder.constant(g.array))
        else:
            inputs.append(builder.input(f"x{i}", helper.make_tensor_type_proto(dtypes.onnx_code(g.dtype), g.shape)))
    names = [f"y{i}" for i in range(len(node.outputs))]
    try:
        attributes = {n: v for n, v in node.attributes.items() if v is not None}
        made = operator.declaration.decompose(builder, operator.version, inputs, attributes, len(names))
        found = resolve(builder.finish(made, names, node.op_type))
    except (SonnxError, ValueError, AttributeError, TypeError):
        return None
    return None if any(n.graphs or n.function for n in found.nodes) else found
