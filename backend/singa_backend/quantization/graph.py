"""The graph of a model during its quantization: constants, readers of values, new names."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ..errors import InvalidInput
from ..proto.messages import FreshNames, imported, names, reads

FLOAT = TensorProto.FLOAT


class FloatGraph:
    """The main graph of a model that is being quantized, in place.

    Float constants of Constant nodes become initializers.

    Attributes:
        model: the model.
        constants: the initializers of the main graph that are float32, by name.
        opset: the opset of ai.onnx.
        used: the values that nodes read before the quantization.
        fresh: makes names that are not in use.
        inputs: the names of inputs that are not initializers.
        outputs: the names of the outputs.
        reasons: why constants stay float.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model, self.graph = model, model.graph
        self.opset = imported(model.opset_import).get("", 1)
        for node in [n for n in self.graph.node if n.op_type == "Constant" and n.domain in ("", "ai.onnx")]:
            if len(node.attribute) == 1 and node.attribute[0].name == "value" and node.attribute[0].t.data_type == FLOAT:
                lifted = self.graph.initializer.add()
                lifted.CopyFrom(node.attribute[0].t)
                lifted.name = node.output[0]
                self.graph.node.remove(node)
        given = {v.name for v in self.graph.input}  # the caller may override these
        self.constants = {
            t.name: np.asarray(numpy_helper.to_array(t))
            for t in self.graph.initializer
            if t.data_type == FLOAT and t.name not in given
        }
        self.used = {n for node in self.graph.node for n in reads(node)}
        self.fresh = FreshNames(names(self.graph) | {n.name for n in self.graph.node})
        self.inputs = {v.name for v in self.graph.input} - {t.name for t in self.graph.initializer}
        self.outputs = {v.name for v in self.graph.output}
        self.reasons: dict[str, str] = {}

    def require_opset(self, lowest: int, what: str) -> None:
        """Check the opset of the model; raises InvalidInput (SX397)."""
        if self.opset < lowest:
            hint = f"sonnx convert MODEL --opset {lowest} -o OUT"
            raise InvalidInput(f"{what} needs opset {lowest} or newer, the model has {self.opset}", code="SX397", hint=hint)

    def keep(self, node: NodeProto, reason: str) -> None:
        """Note why a node leaves the constants that it reads float."""
        self.reasons |= {n: reason for n in node.input if n in self.constants}

    def readers(self) -> Counter[str]:
        """How many nodes read each value; a captured value or an output counts once more."""
        found = Counter(n for node in self.graph.node for n in reads(node))
        found.update(self.outputs)
        return found

    def add(self, name: str, values: Any) -> str:
        """Add an initializer under a name that is not in use, and return the name."""
        name = self.fresh.new(name)
        self.graph.initializer.append(numpy_helper.from_array(np.asarray(values), name))
        return name

    def node(self, operator: str, inputs: list[str], outputs: list[str], name: str, **attributes: Any) -> NodeProto:
        """Create a node under a name that is not in use."""
        return helper.make_node(operator, inputs, outputs, name=self.fresh.new(name), **attributes)

    def replace_nodes(self, nodes: list[NodeProto]) -> None:
        """Set the nodes of the graph, and remove initializers that no node reads any more."""
        copies = []
        for node in nodes:  # the graph may own them
            copies.append(NodeProto())
            copies[-1].CopyFrom(node)
        del self.graph.node[:]
        self.graph.node.extend(copies)
        used = {n for node in self.graph.node for n in reads(node)} | self.outputs
        made = {o for node in self.graph.node for o in node.output}
        for t in [t for t in self.graph.initializer if t.name in self.constants and t.name in self.used - used]:
            self.graph.initializer.remove(t)
        known = {t.name for t in self.graph.initializer}
        made |= known | {v.name for v in self.graph.input}
        for v in [v for v in self.graph.value_info if v.name not in made]:
            self.graph.value_info.remove(v)


def attribute(node: NodeProto, name: str, default: Any) -> Any:
    """The value of a node's attribute."""
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)
