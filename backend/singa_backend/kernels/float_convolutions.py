"""Convolutions of float32 by machine code: see gemm/floats.py and gemm/images.py."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ..gemm.copies import margins
from ..gemm.floats import SHORT
from ..gemm.images import depthwise, maxima
from ..ir.sizes import at_least_zero, is_open, late
from ..ir.versioned import versioned
from ..ir.windows import Windows
from . import onednn as dnn
from .convolution import average_algorithm, ends, pool_windows, require_filters, transposed_windows_of, windows_of
from .expressions import ExpressionCall, compute, trace
from .float_products import BatchAxis, FloatProduct, FloatProductStep, declined
from .lowering import F32, channels_last, derived
from .machine_steps import emit_product
from .table import Site, kernel, worst
from .values import FINITE, NAN, Value, last_order


class Image(NamedTuple):
    """Images with margins.

    Attributes:
        value: the memory.
        image: the bytes from an image to the next.
        row: from a row to the next.
        pixel: from a pixel to the next.
        channel: from a channel to the next; usually channels are innermost.
        beyond: how windows extend beyond images without margins, for functions that compute each channel.
    """

    value: Value
    image: int
    row: int
    pixel: int
    channel: int = F32.itemsize
    beyond: Mapping[str, Any] = MappingProxyType({})


def with_margins(
    site: Site, x: Value, begins: tuple[int, int], ends: tuple[int, int], spread: tuple[int, int] = (1, 1), around: float = 0.0
) -> Image:
    """Images of shape (N, C, H, W) or (N, C, W) with zeros around them, and between pixels that are spread.

    Args:
        site: the place.
        x: the images.
        begins: the zeros before rows and columns; negative ones crop.
        ends: those after them.
        spread: the distance of the pixels.
        around: takes the place of zeros.
    """
    x = flat(x)
    (n, c, h, w), (image, channel, row, pixel), last = x.shape, x.strides, x.channels_last
    if last and not any((*begins, *ends)) and spread == (1, 1):
        return Image(x, image, row, pixel)
    high, wide = ((d - 1) * s + 1 + b + e for d, s, b, e in zip((h, w), spread, begins, ends, strict=True))
    y = site.new((n, c, high, wide), F32, last_order(4), x.finiteness)
    plain = last and spread[1] == 1
    sizes = {
        "rows": n * high, "height": high, "top": begins[0], "within": h, "every": spread[0], "left": begins[1] * c,
        "count": 1 if plain else w, "width": w * c if plain else c, "gap": (spread[1] - 1) * c, "right": ends[1] * c,
        "x_image": image, "x_row": row, "x_pixel": pixel, "x_width": F32.itemsize if plain else channel,
    }  # fmt: skip
    emit_product(site, margins(around), sizes, {"x": x, "y": y}, ("y",), y.size, "margins")
    return Image(y, high * wide * c * F32.itemsize, wide * c * F32.itemsize, c * F32.itemsize)


def without_margins(site: Site, x: Value, at: Windows) -> Image:
    """Images of shape (N, C, H, W) or (N, C, W), beyond which windows extend, whose cells are adjacent."""
    (high, wide), (_, kernel), (down, across) = (twice(t, 1) for t in (at.sizes, at.kernel, at.strides))
    (top, left), count = twice(at.begins, 0), at.counts[-1]
    beyond = {
        "top": top, "stride0": down, "size0": high, "left": left, "stride1": across, "size1": wide,
        "first": late(min, -(-left // across), count), "last": late(_last, wide, kernel, across, left, count),
    }  # fmt: skip
    return with_margins(site, x, (0, 0), (0, 0))._replace(beyond=beyond)


def _last(size: int, kernel: int, stride: int, left: int, count: int) -> int:
    """The number of windows, from the first on, that do not extend beyond the right."""
    return max(min(-(-left // stride), count), min((size - kernel + left) // stride + 1, count))


def in_planes(site: Site, x: Value, begins: tuple[int, int], ends: tuple[int, int]) -> Image:
    """Images of shape (N, C, H, W) in C order with zeros around each channel: rows are copied as they are."""
    n, c, h, w = x.shape
    y, (_, channel, row, pixel) = x, x.strides
    if any((*begins, *ends)):
        high, wide = h + begins[0] + ends[0], w + begins[1] + ends[1]
        y = site.new((n, c, high, wide), F32, finiteness=x.finiteness)
        sizes = {
            "rows": n * c * high, "height": high, "top": begins[0], "within": h, "every": 1, "left": begins[1], "count": 1,
            "width": w, "gap": 0, "right": ends[1], "x_image": channel, "x_row": row, "x_pixel": pixel, "x_width": pixel,
        }  # fmt: skip
        emit_product(site, margins(), sizes, {"x": x, "y": y}, ("y",), y.size, "margins")
    image, channel, row, pixel = y.strides
    return Image(y, image, row, pixel, channel)


def flat(v: Value) -> Value:
    """A value with a spatial axis more if it has one only."""
    if v.ndim != 3:
        return v
    return v.view((*v.shape[:2], 1, v.shape[2]), (*v.strides[:2], v.strides[2] * v.shape[2], v.strides[2]))


def twice(numbers: tuple[int, ...], other: int) -> tuple[int, int]:
    """Numbers of two spatial axes."""
    return (other, *numbers)[-2:]  # type: ignore[return-value]  # one or two numbers


def code_declined(site: Site, *values: Value | None) -> str:
    """Why machine code does not compute a convolution of these values; empty if it does."""
    if reason := declined(site):
        return reason
    is_image = values[0] is not None and is_open(values[0].shape[2:])
    if not site.options.deterministic and dnn.library() is not None and not is_image:
        return "oneDNN is faster"
    if any(v is not None and (v.dtype != F32 or not v.size) for v in values):
        return "not float32, or empty"
    return "" if values[0] is not None and values[0].ndim in (3, 4) else "the rank is not 3 or 4"


def require_code(site: Site, *values: Value | None) -> None:
    """Decline unless machine code computes a convolution of these values."""
    reason = code_declined(site, *values)
    site.require(not reason, reason)


@kernel("Conv", 1, 11, 22, on="machine")
def conv_by_code(site: Site, x: Value, w: Value, b: Value | None = None) -> Value:
    """A convolution with what follows it."""
    require_code(site, x, w, b)
    group = site.attributes.get("group", 1)
    require_filters(site, x, w, group)
    site.require(x.shape[1] == w.shape[1] * group and w.shape[0] % group == 0, "the shapes do not match")
    site.require(b is None or b.shape == w.shape[:1], "the bias is not one value for each channel")
    return plain(site, x, w, b, windows_of(site, x, w), group)


def plain(site: Site, x: Value, w: Value, b: Value | None, at: Windows, group: int) -> Value:
    """Emit a convolution.

    Args:
        site: the place.
        x: the images, (N, C, ..).
        w: the filters, (M, C / group, ..).
        b: a number for each of M channels, or None.
        at: its windows.
        group: the number of groups.
    """
    steps, around = flat(w).strides, (twice(at.begins, 0), twice(tuple(ends(at)), 0))
    narrow = group == 1 < x.shape[1] and math.prod(w.shape[1:]) <= SHORT and at.dilations[-1] == 1
    if narrow and x.contiguous and not x.channels_last:
        image = in_planes(site, flat(x), *around)
    elif group == w.shape[0] and w.shape[1] == 1 and w.finiteness == FINITE and set(at.dilations) == {1}:
        image = without_margins(site, x, at)
    else:
        image = with_margins(site, x, *around)
    taps = [*zip(twice(at.kernel, 1), steps[2:], strict=True)]
    depth, columns = (w.shape[1], steps[1]), (w.shape[0] // group, steps[0])
    return _convolve(site, image, w, b, at.counts, twice(at.strides, 1), twice(at.dilations, 1), taps, depth, columns, group)


@kernel("ConvTranspose", 1, 11, 22, on="machine")
def conv_transpose_by_code(site: Site, x: Value, w: Value, b: Value | None = None) -> Value:
    """A transposed convolution with what follows it."""
    require_code(site, x, w, b)
    group = site.attributes.get("group", 1)
    require_filters(site, x, w, group)
    site.require(x.shape[1] == w.shape[0] and w.shape[0] % group == 0, "the shapes do not match")
    site.require(b is None or b.shape == (w.shape[1] * group,), "the bias is not one value for each channel")
    at = transposed_windows_of(site, x, w)
    made = in_phases(site, x, w, b, at, group)
    return spread(site, x, w, b, at, group) if made is None else made


class Phase(NamedTuple):
    """Every so-many-th place of an axis of a transposed convolution, which the same taps compute.

    Attributes:
        first: the first place.
        count: the number of places.
        source: the place of the image that the first tap of the first one reads; it may be in the margin.
        taps: their number; from one to the next, the place in the filter is `stride` lower.
        tap: the place of the first one in the filter.
    """

    first: int
    count: Any
    source: int
    taps: int
    tap: int


def phases_of(size: Any, kernel: int, stride: int, begin: int) -> list[Phase]:
    """The phases of an axis: place o is the sum of w[t] x[i] over all i * stride + t = o + begin."""
    made = []
    for p in range(stride):
        taps = -(-(kernel - p) // stride)
        low = -((p - begin) // stride)  # the lowest i of tap p
        count = (size - 1 + begin - p) // stride - low + 1
        made.append(Phase(low * stride + p - begin, count, low - taps + 1, taps, p + stride * (taps - 1)))
    return made


def in_phases(site: Site, x: Value, w: Value, b: Value | None, at: Windows, group: int) -> Value | None:
    """Emit a transposed convolution as a convolution for each phase of its result; None if that is not possible.

    The arguments are those of `spread`, which multiplies zeros as well.
    """
    depth, columns = w.shape[0] // group, w.shape[1]
    axes = [*zip(at.sizes, at.kernel, at.strides, at.begins, strict=True)]
    if set(at.dilations) != {1} or depth == columns == 1 or any(k < s for _, k, s, _ in axes):
        return None
    if (x.shape[0] != 1) + (len(axes) == 2) + (group > 1) > 2:  # more axes of products than there may be
        return None
    (down, across), sizes = twice(at.strides, 1), twice(x.shape[2:], 1)
    rows, pixels = ([Phase(0, 1, 0, 1, 0)] if len(axes) == 1 else phases_of(*axes[0]), phases_of(*axes[-1]))

    def needed(several: list[Phase], size: Any) -> tuple[int, int]:
        """The margins before and after an axis."""
        after = at_least_zero(max(p.source + p.taps + p.count - 1 - size for p in several))
        return max(0, *(-p.source for p in several)), after

    begins, after = zip(needed(rows, sizes[0]), needed(pixels, sizes[1]), strict=True)
    if any(p.count < 1 for p in (*rows, *pixels)):
        return None
    image = with_margins(site, x, begins, after)
    y = site.new((x.shape[0], group * columns, *at.sizes), F32, last_order(x.ndim))
    shape, (y_image, _, y_row, y_pixel), (w_depth, w_column, w_row, w_pixel) = y.shape, flat(y).strides, flat(w).strides
    calls = [*takewhile(lambda f: f.place >= 0 and (f.other is None or f.other.size == 1) and len(f.inputs) < 3, site.followers)]
    counts = set()
    for r, p in ((r, p) for r in rows for p in pixels):
        offset = r.first * y_row + p.first * y_pixel
        counts_ = (p.count,) if len(axes) == 1 else (r.count, p.count)
        steps = (down * y_row, across * y_pixel)[-len(axes) :]
        part = y.view((*shape[:2], *counts_), (y_image, F32.itemsize, *steps), offset)
        source = (r.source + begins[0]) * image.row + (p.source + begins[1]) * image.pixel
        filters = replace(w, offset=w.offset + r.tap * w_row + p.tap * w_pixel)
        batch = [BatchAxis(shape[0], image.image, 0, (0,))] if shape[0] != 1 else []
        batch += [BatchAxis(r.count, image.row, 0, (2,))] if len(axes) == 2 else []
        batch += [BatchAxis(group, depth * F32.itemsize, depth * w_depth, ())] if group > 1 else []
        taps = [(r.taps, image.row, -down * w_row), (p.taps, image.pixel, -across * w_pixel)]
        one = FloatProduct(
            part.shape, replace(image.value, offset=image.value.offset + source), filters, [(p.count, image.pixel)],
            (part.ndim - 1,), (depth, F32.itemsize, w_depth), (columns, w_column), 1, taps, batch,
        )  # fmt: skip
        part, count = FloatProductStep(site, one).emit(part, b, calls, 0, FINITE if worst(x, w, b) == FINITE else NAN)
        y.finiteness, y.low = part.finiteness, part.low
        counts.add(count)
    site.require(len(counts) == 1, "what follows differs between phases")
    site.absorb(counts.pop())
    return y


def spread(site: Site, x: Value, w: Value, b: Value | None, at: Windows, group: int) -> Value:
    """Emit a transposed convolution: one of images whose pixels are `strides` apart, with the filters turned.

    Args:
        site: the place.
        x: the images, (N, C, ..).
        w: the filters, (C, M / group, ..).
        b: a number for each of M channels, or None.
        at: the windows of the convolution that is transposed.
        group: the number of groups.
    """
    axes = zip(at.kernel, at.dilations, at.strides, at.begins, at.sizes, x.shape[2:], strict=True)
    pads = [((k - 1) * d - begin, size + begin - 1 - (n - 1) * s) for k, d, s, begin, size, n in axes]
    site.require(all(p >= 0 for pair in pads for p in pair), "margins are negative")
    begins, after = (twice(tuple(side), 0) for side in zip(*pads, strict=True))
    image = with_margins(site, x, begins, after, twice(at.strides, 1))
    steps, kernel = flat(w).strides, twice(at.kernel, 1)
    turned = replace(w, offset=w.offset + sum((k - 1) * s for k, s in zip(kernel, steps[2:], strict=True)))
    taps = [(k, -s) for k, s in zip(kernel, steps[2:], strict=True)]
    depth, columns = (w.shape[0] // group, steps[0]), (w.shape[1], steps[1])
    return _convolve(site, image, turned, b, at.sizes, (1, 1), twice(at.dilations, 1), taps, depth, columns, group)


@kernel("AveragePool", 1, 7, 10, 11, 19, 22, on="machine")
def average_pool_by_code(site: Site, x: Value) -> Value:
    """An average pooling: a convolution of each channel with ones, divided by the numbers of cells."""
    require_code(site, x)
    at = pool_windows(site, x, site.attributes["kernel_shape"])
    whole = average_algorithm(site, at) == "avg_include_padding"
    image = with_margins(site, x, twice(at.begins, 0), twice(tuple(ends(at)), 0))
    ones = site.shared_constant(("ones", at.kernel, x.shape[1]), lambda: np.ones((x.shape[1], 1, *at.kernel), F32))
    taps = [*zip(twice(at.kernel, 1), flat(ones).strides[2:], strict=True)]
    strides, dilations = twice(at.strides, 1), twice(at.dilations, 1)
    y = _convolve(site, image, ones, None, at.counts, strides, dilations, taps, (1, F32.itemsize), (1, F32.itemsize), x.shape[1])
    cells = np.array(math.prod(at.kernel), F32) if whole else _cells(at).astype(F32)
    terms, inputs = trace(site, [ExpressionCall(versioned("", "Div", 14), {}, (y, site.constant(cells)))])
    (y,) = compute(site, terms, inputs, "average", lambda v: v is y, {0: y})
    return y


@kernel("MaxPool", 1, 8, 10, 11, 12, 22, on="machine")
def max_pool_by_code(site: Site, x: Value) -> Value:
    """A maximum pooling without indices."""
    require_code(site, x)
    site.require(not any(site.outputs[1:]), "the indices are used")
    site.require(site.attributes.get("storage_order", 0) in (0, 1), "not a valid storage_order")
    at = pool_windows(site, x, site.attributes["kernel_shape"])
    if set(at.dilations) == {1}:
        image = without_margins(site, x, at)
    else:
        image = with_margins(site, x, twice(at.begins, 0), twice(tuple(ends(at)), 0), around=-math.inf)
    y = site.new((*x.shape[:2], *at.counts), F32, last_order(x.ndim), x.finiteness)
    (high, wide), kernel, strides, dilations = (twice(t, 1) for t in (at.counts, at.kernel, at.strides, at.dilations))
    steps = image.row, image.pixel
    rows = [(x.shape[0], image.image), (high, strides[0] * steps[0]), (wide, strides[1] * steps[1])]
    taps = [(k, d * s) for k, d, s in zip(kernel, dilations, steps, strict=True)]
    sizes = _each_channel(image, x.shape[1], rows, taps)
    emit_product(site, maxima(), sizes, {"x": image.value, "y": y}, ("y",), y.size * math.prod(at.kernel), "maxima")
    return y


def _each_channel(
    image: Image, channels: int, rows: Sequence[tuple[Any, Any]], taps: Sequence[tuple[int, Any]]
) -> dict[str, Any]:
    """The numbers of a function that computes each channel.

    Args:
        image: the images.
        channels: their number.
        rows: the images, the rows and the columns of the result, and their steps in the images.
        taps: the sizes of the two axes of windows, and their steps.
    """
    ((n, x_image), (high, x_row), (wide, x_pixel)), ((tap0, x_tap0), (tap1, x_tap1)) = rows, taps
    pixel = channels * F32.itemsize
    inside = {"top": 0, "stride0": 0, "size0": tap0, "left": 0, "stride1": 0, "size1": tap1, "first": 0, "last": wide}
    return inside | {
        "rows": n * high, "row1": high, "count": wide, "channels": channels, "tap0": tap0, "tap1": tap1,
        "x_row0": x_image, "x_row1": x_row, "x_pixel": x_pixel, "x_tap0": x_tap0, "x_tap1": x_tap1,
        "y_row": wide * pixel, "y_pixel": pixel,
    } | dict(image.beyond)  # fmt: skip


def _cells(at: Windows) -> np.ndarray:
    """The cells of each window that are not padding."""
    count = np.ones((1, 1), np.int64)
    for size, k, s, d, begin, windows_ in zip(at.sizes, at.kernel, at.strides, at.dilations, at.begins, at.counts, strict=True):
        places = np.arange(windows_)[:, None] * s - begin + np.arange(k) * d
        count = count[..., None] * ((places >= 0) & (places < size)).sum(1)
    return count


def of_filters(site: Site, dy: Value, x: Value, w: Value, at: Windows) -> Value:
    """Emit the gradient of a convolution for its filters: a row is an element of a filter, the depth is the pixels."""
    image = with_margins(site, x, twice(at.begins, 0), twice(tuple(ends(at)), 0))
    (m, c), given = w.shape[:2], flat(channels_last(site, dy))
    m = m // (x.shape[1] // c)
    strides, dilations, kernel, counts = (twice(t, 1) for t in (at.strides, at.dilations, at.kernel, at.counts))
    one = F32.itemsize
    rows = [(kernel[0], image.row * dilations[0]), (kernel[1], image.pixel * dilations[1]), (c, one)]
    images = (x.shape[0], image.image, given.strides[0])
    depth = (counts[1], image.pixel * strides[1], given.strides[3])
    taps = [images, (counts[0], image.row * strides[0], given.strides[2])]
    parts = [BatchAxis(x.shape[1] // c, c * one, m * one, ())]
    row_axes = (*range(2, w.ndim), 1)
    product = FloatProduct(w.shape, image.value, given, rows, row_axes, depth, (m, one), 0, taps, parts)
    y = site.new(w.shape, F32, (*row_axes, 0))
    y, _ = FloatProductStep(site, product).emit(y, None, (), 0, FINITE if worst(dy, x) == FINITE else NAN)
    return y


def _convolve(
    site: Site, image: Image, w: Value, b: Value | None, counts: tuple[int, ...], strides: tuple[int, int],
    dilations: tuple[int, int], taps: list[tuple[int, int]], depth: tuple[int, int], columns: tuple[int, int], group: int,
) -> Value:  # fmt: skip
    """Emit a convolution of images with margins.

    Args:
        site: the place.
        image: the images.
        w: the filters.
        b: a number for each channel of the result, or None.
        counts: the pixels of the result.
        strides: from a window to the next, in pixels.
        dilations: from a tap to the next.
        taps: the sizes of the filters, and their steps.
        depth: the channels of a group, and their step in the filters.
        columns: the same for the result.
        group: the number of groups.
    """
    shape = (image.value.shape[0], group * columns[0], *counts)
    y = site.new(shape, F32, last_order(len(shape)))
    finiteness = FINITE if worst(image.value, w, b) == FINITE else NAN
    steps = [(image.row * d, image.pixel * e) for d, e in (strides, dilations)]
    filters = [(k, s, f) for (k, f), s in zip(taps, steps[1], strict=True)]
    inner = (depth[0], image.channel, depth[1])
    if image.channel != F32.itemsize:
        *filters, inner = inner, *filters
    rows = [(shape[0], image.image), *zip(twice(counts, 1), steps[0], strict=True)]
    if depth[0] == columns[0] == 1:
        return _depthwise(site, image, w, b, y, rows, filters, finiteness)
    parts = [BatchAxis(group, depth[0] * F32.itemsize, w.shape[0] // group * w.strides[0], ())]
    product = FloatProduct(shape, image.value, w, rows, (0, *range(2, len(shape))), inner, columns, 1, filters, parts)
    y, count = FloatProductStep(site, product).emit(y, b, site.followers, 0, finiteness)
    site.absorb(count)
    return y


def _innermost(site: Site, w: Value) -> Value:
    """A copy in C order: made once for a constant, otherwise in every run."""
    if w.constant:
        return derived(site, w, ("in C order", w.offset, w.shape, w.strides), lambda: np.ascontiguousarray(w.read()))
    y = site.new(w.shape, F32, finiteness=w.finiteness)
    site.emit(lambda: [(np.copyto, (y.array, w.array))], reads=(w,), writes=(y,), kernel="numpy.copyto")
    return y


def _depthwise(
    site: Site, image: Image, w: Value, b: Value | None, y: Value, rows: list[tuple[int, int]], taps: list[tuple[int, int, int]],
    finiteness: int,
) -> Value:  # fmt: skip
    """Emit a convolution of each channel by itself."""
    channels = w.shape[0]
    each = w.view((*(t[0] for t in taps), channels), (*(t[2] for t in taps), w.strides[0]))
    filters = _innermost(site, replace(each, key=w.key))
    bias = b if b is not None else site.shared_constant(("no bias", channels), lambda: np.zeros(channels, F32))
    site.require(bias.strides == (F32.itemsize,), "the bias is not dense")
    sizes, cells = _each_channel(image, channels, rows, [t[:2] for t in taps]), math.prod(t[0] for t in taps)
    y.finiteness = finiteness
    values = {"x": image.value, "w": filters, "bias": bias, "y": y}
    emit_product(site, depthwise(), sizes, values, ("y",), y.size * cells, "depthwise")
    return y
