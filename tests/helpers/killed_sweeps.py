"""Sweeps whose processes are killed: what a file does to its process, and kills at drawn times.

Children import a sitecustomize.py, which acts by the name of the model that they open and logs the time.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, numpy_helper, parser

HOOK = '''
"""In a child process: what a file does to the process that opens it, by its name; the time of each open is logged."""

import os
import signal
import sys
import time

HOME = os.path.dirname(os.path.abspath(__file__))
PAUSE = float(os.environ.get("SWEEP_PAUSE", "0"))


def act(event, arguments):
    if event != "open" or not isinstance(arguments[0], str) or not arguments[0].endswith(".onnx"):
        return
    name = os.path.basename(arguments[0])
    with open(os.path.join(HOME, "opened.log"), "a") as log:
        log.write(f"{time.time_ns()} {name}\\n")
    time.sleep(PAUSE)
    if name.startswith("crash"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("exit"):
        os._exit(7)
    if name.startswith("once"):
        try:
            os.remove(os.path.join(HOME, "armed"))
        except FileNotFoundError:
            return
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("slow"):
        time.sleep(60)
    if name.startswith("large"):
        raise MemoryError("planted")


if any(a.endswith("processes.py") for a in sys.orig_argv):
    sys.addaudithook(act)
'''


def hook(folder: Path) -> Path:
    """Write the hook into a new folder, which must be first on the path of children."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    return folder


def opened(folder: Path) -> list[tuple[int, str]]:
    """The times, in ns, at which children opened models, and their names."""
    log = folder / "opened.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(when), name) for when, name in (line.split() for line in lines)]


def net(seed: int) -> ModelProto:
    """A small model, different for each seed."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[n, 4] x) => (float[n, 3] y) { m = MatMul(x, w) y = Tanh(m) }'
    made = parser.parse_model(text)
    weight = np.random.default_rng(seed).standard_normal((4, 3)).astype(np.float32)
    made.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return made


def models(folder: Path, count: int) -> Path:
    """Write `count` models; every tenth is not valid or cannot run."""
    folder.mkdir()
    for i in range(count):
        made = net(i)
        if i % 10 == 3:
            made.graph.node[0].op_type = "NoSuchOperator"
        if i % 10 == 7:
            made.graph.node[1].input[0] = "nothing"
        onnx.save(made, folder / f"m{i:04}.onnx")
    return folder


def command(folder: Path, results: Path, home: Path, task: str, pause: float) -> subprocess.Popen[bytes]:
    """Start a sweep."""
    path = os.pathsep.join([str(home), *filter(None, [os.environ.get("PYTHONPATH")])])
    line = [
        sys.executable,
        "-m",
        "singa.cli",
        "sweep",
        str(folder),
        "--task",
        task,
        "--results",
        str(results),
        "-n",
        "2",
        "--json",
    ]
    env = {**os.environ, "PYTHONPATH": path, "SWEEP_PAUSE": str(pause)}
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)


def report(made: subprocess.Popen[bytes], patience: float) -> dict[str, Any]:
    """The report of a sweep, without times."""
    out, told = made.communicate(timeout=patience)
    assert made.returncode in (0, 1), told.decode()[-2000:]
    document: dict[str, Any] = json.loads(out)
    for row in document["rows"]:
        del row["seconds"]
    return document


def children(pid: int) -> list[int]:
    """The process ids of the children of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has ended
            continue
        if parent == pid:
            found.append(int(path.parent.name))
    return found


def _begun(made: subprocess.Popen[bytes], home: Path) -> None:
    """Wait until a child of this sweep has opened a model."""
    before, limit = len(opened(home)), time.monotonic() + 60
    while len(opened(home)) == before and made.poll() is None and time.monotonic() < limit:
        time.sleep(0.02)


def killed(
    folder: Path, results: Path, home: Path, task: str, *, kills: int, pause: float, longest: float, seed: int
) -> dict[str, Any]:
    """Run a sweep with kills at drawn times, of itself and of its children, until it ends.

    Returns:
        The "report" of the last run, how often the sweep ("parents") and a child ("children") were killed, "early" if a run ended
        before all kills, "amid" the number of kills when some results were stored, and "repeated", the names of files that a
        child opened after their result was stored.
    """
    drawn, hit = random.Random(seed), {"parents": 0, "children": 0}
    early, amid = False, 0
    made = command(folder, results, home, task, pause)
    _begun(made, home)
    while sum(hit.values()) < kills:
        time.sleep(drawn.uniform(0, longest))
        if made.poll() is not None:
            early = True
            break
        amid += len(list(results.glob("*.json"))) > 0
        inner = children(made.pid)
        if drawn.random() < 0.5 and inner:
            with suppress(ProcessLookupError):
                os.kill(drawn.choice(inner), signal.SIGKILL)
                hit["children"] += 1
            continue
        made.kill()
        made.communicate()
        hit["parents"] += 1
        made = command(folder, results, home, task, pause)
        _begun(made, home)
    found = report(made, 900)
    stored = {}
    for row in found["rows"]:
        stored[row["file"]] = (results / f"{row['key']}.json").stat().st_mtime_ns
    repeated = [name for when, name in opened(home) if when > stored[name]]
    return {"report": found, **hit, "early": early, "amid": amid, "repeated": repeated}


def main() -> None:
    """Print the figures of a sweep with kills: FILES KILLS SEED."""
    import tempfile

    files, kills, seed = (int(a) for a in sys.argv[1:4])
    with tempfile.TemporaryDirectory() as place:
        top = Path(place)
        folder = models(top / "models", files)
        start = time.monotonic()
        whole = report(command(folder, top / "whole", hook(top / "plain"), "run", 0.1), 900)
        unbroken = time.monotonic() - start
        start = time.monotonic()
        home, longest = hook(top / "hooked"), files * 0.15 / kills
        found = killed(folder, top / "killed", home, "run", kills=kills, pause=0.1, longest=longest, seed=seed)
        facts = {
            "files": files, "counts": whole["counts"], **{k: found[k] for k in ("parents", "children", "early", "amid")},
            "same_report": found["report"] == whole, "repeated": len(found["repeated"]),
            "opened_unbroken": len(opened(top / "plain")), "opened_killed": len(opened(home)),
            "seconds_unbroken": round(unbroken), "seconds_killed": round(time.monotonic() - start),
        }  # fmt: skip
        print(json.dumps(facts))


if __name__ == "__main__":
    main()
