"""`sonnx conform --release`: the cases of older onnx releases, out of their wheels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from singa_backend.conform import cases, releases, results, worker

from ._common import echo, err, out, progress


@dataclass
class Ask:
    """What the command line asked for."""

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
        """A remark for people, on standard error."""
        if not self.quiet:
            err.print(text, style="dim", highlight=False)


def renew(names: Sequence[str], cache: Path | None) -> Path:
    """Write the manifest of these releases anew, the others left as they are."""
    return releases.renew({r: releases.fetch(r, cache, lambda text: err.print(text, style="dim")) for r in names})


def run(names: Sequence[str], cache: Path | None, ask: Ask) -> tuple[dict[str, releases.Run], releases.Seen]:
    """Each release's run, and the results of all distinct cases."""
    runs: dict[str, releases.Run] = {}
    seen: releases.Seen = {}
    for release in names:
        wheel = releases.fetch(release, cache, ask.note)
        chosen = releases.load(wheel, ask.kinds or cases.KINDS, ask.select)
        if ask.whole and not releases.check(release, wheel, chosen):
            ask.note(f"onnx {release} is not in the manifest: its cases run, and a missing one would not be noticed")
        fresh = len({c.content for c in chosen} - seen.keys())
        with progress(fresh, f"onnx {release}", quiet=ask.quiet) as step:
            found = _run(chosen, seen, ask, lambda result: step())
        runs[release] = releases.judged(chosen, found, releases.known_gaps(release) if _ours(ask) else {})
    return runs, seen


def _run(chosen: list[releases.StoredCase], seen: releases.Seen, ask: Ask, note: Callable[[Any], None]) -> list[worker.Result]:
    return releases.run(
        chosen, seen, backend=ask.backend, device=ask.device, processes=ask.processes, timeout=ask.timeout, progress=note
    )


def _ours(ask: Ask) -> bool:
    return ask.backend == "singa_backend:SingaBackend"


def document(runs: dict[str, releases.Run], seen: releases.Seen, ask: Ask) -> dict[str, Any]:
    """The summary of several releases, each gap with the later release that took the case back."""
    newest = cases.load(("node", "simple"), releases.explained(runs)) if any(r.judged.explained for r in runs.values()) else []
    now = worker.run(newest, ask.backend, ask.device, ask.processes, ask.timeout) if newest else []
    return releases.summary(runs, releases.corrected(runs, newest, now), seen, ask.backend, ask.device)


def one(release: str, run: releases.Run, ask: Ask) -> dict[str, Any]:
    """One release's run, as `sonnx conform --results` writes it, with `environment.release`."""
    digest = releases.manifest().get(release, {}).get("cases", "")[:16] if ask.whole else ""
    made = results.to_json(run.results, run.judged, ask.backend, ask.device, digest)
    made["environment"]["release"] = release
    return made


def show(runs: dict[str, releases.Run], seen: releases.Seen) -> None:
    """A row per release, then everything that no gap explains."""
    table = Table("onnx", "cases", "strict", "official", "known gaps", title="Cases of older releases")
    for release, run in runs.items():
        t = results.totals(run.results)
        table.add_row(release, *(str(t[k]) for k in ("cases", "strict", "official")), str(len(run.judged.explained)))
    out.print(table)
    echo(f"{len(seen)} distinct cases ran; the known gaps stand with their reasons in conformance/releases/gaps.txt")
    for release, run in runs.items():
        for r in run.judged.unexpected[:20]:
            echo(f"{r.strict} {release} {r.name}\n    {(r.reason or r.official_reason)[:400]}")
        for name in run.judged.closed:
            echo(f"closed gap {release} {name}: it passes now; delete it from gaps.txt")
