"""Gradients of functions of each element on oneDNN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import onednn as dnn
from .lowering import desc, emit, ordered, require_gradient, require_plain, threads_for
from .onednn import backward
from .table import Site, gradient
from .values import FINITE, Value, dense


@gradient("Relu", 6, 13, 14, reads=("dy0", "y0"))
def relu_gradient(site: Site, dy: Value, y: Value) -> Value:
    """The gradient where the result is positive, 0 elsewhere."""
    return _by_result(site, dy, y, "relu_use_dst_for_bwd")


@gradient("Sigmoid", 6, 13, reads=("dy0", "y0"))
def sigmoid_gradient(site: Site, dy: Value, y: Value) -> Value:
    """Dy * y * (1 - y)."""
    return _by_result(site, dy, y, "logistic_use_dst_for_bwd")


@gradient("Tanh", 6, 13, reads=("dy0", "y0"))
def tanh_gradient(site: Site, dy: Value, y: Value) -> Value:
    """Dy * (1 - y * y)."""
    return _by_result(site, dy, y, "tanh_use_dst_for_bwd")


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


def _by_result(site: Site, dy: Value, y: Value, algorithm: str) -> Value:
    """The gradient from the result."""
    return _by_values(site, dy, y, algorithm, dnn.args.DST)


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


def _algorithm(name: str, attributes: dict[str, Any]) -> tuple[str, float, float] | None:
    """The function of oneDNN whose gradient, from the input, is that of an operator, and its two parameters."""
    match name:
        case "LeakyRelu":
            return "relu", attributes["alpha"], 0.0
        case "Elu":
            return "elu", attributes["alpha"], 0.0
        case "HardSigmoid":
            return "hardsigmoid", attributes["alpha"], attributes["beta"]
        case "HardSwish":
            return "hardswish", 1 / 6, 0.5
        case "Softplus":
            return "soft_relu", 1.0, 0.0
        case "Swish":
            return "swish", attributes["alpha"], 0.0
        case "Mish":
            return "mish", 0.0, 0.0
        case "Gelu" if attributes["approximate"] in ("none", "tanh"):
            return "gelu_erf" if attributes["approximate"] == "none" else "gelu_tanh", 0.0, 0.0
    return None


@gradient("LeakyRelu", 6, 16, reads=("dy0", "x0"))
@gradient("Elu", 6, 22, reads=("dy0", "x0"))
@gradient("HardSigmoid", 6, 22, reads=("dy0", "x0"))
@gradient("HardSwish", 14, 22, reads=("dy0", "x0"))
@gradient("Softplus", 1, 22, reads=("dy0", "x0"))
@gradient("Swish", 24, reads=("dy0", "x0"))
@gradient("Mish", 18, 22, reads=("dy0", "x0"))
@gradient("Gelu", 20, reads=("dy0", "x0"))
def activation_gradient(site: Site, dy: Value, x: Value) -> Value:
    """The gradient from the input."""
    found = _algorithm(site.name, site.attributes)
    if found is None:
        site.refuse("oneDNN does not have the function")
    name, alpha, beta = found
    return _by_values(site, dy, x, name, dnn.args.SRC, alpha, beta)
