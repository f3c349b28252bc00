"""Kernels: faster ways to compute an operator than its definition, chosen when a plan is made."""

from . import (
    attention,
    convolution,
    elementwise,
    layer_norms,
    layouts,
    movement,
    normalization,
    pooling,
    products,
    quantization,
    quantized,
    recurrent,
    reductions,
    resampling,
    softmaxes,
    views,
)

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "layer_norms",
    "layouts",
    "movement",
    "normalization",
    "pooling",
    "products",
    "quantization",
    "quantized",
    "recurrent",
    "reductions",
    "resampling",
    "softmaxes",
    "views",
]
