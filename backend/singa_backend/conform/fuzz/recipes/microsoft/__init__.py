"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation, diffusion, gates, hyper_connections, lax, normalization

__all__ = ["activation", "diffusion", "gates", "hyper_connections", "lax", "normalization"]
