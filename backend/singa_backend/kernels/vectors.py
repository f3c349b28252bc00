"""Products and distances of the rows of two matrices in float64, in blocks for which NumPy's BLAS uses one thread."""

from __future__ import annotations

import numpy as np

from .values import Bound

ALONE = 1 << 18
"""The multiplications of a product up to which BLAS uses one thread."""

CACHE = 1 << 18
"""The elements of a block of results that are computed while they are in the cache."""

_ROWS = 256


def product(a: np.ndarray, b: np.ndarray, z: np.ndarray) -> Bound:
    """The calls that set z to a @ b, [m, k] and [k, n], each by one thread.

    Args:
        a: the left matrix.
        b: the right matrix.
        z: the result, in C order.
    """
    (m, k), n = a.shape, b.shape[1]
    if m * n * k <= ALONE:
        return [(np.dot, (a, b, z))]
    return [(_product, (a, b, z))]


def _product(a: np.ndarray, b: np.ndarray, z: np.ndarray) -> None:
    (m, k), n = a.shape, b.shape[1]
    rows = max(1, min(m, max(_ROWS, ALONE // (k * n)), ALONE // k))
    columns = max(1, ALONE // (k * rows))
    for i in range(0, m, rows):
        for j in range(0, n, columns):
            np.matmul(a[i : i + rows], b[:, j : j + columns], z[i : i + rows, j : j + columns])


class Distances:
    """Squared distances from fixed points, times a factor: one product, with two more columns on both sides.

    |x|² - 2 x s + |s|² = [x, 1, |x|²] [-2 s, |s|², 1], of points moved so that their mean is 0: little cancels then.
    """

    def __init__(self, points: np.ndarray, factor: float = 1.0) -> None:
        """Arrange points.

        Args:
            points: [points, features], finite.
            factor: multiplies all distances.
        """
        self.mean = points.mean(axis=0, dtype=np.float64)
        moved = points - self.mean
        squares = (moved * moved).sum(axis=1)
        self.right = factor * np.concatenate([-2 * moved.T, squares[None], np.ones((1, len(points)))])

    def calls(self, x: np.ndarray, room: np.ndarray, z: np.ndarray) -> Bound:
        """The calls that set z to the products; values that are not distances, below 0 times the factor, may be among them.

        Args:
            x: [rows, features].
            room: [rows, features + 2], float64.
            z: [rows, points], float64, in C order.
        """
        features = x.shape[1]
        own = room[:, :features]
        return [
            (np.subtract, (x, self.mean, own)),
            (room[:, features].fill, (1.0,)),
            (np.vecdot, (own, own, room[:, features + 1])),
            *product(room, self.right, z),
        ]


def block_of(rows: int, columns: int) -> int:
    """The number of rows of a block of results with so many columns."""
    return min(rows, max(1, CACHE // max(columns, 1)))
