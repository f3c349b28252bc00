"""Fill HTML pages that work offline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..rendering import json_text, shown


def fill(template: Path, data: dict[str, Any], parts: Mapping[str, str] | None = None) -> str:
    """Insert data as JSON into the data element of a page template, and parts that are HTML in place of <!--NAME-->."""
    text = json_text(shown(data), separators=(",", ":"), sort_keys=True).replace("<", "\\u003c")
    before, mark, after = template.read_text(encoding="utf-8").partition('{"data":null}')
    assert mark, f"{template} has no data element"
    for name, part in (parts or {}).items():
        hole = f"<!--{name}-->"
        assert hole in before, f"{template} has no {hole}"
        before = before.replace(hole, part)
    return before + text + after
