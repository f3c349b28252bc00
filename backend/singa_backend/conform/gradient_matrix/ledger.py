"""What is known of the gradient matrix and cannot be read off it, with the reason; data in conformance/gradients.toml.

[[entry]]
operator = "Multinomial"            # an expression that the whole name matches
domain = ""                         # the main domain if not given
versions = [7]                      # all if not given
what = "few"                        # few: too few points; differs: onnxruntime gives something else; missing: no rule
why = "..."
sometimes = true                    # it depends on the run: nobody is told that the entry explains nothing any more
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..cases import held
from ..ledger import Concerning, read_entries
from .row import Row

WHAT = ("few", "differs", "missing")
_KEYS = {"operator", "domain", "versions", "what", "why", "sometimes"}


@dataclass(frozen=True)
class Entry(Concerning):
    """One thing that is known, and why it is so."""

    operator: str
    what: str
    why: str
    domain: str = ""
    versions: tuple[int, ...] = ()
    sometimes: bool = False

    def covers(self, row: Row, what: str) -> bool:
        return what == self.what and self.concerns(row.domain, row.operator, row.version)


def read(path: Path | None = None) -> list[Entry]:
    """The entries; raises ConformanceError for one that is not as the module's text says."""
    entries = []
    for _, raw in read_entries(path or held("gradients.toml"), _KEYS, "what", WHAT, "SX822"):
        versions = tuple(raw.get("versions", ()))
        sometimes = bool(raw.get("sometimes", False))
        entries.append(Entry(raw["operator"], raw["what"], raw["why"], raw.get("domain", ""), versions, sometimes))
    return entries


def states(row: Row) -> list[str]:
    """What of a row needs an explanation: one of WHAT, or a verdict that has none."""
    found = [row.verdict] if row.verdict in ("few", "missing", "wrong", "died", "timeout") else []
    return [*found, "differs"] if row.witness.get("differs") else found


def explain(row: Row, entries: Sequence[Entry]) -> bool:
    """Note the ledger's words on the row; whether they say all that is to be said."""
    row.explained = {}
    for what in states(row):
        entry = next((e for e in entries if e.covers(row, what)), None)
        if entry is not None:
            row.explained[what] = entry.why
    return set(row.explained) == set(states(row))
