"""An ONNX model as a trainable `Model`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import ModelProto

from singa_backend.proto.load import ModelSource

from .._core.tensor import Tensor
from ..device import DeviceLike
from ..model import Model
from .imported import Imported


class SONNXModel(Model):
    """An ONNX model as a trainable `Model`: every float initializer of its main graph is a parameter under its ONNX name.

    Where a file has none, its Constants of floats are: older exporters of PaddlePaddle write every weight so.
    onnx_model: a ModelProto, bytes or a path.  device: a Device, None for the CPU.
    BatchNormalization and Dropout train or infer as the model's mode says, whatever mode the file was written in.
    Write `train_one_batch` and `set_optimizer` in a subclass; layers that are added train beside the imported parameters.
    onnx_model (attribute): the file, where `from_onnx` or an importer of a framework made the model.
    Raises what `SingaBackend.prepare` raises.
    """

    onnx_model: ModelProto | None = None

    def __init__(self, onnx_model: ModelSource, device: DeviceLike | None = None) -> None:
        super().__init__()
        self.imported = Imported(onnx_model, device)

    def forward(self, *input: Any, aux_output: Sequence[str] = (), **kwargs: Any) -> list[Tensor]:
        """The outputs for Tensors (or arrays) in the order of the model's inputs, as a list, also where there is one.

        aux_output: names of values to give after the outputs.
        last_layers: -1 runs everything, -k all but the last k - 1 operators, and gives what the last one gives.
        Raises InvalidInput for inputs that do not fit.
        """
        last_layers = kwargs.pop("last_layers", -1)
        if kwargs:
            raise TypeError(f"forward() got an unexpected keyword argument {next(iter(kwargs))!r}")
        return self.imported.forward(input, aux_output, last_layers, training=self.training)

    def get_params(self) -> dict[str, Tensor]:
        """The parameters by name: those of the file, and then those of added layers."""
        return {**self.imported.parameters, **super().get_params()}

    def get_states(self) -> dict[str, Tensor]:
        """Parameters and running statistics by name."""
        return {**self.imported.tensors(), **super().get_states()}
