"""Cleans a model of what exporters leave in it: `sanitize(model)` folds constants, removes dead parts, adds names and types."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import GraphProto, ModelProto

from ..proto.checker import infer_shapes
from ..proto.messages import FreshNames, graphs
from .pipeline import Report, optimize


@dataclass
class Sanitized:
    """The result of `sanitize`.

    Attributes:
        report: of the passes that folded constants and removed dead parts.
        named: the number of nodes that received a name, because they had none or that of another node of their graph.
        typed: the number of values between nodes that received a type or a shape.
        note: why no types were added; "" if they were.
    """

    report: Report
    named: int = 0
    typed: int = 0
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain data, for ``--json``.

        Returns:
            A dict of the report's fields, `named`, `typed` and `note`.
        """
        return self.report.to_dict() | {"named": self.named, "typed": self.typed, "note": self.note}


def sanitize(model: ModelProto, folder: Path | None = None) -> Sanitized:
    """Clean a model, in place; its results, and the names of its inputs, outputs and values, do not change.

    Constants are folded; unused nodes, weights and functions are removed; each node has a name that is unique in its graph; the
    types of values between nodes are declared as far as ONNX's inference finds them.

    Args:
        model: the model.
        folder: the folder of its external data.

    Returns:
        What was changed.

    Raises:
        InvalidModel: nodes have a cycle (SX101), a value is defined twice (SX102), or a name is not UTF-8 (SX107).
    """
    found = Sanitized(optimize(model, ["fold_constants", "remove_dead"], folder=folder))
    found.named = _name(model.graph)
    inferred = infer_shapes(model)
    found.note = inferred.failure
    if not inferred.failure:
        before = {v.name: v.SerializeToString(deterministic=True) for v in model.graph.value_info}
        made = {n for node in model.graph.node for n in node.output}
        types = [v for v in inferred.model.graph.value_info if v.name in made]
        found.typed = sum(before.get(v.name) != v.SerializeToString(deterministic=True) for v in types)
        del model.graph.value_info[:]
        model.graph.value_info.extend(types)
    return found


def _name(graph: GraphProto) -> int:
    """Name the nodes of a graph and of its subgraphs; returns how many received a name."""
    fresh, seen, count = FreshNames(node.name for node in graph.node), set[str](), 0
    for i, node in enumerate(graph.node):
        if not node.name or node.name in seen:
            node.name = fresh.new(node.name or f"{node.op_type}_{i}")
            count += 1
        seen.add(node.name)
        count += sum(map(_name, graphs(node)))
    return count
