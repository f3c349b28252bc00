"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation, gates, lax, normalization

__all__ = ["activation", "gates", "lax", "normalization"]
