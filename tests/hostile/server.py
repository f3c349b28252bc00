"""A warm process that forks a child for each hostile case, and says how the case ended, how long it took and what it used.

One JSON object a line on standard input, one on standard output: {"name", "device", "path"} for a model of the corpus,
{"seed", "index", "path"} for a drawn input, {"door", "path"} for a door, whose folder is the path.  The argument `doors` imports
what doors need before the first case.  With the argument `models`, {"seed", "first", "last"} for drawn models of a damaged
structure, which are passed through their doors without a fork for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import corpus
import inputs
import numpy as np
import structure
from onnx import helper

from singa_backend import Limits, SingaBackend, SonnxError
from singa_backend.elementwise import compile as machine_code
from singa_backend.ir.declaration import declarations
from singa_backend.kernels.table import gradient_kernels, table
from singa_backend.limits import Budget, spend

PATIENCE = 10.0
"""Seconds after which a child hangs."""
CODE = (".py", ".pyc", ".so")
SYSTEM = ("/proc/loadavg", "/proc/cpuinfo")  # who else uses the cores, if a run was slow; what machine code is for
KEPT = str(machine_code.folder().parent)  # the user's cache of machine code


FAMILIES = [len(entries) for entries in (declarations, table, gradient_kernels)]  # imports all, so that no child must


def main() -> None:
    _warm_up()
    if "doors" in sys.argv:
        _warm_up_doors()
    if "models" in sys.argv:
        warnings.simplefilter("ignore")
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(_damaged(**json.loads(line))), flush=True)
        return
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_forked(**json.loads(line))), flush=True)


def _warm_up() -> None:
    """Import whatever an operator imports when it first runs: a child opens files of the model only."""
    import re2
    from PIL import Image

    re2.compile("a")
    Image.init()
    np.einsum("ij,jk,kl->il", *[np.ones((2, 2))] * 3, optimize=True)
    np.fft.fft(np.ones(4))
    np.random.default_rng(0).random(3), np.random.RandomState(0).uniform(0, 1, 3)
    node = helper.make_node("Add", ["x", "y"], ["z"])
    for device in ("CPU", "STRICT"):
        SingaBackend.run_node(node, [np.ones(2, np.float32)] * 2, device)


def _warm_up_doors() -> None:
    """Import what the doors import, and pass something whole through each that reads a file."""
    from importlib import import_module

    from singa.cli._main import COMMANDS

    for name, _ in COMMANDS.values():
        import_module(name)
    for name, door in inputs.FILE_DOORS.items():
        if name in ("report", "fuzz --ledger"):  # they would do their work
            continue
        with tempfile.TemporaryDirectory() as folder:
            door.prepare(Path(folder))
            (Path(folder) / door.name).write_bytes(inputs.whole(door.form))
            with contextlib.suppress(inputs.Refused, AssertionError, SonnxError):
                door.call(Path(folder))
    for i in range(len(inputs.FILE_DOORS) + len(inputs.OTHER_DOORS)):
        inputs.draw(0, i)


def _forked(path: str, **request: Any) -> dict[str, Any]:
    """Run a case in a forked child; one that writes no result died, or hung and was killed."""
    inlet, outlet = os.pipe()
    child = os.fork()
    if not child:
        os.close(inlet)
        try:
            if "index" in request:
                found = _enter(inputs.draw(request["seed"], request["index"]).call, Path(path))
            elif "door" in request:
                found = _enter(inputs.FILE_DOORS[request["door"]].call, Path(path))
            else:
                found = _run(corpus.CASES[request["name"]], request["device"], Path(path))
            os.write(outlet, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(outlet)
    text, end = b"", time.monotonic() + PATIENCE
    while True:
        ready, _, _ = select.select([inlet], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            os.kill(child, signal.SIGKILL)
            break
        piece = os.read(inlet, 1 << 16)
        if not piece:
            break
        text += piece
    os.close(inlet)
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"outcome": "hung" if os.WIFSIGNALED(status) else "died", "code": "", "opened": []}


def _run(case: corpus.Case, device: str, path: Path) -> dict[str, Any]:
    feeds = case.feeds()
    # Only what would not end meets a deadline: everything else must be quick by itself.
    limits = Limits(**{"deadline": 0.5 if case.code == "SX608" else PATIENCE, **case.limits})
    before, opened, folder = _kibibytes("VmRSS"), [], os.path.realpath(path.parent)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if any(isinstance(a, str) and a.startswith(KEPT) for a in args[:2]):
            return
        if event.partition(".")[0] in ("subprocess", "socket") or event in (
            "os.system",
            "os.exec",
            "os.remove",
            "os.rename",
            "os.mkdir",
        ):
            opened.append(event)
        elif event == "open" and isinstance(args[0], (str, bytes)):
            name, flags = os.fsdecode(args[0]), args[2]
            if os.path.isabs(name):
                within = name == folder or name.startswith((folder + "/", str(path.parent) + "/"))
                code = name.endswith((*CODE, "METADATA")) and name.startswith((sys.prefix, sys.base_prefix))
                if not within and not code and name not in SYSTEM:
                    opened.append(name)
            elif "/" in name or not flags & os.O_NOFOLLOW:  # relative to a directory's handle: one name, and no link
                opened.append(name)

    sys.addaudithook(hook)
    start, cpu = time.perf_counter(), time.process_time()
    message = ""
    try:
        SingaBackend.prepare(path, device, limits=limits).run(feeds)
        outcome, code = "ok", ""
    except SonnxError as error:
        outcome, code, message = type(error).__name__, error.code, str(error)
    except BaseException as error:
        outcome, code, message = f"foreign {type(error).__name__}", "", str(error)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    strange = list(opened)
    peak = (_kibibytes("VmHWM") - before) / 1024
    return {"outcome": outcome, "code": code, "message": message[:2000], "seconds": seconds, "cpu": cpu, "mebibytes": peak,
            "opened": strange}  # fmt: skip


def _enter(call: Callable[[Path], Any], folder: Path) -> dict[str, Any]:
    before = _kibibytes("VmRSS")
    start, cpu, message = time.perf_counter(), time.process_time(), ""
    try:
        with spend(Budget(Limits(**inputs.LIMITS))):
            call(folder)
        outcome, code = "ok", ""
    except (SonnxError, inputs.Refused) as error:
        outcome, code, message = "refused", getattr(error, "code", "exit"), str(error)
    except BaseException as error:
        outcome, code, message = f"foreign {type(error).__name__}", "", f"{error}\n{traceback.format_exc()}"
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    peak = (_kibibytes("VmHWM") - before) / 1024
    return {"outcome": outcome, "code": code, "message": message[:4000], "seconds": seconds, "cpu": cpu, "mebibytes": peak}


def _damaged(seed: int, first: int, last: int) -> dict[str, Any]:
    """How often each door returned or refused, and everything else that it raised; a door that hangs ends this process."""
    ended: Counter[str] = Counter()
    failed: list[str] = []
    for index in range(first, last):
        drawn = structure.draw(seed, index)
        for door in dict.fromkeys(structure.doors_of(index)):
            signal.alarm(int(PATIENCE) * 3)
            try:
                structure.DOORS[door](drawn.data, structure.feeds(drawn.base))
                ended[f"{door} ok"] += 1
            except SonnxError:
                ended[f"{door} refused"] += 1
            except BaseException:
                failed.append(f"{index} {door} of {drawn}: {traceback.format_exc()[-1500:]}")
    signal.alarm(0)
    return {"ended": ended, "failed": failed}


def _kibibytes(field: str) -> int:
    """VmRSS, or VmHWM: the most since the fork."""
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))


if __name__ == "__main__":
    main()
