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
