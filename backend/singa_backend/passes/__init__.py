"""Rewrites of ONNX models that leave every result unchanged."""

from ._old_names import __getattr__ as __getattr__
from .graph import GraphEditor
from .index import Node
from .model import ModelEditor
from .pipeline import FUSIONS, PASSES, Failure, Pass, PassReport, Report, optimize
from .sanitize import Sanitized, sanitize

__all__ = [
    "FUSIONS",
    "PASSES",
    "Failure",
    "GraphEditor",
    "ModelEditor",
    "Node",
    "Pass",
    "PassReport",
    "Report",
    "Sanitized",
    "optimize",
    "sanitize",
]
