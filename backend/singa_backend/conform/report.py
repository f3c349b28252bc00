"""The support report: a row for each schema version of each operator, built only from executed cases.

Two runs of one source produce the same report, except for `max_ulp`, which may differ between machines.  Besides the runs
passed to `build`, a report shows the results kept in its folder: runs that not every machine can repeat (old releases of onnx,
GPUs; `runs/*.json` and `releases.json`), the results of generated models (`fuzz.json`), the verdicts on gradients
(`gradients.json`), and without `runs/` the columns of GPUs in the report that is there (`support.json`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from onnx import defs

from ..dtypes import from_type_string
from ..io.documents import read_document
from ..io.files import write_text
from ..ir.declaration import declarations
from ..proto.schemas import DOMAINS, LAX, MICROSOFT, is_custom, newest, schemas
from ..rendering import json_text
from . import gaps, html, lookup, releases
from .cases import ConformanceError, data_file
from .markdown import EMULATED, by_release, markdown
from .results import MARK, WRITER, load, publish, stale_page, well_formed
from .worker import OURS

Row = dict[str, Any]
Cells = dict[str, list[str]]
"""Type parameter -> names of dtypes, both sorted."""

_COUNTS = {"cases": int, "strict": int, "official": int}
_TOTALS = {**_COUNTS, "by_kind": {"*": _COUNTS}}
_PART = {"totals": _TOTALS, "gaps?": {"*": (str, list)}, "unexpected?": [str]}
_CELL = {
    "domain": str, "operator": str, "version": int, "cases": int, "passed": int, "official?": (int, type(None)), "tested?": int,
    "tested_passed?": int, "dtypes?": [[str, str]], "attributes?": [str], "max_ulp?": (int, float, type(None)), "names?": [str],
    "failed?": [str], "unsupported?": int,
}  # fmt: skip
_SUITE = {
    "backend?": str, "environment": {"onnx": str, "device": str, "emulated?": bool}, "manifest": str, "totals": _TOTALS,
    "gaps": {"*": str}, "unexpected?": [str], "executed": [_CELL],
    "reasons?": [{"verdict": str, "reason": str, "cases": [str]}],
}  # fmt: skip
_RELEASE = {"environment": {"device": str, "release": str}, "totals": _TOTALS, "gaps?": {"*": str}, "executed": [_CELL]}
_RELEASES = {"environment": {"device": str, "release": str}, "releases": {"*": _PART}, "executed": [_CELL]}
_GRADIENTS = {"rows?": [{"domain": str, "operator": str, "version": int, "verdict": str}]}
_GENERATED = {"cells?": [[str, str, int, str, str]], "totals?": dict, "count?": int, "seed?": int}


def read_run(path: Path) -> dict[str, Any]:
    """Read the JSON of a run, as `sonnx conform --results` writes it.

    Raises:
        InvalidInput: The file cannot be read, or is not the JSON of a run (SX804).
    """
    document = read_document(path, "SX804", "sonnx conform --results FILE")
    environment = document["environment"]
    old = environment.get("release") is not None
    found = document.matches((_RELEASES if document.get("releases") else _RELEASE) if old else _SUITE)
    return dict(found)


def _known(ours: bool) -> list[tuple[tuple[str, str], Any]]:
    """The operators that a report lists, with their schemas: ONNX's, and of this package those of ai.singa."""
    if ours:
        list(declarations)  # imports all modules, which also declare the schemas of ai.singa
    others = (MICROSOFT, LAX)  # reports/microsoft.md
    return sorted((k, versions) for k, versions in schemas.items() if not is_custom(k[0]) or (ours and k[0] not in others))


def build(runs: Sequence[dict[str, Any]], folder: Path | None = None) -> dict[str, Any]:
    """Return the report as data, from the JSON of runs (see results.to_json) and the results kept in `folder`.

    A run whose environment names a `release` executed the cases of that release of onnx ("all": of those in its `releases`,
    each distinct case once); it has a separate column and is not a device.
    Of a backend other than this package the report has what `runs` executed of ONNX's operators, and nothing else.

    Raises:
        ConformanceError: No run is of the current suite, or the runs are of several backends.
    """
    backend = _backend(runs)
    ours = backend == OURS
    missing = gaps.undeclared(data_file("undeclared.txt"))
    named = {label(run): run for run in runs}
    if ours:
        named |= {name: run for name, run in kept(folder).items() if name not in named}
    devices = {n: r for n, r in named.items() if "release" not in r["environment"]}
    old = {n: r for n, r in sorted(named.items(), key=by_release) if "release" in r["environment"]}
    if not devices:
        raise ConformanceError(
            "a report needs a run of the current suite, got only runs of old releases",
            code="SX809",
            hint="sonnx conform --results cpu.json",
        )
    executed = {n: {(e["domain"], e["operator"], e["version"]): e for e in run["executed"]} for n, run in named.items()}
    reported = _columns(folder, str(next(iter(devices.values()))["manifest"]), devices) if ours else {}
    generated = _generated(folder) if ours else {}
    judged, verdicts = _judged(generated), _verdicts(folder)
    rows, known = list[dict[str, Any]](), _known(ours)
    for (domain, name), versions in known:
        for version, schema in sorted(versions.items()):
            shown = DOMAINS.get(domain, domain)
            key, allowed = (shown, name, version), _allowed(schema)
            entries = [executed[d][key] for d in devices if key in executed[d]]
            reason = _none_passes(entries)
            if ours:
                unknown = missing.get((domain, name, version), "no reason is recorded")
                reason = "" if version in declarations.get((domain, name), {}) else unknown
            rows.append(
                {
                    "domain": shown,
                    "operator": name,
                    "version": version,
                    "deprecated": schema.deprecated,
                    "latest": version == max(versions),
                    "declared": not reason,
                    "reason": reason,
                    "dtypes_allowed": _by_parameter(allowed),
                    "devices": {d: _cell(schema, allowed, executed[d].get(key)) for d in devices}
                    | {d: cells.get(key) or _cell(schema, allowed, None) for d, (_, cells) in reported.items()},
                    "releases": {r: _old(allowed, executed[r][key]) for r in old if key in executed[r]},
                    "fuzz": _by_parameter(judged.get((domain, name, version), set()) & allowed),
                    "gradient": lookup.gradient(domain, name, version, verdicts.get(key)) if ours else "",
                }
            )
    first = next(iter(devices.values()))
    shown_devices = devices | {n: run for n, (run, _) in reported.items()}
    return {
        **({} if ours else {"backend": backend}),
        "onnx": first["environment"]["onnx"],
        "manifest": first["manifest"],
        "environments": {n: run["environment"] for n, run in shown_devices.items()},
        "totals": {n: run["totals"] for n, run in shown_devices.items()},
        "gaps": {n: run["gaps"] if ours else _reasons(run) for n, run in shown_devices.items()},
        "unexpected": {n: run.get("unexpected", []) if ours else [] for n, run in shown_devices.items()},
        "versions": {"known": len(rows), "declared": sum(r["declared"] for r in rows)},
        "opsets": {DOMAINS.get(d, d): newest(d) for d in dict.fromkeys(domain for (domain, _), _ in known)},
        "releases": {n: found for label, run in old.items() for n, found in _releases(label, run)},
        "fuzz": {k: generated[k] for k in ("count", "seed", "totals") if k in generated} or None,
        "rows": rows,
    }


def _backend(runs: Sequence[dict[str, Any]]) -> str:
    """The backend of runs; raises ConformanceError if they are of several."""
    first, *others = sorted({run.get("backend", OURS) for run in runs}) or [OURS]
    if others:
        hint = "write one report for each backend: sonnx report RUNS --to FOLDER"
        names = " and ".join([first, *others])
        raise ConformanceError(f"a report must be of one backend, got runs of {names}", code="SX809", hint=hint)
    return str(first)


def _reasons(run: dict[str, Any]) -> dict[str, str]:
    """The reasons of all cases that do not pass: those of another backend have no list of gaps."""
    told = {
        f"official:{name}" if group["verdict"] == "official" else name: f"{group['verdict']}: {group['reason']}"
        for group in run.get("reasons", ())
        for name in group["cases"]
    }
    return {**run["gaps"], **told}


def _none_passes(entries: Sequence[dict[str, Any]]) -> str:
    """That no case passes, of those that ran; "" if one does, or none ran."""
    if not entries or any(e["passed"] for e in entries):
        return ""
    return "every case is refused" if all(e.get("unsupported") == e["cases"] for e in entries) else "no case passes"


def label(run: dict[str, Any]) -> str:
    """Return a run's name in a report: its device, or the release whose cases it ran ("1.6.0", "1.6.0 on CUDA").

    A device that the processor emulated has another name than the device: "CUDA, emulated".
    """
    device, release = str(run["environment"]["device"]), run["environment"].get("release")
    if run["environment"].get("emulated"):
        device += f", {EMULATED}"
    return device if release is None else str(release) if device == "CPU" else f"{release} on {device}"


def _releases(name: str, run: dict[str, Any]) -> list[tuple[str, Row]]:
    """Return (release, its totals, gaps and unexpected failures) for each release in a run."""
    found = run.get("releases") or {name: run}
    out = []
    for release, part in found.items():
        stated = part.get("gaps") or {}
        listed = {case: why for why, names in stated.items() if isinstance(names, list) for case in names}
        totals = {k: part["totals"][k] for k in ("cases", "strict", "official")}
        out.append((release, {"totals": totals, "gaps": listed or stated, "unexpected": part.get("unexpected") or []}))
    return sorted(out, key=by_release)


def _generated(folder: Path | None) -> dict[str, Any]:
    """Read `fuzz.json` in the report's folder; empty if there is none."""
    return _loaded(folder, "fuzz.json", _GENERATED)


def _loaded(folder: Path | None, name: str, form: Any) -> dict[str, Any]:
    """Read a document in the report's folder; empty if there is none."""
    path = folder / name if folder else None
    return dict(read_document(path, "SX804").matches(form)) if path and os.path.exists(path) else {}


def _judged(generated: dict[str, Any]) -> dict[tuple[str, str, int], set[tuple[str, str]]]:
    """Return the parameters and dtypes of each version that generated models have judged."""
    found: dict[tuple[str, str, int], set[tuple[str, str]]] = {}
    for domain, name, version, parameter, dtype in generated.get("cells", ()):
        found.setdefault((domain, name, version), set()).add((parameter, dtype))
    return found


def _verdicts(folder: Path | None) -> dict[tuple[str, str, int], str]:
    """Read the verdicts of `gradients.json` in the report's folder; empty if there is none."""
    found = _loaded(folder, "gradients.json", _GRADIENTS)
    return {(r["domain"], r["operator"], r["version"]): r["verdict"] for r in found.get("rows", ())}


def kept(folder: Path | None) -> dict[str, dict[str, Any]]:
    """Read the runs kept in the report's folder, by label."""
    files = [*sorted((folder / "runs").glob("*.json")), folder / "releases.json"] if folder else []
    found = [read_run(path) for path in files if os.path.exists(path)]
    return {label(run): run for run in found}


Column = tuple[dict[str, Any], dict[tuple[str, str, int], Row]]
"""A device in a report: its run without the executed cells, and the cell of each row."""


def _columns(folder: Path | None, manifest: str, devices: Collection[str]) -> dict[str, Column]:
    """Read the columns of other GPUs from the report in the folder, if it is of the same suite."""
    path = folder / "support.json" if folder else None
    found = load(path) if path else {}
    if path is None or found.get("manifest") != manifest:
        return {}
    with well_formed(path):
        names = [n for n in found["totals"] if n.startswith("CUDA") and n not in devices]
        runs = {
            n: {"environment": found["environments"][n], **{k: found[k][n] for k in ("totals", "gaps", "unexpected")}}
            for n in names
        }
        return {n: (runs[n], {(r["domain"], r["operator"], r["version"]): r["devices"][n] for r in found["rows"]}) for n in names}


def keep(runs: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Save the runs that not every machine can repeat (old releases, GPUs) for later reports."""
    written = []
    for run in runs:
        if run.get("backend", OURS) != OURS:
            continue
        if label(run) == "all":
            written.append(folder / "releases.json")
            releases.save(run, written[-1], MARK)
        elif "release" in run["environment"] or str(run["environment"]["device"]).startswith("CUDA"):
            path = folder / "runs" / f"{re.sub('[^-.A-Za-z0-9]+', '_', label(run))}.json"
            parts = ("environment", "manifest", "totals", "gaps", "unexpected", "releases", "executed")
            text = json_text(WRITER | {k: run[k] for k in parts if k in run}, sort_keys=True) + "\n"
            write_text(path, text, mark=MARK)
            written.append(path)
    return written


# --- the cells of a row -----------------------------------------------------------------------------------------------


def _cell(schema: defs.OpSchema, allowed: set[tuple[str, str]], entry: dict[str, Any] | None) -> Row:
    """Return what one device ran of one schema version."""
    entry = entry or {}
    ran = {(t, d) for t, d in entry.get("dtypes", ())} & allowed
    return {
        "cases": entry.get("cases", 0),
        "passed": entry.get("passed", 0),
        "official": entry.get("official"),
        "tested": entry.get("tested", 0),
        "tested_passed": entry.get("tested_passed", 0),
        "dtypes": _by_parameter(ran),
        "dtypes_executed": len(ran),
        "dtypes_allowed": len(allowed),
        "attributes": sorted(set(schema.attributes) & set(entry.get("attributes", ()))),
        "attributes_declared": sorted(schema.attributes),
        "max_ulp": entry.get("max_ulp"),
        "names": entry.get("names", []),
        "failed": entry.get("failed", []),
    }


def _old(allowed: set[tuple[str, str]], entry: dict[str, Any]) -> Row:
    """Return what the cases of an old release ran of one schema version."""
    ran = {(t, d) for t, d in entry.get("dtypes", ())} & allowed
    return {"cases": entry["cases"], "passed": entry["passed"], "dtypes": _by_parameter(ran), "failed": entry.get("failed", [])}


def _by_parameter(pairs: set[tuple[str, str]]) -> Cells:
    return {t: sorted(d for u, d in pairs if u == t) for t in sorted({t for t, _ in pairs})}


def _allowed(schema: defs.OpSchema) -> set[tuple[str, str]]:
    """Return (type parameter, dtype) for every tensor type that the schema allows."""
    used = {p.type_str for p in (*schema.inputs, *schema.outputs)}
    out = set()
    for constraint in schema.type_constraints:
        if constraint.type_param_str in used:
            found = (from_type_string(t) for t in constraint.allowed_type_strs)
            out |= {(constraint.type_param_str, d.name) for d in found if d is not None}
    for text in used:
        dtype = from_type_string(text)
        if dtype is not None:
            out.add((text, dtype.name))
    return out


# --- writing, and comparing what was written with a run ---------------------------------------------------------------

PAGES = {"support.md": markdown, "support.html": html.page}
"""The pages rendered from support.json."""

FILES = ("support.json", *PAGES)
"""The files of a folder that `write` writes."""

BUILT = ("support.html",)
"""The pages that may be absent: they are rendered when they are needed, and not committed."""


def write(report: dict[str, Any], folder: Path) -> list[Path]:
    """Write support.json and its pages; returns their paths."""
    return publish(report, folder / "support.json", PAGES)


def stale(report: dict[str, Any], folder: Path) -> str:
    """Return "" if the report in `folder` equals `report`, apart from max_ulp and library versions, otherwise the difference."""
    path = folder / "support.json"
    if not os.path.exists(path):
        return f"{path} does not exist"
    with well_formed(path):
        return _stale(report, load(path), path)


def _stale(report: dict[str, Any], written: dict[str, Any], path: Path) -> str:
    here, there = (_comparable(r, list(report["totals"]), list(report["releases"])) for r in (report, written))
    for key in here:
        if here[key] != there[key]:
            return f"{path}: " + _difference(key, here[key], there[key])
    absent = {name for name in BUILT if not os.path.exists(path.with_name(name))}
    return stale_page(written, path, {name: render for name, render in PAGES.items() if name not in absent})


def _difference(key: str, here: Any, there: Any) -> str:
    if key != "rows":
        return f"{key!r} differs from this run: {json.dumps(here)[:300]}"
    for now, then in zip(here, there, strict=False):
        if now != then:
            parts = {k: now[k] for k in now if now[k] != then.get(k)}
            return f"{now['operator']}-{now['version']} differs from this run: {json.dumps(parts)[:300]}"
    return "the number of rows differs from this run"


def _comparable(report: dict[str, Any], devices: Sequence[str], releases: Sequence[str]) -> dict[str, Any]:
    """Return the report without what may differ between machines, for these devices and releases only."""
    keep = {k: report.get(k) for k in ("backend", "onnx", "manifest", "versions", "opsets", "fuzz")}
    for part in ("totals", "gaps", "unexpected"):
        keep[part] = {d: report.get(part, {}).get(d) for d in devices}
    keep["releases"] = {r: report.get("releases", {}).get(r) for r in releases}
    columns = {r for row in report["rows"] for r in row.get("releases", {})} & {*releases, "all"}
    keep["rows"] = [
        {
            **row,
            "devices": {d: {k: v for k, v in row["devices"].get(d, {}).items() if k != "max_ulp"} for d in devices},
            "releases": {r: row["releases"][r] for r in sorted(columns) if r in row.get("releases", {})},
        }
        for row in report["rows"]
    ]
    return keep
