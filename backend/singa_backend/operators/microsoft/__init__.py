"""onnxruntime's own operators: those of com.microsoft, and those that it reads in ONNX's domain.

One family per file, written as those of ONNX.  `_schemas` declares their schemas first.
"""

from . import (
    _schemas,
    activation,
    attention_lstm,
    convolution_state,
    diffusion,
    dropout,
    experts,
    gated_delta,
    gates,
    hyper_connections,
    lax,
    normalization,
    recurrent,
)

__all__ = [
    "_schemas",
    "activation",
    "attention_lstm",
    "convolution_state",
    "diffusion",
    "dropout",
    "experts",
    "gated_delta",
    "gates",
    "hyper_connections",
    "lax",
    "normalization",
    "recurrent",
]
