"""Turns nodes of the main graph into layers of `singa.layer`: the statements that create and call them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from singa_backend.ir.graph import Node

from .emitter import Assign, Emitter
from .text import Expr, call, number


def made(e: Emitter, node: Node) -> tuple[Assign, list[Node]] | None:
    """The statement of a node that has an equivalent layer, and the nodes that it replaces; None for other nodes."""
    if node.op_type == "Dropout" and node.output_names[0] in e.model.modal:
        return _dropout(e, node), [node]
    rule = _RULES.get(node.op_type) if not node.domain else None
    if rule is None or node.input(0) is None or node.input_names[0] in e.constants:
        return None
    found = rule(e, node)
    if found is None:
        return None
    expr, nodes = found
    return Assign(e.targets(nodes[-1].outputs[:1], node.op_type), expr, e.origin(*nodes)), nodes


Found = tuple[Expr, list[Node]] | None
"""The call of a layer and the nodes that it replaces; None if no layer is equivalent."""


def _new(e: Emitter, node: Node, expr: Expr, **tensors: str) -> str:
    """Create a layer with the name of its weight or node, and set its tensors."""
    weight = next(iter(tensors.values()), "")
    stem = re.fullmatch(r"(.*[^./_])[./_]+(?:weight|kernel|gamma|scale|W|w)(?::0)?", weight)
    origin = node.origins[0].name if node.origins else node.op_type
    attribute = e.attributes.new(stem[1] if stem else origin, node.op_type.lower())
    e.initial.append(Assign(f"self.{attribute}", expr))
    e.initial += [Assign(f"self.{attribute}.{key}", e.tensor(name)) for key, name in tensors.items()]
    e.layers += 1
    return f"self.{attribute}"


def _pair(values: Sequence[int]) -> str:
    return str(values[0]) if len(set(values)) == 1 else f"({', '.join(map(str, values))})"


def _padding(node: Node) -> list[str] | None:
    """The arguments for the padding of two axes; None if layers do not support it."""
    mode = node.get("auto_pad", "NOTSET")
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        return [f'pad_mode="{mode}"']
    pads = node.get("pads", (0,) * 4) if mode in ("NOTSET", "") else [0] * 4
    if len(pads) != 4:
        return None
    top, left, bottom, right = pads
    if not any(pads):
        return []
    if (top, left) == (bottom, right):
        return [f"padding={_pair((top, left))}"]
    return [f"padding=({top}, {bottom}, {left}, {right})"]


def _conv(e: Emitter, node: Node) -> Found:
    w = e.model.parameters.get(node.input_names[1])
    bias = _name(node, 2)
    padding = _padding(node)
    if w is None or w.ndim != 4 or padding is None or (bias and _shape(e, bias) != w.shape[:1]):
        return None
    args = [str(w.shape[0]), _pair(w.shape[2:])]
    args += [f"stride={_pair(node.get('strides'))}"] if set(node.get("strides", (1,))) != {1} else []
    args += padding
    args += [f"dilation={_pair(node.get('dilations'))}"] if set(node.get("dilations", (1,))) != {1} else []
    args += [f"group={node.get('group')}"] if node.get("group", 1) != 1 else []
    args += [] if bias else ["bias=False"]
    layer = _new(e, node, call("layer.Conv2d", args), W=node.input_names[1], **({"b": bias} if bias else {}))
    return call(layer, [e.expression(node.input_names[0])]), [node]


def _gemm(e: Emitter, node: Node) -> Found:
    w = e.model.parameters.get(node.input_names[1])
    bias = _name(node, 2)
    shape = _shape(e, bias) if bias else None
    if w is None or w.ndim != 2 or (bias and not shape):
        return None
    tensors = {"W": node.input_names[1], **({"b": bias} if bias else {})}
    rest = [f"{n}={number(node.get(n), np.float32)}" for n in ("alpha", "beta") if node.get(n, 1.0) != 1.0]
    rest += ["transA=True"] if node.get("transA") else []
    if not rest and not node.get("transB") and shape in (None, w.shape[1:]):
        expr = call("layer.Linear", [str(w.shape[0]), str(w.shape[1]), *([] if bias else ["bias=False"])])
    else:
        out = w.shape[0 if node.get("transB") else 1]
        rest += [] if node.get("transB") else ["transB=False"]
        rest += [] if bias else ["bias=False"]
        rest += [f"bias_shape={shape}"] if shape not in (None, (1, out)) else []
        expr = call("layer.Gemm", [str(out), *rest])
    return call(_new(e, node, expr, **tensors), [e.expression(node.input_names[0])]), [node]


def _matmul(e: Emitter, node: Node) -> Found:
    """A product with a matrix, with the Add of a vector if nothing else reads the product."""
    w = e.model.parameters.get(node.input_names[1])
    if w is None or w.ndim != 2:
        return None
    (product,) = node.results
    after = next(iter(product.users)) if product.is_used_once else None
    add = after if after is not None and after.is_("Add") else None
    bias = "" if add is None else next((v.name for v in add.reads if v is not product), "")
    fused = bool(bias) and _shape(e, bias) == w.shape[1:]
    tensors = {"W": node.input_names[1], **({"b": bias} if fused else {})}
    expr = call("layer.Linear", [str(w.shape[0]), str(w.shape[1]), *([] if fused else ["bias=False"])])
    layer = _new(e, node, expr, **tensors)
    return call(layer, [e.expression(node.input_names[0])]), [node, add] if fused and add is not None else [node]


def _batch_norm(e: Emitter, node: Node) -> Found:
    if node.output_names[0] not in e.model.modal:
        return None
    scale, bias, mean, variance = node.input_names[1:5]
    shape = _shape(e, scale)
    epsilon, momentum = (e.number(node.get(n, d)) for n, d in (("epsilon", 1e-5), ("momentum", 0.9)))
    statistics = e.model.statistics
    right = all(_shape(e, n) == shape for n in (bias, mean, variance)) and mean in statistics and variance in statistics
    one = shape == (1,) and (e.model.rank(node.input_names[0]) or 0) < 2  # a vector is one channel; the layer takes (N, C, ...)
    if shape is None or not right or one:
        e.helpers.add("batch_norm")
        return call("batch_norm", [*(e.expression(n) for n in node.input_names[:5]), epsilon]), [node]
    args = [f"momentum={number(round(1 - float(momentum), 9))}", f"epsilon={epsilon}", "unbiased=False"]
    layer = _new(e, node, call("layer.BatchNorm2d", args), scale=scale, bias=bias, running_mean=mean, running_var=variance)
    return call(layer, [e.expression(node.input_names[0])]), [node]


def _pool(e: Emitter, node: Node) -> Found:
    padding = _padding(node)
    plain = not node.get("ceil_mode") and not node.get("count_include_pad") and set(node.get("dilations", (1,))) == {1}
    if len(node.get("kernel_shape")) != 2 or padding is None or not plain or any(node.outputs[1:]):
        return None
    kind = "MaxPool2d" if node.op_type == "MaxPool" else "AvgPool2d"
    args = [_pair(node.get("kernel_shape")), f"stride={_pair(node.get('strides', (1, 1)))}", *padding]
    return call(_new(e, node, call(f"layer.{kind}", args)), [e.expression(node.input_names[0])]), [node]


def _embedding(e: Emitter, node: Node) -> Found:
    w = e.model.parameters.get(node.input_names[0])
    if w is None or w.ndim != 2 or node.get("axis", 0) or node.input_names[1] in e.constants:
        return None
    layer = _new(e, node, call("layer.Embedding", [str(w.shape[0]), str(w.shape[1])]), W=node.input_names[0])
    return call(layer, [e.expression(node.input_names[1])]), [node]


def _dropout(e: Emitter, node: Node) -> Assign:
    """A layer if possible; a function for a node that has a seed, computes its ratio, or whose mask is used."""
    x, ratio = e.expression(node.input_names[0]), e.constants.get(node.input_names[1])
    seed = node.get("seed")
    given = e.expression(node.input_names[1]) if ratio is None or ratio.size != 1 else number(ratio.item(), ratio.dtype)
    mask = any(o and o.is_used for o in node.outputs[1:])
    if ratio is not None and ratio.size == 1 and seed is None and not mask:
        layer = _new(e, node, call("layer.Dropout", [given]))
        return Assign(e.targets(node.outputs[:1], "dropout"), call(layer, [x]), e.origin(node))
    e.helpers.add("dropout")
    expr = call("dropout", [x, given, *([] if seed is None else [f"seed={seed}"])])
    return Assign(e.targets([*node.outputs, None][:2], "dropout"), expr, e.origin(node))


def _shared(kind: str) -> Callable[[Emitter, Node], Found]:
    """A layer without parameters, which all nodes of the kind share."""

    def rule(e: Emitter, node: Node) -> Found:
        return call(e.shared(kind), [e.expression(node.input_names[0])]), [node]

    return rule


def _name(node: Node, i: int) -> str:
    """The name of an input; "" for an absent one."""
    value = node.input(i)
    return "" if value is None else value.name


def _shape(e: Emitter, name: str) -> tuple[int, ...] | None:
    """The shape of a parameter or statistic; None for other values."""
    array = e.model.tensor(name)
    return None if array is None else array.shape


_RULES: dict[str, Callable[[Emitter, Node], Found]] = {
    "Conv": _conv, "Gemm": _gemm, "MatMul": _matmul, "BatchNormalization": _batch_norm, "MaxPool": _pool, "AveragePool": _pool,
    "Gather": _embedding, "Relu": _shared("ReLU"), "Sigmoid": _shared("Sigmoid"),
}  # fmt: skip
