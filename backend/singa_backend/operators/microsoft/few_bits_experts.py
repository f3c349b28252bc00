"""QMoE: a mixture of experts whose weights have few bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import OperatorError
from ..activation import gelu, sigmoid
from ._api import Array, Op, V, Xp, microsoft
from ._packed import bytes_of, check_form, dequantized, dequantized_body, sized, unpacked, unpacked_body, wide, zero_points

ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "identity")


class _ExpertsForm:
    """The attributes of a node, checked."""

    def __init__(
        self,
        activation: str,
        alpha: float,
        beta: float,
        fusion: int,
        limit: float | None,
        late: int,
        block: int | None,
        bits: int,
    ) -> None:
        if activation not in ACTIVATIONS:
            raise OperatorError(f"activation_type must be one of {', '.join(ACTIVATIONS)}, got {activation!r}", code="SX404")
        if fusion not in (0, 1, 2) or (fusion and activation != "swiglu"):
            raise OperatorError(f"swiglu_fusion must be 0, or 1 or 2 for swiglu, got {fusion} for {activation}", code="SX404")
        self.activation, self.alpha, self.beta, self.fusion, self.late = activation, alpha, beta, fusion, late
        self.limit = math.inf if limit is None else limit
        self.block, self.bits = block or 0, bits
        check_form(bits, self.block or 16)

    def gated(self, xp: Xp, gate: Array, linear: Array | None) -> Array:
        """Apply the activation."""
        if self.activation != "swiglu":
            plain: dict[str, Callable[[], Array]] = {
                "relu": lambda: xp.maximum(gate, 0),
                "gelu": lambda: gelu(xp, gate, approximate="tanh"),
                "silu": lambda: gate * sigmoid(xp, gate),
                "identity": lambda: gate,
            }
            made = plain[self.activation]()
            return made if linear is None else made * linear
        if linear is None:
            raise OperatorError("swiglu without swiglu_fusion needs the weights of fc3", code="SX404")
        gate = gate if self.late else xp.minimum(gate, self.limit)
        gate = gate * sigmoid(xp, self.alpha * gate)
        gate = xp.minimum(gate, self.limit) if self.late else gate
        return gate * (xp.clip(linear, -self.limit, self.limit) + self.beta)

    def gated_body(self, op: Op, gate: V, linear: V) -> V:
        """Write `gated`."""
        if self.activation != "swiglu":
            plain: dict[str, Callable[[], V]] = {
                "relu": lambda: op.Relu(gate),
                "gelu": lambda: op.Gelu(gate, approximate="tanh"),
                "silu": lambda: op.Mul(gate, op.Sigmoid(gate)),
                "identity": lambda: gate,
            }
            made = plain[self.activation]()
            return made if linear is None else op.Mul(made, linear)
        bounded = self.limit < math.inf
        gate = op.Min(gate, self.limit) if bounded and not self.late else gate
        gate = op.Mul(gate, op.Sigmoid(op.Mul(gate, self.alpha)))
        gate = op.Min(gate, self.limit) if bounded and self.late else gate
        linear = op.Clip(linear, -self.limit, self.limit) if bounded else linear
        return op.Mul(gate, op.Add(linear, self.beta))


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
        form: _ExpertsForm,
    ) -> None:
        if scales is None:
            raise OperatorError(f"{name}_scales must be present for weights of integers", code="SX404")
        if b.ndim != 3 or b.shape[2] * 8 // form.bits != k:
            raise OperatorError(f"the weights of {name} must have rows of {k} values, got shape {tuple(b.shape)}", code="SX404")
        if form.block and k % form.block:
            raise OperatorError(f"block_size must divide {k}, got {form.block}", code="SX404")
        self.xp, self.b, self.k, self.bits = xp, b, k, form.bits
        self.block = form.block or k
        self.n = b.shape[1]
        self.scales = sized(f"{name}_scales", scales, (b.shape[0], self.n, k // self.block))
        self.bias = None if bias is None else sized(f"{name}_experts_bias", bias, (b.shape[0], self.n))
        self.zero, self.blocked = zero, bool(form.block)
        if zero is not None and not form.block:
            packed = sized(f"{name}_zero_points", zero, (b.shape[0], bytes_of(self.n, form.bits)))
            self.zero = unpacked(xp, packed, form.bits)[:, : self.n].astype(np.float32)
        elif zero is not None:
            self.zero = sized(f"{name}_zero_points", zero, (b.shape[0], self.n, bytes_of(k // self.block, form.bits)))

    def __call__(self, x: Array, e: int) -> Array:
        """Multiply rows by the weights of one expert, which are unpacked for this product only."""
        zero = None if self.zero is None else self.zero[e] if self.blocked else self.zero[e][:, None]
        points = zero_points(self.xp, zero, self.bits, self.scales.shape[1:])
        y = x @ dequantized(self.xp, self.b[e], self.scales[e], points, self.bits, self.block, self.k).T
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

    def form(bits: int | None) -> _ExpertsForm:
        last = swiglu_limit, swiglu_limit_after_activation, block_size, bits or expert_weight_bits
        return _ExpertsForm(activation_type, activation_alpha, activation_beta, swiglu_fusion, *last)

    rows = x.reshape(-1, x.shape[-1])
    experts, first = fc1.shape[0], form(fc1_expert_weight_bits)
    inner = fc1.shape[1] // (2 if swiglu_fusion else 1)
    one = _PackedLayer("fc1", xp, fc1, fc1_scales, fc1_zero, fc1_bias, rows.shape[1], first)
    two = _PackedLayer("fc2", xp, fc2, fc2_scales, fc2_zero, fc2_bias, inner, form(fc2_expert_weight_bits))
    three = None
    if fc3 is not None:
        three = _PackedLayer("fc3", xp, fc3, fc3_scales, fc3_zero, fc3_bias, rows.shape[1], form(fc3_expert_weight_bits))
    chosen, share = _routed(xp, router, router_weights, (rows.shape[0], experts), k, normalize_routing_weights)
    y = xp.zeros(rows.shape, dtype=np.float32)
    for e in range(experts):
        token, place = xp.nonzero(chosen == e)
        if token.size:
            gate, linear = _halves(one, three, rows[token], e, swiglu_fusion)
            y[token] += share[token, place][:, None] * two(first.gated(xp, gate, linear), e)
    return y.reshape(x.shape)


def _halves(one: _PackedLayer, three: _PackedLayer | None, seen: Array, e: int, fusion: int) -> tuple[Array, Array | None]:
    """Return the gate and the linear part of an expert's first layer."""
    h = one(seen, e)
    if fusion == 1:
        return h[:, 0::2], h[:, 1::2]
    if fusion == 2:
        inner = h.shape[1] // 2
        return h[:, :inner], h[:, inner:]
    return h, None if three is None else three(seen, e)


def _routed(xp: Xp, router: Array, weights: Array | None, shape: tuple[int, int], k: int, normalize: int) -> tuple[Array, Array]:
    """Return the k experts of each row and their shares."""
    if router.shape != shape or not 0 < k <= shape[1]:
        what = f"{shape[0]} x {shape[1]} router values and 0 < k <= {shape[1]}"
        raise OperatorError(f"expected {what}, got shape {tuple(router.shape)} and k = {k}", code="SX404")
    chosen = xp.argsort(-router, axis=1, kind="stable")[:, :k]
    taken = xp.take_along_axis(router if weights is None else weights, chosen, axis=1)
    if weights is None:
        taken = xp.exp(taken - taken.max(axis=1, keepdims=True))
    return chosen, taken / taken.sum(axis=1, keepdims=True) if weights is None or normalize else taken


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
    scales = op.Reshape(wide(op, scales), [experts, n, k // size])
    if zero is not None and not block:
        values = op.Slice(unpacked_body(op, op.Reshape(zero, [experts, bytes_of(n, bits)]), bits), [0], [n], [1])
        zero = op.Cast(values, to=1)
    w = dequantized_body(op, b, scales, zero, bits, size, k, [experts, n])
    y = op.MatMul(x, op.Transpose(w, perm=[0, 2, 1]))
    return y if bias is None else op.Add(y, op.Unsqueeze(wide(op, bias), [1]))


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
    limits = swiglu_limit, swiglu_limit_after_activation
    form = _ExpertsForm(activation_type, activation_alpha, activation_beta, swiglu_fusion, *limits, block_size, bits[0])
    experts, up, bytes_in = _sizes(op, fc1)
    hidden, inner = bytes_in * 8 // bits[0], up // (2 if swiglu_fusion else 1)
    rows = op.Unsqueeze(op.Reshape(wide(op, x), [-1, hidden]), [0])
    h = _layer_body(op, rows, fc1, fc1_scales, fc1_zero, fc1_bias, bits[0], block_size, (experts, up, hidden))
    linear = None
    if swiglu_fusion == 1:
        pairs = op.Reshape(h, op.Concat(op.Shape(h, end=2), [inner, 2], axis=0))
        h, linear = op.Gather(pairs, 0, axis=3), op.Gather(pairs, 1, axis=3)
    elif swiglu_fusion == 2:
        h, linear = op.call("Split", [h, None], {"axis": 2, "num_outputs": 2}, 2)
    elif fc3 is not None:
        linear = _layer_body(op, rows, fc3, fc3_scales, fc3_zero, fc3_bias, bits[2], block_size, (experts, inner, hidden))
    h = form.gated_body(op, h, linear)
    y = _layer_body(op, h, fc2, fc2_scales, fc2_zero, fc2_bias, bits[1], block_size, (experts, hidden, inner))
    share = _shares_body(op, wide(op, router), router_weights, k, normalize_routing_weights)
    y = op.ReduceSum(op.Mul(y, op.Unsqueeze(op.Transpose(share, perm=[1, 0]), [2])), [0], keepdims=0)
    return op.cast(op.Reshape(y, op.Shape(x)), x)


def _sizes(op: Op, b: V) -> tuple[int, int, int]:
    shape = op.shape(b)
    if shape is None or len(shape) != 3 or not all(isinstance(n, int) for n in shape):
        raise OperatorError("the sizes of the experts' weights must be known", code="SX404")
    experts, n, k = (int(s) for s in shape if s is not None)
    return experts, n, k


def _shares_body(op: Op, router: V, weights: V, k: int, normalize: int) -> V:
    """Write the shares as rows x experts, with 0 for an expert that is not chosen."""
    values, chosen = op.TopK(router, [k], axis=1, outputs=2)
    if weights is None:
        share = op.Softmax(values, axis=1)
    else:
        share = op.GatherElements(wide(op, weights), chosen, axis=1)
        share = op.Div(share, op.ReduceSum(share, [1], keepdims=1)) if normalize else share
    return op.ScatterElements(op.zeros_like(router), chosen, share, axis=1)
