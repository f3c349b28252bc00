"""Start values of parameters; each function fills a tensor in place and returns it.

The fans are (fan_in, fan_out) = (shape[0], shape[1]) for a matrix; (shape[1] * r, shape[0] * r) for 3 to 5 axes, where r is the
product of the other sizes; otherwise the square root of the number of elements for both. Normal distributions
are not truncated; N(0, s) has the standard deviation s. Random values come from the stream of the tensor's device.
"""

from __future__ import annotations

import math

import numpy as np

from singa_backend.errors import InvalidInput

from ._core import tape, trace
from ._core.tensor import Tensor, op, to_numpy

__all__ = [
    "eye", "gaussian", "glorot", "glorot_normal", "glorot_uniform", "he_normal", "he_uniform", "lecun_normal", "lecun_uniform",
    "msra", "orthogonal", "xavier",
]  # fmt: skip


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
    """Fill a matrix with the identity.

    Args:
        t: Tensor of rank 2.

    Returns:
        t.

    Raises:
        InvalidInput: If t does not have rank 2 (SX339).
    """
    return _set(_matrix(t, "eye"), np.eye(*t.shape))


def orthogonal(t: Tensor, gain: float = 1.0) -> Tensor:
    """Fill a matrix with orthonormal rows or columns, whichever are fewer, times `gain`.

    Args:
        t: Tensor of rank 2.
        gain: Factor of all values.

    Returns:
        t.

    Raises:
        InvalidInput: If t does not have rank 2 (SX339).
    """
    rows, columns = _matrix(t, "orthogonal").shape
    drawn = to_numpy(Tensor((max(rows, columns), min(rows, columns)), t.device).gaussian(0.0, 1.0)).astype(np.float64)
    q, r = np.linalg.qr(drawn)
    q = q * np.where(np.diag(r) < 0, -1.0, 1.0)  # the uniform distribution over orthogonal matrices
    return _set(t, gain * (q if rows >= columns else q.T))


def _matrix(t: Tensor, name: str) -> Tensor:
    if len(t.shape) != 2:
        raise InvalidInput(f"the tensor of {name} must have rank 2, got shape {t.shape}", code="SX339")
    return t


def _set(t: Tensor, array: np.ndarray) -> Tensor:
    with tape.no_tape():
        trace.assign(t, op.constant(array, op.dtype(t)).raw)
    t._become_leaf()
    return t


def lecun_normal(t: Tensor) -> Tensor:
    """Draw from N(0, sqrt(1 / fan_in)).

    Args:
        t: Float tensor.

    Returns:
        t.
    """
    return t.gaussian(0.0, math.sqrt(1 / _fans(t)[0]))


def lecun_uniform(t: Tensor) -> Tensor:
    """Draw from U(-a, a) with a = sqrt(3 / fan_in).

    Args:
        t: Float tensor.

    Returns:
        t.
    """
    return _uniform(t, math.sqrt(3 / _fans(t)[0]))


def he_normal(t: Tensor) -> Tensor:
    """Draw from N(0, sqrt(2 / fan_in)) (He et al., 2015).

    Args:
        t: Float tensor.

    Returns:
        t.
    """
    return t.gaussian(0.0, math.sqrt(2 / _fans(t)[0]))


def he_uniform(t: Tensor) -> Tensor:
    """Draw from U(-a, a) with a = sqrt(6 / fan_in) (He et al., 2015).

    Args:
        t: Float tensor.

    Returns:
        t.
    """
    return _uniform(t, math.sqrt(6 / _fans(t)[0]))


def glorot_normal(t: Tensor) -> Tensor:
    """Draw from N(0, sqrt(2 / (fan_in + fan_out))) (Glorot and Bengio, 2010).

    Args:
        t: Float tensor.

    Returns:
        t.
    """
    return t.gaussian(0.0, math.sqrt(2 / math.fsum(_fans(t))))


def glorot_uniform(t: Tensor) -> Tensor:
    """Draw from U(-a, a) with a = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010).

    Args:
        t: Float tensor.

    Returns:
        t.
    """
    return _uniform(t, math.sqrt(6 / math.fsum(_fans(t))))


def _uniform(t: Tensor, bound: float) -> Tensor:
    return t.uniform(-bound, bound)


# --- deprecated names


def gaussian(t: Tensor, fan_in: int = 0, fan_out: int = 0) -> Tensor:
    """Draw from N(0, sqrt(4 / (fan_in + fan_out))), or N(0, sqrt(2 / fan)) if only one fan is given; deprecated.

    Args:
        t: Float tensor.
        fan_in: Number of inputs; not given if 0.
        fan_out: Number of outputs; not given if 0.

    Returns:
        t.

    Raises:
        InvalidInput: If neither fan is given (SX339).
    """
    if not fan_in and not fan_out:
        raise InvalidInput("fan_in or fan_out of gaussian must be positive, got 0 for both", code="SX339")
    return t.gaussian(0.0, math.sqrt((4 if fan_in and fan_out else 2) / (fan_in + fan_out)))


def xavier(t: Tensor) -> Tensor:
    """Draw from U(-a, a) with a = sqrt(6 / (shape[0] + shape[1])); deprecated, see `glorot_uniform`.

    Args:
        t: Float tensor of rank 2 or more.

    Returns:
        t.
    """
    return _uniform(t, math.sqrt(6 / (t.shape[0] + t.shape[1])))


def glorot(t: Tensor) -> Tensor:
    """Draw from N(0, sqrt(2 / (shape[0] + shape[1]))); deprecated, see `glorot_normal`.

    Args:
        t: Float tensor of rank 2 or more.

    Returns:
        t.
    """
    return t.gaussian(0.0, math.sqrt(2 / (t.shape[0] + t.shape[1])))


def msra(t: Tensor) -> Tensor:
    """Draw from N(0, sqrt(2 / shape[0])); deprecated, see `he_normal`.

    Args:
        t: Float tensor of rank 1 or more.

    Returns:
        t.
    """
    return t.gaussian(0.0, math.sqrt(2 / t.shape[0]))
