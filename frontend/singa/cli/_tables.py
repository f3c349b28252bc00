"""The tables of the commands: numbers are never cut, and names only so that each still matches one name of the table."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import accumulate
from numbers import Integral, Real
from typing import Any

from rich.cells import cell_len

from singa_backend.rendering import TEXT, printable

_GAP = 2
"""The cells between two columns."""

_SHORT = 12
"""The cells that a name is cut to at most; with less room, records are shown one after the other."""


class Kind(Enum):
    """What a column contains, and so how it is fitted into a width."""

    NUMBER = "right-aligned, never cut or wrapped"
    WHOLE = "never cut or wrapped in a row"
    NAME = "cut in the middle"
    TEXT = "wrapped between words"


NUMBER, WHOLE, NAME, WORDS = Kind.NUMBER, Kind.WHOLE, Kind.NAME, Kind.TEXT


@dataclass(frozen=True)
class Columns:
    """The columns of a table of a command, at the top level of its module, where a test finds all of them.

    Attributes:
        kinds: The kind of each column, by its title.
        optional: The titles of columns that are left out, in this order, until each row is one line.
    """

    kinds: Mapping[str, Kind]
    optional: tuple[str, ...] = ()

    def table(self, title: str = "") -> TextTable:
        """Return an empty table of these columns, with a title above it."""
        return TextTable(self, title)


@dataclass
class TextTable:
    """Rows of cells.

    Attributes:
        columns: The columns.
        title: The line above the table; "" for none.
        rows: The cells of each row as text, and the row's style.
    """

    columns: Columns
    title: str = ""
    rows: list[tuple[list[str], str]] = field(default_factory=list)

    def add(self, *cells: Any, style: str = "") -> None:
        """Add a row: a number, a text, or None (shown as a dash) for each column; lines of a cell are separate names.

        Raises:
            ValueError: The number of cells is not the number of columns.
        """
        if len(cells) != len(self.columns.kinds):
            raise ValueError(f"a row must have {len(self.columns.kinds)} cells, got {len(cells)}")
        self.rows.append(([shown(c) for c in cells], style))

    def lines(self, width: int | None, unicode: bool = True) -> list[tuple[str, str]]:
        """Return the lines and their styles; the last one is empty.

        Args:
            width: The cells of a line; None for as many as are needed.
            unicode: Whether the output can show an ellipsis and a line; otherwise they are ASCII.
        """
        title = [(printable(self.title), "italic")] if self.title else []
        for count in range(len(self.columns.optional) + 1 if self.columns.optional else 0):
            found = self._without(self.columns.optional[:count])._grid(width, unicode, single=True)
            if found is not None:
                return [*title, *found, ("", "")]
        found = self._grid(width, unicode)
        return [*title, *(_records(self, width or 80) if found is None else found), ("", "")]

    def _without(self, titles: Sequence[str]) -> TextTable:
        """Return the table without some columns."""
        kept = [i for i, title in enumerate(self.columns.kinds) if title not in titles]
        kinds = {t: k for t, k in self.columns.kinds.items() if t not in titles}
        return TextTable(Columns(kinds), rows=[([row[i] for i in kept], style) for row, style in self.rows])

    def _grid(self, width: int | None, unicode: bool, *, single: bool = False) -> list[tuple[str, str]] | None:
        """Return the lines of the rows, or None if they do not fit; with `single`, if a cell is wrapped."""
        kinds, titles = list(self.columns.kinds.values()), list(self.columns.kinds)
        parts = [[line for row, _ in self.rows for line in row[i].split("\n")] for i in range(len(kinds))]
        whole = [max(map(cell_len, (*p, t))) for p, t in zip(parts, titles, strict=True)]
        widths: list[int] | None = whole
        if width is not None and sum(whole) + _GAP * (len(whole) - 1) > width:
            lowest = [_lowest(k, p, t) for k, p, t in zip(kinds, parts, titles, strict=True)]
            widths = _shares(whole, lowest, width - _GAP * (len(whole) - 1))
        if widths is None:
            return None
        fitted = []
        for kind, names, cells in zip(kinds, parts, widths, strict=True):
            cut = _cut(names, cells, "…" if unicode else "...") if kind is NAME else {}
            if cut is None:
                return None
            fitted.append(cut)
        for i, (cut, title) in enumerate(zip(fitted, titles, strict=True)):
            widths[i] = max(map(cell_len, (title, *cut.values()))) if cut else widths[i]
        rule = " " * _GAP
        head = _row([wrap(t, w) for t, w in zip(titles, widths, strict=True)], widths, kinds)
        made = [(line, "bold") for line in head]
        made.append((rule.join(("─" if unicode else "-") * w for w in widths), "dim"))
        for row, style in self.rows:
            cells_of = [
                [p for n in cell.split("\n") for p in ([cut[n]] if k is NAME else wrap(n, w) if k is WORDS else [n])]
                for cell, cut, k, w in zip(row, fitted, kinds, widths, strict=True)
            ]
            if single and any(len(lines) > cell.count("\n") + 1 for lines, cell in zip(cells_of, row, strict=True)):
                return None
            made += [(line, style) for line in _row(cells_of, widths, kinds)]
        return made


def shown(value: Any) -> str:
    """Return a cell's text: six significant digits of a float, every digit of an integer, a dash for None."""
    if value is None:
        return "–"
    if isinstance(value, Integral) and not isinstance(value, bool):
        return str(int(value))
    if isinstance(value, Real) and not isinstance(value, bool):
        return f"{float(value):.6g}"
    return printable(value, TEXT, lines=True).replace("\t", " ")


def _row(cells: Sequence[list[str]], widths: Sequence[int], kinds: Sequence[Kind]) -> Iterator[str]:
    """Yield the lines of a row; each cell is its lines."""
    for i in range(max(map(len, cells))):
        parts = []
        for lines, width, kind in zip(cells, widths, kinds, strict=True):
            text = lines[i] if i < len(lines) else ""
            space = " " * (width - cell_len(text))
            parts.append(space + text if kind is NUMBER else text + space)
        yield (" " * _GAP).join(parts).rstrip()


def _records(table: TextTable, width: int) -> list[tuple[str, str]]:
    """Return one record after the other: a line for each cell that is not empty, wrapped but not cut."""
    kinds = table.columns.kinds
    label = max(map(cell_len, kinds)) + _GAP
    made: list[tuple[str, str]] = []
    for row, style in table.rows:
        if made:
            made.append(("", ""))
        for (title, kind), cell in zip(kinds.items(), row, strict=True):
            if not cell:
                continue
            start = title + " " * (label - cell_len(title))
            lines = [part for line in cell.split("\n") for part in _folded(line, kind, width - label)]
            if max(map(cell_len, lines)) > width - label:
                made.append((title, style))
                start = " " * _GAP
                lines = [part for line in cell.split("\n") for part in _folded(line, kind, width - _GAP)]
            for line in lines:
                made.append((start + line, style))
                start = " " * cell_len(start)
    return made


def _folded(line: str, kind: Kind, width: int) -> list[str]:
    """Return a line of a record in parts of a width: numbers whole, names between any two characters, others between words."""
    if kind is NUMBER:
        return [line]
    return _pieces(line, max(width, 2)) if kind is NAME else wrap(line, max(width, 2), fold=kind is not WORDS)


def _lowest(kind: Kind, lines: Sequence[str], title: str) -> int:
    """Return the cells that a column needs."""
    words = title.split(" ")
    if kind is WORDS:
        words += [w for line in lines for w in line.split(" ")]
    need = max(map(cell_len, words))
    if kind in (NUMBER, WHOLE):
        return max(need, *map(cell_len, lines), 0)
    return max(need, min(_SHORT, max(map(cell_len, lines), default=0))) if kind is NAME else need


def _shares(whole: Sequence[int], lowest: Sequence[int], room: int) -> list[int] | None:
    """Return the widths of the columns: as equal as they can be, between the lowest and the whole; None if they do not fit."""
    for cap in range(room, -1, -1):
        widths = [min(w, max(low, cap)) for w, low in zip(whole, lowest, strict=True)]
        if sum(widths) <= room:
            return widths
    return None


def wrap(text: str, width: int, *, fold: bool = False) -> list[str]:
    """Return a text in lines of a width, broken between words.

    Args:
        text: The text, without line feeds.
        width: The cells of a line.
        fold: Whether a word that is longer is folded; otherwise it has a line that is too long.
    """
    if cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in text.split(" "):
        if lines[-1] and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
            continue
        pieces = _pieces(word, width) if fold else [word]
        lines = lines + pieces if lines[-1] else lines[:-1] + pieces
    return lines


def _pieces(text: str, width: int) -> list[str]:
    lines, used = [""], 0
    for part in graphemes(text):
        size = cell_len(part)
        if lines[-1] and used + size > width:
            lines.append("")
            used = 0
        lines[-1] += part
        used += size
    return lines


_ESCAPE = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})|.", re.DOTALL)


def graphemes(text: str) -> list[str]:
    r"""Return the parts of a text between which it can be cut: characters with their marks, flags, and escapes such as `\x1b`."""
    parts: list[str] = []
    for part in _ESCAPE.findall(text):
        if parts and _joins(parts[-1], part):
            parts[-1] += part
        else:
            parts.append(part)
    return parts


def _joins(before: str, part: str) -> bool:
    code, last = ord(part[0]), ord(before[-1])
    if code < 0x300:
        return False
    if 0x1F1E6 <= code <= 0x1F1FF:  # two letters are a flag
        return len(before) == 1 and 0x1F1E6 <= last <= 0x1F1FF
    if 0x1160 <= code <= 0x11FF:  # the vowel and the last consonant of a Hangul syllable
        return 0x1100 <= last <= 0x11FF or 0xAC00 <= last <= 0xD7A3
    return unicodedata.category(part[0]) in ("Mn", "Me", "Mc") or 0x1F3FB <= code <= 0x1F3FF


def _cut(names: Sequence[str], width: int, mark: str) -> dict[str, str] | None:
    """Return names of at most a width by name, cut so that each matches no other; None if a name has no such cut."""
    distinct = set(names)
    counts: dict[tuple[int, int], Counter[tuple[str, str]]] = {}

    def alone(head: str, tail: str) -> bool:
        key = len(head), len(tail)
        if key not in counts:
            counts[key] = Counter((n[: key[0]], n[len(n) - key[1] :]) for n in distinct if len(n) >= sum(key))
        return counts[key][head, tail] == 1

    found = {}
    for name in distinct:
        if cell_len(name) <= width:
            found[name] = name
            continue
        halves = next((h for h in _halves(name, width - cell_len(mark)) if alone(*h)), None)
        if halves is None:
            return None
        found[name] = mark.join(halves)
    return found


def _halves(name: str, room: int) -> Iterator[tuple[str, str]]:
    """Yield the starts and ends that fit: between the parts of a path, then between any characters; the middle first."""
    parts = graphemes(name)
    sizes = [cell_len(p) for p in parts]
    before, after = list(accumulate(sizes, initial=0)), list(accumulate(sizes[::-1], initial=0))[::-1]
    order = sorted(range(room + 1), key=lambda a: (abs(2 * a - room), a))
    separators = [i for i, p in enumerate(parts) if p in "/."]
    for first in order if len(separators) > 1 else ():
        start = max((i + 1 for i in separators if i > 0 and before[i + 1] <= first), default=0)
        left = room - before[start]
        end = min((i for i in separators if start <= i < len(parts) - 1 and after[i] <= left), default=0)
        if start and end:
            yield "".join(parts[:start]), "".join(parts[end:])
    for first in order:
        start = bisect_right(before, first) - 1
        end = bisect_left(after, -(room - before[start]), key=lambda size: -size)
        yield "".join(parts[:start]), "".join(parts[end:])
