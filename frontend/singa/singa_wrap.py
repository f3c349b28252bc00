"""What programs ask of SINGA's native module: its build options, its version and ids of NCCL. There is no native code here.

`USE_CUDA` is True if this machine has a usable GPU, `USE_DIST` if mpi4py or CuPy's NCCL can be imported; both are determined on
first use, so that the import stays light.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from . import device

__all__ = ["USE_CUDA", "USE_DIST", "NcclIdHolder", "__version__"]

USE_CUDA: bool
"""Whether this machine has a usable GPU."""

USE_DIST: bool
"""Whether several processes can train: mpi4py is installed, or CuPy on a machine with a GPU."""

__version__: str
"""The version of sonnx."""


class NcclIdHolder:
    """The id of a group of processes with GPUs on one machine, created before they start, and passed to `opt.DistOpt`.

    Attributes:
        id: The id, 128 integers.

    Raises:
        MissingDependency: CuPy or NCCL is not installed.
        DeviceUnavailable: There is no usable GPU.
    """

    def __init__(self) -> None:
        from singa_backend.collectives.nccl import unique_id

        self.id = unique_id()


def __getattr__(name: str) -> Any:
    if name == "USE_CUDA":
        return device.get_num_gpus() > 0
    if name == "USE_DIST":
        return find_spec("mpi4py") is not None or (device.get_num_gpus() > 0 and find_spec("cupy") is not None)
    if name == "__version__":
        return version("sonnx")
    raise AttributeError(f"module 'singa.singa_wrap' has no attribute {name!r}; values of tensors are arrays, `Tensor.data`")
