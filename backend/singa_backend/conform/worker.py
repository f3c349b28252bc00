"""Runs cases in child processes that may die or hang: a death is a result, and the run goes on."""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import pickle
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from onnx import load_model_from_string

from ..comparison import verdict
from ..errors import SonnxError, UnsupportedModel
from . import official
from .cases import Case
from .processes import share_cores

START = 120.0
"""Seconds that a child process may take to start; the clock of a case runs from there."""

Cell = tuple[str, str, int]
"""(domain, operator, since-version)"""


@dataclass
class Result:
    """What became of one case on one device.

    strict: "passed", "failed", "unsupported", "error", "died" or "timeout".  official: "passed" or "failed".
    executed: for each schema version that ran, the (type parameter, dtype) pairs and the attributes that it ran with.
    """

    name: str
    kind: str
    strict: str
    official: str
    reason: str = ""
    official_reason: str = ""
    ulps: float | None = None
    seconds: float = 0.0
    executed: dict[Cell, tuple[set[tuple[str, str]], set[str]]] = field(default_factory=dict)
    under_test: Cell | None = None


def run_case(case: Case, backend: Any, device: str) -> Result:
    """Run one case here and now, under both verdicts."""
    start = time.perf_counter()
    result = Result(case.name, case.kind, "passed", "passed")
    try:
        rep = backend.prepare(load_model_from_string(case.model), device)
        _watch(rep, result)
        for inputs, expected in case.data:
            before = copy.deepcopy(inputs)
            outputs = list(rep.run(inputs))
            result.official_reason = result.official_reason or official.official(outputs, expected, case.rtol, case.atol)
            result.reason = result.reason or verdict.strict(outputs, expected, case.rtol, case.atol)
            if not result.reason and not verdict.same_bits(inputs, before):
                result.reason = "an input was changed"
            if not result.reason and not verdict.same_bits(outputs, list(rep.run(inputs))):
                result.reason = "a second run gave another result"
            result.ulps = max((u for u in (result.ulps, verdict.ulps(outputs, expected)) if u is not None), default=None)
        result.strict = "failed" if result.reason else "passed"
        result.official = "failed" if result.official_reason else "passed"
    except unittest.SkipTest as skip:  # ONNX counts this opt-out as a pass
        result.strict, result.reason = "unsupported", str(skip)
    except UnsupportedModel as error:
        result.strict, result.official, result.reason = "unsupported", "failed", str(error)
    except SonnxError as error:
        result.strict, result.official, result.reason = "failed", "failed", str(error)
    except Exception:
        result.strict, result.official, result.reason = "error", "failed", traceback.format_exc(limit=-3)
    result.seconds = time.perf_counter() - start
    return result


def _watch(rep: Any, result: Result) -> None:
    """Have our own executor note which versions, dtypes and attributes really run; another backend is not watched."""
    executor = getattr(rep, "_executor", None)
    if executor is None:
        return
    nodes = rep.graph.nodes
    if result.kind == "node" and len(nodes) == 1 and nodes[0].operator:
        result.under_test = (nodes[0].domain, nodes[0].op_type, nodes[0].operator.version)

    def observe(node: Any, inputs: list[Any], outputs: list[Any]) -> None:
        pairs, attributes = result.executed.setdefault((node.domain, node.op_type, node.operator.version), (set(), set()))
        attributes |= node.given
        for formals, values in ((node.operator.schema.inputs, inputs), (node.operator.schema.outputs, outputs)):
            for i, value in enumerate(values):
                if hasattr(value, "dtype") and formals:
                    pairs.add((formals[min(i, len(formals) - 1)].type_str, value.dtype.name))

    executor.observer = observe


# --- processes --------------------------------------------------------------------------------------------------------


def resolve(backend: str) -> Any:
    """The backend class or module named "module:attribute" or "module"."""
    module, _, attribute = backend.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def _serve(pipe: Connection, store: str, backend: str, device: str) -> None:
    cases: list[Case] = pickle.loads(Path(store).read_bytes())
    engine = resolve(backend)
    pipe.send(None)  # ready: the clock of the first case starts now
    while (index := pipe.recv()) is not None:
        pipe.send((index, run_case(cases[index], engine, device)))


class _Worker:
    def __init__(self, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.index: int | None = None
        self.ready = False
        self.deadline = 0.0

    def give(self, index: int | None, timeout: float) -> None:
        self.index = index
        self.deadline = time.monotonic() + (timeout if self.ready else START)
        self.pipe.send(index)

    def end(self) -> None:
        self.pipe.close()
        if self.process.is_alive():
            self.process.kill()
        self.process.join()


def run(
    cases: Sequence[Case],
    backend: str = "singa_backend:SingaBackend",
    device: str = "CPU",
    processes: int | None = None,
    timeout: float = 60.0,
    progress: Callable[[Result], None] | None = None,
) -> list[Result]:
    """Run the cases in `processes` child processes (as many as cores by default); results in the cases' order.

    timeout: seconds that one case may take before its process is killed and the case recorded as "timeout".
    """
    results: dict[int, Result] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "cases"
        store.write_bytes(pickle.dumps(list(cases)))
        arguments = (str(store), backend, device)
        # Long models first, so that no worker is left alone with one at the end.
        order: Iterator[int] = iter(sorted(range(len(cases)), key=lambda i: cases[i].kind != "real"))
        workers = [_Worker(*arguments) for _ in range(share_cores(processes, len(cases)))]
        try:
            for worker in workers:
                worker.give(next(order, None), timeout)
            while any(w.index is not None for w in workers):
                busy = [w for w in workers if w.index is not None]
                wait([w.pipe for w in busy] + [w.process.sentinel for w in busy], timeout=0.5)
                for worker in busy:
                    result = _answer(worker, cases, timeout)
                    if result is None:
                        continue
                    assert worker.index is not None
                    results[worker.index] = result
                    if progress:
                        progress(result)
                    if result.strict in ("died", "timeout"):
                        worker.end()
                        workers[workers.index(worker)] = worker = _Worker(*arguments)
                    worker.give(next(order, None), timeout)
        finally:
            for worker in workers:
                worker.end()
    return [results[i] for i in range(len(cases))]


def _answer(worker: _Worker, cases: Sequence[Case], timeout: float) -> Result | None:
    """The result of the worker's case: its answer, its death, or its overrun; None while it is still at work."""
    assert worker.index is not None
    case = cases[worker.index]
    try:
        if worker.pipe.poll():
            answer = worker.pipe.recv()
            if answer is None:
                worker.ready = True
                worker.deadline = time.monotonic() + timeout
                return None
            result = answer[1]
            assert isinstance(result, Result)
            return result
    except (EOFError, OSError):
        worker.process.join(5)
        return Result(case.name, case.kind, "died", "failed", f"the process died with exit code {worker.process.exitcode}")
    if not worker.process.is_alive():
        return Result(case.name, case.kind, "died", "failed", f"the process died with exit code {worker.process.exitcode}")
    if time.monotonic() > worker.deadline:
        return Result(case.name, case.kind, "timeout", "failed", f"no answer within {timeout:g} s")
    return None
