"""Data-parallel training: the bytes of each mode, the time at 1, 2 and 4 ranks here, and a model of 8 to 1,024 workers.

    tox -e benchmark-scaling [-- --report reports]
    tox -e benchmark-scaling -- --nets mlp --rounds 1          # a short look
    tox -e benchmark-scaling -- --again reports/benchmark-scaling.json --report reports    # the model and the pages only

Processes are started by mpiexec and use one thread each.  In every round each number of processes has a turn, one after the
other, so that a change of the machine's speed affects all; the figures are medians over the rounds, with the lowest and the
highest.  The report is written after every round; five rounds take about 20 minutes.  Batches per rank are equal (weak
scaling).  The machine must have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import scaling_model as sm
from compare import told

from singa_backend.doctor import processor
from singa_backend.io.files import write_text

Json = dict[str, Any]
RANK = Path(__file__).with_name("scaling_rank.py")
ONE_THREAD = dict.fromkeys(("SONNX_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
NETS: dict[str, Json] = {
    "resnet18": {"title": "ResNet-18", "size": 112, "batch": 8, "spars": {"sparseThreshold": 0.03}},
    "mlp": {"title": "MLP", "size": 784, "batch": 64, "spars": {"sparseThreshold": 0.01}},
}
TURNS = ((1, False), (1, True), (2, False), (2, True), (4, True))
"""Processes, and whether they exchange gradients; those that do not are the bound that the machine sets."""
GOAL = 1.5
"""Samples per second of two ranks over those of one, on ResNet-18."""
SIZES = (4, 1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24)
FASTER = 100
"""The assumed accelerator computes a step in this fraction of the time of one thread here."""
SHOWN = (8, 32, 128, 512, 1024)
HERE = "two processes of this machine"


class Launcher:
    """Runs jobs of scaling_rank.py under mpiexec."""

    def __init__(self) -> None:
        found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
        if found is None:
            sys.exit("scaling.py needs mpiexec: pip install 'sonnx[mpi]'")
        self.mpiexec = found

    def run(self, ranks: int, job: str, timeout: float = 540.0, **settings: Any) -> Json:
        """Run a job in some processes; return its result."""
        command = [self.mpiexec, "-n", str(ranks), sys.executable, str(RANK), json.dumps({"job": job, **settings})]
        done = subprocess.run(command, env=os.environ | ONE_THREAD, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            sys.exit(f"{' '.join(command)} returned {done.returncode}:\n{done.stderr[-2000:]}")
        result: Json = json.loads(done.stdout.strip().splitlines()[-1])
        return result


# --- measuring


def measure(jobs: dict[str, Json], rounds: int, steps: int, finished: Callable[[Json], None]) -> Json:
    """Return the measured part of the document; `finished` is called with it after every round."""
    launcher = Launcher()
    document: Json = {
        "machine": f"{processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        + ", ".join(f"{p} {version(p)}" for p in ("numpy", "mpi4py")),
        "load": round(os.getloadavg()[0], 2), "steps": steps, "nets": {},
    }  # fmt: skip
    document["link"] = launcher.run(2, "link", sizes=SIZES, repeats=15)
    for name, job in jobs.items():
        made = document["nets"][name] = {**job, "times": []}
        settings = {"steps": 6, "modes": sm.MODES, "spars": NETS[name]["spars"]}
        made["bytes"] = launcher.run(2, "bytes", net=name, batch=2, size=32, **settings)
        made["phases"] = launcher.run(1, "phases", net=name, **job, steps=steps, warm=2)
        print(f"{name}: bytes and phases", flush=True)
    for i in range(rounds):
        for name, job in jobs.items():
            document["nets"][name]["times"] += _turns(launcher, name, job, i, steps)
        document["rounds"] = i + 1
        document["load_after"] = round(os.getloadavg()[0], 2)
        finished(document)
    return document


def _turns(launcher: Launcher, name: str, job: Json, number: int, steps: int) -> list[Json]:
    """One round of a net: a turn of each kind; all modes on the tape at one and two ranks, the plain one elsewhere."""
    rows = []
    for graph in (False, True):
        for ranks, exchange in TURNS:
            modes = sm.MODES if exchange and ranks <= 2 and not graph else ("plain",)
            settings = {"graph": graph, "exchange": exchange, "modes": modes, "steps": steps, "warm": 3 if graph else 2}
            found = launcher.run(ranks, "time", net=name, **job, **settings)
            kind = {"round": number, "graph": graph, "ranks": ranks, "exchange": exchange}
            rows += [{**kind, "mode": mode, **row} for mode, row in found.items()]
            shown = ", ".join(f"{mode} {row['step']:.3f} s" for mode, row in found.items())
            how = f"{'graph' if graph else 'tape'}, {ranks} processes{'' if exchange else ' without exchange'}"
            print(f"{name}: round {number}, {how}: {shown}", flush=True)
    return rows


# --- figures


def formula(found: Json) -> list[Json]:
    """Return for each mode the bytes of each step that were sent, those of the formula, and the buckets."""
    rows = []
    for mode, seen in found["modes"].items():
        full = sm.groups(mode, found["sizes"])
        steps = range(1, len(seen["sent"]))  # the ranks compare their parameters in the first
        expected = [sm.bytes_of(mode, full, i, seen["spars"], seen["chosen"][i]) for i in steps]
        rows.append({"mode": mode, "sent": seen["sent"][1:], "formula": expected, "buckets": len(full)})
    return rows


def share_of(found: Json, mode: str) -> float:
    """Return the share of values that a sparse mode sent, after the first step."""
    seen = found["modes"][mode]
    if mode != "sparseThreshold":
        return float(seen["spars"])
    return max(1e-9, statistics.fmean(seen["chosen"][1:]) / sum(found["sizes"]))


def chosen(times: Sequence[Json], ranks: int, exchange: bool, graph: bool, mode: str = "plain") -> list[Json]:
    """Return the turns of one kind, by round."""
    wanted = {"ranks": ranks, "exchange": exchange, "graph": graph, "mode": mode}
    return [t for t in times if all(t[k] == v for k, v in wanted.items())]


def faster(
    made: Json, ranks: int, exchange: bool, graph: bool, mode: str = "plain", base: tuple[int, bool] = (1, True)
) -> list[float]:
    """Return by round the samples per second of a kind of turn over those of `base` in the plain mode."""
    ours, theirs = chosen(made["times"], ranks, exchange, graph, mode), chosen(made["times"], *base, graph)
    return [ranks * b["step"] / (base[0] * a["step"]) for a, b in zip(ours, theirs, strict=True)]


def bound(made: Json, ranks: int, exchange: bool, graph: bool) -> float:
    """Return the speed that the CPU times alone would allow: it has no waiting, and depends little on other programs."""
    cpus = [statistics.median(t["cpu"] for t in chosen(made["times"], *kind, graph)) for kind in ((1, True), (ranks, exchange))]
    return float(ranks * cpus[0] / cpus[1])


def networks(document: Json) -> list[sm.Network]:
    """Return the assumed networks, and that between two processes here as measured."""
    seconds = {int(k): v for k, v in document["link"]["seconds"].items()}
    largest = max(seconds)
    return [*sm.NETWORKS, sm.Network(HERE, *sm.fitted(seconds[min(seconds)], seconds[largest], largest))]


def modelled(document: Json) -> list[Json]:
    """Return the rows of the model: for each net, worker, network and mode the efficiency by algorithm and overlap."""
    rows = []
    for name, made in document["nets"].items():
        phases = made["phases"]
        whole = phases["forward"] + phases["backward"] + phases["update"]
        plain = _middle(chosen(made["times"], 1, False, False), "cpu")
        for worker, divisor in (("thread", 1), ("accelerator", FASTER)):
            for net in networks(document):
                for mode in sm.MODES:
                    full = sm.groups(mode, made["bytes"]["sizes"])
                    step = _middle(chosen(made["times"], 1, True, False, mode), "cpu")
                    work = sm.Work(
                        plain / divisor,
                        step / divisor,
                        phases["forward"] / whole,
                        phases["backward"] / whole,
                        phases["value"] / divisor,
                    )
                    share = share_of(made["bytes"], mode) if mode.startswith("sparse") else 1.0
                    curves = {
                        f"{algorithm}{', overlap' if overlap else ''}": [
                            round(sm.efficiency(mode, full, w, net, algorithm, work, overlap, share), 4) for w in sm.WORKERS
                        ]
                        for algorithm in sm.ALGORITHMS
                        for overlap in (False, True)
                    }
                    rows.append({"net": name, "worker": worker, "network": net.name, "mode": mode, "efficiency": curves})
    return rows


def best(row: Json, overlap: bool = False) -> list[float]:
    """Return the efficiency by workers with the faster algorithm for each number."""
    names = [f"{a}{', overlap' if overlap else ''}" for a in sm.ALGORITHMS]
    return [max(values) for values in zip(*(row["efficiency"][n] for n in names), strict=True)]


# --- the report


def _spread(values: Sequence[float], digits: int = 3) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _middle(turns: Sequence[Json], key: str) -> float:
    return float(statistics.median(t[key] for t in turns))


def _stop(curve: Sequence[float]) -> str:
    found = sm.stops(curve)
    if found is None:
        return f"> {sm.WORKERS[-1]:,}"
    return f"<= {found}" if found == sm.WORKERS[0] else f"{found:,}"


def title(name: str) -> str:
    return str(NETS[name]["title"])


def page(document: Json) -> str:
    """Return the report in Markdown."""
    lines = [
        "# Data-parallel training", "",
        "Written by `tox -e benchmark-scaling -- --report reports`; it is not checked for staleness, because times vary.", "",
        f"{document['machine']}; one thread for each process. Load of the machine before and after: "
        f"{document['load']:.2f}, {document['load_after']:.2f}.", "",
    ]  # fmt: skip
    for name, made in document["nets"].items():
        pixels = f"{made['size']} x {made['size']} pixels, " if name == "resnet18" else ""
        lines.append(f"* {title(name)}: {sum(made['bytes']['sizes']):,} parameters, {pixels}batch {made['batch']} on each rank.")
    lines += [*_bytes(document), *_times(document), *_modes(document), *_link(document), *_model(document)]
    return "\n".join([*lines, ""])


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    heading, *body = (f"| {' | '.join(cells)} |" for cells in (columns, *rows))
    return [heading, "|---" * len(columns) + "|", *body]


def _shares(turns: Sequence[Json]) -> list[str]:
    """The shares of a step in which exchanges are started, and in which they are waited for."""
    return [f"{statistics.median(t[key] / t['step'] for t in turns):.1%}" for key in ("started", "waited")]


def _bytes(document: Json) -> list[str]:
    rows = []
    for name, made in document["nets"].items():
        found = formula(made["bytes"])
        plain = statistics.fmean(found[0]["formula"])
        for r in found:
            sent, want = statistics.fmean(r["sent"]), statistics.fmean(r["formula"])
            exact = sum(a == b for a, b in zip(r["sent"], r["formula"], strict=True))
            mode = r["mode"]
            label = f"{mode}, {share_of(made['bytes'], mode):.1%} of the values" if mode.startswith("sparse") else mode
            numbers = [str(r["buckets"]), f"{sent:,.0f}", f"{want:,.0f}", f"{sent / plain:.3f}"]
            rows.append([title(name), label, *numbers, f"{exact} of {len(r['sent'])}"])
    return [
        "", "## Bytes for each step and rank", "",
        "What one rank passes to the collectives (`communicator.sent`), without the first step, which compares the parameters",
        "of the ranks: means over the steps. `exact`: steps in which the bytes are those of the formula.", "",
        *_table(["net", "mode", "buckets", "measured", "formula", "of plain", "exact"], rows), "",
        "Formulas, for n elements in a bucket: plain 4 n, half 2 n, partialUpdate 4 n of one bucket in each step, sparseTopK",
        "8 ceil(0.05 n), sparseThreshold 4, and 8 for each value of at least the bound.",
    ]  # fmt: skip


def _times(document: Json) -> list[str]:
    rows = []
    for name, made in document["nets"].items():
        for graph in (False, True):
            for ranks, exchange in TURNS:
                turns = chosen(made["times"], ranks, exchange, graph)
                kind = [title(name), "graph" if graph else "tape", str(ranks), "yes" if exchange else "no"]
                rate = f"{ranks * made['batch'] / _middle(turns, 'step'):.2f}"
                times = [_spread([t["step"] for t in turns]), f"{_middle(turns, 'cpu'):.3f}", rate]
                speeds = [_spread(faster(made, ranks, exchange, graph), 2), f"{bound(made, ranks, exchange, graph):.2f}"]
                rows.append([*kind, *times, *speeds, *(_shares(turns) if exchange else ["", ""])])
    columns = ["net", "step", "processes", "exchange", "s per step", "CPU", "samples per s", "speed"]
    columns += ["by CPU", "sending", "waiting"]
    return [
        "", "## Time at 1, 2 and 4 ranks", "",
        f"Medians over {document['rounds']} rounds of {document['steps']} steps (lowest-highest). `speed` is the samples per",
        "second over those of one rank with DistOpt in the same round. `CPU` is the CPU time of a process for each step: where",
        "it is far below the wall time without waiting, the process did not have a core for itself. `by CPU` is the speed that",
        "the CPU times alone would allow, which depends less on other programs. `sending` is the time in which exchanges are",
        "started and proceed, `waiting` the time of waiting for their end, as shares of the step. Processes that do not exchange",
        "gradients show what the machine allows. 4 ranks share the cores of a machine with fewer.", "",
        *_table(columns, rows), "", *goal(document),
    ]  # fmt: skip


def goal(document: Json) -> list[str]:
    """Return a line for each form of the step: whether two ranks reach GOAL on ResNet-18."""
    made = document["nets"].get("resnet18")
    lines = []
    for graph in (False, True) if made else ():
        speed, limit = (statistics.median(faster(made, 2, exchange, graph)) for exchange in (True, False))
        reached = "reached" if speed >= GOAL else "NOT reached"
        lines.append(
            f"* ResNet-18, {'graph' if graph else 'tape'}: 2 ranks do {speed:.2f} times the samples per second of one "
            f"(goal {GOAL}: {reached}); 2 processes that do not exchange do {limit:.2f} times."
        )
    return lines


def _modes(document: Json) -> list[str]:
    rows = []
    for name, made in document["nets"].items():
        for mode in sm.MODES:
            one, two = (chosen(made["times"], n, True, False, mode) for n in (1, 2))
            times = [_spread([t["step"] for t in turns]) for turns in (one, two)]
            rows.append([title(name), mode, *times, _spread(faster(made, 2, True, False, mode), 2), *_shares(two)])
    return [
        "", "## Modes", "",
        "As above, on the tape. `one rank` is the step of one rank, which sends nothing: it contains what the mode computes.",
        "`speed` is against one rank in the plain mode.", "",
        *_table(["net", "mode", "one rank, s", "two ranks, s", "speed", "sending", "waiting"], rows),
    ]  # fmt: skip


def _link(document: Json) -> list[str]:
    here = networks(document)[-1]
    rows = [[f"{int(size):,}", f"{1000 * seconds:.3f}"] for size, seconds in document["link"]["seconds"].items()]
    return [
        "", "## Between two processes of this machine", "",
        "An all-reduce of float32 without computation, the lowest of several times; the processes share the memory.", "",
        *_table(["bytes", "ms"], rows), "",
        f"As a ring of two: latency {1e6 * here.latency:.0f} us, bandwidth {here.bandwidth / 1e9:.2f} GB/s (with the additions).",
    ]  # fmt: skip


def _model(document: Json) -> list[str]:
    lines = [
        "", f"## A model of {sm.WORKERS[0]} to {sm.WORKERS[-1]:,} workers", "",
        "Not measured: computed from the figures above by `benchmarks/scaling_model.py`. Efficiency is the samples per second of",
        "a worker over those of one that trains alone with the plain optimizer. Assumptions:", "",
        "* A message of n bytes takes latency + n / bandwidth. Links are full duplex and not shared; workers are equally fast.",
        "  Networks with a rate in their name have that nominal rate and latency, which are assumed, not measured.",
        "* All-reduce: a ring takes 2 (W - 1) (latency + n / (W bandwidth)), a tree 2 log2 W (latency + n / bandwidth).",
        "* All-gather, of the sparse modes: (W - 1) (latency + n / bandwidth), as a tree log2 W latency + (W - 1) n / bandwidth.",
        "  Each worker then adds the values of the others one by one, at the measured time for each.",
        "* Computation: the measured CPU time of a step of one rank in the mode, on the tape. Every worker has the batch of the",
        "  measurement, and sends the bytes of the table above. `thread` is one thread of this machine; `accelerator` is assumed "
        f"to be {FASTER} times as fast.",
        "* With overlap, the buckets are complete at equal intervals of the backward pass, and are sent one after the other",
        "  while it runs, without slowing it; forward and backward pass have their measured shares of the step. The last bucket",
        "  never overlaps, and partialUpdate does not.",
        "* It is time only: the modes do not learn equally much from a step, and partialUpdate averages a parameter once in as",
        "  many steps as there are buckets.", "",
        "Efficiency without overlap, with the faster of ring and tree; then the number of workers, of those in the model, from",
        f"which it is below {LIMIT_TEXT}: there the mode stops scaling.",
    ]  # fmt: skip
    curves = [f"{a}{overlap}" for overlap in ("", ", overlap") for a in sm.ALGORITHMS]
    for name in document["nets"]:
        for worker in ("thread", "accelerator"):
            rows = []
            for row in document["model"]:
                if (row["net"], row["worker"]) == (name, worker):
                    curve = best(row)
                    shown = [f"{curve[sm.WORKERS.index(w)]:.2f}" for w in SHOWN]
                    rows.append([row["network"], row["mode"], *shown, *(_stop(row["efficiency"][c]) for c in curves)])
            columns = ["network", "mode", *(f"{w:,}" for w in SHOWN), *curves]
            lines += ["", f"### {title(name)}, {worker}", "", *_table(columns, rows)]
    return [*lines, "", "![Efficiency by the number of workers](benchmark-scaling.svg)"]


LIMIT_TEXT = f"{sm.LIMIT:.0%}".replace("%", " %")
COLOURS = dict(zip(sm.MODES, ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"), strict=True))
PANEL, GAP, LEFT, TOP = (200, 120), (34, 46), 50, 70


def plot(document: Json) -> str:
    """Return an SVG: a panel for each worker and network, the efficiency by the number of workers for each mode."""
    rows: dict[tuple[str, str], dict[str, list[Json]]] = {}
    for row in document["model"]:
        rows.setdefault((row["net"], row["worker"]), {}).setdefault(row["network"], []).append(row)
    width, height = PANEL
    count = max((len(r) for r in rows.values()), default=0)
    size = f'width="{LEFT + count * (width + GAP[0])}" height="{TOP + len(rows) * (height + GAP[1])}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="10">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{LEFT}" y="14">efficiency by the number of workers (model); '
        "the faster of ring and tree; dashed: the exchange overlaps with the backward pass</text>",
    ]
    for i, (mode, colour) in enumerate(COLOURS.items()):
        x = LEFT + 130 * i
        parts.append(f'<line x1="{x}" y1="30" x2="{x + 24}" y2="30" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="34">{mode}</text>')
    for i, ((name, worker), panels) in enumerate(rows.items()):
        for j, (network, found) in enumerate(panels.items()):
            left, top = LEFT + j * (width + GAP[0]), TOP + i * (height + GAP[1])
            parts += _panel(left, top, f"{title(name)}, {worker}", network, found)
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: int, top: int, heading: str, network: str, rows: Sequence[Json]) -> list[str]:
    width, height = PANEL
    span = math.log2(sm.WORKERS[-1] / sm.WORKERS[0])

    def at(workers: int, value: float) -> str:
        return f"{left + width * math.log2(workers / sm.WORKERS[0]) / span:.1f},{top + height * (1 - min(value, 1.05)):.1f}"

    parts = [
        f'<text x="{left}" y="{top - 18}" font-weight="bold">{heading}</text>',
        f'<text x="{left}" y="{top - 7}">{network}</text>',
    ]
    for value in (0, 0.5, 1):
        a, b = at(sm.WORKERS[0], value), at(sm.WORKERS[-1], value)
        parts.append(f'<polyline points="{a} {b}" stroke="{"#444" if value == sm.LIMIT else "#ccc"}" fill="none"/>')
        parts.append(f'<text x="{left - 4}" y="{top + height * (1 - value) + 3:.0f}" text-anchor="end">{value:g}</text>')
    for workers in sm.WORKERS[::2]:
        x = at(workers, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{top + height + 12}" text-anchor="middle">{workers}</text>')
    for row in rows:
        for overlap in (False, True):
            points = " ".join(at(w, e) for w, e in zip(sm.WORKERS, best(row, overlap), strict=True))
            dash = ' stroke-dasharray="4 3"' if overlap else ""
            parts.append(f'<polyline points="{points}" stroke="{COLOURS[row["mode"]]}" fill="none" stroke-width="1.5"{dash}/>')
    return parts


def save(document: Json, folder: Path) -> None:
    """Write the figures, the tables and the plot."""
    write_text(folder / "benchmark-scaling.json", json.dumps(document, indent=1) + "\n")
    write_text(folder / "benchmark-scaling.md", page(document))
    write_text(folder / "benchmark-scaling.svg", plot(document))


# --- the command


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a turn")
    parser.add_argument(
        "--size", type=int, default=NETS["resnet18"]["size"], help="height and width of the pictures of ResNet-18"
    )
    parser.add_argument("--batch", type=int, default=NETS["resnet18"]["batch"], help="samples of a step and rank of ResNet-18")
    parser.add_argument(
        "--again", type=Path, metavar="JSON", help="measure nothing: compute the model from the figures of this report"
    )
    parser.add_argument("--report", type=Path, metavar="DIR", help="write benchmark-scaling.json, .md and .svg into this folder")
    options = parser.parse_args()
    if options.size < 32 or min(options.batch, options.rounds, options.steps) < 1:
        parser.error("--size must be at least 32; --batch, --rounds and --steps must be at least 1")

    def finished(document: Json) -> None:
        document["model"] = modelled(document)
        if options.report:
            save(document, options.report)

    if options.again:
        document = json.loads(options.again.read_text(encoding="utf-8"))
        finished(document)
    else:
        jobs = {n: {"size": NETS[n]["size"], "batch": NETS[n]["batch"]} for n in options.nets}
        if "resnet18" in jobs:
            jobs["resnet18"] = {"size": options.size, "batch": options.batch}
        document = measure(jobs, options.rounds, options.steps, finished)
    wrong = [f"{n}, {r['mode']}: {r['sent']} bytes sent, the formula has {r['formula']}"
             for n, m in document["nets"].items() for r in formula(m["bytes"]) if r["sent"] != r["formula"]]  # fmt: skip
    return told(page(document), wrong)


if __name__ == "__main__":
    sys.exit(main())
