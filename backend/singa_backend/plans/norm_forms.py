"""Gradients of normalizations in primitive form: the calls of several rules as the gradient of one operator.

Files of PyTorch at an opset below 23 hold RMSNormalization as Pow, ReduceMean, Add, Sqrt, Reciprocal and two Mul.  Several of
them read x.  Its gradient is the sum of what their rules return, and of that of one further reader: a residual connection.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..ir.graph import ABSENT, GradientCall
from ..kernels.table import gradient_kernels
from ..rewriting.identity import identity
from ..rewriting.normalization import layer_norms
from .fusion.facts import Type
from .fusion.view import RegionView
from .region import Region, RegionCall, call_of

ROOTS = frozenset(["Sqrt", "Pow"])
"""The operators of which every form has one."""


@dataclass(frozen=True)
class NormForm:
    """A normalization in primitive form.

    Attributes:
        known: its gradient, as a call of a rule.
        y: the id of its result.
        inputs: the ids of x, the scale and the shift.
        total: the gradient of x in `known`: what the rules return for x, or the sum of that and another term.
        other: the other term; ABSENT if there is none.
    """

    known: GradientCall
    y: int
    inputs: tuple[int, ...]
    total: int
    other: int = ABSENT

    def forward(self, last: RegionCall) -> RegionCall:
        """The call that computes the result in place of the last one of the form."""
        return call_of(self.known.op_type, self.inputs, (self.y,), (last,), **self.known.attributes)


class _Trained(RegionView):
    """A view of a region in which parameters are constants that train: rules read their shapes only."""

    def __init__(self, region: Region, types: Mapping[int, Type], parameters: Collection[int]) -> None:
        self._parameters = frozenset(parameters)
        super().__init__(region, types)

    def trains(self, value: int) -> bool:
        return value in self._parameters


def norm_forms(
    region: Region, known: Sequence[GradientCall], ids: Mapping[str, int], types: Mapping[int, Type]
) -> list[NormForm]:
    """The normalizations in primitive form whose gradients one call may compute.

    Args:
        region: the region as it was read.
        known: the calls of gradient rules.
        ids: the id of each value by its name.
        types: the dtypes and shapes of the inputs.
    """
    differentiated = {ids[n]: c for c in known for n in c.outputs if n in ids}
    forward = [c for c in region.calls if not differentiated.keys().isdisjoint(c.outputs)]
    if not ROOTS & {c.operator for c in forward}:
        return []
    shapes = {i: s for i, (d, s) in types.items() if d == np.float32 and s is not None and all(isinstance(n, int) for n in s)}
    unknown = {i: np.broadcast_to(np.float32(np.nan), [int(n or 0) for n in s or ()]) for i, s in shapes.items()}
    copies = [replace(c) for c in forward]  # an alias changes a call
    kept = replace(region, calls=list(copies), constants={**region.constants, **unknown}, outputs=())
    view = _Trained(kept, types, shapes)
    identity(view)
    view.flush()
    layer_norms(view)
    forms, before = _Forms(region, forward, differentiated, ids), set(copies)
    found = [forms.of(c) for c in view.calls() if c not in before and ("", c.name) in gradient_kernels]
    return [f for f in found if f is not None]


class _Forms:
    """The forms of a region.

    Args:
        region: the region as it was read.
        forward: the calls that were differentiated.
        differentiated: the call of a rule by each output.
        ids: the id of each value by its name.
    """

    def __init__(
        self, region: Region, forward: Sequence[RegionCall], differentiated: Mapping[int, GradientCall], ids: Mapping[str, int]
    ) -> None:
        self.differentiated, self.ids = differentiated, ids
        self.names = {i: name for name, i in reversed(list(ids.items()))}
        self.makers = {o: c for c in forward for o in c.outputs if o != ABSENT}
        self.sums = _SumsOfTerms(region)

    def of(self, call: RegionCall) -> NormForm | None:
        """The form that a call computes at once; None if its gradient is not that of its parts."""
        (y, *_), inputs, names, operator = call.outputs, call.inputs, self.names, call.node.operator
        rule = self.differentiated.get(y)
        if operator is None or rule is None or any(i not in names for i in (*inputs, y)) or any(rule.dys[1:]) or rule.numbers:
            return None
        terms = self._terms(y, inputs)
        if terms is None or not terms[inputs[0]] or any(len(terms[i]) > 1 for i in inputs[1:]):
            return None
        total, others = self.sums.of(terms[inputs[0]])
        gradients = (total, *(terms[i][0] if terms[i] else ABSENT for i in inputs[1:]))
        if total not in names or len(others) > 1 or any(g != ABSENT and g not in names for g in gradients):
            return None
        known = GradientCall(
            "", call.name, operator.version, {n: call.attributes[n] for n in call.node.given}, tuple(names[i] for i in inputs),
            (names[y],), rule.dys[:1], tuple("" if g == ABSENT else names[g] for g in gradients),
        )  # fmt: skip
        return NormForm(known, y, inputs, total, *others)

    def _terms(self, y: int, inputs: Sequence[int]) -> dict[int, list[int]] | None:
        """What the rules of the calls between some inputs and y return for each input; None if one of them is not known."""
        inside, pending = set[int](), [y]
        while pending:
            i = pending.pop()
            if i not in inside and i not in inputs and i in self.makers:
                inside.add(i)
                pending += self.makers[i].reads
        terms: dict[int, list[int]] = {i: [] for i in inputs}
        for rule in filter(None, map(self.differentiated.get, sorted(inside))):
            for x, g in zip(rule.inputs, rule.gradients, strict=False):
                if g and self.ids.get(x) in terms:
                    if g not in self.ids:
                        return None
                    terms[self.ids[x]].append(self.ids[g])
        return terms


class _SumsOfTerms:
    """The sums of a region: the values that an Add makes."""

    def __init__(self, region: Region) -> None:
        self.results = set(region.outputs)
        self.makers = {c.outputs[0]: c for c in region.calls if c.operator == "Add"}
        self.readers: defaultdict[int, set[RegionCall]] = defaultdict(set)
        for c in region.calls:
            for i in c.reads:
                self.readers[i].add(c)

    def _above(self, value: int) -> list[int]:
        """A sum, and the sums of which it is a term, as long as nothing else reads them."""
        found = [value]
        while found[-1] not in self.results and len(self.readers[found[-1]]) == 1:
            (reader,) = self.readers[found[-1]]
            if reader.operator != "Add":
                break
            found.append(reader.outputs[0])
        return found

    def of(self, terms: Sequence[int]) -> tuple[int, list[int]]:
        """The first value that is the sum of these terms and others, and the others; ABSENT if there is none."""
        if len(terms) == 1:
            return terms[0], []
        lines: list[list[int]] = []
        for term, count in Counter(terms).items():
            adds = [r for r in self.readers[term] if r.operator == "Add"]
            if sum(r.inputs.count(term) for r in adds) != count:
                return ABSENT, []
            lines += [self._above(r.outputs[0]) for r in adds]
        common = [s for s in lines[0] if all(s in line for line in lines)]
        if not common:
            return ABSENT, []
        inner = {s for line in lines for s in line[: line.index(common[0]) + 1]}
        others = [i for s in inner for i in self.makers[s].inputs if i not in inner and i not in terms]
        return common[0], others
