"""Dropout with what onnxruntime's optimizer fuses: a bias before it, a residual after it, and masks packed in bits."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from ..random import dropout
from ._api import Array, Host, Op, V, Wanted, Xp, microsoft

_TRAITS = ("random_in_training", "finite", "shape_of_first")


def _biased(x: Array, bias: Array) -> Array:
    """Return x + bias, a vector of the size of the last axis of x or an array of its shape."""
    if bias.shape not in (x.shape[-1:], x.shape):
        raise OperatorError(f"bias must have shape {x.shape[-1:]} or {x.shape}, got {bias.shape}", code="SX404")
    return x + bias


def _added(y: Array, residual: Array | None) -> Array:
    """Return y + residual, of the same shape."""
    if residual is not None and residual.shape != y.shape:
        raise OperatorError(f"residual must have shape {y.shape}, got {residual.shape}", code="SX404")
    return y if residual is None else y + residual


def _packed(xp: Xp, mask: Array | None) -> Array | None:
    """Return a mask as 32-bit words: element i is bit i % 32 of word i // 32, and bits beyond the last element are 0."""
    if mask is None:
        return None
    words = -(-mask.size // 32)
    bits = xp.zeros(words * 32, dtype=np.uint64)
    bits[: mask.size] = mask.reshape(-1)
    powers = xp.asarray(np.uint64(1) << np.arange(32, dtype=np.uint64))
    packed: Array = (bits.reshape(words, 32) * powers).sum(axis=1).astype(np.uint32)
    return packed


def _packed_in(op: Op, mask: V) -> V:
    """`_packed` in ONNX operators."""
    flat = op.Cast(op.Reshape(mask, [-1]), to=12)
    size = op.Shape(flat)
    whole = op.Mul(op.Div(op.Add(size, 31), 32), 32)
    padded = op.Pad(flat, op.Concat([0], op.Sub(whole, size), axis=0))
    rows = op.Reshape(padded, op.Concat(op.Div(whole, 32), [32], axis=0), allowzero=1)
    powers = op.constant(np.uint32(1) << np.arange(32, dtype=np.uint32), np.uint32)
    return op.ReduceSum(op.Mul(rows, powers), [1], keepdims=0)


def _dropped_in(op: Op, x: V, residual: V | None, ratio: V, training_mode: V, seed: int | None, wanted: Wanted) -> tuple[V, ...]:
    """Return Dropout(x) + residual, and its mask if it is wanted."""
    how = {} if seed is None else {"seed": seed}
    ratio = op.constant(ratio, np.float32) if isinstance(ratio, float) else ratio
    training = op.constant(training_mode, np.bool_) if isinstance(training_mode, bool) else training_mode
    y, *mask = op.call("Dropout", [x, ratio, training], how, len(wanted))
    return (y if residual is None else op.Add(y, residual), *mask)


@microsoft("BiasDropout", 1, traits=_TRAITS, settings=("ratio",))
def bias_dropout(
    xp: Xp,
    x: Array,
    bias: Array,
    residual: Array | None = None,
    ratio: Host[float] = 0.5,
    training_mode: Host[bool] = False,
    *,
    seed: int | None = None,
    wanted: Wanted,
) -> tuple[Array, Array | None]:
    """Compute Dropout(x + bias) + residual."""
    y, mask = dropout(xp, _biased(x, bias), ratio, training_mode, seed=seed, wanted=wanted)
    return _added(y, residual), mask


@bias_dropout.decomposition
def bias_dropout_body(
    op: Op, x: V, bias: V, residual: V | None, ratio: V, training_mode: V, seed: int | None, wanted: Wanted
) -> tuple[V, ...]:
    return _dropped_in(op, op.Add(x, bias), residual, ratio, training_mode, seed, wanted)


@microsoft("BitmaskDropout", 1, traits=_TRAITS, settings=("ratio",))
def bitmask_dropout(
    xp: Xp,
    x: Array,
    ratio: Host[float] = 0.5,
    training_mode: Host[bool] = False,
    *,
    seed: int | None = None,
    wanted: Wanted,
) -> tuple[Array, Array | None]:
    """Compute Dropout, whose mask is packed in words of 32 bits."""
    y, mask = dropout(xp, x, ratio, training_mode, seed=seed, wanted=wanted)
    return y, _packed(xp, mask)


@bitmask_dropout.decomposition
def bitmask_dropout_body(op: Op, x: V, ratio: V, training_mode: V, seed: int | None, wanted: Wanted) -> tuple[V, ...]:
    y, *mask = _dropped_in(op, x, None, ratio, training_mode, seed, wanted)
    return (y, *(_packed_in(op, m) for m in mask))


@microsoft("BitmaskBiasDropout", 1, traits=_TRAITS, settings=("ratio",))
def bitmask_bias_dropout(
    xp: Xp,
    x: Array,
    bias: Array,
    residual: Array | None = None,
    ratio: Host[float] = 0.5,
    training_mode: Host[bool] = False,
    *,
    seed: int | None = None,
    wanted: Wanted,
) -> tuple[Array, Array | None]:
    """Compute BiasDropout, whose mask is packed in words of 32 bits."""
    y, mask = dropout(xp, _biased(x, bias), ratio, training_mode, seed=seed, wanted=wanted)
    return _added(y, residual), _packed(xp, mask)


@bitmask_bias_dropout.decomposition
def bitmask_bias_dropout_body(
    op: Op, x: V, bias: V, residual: V | None, ratio: V, training_mode: V, seed: int | None, wanted: Wanted
) -> tuple[V, ...]:
    y, *mask = _dropped_in(op, op.Add(x, bias), residual, ratio, training_mode, seed, wanted)
    return (y, *(_packed_in(op, m) for m in mask))
