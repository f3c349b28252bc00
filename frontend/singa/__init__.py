"""What a person writes against: tensors, layers, models and optimizers of SINGA's API, and `singa.sonnx`, ONNX in and out.

    from singa import autograd, device, layer, model, opt, sonnx, tensor

`utils`, `data`, `image_tool` and `snapshot` are its small modules.
"""

from . import sonnx

__all__ = ["sonnx"]
