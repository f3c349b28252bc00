"""A graph as it runs: its nodes in order over numbered values, which are released after their last use.

The visitor of a walk computes, records, compares or counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .graph import ABSENT, Graph, Node


class RunOrder:
    """The nodes of a graph in the order in which they run.

    Attributes:
        nodes: the nodes, or others that compute the same over the same numbers.
        input_slots: the number of each input.
        output_slots: the number of each output.
        state_slots: the number and the name of each initializer.
        size: the number of values.
        dies: for each node, the values that are not used after it.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node] | None = None) -> None:
        self._graph = graph.ref
        self.size: int = self._number() if nodes is None else run_order(graph).size
        self.nodes = graph.nodes if nodes is None else tuple(nodes)
        self.input_slots = tuple(v.slot for v in graph.inputs)
        self.output_slots = tuple(v.slot for v in graph.outputs)
        self.state_slots = tuple((v.slot, name) for name, v in graph.initializers.items())
        for node in self.nodes:
            node.input_slots = tuple([ABSENT if v is None else v.slot for v in node.inputs])
            node.output_slots = tuple([ABSENT if v is None else v.slot for v in node.outputs])
        self.dies = self._last_uses()
        self._steps = tuple((n, n.input_slots, n.output_slots, dies) for n, dies in zip(self.nodes, self.dies, strict=True))

    @property
    def graph(self) -> Graph:
        """The graph, which must exist: it keeps its run order."""
        graph = self._graph()
        assert graph is not None
        return graph

    def _number(self) -> int:
        """Number the values of the graph; return how many there are."""
        graph, size = self.graph, 0
        for value in (*graph.initializers.values(), *graph.inputs, *graph.captured):
            value.slot, size = size, size + 1
        for node in graph:
            for o in node.outputs:
                if o is not None:
                    o.slot, size = size, size + 1
        return size

    def _last_uses(self) -> tuple[tuple[int, ...], ...]:
        last: dict[int, int] = {}
        for i, node in enumerate(self.nodes):
            for slot in (*node.input_slots, *node.output_slots, *(v.slot for v in node.captures.values())):
                last[slot] = i
        last.pop(ABSENT, None)
        for slot in self.output_slots:
            last.pop(slot, None)
        dies: list[list[int]] = [[] for _ in self.nodes]
        for slot, i in last.items():
            dies[i].append(slot)
        return tuple(map(tuple, dies))

    def walk(self, frame: list[Any], visit: Callable[[Node, list[Any], list[Any]], Sequence[Any]], first: int = 0) -> None:
        """Visit every node in order.

        Args:
            frame: a list with one element per value, which holds the inputs, states and captured values; outputs are written to
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


def run_order(graph: Graph) -> RunOrder:
    """The run order of a graph, which does not change from then on."""
    found: RunOrder | None = graph.run_order
    if found is None:
        found = graph.run_order = RunOrder(graph)
    return found
