"""Problems judged in several processes, each with onnxruntime in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from ...engines.oracle import Oracle
from ..processes import as_they_come, share_cores
from .judge import Judged, judge
from .problems import Problem

_oracle: Oracle | None = None


def run(problems: Sequence[Problem], oracle: str | None = "onnxruntime", jobs: int | None = None) -> Iterator[Judged]:
    """The problems with their outcomes, as they come."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(share_cores(jobs, len(problems)), context, _begin, (oracle,)) as pool:
        yield from as_they_come([pool.submit(_one, problem) for problem in problems])


def _begin(engine: str | None) -> None:
    global _oracle
    threading.Thread(target=_end_with_parent, daemon=True).start()
    warnings.simplefilter("ignore")
    _oracle = Oracle(engine) if engine else None


def _end_with_parent() -> None:
    """A worker of a pool waits for work for ever; where whoever gives it was killed, none comes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _one(problem: Problem) -> Judged:
    return judge(problem, None, _oracle)
