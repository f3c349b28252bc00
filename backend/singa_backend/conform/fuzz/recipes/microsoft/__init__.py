"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import (
    activation,
    attention,
    convolution,
    convolution_state,
    diffusion,
    experts,
    few_bits,
    gates,
    hyper_connections,
    indexing,
    lax,
    normalization,
    products,
    quantized,
    recurrent,
)

__all__ = [
    "activation",
    "attention",
    "convolution",
    "convolution_state",
    "diffusion",
    "experts",
    "few_bits",
    "gates",
    "hyper_connections",
    "indexing",
    "lax",
    "normalization",
    "products",
    "quantized",
    "recurrent",
]
