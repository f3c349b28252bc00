"""What each process of multiprocessing runs in tests/frontend/test_sockets.py: python socket_ranks.py START SIZE NAME ..."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from typing import Any

import numpy as np
from mpi_ranks import trained

from singa import opt, singa_wrap
from singa_backend.collectives.communicator import copied, total
from singa_backend.errors import SonnxError


def tell(text: str) -> None:
    """Print a line at once: several processes write."""
    os.write(1, f"{text}\n".encode())


def training(holder: Any, rank: int, size: int) -> None:
    """Equal to one process on the whole batch; equal on all ranks."""
    for graph in (False, True):
        dist = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), holder, rank, size)
        assert (dist.global_rank, dist.local_rank, dist.world_size) == (rank, rank, size)
        got = trained(dist, rank, size, graph)
        alone = trained(opt.SGD(lr=0.1, momentum=0.9), 0, 1, graph)
        for name, value in got.items():
            assert np.abs(value - alone[name]).max() < 1e-5
            assert np.array_equal(copied(dist.communicator, value, 0), value)
    tell(f"rank {rank} is equal")


def ends(holder: Any, rank: int, size: int, how: str, who: str) -> None:
    """A rank ends, or is stuck, while the others wait for it."""
    comm = opt.DistOpt(nccl_id=holder, local_rank=rank, world_size=size, timeout=60.0).communicator
    comm.timeout = 2.0 if how in ("stop", "sleep") else 60.0  # not for the start, which takes longer on a busy machine
    if rank == int(who):
        total(comm, np.ones(1))
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "sleep":
            time.sleep(600)
        elif how == "raise":
            raise ZeroDivisionError("a fault of this rank")
        elif how == "exit":
            sys.exit(7)
        elif how == "abort":
            comm.abort(5)
        return
    try:
        for _ in range(2):
            total(comm, np.ones(1))
    except SonnxError as error:
        tell(f"rank {rank}: {error.code} {error.message}")
        sys.exit(3)


def unfinished(holder: Any, rank: int, size: int) -> None:
    """Operations that nobody waits for are sent; rank 0, which combines them, has nothing left to do."""
    comm = opt.DistOpt(nccl_id=holder, local_rank=rank, world_size=size, timeout=60.0).communicator
    handles = [comm.all_reduce(np.ones(200_000, np.float32)) for _ in range(5)]
    if rank:
        time.sleep(0.3)
        assert all(h.wait()[0] == size for h in handles)
        tell(f"rank {rank} has all")


FORKED = os.pipe()
"""What a rank forked lives until all others have closed the second end: the parent does when rank 0 has ended."""


def forked(holder: Any, rank: int, size: int) -> None:
    """The end of a rank is seen although a process that it forked lives on."""
    comm = opt.DistOpt(nccl_id=holder, local_rank=rank, world_size=size, timeout=60.0).communicator
    if rank == 1:
        if os.fork() == 0:
            os.close(FORKED[1])
            os.read(FORKED[0], 1)
            os._exit(0)
        return
    try:
        total(comm, np.ones(1))
    except SonnxError as error:
        tell(f"rank {rank}: {error.code} {error.message}")


def main(start: str, size: int, name: str, *arguments: str) -> None:
    context: Any = multiprocessing.get_context(start)
    holder = singa_wrap.NcclIdHolder("socket")
    processes = [context.Process(target=globals()[name], args=(holder, rank, size, *arguments)) for rank in range(size)]
    for process in processes:
        process.start()
    end = time.monotonic() + 90
    if name == "ends":
        waited = [p for rank, p in enumerate(processes) if rank != int(arguments[1])]
        for process in waited:
            process.join(max(0.0, end - time.monotonic()))
        for process in processes:
            process.kill()
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
        if process is processes[0]:
            os.close(FORKED[1])
    tell(f"exit codes {[p.exitcode for p in processes]}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
