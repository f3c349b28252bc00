"""DynamicQuantizeLSTM: an LSTM whose products multiply integers of 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OperatorError
from ...ir.shapes import KnownShapes, Shape
from ..quantize import dynamic_quantize_linear
from ..recurrent import NO_CLIP, lstm_layers, lstm_layers_body
from ._api import Array, Host, Op, V, Xp, microsoft

Floats = tuple[float, ...]
Strings = tuple[str, ...]


def _weights(w: Array, scale: Array, zero: Array, name: str) -> Array:
    """Return (w - zero) * scale, transposed to D x 4H x I; there is one scale for each direction, or for each of its columns."""
    if w.ndim != 3:
        raise OperatorError(f"{name} must have 3 axes, got {w.ndim}", code="SX404")
    d, _, columns = w.shape
    for what, value in (("scale", scale), ("zero point", zero)):
        if value.size not in (d, d * columns):
            raise OperatorError(f"the {what} of {name} must hold {d} or {d * columns} values, got {value.size}", code="SX404")
    real = (w.astype(np.float32) - zero.reshape(d, 1, -1).astype(np.float32)) * scale.reshape(d, 1, -1)
    return real.transpose(0, 2, 1)


@microsoft(
    "DynamicQuantizeLSTM", 1, absent=NO_CLIP, traits=("product", "finite"),
    weights={3: "the bias", 7: "the peephole weight", 8: "the scale of the weight", 10: "the scale of the recurrent weight"},
)  # fmt: skip
def dynamic_quantize_lstm(
    xp: Xp,
    x: Array,
    w: Array,
    r: Array,
    b: Array | None,
    sequence_lens: Host[np.ndarray] | None,
    initial_h: Array | None,
    initial_c: Array | None,
    p: Array | None,
    w_scale: Array,
    w_zero: Array,
    r_scale: Array,
    r_zero: Array,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[Array, ...]:
    """Compute an LSTM of x, and in each step of h, quantized to uint8 by its range, as DynamicQuantizeLinear does.

    W and R are transposed against LSTM's.  The steps after the longest sequence do not count in the range of x.
    """
    given = {
        "activations": activations,
        "activation_alpha": activation_alpha,
        "activation_beta": activation_beta,
        "clip": clip,
        "direction": direction,
        "hidden_size": hidden_size,
        "input_forget": input_forget,
        "layout": 0,
    }

    def seen(h: Array) -> Array:
        q, scale, zero = dynamic_quantize_linear(xp, h)
        return (q.astype(np.float32) - zero.astype(np.float32)) * scale

    steps = None if sequence_lens is None or not sequence_lens.size else max(1, int(sequence_lens.max()))
    if steps is not None and x.ndim == 3 and steps < x.shape[0]:
        x = xp.concatenate([seen(x[:steps]), x[steps:]], axis=0)
    else:
        x = seen(x)
    operands = x, _weights(w, w_scale, w_zero, "W"), _weights(r, r_scale, r_zero, "R"), b
    return lstm_layers(xp, operands, sequence_lens, initial_h, initial_c, p, given, seen)


def _seen_body(op: Op, x: V) -> V:
    """Write x quantized and back."""
    q, scale, zero = op.DynamicQuantizeLinear(x, outputs=3)
    return op.DequantizeLinear(q, scale, zero)


def _weights_body(op: Op, w: V, scale: V, zero: V) -> V:
    """Write `_weights`."""
    shape = op.Concat(op.Shape(w, end=1), [1, -1], axis=0)
    centred = op.Sub(op.Cast(w, to=1), op.Cast(op.Reshape(zero, shape), to=1))
    return op.swap(op.Mul(centred, op.Reshape(scale, shape)))


@dynamic_quantize_lstm.decomposition
def dynamic_quantize_lstm_body(
    op: Op,
    x: V,
    w: V,
    r: V,
    b: V,
    sequence_lens: V,
    initial_h: V,
    initial_c: V,
    p: V,
    w_scale: V,
    w_zero: V,
    r_scale: V,
    r_zero: V,
    activation_alpha: Floats | None,
    activation_beta: Floats | None,
    activations: Strings | None,
    clip: float | None,
    direction: str,
    input_forget: int,
) -> tuple[V, ...]:
    given = {
        "activations": activations,
        "activation_alpha": activation_alpha,
        "activation_beta": activation_beta,
        "clip": clip,
        "direction": direction,
        "input_forget": input_forget,
        "layout": 0,
    }
    if sequence_lens is None:
        x = _seen_body(op, x)
    else:
        steps = op.Cast(op.Max(op.ReduceMax(sequence_lens, [0], keepdims=1), 1), to=7)
        x = op.Concat(_seen_body(op, op.Slice(x, [0], steps, [0])), op.Slice(x, steps, [2**62], [0]), axis=0)
    operands = x, _weights_body(op, w, w_scale, w_zero), _weights_body(op, r, r_scale, r_zero), b
    return lstm_layers_body(op, operands, sequence_lens, initial_h, initial_c, p, given, _seen_body)


@dynamic_quantize_lstm.shapes
def dynamic_quantize_lstm_shapes(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    x, w, r = (known.shape(v) for v in call.inputs[:3])
    if x is None or w is None or r is None or len(x) != 3 or len(w) != 3 or len(r) != 3:
        return None
    last = (w[0], x[1], r[1])
    return [(x[0], w[0], x[1], r[1]), last, last]
