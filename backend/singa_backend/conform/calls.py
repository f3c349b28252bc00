"""The schema versions that a case calls, read from its model: for backends whose runs cannot be observed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from onnx import ModelProto, NodeProto, load_model_from_string

from ..proto.schemas import plain_domain, schemas
from .cases import Case

Cell = tuple[str, str, int]
"""(domain, operator, since-version)"""

Executed = dict[Cell, tuple[set[tuple[str, str]], set[str]]]
"""For each schema version, (type parameter, dtype) pairs and names of attributes."""


def calls_of(case: Case) -> tuple[Executed, Cell | None]:
    """Return what a case calls, and the version that it tests.

    Args:
        case: The case.

    Returns:
        The schema versions, with their attributes; the dtypes are known if the model has one node.  And the version that a node
        case tests; None for other cases.
    """
    model = load_model_from_string(case.model)
    executed: Executed = {}
    for imports, node in _nodes(model):
        cell = _cell(imports, node)
        if cell is not None:
            executed.setdefault(cell, (set(), set()))[1].update(a.name for a in node.attribute)
    if case.kind != "node" or len(model.graph.node) != 1:
        return executed, None
    node = model.graph.node[0]
    tested = _cell(_imports(model.opset_import), node)
    if tested is not None:
        schema = schemas[tested[:2]][tested[2]]
        for inputs, outputs in case.data:
            fed = dict(zip((v.name for v in model.graph.input), inputs, strict=False))
            expected = dict(zip((v.name for v in model.graph.output), outputs, strict=False))
            for formals, names, values in ((schema.inputs, node.input, fed), (schema.outputs, node.output, expected)):
                for i, name in enumerate(names):
                    if formals and hasattr(values.get(name), "dtype"):
                        executed[tested][0].add((formals[min(i, len(formals) - 1)].type_str, values[name].dtype.name))
    return executed, tested


def _imports(opsets: Iterable[Any]) -> dict[str, int]:
    return {plain_domain(o.domain): o.version for o in opsets}


def _nodes(model: ModelProto) -> Iterator[tuple[Mapping[str, int], NodeProto]]:
    """Every node of a model and its functions, with the opsets by which it is read."""
    pending = [(_imports(model.opset_import), n) for n in model.graph.node]
    pending += [(_imports(f.opset_import), n) for f in model.functions for n in f.node]
    while pending:
        imports, node = pending.pop()
        yield imports, node
        for a in node.attribute:
            pending += [(imports, n) for g in (a.g, *a.graphs) for n in g.node]


def _cell(imports: Mapping[str, int], node: NodeProto) -> Cell | None:
    """The schema version of a node; None for a call of a function, or of an unknown operator."""
    domain = plain_domain(node.domain)
    versions = [v for v in schemas.get((domain, node.op_type), ()) if v <= imports.get(domain, 0)]
    return (domain, node.op_type, max(versions)) if versions else None
