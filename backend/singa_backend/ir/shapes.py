"""Shapes and sizes before a graph runs: numbers, and names of unknown ones; sizes of one name are equal.

Rules of inference are declared with their operators: `Declaration.shapes` and `Declaration.sizes` (see operators/_shapes.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

Dim = int | str
"""A size, or the name of an unknown one."""
Shape = tuple[Dim, ...]
Known = Dim | Shape
"""A computed size, or a vector of sizes."""

MOST = 64
"""Elements of a vector of sizes."""

V = TypeVar("V")


class KnownShapes(Protocol[V]):
    """What is known of the values before a call: what a rule of inference may ask."""

    def shape(self, value: V) -> Shape | None:
        """The shape of a value; None if its rank is not known."""

    def sizes(self, value: V) -> Known | None:
        """A value that is a size or a vector of sizes; None if it is not known."""

    def fresh(self) -> str:
        """A name for an unknown size."""

    def attribute(self, call: Any, name: str, default: Any = None) -> Any:
        """An attribute; `default` if the call and its schema have none."""

    def input(self, call: Any, index: int) -> V | None:
        """An input of a call; None for an absent one."""


ShapesRule: TypeAlias = Callable[[KnownShapes[Any], Any], Shape | list[Shape | None] | None]
"""(what is known, the call) -> the shape of the first output, a list of those of all outputs, or None if it is not known."""
SizesRule: TypeAlias = Callable[[KnownShapes[Any], Any], Known | None]
"""(what is known, the call) -> the sizes that the first output holds; None if they are not known."""


def is_known(sizes: Known) -> bool:
    """Whether sizes are known as numbers."""
    return all(isinstance(n, int) for n in sizes) if isinstance(sizes, tuple) else isinstance(sizes, int)


def broadcast(a: Dim, b: Dim) -> Dim | None:
    """The size of two sizes broadcast; None if it is not known."""
    if a == b or b == 1:
        return a
    if a == 1:
        return b
    if isinstance(a, int) and isinstance(b, int):
        return None  # an error when it runs
    return a if isinstance(a, int) else b if isinstance(b, int) else None


def broadcast_shapes(known: KnownShapes[Any], shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape of shapes broadcast; None if one is not known."""
    rank = 0
    for shape in shapes:
        if shape is None:
            return None
        rank = max(rank, len(shape))
    made: list[Dim] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape or (), rank - len(shape or ())):
            found = broadcast(made[i], size)
            made[i] = known.fresh() if found is None else found
    return tuple(made)


def total(shape: Sequence[Dim], fresh: Callable[[], str]) -> Dim:
    """The number of elements of a shape."""
    known, names = math.prod(d for d in shape if isinstance(d, int)), [d for d in shape if isinstance(d, str)]
    return known if not names else names[0] if len(names) == 1 and known == 1 else fresh()


def valid_axes(axes: Sequence[Any], rank: int) -> tuple[int, ...] | None:
    """Axes counted from the front; None if one is not a number, out of range or repeated: the call is not valid."""
    if not all(isinstance(a, int) and -rank <= a < rank for a in axes):
        return None
    found = tuple(a % rank for a in axes)
    return found if len(set(found)) == len(found) else None


def places(size: int, start: int, end: int, step: int) -> range:
    """The places of an axis that a Slice takes: its ends are clamped, those of Python's slices are not with a negative step."""
    start, end = (i + size if i < 0 else i for i in (start, end))
    if step > 0:
        return range(min(max(start, 0), size), min(max(end, 0), size), step)
    return range(min(max(start, 0), size - 1), min(max(end, -1), size - 1), step)


def listed(known: KnownShapes[Any], call: Any, name: str, index: int) -> tuple[bool, tuple[Dim, ...] | None]:
    """A list of integers of a call, an attribute in some versions and an input in others: (whether it is given, its value).

    (True, None): an input that is not known.
    """
    given, source = known.attribute(call, name), known.input(call, index)
    if given is not None or source is None:
        return given is not None, None if given is None else tuple(int(n) for n in given)
    found = known.sizes(source)
    return True, found if isinstance(found, tuple) else None


def integers(known: KnownShapes[Any], call: Any, name: str, index: int) -> tuple[bool, tuple[int, ...] | None]:
    """As `listed`, but None for integers of which one is not known."""
    given, found = listed(known, call, name, index)
    return given, tuple(n for n in found if isinstance(n, int)) if found is not None and is_known(found) else None
