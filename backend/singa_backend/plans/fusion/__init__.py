"""Fusion: rewrites of the graphs of plans, one file for each family of patterns, and the list of them in order."""

from .pipeline import LEVEL_1, LEVEL_2, PASSES, fuse

__all__ = ["LEVEL_1", "LEVEL_2", "PASSES", "fuse"]
