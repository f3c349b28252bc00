"""The graph of a model: operators and versions are resolved, names are slots, the last use of each value is known.

A graph is a list of nodes over numbered slots.  `Graph.walk` visits them; the visitor computes, records, compares or counts.
"""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from onnx import ModelProto

from .. import dtypes
from ..proto.values import Value
from .versioned import VersionedOperator

PARAMETERS = "sonnx.parameters"
"""The key of the metadata that lists, as JSON, initializers that are parameters although their use does not show it."""

ABSENT = -1
"""The slot of an input or output that a node omits."""


DEFERRED = "ai.singa.deferred"
"""The domain of a node of a recorded step in place of the nodes that a gradient rule would write: only a plan can compute it."""


@dataclass(frozen=True)
class GradientCall:
    """A call of an operator's gradient rule, which has written some of a graph's nodes.

    The values are named; "" is an absent one, or a constant without a name.

    Attributes:
        domain: the domain of the operator that was differentiated.
        op_type: the operator.
        version: its schema version.
        attributes: the attributes of its call.
        inputs: the inputs of its call.
        outputs: its outputs.
        dys: the gradient of each output.
        gradients: the results of the rule: the gradient of each input.
        numbers: the constants of one float among `dys`, which need not have a name: place, dtype, shape and number.
    """

    domain: str
    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dys: tuple[str, ...]
    gradients: tuple[str, ...]
    numbers: tuple[tuple[int, str, tuple[int, ...], float], ...] = ()


@dataclass(eq=False)
class Node:
    """One node: a call of an operator at a schema version, or of a function.

    Attributes:
        name: the name of the node; the reader creates one for a node without a name.
        op_type: the operator type, or the name of the function.
        domain: the domain of the operator; "" for ONNX's.
        opset: the opset of that domain.
        inputs: the slots of the inputs; ABSENT (-1) for an omitted one.
        outputs: the slots of the outputs; ABSENT (-1) for an omitted one.
        input_names: the names of the inputs; "" for an omitted one.
        output_names: the names of the outputs; "" for an omitted one.
        attributes: the keyword arguments of the operator's body, defaults included; a graph attribute is a Graph.
        given: the names of the attributes that the model sets.
        operator: the operator at its schema version; None for a function.
        function: the body of the function; None for an operator.
        forward_graph: for a Gradient, the graph from its xs and zs to its y; None otherwise.
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
        """The schema version of the operator; None for a function."""
        return self.operator.version if self.operator else None

    @property
    def graphs(self) -> list[Graph]:
        """The graphs in the attributes, and the body of a function."""
        if not self.attributes and not self.function:
            return []
        inner = [g for g in self.attributes.values() if isinstance(g, Graph)]
        return [*inner, self.function] if self.function else inner

    def __str__(self) -> str:
        """Return the operator type and the name."""
        return f"{self.op_type} {self.name!r}"


@dataclass(eq=False)
class Graph:
    """Nodes in an executable order, whose values have numbered slots.

    Attributes:
        name: the name of the graph.
        inputs: the required inputs, in order.
        outputs: the outputs, in order.
        nodes: the nodes, in an order in which they can run.
        states: the initializers by name, as host arrays.
        slots: the slot of each value by name.
        captured: (slot in the enclosing graph, slot in this graph) of each outer value that the graph reads.
        optional_inputs: the inputs that have an initializer, which an input of that name replaces.
        opsets: the opset of each domain; "" is ONNX's domain.
        warnings: what the reader read in another way than the file states it, one sentence each.
        marked: the initializers that the file lists as parameters under the key PARAMETERS of its metadata.
        gradient_calls: the calls of gradient rules that have written nodes, in order, if it is a recorded step.
    """

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    nodes: tuple[Node, ...]
    states: dict[str, np.ndarray]
    slots: dict[str, int]
    captured: tuple[tuple[int, int], ...] = ()
    optional_inputs: tuple[Value, ...] = ()
    opsets: Mapping[str, int] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    marked: frozenset[str] = frozenset()
    gradient_calls: tuple[GradientCall, ...] = ()

    _read: ClassVar[Callable[[ModelProto, Path | None], Graph]]
    """The reader, which sets this for `from_onnx`."""

    def __post_init__(self) -> None:
        """Compute the slots of inputs, outputs and states, and the last use of each value."""
        self.input_slots = tuple(self.slots[v.name] for v in self.inputs)
        self.output_slots = tuple(self.slots[v.name] for v in self.outputs)
        self.state_slots = tuple((self.slots[name], name) for name in self.states)
        self.size = len(self.slots)
        self.dies = self._last_uses()
        self._steps = tuple((n, n.inputs, n.outputs, dies) for n, dies in zip(self.nodes, self.dies, strict=True))

    def __reduce__(self) -> Any:
        """Support pickle: the fields, from which the rest is computed."""
        return Graph, tuple(getattr(self, f.name) for f in fields(self))

    @classmethod
    def from_onnx(cls, model: ModelProto, folder: Path | None = None) -> Graph:
        """Read a model; deprecated, use `singa_backend.read`.

        Args:
            model: the model.
            folder: the folder of its external data.

        Returns:
            The graph.

        Raises:
            InvalidModel: the model violates ONNX's rules.
            UnsupportedModel: something in the model is not implemented.
            ResourceExhausted: a limit was reached.
        """
        warnings.warn("Graph.from_onnx is deprecated; use singa_backend.read", DeprecationWarning, stacklevel=2)
        return cls._read(model, folder)

    def _last_uses(self) -> tuple[tuple[int, ...], ...]:
        """For each node, the slots whose values are not used after it."""
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

    def walk(self, frame: list[Any], visit: Callable[[Node, list[Any], list[Any]], Sequence[Any]], first: int = 0) -> None:
        """Visit every node in order.

        Args:
            frame: a list with one element per slot, which holds the inputs, states and captured values; outputs are written to
                it, and each value is removed after its last use.
            visit: called as `visit(node, inputs, frame)`; returns the outputs of the node.
            first: the number of the node with which to begin.
        """
        for node, reads, writes, dies in self._steps[first:]:
            outputs = visit(node, [None if s < 0 else frame[s] for s in reads], frame)
            for slot, value in zip(writes, outputs):  # noqa: B905 (a body may return more; `strict` takes time at every node)
                if slot >= 0:
                    frame[slot] = value
            for slot in dies:
                frame[slot] = None

    def select(self, nodes: Sequence[Node], outputs: Sequence[str]) -> Graph:
        """Return this graph with a part of its nodes and other outputs.

        Args:
            nodes: the nodes to keep, in order.
            outputs: the names of the values to return.

        Returns:
            A graph that shares everything else.
        """
        declared = {v.name: v for v in (*self.inputs, *self.optional_inputs, *self.outputs)}
        chosen = tuple(declared.get(name, Value(name)) for name in outputs)
        return replace(self, nodes=tuple(nodes), outputs=chosen)

    def with_inputs(self, names: Sequence[str]) -> Graph:
        """Return this graph with initializers as required inputs, after the others.

        Args:
            names: the names of the initializers.

        Returns:
            A graph that shares everything else.
        """
        declared = {v.name: v for v in self.optional_inputs}
        added = [declared.get(n) or Value(n, "tensor", self.states[n].dtype, self.states[n].shape) for n in names]
        return replace(
            self,
            inputs=(*self.inputs, *added),
            optional_inputs=tuple(v for v in self.optional_inputs if v.name not in names),
            states={n: a for n, a in self.states.items() if n not in names},
        )

    def with_weights(self) -> Graph:
        """Return a graph whose weights are initializers: some exporters write weights as Constant nodes.

        A scalar constant (the bound of a Clip), and one that is read on the host (the scales of a Resize), remains a node.

        Returns:
            This graph if any initializer is of floats, otherwise one whose float constants are initializers.
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
        """Iterate over every node, those of subgraphs and functions included (each function body once).

        Yields:
            The nodes.
        """
        seen: set[int] = set()
        pending = [self]
        while pending:
            graph = pending.pop()
            if id(graph) not in seen:
                seen.add(id(graph))
                yield from graph.nodes
                pending += [g for node in graph.nodes for g in node.graphs]


def runnable_order(needs: Sequence[set[int]]) -> list[int]:
    """A stable order of nodes in which each follows those that it needs; nodes in or after a cycle are omitted."""
    if all(max(need, default=-1) < i for i, need in enumerate(needs)):
        return list(range(len(needs)))
    sorter = TopologicalSorter(dict(enumerate(needs)))
    with suppress(CycleError):  # the nodes before a cycle are still sorted
        sorter.prepare()
    ready = sorted(sorter.get_ready())  # sorted, so it is a heap
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
    return order
