"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation, convolution, indexing, packed, products, signals, tokens

__all__ = ["activation", "convolution", "indexing", "packed", "products", "signals", "tokens"]
