"""Fourier transforms as sums, windows and mel triangles as formulas."""

import math

import ml_dtypes
import numpy as np
import pytest
from onnx import helper

from singa_backend import prepare, read
from singa_backend.opsets.convert import convert


def transform(x, n, axis, sign=-1):
    """The sum of the text, over a signal cut or padded to n."""
    z = np.moveaxis(x[..., 0] + (1j * x[..., 1] if x.shape[-1] == 2 else 0), axis, -1)
    z = np.concatenate([z, np.zeros((*z.shape[:-1], max(0, n - z.shape[-1])))], -1)[..., :n]
    k = np.arange(n)
    return np.moveaxis(z @ np.exp(sign * 2j * np.pi * np.outer(k, k) / n), -1, axis)


def parts(z):
    return np.stack([z.real, z.imag], -1)


def run(check, x, y, axis, length=None, **attributes):
    n = None if length is None else np.array(length, np.int64)
    rtol, atol = (1e-10, 1e-12) if x.dtype == np.float64 else (1e-4, 1e-5)
    where = np.array(axis, np.int64)
    check("DFT", [x, n, where], [y.astype(x.dtype)], opset=20, rtol=rtol, atol=atol, **attributes)
    check("DFT", [x] if n is None else [x, n], [y.astype(x.dtype)], opset=17, axis=axis, rtol=rtol, atol=atol, **attributes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("axis", [0, 1, 2, -2, -4])
@pytest.mark.parametrize("length", [None, 1, 4, 7, 10])
def test_dft(check, dtype, axis, length):
    rng = np.random.default_rng(7)
    real = rng.standard_normal((3, 5, 6, 1)).astype(dtype)
    both = rng.standard_normal((3, 5, 6, 2)).astype(dtype)
    n = length or real.shape[axis]
    where = axis % 4
    run(check, real, parts(transform(real, n, where)), axis, length)
    run(check, both, parts(transform(both, n, where)), axis, length)
    run(check, both, parts(transform(both, n, where, 1) / n), axis, length, inverse=1)
    half = np.take(transform(real, n, where), range(n // 2 + 1), where)
    run(check, real, parts(half), axis, length, onesided=1)
    run(check, parts(half).astype(dtype), np.take(np.pad(real, [(0, max(0, n - s) if i == where else 0)
        for i, s in enumerate(real.shape)]), range(n), where), axis, n, onesided=1, inverse=1)  # fmt: skip


def test_dft_defaults(check):
    x = np.random.default_rng(0).standard_normal((2, 4, 6, 1))
    check("DFT", [x], [parts(transform(x, 4, 1))], opset=17, rtol=1e-10)
    check("DFT", [x], [parts(transform(x, 6, 2))], opset=20, rtol=1e-10)
    half = parts(transform(x, 6, 2)[:, :, :4])
    check("DFT", [half], [x], opset=20, inverse=1, onesided=1, rtol=1e-10)  # by default 2 * (4 - 1) values
    check("DFT", [x.astype(ml_dtypes.bfloat16)], [parts(transform(x, 6, 2)).astype(ml_dtypes.bfloat16)], opset=20, atol=5e-2)
    check("DFT", [x[:0]], [np.zeros((0, 4, 6, 2))], opset=20)
    check("DFT", [x[:, :, :0], np.array(3)], [np.zeros((2, 4, 3, 2))], opset=20)


def test_dft_refusals(fails):
    x = np.zeros((2, 4, 2), np.float32)
    fails("DFT", [x, None, np.array(-1)], "axis must be in .* got -1", opset=20)
    fails("DFT", [x, None, np.array(2)], "axis must be in .* got 2", opset=20)
    fails("DFT", [x, np.array(0)], "dft_length must be at least 1", opset=20)
    fails("DFT", [x], "must be 1 .real. for the forward transform", opset=20, onesided=1)
    fails("DFT", [x[..., :1]], "must be 2 .complex. for the inverse transform", opset=20, onesided=1, inverse=1)
    fails("DFT", [np.zeros((2, 3), np.float32)], "the last axis of a signal must be", opset=17)


@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("length", [4, 5, 16])
def test_stft(check, onesided, step, length):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 16, 2 - onesided))
    window = rng.standard_normal(length)
    for w in (None, window):
        frames = []
        for start in range(0, 16 - length + 1, step):
            cut = x[:, start : start + length] * (np.ones(length) if w is None else w)[:, None]
            frames.append(parts(transform(cut, length, 1))[:, : length // 2 + 1 if onesided else length])
        y = np.stack(frames, 1)
        given = np.array(length)
        check("STFT", [x, np.array(step), w, given], [y], opset=17, onesided=onesided, rtol=1e-9, atol=1e-12)
        if w is not None:
            check("STFT", [x, np.array(step), w], [y], opset=17, onesided=onesided, rtol=1e-9, atol=1e-12)
        elif length == 16:
            check("STFT", [x, np.array(step)], [y], opset=17, onesided=onesided, rtol=1e-9, atol=1e-12)


def test_stft_refusals(fails):
    x, one = np.zeros((1, 8, 1), np.float32), np.array(1)
    fails("STFT", [x, one, None, np.array(9)], "frame_length must be at most 8", opset=17)
    fails("STFT", [x, np.array(0), None, np.array(4)], "frame_length and frame_step must be at least 1", opset=17)
    fails("STFT", [x, one, x[0, :3, 0], np.array(4)], "must have frame_length 4 values, got 3", opset=17)
    fails("STFT", [x[..., [0, 0]], one, None, np.array(4)], "onesided", opset=17)


WINDOWS = {"HannWindow": (0.5, 0.5, 0.0), "HammingWindow": (25 / 46, 21 / 46, 0.0), "BlackmanWindow": (0.42, 0.5, 0.08)}


@pytest.mark.parametrize("op", WINDOWS)
@pytest.mark.parametrize("periodic", [0, 1])
@pytest.mark.parametrize("size", [0, 1, 2, 9, 10])
def test_windows(check, op, periodic, size):
    a0, a1, a2 = WINDOWS[op]
    n = size + periodic - 1  # the turn; a symmetric window of one value is its peak
    y = [a0 - a1 * math.cos(2 * math.pi * i / n) + a2 * math.cos(4 * math.pi * i / n) if n else a0 + a1 + a2 for i in range(size)]
    types = {1: np.float32, 11: np.float64, 10: np.float16, 16: ml_dtypes.bfloat16, 7: np.int64, 2: np.uint8}
    for code, dtype in types.items():
        whole = np.dtype(dtype).kind in "iu"
        expected = (np.trunc(np.round(y, 12)) if whole else np.array(y)).astype(dtype)
        for kind in (np.int32, np.int64):
            check(op, [np.array(size, kind)], [expected], opset=17, periodic=periodic, output_datatype=code)


@pytest.mark.parametrize("op", WINDOWS)
@pytest.mark.parametrize("target", [7, 8, 9, 11, 16])
def test_windows_as_graphs_of_old_opsets(op, target):
    for code, dtype in {1: np.float32, 11: np.float64, 10: np.float16, 7: np.int64}.items():
        for periodic in (0, 1):
            node = helper.make_node(op, ["n"], ["y"], periodic=periodic, output_datatype=code)
            types = helper.make_tensor_value_info("n", 7, []), helper.make_tensor_value_info("y", code, [None])
            graph = helper.make_graph([node], "g", [types[0]], [types[1]])
            model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
            reps = prepare(model), prepare(convert(read(model), target))
            for size in (0, 1, 2, 9):
                expected, got = (rep.run([np.array(size)])[0] for rep in reps)
                assert got.dtype == expected.dtype == dtype
                np.testing.assert_allclose(got.astype(float), expected.astype(float), rtol=0, atol=2e-3 if code == 10 else 1e-6)


def test_window_refusals(fails):
    fails("HannWindow", [np.array(-1)], "size must be at least 0, got -1", opset=17)
    fails("HannWindow", [np.array(4)], "string", opset=17, output_datatype=8)


@pytest.mark.parametrize(("bins", "length", "rate", "low", "high"), [
    (8, 16, 8192, 0, 4096), (5, 64, 16000, 300, 7000), (20, 9, 8000, 0, 4000), (0, 16, 8192, 0, 4096), (3, 32, 8000, 1000, 6000)
])  # fmt: skip
def test_mel(check, bins, length, rate, low, high):
    low_mel, high_mel = (2595 * math.log10(1 + f / 700) for f in (low, high))
    mels = [low_mel + i * (high_mel - low_mel) / (bins + 2) for i in range(bins + 2)]
    edges = [math.floor((length + 1) * 700 * (10 ** (m / 2595) - 1) / rate) for m in mels]
    edges[0] = math.floor((length + 1) * low / rate)
    y = np.zeros((length // 2 + 1, bins))
    for b in range(bins):
        left, centre, right = edges[b : b + 3]
        for j in range(len(y)):
            if j == centre:
                y[j, b] = 1
            elif left <= j < centre:
                y[j, b] = (j - left) / (centre - left)
            elif centre < j < right:
                y[j, b] = (right - j) / (right - centre)
    ints = [np.array(v, np.int32) for v in (bins, length, rate)]
    floats = [np.array(v, np.float32) for v in (low, high)]
    for code, dtype in ((1, np.float32), (11, np.float64), (10, np.float16), (6, np.int32)):
        check("MelWeightMatrix", [*ints, *floats], [y.astype(dtype)], opset=17, output_datatype=code)


def test_mel_refusals(fails):
    ints = [np.array(v) for v in (4, 16, 8000)]
    fails("MelWeightMatrix", [*ints, np.float32(900), np.float32(100)], "mel weights must have", opset=17)
    fails("MelWeightMatrix", [*ints[:2], np.array(0), np.float32(0), np.float32(100)], "mel weights must have", opset=17)
