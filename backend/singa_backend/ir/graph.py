"""The graph of a model: nodes, and values that know their producer and their uses.

Names are those of onnx-ir.  A use of a value is a pair of a user and a place: a node and the index of an input, a node and the
value of a body that stands for the captured one, or a reference to a graph and the index of an output.  So a value is in use if
it has uses, and replacing all uses of a value is one loop, whatever uses it.

A body, which is a graph attribute of a node, is a closed graph: each value of an outer graph that it reads is a value in its
`captured`, and the node's `captures` maps this to the value of the node's graph.

Nodes and values refer to their graph weakly, and a graph that is released takes its nodes and values apart: the memory of a model
is free as soon as nothing refers to its graph.

All changes are made by the methods of `Graph` and `Node`, which record how to undo them while there is a `journal`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from onnx import AttributeProto, NodeProto, helper

from ..errors import InvalidModel
from ..proto.values import Value as Declared
from .gradient import Gradient
from .journal import Journal, Undo
from .order import cycle, runnable_order
from .versioned import VersionedOperator

ABSENT = -1
"""The slot of an input or output that a node omits."""

_GAP = 1 << 32
"""The distance between the places of nodes in a new graph."""

_WRITING = threading.RLock()
"""Held while the body of a gradient is written: threads that run one graph share it."""

Place = Any
"""The place of a use: the index of an input or output, or the value of a body that stands for a captured one."""


class Value:
    """A value: an input, an initializer, a constant, what a node returns, or a captured value of the enclosing graph.

    Attributes:
        name: its name in a file; "" for a value that has none yet.
        graph: the graph that defines it; None before it belongs to one.
        producer: the node that returns it; None for any other value.
        uses: what uses it: pairs of a node, or a reference to a graph, and a place.
        constant: the contents of an initializer or a constant: an array, or a message of a file; None for any other value.
        declared: the declaration of an input; None for any other value.
        pinned: whether something else than a node refers to its name, which must not change.
        slot: its number in the run order of its graph.
    """

    __slots__ = ("_graph", "constant", "declared", "name", "pinned", "producer", "slot", "uses")

    def __init__(
        self, name: str = "", *, graph: Graph | None = None, constant: Any = None, declared: Declared | None = None
    ) -> None:
        self.name, self.constant, self.declared = name, constant, declared
        self._graph: weakref.ref[Graph] | None = None if graph is None else graph.ref
        self.producer: Node | None = None
        self.uses: dict[tuple[Any, Place], None] = {}
        self.pinned = False
        self.slot = -1

    @property
    def graph(self) -> Graph | None:
        """The graph that defines it; None before it belongs to one."""
        return None if self._graph is None else self._graph()

    def __str__(self) -> str:
        """Return the name, and the declared type of an input, such as "x: float[n, 3]"."""
        return str(self.declared or self.name)

    @property
    def kind(self) -> str:
        """The declared kind of an input; "" if it is not declared."""
        return self.declared.kind if self.declared is not None else ""

    @property
    def dtype(self) -> np.dtype[Any] | None:
        """The declared dtype of an input; None if it is not declared."""
        return self.declared.dtype if self.declared is not None else None

    @property
    def shape(self) -> tuple[int | str | None, ...] | None:
        """The declared shape of an input; None if it is not declared."""
        return self.declared.shape if self.declared is not None else None

    @property
    def users(self) -> dict[Node, int]:
        """The nodes that read it, directly or in a body, each with the number of its places."""
        counts: dict[Node, int] = {}
        for user, _ in self.uses:
            if isinstance(user, Node):
                counts[user] = counts.get(user, 0) + 1
        return counts

    @property
    def readers(self) -> list[tuple[Node, Place]]:
        """The uses by nodes: the node, and the index of the input or the value of a body that stands for this one."""
        return [(user, place) for user, place in self.uses if isinstance(user, Node)]

    @property
    def is_output(self) -> bool:
        """Whether it is an output of its graph, or something else refers to its name."""
        return self.pinned or any(not isinstance(user, Node) for user, _ in self.uses)

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

    @property
    def original(self) -> Value:
        """The value of a graph around this one that a captured value stands for; any other value itself."""
        value, graph = self, self.graph
        while graph is not None and graph.owner is not None and value in graph.owner.captures:
            value, graph = graph.owner.captures[value], graph.owner.graph
        return value

    def replace_all_uses_with(self, new: Value, *, outputs: bool = True) -> None:
        """Replace this value by another one wherever it is used.

        Args:
            new: the value to use.
            outputs: whether to replace it also where it is an output of the graph.
        """
        for user, place in list(self.uses):
            if isinstance(user, Node):
                user.put(place, new)
            elif outputs and (graph := user()) is not None:
                graph.put(place, new)


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
        plain: whether all attributes of the operator are known: it is not a function of a model, and no attribute refers to one
            of a function.
        given: the names of the attributes that the model sets; if it was built by an interpreter, with their messages and bodies.
        operator: the operator at its version; None for a function, and if it was not resolved.
        function: the body of the function; None for an operator.
        forward_graph: for a Gradient, the graph from its xs and zs to its y; None otherwise.
        captures: for each captured value of its bodies, the value of this node's graph that it stands for.
        proto: the message that the node was read from; None for a new one.
        origins: the nodes in whose place it is, for reports.
        gradient: the gradient that it computes, or that it is a part of, or that needs it in training form; None for any other.
        position: larger for later nodes of the graph.
        input_slots: the numbers of the inputs in the run order of the graph; ABSENT (-1) for an absent one.
        output_slots: the same of the outputs.
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
    given: Collection[str] = frozenset()
    operator: VersionedOperator | None = None
    function: Graph | None = None
    forward_graph: Graph | None = None
    captures: dict[Value, Value] = field(default_factory=dict)
    proto: NodeProto | None = None
    origins: tuple[Node, ...] = ()
    gradient: Gradient | None = None
    _graph: weakref.ref[Graph] | None = field(default=None, init=False, repr=False)
    position: int = field(default=0, init=False)
    input_slots: tuple[int, ...] = field(default=(), init=False)
    output_slots: tuple[int, ...] = field(default=(), init=False)
    _previous: Node | None = field(default=None, init=False, repr=False)
    _next: Node | None = field(default=None, init=False, repr=False)

    def __repr__(self) -> str:
        """Return the operator and the name, for debugging."""
        return f"<Node {self.op_type} {self.name!r}>"

    def __str__(self) -> str:
        """Return the operator type and the name."""
        return f"{self.op_type} {self.name!r}"

    @property
    def graph(self) -> Graph | None:
        """The graph that contains it; None for a node that is not in one."""
        return None if self._graph is None else self._graph()

    @property
    def title(self) -> str:
        """The node's name, or its operator and outputs."""
        return self.name or f"{self.op_type} of {', '.join(repr(o.name) for o in self.outputs if o is not None)}"

    def is_(self, *op_types: str) -> bool:
        """Test for operators of ONNX's domain.

        Args:
            *op_types: the operators.

        Returns:
            Whether the node is plain and calls one of them.
        """
        return self.plain and not self.domain and self.op_type in op_types

    @property
    def version(self) -> int | None:
        """The schema version of the operator; None for a function, and if it was not resolved."""
        return self.operator.version if self.operator is not None else None

    @property
    def bodies(self) -> list[Graph]:
        """The graphs in the attributes."""
        graphs: list[Graph] = []
        for value in self.attributes.values():
            kind = type(value)
            if kind is Graph:
                graphs.append(value)
            elif kind is tuple and value and type(value[0]) is Graph:
                graphs += value
        return graphs

    @property
    def graphs(self) -> list[Graph]:
        """The graphs in the attributes, and the body of a function."""
        if not self.attributes and self.function is None:
            return []
        return self.bodies if self.function is None else [*self.bodies, self.function]

    def body(self) -> Graph | None:
        """Return the body of a function or of a gradient, which is written now if it is not known yet.

        Returns:
            The body; None for any other node.
        """
        if self.function is None and self.gradient is not None and self.gradient.write is not None:
            with _WRITING:
                self.function = self.function or self.gradient.write()
        return self.function

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names of the inputs; "" for an absent one."""
        return tuple(["" if v is None else v.name for v in self.inputs])

    @property
    def output_names(self) -> tuple[str, ...]:
        """The names of the outputs; "" for an absent one."""
        return tuple(["" if v is None else v.name for v in self.outputs])

    @property
    def reads(self) -> list[Value]:
        """The values of its graph that it reads: its inputs, then those that its bodies capture."""
        inputs = [v for v in self.inputs if v is not None]
        return [*inputs, *self.captures.values()] if self.captures else inputs

    @property
    def results(self) -> list[Value]:
        """The outputs without the absent ones."""
        return [o for o in self.outputs if o is not None]

    @property
    def has_one_output(self) -> bool:
        """Whether all outputs but the first are absent."""
        return bool(self.outputs) and self.outputs[0] is not None and not any(self.outputs[1:])

    def input(self, i: int) -> Value | None:
        """Return an input.

        Args:
            i: its position.

        Returns:
            The value; None for an absent one.
        """
        return self.inputs[i] if i < len(self.inputs) else None

    def copy(
        self,
        inputs: Iterable[Value | None],
        outputs: Iterable[Value | None],
        origins: tuple[Node, ...],
        copies: Mapping[Value, Value] | None = None,
    ) -> Node:
        """Return a node that calls the same on other values; it shares the attributes and bodies.

        Args:
            inputs: the values that it reads.
            outputs: the values that it returns.
            origins: the nodes in whose place it is.
            copies: the values that its bodies capture in place of others, by those; they capture the others as this node does.

        Returns:
            The node, which is in no graph.
        """
        captures = {inner: (copies or {}).get(outer, outer) for inner, outer in self.captures.items()}
        return Node(
            self.op_type, [*inputs], [*outputs], self.attributes, self.domain, self.name, self.overload, self.opset, self.plain,
            self.given, self.operator, self.function, self.forward_graph, captures, None, origins, self.gradient,
        )  # fmt: skip

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute.

        Args:
            name: of the attribute.
            default: the value of one that is absent or None.

        Returns:
            A number, a tuple of numbers, a str, a Graph or a message.
        """
        attribute = self.attributes.get(name)
        if isinstance(attribute, AttributeProto):
            value = helper.get_attribute_value(attribute)
            if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
                return tuple(value)
            attribute = value
        if attribute is None:
            return default
        return attribute.decode("utf-8", "replace") if isinstance(attribute, bytes) else attribute

    def set(self, **attributes: Any) -> None:
        """Set attributes as messages of a file.

        Args:
            **attributes: values by name; None removes the attribute.
        """
        changed = dict(self.attributes)
        for name, value in attributes.items():
            if value is None:
                changed.pop(name, None)
            else:
                empty = AttributeProto.INTS if isinstance(value, (list, tuple)) and not value else None
                changed[name] = helper.make_attribute(name, value, attr_type=empty)
        self.change(attributes=changed)

    def change(self, **fields: Any) -> None:
        """Change the operator, its attributes or the name; inputs and outputs are changed by `put`, `read` and `return_`.

        Args:
            **fields: attributes of this class by name, with their new values.
        """
        before = {name: getattr(self, name) for name in fields}
        was = self.op_type

        def assign(values: Mapping[str, Any], old: str) -> None:
            if self.graph is not None and values.get("op_type", old) != old:
                self.graph._rename_kind(self, old, values["op_type"])
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
        """Set all inputs; absent ones at the end are removed unless the node has bodies.

        Args:
            inputs: the values to read; None for an absent one.
        """
        values = list(inputs)
        while values and values[-1] is None and not self.bodies:
            values.pop()
        before = self.inputs
        self._exchange(values)
        self._record(lambda: self._exchange(before))

    def _exchange(self, inputs: list[Value | None]) -> None:
        linked = self.graph is not None
        if linked:
            self._drop_input_uses()
        self.inputs = inputs
        if linked:
            self._add_input_uses()

    def _add_input_uses(self) -> None:
        for i, v in enumerate(self.inputs):
            if v is not None:
                v.uses[self, i] = None

    def _drop_input_uses(self) -> None:
        for i, v in enumerate(self.inputs):
            if v is not None:
                v.uses.pop((self, i), None)

    def return_(self, i: int, value: Value | None) -> None:
        """Return another value; the old one has no producer afterwards.

        Args:
            i: the position of the output.
            value: a value without a producer; None for an absent output.
        """
        old = self.outputs[i]
        self._return(i, value)
        self._record(lambda: self._return(i, old))

    def _return(self, i: int, value: Value | None) -> None:
        old = self.outputs[i]
        if old is not None and old.producer is self:
            old.producer = None
        self.outputs[i] = value
        if value is not None and self.graph is not None:
            value.producer, value._graph = self, self._graph

    def _record(self, undo: Undo) -> None:
        graph = self.graph
        if graph is not None:
            graph.run_order = None
            if graph.journal is not None:
                graph.journal.add(undo, self)


class Graph:
    """Nodes in an order, and the values between them.

    Attributes:
        name: of the graph.
        inputs: the required inputs, in order.
        optional_inputs: the inputs that have an initializer, which an input of that name replaces.
        outputs: the outputs, in order; a value may occur twice.
        declared_outputs: the declaration of each output, if the graph was read to run.
        initializers: by name; each has a `constant`.
        captured: the values that stand for values of the graph of the node that contains this body.
        run_order: the numbered form that runs, which `ir.run_order` keeps here.
        opsets: the opset of each domain; "" is ONNX's.
        proto: the message that it was read from, if it is edited for a file.
        journal: records the changes of this graph; None if they are final.
        warnings: what the reader read in another way than the file states it, one sentence each.
        is_step: whether it is a training step.
        marked: the initializers that the file lists as parameters under the key PARAMETERS of its metadata.
    """

    from_onnx: ClassVar[Callable[..., Graph]]
    """Deprecated: use `singa_backend.read`, whose module sets this."""

    def __init__(self, name: str = "", opsets: Mapping[str, int] | None = None) -> None:
        self.name, self.opsets = name, opsets if opsets is not None else {}
        self.inputs: list[Value] = []
        self.optional_inputs: list[Value] = []
        self.outputs: list[Value] = []
        self.declared_outputs: tuple[Declared, ...] = ()
        self.initializers: dict[str, Value] = {}
        self.captured: list[Value] = []
        self.ref = weakref.ref(self)
        self._owner: weakref.ref[Node] | None = None
        self.proto: Any = None
        self.journal: Journal | None = None
        self.warnings: tuple[str, ...] = ()
        self.marked: frozenset[str] = frozenset()
        self.is_step = False
        self.run_order: Any = None
        self._first: Node | None = None
        self._last: Node | None = None
        self._all: tuple[Node, ...] | None = ()
        self._kinds: dict[str, dict[Node, None]] = {}

    def __del__(self) -> None:
        """Take the nodes and values apart, which refer to each other, so that their memory is free at once."""
        for i, v in enumerate(self.outputs):
            v.uses.pop((self.ref, i), None)
        node, self.journal = self._first, None
        while node is not None:
            following = node._next
            self._unlink(node)
            node._next = node._previous = None
            node = following

    @property
    def owner(self) -> Node | None:
        """The node that contains this body; None for a main graph and for the body of a function."""
        return None if self._owner is None else self._owner()

    @owner.setter
    def owner(self, node: Node) -> None:
        self._owner = weakref.ref(node)

    # --- as a whole

    @property
    def declared_inputs(self) -> list[Declared]:
        """The declaration of each input."""
        return [v.declared or Declared(v.name) for v in self.inputs]

    @property
    def declared_optional_inputs(self) -> list[Declared]:
        """The declaration of each optional input."""
        return [v.declared or Declared(v.name) for v in self.optional_inputs]

    @property
    def states(self) -> dict[str, Any]:
        """The constants of the initializers by name: host arrays, if the graph was read to run."""
        return {name: value.constant for name, value in self.initializers.items()}

    @property
    def values(self) -> dict[str, Value]:
        """The values by name: inputs, initializers, captured ones, and what nodes return."""
        results = [o for node in self.nodes for o in node.outputs if o is not None]
        return {v.name: v for v in (*self.inputs, *self.initializers.values(), *self.captured, *results)}

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

    @property
    def last(self) -> Node | None:
        """The last node; None if there is none."""
        return self._last

    def named(self, *op_types: str) -> list[Node]:
        """Return the nodes that call operators of these names, in whichever domain.

        Args:
            *op_types: the names.

        Returns:
            The nodes, those of a name in the order of their addition.
        """
        return [node for name in op_types for node in self._kinds.get(name, ())]

    @property
    def op_types(self) -> list[str]:
        """The operators and functions that nodes call, in the order of their addition."""
        return [name for name, nodes in self._kinds.items() if nodes]

    def _rename_kind(self, node: Node, old: str, new: str) -> None:
        """Note that a node calls another operator."""
        del self._kinds[old][node]
        self._kinds.setdefault(new, {})[node] = None

    def following(self, node: Node | None) -> Node | None:
        """Return the next node.

        Args:
            node: a node of this graph, or None.

        Returns:
            The node after it; after None the first one; None after the last one.
        """
        return self._first if node is None else node._next

    def append(self, node: Node) -> Node:
        """Add a node at the end.

        Args:
            node: a node that is in no graph.

        Returns:
            The node.
        """
        return self.insert(node)

    def insert(self, node: Node, before: Node | None = None) -> Node:
        """Add a node.

        Args:
            node: a node that is in no graph.
            before: the node before which to insert it; None for the end.

        Returns:
            The node.
        """
        self._link(node, before)
        if self.journal is not None:
            self.journal.add(lambda: self._unlink(node), node)
        return node

    def remove(self, *gone: Node) -> None:
        """Remove nodes; their outputs have no producer afterwards.

        Args:
            *gone: nodes of this graph.
        """
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
        if self._is_sorted():
            return
        place = {node: i for i, node in enumerate(nodes)}
        makers = [[v.producer for v in node.reads] for node in nodes]
        needs = [{place[maker] for maker in of if maker is not None and maker in place} for of in makers]
        order = runnable_order(needs)
        if len(order) < len(needs):
            stuck = cycle(needs, {*range(len(needs))} - {*order})
            shown = ", ".join(repr(nodes[i].title) for i in stuck[:8]) + (", ..." if len(stuck) > 8 else "")
            where = nodes[stuck[0]].title
            raise InvalidModel(f"the graph has a cycle among the nodes {shown}", code="SX101", node=where)
        self._arrange([nodes[i] for i in order])
        if self.journal is not None:
            self.journal.add(lambda: self._arrange(nodes))

    def _is_sorted(self) -> bool:
        """Whether each node follows those that it needs; raises InvalidModel if two nodes return one value (SX102)."""
        in_order = True
        for node in self.nodes:
            for o in node.outputs:
                if o is not None and o.producer is not node:
                    raise InvalidModel(f"value {o.name!r} is defined more than once", code="SX102", node=node.title)
            for v in node.reads:
                maker = v.producer
                if maker is not None and maker.position >= node.position and maker._graph is self.ref:
                    in_order = False
        return in_order

    def _arrange(self, nodes: Sequence[Node]) -> None:
        for i, (previous, node, following) in enumerate(zip((None, *nodes), nodes, (*nodes[1:], None), strict=False)):
            node._previous, node._next, node.position = previous, following, i * _GAP
        self._first, self._last = (nodes[0], nodes[-1]) if nodes else (None, None)
        self._all = self.run_order = None

    def _link(self, node: Node, before: Node | None) -> None:
        assert before is None or before.graph is self, "the node before which one is inserted is not in the graph"
        previous = self._last if before is None else before._previous
        node._graph, node._previous, node._next = self.ref, previous, before
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
        self._all = self.run_order = None
        self._kinds.setdefault(node.op_type, {})[node] = None
        if before is not None and previous is not None and node.position == previous.position:  # no room between them
            for i, n in enumerate(self):
                n.position = i * _GAP
        node._add_input_uses()
        for inner, v in node.captures.items():
            v.uses[node, inner] = None
        for o in node.outputs:
            if o is not None:
                o.producer, o._graph = node, self.ref

    def arrange(self, nodes: Sequence[Node]) -> None:
        """Contain these nodes in this order, in place of all others; it cannot be undone.

        Args:
            nodes: the nodes.
        """
        self.remove(*self.nodes)
        for node in nodes:
            self.append(node)

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
        node._graph = None  # its own links stay, so that an iteration goes on
        self._all = self.run_order = None
        del self._kinds[node.op_type][node]
        node._drop_input_uses()
        for inner, v in node.captures.items():
            v.uses.pop((node, inner), None)
        for o in node.outputs:
            if o is not None and o.producer is node:
                o.producer = None

    # --- values

    def add_input(self, value: Value, *, optional: bool = False) -> Value:
        """Add an input.

        Args:
            value: the input.
            optional: whether it has an initializer.

        Returns:
            The value.
        """
        value._graph = self.ref
        values, self.run_order = self.optional_inputs if optional else self.inputs, None
        values.append(value)
        if self.journal is not None:
            self.journal.add(lambda: values.remove(value))
        return value

    def remove_inputs(self, values: Collection[Value]) -> None:
        """Remove inputs.

        Args:
            values: the inputs.
        """
        before, self.run_order = (self.inputs, self.optional_inputs), None
        self.inputs, self.optional_inputs = ([v for v in inputs if v not in values] for inputs in before)
        if self.journal is not None:

            def undo() -> None:
                self.inputs, self.optional_inputs = before

            self.journal.add(undo)

    def add_captured(self, value: Value) -> Value:
        """Add a value that stands for one of the graph around this body.

        Args:
            value: the value.

        Returns:
            The value.
        """
        value._graph = self.ref
        self.run_order = None
        self.captured.append(value)
        return value

    def add_initializer(self, value: Value) -> Value:
        """Add an initializer.

        Args:
            value: the value.

        Returns:
            The value.
        """
        value._graph = self.ref
        self.run_order = None
        self.initializers[value.name] = value
        if self.journal is not None:
            self.journal.add(lambda: self._drop_initializer(value))
        return value

    def _drop_initializer(self, value: Value) -> None:
        self.run_order = None
        del self.initializers[value.name]

    def remove_initializer(self, *values: Value) -> None:
        """Remove initializers.

        Args:
            *values: the initializers.
        """
        before = self.initializers if self.journal is None else dict(self.initializers)
        for value in values:
            self._drop_initializer(value)
        if self.journal is not None:

            def undo() -> None:
                self.initializers = before

            self.journal.add(undo)

    def set_outputs(self, values: Iterable[Value]) -> None:
        """Set all outputs.

        Args:
            values: the outputs, in order.
        """
        for i, v in enumerate(self.outputs):
            v.uses.pop((self.ref, i), None)
        before, self.outputs, self.run_order = self.outputs, list(values), None
        for i, v in enumerate(self.outputs):
            v.uses[self.ref, i] = None
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
        self.run_order = None
        self.outputs[place] = new
        old.uses.pop((self.ref, place), None)
        new.uses[self.ref, place] = None
        if self.journal is not None:
            self.journal.add(lambda: self.put(place, old))

    def capture(self, value: Value) -> Value:
        """Return the value of this graph that stands for one of an enclosing graph; the value itself if it is of this graph.

        Args:
            value: a value of this graph, or of a graph around it.

        Returns:
            The value to use in this graph.
        """
        if value.graph is self:
            return value
        owner = self.owner
        assert owner is not None and owner.graph is not None, "the value is of no graph around this one"
        outer = owner.graph.capture(value)
        for user, place in outer.uses:
            if user is owner and isinstance(place, Value) and place.graph is self:
                return place
        inner = Value(outer.name, graph=self)
        self._capture(inner, outer)
        return inner

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
            if inner.uses:
                same = first.setdefault(self.owner.captures[inner], inner)
                if same is inner:
                    continue
                inner.replace_all_uses_with(same)
            self._release(inner)

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

    def remove_unused(self) -> int:
        """Remove the nodes of which no result is used.

        Returns:
            The number of removed nodes.
        """
        count = len(self)
        for node in reversed(self.nodes):
            if not any(o.is_used for o in node.results):
                self.remove(node)
        return count - len(self)

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


def producer(value: Value | None) -> Node | None:
    """The node that returns a value.

    Args:
        value: a value; None for an absent one.

    Returns:
        The node; None for inputs, constants and an absent value.
    """
    return None if value is None else value.producer
