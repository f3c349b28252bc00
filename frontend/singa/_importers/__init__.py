"""Models of other frameworks, by way of ONNX: the framework's own exporter writes the file, in memory where it can.

    model = sonnx.from_pytorch(net, x, train=True)      # also from_tensorflow, from_paddle, from_sklearn, from_onnx

A framework is imported when its function is called, and nowhere else.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from onnx import ModelProto, TensorProto

from singa_backend.backend import load_model
from singa_backend.debug.light import embed
from singa_backend.saving import tensors

from ._cleaning import cleaned
from ._common import ExporterFailure
from ._paddle import from_paddle
from ._pytorch import from_pytorch
from ._sklearn import from_sklearn
from ._tensorflow import from_tensorflow

if TYPE_CHECKING:
    from ..sonnx import SONNXModel

__all__ = ["ExporterFailure", "from_onnx", "from_paddle", "from_pytorch", "from_sklearn", "from_tensorflow"]


def from_onnx(
    source: ModelProto | bytes | str | os.PathLike[str], device: Any = None, *, model_class: type[SONNXModel] | None = None
) -> SONNXModel:
    """A trainable model of an ONNX file, a path, bytes or a ModelProto; no framework is needed.

    The model infers at first: `model.train()` after `train_one_batch` and an optimizer are there.
    device: a Device, None for the CPU.  model_class: a subclass of SONNXModel to make, called with (ModelProto or path, device).
    The file itself is at `model.onnx_model`; a BatchNormalization without scale or bias has ones and zeros there.
    Raises InvalidModel, UnsupportedModel (all that is unsupported at once), ResourceExhausted.
    """
    from ..sonnx import SONNXModel

    proto, folder = load_model(source)
    mended = cleaned(proto)
    if mended is not proto:
        embed(mended, folder)
    outside = any(t.data_location == TensorProto.EXTERNAL for t in tensors(mended))  # found beside the file that a path names
    model = (model_class or SONNXModel)(source if outside and folder is not None else mended, device)
    model.onnx_model = mended
    model.training = False
    return model
