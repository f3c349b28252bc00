"""The gradient matrix as data and as a Markdown page, and the check that both agree with the current declarations."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...autodiff.support import DIFFERENTIABLE
from ...proto.schemas import DOMAINS
from ..results import environment, load, publish, stale_page, well_formed
from . import ledger
from .row import MatrixRow, listed

VERDICTS = ("checked", "few", "wrong", "died", "timeout", "zero", "integer", "undefined", "random", "constant", "missing")


def to_json(rows: Iterable[MatrixRow], count: int, seed: int, entries: Sequence[ledger.KnownDeviation]) -> dict[str, Any]:
    """Return the matrix as plain data, its rows in order.  unexplained: names of rows with a deviation that has no reason."""
    ordered = sorted(rows, key=lambda r: r.key)
    unexplained = [r.name for r in ordered if not ledger.explain(r, entries)]
    used = {e for e in entries for r in ordered if e.what in ledger.states(r) and e.covers(r, e.what)}
    domains = {"", *(r.domain for r in ordered)}
    return {
        "points": count,
        "seed": seed,
        "environment": environment("CPU", "onnxruntime"),
        "totals": totals(ordered),
        "unexplained": unexplained,
        "unused": [f"{e.what} {e.operator}" for e in entries if e not in used and not e.sometimes and e.domain in domains],
        "rows": [r.to_dict() for r in ordered],
    }


def totals(rows: Sequence[MatrixRow]) -> dict[str, Any]:
    """Count rows by verdict, checked rows by the second witness, and points."""
    count = Counter(r.verdict for r in rows)
    checked = [r for r in rows if r.verdict == "checked"]
    second = Counter(r.second or "not asked" for r in checked)
    return {
        "rows": len(rows),
        "operators": len({(r.domain, r.operator) for r in rows}),
        "verdicts": {v: count[v] for v in VERDICTS if count[v]},
        "operators_missing": sorted({r.operator for r in rows if r.verdict == "missing" and r.latest}),
        "checked_by_witness": dict(sorted(second.items())),
        "checked_without_witness": len(checked) - second["agree"],
        "points_agreed": sum(r.agreed for r in rows),
        "points_at_kinks": sum(r.kinks for r in rows),
        "points_with_witness": sum(r.witness.get("agree", 0) for r in rows),
    }


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """Write gradients.json and gradients.md; returns their paths."""
    return publish(document, folder / "gradients.json", PAGES)


def read(folder: Path) -> dict[str, Any]:
    """Read the matrix in a folder; empty if there is none."""
    return load(folder / "gradients.json")


def stale(folder: Path) -> str:
    """Return "" if the matrix in `folder` has the current declarations and their reasons, otherwise the difference."""
    path = folder / "gradients.json"
    if not os.path.exists(path):
        return f"{path} does not exist"
    with well_formed(path):
        return _stale(read(folder), path)


def _stale(document: dict[str, Any], path: Path) -> str:
    there = {(r["domain"], r["operator"], r["version"]): r for r in document["rows"]}
    here = {(DOMAINS.get(r.domain, r.domain), r.operator, r.version): r for r in listed()}
    if there.keys() != here.keys():
        first = sorted(there.keys() ^ here.keys())[0]
        return f"{path}: {first[1]}-{first[2]} is {'listed, but unknown to onnx' if first in there else 'not listed'}"
    entries = ledger.read()
    for key, now in here.items():
        then = there[key]
        for part in ("kind", "how", "why"):
            if then[part] != getattr(now, part):
                return f"{path}: {now.name}: {part} is {then[part]!r} there and {getattr(now, part)!r} in the declaration"
        row = MatrixRow.from_dict(then)
        ledger.explain(row, entries)
        if row.explained != then["explained"]:
            return f"{path}: {now.name}: gradients.toml now explains it differently"
    return stale_page(document, path, PAGES)


# --- the page ---------------------------------------------------------------------------------------------------------

MEANS = {
    "checked": "differences in float64 agree with the rule, at every point away from kinks",
    "few": "as checked, at fewer points; the reason is given below",
    "wrong": "the rule and the differences contradict each other somewhere",
    "died": "the process died",
    "timeout": "it took too long",
    "zero": "the gradient is zero almost everywhere; differences confirm it",
    "integer": "no output has a float type",
    "undefined": "the gradient is undefined",
    "random": "the outputs are random and do not depend on the inputs",
    "constant": "the outputs do not depend on the values of float inputs; differences confirm it",
    "missing": "no rule and no reason",
}


def markdown(document: dict[str, Any]) -> str:
    """Render gradients.json as a Markdown page."""
    t, rows, made = document["totals"], document["rows"], document["environment"]
    lines = ["# Gradients", "",
             "Generated by `sonnx gradients`; nothing here is written by hand. docs/gradients.md explains the verdicts.", "",
             f"onnx {made['onnx']}, onnxruntime {made['onnxruntime']}, seed {document['seed']}; {document['points']} points per"
             " row, away from kinks.", "",
             "| verdict | operator versions | meaning |", "|---|---:|---|"]  # fmt: skip
    lines += [f"| {v} | {t['verdicts'][v]} | {MEANS[v]} |" for v in VERDICTS if v in t["verdicts"]]
    lines += [f"| all | {t['rows']} | of {t['operators']} operators |", ""]
    lines += [
        f"* Points that agree: **{t['points_agreed']:,}**; skipped at kinks: {t['points_at_kinks']:,}.",
        f"* Confirmed by onnxruntime in float32 too: **{t['checked_by_witness'].get('agree', 0)}** checked versions"
        f" ({t['points_with_witness']:,} points); without this second witness: **{t['checked_without_witness']}** ("
        + (", ".join(f"{n} {w}" for w, n in t["checked_by_witness"].items() if w != "agree") or "none") + ").",
        f"* Missing: **{len(t['operators_missing'])}** operators"
        + (f": {', '.join(t['operators_missing'])}." if t["operators_missing"] else "."),
    ]  # fmt: skip
    if document["unexplained"]:
        lines.append(f"* Without an explanation: {', '.join(document['unexplained'])}.")
    lines += ["", "## Known and explained", ""]
    words: dict[tuple[str, str], list[str]] = {}
    for r in rows:
        for what, why in r["explained"].items():
            words.setdefault((what, why), []).append(_name(r))
    lines += [f"* {what}: {why} ({', '.join(names)})" for (what, why), names in sorted(words.items())] or ["Nothing."]
    lines += ["", "## Why onnxruntime could not run", ""]
    refused: dict[str, list[str]] = {}
    for r in rows:
        if r["kind"] == DIFFERENTIABLE and r["second"] not in ("agree", "differs"):
            for reason in r["refusals"][:1]:
                refused.setdefault(reason, []).append(_name(r))
    lines += [f"* {reason.replace('|', '/')} ({', '.join(names)})" for reason, names in sorted(refused.items())] or [
        "It ran everywhere."
    ]
    for domain in dict.fromkeys(r["domain"] for r in rows):
        lines += ["", f"## {domain}", "",
                  "| operator | version | verdict | by | points | kinks | worst error | as a graph | onnxruntime | remarks |",
                  "|---|---:|---|---|---:|---:|---:|---|---|---|"]  # fmt: skip
        lines += [_line(r) for r in rows if r["domain"] == domain]
    return "\n".join(lines) + "\n"


def _name(row: dict[str, Any]) -> str:
    return f"{row['operator']}-{row['version']}"


def _line(row: dict[str, Any]) -> str:
    flows = row["kind"] == DIFFERENTIABLE
    witness = ", ".join(f"{w} {n}" for w, n in row["witness"].items())
    graph = {True: "agrees", False: "**differs**", None: ""}[row["graph"]] if flows else ""
    worst = f"{row['worst']:.0e}" if row["agreed"] and flows else ""
    remarks = "; ".join([row["why"] if not flows else "", *row["explained"].values(), *row["says"]]).strip("; ")
    strong = f"**{row['verdict']}**" if row["verdict"] in ("wrong", "died", "timeout", "missing") else row["verdict"]
    cells = [row["operator"], row["version"], strong, row["how"], row["agreed"] or "", row["kinks"] or "", worst, graph, witness,
             remarks.replace("|", "/")]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


PAGES = {"gradients.md": markdown}
FILES = ("gradients.json", *PAGES)
