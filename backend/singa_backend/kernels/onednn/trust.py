"""Implementations of oneDNN that are not trusted: each with the condition, the fault, and where it was seen or reported.

Version 3.2 is the last one whose wheel needs nothing else.  Its faults were found by running every implementation on buffers of
exact size between guard pages, or are corrected in later versions.  `create` skips an implementation that a row names, and takes
the next one that oneDNN offers; `Primitive.refused` names those that it skipped.
"""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from .args import DST, SRC, SRC_ITER
from .constants import DIRECTION, QUERY, QUERY_NUMBER, QUERY_SIZES
from .loading import needed
from .memory import Attributes, MemoryDesc

SEEN = "seen"
"""The source of a row whose fault the sweep has shown; other sources name a commit or an issue of oneDNN."""


class Candidate:
    """An implementation that oneDNN offers for a primitive: what the conditions of the rows ask for.

    Args:
        kind: the operation, such as "convolution_forward".
        implementation: the name of the code.
        pd: the handle of its descriptor.
        attributes: the attributes from which it was created.
        threads: the number of threads for which it was created.
    """

    def __init__(self, kind: str, implementation: str, pd: int, attributes: Attributes, threads: int) -> None:
        self.kind, self.implementation, self.attributes, self.threads = kind, implementation, attributes, threads
        self._pd = pd

    def md(self, arg: int) -> MemoryDesc | None:
        """The description of an argument; None if the primitive does not have it."""
        handle = needed().functions["primitive_desc_query_md"](self._pd, QUERY["argument"], arg)
        md = MemoryDesc.clone(handle) if handle else None
        return md if md is not None and md.shape else None

    def mds(self) -> list[MemoryDesc]:
        """The descriptions of the inputs, outputs, weights and their gradients."""
        named = (self._named(name, index) for name in TENSORS for index in range(2))
        return [md for md in named if md is not None]

    def _named(self, name: str, index: int) -> MemoryDesc | None:
        handle = needed().functions["primitive_desc_query_md"](self._pd, QUERY[name], index)
        md = MemoryDesc.clone(handle) if handle else None
        return md if md is not None and md.shape else None

    def sizes(self, what: str) -> tuple[int, ...]:
        """The "strides", "dilations", "padding_l" or "padding_r" of a window, one for each spatial axis."""
        out = c_void_p()
        needed().call("primitive_desc_query", self._pd, QUERY_SIZES[what], 0, ctypes.byref(out))
        md = self.md(SRC) or self.md(DST) or self.mds()[0]
        return tuple((c_int64 * (len(md.shape) - 2)).from_address(out.value or 0))

    def number(self, what: str) -> int:
        """A number of the operation, such as its "direction"."""
        out = c_int()
        needed().call("primitive_desc_query", self._pd, QUERY_NUMBER[what], 0, ctypes.byref(out))
        return out.value


TENSORS = ("src", "weights", "dst", "diff_src", "diff_weights", "diff_dst")


class Row(NamedTuple):
    """An implementation that is not trusted under a condition.

    Attributes:
        implementation: a regular expression, searched in the name of the implementation.
        kind: a regular expression, matched from the beginning of the kind.
        condition: whether the fault can occur.
        reason: what goes wrong, and when.
        source: `SEEN`, or the commit or issue of oneDNN.
    """

    implementation: str
    kind: str
    condition: Callable[[Candidate], bool]
    reason: str
    source: str = SEEN


@dataclass(frozen=True)
class Refusal:
    """An implementation that was skipped.

    Attributes:
        implementation: its name.
        reason: why.
    """

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation}: {self.reason}"


def refusal(candidate: Candidate) -> Refusal | None:
    """Why an implementation is not trusted.

    Args:
        candidate: the implementation.

    Returns:
        The refusal; None if it is trusted.
    """
    for row in _rows(candidate.kind, candidate.implementation):
        if row.condition(candidate):
            return Refusal(candidate.implementation, row.reason)
    return None


@cache
def _rows(kind: str, implementation: str) -> tuple[Row, ...]:
    return tuple(r for r in ROWS if re.match(r.kind, kind) and re.search(r.implementation, implementation))


def _always(_: Candidate) -> bool:
    return True


def _strided(c: Candidate) -> bool:
    return max(c.sizes("strides"), default=1) > 1


def dense(md: MemoryDesc) -> bool:
    """Whether a tensor has no gaps: its strides are those of some order of its axes.  Layouts in blocks have none."""
    if md.strides is None or 0 in md.shape:
        return True
    steps = sorted((step, size) for step, size in zip(md.strides, md.shape, strict=True) if size > 1)
    return (not steps or steps[0][0] == 1) and all(step * size == following for (step, size), (following, _) in pairwise(steps))


def _gaps(c: Candidate) -> bool:
    return not all(map(dense, c.mds()))


def _operand_gaps(c: Candidate) -> bool:
    return not all(map(dense, c.attributes.operands))


def _adds(c: Candidate) -> bool:
    return c.attributes.adds


def _from_the_first_state(c: Candidate) -> bool:
    return c.number("direction") == DIRECTION["left2right"] and c.md(SRC_ITER) is None


def _operand_of_samples(c: Candidate) -> bool:
    md = c.md(DST)
    assert md is not None
    shape = md.shape
    flat = len(shape) > 2 and shape[0] > 1 < shape[1] and set(shape[2:]) == {1}
    return flat and any(o.shape[0] == 1 < o.shape[1] for o in c.attributes.operands)


def _sizes_of_one(c: Candidate) -> bool:
    """An axis of size 1 has another stride than in C order."""
    for md in c.mds():
        strides = md.strides or ()
        expected = [math.prod(md.shape[i + 1 :]) for i in range(len(strides))]
        if any(size == 1 and a != b for size, a, b in zip(md.shape, strides, expected, strict=False)):
            return True
    return False


ROWS: tuple[Row, ...] = (
    Row(
        "jit_1x1",
        "(de)?convolution_backward_weights",
        _strided,
        "writes behind its part of the scratchpad with a stride above 1 and few channels (3.2 to 3.13, issue 6035)",
    ),
    Row("sse41", "", _always, "reads operands that are not aligned by instructions that need it"),
    Row(
        "^ref",
        "(lstm|vanilla_rnn)_backward",
        _from_the_first_state,
        "computes a wrong gradient of the recurrent weights from left to right without a first state",
    ),
    Row("brg|jit", "", _operand_gaps, "reads the operand of a binary post-op as if it had no gaps"),
    Row(
        "^jit:uni",
        "binary",
        _operand_of_samples,
        "reads the operand of a post-op with one value for each channel at wrong places if all further axes have size 1",
    ),
    Row("^(jit:uni|simple)", "layer_normalization", _gaps, "writes into the gaps between rows"),
    Row("^ref", "softmax", _sizes_of_one, "computes a wrong stride if an axis of size 1 is not in C order"),
    Row("^ref", "(eltwise|resampling)_forward", _adds, "adds a wrong previous value"),
    Row("^ref", "(pooling|batch_normalization)_backward", _gaps, "clears or reads gaps as if there were none"),
    Row(r"^conv:any\+ref", "deconvolution_forward", _gaps, "needs more scratchpad than it reports if there are gaps"),
)  # fmt: skip
"""The rows; the first that holds is the reason."""
