"""Poolings on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

import math

import numpy as np

from ..ir.windows import Windows
from . import onednn as dnn
from .convolution import average_algorithm, ends, pool_windows
from .elementwise import FLOATS, nan_of_infinite
from .lowering import channels_last, dense_desc, emit, require_plain, threads_for
from .reductions import divided, reduced
from .table import Site, kernel
from .values import FINITE, INFINITE, NAN, Value, last_order

LONG = 1 << 12
"""The cells of a window from which oneDNN, which adds them one after the other, does not compute their sum."""

MAXIMA = (np.dtype(np.float32), np.dtype(np.int8), np.dtype(np.uint8))


def _pool(site: Site, x: Value, at: Windows, algorithm: str, finiteness: int) -> Value:
    shape, order = (*x.shape[:2], *at.counts), last_order(x.ndim)
    src, dst = dense_desc(x.dtype, x.shape, order), dense_desc(x.dtype, shape, order)
    with threads_for(math.prod(shape) * math.prod(at.kernel)):
        made = dnn.pooling(
            src, dst, algorithm=algorithm, kernel=at.kernel, strides=at.strides, dilations=[d - 1 for d in at.dilations],
            pads_begin=at.begins, pads_end=ends(at),
        )  # fmt: skip
    x = channels_last(site, x)
    y = site.new(shape, x.dtype, order, finiteness)
    emit(site, made, {dnn.args.SRC: (src, x), dnn.args.DST: (dst, y)}, (y,), "pooling")
    return y


def require_no_nan(site: Site, x: Value) -> None:
    """OneDNN's maximum skips NaN; NumPy's returns it."""
    if x.dtype.kind == "f":
        site.require(x.finiteness < NAN, "the input may contain NaN")
        site.needs_finite()


@kernel("MaxPool", 1, 8, 10, 11, 12, 22, on="onednn")
def max_pool(site: Site, x: Value) -> Value:
    """A maximum pooling without indices."""
    require_plain(site, x, dtypes=MAXIMA)
    site.require(not any(site.outputs[1:]), "the indices are used")
    site.require(site.attributes.get("storage_order", 0) in (0, 1), "not a valid storage_order")
    require_no_nan(site, x)
    return _pool(site, x, pool_windows(site, x, site.attributes["kernel_shape"]), "max", x.finiteness)


@kernel("AveragePool", 1, 7, 10, 11, 19, 22, on="onednn")
def average_pool(site: Site, x: Value) -> Value:
    """An average pooling; cells beyond the padding (ceil_mode) do not count."""
    require_plain(site, x)
    at = pool_windows(site, x, site.attributes["kernel_shape"])
    site.require(math.prod(at.kernel) < LONG, "sums of so many cells would not be exact")
    return _pool(site, x, at, average_algorithm(site, at), _sum_of(x))


@kernel("AveragePool", 1, 7, 10, 11, 19, 22, on="numpy")
def average_pool_sums(site: Site, x: Value) -> Value:
    """An average pooling of adjacent windows of many cells, by sums in stages."""
    site.require(x.dtype in FLOATS and x.size, "elements of other types, or none")
    at = pool_windows(site, x, site.attributes["kernel_shape"])
    adjacent = at.strides == at.kernel and not any((*at.begins, *at.ends)) and set(at.dilations) == {1}
    covered = [count * k for count, k in zip(at.counts, at.kernel, strict=True)]
    site.require(adjacent and all(n <= size for n, size in zip(covered, at.sizes, strict=True)), "the windows are not adjacent")
    site.require(math.prod(at.kernel) >= LONG, "for windows of many cells")
    shape, strides = list(x.shape[:2]), list(x.strides[:2])
    for count, k, stride in zip(at.counts, at.kernel, x.strides[2:], strict=True):
        shape += [count, k]
        strides += [k * stride, stride]
    return reduced(site, x.view(shape, strides), tuple(range(3, len(shape), 2)), False, np.add, nan_of_infinite, divided)


def _sum_of(x: Value) -> int:
    return NAN if x.finiteness >= INFINITE else FINITE


@kernel("GlobalAveragePool", 1, 22, on="numpy")
def global_average_pool_sums(site: Site, x: Value) -> Value:
    """The average of each channel, by sums in stages."""
    site.require(x.dtype in FLOATS and x.ndim > 2, "elements of other types, or no spatial axes")
    return reduced(site, x, tuple(range(2, x.ndim)), True, np.add, nan_of_infinite, divided)
