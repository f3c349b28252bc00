"""SINGA's Python API: tensors, layers, models and optimizers, and `singa.sonnx`, which reads and writes ONNX.

    from singa import autograd, device, layer, model, opt, sonnx, tensor

The small modules are `utils`, `data`, `image_tool` and `snapshot`.
"""

from ._lazy import __getattr__ as __getattr__

__all__ = [
    "autograd", "codegen", "data", "device", "exporting", "image_tool", "initializer", "layer", "model", "opt", "quantization",
    "snapshot", "sonnx", "tape", "tensor", "utils",
]  # fmt: skip
