"""Write graphs and single calls at a requested opset."""

from . import adapters, sampling_adapters

__all__ = ["adapters", "sampling_adapters"]
