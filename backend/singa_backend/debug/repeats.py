"""Finds the wrong one of several nodes of which only the last has a partner, by the same nodes elsewhere in the model.

One exporter computes a scale from a shape in every layer, or writes a cube as two products; the other stores the scale, or writes
Pow.  If the nodes of another layer, with the inputs of the other side at this place, compute the value of the other side, then
their values are the right ones here too, and the first value that is not among them is wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..comparison.difference import Tolerance, difference
from ..engines.local import Engine
from ..ir.graph import Node
from .alignment import Alignment
from .lockstep import Values, attempt
from .model import ComparedModel, inner_names, outer_names, read_names, result_names
from .sketch import arranged

_TWINS = 6
"""The most places of the model that are tried."""

_NEAR = 50
"""The most nodes whose predecessors are compared with those of the wrong one."""

_LONGEST = 64
"""The most nodes without a partner that are judged."""

_AROUND = 400
"""The most values of the other side that are related before two nodes."""


class Repeats:
    """The nodes of a model that compute the same as others.

    Args:
        source: the judged model.
        other: the trusted model.
        engines: that compute them.
        inputs: of `source`, by name.
        alignment: of the two models.
        tolerance: a function that returns the tolerance of values which these nodes compute.
    """

    def __init__(
        self, source: ComparedModel, other: ComparedModel, engines: tuple[Engine, Engine], inputs: Values, alignment: Alignment,
        tolerance: Callable[[Sequence[Node]], Tolerance],
    ) -> None:  # fmt: skip
        self.source, self.other, self.engines, self.inputs = source, other, engines, inputs
        self.pairs, self.alike, self.used = alignment.pairs, alignment.alike, alignment.used
        self.tolerance = tolerance
        self._places = {call: i for i, call in enumerate(source.graph.nodes)}

    def cause(self, end: Node, name: str, right: Any, region: Sequence[Node]) -> tuple[Node, Node] | None:
        """The node that is wrong, and the last of the nodes that show it.

        Args:
            end: the last of the nodes without a partner.
            name: its output that differs.
            right: the other side's value for it.
            region: the nodes back to values that agree, in order, with `end`.
        """
        if len(region) > _LONGEST or name not in self.pairs or self.other.producer(self.pairs[name].other) is None:
            return None
        region = [c for c in region if c is end or not any(n in self.used for n in result_names(c))]
        made = inner_names(region)
        before = self.source.graph.nodes[: self._places[end] + 1]
        mine = attempt(self.engines[0], self.source, before, self.inputs, made)
        if not isinstance(mine, dict):
            return None
        for twin, its, nodes in self._twins(end, name, region):
            values = self._computed(nodes, its, name, right)
            cause = values and self._first(region, mine, values)
            if cause:
                return cause, twin
        return None

    def _twins(
        self, end: Node, name: str, region: Sequence[Node]
    ) -> Iterator[tuple[Node, str, list[Node]]]:  # fmt: skip
        """The nodes with the operator of a node and of its partner, before which are the same operators, the nearest first."""
        at, partner = result_names(end).index(name), self.other.node(self.pairs[name].other)
        near = []
        for call in self.source.graph.nodes:
            if call is end or call.op_type != end.op_type or len(result_names(call)) <= at:
                continue
            pair = self.pairs.get(result_names(call)[at])
            maker = self.other.producer(pair.other) if pair else None
            if maker is not None and maker is not partner and maker.op_type == partner.op_type:
                near.append(call)
        near.sort(key=lambda c: abs(self._places[c] - self._places[end]))
        operators, found = Counter(c.op_type for c in region), 0
        read = {n for n in outer_names(region) if n in self.pairs}
        ends = {b for n in read for b in (self.pairs[n].other, *self.alike.get(n, ()))}
        for call in near[:_NEAR]:
            there = self._related(self.pairs[result_names(call)[at]].other, self.pairs[name].other)
            for stops in (ends, None):
                nodes = self._region(call, there, stops)
                if found < _TWINS and len(nodes) <= _LONGEST and not operators - Counter(c.op_type for c in nodes):
                    found += 1
                    yield call, result_names(call)[at], nodes
                    break

    def _computed(self, region: Sequence[Node], its: str, name: str, right: Any) -> list[tuple[str, Any]] | None:
        """The operators and values of nodes, of which the last has a partner, for the inputs of the other side at this place.

        None if they do not compute the right value.
        """
        there = self._related(self.pairs[its].other, self.pairs[name].other)
        feeds = self._feeds(region, there)
        found = feeds and attempt(self.engines[0], self.source, region, feeds, inner_names(region))
        if not isinstance(found, dict) or not difference(found[its], right, self.tolerance(region)).agrees:
            return None
        return [(c.op_type, found[n]) for c in region for n in result_names(c)]

    def _feeds(self, region: Sequence[Node], there: Mapping[str, str]) -> Values | None:
        """The inputs of nodes: the values of the other side at the place of another node.  None if it cannot compute them."""
        read = outer_names(region)
        ends = {n: there.get(self.pairs[n].other, self.pairs[n].other) for n in read if n in self.pairs}
        fed = {self.pairs[n].other if n in self.pairs else n: v for n, v in self.inputs.items()}
        wanted = [n for n in dict.fromkeys(ends.values()) if self.other.producer(n)]
        theirs = attempt(self.engines[1], self.other, self.other.graph.nodes, fed, wanted) if wanted else {}
        if not isinstance(theirs, dict):
            return None
        values, feeds = fed | theirs, Values()
        for n in read:
            if n in ends:
                value = values[ends[n]] if ends[n] in values else self.other.weight(ends[n])
                layout = self.pairs[n].layout
                if layout is not None and np.shape(value) != layout.split:
                    return None
                feeds[n] = value if layout is None else layout.apply(value)
            elif n in self.source.weights:
                feeds |= self._weight(n, there)
            elif n in self.inputs:
                feeds[n] = self.inputs[n]
        return feeds

    def _region(self, end: Node, there: Mapping[str, str], stops: Collection[str] | None) -> list[Node]:
        """A node and those before it, in order, back to values that have a partner and are not constants.

        stops: the values of the other side at the place where the region ends; None for any.
        """
        found, waiting = {end}, list(end.reads)
        while waiting and len(found) <= _LONGEST:
            value = waiting.pop()
            maker, pair = value.producer, self.pairs.get(value.name)
            within = pair is None or pair.how == "constant" or (stops is not None and there.get(pair.other) not in stops)
            if maker is not None and within and maker not in found:
                found.add(maker)
                waiting += maker.reads
        return sorted(found, key=lambda c: self._places[c])

    def _related(self, one: str, another: str) -> dict[str, str]:
        """The values before one value of the other side, and those at the same place before another one."""
        found = {one: another}
        waiting = [(one, another)]
        for a, b in waiting:
            first, second = self.other.producer(a), self.other.producer(b)
            if first is None or second is None or first.op_type != second.op_type or len(found) > _AROUND:
                continue
            if a != b and len(read_names(first)) == len(read_names(second)):
                for x, y in zip(read_names(first), read_names(second), strict=True):
                    if x not in found:
                        found[x] = y
                        waiting.append((x, y))
        return found

    def _weight(self, name: str, there: Mapping[str, str]) -> Values:
        """The weight of the other side that is at this place, if it is at the place of the weight; otherwise nothing."""
        value = self.source.weight(name)
        for a, b in there.items():
            if a == b or a not in self.other.weights or b not in self.other.weights:
                continue
            if list(self.other.weights[a].dims) == list(self.other.weights[b].dims):
                held = self.other.weight(a)
                layout = arranged(value, held, Tolerance(0, 0)) if held.size == value.size and held.dtype == value.dtype else None
                if layout is not None:
                    found = self.other.weight(b)
                    return {name: found if layout[0] is None else layout[0].apply(found)}
        return {}

    def _first(self, region: Sequence[Node], mine: Values, right: Sequence[tuple[str, Any]]) -> Node | None:
        """The node whose inputs are right and whose output is not; None if there are several."""
        made = set(inner_names(region))
        known, wrong = set[str](), list[Node]()
        tolerance = self.tolerance(region)
        for call in region:
            if not all(n in known or n not in made for n in read_names(call)):
                continue
            names, like = result_names(call), [v for operator, v in right if operator == call.op_type]
            if all(any(difference(mine[n], v, tolerance).agrees for v in like) for n in names):
                known.update(names)
            else:
                wrong.append(call)
        return wrong[0] if len(wrong) == 1 else None
