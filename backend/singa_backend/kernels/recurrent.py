"""RNN, GRU and LSTM on oneDNN: all time steps by one primitive; the weights are arranged and packed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

import numpy as np

from . import onednn as dnn
from .lowering import F32, aligned_array, copy, dense_desc, emit, ordered, packed, require_plain, strided_desc, unset
from .onednn import MemoryDesc, Primitive
from .table import Site, kernel, worst
from .values import FINITE, NAN, Bound, Value

DIRECTIONS = {
    "forward": "left2right",
    "foward": "left2right",  # the default of GRU-1, as its schema spells it
    "reverse": "right2left",
    "bidirectional": "bidirectional_concat",
}

Kind = Literal["RNN", "GRU", "LSTM"]

GATES = {"RNN": (0,), "GRU": (0, 1, 2), "LSTM": (0, 2, 3, 1)}
"""The gates in oneDNN's order, as numbers in ONNX's: an LSTM's are input, output, forget, cell."""

SMALL = {"RNN": 1 << 20, "GRU": 1 << 18, "LSTM": 1 << 18}
"""Floating-point operations of a time step's recurrent product up to which one thread is faster than two."""

Move = tuple[Callable[..., Any], tuple[Any, ...]]
Moves = Callable[[np.ndarray, np.ndarray], list[Move]]


def arranged(site: Site, source: Value, what: Any, shape: Sequence[int], moves: Moves) -> Value:
    """An array that `moves(target, source)` compute from another: once for all plans for a constant, otherwise in every run."""
    if source.constant:

        def make() -> Value:
            made = aligned_array(shape, F32)
            for function, arguments in moves(made.array, source.read()):
                function(*arguments)
            return made

        found: Value = site.derived(source, what, make)
        return found
    source = ordered(site, source, range(source.ndim))
    target = site.new(shape, F32, finiteness=source.finiteness)

    def bind() -> Bound:
        return moves(target.array, source.array)

    site.emit(bind, reads=(source,), writes=(target,), kernel="numpy.copyto")
    return target


class RecurrentLayer:
    """A recurrent layer at a site: its sizes, and its operands as oneDNN describes them.

    Args:
        site: the place.
        kind: the operator.
        x: the input.
        w: the weights of the input.
        r: the weights of the state.
        b: the biases of both, or None.
        lengths: the lengths of the sequences, or None.
        states: the initial states, or None.
        training: whether a gradient follows.  That of oneDNN 3.2 reads outside of sequences that are not time first in memory,
            and returns wrong gradients of R for an LSTM without first states, so that it has zeros.
    """

    def __init__(
        self,
        site: Site,
        kind: Kind,
        x: Value,
        w: Value,
        r: Value,
        b: Value | None,
        lengths: Value | None,
        states: Sequence[Value | None],
        training: bool = False,
    ) -> None:
        a, self.site = site.attributes, site
        self.admit(x, w, r, b, *states)
        site.require(x.ndim == w.ndim == r.ndim == 3, "X, W and R do not have 3 axes")
        site.require(a.get("direction") in DIRECTIONS and a.get("layout", 0) in (0, 1), "not a valid direction or layout")
        site.require(not a.get("clip"), "the gates are clipped")
        self.kind, self.training = kind, training
        self.gates, self.layout = GATES[kind], a.get("layout", 0)
        self.direction = DIRECTIONS[a["direction"]]
        self.directions = 2 if a["direction"] == "bidirectional" else 1
        self.sequence = time_first(x) if self.layout else x
        self.time, self.batch, self.width = self.sequence.shape
        self.hidden = r.shape[2]
        rows, sizes = len(self.gates) * self.hidden, (self.directions, self.batch, self.hidden)
        site.require(a.get("hidden_size") in (None, self.hidden), "hidden_size is not that of R")
        site.require(
            w.shape == (self.directions, rows, self.width)
            and r.shape == (self.directions, rows, self.hidden)
            and (b is None or b.shape == (self.directions, 2 * rows)),
            "the shapes do not match",
        )
        if lengths is not None:
            site.require(lengths.constant and lengths.shape == (self.batch,), "the lengths of the sequences depend on the data")
            site.require(bool((lengths.array == self.time).all()), "the lengths of the sequences differ")
        self.states = [None if s is None else time_first(s) if self.layout and s.ndim == 3 else s for s in states]
        site.require(all(s is None or s.shape == sizes for s in self.states), "an initial state has another shape")
        if not training and all(s is None or (s.constant and not s.array.any()) for s in self.states):
            self.states = [None] * len(self.states)
        elif None in self.states:
            zeros = site.constant(np.zeros(sizes, F32))
            self.states = [zeros if s is None else s for s in self.states]
        self.w, self.r, self.b = w, r, b
        self.small = 2 * self.batch * rows * self.hidden <= SMALL[kind]
        self.finiteness = FINITE if worst(x, w, r, b, *states) == FINITE else NAN
        self.describe()

    def admit(self, *values: Value | None) -> None:
        """Decline operands that oneDNN does not take."""
        require_plain(self.site, *values)

    def describe(self) -> None:
        """Describe the input and the states."""
        self.src = self._sequence()
        self.iter = dense_desc(F32, (1, self.directions, self.batch, self.hidden))

    def activations(self, *default: str) -> str:
        """The first activation; declines unless all are the default ones, or Relu in place of the only one."""
        a, site = self.site.attributes, self.site
        names = a.get("activations")
        site.require(not a.get("activation_alpha") and not a.get("activation_beta"), "the activations have parameters")
        if names is None:
            return default[0]
        count = len(default) * self.directions
        site.require(len(names) in (count, len(default) * 2), "not a valid number of activations")
        chosen = [n.lower() for n in names[:count]]
        if len(default) == 1 and chosen == ["relu"] * count:
            return "relu"
        site.require(chosen == [*default] * self.directions, "the activations are not the default ones")
        return default[0]

    # --- operands

    def _sequence(self) -> MemoryDesc:
        """The description of the input: time or batch outermost; copied if it is neither."""
        x = self.sequence
        if self.training:
            self.sequence = x = ordered(self.site, x, (0, 1, 2))
        elif not ((x.shape[1] == 1 or x.strides[1] == x.shape[2] * 4) and (x.shape[2] == 1 or x.strides[2] == 4)):
            batch_first = x.strides[1] > x.strides[0]
            order = (1, 0, 2) if batch_first else (0, 1, 2)
            self.sequence = x = ordered(self.site, x, order)
        return strided(x.shape, x.strides)

    def weights(self, of: Value, wanted: MemoryDesc) -> Value:
        """Weights with the gates in oneDNN's order, in the layout that the primitive has chosen."""
        directions, columns = self.directions, of.shape[2]
        shape = (1, directions, columns, len(self.gates), self.hidden)
        given = dense_desc(F32, shape)

        def moves(target: np.ndarray, source: np.ndarray) -> list[Move]:
            split = source.reshape(directions, len(self.gates), self.hidden, columns)
            return [(np.copyto, (target[0, :, :, i], split[:, gate].transpose(0, 2, 1))) for i, gate in enumerate(self.gates)]

        site, what = self.site, (self.kind, "weights")
        if not of.constant and wanted.strides is not None:
            made = Value(site.scratch(wanted.nbytes), *self.laid_out(wanted), F32, 0, False, of.finiteness)
            for source, target in zip(self.gates_of(ordered(site, of, range(3))), self.gates_in(made), strict=True):
                copy(site, source, target)
            return made
        if not of.constant:
            return packed(site, arranged(site, of, what, shape, moves), given, wanted)

        def make() -> Value:
            made = aligned_array(shape, F32)
            for function, arguments in moves(made.array, of.array):
                function(*arguments)
            return packed(site, made, given, wanted)

        found: Value = site.derived(of, (*what, wanted), make)
        return found

    @staticmethod
    def laid_out(layout: MemoryDesc) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shape and the strides in bytes of weights in a layout without blocks."""
        assert layout.strides is not None
        return layout.shape, tuple(4 * s for s in layout.strides)

    def gates_of(self, weights: Value) -> list[Value]:
        """The gates of weights as ONNX has them in C order, (directions, hidden, columns) each, in oneDNN's order."""
        size = self.hidden * weights.strides[1]
        shape = (self.directions, self.hidden, weights.shape[2])
        return [weights.view(shape, weights.strides, gate * size) for gate in self.gates]

    def gates_in(self, weights: Value) -> list[Value]:
        """The gates of weights as oneDNN has them, (1, directions, columns, gates, hidden), in the shape of `gates_of`."""
        _, directions, columns, count, hidden = weights.shape
        _, outer, column, step, inner = weights.strides
        return [weights.view((directions, hidden, columns), (outer, inner, column), i * step) for i in range(count)]

    def bias(self, apart: bool = False) -> tuple[MemoryDesc, Value]:
        """The sum of the biases of input and state; if `apart`, those of the last gate follow one another."""
        n = len(self.gates)
        shape = (1, self.directions, n + apart, self.hidden)
        if self.b is None:
            return dense_desc(F32, shape), self.site.constant(np.zeros(shape, F32))

        def moves(target: np.ndarray, source: np.ndarray) -> list[Move]:
            both = source.reshape(self.directions, 2, n, self.hidden)
            made: list[Move] = [
                (np.add, (both[:, 0, gate], both[:, 1, gate], target[0, :, i])) for i, gate in enumerate(self.gates)
            ]
            if apart:
                made[-1:] = [(np.copyto, (target[0, :, n - 1 + i], both[:, i, n - 1])) for i in (0, 1)]
            return made

        return dense_desc(F32, shape), arranged(self.site, self.b, (self.kind, "bias", apart), shape, moves)

    def peepholes(self, p: Value | None) -> tuple[MemoryDesc | None, Value | None]:
        """The weights of the cells, in the order input, forget, output; ONNX's is input, output, forget."""
        if p is None:
            return None, None
        require_plain(self.site, p)
        self.site.require(p.shape == (self.directions, 3 * self.hidden), "P has another shape")
        self.finiteness = FINITE if self.finiteness == FINITE == p.finiteness else NAN
        shape = (1, self.directions, 3, self.hidden)

        def moves(target: np.ndarray, source: np.ndarray) -> list[Move]:
            split = source.reshape(self.directions, 3, self.hidden)
            return [(np.copyto, (target[0, :, i], split[:, gate])) for i, gate in enumerate((0, 2, 1))]

        return dense_desc(F32, shape), arranged(self.site, p, (self.kind, "peepholes"), shape, moves)

    def layout_of_weights(self, of: Value) -> MemoryDesc:
        """The description of weights for a primitive that is to be created.

        For a batch of 1 and for RNN the products of a plain layout are faster than those of packed weights.
        """
        layout = self.any_layout(of)
        return dense_desc(F32, layout.shape) if self.batch == 1 or self.kind == "RNN" else layout

    def any_layout(self, of: Value) -> MemoryDesc:
        """The description of weights whose layout a primitive chooses."""
        return unset(F32, (1, self.directions, of.shape[2], len(self.gates), self.hidden))

    # --- results

    def compute(
        self,
        create: Callable[..., Primitive],
        *,
        apart: bool = False,
        peepholes: Value | None = None,
        **options: Any,
    ) -> tuple[Value | None, ...]:
        """Create the primitive, add its steps, and return Y and the last states, None for those that are not used.

        For training, these follow once more, all of them, and the workspace.
        """
        site, cells = self.site, self.kind == "LSTM"
        outputs = (*site.outputs, False, False)[: 3 if cells else 2]
        last = self.training or any(outputs[1:])
        bias_md, bias = self.bias(apart)
        peephole_md, peephole = self.peepholes(peepholes)
        y = self._result()
        y_md = self.described(y)
        first, final = self.ends(y_md, last)
        if peephole_md is not None:
            options["peephole"] = peephole_md
        if self.training:
            options["prop"] = "training"
        layouts = [self.layout_of_weights(self.w), self.layout_of_weights(self.r)]
        with self.threads():
            made = create(*first, *layouts, bias_md, *final, direction=self.direction, **options)
        arguments: dict[int, tuple[MemoryDesc, Value]] = {dnn.args.SRC_LAYER: (self.src, self.sequence)}
        for arg, of in (dnn.args.WEIGHTS_LAYER, self.w), (dnn.args.WEIGHTS_ITER, self.r):
            layout = made.query("argument", arg)
            arguments[arg] = (layout, self.weights(of, layout))
        arguments[dnn.args.BIAS] = (bias_md, bias)
        if peephole_md is not None and peephole is not None:
            arguments[dnn.args.WEIGHTS_PEEPHOLE] = (peephole_md, peephole)
        for arg, state in zip((dnn.args.SRC_ITER, dnn.args.SRC_ITER_C), self.states, strict=False):
            if state is not None:
                arguments[arg] = (self.iter, ordered(site, state, (0, 1, 2)))
        arguments[dnn.args.DST_LAYER] = (y_md, y)
        writes = [y]
        if last:
            for arg in (dnn.args.DST_ITER, dnn.args.DST_ITER_C) if cells else (dnn.args.DST_ITER,):
                writes.append(self.state())
                arguments[arg] = (self.iter, writes[-1])
        count = len(writes)
        if self.training:
            writes.append(site.new((made.workspace_nbytes,), np.uint8, None, FINITE))
            arguments[dnn.args.WORKSPACE] = (made.query("workspace"), writes[-1])
        emit(site, made, arguments, writes, self.kind.lower())
        results = [*writes[:count], *[None] * (len(outputs) - count)]
        used = tuple(v if wanted else None for v, wanted in zip(results, outputs, strict=True))
        return (*used, *(v.view(v.shape, v.strides) for v in writes)) if self.training else used

    def threads(self) -> AbstractContextManager[None]:
        """Create primitives for one thread in the `with` block if the products are small."""
        return dnn.using_threads(1 if self.small else self.site.options.threads)

    def ends(self, y: MemoryDesc | None, last: bool) -> tuple[list[MemoryDesc | None], list[MemoryDesc | None]]:
        """The descriptions of input and first states, and those of Y and of the last states, if there are any."""
        count = len(self.states)
        return [self.src, *[None if s is None else self.iter for s in self.states]], [y, *[self.iter if last else None] * count]

    def described(self, y: Value) -> MemoryDesc:
        """The description of Y or of its gradient: (time, batch, directions * hidden)."""
        strides = (y.strides[1], y.strides[0], 4) if self.layout else (y.strides[0], y.strides[2], 4)
        return strided((self.time, self.batch, self.directions * self.hidden), strides)

    def _result(self) -> Value:
        """Y, with the directions next to the hidden size in memory."""
        t, d, b, h = self.time, self.directions, self.batch, self.hidden
        if self.layout:
            return self.site.new((b, t, d, h), F32, (1, 0, 2, 3) if self.training else None, self.finiteness)
        return self.site.new((t, d, b, h), F32, (0, 2, 1, 3), self.finiteness)

    def state(self) -> Value:
        """A last state, with the directions outermost in memory."""
        d, b, h = self.directions, self.batch, self.hidden
        if self.layout:
            return self.site.new((b, d, h), F32, (1, 0, 2), self.finiteness)
        return self.site.new((d, b, h), F32, finiteness=self.finiteness)


def time_first(x: Value) -> Value:
    """A view with the first two axes exchanged."""
    return x.view((x.shape[1], x.shape[0], x.shape[2]), (x.strides[1], x.strides[0], x.strides[2]))


def strided(shape: Sequence[int], strides: Sequence[int]) -> MemoryDesc:
    """The description of (time, batch, channels) with dense channels; axes of size 1 have the strides of the next."""
    t, b, c = shape
    return strided_desc(F32, shape, (strides[0] if t > 1 else 4 * b * c, strides[1] if b > 1 else 4 * c, 4))


@kernel("RNN", 1, 7, 14, 22, on="onednn")
def rnn(
    site: Site,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
) -> tuple[Value | None, ...]:
    """A layer with Tanh, or with Relu for finite values."""
    layer = RecurrentLayer(site, "RNN", x, w, r, b, lengths, [initial_h])
    activation = layer.activations("tanh")
    if activation == "relu":
        site.require(layer.finiteness == FINITE, "Relu of oneDNN does not return NaN")
        site.needs_finite()
    return layer.compute(dnn.rnn, activation=activation)


@kernel("GRU", 1, 3, 7, 14, 22, on="onednn")
def gru(
    site: Site,
    x: Value,
    w: Value,
    r: Value,
    b: Value | None = None,
    lengths: Value | None = None,
    initial_h: Value | None = None,
) -> tuple[Value | None, ...]:
    """A layer whose reset gate is applied before or after the product of the state."""
    layer = RecurrentLayer(site, "GRU", x, w, r, b, lengths, [initial_h])
    layer.activations("sigmoid", "tanh")
    after = bool(site.attributes.get("linear_before_reset", 0))
    return layer.compute(dnn.gru, apart=after, linear_before_reset=after)


@kernel("LSTM", 1, 7, 14, 22, on="onednn")
def lstm(
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
    """A layer with or without peepholes."""
    layer = RecurrentLayer(site, "LSTM", x, w, r, b, lengths, [initial_h, initial_c])
    layer.activations("sigmoid", "tanh", "tanh")
    site.require(not site.attributes.get("input_forget"), "the input and forget gates are coupled")
    return layer.compute(dnn.lstm, peepholes=p)
