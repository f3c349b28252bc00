"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import (
    HEAD,
    attention,
    convolution,
    elementwise,
    layer_norms,
    layouts,
    matmul,
    movement,
    normalization,
    pooling,
    products,
    recurrent,
    reductions,
    resampling,
    softmaxes,
    views,
)

__all__ = [
    "HEAD",
    "attention",
    "convolution",
    "elementwise",
    "layer_norms",
    "layouts",
    "matmul",
    "movement",
    "normalization",
    "pooling",
    "products",
    "recurrent",
    "reductions",
    "resampling",
    "softmaxes",
    "views",
]
