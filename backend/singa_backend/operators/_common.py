"""What several operator families share: axes, legacy broadcasting, rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..errors import OperatorError


def axis_of(axis: int, rank: int) -> int:
    """`axis` counted from the front; raises OperatorError outside [-rank, rank)."""
    if not -rank <= axis < rank:
        raise OperatorError(f"axis {axis} is outside [{-rank}, {rank})", code="SX408")
    return axis % rank if rank else 0


def axes_of(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """`axes` counted from the front; raises OperatorError for one outside, or named twice."""
    out = tuple(axis_of(a, rank) for a in axes)
    if len(set(out)) != len(out):
        raise OperatorError(f"axes {tuple(axes)} name one axis twice", code="SX408")
    return out


def rows(x: Any, axis: int) -> Any:
    """`x` as a matrix: the axes before `axis` are its rows, the others its columns."""
    axis = axis % x.ndim if x.ndim and -x.ndim <= axis < 0 else axis
    if not 0 <= axis <= x.ndim:
        raise OperatorError(f"axis {axis} is outside [{-x.ndim}, {x.ndim}]", code="SX408")
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
