"""Types of all values, by onnx's shape inference on a copy of the model without weights and type annotations.

Type annotations of intermediate values are ignored, because nothing checks them.  The declared inputs of the main graph are
trusted, because a run refuses other values.
"""

from __future__ import annotations

from collections.abc import Sequence

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, TypeProto

from ..ir.graph import Graph, Node, Value
from ..ir.structure import defined_values
from ..ir.writer import node_message, value_names
from ..proto.checker import Inference, infer_shapes
from ..proto.values import sizes
from .values import Type, nbytes

FEW = 1 << 10
"""Maximum bytes of a constant whose value is copied, because it may be a shape; of a larger one only the type is."""


def infer(proto: ModelProto, main: Graph, functions: Sequence[Graph], *, ask: bool = True) -> tuple[dict[Value, Type], str]:
    """The types of the values of all graphs, and why inference did not answer ("" if it did).

    Only declared types if inference fails, or is not run.
    """
    model = ModelProto(ir_version=max(proto.ir_version, 4))  # before 4 initializers had to be inputs
    model.opset_import.extend(proto.opset_import)
    model.graph.CopyFrom(skeleton(main))
    for f, graph in zip(proto.functions, functions, strict=False):
        copy = model.functions.add(name=f.name, domain=f.domain, overload=f.overload)
        for field in ("input", "output", "attribute", "attribute_proto", "opset_import"):
            getattr(copy, field).extend(getattr(f, field))
        copy.node.extend(map(light_message, graph.nodes))
    found: dict[Value, Type] = {}
    inferred = infer_shapes(model) if ask else Inference(model)  # it fails for an invalid model or an unknown operator
    _take(main, inferred.model.graph, found)
    return found, "" if inferred.answered else inferred.failure


def _take(graph: Graph, proto: GraphProto, found: dict[Value, Type]) -> None:
    values = {v.name: v for v in defined_values(graph)}
    for info in (*proto.value_info, *proto.input, *proto.output):
        kind = read_type(info.type)
        if kind != Type() and info.name in values:
            found[values[info.name]] = kind
    _distrust(graph, found)
    for node, written in zip(graph.nodes, proto.node, strict=True):
        inner = [g for a in written.attribute for g in (a.graphs or ([a.g] if a.HasField("g") else []))]
        for body, g in zip(node.bodies, inner, strict=True):
            _take(body, g, found)


def _distrust(graph: Graph, types: dict[Value, Type]) -> None:
    """Forget what follows from sizes of 0 in results of Attention: onnx's inference multiplies an open size as 0."""
    doubtful: set[Value | None] = set()
    for node in graph.nodes:
        wrong = node.is_("Attention") and any(0 in (types.get(o, Type()).shape or ()) for o in node.results)
        if wrong or (doubtful and (node.bodies or not doubtful.isdisjoint(node.inputs))):
            doubtful.update(node.results)
            types.update({o: Type(types[o].dtype) for o in node.results if o in types})


def read_type(proto: TypeProto) -> Type:
    """The type of a tensor; an unknown one for other values."""
    if proto.WhichOneof("value") != "tensor_type":
        return Type()
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return Type(tensor.elem_type)
    return Type(tensor.elem_type, sizes(tensor))


def skeleton(graph: Graph) -> GraphProto:
    """The graph without large tensors; inputs of subgraphs without shapes, which may differ between iterations."""
    light = GraphProto(name="g")
    proto = graph.proto
    assert isinstance(proto, GraphProto)
    inputs = {v.name for v in (*graph.inputs, *graph.optional_inputs)}
    for info in proto.input:
        if info.name not in inputs:
            continue
        copy = light.input.add()
        copy.CopyFrom(info)
        if graph.owner is not None and copy.type.HasField("tensor_type"):
            copy.type.tensor_type.ClearField("shape")
    light.output.extend([type(proto.output[0])(name=o) for o in value_names(graph.outputs, graph)] if graph.outputs else [])
    for name, value in graph.initializers.items():
        held = value.constant
        if isinstance(held, SparseTensorProto):
            dtype = held.values.data_type
            held = TensorProto(name=name, data_type=dtype, dims=held.dims, data_location=TensorProto.EXTERNAL)
        light.initializer.append(stub(held, name))
    light.node.extend(map(light_message, graph.nodes))
    return light


def stub(tensor: TensorProto, name: str) -> TensorProto:
    """A small tensor itself; otherwise one of the same type with external data."""
    if nbytes(tensor) <= FEW and tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    return TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL)


def light_message(node: Node) -> NodeProto:
    """The message of a node without large tensors."""
    return node_message(node, attribute=_light, body=skeleton)


def _light(a: AttributeProto) -> AttributeProto:
    if not a.HasField("t") or nbytes(a.t) <= FEW:
        return a
    made = AttributeProto(name=a.name, type=a.type)
    made.t.CopyFrom(stub(a.t, a.t.name))
    return made
