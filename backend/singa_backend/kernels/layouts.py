"""Movement of activations on oneDNN: what has the channels innermost in memory keeps them there."""

from __future__ import annotations

from . import onednn as dnn
from .lowering import MOVED, channels_last, copy, dense_desc, desc, emit, require_plain, threads_for
from .table import Site, kernel, worst
from .values import Value, last_order

MANY = 1 << 14
"""The number of elements from which oneDNN joins tensors faster than NumPy."""

CACHED = 1 << 21
"""The bytes of a result above which a copy of each input is faster than oneDNN's concatenation."""


@kernel("Concat", 4, 11, 13, on="onednn")
def concat(site: Site, *values: Value) -> Value:
    """Activations whose channels are innermost in memory, joined along any axis."""
    first = values[0]
    site.require(not any(v.is_open for v in values), "sizes differ between runs")
    require_plain(site, *values, dtypes=MOVED)
    axis, rank = site.attributes["axis"], first.ndim
    site.require(-rank <= axis < rank, "the axis is out of range")
    axis %= rank
    rest = [(v.ndim, v.dtype, v.shape[:axis], v.shape[axis + 1 :]) for v in values]
    site.require(all(r == rest[0] for r in rest), "the shapes or dtypes do not match")
    shape = (*first.shape[:axis], sum(v.shape[axis] for v in values), *first.shape[axis + 1 :])
    last = sum(v.size for v in values if not v.contiguous and v.strides[1] == v.dtype.itemsize)
    size = sum(v.size for v in values)
    site.require(1 < len(values) <= 64 and 3 <= rank <= 5 and size >= MANY and 2 * last > size, "for small or plain inputs")
    order = last_order(rank)
    if size * first.dtype.itemsize > CACHED:
        y, start = site.new(shape, first.dtype, order, worst(*values)), 0
        for v in values:
            copy(site, v, y.view(v.shape, y.strides, start * y.strides[axis]))
            start += v.shape[axis]
        return y
    dst = dense_desc(first.dtype, shape, order)
    given = [v if v.strides[1] == v.dtype.itemsize else channels_last(site, v) for v in values]
    with threads_for(size * 16):
        made = dnn.concat(dst, axis, [desc(v) for v in given])
    y = site.new(shape, first.dtype, order, worst(*values))
    emit(site, made, {dnn.args.DST: (dst, y), **{dnn.args.MULTIPLE_SRC + i: (desc(v), v) for i, v in enumerate(given)}}, (y,))
    return y


@kernel("DepthToSpace", 1, 11, 13, 28, on="onednn")
def depth_to_space(site: Site, x: Value) -> Value:
    """Channels moved into blocks of space, in one copy."""
    s = _block(site, x)
    n, c, h, w = x.shape
    site.require(c % (s * s) == 0, "the blocks do not divide the channels")
    y = site.new((n, c // (s * s), h * s, w * s), x.dtype, last_order(4) if x.channels_last else None)
    shape = (n, c // (s * s), h, s, w, s)
    copy(site, x.view(shape, _in_channels(site, x, s)), y.view(shape, _in_space(y, s)))
    return y


@kernel("SpaceToDepth", 1, 13, 28, on="onednn")
def space_to_depth(site: Site, x: Value) -> Value:
    """Blocks of space moved into channels, in one copy."""
    s = _block(site, x)
    n, c, h, w = x.shape
    site.require(h % s == 0 and w % s == 0, "the blocks do not divide the image")
    y = site.new((n, c * s * s, h // s, w // s), x.dtype, last_order(4) if x.channels_last else None)
    shape = (n, c, h // s, s, w // s, s)
    copy(site, x.view(shape, _in_space(x, s)), y.view(shape, _in_channels(site, y, s)))
    return y


def _block(site: Site, x: Value) -> int:
    """The edge of the blocks."""
    size = int(site.attributes["blocksize"])
    site.require(x.ndim == 4 and x.size and size >= 1, "not an image or not a valid blocksize")
    return size


def _in_space(x: Value, s: int) -> tuple[int, ...]:
    """The strides of an image whose height and width are divided: of n, c, h, block, w, block."""
    n, c, h, w = x.strides
    return n, c, h * s, h, w * s, w


def _in_channels(site: Site, x: Value, s: int) -> tuple[int, ...]:
    """The strides of an image whose channels hold the blocks: of n, c, h, block, w, block."""
    n, c, h, w = x.strides
    mode = site.attributes.get("mode", "DCR")
    site.require(mode in ("DCR", "CRD"), "not a valid mode")
    if mode == "CRD":
        return n, c * s * s, h, c * s, w, c
    each = x.shape[1] // (s * s)
    return n, c, h, c * s * each, w, c * each
