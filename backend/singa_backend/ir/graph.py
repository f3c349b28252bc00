"""A model read once: operators and versions resolved, names turned into slots, each value's last use known.

A graph is a list of nodes over numbered slots.  It is walked in one place, `Graph.walk`; the visitor says what a visit
means: compute, record, compare, count.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto

from .. import dtypes
from ..proto.values import Value
from .versioned import VersionedOperator

ABSENT = -1
"""The slot of an input or output that a node leaves out."""


@dataclass(eq=False)
class Node:
    """One call: an operator as a schema version means it, or a function as a graph.

    inputs, outputs: slots of the graph, ABSENT where left out; the names stand beside them.
    attributes: keyword arguments of the operator's body; a graph attribute is a Graph.
    given: the names of the attributes that the file itself sets.
    between: what lies between the xs and the y of a Gradient.
    """

    name: str
    op_type: str
    domain: str
    opset: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    given: frozenset[str] = frozenset()
    operator: VersionedOperator | None = None
    function: Graph | None = None
    forward_graph: Graph | None = None

    @property
    def version(self) -> int | None:
        return self.operator.version if self.operator else None

    @property
    def graphs(self) -> list[Graph]:
        """The graphs among the attributes, and the body of a function."""
        inner = [g for g in self.attributes.values() if isinstance(g, Graph)]
        return [*inner, self.function] if self.function else inner

    def __str__(self) -> str:
        return f"{self.op_type} {self.name!r}"


@dataclass(eq=False)
class Graph:
    """Nodes in an order that can be run, over `slots` numbered places.

    inputs: what must be fed, in order.  optional_inputs: initializers that may be overridden by name.
    states: the initializers by name.  captured: (slot in the enclosing graph, slot here) of outer values.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    states: dict[str, np.ndarray]
    slots: dict[str, int]
    captured: tuple[tuple[int, int], ...] = ()
    optional_inputs: tuple[Value, ...] = ()
    opsets: dict[str, int] = field(default_factory=dict)

    _read: ClassVar[Callable[[ModelProto, Path | None], Graph]]
    """The reader, which registers itself here for `from_onnx`."""

    def __post_init__(self) -> None:
        self.input_slots = tuple(self.slots[v.name] for v in self.inputs)
        self.output_slots = tuple(self.slots[v.name] for v in self.outputs)
        self.state_slots = tuple((self.slots[name], name) for name in self.states)
        self.size = len(self.slots)
        self.dies = self._last_uses()
        self._steps = tuple((n, n.inputs, n.outputs, dies) for n, dies in zip(self.nodes, self.dies, strict=True))

    @classmethod
    def from_onnx(cls, model: ModelProto, folder: Path | None = None) -> Graph:
        """Deprecated: use `singa_backend.read`."""
        warnings.warn("Graph.from_onnx is deprecated; use singa_backend.read", DeprecationWarning, stacklevel=2)
        return cls._read(model, folder)

    def _last_uses(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the slots whose values nobody needs after it."""
        last: dict[int, int] = dict.fromkeys(self.slots.values(), -1)
        for i, node in enumerate(self.nodes):
            for slot in (*node.inputs, *node.outputs, *(outer for g in node.graphs for outer, _ in g.captured)):
                last[slot] = i
        last.pop(ABSENT, None)
        for slot in self.output_slots:
            last.pop(slot, None)
        dies: list[list[int]] = [[] for _ in self.nodes]
        for slot, i in last.items():
            if i >= 0:
                dies[i].append(slot)
        return tuple(map(tuple, dies))

    def walk(self, frame: list[Any], visit: Callable[[Node, list[Any], list[Any]], Sequence[Any]]) -> None:
        """Visit every node in order; `visit(node, inputs, frame)` gives the node's outputs.

        frame: one place per slot, filled with inputs, states and captured values; values are dropped at their last use.
        """
        for node, reads, writes, dies in self._steps:
            outputs = visit(node, [None if s < 0 else frame[s] for s in reads], frame)
            for slot, value in zip(writes, outputs):  # noqa: B905 (a body may give more; naming `strict` takes time at every node)
                if slot >= 0:
                    frame[slot] = value
            for slot in dies:
                frame[slot] = None

    def select(self, nodes: Sequence[Node], outputs: Sequence[str]) -> Graph:
        """The same graph with only these nodes (in order) and these values as outputs."""
        declared = {v.name: v for v in (*self.inputs, *self.optional_inputs, *self.outputs)}
        chosen = tuple(declared.get(name, Value(name)) for name in outputs)
        return replace(self, nodes=tuple(nodes), outputs=chosen)

    def with_weights(self) -> Graph:
        """This graph, or where no initializer is of floats, one whose constants of floats are: some exporters write weights so.

        A constant without axes (the bound of a Clip), and one that is read on the host (the scales of a Resize), stays.
        """
        if any(dtypes.is_float(x.dtype) for x in self.states.values()):
            return self
        settings = {
            name
            for n in self.nodes
            if n.operator and (declared := n.operator.declaration.inputs)
            for i, name in enumerate(n.input_names)
            if declared[min(i, len(declared) - 1)].host is not None
        }
        weights = {
            n.output_names[0]: value
            for n in self.nodes
            if (n.domain, n.op_type) == ("", "Constant")
            if isinstance(value := n.attributes.get("value"), np.ndarray) and value.ndim and dtypes.is_float(value.dtype)
            if n.output_names[0] not in settings
        }
        kept = tuple(n for n in self.nodes if not set(n.output_names) & set(weights))
        return replace(self, nodes=kept, states={**self.states, **weights}) if weights else self

    def all_nodes(self) -> Iterator[Node]:
        """Every node, those of subgraphs and functions included (a function's body once)."""
        seen: set[int] = set()
        pending = [self]
        while pending:
            graph = pending.pop()
            if id(graph) not in seen:
                seen.add(id(graph))
                yield from graph.nodes
                pending += [g for node in graph.nodes for g in node.graphs]


def runnable_order(needs: Sequence[set[int]]) -> list[int]:
    """The places of nodes, each behind those that it needs, else as they are; what a cycle keeps waiting is left out."""
    if all(max(need, default=-1) < i for i, need in enumerate(needs)):
        return list(range(len(needs)))
    sorter = TopologicalSorter(dict(enumerate(needs)))
    with suppress(CycleError):  # what lies before a cycle comes all the same
        sorter.prepare()
    ready = sorted(sorter.get_ready())  # sorted, so it is a heap
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
    return order
