"""Calls in a child process whose memory is bounded: what each raises, the memory that it needs, and its processor time.

`python bounded.py FOLDER` reads {"module", "function", "cases"} on standard input, calls the function with each case, and prints
a list of {"code", "message", "mebibytes", "seconds"}; the code of a call that returns is "", of an exception that is not a
SonnxError its class.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MOST = 512 << 20
"""The bytes that a child may add to its address space: the machine survives a call without a bound."""

available = Path("/proc/self/clear_refs").exists()
"""Whether the system shows the most memory since a moment."""


def calls(function: Callable[[Any], Any], cases: Sequence[Any], seconds: float = 300.0) -> list[dict[str, Any]]:
    """Call a function of a module with each case, a value of JSON, in one child.

    A child that dies or hangs is an error, with its output.
    """
    request = {"module": function.__module__, "function": function.__name__, "cases": list(cases)}
    path = os.pathsep.join(p or os.getcwd() for p in [str(ROOT), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(request), capture_output=True, text=True, timeout=seconds, env=environment
    )
    assert done.returncode == 0, f"{done.returncode}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    answers: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return answers


def _kibibytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def _main() -> None:
    import resource

    from singa_backend import SonnxError

    request = json.loads(sys.stdin.read())
    call = getattr(importlib.import_module(request["module"]), request["function"])
    most = (_kibibytes("VmSize") << 10) + MOST
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    for case in request["cases"]:
        Path("/proc/self/clear_refs").write_text("5")  # the most memory counts from here
        before, start = _kibibytes("VmRSS"), time.process_time()
        code, message = "", ""
        try:
            call(case)
        except SonnxError as error:
            code, message = error.code, error.message
        except Exception as error:
            code, message = type(error).__name__, str(error)
        used = (_kibibytes("VmHWM") - before) / 1024
        answer = {"code": code, "message": message[:500], "mebibytes": used, "seconds": time.process_time() - start}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main()
