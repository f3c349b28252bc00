"""An editable graph: nodes in order, producers and readers of values, constants as arrays, types as far as they are known.

Two rules keep every rewrite simple: **a name never changes its value** (a new value gets a fresh name), and TensorProtos and
AttributeProtos are never changed in place, so a snapshot copies no weights.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from onnx import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    TypeProto,
    helper,
    numpy_helper,
)

from .. import dtypes
from ..errors import InvalidModel, SonnxError
from ..ir.graph import runnable_order
from ..proto import tensor_data
from ..proto.schemas import plain_domain

Shape = tuple[int | str | None, ...]

LONG = 16
"""The places of names are indexed for a node of more inputs than this."""


@dataclass(frozen=True)
class Type:
    """What is known of a tensor: dtype as ONNX's code (0: unknown), shape with names or None for open sizes."""

    dtype: int = 0
    shape: Shape | None = None


@dataclass(eq=False)
class Node:
    """One node of a graph that is edited.

    Attributes:
        op_type: the operator.
        inputs: names of the inputs, "" for an absent one.
        outputs: names of the outputs, "" for an absent one.
        attributes: by name, without graphs.
        domain: of the operator; "" is ONNX's own.
        name: of the node, which may be empty.
        overload: of a function of the model.
        graphs: subgraphs by the name of their attribute.
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
    graphs: dict[str, GraphEditor] = field(default_factory=dict)
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
        return self.name or f"{self.op_type} of {', '.join(repr(o) for o in self.outputs if o)}"


class Names(MutableSequence[str]):
    """A list of names that finds a name in constant time."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Copy a list.

        Args:
            names: the names, in order.
        """
        self._names = list(names)
        self._times = Counter(self._names)

    def __contains__(self, name: object) -> bool:
        """Return whether a name is in the list."""
        return self._times[name] > 0 if isinstance(name, str) else False

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in order."""
        return iter(self._names)

    def __getitem__(self, at: Any) -> Any:
        """Return a name, or a list of names for a slice."""
        return self._names[at]

    def __setitem__(self, at: Any, new: Any) -> None:
        """Replace a name, or the names of a slice."""
        self._names[at] = new
        self._times = Counter(self._names)

    def __delitem__(self, at: Any) -> None:
        """Remove a name, or the names of a slice."""
        del self._names[at]
        self._times = Counter(self._names)

    def insert(self, index: int, value: str) -> None:
        """Insert a name.

        Args:
            index: its position.
            value: the name.
        """
        self._names.insert(index, value)
        self._times[value] += 1

    def count(self, value: str) -> int:
        """Return how often a name occurs.

        Args:
            value: the name.

        Returns:
            The number of its places.
        """
        return self._times[value]

    def __eq__(self, other: object) -> bool:
        """Compare with a list of names."""
        return self._names == (other._names if isinstance(other, Names) else other)

    __hash__ = None  # type: ignore[assignment]  # names of a node compare as a list does


class _Order:
    """Nodes in order; inserting, removing and comparing places take constant time."""

    _GAP = 1 << 32

    def __init__(self, nodes: Sequence[Node]) -> None:
        ring = (None, *nodes, None)  # None is the end, and its successor the first node
        self._next: dict[Node | None, Node | None] = dict(pairwise(ring))
        self._previous: dict[Node | None, Node | None] = dict(zip(ring[1:], ring, strict=False))
        self.place = {node: i * self._GAP for i, node in enumerate(nodes)}
        self._all: tuple[Node, ...] | None = tuple(nodes)

    def all(self) -> tuple[Node, ...]:
        """The nodes in order; kept until the next change."""
        if self._all is None:
            self._all = tuple(self)
        return self._all

    def __iter__(self) -> Iterator[Node]:
        node = self._next[None]
        while node is not None:
            yield node
            node = self._next[node]

    def after(self, node: Node | None) -> Node | None:
        """The next node; the first one after None, None after the last one."""
        return self._next[node]

    def insert(self, node: Node, before: Node | None) -> None:
        """Insert a node; at the end if `before` is None."""
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = node
        self._next[node], self._previous[node] = before, previous
        self._all = None
        low = -self._GAP if previous is None else self.place[previous]
        if before is None:
            self.place[node] = low + self._GAP
            return
        high = self.place[before]
        self.place[node] = high - self._GAP if previous is None else (low + high) // 2
        if self.place[node] == low:  # no room is left between these two
            self.place = {n: i * self._GAP for i, n in enumerate(self)}

    def remove(self, node: Node) -> None:
        """Remove a node."""
        previous, after = self._previous.pop(node), self._next.pop(node)
        self._next[previous], self._previous[after] = after, previous
        del self.place[node]
        self._all = None


@dataclass(eq=False)
class Trial:
    """Changes of graphs that may be undone.

    Attributes:
        steps: functions that undo one change each, in the order of the changes.
        touched: the nodes that changed, were inserted or removed.
    """

    steps: list[Callable[[], None]] = field(default_factory=list)
    touched: dict[Node, None] = field(default_factory=dict)

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
        main: the main graph.
        given: the initializers of the model's file.
        parameters: the float constants that train; None for all initializers.
        trial: records the changes that methods of graphs make; None if they are final.
    """

    folder: Path | None
    ir_version: int
    function_names: set[tuple[str, str]]
    refused: set[Node]
    main: GraphEditor
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


class GraphEditor:
    """One graph, or the body of a function, with an index of the producers and readers of its values.

    Attributes:
        context: what the graphs of the model share.
        proto: the message that the graph was read from.
        outer: the graph that contains this one; None for the main graph and for bodies of functions.
        opsets: the imported opset of each domain.
        in_function: whether the graph is in the body of a function.
        inputs: names of the inputs.
        outputs: names of the outputs.
        initializers: tensors by name.
        sparse: sparse tensors by name.
        retyped: new types of outputs whose names changed, by position.
        pinned: values that quantization annotations name; their names must not change.
        nodes: in an order that can be run.
    """

    def __init__(
        self, context: Context, proto: GraphProto | FunctionProto, outer: GraphEditor | None, opsets: Mapping[str, int]
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
        self.inputs = Names(i if isinstance(i, str) else i.name for i in proto.input)
        self.outputs = Names(o if isinstance(o, str) else o.name for o in proto.output)
        self.initializers: dict[str, TensorProto] = {}
        self.sparse: dict[str, SparseTensorProto] = {}
        self.retyped: dict[int, TypeProto] = {}
        self.pinned: set[str] = set()
        if isinstance(proto, GraphProto):
            self.initializers = {t.name: t for t in proto.initializer}
            self.sparse = {t.values.name: t for t in proto.sparse_initializer}
            for note in proto.quantization_annotation:
                self.pinned |= {note.tensor_name, *(e.value for e in note.quant_parameter_tensor_names)}
        self._order = _Order([self._read(p) for p in proto.node])
        self._producers: dict[str, Node] = {}
        self._users: dict[str, dict[int, Node]] = {}
        self._places: dict[Node, tuple[list[str], dict[str, list[int]]]] = {}
        self.sort()

    def _read(self, p: NodeProto) -> Node:
        domain = plain_domain(p.domain)
        node = Node(p.op_type, list(p.input), list(p.output), {}, domain, p.name, p.overload, proto=p)
        for a in p.attribute:
            if a.HasField("g"):
                node.graphs[a.name] = GraphEditor(self.context, a.g, self, self.opsets)
            for i, g in enumerate(a.graphs):
                node.graphs[f"{a.name}/{i}"] = GraphEditor(self.context, g, self, self.opsets)
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
    def nodes(self) -> tuple[Node, ...]:
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

    def following(self, node: Node) -> Node | None:
        """Return the next node.

        Args:
            node: a node of this graph.

        Returns:
            The node after it; None if it is the last one.
        """
        return self._order.after(node)

    def place(self, node: Node) -> int:
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

    def attach(self, node: Node) -> None:
        """Add a node to the readers of its inputs.

        Args:
            node: a node of this graph.
        """
        for name in self.reads(node):
            self._users.setdefault(name, {})[id(node)] = node

    def release(self, node: Node) -> None:
        """Remove a node from the readers of its inputs.

        Args:
            node: a node of this graph.
        """
        for name in self.reads(node):
            self._users.get(name, {}).pop(id(node), None)

    @staticmethod
    def reads(node: Node) -> set[str]:
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

    def producer(self, name: str) -> Node | None:
        """Return the producer of a value.

        Args:
            name: of the value.

        Returns:
            The node of this graph that produces it; None for an input, an initializer or a value of another graph.
        """
        return self._producers.get(name)

    def users(self, name: str) -> list[Node]:
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

    def _indexed(self, node: Node) -> dict[str, list[int]]:
        """The places of each input of a node with many inputs."""
        found = self._places.get(node)
        if found is None or found[0] is not node.inputs:
            places: dict[str, list[int]] = {}
            for i, name in enumerate(node.inputs):
                places.setdefault(name, []).append(i)
            found = self._places[node] = (node.inputs, places)
        return found[1]

    def walk(self) -> Iterator[GraphEditor]:
        """Iterate over the subgraphs of this graph, the innermost first.

        Yields:
            Each subgraph, and this graph last.
        """
        for node in self.nodes:
            for graph in node.graphs.values():
                yield from graph.walk()
        yield self

    # --- changes

    def insert(self, node: Node, before: Node | None = None, after: Node | None = None) -> None:
        """Insert a new node; at the end if no place is given.

        Args:
            node: the new node.
            before: the node before which to insert it.
            after: the node after which to insert it.
        """
        self._order.insert(node, self._order.after(after) if after is not None else before)
        self._producers.update({o: node for o in node.outputs if o})
        self.attach(node)
        self._changed(lambda: self._take_out(node), node)

    def remove(self, *gone: Node) -> None:
        """Remove nodes whose values are not in use.

        Args:
            *gone: nodes of this graph.
        """
        for node in gone:
            there = node in self._order.place
            following = self._order.after(node) if there else None
            produced = [o for o in node.outputs if self._producers.get(o) is node]
            self._take_out(node)

            def put_back(node: Node = node, there: bool = there, at: Node | None = following, made: Any = produced) -> None:
                if there:
                    self._order.insert(node, at)
                self._producers.update(dict.fromkeys(made, node))
                self.attach(node)

            self._changed(put_back, node)

    def _take_out(self, node: Node) -> None:
        if node in self._order.place:
            self._order.remove(node)
        self._places.pop(node, None)
        self.release(node)
        for o in node.outputs:
            if self._producers.get(o) is node:
                del self._producers[o]

    def _changed(self, undo: Callable[[], None], *nodes: Node) -> None:
        """Record a change, if a trial records them."""
        trial = self.context.trial
        if trial is not None:
            trial.steps.append(undo)
            trial.touched.update(dict.fromkeys(nodes))

    def touch(self, node: Node) -> None:
        """Record the operator and the attributes of a node, before they are changed in a trial.

        Args:
            node: a node of this graph.
        """
        op_type, attributes = node.op_type, dict(node.attributes)

        def undo() -> None:
            node.op_type, node.attributes = op_type, attributes

        self._changed(undo, node)

    def rewire(self, node: Node, inputs: Sequence[str]) -> None:
        """Replace the inputs of a node.

        Args:
            node: a node of this graph.
            inputs: names, "" for an absent input.
        """
        old = node.inputs
        self.release(node)
        node.inputs = list(inputs)
        while node.inputs and not node.inputs[-1] and not node.graphs:
            node.inputs.pop()
        self.attach(node)

        def undo() -> None:
            self.release(node)
            node.inputs = old
            self.attach(node)

        self._changed(undo, node)

    def rename_output(self, node: Node, i: int, name: str) -> None:
        """Rename an output of a node; readers of the old name do not change.

        Args:
            node: a node of this graph.
            i: the position of the output.
            name: the new name.
        """
        old = node.outputs[i]
        self._rename_output(node, i, name)
        self._changed(lambda: self._rename_output(node, i, old), node)

    def _rename_output(self, node: Node, i: int, name: str) -> None:
        if self._producers.get(node.outputs[i]) is node:
            del self._producers[node.outputs[i]]
        node.outputs[i] = name
        if name:
            self._producers[name] = node

    def replace(self, old: str, new: str) -> None:
        """Replace a value in all nodes that read it, subgraphs included; outputs of the graph do not change.

        Args:
            old: the name that is read now.
            new: the name to read.
        """
        if old == new:
            return
        readers = self._users.pop(old, {})
        there = self._users.setdefault(new, {})
        both = [node for key, node in readers.items() if key in there] if self.context.trial is not None else []
        for node in readers.values():
            self._substitute(node, old, new)
            for graph in node.graphs.values():
                graph._replace_free(old, new)
        there.update(readers)

        def undo() -> None:
            self._users[old] = readers
            for key in readers:
                there.pop(key, None)
            there.update({id(node): node for node in both})

        self._changed(undo, *readers.values())

    def _substitute(self, node: Node, old: str, new: str) -> None:
        """Replace a name in the inputs of a node."""
        if len(node.inputs) <= LONG:
            before, node.inputs = node.inputs, [new if n == old else n for n in node.inputs]

            def undo() -> None:
                node.inputs = before

        else:
            index = self._indexed(node)
            places = index.pop(old, [])
            for i in places:
                node.inputs[i] = new
            index.setdefault(new, []).extend(places)

            def undo() -> None:
                self._places.pop(node, None)  # its index is built again when it is used
                for i in places:
                    node.inputs[i] = old

        self._changed(undo, node)

    def _replace_free(self, old: str, new: str) -> None:
        if not self.captures(old):
            return
        if old in self.outputs:
            self.name_outputs([new if o == old else o for o in self.outputs])
        self.replace(old, new)

    def name_outputs(self, names: Sequence[str]) -> None:
        """Set the values that are the outputs of this graph.

        Args:
            names: as many as there are outputs.
        """
        before, self.outputs = self.outputs, Names(names)

        def undo() -> None:
            self.outputs = before

        self._changed(undo)

    def bypass(self, node: Node, source: str, output: int = 0) -> bool:
        """Replace an output of a node by another value, and remove the node.

        A graph output must keep its name: then the producer of `source` is renamed, unless `source` is an input, an
        initializer, an output itself, or a value of an outer graph.

        Args:
            node: a node of this graph.
            source: the value that replaces the output.
            output: the position of the output; the others must not be in use.

        Returns:
            False if names do not allow it; then nothing changed.
        """
        out = node.outputs[output]
        if out in self.pinned or any(o and self.used(o) for i, o in enumerate(node.outputs) if i != output):
            return False
        if out not in self.outputs:
            self.replace(out, source)
            self.remove(node)
            return True
        maker = self.producer(source)
        if maker is None or source in self.outputs or source in self.pinned:
            return False
        self.remove(node)
        self.rename_output(maker, maker.outputs.index(source), out)
        self.replace(source, out)
        return True

    def add(
        self,
        op_type: str,
        inputs: Sequence[str],
        *,
        before: Node | None = None,
        after: Node | None = None,
        like: str = "",
        name: str = "",
        outputs: int = 1,
        type: Type | None = None,
        **attributes: Any,
    ) -> Node:
        """Insert a new node of ONNX's own domain.

        Args:
            op_type: the operator.
            inputs: names of the inputs.
            before: the node before which to insert it.
            after: the node after which to insert it.
            like: a prefix of the fresh name of the first output, if `name` is empty.
            name: of the first output.
            outputs: the number of outputs.
            type: of the first output.
            **attributes: values by name.

        Returns:
            The new node.
        """
        made = [
            name or self.context.fresh(like or op_type.lower()),
            *(self.context.fresh(op_type.lower()) for _ in range(outputs - 1)),
        ]
        node = Node(op_type, list(inputs), made, name=self.context.fresh(f"{op_type}_of_{made[0]}"))
        node.set(**attributes)
        self.insert(node, before, after)
        if type is not None:
            self.types[made[0]] = type
        return node

    def trains(self, array: np.ndarray, *names: str) -> bool:
        """Test whether a new constant may be an initializer, which is trainable if it is float.

        Args:
            array: the new constant.
            *names: the constants that it was computed from.

        Returns:
            False for floats that were computed from Constant nodes only.
        """
        return array.dtype.kind != "f" or any(isinstance(self.tensor(n), TensorProto) for n in names)

    def add_constant(self, array: np.ndarray, like: str = "constant", trains: bool = True) -> str:
        """Add a constant: an initializer; in functions, and if it must not be trainable, a Constant node.

        Before IR version 4 an initializer had to be listed as an input too, so it is added to the main graph.

        Args:
            array: the value.
            like: the wish for its name.
            trains: whether it may be an initializer; see `trains`.

        Returns:
            The name of the constant.
        """
        name = self.context.fresh(like)
        tensor = numpy_helper.from_array(np.asarray(array), name)
        if self.in_function or not trains:
            self.types[name] = Type(tensor.data_type, tuple(array.shape))
            self.insert(constant_node(name, array), before=self._order.after(None))
            return name
        net = self.context.main if self.context.ir_version < 4 else self
        net.types[name] = Type(tensor.data_type, tuple(array.shape))
        net.initializers[name] = tensor
        if self.context.ir_version < 4:
            net.inputs.append(name)

        def undo() -> None:
            del net.initializers[name]
            if self.context.ir_version < 4:
                net.inputs.remove(name)

        self._changed(undo)
        return name

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
            cycle = _cycle(needs, {*range(len(needs))} - {*order})
            shown = ", ".join(repr(nodes[i].title) for i in cycle[:8]) + (", ..." if len(cycle) > 8 else "")
            where = nodes[cycle[0]].title
            raise InvalidModel(f"the graph has a cycle among the nodes {shown}", code="SX101", node=where)
        self._order = _Order([nodes[i] for i in order])
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

    # --- constants and types

    def owner(self, name: str) -> GraphEditor | None:
        """Return the graph that defines a value that is visible here.

        Args:
            name: of the value.

        Returns:
            This graph or an outer one; None if none defines it.
        """
        net: GraphEditor | None = self
        while net is not None and not net.defines(name):
            net = net.outer
        return net

    def tensor(self, name: str) -> TensorProto | Node | None:
        """Return the definition of a constant.

        Args:
            name: of a value that is visible here.

        Returns:
            An initializer that no input can override, or a Constant node; None if the value is not a constant.
        """
        net = self.owner(name) if name else None
        if net is None:
            return None
        if name in net.initializers:
            return None if name in net.inputs and self.context.ir_version >= 4 else net.initializers[name]
        node = net.producer(name)
        return node if node is not None and node.is_("Constant") else None

    def is_constant(self, name: str) -> bool:
        """Test whether a value is a constant.

        Args:
            name: of a value that is visible here.

        Returns:
            Whether it is an initializer that no input can override, or the output of a Constant node.
        """
        return self.tensor(name) is not None

    def constant_bytes(self, name: str) -> int:
        """Return the size of a constant without reading it.

        Args:
            name: of a value that is visible here.

        Returns:
            The bytes; 0 if it is not a constant.
        """
        found = self.tensor(name)
        if isinstance(found, Node):
            held = found.get("value")
            found = held if isinstance(held, TensorProto) else None
        return 0 if found is None else nbytes(found)

    def constant(self, name: str, most: int = 1 << 26) -> np.ndarray | None:
        """Read a constant.

        Args:
            name: of a value that is visible here.
            most: the maximum bytes.

        Returns:
            The array; None if the value is not a constant, is larger, or cannot be read.
        """
        found = self.tensor(name)
        if found is None or self.constant_bytes(name) > most:
            return None
        try:
            return _value(found) if isinstance(found, Node) else tensor_data.tensor(found, self.context.folder)
        except SonnxError:  # damaged, or external without its folder: not reported here
            return None

    @cached_property
    def _no_types(self) -> dict[str, Type]:
        return {}

    @property
    def types(self) -> dict[str, Type]:
        """The inferred types of this graph's values; passes add those of new values."""
        return self.context.types.get(id(self), self._no_types)

    def type(self, name: str) -> Type:
        """Return what is known of a value.

        Args:
            name: of a value that is visible here.

        Returns:
            Its dtype and shape, as far as they are known.
        """
        net = self.owner(name)
        if net is None:
            return Type()
        tensor = net.initializers.get(name)
        if tensor is not None:
            return Type(tensor.data_type, tuple(tensor.dims))
        return net.types.get(name, Type())

    def shape(self, name: str) -> Shape | None:
        """Return the shape of a value.

        Args:
            name: of a value that is visible here.

        Returns:
            The sizes, a str or None for an open one; None if the rank is not known.
        """
        return self.type(name).shape

    def static(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a value if all sizes are known.

        Args:
            name: of a value that is visible here.

        Returns:
            The sizes; None if one is open or the rank is not known.
        """
        shape = self.shape(name)
        sizes = None if shape is None else [int(d) for d in shape if isinstance(d, int)]
        return None if shape is None or sizes is None or len(sizes) < len(shape) else tuple(sizes)

    def rank(self, name: str) -> int | None:
        """Return the rank of a value.

        Args:
            name: of a value that is visible here.

        Returns:
            The number of axes; None if it is not known.
        """
        shape = self.shape(name)
        return None if shape is None else len(shape)

    # --- snapshots

    def snapshot(self) -> Callable[[], None]:
        """Record the state of this graph and its subgraphs; no weights are copied.

        Returns:
            A function that restores this state.
        """
        mine = (self.nodes, dict(self.initializers), dict(self.sparse), dict(self.retyped))
        names = (list(self.inputs), list(self.outputs))
        parts = [(n, n.op_type, list(n.inputs), list(n.outputs), dict(n.attributes)) for n in self.nodes]
        types = dict(self.types) if self.context.has_types else None
        inner = [g.snapshot() for n in self.nodes for g in n.graphs.values()]

        def restore() -> None:
            for back in inner:
                back()
            nodes, initializers, sparse, retyped = mine
            self._order, self.inputs, self.outputs = _Order(nodes), *map(Names, names)
            self.initializers, self.sparse, self.retyped = dict(initializers), dict(sparse), dict(retyped)
            for node, op_type, ins, outs, attributes in parts:
                node.op_type, node.inputs, node.outputs, node.attributes = op_type, list(ins), list(outs), dict(attributes)
            if types is None:
                self.context.forget()
            else:
                self.types.clear()
                self.types.update(types)
            self.reindex()

        return restore


def _cycle(needs: Sequence[set[int]], stuck: set[int]) -> list[int]:
    """A cycle among the nodes that cannot be ordered."""
    at = min(stuck)
    path: list[int] = []
    while at not in path:  # follow unmet dependencies: eventually a node is met twice
        path.append(at)
        at = min(needs[at] & stuck)
    return path[path.index(at) :][::-1]


def nbytes(tensor: TensorProto) -> int:
    """The bytes of a tensor as an array; approximate for strings."""
    if not dtypes.is_known(tensor.data_type):
        return 0
    return math.prod(max(0, d) for d in tensor.dims) * dtypes.numpy_dtype(tensor.data_type).itemsize


def constant_node(name: str, array: np.ndarray) -> Node:
    """A Constant node that produces the value of this name."""
    return Node("Constant", [], [name], {"value": helper.make_attribute("value", numpy_helper.from_array(array, name))})


def _value(node: Node) -> np.ndarray | None:
    """The value of a Constant node, whichever attribute holds it."""
    for name, attribute in node.attributes.items():
        value = helper.get_attribute_value(attribute)
        if name == "value":
            return tensor_data.tensor(value, None)
        if name == "sparse_value":
            return tensor_data.sparse(value, None)
        if name in ("value_float", "value_floats"):
            return np.asarray(value, np.float32)
        if name in ("value_int", "value_ints"):
            return np.asarray(value, np.int64)
        if name in ("value_string", "value_strings"):
            texts = [v.decode() for v in ([value] if isinstance(value, bytes) else value)]
            return np.asarray(texts, object).reshape(() if name == "value_string" else (-1,))
    return None
