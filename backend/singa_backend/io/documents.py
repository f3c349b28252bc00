"""Read JSON documents that are not trusted: every value is checked where it is read, and an error has its path.

    run = read_document(path, "SX804")           a file            parse_document(data, where, code)      bytes, or a text
    run["cases"][3]["status"].one_of(STATUSES)   required          results.json: $.cases[3].status must be one of ..., got 'x'
    run.maybe("seed", Document.integer, 0, 99)   None if it is absent or null

The bytes, the number of values, the depth and the digits of integers are bounded, texts have no surrogates, and no object has a
key twice, so that what is read can be compared, printed and written without further errors.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from ..errors import InvalidInput, ResourceExhausted
from .archives import check_size, read_bytes, shown_path, typed

P = ParamSpec("P")
T = TypeVar("T")

DOCUMENT = 16 << 20
"""The maximum bytes of a document."""

VALUES = 500_000
"""The maximum number of values in a document."""

DEPTH = 64
"""The maximum depth of lists and objects in each other."""

LARGEST = (1 << 31) - 1
"""The maximum of an integer, unless the reader names another one."""

_WIDEST = 10**40
"""Integers are closer to 0: a float64 and NumPy's random states can hold them."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,59}")
_SHOWN = 80


class _Origin(NamedTuple):
    """What a document is, the code of errors about it, and their hint."""

    where: str
    code: str
    hint: str


class _Twice(NamedTuple):
    """In place of an object: the key that it has twice."""

    key: str


class Document:
    """A value of a JSON document, and its path: `$` is the whole document.

    Attributes:
        value: the value, as `json.loads` returns it.
    """

    __slots__ = ("_key", "_origin", "_parent", "value")

    def __init__(self, value: Any, where: str, code: str, hint: str = "") -> None:
        """Begin at the whole of a document whose length, depth and numbers were checked.

        Args:
            value: the value.
            where: what the document is, for messages.
            code: the code of errors about it.
            hint: the hint of these errors.
        """
        self.value, self._origin = value, _Origin(where, code, hint)
        self._parent: Document | None = None
        self._key: str | int = ""

    def _part(self, key: str | int, value: Any) -> Document:
        part = Document.__new__(Document)
        part.value, part._origin, part._parent, part._key = value, self._origin, self, key
        return part

    @property
    def where(self) -> str:
        """What the document is."""
        return self._origin.where

    @property
    def path(self) -> str:
        """The place of the value in the document, such as `$.cases[3].status`."""
        keys, at = list[str](), self
        while at._parent is not None:
            keys.append(_step(at._key))
            at = at._parent
        return "$" + "".join(reversed(keys))

    def error(self, text: str) -> InvalidInput:
        """Return an error about the value.

        Args:
            text: what follows the path.

        Returns:
            The error, with the code and the hint of the document.
        """
        return InvalidInput(f"{self.where}: {self.path} {text}", code=self._origin.code, hint=self._origin.hint)

    def wrong(self, rule: str) -> InvalidInput:
        """Return the error for a value that breaks a rule.

        Args:
            rule: what the value must be.

        Returns:
            The error.
        """
        return self.error(f"must be {rule}, got {_shown(self.value)}")

    # --- parts

    def __getitem__(self, key: str | int) -> Document:
        """Return a part of an object or a list; raises InvalidInput if there is none."""
        part = self.get(key)
        if part is None:
            absent = key not in self.value if isinstance(key, str) else key >= len(self.value)
            text = "is missing" if absent else "must not be null"
            raise self._part(key, None).error(text)
        return part

    def get(self, key: str | int) -> Document | None:
        """Return a part of an object or a list.

        Args:
            key: the key, or the index.

        Returns:
            The part; None if it is absent or null.

        Raises:
            InvalidInput: the value is not an object, or not a list for an index.
        """
        if isinstance(key, str):
            found = self.mapping().get(key)
        else:
            items = self.sequence()
            found = items[key] if key < len(items) else None
        return None if found is None else self._part(key, found)

    def maybe(
        self, key: str, read: Callable[Concatenate[Document, P], T], /, *bounds: P.args, **options: P.kwargs
    ) -> T | None:  # fmt: skip
        """Read a value of an object that may be absent.

        Args:
            key: its key.
            read: a method of this class.
            *bounds: its arguments.
            **options: its keywords.

        Returns:
            What `read` returns; None if the value is absent or null.

        Raises:
            InvalidInput: the value is not as `read` requires.
        """
        part = self.get(key)
        return None if part is None else read(part, *bounds, **options)

    def part(self, key: str) -> Document:
        """Return an object in this one.

        Args:
            key: its key.

        Returns:
            The part; an empty object if it is absent or null.

        Raises:
            InvalidInput: the value, or the part, is not an object.
        """
        part = self.get(key) or self._part(key, {})
        part.mapping()
        return part

    def items(self) -> Iterator[tuple[str, Document]]:
        """Return the parts of an object.

        Returns:
            The keys with their parts.

        Raises:
            InvalidInput: the value is not an object.
        """
        return ((key, self._part(key, value)) for key, value in self.mapping().items())

    def parts(self, low: int = 0, high: int = VALUES) -> list[Document]:
        """Return the parts of a list.

        Args:
            low: the minimum number.
            high: the maximum number.

        Returns:
            The parts.

        Raises:
            InvalidInput: the value is not a list, or has another length.
        """
        found = self.sequence()
        if not low <= len(found) <= high:
            count = f"{low}" if low == high else f"{low} to {high}"
            raise self.error(f"must be a list of {count} values, got {len(found)}")
        return [self._part(i, value) for i, value in enumerate(found)]

    # --- values

    def mapping(self) -> dict[str, Any]:
        """Return an object.

        Returns:
            The values by key.

        Raises:
            InvalidInput: the value is not an object.
        """
        if not isinstance(self.value, dict):
            raise self.wrong("an object")
        return self.value

    def sequence(self) -> list[Any]:
        """Return a list.

        Returns:
            The values.

        Raises:
            InvalidInput: the value is not a list.
        """
        if not isinstance(self.value, list):
            raise self.wrong("a list")
        return self.value

    def text(self, most: int = DOCUMENT) -> str:
        """Return a text.

        Args:
            most: the maximum number of characters.

        Returns:
            The text, which has no surrogates.

        Raises:
            InvalidInput: the value is not a text, or is longer.
        """
        if not isinstance(self.value, str):
            raise self.wrong("a text")
        if len(self.value) > most:
            raise self.error(f"must be a text of at most {most} characters, got {len(self.value)}")
        return self.value

    def one_of(self, choices: Collection[str]) -> str:
        """Return a text that is one of several.

        Args:
            choices: the texts.

        Returns:
            The text.

        Raises:
            InvalidInput: the value is another one.
        """
        if not isinstance(self.value, str) or self.value not in choices:
            raise self.wrong(f"one of {', '.join(choices)}" if len(choices) > 1 else f"{next(iter(choices))!r}")
        return self.value

    def integer(self, low: int = 0, high: int = LARGEST) -> int:
        """Return an integer; a float without a fraction counts as one, because some writers write 50.0.

        Args:
            low: its minimum.
            high: its maximum.

        Returns:
            The integer.

        Raises:
            InvalidInput: the value is not an integer within these bounds.
        """
        value = self.value
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(f"an integer from {low} to {high}")
        return value

    def number(self, low: float = 0.0, high: float = math.inf) -> float:
        """Return a finite number.

        Args:
            low: its minimum.
            high: its maximum.

        Returns:
            The number.

        Raises:
            InvalidInput: the value is not a finite number within these bounds.
        """
        value = self.value
        plain = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not plain or not low <= value <= high:
            most = f" and at most {high:g}" if high < math.inf else ""
            raise self.wrong("a finite number" + (f" of at least {low:g}{most}" if low > -math.inf or most else ""))
        return float(value)

    def flag(self) -> bool:
        """Return a boolean.

        Returns:
            The boolean.

        Raises:
            InvalidInput: the value is not one.
        """
        if not isinstance(self.value, bool):
            raise self.wrong("true or false")
        return self.value

    def matches(self, form: Any) -> Any:
        """Check the value, and all that is in it, against a form.

        Args:
            form: a type or a tuple of types; a dict of forms by key, where a key that ends in "?" may be absent and "*" stands
                for every key; a list of one form, that of each element; or a list of several forms, of as many elements.

        Returns:
            The value.

        Raises:
            InvalidInput: the value has another form.
        """
        if isinstance(form, dict):
            found = self.mapping()
            for key, inner in form.items():
                name = key.removesuffix("?")
                for k in found if key == "*" else [name]:
                    if k in found:
                        self._part(k, found[k]).matches(inner)
                    elif k == key:
                        raise self._part(k, None).error("is missing")
        elif isinstance(form, list):
            parts = self.parts() if len(form) == 1 else self.parts(len(form), len(form))
            for part, inner in zip(parts, form if len(form) > 1 else form * len(parts), strict=True):
                part.matches(inner)
        elif not isinstance(self.value, form) or (isinstance(self.value, bool) and form in (int, float)):
            kinds = form if isinstance(form, tuple) else (form,)
            raise self.wrong(" or ".join(_KINDS[k] for k in kinds))
        return self.value


def read_document(path: str | os.PathLike[str], code: str, hint: str = "") -> Document:
    """Read a file that is a JSON document.

    Args:
        path: the path of the file.
        code: the code of errors about it.
        hint: the hint of these errors.

    Returns:
        The document.

    Raises:
        InvalidInput: the file cannot be read, or is not a document as `parse_document` requires.
        ResourceExhausted: it is larger than `DOCUMENT` or has more values than `VALUES`.
    """
    return parse_document(read_bytes(path, code, DOCUMENT), shown_path(path), code, hint)


def parse_document(
    data: bytes | bytearray | str, where: str, code: str, hint: str = "", *, most: int = DOCUMENT, values: int = VALUES
) -> Document:
    """Parse a JSON document.

    Args:
        data: its bytes or its text.
        where: what the document is, for messages.
        code: the code of errors about it.
        hint: the hint of these errors.
        most: the maximum bytes, or characters of a text.
        values: the maximum number of values.

    Returns:
        The document.

    Raises:
        InvalidInput: it is not UTF-8 or not JSON, an object has a key twice, a text has a surrogate, an integer has more than 40
            digits, or lists and objects are nested deeper than `DEPTH`.
        ResourceExhausted: it is larger than `most` or has more values than `values`.
    """
    check_size(len(data), most, where)
    count = sum(data.count(mark) for mark in "[{,:") if isinstance(data, str) else sum(data.count(mark) for mark in b"[{,:")
    if count > values:
        raise ResourceExhausted(f"{where} has about {count} values; the limit for a document is {values}", code="SX600")
    with typed(where, code):
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        if _is_deep(text):
            raise InvalidInput(f"{where}: it must not be nested deeper than {DEPTH} lists and objects", code=code, hint=hint)
        document = Document(json.loads(text, object_pairs_hook=_object), where, code, hint)
    fault = _fault(document.value, DEPTH)
    if fault is not None:
        rule, keys = fault
        for key in reversed(keys):
            document = document._part(key, None)
        raise document.error(rule)
    return document


_NO_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+\\?(?:"|\Z)|[^]["{}]++', re.DOTALL)
"""A text, to its end if it has one, or characters between texts and brackets."""

_PAIR = re.compile(r"\[\]|\{\}")

_SAFE = 4 * DEPTH
"""The depth that `json.loads` may reach: at Python's limit, a finalizer that happens to run there fails."""


def _is_deep(text: str) -> bool:
    """Whether the brackets of a text are nested deeper than `_SAFE`."""
    if text.count("[") + text.count("{") <= _SAFE:
        return False
    marks = _NO_BRACKETS.sub("", text)
    for _ in range(_SAFE):  # each removes the innermost level
        if not marks:
            return False
        marks = _PAIR.sub("", marks)
    depth = 0
    for mark in marks:  # what has no partner
        depth = depth + 1 if mark in "[{" else 0
        if depth > _SAFE:
            return True
    return _PAIR.search(marks) is not None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Twice:
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        return _Twice(next(key for key, _ in pairs if counts[key] > 1))
    return found


def _fault(value: Any, depth: int) -> tuple[str, list[str | int]] | None:
    """The rule that a value or a part of it breaks, and the keys that lead to it, the last first."""
    if isinstance(value, (dict, list)):
        if not depth:
            return f"must not be nested deeper than {DEPTH} lists and objects", []
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in pairs:
            if isinstance(key, str) and not key.isascii() and _SURROGATE.search(key):
                return f"must have keys of Unicode text, got {_shown(key)}", []
            if part is None or part is True or part is False or type(part) is float:
                continue
            fault = _fault(part, depth - 1)
            if fault is not None:
                fault[1].append(key)
                return fault
    elif isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            return f"must be Unicode text without surrogates, got {_shown(value)}", []
    elif isinstance(value, _Twice):
        return f"has the key {_shown(value.key)} twice", []
    elif isinstance(value, int) and not -_WIDEST < value < _WIDEST:
        return "must be a number of at most 40 digits", []
    return None


_KINDS: dict[type, str] = {
    dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "an integer", float: "a number",
    type(None): "null",
}  # fmt: skip


def _step(key: str | int) -> str:
    """A key as a path has it."""
    if isinstance(key, int):
        return f"[{key}]"
    return f".{key}" if _PLAIN.fullmatch(key) else f"[{json.dumps(key[:60])}]"


def _shown(value: Any) -> str:
    """A value as a message has it."""
    if value is None or isinstance(value, (bool, dict, list)):
        return _KINDS[type(value)] if isinstance(value, (dict, list)) else json.dumps(value)
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}... ({len(value)} characters)"
    return repr(value)
