"""Function bodies of single calls: one function for each form of an operator that a file has, so that any runtime can run it.

The body of an operator of onnxruntime depends on the types, the attributes and the present inputs of a call.  Forms are overloads
of one function, or functions with numbered names if the file's IR version has no overloads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from onnx import FunctionProto, NodeProto, TypeProto, helper

from .. import dtypes
from ..errors import SonnxError
from ..interpreters.builder import GraphBuilder
from ..ir.declaration import Declaration
from ..ir.graph import Node
from ..ir.writer import FORM, form_name, function_message
from ..proto.schemas import schemas


@dataclass
class CallFunctions:
    """The functions of the calls of a file.

    Attributes:
        opset: of the bodies.
        writer: returns a writer of that opset.
        forms: the functions by the form of the call.
    """

    opset: int
    writer: Callable[[], Any]
    forms: dict[Any, FunctionProto] = field(default_factory=dict)

    def add(
        self,
        builder: GraphBuilder,
        declaration: Declaration,
        version: int,
        inputs: Sequence[Any],
        given: dict[str, Any],
        node: Node | None,
    ) -> None:
        """Let a node call the function of its form, if the operator has a body in ONNX's operators.

        Args:
            builder: of the graph.
            declaration: of the operator.
            version: of the operator.
            inputs: of the call; the body may depend on the shapes of constants.
            given: the attributes.
            node: the call, which receives the overload, or the numbered name.
        """
        if declaration.decomposition_rule is None or node is None:
            return
        types = [None if v is None else builder.type_of(v) for v in inputs]
        is_constant = [v is not None and builder.constant_value(v) is not None for v in inputs]
        open_types = [t if c or t is None else _without_shape(t) for t, c in zip(types, is_constant, strict=True)]
        for used in (open_types, types):
            key = (node.domain, node.op_type, version, len(node.outputs), tuple(map(_bytes, used)), repr(sorted(given.items())))
            made = self.forms.get(key) or self._function(node, declaration, version, used, given)
            if made is not None:
                self.forms[key] = made
                node.change(op_type=made.name, overload=made.overload, proto=NodeProto(overload=made.overload))
                return

    def _function(
        self, node: Node, declaration: Declaration, version: int, types: Sequence[TypeProto | None], given: dict[str, Any]
    ) -> FunctionProto | None:
        writer = self.writer()
        builder, schema = writer.builder, schemas[declaration.domain, declaration.name][version]
        names = [schema.inputs[min(i, len(schema.inputs) - 1)].name + ("" if i < len(schema.inputs) else f"_{i}")
                 for i in range(len(types))]  # fmt: skip
        inputs = [None if t is None else builder.input(n, t) for n, t in zip(names, types, strict=True)]
        outputs = [schema.outputs[min(i, len(schema.outputs) - 1)].name for i in range(len(node.outputs))]
        outputs = [n if n not in (*names, *outputs[:i]) else f"{n}_{i}_result" for i, n in enumerate(outputs)]
        try:
            made = declaration.decompose(writer, version, inputs, given, len(outputs))
            graph = builder.finish(made, outputs)
        except (SonnxError, ValueError, TypeError, AttributeError):
            return None
        number = 1 + sum(f.name.partition(FORM)[0] == node.op_type for f in self.forms.values())
        graph.name, overload = form_name(node.op_type, number, self.opset)
        return function_message(graph, declaration.domain, self.opset, attributes=sorted(given), overload=overload)


def _without_shape(type: TypeProto) -> TypeProto:
    if type.WhichOneof("value") != "tensor_type" or not type.tensor_type.elem_type:
        return type
    return helper.make_tensor_type_proto(dtypes.onnx_code(dtypes.numpy_dtype(type.tensor_type.elem_type)), None)


def _bytes(type: TypeProto | None) -> bytes:
    return b"" if type is None else type.SerializeToString(deterministic=True)
