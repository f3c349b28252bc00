"""ONNX's operators on tensors, `op.Mul(x, y)`, and the class to derive custom operators from."""

from ._core.tape import Dummy, Node, Operation, Operator, no_tape
from ._core.tensor import op

__all__ = ["Dummy", "Node", "Operation", "Operator", "no_tape", "op"]
