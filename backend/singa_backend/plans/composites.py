"""Gradients of activations in primitive form: the calls of several rules as the gradient of one operator.

Files of PyTorch hold Gelu as Div, Erf, Add and two Mul, of which each has a gradient.  If all that reads x is such a form, the
gradient of x is that of Gelu, given the gradient of the result of the form.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ..ir.graph import ABSENT, GradientCall
from ..kernels.table import gradient_kernels
from ..rewriting.activations import activations
from .fusion.view import RegionView
from .region import Region, RegionCall

MIDDLES = frozenset(["Erf", "Tanh", "Sigmoid"])
"""The functions that the forms have in the middle."""


def composites(region: Region, known: Sequence[GradientCall], ids: dict[str, int]) -> list[GradientCall]:
    """The gradients of activations in primitive form, as calls of a rule.

    Args:
        region: the region as it was read.
        known: the calls of gradient rules.
        ids: the id of each value by its name.
    """
    if not any(c.op_type in MIDDLES and not c.domain for c in known):
        return []
    names = {i: name for name, i in reversed(ids.items())}
    given: dict[int, str] = {}
    for one in known:
        given |= {ids[y]: dy for y, dy in zip(one.outputs, one.dys, strict=False) if y in ids and dy in ids}
    differentiated = {ids[n] for one in known for n in one.outputs if n in ids}
    forward = [c for c in region.calls if differentiated & set(c.outputs)]
    kept = replace(region, calls=list(forward), constants=dict(region.constants), outputs=())
    view = RegionView(kept)
    activations(view)
    made: list[GradientCall] = []
    for call in set(view.calls()) - set(forward):
        (x, *_), (y, *_) = call.inputs, call.outputs
        form, operator = _between(forward, x, y), call.node.operator
        if operator is None or ("", call.name) not in gradient_kernels or any(c not in form for c in forward if x in c.reads):
            continue
        if x in region.outputs or x not in given or y not in given or not {x, y} <= names.keys():
            continue
        ends = (names[x],), (names[y],), (given[y],), (given[x],)
        made.append(GradientCall("", call.name, operator.version, call.attributes, *ends))
    return sorted(made, key=lambda c: ids[c.outputs[0]])


def _between(calls: Iterable[RegionCall], x: int, y: int) -> set[RegionCall]:
    """The calls that compute y from x and constants."""
    makers = {o: c for c in calls for o in c.outputs if o != ABSENT}
    found: set[RegionCall] = set()
    pending = [y]
    while pending:
        i = pending.pop()
        call = None if i == x else makers.get(i)
        if call is not None and call not in found:
            found.add(call)
            pending += call.reads
    return found
