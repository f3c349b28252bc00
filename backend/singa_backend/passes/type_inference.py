"""Types of all values, by onnx's shape inference on a copy of the model without weights and type annotations.

Type annotations of intermediate values are ignored, because nothing checks them.  The declared inputs of the main graph are
trusted, because a run refuses other values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

from ..proto.checker import Inference, infer_shapes
from ..proto.values import sizes
from .graph import GraphEditor
from .index import NodeEditor, Type
from .typed_graph import nbytes

FEW = 1 << 10
"""Maximum bytes of a constant whose value is copied, because it may be a shape; of a larger one only the type is."""


def infer(
    proto: ModelProto, main: GraphEditor, functions: Sequence[GraphEditor], *, ask: bool = True
) -> tuple[dict[int, dict[str, Type]], str]:
    """The types of the values of each graph, by its id, and why inference did not answer ("" if it did).

    Only declared types if inference fails, or is not run.
    """
    model = ModelProto(ir_version=max(proto.ir_version, 4))  # before 4 initializers had to be inputs
    model.opset_import.extend(proto.opset_import)
    model.graph.CopyFrom(skeleton(main))
    for f, graph in zip(proto.functions, functions, strict=False):
        copy = model.functions.add(name=f.name, domain=f.domain, overload=f.overload)
        for field in ("input", "output", "attribute", "attribute_proto", "opset_import"):
            getattr(copy, field).extend(getattr(f, field))
        copy.node.extend(node_proto(n, light=True) for n in graph.nodes)
    found: dict[int, dict[str, Type]] = {id(graph): {} for top in (main, *functions) for graph in top.walk()}
    inferred = infer_shapes(model) if ask else Inference(model)  # it fails for an invalid model or an unknown operator
    _take(main, inferred.model.graph, found)
    return found, "" if inferred.answered else inferred.failure


def _take(graph: GraphEditor, proto: GraphProto, found: dict[int, dict[str, Type]]) -> None:
    types = found[id(graph)]
    for info in (*proto.value_info, *proto.input, *proto.output):
        kind = read_type(info.type)
        if kind != Type():
            types[info.name] = kind
    _distrust(graph, types)
    for node, written in zip(graph.nodes, proto.node, strict=True):
        for a in written.attribute:
            if a.HasField("g"):
                _take(node.graphs[a.name], a.g, found)
            for i, g in enumerate(a.graphs):
                _take(node.graphs[f"{a.name}/{i}"], g, found)


def _distrust(graph: GraphEditor, types: dict[str, Type]) -> None:
    """Forget what follows from sizes of 0 in results of Attention: onnx's inference multiplies an open size as 0."""
    doubtful: set[str] = set()
    for node in graph.nodes:
        wrong = node.is_("Attention") and any(0 in (types.get(o, Type()).shape or ()) for o in node.outputs)
        if wrong or (doubtful and (node.graphs or not doubtful.isdisjoint(node.inputs))):
            doubtful.update(node.outputs)
            types.update({o: Type(types[o].dtype) for o in node.outputs if o in types})


def read_type(proto: TypeProto) -> Type:
    """The type of a tensor; an unknown one for other values."""
    if proto.WhichOneof("value") != "tensor_type":
        return Type()
    tensor = proto.tensor_type
    if not tensor.HasField("shape"):
        return Type(tensor.elem_type)
    return Type(tensor.elem_type, sizes(tensor))


def skeleton(graph: GraphEditor) -> GraphProto:
    """The graph without large tensors; inputs of subgraphs without shapes, which may differ between iterations."""
    light = GraphProto(name="g")
    assert isinstance(graph.proto, GraphProto)
    for info in graph.proto.input:
        if info.name not in graph.inputs:
            continue
        copy = light.input.add()
        copy.CopyFrom(info)
        if graph.outer is not None and copy.type.HasField("tensor_type"):
            copy.type.tensor_type.ClearField("shape")
    light.output.extend([type(graph.proto.output[0])(name=o) for o in graph.outputs] if graph.outputs else [])
    light.initializer.extend(stub(t, n) for n, t in graph.initializers.items())
    for name, sparse in graph.sparse.items():
        held = TensorProto(name=name, data_type=sparse.values.data_type, dims=sparse.dims, data_location=TensorProto.EXTERNAL)
        light.initializer.append(held)
    light.node.extend(node_proto(n, light=True) for n in graph.nodes)
    return light


def stub(tensor: TensorProto, name: str) -> TensorProto:
    """A small tensor itself; otherwise one of the same type with external data."""
    if nbytes(tensor) <= FEW and tensor.data_location != TensorProto.EXTERNAL:
        return tensor
    return TensorProto(name=name, data_type=tensor.data_type, dims=tensor.dims, data_location=TensorProto.EXTERNAL)


def node_proto(node: NodeEditor, light: bool = False) -> NodeProto:
    """Create the message of a node.  light: without large tensors."""
    proto = NodeProto(op_type=node.op_type, domain=node.domain, name=node.name, overload=node.overload)
    proto.input.extend(node.inputs)
    proto.output.extend(node.outputs)
    for name, a in node.attributes.items():
        held: Any = a.t if a.HasField("t") else None
        if light and held is not None and nbytes(held) > FEW:
            proto.attribute.add(name=name, type=a.type).t.CopyFrom(stub(held, held.name))
        else:
            proto.attribute.append(a)
    lists: dict[str, Any] = {}
    for key, graph in node.graphs.items():
        name, _, index = key.partition("/")
        if index:
            lists.setdefault(name, proto.attribute.add(name=name, type=10)).graphs.append(skeleton(graph))
        else:
            proto.attribute.add(name=name, type=5).g.CopyFrom(skeleton(graph))
    return proto
