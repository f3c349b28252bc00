"""The profile of a training step of a model, which is as it was afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from singa_backend.kernels.table import Options
from singa_backend.limits import Limits, check_number
from singa_backend.plans.profile import Profile

from .._core import random
from .._core.tensor import Tensor
from ..device import default_device
from .accumulation import sums_of
from .fit import device_of
from .step import Step


def profiled_step(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], runs: int, options: Options, limits: Limits | None = None
) -> tuple[Profile, Step]:
    """Record a training step of a model as a graph, and measure it.

    Args:
        model: The model.
        args: The positional arguments of its `train_one_batch`.
        kwargs: The keyword arguments.
        runs: The number of whole steps, and of steps that are measured node by node.
        options: How plans compute.
        limits: The bounds of each run; None for the defaults.

    Returns:
        The profile, and the step.

    Raises:
        InvalidInput: `runs` is not a positive integer.
        NotTraceable: The step reads values in Python, so that it cannot become a graph (SX330).
        UnsupportedModel: An operator has no gradient, or cannot be written to a graph.
        OperatorError: A node cannot compute with its inputs.
    """
    check_number("runs", runs, 1, whole=True)
    with model._in_mode(True), restored(model):
        if not model._has_stepped():
            model.train_one_batch(*args, **kwargs)  # creates the states of the optimizer
        step = Step(model.train_one_batch, args, kwargs, options, limits)
        return step.profile(args, kwargs, int(runs)), step


@contextlib.contextmanager
def restored(model: Any) -> Iterator[None]:
    """The context after which the states of a model and of its optimizers, and the random state, are those before.

    States that are created in it become zeros, with which an optimizer begins.

    Args:
        model: The model.
    """

    def states() -> dict[int, Tensor]:
        held = [*model.get_states().values(), *model.get_params().values()]
        for optimizer in model._optimizers():
            rule = getattr(optimizer, "opt", optimizer)  # the optimizer in a DistOpt
            held += [*optimizer.get_states().values(), *rule._values.values()]
        held += [t for s in sums_of(model._optimizers()) for t in s.tensors()]
        return {id(t): t for t in held}

    device, tape_first = device_of(model) or default_device, model._tape_first
    drawn = random.get_state(device)
    points = [(s, s.point()) for s in sums_of(model._optimizers())]
    kept = {i: (t, np.array(t.device.backend.get(t._data))) for i, t in states().items()}
    try:
        yield
    finally:
        for i, t in states().items():
            old = kept[i][1] if i in kept else np.zeros(t.shape, t._data.dtype)
            t.device.backend.write(t._data, old)
            t._version, t._writes = t._version + 1, t._writes + 1
        for s, point in points:
            s.set_point(point)
        model._tape_first = tape_first
        random.set_state(device, drawn)
