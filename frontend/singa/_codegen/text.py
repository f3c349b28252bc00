"""Formats Python text as a formatter does: names, literals, and statements with line breaks."""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from onnx import TensorProto

from singa_backend import dtypes
from singa_backend.proto.messages import FreshNames

WIDTH = 130

_LONGEST = 48
"""Maximum characters of an identifier."""

_READ = 4096
"""Characters at the end of a name that an identifier is made of."""

SMALL = 8
"""Maximum elements of an array in the text."""


@dataclass(frozen=True)
class Bracketed:
    """An expression in brackets: a call, a list.  literal: a list or tuple, which is broken into one element per line."""

    open: str
    items: tuple[Expr, ...]
    close: str = ")"
    literal: bool = False


Expr: TypeAlias = str | Bracketed


def call(function: str, items: Iterable[Expr]) -> Bracketed:
    """A call with these arguments; keyword arguments include their name: `axis=1`."""
    return Bracketed(f"{function}(", tuple(items))


def named(name: str, value: Expr) -> Expr:
    """A keyword argument."""
    return f"{name}={value}" if isinstance(value, str) else replace(value, open=f"{name}={value.open}")


def flat(expr: Expr) -> str:
    """An expression on one line."""
    return expr if isinstance(expr, str) else expr.open + ", ".join(map(flat, expr.items)) + expr.close


def lines(prefix: str, expr: Expr, indent: int = 0, suffix: str = "") -> list[str]:
    """`prefix expr suffix`, on one line if it fits; otherwise the arguments on the next line, or each on a separate line."""
    pad = " " * indent
    one = pad + prefix + flat(expr) + suffix
    if len(one) <= WIDTH or isinstance(expr, str) or not expr.items:
        return [one]
    together = " " * (indent + 4) + ", ".join(map(flat, expr.items))
    if expr.literal or len(together) > WIDTH:
        body = [line for item in expr.items for line in lines("", item, indent + 4, ",")]
    else:
        body = [together]
    return [pad + prefix + expr.open, *body, pad + expr.close + suffix]


def statement(prefix: str, expr: Expr, indent: int, comment: str = "") -> list[str]:
    """A statement with a comment at its end, or above it if the line is too long."""
    made = lines(prefix, expr, indent)
    if not comment:
        return made
    if len(made) == 1 and len(made[0]) + 4 + len(comment) <= WIDTH:
        return [f"{made[0]}  # {comment}"]
    return [f"{' ' * indent}# {comment}", *made]


# --- names ------------------------------------------------------------------------------------------------------------


def cleaned(name: str, fallback: str) -> str:
    """Convert an ONNX name to a lower-case identifier; `fallback` is the prefix of a digit, and replaces an empty name.

    Exporters name by path: `/blocks/blocks.0/conv/Conv_output_0` is `blocks_0_conv`.  The end of a long name is kept.
    """
    parts = [p for p in name.removesuffix("_output_0")[-_READ:].split("/") if p]
    kept = [p for i, p in enumerate(parts) if not any(after.lower().startswith(p.lower()) for after in parts[i + 1 : i + 2])]
    words = re.sub(r"[^0-9A-Za-z]+", "_", "_".join(kept)).strip("_").lower().split("_")
    while len(words) > 1 and sum(map(len, words)) + len(words) > _LONGEST:
        del words[0]
    text = "_".join(words)[:_LONGEST]
    return text if text[:1].isalpha() else f"{fallback}_{text}".strip("_")


class Identifiers:
    """Creates unique identifiers: `a.b` and `a_b` become `a_b` and `a_b_2`."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._names = FreshNames({*taken, *keyword.kwlist, *keyword.softkwlist, *dir(builtins)}, first=2)

    def new(self, name: str, fallback: str = "value") -> str:
        """An identifier that is not in use, as similar to the name as possible."""
        return self._names.new(cleaned(name, fallback))


# --- literals ---------------------------------------------------------------------------------------------------------


def quoted(text: str) -> str:
    """A string literal of ASCII characters, in the quotes that need fewer escapes."""
    body = ascii(text)[1:-1].replace("\\'", "'")
    if text.count('"') > text.count("'"):
        return "'" + body.replace("'", "\\'") + "'"
    return '"' + body.replace('"', '\\"') + '"'


def shortened(text: str, most: int = 80) -> str:
    """Quote and shorten a name for a comment."""
    return quoted(text if len(text) <= most else text[: most - 3] + "...")


def number(value: Any, dtype: dtypes.DTypeLike = np.float64) -> str:
    """A number literal: the shortest text with the same value in its dtype."""
    kind = np.dtype(dtype)
    if kind == np.bool_:
        return str(bool(value))
    if kind.kind in "iu":
        return str(int(value))
    if math.isnan(value):
        return "np.nan"
    if math.isinf(value):
        return "np.inf" if value > 0 else "-np.inf"
    shortest = str(np.dtype(np.float32).type(value)) if kind == np.float32 else repr(float(value))
    return shortest.replace("e+", "e")


def nested(value: Any, dtype: dtypes.DTypeLike) -> str:
    """A number, or lists of numbers."""
    return f"[{', '.join(nested(v, dtype) for v in value)}]" if isinstance(value, list) else number(value, dtype)


def array_text(array: np.ndarray) -> str | None:
    """A small array as a number or as lists; None if it is large, or its dtype has no literals."""
    kind = array.dtype
    plain = kind.kind in "biu" or kind in (np.float16, np.float32, np.float64)
    if not plain or kind.type.__module__ != "numpy" or not 0 < array.size <= SMALL or array.ndim > 4:
        return None
    return nested(array.tolist(), kind)


def dtype_text(dtype: dtypes.DTypeLike) -> str:
    """The expression of a dtype: `np.float32`, `ml_dtypes.bfloat16`."""
    kind = np.dtype(dtype)
    if kind == dtypes.STRING:
        return "object"
    if kind == np.bool_:
        return "np.bool_"
    return f"{'np' if kind.type.__module__ == 'numpy' else 'ml_dtypes'}.{kind.name}"


def code_text(code: int) -> str:
    """The expression of an ONNX element type: `TensorProto.FLOAT`."""
    return f"TensorProto.{TensorProto.DataType.Name(code)}" if dtypes.is_code(code) else str(code)


def sequence(items: Sequence[Expr]) -> Bracketed:
    """A list."""
    return Bracketed("[", tuple(items), "]", literal=True)


def tuple_of(items: Sequence[Expr]) -> Expr:
    """A tuple; one of a single item is never broken."""
    return f"({flat(items[0])},)" if len(items) == 1 else Bracketed("(", tuple(items), literal=True)
