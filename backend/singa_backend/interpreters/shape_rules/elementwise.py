"""Rules of elementwise operators, and of others whose output has the shape of the first input."""

from __future__ import annotations

from collections.abc import Sequence

from .call import Type, TypedCall, Unsure, broadcast, covers, may_be

OLDEST = 6
"""Schema versions up to this one are left to onnx: their binary operators broadcast by attributes."""


@covers("Softplus", "LRN", "LpNormalization", "CumSum", "Trilu", "MeanVarianceNormalization", "InstanceNormalization")
def of_first(c: TypedCall) -> Sequence[Type]:
    """The type of the first input; of booleans if the schema returns only those."""
    returned = c.form.outputs[0]
    code = next(iter(returned)) if len(returned) == 1 else c.codes[0]
    if c.name in ("InstanceNormalization", "CumSum", "Trilu", "LpNormalization"):
        _check(c)
    return [(code, c.shapes[0])]


def _check(c: TypedCall) -> None:
    """Raise Unsure for calls whose shapes onnx's inference refuses, or may refuse."""
    if c.name == "LpNormalization":
        c.axis(c.integer("axis", -1), len(c.shape(0)))
    elif c.name == "InstanceNormalization":
        first = c.shape(0)
        if len(first) < 2 or not all(may_be(c.shape(i), (first[1],)) for i in (1, 2)):
            raise Unsure
    else:
        least, most = (2, 0) if c.name == "Trilu" else (1, 1)
        if (c.shapes[0] is not None and len(c.shapes[0]) < least) or (c.has(1) and len(c.shape(1)) > most):
            raise Unsure


@covers("Cast")
def _cast(c: TypedCall) -> Sequence[Type]:
    return [(c.integer("to", 0), c.shapes[0])]


@covers("CastLike")
def _cast_like(c: TypedCall) -> Sequence[Type]:
    return [(c.codes[1], c.shapes[0])]


@covers("PRelu")
def _prelu(c: TypedCall) -> Sequence[Type]:
    if c.version <= OLDEST:
        raise Unsure
    return [(c.codes[0], c.shapes[0])]


def broadcasting(c: TypedCall) -> Sequence[Type]:
    if c.version <= OLDEST:
        raise Unsure
    returned = c.form.outputs[0]
    code = next(iter(returned)) if len(returned) == 1 else c.codes[1 if c.name == "Where" else 0]
    shapes = [s for s in c.shapes if s is not None]
    return [(code, broadcast(shapes) if len(shapes) == len(c.shapes) else None)]
