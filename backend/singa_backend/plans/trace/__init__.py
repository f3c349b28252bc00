"""The tracer: runs the calls of a region once, chooses a kernel for each, and records the steps as a plan."""

from .open import NotOpen
from .segment import Cache, Facts, History, Loose, Mismatch, Point, Segment, State
from .walk import Tracer

__all__ = ["Cache", "Facts", "History", "Loose", "Mismatch", "NotOpen", "Point", "Segment", "State", "Tracer"]
