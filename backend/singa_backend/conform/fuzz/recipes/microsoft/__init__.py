"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation, convolution_state, diffusion, experts, gates, hyper_connections, lax, normalization, recurrent

__all__ = [
    "activation",
    "convolution_state",
    "diffusion",
    "experts",
    "gates",
    "hyper_connections",
    "lax",
    "normalization",
    "recurrent",
]
