"""Compares the CPU time of recorded training steps: by plans, by the definitions, and PyTorch's eager mode.

    tox -e steps [-- --turns 5 --report reports]

The nets are small: Conv 3x3, ReLU, Conv 3x3, ReLU, Flatten, Linear(10) with c channels on images of c x c, softmax
cross-entropy and SGD of rate 0.001.  All lanes run in one process on one thread, in turns of 20 steps; a figure is the median of
`time.process_time` for a step.  The table also has, after 50 steps from the same parameters:

    error      the largest difference of a parameter from the definitions' in float64, over its largest value, by plans and by
               the definitions
    equal      whether two trainings by plans have equal bits
"""

from __future__ import annotations

import os

os.environ.update(SONNX_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from compare_peers import need

from singa import autograd, layer, model, opt, tensor
from singa_backend.doctor import processor
from singa_backend.io.files import write_text

NETS = {"c16 b8": (16, 8, "ReLU"), "c32 b16": (32, 16, "ReLU"), "c16 b8 smooth": (16, 8, "Sigmoid")}
"""Channels (and the size of images), the batch, and the activation."""

GOALS = {"c16 b8": 1.4, "c32 b16": 2.0}
STEPS, TURN = 50, 20
PLAN, DEFINITIONS, TORCH = "plan", "definitions", "PyTorch"


class Net(model.Model):  # type: ignore[misc]
    """The net of the table."""

    def __init__(self, channels: int, activation: str) -> None:
        super().__init__()
        self.conv1 = layer.Conv2d(channels, 3, padding=1)
        self.conv2 = layer.Conv2d(channels, 3, padding=1)
        self.act1, self.act2 = getattr(layer, activation)(), getattr(layer, activation)()
        self.flat, self.linear = layer.Flatten(), layer.Linear(10)
        self.optimizer = opt.SGD(lr=0.001)

    def forward(self, x: Any) -> Any:
        return self.linear(self.flat(self.act2(self.conv2(self.act1(self.conv1(x))))))

    def train_one_batch(self, x: Any, y: Any) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, y)
        self.optimizer(loss)
        return out, loss


def data(channels: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of images and classes."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((batch, channels, channels, channels)).astype(np.float32)
    return x, rng.integers(0, 10, batch).astype(np.int32)


def ours(channels: int, batch: int, activation: str, plan: bool, dtype: Any = np.float32) -> tuple[Net, Callable[[], None]]:
    """Return a net with seeded parameters and a function that trains it for one recorded step."""
    x, y = data(channels, batch)
    net, tx, ty = Net(channels, activation), tensor.from_numpy(x.astype(dtype)), tensor.from_numpy(y)
    net.compile([tx], is_train=True, use_graph=True)
    rng = np.random.default_rng(1)
    for t in net.get_params().values():
        t.copy_from_numpy((0.1 * rng.standard_normal(t.shape)).astype(dtype))
    start = {n: t.data.copy() for n, t in net.get_params().items()}

    def step() -> None:
        net(tx, ty)

    for _ in range(2):
        step()
    for (recorded,) in net._steps.values():
        if not plan:
            recorded._session.options = replace(recorded._session.options, level=0)
    for n, t in net.get_params().items():
        t.copy_from_numpy(start[n])
    return net, step


def theirs(channels: int, batch: int, activation: str) -> Callable[[], None]:
    """Return a function that trains the net for one step in PyTorch."""
    import torch

    torch.set_num_threads(1)
    x, y = data(channels, batch)
    act = getattr(torch.nn, activation)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(channels, channels, 3, padding=1), act(), torch.nn.Conv2d(channels, channels, 3, padding=1), act(),
        torch.nn.Flatten(), torch.nn.Linear(channels**3, 10),
    )  # fmt: skip
    optimizer, loss = torch.optim.SGD(net.parameters(), lr=0.001), torch.nn.CrossEntropyLoss()
    tx, ty = torch.from_numpy(x), torch.from_numpy(y.astype(np.int64))

    def step() -> None:
        optimizer.zero_grad()
        loss(net(tx), ty).backward()
        optimizer.step()

    return step


def measure(name: str, turns: int) -> dict[str, Any]:
    """Return the row of a net."""
    channels, batch, activation = NETS[name]
    lanes = {
        PLAN: ours(channels, batch, activation, True)[1],
        DEFINITIONS: ours(channels, batch, activation, False)[1],
        TORCH: theirs(channels, batch, activation),
    }
    times: dict[str, list[float]] = {lane: [] for lane in lanes}
    for step in lanes.values():
        for _ in range(5):
            step()
    for _ in range(turns):
        for lane, step in lanes.items():
            for _ in range(TURN):
                start = time.process_time()
                step()
                times[lane].append(time.process_time() - start)
    medians = {lane: statistics.median(found) for lane, found in times.items()}
    ends = [trained(channels, batch, activation, *how) for how in ((True,), (True,), (False,), (False, np.float64))]
    exact = ends[3]
    return {
        "net": name,
        "ms": {lane: round(1e3 * t, 3) for lane, t in medians.items()},
        "over PyTorch": {lane: round(medians[lane] / medians[TORCH], 2) for lane in (PLAN, DEFINITIONS)},
        "error": {PLAN: worst(ends[0], exact), DEFINITIONS: worst(ends[2], exact), "between": worst(ends[0], ends[2])},
        "equal": all(a.tobytes() == ends[1][n].tobytes() for n, a in ends[0].items()),
    }


def trained(channels: int, batch: int, activation: str, plan: bool, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Return the parameters after STEPS steps."""
    net, step = ours(channels, batch, activation, plan, dtype)
    for _ in range(STEPS):
        step()
    return {n: tensor.to_numpy(t).copy() for n, t in net.get_params().items()}


def worst(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> float:
    """Return the largest difference of a parameter over its largest value."""
    return max(float(np.abs(a[n] - b[n]).max() / np.abs(b[n]).max()) for n in a)


def page(document: dict[str, Any]) -> str:
    """Return the report in Markdown."""
    lines = [
        "# Recorded training steps next to PyTorch", "",
        "Written by `benchmarks/steps.py`; it is not checked for staleness, because times vary.", "",
        f"{document['machine']}; {', '.join(f'{k} {v}' for k, v in document['versions'].items())}; one thread; CPU time.", "",
        "| net | plan, ms | definitions, ms | PyTorch, ms | plan / PyTorch | definitions / PyTorch | error of the plan | "
        "of the definitions | equal bits |", "|---" * 9 + "|",
    ]  # fmt: skip
    for row in document["rows"]:
        ms, over, error = row["ms"], row["over PyTorch"], row["error"]
        lines.append(f"| {row['net']} | {ms[PLAN]:.3g} | {ms[DEFINITIONS]:.3g} | {ms[TORCH]:.3g} | {over[PLAN]:.2f} | "
                     f"{over[DEFINITIONS]:.2f} | {error[PLAN]:.1e} | {error[DEFINITIONS]:.1e} | "
                     f"{'yes' if row['equal'] else 'no'} |")  # fmt: skip
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--report", type=Path, metavar="DIR", help="write benchmark-steps.json and .md into this folder")
    options = parser.parse_args()
    rows = [measure(name, options.turns) for name in NETS]
    document = {"machine": f"{processor()}, {os.cpu_count()} cores",
                "versions": {"sonnx": need("singa", "sonnx"), "torch": need("torch")}, "rows": rows}  # fmt: skip
    if options.report:
        write_text(options.report / "benchmark-steps.json", json.dumps(document, indent=1) + "\n")
        write_text(options.report / "benchmark-steps.md", page(document))
    print(page(document))
    for row in rows:
        goal = GOALS.get(row["net"])
        if goal is not None and row["over PyTorch"][PLAN] > goal:
            print(f"missed: {row['net']}: {row['over PyTorch'][PLAN]:.2f}, the goal is {goal}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
