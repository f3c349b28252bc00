"""What a profile and a comparison measured, by node of an inspected model; documents of other models are refused."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput
from .table import Call, Table

CODE = "SX398"

Document = Mapping[str, Any]
"""What `sonnx profile --json` or `sonnx compare --json` prints, or `to_dict` returns."""


@dataclass
class Time:
    """The time of a node.

    Attributes:
        seconds: of a run.
        share: of the time of all steps.
        rows: what the details of the node list.
    """

    seconds: float
    share: float
    rows: list[tuple[str, str]]


@dataclass
class Error:
    """The difference of a node's outputs from the trusted side.

    Attributes:
        excess: the largest difference, divided by the tolerance; infinite if a side has no comparable value.
        max_abs: the largest absolute difference; None if there is none, such as for other shapes.
        agrees: whether all outputs are within the tolerance.
        rows: what the details of the node list.
        first: whether it is the first wrong node, or the first value that differs.
    """

    excess: float
    max_abs: float | None
    agrees: bool
    rows: list[tuple[str, str]]
    first: bool = False


Key = tuple[bool, str]
"""Whether a node is in the main graph, and its first output."""


def key_of(table: Table, call: Call) -> Key:
    """How a node is found in the times."""
    return not table.path, next(filter(None, call.outputs), "")


_PROFILE = "a profile: the output of `sonnx profile --json`"


def seconds_of(profile: Document) -> float:
    """The time of a run; raises InvalidInput (SX398) unless it is a number."""
    return _number(profile, "seconds", _PROFILE)


def times_of(profile: Document, tables: Sequence[Table]) -> dict[Key, Time]:
    """The times of nodes; raises InvalidInput (SX398) unless the document is a profile of this model."""
    what = _PROFILE
    nodes = _rows(profile, "sonnx.profile", "nodes", what)
    known = {key_of(t, c): c.operator for t in tables for c in t.nodes}
    found: dict[Key, Time] = {}
    for row in nodes:
        fields = {"name": str, "operator": str, "values": Sequence, "main": bool, "kernels": Sequence, "part_of": str,
                  "steps": Sequence, "notes": Sequence}  # fmt: skip
        _check(row, fields, what)
        seconds, share = (_number(row, name, what) for name in ("seconds", "share"))
        key = bool(row["main"]), next((str(v) for v in row["values"] if v), "")
        if not key[1]:  # a node whose outputs are all omitted
            continue
        if known.get(key, None if row["main"] else row["operator"]) != row["operator"]:
            raise _other("profile", row["operator"], row["name"], key[1])
        if key in found:
            seconds, share = seconds + found[key].seconds, share + found[key].share
        found[key] = Time(seconds, share, _time_rows(row, seconds, share, what))
    for call in tables[0].nodes:
        if (
            any(call.outputs)
            and call.status != "function"
            and call.operator != "Constant"
            and key_of(tables[0], call) not in found
        ):
            raise InvalidInput(
                f"the profile must be of this model, but it lacks {call.operator} {call.name!r}",
                code=CODE,
                hint="run `sonnx profile` on this model again",
            )
    return found


def _time_rows(row: Document, seconds: float, share: float, what: str) -> list[tuple[str, str]]:
    if not row["steps"]:
        return [("computed with", row["part_of"])] if row["part_of"] else [("time", "none: a constant, or a view")]
    work = f"{_number(row, 'bytes', what) / 1e6:.3g} MB"
    if row.get("flops"):
        work = f"{_number(row, 'flops', what) / 1e9:.3g} GFLOP, {work}"
    rows = [("time", f"{seconds * 1e3:.4g} ms, {share:.1%}"), *(("kernel", str(k)) for k in row["kernels"]), ("work", work)]
    if row.get("roofline") is not None:
        rows.append(("of roofline", f"{_number(row, 'roofline', what):.0%}"))
    return rows + [("note", str(text)) for text in row["notes"]]


def errors_of(comparison: Document, main: Table) -> dict[int, Error]:
    """The errors of the main graph's nodes, by index; raises InvalidInput (SX398) unless the document compares this model."""
    what = "a comparison: the output of `sonnx compare --json`"
    calls = {c.index: c for c in main.nodes}
    found: dict[int, Error] = {}
    for row in _rows(comparison, "sonnx.compare", "rows", what):
        _check(row, {"value": str, "node": str, "operator": str, "index": int, "judged": bool, "verdict": str}, what)
        call = calls.get(row["index"])
        if call is None or call.operator != row["operator"] or row["value"] not in call.outputs:
            raise _other("comparison", row["operator"], row["node"], row["value"])
        excess, largest, ulps = (_number(row, name, what, null=True) for name in ("excess", "max_abs", "ulps"))
        agrees = row["verdict"] == "agrees" or not row["judged"] or row.get("adds_up") is True
        error = Error(math.inf if math.isnan(excess) else excess, None if math.isnan(largest) else largest, agrees, [])
        if not row["judged"]:
            error.excess = 0.0
        verdict = (
            "random, not compared"
            if not row["judged"]
            else "errors add up"
            if row.get("adds_up") is True
            else "agrees"
            if agrees
            else f"{row['verdict']}"
        )
        error.rows = [(row["value"], verdict), ("of tolerance", ratio(error.excess))]
        error.rows += [] if error.max_abs is None else [("max abs", f"{error.max_abs:.6g}")]
        error.rows += [] if math.isnan(ulps) else [("ULP", f"{ulps:.6g}")]
        before = found.get(call.index)
        if before is not None:
            worse = max(before, error, key=lambda e: (not e.agrees, e.excess))
            error = Error(worse.excess, worse.max_abs, worse.agrees, before.rows + error.rows)
        found[call.index] = error
    first = comparison.get("first")
    if isinstance(first, Mapping) and first.get("index") in found:
        one, known = found[first["index"]], first.get("inputs_agreed") is True
        one.first, one.agrees = True, False
        one.rows.insert(0, ("first wrong node" if known else "first value that differs", str(first.get("why", ""))))
    for row in _rows(comparison, "sonnx.compare", "not_compared", what):
        _check(row, {"node": str, "operator": str, "index": int}, what)
        call = calls.get(row["index"])
        if call is None or call.operator != row["operator"] or call.name != row["node"]:
            raise _other("comparison", row["operator"], row["node"], "")
    return found


def ratio(excess: float) -> str:
    """A difference as a multiple of the tolerance."""
    return "infinite" if math.isinf(excess) else f"{excess:.3g}×"


def _rows(document: Any, schema: str, field: str, what: str) -> list[Document]:
    rows = document.get(field) if isinstance(document, Mapping) else None
    if not isinstance(rows, list) or document.get("schema", schema) != schema:
        kind = document.get("schema") if isinstance(document, Mapping) else None
        got = f"a document of the schema {kind!r}" if isinstance(kind, str) else f"a {type(document).__name__} without {field!r}"
        raise InvalidInput(f"the document must be {what}, got {got}", code=CODE)
    return rows


def _check(row: Any, fields: Mapping[str, type], what: str) -> None:
    for name, kind in fields.items():
        value = row.get(name) if isinstance(row, Mapping) else None
        good = isinstance(value, kind) and not (kind is Sequence and isinstance(value, str))
        if good and isinstance(value, (list, tuple)):
            good = all(isinstance(v, (str, int)) for v in value)
        if not good:
            raise InvalidInput(
                f"the document must be {what}; {name!r} of a row must be {kind.__name__}, got {value!r}", code=CODE
            )


def _number(row: Document, name: str, what: str, *, null: bool = False) -> float:
    """A number of a row; NaN for null, which is allowed if `null`."""
    value = row.get(name)
    if value is None and null:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        got = "a larger integer than float64 has" if isinstance(value, int) and abs(value) > sys.float_info.max else repr(value)
        raise InvalidInput(f"the document must be {what}; {name!r} must be a number of at least 0, got {got}", code=CODE)
    return float(value)


def _other(what: str, operator: str, node: str, value: str) -> InvalidInput:
    made = f" with the output {value!r}" if value else ""
    return InvalidInput(
        f"the {what} must be of this model, which does not have its node {operator} {node!r}{made}",
        code=CODE,
        hint=f"run `sonnx {'profile' if what == 'profile' else 'compare'}` on this model again",
    )
