"""What plans answer: why they cannot compute a run, or that they are bound to it."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Node


class Mismatch(Exception):
    """A run has returned a value of another shape or kind than the trace: the call must end a segment."""

    def __init__(self, call: Node) -> None:
        super().__init__(call.op_type)
        self.call = call


@dataclass(frozen=True)
class UseDefinitions:
    """The answer of plans that cannot compute a run.

    Attributes:
        reason: why; a clause without a full stop.
    """

    reason: str


OTHER_SIZES = UseDefinitions("a plan assumes other sizes")
NOT_FINITE = UseDefinitions("an input has a NaN or an infinity, and kernels of the plan need finite inputs")
EXCEEDS = UseDefinitions("the plan exceeds a limit of the run")
REFUSED = UseDefinitions("a kernel refused a value, and the definitions report the error or compute the result")
MOVING = UseDefinitions("sizes of results differ between runs of equal shapes")
MEMORY = UseDefinitions("the plan needs more memory than the limits permit")

BOUND: list[int] = []
"""In place of the sizes of a run: the steps are bound to them."""
