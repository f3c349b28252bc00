"""Scales and shifts of channels after a product, a convolution or a batch normalization."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...ir.graph import ABSENT
from ...kernels.values import LARGE, Computed, bound_of
from ...proto.tensor_data import release
from ..region import Call
from .facts import operator
from .view import RegionView

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
MOST = float(np.finfo(np.float32).max) / 2
LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization")


@dataclass(frozen=True)
class _Affine:
    """y * scale + shift for each channel, in float64; None for 1 and 0."""

    scale: np.ndarray | None
    shift: np.ndarray | None


@dataclass(frozen=True)
class _Linear:
    """A call whose result has an affine function of constants on each channel.

    Attributes:
        call: the call.
        bias_call: an Add of a constant after a MatMul; None if there is none.
        weight: its weight; None for a BatchNormalization.
        bias: its bias; None if there is none.
        channels: the number of its channels.
        rank: the rank of its result; None if it is not known.
        axis: the axis of the channels, from the front, or -1 for the last one.
    """

    call: Call
    bias_call: Call | None
    weight: np.ndarray | Computed | None
    bias: np.ndarray | None
    channels: int
    rank: int | None
    axis: int


def channels(edit: RegionView) -> int:
    """For any calls of the form f(x) * scale + shift, fold the constants into those of f.

    f is Conv, ConvTranspose, Gemm or MatMul with a constant weight, MatMul + bias, or a BatchNormalization, and the value of f is
    not used elsewhere.  The scale and the shift have one value, or one for each channel; they are those of a BatchNormalization
    in inference form, or of a Mul, Div, Add or Sub.  The new constants must be finite.
    """
    count = 0
    for root in edit.named("BatchNormalization", "Mul", "Div", "Add", "Sub"):
        if edit.alive(root) and _fold(edit, root):
            count += 1
    return count


def _fold(edit: RegionView, root: Call) -> bool:
    for at in (0, 1) if root.name in ("Add", "Mul") else (0,):
        linear = _linear(edit, root.inputs[at])
        if linear is None:
            continue
        affine = _affine(edit, root, at, linear)
        if affine is not None and _rewrite(edit, root, linear, affine):
            return True
    return False


def _linear(edit: RegionView, value: int) -> _Linear | None:
    call = edit.producer(value)
    name = operator(call)
    if call is None or not edit.once(value) or name not in (*LINEAR, "Add"):
        return None
    bias_call = None
    if name == "Add":  # a MatMul and its bias
        bias_call = call
        for at in (0, 1):
            before = edit.made_by(bias_call.inputs[at], "MatMul")
            if before is not None and edit.once(before.outputs[0]) and edit.constant(bias_call.inputs[1 - at]) is not None:
                call, name = before, "MatMul"
                break
        else:
            return None
    if name == "BatchNormalization":
        return _normalized(edit, call)
    weight = edit.weight(call.inputs[1])
    if weight is None or weight.dtype not in FLOATS:
        return None
    bias = None
    if bias_call is not None:
        bias = (
            edit.constant(bias_call.inputs[0]) if bias_call.inputs[1] == call.outputs[0] else edit.constant(bias_call.inputs[1])
        )
    elif name != "MatMul" and len(call.inputs) > 2 and call.inputs[2] != ABSENT:
        bias = edit.constant(call.inputs[2])
        if bias is None:
            return None
    if name in ("Gemm", "MatMul"):
        if weight.ndim != 2:
            return None
        count = weight.shape[0 if name == "Gemm" and call.attributes.get("transB") else 1]
        if bias_call is not None and (bias is None or bias.shape != (count,)):
            return None
        return _Linear(call, bias_call, weight, bias, count, 2 if name == "Gemm" else edit.facts.rank(value), -1)
    if weight.ndim < 3:
        return None
    count = weight.shape[0] if name == "Conv" else weight.shape[1] * call.attributes.get("group", 1)
    return _Linear(call, None, weight, bias, count, weight.ndim, 1)


def _normalized(edit: RegionView, call: Call) -> _Linear | None:
    scale = edit.constant(call.inputs[1])
    if not _infers(call) or scale is None or scale.dtype not in FLOATS:
        return None
    return _Linear(call, None, None, None, scale.shape[0] if scale.ndim == 1 else 0, edit.facts.rank(call.inputs[0]), 1)


def _infers(call: Call) -> bool:
    """Whether a BatchNormalization is in inference form."""
    alone = all(o == ABSENT for o in call.outputs[1:])
    return (
        alone and not call.attributes.get("training_mode", 0) and call.attributes.get("spatial", 1) == 1 and len(call.inputs) == 5
    )


def _affine(edit: RegionView, root: Call, at: int, linear: _Linear) -> _Affine | None:
    dtype = edit.facts.dtype(root.inputs[at]) if linear.weight is None else linear.weight.dtype
    if root.name == "BatchNormalization":
        if not _infers(root) or (linear.axis == -1 and linear.rank != 2):
            return None
        arrays = [edit.constant(i) for i in root.inputs[1:]]
        if any(a is None or a.dtype != dtype or a.shape != (linear.channels,) for a in arrays):
            return None
        scale, bias, mean, var = (a.astype(np.float64) for a in arrays if a is not None)
        with np.errstate(all="ignore"):
            factor = scale / np.sqrt(var + np.float64(np.float32(root.attributes.get("epsilon", 1e-5))))
            return _Affine(factor, bias - mean * factor)
    constant = edit.constant(root.inputs[1 - at])
    if constant is None or constant.dtype != dtype or constant.dtype not in FLOATS or not _by_channel(constant, linear):
        return None
    value = np.broadcast_to(constant.astype(np.float64).reshape(-1), (linear.channels,))
    with np.errstate(all="ignore"):
        if root.name == "Add":
            return _Affine(None, value)
        if root.name == "Sub":
            return _Affine(None, -value)
        return _Affine(value if root.name == "Mul" else 1 / value, None)


def _by_channel(constant: np.ndarray, linear: _Linear) -> bool:
    """Whether a constant has one element, or one for each channel, and adds no axis to the result."""
    if constant.ndim > (1 if linear.rank is None and linear.axis == -1 else linear.rank or 0):
        return False
    if constant.size == 1:
        return True
    if linear.rank is None and linear.axis == 1:
        return False
    axis = constant.ndim - 1 if linear.axis == -1 else 1 - ((linear.rank or 0) - constant.ndim)
    return 0 <= axis < constant.ndim and constant.size == constant.shape[axis] == linear.channels


def _rewrite(edit: RegionView, root: Call, linear: _Linear, affine: _Affine) -> bool:
    """Replace the calls by one with folded constants; False if they are not finite, or the call cannot hold them."""
    call, name = linear.call, linear.call.name
    if name == "BatchNormalization":
        return _rewrite_normalization(edit, root, linear, affine)
    weight, bias, scale, shift = linear.weight, linear.bias, affine.scale, affine.shift
    assert weight is not None
    if name == "MatMul" and linear.bias_call is None and shift is not None and scale is None:
        return False  # the kernel adds the bias
    if name != "Gemm" and bias is not None and bias.shape != (linear.channels,):
        return False
    try:
        new_weight, new_bias = _folded(call, weight, bias, affine)
    except ValueError:  # the bias or the group does not fit: the call fails when it runs
        return False
    if not _finite(new_bias) or (isinstance(new_weight, np.ndarray) and scale is not None and not _finite(new_weight)):
        return False
    inputs = [call.inputs[0], call.inputs[1]]
    if scale is not None:
        inputs[1] = edit.region.constant(new_weight, edit.region.names.get(call.inputs[1], ""))
    has_bias = bias is not None or shift is not None
    bias_id = (
        edit.region.constant(new_bias, edit.region.names.get(call.inputs[2], "") if len(call.inputs) > 2 else "")
        if has_bias
        else ABSENT
    )
    origins = [c for c in (call, linear.bias_call, root) if c is not None]
    if name == "MatMul":
        if not has_bias:
            edit.put(root, edit.call("MatMul", inputs, origins, root.outputs[:1]))
        else:
            product = edit.call("MatMul", inputs, origins)
            edit.put(root, product, edit.call("Add", (product.outputs[0], bias_id), origins, root.outputs[:1]))
        return True
    given = {k: call.attributes[k] for k in call.node.given if k not in ("beta", "broadcast")}
    edit.put(root, edit.call(name, [*inputs, *([bias_id] if has_bias else [])], origins, root.outputs[:1], **given))
    return True


def _folded(
    call: Call, weight: np.ndarray | Computed, bias: np.ndarray | None, affine: _Affine
) -> tuple[np.ndarray | Computed, np.ndarray]:
    """The weight and the bias with the scale and the shift; the products with the weight are in its precision."""
    scale, shift = affine.scale, affine.shift
    beta = call.attributes.get("beta", 1.0) if call.name == "Gemm" else 1.0
    with np.errstate(all="ignore"):
        old: Any = 0.0 if bias is None else bias.astype(np.float64) * beta
        new_bias = np.asarray((old if scale is None else old * scale) + (0.0 if shift is None else shift)).astype(weight.dtype)
        if scale is None:
            return weight, new_bias
        factors = _spread(call, weight, scale).astype(weight.dtype)
        np.broadcast_shapes(weight.shape, factors.shape)
        bound = _bound(weight, factors)
        if bound <= MOST:
            return Computed(weight.shape, weight.dtype, partial(_multiply, weight, factors), bound), new_bias
        return np.multiply(weight if isinstance(weight, np.ndarray) else weight.array(), factors), new_bias


def _bound(weight: np.ndarray | Computed, factors: np.ndarray) -> float:
    """The highest magnitude that a product may have; infinity or NaN if that is not known, or to keep the product."""
    if weight.nbytes < LARGE or weight.dtype != np.float32:
        return math.inf
    found = bound_of(weight)
    if isinstance(weight, np.ndarray):
        release(weight)
    return found * float(np.abs(factors).max())


def _multiply(weight: np.ndarray | Computed, factors: np.ndarray, out: np.ndarray) -> None:
    if isinstance(weight, np.ndarray):
        np.multiply(weight, factors, out=out)
        release(weight)
    else:
        weight.fill(out)
        np.multiply(out, factors, out=out)


def _rewrite_normalization(edit: RegionView, root: Call, linear: _Linear, affine: _Affine) -> bool:
    call = linear.call
    arrays = [edit.constant(i) for i in call.inputs[1:3]]
    if (
        any(a is None or a.shape != (linear.channels,) or a.dtype not in FLOATS for a in arrays)
        or root.name == "BatchNormalization"
    ):
        return False
    made = []
    with np.errstate(all="ignore"):
        for array, shift in zip(arrays, (None, affine.shift), strict=True):
            assert array is not None
            wide = array.astype(np.float64)
            wide = wide if affine.scale is None else wide * affine.scale
            made.append((wide if shift is None else wide + shift).astype(array.dtype))
    if not all(map(_finite, made)):
        return False
    inputs = [call.inputs[0], *(edit.region.constant(a) for a in made), *call.inputs[3:]]
    given = {"epsilon": call.attributes["epsilon"]} if "epsilon" in call.node.given else {}
    edit.put(root, edit.call("BatchNormalization", inputs, [call, root], root.outputs[:1], **given))
    return True


def _finite(array: np.ndarray) -> bool:
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _spread(call: Call, weight: np.ndarray | Computed, scale: np.ndarray) -> np.ndarray:
    """The factors along the weight's axes; a ConvTranspose has its channels by group: (in, out / group, ...)."""
    if call.name in ("Gemm", "MatMul"):
        return scale[:, None] if call.name == "Gemm" and call.attributes.get("transB") else scale[None, :]
    tail = (1,) * (weight.ndim - 2)
    if call.name == "Conv":
        return scale.reshape(-1, 1, *tail)
    group = int(call.attributes.get("group", 1))
    by_group = np.repeat(scale.reshape(group, -1), weight.shape[0] // group, axis=0)
    return by_group.reshape(weight.shape[0], weight.shape[1], *tail)
