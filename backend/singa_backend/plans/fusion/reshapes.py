"""Reshapes moved after products and elementwise calls, so that these form one chain that begins with the product."""

from __future__ import annotations

import numpy as np

from ...ir import graph as ir
from ...ir.declaration import has_trait
from ...rewriting.reshapes import join_reshape
from ..chains import is_binary
from ..flat import operator
from .rewriter import PlanRewriter

PRODUCTS = {"MatMul": 1, "Gemm": 1, "MatMulInteger": 1, "QLinearMatMul": 3}
"""The products, with the position of the right matrix."""
ONE_INPUT = ("QuantizeLinear", "DynamicQuantizeLinear", "Erf")
"""Other functions of each element of the first input: with parameters, or no kernel's epilogue."""
SOURCES = frozenset([*PRODUCTS, "Gather", "LayerNormalization"])


def reshapes(edit: PlanRewriter) -> int:
    """For any call f(Reshape(x)) with f elementwise, or a product with a constant matrix, compute Reshape(f(x)).

    A product, and the operands of an elementwise call, permit it if the Reshape keeps the last axis.  Two Reshapes in sequence
    become one.
    """
    count = 0
    for call in edit.graph.nodes:
        if call in edit.graph and call.inputs:
            count += _moved(edit, call)
    return count


def _moved(edit: PlanRewriter, call: ir.Node) -> bool:
    name = operator(call)
    if name == "Reshape":
        return join_reshape(edit, call)
    at = 1 if name == "Gather" else 0
    if is_binary(call) and len(call.inputs) == 2 and edit.made_by(call.inputs[0], "Reshape") is None:
        at = 1
    reshape = edit.made_by(call.inputs[at], "Reshape") if len(call.inputs) > at else None
    if reshape is None or len(reshape.inputs) != 2 or len(call.outputs) != (3 if name == "DynamicQuantizeLinear" else 1):
        return False
    if name in PRODUCTS:
        return _product(edit, call, reshape)
    source = ir.producer(reshape.inputs[0])
    if not (operator(source) in SOURCES or _is_function(source)) or not _elementwise(edit, call, reshape, at):
        return False
    inputs = [reshape.inputs[0] if i == at else v for i, v in enumerate(call.inputs)]
    made = call.copy(tuple(inputs), (ir.Value(), *call.outputs[1:]), call.origins)
    edit.put(call, made, _again(edit, reshape, made.outputs[0], call, reshape.inputs[1]))
    return True


def _again(edit: PlanRewriter, reshape: ir.Node, x: ir.Value | None, call: ir.Node, shape: ir.Value | None) -> ir.Node:
    """The Reshape of another value, in place of the first output of a call."""
    return reshape.copy((x, shape), call.outputs[:1], reshape.origins)


def _keeps_last(edit: PlanRewriter, reshape: ir.Node) -> int | None:
    """The size of the last axis, if it is known and the same before and after."""
    before, after = edit.facts.last(reshape.inputs[0]), edit.facts.last(reshape.outputs[0])
    return before if isinstance(before, int) and before == after else None


def _is_function(call: ir.Node | None) -> bool:
    """Whether a call is one of an element of its first input, or of one for each place of its inputs."""
    name = operator(call)
    one = name in ONE_INPUT or (has_trait("", name, "epilogue") and has_trait("", name, "unary"))
    return one or (bool(name) and call is not None and is_binary(call))


def _elementwise(edit: PlanRewriter, call: ir.Node, reshape: ir.Node, at: int) -> bool:
    """Whether every element of the result depends on the element at the same place only."""
    name = operator(call)
    if name == "Gather":
        table = edit.constant(call.inputs[0])
        return table is not None and table.ndim == 1
    if not _is_function(call) or (is_binary(call) and len(call.inputs) != 2):
        return False
    for i, v in enumerate(call.inputs):
        shape = () if i == at or v is None else edit.shape(v)
        if shape is None or len(shape) > 1:
            return False
        one = not shape or shape[0] == 1
        if not one and (name == "QuantizeLinear" or shape[0] != _keeps_last(edit, reshape)):
            return False
        if shape and not (edit.facts.rank_at_least(reshape.inputs[0], 1) and edit.facts.rank_at_least(reshape.outputs[0], 1)):
            return False
    return True


def _product(edit: PlanRewriter, call: ir.Node, reshape: ir.Node) -> bool:
    w = edit.shape(call.inputs[PRODUCTS[operator(call)]])
    size, target, x = _keeps_last(edit, reshape), edit.ints(reshape.inputs[1]), edit.shape(reshape.inputs[0])
    if size is None or target is None or x is None or w is None or len(w) != 2 or w[0] != size or not isinstance(w[1], int):
        return False
    if len(x) < 2 or len(target) < 2 or any(t == 0 and i >= len(x) - 1 for i, t in enumerate(target)):
        return False
    if 0 in target and reshape.attributes.get("allowzero"):
        return False
    others = {"MatMulInteger": call.inputs[2:3], "QLinearMatMul": call.inputs[1:3]}.get(operator(call), ())
    if any(i is not None and not _single(edit, i) for i in others):
        return False  # scales or zero points of rows
    shape = edit.add_constant(np.array([*target[:-1], w[1]], np.int64))
    if operator(call) != "Gemm":
        made = call.copy((reshape.inputs[0], *call.inputs[1:]), (ir.Value(),), call.origins)
        edit.put(call, made, _again(edit, reshape, made.outputs[0], call, shape))
        return True
    a = call.attributes
    bias = call.inputs[2] if call.input(2) is not None else None
    plain = a["alpha"] == 1 and not a["transA"] and not a["transB"] and (bias is None or a["beta"] == 1)
    if not plain or (bias is not None and edit.shape(bias) not in ((w[1],), (1,), ())):
        return False
    calls = [edit.call("MatMul", (reshape.inputs[0], call.inputs[1]), [call])]
    if bias is not None:
        calls.append(edit.call("Add", (calls[0].outputs[0], bias), [call]))
    edit.put(call, *calls, _again(edit, reshape, calls[-1].outputs[0], call, shape))
    return True


def _single(edit: PlanRewriter, value: ir.Value | None) -> bool:
    """Whether a value is known to have one element."""
    shape = edit.shape(value)
    return shape is not None and all(d == 1 for d in shape)
