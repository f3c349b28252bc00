"""The tracer: runs the calls of a region once, chooses a kernel for each, and records the steps as a plan."""

from .open import NotOpen
from .segment import Cache, Continuation, History, Mismatch, OpaqueValue, PlanFacts, Segment, SharedValues, State
from .walk import Tracer

__all__ = [
    "Cache",
    "Continuation",
    "History",
    "Mismatch",
    "NotOpen",
    "OpaqueValue",
    "PlanFacts",
    "Segment",
    "SharedValues",
    "State",
    "Tracer",
]
