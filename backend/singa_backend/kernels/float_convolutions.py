"""Convolutions of float32 by machine code: see gemm/floats.py and gemm/images.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..gemm.images import depthwise, margins
from ..ir.windows import Windows, windows
from . import onednn as dnn
from .convolution import ends, geometry
from .float_products import BatchAxis, FloatProduct, FloatProductStep, declined
from .lowering import F32, channels_last, derived
from .machine_steps import emit_product
from .table import Site, kernel, worst
from .values import FINITE, NAN, Value, last_order


@dataclass(frozen=True)
class Image:
    """Images with their channels innermost, and margins.

    Attributes:
        value: the memory.
        image: the bytes from an image to the next.
        row: from a row to the next.
        pixel: from a pixel to the next.
    """

    value: Value
    image: int
    row: int
    pixel: int


def with_margins(site: Site, x: Value, begins: tuple[int, int], ends: tuple[int, int], spread: tuple[int, int] = (1, 1)) -> Image:
    """Images of shape (N, C, H, W) with zeros around them, and between pixels that are spread.

    Args:
        site: the place.
        x: the images.
        begins: the zeros before rows and columns; negative ones crop.
        ends: those after them.
        spread: the distance of the pixels.
    """
    x = channels_last(site, x)
    (n, c, h, w), (image, _, row, pixel) = x.shape, x.strides
    if not any((*begins, *ends)) and spread == (1, 1):
        return Image(x, image, row, pixel)
    high, wide = ((d - 1) * s + 1 + b + e for d, s, b, e in zip((h, w), spread, begins, ends, strict=True))

    def make() -> Value:
        y = site.new((n, c, high, wide), F32, last_order(4), x.finiteness)
        plain = spread[1] == 1 and pixel == c * F32.itemsize
        sizes = {
            "rows": n * high, "height": high, "top": begins[0], "within": h, "every": spread[0], "left": begins[1] * c,
            "count": 1 if plain else w, "width": w * c if plain else c, "gap": (spread[1] - 1) * c, "right": ends[1] * c,
            "x_image": image, "x_row": row, "x_pixel": pixel,
        }  # fmt: skip
        emit_product(site, margins(), sizes, {"x": x, "y": y}, ("y",), y.size, "margins")
        return y

    y = site.kept(x, ("margins", begins, ends, spread), make)
    return Image(y, high * wide * c * F32.itemsize, wide * c * F32.itemsize, c * F32.itemsize)


def flat(v: Value) -> Value:
    """A value with a spatial axis more if it has one only."""
    if v.ndim != 3:
        return v
    return v.view((*v.shape[:2], 1, v.shape[2]), (*v.strides[:2], v.strides[2] * v.shape[2], v.strides[2]))


def twice(numbers: tuple[int, ...], other: int) -> tuple[int, int]:
    """Numbers of two spatial axes."""
    return (other, *numbers)[-2:]  # type: ignore[return-value]  # one or two numbers


@kernel("Conv", 1, 11, 22, on="machine")
def conv_by_code(site: Site, x: Value, w: Value, b: Value | None = None) -> Value:
    """A convolution with what follows it."""
    reason = declined(site)
    site.require(not reason, reason)
    site.require(site.options.deterministic or dnn.library() is None, "oneDNN is faster")
    a, group = site.attributes, site.attributes.get("group", 1)
    site.require(all(v is None or (v.dtype == F32 and v.size) for v in (x, w, b)), "not float32, or empty")
    site.require(x.ndim == w.ndim and x.ndim in (3, 4), "the rank is not 3 or 4")
    site.require(tuple(a.get("kernel_shape") or w.shape[2:]) == w.shape[2:], "kernel_shape is not the filters'")
    site.require(group >= 1 and x.shape[1] == w.shape[1] * group and w.shape[0] % group == 0, "the shapes do not match")
    site.require(b is None or b.shape == w.shape[:1], "the bias is not one value for each channel")
    at = geometry(
        site, windows, x.shape[2:], w.shape[2:], a.get("strides"), a.get("pads"), a.get("dilations"), a.get("auto_pad", "NOTSET")
    )
    return convolve(site, x, w, b, at, group)


def convolve(site: Site, x: Value, w: Value, b: Value | None, at: Windows, group: int) -> Value:
    """Emit a convolution."""
    image = with_margins(site, flat(x), twice(at.begins, 0), twice(tuple(ends(at)), 0))
    shape = (x.shape[0], w.shape[0], *at.counts)
    y = site.new(shape, F32, last_order(len(shape)))
    finiteness = FINITE if worst(x, w, b) == FINITE else NAN
    strides, dilations, kernel, counts = (twice(t, 1) for t in (at.strides, at.dilations, at.kernel, at.counts))
    channels, filters = x.shape[1] // group, w.shape[0] // group
    filter_steps = flat(w).strides
    steps = [(image.row * d, image.pixel * e) for d, e in (strides, dilations)]
    taps = [(k, s, f) for k, s, f in zip(kernel, steps[1], filter_steps[2:], strict=True)]
    rows = [(x.shape[0], image.image), *zip(counts, steps[0], strict=True)]
    if channels == filters == 1 and group > 1 and w.constant:
        return _depthwise(site, image, w, b, y, rows, taps, finiteness)
    product = FloatProduct(
        shape, image.value, w, rows, (0, *range(2, len(shape))), (channels, F32.itemsize, filter_steps[1]),
        (filters, filter_steps[0]), 1, taps, [BatchAxis(group, channels * F32.itemsize, filters * filter_steps[0], ())],
    )  # fmt: skip
    y, count = FloatProductStep(site, product).emit(y, b, site.followers, 0, finiteness)
    site.absorb(count)
    return y


def _depthwise(
    site: Site, image: Image, w: Value, b: Value | None, y: Value, rows: list[tuple[int, int]], taps: list[tuple[int, int, int]],
    finiteness: int,
) -> Value:  # fmt: skip
    """Emit a convolution of each channel by itself."""
    channels = w.shape[0]
    filters = derived(site, w, "filters innermost", lambda: np.ascontiguousarray(w.read().reshape(channels, -1).T))
    bias = b if b is not None else site.shared_constant(("no bias", channels), lambda: np.zeros(channels, F32))
    site.require(bias.strides == (F32.itemsize,), "the bias is not dense")
    (n, x_image), (high, x_row), (wide, x_pixel) = rows
    (_, x_tap0, _), (tap1, x_tap1, _) = taps
    pixel = channels * F32.itemsize
    sizes = {
        "rows": n * high, "row1": high, "count": wide, "channels": channels, "taps": math.prod(t[0] for t in taps), "tap1": tap1,
        "x_row0": x_image, "x_row1": x_row, "x_pixel": x_pixel, "x_tap0": x_tap0, "x_tap1": x_tap1,
        "y_row": wide * pixel, "y_pixel": pixel,
    }  # fmt: skip
    y.finiteness = finiteness
    values = {"x": image.value, "w": filters, "bias": bias, "y": y}
    emit_product(site, depthwise(), sizes, values, ("y",), y.size * sizes["taps"], "depthwise")
    return y
