"""Optimizers as operators (ai.onnx.preview.training): one step for many tensors at once."""

from __future__ import annotations

from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..ir.declaration import operator
from ._api import Array

DOMAIN = "ai.onnx.preview.training"


def _groups(tensors: tuple[Array, ...], kinds: int) -> list[tuple[Array, ...]]:
    """X1 X2 ... G1 G2 ... -> (X1, G1, ...), (X2, G2, ...)."""
    n, rest = divmod(len(tensors), kinds)
    if rest:
        raise OperatorError(f"{len(tensors)} tensors are no multiple of {kinds}: each comes with {kinds - 1} more", code="SX404")
    groups = list(zip(*(tensors[i * n : (i + 1) * n] for i in range(kinds)), strict=True))
    for group in groups:
        if len({x.shape for x in group}) > 1:
            shapes = ", ".join(str(x.shape) for x in group)
            raise OperatorError(f"tensors that go together have the shapes {shapes}", code="SX404")
    return groups


def _flat(results: list[tuple[Array, ...]]) -> tuple[Array, ...]:
    """The way back: (X1, V1), (X2, V2) -> X1 X2 V1 V2."""
    return tuple(y for kind in zip(*results, strict=True) for y in kind)


@operator("Adagrad", 1, domain=DOMAIN)
def adagrad(
    xp: Xp, r: Array, t: Array, *inputs: Array, norm_coefficient: float = 0.0, decay_factor: float = 0.0, epsilon: float = 1e-6
) -> tuple[Array, ...]:
    rate = r.reshape(()) / (1 + t.reshape(()) * decay_factor)
    results = []
    for x, g, h in _groups(inputs, 3):
        g = norm_coefficient * x + g
        h = h + g * g
        results.append((x - rate.astype(x.dtype) * g / (xp.sqrt(h) + epsilon), h))
    return _flat(results)


adagrad.no_gradient("undefined: the step of an optimizer is not differentiated")


@operator("Adam", 1, domain=DOMAIN)
def adam(
    xp: Xp,
    r: Array,
    t: Array,
    *inputs: Array,
    alpha: float = 0.9,
    beta: float = 0.999,
    epsilon: float = 1e-6,
    norm_coefficient: float = 0.0,
    norm_coefficient_post: float = 0.0,
) -> tuple[Array, ...]:
    r, t = r.reshape(()), t.reshape(()).astype(float)
    rate = xp.where(t > 0, r * xp.sqrt(1 - beta**t) / (1 - alpha**t), r)  # step 0 has no bias to correct
    results = []
    for x, g, v, h in _groups(inputs, 4):
        g = norm_coefficient * x + g
        v = alpha * v + (1 - alpha) * g
        h = beta * h + (1 - beta) * g * g
        x = x - rate.astype(x.dtype) * v / (xp.sqrt(h) + epsilon)
        results.append(((1 - norm_coefficient_post) * x, v, h))
    return _flat(results)


adam.no_gradient("undefined: the step of an optimizer is not differentiated")


@operator("Momentum", 1, domain=DOMAIN)
def momentum(
    xp: Xp, r: Array, t: Array, *inputs: Array, alpha: float, beta: float, mode: str, norm_coefficient: float
) -> tuple[Array, ...]:
    """At step 0 the momentum is empty, and the gradient counts in full: beta is 1."""
    if mode not in ("standard", "nesterov"):
        raise OperatorError(f"mode is {mode!r}; it may be 'standard' or 'nesterov'", code="SX404")
    r, share = r.reshape(()), xp.where(t.reshape(()) > 0, beta, 1.0)
    results = []
    for x, g, v in _groups(inputs, 3):
        g = norm_coefficient * x + g
        v = alpha * v + share.astype(x.dtype) * g
        step = g + alpha * v if mode == "nesterov" else v
        results.append((x - r.astype(x.dtype) * step, v))
    return _flat(results)


momentum.no_gradient("undefined: the step of an optimizer is not differentiated")
