"""Schedules: hyperparameters of an optimizer whose values depend on the step, computed by ONNX's operators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from singa_backend import dtypes

from .._core.conversions import float32
from .._core.tensor import Tensor, op


class DecayScheduler:
    """The base class of schedules: a hyperparameter whose value depends on the step; a subclass defines `call(step)`.

    `step` is an int64 Tensor of shape (1,). The value is a number, or is computed from `step` by operators, so that it stays
    correct in a step that is recorded as a graph.

    Args:
        init_value: The value at step 0.
    """

    def __init__(self, init_value: float) -> None:
        self.init_value = init_value

    def __call__(self, step: Tensor) -> Any:
        """Compute the value at a step.

        Args:
            step: Number of steps so far, an int64 Tensor of shape (1,).

        Returns:
            What `call` returns.

        Raises:
            NotImplementedError: If the subclass does not define `call`.
        """
        return self.call(step)

    def call(self, step: Tensor) -> Any:
        """Compute the value at a step; defined by subclasses.

        Args:
            step: Number of steps so far, an int64 Tensor of shape (1,).

        Returns:
            The value: a number, or a Tensor of shape (1,).

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define call(step)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in vars(self).items())})"


class Constant(DecayScheduler):
    """A hyperparameter that has the same value at every step.

    The argument is that of DecayScheduler.
    """

    @override
    def call(self, step: Tensor) -> Tensor:
        """Return the value.

        Args:
            step: Number of steps so far, a Tensor of shape (1,) or a number.

        Returns:
            A Tensor of shape (1,), of float32, on the device of `step`.
        """
        device = step.device if isinstance(step, Tensor) else None
        return Tensor((1,), device, float32, requires_grad=False).set_value(self.init_value)


class ExponentialDecay(DecayScheduler):
    """Computes init_value * decay_rate ** (step / decay_steps).

    Args:
        init_value: The value at step 0.
        decay_steps: Number of steps in which the value changes by the factor `decay_rate`.
        decay_rate: The factor.
        staircase: Whether the quotient is rounded down.
    """

    def __init__(self, init_value: float, decay_steps: float, decay_rate: float, staircase: bool = False) -> None:
        super().__init__(init_value)
        self.decay_steps = decay_steps
        self.decay_rate = decay_rate
        self.staircase = staircase

    @override
    def call(self, step: Tensor) -> Tensor:
        quotient = op.Div(double(step), float(self.decay_steps))
        if self.staircase:
            quotient = op.Floor(quotient)
        return op.Mul(op.Pow(np.float64(self.decay_rate), quotient), float(self.init_value))


class StepDecay(ExponentialDecay):
    """Computes init_value * decay_rate ** floor(step / decay_steps).

    Args:
        init_value: The value at step 0.
        decay_steps: Number of steps after which the value changes by the factor `decay_rate`.
        decay_rate: The factor.

    Raises:
        ValueError: If `decay_steps` is not positive.
    """

    def __init__(self, init_value: float, decay_steps: float, decay_rate: float = 0.1) -> None:
        super().__init__(init_value, positive("decay_steps", decay_steps), decay_rate, staircase=True)


class MultiStepDecay(DecayScheduler):
    """Computes init_value * decay_rate ** n, where n is the number of milestones that are reached.

    Args:
        init_value: The value at step 0.
        milestones: The steps from which the value is multiplied by a further `decay_rate`, in any order.
        decay_rate: The factor.

    Raises:
        ValueError: If there are no milestones.
    """

    def __init__(self, init_value: float, milestones: Sequence[float], decay_rate: float = 0.1) -> None:
        super().__init__(init_value)
        self.milestones = [float(m) for m in milestones]
        self.decay_rate = decay_rate
        if not self.milestones:
            raise ValueError("milestones must be a sequence of at least one step, got none")

    @override
    def call(self, step: Tensor) -> Tensor:
        reached = op.Not(op.Less(double(step), np.array(self.milestones, np.float64)))
        count = op.ReduceSum(double(reached), [0], keepdims=1)
        return op.Mul(op.Pow(np.float64(self.decay_rate), count), float(self.init_value))


class CosineDecay(DecayScheduler):
    """Computes end_value + (init_value - end_value) * (1 + cos(pi * step / decay_steps)) / 2, and end_value after `decay_steps`.

    Args:
        init_value: The value at step 0.
        decay_steps: The step from which the value is `end_value`.
        end_value: The last value.

    Raises:
        ValueError: If `decay_steps` is not positive.
    """

    def __init__(self, init_value: float, decay_steps: float, end_value: float = 0.0) -> None:
        super().__init__(init_value)
        self.decay_steps = positive("decay_steps", decay_steps)
        self.end_value = end_value

    @override
    def call(self, step: Tensor) -> Tensor:
        rest = op.Sub(1.0, op.Min(op.Div(double(step), float(self.decay_steps)), np.float64(1)))
        root = op.Sin(op.Mul(rest, math.pi / 2))  # (1 + cos(pi - 2 a)) / 2 = sin(a)^2
        return op.Add(op.Mul(op.Mul(root, root), float(self.init_value) - float(self.end_value)), float(self.end_value))


class WarmUp(DecayScheduler):
    """Increases a value linearly in the first steps, then follows a schedule whose steps are counted from there.

    At a step below `warmup_steps`, the value is the first one of the schedule times start_factor + (1 - start_factor) * step /
    warmup_steps; from there, it is the schedule's value at step - warmup_steps.

    Args:
        schedule: The schedule after the first steps, or a number.
        warmup_steps: Number of these first steps.
        start_factor: The share of the schedule's first value at step 0, in [0, 1].

    Raises:
        TypeError: If `schedule` is neither a number nor a DecayScheduler.
        ValueError: If `warmup_steps` is not positive, or `start_factor` is not in [0, 1].
    """

    def __init__(self, schedule: Any, warmup_steps: float, start_factor: float = 0.0) -> None:
        self.schedule = schedule_of("schedule", schedule)
        self.warmup_steps = positive("warmup_steps", warmup_steps)
        if not 0 <= start_factor <= 1:
            raise ValueError(f"start_factor must be in [0, 1], got {start_factor!r}")
        self.start_factor = start_factor
        super().__init__(self.schedule.init_value * start_factor)

    @override
    def call(self, step: Tensor) -> Tensor:
        t, after = double(step), float(self.warmup_steps)
        share = op.Add(op.Mul(op.Min(op.Div(t, after), np.float64(1)), 1.0 - self.start_factor), float(self.start_factor))
        if is_constant(self.schedule):
            return op.Mul(share, float(self.schedule.init_value))
        start = op.full_like(step, 0)
        later = self.schedule(op.cast(op.Max(op.Sub(t, after), np.float64(0)), step))
        first = self.schedule(start)
        first, later = (double(v) if isinstance(v, Tensor) else np.full(1, v, np.float64) for v in (first, later))
        return op.Where(op.Less(t, after), op.Mul(share, first), later)


def schedule_of(name: str, value: Any) -> DecayScheduler:
    """The schedule of a hyperparameter that is a number or a schedule; raises TypeError for another value."""
    if isinstance(value, DecayScheduler):
        return value
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        return Constant(float(value))
    raise TypeError(f"{name} must be a number or a DecayScheduler, got {type(value).__name__}")


def positive(name: str, value: float) -> float:
    """The value of an argument; raises ValueError unless it is above 0."""
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value!r}")
    return value


def is_constant(schedule: DecayScheduler) -> bool:
    """Whether a schedule is a number; a subclass of Constant may define `call`."""
    return type(schedule) is Constant


def double(t: Tensor) -> Tensor:
    """The tensor in float64."""
    return op.Cast(t, to=dtypes.onnx_code(np.float64))
