"""Compares recorded training steps by plans with the definitions, in float32 and in float64; for the tests of gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from singa import autograd
from singa._core import tape
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa._training.step import Step
from singa.model import Model
from singa_backend.ir import graph as ir
from singa_backend.kernels.table import GRADIENT, TRAINING, Options
from singa_backend.plans.planner import Planner

Function = Callable[..., Any]
"""A function of tensors, which returns a tensor, or a tuple or list of tensors."""


@dataclass(eq=False)
class Recorded:
    """A recorded step and its arguments."""

    step: Step
    tensors: list[Tensor]

    def run(self) -> list[np.ndarray]:
        """The results of the step."""
        return [np.array(t.data) for t in self.step.run(tuple(self.tensors), {})]

    def set(self, arrays: Sequence[np.ndarray]) -> None:
        """Run with these arguments from now on; if there are fewer, the others stay."""
        for t, a in zip(self.tensors, arrays, strict=False):
            t.copy_from_numpy(a.astype(t.dtype) if t.dtype == np.float64 else a)

    @property
    def planner(self) -> Planner:
        """The plans, if the last run used one."""
        assert self.step._session.reason is None, self.step._session.reason
        return planner_of(self.step)

    @property
    def joined(self) -> list[str]:
        """The operators whose gradients one kernel computes, in order of execution."""
        return [c.op_type for c in self.planner.graph.nodes if c.domain == GRADIENT]

    @property
    def in_training(self) -> list[str]:
        """The operators whose forward calls are in training form, in order of execution."""
        return [c.op_type for c in self.planner.graph.nodes if c.domain == TRAINING]

    @property
    def kernels(self) -> list[str]:
        """The kernels of the steps of all plans."""
        return [s.kernel for p in self.planner.plans.values() for g in p.segments for s in g.steps]

    @property
    def reasons(self) -> dict[str, str]:
        """Why gradients were refused, by the operator; of several of an operator, the last one's."""
        return {g.operator.declaration.name: r for g, r in self.planner.gradients.reasons.items()}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    """Seeded normal numbers in float32."""
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(np.float32)


def record(body: Function, arrays: Sequence[np.ndarray], needs: Collection[int], options: Options) -> Recorded:
    """Record a function of tensors as a step.

    Args:
        body: the function.
        arrays: its arguments.
        needs: the positions of the arguments that are trained.
        options: of the plans.
    """
    tensors = [Tensor(data=a.copy(), stores_grad=i in needs, requires_grad=i in needs) for i, a in enumerate(arrays)]
    with tape.restored():
        autograd.training = True
        step = Step(lambda *xs: _tuple(body(*xs)), tuple(tensors), {})
    step._session.options = options
    return Recorded(step, tensors)


def differentiated(function: Function, arrays: Sequence[np.ndarray], needs: Collection[int]) -> tuple[Function, list[np.ndarray]]:
    """The body that computes the outputs of a function and the gradients of their weighted sum, and its arguments.

    The weights of the sum are further arguments, so that no gradient is broadcast or constant.

    Args:
        function: the function.
        arrays: its arguments.
        needs: the positions of the arguments for which gradients are computed.
    """
    with tape.restored():
        autograd.training = False
        outputs = [np.asarray(y.data) for y in _tuple(function(*(Tensor(data=a.copy()) for a in arrays)))]
    floats = [n for n, y in enumerate(outputs) if y.dtype.kind == "f"]
    weights = [normal(*outputs[n].shape, seed=97 + n).astype(outputs[n].dtype) for n in floats]

    def body(*xs: Tensor) -> list[Tensor]:
        ys = _tuple(function(*xs[: len(arrays)]))
        loss = None
        for n, r in zip(floats, xs[len(arrays) :], strict=True):
            part = op.ReduceSum(op.Mul(ys[n], r), keepdims=0)
            loss = part if loss is None else op.Add(loss, part)
        return [*ys, *gradients_of(loss, [xs[i] for i in needs])]

    return body, [*arrays, *weights]


def gradients_of(loss: Any, xs: Sequence[Tensor]) -> list[Tensor]:
    """The gradients of a loss for trained arguments of a body."""
    found = {id(x): g for x, g in autograd.backward(loss)}
    return [found[id(x)] for x in xs]


def compare(
    function: Function,
    arrays: Sequence[np.ndarray],
    needs: Collection[int],
    *,
    joined: Sequence[str],
    exact: bool = False,
    tolerance: float = 2e-6,
    threads: int = 1,
) -> Recorded:
    """Compare the outputs of a function, and the gradients of their weighted sum; the arguments are those of `agree`."""
    body, given = differentiated(function, arrays, needs)
    return agree(body, given, needs, joined=joined, exact=exact, tolerance=tolerance, threads=threads)


def agree(
    body: Function,
    arrays: Sequence[np.ndarray],
    needs: Collection[int],
    *,
    joined: Sequence[str],
    exact: bool = False,
    tolerance: float = 2e-6,
    threads: int = 1,
) -> Recorded:
    """Compare a step by a plan with the definitions, in three runs: the one that traces the plan, another, one with other data.

    Args:
        body: of the step.
        arrays: its arguments.
        needs: the positions of the arguments that are trained.
        joined: the operators whose gradients one kernel must compute.
        exact: whether to compare with the definitions in float64 instead of float32.
        tolerance: the largest difference, over the largest value of a result.
        threads: of the plan.

    Returns:
        The step by a plan.
    """
    plan = record(body, arrays, needs, Options(threads=threads))
    wide = [a.astype(np.float64) if exact and a.dtype == np.float32 else a for a in arrays]
    other = record(body, wide, needs, Options(level=0))
    for turn in ("the trace", "the next run", "other data"):
        if turn == "other data":
            for r in (plan, other):  # equal values remain equal
                r.set([np.ascontiguousarray(a[..., ::-1]) if a.dtype.kind == "f" and a.ndim else a for a in arrays])
        actual, expected = plan.run(), other.run()
        assert sorted(plan.joined) == sorted(joined), (plan.joined, plan.reasons)
        for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
            close(a, e, tolerance, f"result {n} of {turn}")
    return plan


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float, what: str = "") -> None:
    """Fail if a result differs by more than `tolerance` times the largest value."""
    assert actual.shape == expected.shape, what
    assert np.isfinite(actual).all() and np.isfinite(expected).all(), what
    largest = float(np.abs(expected).max(initial=0)) or 1.0
    difference = float(np.abs(actual.astype(np.float64) - expected).max(initial=0)) / largest
    assert difference <= tolerance, f"{what} differs by {difference:.1e} of its largest value"


def makers_come_first(graph: ir.Graph) -> None:
    """Fail if a node reads a value before it is made, or two nodes make one."""
    known = {*graph.inputs}
    for node in graph.nodes:
        assert all(v in known or v.constant is not None for v in node.reads), node
        assert known.isdisjoint(node.results) and all(o.producer is node for o in node.results), node
        known.update(node.results)
    assert all(o in known or o.constant is not None for o in graph.outputs)


def constants_of(graph: ir.Graph) -> list[Any]:
    """The constants that a graph reads or returns, each once."""
    values = dict.fromkeys([*(v for node in graph.nodes for v in node.reads), *graph.outputs])
    return [v.constant for v in values if v.constant is not None]


def planner_of(step: Step) -> Planner:
    """The plans of a step."""
    assert step._session._planner is not None
    return step._session._planner


def steps_of(model: Model) -> list[Step]:
    """The recorded steps of a model."""
    return [s for found in model._steps.values() for s in found]


def _tuple(y: Any) -> list[Tensor]:
    return list(y) if isinstance(y, (tuple, list)) else [y]
