"""The ledger: every known difference from a witness, with its class and reason; data in conformance/ledger.toml.

[[entry]]
operator = "Mod"                    # a regular expression for the whole name
domain = ""                         # default: the main domain
versions = [10, 13]                 # default: all
witness = "onnxruntime"             # a regular expression; default: all
when = ["beyond_float", "attr.fmod=1", "dtype.T=int(32|64)", "!nan", "kind=values", "says=refused"]
class = "onnxruntime"               # ours, onnxruntime, reference, specification or tolerance
bound = 4.0                         # for class tolerance: multiplies the registry's tolerance
why = "..."
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import helper

from ..cases import ConformanceError
from ..ledger import Concerning, difference_holds, read_entries
from .generate import NodeCase

CLASSES = ("ours", "onnxruntime", "reference", "specification", "tolerance")
_KEYS = {"operator", "domain", "versions", "witness", "when", "class", "bound", "why"}


@dataclass(frozen=True)
class KnownDifference(Concerning):
    """One known difference."""

    operator: str
    blame: str
    why: str
    domain: str = ""
    versions: tuple[int, ...] = ()
    witness: str = ".*"
    when: tuple[str, ...] = ()
    bound: float = 1.0

    def covers(self, case: NodeCase, witness: str, kind: str, says: str) -> bool:
        """Whether it explains this difference.  kind: the Finding's kind, or "refused" if we refuse; says: its message."""
        return (
            self.concerns(case.domain, case.operator, case.version)
            and re.fullmatch(self.witness, witness) is not None
            and all(_holds(c, case, kind, says) for c in self.when)
        )


def _holds(condition: str, case: NodeCase, kind: str, says: str) -> bool:
    if condition.startswith("!"):
        return not _holds(condition[1:], case, kind, says)
    key, found, pattern = condition.partition("=")
    if not found:
        return condition in case.flags
    known = difference_holds(key, pattern, kind, says, case.opset)
    if known is not None:
        return known
    what, _, name = key.partition(".")
    if what == "dtype":
        dtype = case.types.get(name)
        return dtype is not None and re.fullmatch(pattern, dtype.name) is not None
    value = next((helper.get_attribute_value(a) for a in case.node.attribute if a.name == name), None)
    if value is None:
        default = case.schema.attributes[name].default_value if name in case.schema.attributes else None
        value = helper.get_attribute_value(default) if default is not None and default.name else ""
    text = value.decode() if isinstance(value, bytes) else str(value)
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def read(path: Path) -> list[KnownDifference]:
    """Read the entries; raises ConformanceError for one that does not follow the module's docstring."""
    entries = []
    for where, raw in read_entries(path, _KEYS, "class", CLASSES, "SX821"):
        for condition in raw.get("when", []):
            _check(condition.lstrip("!"), where)
        entries.append(_entry(raw))
    return entries


def _entry(raw: dict[str, Any]) -> KnownDifference:
    return KnownDifference(
        raw["operator"],
        raw["class"],
        raw["why"],
        raw.get("domain", ""),
        tuple(raw.get("versions", ())),
        raw.get("witness", ".*"),
        tuple(raw.get("when", ())),
        float(raw.get("bound", 1.0)),
    )


_FLAG = re.compile(r"(nan|inf|minus_zero|huge|subnormal|int_min|int_max|beyond_float|beyond_single|(absent|scalar|empty)\d*)")


def _check(condition: str, where: str) -> None:
    key, found, _ = condition.partition("=")
    known = key in ("kind", "says", "opset") or key.startswith(("dtype.", "attr.")) if found else _FLAG.fullmatch(condition)
    try:
        re.compile(found)
    except re.error:
        known = False
    if not known:
        raise ConformanceError(f"{where}: {condition!r} is not a condition", code="SX821")


def find(entries: Sequence[KnownDifference], case: NodeCase, witness: str, kind: str, says: str) -> KnownDifference | None:
    return next((e for e in entries if e.covers(case, witness, kind, says)), None)
