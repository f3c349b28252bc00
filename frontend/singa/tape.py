"""ONNX's operators on tensors, `op.Mul(x, y)`, and the class to derive custom operators from."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType
from typing import Any

from ._core import tape
from ._core.node import Node
from ._core.ops import TensorInterpreter
from ._core.tape import Dummy, Operation, Operator, no_tape
from ._core.tensor import op

__all__ = ["Dummy", "Node", "Operation", "Operator", "no_tape", "op"]


class _OldNames(ModuleType):
    """The module with the old names of the mode and of the interpreter."""

    @property
    def training(self) -> bool:
        """The mode of the tape; use `autograd.training`."""
        return tape.training

    @training.setter
    def training(self, flag: bool) -> None:
        warnings.warn("singa.tape.training is now singa.autograd.training", DeprecationWarning, stacklevel=2)
        tape.training = bool(flag)

    @property
    def Recorder(self) -> type[TensorInterpreter[Any]]:
        """Deprecated: the class of `op`."""
        warnings.warn("singa.tape.Recorder is now the class of singa.tape.op", DeprecationWarning, stacklevel=2)
        return TensorInterpreter


sys.modules[__name__].__class__ = _OldNames
