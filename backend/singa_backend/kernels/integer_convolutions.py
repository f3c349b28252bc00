"""Exact convolutions of 8-bit integers by machine code, where oneDNN has none: see gemm/windows.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..elementwise.compile import level
from ..gemm.integers import IntegersKind, integers
from ..gemm.tiles import TILES
from ..gemm.windows import AXES, depthwise, windows
from ..ir.windows import Windows
from .integer_products import code_weights, code_zero, packed_tiles, require_code, shift_of
from .integer_tails import INT32
from .lowering import channels_last, derived
from .machine_steps import GAP, bound_product, emit_product, tile_sizes
from .quantized import LARGEST, conv_windows, factor_of, y_zero
from .table import Site, kernel
from .values import FINITE, Value, last_order

PART = 1 << 19
"""The bytes of windows that are copied at a time for each thread: together they could exceed the memory, and a part stays in the
second cache of its processor."""

FEWEST = 16
"""The windows that are copied at a time at least: the code multiplies several rows together."""

COPIES = 4
"""The products of two numbers that take as long as the copy of one."""

NAME = "convolution of 8-bit integers"
"""The name of the step."""


@dataclass(frozen=True)
class WindowRows:
    """How windows are rows, and filters are matrices whose rows are in the same order.

    Attributes:
        blocks: the number of matrices, of some groups each.
        joined: the groups of a block: as many as a unit of work has columns for, with zeros between different groups.
        taps: the parts of a row; the taps along the last axis are one if their channels are adjacent in memory.
        run: the elements of a tap.
        cells: the cells of a tap.
        outputs: the columns of a block.
    """

    blocks: int
    joined: int
    taps: int
    run: int
    cells: int
    outputs: int

    @classmethod
    def of(cls, at: Windows, filters: Sequence[int], group: int) -> WindowRows:
        """The rows of a convolution with filters of a shape."""
        outputs, channels = filters[:2]
        joined = max(m for m in range(1, group + 1) if group % m == 0 and (m == 1 or m * outputs // group <= TILES * LANES))
        cells = at.kernel[-1] if joined == group and at.dilations[-1] == 1 else 1
        run, blocks = joined * channels * cells, group // joined
        return cls(blocks, joined, math.prod(at.kernel) // cells, run, cells, outputs // blocks)

    @property
    def place(self) -> int:
        """The elements from one tap to the next."""
        return -(-self.run // 4) * 4

    @property
    def depth(self) -> int:
        """The elements of a row."""
        return -(-self.taps * self.place // 8) * 8

    @property
    def columns(self) -> int:
        """The columns of whole units of work."""
        return int(tile_sizes(1, self.outputs)["groups"]) * TILES * LANES

    def matrices(self, w: np.ndarray) -> np.ndarray:
        """Filters as (blocks, taps * place, outputs)."""
        parts = w.reshape(self.blocks, self.joined, self.outputs // self.joined, w.shape[1], -1)
        wide = np.zeros((self.blocks, parts.shape[-1], self.joined, w.shape[1], self.joined, parts.shape[2]), np.int8)
        for j in range(self.joined):
            wide[:, :, j, :, j] = parts[:, j].transpose(0, 3, 2, 1)
        rows = wide.reshape(self.blocks, self.taps, self.run, self.outputs)
        padded = np.pad(rows, ((0, 0), (0, 0), (0, self.place - self.run), (0, 0)))
        return padded.reshape(self.blocks, self.taps * self.place, self.outputs)

    def sizes(self, kind: IntegersKind, sizes: dict[str, int]) -> dict[str, int]:
        """The numbers of the frame: those of `window_sizes`, and of rows."""
        numbers = {"place": self.place, "run": self.run, "cells": self.cells, "depth": self.depth}
        return {**sizes, **numbers, "kernel_w": sizes["kernel_w"] // self.cells, "stride": self.depth * kind.element + GAP}


def window_sizes(at: Windows, images: int, channels: int) -> dict[str, int]:
    """The numbers of the frame that describe the windows of images with the channels innermost."""
    axes = {"count": at.counts, "size": at.sizes, "kernel": at.kernel, "stride": at.strides, "dilation": at.dilations}
    sizes = {"rows": images * math.prod(at.counts), "cell": channels, "total": images * channels * math.prod(at.sizes)}
    for what, numbers, absent in (*((what, n, 1) for what, n in axes.items()), ("begin", at.begins, 0)):
        whole = [absent] * (len(AXES) - len(numbers)) + list(numbers)
        sizes |= {f"{what}_{axis}": n for axis, n in zip(AXES, whole, strict=True)}
    return sizes


class CodeConvolution:
    """A convolution with constant weights.

    Attributes:
        site: the place.
        x: the input.
        w: the weights, int8 without a zero point.
        at: the windows.
        zero: the zero point of x.
        bound: the highest absolute sum of each channel.
    """

    def __init__(self, site: Site, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None) -> None:
        require_code(site)
        self.site, self.x, self.at = site, x, conv_windows(site, x, w)
        self.zero = code_zero(site, x, x_zero, "x")
        self.w, self.bound = code_weights(site, x, x_zero, w, w_zero, 0)

    def emit(self, dtype: Any, bias: Value | None = None, factor: np.ndarray | None = None, shift: int = 0) -> Value:
        """Add the step; with a factor for each channel, or one for all, sums are multiplied, rounded and shifted."""
        site, (outputs, *_), group = self.site, self.w.shape, self.site.attributes.get("group", 1)
        name = "sums" if factor is None else np.dtype(dtype).name
        kind = IntegersKind(level(), self.x.dtype.kind == "i", name, bias is not None)
        optional = {"bias": None if bias is None else bias.read(), "factors": factor}
        terms = {n: np.broadcast_to(v, outputs) for n, v in optional.items() if v is not None}
        x = channels_last(site, self.x)
        y = site.new((x.shape[0], outputs, *self.at.counts), dtype, last_order(x.ndim), FINITE)
        values = {"x": x.view((x.size,), (1,)), "zero": self.zero, "shift": shift_of(site, shift)}
        values["y"] = y.view((y.size,), (y.dtype.itemsize,))
        if group == outputs == x.shape[1]:
            self._by_channels(kind, values, terms)
        else:
            self._by_rows(kind, values, terms, WindowRows.of(self.at, self.w.shape, group))
        return y

    def _columns(self, terms: dict[str, np.ndarray], blocks: int, columns: int) -> dict[str, Value]:
        """Numbers for each channel, by blocks, each padded with zeros to so many columns."""
        split = {name: v.reshape(blocks, -1) for name, v in terms.items()}
        wide = {name: np.pad(v, ((0, 0), (0, columns - v.shape[1]))) for name, v in split.items()}
        return {name: derived(self.site, self.w, (name, v.shape, v.tobytes()), v.copy) for name, v in wide.items()}

    def _by_channels(self, kind: IntegersKind, values: dict[str, Value], terms: dict[str, np.ndarray]) -> None:
        """Add the step for filters of one channel each."""
        w, channels = self.w, self.w.shape[0]
        rest = -channels % LANES

        def filters() -> np.ndarray:
            return np.pad(w.read().reshape(channels, -1).T.astype(np.int16), ((0, 0), (0, rest)))

        values |= self._columns(terms, 1, channels + rest)
        values["w"] = derived(self.site, w, "filters of channels", filters)
        sizes, work = window_sizes(self.at, self.x.shape[0], channels), COPIES * values["y"].size * math.prod(self.at.kernel)
        emit_product(self.site, depthwise(kind), sizes, values, ("y",), work, NAME)

    def _by_rows(self, kind: IntegersKind, values: dict[str, Value], terms: dict[str, np.ndarray], form: WindowRows) -> None:
        """Add the step that copies windows, and multiplies them by the weights of each block."""
        site, w = self.site, self.w
        sizes = form.sizes(kind, window_sizes(self.at, *self.x.shape[:2])) | {"pitch": w.shape[0]}
        sums = site.derived(w, "sums of filters", lambda: w.read().reshape(w.shape[0], -1).sum(1, dtype=np.int32))
        weights = self._columns({**terms, "sums": sums}, form.blocks, form.columns)
        weights["w"] = site.derived(w, form, lambda: packed_tiles(form.matrices(w.read()), form.depth, form.columns))
        rows = min(sizes["rows"], max(PART * site.options.threads // sizes["stride"], FEWEST))
        scratch = site.scratch(rows * sizes["stride"])
        left = Value(scratch, (rows, sizes["stride"]), (sizes["stride"], 1), np.dtype(np.uint8))
        binds = []
        for first, block in product(range(0, sizes["rows"], rows), range(form.blocks)):
            count, skipped = min(rows, sizes["rows"] - first), block * form.joined * w.shape[1]
            part = {**sizes, **tile_sizes(count, form.outputs), "first": first, "total": sizes["total"] - skipped}
            here = {**values, **{name: _from(v, block * v.size // form.blocks) for name, v in weights.items()}, "left": left}
            here["x"] = _from(values["x"], skipped)
            here["y"] = _from(values["y"], first * w.shape[0] + block * form.outputs)
            for function, work in (windows(kind), COPIES), (integers(kind), form.outputs):
                binds.append(bound_product(site, function, part, here, count * form.depth * work))
        reads = [v for name, v in (*values.items(), *weights.items()) if name != "y"]
        site.emit(
            lambda: [call for bind in binds for call in bind()], reads=reads, writes=(values["y"],), kernel=f"machine.{NAME}",
            scratch=scratch,
        )  # fmt: skip


def _from(v: Value, first: int) -> Value:
    """The elements of a dense value from one on."""
    return v.view((v.size - first,), (v.dtype.itemsize,), first * v.dtype.itemsize)


@kernel("QLinearConv", 10, on="machine")
def qlinear_conv_by_code(
    site: Site, x: Value, xs: Value, xz: Value, w: Value, ws: Value, wz: Value, ys: Value, yz: Value, b: Value | None = None
) -> Value:
    """A convolution of integers, times one float32 for each channel, rounded."""
    one = CodeConvolution(site, x, w, xz, wz)
    factor, zero = factor_of(site, xs, ws, ys), y_zero(site, yz)
    site.require(factor.size in (1, w.shape[0]), "the scale of w does not fit")
    if b is not None:
        fits = b.constant and b.dtype == INT32 and b.shape == w.shape[:1]
        site.require(fits, "the bias is not a constant int32 for each channel")
        site.require((one.bound + np.abs(b.read().astype(np.int64))).max() < LARGEST, "int32 may overflow")
    return one.emit(yz.dtype, b, factor, zero)


@kernel("ConvInteger", 10, on="machine")
def conv_integer_by_code(site: Site, x: Value, w: Value, xz: Value | None = None, wz: Value | None = None) -> Value:
    """A convolution of integers with int32 results."""
    return CodeConvolution(site, x, w, xz, wz).emit(INT32)
