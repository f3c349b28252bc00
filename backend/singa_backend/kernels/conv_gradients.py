"""Gradients of convolutions and transposed convolutions on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ..ir.versioned import versioned
from ..ir.windows import Windows
from . import onednn as dnn
from .convolution import ends, filters_of, require_filters, transposed_filters_of, transposed_windows_of, windows_of
from .elementwise import nan_of_infinite
from .expressions import ExpressionCall, compute, trace
from .float_convolutions import code_declined, of_filters, plain, spread
from .lowering import channels_last, dense_desc, emit, packed, require_gradient, require_plain, threads_for, unset
from .moments import LONG
from .onednn import Attributes, MemoryDesc, Primitive, backward
from .reductions import reduced
from .rounding import fpmath
from .table import Site, gradient
from .values import FINITE, Value, last_order


@gradient("Conv", 1, 11, 22, reads=("dy0", "x0", "x1"))
def conv_gradient(site: Site, dy: Value, x: Value, w: Value) -> tuple[Value | None, ...]:
    """The gradients of a convolution for its input, its filters and its bias."""
    group = _require(site, dy, x, w)
    site.require(x.shape[1] == w.shape[1] * group and w.shape[0] % group == 0, "the shapes do not match")
    at = windows_of(site, x, w)
    shape = (x.shape[0], w.shape[0], *at.counts)
    by_code = _by_code(site, dy, shape, w, partial(spread, site, dy, w), partial(of_filters, site, dy, x), at, group)
    if by_code is not None:
        return by_code
    require_plain(site, x, w)
    require_gradient(site, dy, shape)
    kinds = (dnn.convolution, backward.convolution_backward_data, backward.convolution_backward_weights)
    return _gradients(site, kinds, dy, x, w, partial(filters_of, group=group), at)


def _by_code(
    site: Site, dy: Value, shape: tuple[int, ...], w: Value, data: Callable[..., Value], filters: Callable[..., Value],
    at: Windows, group: int,
) -> tuple[Value | None, ...] | None:  # fmt: skip
    """The gradients by machine code, of `data` and of `filters`; None if it does not compute them."""
    if code_declined(site, dy, w) or dy.shape != shape:
        return None
    needs_x, needs_w, needs_b = (*site.outputs, False, False)[:3]

    def emit() -> tuple[Value | None, ...]:
        dx = data(None, at, group) if needs_x else None
        dw = filters(w, at) if needs_w else None
        if not needs_b:
            return dx, dw, None
        axes = site.constant(np.array([0, *range(2, dy.ndim)], np.int64))
        call = ExpressionCall(versioned("", "ReduceSum", 13), {"keepdims": 0, "noop_with_empty_axes": 0}, (dy, axes))
        return dx, dw, *compute(site, *trace(site, [call]), "sum of columns", engine="machine")

    return site.attempt(emit)


@gradient("ConvTranspose", 11, 22, reads=("dy0", "x0", "x1"))
def conv_transpose_gradient(site: Site, dy: Value, x: Value, w: Value) -> tuple[Value | None, ...]:
    """The gradients of a transposed convolution for its input, its filters and its bias."""
    group = _require(site, dy, x, w)
    site.require(x.shape[1] == w.shape[0] and w.shape[0] % group == 0, "the shapes do not match")
    at = transposed_windows_of(site, x, w)
    shape = (x.shape[0], w.shape[1] * group, *at.sizes)
    by_code = _by_code(site, dy, shape, w, partial(plain, site, dy, w), partial(of_filters, site, x, dy), at, group)
    if by_code is not None:
        return by_code
    require_plain(site, x, w)
    require_gradient(site, dy, shape)
    kinds = (dnn.deconvolution, backward.deconvolution_backward_data, backward.deconvolution_backward_weights)
    return _gradients(site, kinds, dy, x, w, partial(transposed_filters_of, group=group), at)


def _require(site: Site, dy: Value, x: Value, w: Value) -> int:
    """Decline what oneDNN does not compute, or computes otherwise; return the number of groups."""
    group: int = site.attributes.get("group", 1)
    require_filters(site, x, w, group)
    site.require_finite(dy, x)  # padding is not multiplied
    return group


def _gradients(
    site: Site,
    kinds: tuple[Callable[..., Primitive], Callable[..., Primitive], Callable[..., Primitive]],
    dy: Value,
    x: Value,
    w: Value,
    describe: Callable[[Value], MemoryDesc],
    at: Windows,
) -> tuple[Value | None, ...]:
    """Emit the gradients that are needed; `describe` describes filters in C order."""
    given = describe(w)
    forward, by_data, by_weights = kinds
    order = last_order(x.ndim)
    src, dst = dense_desc(x.dtype, x.shape, order), dense_desc(dy.dtype, dy.shape, order)
    needs_x, needs_w, needs_b = (*site.outputs, False, False)[:3]
    long = dy.size // dy.shape[1] >= LONG  # sums that are computed apart, in stages
    bias = dense_desc(w.dtype, dy.shape[1:2]) if needs_b and not long else None
    filters = unset(w.dtype, given.shape)
    window: dict[str, Any] = {
        "strides": at.strides, "dilations": [d - 1 for d in at.dilations], "pads_begin": at.begins, "pads_end": ends(at),
        "attributes": Attributes(fpmath=fpmath(site.options)),
    }  # fmt: skip
    work = math.prod(dy.shape) * w.size
    with threads_for(work):
        hint = forward(src, filters, None, dst, prop="training", **window)
        data = by_data(src, filters, dst, hint=hint, **window) if needs_x else None
        weights = by_weights(src, filters, bias, dst, hint=hint, **window) if needs_w or bias else None
    dy = channels_last(site, dy)
    dx = dw = db = None
    if needs_b and long:
        db = reduced(site, dy, (0, *range(2, dy.ndim)), False, np.add, nan_of_infinite)
    if data is not None:
        layout = data.query("weights")
        dx = site.new(x.shape, x.dtype, order, FINITE)
        arguments = {dnn.args.DIFF_DST: (dst, dy), dnn.args.WEIGHTS: (layout, packed(site, w, given, layout))}
        emit(site, data, arguments | {dnn.args.DIFF_SRC: (src, dx)}, (dx,), "conv by data")
    if weights is not None:
        x = channels_last(site, x)
        layout = weights.query("diff_weights")
        dw = site.new(w.shape, w.dtype, None, FINITE)
        rows = describe(dw)
        direct = layout == rows
        made = dw if direct else Value(site.scratch(layout.nbytes), (layout.nbytes,), (1,), dw.dtype, 0, False, FINITE)
        arguments = {dnn.args.SRC: (src, x), dnn.args.DIFF_DST: (dst, dy), dnn.args.DIFF_WEIGHTS: (layout, made)}
        writes = [made]
        if bias is not None:
            db = site.new(dy.shape[1:2], w.dtype, None, FINITE)
            arguments[dnn.args.DIFF_BIAS] = (bias, db)
            writes.append(db)
        emit(site, weights, arguments, writes, "conv by weights")
        if not direct:
            with threads_for(w.size * 8):
                unpack = dnn.reorder(layout, rows)
            emit(site, unpack, {dnn.args.FROM: (layout, made), dnn.args.TO: (rows, dw)}, (dw,), "unpack gradient")
    return dx, dw if needs_w else None, db
