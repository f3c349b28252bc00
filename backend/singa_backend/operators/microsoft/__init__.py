"""onnxruntime's own operators: those of com.microsoft, and those that it reads in ONNX's domain.

One family per file, written as those of ONNX.  `_schemas` declares their schemas first.
"""

from . import (
    _schemas,
    activation,
    attention,
    group_query_attention,
    lax,
    multi_head_attention,
    packed_attention,
    rotary,
    sparse_attention,
)

__all__ = [
    "_schemas", "activation", "attention", "group_query_attention", "lax", "multi_head_attention", "packed_attention", "rotary",
    "sparse_attention",
]  # fmt: skip
