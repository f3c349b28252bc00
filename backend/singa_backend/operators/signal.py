"""Signal processing: Fourier transforms, windows, the mel scale."""

from __future__ import annotations

import math

import numpy as np
from onnx import TensorProto

from .. import dtypes, limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Declaration, Host, operator
from ._api import Array


def _complex(xp: Xp, x: Array) -> Array:
    """Convert to complex; the last axis holds the real and the imaginary part, or only the real part."""
    return x[..., 0] if x.shape[-1] == 1 else x[..., 0] + 1j * x[..., 1]


def _parts(xp: Xp, z: Array) -> Array:
    return xp.stack([z.real, z.imag], axis=-1)


def _check_signal(x: Array, rank: int) -> None:
    if x.ndim < rank or x.shape[-1] not in (1, 2):
        raise OperatorError(
            f"the last axis of a signal must be 1 (real) or 2 (complex), got shape {tuple(x.shape)}", code="SX404"
        )


@operator("DFT", 20)
def dft(
    xp: Xp, x: Array, dft_length: Host[int] | None = None, axis: Host[int] = -2, *, inverse: int = 0, onesided: int = 0
) -> Array:
    """With onesided, a forward transform returns the non-redundant half of the spectrum; an inverse one takes it."""
    _check_signal(x, 2)
    if not -x.ndim <= axis < x.ndim - 1 or axis == -1:
        raise OperatorError(f"axis must be in [{-x.ndim}, -2] or [0, {x.ndim - 2}], got {axis}", code="SX408")
    axis %= x.ndim
    if onesided and x.shape[-1] != (2 if inverse else 1):
        kind = "2 (complex) for the inverse" if inverse else "1 (real) for the forward"
        raise OperatorError(f"with onesided, the last axis must be {kind} transform, got {x.shape[-1]}", code="SX404")
    length = x.shape[axis]
    n = dft_length if dft_length is not None else 2 * (length - 1) if inverse and onesided else length
    if n < 0 or (n == 0 and length):
        raise OperatorError(f"dft_length must be at least 1, got {n}", code="SX404")
    kept = min(length, n // 2 + 1 if inverse and onesided else n)
    shape = [*x.shape[:-1], 1 if inverse and onesided else 2]
    shape[axis] = n if inverse or not onesided else n // 2 + 1
    limits.admit(shape, np.complex128)
    if 0 in shape or not length:
        return xp.zeros(tuple(shape), x.dtype)
    z = _complex(xp, x[(slice(None),) * axis + (slice(kept),)])
    if not inverse:
        y = _parts(xp, xp.fft.rfft(z, n, axis=axis) if onesided else xp.fft.fft(z, n, axis=axis))
    elif onesided:
        y = xp.fft.irfft(z, n, axis=axis)[..., None]
    else:
        y = _parts(xp, xp.fft.ifft(z, n, axis=axis))
    return y.astype(x.dtype)


@dft.gradient
def dft_back(op: Op, dy: V, x: V, dft_length: V, axis: V, inverse: int, onesided: int) -> V:
    """The transform is linear: its gradient is the conjugate transpose, n times the inverse transform."""
    at = op.Cast(op.Reshape(axis, [1]), to=7)
    length = op.Gather(op.Shape(x), at)
    if dft_length is None:
        n = op.Mul(op.Sub(length, 1), 2) if inverse and onesided else length
    else:
        n = op.Cast(op.Reshape(dft_length, [1]), to=7)
    scale = op.cast(op.Max(n, 1), x)
    scalar = op.Squeeze(n, [0])
    if not inverse:
        g = op.Mul(_transformed(op, dy, scalar, axis, inverse=1), scale)  # onesided: the other half is zero
    elif not onesided:
        g = op.Div(_transformed(op, dy, scalar, axis), scale)
    else:  # each bin but the first and the middle one represents two
        k = op.Range(0, op.Add(op.Div(scalar, 2), 1), 1)
        once = op.Or(op.Equal(k, 0), op.Equal(op.Mul(k, 2), scalar))
        rank = op.rank(x)
        along = op.Where(op.Equal(op.Range(0, rank, 1), op.Mod(at, rank)), -1, 1)
        weight = op.Reshape(op.cast(op.Where(once, 1, 2), x), along)
        g = op.Div(op.Mul(_transformed(op, dy, scalar, axis, onesided=1), weight), scale)
    g = op.Pad(g, op.Concat([0], op.Sub(length, op.Gather(op.Shape(g), at)), axis=0), None, at)  # negative: crop
    return op.Slice(g, [0], op.Shape(x, start=-1), [-1])  # for a real input, the real part


def _transformed(op: Op, x: V, n: V, axis: V | int, inverse: int = 0, onesided: int = 0) -> V:
    """Apply DFT, whose axis is an input in opset 20 or later."""
    if op.opset < 20:
        return op.DFT(x, n, axis=axis, inverse=inverse, onesided=onesided)
    return op.DFT(x, n, axis, inverse=inverse, onesided=onesided)


@operator("DFT", 17)
def dft_17(xp: Xp, x: Array, dft_length: Host[int] | None = None, *, axis: int = 1, inverse: int = 0, onesided: int = 0) -> Array:
    """Before opset 20 the axis is an attribute, by default the first after the batch."""
    return dft(xp, x, dft_length, axis, inverse=inverse, onesided=onesided)


dft_17.gradient(dft_back)


@dft_17.decomposition
def dft_17_decomposition(op: Op, x: V, dft_length: V, axis: int, inverse: int, onesided: int) -> V:
    return op.DFT(x, dft_length, axis, inverse=inverse, onesided=onesided)


@operator("STFT", 17)
def stft(
    xp: Xp,
    signal: Array,
    frame_step: Host[int],
    window: Array | None = None,
    frame_length: Host[int] | None = None,
    *,
    onesided: int = 1,
) -> Array:
    _check_signal(signal, 3)
    if signal.ndim != 3:
        raise OperatorError(f"signal must have shape batch x length x 1 or 2, got {tuple(signal.shape)}", code="SX404")
    if onesided and signal.shape[-1] == 2:
        raise OperatorError("onesided must be 0 for a complex signal", code="SX404")
    if window is not None and window.ndim != 1:
        raise OperatorError(f"the window must have one axis, got shape {tuple(window.shape)}", code="SX404")
    batch, length = signal.shape[:2]
    n = frame_length if frame_length is not None else length if window is None else window.shape[0]
    if window is not None and window.shape[0] != n:
        raise OperatorError(f"the window must have frame_length {n} values, got {window.shape[0]}", code="SX404")
    if n < 1 or frame_step < 1:
        raise OperatorError(f"frame_length and frame_step must be at least 1, got {n} and {frame_step}", code="SX404")
    if n > length:
        raise OperatorError(f"frame_length must be at most {length}, the length of the signal, got {n}", code="SX404")
    bins = n // 2 + 1 if onesided else n
    frames = (length - n) // frame_step + 1
    if not batch:
        return xp.zeros((0, frames, bins, 2), signal.dtype)
    limits.admit((batch, frames, n), np.complex128)
    cut = xp.windows(_complex(xp, signal), n, 1)[:, ::frame_step]
    if window is not None:
        cut = cut * window
    spectrum = xp.fft.rfft(cut, n, axis=-1) if onesided else xp.fft.fft(cut, n, axis=-1)
    return _parts(xp, spectrum).astype(signal.dtype)


@stft.decomposition
def stft_decomposition(op: Op, signal: V, frame_step: V, window: V, frame_length: V, onesided: int) -> V:
    """Gather, weight and transform overlapping frames."""
    length = op.Shape(signal, start=1, end=2)
    step = op.Cast(op.Reshape(frame_step, [1]), to=7)
    if frame_length is not None:
        n = op.Cast(op.Reshape(frame_length, [1]), to=7)
    else:
        n = length if window is None else op.Shape(window)
    count = op.Add(op.Div(op.Sub(length, n), step), 1)
    starts, within = (op.Range(0, op.Squeeze(v, [0]), 1) for v in (count, n))
    frames = op.Gather(signal, op.Add(op.Unsqueeze(op.Mul(starts, step), [1]), within), axis=1)
    if window is not None:
        frames = op.Mul(frames, op.Unsqueeze(window, [1]))
    return _transformed(op, frames, None, 2, onesided=onesided)


# --- windows --------------------------------------------------------------------------------------------------------


def _typed(xp: Xp, y: np.ndarray, code: int) -> Array:
    dtype = dtypes.numpy_dtype(code)
    if dtype not in dtypes.HALVES and (dtype.kind not in "iuf" or dtype in dtypes.HOST_ONLY):
        raise OperatorError(f"output_datatype must be a type of this operator, got {dtypes.onnx_name(dtype)}", code="SX404")
    if dtype.kind in "iu":
        y = np.round(y, 12)  # the peak of Blackman's window, 0.42 + 0.5 + 0.08, is 1 and not 0.999...
    return xp.cast(xp.asarray(y), dtype)


def _window(xp: Xp, size: int, periodic: int, code: int, a0: float, a1: float, a2: float) -> Array:
    """Compute a0 - a1 cos t + a2 cos 2t over one period; the last value of a symmetric window equals the first."""
    if size < 0:
        raise OperatorError(f"size must be at least 0, got {size}", code="SX404")
    limits.admit((size,), np.float64)
    turn = size if periodic else size - 1
    if turn == 0:  # a symmetric window of one value is 1, the peak
        return _typed(xp, np.ones(size), code)
    t = 2 * np.pi * np.arange(size) / turn
    return _typed(xp, a0 - a1 * np.cos(t) + a2 * np.cos(2 * t), code)


_HANN, _HAMMING, _BLACKMAN = (0.5, 0.5, 0.0), (25 / 46, 21 / 46, 0.0), (0.42, 0.5, 0.08)


@operator("HannWindow", 17)
def hann_window(xp: Xp, size: Host[int], *, output_datatype: int = 1, periodic: int = 1) -> Array:
    return _window(xp, size, periodic, output_datatype, *_HANN)


@operator("HammingWindow", 17)
def hamming_window(xp: Xp, size: Host[int], *, output_datatype: int = 1, periodic: int = 1) -> Array:
    return _window(xp, size, periodic, output_datatype, *_HAMMING)


@operator("BlackmanWindow", 17)
def blackman_window(xp: Xp, size: Host[int], *, output_datatype: int = 1, periodic: int = 1) -> Array:
    return _window(xp, size, periodic, output_datatype, *_BLACKMAN)


def _as_graph(declared: Declaration, a0: float, a1: float, a2: float) -> None:
    """Declare the decomposition in doubles: ONNX's function bodies use floats, and for integers their peak is 0."""
    declared.no_gradient("constant")

    @declared.decomposition
    def declared_decomposition(op: Op, size: V, output_datatype: int, periodic: int) -> V:
        count = op.Cast(op.Reshape(size, op.constant([], np.int64)), to=int(TensorProto.INT64))
        last = op.Cast(count if periodic else op.Sub(count, 1), to=int(TensorProto.DOUBLE))
        angle = op.Mul(op.Cast(op.Range(0, count, 1), to=int(TensorProto.DOUBLE)), 2 * np.pi)
        turn = op.Div(angle, op.Max(last, 1.0))
        y = op.Sub(a0, op.Mul(op.Cos(turn), a1))
        if a2:
            y = op.Add(y, op.Mul(op.Cos(op.Mul(turn, 2.0)), a2))
        if not periodic:  # a window of one value is 1; Where came with opset 9
            y = op.Add(y, op.Mul(op.Cast(op.Equal(count, 1), to=int(TensorProto.DOUBLE)), 1.0 - (a0 - a1 + a2)))
        if dtypes.numpy_dtype(output_datatype).kind in "iu":
            y = op.Add(y, 1e-12)  # `_typed` rounds instead: the peak must not become 0
        return op.Cast(y, to=output_datatype)


_as_graph(hann_window, *_HANN)
_as_graph(hamming_window, *_HAMMING)
_as_graph(blackman_window, *_BLACKMAN)


# --- the mel scale --------------------------------------------------------------------------------------------------


@operator("MelWeightMatrix", 17)
def mel_weight_matrix(
    xp: Xp,
    num_mel_bins: Host[int],
    dft_length: Host[int],
    sample_rate: Host[int],
    lower_edge_hertz: Host[float],
    upper_edge_hertz: Host[float],
    *,
    output_datatype: int = 1,
) -> Array:
    """Return triangles over the bins of a onesided DFT.

    Their edges are spaced by `num_mel_bins` + 2 equal steps of the mel scale; as in ONNX's test case, the last one is one
    step below the upper edge.
    """
    if num_mel_bins < 0 or dft_length < 0 or sample_rate < 1 or not 0 <= lower_edge_hertz <= upper_edge_hertz < math.inf:
        edges = f"{lower_edge_hertz} to {upper_edge_hertz} Hz, sample_rate {sample_rate}"
        got = f"{num_mel_bins} bins, dft_length {dft_length}, {edges}"
        raise OperatorError(f"mel weights must have non-negative sizes and ordered, finite edges, got {got}", code="SX404")
    limits.admit((dft_length // 2 + 1, num_mel_bins + 2), np.float64)
    low, high = (2595 * math.log10(1 + f / 700) for f in (lower_edge_hertz, upper_edge_hertz))
    mel = low + np.arange(num_mel_bins + 2) * (high - low) / (num_mel_bins + 2)
    hertz = 700 * (10 ** (mel / 2595) - 1)
    hertz[0] = lower_edge_hertz
    bins = (dft_length + 1) * hertz // sample_rate
    left, centre, right = bins[:-2], bins[1:-1], bins[2:]
    j = np.arange(dft_length // 2 + 1)[:, None]
    rising = (j - left) / np.maximum(centre - left, 1)
    falling = (right - j) / np.maximum(right - centre, 1)
    y = np.where((left <= j) & (j <= centre), rising, np.where((centre < j) & (j < right), falling, 0.0))
    return _typed(xp, np.where(j == centre, 1.0, y), output_datatype)


mel_weight_matrix.no_gradient("zero: the edges are rounded to bins")
