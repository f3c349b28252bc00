"""What programs ask of SINGA's native module: its build options and its version. There is no native code here.

`USE_CUDA` is True if this machine has a usable GPU; it is determined on first use, so that the import stays light.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from . import device

__all__ = ["USE_CUDA", "USE_DIST", "__version__"]

USE_CUDA: bool
"""Whether this machine has a usable GPU."""

USE_DIST = False
"""Whether SINGA's native distributed training is built in."""

__version__: str
"""The version of sonnx."""


def __getattr__(name: str) -> Any:
    if name == "USE_CUDA":
        return device.get_num_gpus() > 0
    if name == "__version__":
        return version("sonnx")
    raise AttributeError(f"module 'singa.singa_wrap' has no attribute {name!r}; values of tensors are arrays, `Tensor.data`")
