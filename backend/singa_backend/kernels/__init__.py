"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import (
    attention,
    convolution,
    elementwise,
    large,
    layer_norms,
    movement,
    normalization,
    pooling,
    products,
    reductions,
    softmaxes,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "large",
    "layer_norms",
    "movement",
    "normalization",
    "pooling",
    "products",
    "reductions",
    "softmaxes",
    "views",
]
