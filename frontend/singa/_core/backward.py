"""The backward pass: from a loss, along the tape, to the tensors that store their gradients."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Any

from singa_backend.errors import InvalidInput
from singa_backend.interpreters.base import Interpreter

from . import coverage, tape, trace, zeros
from .coverage import nothing_trains
from .tape import Dummy, Operator, vocabulary
from .tensor import Tensor, op


def infer_dependency(y_op: Operator) -> tuple[Counter[Operator], Counter[int]]:
    """Count how often the results of each operator, and each tensor, are used in the computation of an operator.

    Args:
        y_op: The operator, such as the creator of a loss.

    Returns:
        (uses by operator, uses by the id of the tensor).
    """
    operators: Counter[Operator] = Counter()
    tensors: Counter[int] = Counter()
    seen = {y_op}
    pending = [y_op]
    while pending:
        operator = pending.pop()
        for creator, x_id, _, _ in operator.src:
            operators[creator] += 1
            tensors[x_id] += 1
            if creator not in seen:
                seen.add(creator)
                pending.append(creator)
    return operators, tensors


def backward(y: Tensor, dy: Any = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Backpropagation: compute the gradients of a loss with respect to the tensors that store their gradients.

    Walks the tape from `y` in reverse order of the calls. A tensor is yielded as soon as its gradient is complete; the order is
    deterministic. If only operators whose gradient is zero, such as sign or floor, are between `y` and the parameters, their
    gradients are zero, with a NoGradientWarning.

    Args:
        y: The loss, a Tensor of one element.
        dy: The gradient of `y`, a Tensor, an array or a number; None for 1.

    Yields:
        (tensor, gradient) for each Tensor before `y` with `stores_grad`; the gradient has the shape and dtype of the tensor.

    Raises:
        InvalidInput: `y` was not recorded on the tape (SX313), has more than one element (SX314) or is on another device than
            `dy` (SX344); no parameter gets a gradient (SX345); a tensor that the gradient needs was changed after an operator
            had read it (SX370); or a custom operator returns the wrong number of gradients (SX312) or was called again (SX371).
        UnsupportedModel: An operator on the tape has no gradient for these inputs or attributes.
    """
    covered = coverage.current()
    if covered is not None:
        covered.backward_ran = True
    flat: list[Tensor] = []
    if not y.requires_grad or isinstance(y.creator, Dummy):
        flat = zeros.flat_parameters(y) if tape.training else []
        if tape.training and not flat:
            raise nothing_trains(covered)
        if not tape.training:
            raise InvalidInput(
                "this tensor was not recorded: training mode was off during the forward pass",
                code="SX313",
                hint="call model.train(), or set autograd.training = True, before the forward pass",
            )
    shape = op.shape(y)
    if shape is None or any(d != 1 for d in shape):
        raise InvalidInput(
            f"backward must start at a tensor of one element, got shape {shape}",
            code="SX314",
            hint="reduce the loss, for example by its mean",
        )
    if flat:
        yield from _zeros(flat, covered)
        return
    device = y.device
    first = vocabulary(device)
    start = first.full_like(trace.value(y), 1) if dy is None else _start(first, y, dy)
    uses, storing = _wanted(y.creator)
    if not storing and (flat := zeros.flat_parameters(y)):  # only inputs require a gradient
        yield from _zeros(flat, covered)
        return
    found: dict[Operator, list[Any]] = {y.creator: [None] * len(y.creator.y_id2idx)}
    found[y.creator][y.creator.place(y)] = start
    ready = [(-y.creator.serial, y.creator)]
    while ready:
        _, here = heappop(ready)
        dys = found.pop(here, None)
        needs = [creator is not None and creator in uses for creator in here.creators]
        grads: list[Any] = [None] * len(needs)
        if any(needs) and dys is not None and any(d is not None for d in dys):
            grads = here._backward(dys, needs, device)
        complete: list[Operator] = []
        for x, creator, need, g in zip(here.inputs, here.creators, needs, grads, strict=True):
            if not need or x is None or creator is None:
                continue
            if g is not None:
                slots = found.setdefault(creator, [None] * len(creator.y_id2idx))
                i = creator.place(x)
                slots[i] = vocabulary(device).add(slots[i], g)
            uses[creator] -= 1
            if uses[creator] == 0:
                complete.append(creator)
                if not isinstance(creator, Dummy):
                    heappush(ready, (-creator.serial, creator))
        for creator in complete:
            for x in storing.get(creator, ()):
                g = found.get(creator, [None])[creator.place(x)]
                if g is not None:
                    if covered is not None:
                        covered.found.add(id(x))
                    yield x, Tensor._of(g, x.device, False)
            if isinstance(creator, Dummy):
                found.pop(creator, None)


def _zeros(parameters: list[Tensor], covered: coverage.Coverage | None) -> Iterator[tuple[Tensor, Tensor]]:
    warnings.warn(zeros.zero_warning(parameters), stacklevel=4)
    for p in parameters:
        if covered is not None:
            covered.found.add(id(p))
        yield p, Tensor._of(vocabulary(p.device).full_like(trace.value(p), 0), p.device, False)


def _start(first: Interpreter[Any], y: Tensor, dy: Any) -> Any:
    if tape._is_tensor(dy) and not dy._follows_device and trace.current() is None:
        tape._same_device(y.device, dy.device, "backward")
    value = tape._value_on(y.device, dy) if tape._is_tensor(dy) else first.constant(dy, op.dtype(y))
    return first.call("Expand", (first.cast(value, trace.value(y)), first.call("Shape", (trace.value(y),), {}, 1)[0]), {}, 1)[0]


def _wanted(y_op: Operator) -> tuple[Counter[Operator], dict[Operator, list[Tensor]]]:
    """The operators that need a gradient with the number of their uses, and by operator the tensors that store a gradient."""
    order: list[Operator] = []
    seen = {y_op}
    pending = [y_op]
    while pending:
        operator = pending.pop()
        order.append(operator)
        for creator in operator.creators:
            if creator is not None and creator not in seen:
                seen.add(creator)
                pending.append(creator)
    wanted: set[Operator] = set()
    storing: dict[Operator, list[Tensor]] = {}
    stored: set[int] = set()
    for operator in sorted(order, key=lambda o: o.serial):
        for x, creator in zip(operator.inputs, operator.creators, strict=True):
            if x is None or creator is None or not (x.stores_grad or creator in wanted):
                continue
            wanted |= {creator, operator}
            if x.stores_grad and id(x) not in stored:
                stored.add(id(x))
                storing.setdefault(creator, []).append(x)
    uses: Counter[Operator] = Counter()
    for operator in wanted:
        uses.update(c for c in operator.creators if c is not None and c in wanted)
    return uses, storing


def gradients(y: Tensor, dy: Any = None) -> dict[int, Tensor]:
    """Compute the gradients of a loss, as `backward` does.

    Args:
        y: The loss, a Tensor of one element.
        dy: The gradient of `y`, a Tensor, an array or a number; None for 1.

    Returns:
        The gradients by the `id` of the Tensor.

    Raises:
        InvalidInput: As `backward` raises it.
        UnsupportedModel: An operator on the tape has no gradient for these inputs or attributes.
    """
    return {id(p): g for p, g in backward(y, dy)}
