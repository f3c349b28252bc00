"""Scales and shifts of channels after a product, a convolution or a batch normalization."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic

import numpy as np

from .view import C, GraphView, V, rank

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))
LINEAR = ("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization")
SMALL = 1 << 24
"""Bytes of the constants of channels."""


@dataclass(frozen=True)
class _Affine:
    """y * scale + shift for each channel, in float64; None for 1 and 0."""

    scale: np.ndarray | None
    shift: np.ndarray | None


@dataclass(frozen=True)
class _Linear(Generic[V, C]):
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

    call: C
    bias_call: C | None
    weight: V | None
    bias: V | None
    channels: int
    rank: int | None
    axis: int


def channels(view: GraphView[V, C], linear: Collection[str] = LINEAR) -> int:
    """For any calls of the form f(x) * scale + shift, fold the constants into those of f.

    f is Conv, ConvTranspose, Gemm or MatMul with a constant weight, MatMul + bias, or a BatchNormalization, and the value of f is
    not used elsewhere.  The scale and the shift have one value, or one for each channel; they are those of a BatchNormalization
    in inference form, or of a Mul, Div, Add or Sub.  The new constants must be finite.

    Args:
        view: the graph.
        linear: the operators that f may be.
    """
    count = 0
    for root in view.named("BatchNormalization", "Mul", "Div", "Add", "Sub"):
        if view.alive(root) and _fold(view, root, linear):
            count += 1
    return count


def _fold(view: GraphView[V, C], root: C, operators: Collection[str]) -> bool:
    for at in (0, 1) if view.operator(root) in ("Add", "Mul") else (0,):
        linear = _linear(view, root.inputs[at], operators)
        if linear is None:
            continue
        affine = _affine(view, root, at, linear)
        if affine is not None and _rewrite(view, root, at, linear, affine):
            return True
    return False


def _linear(view: GraphView[V, C], value: V, operators: Collection[str]) -> _Linear[V, C] | None:
    call = view.producer(value)
    if call is None or not view.once(value):
        return None
    name, bias, bias_call = view.operator(call), view.input(call, 2), None
    if name == "Add" and "MatMul" in operators:  # a MatMul and its bias
        bias_call = call
        for at in (0, 1):
            before, bias = view.made_by(bias_call.inputs[at], "MatMul"), bias_call.inputs[1 - at]
            if before is not None and view.once(before.outputs[0]) and view.is_constant(bias_call.inputs[1 - at]):
                call, name = before, "MatMul"
                break
    if name not in operators:
        return None
    if name == "BatchNormalization":
        return _normalized(view, call)
    weight = call.inputs[1]
    shape = view.shape(weight) if view.is_constant(weight) and view.dtype(weight) in FLOATS else None
    sizes = [d for d in shape or () if isinstance(d, int)]
    if bias is not None and not view.is_constant(bias):
        return None
    if name in ("Gemm", "MatMul"):
        if len(sizes) != 2:
            return None
        count = sizes[0 if name == "Gemm" and view.attribute(call, "transB") else 1]
        if bias_call is not None and bias is not None and view.shape(bias) != (count,):
            return None
        return _Linear(call, bias_call, weight, bias, count, 2 if name == "Gemm" else rank(view, value), -1)
    if len(sizes) < 3:
        return None
    count = sizes[0] if name == "Conv" else sizes[1] * view.attribute(call, "group", 1)
    return _Linear(call, None, weight, bias, count, len(sizes), 1)


def _normalized(view: GraphView[V, C], call: C) -> _Linear[V, C] | None:
    if not _infers(view, call) or not view.is_constant(call.inputs[1]) or view.dtype(call.inputs[1]) not in FLOATS:
        return None
    shape = view.shape(call.inputs[1]) or ()
    count = shape[0] if len(shape) == 1 and isinstance(shape[0], int) else 0
    return _Linear(call, None, None, None, count, rank(view, call.inputs[0]), 1)


def _infers(view: GraphView[V, C], call: C) -> bool:
    """Whether a BatchNormalization is in inference form."""
    trains = view.attribute(call, "training_mode", 0) or view.attribute(call, "spatial", 1) != 1
    return not trains and view.has_one_output(call) and len(call.inputs) == 5


def _affine(view: GraphView[V, C], root: C, at: int, linear: _Linear[V, C]) -> _Affine | None:
    dtype = view.dtype(root.inputs[at] if linear.weight is None else linear.weight)
    name = view.operator(root)
    if name == "BatchNormalization":
        if not _infers(view, root) or (linear.axis == -1 and linear.rank != 2):
            return None
        arrays = [view.constant(i, SMALL) for i in root.inputs[1:]]
        if any(a is None or a.dtype != dtype or a.shape != (linear.channels,) for a in arrays):
            return None
        scale, bias, mean, var = (a.astype(np.float64) for a in arrays if a is not None)
        with np.errstate(all="ignore"):
            factor = scale / np.sqrt(var + np.float64(np.float32(view.attribute(root, "epsilon", 1e-5))))
            return _Affine(factor, bias - mean * factor)
    constant = view.constant(root.inputs[1 - at], SMALL)
    if constant is None or constant.dtype != dtype or constant.dtype not in FLOATS or not _by_channel(constant, linear):
        return None
    value = np.broadcast_to(constant.astype(np.float64).reshape(-1), (linear.channels,))
    with np.errstate(all="ignore"):
        if name == "Add":
            return _Affine(None, value)
        if name == "Sub":
            return _Affine(None, -value)
        return _Affine(value if name == "Mul" else 1 / value, None)


def _by_channel(constant: np.ndarray, linear: _Linear[V, C]) -> bool:
    """Whether a constant has one element, or one for each channel, and adds no axis to the result."""
    if constant.ndim > (1 if linear.rank is None and linear.axis == -1 else linear.rank or 0):
        return False
    if constant.size == 1:
        return True
    if linear.rank is None and linear.axis == 1:
        return False
    axis = constant.ndim - 1 if linear.axis == -1 else 1 - ((linear.rank or 0) - constant.ndim)
    return 0 <= axis < constant.ndim and constant.size == constant.shape[axis] == linear.channels


def _rewrite(view: GraphView[V, C], root: C, at: int, linear: _Linear[V, C], affine: _Affine) -> bool:
    """Replace the calls by one with folded constants; False if they are not finite, or the call cannot hold them."""
    call, scale, shift = linear.call, affine.scale, affine.shift
    name = view.operator(call)
    sources = root.inputs[1:] if view.operator(root) == "BatchNormalization" else [root.inputs[1 - at]]
    if linear.weight is None:
        return view.operator(root) != "BatchNormalization" and _rewrite_normalization(view, root, linear, affine, sources)
    if name == "MatMul" and linear.bias_call is None and shift is not None and scale is None:
        return False  # the kernel adds the bias
    bias = None if linear.bias is None else view.constant(linear.bias)
    if linear.bias is not None and (bias is None or (name != "Gemm" and bias.shape != (linear.channels,))):
        return False
    try:
        with np.errstate(all="ignore"):
            old = (
                0.0 if bias is None else bias.astype(np.float64) * (view.attribute(call, "beta", 1.0) if name == "Gemm" else 1.0)
            )
            new = np.asarray((old if scale is None else old * scale) + (0.0 if shift is None else shift))
            new = new.astype(view.dtype(linear.weight))
        if not _finite(new):
            return False
        weight = linear.weight if scale is None else view.scaled(linear.weight, _spread(view, linear, scale), *sources)
    except ValueError:  # the bias or the group does not fit: the call fails when it runs
        return False
    if weight is None:
        return False
    inputs, origins = [call.inputs[0], weight], [c for c in (call, linear.bias_call, root) if c is not None]
    if linear.bias is not None:
        inputs.append(view.add_constant(new, linear.bias, linear.weight, *sources))
    elif shift is not None:
        inputs.append(view.add_constant(new, linear.weight, *sources, suffix="_bias"))
    if name != "MatMul":
        return view.put(root, view.again(call, inputs, root.outputs[:1], origins, beta=None))
    if len(inputs) == 2:
        return view.put(root, view.call("MatMul", inputs, origins, root.outputs[:1]))
    product = view.call("MatMul", inputs[:2], origins)
    return view.put(root, product, view.call("Add", (product.outputs[0], inputs[2]), origins, root.outputs[:1]))


def _rewrite_normalization(view: GraphView[V, C], root: C, linear: _Linear[V, C], affine: _Affine, sources: Sequence[V]) -> bool:
    call, made = linear.call, []
    arrays = [view.constant(i) for i in call.inputs[1:3]]
    if any(a is None or a.shape != (linear.channels,) or a.dtype not in FLOATS for a in arrays):
        return False
    with np.errstate(all="ignore"):
        for array, shift in zip(arrays, (None, affine.shift), strict=True):
            assert array is not None
            wide = array.astype(np.float64)
            wide = wide if affine.scale is None else wide * affine.scale
            made.append((wide if shift is None else wide + shift).astype(array.dtype))
    if not all(map(_finite, made)):
        return False
    constants = [view.add_constant(a, old, *sources) for a, old in zip(made, call.inputs[1:3], strict=True)]
    inputs = [call.inputs[0], *constants, *call.inputs[3:]]
    return view.put(root, view.again(call, inputs, root.outputs[:1], [call, root], momentum=None, spatial=None))


def _finite(array: np.ndarray) -> bool:
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _spread(view: GraphView[V, C], linear: _Linear[V, C], scale: np.ndarray) -> np.ndarray:
    """The factors along the weight's axes; a ConvTranspose has its channels by group: (in, out / group, ...)."""
    assert linear.weight is not None
    call, name, shape = linear.call, view.operator(linear.call), view.shape(linear.weight) or ()
    if name in ("Gemm", "MatMul"):
        return scale[:, None] if name == "Gemm" and view.attribute(call, "transB") else scale[None, :]
    tail = (1,) * (len(shape) - 2)
    if name == "Conv":
        return scale.reshape(-1, 1, *tail)
    group, (rows, columns) = int(view.attribute(call, "group", 1)), map(int, shape[:2])
    return np.repeat(scale.reshape(group, -1), rows // group, axis=0).reshape(rows, columns, *tail)
