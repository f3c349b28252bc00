"""LSTM and GRU in training form, and their gradients, on oneDNN: all time steps by one primitive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from . import onednn as dnn
from .float_products import require_any_bits
from .lowering import F32, copy, emit, ordered, require_plain
from .onednn import MemoryDesc, Primitive, backward
from .recurrent import Kind, RecurrentLayer, strided, time_first
from .table import Site, gradient, training, worst
from .values import FINITE, NAN, Bound, Value

_LSTM, _GRU = (1, 7, 14, 22), (3, 7, 14, 22)

_STATES = (dnn.args.SRC_ITER, dnn.args.SRC_ITER_C)
_DIFF_STATES = (dnn.args.DIFF_SRC_ITER, dnn.args.DIFF_SRC_ITER_C)
_LASTS = (dnn.args.DST_ITER, dnn.args.DST_ITER_C)
_DIFF_LASTS = (dnn.args.DIFF_DST_ITER, dnn.args.DIFF_DST_ITER_C)


def _takes(attributes: dict[str, Any], needs: Sequence[bool], default: tuple[str, ...]) -> bool:
    """Whether the activations are the default ones, nothing is clipped, and there are no gradients of peepholes."""
    names = attributes.get("activations")
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    plain = names is None or tuple(n.lower() for n in names) == default * directions
    other = ("activation_alpha", "activation_beta", "clip", "input_forget")
    return plain and not any(attributes.get(n) for n in other) and not any(needs[7:])


def _layer(
    site: Site, kind: Kind, x: Value, w: Value, r: Value, b: Value | None, lengths: Value | None, states: Sequence[Value | None]
) -> tuple[RecurrentLayer, bool]:
    """The layer, and whether it is a GRU with the reset gate after the product."""
    layer = RecurrentLayer(site, kind, x, w, r, b, lengths, states, training=True)
    if kind == "GRU":  # for an LSTM the values that are not finite are those of the definition
        site.require_finite(x, w, r, b, *states)
        layer.finiteness = FINITE
    return layer, bool(site.attributes.get("linear_before_reset", 0))


@training("LSTM", *_LSTM)
def lstm_training(
    site: Site,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
    initial_c: Value | None = None,
    p: Value | None = None,
) -> tuple[Value | None, ...]:
    """An LSTM that also returns all its outputs and the workspace."""
    require_any_bits(site)
    site.require(p is None, "there are peepholes")
    layer, _ = _layer(site, "LSTM", x, w, r, b, lengths, [initial_h, initial_c])
    return layer.compute(dnn.lstm)


@training("GRU", *_GRU)
def gru_training(
    site: Site,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
) -> tuple[Value | None, ...]:
    """A GRU that also returns all its outputs and the workspace."""
    require_any_bits(site)
    layer, after = _layer(site, "GRU", x, w, r, b, lengths, [initial_h])
    return layer.compute(dnn.gru, apart=after, linear_before_reset=after)


@gradient(
    "LSTM",
    *_LSTM,
    reads=("dy0?", "dy1?", "dy2?", "x0", "x1", "x2", "x3?", "x4?", "x5?", "x6?", "h0", "h1", "h2", "h3"),
    takes=partial(_takes, default=("sigmoid", "tanh", "tanh")),
    hidden=4,
)
def lstm_gradient(
    site: Site,
    dy: Value | None,
    dh: Value | None,
    dc: Value | None,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None,
    lengths: Value | None,
    initial_h: Value | None,
    initial_c: Value | None,
    y: Value,
    h: Value,
    c: Value,
    workspace: Value,
) -> tuple[Value | None, ...]:
    """The gradients of an LSTM for its input, its weights, its biases and its first states."""
    layer, _ = _layer(site, "LSTM", x, w, r, b, lengths, [initial_h, initial_c])
    return RecurrentGradient(layer, x, dnn.lstm, backward.lstm_backward).emit((dy, dh, dc), (y, h, c), workspace)


@gradient(
    "GRU",
    *_GRU,
    reads=("dy0?", "dy1?", "x0", "x1", "x2", "x3?", "x4?", "x5?", "h0", "h1", "h2"),
    takes=partial(_takes, default=("sigmoid", "tanh")),
    hidden=3,
)
def gru_gradient(
    site: Site,
    dy: Value | None,
    dh: Value | None,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None,
    lengths: Value | None,
    initial_h: Value | None,
    y: Value,
    h: Value,
    workspace: Value,
) -> tuple[Value | None, ...]:
    """The gradients of a GRU for its input, its weights, its biases and its first state."""
    layer, after = _layer(site, "GRU", x, w, r, b, lengths, [initial_h])
    forward, reverse = (partial(f, linear_before_reset=after) for f in (dnn.gru, backward.gru_backward))
    return RecurrentGradient(layer, x, forward, reverse, after).emit((dy, dh), (y, h), workspace)


class RecurrentGradient:
    """The gradient of a layer.

    Args:
        layer: the layer.
        x: its input.
        forward: creates the layer.
        reverse: creates its gradient.
        apart: whether the biases of the last gate follow one another.
    """

    def __init__(
        self,
        layer: RecurrentLayer,
        x: Value,
        forward: Callable[..., Primitive],
        reverse: Callable[..., Primitive],
        apart: bool = False,
    ) -> None:
        self.layer, self.site, self.x = layer, layer.site, x
        self.forward, self.reverse, self.apart = forward, reverse, apart

    def emit(self, dys: Sequence[Value | None], ys: Sequence[Value], workspace: Value) -> tuple[Value | None, ...]:
        """Add the steps.

        Args:
            dys: the gradients of Y and of the last states.
            ys: Y and the last states.
            workspace: of the forward primitive.
        """
        layer, site, args = self.layer, self.site, dnn.args
        require_plain(site, *dys)
        layer.finiteness = FINITE if layer.finiteness == FINITE == worst(*dys) else NAN
        if layer.kind == "GRU":
            site.require_finite(*dys)
            layer.finiteness = FINITE
        wanted = (*site.outputs, *[False] * 7)[:7]
        y_md = layer.described(ys[0])
        dy = self._sequence(dys[0], ys[0])
        dx, dx_md = self._dx()
        bias_md, bias = layer.bias(self.apart)
        made, hint = self._primitives(y_md, bias_md, dx_md, layer.described(dy))
        arguments: dict[int, tuple[MemoryDesc, Value]] = {
            args.SRC_LAYER: (layer.src, layer.sequence), args.BIAS: (bias_md, bias), args.DST_LAYER: (y_md, ys[0]),
            args.DIFF_DST_LAYER: (layer.described(dy), dy), args.WORKSPACE: (hint.query("workspace"), workspace),
            args.DIFF_SRC_LAYER: (dx_md, dx),
        }  # fmt: skip
        for arg, of in (args.WEIGHTS_LAYER, layer.w), (args.WEIGHTS_ITER, layer.r):
            layout = made.query("argument", arg)
            arguments[arg] = (layout, layer.weights(of, layout))
        starts = []
        for n, state in enumerate(layer.states):
            arguments[_LASTS[n]] = (layer.iter, ys[1 + n])
            arguments[_DIFF_LASTS[n]] = (layer.iter, self._last(dys[1 + n]))
            assert state is not None  # in training
            starts.append(layer.state())
            arguments[_STATES[n]] = (layer.iter, ordered(site, state, (0, 1, 2)))
            arguments[_DIFF_STATES[n]] = (layer.iter, starts[-1])
        diffs = []
        for arg in (args.DIFF_WEIGHTS_LAYER, args.DIFF_WEIGHTS_ITER):
            layout = made.query("argument", arg)
            diffs.append(Value(site.scratch(layout.nbytes), *layer.laid_out(layout), F32, 0, False, layer.finiteness))
            arguments[arg] = (layout, diffs[-1])
        biases = site.new(bias_md.shape, F32, None, layer.finiteness)
        arguments[args.DIFF_BIAS] = (bias_md, biases)
        emit(site, made, arguments, [dx, *starts, *diffs, biases], f"{layer.kind.lower()} gradient")
        weights = [self._unpacked(d, of) if n else None for d, of, n in zip(diffs, (layer.w, layer.r), wanted[1:3], strict=True)]
        db = self._biases(biases) if wanted[3] else None
        first = [s if n else None for s, n in zip(starts, wanted[5:], strict=False)]
        return (dx if wanted[0] else None, *weights, db, None, *first, None, None)[: len(site.outputs)]

    def _primitives(self, y: MemoryDesc, bias: MemoryDesc, dx: MemoryDesc, dy: MemoryDesc) -> tuple[Primitive, Primitive]:
        """The gradient, and the layer in training form."""
        layer = self.layer
        first, final = layer.ends(y, True)
        weights = [layer.layout_of_weights(layer.w), layer.layout_of_weights(layer.r)]
        chosen = [layer.any_layout(layer.w), layer.any_layout(layer.r)]
        with layer.threads():
            hint = self.forward(*first, *weights, bias, *final, direction=layer.direction, prop="training")
            given = [*first, *chosen, bias, *final]
            diffs = [dx, *first[1:], *chosen, bias, dy, *final[1:]]
            return self.reverse(given, diffs, hint=hint, direction=layer.direction), hint

    def _sequence(self, dy: Value | None, y: Value) -> Value:
        """The gradient of Y with the directions next to the hidden size in memory; zeros if nothing depends on Y."""
        if dy is None:
            zeros = self.site.constant(np.zeros((y.size,), F32))
            return zeros.view(y.shape, y.strides)
        t, b, d = (1, 0, 2) if self.layer.layout else (0, 2, 1)
        size = self.layer.hidden * 4
        inner = (dy.shape[3] == 1 or dy.strides[3] == 4) and (dy.shape[d] == 1 or dy.strides[d] == size)
        row = size * dy.shape[d]
        outer = all(dy.shape[i] == 1 or (dy.strides[i] >= row and dy.strides[i] % row == 0) for i in (t, b))
        if inner and outer:
            return dy
        return ordered(self.site, dy, (t, b, d, 3))

    def _last(self, dy: Value | None) -> Value:
        """The gradient of a last state, (directions, batch, hidden); zeros if nothing depends on it."""
        layer = self.layer
        if dy is None:
            return self.site.constant(np.zeros((layer.directions, layer.batch, layer.hidden), F32))
        return ordered(self.site, time_first(dy) if layer.layout else dy, (0, 1, 2))

    def _dx(self) -> tuple[Value, MemoryDesc]:
        """The gradient of the input, in the memory order of the input, and its description."""
        layer = self.layer
        dx = self.site.new(self.x.shape, F32, (1, 0, 2) if self.x.strides[1] > self.x.strides[0] else (0, 1, 2), layer.finiteness)
        first = time_first(dx) if layer.layout else dx
        return dx, strided(first.shape, first.strides)

    def _unpacked(self, diff: Value, of: Value) -> Value:
        """The gradient of weights, in ONNX's order of gates and axes."""
        dw = self.site.new(of.shape, F32, None, diff.finiteness)
        for source, target in zip(self.layer.gates_in(diff), self.layer.gates_of(dw), strict=True):
            copy(self.site, source, target)
        return dw

    def _biases(self, diff: Value) -> Value:
        """The gradient of the biases of input and state: equal but for a last gate whose biases are apart."""
        layer, n = self.layer, len(self.layer.gates)
        assert layer.b is not None
        db = self.site.new(layer.b.shape, F32, None, diff.finiteness)

        def bind() -> Bound:
            both, source = db.array.reshape(layer.directions, 2, n, layer.hidden), diff.array[0]
            made = []
            for i, gate in enumerate(layer.gates):
                for side in (0, 1):
                    made.append((np.copyto, (both[:, side, gate], source[:, i + side * (self.apart and i == n - 1)])))
            return made

        self.site.emit(bind, reads=(diff,), writes=(db,), kernel="numpy.copyto")
        return db
