"""The support report as one self-contained HTML page: a box that answers whether an operator works, figures, and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..inspection.html import fill
from . import lookup
from .markdown import CELLS, GENERATED, VERDICTS, about, dtype_cells, generated_words

TEMPLATE = Path(__file__).with_name("templates") / "support.html"


def page(report: dict[str, Any]) -> str:
    """Render support.json as an HTML page; the same report renders to the same page."""
    return fill(TEMPLATE, compact(report))


def compact(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report as the page embeds it: repeated names as numbers, sets of dtypes as bits of a number.

    A row is {o: operator, v: version, d: domain, x: deprecated, l: latest, y: declared, w: reason, t: dtypes allowed,
    a: attributes, n: cases under test, s: a cell per device, r: old releases, f: dtypes judged with generated models,
    k: the word of lookup.WORKS, g: that of lookup.GRADIENTS}.
    A cell is [cases, passed, official, tested, tested_passed, dtypes, attributes, max_ulp, failed cases].
    """
    domains = list(dict.fromkeys(r["domain"] for r in report["rows"]))
    names = sorted({d for r in report["rows"] for found in r["dtypes_allowed"].values() for d in found}, key=_order)
    bit = {name: 1 << i for i, name in enumerate(names)}
    assert len(names) < 31, "JavaScript's bit operations see 32 bits"

    def bits(cells: dict[str, list[str]]) -> dict[str, int]:
        return {parameter: sum(bit[d] for d in found) for parameter, found in cells.items()}

    rows = []
    for row in report["rows"]:
        cells = row["devices"].values()
        attributes = next(iter(cells))["attributes_declared"]
        rows.append(
            {
                "o": row["operator"],
                "v": row["version"],
                "d": domains.index(row["domain"]),
                "x": int(row["deprecated"]),
                "l": int(row["latest"]),
                "y": int(row["declared"]),
                "w": row["reason"],
                "t": bits(row["dtypes_allowed"]),
                "a": attributes,
                "n": sorted(set().union(*(c["names"] for c in cells))),
                "s": [
                    [
                        c["cases"],
                        c["passed"],
                        c["official"],
                        c["tested"],
                        c["tested_passed"],
                        bits(c["dtypes"]),
                        [attributes.index(a) for a in c["attributes"]],
                        c["max_ulp"],
                        c["failed"],
                    ]
                    for c in cells
                ],
                "r": {k: [o["cases"], o["passed"], bits(o["dtypes"]), o["failed"]] for k, o in row["releases"].items()},
                "f": bits(row["fuzz"]),
                "k": lookup.works(row),
                "g": row["gradient"],
            }
        )
    fuzz = report.get("fuzz")
    keys = ("backend", "onnx", "manifest", "versions", "opsets", "totals", "gaps", "unexpected", "releases")
    shared = {k: report.get(k) for k in keys}
    return {**shared, "fuzz": fuzz and {"count": fuzz.get("count"), "words": generated_words(fuzz)}, "domains": domains,
            "works": lookup.OF_BACKENDS if report.get("backend") else lookup.WORKS, "gradients": lookup.GRADIENTS,
            "means": {"strict": VERDICTS[0], "official": VERDICTS[1], "cells": CELLS, "generated": GENERATED},
            "dtypes": names, "cells": list(dtype_cells(report).items()), "rows": rows, "devices": list(report["totals"]),
            "about": {d: about(d) for d in report["totals"] if about(d)}, "environments": report["environments"]}  # fmt: skip


def _order(name: str) -> tuple[int, int, str]:
    """float64, float32, float16, bfloat16, float8..., then integers, bool, strings, complex."""
    kinds = ("float", "bfloat", "int", "uint", "bool", "complex", "object")
    kind = next(i for i, k in enumerate(kinds) if name.startswith(k))
    digits = "".join(c for c in name.partition("_")[0] if c.isdigit())
    return kind, -int(digits or 0), name
