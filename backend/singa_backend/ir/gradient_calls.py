"""The calls of gradient rules in the metadata of a model: which of its nodes compute the gradient of which call.

A recorded training step, and the file of `to_training_onnx`, list them, so that plans find the gradients for which they have a
kernel.  They are read only if the nodes are still those that were written: a digest of the nodes is part of the entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onnx import ModelProto, StringStringEntryProto

from ..errors import SonnxError
from ..io.documents import parse_document

KEY = "sonnx.gradients"
"""The key of the entry in the metadata of the model."""

_AXES = 32
"""The maximum number of axes of a constant."""

_FIELDS = ("inputs", "outputs", "dys", "gradients")


DEFERRED = "ai.singa.deferred"
"""The domain of a node of a recorded step in place of the nodes that a gradient rule would write: only a plan can compute it."""


@dataclass(frozen=True)
class GradientCall:
    """A call of an operator's gradient rule, which has written some of a graph's nodes.

    The values are named; "" is an absent one, or a constant without a name.

    Attributes:
        domain: the domain of the operator that was differentiated.
        op_type: the operator.
        version: its schema version.
        attributes: the attributes of its call.
        inputs: the inputs of its call.
        outputs: its outputs.
        dys: the gradient of each output.
        gradients: the results of the rule: the gradient of each input.
        numbers: the constants of one float among `dys`, which need not have a name: place, dtype, shape and number.
    """

    domain: str
    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    dys: tuple[str, ...]
    gradients: tuple[str, ...]
    numbers: tuple[tuple[int, str, tuple[int, ...], float], ...] = ()


def store(model: ModelProto, calls: Sequence[GradientCall]) -> None:
    """Add an entry with calls of gradient rules to a model; those with attributes that JSON does not have are left out.

    Args:
        model: the finished model, which is changed.
        calls: the calls.
    """
    rows = [[c.domain, c.op_type, c.version, dict(c.attributes), *(getattr(c, f) for f in _FIELDS)] for c in calls]
    for row, c in zip(rows, calls, strict=True):
        row += [c.numbers] * bool(c.numbers)
    plain = [row for row in rows if is_plain(row[3])]
    if plain:
        text = json.dumps({"digest": _digest(model), "calls": plain}, separators=(",", ":"))
        model.metadata_props.append(StringStringEntryProto(key=KEY, value=text))


def listed(calls: Sequence[GradientCall]) -> tuple[GradientCall, ...]:
    """The calls that `load` would return for a model in which `store` has listed these."""
    return tuple(replace(c, attributes=_as_lists(dict(c.attributes))) for c in calls if is_plain(dict(c.attributes)))


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _as_lists(v) for k, v in value.items()}
    return [_as_lists(v) for v in value] if isinstance(value, (list, tuple)) else value


def load(model: ModelProto) -> tuple[GradientCall, ...]:
    """The calls of gradient rules that a model lists; none if its nodes have changed since, or the entry has another form."""
    text = next((e.value for e in model.metadata_props if e.key == KEY), None)
    if text is None:
        return ()
    try:
        found = parse_document(text, KEY, "SX107", most=len(text), values=len(text))
        if found["digest"].value != _digest(model):
            return ()
        return tuple(map(_call, found["calls"].sequence()))
    except (SonnxError, ValueError, TypeError, LookupError):
        return ()


def _call(row: Any) -> GradientCall:
    domain, op_type, version, attributes, *values = row
    named = [tuple(map(str, names)) for names in values[: len(_FIELDS)]]
    numbers = values[len(_FIELDS) :]
    if not isinstance(attributes, dict) or type(version) is not int or len(named) != len(_FIELDS) or len(numbers) > 1:
        raise ValueError
    inputs, outputs, dys, gradients = named
    constants = tuple(_number(n) for one in numbers for n in one)
    return GradientCall(str(domain), str(op_type), version, attributes, inputs, outputs, dys, gradients, constants)


def _number(row: Any) -> tuple[int, str, tuple[int, ...], float]:
    place, dtype, shape, number = row
    flat = len(shape) <= _AXES and shape == [1] * len(shape)
    if type(place) is not int or dtype not in ("float32", "float64") or not flat or type(number) is not float:
        raise ValueError
    return place, dtype, tuple(shape), number


def is_plain(value: Any) -> bool:
    """Whether JSON returns a value as it was, tuples as lists."""
    if isinstance(value, dict):
        return all(type(k) is str and is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _digest(model: ModelProto) -> str:
    """A digest of the nodes of a model."""
    digest = hashlib.sha256()
    for node in model.graph.node:
        text = node.SerializeToString(deterministic=True)
        digest.update(len(text).to_bytes(8, "little") + text)
    return digest.hexdigest()
