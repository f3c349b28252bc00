"""Find the first node that produced a NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from singa_backend.comparison import finite
from singa_backend.devices.device import device_of
from singa_backend.errors import InvalidInput

from .._core.tape import Dummy, Operator
from .._core.tensor import Tensor


def refuse_nan(loss: Tensor) -> None:
    """Raise InvalidInput (SX328) if a loss is NaN; the message names the first node that produced one."""
    if not _has_nan(loss):
        return
    where = first_nan(loss)
    raise InvalidInput(
        f"the loss is NaN; {where or 'no tensor on its tape contains one'}", code="SX328", hint="nothing was updated"
    )


def first_nan(loss: Tensor) -> str:
    """Find the first node on the tape of a loss that produced a NaN, or a parameter that contained one before.

    Args:
        loss: Tensor at which the search starts.

    Returns:
        A description of the node or the parameter; "" if no tensor on the tape contains a NaN.
    """
    nodes: dict[Operator, list[Tensor]] = {loss.creator: [loss]}
    pending = [loss.creator]
    while pending:
        for x in pending.pop().inputs:
            if x is None:
                continue
            if x.creator not in nodes:
                nodes[x.creator] = []
                pending.append(x.creator)
            nodes[x.creator].append(x)
    leaves = [x for node, xs in nodes.items() if isinstance(node, Dummy) for x in xs]
    for x in leaves:
        if _has_nan(x):
            return f"the tensor {x.name!r} contained one before the step"
    for node in sorted(nodes, key=lambda n: n.serial):
        if not isinstance(node, Dummy) and any(_has_nan(x) for x in nodes[node]):
            return f"the first node that produced one is {node.name}{_operands(node)}"
    return ""


def _operands(node: Operator) -> str:
    names = [x.name or x.creator.name for x in node.inputs if x is not None]
    present = any(_is_nan(v) for v in _kept(node))
    inputs = f", with the inputs {', '.join(names)}" if names else ""
    return inputs + ("; an input without a gradient contained one before" if present else "")


def _kept(node: Operator) -> Iterator[Any]:
    tracked = {id(x._data) for x in node.inputs if x is not None}
    for v in getattr(node, "_values", ()):
        if hasattr(v, "dtype") and id(v) not in tracked:
            yield v


def _has_nan(t: Tensor) -> bool:
    return _is_nan(t.device.backend.get(t.data))


def _is_nan(value: Any) -> bool:
    return finite.has_nan(device_of(value).get(value))
