"""Known gaps, each with its reason; a listed gap that passes is an error, as a new gap is.

gaps.txt: an unindented line is a reason, the indented lines under it are the cases that it explains.  `official:NAME`
explains a case that fails only ONNX's own verdict, `cuda:NAME` one that fails only on CUDA devices.
undeclared.txt: the same layout, with schema versions (`ai.onnx Softmax 13`) that are not implemented.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..proto.schemas import DOMAINS
from .cases import ConformanceError
from .worker import Result

_CUDA = "cuda:"


def read(path: Path, device: str = "CPU") -> dict[str, str]:
    """Read entry -> reason.  Raises ConformanceError for an entry that has no reason or is listed twice.

    device: where the cases run; the entries for CUDA devices are left out on others.
    """
    entries: dict[str, str] = {}
    reason = ""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not line[0].isspace():
            reason = text
        elif not reason:
            raise ConformanceError(f"{path}:{number}: {text!r} has no reason above it", code="SX802")
        elif text in entries:
            raise ConformanceError(f"{path}:{number}: {text!r} is listed twice", code="SX802")
        else:
            entries[text] = reason
    everywhere = {text: why for text, why in entries.items() if not text.startswith(_CUDA)}
    there = {text.removeprefix(_CUDA): why for text, why in entries.items() if text.startswith(_CUDA)}
    return everywhere | (there if device.upper().startswith("CUDA") else {})


def undeclared(path: Path) -> dict[tuple[str, str, int], str]:
    """Read (domain, operator, version) -> why it is not implemented; the domain is ONNX's spelling ("" for ai.onnx)."""
    names = {shown: domain for domain, shown in DOMAINS.items()}
    out = {}
    for entry, reason in read(path).items():
        domain, name, version = entry.split()
        out[names.get(domain, domain), name, int(version)] = reason
    return out


@dataclass
class Judgement:
    """A run compared with its gaps.

    Attributes:
        unexpected: Failures that no gap explains.
        closed: Gaps that did not fail.
        explained: The reasons of the failures, by case.
    """

    unexpected: list[Result]
    closed: list[str]
    explained: dict[str, str]

    @property
    def good(self) -> bool:
        return not self.unexpected and not self.closed


def judge(results: Sequence[Result], gaps: dict[str, str]) -> Judgement:
    """Compare failures with gaps in both directions; gaps of cases that did not run are ignored.

    A case that fails and has a gap counts as failed under the official verdict too: random values may match by chance.  A case
    that the backend does not support, as it declares, is explained by this.
    """
    gaps = {r.name: r.reason for r in results if r.opted_out} | gaps
    failed = {r.name for r in results if r.strict != "passed"}
    for r in results:
        if r.name in failed & gaps.keys() and r.official == "passed":
            r.official, r.official_reason = "failed", f"{r.reason if r.opted_out else f'passed by chance: {r.reason}'}"
    official = {f"official:{r.name}" for r in results if r.strict == "passed" and r.official != "passed"}
    could_close = {r.name for r in results} | {f"official:{r.name}" for r in results if r.strict == "passed"}
    unexpected = [r for r in results if r.name in failed - gaps.keys() or f"official:{r.name}" in official - gaps.keys()]
    closed = sorted(g for g in gaps if g in could_close - failed - official)
    return Judgement(unexpected, closed, {n: gaps[n] for n in sorted((failed | official) & gaps.keys())})
