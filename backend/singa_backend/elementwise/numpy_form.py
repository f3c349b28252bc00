"""An elementwise expression by NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..devices.namespaces import numpy
from .expression import FUNCTIONS, REDUCTIONS, Term, order


def bits(x: np.ndarray) -> np.ndarray:
    """The elements as integers of their size."""
    return x.view(f"i{x.itemsize}")


def selection(y: np.ndarray, mask: np.ndarray, a: np.ndarray, b: np.ndarray) -> list[Any]:
    """The calls that write `a` to y where the mask is true, and `b` elsewhere; y may be a, but neither b nor the mask.

    A copy of the elements that a mask selects takes up to ten times as long: the processor cannot predict a random mask.
    """
    return [
        (np.bitwise_xor, (bits(a), bits(b), bits(y))),
        (np.multiply, (bits(y), mask, bits(y))),
        (np.bitwise_xor, (bits(y), bits(b), bits(y))),
    ]


def evaluate(results: Sequence[Term], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The values of terms for the arrays of the inputs, each primitive by one call: what every other form must return."""
    values: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for t in order(results):
            values[id(t)] = arrays[t.extra] if t.op == "input" else _value(t, [values[id(a)] for a in t.args])
    return [np.broadcast_to(values[id(t)], t.shape) for t in results]


def _value(t: Term, args: list[Any]) -> Any:
    """The value of a term for those of its operands."""
    match t.op:
        case "const":
            return t.number
        case "cast":
            return np.asarray(args[0]).astype(t.dtype)
        case "bits":
            return np.asarray(args[0]).view(t.dtype)
        case "where":
            return np.where(*args)
        case "reshape":
            return np.reshape(args[0], t.shape)
        case "expand":
            return np.broadcast_to(args[0], t.shape)
        case "poly":
            return numpy.polynomial(np.asarray(args[0]), t.extra)
        case "reduce":
            kind, axes = t.extra
            return REDUCTIONS[kind].reduce(args[0], axes, dtype=t.dtype, keepdims=True)
        case "size":
            return t.dtype.type(np.prod([np.shape(args[0])[a] for a in t.extra]))
    return FUNCTIONS[t.op](*args)
