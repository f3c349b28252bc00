"""Post-training quantization: float models as models with 8-bit weights and activations, and how far their values move."""

from .accuracy import ErrorRow, quantization_errors
from .few_bits import quantize_weights
from .model import quantize
from .options import FloatWeight

__all__ = ["ErrorRow", "FloatWeight", "quantization_errors", "quantize", "quantize_weights"]
