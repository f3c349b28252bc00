"""The private domain `ai.singa`: operators that ONNX lacks, or that are much faster whole than composed.

Each is declared like any other, by a schema of its own, and is composed of standard operators; a file that holds one carries
that composition as a function, so that any runtime can run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from onnx import FunctionProto, GraphProto, TypeProto, helper

from .. import dtypes
from ..ir.declaration import declarations
from ..proto.messages import graphs
from ..proto.schemas import SINGA_DOMAIN, schemas, type_strings
from .writer import OpsetWriter


def functions(graph: GraphProto, opset: int) -> list[FunctionProto]:
    """The functions that a graph's private operators need, those of its inner graphs included."""
    names: dict[str, None] = {}
    pending = [graph]
    while pending:
        g = pending.pop()
        for node in g.node:
            if node.domain == SINGA_DOMAIN:
                names[node.op_type] = None
            pending += graphs(node)
    return [_function(name, opset) for name in names]


@lru_cache(maxsize=256)
def _function(name: str, opset: int) -> FunctionProto:
    """A private operator's composition as a function.  It has no attributes: what varies is an input."""
    declaration, form = declarations[SINGA_DOMAIN, name][1], schemas[SINGA_DOMAIN, name][1]
    writer = OpsetWriter(opset)
    builder = writer.builder
    inputs = [builder.input(p.name, _type(type_strings(form)[p.type_str])) for p in form.inputs]
    names = [p.name for p in form.outputs]
    graph = builder.proto(name, builder.finish(declaration.decompose(writer, 1, inputs, {}, len(names)), names))
    constants = [helper.make_node("Constant", [], [t.name], name=t.name, value=t) for t in graph.initializer]
    imports = [helper.make_opsetid("", opset)]
    return helper.make_function(SINGA_DOMAIN, name, [s.name for s in inputs], names, [*constants, *graph.node], imports)


def _type(allowed: Sequence[str]) -> TypeProto | None:
    """The element type of a function's input where there is only one."""
    dtype = dtypes.from_type_string(allowed[0]) if len(allowed) == 1 else None
    return None if dtype is None else helper.make_tensor_type_proto(dtypes.onnx_code(dtype), None)
