"""The expression of calls: definitions are traced once for each combination of attributes, dtypes and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from ..errors import OperatorError
from ..ir.versioned import VersionedOperator
from .expression import ExpressionTrace, NotTraced, Recorded, Term, order

DTYPES = frozenset(np.dtype(k) for k in ("?", "b", "h", "i", "q", "B", "H", "I", "Q", "e", "f", "d"))
"""The dtypes of inputs and results."""


@dataclass(frozen=True)
class InputKind:
    """What a trace knows of an input: its dtype and shape, and the bytes of one that is read on the host."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    content: bytes | None = None


@dataclass(frozen=True)
class Traced:
    """An expression of calls, without their values.

    Attributes:
        results: the term of each call.
        checks: what must be false everywhere, for the definitions to accept the inputs.
    """

    results: tuple[Term, ...]
    checks: tuple[Term, ...]


def traced(
    operator: VersionedOperator, attributes: Mapping[str, Any], kinds: tuple[InputKind | None, ...], device: bool = False,
    wanted: tuple[bool, ...] = (True,),
) -> Traced | str:  # fmt: skip
    """The expression of one call; the reason if it has none.

    Args:
        operator: the operator.
        attributes: its attributes, defaults included.
        kinds: what is known of each input, None for an absent one.
        device: as of a `Trace`.
        wanted: which of the outputs are results.
    """
    try:
        return _call(operator, tuple(sorted(attributes.items())), kinds, device, wanted)
    except TypeError:  # an attribute that is not a key
        return _call.__wrapped__(operator, tuple(attributes.items()), kinds, device, wanted)


@lru_cache(maxsize=4096)
def _call(
    operator: VersionedOperator, attributes: tuple[tuple[str, Any], ...], kinds: tuple[InputKind | None, ...], device: bool,
    wanted: tuple[bool, ...],
) -> Traced | str:  # fmt: skip
    trace = ExpressionTrace(device)
    inputs: list[Any] = []
    for k in kinds:
        if k is not None and k.content is not None:
            inputs.append(np.frombuffer(k.content, k.dtype).reshape(k.shape))
        else:
            inputs.append(None if k is None else trace.input(k.dtype, k.shape))
    try:
        ys = [y for y, w in zip(operator.run(trace.xp, inputs, dict(attributes), wanted), wanted, strict=True) if w]
    except NotTraced as cause:
        return f"{operator.declaration.name} is not elementwise: {cause}"
    except (OperatorError, ValueError, TypeError) as error:
        return f"the call is not valid: {error}"
    if not all(isinstance(y, Recorded) for y in ys):
        return "the result is a constant"
    return Traced(tuple(y.term for y in ys), tuple(bad for bad, _ in trace.checks))


Operand = InputKind | tuple[bool, int] | None
"""Of a call: one that is read on the host; whether it is an earlier result, and the place of that or of an input; or absent."""


def traced_calls(
    calls: Sequence[tuple[VersionedOperator, Mapping[str, Any], tuple[Operand, ...], tuple[bool, ...]]],
    inputs: tuple[InputKind, ...],
) -> Traced | str:
    """The expression of several calls; the reason if a call has none.

    Args:
        calls: for each one the operator, its attributes, defaults included, the operands, and which outputs are results.
        inputs: what is known of the inputs.
    """
    key = tuple((operator, tuple(sorted(attributes.items())), *rest) for operator, attributes, *rest in calls)
    try:
        return _calls(key, inputs)
    except TypeError:  # an attribute that is not a key
        return _calls.__wrapped__(key, inputs)


@lru_cache(maxsize=1024)
def _calls(
    calls: tuple[tuple[VersionedOperator, tuple[tuple[str, Any], ...], tuple[Operand, ...], tuple[bool, ...]], ...],
    inputs: tuple[InputKind, ...],
) -> Traced | str:
    whole = ExpressionTrace()
    leaves = [whole.input(k.dtype, k.shape) for k in inputs]
    results: list[Recorded] = []
    checks: list[Recorded] = []
    for operator, attributes, operands, wanted in calls:
        values = [(results if o[0] else leaves)[o[1]] for o in operands if isinstance(o, tuple)]
        recorded = iter(values)
        kinds = tuple(InputKind((r := next(recorded)).dtype, r.shape) if isinstance(o, tuple) else o for o in operands)
        expression = traced(operator, dict(attributes), kinds, wanted=wanted)
        if isinstance(expression, str):
            return expression
        results += substituted(whole, expression.results, values)
        checks += substituted(whole, expression.checks, values)
    return Traced(tuple(y.term for y in results), tuple(bad.term for bad in checks))


def substituted(whole: ExpressionTrace, results: Sequence[Term], operands: Sequence[Recorded]) -> list[Recorded]:
    """Terms of another trace, with these operands in the places of its inputs."""
    places: dict[int, Recorded] = {}
    for t in order(results):
        operand = operands[t.extra] if t.op == "input" else None
        args = [places[id(a)] for a in t.args]
        places[id(t)] = whole.term(t.op, args, t.dtype, t.shape, t.extra) if operand is None else operand
    return [places[id(r)] for r in results]
