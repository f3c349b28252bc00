"""The names of the editors, and of a failure, before version 0.3."""

from ..deprecation import old_names
from .graph import GraphEditor
from .index import NodeEditor
from .model import ModelEditor
from .pipeline import PassFailure

__getattr__ = old_names(
    "singa_backend.passes", {"Net": GraphEditor, "Edit": ModelEditor, "Node": NodeEditor, "Failure": PassFailure}
)
