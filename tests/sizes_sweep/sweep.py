"""Compares plans with sizes by name with the definitions, in eight sizes of each drawn model, on memory between guard pages.

    python tests/sizes_sweep/sweep.py --models 10000                # tox -e sizes
    python tests/sizes_sweep/sweep.py --first 4711 --models 1       # a model that a fault has printed

A session runs a model in eight sizes, some of which are 0, 1, large, or those of an earlier request, and on inputs that disagree
about a size.  The values are those of the definitions, within the tolerances of a model, or the error has the same code.  All
requests run again in another order, and two in sessions of their own: equal bits are required, the latter of deterministic
sessions only.  The inputs, constants and arenas end or begin at a page without access, or each place of an arena does; between
runs they hold garbage.  A child process runs the models: one that dies is a fault of one model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.onednn_sweep import plans  # noqa: E402
from tests.onednn_sweep.pages import FILLS, fill, guarded, spread, whole_pages  # noqa: E402
from tests.sizes_sweep.models import REQUESTS, Model  # noqa: E402
from tests.sizes_sweep.nodes import drawn  # noqa: E402

from singa_backend import SingaBackend  # noqa: E402
from singa_backend.comparison.difference import Difference, Tolerance, difference  # noqa: E402
from singa_backend.comparison.tolerances import qualified  # noqa: E402
from singa_backend.comparison.verdict import same_bits  # noqa: E402
from singa_backend.errors import SonnxError  # noqa: E402
from singa_backend.io import processes  # noqa: E402
from singa_backend.io.processes import Child, ChildFailure  # noqa: E402
from singa_backend.ir.sizes import now  # noqa: E402
from singa_backend.kernels.values import Buffer  # noqa: E402
from singa_backend.plans import arena  # noqa: E402
from singa_backend.plans.trace import place  # noqa: E402

SECONDS = 300.0
"""Seconds after which a model hangs."""

ALONE = 2
"""The number of requests of a model that run in a session of their own, too."""

NOISE = 64
"""The error of a result near 0 in steps of 1."""

SEGMENTS = 4
"""The arenas of guarded places that are filled with garbage."""

GUARDS = ("end", "begin", "each")
"""What is guarded: the end of an arena, its begin, or the end of each of its places."""


class SizedMemory(plans.GuardedMemory):
    """Takes the place of the memory of plans with sizes by name.

    Args:
        guard: one of `GUARDS`.
    """

    def __init__(self, guard: str) -> None:
        super().__init__()
        self.guard, self._place = guard, arena.place

    def aligned(self, nbytes: int) -> np.ndarray:
        total = spread(self._sizes)[1] if self._sizes else -1
        if nbytes == total + total // 4:  # of an arena that is made larger than it need be
            nbytes = total
        if self.guard != "begin" or nbytes == total:
            return super().aligned(nbytes)
        (start,), _ = spread([nbytes])
        return guarded([nbytes])[start : start + nbytes]

    def place(self, buffers: Sequence[Buffer]) -> int:
        return super().place(buffers) if self.guard == "each" else self._place(buffers)

    def offsets(self, binder: place.Binder) -> tuple[list[int], int]:
        """The places of the buffers of an arena with a page after each, and its bytes."""
        self._sizes = [0 if id(b) in binder._candidates else now(b.nbytes) for b in binder._own]
        starts, total = spread(self._sizes)
        ends = zip(starts, self._sizes, strict=True)
        made = [start + whole_pages(n) - -(-n // plans.STEP) * plans.STEP for start, n in ends]
        self.arenas = self.arenas[-SEGMENTS:]
        self._spans = [(at, at + n) for at, n in zip(made, self._sizes, strict=True)]
        binder._segment.arena = None
        return made, total

    def fill_plans(self, rep: Any, how: str) -> None:
        """Fill the arenas of the plans of a session with garbage."""
        self.fill(how)
        if self.guard != "each" and rep._session._planner is not None:
            for plan in rep._session._planner.plans.values():
                for segment in plan.segments:
                    if segment.arena is not None:
                        fill(segment.arena, how, self.rng)


@contextmanager
def sized_plans(guard: str, passed: bool) -> Iterator[SizedMemory]:
    """Plans that are traced in the `with` block have guarded memory, also those that are bound to other sizes."""
    formulas = place.Binder._formulas

    def guarded_formulas(binder: place.Binder, *arguments: Any) -> Callable[[Sequence[int]], tuple[int, ...]]:
        numbers = formulas(binder, *arguments)

        def spread_out(sizes: Sequence[int]) -> tuple[int, ...]:
            *words, _ = numbers(sizes)
            offsets, total = memory.offsets(binder)
            return (*words[: len(words) - len(offsets)], *offsets, total)

        return spread_out

    with plans.guarded_plans(passed, SizedMemory(guard)) as memory:
        assert isinstance(memory, SizedMemory)
        try:
            if guard == "each":
                place.Binder._formulas = guarded_formulas  # type: ignore[method-assign, assignment]
            yield memory
        finally:
            place.Binder._formulas = formulas  # type: ignore[method-assign]


# --- in the child -----------------------------------------------------------------------------------------------------


def requests(m: Model, seed: int) -> list[list[np.ndarray]]:
    """The inputs of all requests: the sizes of one are those of an earlier one, and the last may disagree about a size."""
    draw = np.random.default_rng([seed, 1])
    order = list(range(REQUESTS))
    order[int(draw.integers(4, REQUESTS))] = int(draw.integers(4))
    made = [m.request(index, draw) for index in order]
    if draw.random() < 0.05:
        for x in made[3]:
            if x.dtype.kind == "f" and x.size:
                x.reshape(-1)[int(draw.integers(x.size))] = draw.choice([np.nan, np.inf, -np.inf])
    names = [(i, axis, n) for i, x in enumerate(m.inputs) for axis, n in enumerate(m.declared[x.name]) if isinstance(n, str)]
    twice = [(i, axis) for i, axis, n in names if [other for _, _, other in names].count(n) > 1]
    if twice:
        index, axis = twice[int(draw.integers(len(twice)))]
        other = list(made[1])
        other[index] = np.concatenate([other[index]] + [other[index].take([0], axis)] * bool(other[index].shape[axis]), axis)
        made.append(other)
    return made


def answer(rep: Any, inputs: Sequence[np.ndarray]) -> Any:
    """The outputs, or the kind of an error."""
    try:
        return [np.array(y) if isinstance(y, np.ndarray) else y for y in rep.run(list(inputs))]
    except SonnxError as error:
        return f"{type(error).__name__} {error.code}"


class Case:
    """A drawn model that runs by plans and by the definitions."""

    def __init__(self, seed: int) -> None:
        self.seed, drawing = seed, drawn(seed)
        self.model = drawing.model()
        self.feeds = requests(drawing, seed)
        self.options: dict[str, Any] = {"threads": 2 if seed % 8 == 3 else 1, "deterministic": seed % 2 == 0}
        self.guard, self.passed = GUARDS[seed % 3], seed % 5 == 1
        self.counts: Counter[str] = Counter()
        operators = frozenset(qualified(n.domain, n.op_type) for n in self.model.graph.node)
        self.tolerances = [Tolerance(operators=operators, dtype=drawing.narrowest(o.name)) for o in self.model.graph.output]

    def prepared(self, **options: Any) -> Any:
        return SingaBackend.prepare(self.model, **(options or self.options))

    def fault(self) -> str:
        """How plans differ from the definitions, or from themselves; empty if they do not."""
        try:
            definitions = self.prepared(optimize=0)
        except SonnxError as error:
            self.counts["models that are not valid"] += 1
            return f"invalid: {error}"
        expected = [answer(definitions, feed) for feed in self.feeds]
        with sized_plans(self.guard, self.passed) as memory:
            feeds = [[_guarded(x, memory) for x in feed] for feed in self.feeds]
            rep, first = self.prepared(), []
            for i, feed in enumerate(feeds):
                first.append(answer(rep, feed))
                if why := self._compared(i, first[i], expected[i], rep):
                    return why
            for turn, i in enumerate(np.random.default_rng([self.seed, 2]).permutation(len(feeds))):
                memory.fill_plans(rep, FILLS[turn % len(FILLS)])
                if not same_bits(answer(rep, feeds[i]), first[i]):
                    if self.options["deterministic"] or not rep._session._planner.dynamic:
                        return f"{self._shapes(i)}: other bits when it is repeated"
                    self.counts["repeated requests with other bits, not deterministic, after sizes that data decide"] += 1
            self._count(rep)
            for i in np.random.default_rng([self.seed, 3]).permutation(len(feeds))[:ALONE]:
                self.counts["requests in a session of their own"] += 1
                if not same_bits(answer(self.prepared(), feeds[i]), first[i]):
                    if self.options["deterministic"]:
                        return f"{self._shapes(i)}: other bits than in a session of its own"
                    self.counts["of them with other bits, not deterministic"] += 1
            return "" if same_bits(feeds, self.feeds) else "an input has changed"

    def _compared(self, i: int, found: Any, expected: Any, rep: Any) -> str:
        """How the answer to a request differs from that of the definitions."""
        if isinstance(found, str) or isinstance(expected, str):
            if found == expected:
                self.counts["requests that both refuse"] += 1
            elif isinstance(found, str) or not any(not x.size for x in self.feeds[i]):
                return f"{self._shapes(i)}: {found!r:.200} in place of {expected!r:.200}"
            else:  # a plan does not compute what the result does not need, of empty values
                self.counts["empty requests that only the definitions refuse"] += 1
            return ""
        self.counts["requests with equal results"] += 1
        if rep._session.reason is not None:
            self.counts[f"of them computed by the definitions: {rep._session.reason}"] += 1
        for n, (a, b) in enumerate(zip(found, expected, strict=True)):
            apart = difference(a, b, self.tolerances[n])
            if not apart.agrees and not _cancels(apart, self.tolerances[n]):
                return f"{self._shapes(i)}: output {n}: {apart}"
        return ""

    def _count(self, rep: Any) -> None:
        planner = rep._session._planner
        if planner is not None:
            self.counts["plans by name"] += planner.forms
            self.counts["times that a plan was bound to other sizes"] += planner.bound
            self.counts["models with a further segment"] += bool(planner.dynamic)

    def _shapes(self, i: int) -> str:
        return f"request {i} {[x.shape for x in self.feeds[i]]}, {self.guard}, {self.options}"


def _cancels(apart: Difference, tolerance: Tolerance) -> bool:
    """Whether a difference is that of sums of numbers of about 1 that are 0: the tolerance of small results is smaller."""
    if apart.max_abs is None or tolerance.dtype is None or apart.inf[0] != apart.inf[1] or apart.nan[0] != apart.nan[1]:
        return False
    return apart.max_abs <= NOISE * float(np.finfo(tolerance.dtype).eps)


def _guarded(x: np.ndarray, memory: SizedMemory) -> np.ndarray:
    made = memory.aligned(max(x.nbytes, 1))[: x.nbytes].view(x.dtype).reshape(x.shape)
    made[...] = x
    return made


def serve() -> Callable[[int], tuple[str, Counter[str]]]:
    """The function of a worker: the fault of the model of a seed, and what was counted."""
    warnings.simplefilter("ignore")

    def examine(seed: int) -> tuple[str, Counter[str]]:
        with np.errstate(all="ignore"):
            case = Case(seed)
            try:
                return case.fault(), case.counts
            except Exception as error:
                return f"{traceback.format_exc(limit=-4)} {error!r:.300}", case.counts

    return examine


# --- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the seed of the first model")
    options = parser.parse_args()
    from tests.sizes_sweep.sweep import serve as make  # not from __main__, which a child cannot import

    os.environ.setdefault("SONNX_MACHINE_CODE", "wait")  # or off: NumPy and oneDNN compute what they can
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    processes.START = 3600.0  # other programs may keep the machine busy
    counts, faults, start = Counter[str](), 0, time.monotonic()
    with Child(make) as child:
        for seed in range(options.first, options.first + options.models):
            try:
                fault, counted = child.ask(seed, SECONDS)
            except ChildFailure as failure:
                fault, counted = f"{failure.how}: {failure}", Counter()
            counts += counted
            if fault:
                faults += 1
                print(f"{seed}: {fault}", flush=True)
            if (seed + 1) % 250 == 0:
                print(f"{seed + 1 - options.first} models, {faults} faults, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{options.models} models, {faults} faults, {time.monotonic() - start:.0f} s")
    for name, count in counts.most_common():
        print(f"{count:8} {name}")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
