"""A region: the calls of a graph in a flat list, functions inlined, that passes rewrite and the planner compiles.

Values are numbered.  Unlike the graph, a region may be edited: a fused operator is a call of a standard ONNX operator at its
newest version, whatever opset the model has, so the region still runs by the definitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from ..devices.namespaces import numpy
from ..ir.declaration import REQUIRED, declarations
from ..ir.graph import ABSENT, DEFERRED, Graph, Node
from ..ir.versioned import VersionedOperator
from ..kernels.table import GRADIENT, TRAINING
from ..kernels.values import LazyConstant

MOST = 200_000
"""The maximum number of calls of a region: a model whose functions call functions may have more, and runs node by node."""


class TooManyCalls(Exception):
    """The functions of a model have more calls than a region holds."""


@dataclass(eq=False)
class RegionCall:
    """One call of an operator.

    Attributes:
        node: the operator, its version and attributes; its slots refer to the graph that it was read from.
        inputs: the ids of the inputs; ABSENT (-1) for an omitted one.
        outputs: the ids of the outputs; ABSENT (-1) for an omitted one.
        scope: the id of each slot of the graph that contains the node, which its subgraphs refer to.
        origins: the nodes that this call replaces, for reports.
        operator: the operator of ONNX's domain in its present meaning; "" for any other call.
        has_kernel_only: whether only kernels compute it, and there is no definition: a gradient, or a call in training form.
        gradient: for a gradient that one kernel computes, and for its forward call, its place in the graph's `gradient_calls`.
    """

    node: Node
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: Sequence[int] = ()
    origins: tuple[Node, ...] = ()
    operator: str = field(init=False)
    has_kernel_only: bool = field(init=False)
    gradient: int = field(default=-1, init=False)

    def __post_init__(self) -> None:
        known = self.node.operator
        self.operator = self.node.op_type if not self.node.domain and (known is None or known.is_modern) else ""
        self.has_kernel_only = self.node.domain in (GRADIENT, TRAINING, DEFERRED)

    def is_(self, *names: str) -> bool:
        """Whether it calls one of these operators of ONNX's domain."""
        return self.node.domain == "" and self.node.op_type in names

    @property
    def name(self) -> str:
        """The operator type."""
        return self.node.op_type

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes, defaults included."""
        return self.node.attributes

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The results for these inputs by the definition, on the host; only for a call without subgraphs."""
        operator = self.node.operator
        assert operator is not None
        return operator.run(numpy, values, self.attributes, [o != ABSENT for o in self.outputs])

    @property
    def reads(self) -> tuple[int, ...]:
        """The ids of all values that it reads: its inputs, and those that its subgraphs capture."""
        found = (*self.inputs, *(self.scope[outer] for outer in self._captured)) if self._captured else self.inputs
        return tuple([i for i in found if i != ABSENT])

    @cached_property
    def _captured(self) -> tuple[int, ...]:
        return tuple(outer for g in self.node.graphs for outer, _ in g.captured)


@dataclass(eq=False)
class Region:
    """Calls in an executable order.

    Attributes:
        calls: the calls.
        inputs: the ids of the inputs.
        outputs: the ids of the outputs, in order; an id may occur twice.
        constants: the values of initializers, of Constant nodes and of what passes add, by id; a large one may be LazyConstant.
        names: the name of each value in its graph, by id.
        size: the number of ids.
        inlined: the number of nodes and functions that were read into it.
        ids: the id of each value of the graph by its name, if the graph is a recorded step.
        replaced: the id of the input that a result replaces, by the id of the result.
        last: the index of the first call that only makes such results; those that follow it do the same.
        only_sent: the values that other processes receive, and on whose sizes nothing in the region depends.
    """

    calls: list[RegionCall] = field(default_factory=list)
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    constants: dict[int, Any] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    size: int = 0
    inlined: int = 0
    ids: dict[str, int] = field(default_factory=dict)
    replaced: dict[int, int] = field(default_factory=dict)
    last: int | None = None
    only_sent: frozenset[int] = frozenset()

    def new(self, name: str = "") -> int:
        """A new id."""
        self.size += 1
        if name:
            self.names[self.size - 1] = name
        return self.size - 1

    def constant(self, value: np.ndarray | LazyConstant, name: str = "") -> int:
        """The id of a new constant."""
        made = self.new(name)
        self.constants[made] = value
        return made

    def remove_dead(self) -> int:
        """Remove calls whose results are not used; return their number."""
        used, kept = set(self.outputs), []
        for call in reversed(self.calls):
            if used & set(call.outputs):
                used.update(call.reads)
                kept.append(call)
        count = len(self.calls) - len(kept)
        self.calls = kept[::-1]
        return count


@cache
def versioned(domain: str, op_type: str, version: int | None = None) -> VersionedOperator:
    """An operator at a version; the newest by default."""
    known = declarations[domain, op_type]
    version = max(known) if version is None else version
    return VersionedOperator(known[version], version)


def call_of(
    op_type: str,
    inputs: Sequence[int],
    outputs: Sequence[int],
    origins: Sequence[RegionCall],
    domain: str = "",
    **attributes: Any,
) -> RegionCall:
    """A call of an operator's newest version in place of others.

    Args:
        op_type: the operator.
        inputs: the ids of the inputs.
        outputs: the ids of the outputs.
        origins: the calls that it replaces; errors name the last of them.
        domain: of the operator.
        **attributes: those that differ from the defaults.
    """
    operator = versioned(domain, op_type)
    known = {n: (None if v is REQUIRED else v) for n, v in operator.declaration.attributes.items()}
    nodes = tuple(n for call in origins for n in (call.origins or (call.node,)))
    last = origins[-1].node
    node = Node(
        name=last.name,
        op_type=op_type,
        domain=domain,
        opset=last.opset,
        inputs=tuple(range(len(inputs))),
        outputs=tuple(ABSENT if o == ABSENT else len(inputs) + i for i, o in enumerate(outputs)),
        input_names=("",) * len(inputs),
        output_names=("",) * len(outputs),
        attributes={**known, **attributes},
        given=frozenset(attributes),
        operator=operator,
    )
    return RegionCall(node, tuple(inputs), tuple(outputs), (), nodes)


def region_of(graph: Graph, states: dict[str, Any] | None = None, captured: dict[int, Any] | None = None) -> Region:
    """The calls of a graph, with the bodies of functions in place of their calls.

    The values that a subgraph captures are inputs of the region, after those of the graph, or constants.

    Args:
        graph: the graph.
        states: values that replace its initializers, by name.
        captured: the captured values that are constants, by the slot in the enclosing graph.
    """
    region = Region()
    ids = [ABSENT] * graph.size
    for value, slot in zip(graph.inputs, graph.input_slots, strict=True):
        ids[slot] = region.new(value.name)
    region.inputs = tuple(ids[s] for s in graph.input_slots)
    for outer, slot in graph.captured:
        if captured and outer in captured:
            ids[slot] = region.constant(captured[outer])
        else:
            ids[slot] = region.new()
            region.inputs += (ids[slot],)
    inline(region, graph, ids, states or {})
    region.outputs = tuple(ids[s] for s in graph.output_slots)
    if graph.gradient_calls:
        region.ids = {name: ids[slot] for name, slot in graph.slots.items()}
    return region


def branches_fit(call: RegionCall) -> bool:
    """Whether both branches of an If have the same number of outputs, as many as the If; its definition refuses others."""
    counts = {len(call.attributes[name].outputs) for name in ("then_branch", "else_branch")}
    return len(counts) == 1 and counts.pop() >= len(call.outputs)


def branch_of(region: Region, graph: Graph, scope: Sequence[int]) -> tuple[int, ...]:
    """Append the calls of a subgraph without inputs, a branch of an If, to a region; return the ids of its outputs."""
    ids = [ABSENT] * graph.size
    for outer, inner in graph.captured:
        ids[inner] = scope[outer]
    inline(region, graph, ids, {})
    return tuple(ids[s] for s in graph.output_slots)


def inline(region: Region, graph: Graph, ids: list[int], states: Mapping[str, Any], origins: tuple[Node, ...] = ()) -> None:
    """Append the calls of a graph, and of its functions, to a region.

    Args:
        region: the region.
        graph: the graph.
        ids: the id of each slot, which is completed.
        states: values that replace its initializers, by name.
        origins: the nodes of the call whose body the graph is, for reports; none for a graph or a function of the model.
    """
    region.inlined += 1 + len(graph.nodes)
    if region.inlined > MOST:
        raise TooManyCalls
    for slot, name in graph.state_slots:
        ids[slot] = region.constant(states.get(name, graph.states[name]), name)
    for node in graph.nodes:
        inputs = tuple(ABSENT if s < 0 else ids[s] for s in node.inputs)
        function = node.function
        if function is not None:
            inner = [ABSENT] * function.size
            for slot, i in zip(function.input_slots, inputs, strict=False):
                inner[slot] = i
            inline(region, function, inner, {}, origins)
            for slot, made in zip(node.outputs, function.output_slots, strict=False):
                if slot >= 0:
                    ids[slot] = inner[made]
            continue
        for slot, name in zip(node.outputs, node.output_names, strict=True):
            if slot >= 0:
                ids[slot] = region.new(name)
        outputs = tuple(ABSENT if s < 0 else ids[s] for s in node.outputs)
        value = node.attributes.get("value") if (node.domain, node.op_type) == ("", "Constant") else None
        if isinstance(value, np.ndarray):
            region.constants[outputs[0]] = value
        else:
            region.calls.append(RegionCall(node, inputs, outputs, ids, origins))
