"""Where gradients can flow in a graph, by the declarations of its operators, without running it.

`trainable_report` promises gradients by it, and the rules of If, Loop and Scan compute those that it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import dtypes
from ..errors import Problem
from ..interpreters.base import LEAST_OPSET, Subgraph
from ..ir.graph import Graph, Node, Value
from ..ir.reader import resolve
from ..proto.schemas import DOMAINS, schemas
from .support import DIFFERENTIABLE, MISSING, gradient_hint, gradient_support, unwritable

Key = tuple[int, Value]
"""A value: its scope, and its slot in that scope."""

CODES = {"missing": "SX830", "unwritable": "SX831", "no gradient": "SX832", "not asked": "SX833"}
"""Codes of problems: training raises for the first two; for the others the gradient ends."""
SHOWN = 20
"""Maximum number of nodes that the reason for one parameter names."""
_SCOPES = 100_000
_QUANTIZED = (
    dtypes.SUB_BYTE_INTS
    | dtypes.FLOAT8
    | dtypes.FLOAT6
    | dtypes.FLOAT4
    | {np.dtype(t) for t in (np.int8, np.uint8, np.int16, np.uint16)}
)
_QUANTIZED_TYPES = {f"tensor({dtypes.onnx_name(d)})" for d in _QUANTIZED}
_SIZES = ("Shape", "Size")
"""Operators whose outputs do not depend on the values of their inputs: there is nothing to differentiate."""


@dataclass
class Stop:
    """A node at which a value's gradient ends."""

    key: Key
    outputs: set[Key]
    problem: Problem


class Flow:
    """The dependencies between all values of a model, including those of subgraphs and of each call of a function.

    Attributes:
        edges: the dependencies along which gradients flow.
        needs: all dependencies.
        types: the dtypes that are known.
        stops: the nodes at which gradients end.
        roundings: the nodes that round floats to integers or floats of at most 16 bits, which quantized models compute with.
    """

    def __init__(self, graph: Graph) -> None:
        self.opset = max(LEAST_OPSET, graph.opsets.get("", LEAST_OPSET))
        self.edges: dict[Key, set[Key]] = {}
        self.needs: dict[Key, set[Key]] = {}
        self.types: dict[Key, np.dtype[Any]] = {}
        self.stops: list[Stop] = []
        self.roundings: list[Stop] = []
        self._scopes = 0
        self._known: dict[int, int] = {}
        self._enter(graph, "")

    def floats(self, key: Key) -> bool:
        """Whether a value may be float."""
        dtype = self.types.get(key)
        return dtype is None or dtypes.is_float(dtype)

    def after(self, keys: set[Key]) -> set[Key]:
        """The values whose gradients flow back to these values."""
        return _closure(keys, self.edges)

    def before(self, keys: set[Key]) -> set[Key]:
        """The values that these values depend on."""
        return _closure(keys, self.needs)

    def reaching(self, keys: set[Key]) -> set[Key]:
        """The values to which the gradients of these values flow."""
        return _closure(keys, self._sources)

    def stops_after(self, stops: Sequence[Stop]) -> dict[Key, list[Stop]]:
        """For each value, the first of these stops, in order, at which a part of its gradient ends: one more than are shown."""
        found: dict[Key, list[Stop]] = {}
        for stop in stops:
            pending = [stop.key]
            while pending:
                key = pending.pop()
                here = found.setdefault(key, [])
                if len(here) <= SHOWN and (not here or here[-1] is not stop):  # a full list was already passed on to all sources
                    here.append(stop)
                    pending += self._sources.get(key, ())
        return found

    def matters(self, stop: Stop, reaching: set[Key]) -> bool:
        """Whether a gradient arrives at a node where it ends; not at the arithmetic of shapes, indices and masks.

        Args:
            stop: the node.
            reaching: the values to which gradients flow from the outputs.
        """
        if stop.problem.operator in _SIZES:
            return False
        seen, pending = set(stop.outputs), list(stop.outputs)
        while pending:
            key = pending.pop()
            if self.floats(key):
                if key in reaching:
                    return True
                continue
            quantized = self.types.get(key) in _QUANTIZED
            for target in self._targets.get(key, ()):
                indexed = not quantized and self.floats(target) and any(self.floats(source) for source in self.needs[target])
                if target not in seen and not indexed:  # with a float input, wide integers only choose among its values
                    seen.add(target)
                    pending.append(target)
        return False

    @cached_property
    def _targets(self) -> dict[Key, list[Key]]:
        """For each value, those that depend on it directly."""
        targets: dict[Key, list[Key]] = {}
        for target, sources in self.needs.items():
            for source in sources:
                targets.setdefault(source, []).append(target)
        return targets

    @cached_property
    def _sources(self) -> dict[Key, set[Key]]:
        """For each value, those whose gradients it is a part of."""
        sources: dict[Key, set[Key]] = {}
        for source, targets in self.edges.items():
            for target in targets:
                sources.setdefault(target, set()).add(source)
        return sources

    def _enter(self, graph: Graph, where: str) -> int:
        """Create a scope for a graph, one for each call; beyond a maximum, calls of one function share a scope."""
        if self._scopes >= _SCOPES and id(graph) in self._known:
            return self._known[id(graph)]
        scope = self._known[id(graph)] = self._scopes
        self._scopes += 1
        for value in graph.inputs:
            if value.declared is not None and value.declared.dtype is not None:
                self.types[scope, value] = value.declared.dtype
        for value in graph.initializers.values():
            self.types[scope, value] = value.constant.dtype
        for node in graph.nodes:
            self._node(scope, node, where)
        return scope

    def link(self, source: Key, target: Key, flows: bool = True) -> None:
        """Record that a value depends on another one; `flows`: whether gradients flow along the dependency."""
        self.needs.setdefault(target, set()).add(source)
        if flows and self.floats(source) and self.floats(target):
            self.edges.setdefault(source, set()).add(target)

    def _node(self, scope: int, node: Node, where: str) -> None:
        ins = [None if v is None else (scope, v) for v in node.inputs]
        outs = [None if v is None else (scope, v) for v in node.outputs]
        self._typed(node, ins, outs)
        title = f"{where}{node.name or node.op_type}"
        if node.function is not None:
            self._within(
                scope,
                node,
                node.function,
                title,
                list(zip(ins, node.function.inputs, strict=False)),
                list(zip(node.function.outputs, outs, strict=False)),
            )
            return
        captured = [(scope, v) for v in node.captures.values()]
        ends = {o for o in outs if o is not None}
        problem = self._problem(node, title) or self._whole(node, title, outs)
        through = (
            problem is None
            and any(isinstance(g, Graph) for g in node.attributes.values())
            and self._graphs(scope, node, title, ins, outs)
        )
        for i, key in enumerate(ins):
            if key is None:
                continue
            here = problem or self._refused(node, title, i)
            if here is not None and self.floats(key):
                self.stops.append(Stop(key, ends, here))
            for o in ends:
                self.link(key, o, here is None and not through)
            if here is None or here is problem:
                self._rounds(node, title, key, ends)
        for key in captured:
            if problem is not None and self.floats(key):
                self.stops.append(Stop(key, ends, problem))
            for o in ends:
                self.link(key, o, problem is None and not through)

    def _rounds(self, node: Node, title: str, key: Key, ends: set[Key]) -> None:
        """Note a node that rounds a float."""
        if node.operator is None or node.forward_graph is not None or not self.floats(key):
            return
        first = schemas[node.domain, node.op_type][node.operator.version].outputs[:1]
        always = any(set(o.types) <= _QUANTIZED_TYPES for o in first)  # the dtype of one may not be known
        narrow = {o for o in ends if self.types.get(o) in _QUANTIZED or (always and o not in self.types)}
        if narrow:
            self.roundings.append(
                Stop(key, narrow, Problem(f"{node.op_type} rounds it", CODES["no gradient"], title, node.op_type))
            )

    def _problem(self, node: Node, title: str) -> Problem | None:
        """Why no gradient passes this node, for any input."""
        if node.operator is None or node.forward_graph is not None:
            return None
        domain, name, version = node.domain, node.op_type, node.operator.version
        found = gradient_support(domain, name, version)
        full = f"{name}-{version}" if domain == "" else f"{DOMAINS.get(domain, domain)}:{name}-{version}"
        if found.kind == MISSING:
            text, code = f"{full} has no gradient: {found.why}", CODES["missing"]
        elif found.kind != DIFFERENTIABLE:
            text, code = f"{full} has no gradient ({found.kind}): {found.why}", CODES["no gradient"]
        else:
            old = unwritable(node.operator.declaration, version, self.opset)
            if not old:
                return None
            text, code = f"the gradient must be written in opset {self.opset}: {old}", CODES["unwritable"]
        return Problem(text, code, title, name, node.opset, version, gradient_hint(node.operator.declaration))

    def _whole(self, node: Node, title: str, outs: Sequence[Key | None]) -> Problem | None:
        """The problem of a node that could return floats but does not here: a Cast to integers."""
        if node.operator is None or not outs or any(self.floats(o) for o in outs if o is not None):
            return None
        names = ", ".join(dict.fromkeys(dtypes.onnx_name(self.types[o]) for o in outs if o is not None))
        text = f"{node.op_type}-{node.operator.version} has no gradient here: it returns {names}"
        return Problem(text, CODES["no gradient"], title, node.op_type, node.opset, node.operator.version)

    def _refused(self, node: Node, title: str, position: int) -> Problem | None:
        """Why one input of a node with a gradient has none."""
        if node.operator is None or node.forward_graph is not None:
            return None
        domain, name, version = node.domain, node.op_type, node.operator.version
        formal = schemas[domain, name][version].inputs
        parameter = formal[min(position, len(formal) - 1)].name
        if parameter not in node.operator.declaration.settings:
            return None
        text = f"the input {parameter!r} of {name}-{version} has no gradient"
        return Problem(text, CODES["not asked"], title, name, node.opset, version)

    def _typed(self, node: Node, ins: Sequence[Key | None], outs: Sequence[Key | None]) -> None:
        """Record the dtypes of a node's outputs, as far as its inputs and attributes determine them."""
        if node.operator is None or node.forward_graph is not None:
            return
        given = [None if k is None else self.types.get(k) for k in ins]
        to = node.attributes.get("to", node.attributes.get("dtype")) if node.op_type != "DequantizeLinear" else None
        for i, key in enumerate(outs):
            bound = (
                node.operator._types.bound[min(i, len(node.operator._types.bound) - 1)] if node.operator._types.bound else None
            )
            dtype = next((given[j] for j in bound if j < len(given) and given[j]), None) if isinstance(bound, tuple) else bound
            if dtype is None and isinstance(to, int) and to and i == 0:
                dtype = dtypes.numpy_dtype(to)
            if key is not None and dtype is not None:
                self.types[key] = dtype

    def _graphs(self, scope: int, node: Node, title: str, ins: list[Key | None], outs: list[Key | None]) -> bool:
        """Connect the values of a node with those of its subgraphs; False for an unknown operator."""
        inner = [g for g in node.attributes.values() if isinstance(g, Graph)]
        if node.op_type == "If":
            for g in inner:
                self._within(scope, node, g, title, [], list(zip(g.outputs, outs, strict=False)))
            return True
        body = inner[0]
        a, b = body.inputs, body.outputs
        if node.op_type == "Loop":
            n = len(ins) - 2
            states, back = list(zip(ins[2:], a[2:], strict=False)), list(zip(b[1 : 1 + n], a[2:], strict=False))
            self._within(scope, node, body, title, states, list(zip(b[1:], outs, strict=False)), back)
        elif node.op_type == "Scan":
            first = 1 if node.version == 8 else 0
            n = len(ins) - first - int(node.attributes["num_scan_inputs"])
            fed = list(zip(ins[first:], a, strict=False))
            self._within(scope, node, body, title, fed, list(zip(b, outs, strict=False)), list(zip(b[:n], a[:n], strict=False)))
        elif node.op_type == "SequenceMap":
            self._within(scope, node, body, title, list(zip(ins, a, strict=False)), list(zip(b, outs, strict=False)))
        else:
            return False
        return True

    def _within(
        self,
        scope: int,
        node: Node,
        graph: Graph,
        title: str,
        fed: Sequence[tuple[Key | None, Value]],  # (outer value, input)
        made: Sequence[tuple[Value, Key | None]],  # (output, outer value)
        back: Sequence[tuple[Value, Value]] = (),  # (output, input) of each state of a loop
    ) -> None:
        """Create the scope of a node's subgraph, and connect it to the outer values."""
        known = {value: self.types.get(key) for key, value in fed if key is not None}
        inner = self._enter_known(node, graph, f"{title}/", known, scope)
        for key, slot in fed:
            if key is not None:
                self.link(key, (inner, slot))
        for value in graph.captured:
            self.link((scope, node.captures[value]), (inner, value))
        for source, target in back:
            self.link((inner, source), (inner, target))
        for slot, key in made:
            if key is not None:
                if (inner, slot) in self.types:
                    self.types.setdefault(key, self.types[inner, slot])
                self.link((inner, slot), key)

    def _enter_known(self, node: Node, graph: Graph, where: str, known: dict[Value, np.dtype[Any] | None], scope: int) -> int:
        """Create the scope of a subgraph whose inputs have known dtypes."""
        following = self._scopes  # the number of the scope that `_enter` creates
        for slot, dtype in known.items():
            if dtype is not None:
                self.types[following, slot] = dtype
        for value in graph.captured:
            if (scope, node.captures[value]) in self.types:
                self.types[following, value] = self.types[scope, node.captures[value]]
        return self._enter(graph, where)


def _closure(start: set[Key], edges: dict[Key, set[Key]]) -> set[Key]:
    seen, pending = set(start), list(start)
    while pending:
        for key in edges.get(pending.pop(), ()):
            if key not in seen:
                seen.add(key)
                pending.append(key)
    return seen


def live_inputs(body: Subgraph, wanted: Sequence[bool], back: Sequence[tuple[int, int]] = ()) -> set[int]:
    """The inputs and captured values of a subgraph, by index, from which gradients of its outputs flow.

    Args:
        body: the subgraph.
        wanted: for each output, whether it has a gradient.
        back: for each state, the index of the output that the next iteration reads, and that of the input.
    """
    graph = resolve(body.graph)
    flow = Flow(graph)
    for source, target in back:
        flow.link((0, graph.outputs[source]), (0, graph.inputs[target]))
    live = flow.reaching({(0, value) for value, w in zip(graph.outputs, wanted, strict=False) if w})
    return {i for i, value in enumerate((*graph.inputs, *graph.captured)) if (0, value) in live}
