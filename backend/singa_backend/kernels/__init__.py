"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import convolution, normalization, pooling, quantized, views

__all__ = ["convolution", "normalization", "pooling", "quantized", "views"]
