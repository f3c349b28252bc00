"""Movement of activations on oneDNN: what has the channels innermost in memory keeps them there."""

from __future__ import annotations

from . import onednn
from .lowering import MOVED, channels_last, dense_desc, desc, emit, require_plain, threads_for
from .onednn import DST, MULTIPLE_SRC
from .table import Site, kernel, worst
from .values import Value, last_order

MANY = 1 << 14
"""The number of elements from which oneDNN joins tensors faster than NumPy."""


@kernel("Concat", 4, 11, 13, on="onednn")
def concat(site: Site, *values: Value) -> Value:
    """Activations joined along their channels."""
    first = values[0]
    require_plain(site, *values, dtypes=MOVED)
    axis, rank = site.attributes["axis"], first.ndim
    site.require(-rank <= axis < rank, "the axis is out of range")
    axis %= rank
    rest = [(v.ndim, v.dtype, v.shape[:axis], v.shape[axis + 1 :]) for v in values]
    site.require(all(r == rest[0] for r in rest), "the shapes or dtypes do not match")
    shape = (*first.shape[:axis], sum(v.shape[axis] for v in values), *first.shape[axis + 1 :])
    last = sum(v.size for v in values if v.channels_last and not v.contiguous)
    size = sum(v.size for v in values)
    site.require(1 < len(values) <= 64 and 3 <= rank <= 5 and size >= MANY and 2 * last > size, "for small or plain inputs")
    order = last_order(rank)
    dst = dense_desc(first.dtype, shape, order)
    with threads_for(size * 16):
        made = onednn.concat(dst, axis, [dense_desc(v.dtype, v.shape, order) for v in values])
    given = [channels_last(site, v) for v in values]
    y = site.new(shape, first.dtype, order, worst(*values))
    emit(site, made, {DST: (dst, y), **{MULTIPLE_SRC + i: (desc(v), v) for i, v in enumerate(given)}}, (y,))
    return y
