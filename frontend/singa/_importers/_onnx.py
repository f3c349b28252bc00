"""Imports ONNX files; no framework is needed."""

from __future__ import annotations

from typing import Any

from singa_backend.proto.load import ModelSource, embed, load_model

from .._onnx.model import SONNXModel
from ..device import DeviceLike
from ._cleaning import cleaned


def from_onnx(
    source: ModelSource,
    device: DeviceLike | None = None,
    *,
    model_class: type[SONNXModel] | None = None,
    train_constants: bool = False,
) -> SONNXModel:
    """Import an ONNX file as a trainable model; no framework is needed.

    The model is in inference mode; to train it, define `train_one_batch`, set an optimizer, and call `model.train()`.
    `model.onnx_model` is the file; a BatchNormalization without scale or bias has ones and zeros there.

    Args:
        source: a path, bytes or a ModelProto.
        device: the device of the model; by default the CPU.
        model_class: the subclass of `SONNXModel` to create; it is called with (ModelProto or path, device).
        train_constants: whether constants of the file (factors, masks, tables) train by default, too.

    Returns:
        The model, with the parameters of the file.

    Raises:
        InvalidModel: the file breaks a rule of ONNX.
        UnsupportedModel: operators are not implemented; the error lists all of them.
        ResourceExhausted: the file exceeds a limit.

    Example:
        >>> model = from_onnx("model.onnx")
        >>> outputs = model.forward(x)
    """
    proto, folder = load_model(source)
    corrected = cleaned(proto)
    if corrected is not proto:
        embed(corrected, folder)
    options: dict[str, Any] = {"train_constants": True} if train_constants else {}
    of_file = corrected is proto and folder is not None  # a model of a path has its external data, and a small pickle
    model = (model_class or SONNXModel)(source if of_file else corrected, device, **options)
    model.onnx_model = corrected
    return model
