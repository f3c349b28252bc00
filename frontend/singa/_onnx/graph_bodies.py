"""Functions as the bodies of an If, Loop, Scan or SequenceMap in a graph that is being written."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput
from singa_backend.interpreters.base import BOOL, INT, Subgraph
from singa_backend.interpreters.builder import Symbol
from singa_backend.opsets.writer import OpsetWriter

from .._core.tensor import Tensor
from .graph_values import GraphScope, Value, converted, entered, initializer, natural_dtype, symbol_of
from .types import SequenceType, TensorType, ValueType, difference, from_proto, widened


def body_graph(
    scope: GraphScope, name: str, attribute: str, function: Any, inputs: Sequence[Any], given: Mapping[str, Any]
) -> Subgraph:
    """The graph that a function writes as a branch or body; its inputs have the types that hold in every iteration."""
    if not callable(function) or name not in _INPUTS:
        what = f"the attribute {attribute!r} of {name} must be a function that writes its nodes"
        raise InvalidInput(f"{what}, got a {type(function).__name__}", code="SX392", operator=name)
    fixed, states, rest = _INPUTS[name]([None if s is None else from_proto(s.type) for s in inputs], given)
    _check_takes(name, attribute, function, len(fixed) + len(states) + len(rest))
    expected: list[ValueType | None] = [TensorType(np.dtype(np.bool_), ())] * (name == "Loop")
    while True:
        types = [*fixed, *(None if t is None else t.to_proto() for t in (*states, *rest))]
        made = _written(scope, name, attribute, function, types, [*expected, *states])
        found = [from_proto(v.type) for v in made.graph.declared_outputs]
        if len(found) < len(expected) + len(states):
            text = f"the {attribute} of {name} must return {len(expected) + len(states)} values or more, got {len(found)}"
            raise InvalidInput(text, code="SX301", operator=name, hint=_HINTS.get(name, ""))
        for have, want in zip(found, expected, strict=False):
            if have is not None and want is not None and (why := difference(have, want)):
                raise InvalidInput(f"the condition that the body of Loop returns must be {want}, got {have}: {why}", code="SX393")
        new = [t if t is None else widened(t, f) for t, f in zip(states, found[len(expected) :], strict=False)]
        if new == list(states):
            return made
        states = new


_HINTS = {
    "Loop": "return the condition, the states, and then the values that are collected: `return cond, state, y`",
    "Scan": "return the states, and then the values that are collected: `return state, y`",
}


def _written(
    scope: GraphScope, name: str, attribute: str, function: Any, types: Sequence[Any], expected: Sequence[ValueType | None]
) -> Subgraph:
    def make(writer: OpsetWriter, *xs: Symbol) -> list[Symbol]:
        with entered(replace(scope, writer=writer)) as inner:
            made = function(*map(Value, xs))
            values = list(made) if isinstance(made, (tuple, list)) else [made]
            wanted = [*expected, *[None] * len(values)]
            return [result_symbol(inner, v, t, f"the {attribute} of {name}") for v, t in zip(values, wanted, strict=False)]

    return scope.writer.graph(make, types)


def result_symbol(scope: GraphScope, x: Any, wanted: ValueType | None, what: str) -> Symbol:
    """A value that a function returns, as a symbol; a number has the element type that is wanted."""
    if isinstance(x, Value):
        return symbol_of(scope, x)
    if isinstance(x, (Tensor, np.ndarray)):
        return initializer(scope, x)
    if isinstance(x, (bool, int, float, str, list, np.generic)):
        dtype = wanted.dtype if isinstance(wanted, TensorType) else natural_dtype(x)
        return scope.writer.constant(converted(x, dtype, f"a result of {what}"))
    hint = "return a value, or a tuple of values"
    raise InvalidInput(f"{what} must return values of the graph, got a {type(x).__name__}", code="SX392", hint=hint)


def _check_takes(name: str, attribute: str, function: Any, count: int) -> None:
    """Raise InvalidInput (SX392) unless a function takes a number of values."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*[None] * count)
    except TypeError:
        text = f"the {attribute} of {name} is called with {count} values, but the function takes {signature}"
        hint = {"Loop": "they are the number of the iteration, the condition and the states", "If": "branches use outer values"}
        raise InvalidInput(text, code="SX392", operator=name, hint=hint.get(name, "")) from None


def check_branches(name: str, bodies: Sequence[Subgraph]) -> None:
    """Raise InvalidInput (SX393) if the branches of an If return different numbers or element types of values."""
    if name != "If":
        return
    then, other = ([from_proto(v.type) for v in b.graph.declared_outputs] for b in bodies)
    if len(then) != len(other):
        text = f"the branches of If must return the same number of values, got {len(then)} and {len(other)}"
        raise InvalidInput(text, code="SX393", operator=name)
    for a, b in zip(then, other, strict=True):
        if a is not None and b is not None:
            widened(a, b)


Types = Sequence["ValueType | None"]


def _element(t: ValueType | None, axis: int = 0) -> ValueType | None:
    """The type of an element of a sequence, or of a tensor along an axis."""
    if isinstance(t, SequenceType):
        return t.element
    if isinstance(t, TensorType) and t.shape:
        kept = list(t.shape)
        del kept[axis]
        return t[tuple(kept)]
    return t


def _if_inputs(types: Types, given: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return [], [], []


def _loop_inputs(types: Types, given: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return [INT, BOOL], list(types[2:]), []


def _scan_inputs(types: Types, given: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    count = int(given["num_scan_inputs"])
    if not 0 < count <= len(types):
        text = f"num_scan_inputs of Scan must be in [1, {len(types)}], got {count}"
        raise InvalidInput(text, code="SX333", operator="Scan")
    first = len(types) - count
    axes = given.get("scan_input_axes") or [0] * count
    return [], list(types[:first]), [_element(t, a) for t, a in zip(types[first:], axes, strict=True)]


def _map_inputs(types: Types, given: Mapping[str, Any]) -> tuple[list[Any], list[Any], list[Any]]:
    return [], [], [_element(t) if i == 0 or isinstance(t, SequenceType) else t for i, t in enumerate(types)]


_INPUTS = {"If": _if_inputs, "Loop": _loop_inputs, "Scan": _scan_inputs, "SequenceMap": _map_inputs}
"""For each operator that takes functions, the inputs of its bodies: fixed types, states, and the rest."""
