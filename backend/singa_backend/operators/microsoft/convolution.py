"""Convolutions with a summand and an activation, with channels last, and transposed ones whose pads are an input."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OperatorError
from ...ir.declaration import Host, Ints
from ...ir.shapes import KnownShapes, Shape
from ...ir.windows import SAME, explicit, pads_of
from .._flops import window
from .._shapes import conv_transpose_shapes, convolved
from ..conv import filter_windows, transposed_flops
from ._api import Array, Op, V, microsoft
from ._fused import activated, listed

WEIGHTS = {0: "the input", 1: "the weight", 2: "the bias"}


def _finished(op: Op, y: V, z: V | None, name: str | None, given: tuple[float, ...] | None) -> V:
    return activated(op, y if z is None else op.Add(y, z), name, lambda one: listed(one, given))


def _check_z(
    x: Array,
    w: Array,
    z: Array | None,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> None:
    """Raise OperatorError unless Z has the shape of the convolution."""
    if z is None:
        return
    shape = (x.shape[0], w.shape[0], *filter_windows(x, w, group, kernel_shape, strides, pads, dilations, auto_pad).counts)
    if z.shape != shape:
        raise OperatorError(f"Z must have the shape {shape} of the convolution, got {z.shape}", code="SX404")


@microsoft("FusedConv", 1, traits=("product",), weights=WEIGHTS)
def fused_conv(
    op: Op,
    x: V,
    w: V,
    b: V | None = None,
    z: V | None = None,
    *,
    activation: str | None = None,
    activation_params: tuple[float, ...] | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> V:
    """Compute the activation of Conv's result plus Z."""
    y = op.Conv(x, w, b, **_given(auto_pad, dilations, group, kernel_shape, pads, strides))
    return _finished(op, y, z, activation, activation_params)


fused_conv.accepts(_check_z)


fused_conv.flops(window(1))
fused_conv.shapes(convolved())


def _given(
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> dict[str, Any]:
    """The attributes of a Conv; None for absent ones."""
    return {"auto_pad": auto_pad, "dilations": dilations, "group": group, "kernel_shape": kernel_shape, "pads": pads,
            "strides": strides}  # fmt: skip


# --- channels last -----------------------------------------------------------------------------------------------------


def _channels_last(known: KnownShapes[Any], call: Any) -> Shape | None:
    x, filters = known.shape(call.inputs[0]), known.shape(call.inputs[1])
    if x is None or filters is None:
        return None
    return (x[0], *(known.fresh() for _ in x[2:]), filters[0])


@microsoft("NhwcConv", 1, traits=("product",), weights=WEIGHTS)
def nhwc_conv(
    op: Op,
    x: V,
    w: V,
    b: V | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> V:
    """Convolve X of shape N x D1 x ... x C; the filters are those of Conv, M x C x ...."""
    rank = op.rank(x)
    given = _given(auto_pad, dilations, group, kernel_shape, pads, strides)
    y = op.Conv(op.Transpose(x, perm=[0, rank - 1, *range(1, rank - 1)]), w, b, **given)
    return op.Transpose(y, perm=[0, *range(2, rank), 1])


nhwc_conv.flops(window(1))
nhwc_conv.shapes(_channels_last)


@microsoft("NhwcFusedConv", 1, traits=("product",), weights=WEIGHTS)
def nhwc_fused_conv(
    op: Op,
    x: V,
    w: V,
    b: V | None = None,
    z: V | None = None,
    *,
    activation: str | None = None,
    activation_params: tuple[float, ...] | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> V:
    """Compute the activation of NhwcConv's result plus Z, which has channels last too."""
    y = nhwc_conv(op, x, w, b, **_given(auto_pad, dilations, group, kernel_shape, pads, strides))
    return _finished(op, y, z, activation, activation_params)


@nhwc_fused_conv.accepts
def nhwc_fused_conv_accepts(
    x: Array,
    w: Array,
    z: Array | None,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> None:
    if z is None or x.ndim < 2:
        return
    first = np.broadcast_to(np.empty(()), (x.shape[0], x.shape[-1], *x.shape[1:-1]))
    counts = filter_windows(first, w, group, kernel_shape, strides, pads, dilations, auto_pad).counts
    shape = (x.shape[0], *counts, w.shape[0])
    if z.shape != shape:
        raise OperatorError(f"Z must have the shape {shape} of the convolution, got {z.shape}", code="SX404")


nhwc_fused_conv.flops(window(1))
nhwc_fused_conv.shapes(_channels_last)


# --- pads as an input ----------------------------------------------------------------------------------------------------


@microsoft(
    "ConvTransposeWithDynamicPads",
    1,
    traits=("product",),
    weights={0: "the input", 1: "the weight", 3: "the bias"},
)
def conv_transpose_with_dynamic_pads(
    op: Op,
    x: V,
    w: V,
    pads: Host[V] | None = None,
    b: V | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    strides: Ints | None = None,
) -> V:
    """Compute ConvTranspose with these pads; SAME_UPPER and SAME_LOWER take precedence over them, VALID does not."""
    given: dict[str, Any] = {"dilations": dilations, "group": group, "kernel_shape": kernel_shape}
    given |= {"output_padding": output_padding, "strides": strides}
    if auto_pad in SAME:
        return op.ConvTranspose(x, w, b, auto_pad=auto_pad, **given)
    y = op.ConvTranspose(x, w, b, **given)
    rank = op.rank(x)
    begins, ends = op.Split(op.Reshape(pads, [-1]), axis=0, num_outputs=2, outputs=2)
    return op.Slice(y, begins, op.Sub(op.Shape(y, start=2), ends), list(range(2, rank)))


@conv_transpose_with_dynamic_pads.accepts
def conv_transpose_with_dynamic_pads_accepts(x: Array, pads: Array | None, auto_pad: str) -> None:
    if pads is None:
        raise OperatorError("the input Pads must be present, although the schema has it as optional", code="SX402")
    if explicit(auto_pad):
        pads_of(pads.reshape(-1).tolist(), x.ndim - 2)


conv_transpose_with_dynamic_pads.flops(transposed_flops)


@conv_transpose_with_dynamic_pads.shapes
def conv_transpose_with_dynamic_pads_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape = conv_transpose_shapes(known, call)
    return None if shape is None else (*shape[:2], *(known.fresh() for _ in shape[2:]))
