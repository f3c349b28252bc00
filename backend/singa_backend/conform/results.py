"""Results as data: the JSON of a run, the pages rendered from it, and JUnit XML for continuous integration."""

from __future__ import annotations

import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from ..devices.device import device_count
from ..errors import first_line
from ..io.archives import typed
from ..io.documents import read_document
from ..io.files import write_text
from ..io.junit import JUnitCase, write_suite
from ..io.places import check_folder_of
from ..proto.schemas import DOMAINS
from ..rendering import json_text
from .gaps import Judgement
from .lookup import named
from .worker import OURS, Cell, Result


def environment(device: str, *witnesses: str, ours: bool = True) -> dict[str, str | bool]:
    """Return the versions of what ran and of the witness packages; on a GPU also those of CUDA, and the device.

    Args:
        device: The device.
        witnesses: Names of packages.
        ours: Whether it is a device of this package; otherwise nothing is known of it but its name.
    """
    device = device.upper() if ours else device  # as `resolve` reads it; the report compares these names
    out: dict[str, str | bool] = {
        "onnx": onnx.__version__,
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": device,
        **{name: _version(name) for name in witnesses},
    }
    if ours and device.startswith("CUDA"):
        import cupy

        out["cupy"] = cupy.__version__
        out["gpu"] = _gpu(device)
        if emulated(device):
            out["emulated"] = True
        out["cuda_driver"] = str(cupy.cuda.runtime.driverGetVersion())
        out["cuda_runtime"] = str(cupy.cuda.runtime.runtimeGetVersion())
    return out


def emulated(device: str) -> bool:
    """Whether a device is a CUDA device that the processor emulates (see tests/fakecuda): its name starts with "emulated"."""
    return device.upper().startswith("CUDA") and bool(device_count("CUDA")) and _gpu(device).startswith("emulated")


def _gpu(device: str) -> str:
    """Return the name of a CUDA device."""
    import cupy

    return str(cupy.cuda.runtime.getDeviceProperties(int(device.partition(":")[2] or 0))["name"].decode())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def to_json(results: Sequence[Result], judgement: Judgement, backend: str, device: str, manifest: str) -> dict[str, Any]:
    """Return a run as plain data: its environment, totals, cases, and what was executed per schema version."""
    return {
        "backend": backend,
        "environment": environment(device, ours=backend == OURS),
        "manifest": manifest,
        "totals": totals(results),
        "gaps": judgement.explained,
        "unexpected": [r.name for r in judgement.unexpected],
        "closed_gaps": judgement.closed,
        "reasons": [{"verdict": v, "reason": why, "cases": names} for v, why, names in by_reason(judgement.unexpected)],
        "cases": [
            {"name": r.name, "kind": r.kind, "strict": r.strict, "official": r.official, "reason": r.reason,
             "official_reason": r.official_reason, "max_ulp": r.ulps, "seconds": round(r.seconds, 4)}
            for r in results
        ],
        "executed": _executed(results),
    }  # fmt: skip


def totals(results: Sequence[Result]) -> dict[str, Any]:
    """Count by both verdicts, in total and by kind."""
    kinds = {}
    for kind in dict.fromkeys(r.kind for r in results):
        mine = [r for r in results if r.kind == kind]
        kinds[kind] = {"cases": len(mine), "strict": _passed(mine, "strict"), "official": _passed(mine, "official")}
    return {
        "cases": len(results),
        "strict": _passed(results, "strict"),
        "official": _passed(results, "official"),
        "by_verdict": dict(sorted(Counter(r.strict for r in results).items())),
        "by_kind": kinds,
    }


def _passed(results: Sequence[Result], verdict: str) -> int:
    return sum(getattr(r, verdict) == "passed" for r in results)


_VERDICTS = ("died", "timeout", "error", "failed", "unsupported", "official")
"""The verdicts of cases that do not pass, the worst first; "official" if only ONNX's own comparison fails."""

_VARIES = re.compile(r"\[[^\]]*\]|'[^']*'|\"[^\"]*\"|[-+]?\d[\w.+-]*")
"""What differs between two reasons of one kind: indices, quoted names and numbers."""


def by_reason(failures: Sequence[Result]) -> list[tuple[str, str, list[str]]]:
    """Group cases that do not pass: (verdict, first line of the first case's reason, names), the largest group first."""
    groups: dict[tuple[int, str], list[tuple[str, str]]] = {}
    for r in failures:
        verdict, reason = (r.strict, r.reason) if r.strict != "passed" else ("official", r.official_reason)
        line = first_line(reason)
        groups.setdefault(
            (_VERDICTS.index(verdict), _VARIES.sub("_", re.sub(rf"\b{re.escape(r.name)}\b", "_", line))), []
        ).append((line, r.name))
    ordered = sorted(groups.items(), key=lambda g: (g[0][0], -len(g[1])))
    return [(_VERDICTS[rank], found[0][0], [name for _, name in found]) for (rank, _), found in ordered]


def _executed(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return one entry per schema version that ran, with its cases, dtypes and attributes."""
    cells: dict[Cell, list[Result]] = {}
    for r in results:
        for cell in r.executed:
            cells.setdefault(cell, []).append(r)
    out = []
    for (domain, name, version), mine in sorted(cells.items()):
        cell = (domain, name, version)
        tested = [r for r in mine if r.under_test == cell]
        good = [r.executed[cell] for r in mine if r.strict == "passed"]
        out.append(
            {
                "domain": DOMAINS.get(domain, domain),
                "operator": name,
                "version": version,
                "cases": len(mine),
                "passed": _passed(mine, "strict"),
                "official": _passed(mine, "official"),
                "tested": len(tested),
                "tested_passed": _passed(tested, "strict"),
                "unsupported": sum(r.strict == "unsupported" for r in mine),
                "dtypes": sorted(map(list, set().union(*(pairs for pairs, _ in good)))),
                "attributes": sorted(set().union(*(given for _, given in good))),
                "max_ulp": max((r.ulps for r in tested if r.ulps is not None), default=None),
                "names": sorted(r.name for r in tested),
                "failed": sorted(r.name for r in mine if r.strict != "passed"),
            }
        )
    return out


def failing_operators(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the operator versions of a run of which a case does not pass, those with the most such cases first.

    Args:
        document: The JSON of the run.

    Returns:
        For each: `operator` ("Softmax-13", "ai.onnx.ml:Scaler-1"), `cases`, `passed` and `unsupported`.
    """
    rows = [e for e in document["executed"] if e["passed"] < e["cases"]]
    rows.sort(key=lambda e: (e["passed"] - e["cases"], e["domain"], e["operator"], e["version"]))
    return [{"operator": named(e), **{k: e[k] for k in ("cases", "passed", "unsupported")}} for e in rows]


def write_junit(results: Sequence[Result], judgement: Judgement, path: Path) -> None:
    """Write JUnit XML: an explained gap is a skip with its reason, an unexpected failure or a closed gap is a failure."""
    unexpected = {r.name for r in judgement.unexpected}
    closed = {name.removeprefix("official:") for name in judgement.closed}
    found = []
    for r in results:
        case = JUnitCase(f"onnx.{r.kind}", r.name, seconds=r.seconds)
        reason = judgement.explained.get(r.name) or judgement.explained.get(f"official:{r.name}")
        if r.name in unexpected:
            case = replace(case, failure=_message(r), text=r.reason or r.official_reason)
        elif r.name in closed:
            case = replace(case, failure="this case passes now: delete its line from gaps.txt")
        elif reason:
            case = replace(case, skipped=reason)
        found.append(case)
    write_suite(path, "onnx-conformance", found)


def _message(r: Result) -> str:
    """Return what a list of failures shows of a case."""
    return f"{r.strict}: {first_line(r.reason)}" if r.strict != "passed" else f"official: {first_line(r.official_reason)}"


MARK = b"Generated by"
"""What each document and page has at its beginning: other files of these names are not replaced."""

WRITER = {"_": "Generated by sonnx"}
"""The first entry of a document with the mark."""


def save(document: dict[str, Any], path: Path, mark: bytes | None = None) -> None:
    """Write JSON, readable and stable: sorted keys, one trailing newline.

    Args:
        document: the document.
        path: the file.
        mark: MARK if the user has only chosen the folder.
    """
    head = WRITER if mark else {}
    write_text(path, json_text(head | document, indent=1, sort_keys=True) + "\n", mark=mark)


Pages = Mapping[str, Callable[[dict[str, Any]], str]]
"""The pages of a document: the names of files in its folder, and the functions that render their text."""


def load(path: Path) -> dict[str, Any]:
    """Read the document in a file; empty if there is none.  Raises InvalidInput (SX804) if it is not a JSON object."""
    if not os.path.exists(path):
        return {}
    return {k: v for k, v in read_document(path, "SX804").mapping().items() if k not in WRITER}


def well_formed(path: Path) -> AbstractContextManager[None]:
    """A context in which a document that lacks something becomes InvalidInput (SX804)."""
    return typed(f"{path} is not a document of this command", "SX804")


def publish(document: dict[str, Any], path: Path, pages: Pages) -> list[Path]:
    """Write a document and its pages; returns their paths.  Raises InvalidInput (SX351) for other files of these names."""
    check_folder_of(path.parent, [path.name, *pages], MARK)
    save(document, path, MARK)
    written = load(path)  # keys in the file's order, as a later rendering reads them
    for name, render in pages.items():
        write_text(path.with_name(name), render(written), mark=MARK)
    return [path, *map(path.with_name, pages)]


def stale_page(document: dict[str, Any], path: Path, pages: Pages) -> str:
    """Return "" if each page equals the rendered document, otherwise a message about the first that does not."""
    for name, render in pages.items():
        page = path.with_name(name)
        text = render(document).encode()
        if not os.path.isfile(page) or page.stat().st_size != len(text) or page.read_bytes() != text:
            return f"{page} differs from the page rendered from {path.name}"
    return ""
