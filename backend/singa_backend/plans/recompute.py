"""Memory for time: values that are needed again late in a plan are computed again, in place of being kept.

At the step of a plan at which the most bytes are live, many values wait for a later use: in a training step, the activations for
the gradients.  A value whose calls are cloned before that use need not wait.  The cheapest values for their bytes are chosen
first, one after the other, until the estimate of the live bytes fits; if it does not, other choices are tried.  This is
rematerialization as in "Training Deep Nets with Sublinear Memory Cost" (Chen et al., 2016), by the sizes and costs of one trace.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

from ..ir import graph as ir
from ..ir.declaration import has_trait
from ..ir.gradient import GRADIENT
from ..kernels.table import TRAINING
from ..kernels.work import flops
from .arena import rounded
from .flat import Roles

INTENSITY = 16
"""The floating point operations that take the time of reading or writing a byte."""

ATTEMPTS = 8
"""How often calls are chosen for a plan."""

ROUNDS = 400
"""The maximum number of values that are chosen."""

WORK = 50_000
"""The maximum number of calls in the choices that are judged in each other way."""

SEGMENTS = 40
"""The number of segments between kept values, below which choices are judged."""

FEW = 9
"""The number of values up to which every choice is judged."""


@dataclass(frozen=True)
class Home:
    """Where a trace has kept a value.

    Attributes:
        buffer: identifies the memory, which views of it share.
        nbytes: of the memory.
        shape: of the value.
    """

    buffer: Hashable
    nbytes: int
    shape: tuple[int, ...]


Homes = dict[ir.Value, Home]
"""Where values are."""


@dataclass(eq=False)
class CallOrder:
    """The calls of a plan in the order in which they run, with clones of some of them, which are in no graph.

    Attributes:
        calls: the calls.
        outputs: of the plan.
        last: the index of the first call that only makes results which replace inputs.
    """

    calls: Sequence[ir.Node]
    outputs: Sequence[ir.Value]
    last: int | None = None


@dataclass
class Recomputed:
    """What was chosen.

    Attributes:
        bytes_before: the estimate of the live bytes without it.
        bytes_after: with it.
        calls: the number of cloned calls.
        chosen: the buffers whose values are computed again.
    """

    bytes_before: int
    bytes_after: int
    calls: int = 0
    chosen: frozenset[Hashable] = frozenset()


class Recomputing:
    """Chooses what to compute again, until a plan fits its bound: its bytes are known when it is made, and estimated before.

    Args:
        graph: of the plan.
        roles: of its values.

    Attributes:
        calls: the number of cloned calls.
        attempts: how often calls were chosen.
    """

    def __init__(self, graph: ir.Graph, roles: Roles) -> None:
        self._graph, self._roles = graph, roles
        self._order = CallOrder(graph.nodes, graph.outputs, roles.last)
        self._plain: tuple[Sequence[ir.Node], int | None, Homes] | None = None
        self._lowest: tuple[int, Sequence[ir.Node], int | None, int, Homes] | None = None
        self._tried: set[tuple[int, frozenset[Hashable]]] = set()
        self._target = self.calls = self.attempts = 0

    def fit(self, homes: Homes, live: int, used: int, bound: int) -> bool:
        """Choose for less memory than the last plan used: fewer bytes by the estimate, or else more for the lowest plan.

        Args:
            homes: of the values of the last plan.
            live: the lowest number of bytes that they take.
            used: the bytes that they take, which are more than the bound.
            bound: the bytes that they may take.

        Returns:
            Whether other calls were chosen; after the last attempt, those of the plan with the fewest bytes.
        """
        order = self._order
        if self._lowest is None or used <= self._lowest[0]:
            self._lowest = used, order.calls, order.last, self.calls, homes
        if self._plain is None:
            self._plain, self._target = (order.calls, order.last, homes), live * bound // used
        else:
            self._target = min(self._target * bound // used, self._target - 1)
        self.attempts += 1
        changed = self.attempts <= ATTEMPTS and (self._fewer() or self._more(bound))
        if not changed:
            ended, self.attempts = self.attempts > ATTEMPTS + 1, ATTEMPTS + 1
            lowest, order.calls, order.last, self.calls, _ = self._lowest
            changed = lowest < used and not ended
        self._graph.arrange(order.calls)
        self._roles.last = order.last
        return changed

    def _fewer(self) -> bool:
        """Choose for the target, or for the most bytes below it whose choice was not tried."""
        order = self._order
        assert self._plain is not None
        while True:
            order.calls, order.last, homes = self._plain
            result = recompute(order, homes, self._target)
            if result.calls and (0, result.chosen) not in self._tried:
                self._tried.add((0, result.chosen))
                self.calls = result.calls
                return True
            if not result.calls or result.bytes_after > self._target:
                return False
            self._target = result.bytes_after - 1

    def _more(self, bound: int) -> bool:
        """Choose further calls in the plan with the fewest bytes."""
        assert self._lowest is not None
        order = self._order
        used, order.calls, order.last, self.calls, homes = self._lowest
        estimate, _ = _peak(order.calls, order.outputs, homes)
        result = recompute(order, homes, min(estimate * bound // used, estimate - 1))
        key = self.calls, result.chosen
        if not result.calls or not self.calls or key in self._tried:
            return False
        self._tried.add(key)
        self.calls += result.calls
        return True


@dataclass(eq=False)
class _Clones:
    """The calls with clones of some of them.

    Attributes:
        calls: in order.
        homes: of the values, the new ones included.
        count: the number of clones.
    """

    calls: list[ir.Node]
    homes: Homes
    count: int = 0


def recompute(order: CallOrder, homes: Homes, budget: int) -> Recomputed:
    """Clone calls of a plan until its values fit a number of bytes.

    Args:
        order: the calls, which are changed.
        homes: of the values that are not constants or inputs.
        budget: the bytes that may be live at a time.

    Returns:
        The estimates; the one after may exceed the budget, if no further value can be computed again.
    """
    before, _ = _peak(order.calls, order.outputs, homes)
    made = Recomputed(before, before)
    while made.bytes_after > budget:  # then the most bytes are live elsewhere
        search = _ChoiceSearch(order, homes, budget)
        for choose in (search.cheapest_first, search.in_segments, search.one_by_one, search.all_choices):
            if search.lowest > budget:
                choose()
        if not search.chosen:
            break
        order.calls, homes = search.clones.calls, search.clones.homes
        made.bytes_after, made.chosen = search.lowest, made.chosen | search.chosen
        made.calls += search.clones.count
    if order.last is not None:
        order.last += made.calls
    return made


class _ChoiceSearch:
    """A search for values to compute again, which ends at a choice that fits.

    Attributes:
        lowest: the bytes of the best choice.
        chosen: its buffers.
        clones: its calls.
    """

    def __init__(self, order: CallOrder, homes: Homes, budget: int) -> None:
        self.order, self.homes, self.budget = order, homes, budget
        self.lowest, self.peak = _peak(order.calls, order.outputs, homes)
        self.waiting = _waiting(order, homes, self.peak)
        self.makers = {o: c for c in order.calls[: self.peak] for o in c.results}
        self.chosen, self.clones = frozenset[Hashable](), _Clones([*order.calls], homes)
        self._seen: set[frozenset[Hashable]] = {self.chosen}
        self._left = 0
        kept = {i for ids in self.waiting.values() for i in ids}
        self.possible = [b for b, ids in self.waiting.items() if self._can(ids, kept)]

    def _can(self, ids: list[ir.Value], kept: Collection[ir.Value]) -> bool:
        return _needed(ids, {*kept}.difference(ids), self.makers) is not None

    def _better(self, chosen: Collection[Hashable]) -> bool:
        """Judge a choice, and keep it if it needs fewer bytes than the best one."""
        key = frozenset(chosen)
        if key in self._seen or not self._computable(key):
            return False
        self._seen.add(key)
        self._left -= len(self.order.calls)
        clones = _cloned(self.order, self.homes, self.peak, self.waiting, self.makers, key)
        live, _ = _peak(clones.calls, self.order.outputs, clones.homes)
        if live >= self.lowest:
            return False
        self.lowest, self.chosen, self.clones = live, key, clones
        return True

    def _computable(self, chosen: frozenset[Hashable]) -> bool:
        """Whether the chosen values follow from those that are kept, by calls that may run twice."""
        kept = {i for b, ids in self.waiting.items() if b not in chosen for i in ids}
        return all(_needed(self.waiting[b], kept, self.makers) is not None for b in chosen)

    def cheapest_first(self) -> None:
        """Add the value that costs least for its bytes, one after the other."""
        chosen: set[Hashable] = set()
        while self.lowest > self.budget and len(chosen) < ROUNDS:
            buffer = _cheapest(self.waiting, self.makers, self.homes, chosen)
            if buffer is None:
                return
            chosen.add(buffer)
            self._better(chosen)

    def in_segments(self) -> None:
        """Keep one value after each so many bytes, the smallest near there: what is between two kept ones is computed at once."""
        sizes = {b: self.homes[self.waiting[b][0]].nbytes for b in self.possible}
        whole = sum(sizes.values())
        self._try(self._segments(sizes, whole / parts) for parts in range(2, SEGMENTS))

    def _segments(self, sizes: dict[Hashable, int], most: float) -> set[Hashable]:
        chosen, run, total = set(self.possible), list[Hashable](), 0
        for b in self.possible:
            run.append(b)
            total += sizes[b]
            if total >= most:
                chosen.remove(min(reversed(run[len(run) // 2 :]), key=sizes.__getitem__))
                run, total = [], 0
        return chosen

    def one_by_one(self) -> None:
        """Add or leave out one value of the best choice, or two, as long as that needs fewer bytes."""
        self._left = WORK
        while self.lowest > self.budget and self._left > 0:
            changes = chain(combinations(self.possible, 1), combinations(self.possible, 2))
            tries = (self._better(self.chosen.symmetric_difference(c)) for c in changes)
            if not any(better or self._left <= 0 for better in tries):
                return

    def all_choices(self) -> None:
        """Try every choice of few values."""
        if len(self.possible) <= FEW:
            self._try(c for n in range(1, len(self.possible) + 1) for c in combinations(self.possible, n))

    def _try(self, choices: Iterable[Collection[Hashable]]) -> None:
        """Judge choices until one fits."""
        self._left = WORK
        for chosen in choices:
            if self.lowest <= self.budget or self._left <= 0:
                return
            self._better(chosen)


def _peak(calls: Sequence[ir.Node], outputs: Iterable[ir.Value], homes: Homes) -> tuple[int, int]:
    """The highest number of live bytes, and the index of the first call at which so many are."""
    first: dict[Hashable, int] = {}
    last: dict[Hashable, int] = {}
    sizes: dict[Hashable, int] = {}
    for at, call in enumerate(calls):
        for i in (*call.results, *call.reads):
            home = homes.get(i)
            if home is not None:
                first.setdefault(home.buffer, at)
                last[home.buffer] = at
                sizes[home.buffer] = rounded(home.nbytes)
    for o in outputs:
        if o in homes:
            last[homes[o].buffer] = len(calls)
    changes = [0] * (len(calls) + 2)
    for buffer, begins in first.items():
        changes[begins] += sizes[buffer]
        changes[last[buffer] + 1] -= sizes[buffer]
    live = most = at = 0
    for index, change in enumerate(changes):
        live += change
        if live > most:
            most, at = live, index
    return most, at


def _waiting(order: CallOrder, homes: Homes, peak: int) -> dict[Hashable, list[ir.Value]]:
    """The values that are made before a call and read after it, by their buffer; without those of outputs and the last calls."""
    made = [o for c in order.calls[:peak] for o in c.results if o in homes]
    last = order.calls[len(order.calls) if order.last is None else order.last :]
    read = {i for c in order.calls[peak:] for i in c.reads}
    kept = {homes[o].buffer for o in (*order.outputs, *(i for c in last for i in c.reads)) if o in homes}
    found: dict[Hashable, list[ir.Value]] = {}
    for i in made:  # in the order in which they are made
        if i in read and homes[i].buffer not in kept:
            found.setdefault(homes[i].buffer, []).append(i)
    return found


def _cheapest(
    waiting: dict[Hashable, list[ir.Value]], makers: dict[ir.Value, ir.Node], homes: Homes, chosen: Collection[Hashable]
) -> Hashable | None:
    """The buffer whose values cost least for its bytes; None if no further one can be computed again."""
    kept = {i for b, held in waiting.items() if b not in chosen for i in held}
    best, lowest = None, float("inf")
    for buffer, ids in waiting.items():
        if buffer in chosen:
            continue
        calls = _needed(ids, kept.difference(ids), makers)
        if calls is None:
            continue
        rate = sum(_cost(c, homes) for c in calls) / max(homes[ids[0]].nbytes, 1)
        if rate < lowest:
            best, lowest = buffer, rate
    return best


def _cost(call: ir.Node, homes: Homes) -> float:
    """The time of a call, as the bytes that take it to read."""
    given = [homes[i].shape if i in homes else None for i in call.inputs]
    made = next((homes[o] for o in call.results if o in homes), None)
    domain = "" if call.domain == TRAINING else call.domain
    work = flops(domain, call.op_type, call.attributes, given, made.shape) if made is not None else 0
    moved = {homes[i].buffer: homes[i].nbytes for i in (*call.reads, *call.results) if i in homes}
    return sum(moved.values()) + (work or 0) / INTENSITY


def _needed(ids: Iterable[ir.Value], kept: Collection[ir.Value], makers: dict[ir.Value, ir.Node]) -> list[ir.Node] | None:
    """The calls that compute values from kept ones and inputs, each after those that it needs; None if one must not run twice."""
    found: list[ir.Node] = []
    seen: set[int] = set()
    pending = [(i, False) for i in ids]
    while pending:
        i, done = pending.pop()
        call = makers.get(i)
        if call is None or i in kept:
            continue
        if done:
            found.append(call)
        elif id(call) not in seen:
            seen.add(id(call))
            if not _repeatable(call):
                return None
            pending.append((i, True))
            pending += [(r, False) for r in call.reads]
    return found


def _repeatable(node: ir.Node) -> bool:
    domain = "" if node.domain == TRAINING else node.domain
    traits = ("random", "random_in_training", "exchanges")
    return not node.bodies and node.domain != GRADIENT and not any(has_trait(domain, node.op_type, t) for t in traits)


def _cloned(
    order: CallOrder,
    homes: Homes,
    peak: int,
    waiting: dict[Hashable, list[ir.Value]],
    makers: dict[ir.Value, ir.Node],
    chosen: Collection[Hashable],
) -> _Clones:
    """The calls, in which values of the chosen buffers are computed again before their first use after the peak."""
    dropped = {i for b in chosen for i in waiting.get(b, ())}
    kept = {i for b, ids in waiting.items() if b not in chosen for i in ids}
    made = _Clones(list(order.calls[:peak]), dict(homes))
    names: dict[ir.Value, ir.Value] = {}
    for call in order.calls[peak:]:
        for i in call.reads:
            if i in dropped and i not in names:
                for source in _needed([i], {*kept, *names}, makers) or ():
                    made.calls.append(_clone(source, names, made.homes))
                    made.count += 1
        made.calls.append(_renamed(call, names) if names.keys() & set(call.reads) else call)
    _omit_unread(made.calls, order.outputs, set(names.values()))
    return made


def _clone(call: ir.Node, names: dict[ir.Value, ir.Value], homes: Homes) -> ir.Node:
    """A call that computes the results of another one again; `names` gets their values."""
    made = _renamed(call, names)
    made.outputs = [None if o is None else ir.Value(o.name) for o in call.outputs]
    for old, new in zip(call.outputs, made.outputs, strict=True):
        if old is not None and new is not None:
            names[old] = new
            if old in homes:
                homes[new] = replace(homes[old], buffer=("again", homes[old].buffer))
    return made


def _renamed(call: ir.Node, names: dict[ir.Value, ir.Value]) -> ir.Node:
    return call.copy([None if i is None else names.get(i, i) for i in call.inputs], call.outputs, call.origins, names)


def _omit_unread(calls: Sequence[ir.Node], outputs: Iterable[ir.Value], new: Collection[ir.Value]) -> None:
    """Omit the results of clones that nothing reads, such as running statistics."""
    read = {i for c in calls for i in c.reads} | set(outputs)
    for call in calls:
        if any(o in new for o in call.results):
            call.outputs = [None if o in new and o not in read else o for o in call.outputs]
