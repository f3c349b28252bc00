"""Compute operators on a device: single ones, and those with subgraphs through the executor."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TypeProto, helper

from .. import dtypes
from ..ir.reader import read
from ..proto.schemas import newest
from ..runtime.executor import Executor
from ..runtime.feeds import owned_copy
from .base import Example, Subgraph, arguments
from .builder import GraphBuilder, attribute_proto
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
        executor, names = _one_node(self, domain, op_type, tuple(v is not None for v in inputs), attributes, outputs)
        captured = {n: v for b in attributes.values() if isinstance(b, Subgraph) for n, v in b.captured.items()}
        values = [*(v for v in inputs if v is not None), *(_unwrapped(captured[n]) for n in names)]
        assert isinstance(executor, Executor)
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
        type = body.proto.output[k].type
        tensor = (type.sequence_type.elem_type if type.HasField("sequence_type") else type).tensor_type
        return dtypes.numpy_dtype(tensor.elem_type or dtypes.onnx_code(np.float32))


def _unwrapped(value: Any) -> Any:
    """The array of a value that tapes may have wrapped."""
    while hasattr(value, "raw"):
        value = value.raw
    return value


_executors: OrderedDict[tuple[Any, ...], tuple[Any, Any, list[str]]] = OrderedDict()
"""Recent executors, with the graphs of their nodes: while an entry exists, the ids of the graphs in its key are valid."""
_lock = threading.Lock()
"""Held while `_executors` is read or changed."""


def _one_node(
    op: Eager, domain: str, op_type: str, present: tuple[bool, ...], attributes: dict[str, Any], outputs: int
) -> tuple[Any, list[str]]:
    """The executor of a node with graphs, and the names that they capture; cached by graph."""
    plain = tuple(sorted((n, str(v)) for n, v in attributes.items() if not isinstance(v, Subgraph)))
    bodies = [v for v in attributes.values() if isinstance(v, Subgraph)]
    key = (domain, op_type, op.opset, str(op.device), present, plain, outputs, *(id(b.proto) for b in bodies))
    with _lock:
        found = _executors.get(key)
        if found is not None:
            _executors.move_to_end(key)
    if found is None:
        names = [f"in_{i}" if p else "" for i, p in enumerate(present)]
        node = helper.make_node(op_type, names, [f"out_{i}" for i in range(outputs)], name=op_type, domain=domain)
        for name, value in attributes.items():
            if value is not None:
                node.attribute.append(attribute_proto(domain, op_type, op.opset, name, value))  # typed: [] alone has no type
        captured = list(dict.fromkeys(n for b in bodies for n in b.captured))
        infos = [helper.make_empty_tensor_value_info(n) for n in (*filter(None, names), *captured)]
        ends = [helper.make_empty_tensor_value_info(n) for n in node.output]
        graph = helper.make_graph([node], op_type, infos, ends)
        imports = {domain: newest(domain), **{o.domain: o.version for b in bodies for o in b.imports()}, "": op.opset}
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in imports.items()])
        found = (Executor(read(model), op.device), bodies, captured)
        with _lock:
            _executors[key] = found
            if len(_executors) > 256:
                _executors.popitem(last=False)
    executor, _, captured = found
    return executor, captured
