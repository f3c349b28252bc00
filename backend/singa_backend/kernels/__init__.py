"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import attention, convolution, layer_norms, normalization, pooling, products, quantized, softmaxes, views

__all__ = [
    "attention",
    "convolution",
    "layer_norms",
    "normalization",
    "pooling",
    "products",
    "quantized",
    "softmaxes",
    "views",
]
