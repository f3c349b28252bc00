"""RNN, GRU and LSTM by machine code: the inputs of all time steps as one product, then a loop over the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..elementwise.builder import LANES
from ..gemm.frame import FIELDS
from ..gemm.repeat import TURNS, RepeatedCall, repeat, table_of
from ..ir.sizes import now
from ..ir.versioned import versioned
from . import onednn as dnn
from .copies import emit_copy
from .expressions import ExpressionCall, compute, trace
from .float_products import FloatProduct, FloatProductStep, declined
from .frames import FrameAddress, FrameStep
from .lowering import F32, derived
from .recurrent import RecurrentLayer
from .table import Site, kernel
from .values import Bound, Value


class GateCalls:
    """Elementwise calls, each of which reads values or results of earlier ones."""

    def __init__(self) -> None:
        self.calls: list[ExpressionCall] = []

    def call(self, name: str, *operands: Value | int) -> int:
        """Add a call; returns the number of its result."""
        self.calls.append(ExpressionCall(versioned("", name, 14 if name in ("Add", "Sub", "Mul") else 13), {}, operands))
        return len(self.calls) - 1

    def write(self, site: Site, results: Sequence[tuple[int, Value]]) -> None:
        """Emit the step that writes results to values."""
        terms, inputs = trace(site, self.calls)
        into = dict(enumerate(v for _, v in results))
        made = compute(site, [terms[i] for i, _ in results], inputs, "gates", into=into, engine="machine")
        same = (y.buffer is v.buffer and y.offset == v.offset for y, (_, v) in zip(made, results, strict=True))
        site.require(all(same), "a result is elsewhere")


def repeated(site: Site, count: Any, moves: Mapping[int, Any], emit: Callable[[], None]) -> None:
    """Emit the steps of each turn, as one step: only addresses differ from turn to turn.

    Args:
        site: the place.
        count: the turns.
        moves: the bytes from a turn to the next of the values in some buffers, by the id of the buffer.
        emit: emits the steps of the first turn.
    """
    mark = len(site.steps)
    emit()
    if count < 2:
        return
    turn = site.steps[mark:]
    del site.steps[mark:]
    first = [s.bind for s in turn if isinstance(s.bind, FrameStep)]
    site.require(len(first) == len(turn) and not any(p.inner for p in first), "a step is not machine code")
    bind = RepeatedStep(count, [first, [p.moved_by(moves) for p in first]])
    reads = {id(v): v for s in turn for v in s.reads}
    writes = {id(v): v for s in turn for v in s.writes}
    site.emit(bind, reads=[*reads.values()], writes=[*writes.values()], kernel="machine.steps", keeps=turn)


class RepeatedStep:
    """Binds steps that are repeated.

    Attributes:
        parts: the steps of the first two turns.
    """

    def __init__(self, count: Any, parts: Sequence[Sequence[FrameStep]]) -> None:
        self._count, self.parts = count, parts
        self._function = repeat().compiled()
        self._table: np.ndarray | None = None
        self._grown = b""

    def __call__(self) -> Bound:
        for part in (*self.parts[0], *self.parts[1]):
            if part.moved or not part.is_written:
                part()
        first, second = (np.concatenate([p.frames[1] for p in turn]) for turn in self.parts)
        growth = second - first
        (grown,) = growth.nonzero()
        if self._table is None or grown.tobytes() != self._grown:
            calls = [RepeatedCall(a.function.address, a.frames[1], b.frames[1]) for a, b in zip(*self.parts, strict=True)]
            self._table, self._growth = table_of(calls)
            self._grown, self._contents = grown.tobytes(), self._table[-first.size :]
            numbers = {"count": 0, "calls": len(calls), "entry": 8 * (self._table.size - 2 * first.size) // len(calls)}
            self._frame = np.array([[0, 1, 0, 1, *(numbers[n] for n in TURNS.numbers), self._table.ctypes.data]] * 2, np.int64)
            self._turns, self._address = self._frame[:, FIELDS + TURNS.numbers.index("count")], FrameAddress(self._frame)
        self._contents[:], self._table[self._growth] = first, growth[grown]
        self._turns[:] = now(self._count)
        return [(self._function.call, (self._address,))]


class CodeLayer(RecurrentLayer):
    """A recurrent layer whose steps are machine code.

    Attributes:
        count: the number of gates.
        parts: the gates that a product of the state computes: the first one, and their number.
        summed: the gates, from the first, to which the bias of the state is added before the steps.
        slots: Y with a time step more at each end, for the first states: (directions, time + 2, batch, hidden).
    """

    parts: Sequence[tuple[int, int]]
    summed: int

    def admit(self, *values: Value | None) -> None:
        """Decline unless machine code computes the layer."""
        reason = declined(self.site)
        self.site.require(not reason, reason)
        self.site.require(all(v is None or (v.dtype == F32 and v.size) for v in values), "not float32, or empty")

    def describe(self) -> None:
        """Make room for Y."""
        self.count = len(self.gates)
        self.slots = self.site.new((self.directions, self.time + 2, self.batch, self.hidden), F32, finiteness=self.finiteness)

    def turns(self, direction: int) -> bool:
        """Whether a direction begins at the end."""
        return direction == 1 or self.direction == "right2left"

    def state_at(self, direction: int, slot: int) -> Value:
        """The state of a slot: (batch, hidden)."""
        s = self.slots.strides
        return self.slots.view((self.batch, self.hidden), s[2:], slot * s[1] + direction * s[0])

    def run(self, gates: Callable[[CodeStep], None], cells: int) -> tuple[Value | None, ...]:
        """Emit the steps of all directions.

        Args:
            gates: emits what follows the product of the input in a time step.
            cells: the number of states.

        Returns:
            Y and the last states, None for those that are not used.
        """
        site, t, d, b, h = self.site, self.time, self.directions, self.batch, self.hidden
        alone = self.small or site.options.threads == 1 or dnn.library() is None
        site.require(alone, "several threads are faster")
        outputs = (*site.outputs, False, False)[: 1 + cells]
        last = [site.new((d, b, h), F32, finiteness=self.finiteness) for _ in range(cells)]
        for direction in range(d):
            turned = self.turns(direction)
            z = self._inputs(direction)
            cell = [site.new((b, h), F32, finiteness=self.finiteness) for _ in range(cells - 1)]
            begin = [self.state_at(direction, t + 1 if turned else 0), *cell]
            for state, given in zip(begin, self.states, strict=True):
                self._set(state, None if given is None else _part(given, direction))
            one, forward = CodeStep(self, direction, z, cell), -1 if turned else 1
            one.move(t - 1 if turned else 0, turned)
            moves = {id(v.buffer): forward * v.strides[axis] for v, axis in ((self.slots, 1), (z, 0))}
            repeated(site, t, moves, partial(gates, one))
            final = [self.state_at(direction, 1 if turned else t), *cell]
            for state, target, used in zip(final, last, outputs[1:], strict=True):
                if used:
                    self._set(_part(target, direction), state)
        s = self.slots.strides
        shape, steps = ((b, t, d, h), (s[2], s[1], s[0], s[3])) if self.layout else ((t, d, b, h), (s[1], s[0], s[2], s[3]))
        y = self.slots.view(shape, steps, s[1])
        if self.layout:
            last = [v.view((b, d, h), (v.strides[1], v.strides[0], v.strides[2])) for v in last]
        return tuple(v if used else None for v, used in zip((y, *last), outputs, strict=True))

    def _set(self, target: Value, source: Value | None) -> None:
        """Copy a state, or zeros."""
        site, zero = self.site, self.site.number(0, F32)
        source = zero.view(target.shape, (0,) * target.ndim) if source is None else source
        emit_copy(site, source, target)

    def _inputs(self, direction: int) -> Value:
        """The products of the inputs of all steps: (time, batch, gates * hidden)."""
        x, w, size = self.sequence, self.w, self.count * self.hidden
        z = self.site.new((self.time, self.batch, size), F32, finiteness=self.finiteness)
        rows = [(self.time, x.strides[0]), (self.batch, x.strides[1])]
        part = replace(w, offset=w.offset + direction * w.strides[0])
        depth, columns = (self.width, x.strides[2], w.strides[2]), (size, w.strides[1])
        product = FloatProduct(z.shape, x, part, rows, (0, 1), depth, columns, 2)
        FloatProductStep(self.site, product).emit(z, self.bias_of(direction), (), 0, self.finiteness)
        return z

    def bias_of(self, direction: int) -> Value | None:
        """The biases of the input, and those of the state that are added to them."""
        n, added = self.count * self.hidden, self.summed * self.hidden

        def total(given: np.ndarray) -> np.ndarray:
            both = given[direction].reshape(2, n)
            return np.concatenate([both[0, :added] + both[1, :added], both[0, added:]])

        return self._of_biases("bias", direction, n, total)

    def last_bias(self, direction: int) -> Value | None:
        """The bias of the state in the last gate, for the columns of all tiles."""
        h = self.hidden
        return self._of_biases("last bias", direction, -h % LANES + h, lambda b: np.pad(b[direction, -h:], (0, -h % LANES)))

    def _of_biases(self, what: str, direction: int, size: int, make: Callable[[np.ndarray], np.ndarray]) -> Value | None:
        """An array that is made from the biases, once if they are constant; None without any."""
        b, site = self.b, self.site
        if b is None:
            return None
        if b.constant:
            return derived(site, b, (self.kind, what, self.summed, direction), lambda: make(b.read()))
        y = site.new((size,), F32, finiteness=b.finiteness)
        site.emit(lambda: [(_write, (make, b.array, y.array))], reads=(b,), writes=(y,), kernel="numpy.biases")
        return y


def _write(make: Callable[[np.ndarray], np.ndarray], source: np.ndarray, target: np.ndarray) -> None:
    target[...] = make(source)


def _part(v: Value, direction: int) -> Value:
    """A state of one direction."""
    return v.view(v.shape[1:], v.strides[1:], direction * v.strides[0])


class CodeStep:
    """A time step of a direction.

    Attributes:
        layer: the layer.
        direction: the direction.
        h: the state before the step.
        result: the state after it.
        z: the products of the gates, one after the other.
        room: for another value of a gate.
        cell: the other states.
    """

    h: Value
    result: Value
    z: Value

    def __init__(self, layer: CodeLayer, direction: int, z: Value, cell: list[Value]) -> None:
        self.layer, self.direction, self._all, self.cell = layer, direction, z, cell
        self.room = layer.site.new((layer.batch, layer.hidden), F32, finiteness=layer.finiteness)
        self.move(0, False)
        self.weights = {part: self._product(*part, self.h).weights() for part in layer.parts}

    def move(self, t: int, turned: bool) -> None:
        """Go to a time step."""
        layer = self.layer
        self.h = layer.state_at(self.direction, t + 2 if turned else t)
        self.result = layer.state_at(self.direction, t + 1)
        self.z = self._all.view(self._all.shape[1:], self._all.strides[1:], t * self._all.strides[0])

    def gate(self, first: int, count: int = 1) -> Value:
        """The part of some gates."""
        h = self.layer.hidden
        return self.z.view((self.layer.batch, count * h), self.z.strides, first * h * F32.itemsize)

    def add(self, h: Value, first: int, count: int) -> None:
        """Emit the product of a state and the weights of gates, which is added to what is there."""
        self._product(first, count, h).emit(
            self.gate(first, count), None, (), 0, self.layer.finiteness, self.weights[first, count]
        )

    def set(self, h: Value, first: int, into: Value, bias: Value | None) -> None:
        """Emit the product of a state and the weights of a gate, and a bias."""
        self._product(first, 1, h, adds=False).emit(into, bias, (), 0, self.layer.finiteness, self.weights[first, 1])

    def _product(self, first: int, count: int, h: Value, adds: bool = True) -> FloatProductStep:
        layer, r = self.layer, self.layer.r
        size = count * layer.hidden
        part = replace(r, offset=r.offset + self.direction * r.strides[0] + first * layer.hidden * r.strides[1])
        depth, columns = (layer.hidden, h.strides[1], r.strides[2]), (size, r.strides[1])
        product = FloatProduct((layer.batch, size), h, part, [(layer.batch, h.strides[0])], (0,), depth, columns, 1)
        return FloatProductStep(layer.site, product, adds)


@kernel("RNN", 1, 7, 14, 22, on="machine")
def rnn_by_code(
    site: Site, x: Value, w: Value, r: Value, b: Value | None = None, lengths: Value | None = None, initial_h: Value | None = None
) -> tuple[Value | None, ...]:
    """A layer with Tanh or Relu."""
    layer = CodeLayer(site, "RNN", x, w, r, b, lengths, [initial_h])
    layer.summed, layer.parts = 1, [(0, 1)]
    activation = layer.activations("tanh").capitalize()

    def step(s: CodeStep) -> None:
        s.add(s.h, 0, 1)
        f = GateCalls()
        f.write(site, [(f.call(activation, s.z), s.result)])

    return layer.run(step, 1)


@kernel("GRU", 1, 3, 7, 14, 22, on="machine")
def gru_by_code(
    site: Site, x: Value, w: Value, r: Value, b: Value | None = None, lengths: Value | None = None, initial_h: Value | None = None
) -> tuple[Value | None, ...]:
    """A layer whose reset gate is applied before or after the product of the state."""
    layer = CodeLayer(site, "GRU", x, w, r, b, lengths, [initial_h])
    layer.activations("sigmoid", "tanh")
    after = bool(site.attributes.get("linear_before_reset", 0))
    layer.summed, layer.parts = 2 if after else 3, [(0, 2), (2, 1)]
    apart = [layer.last_bias(d) if after else None for d in range(layer.directions)]

    def mixed(f: GateCalls, s: CodeStep, hidden: int) -> None:
        z = f.call("Sigmoid", s.gate(0))
        kept = f.call("Mul", f.call("Sub", Value.of(np.array(1, F32)), z), hidden)
        f.write(site, [(f.call("Add", kept, f.call("Mul", z, s.h)), s.result)])

    def step(s: CodeStep) -> None:
        s.add(s.h, 0, 2)
        f = GateCalls()
        if after:
            s.set(s.h, 2, s.room, apart[s.direction])
            reset = f.call("Mul", f.call("Sigmoid", s.gate(1)), s.room)
            return mixed(f, s, f.call("Tanh", f.call("Add", s.gate(2), reset)))
        f.write(site, [(f.call("Mul", f.call("Sigmoid", s.gate(1)), s.h), s.room)])
        s.add(s.room, 2, 1)
        f = GateCalls()
        return mixed(f, s, f.call("Tanh", s.gate(2)))

    return layer.run(step, 1)


@kernel("LSTM", 1, 7, 14, 22, on="machine")
def lstm_by_code(
    site: Site, x: Value, w: Value, r: Value, b: Value | None = None, lengths: Value | None = None,
    initial_h: Value | None = None, initial_c: Value | None = None, p: Value | None = None,
) -> tuple[Value | None, ...]:  # fmt: skip
    """A layer with or without peepholes."""
    layer = CodeLayer(site, "LSTM", x, w, r, b, lengths, [initial_h, initial_c])
    layer.summed, layer.parts = 4, [(0, 4)]
    layer.activations("sigmoid", "tanh", "tanh")
    site.require(not site.attributes.get("input_forget"), "the input and forget gates are coupled")
    site.require(p is None or (p.shape == (layer.directions, 3 * layer.hidden) and p.dtype == F32), "P has another shape")

    def step(s: CodeStep) -> None:
        s.add(s.h, 0, 4)
        f, (c,) = GateCalls(), s.cell

        def gate(i: int, cell: Value | int) -> int:
            z: Value | int = s.gate(i)
            if p is not None:
                seen = p.view((layer.hidden,), p.strides[1:], s.direction * p.strides[0] + i * layer.hidden * p.strides[1])
                z = f.call("Add", z, f.call("Mul", seen, cell))
            return f.call("Sigmoid", z)

        forgotten = f.call("Mul", gate(2, c), c)
        cell = f.call("Add", forgotten, f.call("Mul", gate(0, c), f.call("Tanh", s.gate(3))))
        f.write(site, [(f.call("Mul", gate(1, cell), f.call("Tanh", cell)), s.result), (cell, c)])

    return layer.run(step, 2)
