"""Gradients of functions of each element on oneDNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .functions import GRADIENTS
from .lowering import desc, emit, ordered, require_gradient, require_plain, threads_for
from .onednn import backward
from .table import Site, gradient
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
