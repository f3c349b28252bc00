"""ONNX in and out: load and save files, prepare and run models."""

from __future__ import annotations

import os
from typing import Any

import onnx
from onnx import ModelProto

from singa_backend import SingaBackend, SingaRep
from singa_backend.backend import load_model
from singa_backend.debug import bisect, compare, reduce
from singa_backend.inspection import check, inspect

__all__ = [
    "SingaBackend",
    "SingaRep",
    "bisect",
    "check",
    "compare",
    "inspect",
    "is_compatible",
    "load",
    "prepare",
    "reduce",
    "run_model",
    "run_node",
    "save",
    "supports_device",
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
