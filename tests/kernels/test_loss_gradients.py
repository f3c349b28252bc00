"""Losses of class numbers and softmaxes in recorded steps: their kernels equal the definitions, in float32 and in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.plan_checks import same
from tests.helpers.recorded_steps import Recorded, agree, compare, differentiated, gradients_of, normal, record

from singa import autograd
from singa._core.ops import op
from singa_backend.errors import OperatorError
from singa_backend.kernels import losses, onednn
from singa_backend.kernels.table import Options

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

SOFTMAX, LIKELIHOOD = "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"

SHAPES = [
    (1, 1), (5, 1), (6, 5), (7, losses.WIDE), (128, 10), (300, 1000), (2, 3, 5), (2, 3, 4, 5), (2, 3, 8, 8), (1, 4, 40),
    (2, 60, 3, 4), (3, 60, 1, 1), (2, 1, 8, 8), (1, 2, 3, 4, 5),
]  # fmt: skip
"""The shapes of scores: few and many classes, positions that are next to each other in memory, and not."""


def targets(shape: tuple[int, ...], dtype: Any = np.int64) -> np.ndarray:
    return np.random.default_rng(shape).integers(0, shape[1], (shape[0], *shape[2:])).astype(dtype)


def loss(name: str, **attributes: Any) -> Callable[..., Any]:
    return lambda x, t, *w: getattr(op, name)(x, t, *w, **attributes)


def scores(*shape: int, seed: int = 0) -> np.ndarray:
    """Negative numbers, so that no sum of losses is near 0."""
    return -np.abs(normal(*shape, seed=seed))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [SOFTMAX, LIKELIHOOD])
def test_losses(name: str, shape: tuple[int, ...], reduction: str) -> None:
    for dtype in np.int32, np.int64:
        step = compare(
            loss(name, reduction=reduction), [scores(*shape), targets(shape, dtype)], [0], joined=[name], exact=True
        )  # fmt: skip
        assert step.in_training == [name] and "definition" not in step.kernels


@pytest.mark.parametrize("ignored", [None, -100, 0, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(7, 5), (9, 70), (2, 3, 8, 8), (2, 60, 3, 4)], ids=str)
@pytest.mark.parametrize("name", [SOFTMAX, LIKELIHOOD])
def test_weights_and_ignored_targets(
    name: str, shape: tuple[int, ...], reduction: str, weighted: bool, ignored: int | None
) -> None:
    t = targets(shape)
    attributes: dict[str, Any] = {"reduction": reduction}
    if ignored is not None:
        t.reshape(-1)[:2] = ignored
        attributes["ignore_index"] = ignored
    w = [np.abs(normal(shape[1], seed=3))] if weighted else []
    compare(loss(name, **attributes), [scores(*shape), t, *w], [0], joined=[name], exact=True)


@pytest.mark.parametrize("shape", [(7, 5), (9, 70), (2, 3, 8, 8), (2, 60, 3, 4)], ids=str)
def test_the_logarithm_of_the_softmax(shape: tuple[int, ...]) -> None:
    """Without a gradient of it the kernel computes both; with one the gradient is left to the rule."""

    def first(x: Any, t: Any) -> list[Any]:
        y, log = op.SoftmaxCrossEntropyLoss(x, t, outputs=2)
        return [y, log, *gradients_of(y, [x])]

    arrays = [scores(*shape), targets(shape)]
    agree(first, arrays, [0], joined=[SOFTMAX], exact=True)
    step = compare(lambda x, t: op.SoftmaxCrossEntropyLoss(x, t, outputs=2), arrays, [0], joined=[], exact=True, tolerance=1e-5)
    assert not any(k == "definition" for k in step.kernels)


@pytest.mark.parametrize("perm", [(0, 3, 1, 2), (1, 0, 2, 3), (0, 2, 1, 3)])
@pytest.mark.parametrize("shape", [(2, 4, 6, 5), (2, 12, 9, 60), (3, 50, 52, 7)], ids=str)
@pytest.mark.parametrize("name", [SOFTMAX, LIKELIHOOD])
def test_scores_that_are_views(name: str, shape: tuple[int, ...], perm: tuple[int, ...]) -> None:
    """Also channels last, as a convolution returns them."""
    wide = tuple(shape[p] for p in perm)
    function = loss(name)
    compare(lambda x, t: function(op.Transpose(x, perm=perm), t), [scores(*shape), targets(wide)], [0], joined=[name], exact=True)


@pytest.mark.parametrize("shape", [(6, 5), (6, 70), (2, 3, 8, 8)], ids=str)
@pytest.mark.parametrize("name", [SOFTMAX, LIKELIHOOD])
def test_values_with_other_readers(name: str, shape: tuple[int, ...]) -> None:
    """The scores are a result and are read by two losses, whose kernels must not overwrite them."""

    def several(x: Any, t: Any, u: Any) -> list[Any]:
        z = op.Mul(x, 2.0)
        return [getattr(op, name)(z, t), getattr(op, name)(z, u, reduction="sum"), z]

    arrays = [scores(*shape), targets(shape), targets(shape)[::-1].copy()]
    compare(several, arrays, [0], joined=[name] * 2, exact=True)


def test_float64_is_computed_too() -> None:
    for shape in (6, 5), (6, 70), (2, 3, 8, 8):
        x = scores(*shape).astype(np.float64)
        body, given = differentiated(loss(SOFTMAX), [x, targets(shape)], [0])
        plan, exact = (record(body, given, [0], Options(level=n)) for n in (2, 0))
        for got, wanted in zip(plan.run(), exact.run(), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-12)
        assert plan.joined == [SOFTMAX]


@pytest.mark.parametrize("shape", [(6, 5), (6, 70), (2, 3, 8, 8)], ids=str)
def test_large_scores(shape: tuple[int, ...]) -> None:
    """The loss of a class whose probability is below the smallest float is still exact."""
    compare(loss(SOFTMAX), [scores(*shape) * np.float32(300), targets(shape)], [0], joined=[SOFTMAX], exact=True)


def both(function: Any, arrays: list[np.ndarray], needs: list[int]) -> tuple[Recorded, Recorded]:
    """A step by a plan, which has run, and by the definitions."""
    body, given = differentiated(function, arrays, needs)
    plan, exact = (record(body, given, needs, Options(level=n)) for n in (2, 0))
    plan.run()
    return plan, exact


@pytest.mark.parametrize("bad", [-1, 5, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("name", [SOFTMAX, LIKELIHOOD])
def test_a_target_that_is_out_of_range(name: str, bad: int) -> None:
    """The error is the definition's, and a valid run follows by the same plan."""
    arrays = [scores(6, 5), targets((6, 5)).astype(np.int32)]
    plan, exact = both(loss(name), arrays, [0])
    assert plan.joined == [name]
    t = arrays[1].copy()
    t[3] = bad
    for r in plan, exact:
        r.set([arrays[0], t])
        with pytest.raises(OperatorError) as found:
            r.run()
        assert str(bad) in str(found.value)
        r.set(arrays)
    for got, wanted in zip(plan.run(), exact.run(), strict=True):
        same(got, wanted)


@pytest.mark.parametrize("name", [SOFTMAX, LIKELIHOOD])
def test_a_mean_of_nothing(name: str) -> None:
    """All targets are ignored, or the weights of those that occur are 0: the loss is NaN, and its gradient 0 as PyTorch's."""
    arrays = [scores(6, 5), targets((6, 5)), np.abs(normal(5, seed=3))]
    plan, exact = both(loss(name, ignore_index=-1), arrays, [0])
    assert plan.joined == [name]
    for t, w in (np.full(6, -1), arrays[2]), (arrays[1], np.zeros(5, np.float32)):
        for r in plan, exact:
            r.set([arrays[0], t, w])
        for got, wanted in zip(plan.run(), exact.run(), strict=True):
            same(got, wanted)
        assert np.isnan(plan.run()[0]) and not any(r.run()[1].any() for r in (plan, exact))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(6, 5), (6, 70), (2, 3, 8, 8)], ids=str)
@pytest.mark.parametrize("name", [SOFTMAX, LIKELIHOOD])
def test_losses_of_what_is_not_finite(name: str, shape: tuple[int, ...], number: float) -> None:
    """Also where the target is ignored: its loss is 0."""
    for reduction in "none", "mean":
        t = targets(shape)
        t.reshape(-1)[1] = -1
        arrays = [scores(*shape), t, np.abs(normal(shape[1], seed=3))]
        plan, exact = both(loss(name, ignore_index=-1, reduction=reduction), arrays, [0])
        assert plan.joined == [name]
        for place in (0, 0), (1, 0), (3 % shape[0], 2):
            x = arrays[0].copy()
            x[place] = number
            for r in plan, exact:
                r.set([x])
            for got, wanted in zip(plan.run(), exact.run(), strict=True):
                same(got, wanted)


@pytest.mark.parametrize("shape", [(6, 5), (6, 70)], ids=str)
def test_scores_with_a_mask(shape: tuple[int, ...]) -> None:
    """A constant mask hides classes: their probability is 0, and the loss of a hidden target is infinite."""
    mask = np.zeros(shape, np.float32)
    mask[:, 1] = mask[2, 2:] = -np.inf
    for t in np.zeros(6, np.int64), np.arange(6) % 3:
        plan, exact = both(
            lambda x, t: op.SoftmaxCrossEntropyLoss(op.Add(x, mask), t, reduction="none"), [normal(*shape), t], [0]
        )
        assert plan.joined == [SOFTMAX]
        for got, wanted in zip(plan.run(), exact.run(), strict=True):
            same(got, wanted)


@pytest.mark.parametrize("given", [(0, 5), (3, 5, 0), (2, 0, 4)], ids=str)
def test_empty_scores_are_left_to_the_definition(given: tuple[int, ...]) -> None:
    t = np.zeros((given[0], *given[2:]), np.int64)
    x = np.zeros(given, np.float32)
    if not given[1]:
        return  # no class: the definition refuses every target
    body, arrays = differentiated(loss(SOFTMAX, reduction="sum"), [x, t], [0])
    plan, exact = (record(body, arrays, [0], Options(level=n)) for n in (2, 0))
    for got, wanted in zip(plan.run(), exact.run(), strict=True):
        same(got, wanted)
    assert plan.joined == []


def test_a_constant_gradient_of_the_loss() -> None:
    """The gradient of a loss of one element is 1, which no node computes; a factor makes it another number."""
    for factor in 1.0, 0.25:

        def body(x: Any, t: Any, factor: float = factor) -> list[Any]:
            y = autograd.softmax_cross_entropy(x, t=t)
            return [y, *gradients_of(op.Mul(y, factor), [x])]

        agree(body, [scores(6, 5), targets((6, 5))], [0], joined=[SOFTMAX], exact=True)


# --- masks


def test_a_causal_mask_leaves_values_finite() -> None:
    """Each row of scores has a finite element, so the softmax is finite, and what follows it has gradient kernels."""
    mask = np.where(np.tri(24, dtype=np.bool_), np.float32(0), np.float32(-np.inf))

    def body(x: Any, k: Any, w: Any) -> Any:
        z = op.MatMul(x, k)
        for _ in range(2):
            z = op.Tanh(op.MatMul(op.Softmax(op.Add(z, mask)), w))
        return z

    step = compare(
        body,
        [normal(4, 24, 24), normal(24, 24, seed=1), normal(24, 24, seed=2)],
        [0, 1, 2],
        joined=["Tanh"] * 2,
        tolerance=5e-6,
    )
    assert "definition" not in step.kernels


def only_row_3_is_nan(plan: Any, exact: Any) -> None:
    """Fail unless a plan has the results of the definitions, of which row 3 is NaN, and refuses the gradient of Tanh."""
    results = list(zip(plan.run(), exact.run(), strict=True))
    for got, wanted in results:
        same(got, wanted)
    assert np.isnan(results[0][1][3]).all() and np.isfinite(results[0][1][4]).all()
    assert "a value is not finite" in plan.reasons["Tanh"]


@pytest.mark.parametrize("perm", [(1, 0), (0, 1)])
def test_a_row_without_a_finite_score(perm: tuple[int, int]) -> None:
    """It may be hidden in a mask that is transposed: the softmax of that row is NaN, and so is what follows."""
    mask = np.zeros((24, 24), np.float32)
    mask[3] = -np.inf
    used = mask if perm == (0, 1) else mask.T.copy()

    def body(x: Any, w: Any) -> Any:
        return op.Tanh(op.MatMul(op.Softmax(op.Add(op.MatMul(x, w), op.Transpose(used, perm=perm))), w))

    plan, exact = both(body, [normal(24, 24), normal(24, 24, seed=1)], [0, 1])
    only_row_3_is_nan(plan, exact)


def test_scores_that_are_transposed_after_the_mask() -> None:
    """Each row of the mask has a finite element, but not each column."""
    mask = np.zeros((24, 24), np.float32)
    mask[:, 3] = -np.inf

    def body(x: Any, w: Any) -> Any:
        return op.Tanh(op.MatMul(op.Softmax(op.Transpose(op.Add(op.MatMul(x, w), mask), perm=[1, 0])), w))

    plan, exact = both(body, [normal(24, 24), normal(24, 24, seed=1)], [0, 1])
    only_row_3_is_nan(plan, exact)
