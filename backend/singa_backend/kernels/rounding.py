"""Products in bfloat16, which `precision="bf16"` permits: how this machine computes them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from . import onednn as dnn
from .lowering import dense_desc, emit, threads_for
from .onednn import MemoryDesc
from .table import Options, Site
from .values import Value

BF16 = np.dtype(ml_dtypes.bfloat16)

INTERNAL, COPIES, NONE = "internal", "copies", "none"
"""Primitives round float32 factors themselves (AMX), multiply copies in bfloat16 (AVX512_BF16), or only multiply float32."""

WORTH = 16
"""The multiplications for each copied factor from which a product of copies is faster, its copies included."""


def rounding() -> str:
    """How oneDNN multiplies in bfloat16 on this machine: INTERNAL, COPIES or NONE."""
    library = dnn.library()
    parts = set(library.isa.split("_")) if library is not None else set()
    return INTERNAL if "amx" in parts else COPIES if parts & {"bf16", "fp16"} else NONE


def fpmath(options: Options) -> str:
    """The mode of arithmetic of a primitive on float32."""
    return "bf16" if options.precision == "bf16" else "strict"


def without_bf16(options: Options) -> str:
    """Why products are computed in float32 although bfloat16 is permitted; "" if they are not."""
    if options.precision != "bf16" or rounding() != NONE:
        return ""
    library = dnn.library()
    why = f"{library.isa} has no products in bfloat16" if library is not None else "there is no oneDNN"
    return f"products are computed in float32: {why}"


@dataclass(frozen=True, eq=False)
class Rounded:
    """A copy of a value in bfloat16, without gaps and with its axes in the same order in memory, that is yet to be made.

    Attributes:
        source: the value.
        order: its axes from the outermost in memory to the innermost.
        desc: the description of the copy.
    """

    source: Value
    order: tuple[int, ...]
    desc: MemoryDesc

    def emit(self, site: Site, given: MemoryDesc) -> Value:
        """Add the step that makes the copy; `given` describes the value."""
        x = self.source
        y = site.new(x.shape, BF16, self.order, x.finiteness)
        with threads_for(x.size * 8):
            made = dnn.reorder(given, self.desc)
        emit(site, made, {dnn.args.FROM: (given, x), dnn.args.TO: (self.desc, y)}, (y,), "round")
        return y


def rounded(x: Value) -> Rounded:
    """The copy of a value in bfloat16."""
    order = tuple(sorted(range(x.ndim), key=lambda i: (-x.strides[i], i)))
    return Rounded(x, order, dense_desc(BF16, x.shape, order))


def pays(options: Options, flops: int, *copied: Value) -> bool:
    """Whether a product is computed of copies in bfloat16: they are permitted, needed, and small next to its work."""
    if options.precision != "bf16" or rounding() != COPIES:
        return False
    return flops >= 2 * WORTH * sum(math.prod(x.shape) for x in copied)
