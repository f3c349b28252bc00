"""The ledger of graphs: known differences that the ledger of single operators does not explain; data in conformance/graphs.toml.

[[entry]]
operator = "If|Loop"                # a regular expression for the operator that differs first; "form" for a whole form
form = "onnxruntime"                # a regular expression for the form; default: all
when = ["kind=values", "says=...", "contains=Gather", "omits=Loop 1", "opset=1[0-9]"]     # a Loop omits its input 1
class = "onnxruntime"               # ours, onnxruntime, reference, specification or tolerance
why = "..."
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...cases import ConformanceError
from ...ledger import difference_holds, read_entries
from ..ledger import CLASSES
from .generate import GraphCase, every_node

_KEYS = {"operator", "form", "when", "class", "why"}
_CONDITIONS = ("kind", "says", "contains", "omits", "opset")


@dataclass(frozen=True)
class KnownGraphDifference:
    """One known difference."""

    operator: str
    blame: str
    why: str
    form: str = ".*"
    when: tuple[str, ...] = ()

    def covers(self, case: GraphCase, form: str, operator: str, kind: str, says: str) -> bool:
        """Whether it explains this difference.  operator: "form" for a difference of a whole form."""
        return (
            re.fullmatch(self.operator, operator) is not None
            and re.fullmatch(self.form, form) is not None
            and all(_holds(c, case, kind, says) for c in self.when)
        )


def _holds(condition: str, case: GraphCase, kind: str, says: str) -> bool:
    key, _, pattern = condition.partition("=")
    known = difference_holds(key, pattern, kind, says, case.opset)
    if known is not None:
        return known
    nodes = every_node(case.model)
    if key == "omits":
        return any(re.fullmatch(pattern, f"{n.op_type} {i}") for n in nodes for i, name in enumerate(n.input) if not name)
    return any(re.fullmatch(pattern, n.op_type) for n in nodes)


def read(path: Path) -> list[KnownGraphDifference]:
    """Read the entries; raises ConformanceError for one that does not follow the module's docstring."""
    return [_entry(where, raw) for where, raw in read_entries(path, _KEYS, "class", CLASSES, "SX821")]


def _entry(where: str, raw: dict[str, Any]) -> KnownGraphDifference:
    for condition in raw.get("when", []):
        if condition.partition("=")[0] not in _CONDITIONS:
            raise ConformanceError(f"{where}: {condition!r} is not a condition", code="SX821")
    return KnownGraphDifference(raw["operator"], raw["class"], raw["why"], raw.get("form", ".*"), tuple(raw.get("when", ())))


def find(
    entries: Sequence[KnownGraphDifference], case: GraphCase, form: str, operator: str, kind: str, says: str
) -> KnownGraphDifference | None:
    return next((e for e in entries if e.covers(case, form, operator, kind, says)), None)
