"""The arena of a plan: buffers that are live at one step do not overlap, and the memory is close to the lower bound."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import ModelProto, NodeProto, helper
from tests.helpers.growth_checks import lines
from tests.helpers.plan_checks import model_of

from singa_backend import SingaBackend
from singa_backend.kernels.values import ALIGNMENT, Buffer
from singa_backend.plans import arena

LIVES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40), st.integers(0, 5000)), max_size=60)


def buffers_of(lives: list[tuple[int, int, int]]) -> list[Buffer]:
    return [Buffer(nbytes, first=first, last=first + length) for first, length, nbytes in lives]


def is_valid(buffers: list[Buffer], total: int) -> None:
    """Check that no two buffers that are live at one step share a byte, and that the total holds them all."""
    for n, b in enumerate(buffers):
        assert b.offset >= 0 and b.offset % ALIGNMENT == 0 and b.offset + b.nbytes <= total
        for other in buffers[:n]:
            if b.first <= other.last and other.first <= b.last:
                assert b.offset + b.nbytes <= other.offset or other.offset + other.nbytes <= b.offset


@given(LIVES, st.sampled_from([0, 100, arena.WORK]))
@settings(max_examples=150, deadline=None)
def test_no_two_live_buffers_overlap(lives: list[tuple[int, int, int]], work: int) -> None:
    buffers = buffers_of(lives)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "WORK", work)  # 0: there is no search
        patch.setattr(arena, "MEAN", 0)
        total = arena.place(buffers)
    is_valid(buffers, total)
    assert arena.live_bytes(buffers) <= total <= sum(arena.rounded(b.nbytes) for b in buffers)


def test_no_buffers_need_no_memory() -> None:
    assert arena.place([]) == arena.live_bytes([]) == 0


class Net:
    """Convolutions of an image of 8 x 8, and what joins them; the size of a value is its number of channels times 256 bytes."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}
        self.channels = {"x": 3}

    def add(self, op: str, inputs: list[str], channels: int, **attributes: Any) -> str:
        made = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [made], **attributes))
        self.channels[made] = channels
        return made

    def conv(self, x: str, channels: int, size: int = 1) -> str:
        shape = (channels, self.channels[x], size, size)
        self.weights[f"w{len(self.nodes)}"] = np.full(shape, 1 / self.channels[x], np.float32)
        return self.add("Conv", [x, f"w{len(self.nodes)}"], channels, pads=[size // 2] * 4)

    def concat(self, *parts: str) -> str:
        return self.add("Concat", list(parts), sum(self.channels[p] for p in parts), axis=1)

    def model(self) -> ModelProto:
        x = np.zeros((1, 3, 8, 8), np.float32)
        return model_of(self.nodes, {"x": x}, [self.nodes[-1].output[0]], self.weights)


def detector(stem: tuple[int, int], widths: tuple[int, ...], depth: int) -> Net:
    """A net like YOLO: a wide stem, and blocks whose input is joined with the ends of a chain of convolutions."""
    net = Net()
    at = net.conv(net.conv("x", stem[0], 3), stem[1], 3)
    skips = []
    for width in widths:
        at = split = net.conv(net.conv(at, width), width)
        parts = [split]
        for _ in range(depth):
            split = net.conv(split, width // 2, 3)
            parts.append(split)
        at = net.conv(net.concat(parts[0], parts[-1]), width)
        skips.append(at)
    for skip in reversed(skips[:-1]):
        at = net.conv(net.concat(at, skip), net.channels[skip])
    return net


def dense(first: int, growth: int, blocks: tuple[int, ...]) -> Net:
    """A net like DenseNet: each layer reads all values of its block, and adds some channels."""
    net = Net()
    at = net.conv("x", first, 3)
    for layers in blocks:
        for _ in range(layers):
            normed = net.add("Softplus", [at], net.channels[at])
            new = net.conv(net.conv(normed, 4 * growth), growth, 3)
            at = net.concat(at, new)
        at = net.conv(at, net.channels[at] // 2)
    return net


NETS = [
    detector((12, 16), (16,), 1),
    detector((12, 16), (16, 8), 2),
    detector((16, 16), (16, 8), 3),
    detector((24, 32), (16, 24), 2),
    dense(16, 8, (3,)),
    dense(16, 8, (3, 4)),
    dense(32, 16, (4, 6, 4)),
]


@pytest.mark.parametrize("net", NETS)
def test_arenas_of_nets_are_close_to_the_lower_bound(net: Net) -> None:
    rep = SingaBackend.prepare(net.model())
    rep.run([np.ones((1, 3, 8, 8), np.float32)])
    assert rep._session._planner is not None
    (plan,) = rep._session._planner.plans.values()
    lower = sum(s.live_bytes for s in plan.segments)
    assert lower <= plan.arena_bytes <= 1.05 * lower


def short(n: int) -> list[Buffer]:
    draw = random.Random(n)
    return [Buffer(draw.randint(1, 100_000), first=i, last=i + draw.randint(1, 6)) for i in range(n)]


def long(n: int) -> list[Buffer]:
    draw = random.Random(n)
    return [Buffer(draw.randint(1, 10_000), first=i, last=i + draw.randint(1, n // 2)) for i in range(n)]


@pytest.mark.parametrize("make", [short, long])
def test_placing_takes_work_in_proportion_to_the_buffers(
    make: Callable[[int], list[Buffer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(n: int) -> int:
        buffers = make(n)
        found = lines(lambda: arena.place(buffers))
        is_valid(buffers[:200], max(b.offset + b.nbytes for b in buffers))
        return found

    assert work(2000) < 8 * arena.WORK
    monkeypatch.setattr(arena, "WORK", 0)
    for n in (300, 1200, 4800):
        assert work(n) < 10 * arena.MEAN * n


@pytest.mark.parametrize(("op", "inputs"), [("Neg", 1), ("Sqrt", 1), ("Relu", 1), ("Max", 2), ("Min", 2)])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (2,), (3, 4)])
def test_one_element_is_not_computed_in_place(op: str, inputs: int, shape: tuple[int, ...]) -> None:
    """NumPy is slow where an output of one element is an input too; larger values share a buffer."""
    values = [f"v{i}" for i in range(7)]
    nodes = [helper.make_node(op, [a, *["w"] * (inputs - 1)], [b]) for a, b in pairwise(values)]
    x = np.ones(shape, np.float32)
    rep = SingaBackend.prepare(model_of(nodes, {"v0": x}, [values[-1]], {"w": x} if inputs > 1 else {}), optimize=1)
    rep.run([x])
    assert rep._session._planner is not None
    (plan,) = rep._session._planner.plans.values()
    shared = [s.writes[0].buffer in [v.buffer for v in s.reads] for s in plan.first.steps]
    assert len(shared) == 6 and sum(shared) == (0 if x.size == 1 else 5)
