"""Weights multiplied by factors, which are computed whenever they are packed if they are large."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from ...kernels.values import LARGE, LazyConstant, bound_of
from ...proto.tensor_data import release

MOST = float(np.finfo(np.float32).max) / 2


def multiplied(weight: np.ndarray | LazyConstant, factors: np.ndarray) -> np.ndarray | LazyConstant | None:
    """The product with factors in the weight's precision; None if it is not finite.

    Raises:
        ValueError: the shapes do not broadcast.
    """
    factors = factors.astype(weight.dtype)
    with np.errstate(all="ignore"):
        np.broadcast_shapes(weight.shape, factors.shape)
        bound = _bound(weight, factors)
        if bound <= MOST:
            return LazyConstant(weight.shape, weight.dtype, partial(_multiply, weight, factors), bound)
        made = np.multiply(weight if isinstance(weight, np.ndarray) else weight.array(), factors)
    return made if not made.size or (np.isfinite(made.min()) and np.isfinite(made.max())) else None


def _bound(weight: np.ndarray | LazyConstant, factors: np.ndarray) -> float:
    """The highest magnitude that a product may have; infinity or NaN if that is not known, or to keep the product."""
    if weight.nbytes < LARGE or weight.dtype != np.float32:
        return math.inf
    return bound_of(weight) * float(np.abs(factors).max())


def _multiply(weight: np.ndarray | LazyConstant, factors: np.ndarray, out: np.ndarray) -> None:
    if isinstance(weight, np.ndarray):
        np.multiply(weight, factors, out=out)
        release(weight)
    else:
        weight.fill(out)
        np.multiply(out, factors, out=out)
