"""The constants of a graph as arrays, and the types of its values as far as they are known."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Self

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from .. import dtypes
from ..errors import SonnxError
from ..proto import tensor_data
from .index import GraphIndex, NodeEditor, Shape, Type


class TypedGraph(GraphIndex):
    """A graph whose constants can be read, and whose values have types."""

    def owner(self, name: str) -> Self | None:
        """Return the graph that defines a value that is visible here.

        Args:
            name: of the value.

        Returns:
            This graph or an outer one; None if none defines it.
        """
        graph: Self | None = self
        while graph is not None and not graph.defines(name):
            graph = graph.outer
        return graph

    def tensor(self, name: str) -> TensorProto | NodeEditor | None:
        """Return the definition of a constant.

        Args:
            name: of a value that is visible here.

        Returns:
            An initializer that no input can override, or a Constant node; None if the value is not a constant.
        """
        graph = self.owner(name) if name else None
        if graph is None:
            return None
        if name in graph.initializers:
            return None if name in graph.inputs and self.context.ir_version >= 4 else graph.initializers[name]
        node = graph.producer(name)
        return node if node is not None and node.is_("Constant") else None

    def is_constant(self, name: str) -> bool:
        """Test whether a value is a constant.

        Args:
            name: of a value that is visible here.

        Returns:
            Whether it is an initializer that no input can override, or the output of a Constant node.
        """
        return self.tensor(name) is not None

    def constant_bytes(self, name: str) -> int:
        """Return the size of a constant without reading it.

        Args:
            name: of a value that is visible here.

        Returns:
            The bytes; 0 if it is not a constant.
        """
        found = self.tensor(name)
        if isinstance(found, NodeEditor):
            held = found.get("value")
            found = held if isinstance(held, TensorProto) else None
        return 0 if found is None else nbytes(found)

    def constant(self, name: str, most: int = 1 << 26) -> np.ndarray | None:
        """Read a constant.

        Args:
            name: of a value that is visible here.
            most: the maximum bytes.

        Returns:
            The array; None if the value is not a constant, is larger, or cannot be read.
        """
        found = self.tensor(name)
        if found is None or self.constant_bytes(name) > most:
            return None
        try:
            return _value(found) if isinstance(found, NodeEditor) else tensor_data.tensor(found, self.context.folder)
        except SonnxError:  # damaged, or external without its folder: not reported here
            return None

    @cached_property
    def _no_types(self) -> dict[str, Type]:
        return {}

    @property
    def types(self) -> dict[str, Type]:
        """The inferred types of this graph's values; passes add those of new values."""
        return self.context.types.get(id(self), self._no_types)

    def type(self, name: str) -> Type:
        """Return what is known of a value.

        Args:
            name: of a value that is visible here.

        Returns:
            Its dtype and shape, as far as they are known.
        """
        graph = self.owner(name)
        if graph is None:
            return Type()
        tensor = graph.initializers.get(name)
        if tensor is not None:
            return Type(tensor.data_type, tuple(tensor.dims))
        return graph.types.get(name, Type())

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a value.

        Args:
            name: of a value that is visible here.

        Returns:
            The sizes, a str or None for an open one; None if the rank is not known.
        """
        return self.type(name).shape

    def static(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value if all sizes are known.

        Args:
            name: of a value that is visible here.

        Returns:
            The sizes; None if one is open or the rank is not known.
        """
        shape = self.shape(name)
        sizes = None if shape is None else [int(d) for d in shape if isinstance(d, int)]
        return None if shape is None or sizes is None or len(sizes) < len(shape) else tuple(sizes)

    def rank(self, name: str) -> int | None:
        """Return the rank of a value.

        Args:
            name: of a value that is visible here.

        Returns:
            The number of axes; None if it is not known.
        """
        shape = self.shape(name)
        return None if shape is None else len(shape)


def nbytes(tensor: TensorProto) -> int:
    """The bytes of a tensor as an array; approximate for strings."""
    if not dtypes.is_code(tensor.data_type):
        return 0
    return math.prod(max(0, d) for d in tensor.dims) * dtypes.numpy_dtype(tensor.data_type).itemsize


def constant_node(name: str, array: np.ndarray) -> NodeEditor:
    """A Constant node that produces the value of this name."""
    return NodeEditor("Constant", [], [name], {"value": helper.make_attribute("value", numpy_helper.from_array(array, name))})


def _value(node: NodeEditor) -> np.ndarray | None:
    """The value of a Constant node, whichever attribute holds it."""
    for name, attribute in node.attributes.items():
        value = helper.get_attribute_value(attribute)
        if name == "value":
            return tensor_data.tensor(value, None)
        if name == "sparse_value":
            return tensor_data.sparse(value, None)
        if name in ("value_float", "value_floats"):
            return np.asarray(value, np.float32)
        if name in ("value_int", "value_ints"):
            return np.asarray(value, np.int64)
        if name in ("value_string", "value_strings"):
            texts = [v.decode() for v in ([value] if isinstance(value, bytes) else value)]
            return np.asarray(texts, object).reshape(() if name == "value_string" else (-1,))
    return None
