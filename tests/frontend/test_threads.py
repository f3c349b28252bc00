"""Threads share no mode, no random stream and no numbering: what one does at the same time as others is what it does alone."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest

from singa import autograd, device, exporting, layer, opt, tape, tensor
from singa._core import provenance
from singa._core.tensor import Tensor
from singa.model import Model

T = TypeVar("T")
Meet = Callable[[], object]
F = np.float32


@pytest.fixture(autouse=True)
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[Meet], T]) -> list[T]:
    """The results of functions that run at once in other threads; each takes a function that waits for the others."""
    barrier = threading.Barrier(len(works), timeout=60)

    def run(work: Callable[[Meet], T]) -> T:
        try:
            return work(barrier.wait)
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(run, work) for work in works]
        errors = [e for f in futures if (e := f.exception()) is not None]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [f.result() for f in futures]


def alone(work: Callable[[Meet], T]) -> T:
    return at_once(work)[0]


class Net(Model):
    def __init__(self, width: int, optimizer: opt.Optimizer) -> None:
        super().__init__()
        self.first, self.norm = layer.Linear(width), layer.BatchNorm2d()
        self.drop, self.last = layer.Dropout(0.3), layer.Linear(3)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.norm(autograd.relu(self.first(x)))))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


def training(seed: int, width: int, make: Callable[[], opt.Optimizer], graph: bool) -> Callable[[Meet], dict[str, bytes]]:
    """A training that meets the others before every step, and evaluates now and then; it returns all bits."""

    def work(meet: Meet) -> dict[str, bytes]:
        device.get_default_device().SetRandSeed(seed)
        rng = np.random.default_rng(seed)
        net = Net(width, make())
        meet()
        net.compile([Tensor(data=np.zeros((4, 5), F))], is_train=True, use_graph=graph)
        found = {}
        for i in range(12):
            x, t = Tensor(data=rng.normal(size=(8, 5)).astype(F)), Tensor(data=rng.integers(0, 3, 8))
            meet()
            found[f"loss {i}"] = net(x, t).data.tobytes()
            if i % 4 == seed % 4:  # at another step than the other thread
                net.eval()
                found[f"output {i}"] = net(x).data.tobytes()
                net.train()
        assert not net.not_traceable
        assert any(net._steps.values()) == graph
        states = {**net.get_states(), **net.optimizer.get_states()}
        return {**found, **{name: state.data.tobytes() for name, state in states.items()}}

    return work


@pytest.mark.parametrize("graphs", [(False, False), (True, True), (False, True)])
def test_two_trainings_at_once_have_the_bits_of_each_alone(graphs: tuple[bool, bool]) -> None:
    first = training(1, 8, lambda: opt.SGD(lr=0.1, momentum=0.9), graphs[0])
    second = training(2, 6, lambda: opt.Adam(lr=0.01), graphs[1])
    want = [first(lambda: None), second(lambda: None)]
    assert [alone(first), alone(second)] == want
    assert at_once(first, second) == want


# --- modes


def test_a_thread_that_trains_and_one_that_does_not() -> None:
    def work(flag: bool) -> Callable[[Meet], list[bool]]:
        def run(meet: Meet) -> list[bool]:
            x = Tensor(data=np.ones(2, F), stores_grad=True)
            found = []
            for _ in range(10):
                autograd.training = flag
                meet()
                found += [autograd.training, not (x + x).is_dummy()]
                meet()
            return found

        return run

    assert at_once(work(True), work(False)) == [[True] * 20, [False] * 20]


def test_no_tape_is_of_its_thread() -> None:
    def without(meet: Meet) -> Any:
        with tape.no_tape():
            meet()
            meet()
            return autograd.training

    def with_tape(meet: Meet) -> bool:
        x = Tensor(data=np.ones(2, F), stores_grad=True)
        meet()
        y = x + x
        meet()
        return not y.is_dummy() and y._origin is not None

    autograd.training = True
    assert at_once(without, with_tape) == [False, True]
    assert autograd.training


def test_a_thread_starts_in_the_mode_that_was_set_last() -> None:
    for flag in (True, False, True):
        autograd.training = flag
        assert alone(lambda _: autograd.training) is flag
    Model().eval()
    assert not alone(lambda _: autograd.training)


def test_a_thread_that_was_started_keeps_its_mode() -> None:
    def setting(meet: Meet) -> Any:
        meet()
        autograd.training = True
        meet()
        return autograd.training

    def reading(meet: Meet) -> Any:
        meet()
        meet()
        return autograd.training  # for the first time in this thread

    assert at_once(setting, reading) == [True, False]
    assert alone(lambda _: autograd.training)
    assert not autograd.training


def test_an_export_and_a_call_change_no_mode_of_later_threads() -> None:
    net = Net(4, opt.SGD())
    x = Tensor(data=np.ones((2, 5), F))
    net.compile([x], is_train=True)
    seen = []
    forward = net.forward

    def watched(*xs: Tensor) -> Tensor:
        seen.append((autograd.training, alone(lambda _: autograd.training)))
        return forward(*xs)

    net.forward = watched  # type: ignore[assignment, method-assign]
    exporting.export(net, [x])
    net.training = False
    net(x)
    assert seen == [(False, True), (False, True)]


# --- random numbers


def drawing(seed: int) -> Callable[[Meet], list[Any]]:
    def work(meet: Meet) -> list[Any]:
        dev = device.get_default_device()
        dev.SetRandSeed(seed)
        found = []
        for _ in range(5):
            meet()
            found += tensor.random((3,)).data.tolist()
        dev.Reset()
        meet()
        return [*found, *tensor.random((3,)).data.tolist()]

    return work


def test_a_thread_that_sets_a_seed_has_its_own_stream() -> None:
    works = [drawing(1), drawing(1), drawing(7)]
    want = [work(lambda: None) for work in works]
    assert want[0] == want[1] != want[2]
    assert at_once(*works) == want


def test_threads_without_a_seed_share_the_stream_of_the_device() -> None:
    dev = device.get_default_device()
    dev.SetRandSeed(3)
    want = tensor.random((40,)).data.tolist(), tensor.random((2,)).data.tolist()
    dev.SetRandSeed(3)
    assert alone(lambda _: tensor.random((40,)).data.tolist()) == want[0]
    alone(drawing(9))
    assert tensor.random((2,)).data.tolist() == want[1]

    dev.SetRandSeed(3)
    drawn = at_once(*[lambda _: [tuple(tensor.random((4,)).data.tolist()) for _ in range(20)]] * 3)
    assert len({d for some in drawn for d in some}) == 60
    assert int(dev.random_state.data[1]) == 60


def test_recorded_steps_of_two_threads_draw_every_number_of_a_shared_stream_once() -> None:
    dev = device.get_default_device()

    def steps(meet: Meet) -> list[bytes]:
        net = Net(8, opt.SGD(lr=0.1))
        x, t = Tensor(data=np.ones((8, 5), F)), Tensor(data=np.arange(8) % 3)
        net.compile([x], is_train=True, use_graph=True)
        states = []
        for _ in range(40):
            meet()
            net(x, t)
            states.append(net.first.W.data.tobytes())
        assert any(net._steps.values())
        return states

    dev.SetRandSeed(3)
    for _ in range(2):
        steps(lambda: None)
    draws = int(dev.random_state.data[1])
    dev.SetRandSeed(3)
    first, second = at_once(steps, steps)
    assert int(dev.random_state.data[1]) == draws and first != second


@pytest.mark.usefixtures("by_definitions")
def test_a_recorded_step_draws_from_the_stream_of_the_thread_that_runs_it() -> None:
    def losses(graph: bool) -> list[Any]:
        device.get_default_device().SetRandSeed(4)
        net = Net(8, opt.SGD(lr=0.1))
        x, t = Tensor(data=np.ones((8, 5), F)), Tensor(data=np.arange(8) % 3)
        net.compile([x], is_train=True, use_graph=graph)

        def steps(_: Meet) -> list[Any]:
            return [net(x, t).data.tolist() for _ in range(3)]

        def own(meet: Meet) -> list[Any]:
            device.get_default_device().SetRandSeed(5)
            return steps(meet)

        return [steps(lambda: None), alone(own), alone(steps), steps(lambda: None)]

    assert losses(True) == losses(False)


# --- files


def exports(seed: int) -> Callable[[Meet], list[Any]]:
    """Files, names and what is alive: all that numbers and memories of a thread enter."""

    def work(meet: Meet) -> list[Any]:
        device.get_default_device().SetRandSeed(seed)
        net = Net(4 + seed, opt.SGD())
        net.scale = Tensor(data=np.full(3, seed, F))
        x = Tensor(data=np.ones((2, 5), F), requires_grad=False)
        net.compile([x], is_train=True)
        found: list[Any] = []
        for i in range(4):
            meet()
            found.append(exporting.export(net, [x]).SerializeToString(deterministic=True))
            factor = Tensor(data=np.full((2, 3), i, F), stores_grad=True)  # without a name
            meet()
            y = net.forward(x) * factor
            meet()
            found.append(exporting.to_onnx([x], y).SerializeToString(deterministic=True))
            found += [factor.name, y.creator.name, autograd.Operator.op_count]
        return found

    return work


def test_exports_at_once_are_byte_for_byte_those_alone() -> None:
    want = [alone(exports(1)), alone(exports(2))]
    assert at_once(exports(1), exports(2)) == want


def test_what_one_thread_reads_does_not_push_out_what_another_has_read() -> None:
    def keeps(meet: Meet) -> Any:
        x = Tensor(data=np.ones(provenance.SMALL, F), requires_grad=False)
        y = x + Tensor(data=np.ones(provenance.SMALL, F), requires_grad=False)  # nobody else holds it
        meet()
        meet()
        return exporting.to_onnx([x], y).SerializeToString()

    def reads(meet: Meet) -> bytes:
        meet()
        big = [Tensor(data=np.ones(provenance.RECENT // 8, F), requires_grad=False) for _ in range(4)]
        for x in big:
            x + x
        meet()
        return b""

    assert at_once(keeps, reads)[0]
