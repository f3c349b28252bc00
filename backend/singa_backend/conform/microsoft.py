"""The report on onnxruntime's own operators: which are defined, and what drawn nodes and differences found.

`sonnx fuzz --select com.microsoft --report FOLDER` writes the drawn nodes, `sonnx gradients com.microsoft --to FOLDER` the
gradients; each keeps the part of the other.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..autodiff.support import gradient_support
from ..ir.declaration import declarations, undeclared
from ..proto.schemas import LAX, MICROSOFT, lax, load_domain, schemas, type_strings
from .fuzz import generate
from .fuzz.run import BAD, JudgedCase
from .fuzz.summary import to_json as fuzz_json
from .gradient_matrix import MatrixRow, ledger
from .results import environment, load, publish, stale_page, well_formed

NAME = "microsoft"


def operators() -> list[dict[str, Any]]:
    """Return a row for each schema of com.microsoft, and for each operator that onnxruntime reads in ONNX's domain.

    A row has what the declarations state: whether the operator is defined, or why it is not; the types of onnxruntime's CPU
    kernel, None if it has none; the dtypes of the schema; whether there is a body; and the kind of gradient.
    """
    load_domain(MICROSOFT)
    from ..operators.microsoft._schemas import cpu_types

    rows = []
    for (domain, name), versions in sorted(schemas.items(), key=lambda item: (item[0][0] == LAX, item[0][1])):
        if domain not in (MICROSOFT, LAX):
            continue
        declaration = declarations.get((domain, name), {}).get(1)
        support = gradient_support(domain, name, 1)
        kernel = cpu_types(domain, name)
        rows.append(
            {
                "domain": generate.shown_domain(domain),
                "operator": name,
                "defined": declaration is not None,
                "why_not": "" if declaration else undeclared.get((domain, name), ""),
                "up_to_opset": lax.get(name) if domain == LAX else None,
                "cpu": None if kernel is None else {t: sorted(map(_plain, types)) for t, types in sorted(kernel.items())},
                "types": {t: sorted(map(_plain, types)) for t, types in sorted(type_strings(versions[1]).items())},
                "body": declaration is not None and declaration.decomposition_rule is not None,
                "gradient": {"kind": support.kind, "by": support.how, "why": support.why} if declaration else None,
            }
        )
    return rows


def _plain(text: str) -> str:
    """The element type of "tensor(float)"; other types as they are."""
    return text[7:-1] if text.startswith("tensor(") else text


def drawn(results: Sequence[JudgedCase], seed: int, select: str) -> dict[str, Any]:
    """Return the part of the drawn nodes: as of `sonnx fuzz`, with a row of counts for each operator."""
    document = fuzz_json(results, seed, select)
    found: dict[tuple[str, str], list[JudgedCase]] = {}
    for r in results:
        if r.name:
            found.setdefault((generate.shown_domain(r.domain), r.name), []).append(r)
    rows = [{"domain": d, "operator": n, **_counts(mine)} for (d, n), mine in sorted(found.items())]
    kept = ("count", "seed", "select", "totals", "ledger", "deaths_of_witnesses", "bad")
    return {k: document[k] for k in kept} | {"operators": rows}


def _counts(results: Sequence[JudgedCase]) -> dict[str, Any]:
    """Count the cases of one operator.  onnxruntime, body: the cases that this witness answered, also with a difference."""
    status = Counter(r.status for r in results)
    answered = [{*r.witnesses, *(d.witness for d in r.differences)} for r in results]
    return {
        "cases": len(results),
        **{s: status[s] for s in ("agree", "explained", "unjudged", *BAD) if status[s]},
        "onnxruntime": sum(any(w.startswith("onnxruntime") for w in names) for names in answered),
        "body": sum("decomposition" in names for names in answered),
        "ledger": sorted({d.entry.why for r in results for d in r.differences if d.entry}),
        "types": sorted({dtype for r in results for _, dtype in r.pairs}),
    }


def differentiated(rows: Iterable[MatrixRow], points: int, seed: int) -> dict[str, Any]:
    """Return the part of the gradients: the rows of `sonnx gradients`, with the ledger's reasons."""
    entries = ledger.read()
    ordered = sorted((r for r in rows if (r.domain, r.operator) in declarations), key=lambda r: r.key)
    unexplained = [r.name for r in ordered if not ledger.explain(r, entries)]
    shown = [r.to_dict() | {"domain": generate.shown_domain(r.domain)} for r in ordered]
    return {"points": points, "seed": seed, "unexplained": unexplained, "rows": shown}


def write(folder: Path, **parts: dict[str, Any]) -> list[Path]:
    """Write microsoft.json and microsoft.md, with the parts "drawn" or "gradients"; a part that is not given is kept.

    Returns:
        The paths of the files.
    """
    load_domain(MICROSOFT)
    from ..operators.microsoft._schemas import DATA

    path = folder / f"{NAME}.json"
    rows = operators()
    kept = {k: v for k, v in load(path).items() if k in ("drawn", "gradients")}
    document = {
        "schemas": DATA["onnxruntime"],
        "environment": environment("CPU", "onnxruntime"),
        "totals": _totals(rows),
        "operators": rows,
        **kept,
        **parts,
    }
    return publish(document, path, PAGES)


def kept_rows(folder: Path) -> list[MatrixRow]:
    """Return the rows of gradients in a folder."""
    rows = load(folder / f"{NAME}.json").get("gradients", {}).get("rows", ())
    back = {generate.shown_domain(LAX): LAX}
    return [MatrixRow.from_dict(r | {"domain": back.get(r["domain"], r["domain"])}) for r in rows]


def _totals(rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    mine = [r for r in rows if r["domain"] == MICROSOFT]
    kernels = [r for r in mine if r["cpu"] is not None]
    return {
        "schemas": len(mine),
        "defined": sum(r["defined"] for r in mine),
        "with_cpu_kernel": len(kernels),
        "defined_with_cpu_kernel": sum(r["defined"] for r in kernels),
        "bodies": sum(r["body"] for r in mine),
        "lax": sum(r["domain"] != MICROSOFT for r in rows),
        "lax_defined": sum(r["defined"] for r in rows if r["domain"] != MICROSOFT),
    }


def stale(folder: Path) -> str:
    """Return "" if the report in a folder is that of the current declarations, with a part for each; otherwise the difference."""
    path = folder / f"{NAME}.json"
    if not os.path.exists(path):
        return f"{path} does not exist"
    with well_formed(path):
        return _stale(load(path), path)


def _stale(document: dict[str, Any], path: Path) -> str:
    there = {(r["domain"], r["operator"]): r for r in document["operators"]}
    here = {(r["domain"], r["operator"]): r for r in operators()}
    for key in sorted({*there, *here}):
        if there.get(key) != here.get(key):
            parts = [p for p in here.get(key, {}) if there.get(key, {}).get(p) != here[key][p]]
            return f"{path}: {key[1]} differs from its declaration in {', '.join(parts) or 'being listed'}"
    declared = {key for key, r in here.items() if r["defined"]}
    for part, rows in (("drawn", "operators"), ("gradients", "rows")):
        found = {(r["domain"], r["operator"]) for r in document.get(part, {}).get(rows, ())}
        if found != declared:
            return f"{path}: the part {part!r} has no row of {sorted(declared ^ found)[0][1]}, or one too many"
    for r in document["gradients"]["rows"]:
        support = here[r["domain"], r["operator"]]["gradient"]
        if (r["kind"], r["how"]) != (support["kind"], support["by"]):
            return f"{path}: the gradient of {r['operator']} is {r['kind']!r} there and {support['kind']!r} in the declaration"
    return stale_page(document, path, PAGES)


# --- the page ---------------------------------------------------------------------------------------------------------


def markdown(document: dict[str, Any]) -> str:
    """Render microsoft.json as a Markdown page."""
    t, made, rows = document["totals"], document["environment"], document["operators"]
    lines = [
        "# Operators of onnxruntime",
        "",
        "Generated by `tox -e microsoft`; nothing here is written by hand. docs/onnxruntime-operators.md has the explanations.",
        "",
        f"* onnxruntime {document['schemas']} has **{t['schemas']} schemas** of com.microsoft: **{t['defined']} are defined**,"
        f" {t['bodies']} of them with a body in ONNX's operators.",
        f"* {t['with_cpu_kernel']} schemas have a CPU kernel in onnxruntime: **{t['defined_with_cpu_kernel']} are defined**.",
        f"* {t['lax']} operators that onnxruntime reads in ONNX's domain: {t['lax_defined']} are defined.",
        f"* Judged by onnxruntime {made['onnxruntime']}, with onnx {made['onnx']} and NumPy {made['numpy']}.",
    ]
    lines += _drawn_lines(document.get("drawn")) + _gradient_lines(document.get("gradients"))
    lines += ["", "## Not defined", "", "An operator without a CPU kernel runs on the devices of onnxruntime only.", "",
              "| operators | CPU kernel | why |", "|---|---|---|"]  # fmt: skip
    reasons: dict[tuple[str, bool], list[str]] = {}
    for r in rows:
        if not r["defined"]:
            reasons.setdefault((r["why_not"], r["cpu"] is not None), []).append(r["operator"])
    lines += [f"| {', '.join(names)} | {'yes' if cpu else ''} | {why} |" for (why, cpu), names in reasons.items()]
    for domain in dict.fromkeys(r["domain"] for r in rows):
        lines += ["", f"## {_HEADINGS.get(domain, domain)}", "", *_HEAD]
        lines += [_line(r, document) for r in rows if r["domain"] == domain and r["defined"]]
    return "\n".join(lines) + "\n"


_HEADINGS = {"com.microsoft.lax": "Read in ONNX's domain"}
_HEAD = [
    "*CPU kernel* has the types of onnxruntime's, *types* those of the schema, all of which are defined.",
    "*Cases* are drawn nodes; *onnxruntime* and *body* count those in which this witness answered, *ledger* those with a known",
    "difference. *Points* are those at which the gradient agrees with differences.",
    "",
    "| operator | CPU kernel | types | body | gradient | points | worst error | cases | onnxruntime | body | ledger |",
    "|---|---|---|---|---|---:|---:|---:|---:|---:|---:|",
]


def _drawn_lines(part: dict[str, Any] | None) -> list[str]:
    if part is None:
        return []
    t = part["totals"]
    asked = sum(r["onnxruntime"] for r in part["operators"])
    lines = [
        f"* **{t['cases']:,} drawn nodes** of seed {part['seed']}: {t['agree']:,} agree with every witness that answered,"
        f" {t['explained']:,} differ as the ledger explains, {t['unjudged']:,} have no witness, {t['undrawn']:,} could not be"
        f" drawn; unexplained **{t['unexplained']}**, deaths **{t['died']}**, hangs **{t['hang']}**, foreign exceptions"
        f" **{t['foreign']}**.",
        f"* onnxruntime answered {asked:,} of them, the bodies {sum(r['body'] for r in part['operators']):,}.",
    ]
    if part["bad"]:
        lines += ["", "## What is wrong", "", *(f"* case {b['index']}, {b['status']}: `{b['case']}`" for b in part["bad"])]
    lines += ["", "## Known differences", "", "| class | operator | witness | times | why |", "|---|---|---|---:|---|"]
    for e in part["ledger"]:
        operator, witness = (e[k].replace("|", "\\|") for k in ("operator", "witness"))
        lines.append(f"| {e['class']} | `{operator}` | `{witness}` | {e['times']} | {e['why']} |")
    if part["deaths_of_witnesses"]:
        lines += ["", "onnxruntime died on:", "", *(f"* `{d}`" for d in part["deaths_of_witnesses"])]
    return lines


def _gradient_lines(part: dict[str, Any] | None) -> list[str]:
    if part is None:
        return []
    rows = part["rows"]
    count = Counter(r["verdict"] for r in rows)
    lines = [
        "",
        "## Gradients",
        "",
        f"Compared with central differences of the definition, at {part['points']} points of seed {part['seed']}, and with"
        " onnxruntime running the gradient's graph. A rule that cannot compute in float64 computes in float32."
        " docs/gradients.md explains the verdicts.",
        "",
        "| verdict | operators |",
        "|---|---:|",
        *(f"| {v} | {n} |" for v, n in sorted(count.items())),
        "",
    ]
    told = [(r["operator"], text) for r in rows for text in (*r["explained"].values(), *(() if r["explained"] else r["says"]))]
    lines += [f"* {name}: {text.replace('|', '/')}" for name, text in told]
    return lines


def _line(row: dict[str, Any], document: dict[str, Any]) -> str:
    def of(part: str, rows: str) -> dict[str, Any]:
        key = (row["domain"], row["operator"])
        found: dict[str, Any] = next((r for r in document.get(part, {}).get(rows, ()) if (r["domain"], r["operator"]) == key), {})
        return found

    drawn, rule, kind = of("drawn", "operators"), of("gradients", "rows"), row["gradient"]
    flows = kind["kind"] == "gradient"
    verdict = rule.get("verdict", "not judged") if flows else kind["why"]
    how = {"composition": "through the body", "rule": "rule"}.get(kind["by"], "")
    gradient = f"{verdict}, {how}" if flows else verdict
    name = row["operator"] + (f" (up to opset {row['up_to_opset']})" if row["up_to_opset"] else "")
    cells = [
        name,
        "" if row["cpu"] is None else _union(row["cpu"]) or "any",
        _union(row["types"]),
        "yes" if row["body"] else "",
        gradient,
        rule.get("agreed") or "",
        f"{rule['worst']:.0e}" if flows and rule.get("agreed") else "",
        drawn.get("cases", 0),
        drawn.get("onnxruntime", 0) or "",
        drawn.get("body", 0) or "",
        drawn.get("explained", "") if drawn else "",
    ]
    return "| " + " | ".join(str(c).replace("|", "/") for c in cells) + " |"


def _union(types: dict[str, list[str]]) -> str:
    return ", ".join(sorted({t for found in types.values() for t in found}))


PAGES = {f"{NAME}.md": markdown}
FILES = (f"{NAME}.json", *PAGES)
