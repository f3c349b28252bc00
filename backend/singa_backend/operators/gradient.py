"""ONNX's Gradient: the gradient of a value of the graph around it, by the rules of the operators in between."""

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
    """The graph between xs, zs and y is run with the inputs in the place of xs and zs, and then backward.

    The inputs behind them are what else that graph reads.
    """
    return tuple(gradient_of(Eager(device.device_of_namespace(xp)), forward_graph, inputs, len(xs)))


gradient.no_gradient("undefined: it is differentiated through the graph that it names")
