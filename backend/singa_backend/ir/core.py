"""The graph of a model: nodes, and values that know their producer and their uses.

Names are those of onnx-ir.  A use of a value is a pair of a user and a place: a node and the index of an input, a node and the
value of a body that stands for the captured one, or a graph and the index of an output.  So a value is in use if it has uses, and
replacing all uses of a value is one loop, whatever uses it.

A body, which is a graph attribute of a node, is a closed graph: each value of an outer graph that it reads is a value in its
`captured`, and the node's `captures` maps this to the value of the node's graph.

All changes are made by the methods of `Graph` and `Node`, which record how to undo them while there is a `journal`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx import AttributeProto, NodeProto, helper

from ..errors import InvalidModel
from ..proto.values import Value as Declared
from .graph import runnable_order
from .versioned import VersionedOperator

_GAP = 1 << 32
"""The distance between the places of nodes in a new graph."""

Undo = Callable[[], None]
Place = Any
"""The place of a use: the index of an input or output, or the value of a body that stands for a captured one."""


class Value:
    """A value: an input, an initializer, a constant, what a node returns, or a captured value of the enclosing graph.

    Attributes:
        name: its name in a file; "" for a value that has none yet.
        graph: the graph that defines it; None before it belongs to one.
        producer: the node that returns it; None for any other value.
        uses: what uses it: pairs of a node or graph and a place.
        constant: the contents of an initializer or a constant: an array, or a message of a file; None for any other value.
        declared: the declaration of an input or output; None for any other value.
        pinned: whether something else than a node refers to its name, which must not change.
        slot: its number in the program of its graph.
    """

    __slots__ = ("constant", "declared", "graph", "name", "pinned", "producer", "slot", "uses")

    def __init__(
        self, name: str = "", *, graph: Graph | None = None, constant: Any = None, declared: Declared | None = None
    ) -> None:
        self.name, self.graph, self.constant, self.declared = name, graph, constant, declared
        self.producer: Node | None = None
        self.uses: dict[tuple[Any, Place], None] = {}
        self.pinned = False
        self.slot = -1

    def __repr__(self) -> str:
        """Return the name, for debugging."""
        return f"<Value {self.name!r}>"

    @property
    def users(self) -> dict[Node, int]:
        """The nodes that read it, directly or in a body, each with the number of its places."""
        found: dict[Node, int] = {}
        for user, _ in self.uses:
            if isinstance(user, Node):
                found[user] = found.get(user, 0) + 1
        return found

    @property
    def is_output(self) -> bool:
        """Whether it is an output of its graph, or something else refers to its name."""
        return self.pinned or any(isinstance(user, Graph) for user, _ in self.uses)

    @property
    def is_used(self) -> bool:
        """Whether a node reads it, or it is an output, or something else refers to its name."""
        return self.pinned or bool(self.uses)

    @property
    def is_used_once(self) -> bool:
        """Whether one input of one node is its only use."""
        if len(self.uses) != 1 or self.pinned:
            return False
        ((user, place),) = self.uses
        return isinstance(user, Node) and type(place) is int

    def replace_all_uses_with(self, new: Value, *, outputs: bool = True) -> None:
        """Replace this value by another one wherever it is used; `outputs`: also where it is an output of the graph."""
        for user, place in list(self.uses):
            if outputs or isinstance(user, Node):
                user.put(place, new)


@dataclass(eq=False)
class Node:
    """A call of an operator at a schema version, or of a function.

    Attributes:
        op_type: the operator, or the name of the function.
        inputs: the values that it reads; None for an absent one.
        outputs: the values that it returns; None for an absent one.
        attributes: by name: messages as in a file, which `get` decodes, or the keyword arguments of the operator's body, defaults
            included; a body is a Graph.
        domain: of the operator; "" is ONNX's.
        name: of the node, which may be empty.
        overload: of a function.
        opset: the opset of the domain.
        plain: whether all attributes are known: it calls no function of a model, and no attribute refers to one of a function.
        given: the names of the attributes that the model sets.
        operator: the operator at its version; None for a function, and if it was not resolved.
        function: the body of the function; None for an operator.
        forward_graph: for a Gradient, the graph from its xs and zs to its y; None otherwise.
        captures: for each captured value of its bodies, the value of this node's graph that it stands for.
        proto: the message that the node was read from; None for a new one.
        origins: the nodes in whose place it is, for reports.
        graph: the graph that contains it; None for a node that is not in one.
        position: larger for later nodes of the graph.
    """

    op_type: str
    inputs: list[Value | None]
    outputs: list[Value | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""
    name: str = ""
    overload: str = ""
    opset: int = 0
    plain: bool = True
    given: frozenset[str] = frozenset()
    operator: VersionedOperator | None = None
    function: Graph | None = None
    forward_graph: Graph | None = None
    captures: dict[Value, Value] = field(default_factory=dict)
    proto: NodeProto | None = None
    origins: tuple[Node, ...] = ()
    graph: Graph | None = field(default=None, init=False)
    position: int = field(default=0, init=False)
    _previous: Node | None = field(default=None, init=False, repr=False)
    _next: Node | None = field(default=None, init=False, repr=False)

    def __repr__(self) -> str:
        """Return the operator and the name, for debugging."""
        return f"<Node {self.op_type} {self.name!r}>"

    def __str__(self) -> str:
        """Return the operator type and the name."""
        return f"{self.op_type} {self.name!r}"

    @property
    def title(self) -> str:
        """The node's name, or its operator and outputs."""
        return self.name or f"{self.op_type} of {', '.join(repr(o.name) for o in self.outputs if o is not None)}"

    def is_(self, *op_types: str) -> bool:
        """Whether it is plain and calls one of these operators of ONNX's domain."""
        return self.plain and not self.domain and self.op_type in op_types

    @property
    def version(self) -> int | None:
        """The schema version of the operator; None for a function, and if it was not resolved."""
        return self.operator.version if self.operator is not None else None

    @property
    def bodies(self) -> list[Graph]:
        """The graphs in the attributes."""
        found: list[Graph] = []
        for value in self.attributes.values():
            if isinstance(value, Graph):
                found.append(value)
            elif type(value) is tuple and value and isinstance(value[0], Graph):
                found += value
        return found

    @property
    def graphs(self) -> list[Graph]:
        """The graphs in the attributes, and the body of a function."""
        if not self.attributes and self.function is None:
            return []
        return self.bodies if self.function is None else [*self.bodies, self.function]

    @property
    def reads(self) -> list[Value]:
        """All values of its graph that it reads: its inputs, then those that its bodies capture."""
        found = [v for v in self.inputs if v is not None]
        return [*found, *self.captures.values()] if self.captures else found

    @property
    def results(self) -> list[Value]:
        """Its outputs without the absent ones."""
        return [o for o in self.outputs if o is not None]

    @property
    def has_one_output(self) -> bool:
        """Whether all outputs but the first are absent."""
        return bool(self.outputs) and self.outputs[0] is not None and not any(self.outputs[1:])

    def input(self, i: int) -> Value | None:
        """An input; None for an absent one."""
        return self.inputs[i] if i < len(self.inputs) else None

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute: a number, a tuple of numbers, a str, a Graph or a message; `default` if it is absent or None."""
        found = self.attributes.get(name)
        if isinstance(found, AttributeProto):
            value = helper.get_attribute_value(found)
            if found.type in (AttributeProto.INTS, AttributeProto.FLOATS):
                return tuple(value)
            found = value
        if found is None:
            return default
        return found.decode("utf-8", "replace") if isinstance(found, bytes) else found

    def set(self, **attributes: Any) -> None:
        """Set attributes as messages of a file; None removes one."""
        changed = dict(self.attributes)
        for name, value in attributes.items():
            if value is None:
                changed.pop(name, None)
            else:
                empty = AttributeProto.INTS if isinstance(value, (list, tuple)) and not value else None
                changed[name] = helper.make_attribute(name, value, attr_type=empty)
        self.change(attributes=changed)

    def change(self, **fields: Any) -> None:
        """Change the operator, its attributes or the name; values are changed by `put` and `return_`."""
        before = {name: getattr(self, name) for name in fields}
        was = self.op_type

        def assign(values: Mapping[str, Any], old: str) -> None:
            if self.graph is not None and values.get("op_type", old) != old:
                self.graph.rename_kind(self, old, values["op_type"])
            for name, value in values.items():
                setattr(self, name, value)

        assign(fields, was)
        now = self.op_type
        self._record(lambda: assign(before, now))

    def put(self, place: Place, new: Value | None) -> None:
        """Set one input, or one captured value.

        Args:
            place: the index of the input, or the value of a body that stands for the captured one.
            new: the value to read; None for none.
        """
        if type(place) is int:
            old = self.inputs[place]
            self.inputs[place] = new
        else:
            assert new is not None
            old = self.captures.get(place)
            self.captures[place] = new
        if old is new:
            return
        if self.graph is not None:
            if old is not None:
                old.uses.pop((self, place), None)
            if new is not None:
                new.uses[self, place] = None
        self._record(lambda: self.put(place, old))

    def read(self, inputs: Sequence[Value | None]) -> None:
        """Set all inputs; absent ones at the end are removed unless the node has bodies."""
        given = list(inputs)
        while given and given[-1] is None and not self.bodies:
            given.pop()
        before = self.inputs
        self._exchange(given)
        self._record(lambda: self._exchange(before))

    def _exchange(self, inputs: list[Value | None]) -> None:
        graph = self.graph
        for i, v in enumerate(self.inputs) if graph is not None else ():
            if v is not None:
                v.uses.pop((self, i), None)
        self.inputs = inputs
        for i, v in enumerate(inputs) if graph is not None else ():
            if v is not None:
                v.uses[self, i] = None

    def return_(self, i: int, value: Value | None) -> None:
        """Return another value as output `i`: one without a producer; the old one has none afterwards."""
        old = self.outputs[i]
        self._return(i, value)
        self._record(lambda: self._return(i, old))

    def _return(self, i: int, value: Value | None) -> None:
        old = self.outputs[i]
        if old is not None and old.producer is self:
            old.producer = None
        self.outputs[i] = value
        if value is not None and self.graph is not None:
            value.producer, value.graph = self, self.graph

    def _record(self, undo: Undo) -> None:
        if self.graph is not None and self.graph.journal is not None:
            self.graph.journal.add(undo, self)


class Journal:
    """Changes of graphs that may be undone.

    Attributes:
        touched: the nodes that changed, were inserted or removed.
    """

    def __init__(self) -> None:
        self._steps: list[Undo] = []
        self._undoing = False
        self.touched: dict[Node, None] = {}

    def add(self, undo: Undo, *nodes: Node) -> None:
        """Record a change."""
        if not self._undoing:
            self._steps.append(undo)
            self.touched.update(dict.fromkeys(nodes))

    def __len__(self) -> int:
        """Return the number of changes."""
        return len(self._steps)

    def __bool__(self) -> bool:
        """Return True: a journal without changes is a journal."""
        return True

    def undo(self, since: int = 0) -> None:
        """Undo the changes after the first `since`."""
        self._undoing = True
        try:
            while len(self._steps) > since:
                self._steps.pop()()
        finally:
            self._undoing = False


class Graph:
    """Nodes in an order, and the values between them.

    Attributes:
        name: of the graph.
        inputs: the required inputs, in order.
        optional_inputs: the inputs that have an initializer, which an input of that name replaces.
        outputs: the outputs, in order; a value may occur twice.
        initializers: by name; each has a `constant`.
        captured: the values that stand for values of the graph of the node that contains this body.
        opsets: the opset of each domain; "" is ONNX's.
        owner: the node that contains this body; None for a main graph and for the body of a function.
        proto: the message that it was read from, if it is edited for a file.
        journal: records the changes of this graph; None if they are final.
    """

    def __init__(self, name: str = "", opsets: Mapping[str, int] | None = None) -> None:
        self.name, self.opsets = name, opsets if opsets is not None else {}
        self.inputs: list[Value] = []
        self.optional_inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.initializers: dict[str, Value] = {}
        self.captured: list[Value] = []
        self.owner: Node | None = None
        self.proto: Any = None
        self.journal: Journal | None = None
        self._first: Node | None = None
        self._last: Node | None = None
        self._all: tuple[Node, ...] | None = ()
        self._kinds: dict[str, dict[Node, None]] = {}

    def __repr__(self) -> str:
        """Return the name, for debugging."""
        return f"<Graph {self.name!r}>"

    # --- nodes in order

    def __iter__(self) -> Iterator[Node]:
        """Iterate over the nodes in order; nodes may be inserted and removed meanwhile."""
        node = self._first
        while node is not None:
            if node.graph is not self:  # removed meanwhile; its links still lead on
                node = node._next
                continue
            following = node._next
            yield node
            node = node._next if node.graph is self else following

    def __len__(self) -> int:
        """Return the number of nodes."""
        return sum(map(len, self._kinds.values()))

    def __bool__(self) -> bool:
        """Return True: a graph without nodes is a graph."""
        return True

    def __contains__(self, node: object) -> bool:
        """Return whether a node is in this graph."""
        return isinstance(node, Node) and node.graph is self

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes in order; kept until the next change."""
        if self._all is None:
            self._all = tuple(self)
        return self._all

    def named(self, *op_types: str) -> list[Node]:
        """The nodes that call operators of these names, in any domain, each name's in the order of their addition."""
        return [node for name in op_types for node in self._kinds.get(name, ())]

    def rename_kind(self, node: Node, old: str, new: str) -> None:
        """Note that a node calls another operator."""
        del self._kinds[old][node]
        self._kinds.setdefault(new, {})[node] = None

    def following(self, node: Node | None) -> Node | None:
        """The next node; the first one after None, None after the last one."""
        return self._first if node is None else node._next

    def append(self, node: Node) -> Node:
        """Add a node at the end."""
        return self.insert(node)

    def insert(self, node: Node, before: Node | None = None) -> Node:
        """Add a node; at the end if `before` is None."""
        self._link(node, before)
        if self.journal is not None:
            self.journal.add(lambda: self._unlink(node), node)
        return node

    def remove(self, *gone: Node) -> None:
        """Remove nodes; their outputs have no producer afterwards."""
        for node in gone:
            before = node._next
            self._unlink(node)
            if self.journal is not None:

                def undo(node: Node = node, before: Node | None = before) -> None:
                    self._link(node, before)

                self.journal.add(undo, node)

    def sort(self) -> None:
        """Sort the nodes topologically; a valid order is kept, and the sort is stable.

        Raises:
            InvalidModel: two nodes return one value (SX102), or the nodes have a cycle (SX101).
        """
        nodes = self.nodes
        place = {node: i for i, node in enumerate(nodes)}
        needs: list[set[int]] = []
        for node in nodes:
            for o in node.outputs:
                if o is not None and o.producer is not node:
                    raise InvalidModel(f"value {o.name!r} is defined more than once", code="SX102", node=node.title)
            makers = [v.producer for v in node.reads]
            needs.append({place[maker] for maker in makers if maker is not None and maker in place})
        order = runnable_order(needs)
        if len(order) < len(needs):
            stuck = _cycle(needs, {*range(len(needs))} - {*order})
            shown = ", ".join(repr(nodes[i].title) for i in stuck[:8]) + (", ..." if len(stuck) > 8 else "")
            where = nodes[stuck[0]].title
            raise InvalidModel(f"the graph has a cycle among the nodes {shown}", code="SX101", node=where)
        if order != list(range(len(nodes))):
            self._arrange([nodes[i] for i in order])
            if self.journal is not None:
                self.journal.add(lambda: self._arrange(nodes))

    def _arrange(self, nodes: Sequence[Node]) -> None:
        for i, (previous, node, following) in enumerate(zip((None, *nodes), nodes, (*nodes[1:], None), strict=False)):
            node._previous, node._next, node.position = previous, following, i * _GAP
        self._first, self._last, self._all = (nodes[0] if nodes else None), (nodes[-1] if nodes else None), None

    def _link(self, node: Node, before: Node | None) -> None:
        previous = self._last if before is None else before._previous
        node.graph, node._previous, node._next = self, previous, before
        if previous is None:
            self._first = node
        else:
            previous._next = node
        if before is None:
            self._last = node
            node.position = _GAP if previous is None else previous.position + _GAP
        else:
            before._previous = node
            node.position = before.position - _GAP if previous is None else (previous.position + before.position) // 2
        self._all = None
        self._kinds.setdefault(node.op_type, {})[node] = None
        if before is not None and previous is not None and node.position == previous.position:  # no room between them
            for i, n in enumerate(self):
                n.position = i * _GAP
        for i, v in enumerate(node.inputs):
            if v is not None:
                v.uses[node, i] = None
        for inner, v in node.captures.items():
            v.uses[node, inner] = None
        for v in node.outputs:
            if v is not None:
                v.producer, v.graph = node, self
        for body in node.bodies:
            if body.owner is None:
                body.owner = node

    def _unlink(self, node: Node) -> None:
        previous, following = node._previous, node._next
        if previous is None:
            self._first = following
        else:
            previous._next = following
        if following is None:
            self._last = previous
        else:
            following._previous = previous
        node.graph = None  # its own links stay, so that an iteration goes on
        self._all = None
        del self._kinds[node.op_type][node]
        for i, v in enumerate(node.inputs):
            if v is not None:
                v.uses.pop((node, i), None)
        for inner, v in node.captures.items():
            v.uses.pop((node, inner), None)
        for v in node.outputs:
            if v is not None and v.producer is node:
                v.producer = None

    # --- values

    def add_input(self, value: Value, *, optional: bool = False) -> Value:
        """Add an input; `optional` for one that has an initializer."""
        value.graph = self
        values = self.optional_inputs if optional else self.inputs
        values.append(value)
        if self.journal is not None:
            self.journal.add(lambda: values.remove(value))
        return value

    def remove_inputs(self, values: Collection[Value]) -> None:
        """Remove inputs."""
        before = self.inputs, self.optional_inputs
        self.inputs, self.optional_inputs = ([v for v in held if v not in values] for held in before)
        if self.journal is not None:

            def undo() -> None:
                self.inputs, self.optional_inputs = before

            self.journal.add(undo)

    def add_initializer(self, value: Value) -> Value:
        """Add a value with a constant under its name."""
        value.graph = self
        self.initializers[value.name] = value
        if self.journal is not None:
            self.journal.add(lambda: self._drop_initializer(value))
        return value

    def _drop_initializer(self, value: Value) -> None:
        del self.initializers[value.name]

    def remove_initializer(self, *values: Value) -> None:
        """Remove initializers."""
        before = dict(self.initializers)
        for value in values:
            self._drop_initializer(value)
        if self.journal is not None:

            def undo() -> None:
                self.initializers = before

            self.journal.add(undo)

    def set_outputs(self, values: Iterable[Value]) -> None:
        """Set all outputs."""
        for i, v in enumerate(self.outputs):
            v.uses.pop((self, i), None)
        before, self.outputs = self.outputs, list(values)
        for i, v in enumerate(self.outputs):
            v.uses[self, i] = None
        if self.journal is not None:
            self.journal.add(lambda: self.set_outputs(before))

    def put(self, place: Place, new: Value) -> None:
        """Set one output.

        Args:
            place: its index.
            new: the value.
        """
        old = self.outputs[place]
        if old is new:
            return
        self.outputs[place] = new
        old.uses.pop((self, place), None)
        new.uses[self, place] = None
        if self.journal is not None:
            self.journal.add(lambda: self.put(place, old))

    def capture(self, value: Value) -> Value:
        """The value of this graph that stands for one of an enclosing graph; the value itself if it is of this graph.

        Args:
            value: a value of this graph, or of a graph around it.
        """
        if value.graph is self:
            return value
        owner = self.owner
        assert owner is not None and owner.graph is not None, "the value is of no graph around this one"
        outer = owner.graph.capture(value)
        for inner in self.captured:
            if owner.captures.get(inner) is outer:
                return inner
        made = Value(outer.name, graph=self)
        self._capture(made, outer)
        return made

    def _capture(self, inner: Value, outer: Value) -> None:
        owner = self.owner
        assert owner is not None
        self.captured.append(inner)
        owner.captures[inner] = outer
        outer.uses[owner, inner] = None
        if self.journal is not None:
            self.journal.add(lambda: self._release(inner))

    def _release(self, inner: Value) -> None:
        owner = self.owner
        assert owner is not None
        self.captured.remove(inner)
        outer = owner.captures.pop(inner)
        outer.uses.pop((owner, inner), None)
        if self.journal is not None:
            self.journal.add(lambda: self._capture(inner, outer))

    def release_captured(self) -> None:
        """Let one value stand for each value of the enclosing graph that this body reads, and none for any other value."""
        assert self.owner is not None
        first: dict[Value, Value] = {}
        for inner in list(self.captured):
            same = first.setdefault(self.owner.captures[inner], inner)
            if same is not inner:
                inner.replace_all_uses_with(same)
            if not inner.uses:
                self._release(inner)

    def source(self, value: Value) -> Value:
        """The value that a captured one stands for, in whichever graph that is defined; any other value itself."""
        graph: Graph | None = self
        while graph is not None and graph.owner is not None and value in graph.owner.captures:
            value, graph = graph.owner.captures[value], graph.owner.graph
        return value

    def drop_unused(self, values: Iterable[Value | None], keep: Collection[str] = ()) -> None:
        """Remove the producers of values that nothing uses, and the nodes before them that nothing uses then.

        Args:
            values: the values.
            keep: operators whose nodes stay.
        """
        pending = list(values)
        while pending:
            value = pending.pop()
            node = None if value is None else value.producer
            if node is None or node.graph is not self or node.op_type in keep:
                continue
            if not any(o is not None and o.is_used for o in node.outputs):
                self.remove(node)
                pending += node.reads

    # --- graphs within

    def walk(self) -> Iterator[Graph]:
        """Iterate over the bodies within, the innermost first, and this graph last.

        Yields:
            The graphs.
        """
        for node in self.nodes:
            for body in node.bodies:
                yield from body.walk()
        yield self

    def all_nodes(self) -> Iterator[Node]:
        """Iterate over every node, those of bodies and functions included; each body of a function once.

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


def _cycle(needs: Sequence[set[int]], stuck: set[int]) -> list[int]:
    """A cycle among the nodes that cannot be ordered."""
    at = min(stuck)
    path: list[int] = []
    while at not in path:  # follow unmet dependencies: eventually a node is met twice
        path.append(at)
        at = min(needs[at] & stuck)
    return path[path.index(at) :][::-1]
