"""In the child process: run onnx's checker and shape inference, which may die.  `checker.py` has the requests.

The child loads this file without its package.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import onnx
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto

PLACEHOLDER = "\0placeholder"
"""The location of the external data of a tensor whose data were not sent."""


def serve() -> Callable[[Any], tuple[Any, str]]:
    """Return the function that answers (task, seconds, arguments) by (result, why there is none)."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the words of a C++ assertion do not help a user
    tasks: dict[str, Callable[..., Any]] = {"check": _check, "infer": _infer, "node": _node, "function": _function}

    def answer(request: Any) -> tuple[Any, str]:
        task, seconds, arguments = request
        if hasattr(signal, "alarm"):  # ends onnx's own code too, if the parent has ended in the meantime
            signal.alarm(math.ceil(seconds) + 5)
        try:
            return tasks[task](*arguments), ""
        except Exception as error:  # several kinds
            return None, str(error).strip() or type(error).__name__
        finally:
            if hasattr(signal, "alarm"):
                signal.alarm(0)

    return answer


def _check(data: bytes) -> None:
    """Check everything but the types: `_infer` with `strict` checks those."""
    model = ModelProto.FromString(data)
    for tensor in _tensors(model):
        if tensor.data_location == TensorProto.EXTERNAL and any(e.value == PLACEHOLDER for e in tensor.external_data):
            tensor.ClearField("data_location")
            del tensor.external_data[:], tensor.dims[:]
            tensor.raw_data = bytes(16)  # one element of any type: without types, the checker does not read dims
    onnx.checker.check_model(model)


def _infer(data: bytes, data_prop: bool, strict: bool) -> bytes:
    return onnx.shape_inference.infer_shapes(data, check_type=strict, strict_mode=strict, data_prop=data_prop).SerializeToString()


def _node(
    version: int, data: bytes, types: dict[str, bytes], values: dict[str, bytes], opset: int
) -> tuple[dict[str, bytes], str]:
    """The types of a node's outputs, and why the types of its inputs contradict each other ("" if they do not)."""
    node = NodeProto.FromString(data)
    try:
        found = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, version, node.domain),
            node,
            {n: TypeProto.FromString(t) for n, t in types.items()},
            {n: TensorProto.FromString(v) for n, v in values.items()},
            opset_imports=[onnx.helper.make_opsetid("", opset)],
            ir_version=10,
        )
    except onnx.shape_inference.InferenceError as error:
        return {}, " ".join(str(error).split())
    return {n: t.SerializeToString() for n, t in found.items()}, ""


def _function(name: str, version: int, data: bytes, types: list[bytes]) -> bytes:
    """The body of an operator that depends on the node's attributes and the types of its inputs."""
    schema: Any = onnx.defs.get_schema(name, version, "")
    first = min(schema.context_dependent_function_opset_versions)
    body: bytes = schema.get_context_dependent_function_with_opset_version(first, data, types)
    return body


def _tensors(model: ModelProto) -> Iterator[TensorProto]:
    pending: list[Any] = [model.graph, *model.functions]
    while pending:
        holder = pending.pop()
        if isinstance(holder, GraphProto):
            yield from holder.initializer
        for node in holder.node:
            for a in node.attribute:
                if a.HasField("t"):
                    yield a.t
                yield from a.tensors
                pending += [a.g] if a.HasField("g") else []
                pending += a.graphs
