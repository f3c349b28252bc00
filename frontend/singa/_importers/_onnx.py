"""ONNX files as models; no framework is needed."""

from __future__ import annotations

from onnx import TensorProto

from singa_backend.proto.load import ModelSource, embed, load_model
from singa_backend.proto.save import tensors

from .._onnx.model import SONNXModel
from ..device import DeviceLike
from ._cleaning import cleaned


def from_onnx(
    source: ModelSource, device: DeviceLike | None = None, *, model_class: type[SONNXModel] | None = None
) -> SONNXModel:
    """A trainable model of an ONNX file, a path, bytes or a ModelProto; no framework is needed.

    The model infers at first: `model.train()` after `train_one_batch` and an optimizer are there.
    device: a Device, None for the CPU.  model_class: a subclass of SONNXModel to make, called with (ModelProto or path, device).
    The file itself is at `model.onnx_model`; a BatchNormalization without scale or bias has ones and zeros there.
    Raises InvalidModel, UnsupportedModel (all that is unsupported at once), ResourceExhausted.
    """
    proto, folder = load_model(source)
    mended = cleaned(proto)
    if mended is not proto:
        embed(mended, folder)
    outside = any(t.data_location == TensorProto.EXTERNAL for t in tensors(mended))  # found beside the file that a path names
    model = (model_class or SONNXModel)(source if outside and folder is not None else mended, device)
    model.onnx_model = mended
    model.training = False
    return model
