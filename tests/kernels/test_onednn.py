"""The binding of oneDNN: each primitive against NumPy, the search for the library, threads, forks, freed handles, refusals."""

from __future__ import annotations

import copy
import ctypes
import ctypes.util
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy import special
from tests.helpers.at_level import higher

from singa_backend.kernels import onednn as dnn
from singa_backend.kernels.onednn import MemoryDesc, OneDnnError, Primitive, Unimplemented, constants, loading
from singa_backend.kernels.onednn import backward as reverse

needs_library = pytest.mark.skipif(dnn.library() is None, reason=f"oneDNN is not available: {dnn.missing()}")
EXACT_INT8 = dnn.library() is not None and any(t in dnn.library().isa for t in ("vnni", "bf16", "fp16", "amx"))

f32 = np.dtype(np.float32)


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(-1, 1, shape).astype(f32)


def described(array: np.ndarray) -> MemoryDesc:
    return MemoryDesc.of(array.dtype, array.shape, [s // array.itemsize for s in array.strides])


def moved(array: np.ndarray, source: MemoryDesc, target: MemoryDesc) -> np.ndarray:
    """The bytes of a tensor in another layout."""
    out = np.zeros(target.nbytes, np.uint8)
    step = dnn.reorder(source, target, allow_reference=True)
    scratch = np.zeros(step.scratchpad_nbytes, np.uint8)
    arguments = {dnn.args.FROM: (source, array.ctypes.data), dnn.args.TO: (target, out.ctypes.data)}
    if scratch.size:
        arguments[dnn.args.SCRATCHPAD] = (step.query("scratchpad"), scratch.ctypes.data)
    dnn.bind(step, arguments).run()
    return out


def run(primitive: Primitive, inputs: Mapping[int, np.ndarray], outputs: Mapping[int, np.ndarray]) -> list[np.ndarray]:
    """Run a primitive on arrays in the layouts that it chose; return the outputs in C order."""
    arguments, buffers = {}, {}
    for arg, array in {**inputs, **outputs}.items():
        plain = described(array)
        try:
            wanted = primitive.query("argument", arg)
        except OneDnnError:  # scales and zero points
            wanted = plain
        buffers[arg] = array if wanted == plain else moved(array, plain, wanted)
        arguments[arg] = (wanted, buffers[arg].ctypes.data)
    for arg, what in (dnn.args.SCRATCHPAD, "scratchpad"), (dnn.args.WORKSPACE, "workspace"):
        if arg not in arguments and getattr(primitive, f"{what}_nbytes"):
            buffers[arg] = np.zeros(getattr(primitive, f"{what}_nbytes"), np.uint8)
            arguments[arg] = (primitive.query(what), buffers[arg].ctypes.data)
    call = dnn.bind(primitive, arguments)
    assert dnn.library().execute(*call.args) == 0
    results = []
    for arg, array in outputs.items():
        wanted, plain = arguments[arg][0], MemoryDesc.of(array.dtype, array.shape)
        results.append(moved(buffers[arg], wanted, plain).view(array.dtype).reshape(array.shape))
    return results


def compute(primitive: Primitive, inputs: Mapping[int, np.ndarray], *shape: int, dtype: Any = f32) -> np.ndarray:
    return run(primitive, inputs, {dnn.args.DST: np.zeros(shape, dtype)})[0]


def close(actual: np.ndarray, expected: np.ndarray) -> None:
    expected = np.asarray(expected)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


def of(*shape: int, dtype: Any = f32) -> MemoryDesc:
    return MemoryDesc.of(dtype, shape)


def like(*shape: int, dtype: Any = f32) -> MemoryDesc:
    return MemoryDesc.any(dtype, shape)


def channels_last(array: np.ndarray) -> np.ndarray:
    """The same values with the channels innermost in memory."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


def convolved(x: np.ndarray, w: np.ndarray, strides: Any, dilations: Any, begin: Any, end: Any, groups: int = 1) -> np.ndarray:
    """The definition: a sum over the window, in float64 or exact integers."""
    work = np.float64 if x.dtype.kind == "f" else np.int64
    x = np.pad(x.astype(work), [(0, 0), (0, 0), *zip(begin, end, strict=True)])
    n, window = w.shape[0] // groups, w.shape[2:]
    sizes = [(x.shape[2 + i] - (k - 1) * dilations[i] - 1) // strides[i] + 1 for i, k in enumerate(window)]
    y = np.zeros((x.shape[0], w.shape[0], *sizes), work)
    for g in range(groups):
        part = x[:, g * w.shape[1] : (g + 1) * w.shape[1]]
        for place in np.ndindex(*window):
            at = tuple(
                slice(p * d, p * d + (s - 1) * t + 1, t) for p, d, s, t in zip(place, dilations, sizes, strides, strict=True)
            )
            factor = w[(slice(g * n, (g + 1) * n), slice(None), *place)].astype(work)
            y[:, g * n : (g + 1) * n] += np.einsum("bc...,oc->bo...", part[(slice(None), slice(None), *at)], factor)
    return y


pytestmark = pytest.mark.filterwarnings("error")

CONVOLUTIONS = {  # x, w, strides, dilations (ONNX's), pads, groups
    "2d": ((2, 5, 9, 8), (7, 5, 3, 3), (2, 1), (1, 1), (1, 0), (2, 1), 1),
    "dilated": ((1, 16, 11, 11), (16, 16, 3, 3), (1, 1), (2, 3), (2, 3), (2, 3), 1),
    "1d": ((2, 3, 20), (4, 3, 5), (2,), (1,), (2,), (2,), 1),
    "3d": ((1, 4, 5, 6, 7), (3, 4, 2, 3, 3), (1, 2, 1), (1, 1, 1), (0, 1, 1), (1, 1, 1), 1),
    "groups": ((1, 8, 7, 7), (12, 4, 3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 2),
    "depthwise": ((2, 16, 8, 8), (16, 1, 3, 3), (1, 1), (1, 1), (1, 1), (1, 1), 16),
}


def weights_of(w: np.ndarray, groups: int) -> np.ndarray:
    return w if groups == 1 else w.reshape(groups, w.shape[0] // groups, *w.shape[1:])


@needs_library
@pytest.mark.parametrize("case", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("layout", ["any", "plain", "channels last"])
def test_convolution(case: Any, layout: str) -> None:
    x_shape, w_shape, strides, dilations, begin, end, groups = case
    x, w, b = values(*x_shape), values(*w_shape), values(w_shape[0])
    expected = convolved(x, w, strides, dilations, begin, end, groups) + b.reshape(-1, *[1] * len(strides))
    w = weights_of(w, groups)
    dst = like(*expected.shape)
    if layout == "plain":
        dst = of(*expected.shape)
    elif layout == "channels last":
        x, dst = channels_last(x), described(channels_last(np.zeros(expected.shape, f32)))
    primitive = dnn.convolution(
        like(*x_shape) if layout == "any" else described(x), like(*w.shape), of(len(b)), dst,
        strides=strides, dilations=[d - 1 for d in dilations], pads_begin=begin, pads_end=end,
    )  # fmt: skip
    close(compute(primitive, {dnn.args.SRC: x, dnn.args.WEIGHTS: w, dnn.args.BIAS: b}, *expected.shape), expected)
    assert not primitive.implementation.startswith("ref")
    if layout != "any":
        assert primitive.query("src") == described(x) and primitive.query("dst") == dst


def transposed_convolution(x: np.ndarray, w: np.ndarray, strides: Any, begin: Any, end: Any, groups: int) -> np.ndarray:
    """The definition of ConvTranspose: the weights are (channels, outputs / groups, *window)."""
    window, n, per = w.shape[2:], w.shape[1], w.shape[0] // groups
    full = [(s - 1) * t + k for s, t, k in zip(x.shape[2:], strides, window, strict=True)]
    y = np.zeros((x.shape[0], n * groups, *full))
    for g in range(groups):
        for place in np.ndindex(*window):
            at = tuple(slice(p, p + (s - 1) * t + 1, t) for p, s, t in zip(place, x.shape[2:], strides, strict=True))
            y[(slice(None), slice(g * n, (g + 1) * n), *at)] += np.einsum(
                "bc...,co->bo...", x[:, g * per : (g + 1) * per], w[(slice(g * per, (g + 1) * per), slice(None), *place)]
            )
    return y[(slice(None), slice(None), *[slice(b, s - e) for b, e, s in zip(begin, end, full, strict=True)])]


@needs_library
@pytest.mark.parametrize("groups", [1, 2])
def test_deconvolution(groups: int) -> None:
    x, w, b = values(2, 6, 5, 4), values(6, 4, 3, 3), values(4 * groups)
    expected = transposed_convolution(x, w, (2, 1), (1, 0), (0, 1), groups) + b[:, None, None]
    ours = w.reshape(groups, 6 // groups, 4, 3, 3).swapaxes(1, 2)
    ours = ours[0] if groups == 1 else ours
    primitive = dnn.deconvolution(
        like(*x.shape), like(*ours.shape), of(len(b)), like(*expected.shape),
        strides=(2, 1), dilations=(0, 0), pads_begin=(1, 0), pads_end=(0, 1), allow_reference=True,
    )  # fmt: skip
    close(compute(primitive, {dnn.args.SRC: x, dnn.args.WEIGHTS: ours, dnn.args.BIAS: b}, *expected.shape), expected)


@needs_library
def test_matmul() -> None:
    a, b, bias = values(5, 7), values(7, 6), values(1, 6)
    primitive = dnn.matmul(of(5, 7), like(7, 6), of(1, 6), of(5, 6))
    close(compute(primitive, {dnn.args.SRC: a, dnn.args.WEIGHTS: b, dnn.args.BIAS: bias}, 5, 6), a @ b + bias)
    a, b = values(3, 2, 4, 5), values(3, 1, 6, 5).swapaxes(2, 3)  # a batch that is broadcast, and transposed weights
    primitive = dnn.matmul(described(a), described(b), None, of(3, 2, 4, 6))
    close(compute(primitive, {dnn.args.SRC: a, dnn.args.WEIGHTS: b}, 3, 2, 4, 6), a @ b)


@needs_library
def test_matmul_of_a_length_known_at_run_time() -> None:
    rows = constants.RUNTIME_DIM
    primitive = dnn.matmul(MemoryDesc.of(f32, (rows, 4)), of(4, 3), None, MemoryDesc.of(f32, (rows, 3)))
    with pytest.raises(OneDnnError, match="run time"):
        _ = primitive.query("src").nbytes
    for n in 1, 5:
        a, b, y = values(n, 4), values(4, 3), np.zeros((n, 3), f32)
        call = dnn.bind(primitive, {arg: (described(x), x.ctypes.data) for arg, x in ((1, a), (33, b), (17, y))})
        call.run()
        close(y, a @ b)


def windows(x: np.ndarray, kernel: Any, strides: Any, pads: Any, fill: float) -> np.ndarray:
    x = np.pad(x, [(0, 0), (0, 0), *pads], constant_values=fill)
    view = np.lib.stride_tricks.sliding_window_view(x, kernel, axis=(2, 3))
    return view[:, :, :: strides[0], :: strides[1]].reshape(*view[:, :, :: strides[0], :: strides[1]].shape[:4], -1)


@needs_library
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("algorithm", constants.POOLING)
def test_pooling(algorithm: str, last: bool) -> None:
    x = values(2, 16, 9, 8)
    pads = [(1, 0), (1, 1)]
    view = windows(x, (3, 2), (2, 2), pads, -np.inf if algorithm == "max" else 0)
    count = windows(np.ones_like(x), (3, 2), (2, 2), pads, 0).sum(-1) if algorithm == "avg_exclude_padding" else 6
    expected = view.max(-1) if algorithm == "max" else view.sum(-1) / count
    src = described(channels_last(x)) if last else of(*x.shape)
    dst = described(channels_last(np.zeros(expected.shape, f32))) if last else of(*expected.shape)
    primitive = dnn.pooling(
        src, dst, algorithm=algorithm, kernel=(3, 2), strides=(2, 2), dilations=(0, 0), pads_begin=(1, 1), pads_end=(0, 1)
    )
    close(compute(primitive, {dnn.args.SRC: channels_last(x) if last else x}, *expected.shape), expected)


@needs_library
def test_batch_normalization() -> None:
    x, scale, shift = channels_last(values(3, 16, 4, 5)), values(16), values(16, seed=1)
    mean, variance = values(16, seed=2), np.abs(values(16, seed=3))
    column: Callable[[np.ndarray], np.ndarray] = lambda v: v[:, None, None]  # noqa: E731
    flags = dnn.USE_GLOBAL_STATS | dnn.USE_SCALE | dnn.USE_SHIFT
    primitive = dnn.batch_normalization(described(x), described(x), epsilon=1e-3, flags=flags)
    inputs = {dnn.args.SRC: x, dnn.args.SCALE: scale, dnn.args.SHIFT: shift, dnn.args.MEAN: mean, dnn.args.VARIANCE: variance}
    expected = (x - column(mean)) / np.sqrt(column(variance) + 1e-3) * column(scale) + column(shift)
    close(compute(primitive, inputs, *x.shape), expected)


@needs_library
def test_layer_normalization() -> None:
    x, scale, shift = values(3, 4, 24), values(24), values(24, seed=1)
    primitive = dnn.layer_normalization(of(3, 4, 24), of(3, 4, 24), epsilon=1e-5, flags=dnn.USE_SCALE | dnn.USE_SHIFT)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * scale + shift
    close(compute(primitive, {dnn.args.SRC: x, dnn.args.SCALE: scale, dnn.args.SHIFT: shift}, 3, 4, 24), expected)


@needs_library
@pytest.mark.parametrize("log", [False, True])
def test_softmax(log: bool) -> None:
    x = values(3, 4, 17) * 20
    primitive = dnn.softmax(of(*x.shape), of(*x.shape), axis=2, log=log)
    close(compute(primitive, {dnn.args.SRC: x}, *x.shape), (special.log_softmax if log else special.softmax)(x, 2))


@needs_library
def test_lrn() -> None:
    x = channels_last(values(2, 16, 4, 4))
    primitive = dnn.lrn(described(x), described(x), size=5, alpha=0.3, beta=0.75, k=2.0)
    squares = np.pad(x * x, [(0, 0), (2, 2), (0, 0), (0, 0)])
    total = sum(squares[:, i : i + 16] for i in range(5))
    close(compute(primitive, {dnn.args.SRC: x}, *x.shape), x / (2 + 0.3 / 5 * total) ** 0.75)


FUNCTIONS: dict[str, tuple[float, float, Callable[[np.ndarray], np.ndarray]]] = {
    "relu": (0.1, 0, lambda x: np.where(x > 0, x, 0.1 * x)),
    "tanh": (0, 0, np.tanh),
    "elu": (0.5, 0, lambda x: np.where(x > 0, x, 0.5 * np.expm1(x))),
    "square": (0, 0, np.square),
    "abs": (0, 0, np.abs),
    "sqrt": (0, 0, lambda x: np.sqrt(np.abs(x))),
    "linear": (2, -3, lambda x: 2 * x - 3),
    "soft_relu": (1, 0, lambda x: np.log1p(np.exp(x))),
    "hardsigmoid": (0.2, 0.5, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    "logistic": (0, 0, special.expit),
    "exp": (0, 0, np.exp),
    "gelu_tanh": (0, 0, lambda x: x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))),
    "swish": (1.5, 0, lambda x: x * special.expit(1.5 * x)),
    "log": (0, 0, lambda x: np.log(np.abs(x))),
    "clip": (-1, 2, lambda x: np.clip(x, -1, 2)),
    "clip_v2": (-1, 2, lambda x: np.clip(x, -1, 2)),
    "pow": (2, 3, lambda x: 2 * x**3),
    "gelu_erf": (0, 0, lambda x: x / 2 * (1 + special.erf(x / np.sqrt(2)))),
    "round": (0, 0, np.rint),
    "mish": (0, 0, lambda x: x * np.tanh(np.log1p(np.exp(x)))),
    "hardswish": (1 / 6, 0.5, lambda x: x * np.clip(x / 6 + 0.5, 0, 1)),
}


@needs_library
@pytest.mark.parametrize("algorithm", FUNCTIONS)
def test_eltwise(algorithm: str) -> None:
    alpha, beta, function = FUNCTIONS[algorithm]
    x = values(4, 33) * 4
    x = np.abs(x) if algorithm in ("sqrt", "log") else x
    primitive = dnn.eltwise(of(4, 33), of(4, 33), algorithm=algorithm, alpha=alpha, beta=beta)
    close(compute(primitive, {dnn.args.SRC: x}, 4, 33), function(x.astype(np.float64)))


def test_every_function_of_elements_is_compared() -> None:
    assert FUNCTIONS.keys() == {name for name in constants.ELTWISE if not name.endswith("_use_dst_for_bwd")}
    assert TWO.keys() == constants.BINARY.keys()


TWO: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "div": np.divide, "sub": np.subtract,
    "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip


@needs_library
@pytest.mark.parametrize("algorithm", TWO)
def test_binary(algorithm: str) -> None:
    a, b = values(3, 4, 5), values(1, 4, 5)
    a[0] = b[0]
    primitive = dnn.binary(of(3, 4, 5), of(1, 4, 5), of(3, 4, 5), algorithm=algorithm)
    close(compute(primitive, {dnn.args.SRC: a, dnn.args.SRC_1: b}, 3, 4, 5), TWO[algorithm](a, b).astype(f32))


NORMS = {
    "norm_lp_max": lambda x: np.abs(x**3).sum(1, keepdims=True) ** (1 / 3),
    "norm_lp_sum": lambda x: np.abs(x**3).sum(1, keepdims=True) ** (1 / 3),
    "norm_lp_power_p_max": lambda x: np.abs(x**3).sum(1, keepdims=True),
    "norm_lp_power_p_sum": lambda x: np.abs(x**3).sum(1, keepdims=True),
}


@needs_library
@pytest.mark.parametrize("algorithm", constants.REDUCTION)
def test_reduction(algorithm: str) -> None:
    x = values(6, 32) + 2
    primitive = dnn.reduction(of(6, 32), of(6, 1), algorithm=algorithm, p=3.0, allow_reference=algorithm in NORMS)
    plain = {"sum": np.sum, "mul": np.prod, "mean": np.mean, "max": np.max, "min": np.min}.get(algorithm)
    close(compute(primitive, {dnn.args.SRC: x}, 6, 1), plain(x, 1, keepdims=True) if plain else NORMS[algorithm](x))


@needs_library
def test_resampling() -> None:
    x = channels_last(values(1, 16, 3, 4))
    nearest = dnn.resampling(described(x), like(1, 16, 6, 8), algorithm="nearest", factors=(2, 2))
    close(compute(nearest, {dnn.args.SRC: x}, 1, 16, 6, 8), x.repeat(2, 2).repeat(2, 3))
    linear = dnn.resampling(described(x), like(1, 16, 6, 4), algorithm="linear")
    at = np.clip((np.arange(6) + 0.5) / 2 - 0.5, 0, 2)
    low = np.floor(at).astype(int)
    part = (at - low)[:, None]
    expected = x[:, :, low] * (1 - part) + x[:, :, np.minimum(low + 1, 2)] * part
    close(compute(linear, {dnn.args.SRC: x}, 1, 16, 6, 4), expected)


@needs_library
def test_prelu() -> None:
    x, w = channels_last(values(2, 16, 3, 3)), channels_last(values(1, 16, 1, 1))
    primitive = dnn.prelu(described(x), like(1, 16, 1, 1), described(x))
    close(compute(primitive, {dnn.args.SRC: x, dnn.args.WEIGHTS: w}, *x.shape), np.where(x > 0, x, x * w))


@needs_library
def test_concat_sum_and_shuffle() -> None:
    a, b = values(2, 3, 4), values(2, 5, 4)
    joined = dnn.concat(None, 1, [described(a), described(b)])
    assert joined.query("dst").shape == (2, 8, 4)
    expected = np.concatenate([a, b], 1)
    close(compute(joined, {dnn.args.MULTIPLE_SRC: a, dnn.args.MULTIPLE_SRC + 1: b}, 2, 8, 4), expected)
    added = dnn.sum_(None, [0.9, -2.0], [described(a), described(a)])
    close(compute(added, {dnn.args.MULTIPLE_SRC: a, dnn.args.MULTIPLE_SRC + 1: a[::-1].copy()}, 2, 3, 4), 0.9 * a - 2 * a[::-1])
    x = values(1, 16, 2, 2)
    shuffled = dnn.shuffle(of(*x.shape), of(*x.shape), axis=1, group_size=4, allow_reference=True)
    close(compute(shuffled, {dnn.args.SRC: x}, *x.shape), x.reshape(1, 4, 4, 2, 2).swapaxes(1, 2).reshape(x.shape))


@needs_library
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int32, np.uint8, np.int8])
def test_reorder_converts_types(dtype: Any) -> None:
    x = np.rint(values(4, 5) * 50).astype(f32)
    x = np.abs(x) if dtype is np.uint8 else x
    try:
        primitive = dnn.reorder(of(4, 5), MemoryDesc.tagged(dtype, (4, 5), "ba"))
    except Unimplemented as error:
        pytest.skip(str(error))
    y = np.zeros((5, 4), dtype)
    [result] = run(primitive, {dnn.args.FROM: x}, {dnn.args.TO: y.T})
    np.testing.assert_array_equal(result.astype(f32), x)


SIZES = (4, 2, 3, 5)  # time, batch, inputs, hidden


def recurrent(gates: int, bias_gates: int | None = None) -> tuple[np.ndarray, ...]:
    t, b, i, h = SIZES
    return (
        values(t, b, i), values(1, 1, b, h), values(1, 1, i, gates, h), values(1, 1, h, gates, h),
        values(1, 1, bias_gates or gates, h),
    )  # fmt: skip


@needs_library
@pytest.mark.parametrize("opaque", [False, True])
def test_lstm(opaque: bool) -> None:
    x, h0, w, r, bias = recurrent(4)
    c0 = values(1, 1, *SIZES[1::2], seed=5)
    weights = like if opaque else of
    state, layer = of(*h0.shape), of(SIZES[0], SIZES[1], SIZES[3])
    primitive = dnn.lstm(of(*x.shape), state, state, weights(*w.shape), weights(*r.shape), of(*bias.shape), layer, state, state)
    inputs = {1: x, 2: h0, 3: c0, 33: w, 34: r, 41: bias}
    y, hn, cn = run(primitive, inputs, {17: np.zeros(layer.shape, f32), 18: np.zeros_like(h0), 19: np.zeros_like(c0)})
    h, c = h0[0, 0], c0[0, 0]
    for t in range(SIZES[0]):
        i, f, g, o = np.moveaxis(
            np.einsum("bi,igh->bgh", x[t], w[0, 0]) + np.einsum("bj,jgh->bgh", h, r[0, 0]) + bias[0, 0], 1, 0
        )
        c = special.expit(f) * c + special.expit(i) * np.tanh(g)
        h = special.expit(o) * np.tanh(c)
        close(y[t], h)
    close(hn[0, 0], h)
    close(cn[0, 0], c)


@needs_library
@pytest.mark.parametrize("linear", [False, True])
def test_gru(linear: bool) -> None:
    x, h0, w, r, bias = recurrent(3, 4 if linear else 3)
    state, layer = of(*h0.shape), of(SIZES[0], SIZES[1], SIZES[3])
    primitive = dnn.gru(
        of(*x.shape), state, of(*w.shape), of(*r.shape), of(*bias.shape), layer, state,
        linear_before_reset=linear,
    )  # fmt: skip
    outputs = {17: np.zeros(layer.shape, f32), 18: np.zeros_like(h0)}
    y, hn = run(primitive, {1: x, 2: h0, 33: w, 34: r, 41: bias}, outputs)
    h, b = h0[0, 0], bias[0, 0]
    for t in range(SIZES[0]):
        wx, rh = np.einsum("bi,igh->gbh", x[t], w[0, 0]), np.einsum("bj,jgh->gbh", h, r[0, 0])
        u, reset = special.expit(wx[0] + rh[0] + b[0]), special.expit(wx[1] + rh[1] + b[1])
        new = reset * (rh[2] + b[3]) if linear else (reset * h) @ r[0, 0, :, 2]
        h = u * h + (1 - u) * np.tanh(wx[2] + b[2] + new)
        close(y[t], h)
    close(hn[0, 0], h)


@needs_library
def test_rnn_of_both_directions() -> None:
    t, b, i, h = SIZES
    x, w, r, bias = values(t, b, i), values(1, 2, i, 1, h), values(1, 2, h, 1, h), values(1, 2, 1, h)
    primitive = dnn.rnn(
        of(t, b, i), None, of(*w.shape), of(*r.shape), of(*bias.shape), of(t, b, 2 * h), None,
        activation="tanh", direction="bidirectional_concat",
    )  # fmt: skip
    y = compute(primitive, {1: x, 33: w, 34: r, 41: bias}, t, b, 2 * h)
    for d, steps in enumerate((range(t), reversed(range(t)))):
        state = np.zeros((b, h), f32)
        for step in steps:
            state = np.tanh(x[step] @ w[0, d, :, 0] + state @ r[0, d, :, 0] + bias[0, d, 0])
            close(y[step, :, d * h : (d + 1) * h], state)


# post-ops, modes, int8


@needs_library
def test_post_ops_are_applied_in_their_order() -> None:
    a, b, factor, before = values(8, 16), values(16, 32), values(1, 32), values(8, 32)
    attributes = (
        dnn.Attributes().append_binary("mul", of(1, 32)).append_sum(0.5).append_eltwise("relu").append_binary("add", of(8, 32))
    )
    assert len(attributes) == 4
    primitive = dnn.matmul(of(8, 16), like(16, 32), None, of(8, 32), attributes, allow_reference=True)  # it is slow with AVX2
    inputs = {dnn.args.SRC: a, dnn.args.WEIGHTS: b, dnn.args.post_op(0): factor, dnn.args.post_op(3): before}
    [y] = run(primitive, inputs, {dnn.args.DST: before.copy()})
    close(y, np.maximum((a @ b) * factor + 0.5 * before, 0) + before)
    [y] = run(
        dnn.binary(of(8, 32), of(8, 32), of(8, 32), algorithm="add", attributes=dnn.Attributes().append_eltwise("gelu_erf")),
        {dnn.args.SRC: before, dnn.args.SRC_1: before}, {dnn.args.DST: np.zeros_like(before)},
    )  # fmt: skip
    close(y, FUNCTIONS["gelu_erf"][2](2 * before.astype(np.float64)))


@needs_library
def test_prelu_as_a_post_op() -> None:
    a, b, slope = values(8, 16), values(16, 32), values(32)
    primitive = dnn.matmul(of(8, 16), like(16, 32), None, of(8, 32), dnn.Attributes().append_prelu(2), allow_reference=True)
    y = compute(primitive, {dnn.args.SRC: a, dnn.args.WEIGHTS: b, dnn.args.post_op(0, dnn.args.WEIGHTS): slope}, 8, 32)
    close(y, np.where(a @ b > 0, a @ b, a @ b * slope))


@needs_library
def test_convolution_adds_to_its_destination() -> None:
    x, w, before = channels_last(values(1, 8, 6, 6)), values(16, 8, 3, 3), channels_last(values(1, 16, 6, 6))
    attributes = dnn.Attributes().append_sum().append_eltwise("clip", 0.0, 6.0)
    primitive = dnn.convolution(
        described(x), like(*w.shape), None, described(before), attributes=attributes,
        strides=(1, 1), dilations=(0, 0), pads_begin=(1, 1), pads_end=(1, 1),
    )  # fmt: skip
    [y] = run(primitive, {dnn.args.SRC: x, dnn.args.WEIGHTS: w}, {dnn.args.DST: before.copy("K")})
    close(y, np.clip(convolved(x, w, (1, 1), (1, 1), (1, 1), (1, 1)) + before, 0, 6))


@needs_library
def test_bf16_is_opt_in() -> None:
    a, b = values(32, 64), values(64, 32)
    strict = compute(dnn.matmul(of(32, 64), like(64, 32), None, of(32, 32)), {1: a, 33: b}, 32, 32)
    close(strict, a @ b)
    loose = compute(dnn.matmul(of(32, 64), like(64, 32), None, of(32, 32), dnn.Attributes(fpmath="bf16")), {1: a, 33: b}, 32, 32)
    np.testing.assert_allclose(loose, a @ b, atol=0.1)


int8 = pytest.mark.skipif(not EXACT_INT8, reason="this machine has no instructions for exact int8 products")


def integers(dtype: Any, *shape: int) -> np.ndarray:
    """Of the full range, and many of the extremes, where sums of pairs leave 16 bits."""
    info, rng = np.iinfo(dtype), np.random.default_rng(0)
    x = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    return np.where(rng.random(shape) < 0.5, info.max, x).astype(dtype)


@needs_library
@int8
@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
@pytest.mark.parametrize("zero", [0, 3])
def test_int8_products_are_exact(dtype: Any, zero: int) -> None:
    a, b = integers(dtype, 17, 129), integers(np.int8, 129, 40)
    attributes, inputs = dnn.Attributes(), {dnn.args.SRC: a, dnn.args.WEIGHTS: b}
    if zero:
        attributes.set_zero_points(dnn.args.SRC, 0)
        inputs[dnn.args.zero_points(dnn.args.SRC)] = np.array([zero], np.int32)
    primitive = dnn.matmul(described(a), like(129, 40, dtype=np.int8), None, of(17, 40, dtype=np.int32), attributes)
    expected = (a.astype(np.int64) - zero) @ b.astype(np.int64)
    np.testing.assert_array_equal(compute(primitive, inputs, 17, 40, dtype=np.int32), expected)
    x, w = channels_last(integers(dtype, 2, 20, 7, 7)), integers(np.int8, 24, 20, 3, 3)
    primitive = dnn.convolution(
        described(x), like(*w.shape, dtype=np.int8), None, MemoryDesc.tagged(np.int32, (2, 24, 7, 7), "nhwc"),
        strides=(1, 1), dilations=(0, 0), pads_begin=(1, 1), pads_end=(1, 1),
        attributes=dnn.Attributes().set_zero_points(dnn.args.SRC, 0) if zero else None,
    )  # fmt: skip
    inputs = {**inputs, dnn.args.SRC: x, dnn.args.WEIGHTS: w}
    expected = convolved(x.astype(np.int64) - zero, w, (1, 1), (1, 1), (1, 1), (1, 1))
    np.testing.assert_array_equal(compute(primitive, inputs, 2, 24, 7, 7, dtype=np.int32), expected)


@needs_library
@int8
def test_scales_and_a_destination_zero_point() -> None:
    a, b, quotients = integers(np.uint8, 8, 32), integers(np.int8, 32, 16), values(16) * 1e-3
    attributes = dnn.Attributes().set_scales(dnn.args.WEIGHTS, 2).set_zero_points(dnn.args.DST, 0)
    primitive = dnn.matmul(described(a), like(32, 16, dtype=np.int8), None, of(8, 16, dtype=np.uint8), attributes)
    inputs = {dnn.args.SRC: a, dnn.args.WEIGHTS: b, dnn.args.scales(dnn.args.WEIGHTS): quotients}
    inputs[dnn.args.zero_points(dnn.args.DST)] = np.array([100], np.int32)
    y = compute(primitive, inputs, 8, 16, dtype=np.uint8)
    expected = np.clip(np.rint((a.astype(int) @ b.astype(int)).astype(f32) * quotients) + 100, 0, 255)
    np.testing.assert_array_equal(y, expected)


# gradients


@needs_library
def test_gradients_of_a_convolution() -> None:
    x, w, dy = channels_last(values(1, 16, 6, 6)), values(16, 16, 3, 3), channels_last(values(1, 16, 6, 6, seed=1))
    window = {"strides": (1, 1), "dilations": (0, 0), "pads_begin": (1, 1), "pads_end": (1, 1)}
    forward = dnn.convolution(described(x), like(*w.shape), of(16), described(dy), prop="training", **window)
    data = reverse.convolution_backward_data(described(x), like(*w.shape), described(dy), hint=forward, **window)
    [dx] = run(data, {dnn.args.WEIGHTS: w, dnn.args.DIFF_DST: dy}, {dnn.args.DIFF_SRC: np.zeros(x.shape, f32)})
    close(dx, convolved(dy, w.swapaxes(0, 1)[:, :, ::-1, ::-1], (1, 1), (1, 1), (1, 1), (1, 1)))
    weights = reverse.convolution_backward_weights(described(x), like(*w.shape), of(16), described(dy), hint=forward, **window)
    outputs = {dnn.args.DIFF_WEIGHTS: np.zeros(w.shape, f32), dnn.args.DIFF_BIAS: np.zeros(16, f32)}
    dw, db = run(weights, {dnn.args.SRC: x, dnn.args.DIFF_DST: dy}, outputs)
    close(db, dy.sum((0, 2, 3)))
    close(dw, convolved(x.swapaxes(0, 1), dy.swapaxes(0, 1), (1, 1), (1, 1), (1, 1), (1, 1)).swapaxes(0, 1))


@needs_library
def test_gradients_of_a_transposed_convolution() -> None:
    x, w, dy = values(1, 16, 5, 5), values(16, 16, 3, 3), values(1, 16, 7, 7, seed=1)  # w: (outputs, inputs, ...)
    window = {"strides": (1, 1), "dilations": (0, 0), "pads_begin": (0, 0), "pads_end": (0, 0)}
    forward = dnn.deconvolution(like(*x.shape), like(*w.shape), None, like(*dy.shape), prop="training", **window)
    data = reverse.deconvolution_backward_data(like(*x.shape), like(*w.shape), like(*dy.shape), hint=forward, **window)
    [dx] = run(data, {dnn.args.WEIGHTS: w, dnn.args.DIFF_DST: dy}, {dnn.args.DIFF_SRC: np.zeros(x.shape, f32)})
    close(dx, convolved(dy, w.swapaxes(0, 1), (1, 1), (1, 1), (0, 0), (0, 0)))
    weights = reverse.deconvolution_backward_weights(
        like(*x.shape), like(*w.shape), None, like(*dy.shape), hint=forward, **window
    )
    [dw] = run(weights, {dnn.args.SRC: x, dnn.args.DIFF_DST: dy}, {dnn.args.DIFF_WEIGHTS: np.zeros(w.shape, f32)})
    expected = np.array([[[[np.sum(x[0, i] * dy[0, o, r : r + 5, c : c + 5]) for c in range(3)] for r in range(3)]
                          for i in range(16)] for o in range(16)])  # fmt: skip
    close(dw, expected)


@needs_library
def test_gradients_that_need_a_workspace() -> None:
    x, dy = channels_last(values(1, 16, 4, 4)), channels_last(values(1, 16, 2, 2))
    window = {"kernel": (2, 2), "strides": (2, 2), "dilations": (0, 0), "pads_begin": (0, 0), "pads_end": (0, 0)}
    forward = dnn.pooling(described(x), described(dy), algorithm="max", prop="training", **window)
    assert forward.workspace_nbytes > 0
    space = np.zeros(forward.workspace_nbytes, np.uint8)
    y = np.zeros_like(dy)
    dnn.bind(forward, {
        dnn.args.SRC: (described(x), x.ctypes.data), dnn.args.DST: (described(y), y.ctypes.data),
        dnn.args.WORKSPACE: (forward.query("workspace"), space.ctypes.data),
    }).run()  # fmt: skip
    backward = reverse.pooling_backward(described(x), described(dy), hint=forward, algorithm="max", **window)
    dx = np.zeros_like(x)
    arguments = {dnn.args.DIFF_SRC: (described(dx), dx.ctypes.data), dnn.args.DIFF_DST: (described(dy), dy.ctypes.data)}
    with pytest.raises(OneDnnError, match="without argument 64"):
        dnn.bind(backward, arguments)
    dnn.bind(backward, {**arguments, dnn.args.WORKSPACE: (backward.query("workspace"), space.ctypes.data)}).run()
    spread = dy.repeat(2, 2).repeat(2, 3)
    close(dx, np.where(x == y.repeat(2, 2).repeat(2, 3), spread, 0))


@needs_library
def test_gradients_of_functions_of_elements_and_softmax() -> None:
    x, dy = values(4, 32), values(4, 32, seed=1)
    md = of(4, 32)
    forward = dnn.eltwise(md, md, algorithm="tanh", prop="training")
    backward = reverse.eltwise_backward(md, md, md, hint=forward, algorithm="tanh")
    close(
        run(backward, {dnn.args.SRC: x, dnn.args.DIFF_DST: dy}, {dnn.args.DIFF_SRC: np.zeros_like(x)})[0],
        dy * (1 - np.tanh(x) ** 2),
    )
    forward = dnn.eltwise(md, md, algorithm="logistic_use_dst_for_bwd", prop="training")
    backward = reverse.eltwise_backward(md, md, md, hint=forward, algorithm="logistic_use_dst_for_bwd")
    y = special.expit(x)
    close(run(backward, {dnn.args.DST: y, dnn.args.DIFF_DST: dy}, {dnn.args.DIFF_SRC: np.zeros_like(x)})[0], dy * y * (1 - y))
    forward = dnn.softmax(md, md, axis=1, prop="training")
    backward = reverse.softmax_backward(md, md, md, hint=forward, axis=1, allow_reference=True)
    y = special.softmax(x, 1)
    expected = (dy - (dy * y).sum(1, keepdims=True)) * y
    close(run(backward, {dnn.args.DST: y, dnn.args.DIFF_DST: dy}, {dnn.args.DIFF_SRC: np.zeros_like(x)})[0], expected)


def normalized_gradient(x: np.ndarray, g: np.ndarray, axes: Any, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of (x - mean) / sqrt(variance + epsilon), and that value."""
    mean = x.mean(axes, keepdims=True)
    deviation = np.sqrt(x.var(axes, keepdims=True) + epsilon)
    z = (x - mean) / deviation
    return (g - g.mean(axes, keepdims=True) - z * (g * z).mean(axes, keepdims=True)) / deviation, z


@needs_library
def test_gradients_of_normalizations() -> None:
    x, dy, scale, shift = channels_last(values(2, 16, 3, 3)), channels_last(values(2, 16, 3, 3, seed=1)), values(16), values(16)
    flags, md = dnn.USE_SCALE | dnn.USE_SHIFT, described(x)
    forward = dnn.batch_normalization(md, md, epsilon=1e-3, flags=flags, prop="training")
    outputs = {dnn.args.DST: np.zeros(x.shape, f32), dnn.args.MEAN: np.zeros(16, f32), dnn.args.VARIANCE: np.zeros(16, f32)}
    y, mean, variance = run(forward, {dnn.args.SRC: x, dnn.args.SCALE: scale, dnn.args.SHIFT: shift}, outputs)
    close(mean, x.mean((0, 2, 3)))
    close(variance, x.var((0, 2, 3)))
    backward = reverse.batch_normalization_backward(md, md, md, hint=forward, epsilon=1e-3, flags=flags)
    inputs = {dnn.args.SRC: x, dnn.args.DIFF_DST: dy, dnn.args.MEAN: mean, dnn.args.VARIANCE: variance, dnn.args.SCALE: scale}
    outputs = {
        dnn.args.DIFF_SRC: np.zeros(x.shape, f32),
        dnn.args.DIFF_SCALE: np.zeros(16, f32),
        dnn.args.DIFF_SHIFT: np.zeros(16, f32),
    }
    dx, dscale, dshift = run(backward, inputs, outputs)
    column = scale[:, None, None]
    expected, z = normalized_gradient(x, dy * column, (0, 2, 3), 1e-3)
    close(y, z * column + shift[:, None, None])
    close(dx, expected)
    close(dscale, (dy * z).sum((0, 2, 3)))
    close(dshift, dy.sum((0, 2, 3)))

    x, dy, md = values(6, 16), values(6, 16, seed=1), of(6, 16)
    forward = dnn.layer_normalization(md, md, epsilon=1e-3, flags=flags, prop="training")
    outputs = {dnn.args.DST: np.zeros_like(x), dnn.args.MEAN: np.zeros(6, f32), dnn.args.VARIANCE: np.zeros(6, f32)}
    y, mean, variance = run(forward, {dnn.args.SRC: x, dnn.args.SCALE: scale, dnn.args.SHIFT: shift}, outputs)
    backward = reverse.layer_normalization_backward(md, md, md, hint=forward, epsilon=1e-3, flags=flags)
    inputs = {
        dnn.args.SRC: x,
        dnn.args.DIFF_DST: dy,
        dnn.args.MEAN: mean,
        dnn.args.VARIANCE: variance,
        dnn.args.SCALE: scale,
        dnn.args.SHIFT: shift,
    }
    outputs = {
        dnn.args.DIFF_SRC: np.zeros_like(x),
        dnn.args.DIFF_SCALE: np.zeros(16, f32),
        dnn.args.DIFF_SHIFT: np.zeros(16, f32),
    }
    dx, dscale, dshift = run(backward, inputs, outputs)
    expected, z = normalized_gradient(x, dy * scale, 1, 1e-3)
    close(dx, expected)
    close(dscale, (dy * z).sum(0))
    close(dshift, dy.sum(0))


@needs_library
@pytest.mark.parametrize("kind", ["lstm", "gru", "lbr_gru"])
def test_gradients_of_recurrent_weights_overwrite_what_was_there(kind: str) -> None:
    """By default oneDNN adds to the gradients of the weights and of the bias."""
    time, batch, width, hidden, gates = 3, 2, 5, 4, 4 if kind == "lstm" else 3
    count = 2 if kind == "lstm" else 1
    states, weights = [of(1, 1, batch, hidden)] * count, [like(1, 1, width, gates, hidden), like(1, 1, hidden, gates, hidden)]
    bias = of(1, 1, gates + (kind == "lbr_gru"), hidden)
    given = [of(time, batch, width), *states, *weights, bias, of(time, batch, hidden), *states]
    options = {} if kind == "lstm" else {"linear_before_reset": kind == "lbr_gru"}
    forward = (dnn.lstm if kind == "lstm" else dnn.gru)(*given, prop="training", **options)
    backward = (reverse.lstm_backward if kind == "lstm" else reverse.gru_backward)(given, given, hint=forward, **options)
    read = [1, *range(2, 2 + count), 17, *range(18, 18 + count), 33, 34, 41]
    gradients = [arg + 128 for arg in read]
    buffers: dict[int, np.ndarray] = {}

    def bound(primitive: Primitive, numbers: list[int]) -> Any:
        arguments = {}
        for arg in numbers:
            md = primitive.query("argument", arg)
            buffers[arg] = values(md.nbytes // 4, seed=arg)
            arguments[arg] = (md, buffers[arg].ctypes.data)
        space = buffers.setdefault(dnn.args.WORKSPACE, np.zeros(forward.workspace_nbytes, np.uint8))
        scratch = buffers[-len(buffers)] = np.zeros(primitive.scratchpad_nbytes, np.uint8)
        arguments[dnn.args.WORKSPACE] = (forward.query("workspace"), space.ctypes.data)
        arguments[dnn.args.SCRATCHPAD] = (primitive.query("scratchpad"), scratch.ctypes.data)
        return dnn.bind(primitive, arguments)

    bound(forward, read).run()
    call = bound(backward, [*read, *gradients])
    found = []
    for _ in range(2):
        call.run()
        found.append([buffers[arg].copy() for arg in gradients])
    for once, twice in zip(*found, strict=True):
        np.testing.assert_array_equal(once, twice)
    assert np.abs(buffers[dnn.args.DIFF_WEIGHTS_LAYER]).max() > 0


# descriptors


@needs_library
def test_descriptors_with_equal_content_are_equal() -> None:
    a, b = of(2, 16, 3, 3), MemoryDesc.tagged(f32, (2, 16, 3, 3), "nchw")
    last = MemoryDesc.tagged(f32, (2, 16, 3, 3), "nhwc")
    assert a == b and hash(a) == hash(b) and a != last and a != "a" and {a: 1}[b] == 1
    assert last == described(channels_last(np.zeros((2, 16, 3, 3), f32)))
    assert a != like(2, 16, 3, 3) and of(2, 3) != of(2, 3, dtype=np.int32)
    assert last.strides == (144, 1, 48, 16) and like(2, 3).strides is None and of().shape == (1,)
    assert (a.nbytes, a.dtype, a.shape) == (1152, f32, (2, 16, 3, 3))
    blocked = MemoryDesc.tagged(f32, (1, 3, 2, 2), "nChw16c")
    assert blocked.nbytes == 16 * 4 * 4 and blocked.strides is None and blocked == MemoryDesc.tagged(f32, (1, 3, 2, 2), "aBcd16b")
    assert MemoryDesc.of(np.float64, (3,), (2,)).nbytes == 48


@needs_library
def test_descriptors_of_the_same_buffer() -> None:
    whole = of(4, 6)
    assert whole.reshaped((2, 2, 6)) == of(2, 2, 6)
    x, y = values(4, 6), np.zeros((2, 3), f32)
    part = whole.submemory((2, 3), (1, 2))
    [result] = [moved(x, part, of(2, 3)).view(f32).reshape(2, 3)]
    np.testing.assert_array_equal(result, x[1:3, 2:5])
    memory = dnn.Memory(of(2, 3), y.ctypes.data)
    memory.move(x.ctypes.data)
    assert memory.address == x.ctypes.data


def test_supported_types() -> None:
    yes = [np.float32, "float16", ml_dtypes.bfloat16, np.int32, np.int8, np.uint8, np.float64]
    assert all(map(dnn.supported, yes)) and not any(map(dnn.supported, [np.int64, np.bool_, object, np.complex64]))


# errors and refusals


@needs_library
def test_failures_are_typed() -> None:
    with pytest.raises(Unimplemented, match="element type int64"):
        of(2, dtype=np.int64)
    with pytest.raises(Unimplemented, match="memory_desc_create_with_strides: invalid_arguments"):
        of(*[1] * 13)
    for wrong in (
        lambda: MemoryDesc.of(f32, (2, 3), (1,)),
        lambda: MemoryDesc.tagged(f32, (2, 3), "nhwc"),
        lambda: dnn.eltwise(of(2), of(2), algorithm="sine"),
        lambda: dnn.Attributes(fpmath="double"),
        lambda: dnn.resampling(of(1, 1, 2, 2), of(1, 1, 4, 4), algorithm="nearest", factors=(2,)),
        lambda: dnn.pooling(of(1, 1, 4, 4), of(1, 1, 2, 2), algorithm="max", kernel=(2,), strides=(2, 2), dilations=(0, 0),
                            pads_begin=(0, 0), pads_end=(0, 0)),
    ):  # fmt: skip
        with pytest.raises(OneDnnError) as caught:
            wrong()
        assert caught.value.status == 2 and type(caught.value) is OneDnnError
    with pytest.raises(Unimplemented, match="matmul_primitive_desc_create: invalid_arguments"):
        dnn.matmul(of(2, 3), of(4, 5), None, of(2, 5))
    relu = dnn.eltwise(of(2), of(2), algorithm="relu")
    with pytest.raises(OneDnnError, match="eltwise_forward has no weights 0"):
        relu.query("weights")
    with pytest.raises(OneDnnError, match="what must be one of"):
        relu.query("result")
    with pytest.raises(OneDnnError, match=r"execute eltwise_forward: "):
        dnn.bind(relu, {}).run()
    with pytest.raises(ValueError, match="at least 1"):
        dnn.set_threads(0)


@needs_library
def test_slow_reference_code_is_refused() -> None:
    empty = of(0, 3)
    with pytest.raises(Unimplemented, match=r"only as slow reference code \(ref"):
        dnn.matmul(empty, of(3, 2), None, of(0, 2))
    with pytest.raises(Unimplemented, match="slow reference code"):
        dnn.eltwise(of(2, 3), of(2, 3), algorithm="relu", attributes=dnn.Attributes().append_binary("add", of(2, 3)))
    assert dnn.matmul(empty, of(3, 2), None, of(0, 2), allow_reference=True).implementation.startswith("ref")


@needs_library
def test_a_call_needs_its_scratchpad() -> None:
    primitive = dnn.convolution(
        of(1, 3, 9, 9), like(7, 3, 3, 3), None, of(1, 7, 9, 9),
        strides=(1, 1), dilations=(0, 0), pads_begin=(1, 1), pads_end=(1, 1),
    )  # fmt: skip
    if not primitive.scratchpad_nbytes:
        pytest.skip(f"{primitive.implementation} needs no scratchpad")
    with pytest.raises(OneDnnError, match="without argument 80"):
        dnn.bind(primitive, {})
    assert primitive.query("scratchpad").nbytes == primitive.scratchpad_nbytes


@needs_library
@pytest.mark.parametrize("make", [lambda: of(2), dnn.Attributes, lambda: dnn.eltwise(of(2), of(2), algorithm="relu")])
def test_handles_cannot_be_copied(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="belongs to this process"):
        copy.copy(make())


def child(code: str, **environment: str) -> str:
    """What a new process prints."""
    lines = "import numpy as np\nfrom singa_backend.kernels import onednn as dnn\n" + code
    env = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-c", lines], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


REFUSED = """
def refused(make):
    try:
        print(make().implementation)
    except dnn.Unimplemented as error:
        print(error)
of = lambda dtype, *shape: dnn.MemoryDesc.of(dtype, shape)
last = lambda dtype, *shape: dnn.MemoryDesc.tagged(dtype, shape, "nhwc")
refused(lambda: dnn.matmul(of(np.uint8, 8, 64), dnn.MemoryDesc.any(np.int8, (64, 32)), None, of(np.int32, 8, 32)))
refused(lambda: dnn.convolution(
    last(np.int8, 1, 32, 8, 8), dnn.MemoryDesc.any(np.int8, (32, 32, 3, 3)), None, last(np.int32, 1, 32, 6, 6),
    strides=(1, 1), dilations=(0, 0), pads_begin=(0, 0), pads_end=(0, 0)))
print(dnn.matmul(of(np.float32, 8, 64), dnn.MemoryDesc.any(np.float32, (64, 32)), None, of(np.float32, 8, 32)).implementation)
"""


@needs_library
def test_int8_products_are_refused_without_exact_instructions() -> None:
    matmul, convolution, floats = child(REFUSED, ONEDNN_MAX_CPU_ISA="AVX2").splitlines()
    assert "matmul of int8 values exactly" in matmul
    assert "convolution_forward of int8 values exactly" in convolution
    assert not floats.startswith("ref")


# the search


def test_nothing_is_loaded_by_an_import() -> None:
    code = "import singa_backend\nfrom singa_backend.kernels.onednn import loading\n"
    assert child(code + "print(loading._state, 'libdnnl' in open('/proc/self/maps').read())" if Path("/proc/self/maps").exists()
                 else code + "print(loading._state, False)") == "None False"  # fmt: skip


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(loading, "_state", None)  # and the process's library afterwards
    return monkeypatch


def test_the_library_can_be_hidden(fresh: pytest.MonkeyPatch) -> None:
    fresh.setenv("SONNX_ONEDNN", "off")
    assert dnn.library() is None and dnn.missing() == "SONNX_ONEDNN=off"
    assert dnn.threads() == 1
    dnn.set_threads(4)
    with pytest.raises(OneDnnError, match=r"load the library \(SONNX_ONEDNN=off\)"):
        of(2)


def test_a_named_file_is_the_only_candidate(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    absent = tmp_path / "libdnnl.so.3"
    fresh.setenv("SONNX_ONEDNN", str(absent))
    assert dnn.library() is None and str(absent) in dnn.missing() and ";" not in dnn.missing()
    absent.write_text("not a library")
    dnn.reset()
    assert dnn.library() is None and str(absent) in dnn.missing()
    fresh.setenv("SONNX_ONEDNN", ctypes.util.find_library("c") or "libc.so.6")
    dnn.reset()
    assert dnn.library() is None and "is not oneDNN" in dnn.missing()


@needs_library
def test_a_named_file_is_loaded(fresh: pytest.MonkeyPatch) -> None:
    dnn.library()
    path = dnn.library().path
    dnn.reset()
    fresh.setenv("SONNX_ONEDNN", path)
    found = dnn.library()
    assert found is not None and found.path == path and dnn.missing() == ""
    assert found.version[0] == 3 and found.runtime in constants.RUNTIMES.values() and found.hash and found.isa
    assert found is dnn.library()


class Fake:
    """A library of another version or kind."""

    def __init__(self, major: int, runtime: int) -> None:
        self.info = loading._Version(major, 2, 0, b"abc", runtime, 0)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("dnnl_"):
            raise AttributeError(name)
        return lambda *_: ctypes.addressof(self.info)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


@pytest.mark.parametrize(
    ("major", "runtime", "reason"), [(2, 2, "is oneDNN 2.2.0"), (4, 2, "3.x is needed"), (3, 8, "CPU runtime 8"), (3, 512, "512")]
)
def test_other_libraries_are_refused(fresh: pytest.MonkeyPatch, major: int, runtime: int, reason: str) -> None:
    fresh.delenv("SONNX_ONEDNN", raising=False)
    fresh.setattr(loading.ctypes, "CDLL", lambda path: Fake(major, runtime))
    assert dnn.library() is None and reason in dnn.missing()


def test_the_wheel_is_tried_before_the_system(fresh: pytest.MonkeyPatch) -> None:
    class Entry:
        name = "libdnnl.so.3"

        def locate(self) -> Path:
            return Path("/prefix/lib/site-packages/../libdnnl.so.3")

    fresh.delenv("SONNX_ONEDNN", raising=False)
    fresh.setattr(loading.metadata, "files", lambda name: [Entry()] if name == "onednn-cpu-gomp" else None)
    assert list(loading._candidates()) == ["/prefix/lib/libdnnl.so.3", "libdnnl.so.3"]

    def absent(name: str) -> Any:
        raise loading.metadata.PackageNotFoundError(name)

    fresh.setattr(loading.metadata, "files", absent)
    assert list(loading._candidates()) == ["libdnnl.so.3"]


@needs_library
def test_threads_that_start_at_once_load_one_library(fresh: pytest.MonkeyPatch) -> None:
    count, found, gate = Counter[str](), [], threading.Barrier(8)
    real = loading._find

    def find() -> Any:
        count["loaded"] += 1
        return real()

    def start() -> None:
        gate.wait()
        found.append(dnn.library())

    fresh.setattr(loading, "_find", find)
    started = [threading.Thread(target=start) for _ in range(8)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert count["loaded"] == 1 and len(set(map(id, found))) == 1


# threads, forks, freed handles

CONVOLVE = """
x, w, y = np.ones((4, 32, 32, 32), np.float32), np.ones((32, 32, 3, 3), np.float32), np.zeros((4, 32, 30, 30), np.float32)
md = lambda a: dnn.MemoryDesc.of(a.dtype, a.shape)
dnn.set_threads(2)
conv = dnn.convolution(md(x), md(w), None, md(y), strides=(1, 1), dilations=(0, 0), pads_begin=(0, 0), pads_end=(0, 0))
space = np.zeros(conv.scratchpad_nbytes + 1, np.uint8)
arguments = {1: (md(x), x.ctypes.data), 33: (md(w), w.ctypes.data), 17: (md(y), y.ctypes.data)}
if conv.scratchpad_nbytes:
    arguments[80] = (conv.query("scratchpad"), space.ctypes.data)
call = dnn.bind(conv, arguments)
"""


@needs_library
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_forked_child_runs(where: str) -> None:
    code = (
        CONVOLVE
        + f"""
import os, signal, threading
call.run()
def fork():
    call.run()
    pid = os.fork()
    if pid:
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        y[:] = 0
        call.run()
        print(y.min() == y.max() == 288)
    else:
        signal.alarm(60)
        y[:] = 0
        call.run()
        os._exit(0 if y.min() == y.max() == 288 else 1)
if {where == "main"}:
    fork()
else:
    thread = threading.Thread(target=fork)
    thread.start()
    thread.join()
"""
    )
    assert child(code).split() == ["0", "True"]


@needs_library
def test_primitives_run_on_any_thread() -> None:
    x, w = values(1, 16, 12, 12), values(16, 16, 3, 3)
    expected = convolved(x, w, (1, 1), (1, 1), (0, 0), (0, 0))
    primitive = dnn.convolution(
        of(*x.shape),
        of(*w.shape),
        None,
        of(*expected.shape),
        strides=(1, 1),
        dilations=(0, 0),
        pads_begin=(0, 0),
        pads_end=(0, 0),
    )
    results: list[np.ndarray] = []
    started = [
        threading.Thread(target=lambda: results.extend(compute(primitive, {1: x, 33: w}, *expected.shape) for _ in range(5)))
        for _ in range(3)
    ]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    assert len(results) == 15
    for y in results:
        close(y, expected)


@needs_library
def test_the_number_of_threads() -> None:
    if dnn.library().runtime != "OpenMP":
        pytest.skip("only OpenMP has a number of threads")
    before = dnn.threads()
    with pytest.raises(ZeroDivisionError), dnn.using_threads(before + 1):
        assert dnn.threads() == before + 1
        assert dnn.eltwise(of(2), of(2), algorithm="relu").threads == before + 1
        raise ZeroDivisionError
    assert dnn.threads() == before


@needs_library
def test_handles_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    lib = dnn.library()
    live: Counter[str] = Counter()
    made: Counter[str] = Counter()
    kinds = ("primitive_desc", "primitive_attr", "post_ops", "memory_desc", "primitive", "memory")
    create = lib.create

    def kind(name: str) -> str:
        return "primitive_desc" if "primitive_desc" in name else next(k for k in kinds if name.startswith(k))

    def counting(name: str, *arguments: Any) -> int:
        handle = create(name, *arguments)
        live[kind(name)] += 1
        made[kind(name)] += 1
        return handle

    monkeypatch.setattr(lib, "create", counting)
    for k in kinds:

        def destroy(handle: int, k: str = k, real: Any = lib.functions[f"{k}_destroy"]) -> int:
            live[k] -= 1
            return real(handle)

        monkeypatch.setitem(lib.functions, f"{k}_destroy", destroy)
    x, y = values(2, 4), np.zeros((2, 4), f32)
    for i in range(1000):
        md = of(2, 4)
        attributes = dnn.Attributes().append_eltwise("linear", 1.0, float(i % 3))
        add = dnn.binary(md, md, md, algorithm="add", attributes=attributes)
        call = dnn.bind(add, {1: (add.query("src"), x.ctypes.data), 2: (md, x.ctypes.data), 17: (md, y.ctypes.data)})
        if i % 100 == 0:
            call.run()
            with pytest.raises(Unimplemented):
                dnn.eltwise(md, md, algorithm="relu", attributes=attributes.append_binary("add", md))
    del md, attributes, add, call
    gc.collect()
    assert all(made[k] >= 1000 for k in kinds)
    assert not +live and not -live


@needs_library
def test_layer_normalization_refuses_gaps() -> None:
    """Its code takes the rows as dense, whatever the strides: it reads and writes the gaps."""
    wide, dense = MemoryDesc.of(np.float32, (8, 32), (64, 1)), MemoryDesc.of(np.float32, (8, 32))
    for src, dst in ((wide, dense), (dense, wide), (wide, wide)):
        with pytest.raises(Unimplemented, match="gaps"):
            dnn.layer_normalization(src, dst, epsilon=1e-5)


@needs_library
@pytest.mark.parametrize("part", ["primitive", "primitive_desc"])
def test_a_primitive_that_is_being_destroyed_is_not_found(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other threads run while C code destroys it; here the destructor asks for an equal one, as they may."""
    lib, md = dnn.library(), MemoryDesc.of(np.float32, (3, 5))
    destroyed: list[int] = []
    found: list[Primitive] = []
    real = lib.functions[f"{part}_destroy"]

    def destroy(handle: int) -> int:
        destroyed.append(handle)
        if len(destroyed) == 1:
            found.append(dnn.eltwise(md, md, algorithm="tanh", alpha=0.5))
        return int(real(handle))

    monkeypatch.setitem(lib.functions, f"{part}_destroy", destroy)
    owner = [dnn.eltwise(md, md, algorithm="tanh", alpha=0.5)]
    handle = owner[0].executable if part == "primitive" else owner[0].handle
    owner.clear()
    assert destroyed == [handle] and len(found) == 1
    y = np.ones((3, 5), f32)
    bound = dnn.bind(found[0], {dnn.args.SRC: (md, y.ctypes.data), dnn.args.DST: (md, y.ctypes.data)})
    assert (found[0].executable if part == "primitive" else found[0].handle) != handle
    bound.run()
    np.testing.assert_allclose(y, np.tanh(np.ones((3, 5))), rtol=1e-6)
    found.clear()  # which its destructor keeps


def test_equal_primitives_are_one() -> None:
    """While somebody uses it; other sizes, numbers (also the sign of zero), post-ops and numbers of threads have their own."""
    md, rows = MemoryDesc.of(np.float32, (4, 6)), MemoryDesc.of(np.float32, (1, 6))

    def made() -> list[Primitive]:
        same = MemoryDesc.of(np.float32, (4, 6))
        numbers = [dnn.eltwise(same, md, algorithm="linear", alpha=a, beta=b) for a, b in ((1.0, 0.0), (1.0, -0.0), (2.0, 0.0))]
        posts = [dnn.Attributes().append_eltwise("linear", 1.0, b) for b in (0.0, -0.0, 1.0)]
        posts += [dnn.Attributes().append_binary("mul", of) for of in (rows, same)]
        return [
            *numbers, dnn.eltwise(rows, rows, algorithm="linear", alpha=1.0), dnn.binary(md, same, md, algorithm="add"),
            *[dnn.binary(md, same, md, algorithm="add", attributes=p) for p in posts],
        ]  # fmt: skip

    first, again = made(), made()
    assert len(set(map(id, first))) == len(first)
    assert all(a is b for a, b in zip(first, again, strict=True))
    with dnn.using_threads(first[0].threads + 1):
        other = dnn.eltwise(md, md, algorithm="linear", alpha=1.0)
        assert other is not first[0] or other.threads == dnn.threads()  # a library without threads has one number
    gone = weakref.ref(first[2])
    del first, again
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("own", "level", "expected"), [
    ("avx512_core_amx", "avx2", True), ("avx512_core", "avx2", True), ("avx2_vnni", "avx2", True), ("avx2", "avx2", False),
    ("avx", "avx2", False), ("avx2_vnni", "avx512_core", False),
])  # fmt: skip
def test_a_level_is_tested_again_only_below_that_of_the_machine(own: str, level: str, expected: bool) -> None:
    assert higher(own, level) is expected
