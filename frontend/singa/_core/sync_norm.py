"""BatchNormalization with the statistics of the samples of all processes that train together.

Each process computes the mean and the variance of its own samples, as a BatchNormalization does, and their number; one sum over
the processes collects them, and they are combined as Chan, Golub and LeVeque do.  The gradient of that sum is the sum of the
gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.interpreters.base import Interpreter
from singa_backend.proto.schemas import SINGA_DOMAIN

from ..device import Device
from . import tape, trace
from .tensor import Tensor, op


@dataclass
class SyncGroup:
    """The processes whose samples a step normalizes together.

    Attributes:
        number: The number of their communicator in this process.
        size: The number of processes.
        rank: The number of this one.
        has_samples: Whether the batch of this process counts; otherwise this process has no sample of its own.
    """

    number: int
    size: int
    rank: int
    has_samples: bool = True


_current: ContextVar[SyncGroup | None] = ContextVar("sync_group", default=None)


def current() -> SyncGroup | None:
    """The processes that normalize together in this step, or None."""
    trace.depends(_current, _current.get)
    return _current.get()


@contextlib.contextmanager
def together(group: SyncGroup | None) -> Iterator[None]:
    """The context of a step whose BatchNormalizations use the samples of a group; None for those of this process."""
    token = _current.set(group)
    try:
        yield
    finally:
        _current.reset(token)


class _Sum(tape.Operator):
    """The sum of a tensor over a group; its gradient is the sum of the gradients."""

    def __init__(self, group: SyncGroup) -> None:
        super().__init__()
        self._group = group

    def of(self, x: Tensor) -> Tensor:
        """The sum, on the tape."""
        with tape.no_tape():
            value = self._summed(op, x).raw
        (y,) = self.record([x], [value], x.device)
        made: Tensor = y
        return made

    def _summed(self, values: Interpreter[Any], x: Any) -> Any:
        ticket = values.AllReduceStart(x, communicator=self._group.number, domain=SINGA_DOMAIN)
        return values.AllReduceDone(x, ticket, domain=SINGA_DOMAIN)

    def _backward(self, dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        return [self._summed(tape.vocabulary(device), dys[0])]

    def _backward_recorded(self, op: Interpreter[Any], dys: list[Any], needs: list[bool], device: Device) -> list[Any]:
        return [_Sum(self._group).of(dys[0])]


def batch_normalization(group: SyncGroup, x: Tensor, scale: Tensor, bias: Tensor, epsilon: float) -> tuple[Tensor, ...]:
    """Normalize a batch by channel with the statistics of all processes.

    Args:
        group: The processes.
        x: The samples of this process, of shape (N, C, ...).
        scale: The factor of each channel.
        bias: The summand of each channel.
        epsilon: Added to the variance.

    Returns:
        (the result, the mean and the population variance of each channel, the number of values of a channel), of all samples.
    """
    wide = op.Cast(x, to=dtypes.onnx_code(np.float32)) if op.dtype(x).itemsize < 4 else x
    channels = int(x.shape[1])
    zero, one = (op.constant(np.full(channels, n), op.dtype(wide)) for n in (0, 1))
    _, own, spread = op.BatchNormalization(wide, one, zero, zero, one, epsilon=epsilon, momentum=0.0, training_mode=1, outputs=3)
    each = math.prod(x.shape) // channels
    length = 2 * channels + 1
    count = op.constant(np.array([each if group.has_samples else 0]), op.dtype(own))
    mine = op.Concat(own, spread, count, axis=0)
    place = op.Pad(mine, [group.rank * length, (group.size - 1 - group.rank) * length])
    all_ranks = op.Reshape(_Sum(group).of(place), [group.size, length])
    means, variances, counts = op.Split(all_ranks, [channels, channels, 1], axis=1, outputs=3)
    total = op.ReduceSum(counts, keepdims=0)
    shares = op.Div(counts, total)
    mean = op.ReduceSum(op.Mul(means, shares), [0], keepdims=0)
    apart = op.Sub(means, mean)
    variance = op.ReduceSum(op.Mul(op.Add(variances, op.Mul(apart, apart)), shares), [0], keepdims=0)
    y = op.BatchNormalization(x, scale, bias, op.cast(mean, scale), op.cast(variance, scale), epsilon=epsilon)
    return y, mean, variance, total
