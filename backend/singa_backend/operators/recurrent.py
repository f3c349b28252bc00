"""Recurrent layers RNN, GRU and LSTM: one projection of the whole input, then one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import limits
from ..devices.namespaces import Xp
from ..errors import OperatorError
from ..interpreters.base import Op, V
from ..ir.declaration import Host, operator
from ._api import Array
from ._flops import recurrent
from ._recurrence import DIRECTIONS, Activation, activation, biases, parts, recurrence
from ._shapes import recurrent_shapes

Floats = tuple[float, ...]
Strings = tuple[str, ...]
Function = Callable[[Array], Array]
Step = Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]

NO_CLIP = {"clip": 0.0}
"""Exporters write clip=0 for "no clip": the text defines only an absent clip so, but 0 would make every gate constant."""

# --- activations ----------------------------------------------------------------------------------------------------

_PARAMETERS: dict[str, tuple[float | None, float | None]] = {
    "relu": (None, None), "tanh": (None, None), "sigmoid": (None, None), "softsign": (None, None), "softplus": (None, None),
    "affine": (1.0, 0.0), "leakyrelu": (0.01, None), "thresholdedrelu": (1.0, None), "scaledtanh": (1.0, 1.0),
    "hardsigmoid": (0.2, 0.5), "elu": (1.0, None),
}  # fmt: skip
"""Default alpha and beta of each activation; None if it does not have the parameter."""


def _activation(xp: Xp, name: str, alpha: float, beta: float, clip: float | None) -> Function:
    functions: dict[str, Function] = {
        "relu": lambda x: xp.maximum(x, 0),
        "tanh": lambda x: xp.tanh(x),
        "sigmoid": lambda x: 1 / (1 + xp.exp(-x)),
        "softsign": lambda x: x / (1 + xp.abs(x)),
        "softplus": lambda x: xp.maximum(x, 0) + xp.log1p(xp.exp(-xp.abs(x))),
        "affine": lambda x: alpha * x + beta,
        "leakyrelu": lambda x: xp.where(x < 0, alpha * x, x),
        "thresholdedrelu": lambda x: xp.where(x < alpha, 0, x),
        "scaledtanh": lambda x: alpha * xp.tanh(beta * x),
        "hardsigmoid": lambda x: xp.clip(alpha * x + beta, 0, 1),
        "elu": lambda x: xp.where(x < 0, alpha * xp.expm1(xp.minimum(x, 0)), x),
    }
    function = functions[name]
    return function if clip is None else lambda x: function(xp.clip(x, -clip, clip))


def _activations(xp: Xp, names: Sequence[str], alphas: Floats | None, betas: Floats | None, clip: float | None) -> list[Function]:
    """Return activations; they consume alphas and betas in order if they have them, unless there is one for each."""
    names = [name.lower() for name in names]
    for name in names:
        if name not in _PARAMETERS:
            raise OperatorError(f"activation must be one of {', '.join(_PARAMETERS)}, got {name!r}", code="SX404")
    if clip is not None and not clip >= 0:
        raise OperatorError(f"clip must be at least 0, got {clip}", code="SX404")
    clip = clip or None
    return [_activation(xp, *three, clip) for three in _with_parameters(names, alphas, betas)]


def _with_parameters(names: Sequence[str], alphas: Floats | None, betas: Floats | None) -> list[tuple[str, float, float]]:
    """Return each activation with its alpha and beta, 0 if it does not have the parameter."""
    values: list[list[float]] = []
    for which, given in enumerate((alphas or (), betas or ())):
        each = len(given) == len(names)
        left = list(given)
        row: list[float] = []
        for i, name in enumerate(names):
            default = _PARAMETERS[name][which]
            if default is None:
                row.append(0.0)
            elif each:
                row.append(given[i])
            else:
                row.append(left.pop(0) if left else default)
        values.append(row)
    return list(zip(names, values[0], values[1], strict=True))


# --- steps ----------------------------------------------------------------------------------------------------------


class RecurrentBase:
    """Base of RNN, GRU and LSTM: directions, layout and sequence lengths."""

    def __init__(
        self,
        xp: Xp,
        x: Array,
        w: Array,
        r: Array,
        b: Array | None,
        lengths: np.ndarray | None,
        gates: int,
        *,
        direction: str,
        hidden_size: int | None,
        layout: int,
    ) -> None:
        if direction not in DIRECTIONS:
            raise OperatorError(f"direction must be forward, reverse or bidirectional, got {direction!r}", code="SX404")
        if layout not in (0, 1):
            raise OperatorError(f"layout must be 0 or 1, got {layout}", code="SX404")
        if x.ndim != 3 or w.ndim != 3 or r.ndim != 3:
            raise OperatorError(f"X, W and R must have 3 axes each, got {x.ndim}, {w.ndim} and {r.ndim}", code="SX404")
        self.xp, self.layout, self.gates = xp, layout, gates
        self.x = xp.swapaxes(x, 0, 1) if layout else x
        self.steps, self.batch, width = self.x.shape
        self.backward = DIRECTIONS[direction]
        self.directions, self.size = len(self.backward), r.shape[2]
        rows = gates * self.size
        if hidden_size is not None and hidden_size != self.size:
            raise OperatorError(f"hidden_size must equal the last axis of R, {self.size}, got {hidden_size}", code="SX404")
        self.expect("W", w, (self.directions, rows, width))
        self.expect("R", r, (self.directions, rows, self.size))
        if b is not None:
            self.expect("B", b, (self.directions, 2 * rows))
        self.w, self.r, self.b = w, r, b
        self.lengths = None
        if lengths is not None:
            if lengths.shape != (self.batch,) or ((lengths < 0) | (lengths > self.steps)).any():
                what = f"{self.batch} numbers in [0, {self.steps}]"
                raise OperatorError(f"sequence_lens must be {what}, got {lengths.tolist()}", code="SX404")
            if (lengths < self.steps).any():
                self.lengths = lengths

    def expect(self, name: str, value: Array, shape: tuple[int, ...]) -> None:
        if tuple(value.shape) != shape:
            raise OperatorError(f"{name} must have shape {shape}, got {tuple(value.shape)}", code="SX404")

    def initial(self, name: str, value: Array | None) -> Array:
        """Return an initial state with the directions as first axis."""
        shape = (self.directions, self.batch, self.size)
        if value is None:
            return self.xp.zeros(shape, self.x.dtype)
        value = self.xp.swapaxes(value, 0, 1) if self.layout and value.ndim == 3 else value
        self.expect(name, value, shape)
        return value

    def bias(self, d: int) -> tuple[Array, Array]:
        """Return the biases of the input's and of the state's projection."""
        if self.b is None:
            zero = self.xp.zeros(self.gates * self.size, self.x.dtype)
            return zero, zero
        return self.b[d, : self.gates * self.size], self.b[d, self.gates * self.size :]

    def run(self, states: Sequence[Array], cell: Callable[[int], tuple[Array, Step]]) -> tuple[Array, ...]:
        """Return Y and the last states; `cell` returns a direction's bias of the projected input and its step."""
        xp = self.xp
        outputs, lasts = [], []
        for d, backward in enumerate(self.backward):
            bias, step = cell(d)
            x, order = self.x, None
            if backward and self.lengths is not None:  # a sequence is reversed within its length
                at = np.arange(self.steps)[:, None]
                at = np.where(at < self.lengths, self.lengths - 1 - at, at)
                order = xp.asarray(at), xp.arange(self.batch)[None, :]
                x = x[order]
            elif backward:
                x = x[::-1]
            limits.admit((self.steps, self.batch, bias.shape[0]), x.dtype)
            projected = xp.matmul(x.reshape(self.steps * self.batch, x.shape[2]), self.w[d].T) + bias
            projected = projected.reshape(self.steps, self.batch, bias.shape[0])
            state = tuple(s[d] for s in states)
            y = xp.empty((self.steps, self.batch, self.size), projected.dtype)
            for t in limits.rounds(self.steps):
                new = step(projected[t], state)
                y[t] = new[0]
                if self.lengths is not None and (t >= self.lengths).any():
                    running = xp.asarray((t < self.lengths)[:, None])
                    y[t] = xp.where(running, new[0], 0)
                    new = tuple(xp.where(running, n, s) for n, s in zip(new, state, strict=True))
                state = new
            if order is not None:
                y = y[order]
            elif backward:
                y = y[::-1]
            outputs.append(y)
            lasts.append(state)
        y = xp.stack(outputs, axis=1)
        last = [xp.stack(list(s), axis=0) for s in zip(*lasts, strict=True)]
        if self.layout:
            y, last = xp.moveaxis(y, 2, 0), [xp.swapaxes(s, 0, 1) for s in last]
        return (y, *last)

    def per_direction(self, names: Strings | None, defaults: Strings, *rest: Any) -> list[list[Function]]:
        """Return the activations of each direction."""
        n = len(defaults)
        chosen = tuple(names) if names is not None else defaults * self.directions
        if len(chosen) not in (n * self.directions, n * 2):  # RNN has two by default, also in one direction
            raise OperatorError(f"activations must have {n * self.directions} names, got {len(chosen)}", code="SX404")
        functions = _activations(self.xp, chosen[: n * self.directions], *rest)
        return [functions[n * d : n * d + n] for d in range(self.directions)]


# --- RNN ------------------------------------------------------------------------------------------------------------


@operator("RNN", 1, 7, 14, 22, absent=NO_CLIP,
          traits=("product", "finite", "reads_quantized"),
          weights={1: "the weight", 2: "the recurrent weight", 3: "the bias"})  # fmt: skip
def rnn(
    xp: Xp,
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Host[np.ndarray] | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    """Before opset 7, `output_sequence` specifies whether Y may be omitted; it is always computed."""
    layer = RecurrentBase(xp, x, w, r, b, sequence_lens, 1, direction=direction, hidden_size=hidden_size, layout=layout)
    functions = layer.per_direction(activations, ("Tanh",), activation_alpha, activation_beta, clip)

    def cell(d: int) -> tuple[Array, Step]:
        (f,), recur = functions[d], layer.r[d].T
        wb, rb = layer.bias(d)
        return wb + rb, lambda xt, state: (f(xt + xp.matmul(state[0], recur)),)

    return layer.run([layer.initial("initial_h", initial_h)], cell)


rnn.flops(recurrent)
rnn.shapes(recurrent_shapes)


@rnn.decomposition
def rnn_decomposition(
    op: Op,
    x: V,
    w: V,
    r: V,
    b: V,
    sequence_lens: V,
    initial_h: V,
    activation_alpha: Floats | None,
    activation_beta: Floats | None,
    activations: Strings | None,
    clip: float | None,
    direction: str,
    layout: int,
) -> tuple[V, ...]:
    functions = composed_activations(activations, ("Tanh",), direction, activation_alpha, activation_beta, clip)

    def cell(d: int) -> tuple[V, Any]:
        (f,), recur = functions[d], op.swap(op.Gather(r, d, axis=0), 0, 1)
        wb, rb = biases(op, b, d)
        return op.add(wb, rb), lambda inner, xt, state: [f(inner, inner.Add(xt, inner.MatMul(state[0], recur)))]

    return recurrence(op, x, w, r, sequence_lens, [initial_h], direction, layout, cell)


def composed_activations(
    names: Strings | None, defaults: Strings, direction: str, alphas: Floats | None, betas: Floats | None, clip: float | None
) -> list[list[Activation]]:
    """Return the activations of each direction, in ONNX operators."""
    n, directions = len(defaults), len(DIRECTIONS[direction])
    chosen = [name.lower() for name in (names if names is not None else defaults * directions)[: n * directions]]
    made = [activation(*three, clip or None) for three in _with_parameters(chosen, alphas, betas)]
    return [made[n * d : n * d + n] for d in range(directions)]


# --- GRU ------------------------------------------------------------------------------------------------------------


@operator("GRU", 3, 7, 14, 22, absent=NO_CLIP,
          traits=("product", "finite", "reads_quantized"),
          weights={1: "the weight", 2: "the recurrent weight", 3: "the bias"})  # fmt: skip
def gru(
    xp: Xp,
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Host[np.ndarray] | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    """The gates are update, reset, hidden; the reset gate scales the state before its projection, or the projection."""
    layer = RecurrentBase(xp, x, w, r, b, sequence_lens, 3, direction=direction, hidden_size=hidden_size, layout=layout)
    functions = layer.per_direction(activations, ("Sigmoid", "Tanh"), activation_alpha, activation_beta, clip)
    n = layer.size

    def cell(d: int) -> tuple[Array, Step]:
        f, g = functions[d]
        gates, hidden = layer.r[d, : 2 * n].T, layer.r[d, 2 * n :].T
        wb, rb = layer.bias(d)
        inner = rb[2 * n :]
        outer = xp.concatenate([rb[: 2 * n], xp.zeros_like(inner) if linear_before_reset else inner])

        def step(xt: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            (h,) = state
            zr = f(xt[:, : 2 * n] + xp.matmul(h, gates))
            z, reset = zr[:, :n], zr[:, n:]
            recurrent = reset * (xp.matmul(h, hidden) + inner) if linear_before_reset else xp.matmul(reset * h, hidden)
            new = g(xt[:, 2 * n :] + recurrent)
            return ((1 - z) * new + z * h,)

        return wb + outer, step

    return layer.run([layer.initial("initial_h", initial_h)], cell)


gru.flops(recurrent)
gru.shapes(recurrent_shapes)


@gru.decomposition
def gru_decomposition(
    op: Op,
    x: V,
    w: V,
    r: V,
    b: V,
    sequence_lens: V,
    initial_h: V,
    activation_alpha: Floats | None,
    activation_beta: Floats | None,
    activations: Strings | None,
    clip: float | None,
    direction: str,
    layout: int,
    linear_before_reset: int,
) -> tuple[V, ...]:
    functions = composed_activations(activations, ("Sigmoid", "Tanh"), direction, activation_alpha, activation_beta, clip)

    def cell(d: int) -> tuple[V, Any]:
        f, g = functions[d]
        rz, rr, rh = (op.swap(part, 0, 1) for part in parts(op, op.Gather(r, d, axis=0), 3, 0))
        wb, rb = biases(op, b, d)
        hidden = None
        if rb is not None:
            bz, br, hidden = parts(op, rb, 3, 0)
            wb = op.Add(wb, op.Concat(bz, br, op.zeros_like(hidden) if linear_before_reset else hidden, axis=0))

        def step(inner: Op, xt: V, state: list[V]) -> list[V]:
            (h,) = state
            xz, xr, xh = parts(inner, xt, 3, 1)
            z, reset = f(inner, inner.Add(xz, inner.MatMul(h, rz))), f(inner, inner.Add(xr, inner.MatMul(h, rr)))
            if linear_before_reset:
                recurrent = inner.Mul(reset, inner.add(inner.MatMul(h, rh), hidden))
            else:
                recurrent = inner.MatMul(inner.Mul(reset, h), rh)
            new = g(inner, inner.Add(xh, recurrent))
            return [inner.Add(inner.Mul(inner.Sub(1, z), new), inner.Mul(z, h))]

        return wb, step

    return recurrence(op, x, w, r, sequence_lens, [initial_h], direction, layout, cell)


@operator("GRU", 1, absent=NO_CLIP)
def gru_1(
    xp: Xp,
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Host[np.ndarray] | None = None,
    initial_h: Array | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "foward",
    hidden_size: int | None = None,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    """Before opset 3 the reset gate is always applied before the projection."""
    result: tuple[Array, ...] = gru(
        xp,
        x,
        w,
        r,
        b,
        sequence_lens,
        initial_h,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
        activations=activations,
        clip=clip,
        direction=direction,
        hidden_size=hidden_size,
    )
    return result


@gru_1.decomposition
def gru_1_decomposition(
    op: Op,
    x: V,
    w: V,
    r: V,
    b: V,
    sequence_lens: V,
    initial_h: V,
    activation_alpha: Floats | None,
    activation_beta: Floats | None,
    activations: Strings | None,
    clip: float | None,
    direction: str,
    hidden_size: int | None,
    wanted: tuple[bool, ...],
) -> list[V]:
    direction = "forward" if direction == "foward" else direction
    attributes = {"activation_alpha": activation_alpha, "activation_beta": activation_beta, "activations": activations,
                  "clip": clip, "direction": direction, "hidden_size": hidden_size}  # fmt: skip
    return list(op.call("GRU", [x, w, r, b, sequence_lens, initial_h], attributes, len(wanted)))


# --- LSTM -----------------------------------------------------------------------------------------------------------


def lstm_layers(
    xp: Xp,
    operands: tuple[Array, Array, Array, Array | None],
    sequence_lens: np.ndarray | None,
    initial_h: Array | None,
    initial_c: Array | None,
    p: Array | None,
    given: dict[str, Any],
    seen: Function = lambda h: h,
) -> tuple[Array, ...]:
    """Compute an LSTM; `operands` are x, w, r and b, and `seen` is what its steps multiply instead of the state h."""
    layer = RecurrentBase(
        xp, *operands, sequence_lens, 4,
        direction=given["direction"], hidden_size=given["hidden_size"], layout=given["layout"],
    )  # fmt: skip
    parameters = given["activation_alpha"], given["activation_beta"], given["clip"]
    functions = layer.per_direction(given["activations"], ("Sigmoid", "Tanh", "Tanh"), *parameters)
    n = layer.size
    if p is not None:
        layer.expect("P", p, (layer.directions, 3 * n))
    usual = given["activations"] is None and p is None and not (given["clip"] or given["input_forget"])

    def cell(d: int) -> tuple[Array, Step]:
        f, g, h = functions[d]
        recur = layer.r[d].T
        wb, rb = layer.bias(d)
        pi, po, pf = (p[d, k * n : k * n + n] for k in range(3)) if p is not None else (None, None, None)

        def see(gate: Array, peephole: Array | None, c: Array) -> Array:
            return gate if peephole is None else gate + peephole * c

        def step(xt: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            before, c = state
            product = xp.matmul(seen(before), recur)
            if usual and (made := xp.lstm_cell(xt, product, c)) is not None:
                return tuple(made)
            gates = xt + product
            i, o, forget, new = (gates[:, k * n : k * n + n] for k in range(4))
            if p is None and not given["input_forget"]:
                gates[:, : 3 * n] = f(gates[:, : 3 * n])
                c = forget * c + i * g(new)
                return o * h(c), c
            i = f(see(i, pi, c))
            forget = 1 - i if given["input_forget"] else f(see(forget, pf, c))
            c = forget * c + i * g(new)
            return f(see(o, po, c)) * h(c), c

        return wb + rb, step

    return layer.run([layer.initial("initial_h", initial_h), layer.initial("initial_c", initial_c)], cell)


@operator("LSTM", 1, 7, 14, 22, absent=NO_CLIP,
          traits=("product", "finite", "reads_quantized"),
          weights={1: "the weight", 2: "the recurrent weight", 3: "the bias", 7: "the peephole weight"})  # fmt: skip
def lstm(
    xp: Xp,
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Host[np.ndarray] | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    p: Array | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    output_sequence: int = 0,
) -> tuple[Array, ...]:
    """The gates are input, output, forget, cell; with peepholes, the first three depend on the cell state."""
    given = {
        "activations": activations,
        "activation_alpha": activation_alpha,
        "activation_beta": activation_beta,
        "clip": clip,
        "direction": direction,
        "hidden_size": hidden_size,
        "input_forget": input_forget,
        "layout": layout,
    }
    return lstm_layers(xp, (x, w, r, b), sequence_lens, initial_h, initial_c, p, given)


lstm.flops(recurrent)
lstm.shapes(recurrent_shapes)


def lstm_layers_body(
    op: Op,
    operands: tuple[V, V, V, V],
    sequence_lens: V,
    initial_h: V,
    initial_c: V,
    p: V,
    given: dict[str, Any],
    seen: Activation = lambda op, h: h,
) -> tuple[V, ...]:
    """Write `lstm_layers`."""
    x, w, r, b = operands
    parameters = given["activation_alpha"], given["activation_beta"], given["clip"]
    functions = composed_activations(given["activations"], ("Sigmoid", "Tanh", "Tanh"), given["direction"], *parameters)

    def cell(d: int) -> tuple[V, Any]:
        f, g, h = functions[d]
        recur = op.swap(op.Gather(r, d, axis=0), 0, 1)
        wb, rb = biases(op, b, d)
        pi, po, pf = (None, None, None) if p is None else parts(op, op.Gather(p, d, axis=0), 3, 0)

        def see(inner: Op, gate: V, peephole: V, c: V) -> V:
            return gate if peephole is None else inner.Add(gate, inner.Mul(peephole, c))

        def step(inner: Op, xt: V, state: list[V]) -> list[V]:
            before, c = state
            i, o, forget, new = parts(inner, inner.Add(xt, inner.MatMul(seen(inner, before), recur)), 4, 1)
            i = f(inner, see(inner, i, pi, c))
            forget = inner.Sub(1, i) if given["input_forget"] else f(inner, see(inner, forget, pf, c))
            c = inner.Add(inner.Mul(forget, c), inner.Mul(i, g(inner, new)))
            return [inner.Mul(f(inner, see(inner, o, po, c)), h(inner, c)), c]

        return op.add(wb, rb), step

    return recurrence(op, x, w, r, sequence_lens, [initial_h, initial_c], given["direction"], given["layout"], cell)


@lstm.decomposition
def lstm_decomposition(
    op: Op,
    x: V,
    w: V,
    r: V,
    b: V,
    sequence_lens: V,
    initial_h: V,
    initial_c: V,
    p: V,
    activation_alpha: Floats | None,
    activation_beta: Floats | None,
    activations: Strings | None,
    clip: float | None,
    direction: str,
    input_forget: int,
    layout: int,
) -> tuple[V, ...]:
    given = {
        "activations": activations,
        "activation_alpha": activation_alpha,
        "activation_beta": activation_beta,
        "clip": clip,
        "direction": direction,
        "input_forget": input_forget,
        "layout": layout,
    }
    return lstm_layers_body(op, (x, w, r, b), sequence_lens, initial_h, initial_c, p, given)
