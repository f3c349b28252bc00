"""A graph as a pass reads it: its nodes, and the producers and readers of its values."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from onnx import AttributeProto, FunctionProto, GraphProto, NodeProto, SparseTensorProto, TensorProto, TypeProto, helper

from ..errors import InvalidModel
from ..ir.graph import runnable_order
from ..proto.schemas import plain_domain
from .ordering import NameList, NodeOrder, cycle

Shape = tuple[int | str | None, ...]

LONG = 16
"""The places of names are indexed for a node of more inputs than this."""


@dataclass(frozen=True)
class Type:
    """What is known of a tensor: dtype as ONNX's code (0: unknown), shape with names or None for open sizes."""

    dtype: int = 0
    shape: Shape | None = None


@dataclass(eq=False)
class NodeEditor:
    """One node of a graph that is edited.

    Attributes:
        op_type: the operator.
        inputs: names of the inputs, "" for an absent one.
        outputs: names of the outputs, "" for an absent one.
        attributes: by name, without graphs.
        domain: of the operator; "" is ONNX's own.
        name: of the node, which may be empty.
        overload: of a function of the model.
        graphs: subgraphs, each a GraphEditor, by the name of their attribute.
        proto: the message that the node was read from, None for a new node.
        plain: whether the node calls an operator whose attributes are all known: not a function of the model, and no
            attribute that refers to one of a function.
    """

    op_type: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, AttributeProto] = field(default_factory=dict)
    domain: str = ""
    name: str = ""
    overload: str = ""
    graphs: dict[str, Any] = field(default_factory=dict)
    proto: NodeProto | None = None
    plain: bool = True

    def is_(self, *names: str) -> bool:
        """Test for operators of ONNX's own domain.

        Args:
            *names: operators.

        Returns:
            Whether the node is plain and calls one of them.
        """
        return self.plain and self.domain == "" and self.op_type in names

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute.

        Args:
            name: of the attribute.
            default: the value of an absent attribute.

        Returns:
            A number, a tuple of numbers, a str, or a message such as a TensorProto.
        """
        found = self.attributes.get(name)
        if found is None:
            return default
        value = helper.get_attribute_value(found)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return tuple(value) if found.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value

    def set(self, **attributes: Any) -> None:
        """Set attributes.

        Args:
            **attributes: values by name; None removes the attribute.
        """
        for name, value in attributes.items():
            if value is None:
                self.attributes.pop(name, None)
            else:
                empty = AttributeProto.INTS if isinstance(value, (list, tuple)) and not value else None
                self.attributes[name] = helper.make_attribute(name, value, attr_type=empty)

    def input(self, i: int) -> str:
        """Return the name of an input.

        Args:
            i: its position.

        Returns:
            The name, "" for an absent input.
        """
        return self.inputs[i] if i < len(self.inputs) else ""

    def only_output(self) -> bool:
        """Test whether all outputs but the first are absent.

        Returns:
            Whether the node has one output.
        """
        return bool(self.outputs) and not any(self.outputs[1:])

    @property
    def title(self) -> str:
        """The node's name, or its operator and outputs."""
        return node_title(self.name, self.op_type, self.outputs)


def node_title(name: str, operator: str, outputs: Iterable[str]) -> str:
    """The name of a node, or its operator and outputs."""
    return name or f"{operator} of {', '.join(repr(o) for o in outputs if o)}"


@dataclass(eq=False)
class Trial:
    """Changes of graphs that may be undone.

    Attributes:
        steps: functions that undo one change each, in the order of the changes.
        touched: the nodes that changed, were inserted or removed.
    """

    steps: list[Callable[[], None]] = field(default_factory=list)
    touched: dict[NodeEditor, None] = field(default_factory=dict)

    def undo(self) -> None:
        """Undo all changes."""
        for step in reversed(self.steps):
            step()


class Context(ABC):
    """What the graphs of one model share: names, types, and facts of the model.

    Attributes:
        folder: the folder of external data.
        ir_version: of the model.
        function_names: (domain, name) of the model's functions.
        refused: nodes that could not be computed, which are not tried again.
        main: the main graph, a GraphEditor.
        given: the initializers of the model's file.
        parameters: the float constants that train; None for all initializers.
        trial: records the changes that methods of graphs make; None if they are final.
    """

    folder: Path | None
    ir_version: int
    function_names: set[tuple[str, str]]
    refused: set[NodeEditor]
    main: Any
    given: frozenset[str]
    parameters: frozenset[str] | None = None
    trial: Trial | None = None

    @abstractmethod
    def fresh(self, wish: str) -> str:
        """Return a name that is not in use in the model.

        Args:
            wish: the preferred name, which is returned if it is free.

        Returns:
            A free name, which is in use from now on.
        """

    @property
    @abstractmethod
    def has_types(self) -> bool:
        """Whether types have been inferred for the current graphs."""

    @property
    @abstractmethod
    def types(self) -> dict[int, dict[str, Type]]:
        """The types of values by the id of their graph; inferred at the first request after `forget`."""

    @abstractmethod
    def forget(self) -> None:
        """Note that the graphs have changed: types must be inferred again."""


class GraphIndex:
    """One graph, or the body of a function, with an index of the producers and readers of its values."""

    def __init__(
        self, context: Context, proto: GraphProto | FunctionProto, outer: Self | None, opsets: Mapping[str, int]
    ) -> None:
        """Read a graph and its subgraphs.

        Args:
            context: what the graphs of the model share.
            proto: the graph, or the function.
            outer: the graph that contains this one, if any.
            opsets: the imported opset of each domain.

        Raises:
            InvalidModel: the nodes have a cycle (SX101), or a value is defined twice (SX102).
        """
        self.context, self.proto, self.outer, self.opsets = context, proto, outer, opsets
        self.in_function: bool = outer.in_function if outer else isinstance(proto, FunctionProto)
        self.inputs = NameList(i if isinstance(i, str) else i.name for i in proto.input)
        self.outputs = NameList(o if isinstance(o, str) else o.name for o in proto.output)
        self.initializers: dict[str, TensorProto] = {}
        self.sparse: dict[str, SparseTensorProto] = {}
        self.retyped: dict[int, TypeProto] = {}
        self.pinned: set[str] = set()
        if isinstance(proto, GraphProto):
            self.initializers = {t.name: t for t in proto.initializer}
            self.sparse = {t.values.name: t for t in proto.sparse_initializer}
            for note in proto.quantization_annotation:
                self.pinned |= {note.tensor_name, *(e.value for e in note.quant_parameter_tensor_names)}
        self._order = NodeOrder([self._read(p) for p in proto.node])
        self._producers: dict[str, NodeEditor] = {}
        self._users: dict[str, dict[int, NodeEditor]] = {}
        self._places: dict[NodeEditor, tuple[list[str], dict[str, list[int]]]] = {}
        self.sort()

    def _read(self, p: NodeProto) -> NodeEditor:
        domain = plain_domain(p.domain)
        node = NodeEditor(p.op_type, list(p.input), list(p.output), {}, domain, p.name, p.overload, proto=p)
        for a in p.attribute:
            if a.HasField("g"):
                node.graphs[a.name] = type(self)(self.context, a.g, self, self.opsets)
            for i, g in enumerate(a.graphs):
                node.graphs[f"{a.name}/{i}"] = type(self)(self.context, g, self, self.opsets)
            if not a.HasField("g") and not a.graphs:
                node.attributes[a.name] = a
            node.plain = node.plain and not a.ref_attr_name
        node.plain = node.plain and (domain, p.op_type) not in self.context.function_names
        return node

    @property
    def edit(self) -> Context:
        """The context; deprecated: use `context`."""
        warnings.warn("edit is now context", DeprecationWarning, stacklevel=2)
        return self.context

    @property
    def held(self) -> set[str]:
        """The values that something else than a node names; deprecated: use `pinned`."""
        warnings.warn("held is now pinned", DeprecationWarning, stacklevel=2)
        return self.pinned

    @property
    def nodes(self) -> tuple[NodeEditor, ...]:
        """The nodes in order; `insert`, `remove` and `sort` change them."""
        return self._order.all()

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self._order.place)

    def __bool__(self) -> bool:
        """Return True: a graph without nodes is a graph."""
        return True

    def __contains__(self, node: object) -> bool:
        """Return whether a node is in this graph."""
        return node in self._order.place

    def following(self, node: NodeEditor) -> NodeEditor | None:
        """Return the next node.

        Args:
            node: a node of this graph.

        Returns:
            The node after it; None if it is the last one.
        """
        return self._order.after(node)

    def place(self, node: NodeEditor) -> int:
        """Return a number that is larger for later nodes.

        Args:
            node: a node of this graph.

        Returns:
            The number, which is valid until the next change.
        """
        return self._order.place[node]

    @property
    def opset(self) -> int:
        """The opset of ONNX's own domain."""
        return self.opsets.get("", 1)

    # --- the index

    def reindex(self) -> None:
        """Rebuild the index of producers and readers, after a change in a subgraph."""
        self._index([self.reads(node) for node in self.nodes])

    def _index(self, reads: Iterable[set[str]]) -> None:
        self._producers = {o: n for n in self.nodes for o in n.outputs if o}
        self._users = {}
        for node, names in zip(self.nodes, reads, strict=True):
            for name in names:
                self._users.setdefault(name, {})[id(node)] = node

    def attach(self, node: NodeEditor) -> None:
        """Add a node to the readers of its inputs.

        Args:
            node: a node of this graph.
        """
        for name in self.reads(node):
            self._users.setdefault(name, {})[id(node)] = node

    def release(self, node: NodeEditor) -> None:
        """Remove a node from the readers of its inputs.

        Args:
            node: a node of this graph.
        """
        for name in self.reads(node):
            self._users.get(name, {}).pop(id(node), None)

    @staticmethod
    def reads(node: NodeEditor) -> set[str]:
        """Return the names that a node reads.

        Args:
            node: the node.

        Returns:
            Its inputs, and the values that its subgraphs capture.
        """
        names = {n for n in node.inputs if n}
        for graph in node.graphs.values():
            names |= graph.free()
        return names

    def free(self) -> set[str]:
        """Return the names that this graph captures.

        Returns:
            Names that are read here and defined in an outer graph.
        """
        return {name for name in (*self._users, *self.outputs) if name and self.captures(name)}

    def producer(self, name: str) -> NodeEditor | None:
        """Return the producer of a value.

        Args:
            name: of the value.

        Returns:
            The node of this graph that produces it; None for an input, an initializer or a value of another graph.
        """
        return self._producers.get(name)

    def users(self, name: str) -> list[NodeEditor]:
        """Return the readers of a value.

        Args:
            name: of the value.

        Returns:
            The nodes that read it, directly or in a subgraph.
        """
        return list(self._users.get(name, {}).values())

    def defines(self, name: str) -> bool:
        """Test whether this graph defines a value.

        Args:
            name: of the value.

        Returns:
            Whether a node, an initializer or an input of this graph has the name.
        """
        return name in self._producers or name in self.initializers or name in self.sparse or name in self.inputs

    def has_users(self, name: str) -> bool:
        """Test whether a node reads a value.

        Args:
            name: of the value.

        Returns:
            Whether `users` is not empty.
        """
        return bool(self._users.get(name))

    def captures(self, name: str) -> bool:
        """Test whether this graph reads a value of an outer graph.

        Args:
            name: of the value.

        Returns:
            Whether the name is read here, or is an output, and is not defined here.
        """
        return (self.has_users(name) or name in self.outputs) and not self.defines(name)

    def used(self, name: str) -> bool:
        """Test whether a value is in use.

        Args:
            name: of the value.

        Returns:
            Whether a node reads it, or it is a graph output, or an annotation names it.
        """
        return bool(self._users.get(name)) or name in self.outputs or name in self.pinned

    def used_once(self, name: str) -> bool:
        """Test whether a value has a single use.

        Args:
            name: of the value.

        Returns:
            Whether exactly one node reads it, once and not in a subgraph, and nothing else uses it.
        """
        readers = self._users.get(name, {})
        if len(readers) != 1 or name in self.outputs or name in self.pinned:
            return False
        (reader,) = readers.values()
        times = len(self._indexed(reader).get(name, ())) if len(reader.inputs) > LONG else reader.inputs.count(name)
        return times == 1 and not any(g.captures(name) for g in reader.graphs.values())

    def _indexed(self, node: NodeEditor) -> dict[str, list[int]]:
        """The places of each input of a node with many inputs."""
        found = self._places.get(node)
        if found is None or found[0] is not node.inputs:
            places: dict[str, list[int]] = {}
            for i, name in enumerate(node.inputs):
                places.setdefault(name, []).append(i)
            found = self._places[node] = (node.inputs, places)
        return found[1]

    def walk(self) -> Iterator[Self]:
        """Iterate over the subgraphs of this graph, the innermost first.

        Yields:
            Each subgraph, and this graph last.
        """
        for node in self.nodes:
            for graph in node.graphs.values():
                yield from graph.walk()
        yield self

    def sort(self) -> None:
        """Sort the nodes topologically; a valid order is kept, and the sort is stable.

        Raises:
            InvalidModel: the nodes have a cycle (SX101), or a value is defined twice (SX102).
        """
        makers: dict[str, int] = {}
        nodes = self.nodes
        for i, node in enumerate(nodes):
            for o in node.outputs:
                if o and (o in makers or o in self.initializers or o in self.inputs):
                    raise InvalidModel(f"value {o!r} is defined more than once", code="SX102", node=node.title)
                makers[o] = i
        makers.pop("", None)
        reads = [self.reads(node) for node in nodes]
        if all(makers.get(n, -1) < i for i, names in enumerate(reads) for n in names):
            self._index(reads)
            return
        needs = [{makers[n] for n in names if n in makers} for names in reads]
        order = runnable_order(needs)
        if len(order) < len(needs):
            stuck = cycle(needs, {*range(len(needs))} - {*order})
            shown = ", ".join(repr(nodes[i].title) for i in stuck[:8]) + (", ..." if len(stuck) > 8 else "")
            where = nodes[stuck[0]].title
            raise InvalidModel(f"the graph has a cycle among the nodes {shown}", code="SX101", node=where)
        self._order = NodeOrder([nodes[i] for i in order])
        self._index(reads[i] for i in order)

    def check(self) -> None:
        """Check that every value is defined once, and sort the nodes.

        Raises:
            InvalidModel: an input or output has no name, a value is not defined, the nodes have a cycle (SX101), or a value is
                defined twice (SX102).
        """
        if "" in self.inputs or "" in self.outputs:
            raise InvalidModel("an input or output of a graph has no name", code="SX101")
        self.sort()
        for name in self.free() if self.outer is None else ():
            reader = next((n.title for n in self.nodes if name in self.reads(n)), "the graph's outputs")
            raise InvalidModel(f"value {name!r}, which {reader} reads, is not defined", code="SX101", node=reader)
