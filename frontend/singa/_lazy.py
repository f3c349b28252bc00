"""The public modules as attributes of the package, imported on first use: `import singa; singa.tensor`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

MODULES = (
    "autograd", "codegen", "data", "device", "exporting", "image_tool", "initializer", "layer", "model", "opt", "quantization",
    "snapshot", "sonnx", "tape", "tensor", "utils",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType:
    if name not in MODULES:
        raise AttributeError(f"module 'singa' has no attribute {name!r}")
    return import_module(f"{__package__}.{name}")
