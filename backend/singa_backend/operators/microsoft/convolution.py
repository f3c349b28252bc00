"""Convolutions with a summand and an activation, with channels last, and transposed ones whose pads are an input."""

from __future__ import annotations

from typing import Any

from ...errors import OperatorError
from ...ir.declaration import Host, Ints
from ...ir.shapes import KnownShapes, Shape
from ...ir.windows import SAME
from .._flops import window
from .._shapes import conv_transpose_shapes, convolved
from ..conv import conv, conv_transpose, transposed_flops
from ._api import Array, Op, V, Xp, microsoft
from ._fused import activated, activated_nodes, listed

WEIGHTS = {0: "the input", 1: "the weight", 2: "the bias"}


def _finished(xp: Xp, y: Array, z: Array | None, name: str | None, given: tuple[float, ...] | None) -> Array:
    """Add Z and apply the activation."""
    if z is not None:
        if z.shape != y.shape:
            raise OperatorError(f"Z must have the shape {y.shape} of the convolution, got {z.shape}", code="SX404")
        y = y + z
    return activated(xp, y, name, lambda one: listed(one, given))


def _finished_nodes(op: Op, y: V, z: V | None, name: str | None, given: tuple[float, ...] | None) -> V:
    return activated_nodes(op, y if z is None else op.Add(y, z), name, lambda one: listed(one, given))


@microsoft("FusedConv", 1, traits=("product",), weights=WEIGHTS)
def fused_conv(
    xp: Xp,
    x: Array,
    w: Array,
    b: Array | None = None,
    z: Array | None = None,
    *,
    activation: str | None = None,
    activation_params: tuple[float, ...] | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Compute the activation of Conv's result plus Z."""
    y = conv(xp, x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
             strides=strides)  # fmt: skip
    return _finished(xp, y, z, activation, activation_params)


fused_conv.flops(window(1))
fused_conv.shapes(convolved())


@fused_conv.decomposition
def fused_conv_body(
    op: Op,
    x: V,
    w: V,
    b: V | None,
    z: V | None,
    activation: str | None,
    activation_params: tuple[float, ...] | None,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    y = op.Conv(x, w, b, **_given(auto_pad, dilations, group, kernel_shape, pads, strides))
    return _finished_nodes(op, y, z, activation, activation_params)


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
    """Convolve X of shape N x D1 x ... x C; the filters are those of Conv, M x C x ...."""
    y = conv(xp, xp.moveaxis(x, -1, 1), w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape,
             pads=pads, strides=strides)  # fmt: skip
    return xp.moveaxis(y, 1, -1)


nhwc_conv.flops(window(1))
nhwc_conv.shapes(_channels_last)


@nhwc_conv.decomposition
def nhwc_conv_body(
    op: Op,
    x: V,
    w: V,
    b: V | None,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    rank = op.rank(x)
    given = _given(auto_pad, dilations, group, kernel_shape, pads, strides)
    y = op.Conv(op.Transpose(x, perm=[0, rank - 1, *range(1, rank - 1)]), w, b, **given)
    return op.Transpose(y, perm=[0, *range(2, rank), 1])


@microsoft("NhwcFusedConv", 1, traits=("product",), weights=WEIGHTS)
def nhwc_fused_conv(
    xp: Xp,
    x: Array,
    w: Array,
    b: Array | None = None,
    z: Array | None = None,
    *,
    activation: str | None = None,
    activation_params: tuple[float, ...] | None = None,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    pads: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Compute the activation of NhwcConv's result plus Z, which has channels last too."""
    y = nhwc_conv(xp, x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape, pads=pads,
                  strides=strides)  # fmt: skip
    return _finished(xp, y, z, activation, activation_params)


nhwc_fused_conv.flops(window(1))
nhwc_fused_conv.shapes(_channels_last)


@nhwc_fused_conv.decomposition
def nhwc_fused_conv_body(
    op: Op,
    x: V,
    w: V,
    b: V | None,
    z: V | None,
    activation: str | None,
    activation_params: tuple[float, ...] | None,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    pads: Ints | None,
    strides: Ints | None,
) -> V:
    y = nhwc_conv_body(op, x, w, b, auto_pad, dilations, group, kernel_shape, pads, strides)
    return _finished_nodes(op, y, z, activation, activation_params)


# --- pads as an input ----------------------------------------------------------------------------------------------------


@microsoft(
    "ConvTransposeWithDynamicPads",
    1,
    traits=("product",),
    weights={0: "the input", 1: "the weight", 3: "the bias"},
)
def conv_transpose_with_dynamic_pads(
    xp: Xp,
    x: Array,
    w: Array,
    pads: Host[Ints] | None = None,
    b: Array | None = None,
    *,
    auto_pad: str = "NOTSET",
    dilations: Ints | None = None,
    group: int = 1,
    kernel_shape: Ints | None = None,
    output_padding: Ints | None = None,
    strides: Ints | None = None,
) -> Array:
    """Compute ConvTranspose with these pads; SAME_UPPER and SAME_LOWER take precedence over them, VALID does not."""
    if pads is None:
        raise OperatorError("the input Pads must be present, although the schema has it as optional", code="SX402")
    auto_pad = "NOTSET" if auto_pad == "VALID" else auto_pad
    return conv_transpose(xp, x, w, b, auto_pad=auto_pad, dilations=dilations, group=group, kernel_shape=kernel_shape,
                          output_padding=output_padding, pads=pads, strides=strides)  # fmt: skip


conv_transpose_with_dynamic_pads.flops(transposed_flops)


@conv_transpose_with_dynamic_pads.shapes
def conv_transpose_with_dynamic_pads_shapes(known: KnownShapes[Any], call: Any) -> Shape | None:
    shape = conv_transpose_shapes(known, call)
    return None if shape is None else (*shape[:2], *(known.fresh() for _ in shape[2:]))


@conv_transpose_with_dynamic_pads.decomposition
def conv_transpose_with_dynamic_pads_body(
    op: Op,
    x: V,
    w: V,
    pads: V,
    b: V | None,
    auto_pad: str,
    dilations: Ints | None,
    group: int,
    kernel_shape: Ints | None,
    output_padding: Ints | None,
    strides: Ints | None,
) -> V:
    """All windows, of which the pads are cut off."""
    given: dict[str, Any] = {"dilations": dilations, "group": group, "kernel_shape": kernel_shape}
    given |= {"output_padding": output_padding, "strides": strides}
    if auto_pad in SAME:
        return op.ConvTranspose(x, w, b, auto_pad=auto_pad, **given)
    y = op.ConvTranspose(x, w, b, **given)
    rank = op.rank(x)
    begins, ends = op.Split(pads, axis=0, num_outputs=2, outputs=2)
    return op.Slice(y, begins, op.Sub(op.Shape(y, start=2), ends), list(range(2, rank)))
