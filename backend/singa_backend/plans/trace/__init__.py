"""The tracer: runs the calls of a graph once, chooses a kernel for each, and records the steps as a plan."""

from ...kernels.values import OpaqueValue
from .exact import OtherSteps
from .segment import Continuation, DynamicCall, PlanFacts, RunState, Segment, SharedValues
from .walk import Tracer

__all__ = [
    "Continuation",
    "DynamicCall",
    "OpaqueValue",
    "OtherSteps",
    "PlanFacts",
    "RunState",
    "Segment",
    "SharedValues",
    "Tracer",
]
