"""A graph of a file as a Rewriter: nodes are those of whichever opset the model has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from .. import dtypes
from ..ir.declaration import newest_declaration
from ..ir.graph import Graph, Node, Value
from ..ir.reader import resolved_call
from ..ir.shapes import MOST as SIZES
from ..ir.shapes import Dim, Known, Shape, is_known
from ..proto.schemas import opset_of, schema_version, schemas
from ..rewriting.rewriter import MOST, Rewriter
from ..rewriting.types import Types
from .model import ModelEditor, in_function, opset
from .values import constant_node

FEW = 1 << 16
"""The maximum bytes of a list of integers that is read."""

HEAVY = 1 << 28
"""The maximum bytes of a weight that is rewritten."""


def _size(known: Dim | None, inferred: Dim | None, name: str) -> Dim:
    """A number if one is known, otherwise a name: of onnx's inference, of this one, or `name`."""
    if isinstance(known, int) or not isinstance(inferred, int):
        return inferred or name if known is None else known
    return inferred


class ModelTypes(Types):
    """Shapes by onnx's inference; what it leaves open is inferred here.

    Args:
        rewriter: the graph.
    """

    def __init__(self, rewriter: ModelRewriter) -> None:
        super().__init__(rewriter)
        self.graph, self.editor = rewriter.graph, rewriter.editor
        self._inferred = False

    def shape(self, value: Value | None) -> Shape | None:
        """The shape of a value; a size without a name has one that no other size has."""
        if value is None:
            return None
        declared = self.editor.shape(value)
        if not self._inferred and (declared is None or None in declared):
            self.infer_again()
        own = self._shapes.get(value)
        if declared is None:
            return own
        inferred = own if own is not None and len(own) == len(declared) else (None,) * len(declared)
        name = value.original.name
        return tuple([_size(a, b, f"{i} of {name}") for i, (a, b) in enumerate(zip(declared, inferred, strict=True))])

    def infer_again(self) -> None:
        """Infer the shapes of all values again."""
        self._inferred = True
        self.infer_all(node for node in self.graph.nodes if not node.is_("Constant"))

    def sizes(self, value: Value | None) -> Known | None:
        """A value that is a size or a vector of sizes, of which unknown ones have names; None for any other value."""
        if value is None or value in self._sizes:
            return super().sizes(value)
        kind = self.editor.type(value)
        if kind.dtype not in (0, TensorProto.INT32, TensorProto.INT64):
            return None
        if self.editor.is_constant(value):
            array = self.editor.constant(value, 8 * SIZES)
            if array is None or array.dtype not in (np.int64, np.int32) or array.ndim > 1:
                return None
            numbers = array.tolist()
            return numbers if isinstance(numbers, int) else tuple(numbers)
        shape = self.editor.static(value)
        if kind.dtype != TensorProto.INT64 or shape is None or len(shape) > 1 or (shape and shape[0] > SIZES):
            return None
        name = value.original.name
        return tuple(f"{name}[{i}]" for i in range(shape[0])) if shape else f"{name}[]"


class ModelRewriter(Rewriter):
    """A graph of a model as the rules of rewriting see it.

    A rule's node is written in the form of the model's opset; it takes the name and the message of the node that it replaces.

    Args:
        editor: the model.
        graph: the graph.
    """

    is_valid = True
    keeps_views = False
    kept = frozenset(("Constant",))

    def __init__(self, editor: ModelEditor, graph: Graph) -> None:
        super().__init__(graph)
        self.editor, self.refused, self.opset = editor, editor.refused, opset(graph)
        self._same_form: set[Node] = set()
        self._types = ModelTypes(self)

    # --- nodes

    def named(self, *names: str) -> list[Node]:
        """The nodes of these operators, in order."""
        return sorted(super().named(*names), key=lambda node: node.position)

    def operator(self, node: Node | None) -> str:
        """The operator of ONNX's domain that a node calls in its present meaning; "" for any other node, and for None.

        A BatchNormalization before version 7 has it if it is marked as one that does not train.
        """
        if node is None or node.domain or not node.plain:
            return ""
        name = _meaning(node.op_type, self.opset)[0]
        return "BatchNormalization" if not name and node.op_type == "BatchNormalization" and node.get("is_test", 0) else name

    def version(self, node: Node) -> int:
        """The schema version that a node calls; 0 if it is not an operator."""
        if not node.plain:
            return 0
        if not node.domain:
            return _meaning(node.op_type, self.opset)[1]
        return schema_version(node.domain, node.op_type, opset_of(self.graph.opsets, node.domain)) or 0

    def attribute(self, node: Node, name: str, default: Any = None) -> Any:
        """An attribute; the default of its schema, or `default`, if the node has none."""
        setting = node.get(name)
        if setting is None:
            setting = _default(node.domain, node.op_type, self.version(node), name)
        return default if setting is None else setting

    def runnable(self, node: Node) -> Node | None:
        """A node as the reader reads it; None for one with subgraphs."""
        if node.bodies:
            return None
        opsets = {d: self.graph.opsets[d] for d in ("", node.domain) if d in self.graph.opsets}
        return resolved_call(node, opsets)

    # --- values

    def dtype(self, value: Value | None) -> np.dtype[Any] | None:
        """The dtype of a value; None if it is not known."""
        code = self.editor.type(value).dtype
        return dtypes.numpy_dtype(code) if code and dtypes.is_code(code) else None

    def shape(self, value: Value | None) -> Shape | None:
        """The shape of a value; a size without a name has one that no other size has."""
        return self._types.shape(value)

    def constant(self, value: Value | None, most: int = MOST) -> np.ndarray | None:
        """A constant tensor; None for any other value, and for one of more than `most` bytes."""
        return self.editor.constant(value, most)

    def is_constant(self, value: Value | None) -> bool:
        """Whether a value is constant."""
        return self.editor.is_constant(value)

    def constant_bytes(self, value: Value | None) -> int:
        """The size of a constant, without reading it; 0 for any other value."""
        return self.editor.constant_bytes(value)

    def trains(self, value: Value | None) -> bool:
        """Whether a constant may train: if the editor has parameters, those of the file's constants; otherwise initializers."""
        definition, editor = self.editor.tensor(value), self.editor
        if value is None or definition is None:
            return False
        name = value.original.name
        if editor.parameters is not None and (isinstance(definition, Node) or name in editor.given):
            return name in editor.parameters
        return not isinstance(definition, Node)

    def ints(self, value: Value | None) -> tuple[int, ...] | None:
        """A constant of few integers; None for any other value."""
        array = self.constant(value, FEW)
        return None if array is None or array.dtype.kind not in "iu" else tuple(array.reshape(-1).tolist())

    def followed(self, value: Value) -> Known | None:
        """The sizes that a value was found to hold."""
        return self._types.computed_sizes().get(value)

    def known_sizes(self) -> list[tuple[Value, np.ndarray]]:
        """The values of nodes that are sizes and known as numbers, with their contents; outputs keep their nodes."""
        self._types.infer_again()
        return [
            (value, np.array(sizes, self.dtype(value) or np.int64))
            for value, sizes in self._types.computed_sizes().items()
            if is_known(sizes) and not value.is_output and value.is_used
        ]

    # --- changes

    def call(
        self,
        op_type: str,
        inputs: Sequence[Value | None],
        origins: Sequence[Node],
        outputs: Sequence[Value | None] = (),
        **attributes: Any,
    ) -> Node:
        """A node in the form of the operator's newest version, for `put`."""
        results = list(outputs) or [Value(self.editor.fresh(op_type.lower()))]
        node = Node(op_type, list(inputs), results, origins=tuple(origins))
        node.set(**attributes)
        return node

    def again(
        self,
        node: Node,
        inputs: Sequence[Value | None],
        outputs: Sequence[Value | None],
        origins: Sequence[Node],
        **changes: Any,
    ) -> Node:
        """A node of the same operator on other inputs."""
        again = self.call(node.op_type, inputs, origins, outputs)
        again.attributes = dict(node.attributes)
        again.set(**changes)
        self._same_form.add(again)
        return again

    def add_constant(self, array: np.ndarray, *sources: Value | None, suffix: str = "") -> Value:
        """A new constant: an initializer, or a Constant node for floats that were computed from Constant nodes only."""
        name = sources[0].original.name + suffix if sources and sources[0] is not None else "constant"
        return self.editor.add_constant(self.graph, array, name, self.editor.trains(array, *sources))

    def scaled(self, weight: Value, factors: np.ndarray, *sources: Value | None) -> Value | None:
        """A new constant: a weight multiplied by factors, rounded once; None if it is not finite, or too large."""
        array = self.editor.constant(weight, HEAVY)
        if array is None:
            return None
        with np.errstate(all="ignore"):
            product = (array * factors).astype(array.dtype)
        return self.add_constant(product, weight, *sources) if np.isfinite(product).all() else None

    def offers(self, op_type: str) -> bool:
        """Whether the model's opset has an operator in its present meaning."""
        present, version = _meaning(op_type, self.opset)
        return bool(present) and not schemas["", op_type][version].deprecated

    def put(self, root: Node, *nodes: Node, also: Iterable[Node] = ()) -> bool:
        """Replace a node, and `also` later ones, by others in its place; False if the opset has no form of one of those."""
        if not super().put(root, *nodes, also=also):
            return False
        free = {origin for node in nodes for origin in node.origins if origin not in self.graph}
        for node in nodes:
            origins, node.origins = node.origins, ()
            same = [n for n in origins if n.op_type == node.op_type] or [*origins[-1:]]
            if same and same[0] in free:
                node.name, node.proto = same[0].name, same[0].proto
                free.discard(same[0])
            else:
                node.name = self.editor.fresh(f"{node.op_type}_of_{node.results[0].name}")
        return True

    def _fits(self, node: Node) -> bool:
        """Write a node in the form of the model's opset, where some inputs are attributes; False if it has no such form."""
        if node in self._same_form:
            return True
        if not self.offers(node.op_type):
            return False
        here, newest = (schemas["", node.op_type][v] for v in (self.version(node), max(schemas["", node.op_type])))
        if here is newest:
            return True
        names = [p.name for p in here.inputs]
        for i, parameter in enumerate(newest.inputs):
            value = node.input(i)
            if value is None or parameter.name in names:
                continue
            values = self.ints(value) if parameter.name in here.attributes else None
            if values is None:
                return False
            node.set(**{parameter.name: values})
            node.inputs[i] = None
        while node.inputs and node.inputs[-1] is None:
            node.inputs.pop()
        return here.min_input <= len(node.inputs) and all(name in here.attributes for name in node.attributes)

    def fold(self, node: Node, results: Mapping[Value, np.ndarray]) -> bool:
        """Replace a node by the constants that it returns; an output of the graph keeps its name, if a constant may have it."""
        graph, editor = self.graph, self.editor
        initial = {o for o, array in results.items() if editor.trains(array, *node.inputs)}
        may_name = graph.owner is None and not in_function(graph) and editor.ir_version >= 4  # onnx's checker requires that
        if any(o.pinned for o in results) or (any(o.is_output for o in initial) and not may_name):  # nodes return other outputs
            return False
        for o, array in results.items():
            if o not in initial:
                graph.insert(constant_node(o, array), node)
        graph.remove(node)
        for o, array in results.items():
            if o in initial and o.is_output:
                o.constant = numpy_helper.from_array(np.asarray(array), o.name)
                graph.add_initializer(o)
            elif o in initial:
                o.replace_all_uses_with(editor.add_constant(graph, array, o.name))
        return True

    def alias(self, old: Value | None, new: Value | None) -> bool:
        """Replace a value by another one; between an input and an output of the graph, an Identity stays."""
        node = None if old is None else old.producer
        if old is None or new is None or node is None:
            return False
        before = node.reads
        if not self.editor.bypass(node, new, node.outputs.index(old)):
            if node.op_type == "Identity" or not node.has_one_output or old.pinned:
                return False
            return self.put(node, self.call("Identity", [new], [node], [old]))
        self.graph.drop_unused(before, self.kept)
        return True


@cache
def _meaning(name: str, opset: int) -> tuple[str, int]:
    """An operator of ONNX's domain, "" if it has another meaning at an opset or none, and its version there, 0 for none."""
    version, newest = schema_version("", name, opset) or 0, newest_declaration("", name)
    return name if version and (newest is None or version >= newest.meaning_since) else "", version


@cache
def _default(domain: str, op_type: str, version: int, name: str) -> Any:
    schema = schemas.get((domain, op_type), {}).get(version)
    attribute = schema.attributes.get(name) if schema is not None else None
    if attribute is None or not attribute.default_value.name:
        return None
    value = helper.get_attribute_value(attribute.default_value)
    return value.decode() if isinstance(value, bytes) else value
