"""Inspect a model without running it: `inspect` returns tables and a picture, `check` lists all problems."""

from ..proto.checker import CheckerResult
from ._old_names import __getattr__ as __getattr__
from .checking import CheckReport, OperatorUse, check
from .table import Call, State, Table
from .tables import Inspection, inspect
from .trainable import TrainableReport, trainable_report

__all__ = [
    "Call",
    "CheckReport",
    "CheckerResult",
    "Inspection",
    "OperatorUse",
    "State",
    "Table",
    "TrainableReport",
    "check",
    "inspect",
    "trainable_report",
]
