"""Fourier transforms of real signals; the last axis has the real and the imaginary part."""

from __future__ import annotations

import numpy as np

from ...errors import OperatorError
from ._api import Array, Op, V, Xp, microsoft


def _check(x: Array, parts: int, signal_ndim: int, normalized: int, onesided: int) -> None:
    """Raise OperatorError for what the operators do not have; `parts` is 1 if the last axis has two parts."""
    if normalized or not onesided:
        raise OperatorError(f"normalized must be 0 and onesided 1, got {normalized} and {onesided}", code="SX404")
    if not 1 <= signal_ndim <= min(3, x.ndim - parts):
        raise OperatorError(
            f"signal_ndim must be in [1, 3] and at most the {x.ndim - parts} axes of a signal, got {signal_ndim}", code="SX404"
        )
    if parts and x.shape[-1] != 2:
        raise OperatorError(f"the last axis must hold the real and the imaginary part, got shape {x.shape}", code="SX404")
    if 0 in x.shape[-parts - signal_ndim :]:
        raise OperatorError(f"the axes of a signal must not be empty, got shape {x.shape}", code="SX404")


@microsoft("Rfft", 1)
def rfft(op: Op, x: V, *, normalized: int = 0, onesided: int = 1, signal_ndim: int = 1) -> V:
    """Transform the last signal_ndim axes; of the last one, n // 2 + 1 frequencies are kept."""
    y = op.DFT(op.Unsqueeze(x, [-1]), None, -2, onesided=1)
    for axis in range(-2 - signal_ndim + 1, -2):
        y = op.DFT(y, None, axis)
    return y


@rfft.accepts
def rfft_accepts(x: Array, normalized: int, onesided: int, signal_ndim: int) -> None:
    _check(x, 0, signal_ndim, normalized, onesided)


@microsoft("Irfft", 1)
def irfft(xp: Xp, x: Array, *, normalized: int = 0, onesided: int = 1, signal_ndim: int) -> Array:
    """Compute the inverse of Rfft for an even number of values, 2 (m - 1) for m frequencies."""
    _check(x, 1, signal_ndim, normalized, onesided)
    if x.shape[-2] < 2:
        raise OperatorError(f"a signal must have 2 frequencies or more, got {x.shape[-2]}", code="SX404")
    z = x[..., 0] + 1j * x[..., 1]
    return xp.fft.irfftn(z, axes=tuple(range(-signal_ndim, 0))).astype(x.dtype)


@irfft.decomposition
def irfft_body(op: Op, x: V, signal_ndim: int) -> V:
    """The frequencies that are left out are the conjugates of the others."""
    for axis in range(-2 - signal_ndim + 1, -2):
        x = op.DFT(x, None, axis, inverse=1)
    others = op.Slice(x, [-2], [0], [-2], [-1])  # without the first and the last
    conjugate = op.Mul(others, op.cast(op.constant([1.0, -1.0], np.float32), x))
    whole = op.DFT(op.Concat(x, conjugate, axis=-2), None, -2, inverse=1)
    return op.Squeeze(op.Slice(whole, [0], [1], [-1]), [-1])
