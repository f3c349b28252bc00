"""The tracer: runs the calls of a graph once, chooses a kernel for each, and records the steps as a plan."""

from ...kernels.values import OpaqueValue
from .exact import OtherSteps
from .open import NotOpen, attends
from .segment import Cache, Continuation, DynamicCall, PlanFacts, PlanTrace, RunState, Segment, SharedValues
from .walk import Tracer

__all__ = [
    "Cache",
    "Continuation",
    "DynamicCall",
    "NotOpen",
    "OpaqueValue",
    "OtherSteps",
    "PlanFacts",
    "PlanTrace",
    "RunState",
    "Segment",
    "SharedValues",
    "Tracer",
    "attends",
]
