"""The functions of oneDNN that are operators of one input: as post-ops, as kernels of their own, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .table import Follower
from .values import Value

Function = tuple[str, float, float]
"""A function of oneDNN and its two parameters."""

Parameter = str | float
"""A number, or the name of the attribute that holds it."""


@dataclass(frozen=True)
class EltwiseFunction:
    """An operator.

    Attributes:
        name: the function, by `approximate` if that decides.
        parameters: of the function.
        total: whether it agrees with the definition for NaN and infinities too.
        infinities: whether it agrees for infinities.
        alone: whether it is a kernel, or a post-op only.
        backward: the function whose gradient is the operator's: of the result if its name says so, otherwise of the input; the
            function itself by default, none if it is "".
    """

    name: str | Mapping[str, str]
    parameters: tuple[Parameter, ...] = ()
    total: bool = False
    infinities: bool = False
    alone: bool = True
    backward: str | None = None

    def function(self, attributes: Mapping[str, Any], name: str = "") -> Function | None:
        """The function for the attributes of a call; None if oneDNN has none."""
        alpha, beta = (float(attributes[p] if isinstance(p, str) else p) for p in (*self.parameters, 0.0, 0.0)[:2])
        found = self.name if isinstance(self.name, str) else self.name.get(attributes["approximate"])
        return None if found is None else (name or found, alpha, beta)


TABLE: dict[str, EltwiseFunction] = {
    "Relu": EltwiseFunction("relu", infinities=True, backward="relu_use_dst_for_bwd"),
    "LeakyRelu": EltwiseFunction("relu", ("alpha",)),
    "PRelu": EltwiseFunction("relu", alone=False, backward=""),
    "Elu": EltwiseFunction("elu", ("alpha",)),
    "Sigmoid": EltwiseFunction("logistic", total=True, infinities=True, backward="logistic_use_dst_for_bwd"),
    "Tanh": EltwiseFunction("tanh", total=True, infinities=True, backward="tanh_use_dst_for_bwd"),
    "HardSigmoid": EltwiseFunction("hardsigmoid", ("alpha", "beta"), infinities=True),
    "HardSwish": EltwiseFunction("hardswish", (1 / 6, 0.5)),
    "Swish": EltwiseFunction("swish", ("alpha",)),
    "Gelu": EltwiseFunction({"none": "gelu_erf", "tanh": "gelu_tanh"}),
    "Mish": EltwiseFunction("mish"),
    "Abs": EltwiseFunction("abs", infinities=True, alone=False, backward=""),
    "Neg": EltwiseFunction("linear", (-1.0,), infinities=True, alone=False, backward=""),
    "Clip": EltwiseFunction("clip", infinities=True, backward=""),
}
"""The operators.  `soft_relu` is not Softplus: it is negative below -17, where a logarithm that follows would be NaN."""

GRADIENTS = {**{n: r for n, r in TABLE.items() if r.backward != ""}, "Softplus": EltwiseFunction("soft_relu", (1.0,))}
"""The operators whose gradient is that of a function of oneDNN."""


def function_of(f: Follower) -> Function | None:
    """The function that is a call; None if there is none."""
    row = TABLE.get(f.name)
    if f.name == "PRelu":
        slope = scalar_of(f.inputs[1]) if f.inputs[1] is not None and f.inputs[1].ndim < 2 else None
        return None if slope is None else ("relu", slope, 0.0)
    if f.name == "Clip":
        bounds = _bounds(f)
        return None if bounds is None else ("clip", *bounds)
    return None if row is None else row.function(f.attributes)


def scalar_of(v: Value | None) -> float | None:
    """The number that a constant of one element holds."""
    return float(v.array.reshape(-1)[0]) if v is not None and v.constant and v.size == 1 else None


def _bounds(f: Follower) -> tuple[float, float] | None:
    """The bounds of a Clip that are the same in every run and in order."""
    low, high = f.attributes.get("min"), f.attributes.get("max")
    given = [*f.inputs[1:], None, None][:2] if f.version >= 11 else [None, None]
    if any(v is not None and scalar_of(v) is None for v in given):
        return None
    if f.version >= 11:
        low, high = (scalar_of(v) for v in given)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return (low, high) if low <= high else None
