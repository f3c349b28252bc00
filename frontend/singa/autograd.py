"""Operators of SINGA's API as functions and classes on tensors, and their gradients."""

from __future__ import annotations

import sys
from types import ModuleType

from . import tape
from .tape import Dummy, Operation, Operator, backward, gradients, infer_dependency

__all__ = ["Dummy", "Operation", "Operator", "backward", "gradients", "infer_dependency"]


class _Module(ModuleType):
    """`autograd.training = True` is how programs switch the tape on: the flag is the tape's own."""

    @property
    def training(self) -> bool:
        return tape.training

    @training.setter
    def training(self, flag: bool) -> None:
        tape.training = bool(flag)


sys.modules[__name__].__class__ = _Module
