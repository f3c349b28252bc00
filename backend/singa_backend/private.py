"""The private domain `ai.singa`: operators that ONNX lacks, or that are much faster whole than composed.

Each is declared like any other, by a schema of its own, and is composed of standard operators; a file that holds one carries
that composition as a function, so that any runtime can run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from onnx import FunctionProto, GraphProto, TypeProto, defs, helper

from . import dtypes
from .messages import graphs
from .operator import declarations, schemas, type_strings

DOMAIN = "ai.singa"


def schema(name: str, inputs: Sequence[str], outputs: Sequence[str], attributes: dict[str, Any] | None = None, *,
           types: dict[str, Sequence[str]], doc: str = "") -> defs.OpSchema:  # fmt: skip
    """Declare a private operator's form; `operator(name, 1, domain=DOMAIN)` then says what it computes.

    inputs, outputs: "name: type", with "?" behind the name of an optional one; types: what a type parameter may be.
    attributes: defaults by name; a type in place of a default makes the attribute required.
    """
    made = defs.OpSchema(
        name, DOMAIN, 1, doc,
        inputs=[_parameter(p) for p in inputs], outputs=[_parameter(p) for p in outputs],
        type_constraints=[(n, [f"tensor({t})" for t in ts], "") for n, ts in types.items()],
        attributes=[_attribute(n, v) for n, v in (attributes or {}).items()],
    )  # fmt: skip
    schemas.setdefault((DOMAIN, name), {})[1] = made
    return made


def _parameter(text: str) -> defs.OpSchema.FormalParameter:
    name, type_str = text.split(": ")
    options = defs.OpSchema.FormalParameterOption
    option = options.Optional if name.endswith("?") else options.Single
    return defs.OpSchema.FormalParameter(name.rstrip("?"), type_str, param_option=option)


def _attribute(name: str, default: Any) -> defs.OpSchema.Attribute:
    kinds = {int: "INT", float: "FLOAT", str: "STRING", tuple: "INTS"}
    if isinstance(default, type):
        return defs.OpSchema.Attribute(name, getattr(defs.OpSchema.AttrType, kinds[default]), required=True)
    return defs.OpSchema.Attribute(name, helper.make_attribute(name, default), "")


def functions(graph: GraphProto, opset: int) -> list[FunctionProto]:
    """The functions that a graph's private operators need, those of its inner graphs included."""
    names: dict[str, None] = {}
    pending = [graph]
    while pending:
        g = pending.pop()
        for node in g.node:
            if node.domain == DOMAIN:
                names[node.op_type] = None
            pending += graphs(node)
    return [_function(name, opset) for name in names]


@lru_cache(maxsize=256)
def _function(name: str, opset: int) -> FunctionProto:
    """A private operator's composition as a function.  It has no attributes: what varies is an input."""
    from .differentiate import compose
    from .writer import Writer

    declaration, form = declarations[DOMAIN, name][1], schemas[DOMAIN, name][1]
    writer = Writer(opset)
    builder = writer.builder
    inputs = [builder.input(p.name, _type(type_strings(form)[p.type_str])) for p in form.inputs]
    names = [p.name for p in form.outputs]
    graph = builder.proto(name, builder.finish(compose(writer, declaration, 1, inputs, {}, len(names)), names))
    constants = [helper.make_node("Constant", [], [t.name], name=t.name, value=t) for t in graph.initializer]
    imports = [helper.make_opsetid("", opset)]
    return helper.make_function(DOMAIN, name, [s.name for s in inputs], names, [*constants, *graph.node], imports)


def _type(allowed: Sequence[str]) -> TypeProto | None:
    """The element type of a function's input where there is only one."""
    dtype = dtypes.from_type_string(allowed[0]) if len(allowed) == 1 else None
    return None if dtype is None else helper.make_tensor_type_proto(dtypes.onnx_code(dtype), None)
