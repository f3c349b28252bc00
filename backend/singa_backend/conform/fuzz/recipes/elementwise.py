"""Recipes of elementwise operators, with and without broadcasting."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..strategies import Draw, Skip
from .registry import recipe


def consumed(d: Draw, n: int) -> None:
    """Draw the legacy hint of opset 1, which has no effect."""
    d.attr("consumed_inputs", lambda: [0] * n, None)


def reals(d: Draw, *names: str) -> None:
    for name in names:
        d.attr(name, d.real, None)


@recipe(
    "Abs Ceil Celu Cos Cosh Elu Erf Exp Floor HardSigmoid HardSwish IsNaN LeakyRelu Mish Neg Not Reciprocal Relu Round Selu "
    "Sigmoid Sign Sin Sinh Softplus Softsign Swish Tan Tanh ThresholdedRelu BitwiseNot Gelu Asinh Atan"
)
def unary(d: Draw) -> None:
    d.put(d.array(0, d.shape(0, 6)))
    if d.schema.name in ("Celu", "Elu"):
        d.attr("alpha", lambda: d.real(0.1, 2), None)
    else:
        reals(d, "alpha", "beta", "gamma")
    d.attr("approximate", ["none", "tanh"], None)
    consumed(d, 1)


@recipe("Acos Asin Atanh")
def inverse(d: Draw) -> None:
    d.put(d.array(0, d.shape(), d.pick(["around", "any"])))


@recipe("Acosh Log Sqrt")
def of_positive(d: Draw) -> None:
    d.put(d.array(0, d.shape(), d.pick(["positive", "any"])))
    consumed(d, 1)


@recipe("IsInf")
def is_inf(d: Draw) -> None:
    d.put(d.array(0, d.shape()))
    d.attr("detect_negative", [0, 1], 1)
    d.attr("detect_positive", [0, 1], 1)


@recipe("Shrink")
def shrink(d: Draw) -> None:
    d.put(d.array(0, d.shape()))
    d.attr("bias", lambda: float(d.pick([0, 1, 2, 0.5, -1.25])), None)
    d.attr("lambd", lambda: float(d.pick([0, 0.5, 1, 3])), None)


# --- two inputs -------------------------------------------------------------------------------------------------------


def operands(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two shapes: by NumPy's rules at opset 7 or later, before that by `broadcast` and `axis`."""
    if not d.has("broadcast"):
        return d.pair()
    a = d.shape()
    if d.chance(0.4) or 0 in a:
        return a, a
    d.attributes["broadcast"] = 1
    if not a or d.chance(0.3):
        return a, d.pick([(1,), ()]) if a else ()
    start = d.whole(0, len(a) - 1)
    end = len(a) if d.chance(0.5) else d.whole(start + 1, len(a))
    if end < len(a) or d.chance(0.3):
        d.attributes["axis"] = start
    return a, a[start:end]


@recipe("Add Sub Mul And Or Xor Equal Greater GreaterOrEqual Less LessOrEqual BitwiseAnd BitwiseOr BitwiseXor StringConcat")
def binary(d: Draw) -> None:
    a, b = operands(d)
    d.put(d.array(0, a), d.array(1, b))
    if d.schema.name in ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual") and a == b and d.chance():
        x, y = d.inputs
        d.inputs[1] = np.where(np.asarray(d.rng.random(a) < 0.5), x, y)
    consumed(d, 2)


@recipe("Div")
def div(d: Draw) -> None:
    a, b = operands(d)
    x, y = d.array(0, a), d.array(1, b)
    if y.dtype.kind in "iu":
        y = np.where(y == 0, y.dtype.type(3), y)
    d.put(x, y)
    consumed(d, 2)


@recipe("Mod")
def mod(d: Draw) -> None:
    a, b = d.pair()
    x = d.array(0, a)
    if x.dtype.kind in "iu":
        y = d.array(1, b)
        d.put(x, np.where(y == 0, y.dtype.type(3), y))
        d.attr("fmod", [0, 1], 0)
        return
    d.put(x, d.array(1, b, "nonzero"))
    if d.v < 28 or d.chance():
        d.attributes["fmod"] = 1


@recipe("Pow")
def power(d: Draw) -> None:
    a, b = operands(d)
    integral = d.dtype(0).kind in "iu"
    x = d.array(0, a, "tame" if integral else "small")
    if integral or d.dtype(1).kind in "iu":
        y = d.array(1, b, "unit" if integral else "tame")
        y = np.asarray(np.clip(y.astype(np.float64), -3, 3)).astype(y.dtype)
    else:
        y = d.array(1, b, d.pick(["small", "tame", "half"]))
    if integral:  # other exponents have no defined result
        y = np.abs(np.rint(y.astype(np.float64))).astype(y.dtype)
    d.put(x, y)


@recipe("BitShift")
def bit_shift(d: Draw) -> None:
    a, b = d.pair()
    bits = 8 * d.dtype(0).itemsize
    amount = np.asarray(d.rng.integers(-3 if d.v >= 28 and d.dtype(0).kind == "i" else 0, bits + (3 if d.v >= 28 else 0), b))
    d.put(d.array(0, a), amount.astype(d.dtype(0)))
    d.attr("direction", ["LEFT", "RIGHT"])


@recipe("PRelu")
def prelu(d: Draw) -> None:
    x = d.shape(1 if d.v < 7 else 0)
    slope = d.broadcast(x)
    if d.v < 7:
        slope = d.pick([(1,), (x[1],)]) if len(x) > 1 else (1,)
    d.put(d.array(0, x), d.array(1, slope))
    consumed(d, 2)


@recipe("SwiGLU")
def swiglu(d: Draw) -> None:
    shape = d.shape()
    d.put(d.array(0, shape, "small"), d.array(1, shape, "small"))
    reals(d, "alpha")


@recipe("Max Min Mean Sum")
def variadic(d: Draw) -> None:
    shape = d.shape()
    kind = "any" if d.schema.name in ("Max", "Min") else "small"
    for i in range(d.whole(1, 4)):
        d.put(d.array(0, shape if d.v < 8 else d.broadcast(shape) if i else shape, kind))
    consumed(d, len(d.inputs))


@recipe("Where")
def where(d: Draw) -> None:
    shape = d.shape()
    d.put(d.array(0, d.broadcast(shape)), d.array(1, shape), d.array(2, d.broadcast(shape)))


@recipe("Clip")
def clip(d: Draw) -> None:
    x = d.array(0, d.shape())
    d.put(x)
    if d.has("min"):
        d.attr("min", lambda: d.real(-3, 0), None)
        d.attr("max", lambda: d.real(0, 3), None)
    else:
        for _ in range(2):
            d.put(d.array(0, (), "tame") if d.chance(0.7) else None)
    consumed(d, 1)


@recipe("Dropout")
def dropout(d: Draw) -> None:
    """Draw only deterministic forms: inference, or a ratio of 0."""
    d.put(d.array(0, d.shape()))
    if d.chance():
        d.outputs.append("mask")
    if d.has("is_test"):
        d.attributes["is_test"] = 1
        d.attr("ratio", lambda: d.real(0, 0.9), 0.5)
        consumed(d, 1)
        if d.dtype(0).kind != "f":
            raise Skip
    elif d.v < 12:
        d.attr("ratio", lambda: d.real(0, 0.9), 0.5)
    else:
        d.attr("seed", lambda: d.whole(0, 99), None)
        training = d.chance(0.3)
        ratio = 0.0 if training else d.real(0, 0.9)
        if training or d.chance():
            d.put(np.asarray(ratio).astype(d.dtype(1)))
            if training or d.chance():
                d.put(np.array(training))


@recipe("Cast CastLike")
def cast(d: Draw) -> None:
    """Draw values that the target can represent: a cast that overflows an integer is undefined."""
    from ....dtypes import FLOAT8, STRING, is_float, onnx_code

    source, target = d.dtype(0), d.dtype("T2")
    shape = d.shape()
    kind = "any" if is_float(target) or target in (np.bool_, source) else "small"
    if target == STRING:
        kind = "half"
    x: Any = d.array(0, shape, kind)
    if source == STRING:
        if target.kind == "b":
            raise Skip
        x = d.array(np.int64, shape, "tame" if target.name[0] not in "u" else "unit")
        if target.itemsize == 1:
            x = x % 2 if target.name.endswith("int2") else np.clip(x, -8, 7)
        elif target.name == "float8_e8m0fnu":
            x = np.abs(x) + 1
        whole = not is_float(target)
        spoken = [str(v) if whole or d.chance() else d.pick([f"{v}.5", f"{v}e-1", "NaN", "INF", "-INF"]) for v in x.reshape(-1)]
        x = np.array(spoken, object).reshape(shape)
    elif not is_float(target) and target not in (np.bool_, STRING) and is_float(source):
        limit = 3 if target.itemsize == 1 and target.name.endswith(("4", "2")) else 100
        wide = np.nan_to_num(x.astype(np.float64), nan=0, posinf=1, neginf=0)
        low = 0 if target.kind == "u" or target.name[0] == "u" else -1 if target.name == "int2" else -limit
        x = np.clip(wide, low, 1 if target.name == "int2" else limit).astype(source)
    elif target.name == "float8_e8m0fnu" and source != np.bool_:  # no negative numbers, no zero
        x = np.maximum(np.abs(x.astype(np.float64)), 1).astype(source)
    d.put(x)
    if d.schema.name == "Cast":
        spelt = {"float64": "DOUBLE", "float32": "FLOAT", "object": "STRING"}
        d.attributes["to"] = onnx_code(target) if d.v > 1 else spelt.get(target.name, target.name.upper())
    else:
        d.put(d.array("T2", d.shape(0, 2), "tame"))
    if target in FLOAT8:
        d.attr("saturate", [0, 1], 1)
    if target.name == "float8_e8m0fnu":
        d.attr("round_mode", ["up", "down", "nearest"], "up")


@recipe("BitCast")
def bit_cast(d: Draw) -> None:
    from ....dtypes import FLOAT4, FLOAT6, STRING, SUB_BYTE_INTS, onnx_code

    source, target = d.dtype("T1"), d.dtype("T2")
    narrow = SUB_BYTE_INTS | FLOAT4 | FLOAT6
    if STRING in (source, target) or source.itemsize != target.itemsize or ({source, target} & narrow and source != target):
        raise Skip
    d.put(d.array(0, d.shape()))
    d.attributes["to"] = onnx_code(target)
