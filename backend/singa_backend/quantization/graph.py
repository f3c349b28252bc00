"""The graph of a model during its quantization: its float constants, new constants and nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper

from ..errors import InvalidInput
from ..ir.graph import Node, Value
from ..passes.model import ModelEditor, opset
from ..proto import tensor_data

FLOAT = TensorProto.FLOAT


class FloatGraph:
    """The main graph of a model that is being quantized.

    Float constants of Constant nodes become initializers.

    Attributes:
        editor: the model.
        main: its main graph.
        constants: the arrays of the initializers of the main graph that are float32 and that no input overrides.
        reasons: why constants stay float, by name.
    """

    def __init__(self, model: ModelProto) -> None:
        self.editor = ModelEditor(model)
        self.main = self.editor.main
        for node in self.main.named("Constant"):
            tensor = node.get("value") if node.is_("Constant") else None
            if isinstance(tensor, TensorProto) and tensor.data_type == FLOAT:
                initializer = TensorProto()
                initializer.CopyFrom(tensor)
                initializer.name = node.results[0].name
                self.editor.make_initializer(self.main, node.results[0], initializer)
        tensors = {value: self.editor.tensor(value) for value in self.main.initializers.values()}
        self.constants = {
            value: tensor_data.tensor(tensor, None)
            for value, tensor in tensors.items()
            if isinstance(tensor, TensorProto) and tensor.data_type == FLOAT
        }
        self._read = [value for value in self.constants if value.is_used]
        self.reasons: dict[str, str] = {}

    def require_opset(self, lowest: int, what: str) -> None:
        """Check the opset of the model; raises InvalidInput (SX397)."""
        version = opset(self.main)
        if version < lowest:
            hint = f"sonnx convert MODEL --opset {lowest} -o OUT"
            raise InvalidInput(f"{what} needs opset {lowest} or newer, the model has {version}", code="SX397", hint=hint)

    def constant(self, value: Value | None) -> np.ndarray | None:
        """The array of a float constant; None for any other value."""
        return None if value is None else self.constants.get(value)

    def keep(self, node: Node, reason: str) -> None:
        """Note why a node leaves the constants that it reads float."""
        self.reasons |= {v.name: reason for v in node.inputs if v is not None and v in self.constants}

    def value(self, wish: str) -> Value:
        """A new value under a name that is not in use."""
        return Value(self.editor.fresh(wish))

    def add(self, wish: str, array: Any) -> Value:
        """Add an initializer under a name that is not in use."""
        name = self.editor.fresh(wish)
        return self.editor.add_initializer(self.main, name, numpy_helper.from_array(np.asarray(array), name))

    def node(self, operator: str, inputs: Sequence[Value], outputs: Sequence[Value], wish: str, **attributes: Any) -> Node:
        """A new node under a name that is not in use, which is not in the graph yet."""
        node = Node(operator, list(inputs), list(outputs), name=self.editor.fresh(wish))
        node.set(**attributes)
        return node

    def write(self) -> None:
        """Write the model, without the float constants that no node reads any more."""
        self.main.remove_initializer(*(value for value in self._read if not value.is_used))
        self.editor.write()
