"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation, attention

__all__ = ["activation", "attention"]
