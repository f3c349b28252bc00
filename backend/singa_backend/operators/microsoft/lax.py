"""Operators that onnxruntime reads in ONNX's main domain although ONNX does not define them there.

Most are experiments of the first releases, which onnxruntime drops at opset 10.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import dtypes
from ...errors import OperatorError
from .._common import axis_of
from .._flops import each_input
from .._shapes import same_rank
from ..normalization import fits, layer_normalization_decomposition
from ._api import Array, Host, Ints, Op, V, Wanted, lax


@lax("Affine", 1, traits=("unary", "cannot_fail", "finite"))
def affine(op: Op, x: V, *, alpha: float = 1.0, beta: float = 0.0) -> V:
    """Compute alpha * x + beta."""
    return op.Add(op.Mul(x, alpha), beta)


@lax("Scale", 1, traits=("unary", "cannot_fail", "finite"))
def scale(op: Op, x: V, *, scale: float = 1.0) -> V:
    """Compute scale * x."""
    return op.Mul(x, scale)


def _given(alpha: float | None, beta: float | None) -> tuple[float, float]:
    """Return alpha and beta; onnxruntime has no defaults for them, although its schema does not require them."""
    if alpha is None or beta is None:
        raise OperatorError(f"alpha and beta must be given, got {alpha} and {beta}", code="SX407")
    return alpha, beta


@lax("ParametricSoftplus", 1, traits=("unary", "finite"))
def parametric_softplus(op: Op, x: V, *, alpha: float | None = None, beta: float | None = None) -> V:
    """Compute alpha * softplus(beta * x)."""
    alpha, beta = _given(alpha, beta)
    return op.Mul(op.Softplus(op.Mul(x, beta)), alpha)


@lax("ScaledTanh", 1, traits=("unary", "finite"))
def scaled_tanh(op: Op, x: V, *, alpha: float | None = None, beta: float | None = None) -> V:
    """Compute alpha * tanh(beta * x)."""
    alpha, beta = _given(alpha, beta)
    return op.Mul(op.Tanh(op.Mul(x, beta)), alpha)


@lax("ImageScaler", 1, traits=("shape_of_first", "finite"))
def image_scaler(op: Op, x: V, *, bias: tuple[float, ...] | None = None, scale: float = 1.0) -> V:
    """Compute scale * x + bias[c] of images N x C x H x W."""
    shift = op.constant(np.array(bias or (), np.float64).reshape(-1, 1, 1), op.dtype(x))
    return op.Add(op.Mul(x, scale), shift)


@image_scaler.accepts
def image_scaler_accepts(x: Array, bias: tuple[float, ...] | None) -> None:
    _check_images(x)
    if bias is None or len(bias) != x.shape[1]:
        found = None if bias is None else len(bias)
        raise OperatorError(f"bias must hold one number for each of {x.shape[1]} channels, got {found}", code="SX404")


@lax("Crop", 1, widen=False, traits=("moves", "elements_of_first"))
def crop(op: Op, x: V, *, border: Ints | None = None, scale: Ints | None = None) -> V:
    """Remove `border` (left, top, right, bottom) from images; with `scale`, keep that height and width from the left top."""
    assert border is not None
    left, top, right, bottom = border
    ends = [top + scale[0], left + scale[1]] if scale else [-bottom or 2**62, -right or 2**62]
    return op.Slice(x, [top, left], ends, [2, 3])


crop.shapes(same_rank)


@crop.accepts
def crop_accepts(x: Array, border: Ints | None, scale: Ints | None) -> None:
    _check_images(x)
    if border is None or len(border) != 4 or (scale and len(scale) != 2):
        raise OperatorError(f"border must hold 4 numbers and scale 2, got {border} and {scale}", code="SX404")
    left, top, right, bottom = border
    height, width = x.shape[2:]
    ends = (top + scale[0], left + scale[1]) if scale else (height - bottom, width - right)
    if height < max(top + bottom, ends[0]) or width < max(left + right, ends[1]):
        raise OperatorError(f"border {border} and scale {scale} are larger than an image of {x.shape}", code="SX404")


def _check_images(x: Array) -> None:
    """Raise OperatorError unless x is images N x C x H x W."""
    if x.ndim != 4:
        raise OperatorError(f"images must have shape N x C x H x W, got {x.shape}", code="SX404")


@lax("DynamicSlice", 1, widen=False, traits=("moves", "elements_of_first", "keeps_weights"))
def dynamic_slice(op: Op, x: V, starts: Host[V], ends: Host[V], axes: Host[V] | None = None) -> V:
    """Slice along `axes`, as Slice of opset 10 without steps."""
    return op.Slice(x, starts, ends, axes)


dynamic_slice.shapes(same_rank)


# --- normalizations ---------------------------------------------------------------------------------------------------


@lax("LayerNormalization", 1, traits=("shape_of_first", "norm"), weights={1: "the scale", 2: "the bias"})
def early_layer_normalization(
    op: Op, x: V, scale: V, b: V | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, wanted: Wanted
) -> tuple[V, ...]:
    """Return LayerNormalization of opset 17, whose result has the dtype of the scale here."""
    how: dict[str, Any] = {"axis": axis, "epsilon": epsilon, "stash_type": stash_type}
    first, second = scale, b
    if mixed := op.dtype(x) != op.dtype(scale):  # ONNX's operator has one dtype
        x = op.Cast(x, to=dtypes.onnx_code(np.float32)) if op.dtype(x) in dtypes.NARROW_FLOATS else x
        first, second = op.constant([1.0], op.dtype(x)), None
    if stash_type == dtypes.onnx_code(np.float64):  # ONNX's operator has no outputs of this type
        y, *rest = layer_normalization_decomposition(op, x, first, second, **how)
    else:
        made = op.LayerNormalization(x, first, second, outputs=len(wanted), **how)
        y, *rest = made if len(wanted) > 1 else [made]
    if mixed:
        y = op.Mul(op.cast(y, scale), scale)
        y = y if b is None else op.Add(y, b)
    return y, *rest


@early_layer_normalization.accepts
def early_layer_normalization_accepts(x: Array, scale: Array, b: Array | None, axis: int) -> None:
    axis_of(axis, x.ndim)
    fits(scale.shape, x.shape, "Scale")
    if b is not None:
        fits(b.shape, x.shape, "B")


early_layer_normalization.flops(each_input(8))


@lax("SimplifiedLayerNormalization", 1, traits=("shape_of_first", "norm"), weights={1: "the scale"})
def simplified_layer_normalization(
    op: Op, x: V, scale: V, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1, wanted: Wanted
) -> tuple[V, ...]:
    """Return RMSNormalization, and the inverse root of the mean square in `stash_type`."""
    wide = x if op.dtype(x).itemsize >= op.dtype(scale).itemsize else scale  # onnx infers one type of both inputs
    y = op.RMSNormalization(op.cast(x, wide), op.cast(scale, wide), axis=axis, epsilon=epsilon, stash_type=stash_type)
    y = op.cast(y, scale)
    if len(wanted) < 2:
        return (y,)
    z = op.Cast(x, to=stash_type) if op.dtype(x) in dtypes.NARROW_FLOATS else x
    axes = list(range(axis % op.rank(x), op.rank(x)))
    inverse = op.Reciprocal(op.Sqrt(op.Add(op.ReduceMean(op.Mul(z, z), axes, keepdims=1), epsilon)))
    return y, op.Cast(inverse, to=stash_type)


simplified_layer_normalization.flops(each_input(8))
