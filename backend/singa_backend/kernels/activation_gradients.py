"""Gradients of functions of each element: machine code for what the rules write, or oneDNN."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from ..elementwise.compile import available
from ..ir.gradient import GRADIENT
from ..ir.versioned import VersionedOperator
from . import onednn as dnn
from .expressions import ExpressionCall, compute, replaceable, trace
from .functions import GRADIENTS
from .lowering import desc, emit, ordered, require_gradient, require_plain, threads_for
from .onednn import backward
from .table import Site, gradient, gradient_kernels, kernel
from .values import FINITE, Value, dense


def _takes_bounds(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return not any(needs[1:])


@gradient("Clip", 6, 11, 12, 13, reads=("dy0", "x0", "x1?", "x2?"), takes=_takes_bounds)
def clip_gradient(site: Site, dy: Value, x: Value, low: Value | None = None, high: Value | None = None) -> Value:
    """The gradient between the bounds, and at them; 0 elsewhere."""
    bounds = []
    for given, name, limit in (low, "min", -np.inf), (high, "max", np.inf):
        site.require(given is None or (given.constant and given.size == 1), "a bound is not a constant number")
        number = site.attributes.get(name) if given is None else given.array.reshape(-1)[0]
        bounds.append(np.float32(limit if number is None else number))
    least, most = bounds
    site.require(least <= most, "the bounds are not in order")
    below = np.nextafter(least, np.float32(-np.inf))  # oneDNN's gradient is 0 at the lower bound, and not at the upper one
    return _by_values(site, dy, x, "clip", dnn.args.SRC, float(below), float(most))


def _by_values(site: Site, dy: Value, y: Value, algorithm: str, arg: int, alpha: float = 0.0, beta: float = 0.0) -> Value:
    """The gradient from the input or the result, in place of the given gradient if nothing else reads it."""
    require_plain(site, y)
    require_gradient(site, dy, y.shape)
    site.require_finite(dy, y)
    memory_order = sorted(range(y.ndim), key=lambda i: (-y.strides[i], i))
    site.require(dense(y.shape, y.strides, y.dtype.itemsize, memory_order), "a value has gaps in memory")
    given, md = dy, desc(y)
    dy = ordered(site, dy, memory_order)
    with threads_for(y.size * 4):
        forward = dnn.eltwise(md, md, algorithm=algorithm, alpha=alpha, beta=beta, prop="training")
        made = backward.eltwise_backward(md, md, md, hint=forward, algorithm=algorithm, alpha=alpha, beta=beta)
    if dy is given and site.reusable(0):
        dx = dy.view(dy.shape, dy.strides)
    else:
        dx = site.new(y.shape, y.dtype, memory_order, FINITE)
    arguments = {arg: (md, y), dnn.args.DIFF_DST: (md, dy), dnn.args.DIFF_SRC: (md, dx)}
    emit(site, made, arguments, (dx,), "eltwise gradient")
    return dx


def activation_gradient(site: Site, dy: Value, v: Value) -> Value:
    """The gradient from the input, or from the result."""
    row = GRADIENTS[site.name]
    found = row.function(site.attributes, row.backward or "")
    if found is None:
        site.refuse("oneDNN does not have the function")
    return _by_values(site, dy, v, found[0], dnn.args.DST if row.backward else dnn.args.SRC, *found[1:])


for _name, _row in GRADIENTS.items():
    gradient(_name, reads=("dy0", "y0" if _row.backward else "x0"))(activation_gradient)


Operand = int | np.ndarray | str | None
"""What a call of a body reads: the result of a call before it, a constant, or an input of the body by its name."""

_Calls = tuple[tuple[tuple[VersionedOperator, dict[str, Any], tuple[Operand, ...]], ...], int]

_bodies: dict[Hashable, _Calls] = {}
"""The calls of bodies, and the position of the one that returns the first gradient, by the gradient and what it reads."""

_MOST = 256
"""The number of bodies that are kept."""


def by_rule(site: Site, *reads: Value | None) -> Value:
    """The gradient of the first input, by machine code for what the rule writes."""
    site.require(not available(), available())
    names = [what.rstrip("?") for what in gradient_kernels["", site.name].reads]
    given = dict(zip(names, reads, strict=True))
    kinds = tuple(v and (v.dtype, v.ndim, v.array.tobytes() if v.constant and v.size == 1 else None) for v in reads)
    key = (site.operator, tuple(sorted(site.attributes.items())), kinds)
    if key not in _bodies:
        if len(_bodies) >= _MOST:
            _bodies.clear()
        _bodies[key] = _calls(site, given)
    calls, last = _bodies[key]
    operations: list[ExpressionCall] = []
    for operator, attributes, operands in calls[: last + 1]:
        values = [given[o] if isinstance(o, str) else site.constant(o) if isinstance(o, np.ndarray) else o for o in operands]
        operations.append(ExpressionCall(operator, attributes, tuple(values)))
    terms, inputs = trace(site, operations)
    free = replaceable(site, reads)
    label = f"{site.name.lower()} gradient"
    (dx,) = compute(site, terms[-1:], inputs, label, lambda v: id(v) in free, engine="machine")
    return dx


def _calls(site: Site, given: Mapping[str, Value | None]) -> _Calls:
    """The calls of the body of a gradient."""
    body = site.body()
    if body is None:
        site.refuse("it has no body")
    formals, positions = {v: v.name for v in body.inputs}, dict[Any, int]()
    calls: list[tuple[VersionedOperator, dict[str, Any], tuple[Operand, ...]]] = []
    for node in body.nodes:
        operands: list[Operand] = []
        for v in node.inputs:
            site.require(v not in formals or formals[v] in given, "the rule reads what the kernel does not")
            operands.append(None if v is None else formals.get(v, v.constant) if v not in positions else positions[v])
        operator = node.operator
        if operator is None or len(node.outputs) != 1:
            site.refuse("a call of the rule has several results")
        positions[node.outputs[0]] = len(calls)
        calls.append((operator, node.attributes, tuple(operands)))
    first = next((o for o in body.outputs if o is not None and o.name == "dx0"), None)
    site.require(first in positions, "the rule returns no gradient of the first input, or what it is given")
    return tuple(calls), positions[first]


for _name in (*GRADIENTS, "Clip"):
    kernel(_name, on="machine", domain=GRADIENT)(by_rule)
