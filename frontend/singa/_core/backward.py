"""The backward pass: from a loss, along the tape, to the tensors that store their gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any

from singa_backend.devices.checks import collected
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.base import Interpreter

from . import coverage, tape, trace, zeros
from .coverage import nothing_trains
from .tape import Dummy, Operator, vocabulary
from .tensor import Tensor, op
from .variable import required, tensor_list


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


def backward(y: Tensor, dy: Any = None, create_graph: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
    """Backpropagation: compute the gradients of a loss with respect to the tensors that store their gradients.

    Walks the tape from `y` in reverse order of the calls. A tensor is yielded as soon as its gradient is complete; the order is
    deterministic. If only operators whose gradient is zero, such as sign or floor, are between `y` and the parameters, their
    gradients are zero, with a NoGradientWarning.

    Args:
        y: The loss, a Tensor of one element.
        dy: The gradient of `y`, a Tensor, an array or a number; None for 1.
        create_graph: Whether the gradients are recorded on the tape, so that a further loss may depend on them. Otherwise they
            are constants, and a `backward` through which their own gradient would flow is refused (SX383).

    Yields:
        (tensor, gradient) for each Tensor before `y` with `stores_grad`; the gradient has the shape and dtype of the tensor.

    Raises:
        InvalidInput: `y` was not recorded on the tape (SX313), has more than one element (SX314) or is on another device than
            `dy` (SX344); no parameter gets a gradient (SX345); a tensor that the gradient needs was changed after an operator
            had read it (SX370); `y` depends on gradients that were computed without a graph (SX383); or a custom operator
            returns the wrong number of gradients (SX312) or was called again (SX371).
        UnsupportedModel: An operator on the tape has no gradient for these inputs or attributes.
    """
    if not tape.is_measuring():
        yield from _walk(y, dy, create_graph, None)


def _walk(y: Tensor, dy: Any, create_graph: bool, requested: set[int] | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tensor, gradient) for the tensors of these ids; None for those that store their gradients."""
    recording = trace.current()
    if recording is not None:
        recording.begin_backward()
    times = required(y).device._times
    if times.measures:  # otherwise another thread's step is measured
        times.backward = True
    covered = coverage.current() if requested is None and not create_graph else None
    if covered is not None:
        covered.backward_ran = True
    if flat := _check_start(y, requested, covered):
        yield from _zeros(flat, covered)
        return
    values: Interpreter[Any] = op if create_graph else vocabulary(y.device)
    start = _seed(values, y, dy, create_graph)
    if requested is not None and id(y) in requested:
        yield y, _result(start, y, create_graph)
    uses, storing = _wanted(y.creator, requested)
    if not storing and requested is None and (flat := zeros.flat_parameters(y)):  # only inputs require a gradient
        yield from _zeros(flat, covered)
        return
    for x, g in _sweep(y, start, values, uses, storing, create_graph):
        if covered is not None:
            covered.found.add(id(x))
        made = _result(g, x, create_graph)
        if recording is not None:
            recording.gradients.append(trace.value(made))
        yield x, made


def _check_start(y: Tensor, requested: set[int] | None, covered: coverage.Coverage | None) -> list[Tensor]:
    """Raise InvalidInput unless `y` is a loss on the tape; return the parameters if all their gradients are zero."""
    if y._without_graph:
        raise _dropped("the loss")
    flat: list[Tensor] = []
    if not y.requires_grad or isinstance(y.creator, Dummy):
        if not tape.training:
            raise InvalidInput(
                "this tensor was not recorded: training mode was off during the forward pass",
                code="SX313",
                hint="call model.train(), or set autograd.training = True, before the forward pass",
            )
        flat = zeros.flat_parameters(y) if requested is None else []
        if not flat:
            raise nothing_trains(covered)
    shape = op.shape(y)
    if (shape is None or not all(isinstance(d, int) for d in shape)) and (example := op.example(y)) is not None:
        shape = example.shape  # of a step that is recorded, and runs only after the tape has computed it
    if shape is None:
        op.rank(y)  # raises, because it is not known
    if shape is None or any(d != 1 for d in shape):
        raise InvalidInput(
            f"backward must start at a tensor of one element, got shape {shape}",
            code="SX314",
            hint="reduce the loss, for example by its mean",
        )
    return flat


def _seed(values: Interpreter[Any], y: Tensor, dy: Any, create_graph: bool) -> Any:
    """The gradient of `y` itself: `dy`, or 1."""
    with _recorded() if create_graph else contextlib.nullcontext():
        if dy is None:
            return values.full_like(y if create_graph else trace.value(y), 1)
        return _passed(values, y, dy, create_graph)


def _sweep(
    y: Tensor,
    start: Any,
    values: Interpreter[Any],
    uses: Counter[Operator],
    storing: dict[Operator, list[Tensor]],
    create_graph: bool,
) -> Iterator[tuple[Tensor, Any]]:
    """Walk the tape from `y` in reverse order of the calls; yield (tensor, value of its gradient) as soon as it is complete.

    Gradient rules read indices that forward calls have checked: a device reads the flags of their checks once, at the end.
    """
    device, checks = y.device, y.device.backend.checks()
    recorded = _recorded if create_graph else contextlib.nullcontext
    found: dict[Operator, list[Any]] = {y.creator: [None] * y.creator.output_count}
    found[y.creator][y.creator.place(y)] = start
    ready = [(-y.creator.serial, y.creator)]
    while ready:
        _, here = heappop(ready)
        dys = found.pop(here, None)
        needs = [creator is not None and creator in uses for creator in here.creators]
        grads: list[Any] = [None] * len(needs)
        if dys is not None and any(d is not None for d in dys):
            if here.drops_gradient:
                raise _dropped(here.name)
            if any(needs):
                with recorded(), collected(checks):
                    grads = (
                        here._backward_recorded(op, dys, needs, device) if create_graph else here._backward(dys, needs, device)
                    )
        complete: list[Operator] = []
        for x, creator, need, g in zip(here.inputs, here.creators, needs, grads, strict=True):
            if not need or x is None or creator is None:
                continue
            if g is not None:
                slots = found.setdefault(creator, [None] * creator.output_count)
                i = creator.place(x)
                if slots[i] is None:
                    slots[i] = g
                else:
                    with recorded():
                        slots[i] = values.add(slots[i], g)
            uses[creator] -= 1
            if uses[creator] == 0:
                complete.append(creator)
                if not isinstance(creator, Dummy):
                    heappush(ready, (-creator.serial, creator))
        for creator in complete:
            for x in storing.get(creator, ()):
                g = found.get(creator, [None])[creator.place(x)]
                if g is not None:
                    yield x, g
            if isinstance(creator, Dummy):
                found.pop(creator, None)
    if checks is not None and checks.pending is not None:
        with device.backend.active():
            checks.settle()


def _zeros(parameters: list[Tensor], covered: coverage.Coverage | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield a gradient of zeros for each parameter, with a NoGradientWarning."""
    warnings.warn(zeros.zero_warning(parameters), stacklevel=4)
    for p in parameters:
        if covered is not None:
            covered.found.add(id(p))
        yield p, Tensor._of(vocabulary(p.device).full_like(trace.value(p), 0), p.device, False)


@contextlib.contextmanager
def _recorded() -> Iterator[None]:
    """The context in which operators are recorded on the tape, whatever the mode is."""
    before = tape.training
    tape.set_training(True)
    try:
        yield
    finally:
        tape.set_training(before)


def _result(g: Any, x: Tensor, create_graph: bool) -> Tensor:
    """The gradient of a tensor as a Tensor, marked as one without a graph unless it was recorded."""
    if create_graph:
        made: Tensor = g
        return made
    made = Tensor._of(g, x.device, False)
    made._without_graph = True
    return made


def _dropped(where: str) -> InvalidInput:
    """The error of a backward pass that would drop the gradient of a gradient."""
    return InvalidInput(
        f"{where} uses a gradient that was computed without a graph: its own gradient would be dropped",
        code="SX383",
        hint="compute it by autograd.gradients(loss, create_graph=True); if it is meant to be a constant, write g.detach()",
    )


def _passed(values: Interpreter[Any], y: Tensor, dy: Any, create_graph: bool) -> Any:
    """The gradient that the caller passed, in the dtype and shape of `y`."""
    if create_graph:
        given = dy if tape._is_tensor(dy) else op.constant(dy, op.dtype(y))
        return op.Expand(op.cast(given, y), op.Shape(y))
    if tape._is_tensor(dy) and not dy._follows_device and trace.current() is None:
        tape._same_device(y.device, dy.device, "backward")
    value = tape._value_on(y.device, dy) if tape._is_tensor(dy) else values.constant(dy, op.dtype(y))
    value = values.cast(value, trace.value(y))
    return values.call("Expand", (value, values.call("Shape", (trace.value(y),), {}, 1)[0]), {}, 1)[0]


def _wanted(y_op: Operator, requested: set[int] | None) -> tuple[Counter[Operator], dict[Operator, list[Tensor]]]:
    """The operators that need a gradient with the number of their uses, and by operator the tensors whose gradients to keep.

    requested: the ids of these tensors; None for those that store their gradients.
    """
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
            keeps = x is not None and (x.stores_grad if requested is None else id(x) in requested)
            if x is None or creator is None or not (keeps or creator in wanted):
                continue
            wanted |= {creator, operator}
            if keeps and id(x) not in stored:
                stored.add(id(x))
                storing.setdefault(creator, []).append(x)
    uses: Counter[Operator] = Counter()
    for operator in wanted:
        uses.update(c for c in operator.creators if c is not None and c in wanted)
    return uses, storing


def gradients(y: Tensor, dy: Any = None, create_graph: bool = False, inputs: Sequence[Tensor] | None = None) -> dict[int, Tensor]:
    """Compute the gradients of a loss, as `backward` does.

    Args:
        y: The loss, a Tensor of one element.
        dy: The gradient of `y`, a Tensor, an array or a number; None for 1.
        create_graph: Whether the gradients are recorded on the tape, so that a further loss may depend on them.
        inputs: The Tensors to differentiate with respect to: leaves or results of operators that `requires_grad`. None for
            those that store their gradients.

    Returns:
        The gradients by the `id` of the Tensor.

    Raises:
        InvalidInput: As `backward` raises it; `inputs` is not a list of Tensors (SX317), or `y` does not depend on one of them
            (SX379).
        UnsupportedModel: An operator on the tape has no gradient for these inputs or attributes.

    Example:
        >>> critic = autograd.reduce_sum(net.forward(x))
        >>> dx = autograd.gradients(critic, create_graph=True, inputs=[x])[id(x)]
        >>> loss = loss + autograd.reduce_sum(dx * dx)
    """
    if inputs is not None:
        tensor_list("inputs", inputs)
    found = {id(p): g for p, g in _walk(y, dy, create_graph, None if inputs is None else {id(x) for x in inputs})}
    for i, x in enumerate(inputs or ()):
        if id(x) not in found:
            raise InvalidInput(
                f"the loss must depend on every Tensor of inputs, but does not depend on {x.name or f'number {i}'}",
                code="SX379",
                hint="set x.requires_grad = True before the forward pass, and pass that Tensor",
            )
    return found
