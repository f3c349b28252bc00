"""The text of an LLVM function from the terms of an expression: elements in vectors, or rows with reductions along them.

The function takes the address of a frame, an array of int64:

    0  a counter, for the function's own use      4  the inner size n
    1  the number of threads                      5  the outer size
    2  the address of GOMP_parallel, or 0         6  the middle size
    3  elements of a row, or rows, that a thread claims at a time
    7  for each pointer its steps in bytes along the outer, the middle and the inner axis
    .. the pointers: the inputs, the results, and rows of scratch

The pointer of a scratch has as its first step the bytes from the row of one thread to that of the next; a row has n elements.
An input is a "row" (its elements are adjacent along the inner axis), "scalar" (one element for each row) or "strided"; results
are rows, or one element for each row if they are reduced.  If the outer and the middle size are 1 and nothing is reduced, threads
claim parts of the row, else whole rows; the bits of the results do not depend on which thread computes what.  A result may have
the place of an input of elements of its size; with one thread, of an input of larger elements too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from .builder import LANES, METADATA, Builder, Vector, type_of
from .expression import Term, order
from .functions import COSTLY
from .primitives import NEUTRAL, NotEmitted, combined, lowered, refusal

FIELDS = 7
"""The numbers in a frame before the steps."""

BLOCK = 4096
"""The elements of a row that are added before the sums of the blocks are, so that the error does not grow with the row."""

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


def emit(name: str, results: Sequence[Term], classes: Mapping[int, str]) -> MachineCode:
    """The function that computes terms, whose text is made when it is asked for.

    Args:
        name: of the function.
        results: the terms.
        classes: for the place of each recorded input "row", "scalar" or "strided"; the input of a size is "scalar".

    Raises:
        NotEmitted: a primitive or a dtype has no machine code, or a reduction is not along the inner axis.
    """
    return MachineCode(name, _Kernel(tuple(results), classes))


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


def _operands(t: Term) -> tuple[Term, ...]:
    """What a term is computed from; a size is an input."""
    return () if t.op == "size" else t.args


class _Kernel:
    """The body of a function: what is known of the terms, and the text."""

    def __init__(self, results: tuple[Term, ...], classes: Mapping[int, str]) -> None:
        self.builder, self.results, self.classes = Builder(), results, classes
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
        self.last = max((self.level[id(t)] for t in (*results, *self.reduced) if self._of_row(t) or t.op == "reduce"), default=0)
        if self.rows and any(self.space[id(r)] == "any" for r in results):
            raise NotEmitted("a result that does not depend on the rows")
        self._compare_sizes()
        reads = [(a, self.level[id(t)]) for t in self.terms for a in _operands(t)]
        reads += [(r, self.last) for r in results if self._of_row(r)]
        later = {id(a) for a, level in reads if level > self.level[id(a)]}
        self.kept = [t for t in self.terms if id(t) in later & self.heavy and self.space[id(t)] == "row"]
        self.pointers = [*self.inputs, *results, *self.kept]
        self.spot = {id(t): len(self.inputs) + len(results) + i for i, t in enumerate(self.kept)}

    def _compare_sizes(self) -> None:
        """Refuse results that are not all the rows of the frame, or one element for each of its rows."""
        inner = self.reduced[0].args[0].shape[-1] if self.rows else 1
        sizes = {r.size if self._of_row(r) else r.size * inner for r in self.results}
        sizes |= {max(t.size for t in self.terms if self.space[id(t)] == "row")} if self.rows else set()
        if len(sizes) > 1:
            raise NotEmitted("results of several sizes")

    def _of_row(self, t: Term) -> bool:
        return self.space[id(t)] != "single"

    def _know(self, t: Term) -> None:
        if reason := refusal(t):
            raise NotEmitted(reason)
        args = _operands(t)
        level = self.level[id(t)] = max((self.level[id(a)] + (a.op == "reduce") for a in args), default=0)
        spaces = {self.space[id(a)] for a in args}
        space = "row" if "row" in spaces else "single" if "single" in spaces else "any"
        if t.op == "input":
            space = "any" if self.classes[t.extra] == "scalar" else "row"
        elif t.op == "reduce":
            kind, axes = t.extra
            if axes != (len(args[0].shape) - 1,) or space != "row":
                raise NotEmitted("a reduction along other axes than the last")
            if t.args[0].dtype.kind == "b" and kind in ("sum", "prod"):
                raise NotEmitted(f"{kind} of logical values")
            space = "single"
        elif t.op == "expand" and space == "single" and t.shape[-1:] != args[0].shape[-1:]:
            space = "row"
        self.space[id(t)] = space
        if t.op in COSTLY or any(id(a) in self.heavy and self.level[id(a)] == level and self.space[id(a)] == "row" for a in args):
            self.heavy.add(id(t))

    # Rows and the claims of threads

    def _field(self, i: int, kind: str = "i64") -> str:
        k = self.builder
        return k.raw(f"load {kind}, ptr {k.raw(f'getelementptr i64, ptr %frame, i64 {i}')}")

    def claims(self) -> None:
        """The loop of a thread: claim a part until none is left."""
        k, count = self.builder, len(self.pointers)
        chunk, n, outer, middle = (self._field(i) for i in range(3, FIELDS))
        steps = [[self._field(FIELDS + 3 * j + axis) for axis in range(3)] for j in range(count)]
        pointers = [self._field(FIELDS + 3 * count + j, "ptr") for j in range(count)]
        rows = k.raw(f"mul i64 {outer}, {middle}")
        slot = k.raw(f"lshr i64 {k.raw(f'atomicrmw add ptr %frame, i64 {1 << _SLOT} monotonic')}, {_SLOT}")
        for j in range(count - len(self.kept), count):
            pointers[j] = self._moved(pointers[j], slot, steps[j][0])
        positive = k.raw(f"icmp sgt i64 {chunk}, 0")
        chunk = k.raw(f"select i1 {positive}, i64 {chunk}, i64 1")
        flat = "false" if self.rows else k.raw(f"icmp eq i64 {rows}, 1")
        whole = k.raw(f"select i1 {flat}, i64 {n}, i64 {rows}")
        k.emit("br label %claim")
        k.lines.append("claim:")
        claimed = k.raw(f"and i64 {k.raw('atomicrmw add ptr %frame, i64 1 monotonic')}, {(1 << _SLOT) - 1}")
        start = k.raw(f"mul i64 {claimed}, {chunk}")
        k.emit(f"br i1 {k.raw(f'icmp slt i64 {start}, {whole}')}, label %part, label %done")
        k.lines.append("part:")
        stop = self._least(k.raw(f"add i64 {start}, {chunk}"), whole)
        first = k.raw(f"select i1 {flat}, i64 0, i64 {start}")
        end = k.raw(f"select i1 {flat}, i64 1, i64 {stop}")
        skipped = k.raw(f"select i1 {flat}, i64 {start}, i64 0")
        part = k.raw(f"select i1 {flat}, i64 {k.raw(f'sub i64 {stop}, {start}')}, i64 {n}")

        def row(r: str) -> None:
            o, m = k.raw(f"udiv i64 {r}, {middle}"), k.raw(f"urem i64 {r}, {middle}")
            at = []
            for j, pointer in enumerate(pointers):
                if j < count - len(self.kept):
                    pointer = self._moved(self._moved(pointer, o, steps[j][0]), m, steps[j][1])
                    pointer = pointer if self.rows else self._moved(pointer, skipped, steps[j][2])
                at.append(pointer)
            _RowText(self, at, [s[2] for s in steps], part).passes()

        k.loop(end, 1, row, first)
        k.emit("br label %claim")
        k.lines.append("done:")

    def _moved(self, pointer: str, i: str, step: str) -> str:
        k = self.builder
        return k.raw(f"getelementptr i8, ptr {pointer}, i64 {k.raw(f'mul i64 {i}, {step}')}")

    def _least(self, a: str, b: str) -> str:
        k = self.builder
        return k.raw(f"select i1 {k.raw(f'icmp slt i64 {a}, {b}')}, i64 {a}, i64 {b}")


class _RowText:
    """The text for a row: a pass over it for each level of reductions."""

    def __init__(self, kernel: _Kernel, at: list[str], steps: list[str], n: str) -> None:
        self.kernel, self.builder, self.at, self.steps, self.n = kernel, kernel.builder, at, steps, n
        self.held: dict[int, Vector] = {}  # the values of single terms

    def passes(self) -> None:
        """All passes, then the results that are single."""
        k, kernel = self.builder, self.kernel
        for now in range(kernel.last + 1):
            reduced = [t for t in kernel.reduced if kernel.level[id(t)] == now]
            stored = [(t, kernel.spot[id(t)]) for t in kernel.kept if kernel.level[id(t)] == now]
            if now == kernel.last:
                stored += [(t, len(kernel.inputs) + i) for i, t in enumerate(kernel.results) if kernel._of_row(t)]
            if reduced or stored:
                self._pass(now, reduced, stored)
        for i, t in enumerate(kernel.results):
            if not kernel._of_row(t):
                self._computed(self._needed([t], kernel.last + 1), "0", None, kernel.last + 1, self.held)
                k.store_one(self.held[id(t)], self.at[len(kernel.inputs) + i], t.dtype)

    def _pass(self, now: int, reduced: list[Term], stored: list[tuple[Term, int]]) -> None:
        k, kernel = self.builder, self.kernel
        wanted = self._needed([*(t.args[0] for t in reduced), *(t for t, _ in stored)], now)
        self._computed([t for t in wanted if kernel.space[id(t)] != "row"], "0", None, now, self.held)  # once for the row
        light = not any(t.op in COSTLY for t in wanted if kernel.space[id(t)] == "row")
        unroll = 4 if reduced else 2 if light else 1

        def begun(t: Term) -> str:
            return k.kept(k.vector(NEUTRAL[t.extra[0]](t.args[0].dtype), type_of(t.dtype)))

        places = {id(t): [k.place(f"<{LANES} x {type_of(t.dtype)}>") for _ in range(unroll)] for t in reduced}
        totals = {id(t): begun(t) for t in reduced}

        def body(i: str, u: int, mask: Vector | None) -> None:
            known = dict(self.held)
            self._computed(wanted, i, mask, now, known)
            for t in reduced:
                x = known[id(t.args[0])]
                x = x.compare("ne", 0) if t.extra[0] == "any" and x.type != "i1" else x
                x = x if mask is None else x.where(mask, NEUTRAL[t.extra[0]](t.args[0].dtype))
                self._add(t, places[id(t)][u], x)
            for t, j in stored:  # after all loads
                k.store(known[id(t)], self._place(j, i), t.dtype, mask)

        def block(start: str, size: str) -> None:
            for t in reduced:
                for p in places[id(t)]:
                    k.put(k.vector(NEUTRAL[t.extra[0]](t.args[0].dtype), type_of(t.dtype)), p)
            self._walk(start, size, unroll, body)
            for t in reduced:
                parts = [k.get(p, type_of(t.dtype)) for p in places[id(t)]]
                while len(parts) > 1:
                    parts = [self._step(t, a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
                self._add(t, totals[id(t)], parts[0])

        if any(t.extra[0] == "sum" and t.dtype.kind == "f" for t in reduced):
            size = str(BLOCK)
            k.loop(self.n, BLOCK, lambda i: block(i, kernel._least(k.raw(f"sub i64 {self.n}, {i}"), size)))
        else:
            block("0", self.n)
        for t in reduced:
            self.held[id(t)] = self._total(t, k.get(totals[id(t)], type_of(t.dtype)))

    def _needed(self, results: list[Term], now: int) -> list[Term]:
        """What a pass computes or loads, operands first."""

        def operands(t: Term) -> tuple[Term, ...]:
            return () if id(t) in self.held or t.op == "reduce" or self._is_stored(t, now) else _operands(t)

        return [t for t in order(results, operands=operands) if id(t) not in self.held]

    def _is_stored(self, t: Term, now: int) -> bool:
        """Whether a term is in scratch since an earlier pass."""
        return id(t) in self.kernel.spot and self.kernel.level[id(t)] < now

    def _place(self, j: int, i: str) -> str:
        return self.builder.raw(f"getelementptr i{8 * self.kernel.pointers[j].dtype.itemsize}, ptr {self.at[j]}, i64 {i}")

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
            elif self._is_stored(t, now):
                y = k.load(self._place(kernel.spot[id(t)], i), t.dtype, mask)
            else:
                y = lowered(k, t, [known[id(a)] for a in t.args])
            known[id(t)] = y

    def _input(self, t: Term, i: str, mask: Vector | None) -> Vector:
        k, kernel = self.builder, self.kernel
        j = kernel.inputs.index(t)
        how = "scalar" if t.op == "size" else kernel.classes[t.extra]
        if how == "scalar":
            return k.scalar(self.at[j], t.dtype)
        if how == "row":
            return k.load(self._place(j, i), t.dtype, mask)
        last = None if mask is None else k.raw(f"sub i64 {k.raw(f'sub i64 {self.n}, {i}')}, 1")
        return k.gather(kernel._moved(self.at[j], i, self.steps[j]), self.steps[j], t.dtype, last)

    def _walk(self, start: str, n: str, unroll: int, body: Callable[[str, int, Vector | None], None]) -> None:
        """Run body(place, number in the unrolling, mask) over n elements: unrolled, single vectors, then a masked one."""
        k = self.builder
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
