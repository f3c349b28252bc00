"""CuPy kernels that read or write the windows of convolutions and poolings along one or two axes: one pass each.

Sums and comparisons have the order of the definitions, from the first cell of a window to the last.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

Array = Any  # of CuPy
Sizes = tuple[int, ...]

_FLOATS = (np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64))


class WindowPlaces(NamedTuple):
    """Windows along each axis: window o reads the cells o * strides - begins + j * dilations for j below `kernel`."""

    kernel: Sizes
    strides: Sizes
    dilations: Sizes
    begins: Sizes
    counts: Sizes


def fits(x: Array, at: WindowPlaces) -> bool:
    """Whether the kernels take an array and windows."""
    return x.dtype in _FLOATS and 1 <= len(at.kernel) <= 2


def columns(cp: Any, x: Array, at: WindowPlaces) -> Array:
    """Return every window of x, with zeros as padding, as N x C x kernel x counts."""
    y = cp.empty((*x.shape[:2], *at.kernel, *at.counts), x.dtype)
    if y.size:
        _kernel(cp, "columns")(cp.ascontiguousarray(x), *_numbers(x.shape[2:], at), y)
    return y


def folded(cp: Any, parts: Array, sizes: Sizes, at: WindowPlaces) -> Array:
    """Add each window to the cells of an array of shape `sizes`, as N x G x M x sizes.

    Args:
        cp: CuPy.
        parts: the windows, as N x G x kernel x M x counts.
        sizes: the shape of the result, without its first three axes.
        at: the windows.
    """
    (n, g), m = parts.shape[:2], parts.shape[2 + len(at.kernel)]
    y = cp.empty((n, g, m, *sizes), parts.dtype)
    if y.size:
        _kernel(cp, "folded")(cp.ascontiguousarray(parts), np.int64(m), *_numbers(sizes, at), y)
    return y


def maxima(cp: Any, x: Array, at: WindowPlaces, *, places: bool) -> tuple[Array, Array | None]:
    """Return the maximum of each window, and if requested its place in the plane in row-major order.

    Of equal cells, and of NaN, the first one counts.  A window of padding has -inf, and the place -1.
    """
    y = cp.empty((*x.shape[:2], *at.counts), x.dtype)
    index = cp.empty(y.shape, np.int64) if places else None
    if y.size:
        out = (y,) if index is None else (y, index)
        _kernel(cp, "maxima" if index is None else "places")(cp.ascontiguousarray(x), *_numbers(x.shape[2:], at), *out)
    return y, index


@lru_cache(4096)
def _numbers(sizes: Sizes, at: WindowPlaces) -> tuple[np.int64, ...]:
    """The sizes and the windows of two axes; an absent first axis has one cell and one window."""
    found: list[np.int64] = []
    for values, absent in ((sizes, 1), (at.kernel, 1), (at.strides, 1), (at.dilations, 1), (at.begins, 0), (at.counts, 1)):
        found += [np.int64(v) for v in ((absent, *values) if len(values) == 1 else values)]
    return tuple(found)


_TAKES = ", ".join(f"int64 {name}" for name in ("H", "W", "KH", "KW", "SH", "SW", "DH", "DW", "BH", "BW", "OH", "OW"))

_WINDOW = """
    long long t = i;
    const long long ow = t % OW; t /= OW;
    const long long oh = t % OH; t /= OH;
"""

_MAXIMUM = """
    T best = T(-CUDART_INF);
    long long found = -1;
    for (long long kh = 0; kh < KH; kh++) {
        const long long h = oh * SH - BH + kh * DH;
        if (h < 0 || h >= H) continue;
        for (long long kw = 0; kw < KW; kw++) {
            const long long w = ow * SW - BW + kw * DW;
            if (w < 0 || w >= W) continue;
            const T v = x[(t * H + h) * W + w];
            if (found < 0 || v > best || (v != v && best == best)) { best = v; found = h * W + w; }
        }
    }
    y = best;
"""

_KERNELS = {
    "columns": ("raw T x", "T y", _WINDOW + """
    const long long kw = t % KW; t /= KW;
    const long long kh = t % KH; t /= KH;
    const long long h = oh * SH - BH + kh * DH, w = ow * SW - BW + kw * DW;
    y = h >= 0 && h < H && w >= 0 && w < W ? x[(t * H + h) * W + w] : T(0);
    """),
    "folded": ("raw T x, int64 M", "T y", """
    long long t = i;
    const long long w = t % W; t /= W;
    const long long h = t % H; t /= H;
    const long long m = t % M, plane = t / M;
    T sum = T(0);
    for (long long kh = 0; kh < KH; kh++) {
        const long long ah = h + BH - kh * DH, oh = ah / SH;
        if (ah < 0 || ah % SH || oh >= OH) continue;
        for (long long kw = 0; kw < KW; kw++) {
            const long long aw = w + BW - kw * DW, ow = aw / SW;
            if (aw < 0 || aw % SW || ow >= OW) continue;
            sum = sum + x[((((plane * KH + kh) * KW + kw) * M + m) * OH + oh) * OW + ow];
        }
    }
    y = sum;
    """),
    "maxima": ("raw T x", "T y", _WINDOW + _MAXIMUM),
    "places": ("raw T x", "T y, int64 place", _WINDOW + _MAXIMUM + "place = found;"),
}  # fmt: skip


@cache
def _kernel(cp: Any, name: str) -> Any:
    """A kernel, compiled at its first use."""
    takes, results, text = _KERNELS[name]
    return cp.ElementwiseKernel(f"{takes}, {_TAKES}", results, text, f"sonnx_{name}")
