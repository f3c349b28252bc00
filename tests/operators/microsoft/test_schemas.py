"""The schemas of onnxruntime's operators are those that it reports, and each operator has a declaration or a reason."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from singa_backend.conform.fuzz import recipes
from singa_backend.io.processes import Child
from singa_backend.ir.declaration import declarations, undeclared
from singa_backend.proto.schemas import LAX, MICROSOFT, lax, load_domain, schemas

load_domain(MICROSOFT)
from singa_backend.operators.microsoft._schemas import DATA  # noqa: E402

DOMAINS = ((MICROSOFT, MICROSOFT), ("ai.onnx", LAX))


def _mark(parameter: Any) -> str:
    option = parameter.option.value
    stars = "" if option != 2 else "*" if parameter.isHomogeneous else "**"
    return f"{stars}{parameter.name}{'?' if option == 1 else ''}: {parameter.typeStr}"


def _attribute(attribute: Any) -> list[Any]:
    default = onnx.AttributeProto.FromString(attribute._default_value)
    if attribute.required or not default.name:
        return [attribute.type.name, "required"] if attribute.required else [attribute.type.name]
    value = onnx.helper.get_attribute_value(default)
    plain = value.decode() if isinstance(value, bytes) else [v.decode() if isinstance(v, bytes) else v for v in value]\
        if isinstance(value, list) else value  # fmt: skip
    return [attribute.type.name, "default", plain]


def _serve() -> Any:
    """In the child: every schema and CPU kernel that onnxruntime reports."""
    import onnxruntime
    import onnxruntime.capi.onnxruntime_pybind11_state as state

    def answer(_: int) -> tuple[str, dict[tuple[str, str], dict[str, Any]]]:
        kernels: dict[tuple[str, str], dict[str, set[str]]] = {}
        for kernel in state.get_all_opkernel_def():
            if kernel.provider == "CPUExecutionProvider":
                there = kernels.setdefault((kernel.domain, kernel.op_name), {})
                for name, types in kernel.type_constraints.items():
                    there.setdefault(name, set()).update(types)
        found = {}
        for s in state.get_all_operator_schema():
            if s.since_version == 1:
                form: dict[str, Any] = {"inputs": [_mark(p) for p in s.inputs], "outputs": [_mark(p) for p in s.outputs]}
                form["attributes"] = {n: _attribute(a) for n, a in s.attributes.items()}
                form["types"] = {c.type_param_str: sorted(c.allowed_type_strs) for c in s.type_constraints}
                if (s.domain, s.name) in kernels:
                    form["cpu"] = {n: sorted(t) for n, t in kernels[s.domain, s.name].items()}
                found[s.domain, s.name] = form
        return onnxruntime.__version__, found

    return answer


def test_the_schemas_are_those_of_onnxruntime() -> None:
    pytest.importorskip("onnxruntime", reason="the schemas are those of an extra: pip install 'sonnx[oracle]'")
    with Child(_serve) as child:
        version, theirs = child.ask(0, 60)
    if version != DATA["onnxruntime"]:
        pytest.skip(f"the data are those of onnxruntime {DATA['onnxruntime']}, installed is {version}")
    for key, _ in DOMAINS:
        domain = "" if key == "ai.onnx" else key
        assert key != MICROSOFT or set(DATA[key]) == {n for d, n in theirs if d == domain}
        for name, form in DATA[key].items():
            mine = {"attributes": {}, "types": {}} | form
            assert mine == theirs[domain, name], name


def test_each_operator_is_declared_or_has_a_reason() -> None:
    names = set(DATA[MICROSOFT])
    declared = {n for d, n in declarations if d == MICROSOFT}
    without = {n for d, n in undeclared if d == MICROSOFT}
    assert not declared & without
    assert declared | without == names
    assert {n for d, n in declarations if d == LAX} == set(lax) == set(DATA["ai.onnx"])


def test_each_declared_operator_has_a_recipe() -> None:
    drawn = set(recipes.load(MICROSOFT))
    assert drawn == {key for key in declarations if key[0] in (MICROSOFT, LAX)}
    assert not {key for key in recipes.load() if key[0] in (MICROSOFT, LAX)}


def test_defaults_of_parameters_are_those_of_the_schema() -> None:
    for (domain, name), versions in declarations.items():
        if domain not in (MICROSOFT, LAX):
            continue
        declaration, schema = versions[1], schemas[domain, name][1]
        assert set(declaration.attributes) <= set(schema.attributes), name
        for key, attribute in schema.attributes.items():
            default = attribute.default_value
            if key in declaration.attributes and default.name:
                value = onnx.helper.get_attribute_value(default)
                plain = value.decode() if isinstance(value, bytes) else tuple(value) if isinstance(value, list) else value
                assert declaration.attributes[key] == plain, (name, key)
