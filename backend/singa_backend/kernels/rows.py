"""Softmax, norms, reductions and elementwise calls by machine code, for what their definitions leave when they are traced.

A row is what a definition reduces.  It is read a few times, once for each reduction that depends on another one.  The elementwise
calls whose results only it reads, and those that follow it, are a part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..elementwise.compile import available
from ..elementwise.expression import Term, order
from ..elementwise.machine_code import STRIP
from . import expressions
from .elementwise import collapsed, finiteness_of, order_of
from .expressions import (
    CHUNK,
    MISSING,
    PARALLEL,
    Leaves,
    chained,
    finiteness_in,
    framed,
    label_of,
    machine_code,
    movements,
    outputs,
    ranges,
)  # fmt: skip
from .table import Refused, Site, general, kernel, table
from .values import ANY, FINITE, REACHED, Buffer, Value, strides_of

OPERATORS = (
    "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin",
    "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "ArgMax", "ArgMin",
    "InstanceNormalization", "MeanVarianceNormalization", "LpNormalization",
)  # fmt: skip
"""The operators whose definitions reduce axes."""


@general("unary", "broadcasting", on="machine")
def generated(site: Site, *inputs: Value | None) -> Value:
    """A call that is elementwise or reduces axes, and as many as possible of those that follow it."""
    site.require(not available(), available())
    terms, values, free = chained(site, inputs)
    for count in range(len(terms), 0, -1):
        site.absorb(count - 1)
        try:
            (y,) = compute(site, terms[count - 1 : count], values, label_of(site), lambda v: id(v) in free, engine="machine")
        except Refused:
            if site.wanted or count == 1:
                raise
            continue
        x = inputs[0]
        if site.name == "Softmax" and not site.absorbed and x is not None and x.low == REACHED:
            y.finiteness = FINITE
        return y
    raise AssertionError


def compute(
    site: Site,
    results: Sequence[Term],
    inputs: Sequence[Value],
    label: str = "",
    reusable: Callable[[Value], bool] = lambda v: False,
    into: Mapping[int, Value] | None = None,
    engine: str = "",
) -> list[Value]:
    """As `expressions.compute`, of expressions that may reduce axes."""
    reduced = [t for t in order(results) if t.op == "reduce"]
    if not reduced:
        return expressions.compute(site, results, inputs, label, reusable, into, engine)
    site.require(not available(), available())
    known = ranges(site, results, inputs)
    ys = _emit(site, results, reduced, inputs, label, reusable)
    for r, y in zip(results, ys, strict=True):
        y.finiteness, y.low = finiteness_of(r.dtype, finiteness_in(known[id(r)])), ANY
    return ys


def _emit(
    site: Site, results: Sequence[Term], reduced: Sequence[Term], inputs: Sequence[Value], label: str,
    reusable: Callable[[Value], bool],
) -> list[Value]:  # fmt: skip
    kinds = {tuple(a - len(t.args[0].shape) for a in t.extra[1]) for t in reduced}
    site.require(len(kinds) == 1, "several axes are reduced apart")
    (axes,) = kinds
    shape = np.broadcast_shapes(*(t.args[0].shape for t in reduced))
    site.require(math.prod(shape), "there are no elements")
    rest = [i for i in range(len(shape)) if i - len(shape) not in axes]
    kept = tuple(d if i in rest else 1 for i, d in enumerate(shape))
    squeezed = tuple(shape[i] for i in rest)  # by a reduction that keeps no axis
    site.require(all(r.shape in (shape, kept, squeezed) for r in results), "the rows are broadcast")
    leaves = Leaves(site, results, inputs, label, axes, shape)
    terms = order(leaves.results)
    site.require(any(t.op == "reduce" for t in terms), "nothing is reduced")
    reads = [_padded(v, len(shape)) for v in leaves.values]
    layout = next((o for v in reads if v.shape == shape and (o := order_of(v)) is not None), list(range(len(shape))))
    forms = [shape if r.shape == shape else kept for r in results]
    models = [Value(Buffer(0), f, strides_of(f, r.dtype.itemsize, layout), r.dtype) for f, r in zip(forms, results, strict=True)]
    frame = _frame(site, shape, layout, axes, [*models, *reads])
    moves = frame.moves[len(models) :]
    work = math.prod(shape) * len(terms)
    found = machine_code(
        site, tuple(leaves.results), movements([m[2:] for m in moves], reads), work, axes, frame.across
    )  # fmt: skip
    if found is None:
        site.refuse(MISSING if site.wanted else "there is no machine code")
    function, places, types = found
    ys = outputs(site, leaves, layout, reusable, {}, lambda k, place: True, kept)
    values = [reads[i] if i >= 0 else _count(site, terms[~i]) for i in places]
    steps = [*(moves[i] if i >= 0 else (0, 0, 0, 0) for i in places), *frame.moves[: len(models)]]
    threads = site.options.threads if work > PARALLEL else 1
    starts, total = [], 0
    for dtype in types:
        steps.append((-(-frame.length * dtype.itemsize // 64) * 64, 0, frame.width * dtype.itemsize, dtype.itemsize))
        starts.append(total)
        total += steps[-1][0] * threads
    scratch = site.scratch(total) if total else None
    bind = framed(function, threads, max(1, CHUNK // frame.length), frame.sizes, steps, [*values, *ys], scratch, starts)
    site.emit(bind, reads=values, writes=ys, kernel=f"machine.{label}", scratch=scratch)
    at = [i for i in range(len(shape)) if i in rest]
    return [
        y.view(squeezed, [y.strides[i] for i in at]) if r.shape == squeezed != y.shape else y
        for r, y in zip(results, ys, strict=True)
    ]


@dataclass(frozen=True)
class _Frame:
    """How rows are walked.

    Attributes:
        sizes: the inner, the outer and the middle size, and the depth.
        moves: for each value its steps along the outer, the middle, the deep and the inner axis.
        across: whether the inner axis is not reduced.
    """

    sizes: tuple[int, int, int, int]
    moves: list[tuple[int, int, int, int]]
    across: bool

    @property
    def width(self) -> int:
        """The elements of a row at a place along the deep axis."""
        return STRIP * LANES if self.across else self.sizes[0]

    @property
    def length(self) -> int:
        """The elements of a row."""
        return self.width * self.sizes[3]


def _frame(
    site: Site, shape: tuple[int, ...], layout: Sequence[int], axes: tuple[int, ...], values: Sequence[Value]
) -> _Frame:  # fmt: skip
    """The axes of values, merged if all have them next to each other in memory."""
    merged: list[tuple[bool, int, list[int]]] = []
    moving = [a for a in layout if shape[a] != 1]
    for is_reduced, run in groupby(moving, key=lambda a: a - len(shape) in axes):
        dims, steps = collapsed(shape, list(run), values)
        merged += [(is_reduced, d, [s[i] if s else 0 for s in steps]) for i, d in enumerate(dims)]
    lead, deep = ([(d, s) for was, d, s in merged[:-1] if was == kind] for kind in (False, True))
    site.require(merged and (deep or merged[-1][0]), "a row has one element")
    site.require(len(lead) < 3 and len(deep) < 2, "the rows are in no order")
    still = (1, [0] * len(values))
    outer, middle, below = ([still] * (2 - len(lead)) + lead) + (deep or [still])
    across, n, inner = not merged[-1][0], merged[-1][1], merged[-1][2]
    moves = list(zip(outer[1], middle[1], below[1], inner, strict=True))
    return _Frame((n, outer[0], middle[0], below[0]), moves, across)


def _padded(v: Value, rank: int) -> Value:
    """A value with axes of 1 before its own."""
    return v.view((1,) * (rank - v.ndim) + v.shape, (0,) * (rank - v.ndim) + v.strides)


def _count(site: Site, t: Term) -> Value:
    """The number of elements along axes."""
    count = math.prod(t.args[0].shape[a] for a in t.extra)
    made: Any = np.array([count], t.dtype)
    return site.constant(made)


def reduces(domain: str, name: str) -> bool:
    """Whether the definition of an operator reduces axes, for machine code."""
    return any(k.body is generated for k in table.get((domain, name), ()))


for _name in OPERATORS:
    kernel(_name, on="machine")(generated)
