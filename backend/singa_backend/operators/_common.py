"""What several operator families share: axes and their lengths, legacy broadcasting, rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import OperatorError
from ..interpreters.base import Op, V


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


def aligned(a: Any, b: Any, broadcast: int, axis: int | None) -> Any:
    """`b` shaped to meet `a` by the rules of opsets 1 to 6: A of shape (2, 3, 4, 5) takes, with broadcast=1, a B of
    one element, of shape (4, 5), or with axis=1 of shape (3, 4).  Sizes of 1 stretch, as official cases have them.
    Raises OperatorError where the shapes do not fit."""
    if a.shape == b.shape:
        return b
    if b.ndim == 0:  # with or without `broadcast`: an official case of onnx 1.13 leaves it out
        return b
    if not broadcast:
        raise OperatorError(f"shapes {a.shape} and {b.shape} differ; before opset 7 only broadcast=1 allows that", code="SX404")
    if math.prod(b.shape) == 1 and b.ndim <= a.ndim:
        return b.reshape(())
    start = a.ndim - b.ndim if axis in (None, -1) else axis + a.ndim if axis < 0 else axis
    run = a.shape[start : start + b.ndim]
    if start < 0 or len(run) < b.ndim or any(n not in (1, m) for n, m in zip(b.shape, run, strict=True)):
        where = "the end" if axis is None else f"axis {axis}"
        raise OperatorError(f"before opset 7 a shape {b.shape} does not broadcast to {a.shape} at {where}", code="SX404")
    return b.reshape(b.shape + (1,) * (a.ndim - start - b.ndim))


def legacy(op: Op, a: V, b: V, broadcast: int, axis: int | None) -> V:
    """`aligned` in ONNX's vocabulary: `b` with axes of 1 behind it, so that it meets `a` where opsets 1 to 6 say."""
    if not broadcast or axis in (None, -1) or not op.rank(b):
        return b
    assert axis is not None
    behind = op.rank(a) - op.rank(b) - axis % op.rank(a)
    return op.Unsqueeze(b, list(range(-behind, 0))) if behind > 0 else b


def length(op: Op, x: V, axis: int) -> V:
    """The size of an axis, as an int64 scalar."""
    return op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0])


def same_shapes(xs: Sequence[Any]) -> None:
    """Raises OperatorError unless all shapes are equal: before opset 8 nothing broadcast in Max, Mean, Min and Sum."""
    shapes = [x.shape for x in xs]
    if any(s != shapes[0] for s in shapes):
        raise OperatorError(f"shapes {', '.join(map(str, shapes))} differ; before opset 8 they must be equal", code="SX404")


def blank(xp: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Zeros of any dtype; the zero of strings is the empty string."""
    return xp.full(tuple(shape), "", dtype) if np.dtype(dtype) == object else xp.zeros(tuple(shape), dtype)
