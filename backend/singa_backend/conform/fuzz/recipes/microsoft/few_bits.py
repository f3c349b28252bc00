"""Recipes of products with weights of few bits, and of rows gathered from them."""

from __future__ import annotations

import numpy as np

from .....dtypes import is_float
from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe


def raw(d: Draw, *shape: int) -> np.ndarray:
    """Draw bytes."""
    return np.asarray(d.rng.integers(0, 256, shape)).astype(np.uint8)


def grain(d: Draw, dtype: np.dtype, *shape: int) -> np.ndarray:
    """Draw scales; few are negative."""
    x = d.rng.uniform(0.01, 0.2, shape) * (1 if d.chance(0.8) else d.rng.choice([-1, 1], shape))
    return np.asarray(x).astype(dtype)


def rows_of(d: Draw, k: int, dtype: np.dtype) -> np.ndarray:
    """Draw the left factor: its last axis has k elements."""
    return d.array(dtype, (*d.shape(1, 3, 3, empty=0.05), k), "tame")


@recipe("MatMulNBits", MICROSOFT)
def matmul_nbits(d: Draw) -> None:
    bits, block = d.pick([2, 4, 4, 4, 8]), d.pick([16, 32, 32, 64])
    n, k = d.whole(1, 9), d.pick([d.whole(1, 100), block, 2 * block])
    blocks, dtype = -(-k // block), d.dtype(0)
    d.attributes.update({"K": k, "N": n, "bits": bits, "block_size": block})
    d.attr("accuracy_level", [1], 0)
    d.put(rows_of(d, k, dtype), raw(d, n, blocks, block * bits // 8))
    d.put(grain(d, dtype, n, blocks) if d.chance(0.7) else grain(d, dtype, n * blocks))
    way = d.pick(["none", "packed", "packed", "floats"])
    packed = raw(d, n, -(-blocks * bits // 8))
    floats = np.asarray(d.rng.uniform(0, 2**bits, (n, blocks))).astype(dtype)
    d.put(None if way == "none" else packed if way == "packed" else floats)
    d.put(np.sort(d.rng.integers(0, blocks, k)).astype(np.int32) if d.chance(0.1) and bits == 4 else None)
    if d.chance(0.3):
        d.put(d.array(dtype, (n,), "tame"))


@recipe("MatMulBnb4", MICROSOFT)
def matmul_bnb4(d: Draw) -> None:
    block, n, k = d.pick([16, 32, 64]), d.whole(1, 9), d.whole(1, 80)
    turned = d.attr("transB", [1, 0], 1)
    d.attributes.update({"K": k, "N": n, "block_size": block, "quant_type": d.pick([0, 1])})
    d.put(rows_of(d, k if turned else n, d.dtype(0)), raw(d, -(-n * k // 2)), grain(d, d.dtype(0), -(-n * k // block)))


@recipe("GatherBlockQuantized", MICROSOFT)
def gather_block_quantized(d: Draw) -> None:
    dtype = d.dtype(0)
    block, rank, packed = d.pick([16, 32]), d.whole(2, 3), dtype == np.uint8
    bits = d.attr("bits", [2, 4, 8], 4) if packed else 4
    axis = 0 if packed else d.whole(0, rank - 1)
    along = d.pick([i for i in range(rank) if i != axis]) if not packed or d.chance(0.2) else rank - 1
    shape = [d.whole(1, 4) for _ in range(rank)]
    shape[along] = d.pick([block, 2 * block, d.whole(1, 70)])
    if packed and bits < 8:
        shape[-1] = -(-shape[-1] * bits // 8) * 8 // bits
    if is_float(dtype) and d.chance(0.3):
        block = 0
    blocks = [-(-s // (block or s)) if i == along else s for i, s in enumerate(shape)]
    d.attributes.update({"block_size": block, "gather_axis": axis, "quantize_axis": along - rank if d.chance(0.3) else along})
    stored = [*shape[:-1], shape[-1] * bits // 8] if packed else shape
    d.put(raw(d, *stored) if packed else d.array(dtype, stored, "tame"))
    d.put(np.asarray(d.rng.integers(0, shape[axis], d.shape(0, 2, empty=0))).astype(d.dtype(1)))
    scales = [1 if is_float(dtype) and i != along and d.chance(0.3) else n for i, n in enumerate(blocks)]
    d.put(grain(d, d.dtype(2), *scales))
    if not is_float(dtype) and d.chance(0.5):
        zeros = [*blocks[:-1], -(-blocks[-1] * bits // 8)] if packed else blocks
        d.put(raw(d, *zeros) if packed else d.array(dtype, zeros, "tame"))
