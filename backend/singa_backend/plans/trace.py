"""The tracer: runs the calls of a region once, chooses a kernel for each, and records the steps as a plan.

The first run of a plan is its trace: every value exists, so shapes, dtypes and host inputs are those of this run.  What
depends on shapes only is a constant of the plan.  A value whose shape depends on data ends a segment of the plan; a later run
with another shape continues with another segment.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from .. import dtypes, limits
from ..errors import SonnxError
from ..ir.declaration import has_trait
from ..ir.graph import ABSENT, Graph, Node
from ..kernels import onednn
from ..kernels.onednn import OneDnnError, thread_switch, threads_of
from ..kernels.open_products import OpenProduct
from ..kernels.table import Follower, Kernel, Options, Refused, Site, kernels_of, worst
from ..kernels.values import FINITE, NAN, Bound, Buffer, Computed, Step, Unkept, Value, aligned, strides_of
from ..kernels.work import flops
from ..proto.tensor_data import release
from ..runtime.executor import Visitor
from . import arena as arenas
from .chains import chains
from .contention import Pace, contention, single_step
from .fusion import fuse
from .passing import PASSED, PASSED_STEPS, Passed, append, unbound
from .region import Call, Region, TooManyCalls, branch_of, branches_fit

FAILED = "failed with"
"""Begins the reason of a kernel that raised an unexpected error; such a call must be invalid."""


class Mismatch(Exception):
    """A run has returned a value of another shape or kind than the trace: the call must end a segment."""

    def __init__(self, call: Call) -> None:
        super().__init__(call.name)
        self.call = call


@dataclass(eq=False)
class Loose:
    """A value that is not an array of numbers: strings, a sequence, a map, an empty optional.  It is kept as it is."""

    value: Any = None


Entry = Value | Loose


@dataclass(eq=False)
class Select:
    """An If whose branch is chosen when it is reached.

    Attributes:
        call: the If.
        chosen: whether the segment begins with it: its condition is the key of the segment.
    """

    call: Call
    chosen: bool = False


@dataclass(eq=False)
class Adopt:
    """Copies arrays whose shapes are the key of the segment, the results of a call, into its arena."""

    ids: tuple[int, ...]
    call: Call


@dataclass(eq=False)
class Bind:
    """Gives values other ids: the outputs of a branch become those of its If."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]


Item = tuple[Call, ...] | Select | Bind | Adopt


def items_of(region: Region) -> list[Item]:
    """The work of a region in order."""
    made: list[Item] = []
    for group in chains(region.calls, region.outputs):
        if group[0].is_("If"):
            made.append(Select(group[0]))
        else:
            made.append(group)
    return made


@dataclass(eq=False)
class Point:
    """Where a segment ended: what a continuation needs.

    Attributes:
        env: the live values by id.
        items: the work that is left.
        uses: the number of uses that are left, by id.
    """

    env: dict[int, Entry]
    items: list[Item]
    uses: Counter[int]


@dataclass(eq=False)
class Cell(Loose):
    """A result of an open plan that is not in the arena; it is kept up to its last use in a run."""


class Cells(list[Cell]):
    """Cells, as a container of their present values."""

    def __iter__(self) -> Iterator[Any]:
        return (cell.value for cell in super().__iter__())

    def clear_values(self) -> None:
        """Keep nothing in them."""
        for cell in super().__iter__():
            cell.value = None


@dataclass(eq=False)
class Cache(Cell):
    """An input to which a Concat appends, in place if there is room, before it becomes an output."""


@dataclass(eq=False)
class Appended(Cell):
    """The result of such a Concat: it belongs to the caller without a copy."""


@dataclass(eq=False)
class Record:
    """What the trace of an item has found, which another plan repeats if the item reads the same values.

    Attributes:
        reads: the values that it reads, with their ids.
        results: those that it has set, by id.
        steps: its steps.
        copies: copies of values in another memory order that later items use.
        made: the buffers that it has made.
        executions: the nodes that the definitions would execute.
    """

    reads: list[tuple[int, Entry]]
    results: dict[int, Entry] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    copies: list[tuple[Value, Any, Value]] = field(default_factory=list)
    made: frozenset[Buffer] = frozenset()
    executions: int = 0

    def is_steady(self) -> bool:
        """Whether its steps can run in another plan: all that they use is in the arena."""
        return all(isinstance(e, Value) for e in self.results.values()) and all(
            v.constant or v.buffer.memory is not None for s in self.steps for v in (*s.reads, *s.writes)
        )


@dataclass(eq=False)
class History:
    """The trace of a plan of one segment.

    Attributes:
        entries: the inputs.
        records: of each item.
        passed: the inputs and outputs that are not copied.
    """

    entries: list[Entry]
    records: list[Record] = field(default_factory=list)
    passed: tuple[Passed, ...] = ()


class NotOpen(Exception):
    """The plan for some shapes cannot be opened for others."""


@dataclass(eq=False)
class Segment:
    """Steps that always run together.

    Attributes:
        steps: what was recorded.
        flat: the bound calls, in order.
        arena: their memory.
        arena_bytes: its size.
        live_bytes: the lower bound of that size.
        check: returns the key of the next segment, after the steps; None for the last one.
        next: the segments that follow, by key, the least recently used first.
        point: what a new continuation starts from.
        outputs: the outputs of the plan, for the last segment.
        copies: for each output the function that returns a copy.
        passed: the inputs and outputs that are not copied.
        moving: the steps that use them, with the index of their first call.
        cells: the values that are not in the arena, if the plan is open: nothing is kept in them after a run.
        pace: how fast it runs, if a run may use fewer threads; None if it may not, or no step uses several.
    """

    steps: list[Step] = field(default_factory=list)
    flat: list[tuple[Callable[..., Any], tuple[Any, ...]]] = field(default_factory=list)
    arena: np.ndarray | None = None
    arena_bytes: int = 0
    live_bytes: int = 0
    check: Callable[[], Any] | None = None
    next: dict[Any, Segment] = field(default_factory=dict)
    point: Point | None = None
    outputs: tuple[Entry, ...] = ()
    copies: tuple[Callable[[], Any], ...] = ()
    passed: tuple[Passed, ...] = ()
    moving: tuple[tuple[int, Step, int], ...] = ()
    cells: Cells = field(default_factory=Cells)
    pace: Pace | None = None

    def attach(self, inputs: Sequence[Any]) -> None:
        """Bind the steps that use inputs and outputs which are not copied to those of this run."""
        for p in self.passed:
            p.attach(inputs)
        for start, step, _ in self.moving:
            self._replace(start, step.bind())

    @contextmanager
    def present(self) -> Iterator[list[tuple[Callable[..., Any], tuple[Any, ...]]]]:
        """The calls in the form in which a run would begin now, on one thread or on several."""
        if self.pace is None or not contention.present:
            yield self.flat
        else:
            with onednn.using_threads(1):
                yield self.pace.single_steps(self.flat)

    def detach(self) -> None:
        """Keep nothing of the arrays of a run."""
        for p in self.passed:
            p.detach()
        self.cells.clear_values()
        for start, _, count in self.moving:
            self._replace(start, [(unbound, ())] * count)

    def _replace(self, start: int, pieces: Bound) -> None:
        self.flat[start : start + len(pieces)] = pieces
        if self.pace is not None and self.pace.steps is not None:
            self.pace.steps[start : start + len(pieces)] = [single_step(f, a) for f, a in pieces]

    def results(self) -> list[Any]:
        """The present outputs, copied."""
        return [copy() for copy in self.copies]


class State:
    """What the steps of a plan share during a run.

    Attributes:
        visitor: computes by definitions.
        bodies: makes the plans of a node's subgraphs.
        visit_body: makes the visitor of a node with such plans.
    """

    visitor: Visitor
    bodies: Callable[[Node, dict[int, Any]], Any]
    visit_body: Callable[[limits.Budget, Any], Visitor]

    def visit(self, node: Node, inputs: list[Any], frame: list[Any], bodies: Any) -> list[Any]:
        """Compute a node by its definition; its subgraphs by plans."""
        visitor = self.visit_body(self.visitor.budget, bodies) if bodies else self.visitor
        return visitor.visit(node, inputs, frame)


@dataclass(eq=False)
class Facts:
    """What is known of a plan when its trace is complete.

    Attributes:
        finite: whether a kernel needs finite inputs to agree with the definitions.
        executions: the nodes that the definitions would execute.
        largest: bytes of the largest tensor.
        rank: the highest rank.
        folded: the number of calls whose results depend on shapes only.
        definitions: the number of calls that their definitions compute.
        parallel: whether a step may use oneDNN, whose number of threads is that of its caller.
    """

    finite: bool = False
    executions: int = 0
    largest: int = 0
    rank: int = 0
    folded: int = 0
    definitions: int = 0
    parallel: bool = False


class Tracer:
    """Traces a segment of a plan, and those that follow it."""

    def __init__(
        self,
        region: Region,
        options: Options,
        shared: dict[Any, Any],
        state: State,
        dynamic: set[int],
        facts: Facts,
        budget: limits.Budget,
        caches: dict[int, int] | None = None,
    ) -> None:
        self.region = region
        self.caches = caches or {}
        self.options = options
        self.shared = shared
        self.state = state
        self.dynamic = dynamic
        self.facts = facts
        self.budget = budget
        self.env: dict[int, Entry] = {}
        self.uses: Counter[int] = Counter()
        self.segment = Segment()
        self.began = time.perf_counter()
        self.single = options.adaptive and contention.expected(options.threads)
        self.buffers: list[Buffer] = []
        self.live: dict[int, Any] = {}
        self.entries: list[Entry] = []
        self.copies: dict[int, tuple[Value, dict[Any, Value]]] = {}
        self.history: History | None = None
        self.earlier: History | None = None
        self.stale: set[Buffer] = set()
        self.copied: list[tuple[Value, Any, Value]] = []
        self.unused = Cells()
        self.repeated = self.place = 0

    # --- the walk

    def start(self, inputs: Sequence[Any], record: bool = False, earlier: History | None = None) -> Segment:
        """Trace the region on these inputs; return the first segment.

        Args:
            inputs: the inputs.
            record: whether to note what an open plan can repeat.
            earlier: the trace of a plan for other shapes.  The plan will be open: an item that reads the same values uses the
                steps of that plan; other items are computed by definitions, in each run with the shapes of its inputs.

        Returns:
            The segment.

        Raises:
            NotOpen: if there is an earlier trace, and a result depends on the shapes in more than its own shape.
        """
        self.earlier = earlier
        for p in earlier.passed if earlier is not None else ():
            if p.index < 0 or p.value.shape == np.shape(inputs[p.index]):
                p.attach(inputs)
        for index, (i, x) in enumerate(zip(self.region.inputs, inputs, strict=True)):
            if earlier is None:
                entry = self._entry(x)
            else:
                entry = self._same_entry(earlier.entries[index], i, x, any(p.index == index for p in earlier.passed))
            self.env[i] = entry
            self.entries.append(entry)
            if isinstance(entry, Value):
                entry.buffer.users += 1
                entry.buffer.touch(0)
        self.history = History(self.entries) if record else None
        self.uses = Counter(i for call in self.region.calls for i in call.reads)
        self.uses.update(self.region.outputs)
        self.uses.update(self.region.inputs)  # the buffers of inputs are written before each run
        return self._walk(items_of(self.region))

    def resume(self, point: Point) -> Segment:
        """Trace what follows a segment."""
        self.env, self.uses = dict(point.env), Counter(point.uses)
        for entry in self.env.values():
            if isinstance(entry, Value):
                entry.buffer.users += 1
        return self._walk(list(point.items))

    def _walk(self, items: list[Item]) -> Segment:
        first = self.segment
        pending = items[::-1]
        while pending:
            item = pending.pop()
            if isinstance(item, Bind):
                for source, target in zip(item.sources, item.targets, strict=True):
                    self._set(target, self._get(source))
                self._used(item.sources)
            elif isinstance(item, Adopt):
                self._adopt(item.ids, item.call)
            elif isinstance(item, Select):
                self.history = None
                pending += self._select(item, pending)[::-1]
            else:
                if self.earlier is not None:
                    self._repeat_or_open(item, self.earlier.records)
                elif self.history is not None:
                    self.history.records.append(self._recorded(item))
                else:
                    self._group(item)
                if id(item[-1].node) in self.dynamic:
                    if self.earlier is not None:
                        raise NotOpen
                    self.history = None
                    ids = item[-1].outputs
                    cells = [self.env[i] for i in ids if i in self.env]
                    self._split(pending, Adopt(ids, item[-1]), partial(_kinds, cells))
        self.segment.outputs = tuple(self._get(i) for i in self.region.outputs)
        self._finish(self.segment is first and bool(self.entries))
        return first

    def _recorded(self, item: tuple[Call, ...]) -> Record:
        """Compute an item, and note what was found.

        The values that it reads keep their places until then, even if its kernel reads copies of them, or nothing: definitions
        of an open plan may read them.
        """
        inner = {o for c in item for o in c.outputs}
        made = Record([(i, self._get(i)) for c in item for i in c.reads if i not in inner])
        for _, e in made.reads:
            if isinstance(e, Value):
                e.buffer.touch(max(len(self.segment.steps) - 1, 0))
        steps, buffers, executions, self.copied = len(self.segment.steps), len(self.buffers), self.facts.executions, []
        self._group(item)
        made.steps, made.copies = self.segment.steps[steps:], self.copied
        made.made = frozenset(self.buffers[buffers:])
        made.executions = self.facts.executions - executions
        made.results = {o: self.env[o] for o in inner if o in self.env}
        return made

    # --- open plans

    def _same_entry(self, held: Entry, i: int, x: Any, is_passed: bool) -> Entry:
        """The value of an input of an open plan: that of the earlier plan if it has the same shape."""
        if not isinstance(held, Value) or not isinstance(x, np.ndarray):
            raise NotOpen
        if held.shape == x.shape:
            if not is_passed:
                np.copyto(held.array, x)
            return held
        cell = Cache(x) if i in self.caches else Cell(x)
        self.segment.cells.append(cell)
        return cell

    def _repeat_or_open(self, item: tuple[Call, ...], records: Sequence[Record]) -> None:
        """Use the steps of the earlier plan for an item, or compute it by definitions."""
        place = self.place
        self.place += 1
        record = records[place]
        buffers = {v.buffer for s in record.steps for v in s.reads}
        same = all(self._get(i) is e for i, e in record.reads) and self.stale.isdisjoint(buffers) and record.is_steady()
        if same:
            self.repeated += 1
            for step in record.steps:
                for function, arguments in step.bind():
                    function(*arguments)
            self.segment.steps += record.steps
            for i, e in record.results.items():
                self._set(i, e)
            for value, what, copy in record.copies:
                self.copies.setdefault(id(value), (value, {}))[1][what] = copy
            self.facts.executions += record.executions
            self.budget.steps(record.executions)
        else:
            self._open(item, record)
        for call in item:
            self._used(call.reads)
        if self.unused:
            unused, self.unused = self.unused, Cells()
            unused.clear_values()
            self._record(Step(lambda: [(unused.clear_values, ())], (), (), "release"))

    def _open(self, item: tuple[Call, ...], record: Record) -> None:
        """Compute an item by definitions, in each run with the shapes that it meets.

        A result that had the same shape in the earlier plan takes its place, so that what reads it is as before: a run in which
        it has another shape, or is a constant with other contents, raises Mismatch.
        """
        for call in item:
            if call.is_("Concat") and isinstance(self.env.get(call.inputs[0]), Cache):
                self._grow(call)
            else:
                self._open_call(call)
        written = {v.buffer for s in record.steps for v in s.writes}
        settled: list[tuple[Call, Cell, Value]] = []
        for call in item:
            for o in call.outputs:
                cell, held = self.env.get(o), record.results.get(o)
                if not isinstance(cell, Cell) or not isinstance(held, Value) or not isinstance(cell.value, np.ndarray):
                    continue
                if (held.shape, held.dtype) != (cell.value.shape, cell.value.dtype):
                    continue
                if _same(cell.value, held) if held.constant else held.buffer in written:
                    settled.append((call, cell, held))
                    self.env[o] = held
        self.stale |= record.made - {held.buffer for _, _, held in settled}
        if not settled:
            return

        def bind() -> Bound:
            return [(_settle, (call, cell, held.array, held.constant)) for call, cell, held in settled]

        for function, arguments in bind():
            function(*arguments)
        self.segment.steps.append(Step(bind, (), tuple(v for _, _, v in settled if not v.constant), "copy"))
        self.unused += [cell for _, cell, _ in settled]

    def _open_call(self, call: Call) -> None:
        """Compute a call by its definition into values that are not in the arena."""
        entries = self._values(call)
        inner = [(outer, self._get(call.scope[outer])) for g in call.node.graphs for outer, _ in g.captured]
        cells = [None if o == ABSENT else Cell() for o in call.outputs]
        state, node = self.state, call.node
        frame: list[Any] = [None] * len(call.scope)
        product = OpenProduct() if call.is_("MatMul") and onednn.library() is not None else None

        def compute(values: list[Any]) -> list[Any]:
            made = None if product is None else product(*values)
            if made is None:
                return state.visit(node, values, frame, None)
            state.visitor.budget.step()
            state.visitor.budget.count_tensor(made.nbytes)
            return [made]

        def bind() -> Bound:
            sources = [e if isinstance(e, Loose) else None if e is None else e.array for e in entries]
            placed = [s for s in sources if isinstance(s, np.ndarray)]
            around = [(outer, e if isinstance(e, Loose) else e.array) for outer, e in inner]
            placed += [s for _, s in around if isinstance(s, np.ndarray)]

            def run() -> None:
                for outer, s in around:
                    frame[outer] = s.value if isinstance(s, Loose) else s
                values = [s.value if isinstance(s, Loose) else s for s in sources]
                for cell, result in zip(cells, compute(values), strict=False):
                    if cell is not None:
                        cell.value = _unshared(result, placed)
                for outer, _ in around:
                    frame[outer] = None

            return [(run, ())]

        self._record(Step(bind, (), (), "definition", call.origins or (node,), ("its shapes differ between runs",)))
        for function, arguments in bind():
            function(*arguments)
        self._set_cells(call, cells)
        self.budget.left += 1  # the visitor has counted it

    def _set_cells(self, call: Call, cells: Sequence[Cell | None]) -> None:
        for o, cell in zip(call.outputs, cells, strict=False):
            if cell is not None:
                self.segment.cells.append(cell)
                self._set(o, cell)
        self.facts.definitions += 1
        self._count(call)

    def _grow(self, call: Call) -> None:
        """Append to a cache, in its memory if there is room."""
        source = self._get(call.inputs[0])
        rest = [self._get(i) for i in call.inputs[1:]]
        target = Appended()
        state, axis, facts = self.state, self.caches[call.inputs[0]], self.facts
        assert isinstance(source, Cache)

        def bind() -> Bound:
            parts = [e if isinstance(e, Loose) else e.array for e in rest]

            def run() -> None:
                arrays = [p.value if isinstance(p, Loose) else p for p in parts]
                target.value = append(source.value, arrays, axis, facts.finite, state.visitor.budget)

            return [(run, ())]

        self._record(Step(bind, (), (), "numpy.copyto", call.origins or (call.node,), ("grows in place",)))
        for function, arguments in bind():
            function(*arguments)
        self._set_cells(call, [target])

    def _split(self, pending: list[Item], then: Item, key: Callable[[], Any]) -> None:
        """End the segment here; the next one begins with `then`."""
        done = self.segment
        for entry in self.env.values():
            if isinstance(entry, Value) and not entry.buffer.pinned:
                entry.buffer.touch(len(done.steps))
        self._finish()
        pending.append(then)
        following = Segment()
        done.point = Point(dict(self.env), pending[::-1], Counter(self.uses))
        done.check, done.next[key()] = key, following
        self.segment, self.buffers, self.began = following, [], time.perf_counter()
        self.copies.clear()

    def _adopt(self, ids: Sequence[int], call: Call) -> None:
        for i in ids:
            cell = self.env.get(i)
            if isinstance(cell, Loose) and isinstance(cell.value, np.ndarray) and cell.value.dtype != dtypes.STRING:
                made = self.allocate(cell.value.shape, cell.value.dtype, None, NAN)
                np.copyto(made.array, cell.value)

                def bind(cell: Loose = cell, made: Value = made) -> Any:
                    target = made.array
                    return [(lambda: np.copyto(target, cell.value), ())]

                self._record(Step(bind, (), (made,), "copy", call.origins or (call.node,)))
                self.env[i] = made
                made.buffer.users += 1

    def _select(self, item: Select, pending: list[Item]) -> list[Item]:
        """The work of the branch that an If takes."""
        call = item.call
        condition = self._get(call.inputs[0])
        array = condition.array if isinstance(condition, Value) else None
        same = branches_fit(call)
        if not isinstance(condition, Value) or array is None or array.size != 1 or array.dtype != np.bool_ or not same:
            return [(call,)]  # the definition reports the error
        if not item.chosen and not condition.constant:
            self._split(pending, Select(call, True), lambda: bool(condition.array.reshape(-1)[0]))
            return []
        try:
            return self._branch(call, bool(array.reshape(-1)[0]))
        except TooManyCalls:
            return [(call,)]

    def _branch(self, call: Call, taken: bool) -> list[Item]:
        key = ("branch", call, taken)
        if key not in self.shared:
            graph: Graph = call.attributes["then_branch" if taken else "else_branch"]
            region = self.region
            inner = Region(constants=region.constants, names=region.names, size=region.size)
            inner.outputs = branch_of(inner, graph, call.scope)
            fuse(inner, self.options.level)
            region.size = inner.size
            self.shared[key] = inner
        inner = self.shared[key]
        for c in inner.calls:
            self.uses.update(c.reads)
        self.uses.update(inner.outputs)
        self._used(call.reads)
        pairs = [(s, o) for s, o in zip(inner.outputs, call.outputs, strict=False)]
        return [*items_of(inner), Bind(tuple(s for s, _ in pairs), tuple(o for _, o in pairs))]

    # --- values

    def _get(self, i: int) -> Entry:
        entry = self.env.get(i)
        if entry is None:
            value = self.region.constants[i]
            entry = self._constant(value, i)
            self.env[i] = entry
        return entry

    def _constant(self, value: Any, key: Any = None) -> Entry:
        if not isinstance(value, (np.ndarray, Computed)) or value.dtype == dtypes.STRING:
            return Loose(value)
        held = self.shared.get(("constant", key)) if key is not None else None
        if held is None or held[0] is not value:
            held = (value, Value.of(value, key))
            source = held[1].buffer.source if isinstance(held[1].buffer, Unkept) else None
            if source is not None:  # views of one tensor of a file share its copy
                at = ("mapped", source.__array_interface__["data"][0], source.nbytes)
                first = self.shared.setdefault(at, held[1])
                if first is not held[1]:
                    held[1].buffer = first.buffer
                    release(source)
            if key is not None:
                self.shared["constant", key] = held
        made: Value = held[1]
        made.buffer.users += 1
        if key is None and made.buffer.memory is not None:
            self.live[id(made.buffer)] = made.buffer.memory
        self._admit(made.shape, made.dtype)
        return made

    def _entry(self, x: Any) -> Entry:
        """A new value that holds this one."""
        if not isinstance(x, np.ndarray) or x.dtype == dtypes.STRING:
            return Loose(x)
        made = self.allocate(x.shape, x.dtype, None, FINITE)
        np.copyto(made.array, x)
        return made

    def allocate(self, shape: Sequence[int], dtype: np.dtype[Any], order: Sequence[int] | None, hazard: int) -> Value:
        """A value in a new buffer."""
        shape = tuple(int(d) for d in shape)
        self._admit(shape, dtype)
        strides = strides_of(shape, dtype.itemsize, order)
        nbytes = max(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize, 1)
        return Value(self.buffer(nbytes), shape, strides, dtype, 0, False, hazard)

    def _admit(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        """Check a tensor against the limits of this run, and note its size for those of other runs."""
        self.budget.admit(shape, dtype.itemsize)
        self.facts.largest = max(self.facts.largest, math.prod(d or 1 for d in shape) * dtype.itemsize)
        self.facts.rank = max(self.facts.rank, len(shape))

    def buffer(self, nbytes: int) -> Buffer:
        """A new buffer with memory of its own until the segment is complete."""
        self.budget.count_tensor(nbytes)
        made = Buffer(nbytes, aligned(nbytes))
        assert made.memory is not None
        self.live[id(made)] = made.memory
        self.buffers.append(made)
        return made

    def _set(self, i: int, entry: Entry) -> None:
        if i == ABSENT:
            return
        self.env[i] = entry
        if isinstance(entry, Value):
            entry.buffer.users += 1
        if not self.uses[i]:
            self._drop(i)

    def _used(self, ids: Sequence[int]) -> None:
        """Count uses; release what is not read again."""
        for i in ids:
            if i != ABSENT:
                self.uses[i] -= 1
        for i in set(ids):
            if i != ABSENT and self.uses[i] <= 0 and i in self.env:
                self._drop(i)

    def _drop(self, i: int) -> None:
        entry = self.env.pop(i)
        self.live.pop(id(entry), None)
        if isinstance(entry, Cell):
            self.unused.append(entry)
        if isinstance(entry, Value):
            entry.buffer.users -= 1
            self._release(entry.buffer)
            for copy in self.copies.pop(id(entry), (entry, {}))[1].values():
                copy.buffer.users -= 1
                self._release(copy.buffer)

    def _release(self, buffer: Buffer) -> None:
        """Release the memory of a buffer that nothing uses."""
        if buffer.users <= 0 and not buffer.pinned:
            self.live.pop(id(buffer), None)
            buffer.memory = None

    # --- calls

    def _group(self, group: tuple[Call, ...]) -> None:
        """Compute a chain of calls, with as few kernels as possible."""
        while group:
            taken = self._with_kernel(group) or self._by_definition(group[0])
            group = group[taken:]

    def _values(self, call: Call) -> list[Entry | None]:
        return [None if i == ABSENT else self._get(i) for i in call.inputs]

    def _with_kernel(self, group: tuple[Call, ...]) -> int:
        """Compute a prefix of the chain with the first kernel that accepts it; return its length, 0 if there is none."""
        call = group[0]
        found = self._values(call)
        self._reasons: list[str] = []
        if self.options.level == 0 or call.node.operator is None or any(isinstance(v, Loose) for v in found):
            return 0
        inputs: list[Value | None] = [v if isinstance(v, Value) else None for v in found]
        folded = self._is_folded(call, inputs)
        followers = self._followers(group)
        for one in kernels_of(call.node.domain, call.name, call.node.operator.version):
            if folded and one.on != "view":
                break
            site = TraceSite(self, call, inputs, followers)
            first_buffer = len(self.buffers)
            try:
                with np.errstate(all="ignore"):
                    result = one.body(site, *inputs)
                    taken = site.absorbed + 1
                    site.require(not (folded and site.steps), "a constant is not copied in every run")
                    self._run_steps(site, one, group[:taken])
            except SonnxError:
                raise
            except (Refused, OneDnnError) as refusal:
                self._reasons.append(f"{one.name}: {refusal}")
                self._forget(first_buffer)
                continue
            except Exception as error:  # an invalid call that the kernel did not expect: the definition reports it
                self._reasons.append(f"{one.name}: {FAILED} {type(error).__name__}: {error}")
                self._forget(first_buffer)
                continue
            made = result if isinstance(result, tuple) else (result,)
            if folded and all(v is None or v.key is not None for v in inputs):
                for n, v in enumerate(made):
                    if v is not None:
                        v.key = (id(call), n)
            for value, what, copy in site.made:
                self.copies.setdefault(id(value), (value, {}))[1][what] = copy
                copy.buffer.users += 1
            self.copied += site.made
            self._accept(group[:taken], made)
            for buffer in self.buffers[first_buffer:]:
                self._release(buffer)
            return taken
        return self._fold(call) if folded else 0

    def _forget(self, first: int) -> None:
        """Release the buffers of a kernel that has declined."""
        for b in self.buffers[first:]:
            self.live.pop(id(b), None)
        del self.buffers[first:]

    def _run_steps(self, site: TraceSite, one: Kernel, calls: Sequence[Call]) -> None:
        origins = tuple({id(n): n for c in calls for n in (c.origins or (c.node,))}.values())
        bound = [step.bind() for step in site.steps]  # before any runs: a kernel may still decline
        with onednn.using_threads(1) if self.single else nullcontext():
            for step, pieces in zip(site.steps, bound, strict=True):
                step.origins = origins
                step.kernel = step.kernel or one.name
                step.notes = (*step.notes, *self._reasons)
                for function, arguments in [single_step(*p) for p in pieces] if self.single else pieces:
                    function(*arguments)
                self._record(step)
        if site.steps and site.steps[-1].writes:
            site.steps[-1].flops = _flops(calls, site.inputs, site.steps[-1].writes[0])
        if site.finite:
            self.facts.finite = True

    def _record(self, step: Step) -> None:
        index = len(self.segment.steps)
        for v in (*step.reads, *step.writes):
            v.buffer.touch(index)
        if step.scratch is not None:
            step.scratch.touch(index)
        self.segment.steps.append(step)

    def _accept(self, calls: Sequence[Call], made: Sequence[Value | None]) -> None:
        """Set the outputs of the last call, and count the uses of all."""
        for v in made:
            if v is not None:
                v.buffer.touch(max(len(self.segment.steps) - 1, 0))
                self._admit(v.shape, v.dtype)
        for i, v in zip(calls[-1].outputs, made, strict=False):
            if v is not None:
                self._set(i, v)
        inner = {o for c in calls[:-1] for o in c.outputs}
        for c in calls:
            self._used([i for i in c.reads if i not in inner])
            self._count(c)

    def _count(self, call: Call) -> None:
        """Count the nodes of a call as executed, as the definitions would."""
        count = max(len(call.origins), 1)
        self.facts.executions += count
        self.budget.steps(count)

    def _followers(self, group: tuple[Call, ...]) -> list[Follower]:
        made: list[Follower] = []
        if self.options.level < 2:
            return made
        before, sides = group[0], dict[int, Follower]()
        for call in group[1:]:
            operator = call.node.operator
            inputs: list[Value | None] = []
            place = -1
            for p, i in enumerate(call.inputs):
                if i in before.outputs and i != ABSENT:
                    place = p
                    inputs.append(None)
                    continue
                entry = None if i == ABSENT or i in sides else self._get(i)
                if isinstance(entry, Loose):
                    return made
                inputs.append(entry)
            assert operator is not None
            free = frozenset(p for p, i in enumerate(call.inputs) if p != place and i not in sides and self.reusable(i, 1))
            one = Follower(call.name, call.attributes, inputs, place, operator.version, free)
            one.sides = {p: sides[i] for p, i in enumerate(call.inputs) if i in sides}
            made.append(one)
            if place < 0:
                sides[call.outputs[0]] = one
            else:
                before = call
        return made

    def reusable(self, i: int, uses: int) -> bool:
        """Whether nothing reads the memory of a value after these uses of it."""
        entry = self.env.get(i)
        return (
            isinstance(entry, Value)
            and not entry.constant
            and not entry.buffer.pinned
            and self.uses[i] == uses
            and entry.buffer.users == 1
            and all(s or d < 2 for s, d in zip(entry.strides, entry.shape, strict=True))
        )

    # --- what depends on shapes only

    def _is_folded(self, call: Call, inputs: Sequence[Value | None]) -> bool:
        if call.node.graphs or _draws(call.node):
            return False
        if call.is_("Shape", "Size"):
            return True
        return all(v is None or v.constant for v in inputs)

    def _fold(self, call: Call) -> int:
        operator = call.node.operator
        assert operator is not None
        key = call if all(i == ABSENT or i in self.region.constants for i in call.inputs) else None
        outputs = self.shared.get(("folded", key)) if key is not None else None
        if outputs is None:
            arrays = [v.array if isinstance(v, Value) else v for v in self._values(call)]
            outputs = self.state.visitor.visit(call.node, arrays, [])
            self.budget.left += 1  # counted below
            if any(not isinstance(o, np.ndarray) for i, o in zip(call.outputs, outputs, strict=False) if i != ABSENT):
                return self._loose(call, outputs)
            if key is not None:
                self.shared["folded", key] = outputs
        for n, (i, o) in enumerate(zip(call.outputs, outputs, strict=False)):
            if i != ABSENT and o is not None:
                self._set(i, self._constant(o, None if key is None else (id(call), n)))
        self._used(call.reads)
        self._count(call)
        self.facts.folded += 1
        return 1

    def _loose(self, call: Call, outputs: Sequence[Any]) -> int:
        for i, o in zip(call.outputs, outputs, strict=False):
            if i != ABSENT:
                self._set(i, self._constant(o))
        self._used(call.reads)
        self._count(call)
        return 1

    # --- definitions

    def _by_definition(self, call: Call) -> int:
        """Compute a call with its definition, now and in every run."""
        entries = self._values(call)
        inner = [(outer, self._get(call.scope[outer])) for g in call.node.graphs for outer, _ in g.captured]
        frame: list[Any] = [None] * len(call.scope)

        def gather() -> list[Any]:
            for outer, entry in inner:
                frame[outer] = _content(entry)
            return [None if e is None else _content(e) for e in entries]

        constants = {outer: e.array for outer, e in inner if isinstance(e, Value) and e.constant}
        bodies = self.state.bodies(call.node, constants) if self.options.level and call.node.graphs else None
        outputs = self.state.visit(call.node, gather(), frame, bodies)
        made: list[Entry | None] = []
        dynamic = id(call.node) in self.dynamic
        for i, o in zip(call.outputs, outputs, strict=False):
            if i == ABSENT:
                made.append(None)
            elif not dynamic and isinstance(o, np.ndarray) and o.dtype != dtypes.STRING:
                value = self.allocate(o.shape, o.dtype, None, self._hazard(call, entries))
                np.copyto(value.array, o)
                made.append(value)
            else:
                cell = Loose(_owned(o, [e.array for e in entries if isinstance(e, Value)]))
                self.live[id(cell)] = cell.value
                self.budget.count_tensor(limits.size_of(cell.value))
                made.append(cell)
        state, node = self.state, call.node

        loose = any(isinstance(e, Loose) for e in (*entries, *(e for _, e in inner)))

        def bind() -> Any:
            targets = [None if m is None else m if isinstance(m, Loose) else m.array for m in made]
            arrays = gather()
            given = list(frame)

            def run() -> None:
                values, around = (gather(), frame) if loose else (arrays, given)
                results = state.visit(node, values, around, bodies)
                for target, result in zip(targets, results, strict=False):
                    if target is None:
                        continue
                    if isinstance(target, Loose):
                        target.value = _owned(result, values)
                    elif not isinstance(result, np.ndarray) or result.shape != target.shape or result.dtype != target.dtype:
                        raise Mismatch(call)
                    else:
                        np.copyto(target, result)

            return [(run, ())]

        reads = tuple(e for e in (*entries, *(e for _, e in inner)) if isinstance(e, Value))
        writes = tuple(m for m in made if isinstance(m, Value))
        self.facts.definitions += 1
        step = Step(bind, reads, writes, "definition", call.origins or (node,), tuple(self._reasons))
        step.flops = _flops((call,), entries, writes[0]) if writes else None
        self._record(step)
        for i, m in zip(call.outputs, made, strict=False):
            if m is not None:
                self._set(i, m)
        self._used(call.reads)
        self.budget.left += 1  # the visitor has counted it
        self._count(call)
        return 1

    def _hazard(self, call: Call, entries: Sequence[Entry | None]) -> int:
        if any(isinstance(e, Loose) for e in entries):
            return NAN  # what a sequence holds, or a string stands for, is not known
        known = worst(*(e for e in entries if isinstance(e, Value)))
        if has_trait(call.node.domain, call.name, "keeps_finite"):
            return known
        return FINITE if known == FINITE and has_trait(call.node.domain, call.name, "finite") else NAN

    # --- the end of a segment

    def _finish(self, whole: bool = False) -> None:
        """Give every buffer of the segment its place in an arena, and bind the steps to it.

        Args:
            whole: whether the segment is all of the plan: only then are inputs and outputs passed without a copy.
        """
        segment = self.segment
        passed = self._passed() if whole else {}
        if self.history is not None:
            self.history.passed = tuple(passed.values())
        self.history = self.history if whole else None
        for entry in segment.outputs:
            if isinstance(entry, Value):
                entry.buffer.touch(len(segment.steps))
        used = [b for b in self.buffers if b.first >= 0 and not b.pinned and id(b) not in passed]
        segment.arena_bytes = arenas.place(used)
        segment.live_bytes = arenas.live_bytes(used)
        segment.arena = aligned(segment.arena_bytes)
        for b in used:
            place = segment.arena[b.offset : b.offset + b.nbytes]
            if b.memory is not None and b.users > 0:
                np.copyto(place, b.memory)
            b.memory, b.pinned = place, True
            self.live.pop(id(b), None)
        usual = at = self.options.threads
        most = 1
        moving = []
        unchecked = {p for p in passed.values() if self.facts.finite and p.index >= 0 and p.value.dtype.kind in "fc"}
        for step in segment.steps:
            own = pieces = step.bind()
            needed = _threads(step, pieces, usual)
            self.facts.parallel |= needed > 0 and step.kernel != "definition"
            most = max(most, needed if step.kernel != "definition" else 1)
            if needed not in (0, at):
                pieces, at = [*thread_switch(needed), *pieces], needed
            found = [passed[i] for i in {id(v.buffer) for v in (*step.reads, *step.writes)} if i in passed]
            checked = [p for p in found if p in unchecked]
            unchecked.difference_update(checked)
            pieces = [*[(p.require_finite, ()) for p in checked], *pieces]
            if found:
                moving.append((len(segment.flat) + len(pieces) - len(own), step, len(own)))
            if step is segment.steps[-1] and at != usual:
                pieces = [*pieces, *thread_switch(usual)]
            step.count = len(pieces)
            segment.flat += pieces
        segment.passed, segment.moving = tuple(passed.values()), tuple(moving)
        if self.options.adaptive and most > 1:
            segment.pace = Pace(usual, time.perf_counter() - self.began, self.single)
        segment.copies = tuple(
            partial(_copy, e) if isinstance(e, Loose) else passed[id(e.buffer)].take if id(e.buffer) in passed else e.array.copy
            for e in segment.outputs
        )

    def _passed(self) -> dict[int, Passed]:
        """The large inputs and outputs which a run need not copy, by buffer; in an open plan, those of the earlier plan."""
        segment = self.segment
        if self.earlier is not None:
            entries = [*self.entries, *segment.outputs]
            return {id(p.value.buffer): p for p in self.earlier.passed if any(e is p.value for e in entries)}
        touching = Counter(i for s in segment.steps for i in {id(v.buffer) for v in (*s.reads, *s.writes)})
        written = {id(v.buffer) for s in segment.steps for v in s.writes}
        results = Counter(id(e.buffer) for e in segment.outputs if isinstance(e, Value))
        made = {}
        for index, e in enumerate(self.entries):
            if isinstance(e, Value) and e.dtype.kind in "biufc" and not results[id(e.buffer)] and id(e.buffer) not in written:
                made[id(e.buffer)] = Passed(e, index)
        given = {id(e.buffer) for e in self.entries if isinstance(e, Value)}
        for o in segment.outputs:
            if not isinstance(o, Value) or o.offset or o.nbytes != o.buffer.nbytes or o.buffer.pinned or not o.contiguous:
                continue
            if results[id(o.buffer)] == 1 and id(o.buffer) in written - given:
                made[id(o.buffer)] = Passed(o)
        return {i: p for i, p in made.items() if p.value.nbytes >= PASSED and touching[i] <= PASSED_STEPS}


class TraceSite(Site):
    """The place of a call in a trace."""

    def __init__(self, tracer: Tracer, call: Call, inputs: Sequence[Value | None], followers: Sequence[Follower]) -> None:
        super().__init__()
        assert call.node.operator is not None
        self.tracer, self.call, self.inputs = tracer, call, inputs
        self.name, self.version = call.name, call.node.operator.version
        self.attributes = call.attributes
        self.outputs = tuple(o != ABSENT for o in call.outputs)
        self.options, self.shared = tracer.options, tracer.shared
        self.followers = followers
        self.finite = False
        self.made: list[tuple[Value, Any, Value]] = []

    def kept(self, value: Value, what: Any, make: Callable[[], Value]) -> Value:
        found = self.tracer.copies.get(id(value), (value, {}))[1].get(what)
        found = next((c for v, w, c in self.made if v is value and w == what), found)
        if found is None:
            found = make()
            self.made.append((value, what, found))
        return found

    def needs_finite(self) -> None:
        """Note that the kernel agrees with the definition for finite inputs only."""
        self.finite = True

    def new(self, shape: Sequence[int], dtype: Any, order: Sequence[int] | None = None, hazard: int | None = None) -> Value:
        known = worst(*self.inputs, *(v for f in self.followers[: self.absorbed] for v in f.inputs))
        return self.tracer.allocate(shape, np.dtype(dtype), order, known if hazard is None else hazard)

    def scratch(self, nbytes: int) -> Buffer:
        return self.tracer.buffer(nbytes)

    def reusable(self, place: int) -> bool:
        i = self.call.inputs[place]
        return self.tracer.reusable(i, self.call.inputs.count(i))

    def constant(self, array: np.ndarray, key: Any = None) -> Value:
        return Value.of(array, key)


def _threads(step: Step, pieces: Bound, usual: int) -> int:
    """The number of threads with which a step runs: those for which its primitives were created.

    oneDNN's code for small work asks for the number when it runs; with another one it would wait for idle threads.

    Returns:
        The number; 0 if the step does not use oneDNN, `usual` if that is not known.
    """
    if step.kernel.startswith(("numpy.", "copy", "release")):
        return 0
    return max((threads_of(arguments) for _, arguments in pieces), default=0) or usual


def _copy(entry: Loose) -> Any:
    return entry.value if isinstance(entry, Appended) else _copied(entry.value)


def _copied(value: Any) -> Any:
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return value.copy() if isinstance(value, (np.ndarray, dict)) else value


def _flops(calls: Sequence[Call], inputs: Sequence[Entry | None], output: Value) -> int | None:
    """The work of a call and of those that follow it, each of which computes one number for each element."""
    first = calls[0]
    shapes = [e.shape if isinstance(e, Value) else None for e in inputs]
    own = flops(first.node.domain, first.name, first.attributes, shapes, output.shape)
    return None if own is None else own + (len(calls) - 1) * output.size


def _same(array: np.ndarray, held: Value) -> bool:
    """Whether an array has the contents of a constant."""
    return array.tobytes() == held.array.tobytes()


def _settle(call: Call, cell: Loose, target: np.ndarray, constant: bool) -> None:
    """Copy a result to its place; raise Mismatch if it has another shape, or is not the constant that was found there."""
    x = cell.value
    if not isinstance(x, np.ndarray) or x.shape != target.shape or x.dtype != target.dtype:
        raise Mismatch(call)
    if not constant:
        np.copyto(target, x)
    elif x.tobytes() != target.tobytes():
        raise Mismatch(call)


def _unshared(result: Any, placed: Sequence[np.ndarray]) -> Any:
    """A result that has no memory of the arena, whose contents change during a run."""
    if isinstance(result, list):
        return [_unshared(v, placed) for v in result]
    if isinstance(result, np.ndarray) and any(np.may_share_memory(result, p) for p in placed):
        return result.copy()
    return result


def _kind(entry: Entry) -> Any:
    value = entry.value if isinstance(entry, Loose) else entry
    return (value.shape, value.dtype) if isinstance(value, (Value, np.ndarray)) else type(value)


def _kinds(entries: Sequence[Entry]) -> Any:
    return tuple(map(_kind, entries))


def _content(entry: Entry) -> Any:
    return entry.value if isinstance(entry, Loose) else entry.array


def _owned(value: Any, inputs: Sequence[Any]) -> Any:
    """A sequence in which arrays that are memory of the plan, the inputs and views, are copied."""
    if isinstance(value, list):
        return [_owned(v, inputs) for v in value]
    if isinstance(value, np.ndarray) and value.dtype != dtypes.STRING:
        return value.copy() if value.base is not None or any(value is x for x in inputs) else value
    return value


def _draws(node: Node) -> bool:
    return has_trait(node.domain, node.op_type, "random") or has_trait(node.domain, node.op_type, "random_in_training")


__all__ = ["Facts", "Loose", "Mismatch", "Point", "Segment", "State", "Tracer"]
