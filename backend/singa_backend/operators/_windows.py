"""Where the windows of convolutions and poolings lie, axis by axis, at any spatial rank."""

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
    """Along axis i, window o reads the cells o * strides[i] - begins[i] + j * dilations[i] for j in range(kernel[i])."""

    sizes: Ints  # the spatial shape that the windows slide over
    kernel: Ints
    strides: Ints
    dilations: Ints
    begins: Ints  # cells of padding before the first cell, and after the last one
    ends: Ints
    counts: Ints  # how many windows there are: the spatial shape of the output

    @property
    def whole(self) -> bool:
        """Each window is one cell, and each cell is a window."""
        return math.prod(self.kernel) == 1 and self.counts == self.sizes and not any(self.begins)

    def taps(self, axis: int) -> Iterator[tuple[int, slice, slice]]:
        """For each kernel offset along a spatial axis: the offset, the windows whose cell is no padding, and those cells."""
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
) -> Windows:
    """The windows that these ONNX attributes ask for.

    auto_pad: anything but NOTSET makes the pads, whatever `pads` says.
    ceil_mode: a last window may overhang the padding, but it does not start behind the last cell.  The text says the
        latter from version 22 on; ONNX's cases (maxpool_2d_ceil_output_size_reduce_by_one) had it at version 12.
        It holds for VALID too: shape inference and onnxruntime say so, while a formula of the text has no room for it.
    """
    n = len(sizes)
    kernel = per_axis("kernel_shape", kernel, n)
    strides = per_axis("strides", strides, n)
    dilations = per_axis("dilations", dilations, n)
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    if auto_pad in SAME:
        # One window for each stride, begun or whole.  AveragePool-11 has a formula with floor(size / stride);
        # its attribute's text, shape inference and averagepool_2d_precomputed_same_upper deny it.
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
        if count < 0:
            raise OperatorError(f"a window of {r} cells does not fit {size} cells with padding {begin} and {end}", code="SX404")
        counts += (count,)
    return Windows(tuple(sizes), kernel, strides, dilations, begins, ends, counts)


def explicit(auto_pad: str) -> bool:
    """Whether the attribute `pads` holds; raises OperatorError for an auto_pad that ONNX does not have."""
    if auto_pad not in ("NOTSET", "VALID", "", *SAME):
        raise OperatorError(f"auto_pad {auto_pad!r} is none of NOTSET, VALID, SAME_UPPER, SAME_LOWER", code="SX404")
    return auto_pad in ("NOTSET", "")


def per_axis(name: str, values: Sequence[int] | None, n: int, low: int = 1) -> Ints:
    """One value of at least `low` for each of n axes; all `low` where there are none."""
    values = tuple(values) if values else (low,) * n
    if len(values) != n:
        raise OperatorError(f"{name} {values} has {len(values)} values for {n} spatial axes", code="SX404")
    if any(v < low for v in values):
        raise OperatorError(f"{name} {values} has a value below {low}", code="SX404")
    return values


def pads_of(pads: Sequence[int] | None, n: int) -> tuple[Ints, Ints]:
    """The padding before and after each axis from ONNX's order: all begins, then all ends."""
    both = per_axis("pads", pads, 2 * n, low=0) if not pads or len(pads) == 2 * n else ()
    if len(both) != 2 * n:
        raise OperatorError(f"pads {tuple(pads or ())} must hold 2 values for each of {n} spatial axes", code="SX404")
    return both[:n], both[n:]


def split(totals: Iterator[int] | Sequence[int], *, more_at_end: bool) -> tuple[Ints, Ints]:
    """Each total cut in two halves; an odd cell goes to the end, or to the beginning."""
    halves = tuple((t // 2, t - t // 2) for t in totals)
    small, large = tuple(a for a, _ in halves), tuple(b for _, b in halves)
    return (small, large) if more_at_end else (large, small)


def spatial(x: Array, name: str = "x") -> Ints:
    """The spatial shape of N x C x D1 x ... x Dn; raises OperatorError where there is none."""
    if x.ndim < 3:
        raise OperatorError(f"{name} must have a batch, a channel and spatial axes; its shape is {x.shape}", code="SX404")
    return tuple(x.shape[2:])


def frames(xp: Xp, x: Array, at: Windows) -> Array:
    """Every window of x, zeros in the padding: a view of shape N, C, *kernel, *counts."""
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


# --- in ONNX's vocabulary, where sizes may be unknown -------------------------------------------------------------------


def cells(op: Op, x: V) -> V:
    """The spatial sizes of x, as a vector."""
    return op.Shape(x, start=2)


def before(op: Op, x: V, y: V, kernel: V, strides: Ints, dilations: Ints, pads: Ints | None, auto_pad: str) -> V:
    """The padding before each spatial axis of x that made the windows of y; `kernel` is a vector."""
    if auto_pad not in SAME:
        explicit_pads = tuple(pads) if pads and auto_pad != "VALID" else (0,) * 2 * len(strides)
        return op.constant(explicit_pads[: len(strides)], np.int64)
    total = op.Max(op.Sub(extent(op, cells(op, y), kernel, strides, dilations), cells(op, x)), [0])
    half = op.Div(total, 2)
    return half if auto_pad == "SAME_UPPER" else op.Sub(total, half)


def extent(op: Op, counts: V, kernel: V, strides: Ints, dilations: Ints) -> V:
    """How many cells so many windows reach over."""
    return op.Add(op.Add(op.Mul(op.Sub(counts, 1), list(strides)), op.Mul(op.Sub(kernel, 1), list(dilations))), 1)


def framed(op: Op, x: V, y: V, kernel: V, strides: Ints, dilations: Ints, begins: V) -> V:
    """x with zeros around it (or cells taken away) so that the windows of y reach over exactly all of it."""
    after = op.Sub(op.Sub(extent(op, cells(op, y), kernel, strides, dilations), cells(op, x)), begins)
    return op.Pad(x, op.Concat([0, 0], begins, [0, 0], after, axis=0))


def unframed(op: Op, z: V, x: V, begins: V) -> V:
    """The adjoint of `framed`: the cells of z that are cells of x; those that no window reaches are zero."""
    after = op.Sub(op.Sub(cells(op, x), cells(op, z)), op.Neg(begins))
    return op.Pad(z, op.Concat([0, 0], op.Neg(begins), [0, 0], after, axis=0))
