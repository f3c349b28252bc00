"""Scores of the classifiers and regressors of ai.onnx.ml: their transforms and labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .softmaxes import softmax_of_rows
from .table import Refused, Site
from .values import NAN, Bound, OpaqueValue, Value
from .vectors import repeated

ML = "ai.onnx.ml"

_FEW = 8
"""The number of scores up to which numbers of Python cost less than calls on arrays."""

_LOW = -700
"""Where exp(v) is the logistic function of v in float64."""

TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")
"""The transforms by their numbers in TreeEnsemble."""


def transformed(site: Site, z: Value, name: str, y: Value) -> Value:
    """Emit the step that sets `y` to the transform of scores of a wider or equal float type; return `y`."""
    if name == "NONE" or not z.size:
        site.emit(lambda: [(np.copyto, (y.array, z.array, "same_kind"))], reads=(z,), writes=(y,), kernel="numpy.scores")
        return y
    if name == "SOFTMAX":
        return softmax_of_rows(site, z, y)
    if name == "LOGISTIC" and z.size <= _FEW:
        site.emit(lambda: [(_logistic, (flat(z.array), flat(y.array)))], reads=(z,), writes=(y,), kernel="numpy.scores")
        return y
    if name != "LOGISTIC":
        compute = _probit if name == "PROBIT" else _softmax_zero
        site.emit(lambda: [(compute, (z.array, y.array))], reads=(z,), writes=(y,), kernel="numpy.scores")
        return y
    e = site.new(z.shape, z.dtype, finiteness=NAN)
    one = repeated(np.ones(z.shape[1], z.dtype), z.shape[0])

    def bind() -> Bound:
        t = e.array
        return [(np.negative, (z.array, t)), (np.exp, (t, t)), (np.add, (t, one, t)), (np.divide, (one, t, y.array))]

    site.emit(bind, reads=(z,), writes=(e, y), kernel="numpy.scores")
    return y


def two_scores(site: Site, z: Value, chances: bool) -> Value:
    """The scores of both classes, of the score of the second one: 1 - z and z for chances, -z and z otherwise."""
    both = site.new((z.shape[0], 2), z.dtype, finiteness=NAN)
    other = "1-s" if chances else "-s"
    site.emit(lambda: pairs(z.array[:, 0], both.array, other), reads=(z,), writes=(both,), kernel="numpy.scores")
    return both


def pairs(s: np.ndarray, both: np.ndarray, other: str) -> Bound:
    """The calls that set the scores of two classes.

    Args:
        s: the scores of the second class, [rows].
        both: the scores of both, [rows, 2].
        other: the score of the first class: "0", "-s" or "1-s".
    """
    if len(s) == 1:
        return [(_pair, (s, flat(both), other == "1-s", other != "0"))]
    first, second = both.T
    if other == "0":
        return [(first.fill, (0,)), (np.copyto, (second, s))]
    call: Any = (np.subtract, (np.ones((), s.dtype), s, first)) if other == "1-s" else (np.negative, (s, first))
    return [call, (np.copyto, (second, s))]


def _pair(s: np.ndarray, both: Any, start: int, differs: bool) -> None:
    """The scores of one row in numbers of Python."""
    both[1] = value = s.item()
    both[0] = start - value if differs else 0.0


def flat(array: np.ndarray) -> Any:
    """The elements of an array in C order, as numbers of Python."""
    elements: Any = array.reshape(-1)
    return memoryview(elements)


def _logistic(z: Any, y: Any) -> None:
    """The logistic function of a few numbers; where exp(-v) would overflow, it is exp(v)."""
    for i, v in enumerate(z):
        y[i] = math.exp(v) if v < _LOW else 1 / (1 + math.exp(-v))


def _above(s: np.ndarray, limit: float, first: int, second: int, y: Any) -> None:
    """The label of one row."""
    y[0] = second if s.item() > limit else first


def _probit(z: np.ndarray, y: np.ndarray) -> None:
    x = 2 * z - 1
    log = np.log((1 - x) * (1 + x))
    v = 2 / (np.pi * 0.147) + log / 2
    y[...] = np.sign(x) * np.sqrt(2 * (np.sqrt(v * v - log / 0.147) - v))


def _softmax_zero(z: np.ndarray, y: np.ndarray) -> None:
    """The softmax of rows in which scores of 0 stay 0."""
    top = z.max(axis=1, keepdims=True)
    e = np.where(np.abs(z) > 1e-7, np.exp(z - top), z * np.exp(-top))
    total = e.sum(axis=1, keepdims=True)
    y[...] = np.where(total == 0, z.dtype.type(0.5), e / total)


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
    """The labels of the attributes of these names; None if there are none.  Declines labels of both kinds."""
    if attributes.get(ints) and attributes.get(strings):
        raise Refused("there are labels of both kinds")
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
        limit = limit.reshape(())
        if len(s) == 1 and isinstance(self.result, Value):
            return [(_above, (s, limit.item(), *self._names.tolist(), flat(self.result.array)))]
        if isinstance(self.result, Value) and self._plain:
            flags = chosen.array.view(np.bool_)[: len(s)]
            return [(np.greater, (s, limit, flags)), (np.copyto, (self.result.array, flags))]
        return [(np.greater, (s, limit, chosen.array)), *self.calls(chosen.array)]

    def calls(self, numbers: np.ndarray) -> Bound:
        """The calls that set the labels to those of these numbers."""
        if isinstance(self.result, OpaqueValue):
            return [(self._set, (self.result, numbers))]
        return [(self._names.take, (numbers, None, self.result.array, "wrap"))]

    def _set(self, result: OpaqueValue, numbers: np.ndarray) -> None:
        result.value = self._names.take(numbers)
