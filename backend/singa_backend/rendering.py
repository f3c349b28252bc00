"""Render names and values that come from a model: one function for each medium.

What a model contains is data: it may have markup, terminal control sequences, or a length of a megabyte.

    printable(name)    for a terminal, a log and the message of an error
    markdown(name)     for the text and the table cells of a Markdown page
    html(name)         for the text and the attributes of an HTML page
    xml(name)          for the text and the attributes of an XML file, before an XML library escapes its markup
    shown(data)        for all texts in data that a script of an HTML page shows
    json_text(data)    for a JSON file, which programs read: they get the names as they are
"""

from __future__ import annotations

import json
import re
from typing import Any

NAME = 200
"""Characters of a name that are shown."""

TEXT = 4000
"""Characters of a text, such as a message, that are shown."""


def printable(text: object, limit: int = NAME, *, lines: bool = False) -> str:
    r"""Return a text that is safe to print: control characters become escapes, and a long text is cut in the middle.

    Args:
        text: the text, or an object whose `str` is shown.
        limit: the number of characters that are kept of a longer text.
        lines: whether line feeds and tabs are kept.

    Returns:
        The text without control characters, invisible characters and lone surrogates: ``"\x1b[2J"`` is shown as 8 characters.
    """
    shown = str(text)
    if len(shown) > limit:
        last = limit // 4
        shown = f"{shown[: limit - last]} ... ({len(shown):,} characters) ... {shown[len(shown) - last :]}"
    if shown.isprintable():
        return shown
    kept = "\n\t" if lines else ""
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in shown)


_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~&!])")


def markdown(text: object, limit: int = NAME) -> str:
    """Return a text for a Markdown page, as one line in which no character has a meaning.

    Args:
        text: the text, or an object whose `str` is shown.
        limit: the number of characters that are kept of a longer text.

    Returns:
        The printable text with a backslash before each character that Markdown or a table of it could read as markup.
    """
    return _MARKUP.sub(r"\\\1", printable(text, limit))


def html(text: object, limit: int = NAME) -> str:
    """Return a text for an HTML page: for its text, and for attributes in quotes.

    Args:
        text: the text, or an object whose `str` is shown.
        limit: the number of characters that are kept of a longer text.

    Returns:
        The printable text with entities in place of markup.
    """
    from html import escape  # only pages need it

    return escape(printable(text, limit), quote=True)


def xml(text: object, limit: int = TEXT) -> str:
    """Return a text that an XML file can contain; an XML library escapes its markup.

    Args:
        text: the text, or an object whose `str` is shown.
        limit: the number of characters that are kept of a longer text.

    Returns:
        The printable text with its line feeds; XML has no form for most control characters, not even as entities.
    """
    return printable(text, limit, lines=True)


def shown(data: Any) -> Any:
    """Return data with every text in it printable, at its full length, for a script that shows them.

    Args:
        data: dicts, lists and tuples of texts and numbers.

    Returns:
        The data; a tuple is a list. Line feeds and tabs are kept.
    """
    if isinstance(data, str):
        return data if data.isprintable() else printable(data, len(data), lines=True)
    if isinstance(data, dict):
        return {shown(key): shown(value) for key, value in data.items()}
    return [shown(value) for value in data] if isinstance(data, (list, tuple)) else data


def json_text(data: Any, **options: Any) -> str:
    r"""Return data as JSON in which letters of every script are readable, and invisible characters are escapes.

    Args:
        data: dicts, lists and tuples of texts and numbers.
        **options: options of `json.dumps`.

    Returns:
        The text, which reads as the same data: ``"\u202e"`` is written as 6 characters.
    """
    text = json.dumps(data, ensure_ascii=False, **options)
    if all(line.isprintable() for line in text.split("\n")):
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)
