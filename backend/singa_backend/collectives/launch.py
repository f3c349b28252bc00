"""The communicator of this process, chosen by how it was started."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import numpy as np

from ..errors import InvalidInput, MissingDependency
from .communicator import Communicator
from .environment import launched_size
from .single import SingleProcess

ENGINES = ("mpi", "nccl", "single")


def communicator(engine: str | None = None, timeout: float = 300.0, pieces: int = 1 << 22) -> Communicator:
    """Create the communicator of this process.

    Args:
        engine: "mpi", "nccl" (whose processes an MPI launcher starts) or "single"; None for "mpi" if a launcher has started
            several processes, or the program has imported mpi4py's MPI, otherwise "single".
        timeout: Seconds that an operation waits for the other processes.
        pieces: The maximum number of elements of one operation; longer arrays are sent in pieces.

    Returns:
        The communicator.

    Raises:
        InvalidInput: The engine is unknown, or the timeout is not positive (SX386).
        MissingDependency: The engine's package is not installed, or the processes were started by the launcher of another
            MPI library than that of mpi4py (SX700).
        CommunicationError: Another process does not create its communicator within the timeout (SX950).
        DeviceUnavailable: There is no GPU for NCCL (SX500).
    """
    if engine is not None and engine not in ENGINES:
        raise InvalidInput(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}", code="SX386")
    if not timeout > 0:
        raise InvalidInput(f"timeout must be above 0 s, got {timeout!r}", code="SX386")
    size = launched_size()
    if engine is None:
        engine = "mpi" if size > 1 or "mpi4py.MPI" in sys.modules else "single"
    if engine == "single":
        return SingleProcess(timeout)
    if find_spec("mpi4py") is None:
        raise MissingDependency(
            f"a training in {size} processes needs mpi4py" if size > 1 else "the engine mpi needs mpi4py",
            hint="pip install 'sonnx[mpi]'",
        )
    try:
        from .mpi import MpiRank

        rank = MpiRank(timeout, pieces)
    except (ImportError, RuntimeError) as error:
        raise MissingDependency(f"mpi4py cannot load an MPI library: {error}", hint="pip install 'sonnx[mpi]'") from error
    if engine == "mpi":
        return rank
    from .nccl import NcclRank, unique_id

    own = np.array(unique_id() if rank.rank == 0 else [0] * 128, np.int64)
    shared = rank.broadcast(own, 0).wait()
    return NcclRank(shared.tolist(), rank.rank, rank.size, rank.local_rank, timeout, pieces)


def nccl_group(id: Any, rank: int | None, size: int | None, timeout: float = 300.0, pieces: int = 1 << 22) -> Communicator:
    """Create the communicator of a process in a group on one machine, without a launcher.

    Args:
        id: The id of the group, an object with the attribute `id`, or the id itself: of NCCL 128 integers, of sockets a path.
        rank: The number of this process.
        size: The number of processes.
        timeout: Seconds that an operation waits for the other processes.
        pieces: The maximum number of elements of one operation of NCCL; longer arrays are sent in pieces.

    Returns:
        The communicator.

    Raises:
        InvalidInput: The rank or the size is missing or out of range, another process has this rank, or the timeout is not
            positive (SX386).
        MissingDependency: CuPy or NCCL is not installed (SX700).
        CommunicationError: Another process does not come within the timeout (SX950), or has another size (SX952).
    """
    whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (rank, size))
    if not whole or rank is None or size is None or not 0 <= rank < size:
        raise InvalidInput(f"local_rank must be in [0, world_size), got {rank!r} of {size!r}", code="SX386")
    if not timeout > 0:
        raise InvalidInput(f"timeout must be above 0 s, got {timeout!r}", code="SX386")
    own = getattr(id, "id", id)
    if isinstance(own, str):
        from .sockets import SocketRank

        return SocketRank(own, rank, size, timeout)
    from .nccl import NcclRank

    return NcclRank(own, rank, size, rank, timeout, pieces)
