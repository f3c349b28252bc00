"""Gradients of functions of each element on oneDNN."""

from __future__ import annotations

from . import onednn as dnn
from .lowering import LARGE, desc, emit, ordered, require_plain, threads_for
from .onednn import backward
from .table import Site, gradient, worst
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


def _by_result(site: Site, dy: Value, y: Value, algorithm: str, alpha: float = 0.0, beta: float = 0.0) -> Value:
    """The gradient from the result, in place of the given gradient if nothing else reads it."""
    require_plain(site, y)
    site.require(dy.shape == y.shape and dy.dtype == y.dtype, "the gradient does not have the type of the result")
    site.require(y.size >= LARGE, "for small values")
    site.require(worst(dy, y) == FINITE, "a value may be infinite")
    site.needs_finite()
    memory_order = sorted(range(y.ndim), key=lambda i: (-y.strides[i], i))
    site.require(dense(y.shape, y.strides, y.dtype.itemsize, memory_order), "the result has gaps in memory")
    given, md = dy, desc(y)
    dy = ordered(site, dy, memory_order)
    with threads_for(y.size * 4):
        forward = dnn.eltwise(md, md, algorithm=algorithm, alpha=alpha, beta=beta, prop="training")
        made = backward.eltwise_backward(md, md, md, hint=forward, algorithm=algorithm, alpha=alpha, beta=beta)
    if dy is given and site.reusable(0):
        dx = dy.view(dy.shape, dy.strides)
    else:
        dx = site.new(y.shape, y.dtype, memory_order, FINITE)
    arguments = {dnn.args.DST: (md, y), dnn.args.DIFF_DST: (md, dy), dnn.args.DIFF_SRC: (md, dx)}
    emit(site, made, arguments, (dx,), "eltwise gradient")
    return dx
