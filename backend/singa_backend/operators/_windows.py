"""Windows of arrays, and of values of ONNX operators."""

from __future__ import annotations

import itertools
import math

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..devices.spatial import WindowPlaces
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Ints
from ..ir.windows import SAME, Windows
from ._api import Array


def spatial(x: Array, name: str = "x") -> Ints:
    """Return the spatial shape of N x C x D1 x ... x Dn; raise OperatorError if there is none."""
    if x.ndim < 3:
        raise OperatorError(f"{name} must have a batch axis, a channel axis and spatial axes, got shape {x.shape}", code="SX404")
    return tuple(x.shape[2:])


def places(at: Windows) -> WindowPlaces:
    """Return windows as kernels take them."""
    return WindowPlaces(at.kernel, at.strides, at.dilations, at.begins, at.counts)


def frames(xp: Xp, x: Array, at: Windows) -> Array:
    """Return every window of x, with zeros as padding: of shape N, C, *kernel, *counts; a view if that needs less memory."""
    n, c = x.shape[:2]
    if any(at.begins) or any(at.ends):
        sizes = tuple(map(sum, zip(at.begins, at.sizes, at.ends, strict=True)))
        if math.prod(sizes) > math.prod(at.kernel) * math.prod(at.counts):
            return _copied(xp, x, at)
        padded = xp.zeros((n, c, *sizes), dtype=x.dtype)
        padded[(..., *(slice(b, b + size) for b, size in zip(at.begins, at.sizes, strict=True)))] = x
        x = padded
    steps = x.strides[2:]
    inner = tuple(step * d for step, d in zip(steps, at.dilations, strict=True))
    outer = tuple(step * s for step, s in zip(steps, at.strides, strict=True))
    return xp.as_strided(x, (n, c, *at.kernel, *at.counts), (*x.strides[:2], *inner, *outer))


def _copied(xp: Xp, x: Array, at: Windows) -> Array:
    """`frames` as a new array: only the cells of x are read, however large the padding is."""
    y = xp.zeros((*x.shape[:2], *at.kernel, *at.counts), dtype=x.dtype)
    every = [list(at.taps(axis)) for axis in range(len(at.kernel))]
    limits.check_rounds(math.prod(map(len, every)))
    for taps in itertools.product(*every):
        offsets, seen, there = zip(*taps, strict=True)
        y[(..., *offsets, *seen)] = x[(..., *there)]
    return y


# --- in ONNX operators, for sizes that may be unknown -------------------------------------------------------------------


def cells(op: Op, x: V) -> V:
    """Return the spatial sizes of x as a vector."""
    return op.Shape(x, start=2)


def before(op: Op, x: V, y: V, kernel: V, strides: Ints, dilations: Ints, pads: Ints | None, auto_pad: str) -> V:
    """Return the padding before each spatial axis of x for the windows of y; `kernel` is a vector."""
    if auto_pad not in SAME:
        explicit_pads = tuple(pads) if pads and auto_pad != "VALID" else (0,) * 2 * len(strides)
        return op.constant(explicit_pads[: len(strides)], np.int64)
    total = op.Max(op.Sub(extent(op, cells(op, y), kernel, strides, dilations), cells(op, x)), [0])
    half = op.Div(total, 2)
    return half if auto_pad == "SAME_UPPER" else op.Sub(total, half)


def extent(op: Op, counts: V, kernel: V, strides: Ints, dilations: Ints) -> V:
    """Return the number of cells that `counts` windows span."""
    return op.Add(op.Add(op.Mul(op.Sub(counts, 1), list(strides)), op.Mul(op.Sub(kernel, 1), list(dilations))), 1)


def framed(op: Op, x: V, y: V, kernel: V, strides: Ints, dilations: Ints, begins: V) -> V:
    """Pad x with zeros (or crop it) so that the windows of y span exactly all of it."""
    after = op.Sub(op.Sub(extent(op, cells(op, y), kernel, strides, dilations), cells(op, x)), begins)
    return op.Pad(x, op.Concat([0, 0], begins, [0, 0], after, axis=0))


def unframed(op: Op, z: V, x: V, begins: V) -> V:
    """Compute the adjoint of `framed`: the cells of z that are cells of x; cells that no window reaches are zero."""
    after = op.Sub(op.Sub(cells(op, x), cells(op, z)), op.Neg(begins))
    return op.Pad(z, op.Concat([0, 0], op.Neg(begins), [0, 0], after, axis=0))
