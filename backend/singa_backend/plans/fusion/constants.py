"""Calls whose results are constants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import SonnxError
from ...ir.declaration import has_trait
from ...ir.graph import ABSENT
from ...kernels.values import Computed
from ...limits import Budget, spend
from ...passes.constants import BOUNDS, LARGEST, MOST
from ..region import Call, Region, branch_of, branches_fit
from .editing import Editor
from .facts import operator
from .identity import drops_nothing


def constants(edit: Editor) -> int:
    """For any deterministic call whose inputs are all constants, replace its results by constants.

    The results must not be larger than a bound and the constants that they replace; a call that fails stays, and fails when it
    runs.
    """
    known, count = edit.region.constants, 0
    for call in edit.calls():
        if call in edit.refused or not all(i in known or i == ABSENT for i in call.inputs) or not _deterministic(edit, call):
            continue
        results = _results(edit, call)
        if results is None:
            edit.refused.add(call)
        else:
            edit.fold(call, results)
            count += 1
    return count


def sizes(edit: Editor) -> int:
    """For any call whose result consists of known sizes, such as Shape and Gather of it, replace the result by a constant."""
    count = 0
    for value, array in edit.facts.known_sizes():
        call = edit.producer(value)
        if call is not None and len(call.outputs) == 1:
            edit.fold(call, {value: array})
            count += 1
    return count


def branches(edit: Editor) -> int:
    """For any call of the form If(c), where c is a constant, replace it by the calls of its branch."""
    count = 0
    for call in edit.named("If"):
        condition = edit.constant(call.inputs[0])
        if condition is None or condition.size != 1 or condition.dtype != np.bool_ or not branches_fit(call):
            continue
        graph = call.attributes["then_branch" if condition.reshape(-1)[0] else "else_branch"]
        inner = Region(constants=edit.region.constants, names=edit.region.names, size=edit.region.size)
        outputs = branch_of(inner, graph, call.scope)
        edit.region.size = inner.size
        edit.put(call, *inner.calls)
        for old, new in zip(call.outputs, outputs, strict=False):
            if old != ABSENT:
                edit.alias(old, new)
        count += 1
    if count:
        edit.flush()
        edit.facts.infer_all(edit.calls())
    return count


def _multiplied(edit: Editor, call: Call) -> bool:
    """Whether a product reads the result of a call, or a view of it."""
    users = edit.users(call.outputs[0])
    return any(
        has_trait("", operator(u), "reads_quantized") or (has_trait("", operator(u), "view") and _multiplied(edit, u))
        for u in users
    )


def _deterministic(edit: Editor, call: Call) -> bool:
    node = call.node
    if node.domain not in ("", "ai.onnx.ml") or node.graphs or node.operator is None:
        return False
    if call.is_("DequantizeLinear") and _multiplied(edit, call):
        return False
    if has_trait(node.domain, node.op_type, "random") or (node.op_type == "BatchNormalization" and len(call.outputs) > 1):
        return False
    return not has_trait(node.domain, node.op_type, "random_in_training") or drops_nothing(edit, call)


def _results(edit: Editor, call: Call) -> dict[int, np.ndarray] | None:
    room = _room(edit, call)
    for o in call.outputs if not has_trait("", operator(call), "view") else ():
        shape, dtype = edit.facts.shape(o), edit.facts.dtype(o)
        if shape is not None and dtype is not None:
            sizes = [d for d in shape if isinstance(d, int)]
            if len(sizes) == len(shape) and math.prod(sizes) * dtype.itemsize > room:
                return None
    values = [None if i == ABSENT else _value(edit.region.constants[i]) for i in call.inputs]
    try:
        with spend(Budget(BOUNDS)), np.errstate(all="ignore"):
            found = call.run(values)
    except (SonnxError, ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError):
        return None
    made = {o: r for o, r in zip(call.outputs, found, strict=False) if o != ABSENT}
    if any(not isinstance(r, np.ndarray) or r.dtype == object for r in made.values()):
        return None
    new = [r.nbytes for r in made.values() if not any(np.may_share_memory(r, v) for v in values if isinstance(v, np.ndarray))]
    return made if sum(new) <= room else None


def _value(constant: Any) -> Any:
    return constant.array() if isinstance(constant, Computed) else constant


def _room(edit: Editor, call: Call) -> int:
    """The maximum bytes of the results; constants that only this call reads add their bytes."""
    held = 0
    for i in set(call.inputs):
        array = edit.constant(i)
        if array is not None and edit.once(i):
            held += array.nbytes
    return max(MOST, min(held, LARGEST))
