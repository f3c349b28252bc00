"""The common part of the ledgers of known differences: a TOML file of entries, each with operators and a reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from ..io.archives import read_bytes
from ..io.documents import DOCUMENT, Document
from .cases import ConformanceError

_FORM = {
    "operator?": str, "domain?": str, "versions?": [int], "witness?": str, "when?": [str], "class?": str, "what?": str,
    "bound?": (int, float), "why?": str, "sometimes?": bool,
}  # fmt: skip


def _bad_expression(raw: dict[str, Any]) -> str:
    for key in ("operator", "witness"):
        try:
            re.compile(raw.get(key, ""))
        except re.error as error:
            return f"{key} must be a regular expression, got {raw[key]!r}: {error}"
    return ""


class Concerning:
    """A ledger's entry about operators.  operator: a regular expression for the whole name.  versions: all if empty."""

    operator: str
    domain: str
    versions: tuple[int, ...]

    def concerns(self, domain: str, operator: str, version: int) -> bool:
        return (
            domain == self.domain
            and re.fullmatch(self.operator, operator) is not None
            and (not self.versions or version in self.versions)
        )


def read_entries(
    path: Path, keys: Collection[str], kind: str, kinds: Collection[str], code: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of a file, each with the start of a message about it.

    Args:
        path: The TOML file.
        keys: The known keys.
        kind: A required key.
        kinds: The values of that key.
        code: The error code.

    Raises:
        InvalidInput: The file cannot be read.
        ConformanceError: The file is not TOML, or an entry has an unknown key, or lacks an operator, a kind or a why.
    """
    try:
        document = tomllib.loads(read_bytes(path, code, DOCUMENT).decode())
    except (ValueError, RecursionError) as error:
        raise ConformanceError(f"{path} is not a TOML file: {error}", code=code) from None
    entries = document.get("entry", [])
    if not isinstance(entries, list) or not all(isinstance(raw, dict) for raw in entries):
        raise ConformanceError(f"{path}: the entries must be tables, [[entry]]", code=code)
    for i, raw in enumerate(entries, 1):
        where = f"{path}: entry {i} ({raw.get('operator', '?')})"
        if extra := raw.keys() - set(keys):
            raise ConformanceError(f"{where} has unknown keys: {', '.join(sorted(extra))}", code=code)
        Document(raw, where, code).matches(_FORM)
        if why := _bad_expression(raw):
            raise ConformanceError(f"{where}: {why}", code=code)
        if raw.get(kind) not in kinds or not raw.get("why") or not raw.get("operator"):
            raise ConformanceError(f"{where} needs an operator, a {kind} of {', '.join(kinds)}, and a why", code=code)
        yield where, raw


def difference_holds(key: str, pattern: str, kind: str, says: str, opset: int) -> bool | None:
    """Whether a condition on the difference itself holds; None for a condition of another key."""
    if key == "kind":
        return re.fullmatch(pattern, kind) is not None
    if key == "says":
        return re.search(pattern, says) is not None
    if key == "opset":
        return re.fullmatch(pattern, str(opset)) is not None
    return None
