"""The recipes by domain and name: how to draw a valid node of each operator.

A custom operator without a recipe is drawn from its schema (defaults.py).
"""

from __future__ import annotations

from collections.abc import Callable

from ....ir.declaration import declarations
from ....proto.schemas import is_private
from ..strategies import Draw
from .defaults import default, drawable

Recipe = Callable[[Draw], None]

RECIPES: dict[tuple[str, str], Recipe] = {}


def recipe(names: str, domain: str = "") -> Callable[[Recipe], Recipe]:
    """Register a recipe for operators, named in one string separated by blanks; raises ValueError for a second one."""

    def register(function: Recipe) -> Recipe:
        for name in names.split():
            if (domain, name) in RECIPES:
                raise ValueError(f"{name} has two recipes")
            RECIPES[domain, name] = function
        return function

    return register


def load() -> dict[tuple[str, str], Recipe]:
    """Return all recipes: those of the families, and the default one for custom operators of every model that it can draw."""
    known = (key for key in declarations if key not in RECIPES and not is_private(key[0]))
    return {key: default for key in known if drawable(*key)} | RECIPES
