"""Gradients of poolings on oneDNN, with the channels innermost in memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..ir.windows import Windows
from . import onednn as dnn
from .convolution import average_algorithm, ends, pool_windows
from .float_products import require_any_bits
from .lowering import channels_last, dense_desc, emit, require_gradient, require_plain, threads_for
from .onednn import Primitive, backward
from .pooling import require_no_nan
from .table import Site, gradient, training
from .values import FINITE, Value, last_order

_MAX = (1, 8, 10, 11, 12, 22)


def _takes_maxima(attributes: dict[str, Any], needs: Any) -> bool:
    return not attributes.get("storage_order")


def _primitives(site: Site, x: Value, at: Windows, algorithm: str) -> tuple[Primitive, Primitive]:
    """The pooling in training form, and its gradient."""
    shape, order = (*x.shape[:2], *at.counts), last_order(x.ndim)
    src, dst = dense_desc(x.dtype, x.shape, order), dense_desc(x.dtype, shape, order)
    window: dict[str, Any] = {
        "algorithm": algorithm, "kernel": at.kernel, "strides": at.strides, "dilations": [d - 1 for d in at.dilations],
        "pads_begin": at.begins, "pads_end": ends(at),
    }  # fmt: skip
    with threads_for(math.prod(shape) * math.prod(at.kernel)):
        forward = dnn.pooling(src, dst, prop="training", **window)
        return forward, backward.pooling_backward(src, dst, hint=forward, **window)


@training("MaxPool", *_MAX)
def max_pool_training(site: Site, x: Value) -> tuple[Value | None, ...]:
    """A maximum pooling that also returns which cell of each window is the first maximum, in oneDNN's form."""
    require_any_bits(site)
    require_plain(site, x)
    site.require(not site.outputs[1], "the indices are used")
    require_no_nan(site, x)
    at = pool_windows(site, x, site.attributes["kernel_shape"])
    forward, _ = _primitives(site, x, at, "max")
    x = channels_last(site, x)
    order = last_order(x.ndim)
    y = site.new((*x.shape[:2], *at.counts), x.dtype, order, x.finiteness)
    workspace = site.new((forward.workspace_nbytes,), np.uint8, None, FINITE)
    arguments = {
        dnn.args.SRC: (forward.query("src"), x),
        dnn.args.DST: (forward.query("dst"), y),
        dnn.args.WORKSPACE: (forward.query("workspace"), workspace),
    }
    emit(site, forward, arguments, (y, workspace), "pooling")
    return y, None, workspace


@gradient("MaxPool", *_MAX, reads=("dy0", "x0", "h0"), takes=_takes_maxima, hidden=1)
def max_pool_gradient(site: Site, dy: Value, x: Value, workspace: Value) -> Value:
    """The gradient goes to the first maximum of each window."""
    require_any_bits(site)
    return _gradient(site, dy, x, pool_windows(site, x, site.attributes["kernel_shape"]), "max", workspace)


@gradient("AveragePool", 1, 7, 10, 11, 19, 22, reads=("dy0", "x0"))
def average_pool_gradient(site: Site, dy: Value, x: Value) -> Value:
    """Each cell receives its share of all windows that average it."""
    require_any_bits(site)
    at = pool_windows(site, x, site.attributes["kernel_shape"])
    return _gradient(site, dy, x, at, average_algorithm(site, at))


def _gradient(site: Site, dy: Value, x: Value, at: Windows, algorithm: str, workspace: Value | None = None) -> Value:
    require_plain(site, x)
    require_gradient(site, dy, (*x.shape[:2], *at.counts))
    site.require_finite(dy)
    forward, made = _primitives(site, x, at, algorithm)
    dy = channels_last(site, dy)
    dx = site.new(x.shape, x.dtype, last_order(x.ndim), FINITE)
    arguments = {dnn.args.DIFF_DST: (forward.query("dst"), dy), dnn.args.DIFF_SRC: (forward.query("src"), dx)}
    if workspace is not None:
        arguments[dnn.args.WORKSPACE] = (forward.query("workspace"), workspace)
    emit(site, made, arguments, (dx,), "pooling gradient")
    return dx
