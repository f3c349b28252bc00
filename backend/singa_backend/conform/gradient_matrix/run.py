"""Judges rows in child processes, each with a separate process for onnxruntime; a death or a hang costs one row."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ...engines.oracle import Oracle
from ...io.processes import ChildFailure
from ..gradients import POINTS
from ..worker import answers
from .row import MatrixRow, judged, needs_judging

TIMEOUT = 120.0


def run(
    rows: Sequence[MatrixRow],
    count: int = POINTS,
    seed: int = 0,
    oracle: str | None = "onnxruntime",
    jobs: int | None = None,
    timeout: float = TIMEOUT,
    second: bool = False,
) -> Iterator[MatrixRow]:
    """Yield the rows with their verdicts, as they finish.

    timeout: the seconds that one row may take.  second: judge the gradients of the gradients; onnxruntime then does not run.
    """
    yield from (judged(row) for row in rows if not needs_judging(row))
    todo = [row for row in rows if needs_judging(row)]
    for i, answer in answers(todo, _serve, count, seed, None if second else oracle, second, jobs=jobs, timeout=timeout):
        yield _failed(todo[i], answer, timeout) if isinstance(answer, ChildFailure) else answer


def _failed(row: MatrixRow, failure: ChildFailure, timeout: float) -> MatrixRow:
    why = f"the process died with {failure}" if failure.how == "died" else f"not judged within {timeout:g} s"
    return replace(row, verdict=failure.how, says=[why])


def _serve(count: int, seed: int, engine: str | None, second: bool) -> Callable[[MatrixRow], MatrixRow]:
    """Return, in the child, the function that judges a row."""
    warnings.simplefilter("ignore")
    oracle = Oracle(engine) if engine else None
    return lambda row: judged(row, count, seed, oracle, second)
