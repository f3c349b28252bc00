"""Every schema version that onnx knows is declared as its schema says, or named with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import defs, helper

from singa_backend.conform import gaps
from singa_backend.conform.cases import held
from singa_backend.ir.declaration import REQUIRED, Declaration, declarations, operator
from singa_backend.proto.schemas import schemas

ALL = [(d, n, v) for (d, n), versions in sorted(schemas.items()) for v in sorted(versions)]
MISSING = gaps.undeclared(held("undeclared.txt"))
VARIADIC = defs.OpSchema.FormalParameterOption.Variadic


def test_the_count() -> None:
    assert len(ALL) >= 659
    assert len(MISSING) <= 5


@pytest.mark.row("Q3")
@pytest.mark.parametrize(("domain", "name", "version"), ALL, ids=lambda x: str(x) or "ai.onnx")
def test_declared_as_the_schema_says(domain: str, name: str, version: int) -> None:
    declaration = declarations.get((domain, name), {}).get(version)
    if declaration is None:
        assert (domain, name, version) in MISSING, f"{name}-{version} is neither declared nor named in undeclared.txt"
        return
    assert (domain, name, version) not in MISSING, f"{name}-{version} is declared now: delete its line from undeclared.txt"
    schema = schemas[domain, name][version]
    _check_inputs(declaration, schema)
    _check_attributes(declaration, schema)


def _check_inputs(declaration: Declaration, schema: Any) -> None:
    inputs = declaration.inputs
    variadic = bool(schema.inputs) and schema.inputs[-1].option == VARIADIC
    assert not variadic or inputs[-1].variadic, f"{declaration}: the last input is variadic in the schema"
    assert sum(i.variadic for i in inputs) <= 1
    # One body may serve versions with fewer inputs: what the schema lacks must then be optional.
    formal = list(schema.inputs)
    if not inputs or not inputs[-1].variadic:
        assert len(inputs) >= len(formal), f"{declaration}: the schema has {[p.name for p in formal]}"
        for extra in inputs[len(formal) :]:
            assert extra.default is not REQUIRED, f"{declaration}: {extra.name} is no input of this version"
    for declared, parameter in zip(inputs, formal, strict=False):
        optional = parameter.option == defs.OpSchema.FormalParameterOption.Optional
        if optional and not declared.variadic:
            assert declared.default is not REQUIRED, f"{declaration}: input {parameter.name} is optional"


def _check_attributes(declaration: Declaration, schema: Any) -> None:
    known = dict(schema.attributes)
    known.pop("consumed_inputs", None)  # a hint of version 1 that means nothing: the reader drops it
    family = schemas[declaration.domain, declaration.name]
    somewhere = {a for v in declaration.versions for a in family[v].attributes}
    assert set(known) <= set(declaration.attributes), f"{declaration} lacks {set(known) - set(declaration.attributes)}"
    assert set(declaration.attributes) <= somewhere, f"{declaration} invents {set(declaration.attributes) - somewhere}"
    for name, attribute in known.items():
        default = declaration.attributes[name]
        if attribute.required:
            continue
        assert default is not REQUIRED, f"{declaration}: attribute {name} is optional"
        if not attribute.default_value.type:
            continue
        formal = helper.get_attribute_value(attribute.default_value)
        formal = formal.decode() if isinstance(formal, bytes) else formal
        others = {str(family[v].attributes[name].default_value) for v in declaration.versions if name in family[v].attributes}
        if len(others) > 1:
            continue  # versions that share the body have several defaults: the reader passes each its own
        if isinstance(formal, float):
            assert default is None or np.float32(default) == np.float32(formal), f"{declaration}: {name}={default}, not {formal}"
        elif isinstance(formal, list):
            assert default is None or list(default) == formal, f"{declaration}: {name}={default}, not {formal}"
        else:
            assert default == formal, f"{declaration}: {name}={default}, not {formal}"


def test_a_second_claim_is_refused() -> None:
    with pytest.raises(ValueError, match="declared twice"):

        @operator("Softmax", 13)
        def again(xp: Any, x: Any, *, axis: int = -1) -> Any:
            return x


def test_an_unknown_version_is_refused() -> None:
    with pytest.raises(ValueError, match="ONNX has no Softmax-12"):

        @operator("Softmax", 12)
        def never(xp: Any, x: Any, *, axis: int = -1) -> Any:
            return x
