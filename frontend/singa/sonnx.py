"""Load, save, prepare and run ONNX models; import, export and train them."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto

from singa_backend import dtypes
from singa_backend.errors import InvalidInput, InvalidModel
from singa_backend.io.files import new_folder, staged
from singa_backend.io.places import free_name
from singa_backend.limits import Limits
from singa_backend.machine import without_collector
from singa_backend.proto.load import load_model
from singa_backend.proto.save import data_name, locations, locations_in_place, old_data, tensors
from singa_backend.proto.save import save as write_model

if TYPE_CHECKING:
    from singa_backend.debug import bisect, compare, reduce
    from singa_backend.inspection import check, inspect, trainable_report
    from singa_backend.passes import optimize
    from singa_backend.passes.change_layout import change_layout, transpose_layout
    from singa_backend.passes.head import ReplacedHead, replace_head
    from singa_backend.quantization import quantization_errors, quantize, quantize_weights

    from ._generation.empty_caches import decoder_inputs
    from ._generation.generator import GeneratedText, GeneratedTexts, Generator
    from ._importers import ExporterFailure, from_onnx, from_paddle, from_pytorch, from_sklearn, from_tensorflow
    from ._onnx.custom_exporters import exporter
    from ._onnx.export import convert, export, to_onnx
    from ._onnx.export_options import ExportReport
    from ._onnx.frontend import SingaFrontend
    from ._onnx.graph_function import GraphFunction, graph
    from ._onnx.graph_operators import Operators, op
    from ._onnx.graph_values import Value
    from ._onnx.lora import lora
    from ._onnx.model import SONNXModel
    from ._onnx.operators import Operator, define_operator, register_operator
    from ._onnx.rep import OnnxAttributes, OnnxNode, SingaBackend, SingaRep, get_op
    from ._onnx.training_step import step_pairs, to_training_onnx
    from ._onnx.types import (
        BFloat16,
        Bool,
        Complex64,
        Complex128,
        Double,
        Float,
        Float4E2M1,
        Float6E2M3,
        Float6E3M2,
        Float8E4M3FN,
        Float8E4M3FNUZ,
        Float8E5M2,
        Float8E5M2FNUZ,
        Float8E8M0,
        Float16,
        Int2,
        Int4,
        Int8,
        Int16,
        Int32,
        Int64,
        OptionalType,
        SequenceType,
        String,
        TensorType,
        UInt2,
        UInt4,
        UInt8,
        UInt16,
        UInt32,
        UInt64,
    )
    from ._onnx.verify import ExportMismatch, export_and_check
    from .device import Device, default_device

    prepare = SingaBackend.prepare
    run_model = SingaBackend.run_model
    run_node = SingaBackend.run_node
    supports_device = SingaBackend.supports_device
    is_compatible = SingaBackend.is_compatible
    cpu_dev = default_device
    """The CPU."""
    gpu_dev: Device | None
    """The first GPU, or None."""

__all__ = [
    "BFloat16",
    "Bool",
    "Complex64",
    "Complex128",
    "Double",
    "ExportMismatch",
    "ExportReport",
    "ExporterFailure",
    "Float",
    "Float4E2M1",
    "Float6E2M3",
    "Float6E3M2",
    "Float8E4M3FN",
    "Float8E4M3FNUZ",
    "Float8E5M2",
    "Float8E5M2FNUZ",
    "Float8E8M0",
    "Float16",
    "GeneratedText",
    "GeneratedTexts",
    "Generator",
    "GraphFunction",
    "Int2",
    "Int4",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "Limits",
    "OnnxAttributes",
    "OnnxNode",
    "Operator",
    "Operators",
    "OptionalType",
    "ReplacedHead",
    "SONNXModel",
    "SequenceType",
    "SingaBackend",
    "SingaFrontend",
    "SingaRep",
    "String",
    "TensorType",
    "UInt2",
    "UInt4",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "Value",
    "bisect",
    "change_layout",
    "check",
    "compare",
    "convert",
    "cpu_dev",
    "decoder_inputs",
    "define_operator",
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
    "graph",
    "inspect",
    "is_compatible",
    "load",
    "lora",
    "onnx_type_to_singa_type",
    "op",
    "optimize",
    "prepare",
    "quantization_errors",
    "quantize",
    "quantize_weights",
    "reduce",
    "register_operator",
    "replace_head",
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
    **dict.fromkeys(("ReplacedHead", "replace_head"), "singa_backend.passes.head"),
    **dict.fromkeys(("quantization_errors", "quantize", "quantize_weights"), "singa_backend.quantization"),
    "decoder_inputs": "singa._generation.empty_caches",
    **dict.fromkeys(("GeneratedText", "GeneratedTexts", "Generator"), "singa._generation.generator"),
    **dict.fromkeys(
        ("ExporterFailure", "from_onnx", "from_paddle", "from_pytorch", "from_sklearn", "from_tensorflow"), "singa._importers"
    ),
    "exporter": "singa._onnx.custom_exporters",
    **dict.fromkeys(("convert", "export", "to_onnx"), "singa._onnx.export"),
    "ExportReport": "singa._onnx.export_options",
    "SingaFrontend": "singa._onnx.frontend",
    **dict.fromkeys(("GraphFunction", "graph"), "singa._onnx.graph_function"),
    **dict.fromkeys(("Operators", "op"), "singa._onnx.graph_operators"),
    "Value": "singa._onnx.graph_values",
    "lora": "singa._onnx.lora",
    "SONNXModel": "singa._onnx.model",
    **dict.fromkeys(("Operator", "define_operator", "register_operator"), "singa._onnx.operators"),
    **dict.fromkeys(("OnnxAttributes", "OnnxNode", "SingaBackend", "SingaRep", "get_op"), "singa._onnx.rep"),
    **dict.fromkeys(("step_pairs", "to_training_onnx"), "singa._onnx.training_step"),
    **dict.fromkeys(("ExportMismatch", "export_and_check"), "singa._onnx.verify"),
}
"""Names whose modules are imported on first use, so that `import singa.sonnx` stays fast; the others are in `_onnx.types`."""

_OF_BACKEND = ("prepare", "run_model", "run_node", "supports_device", "is_compatible")


def __getattr__(name: str) -> Any:
    if name == "gpu_dev":  # never kept, because it starts CUDA
        from .device import create_cuda_gpu, get_num_gpus

        return create_cuda_gpu() if get_num_gpus() else None
    if name == "cpu_dev":
        value: Any = import_module("singa.device").default_device
    elif name in __all__:
        with without_collector():
            module = import_module("singa._onnx.rep" if name in _OF_BACKEND else _LAZY.get(name, "singa._onnx.types"))
        value = getattr(module.SingaBackend if name in _OF_BACKEND else module, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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


_UNNAMED = "sonnx-external-data"


def save(model: ModelProto, path: str | os.PathLike[str], **kwargs: Any) -> None:
    """Write a model to a file with `onnx.save`, whole or not at all.

    The file and its external data are written to a temporary folder next to the target and then moved into place.  External data
    go to one file, `path`.data (or `path`.1.data and so on, if there is such a file), or as the keywords specify.

    Args:
        model: the model.
        path: the path of the file; an existing file is replaced, and with it the external data of that name.
        **kwargs: keywords of `onnx.save`, such as `save_as_external_data`.

    Raises:
        InvalidInput: the file cannot be written (SX351).
        InvalidModel: the model refers to external data that were not loaded with it and are not next to the target (SX105).
    """
    import onnx
    from onnx.external_data_helper import convert_model_to_external_data

    with staged(path, overwrite=True) as stage:
        name, home = stage.target.name, stage.target.parent
        if kwargs.pop("save_as_external_data", False):
            one, location = kwargs.pop("all_tensors_to_one_file", True), kwargs.pop("location", None)
            chosen = {n: kwargs.pop(n) for n in ("size_threshold", "convert_attribute") if n in kwargs}
            convert_model_to_external_data(model, one, _UNNAMED, **chosen)  # it refuses names of files in the current folder
            _name_data(model, location, stage.target)
        for folder in {Path(n).parent for n in locations(model)}:
            if folder.is_absolute() or ".." in folder.parts:
                raise InvalidInput(f"external data must be in the folder of the model, got {folder}", code="SX351")
            new_folder(stage.folder / folder)
        onnx.save(model, stage / name, **kwargs)
        used = set(locations(model))
        lacking = sorted(n for n in used if not (os.path.exists(stage / n) or os.path.exists(home / n)))
        if lacking:
            what = f"the model refers to external data that are neither loaded nor next to {stage.path}: {', '.join(lacking)}"
            raise InvalidModel(what, code="SX105", hint="onnx.load(path) loads a model with its external data")
        if stage.through:
            return
        for old in old_data(stage.target) - used:
            stage.remove_later(old)
        if any(os.path.exists(home / n) for n in used if os.path.exists(stage / n)):
            # The model in place may need these files until it is replaced: first replace it by one whose data have other names.
            copy = ModelProto()
            copy.CopyFrom(model)  # onnx.save has taken the data out of it
            for spare in write_model(copy, stage.target, folder=stage.folder, check=False)[1:]:
                stage.remove_later(spare.name)


def _name_data(model: ModelProto, location: str | None, target: Path) -> None:
    """Name the external data: as the user has, or after the target, or after each tensor.

    Only the files that the user has named, or that the model in place has, are replaced.
    """
    own = locations_in_place(target)
    new = (t for t in tensors(model) if t.HasField("raw_data"))
    for entry in (e for t in new for e in t.external_data if e.key == "location"):
        if entry.value == _UNNAMED:
            entry.value = location or data_name(target)
        elif entry.value not in own:
            entry.value = free_name(target.parent, entry.value)


def onnx_type_to_singa_type(onnx_type: int) -> np.dtype[Any]:
    """Return the dtype of the tensors of an ONNX element type; no dtype is narrowed.

    Args:
        onnx_type: an element type of ONNX, such as `TensorProto.INT64`.

    Returns:
        The NumPy dtype.

    Raises:
        InvalidInput: ONNX does not have the element type (SX316).
    """
    if not dtypes.is_code(onnx_type):
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
