"""`sonnx conform --release`: the cases of older onnx releases, read from their wheels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from singa_backend.conform import cases, releases, results, worker

from . import _common
from ._common import echo, err
from ._progress import progress
from ._tables import NUMBER, WHOLE, Columns
from ._verdicts import show_failures

_RELEASES = Columns({"onnx": WHOLE, "cases": NUMBER, "strict": NUMBER, "official": NUMBER, "known gaps": NUMBER})


@dataclass
class Request:
    """The options of the command line."""

    kinds: Sequence[str]
    select: str
    backend: str
    device: str
    processes: int | None
    timeout: float
    quiet: bool

    @property
    def whole(self) -> bool:
        return not (self.select or self.kinds)

    def note(self, text: str) -> None:
        """Print a remark on standard error."""
        if not self.quiet:
            err.print(text, style="dim", highlight=False)


def renew(names: Sequence[str], cache: Path | None) -> Path:
    """Write the manifest entries of these releases again; the others stay unchanged."""
    return releases.renew({r: releases.fetch(r, cache, lambda text: err.print(text, style="dim")) for r in names})


def run(names: Sequence[str], cache: Path | None, request: Request) -> tuple[dict[str, releases.Run], releases.Seen]:
    """Run each release; returns the runs, and the results of all distinct cases."""
    runs: dict[str, releases.Run] = {}
    seen: releases.Seen = {}
    for release in names:
        wheel = releases.fetch(release, cache, request.note)
        chosen = releases.load(wheel, request.kinds or cases.KINDS, request.select)
        if request.whole and not releases.check(release, wheel, chosen):
            request.note(f"onnx {release} is not in the manifest: its cases run, but missing cases are not detected")
        fresh = len({c.content for c in chosen} - seen.keys())
        with progress(fresh, f"onnx {release}", unit="cases", quiet=request.quiet) as step:
            found = _run(chosen, seen, request, lambda result: step())
        runs[release] = releases.judged(chosen, found, releases.known_gaps(release) if _ours(request) else {})
    return runs, seen


def _run(
    chosen: list[releases.StoredCase], seen: releases.Seen, request: Request, note: Callable[[Any], None]
) -> list[worker.Result]:
    return releases.run(
        chosen,
        seen,
        backend=request.backend,
        device=request.device,
        processes=request.processes,
        timeout=request.timeout,
        progress=note,
    )


def _ours(request: Request) -> bool:
    return request.backend == worker.OURS


def document(runs: dict[str, releases.Run], seen: releases.Seen, request: Request) -> dict[str, Any]:
    """Return the summary of several releases, each gap with the later release that corrected the case."""
    newest = cases.load(("node", "simple"), releases.explained(runs)) if any(r.judged.explained for r in runs.values()) else []
    now = worker.run(newest, request.backend, request.device, request.processes, request.timeout) if newest else []
    return releases.summary(runs, releases.corrected(runs, newest, now), seen, request.backend, request.device)


def one(release: str, run: releases.Run, request: Request) -> dict[str, Any]:
    """Return one release's run, as `sonnx conform --results` writes it, with `environment.release`."""
    digest = releases.manifest().get(release, {}).get("cases", "")[:16] if request.whole else ""
    made = results.to_json(run.results, run.judged, request.backend, request.device, digest)
    made["environment"]["release"] = release
    return made


def show(runs: dict[str, releases.Run], seen: releases.Seen) -> None:
    """Print a row per release, then all failures that no gap explains."""
    table = _RELEASES.table("Cases of older releases")
    for release, run in runs.items():
        t = results.totals(run.results)
        table.add(release, *(t[k] for k in ("cases", "strict", "official")), len(run.judged.explained))
    _common.show(table)
    echo(f"{len(seen)} distinct cases ran; conformance/releases/gaps.txt has the reasons of the known gaps")
    for release, run in runs.items():
        show_failures(run.judged, release)
