"""Write graphs and single calls at a requested opset."""

from . import adapters

__all__ = ["adapters"]
