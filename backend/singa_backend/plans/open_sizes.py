"""Which sizes of a model are open: those that plans compute with names, and the lengths of caches that grow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import dtypes
from ..ir import graph as ir
from ..ir.declaration import caches_of
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
            named = [self.name(index, a, len(shape)) is not None for a in range(len(shape))]
            made.append((kind, tuple(None if n and d >= LOWEST else d for n, d in zip(named, shape, strict=True)), dtype))
        return tuple(made)


def growing_caches(graph: ir.Graph) -> dict[ir.Value, int]:
    """The inputs of a graph whose elements one call reads, to append others; its result is an output.  With the axis.

    The call is a Concat, or of an operator that declares its caches.
    """
    outputs, given = Counter(graph.outputs), set(graph.inputs)
    grown: list[tuple[ir.Value | None, ir.Value | None, int]] = [
        (c.inputs[0], c.outputs[0], c.attributes["axis"]) for c in graph.nodes if c.is_("Concat") and len(c.inputs) > 1
    ]
    for call in graph.nodes:
        for i, o in caches_of(call.domain, call.op_type).items():
            if i < len(call.inputs) and o < len(call.outputs):
                grown.append((call.inputs[i], call.outputs[o], -2))

    def uses(value: ir.Value) -> int:
        return sum(not (isinstance(user, ir.Node) and user.is_("Shape")) for user, _ in value.uses)

    return {i: axis for i, o, axis in grown if i in given and i is not None and o is not None and uses(i) == 1 == outputs[o]}


def grown_axes(key: Any, other: Any) -> tuple[tuple[int, int], ...]:
    """The axes in which inputs differ from those of a plan, with the input.

    The past of generated text grows, and its mask; most steps of a plan do not depend on it.

    Returns:
        (input, axis) for each; none unless all lengths differ by the same number, in at most one axis of an input, and at
        least one input does not differ.
    """
    if other is None or len(key) != len(other):
        return ()
    axes: list[tuple[int, int]] = []
    differences: set[int] = set()
    for n, (new, old) in enumerate(zip(key, other, strict=True)):
        if new is None or new[2] == dtypes.STRING or new[2] != old[2] or len(new[1]) != len(old[1]):
            return ()
        found = [(axis, a - b) for axis, (a, b) in enumerate(zip(new[1], old[1], strict=True)) if a != b]
        if len(found) > 1:
            return ()
        axes += [(n, axis) for axis, _ in found]
        differences.update(d for _, d in found)
    return tuple(axes) if len(differences) == 1 and len(axes) < len(key) else ()
