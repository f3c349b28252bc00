"""Objects of a JSON configuration, whose values are checked when they are read: an error names the file, the key and the rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from singa_backend.errors import InvalidInput
from singa_backend.io.archives import read_json

FOLDER = "SX374"
"""The code of an error in a folder or in its configuration."""

LARGEST = (1 << 31) - 1
"""The maximum of sizes and of numbers of tokens."""


def unfit(text: str, hint: str = "") -> InvalidInput:
    """The error of a folder that cannot be used."""
    return InvalidInput(text, code=FOLDER, hint=hint)


@dataclass(frozen=True)
class Section:
    """An object in a JSON file.

    A value that is null counts as absent, and unknown keys are ignored.

    Attributes:
        file: the path of the file.
        place: the keys that lead to the object, each with a dot after it.
        values: the object.
    """

    file: Path
    place: str
    values: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> Section:
        """Read a file that holds an object."""
        found = read_json(file, FOLDER)
        if not isinstance(found, dict):
            raise unfit(f"{file} must hold a JSON object, got a {_kind(found)}")
        return cls(file, "", found)

    def wrong(self, key: str, rule: str, value: Any) -> InvalidInput:
        """The error of a value."""
        shown = repr(value)
        return unfit(f"{self.file}: {self.place}{key} must be {rule}, got {shown if len(shown) < 200 else _kind(value)}")

    def lacks(self, key: str, rule: str) -> InvalidInput:
        """The error of a key that is absent."""
        return unfit(f"{self.file}: {self.place}{key} must be {rule}, and is missing")

    def section(self, key: str) -> Section:
        """An object in this one; an empty one if it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.wrong(key, "an object", value)
        return Section(self.file, f"{self.place}{key}.", value or {})

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return self.values.get(key) is not None

    def integer(self, key: str, low: int = 0, high: int = LARGEST) -> int | None:
        """An integer within bounds; None if it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():  # a writer of JSON may write 50.0
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}", value)
        return value

    def number(self, key: str, low: float = 0.0) -> float | None:
        """A finite number of at least `low`; None if it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value < math.inf:
            raise self.wrong(key, f"a finite number of at least {low:g}", value)
        return float(value)

    def flag(self, key: str) -> bool | None:
        """A boolean; None if it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return value

    def text(self, key: str) -> str | None:
        """A text; None if it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text", value)
        return value

    def token(self, key: str) -> int | None:
        """A token; None if it is absent.  The first one of a list."""
        found = self.tokens(key)
        return found[0] if found else None

    def tokens(self, key: str) -> tuple[int, ...]:
        """A token or a list of tokens; none if it is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        found = value if isinstance(value, list) else [value]
        if len(found) > 1024 or not all(isinstance(v, int) and not isinstance(v, bool) and -1 <= v <= LARGEST for v in found):
            raise self.wrong(key, f"a token or a list of at most 1024 tokens, integers from 0 to {LARGEST}", value)
        return tuple(v for v in found if v >= 0)  # -1 is written for none

    def path(self, key: str, folder: Path) -> Path | None:
        """The path of a file in a folder; None if it is absent."""
        value = self.text(key)
        if value is None:
            return None
        parts = PurePosixPath(value).parts
        if not parts or value.startswith("/") or ".." in parts or {"\\", ":", "\0"} & set(value):
            raise self.wrong(key, "a path within the folder", value)
        found = folder.joinpath(*parts)
        if not found.parent.resolve().is_relative_to(folder.resolve()):  # a folder in it may be a link
            raise self.wrong(key, "a path within the folder", value)
        return found


def _kind(value: Any) -> str:
    return {dict: "object", list: "list", str: "text", bool: "boolean", type(None): "null"}.get(type(value), "number")
