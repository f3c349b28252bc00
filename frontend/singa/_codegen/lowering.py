"""Converts a model to nodes of the newest opset with the names of its file, and separates parameters from constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TypeProto, helper

from singa_backend import dtypes
from singa_backend.autodiff import roles
from singa_backend.autodiff.replay import Visitor, apply, captured_by, replay, visit
from singa_backend.errors import Problem, UnsupportedModel
from singa_backend.interpreters.base import Subgraph
from singa_backend.interpreters.builder import GraphBuilder, Symbol
from singa_backend.ir.declaration import declarations
from singa_backend.ir.graph import Graph, Node
from singa_backend.ir.variants import with_weights
from singa_backend.ir.writer import graph_message
from singa_backend.opsets.target_schema import Unwritable
from singa_backend.opsets.writer import OpsetWriter
from singa_backend.proto.checker import infer_shapes
from singa_backend.proto.schemas import ANY_OPSET, newest, version_at
from singa_backend.proto.values import declared_type


@dataclass
class ProgramModel:
    """What a program is written from.

    Attributes:
        graph: the nodes of the newest opset, whose `origins` are those of the file, with the declarations of the file.
        parameters: float initializers that train, by name.
        statistics: running means and variances, by name.
        constants: all other arrays, by name.
        modal: the first outputs of nodes that differ between training and inference.
        types: of values, subgraphs included.
    """

    graph: Graph
    parameters: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]
    constants: dict[str, np.ndarray]
    modal: set[str]
    types: dict[str, TypeProto]

    def tensor(self, name: str) -> np.ndarray | None:
        """The array of a parameter or statistic; None for other values."""
        return self.parameters.get(name, self.statistics.get(name))

    def dtype(self, name: str) -> np.dtype[Any] | None:
        """The element type of a value; None if it is not known."""
        array = self.tensor(name)
        if array is not None:
            return array.dtype
        code = self.types[name].tensor_type.elem_type if name in self.types else 0
        return dtypes.numpy_dtype(code) if code else None

    def rank(self, name: str) -> int | None:
        """The number of axes of a value; None if it is not known."""
        tensor = self.types[name].tensor_type if name in self.types else None
        return len(tensor.shape.dim) if tensor is not None and tensor.HasField("shape") else None


def lower(graph: Graph) -> ProgramModel:
    """Convert a graph node by node to the newest opset.

    Raises UnsupportedModel for a node that cannot be written in that opset.
    """
    graph = with_weights(graph)
    _check(graph)
    return _Lowering(graph).run()


def _check(graph: Graph) -> None:
    """Check operators outside ONNX's own domain: they are called in their newest version, which must equal the node's."""
    problems = []
    for node in graph.all_nodes():
        if node.domain and node.operator is not None:
            version = version_at(node.domain, node.op_type, ANY_OPSET) or 0
            known = declarations.get((node.domain, node.op_type), {})
            if known.get(version) is not node.operator.declaration:
                what = f"{node.op_type}-{node.version} of {node.domain} differs from {node.op_type}-{version}"
                problems.append(Problem(what, "SX207", node=node.name, operator=node.op_type, version=node.version))
    if problems:
        raise UnsupportedModel(
            f"a program calls operators in their newest version: {problems[0].message}",
            code="SX207",
            node=problems[0].node,
            operator=problems[0].operator,
            problems=problems,
            hint="export the model again with the newest operators of that domain",
        )


class _Lowering:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.writer = OpsetWriter(newest(""))
        self.builder = self.writer.builder
        self.modal: list[Symbol] = []

    def run(self) -> ProgramModel:
        graph, builder = self.graph, self.builder
        kinds = roles.roles(graph)
        moving = {n for n, r in kinds.items() if r.kind == roles.STATISTIC}
        inputs = [self.writer.input(v.name, declared_type(v)) for v in graph.declared_inputs]
        states: dict[str, Symbol] = {}
        held: dict[str, np.ndarray] = {}
        for name, array in graph.states.items():
            if dtypes.is_float(array.dtype) and kinds[name].kind in (
                roles.PARAMETER,
                roles.STATISTIC,
            ):  # parameters are not constants, and must not be folded
                states[name] = builder.input(name, helper.make_tensor_type_proto(dtypes.onnx_code(array.dtype), array.shape))
                held[name] = array
            else:
                states[name] = builder.initializer(name, array, fold=True)
        builder.pin(v.name for v in graph.outputs)
        symbols = replay(self.writer, graph, inputs, states, visitor=self.visit)
        written = builder.finish(symbols, [v.name for v in graph.outputs], "main")
        types = _types(written)
        written.remove_inputs({states[n].ir for n in held})
        written.name, written.declared_outputs = graph.name, graph.declared_outputs
        for value, declared in zip(written.inputs, graph.declared_inputs, strict=True):
            value.declared = declared
        return ProgramModel(
            written,
            {n: a for n, a in held.items() if n not in moving},
            {n: a for n, a in held.items() if n in moving},
            written.states,
            {s.name for s in self.modal},
            types,
        )

    def visit(self, op: Any, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        """Apply a node of the main graph: some by the model's mode, the others as `inner` does."""
        return self._noted(op, node, lambda: self._modal(node, inputs) or self._done(op, node, inputs, frame, self.visit))

    def inner(self, op: Any, node: Node, inputs: list[Any], frame: list[Any]) -> list[Any]:
        """Apply a node of a subgraph."""
        return self._noted(op, node, lambda: self._done(op, node, inputs, frame, self.inner))

    def _noted(self, op: Any, node: Node, do: Callable[[], list[Any]]) -> list[Any]:
        """Name the results of a node as in the file, and record the node; errors name it."""
        builder: GraphBuilder = op.builder
        before = builder.ir.last
        try:
            made = do()
        except Unwritable as error:
            raise error.locate(node=node.name) from None
        recent = builder.ir.following(before)
        while recent is not None:
            recent.origins = recent.origins or (node,)  # nodes of a function have theirs already
            recent = builder.ir.following(recent)
        builder.rename(before, made, node.output_names, node.name)
        return made

    def _done(self, op: Any, node: Node, inputs: list[Any], frame: list[Any], visitor: Visitor) -> list[Any]:
        constant = node.attributes.get("value")
        if (node.domain, node.op_type) == ("", "Constant") and isinstance(constant, np.ndarray):
            return [self.builder.initializer(node.output_names[0], constant, fold=True)]  # it keeps its name
        known = node.op_type == "If" and not node.domain and op.constant_value(inputs[0]) is not None
        graphs = {n: v for n, v in node.attributes.items() if isinstance(v, Graph)}
        if known or not graphs or node.operator is None or node.function is not None:
            return visit(op, node, inputs, frame, visitor)
        attributes = {n: v for n, v in node.attributes.items() if n in node.given}
        attributes |= {n: self._body(op, g, captured_by(node, g, frame)) for n, g in graphs.items()}
        return apply(op, node.operator, inputs, attributes, len(node.outputs), tuple(o is not None for o in node.outputs))

    def _body(self, op: Any, graph: Graph, captured: Sequence[Any]) -> Subgraph:
        """Build a subgraph whose inputs and values have the names of the file."""

        def make(inner: Any, *inputs: Symbol) -> list[Any]:
            for symbol, value in zip(inputs, graph.inputs, strict=True):
                symbol.name = inner.builder.name(value.name)
            return replay(inner, graph, inputs, captured=captured, visitor=self.inner)

        body: Subgraph = op.graph(make, [declared_type(v) for v in graph.declared_inputs])
        return body

    def _modal(self, node: Node, inputs: list[Any]) -> list[Any] | None:
        """Apply a node that follows the model's mode, regardless of the mode of the file; see `Imported.visit`."""
        a = node.attributes
        if node.domain or node.op_type not in ("Dropout", "BatchNormalization"):
            return None
        if node.op_type == "Dropout":
            given = inputs[1] if len(inputs) > 1 else None
            ratio = self.builder.constant(a.get("ratio", 0.5), np.float32) if given is None else given
            made = self.builder.call("Dropout", [inputs[0], ratio], {"seed": a.get("seed")}, len(node.outputs))
            if len(made) > 1 and (node.version or 0) < 10:  # the mask has the type of the input
                made[1] = self.builder.call("CastLike", [made[1], inputs[0]], {}, 1)[0]
        elif a.get("spatial", 1) and len(inputs) > 4:
            settings = {"epsilon": a.get("epsilon", 1e-5), "momentum": a.get("momentum", 0.9)}
            made = self.builder.call("BatchNormalization", inputs, settings, 1)
            made += [inputs[3], inputs[4], None, None][: len(node.outputs) - 1]
        else:
            return None
        self.modal.append(made[0])
        return made


def _types(graph: Graph) -> dict[str, TypeProto]:
    """The types of all values that ONNX's own inference knows."""
    imports = [helper.make_opsetid(d, v) for d, v in graph.opsets.items()]
    # without inference a few constants are written longer
    whole = infer_shapes(helper.make_model(graph_message(graph), opset_imports=imports)).model.graph
    found: dict[str, TypeProto] = {}
    pending = [whole]
    while pending:
        here = pending.pop()
        for info in (*here.value_info, *here.input, *here.output):
            if info.HasField("type"):
                found[info.name] = info.type
        pending += [a.g for n in here.node for a in n.attribute if a.HasField("g")]
    return found
