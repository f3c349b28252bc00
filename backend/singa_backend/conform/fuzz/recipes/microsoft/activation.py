"""Recipes of activation functions, and of elementwise operators that onnxruntime reads in ONNX's domain."""

from __future__ import annotations

from .....proto.schemas import LAX, MICROSOFT
from ...strategies import Draw
from ..registry import recipe


@recipe("Gelu", MICROSOFT)
def gelu(d: Draw) -> None:
    d.put(d.array(0, d.shape(), "small"))


@recipe("QuickGelu", MICROSOFT)
def quick_gelu(d: Draw) -> None:
    d.put(d.array(0, d.shape(), "small"))
    d.attr("alpha", lambda: d.real(0.5, 3), 1.702)


@recipe("BiasGelu FastGelu", MICROSOFT)
def biased(d: Draw) -> None:
    shape = d.shape(1)
    d.put(d.array(0, shape, "small"))
    if d.schema.name == "BiasGelu" or d.chance():
        d.put(d.array(1, shape[-1:], "tame"))


@recipe("Affine Scale", LAX)
def affine(d: Draw) -> None:
    d.put(d.array(0, d.shape(1), "small"))
    for name in d.schema.attributes:
        d.attr(name, d.real, d.schema.attributes[name].default_value.f)


@recipe("GemmFastGelu", MICROSOFT)
def gemm_fast_gelu(d: Draw) -> None:
    k, n = d.whole(1, 5), d.whole(1, 5)
    d.put(d.array(0, (*d.shape(1, 2, empty=0), k), "around"), d.array(1, (k, n), "around"))
    if d.chance():
        d.put(d.array(2, (n,), "around"))


@recipe("BiasSoftmax", MICROSOFT)
def bias_softmax(d: Draw) -> None:
    shape = d.shape(2, 4, empty=0)
    axis = d.attr("axis", [d.axis(len(shape), 1)], 1) % len(shape)
    inner = d.attr("is_inner_broadcast", [0, 1])
    ones = d.whole(0, axis)
    places = range(ones, axis) if inner else range(ones)
    d.put(d.array(0, shape, "tame"), d.array(1, [1 if i in places else n for i, n in enumerate(shape)], "tame"))


@recipe("QOrderedGelu", MICROSOFT)
def q_ordered_gelu(d: Draw) -> None:
    d.put(d.array(0, d.shape(1)), d.array(1, (), "positive"), d.array(2, (), "positive"))
    d.attr("order_X", [0, 1], None)


@recipe("QOrderedLayerNormalization", MICROSOFT)
def q_ordered_layer_normalization(d: Draw) -> None:
    h = d.whole(2, 6)
    d.put(d.array(0, (*d.shape(1, 2, empty=0), h)), d.array(1, (), "positive"), d.array(2, (h,), "tame"))
    d.put(d.array(3, (h,), "tame") if d.chance() else None, d.array(4, (), "positive"))
    d.attr("epsilon", lambda: d.real(1e-4, 1e-2), 1e-5)
