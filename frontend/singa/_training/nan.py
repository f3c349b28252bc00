"""Find the first node that produced a NaN: on the tape, or in a step of `fit`, which is computed once more by the definitions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from singa_backend import NonFinite, prepare
from singa_backend.comparison import finite
from singa_backend.devices.device import device_of
from singa_backend.errors import InvalidInput
from singa_backend.runtime.origins import Origin

from .._core import tape
from .._core.tape import Dummy, Operator
from .._core.tensor import Tensor
from .step import Step


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


_GROWN = "; if values have grown, lower the learning rate or bound the gradients"
"""What may help if not one value, but the size of all is the cause."""

_EACH = 16
"""The values are kept before each of so many first steps, then before one of so many."""


class StatesBefore:
    """The values that steps of a training change, as they were before: those of the model that train, and its statistics.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._copies: dict[int, tuple[Tensor, Any]] = {}
        self._steps = self._kept = 0

    def _states(self) -> dict[int, Tensor]:
        fixed = {id(p) for p in self._model.get_params().values() if not p.requires_grad}
        return {id(t): t for t in self._model.get_states().values() if id(t) not in fixed}

    def note(self) -> None:
        """Copy the values, before each of the first steps, and later before one of so many: a copy takes time."""
        self._steps += 1
        if self._steps > _EACH and self._steps % _EACH:
            return
        self._kept = self._steps
        for key, t in self._states().items():
            known = self._copies.get(key)
            if known is not None and known[0] is t and known[1].shape == t._data.shape and known[1].dtype == t._data.dtype:
                t.device.backend.write(known[1], t._data)
            else:
                self._copies[key] = (t, t.device.backend.copy(t._data))

    def cause(self, batch: Sequence[Any]) -> str:
        """Where the first NaN or infinity of the loss of a batch came from, with these values; "" if that is not known."""
        if self._states().keys() - self._copies.keys():  # the first step has created them
            return ""
        lost = [t.name for t, copy in self._copies.values() if any(finite.counts(t.device.backend.get(copy)))]
        if lost:
            return f"{', '.join(map(repr, lost[:3]))} held NaN or infinity before the step{_GROWN}"
        now = [(t, t.device.backend.copy(t._data), copy) for t, copy in self._copies.values()]
        try:
            for t, _, copy in now:
                t.device.backend.write(t._data, copy)
            origin = _origin(self._model, batch)
            since = self._steps - self._kept
            earlier = f" (with the parameters of {since} steps before)" if since else ""
            return "" if origin is None else f"{origin}{earlier}{_GROWN if origin.kind != 'node' or not origin.nan else ''}"
        finally:
            for t, value, _ in now:
                t.device.backend.write(t._data, value)


def _origin(model: Any, batch: Sequence[Any]) -> Origin | None:
    """Record the loss of a step as a graph, and run it once by the definitions."""
    if not all(isinstance(t, Tensor) and not isinstance(t._data, list) for t in batch):
        return None
    try:
        with tape.measuring():
            step = Step(model.train_one_batch, tuple(batch), {})
        values = [t.device.backend.get(t._data) for t in (*batch, *step._reads)]
        prepare(step.onnx, optimize=0).run(values, validate=True)
    except NonFinite as error:
        return error.origin
    except Exception:  # the step cannot become a graph, or fails in another way: SX343 is the error to report
        return None
    return None


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
