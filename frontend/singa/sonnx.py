"""Load, save, prepare and run ONNX models; import, export and train them."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
from onnx import ModelProto

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.proto.load import load_model
from singa_backend.proto.save import staged

from ._onnx.custom_exporters import exporter
from ._onnx.export import ExportReport, convert, export, to_onnx
from ._onnx.frontend import SingaFrontend
from ._onnx.model import SONNXModel
from ._onnx.rep import OnnxAttributes, OnnxNode, SingaBackend, SingaRep, get_op
from ._onnx.training_step import step_pairs, to_training_onnx
from ._onnx.verify import ExportMismatch, export_and_check
from .device import Device, create_cuda_gpu, get_num_gpus
from .device import default_device as cpu_dev

if TYPE_CHECKING:
    from singa_backend.debug import bisect, compare, reduce
    from singa_backend.inspection import check, inspect, trainable_report
    from singa_backend.passes import optimize
    from singa_backend.passes.change_layout import change_layout, transpose_layout

    from ._importers import ExporterFailure, from_onnx, from_paddle, from_pytorch, from_sklearn, from_tensorflow

__all__ = [
    "ExportMismatch",
    "ExportReport",
    "ExporterFailure",
    "OnnxAttributes",
    "OnnxNode",
    "SONNXModel",
    "SingaBackend",
    "SingaFrontend",
    "SingaRep",
    "bisect",
    "change_layout",
    "check",
    "compare",
    "convert",
    "cpu_dev",
    "export",
    "export_and_check",
    "exporter",
    "from_onnx",
    "from_paddle",
    "from_pytorch",
    "from_sklearn",
    "from_tensorflow",
    "get_op",
    "gpu_dev",
    "inspect",
    "is_compatible",
    "load",
    "onnx_type_to_singa_type",
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

_LAZY = {
    **dict.fromkeys(("bisect", "compare", "reduce"), "singa_backend.debug"),
    **dict.fromkeys(("check", "inspect", "trainable_report"), "singa_backend.inspection"),
    "optimize": "singa_backend.passes",
    **dict.fromkeys(("change_layout", "transpose_layout"), "singa_backend.passes.change_layout"),
    **dict.fromkeys(
        ("ExporterFailure", "from_onnx", "from_paddle", "from_pytorch", "from_sklearn", "from_tensorflow"), "singa._importers"
    ),
}
"""Names whose modules are imported on first use, so that `import singa.sonnx` stays fast."""


gpu_dev: Device | None
"""The first GPU, or None; `cpu_dev` is the CPU."""


def __getattr__(name: str) -> Any:
    if name == "gpu_dev":  # not at the import, because it starts CUDA
        return create_cuda_gpu() if get_num_gpus() else None
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, "gpu_dev"})


prepare = SingaBackend.prepare
run_model = SingaBackend.run_model
run_node = SingaBackend.run_node
supports_device = SingaBackend.supports_device
is_compatible = SingaBackend.is_compatible


def load(path: str | os.PathLike[str]) -> ModelProto:
    """Read an ONNX file without its external data.

    To read external data too, pass the path to `prepare`.

    Args:
        path: the path of the file.

    Returns:
        The model as it is in the file.

    Raises:
        InvalidModel: the file does not exist, or is not an ONNX file.
        ResourceExhausted: the file is larger than `Limits.model_bytes`.
    """
    return load_model(path)[0]


def save(model: ModelProto, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Write a model to a file with `onnx.save`, whole or not at all.

    The file and its external data are written to a temporary folder next to the target and then moved into place.

    Args:
        model: the model.
        path: the path of the file; an existing file is overwritten.
        **kwargs: keywords of `onnx.save`, such as `save_as_external_data`.

    Raises:
        OSError: the file cannot be written.
    """
    target = Path(path).resolve()  # a link keeps pointing to the file that is written
    if (target.exists() and not target.is_file()) or Path(kwargs.get("location") or "").name != (kwargs.get("location") or ""):
        onnx.save(model, target, **kwargs)  # a device or a pipe is written through; data in another folder stay there
        return
    with staged(target) as stage:
        onnx.save(model, stage / target.name, **kwargs)


def onnx_type_to_singa_type(onnx_type: int) -> np.dtype[Any]:
    """Return the dtype of the tensors of an ONNX element type; no dtype is narrowed.

    Args:
        onnx_type: an element type of ONNX, such as `TensorProto.INT64`.

    Returns:
        The NumPy dtype.

    Raises:
        InvalidInput: ONNX does not have the element type (SX316).
    """
    if not dtypes.is_known(onnx_type):
        raise InvalidInput(f"onnx_type must be an element type of ONNX, got {onnx_type!r}", code="SX316")
    return dtypes.numpy_dtype(onnx_type)


def supported_ops(opset: int) -> dict[tuple[str, str], Any]:
    """Return for every operator that ONNX defines how it can be written at an opset.

    Args:
        opset: an opset of ai.onnx, 7 to the newest.

    Returns:
        A dict from (domain, name) to an object with two fields: `how` is "native", "composed" (of other operators) or "" (it
        cannot be written); `least` is the lowest opset, this one or newer, that can write one of its calls, or None.

    Raises:
        InvalidInput: the opset is not supported (SX323).
    """
    from singa_backend.conform.opset_matrix.supported import supported_ops as found  # imports the generator of test models

    return dict(found(opset))
