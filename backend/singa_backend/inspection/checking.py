"""Would this model run?  Every problem at once: what contradicts ONNX, what is not implemented, and what onnx's checker says."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import defs

from .. import dtypes
from ..errors import Problem, SonnxError
from ..ir.reader import read
from ..limits import Budget, Limits, spend
from ..proto.checker import CheckerResult, check_and_infer
from ..proto.load import ModelSource, load_model
from ..proto.schemas import plain_domain, schemas, type_strings
from .table import Call, Table
from .tables import Inspection, readable, tables

_VARIADIC = defs.OpSchema.FormalParameterOption.Variadic


@dataclass
class OperatorUse:
    """One operator as one schema version: how many nodes use it, with which dtypes, and whether it is implemented."""

    domain: str
    operator: str
    version: int | None
    status: str
    nodes: int = 0
    dtypes: set[str] = field(default_factory=set)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "dtypes": sorted(self.dtypes)}


@dataclass
class CheckReport:
    """What `check` found.  problems: all of them, with codes (docs/errors.md); opinion: onnx's own checker, beside ours."""

    inspection: Inspection
    problems: list[Problem]
    operators: list[OperatorUse]

    @property
    def opinion(self) -> CheckerResult:
        return self.inspection.opinion

    @property
    def valid(self) -> bool:
        """Whether nothing contradicts ONNX."""
        return not any(p.code.startswith("SX1") for p in self.problems)

    @property
    def good(self) -> bool:
        """Whether the model is valid and all of it is implemented."""
        return not self.problems

    @property
    def dtypes(self) -> list[str]:
        """Every dtype that occurs, as far as shape inference knows."""
        return sorted(set().union(*(use.dtypes for use in self.operators)))

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        seen = self.inspection
        return {
            "file": seen.file, "good": self.good, "valid": self.valid, "ir_version": seen.ir_version, "opsets": seen.opsets,
            "producer": seen.producer, "parameters": seen.parameters, "dtypes": self.dtypes,
            "problems": [vars(p) for p in self.problems],
            "operators": [use.to_dict() for use in self.operators],
            "second_opinion": self.opinion.to_dict(),
        }  # fmt: skip


def check(model: ModelSource, *, timeout: float = 60.0) -> CheckReport:
    """Hold a model (a ModelProto, bytes or a path) to ONNX's rules and to what is implemented; nothing is executed.

    timeout: seconds that reading it may take, and that onnx's shape inference and checker may, in a child process.
    Raises InvalidModel only when this is no ONNX file at all; everything else is a problem in the report.
    """
    proto, folder = load_model(model)
    path = Path(model) if isinstance(model, (str, os.PathLike)) else None
    problems: list[Problem] = []
    try:
        with spend(Budget(Limits(deadline=timeout))):
            read(proto, folder)
    except SonnxError as error:
        alone = Problem(error.message, error.code, error.node, error.operator, error.opset, error.version)
        problems = list(error.problems) or [alone]
    proto = readable(proto)
    seen = tables(proto, path, check_and_infer(proto, path, timeout), None, False)
    uses: dict[tuple[str, str, int | None, str], OperatorUse] = {}
    for table, call in seen.calls():
        key = (call.domain, call.operator, call.version, call.status)
        use = uses.setdefault(key, OperatorUse(*key))
        use.nodes += 1
        use.dtypes |= {name for n in (*call.inputs, *call.outputs) if (name := _dtype(table, n))}
        problems += _mistyped(table, call)
    order = {"unsupported": 0, "deprecated": 1, "supported": 2, "function": 3}
    operators = sorted(uses.values(), key=lambda u: (order[u.status], u.domain, u.operator, u.version or 0))
    return CheckReport(seen, problems, operators)


def _dtype(table: Table, name: str) -> str:
    value = table.values.get(name)
    return dtypes.onnx_name(value.dtype) if value is not None and value.dtype is not None else ""


def _mistyped(table: Table, call: Call) -> list[Problem]:
    """Inputs of a dtype that the schema version does not allow, where the dtype is known."""
    if call.version is None:
        return []
    schema = schemas[plain_domain(call.domain), call.operator][call.version]
    found = []
    for i, name in enumerate(call.inputs):
        value = table.values.get(name) if name else None
        last = schema.inputs[-1] if schema.inputs else None
        if value is None or value.kind != "tensor" or value.dtype is None or last is None:
            continue
        if i >= len(schema.inputs) and last.option != _VARIADIC:
            continue
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        types = set(type_strings(schema)[formal.type_str])
        if f"tensor({dtypes.onnx_name(value.dtype)})" not in types:
            names = ", ".join(sorted(t.removeprefix("tensor(").removesuffix(")") for t in types if t.startswith("tensor(")))
            message = f"input {formal.name!r} ({name}) is {dtypes.onnx_name(value.dtype)}; {call.title} takes {names or types}"
            found.append(Problem(message, "SX107", call.name, call.operator, None, call.version))
    return found
