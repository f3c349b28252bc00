"""Random tensors from a counter-based generator: the same bits on every device, with and without recording a step.

Each draw reads the state of a stream, two numbers (the seed and the number of draws so far), and increments the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.proto.schemas import SINGA_DOMAIN

from ..device import Device, default_device
from . import provenance, tape, trace
from .ops import op
from .variable import Variable, of


def stream(device: Device) -> Any:
    """The state of this thread's stream of a device: the seed and the number of draws so far, an int64 Tensor on the host."""
    here = device._stream
    if here.state is None:
        state = of(np.array([here.seed, 0], np.int64), default_device, False)
        state.name = "random_state"
        here.state = state
    return here.state


def get_state(device: Device) -> np.ndarray:
    """A copy of the state of this thread's stream of a device: int64, the seed and the number of draws so far."""
    return np.array(stream(device)._data)


def set_state(device: Device, state: np.ndarray) -> None:
    """Continue this thread's stream of a device at a state of `get_state`."""
    device.SetRandSeed(int(state[0]))
    trace.assign(stream(device), np.asarray(state, np.int64))


def _bits(shape: Any, device: Device) -> Any:
    """Draw uint32 words; `shape` is a Tensor of int64, or sizes."""
    with tape.no_tape(), device._stream.lock:
        state = stream(device)
        trace.depends(state, lambda: id(device.random_state))  # another thread may have another stream
        if isinstance(shape, Variable) and trace.current() is None:
            shape = np.asarray(shape).tolist()  # the state is on the host, so the shape must be too
        sizes = shape if isinstance(shape, Variable) else op.constant(list(shape), np.int64)
        words = op.Philox(state, sizes, domain=SINGA_DOMAIN)
        trace.assign(state, op.Add(state, [0, 1]).raw)
    drawn = words.raw if trace.current() is not None else device.backend.put(words.raw)
    return of(drawn, device, False)


def uniform(shape: Any, device: Device | None = None, dtype: dtypes.DTypeLike = np.float32) -> Any:
    """Draw numbers in [0, 1): multiples of 2**-24 in float32 and narrower types, of 2**-53 in float64.

    Args:
        shape: The sizes, or a Tensor of int64.
        device: The device; None for the CPU.
        dtype: The dtype of the result.
    """
    device = device or default_device
    with tape.no_tape():
        if np.dtype(dtype) != np.float64:
            high = op.Cast(op.Div(op.Cast(_bits(shape, device), to=_code(np.int64)), 1 << 8), to=_code(np.float32))
            return op.Cast(op.Mul(high, 2.0**-24), to=_code(dtype))
        sizes = shape if isinstance(shape, Variable) else op.constant(list(shape), np.int64)
        pairs = op.Cast(_bits(op.Concat(sizes, [2], axis=0), device), to=_code(np.int64))
        high, low = op.Gather(pairs, 0, axis=-1), op.Gather(pairs, 1, axis=-1)
        whole = op.Add(op.Mul(op.Div(high, 1 << 5), 1 << 26), op.Div(low, 1 << 6))  # 27 bits and 26
        return op.Mul(op.Cast(whole, to=_code(np.float64)), 2.0**-53)


def bernoulli(p: float, shape: Any, device: Device | None = None, dtype: dtypes.DTypeLike = np.float32) -> Any:
    """Draw ones with probability p, and zeros."""
    with tape.no_tape():
        return op.Cast(op.Less(uniform(shape, device), np.float32(p)), to=_code(dtype))


def normal(
    mean: float, std: float, shape: Sequence[int], device: Device | None = None, dtype: dtypes.DTypeLike = np.float32
) -> Any:
    """Draw normally distributed numbers by the Box-Muller method in float64, rounded once to the dtype.

    r = sqrt(-2 log(1 - u)) cos(2 pi v), with uniform float64 numbers u and v.
    """
    with tape.no_tape():
        sizes = op.constant([2, *shape], np.int64)
        both = uniform(sizes, device, np.float64)
        u, v = op.Gather(both, 0, axis=0), op.Gather(both, 1, axis=0)
        radius = op.Sqrt(op.Mul(op.Log(op.Sub(1, u)), -2.0))
        drawn = op.Mul(radius, op.Cos(op.Mul(v, 2 * math.pi)))
        return op.Cast(op.Add(op.Mul(drawn, float(std)), float(mean)), to=_code(dtype))


def dropout(x: Variable, ratio: Any) -> tuple[Any, Any]:
    """Dropout: set elements to 0 with probability `ratio`, and divide the others by 1 - ratio.

    Args:
        x: Tensor of a float dtype.
        ratio: A number, or a Tensor of one element.

    Returns:
        (the result, the mask of the elements that were kept).
    """
    with tape.no_tape():
        drawn = uniform(op.Shape(x), x.device)
        share: Any
        grown: Any
        if isinstance(ratio, Variable):
            share, grown = op.cast(ratio, drawn), op.Div(1, op.Sub(1, op.cast(ratio, x)))
        else:
            share, grown = np.float32(ratio), 1 / (1 - ratio) if ratio < 1 else 0.0
        mask = op.Not(op.Less(drawn, share))
    y = op.Mul(x, op.Mul(op.cast(mask, x), grown))
    provenance.record([y, mask], "Dropout", _replay_dropout, [x, ratio])
    return y, mask


def _replay_dropout(xs: list[Any], training: bool) -> Any:
    """Replay as ONNX Dropout in training; otherwise return the input and a mask of ones."""
    x, ratio = xs
    if not training:
        return [x, op.Cast(op.full_like(x, 1), to=_code(np.bool_))]
    share = ratio if isinstance(ratio, Variable) else op.constant(ratio, np.float32)
    return op.Dropout(x, share, True, outputs=2)


def _code(dtype: dtypes.DTypeLike) -> int:
    return dtypes.onnx_code(dtype)
