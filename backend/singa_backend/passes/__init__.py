"""Rewrites of ONNX models that leave every result unchanged."""

from ..ir.graph import Graph, Node, Value
from ._old_names import __getattr__ as __getattr__
from .model import ModelEditor
from .pipeline import FUSIONS, PASSES, Pass, PassFailure, PassReport, Report, optimize
from .sanitize import Sanitized, sanitize

__all__ = [
    "FUSIONS",
    "PASSES",
    "Graph",
    "ModelEditor",
    "Node",
    "Pass",
    "PassFailure",
    "PassReport",
    "Report",
    "Sanitized",
    "Value",
    "optimize",
    "sanitize",
]
