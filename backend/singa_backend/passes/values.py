"""Types and constants of the values of a file."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from .. import dtypes
from ..ir.graph import Node, Value
from ..proto import tensor_data

Shape = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Type:
    """What is known of a tensor: dtype as ONNX's code (0: unknown), shape with names or None for open sizes."""

    dtype: int = 0
    shape: Shape | None = None


def nbytes(tensor: TensorProto) -> int:
    """The bytes of a tensor as an array; approximate for strings."""
    if not dtypes.is_code(tensor.data_type):
        return 0
    return math.prod(max(0, d) for d in tensor.dims) * dtypes.numpy_dtype(tensor.data_type).itemsize


def constant_node(value: Value, array: np.ndarray) -> Node:
    """A Constant node that returns a value."""
    tensor = numpy_helper.from_array(array, value.name)
    return Node("Constant", [], [value], {"value": helper.make_attribute("value", tensor)})


def constant_value(node: Node) -> np.ndarray | None:
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
