"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation

__all__ = ["activation"]
