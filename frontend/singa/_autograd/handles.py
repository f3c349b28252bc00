"""Convolution, pooling and batch normalization by a handle that says how they go; `autograd` offers them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .._core import tape, trace
from .._core.tensor import Tensor, op

__all__ = ["BatchNormHandle", "ConvHandle", "PoolingHandle", "batchnorm_2d", "conv2d", "pooling_2d"]


@dataclass
class ConvHandle:
    """How a convolution goes: strides, ONNX's pads (all begins, then all ends), dilations, groups."""

    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)
    group: int = 1


@dataclass
class BatchNormHandle:
    """factor: the weight of the new batch in the running statistics; epsilon: what is added to the variance.

    unbiased: whether the running variance is that of a sample, divided by n - 1, or that of the population, as ONNX has it.
    """

    factor: float = 0.9
    epsilon: float = 1e-5
    unbiased: bool = True


@dataclass
class PoolingHandle:
    """How a pooling goes: the window, its strides, ONNX's pads, and whether the maximum or the mean is taken."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...] = (0, 0, 0, 0)
    is_max: bool = True


def conv2d(
    handle: ConvHandle, x: Tensor, W: Tensor, b: Tensor | None = None, odd_padding: Sequence[int] = (0, 0, 0, 0)
) -> Tensor:
    """x (N, C, H, W) convolved with filters (M, C / group, kh, kw), plus b (M,); odd_padding is top, bottom, left, right."""
    pads = _odd(handle.pads, odd_padding)
    return op.Conv(x, W, b, strides=handle.strides, pads=pads, dilations=handle.dilations, group=handle.group)


def pooling_2d(handle: PoolingHandle, x: Tensor, odd_padding: Sequence[int] = (0, 0, 0, 0)) -> Tensor:
    """The maximum or the mean of windows of x (N, C, H, W); padding never wins and never counts."""
    pool = op.MaxPool if handle.is_max else op.AveragePool
    return pool(x, kernel_shape=handle.kernel, strides=handle.strides, pads=_odd(handle.pads, odd_padding))


def _odd(pads: Sequence[int], odd: Sequence[int]) -> list[int]:
    top, bottom, left, right = odd  # as `utils.get_padding_shape` gives it: axis by axis
    return [p + o for p, o in zip(pads, (top, left, bottom, right), strict=True)]


def batchnorm_2d(
    handle: BatchNormHandle, x: Tensor, scale: Tensor, bias: Tensor, running_mean: Tensor, running_var: Tensor
) -> Tensor:
    """x normalized by channel: in training with the statistics of the batch, which then enter the running ones.

    running = (1 - factor) running + factor batch, with the variance that the handle asks for.
    """
    values = (x, scale, bias, running_mean, running_var)
    if not tape.training:
        return op.BatchNormalization(*values, epsilon=handle.epsilon)
    y, mean, variance = op.BatchNormalization(*values, epsilon=handle.epsilon, momentum=0.0, training_mode=1, outputs=3)
    with tape.no_tape():
        if handle.unbiased:
            n = op.cast(op.Div(op.Size(x), op.Size(mean)), mean)
            variance = op.Mul(variance, op.Div(n, op.Max(op.Sub(n, 1), 1)))
        for running, batch in ((running_mean, mean), (running_var, variance)):
            new = op.Add(op.Mul(running, 1 - handle.factor), op.Mul(batch, handle.factor))
            trace.assign(running, op.cast(new, running).raw, invalidates_tape=False)
    return y
