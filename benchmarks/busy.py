"""Compares the time of inference or of training next to other programs: with the default threads, with one, and another's.

    tox -e compare-models -- --to MODELS                       # once: writes the models
    tox -e busy -- MODELS [--models bert4] [--load loops] [--report reports]
    tox -e busy -- MODELS --load idle --before PYTHON          # also against another version, installed for that interpreter
    tox -e busy-training [-- --nets bert --report reports]     # steps of training, against PyTorch's eager mode

Each lane is a process of its own that has prepared the model before the load begins.  Next to a load the lanes have turns of one
run, until each has 40; without one they have turns of 0.2 seconds, of which the first runs are not timed.  All of it is done
twice, with new processes: two equal ones next to a load differ by up to a fifth.  The loads:

    idle      nothing
    loops     as many busy loops as cores
    third     one busy loop that runs for 3 of every 10 milliseconds

The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import compare_models
import compare_training_lanes
from compare import Progressive, mean
from compare_peers import LIMIT, TURN, Absent, Child, Failure, Peer
from compare_training_lanes import EAGER, NETS, OURS, SGD

from singa_backend.doctor import processor
from singa_backend.io.files import write_text

TRAINED = ("mlp", "cnn", "mobilenetv2", "bert")
MODELS = ("squeezenet", "mobilenetv2", "shufflenet", "vit-small", "bert4", "mlp", "cnn28")
LOOP = "while True: pass"
THIRD = "import time\nwhile True:\n end = time.perf_counter() + 0.003\n while time.perf_counter() < end: pass\n time.sleep(0.007)"
LOADS = {"idle": (), "loops": (LOOP,) * (os.cpu_count() or 1), "third": (THIRD,)}
"""The programs of each load."""

DEFAULT, ONE, THEIRS, BEFORE = "default threads", "one thread", "onnxruntime", "before"
LANES = {DEFAULT: ("sonnx", 0), ONE: ("sonnx", 1), THEIRS: ("onnxruntime", 0)}
"""The peer of each lane, and its number of threads; 0 for its default."""
TORCH = "PyTorch"
TRAINING = {DEFAULT: (OURS, 0), ONE: (OURS, 1), TORCH: (EAGER, 0)}
"""The lanes of training, as those of inference."""

RUNS, IDLE, STARTS = 40, (8, 2), 2
"""The number of timed runs of each process; on the idle machine the number of turns, and of untimed runs in each; the number of
processes of each lane, one after the other."""

GOALS = {ONE: 1.2, THEIRS: 1.3, TORCH: 1.3}
SPREAD = 2.0
"""The goals next to other programs: our median over another lane's, and our 90th percentile over our median."""

Json = dict[str, Any]


@contextmanager
def load(programs: Sequence[str]) -> Iterator[None]:
    """Run programs of Python in the background."""
    with ExitStack() as stack:
        for program in programs:
            process = subprocess.Popen([sys.executable, "-c", program])
            stack.callback(process.wait)
            stack.callback(process.kill)
        time.sleep(0.3 if programs else 0.0)
        yield


class TrainingLane(Child):
    """A process that trains a net.

    Args:
        form: the lane of `compare_training_lanes`.
        threads: the number of threads; 0 for its default.
    """

    def __init__(self, form: str, threads: int) -> None:
        super().__init__(compare_training_lanes.__file__, form, threads)

    def turn(self, untimed: int, seconds: float = TURN, most: int = LIMIT) -> list[float]:
        """Take some steps untimed, then timed ones, `most` times at most; return the seconds of each."""
        found: list[float] = self.ask("turn", untimed, seconds, most, True)
        return found


def measure_training(net: str, file: str, loads: Sequence[str], runs: int, progress: Progressive) -> list[Json]:
    """Return a row for each load, of the steps of a net by SGD."""

    def start(lane: str) -> TrainingLane:
        made = TrainingLane(*TRAINING[lane])
        made.ask("load", net, SGD, file)
        return made

    return _measured(net, list(TRAINING), start, loads, runs, progress)


def train(nets: Sequence[str], loads: Sequence[str], runs: int) -> Json:
    """Return the document of training; PyTorch writes the files of the nets."""
    document: Json = {"machine": f"{processor()}, {os.cpu_count()} cores", "versions": {}, "rows": [], "trains": True}
    progress = Progressive(len(nets) * len(loads))
    with tempfile.TemporaryDirectory() as folder:
        try:
            for form in (OURS, EAGER):
                with closing(TrainingLane(form, 1)) as lane:
                    document["versions"]["torch" if form == EAGER else form] = lane.version
                    for net in nets if form == EAGER else ():
                        lane.ask("export", net, f"{folder}/{net}.onnx", False)
            for net in nets:
                document["rows"] += measure_training(net, f"{folder}/{net}.onnx", loads, runs, progress)
        finally:
            progress.close()
    return document


def measure(path: Path, model: str, loads: Sequence[str], runs: int, before: str, progress: Progressive) -> list[Json]:
    """Return a row for each load."""
    feeds = compare_models.inputs_of(path, model, 1)
    lanes = {**LANES, **({BEFORE: ("sonnx", 0)} if before else {})}

    def start(lane: str) -> Peer:
        made = Peer(*lanes[lane], before if lane == BEFORE else sys.executable)
        made.load(path, model, feeds)
        return made

    return _measured(model, list(lanes), start, loads, runs, progress)


def _measured(
    model: str, lanes: Sequence[str], start: Callable[[str], Any], loads: Sequence[str], runs: int, progress: Progressive
) -> list[Json]:
    rows = []
    for name in loads:
        times: dict[str, list[float]] = {lane: [] for lane in lanes}
        for _ in range(STARTS):
            with ExitStack() as stack:
                peers = {}
                for lane in lanes:
                    progress.at(f"{model}, {name}: {lane} prepares")
                    peer = peers[lane] = start(lane)
                    stack.callback(peer.close)
                    peer.turn(5, 0)
                with load(LOADS[name]):
                    for _ in range(runs if LOADS[name] else IDLE[0]):
                        for lane, peer in peers.items():
                            times[lane] += peer.turn(0, math.inf, 1) if LOADS[name] else peer.turn(IDLE[1])
        rows.append(row_of(model, name, times))
        progress.line(line_of(rows[-1]))
    return rows


def row_of(model: str, load: str, times: dict[str, list[float]]) -> Json:
    """Return medians, our ratios to the other lanes, and our 90th percentile over our median."""
    medians = {lane: statistics.median(found) for lane, found in times.items()}
    return {
        "model": model,
        "load": load,
        "times_ms": {lane: round(1e3 * t, 4) for lane, t in medians.items()},
        "ratios": {lane: round(medians[DEFAULT] / t, 3) for lane, t in medians.items() if lane != DEFAULT},
        "spread": {lane: round(statistics.quantiles(found, n=10)[-1] / medians[lane], 2) for lane, found in times.items()},
    }


def line_of(row: Json) -> str:
    """Return a row as a line of text."""
    ratios = ", ".join(f"{r:.2f} of {lane}" for lane, r in row["ratios"].items())
    return f"{row['model']}, {row['load']}: {row['times_ms'][DEFAULT]:.3g} ms, {ratios}; p90 {row['spread'][DEFAULT]:.2f}"


def missed(row: Json) -> list[str]:
    """Return the goals that a row next to other programs misses."""
    if row["load"] == "idle":
        return []
    found = [f"{lane} {r:.2f}" for lane, r in row["ratios"].items() if r > GOALS.get(lane, math.inf)]
    return found + ([f"spread {row['spread'][DEFAULT]:.2f}"] if row["spread"][DEFAULT] > SPREAD else [])


def join(documents: Sequence[Json]) -> Json:
    """Return one document with the medians of several."""
    kept: dict[tuple[str, str], list[Json]] = {}
    for document in documents:
        for row in document["rows"]:
            kept.setdefault((row["model"], row["load"]), []).append(row)
    rows = []
    for found in kept.values():
        row: Json = {"model": found[0]["model"], "load": found[0]["load"], "runs": len(found)}
        for key in ("times_ms", "ratios", "spread"):
            row[key] = {lane: round(statistics.median(r[key][lane] for r in found), 4) for lane in found[-1][key]}
        rows.append(row)
    return {**documents[-1], "rows": rows}


def page(document: Json) -> str:
    """Return the report in Markdown."""
    trains = document.get("trains", False)
    peer, batch = (TORCH, "The nets and batches of the comparison of training.") if trains else (THEIRS, "Batch 1.")
    lines = [
        f"# {'Training steps' if trains else 'Inference'} next to other programs", "",
        "Written by `benchmarks/busy.py`; it is not checked for staleness, because times vary.", "",
        f"{document['machine']}; {', '.join(f'{k} {v}' for k, v in document['versions'].items())}. {batch}",
        "Each figure is the median of our time with the default number of threads over that of another lane, from interleaved",
        f"turns. The goals next to other programs are {GOALS[ONE]} of our one thread, {GOALS[peer]} of {peer} with its",
        f"default threads, and a 90th percentile of {SPREAD:g} times the median; what misses one is bold.", "",
    ]  # fmt: skip
    for name, programs in LOADS.items():
        rows = [r for r in document["rows"] if r["load"] == name]
        if not rows:
            continue
        what = {"idle": "Idle", "loops": f"Next to {len(programs)} busy loops", "third": "Next to one loop at 30 % of a core"}
        others = list(rows[0]["ratios"])
        heads = [*others, "90th percentile", "one thread's", f"{peer}'s"]
        lines += [f"## {what[name]}", "", f"| model | ms | {' | '.join(heads)} |",
                  "|---" * (len(heads) + 2) + "|"]  # fmt: skip
        for r in rows:
            cells = [_cell(r["ratios"][lane], GOALS.get(lane), name) for lane in others]
            cells += [_cell(r["spread"][DEFAULT], SPREAD, name), *(f"{r['spread'][lane]:.2f}" for lane in (ONE, peer))]
            lines.append(f"| {r['model']} | {r['times_ms'][DEFAULT]:.3g} | {' | '.join(cells)} |")
        means = " | ".join(f"{mean(r['ratios'][lane] for r in rows):.2f}" for lane in others)
        lines += [f"| geometric mean | | {means} | | | |", ""]
    return "\n".join(lines)


def _cell(value: float, goal: float | None, load: str) -> str:
    return f"**{value:.2f}**" if goal is not None and load != "idle" and value > goal else f"{value:.2f}"


def save(document: Json, folder: Path) -> None:
    """Write the figures and the page."""
    name = "benchmark-busy-training" if document.get("trains") else "benchmark-busy"
    write_text(folder / f"{name}.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / f"{name}.md", page(document))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of the models")
    parser.add_argument("--models", nargs="+", choices=list(compare_models.MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument("--load", nargs="+", choices=list(LOADS), default=list(LOADS))
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--before", default="", metavar="PYTHON", help="an interpreter with another version of sonnx")
    parser.add_argument("--train", action="store_true", help="measure steps of training instead")
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(TRAINED), metavar="NAME", help="with --train")
    parser.add_argument("--join", nargs="+", type=Path, metavar="JSON", help="join these reports; measure nothing")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write benchmark-busy.json and .md into this folder")
    options = parser.parse_args()
    if options.train:
        document = train(options.nets, options.load, options.runs)
    elif options.join:
        document = join([json.loads(p.read_text(encoding="utf-8")) for p in options.join])
    else:
        if options.folder is None or not options.folder.is_dir():
            parser.error(f"the folder of the models is {options.folder}; write it by compare_models.py --to FOLDER")
        paths = {m: compare_models.path_of(options.folder, m, 1) for m in options.models}
        if absent := [m for m, p in paths.items() if not p.exists()]:
            parser.error(f"no files of {', '.join(absent)}; write them by compare_models.py --to {options.folder}")
        versions = {}
        for kind in dict.fromkeys(kind for kind, _ in LANES.values()):
            try:
                peer = Peer(kind, 0)
            except (Absent, Failure, OSError) as error:
                parser.error(f"{kind}: {error}")
            versions[kind] = peer.version
            peer.close()
        document = {"machine": f"{processor()}, {os.cpu_count()} cores", "versions": versions, "rows": []}
        progress = Progressive(len(paths) * len(options.load))
        try:
            for model, path in paths.items():
                document["rows"] += measure(path, model, options.load, options.runs, options.before, progress)
        finally:
            progress.close()
    if options.report:
        save(document, options.report)
    report(document)
    return 0


def report(document: Json) -> None:
    """Print the page, and what misses a goal on standard error."""
    print(page(document))
    for row in document["rows"]:
        if found := missed(row):
            print(f"missed: {row['model']}, {row['load']}: {', '.join(found)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
