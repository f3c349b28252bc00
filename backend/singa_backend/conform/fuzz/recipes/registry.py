"""The recipes by domain and name: how to draw a valid node of each operator.

A custom operator without a recipe is drawn from its schema (defaults.py).
"""

from __future__ import annotations

from collections.abc import Callable

from ....ir.declaration import declarations
from ....proto.schemas import LAX, MICROSOFT, is_private, load_domain
from ..strategies import Draw
from .defaults import default, drawable

Recipe = Callable[[Draw], None]

_ONNXRUNTIME = (MICROSOFT, LAX)

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


def load(select: str = "") -> dict[tuple[str, str], Recipe]:
    """Return the recipes of the families, and the default one for custom operators of every model that it can draw.

    Args:
        select: An expression that selects operators; one that names com.microsoft has the recipes of onnxruntime's operators,
            which other selections leave out.
    """
    if MICROSOFT in select:
        load_domain(MICROSOFT)
        return {key: recipe for key, recipe in RECIPES.items() if key[0] in _ONNXRUNTIME}
    known = (key for key in declarations if key not in RECIPES and not is_private(key[0]) and key[0] != MICROSOFT)
    own = {key: recipe for key, recipe in RECIPES.items() if key[0] not in _ONNXRUNTIME}
    return {key: default for key in known if drawable(*key)} | own


def recipe_of(domain: str, name: str) -> Recipe:
    """Return the recipe of an operator; the default one if it has none."""
    return RECIPES.get((domain, name), default)
