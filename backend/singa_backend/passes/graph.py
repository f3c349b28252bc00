"""A graph that can be edited: nodes in order, who makes and who reads a value, constants as arrays, types where they are known.

Two rules keep every rewrite simple: **a name never changes its value** (a new value gets a fresh name), and TensorProtos and
AttributeProtos are values that nobody changes in place, so that a snapshot costs no weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
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


@dataclass(frozen=True)
class Type:
    """What is known of a tensor: dtype by ONNX's code (0: unknown), shape with names or None for open sizes."""

    dtype: int = 0
    shape: Shape | None = None


@dataclass(eq=False)
class Node:
    """One node.  attributes: by name, graphs apart.  proto: the message that it was read from, None for a new one.

    plain: whether the name means ONNX's own operator with attributes that are all known (no function of the model that
    takes the name, no reference to a function's attribute).
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
        """Whether this is one of these operators of ONNX's own domain."""
        return self.plain and self.domain == "" and self.op_type in names

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute's value: a number, a tuple, a str, a TensorProto."""
        found = self.attributes.get(name)
        if found is None:
            return default
        value = helper.get_attribute_value(found)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        return tuple(value) if found.type in (AttributeProto.INTS, AttributeProto.FLOATS) else value

    def set(self, **attributes: Any) -> None:
        """Give attributes; None takes one away."""
        for name, value in attributes.items():
            if value is None:
                self.attributes.pop(name, None)
            else:
                empty = AttributeProto.INTS if isinstance(value, (list, tuple)) and not value else None
                self.attributes[name] = helper.make_attribute(name, value, attr_type=empty)

    def input(self, i: int) -> str:
        """The name of an input, "" where it is absent."""
        return self.inputs[i] if i < len(self.inputs) else ""

    def only_output(self) -> bool:
        """Whether all outputs but the first are absent."""
        return bool(self.outputs) and not any(self.outputs[1:])

    @property
    def title(self) -> str:
        return self.name or f"{self.op_type} of {', '.join(repr(o) for o in self.outputs if o)}"


class Context(ABC):
    """What the graphs of one model share: names, types, and facts of the model.

    folder: where external data are.  function_names: (domain, name) of the model's functions.
    refused: nodes that could not be computed, which are not tried again.  main: the main graph.
    """

    folder: Path | None
    ir_version: int
    function_names: set[tuple[str, str]]
    refused: set[Node]
    main: GraphEditor

    @abstractmethod
    def fresh(self, wish: str) -> str:
        """A name that nothing in the model has: the wish itself if it is free."""

    @property
    @abstractmethod
    def has_types(self) -> bool:
        """Whether types are inferred for the graphs as they are now."""

    @property
    @abstractmethod
    def types(self) -> dict[int, dict[str, Type]]:
        """The types of values, by the id of their graph; inferred at the first request after `forget`."""

    @abstractmethod
    def forget(self) -> None:
        """Note that the graphs have changed: types must be inferred again."""


class GraphEditor:
    """One graph, or the body of a function, with its index of makers and readers."""

    def __init__(
        self, context: Context, proto: GraphProto | FunctionProto, outer: GraphEditor | None, opsets: dict[str, int]
    ) -> None:
        self.context, self.proto, self.outer, self.opsets = context, proto, outer, opsets
        self.in_function: bool = outer.in_function if outer else isinstance(proto, FunctionProto)
        self.inputs: list[str] = [i if isinstance(i, str) else i.name for i in proto.input]
        self.outputs: list[str] = [o if isinstance(o, str) else o.name for o in proto.output]
        self.initializers: dict[str, TensorProto] = {}
        self.sparse: dict[str, SparseTensorProto] = {}
        self.retyped: dict[int, TypeProto] = {}
        """New types of outputs whose names changed, by their position."""
        self.pinned: set[str] = set()
        """Values that something else than a node names: quantization annotations."""
        if isinstance(proto, GraphProto):
            self.initializers = {t.name: t for t in proto.initializer}
            self.sparse = {t.values.name: t for t in proto.sparse_initializer}
            for note in proto.quantization_annotation:
                self.pinned |= {note.tensor_name, *(e.value for e in note.quant_parameter_tensor_names)}
        self.nodes: list[Node] = [self._read(p) for p in proto.node]
        self._producers: dict[str, Node] = {}
        self._users: dict[str, dict[int, Node]] = {}
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
    def opset(self) -> int:
        return self.opsets.get("", 1)

    # --- the index

    def reindex(self) -> None:
        """Read makers and readers anew, after a change in a subgraph."""
        self._producers = {o: n for n in self.nodes for o in n.outputs if o}
        self._users = {}
        for node in self.nodes:
            self._count(node)

    def _count(self, node: Node) -> None:
        for name in self.reads(node):
            self._users.setdefault(name, {})[id(node)] = node

    def release(self, node: Node) -> None:
        """A node reads nothing any more."""
        for name in self.reads(node):
            self._users.get(name, {}).pop(id(node), None)

    @staticmethod
    def reads(node: Node) -> set[str]:
        """The names that a node reads, what its subgraphs capture included."""
        names = {n for n in node.inputs if n}
        for graph in node.graphs.values():
            names |= graph.free()
        return names

    def free(self) -> set[str]:
        """The names that this graph takes from outside."""
        names = {o for o in self.outputs if o}
        for node in self.nodes:
            names |= self.reads(node)
        names.difference_update(self.inputs, self.initializers, self.sparse, (o for n in self.nodes for o in n.outputs))
        return names

    def producer(self, name: str) -> Node | None:
        """The node of this graph that makes a value."""
        return self._producers.get(name)

    def users(self, name: str) -> list[Node]:
        """The nodes that read a value, those included whose subgraphs do."""
        return list(self._users.get(name, {}).values())

    def defines(self, name: str) -> bool:
        return name in self._producers or name in self.initializers or name in self.sparse or name in self.inputs

    def used(self, name: str) -> bool:
        """Whether anything needs a value: a node, the graph's outputs, an annotation."""
        return bool(self._users.get(name)) or name in self.outputs or name in self.pinned

    def used_once(self, name: str) -> bool:
        """Whether one node reads the value, once and directly, and nothing else needs it."""
        readers = self.users(name)
        return len(readers) == 1 and readers[0].inputs.count(name) == 1 and not self._kept(name, readers[0])

    def _kept(self, name: str, reader: Node) -> bool:
        return name in self.outputs or name in self.pinned or any(name in g.free() for g in reader.graphs.values())

    def walk(self) -> Iterator[GraphEditor]:
        """The graphs within this one, the innermost first, and itself at the end."""
        for node in self.nodes:
            for graph in node.graphs.values():
                yield from graph.walk()
        yield self

    # --- changes

    def insert(self, node: Node, before: Node | None = None, after: Node | None = None) -> None:
        """Put a new node in its place; at the end where no place is named."""
        at = len(self.nodes)
        if before is not None or after is not None:
            at = next(i for i, n in enumerate(self.nodes) if n is before or n is after) + (after is not None)
        self.nodes.insert(at, node)
        self._producers.update({o: node for o in node.outputs if o})
        self._count(node)

    def remove(self, *gone: Node) -> None:
        """Take nodes away; their values must not be needed any more."""
        ids = {id(n) for n in gone}
        self.nodes = [n for n in self.nodes if id(n) not in ids]
        for node in gone:
            self.release(node)
            for o in node.outputs:
                if self._producers.get(o) is node:
                    del self._producers[o]

    def rewire(self, node: Node, inputs: Sequence[str]) -> None:
        """Give a node other inputs."""
        self.release(node)
        node.inputs = list(inputs)
        while node.inputs and not node.inputs[-1] and not node.graphs:
            node.inputs.pop()
        self._count(node)

    def rename_output(self, node: Node, i: int, name: str) -> None:
        """Let a node make its i-th output under another name; who reads the old one is left as it is."""
        old = node.outputs[i]
        if self._producers.get(old) is node:
            del self._producers[old]
        node.outputs[i] = name
        if name:
            self._producers[name] = node

    def replace(self, old: str, new: str) -> None:
        """Let every node, those of subgraphs included, read `new` where it read `old`; outputs of the graph stay."""
        for node in self.users(old):
            self.release(node)
            node.inputs = [new if n == old else n for n in node.inputs]
            for graph in node.graphs.values():
                graph._replace_free(old, new)
            self._count(node)

    def _replace_free(self, old: str, new: str) -> None:
        if self.defines(old) or old not in self.free():
            return
        self.outputs = [new if o == old else o for o in self.outputs]
        self.replace(old, new)

    def bypass(self, node: Node, source: str, output: int = 0) -> bool:
        """Let `source` stand for an output of `node`, which is removed; False where names forbid it.

        The name of a graph output must survive: then the node that makes `source` makes it under that name, unless
        `source` is an input, an initializer, an output itself, or of an outer graph.
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
        """A new node of ONNX's own domain.  name: of its first output; else a fresh one, near `like`.  type: of that output."""
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
        """Whether a constant made of these may be an initializer, which trains: not the floats of Constant nodes."""
        return array.dtype.kind != "f" or any(isinstance(self.tensor(n), TensorProto) for n in names)

    def add_constant(self, array: np.ndarray, like: str = "constant", trains: bool = True) -> str:
        """A new constant: an initializer, in functions and where it must not train a Constant node.

        Before IR version 4 an initializer had to be listed as an input too, which those of the main graph only can be.
        """
        name = self.context.fresh(like)
        tensor = numpy_helper.from_array(np.asarray(array), name)
        if self.in_function or not trains:
            self.types[name] = Type(tensor.data_type, tuple(array.shape))
            self.insert(constant_node(name, array), before=self.nodes[0] if self.nodes else None)
            return name
        net = self.context.main if self.context.ir_version < 4 else self
        net.types[name] = Type(tensor.data_type, tuple(array.shape))
        net.initializers[name] = tensor
        if self.context.ir_version < 4:
            net.inputs.append(name)
        return name

    def sort(self) -> None:
        """Bring the nodes into an order that can be run: as they are where it can be, stable else.

        Raises InvalidModel, naming the nodes of a cycle, or the value that two nodes make.
        """
        makers: dict[str, int] = {}
        for i, node in enumerate(self.nodes):
            for o in node.outputs:
                if o and (o in makers or o in self.initializers or o in self.inputs):
                    raise InvalidModel(f"value {o!r} is defined more than once", code="SX102", node=node.title)
                makers[o] = i
        makers.pop("", None)
        needs = [{makers[n] for n in self.reads(node) if n in makers} for node in self.nodes]
        order = runnable_order(needs)
        if len(order) < len(needs):
            cycle = _cycle(needs, {*range(len(needs))} - {*order})
            names = ", ".join(repr(self.nodes[i].title) for i in cycle[:8]) + (", ..." if len(cycle) > 8 else "")
            where = self.nodes[cycle[0]].title
            raise InvalidModel(f"the graph has a cycle among the nodes {names}", code="SX101", node=where)
        self.nodes = [self.nodes[i] for i in order]
        self.reindex()

    def check(self) -> None:
        """Raise InvalidModel unless every value that is read is defined, once, and the nodes can be ordered."""
        self.sort()
        for name in self.free() if self.outer is None else ():
            reader = next((n.title for n in self.nodes if name in self.reads(n)), "the graph's outputs")
            raise InvalidModel(f"value {name!r}, which {reader} reads, is defined nowhere", code="SX101", node=reader)

    # --- constants and types

    def owner(self, name: str) -> GraphEditor | None:
        """The graph that defines a name as it is seen here: this one, or one around it."""
        net: GraphEditor | None = self
        while net is not None and not net.defines(name):
            net = net.outer
        return net

    def tensor(self, name: str) -> TensorProto | Node | None:
        """Where a constant stands: an initializer that no input can override, or a Constant node; None for anything else."""
        net = self.owner(name) if name else None
        if net is None:
            return None
        if name in net.initializers:
            return None if name in net.inputs and self.context.ir_version >= 4 else net.initializers[name]
        node = net.producer(name)
        return node if node is not None and node.is_("Constant") else None

    def is_constant(self, name: str) -> bool:
        return self.tensor(name) is not None

    def constant_bytes(self, name: str) -> int:
        """The bytes of a constant, without reading it; 0 for what is none."""
        found = self.tensor(name)
        if isinstance(found, Node):
            held = found.get("value")
            found = held if isinstance(held, TensorProto) else None
        return 0 if found is None else nbytes(found)

    def constant(self, name: str, most: int = 1 << 26) -> np.ndarray | None:
        """The value of a constant of at most so many bytes; None for anything else."""
        found = self.tensor(name)
        if found is None or self.constant_bytes(name) > most:
            return None
        try:
            return _value(found) if isinstance(found, Node) else tensor_data.tensor(found, self.context.folder)
        except SonnxError:  # damaged, or external without its folder: not ours to judge
            return None

    @cached_property
    def _no_types(self) -> dict[str, Type]:
        return {}

    @property
    def types(self) -> dict[str, Type]:
        """What shape inference knows of this graph's values; passes add what they make."""
        return self.context.types.get(id(self), self._no_types)

    def type(self, name: str) -> Type:
        """What is known of a value that is seen here."""
        net = self.owner(name)
        if net is None:
            return Type()
        tensor = net.initializers.get(name)
        if tensor is not None:
            return Type(tensor.data_type, tuple(tensor.dims))
        return net.types.get(name, Type())

    def shape(self, name: str) -> Shape | None:
        return self.type(name).shape

    def static(self, name: str) -> tuple[int, ...] | None:
        """The shape of a value where all of it is known."""
        shape = self.shape(name)
        sizes = None if shape is None else [int(d) for d in shape if isinstance(d, int)]
        return None if shape is None or sizes is None or len(sizes) < len(shape) else tuple(sizes)

    def rank(self, name: str) -> int | None:
        shape = self.shape(name)
        return None if shape is None else len(shape)

    # --- snapshots

    def snapshot(self) -> Callable[[], None]:
        """What brings this graph, and those within it, back to where they are now."""
        mine = (list(self.nodes), dict(self.initializers), dict(self.sparse), dict(self.retyped))
        names = (list(self.inputs), list(self.outputs))
        parts = [(n, n.op_type, list(n.inputs), list(n.outputs), dict(n.attributes)) for n in self.nodes]
        types = dict(self.types) if self.context.has_types else None
        inner = [g.snapshot() for n in self.nodes for g in n.graphs.values()]

        def restore() -> None:
            for back in inner:
                back()
            nodes, initializers, sparse, retyped = mine
            self.nodes, self.inputs, self.outputs = list(nodes), *map(list, names)
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
    while at not in path:  # back along what waits: in the end a node is met twice
        path.append(at)
        at = min(needs[at] & stuck)
    return path[path.index(at) :][::-1]


def nbytes(tensor: TensorProto) -> int:
    """The bytes that a tensor takes as an array; of strings, about."""
    if not dtypes.is_known(tensor.data_type):
        return 0
    return math.prod(max(0, d) for d in tensor.dims) * dtypes.numpy_dtype(tensor.data_type).itemsize


def constant_node(name: str, array: np.ndarray) -> Node:
    """A Constant node that makes the value of this name."""
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
