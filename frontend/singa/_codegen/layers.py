"""Turns nodes of the main graph into layers of `singa.layer`: the statements that create and call them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from .emitter import Assign, Emitter
from .text import Expr, call, number


def made(e: Emitter, node: NodeProto, users: dict[str, list[NodeProto]]) -> tuple[Assign, list[NodeProto]] | None:
    """The statement of a node that has an equivalent layer, and the nodes that it replaces; None for other nodes.

    users: for each value, the nodes of the main graph that read it.
    """
    if node.op_type == "Dropout" and node.output[0] in e.model.modal:
        return _dropout(e, node), [node]
    rule = _RULES.get(node.op_type) if not node.domain else None
    if rule is None or not node.input or not node.input[0] or node.input[0] in e.constants:
        return None
    found = rule(e, node, users)
    if found is None:
        return None
    expr, nodes = found
    return Assign(e.targets([nodes[-1].output[0]], node.op_type), expr, e.origin(*nodes)), nodes


Found = tuple[Expr, list[NodeProto]] | None
"""The call of a layer and the nodes that it replaces; None if no layer is equivalent."""


def _attributes(node: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _new(e: Emitter, node: NodeProto, expr: Expr, **tensors: str) -> str:
    """Create a layer with the name of its weight or node, and set its tensors."""
    weight = next(iter(tensors.values()), "")
    stem = re.fullmatch(r"(.*[^./_])[./_]+(?:weight|kernel|gamma|scale|W|w)(?::0)?", weight)
    origin = e.model.origins.get(node.output[0])
    attribute = e.attributes.new(stem[1] if stem else origin.name if origin else node.op_type, node.op_type.lower())
    e.initial.append(Assign(f"self.{attribute}", expr))
    e.initial += [Assign(f"self.{attribute}.{key}", e.tensor(name)) for key, name in tensors.items()]
    e.layers += 1
    return f"self.{attribute}"


def _pair(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"({', '.join(map(str, values))})"


def _padding(a: dict[str, Any]) -> list[str] | None:
    """The arguments for the padding of two axes; None if layers do not support it."""
    mode = a.get("auto_pad", b"NOTSET").decode()
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        return [f'pad_mode="{mode}"']
    pads = a.get("pads", [0] * 4) if mode in ("NOTSET", "") else [0] * 4
    if len(pads) != 4:
        return None
    top, left, bottom, right = pads
    if not any(pads):
        return []
    if (top, left) == (bottom, right):
        return [f"padding={_pair((top, left))}"]
    return [f"padding=({top}, {bottom}, {left}, {right})"]


def _conv(e: Emitter, node: NodeProto, users: Any) -> Found:
    w = e.model.parameters.get(node.input[1])
    bias = node.input[2] if len(node.input) > 2 else ""
    a = _attributes(node)
    padding = _padding(a)
    if w is None or w.ndim != 4 or padding is None or (bias and _shape(e, bias) != w.shape[:1]):
        return None
    args = [str(w.shape[0]), _pair(w.shape[2:])]
    args += [f"stride={_pair(a['strides'])}"] if set(a.get("strides", [1])) != {1} else []
    args += padding
    args += [f"dilation={_pair(a['dilations'])}"] if set(a.get("dilations", [1])) != {1} else []
    args += [f"group={a['group']}"] if a.get("group", 1) != 1 else []
    args += [] if bias else ["bias=False"]
    layer = _new(e, node, call("layer.Conv2d", args), W=node.input[1], **({"b": bias} if bias else {}))
    return call(layer, [e.expression(node.input[0])]), [node]


def _gemm(e: Emitter, node: NodeProto, users: Any) -> Found:
    w = e.model.parameters.get(node.input[1])
    bias = node.input[2] if len(node.input) > 2 else ""
    shape = _shape(e, bias) if bias else None
    if w is None or w.ndim != 2 or (bias and not shape):
        return None
    a = _attributes(node)
    tensors = {"W": node.input[1], **({"b": bias} if bias else {})}
    rest = [f"{n}={number(a[n], np.float32)}" for n in ("alpha", "beta") if a.get(n, 1.0) != 1.0]
    rest += ["transA=True"] if a.get("transA") else []
    if not rest and not a.get("transB") and shape in (None, w.shape[1:]):
        expr = call("layer.Linear", [str(w.shape[0]), str(w.shape[1]), *([] if bias else ["bias=False"])])
    else:
        out = w.shape[0 if a.get("transB") else 1]
        rest += [] if a.get("transB") else ["transB=False"]
        rest += [] if bias else ["bias=False"]
        rest += [f"bias_shape={shape}"] if shape not in (None, (1, out)) else []
        expr = call("layer.Gemm", [str(out), *rest])
    return call(_new(e, node, expr, **tensors), [e.expression(node.input[0])]), [node]


def _matmul(e: Emitter, node: NodeProto, users: dict[str, list[NodeProto]]) -> Found:
    """A product with a matrix, with the Add of a vector if nothing else reads the product."""
    w = e.model.parameters.get(node.input[1])
    if w is None or w.ndim != 2:
        return None
    product = node.output[0]
    after = users.get(product, [])
    add = after[0] if e.uses[product] == 1 and after and (after[0].domain, after[0].op_type) == ("", "Add") else None
    bias = "" if add is None else next((n for n in add.input if n != product), "")
    fused = bool(bias) and _shape(e, bias) == w.shape[1:]
    tensors = {"W": node.input[1], **({"b": bias} if fused else {})}
    expr = call("layer.Linear", [str(w.shape[0]), str(w.shape[1]), *([] if fused else ["bias=False"])])
    layer = _new(e, node, expr, **tensors)
    return call(layer, [e.expression(node.input[0])]), [node, add] if fused and add is not None else [node]


def _batch_norm(e: Emitter, node: NodeProto, users: Any) -> Found:
    if node.output[0] not in e.model.modal:
        return None
    scale, bias, mean, variance = node.input[1:5]
    shape = _shape(e, scale)
    a = _attributes(node)
    epsilon, momentum = (e.number(a.get(n, d)) for n, d in (("epsilon", 1e-5), ("momentum", 0.9)))
    statistics = e.model.statistics
    right = all(_shape(e, n) == shape for n in (bias, mean, variance)) and mean in statistics and variance in statistics
    one = shape == (1,) and (e.model.rank(node.input[0]) or 0) < 2  # a vector is one channel; the layer takes (N, C, ...)
    if shape is None or not right or one:
        e.helpers.add("batch_norm")
        return call("batch_norm", [*(e.expression(n) for n in node.input[:5]), epsilon]), [node]
    args = [f"momentum={number(round(1 - float(momentum), 9))}", f"epsilon={epsilon}", "unbiased=False"]
    layer = _new(e, node, call("layer.BatchNorm2d", args), scale=scale, bias=bias, running_mean=mean, running_var=variance)
    return call(layer, [e.expression(node.input[0])]), [node]


def _pool(e: Emitter, node: NodeProto, users: Any) -> Found:
    a = _attributes(node)
    padding = _padding(a)
    plain = not a.get("ceil_mode") and not a.get("count_include_pad") and set(a.get("dilations", [1])) == {1}
    if len(a["kernel_shape"]) != 2 or padding is None or not plain or any(node.output[1:]):
        return None
    kind = "MaxPool2d" if node.op_type == "MaxPool" else "AvgPool2d"
    args = [_pair(a["kernel_shape"]), f"stride={_pair(a.get('strides', [1, 1]))}", *padding]
    return call(_new(e, node, call(f"layer.{kind}", args)), [e.expression(node.input[0])]), [node]


def _embedding(e: Emitter, node: NodeProto, users: Any) -> Found:
    w = e.model.parameters.get(node.input[0])
    if w is None or w.ndim != 2 or _attributes(node).get("axis", 0) or node.input[1] in e.constants:
        return None
    layer = _new(e, node, call("layer.Embedding", [str(w.shape[0]), str(w.shape[1])]), W=node.input[0])
    return call(layer, [e.expression(node.input[1])]), [node]


def _dropout(e: Emitter, node: NodeProto) -> Assign:
    """A layer if possible; a function for a node that has a seed, computes its ratio, or whose mask is used."""
    x, ratio = e.expression(node.input[0]), e.constants.get(node.input[1])
    seed = _attributes(node).get("seed")
    given = e.expression(node.input[1]) if ratio is None or ratio.size != 1 else number(ratio.item(), ratio.dtype)
    mask = any(e.uses[n] for n in node.output[1:])
    if ratio is not None and ratio.size == 1 and seed is None and not mask:
        layer = _new(e, node, call("layer.Dropout", [given]))
        return Assign(e.targets([node.output[0]], "dropout"), call(layer, [x]), e.origin(node))
    e.helpers.add("dropout")
    expr = call("dropout", [x, given, *([] if seed is None else [f"seed={seed}"])])
    return Assign(e.targets([*node.output, ""][:2], "dropout"), expr, e.origin(node))


def _shared(kind: str) -> Callable[[Emitter, NodeProto, Any], Found]:
    """A layer without parameters, which all nodes of the kind share."""

    def rule(e: Emitter, node: NodeProto, users: Any) -> Found:
        return call(e.shared(kind), [e.expression(node.input[0])]), [node]

    return rule


def _shape(e: Emitter, name: str) -> tuple[int, ...] | None:
    """The shape of a parameter or statistic; None for other values."""
    array = e.model.tensor(name)
    return None if array is None else array.shape


_RULES: dict[str, Callable[[Emitter, NodeProto, dict[str, list[NodeProto]]], Found]] = {
    "Conv": _conv, "Gemm": _gemm, "MatMul": _matmul, "BatchNormalization": _batch_norm, "MaxPool": _pool, "AveragePool": _pool,
    "Gather": _embedding, "Relu": _shared("ReLU"), "Sigmoid": _shared("Sigmoid"),
}  # fmt: skip
