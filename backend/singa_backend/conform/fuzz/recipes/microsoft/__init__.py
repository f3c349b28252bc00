"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import (
    activation,
    attention,
    convolution,
    diffusion,
    few_bits,
    gates,
    hyper_connections,
    indexing,
    lax,
    normalization,
    products,
    quantized,
)

__all__ = [
    "activation",
    "attention",
    "convolution",
    "diffusion",
    "few_bits",
    "gates",
    "hyper_connections",
    "indexing",
    "lax",
    "normalization",
    "products",
    "quantized",
]
