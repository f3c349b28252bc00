"""Recipes of packed tables."""

from __future__ import annotations

import numpy as np

from .....dtypes import onnx_code
from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe

BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 6: (32, 22), 8: (32, 34), 13: (256, 176), 14: (256, 210), 20: (32, 18),
          23: (256, 136), 30: (1, 2)}  # fmt: skip
HALVES = {2: (0,), 6: (0,), 8: (0,), 13: (0, 2), 14: (208,), 20: (0,), 23: (0,)}


@recipe("GatherPacked", MICROSOFT)
def gather_packed(d: Draw) -> None:
    kind = d.attributes["packed_type"] = d.pick(sorted(BLOCKS))
    values, size = BLOCKS[kind]
    blocks, rows = d.whole(1, 2) * (5 if values == 1 else 1), d.whole(1, 4)
    d.attributes["K"] = blocks * values
    d.attributes["output_dtype"] = onnx_code(d.dtype("T2"))
    data = d.rng.integers(0, 256, (rows, blocks, size)).astype(np.uint8)
    if values == 1:
        plain = d.rng.standard_normal((rows, blocks)).astype(np.float32)
        bits = plain.view(np.uint32)
        made: dict[int, np.ndarray] = {0: plain, 1: plain.astype(np.float16), 30: (bits >> 16).astype(np.uint16)}
        data = made[kind].view(np.uint8)
    for at in HALVES.get(kind, ()):
        data[..., at : at + 2] = d.rng.uniform(-2, 2, (rows, blocks, 1)).astype(np.float16).view(np.uint8)
    d.put(data.reshape(rows, blocks * size), d.rng.integers(-2, rows + 1, d.shape(0, 2)).astype(d.dtype(1)))
