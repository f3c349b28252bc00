"""The models to write at every opset: ONNX's own cases, the same with constants as inputs, and drawn models of one node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ... import dtypes
from ...devices.device import resolve
from ...errors import SonnxError
from ...ir.reader import read
from ...proto.schemas import plain_domain, schemas
from ...runtime.executor import Executor
from ..cases import load
from ..fuzz import generate, recipes, regular_cases
from ..gradient_matrix import DOMAINS

Operator = tuple[str, str]
"""(domain, operator)"""

KINDS = ("node", "simple")
NEWEST_DRAWS, OLDER_DRAWS = 4, 2
"""How many models are drawn for the newest version of an operator, and for each older one."""
_SMALL = 64
"""The maximum number of elements of an input that becomes a constant."""
_TRIES = 40
_COMMON = (np.float32, np.int64, np.bool_)


@dataclass(frozen=True)
class OpsetProblem:
    """A model to write at other opsets.

    Attributes:
        name: The name of the case, or the schema version and number of a drawn model.
        kind: "case", "case with constants", "drawn" or "drawn with constants".
        model: The model's bytes.
        feeds: The values of its inputs.
        expected: The expected outputs; None if only our own run of the model determines them.
        rtol: The relative tolerance of a case.
        atol: The absolute tolerance of a case.
        operators: The operators of the model; each has a row.
    """

    name: str
    kind: str
    model: bytes
    feeds: list[Any]
    expected: list[Any] | None
    rtol: float
    atol: float
    operators: tuple[Operator, ...]


def shown(operator: Operator) -> str:
    """Return the name that reports use: "Softmax", "ai.onnx.ml:Scaler"."""
    return f"{operator[0]}:{operator[1]}" if operator[0] else operator[1]


def listed(select: str = "") -> list[Operator]:
    """Return every operator of ONNX's domains whose name matches."""
    return sorted(key for key in schemas if key[0] in DOMAINS and re.search(select, shown(key)))


def models(select: str = "") -> Iterator[OpsetProblem]:
    """Yield all models of the operators that match, always in the same order."""
    chosen = set(listed(select))
    for case in load(KINDS):
        proto = ModelProto.FromString(case.model)
        operators = operators_of(proto)
        if case.data and chosen & set(operators):
            feeds, expected = case.data[0]
            yield OpsetProblem(case.name, "case", case.model, list(feeds), list(expected), case.rtol, case.atol, operators)
            baked = with_constants(proto, feeds)
            if baked is not None and _valid(baked[0]):
                model, rest = baked
                kind = "case with constants"
                yield OpsetProblem(
                    case.name, kind, model.SerializeToString(), rest, list(expected), case.rtol, case.atol, operators
                )
    for domain, name in sorted(chosen):
        for version in sorted(schemas[domain, name]):
            yield from drawn(domain, name, version)
        if (domain, name) in _OF_MAPS:
            yield _of_a_map(name)


def operators_of(model: ModelProto) -> tuple[Operator, ...]:
    """Return the operators of the known domains in a model, its graphs and its functions."""
    nodes = chain(nodes_of(model.graph.node), *(nodes_of(f.node) for f in model.functions))
    found = {(plain_domain(node.domain), node.op_type) for node in nodes}
    return tuple(sorted(f for f in found if f[0] in DOMAINS))


def nodes_of(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Yield these nodes and the nodes of their graphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            yield from nodes_of(attribute.g.node)


def with_constants(proto: ModelProto, feeds: Sequence[Any]) -> tuple[ModelProto, list[Any]] | None:
    """Return a model of one node with its small inputs, except the first, as constants; None if that is not possible."""
    if len(proto.graph.node) != 1:
        return None
    model = ModelProto()
    model.CopyFrom(proto)
    rest: list[Any] = []
    del model.graph.input[:]
    for i, (info, x) in enumerate(zip(proto.graph.input, feeds, strict=False)):
        if i and isinstance(x, np.ndarray) and x.size <= _SMALL and info.type.HasField("tensor_type"):
            model.graph.initializer.append(numpy_helper.from_array(x, info.name))
        else:
            model.graph.input.append(info)
            rest.append(x)
    return (model, rest) if model.graph.initializer else None


def drawn(domain: str, name: str, version: int) -> Iterator[OpsetProblem]:
    """Yield models of one node of a schema version, without special values; the first has the most common element types."""
    allowed = generate.allowed_types(schemas[domain, name][version])
    count = NEWEST_DRAWS if version == current(domain, name) else OLDER_DRAWS
    given = 0
    for index in range(_TRIES if (domain, name) in recipes.load() else 0):
        if given == count:
            return
        rng = np.random.default_rng([index, version, *name.encode()])
        types = {p: found[int(rng.integers(len(found)))] for p, found in allowed.items()}
        if not given:
            types |= {
                p: np.dtype(next(d for d in _COMMON if d in found)) for p, found in allowed.items() if {*_COMMON} & {*found}
            }
        made = regular_cases.drawn(rng, domain, name, version, types, index=index)
        if made is None:
            continue
        case, d = made
        must = {f"x{i}" for i in d.fixed}
        later = {n: x for n, x in list(case.inputs.items())[1:] if n in case.node.input}
        small = {n for n, x in later.items() if isinstance(x, np.ndarray) and x.size <= _SMALL}
        found = [_drawn(case, "drawn", must, given + 1)]
        if small - must:
            found.append(_drawn(case, "drawn with constants", must | small, given + 1))
        given += found[0] is not None
        yield from (problem for problem in found if problem is not None)


def _drawn(case: generate.NodeCase, kind: str, constants: set[str], number: int) -> OpsetProblem | None:
    """Return the case as a problem; None if ONNX's checker refuses it: the types of a drawn subgraph may not match."""
    model = _typed(case, frozenset(constants))
    if model is None or not _valid(model):
        return None
    feeds = [x for n, x in case.inputs.items() if n not in constants]
    label = f"{shown((case.domain, case.operator))}-{case.version} #{number}"
    return OpsetProblem(label, kind, model.SerializeToString(), feeds, None, 0, 0, operators_of(model))


_OF_MAPS: dict[Operator, tuple[int, dict[str, Any], dict[Any, float], int]] = {
    ("ai.onnx.ml", "CastMap"): (TensorProto.INT64, {"map_form": "SPARSE", "max_map": 4}, {0: 0.5, 2: -1.25}, 4),
    ("ai.onnx.ml", "DictVectorizer"): (TensorProto.STRING, {"string_vocabulary": ["a", "b", "c"]}, {"c": 2.0, "a": 0.5}, 3),
}
"""Operators of maps, which the generator cannot draw: key type, attributes, a map of floats, the length of the result."""


def _of_a_map(name: str) -> OpsetProblem:
    keys, attributes, value, length = _OF_MAPS["ai.onnx.ml", name]
    kind = helper.make_map_type_proto(keys, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    graph = helper.make_graph(
        [helper.make_node(name, ["x"], ["y"], domain="ai.onnx.ml", **attributes)],
        name,
        [helper.make_value_info("x", kind)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, length])],
    )
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    return OpsetProblem(f"{name} of a map", "drawn", model.SerializeToString(), [value], None, 0, 0, operators_of(model))


def _typed(case: generate.NodeCase, constants: frozenset[str]) -> ModelProto | None:
    """Return the case as a model; a run supplies output ranks that inference does not know.  None if it does not run."""
    model = generate.model(case, constants=constants)
    if any(not info.type.tensor_type.HasField("shape") for info in model.graph.output if info.type.HasField("tensor_type")):
        try:
            graph = read(model)
            outputs = Executor(graph, resolve("CPU")).run(graph, [x for n, x in case.inputs.items() if n not in constants])
        except SonnxError:
            return None
        for info, y in zip(model.graph.output, outputs, strict=True):
            if isinstance(y, np.ndarray):
                info.type.CopyFrom(helper.make_tensor_type_proto(dtypes.onnx_code(y.dtype), [None] * y.ndim))
    return model


def _valid(model: ModelProto) -> bool:
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:  # the checker raises several kinds
        return False
    return True


def current(domain: str, name: str) -> int:
    """Return the newest version of an operator that is not deprecated, or the newest if all are."""
    versions = schemas[domain, name]
    return max((v for v, s in versions.items() if not s.deprecated), default=max(versions))
