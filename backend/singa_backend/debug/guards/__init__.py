"""Guards: small files with the behaviour of a model, which any runtime can be checked against.

guard = write_guard("model.onnx", "model.guard")
found = check_guard("model.guard", against="onnxruntime")
found.verdict, found.culprit
"""

from .check import GuardCheck, GuardRow, NotChecked, check_guard
from .document import Guard, GuardCase, GuardedValue, read_guard
from .locate import Culprit
from .write import inputs_of, write_guard

__all__ = [
    "Culprit",
    "Guard",
    "GuardCase",
    "GuardCheck",
    "GuardRow",
    "GuardedValue",
    "NotChecked",
    "check_guard",
    "inputs_of",
    "read_guard",
    "write_guard",
]
