"""The names of the editors before version 0.2."""

from ..deprecation import old_names
from .graph import GraphEditor
from .model import ModelEditor

__getattr__ = old_names("singa_backend.passes", {"Net": GraphEditor, "Edit": ModelEditor})
