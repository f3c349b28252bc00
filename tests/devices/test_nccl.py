"""The calls of NCCL, recorded by a fake CuPy whose arrays are in host memory and whose ranks are threads.

The fake reads and writes memory by address and number of elements, as NCCL does: a wrong pointer, count, type or root would
change the results.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from singa import autograd, opt, tensor
from singa_backend.collectives import Communicator, LocalGroup, nccl_group
from singa_backend.collectives.communicator import copied, total
from singa_backend.collectives.nccl import NcclRank, unique_id
from singa_backend.errors import CommunicationError, DeviceUnavailable, InvalidInput, MissingDependency

F = np.float32
ID = tuple(range(128))
DTYPES = {0: np.int8, 1: np.uint8, 2: np.int32, 3: np.uint32, 4: np.int64, 5: np.uint64,
          6: np.float16, 7: F, 8: np.float64, 9: ml_dtypes.bfloat16}  # fmt: skip
"""NCCL's data types, from its header."""


class Gpu(np.ndarray):
    """An array of the fake device."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)

    def get(self) -> np.ndarray:
        return np.array(self, subok=False)


class Fake:
    """The parts of CuPy that are used, and the calls on them by thread."""

    def __init__(self, group: LocalGroup | None) -> None:
        self.calls: dict[int, list[tuple[Any, ...]]] = {}
        self.group = group
        self.devices, self.available, self.done = 2, True, True
        self.current = threading.local()
        fake = self

        class Device:
            """The device of a thread, 0 outside such a context."""

            def __init__(self, ordinal: int) -> None:
                self.ordinal = ordinal

            def __enter__(self) -> None:
                fake.current.ordinal = self.ordinal

            def __exit__(self, *_: object) -> None:
                fake.current.ordinal = 0

        class Event:
            @property
            def done(self) -> bool:
                return fake.done

        class Stream:
            def __init__(self, non_blocking: bool = False) -> None:
                self.ptr = 99 if non_blocking else 11

            def record(self) -> Event:
                fake.note("record", self.ptr)
                return Event()

            def wait_event(self, event: Event) -> None:
                fake.note("wait_event", self.ptr)

        class NcclCommunicator:
            def __init__(self, size: int, id: tuple[int, ...], rank: int) -> None:
                self.rank = rank
                self.check_device()
                fake.note("create", size, id, rank)
                self.comm = fake.group.ranks[rank] if fake.group else None

            def check_device(self) -> None:
                assert getattr(fake.current, "ordinal", 0) == self.rank  # the GPU of the process is current

            def allReduce(self, send: int, receive: int, count: int, kind: int, operation: int, stream: int) -> None:
                self.check_device()
                fake.note("allReduce", count, kind, operation, stream)
                memory(receive, count, kind)[...] = self.comm.all_reduce(memory(send, count, kind)).wait()

            def broadcast(self, send: int, receive: int, count: int, kind: int, root: int, stream: int) -> None:
                self.check_device()
                fake.note("broadcast", count, kind, root, stream)
                held = memory(send if root == self.comm.rank else receive, count, kind)
                memory(receive, count, kind)[...] = self.comm.broadcast(held, root).wait()

            def check_async_error(self) -> None:
                fake.note("check")

            def abort(self) -> None:
                fake.note("abort")

        nccl = SimpleNamespace(available=True, NcclCommunicator=NcclCommunicator, get_unique_id=lambda: ID,
                               groupStart=lambda: self.note("groupStart"), groupEnd=lambda: self.note("groupEnd"))  # fmt: skip
        runtime = SimpleNamespace(CUDARuntimeError=RuntimeError, getDeviceCount=lambda: self.devices)
        self.nccl = nccl
        self.cuda = SimpleNamespace(nccl=nccl, runtime=runtime, Stream=Stream, Device=Device, get_current_stream=Stream)

    def note(self, *call: Any) -> None:
        self.calls.setdefault(threading.get_ident(), []).append(call)

    def asarray(self, a: Any) -> Gpu:
        return np.asarray(a).view(Gpu)

    def empty_like(self, a: Any) -> Gpu:
        return np.empty_like(a).view(Gpu)

    def empty(self, shape: Any, dtype: Any) -> Gpu:
        return np.empty(shape, dtype).view(Gpu)


def memory(address: int, count: int, kind: int) -> np.ndarray:
    dtype = np.dtype(DTYPES[kind])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype, count)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install(size: int = 0) -> Fake:
        fake = Fake(LocalGroup(size) if size else None)
        monkeypatch.setitem(sys.modules, "cupy", fake)  # type: ignore[arg-type]
        return fake

    return install


def run(fake: Fake, work: Any, pieces: int = 1 << 22) -> list[Any]:
    """Run a function on each rank of NCCL, in threads."""
    size = fake.group.size if fake.group else 1
    return LocalGroup(size).run(lambda comm: work(nccl_group(SimpleNamespace(id=ID), comm.rank, size, pieces=pieces)))


def test_sums_of_every_dtype(fakes: Any) -> None:
    fake = fakes(3)

    def work(comm: Communicator) -> None:
        for dtype in DTYPES.values():
            for shape in ((), (4,), (3, 5)):
                a = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) + comm.rank, dtype)
                want = sum(np.arange(np.prod(shape, dtype=int)).reshape(shape) + r for r in range(3))
                got = comm.all_reduce(a).wait()
                assert got.dtype == dtype and got.shape == shape and np.array_equal(got, np.asarray(want, dtype))

    run(fake, work, pieces=4)
    for calls in fake.calls.values():
        assert calls[0][:2] == ("create", 3) and calls[0][2] == ID
        begin = [i for i, c in enumerate(calls) if c == ("wait_event", 99)]
        assert all(calls[i - 1] == ("record", 11) and calls[i + 1][0] == "allReduce" for i in begin)
        counts = [c[1] for c in calls if c[0] == "allReduce"]
        assert counts == [1, 4, 4, 4, 4, 3] * len(DTYPES)
        assert all(c[3:] == (0, 99) for c in calls if c[0] == "allReduce")


def test_vectors_of_different_lengths(fakes: Any) -> None:
    fake = fakes(3)

    def work(comm: Communicator) -> None:
        sizes = [2, 0, 5]
        parts = comm.all_gather(np.full(sizes[comm.rank], comm.rank, np.float16), sizes).wait()
        assert [p.tolist() for p in parts] == [[0, 0], [], [2] * 5]
        assert [p.tolist() for p in comm.all_gather(np.array([comm.rank])).wait()] == [[0], [1], [2]]
        assert copied(comm, np.full(2, comm.rank), 1).tolist() == [1, 1]
        assert total(comm, np.ones(1)).tolist() == [3]

    run(fake, work)
    for calls in fake.calls.values():
        names = [c[0] for c in calls]
        first, last = names.index("groupStart"), names.index("groupEnd")
        assert [c[:4] for c in calls[first + 1 : last]] == [("broadcast", n, 6, r) for r, n in enumerate([2, 0, 5])]


def test_copies_are_sent_in_pieces(fakes: Any) -> None:
    """No operation of NCCL is longer than `pieces`, also of all_gather and broadcast, in one order on all ranks."""
    fake = fakes(2)

    def work(comm: Communicator) -> None:
        own = np.arange(9 if comm.rank else 3, dtype=np.float16) + comm.rank
        parts = comm.all_gather(own, [3, 9]).wait()
        assert [p.tolist() for p in parts] == [[0, 1, 2], list(range(1, 10))]
        assert copied(comm, np.arange(6).reshape(2, 3) * comm.rank, 1).tolist() == [[0, 1, 2], [3, 4, 5]]

    run(fake, work, pieces=4)
    for calls in fake.calls.values():
        counts = [(c[1], c[3]) for c in calls if c[0] == "broadcast"]
        assert counts == [(3, 0), (4, 1), (4, 1), (1, 1), (4, 1), (2, 1)]


@pytest.mark.parametrize("mode", ["plain", "half", "sparse"])
def test_dist_opt_trains_over_it(mode: str, fakes: Any) -> None:
    """Gradients of two ranks, 1 and 3, for each mode."""

    def work(comm: Communicator) -> list[float]:
        dist = opt.DistOpt(opt.SGD(lr=1.0), communicator=comm)
        p = tensor.Tensor(data=np.zeros(4, F), name="p", stores_grad=True)
        loss = tensor_loss(p, 1.0 + 2 * comm.rank)
        if mode == "plain":
            dist.backward_and_update(loss)
        elif mode == "half":
            dist.backward_and_update_half(loss)
        else:
            dist.backward_and_sparse_update(loss, spars=2.0)
        return p.data.tolist()

    autograd.training = True
    try:
        assert run(fakes(2), work) == [[-1.5 if mode == "sparse" else -2.0] * 4] * 2
    finally:
        autograd.training = False


def tensor_loss(p: Any, factor: float) -> Any:
    return autograd.reduce_sum(p * tensor.Tensor(data=np.full(4, factor, F), requires_grad=False), None, 0)


def test_a_rank_that_does_not_come_aborts(fakes: Any) -> None:
    fake = fakes(1)
    fake.done = False
    comm = NcclRank(ID, 0, 1, 0, timeout=0.05)
    with pytest.raises(CommunicationError, match=r"all_reduce of rank 0 made no progress in 0.05 s"):
        comm.all_reduce(np.ones(2, F)).wait()
    names = [c[0] for c in next(iter(fake.calls.values()))]
    assert "check" in names and names[-1] == "abort"


def test_what_is_missing_is_told(fakes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fakes(1)
    assert unique_id() == ID
    with pytest.raises(InvalidInput, match=r"NCCL must be passed one of int8, .*, got complex64"):
        NcclRank(ID, 0, 1, 0).all_reduce(np.ones(2, np.complex64))
    fake.devices = 0
    with pytest.raises(DeviceUnavailable, match="NCCL needs a GPU"):
        unique_id()
    fake.nccl.available = False
    with pytest.raises(MissingDependency, match="CuPy found no NCCL library"):
        unique_id()
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingDependency, match="NCCL needs CuPy"):
        unique_id()
