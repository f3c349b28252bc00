"""The lanes of benchmarks/compare_training.py, each in a process that runs this file, and the table of the nets.

    python compare_training_lanes.py LANE THREADS        # started by `compare_peers.Child`, which commands it over pipes

The lanes of sonnx do not import PyTorch, and the others do not import sonnx.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from compare_peers import LIMIT, Absent, connected, memory, need, serve, timed

Arrays = dict[str, np.ndarray]
Ends = dict[str, Arrays]
"""The gradients and the parameters after one step, by name."""

OURS, TAPE, EAGER, CHANNELS_LAST, COMPILE = "sonnx", "tape", "eager", "channels last", "compile"
LANES = (OURS, TAPE, EAGER, CHANNELS_LAST, COMPILE)
SONNX = (OURS, TAPE)
"""The lanes of sonnx: recorded steps, and steps on the tape."""

SGD, ADAMW = "SGD", "AdamW"
RATES = {SGD: 0.01, ADAMW: 0.001}
"""The optimizers, SGD with momentum, and their learning rates."""

MOMENTUM, BETA, DECAY = 0.9, 0.9, 0.01
FIRST, RECORDED = 5, 3
"""The number of losses that are compared, and of steps until ours run by a plan: on the tape, recorded, planned."""


@dataclass(frozen=True)
class Net:
    """A net with its batch.

    Attributes:
        input: the shape of its input.
        classes: the number of classes that it scores.
        targets: the shape of the class numbers.
        words: the number of tokens; 0 for an input of floats.
        kinks: whether it has activations or poolings whose derivative jumps.
        held_out: whether it was named before anything was tuned, and is only timed at the end.
    """

    input: tuple[int, ...]
    classes: int
    targets: tuple[int, ...]
    words: int = 0
    kinks: bool = False
    held_out: bool = False

    @property
    def has_images(self) -> bool:
        """Whether the input is images, which may be channels last."""
        return len(self.input) == 4


NETS: dict[str, Net] = {
    "mlp": Net((128, 784), 10, (128,), kinks=True),
    "cnn": Net((64, 1, 28, 28), 10, (64,), kinks=True),
    "resnet18": Net((8, 3, 112, 112), 1000, (8,), kinks=True),
    "mobilenetv2": Net((8, 3, 112, 112), 1000, (8,), kinks=True),
    "lstm": Net((32, 32), 20, (32 * 32,), words=1000),
    "bert": Net((8, 128), 10, (8,), words=1000),
    "gpt": Net((8, 128), 1000, (8 * 128,), words=1000),
    "unet": Net((4, 3, 64, 64), 2, (4, 64, 64), kinks=True),
    "resnext": Net((8, 3, 112, 112), 1000, (8,), kinks=True, held_out=True),
    "mobilenetv3": Net((8, 3, 112, 112), 1000, (8,), kinks=True, held_out=True),
    "gru": Net((32, 32), 20, (32 * 32,), words=1000, held_out=True),
    "vit": Net((16, 3, 32, 32), 1000, (16,), held_out=True),
    "convnext": Net((8, 3, 112, 112), 1000, (8,), held_out=True),
}
"""The rows of the comparison by name."""


def data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Draw the batch of a net: the inputs and the class numbers."""
    net, rng = NETS[name], np.random.default_rng(0)
    x = rng.integers(0, net.words, net.input) if net.words else rng.standard_normal(net.input).astype(np.float32)
    return x, rng.integers(0, net.classes, net.targets)


class Ours:
    """A model of an exported file, trained by whole calls.

    Args:
        name: the net.
        optimizer: the optimizer.
        path: the file.
        graph: whether steps are recorded; otherwise each runs on the tape.
    """

    def __init__(self, name: str, optimizer: str, path: str, graph: bool = True) -> None:
        from singa import autograd, opt, sonnx, tensor

        class Trained(sonnx.SONNXModel):  # type: ignore[misc]
            def train_one_batch(self, x: Any, t: Any) -> Any:
                (y,) = self.forward(x)
                loss = autograd.softmax_cross_entropy(y, t=t)
                self.optimizer(loss)
                return y, loss

        lr, self.name = RATES[optimizer], optimizer
        self.net = Trained(path)
        self.optimizer: Any = opt.SGD(lr, MOMENTUM) if optimizer == SGD else opt.AdamW(lr, BETA, weight_decay=DECAY)
        self.net.set_optimizer(self.optimizer)
        self.net.train()
        self.net.graph(graph)
        self.batch = tuple(map(tensor.from_numpy, data(name)))
        self.start = {n: t.data.copy() for n, t in self.net.get_params().items()}

    def step(self) -> Any:
        return self.net(*self.batch)[1]

    def loss(self) -> float:
        """Train for one step; return the loss."""
        return float(self.step().data.item())

    def ends(self) -> Ends:
        """Return the ends of one step by the plan from the first parameters and states of zero."""
        for n, t in self.net.get_params().items():
            t.copy_from_numpy(self.start[n])
        self.optimizer.set_states({n: np.zeros_like(t.data) for n, t in self.optimizer.get_states().items()})
        self.step()
        moments, scale = (self.optimizer.moments, 1.0) if self.name == SGD else (self.optimizer.m, 1 - BETA)
        return {
            "gradients": {n: t.data / np.float32(scale) for n, t in moments.items()},
            "parameters": {n: t.data.copy() for n, t in self.net.get_params().items() if n in moments},
        }

    def work(self) -> dict[str, Any]:
        """Return what computes a recorded step: see `work_of`."""
        return work_of(self.net.profile_step(*self.batch, runs=3))


def work_of(profile: Any) -> dict[str, Any]:
    """Return what computes a step.

    Args:
        profile: of `Model.profile_step`.

    Returns:
        "by" and "reason" of the profile; "definitions": the share of the time in definitions, and of the largest by operator
        ("slowest"); "parts": the share of forward, backward, update and reorders; "gradients": the number of calls of gradient
        rules; "joined": of those that kernels compute; "refused": those that kernels refuse, by operator and reason; "written":
        the others, by operator.
    """
    left: Counter[str] = Counter()
    for step in profile.steps:
        if step.kernel == "definition":
            left[" ".join(step.operators)] += step.share
    calls = profile.gradient_calls
    refused = Counter((g.operator, g.reason) for g in calls if g.by == "refused")
    written = Counter(g.operator for g in calls if g.by == "rule")
    return {
        "by": profile.by, "reason": profile.reason, "definitions": sum(left.values()), "slowest": dict(left.most_common(5)),
        "parts": {p.part: p.share for p in profile.parts},
        "gradients": len(calls), "joined": sum(g.by == "kernel" for g in calls),
        "refused": [[n, reason, count] for (n, reason), count in refused.most_common()], "written": dict(written.most_common()),
    }  # fmt: skip


class Theirs:
    """A net of PyTorch.

    Args:
        name: the net.
        optimizer: the optimizer.
        form: "eager", "channels last" or "compile".
        smooth: whether its kinks are replaced.
        wide: whether it computes in float64.
    """

    def __init__(self, name: str, optimizer: str, form: str, smooth: bool = False, wide: bool = False) -> None:
        import compare_training_nets
        import torch

        net = compare_training_nets.build(name, smooth)
        x, t = map(torch.from_numpy, data(name))
        if wide:
            net, x = net.double(), x.double() if x.is_floating_point() else x
        if form == CHANNELS_LAST:
            net, x = net.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        self.parameters, self.net, self.batch = (
            dict(net.named_parameters()),
            torch.compile(net) if form == COMPILE else net,
            (x, t),
        )
        self.cross_entropy = torch.nn.functional.cross_entropy
        lr, given = RATES[optimizer], self.parameters.values()
        self.optimizer: Any = (
            torch.optim.SGD(given, lr, momentum=MOMENTUM, fused=True) if optimizer == SGD else
            torch.optim.AdamW(given, lr, weight_decay=DECAY, fused=True)
        )  # fmt: skip

    def step(self) -> Any:
        x, t = self.batch
        self.optimizer.zero_grad()
        loss = self.cross_entropy(self.net(x), t)
        loss.backward()
        self.optimizer.step()
        return loss

    def loss(self) -> float:
        """Train for one step; return the loss."""
        return float(self.step().detach())

    def ends(self) -> Ends:
        """Return the ends of one step, which must be the first."""
        self.step()
        used = {n: p for n, p in self.parameters.items() if p.grad is not None}
        return {
            "gradients": {n: p.grad.contiguous().numpy() for n, p in used.items()},
            "parameters": {n: p.detach().contiguous().numpy() for n, p in used.items()},
        }


# --- in the child


def _renew_peak() -> bool:
    """Let the peak of this process's memory begin at its present memory; return whether the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _first_steps(lane: Ours | Theirs, loaded: int) -> dict[str, Any]:
    """Train for the first steps, and one that is measured; return the losses, and the peaks of memory above the loaded model."""
    can, losses, peaks = _renew_peak(), [], {}
    for i in range(FIRST):
        losses.append(lane.loss())
        if i == RECORDED - 1:
            peaks["first"] = memory("VmHWM") - loaded
    can = _renew_peak() and can
    lane.step()
    peaks["step"] = memory("VmHWM") - loaded
    return {"losses": losses, "memory": peaks if can else {}}


def _serve(form: str, threads: int, receive: Connection, send: Connection) -> None:
    lane: Ours | Theirs | None = None
    clock = time.process_time if threads == 1 else time.perf_counter

    def start() -> str:
        if form in SONNX:
            return need("singa", "sonnx")
        version = need("torch")
        if form == COMPILE and not any(map(shutil.which, ("g++", "clang++", "c++"))):
            raise Absent("torch.compile needs a C++ compiler")
        import torch

        if threads:
            torch.set_num_threads(threads)
        return version

    def export(name: str, path: str, smooth: bool) -> None:
        import compare_training_nets

        compare_training_nets.export(name, Path(path), smooth)

    def load(name: str, optimizer: str, path: str) -> dict[str, Any]:
        nonlocal lane
        lane = None
        lane = Ours(name, optimizer, path, form == OURS) if form in SONNX else Theirs(name, optimizer, form)
        return _first_steps(lane, memory("VmRSS"))

    def turn(untimed: int, seconds: float, most: int = LIMIT, wall: bool = False) -> list[float]:
        assert lane is not None
        return timed(lane.step, untimed, seconds, most, time.perf_counter if wall else clock)

    def work() -> dict[str, Any]:
        assert isinstance(lane, Ours)
        return lane.work()

    def ends(name: str, optimizer: str, path: str, smooth: bool, wide: bool = False) -> Ends:
        if form not in SONNX:
            return Theirs(name, optimizer, form, smooth, wide).ends()
        ours = Ours(name, optimizer, path, form == OURS)
        for _ in range(RECORDED):
            ours.step()
        return ours.ends()

    serve({f.__name__: f for f in (start, export, load, turn, work, ends)}, receive, send)


if __name__ == "__main__":
    connected(_serve)
