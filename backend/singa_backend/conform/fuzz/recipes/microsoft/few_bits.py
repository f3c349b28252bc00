"""Recipes of products with weights of few bits, and of rows gathered from them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from .....dtypes import is_float
from .....proto.schemas import MICROSOFT
from ...strategies import Draw
from ..registry import recipe

FLOAT, HALF = np.dtype(np.float32), np.dtype(np.float16)
INT4, UINT4 = np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.uint4)


def common(d: Draw, parameter: str, *dtypes: np.dtype, p: float = 0.6) -> None:
    """Prefer dtypes of a type parameter that onnxruntime's kernels have."""
    if d.types[parameter] not in dtypes and d.chance(p):
        d.types[parameter] = d.pick(dtypes)


def raw(d: Draw, *shape: int) -> np.ndarray:
    """Draw bytes."""
    return np.asarray(d.rng.integers(0, 256, shape)).astype(np.uint8)


def grain(d: Draw, dtype: np.dtype, *shape: int, bits: int = 4) -> np.ndarray:
    """Draw scales with which weights are about 1; few are negative."""
    x = d.rng.uniform(0.1, 2, shape) / 2**bits * (1 if d.chance(0.8) else d.rng.choice([-1, 1], shape))
    return np.asarray(x).astype(dtype)


def rows_of(d: Draw, k: int, dtype: np.dtype) -> np.ndarray:
    """Draw the left factor: its last axis has k elements."""
    return d.array(dtype, (*d.shape(1, 3, 3, empty=0.05), k), "tame")


@recipe("MatMulNBits", MICROSOFT)
def matmul_nbits(d: Draw) -> None:
    common(d, "T1", FLOAT, HALF)
    bits, block = d.pick([2, 4, 4, 4, 8]), d.pick([16, 32, 32, 64])
    n, k = d.whole(1, 9), d.pick([d.whole(1, 100), block, 2 * block])
    blocks, dtype = -(-k // block), d.dtype(0)
    d.attributes.update({"K": k, "N": n, "bits": bits, "block_size": block})
    if d.attr("accuracy_level", [1, 4], 0) == 4:
        d.fixed |= {1, 2, 3}  # onnxruntime packs constants only, and leaves their products out otherwise
    d.put(rows_of(d, k, dtype), raw(d, n, blocks, block * bits // 8))
    d.put(grain(d, dtype, *((n, blocks) if d.chance(0.7) else (n * blocks,)), bits=bits))
    way = d.pick(["none", "packed", "packed", "floats"])
    packed = raw(d, n, -(-blocks * bits // 8))
    floats = np.asarray(d.rng.uniform(0, 2**bits, (n, blocks))).astype(dtype)
    d.put(None if way == "none" else packed if way == "packed" else floats)
    grouped = way != "packed" and bits == 4 and d.chance(0.2)  # with groups, onnxruntime does not read packed zero points
    d.put(np.sort(d.rng.integers(0, blocks, k)).astype(np.int32) if grouped else None)
    if d.chance(0.3):
        d.put(d.array(dtype, (n,), "tame"))


@recipe("MatMulBnb4", MICROSOFT)
def matmul_bnb4(d: Draw) -> None:
    block, n, k = d.pick([16, 32, 64]), d.whole(1, 9), d.whole(1, 80)
    common(d, "T1", FLOAT)
    turned = 0 if d.chance(0.1) else 1
    d.attr("transB", [turned], 1 if turned else None)
    if not turned:
        d.attributes["transB"] = 0
    d.attributes.update({"K": k, "N": n, "block_size": block, "quant_type": d.pick([0, 1])})
    d.put(rows_of(d, k if turned else n, d.dtype(0)), raw(d, -(-n * k // 2)), grain(d, d.dtype(0), -(-n * k // block)))


@recipe("GatherBlockQuantized", MICROSOFT)
def gather_block_quantized(d: Draw) -> None:
    common(d, "T2", FLOAT, HALF)
    common(d, "T1", np.dtype(np.uint8), INT4, UINT4)
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
    d.put(grain(d, d.dtype(2), *scales, bits=bits))
    if not is_float(dtype) and d.chance(0.5):
        zeros = [*blocks[:-1], -(-blocks[-1] * bits // 8)] if packed else blocks
        d.put(raw(d, *zeros) if packed else d.array(dtype, zeros, "tame"))


# --- other forms


def weight(d: Draw, dtype: np.dtype, n: int, k: int, bits: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Draw packed weights and their scales."""
    blocks = -(-k // block)
    return raw(d, n, blocks, block * bits // 8), grain(d, dtype, n, blocks, bits=bits)


def projections(d: Draw, names: list[str], sizes: list[int], k: int) -> None:
    """Append weights, scales and perhaps a bias for each projection, after A, skip and a norm's scale."""
    dtype = d.dtype(0)
    block, normed = d.pick([16, 32]), "Nq" in names or d.chance(0.7)
    d.attributes.update({"K": k, "block_size": block, "bits": d.pick([2, 4, 8]), **dict(zip(names, sizes, strict=False))})
    a = rows_of(d, k, dtype)
    skip = d.array(dtype, a.shape, "tame") if normed and d.chance() else None
    d.put(a, skip, d.array(dtype, (k,), "positive") if normed else None)
    for n in sizes:
        d.put(*weight(d, dtype, n, k, d.attributes["bits"], block), d.array(dtype, (n,), "tame") if d.chance() else None)
    d.attr("epsilon", [1e-6, 1e-5], None)
    if skip is not None and d.chance():
        d.outputs = [*("y0", "y1", "y2")[: 3 if "Nq" in names else 1], "total"]
    elif "Nq" in names:
        d.outputs = ["y0", "y1", "y2"]


@recipe("MatMulNBitsMlp", MICROSOFT)
def mlp(d: Draw) -> None:
    n = d.whole(1, 6)
    projections(d, ["N"], [n, n], d.whole(1, 50))
    d.attributes["activation"] = "silu"


@recipe("MatMulNBitsQkv", MICROSOFT)
def qkv(d: Draw) -> None:
    kv = d.whole(1, 4)
    projections(d, ["Nq", "Nkv"], [d.whole(1, 6), kv, kv], d.whole(1, 50))


@recipe("MatMulNBitsQLoRA", MICROSOFT)
def qlora(d: Draw) -> None:
    n, k, rank, dtype = d.whole(1, 6), d.whole(1, 50), d.whole(1, 20), d.dtype(0)
    bits, block = d.attr("bits", [2, 4, 8], 4), d.attr("block_size", [16, 32], 32)
    few, small = d.attr("lora_bits", [4, 8], 8), d.attr("lora_block_size", [16, 32], 32)
    d.attributes.update({"K": k, "N": n})
    d.put(rows_of(d, k, dtype), *weight(d, dtype, n, k, bits, block))
    down, up = weight(d, dtype, rank, k, few, small), weight(d, dtype, n, rank, few, small)
    d.put(down[0][:0] if d.chance(0.1) else down[0], down[1], up[0][:, :0] if d.chance(0.1) else up[0], up[1])
    d.fixed |= {3, 4, 5, 6}  # the body reads the rank of the adapter


@recipe("MatMulFpQ4", MICROSOFT)
def fpq4(d: Draw) -> None:
    n, k = d.whole(1, 9), d.whole(1, 100)
    kind = d.attr("blk_quant_type", [0, 1, 2], 1)
    blocks = -(-k // 32)
    scale = grain(d, np.dtype(np.float32), n, blocks, 1).view(np.uint8)
    offset = raw(d, n, blocks, 1 if kind else 0) % 16
    blob = np.concatenate([scale, offset, raw(d, n, blocks, 16)], axis=2)
    d.put(rows_of(d, k, d.dtype(0)), blob.reshape(-1), d.ints([k, n]))
    d.fixed |= {1, 2}


@recipe("MatMulBlockQuantizedFp4Weight", MICROSOFT)
def fp4(d: Draw) -> None:
    n, k, block = d.whole(1, 6), 2 * d.whole(1, 30), d.attr("block_size", [16, 32], 16)
    scales = np.asarray(d.rng.integers(0x20, 0x48, (n, -(-k // block)))).astype(np.uint8)
    d.put(rows_of(d, k, d.dtype(0)), raw(d, n, k // 2), scales, grain(d, np.dtype(np.float32)).reshape(()))
    if d.chance():
        d.put(np.float32(1).reshape(()) if d.chance() else None, d.array(0, (n,), "tame"))


@recipe("MatMulBlockQuantizedFp8Weight", MICROSOFT)
def fp8(d: Draw) -> None:
    n, k, block = d.whole(1, 6), d.whole(1, 50), d.attr("block_size", [16, 32], 128)
    d.put(rows_of(d, k, d.dtype(0)), d.array(1, (n, k), "tame"), grain(d, np.dtype(np.float32), n, -(-k // block)))
    d.put(np.abs(grain(d, np.dtype(np.float32))).reshape(()) if d.chance() else None)
    if d.chance():
        d.put(d.array(0, (n,), "tame"))


@recipe("QMoE", MICROSOFT)
def qmoe(d: Draw) -> None:
    common(d, "T", FLOAT, HALF)
    common(d, "T1", np.dtype(np.uint8), p=1)
    dtype, bits = d.dtype("T"), d.pick([2, 4, 4, 8])
    d.types["T2"] = dtype
    experts, tokens, block = d.whole(1, 4), d.whole(1, 5), d.pick([None, None, 16, 32])
    hidden, inner = ((block or 8) * d.whole(1, 2) for _ in range(2))
    kind = d.pick(["swiglu", "swiglu", "relu", "gelu", "silu", "identity"])
    fusion = d.pick([1, 1, 1, 1, 1, 1, 2, 0]) if kind == "swiglu" else 0
    d.attributes.update({"activation_type": kind, "expert_weight_bits": bits, "swiglu_fusion": fusion, "k": d.whole(1, experts)})
    if block:
        d.attributes["block_size"] = block
    for name, values in (("activation_alpha", [1.0, 1.702]), ("activation_beta", [0.0, 1.0]), ("swiglu_limit", [1.5])):
        d.attr(name, values, None)
    d.attr("normalize_routing_weights", [1], 0)
    lead = (1, tokens) if d.chance(0.3) else (tokens,)
    d.put(d.array(dtype, (*lead, hidden), "tame"), d.array(dtype, (tokens, experts), "tame"))
    sizes = [((2 if fusion else 1) * inner, hidden), (hidden, inner), (inner, hidden)]
    gated = kind == "swiglu" and not fusion
    for i, (n, k) in enumerate(sizes):
        absent = i == 2 and not gated
        scales = grain(d, dtype, *((experts, n) if not block else (experts, n, k // block)), bits=bits)
        bias = d.array(dtype, (experts, n), "tame") if d.chance() else None
        d.put(*((None,) * 3 if absent else (raw(d, experts, n, k * bits // 8), scales, bias)))
    if d.chance():
        for i, (n, k) in enumerate(sizes):
            last = [-(-n * bits // 8)] if not block else [n, -(-(k // block) * bits // 8)]
            d.put(None if i == 2 and not gated else raw(d, experts, *last))
    elif d.chance(0.4):
        d.put(None, None, None)
    if len(d.inputs) == 14 and d.chance(0.4):
        d.put(d.array(dtype, (tokens, experts), "unit"))
    d.fixed |= set(range(2, 11)) if gated else {2, 5, 8}  # bodies read the sizes of weights


@recipe("DynamicQuantizeLSTM", MICROSOFT)
def dynamic_lstm(d: Draw) -> None:
    steps, batch, width, size = d.whole(1, 4), 1, d.whole(1, 5), d.whole(1, 5)  # threads of onnxruntime share a batch
    direction = d.attr("direction", ["forward", "reverse", "bidirectional"], "forward")
    n, dtype = 2 if direction == "bidirectional" else 1, d.dtype("T2")
    d.attributes["hidden_size"] = size
    d.attr("input_forget", [0, 0, 1], 0)
    floats = np.dtype(np.float32)
    d.put(d.array(0, (steps, batch, width), "tame"))
    low, high = (0, 255) if dtype == np.uint8 else (-128, 127)
    for k in (width, size):
        d.put(np.asarray(d.rng.integers(low, high, (n, k, 4 * size), endpoint=True)).astype(dtype))
    d.put(d.array(floats, (n, 8 * size), "around") if d.chance() else None)
    d.put(np.asarray(d.rng.integers(1, steps + 1, batch)).astype(np.int32) if d.chance(0.3) else None)
    for _ in range(2):
        d.put(d.array(floats, (n, batch, size), "around") if d.chance(0.3) else None)
    d.put(d.array(floats, (n, 3 * size), "around") if d.chance(0.2) else None)
    for _ in range(2):
        each = (n, 4 * size) if d.chance(0.3) else (n,)
        zero = np.asarray(d.rng.integers(low, high, n if len(each) == 1 else (n, 1), endpoint=True))
        d.put(np.asarray(d.rng.uniform(0.002, 0.02, each)).astype(np.float32), np.broadcast_to(zero, each).astype(dtype))
    d.fixed |= {1, 2, 8, 9, 10, 11}
    d.outputs = d.pick([["y"], ["y", "h", "c"], ["y", "", "c"], ["", "h"]])
