"""Corrects exported files: missing inputs and bad names; `cleaned` corrects a copy, and only if it is necessary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from singa_backend.proto.messages import FreshNames, graphs, names

_NORM_INPUTS = 5
"""x, scale, bias, mean, variance."""


def cleaned(model: ModelProto) -> ModelProto:
    """Add a scale of ones and a bias of zeros to a BatchNormalization without them (TensorFlow's scale=False).

    Names are not changed: node names may be empty, repeated, or have any characters; initializers may be inputs too.
    """
    if not any(_lacking(node) for node in model.graph.node):
        return model
    copy = ModelProto()
    copy.CopyFrom(model)
    graph = copy.graph
    known = {t.name: (tuple(t.dims), t.data_type) for t in graph.initializer}
    known |= {
        n.output[0]: (tuple(a.t.dims), a.t.data_type)
        for n in graph.node
        if n.op_type == "Constant" and not n.domain
        for a in n.attribute
        if a.name == "value"
    }
    fresh = FreshNames(names(graph))
    for i, node in enumerate(graph.node):
        like = next((known[n] for n in node.input[1:] if n in known), None)
        if like is None:
            continue  # the reader reports what is missing
        dtype = helper.tensor_dtype_to_np_dtype(like[1])
        for slot in _lacking(node):
            name = fresh.new(f"{node.name or f'BatchNormalization_{i}'}.{('scale', 'bias')[slot - 1]}")
            value = np.ones(like[0], dtype) if slot == 1 else np.zeros(like[0], dtype)
            graph.initializer.append(numpy_helper.from_array(value, name))
            node.input[slot] = name
    return copy


def _lacking(node: NodeProto) -> list[int]:
    """The slots of scale and bias that a node does not have."""
    if node.op_type != "BatchNormalization" or node.domain not in ("", "ai.onnx") or len(node.input) < _NORM_INPUTS:
        return []
    return [slot for slot in (1, 2) if not node.input[slot]]


def dropout_inputs(
    graph: GraphProto, prefix: str, ratio: float, opset: int, fresh: FreshNames
) -> tuple[list[str], dict[str, Any]]:
    """The inputs, added as initializers, and attributes of a Dropout that follows the mode of its model.

    Before opset 12 the ratio was an attribute, and there was no training mode.
    """
    if opset < 12:
        return [], {"ratio": ratio}
    made = [fresh.new(f"{prefix}{name}") for name in ("ratio", "training_mode")]
    for name, value in zip(made, (np.float32(ratio), np.bool_(True)), strict=True):
        graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return made, {}


def separate(model: ModelProto) -> None:
    """Rename, in place, an output that is also an input or another output."""
    fresh, seen = FreshNames(names(model.graph)), {v.name for v in model.graph.input}
    for value in model.graph.output:
        if value.name in seen:
            own = fresh.new(f"{value.name}_out")
            model.graph.node.append(helper.make_node("Identity", [value.name], [own], name=own))
            value.name = own
        seen.add(value.name)


def rename(model: ModelProto, old: Sequence[str], new: Sequence[str]) -> None:
    """Rename values, in place; another value that already has a new name is renamed too."""
    mapping = {o: n for o, n in zip(old, new, strict=True) if o != n}
    known = names(model.graph)
    fresh = FreshNames(known | set(new))
    for name in known & set(mapping.values()):
        mapping.setdefault(name, fresh.new(name))
    if mapping:
        _renamed(model.graph, mapping)


def _renamed(graph: GraphProto, mapping: Mapping[str, str]) -> None:
    values: list[Any] = [*graph.input, *graph.output, *graph.value_info, *graph.initializer]
    for value in values:
        value.name = mapping.get(value.name, value.name)
    for node in graph.node:
        for side in (node.input, node.output):
            side[:] = [mapping.get(n, n) for n in side]
        for inner in graphs(node):
            _renamed(inner, mapping)
