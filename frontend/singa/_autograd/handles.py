"""Convolution, pooling and batch normalization, with a handle for their attributes; the public module is `autograd`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core import sync_norm, tape, trace
from .._core.tensor import Tensor
from .._core.tensor import op as recorder
from .formula import TensorOp, formula, known_shape

__all__ = ["BatchNormHandle", "ConvHandle", "PoolingHandle", "RNNHandle"]


@dataclass
class ConvHandle:
    """The attributes of a convolution, as ONNX Conv defines them.

    Args:
        strides: The step of the window along each spatial axis.
        pads: The zeros before each spatial axis, then those after each.
        dilations: The distance between the elements of a filter along each spatial axis.
        group: The number of groups that the channels are divided into.
        kernel: The size of the window along each spatial axis; None if only the filters specify it.
    """

    strides: tuple[int, ...] = (1, 1)
    pads: tuple[int, ...] = (0, 0, 0, 0)
    dilations: tuple[int, ...] = (1, 1)
    group: int = 1
    kernel: tuple[int, ...] | None = None


@dataclass
class BatchNormHandle:
    """The attributes of a batch normalization.

    Args:
        factor: The weight of the new batch in the running statistics, 1 - ONNX's momentum.
        epsilon: The number that is added to the variance.
        unbiased: Whether the running variance is that of a sample, divided by n - 1, or of the population, as ONNX defines it.
    """

    factor: float = 0.9
    epsilon: float = 1e-5
    unbiased: bool = True


@dataclass
class PoolingHandle:
    """The attributes of a pooling, as ONNX MaxPool and AveragePool define them.

    Args:
        kernel: The size of the window along each spatial axis.
        strides: The step of the window along each spatial axis.
        pads: The padding before each spatial axis, then that after each.
        is_max: Whether the maximum of a window is taken, or its mean.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...] = (0, 0, 0, 0)
    is_max: bool = True


@dataclass
class RNNHandle:
    """The attributes of the recurrent layers of `_RNN`, which are those of `layer.CudnnRNN`.

    Args:
        hidden_size: The number of features of the hidden state.
        mode: "vanilla" or "tanh", "relu", "lstm", or "gru".
        num_layers: The number of layers, each of which takes the outputs of the one before.
        dropout: The probability that an element of the inputs of the second and later layers is set to 0 in training.
        bidirectional: Whether a second direction runs from the last time step to the first.
        bias: Whether biases are added.
    """

    hidden_size: int
    mode: str = "lstm"
    num_layers: int = 1
    dropout: float = 0.0
    bidirectional: bool = False
    bias: bool = True


@formula("_Conv2d", "handle", "x", "W", "b", "odd_padding")
def conv2d(
    op: TensorOp, x: Any, W: Any, b: Any = None, *, handle: ConvHandle, odd_padding: Sequence[int] = (0, 0, 0, 0)
) -> Tensor:
    """Convolve x with filters.

    Source: ONNX Conv.

    Args:
        handle: The attributes.
        x: Tensor of a float dtype, shape (N, C, H, W).
        W: The filters: Tensor of the dtype of x, shape (M, C / group, kh, kw).
        b: Tensor of the dtype of x, shape (M,), which is added to each channel; None for no bias.
        odd_padding: Zeros to add to the pads of the handle: top, bottom, left, right.

    Returns:
        Tensor of shape (N, M, H', W'), of the dtype of x.

    Raises:
        InvalidInput: The inputs are on different devices.
        OperatorError: The shapes do not fit, or the dtypes differ.
    """
    pads = _odd(handle.pads, odd_padding)
    return op.Conv(x, W, b, strides=handle.strides, pads=pads, dilations=handle.dilations, group=handle.group)


@formula("_Pooling2d", "handle", "x", "odd_padding")
def pooling_2d(op: TensorOp, x: Any, *, handle: PoolingHandle, odd_padding: Sequence[int] = (0, 0, 0, 0)) -> Tensor:
    """The maximum or the mean of windows of x.

    Padding is never the maximum and does not count in the mean.  Source: ONNX MaxPool, or AveragePool with count_include_pad 0.

    Args:
        handle: The attributes.
        x: Tensor of a float dtype, shape (N, C, H, W).
        odd_padding: Padding to add to the pads of the handle: top, bottom, left, right.

    Returns:
        Tensor of shape (N, C, H', W'), of the dtype of x.

    Raises:
        OperatorError: The window does not fit the shape of x.
    """
    pool = op.MaxPool if handle.is_max else op.AveragePool
    return pool(x, kernel_shape=handle.kernel, strides=handle.strides, pads=_odd(handle.pads, odd_padding))


def _odd(pads: Sequence[int], odd: Sequence[int]) -> list[int]:
    top, bottom, left, right = odd  # axis by axis, as `utils.get_padding_shape` returns it
    return [p + o for p, o in zip(pads, (top, left, bottom, right), strict=True)]


@formula("_BatchNorm2d", "handle", "x", "scale", "bias", "running_mean", "running_var")
def batchnorm_2d(
    op: TensorOp, x: Any, scale: Any, bias: Any, *, handle: BatchNormHandle, running_mean: Tensor, running_var: Tensor
) -> Tensor:
    """Normalize x by channel: in training with the statistics of the batch, in inference with the running ones.

    Training updates the running statistics in place: running = (1 - factor) running + factor batch, with the variance that the
    handle specifies.  Source: ONNX BatchNormalization.

    Args:
        handle: The attributes.
        x: Tensor of a float dtype, shape (N, C, ...).
        scale: Tensor of shape (C,), the factor of each channel.
        bias: Tensor of shape (C,), the summand of each channel.
        running_mean: Tensor of shape (C,).
        running_var: Tensor of shape (C,).

    Returns:
        Tensor of the shape and dtype of x.

    Raises:
        InvalidInput: The inputs are on different devices.
        OperatorError: The shapes do not fit.
    """
    means = (running_mean, running_var) if isinstance(x, Tensor) else (running_mean.data, running_var.data)
    if not tape.training:
        return op.BatchNormalization(x, scale, bias, *means, epsilon=handle.epsilon)
    group = sync_norm.current()
    if group is not None and isinstance(x, Tensor):
        y, mean, variance, count = sync_norm.batch_normalization(group, x, scale, bias, handle.epsilon)
        with tape.no_tape():
            _update(
                handle,
                recorder.Mul(count, recorder.cast(recorder.Size(mean), count)),
                running_mean,
                running_var,
                (mean, variance),
            )
        return y
    y, *batch = op.BatchNormalization(x, scale, bias, *means, epsilon=handle.epsilon, momentum=0.0, training_mode=1, outputs=3)
    with tape.no_tape():
        size = op.Size(x) if trace.current() is not None else math.prod(known_shape(op, x))
        _update(handle, size, running_mean, running_var, batch)
    return y


def _update(handle: BatchNormHandle, size: Any, running_mean: Tensor, running_var: Tensor, batch: Sequence[Any]) -> None:
    """Move the running statistics, in place, towards those of a batch with this number of elements, an int or a Tensor."""
    op = recorder
    mean, variance = (v if isinstance(v, Tensor) else Tensor._of(v.raw, running_mean.device, False) for v in batch)
    if handle.unbiased and isinstance(size, int):  # nothing is recorded: no operator needs to compute with sizes
        dtype = mean.data.dtype
        each, one = np.array(size // max(1, math.prod(mean.shape)), dtype), np.array(1, dtype)
        variance = op.Mul(variance, float(each / np.maximum(each - one, one)))
    elif handle.unbiased:
        count = size if isinstance(size, Tensor) else Tensor._of(size.raw, running_mean.device, False)
        n = op.cast(op.Div(count, op.cast(op.Size(mean), count)), mean)
        variance = op.Mul(variance, op.Div(n, op.Max(op.Sub(n, 1), 1)))
    for running, found in ((running_mean, mean), (running_var, variance)):
        new = op.Add(op.Mul(running, 1 - handle.factor), op.Mul(found, handle.factor))
        same = trace.current() is None and new.dtype == running.dtype
        trace.assign(running, (new if same else op.cast(new, running)).raw, invalidates_tape=False)
