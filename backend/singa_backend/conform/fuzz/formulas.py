"""Independent formulas of operators, in NumPy on float64 or exact integers; they use none of our operators' code."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
from onnx import helper

from ... import dtypes
from .generate import NodeCase

Array: TypeAlias = np.ndarray
Formula: TypeAlias = Callable[..., Any]

_erf = np.frompyfunc(math.erf, 1, 1)


def _where(x: Array, below: Any, above: Any) -> Array:
    return np.asarray(np.where(x < 0, below, above))


def _log1p_exp(x: Array) -> Array:
    return np.asarray(np.logaddexp(0, x))


def _sigmoid(x: Array) -> Array:
    return np.asarray(np.exp(-np.logaddexp(0, -x)))


def _gauss(x: Array) -> Array:
    return np.asarray([0.5 * math.erfc(-v / math.sqrt(2)) if not math.isnan(v) else v for v in x.reshape(-1)]).reshape(x.shape)


def _celu(x: Array, alpha: float) -> Array:
    return np.asarray(np.maximum(0, x) + np.minimum(0, alpha * np.expm1(x / alpha)))


def _is_inf(x: Array, detect_negative: int, detect_positive: int) -> Array:
    return np.asarray(((x == np.inf) & bool(detect_positive)) | ((x == -np.inf) & bool(detect_negative)))


UNARY: dict[str, Formula] = {
    "Abs": np.abs, "Acos": np.arccos, "Acosh": np.arccosh, "Asin": np.arcsin, "Asinh": np.arcsinh, "Atan": np.arctan,
    "Atanh": np.arctanh, "Ceil": np.ceil, "Cos": np.cos, "Cosh": np.cosh, "Exp": np.exp, "Floor": np.floor, "Log": np.log,
    "Neg": np.negative, "Not": np.logical_not, "Round": np.rint, "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh,
    "Sqrt": np.sqrt, "Tan": np.tan, "Tanh": np.tanh, "BitwiseNot": np.invert, "IsNaN": np.isnan, "Identity": lambda x: x,
    "Reciprocal": lambda x: np.divide(1.0, x), "Sigmoid": _sigmoid, "Softplus": _log1p_exp,
    "Softsign": lambda x: x / (1 + np.abs(x)), "Relu": lambda x: np.maximum(x, 0),
    "Elu": lambda x, alpha: _where(x, alpha * np.expm1(x), x), "Celu": _celu,
    "Selu": lambda x, alpha, gamma: np.where(x > 0, gamma * x, gamma * alpha * np.expm1(x)),
    "LeakyRelu": lambda x, alpha: _where(x, alpha * x, x),
    "ThresholdedRelu": lambda x, alpha: np.where(x > alpha, x, 0),
    "HardSigmoid": lambda x, alpha, beta: np.maximum(0, np.minimum(1, alpha * x + beta)),
    "HardSwish": lambda x: x * np.maximum(0, np.minimum(1, x / 6 + 0.5)),
    "Swish": lambda x, alpha: x * _sigmoid(alpha * x),
    "IsInf": _is_inf,
    "NonZero": lambda x: np.array(np.nonzero(np.atleast_1d(x)))[: x.ndim] if x.ndim else np.zeros((0, int(bool(x))), np.int64),
    "Shape": lambda x, start=0, end=None: np.array(x.shape, np.int64)[start:end],
    "Size": lambda x: np.array(x.size, np.int64),
}  # fmt: skip


def _div(a: Array, b: Array) -> Array:
    """Divide; integers truncate towards zero and wrap."""
    if a.dtype.kind not in "iu":
        return np.asarray(a / b)
    low = np.iinfo(a.dtype).min
    over = (a == low) & (b == -1) if low else np.zeros(np.broadcast_shapes(a.shape, b.shape), bool)
    safe = np.where(over, 1, b).astype(a.dtype)
    quotient = a // safe
    return np.where(over, low, quotient + ((quotient < 0) & (quotient * safe != a)) if low else quotient).astype(a.dtype)


def _floor_mod(rest: Array, b: Array) -> Array:
    return np.asarray(np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest))


def _mod(a: Array, b: Array, fmod: int = 0) -> Array:
    if a.dtype.kind not in "iu":
        return np.asarray(np.fmod(a, b) if fmod else _floor_mod(np.fmod(a, b), b))
    low = np.iinfo(a.dtype).min
    safe = np.where(b == -1, 1, b).astype(a.dtype) if low else b  # x mod -1 is 0
    return np.asarray(np.fmod(a, safe) if fmod else np.mod(a, safe))


def _shift(a: Array, b: Array, direction: str) -> Array:
    bits = 8 * a.dtype.itemsize
    whole = np.asarray([_shift_one(int(x), int(n), bits, direction) for x, n in np.broadcast(a, b)], object)
    return np.asarray([int(v) % 2**bits for v in whole], np.uint64).astype(a.dtype).reshape(np.broadcast_shapes(a.shape, b.shape))


def _shift_one(x: int, n: int, bits: int, direction: str) -> int:
    if not 0 <= n < bits:
        return -1 if direction == "RIGHT" and x < 0 else 0
    return x << n if direction == "LEFT" else x >> n


BINARY: dict[str, Formula] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": _div, "And": np.logical_and, "Or": np.logical_or,
    "Xor": np.logical_xor, "Equal": np.equal, "Greater": np.greater, "Less": np.less, "GreaterOrEqual": np.greater_equal,
    "LessOrEqual": np.less_equal, "BitwiseAnd": np.bitwise_and, "BitwiseOr": np.bitwise_or, "BitwiseXor": np.bitwise_xor,
    "Mod": _mod, "BitShift": _shift, "StringConcat": lambda a, b: a + b,
}  # fmt: skip


def _legacy(a: Array, b: Array, broadcast: int, axis: int | None) -> Array:
    """Reshape B as opsets 1 to 6 align it with A: at `axis`, or at the end."""
    if not broadcast or b.size == 1:
        return b.reshape(()) if b.size == 1 and broadcast else b
    start = a.ndim - b.ndim if axis is None else axis % a.ndim
    return b.reshape(b.shape + (1,) * (a.ndim - start - b.ndim))


def _axes(x: Array, axes: Any, noop: int) -> tuple[int, ...] | None:
    """Return the axes to reduce; None for no reduction."""
    chosen = [] if axes is None else [int(a) for a in np.reshape(axes, -1)]
    if not chosen:
        return None if noop else tuple(range(x.ndim))
    return tuple(a % x.ndim for a in chosen)


def _reduce(how: Callable[[Array, tuple[int, ...]], Any]) -> Formula:
    def formula(x: Array, axes_in: Any = None, *, axes: Any = None, keepdims: int = 1, noop_with_empty_axes: int = 0) -> Any:
        chosen = _axes(x, axes if axes_in is None else axes_in, noop_with_empty_axes)
        if chosen is None:
            chosen = ()
        if any(x.shape[a] == 0 for a in chosen):
            raise NotImplementedError("reductions of empty sets have special rules")
        y = np.asarray(how(x, chosen)) if x.ndim else np.asarray(how(x.reshape(1), (0,)))
        return y.reshape([1 if i in chosen else n for i, n in enumerate(x.shape)]) if keepdims else y

    return formula


def _wide(x: Array) -> Array:
    """Convert integers to Python's, which have no bounds."""
    return x.astype(object) if x.dtype.kind in "iu" else x


REDUCE: dict[str, Formula] = {
    "ReduceSum": _reduce(lambda x, a: _wide(x).sum(axis=a)), "ReduceMax": _reduce(lambda x, a: x.max(axis=a)),
    "ReduceMin": _reduce(lambda x, a: x.min(axis=a)), "ReduceL1": _reduce(lambda x, a: np.abs(_wide(x)).sum(axis=a)),
    "ReduceSumSquare": _reduce(lambda x, a: np.square(_wide(x)).sum(axis=a)),
    "ReduceProd": _reduce(lambda x, a: _wide(x).prod(axis=a)),
}  # fmt: skip


def _softmax(x: Array, axis: int, log: bool, old: bool) -> Array:
    shape = x.shape
    if old:
        axis %= x.ndim
        x, axis = x.reshape(int(np.prod(shape[:axis])), -1), 1
    top = x.max(axis, keepdims=True)
    total = np.exp(x - top).sum(axis, keepdims=True)
    return np.asarray(x - top - np.log(total) if log else np.exp(x - top) / total).reshape(shape)


def _clip(x: Array, low: Any = None, high: Any = None) -> Array:
    low = -np.inf if low is None and x.dtype.kind == "f" else low
    y = x if low is None else np.maximum(x, low)
    return y if high is None else np.asarray(np.minimum(y, high))


def _argument(x: Array, axis: int, keepdims: int, last: int, sign: int) -> Array:
    if np.asarray(x).dtype.kind == "f" and np.isnan(x).any():
        raise NotImplementedError("ONNX does not order NaN")
    best = x.max(axis, keepdims=True) if sign > 0 else x.min(axis, keepdims=True)
    hits = x == best
    n = x.shape[axis]
    y = n - 1 - np.flip(hits, axis).argmax(axis) if last else hits.argmax(axis)
    return np.asarray(np.expand_dims(y, axis) if keepdims else y, np.int64)


def _gelu(x: Array, approximate: str) -> Any:
    if approximate == "none":
        return x * _gauss(x)
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


_VARIADIC: dict[str, Callable[[list[Array]], Any]] = {
    "Max": lambda x: reduce(np.maximum, x), "Min": lambda x: reduce(np.minimum, x),
    "Sum": lambda x: sum(x[1:], x[0]), "Mean": lambda x: sum(x[1:], x[0]) / len(x),
}  # fmt: skip


def value(case: NodeCase) -> list[Any]:
    """Return the outputs by formula; raises NotImplementedError if there is none."""
    from .definitions import FORMULAS

    if case.operator in FORMULAS and case.domain in ("", "ai.onnx.preview.training"):
        attributes = attributes_of(case)
        attributes.pop("consumed_inputs", None)
        raw = case.operator in ("Cast", "CastLike", "BitCast", "QuantizeLinear", "DequantizeLinear", "QLinearMatMul")
        given = [case.inputs[n] if n else None for n in case.node.input]
        with np.errstate(all="ignore"):
            return FORMULAS[case.operator](case, given if raw else [_widen(v, case.operator) for v in given], attributes)
    if case.domain:
        raise NotImplementedError
    x: list[Any] = [None if not n else _widen(case.inputs[n]) for n in case.node.input]
    attributes = attributes_of(case)
    attributes.pop("consumed_inputs", None)
    with np.errstate(all="ignore"):
        return [_plain(case, x, attributes)]


def _plain(case: NodeCase, x: list[Any], attributes: dict[str, Any]) -> Any:
    """Return the output of an operator that depends on values alone."""
    name = case.operator
    if name in UNARY and not (name in ("Neg", "Sign") and x[0].dtype.kind == "u"):
        return UNARY[name](*x, **attributes)
    if name == "Erf" and x[0].dtype.kind == "f":
        return np.asarray(_erf(x[0]), np.float64)
    if name == "Gelu":
        return _gelu(x[0], attributes["approximate"])
    if name in BINARY:
        a, b = x
        b = _legacy(a, b, attributes.pop("broadcast", 0), attributes.pop("axis", None))
        return BINARY[name](a, b, **attributes)
    if name in REDUCE:
        return REDUCE[name](*x, **attributes)
    if name in ("Softmax", "LogSoftmax") and x[0].size:
        return _softmax(x[0], attributes["axis"], name == "LogSoftmax", case.version < 13)
    if name == "Clip":
        bounds = [attributes.get("min"), attributes.get("max")] if case.schema.attributes else [*x[1:], None, None][:2]
        return _clip(x[0], *bounds)
    if name in ("ArgMax", "ArgMin"):
        sign = 1 if name == "ArgMax" else -1
        return _argument(x[0], attributes["axis"], attributes["keepdims"], attributes.get("select_last_index", 0), sign)
    if name in _VARIADIC:
        return _VARIADIC[name](x)
    if name == "Where":
        return np.where(x[0], x[1], x[2])
    if name == "MatMul" and 0 not in x[0].shape[-1:]:
        return _wide(x[0]) @ _wide(x[1])
    raise NotImplementedError


_ALGEBRA = {"PRelu", "Gemm", "BatchNormalization", "LRN", "GlobalLpPool", "Adagrad", "Adam", "Momentum"}


def _widen(v: Any, operator: str | None = None) -> Any:
    """Convert floats to float64, except for operators that only move them."""
    if isinstance(v, list) and operator is None:
        raise NotImplementedError
    if v is None or isinstance(v, list) or (operator is not None and operator not in _ALGEBRA):
        return v
    return v.astype(np.float64) if v.dtype in dtypes.NARROW_FLOATS or v.dtype == np.float32 else v


def attributes_of(case: NodeCase) -> dict[str, Any]:
    """Return the node's attributes and the schema's defaults by name; an attribute with neither is missing."""
    out: dict[str, Any] = {}
    for name, attribute in case.schema.attributes.items():
        if attribute.default_value.name:
            out[name] = helper.get_attribute_value(attribute.default_value)
    out |= {a.name: helper.get_attribute_value(a) for a in case.node.attribute}
    return {n: v.decode() if isinstance(v, bytes) else v for n, v in out.items()}


# --- random operators: properties of all possible results ---------------------------------------------------------------


def property_of(case: NodeCase, outputs: list[Any]) -> str | None:
    """Return what is wrong with a random operator's outputs, "" if nothing is; None for all other operators."""
    if case.operator not in (
        "RandomUniform",
        "RandomUniformLike",
        "RandomNormal",
        "RandomNormalLike",
        "Bernoulli",
        "Multinomial",
    ):
        return None
    y = np.asarray(outputs[0]).astype(np.float64)
    attributes = attributes_of(case)
    if case.operator.startswith("RandomUniform"):
        low, high = attributes["low"], attributes["high"]
        return "" if ((y >= low - 0.02 * abs(low)) & (y <= high + 0.02 * abs(high))).all() else f"values outside [{low}, {high}]"
    if case.operator.startswith("RandomNormal"):
        far = np.abs(y - attributes["mean"]) > 8 * attributes["scale"]
        return "a value beyond eight standard deviations" if far.any() or not np.isfinite(y).all() else ""
    x = case.inputs[case.node.input[0]]
    if case.operator == "Bernoulli":
        p = x.astype(np.float64)
        good = ((y == 0) | (y == 1)).all() and not y[p == 0].any() and y[p == 1].all()
        return "" if good else "values other than 0 and 1, or a result of probability 0"
    classes = x.shape[1]
    return "" if ((y >= 0) & (y < classes)).all() and (y == np.floor(y)).all() else f"classes outside [0, {classes})"
