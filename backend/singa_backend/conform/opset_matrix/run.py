"""Judges problems in several processes, each with a separate process for onnxruntime."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

from ...engines.oracle import Oracle
from ...io.processes import ChildFailure
from ..cases import ConformanceError
from ..worker import answers
from .judge import JudgedProblem, judge
from .problems import OpsetProblem


def run(problems: Sequence[OpsetProblem], oracle: str | None = "onnxruntime", jobs: int | None = None) -> Iterator[JudgedProblem]:
    """Yield the problems with their outcomes, as they finish.  Raises ConformanceError (SX803) if a process dies."""
    for i, answer in answers(problems, _serve, oracle, jobs=jobs):
        if isinstance(answer, ChildFailure):
            raise ConformanceError(f"the process that judged {problems[i].name} {answer.how}: {answer}", code="SX803")
        yield answer


def _serve(engine: str | None) -> Callable[[OpsetProblem], JudgedProblem]:
    """Return, in the child, the function that judges a problem."""
    warnings.simplefilter("ignore")
    oracle = Oracle(engine) if engine else None
    return lambda problem: judge(problem, None, oracle)
