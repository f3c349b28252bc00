"""Each operation that exporters of frameworks know, written with singa: in onnxruntime it returns what NumPy's formula returns.

A name has a meaning; a meaning is written at its least opset and at the newest, several shapes of one dtype in one file.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from onnx import defs, helper

from singa import autograd, layer, quantization, sonnx, tensor
from singa._core import tape
from singa._core.ops import op
from singa_backend.engines.oracle import Oracle
from singa_backend.proto.schemas import newest


def words(text: str) -> list[str]:
    return text.split()


ONNX_NAMES: dict[str, str] = {
    **{n: n.lower() for n in words("""
        Abs Acos Acosh Add And ArgMax ArgMin Asin Asinh Atan Atanh Cast Ceil Clip Concat Cos Cosh Div Elu
        Equal Erf Exp Floor GatherND Greater Identity Less Log MatMul Max Min Mul Neg Not Or Pad Reciprocal Relu Reshape Round
        Sigmoid Sign Sin Sinh Softmax Softplus Sqrt Squeeze Sub Sum Tan Tanh Transpose""")},
    "AveragePool": "average_pool", "BatchNormalization": "batch_normalization", "Conv": "conv2d", "FloorMod": "floor_mod_whole",
    "LeakyRelu": "leaky_relu", "MaxPool": "max_pool", "NotEqual": "not_equal", "QuantizeLinear": "quantize",
    "ReduceMin": "reduce_min", "ReduceProd": "reduce_prod", "ReduceSum": "reduce_sum",
}  # fmt: skip
"""ONNX's operators, and the two that a graph of them means."""

FRAMEWORK_NAMES: dict[str, str] = {
    # arrays
    "reshape": "reshape", "flatten": "flatten", "squeeze": "squeeze", "expand_dims": "unsqueeze", "expand": "expand",
    "transpose": "transpose", "concat": "concat", "slice": "slice", "narrow": "narrow", "gather_nd": "gathernd",
    "gather": "gather", "cast": "cast", "identity": "identity", "amp_white_identity": "identity",
    "amp_black_identity": "identity", "constant": "constant", "fill_": "fill", "where": "where", "arange": "range",
    # of two
    **{f"{kind}_{n}{by}": n for n in ("add", "sub", "mul", "div") for kind, by in (("broadcast", ""), ("scalar", "_by_tensor"))},
    "scalar_add": "add_number", "scalar_mul": "mul_number", "scalar_div": "div_number", "multiply": "mul",
    "scalar_pow": "pow_number", "add_n": "sum", "bias_add": "bias_add",
    **{f"{kind}_{n}imum": n[:3] for n in ("min", "max") for kind in ("broadcast", "elementwise")},
    "broadcast_floor_mod": "floor_mod", "squared_difference": "squared_difference",
    # comparison and logic
    "broadcast_equal": "equal", "broadcast_not_equal": "not_equal", "broadcast_greater": "greater", "broadcast_less": "less",
    "broadcast_greater_equal": "greater_equal", "broadcast_less_equal": "less_equal", "scalar_logical_less": "less_number",
    "scalar_logical_greater": "greater_number", "logical_not": "not", "broadcast_logical_and": "and",
    "broadcast_logical_or": "or",
    # of one
    **{n: n for n in words("""
        abs ceil elu exp floor log neg sigmoid sqrt tanh reciprocal relu acos asin atan cos sin tan acosh asinh
        atanh cosh sinh round sign erf rsqrt square""")},
    "sigmoid_v2": "sigmoid",
    # activations
    **{n: n for n in words("leaky_relu softplus prelu hardswish hardsigmoid hardtanh silu gelu fast_gelu quick_gelu softmax")},
    "clip_by_scalar": "clip", "clip_by_scalar_min": "clip_min", "clip_by_scalar_max": "clip_max",
    # nets
    "conv1d": "conv1d", "conv2d": "conv2d", "max_pool_2d": "max_pool", "maxpool_2d": "max_pool", "avg_pool_2d": "average_pool",
    "avgpool_2d": "average_pool", "adaptive_avg_pool2d": "adaptive_avg_pool", "pad": "pad",
    "normalization": "batch_normalization", "upsample_nearest_2d": "upsample_nearest", "layer_norm": "layer_norm",
    "rms_norm": "rms_norm", "rms_layer_norm": "rms_layer_norm", "cublas_fused_mlp": "mlp",
    "fused_self_attention_query_mul_key_and_value": "self_attention",
    "fused_bias_add_scale_mask_softmax_dropout": "masked_softmax",
    # matrices and reductions
    "matmul": "matmul", "batch_matmul": "batch_matmul", "broadcast_matmul": "broadcast_matmul", "reduce_min": "reduce_min",
    "reduce_sum": "reduce_sum", "reduce_prod": "reduce_prod", "argmax": "argmax", "argmin": "argmin", "var": "var",
    # quantization
    "fake_quantization": "fake_quantize", "min_max_observer": "min_max", "moving_average_min_max_observer": "moving_average",
    # structure
    "input": "identity", "return": "identity", "variable": "constant", "distribute_split": "identity",
    "distribute_concat": "identity", "distribute_clone": "identity", "distribute_add": "identity",
}  # fmt: skip
"""129 names of other frameworks' operations."""

MORE: dict[str, str] = {"scalar_sub": "sub_number", "reduce_max": "reduce_max", "reduce_mean": "reduce_mean",
                        "relu6": "relu6", "mish": "mish", "pixel_shuffle": "pixel_shuffle",
                        "pixel_unshuffle": "pixel_unshuffle", "std": "std", "adaptive_max_pool2d": "adaptive_max_pool",
                        "group_norm": "group_norm"}  # fmt: skip
"""What else is asked for."""

# --- values to try ----------------------------------------------------------------------------------------------------

NEWEST = newest("")
ORT_NEWEST = 27
"""The newest opset that onnxruntime reads."""

SPECIAL = (np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -1.0, 0.5, -2.5, 1.5, 7.25, -7.0)


def drawn(shape: tuple[int, ...], dtype: Any, seed: int, special: bool = True) -> Any:
    """Values of a dtype: floats about ±3, with NaN, infinities and zeros of both signs in front; integers of both signs."""
    rng = np.random.default_rng(seed)
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.asarray(rng.integers(0, 2, shape)).astype(dtype)
    if dtype.kind in "iu":
        return np.asarray(rng.integers(-9 if dtype.kind == "i" else 0, 10, shape)).astype(dtype)
    x = np.asarray(rng.standard_normal(shape) * 3).astype(dtype)
    flat = x.reshape(-1)
    if special and flat.size > 1:
        rolled = np.roll(SPECIAL, -5 * seed)[: flat.size]
        flat[: len(rolled)] = rolled
    return x


def one(dtype: Any) -> list[tuple[Any, ...]]:
    """A matrix, a number, nothing, and three axes."""
    return [(drawn(s, dtype, i),) for i, s in enumerate([(3, 5), (), (0, 4), (2, 3, 4)])]


def pairs(dtype: Any) -> list[tuple[Any, ...]]:
    """Equal shapes, broadcasting both ways, a number, and nothing."""
    shapes = [((3, 4), (3, 4)), ((2, 1, 3), (4, 1)), ((), (5,)), ((), ()), ((0, 3), (1, 3))]
    return [(drawn(a, dtype, i), drawn(b, dtype, i + 7)) for i, (a, b) in enumerate(shapes)]


def bounded(dtype: Any) -> list[tuple[Any, ...]]:
    """As `one`, without infinities: where a bound of ONNX's Clip is absent, it is the greatest finite number."""
    return [(np.where(np.isinf(x), x.dtype.type(8), x),) for (x,) in one(dtype)]


def nonzero(dtype: Any) -> list[tuple[Any, ...]]:
    """Pairs whose second is no integer zero."""
    return [(a, np.where(b == 0, 3, b).astype(dtype) if np.dtype(dtype).kind in "iu" else b) for a, b in pairs(dtype)]


def finite(*shapes: Any) -> Callable[[Any], list[tuple[Any, ...]]]:
    """Arguments of these shapes, each case a shape or a tuple of shapes, without special values."""

    def make(dtype: Any) -> list[tuple[Any, ...]]:
        cases = [s if s and isinstance(s[0], tuple) else (s,) for s in shapes]
        return [tuple(drawn(s, dtype, 10 * i + j, special=False) for j, s in enumerate(c)) for i, c in enumerate(cases)]

    return make


def given(*cases: tuple[Any, ...]) -> Callable[[Any], list[tuple[Any, ...]]]:
    """Cases as they are, floats in the dtype."""
    return lambda dtype: [
        tuple(a.astype(dtype) if isinstance(a, np.ndarray) and a.dtype.kind == "f" else a for a in c) for c in cases
    ]


F, D, W, L, B = np.float32, np.float64, np.int32, np.int64, np.bool_
FLOATS = (F, D)


@dataclass(frozen=True)
class VersionedOperator:
    """What an operation means.

    write: on tensors.  formula: NumPy's, on arrays (floats as float64); results are held to the dtype of what was written.
    cases: the arguments for a dtype, some shapes.  low: the least opset to try; the newest is always tried.
    rough: ONNX has a constant of this, or a step, in float32 only; float64 is held to that.
    """

    write: Callable[..., Any]
    formula: Callable[..., Any]
    cases: Callable[[Any], list[tuple[Any, ...]]] = one
    dtypes: tuple[Any, ...] = FLOATS
    low: int = 7
    rough: bool = False
    gives: Any = None


def _erf(x: Any) -> Any:
    return np.vectorize(math.erf, otypes=[float])(x)


def _sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def _softmax(x: Any, axis: int = -1) -> Any:
    e = np.exp(x - x.max(axis, keepdims=True, initial=-np.inf))
    return e / e.sum(axis, keepdims=True)


def _round_half_even(x: Any) -> Any:
    return np.rint(x)


def _convolved(x: Any, w: Any, b: Any, stride: int, pad: int, group: int) -> Any:
    """A convolution by its definition."""
    rank = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *[(pad, pad)] * rank])
    windows = np.lib.stride_tricks.sliding_window_view(x, w.shape[2:], axis=tuple(range(2, x.ndim)))
    windows = windows[(slice(None), slice(None), *[slice(None, None, stride)] * rank)]
    n, c = x.shape[:2]
    m = w.shape[0]
    out = []
    for i in range(m):
        lo = i // (m // group) * (c // group)
        part = windows[:, lo : lo + c // group]
        kernel = w[i].reshape(c // group, *[1] * rank, *w.shape[2:])
        out.append((part * kernel).sum((1, *range(2 + rank, 2 + 2 * rank))) + b[i])
    return np.stack(out, 1) if n else np.zeros((0, m, *windows.shape[2 : 2 + rank]))


def _pooled(x: Any, size: int, how: Any) -> Any:
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), axis=(2, 3))[:, :, ::size, ::size]
    return how(windows, axis=(4, 5))


def _parted(x: Any, sizes: tuple[int, int], how: Any) -> Any:
    """Windows from floor(i n / m) to ceil((i + 1) n / m)."""
    h, w = x.shape[2:]
    rows = [(i * h // sizes[0], -(-(i + 1) * h // sizes[0])) for i in range(sizes[0])]
    columns = [(i * w // sizes[1], -(-(i + 1) * w // sizes[1])) for i in range(sizes[1])]
    return np.stack([np.stack([how(x[:, :, a:b, c:d], axis=(2, 3)) for c, d in columns], -1) for a, b in rows], -2)


def _normal(x: Any, axes: Any, epsilon: float = 1e-5) -> Any:
    return (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + epsilon)


def _rms(x: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def _batch_norm(x: tensor.Tensor) -> Any:
    norm = layer.BatchNorm2d()
    norm.initialize(x)
    for i, state in enumerate((norm.scale, norm.bias, norm.running_mean, norm.running_var)):
        state.copy_from_numpy(_channels(x.shape[1], i))
    return norm(x)


def _channels(c: int, i: int) -> Any:
    return np.linspace(0.5 + i, 1.5 + i, c)


def _batch_norm_formula(x: Any) -> Any:
    scale, bias, mean, variance = (_channels(x.shape[1], i).reshape(-1, *[1] * (x.ndim - 2)) for i in range(4))
    return scale * (x - mean) / np.sqrt(variance + 1e-5) + bias


def _mlp(x: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return op.Add(op.MatMul(op.Relu(op.Add(op.MatMul(x, op.Transpose(a)), b)), op.Transpose(c)), d)


def _attention(x: Any, heads: int = 2, size: int = 3) -> Any:
    s, b, _ = x.shape
    q, k, v = np.moveaxis(x.reshape(s, b, heads, 3, size), 3, 0)
    scores = np.einsum("sbhd,tbhd->bhst", q, k) * 0.25
    return scores, v.transpose(1, 2, 0, 3)


def _quantized(x: Any, scale: Any, zero: Any, low: int = -128, high: int = 127) -> Any:
    return (np.clip(np.rint(x / scale) + zero, low, high) - zero) * scale


def _wide(v: Any, x: Any) -> Any:
    """A vector along axis 1 of x."""
    return v.reshape(-1, *[1] * (x.ndim - 2))


STEPS = (np.array([0.1, 0.2], F), np.array([0, 5], F))


def _fake_quantized(x: tensor.Tensor) -> tensor.Tensor:
    scale, zero_point = STEPS
    return quantization.fake_quantize(x, tensor.from_numpy(scale), tensor.from_numpy(zero_point.astype(np.int8)))


def _observed(observer: quantization.Observer, *batches: Any) -> Callable[[tensor.Tensor], Any]:
    def write(x: tensor.Tensor) -> Any:
        watch = quantization.FakeQuantize(copy.deepcopy(observer))
        tape.training = True
        for b in batches:
            watch.observer(tensor.from_numpy(b.astype(F)))
        tape.training = False
        return watch(x)

    return write


BATCHES = (np.array([-1.0, 2.0, 0.5]), np.array([-3.0, 1.0, np.nan]), np.array([0.25, 4.0, np.inf]))
WEIGHT = np.arange(-3.0, 9.0).reshape(3, 4) / 4
FILL = np.full((3, 4), 2.5)


def _affine(x: Any, low: float, high: float) -> Any:
    scale = np.float32(np.float32(high) / np.float32(255) - np.float32(low) / np.float32(255))
    zero = np.clip(np.rint(-128 - np.float32(low) / scale), -128, 127)
    return _quantized(x.astype(F), scale, F(zero))


def unary(name: str, formula: Callable[..., Any], **rest: Any) -> VersionedOperator:
    """One of autograd's functions of one tensor."""
    return VersionedOperator(getattr(autograd, name), formula, **rest)


def binary(name: str, formula: Callable[..., Any], **rest: Any) -> VersionedOperator:
    """One of autograd's functions of two tensors."""
    return VersionedOperator(getattr(autograd, name), formula, **{"cases": pairs, **rest})


def of(write: Callable[..., Any], formula: Callable[..., Any], **rest: Any) -> VersionedOperator:
    return VersionedOperator(write, formula, **rest)


IMAGES = finite((2, 4, 6, 6), (1, 4, 8, 6), (0, 4, 6, 6))
TABLE = finite((3, 4), (2, 3, 2), (5, 1, 3))
EMPTIES = finite((3, 4), (2, 3, 2), (3, 0))

MEANINGS: dict[str, VersionedOperator] = {
    # of one, element by element
    **{n: unary(n, getattr(np, f)) for n, f in (("abs", "abs"), ("ceil", "ceil"), ("exp", "exp"), ("floor", "floor"),
        ("log", "log"), ("sqrt", "sqrt"), ("tanh", "tanh"), ("reciprocal", "reciprocal"), ("cos", "cos"), ("sin", "sin"),
        ("tan", "tan"), ("acos", "arccos"), ("asin", "arcsin"), ("atan", "arctan"))},
    **{n: unary(n, getattr(np, f), low=9) for n, f in (("acosh", "arccosh"), ("asinh", "arcsinh"), ("atanh", "arctanh"),
        ("cosh", "cosh"), ("sinh", "sinh"))},
    "neg": unary("negative", np.negative, dtypes=(F, L)),
    "sigmoid": unary("sigmoid", _sigmoid),
    "relu": unary("relu", lambda x: np.maximum(x, 0)),
    "round": unary("rounde", _round_half_even, low=11),
    "sign": unary("sign", np.sign, low=9, dtypes=(F, L)),
    "erf": unary("erf", _erf, low=9),
    "rsqrt": unary("rsqrt", lambda x: 1 / np.sqrt(x)),
    "square": unary("square", np.square, dtypes=(F, L)),
    "identity": unary("identity", lambda x: x, dtypes=(F, L)),
    "not": unary("_not", np.logical_not, dtypes=(B, W)),
    "cast": of(lambda x: autograd.cast(x, to=tensor.int32), lambda x: np.trunc(x).astype(W), dtypes=(F, L),
               gives=W, cases=finite((3, 4), (), (0, 2))),
    # activations
    "elu": of(lambda x: autograd.elu(x, 0.5), lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
    "leaky_relu": of(lambda x: autograd.leakyrelu(x, 0.1), lambda x: np.where(x >= 0, x, 0.1 * x), rough=True),
    "softplus": unary("softplus", lambda x: np.logaddexp(x, 0)),
    "prelu": of(autograd.prelu, lambda x, s: np.where(x < 0, s * x, x),
        cases=finite(((2, 3), (3,)), ((2, 3, 4), (3, 1)), ((0, 3), (1,)))),
    "hardswish": of(op.HardSwish, lambda x: x * np.clip(x / 6 + 0.5, 0, 1), rough=True),
    "hardsigmoid": of(lambda x: autograd.hardsigmoid(x, alpha=1 / 6), lambda x: np.clip(x / 6 + 0.5, 0, 1), rough=True),
    "hardtanh": of(lambda x: autograd.clip(x, -1.0, 1.0), lambda x: np.clip(x, -1, 1)),
    "relu6": of(lambda x: autograd.clip(x, 0.0, 6.0), lambda x: np.clip(x, 0, 6)),
    "clip": of(lambda x: autograd.clip(x, -0.5, 2.0), lambda x: np.clip(x, -0.5, 2)),
    "clip_min": of(lambda x: autograd.clip(x, min=-0.5), lambda x: np.maximum(x, -0.5), cases=bounded),
    "clip_max": of(lambda x: autograd.clip(x, max=2.0), lambda x: np.minimum(x, 2), cases=bounded),
    "silu": of(op.Swish, lambda x: x * _sigmoid(x)),
    "mish": of(op.Mish, lambda x: x * np.tanh(np.logaddexp(x, 0))),
    "gelu": of(op.Gelu, lambda x: x * 0.5 * (1 + _erf(x / np.sqrt(2))), low=9),
    "fast_gelu": of(lambda x: op.Gelu(x, approximate="tanh"),
                    lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))), rough=True),
    "quick_gelu": unary("quick_gelu", lambda x: x * _sigmoid(1.702 * x), rough=True),
    "softmax": of(lambda x: op.Softmax(x, axis=-1), _softmax, cases=finite((3, 5), (2, 3, 4), (0, 4))),
    # of two
    "add": binary("add", np.add, dtypes=(F, L)), "sub": binary("sub", np.subtract, dtypes=(F, W)),
    "mul": binary("mul", np.multiply, dtypes=(D, L)),
    "div": binary("div", lambda a, b: np.trunc(a / b) if a.dtype.kind == "i" else a / b, cases=nonzero, dtypes=(F, L)),
    "add_number": of(lambda x: x + 3, lambda x: x + 3, dtypes=(F, L)), "sub_number": of(lambda x: x - 3, lambda x: x - 3,
        dtypes=(D, L)),
    "mul_number": of(lambda x: x * 3, lambda x: x * 3, dtypes=(F, W)), "div_number": of(lambda x: x / 3, lambda x: x / 3),
    "pow_number": of(lambda x: op.Pow(x, 3.0), lambda x: x**3),
    "sum": of(autograd.sum, lambda a, b, c: a + b + c,
        cases=finite(((2, 3), (3,), (1,)), ((), (), ()), ((0, 2), (0, 2), (1, 2)))),
    "min": binary("min", np.minimum), "max": binary("max", np.maximum),
    "bias_add": of(lambda x, b: autograd.bias_add(x, b, axis=1), lambda x, b: x + b.reshape(-1, *[1] * (x.ndim - 2)),
                   cases=finite(((2, 3), (3,)), ((2, 3, 4, 4), (3,)), ((0, 3, 2), (3,)))),
    "floor_mod": binary("floor_mod", lambda a, b: a - np.floor(a / b) * b), "floor_mod_whole": binary("floor_mod", np.mod,
        cases=nonzero, dtypes=(W, L), low=10),
    "squared_difference": binary("squared_difference", lambda a, b: (a - b) ** 2, dtypes=(F, L)),
    # comparison and logic
    "equal": binary("equal", np.equal, dtypes=(F, L)), "not_equal": binary("not_equal", np.not_equal, dtypes=(F, L)),
    "greater": binary("greater", np.greater), "less": binary("less", np.less),
    "greater_equal": of(op.GreaterOrEqual, np.greater_equal, cases=pairs),
    "less_equal": of(op.LessOrEqual, np.less_equal, cases=pairs),
    "less_number": of(lambda x: op.Less(x, 0.5), lambda x: x < 0.5),
    "greater_number": of(lambda x: op.Greater(x, 0.5), lambda x: x > 0.5),
    "and": of(autograd._and, np.logical_and, cases=pairs, dtypes=(B, W)),
    "or": of(autograd._or, np.logical_or, cases=pairs, dtypes=(B, W)),
    # arrays
    "reshape": of(lambda x: autograd.reshape(x, [-1, 2]), lambda x: x.reshape(-1, 2), cases=finite((3, 4), (2, 3, 2), (0, 4)),
        dtypes=(F, L)),
    "flatten": of(lambda x: autograd.flatten(x, 1, 2), lambda x: x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:]),
                  cases=finite((2, 3, 4), (2, 3, 4, 5), (2, 0, 3, 1))),
    "squeeze": of(lambda x: autograd.squeeze(x, [0]), lambda x: x.squeeze(0), cases=finite((1, 3), (1, 1, 2), (1, 0)),
        dtypes=(F, L)),
    "unsqueeze": of(lambda x: autograd.unsqueeze(x, [-1]), lambda x: x[..., None], dtypes=(F, L)),
    "expand": of(lambda x: autograd.expand(x, [2, 3, 4]), lambda x: np.broadcast_to(x, (2, 3, 4)),
        cases=finite((3, 1), (), (2, 1, 4)), dtypes=(F, L), low=8),
    "transpose": of(lambda x: autograd.transpose(x, [*range(1, len(x.shape)), 0]), lambda x: np.moveaxis(x, 0, -1),
        cases=EMPTIES, dtypes=(F, L)),
    "concat": of(lambda a, b: autograd.cat([a, b], -1), lambda a, b: np.concatenate([a, b], -1),
        cases=finite(((2, 3), (2, 1)), ((3,), (0,)), ((2, 1, 2), (2, 1, 5))), dtypes=(F, L)),
    "slice": of(lambda x: autograd.slice(x, [1, -3], [3, 99], [0, 1]), lambda x: x[1:3, -3:],
        cases=finite((3, 4), (5, 2, 2), (0, 4)), dtypes=(F, L)),
    "narrow": of(lambda x: autograd.narrow(x, 1, -2, 2), lambda x: x[:, -2:], cases=finite((3, 4), (5, 3, 2), (0, 4)),
        dtypes=(F, L)),
    "gather": of(lambda x: autograd.gather(x, 1, [0, -1, 1]), lambda x: x[:, [0, -1, 1]],
        cases=finite((3, 4), (5, 2, 2), (0, 3)), dtypes=(F, L)),
    "gathernd": of(op.GatherND, lambda x, i: x[tuple(np.moveaxis(i, -1, 0))], low=11,
                   cases=given((WEIGHT, np.array([[0, 1], [-1, 2]])), (WEIGHT, np.array([[2], [0]])), (WEIGHT, np.zeros((0, 2),
        L)))),
    "constant": of(lambda x: op.Add(x, tensor.from_numpy(WEIGHT.astype(op.dtype(x)))), lambda x: x + WEIGHT,
        cases=finite((3, 4), (), (2, 3, 4))),
    "fill": of(lambda x: op.Add(x, tensor.zeros((3, 4), dtype=op.dtype(x)).set_value(2.5)), lambda x: x + FILL,
        cases=finite((3, 4), (), (2, 3, 4))),
    "where": of(lambda c, a, b: autograd.where(a, b, c), np.where, low=9,
                cases=lambda d: [(drawn(s, B, i), drawn(s, d, i), drawn(t, d, i + 5)) for i, (s, t) in enumerate([((3, 4),
        (4,)), ((), (2,)), ((0, 2), (1, 2))])]),
    "range": of(op.Range, np.arange, low=11, dtypes=(F, L),
                cases=lambda d: [tuple(np.array(v, d) for v in c) for c in ((0, 5, 1), (7, -3, -2), (3, 3, 1))]),
    # nets
    "conv1d": of(lambda x, w, b: op.Conv(x, w, b, pads=[1, 1]), lambda x, w, b: _convolved(x, w, b, 1, 1, 1),
                 cases=finite(((2, 3, 7), (4, 3, 3), (4,)), ((1, 2, 4), (1, 2, 3), (1,)), ((0, 3, 7), (4, 3, 3), (4,)))),
    "conv2d": of(lambda x, w, b: op.Conv(x, w, b, strides=[2, 2], pads=[1] * 4, group=2),
        lambda x, w, b: _convolved(x, w, b, 2, 1, 2),
                 cases=finite(((2, 4, 7, 6), (6, 2, 3, 3), (6,)), ((1, 2, 4, 4), (2, 1, 3, 3), (2,)), ((3, 4, 3, 3), (2, 2, 1,
        1), (2,)))),
    "max_pool": of(lambda x: op.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2]), lambda x: _pooled(x, 2, np.max), cases=IMAGES),
    "average_pool": of(lambda x: op.AveragePool(x, kernel_shape=[2, 2], strides=[2, 2]), lambda x: _pooled(x, 2, np.mean),
        cases=IMAGES),
    "adaptive_avg_pool": of(lambda x: autograd.adaptive_avg_pool(x, (4, 3)), lambda x: _parted(x, (4, 3), np.mean), cases=IMAGES),
    "adaptive_max_pool": of(lambda x: autograd.adaptive_max_pool(x, (4, 3)), lambda x: _parted(x, (4, 3), np.max), cases=IMAGES),
    "pad": of(lambda x: autograd.pad(x, "constant", [1, 0, 0, 2], 1.5),
        lambda x: np.pad(x, [(1, 0), (0, 2)], constant_values=1.5), cases=finite((3, 4), (1, 1), (0, 2))),
    "batch_normalization": of(_batch_norm, _batch_norm_formula, cases=finite((2, 3, 4, 4), (3, 2), (0, 3, 2))),
    "upsample_nearest": of(lambda x: autograd.upsample(x, "nearest", [1, 1, 2, 3]), lambda x: x.repeat(2, 2).repeat(3, 3),
        cases=finite((2, 4, 3, 2), (1, 1, 1, 5), (2, 2, 4, 4)), low=10),
    "layer_norm": of(lambda x: layer.LayerNorm()(x), lambda x: _normal(x, -1), cases=TABLE),
    "group_norm": of(lambda x: layer.GroupNorm(2)(x), lambda x: _normal(x.reshape(x.shape[0], 2, -1), -1).reshape(x.shape),
        rough=True, cases=finite((2, 4, 3), (1, 2, 3, 4), (3, 6, 5))),
    "rms_norm": of(lambda x: op.RMSNormalization(x, _ones(x)), _rms, cases=TABLE),
    "rms_layer_norm": of(lambda x: layer.RMSNorm()(x), _rms, cases=TABLE),
    "mlp": of(_mlp, lambda x, a, b, c, d: np.maximum(x @ a.T + b, 0) @ c.T + d,
        cases=finite(((3, 4), (5, 4), (5,), (2, 5), (2,)), ((1, 2), (1, 2), (1,), (3, 1), (3,)), ((0, 4), (5, 4), (5,), (2, 5),
        (2,)))),
    "self_attention": of(lambda x: autograd.fused_self_attention_query_mul_key_and_value(x, head_size=3, alpha=0.25), _attention,
        cases=finite((4, 2, 18), (1, 1, 18), (5, 3, 18))),
    "masked_softmax": of(lambda x, b, m: autograd.fused_bias_add_scale_mask_softmax_dropout(x, b, m, -1e4, 0.5),
        lambda x, b, m: _softmax(np.where(m != 0, (x + b) * 0.5, -1e4)), low=9,
                         cases=lambda d: [(drawn(s, d, i, False), drawn(s[-1:], d, i + 3, False), drawn(s, B, i)) for i,
        s in enumerate([(3, 5), (2, 3, 4), (1, 2, 2, 3)])]),
    "pixel_shuffle": of(lambda x: autograd.depth_to_space(x, 2, "CRD"),
        lambda x: x.reshape(x.shape[0], -1, 2, 2, *x.shape[2:]).transpose(0, 1, 4, 2, 5, 3).reshape(x.shape[0], -1,
        2 * x.shape[2], 2 * x.shape[3]), cases=finite((2, 4, 3, 2), (1, 8, 1, 5), (3, 4, 2, 2))),
    "pixel_unshuffle": of(lambda x: autograd.space_to_depth(x, 2, "CRD"),
        lambda x: x.reshape(*x.shape[:2], x.shape[2] // 2, 2, x.shape[3] // 2, 2).transpose(0, 1, 3, 5, 2, 4)
        .reshape(x.shape[0], -1, x.shape[2] // 2, x.shape[3] // 2), cases=finite((2, 1, 4, 2), (1, 3, 2, 6), (3, 2, 2, 2))),
    # matrices and reductions
    "matmul": of(lambda a, b: op.Mul(op.MatMul(a, op.Transpose(b)), 0.5), lambda a, b: a @ b.T / 2,
        cases=finite(((2, 3), (4, 3)), ((1, 1), (1, 1)), ((0, 3), (2, 3)))),
    "batch_matmul": of(op.MatMul, np.matmul,
        cases=finite(((2, 3, 4), (2, 4, 5)), ((1, 2, 3, 1), (1, 2, 1, 3)), ((0, 2, 3), (0, 3, 2)))),
    "broadcast_matmul": of(autograd.matmul, np.matmul, cases=finite(((2, 3, 4), (4, 5)), ((3,), (3, 2)), ((1, 2, 3), (4, 3, 2)))),
    **{f"reduce_{n}": of(lambda x, o=o: op.call(o, (x, [1]), {"keepdims": 1}, 1)[0],
        lambda x, f=f: getattr(np, f)(x, axis=1, keepdims=True), cases=lambda d: one(d)[::3] + TABLE(d), dtypes=dt)
       for n, o, f, dt in (("sum", "ReduceSum", "sum", (F, W)), ("prod", "ReduceProd", "prod", (F, W)), ("max", "ReduceMax",
        "max", (F, W)),
                           ("min", "ReduceMin", "min", (F, W)), ("mean", "ReduceMean", "mean", FLOATS))},
    "argmax": of(lambda x: op.ArgMax(x, axis=1, keepdims=0), lambda x: x.argmax(1), gives=L, cases=TABLE, dtypes=(F, W)),
    "argmin": of(lambda x: op.ArgMin(x, axis=-1), lambda x: x.argmin(-1)[..., None], gives=L, cases=TABLE, dtypes=(F, W)),
    "var": of(lambda x: autograd.var(x, [1]), lambda x: x.var(1, ddof=1, keepdims=True),
        cases=finite((3, 4), (2, 3, 4, 5), (2, 5, 0))),
    "std": of(lambda x: autograd.std(x, unbiased=False, keepdims=0), lambda x: x.std(), cases=finite((3, 4), (), (2, 3, 4, 5))),
    # quantization
    "quantize": of(lambda x: op.QuantizeLinear(x, 0.125, op.constant(3, np.int8)),
        lambda x: np.clip(np.rint(x / 0.125) + 3, -128, 127), gives=np.int8, dtypes=(F, W), low=10,
        cases=finite((3, 4), (), (0, 2))),
    "fake_quantize": of(_fake_quantized, lambda x: _quantized(x.astype(F), _wide(STEPS[0], x), _wide(STEPS[1], x)),
        low=13, cases=finite((3, 2), (2, 2, 4), (0, 2, 3))),
    "min_max": of(_observed(quantization.MinMaxObserver(), *BATCHES), lambda x: _affine(x, -3, 4), low=10,
        cases=finite((3, 2), (), (0, 2, 3))),
    "moving_average": of(_observed(quantization.MovingAverageMinMaxObserver(momentum=0.5), *BATCHES),
        lambda x: _affine(x, -1.0, 2.75), low=10, cases=finite((3, 2), (), (0, 2, 3))),
}  # fmt: skip


def _ones(x: tensor.Tensor) -> Any:
    return tensor.from_numpy(np.ones(x.shape[-1:], op.dtype(x)))


# Where onnxruntime is no witness; SingaRep is one there, and NumPy's formula the judge as everywhere.

NO_KERNEL: dict[str, set[Any]] = {
    **{
        n: {D}
        for n in words("""
        tan acos asin atan acosh asinh atanh cosh sinh erf elu leaky_relu softplus prelu hardswish hardsigmoid
        mish gelu conv1d conv2d average_pool adaptive_avg_pool upsample_nearest""")
    },
    **{n: {(D, 7)} for n in words("hardtanh relu6 clip clip_min clip_max max_pool adaptive_max_pool")},
    "silu": {NEWEST, D},
    "min": {(D, 7)},
    "max": {(D, 7)},
    "quick_gelu": {NEWEST},
    "quantize": {W},
}
"""Meanings that it refuses, in a dtype, in an opset, or in both."""

DEVIATES: dict[str, set[Any]] = {
    "reduce_max": {F},
    "reduce_min": {F},  # a NaN that is not the first is lost
}
"""Meanings that it computes otherwise than ONNX says."""


# --- the comparison ---------------------------------------------------------------------------------------------------

TOLERANCE = {np.dtype(np.float32): (1e-5, 2e-6), np.dtype(np.float64): (1e-9, 1e-12)}


@pytest.fixture(scope="module", autouse=True)
def stop_onnxruntime() -> Iterator[None]:
    yield
    _onnxruntime().close()
    _onnxruntime.cache_clear()


@cache
def _onnxruntime() -> Oracle:
    return Oracle("onnxruntime")


@cache
def _compared(name: str, opset: int) -> int:
    """How many results of a meaning agree with its formula; raises where one does not."""
    return sum(_of_dtype(name, opset, dtype) for dtype in MEANINGS[name].dtypes)


def _of_dtype(name: str, opset: int, dtype: Any) -> int:
    meaning = MEANINGS[name]
    cases = meaning.cases(dtype)
    inputs = [[tensor.from_numpy(a) for a in case] for case in cases]
    flat = [x for xs in inputs for x in xs]
    for i, x in enumerate(flat):
        x.name = f"x{i}"
    made = [meaning.write(*xs) for xs in inputs]
    proto = sonnx.to_onnx(flat, [y for ys in made for y in (ys if isinstance(ys, tuple) else (ys,))], opset=opset)
    assert proto.opset_import[0].version == opset
    feeds = {x.name: a for x, a in zip(flat, (a for case in cases for a in case), strict=True)}
    others = NO_KERNEL.get(name, set()) | DEVIATES.get(name, set())
    if all(defs.get_schema(n.op_type, opset).since_version <= ORT_NEWEST for n in proto.graph.node):
        proto.opset_import[0].version = min(opset, ORT_NEWEST)  # there is nothing newer in it
        proto.ir_version = helper.find_min_ir_version_for(proto.opset_import)
    if proto.opset_import[0].version > ORT_NEWEST or {dtype, opset, (dtype, opset)} & others:
        found = list(sonnx.prepare(proto).run(feeds))
    else:
        found = list(_onnxruntime().run(proto.SerializeToString(), feeds).values())
    count = len(found)
    for case in cases:
        wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in case]
        with np.errstate(all="ignore"):
            wanted = meaning.formula(*wide)
        for want in wanted if isinstance(wanted, tuple) else (wanted,):
            _agrees(found.pop(0), np.asarray(want), np.dtype(meaning.gives or dtype), case, meaning.rough)
    assert not found
    return count


def _agrees(got: Any, want: Any, dtype: np.dtype[Any], case: Any, rough: bool) -> None:
    kind = np.dtype(np.bool_) if want.dtype == np.bool_ else dtype
    assert got.dtype == kind and got.shape == want.shape, (got.dtype, got.shape, want.shape, case)
    with np.errstate(all="ignore"):
        want = want.astype(kind)
    if kind.kind == "f":
        relative, absolute = TOLERANCE[np.dtype(F) if rough else kind]
        np.testing.assert_allclose(got, want, relative, absolute, err_msg=str(case))
    else:
        np.testing.assert_array_equal(got, want, err_msg=str(case))


@pytest.mark.row("E9")
@pytest.mark.parametrize("name", [*ONNX_NAMES, *(f"framework-{n}" for n in FRAMEWORK_NAMES), *(f"more-{n}" for n in MORE)])
def test_operation(name: str) -> None:
    table = FRAMEWORK_NAMES if name.startswith("framework-") else MORE if name.startswith("more-") else ONNX_NAMES
    meaning = table[name.removeprefix("framework-").removeprefix("more-")]
    assert _compared(meaning, MEANINGS[meaning].low) >= 6
    assert _compared(meaning, NEWEST) >= 6


@pytest.mark.row("E9")
def test_every_name_has_a_row() -> None:
    assert len(ONNX_NAMES) == 64 and len(FRAMEWORK_NAMES) == 129
    assert {*ONNX_NAMES.values(), *FRAMEWORK_NAMES.values(), *MORE.values()} == set(MEANINGS)
