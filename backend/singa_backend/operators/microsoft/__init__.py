"""onnxruntime's own operators: those of com.microsoft, and those that it reads in ONNX's domain.

One family per file, written as those of ONNX.  `_schemas` declares their schemas first.
"""

from . import (
    _schemas,
    activation,
    attention,
    convolution,
    diffusion,
    dropout,
    few_bits,
    few_bits_experts,
    few_bits_forms,
    gates,
    group_query_attention,
    hyper_connections,
    image,
    indexing,
    lax,
    multi_head_attention,
    normalization,
    products,
    quantized,
    quantized_products,
    quantized_recurrent,
    rotary,
)

__all__ = [
    "_schemas",
    "activation",
    "attention",
    "convolution",
    "diffusion",
    "dropout",
    "few_bits",
    "few_bits_experts",
    "few_bits_forms",
    "gates",
    "group_query_attention",
    "hyper_connections",
    "image",
    "indexing",
    "lax",
    "multi_head_attention",
    "normalization",
    "products",
    "quantized",
    "quantized_products",
    "quantized_recurrent",
    "rotary",
]
