"""Aligns the values of two models, or of a model and a PyTorch module, when names differ: by values, then by structure.

Both sides compute the same drawn inputs several times.  Sketches of the values select candidates, each of which is verified in
every element on every draw.  Where an output differs, `repair` continues after the fault.

found = align(mine, theirs, ...)
print(found)              # 148 of 166 nodes matched with 80 of 85 nodes of the other model, on 3 draws of inputs
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import numpy as np

from ..comparison.difference import Tolerance, same_kind
from ..dtypes import is_float
from ..engines.local import Engine
from ..ir.graph import Node
from ..proto.scopes import named_scope, stored_scopes
from .alignment import ValuePair
from .lockstep import Values, run_calls
from .model import ComparedModel, message_of, read_names, result_names
from .sketch import ValueLayout, agree, arranged, sketch
from .spill import SpillStore

DRAWS = 3
"""The inputs on which both sides run: those of the comparison, and others of the same shapes."""

_CANDIDATES = 12
"""The most candidates of a value that are verified."""

_SMALL = 6
"""Elements that a value needs, over all draws, to be paired by its elements alone."""

_DIFFERENT = 8
"""The different elements of a constant that does not equal another one by chance."""

_READ = 4096
"""The elements that are read to count different ones."""

Dtype: TypeAlias = np.dtype[Any]


@dataclass(frozen=True)
class Made:
    """How one side computes a value.

    Attributes:
        at: its position in the order of computation.
        operator: of its node, or the class of a submodule.
        uses: the values that it is computed from, as far as known.
        scope: the path of the PyTorch module that computed it, as far as known.
    """

    at: int
    operator: str
    uses: tuple[str, ...] = ()
    scope: str = ""


class Side(Protocol):
    """One side of an alignment."""

    @property
    def made(self) -> Mapping[str, Made]:
        """Its values, in the order of computation."""

    @property
    def outputs(self) -> Sequence[str]:
        """The names of its outputs, in order."""

    def stream(self, draw: int) -> Iterator[tuple[str, Any]]:
        """Compute the values for a draw of inputs, in order; values that cannot be computed are left out."""

    def constant(self, like: np.ndarray) -> tuple[str, ValueLayout | None] | None:
        """The name of a weight that equals this array, and its layout; None if there is none."""

    def weight(self, name: str) -> np.ndarray | None:
        """A weight; None if there is none of this name."""

    def widened(self, tolerance: Tolerance, name: str) -> Tolerance:
        """A tolerance with the errors of all nodes on which a value depends."""


class ModelSide:
    """A model as a side of an alignment.

    Args:
        source: the model.
        engine: that computes it.
        draws: the inputs of each draw, by name.
        budget: the maximum bytes of the results of a chunk.
    """

    def __init__(self, source: ComparedModel, engine: Engine, draws: Sequence[Values], budget: int) -> None:
        self.source, self.engine, self.draws, self.budget = source, engine, draws, budget
        self.outputs: Sequence[str] = source.outputs
        self.made: dict[str, Made] = {}
        for i, node in enumerate(source.graph.nodes):
            made = Made(i, node.op_type, read_names(node), scope_of(node))
            self.made |= {} if source.draws(node) else dict.fromkeys(result_names(node), made)
        self._weights: dict[tuple[Dtype, tuple[int, ...]], dict[bytes, str]] = {}

    def stream(self, draw: int) -> Iterator[tuple[str, Any]]:
        for _, found in run_calls(self.source, self.engine, self.source.graph.nodes, self.draws[draw], self.budget):
            yield from found.items()

    def constant(self, like: np.ndarray) -> tuple[str, ValueLayout | None] | None:
        found = self._by_bytes(like.dtype, like.shape).get(np.ascontiguousarray(like).tobytes())
        if found is not None:
            return found, None
        for name in self._sizes.get(like.size, ())[:_CANDIDATES] if distinct(like) else ():
            value = self.source.weight(name)
            layout = arranged(like, value, Tolerance(0, 0)) if value.dtype == like.dtype else None
            if layout is not None:
                return name, layout[0]
        return None

    def weight(self, name: str) -> np.ndarray | None:
        return self.source.weight(name) if name in self.source.weights else None

    def _by_bytes(self, dtype: Dtype, shape: tuple[int, ...]) -> dict[bytes, str]:
        if (dtype, shape) not in self._weights:
            found = self._weights[dtype, shape] = {}
            for name in self._shapes.get(shape, ()):
                value = self.source.weight(name)
                if value.dtype == dtype:
                    found.setdefault(np.ascontiguousarray(value).tobytes(), name)
        return self._weights[dtype, shape]

    @cached_property
    def _shapes(self) -> dict[tuple[int, ...], list[str]]:
        """The names of the weights of each shape."""
        found = defaultdict[tuple[int, ...], list[str]](list)
        for name, proto in self.source.weights.items():
            found[tuple(proto.dims)].append(name)
        return found

    @cached_property
    def _sizes(self) -> dict[int, list[str]]:
        """The names of the weights of each number of elements."""
        found = defaultdict[int, list[str]](list)
        for shape, names in self._shapes.items():
            found[int(np.prod(shape))] += names
        return found

    def widened(self, tolerance: Tolerance, name: str) -> Tolerance:
        return self.source.widened(tolerance, name)


def distinct(value: Any) -> bool:
    """Whether an array has so many different elements that it does not equal another one by chance."""
    return isinstance(value, np.ndarray) and value.size >= _DIFFERENT and len(np.unique(value.reshape(-1)[:_READ])) >= _DIFFERENT


def scope_of(node: Node) -> str:
    """The path of the PyTorch module that a node was exported from, by its metadata or its name; "" if neither has it."""
    return next(filter(None, reversed(stored_scopes(message_of(node)))), "") or named_scope(node.name)


class SketchTable:
    """The sketches of one side's values, of the first draws.

    Attributes:
        figures: of each value, an array (draws, figures).
        groups: the names of the values of each dtype and size.
        sizes: the dtype and the size of each value.
        shapes: the shape of each value.
        moving: the values that differ between draws and have enough elements to be known by them.
        still: the values that are the same on all draws.
        distinct: those of them that do not equal another value by chance.
    """

    def __init__(self, side: Side, draws: Sequence[int]) -> None:
        found: dict[str, list[np.ndarray]] = {}
        different = set[str]()
        self.sizes: dict[str, tuple[Dtype, int]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for draw in draws:
            for name, value in side.stream(draw):
                if name not in side.made:
                    continue
                figures = sketch(value)
                if figures is not None:
                    found.setdefault(name, []).append(figures)
                    self.sizes[name], self.shapes[name] = (value.dtype, value.size), value.shape
                    if draw == draws[-1] and figures.tobytes() == found[name][0].tobytes() and distinct(value):
                        different.add(name)
        self.figures = {n: np.array(f) for n, f in found.items() if len(f) == len(draws)}
        self.groups = defaultdict[tuple[Dtype, int], list[str]](list)
        self.moving, self.still, self.distinct = set[str](), set[str](), set[str]()
        for name, figures in self.figures.items():
            self.groups[self.sizes[name]].append(name)
            dtype, size = self.sizes[name]
            same = len(draws) > 1 and bool((figures == figures[0]).all())
            if same:
                self.still.add(name)
                self.distinct |= {name} & different
            elif size * DRAWS >= (_SMALL if is_float(dtype) else 4 * _SMALL) and figures[0, 3] > figures[0, 4]:
                self.moving.add(name)


class Finder:
    """Finds the values of a table whose sketches agree with a sketch."""

    def __init__(self, table: SketchTable, made: Mapping[str, Made]) -> None:
        self.groups: dict[tuple[Dtype, int], tuple[list[str], np.ndarray, np.ndarray]] = {}
        for key, names in table.groups.items():
            figures = np.array([table.figures[n][0] for n in names])
            order = np.argsort(figures[:, 1], kind="stable")
            places = np.array([made[names[i]].at for i in order])
            self.groups[key] = [names[i] for i in order], figures[order], places

    def near(self, key: tuple[Dtype, int], figures: np.ndarray, rtol: float, at: int) -> list[str]:
        """The values of this dtype and size whose sketch is near, at most `_CANDIDATES`, the nearest in position first."""
        if key not in self.groups:
            return []
        names, known, places = self.groups[key]
        total, size = figures[1], key[1]
        slack = rtol * total + rtol * size * 1e-30
        low, high = bisect_left(known[:, 1], total - slack), bisect_right(known[:, 1], total + slack)
        if low == high:
            return []
        part = known[low:high]
        top = max(abs(figures[3]), abs(figures[4]))
        bounds = np.array([slack, slack, 2 * rtol * figures[2], rtol * top, rtol * top, 0.0])
        good = np.flatnonzero((np.abs(part - figures) <= bounds).all(axis=1)) + low
        if good.size > _CANDIDATES:
            good = good[np.argsort(np.abs(places[good] - at), kind="stable")[:_CANDIDATES]]
        return [names[i] for i in good]


class _LazyValues:
    """The values of one side for one draw, which runs only as far as they are requested."""

    def __init__(self, side: Side, draw: int, wanted: Counter[str], store: SpillStore) -> None:
        self.stream, self.wanted, self.store = side.stream(draw), wanted, store

    def get(self, name: str) -> Any:
        """A value, which is dropped after the last request; None if it could not be computed."""
        while name not in self.store:
            step = next(self.stream, None)
            if step is None:
                return None
            if self.wanted[step[0]] > 0:
                self.store.put(*step)
        self.wanted[name] -= 1
        return self.store.get(name) if self.wanted[name] else self.store.take(name)


Verified = dict[str, dict[str, ValueLayout | None]]
"""The values of the other side that agree with each value on all draws, and their layouts."""


class Aligner:
    """Aligns two sides.

    Args:
        mine: the judged side.
        theirs: the other side.
        names: pairs by name, and of outputs and inputs by position.
        given: the pairs that the user gave.
        tolerance: the user's tolerances.
        draws: the number of draws that both sides have.
        budget: the maximum bytes of stored values in memory.
    """

    def __init__(
        self, mine: Side, theirs: Side, names: Mapping[str, str], given: Mapping[str, str], tolerance: Tolerance, draws: int,
        budget: int,
    ) -> None:  # fmt: skip
        self.mine, self.theirs, self.names, self.given = mine, theirs, names, given
        self._tolerance, self.draws, self.budget = tolerance, draws, budget
        self.pairs: dict[str, ValuePair] = {}
        self.verified: Verified = {}
        self.namesakes = frozenset[str]()
        sketched = range(min(2, draws))
        self.left, self.right = SketchTable(mine, sketched), SketchTable(theirs, sketched)
        self.finder = Finder(self.right, theirs.made)

    def tolerance(self, a: str, b: str) -> Tolerance:
        """The tolerance of a value and its candidate, as they are compared."""
        return self.theirs.widened(self.mine.widened(self._tolerance, a), b)

    def run(self) -> None:
        """Find, verify and choose the pairs."""
        self.verified = self._verify(self._candidates())
        self.namesakes = self._namesakes()
        self._choose()

    def _namesakes(self) -> frozenset[str]:
        """The values that are paired with the one of the same name, even if they differ; none if equal names mean other values.

        They do if more values equal one of another name than the one of their own, or if most nodes have another operator.
        """
        mine, theirs = self.mine.made, self.theirs.made
        same = [a for a in mine if self.names.get(a) == a and a in theirs and self.alike(a, a)]
        others = [a for a in same if a in self.left.moving and a in self.verified and a not in self.verified[a]]
        proven = sum(a in self.verified.get(a, ()) for a in same)
        operators = sum(mine[a].operator == theirs[a].operator for a in same)
        return frozenset(same if proven >= len(others) and 2 * operators >= len(same) else ())

    def alike(self, a: str, b: str) -> bool:
        """Whether two values may be partners: both floats, or of one dtype, and of one shape."""
        left, right = self.left.sizes.get(a), self.right.sizes.get(b)
        if left is None or right is None:  # not arrays of numbers, or empty
            return left is right and self.mine.made[a].operator == self.theirs.made[b].operator
        return same_kind(left[0], right[0]) and self.left.shapes[a] == self.right.shapes[b]

    def same_kind(self, a: str, b: str) -> bool:
        """Whether two values may be partners by their dtypes: codes of quantized values are none of floats."""
        left, right = self.left.sizes.get(a), self.right.sizes.get(b)
        return left is None or right is None or same_kind(left[0], right[0])

    def _candidates(self) -> dict[str, list[str]]:
        """For each value the values whose sketches agree, and its partner by name."""
        scale = len(self.theirs.made) / max(1, len(self.mine.made))
        found: dict[str, list[str]] = {}
        for name, figures in self.left.figures.items():
            near = self.near(name, figures[0], self.left.sizes[name], int(self.mine.made[name].at * scale))
            named = self.names.get(name)
            if named is not None and named not in near and named in self.right.figures:
                near.append(named)
            if near:
                found[name] = near
        return found

    def near(self, name: str, figures: np.ndarray, key: tuple[Dtype, int], at: int) -> list[str]:
        """The values of the other side whose sketch on the first draw is near these figures."""
        rtol, _ = self.mine.widened(self._tolerance, name).of(np.ones(1, key[0]))
        return self.finder.near(key, figures, 4 * rtol, at)

    def _verify(self, candidates: dict[str, list[str]]) -> Verified:
        """The candidates that agree in every element on every draw."""
        found: Verified = {}
        for draw in range(self.draws):
            wanted = Counter(b for a in candidates for b in (found.get(a, ()) if draw else candidates[a]))
            agreed: Verified = {}
            with SpillStore(self.budget) as store:
                reader = _LazyValues(self.theirs, draw, wanted, store)
                for a, mine in self.mine.stream(draw):
                    for b in found.get(a, ()) if draw else candidates.get(a, ()):
                        theirs = reader.get(b)
                        layout = self._layout(a, b, mine, theirs, found[a][b] if draw else None, bool(draw))
                        if layout is not None:
                            agreed.setdefault(a, {})[b] = layout[0]
            found = agreed
        return found

    def _layout(
        self, a: str, b: str, mine: Any, theirs: Any, layout: ValueLayout | None, known: bool
    ) -> tuple[ValueLayout | None] | None:
        if not isinstance(mine, np.ndarray) or not isinstance(theirs, np.ndarray):
            return None
        tolerance = self.tolerance(a, b)
        if known:
            return (layout,) if agree(mine, theirs, layout, tolerance) else None
        return arranged(mine, theirs, tolerance) if mine.dtype == theirs.dtype and mine.size == theirs.size else None

    # --- the choice ---------------------------------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose a partner for each value among those that agree on all draws; equal values are told apart by structure."""
        used = Counter[str]()
        constants = self._constants()
        for a, made in self.mine.made.items():
            pair = self._chosen(a, made, used, constants)
            if pair is not None:
                self.pairs[a] = pair
                used[pair.other] += 1

    def _chosen(
        self, a: str, made: Made, used: Counter[str], constants: Mapping[str, tuple[str, ValueLayout | None]]
    ) -> ValuePair | None:
        named = self.names.get(a)
        if a in self.given and named is not None:
            return ValuePair(named, how="given")
        options = self.verified.get(a, {})
        if named in options:
            assert named is not None
            return ValuePair(named, options[named], "name" if named == a else "position")
        if a in self.namesakes:
            return ValuePair(a, how="name")
        if a in self.mine.outputs and named is not None:
            return ValuePair(named, how="position")
        if a in constants:
            return ValuePair(*constants[a], how="constant")
        best = min(options, key=lambda b: self._rank(a, made, b, options[b], used), default=None)
        if best is None:
            return None
        still = a in self.left.still and best in self.right.still
        if not still and not (a in self.left.moving and best in self.right.moving):
            other = self.theirs.made[best]  # few elements: only the value of the same operator, or the only one
            if (other.operator, len(options)) != (made.operator, len(options)) and len(options) > 1:
                return None
        return ValuePair(best, options[best], "constant" if still else "value")

    def _rank(self, a: str, made: Made, b: str, layout: ValueLayout | None, used: Counter[str]) -> tuple[Any, ...]:
        """How unlikely a value that agrees is the partner."""
        other = self.theirs.made[b]
        partners = {self.pairs[n].other for n in made.uses if n in self.pairs}
        scoped = bool(made.scope) and made.scope == other.scope
        return (
            layout is not None, made.operator != other.operator, not scoped, used[b] > 0,
            -len(partners & set(other.uses)), abs(other.at * len(self.mine.made) - made.at * len(self.theirs.made)),
        )  # fmt: skip

    def _constants(self) -> dict[str, tuple[str, ValueLayout | None]]:
        """The values that are the same on all draws and equal a weight of the other side, and those weights."""
        wanted = {a for a in self.left.still if a not in self.verified}
        if not wanted:
            return {}
        found = {}
        for a, value in self.mine.stream(0):
            if a in wanted and isinstance(value, np.ndarray):
                weight = self.theirs.constant(value)
                if weight is not None:
                    found[a] = weight
        return found
