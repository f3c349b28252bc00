"""What programs ask of SINGA's native module: its build options, its version and ids of NCCL. There is no native code here.

`USE_CUDA` is True if this machine has a usable GPU, `USE_DIST` if several processes can train: over sockets, mpi4py or CuPy's
NCCL; both are determined on first use, so that the import stays light.
"""

from __future__ import annotations

import socket
from importlib.util import find_spec
from typing import Any

from singa_backend.errors import InvalidInput
from singa_backend.io.installation import version

from . import device

__all__ = ["USE_CUDA", "USE_DIST", "NcclIdHolder", "__version__"]

USE_CUDA: bool
"""Whether this machine has a usable GPU."""

USE_DIST: bool
"""Whether several processes can train: the system has Unix sockets, mpi4py is installed, or CuPy on a machine with a GPU."""

__version__: str
"""The version of sonnx."""


class NcclIdHolder:
    """The id of a group of processes on one machine, created before they start, and passed to `opt.DistOpt` in each of them.

    Args:
        engine: "nccl" exchanges arrays between GPUs, "socket" between processes on CPUs; None for "nccl" if this machine has a
            usable GPU, otherwise "socket".

    Attributes:
        id: The id: of NCCL 128 integers, of sockets a path.

    Raises:
        InvalidInput: The engine is unknown (SX386).
        MissingDependency: CuPy or NCCL is not installed; or the system has no Unix sockets.
        DeviceUnavailable: There is no usable GPU for NCCL.

    Example:
        >>> holder = NcclIdHolder()
        >>> workers = [multiprocessing.Process(target=train, args=(holder, rank, 2)) for rank in range(2)]
        >>> # in train: opt.DistOpt(sgd, nccl_id=holder, local_rank=rank, world_size=2)
    """

    def __init__(self, engine: str | None = None) -> None:
        if engine not in (None, "nccl", "socket"):
            raise InvalidInput(f"engine must be one of nccl, socket, got {engine!r}", code="SX386")
        self.id: tuple[int, ...] | str
        if engine == "nccl" or (engine is None and device.get_num_gpus() > 0):
            from singa_backend.collectives.nccl import unique_id

            self.id = unique_id()
        else:
            from singa_backend.collectives.sockets import new_id

            self.id = new_id()


def __getattr__(name: str) -> Any:
    if name == "USE_CUDA":
        return device.get_num_gpus() > 0
    if name == "USE_DIST":
        return (
            hasattr(socket, "AF_UNIX")
            or find_spec("mpi4py") is not None
            or (device.get_num_gpus() > 0 and find_spec("cupy") is not None)
        )
    if name == "__version__":
        return version()
    raise AttributeError(f"module 'singa.singa_wrap' has no attribute {name!r}; values of tensors are arrays, `Tensor.data`")
