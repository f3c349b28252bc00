"""Rows gathered from a table with weights of few bits (GatherBlockQuantized), by machine code; see gemm/few_bits_rows.py."""

from __future__ import annotations

import math

import numpy as np

from ..dtypes import numpy_dtype
from ..elementwise.compile import available
from ..gemm.few_bits_rows import RowsKind, gathering
from ..ir.shapes import valid_axes
from .few_bits import DOMAIN
from .few_bits_packing import UINT8
from .lowering import F32, ordered
from .machine_steps import bound_product
from .table import Invalid, Site, kernel
from .values import Bound, Value

NIBBLES = {numpy_dtype(21): "uint4", numpy_dtype(22): "int4"}
"""The dtypes of which an array has a byte for each value."""


@kernel("GatherBlockQuantized", 1, on="machine", domain=DOMAIN)
def gather_block_quantized(site: Site, data: Value, index: Value, scales: Value, zeros: Value | None = None) -> Value:
    """Only the rows that are gathered become floats."""
    site.require(not available(), available())
    packed, block = data.dtype == UINT8, site.attributes["block_size"]
    bits = site.attributes["bits"] if packed else 8
    site.require(packed or data.dtype in NIBBLES, f"the values are {data.dtype}")
    site.require(bits in (2, 4, 8) and block >= 16 and not block & (block - 1), "the definition reports the form")
    axes = valid_axes([site.attributes[f"{what}_axis"] for what in ("gather", "quantize")], data.ndim)
    if axes is None or axes[1] != data.ndim - 1:
        site.refuse("the blocks are not along the last axis")
    axis = axes[0]
    site.require(not packed or axis == 0, "the definition reports the axis")
    line = data.shape[-1] * 8 // bits
    blocks = -(-line // block)
    site.require(scales.shape == (*data.shape[:-1], blocks) and scales.dtype in (F32, np.float16), "the scales do not match")
    points = -(-blocks * bits // 8)
    fits = zeros is None or (zeros.dtype == data.dtype and zeros.shape == (*data.shape[:-1], points))
    site.require(fits and index.dtype in (np.int32, np.int64), "the zero points or the index do not match")
    site.require(data.size and index.size, "an input is empty")
    zero = 1 << bits - 1 if packed else 0
    kind = RowsKind(bits, zeros is not None, zero, NIBBLES.get(data.dtype, ""), scales.dtype.name, index.dtype.name)
    y = site.new((*data.shape[:axis], *index.shape, *data.shape[axis + 1 : -1], line), scales.dtype, finiteness=scales.finiteness)
    sizes = {
        "rows": math.prod(data.shape[:axis]) * index.size, "count": index.size, "size": data.shape[axis],
        "lines": math.prod(data.shape[axis + 1 : -1]), "line": line, "pitch": data.shape[-1], "block": block, "blocks": blocks,
        "points": points,
    }  # fmt: skip
    values = {name: ordered(site, v, range(v.ndim)) for name, v in {"index": index, "table": data, "scales": scales}.items()}
    if zeros is not None:
        values["zeros"] = ordered(site, zeros, range(zeros.ndim))
    bad = site.new((1,), np.int64)
    function = bound_product(site, gathering(kind), sizes, {**values, "bad": bad, "y": y}, y.size)

    def bind() -> Bound:
        return [(bad.array.fill, (0,)), *function(), (_check, (bad.array,))]

    site.emit(bind, reads=[*values.values()], writes=(bad, y), kernel="machine.rows of few bits")
    return y


def _check(bad: np.ndarray) -> None:
    if bad[0]:
        raise Invalid("an index is out of range")
