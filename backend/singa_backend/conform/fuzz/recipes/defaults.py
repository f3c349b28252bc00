"""The default recipe of an operator: inputs and attributes that its schema allows."""

from __future__ import annotations

from onnx import defs

from ....ir.declaration import has_trait, newest_declaration
from ....proto.schemas import is_custom, schemas, type_strings
from ..strategies import OMITTED, Draw, Skip

_OPTION = defs.OpSchema.FormalParameterOption


def drawable(domain: str, name: str) -> bool:
    """Whether an operator is custom and takes tensors of any values: it reads no input on the host, such as a shape."""
    declaration = newest_declaration(domain, name)
    if not is_custom(domain) or declaration is None or declaration.prepares or "run" in declaration.services.values():
        return False
    schema = schemas[domain, name][declaration.versions[-1]]
    return all(t.startswith("tensor(") for p in schema.inputs for t in type_strings(schema)[p.type_str])


def default(d: Draw) -> None:
    """Draw inputs of one shape, of shapes that broadcast, or one and scalars, by the operator's traits; default attributes."""
    domain, name = d.schema.domain, d.schema.name
    unary, broadcasting = (has_trait(domain, name, trait) for trait in ("unary", "broadcasting"))
    shape = d.shape()
    for i, parameter in enumerate(d.schema.inputs):
        if parameter.option == _OPTION.Optional and d.chance(OMITTED):
            d.put(None)
            continue
        for _ in range(d.whole(1, 3) if parameter.option == _OPTION.Variadic else 1):
            d.put(d.array(i, d.broadcast(shape) if broadcasting and d.inputs else () if unary and d.inputs else shape, "small"))
    for key, attribute in d.schema.attributes.items():
        if attribute.required:
            if attribute.type != defs.OpSchema.AttrType.FLOAT:
                raise Skip
            d.attributes[key] = d.real(0.1, 2)
    d.outputs = ["y", *(f"y{i}" for i in range(1, d.schema.min_output))]
