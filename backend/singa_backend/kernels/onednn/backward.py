"""The backward primitives: gradients of the forward ones.  `primitives` describes their parameters."""

from __future__ import annotations

from collections.abc import Sequence

from .constants import CONVOLUTION, DECONVOLUTION, DIRECTION, ELTWISE, OVERWRITE, POOLING, PROP, SOFTMAX
from .loading import needed
from .memory import Attributes, MemoryDesc, code, dims
from .primitives import Primitive, create, window


def convolution_backward_data(
    diff_src: MemoryDesc,
    weights: MemoryDesc,
    diff_dst: MemoryDesc,
    *,
    hint: Primitive,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    algorithm: str = "direct",
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradient of a convolution for its input."""
    return create(
        "convolution_backward_data",
        needed().engine,
        code(CONVOLUTION, algorithm, "algorithm"),
        diff_src,
        weights,
        diff_dst,
        *window(
            diff_src,
            diff_dst,
            strides,
            dilations,
            pads_begin,
            pads_end,
            kernel=weights.shape[2 - len(diff_src.shape) :],
            inverse=True,
        ),
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def convolution_backward_weights(
    src: MemoryDesc,
    diff_weights: MemoryDesc,
    diff_bias: MemoryDesc | None,
    diff_dst: MemoryDesc,
    *,
    hint: Primitive,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    algorithm: str = "direct",
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradients of a convolution for its weights and its bias."""
    return create(
        "convolution_backward_weights",
        needed().engine,
        code(CONVOLUTION, algorithm, "algorithm"),
        src,
        diff_weights,
        diff_bias,
        diff_dst,
        *window(src, diff_dst, strides, dilations, pads_begin, pads_end),
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def deconvolution_backward_data(
    diff_src: MemoryDesc,
    weights: MemoryDesc,
    diff_dst: MemoryDesc,
    *,
    hint: Primitive,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    algorithm: str = "direct",
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradient of a deconvolution for its input."""
    return create(
        "deconvolution_backward_data",
        needed().engine,
        code(DECONVOLUTION, algorithm, "algorithm"),
        diff_src,
        weights,
        diff_dst,
        *window(diff_src, diff_dst, strides, dilations, pads_begin, pads_end),
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def deconvolution_backward_weights(
    src: MemoryDesc,
    diff_weights: MemoryDesc,
    diff_bias: MemoryDesc | None,
    diff_dst: MemoryDesc,
    *,
    hint: Primitive,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    algorithm: str = "direct",
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradients of a deconvolution for its weights and its bias."""
    return create(
        "deconvolution_backward_weights",
        needed().engine,
        code(DECONVOLUTION, algorithm, "algorithm"),
        src,
        diff_weights,
        diff_bias,
        diff_dst,
        *window(src, diff_dst, strides, dilations, pads_begin, pads_end),
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def pooling_backward(
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    *,
    hint: Primitive,
    algorithm: str,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradient of a pooling.  That of the maximum needs the forward workspace."""
    stride, *others = window(diff_src, diff_dst, strides, dilations, pads_begin, pads_end, kernel=kernel)
    return create(
        "pooling_backward",
        needed().engine,
        code(POOLING, algorithm, "algorithm"),
        diff_src,
        diff_dst,
        stride,
        dims(kernel, len(stride)),
        *others,
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def eltwise_backward(
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    data: MemoryDesc,
    *,
    hint: Primitive,
    algorithm: str,
    alpha: float = 0.0,
    beta: float = 0.0,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradient of a function of each element.

    * data: the input, or the output for algorithms `..._use_dst_for_bwd`.
    """
    return create(
        "eltwise_backward",
        needed().engine,
        code(ELTWISE, algorithm, "algorithm"),
        diff_src,
        diff_dst,
        data,
        alpha,
        beta,
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def softmax_backward(
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    dst: MemoryDesc,
    *,
    hint: Primitive,
    axis: int,
    log: bool = False,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradient of a softmax.

    * log: whether the output is the logarithm.
    """
    return create(
        "softmax_backward",
        needed().engine,
        SOFTMAX["log" if log else "accurate"],
        diff_src,
        diff_dst,
        dst,
        axis,
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def batch_normalization_backward(
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    src: MemoryDesc,
    *,
    hint: Primitive,
    epsilon: float,
    flags: int = 0,
    parameters: bool = True,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradients of a batch normalization.

    * parameters: compute the gradients of scale and shift too.
    """
    return create(
        "batch_normalization_backward",
        needed().engine,
        PROP["backward" if parameters else "backward_data"],
        diff_src,
        diff_dst,
        src,
        epsilon,
        flags,
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def layer_normalization_backward(
    diff_src: MemoryDesc,
    diff_dst: MemoryDesc,
    src: MemoryDesc,
    *,
    hint: Primitive,
    epsilon: float,
    flags: int = 0,
    stat: MemoryDesc | None = None,
    parameters: bool = True,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """The gradients of a layer normalization.  With USE_SHIFT, oneDNN 3.2 wants the argument SHIFT too.

    * stat: (*batch), mean and variance; None for C order.
    * parameters: compute the gradients of scale and shift too.
    """
    return create(
        "layer_normalization_backward",
        needed().engine,
        PROP["backward" if parameters else "backward_data"],
        diff_src,
        diff_dst,
        src,
        stat,
        epsilon,
        flags,
        hint,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def lstm_backward(
    given: Sequence[MemoryDesc | None],
    diffs: Sequence[MemoryDesc | None],
    *,
    hint: Primitive,
    direction: str = "left2right",
    attributes: Attributes | None = None,
) -> Primitive:
    """The gradients of an LSTM, which needs the forward workspace.

    * given: src_layer, src_iter, src_iter_c, weights_layer, weights_iter, bias, dst_layer, dst_iter and dst_iter_c.
    * diffs: the gradients of these, in the same order.
    """
    both = [d for nine in (given, diffs) for d in (*nine[:5], None, None, *nine[5:])]  # no peephole, no projection
    return _recurrent_backward("lstm_backward", both, hint, direction, attributes)


def gru_backward(
    given: Sequence[MemoryDesc | None],
    diffs: Sequence[MemoryDesc | None],
    *,
    hint: Primitive,
    linear_before_reset: bool = False,
    direction: str = "left2right",
    attributes: Attributes | None = None,
) -> Primitive:
    """The gradients of a GRU, which needs the forward workspace.

    * given: src_layer, src_iter, weights_layer, weights_iter, bias, dst_layer and dst_iter.
    * diffs: the gradients of these, in the same order.
    * linear_before_reset: as in the forward primitive.
    """
    kind = "lbr_gru_backward" if linear_before_reset else "gru_backward"
    return _recurrent_backward(kind, [*given, *diffs], hint, direction, attributes)


def _recurrent_backward(
    kind: str, both: Sequence[MemoryDesc | None], hint: Primitive, direction: str, attributes: Attributes | None
) -> Primitive:
    """A primitive that overwrites the gradients of the weights and of the bias; by default oneDNN adds to them."""
    return create(
        kind,
        needed().engine,
        PROP["backward"],
        code(DIRECTION, direction, "direction"),
        *both,
        OVERWRITE,
        hint,
        attributes=attributes,
        allow_reference=True,
    )
