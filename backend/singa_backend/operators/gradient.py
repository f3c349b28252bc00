"""Gradient (ai.onnx.preview.training): the gradient of a value of the enclosing graph with respect to other values."""

from __future__ import annotations

from typing import Any

from ..autodiff.replay import gradient_of
from ..devices import device
from ..devices.namespaces import Xp
from ..interpreters.eager import Eager
from ..ir.declaration import ForwardGraph, operator


@operator("Gradient", 1, domain="ai.onnx.preview.training", widen=False)
def gradient(
    xp: Xp, *inputs: Any, xs: tuple[str, ...], y: str, zs: tuple[str, ...] = (), forward_graph: ForwardGraph
) -> tuple[Any, ...]:
    """Run the graph between xs, zs and y with the inputs as values of xs and zs, and differentiate it.

    The inputs after those are the other values that the graph reads.
    """
    return tuple(gradient_of(Eager(device.device_of_namespace(xp)), forward_graph, inputs, len(xs)))


gradient.no_gradient("undefined: differentiation applies to the graph that it refers to")
