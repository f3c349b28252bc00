"""Starts the processes of an MPI job on this machine, without a port on which another process could write.

An MPI library learns the rank of its process, and the addresses of the others, from its launcher by a protocol of lines of text
(PMI, version 1, of MPICH and its descendants).  Here a thread answers over pairs of sockets that the processes inherit;
the library exchanges data through shared memory (`use_shared_memory`).  `mpiexec` answers on a port of all addresses of the
machine.
"""

from __future__ import annotations

import os
import secrets
import selectors
import socket
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ..io.processes import Lifeline

_GRACE = 2.0
"""Seconds in which the other processes may end by themselves when one is lost: they may have the same message."""

_LONGEST = 1 << 16
"""The maximum bytes of a line."""


class LocalJob:
    """The processes of a job, which end with this process.

    Args:
        command: the command of each process.
        count: their number.
        environment: the environment of each process.

    Attributes:
        processes: the processes, by rank.
        codes: the exit codes of those that have ended by themselves, negative for a signal, in the order of their ends.
    """

    def __init__(self, command: Sequence[str], count: int, environment: Mapping[str, str]) -> None:
        self.codes: list[int] = []
        self.processes: list[subprocess.Popen[bytes]] = []
        self._changes = threading.RLock()
        self._killed = False
        self._finalized: set[int] = set()
        self._lifelines: list[Lifeline] = []
        self._name = secrets.token_hex(8)  # the library names its shared memory by it
        self._values = {"PMI_process_mapping": f"(vector,(0,1,{count}))"}  # one machine with all of them
        self._waiting: list[socket.socket] = []
        self._answers = selectors.DefaultSelector()
        try:
            for rank in range(count):
                self._start(command, rank, count, environment)
        except BaseException:
            self.kill()
            raise
        threading.Thread(target=self._serve, daemon=True, name="sonnx-pmi").start()
        self._watches = [threading.Thread(target=self._watch, args=(rank,), daemon=True) for rank in range(count)]
        for watch in self._watches:
            watch.start()

    def _start(self, command: Sequence[str], rank: int, count: int, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        lifeline = Lifeline()
        own = {
            "PMI_FD": str(theirs.fileno()), "PMI_RANK": str(rank), "PMI_SIZE": str(count), "MPI_LOCALNRANKS": str(count),
            Lifeline.VARIABLE: str(lifeline.theirs),
        }  # fmt: skip
        with theirs, lifeline.passed():
            process = subprocess.Popen(
                command, env={**environment, **own}, stdin=subprocess.DEVNULL, start_new_session=True,
                pass_fds=[theirs.fileno(), lifeline.theirs],
            )  # fmt: skip
        self.processes.append(process)
        self._lifelines.append(lifeline)
        self._answers.register(ours, selectors.EVENT_READ, [rank, b""])

    def wait(self) -> None:
        """Wait until all processes have ended; if one is lost, the others are killed after a while."""
        for watch in self._watches:
            watch.join()

    def signal(self, number: int) -> None:
        """Send a signal to all processes.

        Args:
            number: the signal.
        """
        for process in self.processes:
            process.send_signal(number)

    def kill(self) -> None:
        """End all processes at once."""
        with self._changes:
            self._killed = True
        for process in self.processes:
            process.kill()

    def _watch(self, rank: int) -> None:
        """Wait for a process; one that ends without a word to the others, who would wait for it, is lost."""
        code = self.processes[rank].wait()
        with self._changes:
            lost = code and rank not in self._finalized and not self._killed
            if not self._killed:
                self.codes.append(code)
        self._lifelines[rank].close()
        if lost:
            timer = threading.Timer(_GRACE, self.kill)
            timer.daemon = True
            timer.start()

    # --- PMI

    def _serve(self) -> None:
        """Answer the processes until all of them have ended."""
        while self._answers.get_map():
            for key, _ in self._answers.select():
                connection, state = key.fileobj, key.data
                assert isinstance(connection, socket.socket)
                try:
                    data = connection.recv(4096)
                except OSError:
                    data = b""
                *lines, state[1] = (state[1] + data).split(b"\n")
                if not data or len(state[1]) > _LONGEST:
                    self._answers.unregister(connection)
                    connection.close()
                for line in lines:
                    with suppress(OSError):  # the process has ended
                        self._answer(state[0], connection, line.decode(errors="replace"))

    def _answer(self, rank: int, connection: socket.socket, line: str) -> None:
        """Answer one line of a process."""
        words = dict(word.partition("=")[::2] for word in line.split())
        command, key = words.get("cmd", ""), words.get("key", "")
        if command == "put":
            self._values[key] = words.get("value", "")
        if command == "barrier_in":
            self._waiting.append(connection)
            if len(self._waiting) == len(self.processes):
                for waiting in self._waiting:
                    with suppress(OSError):
                        waiting.sendall(b"cmd=barrier_out\n")
                self._waiting.clear()
            return
        if command == "abort":
            self.kill()
            return
        if command == "finalize":
            with self._changes:
                self._finalized.add(rank)
        value = self._values.get(key)
        answers = {
            "init": "response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": f"maxes kvsname_max=64 keylen_max=256 vallen_max={_LONGEST // 2}",
            "get_appnum": "appnum appnum=0",
            "get_my_kvsname": f"my_kvsname kvsname={self._name}",
            "get_universe_size": f"universe_size size={len(self.processes)}",
            "put": "put_result rc=0 msg=success",
            "get": "get_result rc=-1 msg=unknown" if value is None else f"get_result rc=0 msg=success value={value}",
            "finalize": "finalize_ack",
        }
        connection.sendall(f"cmd={answers.get(command, f'{command}_result rc=-1 msg=unknown')}\n".encode())


def use_shared_memory(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables with which MPICH opens no port for processes that are all on this machine; none for others.

    Args:
        environment: what the launcher has set.
    """
    size, here = (environment.get(n, "") for n in ("PMI_SIZE", "MPI_LOCALNRANKS"))
    return {"UCX_TLS": "self,sm"} if size and size == here and "UCX_TLS" not in environment else {}
