"""Losses whose gradients are zero: sign, ceil, floor and their like are between the loss and every parameter.

These operators are not recorded on the tape, so the parameters are found by the provenance of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from singa_backend.autodiff.support import no_gradient_reason
from singa_backend.errors import NoGradientWarning
from singa_backend.ir.declaration import newest_declaration
from singa_backend.ir.graph import Graph, Value

from .provenance import CHANGED, Leaf, Link, RecordedCall
from .tensor import Tensor


def flat_parameters(y: Tensor) -> list[Tensor]:
    """The parameters on which a loss depends through operators whose gradient is zero.

    A path from the loss to a parameter counts if it has an operator that is declared with the reason "zero", and otherwise
    operators with gradients. Comparisons, integers and indices block it.

    Args:
        y: The loss, which is not on the tape.
    """
    found: dict[int, Tensor] = {}
    seen: set[tuple[int, bool]] = set()
    pending: list[tuple[Any, bool]] = [(y._origin, False)]
    while pending:
        arg, flat = pending.pop()
        leaf = arg.ref() if isinstance(arg, Leaf) else arg
        if flat and isinstance(leaf, Tensor) and leaf.stores_grad and leaf.requires_grad:
            found[id(leaf)] = leaf
        if isinstance(arg, Link) and (arg.origin.serial, flat) not in seen:
            seen.add((arg.origin.serial, flat))
            pending += [(a, flat or here) for a, here in _read(arg.origin)]
    return sorted(found.values(), key=lambda p: p.name)


def zero_warning(parameters: list[Tensor]) -> NoGradientWarning:
    """The warning that a step changes nothing."""
    return NoGradientWarning(
        "the gradients of all parameters are zero: the loss depends on them only through operators that are constant almost "
        "everywhere, such as sign, ceil, floor or round",
        [p.name for p in parameters],
        "leave these operators out of the loss, or add a term with a gradient",
    )


def _read(origin: RecordedCall) -> Iterator[tuple[Any, bool]]:
    """What a call depends on, and whether through a gradient of zero."""
    if origin.graph is not None:
        names = _reached(origin.graph)
        inputs = {v.name: x for v, x in zip(origin.graph.inputs, origin.args, strict=False)}
        yield from (((inputs | {**origin.parameters})[n], flat) for n, flat in names if n in inputs or n in origin.parameters)
    elif origin is not CHANGED:
        flat = False if origin.operator is not None else _is_flat("", origin.name)
        if flat is not None:
            yield from ((a, flat) for a in origin.args)


def _reached(graph: Graph) -> set[tuple[str, bool]]:
    """The values that the outputs of a model depend on, and whether through a gradient of zero."""
    seen: set[tuple[Value, bool]] = set()
    pending = [(v, False) for v in graph.outputs]
    while pending:
        value, flat = pending.pop()
        if (value, flat) in seen:
            continue
        seen.add((value, flat))
        node = value.producer
        here = None if node is None else False if node.function is not None else _is_flat(node.domain, node.op_type)
        if node is not None and here is not None:
            pending += [(v, flat or here) for v in node.inputs if v is not None]
    return {(v.name, flat) for v, flat in seen}


def _is_flat(domain: str, name: str) -> bool | None:
    """Whether the gradient of an operator is zero almost everywhere; None if it has no gradient for another reason."""
    declaration = newest_declaration(domain, name)
    if declaration is None:
        return None
    reason = no_gradient_reason(declaration).partition(":")[0]
    return reason == "zero" if reason in ("", "zero") else None
