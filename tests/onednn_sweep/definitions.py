"""What oneDNN's primitives compute, in NumPy and float64: from its guide, not from its code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class Window:
    """A window that moves over the last axes; dilations as ONNX has them: 1 for a dense one."""

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    begin: tuple[int, ...]
    end: tuple[int, ...]

    def reach(self) -> list[int]:
        return [(k - 1) * d + 1 for k, d in zip(self.kernel, self.dilations, strict=True)]

    def counts(self, sizes: Sequence[int]) -> list[int]:
        """The number of windows along each axis."""
        axes = zip(sizes, self.begin, self.end, self.reach(), self.strides, strict=True)
        return [(n + b + e - r) // s + 1 for n, b, e, r, s in axes]

    def sizes(self, counts: Sequence[int]) -> list[int]:
        """The sizes of a transposed convolution of so many windows."""
        axes = zip(counts, self.begin, self.end, self.reach(), self.strides, strict=True)
        return [(n - 1) * s + r - b - e for n, b, e, r, s in axes]

    def padded(self, x: Array, value: float = 0.0) -> Array:
        lead = [(0, 0)] * (x.ndim - len(self.kernel))
        return np.pad(x, [*lead, *zip(self.begin, self.end, strict=True)], constant_values=value)

    def taps(self, counts: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[Any, ...]]]:
        """For each place of the window its indices, and where all windows have it in the padded tensor."""
        found = []
        for tap in np.ndindex(*self.kernel):
            axes = zip(tap, self.dilations, counts, self.strides, strict=True)
            found.append((tap, (..., *(slice(t * d, t * d + (n - 1) * s + 1, s) for t, d, n, s in axes))))
        return found

    def inside(self, x: Array) -> Array:
        """A padded tensor without its padding."""
        axes = zip(self.begin, self.end, x.shape[x.ndim - len(self.kernel) :], strict=True)
        return x[(..., *(slice(b, n - e) for b, e, n in axes))]


def convolution(x: Array, w: Array, at: Window) -> Array:
    """x: (n, groups, inputs, *sizes); w: (groups, outputs, inputs, *kernel)."""
    counts, padded = at.counts(x.shape[3:]), at.padded(x)
    return sum(np.einsum("ngi...,goi->ngo...", padded[where], w[(..., *tap)]) for tap, where in at.taps(counts))


def convolution_data(dy: Array, w: Array, at: Window, sizes: Sequence[int]) -> Array:
    """The adjoint of `convolution` in x."""
    dx = np.zeros((*dy.shape[:2], w.shape[2], *(n + b + e for n, b, e in zip(sizes, at.begin, at.end, strict=True))))
    for tap, where in at.taps(dy.shape[3:]):
        dx[where] += np.einsum("ngo...,goi->ngi...", dy, w[(..., *tap)])
    return at.inside(dx)


def convolution_weights(x: Array, dy: Array, at: Window) -> Array:
    """The adjoint of `convolution` in w."""
    dw, padded = np.zeros((x.shape[1], dy.shape[2], x.shape[2], *at.kernel)), at.padded(x)
    for tap, where in at.taps(dy.shape[3:]):
        dw[(..., *tap)] = np.einsum("ngix,ngox->goi", *(v.reshape(*v.shape[:3], -1) for v in (padded[where], dy)))
    return dw


def pooled(x: Array, at: Window, algorithm: str) -> Array:
    counts = at.counts(x.shape[2:])
    if algorithm == "max":
        padded = at.padded(x, -math.inf)
        return np.max([padded[where] for _, where in at.taps(counts)], 0)
    return sum(at.padded(x)[where] for _, where in at.taps(counts)) / _shares(x, at, counts, algorithm)


def _shares(x: Array, at: Window, counts: Sequence[int], algorithm: str) -> Array | int:
    """By how many elements each window is divided."""
    if algorithm == "avg_include_padding":
        return math.prod(at.kernel)
    ones = at.padded(np.ones((1, 1, *x.shape[2:])))
    return sum(ones[where] for _, where in at.taps(counts))


def pooled_gradient(dy: Array, x: Array, at: Window, algorithm: str) -> Array:
    """The gradient of a maximum goes to the first one; no two elements of x may be equal."""
    dx, counts = at.padded(np.zeros(x.shape)), dy.shape[2:]
    padded, y = at.padded(x, -math.inf), pooled(x, at, algorithm)
    share = 1 if algorithm == "max" else 1 / _shares(x, at, counts, algorithm)
    for _, where in at.taps(counts):
        dx[where] += dy * share * ((padded[where] == y) if algorithm == "max" else 1)
    return at.inside(dx)


_erf = np.vectorize(math.erf, [float])


def logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


FUNCTIONS: dict[str, Callable[[Array, float, float], Array]] = {
    "relu": lambda x, a, b: np.where(x > 0, x, a * x),
    "tanh": lambda x, a, b: np.tanh(x),
    "elu": lambda x, a, b: np.where(x > 0, x, a * np.expm1(x)),
    "square": lambda x, a, b: x * x,
    "abs": lambda x, a, b: np.abs(x),
    "sqrt": lambda x, a, b: np.sqrt(x),
    "linear": lambda x, a, b: a * x + b,
    "soft_relu": lambda x, a, b: np.logaddexp(0, a * x) / a,
    "hardsigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "logistic": lambda x, a, b: logistic(x),
    "exp": lambda x, a, b: np.exp(x),
    "gelu_tanh": lambda x, a, b: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "swish": lambda x, a, b: x * logistic(a * x),
    "log": lambda x, a, b: np.log(x),
    "clip": lambda x, a, b: np.clip(x, a, b),
    "clip_v2": lambda x, a, b: np.clip(x, a, b),
    "pow": lambda x, a, b: a * x**b,
    "gelu_erf": lambda x, a, b: 0.5 * x * (1 + _erf(x / math.sqrt(2))),
    "round": lambda x, a, b: np.rint(x),
    "mish": lambda x, a, b: x * np.tanh(np.logaddexp(0, x)),
    "hardswish": lambda x, a, b: x * np.clip(a * x + b, 0, 1),
}
"""The functions of elements, with their two parameters."""

PAIRS: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum, "div": np.divide, "sub": np.subtract,
    "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal, "lt": np.less, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
"""The functions of two elements."""


def slope(name: str, x: Array, a: float, b: float) -> Array:
    """The derivative of a function of elements, by a difference; no x may be near a kink."""
    step = 1e-6
    f = FUNCTIONS[name]
    return (f(x + step, a, b) - f(x - step, a, b)) / (2 * step)


def softmax(x: Array, axis: int, log: bool) -> Array:
    z = x - x.max(axis, keepdims=True)
    z = z - np.log(np.exp(z).sum(axis, keepdims=True))
    return z if log else np.exp(z)


def softmax_gradient(dy: Array, y: Array, axis: int, log: bool) -> Array:
    if log:
        return dy - np.exp(y) * dy.sum(axis, keepdims=True)
    return y * (dy - (dy * y).sum(axis, keepdims=True))


@dataclass
class Normalization:
    """(x - mean) / sqrt(variance + epsilon) over some axes, times scale plus shift, which broadcast."""

    x: Array
    axes: tuple[int, ...]
    epsilon: float
    scale: Array | float = 1.0
    shift: Array | float = 0.0
    mean: Array | None = None
    variance: Array | None = None

    def __post_init__(self) -> None:
        self.fixed = self.mean is not None
        self.mean = self.x.mean(self.axes, keepdims=True) if self.mean is None else self.mean
        self.variance = self.x.var(self.axes, keepdims=True) if self.variance is None else self.variance
        self.deviation = np.sqrt(self.variance + self.epsilon)
        self.z = (self.x - self.mean) / self.deviation

    def result(self) -> Array:
        return self.z * self.scale + self.shift

    def gradient(self, dy: Array) -> Array:
        """That of x; given moments do not depend on it."""
        g, axes = dy * self.scale, self.axes
        if not self.fixed:
            g = g - g.mean(axes, keepdims=True) - self.z * (g * self.z).mean(axes, keepdims=True)
        return g / self.deviation


def lrn(x: Array, size: int, alpha: float, beta: float, k: float) -> Array:
    half = (size - 1) // 2
    squares = np.pad(x * x, [(0, 0), (half, size - 1 - half), *[(0, 0)] * (x.ndim - 2)])
    total = sum(squares[:, i : i + x.shape[1]] for i in range(size))
    return x * (k + alpha / size * total) ** -beta


def resampled(x: Array, sizes: Sequence[int], algorithm: str) -> Array:
    for axis, new in enumerate(sizes, 2):
        old = x.shape[axis]
        at = (np.arange(new) + 0.5) * old / new - 0.5
        if algorithm == "nearest":
            x = x.take(np.clip(np.rint(at), 0, old - 1).astype(int), axis)
        else:
            low = np.floor(at).astype(int)
            part = (at - low).reshape([-1 if i == axis else 1 for i in range(x.ndim)])
            x = x.take(np.clip(low, 0, old - 1), axis) * (1 - part) + x.take(np.clip(low + 1, 0, old - 1), axis) * part
    return x


def reduced(x: Array, axes: tuple[int, ...], algorithm: str, p: float, epsilon: float) -> Array:
    plain = {"max": np.max, "min": np.min, "sum": np.sum, "mul": np.prod, "mean": np.mean}
    if algorithm in plain:
        return plain[algorithm](x, axis=axes, keepdims=True)
    total = (np.abs(x) ** p).sum(axes, keepdims=True)
    total = np.maximum(total, epsilon) if algorithm.endswith("max") else total + epsilon
    return total if "power" in algorithm else total ** (1 / p)


GATES = {"vanilla_rnn": 1, "lstm": 4, "gru": 3, "lbr_gru": 3}
"""The gates of recurrent cells."""


@dataclass
class Recurrent:
    """A recurrent layer.

    Attributes:
        cell: a key of `GATES`.
        direction: as oneDNN names it.
        w: (directions, inputs, gates, hidden).
        r: (directions, hidden, gates, hidden).
        b: (directions, gates, hidden), with one gate more for lbr_gru.
        p: (directions, 3, hidden), the weights of the cells.
        activation: of a vanilla_rnn.
    """

    cell: str
    direction: str
    w: Array
    r: Array
    b: Array
    p: Array
    activation: str = "tanh"

    def result(self, x: Array, h: Array, c: Array) -> tuple[Array, Array, Array]:
        """The layer, the last states and the last cells; x: (time, batch, inputs); h, c: (directions, batch, hidden)."""
        layers, states, cells = [], [], []
        for d in range(len(self.w)):
            back = self.direction == "right2left" or d == 1
            state, memory, out = h[d], c[d], [x[0]] * len(x)
            for t in reversed(range(len(x))) if back else range(len(x)):
                state, memory = self._step(d, x[t], state, memory)
                out[t] = state
            layers.append(np.stack(out))
            states.append(state)
            cells.append(memory)
        return np.concatenate(layers, -1), np.stack(states), np.stack(cells)

    def _step(self, d: int, x: Array, h: Array, c: Array) -> tuple[Array, Array]:
        """The next state and cell."""
        own, past = np.einsum("ni,igh->gnh", x, self.w[d]), np.einsum("nj,jgh->gnh", h, self.r[d])
        gates, b = own + past + self.b[d][: len(own), None], self.b[d]
        if self.cell == "vanilla_rnn":
            return FUNCTIONS[self.activation](gates[0], 0.0, 0.0), c
        if self.cell == "lstm":
            i, f, g, o = gates
            new = logistic(f + self.p[d][1] * c) * c + logistic(i + self.p[d][0] * c) * np.tanh(g)
            return logistic(o + self.p[d][2] * new) * np.tanh(new), new
        update, reset = logistic(gates[0]), logistic(gates[1])
        inner = reset * (past[2] + b[3]) if self.cell == "lbr_gru" else (reset * h) @ self.r[d][:, 2]
        return update * h + (1 - update) * np.tanh(own[2] + b[2] + inner), c
