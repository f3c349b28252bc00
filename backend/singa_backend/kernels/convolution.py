"""Convolutions and transposed convolutions on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import OperatorError
from ..ir.sizes import at_least_zero
from ..ir.windows import Windows, before_11, transposed, windows
from . import epilogue
from . import onednn as dnn
from .lowering import (
    F32,
    channels_last,
    dense_desc,
    derived,
    desc,
    emit,
    packed,
    require_plain,
    strided_desc,
    threads_for,
    unset,
)
from .onednn import Attributes, MemoryDesc, Primitive
from .rounding import fpmath
from .table import Site, kernel, worst
from .values import FINITE, NAN, Value, last_order


def geometry(site: Site, make: Callable[..., Windows], *arguments: Any, **named: Any) -> Windows:
    """The windows of a call; declines if they are not valid or if there are none."""
    try:
        at = make(*arguments, **named)
    except OperatorError as error:
        site.refuse(str(error))
    site.require(all(at.counts) and all(at.sizes), "the result is empty")
    return at


def windows_of(site: Site, x: Value, w: Value) -> Windows:
    """The windows of a Conv; declines if they are not valid or if there are none."""
    a = site.attributes
    strides, pads, dilations = a.get("strides"), a.get("pads"), a.get("dilations")
    return geometry(site, windows, x.shape[2:], w.shape[2:], strides, pads, dilations, a.get("auto_pad", "NOTSET"))


def transposed_windows_of(site: Site, x: Value, w: Value) -> Windows:
    """The windows of the convolution that a ConvTranspose transposes; declines if they are not valid or if there are none."""
    a = site.attributes
    placed = a.get("auto_pad", "NOTSET"), a.get("output_shape")
    auto_pad, output_shape = placed if site.version >= 11 else before_11(x.ndim - 2, *placed)
    return geometry(
        site, transposed, x.shape[2:], w.shape[2:], a.get("strides"), a.get("pads"), a.get("dilations"),
        auto_pad, a.get("output_padding"), output_shape,
    )  # fmt: skip


def pool_windows(site: Site, x: Value, kernel_shape: Sequence[int]) -> Windows:
    """The windows of a pooling; declines unless each contains a cell that is not padding."""
    a = site.attributes
    site.require(3 <= x.ndim <= 5, "the rank is not 3, 4 or 5")
    pads, auto = a.get("pads"), a.get("auto_pad", "NOTSET")
    at = geometry(
        site, windows, x.shape[2:], kernel_shape, a.get("strides"), pads, a.get("dilations"), auto, a.get("ceil_mode", 0),
        partial=True,
    )  # fmt: skip
    for size, k, s, d, begin, count in zip(at.sizes, at.kernel, at.strides, at.dilations, at.begins, at.counts, strict=True):
        inside = begin <= (k - 1) * d and (count - 1) * s - begin < size and (d <= size or k == 1)
        site.require(inside, "a window may contain only padding")
    return at


def average_algorithm(site: Site, at: Windows) -> str:
    """OneDNN's average for the attributes of an AveragePool."""
    if not site.attributes.get("count_include_pad", 0) or not (any(at.begins) or any(at.ends)):
        return "avg_exclude_padding"
    inside = all(need <= end for need, end in zip(ends(at), at.ends, strict=True))
    site.require(inside, "a window extends beyond padding that counts")
    return "avg_include_padding"


@kernel("Conv", 1, 11, 22, on="onednn")
def conv(site: Site, x: Value, w: Value, b: Value | None = None) -> Value:
    """A convolution with its followers; weights are packed once."""
    require_plain(site, x, w, b)
    a = site.attributes
    group = a.get("group", 1)
    require_filters(site, x, w, group)
    site.require(x.shape[1] == w.shape[1] * group and w.shape[0] % group == 0, "the shapes do not match")
    at = windows_of(site, x, w)
    shape = (x.shape[0], w.shape[0], *at.counts)
    return _convolve(site, dnn.convolution, x, w, b, filters_of(w, group), shape, at, math.prod(w.shape[1:]))


@kernel("ConvTranspose", 1, 11, 22, on="onednn")
def conv_transpose(site: Site, x: Value, w: Value, b: Value | None = None) -> Value:
    """A transposed convolution with its followers; weights are packed once."""
    require_plain(site, x, w, b)
    a = site.attributes
    group = a.get("group", 1)
    require_filters(site, x, w, group)
    site.require(x.shape[1] == w.shape[0] and w.shape[0] % group == 0, "the shapes do not match")
    at = transposed_windows_of(site, x, w)
    shape = (x.shape[0], w.shape[1] * group, *at.sizes)
    fixed = w.constant and (b is None or b.constant)
    if fixed and group == 1 and x.ndim == 3 and 1 < at.strides[0] <= at.kernel[0] and at.dilations == (1,):
        return _interleaved(site, x, w, b, at)
    taps = w.shape[0] // group * math.prod(w.shape[2:])
    return _convolve(site, dnn.deconvolution, x, w, b, transposed_filters_of(w, group), shape, at, taps)


def _interleaved(site: Site, x: Value, w: Value, b: Value | None, at: Windows) -> Value:
    """Emit a transposed convolution of one axis as a convolution with one filter for each cell of a stride.

    Cell p * stride + r of the full result is the sum over j of X[p - j] * W[j * stride + r]; with the channels innermost, the
    results of these filters are in the order of the cells.  oneDNN would search for the blocks of a transposed convolution with
    a stride for 0.075 ms for each column: 0.4 s for 5,504.

    Args:
        site: the place.
        x: the input.
        w: the filters, (C, M, kernel); constant.
        b: the bias of M values, or None; constant.
        at: the windows of the transposed convolution; the kernel is as large as the stride or larger.
    """
    (channels, results, kernel), (stride,), (size,) = w.shape, at.strides, at.sizes
    taps, (length,) = -(-kernel // stride), x.shape[2:]
    skipped = min(at.begins[0] // stride, taps - 1)
    begin = taps - 1 - skipped
    count = max(-(-(at.begins[0] + size) // stride) - skipped, length + begin - taps + 1)
    site.require(count != size, "operands of what follows could have the shape of the convolution")
    if kernel % stride:
        site.needs_finite()  # the last filters are padded with zeros

    def filters() -> np.ndarray:
        padded = np.pad(w.array, ((0, 0), (0, 0), (0, taps * stride - kernel)))
        split = np.flip(padded.reshape(channels, results, taps, stride), 2)
        return split.transpose(3, 1, 0, 2).reshape(stride * results, channels, taps)

    each = derived(site, w, ("interleaved", stride), filters)
    bias = None if b is None else derived(site, b, ("interleaved", stride), lambda: np.tile(b.array, stride))
    shape = (x.shape[0], stride * results, count)
    windows_of_blocks = Windows((length,), (taps,), (1,), (1,), (begin,), (0,), (count,))
    y = _convolve(site, dnn.convolution, x, each, bias, filters_of(each, 1), shape, windows_of_blocks, channels * taps)
    cell = results * y.dtype.itemsize
    return y.view((x.shape[0], results, size), (y.strides[0], y.strides[1], cell), (at.begins[0] - skipped * stride) * cell)


def require_filters(site: Site, x: Value, w: Value, group: int) -> None:
    """Decline filters that oneDNN does not take, or with which its result may differ from the definition."""
    site.require(3 <= x.ndim <= 5 and w.ndim == x.ndim, "the rank is not 3, 4 or 5")
    site.require(tuple(site.attributes.get("kernel_shape") or w.shape[2:]) == w.shape[2:], "kernel_shape is not the filters'")
    site.require(group >= 1 and w.finiteness == FINITE, "the filters may be infinite, or there is no group")
    if not w.constant:
        site.needs_finite()  # oneDNN does not multiply padding with infinite weights


def filters_of(w: Value, group: int) -> MemoryDesc:
    """The description of the filters of a Conv."""
    outputs, steps = w.shape[0] // group, w.steps
    return _desc_of(w, (group, outputs, w.shape[1]), (steps[0] * outputs, steps[0], steps[1]))


def transposed_filters_of(w: Value, group: int) -> MemoryDesc:
    """The description of the filters of a ConvTranspose."""
    inputs, steps = w.shape[0] // group, w.steps
    return _desc_of(w, (group, w.shape[1], inputs), (steps[0] * inputs, steps[1], steps[0]))


def _desc_of(w: Value, shape: tuple[int, int, int], steps: tuple[int, int, int]) -> MemoryDesc:
    """The description of filters with a leading axis for the groups, if there are several."""
    first = 0 if shape[0] > 1 else 1
    return MemoryDesc.of(w.dtype, (*shape[first:], *w.shape[2:]), (*steps[first:], *w.steps[2:]))


def _convolve(
    site: Site,
    create: Callable[..., Primitive],
    x: Value,
    w: Value,
    b: Value | None,
    given: MemoryDesc,
    shape: tuple[int, ...],
    at: Windows,
    taps: int,
) -> Value:
    """Emit a convolution; `given` describes the filters as they are, `taps` is the number of products for each result.

    If oneDNN has no fast code that adds the bias, a second step does, and computes what follows.
    """
    site.require(b is None or b.shape == shape[1:2], "the bias is not one value for each channel")
    order = last_order(x.ndim)
    src, dst = dense_desc(x.dtype, x.shape, order), dense_desc(x.dtype, shape, order)
    bias = None if b is None else desc(b)

    finiteness, mode = FINITE if worst(x, w, b) == FINITE else NAN, fpmath(site.options)

    def build(attributes: Attributes, bias: MemoryDesc | None = bias) -> Primitive:
        return create(
            src, unset(w.dtype, given.shape), bias, dst, strides=at.strides, dilations=[d - 1 for d in at.dilations],
            pads_begin=at.begins, pads_end=ends(at), attributes=attributes,
        )  # fmt: skip

    def multiply(primitive: Primitive, y: Value, further: dict[int, tuple[MemoryDesc, Value]]) -> None:
        layout = primitive.query("weights")
        arguments = {dnn.args.SRC: (src, channels_last(site, x)), dnn.args.DST: (dst, y)}
        arguments[dnn.args.WEIGHTS] = (layout, packed(site, w, given, layout))
        emit(site, primitive, arguments | further, (y,), "conv")

    with threads_for(math.prod(shape) * taps):
        try:
            made, fused = epilogue.create(site, build, shape, order, finiteness, mode)
        except dnn.Unimplemented:
            if b is None:
                raise
            made, fused = build(Attributes(fpmath=mode), None), None
    if fused is not None:
        y, further = epilogue.result(site, fused, shape, order)
        multiply(made, y, further if b is None or bias is None else {**further, dnn.args.BIAS: (bias, b)})
        return y
    assert b is not None
    row = strided_desc(F32, (1, b.size, *[1] * len(at.counts)), (b.strides[0] * b.size, b.strides[0], *[4] * len(at.counts)))

    def add(attributes: Attributes) -> Primitive:
        return dnn.binary(dst, row, dst, algorithm="add", attributes=attributes)

    with threads_for(math.prod(shape)):
        plus, followed = epilogue.create(site, add, shape, order, finiteness)
    y, further = epilogue.result(site, followed, shape, order)
    sums = y.view(y.shape, y.strides) if followed.into is None else site.new(shape, F32, order)
    multiply(made, sums, {})
    emit(site, plus, {dnn.args.SRC: (dst, sums), dnn.args.SRC_1: (row, b), dnn.args.DST: (dst, y), **further}, (y,), "bias")
    return y


def ends(at: Windows) -> list[int]:
    """The padding after each axis that the last window needs: oneDNN rounds down as ONNX does."""
    reach = ((k - 1) * d + 1 for k, d in zip(at.kernel, at.dilations, strict=True))
    axes = zip(at.counts, at.strides, reach, at.begins, at.sizes, strict=True)
    return [at_least_zero((n - 1) * s + r - begin - size) for n, s, r, begin, size in axes]
