"""Function bodies of custom operators: those of `ai.singa` and of other domains whose schemas are declared in Python.

A custom operator is declared as any other, with its own schema, and may have a decomposition into standard operators.  A file
with such an operator contains the decomposition as a function, so that any runtime can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from onnx import FunctionProto, GraphProto, TypeProto, helper

from .. import dtypes
from ..ir.declaration import declarations
from ..proto.messages import graphs
from ..proto.schemas import is_custom, schema_version, schemas, type_strings
from .call_functions import body_nodes
from .target_schema import written_as_function
from .writer import OpsetWriter


def functions(graph: GraphProto, opset: int, imported: Callable[[str], int]) -> list[FunctionProto]:
    """The function bodies of the custom operators in a graph and its subgraphs.

    Args:
        graph: the graph.
        opset: the opset of the bodies.
        imported: returns the version of a domain in the graph.
    """
    found: dict[tuple[str, str], None] = {}
    pending = [graph]
    while pending:
        g = pending.pop()
        for node in g.node:
            if is_custom(node.domain):
                found[node.domain, node.op_type] = None
            pending += graphs(node)
    made = []
    for domain, name in found:
        version = schema_version(domain, name, imported(domain))
        declaration = declarations.get((domain, name), {}).get(version or 0)
        if version and declaration is not None and written_as_function(declaration, version):
            made.append(_function(domain, name, version, opset))
    return made


@lru_cache(maxsize=256)
def _function(domain: str, name: str, version: int, opset: int) -> FunctionProto:
    """A custom operator's decomposition as a function, which has no attributes."""
    declaration, form = declarations[domain, name][version], schemas[domain, name][version]
    writer = OpsetWriter(opset)
    builder = writer.builder
    inputs = [builder.input(p.name, _type(type_strings(form)[p.type_str])) for p in form.inputs]
    names = [p.name for p in form.outputs]
    graph = builder.proto(name, builder.finish(declaration.decompose(writer, version, inputs, {}, len(names)), names))
    imports = [helper.make_opsetid("", opset)]
    return helper.make_function(domain, name, [s.name for s in inputs], names, body_nodes(graph), imports)


def _type(allowed: Sequence[str]) -> TypeProto | None:
    """The type of a function's input if only one element type is allowed; None otherwise."""
    dtype = dtypes.from_type_string(allowed[0]) if len(allowed) == 1 else None
    return None if dtype is None else helper.make_tensor_type_proto(dtypes.onnx_code(dtype), None)
