"""What plans answer if they cannot compute a run."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.graph import Node


class Mismatch(Exception):
    """A run has returned a value of another shape or kind than the trace: the call must end a segment.

    Attributes:
        call: the call.
        is_unnamed: whether only the names of its sizes do not follow.
    """

    def __init__(self, call: Node, is_unnamed: bool = False) -> None:
        super().__init__(call.op_type)
        self.call, self.is_unnamed = call, is_unnamed


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
