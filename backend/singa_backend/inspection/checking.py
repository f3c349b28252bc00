"""Check whether a model can run: lists all violations of ONNX, unimplemented operators, and the result of onnx's checker."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import defs

from .. import dtypes
from ..comparison import finite
from ..deadline import SHORTEST
from ..errors import Problem, SonnxError
from ..ir.graph import Graph, Value
from ..ir.reader import read
from ..limits import Budget, Limits, check_number, spend
from ..proto.checker import CheckerResult, check_and_infer
from ..proto.load import ModelSource, load_model
from ..proto.schemas import plain_domain, schemas, type_strings
from ..rendering import printable
from .table import Call, Table
from .tables import Inspection, readable, tables

_VARIADIC = defs.OpSchema.FormalParameterOption.Variadic


@dataclass
class OperatorUse:
    """The use of one schema version of an operator.

    Attributes:
        domain: of the operator, "ai.onnx" for ONNX's own.
        operator: its name.
        version: the schema version; None for a function of the model and an unknown operator.
        status: "supported", "deprecated", "unsupported", or "function" for a function of the model.
        nodes: the number of nodes that use it.
        dtypes: names of the dtypes of their inputs and outputs, as far as they are known.
    """

    domain: str
    operator: str
    version: int | None
    status: str
    nodes: int = 0
    dtypes: set[str] = field(default_factory=set)

    def to_dict(self) -> dict[str, Any]:
        """Return the use as plain data.

        Returns:
            A dict of the attributes, with sorted dtypes.
        """
        return {**vars(self), "dtypes": sorted(self.dtypes)}


@dataclass
class CheckReport:
    """The result of `check`.

    Attributes:
        inspection: the tables of the model.
        problems: all problems, with their codes (docs/errors.md).
        operators: the operators that the model uses, unsupported ones first.
        warnings: what is read in another way than the file states it, and nodes in training mode, one sentence each.
        nonfinite: the initializers and constants that hold NaN or infinity, one sentence each, those with NaN first.
    """

    inspection: Inspection
    problems: list[Problem]
    operators: list[OperatorUse]
    warnings: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()

    @property
    def opinion(self) -> CheckerResult:
        """The result of onnx's own checker."""
        return self.inspection.opinion

    @property
    def valid(self) -> bool:
        """Whether the model violates no rule of ONNX."""
        return not any(p.code.startswith("SX1") for p in self.problems)

    @property
    def good(self) -> bool:
        """Whether the model is valid and all of it is implemented."""
        return not self.problems

    @property
    def dtypes(self) -> list[str]:
        """The dtypes of all values, as far as shape inference knows them."""
        return sorted(set().union(*(use.dtypes for use in self.operators)))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for ``--json``.

        Returns:
            A dict of file, good, valid, opsets, problems, operators, and the result of onnx's checker.
        """
        seen = self.inspection
        return {
            "file": seen.file, "good": self.good, "valid": self.valid, "ir_version": seen.ir_version, "opsets": seen.opsets,
            "producer": seen.producer, "parameters": seen.parameters, "dtypes": self.dtypes,
            "problems": [vars(p) for p in self.problems], "warnings": list(self.warnings),
            "nonfinite": list(self.nonfinite),
            "operators": [use.to_dict() for use in self.operators],
            "second_opinion": self.opinion.to_dict(),
        }  # fmt: skip


def check(model: ModelSource, *, timeout: float = 60.0) -> CheckReport:
    """Check a model against ONNX's rules and the implemented operators, without running it.

    Args:
        model: a ModelProto, bytes or a path.
        timeout: the maximum seconds for reading the model, and for onnx's shape inference and checker in a child process.

    Returns:
        All problems, and the operators that the model uses.

    Raises:
        InvalidModel: the model is not an ONNX file; all other problems are in the report.
        InvalidInput: the timeout is not a positive number (SX309).

    Example:
        >>> report = check("model.onnx")
        >>> report.good, report.problems
    """
    check_number("timeout", timeout, SHORTEST)
    proto, folder = load_model(model)
    path = Path(model) if isinstance(model, (str, os.PathLike)) else None
    problems: list[Problem] = []
    warnings: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    try:
        with spend(Budget(Limits(deadline=timeout))):
            graph = read(proto, folder)
        warnings, nonfinite = (*graph.warnings, *_in_training(graph)), _nonfinite(graph)
    except SonnxError as error:
        alone = Problem(error.message, error.code, error.node, error.operator, error.opset, error.version)
        problems = list(error.problems) or [alone]
    proto = readable(proto)
    seen = tables(proto, path, check_and_infer(proto, timeout), None, False)
    uses: dict[tuple[str, str, int | None, str], OperatorUse] = {}
    for table, call in seen.calls():
        key = (call.domain, call.operator, call.version, call.status)
        use = uses.setdefault(key, OperatorUse(*key))
        use.nodes += 1
        use.dtypes |= {name for n in (*call.inputs, *call.outputs) if (name := _dtype(table, n))}
        problems += _mistyped(table, call)
    order = {"unsupported": 0, "deprecated": 1, "supported": 2, "function": 3}
    operators = sorted(uses.values(), key=lambda u: (order[u.status], u.domain, u.operator, u.version or 0))
    return CheckReport(seen, problems, operators, warnings, nonfinite)


def _in_training(graph: Graph) -> list[str]:
    """What nodes in training mode do to the results of a run."""
    nodes = list(graph.all_nodes())
    drops = [n for n in nodes if n.op_type == "Dropout" and not n.domain and _is_true(n.input(2))]
    norms = [n for n in nodes if n.op_type == "BatchNormalization" and not n.domain and n.attributes.get("training_mode") == 1]
    kinds = (
        (drops, "Dropout", "drop random elements in every run"),
        (norms, "BatchNormalization", "normalize by the statistics of each batch"),
    )
    hint = "for inference, export the network in inference mode (PyTorch: eval() of the module that is exported)"
    return [f"{len(found)} {kind} nodes are in training mode and {what}: {hint}" for found, kind, what in kinds if found]


def _is_true(value: Value | None) -> bool:
    """Whether a value is a constant that is true."""
    if value is None:
        return False
    value = value.original
    node = value.producer
    constant = node.get("value") if node is not None and node.op_type == "Constant" else value.constant
    return constant is not None and bool(np.asarray(constant).any())


def _nonfinite(graph: Graph) -> tuple[str, ...]:
    """The initializers and attributes, also of inner graphs, that hold NaN or infinity; those with NaN first."""
    graphs = [graph, *(g for node in graph.all_nodes() for g in node.graphs)]
    held = [(f"initializer '{printable(n)}'", a) for g in {id(g): g for g in graphs}.values() for n, a in g.states.items()]
    for node in graph.all_nodes():
        given = {n: v for n, v in node.attributes.items() if n in node.given or not node.inputs}
        owner = f"{printable(node.op_type)} '{printable(node.name)}'"
        held += [(f"attribute '{n}' of {owner}", v) for n, v in given.items() if not isinstance(v, Graph)]
    found = []
    for what, value in held:
        nan, inf = finite.counts(value)
        if nan or inf:
            words = " and ".join([f"{nan} NaN"] * bool(nan) + [f"{inf} infinite value{'s' * (inf != 1)}"] * bool(inf))
            size = sum(a.size for _, a in finite.leaves(value))
            found.append((nan == 0, f"the {what} holds {words} ({size} in all)"))
    return tuple(text for _, text in sorted(found, key=lambda pair: pair[0]))


def _dtype(table: Table, name: str) -> str:
    value = table.values.get(name)
    return dtypes.onnx_name(value.dtype) if value is not None and value.dtype is not None else ""


def _mistyped(table: Table, call: Call) -> list[Problem]:
    """Inputs whose dtype is known and not allowed by the schema version."""
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
            message = (
                f"input {formal.name!r} ({name}) of {call.title} must be of {names or types}, got {dtypes.onnx_name(value.dtype)}"
            )
            found.append(Problem(message, "SX107", call.name, call.operator, None, call.version))
    return found
