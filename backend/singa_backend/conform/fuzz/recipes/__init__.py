"""Recipes that draw a valid node of each operator, by domain and name (registry.py)."""

from . import control, elementwise, indexing, learning, linear, microsoft, neural, numbers, shaping, text, windows
from .registry import RECIPES, Recipe, load, recipe, recipe_of

__all__ = [
    "RECIPES", "Recipe", "control", "elementwise", "indexing", "learning", "linear", "load", "microsoft", "neural", "numbers",
    "recipe", "recipe_of", "shaping", "text", "windows",
]  # fmt: skip
