"""RotaryEmbedding: products of halves with cosines and sines, each written where the result is."""

from __future__ import annotations

from typing import Any

import numpy as np

from .attention import heads_of
from .elementwise import FLOATS
from .table import Invalid, Site, kernel, worst
from .values import FINITE, NAN, Bound, Value


@kernel("RotaryEmbedding", 23, on="numpy")
def rotary_embedding(site: Site, x: Value, cos: Value, sin: Value, positions: Value | None = None) -> Value:
    given = site.attributes
    site.require(x.dtype in FLOATS and x.dtype == cos.dtype == sin.dtype and x.size, "elements of other types, or none")
    site.require(x.ndim in (3, 4), "x does not have 3 or 4 axes")
    wide = heads_of(site, x, given["num_heads"]) if x.ndim == 3 else x
    batch, _, length, size = wide.shape
    dim = given["rotary_embedding_dim"] or size
    site.require(0 < dim <= size and dim % 2 == 0, "the number of rotated features does not fit")
    half = dim // 2
    lead = (batch, length) if positions is None else cos.shape[:1]
    site.require(
        all(c.ndim == len(lead) + 1 and c.shape[:-1] == lead and c.shape[-1] >= half for c in (cos, sin)), "the caches do not fit"
    )
    finiteness = FINITE if worst(x, cos, sin) == FINITE else NAN
    order = sorted(range(4), key=lambda i: -wide.strides[i]) if x.ndim == 4 else None
    y = site.new(x.shape, x.dtype, order if order is None or order[-1] == 3 else None, finiteness)
    out = heads_of(site, y, given["num_heads"]) if x.ndim == 3 else y
    products = site.scratch(wide.size // size * half * x.dtype.itemsize)
    rows = [site.new((batch, length, half), x.dtype, finiteness=FINITE) for _ in (cos, sin)] if positions is not None else []
    if positions is not None:
        site.require(positions.shape == (batch, length) and positions.dtype == np.int64, "the positions do not fit")

    def bind() -> Bound:
        source, target = wide.array, out.array
        t = np.ndarray((batch, wide.shape[1], length, half), x.dtype, products.memory)
        calls: list[Any] = []
        if positions is not None:
            tables = [c.array[:, :half] for c in (cos, sin)]
            index, plain = positions.array, positions.array.view(np.uint64)
            calls.append(
                (
                    _taken,
                    (index, plain, min(len(c) for c in tables), [(c.take, r.array) for c, r in zip(tables, rows, strict=True)]),
                )
            )
        c, s = (v.array[:, None, :, :half] for v in (rows or (cos, sin)))
        if given["interleaved"]:
            a, b, real, imaginary = source[..., 0:dim:2], source[..., 1:dim:2], target[..., 0:dim:2], target[..., 1:dim:2]
        else:
            a, b, real, imaginary = source[..., :half], source[..., half:dim], target[..., :half], target[..., half:dim]
        calls += [(np.multiply, (c, a, real)), (np.multiply, (s, b, t)), (np.subtract, (real, t, real))]
        calls += [(np.multiply, (s, a, imaginary)), (np.multiply, (c, b, t)), (np.add, (imaginary, t, imaginary))]
        if dim < size:
            calls.append((np.copyto, (target[..., dim:], source[..., dim:])))
        return calls

    site.emit(bind, reads=(x, cos, sin, positions), writes=(y, *rows), kernel="numpy.rotary", scratch=products)
    return y


def _taken(index: np.ndarray, plain: np.ndarray, size: int, pairs: list[tuple[Any, np.ndarray]]) -> None:
    """Gather rows of both tables; `plain` has the positions as unsigned integers, of which a negative one exceeds every size."""
    if np.maximum.reduce(plain, None) >= size:
        raise Invalid("a position is out of range")
    for take, rows in pairs:
        take(index, 0, rows, "clip")
