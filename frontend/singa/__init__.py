"""SINGA's Python API: tensors, layers, models, optimizers, and `singa.sonnx` to read and write ONNX.

    from singa import autograd, device, layer, model, opt, sonnx, tensor

The helper modules are `utils`, `data`, `image_tool` and `snapshot`.
"""

from ._lazy import __dir__ as __dir__
from ._lazy import __getattr__ as __getattr__

__version__: str
"""The version of the distribution `sonnx`."""

__all__ = [
    "autograd", "codegen", "data", "device", "exporting", "image_tool", "initializer", "layer", "model", "opt", "quantization",
    "singa_wrap", "snapshot", "sonnx", "tape", "tensor", "utils",
]  # fmt: skip
