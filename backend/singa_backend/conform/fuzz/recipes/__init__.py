"""How to draw a valid node of each operator: a recipe per operator, found here by domain and name.

A custom operator without a recipe is drawn from its schema (defaults.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

from ....ir.declaration import declarations
from ..strategies import Draw

Recipe = Callable[[Draw], None]

FAMILIES = (
    "control", "elementwise", "indexing", "learning", "linear", "neural", "numbers", "shaping", "text", "windows",
)  # fmt: skip
RECIPES: dict[tuple[str, str], Recipe] = {}


def recipe(names: str, domain: str = "") -> Callable[[Recipe], Recipe]:
    """Register a recipe for the operators named, separated by blanks; raises ValueError for a second one."""

    def register(function: Recipe) -> Recipe:
        for name in names.split():
            if (domain, name) in RECIPES:
                raise ValueError(f"{name} has two recipes")
            RECIPES[domain, name] = function
        return function

    return register


@cache
def _written() -> dict[tuple[str, str], Recipe]:
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
    return RECIPES


def load() -> dict[tuple[str, str], Recipe]:
    """All recipes; for a custom operator that has none the default one, where its schema is enough to draw a valid node."""
    from .defaults import default, drawable

    return {key: default for key in declarations if key not in _written() and drawable(*key)} | _written()
