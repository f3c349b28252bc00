"""The public modules as attributes of the package, imported on first use: `import singa; singa.tensor`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

MODULES = (
    "singa.autograd", "singa.codegen", "singa.data", "singa.device", "singa.exporting", "singa.image_tool", "singa.initializer",
    "singa.layer", "singa.model", "singa.opt", "singa.quantization", "singa.singa_wrap", "singa.snapshot", "singa.sonnx",
    "singa.tape", "singa.tensor", "singa.utils",
)  # fmt: skip


def __getattr__(name: str) -> ModuleType | str:
    if name == "__version__":
        from singa_backend.io.installation import version

        return version()
    if f"singa.{name}" not in MODULES:
        raise AttributeError(f"module 'singa' has no attribute {name!r}")
    return import_module(f"singa.{name}")


def __dir__() -> list[str]:
    return [name.removeprefix("singa.") for name in MODULES]
