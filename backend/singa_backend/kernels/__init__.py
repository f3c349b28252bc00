"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import convolution, layouts, normalization, pooling, resampling, views

__all__ = ["convolution", "layouts", "normalization", "pooling", "resampling", "views"]
