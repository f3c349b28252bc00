"""Compares the time of inference with other runtimes: each in its own process, in turns, on the same models and inputs.

    tox -e compare-models -- --to MODELS                       # once: writes the models (see compare_models.py)
    tox -e compare -- MODELS [--models bert --batch 1] [--peers sonnx onnxruntime] [--report reports]
    tox -e compare -- --join A/benchmark-compare.json B/benchmark-compare.json --report reports

Every peer loads the model, its outputs are compared with onnxruntime's, and it runs three times untimed.  In every round each
peer has a turn: two untimed runs, then timed ones for 0.2 s.  A ratio is our median over the other's, over all turns.  The
machine must have nothing else to do.  A peer that is not installed is named and left out; --python PEER=INTERPRETER runs one in
another environment.  `--join` takes the median of the ratios of several reports, written at different times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import compare_models
import compare_peers
import numpy as np
from compare_peers import Absent, Failure, Peer
from rich.console import Console
from rich.progress import Progress

from singa_backend.doctor import processor
from singa_backend.io.files import write_text

OURS, THEIRS = "sonnx", "onnxruntime"
WARM_UP, UNTIMED = 3, 2
TIE = 1.05
"""A ratio up to this is a tie: the noise of measurements."""
TOLERANCE = 1e-4
"""The largest difference from onnxruntime, relative to the largest value of the output, that is not reported."""

Json = dict[str, Any]


class Progressive:
    """Reports what happens: a bar on a terminal, lines elsewhere.  It draws only between turns."""

    def __init__(self, total: int) -> None:
        self._bar = Progress(console=Console(stderr=True), auto_refresh=False)
        self._live = self._bar.console.is_terminal
        self._task = self._bar.add_task("", total=total)
        if self._live:
            self._bar.start()

    def at(self, text: str) -> None:
        if self._live:
            self._bar.update(self._task, description=text, refresh=True)

    def line(self, text: str) -> None:
        self._bar.advance(self._task)
        self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._bar.stop()


def told(text: str, wrong: Sequence[str]) -> int:
    """Print a page, and problems on standard error; return the exit code."""
    print(text)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


def difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """Return the largest difference relative to the largest value of its output; infinity where shapes or NaNs differ."""
    if len(ours) != len(theirs):
        return math.inf
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if a.shape != b.shape or not np.array_equal(np.isnan(a), np.isnan(b)):
            return math.inf
        same = (a == b) | np.isnan(a)
        if not same.all():
            x, y = a[~same].astype(np.float64), b[~same].astype(np.float64)
            worst = max(worst, float(np.abs(x - y).max() / (np.abs(b[np.isfinite(b)]).max(initial=0) or 1)))
    return worst if math.isfinite(worst) else math.inf


class Comparison:
    """Measures models.

    Args:
        peers: names of runtimes.
        threads: how many threads each may use.
        rounds: how many turns each has.
        pythons: the interpreter of a peer, where it is not this one.
        seconds: how long the timed runs of a turn last; 0 compares outputs only.
        prepare: whether to time the preparation of the model too, in new processes.
    """

    def __init__(
        self, peers: Sequence[str], threads: int, rounds: int, pythons: Mapping[str, str], seconds: float = compare_peers.TURN,
        prepare: bool = False,
    ) -> None:  # fmt: skip
        self.peers, self.threads, self.rounds, self.pythons = list(peers), threads, rounds, dict(pythons)
        self.seconds, self.prepare = seconds, prepare
        self.versions: dict[str, str] = {}
        self.absent: dict[str, str] = {}

    def _start(self, name: str) -> Peer:
        return Peer(name, self.threads, self.pythons.get(name, sys.executable))

    def look(self) -> None:
        """Find out which peers are installed."""
        for name in self.peers:
            try:
                peer = self._start(name)
            except (Absent, Failure, OSError) as error:
                self.absent[name] = str(error)
            else:
                self.versions[name] = peer.version
                peer.close()

    def _lanes(self, folder: Path, name: str, batch: int) -> Iterable[tuple[str, str, str, Path]]:
        """Yield a label, the peer, its model and file for everything that has turns with a model; onnxruntime first."""
        row = compare_models.MODELS.get(name, compare_models.Model(""))
        nets = row.family == "torch" and not row.grows
        for peer in sorted(self.versions, key=lambda p: p != THEIRS):
            fits = {"torch": nets, "torch-compile": nets, "openvino": not row.grows, "reference": row.reference}
            if fits.get(peer, True):
                yield peer, peer, name, compare_models.path_of(folder, name, batch)
        for other in row.others:
            path = compare_models.path_of(folder, other, batch)
            if THEIRS in self.versions and path.exists() and other != name:
                yield f"{THEIRS} {other}", THEIRS, other, path

    def measure(self, folder: Path, name: str, batch: int, progress: Progressive) -> Json:
        """Return the row of one model and batch."""
        row: Json = {"model": name, "batch": batch, "times_ms": {}, "best_ms": {}, "difference": {}, "failed": {}, "ratios": {}}
        turns: dict[str, list[float]] = {}
        with ExitStack() as stack:
            running: dict[str, Peer] = {}
            expected: list[np.ndarray] | None = None
            for label, kind, model, path in self._lanes(folder, name, batch):
                progress.at(f"{name} b{batch}: {label} prepares")
                try:
                    peer = self._start(kind)
                    stack.callback(peer.close)
                    feeds, grows = (
                        compare_models.inputs_of(path, model, batch),
                        compare_models.MODELS.get(model, compare_models.Model("")).grows,
                    )
                    found = peer.load(path, model, feeds, grows)
                    if label == THEIRS:
                        expected = found["outputs"]
                    elif label == kind and expected is not None:
                        row["difference"][label] = difference(found["outputs"], expected)
                    if self.seconds:
                        peer.turn(WARM_UP, 0)
                    running[label] = peer
                except (Absent, Failure, OSError) as error:
                    row["failed"][label] = str(error)
            for turn in range(self.rounds if self.seconds else 0):
                for label, peer in list(running.items()):
                    progress.at(f"{name} b{batch}: round {turn + 1} of {self.rounds}, {label}")
                    try:
                        turns.setdefault(label, []).extend(peer.turn(UNTIMED, self.seconds))
                    except Failure as error:
                        row["failed"][label] = str(error)
                        del running[label]
        for label, times in turns.items():
            row["times_ms"][label] = round(1e3 * statistics.median(times), 5)
            row["best_ms"][label] = round(1e3 * min(times), 5)
        row["ratios"] = ratios(row["times_ms"])
        if self.prepare:
            row["prepare"] = self._prepare(compare_models.path_of(folder, name, batch), name, batch, progress)
        return row

    def _prepare(self, path: Path, name: str, batch: int, progress: Progressive) -> Json:
        """Return the time to prepare and to answer, the growth of memory over the size of the file, and what is held."""
        feeds = compare_models.inputs_of(path, name, batch)
        found: dict[str, list[Json]] = {}
        for turn in range(self.rounds):
            for kind in (OURS, THEIRS):
                if kind in self.versions:
                    progress.at(f"{name} b{batch}: round {turn + 1} of {self.rounds}, {kind} prepares")
                    try:
                        peer = self._start(kind)
                        try:
                            found.setdefault(kind, []).append(peer.load(path, name, feeds))
                        finally:
                            peer.close()
                    except (Failure, OSError):
                        return {}
        if len(found) < 2:
            return {}
        kinds = ("prepare", "answer", "memory", "held")
        medians = {k: {p: statistics.median(f[k] for f in found[p]) for p in found} for k in kinds}
        return {
            "prepare": medians["prepare"][OURS] / medians["prepare"][THEIRS],
            "answer": medians["answer"][OURS] / medians["answer"][THEIRS],
            "memory": {p: round(medians["memory"][p] / path.stat().st_size, 3) for p in found},
            "held": medians["held"][OURS] / medians["held"][THEIRS],
        }


def ratios(times: Mapping[str, float]) -> dict[str, float]:
    """Return our time over each other's."""
    return {label: round(times[OURS] / t, 4) for label, t in times.items() if label != OURS} if OURS in times else {}


def best(row: Json) -> float | None:
    """Return the ratio to the fastest other runtime on the same file."""
    return max((r for label, r in row["ratios"].items() if " " not in label), default=None)


def mean(values: Iterable[float]) -> float | None:
    """Return the geometric mean, None of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(statistics.fmean(logs)) if logs else None


def group_of(row: Json) -> str:
    """Return the table that shows a row."""
    model = compare_models.MODELS.get(row["model"], compare_models.Model("other"))
    if model.held_out:
        return "Held out"
    if model.family in ("graphs", "package"):
        return "Small operators"
    return "int8 and decoding" if model.family == "int8" or row["model"].startswith("gpt2-") else "Models"


def join(documents: Sequence[Json]) -> Json:
    """Return one document with the medians of the ratios of several."""
    kept: dict[tuple[str, int], list[Json]] = {}
    for document in documents:
        for row in document["rows"]:
            kept.setdefault((row["model"], row["batch"]), []).append(row)
    rows = []
    for found in kept.values():
        row = dict(found[-1], runs=len(found))
        for key, middle in (
            ("ratios", statistics.median),
            ("times_ms", statistics.median),
            ("best_ms", min),
            ("difference", max),
        ):
            labels = dict.fromkeys(label for r in found for label in r[key])
            row[key] = {label: middle([r[key][label] for r in found if label in r[key]]) for label in labels}
        row["failed"] = {label: why for r in found for label, why in r["failed"].items()}
        if all(r.get("prepare") for r in found):
            row["prepare"] = dict(found[-1]["prepare"])
            row["prepare"] |= {k: statistics.median(r["prepare"][k] for r in found) for k in ("prepare", "answer")}
        rows.append(row)
    order = {name: i for i, name in enumerate(compare_models.MODELS)}
    rows.sort(key=lambda r: (order.get(r["model"], len(order)), r["batch"]))
    versions = {k: v for d in documents for k, v in d["versions"].items()}
    absent = {k: v for d in documents for k, v in d["absent"].items() if k not in versions}
    missing = sorted({m for d in documents for m in d["missing"]} - {f"{r['model']}-b{r['batch']}" for r in rows})
    return {**documents[-1], "versions": versions, "absent": absent, "missing": missing, "rows": rows}


# --- the report


def cell(ratio: float | None) -> str:
    if ratio is None:
        return ""
    shown = f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.1g}"
    return f"**{shown}**" if ratio > TIE else shown


def _means(rows: Sequence[Json], title: str) -> str:
    """Return the row of the table of geometric means."""
    shown = [r for r in rows if THEIRS in r["ratios"]]
    against, over_best = [r["ratios"][THEIRS] for r in shown], [b for r in shown if (b := best(r)) is not None]
    middle = mean(against)
    if middle is None:
        return f"| {title} | 0 | | | | |"
    over, ties = sum(r > TIE for r in against), sum(b <= TIE for b in over_best)
    return f"| {title} | {len(shown)} | {middle:.3f} | {over} | {mean(over_best):.3f} | {ties} of {len(over_best)} |"


def page(document: Json) -> str:
    """Return the report in Markdown."""
    rows = document["rows"]
    peers = [p for p in compare_peers.PEERS if p != OURS and any(p in r["ratios"] for r in rows)]
    groups: dict[str, list[Json]] = {}
    for row in rows:
        groups.setdefault(group_of(row), []).append(row)
    runs = sorted({r.get("runs", 1) for r in rows}) or [0]
    measured = "one time" if runs == [1] else f"{' or '.join(map(str, runs))} different times"
    lines = [
        "# Inference against other runtimes", "",
        "Written by `benchmarks/compare.py`; it is not checked for staleness, because times vary.", "",
        f"{document['threads']} threads, {document['machine']}; "
        + ", ".join(f"{k} {v}" for k, v in document["versions"].items()) + ".",
        f"Measured at {measured}. Each figure is our median time over the other's: below 1 we are faster, up to {TIE} is a",
        "tie, larger ones are bold. `best` is the fastest other runtime. `difference` is our largest difference from",
        "onnxruntime, relative to the largest value of the output.", "",
    ]  # fmt: skip
    lines += [f"* absent: {name}: {why}" for name, why in document["absent"].items()]
    if document["missing"]:
        lines += [f"* no file: {', '.join(document['missing'])}"]
    lines += ["", "| geometric means | rows | onnxruntime | above 1.05 | best | at most 1.05 of the best |",
              "|---|---|---|---|---|---|"]  # fmt: skip
    for title, found in groups.items():
        batches = sorted({r["batch"] for r in found})
        lines += [_means([r for r in found if r["batch"] == b], f"{title}, batch {b}") for b in batches]
        lines += [_means(found, title)] if len(batches) > 1 else []
    for title, found in groups.items():
        extra = title == "int8 and decoding"
        columns = [*peers, "best", *(["onnxruntime, float model", "onnxruntime, best int8"] if extra else []), "difference"]
        lines += ["", f"## {title}", "", f"| model | batch | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
        for row in found:
            cells = [cell(row["ratios"].get(p)) for p in peers] + [cell(best(row))]
            if extra:
                cells += _int8(row)
            ours = row["difference"].get(OURS)
            cells.append("" if ours is None else f"{ours:.1e}")
            lines.append(f"| {row['model']} | {row['batch']} | {' | '.join(cells)} |")
    failed = [(r, label, why) for r in rows for label, why in r["failed"].items()]
    if failed:
        lines += ["", "## No result", "", *(f"* {r['model']}, batch {r['batch']}, {label}: {why}" for r, label, why in failed)]
    apart = [(r, label, d) for r in rows for label, d in r["difference"].items() if d > TOLERANCE]
    if apart:
        lines += ["", f"## Outputs that differ from onnxruntime's by more than {TOLERANCE:g}", ""]
        lines += [f"* {r['model']}, batch {r['batch']}, {label}: {d:.1e}" for r, label, d in apart]
    prepared = [r for r in rows if r.get("prepare")]
    if prepared:
        lines += ["", "## Preparing", "",
                  "Our time over onnxruntime's until the model is prepared, and until it has answered once;",
                  "by how much preparing raises the peak of memory, over the size of the file; and the memory that is held",
                  "after the answer, over onnxruntime's.", "",
                  "| model | batch | prepared | answered | memory | onnxruntime | held |", "|---" * 7 + "|"]  # fmt: skip
        for row in prepared:
            p = row["prepare"]
            memory = " | ".join(f"{p['memory'].get(k, 0):.2f}" for k in (OURS, THEIRS))
            held = f"{p['held']:.2f}" if "held" in p else ""
            times = f"{p['prepare']:.2f} | {p['answer']:.2f}"
            lines.append(f"| {row['model']} | {row['batch']} | {times} | {memory} | {held} |")
    return "\n".join([*lines, ""])


def _int8(row: Json) -> list[str]:
    """Return our ratio to onnxruntime's float model, and to its best form of int8."""
    others = compare_models.MODELS.get(row["model"], compare_models.Model("")).others
    if not others:
        return ["", ""]
    own = {row["model"]: THEIRS}
    found = [row["ratios"].get(own.get(o, f"{THEIRS} {o}")) for o in others]
    return [cell(found[0]), cell(max((f for f in [*found[1:], row["ratios"].get(THEIRS)] if f is not None), default=None))]


def plot(document: Json) -> str:
    """Return an SVG: one line for each row, our time over onnxruntime's and over the best peer's on a logarithmic axis."""
    rows = [r for r in document["rows"] if THEIRS in r["ratios"]]
    values = [v for r in rows for v in (r["ratios"][THEIRS], best(r)) if v]
    low, high = min([0.25, *values]), max([2.0, *values])
    left, width, step, top = 170, 560, 16, 40
    height = top + step * len(rows) + 30

    def x(ratio: float) -> float:
        return round(left + width * math.log(ratio / low) / math.log(high / low), 1)

    size = f'width="{left + width + 30}" height="{height}"'
    ours, theirs = left + 230, left + 330
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{left}" y="14">our time over that of</text>',
        f'<circle cx="{ours}" cy="10" r="4" fill="#1f77b4"/><text x="{ours + 10}" y="14">onnxruntime</text>',
        f'<rect x="{theirs - 4}" y="6" width="8" height="8" fill="none" stroke="#d62728"/>',
        f'<text x="{theirs + 10}" y="14">the fastest other runtime</text>',
    ]
    for tick in (0.1, 0.25, 0.5, 0.8, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0):
        if low <= tick <= high:
            colour = "#444" if tick == 1 else "#ccc"
            parts.append(f'<line x1="{x(tick)}" y1="{top - 12}" x2="{x(tick)}" y2="{height - 20}" stroke="{colour}"/>')
            parts.append(f'<text x="{x(tick)}" y="{height - 6}" text-anchor="middle">{tick:g}</text>')
    for i, row in enumerate(rows):
        y = top + step * i
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{row["model"]}, {row["batch"]}</text>')
        other = best(row)
        if other:
            parts.append(f'<rect x="{x(other) - 4}" y="{y - 4}" width="8" height="8" fill="none" stroke="#d62728"/>')
        parts.append(f'<circle cx="{x(row["ratios"][THEIRS])}" cy="{y}" r="4" fill="#1f77b4"/>')
    return "\n".join([*parts, "</svg>", ""])


def save(document: Json, folder: Path) -> None:
    """Write the figures, the table and the plot."""
    write_text(folder / "benchmark-compare.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / "benchmark-compare.md", page(document))
    write_text(folder / "benchmark-compare.svg", plot(document))


# --- the command


def compare(comparison: Comparison, folder: Path, models: Sequence[str], batches: Sequence[int], report: Path | None) -> Json:
    """Measure models; the report is written after every row."""
    comparison.look()
    work = [(m, b) for m in models for b in batches]
    there = [(m, b) for m, b in work if compare_models.path_of(folder, m, b).exists()]
    document: Json = {
        "machine": f"{processor()}, {os.cpu_count()} cores", "threads": comparison.threads, "rounds": comparison.rounds,
        "versions": comparison.versions, "absent": comparison.absent,
        "missing": [f"{m}-b{b}" for m, b in work if (m, b) not in there], "rows": [],
    }  # fmt: skip
    progress = Progressive(len(there))
    try:
        for name, why in comparison.absent.items():
            progress.at(f"absent: {name}: {why}")
        for name, batch in there:
            row = comparison.measure(folder, name, batch, progress)
            document["rows"].append(row)
            shown = [f"{label} {r:.2f}" for label, r in row["ratios"].items()]
            shown += [f"difference {label} {d:.1e}" for label, d in row["difference"].items()]
            shown += [f"{k} {v:.2f}" for k, v in row.get("prepare", {}).items() if k != "memory"]
            shown += [f"NO RESULT {label}: {why}" for label, why in row["failed"].items()]
            progress.line(f"{name:18} batch {batch}  " + ", ".join(shown))
            if report:
                save(document, report)
    finally:
        progress.close()
    return document


def problems(document: Json) -> list[str]:
    """Return what is wrong with our results: none, or outputs that are not onnxruntime's."""
    found = []
    for row in document["rows"]:
        name, apart = f"{row['model']}, batch {row['batch']}", row["difference"].get(OURS, 0.0)
        if OURS in row["failed"]:
            found.append(f"{name}: {row['failed'][OURS]}")
        elif apart > TOLERANCE and group_of(row) != "int8 and decoding":  # one step of int8 is larger
            found.append(f"{name}: differs from onnxruntime by {apart:.1e} of the largest value")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(compare_models.MODELS)
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of the models")
    parser.add_argument("--models", nargs="+", choices=names, metavar="NAME", help="all that are not held out, unless given")
    parser.add_argument("--held-out", action="store_true", help="also the held-out models")
    parser.add_argument("--peers", nargs="+", choices=list(compare_peers.PEERS), default=list(compare_peers.PEERS))
    parser.add_argument("--python", action="append", default=[], metavar="PEER=INTERPRETER", help="where a peer is installed")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare the outputs, and time nothing")
    parser.add_argument("--prepare", action="store_true", help="also time preparing, against onnxruntime")
    parser.add_argument("--join", nargs="+", type=Path, metavar="JSON", help="join these reports; measure nothing")
    parser.add_argument("--report", type=Path, metavar="DIR", help="write benchmark-compare.json, .md and .svg into this folder")
    options = parser.parse_args()
    if options.join:
        document = join([json.loads(p.read_text(encoding="utf-8")) for p in options.join])
        if options.report:
            save(document, options.report)
    else:
        if options.folder is None or not options.folder.is_dir():
            parser.error(f"the folder of the models is {options.folder}; write it by compare_models.py --to FOLDER")
        pythons = dict(p.split("=", 1) for p in options.python if "=" in p)
        if len(pythons) < len(options.python) or not set(pythons) <= set(compare_peers.PEERS):
            parser.error(f"--python takes PEER=INTERPRETER for different peers of {', '.join(compare_peers.PEERS)}")
        rows = compare_models.MODELS
        models = options.models or [n for n in names if not rows[n].busy and (options.held_out or not rows[n].held_out)]
        seconds = 0.0 if options.check else compare_peers.TURN
        comparison = Comparison(options.peers, options.threads, options.rounds, pythons, seconds, options.prepare)
        document = compare(comparison, options.folder, models, options.batch, options.report)
    return told(page(document), problems(document))


if __name__ == "__main__":
    sys.exit(main())
