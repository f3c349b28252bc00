"""Drawn cases in a worker with limits of memory and time: the same case on every machine for a seed and an index.

A module of cases has `draw(seed, index)`, whose `text` describes the case, `enter(drawn)`, which raises what the case raises, and
`LIMITS`, the limits within which it runs.  If a worker dies or hangs, that is the result of its case, and another worker
continues.  Only a `SonnxError` may be raised.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from singa_backend.io.processes import Child, ChildFailure

MEMORY = 6 << 30
"""The address space of a worker."""

SECONDS = 120.0
"""Seconds after which a case hangs, also on a machine that other programs use; limits of cases and of onnx's child are lower."""

GROWTH = 768
"""MiB by which a case may raise the peak of a worker: a few times the largest tensor."""


def outcome(cases: str, seed: int, index: int) -> dict[str, Any]:
    """What a case ends with: "ok", "refused" with a code, or "foreign", and by how many MiB it raised the peak."""
    from singa_backend import Limits, SonnxError
    from singa_backend.limits import Budget, spend

    module = importlib.import_module(cases)
    drawn = module.draw(seed, index)
    if drawn is None:
        return {"outcome": "none", "code": "", "growth": 0, "seconds": 0.0, "text": ""}
    before, start, detail = _peak(), time.perf_counter(), ""
    try:
        with warnings.catch_warnings(), spend(Budget(Limits(**module.LIMITS))), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            module.enter(drawn)
        result, code = "ok", ""
    except SonnxError as error:
        result, code = "refused", error.code
    except Exception as error:
        result, code, detail = "foreign", type(error).__name__, f"{error}\n{traceback.format_exc()[-3000:]}"
    growth, seconds = _peak() - before, time.perf_counter() - start
    return {"outcome": result, "code": code, "growth": growth, "seconds": seconds, "text": drawn.text, "detail": detail}


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def serve(cases: str) -> Callable[[Any], dict[str, Any]]:
    """The function of a worker: it answers (seed, index)."""
    from singa_backend.proto import checker

    checker.NODE_TIMEOUT, checker.LEAST_TIMEOUT = 1.0, 2.0
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    outcome(cases, 0, 0)  # imports what the cases need, so that none is charged for it
    return lambda request: outcome(cases, *request)


def failed(found: dict[str, Any]) -> bool:
    """Whether a case breaks the guarantees."""
    return found["outcome"] not in ("ok", "refused", "none") or found["growth"] > GROWTH


def run(cases: str, seed: int, first: int, count: int, report: Callable[[int, dict[str, Any]], None]) -> Counter[str]:
    """Run cases of a module in a worker; `report` gets each one that fails.  Returns how many ended in each way."""
    from workers import serve as make  # not from __main__, which a worker cannot import

    seen: Counter[str] = Counter()
    with Child(make, cases, memory=MEMORY) as worker:
        for index in range(first, first + count):
            try:
                found = worker.ask((seed, index), SECONDS)
            except ChildFailure as failure:
                drawn = importlib.import_module(cases).draw(seed, index)
                text = "" if drawn is None else drawn.text
                found = {"outcome": failure.how, "code": str(failure.exit_code), "growth": 0, "text": text}
            seen[found["outcome"]] += 1
            if found["growth"] > GROWTH:
                seen["memory"] += 1
            if failed(found):
                report(index, found)
    return seen


def main(cases: str, description: str) -> int:
    """The command of a module of cases: 1 if a case failed."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, help="one case, in this process")
    options = parser.parse_args()
    if options.only is not None:
        drawn = importlib.import_module(cases).draw(options.seed, options.only)
        print("" if drawn is None else drawn.text, flush=True)
        found = outcome(cases, options.seed, options.only)
        print(*(f"{k}: {v}" for k, v in found.items()), sep="\n")
        return int(failed(found))
    total: Counter[str] = Counter()
    bad = 0

    def report(index: int, found: dict[str, Any]) -> None:
        nonlocal bad
        bad += 1
        what = f"{found['outcome']} {found['code']} +{found['growth']} MiB: {found['text']}"
        print(f"case {index}: {what}\n{found.get('detail', '')}", flush=True)

    start = time.monotonic()
    for at in range(options.first, options.first + options.count, 1000):
        total += run(cases, options.seed, at, min(1000, options.first + options.count - at), report)
        done = sum(n for k, n in total.items() if k != "memory")
        print(f"{done} cases in {time.monotonic() - start:.0f} s: {dict(total)}, {bad} failed", flush=True)
    return int(bool(bad))


__all__ = ["GROWTH", "MEMORY", "SECONDS", "failed", "main", "outcome", "run", "serve"]
if __name__ == "__main__":
    sys.exit("the modules of cases are conversion.py and edges.py")
