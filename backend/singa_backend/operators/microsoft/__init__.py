"""onnxruntime's own operators: those of com.microsoft, and those that it reads in ONNX's domain.

One family per file, written as those of ONNX.  `_schemas` declares their schemas first.
"""

from . import _schemas, activation, few_bits, lax, quantized, quantized_products

__all__ = ["_schemas", "activation", "few_bits", "lax", "quantized", "quantized_products"]
