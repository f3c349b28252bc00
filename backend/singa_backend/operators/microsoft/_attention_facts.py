"""Rules of shapes and of work that attention operators of onnxruntime share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...ir.declaration import WorkShape
from ...ir.shapes import Dim, KnownShapes, Shape


def _part(size: Dim, times: int, of: int, fresh: str) -> Dim:
    """Return size * times / of, if the size is known."""
    return size * times // of if isinstance(size, int) and of else size if times == of else fresh


def _shape(known: KnownShapes[Any], call: Any, index: int) -> Shape | None:
    value = known.input(call, index)
    return None if value is None else known.shape(value)


def of_groups(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    """GroupQueryAttention and SparseAttention: the result, and two caches, which have the shape of the past."""
    q, past = _shape(known, call, 0), _shape(known, call, 3)
    heads, groups = known.attribute(call, "num_heads"), known.attribute(call, "kv_num_heads")
    if q is None or len(q) != 3 or not heads or not groups:
        return None
    all_heads = heads if known.input(call, 1) is not None else heads + 2 * groups
    size = _part(q[2], 1, all_heads, known.fresh())
    present: Shape = (q[0], groups, known.fresh(), size)
    if past is not None and len(past) == 4:
        present = (q[0], groups, known.fresh(), past[3])
    return [(q[0], q[1], _part(q[2], heads, all_heads, known.fresh())), present, present]


def of_heads(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    """MultiHeadAttention: the result, with the hidden size of the values, and two caches."""
    q, k, v, heads = (*(_shape(known, call, i) for i in range(3)), known.attribute(call, "num_heads"))
    if q is None or not heads:
        return None
    if len(q) == 5:
        return [(q[0], q[1], _part(q[4], heads, 1, known.fresh()))]
    hidden: Dim | None = None
    if k is not None and len(k) == 5:
        hidden = _part(k[4], heads, 1, known.fresh())
    elif v is not None and len(v) == 4:
        hidden = _part(v[3], heads, 1, known.fresh())
    elif v is not None and len(v) == 3:
        hidden = v[2]
    elif known.input(call, 1) is None and len(q) == 3:  # DecoderMaskedMultiHeadAttention
        hidden = _part(q[2], 1, 3, known.fresh())
    if hidden is None or len(q) != 3:
        return None
    own = q[2] if known.input(call, 1) is not None else hidden
    caches: list[Shape | None] = [(q[0], heads, known.fresh(), _part(n, 1, heads, known.fresh())) for n in (own, hidden)]
    return [(q[0], q[1], hidden), *caches]


def of_projection(known: KnownShapes[Any], call: Any) -> list[Shape | None] | None:
    """Attention, QAttention and PackedAttention: the last axis is that of the values, and a cache has both."""
    x, weights, heads = _shape(known, call, 0), _shape(known, call, 1), known.attribute(call, "num_heads")
    if x is None or weights is None or len(weights) != 2 or not heads:
        return None
    sizes = known.attribute(call, "qkv_hidden_sizes")
    hidden = int(sizes[2]) if sizes else _part(weights[1], 1, 3, known.fresh())
    result: Shape = (*x[:-1], hidden)
    if len(x) != 3:
        return [result]
    return [result, (2, x[0], heads, known.fresh(), _part(hidden, 1, heads, known.fresh()))]


def attended(keys: int, past: int) -> Any:
    """Return a rule of work: the products of queries and keys, and of weights and values.

    Args:
        keys: The index of an input whose second axis is the number of new keys; that of the queries if it is absent.
        past: The index of an input whose axis before the last is the number of rows of the past.
    """

    def rule(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
        batch, rows, hidden = output
        new = inputs[keys] if len(inputs) > keys else None
        cached = inputs[past] if len(inputs) > past else None
        count = (new[-2] if new is not None and len(new) == 4 else new[1]) if new is not None else rows
        total = count + (cached[-2] if cached is not None else 0)
        return 4 * batch * rows * total * hidden

    return rule


def projected(past: int) -> Any:
    """Return a rule of work: the projection of the input by the weights, and `attended`."""
    after = attended(0, past)

    def rule(attributes: Mapping[str, Any], inputs: Sequence[WorkShape], output: Sequence[int]) -> int:
        weights = inputs[1] or ()
        work: int = after(attributes, inputs, output)
        return work + 2 * output[0] * output[1] * weights[0] * weights[1]

    return rule
