"""Primitives that multiply with weights: convolutions, products of matrices, recurrent networks."""

from __future__ import annotations

from collections.abc import Sequence

from .constants import CONVOLUTION, DECONVOLUTION, DIRECTION, ELTWISE, PROP
from .loading import needed
from .memory import Attributes, MemoryDesc, code
from .primitives import Primitive, create, window


def convolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    attributes: Attributes | None = None,
    prop: str = "inference",
    algorithm: str = "direct",
    allow_reference: bool = False,
) -> Primitive:
    """A convolution (ONNX's Conv).

    * src: (batch, channels, *sizes).
    * weights: (outputs, channels, *window), or with groups (groups, outputs / groups, channels / groups, *window).
    * bias: (outputs,), or None.
    * dst: (batch, outputs, *sizes).
    * algorithm: "direct", "winograd" or "auto".
    """
    return create(
        "convolution_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(CONVOLUTION, algorithm, "algorithm"),
        src,
        weights,
        bias,
        dst,
        *window(src, dst, strides, dilations, pads_begin, pads_end),
        attributes=attributes,
        allow_reference=allow_reference,
        inputs=(src, weights),
    )


def deconvolution(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    *,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    algorithm: str = "direct",
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A transposed convolution (ONNX's ConvTranspose, whose weights have their first two axes exchanged).

    * src: (batch, channels, *sizes).
    * weights: (outputs, channels, *window), or with groups (groups, outputs / groups, channels / groups, *window).
    * bias: (outputs,), or None.
    * dst: (batch, outputs, *sizes).
    * algorithm: "direct" or "winograd".
    """
    return create(
        "deconvolution_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(DECONVOLUTION, algorithm, "algorithm"),
        src,
        weights,
        bias,
        dst,
        *window(src, dst, strides, dilations, pads_begin, pads_end, kernel=weights.shape[2 - len(src.shape) :], inverse=True),
        attributes=attributes,
        allow_reference=allow_reference,
        inputs=(src, weights),
    )


def matmul(
    src: MemoryDesc,
    weights: MemoryDesc,
    bias: MemoryDesc | None,
    dst: MemoryDesc,
    attributes: Attributes | None = None,
    *,
    allow_reference: bool = False,
) -> Primitive:
    """A product of matrices, or of batches of them (ONNX's MatMul).

    * src: (*batch, m, k).
    * weights: (*batch, k, n); axes of the batch have size 1 where they are broadcast.
    * bias: of the rank of dst, (1, n), or None.
    * dst: (*batch, m, n).
    """
    return create(
        "matmul",
        needed().engine,
        src,
        weights,
        bias,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
        inputs=(src, weights),
    )


def lstm(
    src_layer: MemoryDesc,
    src_iter: MemoryDesc | None,
    src_iter_c: MemoryDesc | None,
    weights_layer: MemoryDesc,
    weights_iter: MemoryDesc,
    bias: MemoryDesc | None,
    dst_layer: MemoryDesc,
    dst_iter: MemoryDesc | None,
    dst_iter_c: MemoryDesc | None,
    *,
    direction: str = "left2right",
    peephole: MemoryDesc | None = None,
    projection: MemoryDesc | None = None,
    attributes: Attributes | None = None,
    prop: str = "inference",
) -> Primitive:
    """An LSTM; its gates have the order input, forget, cell, output (ONNX's: input, output, forget, cell).

    * src_iter_c: the first cells, (1, directions, batch, hidden), or None for 0.
    * weights_layer: (1, directions, inputs, 4, hidden).
    * weights_iter: (1, directions, hidden, 4, hidden).
    * bias: (1, directions, 4, hidden), or None.
    * dst_iter_c: the last cells, or None.
    * peephole: (1, directions, 3, hidden), or None.
    * projection: (1, directions, hidden, outputs), or None.
    """
    return create(
        "lstm_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(DIRECTION, direction, "direction"),
        src_layer,
        src_iter,
        src_iter_c,
        weights_layer,
        weights_iter,
        peephole,
        projection,
        bias,
        dst_layer,
        dst_iter,
        dst_iter_c,
        0,
        attributes=attributes,
        allow_reference=True,
        inputs=(src_layer, weights_layer),
    )


def gru(
    src_layer: MemoryDesc,
    src_iter: MemoryDesc | None,
    weights_layer: MemoryDesc,
    weights_iter: MemoryDesc,
    bias: MemoryDesc | None,
    dst_layer: MemoryDesc,
    dst_iter: MemoryDesc | None,
    *,
    linear_before_reset: bool = False,
    direction: str = "left2right",
    attributes: Attributes | None = None,
    prop: str = "inference",
) -> Primitive:
    """A GRU; its gates have the order update, reset, output (ONNX's z, r, h).

    * weights_layer: (1, directions, inputs, 3, hidden).
    * weights_iter: (1, directions, hidden, 3, hidden).
    * bias: (1, directions, 3, hidden), with `linear_before_reset` 4 (the last is that of the recurrent output gate), or None.
    * linear_before_reset: apply the reset gate after the product, as in ONNX.
    """
    return create(
        "lbr_gru_forward" if linear_before_reset else "gru_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(DIRECTION, direction, "direction"),
        src_layer,
        src_iter,
        weights_layer,
        weights_iter,
        bias,
        dst_layer,
        dst_iter,
        0,
        attributes=attributes,
        allow_reference=True,
        inputs=(src_layer, weights_layer),
    )


def rnn(
    src_layer: MemoryDesc,
    src_iter: MemoryDesc | None,
    weights_layer: MemoryDesc,
    weights_iter: MemoryDesc,
    bias: MemoryDesc | None,
    dst_layer: MemoryDesc,
    dst_iter: MemoryDesc | None,
    *,
    activation: str,
    direction: str = "left2right",
    alpha: float = 0.0,
    beta: float = 0.0,
    attributes: Attributes | None = None,
    prop: str = "inference",
) -> Primitive:
    """A simple recurrent network.

    * weights_layer: (1, directions, inputs, 1, hidden).
    * weights_iter: (1, directions, hidden, 1, hidden).
    * bias: (1, directions, 1, hidden), or None.
    * activation: "relu", "tanh" or "logistic".
    * alpha: the slope of relu for negative values.
    * beta: the second parameter of the activation.
    """
    return create(
        "vanilla_rnn_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(ELTWISE, activation, "activation"),
        code(DIRECTION, direction, "direction"),
        src_layer,
        src_iter,
        weights_layer,
        weights_iter,
        bias,
        dst_layer,
        dst_iter,
        0,
        alpha,
        beta,
        attributes=attributes,
        allow_reference=True,
        inputs=(src_layer, weights_layer),
    )
