"""Random bits, and Dropout in training, by kernels: the bits, the masks and the stream of the definitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import Function, Recorded, differentiated, normal, record

from singa._core import random
from singa._core.ops import op
from singa.device import get_default_device
from singa_backend.kernels import dropout
from singa_backend.kernels.table import Options
from singa_backend.operators import random as definition
from singa_backend.proto.schemas import SINGA_DOMAIN

DEFINITIONS, PLAIN, PLANS = Options(level=0), Options(level=1), Options()
STATES = [(0, 0), (7, 3), (2**63 - 1, 2**62 + 5), (2**32, 2**32 - 1)]
"""The seed and the number of draws."""

SHAPES = [(1,), (3,), (4,), (5, 7), (2, 3, 4, 5), (4 * dropout.BLOCKS,), (4 * dropout.BLOCKS + 3,), (3, 4 * dropout.BLOCKS + 1)]


def drawn(body: Function, arrays: list[np.ndarray], options: Options, state: Any, runs: int = 3) -> tuple[list[bytes], Recorded]:
    """The bits of all results of some runs, and the state of the stream after them."""
    random.set_state(get_default_device(), np.array(state, np.int64))
    step = record(body, arrays, [], options)
    random.set_state(get_default_device(), np.array(state, np.int64))
    found = [y.tobytes() for _ in range(runs) for y in step.run()]
    return [*found, random.get_state(get_default_device()).tobytes()], step


def agree(body: Function, arrays: list[np.ndarray], state: Any = (7, 3), kernels: bool = True) -> Recorded:
    """Compare the bits of plans with those of the definitions; return the step by plans."""
    expected, _ = drawn(body, arrays, DEFINITIONS, state)
    for options in (PLAIN, PLANS):
        actual, step = drawn(body, arrays, options, state)
        assert actual == expected, options.level
        assert kernels == ("numpy.philox" in step.kernels)
    return step


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout_of_the_device(shape: tuple[int, ...], state: tuple[int, int]) -> None:
    step = agree(lambda x: random.dropout(x, 0.1), [normal(*shape)], state)
    assert step.planner.latest is not None and not step.planner.latest.facts.definitions


@pytest.mark.parametrize("ratio", [0.0, 1e-9, 0.25, 0.5, 1 / 3, 1 - 2.0**-24, 1.0, 2.0])
def test_ratios(ratio: float) -> None:
    agree(lambda x: random.dropout(x, ratio), [normal(40, 50)])


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, -1.0, 1.0, np.inf, -np.inf, np.nan])
def test_a_ratio_that_is_an_input(ratio: float) -> None:
    """It may differ between runs: the kernel reads it in each."""
    body = random.dropout
    arrays = [normal(40, 50), np.array([0.3], np.float32)]
    with np.errstate(all="ignore"):
        made = []
        for options in (DEFINITIONS, PLANS):
            _, step = drawn(body, arrays, options, (1, 2))
            step.set([arrays[0], np.array([ratio], np.float32)])
            made.append([y.tobytes() for _ in range(2) for y in step.run()])
    assert made[0] == made[1]


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64])
@pytest.mark.parametrize(
    "draw", [random.uniform, lambda s, d, t: random.bernoulli(0.3, s, d, t), lambda s, d, t: random.normal(1, 2, s, d, t)]
)
def test_other_draws(draw: Callable[..., Any], dtype: Any) -> None:
    agree(lambda x: op.Add(draw((33, 5), None, dtype), x), [normal(33, 5).astype(dtype)])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_dropout_of_other_dtypes(dtype: Any) -> None:
    agree(lambda x: random.dropout(x, 0.3), [normal(33, 5).astype(dtype)])


def test_a_mask_with_other_readers() -> None:
    def body(x: Any) -> list[Any]:
        y, mask = random.dropout(x, 0.3)
        return [y, mask, op.Not(mask), op.Where(mask, x, y)]

    agree(body, [normal(33, 5)])


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 4, 5)], ids=str)
def test_no_elements(shape: tuple[int, ...]) -> None:
    step = agree(lambda x: random.dropout(x, 0.3), [normal(*shape)], kernels=False)
    assert "definition" in step.kernels


def test_words_and_a_changed_key() -> None:
    """A key that is an input: words themselves, of a scalar shape too."""
    for shape in ((), (6,), (3, 5)):
        key = np.array([5, 6], np.int64)
        body = lambda k, s=shape: [op.Philox(k, op.constant(list(s), np.int64), domain=SINGA_DOMAIN)]  # noqa: E731
        steps = [record(body, [key], [], o) for o in (DEFINITIONS, PLANS)]
        for k in (key, np.array([-1, -(2**40)], np.int64)):
            for s in steps:
                s.set([k])
            (expected,), (actual,) = (s.run() for s in steps)
            assert actual.dtype == np.uint32 and actual.shape == shape and actual.tobytes() == expected.tobytes()
        assert "numpy.philox" in steps[1].kernels


def test_gradients_and_the_stream_after_them() -> None:
    """Two drops in a net: the gradients pass the masks that were drawn, and plans and definitions draw the same."""

    def net(x: Any, w: Any) -> Any:
        return random.dropout(op.MatMul(random.dropout(x, 0.3)[0], w), 0.2)[0]

    arrays = [normal(12, 8), normal(8, 5, seed=1)]
    body, given = differentiated(net, arrays, [0, 1])
    made = []
    for options in (DEFINITIONS, PLANS):
        random.set_state(get_default_device(), np.array([4, 0], np.int64))
        step = record(body, given, [0, 1], options)
        random.set_state(get_default_device(), np.array([4, 0], np.int64))
        made.append([step.run() for _ in range(3)])
        assert random.get_state(get_default_device()).tolist() == [4, 6]
    for a, e in zip(*made, strict=True):
        for n, (actual, expected) in enumerate(zip(a, e, strict=True)):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6, err_msg=str(n))
            assert np.array_equal(actual == 0, expected == 0)
    assert not np.array_equal(made[1][0][0] == 0, made[1][1][0] == 0)


def test_a_run_that_the_definitions_repeat_draws_once() -> None:
    """A plan that is refused, for a value that is not finite, leaves the stream where the definitions begin."""

    def net(x: Any) -> Any:
        return op.Relu(op.Softmax(random.dropout(x, 0.3)[0]))

    x = normal(40, 50)
    body, given = differentiated(net, [x], [0])
    bad = x.copy()
    bad[3, 4] = np.nan
    made = []
    for options in (DEFINITIONS, PLANS):
        random.set_state(get_default_device(), np.array([4, 0], np.int64))
        step = record(body, given, [0], options)
        random.set_state(get_default_device(), np.array([4, 0], np.int64))
        for array in (x, bad, x):
            step.set([array])
            found = step.run()
            if options is PLANS:
                assert (step.step._session.reason is None) == (array is x)
        assert random.get_state(get_default_device()).tolist() == [4, 3]
        made.append(found)
    assert np.array_equal(made[0][0] == 0, made[1][0] == 0)


# --- Dropout of ONNX

TYPES = (np.float32, np.float64)


def onnx_dropout(ratio: float | None = 0.3, outputs: int = 1, **attributes: Any) -> Function:
    share = None if ratio is None else op.constant(ratio, np.float32)
    return lambda x: op.Dropout(x, share, True, outputs=outputs, **attributes)


def bits_of(body: Function, arrays: list[np.ndarray], needs: list[int]) -> tuple[Recorded, list[list[np.ndarray]]]:
    """The step by plans, and the results of three runs of it and of the definitions, which agree to the bit."""
    steps = [record(body, arrays, needs, o) for o in (DEFINITIONS, PLANS)]
    made = [[s.run() for _ in range(3)] for s in steps]
    for e, a in zip(*made, strict=True):
        assert [y.tobytes() for y in a] == [y.tobytes() for y in e]
    return steps[1], made[1]


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.5, 1 - 2.0**-20, None])
@pytest.mark.parametrize("dtype", TYPES)
def test_a_seed(dtype: Any, ratio: float | None, outputs: int) -> None:
    """It draws the mask of the definition, the same in each run, and its gradient passes what the rule lets pass."""
    x = normal(3, 40).astype(dtype)
    x[0, :20] = 0
    x[1, :3] = -0.0
    body, given = differentiated(onnx_dropout(ratio, outputs, seed=11), [x], [0])
    step, _ = bits_of(body, given, [0])
    assert step.joined == step.in_training == ["Dropout"], step.reasons
    assert not any(k == "definition" for k in step.kernels)


@pytest.mark.parametrize("outputs", [1, 2])
def test_values_that_are_not_finite_pass_without_a_mask(outputs: int) -> None:
    x = normal(3, 40)
    x[0, :12], x[1, :12], x[2, :12] = np.inf, np.nan, 0
    body, given = differentiated(onnx_dropout(0.5, outputs, seed=11), [np.ones_like(x)], [0])
    given[0] = x
    with np.errstate(invalid="ignore"):
        bits_of(body, given, [0])


@pytest.mark.parametrize("shape", [(1,), (5, 1, 3), (2, 8, 5, 6), (3, dropout.DRAWS + 7)], ids=str)
def test_without_a_seed(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run draws from a new stream, here of a known seed, as the definition does."""
    seeds = iter(())

    def stream(seed: float | None) -> Any:
        assert seed is None
        return np.random.Generator(np.random.Philox(next(seeds)))

    monkeypatch.setattr(definition, "random_stream", stream)
    monkeypatch.setattr(dropout, "random_stream", stream)
    seeds = iter(range(1000))
    body, given = differentiated(onnx_dropout(0.3, 2), [normal(*shape)], [0])
    steps, made = [record(body, given, [0], o) for o in (DEFINITIONS, PLANS)], []
    for s in steps:
        seeds = iter(range(50, 1000))
        made.append([y.tobytes() for _ in range(3) for y in s.run()])
    assert made[0] == made[1]
    assert steps[1].joined == ["Dropout"] and "numpy.random" in steps[1].kernels


def test_runs_without_a_seed_differ() -> None:
    step = record(lambda x: [*op.Dropout(x, 0.5, True, outputs=2)], [normal(50, 50)], [], PLANS)
    masks = [step.run()[1] for _ in range(4)]
    assert len({m.tobytes() for m in masks}) == 4
    assert all(abs(m.mean() - 0.5) < 0.05 for m in masks)


def test_refused_dropouts() -> None:
    """Other types, a ratio that is not a constant, and no elements are left to the definition."""
    for arrays, function in (
        ([normal(3, 4).astype(np.float16)], onnx_dropout(0.3, seed=1)),
        ([normal(3, 4), np.array(0.3, np.float32)], lambda x, r: op.Dropout(x, r, True, seed=1)),
        ([normal(0, 4)], onnx_dropout(0.3, seed=1)),
    ):
        step, _ = bits_of(lambda *v, f=function: [f(*v)], arrays, [])
        assert "definition" in step.kernels


def test_reasons_of_refused_gradients() -> None:
    body, given = differentiated(onnx_dropout(0.3, seed=1), [normal(3, 4).astype(np.float16)], [0])
    step, _ = bits_of(body, given, [0])
    assert not step.joined and "elements of other types" in step.reasons["Dropout"]
