"""Products with weights in other forms: joined projections, adapters, and weights of 4-bit and 8-bit floats."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape
from ...proto.schemas import MICROSOFT
from ..cast import to_float8
from ._api import Array, Host, Ints, Op, V, Wanted, Xp, microsoft, not_declared
from ._packed import sized, unpacked, unpacked_body
from .few_bits import check_columns, parts
from .gates import single

# --- projections of one normalized input


def _normalized(op: Op, a: V, skip: V, scale: V, epsilon: float) -> tuple[V, V]:
    """Return the input of the projections in float32, and the sum of A and skip."""
    total = None if skip is None else op.Add(single(op, a), single(op, skip))
    seen = single(op, a) if total is None else total
    normed = seen if scale is None else op.RMSNormalization(seen, single(op, scale), axis=-1, epsilon=epsilon)
    return normed, None if total is None else op.cast(total, a)


def _check_norm(skip: Array | None, scale: Array | None, wanted: bool) -> None:
    """Raise OperatorError unless a skip has a norm, and the sum that is wanted a skip."""
    if skip is not None and scale is None:
        raise OperatorError("norm_scale must be present with skip", code="SX404")
    if wanted and skip is None:
        raise OperatorError("the output input_skip_bias_sum needs the input skip", code="SX404")


def _product(op: Op, a: V, b: V, scales: V, bias: V | None, k: int, n: int, block_size: int, bits: int) -> V:
    """Return MatMulNBits, which unpacks a part of the weights at a time."""
    form = {"K": k, "N": n, "block_size": block_size, "bits": bits}
    return op.MatMulNBits(a, b, scales, None, None, bias, domain=MICROSOFT, **form)


@microsoft("MatMulNBitsMlp", 1, traits=("product", "packed_weights"), weights={0: "the input", 2: "the scale"})
def matmul_nbits_mlp(
    op: Op,
    a: V,
    skip: V | None,
    norm_scale: V | None,
    gate_b: V,
    gate_scales: V,
    gate_bias: V | None,
    up_b: V,
    up_scales: V,
    up_bias: V | None = None,
    *,
    K: int,
    N: int,
    activation: str,
    block_size: int,
    accuracy_level: int = 0,
    bits: int = 4,
    epsilon: float = 1e-5,
    wanted: Wanted,
) -> tuple[V, V | None]:
    """Compute silu(gate) * up for two MatMulNBits of one input, which may be the RMS norm of A or of A + skip."""
    _check_activation(activation)
    seen, total = _normalized(op, a, skip, norm_scale, epsilon)
    gate = _product(op, seen, gate_b, gate_scales, gate_bias, K, N, block_size, bits)
    up = _product(op, seen, up_b, up_scales, up_bias, K, N, block_size, bits)
    return op.cast(op.Mul(op.Mul(gate, op.Sigmoid(gate)), up), a), total


@matmul_nbits_mlp.accepts
def matmul_nbits_mlp_accepts(skip: Array | None, norm_scale: Array | None, activation: str, wanted: Wanted) -> None:
    _check_activation(activation)
    _check_norm(skip, norm_scale, any(wanted[1:]))


def _check_activation(activation: str) -> None:
    if activation != "silu":
        raise OperatorError(f"activation must be silu, got {activation!r}", code="SX404")


@microsoft("MatMulNBitsQkv", 1, traits=("product", "packed_weights"), weights={0: "the input", 2: "the scale"})
def matmul_nbits_qkv(
    op: Op,
    a: V,
    skip: V | None,
    norm_scale: V,
    q_b: V,
    q_scales: V,
    q_bias: V | None,
    k_b: V,
    k_scales: V,
    k_bias: V | None,
    v_b: V,
    v_scales: V,
    v_bias: V | None = None,
    *,
    K: int,
    Nkv: int,
    Nq: int,
    block_size: int,
    accuracy_level: int = 0,
    bits: int = 4,
    epsilon: float = 1e-6,
    wanted: Wanted,
) -> tuple[V, ...]:
    """Compute three MatMulNBits of the RMS norm of A, or of A + skip."""
    seen, total = _normalized(op, a, skip, norm_scale, epsilon)
    three = (q_b, q_scales, q_bias, Nq), (k_b, k_scales, k_bias, Nkv), (v_b, v_scales, v_bias, Nkv)
    made = [_product(op, seen, b, s, bias, K, n, block_size, bits) for b, s, bias, n in three]
    return (*(op.cast(y, a) for y in made), total)


@matmul_nbits_qkv.accepts
def matmul_nbits_qkv_accepts(skip: Array | None, norm_scale: Array | None, wanted: Wanted) -> None:
    _check_norm(skip, norm_scale, any(wanted[3:]))


@microsoft(
    "MatMulNBitsQLoRA",
    1,
    traits=("product", "packed_weights"),
    weights={0: "the input", 2: "the scale", 4: "the scale", 6: "the scale"},
)
def matmul_nbits_qlora(
    op: Op,
    x: V,
    w: V,
    scales: V,
    lora_a: V,
    lora_a_scales: V,
    lora_b: V,
    lora_b_scales: V,
    *,
    K: int,
    N: int,
    accuracy_level: int = 0,
    bits: int = 4,
    block_size: int = 32,
    lora_bits: int = 8,
    lora_block_size: int = 32,
) -> V:
    """Compute MatMulNBits of x by W, plus that of x by lora_A and then by lora_B; an adapter without elements adds nothing."""
    left = single(op, x)
    y = _product(op, left, w, scales, None, K, N, block_size, bits)
    if 0 in (op.shape(lora_b) or ()):
        return op.cast(y, x)
    shape = op.shape(lora_a_scales)
    if shape is None or not all(isinstance(n, int) for n in shape):
        raise OperatorError("the shape of the adapter's scales must be known", code="SX404")
    rank = int(np.prod([int(n or 0) for n in shape])) // -(-K // lora_block_size)
    down = _product(op, left, lora_a, lora_a_scales, None, K, rank, lora_block_size, lora_bits)
    up = _product(op, down, lora_b, lora_b_scales, None, rank, N, lora_block_size, lora_bits)
    return op.cast(op.Add(y, up), x)


@matmul_nbits_mlp.shapes
@matmul_nbits_qlora.shapes
def products_shape(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    shape = known.shape(call.inputs[0])
    return None if not shape else [(*shape[:-1], known.attribute(call, "N")), shape]


@matmul_nbits_qkv.shapes
def projections_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    shape = known.shape(call.inputs[0])
    if not shape:
        return None
    sizes = (known.attribute(call, n) for n in ("Nq", "Nkv", "Nkv"))
    return [*((*shape[:-1], n) for n in sizes), shape]


# --- MatMulFpQ4: each block of 32 has its own scale

_SPAN = 32


@microsoft("MatMulFpQ4", 1, traits=("product", "finite", "packed_weights"), weights={0: "the input"})
def matmul_fpq4(xp: Xp, a: Array, b: Array, b_shape: Host[Ints], *, blk_quant_type: int = 1) -> Array:
    """Compute A * W; each column of W is in blocks of 32 values: a float32, with an offset a byte, and 16 bytes.

    The low bits of the bytes are the first 16 values.  Only type 0 has no offset: it is 8.
    """
    k, n, head = _blob(b_shape, blk_quant_type)
    check_columns(a, k)
    blob = sized("B", b, (n, -(-k // _SPAN), head + _SPAN // 2))
    left = a.reshape(-1, k)
    y = xp.empty((left.shape[0], n), dtype=np.float32)
    for columns in parts(n, k):
        part = blob[columns]
        scale = xp.ascontiguousarray(part[..., :4]).view(np.float32)
        zero = part[..., 4:5].astype(np.float32) if head == 5 else np.float32(8)
        codes = xp.concatenate([part[..., head:] & np.uint8(15), part[..., head:] >> np.uint8(4)], axis=-1)
        w = ((codes.astype(np.float32) - zero) * scale).reshape(part.shape[0], -1)[:, :k]
        y[:, columns] = xp.matmul(left, w.T)
    return y.reshape(*a.shape[:-1], n)


def _blob(shape: Ints, kind: int) -> tuple[int, int, int]:
    """Return the rows, the columns and the bytes before the codes of a block."""
    if len(shape) != 2 or min(shape) < 1:
        raise OperatorError(f"B_shape must be two positive sizes, got {tuple(shape)}", code="SX404")
    if kind not in (0, 1, 2):
        raise OperatorError(f"blk_quant_type must be 0, 1 or 2, got {kind}", code="SX404")
    return shape[0], shape[1], 5 if kind else 4


@matmul_fpq4.decomposition
def matmul_fpq4_body(op: Op, a: V, b: V, b_shape: V, blk_quant_type: int) -> V:
    """The float32 of a block is computed from its sign, exponent and mantissa."""
    head = 5 if blk_quant_type else 4
    rows = op.Div(op.Add(op.Gather(b_shape, [0]), _SPAN - 1), _SPAN)
    blob = op.Reshape(b, op.Concat(op.Gather(b_shape, [1]), rows, [head + _SPAN // 2], axis=0))
    part = op.Cast(op.Slice(blob, [0], [head], [2]), to=1)
    b0, b1, b2, b3 = (op.Slice(part, [i], [i + 1], [2]) for i in range(4))
    top = op.Mod(b2, 128.0, fmod=1)
    mantissa = op.Add(op.Add(b0, op.Mul(b1, 256.0)), op.Mul(top, 65536.0))
    exponent = op.Add(op.Mul(op.Mod(b3, 128.0, fmod=1), 2.0), op.Cast(op.GreaterOrEqual(b2, 128.0), to=1))
    normal = op.Mul(op.Add(1.0, op.Mul(mantissa, 2.0**-23)), op.Pow(2.0, op.Sub(exponent, 127.0)))
    size = op.Where(op.Equal(exponent, 0.0), op.Mul(op.Mul(mantissa, 2.0**-126), 2.0**-23), normal)
    scale = op.Where(op.GreaterOrEqual(b3, 128.0), op.Neg(size), size)
    codes = op.Slice(blob, [head], [head + _SPAN // 2], [2])
    low, high = op.BitwiseAnd(codes, 15), op.BitShift(codes, op.constant([4], np.uint8), direction="RIGHT")
    values = op.Cast(op.Concat(low, high, axis=2), to=1)
    if head == 5:
        centred = op.Sub(values, op.Slice(part, [4], [5], [2]))
    else:
        centred = op.Sub(values, 8.0)
    w = op.Reshape(op.Mul(centred, scale), op.Concat(op.Gather(b_shape, [1]), [-1], axis=0))
    return op.MatMul(a, op.Transpose(op.Slice(w, [0], op.Gather(b_shape, [0]), [1]), perm=[1, 0]))


@matmul_fpq4.shapes
def matmul_fpq4_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, sizes = known.shape(call.inputs[0]), known.sizes(call.inputs[2])
    return None if not shape else (*shape[:-1], sizes[1] if isinstance(sizes, tuple) and len(sizes) == 2 else known.fresh())


# --- weights of small floats

_E2M1 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)


def _by_rows(xp: Xp, a: Array, n: int, k: int, weights: Any, bias: Array | None, dtype: Any) -> Array:
    """Return A * W' + bias, with parts of W that `weights` makes, rounded once."""
    check_columns(a, k)
    left = a.reshape(-1, k).astype(np.float32)
    y = xp.empty((left.shape[0], n), dtype=np.float32)
    for rows in parts(n, k):
        y[:, rows] = xp.matmul(left, weights(rows).T)
    if bias is not None:
        y = y + sized("bias", bias, (n,)).astype(np.float32)
    return y.reshape(*a.shape[:-1], n).astype(dtype)


@microsoft(
    "MatMulBlockQuantizedFp4Weight", 1, widen=False, traits=("product", "packed_weights"), weights={0: "the input", 5: "the bias"}
)
def matmul_fp4(
    xp: Xp,
    a: Array,
    b: Array,
    weight_scale: Array,
    weight_scale_2: Array,
    input_scale: Array | None = None,
    bias: Array | None = None,
    *,
    block_size: int = 16,
) -> Array:
    """Compute A * W' + bias; W is E2M1, low bits first, times the scale of all and the E4M3 of its block, in A's dtype."""
    n, k = b.shape[0], 2 * b.shape[1]
    scale = sized("weight_scale", weight_scale, (n, -(-k // block_size)))

    def weights(rows: slice) -> Array:
        w = xp.asarray(_E2M1)[unpacked(xp, b[rows], 4)] * weight_scale_2.reshape(())
        each = xp.repeat(xp.asarray(_E4M3)[scale[rows]], block_size, axis=1)[:, :k]
        return (w * each).astype(a.dtype).astype(np.float32)

    return _by_rows(xp, a, n, k, weights, bias, a.dtype)


@matmul_fp4.decomposition
def matmul_fp4_body(op: Op, a: V, b: V, weight_scale: V, weight_scale_2: V, bias: V, block_size: int) -> V:
    values = op.Gather(op.constant(_E2M1, np.float32), op.Cast(unpacked_body(op, b, 4), to=7))
    places = op.Div(op.Range(0, op.Squeeze(op.Mul(op.Shape(b, start=1), 2), [0]), 1), block_size)
    each = op.Gather(op.constant(_E4M3, np.float32), op.Cast(op.Gather(weight_scale, places, axis=1), to=7))
    w = single(op, op.cast(op.Mul(op.Mul(values, op.Reshape(weight_scale_2, [1])), each), a))
    y = op.MatMul(single(op, a), op.Transpose(w, perm=[1, 0]))
    return op.cast(y if bias is None else op.Add(y, single(op, bias)), a)


@microsoft(
    "MatMulBlockQuantizedFp8Weight", 1, widen=False, traits=("product", "packed_weights"), weights={0: "the input", 4: "the bias"}
)
def matmul_fp8(
    xp: Xp, a: Array, b: Array, b_scale: Array, a_scale: Array | None = None, bias: Array | None = None, *, block_size: int = 128
) -> Array:
    """Compute A * W' + bias; W is E4M3 times the scale of its block, and with a_scale A is rounded to E4M3 in its units."""
    n, k = b.shape
    scale = sized("b_scale", b_scale, (n, -(-k // block_size)))
    left = a.astype(np.float32)
    if a_scale is not None:
        unit = a_scale.reshape(())
        left = to_float8(xp, left / unit, np.dtype(ml_dtypes.float8_e4m3fn), True).astype(np.float32) * unit

    def weights(rows: slice) -> Array:
        return b[rows].astype(np.float32) * xp.repeat(scale[rows], block_size, axis=1)[:, :k]

    return _by_rows(xp, left, n, k, weights, bias, a.dtype)


@matmul_fp8.decomposition
def matmul_fp8_body(op: Op, a: V, b: V, b_scale: V, a_scale: V, bias: V, block_size: int) -> V:
    places = op.Div(op.Range(0, op.Squeeze(op.Shape(b, start=1), [0]), 1), block_size)
    w = op.Mul(op.Cast(b, to=1), op.Gather(b_scale, places, axis=1))
    left = single(op, a)
    if a_scale is not None:
        unit = op.Reshape(a_scale, [1])
        left = op.Mul(op.Cast(op.Cast(op.Div(left, unit), to=17), to=1), unit)
    y = op.MatMul(left, op.Transpose(w, perm=[1, 0]))
    return op.cast(y if bias is None else op.Add(y, single(op, bias)), a)


@matmul_fp4.shapes
@matmul_fp8.shapes
def rows_shape(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape, weight = known.shape(call.inputs[0]), known.shape(call.inputs[1])
    return None if not shape or not weight else (*shape[:-1], weight[0])


not_declared(
    "MatMulPacked runs on CUDA only, and the byte layouts of its weights are a contract outside the schema: use MatMulNBits, or "
    "MatMulBlockQuantizedFp4Weight",
    "MatMulPacked",
)
not_declared(
    "GemmFloat8 runs on CUDA only, and the schema does not say how its three scales and its output type round: write "
    "DequantizeLinear, Gemm and QuantizeLinear",
    "GemmFloat8",
)
not_declared(
    "the bytes of a block floating point tensor are those of one accelerator, and the schema does not say their layout: use the "
    "model before this quantization",
    "QuantizeBFP",
    "DequantizeBFP",
)
not_declared(
    "the orders of elements are layouts of one CUDA library, and no CPU kernel reads them: use the model before onnxruntime's "
    "conversion to ordered quantization",
    "QuantizeWithOrder",
    "DequantizeWithOrder",
    "QOrderedMatMul",
)
