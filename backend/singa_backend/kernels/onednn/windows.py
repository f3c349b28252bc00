"""Primitives that compute each element of their result from several ones: poolings, reductions, resizes."""

from __future__ import annotations

from collections.abc import Sequence

from .constants import POOLING, PROP, REDUCTION, RESAMPLING
from .loading import needed
from .memory import Attributes, MemoryDesc, code, dims
from .primitives import Primitive, create, floats, window


def pooling(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads_begin: Sequence[int],
    pads_end: Sequence[int],
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A pooling.  The maximum skips NaN, where NumPy propagates it.

    * src: (batch, channels, *sizes).
    * dst: (batch, channels, *sizes).
    * algorithm: "max", "avg_include_padding" or "avg_exclude_padding".
    """
    stride, *others = window(src, dst, strides, dilations, pads_begin, pads_end, kernel=kernel)
    return create(
        "pooling_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(POOLING, algorithm, "algorithm"),
        src,
        dst,
        stride,
        dims(kernel, len(stride)),
        *others,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def reduction(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    p: float = 0.0,
    epsilon: float = 0.0,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """A reduction of some axes.

    * dst: the output, of the same rank; reduced axes have size 1.
    * p: the order of a norm.
    * epsilon: the term or the bound of a norm.
    """
    return create(
        "reduction",
        needed().engine,
        code(REDUCTION, algorithm, "algorithm"),
        src,
        dst,
        p,
        epsilon,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def resampling(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    factors: Sequence[float] | None = None,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A resize with half pixels.

    * src: (batch, channels, *sizes).
    * dst: (batch, channels, *sizes).
    * algorithm: "nearest" or "linear".
    * factors: the ratio of the sizes for each spatial axis; None to compute it from the sizes.
    """
    return create(
        "resampling_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(RESAMPLING, algorithm, "algorithm"),
        floats(factors, len(src.shape) - 2),
        src,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
    )
