"""Helpers that several operator families share: axes and their lengths, legacy broadcasting, rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.sizes import broadcast_sizes


def axis_of(axis: int, rank: int) -> int:
    """Return `axis` counted from the front; raise OperatorError if it is outside [-rank, rank)."""
    if not -rank <= axis < rank:
        raise OperatorError(f"axis must be in [{-rank}, {rank}), got {axis}", code="SX408")
    return axis % rank if rank else 0


def broadcast(*xs: Any) -> tuple[int, ...] | None:
    """Return the shape to which arrays are broadcast; None if they cannot be."""
    try:
        return broadcast_sizes(*(x.shape for x in xs))
    except ValueError:
        return None


def axes_of(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return `axes` counted from the front; raise OperatorError if one is outside [-rank, rank) or repeated."""
    out = tuple(axis_of(a, rank) for a in axes)
    if len(set(out)) != len(out):
        raise OperatorError(f"axes must be different, got {tuple(axes)}", code="SX408")
    return out


def clamped(xp: Any, x: Any, low: int, high: int) -> Any:
    """Return `x` with numbers outside of [low, high] replaced by the nearest bound, and NaN by the lower one."""
    return xp.fmin(xp.fmax(x, x.dtype.type(low)), x.dtype.type(high))


def rows(x: Any, axis: int) -> Any:
    """Reshape `x` to a matrix: the axes before `axis` become its rows, the others its columns."""
    axis = axis % x.ndim if x.ndim and -x.ndim <= axis < 0 else axis
    if not 0 <= axis <= x.ndim:
        raise OperatorError(f"axis must be in [{-x.ndim}, {x.ndim}], got {axis}", code="SX408")
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


def aligned(a: Any, b: Any, broadcast: int, axis: int | None) -> Any:
    """Reshape `b` to broadcast to `a` by the rules of opsets 1 to 6.

    With broadcast=1, an A of shape (2, 3, 4, 5) accepts a B of one element, of shape (4, 5), or, with axis=1, of shape
    (3, 4).  Sizes of 1 are stretched, as in ONNX's test cases.  Raises OperatorError if the shapes do not match.
    """
    if a.shape == b.shape:
        return b
    if b.ndim == 0:  # with or without `broadcast`: a test case of onnx 1.13 omits it
        return b
    if not broadcast:
        raise OperatorError(f"before opset 7, shapes must be equal or broadcast=1, got {a.shape} and {b.shape}", code="SX404")
    if math.prod(b.shape) == 1 and b.ndim <= a.ndim:
        return b.reshape(())
    start = a.ndim - b.ndim if axis in (None, -1) else axis + a.ndim if axis < 0 else axis
    run = a.shape[start : start + b.ndim]
    if start < 0 or len(run) < b.ndim or any(n not in (1, m) for n, m in zip(b.shape, run, strict=True)):
        where = "the end" if axis is None else f"axis {axis}"
        raise OperatorError(f"before opset 7, shape {b.shape} does not broadcast to {a.shape} at {where}", code="SX404")
    return b.reshape(b.shape + (1,) * (a.ndim - start - b.ndim))


def legacy(op: Op, a: V, b: V, broadcast: int, axis: int | None) -> V:
    """`aligned` in ONNX operators: append axes of size 1 to `b`, so that it broadcasts to `a` as in opsets 1 to 6."""
    if not broadcast or axis in (None, -1) or not op.rank(b):
        return b
    assert axis is not None
    missing = op.rank(a) - op.rank(b) - axis % op.rank(a)
    return op.Unsqueeze(b, list(range(-missing, 0))) if missing > 0 else b


def length(op: Op, x: V, axis: int) -> V:
    """Return the size of an axis as an int64 scalar."""
    return op.Squeeze(op.Shape(x, start=axis, end=axis + 1), [0])


def same_shapes(xs: Sequence[Any]) -> None:
    """Raise OperatorError unless all shapes are equal: before opset 8, Max, Mean, Min and Sum did not broadcast."""
    shapes = [x.shape for x in xs]
    if any(s != shapes[0] for s in shapes):
        raise OperatorError(f"before opset 8, shapes must be equal, got {', '.join(map(str, shapes))}", code="SX404")


def blank(xp: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Return zeros of any dtype; the zero of strings is the empty string."""
    return xp.full(tuple(shape), "", dtype) if np.dtype(dtype) == object else xp.zeros(tuple(shape), dtype)


def other_factors(op: Op, x: V, product: V, zeros: V, vanishing: V) -> V:
    """Return, for each factor of a product, the product of the others.  Its gradient is right at zeros too.

    Args:
        op: The interpreter.
        x: The factors.
        product: For each factor, the product of all that are not 0.
        zeros: The number of those that are 0.
        vanishing: The sum of those that are 0: always 0, but with their gradients.
    """
    zero = op.Equal(x, 0)
    others = op.Sub(zeros, op.cast(zero, x))
    rest = op.Div(product, op.Where(zero, 1, x))
    last = op.Mul(rest, op.Sub(vanishing, op.Where(zero, x, 0)))  # if one other factor is 0, it is the whole sum
    return op.Where(op.Equal(others, 0), rest, op.Where(op.Equal(others, 1), last, 0))
