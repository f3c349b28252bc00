"""Gradients of normalizations in primitive form: the calls of several rules as the gradient of one operator.

Files of PyTorch at an opset below 23 hold RMSNormalization as Pow, ReduceMean, Add, Sqrt, Reciprocal and two Mul.  Several of
them read x.  Its gradient is the sum of what their rules return, and of that of one further reader: a residual connection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ir import graph as ir
from ..ir.gradient_calls import GradientCall
from ..kernels.table import gradient_kernels
from ..rewriting.identity import identity
from ..rewriting.normalization import layer_norms
from .flat import call_of, operator, scratch
from .fusion.facts import Type
from .fusion.rewriter import PlanRewriter

ROOTS = frozenset(["Sqrt", "Pow"])
"""The operators of which every form has one."""


@dataclass(frozen=True)
class NormForm:
    """A normalization in primitive form.

    Attributes:
        known: its gradient, as a call of a rule.
        y: its result.
        inputs: x, the scale and the shift.
        total: the gradient of x in `known`: what the rules return for x, or the sum of that and another term.
        other: the other term; None if there is none.
    """

    known: GradientCall
    y: ir.Value
    inputs: tuple[ir.Value, ...]
    total: ir.Value
    other: ir.Value | None = None

    def forward(self, last: ir.Node) -> ir.Node:
        """The node that computes the result in place of the last one of the form."""
        return call_of(self.known.op_type, self.inputs, (self.y,), (last,), **self.known.attributes)


class _Trained(PlanRewriter):
    """A graph in which parameters are constants that train: rules read their shapes only."""

    def __init__(self, graph: ir.Graph, types: Mapping[ir.Value, Type], parameters: Collection[ir.Value]) -> None:
        self._parameters = frozenset(parameters)
        super().__init__(graph, types)

    def trains(self, value: ir.Value | None) -> bool:
        return value in self._parameters


def norm_forms(
    graph: ir.Graph, known: Sequence[GradientCall], ids: Mapping[str, ir.Value], types: Mapping[ir.Value, Type]
) -> list[NormForm]:
    """The normalizations in primitive form whose gradients one call may compute.

    Args:
        graph: the graph as it was read.
        known: the calls of gradient rules.
        ids: each value by its name.
        types: the dtypes and shapes of the inputs.
    """
    differentiated = {ids[n]: c for c in known for n in c.outputs if n in ids}
    forward = [c for c in graph.nodes if not differentiated.keys().isdisjoint(c.outputs)]
    if not ROOTS & {operator(c) for c in forward}:
        return []
    shapes = {i: s for i, (d, s) in types.items() if d == np.float32 and s is not None and all(isinstance(n, int) for n in s)}
    unknown = {i: np.broadcast_to(np.float32(np.nan), [int(n or 0) for n in s or ()]) for i, s in shapes.items()}
    copied, originals = scratch(forward, unknown)
    given = {made: value for made, value in originals.items() if value in types}
    before, parameters = set(copied.nodes), [made for made, value in given.items() if value in shapes]
    rewriter = _Trained(copied, {made: types[value] for made, value in given.items()}, parameters)
    identity(rewriter)
    layer_norms(rewriter)
    forms = _Forms(forward, differentiated, ids, originals)
    found = [forms.of(c) for c in copied.nodes if c not in before and ("", c.op_type) in gradient_kernels]
    return [f for f in found if f is not None]


class _Forms:
    """The forms of a graph.

    Args:
        forward: the nodes that were differentiated.
        differentiated: the call of a rule by each output.
        ids: each value by its name.
        originals: what the values of a copy of the nodes stand for.
    """

    def __init__(
        self,
        forward: Sequence[ir.Node],
        differentiated: Mapping[ir.Value, GradientCall],
        ids: Mapping[str, ir.Value],
        originals: Mapping[ir.Value, ir.Value],
    ) -> None:
        self.differentiated, self.ids, self.originals = differentiated, ids, originals
        self.names = {i: name for name, i in reversed(list(ids.items()))}
        self.forward = frozenset(forward)

    def of(self, call: ir.Node) -> NormForm | None:
        """The form that a node of the copy computes at once; None if its gradient is not that of its parts."""
        y, *inputs = (self.originals.get(v, v) for v in (*call.results[:1], *call.inputs) if v is not None)
        names, version, rule = self.names, call.version, self.differentiated.get(y)
        if version is None or rule is None or any(i not in names for i in (*inputs, y)) or any(rule.dys[1:]) or rule.numbers:
            return None
        terms = self._terms(y, inputs)
        if terms is None or not terms[inputs[0]] or any(len(terms[i]) > 1 for i in inputs[1:]):
            return None
        total, others = _sum_of(terms[inputs[0]])
        gradients = (total, *(terms[i][0] if terms[i] else None for i in inputs[1:]))
        if total is None or total not in names or len(others) > 1 or any(g is not None and g not in names for g in gradients):
            return None
        known = GradientCall(
            "", call.op_type, version, {n: call.attributes[n] for n in call.given}, tuple(names[i] for i in inputs),
            (names[y],), rule.dys[:1], tuple("" if g is None else names[g] for g in gradients),
        )  # fmt: skip
        return NormForm(known, y, tuple(inputs), total, *others)

    def _terms(self, y: ir.Value, inputs: Sequence[ir.Value]) -> dict[ir.Value, list[ir.Value]] | None:
        """What the rules of the calls between some inputs and y return for each input; None if one of them is not known."""
        inside, pending = dict[ir.Value, tuple[int, int]](), [y]
        while pending:
            i = pending.pop()
            node = i.producer
            if i not in inside and i not in inputs and node in self.forward and node is not None:
                inside[i] = node.position, node.outputs.index(i)
                pending += node.reads
        terms: dict[ir.Value, list[ir.Value]] = {i: [] for i in inputs}
        for rule in filter(None, map(self.differentiated.get, sorted(inside, key=inside.__getitem__))):
            for x, g in zip(rule.inputs, rule.gradients, strict=False):
                if g and self.ids.get(x) in terms:
                    if g not in self.ids:
                        return None
                    terms[self.ids[x]].append(self.ids[g])
        return terms


def _sums_above(value: ir.Value) -> list[ir.Value]:
    """A sum, and the sums of which it is a term, as long as nothing else reads them."""
    found = [value]
    while not found[-1].is_output and len(users := found[-1].users) == 1:
        (reader,) = users
        if operator(reader) != "Add":
            break
        found += reader.results
    return found


def _sum_of(terms: Sequence[ir.Value]) -> tuple[ir.Value | None, list[ir.Value]]:
    """The first value that is the sum of these terms and others, and the others; None if there is none."""
    if len(terms) == 1:
        return terms[0], []
    lines: list[list[ir.Value]] = []
    for term, count in Counter(terms).items():
        adds = [r for r in term.users if operator(r) == "Add"]
        if sum(r.inputs.count(term) for r in adds) != count:
            return None, []
        lines += [_sums_above(r.results[0]) for r in adds]
    common = [s for s in lines[0] if all(s in line for line in lines)]
    if not common:
        return None, []
    inner = dict.fromkeys(s for line in lines for s in line[: line.index(common[0]) + 1])
    others = [i for s in inner for i in (s.producer.reads if s.producer else ()) if i not in inner and i not in terms]
    return common[0], others
