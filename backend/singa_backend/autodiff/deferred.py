"""Gradients whose rules need not write their nodes, because a kernel computes them: what a recorded step has learned.

If a plan has replaced all nodes of a rule by one kernel, then a later recording of the step, for another batch size, writes one
node in their place.  The form of a call is what the rule can see of it except for sizes and values, and its place in the step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any

from ..interpreters.base import DifferentiatedCall, Interpreter
from ..ir.gradient_calls import is_plain

Forms = Mapping[Hashable, tuple[bool, ...]]
"""For each form of a call, whether the rule returns a gradient for each input."""


def form_of(op: Interpreter[Any], call: DifferentiatedCall) -> Hashable | None:
    """The form of a call; None if its gradient cannot be deferred: a size is not known, or a gradient is a constant.

    Args:
        op: the writer of its symbols.
        call: the call.
    """
    if not is_plain(dict(call.attributes)):
        return None
    values: list[Hashable] = []
    for v in (*call.inputs, *call.outputs):
        if v is None or not op.is_value(v):  # absent, or not kept
            values.append(v is None)
            continue
        what, constant = _sizeless(op, v), op.constant_value(v) is not None
        if what is None:
            return None
        values.append((*what, constant, "" if constant else v.name))
    for dy in call.dys:
        what = None if dy is None else _sizeless(op, dy)
        if dy is not None and (what is None or op.constant_value(dy) is not None):
            return None
        values.append(what)
    counts = len(call.inputs), len(call.outputs)
    attributes = tuple((n, repr(v)) for n, v in sorted(call.attributes.items()))
    declaration = call.operator.declaration
    return (declaration.domain, declaration.name, call.operator.version, attributes, tuple(call.needs), counts, tuple(values))


def _sizeless(op: Interpreter[Any], value: Any) -> tuple[int, int] | None:
    """The element type and the rank of a tensor; None if a size is not known."""
    type, shape = op.type_of(value), op.shape(value)
    if type is None or shape is None or not all(isinstance(d, int) for d in shape):
        return None
    return type.tensor_type.elem_type, len(shape)


def _unshared(calls: Sequence[DifferentiatedCall]) -> set[int]:
    """The places of calls whose gradients are results of no other rule but those that their own has called.

    Rules may write equal nodes, which are one; a kernel would then compute a gradient of another call.
    """
    makers: defaultdict[int, list[int]] = defaultdict(list)
    for at, call in enumerate(calls):
        given = set(map(id, call.dys))
        for g in {id(g) for g in call.gradients if g is not None} - given:
            makers[g].append(at)
    return {
        at
        for at, call in enumerate(calls)
        if all(at - call.inner <= other <= at for g in call.gradients if g is not None for other in makers[id(g)])
    }


class Deferrable:
    """What the plans of a recorded step have taught of its gradients.

    Attributes:
        forms: the forms of calls whose gradients are deferred.
    """

    def __init__(self) -> None:
        self.forms: dict[Hashable, tuple[bool, ...]] = {}
        self._kept: set[Hashable] = set()

    def learn(self, op: Interpreter[Any], calls: Sequence[DifferentiatedCall], taken: Collection[int]) -> None:
        """Learn from a plan.

        Args:
            op: the writer of the symbols of the calls.
            calls: the calls of rules.
            taken: the places of those whose nodes a kernel has replaced, among the calls that a model lists.
        """
        plain = [at for at, c in enumerate(calls) if is_plain(dict(c.attributes))]
        chosen = {plain[n] for n in taken if n < len(plain)} & _unshared(calls)
        for at, call in enumerate(calls):
            form = form_of(op, call)
            present = tuple(g is not None for g in call.gradients)
            if form is None:
                continue
            if at in chosen and any(present) and self.forms.get(form, present) == present:
                self.forms[form] = present
            else:
                self._kept.add(form)
        for form in self._kept & self.forms.keys():
            del self.forms[form]
