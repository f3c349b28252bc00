"""Plans next to other programs: a run whose threads wait for cores continues on one thread, with the same bits."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tests.helpers.plan_checks import drawn, model_of

from singa_backend import SingaBackend, machine
from singa_backend.backend import SingaRep
from singa_backend.kernels import onednn
from singa_backend.kernels.options import options
from singa_backend.plans import contention as module
from singa_backend.plans.contention import Contention, Pace, contention
from singa_backend.plans.trace import Segment

library = onednn.library()
needs_openmp = pytest.mark.skipif(library is None or library.runtime != "OpenMP", reason="only OpenMP has a number of threads")
F = np.float32
X = drawn(1, x=(1, 16, 32, 32))["x"]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans use two threads wherever the test runs, and what they have learned of the cores is forgotten."""
    for name in ("SONNX_NUM_THREADS", "OMP_NUM_THREADS", "PYTEST_XDIST_WORKER_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("singa_backend.kernels.options.usable_cores", lambda: 2)
    monkeypatch.setattr(machine, "running", lambda: 1)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    saved = dict(vars(contention))
    vars(contention).update(vars(Contention()))
    yield
    vars(contention).update(saved)


def net() -> ModelProto:
    """Convolutions with and without groups, a pool, a normalization, a product and a Softmax: many kinds of primitives."""
    node = helper.make_node
    weights = drawn(2, w1=(32, 16, 3, 3), w2=(32, 32, 1, 1), w3=(32, 1, 3, 3), w4=(512, 4096), scale=(32,), bias=(32,))
    shape = {"flat": np.array([8, -1]), "mean": np.zeros(32, F), "var": np.ones(32, F)}
    nodes = [
        node("Conv", ["x", "w1", "bias"], ["a"], pads=[1, 1, 1, 1]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "w2"], ["c"]),
        node("Conv", ["c", "w3"], ["d"], group=32, pads=[1, 1, 1, 1]),
        node("Concat", ["b", "d"], ["e"], axis=1),
        node("MaxPool", ["e"], ["f"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Split", ["f"], ["g", "h"], axis=1, num_outputs=2),
        node("InstanceNormalization", ["g", "scale", "bias"], ["i"]),
        node("Add", ["i", "h"], ["j"]),
        node("Reshape", ["j", "flat"], ["k"]),
        node("Gemm", ["k", "wide"], ["l"], transB=1),
        node("Softmax", ["l"], ["y"]),
    ]
    wide = drawn(3, wide=(512, 1024))
    constants = {**{n: v for n, v in weights.items() if n != "w4"}, **shape, **wide}
    return model_of(nodes, {"x": X}, ["y", "e"], constants)


def segment_of(rep: SingaRep) -> Segment:
    assert rep._session._planner is not None and rep._session._planner.latest is not None
    return rep._session._planner.latest.first


@needs_openmp
def test_every_step_has_a_form_for_one_thread_with_the_same_bits() -> None:
    rep = SingaBackend.prepare(net())
    rep.run([X])
    several = rep.run([X])
    segment = segment_of(rep)
    assert segment.pace is not None
    wide = [a for _, a in segment.flat if onednn.threads_of(a) > 1]
    assert {a[-1].kept.primitive.kind for a in wide} >= {"concat", "convolution_forward"}
    for arguments in wide:
        alone = onednn.single_threaded(arguments)
        assert alone is not None and alone[0].value != arguments[0].value and onednn.single_threaded(arguments) is alone
    before = onednn.threads()
    contention.add(-1000.0)
    single = rep.run([X])
    assert onednn.threads() == before
    assert contention.single_runs == 1 and segment.pace.alone > 0
    reference = SingaBackend.prepare(net(), threads=1)
    reference.run([X])
    for a, b, c in zip(several, single, reference.run([X]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(b, c, rtol=1e-6, atol=1e-7)


@needs_openmp
@pytest.mark.parametrize("inputs", [256, 1024])
@pytest.mark.parametrize("outputs", [96, 208, 512])
@pytest.mark.parametrize("size", [7, 14])
def test_a_convolution_has_a_form_for_one_thread(inputs: int, outputs: int, size: int) -> None:
    """oneDNN may choose another block of outputs for one thread; its weights are then packed a second time, once."""
    x, w = drawn(4, x=(1, inputs, size, size), w=(outputs, inputs, 1, 1)).values()
    conv = model_of([helper.make_node("Conv", ["x", "w"], ["y"])], {"x": x}, ["y"], {"w": w})
    rep = SingaBackend.prepare(conv)
    several = [rep.run([x])[0] for _ in range(2)][1]
    wide = [a for _, a in segment_of(rep).flat if onednn.threads_of(a) > 1]
    assert all(onednn.single_threaded(a) is not None for a in wide)
    contention.add(-1000.0)
    for _ in range(2):
        np.testing.assert_allclose(rep.run([x])[0], several, rtol=1e-5, atol=1e-5)


@needs_openmp
@pytest.mark.parametrize("given", [{"threads": 2}, {"deterministic": True}], ids=str)
def test_set_numbers_of_threads_are_never_changed(given: dict[str, Any]) -> None:
    rep = SingaBackend.prepare(net(), **given)
    rep.run([X])
    contention.add(-1000.0)
    rep.run([X])
    assert segment_of(rep).pace is None and contention.single_runs == 0


@needs_openmp
def test_a_number_in_the_environment_is_never_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert options().adaptive
    monkeypatch.setenv("SONNX_NUM_THREADS", "2")
    assert options().threads == 2 and not options().adaptive
    monkeypatch.delenv("SONNX_NUM_THREADS")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert not options().adaptive


class Clock:
    """A clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(module.time, "perf_counter", lambda: self.now)


class Steps:
    """Steps that take a time on several threads and another one on one, and note on which they ran."""

    def __init__(self, clock: Clock, several: float, single: float, count: int = 10) -> None:
        self.clock, self.several, self.single, self.count = clock, several / count, single / count, count
        self.ran: list[tuple[int, int]] = []

    def flat(self) -> list[module.Call]:
        return [(self.step, (i, 2)) for i in range(self.count)]

    def step(self, i: int, threads: int) -> None:
        self.clock.now += self.single if threads == 1 else self.several
        self.ran.append((i, threads))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(module, "single_step", lambda f, a: (f, (a[0], 1)))
    return Clock(monkeypatch)


def test_a_slow_run_continues_on_one_thread_and_computes_each_step_once(clock: Clock) -> None:
    steps = Steps(clock, 1.0, 2.0)
    pace, flat = Pace(2, 1.0), steps.flat()
    pace.run(flat)
    assert {t for _, t in steps.ran} == {2} and pace.usual == pytest.approx(1.0)
    steps.ran.clear()
    steps.several *= 30  # another program came
    pace.run(flat)
    assert [i for i, _ in steps.ran] == list(range(10))
    assert [t for _, t in steps.ran] == [2] + [1] * 9  # noticed after one step
    assert contention.slow == 1 and contention.present
    steps.ran.clear()
    pace.run(flat)
    assert {t for _, t in steps.ran} == {1} and pace.alone == pytest.approx(2.0)


def test_attempts_cost_a_twentieth_of_the_time_and_end_when_the_cores_are_free(clock: Clock) -> None:
    steps = Steps(clock, 0.001, 0.002)
    pace, flat = Pace(2, 0.001), steps.flat()
    pace.run(flat)
    steps.several *= 30
    for _ in range(2):
        pace.run(flat)
    began = clock.now
    for _ in range(2000):
        pace.run(flat)
    assert clock.now - began < 1.06 * 2000 * pace.alone
    assert contention.slow > 10
    steps.several /= 30
    for _ in range(100):
        pace.run(flat)
    steps.ran.clear()
    for _ in range(10):
        pace.run(flat)
    assert {t for _, t in steps.ran} == {2}


def usual_runs(clock: Clock, several: float, single: float) -> tuple[Steps, Pace, list[module.Call]]:
    """Steps whose usual time on several threads is known from ten runs."""
    steps = Steps(clock, several, single)
    pace, flat = Pace(2, several), steps.flat()
    for _ in range(10):
        pace.run(flat)
    return steps, pace, flat


def test_a_short_disturbance_costs_a_few_runs_on_one_thread(clock: Clock) -> None:
    steps, pace, flat = usual_runs(clock, 0.04, 0.07)
    steps.several *= 5
    while not contention.present:
        pace.run(flat)
    steps.several /= 5
    for _ in range(3):
        pace.run(flat)
    steps.ran.clear()
    pace.run(flat)
    assert not contention.present and {t for _, t in steps.ran} == {2}


def test_short_runs_give_up_early(clock: Clock) -> None:
    steps, pace, flat = usual_runs(clock, 0.00006, 0.0001)
    steps.several *= 20
    began = clock.now
    while not contention.present:
        pace.run(flat)
    assert clock.now - began < 0.2 * module.BURST
    assert contention.slow < module.BURST_RUNS


def test_a_single_pause_does_not_end_runs_that_save_time(clock: Clock) -> None:
    steps = Steps(clock, 0.001, 0.002)
    pace, flat = Pace(2, 0.001), steps.flat()
    contention.add(-0.026)
    pace.run(flat)
    for _ in range(10):
        pace.run(flat)
    steps.several *= 2.4
    pace.run(flat)
    steps.several /= 2.4
    steps.ran.clear()
    pace.run(flat)
    assert {t for _, t in steps.ran} == {2}


def test_threads_that_wake_up_slowly_do_not_end_runs_that_save_time(clock: Clock) -> None:
    steps = Steps(clock, 0.00006, 0.0001)
    pace, flat = Pace(2, 0.00006), steps.flat()
    contention.add(-0.026)
    for _ in range(10_000):
        pace.run(flat)
        if not contention.present:
            break
    slow = contention.slow
    steps.several *= 4  # the first attempt, in which the second thread wakes up
    pace.run(flat)
    steps.several /= 4
    assert contention.slow == slow + 1
    steps.ran.clear()
    for _ in range(10):
        pace.run(flat)
    assert {t for _, t in steps.ran} == {2}


def test_no_run_tries_several_threads_while_too_many_are_running(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(clock, 0.001, 0.002)
    pace, flat = Pace(2, 0.001), steps.flat()
    pace.run(flat)
    monkeypatch.setattr(machine, "running", lambda: 3)
    steps.several *= 30
    for _ in range(500):
        pace.run(flat)
    assert contention.slow == 1 and contention.single_runs == 500
    monkeypatch.setattr(machine, "running", lambda: 1)
    steps.several /= 30
    for _ in range(100):
        pace.run(flat)
    steps.ran.clear()
    pace.run(flat)
    assert {t for _, t in steps.ran} == {2}


def test_a_slower_clock_is_learned(clock: Clock) -> None:
    """A processor that becomes slower is not another program: one thread is slower too."""
    steps = Steps(clock, 1.0, 2.0)
    pace, flat = Pace(2, 1.0), steps.flat()
    pace.run(flat)
    steps.several, steps.single = 2.5 * steps.several, 2.5 * steps.single
    for _ in range(60):
        pace.run(flat)
    steps.ran.clear()
    for _ in range(10):
        pace.run(flat)
    assert {t for _, t in steps.ran} == {2}


def test_the_time_on_one_thread_is_measured_again_in_doubt(clock: Clock) -> None:
    """It was measured when the machine was busier: several threads that are slower than one now are given up."""
    steps = Steps(clock, 1.0, 2.0)
    pace, flat = Pace(2, 1.0), steps.flat()
    pace.run(flat)
    pace.alone = 8.0
    steps.several *= 4
    for _ in range(module.DOUBTS + 2):
        pace.run(flat)
    assert pace.alone == pytest.approx(2.0)
    steps.ran.clear()
    pace.run(flat)
    assert 1 in {t for _, t in steps.ran}


def test_a_paused_machine_does_not_stop_attempts_for_long(clock: Clock) -> None:
    steps = Steps(clock, 1.0, 2.0)
    pace, flat = Pace(2, 1.0), steps.flat()
    pace.run(flat)
    flat[3] = (lambda *_: setattr(clock, "now", clock.now + 3600), (3, 2))
    pace.run(flat)
    assert -contention.credit <= module.DEBT


@needs_openmp
def test_runs_of_several_threads_of_python_do_not_wait_for_each_other() -> None:
    """One run at a time uses several threads; runs that begin meanwhile use one."""
    reps = [SingaBackend.prepare(net()) for _ in range(3)]
    expected = [rep.run([X]) and rep.run([X]) for rep in reps]
    barrier = threading.Barrier(3, timeout=60)

    def work(rep: SingaRep) -> list[list[np.ndarray]]:
        barrier.wait()
        return [rep.run([X]) for _ in range(20)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, reps))
    for runs, one in zip(found, expected, strict=True):
        for run in runs:
            for a, b in zip(run, one, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    assert contention.lock.acquire(False)
    contention.lock.release()


@needs_openmp
def test_the_lock_is_free_after_a_run_that_failed_and_in_a_child() -> None:
    rep = SingaBackend.prepare(net())
    rep.run([X])
    segment = segment_of(rep)
    assert segment.pace is not None

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    kept = segment.flat[-1]
    segment.flat[-1] = (fail, ())
    for credit in (0.0, -1000.0):
        contention.credit, segment.pace.steps = credit, None
        with pytest.raises(KeyboardInterrupt):
            rep.run([X])
    segment.flat[-1], segment.pace.steps, contention.credit = kept, None, 0.0
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(contention.lock.acquire, False).result(), "a failed run must release the lock"
        child = os.fork()
        if not child:
            os._exit(0 if contention.lock.acquire(False) else 1)
        assert os.waitpid(child, 0)[1] == 0
        pool.submit(contention.lock.release).result()


@needs_openmp
def test_large_inputs_and_outputs_are_bound_in_both_forms() -> None:
    node = helper.make_node
    x = drawn(4, x=(512, 512))["x"]
    rep = SingaBackend.prepare(model_of([node("MatMul", ["x", "w"], ["y"])], {"x": x}, ["y"], drawn(5, w=(512, 512))))
    rep.run([x])
    segment = segment_of(rep)
    assert segment.passed
    for k in range(1, 4):
        contention.credit = -1000.0 if k % 2 else 0.0
        (y,) = rep.run([k * x])
        np.testing.assert_allclose(y, k * x @ drawn(5, w=(512, 512))["w"], rtol=1e-3, atol=1e-3)


@needs_openmp
def test_a_trace_on_busy_cores_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "running", lambda: 2)
    rep = SingaBackend.prepare(net())
    first = rep.run([X])
    pace = segment_of(rep).pace
    assert pace is not None and pace.missing
    second = rep.run([X])
    assert pace.alone > 0 and not pace.missing
    third = rep.run([X])
    for a, b, c in zip(first, second, third, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(a, c, rtol=1e-6, atol=1e-7)


def test_a_pickled_model_keeps_whether_its_threads_were_set() -> None:
    for given in ({}, {"threads": 2}, {"deterministic": True}):
        rep = SingaBackend.prepare(net(), **given)
        assert pickle.loads(pickle.dumps(rep)).options == rep.options


@needs_openmp
def test_the_profile_counts_runs_on_one_thread() -> None:
    rep = SingaBackend.prepare(net())
    assert rep.profile([X], runs=3).single_runs <= 3
    contention.add(-1000.0)
    found = rep.profile([X], runs=3)
    assert found.single_runs == 3
    assert found.waited is None or found.waited >= 0


# --- what the machine reports


def test_waited_adds_up_threads(tmp_path: Path) -> None:
    for name, text in (("1", "5 2000000000 7\n"), ("2", "5 500000000 7\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "schedstat").write_text(text)
    assert machine.waited(tmp_path) == 2.5
    (tmp_path / "2" / "schedstat").write_text("")
    assert machine.waited(tmp_path) is None
    (tmp_path / "2" / "schedstat").unlink()
    assert machine.waited(tmp_path) is None
    assert machine.waited(tmp_path / "absent") is None


@pytest.mark.parametrize(("text", "expected"), [("0.1 0.1 0.1 3/90 5\n", 3), ("0.1 0.1\n", 0), ("a b c d\n", 0), ("", 0)])
def test_running_is_read_from_the_system(
    tmp_path: Path, text: str, expected: int, counted: Callable[[Path], int] = machine.running
) -> None:
    file = tmp_path / "loadavg"
    assert counted(file) == 0
    file.write_text(text)
    assert counted(file) == expected


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_used_by_others_is_what_is_not_idle_and_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2})
    file, ticks, now = tmp_path / "stat", os.sysconf("SC_CLK_TCK"), [0.0]

    def write(busy: int) -> None:
        rows = [f"cpu{c} {busy if c != 1 else 99 * busy} 0 0 5 5 0 0 0 0 0" for c in range(3)]
        file.write_text("\n".join(["cpu 1 1 1", *rows, "intr 5", ""]))

    def sleep(seconds: float) -> None:
        now[0] += seconds
        write(3 * ticks)

    write(2 * ticks)
    own: Callable[[], tuple[float, ...]] = lambda: (now[0] / 4, now[0] / 4, 0.0, 0.0, 0.0)  # noqa: E731
    monkeypatch.setattr(machine.time, "sleep", sleep)
    monkeypatch.setattr(machine.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "times", own)
    assert machine.used_by_others(1.0, file) == pytest.approx(2 * 1.0 - 0.5)
    assert machine.used_by_others(1.0, tmp_path / "absent") is None


@pytest.mark.parametrize("op", ["MatMul", "Conv"])
def test_the_steps_on_one_thread_are_those_of_the_present_sizes(monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    """Machine code, and primitives of which only the batch is open."""
    draw = np.random.default_rng(0)
    shape, w = ([32, 256], (256, 256)) if op == "MatMul" else ([64, 14, 14], (64, 64, 3, 3))
    attributes = {} if op == "MatMul" else {"pads": [1, 1, 1, 1]}
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", *shape])
    y = helper.make_tensor_value_info("v4", TensorProto.FLOAT, None)
    weights = [numpy_helper.from_array((draw.standard_normal(w) / 16).astype(np.float32), "w")]
    nodes = [helper.make_node(op, [f"v{i}" if i else "x", "w"], [f"v{i + 1}"], **attributes) for i in range(4)]
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    plans, definitions = SingaBackend.prepare(model), SingaBackend.prepare(model, optimize=0)
    monkeypatch.setattr(contention, "present", True)
    monkeypatch.setattr(type(contention), "waits", lambda self, pace: True)
    monkeypatch.setattr(contention, "credit", -1e9)
    for n in (4, 9, 3, 40, 4, 12):
        image = draw.standard_normal((n, *shape)).astype(np.float32)
        for _ in range(2):
            np.testing.assert_allclose(plans.run([image])[0], definitions.run([image])[0], rtol=1e-3, atol=1e-3)
    assert segment_of(plans).pace is not None


@needs_openmp
def test_steps_on_arrays_of_the_caller_run_on_the_threads_of_their_size() -> None:
    """Primitives that read an input which is not copied are bound in each run; another batch may need other threads."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 8, 16, 16])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node("LRN", ["x"], ["y"], size=5)], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    switches = [f for f, _ in onednn.thread_switch(1)]

    def found(rep: SingaRep, n: int) -> list[Any]:
        rep.run([np.ones((n, 8, 16, 16), np.float32)])
        return [a for f, a in segment_of(rep).flat if f in switches]

    for sizes in ((200, 2, 200, 2), (2, 200, 2)):
        rep = SingaBackend.prepare(model, threads=2)
        for n in sizes:
            assert found(rep, n) == found(SingaBackend.prepare(model, threads=2), n)
