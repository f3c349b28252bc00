"""The part of a decoder that computes logits, for the last token alone: the search reads no others.

A token's logits depend on the last layers by products with constant matrices, norms of the last axis and elementwise functions:
row by row.  Slices of the last row before these nodes, instead of one after them, let a prompt pass them with one row.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from singa_backend.ir.declaration import has_trait
from singa_backend.ir.graph import Graph, Node, Value
from singa_backend.ir.structure import read_structure
from singa_backend.ir.writer import write
from singa_backend.proto.messages import FreshNames
from singa_backend.proto.schemas import MICROSOFT, plain_domain

NORMS = frozenset({"LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"})
"""Norms of the last axis, if their attribute `axis` is -1."""
SKIPS = frozenset({"SkipLayerNormalization", "SkipSimplifiedLayerNormalization"})
"""Norms of a sum; the outputs 1 and 2 are statistics."""
PRODUCTS = frozenset({"MatMul", "MatMulNBits"})
BIASED = frozenset({"BiasGelu", "FastGelu"})
"""Functions of the sum of the first input and a vector."""


def keep_last_row(model: ModelProto, logits: str) -> ModelProto:
    """Let a model compute the last row of an output of shape (batch, length, words) only; it changes the model in place.

    Args:
        model: the model, whose large tensors may be in another file.
        logits: the output.

    Returns:
        The model; unchanged if another operator than those that compute row by row makes the output.
    """
    output = next((v for v in model.graph.output if v.name == logits), None)
    opsets = {plain_domain(o.domain): o.version for o in model.opset_import}
    if output is None or opsets.get("", 0) < 10 or len(output.type.tensor_type.shape.dim) != 3:
        return model
    chain = _Chain(read_structure(model.graph, opsets, {(f.domain, f.name) for f in model.functions}), logits)
    if not any(n.op_type in PRODUCTS for n in chain.nodes):
        return model
    chain.cut()
    shape = output.type.tensor_type.shape
    shape.dim[1].Clear()
    shape.dim[1].dim_value = 1
    return model


class _Chain:
    """The nodes that compute an output row by row, and what only they read.

    Attributes:
        graph: the graph, as it was read from a file.
        nodes: from the last to the first.
    """

    def __init__(self, graph: Graph, output: str) -> None:
        self.graph = graph
        proto = graph.proto
        self._ranks = {
            v.name: len(v.type.tensor_type.shape.dim)
            for v in (*proto.value_info, *proto.input, *proto.output)
            if v.type.tensor_type.HasField("shape")
        }
        self.nodes: dict[Node, None] = {}
        for node in reversed(graph.nodes):
            ends = [user for o in node.results for user, _ in o.uses if user is not graph.ref or o.name != output]
            whole = any(user not in self.nodes for user in ends)  # what other nodes read has to stay whole
            if not whole and (ends or any(o.name == output for o in node.results)) and self._by_rows(node):
                self.nodes[node] = None

    def _constant(self, value: Value | None) -> int | None:
        """The rank of a constant; None for other values."""
        if value is None or value in self.graph.optional_inputs:
            return None
        tensor, node = value.constant, value.producer
        if node is not None and node.is_("Constant") and "value" in node.attributes:
            tensor = node.attributes["value"].t
        return len(tensor.dims) if isinstance(tensor, TensorProto) else None

    def _variables(self, node: Node) -> list[Value]:
        return [v for v in node.inputs if v is not None and self._constant(v) is None]

    def _by_rows(self, node: Node) -> bool:
        """Whether a node computes each row of outputs of three axes from the same rows of its inputs."""
        kind, variables = node.op_type, self._variables(node)
        if not node.domain:
            if has_trait("", kind, "broadcasting"):
                return self._elementwise(node)
            if kind == "MatMul":
                return self._constant(node.inputs[1]) == 2 and self._constant(node.inputs[0]) is None
            norm = kind in NORMS and node.get("axis", -1) == -1
            alone = has_trait("", kind, "unary") or (norm and not any(node.outputs[1:]))
            return alone and variables == node.inputs[:1]
        if node.domain != MICROSOFT:
            return False
        if kind in SKIPS:
            three = all(self._rank(v) == 3 for v in node.inputs[:2])
            return variables == node.inputs[:2] and three and not any(node.outputs[1:3])
        alone = kind in PRODUCTS | BIASED or has_trait(MICROSOFT, kind, "unary")
        return alone and variables == node.inputs[:1]

    def _rank(self, value: Value | None) -> int | None:
        return None if value is None else self._ranks.get(value.name)

    def _elementwise(self, node: Node) -> bool:
        """Whether the operands have three axes, or are constants of at most one."""
        variables = self._variables(node)
        small = all((self._constant(v) or 0) <= 1 for v in node.inputs)
        return bool(variables) and small and (len(variables) == 1 or all(self._rank(v) == 3 for v in variables))

    def cut(self) -> None:
        """Insert the slices."""
        graph = self.graph
        names = FreshNames(graph.values, mark="_")
        bounds: list[Value | None] = []
        for what, number in (("starts", -1), ("ends", np.iinfo(np.int64).max), ("axes", -2)):
            name = names.new(f"last_row_{what}")
            tensor = numpy_helper.from_array(np.array([number], np.int64), name)
            bounds.append(graph.add_initializer(Value(name, constant=tensor)))
        rows: dict[Value, Value] = {}
        for node in reversed(self.nodes):
            for i, value in enumerate(node.inputs):
                if value is None or value.producer in self.nodes or self._constant(value) is not None:
                    continue
                if value not in rows:
                    rows[value] = Value(names.new(f"{value.name}_last_row"))
                    graph.insert(Node("Slice", [value, *bounds], [rows[value]], name=rows[value].name), node)
                node.put(i, rows[value])
        write(graph)
        made = {o.name for node in self.nodes for o in node.results}
        kept = [v for v in graph.proto.value_info if v.name not in made]
        del graph.proto.value_info[:]
        graph.proto.value_info.extend(kept)
