"""Function bodies of custom operators: those of `ai.singa` and of other domains whose schemas are declared in Python.

A custom operator is declared as any other, with its own schema, and may have a decomposition into standard operators.  A file
with such an operator contains the decomposition as a function, so that any runtime can run it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

from onnx import FunctionProto, TypeProto, helper

from .. import dtypes
from ..ir.declaration import declarations
from ..ir.graph import Graph
from ..ir.writer import function_message
from ..proto.schemas import is_custom, schema_version, schemas, type_strings
from .target_schema import written_as_function
from .writer import OpsetWriter


def functions(graph: Graph, imported: Callable[[str], int]) -> list[FunctionProto]:
    """The function bodies of the custom operators in a graph and its subgraphs.

    Args:
        graph: the graph.
        imported: returns the version of a domain in the graph.
    """
    made = []
    for domain, name in dict.fromkeys((n.domain, n.op_type) for n in graph.all_nodes() if is_custom(n.domain)):
        version = schema_version(domain, name, imported(domain))
        declaration = declarations.get((domain, name), {}).get(version or 0)
        if version and declaration is not None and written_as_function(declaration, version):
            made.append(_function(domain, name, version, graph.opsets[""]))
    return made


@lru_cache(maxsize=256)
def _function(domain: str, name: str, version: int, opset: int) -> FunctionProto:
    """A custom operator's decomposition as a function, which has no attributes."""
    declaration, form = declarations[domain, name][version], schemas[domain, name][version]
    writer = OpsetWriter(opset)
    builder = writer.builder
    inputs = [builder.input(p.name, _type(type_strings(form)[p.type_str])) for p in form.inputs]
    names = [p.name for p in form.outputs]
    made = declaration.decompose(writer, version, inputs, {}, len(names))
    return function_message(builder.finish(made, names, name), domain, opset)


def _type(allowed: Sequence[str]) -> TypeProto | None:
    """The type of a function's input if only one element type is allowed; None otherwise."""
    dtype = dtypes.from_type_string(allowed[0]) if len(allowed) == 1 else None
    return None if dtype is None else helper.make_tensor_type_proto(dtypes.onnx_code(dtype), None)
