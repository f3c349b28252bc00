"""Read ONNX's messages: opsets, the graphs of a node, the names that it reads, unused names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from google.protobuf.message import Message
from onnx import GraphProto, ModelProto, NodeProto, OperatorSetIdProto

from ..limits import check_nesting
from .schemas import plain_domain

TRAINING_GRADIENT = ("ai.onnx.preview.training", "Gradient")


def imported(imports: Iterable[OperatorSetIdProto]) -> dict[str, int]:
    """The opset of each domain that a model or a function imports."""
    return {plain_domain(entry.domain): int(entry.version) for entry in imports}


def graphs(node: NodeProto) -> list[GraphProto]:
    """The graphs among a node's attributes."""
    return [g for a in node.attribute for g in ((a.g, *a.graphs) if a.HasField("g") else a.graphs)]


def defined(graph: GraphProto) -> set[str]:
    """The names of the values that a graph defines: inputs, initializers, outputs of its nodes."""
    held = (*(t.name for t in graph.initializer), *(t.values.name for t in graph.sparse_initializer))
    return {*(v.name for v in graph.input), *held, *(o for n in graph.node for o in n.output)}


def names(graph: GraphProto) -> set[str]:
    """The names of every value in a graph and the graphs within it."""
    return defined(graph).union(*(names(inner) for node in graph.node for inner in graphs(node)))


def unlist_weights(model: ModelProto) -> None:
    """Write a model of IR version 3 or older as 4, in place: every initializer had to be an input, which nobody could replace."""
    if model.ir_version < 4:
        weights = {t.name for t in model.graph.initializer}
        for value in [v for v in model.graph.input if v.name in weights]:
            model.graph.input.remove(value)
        model.ir_version = 4


class FreshNames:
    """Unique names: the requested name if it is unused, otherwise that name with the first unused number.

    Args:
        taken: names that are in use.
        mark: the separator before the number.
        first: the first number.
    """

    def __init__(self, taken: Iterable[str] = (), *, mark: str = "_", first: int = 1) -> None:
        self._taken, self._mark, self._first = set(taken), mark, first
        self._next: dict[str, int] = {}

    def new(self, requested: str) -> str:
        """A name that was unused; it is in use afterwards."""
        name = requested
        if requested in self._taken:
            number = self._next.get(requested, self._first)
            while (name := f"{requested}{self._mark}{number}") in self._taken:
                number += 1
            self._next[requested] = number + 1
        self._taken.add(name)
        return name


def reads(node: NodeProto, depth: int = 0) -> set[str]:
    """The names that a node reads: its inputs, the outer values that its graphs use, and the y of a Gradient.

    Raises ResourceExhausted if graphs nest too deeply.
    """
    found = {n for n in node.input if n}
    if (node.domain, node.op_type) == TRAINING_GRADIENT:
        found |= {a.s.decode("utf-8", "replace") for a in node.attribute if a.name == "y"}
    for graph in graphs(node):
        check_nesting(depth + 1)
        used = {o.name for o in graph.output}
        for p in graph.node:
            used |= reads(p, depth + 1)
        found |= used - defined(graph)
    return found


def texts(message: Message) -> Iterator[tuple[Any, str | int, str | bytes]]:
    """Every text of a message, which is bytes if it is not UTF-8: its container, the field name or index there, and the text."""
    for kind, value in message.ListFields():
        if kind.type == kind.TYPE_STRING:
            alone = isinstance(value, (str, bytes))
            yield from [(message, kind.name, value)] if alone else [(value, i, text) for i, text in enumerate(value)]
        elif kind.type == kind.TYPE_MESSAGE:
            for inner in [value] if isinstance(value, Message) else value:
                yield from texts(inner)
