"""Recipes of operators that reduce, accumulate, normalize, quantize, transform and generate numbers."""

from __future__ import annotations

import numpy as np

from ....dtypes import FLOAT8, is_float, onnx_code
from ..strategies import EMPTY, Draw, Skip, bounds
from .registry import recipe


@recipe("ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum ReduceSumSquare")
def reduction(d: Draw) -> None:
    name = d.schema.name
    shape = d.shape(0, 5, empty=0 if name == "ReduceMean" else EMPTY)  # the mean of no elements is undefined
    kind = "any" if name in ("ReduceMax", "ReduceMin") else "positive" if name == "ReduceLogSum" else d.pick(["small", "tame"])
    d.put(d.array(0, shape, kind))
    axes = d.axes(len(shape)) if shape and d.chance(0.8) else None
    if d.has("axes"):
        if axes:
            d.attributes["axes"] = axes
    else:
        if d.chance(0.15):
            axes = []
        if axes is not None:
            d.put(d.ints(axes))
        d.attr("noop_with_empty_axes", [0, 1], 0)
    d.attr("keepdims", [0, 1], 1)


@recipe("CumSum CumProd")
def cumulative(d: Draw) -> None:
    shape = d.shape(1)
    product = d.schema.name == "CumProd"
    d.put(d.array(0, shape, "around" if product else "small"), np.array(d.axis(len(shape))).astype(d.dtype(1)))
    d.attr("exclusive", [0, 1], 0)
    d.attr("reverse", [0, 1], 0)


@recipe("Softmax LogSoftmax Hardmax")
def softmax(d: Draw) -> None:
    shape = d.shape(1 if d.v < 13 else 0, 5)
    d.put(d.array(0, shape, d.pick(["small", "tame", "half"])))
    if not shape:
        raise Skip
    old = 1 if len(shape) > 1 else None
    axis = d.axis(len(shape))
    if d.v < 13 and old is None:
        d.attributes["axis"] = 0
    else:
        d.attr("axis", [axis], old if d.v < 13 else -1)


@recipe("LpNormalization")
def lp_normalization(d: Draw) -> None:
    shape = d.shape(1)
    d.put(d.array(0, shape, "small"))
    d.attr("axis", [d.axis(len(shape), 1)], -1)
    d.attr("p", [1, 2], 2)


@recipe("MeanVarianceNormalization")
def mean_variance(d: Draw) -> None:
    shape = d.shape(4, 4, empty=0)
    d.put(d.array(0, shape, "tame"))
    d.attr("axes", lambda: d.axes(4, negative_from=99), None)


# --- quantization -----------------------------------------------------------------------------------------------------


def drawn_scale(d: Draw, which: str | int, shape: tuple[int, ...]) -> np.ndarray:
    """Draw scales of this shape."""
    dtype = d.dtype(which)
    if dtype.kind in "iu":
        return np.asarray(d.rng.integers(1, 4, shape)).astype(dtype)
    return np.asarray(np.exp2(d.rng.integers(-3, 2, shape)) if d.chance() else d.rng.uniform(0.05, 0.5, shape)).astype(dtype)


def _grain(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw the shapes of the values and of their scales: one scale, one per channel, or one per block."""
    shape = d.shape(1, empty=0.03)
    rank = len(shape)
    ways = ["one"] + (["axis"] if d.v >= 13 else []) + (["block"] if d.v >= 21 else [])
    way = d.pick(ways)
    if way == "one":
        return shape, ()
    axis = d.attr("axis", [d.axis(rank)], 1 if rank > 1 else None)
    if axis is None:
        axis = d.attributes["axis"] = 0
    axis %= rank
    if way == "axis":
        return shape, (shape[axis],)
    block = d.whole(1, 3)
    d.attributes["block_size"] = block
    blocks = max(1, d.whole(1, 2))
    whole = tuple(blocks * block if i == axis else n for i, n in enumerate(shape))
    return whole, tuple(blocks if i == axis else n for i, n in enumerate(shape))


@recipe("QuantizeLinear")
def quantize(d: Draw) -> None:
    target = d.dtype(2)
    shape, grain = _grain(d)
    x, zero = d.array(0, shape, "tame"), drawn_zero(d, target, grain)
    absent = d.chance(0.3) and (target == np.uint8 or d.has("output_dtype"))
    if absent and target != np.uint8:
        d.attributes["output_dtype"] = onnx_code(target)
    d.put(x, drawn_scale(d, 1, grain))
    if not absent:
        d.put(zero)
    if target in FLOAT8:
        d.attr("saturate", [0, 1], 1)


def drawn_zero(d: Draw, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """Draw zero points of this shape; 0 for floats and int32."""
    if is_float(dtype) or dtype in (np.int32,):
        return np.zeros(shape, dtype)
    low, high = bounds(dtype)
    return np.asarray(d.rng.integers(max(low, -20), min(high, 20), shape, endpoint=True)).astype(dtype)


@recipe("DequantizeLinear")
def dequantize(d: Draw) -> None:
    shape, grain = _grain(d)
    x = d.array(0, shape, "tame" if is_float(d.dtype(0)) else "any")
    if x.dtype == np.int32:
        x = np.clip(x, -(2**20), 2**20)
    d.put(x, drawn_scale(d, 1, grain if d.v >= 13 else ()))
    if d.chance(0.7):
        d.put(drawn_zero(d, d.dtype(0), grain if d.v >= 13 else ()))
    if d.v >= 23:
        out = d.dtype("T3")
        if out != d.dtype(1):
            d.attributes["output_dtype"] = onnx_code(out)


@recipe("DynamicQuantizeLinear")
def dynamic_quantize(d: Draw) -> None:
    d.put(d.array(0, d.shape(empty=0), "tame"))
    d.outputs = ["y", "scale", "zero"]


# --- signals ----------------------------------------------------------------------------------------------------------


@recipe("DFT")
def dft(d: Draw) -> None:
    rank = d.whole(2, 4)
    inverse = d.attr("inverse", [0, 1], 0)
    onesided = 0 if inverse else d.attr("onesided", [0, 1], 0)
    if inverse:
        d.attributes["inverse"] = 1
    shape = [d.whole(1, 6) for _ in range(rank)] + [1 if onesided else d.pick([1, 2])]
    if inverse and shape[-1] == 1 and d.chance(0.7):
        shape[-1] = 2
    d.put(d.array(0, shape, "tame"))
    axis = d.whole(0 if rank == 1 else 1, rank - 1)
    if d.chance(0.3):
        axis -= rank + 1
    if d.chance(0.5):
        d.put(np.array(d.whole(1, 8)).astype(d.dtype(1)))
    elif d.v >= 20:
        d.put(None)
    if d.v < 20:
        d.attr("axis", [axis], 1)
    elif d.chance(0.7):
        d.put(np.array(axis))


@recipe("STFT")
def stft(d: Draw) -> None:
    frame, step = d.whole(2, 6), d.whole(1, 4)
    length = frame + d.whole(0, 8)
    onesided = d.attr("onesided", [0, 1], 1)
    d.put(d.array(0, (d.whole(1, 2), length, 1 if onesided or d.chance() else 2), "tame"), np.array(step).astype(d.dtype(1)))
    windowed = d.chance(0.6)
    d.put(d.array(0, (frame,), "tame") if windowed else None)
    if not windowed or d.chance():
        d.put(np.array(frame).astype(d.dtype(1)))


@recipe("HannWindow HammingWindow BlackmanWindow")
def window(d: Draw) -> None:
    d.put(np.array(d.whole(1, 12)).astype(d.dtype(0)))
    d.attr("periodic", [0, 1], 1)
    if d.dtype("T2") != np.float32 or d.chance():
        d.attributes["output_datatype"] = onnx_code(d.dtype("T2"))


@recipe("MelWeightMatrix")
def mel(d: Draw) -> None:
    whole, real = d.dtype(0), d.dtype(3)
    if real.itemsize < 4 or (d.dtype("T3").kind != "f" and d.dtype("T3").name != "bfloat16"):
        raise Skip
    bins, length, rate = d.whole(1, 8), d.pick([8, 16, 32]), d.pick([64, 100, 8000])
    d.put(*(np.array(v).astype(whole) for v in (bins, length, rate)))
    d.put(np.array(d.real(0, rate / 8)).astype(real), np.array(d.real(rate / 4, rate / 2)).astype(real))
    if d.dtype("T3") != np.float32 or d.chance():
        d.attributes["output_datatype"] = onnx_code(d.dtype("T3"))


# --- generators -------------------------------------------------------------------------------------------------------


@recipe("Range")
def range_(d: Draw) -> None:
    dtype = d.dtype(0)
    if is_float(dtype):
        values = [d.whole(-20, 20) / 4, d.whole(-20, 20) / 4, d.pick([0.25, 0.5, 1.5, -0.5, -1.0])]
    else:
        values = [d.whole(-9, 9), d.whole(-9, 9), d.pick([1, 2, 3, -1, -2])]
    d.put(*(np.array(v).astype(dtype) for v in values))
    if is_float(dtype) and dtype.itemsize < 4:
        d.attr("stash_type", [1], 1)


@recipe("RandomNormal RandomUniform")
def random_shape(d: Draw) -> None:
    d.attributes["shape"] = list(d.shape(1, 3))
    _random(d, "T")


@recipe("RandomNormalLike RandomUniformLike Bernoulli Multinomial")
def random_like(d: Draw) -> None:
    if d.schema.name == "Multinomial":
        d.put(d.array(0, (d.whole(1, 3), d.whole(1, 5)), "around"))
        d.attr("sample_size", lambda: d.whole(1, 5), 1)
    else:
        d.put(d.array(0, d.shape(), "unit"))
    _random(d, "T2")


def _random(d: Draw, out: str) -> None:
    for name in ("mean", "low"):
        d.attr(name, lambda: d.real(-1, 0.5), None)
    for name in ("scale", "high"):
        d.attr(name, lambda: d.real(1, 2), None)
    d.attr("seed", lambda: float(d.whole(0, 99)), None)
    default = d.inputs[0].dtype if d.inputs and d.schema.name != "Multinomial" else np.int32 if d.inputs else np.float32
    if d.dtype(out) != default or d.chance():
        d.attributes["dtype"] = onnx_code(d.dtype(out))
