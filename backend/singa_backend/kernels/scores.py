"""Scores of the classifiers and regressors of ai.onnx.ml: their transforms and labels."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from .table import Site
from .values import NAN, Bound, OpaqueValue, Value

ML = "ai.onnx.ml"

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
"""The transforms by their numbers in TreeEnsemble."""


def transform(z: np.ndarray, name: str) -> np.ndarray:
    """The transform of scores, [rows, scores], computed in their dtype."""
    if name == "NONE" or not z.size:
        return z
    if name == "LOGISTIC":
        e = np.exp(-np.abs(z))
        logistic: np.ndarray = np.where(z < 0, e, 1) / (1 + e)
        return logistic
    if name == "PROBIT":
        x = 2 * z - 1
        log = np.log((1 - x) * (1 + x))
        v = 2 / (np.pi * 0.147) + log / 2
        found: np.ndarray = np.sign(x) * np.sqrt(2 * (np.sqrt(v * v - log / 0.147) - v))
        return found
    top = z.max(axis=1, keepdims=True)
    e = np.exp(z - top)
    if name == "SOFTMAX_ZERO":
        e = np.where(np.abs(z) > 1e-7, e, z * np.exp(-top))
    total = e.sum(axis=1, keepdims=True)
    softmax: np.ndarray = np.where(total == 0, z.dtype.type(0.5), e / total)
    return softmax


def transformed(site: Site, z: Value, name: str, y: Value) -> Value:
    """Emit the step that sets `y` to the transform of scores of a wider or equal float type; return `y`."""
    if name == "NONE":
        site.emit(lambda: [(np.copyto, (y.array, z.array, "same_kind"))], reads=(z,), writes=(y,), kernel="numpy.scores")
        return y
    if name == "SOFTMAX" and z.size:
        return _softmax(site, z, y)
    if name != "LOGISTIC":
        site.emit(lambda: [(_transform, (z.array, name, y.array))], reads=(z,), writes=(y,), kernel="numpy.scores")
        return y
    e = site.new(z.shape, z.dtype, finiteness=NAN)
    one = np.ones(1, z.dtype)

    def bind() -> Bound:
        t = e.array
        return [(np.negative, (z.array, t)), (np.exp, (t, t)), (np.add, (t, one, t)), (np.divide, (one, t, y.array))]

    site.emit(bind, reads=(z,), writes=(e, y), kernel="numpy.scores")
    return y


def _softmax(site: Site, z: Value, y: Value) -> Value:
    """Emit the softmax of rows; the exponential of the largest score is 1, so that no sum is 0."""
    e, top = site.new(z.shape, z.dtype, finiteness=NAN), site.new((z.shape[0], 1), z.dtype, finiteness=NAN)
    narrow = 2 <= z.shape[1] <= _NARROW and z.shape[0] >= _ROWS

    def bind() -> Bound:
        s, t, m = z.array, e.array, top.array
        reduce = across if narrow else _along
        return [
            *reduce(np.maximum, s, m), (np.subtract, (s, m, t)), (np.exp, (t, t)),
            *reduce(np.add, t, m), (np.divide, (t, m, y.array)),
        ]  # fmt: skip

    site.emit(bind, reads=(z,), writes=(e, top, y), kernel="numpy.scores")
    return y


_NARROW, _ROWS = 12, 48
"""A matrix of at most this many columns and at least this many rows is reduced column by column."""


def _along(function: np.ufunc, x: np.ndarray, y: np.ndarray) -> Bound:
    """The call that reduces rows to a column."""
    return [(function.reduce, (x, 1, None, y, True))]


def across(function: np.ufunc, x: np.ndarray, y: np.ndarray) -> Bound:
    """The calls that reduce rows to a column, a column at a time: a reduction of a few numbers costs more than their sum."""
    now = y[:, 0]
    return [
        (partial(function, x[:, i] if i > 1 else x[:, 0], x[:, 1] if i == 1 else now, out=now), ()) for i in range(1, x.shape[1])
    ]


def two_scores(site: Site, z: Value, chances: bool) -> Value:
    """The scores of both classes, of the score of the second one: 1 - z and z for chances, -z and z otherwise."""
    both = site.new((z.shape[0], 2), z.dtype, finiteness=NAN)
    one = np.ones(1, z.dtype)

    def bind() -> Bound:
        s, (first, second) = z.array[:, 0], both.array.T
        other: Any = (np.subtract, (one, s, first)) if chances else (np.negative, (s, first))
        return [other, (np.copyto, (second, s))]

    site.emit(bind, reads=(z,), writes=(both,), kernel="numpy.scores")
    return both


def _transform(z: np.ndarray, name: str, y: np.ndarray) -> None:
    y[...] = transform(z, name)


def transform_of(site: Site) -> str:
    """The transform of a call; declines if there is none of this name."""
    name: str = site.attributes.get("post_transform") or "NONE"
    site.require(name in TRANSFORMS, "the transform is unknown")
    return name


def matrix_of(site: Site, x: Value) -> tuple[int, int]:
    """The numbers of rows and features of x, [N, F] or [F]; declines other shapes, empty ones and types without products."""
    site.require(isinstance(x, Value) and x.ndim in (1, 2) and x.size, "x is not a matrix, or empty")
    site.require(x.dtype.kind in "iu" or x.dtype in (np.float32, np.float64), "elements of other types")
    return (1, x.shape[0]) if x.ndim == 1 else (x.shape[0], x.shape[1])


def labels_of(attributes: Mapping[str, Any], ints: str, strings: str) -> np.ndarray | None:
    """The labels of the attributes of these names; None if there are none."""
    if attributes.get(strings):
        return np.array(attributes[strings], object)
    return np.array(attributes[ints], np.int64) if attributes.get(ints) else None


class Labels:
    """The labels of rows, which a step sets by their numbers: an array of numbers, or strings."""

    def __init__(self, site: Site, names: np.ndarray, rows: int) -> None:
        """Reserve the results.

        Args:
            site: the place of the classifier.
            names: the labels, int64 or strings.
            rows: the number of rows.
        """
        self._names = names
        self.result: Value | OpaqueValue = OpaqueValue(fresh=True) if names.dtype == object else site.new((rows,), np.int64)
        self._plain = names.dtype != object and np.array_equal(names, np.arange(len(names)))

    def writes(self) -> tuple[Value, ...]:
        """What a step that uses `calls` writes."""
        return (self.result,) if isinstance(self.result, Value) else ()

    def largest(self, z: Value, chosen: Value) -> Bound:
        """The calls that set the labels to those of the largest scores; `chosen` is room for their numbers."""
        if isinstance(self.result, Value) and self._plain:
            return [(z.array.argmax, (1, self.result.array))]
        numbers = chosen.array
        return [(z.array.argmax, (1, numbers)), *self.calls(numbers)]

    def above(self, s: np.ndarray, limit: np.ndarray, chosen: Value) -> Bound:
        """The calls that set the labels to the second one where `s` is above the limit, and to the first one elsewhere."""
        if isinstance(self.result, Value) and self._plain:
            return [(np.greater, (s, limit, self.result.array))]
        return [(np.greater, (s, limit, chosen.array)), *self.calls(chosen.array)]

    def calls(self, numbers: np.ndarray) -> Bound:
        """The calls that set the labels to those of these numbers."""
        if isinstance(self.result, OpaqueValue):
            return [(self._set, (self.result, numbers))]
        return [(self._names.take, (numbers, None, self.result.array, "wrap"))]

    def _set(self, result: OpaqueValue, numbers: np.ndarray) -> None:
        result.value = self._names.take(numbers)
