"""Sampling between pixels, in ONNX operators: shared by the decompositions of GridSample and DeformConv."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..interpreters.base import Op, V
from ._common import length


class Tap(NamedTuple):
    """One pixel that each place reads along an axis.

    Attributes:
        index: Pixel numbers, as floats with integer values.
        inside: Whether the pixel counts; None if all do.
        weight: Weights; None for 1.
    """

    index: V
    inside: V | None
    weight: V | None


def read(op: Op, pixels: V, axes: Sequence[Sequence[Tap]], sizes: Sequence[V]) -> V:
    """Compute each place as a weighted sum of pixels.

    Args:
        op: Interpreter of the operators.
        pixels: N x C x S, row-major over the sizes.
        axes: Taps of each axis, N x P.
        sizes: Size of each axis, int64 scalars.

    Returns:
        N x C x P values.
    """
    nothing = op.Expand(op.constant(0, op.dtype(pixels)), op.Concat(op.Shape(pixels, end=2), [1], axis=0))
    pixels = op.swap(op.Concat(pixels, nothing, axis=2))  # read instead of a pixel of an empty image; it does not count
    last = op.Sub(length(op, pixels, 1), 1)
    y: V | None = None
    for taps in itertools.product(*axes):
        number: V = op.constant(0, np.int64)
        inside: V | None = None
        weight: V | None = None
        for tap, size in zip(taps, sizes, strict=True):
            top = op.cast(op.Sub(size, 1), tap.index)
            at = op.Min(op.Max(op.Where(op.IsNaN(tap.index), 0, tap.index), 0), top)
            number = op.Add(op.Mul(number, size), op.Cast(at, to=7))
            if tap.inside is not None:
                inside = tap.inside if inside is None else op.And(inside, tap.inside)
            if tap.weight is not None:
                weight = tap.weight if weight is None else op.Mul(weight, tap.weight)
        number = op.Max(op.Min(number, last), 0)
        term = op.GatherND(pixels, op.Unsqueeze(number, [-1]), batch_dims=1)
        if inside is not None:
            term = op.Where(op.Unsqueeze(inside, [-1]), term, 0)
        if weight is not None:
            term = op.Mul(term, op.cast(op.Unsqueeze(weight, [-1]), term))
        y = term if y is None else op.Add(y, term)
    assert y is not None
    return op.swap(y)


def linear_taps(op: Op, place: V, size: V) -> list[Tap]:
    """Return the two neighbours of each place; a neighbour outside the image counts as 0."""
    low = op.Floor(place)
    share = op.Sub(place, low)
    top = op.cast(op.Sub(size, 1), place)
    return [Tap(i, _within(op, i, top), w) for i, w in ((low, op.Sub(1, share)), (op.Add(low, 1), share))]


def _within(op: Op, i: V, top: V) -> V:
    return op.And(op.GreaterOrEqual(i, 0), op.LessOrEqual(i, top))


def _reflected(op: Op, x: V, low: V, high: V) -> V:
    """Reflect `x` at the borders until it is between them."""
    span = op.Sub(high, low)
    point = op.Equal(span, 0)
    twice = op.Where(point, 1, op.Mul(span, 2))
    at = op.Sub(x, low)
    at = op.Sub(at, op.Mul(op.Floor(op.Div(at, twice)), twice))
    back = op.Add(low, op.Where(op.Greater(at, span), op.Sub(twice, at), at))
    return op.Where(point, op.Where(op.IsNaN(x), x, low), back)


def grid_taps(op: Op, x: V, size: V, mode: str, padding: str, align: bool) -> list[Tap]:
    """Return the taps of an axis at the coordinates `x` of a grid, as GridSample defines them."""
    top = op.cast(op.Sub(size, 1), x)
    low: V = op.constant(0 if align else -0.5, op.dtype(x))
    high = top if align else op.Add(top, 0.5)
    if mode == "nearest":
        x = op.Round(x)
    outside = op.Or(op.Less(x, low), op.Greater(x, high))
    if padding == "zeros":
        x = op.Min(op.Max(x, -3), op.Add(top, 3))  # nothing is read beyond; the weights of infinity stay finite
    elif padding == "border":
        x = op.Where(outside, op.Min(op.Max(x, 0), top), x)
    else:
        x = op.Where(outside, _reflected(op, x, low, high), x)
    if mode == "linear" and padding != "zeros":  # the value of the border pixel, and as in PyTorch no gradient there
        x = op.Where(op.LessOrEqual(x, 0), op.cast(op.constant(0), x), op.Where(op.GreaterOrEqual(x, top), top, x))
    floor = op.Floor(x)
    t = op.Sub(x, floor)
    taps: list[tuple[V, V | None]]
    if mode == "nearest":
        taps = [(x, None)]
    elif mode == "linear":
        taps = [(floor, op.Sub(1, t)), (op.Add(floor, 1), t)]
    else:
        s = op.Sub(1, t)
        taps = [(op.Sub(floor, 1), _far(op, op.Add(t, 1))), (floor, _near(op, t)),
                (op.Add(floor, 1), _near(op, s)), (op.Add(floor, 2), _far(op, op.Add(s, 1)))]  # fmt: skip
    found = []
    for i, weight in taps:
        i = _reflected(op, i, low, high) if padding == "reflection" else i
        found.append(Tap(i, _within(op, i, top) if padding == "zeros" else None, weight))
    return found


_A = -0.75
"""Parameter of the cubic kernel, as in PyTorch."""


def _near(op: Op, t: V) -> V:
    """Compute (a + 2) t^3 - (a + 3) t^2 + 1, the cubic kernel up to distance 1."""
    return op.Add(op.Mul(op.Sub(op.Mul(t, _A + 2), _A + 3), op.Mul(t, t)), 1)


def _far(op: Op, t: V) -> V:
    """Compute a t^3 - 5 a t^2 + 8 a t - 4 a, the cubic kernel at distances from 1 to 2."""
    return op.Sub(op.Mul(op.Add(op.Mul(op.Sub(op.Mul(t, _A), 5 * _A), t), 8 * _A), t), 4 * _A)
