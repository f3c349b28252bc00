"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation, convolution, indexing, products

__all__ = ["activation", "convolution", "indexing", "products"]
