"""The rows of a sweep, the report, and the folder in which results are stored by content."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SonnxError
from ..io.documents import read_document
from ..io.files import write_text
from ..io.junit import JUnitCase, write_suite
from ..io.places import check, check_folder
from ..rendering import json_text
from .settings import SweepSettings

PASSED = "passed"

STATUSES = ("died", "timeout", "memory", "error", "failed", "differs", "refused", "partial", "skipped", PASSED)
"""The statuses of a file, the worst first."""

INCOMPLETE = ("partial", "skipped")
"""The statuses of files that were not, or not completely, judged."""

_MARK = b'"schema": "sonnx.sweep.result"'
"""The beginning of a stored result."""

_ANSWER: dict[str, Any] = {"status": str, "reason": str, "code": str, "facts": {}, "seconds": (int, float)}
"""The form of an answer."""

_LIMITED = ("died", "timeout", "memory")
"""The statuses that depend on the limits: with other limits, the file runs again."""


@dataclass
class SweepRow:
    """The result of one file.

    Attributes:
        file: the name of the file.
        status: "passed"; "differs"; "refused" (the model is invalid or not supported), "failed" or "error" (another exception);
            "partial" (some nodes were not compared) or "skipped" (no inputs can be drawn, nothing was compared); "died" (twice),
            "timeout" or "memory" (beyond the limit).
        reason: why it is not "passed".
        code: of the error, as in docs/errors.md; "" if it has none.
        facts: numbers of the task, such as the number of compared values.
        seconds: of the run that was stored.
        key: the name of the stored result; "" if it is not stored.
    """

    file: str
    status: str
    reason: str = ""
    code: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    key: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the row as plain data.

        Returns:
            A dict of the attributes.
        """
        return asdict(self)


@dataclass
class SweepReport:
    """The results of a sweep.

    Attributes:
        settings: of the sweep.
        rows: one for each file that has a result, in the order of the names.
        missing: the names of files without a result: the sweep was interrupted.
    """

    settings: SweepSettings
    rows: list[SweepRow]
    missing: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """The number of files of each status that occurs, the worst first."""
        found = Counter(r.status for r in self.rows)
        return {s: found[s] for s in STATUSES if found[s]}

    def good(self, *, skipped: bool = False) -> bool:
        """Return whether all files passed.

        Args:
            skipped: whether files that were not, or not completely, judged are accepted.

        Returns:
            True if every file has a result, and each is accepted; at least one must have passed.
        """
        accepted = (PASSED, *(INCOMPLETE if skipped else ()))
        passed = any(r.status == PASSED for r in self.rows)
        return passed and not self.missing and all(r.status in accepted for r in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for ``--json``; it does not depend on what was finished before, times apart.

        Returns:
            A dict of the task, the engine, the versions, the counts, the rows and the missing files.
        """
        s = self.settings
        return {
            "task": s.task, "engine": s.engine, "versions": s.versions, "seed": s.seed, "counts": self.counts,
            "rows": [r.to_dict() for r in self.rows], "missing": self.missing,
        }  # fmt: skip

    def write_junit(self, path: str | Path) -> None:
        """Write JUnit XML: a test case for each file; files that were not judged are skipped.

        Args:
            path: the file.

        Raises:
            InvalidInput: it cannot be written (SX351).
        """
        write_suite(path, f"sonnx sweep {self.settings.task}", map(self._case, self.rows))

    def _case(self, row: SweepRow) -> JUnitCase:
        text = "" if row.status == PASSED else f"{row.status}: {row.reason}"
        skip = row.status in INCOMPLETE
        name = f"sweep.{self.settings.task}"
        return JUnitCase(name, row.file, failure="" if skip else text, skipped=text if skip else "", seconds=row.seconds)


class SweepStore:
    """A folder with a file for each result, named after its key and written whole; several processes may share it.

    A file of such a name that is not a result, or is a link, is refused.

    Args:
        folder: it is created with the first result.

    Raises:
        InvalidInput: it cannot be written (SX351).
    """

    def __init__(self, folder: Path) -> None:
        check_folder(folder)
        self.folder = folder

    def find(self, key: str, settings: SweepSettings) -> dict[str, Any] | None:
        """The answer that is stored under a key; None if there is none, or it depends on other limits; raises InvalidInput."""
        path = self.folder / f"{key}.json"
        check(path, parents=True, mark=_MARK)
        if not os.path.exists(path):
            return None
        try:
            found = read_document(path, "SX992").matches({"answer": _ANSWER})
            status, answer = found["answer"]["status"], found["answer"]
        except SonnxError:  # not written by this class, which writes files whole
            return None
        limited = status in _LIMITED and found.get("limits") != _limits(settings)
        return None if limited or status not in STATUSES or answer.keys() != _ANSWER.keys() else dict(answer)

    def keep(self, key: str, answer: dict[str, Any], settings: SweepSettings) -> None:
        """Store an answer."""
        head = {"schema": "sonnx.sweep.result", "schema_version": 1, "key": key, "task": settings.task}
        facts = {"engine": settings.engine, "versions": settings.versions, "seed": settings.seed, "limits": _limits(settings)}
        text = json_text(head | facts | {"answer": answer}, indent=1) + "\n"
        write_text(self.folder / f"{key}.json", text, mark=_MARK)


def _limits(settings: SweepSettings) -> dict[str, Any]:
    return {"timeout": settings.timeout, "memory": settings.memory}


def sorted_rows(rows: Iterable[SweepRow]) -> list[SweepRow]:
    """Rows in the order of their names."""
    return sorted(rows, key=lambda r: r.file)
