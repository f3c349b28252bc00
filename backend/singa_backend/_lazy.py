"""The modules and public names of the package as attributes, imported on first use; the modules that declare operators.

The import of `installation` warns of another package `singa`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from .domains import waiting
from .io import installation as installation

waiting.update(
    {
        **dict.fromkeys(("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "ai.singa"), "singa_backend.operators"),
        "com.microsoft": "singa_backend.operators.microsoft",
    }
)


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # Python looks for `__path__` here before it imports anything
        raise AttributeError(f"module 'singa_backend' has no attribute {name!r}")
    if find_spec(f"singa_backend.{name}"):
        return import_module(f"singa_backend.{name}")
    from . import _names

    if name != "__all__" and name not in _names.__all__:
        raise AttributeError(f"module 'singa_backend' has no attribute {name!r}")
    return getattr(_names, name)


def __dir__() -> list[str]:
    from ._names import __all__

    return list(__all__)
