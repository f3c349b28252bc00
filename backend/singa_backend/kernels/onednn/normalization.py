"""Primitives that normalize."""

from __future__ import annotations

from .constants import LRN, PROP, SOFTMAX
from .loading import needed
from .memory import Attributes, MemoryDesc, code
from .primitives import Primitive, create


def batch_normalization(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    epsilon: float,
    flags: int = 0,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A normalization of each channel, over all other axes.

    * src: (batch, channels, *sizes).
    * dst: (batch, channels, *sizes).
    * flags: USE_GLOBAL_STATS (mean and variance are inputs), USE_SCALE, USE_SHIFT, FUSE_NORM_RELU, FUSE_NORM_ADD_RELU.
    """
    return create(
        "batch_normalization_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        dst,
        epsilon,
        flags,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def layer_normalization(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    epsilon: float,
    flags: int = 0,
    stat: MemoryDesc | None = None,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A normalization over the last axis.

    * src: (*batch, features).
    * dst: (*batch, features).
    * flags: USE_SCALE, USE_SHIFT, USE_GLOBAL_STATS.
    * stat: (*batch), mean and variance; None for C order.
    * prop: "inference" or "training"; the latter writes mean and variance.
    """
    return create(
        "layer_normalization_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        dst,
        stat,
        epsilon,
        flags,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def lrn(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    size: int,
    alpha: float,
    beta: float,
    k: float,
    algorithm: str = "across_channels",
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A local response normalization, with ONNX's alpha.

    * src: (batch, channels, *sizes).
    * dst: (batch, channels, *sizes).
    * size: the number of elements that are summed.
    * alpha: the factor of the sum of squares.
    * beta: the exponent.
    * k: is added to the sum.
    * algorithm: "across_channels" or "within_channel".
    """
    return create(
        "lrn_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(LRN, algorithm, "algorithm"),
        src,
        dst,
        size,
        alpha,
        beta,
        k,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def softmax(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    axis: int,
    log: bool = False,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A softmax along one axis, which should be the innermost in memory.

    * src: the logits.
    * dst: the probabilities, of the same shape.
    * log: return the logarithm.
    """
    return create(
        "softmax_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        SOFTMAX["log" if log else "accurate"],
        src,
        dst,
        axis,
        attributes=attributes,
        allow_reference=allow_reference,
    )
