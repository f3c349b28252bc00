"""Which sizes of a model are open: plans compute with names for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..ir import graph as ir
from ..ir.sizes import LOWEST


class PlanForm(NamedTuple):
    """The key of a plan for open sizes.

    Attributes:
        pattern: the types, shapes and dtypes of the inputs, with None for each open size.
        number: of the plan: each makes other assumptions.
    """

    pattern: Any
    number: int


class OpenAxes:
    """The axes of inputs whose sizes a model leaves open."""

    def __init__(self, graph: ir.Graph) -> None:
        self._declared: list[tuple[str, Sequence[Any] | None] | None] = []
        for v in graph.inputs:
            d = v.declared
            self._declared.append((v.name, None if d is None else d.shape) if d is None or d.kind == "tensor" else None)

        self._is_named: dict[tuple[int, int], list[bool]] = {}  # by the input and the rank

    def name(self, index: int, axis: int, rank: int) -> str | None:
        """A name of a size, which equal ones share; None if the model states a number.

        Args:
            index: of the input.
            axis: the axis.
            rank: of the input.
        """
        declared = self._declared[index]
        if declared is None:
            return None
        name, shape = declared
        size = shape[axis] if shape is not None and len(shape) == rank else None
        return None if isinstance(size, int) else size if isinstance(size, str) else f"{name}[{axis}]"

    def pattern(self, key: Any) -> Any:
        """What plans for open sizes depend on: the dtypes and ranks, and the sizes that have no name, or are 0 or 1.

        Args:
            key: the type, the shape and the dtype of each input; None for one that is not an array.

        Returns:
            The same with None for each open size; None if an input is not an array.
        """
        made = []
        for index, one in enumerate(key):
            if one is None:
                return None
            kind, shape, dtype = one
            named = self._is_named.get((index, len(shape)))
            if named is None:
                named = [self.name(index, a, len(shape)) is not None for a in range(len(shape))]
                self._is_named[index, len(shape)] = named
            made.append((kind, tuple([None if n and d >= LOWEST else d for n, d in zip(named, shape, strict=True)]), dtype))
        return tuple(made)
