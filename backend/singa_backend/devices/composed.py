"""Functions of several operations that a device computes by fewer kernels (fused.py), in operations of an array namespace."""

from __future__ import annotations

from typing import Any

Array = Any  # of any namespace
Axes = tuple[int, ...]


def softmax(xp: Any, x: Array, axis: int) -> Array:
    """exp(x - max) / sum(exp(x - max)) along an axis of at least one element."""
    e = x - x.max(axis=axis, keepdims=True)
    xp.exp(e, out=e)
    e /= xp.sum_over(e, (axis % x.ndim,), True)
    return e


def log_softmax(xp: Any, x: Array, axis: int) -> Array:
    """The logarithm of `softmax`."""
    z = x - x.max(axis=axis, keepdims=True)
    return z - xp.log(xp.sum_over(xp.exp(z), (axis % x.ndim,), True))


def mean(xp: Any, x: Array, axes: Axes, keepdims: bool = True) -> Array:
    """The mean over `axes`; NaN if there are no values."""
    return xp.sum_over(x, axes, keepdims) / xp.count(x, axes) if axes else x


def moments(xp: Any, x: Array, axes: Axes) -> tuple[Array, Array, Array]:
    """`x - mean`, the mean and the population variance over `axes`, which are kept with size 1."""
    middle = mean(xp, x, axes)
    d = x - middle
    return d, middle, mean(xp, d * d, axes)


def standardized(xp: Any, x: Array, middle: Array, var: Array, epsilon: float, scale: Array, b: Array) -> Array:
    """Return x with a known mean and variance, scaled and shifted."""
    return (x - middle) * (scale / xp.sqrt(var + epsilon)) + b


def batch_normalized(xp: Any, x: Array, axes: Axes, epsilon: float, scale: Array, b: Array) -> tuple[Array, Array, Array]:
    """Return x with mean 0 and variance 1 over `axes`, scaled and shifted, the mean and the variance."""
    d, middle, var = moments(xp, x, axes)
    return d * (scale / xp.sqrt(var + epsilon)) + b, middle, var


def blended(old: Array, new: Array, momentum: float) -> Array:
    """A running statistic after a batch."""
    return old * momentum + new * (1 - momentum)


def layer_normalized(
    xp: Any, x: Array, axes: Axes, epsilon: float, scale: Array, b: Array | None, dtype: Any
) -> tuple[Array, Array, Array]:
    """Return x with mean 0 and variance 1 over `axes`, rounded to `dtype`, scaled and shifted, the mean and 1 / deviation."""
    d, middle, var = moments(xp, x, axes)
    inverse = 1 / xp.sqrt(var + epsilon)
    y = (d * inverse).astype(dtype) * scale
    return (y if b is None else y + b), middle, inverse
