"""Write graphs and single calls at the opset that a file requests."""

from . import adapters

__all__ = ["adapters"]
