"""Shapes and sizes before a graph runs: numbers, and names of unknown ones; sizes of one name are equal.

Rules of inference are declared with their operators: `Declaration.shapes`, `Declaration.sizes` and `Declaration.dtypes` (see
operators/_shapes.py).  The builder writes into files what they infer: the numbers, and the names that the inputs have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from ..errors import InvalidModel, OperatorError

Dim = int | str
"""A size, or the name of an unknown one."""
Shape = tuple[Dim, ...]
Known = Dim | Shape
"""A computed size, or a vector of sizes."""

MOST = 64
"""Elements of a vector of sizes."""

FRESH = "?"
"""The first character of the names that rules make: a file does not state these sizes."""

MOST_AXES = 64
"""The highest rank of a shape of which only the rank is known."""

V = TypeVar("V")


class Unsure(ValueError):
    """A call is not valid, or no rule covers it."""


FAILURES = (ArithmeticError, LookupError, TypeError, ValueError, OperatorError, InvalidModel)
"""What a rule raises for a call that is not valid: it fails when it runs."""


class KnownShapes(Protocol[V]):
    """What is known of the values before a call: what a rule of inference may ask."""

    def shape(self, value: V) -> Shape | None:
        """The shape of a value; None if its rank is not known."""

    def sizes(self, value: V) -> Known | None:
        """A value that is a size or a vector of sizes; None if it is not known."""

    def dtype(self, value: V) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""

    def constant(self, value: V) -> np.ndarray | None:
        """A value that is a constant tensor; None for any other."""

    def fresh(self) -> str:
        """A name for an unknown size."""

    def version(self, call: Any) -> int:
        """The schema version of a call."""

    def attribute(self, call: Any, name: str, default: Any = None) -> Any:
        """An attribute; `default` if the call and its schema have none."""

    def input(self, call: Any, index: int) -> V | None:
        """An input of a call; None for an absent one."""


ShapesRule: TypeAlias = Callable[[KnownShapes[Any], Any], Shape | list[Shape | None] | None]
"""(what is known, the call) -> the shape of the first output, a list of those of all outputs, or None if it is not known.

A rule raises one of `FAILURES` for a call that is not valid: then nothing is known of the outputs.
"""
SizesRule: TypeAlias = Callable[[KnownShapes[Any], Any], Known | None]
"""(what is known, the call) -> the sizes that the first output holds; None if they are not known."""
DtypesRule: TypeAlias = Callable[[KnownShapes[Any], Any], "np.dtype[Any] | None"]
"""(what is known, the call) -> the dtype of the first output, if the schema does not bind it; None if it is not known."""


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


def is_fresh(size: Dim) -> bool:
    """Whether a size has a name that a rule made: the type of an input has none."""
    return isinstance(size, str) and size.startswith(FRESH)


def open_shape(known: KnownShapes[Any], rank: Any) -> Shape | None:
    """A shape of unknown sizes; None if the rank is not known, or large."""
    if isinstance(rank, int) and rank < 0:
        raise Unsure
    return tuple(known.fresh() for _ in range(rank)) if isinstance(rank, int) and rank <= MOST_AXES else None


def same_size(sizes: Sequence[Dim]) -> Dim:
    """One of sizes that are equal: a number, or else a name that an input has."""
    return next((d for d in sizes if isinstance(d, int)), next((d for d in sizes if not is_fresh(d)), sizes[0]))


def agree(shape: Sequence[Dim], other: Sequence[Dim]) -> bool:
    """Whether two shapes have one rank, and no numbers that differ."""
    return len(shape) == len(other) and all(
        a == b or not (isinstance(a, int) and isinstance(b, int)) for a, b in zip(shape, other, strict=True)
    )


def broadcast_shapes(known: KnownShapes[Any], shapes: Sequence[Shape | None]) -> Shape | None:
    """The shape of shapes broadcast; None if one is not known."""
    if shapes and all(s == shapes[0] for s in shapes):
        return shapes[0]
    rank = 0
    for shape in shapes:
        if shape is None:
            return None
        rank = max(rank, len(shape))
    made: list[Dim] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape or (), rank - len(shape or ())):
            found = broadcast(made[i], size)
            if found is None and isinstance(size, int) and isinstance(made[i], int):
                raise Unsure
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


# --- rules of traits ----------------------------------------------------------------------------------------------------


def same_shape(known: KnownShapes[Any], call: Any) -> Shape | None:
    """The shape of the first input."""
    return known.shape(call.inputs[0])


def _along_axis(known: KnownShapes[Any], call: Any) -> Shape | None:
    """The shape of the first input, which has the axis of `axis` if there is one."""
    shape, axis = known.shape(call.inputs[0]), known.attribute(call, "axis")
    if shape is not None and axis is not None and not -len(shape) <= axis < len(shape):
        raise Unsure
    return shape


def _broadcast_inputs(known: KnownShapes[Any], call: Any) -> Shape | None:
    return broadcast_shapes(known, [known.shape(i) for i in call.inputs])


def _reduced(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, (given, axes), keep = known.shape(call.inputs[0]), listed(known, call, "axes", 1), known.attribute(call, "keepdims", 1)
    if keep not in (0, 1):
        raise Unsure
    if shape is None:
        return None
    if given and axes is None:
        return open_shape(known, len(shape)) if keep else None
    if not axes and not known.attribute(call, "noop_with_empty_axes"):
        axes = tuple(range(len(shape)))
    gone = valid_axes(axes or (), len(shape))
    if gone is None:
        raise Unsure
    return tuple(1 if i in gone else d for i, d in enumerate(shape) if keep or i not in gone)


RULES_OF_TRAITS: Mapping[str, ShapesRule] = {
    "unary": same_shape,
    "shape_of_first": _along_axis,
    "broadcasting": _broadcast_inputs,
    "reduction": _reduced,
}
"""The rules of operators that declare none, by a trait."""
