"""Work in blocks on an emulated CUDA device: their size follows from its memory, and results do not depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import fakecuda
import numpy as np
import pytest
from onnx import helper

from singa_backend import Limits, SingaBackend
from singa_backend.devices import namespaces
from singa_backend.limits import Budget, spend

pytestmark = pytest.mark.fakecuda
RNG = np.random.default_rng(0)
MIB = 1 << 20


@pytest.fixture
def xp() -> Any:
    pytest.importorskip("cupy")
    return namespaces.CupyNamespace()


class Memory:
    """Stands for cudaMemGetInfo, and counts its calls."""

    def __init__(self, free: int, total: int) -> None:
        self.free, self.total, self.calls = free, total, 0

    def __call__(self) -> tuple[int, int]:
        self.calls += 1
        return self.free, self.total


@pytest.fixture
def memory(xp: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    memory = Memory(7 << 30, 8 << 30)
    monkeypatch.setattr(xp.module.cuda.runtime, "memGetInfo", memory)
    yield memory


def test_small_work_does_not_ask_for_the_memory(xp: Any, memory: Memory) -> None:
    most = memory.total // 64 // 4
    xp.block_elements(5 * MIB, 4, 10)  # asks for all memory, once in a process
    memory.calls = 0
    assert xp.block_elements(most, 4, 10) == most
    assert memory.calls == 0
    assert xp.block_elements(most + 1, 4, 10) == most + 1
    assert memory.calls == 1


@pytest.mark.parametrize(
    ("free", "elements", "want"),
    [
        (7 << 30, 128 * MIB, 128 * MIB),  # 512 MiB, a sixteenth of 8 GiB
        (7 << 30, 128 * MIB + 1, 128 * MIB),
        (7 << 30, 300 * MIB, 128 * MIB),
        (2 << 30, 300 * MIB, 128 * MIB),  # what else is allocated makes no difference ...
        (1900 * MIB, 300 * MIB, 64 * MIB),  # ... while there is room
        (64 * MIB, 300 * MIB, 4 * MIB),
        (0, 300 * MIB, 1000),
    ],
)
def test_blocks_follow_the_free_memory(xp: Any, memory: Memory, free: int, elements: int, want: int) -> None:
    memory.free = free
    assert xp.block_elements(elements, 4, 1000) == want


def test_blocks_respect_the_limits(xp: Any, memory: Memory) -> None:
    with spend(Budget(Limits(tensor_bytes=40 * MIB))):
        assert xp.block_elements(100 * MIB, 4, 1000) == 8 * MIB
    with spend(Budget(Limits(live_bytes=20 * MIB))):
        assert xp.block_elements(100 * MIB, 4, 1000) == 4 * MIB


def run(op: str, inputs: list[np.ndarray], **attributes: Any) -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
    node = helper.make_node(op, [f"x{i}" for i in range(len(inputs))], ["y"], **attributes)
    with fakecuda.counting() as during:
        (there,) = SingaBackend.run_node(node, inputs, "CUDA")
    return SingaBackend.run_node(node, inputs)[0], there, during


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def test_a_convolution_is_one_product(xp: Any, memory: Memory) -> None:
    """The host makes four blocks of it."""
    here, there, during = run("Conv", [normal(8, 4, 64, 64), normal(4, 4, 4, 4)], pads=[1, 2, 2, 1])
    np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-4)
    assert during["products"] == 1


def test_a_transposed_convolution_is_one_product(xp: Any, memory: Memory) -> None:
    here, there, during = run("ConvTranspose", [normal(8, 4, 64, 64), normal(4, 4, 3, 3)])
    np.testing.assert_allclose(there, here, rtol=1e-4, atol=1e-4)
    assert during["products"] == 1


@pytest.mark.parametrize("op", ["Conv", "ConvTranspose"])
def test_blocks_do_not_change_results(xp: Any, memory: Memory, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    inputs = [normal(2, 4, 256, 128), normal(4, 4, 3, 3)]
    _, whole, during = run(op, inputs)
    assert during["products"] == 1
    memory.free, memory.calls = 8 * MIB, 0
    monkeypatch.setattr(namespaces, "_SMALL", MIB)
    monkeypatch.setattr(namespaces, "_PART", 1 << 40)
    here, parts, during = run(op, inputs)
    assert during["products"] > 2 and memory.calls == 1
    np.testing.assert_array_equal(parts, whole)
    np.testing.assert_allclose(parts, here, rtol=1e-4, atol=1e-4)
