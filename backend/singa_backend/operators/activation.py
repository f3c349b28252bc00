"""Activation functions."""

from __future__ import annotations

import math

import numpy as np

from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import operator
from ..ir.shapes import same_shape
from ._api import Array
from ._common import axis_of, rows
from ._flops import each_input

# --- along an axis ----------------------------------------------------------------------------------------------------


@operator("Softmax", 13, widen=False, traits=("finite", "shape_of_first"), meaning_since=11)
def softmax(xp: Xp, x: Array, *, axis: int = -1) -> Array:
    """Round float16 and bfloat16 after each step, as ONNX's function body does, except a sum above float16's 65,504."""
    axis = axis_of(axis, x.ndim)
    if x.size == 0:
        return x
    if x.dtype.itemsize >= 4:
        return xp.softmax(x, axis)

    def rounded(z: Array) -> Array:
        return z.astype(x.dtype).astype(np.float32)

    wide = x.astype(np.float32)
    e = rounded(xp.exp(rounded(wide - wide.max(axis=axis, keepdims=True))))
    total = e.sum(axis=axis, keepdims=True)
    half = rounded(total)
    return e / xp.where(xp.isfinite(half), half, total)


softmax.flops(each_input(8))


@softmax.gradient
def softmax_gradient(op: Op, dy: V, y: V, axis: int) -> V:
    return op.Mul(y, op.Sub(dy, op.ReduceSum(op.Mul(dy, y), [axis], keepdims=1)))


@operator("Softmax", 1, 11, widen=False)
def softmax_1(xp: Xp, x: Array, *, axis: int = 1) -> Array:
    """Before opset 13, `axis` and all later axes are flattened: softmax over the rows of a matrix."""
    return softmax(xp, rows(x, axis), axis=-1).reshape(x.shape)


@softmax_1.decomposition
def softmax_1_decomposition(op: Op, x: V, axis: int) -> V:
    return op.Reshape(op.Softmax(op.Flatten(x, axis=axis), axis=-1), op.Shape(x), allowzero=1)


@operator("LogSoftmax", 13, traits=("shape_of_first",))
def log_softmax(xp: Xp, x: Array, *, axis: int = -1) -> Array:
    axis = axis_of(axis, x.ndim)
    if x.size == 0:
        return x
    return xp.log_softmax(x, axis)


log_softmax.flops(each_input(8))


@log_softmax.gradient
def log_softmax_gradient(op: Op, dy: V, y: V, axis: int) -> V:
    return op.Sub(dy, op.Mul(op.Exp(y), op.ReduceSum(dy, [axis], keepdims=1)))


@operator("LogSoftmax", 1, 11)
def log_softmax_1(xp: Xp, x: Array, *, axis: int = 1) -> Array:
    return log_softmax(xp, rows(x, axis), axis=-1).reshape(x.shape)


@log_softmax_1.decomposition
def log_softmax_1_decomposition(op: Op, x: V, axis: int) -> V:
    return op.Reshape(op.LogSoftmax(op.Flatten(x, axis=axis), axis=-1), op.Shape(x), allowzero=1)


@operator("Hardmax", 13, traits=("shape_of_first",))
def hardmax(xp: Xp, x: Array, *, axis: int = -1) -> Array:
    """Return 1 at the first maximum and 0 elsewhere."""
    axis = axis_of(axis, x.ndim)
    if x.size == 0:
        return x
    y = xp.zeros(x.shape, x.dtype)
    xp.put_along_axis(y, xp.expand_dims(x.argmax(axis=axis), axis), 1, axis)
    return y


hardmax.flops(each_input(8))


hardmax.no_gradient("zero")


@operator("Hardmax", 1, 11)
def hardmax_1(xp: Xp, x: Array, *, axis: int = 1) -> Array:
    return hardmax(xp, rows(x, axis), axis=-1).reshape(x.shape)


@hardmax_1.decomposition
def hardmax_1_decomposition(op: Op, x: V, axis: int) -> V:
    return op.Reshape(op.Hardmax(op.Flatten(x, axis=axis), axis=-1), op.Shape(x), allowzero=1)


# --- piecewise linear -------------------------------------------------------------------------------------------------


@operator("Relu", 1, 6, 13, 14, traits=("unary", "cannot_fail", "idempotent", "finite", "keeps_finite", "epilogue"))
def relu(xp: Xp, x: Array) -> Array:
    return xp.maximum(x, 0)


@relu.gradient
def relu_gradient(op: Op, dy: V, y: V) -> V:
    """The gradient at 0 is 0."""
    return op.Where(op.Greater(y, 0), dy, 0)


@operator("LeakyRelu", 1, 6, 16, traits=("unary", "cannot_fail", "finite", "epilogue"))
def leaky_relu(xp: Xp, x: Array, *, alpha: float = 0.01) -> Array:
    if 0 < alpha <= 1:
        return xp.maximum(x, alpha * x)  # equal to the selection below and several times as fast
    return xp.where(x < 0, alpha * x, x)


@leaky_relu.gradient
def leaky_relu_gradient(op: Op, dy: V, x: V, alpha: float) -> V:
    """The gradient at 0 is alpha."""
    return op.Where(op.Greater(x, 0), dy, op.Mul(dy, alpha))


@operator("PRelu", 7, 9, 16, traits=("broadcasting", "finite", "epilogue"), meaning_since=7, weights={1: "the slope"})
def prelu(xp: Xp, x: Array, slope: Array) -> Array:
    if slope.ndim > x.ndim or any(s not in (1, n) for s, n in zip(slope.shape[::-1], x.shape[::-1], strict=False)):
        raise OperatorError(f"slope of shape {slope.shape} does not broadcast to x of shape {x.shape}", code="SX404")
    return xp.where(x < 0, slope * x, x)


prelu.shapes(same_shape)


@prelu.gradient
def prelu_gradient(op: Op, dy: V, x: V, slope: V) -> tuple[V, V]:
    """The gradient at 0 is the slope."""
    above = op.Greater(x, 0)
    return op.Where(above, dy, op.Mul(dy, slope)), op.sum_to(op.Where(above, 0, op.Mul(dy, x)), slope)


@operator("PRelu", 1, 6)
def prelu_1(xp: Xp, x: Array, slope: Array) -> Array:
    """Before opset 7 there is one slope, or one for each channel."""
    if slope.size == 1:
        slope = slope.reshape(())
    elif x.ndim > 1 and slope.size == x.shape[1] and slope.shape != x.shape:
        slope = slope.reshape((-1,) + (1,) * (x.ndim - 2))
    return prelu(xp, x, slope)


@prelu_1.decomposition
def prelu_1_decomposition(op: Op, x: V, slope: V) -> V:
    """There is one slope, one for each channel, or one for each element; the sizes decide."""
    if op.rank(x) < 2 or op.rank(slope) == op.rank(x):
        return op.PRelu(x, slope)
    channels = op.Concat([-1], op.Expand([1], [op.rank(x) - 2]), axis=0)
    return op.PRelu(x, op.Reshape(slope, channels))


@operator("ThresholdedRelu", 10, 22, traits=("unary", "cannot_fail", "finite"))
def thresholded_relu(xp: Xp, x: Array, *, alpha: float = 1.0) -> Array:
    """NaN is not above the threshold: the result is 0."""
    return xp.where(x > alpha, x, 0)


@thresholded_relu.gradient
def thresholded_relu_gradient(op: Op, dy: V, x: V, alpha: float) -> V:
    """The gradient at alpha is 0."""
    return op.Where(op.Greater(x, alpha), dy, 0)


@operator("Shrink", 9, traits=("unary", "cannot_fail"))
def shrink(xp: Xp, x: Array, *, bias: float = 0.0, lambd: float = 0.5) -> Array:
    """Return 0 for NaN.

    Integers stay exact if the bias is an integer; otherwise the result is truncated.
    """
    below, above = x < -lambd, x > lambd
    if x.dtype.kind in "iu" and float(bias).is_integer() and abs(bias) < 2**63:
        b = xp.asarray(int(bias), np.int64).astype(x.dtype)  # wraps around, as the sum may
        return xp.where(below, x + b, xp.where(above, x - b, 0)).astype(x.dtype)
    y = xp.where(below, x + bias, xp.where(above, x - bias, 0))
    return y if x.dtype.kind == "f" else xp.cast(y, x.dtype)


@shrink.gradient
def shrink_gradient(op: Op, dy: V, x: V, lambd: float) -> V:
    """The gradient at the bounds is 0."""
    return op.Where(op.Or(op.Less(x, -lambd), op.Greater(x, lambd)), dy, 0)


@operator("HardSigmoid", 1, 6, 22, traits=("unary", "cannot_fail", "finite", "epilogue"))
def hard_sigmoid(xp: Xp, x: Array, *, alpha: float = 0.2, beta: float = 0.5) -> Array:
    return xp.maximum(xp.minimum(alpha * x + beta, 1), 0)


@hard_sigmoid.gradient
def hard_sigmoid_gradient(op: Op, dy: V, y: V, alpha: float) -> V:
    """The gradient is 0 where y is 0 or 1."""
    return op.Where(op.And(op.Greater(y, 0), op.Less(y, 1)), op.Mul(dy, alpha), 0)


@operator("HardSwish", 14, 22, traits=("unary", "cannot_fail", "finite", "epilogue"))
def hard_swish(xp: Xp, x: Array) -> Array:
    return x * hard_sigmoid(xp, x, alpha=1 / 6, beta=0.5)


@hard_swish.gradient
def hard_swish_gradient(op: Op, dy: V, x: V) -> V:
    """The gradient at -3 is 0, and at 3 it is 1."""
    inside = op.Mul(dy, op.Add(op.Div(x, 3), 0.5))
    return op.Where(op.LessOrEqual(x, -3), 0, op.Where(op.GreaterOrEqual(x, 3), dy, inside))


@hard_swish.decomposition
def hard_swish_decomposition(op: Op, x: V) -> V:
    """ONNX's function body has 1/6 as a float32 attribute, also for doubles."""
    return op.Mul(x, op.Min(op.Max(op.Add(op.Mul(x, 1 / 6), 0.5), 0), 1))


# --- exponential below zero -------------------------------------------------------------------------------------------


@operator("Elu", 1, 6, 22, traits=("unary", "cannot_fail", "finite", "epilogue"))
def elu(xp: Xp, x: Array, *, alpha: float = 1.0) -> Array:
    return xp.where(x < 0, alpha * xp.expm1(x), x)


@elu.gradient
def elu_gradient(op: Op, dy: V, x: V, alpha: float) -> V:
    """The gradient at 0 is alpha."""
    return op.Where(op.Greater(x, 0), dy, op.Mul(dy, op.Mul(op.Exp(_negative(op, x)), alpha)))


def _negative(op: Op, x: V) -> V:
    """Return the minimum of x and 0, with a gradient of 0 at 0, so that the second gradient there is 0 as in PyTorch."""
    return op.Where(op.GreaterOrEqual(x, 0), 0, x)


@operator("Celu", 12, 28, traits=("unary", "cannot_fail", "finite"))
def celu(xp: Xp, x: Array, *, alpha: float = 1.0) -> Array:
    return xp.maximum(x, 0) + xp.minimum(alpha * xp.expm1(x / alpha), 0)


@celu.gradient
def celu_gradient(op: Op, dy: V, x: V, alpha: float) -> V:
    """The gradient at 0 is 1."""
    return op.Where(op.Greater(x, 0), dy, op.Mul(dy, op.Exp(op.Div(_negative(op, x), alpha))))


@celu.decomposition
def celu_decomposition(op: Op, x: V, alpha: float) -> V:
    return op.Add(op.Max(x, 0), op.Min(op.Mul(op.Elu(op.Div(x, alpha)), alpha), 0))


@operator("Selu", 6, 22, traits=("unary", "cannot_fail", "finite"))
def selu(xp: Xp, x: Array, *, alpha: float = 1.67326319217681884765625, gamma: float = 1.05070102214813232421875) -> Array:
    return xp.where(x > 0, gamma * x, gamma * alpha * xp.expm1(x))


@selu.gradient
def selu_gradient(op: Op, dy: V, x: V, alpha: float, gamma: float) -> V:
    """The gradient at 0 is gamma * alpha."""
    return op.Mul(dy, op.Where(op.Greater(x, 0), gamma, op.Mul(op.Exp(_negative(op, x)), gamma * alpha)))


@operator("Selu", 1)
def selu_1(xp: Xp, x: Array, *, alpha: float = 1.6732, gamma: float = 1.0507) -> Array:
    return selu(xp, x, alpha=alpha, gamma=gamma)


@selu_1.decomposition
def selu_1_decomposition(op: Op, x: V, alpha: float, gamma: float) -> V:
    return op.Selu(x, alpha=alpha, gamma=gamma)


# --- smooth: in forms without overflow of exponentials and without cancellation -----------------------------------------


@operator("Sigmoid", 1, 6, 13, traits=("unary", "cannot_fail", "finite", "epilogue"))
def sigmoid(xp: Xp, x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)), which equals exp(x) / (1 + exp(x))."""
    e = xp.exp(-xp.abs(x))
    return xp.where(x < 0, e, 1) / (1 + e)


@sigmoid.gradient
def sigmoid_gradient(op: Op, dy: V, y: V) -> V:
    return op.Mul(dy, op.Mul(y, op.Sub(1, y)))


@operator("Softplus", 1, 22, traits=("unary", "cannot_fail", "finite", "epilogue"))
def softplus(xp: Xp, x: Array) -> Array:
    """Compute log(1 + exp(x))."""
    return xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x)))


@softplus.gradient
def softplus_gradient(op: Op, dy: V, x: V) -> V:
    return op.Mul(dy, op.Sigmoid(x))


@operator("Softsign", 1, 22, traits=("unary", "cannot_fail", "finite"))
def softsign(xp: Xp, x: Array) -> Array:
    return x / (1 + xp.abs(x))


@softsign.gradient
def softsign_gradient(op: Op, dy: V, x: V) -> V:
    z = op.Add(op.Abs(x), 1)
    return op.Div(dy, op.Mul(z, z))


@operator("Mish", 18, 22, traits=("unary", "cannot_fail", "finite", "epilogue"))
def mish(xp: Xp, x: Array) -> Array:
    """Compute x * tanh(log(1 + e)) with e = exp(x).

    The tanh equals n / (n + 2) with n = e * (e + 2); in float64 it is 1 for x >= 20.
    """
    e = xp.exp(xp.minimum(x, 20))
    n = e * (e + 2)
    return x * (n / (n + 2))


@mish.gradient
def mish_gradient(op: Op, dy: V, x: V) -> V:
    """The derivative, t + x * sigmoid(x) * (1 - t^2) with t = n / (n + 2), is (n + 4 * x * e * (e + 1) / (n + 2)) / (n + 2)."""
    z = op.Min(x, 5.5 if op.dtype(x) == np.float16 else 20)  # from there on the derivative is 1, and n does not overflow
    e = op.Exp(z)
    n = op.Mul(e, op.Add(e, 2))
    more = op.Add(n, 2)
    share = op.Div(op.Mul(e, op.Add(e, 1)), more)
    return op.Mul(dy, op.Div(op.Add(n, op.Mul(op.Mul(z, 4), share)), more))


@operator("Gelu", 20, traits=("unary", "cannot_fail", "finite", "epilogue"))
def gelu(xp: Xp, x: Array, *, approximate: str = "none") -> Array:
    """Compute x times the normal distribution function: x / 2 * (1 + erf(x / sqrt(2)))."""
    if approximate == "none":
        return 0.5 * x * xp.erfc(x * -math.sqrt(0.5))
    if approximate == "tanh":  # 1 + tanh(u) = 2 * sigmoid(2 * u)
        return x * sigmoid(xp, math.sqrt(8 / math.pi) * (x + 0.044715 * x * x * x))
    raise OperatorError(f"approximate must be 'none' or 'tanh', got {approximate!r}", code="SX404")


@gelu.gradient
def gelu_gradient(op: Op, dy: V, x: V, approximate: str) -> V:
    if approximate == "none":
        below = op.Mul(op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1), 0.5)
        density = op.Mul(op.Exp(op.Mul(op.Mul(x, x), -0.5)), 1 / math.sqrt(2 * math.pi))
        return op.Mul(dy, op.Add(below, op.Mul(x, density)))
    c = math.sqrt(8 / math.pi)  # y = x sigmoid(u), u = c (x + 0.044715 x^3)
    square = op.Mul(x, x)
    s = op.Sigmoid(op.Mul(op.Mul(x, op.Add(op.Mul(square, 0.044715), 1)), c))
    du = op.Mul(op.Add(op.Mul(square, 3 * 0.044715), 1), c)
    return op.Mul(dy, op.Add(s, op.Mul(op.Mul(x, du), op.Mul(s, op.Sub(1, s)))))


@gelu.decomposition
def gelu_decomposition(op: Op, x: V, approximate: str) -> V:
    """ONNX's function body has constants of float32, also for doubles."""
    if approximate == "none":
        return op.Mul(op.Mul(x, 0.5), op.Add(op.Erf(op.Mul(x, math.sqrt(0.5))), 1))
    u = op.Add(x, op.Mul(op.Mul(op.Mul(x, 0.044715), x), x))
    return op.Mul(x, op.Sigmoid(op.Mul(u, math.sqrt(8 / math.pi))))


@operator("Swish", 24, traits=("unary", "cannot_fail", "epilogue"))
def swish(xp: Xp, x: Array, *, alpha: float = 1.0) -> Array:
    return x * sigmoid(xp, alpha * x)


@swish.gradient
def swish_gradient(op: Op, dy: V, x: V, alpha: float) -> V:
    z = op.Mul(x, alpha)
    s = op.Sigmoid(z)
    return op.Mul(dy, op.Mul(s, op.Add(op.Mul(z, op.Sub(1, s)), 1)))


@operator("SwiGLU", 28)
def swiglu(xp: Xp, a: Array, b: Array, *, alpha: float = 1.0) -> Array:
    if a.shape != b.shape:
        raise OperatorError(f"gate and value must have equal shapes, got {a.shape} and {b.shape}", code="SX404")
    return swish(xp, a, alpha=alpha) * b


@swiglu.decomposition
def swiglu_decomposition(op: Op, a: V, b: V, alpha: float) -> V:
    return op.Mul(op.Mul(a, op.Sigmoid(op.Mul(a, alpha))), b)
