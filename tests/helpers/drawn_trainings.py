"""Draws small nets and trains them by recorded steps, in this process or in a child at another level of instructions.

A net is a list of parts that any class with the methods of `Layers` computes: tests/torch/test_levels.py has PyTorch's.

    python drawn_trainings.py FOLDER SEED...      # a child: writes the states of two trainings of each net to FOLDER
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tests.helpers.at_level import higher

from singa import autograd, opt
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend.kernels import onednn
from singa_backend.kernels.options import VARIABLE

Arrays = dict[str, np.ndarray]

STEPS = 6
EPSILON = 1e-5
SMOOTH = ("Sigmoid", "Tanh", "Softplus", "Gelu", "silu", "Elu")
KINKS = ("Relu", "LeakyRelu", "HardSwish")
MOMENTUM, DECAY, MOVING = 0.9, 0.01, 0.1
"""Of SGD, of both optimizers, and the weight of a new batch in running statistics."""

ADAM_EPSILON = 1e-2
"""So large that a gradient of rounding errors does not move a parameter as far as another one."""


@dataclass(frozen=True)
class Part:
    """A layer, or the sum of branches.

    Attributes:
        kind: a method of `Layers`; "sum" with branches.
        weights: the names of its parameters and statistics.
        settings: further arguments.
        branches: the parts of each branch; none is the identity.
    """

    kind: str
    weights: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    branches: tuple[tuple[Part, ...], ...] = ()


@dataclass
class Drawn:
    """A net with its first weights and its batches.

    Attributes:
        name: the seed and the family.
        parts: its layers.
        weights: the parameters.
        statistics: the running means and variances.
        batches: inputs and targets of each step; classes, or values of the output's shape.
        adam: whether AdamW trains it, instead of SGD with momentum.
        kinks: whether it has activations or poolings whose derivative jumps.
    """

    name: str
    parts: tuple[Part, ...]
    weights: Arrays
    statistics: Arrays
    batches: list[tuple[np.ndarray, np.ndarray]]
    adam: bool
    kinks: bool

    @property
    def classifies(self) -> bool:
        return self.batches[0][1].dtype.kind == "i"

    @property
    def rate(self) -> float:
        return 0.01 if self.adam else 0.05


def compute(layers: Any, parts: Sequence[Part], x: Any, weights: Mapping[str, Any]) -> Any:
    """The output of parts, computed by a class with the methods of `Layers`."""
    for part in parts:
        if part.branches:
            x, *others = [compute(layers, branch, x, weights) for branch in part.branches]
            for other in others:
                x = layers.add(x, other)
        else:
            x = getattr(layers, part.kind)(x, *(weights[n] for n in part.weights), **part.settings)
    return x


# --- draws ------------------------------------------------------------------------------------------------------------


class Drawer:
    """Draws parts, keeps the shape of the value so far, without its batch, and the weights."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, ...]) -> None:
        self.rng, self.input, self.shape = rng, shape, shape
        self.weights: Arrays = {}
        self.statistics: Arrays = {}
        self.kinks = False

    def between(self, low: int, high: int) -> int:
        """An integer, the bounds included."""
        return int(self.rng.integers(low, high + 1))

    def pick(self, *choices: Any) -> Any:
        return choices[self.between(0, len(choices) - 1)]

    def often(self) -> bool:
        return self.between(0, 2) > 0

    def weight(self, *shape: int, fan: int = 0) -> str:
        """A parameter; that of a product with `fan` summands, or a shift."""
        name = f"p{len(self.weights)}"
        self.weights[name] = (self.rng.standard_normal(shape) * (fan**-0.5 if fan else 0.1)).astype(np.float32)
        return name

    def scale(self, *shape: int) -> tuple[str, str]:
        """The factors near 1 and the shifts of a normalization."""
        name, shift = self.weight(*shape), self.weight(*shape)
        self.weights[name] += 1
        return name, shift

    def statistic(self, size: int, value: float) -> str:
        name = f"s{len(self.statistics)}"
        self.statistics[name] = np.full(size, value, np.float32)
        return name

    def conv(self, channels: int, kernel: int, stride: int = 1, groups: int = 1, dilation: int = 1) -> Part:
        inputs, *sizes = self.shape
        reach = dilation * (kernel - 1)
        padding = reach // 2 if self.often() or reach >= min(sizes) else 0
        weights = (self.weight(channels, inputs // groups, kernel, kernel, fan=inputs // groups * kernel * kernel),)
        self.shape = (channels, *((n + 2 * padding - reach - 1) // stride + 1 for n in sizes))
        settings = {"stride": stride, "padding": padding, "groups": groups, "dilation": dilation}
        return Part("conv", weights + ((self.weight(channels),) if self.often() else ()), settings)

    def transposed(self, channels: int, kernel: int, stride: int) -> Part:
        inputs, *sizes = self.shape
        padding, more = self.between(0, kernel // 2), self.between(0, stride - 1)
        weights = self.weight(inputs, channels, kernel, kernel, fan=inputs * kernel * kernel), self.weight(channels)
        self.shape = (channels, *((n - 1) * stride - 2 * padding + kernel + more for n in sizes))
        return Part("transposed", weights, {"stride": stride, "padding": padding, "more": more})

    def batch_norm(self) -> Part:
        channels = self.shape[0]
        return Part("batch_norm", (*self.scale(channels), self.statistic(channels, 0), self.statistic(channels, 1)))

    def norm(self) -> Part:
        channels, *sizes = self.shape
        kind = self.pick("batch", "instance", "group", "layer")
        if kind == "batch" or (kind == "instance" and np.prod(sizes) < 4):
            return self.batch_norm()
        if kind == "instance":
            return Part("instance_norm", self.scale(channels))
        if kind == "group":
            return Part("group_norm", self.scale(channels), {"groups": self.divisor(channels)})
        return Part("layer_norm", self.scale(*self.shape), {"axes": len(self.shape)})

    def divisor(self, number: int) -> int:
        return int(self.pick(*(n for n in range(1, number + 1) if number % n == 0)))

    def activation(self, *choices: str) -> Part:
        name = self.pick(*(choices or SMOOTH + KINKS))
        self.kinks |= name in KINKS
        return Part("activation", (), {"name": name})

    def pool(self) -> Part:
        channels, *sizes = self.shape
        kernel, kind = min(self.between(2, 3), *sizes), self.pick("max_pool", "average_pool")
        stride, padding = self.between(1, 3), self.between(0, 1) * (kernel // 2)
        self.kinks |= kind == "max_pool"
        self.shape = (channels, *((n + 2 * padding - kernel) // stride + 1 for n in sizes))
        return Part(kind, (), {"kernel": kernel, "stride": stride, "padding": padding})

    def linear(self, outputs: int) -> Part:
        *rows, inputs = self.shape
        self.shape = (*rows, outputs)
        return Part("linear", (self.weight(inputs, outputs, fan=inputs), self.weight(outputs)))

    def head(self, classes: int) -> list[Part]:
        """The scores of classes from an image: of its mean, or of all its values."""
        parts = [Part("mean_of_image")] if self.often() else []
        self.shape = (self.shape[0] if parts else int(np.prod(self.shape)),)
        return [*parts, Part("flatten"), self.linear(classes)]

    def block(self, channels: int, stride: int) -> Part:
        """A residual block, with a bottleneck or without."""
        start = self.shape
        if self.often():
            first = self.padded(channels, 3, stride)
            body = (*first, self.activation(), *self.padded(channels, 3, 1))
        else:
            narrow = self.between(1, 8)
            body = (*self.padded(narrow, 1, stride), self.activation(), *self.padded(channels, 3, 1))
        if start == self.shape:
            return Part("sum", (), {}, (body, ()))
        self.shape = start
        return Part("sum", (), {}, (body, self.padded(channels, 1, stride)))

    def padded(self, channels: int, kernel: int, stride: int) -> tuple[Part, Part]:
        """A convolution that keeps the sizes or divides them by its stride, and its normalization."""
        inputs, *sizes = self.shape
        weight = self.weight(channels, inputs, kernel, kernel, fan=inputs * kernel * kernel)
        self.shape = (channels, *((n - 1) // stride + 1 for n in sizes))
        settings = {"stride": stride, "padding": kernel // 2, "groups": 1, "dilation": 1}
        return Part("conv", (weight,), settings), self.batch_norm()


def _residual(d: Drawer) -> list[Part]:
    parts: list[Part] = [*d.padded(d.between(1, 12), 3, 1), d.activation()]
    for _ in range(d.between(1, 3)):
        parts += [d.block(d.between(1, 20), d.between(1, 3)), d.activation()]
    return [*parts, *d.head(5)]


def _six_and_ten(d: Drawer) -> list[Part]:
    """The net of channels 6 and 10 whose second block halves the image: oneDNN's jit_1x1 by weights wrote outside its memory."""
    parts = [*d.padded(6, 3, 1), d.activation("Relu"), d.block(6, 1), d.activation("Relu"), d.block(10, 2), d.activation("Relu")]
    return [*parts, Part("mean_of_image"), Part("flatten"), _classes(d, 10)]


def _classes(d: Drawer, inputs: int) -> Part:
    d.shape = (inputs,)
    return d.linear(5)


def _plain(d: Drawer) -> list[Part]:
    parts = []
    for _ in range(d.between(1, 3)):
        kernel = d.pick(1, 3) if min(d.shape[1:]) > 4 else 1
        parts += [d.conv(d.between(1, 20), kernel, d.between(1, 3), dilation=d.pick(1, 1, 2)), d.activation()]
        if min(d.shape[1:]) > 3 and d.often():
            parts.append(d.pool())
    return [*parts, *d.head(4)]


def _normalized(d: Drawer) -> list[Part]:
    parts = []
    for _ in range(d.between(2, 3)):
        parts += [
            d.conv(d.between(2, 20), d.pick(1, 3) if min(d.shape[1:]) > 4 else 1, d.pick(1, 1, 2)),
            d.norm(),
            d.activation(),
        ]
    return [*parts, *d.head(4)]


def _grouped(d: Drawer) -> list[Part]:
    """Separable and grouped convolutions."""
    parts = []
    for _ in range(d.between(1, 2)):
        wide = d.between(2, 20)
        parts += [d.conv(wide, 1, d.pick(1, 1, 2)), d.batch_norm(), d.activation()]
        groups, stride = d.pick(wide, d.divisor(wide)), d.pick(1, 2)
        parts += [
            d.conv(wide, 3 if min(d.shape[1:]) > 3 else 1, stride, groups),
            d.norm(),
            d.activation(),
            d.conv(d.between(1, 12), 1),
        ]
    return [*parts, *d.head(6)]


def _transposing(d: Drawer) -> list[Part]:
    """An encoder and a decoder, whose output is an image."""
    parts = [d.conv(d.between(2, 12), 3, d.between(1, 3)), d.norm(), d.activation()]
    for _ in range(d.between(1, 2)):
        parts += [d.transposed(d.between(1, 12), d.pick(1, 3, 4), d.between(1, 3)), d.activation()]
    return [*parts, d.conv(d.between(1, 3), d.pick(1, 3))]


def _rows(d: Drawer) -> list[Part]:
    parts = []
    for _ in range(d.between(1, 4)):
        parts.append(d.linear(d.between(1, 70)))
        if d.shape[-1] > 3 and d.often():
            parts.append(Part("layer_norm", d.scale(d.shape[-1]), {"axes": 1}) if d.often() else d.batch_norm())
        parts.append(d.activation())
    return [*parts, d.linear(5)]


def _attention(d: Drawer) -> list[Part]:
    heads = d.between(1, 4)
    parts = [d.linear(heads * d.between(2, 9))]
    for _ in range(d.between(1, 2)):
        width = d.shape[-1]
        weights = (d.weight(width, 3 * width, fan=width), d.weight(3 * width), d.weight(width, width, fan=width))
        normed = Part("layer_norm", d.scale(width), {"axes": 1})
        attend = Part("attention", weights, {"heads": heads, "causal": bool(d.between(0, 1))})
        feed = (Part("layer_norm", d.scale(width), {"axes": 1}), d.linear(d.between(3, 50)), d.activation("Gelu", "silu", "Relu"))
        parts += [Part("sum", (), {}, ((normed, attend), ())), Part("sum", (), {}, ((*feed, d.linear(width)), ()))]
    return [*parts, Part("mean_of_rows"), _classes(d, d.shape[-1])]


def _recurrent(d: Drawer) -> list[Part]:
    parts, kind = [], d.pick("lstm", "gru")
    for _ in range(d.between(1, 2)):
        hidden, directions, inputs = d.between(1, 20), d.between(1, 2), d.shape[-1]
        rows = hidden * (4 if kind == "lstm" else 3)
        weights = (d.weight(directions, rows, inputs, fan=inputs), d.weight(directions, rows, hidden, fan=hidden))
        parts.append(Part(kind, (*weights, d.weight(directions, 2 * rows)), {"hidden": hidden, "directions": directions}))
        d.shape = (d.shape[0], hidden * directions)
    return [*parts, Part("mean_of_rows"), _classes(d, d.shape[-1])]


FAMILIES: dict[str, Callable[[Drawer], list[Part]]] = {
    "six-and-ten": _six_and_ten,
    "residual": _residual,
    "plain": _plain,
    "normalized": _normalized,
    "grouped": _grouped,
    "transposing": _transposing,
    "rows": _rows,
    "attention": _attention,
    "recurrent": _recurrent,
}
ONCE = 1
"""How many families come first and once: a net is drawn from the others, in turn."""


def draw(seed: int) -> Drawn:
    """The net of a seed: 0 is the first family's, then the other families take turns."""
    families = list(FAMILIES)
    family = families[seed] if seed < ONCE else families[ONCE + (seed - ONCE) % (len(families) - ONCE)]
    rng = np.random.default_rng(seed)
    images = family not in ("rows", "attention", "recurrent")
    shape = tuple(int(n) for n in rng.integers(8, 19, 2)) if images else tuple(int(n) for n in rng.integers(2, 15, 2))
    shape = (int(rng.integers(1, 8)), *shape) if images else shape[family == "rows" :]
    d = Drawer(rng, (3, 16, 16) if family == "six-and-ten" else shape)
    parts = FAMILIES[family](d)
    pair = []
    for n in (d.between(2, 9), d.between(10, 17)):
        x = rng.standard_normal((n, *d.input)).astype(np.float32)
        t = rng.integers(0, d.shape[-1], n) if len(d.shape) == 1 else rng.standard_normal((n, *d.shape)).astype(np.float32)
        pair.append((x, t))
    batches = [pair[step % 3 == 1] for step in range(STEPS)]
    return Drawn(f"{seed}-{family}", tuple(parts), d.weights, d.statistics, batches, d.between(0, 3) == 0, d.kinks)


# --- ours -------------------------------------------------------------------------------------------------------------


class Layers:
    """The parts by ONNX's operators; images are (N, C, H, W), rows (N, T, D)."""

    add = staticmethod(op.Add)

    @staticmethod
    def conv(x: Any, w: Any, *b: Any, stride: int, padding: int, groups: int, dilation: int) -> Any:
        return op.Conv(x, w, *b, strides=[stride] * 2, pads=[padding] * 4, group=groups, dilations=[dilation] * 2)

    @staticmethod
    def transposed(x: Any, w: Any, b: Any, *, stride: int, padding: int, more: int) -> Any:
        return op.ConvTranspose(x, w, b, strides=[stride] * 2, pads=[padding] * 4, output_padding=[more] * 2)

    @staticmethod
    def batch_norm(x: Any, scale: Any, shift: Any, mean: Any, variance: Any) -> Any:
        return autograd.batchnorm_2d(autograd.BatchNormHandle(MOVING, EPSILON, True), x, scale, shift, mean, variance)

    @staticmethod
    def instance_norm(x: Any, scale: Any, shift: Any) -> Any:
        return op.InstanceNormalization(x, scale, shift, epsilon=EPSILON)

    @staticmethod
    def group_norm(x: Any, scale: Any, shift: Any, *, groups: int) -> Any:
        return op.GroupNormalization(x, scale, shift, num_groups=groups, epsilon=EPSILON)

    @staticmethod
    def layer_norm(x: Any, scale: Any, shift: Any, *, axes: int) -> Any:
        return op.LayerNormalization(x, scale, shift, axis=-axes, epsilon=EPSILON)

    @staticmethod
    def activation(x: Any, *, name: str) -> Any:
        return op.Mul(x, op.Sigmoid(x)) if name == "silu" else getattr(op, name)(x)

    @staticmethod
    def max_pool(x: Any, *, kernel: int, stride: int, padding: int) -> Any:
        return op.MaxPool(x, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[padding] * 4)

    @staticmethod
    def average_pool(x: Any, *, kernel: int, stride: int, padding: int) -> Any:
        return op.AveragePool(x, kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=[padding] * 4, count_include_pad=1)

    @staticmethod
    def mean_of_image(x: Any) -> Any:
        return op.GlobalAveragePool(x)

    @staticmethod
    def mean_of_rows(x: Any) -> Any:
        return op.ReduceMean(x, [1], keepdims=0)

    @staticmethod
    def flatten(x: Any) -> Any:
        return op.Flatten(x)

    @staticmethod
    def linear(x: Any, w: Any, b: Any) -> Any:
        return op.Gemm(x, w, b) if len(x.shape) == 2 else op.Add(op.MatMul(x, w), b)

    @staticmethod
    def attention(x: Any, w: Any, b: Any, out: Any, *, heads: int, causal: bool) -> Any:
        _, t, width = x.shape
        parts = op.Split(op.Add(op.MatMul(x, w), b), axis=-1, num_outputs=3, outputs=3)
        q, k, v = (op.Transpose(op.Reshape(p, [0, 0, heads, -1]), perm=[0, 2, 1, 3]) for p in parts)
        scores = op.Mul(op.MatMul(q, op.Transpose(k, perm=[0, 1, 3, 2])), float((width // heads) ** -0.5))
        if causal:
            scores = op.Add(scores, np.triu(np.full((t, t), -np.inf, op.dtype(x)), 1))
        mixed = op.Transpose(op.MatMul(op.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
        return op.MatMul(op.Reshape(mixed, [0, 0, width]), out)

    @staticmethod
    def lstm(x: Any, w: Any, r: Any, b: Any, *, hidden: int, directions: int) -> Any:
        return _recurred(x, hidden, directions, lambda x, **more: op.LSTM(x, w, r, b, outputs=3, **more)[0])

    @staticmethod
    def gru(x: Any, w: Any, r: Any, b: Any, *, hidden: int, directions: int) -> Any:
        return _recurred(x, hidden, directions, lambda x, **more: op.GRU(x, w, r, b, linear_before_reset=1, outputs=2, **more)[0])


def _recurred(x: Any, hidden: int, directions: int, layer: Callable[..., Any]) -> Any:
    """The outputs of all directions at each step, from rows to rows."""
    y = layer(op.Transpose(x, perm=[1, 0, 2]), hidden_size=hidden, direction="forward" if directions == 1 else "bidirectional")
    return op.Reshape(op.Transpose(y, perm=[2, 0, 1, 3]), [0, 0, -1])


class Net(Model):
    """A drawn net with its optimizer."""

    def __init__(self, drawn: Drawn, dtype: Any) -> None:
        super().__init__()
        self.drawn = drawn
        for name, array in drawn.weights.items():
            setattr(self, name, Tensor(data=array.astype(dtype), stores_grad=True, requires_grad=True, name=name))
        for name, array in drawn.statistics.items():
            setattr(self, name, Tensor(data=array.astype(dtype), requires_grad=False, name=name))
        if drawn.adam:
            self.optimizer: Any = opt.AdamW(drawn.rate, epsilon=ADAM_EPSILON, weight_decay=DECAY, dtype=np.float64)
        else:
            self.optimizer = opt.SGD(drawn.rate, momentum=MOMENTUM, weight_decay=DECAY, dtype=np.float64)

    def forward(self, x: Tensor) -> Any:
        return compute(Layers, self.drawn.parts, x, self.get_states())

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        y = self.forward(x)
        loss = (autograd.softmax_cross_entropy if self.drawn.classifies else autograd.mse_loss)(y, t)
        self.optimizer(loss)
        return loss


def train(drawn: Drawn, dtype: Any = np.float32) -> tuple[Arrays, list[str]]:
    """The losses and the states after the training, by name, and why recorded steps were not computed by a plan."""
    net, losses = Net(drawn, dtype), []
    net.compile([_tensor(drawn.batches[0][0], dtype)], use_graph=True)
    for x, t in drawn.batches:
        losses.append(net(_tensor(x, dtype), _tensor(t, dtype)).data.item())
    steps = [step for recorded in net._steps.values() for step in recorded]
    states = {name: np.array(t.data) for name, t in net.get_states().items()}
    return {**states, "losses": np.array(losses)}, [str(s._session.reason) for s in steps if s._session.reason is not None]


def _tensor(array: np.ndarray, dtype: Any) -> Tensor:
    return Tensor(data=array.astype(dtype) if array.dtype.kind == "f" else array, requires_grad=False)


# --- children ---------------------------------------------------------------------------------------------------------

LIMIT = "ONEDNN_MAX_CPU_ISA"
M_PERTURB = -6
PATIENCE = 90
"""Seconds that a child may take for each net; it takes about two."""

GARBAGE = (85, 170)
"""What glibc's allocator fills new memory with in the trainings of a net in a process: results must not depend on it."""

LEAST, BENT = 1e-4, 2e-2
"""The largest error of a training in float32, and of one of a net whose derivatives jump.

A state keeps 6e-8 of its value in each step, and moves by about a hundredth of it.  A value so near 0 that two correct programs
see it on different sides moves a gradient by its share of a batch.  What oneDNN 3.2 computes outside its memory is off by more
than all of the move.
"""


@dataclass
class Trained:
    """The trainings of seeds in child processes.

    Attributes:
        level: the instruction set that oneDNN used.
        states: the losses and states of each training of a seed.
        reasons: why steps of a seed were not computed by plans.
        ends: how the process died, by the seed that it was at; the next seeds were trained by another process.
    """

    level: str = ""
    states: dict[int, list[Arrays]] = field(default_factory=dict)
    reasons: dict[int, list[str]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)


def levels() -> list[str]:
    """The limits of instruction sets to test: none, and AVX2 if this processor, or the limit of this process, is above it."""
    library = onednn.library()
    return ["", "AVX2"] if library is not None and higher(library.isa, "avx2") else [""]


def trained(seeds: Sequence[int], folder: Path, *, limit: str, threads: int) -> Trained:
    """Train the nets of seeds in a child process, and in another one if it dies or hangs."""
    environment = {**os.environ, VARIABLE: str(threads), **({LIMIT: limit} if limit else {})}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    result, left = Trained(), list(seeds)
    while left:
        command = [sys.executable, __file__, str(folder), *map(str, left)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=PATIENCE * len(left), check=False
            )
            code, out, errors = f"exit status {done.returncode}" if done.returncode else "", done.stdout, done.stderr
        except subprocess.TimeoutExpired as late:
            code, out, errors = str(late), (late.stdout or b"").decode(), (late.stderr or b"").decode()
        result.level, *lines = out.splitlines() or [""]
        for seed, line in zip(left, lines, strict=False):
            result.reasons[seed] = json.loads(line)
            result.states[seed] = [dict(np.load(folder / f"{seed}-{turn}.npz")) for turn in range(len(GARBAGE))]
        if code:
            result.ends[left[min(len(lines), len(left) - 1)]] = f"{code}: {errors.strip()[-2000:]}"
        left = left[len(lines) + 1 :]
    return result


def move_error(found: Arrays, expected: Arrays, drawn: Drawn) -> float:
    """The largest error of what a training has changed, relative to the largest change of that state.

    A state that moves by less than a hundredth of the net's largest move counts as one that moves so far: the gradient of a
    shift before a normalization is zero but for rounding.
    """
    first = {**drawn.weights, **drawn.statistics}
    moves = {name: float(np.abs(expected[name] - a.astype(np.float64)).max(initial=0)) for name, a in first.items()}
    least = max(moves.values()) / 100
    errors = [float(np.abs(found[n].astype(np.float64) - expected[n]).max(initial=0)) / max(m, least) for n, m in moves.items()]
    losses = np.abs(found["losses"] - expected["losses"]).max() / np.abs(expected["losses"]).max()
    return max(float(losses), *errors)


def bound(drawn: Drawn) -> float:
    """The largest error that is accepted."""
    return BENT if drawn.kinks else LEAST


def different(first: Arrays, other: Arrays) -> list[str]:
    """The states whose bits differ."""
    return [n for n, a in first.items() if a.tobytes() != other[n].tobytes()]


def main(folder: str, *seeds: str) -> None:
    library = onednn.library()
    print(library.isa if library is not None else "no oneDNN", flush=True)
    perturb: Any = getattr(ctypes.CDLL(None), "mallopt", lambda parameter, value: 0)
    for seed in map(int, seeds):
        why: list[str] = []
        for turn, garbage in enumerate(GARBAGE):
            perturb(M_PERTURB, garbage)
            states, reasons = train(draw(seed))
            why += reasons
            np.savez(Path(folder) / f"{seed}-{turn}.npz", **states)  # type: ignore[arg-type]
        print(json.dumps(why), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
