"""What each rank runs in tests/frontend/test_mpi.py: mpiexec -n 2 python mpi_ranks.py NAME ...; a failed check ends the job."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np

from singa import autograd, layer, model, opt, tensor
from singa_backend.collectives import communicator
from singa_backend.collectives.communicator import copied, total
from singa_backend.errors import CommunicationError

F = np.float32


class Net(model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = layer.Linear(16), layer.Linear(4)

    def forward(self, x: Any) -> Any:
        return self.b(autograd.tanh(self.a(x)))

    def train_one_batch(self, x: Any, y: Any) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


def trained(rule: Any, rank: int, size: int, graph: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((64, 8)).astype(F), rng.integers(0, 4, 64).astype(np.int32)
    net = Net()
    net.set_optimizer(rule)
    net.compile([tensor.Tensor(data=x[:2], requires_grad=False)], is_train=True, use_graph=graph)
    net.set_params({n: (rng.standard_normal(p.shape) * 0.3).astype(F) for n, p in net.get_params().items()})
    for i in range(8):
        rows = slice(i % 4 * 16 + rank * 16 // size, i % 4 * 16 + (rank + 1) * 16 // size)
        net(*(tensor.Tensor(data=a[rows], requires_grad=False) for a in (x, y)))
    return {n: p.data for n, p in net.get_params().items()}


def training() -> None:
    """Equal to one process on the whole batch; equal on all ranks."""
    for graph in (False, True):
        dist = opt.DistOpt(opt.SGD(lr=0.1, momentum=0.9), buffSize=7)
        comm = dist.communicator
        assert comm.size > 1 and dist.local_rank == comm.rank
        got = trained(dist, comm.rank, comm.size, graph)
        alone = trained(opt.SGD(lr=0.1, momentum=0.9), 0, 1, graph)
        for name, value in got.items():
            assert np.abs(value - alone[name]).max() < 1e-5
            assert np.array_equal(copied(comm, value, 0), value)


class _Sent:
    """MPI's operations; the lengths of each collection are noted."""

    def __init__(self, world: Any) -> None:
        self.world, self.counts = world, []  # type: tuple[Any, list[list[int]]]

    def Iallgatherv(self, source: Any, target: Any) -> Any:
        self.counts.append(list(target[1][0]))
        return self.world.Iallgatherv(source, target)


def operations() -> None:
    """Every dtype; vectors of different lengths, also empty; arrays of several pieces; operations in flight together."""
    comm = communicator(pieces=5)
    rank, size = comm.rank, comm.size
    numbers = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float64, F, np.float16]
    started = []
    for dtype in (*numbers, ml_dtypes.bfloat16, np.complex64):
        for shape in ((), (0,), (4,), (3, 7)):
            a = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) + rank, dtype)
            want = sum((np.arange(np.prod(shape, dtype=int)).reshape(shape) + r) for r in range(size)).astype(dtype)
            started.append((comm.all_reduce(a), want))
            started.append((comm.broadcast(a, size - 1), a - dtype(rank) + dtype(size - 1)))
    for handle, want in reversed(started):
        got = handle.wait()
        assert got.dtype == np.asarray(want).dtype and got.shape == np.shape(want) and np.array_equal(got, want)
    sizes = [7 * r for r in range(size)]
    comm._world = world = _Sent(comm._world)
    parts = comm.all_gather(np.arange(sizes[rank], dtype=np.float16) + rank, sizes).wait()
    comm._world = world.world
    assert [p.tolist() for p in parts] == [[r + i for i in range(n)] for r, n in enumerate(sizes)]
    assert world.counts == [[max(0, min(n - i, 5)) for n in sizes] for i in range(0, max(1, sizes[-1]), 5)]
    assert [p.tolist() for p in comm.all_gather(np.array([rank], np.int32)).wait()] == [[r] for r in range(size)]
    assert total(comm, np.array([1.5])).tolist() == [1.5 * size]


def ends(how: str) -> None:
    """Rank 1 ends, or is stuck, while the others wait for it."""
    comm = communicator(timeout=60.0)
    comm.timeout = 2.0 if how in ("stop", "sleep") else 60.0  # not for the start, which takes longer on a busy machine
    total(comm, np.ones(1))
    if comm.rank == 1:
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
        return
    total(comm, np.ones(1))


def before(how: str) -> None:
    """Rank 1 ends before it has a communicator, for which the others wait."""
    if how == "imported":
        from mpi4py import MPI  # noqa: F401 - MPI starts
    if os.environ["PMI_RANK"] == "1":
        raise ZeroDivisionError("a fault of this rank")
    communicator(timeout=2.0)


def late() -> None:
    """Rank 0 works for longer than the timeout after the last operation."""
    comm = communicator(timeout=60.0)
    total(comm, np.ones(1))
    comm._job.timeout = 0.5  # not for the start, which takes longer on a busy machine
    if os.environ["PMI_RANK"] == "0":
        time.sleep(1.5)
        print("saved")


def several() -> None:
    """More communicators than MPI has; a rank that exits is noticed in an operation of each."""
    comms = [communicator(timeout=60.0) for _ in range(3000)]
    total(comms[0], np.ones(1))
    if comms[0].rank == 1:
        return
    start = time.monotonic()
    for comm in (comms[-1], comms[0]):
        try:
            total(comm, np.ones(1))
        except CommunicationError as error:
            assert "rank 1 has exited" in str(error)
    assert time.monotonic() - start < 30


def different(name: str) -> None:
    """Operations that MPI would combine: other sizes, dtypes and kinds."""
    comm = communicator(timeout=3.0)
    one = comm.rank == 1
    works = {
        "size": lambda: comm.all_reduce(np.ones(5 if one else 64, F)),
        "dtype": lambda: comm.all_reduce(np.ones(4, np.int32 if one else F)),
        "kind": lambda: comm.broadcast(np.ones(4, F), 0) if one else comm.all_reduce(np.ones(4, F)),
        "root": lambda: comm.broadcast(np.ones(4, F), comm.rank),
    }
    try:
        works[name]().wait()
    except CommunicationError as error:
        assert error.code == "SX952"
    else:
        raise AssertionError(name)


def unfinished() -> None:
    """Operations that nobody waits for, at the end of the program; their sums are Python's."""
    comm = communicator()
    for _ in range(20):
        comm.all_reduce(np.ones(100_000, np.float16))
        comm.all_reduce(np.ones(100_000, F))


def forked() -> None:
    """A forked process of a rank neither tells the others that it exits, nor aborts them."""
    comm = communicator(timeout=60.0)
    if comm.rank == 1:
        child = os.fork()
        if not child:
            try:
                sys.excepthook(ValueError, ValueError("in a fork"), None)
                atexit._run_exitfuncs()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    assert total(comm, np.ones(1))[0] == comm.size


def sonnx(point: str, number: str, *arguments: str) -> None:
    """The command `sonnx`, which kills rank 1 (at "save" rank 0) at the given call of a function; at "result" rank 0 stops."""
    from singa._training.checkpoint import Checkpoint
    from singa.cli import main, train
    from singa_backend.collectives.mpi import MpiHandle, MpiRank
    from singa_backend.io import files

    place: Any = {"reduce": (MpiRank, "all_reduce"), "wait": (MpiHandle, "wait"), "update": (opt.Optimizer, "apply"),
                  "gather": (Checkpoint, "_others"), "save": (files, "_move"),
                  "result": (train, "write_trained")}[point]  # fmt: skip
    victim = 0 if point in ("save", "result") else 1
    left = [int(number)]
    plain = getattr(*place)

    def counted(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and os.environ["PMI_RANK"] == str(victim):
            os.kill(os.getpid(), signal.SIGSTOP if point == "result" else signal.SIGKILL)
        return plain(*args, **kwargs)

    setattr(*place, counted)
    main(arguments)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
