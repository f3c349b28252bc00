"""Recipes that draw a valid node of each operator, by domain and name (registry.py)."""

from . import control, elementwise, indexing, learning, linear, neural, numbers, shaping, text, windows
from .registry import RECIPES, Recipe, load, recipe

__all__ = [
    "RECIPES", "Recipe", "control", "elementwise", "indexing", "learning", "linear", "load", "neural", "numbers", "recipe",
    "shaping", "text", "windows",
]  # fmt: skip
