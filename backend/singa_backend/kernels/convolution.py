"""Convolutions and transposed convolutions on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import OperatorError
from ..ir.windows import Windows, windows
from . import onednn, post_ops
from .lowering import channels_last, dense_desc, desc, emit, packed, require_plain, threads_for, unset
from .onednn import BIAS, DST, SRC, WEIGHTS, Attributes, MemoryDesc, Primitive
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


def filters(w: Value, group: int, outputs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the strides (elements) of filters whose first axis is split into groups."""
    if group == 1:
        return w.shape, w.steps
    return (group, outputs // group, *w.shape[1:]), (w.steps[0] * (outputs // group), *w.steps)


def mode(site: Site) -> str:
    """The arithmetic of products."""
    return "bf16" if site.options.precision == "bf16" else "strict"


@kernel("Conv", 1, 11, 22, on="onednn")
def conv(site: Site, x: Value, w: Value, b: Value | None = None) -> Value:
    """A convolution with its followers; weights are packed once."""
    require_plain(site, x, w, b)
    a = site.attributes
    group, rank = a.get("group", 1), x.ndim - 2
    site.require(1 <= rank <= 3 and w.ndim == x.ndim, "the rank is not 3, 4 or 5")
    valid = group >= 1 and x.shape[1] == w.shape[1] * group and w.shape[0] % group == 0
    site.require(valid and tuple(a.get("kernel_shape") or w.shape[2:]) == w.shape[2:], "the shapes do not match")
    site.require(b is None or b.shape == w.shape[:1], "the bias is not one value for each channel")
    site.require(w.hazard == FINITE, "the weights may be infinite")
    at = geometry(
        site, windows, x.shape[2:], w.shape[2:], a.get("strides"), a.get("pads"), a.get("dilations"), a.get("auto_pad", "NOTSET")
    )
    if not w.constant:
        site.needs_finite()  # oneDNN does not multiply padding with infinite weights
    outputs = w.shape[0]
    shape, steps = filters(w, group, outputs)
    y_shape = (x.shape[0], outputs, *at.counts)
    order = last_order(x.ndim)
    src, dst = dense_desc(x.dtype, x.shape, order), dense_desc(x.dtype, y_shape, order)
    given = MemoryDesc.of(w.dtype, shape, steps)
    bias = None if b is None else desc(b)

    def build(attributes: Attributes) -> Primitive:
        return onednn.convolution(
            src, unset(w.dtype, shape), bias, dst, strides=at.strides, dilations=[d - 1 for d in at.dilations],
            pads_begin=at.begins, pads_end=_ends(at), attributes=attributes,
        )  # fmt: skip

    hazard = FINITE if worst(x, w, b) == FINITE else NAN
    with threads_for(2 * math.prod(y_shape) * math.prod(w.shape[1:])):
        made, fused = post_ops.create(site, build, y_shape, order, hazard, mode(site))
    x = channels_last(site, x)
    layout = made.query("weights")
    weights = packed(site, w, given, layout)
    y, arguments = post_ops.result(site, fused, y_shape, order)
    arguments |= {SRC: (src, x), WEIGHTS: (layout, weights), DST: (dst, y)}
    if b is not None and bias is not None:
        arguments[BIAS] = (bias, b)
    emit(site, made, arguments, (y,), "conv")
    return y


def _ends(at: Windows) -> Sequence[int]:
    """The padding after each axis that the last window needs: oneDNN rounds down as ONNX does."""
    reach = ((k - 1) * d + 1 for k, d in zip(at.kernel, at.dilations, strict=True))
    axes = zip(at.counts, at.strides, reach, at.begins, at.sizes, strict=True)
    return [max((n - 1) * s + r - begin - size, 0) for n, s, r, begin, size in axes]
