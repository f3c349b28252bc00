"""Activations that onnxruntime's fused operators name: those of FusedGemm, and those of FusedConv."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import OperatorError
from ._api import Op, V

PARAMETERS: dict[str, tuple[str, ...]] = {
    "Celu": ("alpha",),
    "Elu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "LeakyRelu": ("alpha",),
    "Relu": (),
    "Selu": ("alpha", "gamma"),
    "Sigmoid": (),
    "Softplus": (),
    "Softsign": (),
    "Tanh": (),
    "ThresholdedRelu": ("alpha",),
}
"""The activations of products, and the names of their parameters, which have no defaults."""

ALONG_AN_AXIS = {**PARAMETERS, "Softmax": ("axis",)}
"""The activations of FusedMatMulActivation."""

AFTER_CONV = {
    **{name: PARAMETERS[name] for name in ("HardSigmoid", "LeakyRelu", "Relu", "Sigmoid", "Tanh")},
    "Clip": ("low", "high"),
    "HardSwish": (),
}
"""The activations of convolutions; the parameters are in this order in activation_params."""


def needed(kinds: Mapping[str, tuple[str, ...]], name: str) -> tuple[str, ...]:
    """The parameters of an activation; raise OperatorError for an activation that is not one of these."""
    if name not in kinds:
        raise OperatorError(f"activation must be one of {', '.join(sorted(kinds))}, got {name!r}", code="SX404")
    return kinds[name]


def named(name: str, given: Mapping[str, float | None], kinds: Mapping[str, tuple[str, ...]] = PARAMETERS) -> dict[str, float]:
    """The parameters of the activation of a product; raise OperatorError if one is absent."""
    found: dict[str, float] = {}
    for key in needed(kinds, name):
        value = given.get(key)
        if value is None:
            raise OperatorError(f"{name} needs the attribute activation_{key}, which is absent", code="SX404")
        found[key] = value
    return found


def listed(name: str, given: Sequence[float] | None) -> dict[str, float]:
    """The parameters of the activation of a convolution; raise OperatorError if their number is wrong."""
    names = needed(AFTER_CONV, name)
    values = tuple(given or ()) if names else ()
    if len(values) != len(names):
        raise OperatorError(f"{name} needs {len(names)} values in activation_params, got {values}", code="SX404")
    return dict(zip(names, values, strict=True))


def activated(op: Op, y: V, name: str | None, parameters: Callable[[str], dict[str, float]]) -> V:
    """Apply an activation to the result of a product or a convolution; none if it is absent."""
    if not name:
        return y
    found: dict[str, Any] = parameters(name)
    if name == "Clip":
        return op.Clip(y, found["low"], found["high"])
    return getattr(op, name)(y, **found)
