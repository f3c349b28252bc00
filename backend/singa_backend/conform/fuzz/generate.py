"""Draws valid models of one node from ONNX's schemas: case i of seed S is the same on every machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, TypeProto, defs, helper, numpy_helper, shape_inference

from ... import dtypes
from ...proto import test_data
from ...proto.schemas import LAX, MICROSOFT, lax, public_domain, schemas
from ..cases import ConformanceError
from . import recipes
from .strategies import CONSTANT, Draw, Skip, bounds, float_info

Cell: TypeAlias = tuple[str, str, int, str, str]
"""(domain, operator, version, type parameter, dtype)"""

TRIES = 40
"""How often a node is drawn again that a recipe finds to be invalid."""

ORT_OPSET = 26
"""The newest opset that onnxruntime knows; of the opsets with one schema version, those up to it are drawn most often."""


@dataclass
class NodeCase:
    """A model of one node with its inputs.

    Attributes:
        inputs: The values by name, in order; a list is a sequence.
        constants: The inputs that are initializers of the model.
        types: The dtype of each type parameter.
        select: The expression that selected the operator version.
        flags: Special properties of the values, for the ledger's conditions.
    """

    seed: int
    index: int
    domain: str
    operator: str
    version: int
    opset: int
    node: NodeProto
    inputs: dict[str, Any]
    constants: frozenset[str]
    types: dict[str, np.dtype[Any]]
    select: str = ""
    model: ModelProto = field(default_factory=ModelProto)
    flags: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.operator}-{self.version}"

    @property
    def feeds(self) -> dict[str, Any]:
        return {n: v for n, v in self.inputs.items() if n not in self.constants}

    @property
    def schema(self) -> defs.OpSchema:
        return schemas[self.domain, self.operator][self.version]

    def describe(self) -> str:
        """Return the node in one line."""
        values = ", ".join(_brief(self.inputs[n]) if n else "-" for n in self.node.input)
        given = ", ".join(f"{a.name}={_attribute(a)}" for a in self.node.attribute)
        return f"{self.name} (opset {self.opset}) [{values}] {given}".rstrip()


def _brief(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_brief, value))}]"
    return f"{dtypes.onnx_name(value.dtype)}{list(value.shape)}"


def _attribute(attribute: Any) -> str:
    value = helper.get_attribute_value(attribute)
    text = value.decode() if isinstance(value, bytes) else type(value).__name__ if hasattr(value, "DESCRIPTOR") else str(value)
    return text if len(text) < 60 else text[:57] + "..."


# --- drawing ----------------------------------------------------------------------------------------------------------


def cells(select: str = "") -> tuple[tuple[Cell, ...], tuple[tuple[str, str, int], ...]]:
    """Return every dtype cell and schema version that has a recipe and matches `select` ("ai.onnx.ml:Scaler-1", "Add-7").

    Raises:
        ConformanceError: None matches.
    """
    return _cells(select, tuple(sorted(recipes.load(select))))


@lru_cache(maxsize=8)
def _cells(select: str, names: tuple[tuple[str, str], ...]) -> tuple[tuple[Cell, ...], tuple[tuple[str, str, int], ...]]:
    found: list[Cell] = []
    versions: list[tuple[str, str, int]] = []
    for domain, name in names:
        for version, schema in sorted(schemas[domain, name].items()):
            if not re.search(select, label(domain, name, version)):
                continue
            versions.append((domain, name, version))
            for parameter, allowed in allowed_types(schema).items():
                found += [(domain, name, version, parameter, dtype.name) for dtype in allowed]
    if not versions:
        raise ConformanceError(f"no operator version with a recipe matches {select!r}", code="SX820")
    return tuple(found), tuple(versions)


def shown_domain(domain: str) -> str:
    """A domain in selections: operators that onnxruntime reads in ONNX's domain are those of "com.microsoft.lax"."""
    return f"{MICROSOFT}.lax" if domain == LAX else domain


def label(domain: str, name: str, version: int) -> str:
    """An operator version in selections."""
    return f"{shown_domain(domain)}:{name}-{version}" if domain else f"{name}-{version}"


def allowed_types(schema: defs.OpSchema) -> dict[str, list[np.dtype[Any]]]:
    """Return the element dtypes of each type parameter: of tensors, or of sequences if it allows no tensors."""
    out: dict[str, list[np.dtype[Any]]] = {}
    for constraint in schema.type_constraints:
        texts = constraint.allowed_type_strs
        plain = [d for t in texts if (d := dtypes.from_type_string(t)) is not None]
        inner = [d for t in texts if (m := re.search(r"tensor\(.*?\)", t)) and (d := dtypes.from_type_string(m[0])) is not None]
        kept = sorted(dict.fromkeys(plain or inner), key=lambda d: d.name)
        if kept:
            out[constraint.type_param_str] = kept
    return out


def draw(seed: int, index: int, select: str = "") -> NodeCase | None:
    """Draw case `index` of `seed`; None if the operator has no valid node of the drawn types."""
    every, versions = cells(select)
    rng = np.random.default_rng([seed, index])
    fixed: tuple[str, str] | None = None
    if index % 2 and every:  # half of the cases visit the cells, half the versions, in an order that depends on the seed
        order = _order(seed, len(every))
        domain, name, version, parameter, dtype = every[order[index // 2 % len(every)]]
        fixed = (parameter, dtype)
    else:
        domain, name, version = versions[_order(seed, len(versions))[index // 2 % len(versions)]]
    schema = schemas[domain, name][version]
    allowed = allowed_types(schema)
    recipe = recipes.load(select)[domain, name]
    for _ in range(TRIES):
        types = {p: found[int(rng.integers(len(found)))] for p, found in allowed.items()}
        if fixed:
            types[fixed[0]] = next(d for d in allowed[fixed[0]] if d.name == fixed[1])
        tie(types, fixed[0] if fixed else "")
        d = Draw(rng, schema, draw_opset(rng, domain, name, version), types)
        try:
            recipe(d)
            return as_case(seed, index, domain, name, d, select)
        except Skip:
            continue
    return None


def tie(types: dict[str, np.dtype[Any]], first: str = "") -> None:
    """Give a sequence and its elements, and an optional and its value, one dtype."""
    for outer, inner in (("S", "T"), ("O", "V")):
        if outer in types and inner in types:
            types[outer] = types[inner] = types[outer if first == outer else inner]


@lru_cache(maxsize=8)
def _order(seed: int, n: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng([seed, n, 7]).permutation(n).tolist())


def draw_opset(rng: np.random.Generator, domain: str, name: str, version: int) -> int:
    """Draw one of the opsets that have this version."""
    known = schemas[domain, name]
    newest = defs.onnx_opset_version() if domain == "" else min(lax[name], ORT_OPSET) if domain == LAX else max(known)
    last = min((v for v in known if v > version), default=newest + 1) - 1
    if version <= ORT_OPSET < last and rng.random() < 0.9:
        last = ORT_OPSET
    return int(rng.integers(version, last + 1))


# --- from a draw to a model -------------------------------------------------------------------------------------------


def as_case(seed: int, index: int, domain: str, name: str, d: Draw, select: str) -> NodeCase:
    """Return what a recipe has drawn as a case, with its model."""
    while d.inputs and d.inputs[-1] is None:
        d.inputs.pop()
    names = ["" if v is None else f"x{i}" for i, v in enumerate(d.inputs)]
    inputs = {n: v for n, v in zip(names, d.inputs, strict=True) if n}
    constants = frozenset(
        n for i, n in enumerate(names)
        if n and not isinstance(inputs[n], list) and (i in d.fixed or (i and d.chance(CONSTANT)))
    )  # fmt: skip
    node = helper.make_node(name, names, d.outputs, name="node", domain=public_domain(domain))
    for key, value in d.attributes.items():
        if value is not None:
            kind = attribute_type(d.schema.attributes[key])
            node.attribute.append(helper.make_attribute(key, value, attr_type=kind))
    case = NodeCase(seed, index, domain, name, d.v, d.opset, node, inputs, constants, d.types, select)
    case.model = model(case)
    case.flags = _flags(case)
    return case


def attribute_type(attribute: Any) -> int:
    """Return the type of a schema's attribute as an AttributeProto.AttributeType."""
    return int(attribute.type.value)


def imports(case: NodeCase) -> list[Any]:
    out = [helper.make_opsetid(public_domain(case.domain), case.opset)]
    if public_domain(case.domain):
        out.append(helper.make_opsetid("", 21))
    return out


def type_of(value: Any, shape: bool = True) -> TypeProto:
    if isinstance(value, list):
        return helper.make_sequence_type_proto(type_of(value[0], shape=False))
    return helper.make_tensor_type_proto(dtypes.onnx_code(value.dtype), value.shape if shape else None)


def model(
    case: NodeCase,
    nodes: Sequence[NodeProto] | None = None,
    outputs: Sequence[str] | None = None,
    constants: frozenset[str] | None = None,
) -> ModelProto:
    """Return the case as a model: its node (or `nodes`), its outputs (or `outputs`), typed by ONNX's shape inference."""
    constants = case.constants if constants is None else constants
    graph = helper.make_graph(
        list(nodes or [case.node]),
        case.name,
        [helper.make_value_info(n, type_of(v)) for n, v in case.inputs.items() if n not in constants],
        [onnx.ValueInfoProto(name=n) for n in (outputs if outputs is not None else case.node.output) if n],
        [tensor(v, n) for n, v in case.inputs.items() if n in constants],
    )
    made = helper.make_model(graph, opset_imports=imports(case), ir_version=ir_version(case))
    try:
        inferred = shape_inference.infer_shapes(made, data_prop=True)
    except Exception:
        return made
    if all(o.type.WhichOneof("value") for o in inferred.graph.output):
        return inferred
    for info in inferred.graph.output:  # without inference, the schema's type parameter may determine it
        if not info.type.WhichOneof("value"):
            _declare(case, info)
    return inferred


def _declare(case: NodeCase, info: Any) -> None:
    names = list(case.node.output)
    if info.name not in names:
        return
    formals = case.schema.outputs
    formal = formals[min(names.index(info.name), len(formals) - 1)]
    dtype = case.types.get(formal.type_str, dtypes.from_type_string(formal.type_str))
    if dtype is not None:
        info.type.CopyFrom(helper.make_tensor_type_proto(dtypes.onnx_code(dtype), None))


def ir_version(case: NodeCase) -> int:
    newest = case.opset if not public_domain(case.domain) else 21
    return 13 if newest >= 25 else 11 if newest >= 23 else 10 if newest >= 21 else 9 if newest >= 19 else 8


def tensor(value: np.ndarray, name: str) -> onnx.TensorProto:
    return numpy_helper.from_array(value, name)


def write(case: NodeCase, outputs: Sequence[Any], folder: Path) -> None:
    """Write the case as model.onnx with test_data_set_0: its inputs and these outputs."""
    proto = ModelProto()
    proto.CopyFrom(case.model)
    for info, value in zip(proto.graph.output, outputs, strict=False):  # the value supplies a rank that inference does not know
        if info.type.HasField("tensor_type") and not info.type.tensor_type.HasField("shape") and isinstance(value, np.ndarray):
            info.type.CopyFrom(helper.make_tensor_type_proto(dtypes.onnx_code(value.dtype), [None] * value.ndim))
    parts = {}
    for side, values in (("input", list(case.feeds.values())), ("output", list(outputs))):
        for i, value in enumerate(values):
            proto_value = (
                numpy_helper.from_list(value, f"{side}_{i}")
                if isinstance(value, list)
                else tensor(np.asarray(value), f"{side}_{i}")
            )
            parts[f"{side}_{i}.pb"] = proto_value.SerializeToString()
    test_data.write(folder, proto, parts)


# --- special properties of a case -------------------------------------------------------------------------------------


def _flags(case: NodeCase) -> frozenset[str]:
    found: set[str] = set()
    for i, name in enumerate(case.node.input):
        if not name:
            found.add(f"absent{i}")
            continue
        values = case.inputs[name]
        for value in values if isinstance(values, list) else [values]:
            found |= _about(value)
            if not value.ndim:
                found.add(f"scalar{i}")
            if not value.size:
                found.add(f"empty{i}")
    found |= {f.rstrip("0123456789") for f in found}
    return frozenset(found)


def _about(value: np.ndarray) -> set[str]:
    found: set[str] = set()
    if dtypes.is_float(value.dtype):
        with np.errstate(all="ignore"):
            wide = value.astype(np.float64)
            size = np.abs(wide[np.isfinite(wide)])
            found |= {"nan"} if np.isnan(wide).any() else set()
            found |= {"inf"} if np.isinf(wide).any() else set()
            found |= {"minus_zero"} if ((wide == 0) & np.signbit(wide)).any() else set()
            info = float_info(value.dtype)
            if size.size:
                found |= {"huge"} if size.max() > float(info.max) ** 0.5 else set()
                found |= {"subnormal"} if ((size > 0) & (size < float(info.tiny))).any() else set()
    elif value.dtype.kind in "iu" and value.size:
        low, high = bounds(value.dtype)
        found |= {"int_min"} if low < 0 and (value == low).any() else set()
        found |= {"int_max"} if (value == high).any() else set()
        found |= {"beyond_float"} if np.abs(value.astype(np.float64)).max() > 2**53 else set()
        found |= {"beyond_single"} if np.abs(value.astype(np.float64)).max() > 2**24 else set()
    return found
