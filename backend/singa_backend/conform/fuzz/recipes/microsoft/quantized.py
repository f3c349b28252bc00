"""Recipes of operators on quantized tensors."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import MICROSOFT
from ...strategies import Draw, Skip, bounds
from ..numbers import drawn_scale, drawn_zero
from ..registry import recipe
from ..windows import Window
from .few_bits import FLOAT, common


def values(d: Draw, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Draw codes of the whole range, or small ones."""
    low, high = bounds(dtype)
    wide = d.chance(0.7)
    return np.asarray(d.rng.integers(low if wide else max(low, -9), high if wide else 9, shape, endpoint=True)).astype(dtype)


def scale(d: Draw, *shape: int) -> np.ndarray:
    """Draw scales."""
    return np.asarray(d.rng.uniform(0.004, 0.1, shape)).astype(np.float32)


def zero(d: Draw, dtype: np.dtype, *shape: int, optional: bool = False) -> np.ndarray | None:
    """Draw a zero point; None if it is optional and drawn to be absent."""
    if optional and d.chance(0.06):
        return None
    low, high = bounds(dtype)
    return np.asarray(d.rng.integers(low, high, shape, endpoint=True)).astype(dtype)


def triple(d: Draw, dtype: np.dtype, shape: tuple[int, ...], optional: bool = True) -> None:
    """Append a tensor, its scale and its zero point."""
    d.put(values(d, dtype, shape), scale(d), zero(d, dtype, optional=optional))


def result(d: Draw, dtype: np.dtype, optional: bool = True) -> None:
    """Append the scale and the zero point of the result."""
    d.put(scale(d), zero(d, dtype, optional=optional and d.chance(0.4)))


@recipe("QuantizeLinear DequantizeLinear", MICROSOFT)
def quantize(d: Draw) -> None:
    into = d.schema.name == "QuantizeLinear"
    shape = d.shape(1, empty=0.03)
    each = d.chance()
    axis = d.axis(len(shape), 1) if each else 1
    if each or d.chance(0.2):
        d.attributes["axis"] = axis if each or len(shape) > 1 else 0
    count = (shape[axis],) if each else ()
    target = d.dtype(2 if into else 0)
    x = d.array(0, shape, "tame") if into else values(d, target, shape)
    d.put(x, drawn_scale(d, 1, count))
    if (into and target != np.uint8) or d.chance(0.7):
        d.put(drawn_zero(d, target, count))


@recipe("QLinearAdd QLinearMul", MICROSOFT)
def binary(d: Draw) -> None:
    a, b = d.pair()
    for shape in (a, b):
        triple(d, d.dtype("T"), shape)
    result(d, d.dtype("T"))


@recipe("QLinearSigmoid QLinearLeakyRelu", MICROSOFT)
def unary(d: Draw) -> None:
    triple(d, d.dtype("T"), d.shape())
    result(d, d.dtype("T"))
    d.attr("alpha", lambda: d.real(0, 0.5), 0.01)


@recipe("QLinearWhere", MICROSOFT)
def where(d: Draw) -> None:
    a, b = d.pair()
    d.put(d.array("B", d.broadcast(a)))
    for shape in (a, b):
        triple(d, d.dtype("T"), shape, optional=False)
    result(d, d.dtype("T"), optional=False)


@recipe("MulInteger", MICROSOFT)
def mul_integer(d: Draw) -> None:
    dtype = d.dtype("T")
    for shape in d.pair():
        d.put(values(d, dtype, shape), zero(d, dtype, optional=True))


@recipe("QLinearConcat", MICROSOFT)
def concat(d: Draw) -> None:
    dtype = d.dtype("T8")
    shape = list(d.shape(1))
    axis = d.attr("axis", [d.axis(len(shape), 1)])
    result(d, dtype, optional=False)
    for _ in range(d.whole(1, 3)):
        shape[axis] = d.whole(0 if d.chance(0.1) else 1, 4)
        triple(d, dtype, tuple(shape), optional=False)
        if d.chance(0.2):
            d.inputs[-2:] = d.inputs[:2]


@recipe("QLinearSoftmax", MICROSOFT)
def softmax(d: Draw) -> None:
    dtype, shape = d.dtype("T"), d.shape(1)
    triple(d, dtype, shape)
    d.put(np.asarray(d.rng.uniform(0.002, 0.02)).astype(np.float32), zero(d, dtype))
    d.attributes["opset"] = d.pick([11, 13, 17])
    d.attr("axis", [d.axis(len(shape), 1)], -1)


@recipe("QLinearReduceMean ReduceSumInteger", MICROSOFT)
def reduction(d: Draw) -> None:
    shape = d.shape(1, empty=0)
    if d.schema.name == "ReduceSumInteger":
        d.types["T2"] = np.dtype(np.uint32 if d.dtype(0) == np.uint8 else np.int32)
        d.put(values(d, d.dtype(0), shape))
    else:
        triple(d, d.dtype("T"), shape)
        result(d, d.dtype("T"))
    d.attributes.update({"axes": d.axes(len(shape), negative_from=1), "keepdims": d.pick([0, 1])})


@recipe("QLinearGlobalAveragePool", MICROSOFT)
def global_pool(d: Draw) -> None:
    dtype = d.dtype("T")
    triple(d, dtype, (d.whole(1, 3), d.whole(1, 5), *d.shape(1, 3, empty=0)), optional=False)
    result(d, dtype, optional=False)
    d.attr("channels_last", [0, 1], 0)


@recipe("QLinearAveragePool NhwcMaxPool", MICROSOFT)
def pool(d: Draw) -> None:
    name, dtype = d.schema.name, d.dtype("T")
    w = Window(d)
    last = name == "NhwcMaxPool" or d.attr("channels_last", [0, 1], 0)
    batch, channels = d.whole(1, 2), d.whole(1, 4)
    shape = (batch, *w.image, channels) if last else (batch, channels, *w.image)
    if w.auto.startswith("SAME"):  # onnxruntime skips cells if a kernel is smaller than its stride
        d.attributes["strides"] = [min(s, k) for s, k in zip(w.strides, w.kernel, strict=True)]
    if name == "NhwcMaxPool":
        d.put(values(d, dtype, shape))
    else:
        triple(d, dtype, shape)
        result(d, dtype)
    if d.attr("ceil_mode", [0, 1], 0) and w.auto.startswith("SAME"):
        d.attributes["ceil_mode"] = 0
    d.attr("count_include_pad", [0, 1], 0)


# --- products


def operands(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Draw the shapes of two factors, and the number of columns."""
    m, k, n = d.whole(1, 5), d.whole(1, 20), d.whole(1, 6)
    lead = d.shape(0, 2, 3, empty=0)
    return (*lead, m, k), ((*lead, k, n) if d.chance(0.2) else (k, n)), n


@recipe("QGemm", MICROSOFT)
def qgemm(d: Draw) -> None:
    m, k, n = d.whole(1, 5), d.whole(1, 20), d.whole(1, 6)
    ta, tb = d.attr("transA", [0, 1], 0), d.attr("transB", [0, 1], 0)
    d.attr("alpha", lambda: d.real(0.5, 2), 1.0)
    common(d, "TB", d.dtype("TA"))
    common(d, "TY", FLOAT, d.dtype("TA"))
    left, right = d.dtype(0), d.dtype(3)
    each = (n,) if d.chance(0.3) else ()
    d.put(values(d, left, (k, m) if ta else (m, k)), scale(d), zero(d, left))
    d.put(values(d, right, (n, k) if tb else (k, n)), scale(d, *each), zero(d, right, *each))
    c = np.asarray(d.rng.integers(-5000, 5000, d.pick([(n,), (1, n), (m, n), (m, 1)]))).astype(np.int32)
    d.put(c if d.chance(0.6) else None)
    target = d.dtype("TY")
    if target == FLOAT:
        d.put(None, None)
    else:
        d.types["TYZ"] = target
        d.put(np.asarray(d.rng.uniform(0.5, 5)).astype(np.float32), zero(d, target))


@recipe("MatMulIntegerToFloat", MICROSOFT)
def integer_to_float(d: Draw) -> None:
    common(d, "T3", FLOAT)
    a, b, n = operands(d)
    left, right, kind = d.dtype(0), d.dtype(1), d.dtype("T3")
    each = (n,) if len(b) == 2 and d.chance(0.4) else ()
    d.put(values(d, left, a), values(d, right, b), scale(d).astype(kind), scale(d, *each).astype(kind))
    d.put(zero(d, left, optional=True), zero(d, right, *each, optional=True))
    if d.chance():
        d.put(d.array(kind, (n,), "tame"))


@recipe("DynamicQuantizeMatMul", MICROSOFT)
def dynamic_matmul(d: Draw) -> None:
    a, b, n = operands(d)
    each = (n,) if len(b) == 2 and d.chance(0.4) else ()
    d.put(d.array(0, a, "tame"), values(d, d.dtype(1), b), scale(d, *each), zero(d, d.dtype(1), *each, optional=True))
    if d.chance():
        d.put(d.array(0, (n,), "tame"))


@recipe("MatMulInteger16", MICROSOFT)
def integer16(d: Draw) -> None:
    common(d, "T1", np.dtype(np.int16))
    common(d, "T2", np.dtype(np.int16))
    a, b, _ = operands(d)
    d.types["T3"] = np.dtype(np.uint32 if d.dtype(0) == d.dtype(1) == np.uint16 else np.int32)
    d.put(values(d, d.dtype(0), a), values(d, d.dtype(1), b))


@recipe("QLinearConv", MICROSOFT)
def conv(d: Draw) -> None:
    w = Window(d, low=1, high=2, kernel=False)
    group = d.attr("group", [1, 2], 1)
    c, m = group * d.whole(1, 2), group * d.whole(1, 2)
    last, batch = d.attr("channels_last", [0, 1], 0), d.whole(1, 2)
    triple(d, d.dtype(0), (batch, *w.image, c) if last else (batch, c, *w.image), optional=False)
    if d.dtype(0) == np.int8 and d.dtype(3) == np.uint8:
        raise Skip
    each = (m,) if d.chance(0.3) else ()
    point = np.zeros(each, d.dtype(3)) if each else zero(d, d.dtype(3))
    d.put(values(d, d.dtype(3), (m, c // group, *w.kernel)), scale(d, *each), point)
    if d.dtype(7) != d.dtype(0):
        d.types["T3"] = d.dtype(0)
    d.put(np.asarray(d.rng.uniform(0.1, 1)).astype(np.float32), zero(d, d.dtype(7)))
    if d.chance():
        d.put(np.asarray(d.rng.integers(-5000, 5000, m)).astype(np.int32))
