"""Followers of a matrix product as its post-ops: a bias, sums in place, operands with any strides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ir.declaration import has_trait
from . import onednn as dnn
from . import post_ops
from .onednn import Attributes, MemoryDesc
from .table import Follower, Site
from .values import FINITE, INFINITE, NAN, Value

Describe = Callable[[Value], MemoryDesc | None]
"""Returns the descriptor of a second operand, of the rank of the destination; None if it does not fit."""


@dataclass
class PostOps:
    """Followers of a call as post-ops of its primitive.

    Attributes:
        attributes: of the primitive, with the post-ops.
        count: the number of followers that they compute.
        arguments: the second operands, by argument of the primitive.
        into: the value that a sum adds to, in whose memory the result is; None for a result of its own.
        bias: the operand of a first addition that the primitive can add as its bias.
        finite: whether the result equals the definition's for finite inputs only.
        finiteness: of the result.
        low: whether its infinities are all negative.
    """

    attributes: Attributes
    count: int = 0
    arguments: dict[int, tuple[MemoryDesc, Value]] = field(default_factory=dict)
    into: Value | None = None
    bias: Value | None = None
    finite: bool = False
    finiteness: int = FINITE
    low: bool = False


TOTAL = frozenset(("Sigmoid", "Tanh"))
"""Functions of which oneDNN's agree with the definitions for NaN and infinities too."""

INFINITIES = frozenset(["Relu", "Clip", "Tanh", "Sigmoid", "HardSigmoid", "Abs", "Neg"])
"""Unary operators that oneDNN computes as the definitions do for infinities."""


def scalar(value: Value | None) -> float | None:
    """The number that a constant of one element holds, if it is finite."""
    if value is None or not value.constant or value.size != 1:
        return None
    number = float(value.array.reshape(-1)[0])
    return number if math.isfinite(number) else None


def fuse(
    site: Site,
    followers: Sequence[Follower],
    shape: tuple[int, ...],
    describe: Describe,
    *,
    finiteness: int,
    low: bool = False,
    fpmath: str = "strict",
    before: Sequence[tuple[str, float, float]] = (),
    is_bias: Callable[[Value], bool] = lambda value: False,
    may_replace: Callable[[Value], bool] = lambda value: False,
) -> PostOps:
    """Express as many followers as possible as post-ops of a float32 result.

    Args:
        site: the place of the call.
        followers: the calls, in order.
        shape: of the result.
        describe: see Describe.
        finiteness: of the primitive's own result.
        low: whether all infinities that the finiteness permits are negative.
        fpmath: see Attributes.
        before: functions of oneDNN, each with two parameters, that are applied first.
        is_bias: whether the primitive can add this value as its bias.
        may_replace: whether the result can take the place of this value, which is added to it.

    Returns:
        The post-ops, for `count` of the followers.
    """
    made = PostOps(Attributes(fpmath=fpmath), finiteness=finiteness, low=low)
    for function in before:
        made.attributes.append_eltwise(*function)
    for f in followers:
        if not post_ops.is_modern(f.name, f.version):
            break
        if not (_unary(made, f) or _binary(made, f, shape, describe, is_bias, may_replace)):
            break
        made.count += 1
    return made


def _unary(made: PostOps, f: Follower) -> bool:
    found = post_ops.activation(f) if f.place == 0 else None
    if found is not None and f.name in TOTAL:
        made.attributes.append_eltwise(*found)
        made.finiteness, made.low = NAN if made.finiteness == NAN else FINITE, False
        return True
    if found is None or made.finiteness == NAN or (made.finiteness != FINITE and f.name not in INFINITIES):
        return False
    made.attributes.append_eltwise(*found)
    made.finite = True
    made.low = False
    return True


def _binary(
    made: PostOps,
    f: Follower,
    shape: tuple[int, ...],
    describe: Describe,
    is_bias: Callable[[Value], bool],
    may_replace: Callable[[Value], bool],
) -> bool:
    other = f.other
    if not has_trait("", f.name, "arithmetic") or other is None or other.dtype != np.float32:
        return False
    if f.name == "Div" and f.place != 0:
        return False
    try:
        if np.broadcast_shapes(shape, other.shape) != shape:
            return False
    except ValueError:
        return False
    number = scalar(other)
    if number is not None and (f.name != "Div" or abs(number) > 1e-30):
        factor, shift = {"Add": (1.0, number), "Sum": (1.0, number), "Mul": (number, 0.0), "Sub": (1.0, -number)}.get(
            f.name, (1 / number if number else 1.0, 0.0)
        )
        if f.name == "Sub" and f.place == 1:
            factor, shift = -1.0, number
        if made.finiteness == INFINITE and factor == 0:
            return False
        made.low = made.low and factor > 0
        made.attributes.append_eltwise("linear", factor, shift)
        return True
    first = not len(made.attributes) and made.bias is None
    if f.name in ("Add", "Sum"):
        if first and is_bias(other):
            made.bias = other
        elif made.into is None and (1 - f.place) in f.reusable and len(f.inputs) == 2 and may_replace(other):
            made.attributes.append_sum()
            made.into = other
        elif not _append(made, "add", other, describe):
            return False
    elif f.name == "Sub" and f.place == 1:
        md = describe(other)
        if md is None:
            return False
        made.attributes.append_eltwise("linear", -1.0, 0.0)
        _append(made, "add", other, describe)
    elif not _append(made, {"Sub": "sub", "Mul": "mul", "Div": "div"}[f.name], other, describe):
        return False
    worsen(made, f, other)
    return True


def _append(made: PostOps, algorithm: str, other: Value, describe: Describe) -> bool:
    md = describe(other)
    if md is None:
        return False
    made.arguments[dnn.args.post_op(len(made.attributes))] = (md, other)
    made.attributes.append_binary(algorithm, md)
    return True


def worsen(made: PostOps, f: Follower, other: Value) -> None:
    """Set the finiteness of a result of two operands.

    Args:
        made: of the first operand, then of the result.
        f: the operator.
        other: the second operand.
    """
    if f.name == "Div":
        made.finiteness, made.low = NAN, False
    elif made.finiteness == other.finiteness == FINITE:
        pass
    elif f.name in ("Add", "Sum") and NAN not in (made.finiteness, other.finiteness):
        low = (made.finiteness == FINITE or made.low) and (other.finiteness == FINITE or other.low)
        made.finiteness = INFINITE if low or FINITE in (made.finiteness, other.finiteness) else NAN
        made.low = low
    else:
        made.finiteness, made.low = NAN, False
