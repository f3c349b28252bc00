"""Draws a node by the recipes of single operators, with the values of a scope as its inputs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from onnx import NodeProto, defs, helper

from ....ir.declaration import has_trait
from ....proto.schemas import is_custom, schemas
from .. import recipes
from ..generate import allowed_types, attribute_type, tie
from ..strategies import Draw, Skip
from .scope import COMMON, WEIGHTS, DrawnScope, fits
from .values import Known

REUSED = 0.92
"""The probability that an input is a value of the scope, if one has the dtype and shape."""

ADAPTED = 0.4
"""The probability that another value of the scope is reshaped if none has the dtype and shape; otherwise a constant is drawn."""

RARE = {"ai.onnx.ml": 0.4, "ai.onnx.preview.training": 0.2}
"""How often operators of other domains are drawn, relative to ONNX's."""

WIDELY = {"float32", "int64", "bool"}
"""The element types within inner graphs: onnxruntime has kernels for them, and refuses a whole If or Loop if it lacks one."""

OWN = {"If", "Loop", "Scan", "SequenceMap"}
"""The operators whose graphs are drawn in control.py."""


class ScopeDraw(Draw):
    """Draws values of a scope where a recipe draws arrays and shapes."""

    def __init__(self, scope: DrawnScope, schema: defs.OpSchema, opset: int, types: dict[str, np.dtype[Any]]) -> None:
        super().__init__(scope.program.rng, schema, opset, types)
        self.scope = scope
        self.taken: dict[int, Known] = {}

    def shape(self, low: int = 0, high: int = 4, most: int = 5, empty: float = 0.02) -> tuple[int, ...]:
        if self.chance(0.8):
            kinds = set(self.types.values())
            found = self.scope.find(
                lambda k: k.kind == "tensor" and k.dtype in kinds and low <= len(k.shape) <= high and 0 not in k.shape
            )
            if found is not None:
                return found.shape
        return super().shape(low, high, min(most, 4), min(empty, 0.02))

    def array(self, which: Any, shape: Sequence[int], kind: str = "any") -> np.ndarray:
        dtype = self.dtype(which) if isinstance(which, (str, int)) else np.dtype(which)
        size = tuple(int(n) for n in shape)
        if self.chance(REUSED):
            found = self.scope.tensor(dtype, size, kind)
            if found is None and self.chance(ADAPTED):
                found = adapted(self.scope, dtype, size, kind)
            if found is not None:
                self.taken[id(found.value)] = found
                return np.asarray(found.value)
        return super().array(dtype, size, "tame" if kind in ("any", "small") else kind)


def adapted(scope: DrawnScope, dtype: np.dtype[Any], shape: tuple[int, ...], kind: str) -> Known | None:
    """Reshape a value of the scope, repeated or cut to the number of elements; None if there is none."""
    program, size = scope.program, int(np.prod(shape))
    if program.opset < 13 or not size or program.budget < 5:
        return None
    found = scope.find(lambda k: k.kind == "tensor" and k.dtype == dtype and bool(k.value.size) and not k.constant
                       and fits(k.value, kind))  # fmt: skip
    if found is None:
        return None

    def ints(*values: int) -> str:
        return scope.constant(np.array(values, np.int64), fixed=True).name

    try:
        if found.value.size != size:
            (found,) = scope.add("Reshape", [found.name, ints(-1)])
            if found.value.size < size:
                (found,) = scope.add("Tile", [found.name, ints(-(-size // found.value.size))])
            if found.value.size > size:
                (found,) = scope.add("Slice", [found.name, ints(0), ints(size)])
        (found,) = scope.add("Reshape", [found.name, ints(*shape)])
    except Skip:
        return None
    return found


@lru_cache(maxsize=64)
def available(opset: int, domain: str) -> tuple[tuple[str, int], ...]:
    """Return the operators with a recipe that exist at this opset, and their versions."""
    found = []
    for d, name in sorted(recipes.load()):
        if d != domain or is_custom(d) or name in OWN or has_trait(d, name, "random"):
            continue
        version = max((v for v in schemas[d, name] if v <= opset), default=None)
        if version is not None and not schemas[d, name][version].deprecated:
            found.append((name, version))
    return tuple(found)


def draw(scope: DrawnScope) -> list[Known]:
    """Draw a node; raises Skip if it is not valid."""
    program = scope.program
    domain = next((d for d, p in RARE.items() if d in program.opsets and program.chance(p / 6)), "")
    known = available(program.opsets[domain], domain)
    name, version = known[int(program.rng.integers(len(known)))]
    schema = schemas[domain, name][version]
    d = ScopeDraw(scope, schema, program.opsets[domain], _types(scope, schema))
    recipes.load()[domain, name](d)
    if name == "BatchNormalization" and (d.attributes.get("training_mode") or len(d.outputs) > 1):
        raise Skip  # models follow their own mode, not that of the node
    return scope.append(_node(scope, d, domain, name), ["optional"] if name == "Optional" else [])


def _types(scope: DrawnScope, schema: defs.OpSchema) -> dict[str, np.dtype[Any]]:
    """Choose the dtype of each type parameter, mostly one that the scope has."""
    rng = scope.program.rng
    types = {}
    have = [k.dtype for k in scope.visible() if not k.constant]
    for parameter, allowed in allowed_types(schema).items():
        inner = scope.outer is not None or scope.function
        options = [(t, w) for t, w in zip(COMMON, WEIGHTS, strict=True) if t in allowed and (t.name in WIDELY or not inner)]
        if not options:
            raise Skip
        mine = [t for t in have if any(t == o for o, _ in options)]
        if mine and rng.random() < 0.85:
            types[parameter] = mine[int(rng.integers(len(mine)))]
        else:
            total = sum(w for _, w in options)
            types[parameter] = options[int(rng.choice(len(options), p=[w / total for _, w in options]))][0]
    tie(types)
    return types


def _node(scope: DrawnScope, d: ScopeDraw, domain: str, name: str) -> NodeProto:
    while d.inputs and d.inputs[-1] is None:
        d.inputs.pop()
    _optional(scope, d, name)
    names = [_input(scope, d, i, v) for i, v in enumerate(d.inputs)]
    outputs = [scope.name() if n else "" for n in d.outputs]
    node = helper.make_node(name, names, outputs, domain=domain)
    for key, value in d.attributes.items():
        if value is not None:
            node.attribute.append(helper.make_attribute(key, value, attr_type=attribute_type(d.schema.attributes[key])))
    return node


def _input(scope: DrawnScope, d: ScopeDraw, i: int, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Known):
        return value.name
    if isinstance(value, list):
        found = scope.find(lambda k: k.kind == "sequence" and bool(k.value) and k.dtype == value[0].dtype)
        if found is not None and d.chance(0.7):
            return found.name
        parts = [_input(scope, d, i, v) for v in value]
        return scope.add("SequenceConstruct", parts)[0].name
    known = d.taken.get(id(value))
    if known is not None and i not in d.fixed:
        return known.name
    return scope.constant(np.asarray(value), fixed=i in d.fixed).name


def _optional(scope: DrawnScope, d: ScopeDraw, name: str) -> None:
    """Pass an optional of the scope to the operators that take one."""
    if name in ("OptionalGetElement", "OptionalHasElement") and d.inputs:
        found = scope.find(lambda k: k.kind == "optional")
        if found is not None:
            d.inputs[0] = found
