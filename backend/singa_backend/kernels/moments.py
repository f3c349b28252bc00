"""Means, variances and gradients of channels from those of blocks of rows, so that their errors hardly grow with the rows.

A tensor whose channels are innermost in memory is a matrix with a column for each channel.  oneDNN adds its rows one after the
other, so that rounding errors add up.  Here it adds those of blocks, in which adjacent rows are joined to one of more channels,
and what it writes for the blocks is combined in float64 (Chan, Golub and LeVeque, Updating formulae, 1979).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..devices.sums import divisor
from . import onednn as dnn
from .lowering import F32, dense_desc, emit, threads_for
from .onednn import MemoryDesc, Primitive, backward
from .sums import Sum
from .table import Site
from .values import FINITE, Bound, Value, last_order, strides_of

LONG = 1 << 12
"""The rows from which they are added in blocks."""

BLOCK = 1 << 15
"""The elements of a block for each thread, which stay in the cache."""

DEEP = 1 << 9
"""The rows of a block that are added one after the other."""

COST = 12
"""FLOPs that take the time of one element."""

VECTOR = 8
"""oneDNN's fast code needs a multiple of this number of channels."""

GIVEN = dnn.USE_SCALE | dnn.USE_SHIFT | dnn.USE_GLOBAL_STATS


class RowBlocks(NamedTuple):
    """How the rows of matrices are divided.

    Attributes:
        samples: the number of matrices.
        rows: the rows of a matrix.
        channels: its columns.
        lanes: the adjacent rows that are joined.
        height: the joined rows of a block.
        blocks: their number in a matrix.
        rest: the rows that remain, which are a block of their own.
    """

    samples: int
    rows: int
    channels: int
    lanes: int
    height: int
    blocks: int
    rest: int

    @classmethod
    def of(cls, samples: int, rows: int, channels: int, long: int) -> RowBlocks:
        """Divide matrices; those of fewer rows than `long` are one block without joined rows."""
        lanes, height = 1, rows
        if rows >= long:
            unit = VECTOR // math.gcd(channels, VECTOR)
            tall = min(rows, max(BLOCK * dnn.threads() // channels, DEEP // 8))
            least = unit * -(-tall // (DEEP * unit))
            lanes = next((n for n in range(least, 2 * least, unit) if rows % n == 0), least)
            height = divisor(rows // lanes, max(1, tall // lanes))
        count = rows // (lanes * height)
        return cls(samples, rows, channels, lanes, height, count, rows - count * lanes * height)

    @property
    def parts(self) -> int:
        """The numbers that are computed for a column of a matrix."""
        return self.lanes * self.blocks + bool(self.rest)

    @property
    def weights(self) -> np.ndarray:
        """The part of the rows from which each of them is computed."""
        shares = [self.height / self.rows] * (self.lanes * self.blocks) + [self.rest / self.rows] * bool(self.rest)
        return np.array(shares)

    def kinds(self) -> Iterator[tuple[int, MemoryDesc, MemoryDesc, list[tuple[int, int, int]]]]:
        """The full blocks, and those of the rest.

        Yields:
            The number of lanes, the descriptions of a block and of a number for each of its channels, and for each block the
            number of the matrix, and the bytes from the begin of all matrices and of all parts.
        """
        size = self.channels * F32.itemsize
        full = self.lanes * self.height
        for lanes, height, places in (
            (self.lanes, self.height, range(self.blocks)),
            (1, self.rest, range(self.blocks, self.blocks + bool(self.rest))),
        ):
            wide = lanes * self.channels
            begins = [
                (n, (n * self.rows + k * full) * size, (n * self.parts + k * self.lanes) * size)
                for n in range(self.samples)
                for k in places
            ]
            if begins:
                yield lanes, dense_desc(F32, (1, wide, height, 1), last_order(4)), dense_desc(F32, (wide,)), begins


def emit_moments(site: Site, x: Value, mean: Value, var: Value, groups: int) -> None:
    """Add the steps that write the mean and the variance of each channel, or of its group.

    Args:
        site: the place.
        x: the channels are innermost in memory, without gaps.
        mean: (samples, channels); each sample has the same number of rows.
        var: likewise.
        groups: the number of groups of adjacent channels that have a mean and a variance together.
    """
    samples, channels = mean.shape
    blocks = RowBlocks.of(samples, x.size // samples // channels, channels, DEEP)
    shape = (samples, blocks.parts, channels)
    means, variances = (site.new(shape, F32, None, mean.finiteness) for _ in range(2))
    for _, md, vector, begins in blocks.kinds():
        room = site.new(md.shape, F32, last_order(4), x.finiteness)
        with threads_for(room.size * COST):
            primitive = dnn.batch_normalization(md, md, epsilon=1.0, prop="training")
        arguments = {
            dnn.args.SRC: (md, x), dnn.args.DST: (md, room),
            dnn.args.MEAN: (vector, means), dnn.args.VARIANCE: (vector, variances),
        }  # fmt: skip
        moves = [{dnn.args.SRC: at, dnn.args.MEAN: part, dnn.args.VARIANCE: part} for _, at, part in begins]
        emit(site, primitive, arguments, (room, means, variances), "moments", moves)
    weights = blocks.weights.reshape(-1, 1, 1) * (groups / channels)

    def bind() -> Bound:
        m, v = (part.array.reshape(samples, -1, groups, channels // groups) for part in (means, variances))
        centres, spreads = (to.array.reshape(samples, 1, groups, -1) for to in (mean, var))

        def run() -> None:
            centre = np.add.reduce(m * weights, (1, 3), keepdims=True)
            apart = m - centre
            apart *= apart
            apart += v
            apart *= weights
            centres[...] = centre
            spreads[...] = np.add.reduce(apart, (1, 3), keepdims=True)

        return [(run, ())]

    site.emit(bind, reads=(means, variances), writes=(mean, var), kernel="numpy.moments")


def emit_gradient(site: Site, dy: Value, x: Value, scale: Value, moments: tuple[Value, Value], dx: Value) -> tuple[Value, Value]:
    """Add the steps of the gradients of a normalization by given statistics, in blocks.

    Args:
        site: the place.
        dy: the gradient of the result; the channels of dy, x and dx are innermost in memory, without gaps.
        x: the input.
        scale: the factor of each channel.
        moments: the mean and the variance, (samples, channels).
        dx: the gradient of x, which is written.

    Returns:
        The gradients of the scale and the shift, (samples, channels).
    """
    samples, channels = moments[0].shape
    blocks = RowBlocks.of(samples, x.size // samples // channels, channels, LONG)
    epsilon, shape = site.attributes["epsilon"], (samples, blocks.parts, channels)
    dscales, dshifts = parts = [site.new(shape, F32, None, FINITE) for _ in range(2)]
    for lanes, md, vector, begins in blocks.kinds():
        with threads_for(math.prod(md.shape) * COST):
            hint = dnn.batch_normalization(md, md, epsilon=epsilon, flags=GIVEN, prop="training")
            made: Primitive = backward.batch_normalization_backward(md, md, md, hint=hint, epsilon=epsilon, flags=GIVEN)
        mean, var, factor = (tiled(site, v, lanes, channels) for v in (*moments, scale))
        arguments = {
            dnn.args.SRC: (md, x), dnn.args.DIFF_DST: (md, dy), dnn.args.DIFF_SRC: (md, dx), dnn.args.SCALE: (vector, factor),
            dnn.args.MEAN: (vector, mean), dnn.args.VARIANCE: (vector, var),
            dnn.args.DIFF_SCALE: (vector, dscales), dnn.args.DIFF_SHIFT: (vector, dshifts),
        }  # fmt: skip
        step = lanes * channels * F32.itemsize
        moves = [
            dict.fromkeys((dnn.args.SRC, dnn.args.DIFF_DST, dnn.args.DIFF_SRC), at)
            | dict.fromkeys((dnn.args.MEAN, dnn.args.VARIANCE), n * step)
            | dict.fromkeys((dnn.args.DIFF_SCALE, dnn.args.DIFF_SHIFT), part)
            for n, at, part in begins
        ]
        emit(site, made, arguments, (dx, dscales, dshifts), "batch_normalization gradient", moves)
    dscale, dshift = (summed(site, part, 1) for part in parts)
    return dscale, dshift


def joined(rows: int, channels: int, wide: int = 1) -> int:
    """The number of adjacent rows to join, for a multiple of VECTOR channels of at least `wide`; fewer if it does not divide."""
    unit = VECTOR // math.gcd(channels, VECTOR)
    lanes = unit * -(-wide // (unit * channels))
    return next((n for n in (lanes, unit) if rows % n == 0 and rows > n), 1)


def tiled(site: Site, v: Value, lanes: int, channels: int) -> Value:
    """The rows of a matrix, each repeated so often."""
    if lanes == 1:
        return v
    y = site.new((v.size // channels, lanes, channels), F32, None, v.finiteness)
    site.emit(lambda: [(np.copyto, (y.array, v.array.reshape(-1, 1, channels)))], reads=(v,), writes=(y,), kernel="numpy.copyto")
    return y


def summed(site: Site, x: Value, axis: int) -> Value:
    """The sum over an axis of a value in C order; the value without the axis if its size is 1."""
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    if x.shape[axis] == 1:
        return x.view(shape, strides_of(shape, x.dtype.itemsize))
    y = site.new(shape, x.dtype, None, x.finiteness)
    total = Sum(x.shape, x.strides, x.dtype, (axis,))
    scratch = total.scratch(site)
    site.emit(lambda: total.calls(x.array, y.array, scratch), reads=(x,), writes=(y,), kernel="numpy.add", scratch=scratch)
    return y
