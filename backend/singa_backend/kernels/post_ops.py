"""Followers of a call as post-ops of its primitive: activations, residuals, factors and terms for each channel."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..ir.declaration import newest_declaration
from . import onednn as dnn
from .lowering import dense_desc, desc, ordered
from .onednn import Attributes, MemoryDesc, Primitive
from .table import Follower, Site
from .values import FINITE, NAN, Value, strides_of

BINARY = {"Add": "add", "Sum": "add", "Mul": "mul", "Sub": "sub", "Div": "div", "Max": "max", "Min": "min"}

SWALLOWS = ("Max", "Min")
"""Binary operators whose primitives turn NaN into a number."""


def is_modern(name: str, version: int) -> bool:
    """Whether a version of an operator of ONNX's domain has its present meaning; an old Sum only adds values of equal shapes."""
    declaration = newest_declaration("", name)
    return name == "Sum" or (declaration is not None and version >= declaration.meaning_since)


@dataclass
class Fused:
    """Followers as attributes of a primitive.

    Attributes:
        attributes: the post-ops, and the mode of arithmetic.
        count: the number of followers.
        operands: the tensors of the post-ops by argument, with the order of axes in which they are read; None for any.
        target: the value whose memory becomes the result: what the result is added to.
        finite: whether the post-ops agree with the definitions for finite values only.
        finiteness: of the result.
    """

    attributes: Attributes
    count: int = 0
    operands: dict[int, tuple[MemoryDesc, Value, tuple[int, ...] | None]] = field(default_factory=dict)
    target: Value | None = None
    finite: bool = False
    finiteness: int = FINITE


def activation(f: Follower) -> tuple[str, float, float] | None:
    """The function of oneDNN, and its two parameters, that is a unary operator; None if there is none.

    Its `soft_relu` is not Softplus: it is negative below -17, where a logarithm that follows would be NaN.
    """
    a = f.attributes
    match f.name:
        case "Relu":
            return "relu", 0.0, 0.0
        case "LeakyRelu":
            return "relu", a["alpha"], 0.0
        case "PRelu" if _slope(f.inputs[1]) is not None:
            return "relu", _slope(f.inputs[1]) or 0.0, 0.0
        case "Elu":
            return "elu", a["alpha"], 0.0
        case "Sigmoid":
            return "logistic", 0.0, 0.0
        case "Tanh":
            return "tanh", 0.0, 0.0
        case "HardSigmoid":
            return "hardsigmoid", a["alpha"], a["beta"]
        case "HardSwish":
            return "hardswish", 1 / 6, 0.5
        case "Swish":
            return "swish", a["alpha"], 0.0
        case "Gelu" if a["approximate"] in ("none", "tanh"):
            return "gelu_erf" if a["approximate"] == "none" else "gelu_tanh", 0.0, 0.0
        case "Mish":
            return "mish", 0.0, 0.0
        case "Abs":
            return "abs", 0.0, 0.0
        case "Neg":
            return "linear", -1.0, 0.0
        case "Clip":
            bounds = _bounds(f)
            return None if bounds is None else ("clip", *bounds)
    return None


def _slope(v: Value | None) -> float | None:
    """One slope for all elements, of a rank that is not above that of any result."""
    return _scalar(v) if v is not None and v.ndim < 2 else None


def _scalar(v: Value | None) -> float | None:
    return float(v.array.reshape(-1)[0]) if v is not None and v.constant and v.size == 1 else None


def _bounds(f: Follower) -> tuple[float, float] | None:
    """The bounds of a Clip that are the same in every run and in order."""
    low, high = f.attributes.get("min"), f.attributes.get("max")
    given = [*f.inputs[1:], None, None][:2] if f.version >= 11 else [None, None]
    if any(v is not None and _scalar(v) is None for v in given):
        return None
    if f.version >= 11:
        low, high = (_scalar(v) for v in given)
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return (low, high) if low <= high else None


def fused(
    site: Site,
    shape: Sequence[int],
    order: Sequence[int],
    finiteness: int,
    *,
    limit: int | None = None,
    into: bool = True,
    fpmath: str = "strict",
) -> Fused:
    """The followers that can be post-ops of a primitive with float32 results.

    Args:
        site: where the kernel is used.
        shape: of the result.
        order: the axes of the result, from the outermost in memory to the innermost.
        finiteness: of the result without followers.
        limit: the maximum number of followers.
        into: whether the memory of a summand may become that of the result.
        fpmath: the mode of arithmetic.
    """
    made = Fused(Attributes(fpmath=fpmath), finiteness=finiteness)
    for f in site.followers[:limit]:
        if not is_modern(f.name, f.version) or not _append(made, f, tuple(shape), tuple(order), into):
            break
        made.count += 1
    return made


def _append(made: Fused, f: Follower, shape: tuple[int, ...], order: tuple[int, ...], into: bool) -> bool:
    """Add a follower to the attributes; return whether it is possible."""
    if f.name in BINARY:
        return _append_binary(made, f, shape, order, into)
    if f.place != 0:
        return False
    function = activation(f)
    if function is None and f.name == "PRelu":
        return _append_prelu(made, f, shape)
    if function is None or (made.finiteness != FINITE and function[0] != "linear"):
        return False
    made.attributes.append_eltwise(*function)
    made.finite = made.finite or function[0] != "linear"
    return True


def _append_prelu(made: Fused, f: Follower, shape: tuple[int, ...]) -> bool:
    slope = f.inputs[1]
    if made.finiteness != FINITE or slope is None or slope.dtype != np.float32 or slope.finiteness != FINITE:
        return False
    padded = (1,) * (len(shape) - slope.ndim) + slope.shape
    if len(padded) != len(shape) or padded != (1, shape[1], *(1,) * (len(shape) - 2)) or not slope.contiguous:
        return False
    arg = dnn.args.post_op(len(made.attributes), dnn.args.WEIGHTS)
    made.attributes.append_prelu(2)
    made.operands[arg] = (dense_desc(np.float32, padded), slope, None)
    made.finite = True
    return True


def _append_binary(made: Fused, f: Follower, shape: tuple[int, ...], order: tuple[int, ...], into: bool) -> bool:
    if f.name == "Sum" and len(f.inputs) == 1:
        return True
    other = f.other
    if other is None or other.dtype != np.float32 or len(f.inputs) != 2 or not other.size:
        return False
    padded = (1,) * (len(shape) - other.ndim) + other.shape
    if len(padded) != len(shape) or any(d not in (1, s) for d, s in zip(padded, shape, strict=True)):
        return False
    if f.name in SWALLOWS and (made.finiteness != FINITE or other.finiteness != FINITE):
        return False
    reverse = f.place == 1 and f.name in ("Sub", "Div")
    if reverse and f.name == "Div":
        return False
    finiteness = FINITE if made.finiteness == other.finiteness == FINITE else NAN
    if f.name == "Div" and not (other.constant and other.array.all()):
        finiteness = NAN
    scalar = _scalar(other)
    if reverse:
        made.attributes.append_eltwise("linear", -1.0, 0.0)
    name = "add" if reverse else BINARY[f.name]
    if scalar is not None and math.isfinite(scalar) and name in ("add", "sub", "mul"):
        factor = scalar if name == "mul" else 1.0
        made.attributes.append_eltwise("linear", factor, {"add": scalar, "sub": -scalar}.get(name, 0.0))
    elif padded == shape and other.size > 1:
        strides = strides_of(shape, 4, order)
        in_order = all(d == 1 or s == t for d, s, t in zip(shape, other.strides, strides, strict=True)) and other.ndim == len(
            shape
        )
        place = 1 - f.place
        if into and name == "add" and made.target is None and in_order and place in f.reusable and not other.constant:
            made.attributes.append_sum()
            made.target = other
        else:
            md = dense_desc(np.float32, shape, order)
            arg = dnn.args.post_op(len(made.attributes))
            made.attributes.append_binary(name, md)
            made.operands[arg] = (md, other.view(shape, _padded(other, len(shape))) if other.ndim < len(shape) else other, order)
    else:
        wide = other.view(padded, _padded(other, len(shape)))
        if any(d != 1 and (s <= 0 or s % 4) for d, s in zip(wide.shape, wide.strides, strict=True)):
            return False
        md = desc(wide)
        arg = dnn.args.post_op(len(made.attributes))
        made.attributes.append_binary(name, md)
        made.operands[arg] = (md, wide, None)
    made.finiteness = finiteness
    made.finite = made.finite or f.name in SWALLOWS
    return True


def _padded(v: Value, rank: int) -> tuple[int, ...]:
    """The strides of a value with leading axes of size 1."""
    return (v.dtype.itemsize,) * (rank - v.ndim) + v.strides


def attempts(make: Callable[[int | None, bool], Fused]) -> Iterator[Fused]:
    """The followers as post-ops, then with fewer post-ops, down to none."""
    first = make(None, True)
    yield first
    if first.target is not None:
        yield make(None, False)
    for limit in range(first.count - 1, -1, -1):
        yield make(limit, True)


def create(
    site: Site,
    build: Callable[[Attributes], Primitive],
    shape: Sequence[int],
    order: Sequence[int],
    finiteness: int,
    fpmath: str = "strict",
) -> tuple[Primitive, Fused]:
    """Create a primitive with as many followers as it can compute.

    Args:
        site: where the kernel is used.
        build: creates the primitive with these attributes.
        shape: of the result.
        order: the axes of the result, from the outermost in memory to the innermost.
        finiteness: of the result without followers.
        fpmath: the mode of arithmetic.

    Raises:
        Unimplemented: oneDNN has no fast code, even without followers.
    """
    refusal: Exception | None = None
    for one in attempts(lambda limit, into: fused(site, shape, order, finiteness, limit=limit, into=into, fpmath=fpmath)):
        try:
            return build(one.attributes), one
        except dnn.Unimplemented as error:
            refusal = error
    assert refusal is not None
    raise refusal


def result(
    site: Site, one: Fused, shape: Sequence[int], order: Sequence[int]
) -> tuple[Value, dict[int, tuple[MemoryDesc, Value]]]:
    """The value of the last follower, and the arguments of the post-ops.  To be called before the step is emitted."""
    site.absorb(one.count)
    if one.finite:
        site.needs_finite()
    if one.target is None:
        y = site.new(shape, np.float32, order, one.finiteness)
    else:
        t = one.target
        y = t.view(t.shape, t.strides)
        y.finiteness = one.finiteness
    arguments = {}
    for arg, (md, v, way) in one.operands.items():
        arguments[arg] = (md, v if way is None else ordered(site, v, way))
    return y, arguments
