"""Compares training with PyTorch's: whole calls of a `SONNXModel` on files exported from PyTorch, next to the same nets there.

    tox -e training [-- --nets mlp cnn --optimizer SGD --report reports]
    tox -e training -- --held-out --compile                    # also the nets that nothing was tuned for, and torch.compile
    tox -e training -- --tape                                  # also steps of ours that are not recorded

Each lane is a process of its own, on one thread.  It trains a net on one batch for five steps, whose losses are compared.  Then
it has turns: one untimed step, and timed ones for 0.2 s.  A time is the median of `time.process_time` over all steps of all
turns; with more threads it is of `time.perf_counter`.  A ratio is ours over the fastest lane of PyTorch.  The lanes of PyTorch
are eager mode, eager mode with images and weights channels last, and with --compile, torch.compile.  Run it on an idle machine.

    memory     the peak of resident memory in a step, above that of the process with the loaded model and the batch
    error      after one step from the same parameters, the largest difference of a gradient or a parameter from PyTorch in
               float64, over the largest value of that one; next to the error of PyTorch in float32

Where a derivative jumps, as at 0 of ReLU and at equal values in a pooling, two correct programs in float32 compute different
gradients if they round a value to different sides.  So errors are also those of nets in which smooth functions replace these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import compare_training_lanes
import numpy as np
from compare import Progressive, cell, mean, told
from compare_peers import TURN, Absent, Child, Failure
from compare_training_lanes import ADAMW, CHANNELS_LAST, COMPILE, EAGER, LANES, NETS, OURS, SGD, SONNX, TAPE, Ends

from singa_backend.doctor import processor
from singa_backend.io.files import write_text

UNTIMED = 1
ZERO = 1e-8
"""A gradient whose largest value is a smaller part of the largest one of the net is zero but for rounding, and has no error."""

NORM, TWICE, STEP = 1e-6, 2.0, 1e-7
"""Of `against_theirs`; a gradient of PyTorch has at least the error of a rounding, STEP."""

CLOSE, TIMES = 1e-4, 10.0
"""Our error on a net without kinks may be CLOSE, or TIMES the largest of PyTorch; the first losses may differ by CLOSE."""

TITLES = {SGD: "SGD with momentum", ADAMW: "AdamW"}

ITSELF, SMOOTH = "itself", "smooth"

Json = dict[str, Any]


def errors(found: Ends, exact: Ends) -> dict[str, float]:
    """Return the largest error of a gradient and of a parameter, over the largest value of that one."""
    made = {}
    for kind, arrays in exact.items():
        sizes = {n: float(np.abs(a).max()) for n, a in arrays.items()}
        least = ZERO * max(sizes.values())
        there = [n for n, size in sizes.items() if size > least and n in found[kind]]
        made[kind] = max(float(np.abs(found[kind][n] - arrays[n]).max()) / sizes[n] for n in there)
    return made


def against_theirs(ours: Ends, theirs: Sequence[Ends], exact: Ends) -> Json:
    """Compare the error of each gradient with the larger one of PyTorch's layouts, both relative in the Euclidean norm.

    Returns:
        `count`: the gradients whose norm is above NORM times the largest; `within`: those whose error is at most TWICE theirs;
        `largest`: the largest quotient of the errors, and `name`: that of its gradient.
    """
    norms = {n: float(np.linalg.norm(a)) for n, a in exact["gradients"].items() if n in ours["gradients"]}
    quotients = {}
    for n in (n for n, norm in norms.items() if norm > NORM * max(norms.values())):
        mine, *others = (float(np.linalg.norm(e["gradients"][n] - exact["gradients"][n])) for e in (ours, *theirs))
        quotients[n] = mine / max(*others, STEP * norms[n])
    name = max(quotients, key=lambda n: quotients[n])
    within = sum(q <= TWICE for q in quotients.values())
    return {"count": len(quotients), "within": within, "largest": quotients[name], "name": name}


class Comparison:
    """Measures nets.

    Args:
        lanes: the lanes.
        threads: how many threads each may use.
        turns: how many turns each has.
        folder: for the exported files.
        seconds: how long the timed steps of a turn last.
    """

    def __init__(self, lanes: Sequence[str], threads: int, turns: int, folder: Path, seconds: float = TURN) -> None:
        self.lanes, self.threads, self.turns, self.folder, self.seconds = list(lanes), threads, turns, folder, seconds
        self.versions: dict[str, str] = {}
        self.absent: dict[str, str] = {}

    def start(self, lane: str) -> Child:
        """Start the process of a lane."""
        return Child(compare_training_lanes.__file__, lane, self.threads)

    def look(self) -> None:
        """Find out which lanes can run; the others are left out."""
        for lane in list(self.lanes):
            try:
                child = self.start(lane)
            except (Absent, Failure, OSError) as error:
                self.absent[lane] = str(error)
                self.lanes.remove(lane)
            else:
                self.versions[OURS if lane in SONNX else "torch"] = child.version
                child.close()

    def measure(self, name: str, optimizer: str, progress: Progressive) -> Json:
        """Return the row of a net and an optimizer."""
        row: Json = {"net": name, "optimizer": optimizer, "ms": {}, "losses": {}, "memory": {}, "errors": {}, "failed": {}}
        times: dict[str, list[float]] = {}
        lanes = [lane for lane in self.lanes if NETS[name].has_images or lane != CHANNELS_LAST]
        with ExitStack() as stack:
            running: dict[str, Child] = {}
            for lane in lanes:
                progress.at(f"{name}, {optimizer}: {lane} begins")
                try:
                    child = self.start(lane)
                    stack.callback(child.close)
                    found = child.ask("load", name, optimizer, self._file(name))
                    row["losses"][lane], row["memory"][lane] = found["losses"], found["memory"]
                    running[lane] = child
                except (Absent, Failure, OSError) as error:
                    row["failed"][lane] = str(error)
            for turn in range(self.turns):
                for lane, child in list(running.items()):
                    progress.at(f"{name}, {optimizer}: turn {turn + 1} of {self.turns}, {lane}")
                    try:
                        times.setdefault(lane, []).extend(child.ask("turn", UNTIMED, self.seconds))
                    except Failure as error:
                        row["failed"][lane] = str(error)
                        del running[lane]
            progress.at(f"{name}, {optimizer}: errors")
            self._examine(row, running)
        row["ms"] = {lane: round(1e3 * statistics.median(found), 4) for lane, found in times.items()}
        row["ratio"], row["tape"] = ratio(row["ms"]), ratio(row["ms"], TAPE)
        return row

    def _file(self, name: str, smooth: bool = False) -> str:
        """The path of a net's file, which PyTorch writes once."""
        path = self.folder / f"{name}{'-smooth' * smooth}.onnx"
        if not path.exists():
            child = self.start(EAGER)
            try:
                child.ask("export", name, str(path), smooth)
            finally:
                child.close()
        return str(path)

    def _examine(self, row: Json, running: Mapping[str, Child]) -> None:
        """Add the errors to a row, and what computes our step."""
        name, optimizer = row["net"], row["optimizer"]
        at = OURS
        try:
            if OURS in running:
                row["work"] = running[OURS].ask("work")
            if not {OURS, EAGER} <= set(running):
                return
            for form in (ITSELF, SMOOTH) if NETS[name].kinks else (ITSELF,):
                at = EAGER
                what = (name, optimizer, self._file(name, form == SMOOTH), form == SMOOTH)
                exact, found, all_ends = running[EAGER].ask("ends", *what, True), {}, {}
                for at, child in running.items():
                    if at != COMPILE:
                        ends = child.ask("ends", *what)
                        found[at], all_ends[at] = errors(ends, exact), ends
                        if at == OURS:
                            row["untrained"] = sorted(set(exact["gradients"]) - set(ends["gradients"]))
                row["errors"][form] = found
                theirs = [ends for lane, ends in all_ends.items() if lane not in SONNX]
                if OURS in all_ends and theirs:
                    row.setdefault("against", {})[form] = against_theirs(all_ends[OURS], theirs, exact)
        except Failure as error:
            row["failed"][at] = str(error)


def ratio(ms: Mapping[str, float], ours: str = OURS) -> float | None:
    """Return the time of a lane of ours over that of the fastest lane of PyTorch."""
    others = [t for lane, t in ms.items() if lane not in SONNX]
    return round(ms[ours] / min(others), 4) if ours in ms and others else None


def differences(row: Json) -> float | None:
    """Return the largest relative difference of our losses from those of eager mode."""
    if not {OURS, EAGER} <= set(row["losses"]):
        return None
    pairs = zip(row["losses"][OURS], row["losses"][EAGER], strict=True)
    return max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)


def problems(document: Json) -> list[str]:
    """Return what is wrong with our results."""
    wrong: list[str] = []
    for row in document["rows"]:
        name = f"{row['net']}, {row['optimizer']}"
        if OURS in row["failed"]:
            wrong.append(f"{name}: {row['failed'][OURS]}")
        if row.get("untrained"):
            wrong.append(f"{name}: not trained: {', '.join(row['untrained'])}")
        first = {lane: losses[0] for lane, losses in row["losses"].items()}
        if {OURS, EAGER} <= set(first) and not abs(first[OURS] - first[EAGER]) <= CLOSE * abs(first[EAGER]):
            wrong.append(f"{name}: the first loss is {first[OURS]:.6g}, that of PyTorch {first[EAGER]:.6g}")
        measured = row["errors"].get(SMOOTH if NETS[row["net"]].kinks else ITSELF, {})
        for lane in SONNX:
            where = " on the tape" if lane == TAPE else ""
            for kind, error in measured.get(lane, {}).items():
                theirs = max(found[kind] for other, found in measured.items() if other not in SONNX)
                if not error <= max(CLOSE, TIMES * theirs):
                    wrong.append(f"{name}: the error of {kind}{where} is {error:.1e}, that of PyTorch {theirs:.1e}")
    return wrong


# --- the report


def _times(rows: Sequence[Json], lanes: Sequence[str]) -> list[str]:
    """Return the table of rows of one optimizer."""
    tape = TAPE in lanes
    heads = [*(f"{lane}, ms" for lane in lanes), "ratio", *["tape"] * tape, "memory, MiB", "PyTorch's"]
    lines = [f"| net | batch | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for row in rows:
        cells = [f"{row['ms'][lane]:.4g}" if lane in row["ms"] else "" for lane in lanes]
        cells.append("" if row["ratio"] is None else cell(row["ratio"]))
        cells += ["" if row.get("tape") is None else f"{row['tape']:.2f}"] * tape
        cells += [_mib(row["memory"].get(lane)) for lane in (OURS, EAGER)]
        lines.append(f"| {row['net']} | {' x '.join(map(str, NETS[row['net']].input))} | {' | '.join(cells)} |")
    middle = mean(r["ratio"] for r in rows if r["ratio"] is not None)
    if middle is not None:
        taped = mean(r["tape"] for r in rows if r.get("tape") is not None) if tape else None
        more = "" if not tape else f" {taped:.3f} |" if taped is not None else " |"
        lines.append(f"| geometric mean | | {'| ' * len(lanes)}{middle:.3f} |{more} | |")
    return lines


def _mib(memory: Mapping[str, int] | None) -> str:
    return f"{memory['step'] / 2**20:.0f}" if memory else ""


def _work(rows: Sequence[Json]) -> list[str]:
    """Return the tables of what computes our steps."""
    lines = [
        "## What computes a step", "",
        "`kernels` is the share of the time of a recorded step in kernels; NumPy's definitions take the rest, most of it for the",
        "operators that are named. `gradients` are the calls of gradient rules in the step, `one kernel` those that one kernel",
        "computes, `refused` those that a kernel refuses. The rest are computed as the operators that their rules wrote.", "",
        "| net | optimizer | kernels | definitions | gradients | one kernel | refused |", "|---" * 7 + "|",
    ]  # fmt: skip
    refused: dict[str, dict[str, None]] = {}
    parts: list[str] = []
    for row in rows:
        work = row["work"]
        if shares := work.get("parts"):
            parts.append(f"| {row['net']} | {row['optimizer']} | {' | '.join(f'{s:.1%}' for s in shares.values())} |")
        slowest = ", ".join(f"{n} {share:.1%}" for n, share in work["slowest"].items() if share >= 0.005)
        count = sum(n for _, _, n in work["refused"])
        lines.append(f"| {row['net']} | {row['optimizer']} | {1 - work['definitions']:.1%} | {slowest} | {work['gradients']} | "
                     f"{work['joined']} | {count} |")  # fmt: skip
        for operator, reason, n in work["refused"]:
            refused.setdefault(f"{row['net']}: {n} of {operator}: {reason}", {})[row["optimizer"]] = None
    heads = ["", "| net | optimizer | forward | backward | update | reorders |", "|---" * 6 + "|"]
    lines += [*heads, *parts] if parts else []
    lines += ["", "Steps without a plan:", ""] if any(r["work"]["reason"] for r in rows) else []
    lines += [f"* {r['net']}, {r['optimizer']}: {r['work']['reason']}" for r in rows if r["work"]["reason"]]
    lines += ["", "Gradients that a kernel refuses:", ""] if refused else []
    lines += [f"* {what} ({', '.join(optimizers)})" for what, optimizers in refused.items()]
    written: dict[str, None] = {}
    for row in rows:
        if row["work"]["written"]:
            written[f"* {row['net']}: {', '.join(f'{n} {op}' for op, n in row['work']['written'].items())}"] = None
    lines += ["", "Gradients that are computed as the operators that their rules wrote:", ""] if written else []
    return [*lines, *written, ""]


def _errors(rows: Sequence[Json]) -> list[str]:
    """Return the table of errors."""
    lanes = (OURS, EAGER, CHANNELS_LAST)
    lines = [
        "## Errors", "",
        "The largest difference from PyTorch in float64 after one step from the same parameters, over the largest value of that",
        "gradient or parameter; those of PyTorch are of float32. Where a derivative jumps, as at 0 of ReLU, two correct programs",
        "in float32 compute different gradients if they round a value to different sides. In nets named `smooth` SiLU replaces",
        "such activations, and averages replace the maxima of pooling. The first step of AdamW divides a gradient by its",
        "absolute value, which magnifies errors of gradients near 0.", "",
        "| net | optimizer | gradient | eager | channels last | parameter | eager | channels last |", "|---" * 8 + "|",
    ]  # fmt: skip
    for row in rows:
        for form, found in row["errors"].items():
            cells = [f"{found[lane][kind]:.1e}" if lane in found else ""
                     for kind in ("gradients", "parameters") for lane in lanes]  # fmt: skip
            lines.append(f"| {row['net']}{', smooth' * (form == SMOOTH)} | {row['optimizer']} | {' | '.join(cells)} |")
    return [*lines, "", *_each_gradient(rows)]


def _each_gradient(rows: Sequence[Json]) -> list[str]:
    """Return the table of the errors of each gradient; none if the rows are of an earlier version."""
    if not any(row.get("against") for row in rows):
        return []
    lines = [
        f"The error of each gradient whose norm is above {NORM:g} of the largest, over the larger error of PyTorch's layouts,",
        "both relative to the float64 gradient in the Euclidean norm:", "",
        f"| net | optimizer | gradients | at most {TWICE:g} | largest | of |", "|---|---|---:|---:|---:|---|",
    ]  # fmt: skip
    for row in rows:
        for form, found in row.get("against", {}).items():
            named = f"{row['net']}{', smooth' * (form == SMOOTH)} | {row['optimizer']}"
            lines.append(f"| {named} | {found['count']} | {found['within']} | {found['largest']:.2g} | `{found['name']}` |")
    return [*lines, ""]


def _losses(rows: Sequence[Json]) -> list[str]:
    lines = [
        "## Losses", "",
        "The losses of the first steps, and their largest relative difference. Our first step runs on the tape, the second one",
        "records the graph and makes its plan, and later ones run by the plan.", "",
        "| net | optimizer | sonnx | PyTorch | difference |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in rows:
        shown = [", ".join(f"{loss:.5g}" for loss in row["losses"].get(lane, ())) for lane in (OURS, EAGER)]
        apart = differences(row)
        lines.append(
            f"| {row['net']} | {row['optimizer']} | {' | '.join(shown)} | {'' if apart is None else format(apart, '.1e')} |"
        )
    return [*lines, ""]


def page(document: Json) -> str:
    """Return the report in Markdown."""
    rows, threads = document["rows"], document["threads"]
    load = document["load"]
    lanes = [lane for lane in LANES if any(lane in r["ms"] for r in rows)]
    clock = "one thread; CPU time" if threads == 1 else f"{threads} threads; wall time"
    lines = [
        "# Training steps of exported models against PyTorch", "",
        "Written by `benchmarks/compare_training.py`; it is not checked for staleness, because times vary.", "",
        f"{document['machine']}; {', '.join(f'{k} {v}' for k, v in document['versions'].items())}; {clock}; medians of",
        f"{document['turns']} alternated turns. " + (f"The load average of the machine was {load[0]:.1f} at the start and "
        f"{load[1]:.1f} at the end; the measurement alone is a load of {threads}." if load else ""),
        "Each figure is of whole calls of a recorded `SONNXModel`, whose file PyTorch has exported. A ratio is our time over",
        "that of the fastest lane of PyTorch: below 1 we are faster, and above 1.05 it is bold. `memory` is the peak of resident",
        "memory in a step above that of the process with the loaded model; PyTorch's is that of eager mode.",
        *["`tape` is the ratio of steps that are not recorded."] * (TAPE in lanes), "",
    ]  # fmt: skip
    lines += [f"* absent: {lane}: {why}" for lane, why in document["absent"].items()] + [""] * bool(document["absent"])
    for held_out in (False, True):
        for optimizer, title in TITLES.items():
            shown = [r for r in rows if r["optimizer"] == optimizer and NETS[r["net"]].held_out == held_out]
            if shown:
                lines += [f"## {title}{', held out' if held_out else ''}", "", *_times(shown, lanes), ""]
    worked = [r for r in rows if "work" in r]
    lines += [*(_work(worked) if worked else []), *_errors(rows), *_losses(rows)]
    failed = [f"* {r['net']}, {r['optimizer']}, {lane}: {why}" for r in rows for lane, why in r["failed"].items()]
    wrong = [f"* {p}" for p in problems(document) if f"* {p}" not in failed]
    lines += ["## No result", "", *failed, ""] if failed else []
    lines += ["## Results that differ", "", *wrong, ""] if wrong else []
    return "\n".join(lines)


# --- the command


def _load() -> float | None:
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None


def compare(comparison: Comparison, nets: Sequence[str], optimizers: Sequence[str], report: Path | None) -> Json:
    """Measure nets; the report is written after every row."""
    comparison.look()
    before = _load()
    document: Json = {
        "machine": f"{processor()}, {os.cpu_count()} cores", "threads": comparison.threads, "turns": comparison.turns,
        "versions": comparison.versions, "absent": comparison.absent, "load": [], "rows": [],
    }  # fmt: skip
    progress = Progressive(len(nets) * len(optimizers))
    try:
        for lane, why in comparison.absent.items():
            progress.at(f"absent: {lane}: {why}")
        for name in nets:
            for optimizer in optimizers:
                row = comparison.measure(name, optimizer, progress)
                document["rows"].append(row)
                document["load"] = [] if before is None else [before, _load()]
                shown = [f"{lane} {t:.4g} ms" for lane, t in row["ms"].items()]
                shown += [f"ratio {row['ratio']:.2f}"] if row["ratio"] is not None else []
                shown += [f"NO RESULT {lane}: {why}" for lane, why in row["failed"].items()]
                progress.line(f"{name:12} {optimizer:6} {', '.join(shown)}")
                if report:
                    save(document, report)
    finally:
        progress.close()
    return document


def save(document: Json, folder: Path) -> None:
    """Write the figures and the page."""
    write_text(folder / "benchmark-training.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / "benchmark-training.md", page(document))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), metavar="NAME", help="all that are not held out, unless given")
    parser.add_argument("--held-out", action="store_true", help="also the held-out nets")
    parser.add_argument("--optimizer", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument("--tape", action="store_true", help="also steps of ours on the tape, which are not recorded")
    parser.add_argument("--compile", action="store_true", help="also torch.compile, which needs a C++ compiler")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--report", type=Path, metavar="DIR", help="write benchmark-training.json and .md into this folder")
    options = parser.parse_args()
    nets = options.nets or [n for n, net in NETS.items() if options.held_out or not net.held_out]
    chosen = {COMPILE: options.compile, TAPE: options.tape}
    lanes = [lane for lane in LANES if chosen.get(lane, True)]
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(lanes, options.threads, options.turns, Path(folder))
        document = compare(comparison, nets, options.optimizer, options.report)
    return told(page(document), problems(document))


if __name__ == "__main__":
    sys.exit(main())
