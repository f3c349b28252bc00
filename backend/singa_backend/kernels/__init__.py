"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import convolution, layer_norms, normalization, pooling, products, softmaxes, views

__all__ = ["convolution", "layer_norms", "normalization", "pooling", "products", "softmaxes", "views"]
