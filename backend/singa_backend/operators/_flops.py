"""Rules of work: floating point operations of a call, from its attributes and the shapes of its inputs and first output."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..ir.declaration import FlopsRule, WorkShape


def size(shape: WorkShape) -> int:
    """The number of elements; raises TypeError for an absent input."""
    if shape is None:
        raise TypeError
    return math.prod(shape)


def each_input(factor: int) -> FlopsRule:
    """So many operations for each element of the first input."""
    return lambda attributes, inputs, output: factor * size(inputs[0])


def window(weights: int) -> FlopsRule:
    """A sum over the weights of one output channel for each element of the output."""
    return lambda attributes, inputs, output: 2 * math.prod(output) * size((inputs[weights] or ())[1:])


def pooled(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    """An operation for each element of a window and of the output."""
    return math.prod(output) * int(math.prod(attributes["kernel_shape"]))


def product(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    """A product of matrices: a sum over the last axis of the first input."""
    return 2 * math.prod(output) * (inputs[0] or ())[-1]


def recurrent(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    """Products with both weights at each step."""
    first, second = (inputs[0] or ())[:2]  # the length and the batch, in either order
    return 2 * first * second * (size(inputs[1]) + size(inputs[2]))


def unknown(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> None:
    """The work does not depend on shapes alone."""
