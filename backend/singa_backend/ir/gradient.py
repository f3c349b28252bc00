"""The gradient of a call as one call, whose body is what the operator's rule writes.

A node of the domain `ai.singa.gradient` calls the gradient of the operator of its name.  Its inputs are the gradients of the
outputs, then the inputs, then the outputs of the call that was differentiated, absent ones included; it returns the gradients
that the rule returns.  Whatever has no kernel for it uses the body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .versioned import VersionedOperator

GRADIENT = "ai.singa.gradient"
"""The domain of the gradients of calls."""

T = TypeVar("T")


@dataclass(eq=False)
class Gradient:
    """The gradient of a call of an operator: of a node that computes it, or of the nodes that its rule has written.

    Only the first of these has outputs, places and a body.

    Attributes:
        operator: the operator that was differentiated.
        name: the first result of its call that has a name, or the first input.
        attributes: those that its call sets.
        outputs: the number of the outputs of its call.
        places: for each result of the node, the place of the input of the call whose gradient it is.
        write: returns the body of the node, a Graph; None if a file has the body, or the rule has written its nodes at once.
    """

    operator: VersionedOperator
    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 0
    places: tuple[int, ...] = ()
    write: Callable[[], Any] | None = None

    @property
    def function_name(self) -> str:
        """The name of the function that a node calls, without the number of a form: the operator and its version."""
        return f"{self.operator.declaration.name}_{self.operator.version}"

    def __getstate__(self) -> dict[str, Any]:
        """Support pickle, for a node whose body is known."""
        return {**self.__dict__, "write": None}

    def split(self, values: Sequence[T]) -> tuple[Sequence[T], Sequence[T], Sequence[T]]:
        """The inputs of the node as the gradients of the outputs, the inputs, and the outputs of the call."""
        return values[: self.outputs], values[self.outputs : len(values) - self.outputs], values[len(values) - self.outputs :]
