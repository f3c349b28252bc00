"""The matrix as data and as a Markdown page, and whether both still say what the declarations say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...operator import DOMAINS
from ...standing import FLOWS
from ..results import environment, save
from . import ledger
from .row import Row, listed

VERDICTS = ("checked", "few", "wrong", "died", "timeout", "zero", "integer", "undefined", "random", "constant", "missing")


def to_json(rows: Iterable[Row], count: int, seed: int, entries: Sequence[ledger.Entry]) -> dict[str, Any]:
    """The matrix as plain data, its rows in order.  unexplained: names of rows of which something is wrong without a reason."""
    ordered = sorted(rows, key=lambda r: r.key)
    unexplained = [r.name for r in ordered if not ledger.explain(r, entries)]
    used = {e for e in entries for r in ordered if e.what in ledger.states(r) and e.covers(r, e.what)}
    return {
        "points": count,
        "seed": seed,
        "environment": environment("CPU", "onnxruntime"),
        "totals": totals(ordered),
        "unexplained": unexplained,
        "unused": [f"{e.what} {e.operator}" for e in entries if e not in used and not e.sometimes],
        "rows": [r.to_dict() for r in ordered],
    }


def totals(rows: Sequence[Row]) -> dict[str, Any]:
    """Counts: of rows by verdict, of checked rows by the second witness, of points."""
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
    paths = [folder / "gradients.json", folder / "gradients.md"]
    folder.mkdir(parents=True, exist_ok=True)
    save(document, paths[0])
    paths[1].write_text(markdown(json.loads(paths[0].read_text())), encoding="utf-8")
    return paths


def read(folder: Path) -> dict[str, Any]:
    """The matrix that a folder holds; empty where there is none."""
    path = folder / "gradients.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def stale(folder: Path) -> str:
    """ "" when the matrix in `folder` lists what is declared today, under the reasons declared today; else the difference."""
    path = folder / "gradients.json"
    if not path.exists():
        return f"{path} does not exist"
    document = read(folder)
    there = {(r["domain"], r["operator"], r["version"]): r for r in document["rows"]}
    here = {(DOMAINS.get(r.domain, r.domain), r.operator, r.version): r for r in listed()}
    if there.keys() != here.keys():
        first = sorted(there.keys() ^ here.keys())[0]
        return f"{path}: {first[1]}-{first[2]} is listed {'but unknown to onnx' if first in there else 'nowhere'}"
    entries = ledger.read()
    for key, now in here.items():
        then = there[key]
        for part in ("kind", "how", "why"):
            if then[part] != getattr(now, part):
                return f"{path}: {now.name}: {part} was {then[part]!r} and is {getattr(now, part)!r} by its declaration"
        row = Row.from_dict(then)
        ledger.explain(row, entries)
        if row.explained != then["explained"]:
            return f"{path}: {now.name}: gradients.toml explains it otherwise now"
    page = folder / "gradients.md"
    if not page.exists() or page.read_text(encoding="utf-8") != markdown(document):
        return f"{page} is not what gradients.json renders to"
    return ""


# --- the page ---------------------------------------------------------------------------------------------------------

MEANS = {
    "checked": "differences in float64 agree with the rule, at every point away from kinks",
    "few": "as checked, at fewer points; the reason stands below",
    "wrong": "the rule and the differences contradict each other somewhere",
    "died": "the process died",
    "timeout": "it took too long",
    "zero": "the gradient is zero almost everywhere; differences confirm it",
    "integer": "no output is of floats",
    "undefined": "there is no gradient",
    "random": "the outputs are drawn at random, whatever the inputs",
    "constant": "the outputs do not depend on the values of float inputs; differences confirm it",
    "missing": "no rule, and no reason why",
}


def markdown(document: dict[str, Any]) -> str:
    """The page that gradients.json renders to."""
    t, rows, made = document["totals"], document["rows"], document["environment"]
    lines = ["# Gradients", "",
             "Generated by `sonnx gradients`; nothing here is written by hand. What the verdicts mean: docs/gradients.md.", "",
             f"onnx {made['onnx']}, onnxruntime {made['onnxruntime']}, seed {document['seed']}, {document['points']} points a row"
             " away from kinks.", "",
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
    lines += ["", "## Why onnxruntime could not be asked", ""]
    refused: dict[str, list[str]] = {}
    for r in rows:
        if r["kind"] == FLOWS and r["second"] not in ("agree", "differs"):
            for reason in r["refusals"][:1]:
                refused.setdefault(reason, []).append(_name(r))
    lines += [f"* {reason.replace('|', '/')} ({', '.join(names)})" for reason, names in sorted(refused.items())] or ["It could."]
    for domain in dict.fromkeys(r["domain"] for r in rows):
        lines += ["", f"## {domain}", "",
                  "| operator | version | verdict | by | points | kinks | worst error | as a graph | onnxruntime | remarks |",
                  "|---|---:|---|---|---:|---:|---:|---|---|---|"]  # fmt: skip
        lines += [_line(r) for r in rows if r["domain"] == domain]
    return "\n".join(lines) + "\n"


def _name(row: dict[str, Any]) -> str:
    return f"{row['operator']}-{row['version']}"


def _line(row: dict[str, Any]) -> str:
    flows = row["kind"] == FLOWS
    witness = ", ".join(f"{w} {n}" for w, n in row["witness"].items())
    graph = {True: "agrees", False: "**differs**", None: ""}[row["graph"]] if flows else ""
    worst = f"{row['worst']:.0e}" if row["agreed"] and flows else ""
    remarks = "; ".join([row["why"] if not flows else "", *row["explained"].values(), *row["says"]]).strip("; ")
    strong = f"**{row['verdict']}**" if row["verdict"] in ("wrong", "died", "timeout", "missing") else row["verdict"]
    cells = [row["operator"], row["version"], strong, row["how"], row["agreed"] or "", row["kinks"] or "", worst, graph, witness,
             remarks.replace("|", "/")]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"
