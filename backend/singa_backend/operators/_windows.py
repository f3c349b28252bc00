"""Positions of the windows of convolutions and poolings, axis by axis, for any spatial rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Ints
from ._api import Array

SAME = ("SAME_UPPER", "SAME_LOWER")


@dataclass(frozen=True)
class Windows:
    """Along axis i, window o reads the cells o * strides[i] - begins[i] + j * dilations[i] for j in range(kernel[i]).

    Attributes:
        sizes: Spatial shape of the input.
        kernel: Spatial shape of a window, in cells.
        strides: Distance of neighbouring windows.
        dilations: Distance of neighbouring cells of a window.
        begins: Cells of padding before the first cell of each axis.
        ends: Cells of padding after the last cell of each axis.
        counts: Number of windows along each axis: the spatial shape of the output.
    """

    sizes: Ints
    kernel: Ints
    strides: Ints
    dilations: Ints
    begins: Ints
    ends: Ints
    counts: Ints

    @property
    def whole(self) -> bool:
        """Whether each window is one cell and each cell is a window."""
        return math.prod(self.kernel) == 1 and self.counts == self.sizes and not any(self.begins)

    def taps(self, axis: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield for each kernel offset along a spatial axis: the offset, the windows whose cell is not padding, those cells."""
        size, stride, begin = self.sizes[axis], self.strides[axis], self.begins[axis]
        for j in limits.rounds(self.kernel[axis]):
            at = j * self.dilations[axis] - begin  # the cell that window 0 reads
            first = max(0, -(at // stride))
            last = min(self.counts[axis] - 1, (size - 1 - at) // stride)
            if first <= last:
                yield j, slice(first, last + 1), slice(at + first * stride, at + last * stride + 1, stride)


def windows(
    sizes: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    pads: Sequence[int] | None,
    dilations: Sequence[int] | None,
    auto_pad: str = "NOTSET",
    ceil_mode: int = 0,
    partial: bool = False,
) -> Windows:
    """Compute the windows that these ONNX attributes describe.

    Args:
        sizes: Spatial shape of the input.
        kernel: Attribute kernel_shape.
        strides: Attribute strides; None for 1 on each axis.
        pads: Attribute pads; None for 0.
        dilations: Attribute dilations; None for 1 on each axis.
        auto_pad: A value other than NOTSET determines the pads, and `pads` is ignored.
        ceil_mode: If 1, the last window may extend beyond the padding, but it does not start after the last cell.  The
            specification states the latter in version 22; ONNX's test cases (maxpool_2d_ceil_output_size_reduce_by_one)
            have it in version 12.  It also applies to VALID, as in shape inference and onnxruntime; the formula of the
            specification does not account for it.
        partial: Whether an axis that is shorter than the window, by less than one stride, has one window with the cells that
            exist.  The formula of the specification has none there; shape inference divides integers, which rounds toward 0,
            and onnxruntime pools the cells that exist.

    Raises:
        OperatorError: If an attribute has the wrong number of values or a value out of range, or a window is larger
            than the padded input.
    """
    n = len(sizes)
    kernel = per_axis("kernel_shape", kernel, n)
    strides = per_axis("strides", strides, n)
    dilations = per_axis("dilations", dilations, n)
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    if auto_pad in SAME:
        # ceil(size / stride) windows.  The formula of AveragePool-11 has floor(size / stride); the description of the
        # attribute, shape inference and the case averagepool_2d_precomputed_same_upper contradict it.
        counts = tuple(-(-size // s) for size, s in zip(sizes, strides, strict=True))
        totals = (max(0, (o - 1) * s + r - size) for o, s, r, size in zip(counts, strides, reach, sizes, strict=True))
        begins, ends = split(totals, more_at_end=auto_pad == "SAME_UPPER")
        return Windows(tuple(sizes), kernel, strides, dilations, begins, ends, counts)
    begins, ends = pads_of(pads, n) if explicit(auto_pad) else ((0,) * n, (0,) * n)
    counts = ()
    for size, begin, end, r, s in zip(sizes, begins, ends, reach, strides, strict=True):
        room = size + begin + end - r
        count = room // s + 1
        if ceil_mode:
            count = min(-(-room // s) + 1, -(-(size + begin) // s))
        if partial and -s < room < 0 < size:
            count = 1
        if count < 0:
            raise OperatorError(
                f"a window of {r} cells must fit the padded axis, got {begin} + {size} + {end} cells", code="SX404"
            )
        counts += (count,)
    return Windows(tuple(sizes), kernel, strides, dilations, begins, ends, counts)


def explicit(auto_pad: str) -> bool:
    """Return whether the attribute `pads` applies; raise OperatorError for an auto_pad that ONNX does not define."""
    if auto_pad not in ("NOTSET", "VALID", "", *SAME):
        raise OperatorError(f"auto_pad must be NOTSET, VALID, SAME_UPPER or SAME_LOWER, got {auto_pad!r}", code="SX404")
    return auto_pad in ("NOTSET", "")


def per_axis(name: str, values: Sequence[int] | None, n: int, low: int = 1) -> Ints:
    """Return one value of at least `low` for each of n axes; all `low` if there are no values."""
    values = tuple(values) if values else (low,) * n
    if len(values) != n:
        raise OperatorError(f"{name} must have {n} values, one for each spatial axis, got {values}", code="SX404")
    if any(v < low for v in values):
        raise OperatorError(f"each value of {name} must be at least {low}, got {values}", code="SX404")
    return values


def pads_of(pads: Sequence[int] | None, n: int) -> tuple[Ints, Ints]:
    """Return the padding before and after each axis; ONNX's order is all begins, then all ends."""
    both = per_axis("pads", pads, 2 * n, low=0) if not pads or len(pads) == 2 * n else ()
    if len(both) != 2 * n:
        raise OperatorError(f"pads must have 2 values for each of {n} spatial axes, got {tuple(pads or ())}", code="SX404")
    return both[:n], both[n:]


def split(totals: Iterator[int] | Sequence[int], *, more_at_end: bool) -> tuple[Ints, Ints]:
    """Split each total into two halves; an odd cell goes to the end or to the beginning."""
    halves = tuple((t // 2, t - t // 2) for t in totals)
    small, large = tuple(a for a, _ in halves), tuple(b for _, b in halves)
    return (small, large) if more_at_end else (large, small)


def spatial(x: Array, name: str = "x") -> Ints:
    """Return the spatial shape of N x C x D1 x ... x Dn; raise OperatorError if there is none."""
    if x.ndim < 3:
        raise OperatorError(f"{name} must have a batch axis, a channel axis and spatial axes, got shape {x.shape}", code="SX404")
    return tuple(x.shape[2:])


def frames(xp: Xp, x: Array, at: Windows) -> Array:
    """Return every window of x, with zeros as padding: a view of shape N, C, *kernel, *counts."""
    n, c = x.shape[:2]
    if any(at.begins) or any(at.ends):
        sizes = tuple(map(sum, zip(at.begins, at.sizes, at.ends, strict=True)))
        padded = xp.zeros((n, c, *sizes), dtype=x.dtype)
        padded[(..., *(slice(b, b + size) for b, size in zip(at.begins, at.sizes, strict=True)))] = x
        x = padded
    steps = x.strides[2:]
    inner = tuple(step * d for step, d in zip(steps, at.dilations, strict=True))
    outer = tuple(step * s for step, s in zip(steps, at.strides, strict=True))
    return xp.as_strided(x, (n, c, *at.kernel, *at.counts), (*x.strides[:2], *inner, *outer))


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
