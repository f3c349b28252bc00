"""Primitives that normalize."""

from __future__ import annotations

import math

from .constants import LRN, PROP, SOFTMAX
from .loading import Unimplemented, needed
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

    Args:
        src: (batch, channels, *sizes).
        dst: (batch, channels, *sizes).
        epsilon: is added to the variance.
        flags: USE_GLOBAL_STATS (mean and variance are inputs), USE_SCALE, USE_SHIFT, FUSE_NORM_RELU, FUSE_NORM_ADD_RELU.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
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

    Args:
        src: (*batch, features).
        dst: (*batch, features).
        epsilon: is added to the variance.
        flags: USE_SCALE, USE_SHIFT, USE_GLOBAL_STATS.
        stat: (*batch), mean and variance; None for C order.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training"; the latter writes mean and variance.
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it, or there are gaps between the features, which its code reads and writes.
    """
    for md in (src, dst):
        if md.nbytes and md.nbytes != math.prod(md.shape) * md.dtype.itemsize:
            raise Unimplemented(3, f"layer_normalization with gaps ({md})")
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

    Args:
        src: (batch, channels, *sizes).
        dst: (batch, channels, *sizes).
        size: the number of elements that are summed.
        alpha: the factor of the sum of squares.
        beta: the exponent.
        k: is added to the sum.
        algorithm: "across_channels" or "within_channel".
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
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

    Args:
        src: the logits.
        dst: the probabilities, of the same shape.
        axis: the axis.
        log: return the logarithm.
        attributes: post-ops, scales and mode.
        prop: "inference" or "training".
        allow_reference: accept slow reference code.

    Returns:
        The primitive.

    Raises:
        Unimplemented: oneDNN has no fast code for it.
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
