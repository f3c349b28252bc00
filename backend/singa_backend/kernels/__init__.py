"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import convolution, layouts, normalization, pooling, views

__all__ = ["convolution", "layouts", "normalization", "pooling", "views"]
