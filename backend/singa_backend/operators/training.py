"""Optimizers of ai.onnx.preview.training: one step for several tensors."""

from __future__ import annotations

from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..ir.declaration import operator
from ._api import Array

DOMAIN = "ai.onnx.preview.training"


def _groups(tensors: tuple[Array, ...], kinds: int) -> list[tuple[Array, ...]]:
    """Regroup X1 X2 ... G1 G2 ... to (X1, G1, ...), (X2, G2, ...)."""
    n, rest = divmod(len(tensors), kinds)
    if rest:
        raise OperatorError(f"the number of tensors must be a multiple of {kinds}, got {len(tensors)}", code="SX404")
    groups = list(zip(*(tensors[i * n : (i + 1) * n] for i in range(kinds)), strict=True))
    for group in groups:
        if len({x.shape for x in group}) > 1:
            shapes = ", ".join(str(x.shape) for x in group)
            raise OperatorError(f"a tensor, its gradient and its states must have equal shapes, got {shapes}", code="SX404")
    return groups


def _flat(results: list[tuple[Array, ...]]) -> tuple[Array, ...]:
    """Regroup (X1, V1), (X2, V2) to X1 X2 V1 V2."""
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
    rate = xp.where(t > 0, r * xp.sqrt(1 - beta**t) / (1 - alpha**t), r)  # no bias correction at step 0
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
    """Apply one step; at step 0 there is no momentum yet, and beta is 1."""
    if mode not in ("standard", "nesterov"):
        raise OperatorError(f"mode must be 'standard' or 'nesterov', got {mode!r}", code="SX404")
    r, share = r.reshape(()), xp.where(t.reshape(()) > 0, beta, 1.0)
    results = []
    for x, g, v in _groups(inputs, 3):
        g = norm_coefficient * x + g
        v = alpha * v + share.astype(x.dtype) * g
        step = g + alpha * v if mode == "nesterov" else v
        results.append((x - r.astype(x.dtype) * step, v))
    return _flat(results)


momentum.no_gradient("undefined: the step of an optimizer is not differentiated")
