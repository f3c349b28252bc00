"""The tasks of a sweep, in the child process: each judges one file, and returns plain data."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import inspection
from ..backend import SingaBackend
from ..conform import foreign, worker
from ..conform.cases import Case
from ..debug.compare import compare
from ..debug.comparison import Comparison
from ..debug.guards.write import drawn_inputs
from ..debug.model import ComparedModel
from ..engines.local import Foreign
from ..engines.oracle import Oracle
from ..errors import InvalidModel, ResourceExhausted, SonnxError, UnsupportedModel, described, first_line
from ..limits import Limits
from ..proto.load import load_model
from ..proto.test_data import data_set
from .files import data_sets
from .settings import SweepSettings

Answer = dict[str, Any]
"""The status of a task, the reason and the code of an error, facts about the result, and seconds."""

LONGEST = 600
"""Characters of a reason."""

_RTOL, _ATOL = 1e-3, 1e-7
"""The tolerances of ONNX's own runner of test_data_set folders."""

FOREIGN = "foreign"
"""The task of `sonnx foreign`, whose requests are those of `conform.foreign.requests`."""


def serve(task: str, settings: SweepSettings | None) -> Callable[[Any], Answer]:
    """Return the function that judges a file: its request is a path, or one of `sonnx foreign`."""
    warnings.simplefilter("ignore")
    engines = _Engines(settings)

    def answer(request: Any) -> Answer:
        start = time.perf_counter()
        made: Answer = {"status": "passed", "reason": "", "code": "", "facts": {}}
        try:
            if settings is None:
                made["facts"] = {"comparisons": [c.to_dict() for c in foreign.compared(request, engines.oracle())]}
            else:
                made |= _TASKS[task](Path(request), settings, engines)
        except (MemoryError, ResourceExhausted) as error:
            made |= _failure("memory", error)
        except (InvalidModel, UnsupportedModel) as error:
            made |= _failure("refused", error)
        except SonnxError as error:
            made |= _failure("skipped" if error.code == "SX308" else "failed", error)
        except Exception as error:
            made |= _failure("error", error)
        if settings is not None:  # the result is that of every file of this content
            for place in (os.path.realpath(request), str(request)):
                made["reason"] = made["reason"].replace(place, Path(request).name)
        made["reason"] = made["reason"][:LONGEST]
        return made | {"seconds": round(time.perf_counter() - start, 3)}

    return answer


class _Engines:
    """The other engine of comparisons, which stays open from one file to the next."""

    def __init__(self, settings: SweepSettings | None) -> None:
        self.settings = settings
        self._open: Foreign | None = None
        self._oracle: Oracle | None = None

    def oracle(self) -> Oracle:
        self._oracle = self._oracle or Oracle("onnxruntime")
        return self._oracle

    def engine(self) -> Foreign:
        assert self.settings is not None
        self._open = self._open or Foreign(self.settings.against, timeout=self.settings.timeout)
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()


def _failure(status: str, error: BaseException) -> Answer:
    if isinstance(error, SonnxError):
        return {"status": status, "reason": first_line(str(error)), "code": error.code}
    return {"status": status, "reason": first_line(described(error, 0)) or type(error).__name__, "code": ""}


def _check(path: Path, settings: SweepSettings, engines: _Engines) -> Answer:
    report = inspection.check(path, timeout=settings.timeout)
    opinion = {True: "accepts", False: "refuses", None: "did not answer"}[report.opinion.valid]
    facts = {"operators": len(report.operators), "problems": len(report.problems), "checker": opinion}
    if report.good:
        return {"facts": facts}
    first = report.problems[0]
    return {"status": "refused", "reason": first_line(str(first)), "code": first.code, "facts": facts}


def _run(path: Path, settings: SweepSettings, engines: _Engines) -> Answer:
    rep = SingaBackend.prepare(path, limits=Limits(live_bytes=settings.memory))
    drawn_inputs(ComparedModel.of(path), settings.seed, rep.run)
    return {"facts": {"nodes": len(rep.nodes), "outputs": len(rep.outputs)}}


def _compare(path: Path, settings: SweepSettings, engines: _Engines) -> Answer:
    SingaBackend.prepare(path)  # a model that is not supported is refused as a whole
    source = ComparedModel.of(path)
    inputs = drawn_inputs(source, settings.seed)
    for _ in range(2):  # a file that kills the other engine twice is not compared
        found = compare(source, inputs, against=engines.engine(), timeout=settings.timeout)
        if not any(n.failure.how == "died" for n in found.failed):
            break
        engines.close()
    return _judged(found)


def _judged(found: Comparison) -> Answer:
    worst = next(iter(found.worst(1)), None)
    facts: dict[str, Any] = {"values": len(found.rows)}
    if worst is not None:
        facts |= {"worst": float(f"{worst.difference.excess:.2g}"), "value": worst.value[:200]}
    if found.first is not None:
        return {"status": "differs", "reason": first_line(str(found.first)), "facts": facts}
    wrong = [r for r in found.rows if not r.agrees]
    if wrong:
        return {"status": "differs", "reason": f"{wrong[0].value!r}: {wrong[0].difference}", "facts": facts}
    if found.failed:
        one = found.failed[0]
        reason = f"{len(found.failed)} nodes were not compared: {one.operator} {one.node}: {one.failure}"
        return {"status": "partial" if found.rows else "skipped", "reason": first_line(reason), "facts": facts}
    if not found.rows:
        return {"status": "skipped", "reason": "the model has no value to compare", "facts": facts}
    return {"facts": facts}


def _conform(path: Path, settings: SweepSettings, engines: _Engines) -> Answer:
    model, _ = load_model(path)
    folders, ulps = data_sets(path), list[float]()
    for folder in folders:
        case = Case(folder.name, "file", b"", [data_set(folder, model, by_name=True)], _RTOL, _ATOL)
        found = worker.run_case(case, SingaBackend, "CPU", path)
        if found.ulps is not None:
            ulps.append(found.ulps)
        if found.strict != "passed":
            status = {"unsupported": "refused", "failed": "differs"}.get(found.strict, found.strict)
            facts = {"data_sets": len(folders), "first": folder.name}
            return {"status": status, "reason": f"{folder.name}: {first_line(found.reason)}", "facts": facts}
    return {"facts": {"data_sets": len(folders), "max_ulp": max(ulps, default=None)}}


_TASKS: dict[str, Callable[[Path, SweepSettings, _Engines], Answer]] = {
    "check": _check,
    "run": _run,
    "compare": _compare,
    "conform": _conform,
}
