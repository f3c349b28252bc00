"""Names that a family of onnxruntime's operators imports to declare them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...interpreters.evaluate import computed_by_body
from ...ir.declaration import Declaration, undeclared
from ...proto.schemas import LAX, MICROSOFT
from .._api import BOOL, INT, Array, Host, Ints, Op, V, Version, Wanted, Xp, operator
from . import _schemas as _schemas  # declares the schemas, which a declaration needs

microsoft: Callable[..., Callable[[Callable[..., Any]], Declaration]] = partial(
    operator, domain=MICROSOFT, by_body=computed_by_body
)
"""`operator` for the domain com.microsoft: @microsoft("Gelu", 1)."""

lax: Callable[..., Callable[[Callable[..., Any]], Declaration]] = partial(operator, domain=LAX, by_body=computed_by_body)
"""`operator` for what onnxruntime reads in ONNX's domain: @lax("Affine", 1)."""


def not_declared(reason: str, *names: str) -> None:
    """Record why operators of com.microsoft are not declared, and what can be done."""
    undeclared.update({(MICROSOFT, name): reason for name in names})


__all__ = [
    "BOOL",
    "INT",
    "Array",
    "Host",
    "Ints",
    "Op",
    "V",
    "Version",
    "Wanted",
    "Xp",
    "lax",
    "microsoft",
    "not_declared",
]
