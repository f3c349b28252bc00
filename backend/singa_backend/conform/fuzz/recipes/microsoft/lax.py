"""Recipes of the other operators that onnxruntime reads in ONNX's domain."""

from __future__ import annotations

import numpy as np

from .....proto.schemas import LAX
from ...strategies import Draw
from ..neural import layer_normalization
from ..registry import recipe


@recipe("ParametricSoftplus ScaledTanh", LAX)
def two_factors(d: Draw) -> None:
    d.put(d.array(0, d.shape(1), "small"))
    for name in ("alpha", "beta"):
        d.attr(name, d.real)


@recipe("ImageScaler", LAX)
def image_scaler(d: Draw) -> None:
    shape = d.shape(4)
    d.put(d.array(0, shape, "small"))
    d.attr("bias", lambda: [d.real() for _ in range(shape[1])])
    d.attr("scale", d.real, 1.0)


@recipe("Crop", LAX)
def crop(d: Draw) -> None:
    border = d.wholes(0, 2, 4)
    inner = d.wholes(1, 3, 2)
    d.put(d.array(0, (*d.wholes(1, 2, 2), border[1] + border[3] + inner[0], border[0] + border[2] + inner[1])))
    d.attributes["border"] = border
    d.attr("scale", [[d.whole(1, inner[0]), d.whole(1, inner[1])]], None)


@recipe("DynamicSlice", LAX)
def dynamic_slice(d: Draw) -> None:
    shape = d.shape(1)
    axes = d.axes(len(shape), negative_from=1) if d.chance(0.7) else None
    count = len(shape) if axes is None else len(axes)
    d.put(d.array(0, shape))
    d.put(d.ints(d.wholes(-6, 6, count), d.dtype(1)), d.ints(d.wholes(-6, 6, count), d.dtype(1)))
    if axes is not None:
        d.put(d.ints(axes, d.dtype(1)))


@recipe("LayerNormalization", LAX)
def early_layer_normalization(d: Draw) -> None:
    layer_normalization(d)
    if len(d.outputs) > 1 and d.chance():
        d.outputs = d.pick([["y", "", "inv"], ["y", "mean"]])


@recipe("SimplifiedLayerNormalization", LAX)
def simplified_layer_normalization(d: Draw) -> None:
    layer_normalization(d)
    if d.chance(0.4) and d.dtype("U") == np.float32:
        d.outputs = ["y", "inv"]
