"""Runs recorded training steps by plans, by the definitions, and by the definitions in float64; for the tests of gradient kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from singa import autograd
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa._training.step import Step
from singa.model import Model
from singa_backend.kernels.table import GRADIENT, TRAINING, Options
from singa_backend.plans.planner import Planner

Function = Callable[..., Any]
"""A function of tensors, which returns a tensor or a tuple of tensors."""


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Seeded normal numbers in float32."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def record(function: Function, arrays: Sequence[np.ndarray], needs: Sequence[int], options: Options) -> tuple[Step, list[Tensor]]:
    """Record the step that computes the outputs of a function and the gradients of their weighted sum.

    The weights of the sum are further inputs, so that no gradient is broadcast or constant.

    Args:
        function: the function.
        arrays: its arguments.
        needs: the positions of the arguments for which gradients are computed.
        options: of the plans.

    Returns:
        The step, and its arguments.
    """
    tensors = [Tensor(data=a.copy(), stores_grad=i in needs, requires_grad=i in needs) for i, a in enumerate(arrays)]
    with tape.restored():
        autograd.training = False
        made = _tuple(function(*tensors))
    outputs = [np.asarray(y.data) for y in made]
    floats = [n for n, y in enumerate(outputs) if y.dtype.kind == "f"]
    for n in floats:
        tensors.append(Tensor(data=normal(*outputs[n].shape, seed=97 + n).astype(outputs[n].dtype), requires_grad=False))

    def run(*xs: Tensor) -> list[Tensor]:
        ys = _tuple(function(*xs[: len(arrays)]))
        loss = None
        for n, r in zip(floats, xs[len(arrays) :], strict=True):
            part = op.ReduceSum(op.Mul(ys[n], r), keepdims=0)
            loss = part if loss is None else op.Add(loss, part)
        found = {id(x): g for x, g in autograd.backward(loss)}
        return [*ys, *(found[id(x)] for i, x in enumerate(xs) if i in needs)]

    with tape.restored():
        autograd.training = True
        step = Step(run, tuple(tensors), {})
    step._session.options = options
    return step, tensors


def run(step: Step, tensors: Sequence[Tensor]) -> list[np.ndarray]:
    """The results of a step."""
    return [np.asarray(t.data) for t in step.run(tuple(tensors), {})]


def _tuple(y: Any) -> tuple[Tensor, ...]:
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)


def planner_of(step: Step) -> Planner:
    """The plans of a step whose last run used one."""
    assert step._session.reason is None, step._session.reason
    assert step._session._planner is not None
    return step._session._planner


def kernels_of(step: Step) -> list[str]:
    """The kernels of the steps of all plans."""
    return [s.kernel for p in planner_of(step).plans.values() for g in p.segments for s in g.steps]


def joined_of(step: Step) -> list[str]:
    """The operators whose gradients one kernel computes, in order of execution."""
    return [c.name for c in planner_of(step).region.calls if c.node.domain == GRADIENT]


def in_training(step: Step) -> list[str]:
    """The operators whose forward calls are in training form, in order of execution."""
    return [c.name for c in planner_of(step).region.calls if c.node.domain == TRAINING]


def steps_of(model: Model) -> list[Step]:
    """The recorded steps of a model."""
    return [s for found in model._steps.values() for s in found]


def set_options(model: Model, options: Options) -> None:
    """Let the recorded steps of a model compute with these options from now on."""
    for step in steps_of(model):
        step._session.options = options
        step.forget_plan()


def compare(
    function: Function,
    arrays: Sequence[np.ndarray],
    needs: Sequence[int],
    *,
    joined: Sequence[str],
    exact: bool = False,
    tolerance: float = 2e-6,
    threads: int = 1,
) -> Step:
    """Compare the step by a plan with the definitions, in two runs: the one that traces the plan, and one with other data.

    Args:
        function: of the step.
        arrays: the arguments of the function.
        needs: the positions of the arguments for which gradients are computed.
        joined: the operators whose gradients one kernel must compute.
        exact: whether to compare with the definitions in float64 instead.
        tolerance: the largest difference, over the largest value of a result.
        threads: of the plan.

    Returns:
        The step.
    """
    step, tensors = record(function, arrays, needs, Options(threads=threads))
    wide = [a.astype(np.float64) if exact and a.dtype == np.float32 else a for a in arrays]
    other, others = record(function, wide, needs, Options(level=0))
    for turn in range(2):
        if turn:
            for t, o in zip(tensors, others, strict=True):
                if t.dtype == np.float32:
                    flipped = np.ascontiguousarray(np.asarray(t.data)[..., ::-1])  # equal values remain equal
                    t.copy_from_numpy(flipped)
                    o.copy_from_numpy(flipped.astype(o.dtype))
        actual, expected = run(step, tensors), run(other, others)
        assert sorted(joined_of(step)) == sorted(joined), (joined_of(step), planner_of(step).gradients.reasons)
        for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
            close(a, e, tolerance, f"result {n} of run {turn}")
    return step


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str = "") -> None:
    """Fail if a result differs by more than `tolerance` times the largest value."""
    assert actual.shape == expected.shape, what
    assert np.isfinite(actual).all() and np.isfinite(expected).all(), what
    largest = float(np.abs(expected).max(initial=0)) or 1.0
    difference = float(np.abs(actual.astype(np.float64) - expected).max(initial=0)) / largest
    assert difference <= tolerance, f"{what} differs by {difference:.1e} of its largest value"


__all__ = [
    "close", "compare", "in_training", "joined_of", "kernels_of", "normal", "planner_of", "record", "replace", "run", "set_options",
    "steps_of",
]  # fmt: skip
