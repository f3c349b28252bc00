"""`fold_batch_normalization`: fold a BatchNormalization, or an Add or Mul by channel, into the preceding Conv or Gemm.

Only this pass rounds: in float32 to about 1e-5 of the largest value.  Folded weights are new weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .graph import GraphEditor, Node
from .operator_facts import version

MOST = 1 << 28
"""Bytes of a weight that may be rewritten."""

FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


@dataclass(frozen=True)
class _Affine:
    """y * scale + shift for each channel, in float64; None for 1 and 0."""

    scale: np.ndarray | None
    shift: np.ndarray | None


def fold_batch_normalization(net: GraphEditor) -> int:
    """Fold the scale and shift of each channel into the preceding weight and bias."""
    count = 0
    for node in list(net.nodes):
        if node.is_("BatchNormalization", "Add", "Sub", "Mul", "Div") and _fold(net, node):
            count += 1
    return count


def _fold(net: GraphEditor, node: Node) -> bool:
    for slot in (0, 1) if node.op_type in ("Add", "Mul") else (0,):
        before = net.producer(node.input(slot))
        if before is None or not before.is_("Conv", "ConvTranspose", "Gemm") or not net.used_once(node.input(slot)):
            continue
        weight = net.constant(before.input(1), MOST)
        bias = net.constant(before.input(2), MOST) if before.input(2) else None
        if weight is None or weight.dtype not in FLOATS or (before.input(2) and bias is None):
            continue
        channels = _channels(before, weight)
        affine = _affine(net, node, slot, weight, channels)
        if affine is not None and channels and _rewrite(net, before, weight, bias, affine, channels):
            old, new = before.outputs[0], node.outputs[0]
            net.remove(node)
            net.rename_output(before, 0, new)
            net.types.pop(old, None)
            return True
    return False


def _channels(before: Node, weight: np.ndarray) -> int:
    """The number of output channels; 0 if the weight does not determine it."""
    if before.op_type == "Gemm":
        return weight.shape[0 if before.get("transB", 0) else 1] if weight.ndim == 2 else 0
    if weight.ndim < 3:
        return 0
    return int(weight.shape[0] if before.op_type == "Conv" else weight.shape[1] * before.get("group", 1))


def _affine(net: GraphEditor, node: Node, slot: int, weight: np.ndarray, channels: int) -> _Affine | None:
    if node.op_type == "BatchNormalization":
        return _normalization(net, node, channels)
    constant = net.constant(node.input(1 - slot), 1 << 24)
    rank = weight.ndim
    if net.opset < 7 or constant is None or constant.dtype not in FLOATS or constant.ndim > rank:
        return None
    shape = (1,) * (rank - constant.ndim) + constant.shape
    if any(d != 1 for i, d in enumerate(shape) if i != 1) or shape[1] not in (1, channels):
        return None
    value = np.broadcast_to(constant.astype(np.float64).reshape(-1), (channels,))
    with np.errstate(all="ignore"):
        return {
            "Add": _Affine(None, value),
            "Sub": _Affine(None, -value),
            "Mul": _Affine(value, None),
            "Div": _Affine(1 / value, None),
        }[node.op_type]


def _normalization(net: GraphEditor, node: Node, channels: int) -> _Affine | None:
    """The scale and shift of a BatchNormalization in inference form; None otherwise."""
    found = version(net, node)
    trains = node.get("training_mode", 0) if net.opset >= 14 else net.opset < 7 and not node.get("is_test", 0)
    if found is None or trains or not node.only_output() or node.get("spatial", 1) != 1 or len(node.inputs) != 5:
        return None
    arrays = [net.constant(n, 1 << 24) for n in node.inputs[1:]]
    if any(a is None or a.dtype not in FLOATS or a.shape != (channels,) for a in arrays):
        return None
    scale, bias, mean, var = (a.astype(np.float64) for a in arrays if a is not None)
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(var + np.float64(np.float32(node.get("epsilon", 1e-5))))
        return _Affine(factor, bias - mean * factor)


def _rewrite(net: GraphEditor, before: Node, weight: np.ndarray, bias: np.ndarray | None, affine: _Affine, channels: int) -> bool:
    """Set the folded weight and bias of `before`; False if they would not be finite, or the bias has no input."""
    gemm = before.op_type == "Gemm"
    scale, shift = affine.scale, affine.shift
    old = np.zeros(channels) if bias is None else bias.astype(np.float64) * (before.get("beta", 1.0) if gemm else 1.0)
    with np.errstate(all="ignore"):
        new_bias = (old if scale is None else old * scale) + (0 if shift is None else shift)
        new_bias = new_bias.astype(weight.dtype)
        new_weight = weight if scale is None else (weight * _spread(before, weight, scale)).astype(weight.dtype)
    if not gemm and new_bias.shape != (channels,):
        return False
    was = [weight] if bias is None else [weight, bias]
    if all(np.isfinite(a).all() for a in was) and not (np.isfinite(new_bias).all() and np.isfinite(new_weight).all()):
        return False
    inputs = [before.inputs[0], before.inputs[1], before.input(2)]
    if scale is not None:
        inputs[1] = net.add_constant(new_weight, before.inputs[1])
    if bias is not None or shift is not None:
        inputs[2] = net.add_constant(new_bias, before.input(2) or before.inputs[1] + "_bias")
        if gemm:
            before.set(beta=1.0)
    net.rewire(before, inputs)
    net.sort()  # a Constant node must precede its reader
    return True


def _spread(before: Node, weight: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The factors along the weight's axes; a ConvTranspose has its channels by group: (in, out / group, ...)."""
    if before.op_type == "Gemm":
        return scale[:, None] if before.get("transB", 0) else scale[None, :]
    tail = (1,) * (weight.ndim - 2)
    if before.op_type == "Conv":
        return scale.reshape(-1, 1, *tail)
    group = int(before.get("group", 1))
    by_group = np.repeat(scale.reshape(group, -1), weight.shape[0] // group, axis=0)
    return by_group.reshape(weight.shape[0], weight.shape[1], *tail)
