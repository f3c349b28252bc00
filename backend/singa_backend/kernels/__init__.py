"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import (
    attention,
    convolution,
    einsums,
    elementwise,
    large,
    layer_norms,
    movement,
    normalization,
    pooling,
    products,
    reductions,
    rotary,
    softmaxes,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "einsums",
    "elementwise",
    "large",
    "layer_norms",
    "movement",
    "normalization",
    "pooling",
    "products",
    "reductions",
    "rotary",
    "softmaxes",
    "views",
]
