"""Known deviations of the gradient matrix, with their reasons; data in conformance/gradients.toml.

[[entry]]
operator = "Multinomial"            # a regular expression for the whole name
domain = ""                         # default: the main domain
versions = [7]                      # default: all
what = "few"                        # few: too few points; differs: onnxruntime disagrees; missing: no rule
why = "..."
sometimes = true                    # depends on the run: the entry is not reported as unused
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cases import data_file
from ..ledger import Concerning, read_entries
from .row import MatrixRow

WHAT = ("few", "differs", "missing")
_KEYS = {"operator", "domain", "versions", "what", "why", "sometimes"}


@dataclass(frozen=True)
class KnownDeviation(Concerning):
    """A known deviation and its reason."""

    operator: str
    what: str
    why: str
    domain: str = ""
    versions: tuple[int, ...] = ()
    sometimes: bool = False

    def covers(self, row: MatrixRow, what: str) -> bool:
        return what == self.what and self.concerns(row.domain, row.operator, row.version)


def read(path: Path | None = None) -> list[KnownDeviation]:
    """Read the entries; raises ConformanceError for one that does not follow the module's docstring."""
    entries = []
    for _, raw in read_entries(path or data_file("gradients.toml"), _KEYS, "what", WHAT, "SX822"):
        versions = tuple(raw.get("versions", ()))
        sometimes = bool(raw.get("sometimes", False))
        entries.append(KnownDeviation(raw["operator"], raw["what"], raw["why"], raw.get("domain", ""), versions, sometimes))
    return entries


def states(row: MatrixRow) -> list[str]:
    """Return what needs an explanation in a row: values of WHAT, or verdicts that no entry can explain."""
    found = [row.verdict] if row.verdict in ("few", "missing", "wrong", "died", "timeout") else []
    return [*found, "differs"] if row.witness.get("differs") else found


def explain(row: MatrixRow, entries: Sequence[KnownDeviation]) -> bool:
    """Store the ledger's reasons in the row; returns whether they explain all of its states."""
    row.explained = {}
    for what in states(row):
        entry = next((e for e in entries if e.covers(row, what)), None)
        if entry is not None:
            row.explained[what] = entry.why
    return set(row.explained) == set(states(row))
