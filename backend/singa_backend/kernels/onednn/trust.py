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

import numpy as np

from .args import BIAS, DST, SRC, SRC_ITER, WEIGHTS
from .constants import DIRECTION, ISA, QUERY, QUERY_NUMBER, QUERY_SIZES
from .loading import needed
from .memory import Attributes, MemoryDesc

SEEN = "seen"
"""The source of a row begins with it if the fault was shown; others name a commit or an issue of oneDNN, and "not run"."""

LARGEST = 2**31 - 1
"""The largest number of bytes, or of elements, whose offsets have 32 bits."""

CACHE = 1 << 18
"""The bytes of the smallest second-level cache of a processor with AVX2: oneDNN divides windows that exceed the cache."""


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
        return self._named("argument", arg)

    def tensor(self, arg: int) -> MemoryDesc:
        """The description of an argument that every primitive of this kind has."""
        md = self.md(arg)
        assert md is not None
        return md

    def mds(self) -> list[MemoryDesc]:
        """The descriptions of the inputs, outputs, weights and their gradients."""
        named = (self._named(name, index) for name in TENSORS for index in range(2))
        return [md for md in named if md is not None]

    def _named(self, name: str, index: int) -> MemoryDesc | None:
        handle = needed().functions["primitive_desc_query_md"](self._pd, QUERY[name], index)
        md = MemoryDesc.clone(handle) if handle else None
        return md if md is not None and md.shape else None

    @property
    def nbytes(self) -> int:
        """The bytes of the largest input, output or gradient."""
        functions = needed().functions
        handles = (functions["primitive_desc_query_md"](self._pd, QUERY[name], 0) for name in TENSORS)
        return max((int(functions["memory_desc_get_size"](h)) for h in handles if h), default=0)

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


class Untrusted(NamedTuple):
    """An implementation that is not trusted under a condition.

    Attributes:
        implementation: a regular expression, searched in the name of the implementation.
        kind: a regular expression, matched from the beginning of the kind.
        condition: whether the fault can occur.
        reason: what goes wrong, and when.
        source: `SEEN`, or the commit or issue of oneDNN.
        levels: the instruction sets of which one is needed for the implementation; empty if all have it.
    """

    implementation: str
    kind: str
    condition: Callable[[Candidate], bool]
    reason: str
    source: str = SEEN
    levels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skipped:
    """An implementation that was skipped.

    Attributes:
        implementation: its name.
        reason: why.
    """

    implementation: str
    reason: str

    def __str__(self) -> str:
        return f"{self.implementation}: {self.reason}"


def refusal(candidate: Candidate) -> Skipped | None:
    """Why an implementation is not trusted.

    Args:
        candidate: the implementation.

    Returns:
        The refusal; None if it is trusted.
    """
    for row in _rows(candidate.kind, candidate.implementation):
        if row.condition(candidate):
            return Skipped(candidate.implementation, row.reason)
    return None


@cache
def _rows(kind: str, implementation: str) -> tuple[Untrusted, ...]:
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


def _shifted_gaps(c: Candidate) -> bool:
    return bool(c.attributes.shifted) and _gaps(c)


def _from_the_first_state(c: Candidate) -> bool:
    return c.number("direction") == DIRECTION["left2right"] and c.md(SRC_ITER) is None


def _operand_of_samples(c: Candidate) -> bool:
    shape = c.tensor(DST).shape
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


def _kernel(c: Candidate) -> tuple[int, ...]:
    """The sizes of a window of the filters."""
    return c.tensor(WEIGHTS).shape[2 - len(c.tensor(SRC).shape) :]


def _exceeds_cache(c: Candidate) -> bool:
    """The filters and the input of some outputs may exceed a cache, for any block of outputs that oneDNN considers."""
    filters, (*rows, width) = c.tensor(WEIGHTS), _kernel(c)
    outputs, inputs = filters.shape[-len(rows) - 3 : -len(rows) - 1]
    block, pixels = min(64, -(-outputs // 16) * 16), 28 * c.sizes("strides")[-1] + width
    return math.prod(rows) * inputs * (pixels + block * width) * filters.dtype.itemsize >= CACHE


def _divided_rows(c: Candidate) -> bool:
    """A transposed convolution with something to add after the sum may add it for each part of a window with a stride."""
    if not len(c.attributes) and c.md(BIAS) is None:
        return False
    rows = zip(_kernel(c)[:-1], c.sizes("strides")[:-1], strict=True)
    return any(size > 1 and step > 1 for size, step in rows) and _exceeds_cache(c)


def _divided_compensation(c: Candidate) -> bool:
    """The compensation of padded rows is looked up for a part of a window."""
    src = c.tensor(SRC).dtype
    shifted = src == np.int8 or (src == np.uint8 and SRC in c.attributes.shifted)
    return shifted and any((*c.sizes("padding_l")[:-1], *c.sizes("padding_r")[:-1])) and _exceeds_cache(c)


def _steps_over(c: Candidate) -> bool:
    return any(step > size for step, size in zip(c.sizes("strides"), _kernel(c), strict=True))


def _only_padding(c: Candidate) -> bool:
    """A window has no element of the input, or may jump over it."""
    axes = zip(c.tensor(SRC).shape[2:], _kernel(c), c.sizes("dilations"), c.sizes("padding_l"), c.sizes("padding_r"), strict=True)
    return any(max(low, high) > (k - 1) * (gap + 1) or (k > 1 and gap >= size) for size, k, gap, low, high in axes)


def _padded_signed(c: Candidate) -> bool:
    return c.tensor(SRC).dtype == np.int8 and any((*c.sizes("padding_l"), *c.sizes("padding_r")))


def _single_channels(c: Candidate) -> bool:
    """A depthwise convolution of integers with an operand of a post-op."""
    groups = c.tensor(WEIGHTS).shape[: -len(_kernel(c))]
    return bool(c.attributes.operands) and groups[1:] == (1, 1)


def _bytes_wrap(c: Candidate) -> bool:
    return max(c.nbytes, *(o.nbytes for o in c.attributes.operands), 0) > LARGEST


def _elements_wrap(c: Candidate) -> bool:
    return c.nbytes > LARGEST and any(math.prod(md.shape) > LARGEST for md in c.mds())


def _degenerate_row(c: Candidate) -> bool:
    dst = c.tensor(DST)
    return dst.shape[-2] == 1 and dst.strides is not None and dst.strides[-2] < dst.shape[-1]


def _shifted_weights(c: Candidate) -> bool:
    return WEIGHTS in c.attributes.shifted and c.tensor(DST).shape[-2] >= 14


def _split_batch(c: Candidate) -> bool:
    """A batch of products with a transposed left operand whose long inner axis may be divided among threads."""
    rows, inner = c.tensor(SRC).shape[-2:]
    transposed = (c.tensor(SRC).strides or (0, 0))[-2] == 1 < rows
    return c.threads > 1 and transposed and inner >= 2048 and math.prod(c.tensor(DST).shape[:-2]) > 1


def _several_planes(c: Candidate) -> bool:
    shape = c.tensor(DST).shape
    return len(shape) == 5 and shape[2] > 1


def _few_hidden(c: Candidate) -> bool:
    return c.tensor(WEIGHTS).shape[-1] <= 5


AMX = "avx512_core_amx"

ROWS: tuple[Untrusted, ...] = (
    Untrusted(
        "jit_1x1",
        "(de)?convolution_backward_weights",
        _strided,
        "writes after its part of the scratchpad with a stride above 1 and few channels",
        f"{SEEN}, issue 6035, in 3.13 too",
    ),
    Untrusted("sse41", "", _always, "reads operands that are not aligned by instructions that need it"),
    Untrusted(
        "^ref",
        "(lstm|vanilla_rnn)_backward",
        _from_the_first_state,
        "computes a wrong gradient of the recurrent weights from left to right without a first state",
        f"{SEEN}, in 3.13 too",
    ),
    Untrusted("brg|jit", "", _operand_gaps, "reads the operand of a binary post-op as if it had no gaps", f"{SEEN}, c21c4cb3aa"),
    Untrusted(
        "^jit:uni",
        "binary",
        _operand_of_samples,
        "reads the operand of a post-op with one value for each channel at wrong places if all further axes have size 1",
        f"{SEEN}, in 3.13 too",
    ),
    Untrusted("^(jit:uni|simple)", "layer_normalization", _gaps, "writes into the gaps between rows", f"{SEEN}, in 3.13 too"),
    Untrusted(
        "^ref", "softmax", _sizes_of_one, "computes a wrong step if an axis of size 1 is not in C order", f"{SEEN}, d446428779"
    ),
    Untrusted("^ref", "(eltwise|resampling)_forward", _adds, "adds a wrong previous value", f"{SEEN}, 3380d0e01e"),
    Untrusted(
        "^ref",
        "(pooling|batch_normalization)_backward",
        _gaps,
        "clears or reads gaps as if there were none",
        f"{SEEN}, in 3.13 too",
    ),
    Untrusted(
        r"^conv:any\+ref",
        "deconvolution_forward",
        _gaps,
        "needs more scratchpad than it reports if there are gaps",
        f"{SEEN}, in 3.13 too",
    ),
    Untrusted(
        r"^brg_conv:.*\+brgconv_strided",
        "deconvolution_forward",
        _divided_rows,
        "adds the bias, or applies post-ops, once for each part of a window with a stride, if it is too large for a cache",
        f"{SEEN}, 56825411fc",
    ),
    Untrusted("^jit_uni_int8", "convolution_forward", _single_channels, "computes wrong depthwise sums with a binary post-op"),
    Untrusted(
        "^gemm", "matmul", _degenerate_row, "fails if the step of the only row is less than its size", f"{SEEN}, 2854d0dae0"
    ),
    Untrusted("^jit", "reorder", _shifted_gaps, "applies no zero point to narrow rows with gaps between them"),
    Untrusted(
        "(?<!gemm:)jit",
        "(de)?convolution|pooling",
        _bytes_wrap,
        "computes offsets above 2 GiB in 32 bits",
        "c07fe05d9c, 317e45e138, b552ce7c6f, d13fd38f9e, 1324dda5b9, 887c9d704b, 75b1257032; not run",
    ),
    Untrusted("brg", "(de)?convolution", _elements_wrap, "counts elements above 2^31 in 32 bits", "317e45e138; not run"),
    Untrusted(
        "brg_?conv(_fwd)?:",
        "convolution_forward",
        _only_padding,
        "may have no code for windows in which all is padding",
        "1aaefb319b, issue 5942; 3.2 was right in 225 cases at AVX2",
    ),
    Untrusted(
        "^brg_?conv(_fwd)?:.*amx",
        "convolution_forward",
        _steps_over,
        "needs a larger copy of its input than it reserves, if a stride exceeds the window",
        "c3d821b6ac; not run",
        (AMX,),
    ),
    Untrusted(
        "^brg_?conv(_fwd)?:.*vnni",
        "convolution_forward",
        _divided_compensation,
        "takes a wrong correction for padded rows if the window is too large for a cache",
        "e16ae685bc; not run",
        ("avx2_vnni", "avx512_core_vnni"),
    ),
    Untrusted(
        "^brg_conv_fwd:avx512_core_(vnni|bf16|fp16)",
        "convolution_forward",
        _padded_signed,
        "pads signed integers with a wrong value (3.5 to 3.12)",
        "issue 5080, 0dc2ca853c; not run, not in 3.2",
        ("avx512_core_vnni",),
    ),
    Untrusted(
        "^brgconv_1x1:.*amx",
        "convolution_forward",
        _several_planes,
        "leaves out a part of its input after the last row of a plane",
        "41643e2fcc; not run",
        (AMX,),
    ),
    Untrusted(
        "^jit_1x1:.*amx", "convolution_forward", _always, "computes some last positions wrong", "9ba6789a1f; not run", (AMX,)
    ),
    Untrusted(
        "^brg:avx2_vnni",
        "matmul",
        _shifted_weights,
        "overwrites a sum with the zero point of the weights, from 14 rows",
        "bf6d054771; not run",
        ("avx2_vnni",),
    ),
    Untrusted(
        "^brg:",
        "matmul",
        _split_batch,
        "divides the inner axis of a batch among threads as if it were one product",
        "bdbdf3a8cc; not run",
        ("avx512_core",),
    ),
    Untrusted(
        "^brgemm:avx512",
        "lbr_gru_forward",
        _few_hidden,
        "writes after its scratchpad with at most 5 hidden values (3.4 to 3.8)",
        "fe61b22c12; not run, not in 3.2",
        ("avx512_core",),
    ),
)  # fmt: skip
"""The rows; the first that holds is the reason."""


def rows_of(isa: str) -> list[Untrusted]:
    """The rows that concern a processor.

    Args:
        isa: the name of its instruction set, a value of `constants.ISA`.

    Returns:
        The rows.
    """
    bits = {name: number for number, name in ISA.items()}
    return [r for r in ROWS if not r.levels or any(bits[level] & bits.get(isa, 0) == bits[level] for level in r.levels)]
