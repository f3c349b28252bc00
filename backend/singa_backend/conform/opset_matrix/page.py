"""The opset matrix as data and as a Markdown page, and the check that both agree with what the writer can do."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...comparison.tolerances import NARROW, OPSETS, OPSETS_WITNESS, OTHERS
from ...opsets.writer import LEAST
from ...proto.schemas import DOMAINS, newest
from ..results import environment, load, publish, stale_page, well_formed
from .judge import BIG, FEW, JudgedProblem
from .problems import Operator, listed, shown
from .supported import how

_REASONS = 4
"""The number of reasons shown per operator."""


def to_json(found: Iterable[JudgedProblem], operators: Iterable[Operator]) -> dict[str, Any]:
    """Return the matrix of these operators as plain data, one row each."""
    judged = sorted(found, key=lambda j: (j.name, j.kind))
    rows = [row(operator, [j for j in judged if operator in j.operators]) for operator in operators]
    outcomes = [o for j in judged for o in j.outcomes.values()]
    return {
        "environment": environment("CPU", "onnxruntime"),
        "opsets": [LEAST, newest("")],
        "totals": {
            "operators": len(rows),
            "models": dict(sorted(Counter(j.kind for j in judged if not j.skipped).items())),
            "written": sum(o.status != "refused" for o in outcomes),
            "outcomes": {s: sum(o.status == s for o in outcomes) for s in ("equal", "refused", "wrong")},
            "witness": dict(sorted(Counter(o.witness.partition(":")[0] for o in outcomes if o.witness).items())),
            "none": [shown((d, n)) for d, n in operators if not any((d, n) in j.operators and j.outcomes for j in judged)],
        },
        "skipped": {f"{j.name}, {j.kind}": j.skipped for j in judged if j.skipped},
        "wrong": {
            f"{j.name}, {j.kind}, opset {o}": outcome.says
            for j in judged for o, outcome in j.outcomes.items() if outcome.status == "wrong"
        },
        "differs": differs(judged),
        "rows": rows,
    }  # fmt: skip


def differs(judged: Iterable[JudgedProblem]) -> dict[str, str]:
    """Return where onnxruntime agrees on the model at its own opset but not on what was written, by model and opsets."""
    found: dict[str, str] = {}
    for j in judged:
        opsets = [o for o, out in j.outcomes.items() if out.witness.startswith("differs")]
        if opsets:
            found[f"{j.name}, {j.kind}, opset {', '.join(map(str, opsets))}"] = j.outcomes[opsets[0]].witness.partition(": ")[2]
    return found


def row(operator: Operator, judged: list[JudgedProblem]) -> dict[str, Any]:
    """Return the row of an operator.

    how: by opset, as `supported_ops` returns it.  cells: by opset, [equal, refused, wrong, confirmed by onnxruntime].
    leasts: how many models have which minimum opset ("none" if no opset can).  reasons: why calls are refused.
    """
    cells: dict[int, list[int]] = {o: [0, 0, 0, 0] for o in range(LEAST, newest("") + 1)}
    leasts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for j in judged:
        refused = None
        for opset, outcome in j.outcomes.items():
            mine = [r for r in outcome.refusals if concerns(r.operator, operator, j)]
            if outcome.status == "refused" and not mine:
                continue  # another operator of this model is refused
            cells[opset][("equal", "refused", "wrong").index(outcome.status)] += 1
            cells[opset][3] += outcome.witness == "agree"
            if mine and refused is None:
                refused = mine[0]
                reasons[re.sub(r"\bopset \d+ has\b", "the opset has", mine[0].why)] += 1
        if j.outcomes:
            done = [o for o, outcome in j.outcomes.items() if outcome.status == "equal"]
            if done or refused:
                leasts[str(min(done)) if done else "none"] += 1
    return {
        "domain": DOMAINS.get(operator[0], operator[0]), "operator": operator[1],
        "how": {str(o): how(operator, o) for o in cells},
        "models": sum(bool(j.outcomes) for j in judged),
        "cells": {str(o): cell for o, cell in cells.items()},
        "leasts": {str(o): n for o in (*cells, "none") if (n := leasts[str(o)])},
        "reasons": [why for why, _ in sorted(reasons.items(), key=lambda item: (-item[1], item[0]))[:_REASONS]],
    }  # fmt: skip


def concerns(named: str, operator: Operator, judged: JudgedProblem) -> bool:
    """Whether a refusal that names an operator concerns this one: by its own name, or by a part of its decomposition."""
    return named == operator[1] or named not in {name for _, name in judged.operators}


def contradictions(document: dict[str, Any]) -> list[str]:
    """Return where the models contradict `supported_ops`: written although unsupported, or composed and never written.

    A model is not written at every opset, only where something changes: what could be written at an older opset counts.
    """
    found = []
    for r in document["rows"]:
        least = min((int(o) for o, cell in r["cells"].items() if cell[0]), default=newest("") + 1)
        for opset, (equal, refused, _, _) in r["cells"].items():
            if equal and not r["how"][opset]:
                found.append(f"{r['operator']} at opset {opset}: written, but supported_ops reports it as not writable")
            if refused and int(opset) < least and r["how"][opset] == "composed":
                found.append(f"{r['operator']} at opset {opset}: supported_ops reports it as composed, but no model was written")
    return found


def read(folder: Path) -> dict[str, Any]:
    """Read the matrix in a folder; empty if there is none."""
    return load(folder / "opsets.json")


def write(document: dict[str, Any], folder: Path) -> list[Path]:
    """Write opsets.json and opsets.md; returns their paths."""
    return publish(document, folder / "opsets.json", PAGES)


def stale(folder: Path) -> str:
    """Return how the matrix in `folder` differs from the present operators, opsets and `supported_ops`; "" if it does not."""
    path = folder / "opsets.json"
    if not os.path.exists(path):
        return f"{path} does not exist"
    with well_formed(path):
        return _stale(read(folder), path)


def _stale(document: dict[str, Any], path: Path) -> str:
    if document["opsets"] != [LEAST, newest("")]:
        return f"{path} covers the opsets {document['opsets']}; there are {[LEAST, newest('')]}"
    there = {(r["domain"], r["operator"]): r for r in document["rows"]}
    here = {(DOMAINS.get(d, d), n): (d, n) for d, n in listed()}
    if there.keys() != here.keys():
        first = sorted(there.keys() ^ here.keys())[0]
        return f"{path}: {first[1]} is {'listed, but unknown to onnx' if first in there else 'not listed'}"
    for key, operator in here.items():
        for opset, then in there[key]["how"].items():
            now = how(operator, int(opset))
            if now != then:
                return f"{path}: {key[1]} at opset {opset} is {then or 'not written'!r} there and {now or 'not written'!r} now"
    return stale_page(document, path, PAGES)


# --- the page ---------------------------------------------------------------------------------------------------------


def markdown(document: dict[str, Any]) -> str:
    """Render opsets.json as a Markdown page."""
    t, made, (least, top) = document["totals"], document["environment"], document["opsets"]
    count, differing = t["outcomes"], t["witness"].get("differs", 0)
    within = ", ".join(f"{d} within {OPSETS.bounds[d].rtol:g}" for d in OPSETS.bounds if d not in (NARROW, OTHERS))
    witness = {d: f"{OPSETS_WITNESS.bounds[d].rtol:.0e}".replace("e-0", "e-") for d in ("float32", "float16")}
    lines = [
        "# Opsets", "",
        "Generated by `sonnx opsets`; nothing here is written by hand.", "",
        f"onnx {made['onnx']}, onnxruntime {made['onnxruntime']}; opsets {least} to {top}.", "",
        f"Each of {sum(t['models'].values()):,} models was written at these opsets: **{count['equal']:,}** results are equal,"
        f" **{count['refused']:,}** are refused by name and minimum opset, **{count['wrong']:,}** are wrong.",
        "",
        "| models | |", "|---|---:|",
        *(f"| {kind} | {n:,} |" for kind, n in t["models"].items()),
        f"| not judged: the model does not pass at its own opset | {len(document['skipped'])} |", "",
        f"* Confirmed by onnxruntime: **{t['witness'].get('agree', 0):,}** of the written models; different in {differing}.",
        f"* Operators without a model: {', '.join(t['none']) or 'none'}.", "",
        "## How it is judged", "",
        "* A *case* is one of ONNX's own with its inputs and expected outputs. *with constants*: its small inputs after the first"
        " are initializers. *drawn*: a generated model of one node of a schema version, compared with the run of the model that"
        " it was written from.",
        "* *Equal*: onnx's full check passes, the names of inputs and outputs are kept, and the outputs agree. The outputs of a"
        f" case agree within its tolerance, and exactly if they are not floats; those of a drawn model agree {within} of the"
        " largest value, all others exactly. For random operators only element types and shapes are compared.",
        "* *Refused*: the error names the operator and the minimum opset, which is the first at which the model is written. This"
        " is checked for the error at the lowest opset that refuses. Newer opsets removed a few element types.",
        f"* onnxruntime is used if it agrees on the model at its own opset; outputs are compared within {witness['float32']},"
        f" half floats within {witness['float16']}.",
        "* A model is run once for all opsets at which it has the same bytes and its nodes have the same schema versions. Models"
        f" of more than {BIG} nodes (expanded function bodies) are written at {', '.join(map(str, FEW))} and the newest.",
        "",
    ]  # fmt: skip
    for title, part in (("Wrong", "wrong"), ("onnxruntime differs", "differs"), ("Not judged", "skipped")):
        lines += [f"## {title}", "", *(f"* {name}: {_plain(why)}" for name, why in document[part].items())]
        lines += ["Nothing.", ""] if not document[part] else [""]
    opsets = [str(o) for o in range(least, top + 1)]
    for domain in dict.fromkeys(r["domain"] for r in document["rows"]):
        lines += [f"## {domain}", "",
                  "By opset: models written and equal; `5/8` if 3 of 8 are refused, `·` if no model was written at it.",
                  "*native from*: the opset has the operator; *composed from*: other operators can express it.", "",
                  f"| operator | native from | composed from | {' | '.join(opsets)} |",
                  "|---|---:|---:|" + "---:|" * len(opsets)]  # fmt: skip
        lines += [_line(r, opsets) for r in document["rows"] if r["domain"] == domain] + [""]
    lines += ["## Why models are refused", "", "*minimum*: how many models have which minimum opset.", "",
              "| operator | minimum | reasons |", "|---|---|---|"]  # fmt: skip
    for r in document["rows"]:
        if r["reasons"]:
            counts = ", ".join(f"{least} ({n})" for least, n in r["leasts"].items())
            lines.append(f"| {r['operator']} | {counts} | {_plain('; '.join(r['reasons']))} |")
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any], opsets: list[str]) -> str:
    first = {h: next((o for o in opsets if row["how"][o] == h), "–") for h in ("native", "composed")}
    cells = [_cell(row["cells"][o]) for o in opsets]
    return "| " + " | ".join([row["operator"], first["native"], first["composed"], *cells]) + " |"


def _cell(cell: list[int]) -> str:
    equal, refused, wrong, _ = cell
    if not equal + refused + wrong:
        return "·"
    text = f"{equal}/{equal + refused + wrong}" if refused + wrong else str(equal)
    return f"**{text}, {wrong} wrong**" if wrong else text


def _plain(text: str) -> str:
    return " ".join(text.split()).replace("|", "/")


PAGES = {"opsets.md": markdown}
FILES = ("opsets.json", *PAGES)
