"""Recipes of onnxruntime's own operators; only selections that name com.microsoft draw them."""

from . import activation, few_bits, quantized

__all__ = ["activation", "few_bits", "quantized"]
