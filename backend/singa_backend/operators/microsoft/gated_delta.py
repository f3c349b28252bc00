"""GatedDeltaNet: linear attention of sequences that stand behind each other, with fused gates."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from ... import limits
from ...errors import OperatorError
from ..activation import sigmoid, softplus
from ._api import Array, Host, Ints, Op, V, Wanted, Xp, microsoft
from .gates import single
from .recurrent import RULES

_GATES = {"none": "none", "softplus": "softplus", "qwen": "softplus", "sigmoid": "sigmoid", "kda": "sigmoid"}
_TINY = 1e-12
"""What onnxruntime's CPU kernel adds to the sum of squares of a query or key."""


# --- the layout of the inputs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tokens:
    """The inputs by tokens: heads are an axis, sequences stand behind each other.

    Attributes:
        q, k, v: tokens x heads x size.
        lead: the axes of the tokens as the query has them.
        batch: the number of sequences, if it is known from the axes of the query.
    """

    q: Array
    k: Array
    v: Array
    lead: Ints
    batch: int | None


def _tokens(query: Array, key: Array | None, value: Array | None, state: Array | None) -> _Tokens:
    """Return the query, key and value of tokens; without a key, the query holds all three of each token."""
    if (key is None) != (value is None):
        raise OperatorError("key and value must be present together", code="SX407")
    packed = key is None or value is None
    if query.ndim not in ((2, 3) if packed else (3, 4)):
        raise OperatorError(f"query must have {'2 or 3' if packed else '3 or 4'} axes, got shape {query.shape}", code="SX404")
    lead = query.shape[: query.ndim - (1 if packed else 2)]
    batch, total = lead[0] if len(lead) == 2 else None, math.prod(lead)
    if key is not None and value is not None:
        if key.shape != query.shape or value.shape[:-2] != lead or value.ndim != query.ndim:
            raise OperatorError(
                f"key must have the shape of query, and value its tokens, got {query.shape}, {key.shape}, {value.shape}",
                code="SX404",
            )
        q, k, v = (x.reshape(total, *x.shape[-2:]) for x in (query, key, value))
    else:
        if state is None or state.ndim != 4:
            raise OperatorError("a query that holds the keys and values needs initial_state, which has their sizes", code="SX407")
        _, heads, wide, size = state.shape
        rest = query.shape[-1] - heads * wide
        if rest <= 0 or not size or rest % (2 * size):
            raise OperatorError(f"query of shape {query.shape} does not fit initial_state {state.shape}", code="SX404")
        flat, half = query.reshape(total, -1), rest // 2
        q, k = (flat[:, i * half : (i + 1) * half].reshape(total, half // size, size) for i in (0, 1))
        v = flat[:, rest:].reshape(total, heads, wide)
    if not q.shape[1] or v.shape[1] % q.shape[1]:
        raise OperatorError(f"the heads of value must be a multiple of the query's {q.shape[1]}, got {v.shape[1]}", code="SX404")
    return _Tokens(q, k, v, lead, batch)


def _ends(tokens: _Tokens, cu: Ints | None, state: Array | None) -> Ints:
    """Return where the sequences start, and the number of tokens."""
    total = tokens.q.shape[0]
    if cu is not None:
        if tokens.batch is not None or len(cu) < 2 or cu[0] or cu[-1] != total or any(a > b for a, b in itertools.pairwise(cu)):
            raise OperatorError(f"cu_seqlens must rise from 0 to the {total} tokens of one axis, got {cu}", code="SX404")
        return cu
    batch = tokens.batch if state is None else state.shape[0]
    if batch is None:
        raise OperatorError("without cu_seqlens, initial_state is needed: it has the number of sequences", code="SX407")
    if batch < 1 or total % batch or tokens.batch not in (None, batch):
        raise OperatorError(f"{tokens.lead} tokens are not those of {batch} sequences of one length", code="SX404")
    return tuple(range(0, total + 1, total // batch)) if total else (0,) * (batch + 1)


def _per_head(x: Array, tokens: _Tokens, name: str, keys: bool) -> Array:
    """Return a decay or beta as tokens x heads x 1, or with `keys` x the size of a key."""
    total, heads, size = tokens.q.shape[0], tokens.v.shape[1], tokens.q.shape[2]
    if x.shape == (*tokens.lead, heads):
        return x.reshape(total, heads, 1)
    if keys and x.shape == (*tokens.lead, heads, size):
        return x.reshape(total, heads, size)
    raise OperatorError(f"{name} must have a value for each head of {(*tokens.lead, heads)}, got shape {x.shape}", code="SX404")


def _log_decay(xp: Xp, g: Array, a_log: Array | None, dt_bias: Array | None, activation: str, lower: float) -> Array:
    """Return the logarithm of the decay of each token."""
    if activation not in _GATES:
        raise OperatorError(f"gate_activation must be one of {', '.join(_GATES)}, got {activation!r}", code="SX404")
    if _GATES[activation] == "none":
        return g
    if a_log is None or dt_bias is None:
        raise OperatorError(f"gate_activation {activation!r} needs a_log and dt_bias", code="SX407")
    heads, width = g.shape[1:]
    if a_log.shape != (heads,) or dt_bias.shape not in ((heads,), (heads, width), (heads * width,)):
        raise OperatorError(f"a_log and dt_bias must fit {heads} heads, got {a_log.shape} and {dt_bias.shape}", code="SX404")
    rate, raw = xp.exp(a_log)[:, None], g + dt_bias.reshape(heads, -1)
    return -rate * softplus(xp, raw) if _GATES[activation] == "softplus" else lower * sigmoid(xp, rate * raw)


# --- the recurrence ---------------------------------------------------------------------------------------------------


@microsoft("GatedDeltaNet", 1, weights={0: "the query", 1: "the key", 2: "the value"})
def gated_delta_net(
    xp: Xp,
    query: Array,
    key: Array | None = None,
    value: Array | None = None,
    cu_seqlens: Host[Ints] | None = None,
    decay: Array | None = None,
    beta: Array | None = None,
    initial_state: Array | None = None,
    a_log: Array | None = None,
    dt_bias: Array | None = None,
    capture_count: Host[Ints] | None = None,
    state_update_active: Host[int] | None = None,
    *,
    beta_activation: str = "none",
    chunk_size: int = 64,
    gate_activation: str = "none",
    gate_lower_bound: float = -5.0,
    qk_l2_norm: int = 0,
    scale: float = 0.0,
    state_update_capacity: int = 0,
    update_rule: str = "gated_delta",
) -> tuple[Array, Array, Array | None]:
    """Compute the recurrence token by token; returns also the last states, and the first steps of each sequence."""
    if RULES.get(update_rule) != (decay is not None, beta is not None) or beta_activation not in ("none", "sigmoid"):
        raise OperatorError(
            f"update_rule must be one of {', '.join(RULES)} and have the decay and beta that it reads, and beta_activation be "
            f"none or sigmoid, got {update_rule!r} and {beta_activation!r}",
            code="SX404",
        )
    tokens = _tokens(query, key, value, initial_state)
    ends = _ends(tokens, cu_seqlens, initial_state)
    q, k, v = tokens.q, tokens.k, tokens.v
    shape = (len(ends) - 1, v.shape[1], v.shape[2], q.shape[2])
    if initial_state is not None and initial_state.shape != shape:
        raise OperatorError(f"initial_state must have shape {shape}, got {initial_state.shape}", code="SX404")
    if qk_l2_norm:
        q, k = (x / xp.sqrt((x * x).sum(axis=-1, keepdims=True) + _TINY) for x in (q, k))
    group = v.shape[1] // q.shape[1]
    read, written = xp.repeat(q, group, axis=1), xp.repeat(k, group, axis=1)
    shrink = xp.ones((*v.shape[:2], 1), dtype=v.dtype)
    if decay is not None:
        shrink = xp.exp(
            _log_decay(xp, _per_head(decay, tokens, "decay", True), a_log, dt_bias, gate_activation, gate_lower_bound)
        )
    rate = None if beta is None else _per_head(beta, tokens, "beta", False)
    rate = sigmoid(xp, rate) if rate is not None and beta_activation == "sigmoid" else rate
    final = xp.zeros(shape, dtype=v.dtype) if initial_state is None else initial_state.copy()
    y, deltas = xp.empty_like(v), xp.empty_like(v)
    for b in range(shape[0]):
        state = final[b]
        for t in limits.rounds(ends[b + 1] - ends[b]):
            i = ends[b] + t
            state = state * shrink[i][:, None, :]
            deltas[i] = v[i] if rate is None else rate[i] * (v[i] - xp.matmul(state, written[i][..., None])[..., 0])
            state = state + deltas[i][..., None] * written[i][:, None, :]
            y[i] = xp.matmul(state, read[i][..., None])[..., 0]
        final[b] = state
    y = y * (scale or 1 / math.sqrt(shape[3]))
    update = _captured(xp, (shrink, k, deltas), ends, capture_count, state_update_active, state_update_capacity)
    return y.reshape(*tokens.lead, *v.shape[1:]), final, update


def _captured(
    xp: Xp, parts: tuple[Array, ...], ends: Ints, count: Ints | None, active: int | None, capacity: int
) -> Array | None:
    """Return decays, keys and deltas of the first tokens of each sequence, one part behind the other, 0 where there are none."""
    if (count is None) != (capacity == 0) or not 0 <= capacity <= 8:
        raise OperatorError(
            f"capture_count must be present exactly for a state_update_capacity in [1, 8], got {capacity}", code="SX407"
        )
    if count is None:
        return None
    batch = len(ends) - 1
    made = [xp.zeros((batch, capacity, math.prod(p.shape[1:])), dtype=p.dtype) for p in parts]
    for b in range(batch if active is None or active else 0):
        kept = max(0, min(count[b], capacity, ends[b + 1] - ends[b]))
        for whole, part in zip(made, parts, strict=True):
            whole[b, :kept] = part[ends[b] : ends[b] + kept].reshape(kept, whole.shape[2])
    return xp.concatenate([m.reshape(batch, -1) for m in made], axis=1)


# --- the body in ONNX operators ---------------------------------------------------------------------------------------


def _tokens_in(op: Op, query: V, key: V | None, value: V | None, state: V | None) -> tuple[V, V, V]:
    """`_tokens` in ONNX operators, in float32."""
    if key is not None and value is not None:
        if op.rank(query) == 3:
            return single(op, query), single(op, key), single(op, value)
        q, k, v = (op.Reshape(single(op, x), op.Concat([-1], op.Shape(x, start=2), axis=0)) for x in (query, key, value))
        return q, k, v
    flat = op.Reshape(single(op, query), op.Concat([-1], op.Shape(query, start=-1), axis=0))
    heads, wide, size = (op.Shape(state, start=i, end=i + 1) for i in (1, 2, 3))
    half = op.Div(op.Sub(op.Shape(flat, start=1), op.Mul(heads, wide)), 2)
    both = op.Mul(half, 2)
    each = op.Concat([-1], op.Div(half, size), size, axis=0)
    q = op.Reshape(op.Slice(flat, [0], half, [1]), each)
    k = op.Reshape(op.Slice(flat, half, both, [1]), each)
    return q, k, op.Reshape(op.Slice(flat, both, [2**62], [1]), op.Concat([-1], heads, wide, axis=0))


def _decay_in(op: Op, g: V, heads: V, a_log: V | None, dt_bias: V | None, activation: str, lower: float) -> V:
    """Return the decay of each token, tokens x heads x (1 or the size of a key), from its raw value of that form."""
    if _GATES[activation] != "none":
        rate = op.Unsqueeze(op.Exp(a_log), [1])
        raw = op.Add(g, op.Reshape(dt_bias, op.Concat(heads, [-1], axis=0)))
        g = op.Neg(op.Mul(rate, op.Softplus(raw))) if _GATES[activation] == "softplus" else None
        g = op.Mul(op.Sigmoid(op.Mul(rate, raw)), lower) if g is None else g
    return op.Exp(g)


def _repeated_in(op: Op, x: V, heads: V) -> V:
    """Return x with each of its heads, axis 1, repeated to `heads`."""
    numbers = op.Range(0, op.Squeeze(heads, [0]), 1)
    return op.Gather(x, op.Div(numbers, op.Div(heads, op.Shape(x, start=1, end=2))), axis=1)


def _scanned_in(op: Op, state: V, owner: V, q: V, k: V, v: V, shrink: V | None, rate: V | None) -> tuple[V, V, V]:
    """Return the states after all tokens, and for each token what it reads and what it adds."""
    numbers = op.Reshape(op.Range(0, op.Squeeze(op.Shape(state, end=1), [0]), 1), [-1, 1, 1, 1])
    xs = [owner, q, k, v, *(x for x in (shrink, rate) if x is not None)]

    def step(inner: Op, table: V, at: V, q: V, k: V, v: V, *rest: V) -> list[V]:
        parts = iter(rest)
        one = inner.Gather(table, at, axis=0)
        if shrink is not None:
            one = inner.Mul(one, inner.Unsqueeze(next(parts), [1]))
        if rate is not None:
            seen = inner.Squeeze(inner.MatMul(one, inner.Unsqueeze(k, [2])), [2])
            v = inner.Mul(next(parts), inner.Sub(v, seen))
        one = inner.Add(one, inner.Mul(inner.Unsqueeze(v, [2]), inner.Unsqueeze(k, [1])))
        y = inner.Squeeze(inner.MatMul(one, inner.Unsqueeze(q, [2])), [2])
        return [inner.Where(inner.Equal(numbers, at), one, table), y, inner.Identity(v)]

    graph = op.graph(step, [op.type(state), *(op.type(x, drop=[0]) for x in xs)])
    final, y, delta = op.call("Scan", [state, *xs], {"body": graph, "num_scan_inputs": len(xs)}, 3)
    return final, y, delta


@gated_delta_net.decomposition
def gated_delta_net_body(
    op: Op,
    query: V,
    key: V | None,
    value: V | None,
    cu_seqlens: V | None,
    decay: V | None,
    beta: V | None,
    initial_state: V | None,
    a_log: V | None,
    dt_bias: V | None,
    capture_count: V | None,
    state_update_active: V | None,
    beta_activation: str,
    gate_activation: str,
    gate_lower_bound: float,
    qk_l2_norm: int,
    scale: float,
    state_update_capacity: int,
    wanted: Wanted,
) -> tuple[V, ...]:
    """A Scan over all tokens, whose state holds those of all sequences."""
    q, k, v = _tokens_in(op, query, key, value, initial_state)
    heads, size, total = op.Shape(v, start=1, end=2), op.Shape(q, start=2), op.Shape(v, end=1)
    if qk_l2_norm:
        q, k = (op.Div(x, op.Sqrt(op.Add(op.ReduceSum(op.Mul(x, x), [-1], keepdims=1), _TINY))) for x in (q, k))
    lead = op.Shape(query, end=op.rank(query) - (1 if key is None else 2))
    if cu_seqlens is not None:
        starts = op.Cast(cu_seqlens, to=7)
    else:
        batch = op.Slice(lead, [0], [1], [0]) if initial_state is None else op.Shape(initial_state, end=1)
        numbers = op.Range(0, op.Add(op.Squeeze(batch, [0]), 1), 1)
        starts = op.Mul(numbers, op.Div(total, batch))
    starts, finals = op.Slice(starts, [0], [-1], [0]), op.Slice(starts, [1], [2**62], [0])
    rows = op.Unsqueeze(op.Range(0, op.Squeeze(total, [0]), 1), [1])
    owner = op.ReduceSum(op.Cast(op.LessOrEqual(op.Unsqueeze(finals, [0]), rows), to=7), [1], keepdims=0)
    shrink = rate = None
    if decay is not None:
        each = op.Concat(total, heads, [-1], axis=0)
        shrink = _decay_in(op, op.Reshape(single(op, decay), each), heads, a_log, dt_bias, gate_activation, gate_lower_bound)
    if beta is not None:
        rate = op.Reshape(single(op, beta), op.Concat(total, heads, [1], axis=0))
        rate = op.Sigmoid(rate) if beta_activation == "sigmoid" else rate
    state = initial_state
    if state is None:
        state = op.Expand(op.constant(0, op.dtype(v)), op.Concat(op.Shape(starts), op.Shape(v, start=1), size, axis=0))
    final, y, delta = _scanned_in(op, state, owner, _repeated_in(op, q, heads), _repeated_in(op, k, heads), v, shrink, rate)
    factor = op.constant(scale, op.dtype(v)) if scale else op.Reciprocal(op.Sqrt(op.cast(op.Squeeze(size, [0]), v)))
    y = op.cast(op.Reshape(op.Mul(y, factor), op.Concat(lead, op.Shape(v, start=1), axis=0), allowzero=1), query)
    if len(wanted) < 3 or capture_count is None:
        return y, final
    shrink = op.Expand(op.constant(1, op.dtype(v)), op.Concat(total, heads, [1], axis=0)) if shrink is None else shrink
    return (
        y,
        final,
        _captured_in(op, (shrink, k, delta), starts, finals, capture_count, state_update_active, state_update_capacity),
    )


def _captured_in(op: Op, parts: tuple[V, ...], starts: V, finals: V, count: V, active: V | None, capacity: int) -> V:
    """`_captured` in ONNX operators."""
    steps = op.Range(0, capacity, 1)
    limit = op.Min(op.Cast(count, to=7), op.Sub(finals, starts))
    if active is not None and op.is_value(active):
        limit = op.Where(op.Equal(active, 0), 0, limit)
    elif active is not None:
        limit = limit if active else op.zeros_like(limit)
    kept = op.Unsqueeze(op.Less(steps, op.Unsqueeze(limit, [1])), [2])
    places = op.Add(op.Unsqueeze(starts, [1]), steps)
    made = []
    for part in parts:
        flat = op.Flatten(part, axis=1)
        rows = op.Gather(flat, op.Min(places, op.Sub(op.Shape(part, end=1), 1)))
        made.append(op.Flatten(op.Where(kept, rows, 0.0), axis=1))
    return op.Concat(*made, axis=1)
