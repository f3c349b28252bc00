"""The common part of the ledgers of known differences: a TOML file of entries, each with operators and a reason."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from .cases import ConformanceError


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
        ConformanceError: An entry has an unknown key, or lacks an operator, a kind or a why.
    """
    for i, raw in enumerate(tomllib.loads(path.read_text()).get("entry", []), 1):
        where = f"{path}: entry {i} ({raw.get('operator', '?')})"
        if extra := raw.keys() - set(keys):
            raise ConformanceError(f"{where} has unknown keys: {', '.join(sorted(extra))}", code=code)
        if raw.get(kind) not in kinds or not raw.get("why") or not raw.get("operator"):
            raise ConformanceError(f"{where} needs an operator, a {kind} of {', '.join(kinds)}, and a why", code=code)
        yield where, raw
