"""The rules that a model's messages follow whatever its operators are: text is UTF-8, lists are not absurdly long.

`check_messages` checks them before anything else reads the model, so that no other module meets a name that is not text.  The
rest of ONNX's rules depend on operators and scopes, and is checked by the reader: `subgraph_problems` has those of the graphs
in a node, `attribute_problem` those of one attribute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto

from ..errors import InvalidModel, ResourceExhausted
from ..limits import check_entries, check_nesting, current
from ..proto.messages import texts
from ..proto.schemas import plain_domain, schemas
from .graph import Graph, Node

_FIELDS: dict[int, str] = {
    AttributeProto.FLOAT: "f", AttributeProto.INT: "i", AttributeProto.STRING: "s", AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g", AttributeProto.FLOATS: "floats", AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings", AttributeProto.TENSORS: "tensors", AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor", AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTO: "tp", AttributeProto.TYPE_PROTOS: "type_protos",
}  # fmt: skip
"""The field of an AttributeProto that holds a value of each type."""

_NUMBERS = {kind: AttributeProto.DESCRIPTOR.fields_by_name[field].number for kind, field in _FIELDS.items()}
_SCALARS = {_NUMBERS[kind] for kind in (AttributeProto.FLOAT, AttributeProto.INT, AttributeProto.STRING)}
_KINDS = {field: kind for kind, field in _FIELDS.items()}


def check_messages(model: ModelProto) -> None:
    """Check every text, and the length of every list that configures a node.

    Args:
        model: the model.

    Raises:
        InvalidModel: a text is not UTF-8 (SX107; SX105 in the entries of external data).
        ResourceExhausted: a node has more inputs or outputs, or a list more values, than `Limits.entries` (SX614), or graphs
            nest too deeply (SX602).
    """
    try:
        _Messages(current().limits.entries).model(model)
    except (TypeError, UnicodeDecodeError):  # Protocol Buffers return bytes for what is not UTF-8, or raise
        raise _not_text(model) from None
    except RecursionError as error:
        raise ResourceExhausted("the model nests too deeply for Python's stack", code="SX602") from error


def _not_text(model: ModelProto) -> InvalidModel:
    """The error of the first text that is not UTF-8."""
    for holder, at, text in texts(model):
        if isinstance(text, bytes):
            kind = type(holder).__name__ if isinstance(at, str) else ""
            what = f"the {at} of a {kind}" if kind else "a name in the model"
            entry = kind == "StringStringEntryProto" and any(e is holder for t in _external(model) for e in t.external_data)
            return InvalidModel(f"{what} is not UTF-8: {text[:200]!r}", code="SX105" if entry else "SX107")
    return InvalidModel("a name in the model is not UTF-8", code="SX107")


class _Messages:
    """A walk over messages that touches every text; a text that is bytes makes `join` raise TypeError."""

    def __init__(self, most: int) -> None:
        self.most = most

    def model(self, model: ModelProto) -> None:
        "".join((model.producer_name, model.producer_version, model.domain, model.doc_string))
        "".join([entry.domain for entry in model.opset_import])
        self.graph(model.graph, 0)
        for function in model.functions:
            self.function(function)
        for rest in (model.metadata_props, model.configuration, model.training_info):
            _any(rest)

    def graph(self, graph: GraphProto, depth: int) -> None:
        check_nesting(depth)
        "".join((graph.name, graph.doc_string))
        for values in (graph.input, graph.output, graph.value_info):
            self.values(values)
        for tensor in graph.initializer:
            _tensor(tensor)
        for sparse in graph.sparse_initializer:
            _tensor(sparse.values)
            _tensor(sparse.indices)
        _any(graph.quantization_annotation)
        _any(graph.metadata_props)
        self.nodes(graph.node, depth)

    def function(self, function: FunctionProto) -> None:
        self.length("inputs or outputs", function.input, function.output)
        "".join((function.name, function.domain, function.overload, function.doc_string))
        "".join((*function.input, *function.output, *function.attribute))
        "".join([entry.domain for entry in function.opset_import])
        self.values(function.value_info)
        _any(function.metadata_props)
        for attribute in function.attribute_proto:
            self.attribute(attribute, 0, None)
        self.nodes(function.node, 0)

    def nodes(self, nodes: Iterable[NodeProto], depth: int) -> None:
        for node in nodes:
            inputs, outputs = node.input, node.output
            if len(inputs) > self.most or len(outputs) > self.most:
                self.length(f"inputs or outputs of the node {node.name or node.op_type!r}", inputs, outputs)
            "".join((node.name, node.op_type, node.domain, node.overload, node.doc_string, *inputs, *outputs))
            attributes = node.attribute
            if attributes:
                for attribute in attributes:
                    self.attribute(attribute, depth, node)
            if node.metadata_props or node.device_configurations:
                _any(node.metadata_props)
                _any(node.device_configurations)

    def attribute(self, attribute: AttributeProto, depth: int, node: NodeProto | None) -> None:
        fields = attribute.ListFields()
        if len(fields) == 3 and fields[1][0].number in _SCALARS:  # most attributes: a name, a value, a type
            "".join((attribute.name, attribute.doc_string, attribute.ref_attr_name))
            return
        for field, value in fields:
            name = field.name
            if name in ("ints", "floats"):
                if len(value) > self.most and node is not None and not _holds_data(node.domain, node.op_type):
                    self.length(f"values in the attribute {attribute.name!r} of {node.op_type}", value)
            elif name in ("name", "doc_string", "ref_attr_name"):
                "".join((value,))
            elif name == "t":
                _tensor(value)
            elif name == "g":
                self.graph(value, depth + 1)
            elif name == "graphs":
                for graph in value:
                    self.graph(graph, depth + 1)
            elif name in ("tensors", "sparse_tensor", "sparse_tensors", "tp", "type_protos", "metadata_props"):
                _any(value if field.is_repeated else [value])

    def values(self, values: Iterable[ValueInfoProto]) -> None:
        for value in values:
            "".join((value.name, value.doc_string))
            if value.HasField("type"):
                self.type(value.type)
            if value.metadata_props:
                _any(value.metadata_props)

    def type(self, type: TypeProto) -> None:
        kind = type.WhichOneof("value")
        if kind == "tensor_type":
            dims = type.tensor_type.shape.dim
            if len(dims) > self.most:
                self.length("dimensions of a declared value", dims)
            for d in dims:
                "".join((d.dim_param, d.denotation))
            "".join((type.denotation,))
        elif kind is not None:
            _any([type])

    def length(self, what: str, *lists: Sequence[Any]) -> None:
        check_entries(max(map(len, lists)), what)


_DATA = {int(AttributeProto.STRINGS), int(AttributeProto.TENSOR)}


def _holds_data(domain: str, op_type: str) -> bool:
    """Whether the attributes of an operator hold data, so that their lists may be long: a Constant, a pool of words, a tree."""
    known = {} if domain not in ("", "ai.onnx") else schemas.get((plain_domain(domain), op_type), {})
    attributes = [a for schema in known.values() for a in schema.attributes.values()]
    return not known or any(int(getattr(a.type, "value", 0)) in _DATA for a in attributes)


def _tensor(tensor: TensorProto) -> None:
    """The texts of a tensor; its data are not touched."""
    "".join((tensor.name, tensor.doc_string))
    if tensor.external_data:
        _any(tensor.external_data)
    if tensor.metadata_props:
        _any(tensor.metadata_props)


def _any(messages: Iterable[Any]) -> None:
    """The texts of messages of any kind, and of those within them."""
    for message in messages:
        if isinstance(message, TensorProto):
            _tensor(message)
            continue
        for field, value in message.ListFields():
            if field.type == field.TYPE_STRING:
                "".join(value if field.is_repeated else (value,))
            elif field.type == field.TYPE_MESSAGE:
                _any(value if field.is_repeated else [value])


def _external(model: ModelProto) -> Iterator[TensorProto]:
    """The tensors of the main graph with external data."""
    return (t for t in model.graph.initializer if t.external_data)


# --- rules of the reader ----------------------------------------------------------------------------------------------


def kind_of(attribute: AttributeProto) -> int:
    """The type of an attribute; that of the value it has if a file of IR version 1 does not name it."""
    return attribute.type or next((_KINDS[f.name] for f, _ in attribute.ListFields() if f.name in _KINDS), 0)


def value_of(attribute: AttributeProto, kind: int) -> Any:
    """The value of an attribute of this type; None for an unknown type."""
    return getattr(attribute, _FIELDS[kind]) if kind in _FIELDS else None


def attribute_problem(attribute: AttributeProto, ir_version: int) -> str:
    """The rule of ONNX's IR that an attribute breaks whatever its operator is; "" if it breaks none."""
    fields = attribute.ListFields()
    if len(fields) == 3 and fields[1][0].number == _NUMBERS.get(attribute.type) and attribute.name:
        return ""  # a name, a value of its type, a type
    if not attribute.name:
        return "an attribute must have a name"
    if not attribute.type and ir_version > 1:
        return f"attribute {attribute.name!r} must have a type"
    held = [f.name for f, _ in fields if f.name in _KINDS]
    if len(held) > 1:
        return f"attribute {attribute.name!r} must have one value, got {' and '.join(held)}"
    kind = attribute.type
    if held and kind in _FIELDS and _FIELDS[kind] != held[0]:
        want, have = (AttributeProto.AttributeType.Name(k) for k in (kind, _KINDS[held[0]]))
        return f"attribute {attribute.name!r} must have a value of its type {want}, got {have}"
    return ""


def subgraph_problems(node: Node) -> Iterator[str]:
    """The rules of the numbers of inputs and outputs that the graphs in an If, Loop, Scan or SequenceMap break."""
    counts = _counts(node)
    if counts is None:
        return
    takes, returns, why = counts
    for name, graph in node.attributes.items():
        if not isinstance(graph, Graph):
            continue
        for what, want, values in (("inputs", takes, graph.inputs), ("outputs", returns, graph.outputs)):
            if len(values) != want:
                yield f"the graph {name!r} of {node.op_type} must have {want} {what} ({why[what]}), got {len(values)}"


_STATED = "2 and the states of the Loop", "the condition, the states and the scan outputs of the Loop"


def _counts(node: Node) -> tuple[int, int, dict[str, str]] | None:
    """The numbers of inputs and outputs of the graphs in a node, and their reasons; None for an operator without such a rule."""
    if node.domain:
        return None
    inputs, outputs = len(node.input_names), len(node.output_names)
    if node.op_type == "If":
        return 0, outputs, {"inputs": "it reads outer values by their names", "outputs": "those of the If"}
    if node.op_type == "Loop":
        return 2 + max(0, inputs - 2), 1 + outputs, dict(zip(("inputs", "outputs"), _STATED, strict=True))
    if node.op_type == "Scan":
        first = 1 if node.version == 8 else 0  # the lengths of the sequences
        return inputs - first, outputs, {"inputs": "the states and elements of the Scan", "outputs": "those of the Scan"}
    if node.op_type == "SequenceMap":
        return inputs, outputs, {"inputs": "those of the SequenceMap", "outputs": "those of the SequenceMap"}
    return None
