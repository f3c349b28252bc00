"""Dropout with what onnxruntime's optimizer fuses: a bias before it, a residual after it, and masks packed in bits."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from ._api import Array, Host, Op, V, Wanted, microsoft

_TRAITS = ("random_in_training", "finite", "shape_of_first")


def _check_shapes(x: Array, bias: Array, residual: Array | None) -> None:
    """Raise OperatorError unless the bias is a vector of the last axis of x or has its shape, as the residual."""
    if bias.shape not in (x.shape[-1:], x.shape):
        raise OperatorError(f"bias must have shape {x.shape[-1:]} or {x.shape}, got {bias.shape}", code="SX404")
    if residual is not None and residual.shape != x.shape:
        raise OperatorError(f"residual must have shape {x.shape}, got {residual.shape}", code="SX404")


def _packed(op: Op, mask: V) -> V:
    """Return a mask as 32-bit words: element i is bit i % 32 of word i // 32, and bits beyond the last element are 0."""
    flat = op.Cast(op.Reshape(mask, [-1]), to=12)
    size = op.Shape(flat)
    whole = op.Mul(op.Div(op.Add(size, 31), 32), 32)
    padded = op.Pad(flat, op.Concat([0], op.Sub(whole, size), axis=0))
    rows = op.Reshape(padded, op.Concat(op.Div(whole, 32), [32], axis=0), allowzero=1)
    powers = op.constant(np.uint32(1) << np.arange(32, dtype=np.uint32), np.uint32)
    return op.ReduceSum(op.Mul(rows, powers), [1], keepdims=0)


def _dropped(op: Op, x: V, residual: V | None, ratio: V, training_mode: V, seed: int | None, wanted: Wanted) -> tuple[V, ...]:
    """Return Dropout(x) + residual, and its mask if it is wanted."""
    how = {} if seed is None else {"seed": seed}
    ratio = op.constant(ratio, np.float32) if isinstance(ratio, float) else ratio
    training = op.constant(training_mode, np.bool_) if isinstance(training_mode, bool) else training_mode
    y, *mask = op.call("Dropout", [x, ratio, training], how, len(wanted))
    return (y if residual is None else op.Add(y, residual), *mask)


@microsoft("BiasDropout", 1, traits=_TRAITS, settings=("ratio",))
def bias_dropout(
    op: Op,
    x: V,
    bias: V,
    residual: V | None = None,
    ratio: Host[V] = 0.5,
    training_mode: Host[V] = False,
    *,
    seed: int | None = None,
    wanted: Wanted,
) -> tuple[V, ...]:
    """Compute Dropout(x + bias) + residual."""
    return _dropped(op, op.Add(x, bias), residual, ratio, training_mode, seed, wanted)


bias_dropout.accepts(_check_shapes)


@microsoft("BitmaskDropout", 1, traits=_TRAITS, settings=("ratio",))
def bitmask_dropout(
    op: Op,
    x: V,
    ratio: Host[V] = 0.5,
    training_mode: Host[V] = False,
    *,
    seed: int | None = None,
    wanted: Wanted,
) -> tuple[V, ...]:
    """Compute Dropout, whose mask is packed in words of 32 bits."""
    y, *mask = _dropped(op, x, None, ratio, training_mode, seed, wanted)
    return (y, *(_packed(op, m) for m in mask))


@microsoft("BitmaskBiasDropout", 1, traits=_TRAITS, settings=("ratio",))
def bitmask_bias_dropout(
    op: Op,
    x: V,
    bias: V,
    residual: V | None = None,
    ratio: Host[V] = 0.5,
    training_mode: Host[V] = False,
    *,
    seed: int | None = None,
    wanted: Wanted,
) -> tuple[V, ...]:
    """Compute BiasDropout, whose mask is packed in words of 32 bits."""
    y, *mask = _dropped(op, op.Add(x, bias), residual, ratio, training_mode, seed, wanted)
    return (y, *(_packed(op, m) for m in mask))


bitmask_bias_dropout.accepts(_check_shapes)
