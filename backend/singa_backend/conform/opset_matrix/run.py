"""Judges problems in several processes, each with a separate process for onnxruntime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

from ...engines.oracle import Oracle
from ...processes import ChildFailure, ask_all
from .judge import Judged, judge
from .problems import Problem


def run(problems: Sequence[Problem], oracle: str | None = "onnxruntime", jobs: int | None = None) -> Iterator[Judged]:
    """Yield the problems with their outcomes, as they finish.  Raises ChildFailure if a process dies."""
    for _, answer in ask_all(problems, _serve, oracle, jobs=jobs):
        if isinstance(answer, ChildFailure):
            raise answer
        yield answer


def _serve(engine: str | None) -> Callable[[Problem], Judged]:
    """Return, in the child, the function that judges a problem."""
    warnings.simplefilter("ignore")
    oracle = Oracle(engine) if engine else None
    return lambda problem: judge(problem, None, oracle)
