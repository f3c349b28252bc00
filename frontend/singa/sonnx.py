"""Load, save, prepare and run ONNX models; import, export and train them."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
from onnx import ModelProto

from singa_backend.proto.load import load_model
from singa_backend.proto.save import staged

from ._onnx.custom_exporters import exporter
from ._onnx.export import ExportReport, convert, export, to_onnx
from ._onnx.frontend import SingaFrontend
from ._onnx.model import SONNXModel
from ._onnx.rep import SingaBackend, SingaRep
from ._onnx.training_step import step_pairs, to_training_onnx
from ._onnx.verify import ExportMismatch, export_and_check

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


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
