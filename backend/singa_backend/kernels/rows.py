"""Softmax, norms and reductions along the last axis, by machine code for what their definitions leave when they are traced.

A row is read a few times, once for each reduction that depends on another one.  The elementwise calls that follow are a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..elementwise.compile import available
from ..elementwise.expression import Term, order
from ..ir.declaration import has_trait
from .elementwise import FLOATS, collapsed, order_of
from .expressions import Leaves, chained, finiteness_in, label_of, ranges
from .frames import CHUNK, MISSING, PARALLEL, framed, machine_code, movements
from .table import Site, kernel, worst
from .values import ANY, FINITE, NAN, REACHED, Value, dense

OPERATORS = (
    "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin",
    "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp",
)  # fmt: skip
"""The operators whose definitions reduce one axis."""


def along_rows(site: Site, *inputs: Value | None) -> Value:
    """A call that reduces the last axis of its first input, and the elementwise calls that follow it."""
    site.require(not available(), available())
    x = inputs[0]
    assert x is not None
    site.require(x.dtype in FLOATS and x.ndim and x.size, f"elements of {x.dtype}, or none")
    site.require(x.shape[-1] > 1 and x.strides[-1] == x.dtype.itemsize, "a row has gaps in memory, or one element")
    site.require(not any(site.outputs[1:]), "several results are used")
    terms, values, free = chained(site, inputs)
    result = terms[-1]
    y = _emit(site, x, result, values, label_of(site), id(x) in free)
    known = ranges(site, [result], values)[id(result)]
    finite = worst(*values) == FINITE and has_trait("", site.name, "finite") and not site.absorbed
    softmax = site.name == "Softmax" and not site.absorbed and x.low == REACHED
    y.finiteness = FINITE if finite or softmax else finiteness_in(known)
    y.low = ANY
    return y


def _emit(site: Site, x: Value, result: Term, inputs: Sequence[Value], label: str, free: bool) -> Value:
    n, lead = x.shape[-1], x.shape[:-1]
    squeezed = result.shape == lead  # by a reduction that keeps no axis
    leaves = Leaves(site, [result], inputs, label, rows=True)
    site.require(any(t.op == "reduce" for t in order(leaves.results)), "nothing is reduced")
    site.require(result.shape in (x.shape, lead, (*lead, 1)), "the rows are broadcast")
    site.require(not squeezed or all(v is x or v.size == 1 for v in leaves.values), "the axis is not kept, and others are read")
    terms = order(leaves.results)
    reads = [_padded(v, x.ndim) for v in leaves.values]
    site.require(all(v.shape[-1] in (1, n) for v in reads), "an input has other rows")
    inner = [v.strides[-1] if v.shape[-1] != 1 else 0 for v in reads]
    work = x.size * len(terms)
    found = machine_code(site, leaves.results, movements(inner, reads), work)
    if found is None:
        site.refuse(MISSING if site.wanted else "there is no machine code")
    function, places, scratch_types = found
    y = _result(site, x, result, free)
    target = y.view((*lead, 1), (*y.strides, y.dtype.itemsize)) if squeezed else y
    dims, steps = collapsed(lead, range(len(lead)), [_lead(target), *map(_lead, reads)])
    site.require(len(dims) < 3, "the rows are in no order")
    outer = (1,) * (2 - len(dims)) + dims
    wide = [(0,) * (2 - len(s)) + s for s in steps]
    values = [reads[i] if i >= 0 else _count(site, terms[~i]) for i in places]
    moves = [(*wide[1 + i], inner[i]) if i >= 0 else (0, 0, 0) for i in places]
    moves.append((*wide[0], y.dtype.itemsize if result.shape == x.shape else 0))
    threads = site.options.threads if work > PARALLEL else 1
    starts, total = [], 0
    for dtype in scratch_types:
        moves.append((-(-n * dtype.itemsize // 64) * 64, 0, dtype.itemsize))
        starts.append(total)
        total += moves[-1][0] * threads
    scratch = site.scratch(total) if total else None
    sizes = (n, *outer)
    bind = framed(function, threads, max(1, CHUNK // n), sizes, moves, [*values, target], scratch, starts)
    site.emit(bind, reads=values, writes=(y,), kernel=f"machine.{label}", scratch=scratch)
    return y


def _result(site: Site, x: Value, result: Term, free: bool) -> Value:
    """The value of the result: in the place of x, in its order, or in C order."""
    if result.shape != x.shape:
        return site.new(result.shape, result.dtype, finiteness=NAN)
    layout = order_of(x)
    if layout is None or layout[-1] != x.ndim - 1:
        layout = list(range(x.ndim))
    inside = free and result.dtype == x.dtype and dense(x.shape, x.strides, x.dtype.itemsize, layout)
    return x.view(x.shape, x.strides) if inside else site.new(x.shape, result.dtype, layout, NAN)


def _padded(v: Value, rank: int) -> Value:
    """A value with axes of 1 before its own."""
    return v.view((1,) * (rank - v.ndim) + v.shape, (0,) * (rank - v.ndim) + v.strides)


def _lead(v: Value) -> Value:
    """The axes before the last one."""
    return v.view(v.shape[:-1], v.strides[:-1])


def _count(site: Site, t: Term) -> Value:
    """The number of elements along axes."""
    count = math.prod(t.args[0].shape[a] for a in t.extra)
    made: Any = np.array([count], t.dtype)
    return site.constant(made)


for _name in OPERATORS:
    kernel(_name, on="machine")(along_rows)
