"""What a batch of another size costs a recorded training step.

    python -m benchmarks.batches

Each size is trained on several times.  The cost is the CPU time of the first of these steps above that of the others, in
milliseconds and in steps.  The step of the first size, in which the graph is recorded, is not among them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from singa import layer, model, opt, tensor
from singa_backend.doctor import processor

SIZES = (63, 40, 17, 33, 50, 128, 20, 96)
TIMES = 6


class Net(model.Model):
    """Layers in a row, with a cross-entropy."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        for i, one in enumerate(layers):
            setattr(self, f"layer{i}", one)
        self.count, self.loss = len(layers), layer.SoftMaxCrossEntropy()
        self.optimizer = opt.SGD(lr=0.01, momentum=0.9)

    def forward(self, x: Any) -> Any:
        for i in range(self.count):
            x = getattr(self, f"layer{i}")(x)
        return x

    def train_one_batch(self, x: Any, t: Any) -> Any:
        y = self.forward(x)
        loss = self.loss(y, t)
        self.optimizer(loss)
        return y, loss


def perceptron() -> Net:
    """Three products."""
    return Net([layer.Linear(512), layer.ReLU(), layer.Linear(512), layer.ReLU(), layer.Linear(10)])


def convolutions() -> Net:
    """Two convolutions, of which one is normalized."""
    first = [layer.Conv2d(32, 3, padding=1), layer.BatchNorm2d(), layer.ReLU(), layer.MaxPool2d(2, 2)]
    return Net([*first, layer.Conv2d(64, 3, padding=1), layer.ReLU(), layer.MaxPool2d(2, 2), layer.Flatten(), layer.Linear(10)])


NETS: dict[str, tuple[Callable[[], Net], tuple[int, ...]]] = {
    "perceptron": (perceptron, (784,)),
    "convolutions": (convolutions, (3, 32, 32)),
}


def costs(make: Callable[[], Net], shape: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return for each size the milliseconds of a step, and what the first one takes more."""
    net, draws = make(), np.random.default_rng(0)

    def step(n: int) -> float:
        x = tensor.from_numpy(draws.standard_normal((n, *shape)).astype(np.float32))
        t = tensor.from_numpy(draws.integers(0, 10, n).astype(np.int32))
        start = time.thread_time()
        net(x, t)
        return (time.thread_time() - start) * 1e3

    net.compile([tensor.from_numpy(np.zeros((64, *shape), np.float32))], is_train=True, use_graph=True)
    for _ in range(10):
        step(64)
    found = []
    for n in SIZES:
        first, *others = (step(n) for _ in range(TIMES))
        usual = statistics.median(others)
        found.append((usual, first - usual))
    return found


def main() -> None:
    """Print a table."""
    print(f"{processor()}, medians of {len(SIZES)} sizes\n\n| net | a step, ms | a new size, ms | steps |\n|---|---:|---:|---:|")
    for name, (make, shape) in NETS.items():
        pairs = costs(make, shape)
        step, cost = (statistics.median(values) for values in zip(*pairs, strict=True))
        print(f"| {name} | {step:.2f} | {cost:.2f} | {statistics.median(c / s for s, c in pairs):.2f} |")


if __name__ == "__main__":
    main()
