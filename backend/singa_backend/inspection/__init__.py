"""What is in a model, and would it run: `inspect` makes tables and a picture, `check` lists all problems; nothing is executed."""

from .checking import CheckReport, OperatorUse, check
from .opinion import Opinion
from .tables import Call, Inspection, State, Table, inspect
from .trainable import TrainableReport, trainable_report

__all__ = [
    "Call", "CheckReport", "Inspection", "OperatorUse", "Opinion", "State", "Table", "TrainableReport", "check", "inspect",
    "trainable_report",
]  # fmt: skip
