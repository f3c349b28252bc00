"""Causal convolutions of each channel that carry their last inputs from call to call."""

from __future__ import annotations

import itertools

from ...errors import OperatorError
from ..conv import conv
from ._api import Array, Host, Ints, Op, V, Wanted, Xp, microsoft, not_declared
from .gates import swish_in


def _activation(xp: Xp, y: Array, name: str) -> Array:
    """Return y, or y * sigmoid(y)."""
    if name not in ("none", "silu", "swish"):
        raise OperatorError(f"activation must be none, silu or swish, got {name!r}", code="SX404")
    return y if name == "none" else y / (1 + xp.exp(-y))


def _history(w: Array, channels: int, dilation: int) -> int:
    """Return the number of inputs that are carried; raise OperatorError for filters of another form than C x 1 x k."""
    if w.ndim != 3 or w.shape[:2] != (channels, 1) or not w.shape[2] or dilation < 1:
        raise OperatorError(
            f"weight must have shape {channels} x 1 x k and dilation be at least 1, got {w.shape} and {dilation}", code="SX404"
        )
    return (int(w.shape[2]) - 1) * dilation


def _filtered_in(op: Op, seen: V, length: V, w: V, b: V | None, dilation: int, activation: str) -> V:
    """Return the convolution of N x C x (history + length) in ONNX operators; the number of channels may be unknown."""
    taps = op.Mul(op.Range(0, op.Squeeze(op.Shape(w, start=2), [0]), 1), dilation)
    places = op.Add(op.Unsqueeze(op.Range(0, length, 1), [1]), taps)
    y = op.Einsum(op.Gather(seen, places, axis=2), op.Squeeze(w, [1]), equation="nclk,ck->ncl")
    y = y if b is None else op.Add(y, op.Unsqueeze(b, [1]))
    return y if activation == "none" else swish_in(op, y)


@microsoft("CausalConvWithState", 1, traits=("shape_of_first",), weights={1: "the weight", 2: "the bias"})
def causal_conv_with_state(
    xp: Xp,
    x: Array,
    w: Array,
    b: Array | None = None,
    past_state: Array | None = None,
    *,
    activation: str = "none",
    channels_last: int = 0,
    dilation: int = 1,
    input_channel_offset: int = 0,
    input_channels: int = 0,
    ndim: int = 1,
    state_channels_last: int = -1,
    state_length: int = 0,
    state_update_capacity: int = 0,
    state_window: int = 0,
) -> tuple[Array, Array]:
    """Filter each channel of past_state followed by x; returns also the last inputs, or those after each of the last steps.

    The attributes that only onnxruntime's CUDA kernel reads must have their defaults.
    """
    extended = (input_channel_offset, input_channels, state_length, state_update_capacity, ndim - 1, state_channels_last + 1)
    if any(extended) or not 0 <= state_window <= 8:
        raise OperatorError(
            "ndim, input_channels, input_channel_offset, state_channels_last, state_length and state_update_capacity must have "
            f"their defaults, and state_window be in [0, 8], got {state_window}",
            code="SX404",
        )
    if x.ndim != 3 and not (channels_last and x.ndim > 3):
        raise OperatorError(f"input must have shape N x C x L, or N x L x ... with channels_last, got {x.shape}", code="SX404")
    inner = x.shape[2:] if channels_last else x.shape[1:2]
    first = xp.swapaxes(x.reshape(*x.shape[:2], -1), 1, 2) if channels_last else x
    n, c, length = first.shape
    history = _history(w, c, dilation)
    slot = (n, history, *inner) if channels_last else (n, c, history)
    if past_state is None:
        state = xp.zeros((n, c, history), dtype=x.dtype)
    elif past_state.shape != ((state_window, *slot) if state_window else slot):
        raise OperatorError(f"past_state must have shape {slot} behind the window, got {past_state.shape}", code="SX404")
    else:
        last = past_state[-1] if state_window else past_state
        state = xp.swapaxes(last.reshape(n, history, c), 1, 2) if channels_last else last
    seen = xp.concatenate([state, first], axis=2)
    y = _activation(
        xp, conv(xp, seen, w, b, group=c, dilations=(dilation,)) if c and length else xp.zeros_like(first), activation
    )

    def laid(part: Array, shape: Ints) -> Array:
        return xp.swapaxes(part, 1, 2).reshape(shape) if channels_last else part

    ends = range(length - state_window + 1, length + 1) if state_window else [length]
    states = [laid(seen[..., e : e + history], slot) if e > 0 or not state_window else xp.zeros(slot, x.dtype) for e in ends]
    return laid(y, x.shape), xp.stack(states) if state_window else states[0]


@causal_conv_with_state.decomposition
def causal_conv_with_state_body(
    op: Op,
    x: V,
    w: V,
    b: V | None,
    past_state: V | None,
    activation: str,
    channels_last: int,
    dilation: int,
    state_window: int,
) -> tuple[V, V]:
    def channels_first(v: V) -> V:
        if not channels_last:
            return v
        flat = op.Reshape(
            v, op.Concat(op.Shape(v, end=2), op.ReduceProd(op.Shape(v, start=2), [0], keepdims=1), axis=0), allowzero=1
        )
        return op.Transpose(flat, perm=[0, 2, 1])

    first = channels_first(x)
    length = op.Squeeze(op.Shape(first, start=2), [0])
    history = op.Mul(op.Sub(op.Shape(w, start=2), 1), dilation)
    if past_state is None:
        state = op.Expand(op.constant(0, op.dtype(x)), op.Concat(op.Shape(first, end=2), history, axis=0))
    else:
        state = channels_first(op.Gather(past_state, -1, axis=0) if state_window else past_state)
    seen = op.Concat(state, first, axis=2)
    y = _filtered_in(op, seen, length, w, b, dilation, activation)

    def laid(v: V, steps: V) -> V:
        if not channels_last:
            return v
        shape = op.Concat(op.Shape(x, end=1), steps, op.Shape(x, start=2), axis=0)
        return op.Reshape(op.Transpose(v, perm=[0, 2, 1]), shape, allowzero=1)

    def after(end: V) -> V:
        return laid(op.Slice(seen, op.Unsqueeze(end, [0]), op.Add(op.Unsqueeze(end, [0]), history), [2]), history)

    result = laid(y, op.Shape(first, start=2))
    if not state_window:
        return result, after(length)
    slots = []
    for j in range(state_window):
        end = op.Add(length, j + 1 - state_window)
        known = after(op.Max(end, 0))
        slots.append(op.Unsqueeze(op.Where(op.Greater(end, 0), known, op.zeros_like(known)), [0]))
    return result, op.Concat(*slots, axis=0)


@microsoft("VarlenCausalConvWithState", 1, traits=("shape_of_first",), weights={1: "the weight", 3: "the bias"})
def varlen_causal_conv_with_state(
    xp: Xp,
    x: Array,
    w: Array,
    cumulative_sequence_length: Host[Ints],
    b: Array | None,
    initial_state: Array,
    capture_count: Host[Ints] | None = None,
    kernel_delta: Array | None = None,
    previous_mask: Array | None = None,
    *,
    activation: str = "none",
    delta_offset: int = 0,
    dilation: int = 1,
    group_size: int = 1,
    state_update_capacity: int = 0,
) -> tuple[Array, Array, Array | None]:
    """Filter sequences that stand behind each other, each with its own state; returns also the first inputs of each."""
    if kernel_delta is not None or previous_mask is not None:
        raise OperatorError("kernel_delta and previous_mask are read by onnxruntime's CUDA kernel only", code="SX404")
    ends, batch = cumulative_sequence_length, len(cumulative_sequence_length) - 1
    if x.ndim != 2 or batch < 1 or ends[0] or ends[-1] != x.shape[0] or any(a >= e for a, e in itertools.pairwise(ends)):
        raise OperatorError(
            f"the cumulative lengths must rise from 0 to the {x.shape[0]} rows of input, got {ends}", code="SX404"
        )
    history = _history(w, x.shape[1], dilation)
    if initial_state.shape != (batch, x.shape[1], history):
        raise OperatorError(
            f"initial_state must have shape {(batch, x.shape[1], history)}, got {initial_state.shape}", code="SX404"
        )
    if (capture_count is None) != (state_update_capacity == 0) or not 0 <= state_update_capacity <= 8:
        raise OperatorError(
            f"capture_count must be present exactly for a state_update_capacity in [1, 8], got {state_update_capacity}",
            code="SX407",
        )
    y, final = xp.empty_like(x), xp.empty_like(initial_state)
    update = xp.zeros((batch, state_update_capacity, x.shape[1]), dtype=x.dtype) if state_update_capacity else None
    for i, (start, end) in enumerate(itertools.pairwise(ends)):
        rows = x[start:end]
        how = {"activation": activation, "dilation": dilation}
        part, final[i : i + 1] = causal_conv_with_state(xp, rows.T[None], w, b, initial_state[i : i + 1], **how)
        y[start:end] = part[0].T
        if update is not None and capture_count is not None:
            count = max(0, min(capture_count[i], state_update_capacity, end - start))
            update[i, :count] = rows[:count]
    return y, final, update


@varlen_causal_conv_with_state.decomposition
def varlen_causal_conv_with_state_body(
    op: Op,
    x: V,
    w: V,
    cumulative_sequence_length: V,
    b: V | None,
    initial_state: V,
    capture_count: V | None,
    activation: str,
    dilation: int,
    state_update_capacity: int,
    wanted: Wanted,
) -> tuple[V, ...]:
    """Put the states and all rows into one table, and gather from it what each place reads."""
    ends = op.Cast(cumulative_sequence_length, to=7)
    starts = op.Slice(ends, [0], [-1], [0])
    finals = op.Slice(ends, [1], [2**62], [0])
    history = op.Mul(op.Sub(op.Shape(w, start=2), 1), dilation)
    old = op.Reshape(op.Transpose(initial_state, perm=[0, 2, 1]), op.Concat([-1], op.Shape(x, start=1), axis=0))
    table, behind = op.Concat(old, x, axis=0), op.Shape(old, end=1)
    rows = op.Range(0, op.Squeeze(op.Shape(x, end=1), [0]), 1)
    owner = op.ReduceSum(op.Cast(op.LessOrEqual(op.Unsqueeze(finals, [0]), op.Unsqueeze(rows, [1])), to=7), [1], keepdims=0)

    def read(sequence: V, place: V) -> V:
        """Return the places in the table of what stands at `place` of x in a sequence, before its start in its state."""
        start = op.Gather(starts, sequence)
        before = op.Add(op.Mul(op.Add(sequence, 1), history), op.Sub(place, start))
        return op.Where(op.Less(place, start), before, op.Add(place, behind))

    back = op.Sub(op.Mul(op.Range(0, op.Squeeze(op.Shape(w, start=2), [0]), 1), dilation), history)
    seen = op.Gather(table, read(op.Unsqueeze(owner, [1]), op.Add(op.Unsqueeze(rows, [1]), back)))
    y = op.Einsum(seen, op.Squeeze(w, [1]), equation="lkc,ck->lc")
    y = y if b is None else op.Add(y, b)
    y = y if activation == "none" else swish_in(op, y)
    numbers = op.Unsqueeze(op.Range(0, op.Squeeze(op.Shape(starts), [0]), 1), [1])
    last = op.Sub(op.Add(op.Unsqueeze(finals, [1]), op.Range(0, op.Squeeze(history, [0]), 1)), history)
    final = op.Transpose(op.Gather(table, read(numbers, last)), perm=[0, 2, 1])
    if len(wanted) < 3 or capture_count is None:
        return y, final
    steps = op.Range(0, state_update_capacity, 1)
    count = op.Min(op.Cast(capture_count, to=7), op.Sub(finals, starts))
    kept = op.Unsqueeze(op.Less(steps, op.Unsqueeze(count, [1])), [2])
    place = op.Min(op.Add(op.Unsqueeze(starts, [1]), steps), op.Sub(op.Shape(x, end=1), 1))
    return y, final, op.Where(kept, op.Gather(x, place), op.constant(0, op.dtype(x)))


not_declared(
    "it copies between buffers that the caller binds to the output, on WebGPU only; compute the state by CausalConvWithState",
    "ConvStateReplay",
)
