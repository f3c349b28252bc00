"""The report of the sweep: its JSON, and the page that is rendered from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from singa_backend.io.files import write_text
from singa_backend.kernels.onednn import trust
from singa_backend.rendering import json_text, markdown

NAME = "onednn-sweep"

ABOUT = """# Implementations of oneDNN

Written by `tox -e onednn-sweep -- --report reports`; the figures are those of the processor and the levels that it names. Every
implementation that oneDNN offers for a drawn primitive, and that `kernels/onednn/trust.py` does not refuse, runs {turns} times on
buffers of exact size between pages without access: {flush} times so that each buffer ends or begins at such a page, otherwise at
another alignment, with canaries. Before a run the scratchpad, the destination and the gaps hold NaN, 1e30, random bytes or 0.
Each run must return equal bits, which are those of NumPy in float64 or near to them, keep its inputs, and write nothing else. It
uses 1, 2 or 4 threads. Plans of whole models run on memory of exact size too, with garbage in all places before each run.
"""


def document(about: Mapping[str, Any], levels: Mapping[str, Any], plans: Mapping[str, Any]) -> dict[str, Any]:
    """The report as plain data.

    Args:
        about: "processor", "onednn", "seed", "turns" and "flush", the runs of an implementation, and "absent" levels.
        levels: for each level its counts.
        plans: the counts of whole plans, by level.
    """
    reported = [
        {"implementation": r.implementation, "kind": r.kind, "reason": r.reason, "source": r.source}
        for r in trust.ROWS
        if not r.source.startswith(trust.SEEN)
    ]
    return {**about, "levels": dict(levels), "plans": dict(plans), "reported": reported}


def page(doc: Mapping[str, Any]) -> str:
    """The page of a report."""
    lines = [ABOUT.format(turns=doc["turns"], flush=doc["flush"])]
    lines += [f"{doc['processor']}, oneDNN {doc['onednn']}, seed {doc['seed']}.", ""]
    titles = ("level", "cases", "implementations", "runs", "at a page", "models by plans", "runs of plans", "faults")
    rows = []
    for level, found in doc["levels"].items():
        models = doc["plans"][level]
        flush, faults = found["runs"] * doc["flush"] // doc["turns"], len(found["faults"]) + len(models["faults"])
        counts = (found["cases"], len(found["implementations"]), found["runs"], flush, models["models"], models["runs"], faults)
        rows.append((level, *counts))
    lines += _table(titles, rows)
    if doc["absent"]:
        lines += [f"This processor does not have the levels {', '.join(doc['absent'])}: their code was not run here.", ""]
    for level, found in doc["levels"].items():
        lines += [f"## {level}", ""]
        lines += _table(
            ("kind", "implementation", "cases", "runs"),
            [(*r["name"].split(" ", 1), r["cases"], r["runs"]) for r in found["implementations"]],
        )
        lines += [f"### Refused at {level}", ""]
        lines += _table(
            ("kind", "implementation", "reason", "cases"),
            [(*r["name"].split(" ", 1), r["reason"], r["cases"]) for r in found["refused"]],
        )
        lines += [
            f"### Plans at {level}",
            "",
            "The implementations that the plans of the models have chosen, and in how many models.",
            "",
        ]
        lines += _table(("step", "models"), doc["plans"][level]["kernels"])
    if doc["reported"]:
        lines += [
            "## Refused, not run",
            "",
            "Faults that oneDNN's issues and corrections report, and that this processor cannot show.",
            "",
        ]
        names = ("implementation", "kind", "reason", "source")
        lines += _table(names, [[r[n] for n in names] for r in doc["reported"]])
    return "\n".join(lines).rstrip() + "\n"


def _table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    made = ["| " + " | ".join(titles) + " |", "|" + "|".join("---" for _ in titles) + "|"]
    return [
        *made,
        *("| " + " | ".join(f"{c:,}" if isinstance(c, int) else markdown(c, 400) for c in row) + " |" for row in rows),
        "",
    ]


def write(doc: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the JSON and the page; return their files."""
    files = [folder / f"{NAME}.json", folder / f"{NAME}.md"]
    write_text(files[0], json_text(doc))
    write_text(files[1], page(doc))
    return files
