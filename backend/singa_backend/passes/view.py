"""A graph of a model as a `GraphView`: values are names, calls are nodes, in whichever opset the model has."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from .. import dtypes
from ..ir import graph
from ..ir.declaration import newest_declaration
from ..ir.reader import read_call
from ..ir.shapes import MOST as SIZES
from ..ir.shapes import Dim, Known, Shape, is_known
from ..proto.schemas import opset_of, schema_version, schemas
from ..rewriting.types import Types
from ..rewriting.view import MOST
from .graph import GraphEditor
from .index import NodeEditor
from .type_inference import node_proto
from .typed_graph import constant_node

FEW = 1 << 16
"""The maximum bytes of a list of integers that is read."""

HEAVY = 1 << 28
"""The maximum bytes of a weight that is rewritten."""


def _size(known: Dim | None, inferred: Dim | None, name: str) -> Dim:
    """A number if one is known, otherwise a name: of onnx's inference, of this one, or `name`."""
    if isinstance(known, int) or not isinstance(inferred, int):
        return inferred or name if known is None else known
    return inferred


class ModelTypes(Types[str, NodeEditor]):
    """Shapes by onnx's inference; what it leaves open is inferred here.

    Args:
        view: the graph.
    """

    def __init__(self, view: ModelView) -> None:
        super().__init__(view)
        self.graph = view.graph
        self._calls = view.calls
        self._inferred = False

    def shape(self, value: str) -> Shape | None:
        """The shape of a value; a size without a name has one that no other size has."""
        known = self.graph.shape(value)
        if not self._inferred and (known is None or None in known):
            self.infer_all(self._calls())
        own = self._shapes.get(value)
        if known is None:
            return own
        inferred = own if own is not None and len(own) == len(known) else (None,) * len(known)
        return tuple([_size(a, b, f"{i} of {value}") for i, (a, b) in enumerate(zip(known, inferred, strict=True))])

    def infer_all(self, calls: Sequence[NodeEditor]) -> None:
        """Infer the shapes of all values again."""
        self._inferred = True
        super().infer_all(calls)

    def sizes(self, value: str) -> Known | None:
        """A value that is a size or a vector of sizes, of which unknown ones have names; None for any other value."""
        if value in self._sizes:
            return self._sizes[value]
        kind = self.graph.type(value)
        if kind.dtype not in (0, TensorProto.INT32, TensorProto.INT64):
            return None
        if self.graph.is_constant(value):
            array = self.graph.constant(value, 8 * SIZES)
            if array is None or array.dtype not in (np.int64, np.int32) or array.ndim > 1:
                return None
            found = array.tolist()
            return found if isinstance(found, int) else tuple(found)
        shape = self.graph.static(value)
        if kind.dtype != TensorProto.INT64 or shape is None or len(shape) > 1 or (shape and shape[0] > SIZES):
            return None
        return tuple(f"{value}[{i}]" for i in range(shape[0])) if shape else f"{value}[]"


class ModelView:
    """A GraphEditor as the rules of rewriting see it.

    A rule's call becomes a node in the form of the model's opset; it takes the name and the message of the node that it replaces.

    Attributes:
        graph: the graph.
    """

    is_valid = True
    keeps_views = False
    absent = ""

    def __init__(self, graph: GraphEditor) -> None:
        self.graph = graph
        self._opset = graph.opset
        self._origins: dict[NodeEditor, Sequence[NodeEditor]] = {}
        self._same_form: set[NodeEditor] = set()
        self._types = ModelTypes(self)

    # --- calls ---

    def named(self, *names: str) -> list[NodeEditor]:
        """The nodes of these operators, in order."""
        wanted = frozenset(names)
        return [node for node in self.graph.nodes if node.op_type in wanted and self.operator(node) in wanted]

    def calls(self) -> list[NodeEditor]:
        """The nodes in order, without Constant nodes."""
        return [node for node in self.graph.nodes if not node.is_("Constant")]

    def constant_calls(self) -> Iterator[NodeEditor]:
        """The nodes whose inputs are all constants or absent, in order; those too that become such while they are walked."""
        for node in self.calls():
            if node not in self.graph.context.refused and all(not n or self.graph.is_constant(n) for n in node.inputs):
                yield node

    def refuse(self, call: NodeEditor) -> None:
        """Leave a node of constants out of `constant_calls`, in later passes too."""
        self.graph.context.refused.add(call)

    def alive(self, call: NodeEditor) -> bool:
        """Whether the graph still has a node."""
        return call in self.graph

    def operator(self, call: NodeEditor | None) -> str:
        """The operator of ONNX's domain that a node calls in its present meaning; "" for any other node, and for None.

        A BatchNormalization before version 7 has it if it is marked as one that does not train.
        """
        if call is None or call.domain or not call.plain:
            return ""
        name = _meaning(call.op_type, self._opset)[0]
        return "BatchNormalization" if not name and call.op_type == "BatchNormalization" and call.get("is_test", 0) else name

    def version(self, call: NodeEditor) -> int:
        """The schema version that a node calls; 0 if it is not an operator."""
        if not call.domain:
            return _meaning(call.op_type, self._opset)[1] if call.plain else 0
        return (schema_version(call.domain, call.op_type, opset_of(self.graph.opsets, call.domain)) or 0) if call.plain else 0

    def name(self, call: NodeEditor) -> tuple[str, str]:
        """The domain and the name of an operator or a function."""
        return call.domain, call.op_type

    def node(self, call: NodeEditor) -> graph.Node | None:
        """A node as the reader reads it; None for one with subgraphs."""
        if call.graphs:
            return None
        return read_call(node_proto(call), {d: self.graph.opsets[d] for d in ("", call.domain) if d in self.graph.opsets})

    def attribute(self, call: NodeEditor, name: str, default: Any = None) -> Any:
        """An attribute; the default of its schema, or `default`, if the node has none."""
        found = call.get(name)
        if found is None:
            found = _default(call.domain, call.op_type, self.version(call), name)
        return default if found is None else found

    def input(self, call: NodeEditor, index: int) -> str | None:
        """An input of a node; None for an absent one."""
        return call.input(index) or None

    # --- values ---

    def has_one_output(self, call: NodeEditor) -> bool:
        """Whether all outputs of a node but the first are absent."""
        return call.only_output()

    def producer(self, value: str) -> NodeEditor | None:
        """The node of this graph that returns a value; None for inputs, constants and values of outer graphs."""
        node = self.graph.producer(value)
        return None if node is None or node.is_("Constant") else node

    def made_by(self, value: str, *names: str) -> NodeEditor | None:
        """The node that returns a value, if it calls one of these operators and the value is its first output."""
        node = self.producer(value)
        return node if node is not None and node.outputs[0] == value and self.operator(node) in names else None

    def users(self, value: str) -> list[NodeEditor]:
        """The nodes that read a value, directly or in a subgraph."""
        return self.graph.users(value)

    def once(self, value: str) -> bool:
        """Whether exactly one node reads a value, once and not in a subgraph, and nothing else uses it."""
        return self.graph.used_once(value)

    def inside(self, values: Iterable[str], pattern: Iterable[NodeEditor]) -> bool:
        """Whether nodes of a pattern are the only ones that use these values."""
        nodes = set(pattern)
        return all(not self.is_output(v) and nodes.issuperset(self.graph.users(v)) for v in values)

    def is_output(self, value: str) -> bool:
        """Whether a value is an output of the graph, or an annotation names it."""
        return value in self.graph.outputs or value in self.graph.pinned

    def dtype(self, value: str) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        code = self.graph.type(value).dtype
        return dtypes.numpy_dtype(code) if code and dtypes.is_code(code) else None

    def shape(self, value: str) -> Shape | None:
        """The shape of a value; a size without a name has one that no other size has."""
        return self._types.shape(value)

    # --- constants ---

    def constant(self, value: str, most: int = MOST) -> np.ndarray | None:
        """A constant tensor; None for any other value, and for one of more than `most` bytes."""
        return self.graph.constant(value, most)

    def is_constant(self, value: str) -> bool:
        """Whether a value is constant."""
        return self.graph.is_constant(value)

    def constant_bytes(self, value: str) -> int:
        """The size of a constant, without reading it; 0 for any other value."""
        return self.graph.constant_bytes(value) if value else 0

    def trains(self, value: str) -> bool:
        """Whether a constant may train: if the context has parameters, those of the file's constants; otherwise initializers."""
        found, context = self.graph.tensor(value), self.graph.context
        if context.parameters is not None and (isinstance(found, NodeEditor) or value in context.given):
            return value in context.parameters
        return found is not None and not isinstance(found, NodeEditor)

    def ints(self, value: str) -> tuple[int, ...] | None:
        """A constant of few integers; None for any other value."""
        array = self.graph.constant(value, FEW)
        return None if array is None or array.dtype.kind not in "iu" else tuple(array.reshape(-1).tolist())

    def followed(self, value: str) -> Known | None:
        """The sizes that a value was found to hold."""
        return self._types.computed_sizes().get(value)

    def known_sizes(self) -> list[tuple[str, np.ndarray]]:
        """The values of nodes that are sizes and known as numbers, with their contents; outputs keep their nodes."""
        self._types.infer_all(self.calls())
        return [
            (value, np.array(found, self.dtype(value) or np.int64))
            for value, found in self._types.computed_sizes().items()
            if is_known(found) and not self.is_output(value) and self.graph.has_users(value)
        ]

    def number(self, call: NodeEditor, value: str) -> float | None:
        """A constant float32 of one element in an elementwise node of two inputs, which has the shape of the other input."""
        array = self.graph.constant(value, FEW)
        if array is None or array.size != 1 or array.dtype != np.float32:
            return None
        other = self.shape(call.inputs[0] if call.inputs[1] == value else call.inputs[1])
        fits = not array.ndim or (other is not None and len(other) >= array.ndim)
        return float(array.reshape(-1)[0]) if fits else None

    # --- changes ---

    def call(
        self, op_type: str, inputs: Sequence[str], origins: Sequence[NodeEditor], outputs: Sequence[str] = (), **attributes: Any
    ) -> NodeEditor:
        """A node in the form of the operator's newest version, for `put`."""
        node = NodeEditor(op_type, list(inputs), list(outputs) or [self.graph.context.fresh(op_type.lower())])
        node.set(**attributes)
        self._origins[node] = tuple(origins)
        return node

    def again(
        self, call: NodeEditor, inputs: Sequence[str], outputs: Sequence[str], origins: Sequence[NodeEditor], **changes: Any
    ) -> NodeEditor:
        """A node of the same operator on other inputs."""
        node = self.call(call.op_type, inputs, origins, outputs)
        node.attributes = dict(call.attributes)
        node.set(**changes)
        self._same_form.add(node)
        return node

    def add_constant(self, array: np.ndarray, *sources: str, suffix: str = "") -> str:
        """A new constant: an initializer, or a Constant node for floats that were computed from Constant nodes only."""
        name = sources[0] + suffix if sources else "constant"
        return self.graph.add_constant(array, name, self.graph.trains(array, *sources))

    def scaled(self, weight: str, factors: np.ndarray, *sources: str) -> str | None:
        """A new constant: a weight multiplied by factors, rounded once; None if it is not finite, or too large."""
        array = self.graph.constant(weight, HEAVY)
        if array is None:
            return None
        with np.errstate(all="ignore"):
            made = (array * factors).astype(array.dtype)
        return self.add_constant(made, weight, *sources) if np.isfinite(made).all() else None

    def offers(self, op_type: str) -> bool:
        """Whether the model's opset has an operator in its present meaning."""
        present, version = _meaning(op_type, self._opset)
        return bool(present) and not schemas["", op_type][version].deprecated

    def put(self, root: NodeEditor, *calls: NodeEditor, also: Iterable[NodeEditor] = ()) -> bool:
        """Replace a node, and `also` later ones, by others in its place; False if the opset has no form of one of those."""
        if not all(map(self._lower, calls)):
            return False
        for node in calls:
            self.graph.insert(node, before=root)
        self._drop(root, *also)
        free = {node for made in calls for node in self._origins.get(made, ()) if node not in self.graph}
        for made in calls:
            origins = self._origins.pop(made, ())
            same = [n for n in origins if n.op_type == made.op_type] or [*origins[-1:]]
            if same and same[0] in free:
                made.name, made.proto = same[0].name, same[0].proto
                free.discard(same[0])
            else:
                made.name = self.graph.context.fresh(f"{made.op_type}_of_{made.outputs[0]}")
        return True

    def _drop(self, *gone: NodeEditor) -> None:
        """Remove nodes, and those before them that nothing uses any more."""
        for node in gone:
            if node in self.graph:
                self.graph.remove(node)
                self._drop_unused(node.inputs)

    def _drop_unused(self, values: Iterable[str]) -> None:
        """Remove the nodes of values that nothing uses, and those before them; Constant nodes are left to `remove_dead`."""
        pending = list(values)
        while pending:
            node = self.producer(pending.pop())
            if node is not None and not any(o and self.graph.used(o) for o in node.outputs):
                self.graph.remove(node)
                pending += node.inputs

    def _lower(self, node: NodeEditor) -> bool:
        """Write a node in the form of the model's opset, where some inputs are attributes; False if it has no such form."""
        if node in self._same_form:
            return True
        if not self.offers(node.op_type):
            return False
        here, newest = (schemas["", node.op_type][v] for v in (self.version(node), max(schemas["", node.op_type])))
        if here is newest:
            return True
        known = [p.name for p in here.inputs]
        for i, parameter in enumerate(newest.inputs):
            name = node.input(i)
            if not name or parameter.name in known:
                continue
            values = self.ints(name) if parameter.name in here.attributes else None
            if values is None:
                return False
            node.set(**{parameter.name: values})
            node.inputs[i] = ""
        while node.inputs and not node.inputs[-1]:
            node.inputs.pop()
        return here.min_input <= len(node.inputs) and all(name in here.attributes for name in node.attributes)

    def fold(self, call: NodeEditor, results: Mapping[str, np.ndarray]) -> bool:
        """Replace a node by the constants that it returns; an output of the graph keeps its name, if a constant may have it."""
        graph = self.graph
        initial = {o for o, r in results.items() if graph.trains(r, *call.inputs)}
        if any(o in graph.pinned for o in results) or (any(o in graph.outputs for o in initial) and not self._may_name()):
            return False
        for o, result in results.items():
            if o not in initial:
                graph.insert(constant_node(o, result), before=call)
        graph.remove(call)
        for o, result in results.items():
            if o in initial:
                self._become(o, result)
        return True

    def _may_name(self) -> bool:
        """Whether a constant can be an output: onnx's checker requires that nodes produce the outputs of subgraphs."""
        return self.graph.outer is None and not self.graph.in_function and self.graph.context.ir_version >= 4

    def _become(self, name: str, value: np.ndarray) -> None:
        """Replace a value by a new constant; an output of the graph keeps its name."""
        graph = self.graph
        made = graph.add_constant(value, name + "_folded" if name in graph.outputs else name)
        if name in graph.outputs:
            tensor = graph.initializers.pop(made)
            tensor.name = name
            graph.initializers[name] = tensor
        else:
            graph.replace(name, made)

    def alias(self, old: str, new: str) -> bool:
        """Replace a value by another one; between an input and an output of the graph, an Identity stays."""
        node, graph = self.graph.producer(old), self.graph
        if node is None:
            return False
        before = list(node.inputs)
        if graph.bypass(node, new, node.outputs.index(old)):
            self._drop_unused(before)
            return True
        if node.op_type == "Identity" or not node.only_output() or old in graph.pinned:
            return False
        graph.rewire(node, [new])
        node.op_type, node.attributes, node.outputs = "Identity", {}, node.outputs[:1]
        self._drop_unused(before)
        return True

    def flush(self) -> None:
        """Do nothing: `alias` has changed the graph."""


@cache
def _meaning(name: str, opset: int) -> tuple[str, int]:
    """An operator of ONNX's domain, "" if it has another meaning at an opset or none, and its version there, 0 for none."""
    version, newest = schema_version("", name, opset) or 0, newest_declaration("", name)
    return name if version and (newest is None or version >= newest.meaning_since) else "", version


@cache
def _default(domain: str, op_type: str, version: int, name: str) -> Any:
    schema = schemas.get((domain, op_type), {}).get(version)
    found = schema.attributes.get(name) if schema is not None else None
    if found is None or not found.default_value.name:
        return None
    value = helper.get_attribute_value(found.default_value)
    return value.decode() if isinstance(value, bytes) else value
