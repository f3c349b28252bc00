"""QMoE: a mixture of experts whose weights have few bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import OperatorError
from ._api import Array, Op, V, Xp, microsoft
from ._experts import ExpertActivation, combined, combined_in, halves, halves_in, routed, routed_in
from ._packed import bytes_of, check_form, dequantized, dequantized_body, sized, unpacked, unpacked_body, zero_points
from .gates import single

ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "identity")


class _PackedLayer:
    """The weights of one layer of all experts, packed."""

    def __init__(
        self,
        name: str,
        xp: Xp,
        b: Array,
        scales: Array | None,
        zero: Array | None,
        bias: Array | None,
        k: int,
        bits: int,
        block: int,
    ) -> None:
        if scales is None:
            raise OperatorError(f"{name}_scales must be present for weights of integers", code="SX404")
        if b.ndim != 3 or b.shape[2] * 8 // bits != k:
            raise OperatorError(f"the weights of {name} must have rows of {k} values, got shape {tuple(b.shape)}", code="SX404")
        if block and k % block:
            raise OperatorError(f"block_size must divide {k}, got {block}", code="SX404")
        self.xp, self.b, self.k, self.bits = xp, b, k, bits
        self.block = block or k
        self.n = b.shape[1]
        self.scales = sized(f"{name}_scales", scales, (b.shape[0], self.n, k // self.block))
        self.bias = None if bias is None else sized(f"{name}_experts_bias", bias, (b.shape[0], self.n))
        self.zero, self.blocked = zero, bool(block)
        if zero is not None and not block:
            packed = sized(f"{name}_zero_points", zero, (b.shape[0], bytes_of(self.n, bits)))
            self.zero = unpacked(xp, packed, bits)[:, : self.n].astype(np.float32)
        elif zero is not None:
            self.zero = sized(f"{name}_zero_points", zero, (b.shape[0], self.n, bytes_of(k // self.block, bits)))

    def __call__(self, x: Array, e: int) -> Array:
        """Multiply rows by the weights of one expert, which are unpacked for this product only."""
        zero = None if self.zero is None else self.zero[e] if self.blocked else self.zero[e][:, None]
        points = zero_points(self.xp, zero, self.bits, self.scales.shape[1:])
        y = self.xp.matmul(x, dequantized(self.xp, self.b[e], self.scales[e], points, self.bits, self.block, self.k).T)
        return y if self.bias is None else y + self.bias[e]


@microsoft(
    "QMoE", 1, traits=("product", "shape_of_first", "packed_weights"), weights={0: "the input", 3: "the scale", 6: "the scale"}
)
def qmoe(
    xp: Xp,
    x: Array,
    router: Array,
    fc1: Array,
    fc1_scales: Array | None,
    fc1_bias: Array | None,
    fc2: Array,
    fc2_scales: Array | None = None,
    fc2_bias: Array | None = None,
    fc3: Array | None = None,
    fc3_scales: Array | None = None,
    fc3_bias: Array | None = None,
    fc1_zero: Array | None = None,
    fc2_zero: Array | None = None,
    fc3_zero: Array | None = None,
    router_weights: Array | None = None,
    *further: Array | None,
    accuracy_level: int = 0,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    activation_type: str = "relu",
    block_size: int | None = None,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int | None = None,
    fc2_expert_weight_bits: int | None = None,
    fc3_expert_weight_bits: int | None = None,
    k: int = 1,
    normalize_routing_weights: int = 0,
    quant_type: str = "int",
    swiglu_fusion: int = 0,
    swiglu_limit: float | None = None,
    swiglu_limit_after_activation: int = 0,
    use_sparse_mixer: int = 0,
    weights_prepacked: int = -1,
) -> Array:
    """Sum the results of the k experts with the largest router values, each times its share.

    The shares are the softmax over these k values, whatever normalize_routing_weights; or, with router_weights, those of the
    chosen experts, divided by their sum if normalize_routing_weights is set.  accuracy_level does not change the definition, and
    onnxruntime's CPU kernel ignores use_sparse_mixer.
    """
    _check(quant_type, weights_prepacked, further)
    active = ExpertActivation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_limit_after_activation)
    bits = [b or expert_weight_bits for b in (fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits)]
    _check_form(active, swiglu_fusion, bits, block_size)
    rows, block = x.reshape(-1, x.shape[-1]), block_size or 0
    experts, inner = fc1.shape[0], fc1.shape[1] // (2 if swiglu_fusion else 1)
    one = _PackedLayer("fc1", xp, fc1, fc1_scales, fc1_zero, fc1_bias, rows.shape[1], bits[0], block)
    two = _PackedLayer("fc2", xp, fc2, fc2_scales, fc2_zero, fc2_bias, inner, bits[1], block)
    three = None
    if fc3 is not None:
        three = _PackedLayer("fc3", xp, fc3, fc3_scales, fc3_zero, fc3_bias, rows.shape[1], bits[2], block)
    elif active.gated and not swiglu_fusion:
        raise OperatorError("swiglu without swiglu_fusion needs the weights of fc3", code="SX404")
    if router.shape != (rows.shape[0], experts) or not 0 < k <= experts:
        what = f"{rows.shape[0]} x {experts} router values and 0 < k <= {experts}"
        raise OperatorError(f"expected {what}, got shape {tuple(router.shape)} and k = {k}", code="SX404")

    def expert(seen: Array, e: int) -> Array:
        first = one(seen, e)
        gate, linear = halves(first, swiglu_fusion) if swiglu_fusion else (first, None if three is None else three(seen, e))
        return two(active(xp, gate, linear), e)

    routing = routed(xp, router, router_weights, k, router_weights is None or bool(normalize_routing_weights))
    return combined(xp, rows, experts, routing, expert).reshape(x.shape)


def _check_form(active: ExpertActivation, fusion: int, bits: Sequence[int], block: int | None) -> None:
    """Raise OperatorError for an activation, bits or blocks that no kernel of onnxruntime has."""
    active.check(active.name, ACTIVATIONS)
    if fusion not in (0, 1, 2) or (fusion and active.name != "swiglu"):
        raise OperatorError(f"swiglu_fusion must be 0, or 1 or 2 for swiglu, got {fusion} for {active.name}", code="SX404")
    for width in bits:
        check_form(width, block or 16)


def _check(quant_type: str, weights_prepacked: int, further: Sequence[Any]) -> None:
    if any(v is not None for v in further):
        raise OperatorError(
            "global scales, and scales of activations, belong to weights of float8 and float4, which are not supported",
            code="SX404",
            hint="quantize the model to integers of 2, 4 or 8 bits",
        )
    if quant_type != "int" or weights_prepacked == 1:
        what = f"quant_type {quant_type!r}" if quant_type != "int" else "weights_prepacked = 1"
        raise OperatorError(
            f"the weights must be integers in the layout of the file, got {what}",
            code="SX404",
            hint="quantize the model to integers of 2, 4 or 8 bits",
        )


def _layer_body(op: Op, x: V, b: V, scales: V, zero: V, bias: V, bits: int, block: int | None, given: tuple[int, int, int]) -> V:
    """Write the products of all experts; `given` are the numbers of experts, of rows and of columns of the weights."""
    experts, n, k = given
    size = block or k
    scales = op.Reshape(single(op, scales), [experts, n, k // size])
    if zero is not None and not block:
        values = op.Slice(unpacked_body(op, op.Reshape(zero, [experts, bytes_of(n, bits)]), bits), [0], [n], [1])
        zero = op.Cast(values, to=1)
    w = dequantized_body(op, b, scales, zero, bits, size, k, [experts, n])
    y = op.MatMul(x, op.Transpose(w, perm=[0, 2, 1]))
    return y if bias is None else op.Add(y, op.Unsqueeze(single(op, bias), [1]))


@qmoe.decomposition
def qmoe_body(
    op: Op,
    x: V,
    router: V,
    fc1: V,
    fc1_scales: V,
    fc1_bias: V,
    fc2: V,
    fc2_scales: V,
    fc2_bias: V,
    fc3: V,
    fc3_scales: V,
    fc3_bias: V,
    fc1_zero: V,
    fc2_zero: V,
    fc3_zero: V,
    router_weights: V,
    further: Sequence[V],
    activation_alpha: float,
    activation_beta: float,
    activation_type: str,
    block_size: int | None,
    expert_weight_bits: int,
    fc1_expert_weight_bits: int | None,
    fc2_expert_weight_bits: int | None,
    fc3_expert_weight_bits: int | None,
    k: int,
    normalize_routing_weights: int,
    quant_type: str,
    swiglu_fusion: int,
    swiglu_limit: float | None,
    swiglu_limit_after_activation: int,
    weights_prepacked: int,
) -> V:
    """All experts compute all rows; the sizes of the weights must be known."""
    _check(quant_type, weights_prepacked, further)
    bits = [b or expert_weight_bits for b in (fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits)]
    active = ExpertActivation(activation_type, activation_alpha, activation_beta, swiglu_limit, swiglu_limit_after_activation)
    _check_form(active, swiglu_fusion, bits, block_size)
    experts, up, bytes_in = _sizes(op, fc1)
    hidden, inner = bytes_in * 8 // bits[0], up // (2 if swiglu_fusion else 1)
    rows = op.Unsqueeze(op.Reshape(single(op, x), [-1, hidden]), [0])
    h = _layer_body(op, rows, fc1, fc1_scales, fc1_zero, fc1_bias, bits[0], block_size, (experts, up, hidden))
    linear = None
    if swiglu_fusion:
        h, linear = halves_in(op, h, swiglu_fusion)
    elif fc3 is not None:
        linear = _layer_body(op, rows, fc3, fc3_scales, fc3_zero, fc3_bias, bits[2], block_size, (experts, inner, hidden))
    h = active.body(op, h, linear)
    y = _layer_body(op, h, fc2, fc2_scales, fc2_zero, fc2_bias, bits[1], block_size, (experts, hidden, inner))
    values = None if router_weights is None else single(op, router_weights)
    shares = routed_in(op, single(op, router), values, k, values is None or bool(normalize_routing_weights))
    y = combined_in(op, y, shares)
    return op.cast(op.Reshape(y, op.Shape(x)), x)


def _sizes(op: Op, b: V) -> tuple[int, int, int]:
    shape = op.shape(b)
    if shape is None or len(shape) != 3 or not all(isinstance(n, int) for n in shape):
        raise OperatorError("the sizes of the experts' weights must be known", code="SX404")
    experts, n, k = (int(s) for s in shape if s is not None)
    return experts, n, k
