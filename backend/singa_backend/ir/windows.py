"""Positions of the windows of convolutions and poolings, axis by axis, for any spatial rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .. import limits
from ..errors import OperatorError
from .declaration import Ints
from .sizes import at_least_zero

SAME = ("SAME_UPPER", "SAME_LOWER")


class Windows(NamedTuple):
    """Along axis i, window o reads the cells o * strides[i] - begins[i] + j * dilations[i] for j in range(kernel[i]).

    The places of all cells are below 2^63.  Strides and dilations without effect are small: see `_effective`.

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
    def is_pointwise(self) -> bool:
        """Whether each window is one cell and each cell is a window."""
        return math.prod(self.kernel) == 1 and self.counts == self.sizes and not any(self.begins)

    def cells(self, axis: int) -> np.ndarray:
        """Return how many cells of each window are not padding along a spatial axis."""
        last = np.arange(self.counts[axis])
        last *= self.strides[axis]
        last -= self.begins[axis]
        first = last // self.dilations[axis]
        np.maximum(np.negative(first, out=first), 0, out=first)
        np.subtract(self.sizes[axis] - 1, last, out=last)
        last //= self.dilations[axis]
        np.minimum(last, self.kernel[axis] - 1, out=last)
        last -= first
        last += 1
        return np.maximum(last, 0, out=last)

    def taps(self, axis: int) -> Iterator[tuple[int, slice, slice]]:
        """Yield for each kernel offset along a spatial axis: the offset, the windows whose cell is not padding, those cells."""
        size, stride, begin = self.sizes[axis], self.strides[axis], self.begins[axis]
        dilation, last_begin = self.dilations[axis], (self.counts[axis] - 1) * stride - begin
        low = max(0, -(last_begin // dilation))  # earlier offsets are padding in every window, and so are those after `high`
        high = min(self.kernel[axis] - 1, (size - 1 + begin) // dilation)
        for offset in limits.rounds(max(0, high - low + 1)):
            j = low + offset
            at = j * dilation - begin  # the cell that window 0 reads
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
    given = (None if v is None else tuple(v) for v in (strides, pads, dilations))
    return _windows(tuple(sizes), tuple(kernel), *given, auto_pad, ceil_mode, partial)


@lru_cache(4096)
def _windows(
    sizes: Ints,
    kernel: Ints,
    strides: Ints | None,
    pads: Ints | None,
    dilations: Ints | None,
    auto_pad: str,
    ceil_mode: int,
    partial: bool,
) -> Windows:
    """As `windows`, which every run of a node calls with the same sizes."""
    n = len(sizes)
    kernel = per_axis("kernel_shape", kernel, n)
    strides = per_axis("strides", strides, n)
    dilations = per_axis("dilations", dilations, n)
    reach = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    if auto_pad in SAME:
        # ceil(size / stride) windows.  The formula of AveragePool-11 has floor(size / stride); the description of the
        # attribute, shape inference and the case averagepool_2d_precomputed_same_upper contradict it.
        counts = tuple(-(-size // s) for size, s in zip(sizes, strides, strict=True))
        totals = (at_least_zero((o - 1) * s + r - size) for o, s, r, size in zip(counts, strides, reach, sizes, strict=True))
        begins, ends = split(totals, more_at_end=auto_pad == "SAME_UPPER")
        return _effective(Windows(sizes, kernel, strides, dilations, begins, ends, counts))
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
    return _effective(Windows(sizes, kernel, strides, dilations, begins, ends, counts))


def _effective(at: Windows) -> Windows:
    """These windows, with numbers without effect replaced by small ones, so that what computes them need not hold the large ones.

    A window of one cell has dilation 1.  One window alone has the smallest stride with which it stays alone.

    Raises:
        OperatorError: an axis with its padding has 2^63 cells or more.
    """
    axes = zip(at.sizes, at.kernel, at.strides, at.dilations, at.begins, at.ends, at.counts, strict=True)
    strides: Ints = ()
    for size, k, s, d, begin, end, count in axes:
        reach = (k - 1) * d + 1
        if isinstance(size, int) and max(begin + size + end, (count - 1) * s + reach) >= 2**63:
            raise OperatorError(f"a padded axis must have fewer than 2^63 cells, got {begin} + {size} + {end}", code="SX404")
        strides += (min(s, max(begin + size + end - reach, 0) + 1) if count == 1 else s,)
    dilations = tuple(1 if k == 1 else d for k, d in zip(at.kernel, at.dilations, strict=True))
    if (strides, dilations) == (at.strides, at.dilations):
        return at
    return at._replace(strides=strides, dilations=dilations)


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


_OTHER_END = {"NOTSET": "SAME_UPPER", "VALID": "SAME_UPPER", "SAME_LOWER": "SAME_UPPER", "SAME_UPPER": "SAME_LOWER"}
"""The auto_pad that places the odd cell of padding at the other end."""


def before_11(rank: int, auto_pad: str, output_shape: Sequence[int] | None) -> tuple[str, Ints | None]:
    """Translate attributes of ConvTranspose before version 11 into those of version 11.

    An output_shape put the odd cell of padding at the end except for SAME_UPPER, in version 11 only for SAME_UPPER, and could
    have the batch and the channels too.

    Args:
        rank: The number of spatial axes.
        auto_pad: Attribute auto_pad.
        output_shape: Attribute output_shape.

    Returns:
        auto_pad and output_shape of version 11.
    """
    if not output_shape:
        return auto_pad, None
    spatial = tuple(output_shape[2:] if len(output_shape) == rank + 2 else output_shape)
    return _OTHER_END.get(auto_pad, auto_pad), spatial


def transposed(
    sizes: Ints,
    kernel: Ints,
    strides: Ints | None,
    pads: Ints | None,
    dilations: Ints | None,
    auto_pad: str,
    output_padding: Ints | None,
    output_shape: Ints | None,
) -> Windows:
    """Compute the windows of a transposed convolution: over the output, one for each cell of the input.

    Args:
        sizes: Spatial shape of the input.
        kernel: Attribute kernel_shape.
        strides: Attribute strides; None for 1 on each axis.
        pads: Attribute pads; None for 0.
        dilations: Attribute dilations; None for 1 on each axis.
        auto_pad: As for `windows`.
        output_padding: Cells that are added to the end of each axis of the output.
        output_shape: Spatial shape of the output, which then determines the pads.

    Raises:
        OperatorError: If an attribute has the wrong number of values or a value out of range.
    """
    rank = len(sizes)
    strides, dilations = per_axis("strides", strides, rank), per_axis("dilations", dilations, rank)
    extra = per_axis("output_padding", output_padding, rank, low=0)
    if any(e >= max(s, d) for e, s, d in zip(extra, strides, dilations, strict=True)):
        raise OperatorError(
            f"output_padding must be below the strides {strides} or the dilations {dilations}, got {extra}", code="SX404"
        )
    axes = zip(sizes, strides, kernel, dilations, extra, strict=True)
    full = tuple((size - 1) * s + (k - 1) * d + 1 + e for size, s, k, d, e in axes)
    if not output_shape and auto_pad not in SAME:
        begins, ends = pads_of(pads, rank) if explicit(auto_pad) else ((0,) * rank, (0,) * rank)
        out = tuple(f - b - e for f, b, e in zip(full, begins, ends, strict=True))
        if any(o < 0 for o in out):
            raise OperatorError(f"pads must not exceed the unpadded output shape {full}, got {begins} and {ends}", code="SX404")
        return _effective(Windows(out, kernel, strides, dilations, begins, ends, sizes))
    if output_shape:
        explicit(auto_pad)
        out = per_axis("output_shape", output_shape, rank)
    else:
        out = tuple(size * s for size, s in zip(sizes, strides, strict=True))
    # If the output is larger than the windows reach, the remaining cells are at the end (convtranspose_output_shape).
    begins, ends = split([max(0, f - o) for f, o in zip(full, out, strict=True)], more_at_end=auto_pad == "SAME_UPPER")
    return _effective(Windows(out, kernel, strides, dilations, begins, ends, sizes))
