"""How to draw a valid node of each operator: a recipe per operator, found here by domain and name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module

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
def load() -> dict[tuple[str, str], Recipe]:
    """All recipes."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
    return RECIPES
