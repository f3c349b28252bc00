"""Continues an alignment after a fault: replaces a value by one of the other side, and tests whether those after it agree.

If an output differs, every value after the fault does, and none of them has an equal partner.  A value that can be replaced
by one of the other side, so that the values computed from it, or the outputs, agree in every element on two draws, is the end
of the fault; its node is the cause if its inputs are equal.  Nodes that only one side has, without effect, are passed over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..comparison.difference import same_bits
from ..ir.graph import Node
from .align import Aligner, ModelSide
from .alignment import ValuePair
from .lockstep import Values, attempt, run_calls
from .model import inner_names, outer_names, read_names, result_names
from .sketch import ValueLayout, agree, arranged, sketch
from .spill import SpillStore

_TRIALS = 400
"""The most replacements that are tried."""

_FOR_ONE = 10
"""The most values of the other side by which one value is replaced."""

_OTHER_SIZES = 3
"""The most values of another size, of the same operator, by which one value is replaced."""

_LARGE = 8
"""Elements of a constant, such as zeros in the place of a value, before which others are tried; a shape has less."""

_ENOUGH = 3
"""Equal values after a replacement that show its effect, if no output is equal."""

_WITHOUT = 64
"""Values after a replacement that may be unequal before it is given up."""


@dataclass
class Effect:
    """The values that are equal after a replacement.

    Attributes:
        pairs: the values that are equal now, with their partners and layouts.
        outputs: the outputs among them.
        fresh: the number of the pairs whose value was not equal to any before.
        broken: whether a value that was equal before is not equal now.
    """

    pairs: dict[str, tuple[str, ValueLayout | None]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    fresh: int = 0
    broken: bool = False

    @property
    def shown(self) -> bool:
        """Whether the replacement had an effect."""
        return not self.broken and (bool(self.outputs) or self.fresh >= _ENOUGH)


class Repair:
    """Finds the values at which two sides part.  A context manager: the values are stored on disk beyond the budget.

    Args:
        aligner: after its `run`.
        mine: the judged model.
        budget: the maximum bytes of stored values in memory.

    Attributes:
        culprits: the values that were replaced, in order, and the values of the other side.
        inserted: values that only some nodes should read, and the values of the other side that they should read instead.
        neutral: constants that culprits read, whose values may be those of the other side without an effect.
    """

    def __init__(self, aligner: Aligner, mine: ModelSide, budget: int) -> None:
        self.aligner, self.mine, self.budget = aligner, mine, budget
        self.source = mine.source
        self.draws = range(min(2, aligner.draws))
        self.equal = {a for a, p in aligner.pairs.items() if p.other in aligner.verified.get(a, ()) or p.how == "constant"}
        self.covered = {aligner.pairs[a].other for a in self.equal if aligner.pairs[a].layout is None}
        self.wrong = [o for o in mine.outputs if o in aligner.pairs and o in mine.made and o not in self.equal]
        self.culprits: dict[str, str] = {}
        self._trials = 0
        first: dict[str, str] = {}
        self._first: dict[str, str] = {}
        for a, pair in aligner.pairs.items():
            self._first.setdefault(pair.other, a)
        self.inserted: dict[str, str] = {}
        self.neutral: dict[str, str] = {}
        self.copies = {
            a for a in mine.made if a in self.equal and any(first.setdefault(b, a) != a for b in aligner.verified.get(a, ()))
        } | {a for a in self.equal if aligner.pairs[a].layout is not None}
        self._stack = ExitStack()

    def __enter__(self) -> Repair:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self) -> None:
        """Replace values until the outputs agree, or no replacement has an effect."""
        if not self.wrong:
            return
        stores = [self._stack.enter_context(SpillStore(self.budget // 4)) for _ in range(2 * len(self.draws))]
        self._ours, self._theirs = stores[: len(self.draws)], stores[len(self.draws) :]
        for draw in self.draws:
            for name, value in self.mine.stream(draw):
                self._ours[draw].put(name, value)
            for name, value in self.aligner.theirs.stream(draw):
                self._theirs[draw].put(name, value)
        steps: list[Callable[[], bool]] = [partial(self._replaced, True), self._inserted, partial(self._replaced, False)]
        if not any(made.uses for made in self.aligner.theirs.made.values()):
            steps = [steps[1], steps[0], steps[2]]  # without its nodes a missing value looks like a fault in the next one
        while self.wrong and self._trials < _TRIALS and any(step() for step in steps):
            pass

    # --- which values ---------------------------------------------------------------------------------------------------

    def region(self) -> list[Node]:
        """The nodes between equal values and the outputs that differ, in order."""
        found, waiting = set[Node](), [self.source.values[name] for name in self.wrong]
        while waiting:
            value = waiting.pop()
            call, known = value.producer, value.name in self.equal or value.name in self.culprits
            if call is not None and not known and call not in found:
                found.add(call)
                waiting += call.reads
        return [c for c in self.source.graph.nodes if c in found]

    def _known(self, name: str) -> bool:
        return name in self.equal or self.source.producer(name) is None or name in self.aligner.left.still

    def _replaced(self, sure: bool) -> bool:
        """Try to replace values of the region, and values before it that may be equal by chance.

        sure: the latter by values of the same operator, then those of nodes whose inputs are equal; otherwise the other ones.
        """
        calls = self.region()
        heads = [c for c in calls if all(map(self._known, read_names(c)))]
        weak = self._weak(heads)
        before = [*weak, *self._copied(heads)]
        names = [n for c in calls if (c in heads) == sure for n in result_names(c) if n not in self.equal]
        for alike, some in ((True, before), (False, names)) if sure else ((False, names), (False, before)):
            for name in some:
                if name not in self.culprits and self._one_replaced(name, alike, name in weak):
                    return True
        return False

    def _one_replaced(self, name: str, alike: bool, weak: bool) -> bool:
        """Try to replace a value; `alike` by weights, and by values of the same operator."""
        call, made = self.source.node(name), self.aligner.theirs.made
        still = name in self.aligner.left.still
        firm = still and self._firm(call)
        if still and not weak and not self._compared(call):
            return False
        for other, layout in itertools.chain(self._stored(name) if firm else (), self._choices(name)):
            if alike and other in made and made[other].operator != call.op_type:
                continue
            if still and not firm and not weak and not self._matches(call, other):
                continue
            if self._trials >= _TRIALS:
                return False
            if self._tried(name, (other, layout), self._after([name])):
                self.aligner.pairs[name] = ValuePair(other, layout, "repair")
                self.culprits[name] = other
                self.equal.discard(name)
                self._set_aside(name, other)
                return True
        return False

    def _choices(self, name: str) -> Iterator[tuple[str, ValueLayout | None]]:
        """The values that may replace a value, and their layouts: as they are, or in its shape."""
        call, made = self.source.node(name), self.aligner.theirs.made
        if name in self.aligner.namesakes:
            if self._fitting(name, name):
                yield name, None
            return
        choices = self._partners(name, call)
        for other in choices:
            layout = self._fitting(name, other)
            if layout and layout[0] is not None and made[other].operator == call.op_type:
                yield other, None
            if layout:
                yield other, layout[0]
        mine = self._value(name, 0)
        base = max((made[n].at for n in self._ancestors(call) if n in made), default=0)
        same = [b for b, m in made.items() if m.operator == call.op_type and b not in self.covered and b not in choices]
        for other in sorted(same, key=lambda b: abs(made[b].at - base))[:_OTHER_SIZES]:
            theirs = self._theirs[0].get(other) if other in self._theirs[0] else None
            if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray) and mine.size != theirs.size:
                yield other, None

    def _stored(self, name: str) -> Iterator[tuple[str, ValueLayout | None]]:
        """The weights that the other side has in the place of a constant, in its shape; first a partner of another layout."""
        pairs, made = self.aligner.pairs, self.aligner.theirs.made
        pair = pairs.get(name)
        plain = self._fitting(name, pair.other) if pair is not None and pair.layout is not None else None
        if pair is not None and plain and plain[0] != pair.layout:
            yield pair.other, plain[0]
        for call in self.source.values[name].users:
            read = {
                pairs[n].other for n in read_names(call) if n in self.equal and n in pairs and n not in self.aligner.left.still
            }
            for partner in made.values():
                if partner.operator == call.op_type and read and read <= set(partner.uses):
                    for other in partner.uses:
                        layout = self._fitting(name, other) if other not in made and other not in read else None
                        if layout:
                            yield other, layout[0]

    def _set_aside(self, name: str, other: str) -> None:
        """Note the constants that a culprit reads and that may be replaced by those of its partner without an effect."""
        call, made = self.source.node(name), self.aligner.theirs.made.get(other)
        if made is None or made.operator != call.op_type or len(made.uses) != len(read_names(call)):
            return
        for mine, theirs in zip(read_names(call), made.uses, strict=True):
            if mine in self.equal or mine not in self.aligner.left.still:
                continue
            value = self._their_value(theirs, 0)
            if value is None:
                continue
            feeds = {n: self._value(n, 0) for n in read_names(call) if n not in self.source.weights}
            results = [attempt(self.mine.engine, self.source, [call], v, [name]) for v in (feeds, feeds | {mine: value})]
            if all(isinstance(r, dict) for r in results) and same_bits(*(r[name] for r in results if isinstance(r, dict))):
                self.neutral[mine] = theirs

    def _compared(self, call: Node) -> bool:
        """Whether all values that a node reads are equal."""
        return all(n in self.equal or self.source.producer(n) is None for n in read_names(call))

    def _firm(self, call: Node) -> bool:
        """Whether all values that a node reads are equal, and none of them is a constant that may be so by chance."""
        made = [n for n in read_names(call) if self.source.producer(n)]
        pairs, left = self.aligner.pairs, self.aligner.left
        return all(n in self.equal and (pairs[n].how != "constant" or n in left.distinct) for n in made)

    def _matches(self, call: Node, other: str) -> bool:
        """Whether a node of the other side has the operator of a node, and reads equal values."""
        made = self.aligner.theirs.made
        read = [n for n in read_names(call) if self.source.producer(n)]
        return other in made and made[other].operator == call.op_type and all(self.reads(other, n) for n in read)

    def reads(self, other: str, name: str) -> bool:
        """Whether the node of a value of the other side reads the partner of a value, or one with the same bits."""
        made, pair = self.aligner.theirs.made.get(other), self.aligner.pairs.get(name)
        if made is None or pair is None:
            return False
        return pair.other in made.uses or any(same_bits(self._value(name, 0), self._their_value(n, 0)) for n in made.uses)

    def _copied(self, heads: Sequence[Node]) -> list[str]:
        """The values before these nodes that equal an earlier value too, which the other side may compute otherwise."""
        found, seen, waiting = set[str](), set[str](), [n for c in heads for n in read_names(c)]
        while waiting:
            name = waiting.pop()
            seen, known = seen | {name}, name in seen
            if name in self.copies and not known:
                if not self._sure(name):
                    found.add(name)
                waiting += read_names(self.source.node(name))
            elif not known and name not in self.equal and self.source.producer(name):
                waiting += read_names(self.source.node(name))
        return [n for c in self.source.graph.nodes for n in result_names(c) if n in found]

    def _weak(self, heads: Sequence[Node]) -> list[str]:
        """The constants before these nodes that equal a constant of the other side, perhaps by chance, in order."""
        pairs, left = self.aligner.pairs, self.aligner.left
        found, waiting = set[str](), [n for c in heads for n in read_names(c)]
        while waiting:
            name = waiting.pop()
            if self.source.producer(name) is None or name not in self.equal or name in found or pairs[name].how != "constant":
                continue
            if name not in left.distinct and self._compared(self.source.node(name)):
                found.add(name)
                waiting += read_names(self.source.node(name)) if left.sizes[name][1] >= _LARGE else ()
        return [n for c in self.source.graph.nodes for n in result_names(c) if n in found]

    def _sure(self, name: str) -> bool:
        """Whether the partner of a value has the same operator and the partners of its inputs, and pairs with this value only."""
        pairs, call = self.aligner.pairs, self.source.node(name)
        other = self.aligner.theirs.made.get(pairs[name].other)
        read = {pairs[n].other for n in read_names(call) if n in pairs and self.source.producer(n)}
        first = self._first.setdefault(pairs[name].other, name) == name and pairs[name].layout is None
        return first and other is not None and other.operator == call.op_type and bool(read) and read <= set(other.uses)

    def _inserted(self) -> bool:
        """Try the values that the nodes of the region read: the other side may have a node more before some of these nodes."""
        region = self.region()
        heads = [c for c in region if all(map(self._known, read_names(c)))]
        for name in dict.fromkeys(n for c in heads for n in read_names(c) if n in self.equal and self.source.producer(n)):
            groups = [[c for c in part if name in read_names(c)] for part in (region, heads)]
            for other in self._between(name):
                layout = self._fitting(name, other)
                for readers in groups[: 1 + (groups[0] != groups[1])] if layout else ():
                    if self._trials >= _TRIALS:
                        return False
                    after = {*readers, *self._after(inner_names(readers))}
                    calls = [c for c in self.source.graph.nodes if c in after]
                    if layout and self._tried(name, (other, layout[0]), calls, stays=True):
                        self.inserted[name] = other
                        return True
        return False

    def _between(self, name: str) -> list[str]:
        """The values that the other side may compute from the partner of a value, and that have no partner."""
        partner, made = self.aligner.pairs[name].other, self.aligner.theirs.made
        if any(m.uses for m in made.values()):
            return [b for b, m in made.items() if b not in self.covered and partner in m.uses]
        size, base = self.aligner.left.sizes.get(name), made[partner].at if partner in made else 0
        near = [b for b in self.aligner.right.groups.get(size, ()) if b not in self.covered] if size else []
        return sorted(near, key=lambda b: (made[b].at < base, abs(made[b].at - base)))[:_FOR_ONE]

    def _partners(self, name: str, call: Node) -> list[str]:
        """The values of the other side that may replace a value, the likeliest first."""
        aligner, made = self.aligner, self.aligner.theirs.made
        key = aligner.left.sizes.get(name)
        alike = [] if key is None else aligner.right.groups.get(key, [])
        pairs = aligner.pairs
        read = {pairs[n].other for n in read_names(call) if n in pairs and n in self.equal}
        base = max((made[n].at for n in self._ancestors(call) if n in made), default=0)
        named = aligner.names.get(name)
        mine = aligner.mine.made[name]

        def rank(b: str) -> tuple[Any, ...]:
            other = made[b]
            same = other.operator == mine.operator
            scoped = bool(mine.scope) and other.scope == mine.scope
            return b != named, not (same and read <= set(other.uses)), not scoped, not same, abs(other.at - base)

        own = pairs[name].other if name in pairs else ""  # which may have another layout
        choices = [b for b in alike if b not in self.covered or b in read or b == own]
        return sorted((b for b in choices if b not in self.culprits.values()), key=rank)[:_FOR_ONE]

    def _ancestors(self, call: Node) -> set[str]:
        """The partners of the equal values nearest before a node."""
        found, seen, waiting = set[str](), set[str](), list(read_names(call))
        while waiting:
            name = waiting.pop()
            if name in seen:
                continue
            seen.add(name)
            if name in self.equal:
                found.add(self.aligner.pairs[name].other)
            elif self.source.producer(name):
                waiting += read_names(self.source.node(name))
        return found

    def _fitting(self, name: str, other: str) -> tuple[ValueLayout | None] | None:
        """The layout in which a value may replace another one, in a tuple; None if it cannot."""
        mine, theirs = self._value(name, 0), self._their_value(other, 0)
        if not isinstance(mine, np.ndarray) or not isinstance(theirs, np.ndarray) or mine.dtype != theirs.dtype:
            return None
        if mine.size != theirs.size:
            return None
        return (None if mine.shape == theirs.shape else ValueLayout(theirs.shape, tuple(range(theirs.ndim)), mine.shape),)

    # --- trials ---------------------------------------------------------------------------------------------------------

    def _value(self, name: str, draw: int) -> Any:
        return self._ours[draw].get(name) if name in self._ours[draw] else self.mine.draws[draw].get(name)

    def _their_value(self, name: str, draw: int) -> Any:
        """A value or a weight of the other side; None if it has neither."""
        return self._theirs[draw].get(name) if name in self._theirs[draw] else self.aligner.theirs.weight(name)

    def _after(self, names: Sequence[str]) -> list[Node]:
        """The nodes that are computed from these values, in order."""
        found, waiting = set[Node](), [self.source.values[name] for name in names]
        while waiting:
            for call in waiting.pop().users:
                if call not in found:
                    found.add(call)
                    waiting += call.results
        return [c for c in self.source.graph.nodes if c in found]

    def _tried(
        self, name: str, other: tuple[str, ValueLayout | None], calls: Sequence[Node], *, stays: bool = False
    ) -> bool:  # fmt: skip
        """Replace a value; if this has an effect on every draw, keep the values that follow from it.

        stays: replace it only for these nodes.
        """
        self._trials += 1
        ends = not stays and name in self.wrong and self.aligner.pairs[name].other == other[0]
        itself = [name] if ends else []
        if not self._effect(0, (name, *other), calls, quick=True).shown:
            return False
        effect: Effect | None = None
        kept: list[Values] = []
        for draw in self.draws:
            values: Values = {}
            effect = self._effect(draw, (name, *other), calls, values=values, known=effect)
            if stays:
                values.pop(name, None)
            kept.append(values)
        if effect is None or not effect.shown:
            return False
        for draw, values in zip(self.draws, kept, strict=True):
            for changed, value in values.items():
                if changed in self._ours[draw]:
                    self._ours[draw].take(changed)
                self._ours[draw].put(changed, value)
        for a, (b, layout) in effect.pairs.items():
            if a not in self.aligner.namesakes or a == b:
                self.aligner.pairs[a] = ValuePair(b, layout, "repair")
        self.equal.update(effect.pairs)
        self.equal.update(effect.outputs)
        effect.outputs += itself
        self.covered.update(b for b, _ in effect.pairs.values())
        self.wrong = [o for o in self.wrong if o not in effect.outputs]
        return True

    def _effect(
        self, draw: int, replacement: tuple[str, str, ValueLayout | None], calls: Sequence[Node], *,
        quick: bool = False, values: Values | None = None, known: Effect | None = None,
    ) -> Effect:  # fmt: skip
        """Compute the nodes after a replacement, and compare them with the other side.

        quick: stop when the effect is known.  values: receives the computed values.  known: the pairs to confirm.
        """
        effect = Effect()
        feeds = self._feeds(draw, replacement, calls)
        if values is not None:
            values[replacement[0]] = feeds[replacement[0]]
        seen = 0
        taken = set[str]()
        for _, found in run_calls(self.source, self.mine.engine, calls, feeds, self.mine.budget):
            for name, value in found.items():
                if values is not None:
                    values[name] = value
                if name in self.equal and name not in self.copies:
                    effect.broken = effect.broken or not self._still_equal(draw, name, value)
                    continue
                if name not in self.aligner.left.moving and name not in self.wrong:
                    continue
                seen += 1
                pair = self._partner(draw, name, value, known, taken)
                if pair is not None:
                    effect.pairs[name] = pair
                    taken.add(pair[0])
                    effect.fresh += name not in self.copies
                    if name in self.wrong and pair[0] == self.aligner.pairs[name].other:
                        effect.outputs.append(name)
            if effect.broken or (quick and (effect.shown or (seen > _WITHOUT and not effect.pairs))):
                break
        return effect

    def _feeds(self, draw: int, replacement: tuple[str, str, ValueLayout | None], calls: Sequence[Node]) -> Values:
        """The values that these nodes read, with the one that is replaced."""
        read = [n for n in outer_names(calls) if n not in self.source.weights]
        name, other, layout = replacement
        value = self._their_value(other, draw)
        return {n: self._value(n, draw) for n in read if n != name} | {name: value if layout is None else layout.apply(value)}

    def _still_equal(self, draw: int, name: str, value: Any) -> bool:
        """Whether a value that was equal to its partner is so after a replacement."""
        pair = self.aligner.pairs[name]
        if pair.other not in self._theirs[draw]:
            return True
        return agree(value, self._theirs[draw].get(pair.other), pair.layout, self.aligner.tolerance(name, pair.other))

    def _partner(
        self, draw: int, name: str, value: Any, known: Effect | None, taken: set[str]
    ) -> tuple[str, ValueLayout | None] | None:
        """The value of the other side that equals a value after the replacement."""
        aligner = self.aligner
        if known is not None:
            pair = known.pairs.get(name)
            tolerance = pair and aligner.tolerance(name, pair[0])
            good = pair and tolerance and agree(value, self._theirs[draw].get(pair[0]), pair[1], tolerance)
            return pair if good else None
        figures = sketch(value)
        if figures is None or draw:
            return None
        ends = [aligner.pairs[name].other] if name in self.wrong else []
        near = aligner.near(name, figures, (value.dtype, value.size), aligner.mine.made[name].at)
        near.sort(key=lambda b: aligner.theirs.made[b].operator != aligner.mine.made[name].operator)
        for other in (*ends, *near):
            if (other in self.covered and other not in ends) or other in taken or other not in self._theirs[draw]:
                continue
            layout = arranged(value, self._theirs[draw].get(other), aligner.tolerance(name, other))
            if layout is not None:
                return other, layout[0]
        return None
