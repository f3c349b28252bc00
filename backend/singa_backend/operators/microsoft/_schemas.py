"""The schemas of onnxruntime's own operators, as data (schemas.json): names, types, attributes and defaults.

tests/operators/microsoft/test_schemas.py compares them with those that the onnxruntime package reports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onnx import defs, helper

from ...proto.schemas import LAX, MICROSOFT, declare_schema

DATA: dict[str, Any] = json.loads(Path(__file__).with_name("schemas.json").read_text())
"""Domain -> operator type -> its inputs, outputs, attributes, types, and the types of onnxruntime's CPU kernel, if it has one."""


def _attribute(name: str, form: list[Any]) -> defs.OpSchema.Attribute:
    """An attribute of the data: its type, then "required" or "default" and the default."""
    kind = getattr(defs.OpSchema.AttrType, form[0])
    if form[1:] == ["required"]:
        return defs.OpSchema.Attribute(name, kind, required=True)
    if form[1:]:
        return defs.OpSchema.Attribute(name, helper.make_attribute(name, form[2], attr_type=int(kind.value)), "")
    return defs.OpSchema.Attribute(name, kind, required=False)


def declare_all() -> None:
    """Declare every schema of the data, of com.microsoft and of ONNX's domain."""
    for key, domain in ((MICROSOFT, MICROSOFT), ("ai.onnx", LAX)):
        for name, form in DATA[key].items():
            attributes = {n: _attribute(n, a) for n, a in form.get("attributes", {}).items()}
            declare_schema(name, form["inputs"], form["outputs"], attributes, types=form.get("types", {}), domain=domain)


def cpu_types(domain: str, name: str) -> dict[str, list[str]] | None:
    """The types that onnxruntime's CPU kernel has for each type parameter; None if there is no such kernel."""
    found: dict[str, list[str]] | None = DATA["ai.onnx" if domain == LAX else domain][name].get("cpu")
    return found


declare_all()
