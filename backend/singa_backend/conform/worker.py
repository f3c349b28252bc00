"""Runs cases in child processes, which may die or hang: a death is a result, and the run continues."""

from __future__ import annotations

import copy
import os
import sys
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import load_model_from_string

from ..choices import OURS as OURS
from ..comparison import verdict
from ..engines.oracle import imported, unusable
from ..errors import SonnxError, UnsupportedModel, described
from ..io.processes import ChildFailure, ask_all
from . import official
from .calls import Cell, Executed, calls_of
from .cases import Case, ConformanceError

_UNSUPPORTED = ("NotImplementedError", "NotImplemented")
"""Classes of exceptions by which a backend refuses an operator: Python's, and onnxruntime's, which this process may not have."""


@dataclass
class Result:
    """The result of one case on one device.

    Attributes:
        strict: The strict verdict: "passed", "failed", "unsupported", "error", "died" or "timeout".
        official: The verdict of ONNX's own comparison: "passed" or "failed".
        executed: For each schema version that ran, the (type parameter, dtype) pairs and the attributes that it ran with; for a
            backend that is not observed, those that the model calls.
        under_test: The schema version that a node case tests; None for other cases.
        opted_out: Whether the backend declares that it does not support the case (BackendIsNotSupposedToImplementIt).
    """

    name: str
    kind: str
    strict: str
    official: str
    reason: str = ""
    official_reason: str = ""
    ulps: float | None = None
    seconds: float = 0.0
    executed: Executed = field(default_factory=dict)
    under_test: Cell | None = None
    opted_out: bool = False


def run_case(case: Case, backend: Any, device: str, path: Path | None = None) -> Result:
    """Run one case in this process, under both verdicts; with `path`, its model is that of a file, with external data."""
    start, observed = time.perf_counter(), _is_observed(backend)
    result = Result(case.name, case.kind, "passed", "passed")
    try:
        rep = backend.prepare(path if path is not None else load_model_from_string(case.model), device)
        for inputs, expected in case.data:
            before = copy.deepcopy(inputs)
            defined = _observe(rep, inputs, result) if observed else []
            outputs = list(rep.run(inputs))
            result.official_reason = result.official_reason or official.official(outputs, expected, case.rtol, case.atol)
            result.reason = result.reason or verdict.strict(outputs, expected, case.rtol, case.atol)
            if not result.reason and not verdict.same_bits(inputs, before):
                result.reason = "an input was changed"
            if not result.reason and not verdict.same_bits(outputs, list(rep.run(inputs))):
                result.reason = "a second run returned another result"
            result.ulps = max(
                (u for u in (result.ulps, verdict.ulps(defined or outputs, expected)) if u is not None), default=None
            )
        result.strict = "failed" if result.reason else "passed"
        result.official = "failed" if result.official_reason else "passed"
    except unittest.SkipTest as skip:  # ONNX counts this opt-out as a pass
        result.strict, result.reason, result.opted_out = "unsupported", f"not supported: {skip}", True
    except UnsupportedModel as error:
        result.strict, result.official, result.reason = "unsupported", "failed", str(error)
    except SonnxError as error:
        result.strict, result.official, result.reason = "failed", "failed", str(error)
    except Exception as error:
        result.strict = "unsupported" if any(k.__name__ in _UNSUPPORTED for k in type(error).__mro__) else "error"
        result.official, result.reason = "failed", described(error, 3)
    result.seconds = time.perf_counter() - start
    if not observed:
        result.executed, result.under_test = calls_of(case)
    return result


def _is_observed(backend: Any) -> bool:
    """Whether a backend, a class or a module, is of this package."""
    module = backend.__module__ if isinstance(backend, type) else getattr(backend, "__name__", "")
    return str(module).partition(".")[0] == OURS.partition(":")[0]


def _observe(rep: Any, inputs: list[Any], result: Result) -> list[Any]:
    """Record which versions, dtypes and attributes a run of this package's executor computes.

    An observed run computes by the definitions, which round alike on every machine; the runs that are judged do not.

    Returns:
        The outputs; none if the result of `prepare` has no executor.
    """
    session = getattr(rep, "_session", None)
    if session is None:
        return []
    nodes = rep.graph.nodes
    if result.kind == "node" and len(nodes) == 1 and nodes[0].operator:
        result.under_test = (nodes[0].domain, nodes[0].op_type, nodes[0].operator.version)

    def observe(node: Any, inputs: list[Any], outputs: list[Any], path: Any) -> None:
        pairs, attributes = result.executed.setdefault((node.domain, node.op_type, node.operator.version), (set(), set()))
        attributes |= node.given
        for formals, values in ((node.operator.schema.inputs, inputs), (node.operator.schema.outputs, outputs)):
            for i, value in enumerate(values):
                if hasattr(value, "dtype") and formals:
                    pairs.add((formals[min(i, len(formals) - 1)].type_str, value.dtype.name))

    session.observer = observe
    try:
        return list(rep.run(inputs))
    finally:
        session.observer = None


# --- processes --------------------------------------------------------------------------------------------------------


def resolve(backend: str) -> Any:
    """Import a backend, from the current folder too.

    Args:
        backend: "module:attribute" or "module".

    Returns:
        The class or module.

    Raises:
        SonnxError: it cannot be imported, or lacks the functions of a backend (SX901).
    """
    here = os.getcwd()
    if here not in sys.path:  # a console script does not search it
        sys.path.append(here)
    try:
        return imported(backend)
    except (Exception, SystemExit) as error:  # a module that ends the process would end this command without a result
        raise unusable(backend, f"{type(error).__name__}: {error}") from error


def answers(requests: Sequence[Any], make: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[tuple[int, Any]]:
    """Yield from `ask_all`; raises ConformanceError (SX803) if a child process cannot start."""
    try:
        yield from ask_all(requests, make, *arguments, **options)
    except ChildFailure as failure:
        hint = "see the traceback that the process has written"
        raise ConformanceError(f"a child process must be able to start, got {failure}", code="SX803", hint=hint) from None


def _serve(backend: str, device: str) -> Callable[[Case], Result]:
    """Return, in the child, the function that runs a case."""
    engine = resolve(backend)
    return lambda case: run_case(case, engine, device)


def run(
    cases: Sequence[Case],
    backend: str = OURS,
    device: str = "CPU",
    processes: int | None = None,
    timeout: float = 60.0,
    progress: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run the cases in child processes.

    Args:
        cases: The cases to run.
        backend: The backend as "module:attribute" or "module".
        device: The device that the backend prepares models for.
        processes: The number of child processes; by default one per core.
        timeout: The seconds that one case may take; then its process is killed and the case is recorded as "timeout".
        progress: Called with each result as it finishes.

    Returns:
        The results in the cases' order.
    """
    results: dict[int, Result] = {}
    # Long models first, so that none runs alone at the end.
    order = sorted(range(len(cases)), key=lambda i: cases[i].kind != "real")
    for i, answer in answers([cases[i] for i in order], _serve, backend, device, jobs=processes, timeout=timeout):
        case = cases[order[i]]
        results[order[i]] = result = _failed(case, answer) if isinstance(answer, ChildFailure) else answer
        if progress:
            progress(result)
    return [results[i] for i in range(len(cases))]


def _failed(case: Case, failure: ChildFailure) -> Result:
    reason = f"the process died with {failure}" if failure.how == "died" else str(failure)
    return Result(case.name, case.kind, failure.how, "failed", reason)
