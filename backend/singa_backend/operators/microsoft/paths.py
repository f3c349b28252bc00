"""Cheapest paths through a matrix."""

from __future__ import annotations

import numpy as np

from ... import limits
from ...errors import OperatorError
from ._api import Array, Xp, microsoft


@microsoft("DynamicTimeWarping", 1, host=True)
def dynamic_time_warping(xp: Xp, x: Array) -> Array:
    """Find the cheapest path from the first to the last cell by steps down, right, or both; return its rows and columns.

    Of equal costs, the step is to the right, then both at once if the other way is dearer, then down.
    """
    if x.ndim not in (2, 3) or (x.ndim == 3 and x.shape[0] != 1) or 0 in x.shape:
        raise OperatorError(f"the costs must have shape M x N or 1 x M x N, and not be empty, got {x.shape}", code="SX404")
    rows, columns = x.shape[-2:]
    costs = x.reshape(rows, columns)
    limits.admit((rows + 1, columns + 1), np.float64)
    total = np.full((rows + 1, columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    step = np.zeros((rows + 1, columns + 1), np.int8)
    for diagonal in limits.rounds(rows + columns - 1):  # the cells of a diagonal depend on those before it
        i = np.arange(max(0, diagonal - columns + 1), min(rows, diagonal + 1)) + 1
        j = diagonal + 2 - i
        both, down, right = total[i - 1, j - 1], total[i - 1, j], total[i, j - 1]
        way = np.where((both < down) & (both < right), 0, np.where((down < both) & (down < right), 1, 2))
        total[i, j] = costs[i - 1, j - 1] + np.choose(way, [both, down, right])
        step[i, j] = way
    row, column, path = rows, columns, []
    while row > 0 and column > 0:
        path.append((row - 1, column - 1))
        way = step[row, column]
        row, column = row - (way != 2), column - (way != 1)
    return np.array(path[::-1], np.int32).T
