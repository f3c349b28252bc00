"""Machine code that is not there in a first run: other kernels compute it, a thread makes it, and plans are traced again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.helpers.recorded_steps import planner_of, steps_of

from singa import autograd, layer, opt, sonnx
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend.elementwise import compile as machine
from singa_backend.elementwise.compile import available
from singa_backend.elementwise.later import QUEUE, Queue
from singa_backend.kernels import frames, onednn
from singa_backend.plans.plan import Plan

pytestmark = [
    pytest.mark.skipif(bool(available()), reason=available()),
    pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN"),
]

F = np.float32


def finish(queue: Queue = QUEUE) -> None:
    """Wait until all is made."""
    while queue._waiting:
        queue.start()
        if (thread := queue._thread) is not None:
            thread.join()


@pytest.fixture(autouse=True)
def nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No code is in memory or in the cache, and a first run does not wait for it."""
    monkeypatch.setenv(machine.VARIABLE, "")
    monkeypatch.setattr(machine, "folder", lambda: tmp_path / "code")
    monkeypatch.setattr(machine, "_LIVE", weakref.WeakValueDictionary())
    monkeypatch.setattr(frames, "_KNOWN", {})
    monkeypatch.setattr(frames, "_ASKED", Counter())
    yield
    finish()


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that were traced."""
    made: list[Plan] = []
    original = Plan.trace

    def noted(self: Plan, *args: Any) -> Any:
        made.append(self)
        return original(self, *args)

    monkeypatch.setattr(Plan, "trace", noted)
    return made


def model(size: Any = 20000, names: Sequence[str] = ("Sigmoid", "Tanh", "Exp")) -> Any:
    """The sum of x and functions of each other."""
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [size]) for n in "xy"]
    nodes = [helper.make_node(n, [f"v{i}" if i else "x"], [f"v{i + 1}"]) for i, n in enumerate(names)]
    nodes.append(helper.make_node("Add", [f"v{len(names)}", "x"], ["y"]))
    return helper.make_model(helper.make_graph(nodes, "g", info[:1], info[1:]), opset_imports=[helper.make_opsetid("", 17)])


def want(x: np.ndarray) -> np.ndarray:
    return np.exp(np.tanh(1 / (1 + np.exp(-x)))) + x


def is_machine(plan: Plan) -> bool:
    return any(s.kernel.startswith("machine.") for g in plan.segments for s in g.steps)


def test_a_plan_is_traced_again_when_its_code_is_made(traces: list[Plan]) -> None:
    x = np.linspace(-3, 3, 20000, dtype=F)
    prepared = sonnx.prepare(model())
    results = [prepared.run([x])[0]]
    assert not is_machine(traces[0])
    assert traces[0].facts.wants
    finish()
    assert len(list(machine.folder().iterdir())) == 1  # of the whole expression, and none of its parts
    results += [prepared.run([x])[0] for _ in range(3)]
    assert len(traces) == 2
    assert is_machine(traces[1])
    assert not traces[1].facts.wants
    for y in results:
        np.testing.assert_allclose(y, want(x), rtol=1e-5, atol=1e-6)
    assert results[1].tobytes() == results[2].tobytes() == results[3].tobytes()


def test_runs_before_the_code_is_made_use_the_first_plan(traces: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.linspace(-3, 3, 20000, dtype=F)
    with monkeypatch.context() as patch:
        patch.setattr(QUEUE, "start", lambda: None)
        prepared = sonnx.prepare(model())
        assert len({prepared.run([x])[0].tobytes() for _ in range(4)}) == 1
    assert len(traces) == 1


@pytest.mark.parametrize("how", ["wait", "deterministic", "kept"])
def test_code_of_the_first_run(traces: list[Plan], monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    x = np.linspace(-3, 3, 20000, dtype=F)
    if how == "kept":
        sonnx.prepare(model()).run([x])
        finish()
        traces.clear()
    elif how == "wait":
        monkeypatch.setenv(machine.VARIABLE, "wait")
    prepared = sonnx.prepare(model(), deterministic=how == "deterministic")
    assert len({prepared.run([x])[0].tobytes() for _ in range(3)}) == 1
    assert len(traces) == 1
    assert is_machine(traces[0])


def test_a_deterministic_plan_does_not_depend_on_what_is_kept(traces: list[Plan]) -> None:
    x = np.linspace(-3, 3, 200, dtype=F)  # less work than is worth it otherwise
    sonnx.prepare(model(200)).run([x])
    first = sonnx.prepare(model(200), deterministic=True).run([x])[0]
    assert [is_machine(t) for t in traces] == [False, True]
    prepared = sonnx.prepare(model())
    prepared.run([np.linspace(-3, 3, 20000, dtype=F)])
    finish()
    assert sonnx.prepare(model(200), deterministic=True).run([x])[0].tobytes() == first.tobytes()
    sonnx.prepare(model(200)).run([x])
    assert is_machine(traces[-1])


def test_many_small_steps_are_worth_it_together(traces: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "TOGETHER", frames.WORTH)
    x = np.linspace(-3, 3, 300, dtype=F)
    for _ in range(3):
        sonnx.prepare(model(300)).run([x])
        finish()
    assert [bool(t.facts.wants) for t in traces] == [False, True, False]
    assert [is_machine(t) for t in traces] == [False, False, True]


def test_an_open_plan_of_a_plan_without_code(traces: list[Plan]) -> None:
    prepared = sonnx.prepare(model("n"))
    for repeat in range(3):
        for n in (20000, 21000, 22000, 23000, 20000):
            x = np.linspace(-3, 3, n, dtype=F)
            np.testing.assert_allclose(prepared.run([x])[0], want(x), rtol=1e-5, atol=1e-6)
        if repeat == 0:
            finish()
    assert is_machine(traces[-1])


class Net(Model):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.optimizer = layer.Linear(96), layer.Linear(96), opt.AdamW(0.01)

    def forward(self, x: Tensor) -> Any:
        return self.two(autograd.tanh(self.one(x)))

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        loss = autograd.mse_loss(self.forward(x), t)
        self.optimizer(loss)
        return loss


def trained(steps: int, after: int) -> tuple[list[np.ndarray], Plan]:
    """The parameters after steps, and the plan; the code is made after some of them."""
    batches = [
        [Tensor(data=np.random.default_rng((i, k)).standard_normal((32, 96)).astype(F)) for k in (0, 1)] for i in range(steps)
    ]
    net = Net()
    net.compile([batches[0][0]], is_train=True, use_graph=True)
    rng = np.random.default_rng(5)
    net.set_params({n: (rng.standard_normal(p.shape) * 0.1).astype(F) for n, p in net.get_params().items()})
    for i, b in enumerate(batches):
        net(*b)
        if i >= after:
            finish()
    (plan,) = planner_of(steps_of(net)[0]).plans.values()
    return [np.array(p.data) for p in net.get_params().values()], plan


def test_training_goes_on_with_code(traces: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that replaces its inputs is traced again in the middle of a training."""
    late, plan = trained(8, 4)
    assert not plan.facts.wants
    first, second = (t for t in traces if any(s.kernel.endswith(".update") for s in t.first.steps))
    assert second is plan
    assert not is_machine(first)
    monkeypatch.setenv(machine.VARIABLE, "wait")
    monkeypatch.setattr(frames, "_KNOWN", {})
    _, waited = trained(8, 4)
    for one in (plan, waited):
        assert {"machine.update", "machine.tanh gradient"} < {s.kernel for s in one.first.steps}
    monkeypatch.setenv(machine.VARIABLE, "off")
    without, plan = trained(8, 4)
    assert not is_machine(plan)
    for x, y in zip(late, without, strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6)


def test_what_fails_is_not_asked_for_again(traces: list[Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: machine.Machine, text: str) -> bytes:
        raise machine.NotCompiled("of the test")

    monkeypatch.setattr(machine.Machine, "object", refused)
    x = np.linspace(-3, 3, 20000, dtype=F)
    prepared = sonnx.prepare(model())
    for _ in range(4):
        prepared.run([x])
        finish()
    assert not is_machine(traces[-1])
    assert not traces[-1].facts.wants
    assert "of the test" in frames._KNOWN.values()


# --- the queue


def test_the_thread_exists_while_something_waits() -> None:
    queue, made, go = Queue(), list[str](), threading.Event()

    def slow() -> None:
        go.wait(60)
        made.append("a")

    queue.add("a", slow)
    queue.add("b", lambda: made.append("b"))
    queue.add("a", lambda: made.append("again"))
    assert queue._thread is None
    assert not queue.is_done(["a"])
    assert queue._thread is not None
    assert not queue._thread.daemon
    go.set()
    finish(queue)
    assert made == ["a", "b"]
    assert queue.is_done(["a", "b", "c"])
    assert queue._thread is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_does_not_stop_the_queue() -> None:
    queue, made = Queue(), list[str]()

    def fail() -> None:
        raise MemoryError

    queue.add("a", fail)
    queue.add("b", lambda: made.append("b"))
    finish(queue)
    assert made == ["b"]
    assert queue.is_done(["a", "b"])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_child_makes_what_its_parent_had_not() -> None:
    queue, made, go = Queue(), list[str](), threading.Event()
    parent = os.getpid()

    def slow() -> None:
        if os.getpid() == parent:
            go.wait(60)
        made.append("a")

    queue.add("a", slow)
    queue.start()
    child = os.fork()
    if child == 0:
        alone = queue._thread is None
        finish(queue)
        os._exit(0 if alone and made == ["a"] else 1)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        go.set()
        finish(queue)
    assert made == ["a"]


ENDS = """
import threading
from singa_backend.elementwise.later import QUEUE

def slow():
    begun.set()
    threading.main_thread().join()
    print("a")

begun = threading.Event()
QUEUE.add("a", slow)
QUEUE.add("b", lambda: print("b"))
QUEUE.start()
begun.wait()
"""


def test_the_thread_ends_after_the_main_thread() -> None:
    """It ends what it has begun, and begins nothing else."""
    found = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60, check=True)
    assert (found.stdout, found.stderr) == ("a\n", "")
