"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation, convolution, products

__all__ = ["activation", "convolution", "products"]
