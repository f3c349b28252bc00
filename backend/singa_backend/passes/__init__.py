"""Rewrites of ONNX models that leave every result unchanged."""

from ._old_names import __getattr__ as __getattr__
from .graph import GraphEditor
from .index import NodeEditor
from .model import ModelEditor
from .pipeline import FUSIONS, PASSES, Pass, PassFailure, PassReport, Report, optimize
from .sanitize import Sanitized, sanitize

__all__ = [
    "FUSIONS",
    "PASSES",
    "GraphEditor",
    "ModelEditor",
    "NodeEditor",
    "Pass",
    "PassFailure",
    "PassReport",
    "Report",
    "Sanitized",
    "optimize",
    "sanitize",
]
