"""Convolutions as matrix products: the filters are the rows of one matrix, the windows the columns of the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Ints, WorkShape, operator
from ..ir.windows import SAME, Windows, before_11, per_axis, transposed, windows
from ._api import Array
from ._common import clamped
from ._flops import size, window
from ._shapes import conv_transpose_shapes, convolved
from ._windows import before, cells, extent, framed, frames, places, spatial, unframed

BLOCK, COLUMNS = 1 << 17, 128
"""Approximate number of window elements copied at a time on the host, which fit its cache; and the minimum number of windows."""


def convolve(xp: Xp, x: Array, w: Array, at: Windows, group: int) -> Array:
    """Compute Y[n, g, m] = sum over c and the kernel of W[g, m, c] * X[n, g, c], for each window.

    Sums that may exceed 2**24 are accumulated in float64.
    """
    n, m, kernel = x.shape[0], w.shape[0], math.prod(w.shape[1:])
    if x.dtype == np.float32 and xp.sums_are_large(x, w, kernel):  # so that equal filters make equal channels
        return convolve(xp, x.astype(np.float64), w.astype(np.float64), at, group).astype(np.float32)
    filters = w.reshape(group, m // group, kernel)
    limits.admit((n, m, *at.counts), x.dtype)
    if at.is_pointwise:
        columns = x.reshape(n, group, kernel, math.prod(at.counts))
        return xp.matmul(filters, columns).reshape(n, m, *at.counts)
    rows, *others = at.counts
    row = math.prod(others)
    y = xp.empty((n, group, m // group, rows * row), dtype=x.dtype)
    view = None
    across = n * group * kernel * row  # elements of one row of windows
    step = max(COLUMNS // max(1, row) + 1, xp.block_elements(rows * across, x.dtype.itemsize, BLOCK) // max(1, across))
    limits.admit((n, group, kernel, min(step, rows), row), x.dtype)
    for first in limits.blocks(rows, step):
        last = min(first + step, rows)
        begins = (at.begins[0] - first * at.strides[0], *at.begins[1:])
        columns = xp.columns(x, places(at)._replace(begins=begins, counts=(last - first, *others)))
        if columns is None:
            view = frames(xp, x, at) if view is None else view
            columns = view[(..., slice(first, last), *(slice(None),) * len(others))]
        columns = columns.reshape(n, group, kernel, (last - first) * row)
        xp.matmul(filters, columns, out=y[..., first * row : last * row])
    return y.reshape(n, m, *at.counts)


def filter_windows(
    x: Array,
    w: Array,
    group: int,
    kernel_shape: Ints | None,
    strides: Ints | None,
    pads: Ints | None,
    dilations: Ints | None,
    auto_pad: str,
) -> Windows:
    """Return the windows of a convolution of x by filters w; raise OperatorError if the shapes do not match."""
    sizes = spatial(x)
    check_filters(x, w, group, kernel_shape)
    if x.shape[1] != w.shape[1] * group or w.shape[0] % group:
        raise OperatorError(f"cannot split x of shape {x.shape} and filters of shape {w.shape} into {group} groups", code="SX404")
    return windows(sizes, w.shape[2:], strides, pads, dilations, auto_pad)


def check_filters(x: Array, w: Array, group: int, kernel_shape: Ints | None) -> None:
    """Raise OperatorError if the rank, the groups or kernel_shape do not match the filters."""
    if w.ndim != x.ndim:
        raise OperatorError(f"x and the filters must have equal ranks, got shapes {x.shape} and {w.shape}", code="SX404")
    if kernel_shape and tuple(kernel_shape) != tuple(w.shape[2:]):
        raise OperatorError(
            f"kernel_shape must equal the filters' spatial shape {w.shape[2:]}, got {tuple(kernel_shape)}", code="SX404"
        )
    if group < 1:
        raise OperatorError(f"group must be at least 1, got {group}", code="SX404")


def per_channel(b: Array, m: int, ndim: int, name: str = "bias", *, scalar: bool = False) -> Array:
    """Reshape `b`, one value for each of m channels (or, with scalar, one for all), to broadcast to N x M x D1 x ... x Dn."""
    if b.ndim > 1 or (b.size != m and not (scalar and b.size == 1)):
        raise OperatorError(f"the {name} must hold {m} values, got shape {b.shape}", code="SX404")
    return b.reshape(-1, *(1,) * (ndim - 2))


@operator("Conv", 1, 11, 22,
          traits=("product", "finite", "linear", "reads_quantized"),
          weights={0: "the input", 1: "the weight", 2: "the bias"})  # fmt: skip
def conv(
    xp: Xp,
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    at = filter_windows(x, w, group, kernel_shape, strides, pads, dilations, auto_pad)
    y = convolve(xp, x, w, at, group)
    if b is not None:
        y += per_channel(b, w.shape[0], x.ndim)
    return y


conv.flops(window(1))
conv.shapes(convolved())


@conv.gradient
def conv_gradient(
    op: Op,
    dy: V,
    x: V,
    w: V,
    b: V,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    pads: Ints | None,
    strides: Ints | None,
    needs: tuple[bool, ...],
) -> tuple[V, ...]:
    """The gradient by x is the transposed convolution of dy.

    The gradient by the filters is the convolution of x by dy with strides and dilations exchanged, and with the samples
    of the batch as channels.
    """
    rank = op.rank(x) - 2
    strides, dilations = per_axis("strides", strides, rank), per_axis("dilations", dilations, rank)
    kernel = cells(op, w)
    begins = before(op, x, dy, kernel, strides, dilations, pads, auto_pad)
    dx = dw = db = None
    if needs[0]:
        full = op.ConvTranspose(dy, w, group=group, strides=strides, dilations=dilations)
        dx = unframed(op, full, x, begins)
    if needs[1]:
        seen = framed(op, x, dy, kernel, strides, dilations, begins)
        points = (op.shape(w) or (0, 0, 0))[2:] == (1,) * rank and max(strides) == 1
        dw = _by_points(op, seen, dy, w, group) if points else _by_the_filters(op, seen, dy, group, strides, dilations)
    if len(needs) > 2 and needs[2]:
        db = op.ReduceSum(dy, op.axes_but(dy, 1), keepdims=0)
    return dx, dw, db


def _by_points(op: Op, seen: V, dy: V, w: V, group: int) -> V:
    """`_by_the_filters` for windows of one cell: matrix products, several times as fast."""
    rows, columns = (_in_groups(op, v, group, op.ReduceProd(cells(op, v), keepdims=1)) for v in (dy, seen))
    return op.Reshape(op.ReduceSum(op.MatMul(rows, op.swap(columns)), [0], keepdims=0), op.Shape(w), allowzero=1)


def _by_the_filters(op: Op, seen: V, dy: V, group: int, strides: Ints, dilations: Ints) -> V:
    """Sum over n and windows o of dy[n, g, m, o] * seen[n, g, c, o * strides + j * dilations], as (g m) x c x j."""
    samples, filters = _by_samples(op, seen, group), op.swap(dy, 0, 1)
    return op.swap(op.Conv(samples, filters, group=group, strides=dilations, dilations=strides), 0, 1)


def _in_groups(op: Op, x: V, group: int, sizes: V) -> V:
    """Reshape N x (G c) x ... to N x G x c x sizes."""
    channels = op.Shape(x, start=1, end=2)
    return op.Reshape(x, op.Concat(op.Shape(x, end=1), [group], op.Div(channels, group), sizes, axis=0), allowzero=1)


def _merged(op: Op, x: V, at: int) -> V:
    """Merge the axes `at` and `at + 1` of `x`."""
    shape = op.Shape(x)
    one = op.Mul(op.Shape(x, start=at, end=at + 1), op.Shape(x, start=at + 1, end=at + 2))
    rest = op.Slice(shape, [at + 2], [op.rank(x)])
    return op.Reshape(x, op.Concat(op.Slice(shape, [0], [at]), one, rest, axis=0), allowzero=1)


def _by_samples(op: Op, x: V, group: int) -> V:
    """Convert N x (G c) x ... to c x (G N) x ...."""
    spatial = range(3, op.rank(x) + 1)
    return _merged(op, op.Transpose(_in_groups(op, x, group, cells(op, x)), perm=[2, 1, 0, *spatial]), 1)


def convolve_integers(
    xp: Xp, x: Array, w: Array, x_zero_point: Array | None, w_zero_point: Array | None, at: Windows, group: int
) -> Array:
    """Compute the exact sums in float64: each product is below 2**16, so a sum of 2**37 products is still exact."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    if x_zero_point is not None:
        x -= per_channel(x_zero_point, 1, 2, "zero point of x", scalar=True)
    if w_zero_point is not None:
        w -= per_channel(w_zero_point, w.shape[0], w.ndim + 1, "zero point of w", scalar=True)
    return convolve(xp, x, w, at, group)


@operator("ConvInteger", 10, traits=("product",))
def conv_integer(
    xp: Xp,
    x: Array,
    w: Array,
    x_zero_point: Array | None = None,
    w_zero_point: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """The padding value is x's zero point, 0 after its subtraction; results wrap around in int32."""
    at = filter_windows(x, w, group, kernel_shape, strides, pads, dilations, auto_pad)
    y = convolve_integers(xp, x, w, x_zero_point, w_zero_point, at, group)
    return y.astype(np.int64).astype(np.int32)


conv_integer.flops(window(1))
conv_integer.shapes(convolved())


@operator("QLinearConv", 10, traits=("product",))
def qlinear_conv(
    xp: Xp,
    x: Array,
    x_scale: Array,
    x_zero_point: Array,
    w: Array,
    w_scale: Array,
    w_zero_point: Array,
    y_scale: Array,
    y_zero_point: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Compute the exact sum, round it to float32, multiply by a factor for each channel, round half to even, add y's zero point.

    The product is in float32, as in onnxruntime and in the instructions of processors; in float64 it differs near ties.
    """
    m = w.shape[0]
    at = filter_windows(x, w, group, kernel_shape, strides, pads, dilations, auto_pad)
    y = convolve_integers(xp, x, w, x_zero_point, w_zero_point, at, group)
    if b is not None:
        y += per_channel(b, m, x.ndim)
    x_scale, y_scale = (per_channel(s, 1, 2, "scale", scalar=True) for s in (x_scale, y_scale))
    y = y.astype(np.float32) * per_channel(x_scale * w_scale / y_scale, m, x.ndim, "scale of w", scalar=True)
    y = xp.rint(y) + per_channel(y_zero_point, 1, 2, "zero point of y", scalar=True)
    bounds = np.iinfo(y_zero_point.dtype)
    return clamped(xp, y, bounds.min, bounds.max).astype(y_zero_point.dtype)


qlinear_conv.flops(window(3))
qlinear_conv.shapes(convolved(3))


@operator("CausalConvWithState", 27, weights={1: "the weight", 2: "the bias"})
def causal_conv_with_state(
    xp: Xp, x: Array, w: Array, b: Array | None = None, past_state: Array | None = None, *, activation: str = "none"
) -> tuple[Array, Array]:
    """Filter each channel of past_state followed by x over the current cell and the k - 1 cells before it."""
    if activation not in ("none", "silu", "swish"):
        raise OperatorError(f"activation must be none, silu or swish, got {activation!r}", code="SX404")
    if x.ndim != 3 or w.ndim != 3 or w.shape[:2] != (x.shape[1], 1) or w.shape[2] < 1:
        raise OperatorError(f"x must have shape N x C x L and the filters C x 1 x k, got {x.shape} and {w.shape}", code="SX404")
    n, c, length = x.shape
    state = (n, c, w.shape[2] - 1)
    if past_state is None:
        past_state = xp.zeros(state, dtype=x.dtype)
    elif past_state.shape != state:
        raise OperatorError(f"past_state must have shape {state}, got {past_state.shape}", code="SX404")
    seen = xp.concatenate([past_state, x], axis=2)
    y = conv(xp, seen, w, b, group=c) if c else xp.zeros_like(x)
    if activation != "none":
        y = y / (1 + xp.exp(-y))
    return y, seen[..., length:]


@causal_conv_with_state.decomposition
def causal_conv_with_state_decomposition(op: Op, x: V, w: V, b: V, past_state: V, activation: str) -> tuple[V, V]:
    channels, length = op.Shape(x, start=1, end=2), op.Shape(x, start=2)
    before = op.Sub(op.Shape(w, start=2), 1)
    if past_state is None:
        state = op.Concat(op.Shape(x, end=1), channels, before, axis=0)
        past_state = op.Expand(op.constant(0, op.dtype(x)), state)
    seen = op.Concat(past_state, x, axis=2)
    # Each channel becomes a sample of one channel, so that the number of groups may be unknown.
    taps = op.Squeeze(w, [1])
    y = op.Einsum(_windows_of(op, seen, op.Squeeze(length, [0]), op.Shape(w, start=2)), taps, equation="nclk,ck->ncl")
    if b is not None:
        y = op.Add(y, op.Unsqueeze(b, [1]))
    if activation != "none":
        y = op.Mul(y, op.Sigmoid(y))
    return y, op.Slice(seen, length, [2**62], [2])


def _windows_of(op: Op, seen: V, length: V, k: V) -> V:
    """Return the windows of k cells along the last axis, as ... x l x k."""
    places = op.Add(op.Unsqueeze(op.Range(0, length, 1), [1]), op.Range(0, op.Squeeze(k, [0]), 1))
    return op.Gather(seen, places, axis=2)


# --- the adjoint: windows write instead of read -----------------------------------------------------------------------


def spread(xp: Xp, x: Array, w: Array, at: Windows, group: int) -> Array:
    """Add to Y[n, g, m], at window o and offset j, the sum over c of W[g, c, m, j] * X[n, g, c, o], for all o and j."""
    n, c = x.shape[:2]
    sizes = spatial(x)
    m = w.shape[1]
    offsets, each = math.prod(at.kernel), group * m * math.prod(sizes)
    filters = xp.ascontiguousarray(w.reshape(group, c // group, m, offsets).transpose(0, 3, 2, 1))  # one matrix for each offset
    x = x.reshape(n, group, c // group, math.prod(sizes))
    limits.admit((n, group, m, *at.sizes), x.dtype)
    limits.admit((n, group * m, *sizes), x.dtype)
    limits.check_rounds(offsets)
    y = None
    taps = {
        sum(j * math.prod(at.kernel[i + 1 :]) for i, (j, _, _) in enumerate(t)): t
        for t in itertools.product(*(at.taps(axis) for axis in range(len(sizes))))
    }
    block = xp.block_elements(n * offsets * each, x.dtype.itemsize, BLOCK)
    samples = max(1, block // max(1, offsets * each))
    step = max(1, block // max(1, samples * each))
    for start in limits.blocks(n, samples):
        here = slice(start, start + samples)
        for first in limits.blocks(offsets, step):
            some, batch = filters[:, first : first + step], x[here]
            count = some.shape[1]
            part = xp.matmul(some.reshape(group, count * m, c // group), batch)
            part = part.reshape(batch.shape[0], group, count, m, *sizes)
            if samples >= n and step >= offsets and count:
                y = xp.folded(part.reshape(n, group, *at.kernel, m, *sizes), at.sizes, places(at))
                if y is not None:
                    break
            if y is None:
                y = xp.zeros((n, group, m, *at.sizes), dtype=x.dtype)
            for k in range(count):
                if first + k in taps:
                    _, seen, there = zip(*taps[first + k], strict=True)
                    y[(here, ..., *there)] += part[(slice(None), slice(None), k, ..., *seen)]
    if y is None:  # no window, or no sample
        y = xp.zeros((n, group, m, *at.sizes), dtype=x.dtype)
    return y.reshape(n, group * m, *at.sizes)


@operator("ConvTranspose", 11, 22,
          traits=("product", "finite", "linear", "reads_quantized"),
          weights={0: "the input", 1: "the weight", 2: "the bias"})  # fmt: skip
def conv_transpose(
    xp: Xp,
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    sizes = spatial(x)
    check_filters(x, w, group, kernel_shape)
    if w.shape[0] != x.shape[1] or x.shape[1] % group:
        raise OperatorError(f"cannot split x of shape {x.shape} and filters of shape {w.shape} into {group} groups", code="SX404")
    at = transposed(sizes, tuple(w.shape[2:]), strides, pads, dilations, auto_pad, output_padding, output_shape)
    y = spread(xp, x, w, at, group)
    return y if b is None else y + per_channel(b, y.shape[1], y.ndim)


@conv_transpose.flops
def transposed_flops(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
    return 2 * size(inputs[0]) * size((inputs[1] or ())[1:])


conv_transpose.shapes(conv_transpose_shapes)


@conv_transpose.gradient
def conv_transpose_gradient(
    op: Op,
    dy: V,
    x: V,
    w: V,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    output_padding: Ints | None,
    output_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
    needs: tuple[bool, ...],
) -> tuple[V, ...]:
    """The gradient by x is the convolution of dy; by the filters, that of Conv with x and y exchanged."""
    rank = op.rank(x) - 2
    strides, dilations = per_axis("strides", strides, rank), per_axis("dilations", dilations, rank)
    kernel = cells(op, w)
    if output_shape or auto_pad in SAME:
        full = op.Add(extent(op, cells(op, x), kernel, strides, dilations), list(per_axis("", output_padding, rank, low=0)))
        total = op.Max(op.Sub(full, cells(op, dy)), [0])
        half = op.Div(total, 2)
        begins = half if auto_pad == "SAME_UPPER" else op.Sub(total, half)
    else:
        begins = before(op, x, dy, kernel, strides, dilations, pads, auto_pad)
    seen = framed(op, dy, x, kernel, strides, dilations, begins)
    dx = dw = db = None
    if needs[0]:
        dx = op.Conv(seen, w, group=group, strides=strides, dilations=dilations)
    if needs[1]:
        dw = _by_the_filters(op, seen, x, group, strides, dilations)
    if len(needs) > 2 and needs[2]:
        db = op.ReduceSum(dy, op.axes_but(dy, 1), keepdims=0)
    return dx, dw, db


@operator("ConvTranspose", 1)
def conv_transpose_1(
    xp: Xp,
    x: Array,
    w: Array,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    output_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Before opset 11, output_shape put an odd cell of padding at the end except for SAME_UPPER, and could have all axes."""
    auto_pad, output_shape = before_11(x.ndim - 2, auto_pad, output_shape)
    return conv_transpose(xp, x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape,
                          output_padding=output_padding, output_shape=output_shape, pads=pads, strides=strides)  # fmt: skip


@conv_transpose_1.decomposition
def conv_transpose_1_decomposition(
    op: Op,
    x: V,
    w: V,
    b: V,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    output_padding: Ints | None,
    output_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    """With output_shape, auto_pad only places the odd cell: the other end has the old meaning."""
    auto_pad, output_shape = before_11(op.rank(x) - 2, auto_pad, output_shape)
    return op.ConvTranspose(
        x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, output_padding=output_padding,
        output_shape=output_shape, pads=None if output_shape else pads, strides=strides,
    )  # fmt: skip
