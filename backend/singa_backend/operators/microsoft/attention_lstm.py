"""AttnLSTM: an LSTM that also reads a memory by additive attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...errors import OperatorError
from .._recurrence import DIRECTIONS, biases, parts, recurrence
from .._shapes import recurrent_shapes
from ..activation import softmax
from ..recurrent import Floats, RecurrentBase, Step, Strings, composed_activations
from ._api import Array, Host, Op, V, Xp, microsoft

_DEFAULTS = ("Sigmoid", "Tanh", "Tanh")


class _Memory:
    """The memory that an AttnLSTM reads, and the weights of its attention."""

    def __init__(self, xp: Xp, m: Array, lengths: np.ndarray | None, qw: Array, mw: Array, v: Array, aw: Array | None) -> None:
        self.xp, self.m, self.qw, self.mw, self.v, self.aw = xp, m, qw, mw, v, aw
        self.masked = None
        if lengths is not None:
            self.masked = xp.asarray(np.arange(m.shape[1])[None] >= lengths[:, None])

    @property
    def size(self) -> int:
        """The size of what the cell reads."""
        found: int = (self.m if self.aw is None else self.aw).shape[2]
        return found

    def read(self, d: int, keys: Array, h: Array) -> Array:
        """Return what direction d reads with the state h."""
        xp = self.xp
        scores = (self.v[d] * xp.tanh(keys + xp.matmul(h, self.qw[d])[:, None])).sum(axis=2)
        if self.masked is not None:
            scores = xp.where(self.masked, -np.inf, scores)
        context = xp.matmul(softmax(xp, scores, axis=1)[:, None], self.m)[:, 0]
        return context if self.aw is None else xp.matmul(xp.concatenate([h, context], axis=1), self.aw[d])


def _memory(
    xp: Xp,
    layer: RecurrentBase,
    m: Array | None,
    lengths: np.ndarray | None,
    qw: Array | None,
    mw: Array | None,
    v: Array | None,
    aw: Array | None,
) -> _Memory:
    """Return the memory; raise OperatorError for shapes that do not fit the layer."""
    if m is None or qw is None or mw is None or v is None:
        raise OperatorError("AttnLSTM needs QW, MW, V and M", code="SX407")
    if m.ndim != 3 or mw.ndim != 3:
        raise OperatorError(f"M and MW must have 3 axes, got shapes {m.shape} and {mw.shape}", code="SX404")
    dirs, depth, size = layer.directions, m.shape[2], mw.shape[2]
    layer.expect("M", m, (layer.batch, *m.shape[1:]))
    layer.expect("QW", qw, (dirs, layer.size, size))
    layer.expect("MW", mw, (dirs, depth, size))
    layer.expect("V", v, (dirs, size))
    if aw is not None:
        layer.expect("AW", aw, (dirs, depth + layer.size, *aw.shape[2:3]))
    if lengths is not None and (lengths.shape != (layer.batch,) or ((lengths < 1) | (lengths > m.shape[1])).any()):
        raise OperatorError(f"memory_seq_lens must be {layer.batch} numbers in [1, {m.shape[1]}], got {lengths}", code="SX404")
    return _Memory(xp, m, lengths, qw, mw, v, aw)


@microsoft("AttnLSTM", 1, traits=("product",), weights={1: "the weight", 2: "the recurrent weight", 3: "the bias"})
def attention_lstm(
    xp: Xp,
    x: Array,
    w: Array,
    r: Array,
    b: Array | None = None,
    sequence_lens: Host[np.ndarray] | None = None,
    initial_h: Array | None = None,
    initial_c: Array | None = None,
    p: Array | None = None,
    qw: Array | None = None,
    mw: Array | None = None,
    v: Array | None = None,
    m: Array | None = None,
    memory_seq_lens: Host[np.ndarray] | None = None,
    aw: Array | None = None,
    *,
    activation_alpha: Floats | None = None,
    activation_beta: Floats | None = None,
    activations: Strings | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
) -> tuple[Array, ...]:
    """Compute an LSTM of x and what the state before has read; the columns of W are those of x, then of what is read.

    As in onnxruntime, `clip` bounds the gates, and not the cell state where the last activation reads it.
    """
    width = x.shape[-1] if x.ndim else 0
    of_x = w[..., :width]
    layer = RecurrentBase(xp, x, of_x, r, b, sequence_lens, 4, direction=direction, hidden_size=hidden_size, layout=0)
    functions, free = (layer.per_direction(activations, _DEFAULTS, activation_alpha, activation_beta, c) for c in (clip, None))
    memory, n = _memory(xp, layer, m, memory_seq_lens, qw, mw, v, aw), layer.size
    layer.expect("W", w, (layer.directions, 4 * n, width + memory.size))
    if p is not None:
        layer.expect("P", p, (layer.directions, 3 * n))

    def cell(d: int) -> tuple[Array, Step]:
        (f, g, _), h = functions[d], free[d][2]
        recur, of_read = layer.r[d].T, w[d, :, width:].T
        keys = xp.matmul(memory.m, memory.mw[d])
        peephole = xp.zeros((3, n), dtype=x.dtype) if p is None else p[d].reshape(3, n)
        wb, rb = layer.bias(d)

        def step(xt: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            before, c, seen = state
            i, o, forget, new = xp.split(xt + xp.matmul(before, recur) + xp.matmul(seen, of_read), 4, axis=1)
            i = f(i + peephole[0] * c)
            forget = 1 - i if input_forget else f(forget + peephole[2] * c)
            c = forget * c + i * g(new)
            after = f(o + peephole[1] * c) * h(c)
            return after, c, memory.read(d, keys, after)

        return wb + rb, step

    nothing = xp.zeros((layer.directions, layer.batch, memory.size), dtype=x.dtype)
    y, last, cells, _ = layer.run([layer.initial("initial_h", initial_h), layer.initial("initial_c", initial_c), nothing], cell)
    return y, last, cells


attention_lstm.shapes(recurrent_shapes)


@attention_lstm.decomposition
def attention_lstm_body(
    op: Op,
    x: V,
    w: V,
    r: V,
    b: V | None,
    sequence_lens: V | None,
    initial_h: V | None,
    initial_c: V | None,
    p: V | None,
    qw: V,
    mw: V,
    v: V,
    m: V,
    memory_seq_lens: V | None,
    aw: V | None,
    activation_alpha: Floats | None,
    activation_beta: Floats | None,
    activations: Strings | None,
    clip: float | None,
    direction: str,
    input_forget: int,
) -> tuple[V, ...]:
    functions, free = (
        composed_activations(activations, _DEFAULTS, direction, activation_alpha, activation_beta, c) for c in (clip, None)
    )
    width = op.Shape(x, start=2)
    masked = None
    if memory_seq_lens is not None:
        places = op.Range(0, op.Squeeze(op.Shape(m, start=1, end=2), [0]), 1)
        masked = op.GreaterOrEqual(op.Unsqueeze(places, [0]), op.Unsqueeze(op.Cast(memory_seq_lens, to=7), [1]))

    def of(inner: Op, weight: V, d: int) -> V:
        return inner.Gather(weight, d, axis=0)

    def cell(d: int) -> tuple[V, Any]:
        (f, g, _), h = functions[d], free[d][2]
        recur, of_read = (op.swap(of(op, weight, d), 0, 1) for weight in (r, op.Slice(w, width, [2**62], [2])))
        keys, query, vector, wb_rb = op.MatMul(m, of(op, mw, d)), of(op, qw, d), of(op, v, d), biases(op, b, d)
        pi, po, pf = (0, 0, 0) if p is None else parts(op, of(op, p, d), 3, 0)
        layer = None if aw is None else of(op, aw, d)

        def read(inner: Op, state: V) -> V:
            asked = inner.Unsqueeze(inner.MatMul(state, query), [1])
            scores = inner.ReduceSum(inner.Mul(vector, inner.Tanh(inner.Add(keys, asked))), [2], keepdims=0)
            scores = scores if masked is None else inner.Where(masked, -np.inf, scores)
            context = inner.Squeeze(inner.MatMul(inner.Unsqueeze(inner.Softmax(scores, axis=1), [1]), m), [1])
            return context if layer is None else inner.MatMul(inner.Concat(state, context, axis=1), layer)

        def step(inner: Op, xt: V, state: list[V]) -> list[V]:
            before, c, seen = state
            gates = inner.Add(inner.Add(xt, inner.MatMul(before, recur)), inner.MatMul(seen, of_read))
            i, o, forget, new = parts(inner, gates, 4, 1)
            i = f(inner, inner.Add(i, inner.Mul(c, pi)))
            forget = inner.Sub(1, i) if input_forget else f(inner, inner.Add(forget, inner.Mul(c, pf)))
            c = inner.Add(inner.Mul(forget, c), inner.Mul(i, g(inner, new)))
            after = inner.Mul(f(inner, inner.Add(o, inner.Mul(c, po))), h(inner, c))
            return [after, c, read(inner, after)]

        return op.add(*wb_rb), step

    size = op.Shape(m, start=2) if aw is None else op.Shape(aw, start=2)
    batch = op.Concat([len(DIRECTIONS[direction])], op.Shape(x, start=1, end=2), size, axis=0)
    nothing = op.Expand(op.constant(0, op.dtype(x)), batch)
    of_x = op.Slice(w, [0], width, [2])
    y, last, cells, _ = recurrence(op, x, of_x, r, sequence_lens, [initial_h, initial_c, nothing], direction, 0, cell)
    return y, last, cells
