"""DistOpt in processes of one machine without a launcher: sums of every dtype, every mode, and no process that waits forever."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.helpers.paths import HELPERS

from singa import opt, singa_wrap
from singa_backend.collectives import Communicator, LocalGroup, nccl_group, sockets
from singa_backend.collectives.communicator import total
from singa_backend.collectives.sockets import SocketRank, new_id
from singa_backend.errors import CommunicationError, InvalidInput, MissingDependency

from .test_distributed import graphs, modes, same, trained

F = np.float32
RANKS = HELPERS / "socket_ranks.py"
LONGEST = 120.0


def together(size: int, work: Callable[[Communicator], Any], timeout: float = 60.0) -> list[Any]:
    """The results of a function on ranks with sockets, which are threads here."""
    id, results, errors = new_id(), [None] * size, []

    def one(rank: int) -> None:
        try:
            results[rank] = work(nccl_group(id, rank, size, timeout))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
        assert not thread.is_alive()
    assert not Path(id).exists()
    if errors:
        raise errors[0]
    return results


@graphs
@modes
@pytest.mark.parametrize("size", [1, 2, 3])
def test_sockets_compute_the_bits_of_threads(mode: str, graph: bool, size: int) -> None:
    local = LocalGroup(size).run(lambda comm: trained(comm, mode, graph))
    found = together(size, lambda comm: trained(comm, mode, graph))
    assert all(same(a, b) for a, b in zip(local, found, strict=True))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_operations(size: int) -> None:
    """Every dtype; vectors of different lengths, also empty; operations in flight together; custom results."""
    dtypes = [np.int8, np.uint64, np.bool_, np.float64, F, np.float16, ml_dtypes.bfloat16, np.complex64]

    def work(comm: Communicator) -> int:
        rank, started = comm.rank, []
        for dtype in dtypes:
            for shape in ((), (0,), (4,), (3, 700)):
                a = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + rank, dtype)
                base = np.arange(np.prod(shape, dtype=int)).reshape(shape)
                arrays = [np.asarray(base % 7 + r, dtype) for r in range(size)]
                want = arrays[0].copy()
                for other in arrays[1:]:
                    np.add(want, other, out=want)
                started += [(comm.all_reduce(a), want), (comm.broadcast(a, size - 1), arrays[-1])]
        for handle, want in reversed(started):
            got = handle.wait()
            assert got.dtype == want.dtype and got.shape == want.shape and np.array_equal(got, want)
            got[...] = 1  # writable
        sizes = [3 * r for r in range(size)]
        parts = comm.all_gather(np.full(sizes[rank], rank, np.float16), sizes).wait()
        assert [p.tolist() for p in parts] == [[r] * n for r, n in enumerate(sizes)]
        assert total(comm, np.array([1.5])).tolist() == [1.5 * size]
        return comm.sent

    assert together(size, work)[0] == LocalGroup(size).run(work)[0]


def test_results_are_not_shared() -> None:
    """What a rank writes into its result, or into what it has sent, reaches no other rank."""

    def work(comm: Communicator) -> bool:
        for root in (0, 1):
            for _ in range(20):
                a = np.full(500_000, comm.rank + 1.0, F)
                handles = [comm.broadcast(a, root), comm.all_gather(a), comm.all_reduce(a)]
                one, both, sums = (h.wait() for h in handles)
                seen = bool((one == root + 1).all() and (both[0] == 1).all() and (both[1] == 2).all() and (sums == 3).all())
                for x in (a, one, *both, sums):
                    x[...] = -1
                assert seen
        return True

    assert together(2, work) == [True, True]


@pytest.mark.parametrize("other", [
    lambda c: c.all_reduce(np.ones(5)), lambda c: c.all_reduce(np.ones(4, F)), lambda c: c.broadcast(np.ones(4), 0),
    lambda c: c.all_gather(np.ones(4)),
])  # fmt: skip
def test_ranks_with_different_operations_are_told(other: Callable[[Any], Any]) -> None:
    def work(comm: Communicator) -> str:
        with pytest.raises(CommunicationError) as caught:
            (other(comm) if comm.rank else comm.all_reduce(np.ones(4))).wait()
        return caught.value.code

    assert together(2, work) == ["SX952"] * 2


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_starts_no_operation_is_named(late: int) -> None:
    def work(comm: Communicator) -> str:
        if comm.rank == late:
            return ""
        with pytest.raises(CommunicationError) as caught:
            comm.all_reduce(np.ones(1)).wait()
        assert caught.value.code == "SX950"
        return caught.value.message

    told = together(3, work, timeout=1.0)
    assert all(m.endswith(f"made no progress in 1 s; waiting for rank {late}") for r, m in enumerate(told) if r != late)


def test_all_ranks_name_the_rank_that_is_stuck() -> None:
    """Rank 0 waits no longer, and may end; the others are told for whom it waited, not that it has ended."""

    def work(comm: Any) -> str:
        if comm.rank == 1:
            return ""
        comm.timeout = 1.0 if comm.rank == 0 else 60.0
        with pytest.raises(CommunicationError) as caught:
            comm.all_reduce(np.ones(1)).wait()
        return caught.value.message

    assert [m.rpartition("; ")[2] for m in together(3, work)] == ["waiting for rank 1", "", "waiting for rank 1"]


@pytest.mark.parametrize("why", ["exits", "is stuck"])
def test_the_cause_is_known_after_the_end_of_rank_0(why: str) -> None:
    """A rank that starts an operation when rank 0 has ended already is told of the rank that was the cause."""
    ended = threading.Event()

    def work(comm: Any) -> str:
        if comm.rank == 1:
            if why == "exits":
                comm._link.connection.shutdown(socket.SHUT_RDWR)
            return ""
        if comm.rank == 2:
            assert ended.wait(LONGEST)
            with comm.changed:
                assert comm.changed.wait_for(lambda: comm._gone, LONGEST)
        else:
            comm.timeout = 60.0 if why == "exits" else 1.0
        with pytest.raises(CommunicationError) as caught:
            comm.all_reduce(np.ones(1)).wait()
        if comm.rank == 0:
            comm._leave()
            for link in comm._hub.links.values():
                link.connection.shutdown(socket.SHUT_RDWR)
            ended.set()
        return caught.value.message

    told = together(3, work)
    assert all(("rank 1 has exited" if why == "exits" else "waiting for rank 1") in told[r] for r in (0, 2)), told


# --- the start


@pytest.mark.parametrize(("rank", "told"), [(0, "waiting for rank 1, 2"), (1, "waiting for rank 0")])
def test_a_process_that_does_not_come_is_named(rank: int, told: str) -> None:
    id = new_id()
    with pytest.raises(CommunicationError, match=f"the start of rank {rank} made no progress in 0.2 s; {told}") as caught:
        SocketRank(id, rank, 3, timeout=0.2)
    assert caught.value.code == "SX950" and not Path(id).exists()


@pytest.mark.parametrize(("second", "told"), [
    ((1, 3), "world_size must be equal in all processes, got 3 in rank 1 and 2 in rank 0"),
])  # fmt: skip
def test_processes_with_other_arguments_are_told(second: tuple[int, int], told: str) -> None:
    id, found = new_id(), []

    def one(rank: int, size: int) -> None:
        with pytest.raises(CommunicationError) as caught:
            SocketRank(id, rank, size, timeout=30.0)
        found.append((caught.value.code, caught.value.message))

    threads = [threading.Thread(target=one, args=args, daemon=True) for args in ((0, 2), second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
    assert found == [("SX952", told)] * 2 and not Path(id).exists()


HELLO = {"kind": "join", "rank": 1, "size": 2}


@pytest.mark.parametrize(
    ("sent", "raises"),
    [
        (HELLO | {"size": 3}, CommunicationError),
        (HELLO, CommunicationError),  # a second rank 1
        (b"", None),
        (b"\0\0\0\5{", None),
        (b"\0\0\0\1{", None),
        (b"\0\0\0\2[]", None),
        (b"\xff\xff\xff\xff", None),
        ({"kind": "join"}, None),
        (HELLO | {"rank": "1"}, None),
    ],
)
def test_a_joiner_that_is_not_taken_is_disconnected(sent: Any, raises: Any) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        if isinstance(sent, dict):
            sockets._write(theirs, sent)
        else:
            theirs.sendall(sent)
            theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(raises) if raises else nullcontext():
            sockets._welcome(ours, {1: theirs} if sent == HELLO else {}, 2, time.monotonic() + 5)
        assert ours.fileno() == -1


def test_strangers_do_not_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They write something else, or nothing, or go away, before the ranks come."""
    monkeypatch.setattr(sockets, "_HELLO", 0.2)
    id, ranks = new_id(), dict[int, Any]()
    first = threading.Thread(target=lambda: ranks.update({0: nccl_group(id, 0, 2, 60.0)}), daemon=True)
    first.start()
    strangers = []
    for sent in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2{}", b"", bytes(range(256)), *NONSENSE.values()):
        stranger = socket.socket(socket.AF_UNIX)
        while stranger.connect_ex(id):
            time.sleep(0.01)
        stranger.sendall(sent)
        strangers.append(stranger)
    ranks[1] = nccl_group(id, 1, 2, 60.0)
    first.join(LONGEST)
    handles = [ranks[r].all_reduce(np.full(3, r + 1.0)) for r in (0, 1)]
    assert [h.wait().tolist() for h in handles] == [[3.0] * 3] * 2
    for stranger in strangers:
        stranger.close()


NONSENSE = {
    "nonsense": b"\0\0\0\1{", "a list": b"\0\0\0\2[]", "nested": b"\0\0\xea\x60" + b"[" * 60_000, "no text": b"\0\0\0\2\xff\xfe",
    "a number": b'\0\0\0\x0a{"kind":3}', "another message": b'\0\0\0\x0f{"kind":"late"}', "too long": b"\xff" * 8,
}  # fmt: skip


@pytest.mark.parametrize("answer", ["refused", "silence", "end", *NONSENSE])
def test_a_rank_that_is_not_taken_closes_its_connection(answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 refuses it, does not answer in time, ends, or answers with no message."""
    made: list[socket.socket] = []

    class Noted(socket.socket):
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(self)

    id = new_id()
    monkeypatch.setattr(sockets, "_ANSWERS", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(id)
        listener.listen(1)
        monkeypatch.setattr(sockets.socket, "socket", Noted)

        def rank_0() -> None:
            connection = listener.accept()[0]
            sockets._read(connection)
            if answer == "refused":
                sockets._write(connection, {"kind": "refused", "why": "because"})
            elif answer in NONSENSE:
                with suppress(OSError):  # rank 1 may not read all of it
                    connection.sendall(NONSENSE[answer])
            if answer == "silence":
                time.sleep(0.5)
            connection.close()

        thread = threading.Thread(target=rank_0, daemon=True)
        thread.start()
        with pytest.raises(CommunicationError) as raised:
            SocketRank(id, 1, 2, timeout=0.2)
        assert raised.value.code == ("SX952" if answer == "refused" else "SX950")
        thread.join()
        assert made[0].fileno() == -1  # the connection of rank 1 is the first socket here
    os.unlink(id)


def test_two_processes_of_one_rank_are_told() -> None:
    id, found = new_id(), []

    def one(rank: int) -> None:
        with pytest.raises(CommunicationError) as caught:
            SocketRank(id, rank, 3, timeout=30.0)
        found.append(caught.value.message)

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST)
    assert found == ["local_rank must differ in all processes, got 1 twice"] * 3


def test_a_path_that_is_taken_is_told(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for rank, told in ((0, "rank 0 cannot listen"), (1, "waiting for rank 0")):
        with pytest.raises((InvalidInput, CommunicationError), match=told):
            SocketRank(str(tmp_path / "taken"), rank, 2, timeout=0.2)
    assert (tmp_path / "taken").read_text() == ""


def test_the_id_needs_unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("socket.AF_UNIX")
    with pytest.raises(MissingDependency, match="need Unix sockets"):
        singa_wrap.NcclIdHolder("socket")


# --- processes


def job(start: str, size: int, *arguments: str) -> list[str]:
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "SONNX_NUM_THREADS": "1"}
    command = [sys.executable, str(RANKS), start, str(size), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.parametrize(("start", "size"), [("fork", 2), ("fork", 4), ("spawn", 2)])
def test_processes_of_multiprocessing_equal_one(start: str, size: int) -> None:
    told = job(start, size, "training")
    assert sorted(told) == ["exit codes " + str([0] * size), *(f"rank {r} is equal" for r in range(size))]


@pytest.mark.parametrize("who", ["0", "1"])
@pytest.mark.parametrize(("how", "told"), [
    ("kill", "SX950 all_reduce of rank {r} cannot end: rank {who} has exited"),
    ("raise", "SX950 all_reduce of rank {r} cannot end: rank {who} has exited"),
    ("exit", "SX950 all_reduce of rank {r} cannot end: rank {who} has exited"),
    ("return", "SX950 all_reduce of rank {r} cannot end: rank {who} has exited"),
    ("stop", "SX950 all_reduce of rank {r} made no progress in 2 s; waiting for rank {who}"),
    ("sleep", "SX950 all_reduce of rank {r} made no progress in 2 s; waiting for rank {who}"),
])  # fmt: skip
def test_a_rank_that_ends_or_is_stuck_ends_the_others(how: str, told: str, who: str) -> None:
    lines = job("fork", 3, "ends", how, who)
    others = [r for r in range(3) if r != int(who)]
    assert sorted(line for line in lines if line.startswith("rank")) == [
        f"rank {r}: " + told.format(r=r, who=who) for r in others
    ]


@pytest.mark.parametrize("who", ["0", "1"])
def test_abort_ends_all(who: str) -> None:
    assert job("fork", 3, "ends", "abort", who)[-1] == "exit codes [5, 5, 5]"


def test_operations_that_nobody_waits_for_are_finished() -> None:
    assert sorted(job("fork", 3, "unfinished")) == ["exit codes [0, 0, 0]", "rank 1 has all", "rank 2 has all"]


def test_a_fork_of_a_rank_does_not_keep_it_alive() -> None:
    assert "rank 0: SX950 all_reduce of rank 0 cannot end: rank 1 has exited" in job("fork", 2, "forked")


# --- arguments of DistOpt


@pytest.mark.parametrize(("arguments", "told"), [
    ({"world_size": 2, "local_rank": 1}, "world_size must be None or that of the group, 1, got 2"),
    ({"world_size": 2}, "world_size must be None or that of the group, 1, got 2"),
    ({"local_rank": 1}, "local_rank must be None or that of the group, 0, got 1"),
    ({"world_size": 2, "engine": "single"}, "world_size must be None or that of the group, 1, got 2"),
    ({"nccl_id": "x"}, r"local_rank must be in \[0, world_size\), got None of None"),
    ({"nccl_id": "x", "local_rank": True, "world_size": 2}, r"local_rank must be in \[0, world_size\), got True of 2"),
    ({"nccl_id": "x", "local_rank": 0, "world_size": 2, "engine": "mpi"}, "engine must be left out if nccl_id is passed"),
    ({"nccl_id": "x", "local_rank": 0, "world_size": 2, "timeout": 0}, "timeout must be above 0 s"),
    ({"communicator": "local", "nccl_id": "x"}, "nccl_id must be left out if communicator is passed"),
    ({"communicator": "local", "engine": "mpi"}, "engine must be left out if communicator is passed"),
    ({"communicator": "local", "timeout": 5.0}, "timeout must be left out if communicator is passed"),
    ({"communicator": "local", "world_size": 3}, "world_size must be None or that of the group, 2, got 3"),
    ({"communicator": "local", "local_rank": 1}, "local_rank must be None or that of the group, 0, got 1"),
], ids=str)  # fmt: skip
def test_arguments_that_cannot_be_honoured_are_refused(arguments: dict[str, Any], told: str) -> None:
    """Two programs that were started so would train two models, which exchange nothing."""
    if "communicator" in arguments:
        arguments = {**arguments, "communicator": LocalGroup(2).ranks[0]}
    with pytest.raises(InvalidInput, match=told) as caught:
        opt.DistOpt(opt.SGD(), **arguments)
    assert caught.value.code == "SX386"


def test_arguments_of_the_group_are_accepted() -> None:
    assert opt.DistOpt(world_size=1, local_rank=0).world_size == 1
    assert opt.DistOpt(communicator=LocalGroup(2).ranks[1], world_size=2, local_rank=1).global_rank == 1


def test_the_holder_is_an_id_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("singa.device.get_num_gpus", lambda: 0)
    first, second = singa_wrap.NcclIdHolder().id, singa_wrap.NcclIdHolder().id
    assert isinstance(first, str) and first != second and not Path(first).exists()
    with pytest.raises(InvalidInput, match="engine must be one of nccl, socket, got 'mpi'"):
        singa_wrap.NcclIdHolder("mpi")
