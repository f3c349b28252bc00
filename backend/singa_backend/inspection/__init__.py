"""What is in a model, and would it run: `inspect` makes tables and a picture, `check` lists all problems; nothing is executed."""

from .checking import CheckReport, OperatorUse, check
from .opinion import Opinion
from .tables import Call, Inspection, State, Table, inspect

__all__ = ["Call", "CheckReport", "Inspection", "OperatorUse", "Opinion", "State", "Table", "check", "inspect"]
