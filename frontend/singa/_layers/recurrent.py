"""Recurrent layers, built from ONNX's operators RNN, LSTM and GRU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np

from singa_backend import dtypes
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.base import OperatorFunction

from .._core import random, tape, trace
from .._core.tensor import Tensor, op
from .base import Layer

_MODES = {"vanilla": ("RNN", "r"), "tanh": ("RNN", "r"), "relu": ("RNN", "r"), "lstm": ("LSTM", "ifgo"), "gru": ("GRU", "rzn")}
"""The operator of each mode, and its gates in the order of the packed weights."""

_ORDER = {"RNN": "r", "LSTM": "iofg", "GRU": "zrn"}
"""The gates in ONNX's order."""


class _Common(TypedDict):
    """The attributes that a layer passes to every recurrent operator."""

    hidden_size: int
    direction: str


class RNN_Base(Layer):
    """The base class of recurrent layers: it runs `num_layers` layers in one or two directions.

    Inputs xs: a list of Tensors (N, input), one per time step, or a Tensor (time, N, input), with `batch_first` (N, time, input).
    Initial states: (N, hidden) or (num_layers * directions, N, hidden); zeros if None; the last states have the same form.
    Outputs: those of the last layer, as a list of Tensors (N, directions * hidden) or one Tensor, in the form of the inputs.
    Names of parameters of later layers and of the backward direction end in `_l1`, `_reverse`, `_l1_reverse`.

    Args:
        input_size: Number of input features.
        hidden_size: Number of features of the hidden state.
        num_layers: Number of layers, each of which takes the outputs of the one before.
        bias: Whether biases are added.
        batch_first: Whether the first axis of inputs and outputs given as one Tensor is the batch.
        dropout: Probability that an element of the inputs of the second and later layers is set to 0 in training.
        bidirectional: Whether a second direction runs from the last time step to the first.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int,
        bias: bool,
        batch_first: bool,
        dropout: float,
        bidirectional: bool,
    ) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first, self.dropout, self.bidirectional = bias, batch_first, dropout, bidirectional

    @property
    def directions(self) -> int:
        """The number of directions: 2 if bidirectional, otherwise 1."""
        return 2 if self.bidirectional else 1

    def step_forward(self, *args: Any) -> Any:
        """Compute one time step; defined by subclasses.

        Args:
            *args: The input of the step, then the states.

        Returns:
            The new states.

        Raises:
            NotImplementedError: If the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__} must define step_forward")

    def _suffixes(self) -> list[list[str]]:
        """The suffixes of parameter names, for each layer and direction."""
        ends = ["", "_reverse"][: self.directions]
        return [[(f"_l{i}" if i else "") + end for end in ends] for i in range(self.num_layers)]

    def _inputs(self, layer: int) -> int:
        """The number of input features of a layer."""
        return self.input_size if layer == 0 else self.hidden_size * self.directions

    def _gated(self, xs: Any, gates: str) -> None:
        """Create the parameters of a layer with gates, whose letters end the names."""
        x = xs if isinstance(xs, Tensor) else xs[0]
        for i, ends in enumerate(self._suffixes()):
            for end in ends:
                for gate in gates:
                    self._param(f"Wx_{gate}{end}", (self._inputs(i), self.hidden_size), x, std=0.01)
                for gate in gates:
                    self._param(f"Wh_{gate}{end}", (self.hidden_size, self.hidden_size), x, std=0.01)
                for kind in ("Bx", "Bh") if self.bias else ():
                    for gate in gates:
                        self._param(f"{kind}_{gate}{end}", (self.hidden_size,), x)

    def _time_first(self, xs: Any) -> Tensor:
        """The inputs as (time, N, input)."""
        if not isinstance(xs, Tensor):
            if not xs:
                raise InvalidInput(f"the input sequence of {type(self).__name__} must not be empty", code="SX325")
            joined = op.Concat(*(op.Unsqueeze(x, [0]) for x in xs), axis=0)
        else:
            joined = op.Transpose(xs, perm=[1, 0, 2]) if self.batch_first else xs
        if isinstance(joined.shape[-1], int) and joined.shape[-1] != self.input_size:
            what = f"inputs of {self._path() or type(self).__name__} must have {self.input_size} features, got {joined.shape[-1]}"
            raise InvalidInput(what, code="SX325")
        return joined

    def _like_inputs(self, y: Tensor, xs: Any) -> Any:
        """The outputs (time, N, features) in the form of the inputs: a list, or a Tensor."""
        if isinstance(xs, Tensor):
            return op.Transpose(y, perm=[1, 0, 2]) if self.batch_first else y
        n = len(xs)
        parts = op.Split(y, axis=0, num_outputs=n, outputs=n)
        return [op.Squeeze(p, [0]) for p in (parts if n > 1 else [parts])]

    def _stacked(
        self, x: Tensor, states: Sequence[Tensor | None], run: Callable[..., tuple[Tensor, ...]]
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers: `run(layer, x, *states)` returns outputs (time, directions, N, hidden) and the last states."""
        flat = all(s is None or len(s.shape) == 2 for s in states) and self.num_layers * self.directions == 1
        wide = [None if s is None else op.Unsqueeze(s, [0]) if len(s.shape) == 2 else s for s in states]
        last: list[list[Tensor]] = [[] for _ in states]
        d = self.directions
        trace.depends(self, lambda: self.dropout)
        for i in range(self.num_layers):
            if i and self.dropout and tape.training:
                x, _ = random.dropout(x, self.dropout)
            here = [s if s is None or self.num_layers == 1 else op.Slice(s, [i * d], [(i + 1) * d], [0]) for s in wide]
            y, *ends = run(i, x, *here)
            for group, end in zip(last, ends, strict=True):
                group.append(end)
            x = op.Squeeze(y, [1]) if d == 1 else op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, d * self.hidden_size])
        joined = [g[0] if len(g) == 1 else op.Concat(*g, axis=0) for g in last]
        return x, [op.Squeeze(s, [0]) if flat else s for s in joined]

    def _gates(self, kind: str, end: str, order: str) -> Tensor:
        """The parameters of a kind, those of all gates in one tensor."""
        return op.Concat(*(getattr(self, f"{kind}_{gate}{end}") for gate in order), axis=-1)

    def _common(self) -> _Common:
        return {"hidden_size": self.hidden_size, "direction": "bidirectional" if self.bidirectional else "forward"}


def _stack_directions(parts: Sequence[Tensor]) -> Tensor:
    """The tensors of the directions, stacked along a new first axis."""
    wide = [op.Unsqueeze(p, [0]) for p in parts]
    return wide[0] if len(wide) == 1 else op.Concat(*wide, axis=0)


class _OneState(RNN_Base):
    """A recurrent layer whose state is one Tensor; a subclass defines the computation of one layer, `_layer`."""

    def forward(self, xs: Any, h0: Tensor | None = None) -> tuple[Any, Tensor]:
        """Run the layer over a sequence.

        Args:
            xs: A list of Tensors (N, input), one per time step; or one Tensor (time, N, input), or (N, time, input) with
                `batch_first`.
            h0: Initial state of shape (N, hidden) or (num_layers * directions, N, hidden); zeros if None.

        Returns:
            The outputs, in the form of xs with directions * hidden features, and the last state, in the shape of h0.

        Raises:
            InvalidInput: If the sequence is empty, or the number of features is not `input_size` (SX325).
        """
        x = self._time_first(xs)
        self._follow(x)
        y, (h,) = self._stacked(x, [h0], self._layer)
        return self._like_inputs(y, xs), h

    def _layer(self, i: int, x: Tensor, h: Tensor | None) -> tuple[Tensor, ...]:
        raise NotImplementedError


class RNN(_OneState):
    """Computes h = f(x Wx + h Wh + b) at each time step, where f is tanh or relu (ONNX: RNN).

    Parameters: Wx of shape (input, hidden) and Wh of shape (hidden, hidden), drawn from N(0, 1); b of shape (hidden,), zeros.

    Args:
        input_size: Number of input features.
        hidden_size: Number of features of the hidden state.
        num_layers: Number of layers, each of which takes the outputs of the one before.
        nonlinearity: The function f: "tanh" or "relu".
        bias: Whether b is added.
        batch_first: Whether the first axis of inputs and outputs given as one Tensor is the batch.
        dropout: Probability that an element of the inputs of the second and later layers is set to 0 in training.
        bidirectional: Whether a second direction runs from the last time step to the first.

    Raises:
        ValueError: If `nonlinearity` is unknown.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        if nonlinearity not in ("tanh", "relu"):
            raise ValueError(f"nonlinearity must be 'tanh' or 'relu', got {nonlinearity!r}")
        self.nonlinearity = nonlinearity

    def initialize(self, xs: Any, h0: Any = None) -> None:
        """Create the parameters.

        Args:
            xs: A list of Tensors (N, input), or one Tensor of rank 3.
            h0: The initial state; not used.
        """
        x = xs if isinstance(xs, Tensor) else xs[0]
        for i, ends in enumerate(self._suffixes()):
            for end in ends:
                self._param(f"Wx{end}", (self._inputs(i), self.hidden_size), x, std=1.0)
                self._param(f"Wh{end}", (self.hidden_size, self.hidden_size), x, std=1.0)
                if self.bias:
                    self._param(f"b{end}", (self.hidden_size,), x)

    def _layer(self, i: int, x: Tensor, h: Tensor | None) -> tuple[Tensor, ...]:
        ends = self._suffixes()[i]
        w, r = (
            _stack_directions([op.Transpose(getattr(self, kind + end), perm=[1, 0]) for end in ends]) for kind in ("Wx", "Wh")
        )
        b = None
        if self.bias:
            biases = [getattr(self, f"b{end}") for end in ends]  # ONNX has two for each gate: the second is zero
            b = _stack_directions([op.Concat(v, op.full_like(v, 0), axis=0) for v in biases])
        activations = [self.nonlinearity.capitalize()] * self.directions
        return op.RNN(x, w, r, b, None, h, outputs=2, activations=activations, **self._common())

    def step_forward(self, x: Tensor, h: Tensor, Wx: Tensor, Wh: Tensor, b: Tensor | None) -> Tensor:
        """Compute one time step.

        Args:
            x: Input of shape (N, input).
            h: State of shape (N, hidden).
            Wx: Input weights of shape (input, hidden).
            Wh: Recurrent weights of shape (hidden, hidden).
            b: Bias of shape (hidden,), or None.

        Returns:
            The new state, of shape (N, hidden).
        """
        y = op.Add(op.MatMul(h, Wh), op.MatMul(x, Wx))
        y = y if b is None else op.Add(y, b)
        return op.Tanh(y) if self.nonlinearity == "tanh" else op.Relu(y)


class LSTM(RNN_Base):
    """Computes c = f * c + i * g and h = o * tanh(c) at each time step (ONNX: LSTM).

    The gates are i, f, o = sigmoid(x Wx + Bx + h Wh + Bh) and g = tanh(x Wx + Bx + h Wh + Bh), each with its own parameters:
    Wx_<gate> of shape (input, hidden) and Wh_<gate> of shape (hidden, hidden), drawn from N(0, 0.01); Bx_<gate> and Bh_<gate> of
    shape (hidden,), zeros.

    Args:
        input_size: Number of input features.
        hidden_size: Number of features of the hidden state.
        nonlinearity: "tanh", the only value.
        num_layers: Number of layers, each of which takes the outputs of the one before.
        bias: Whether biases are added.
        batch_first: Whether the first axis of inputs and outputs given as one Tensor is the batch.
        dropout: Probability that an element of the inputs of the second and later layers is set to 0 in training.
        bidirectional: Whether a second direction runs from the last time step to the first.

    Raises:
        ValueError: If `nonlinearity` is not "tanh".
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        nonlinearity: str = "tanh",
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        if nonlinearity != "tanh":
            raise ValueError(f"nonlinearity of an LSTM must be 'tanh', got {nonlinearity!r}")
        self.nonlinearity = nonlinearity

    def initialize(self, xs: Any, h0_c0: Any = None) -> None:
        """Create the parameters.

        Args:
            xs: A list of Tensors (N, input), or one Tensor of rank 3.
            h0_c0: The initial states; not used.
        """
        self._gated(xs, "ifog")

    def forward(self, xs: Any, h0_c0: Any = None) -> tuple[Any, Tensor, Tensor]:
        """Run the layer over a sequence.

        Args:
            xs: A list of Tensors (N, input), one per time step; or one Tensor (time, N, input), or (N, time, input) with
                `batch_first`.
            h0_c0: Initial states (h0, c0), each of shape (N, hidden) or (num_layers * directions, N, hidden); zeros if None.

        Returns:
            The outputs, in the form of xs with directions * hidden features, and the last states h and c, in the shape of h0.

        Raises:
            InvalidInput: If the sequence is empty, or the number of features is not `input_size` (SX325).
        """
        h0, c0 = h0_c0 or (None, None)
        x = self._time_first(xs)
        self._follow(x)
        y, (h, c) = self._stacked(x, [h0, c0], self._layer)
        return self._like_inputs(y, xs), h, c

    def _layer(self, i: int, x: Tensor, h: Tensor | None, c: Tensor | None) -> tuple[Tensor, ...]:
        ends = self._suffixes()[i]

        def gates(kind: str, end: str) -> Tensor:
            return self._gates(kind, end, _ORDER["LSTM"])

        w, r = (_stack_directions([op.Transpose(gates(kind, end), perm=[1, 0]) for end in ends]) for kind in ("Wx", "Wh"))
        b = _stack_directions([op.Concat(gates("Bx", end), gates("Bh", end), axis=0) for end in ends]) if self.bias else None
        return op.LSTM(x, w, r, b, None, h, c, outputs=3, **self._common())

    def step_forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """Compute one time step of the first layer.

        Args:
            x: Input of shape (N, input).
            h: State h of shape (N, hidden).
            c: State c of shape (N, hidden).

        Returns:
            The new states h and c, of shape (N, hidden).
        """
        made = {}
        for gate in "ifog":
            y = op.Add(op.MatMul(x, getattr(self, f"Wx_{gate}")), op.MatMul(h, getattr(self, f"Wh_{gate}")))
            if self.bias:
                y = op.Add(y, op.Add(getattr(self, f"Bx_{gate}"), getattr(self, f"Bh_{gate}")))
            made[gate] = op.Tanh(y) if gate == "g" else op.Sigmoid(y)
        c = op.Add(op.Mul(made["f"], c), op.Mul(made["i"], made["g"]))
        return op.Mul(made["o"], op.Tanh(c)), c


class GRU(_OneState):
    """Computes h = (1 - z) * n + z * h at each time step (ONNX: GRU with linear_before_reset=1), as PyTorch's GRU does.

    The gates are r, z = sigmoid(x Wx + Bx + h Wh + Bh) and n = tanh(x Wx + Bx + r * (h Wh + Bh)), each with its own parameters:
    Wx_<gate> of shape (input, hidden) and Wh_<gate> of shape (hidden, hidden), drawn from N(0, 0.01); Bx_<gate> and Bh_<gate> of
    shape (hidden,), zeros.

    Args:
        input_size: Number of input features.
        hidden_size: Number of features of the hidden state.
        num_layers: Number of layers, each of which takes the outputs of the one before.
        bias: Whether biases are added.
        batch_first: Whether the first axis of inputs and outputs given as one Tensor is the batch.
        dropout: Probability that an element of the inputs of the second and later layers is set to 0 in training.
        bidirectional: Whether a second direction runs from the last time step to the first.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__(input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)

    def initialize(self, xs: Any, h0: Any = None) -> None:
        """Create the parameters.

        Args:
            xs: A list of Tensors (N, input), or one Tensor of rank 3.
            h0: The initial state; not used.
        """
        self._gated(xs, "rzn")

    def _layer(self, i: int, x: Tensor, h: Tensor | None) -> tuple[Tensor, ...]:
        ends = self._suffixes()[i]
        w, r = (
            _stack_directions([op.Transpose(self._gates(kind, end, _ORDER["GRU"]), perm=[1, 0]) for end in ends])
            for kind in ("Wx", "Wh")
        )
        b = None
        if self.bias:
            both = [op.Concat(*(self._gates(kind, end, _ORDER["GRU"]) for kind in ("Bx", "Bh")), axis=0) for end in ends]
            b = _stack_directions(both)
        return op.GRU(x, w, r, b, None, h, outputs=2, linear_before_reset=1, **self._common())


class CudnnRNN(RNN_Base):
    """Runs recurrent layers whose weights are packed into one vector in cuDNN's order, on every device (ONNX: RNN, LSTM or GRU).

    Parameter: W of shape (total size,), drawn from U(-sqrt(1 / hidden), sqrt(1 / hidden)). For each layer and direction, W holds
    the input weights of all gates and the recurrent weights; then, in the same order, their biases.

    Args:
        hidden_size: Number of features of the hidden state.
        activation: Kept for old programs; `rnn_mode` determines the activation.
        num_layers: Number of layers, each of which takes the outputs of the one before.
        bias: Whether biases are added.
        batch_first: Whether the first axis of inputs and outputs is the batch; otherwise it is time.
        dropout: Probability that an element of the inputs of the second and later layers is set to 0 in training.
        bidirectional: Whether a second direction runs from the last time step to the first.
        rnn_mode: "vanilla" or "tanh", "relu", "lstm", or "gru".
        use_mask: Whether `forward` takes the lengths of the sequences.
        return_sequences: Whether all outputs are returned; otherwise the last one of each sequence.

    Raises:
        ValueError: If `rnn_mode` is unknown.
    """

    W: Tensor

    def __init__(
        self,
        hidden_size: int,
        activation: str = "tanh",
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = True,
        dropout: float = 0,
        bidirectional: bool = False,
        rnn_mode: str = "lstm",
        use_mask: bool = False,
        return_sequences: bool = True,
    ) -> None:
        super().__init__(0, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        if rnn_mode not in _MODES:
            raise ValueError(f"rnn_mode must be one of {', '.join(_MODES)}, got {rnn_mode!r}")
        self.activation, self.rnn_mode = activation, rnn_mode
        self.use_mask, self.return_sequences = use_mask, return_sequences

    def initialize(self, x: Tensor, hx: Any = None, cx: Any = None, seq_lengths: Any = None) -> None:
        """Create W.

        Args:
            x: Input of rank 3; its last axis determines the number of input features.
            hx: The initial state; not used.
            cx: The initial state of an LSTM's cell; not used.
            seq_lengths: The lengths; not used.
        """
        self.input_size = int(x.shape[2])
        bound = math.sqrt(1.0 / self.hidden_size)
        self._param("W", (sum(rows * columns for rows, columns in self._pieces()),), x, bound=bound)

    def _pieces(self) -> list[tuple[int, int]]:
        """The shapes of the matrices in W, in order, followed by those of the biases (as one column)."""
        rows, d = len(_MODES[self.rnn_mode][1]) * self.hidden_size, self.directions
        matrices = [(rows, n) for i in range(self.num_layers) for _ in range(d) for n in (self._inputs(i), self.hidden_size)]
        return matrices + ([(rows, 1)] * (2 * self.num_layers * d) if self.bias else [])

    def _unpacked(self) -> list[Tensor]:
        """The matrices and biases of W, with the gates in ONNX's order."""
        name, order = _MODES[self.rnn_mode]
        wanted = [order.index(gate) for gate in _ORDER[name]]
        found, begin = [], 0
        for rows, columns in self._pieces():
            piece = op.Slice(self.W, [begin], [begin + rows * columns], [0])
            begin += rows * columns
            matrix = op.Reshape(piece, [len(order), self.hidden_size, columns])
            found.append(op.Reshape(op.Gather(matrix, wanted, axis=0), [rows, columns]))
        return found

    def forward(self, x: Tensor, hx: Tensor | None = None, cx: Tensor | None = None, seq_lengths: Tensor | None = None) -> Tensor:
        """Run the layers over a batch of sequences.

        Args:
            x: Float input of shape (N, time, input) with `batch_first`, otherwise (time, N, input).
            hx: Initial state of shape (num_layers * directions, N, hidden); zeros if None.
            cx: Initial state of an LSTM's cell, of the same shape; zeros if None.
            seq_lengths: With `use_mask`, the lengths of the sequences, an integer Tensor of shape (N,); outputs after the end of
                a sequence are 0.

        Returns:
            The outputs of the last layer: (N, time, directions * hidden) or (time, N, directions * hidden), or, with
            `return_sequences=False`, the last output of each sequence: (N, directions * hidden).

        Raises:
            InvalidInput: If `use_mask` is set without `seq_lengths`, or the number of features differs from that of W (SX325).
        """
        if self.use_mask and seq_lengths is None:
            raise InvalidInput("seq_lengths must be a Tensor of sequence lengths if use_mask is set, got None", code="SX325")
        self._follow(x)
        lengths = op.Cast(seq_lengths, to=dtypes.onnx_code(np.int32)) if self.use_mask else None
        pieces = self._unpacked()
        name, d = _MODES[self.rnn_mode][0], self.directions
        biases = pieces[2 * self.num_layers * d :]

        def run(i: int, x: Tensor, *states: Tensor | None) -> tuple[Tensor, ...]:
            here = range(2 * d * i, 2 * d * (i + 1), 2)
            w, r = _stack_directions([pieces[k] for k in here]), _stack_directions([pieces[k + 1] for k in here])
            b = None
            if self.bias:
                b = _stack_directions([op.Squeeze(op.Concat(biases[k], biases[k + 1], axis=0), [1]) for k in here])
            more: dict[str, Any] = {}
            if name == "GRU":
                more["linear_before_reset"] = 1
            if self.rnn_mode == "relu":
                more["activations"] = ["Relu"] * d
            call: OperatorFunction[Tensor] = getattr(op, name)
            made: tuple[Tensor, ...] = call(x, w, r, b, lengths, *states, outputs=1 + len(states), **self._common(), **more)
            return made

        y, _ = self._stacked(self._time_first(x), [hx, cx] if name == "LSTM" else [hx], run)
        if self.return_sequences:
            return op.Transpose(y, perm=[1, 0, 2]) if self.batch_first else y
        if lengths is None:
            return op.Gather(y, -1, axis=0)
        last = op.Unsqueeze(op.Sub(op.Cast(lengths, to=dtypes.onnx_code(np.int64)), 1), [1])
        return op.GatherND(op.Transpose(y, perm=[1, 0, 2]), last, batch_dims=1)
