"""Operators of SINGA's API as functions and classes on tensors, and their gradients.

    y = autograd.leakyrelu(x, a=0.1)              a function returns a Tensor (split: a tuple of Tensors)
    y = autograd.LeakyRelu(0.1)(x)[0]             a class takes the arguments that are not tensors; calling it returns a tuple

Each operator is a formula in ONNX operators, so the tape contains ONNX nodes only.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from singa_backend.devices.device import device_of

from . import layer
from ._autograd import composites, dropouts, elementwise, handles, indices, losses, products, reductions, shapes
from ._autograd.composites import *  # noqa: F403
from ._autograd.dropouts import *  # noqa: F403
from ._autograd.elementwise import *  # noqa: F403
from ._autograd.formula import Formula
from ._autograd.handles import *  # noqa: F403
from ._autograd.handles import RNNHandle
from ._autograd.indices import *  # noqa: F403
from ._autograd.losses import *  # noqa: F403
from ._autograd.products import *  # noqa: F403
from ._autograd.reductions import *  # noqa: F403
from ._autograd.shapes import *  # noqa: F403
from ._core import node, tape
from ._core.backward import backward, gradients, infer_dependency
from ._core.tape import Dummy, Operation, Operator
from ._core.tensor import Tensor as Tensor

sys.modules[__name__].__class__ = tape.ModeModule

__all__ = [
    "Dummy",
    "Formula",
    "Operation",
    "Operator",
    "axis_helper",
    "back_broadcast",
    "backward",
    "ctensor2numpy",
    "gradients",
    "infer_dependency",
    *composites.__all__,
    *dropouts.__all__,
    *elementwise.__all__,
    *handles.__all__,
    *indices.__all__,
    *losses.__all__,
    *products.__all__,
    *reductions.__all__,
    *shapes.__all__,
]

# --- for custom operators ---------------------------------------------------------------------------------------------


def axis_helper(y_shape: Sequence[int], x_shape: Sequence[int]) -> tuple[int, ...]:
    """The axes along which broadcasting expands a shape.

    Args:
        y_shape: The broadcast shape.
        x_shape: The shape before broadcasting, of at most as many axes.

    Returns:
        The axes of y_shape that x_shape does not have or has with size 1.
    """
    more = len(y_shape) - len(x_shape)
    return (*range(more), *(more + i for i, n in enumerate(x_shape) if n == 1 and y_shape[more + i] != 1))


def back_broadcast(y_shape: Sequence[int], x_shape: Sequence[int], x: Any) -> Any:
    """Sum an array over the axes along which broadcasting expanded it: the gradient of broadcasting.

    Args:
        y_shape: The broadcast shape, that of x.
        x_shape: The shape before broadcasting, of at most as many axes.
        x: The array, usually the gradient of the broadcast result.

    Returns:
        The array of shape x_shape, of the dtype of x; x itself if the shapes are equal.
    """
    if tuple(y_shape) == tuple(x_shape):
        return x
    axes = axis_helper(y_shape, x_shape)
    return x.sum(axis=axes, keepdims=True).reshape(tuple(x_shape))


def ctensor2numpy(x: Any) -> np.ndarray:
    """Copy the values of a tensor, or of its `.data`, to the host.

    Args:
        x: Tensor, or an array of NumPy or of a device.

    Returns:
        A NumPy array of the shape and dtype of x.
    """
    return np.array(x.device.backend.get(x.data) if isinstance(x, Tensor) else device_of(x).get(x))


class _RNN(Operator):
    """Recurrent layers over a batch of sequences, with all weights in one vector: the operator of `layer.CudnnRNN`.

    `_RNN(handle)(x, hx, cx, W)` takes the inputs (time, N, features), the initial states (layers * directions, N, hidden) and
    the weights in the order of `layer.CudnnRNN`, and returns the outputs in a tuple; for modes other than "lstm", cx is not
    used.

    Args:
        handle: The attributes.
        return_sequences: Whether all outputs are returned; otherwise the last one of each sequence.
        use_mask: Whether the sequences have different lengths.
        seq_lengths: With `use_mask`, the lengths of the sequences, an integer Tensor of shape (N,).
    """

    def __init__(
        self, handle: RNNHandle, return_sequences: bool = True, use_mask: bool = False, seq_lengths: Tensor | None = None
    ) -> None:
        super().__init__()
        self.handle, self.return_sequences, self.use_mask, self.seq_lengths = handle, return_sequences, use_mask, seq_lengths

    def __call__(self, *xs: Tensor) -> tuple[Tensor, ...]:
        x, hx, cx, W = xs
        h = self.handle
        made = layer.CudnnRNN(
            h.hidden_size, "tanh", h.num_layers, h.bias, False, h.dropout, h.bidirectional, h.mode, self.use_mask,
            self.return_sequences,
        )  # fmt: skip
        made.input_size = int(x.shape[2])
        made.W = W
        start = node.start_of_call()
        y = made.forward(x, hx, cx, self.seq_lengths)
        node.end_of_call(start, xs, [y])
        return (y,)


_LAYERS = ("Linear", "Conv2d", "SeparableConv2d", "BatchNorm2d", "Pooling2d", "MaxPool2d", "AvgPool2d", "MaxPool1d", "AvgPool1d",
           "RNN_Base", "RNN", "LSTM")  # fmt: skip


def __getattr__(name: str) -> Any:
    """The layers that older SINGA programs take from this module."""
    if name in _LAYERS:
        return getattr(layer, name)
    raise AttributeError(f"module 'singa.autograd' has no attribute {name!r}")
