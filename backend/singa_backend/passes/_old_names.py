"""The names of the editors, and of a failure, before version 0.3 and before graphs of files were those of the IR."""

from ..deprecation import old_names
from ..ir.graph import Graph, Node
from .model import ModelEditor
from .pipeline import PassFailure

__getattr__ = old_names(
    "singa_backend.passes",
    {"Net": Graph, "Edit": ModelEditor, "Failure": PassFailure, "GraphEditor": Graph, "NodeEditor": Node},
)
