"""Compute operators on a device: single ones, and those with subgraphs through the executor."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TypeProto

from ..ir.graph import Graph, Node, Value
from ..ir.reader import resolve
from ..proto.schemas import newest
from ..proto.values import Value as Declared
from ..runtime.executor import Executor
from ..runtime.feeds import owned_copy
from .base import Example, Subgraph, arguments
from .builder import GraphBuilder, set_attributes
from .evaluate import EmptySequence, Evaluator


class Eager(Evaluator):
    """Computes operators on a device, subgraphs included."""

    def call(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int, domain: str = "") -> list[Any]:
        if any(isinstance(v, Subgraph) for v in attributes.values()):
            return self._with_graphs(domain, op_type, arguments(self, domain, op_type, inputs), attributes, outputs)
        return super().call(op_type, inputs, attributes, outputs, domain)

    def graph(
        self, make: Callable[..., Sequence[Any]], types: Sequence[TypeProto | None], examples: Sequence[Example] = ()
    ) -> Subgraph:
        return GraphBuilder(self.opset, outer=self).body(make, types, examples)

    def _with_graphs(
        self, domain: str, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], outputs: int
    ) -> list[Any]:
        """Run an If, Loop or Scan as a model of one node, whose inputs include the outer values that its graphs read."""
        executor = _one_node(self, domain, op_type, tuple(v is not None for v in inputs), attributes, outputs)
        captured = [_unwrapped(v) for b in attributes.values() if isinstance(b, Subgraph) for v in b.captured]
        values = [*(v for v in inputs if v is not None), *captured]
        taken = executor.owned()  # a result may be written to, and the next call needs the constants of the graphs
        made = executor.run(executor.graph, values)
        with self.device.active():
            owned = [owned_copy(v, taken) for v in made]
        for k, v in enumerate(owned):
            if type(v) is list and not v:
                owned[k] = EmptySequence(self._element_type(op_type, inputs, attributes, k))
        return owned

    def _element_type(self, op_type: str, inputs: Sequence[Any], attributes: dict[str, Any], k: int) -> np.dtype[Any]:
        """The element type of a sequence that an If, Loop or SequenceMap returns: that of its state, or of its graph's output."""
        if op_type == "Loop" and self.is_sequence(inputs[k + 2]):
            return self.dtype(inputs[k + 2])
        body = next(v for v in attributes.values() if isinstance(v, Subgraph))
        return body.graph.declared_outputs[k].dtype or np.dtype(np.float32)


def _unwrapped(value: Any) -> Any:
    """The array of a value that tapes may have wrapped."""
    while hasattr(value, "raw"):
        value = value.raw
    return value


_executors: OrderedDict[tuple[Any, ...], tuple[Executor, list[Subgraph]]] = OrderedDict()
"""Recent executors, with the graphs of their nodes: while an entry exists, the ids of the graphs in its key are valid."""
_lock = threading.Lock()
"""Held while `_executors` is read or changed."""


def _one_node(
    op: Eager, domain: str, op_type: str, present: tuple[bool, ...], attributes: dict[str, Any], outputs: int
) -> Executor:
    """The executor of a node with graphs, whose inputs are those of the node and then the captured values; cached by graph."""
    plain = tuple(sorted((n, str(v)) for n, v in attributes.items() if not isinstance(v, Subgraph)))
    bodies = [v for v in attributes.values() if isinstance(v, Subgraph)]
    key = (domain, op_type, op.opset, str(op.device), present, plain, outputs, *(id(b.graph) for b in bodies))
    with _lock:
        found = _executors.get(key)
        if found is not None:
            _executors.move_to_end(key)
    if found is None:
        opsets = {domain: newest(domain), **{d: v for b in bodies for d, v in b.graph.opsets.items()}, "": op.opset}
        graph = Graph(op_type, opsets)
        inputs = [graph.add_input(Value(f"in_{i}")) if p else None for i, p in enumerate(present)]
        results = [Value(f"out_{i}") for i in range(outputs)]
        node = Node(op_type, inputs, [*results], domain=domain, name=op_type)
        without_none = {n: v for n, v in attributes.items() if v is not None}
        set_attributes(node, without_none, op.opset, lambda _: graph.add_input(Value("captured")))
        graph.append(node)
        graph.set_outputs(results)
        graph.declared_outputs = tuple(Declared(v.name) for v in results)
        found = (Executor(resolve(graph), op.device), bodies)
        with _lock:
            _executors[key] = found
            if len(_executors) > 256:
                _executors.popitem(last=False)
    return found[0]
