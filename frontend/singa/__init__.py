"""What a person writes against; today `singa.sonnx`, ONNX in and out."""

from . import sonnx

__all__ = ["sonnx"]
