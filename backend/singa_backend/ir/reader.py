"""Read a ModelProto as a Graph and check it against ONNX's rules, before anything runs.

Problems are collected and raised together: InvalidModel if any violates ONNX's rules, otherwise UnsupportedModel.
"""

from __future__ import annotations

import warnings
from collections import ChainMap, Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from string import digits
from typing import Any, TypeAlias

import numpy as np
from onnx import IR_VERSION, AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, ValueInfoProto, defs

from ..errors import InvalidModel, Problem, ResourceExhausted, SonnxError, UnsupportedModel, did_you_mean
from ..limits import check_nesting, current, ensured
from ..machine import without_collector
from ..proto import tensor_data
from ..proto.messages import TRAINING_GRADIENT, reads
from ..proto.schemas import (
    ASSUMED,
    DOMAINS,
    LAX,
    MICROSOFT,
    is_custom,
    is_private,
    lax,
    load_domain,
    newest,
    plain_domain,
    public_domain,
    schema_version,
    schemas,
)
from ..proto.values import Value as Declared
from . import other_domains
from .custom import CustomOperator, by_public_name, definition_lines
from .declaration import REQUIRED, Declaration, declarations, undeclared
from .gradient import GRADIENT, Gradient
from .graph import Graph, Node, Value
from .order import runnable_order
from .signature import Signature, signature_of
from .versioned import VersionedOperator
from .wellformed import attribute_problem, check_messages, kind_of, subgraph_problems, value_of
from .writer import FORM

PARAMETERS = "sonnx.parameters"
"""The key of the metadata that lists, as JSON, initializers that are parameters although their use does not show it."""

PAIR = "sonnx.next."
"""The prefix of the keys in the metadata of a training step that list its updated values; the rest is the name of an input."""

MAX_PROBLEMS = 1000
"""Reading stops after this many problems, so that a file with many takes bounded time."""

Bindings: TypeAlias = dict[str, AttributeProto | None]
"""The attributes of one call of a function; None for an omitted one without default."""

_Operators: TypeAlias = dict[tuple[str, str], dict[int, str]]
"""(domain, name) -> version -> the domain of the declaration, for operators that only this model has."""

_OPTIONAL = defs.OpSchema.FormalParameterOption.Optional


def _called(schema: defs.OpSchema) -> str:
    """An operator at a version, for messages: reading both from a schema takes microseconds."""
    return f"{schema.name}-{schema.since_version}"


def read(
    model: ModelProto,
    folder: Path | None = None,
    within: tensor_data.ModelFile | None = None,
    maps: tensor_data.Maps | None = None,
    operators: Sequence[CustomOperator] = (),
) -> Graph:
    """Read a model and check it against ONNX's rules.

    Args:
        model: the model.
        folder: the folder of its external data; None if it has none.
        within: the model's file, if data were left in it.
        maps: receives the files of external data; None if the caller does not need them.
        operators: operators that only this model has; they precede registered ones.

    Returns:
        The graph, whose operators are resolved to their schema versions.

    Raises:
        InvalidModel: the model violates ONNX's rules; `problems` lists all violations.
        UnsupportedModel: the model is valid; `problems` lists everything in it that is not implemented.
        ResourceExhausted: a limit of the current call was reached.
    """
    load_domain("")
    own = by_public_name(operators)
    with ensured(), without_collector():
        return _read(model, folder, within, maps or tensor_data.Maps(), own)


def resolve(graph: Graph) -> Graph:
    """Resolve the operators of a graph that was built, so that it runs; raises as `read` does.

    Args:
        graph: the graph, whose attributes are messages and bodies.  Afterwards they are keyword arguments, and `given` of each
            node has the messages.

    Returns:
        The graph.
    """
    load_domain("")
    with ensured(), without_collector():
        scope = _detached(graph.opsets)
        scope.resolve(graph)
        scope.reader.finish()
        check_nesting(_height(graph, {}))
        graph.warnings = tuple(scope.reader.warnings)
    return graph


def resolved_call(node: Node, opsets: Mapping[str, int]) -> Node:
    """A copy of a call whose attributes are messages, resolved without the graph around it; raises as `read` does.

    Args:
        node: the call, which has no bodies.
        opsets: the opset of each domain.
    """
    scope, copy = _detached(opsets), node.copy(node.inputs, node.outputs, ())
    scope.resolve_node(copy)
    scope.reader.finish()
    copy.outputs = _without_omitted(copy.outputs, copy.operator.schema) if copy.operator is not None else copy.outputs
    return copy


def _detached(opsets: Mapping[str, int]) -> _Scope:
    """A scope for nodes that no message has."""
    reader = _Reader(ModelProto(ir_version=IR_VERSION), None, None, tensor_data.Maps(), {})
    reader.opsets = dict(opsets)
    return _Scope(reader, reader.opsets, None, None)


def _read(
    model: ModelProto,
    folder: Path | None,
    within: tensor_data.ModelFile | None,
    maps: tensor_data.Maps,
    own: _Operators,
) -> Graph:
    check_messages(model)
    try:
        reader = _Reader(model, folder, within, maps, own)
        graph = _Scope(reader, reader.opsets, None, None).read(model.graph)
        reader.finish()
        check_nesting(_height(graph, {}))
        graph.warnings, graph.marked = tuple(reader.warnings), _marked(model)
        graph.is_step = any(entry.key.startswith(PAIR) for entry in model.metadata_props)
        return graph
    except RecursionError as error:
        raise ResourceExhausted("the model nests too deeply for Python's stack", code="SX602") from error


def _marked(model: ModelProto) -> frozenset[str]:
    """The initializers that the metadata list as parameters; none if the entry has another form."""
    for entry in model.metadata_props:
        if entry.key == PARAMETERS:
            from ..io.documents import parse_document  # few models have the entry

            with suppress(SonnxError):
                names = parse_document(
                    entry.value, PARAMETERS, "SX107", most=len(entry.value), values=len(entry.value)
                ).sequence()
                return frozenset(n for n in names if isinstance(n, str))
    return frozenset()


def _height(graph: Graph, known: dict[int, int]) -> int:
    """The depth to which graphs and functions nest; a body that was read at one depth may be called at another."""
    if id(graph) not in known:
        known[id(graph)] = max((1 + _height(g, known) for node in graph.nodes for g in node.graphs), default=0)
    return known[id(graph)]


class _Reader:
    """The state that the scopes of one model share: its functions, its folder, the problems found so far."""

    def __init__(
        self,
        model: ModelProto,
        folder: Path | None,
        within: tensor_data.ModelFile | None,
        maps: tensor_data.Maps,
        own: _Operators,
    ) -> None:
        self.own = own
        self.versions: dict[tuple[str, str, int], int | None] = {}
        self._operators: dict[tuple[int, int], VersionedOperator] = {}
        self.explained: set[str] = set()  # domains that the hint of a problem explains
        self.tensor = partial(tensor_data.tensor, folder=folder, maps=maps, within=within)
        self.sparse = partial(tensor_data.sparse, folder=folder, maps=maps)
        self.functions: dict[tuple[str, str, str], FunctionProto] = {}
        self.bodies: dict[tuple[Any, ...], Graph] = {}
        self.captures: dict[Graph, list[Value]] = {}  # for each body, the outer values that its captured ones stand for
        self.calling: list[tuple[str, str, str]] = []
        self.depth = 0
        self.invalid: list[Problem] = []
        self.unsupported: list[Problem] = []
        self.warnings: list[str] = []
        self.opsets = _opsets(model.opset_import, self) or {"": 1}
        self.ir_version = model.ir_version
        for f in model.functions:
            key = (plain_domain(f.domain), f.name, f.overload)
            if key in self.functions:
                self.wrong("SX103", f"function {f.domain}.{f.name} is defined more than once")
            self._check_function(f)
            self.functions[key] = f

    def _check_function(self, proto: FunctionProto) -> None:
        """Check what a function declares, which is read only if a node calls it."""
        if not proto.name:
            self.wrong("SX103", "a function must have a name")
        declared = (*proto.attribute, *(a.name for a in proto.attribute_proto))
        for what, names in (("input", proto.input), ("output", proto.output), ("attribute", declared)):
            if not all(names):
                self.wrong("SX101", f"each {what} of function {proto.name!r} must have a name")
            if what != "output" and len(set(names)) < len(names):
                twice = next(n for n, k in Counter(names).items() if k > 1)
                self.wrong("SX102", f"{what} {twice!r} of function {proto.name!r} is declared more than once")

    def assumed(self, domain: str) -> int:
        """The opset of a domain that the model calls without an import, with a warning; 0 if there must be an import."""
        opset = ASSUMED.get(domain, 0)
        if opset:
            load_domain(domain)
            self.opsets[domain] = opset
            self.warnings.append(f"the model does not import {domain}, which its nodes call: version {opset} is assumed")
        return opset

    def operator(self, declaration: Declaration, version: int) -> VersionedOperator:
        """An operator for a node: one that all nodes share, unless it keeps what depends on the attributes of its node."""
        key = id(declaration), version
        found = self._operators.get(key)
        if found is None:
            found = VersionedOperator(declaration, version)
            if "derived" not in declaration.services.values():
                self._operators[key] = found
        return found

    def wrong(self, code: str, message: str, **where: Any) -> None:
        self.invalid.append(Problem(message, code, **where))
        if len(self.invalid) >= MAX_PROBLEMS:
            self.finish()

    def lacks(self, code: str, message: str, **where: Any) -> None:
        self.unsupported.append(Problem(message, code, **where))
        if len(self.unsupported) >= MAX_PROBLEMS:
            self.finish()

    def did_you_mean(self, name: str, known: Iterable[str]) -> str:
        """The end of a message with a suggestion; only for the first problems of a file, to bound the time."""
        if len(self.invalid) + len(self.unsupported) >= 10 or len(name) > 100:
            return ""
        return did_you_mean(name, islice(known, 1000))

    def finish(self) -> None:
        """Raise all problems at once: InvalidModel if any violates ONNX's rules, otherwise UnsupportedModel."""
        problems = [*self.invalid, *self.unsupported]
        if not problems:
            return
        error = InvalidModel if self.invalid else UnsupportedModel
        verdict = "the model is not valid ONNX" if self.invalid else "the model is not supported"
        if all(p.code == "SX105" for p in problems):
            verdict = "the model's external data cannot be read"
        one = problems[0]
        hint = "; ".join(dict.fromkeys(p.hint for p in problems if p.hint))
        if len(problems) > 1:
            raise error(f"{verdict}: {len(problems)} problems", code=one.code, hint=hint, problems=problems)
        raise error(
            f"{verdict}: {one.message}",
            code=one.code,
            hint=hint,
            node=one.node,
            operator=one.operator,
            opset=one.opset,
            version=one.version,
            problems=problems,
        )


def _opsets(imports: Iterable[Any], reader: _Reader) -> dict[str, int]:
    opsets: dict[str, int] = {}
    for entry in imports:
        domain = plain_domain(entry.domain)
        shown = DOMAINS.get(domain, domain)
        last = newest(domain)
        if last and entry.version > last:
            what = f"the opset of {shown} must be at most {last}, the newest of the installed onnx, got {entry.version}"
            reader.lacks("SX203", what)
        if entry.version < 1:
            reader.wrong("SX106", f"the opset of {shown} must be at least 1, got {entry.version}")
        if opsets.get(domain, entry.version) != entry.version:
            reader.wrong("SX106", f"the model must import one opset of {shown}, got {opsets[domain]} and {entry.version}")
        opsets[domain] = int(entry.version)
    return opsets


class _Scope:
    """One graph that is being read: its names, and the enclosing scope."""

    def __init__(self, reader: _Reader, opsets: Mapping[str, int], outer: _Scope | None, bindings: Bindings | None) -> None:
        self.reader = reader
        self.opsets = opsets
        self.outer = outer
        self.bindings = bindings  # of the function call that is being read; None outside functions
        self.protos: Sequence[NodeProto] = ()
        self.makers: dict[str, NodeProto] = {}  # the nodes by the names of their outputs, for Gradients
        self.values: dict[str, Value] = {}
        self.captured: dict[str, Value] = {}  # name -> the value of the outer scope
        self.defined: set[str] = set()
        self.cyclic: set[str] = set()  # outputs of the nodes of a cycle: defined, so that a cycle is reported only once

    # --- names

    def define(self, name: str) -> Value:
        if name in self.defined:
            self.reader.wrong("SX102", f"value {name!r} is defined more than once")
        self.defined.add(name)
        return self._value_of(name)

    def _value_of(self, name: str) -> Value:
        found = self.values.get(name)
        if found is None:
            found = self.values[name] = Value(name)
        return found

    def find(self, name: str) -> Value | None:
        """The value of a name, captured from an outer scope if it is not defined here; None if it is unknown."""
        if name in self.defined or name in self.captured:
            return self.values[name]
        if name in self.cyclic:
            return self._value_of(name)
        outer = self.outer.find(name) if self.outer else None
        if outer is None:
            return None
        self.captured[name] = outer
        return self._value_of(name)

    # --- graphs

    def read(self, proto: GraphProto) -> Graph:
        states = self._states(proto)
        inputs = tuple(self._declared(i) for i in proto.input)
        times = Counter(value.name for value in inputs)
        for value in inputs:
            if value.name not in states:
                self.define(value.name)
            elif times[value.name] > 1:
                self.reader.wrong("SX102", f"input {value.name!r} is declared more than once")
        nodes = self._nodes(proto.node)
        outputs = tuple(self._declared(o) for o in proto.output)
        for value in outputs:
            if self.find(value.name) is None:
                self.reader.wrong("SX101", f"output {value.name!r} of graph {proto.name!r} is not defined")
                self.define(value.name)
        required = tuple(v for v in inputs if v.name not in states)
        optional = tuple(v for v in inputs if v.name in states)
        return self._graph(proto.name, required, outputs, nodes, states, optional)

    def _graph(
        self,
        name: str,
        inputs: tuple[Declared, ...],
        outputs: tuple[Declared, ...],
        nodes: list[Node],
        states: dict[str, np.ndarray],
        optional: tuple[Declared, ...] = (),
    ) -> Graph:
        graph = Graph(name, self.opsets)
        for declared in (*inputs, *optional):
            self._value_of(declared.name).declared = declared
        for value in map(self._value_of, (v.name for v in inputs)):
            graph.add_input(value)
        for n, array in states.items():
            value = self._value_of(n)
            value.constant = array
            graph.add_initializer(value)
        graph.optional_inputs = [self._value_of(v.name) for v in optional]
        for n in self.captured:
            graph.add_captured(self.values[n])
        self.reader.captures[graph] = list(self.captured.values())
        for node in nodes:
            graph.append(node)
        graph.declared_outputs = outputs
        graph.set_outputs(self._value_of(v.name) for v in outputs)
        return graph

    def _declared(self, info: ValueInfoProto) -> Declared:
        if not info.name:
            self.reader.wrong("SX101", "an input or output of a graph has no name")
        try:
            return Declared.from_proto(info)
        except InvalidModel as error:
            self.reader.wrong(error.code, f"{info.name!r}: {error.message}")
            return Declared(info.name)

    def _states(self, proto: GraphProto) -> dict[str, np.ndarray]:
        states: dict[str, np.ndarray] = {}
        dense: list[tuple[Any, Any]] = [(t, self.reader.tensor) for t in proto.initializer]
        for tensor, load in [*dense, *((t, self.reader.sparse) for t in proto.sparse_initializer)]:
            name = _name(tensor)
            if not name:
                self.reader.wrong("SX104", f"an initializer of graph {proto.name!r} has no name")
                continue
            self.define(name)
            try:
                states[name] = self._load(load, tensor)
            except InvalidModel as error:
                self.reader.wrong(error.code, error.message)
                states[name] = np.zeros(0, np.float32)
        return states

    def _load(self, load: Callable[[Any], np.ndarray], proto: Any) -> np.ndarray:
        """A tensor in the file; raises InvalidModel also for a shape that NumPy does not support."""
        try:
            array = load(proto)
            current().keep(array.nbytes)
            return array
        except ResourceExhausted as error:
            error.message = f"tensor {_name(proto)!r}: {error.message}"
            raise
        except (ValueError, OverflowError) as error:
            raise InvalidModel(f"tensor {_name(proto)!r} of shape {list(proto.dims)}: {error}", code="SX104") from None
        except MemoryError as error:
            raise ResourceExhausted(f"tensor {_name(proto)!r} of shape {list(proto.dims)}: {error}", code="SX601") from error

    def _nodes(self, protos: Sequence[NodeProto]) -> list[Node]:
        nodes = []
        self.protos = protos
        for i, proto in self._sorted(protos):
            name = proto.name or f"{proto.op_type}_{i}"
            try:
                current().read_node()
                nodes.append(self._node(proto, name))
            except ResourceExhausted as error:
                raise error.locate(node=name, operator=proto.op_type) from error.__cause__
        return nodes

    def _sorted(self, protos: Sequence[NodeProto]) -> list[tuple[int, NodeProto]]:
        """The nodes with their indices in an executable order: the file's own if it is one, otherwise a stable one."""
        makers = {name: i for i, p in enumerate(protos) for name in p.output if name}
        needs = [{makers[n] for n in reads(p) if n in makers} for p in protos]
        order = runnable_order(needs)
        stuck = sorted({*range(len(protos))} - {*order})
        if stuck:
            names = ", ".join(repr(protos[i].name or f"{protos[i].op_type}_{i}") for i in stuck[:8])
            self.reader.wrong("SX101", f"the graph has a cycle among the nodes {names}")
            self.cyclic.update(n for i in stuck for n in protos[i].output if n)
        return [(i, protos[i]) for i in (*order, *stuck)]

    def resolve(self, graph: Graph) -> Graph:
        """Resolve the operators of a graph that was built, and of its bodies; those that are resolved stay."""
        graph.opsets = self.opsets
        for value in graph.initializers.values():
            current().keep(value.constant.nbytes)
        for node in graph.nodes:
            if node.operator is not None or node.domain == GRADIENT:
                continue
            try:
                current().read_node()
                self.resolve_node(node)
            except ResourceExhausted as error:
                raise error.locate(node=node.name, operator=node.op_type) from error.__cause__
        return graph

    def resolve_node(self, node: Node) -> None:
        """Resolve the operator of a node, and those of its bodies; the attributes that are messages become its `given`."""
        node.opset = self.opsets.get(node.domain, 0) or self.reader.assumed(node.domain)
        messages = node.attributes
        self._operator(node)
        node.given = messages

    # --- nodes

    def _node(self, proto: NodeProto, name: str) -> Node:
        reader = self.reader
        domain = plain_domain(proto.domain)
        opset = self.opsets.get(domain, 0) or reader.assumed(domain)
        if own := reader.own.get((domain, proto.op_type)):
            domain = own[max((v for v in own if v <= opset), default=min(own))]
        where = {"node": name, "operator": proto.op_type, "opset": opset or None}
        inputs: list[Value | None] = []
        for n in proto.input:
            value = self.find(n) if n else None
            if value is None and n:
                self.reader.wrong("SX101", f"input {n!r} is not defined{self.reader.did_you_mean(n, self.values)}", **where)
                value = self.define(n)
            inputs.append(value)
        outputs = list(proto.output)
        node = Node(proto.op_type, inputs, [None] * len(outputs), {}, domain, name, "", opset)
        key = (domain, proto.op_type, proto.overload)
        if key in self.reader.functions and not (is_custom(domain) and (domain, proto.op_type) in declarations):
            node.function = self._function(self.reader.functions[key], key, proto, where)
            if domain == GRADIENT and node.function is not None:
                self._gradient(node, proto, self.reader.functions[key], where)
        else:
            node.attributes = {a.name: a for a in proto.attribute}
            if len(node.attributes) < len(proto.attribute):
                times = Counter(a.name for a in proto.attribute if a.name)
                for n in (n for n, k in times.items() if k > 1):
                    reader.wrong("SX107", f"attribute {n!r} is set more than once", **where)
            self._operator(node, is_hidden=is_private(proto.domain))
        if (domain, proto.op_type) == TRAINING_GRADIENT and node.operator is not None:
            self._forward_graph(node, where)
        if node.operator is not None:
            outputs = _without_omitted(outputs, node.operator.schema)
        node.outputs = [self.define(n) if n else None for n in outputs]
        for body in node.bodies if proto.attribute else ():
            body.owner = node
            node.captures |= zip(body.captured, reader.captures[body], strict=True)
        return node

    def _forward_graph(self, node: Node, where: dict[str, Any]) -> None:
        """Read the nodes from the xs and zs of a Gradient to its y as a graph; other values that they read become its inputs."""
        known = [*node.attributes.get("xs", ()), *(node.attributes.get("zs") or ())]
        y = str(node.attributes.get("y"))
        if len(known) != len(node.inputs):
            what = f"xs and zs of a Gradient must name as many values as it has inputs ({len(node.inputs)}), got {len(known)}"
            self.reader.wrong("SX107", what, **where)
            return
        if not self.makers:
            self.makers.update((n, p) for p in self.protos for n in p.output if n)
        makers, ends = self.makers, set(known)
        needed: set[int] = set()
        others: dict[str, None] = {}
        pending = [y]
        while pending:
            name = pending.pop()
            maker = makers.get(name)
            if name in ends or maker is None:
                if name not in ends:
                    others[name] = None
            elif id(maker) not in needed:
                needed.add(id(maker))
                pending += sorted(reads(maker))
        outer = [self.find(n) for n in others]
        if None in outer or y in others:
            self.reader.wrong("SX101", f"the y of a Gradient must be the output of a node before it, got {y!r}", **where)
            return
        names = [*known, *others]
        forward = [p for p in self.protos if id(p) in needed]
        scope = _Scope(self.reader, self.opsets, None, self.bindings)
        for name in names:
            scope.define(name)
        nodes = self._nested(lambda: scope._nodes(forward))
        node.forward_graph = scope._graph(f"between_{node.name}", tuple(map(Declared, names)), (Declared(y),), nodes, {})
        node.inputs += outer

    def _operator(self, node: Node, *, is_hidden: bool = False) -> None:
        """Resolve the operator of a node, whose attributes are messages and bodies; `is_hidden`: no file may name its domain."""
        reader, op_type = self.reader, node.op_type
        if not node.domain and node.opset <= lax.get(op_type, 0):
            load_domain(MICROSOFT)
            node.domain = LAX
        domain = node.domain
        where = {"node": node.name, "operator": op_type, "opset": node.opset or None}
        shown = DOMAINS.get(domain, public_domain(domain))
        if not node.opset:
            reader.wrong("SX106", f"the model does not import an opset of domain {shown!r}", **where)
            return
        known = None if is_hidden else schemas.get((domain, op_type))
        if not op_type:
            reader.wrong("SX107", "a node must have an op_type", **where)
            return
        if known is None:
            close = reader.did_you_mean(op_type, (n for d, n in schemas if d == domain)).replace("'", "")
            text = f"{shown} has no operator {op_type}, and the model does not define it{close}"
            hint = "" if domain else other_domains.without_domain(op_type)
            if is_custom(domain) and (domain == MICROSOFT or domain not in reader.explained):
                hint = other_domains.of_domain(domain, op_type, "" if reader.explained else definition_lines(node))
                reader.explained.add(domain)
            reader.lacks("SX202", text, **where, hint=hint)
            self._attributes(node, None, where)
            return
        called = (domain, op_type, node.opset)
        version = reader.versions.get(called)
        if version is None:
            version = reader.versions[called] = schema_version(*called)
        if version is None:
            text = f"{op_type} requires opset {min(known)} of {shown} or later, got {node.opset}"
            reader.wrong("SX107", text, **where, hint="" if domain else other_domains.newer(op_type))
            return
        declared = declarations.get((domain, op_type), {})
        if version not in declared:
            there = ", ".join(map(str, sorted(declared))) or "none"
            reader.lacks(
                "SX201",
                f"{op_type}-{version}, which opset {node.opset} selects, is not declared (declared: {there})",
                **where,
                version=version,
                hint=undeclared.get((domain, op_type), ""),
            )
            self._attributes(node, None, where)
            return
        declaration = declared[version]
        schema = known[version]
        signature = signature_of(schema)
        self._arity(node, schema, signature, where)
        given = self._attributes(node, signature.attributes, where)
        for name, value in declaration.absent.items():
            if given.get(name) == value:
                del given[name]
                text = f"{name}={value:g} of {op_type} {node.name!r} is read as no {name}, as its exporters mean it"
                reader.warnings.append(text)
        node.given = frozenset(given)
        node.attributes = self._arguments(given, schema, signature, declaration, where)
        node.operator = reader.operator(declaration, version)
        for problem in subgraph_problems(node) if node.bodies else ():
            reader.wrong("SX107", problem, **where)

    def _arity(self, node: Node, schema: defs.OpSchema, signature: Signature, where: dict[str, Any]) -> None:
        counts = zip(("inputs", "outputs"), (len(node.inputs), len(node.outputs)), signature.counts, strict=True)
        for kind, count, (low, high) in counts:
            if not low <= count <= high:
                bound = str(low) if low == high else f"{low} or more" if high > 2**30 else f"{low} to {high}"
                self.reader.wrong("SX107", f"{_called(schema)} must have {bound} {kind}, got {count}", **where)
            elif kind == "inputs" and None in node.inputs:
                for formal in (
                    f for f, value in zip(signature.inputs, node.inputs, strict=False) if f.required and value is None
                ):
                    self.reader.wrong("SX107", f"{_called(schema)} requires the input {formal.name!r}", **where)

    def _attributes(self, node: Node, types: dict[str, int] | None, where: dict[str, Any]) -> dict[str, Any]:
        """A node's attributes as Python values; `types` are those of the schema (None: any)."""
        given: dict[str, Any] = {}
        for name, attribute in node.attributes.items():
            if isinstance(attribute, Graph):
                kind = int(AttributeProto.GRAPH)
            else:
                if attribute.ref_attr_name and name:
                    bound = self._bound(attribute, where)
                    if bound is None:
                        continue  # as if the node did not set it
                    attribute = bound
                if problem := attribute_problem(attribute, self.reader.ir_version):
                    self.reader.wrong("SX107", problem, **where)
                    continue
                kind = kind_of(attribute)
            if types is not None and name not in types:
                known = ", ".join(sorted(types)) or "none"
                self.reader.wrong("SX107", f"{node.op_type} has no attribute {name!r} (it has: {known})", **where)
            elif types is not None and kind != types[name]:
                want = AttributeProto.AttributeType.Name(types[name])
                have = AttributeProto.AttributeType.Name(kind)
                self.reader.wrong("SX107", f"attribute {name!r} of {node.op_type} must be {want}, got {have}", **where)
            else:
                given[name] = self._attribute(attribute, kind, where)
        return given

    def _bound(self, reference: AttributeProto, where: dict[str, Any]) -> AttributeProto | None:
        """The attribute of the function call that a reference means; None if the call omits it."""
        if self.bindings is None or reference.ref_attr_name not in self.bindings:
            place = "outside a function" if self.bindings is None else "the function has no such attribute"
            self.reader.wrong("SX107", f"attribute {reference.name!r} refers to {reference.ref_attr_name!r}: {place}", **where)
            return None
        return self.bindings[reference.ref_attr_name]

    def _attribute(self, attribute: AttributeProto | Graph, kind: int, where: dict[str, Any]) -> Any:
        if isinstance(attribute, Graph):
            return self._nested(lambda: _Scope(self.reader, self.opsets, self, None).resolve(attribute))
        value = value_of(attribute, kind)
        try:
            if kind == AttributeProto.STRING:
                return _text(value)
            if kind == AttributeProto.STRINGS:
                return tuple(_text(v) for v in value)
            if kind == AttributeProto.TENSOR:
                return self._load(self.reader.tensor, value)
            if kind == AttributeProto.TENSORS:
                return tuple(self._load(self.reader.tensor, v) for v in value)
            if kind == AttributeProto.SPARSE_TENSOR:
                return self._load(self.reader.sparse, value)
        except InvalidModel as error:
            self.reader.wrong(error.code, f"attribute {attribute.name!r}: {error.message}", **where)
            return None
        if kind == AttributeProto.GRAPH:
            return self._nested(lambda: _Scope(self.reader, self.opsets, self, self.bindings).read(value))
        if kind in (AttributeProto.INTS, AttributeProto.FLOATS, AttributeProto.TYPE_PROTOS):
            return tuple(value)
        if kind in (AttributeProto.FLOAT, AttributeProto.INT, AttributeProto.TYPE_PROTO):
            return value
        self.reader.wrong("SX107", f"the type of attribute {attribute.name!r} is not supported", **where)
        return None

    def _arguments(
        self,
        given: dict[str, Any],
        schema: defs.OpSchema,
        signature: Signature,
        declaration: Declaration,
        where: dict[str, Any],
    ) -> dict[str, Any]:
        """Keyword arguments for the body: the node's attributes, otherwise the schema's default, then the declaration's."""
        arguments: dict[str, Any] = {}
        for name, default in declaration.attributes.items():
            if name in given:
                arguments[name] = given[name]
                continue
            if name in signature.defaults:
                value = signature.defaults[name]
                arguments[name] = self._attribute(value, value.type, where)
            elif name in signature.required:
                self.reader.wrong("SX107", f"{_called(schema)} requires the attribute {name!r}", **where)
            elif default is not REQUIRED:
                arguments[name] = default
        return arguments

    def _nested(self, read: Any) -> Any:
        self.reader.depth += 1
        check_nesting(self.reader.depth)
        try:
            return read()
        finally:
            self.reader.depth -= 1

    # --- functions

    def _function(self, proto: FunctionProto, key: tuple[str, str, str], call: NodeProto, where: dict[str, Any]) -> Graph | None:
        """The body of a function with this call's attributes; calls with the same attributes share one graph."""
        reader = self.reader
        if key in reader.calling:
            chain = " -> ".join(name for _, name, _ in [*reader.calling[reader.calling.index(key) :], key])
            reader.wrong("SX103", f"function calls itself: {chain}", **where)
            return None
        if len(call.input) > len(proto.input) or len(call.output) > len(proto.output):
            reader.wrong(
                "SX107",
                f"a call of function {proto.name} must have at most {len(proto.input)} inputs and {len(proto.output)} outputs, "
                f"got {len(call.input)} and {len(call.output)}",
                **where,
            )
        bindings: Bindings = {**dict.fromkeys(proto.attribute), **{a.name: a for a in proto.attribute_proto}}
        for attribute in call.attribute:
            if attribute.name not in bindings:
                known = ", ".join(sorted(bindings)) or "none"
                reader.wrong("SX107", f"function {proto.name} has no attribute {attribute.name!r} (it has: {known})", **where)
            bound = self._bound(attribute, where) if attribute.ref_attr_name else attribute
            if bound is not None:
                bindings[attribute.name] = bound
        given = {n: b for n, b in bindings.items() if b is not None}
        if any(b.HasField("g") or b.graphs for b in given.values()):
            reader.lacks("SX204", f"function {proto.name} takes a graph as an attribute", **where)
            return None
        same = (key, *sorted((n, b.SerializeToString(deterministic=True)) for n, b in given.items()))
        if same not in reader.bodies:
            reader.calling.append(key)
            reader.bodies[same] = self._nested(lambda: self._body(proto, bindings))
            reader.calling.pop()
        return reader.bodies[same]

    def _gradient(self, node: Node, call: NodeProto, function: FunctionProto, where: dict[str, Any]) -> None:
        """Note of which operator a function computes the gradient, if it is one that a training step is written with."""
        name, _, number = node.op_type.partition(FORM)[0].rpartition("_")
        version = next((v for v in declarations.get(("", name), {}) if str(v) == number), None)
        kinds = Counter(n.rstrip(digits) for n in function.input)
        named = [f"{kind}{i}" for kind in ("dy", "x", "y") for i in range(kinds[kind])]
        places = [n.removeprefix("dx") for n in function.output]
        if version is None or named != [*function.input] or kinds["dy"] != kinds["y"]:
            return
        signature = signature_of(schemas["", name][version])
        if any(kinds[kind] > most for kind, (_, most) in zip(("x", "y"), signature.counts, strict=True)):
            return
        known = set(map(str, range(kinds["x"])))
        if not known.issuperset(places) or len(set(places)) < len(places) or len(call.output) != len(places):
            return
        node.attributes = {a.name: a for a in (*function.attribute_proto, *call.attribute)}
        attributes = self._attributes(node, signature.attributes, where)
        node.attributes = {}
        node.inputs += [None] * (len(named) - len(node.inputs))
        results = (*node.inputs[len(named) - kinds["y"] :], *node.inputs[kinds["dy"] :])
        of = next((v.name for v in results if v is not None), "")
        operator = self.reader.operator(declarations["", name][version], version)
        node.gradient = Gradient(operator, of, attributes, kinds["y"], tuple(map(int, places)))

    def _body(self, proto: FunctionProto, bindings: Bindings) -> Graph:
        # Not a copy of the model's: there may be many imports, and many functions.
        opsets = ChainMap(_opsets(proto.opset_import, self.reader), self.reader.opsets)
        scope = _Scope(self.reader, opsets, None, bindings)
        for name in proto.input:
            scope.define(name)
        nodes = scope._nodes(proto.node)
        for name in proto.output:
            if scope.find(name) is None:
                self.reader.wrong("SX101", f"output {name!r} of function {proto.name} is not defined")
                scope.define(name)
        inputs, outputs = (tuple(map(Declared, names)) for names in (proto.input, proto.output))
        return scope._graph(proto.name, inputs, outputs, nodes, {})


def _without_omitted(outputs: Sequence[Any], schema: defs.OpSchema) -> list[Any]:
    """The outputs of a node, or their names, without optional ones at the end that it omits by None, or by the name ""."""
    count = len(outputs)
    while count and not outputs[count - 1] and count <= len(schema.outputs) and schema.outputs[count - 1].option == _OPTIONAL:
        count -= 1
    return list(outputs[:count])


def _name(tensor: Any) -> str:
    """The name of a TensorProto, or of a SparseTensorProto: that of its values."""
    return str(tensor.values.name if hasattr(tensor, "values") else tensor.name)


def _text(value: bytes) -> str:
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidModel(f"a string is not UTF-8: {error}", code="SX107") from None


def from_onnx(model: ModelProto, folder: Path | None = None) -> Graph:
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
    return read(model, folder)


Graph.from_onnx = staticmethod(from_onnx)
