"""Products of one value with several weights, such as those for queries, keys and values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ...ir import graph as ir
from ...kernels.values import LARGE as KEPT
from ...kernels.values import LazyConstant, bound_of
from ...proto.tensor_data import release
from ..flat import once, operator
from .rewriter import PlanRewriter

LARGEST = 1 << 28
"""The maximum bytes of the weights that are joined."""
READERS = ("Reshape", "Transpose", "Attention")
"""The operators that read queries, keys and values: views of a part of the joined result cost them nothing."""


@dataclass(frozen=True)
class _Product:
    """A product with a constant weight, its bias, and the call that returns the result: the product, or an Add."""

    call: ir.Node
    weight: np.ndarray | LazyConstant
    bias: np.ndarray | None
    last: ir.Node

    @property
    def calls(self) -> tuple[ir.Node, ...]:
        return (self.call,) if self.last is self.call else (self.call, self.last)


def products(edit: PlanRewriter) -> int:
    """For any calls of the form MatMul(x, W1), MatMul(x, W2), ..., with optional biases, replace them by one MatMul and a Split.

    Gemm(x, W) too, without factors and a transposed x.  The weights are constant matrices of one dtype, joined along their
    columns.  All results are read by Reshape, Transpose or Attention only.
    """
    groups: dict[tuple[ir.Value, str], list[_Product]] = {}
    for call in edit.named("MatMul", "Gemm"):
        x = call.inputs[0]
        if x is not None and len(x.users) > 1:
            found = _product(edit, call)
            if found is not None:
                key = (x, f"{call.op_type} {found.weight.dtype} {found.weight.shape[0]}")
                groups.setdefault(key, []).append(found)
    count = 0
    for (x, _), group in groups.items():
        if len(group) > 1 and sum(p.weight.nbytes for p in group) <= LARGEST:
            _join(edit, x, group)
            count += 1
    return count


def _product(edit: PlanRewriter, call: ir.Node) -> _Product | None:
    weight = edit.weight(call.inputs[1])
    if weight is None or weight.ndim != 2 or call.inputs[0] == call.inputs[1]:
        return None
    last, bias = call, None
    if call.op_type == "Gemm":
        plain = call.attributes["alpha"] == 1 and call.attributes["beta"] == 1 and not call.attributes["transA"]
        if not plain:
            return None
        if call.attributes["transB"]:
            weight = (weight if isinstance(weight, np.ndarray) else weight.array()).T
        if call.input(2) is not None:
            bias = edit.constant(call.inputs[2])
            if bias is None or bias.shape != (weight.shape[1],):
                return None
    else:
        add = edit.reader(call.outputs[0]) if once(call.outputs[0]) else None
        if add is not None and operator(add) == "Add":
            array = edit.constant(add.inputs[0] if add.inputs[1] == call.outputs[0] else add.inputs[1])
            if array is not None and array.shape == (weight.shape[1],) and array.dtype == weight.dtype:
                last, bias = add, array
    (value,) = last.results
    users = value.users
    if value.is_output or not users or any(operator(u) not in READERS for u in users):
        return None
    return _Product(call, weight, bias, last)


def _join(edit: PlanRewriter, x: ir.Value, group: list[_Product]) -> None:
    group = sorted(group, key=lambda p: p.call.position)
    dtype, name = group[0].weight.dtype, group[0].call.op_type
    weight = edit.add_constant(_joined([p.weight for p in group]))
    origins = [c for p in group for c in p.calls]
    inputs, bias = [x, weight], None
    if any(p.bias is not None for p in group):
        # a result without a bias has 0 added: only the sign of its zeros may change
        parts = [np.zeros(p.weight.shape[1], dtype) if p.bias is None else p.bias for p in group]
        bias = edit.add_constant(np.concatenate(parts))
        inputs += [bias] if name == "Gemm" else []
    calls = [edit.call(name, inputs, origins)]
    if bias is not None and name == "MatMul":
        calls.append(edit.call("Add", (calls[-1].outputs[0], bias), origins))
    sizes = edit.add_constant(np.array([p.weight.shape[1] for p in group], np.int64))
    calls.append(edit.call("Split", (calls[-1].outputs[0], sizes), origins, [p.last.outputs[0] for p in group], axis=-1))
    edit.put(group[0].call, *calls, also=origins[1:])


def _joined(weights: Sequence[np.ndarray | LazyConstant]) -> np.ndarray | LazyConstant:
    """Matrices side by side; large ones are joined whenever they are packed."""
    bound = max(map(bound_of, weights)) if sum(w.nbytes for w in weights) >= KEPT else math.inf
    arrays = [w for w in weights if isinstance(w, np.ndarray)]
    if not math.isfinite(bound) or len(arrays) < len(weights):
        return np.concatenate([w if isinstance(w, np.ndarray) else w.array() for w in weights], axis=1)
    shape = (arrays[0].shape[0], sum(w.shape[1] for w in arrays))
    return LazyConstant(shape, arrays[0].dtype, partial(_join_into, arrays), bound)


def _join_into(weights: Sequence[np.ndarray], out: np.ndarray) -> None:
    np.concatenate(weights, axis=1, out=out)
    for w in weights:
        release(w)
