"""RNN, GRU and LSTM as Scans over their time steps, in ONNX operators: their decompositions, which define their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..interpreters.base import Op, V

Activation = Callable[[Op, V], V]
Step = Callable[[Op, V, list[V]], list[V]]
"""One step in the body of a Scan: (projected input, states) -> new states."""

DIRECTIONS = {"forward": (False,), "foward": (False,), "reverse": (True,), "bidirectional": (False, True)}
"""Value of the attribute `direction` -> for each direction of the layer, whether it is reversed.

The schema of GRU-1 misspells its default: "foward".
"""


def activation(name: str, alpha: float, beta: float, clip: float | None) -> Activation:
    """Return the activation with this lower-case name."""
    functions: dict[str, Activation] = {
        "relu": lambda op, x: op.Relu(x),
        "tanh": lambda op, x: op.Tanh(x),
        "sigmoid": lambda op, x: op.Sigmoid(x),
        "softsign": lambda op, x: op.Softsign(x),
        "softplus": lambda op, x: op.Softplus(x),
        "affine": lambda op, x: op.Add(op.Mul(x, alpha), beta),
        "leakyrelu": lambda op, x: op.LeakyRelu(x, alpha=alpha),
        "thresholdedrelu": lambda op, x: op.Where(op.Less(x, alpha), 0, x),
        "scaledtanh": lambda op, x: op.Mul(op.Tanh(op.Mul(x, beta)), alpha),
        "hardsigmoid": lambda op, x: op.HardSigmoid(x, alpha=alpha, beta=beta),
        "elu": lambda op, x: op.Elu(x, alpha=alpha),
    }
    function = functions[name]
    return function if clip is None else lambda op, x: function(op, op.Clip(x, -clip, clip))


def parts(op: Op, x: V, count: int, axis: int) -> list[V]:
    """Split x into equal parts."""
    return [x] if count == 1 else list(op.call("Split", [x, None], {"axis": axis, "num_outputs": count}, count))


def biases(op: Op, b: V, d: int) -> tuple[V, V]:
    """Return the biases of the input's and of the state's projection in direction `d`; None if the node has none."""
    if b is None:
        return None, None
    wb, rb = parts(op, op.Gather(b, d, axis=0), 2, 0)
    return wb, rb


def recurrence(
    op: Op, x: V, w: V, r: V, lengths: V, initial: Sequence[V], direction: str, layout: int, cell: Callable[[int], tuple[V, Step]]
) -> tuple[V, ...]:
    """Return Y and the last states; `cell` returns a direction's bias of the projected input (or None) and its step."""
    x = op.swap(x, 0, 1) if layout else x
    zero = op.Expand(op.constant(0, op.dtype(x)), op.Concat(op.Shape(x, start=1, end=2), op.Shape(r, start=2, end=3), axis=0))
    starts = [None if s is None else op.swap(s, 0, 1) if layout else s for s in initial]
    lengths = None if lengths is None else op.Cast(lengths, to=7)
    ys, lasts = [], []
    for d, backward in enumerate(DIRECTIONS[direction]):
        bias, step = cell(d)
        seen = op.ReverseSequence(x, lengths, time_axis=0, batch_axis=1) if backward and lengths is not None else x
        projected = op.MatMul(seen, op.swap(op.Gather(w, d, axis=0), 0, 1))
        projected = projected if bias is None else op.Add(projected, bias)
        states = [zero if s is None else op.Gather(s, d, axis=0) for s in starts]
        turned = [1 if backward and lengths is None else 0]
        y, last = _scan(op, projected, states, lengths, step, turned)
        ys.append(op.ReverseSequence(y, lengths, time_axis=0, batch_axis=1) if backward and lengths is not None else y)
        lasts.append(last)
    y = op.Concat(*(op.Unsqueeze(v, [1]) for v in ys), axis=1)
    ends = [op.Concat(*(op.Unsqueeze(s, [0]) for s in each), axis=0) for each in zip(*lasts, strict=True)]
    if layout:
        y, ends = op.Transpose(y, perm=[2, 0, 1, 3]), [op.swap(s, 0, 1) for s in ends]
    return (y, *ends)


def _scan(op: Op, projected: V, states: list[V], lengths: V, step: Step, turned: list[int]) -> tuple[V, list[V]]:
    """Run all steps of one direction; a sequence that has ended keeps its states and outputs zeros."""
    n = len(states)
    xs = [projected]
    if lengths is not None:
        t = op.Range(0, op.Squeeze(op.Shape(projected, end=1), [0]), 1)
        xs.append(op.Unsqueeze(op.Less(op.Unsqueeze(t, [1]), op.Unsqueeze(lengths, [0])), [2]))

    def body(inner: Op, *here: V) -> list[V]:
        state = list(here[:n])
        new = step(inner, here[n], state)
        y = inner.Identity(new[0])
        if lengths is not None:
            y = inner.Where(here[n + 1], new[0], 0)
            new = [inner.Where(here[n + 1], a, b) for a, b in zip(new, state, strict=True)]
        return [*new, y]

    graph = op.graph(body, [*map(op.type, states), *(op.type(v, drop=[0]) for v in xs)])
    attributes: dict[str, Any] = {"body": graph, "num_scan_inputs": len(xs)}
    if any(turned):
        attributes |= {"scan_input_directions": turned * len(xs), "scan_output_directions": turned}
    *last, y = op.call("Scan", [*states, *xs], attributes, n + 1)
    return y, last
