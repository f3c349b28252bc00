"""The text of an LLVM function from the terms of an expression: elements in vectors, or rows with reductions along them.

The function takes the address of a frame, an array of int64:

    0  a counter, for the function's own use      4  the inner size n
    1  the number of threads                      5  the outer size
    2  the address of GOMP_parallel, or 0         6  the middle size
    3  what a thread claims at a time             7  the depth
    8  for each pointer its steps in bytes along the outer, the middle and the deep axis, and the inner one
    .. the pointers: the inputs, the results, and rows of scratch

A vector has adjacent elements of the inner axis.  What is reduced is the deep axis and, unless the function goes `across`, the
inner one too: then a row has depth times n elements and one reduced value, otherwise a strip of STRIP vectors is a row, with a
reduced value in each lane.  Without an input that is deep there is no loop over the depth.

The pointer of a scratch has as its first step the bytes from the row of one thread to that of the next.
An input is a "row" (its elements are adjacent along the inner axis), "scalar" (one element) or "strided", and "deep row" and so
on if it moves along the deep axis; results are rows, or what is left of a row if they are reduced.  If the outer and the middle
size are 1 and nothing is reduced, threads claim elements of the row, otherwise whole rows; the bits of the results do not depend
on which thread computes what.  A result may have the place of an input of elements of its size; with one thread, of an input of
larger elements too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from .builder import LANES, METADATA, Builder, Vector, type_of
from .expression import Term, order
from .functions import COSTLY
from .primitives import NEUTRAL, NotEmitted, combined, lowered, refusal

FIELDS, AXES = 8, 4
"""The numbers in a frame before the steps, and the steps of a pointer."""

STRIP = 4
"""The vectors of a strip."""

BLOCK = 4096
"""The elements that are added before the sums of the blocks are, in float64, so that the error hardly grows with the row."""

_UNROLLED = 4
"""The vectors in turn to which the elements of a row are added."""

_AHEAD = "8"
"""The places along the deep axis by which a strip is read early: the processor does not foresee long steps."""

_SLOT = 48
"""Above this bit the counter has the number of threads that have begun, below it the number of claims."""


class MachineCode:
    """A function.

    Attributes:
        name: of the function.
        inputs: the terms of its inputs, in the order of the pointers: recorded inputs by their place, then sizes.
        results: the terms of its results.
        scratch: the dtypes of its rows of scratch.
        rows: whether something is reduced, so that a claim is of whole rows.
    """

    def __init__(self, name: str, kernel: _Kernel) -> None:
        self.name, self._kernel = name, kernel
        self.inputs, self.results, self.rows = kernel.inputs, kernel.results, kernel.rows
        self.scratch = tuple(t.dtype for t in kernel.kept)

    @cached_property
    def text(self) -> str:
        """The module in LLVM's language; raises NotEmitted for a primitive of a dtype without code."""
        k = self._kernel.builder
        self._kernel.claims()
        work = k.function(f"internal void @{self.name}.work(ptr %frame) noinline nounwind")
        return work + ENTRY.format(name=self.name) + "\n".join(sorted(k.declared)) + METADATA


def emit(
    name: str, results: Sequence[Term], classes: Mapping[int, str], axes: tuple[int, ...] = (-1,), across: bool = False
) -> MachineCode:
    """The function that computes terms, whose text is made when it is asked for.

    Args:
        name: of the function.
        results: the terms.
        classes: for the place of each recorded input "row", "scalar" or "strided", or that and "deep"; a size is "scalar".
        axes: those that are reduced, counted from the end.
        across: whether the inner axis is not one of them.

    Raises:
        NotEmitted: a primitive or a dtype has no machine code, or a reduction is along other axes.
    """
    return MachineCode(name, _Kernel(tuple(results), classes, axes, across))


ENTRY = """define void @{name}(ptr %frame) nounwind {{
  store i64 0, ptr %frame
  %p1 = getelementptr i64, ptr %frame, i64 1
  %threads = load i64, ptr %p1
  %p2 = getelementptr i64, ptr %frame, i64 2
  %parallel = load ptr, ptr %p2
  %single = icmp sle i64 %threads, 1
  %none = icmp eq ptr %parallel, null
  %direct = or i1 %single, %none
  br i1 %direct, label %here, label %there
here:
  call void @{name}.work(ptr %frame)
  ret void
there:
  %count = trunc i64 %threads to i32
  call void %parallel(ptr @{name}.work, ptr %frame, i32 %count, i32 0)
  ret void
}}
"""


def grows(t: Term, axes: Sequence[int]) -> bool:
    """Whether a value is repeated along these axes, counted from the end."""
    source = (1,) * (len(t.shape) - len(t.args[0].shape)) + t.args[0].shape
    return any(t.shape[a] != source[a] for a in axes if -a <= len(t.shape))


def _operands(t: Term) -> tuple[Term, ...]:
    """What a term is computed from; a size is an input."""
    return () if t.op == "size" else t.args


class _Kernel:
    """The body of a function: what is known of the terms, and the text."""

    def __init__(self, results: tuple[Term, ...], classes: Mapping[int, str], axes: tuple[int, ...], across: bool) -> None:
        self.builder, self.results, self.axes, self.across = Builder(), results, axes, across
        self.moves = {i: how.split()[-1] for i, how in classes.items()}
        self.deep = {i for i, how in classes.items() if how.startswith("deep")}
        self.terms = order(results, operands=_operands)
        recorded = sorted((t for t in self.terms if t.op == "input"), key=lambda t: t.extra)
        self.inputs = (*recorded, *(t for t in self.terms if t.op == "size"))
        self.level: dict[int, int] = {}  # the reductions before a term
        self.space: dict[int, str] = {}  # "row": a value for each element, "single": for each row, "any": for either
        self.heavy: set[int] = set()  # terms that cost more than a load
        for t in self.terms:
            self._know(t)
        self.reduced = [t for t in self.terms if t.op == "reduce"]
        self.rows = bool(self.reduced)
        self.last = max((self.level[id(t)] for t in (*results, *self.reduced) if self.of_row(t) or t.op == "reduce"), default=0)
        if self.rows and any(self.space[id(r)] == "any" for r in results):
            raise NotEmitted("a result that does not depend on the rows")
        self._compare_sizes()
        reads = [(a, self.level[id(t)]) for t in self.terms for a in _operands(t)]
        reads += [(r, self.last) for r in results if self.of_row(r)]
        later = {id(a) for a, level in reads if level > self.level[id(a)]}
        self.kept = [t for t in self.terms if id(t) in later & self.heavy and self.space[id(t)] == "row"]
        self.pointers = [*self.inputs, *results, *self.kept]
        self.spot = {id(t): len(self.inputs) + len(results) + i for i, t in enumerate(self.kept)}

    def _compare_sizes(self) -> None:
        """Refuse results that are not all the rows of the frame, or one element for each of its rows."""
        shape = self.reduced[0].args[0].shape if self.rows else ()
        count = math.prod(shape[a] for a in self.axes) if self.rows else 1
        sizes = {r.size if self.of_row(r) else r.size * count for r in self.results}
        sizes |= {max(t.size for t in self.terms if self.space[id(t)] == "row")} if self.rows else set()
        if len(sizes) > 1:
            raise NotEmitted("results of several sizes")

    def of_row(self, t: Term) -> bool:
        """Whether a term has a value for each element of a row."""
        return self.space[id(t)] != "single"

    def _know(self, t: Term) -> None:
        if reason := refusal(t):
            raise NotEmitted(reason)
        args = _operands(t)
        level = self.level[id(t)] = max((self.level[id(a)] + (a.op == "reduce") for a in args), default=0)
        spaces = {self.space[id(a)] for a in args}
        space = "row" if "row" in spaces else "single" if "single" in spaces else "any"
        if t.op in ("input", "position"):
            space = self._space_of_leaf(t)
        elif t.op == "reduce":
            self._require_reduced(t, space)
            space = "single"
        elif t.op == "expand" and space == "single" and grows(t, self.axes):
            space = "row"
        self.space[id(t)] = space
        if t.op in COSTLY or any(id(a) in self.heavy and self.level[id(a)] == level and self.space[id(a)] == "row" for a in args):
            self.heavy.add(id(t))

    def _space_of_leaf(self, t: Term) -> str:
        if t.op == "position" or t.extra in self.deep:
            return "row"
        return "any" if self.moves[t.extra] == "scalar" else "single" if self.across else "row"

    def _require_reduced(self, t: Term, space: str) -> None:
        """Refuse a reduction that is not one of rows."""
        kind, axes = t.extra
        if tuple(a - len(t.args[0].shape) for a in axes) != self.axes or space != "row":
            raise NotEmitted("a reduction along other axes than those of the rows")
        if t.args[0].dtype.kind == "b" and kind in ("sum", "prod"):
            raise NotEmitted(f"{kind} of logical values")

    # Rows and the claims of threads

    def _field(self, i: int, kind: str = "i64") -> str:
        k = self.builder
        return k.raw(f"load {kind}, ptr {k.raw(f'getelementptr i64, ptr %frame, i64 {i}')}")

    def claims(self) -> None:
        """The loop of a thread: claim a part until none is left."""
        k, count = self.builder, len(self.pointers)
        chunk, n, outer, middle, depth = (self._field(i) for i in range(3, FIELDS))
        steps = [[self._field(FIELDS + AXES * j + axis) for axis in range(AXES)] for j in range(count)]
        pointers = [self._field(FIELDS + AXES * count + j, "ptr") for j in range(count)]
        rows = k.raw(f"mul i64 {outer}, {middle}")
        slot = k.raw(f"lshr i64 {k.raw(f'atomicrmw add ptr %frame, i64 {1 << _SLOT} monotonic')}, {_SLOT}")
        for j in range(count - len(self.kept), count):
            pointers[j] = self.moved(pointers[j], slot, steps[j][0])
        positive = k.raw(f"icmp sgt i64 {chunk}, 0")
        chunk = k.raw(f"select i1 {positive}, i64 {chunk}, i64 1")
        flat = "false" if self.rows else k.raw(f"icmp eq i64 {rows}, 1")
        strips = k.raw(f"udiv i64 {k.raw(f'add i64 {n}, {STRIP * LANES - 1}')}, {STRIP * LANES}") if self.across else "1"
        whole = k.raw(f"select i1 {flat}, i64 {n}, i64 {k.raw(f'mul i64 {rows}, {strips}')}")
        k.emit("br label %claim")
        k.lines.append("claim:")
        claimed = k.raw(f"and i64 {k.raw('atomicrmw add ptr %frame, i64 1 monotonic')}, {(1 << _SLOT) - 1}")
        start = k.raw(f"mul i64 {claimed}, {chunk}")
        k.emit(f"br i1 {k.raw(f'icmp slt i64 {start}, {whole}')}, label %part, label %done")
        k.lines.append("part:")
        stop = self.least(k.raw(f"add i64 {start}, {chunk}"), whole)
        first = k.raw(f"select i1 {flat}, i64 0, i64 {start}")
        end = k.raw(f"select i1 {flat}, i64 1, i64 {stop}")
        skipped = k.raw(f"select i1 {flat}, i64 {start}, i64 0")
        part = k.raw(f"select i1 {flat}, i64 {k.raw(f'sub i64 {stop}, {start}')}, i64 {n}")

        def row(r: str) -> None:
            before, left = skipped, part
            if self.across:
                before = k.raw(f"mul i64 {k.raw(f'urem i64 {r}, {strips}')}, {STRIP * LANES}")
                left, r = k.raw(f"sub i64 {n}, {before}"), k.raw(f"udiv i64 {r}, {strips}")
            o, m = k.raw(f"udiv i64 {r}, {middle}"), k.raw(f"urem i64 {r}, {middle}")
            at = list(pointers)
            for j in range(count - len(self.kept)):
                at[j] = self.moved(self.moved(at[j], o, steps[j][0]), m, steps[j][1])
                at[j] = self.moved(at[j], before, steps[j][3]) if self.across or not self.rows else at[j]
            if not self.across:
                return _RowText(self, at, steps, left, depth).passes()
            full = k.raw(f"icmp sge i64 {left}, {STRIP * LANES}")
            k.loop(k.raw(f"zext i1 {full} to i64"), 1, lambda _: _RowText(self, at, steps, left, depth, STRIP).passes())

            def rest(i: str) -> None:
                inside, here = k.raw(f"sub i64 {left}, {i}"), list(at)
                for j in range(count - len(self.kept)):
                    here[j] = self.moved(at[j], i, steps[j][3])
                _RowText(self, here, steps, inside, depth, 1, k.first(inside)).passes()

            return k.loop(k.raw(f"select i1 {full}, i64 0, i64 {left}"), LANES, rest)

        k.loop(end, 1, row, first)
        k.emit("br label %claim")
        k.lines.append("done:")

    def moved(self, pointer: str, i: str, step: str) -> str:
        """A pointer so many steps further."""
        k = self.builder
        return k.raw(f"getelementptr i8, ptr {pointer}, i64 {k.raw(f'mul i64 {i}, {step}')}")

    def least(self, a: str, b: str) -> str:
        """The lower one of two numbers."""
        k = self.builder
        return k.raw(f"select i1 {k.raw(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


class _RowText:
    """The text for a row: a pass over it for each level of reductions.

    Args:
        kernel: the function.
        at: the pointers.
        steps: of each pointer.
        n: the elements along the inner axis.
        depth: the size of the deep axis.
        vectors: those of a strip.
        mask: the lanes of a strip of one vector.
    """

    def __init__(
        self, kernel: _Kernel, at: list[str], steps: list[list[str]], n: str, depth: str, vectors: int = 1,
        mask: Vector | None = None,
    ) -> None:  # fmt: skip
        self.kernel, self.builder, self.at, self.steps, self.n = kernel, kernel.builder, at, steps, n
        self.depth, self.vectors, self.mask = depth, vectors, mask
        self.held: list[dict[int, Vector]] = [{} for _ in range(vectors)]  # the values of single terms
        self.here, self.deep = at, "0"  # at the present place along the deep axis

    def passes(self) -> None:
        """All passes, then the results that are single."""
        k, kernel = self.builder, self.kernel
        for now in range(kernel.last + 1):
            reduced = [t for t in kernel.reduced if kernel.level[id(t)] == now]
            stored = [(t, kernel.spot[id(t)]) for t in kernel.kept if kernel.level[id(t)] == now]
            if now == kernel.last:
                stored += [(t, len(kernel.inputs) + i) for i, t in enumerate(kernel.results) if kernel.of_row(t)]
            if reduced or stored:
                self._pass(now, reduced, stored)
        for j, t in enumerate(kernel.results, len(kernel.inputs)):
            if kernel.of_row(t):
                continue
            wanted = self._needed([t], kernel.last + 1)
            for v, held in enumerate(self.held):
                self._computed(wanted, str(v * LANES), self.mask, kernel.last + 1, held)
                if kernel.across:
                    k.store(held[id(t)], self._place(j, str(v * LANES)), t.dtype, self.mask)
                else:
                    k.store_one(held[id(t)], self.at[j], t.dtype)

    def _pass(self, now: int, reduced: list[Term], stored: list[tuple[Term, int]]) -> None:
        k, kernel = self.builder, self.kernel
        wanted = self._needed([*(t.args[0] for t in reduced), *(t for t, _ in stored)], now)
        once = [t for t in wanted if kernel.space[id(t)] != "row"]
        for v, held in enumerate(self.held):
            self._computed(once, str(v * LANES), self.mask, now, held)
        light = not any(t.op in COSTLY for t in wanted if kernel.space[id(t)] == "row")
        count = self.vectors if kernel.across else _UNROLLED if reduced else 2 if light else 1
        parts = {id(t): [k.place(f"<{LANES} x {type_of(t.dtype)}>") for _ in range(count)] for t in reduced}
        totals = {id(t): [k.kept(self._neutral(t, _total_type(t))) for _ in self.held] for t in reduced}

        def body(i: str, u: int, mask: Vector | None) -> None:
            known = dict(self.held[u if kernel.across else 0])
            self._computed(wanted, i, mask, now, known)
            for t in reduced:
                x = known[id(t.args[0])]
                x = x.compare("ne", 0) if t.extra[0] == "any" and x.type != "i1" else x
                x = x if mask is None or kernel.across else x.where(mask, self._neutral(t, x.type))
                self._add(t, parts[id(t)][u], x)
            for t, j in stored:  # after all loads
                k.store(known[id(t)], self._place(j, i), t.dtype, mask)

        def block(first: str, last: str, start: str, size: str) -> None:
            for t in reduced:
                for p in parts[id(t)]:
                    k.put(self._neutral(t, type_of(t.dtype)), p)
            self._deeper(first, last, lambda: self._walk(start, size, count, body))
            for t in reduced:
                found = [k.get(p, type_of(t.dtype)) for p in parts[id(t)]]
                while len(found) > len(self.held):
                    found = [self._step(t, a, b) for a, b in zip(found[::2], found[1::2], strict=True)]
                for x, total in zip(found, totals[id(t)], strict=True):
                    self._add(t, total, x if x.type == _total_type(t) else x.to("fpext", "double"))

        if any(t.extra[0] == "sum" and t.dtype.kind == "f" for t in reduced):
            self._in_blocks(block)
        else:
            block("0", self.depth, "0", self.n)
        for t in reduced:
            self._hold(t, totals[id(t)])

    def _hold(self, t: Term, totals: list[str]) -> None:
        """Let the total of a reduction be known."""
        for held, total in zip(self.held, totals, strict=True):
            x, kind = self.builder.get(total, _total_type(t)), type_of(t.dtype)
            x = x if x.type == kind else x.to("fptrunc", kind)
            held[id(t)] = x if self.kernel.across else self._total(t, x)

    def _neutral(self, t: Term, kind: str) -> Vector:
        return self.builder.vector(NEUTRAL[t.extra[0]](t.args[0].dtype), kind)

    def _in_blocks(self, block: Callable[[str, str, str, str], None]) -> None:
        """Run block(first and last place along the deep axis, start, size) for parts of a row of at most BLOCK elements."""
        k, least = self.builder, self.kernel.least

        def along(first: str, last: str) -> None:
            k.loop(self.n, BLOCK, lambda i: block(first, last, i, least(k.raw(f"sub i64 {self.n}, {i}"), str(BLOCK))))

        if not self.kernel.deep:
            return along("0", "1")
        rows = str(BLOCK // STRIP // LANES)
        if not self.kernel.across:
            whole = k.raw(f"udiv i64 {BLOCK}, {self.n}")
            rows = k.raw(f"select i1 {k.raw(f'icmp eq i64 {whole}, 0')}, i64 1, i64 {whole}")

        def deep(d: str) -> None:
            last = least(k.raw(f"add i64 {d}, {rows}"), self.depth)
            if self.kernel.across:
                block(d, last, "0", self.n)
            else:
                along(d, last)

        return k.loop(self.depth, rows, deep)

    def _deeper(self, first: str, last: str, body: Callable[[], None]) -> None:
        """Run a body at each place along the deep axis from the first to the last."""
        kernel = self.kernel
        if not kernel.deep:
            return body()

        def place(d: str) -> None:
            still = {j for j, t in enumerate(kernel.inputs) if t.op == "size" or t.extra not in kernel.deep}
            self.here = [p if j in still else kernel.moved(p, d, self.steps[j][2]) for j, p in enumerate(self.at)]
            self.deep = d
            body()
            self.here = self.at

        return self.builder.loop(last, 1, place, first)

    def _needed(self, results: list[Term], now: int) -> list[Term]:
        """What a pass computes or loads, operands first."""
        held = self.held[0]

        def operands(t: Term) -> tuple[Term, ...]:
            return () if id(t) in held or t.op == "reduce" or self._is_stored(t, now) else _operands(t)

        return [t for t in order(results, operands=operands) if id(t) not in held]

    def _is_stored(self, t: Term, now: int) -> bool:
        """Whether a term is in scratch since an earlier pass."""
        return id(t) in self.kernel.spot and self.kernel.level[id(t)] < now

    def _place(self, j: int, i: str) -> str:
        return self.builder.raw(f"getelementptr i{8 * self.kernel.pointers[j].dtype.itemsize}, ptr {self.here[j]}, i64 {i}")

    def _computed(self, terms: list[Term], i: str, mask: Vector | None, now: int, known: dict[int, Vector]) -> None:
        """Add the vectors of terms at place i of the row to those that are known."""
        k, kernel = self.builder, self.kernel
        for t in terms:
            if id(t) in known:
                continue
            if t.op in ("input", "size"):
                y = self._input(t, i, mask)
            elif t.op == "const":
                y = k.vector(t.number, type_of(t.dtype))
            elif t.op == "position":
                y = k.numbers(self.deep if kernel.across else i, type_of(t.dtype), 0 if kernel.across else 1)
            elif self._is_stored(t, now):
                y = k.load(self._place(kernel.spot[id(t)], i), t.dtype, mask)
            else:
                y = lowered(k, t, [known[id(a)] for a in t.args])
            known[id(t)] = y

    def _input(self, t: Term, i: str, mask: Vector | None) -> Vector:
        k, kernel = self.builder, self.kernel
        j = kernel.inputs.index(t)
        how = "scalar" if t.op == "size" else kernel.moves[t.extra]
        if how == "scalar":
            return k.scalar(self.here[j], t.dtype)
        if how == "row":
            place = self._place(j, i)
            if kernel.across and t.extra in kernel.deep:
                k.prefetch(kernel.moved(place, _AHEAD, self.steps[j][2]))
            return k.load(place, t.dtype, mask)
        last = None if mask is None else k.raw(f"sub i64 {k.raw(f'sub i64 {self.n}, {i}')}, 1")
        step = self.steps[j][3]
        return k.gather(kernel.moved(self.here[j], i, step), step, t.dtype, last)

    def _walk(self, start: str, n: str, unroll: int, body: Callable[[str, int, Vector | None], None]) -> None:
        """Run body(place, number in the unrolling, mask) over n elements: unrolled, single vectors, then a masked one."""
        k = self.builder
        if self.kernel.across:
            for v in range(self.vectors):
                body(str(v * LANES), v, self.mask)
            return
        many, single = (k.raw(f"and i64 {n}, {-LANES * u}") for u in (unroll, 1))

        def at(*parts: str) -> str:
            place = start
            for part in parts:
                place = part if place == "0" else k.raw(f"add i64 {place}, {part}")
            return place

        def unrolled(i: str) -> None:
            for u in range(unroll):
                body(at(i, str(u * LANES)), u, None)

        k.loop(many, LANES * unroll, unrolled)
        if unroll > 1:
            k.loop(single, LANES, lambda i: body(at(i), 0, None), many)
        left = k.raw(f"sub i64 {n}, {single}")
        mask = k.first(left)
        k.loop(k.raw(f"zext i1 {k.raw(f'icmp ne i64 {left}, 0')} to i64"), 1, lambda _: body(at(single), 0, mask))

    def _step(self, t: Term, a: Vector, b: Vector) -> Vector:
        return combined(self.builder, t.extra[0], a, b, t.args[0].dtype.kind in "ub")

    def _add(self, t: Term, place: str, x: Vector) -> None:
        """Combine a vector with what is in a place."""
        self.builder.put(self._step(t, self.builder.get(place, x.type), x), place)

    def _total(self, t: Term, x: Vector) -> Vector:
        """Lanes in halves: the same tree on every processor; the result is in every lane."""
        half = LANES // 2
        while half:
            x = self._step(t, x, self.builder.shuffled(x, [(i + half) % (2 * half) for i in range(LANES)]))
            half //= 2
        return self.builder.splat(x.lane(0), x.type)


def _total_type(t: Term) -> str:
    """The type of the sums of blocks; of other reductions that of the values."""
    return "double" if t.extra[0] == "sum" and t.dtype.kind == "f" else type_of(t.dtype)
