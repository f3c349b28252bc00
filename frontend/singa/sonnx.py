"""ONNX in and out: load and save files, prepare and run models."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import onnx
from onnx import ModelProto

from singa_backend.backend import load_model
from singa_backend.debug import bisect, compare, reduce
from singa_backend.inspection import check, inspect, trainable_report
from singa_backend.layout import change_layout, transpose_layout
from singa_backend.passes import optimize

from ._importers import ExporterFailure, from_onnx, from_paddle, from_pytorch, from_sklearn, from_tensorflow
from ._onnx.custom_exporters import exporter
from ._onnx.export import ExportReport, convert, export, to_onnx
from ._onnx.frontend import SingaFrontend
from ._onnx.imported import Imported
from ._onnx.rep import SingaBackend, SingaRep
from ._onnx.training_step import step_pairs, to_training_onnx
from ._onnx.verify import ExportMismatch, export_and_check
from .model import Model
from .tensor import Tensor

__all__ = [
    "ExportMismatch",
    "ExportReport",
    "ExporterFailure",
    "SONNXModel",
    "SingaBackend",
    "SingaFrontend",
    "SingaRep",
    "bisect",
    "change_layout",
    "check",
    "compare",
    "convert",
    "export",
    "export_and_check",
    "exporter",
    "from_onnx",
    "from_paddle",
    "from_pytorch",
    "from_sklearn",
    "from_tensorflow",
    "inspect",
    "is_compatible",
    "load",
    "optimize",
    "prepare",
    "reduce",
    "run_model",
    "run_node",
    "save",
    "step_pairs",
    "supported_ops",
    "supports_device",
    "to_onnx",
    "to_training_onnx",
    "trainable_report",
    "transpose_layout",
]

prepare = SingaBackend.prepare
run_model = SingaBackend.run_model
run_node = SingaBackend.run_node
supports_device = SingaBackend.supports_device
is_compatible = SingaBackend.is_compatible


def load(path: str | os.PathLike[str]) -> ModelProto:
    """Read an ONNX file; external data stay beside it (give `prepare` the path to have them read).

    Raises InvalidModel when the file is missing or is not ONNX.
    """
    return load_model(path)[0]


def save(model: ModelProto, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Write a model to a file; keywords are those of `onnx.save`."""
    onnx.save(model, os.fspath(path), **kwargs)


def supported_ops(opset: int) -> dict[tuple[str, str], Any]:
    """Every operator that ONNX defines, (domain, name) -> how it is written at an opset: `how`, and the `least` opset that can.

    how: "native", "composed" of other operators, or "".  Raises InvalidInput (SX323) for an opset that is not written at all.
    """
    from singa_backend.conform.opsets.supported import supported_ops as found  # draws models, and so needs the generator

    return dict(found(opset))


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

    def __init__(self, onnx_model: Any, device: Any = None) -> None:
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
