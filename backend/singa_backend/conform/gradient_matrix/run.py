"""Rows judged in child processes, each with onnxruntime in a process of its own; what dies or hangs costs one row."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from threading import local
from typing import Any

from ...engines.oracle import Oracle
from ..gradients import POINTS
from ..processes import as_they_come, share_cores
from .row import Row, asks, judged

TIMEOUT = 120.0


def run(rows: Sequence[Row], count: int = POINTS, seed: int = 0, oracle: str | None = "onnxruntime", jobs: int | None = None,
        timeout: float = TIMEOUT) -> Iterator[Row]:  # fmt: skip
    """The rows with their verdicts, as they come.  timeout: seconds that one may take."""
    yield from (judged(row) for row in rows if not asks(row))
    todo = [row for row in rows if asks(row)]
    workers: list[_Worker] = []
    mine = local()

    def one(row: Row) -> Row:
        if not hasattr(mine, "worker"):
            mine.worker = _Worker(oracle)
            workers.append(mine.worker)
        worker: _Worker = mine.worker
        return worker.judge(row, count, seed, timeout)

    with ThreadPoolExecutor(share_cores(jobs, len(todo))) as threads:
        try:
            yield from as_they_come([threads.submit(one, row) for row in todo])
        finally:
            for worker in workers:
                worker.end()


class _Worker:
    """A child that judges rows; it is started again when it dies or is killed."""

    def __init__(self, oracle: str | None) -> None:
        self.oracle = oracle
        self.process: Any = None
        self.pipe: Connection | None = None

    def judge(self, row: Row, count: int, seed: int, timeout: float) -> Row:
        if self.process is None or not self.process.is_alive():
            self._start()
        assert self.pipe is not None
        try:
            self.pipe.send((row, count, seed))
            if self.pipe.poll(timeout):
                answer: Row = self.pipe.recv()
                return answer
            self.end()
            return replace(row, verdict="timeout", says=[f"not judged within {timeout:g} s"])
        except (EOFError, OSError):
            self.process.join(5)
            code = self.process.exitcode
            self.end()
            return replace(row, verdict="died", says=[f"the process died with exit code {code}"])

    def _start(self) -> None:
        self.end()
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, self.oracle))
        self.process.start()
        theirs.close()
        self.pipe.recv()  # it is ready: the clock of the first row starts now

    def end(self) -> None:
        if self.process is not None and self.pipe is not None:
            self.pipe.close()
            self.process.kill()
            self.process.join()
        self.process, self.pipe = None, None


def _serve(pipe: Connection, engine: str | None) -> None:
    warnings.simplefilter("ignore")
    with ExitStack() as stack:
        oracle = stack.enter_context(Oracle(engine)) if engine else None
        pipe.send(None)
        while True:
            try:
                row, count, seed = pipe.recv()
                pipe.send(judged(row, count, seed, oracle))
            except (EOFError, OSError):
                return
