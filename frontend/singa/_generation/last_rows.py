"""The part of a decoder that computes logits, for the last token alone: the search reads no others.

A token's logits depend on the last layers by products with constant matrices, norms of the last axis and elementwise functions:
row by row.  Slices of the last row before these nodes, instead of one after them, let a prompt pass them with one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, ValueInfoProto, helper, numpy_helper

from singa_backend.ir.declaration import has_trait
from singa_backend.proto.schemas import MICROSOFT

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
    graph = model.graph
    output = next((v for v in graph.output if v.name == logits), None)
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 0)
    if output is None or opset < 10 or _ranks([output]).get(logits) != 3:
        return model
    chain = _Chain(graph, logits)
    if not any(n.op_type in PRODUCTS for n in chain.nodes):
        return model
    chain.cut()
    shape = output.type.tensor_type.shape
    shape.dim[1].Clear()
    shape.dim[1].dim_value = 1
    return model


def _ranks(values: Iterable[ValueInfoProto]) -> dict[str, int]:
    """The ranks of values with types, as far as they are declared."""
    return {
        v.name: len(v.type.tensor_type.shape.dim)
        for v in values
        if v.type.HasField("tensor_type") and v.type.tensor_type.HasField("shape")
    }


def _captured(node: NodeProto) -> Iterator[str]:
    """The names that the subgraphs of a node read; their own values too."""
    for a in node.attribute:
        for inner in [a.g] if a.HasField("g") else [*a.graphs]:
            yield from (v.name for v in inner.output)
            for n in inner.node:
                yield from n.input
                yield from _captured(n)


class _Chain:
    """The nodes that compute an output row by row, and what only they read.

    Attributes:
        graph: the graph.
        nodes: in its order.
    """

    def __init__(self, graph: GraphProto, output: str) -> None:
        self.graph = graph
        given = {v.name for v in graph.input}
        self._constants = {t.name: len(t.dims) for t in graph.initializer if t.name not in given}
        self._ranks = _ranks([*graph.value_info, *graph.input, *graph.output])
        for n in graph.node:
            value = next((a.t for a in n.attribute if a.name == "value"), None)
            if n.op_type == "Constant" and value is not None:
                self._constants[n.output[0]] = len(value.dims)
        others = {v.name for v in graph.output if v.name != output}
        held: set[str] = {output}
        found: list[NodeProto] = []
        for n in reversed(graph.node):
            made = [o for o in n.output if o]
            reads = held.intersection(made)
            if reads and not others.intersection(made) and self._by_rows(n):
                found.append(n)
                held |= set(self._variables(n))
            else:  # what other nodes read has to stay whole
                others |= {*n.input, *_captured(n)}
        self.nodes = found[::-1]

    def _variables(self, node: NodeProto) -> list[str]:
        return [i for i in node.input if i and i not in self._constants]

    def _by_rows(self, node: NodeProto) -> bool:
        """Whether a node computes each row of outputs of three axes from the same rows of its inputs."""
        kind, given, constants = node.op_type, list(node.input), self._constants
        if node.domain in ("", "ai.onnx"):
            if has_trait("", kind, "broadcasting"):
                return self._elementwise(node)
            if kind == "MatMul":
                return constants.get(given[1]) == 2 and given[0] not in constants
            norm = kind in NORMS and next((a.i for a in node.attribute if a.name == "axis"), -1) == -1
            alone = has_trait("", kind, "unary") or (norm and not any(node.output[1:]))
            return alone and self._variables(node) == given[:1]
        if node.domain != MICROSOFT:
            return False
        if kind in SKIPS:
            ranks = {self._ranks.get(i) for i in given[:2]}
            return self._variables(node) == given[:2] and ranks == {3} and not any(node.output[1:3])
        alone = kind in PRODUCTS | BIASED or has_trait(MICROSOFT, kind, "unary")
        return alone and self._variables(node) == given[:1]

    def _elementwise(self, node: NodeProto) -> bool:
        """Whether the operands have three axes, or are constants of at most one."""
        variables = self._variables(node)
        small = all(self._constants[i] <= 1 for i in node.input if i in self._constants)
        return bool(variables) and small and (len(variables) == 1 or all(self._ranks.get(i) == 3 for i in variables))

    def cut(self) -> None:
        """Insert the slices."""
        graph, inside = self.graph, {id(n) for n in self.nodes}
        made = {o for n in self.nodes for o in n.output}
        taken = {o for n in graph.node for o in n.output} | set(self._constants) | {v.name for v in graph.input}

        def fresh(name: str) -> str:
            while name in taken:
                name += "_"
            taken.add(name)
            return name

        bounds = [fresh(f"last_row_{what}") for what in ("starts", "ends", "axes")]
        for name, value in zip(bounds, (-1, np.iinfo(np.int64).max, -2), strict=True):
            graph.initializer.append(numpy_helper.from_array(np.array([value], np.int64), name))
        rows: dict[str, str] = {}
        nodes: list[NodeProto] = []
        for n in graph.node:
            for i, name in enumerate(n.input if id(n) in inside else ()):
                if name in self._variables(n) and name not in made:
                    if name not in rows:
                        rows[name] = fresh(f"{name}_last_row")
                        nodes.append(helper.make_node("Slice", [name, *bounds], [rows[name]], name=rows[name]))
                    n.input[i] = rows[name]
            nodes.append(n)
        kept = [v for v in graph.value_info if v.name not in made]
        del graph.value_info[:]
        graph.value_info.extend(kept)
        copies = GraphProto(node=nodes)
        del graph.node[:]
        graph.node.extend(copies.node)
