"""Primitives that compute each element of their result from the same element of their inputs."""

from __future__ import annotations

from collections.abc import Sequence

from .constants import BINARY, ELTWISE, PROP
from .loading import needed
from .memory import Attributes, MemoryDesc, code
from .primitives import Primitive, create, descriptors, floats


def eltwise(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    alpha: float = 0.0,
    beta: float = 0.0,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """A function of each element.  "relu" turns NaN into 0.

    * dst: the output, of the same shape; it may be the same memory.
    * attributes: post-ops, scales and mode; a binary post-op makes it slow: begin such a chain with `binary`.
    """
    return create(
        "eltwise_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        code(ELTWISE, algorithm, "algorithm"),
        src,
        dst,
        alpha,
        beta,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def binary(
    a: MemoryDesc,
    b: MemoryDesc,
    dst: MemoryDesc,
    *,
    algorithm: str,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """A function of two tensors.

    * a: the first tensor.
    * b: the second tensor, of the same rank; axes of size 1 are broadcast.
    """
    return create(
        "binary",
        needed().engine,
        code(BINARY, algorithm, "algorithm"),
        a,
        b,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def prelu(
    src: MemoryDesc,
    weights: MemoryDesc,
    dst: MemoryDesc,
    *,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """Negative elements multiplied with weights (ONNX's PRelu).

    * weights: the slopes, of the same rank; axes of size 1 are broadcast.
    """
    return create(
        "prelu_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        weights,
        dst,
        attributes=attributes,
        allow_reference=allow_reference,
    )


def sum_(
    dst: MemoryDesc | None,
    scales: Sequence[float],
    srcs: Sequence[MemoryDesc],
    *,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """A weighted sum of tensors of one shape; source i is argument MULTIPLE_SRC + i.

    * dst: the output, which may be the memory of source 0; None to choose its layout (`query`).
    * scales: the factor of each input.
    """
    return create(
        "sum",
        needed().engine,
        dst,
        len(srcs),
        floats(scales, len(srcs)),
        descriptors(srcs),
        attributes=attributes,
        allow_reference=allow_reference,
    )
