"""Start values of parameters; each fills a tensor in place and gives it.

fan = (shape[0], shape[1]) of a matrix, (shape[1] r, shape[0] r) of 3 to 5 axes with r the product of the rest, else the
square root of the number of elements for both.
"""

from __future__ import annotations

import math

import numpy as np

from singa_backend.errors import InvalidInput

from ._core import tape, trace
from ._core.tensor import Tensor, op, to_numpy


def _fans(t: Tensor) -> tuple[float, float]:
    shape = t.shape
    if len(shape) == 2:
        return float(shape[0]), float(shape[1])
    if 3 <= len(shape) <= 5:
        rest = math.prod(shape[2:])
        return float(shape[1] * rest), float(shape[0] * rest)
    root = math.sqrt(t.size())
    return root, root


def eye(t: Tensor) -> Tensor:
    """The identity; raises InvalidInput unless `t` is a matrix."""
    return _set(_matrix(t, "eye"), np.eye(*t.shape))


def orthogonal(t: Tensor, gain: float = 1.0) -> Tensor:
    """Orthonormal rows or columns, whichever are fewer, times gain; raises InvalidInput unless `t` is a matrix."""
    rows, columns = _matrix(t, "orthogonal").shape
    drawn = to_numpy(Tensor((max(rows, columns), min(rows, columns)), t.device).gaussian(0.0, 1.0)).astype(np.float64)
    q, r = np.linalg.qr(drawn)
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)  # so that each is as likely as any other
    return _set(t, gain * (q if rows >= columns else q.T))


def _matrix(t: Tensor, name: str) -> Tensor:
    if len(t.shape) != 2:
        raise InvalidInput(f"{name} fills a matrix; this tensor has shape {t.shape}", code="SX339")
    return t


def _set(t: Tensor, array: np.ndarray) -> Tensor:
    with tape.no_tape():
        trace.assign(t, op.constant(array, op.dtype(t)).raw)
    t._begins_anew()
    return t


def lecun_normal(t: Tensor) -> Tensor:
    """N(0, sqrt(1 / fan_in))"""
    return t.gaussian(0.0, math.sqrt(1 / _fans(t)[0]))


def lecun_uniform(t: Tensor) -> Tensor:
    """U(-a, a) with a = sqrt(3 / fan_in)"""
    return _around(t, math.sqrt(3 / _fans(t)[0]))


def he_normal(t: Tensor) -> Tensor:
    """N(0, sqrt(2 / fan_in))"""
    return t.gaussian(0.0, math.sqrt(2 / _fans(t)[0]))


def he_uniform(t: Tensor) -> Tensor:
    """U(-a, a) with a = sqrt(6 / fan_in)"""
    return _around(t, math.sqrt(6 / _fans(t)[0]))


def glorot_normal(t: Tensor) -> Tensor:
    """N(0, sqrt(2 / (fan_in + fan_out)))"""
    return t.gaussian(0.0, math.sqrt(2 / math.fsum(_fans(t))))


def glorot_uniform(t: Tensor) -> Tensor:
    """U(-a, a) with a = sqrt(6 / (fan_in + fan_out))"""
    return _around(t, math.sqrt(6 / math.fsum(_fans(t))))


def _around(t: Tensor, bound: float) -> Tensor:
    return t.uniform(-bound, bound)


# --- deprecated names


def gaussian(t: Tensor, fan_in: int = 0, fan_out: int = 0) -> Tensor:
    """N(0, sqrt(4 / (fan_in + fan_out))), or sqrt(2 / the one that is given); raises InvalidInput where neither is."""
    if not fan_in and not fan_out:
        raise InvalidInput("gaussian needs fan_in, fan_out or both", code="SX339")
    return t.gaussian(0.0, math.sqrt((4 if fan_in and fan_out else 2) / (fan_in + fan_out)))


def xavier(t: Tensor) -> Tensor:
    """U(-a, a) with a = sqrt(6 / (shape[0] + shape[1]))"""
    return _around(t, math.sqrt(6 / (t.shape[0] + t.shape[1])))


def glorot(t: Tensor) -> Tensor:
    """N(0, sqrt(2 / (shape[0] + shape[1])))"""
    return t.gaussian(0.0, math.sqrt(2 / (t.shape[0] + t.shape[1])))


def msra(t: Tensor) -> Tensor:
    """N(0, sqrt(2 / shape[0]))"""
    return t.gaussian(0.0, math.sqrt(2 / t.shape[0]))
