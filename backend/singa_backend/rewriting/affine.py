"""Scales and shifts of channels after a product, a convolution or a batch normalization."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from ..ir.graph import Node, Value
from .rewriter import Rewriter

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

    call: Node
    bias_call: Node | None
    weight: Value | None
    bias: Value | None
    channels: int
    rank: int | None
    axis: int


def channels(edit: Rewriter, linear: Collection[str] = LINEAR) -> int:
    """For any calls of the form f(x) * scale + shift, fold the constants into those of f.

    f is Conv, ConvTranspose, Gemm or MatMul with a constant weight, MatMul + bias, or a BatchNormalization, and the value of f is
    not used elsewhere.  The scale and the shift have one value, or one for each channel; they are those of a BatchNormalization
    in inference form, or of a Mul, Div, Add or Sub.  The new constants must be finite.

    Args:
        edit: the graph.
        linear: the operators that f may be.
    """
    count = 0
    for root in edit.named("BatchNormalization", "Mul", "Div", "Add", "Sub"):
        if root in edit.graph and _fold(edit, root, linear):
            count += 1
    return count


def _fold(edit: Rewriter, root: Node, operators: Collection[str]) -> bool:
    for at in (0, 1) if edit.operator(root) in ("Add", "Mul") else (0,):
        linear = _linear(edit, root.inputs[at], operators)
        if linear is None:
            continue
        affine = _affine(edit, root, at, linear)
        if affine is not None and _rewrite(edit, root, at, linear, affine):
            return True
    return False


def _linear(edit: Rewriter, value: Value | None, operators: Collection[str]) -> _Linear | None:
    call = None if value is None or not value.is_used_once else value.producer
    if call is None:
        return None
    name, bias, bias_call = edit.operator(call), call.input(2), None
    if name == "Add" and "MatMul" in operators:  # a MatMul and its bias
        bias_call = call
        for at in (0, 1):
            product, bias = bias_call.inputs[at], bias_call.inputs[1 - at]
            before = edit.made_by(product, "MatMul")
            if before is not None and product is not None and product.is_used_once and edit.is_constant(bias):
                call, name = before, "MatMul"
                break
    if name not in operators:
        return None
    if name == "BatchNormalization":
        return _normalized(edit, call)
    weight = call.inputs[1]
    shape = edit.shape(weight) if edit.is_constant(weight) and edit.dtype(weight) in FLOATS else None
    sizes = [d for d in shape or () if isinstance(d, int)]
    if bias is not None and not edit.is_constant(bias):
        return None
    if name in ("Gemm", "MatMul"):
        if len(sizes) != 2:
            return None
        count = sizes[0 if name == "Gemm" and edit.attribute(call, "transB") else 1]
        if bias_call is not None and bias is not None and edit.shape(bias) != (count,):
            return None
        return _Linear(call, bias_call, weight, bias, count, 2 if name == "Gemm" else edit.rank(value), -1)
    if len(sizes) < 3:
        return None
    count = sizes[0] if name == "Conv" else sizes[1] * edit.attribute(call, "group", 1)
    return _Linear(call, None, weight, bias, count, len(sizes), 1)


def _normalized(edit: Rewriter, call: Node) -> _Linear | None:
    if not _infers(edit, call) or not edit.is_constant(call.inputs[1]) or edit.dtype(call.inputs[1]) not in FLOATS:
        return None
    shape = edit.shape(call.inputs[1]) or ()
    count = shape[0] if len(shape) == 1 and isinstance(shape[0], int) else 0
    return _Linear(call, None, None, None, count, edit.rank(call.inputs[0]), 1)


def _infers(edit: Rewriter, call: Node) -> bool:
    """Whether a BatchNormalization is in inference form."""
    trains = edit.attribute(call, "training_mode", 0) or edit.attribute(call, "spatial", 1) != 1
    return not trains and call.has_one_output and len(call.inputs) == 5


def _affine(edit: Rewriter, root: Node, at: int, linear: _Linear) -> _Affine | None:
    dtype = edit.dtype(root.inputs[at] if linear.weight is None else linear.weight)
    name = edit.operator(root)
    if name == "BatchNormalization":
        if not _infers(edit, root) or (linear.axis == -1 and linear.rank != 2):
            return None
        arrays = [edit.constant(i, SMALL) for i in root.inputs[1:]]
        if any(a is None or a.dtype != dtype or a.shape != (linear.channels,) for a in arrays):
            return None
        scale, bias, mean, var = (a.astype(np.float64) for a in arrays if a is not None)
        with np.errstate(all="ignore"):
            factor = scale / np.sqrt(var + np.float64(np.float32(edit.attribute(root, "epsilon", 1e-5))))
            return _Affine(factor, bias - mean * factor)
    constant = edit.constant(root.inputs[1 - at], SMALL)
    if constant is None or constant.dtype != dtype or constant.dtype not in FLOATS or not _by_channel(constant, linear):
        return None
    value = np.broadcast_to(constant.astype(np.float64).reshape(-1), (linear.channels,))
    with np.errstate(all="ignore"):
        if name == "Add":
            return _Affine(None, value)
        if name == "Sub":
            return _Affine(None, -value)
        return _Affine(value if name == "Mul" else 1 / value, None)


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


def _rewrite(edit: Rewriter, root: Node, at: int, linear: _Linear, affine: _Affine) -> bool:
    """Replace the calls by one with folded constants; False if they are not finite, or the call cannot hold them."""
    call, scale, shift = linear.call, affine.scale, affine.shift
    name = edit.operator(call)
    sources = root.inputs[1:] if edit.operator(root) == "BatchNormalization" else [root.inputs[1 - at]]
    if linear.weight is None:
        return edit.operator(root) != "BatchNormalization" and _rewrite_normalization(edit, root, linear, affine, sources)
    if name == "MatMul" and linear.bias_call is None and shift is not None and scale is None:
        return False  # the kernel adds the bias
    bias = None if linear.bias is None else edit.constant(linear.bias)
    if linear.bias is not None and (bias is None or (name != "Gemm" and bias.shape != (linear.channels,))):
        return False
    try:
        with np.errstate(all="ignore"):
            old = (
                0.0 if bias is None else bias.astype(np.float64) * (edit.attribute(call, "beta", 1.0) if name == "Gemm" else 1.0)
            )
            new = np.asarray((old if scale is None else old * scale) + (0.0 if shift is None else shift))
            new = new.astype(edit.dtype(linear.weight))
        if not _finite(new):
            return False
        weight = linear.weight if scale is None else edit.scaled(linear.weight, _spread(edit, linear, scale), *sources)
    except ValueError:  # the bias or the group does not fit: the call fails when it runs
        return False
    if weight is None:
        return False
    inputs, origins = [call.inputs[0], weight], [c for c in (call, linear.bias_call, root) if c is not None]
    if linear.bias is not None:
        inputs.append(edit.add_constant(new, linear.bias, linear.weight, *sources))
    elif shift is not None:
        inputs.append(edit.add_constant(new, linear.weight, *sources, suffix="_bias"))
    if name != "MatMul":
        return edit.put(root, edit.again(call, inputs, root.outputs[:1], origins, beta=None))
    if len(inputs) == 2:
        return edit.put(root, edit.call("MatMul", inputs, origins, root.outputs[:1]))
    product = edit.call("MatMul", inputs[:2], origins)
    return edit.put(root, product, edit.call("Add", (product.outputs[0], inputs[2]), origins, root.outputs[:1]))


def _rewrite_normalization(edit: Rewriter, root: Node, linear: _Linear, affine: _Affine, sources: Sequence[Value | None]) -> bool:
    call, made = linear.call, []
    arrays = [edit.constant(i) for i in call.inputs[1:3]]
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
    constants = [edit.add_constant(a, old, *sources) for a, old in zip(made, call.inputs[1:3], strict=True)]
    inputs = [call.inputs[0], *constants, *call.inputs[3:]]
    return edit.put(root, edit.again(call, inputs, root.outputs[:1], [call, root], momentum=None, spatial=None))


def _finite(array: np.ndarray) -> bool:
    return not array.size or bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def _spread(edit: Rewriter, linear: _Linear, scale: np.ndarray) -> np.ndarray:
    """The factors along the weight's axes; a ConvTranspose has its channels by group: (in, out / group, ...)."""
    assert linear.weight is not None
    call, name, shape = linear.call, edit.operator(linear.call), edit.shape(linear.weight) or ()
    if name in ("Gemm", "MatMul"):
        return scale[:, None] if name == "Gemm" and edit.attribute(call, "transB") else scale[None, :]
    tail = (1,) * (len(shape) - 2)
    if name == "Conv":
        return scale.reshape(-1, 1, *tail)
    group, (rows, columns) = int(edit.attribute(call, "group", 1)), map(int, shape[:2])
    return np.repeat(scale.reshape(group, -1), rows // group, axis=0).reshape(rows, columns, *tail)
