"""Large inputs and outputs that a plan does not copy."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest
from onnx import helper
from tests.helpers.plan_checks import drawn, model_of, same

from singa_backend.backend import SingaBackend, SingaRep
from singa_backend.errors import InvalidInput
from singa_backend.kernels.table import Options

node = helper.make_node
SHAPE = (400, 512)


def caches(past: Any = SHAPE, now: Any = (1, 512)) -> tuple[SingaRep, SingaRep]:
    """A model that appends rows to two arrays and multiplies the results: planned, and by its definitions."""
    feed = drawn(1, past=past, now=now, other=past)
    nodes = [
        node("Concat", ["past", "now"], ["whole"], axis=0),
        node("Concat", ["other", "now"], ["second"], axis=0),
        node("Transpose", ["second"], ["t"]),
        node("MatMul", ["whole", "t"], ["m"]),
        node("Relu", ["m"], ["y"]),
    ]
    read = SingaBackend.prepare(model_of(nodes, feed, ["y", "whole", "second"]))
    return SingaRep(read.graph, read.device), SingaRep(read.graph, read.device, options=Options(level=0))


def plan_of(rep: SingaRep) -> Any:
    assert rep._session._planner is not None
    (plan,) = rep._session._planner.plans.values()
    return plan


def test_large_arrays_are_not_copied() -> None:
    planned, exact = caches()
    kept = []
    for seed in range(4):
        feed = drawn(seed, past=SHAPE, now=(1, 512), other=SHAPE)
        outputs = planned.run(feed)
        for got, wanted in zip(outputs, exact.run(feed), strict=True):
            same(got, wanted)
            assert got.flags.writeable and not any(np.shares_memory(got, o) for k, _ in kept for o in k)
        kept.append((outputs, [np.array(o) for o in outputs]))
    plan = plan_of(planned)
    assert [t is None for t in plan.inputs] == [True, False, True]
    assert len(plan.first.passed) == 5
    assert plan.arena_bytes < np.prod(SHAPE) * 4
    for outputs, before in kept:  # no later run has written to what a run returned
        for o, b in zip(outputs, before, strict=True):
            np.testing.assert_array_equal(o, b)


def test_an_output_is_computed_in_an_array_of_the_caller() -> None:
    planned, exact = caches()
    out = [np.empty((401, 401), np.float32), np.empty((401, 512), np.float32), np.empty((401, 512), np.float32)]
    for seed in range(3):
        feed = drawn(seed, past=SHAPE, now=(1, 512), other=SHAPE)
        outputs = planned.run(feed, out=out)
        for got, a, wanted in zip(outputs, out, exact.run(feed), strict=True):
            assert got is a
            same(got, wanted)
    before = [a.copy() for a in out]
    with pytest.raises(InvalidInput, match="must be float32"):
        planned.run(feed, out=[*out[:2], np.empty((400, 512), np.float32)])
    for a, b in zip(out, before, strict=True):
        np.testing.assert_array_equal(a, b)
    made = [p for p in plan_of(planned).first.passed if p.index < 0]
    assert len(made) == 3 and all(p.memory is not None for p in made)  # of the run without arrays that fit
    for p in made:
        p.memory = None
    planned.run(feed, out=out)
    assert all(p.memory is None for p in made)


@pytest.mark.parametrize("held", ["array", "part", "view of a part", "memoryview", "DLPack", "none"])
def test_memory_of_an_output_is_used_again_when_nothing_shows_it(held: str) -> None:
    planned, exact = caches()
    feeds = [drawn(seed, past=SHAPE, now=(1, 512), other=SHAPE) for seed in range(3)]
    planned.run(feeds[0])
    outputs = planned.run(feeds[1])
    before, places = [np.array(o) for o in outputs], [o.ctypes.data for o in outputs]
    ways = {
        "array": lambda o: o, "part": lambda o: o[1:-1], "view of a part": lambda o: o.reshape(-1)[7:].view(np.int32),
        "memoryview": memoryview, "DLPack": np.from_dlpack, "none": lambda o: None,
    }  # fmt: skip
    kept = [ways[held](o) for o in outputs]
    expected = [np.array(ways[held](b)) for b in before]
    del outputs
    after = planned.run(feeds[2])
    again = [o.ctypes.data for o in after]
    assert all(a == b for a, b in zip(again, places, strict=True)) == (held == "none")
    for a, b in zip(kept, expected, strict=True):
        if held != "none":
            np.testing.assert_array_equal(np.asarray(a), b)
    for got, wanted in zip(after, exact.run(feeds[2]), strict=True):
        same(got, wanted)


def test_nothing_of_a_run_is_kept() -> None:
    planned, _ = caches()
    feed = drawn(1, past=SHAPE, now=(1, 512), other=SHAPE)
    for _ in range(3):
        outputs = planned.run(feed)
    for x in (*feed.values(), *outputs):
        assert sys.getrefcount(x) <= 4


def test_forms_of_inputs() -> None:
    planned, exact = caches()
    feed = drawn(1, past=SHAPE, now=(1, 512), other=SHAPE)
    wanted = exact.run(feed)
    planned.run(feed)
    feed["past"].flags.writeable = False
    wide = np.zeros((800, 1024), np.float32)
    wide[::2, ::2] = feed["past"]
    for past in (
        feed["past"],
        wide[::2, ::2],
        np.asfortranarray(feed["past"]),
        feed["past"].tolist(),
        feed["past"].astype(">f4"),
    ):
        for got, want in zip(planned.run({**feed, "past": past}), wanted, strict=True):
            same(got, want)
    twice = {**feed, "other": feed["past"]}
    for got, want in zip(planned.run(twice), exact.run(twice), strict=True):
        same(got, want)


def test_an_output_is_the_next_input() -> None:
    feed = drawn(1, x=(300, 512))
    nodes = [node("Mul", ["x", "h"], ["t"]), node("Sigmoid", ["t"], ["y"])]
    read = SingaBackend.prepare(model_of(nodes, feed, ["y"], {"h": np.float32(0.5)}))
    planned, exact = SingaRep(read.graph, read.device), SingaRep(read.graph, read.device, options=Options(level=0))
    x = feed["x"]
    for _ in range(4):
        (y,) = planned.run([x])
        same(y, exact.run([x])[0])
        x = y


@pytest.mark.parametrize("name", ["past", "other"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_not_finite(name: str, number: float) -> None:
    planned, exact = caches()
    feed = drawn(1, past=SHAPE, now=(1, 512), other=SHAPE)
    planned.run(feed)
    bad = {**feed, name: feed[name].copy()}
    bad[name][3, 4] = number
    for given in (bad, feed, {**feed, name: np.full(SHAPE, 1e34, np.float32)}, feed):
        with np.errstate(all="ignore"):
            wanted = exact.run(given)
        for got, want in zip(planned.run(given), wanted, strict=True):
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
            same(got, want)


def test_an_input_that_is_an_output_or_has_many_readers() -> None:
    feed = drawn(1, x=(300, 512))
    nodes = [node("Identity", ["x"], ["a"]), node("Transpose", ["x"], ["b"])]
    nodes += [node("Add", ["x", "k"], [f"c{i}"]) for i in range(12)] + [node("Sum", [f"c{i}" for i in range(12)], ["c"])]
    read = SingaBackend.prepare(model_of(nodes, feed, ["a", "b", "c", "c3"], {"k": np.float32(2)}))
    planned, exact = SingaRep(read.graph, read.device), SingaRep(read.graph, read.device, options=Options(level=0))
    for seed in range(3):
        x = drawn(seed, x=(300, 512))["x"]
        before = x.copy()
        for got, want in zip(planned.run([x]), exact.run([x]), strict=True):
            same(got, want)
            got += 1
        np.testing.assert_array_equal(x, before)


def test_threads_and_an_error_within_a_run() -> None:
    planned, exact = caches()
    feeds = [drawn(s, past=SHAPE, now=(1, 512), other=SHAPE) for s in range(4)]
    wanted = [exact.run(f) for f in feeds]
    planned.run(feeds[0])
    plan = plan_of(planned)
    last, function = len(plan.first.flat) - 1, plan.first.flat[-1]

    def fail() -> None:
        raise ValueError("on purpose")

    plan.first.flat[last] = (fail, ())
    moved = [start for start, _, _ in plan.first.moving]
    if last not in moved:
        with pytest.raises(ValueError, match="on purpose"):
            planned.run(feeds[0])
        plan.first.flat[last] = function
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(5):
            results[i] = planned.run(feeds[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    for i, want in enumerate(wanted):
        for g, w in zip(results[i], want, strict=True):
            same(g, w)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_the_first_run_may_have_an_input_that_is_not_finite(number: float) -> None:
    planned, exact = caches()
    feed = drawn(0, past=SHAPE, now=(1, 512), other=SHAPE)
    feed["past"][3, 4] = number
    for got, wanted in zip(planned.run(feed), exact.run(feed), strict=True):
        same(got, wanted)
