"""Primitives that move elements."""

from __future__ import annotations

from collections.abc import Sequence

from .constants import PROP
from .loading import needed
from .memory import Attributes, MemoryDesc, code
from .primitives import Primitive, create, descriptors


def concat(
    dst: MemoryDesc | None,
    axis: int,
    srcs: Sequence[MemoryDesc],
    *,
    attributes: Attributes | None = None,
    allow_reference: bool = False,
) -> Primitive:
    """Tensors joined along an axis; source i is argument MULTIPLE_SRC + i.

    * dst: the output; None to choose its layout (`query`).
    """
    return create(
        "concat",
        needed().engine,
        dst,
        len(srcs),
        axis,
        descriptors(srcs),
        attributes=attributes,
        allow_reference=allow_reference,
    )


def shuffle(
    src: MemoryDesc,
    dst: MemoryDesc,
    *,
    axis: int,
    group_size: int,
    attributes: Attributes | None = None,
    prop: str = "inference",
    allow_reference: bool = False,
) -> Primitive:
    """An axis split into (rest, group_size) and transposed: a shuffle of channels.

    * dst: the output, of the same shape.
    * group_size: the size of the second part; it divides that of the axis.
    """
    return create(
        "shuffle_forward",
        needed().engine,
        code(PROP, prop, "prop"),
        src,
        dst,
        axis,
        group_size,
        attributes=attributes,
        allow_reference=allow_reference,
    )
