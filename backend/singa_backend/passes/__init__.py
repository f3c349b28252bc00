"""Rewrites of ONNX models that leave every result unchanged."""

from .graph import Net, Node
from .model import Edit
from .pipeline import PASSES, Failure, Pass, PassReport, Report, optimize

__all__ = ["PASSES", "Edit", "Failure", "Net", "Node", "Pass", "PassReport", "Report", "optimize"]
