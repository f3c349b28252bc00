"""Calls whose results are constants."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ..devices.namespaces import numpy
from ..ir.declaration import has_trait
from ..ir.graph import Node, Value
from ..limits import Budget, Limits, content_bytes, spend
from .identity import drops_nothing
from .rewriter import Rewriter

MOST = 1 << 20
"""Maximum bytes of any result; a larger one must not exceed what it replaces."""
LARGEST = 1 << 26
BOUNDS = Limits(tensor_bytes=LARGEST, live_bytes=4 * LARGEST, executions=10_000, iterations=10_000, deadline=5.0)


def constants(edit: Rewriter, stays: Callable[[Node], bool] | None = None) -> int:
    """For any deterministic call whose inputs are all constants, replace its results by constants.

    The results must not be larger than a bound and the constants that they replace; a call that fails stays, and fails when it
    runs.

    Args:
        edit: the graph.
        stays: whether a call stays for another reason.
    """
    count = 0
    for call in edit.constant_nodes():
        if not deterministic(edit, call):
            continue
        room = _room(edit, call)
        if (stays is not None and stays(call)) or _is_large(edit, call, room):
            continue
        results = _results(edit, call, room)
        if results is not None and edit.fold(call, results):
            count += 1
        else:
            edit.refused.add(call)
    return count


def deterministic(edit: Rewriter, call: Node) -> bool:
    """Whether a call of an operator always returns the same for the same inputs, if the nodes of its subgraphs do.

    False if it is not known: functions of the model, custom operators, and a Dropout that may drop.
    """
    domain, name = call.domain, call.op_type
    if not edit.version(call) or domain.startswith("ai.onnx.preview") or has_trait(domain, name, "random"):
        return False
    if name == "BatchNormalization" and len(call.outputs) > 1:
        return False  # an old version in training form
    return not has_trait(domain, name, "random_in_training") or drops_nothing(edit, call)


def _room(edit: Rewriter, call: Node) -> int:
    """The maximum bytes of the results; constants that only this call reads add their bytes."""
    return max(MOST, min(sum(edit.constant_bytes(i) for i in set(call.inputs) if i is not None and i.is_used_once), LARGEST))


def _is_large(edit: Rewriter, call: Node, room: int) -> bool:
    """Whether a result is known to be too large."""
    for o in () if edit.keeps_views and has_trait("", edit.operator(call), "view") else call.outputs:
        shape, dtype = edit.shape(o), edit.dtype(o)
        if shape is not None and dtype is not None:
            sizes = [d for d in shape if isinstance(d, int)]
            if len(sizes) == len(shape) and math.prod(sizes) * dtype.itemsize > room:
                return True
    return False


def _results(edit: Rewriter, call: Node, room: int) -> dict[Value, np.ndarray] | None:
    """The results by the definition; None if they are too large or not tensors, or the call fails or has subgraphs."""
    values = [edit.constant(v, LARGEST) for v in call.inputs]
    if any(a is None and v is not None for v, a in zip(call.inputs, values, strict=True)):
        return None
    try:
        node = edit.runnable(call)
        if node is None or node.operator is None:
            return None
        with spend(Budget(BOUNDS)), np.errstate(all="ignore"):
            found = node.operator.run(numpy, values, node.attributes, [o is not None for o in node.outputs])
    except Exception:  # the call stays, and raises when it runs
        return None
    made = {o: r for o, r in zip(call.outputs, found, strict=False) if o is not None}
    if not all(isinstance(r, np.ndarray) for r in made.values()):
        return None
    held = [v for v in values if v is not None] if edit.keeps_views else []
    new = [content_bytes(r) for r in made.values() if not any(np.may_share_memory(r, v) for v in held)]
    return made if sum(new) <= room else None
