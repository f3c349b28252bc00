"""Runs every implementation of oneDNN that a plan can choose, and whole plans, on buffers of exact size between guard pages.

    python tests/onednn_sweep/sweep.py --count 20000 --seed 1 --report reports     # tox -e onednn-sweep
    python tests/onednn_sweep/sweep.py --all --count 500 --plans 0         # also the implementations that are refused
    python tests/onednn_sweep/sweep.py --replay '{"family": "softmax", ...}'    # a case that a fault has printed
    python tests/onednn_sweep/sweep.py --families convolution,matmul --levels AVX2 --plans 0

A case is a primitive of drawn sizes, layouts, types and post-ops.  Every implementation that oneDNN offers for it runs five
times, on buffers that end or begin at a page without access, with other garbage in the scratchpad, the destination and the gaps.
Each run must return the bits of the first one, which are those of NumPy or near to them, keep its inputs, and write nothing
outside of its results.  A process for each level of instructions runs the cases; if it dies or hangs, the implementation and the
run are found by parts, and another process goes on.  A fault is printed as the smallest case that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.onednn_sweep import cases, pages, plans, report, running  # noqa: E402

from singa_backend.io import processes  # noqa: E402
from singa_backend.io.processes import Child, ChildFailure  # noqa: E402
from singa_backend.kernels import onednn as dnn  # noqa: E402
from singa_backend.kernels.onednn import OneDnnError, constants, loading, primitives  # noqa: E402

LEVELS = (
    "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX512_CORE_AMX",
)  # fmt: skip
"""The levels of instructions at which plans use oneDNN, by its names."""

SECONDS = 120.0
"""Seconds after which a case hangs."""

SHRINKS = 80
"""How many smaller cases are tried for a fault."""

# --- in the process of a level ----------------------------------------------------------------------------------------


def serve() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The function of a worker: it answers a request with what `ran` returns, or `plans.ran`."""
    loading.needed().call("set_primitive_cache_capacity", 0)  # with a cache, `next_impl` skips implementations
    return lambda request: plans.ran(request["case"]) if "plan" in request["case"] else ran(request)


def ran(request: dict[str, Any]) -> dict[str, Any]:
    """Run the implementations of a case.

    Args:
        request: the "case"; "all" to run those that are refused too; "only" these positions; "turns" of these runs; "guard", the
            argument that is guarded, and how; "arguments" to list these instead.

    Returns:
        "impossible" with the reason, or "offered", (name, refusal) for each implementation, and "ran", (position, runs, faults);
        or "arguments".
    """
    case = request["case"]
    try:
        with dnn.using_threads(case["threads"]), _every_type(request["all"]):
            problem = cases.build(case)
            offered = running.offered(problem)
            answers = []
            for index, (name, refusal) in enumerate(offered):
                if (refusal and not request["all"]) or index not in request.get("only", range(len(offered))):
                    continue
                try:
                    primitive = running.created(problem, index)
                except OneDnnError as error:  # integers that it would not multiply exactly
                    offered[index] = (name, str(error).removeprefix("oneDNN: "))
                    continue
                if "arguments" in request:
                    return {"arguments": [*running.Stage(problem, primitive).layouts]}
                turns = request.get("turns", running.TURNS)
                answers.append((index, len(turns), running.judged(problem, primitive, turns, **request.get("guard", {}))))
    except (cases.Impossible, OneDnnError) as error:
        return {"impossible": str(error)}
    return {"offered": offered, "ran": answers}


@contextmanager
def _every_type(is_on: bool) -> Iterator[None]:
    """Create products of int8 values also by code that is not exact for all values."""
    before = primitives._EXACT_INT8
    primitives._EXACT_INT8 = ("",) if is_on else before  # type: ignore[assignment]
    try:
        yield
    finally:
        primitives._EXACT_INT8 = before


# --- the sweep --------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """A fault of an implementation, or of a plan."""

    level: str
    name: str
    sort: str
    detail: str
    case: cases.Case

    def line(self) -> str:
        return f"{self.level} {self.name}: {self.sort}: {self.detail}\n    {json.dumps(self.case)}"


@dataclass
class Tally:
    """What a level has run.

    Attributes:
        cases: the number of cases with an implementation.
        impossible: the reasons why other cases were not run.
        tried: how often each implementation was run, each time with all turns.
        refused: how often each was refused, and why.
        models: the number of models that ran by plans.
        kernels: the steps of plans that oneDNN computes, and in how many models.
        faults: what was found.
    """

    cases: int = 0
    impossible: Counter[str] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    models: int = 0
    kernels: Counter[str] = field(default_factory=Counter)
    faults: list[Found] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return self.tried.total() * len(running.TURNS)


@contextmanager
def environment(level: str) -> Iterator[None]:
    """The variables of a process of this level."""
    own = {"ONEDNN_MAX_CPU_ISA": level, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def levels() -> list[str]:
    """The levels that this machine has."""
    probe = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).dnnl_get_effective_cpu_isa())"
    found = []
    for level in LEVELS:
        with environment(level):
            ran = subprocess.run([sys.executable, "-c", probe, loading.needed().path], capture_output=True, text=True, check=True)
        if constants.ISA.get(int(ran.stdout), "").upper() == level:
            found.append(level)
    return found


def ends() -> list[str]:
    """AVX2, and the highest level of this machine if it is another one."""
    found = levels() if dnn.library() is not None else []
    return [*dict.fromkeys((found[0], found[-1]))] if found else ["AVX2"]


class Sweep:
    """Runs cases at a level in a child process.

    Args:
        level: the level.
        every: run the implementations that are refused too.
    """

    def __init__(self, level: str, every: bool = False) -> None:
        from tests.onednn_sweep.sweep import serve as make  # not from __main__, which a child cannot import

        self.level, self.every, self.tally = level, every, Tally()
        self.child = Child(make)

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.close()

    def ask(self, case: cases.Case, **further: Any) -> dict[str, Any] | ChildFailure:
        """The answer of the child, or how it failed."""
        with environment(self.level):
            try:
                answer: dict[str, Any] = self.child.ask({"case": case, "all": self.every, **further}, SECONDS)
                return answer
            except ChildFailure as failure:
                if not failure.started:
                    raise
                return failure

    def examine(self, case: cases.Case, explain: bool = True) -> list[Found]:
        """Run a case, count it, and return its faults."""
        answer = self.ask(case)
        if "plan" in case:
            found = self._model(case, answer)
        else:
            found = self._primitive(case, self._by_parts(case, explain) if isinstance(answer, ChildFailure) else answer)
        self.tally.faults += found
        return found

    def _primitive(self, case: cases.Case, answer: dict[str, Any]) -> list[Found]:
        if "impossible" in answer:
            self.tally.impossible[answer["impossible"]] += 1
            return []
        self.tally.cases += 1
        names = [f"{case['kind']} {name}" for name, _ in answer["offered"]]
        found = []
        for index, _, faults in answer["ran"]:
            self.tally.tried[names[index]] += 1
            found += [Found(self.level, names[index], *fault, case) for fault in faults]
        self.tally.refused.update((name, why) for name, (_, why) in zip(names, answer["offered"], strict=True) if why)
        return found

    def _model(self, case: cases.Case, answer: dict[str, Any] | ChildFailure) -> list[Found]:
        if isinstance(answer, ChildFailure):
            return [Found(self.level, case["plan"], *_fault(answer, "a plan"), case)]
        if "impossible" in answer:
            self.tally.impossible[answer["impossible"]] += 1
            return []
        self.tally.models += 1
        self.tally.kernels.update(answer["kernels"])
        return [Found(self.level, case["plan"], *fault, case) for fault in answer["faults"]]

    def _by_parts(self, case: cases.Case, explain: bool) -> dict[str, Any]:
        """The answer of a case whose process died or hung: each implementation apart."""
        answer = self.ask(case, only=[])
        if isinstance(answer, ChildFailure):
            return {"offered": [("", "")], "ran": [(0, 0, [_fault(answer, "while it was created")])]}
        for index in range(len(answer.get("offered", []))):
            part = self.ask(case, only=[index])
            if isinstance(part, ChildFailure):
                answer["ran"].append((index, len(running.TURNS), [_fault(part, self._explained(case, index) if explain else "")]))
            else:
                answer["ran"] += part["ran"]
                answer["offered"][index] = part["offered"][index]
        return answer

    def _explained(self, case: cases.Case, index: int) -> str:
        """The run that died, and which buffers it left, by a write or a read."""
        for turn in running.TURNS:
            if isinstance(self.ask(case, only=[index], turns=[turn]), ChildFailure):
                break
        else:
            return "only after other runs"
        texts = []
        listed = self.ask(case, only=[index], arguments=True)
        for arg in [] if isinstance(listed, ChildFailure) else listed["arguments"]:
            dies = [
                isinstance(self.ask(case, only=[index], turns=[turn], guard={"only": arg, "protection": p}), ChildFailure)
                for p in (pages.NO_ACCESS, pages.READ_ONLY)
            ]
            texts += [f"{'write' if dies[1] else 'read'} outside of argument {arg}"] if dies[0] else []
        return f"{turn[0]}, {turn[1]}: {'; '.join(texts) or 'not of one buffer alone'}"

    def shrunk(self, fault: Found) -> Found:
        """The fault in a smaller case."""
        left, small, tally = SHRINKS, fault, self.tally
        self.tally = Tally()
        moved = "plan" not in fault.case
        while moved and left > 0:
            moved = False
            for case in smaller(small.case):
                left -= 1
                alike = [f for f in self.examine(case, explain=False) if (f.name, f.sort) == (fault.name, fault.sort)]
                if alike:
                    small, moved = alike[0], True
                if alike or left <= 0:
                    break
        self.tally = tally
        return small


def _fault(failure: ChildFailure, where: str) -> tuple[str, str]:
    return ("hang" if failure.how == "timeout" else "crash", f"{failure} ({where})" if where else str(failure))


FIXED = ("family", "kind", "seed", "axis", "keep", "axes", "order", "layouts", "dtypes", "threads")
"""What a smaller case keeps."""

ZERO = (
    "g",
    "gap",
    "gaps",
    "bias",
    "flags",
    "begin",
    "end",
    "relu",
    "shared",
    "zero",
    "zeros",
    "state",
    "last",
    "peephole",
    "scales",
)
"""What may be 0 in it."""


def smaller(case: cases.Case) -> Iterator[cases.Case]:
    """Cases with one post-op less, or one smaller number."""
    for i in range(len(case.get("post", []))):
        yield {**case, "post": [*case["post"][:i], *case["post"][i + 1 :]]}
    for key, value in case.items():
        if key in FIXED:
            continue
        least = 0 if key in ZERO else 1
        if isinstance(value, int):
            yield from ({**case, key: n} for n in _lower(value, least))
        elif isinstance(value, list) and all(isinstance(v, int) for v in value):
            for i, v in enumerate(value):
                yield from ({**case, key: [*value[:i], n, *value[i + 1 :]]} for n in _lower(v, least))


def _lower(value: int, least: int) -> Sequence[int]:
    return sorted({n for n in (least, value // 2, value - 1) if least <= n < value})


# --- the command ------------------------------------------------------------------------------------------------------


def swept(level: str, every: bool, drawn: Iterator[cases.Case]) -> Tally:
    """Run cases at a level; print each sort of fault of an implementation twice at most, and how far the sweep is."""
    with Sweep(level, every) as sweep:
        start, shown = time.monotonic(), Counter[tuple[str, str]]()
        for count, case in enumerate(drawn, 1):
            for fault in sweep.examine(case):
                shown[fault.name, fault.sort] += 1
                if shown[fault.name, fault.sort] <= 2:
                    print(sweep.shrunk(fault).line(), flush=True)
            if count % 1000 == 0:
                tally = sweep.tally
                text = f"{count} cases, {tally.runs} runs, {tally.models} models, {len(tally.faults)} faults"
                print(f"{level}: {text}, {time.monotonic() - start:.0f} s", flush=True)
        return sweep.tally


def counts(tally: Tally) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tally as plain data: of the primitives, and of plans."""
    faults = [vars(f) for f in tally.faults]
    turns = len(running.TURNS)
    return {
        "cases": tally.cases, "runs": tally.runs,
        "implementations": [{"name": n, "cases": c, "runs": c * turns} for n, c in sorted(tally.tried.items())],
        "refused": [{"name": n, "reason": why, "cases": c} for (n, why), c in sorted(tally.refused.items())],
        "faults": [f for f in faults if "plan" not in f["case"]],
    }, {
        "models": tally.models, "runs": tally.models * (1 + len(pages.FILLS)), "kernels": sorted(tally.kernels.items()),
        "faults": [f for f in faults if "plan" in f["case"]],
    }  # fmt: skip


def processor() -> str:
    """The name of the processor."""
    named = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return named[1].strip() if named else "a processor without a name"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20_000, help="the number of cases of each level")
    parser.add_argument("--plans", type=int, default=400, help="the number of drawn models whose plans run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--levels", default="", help="such as AVX2,AVX512_CORE; those of the machine by default")
    parser.add_argument("--families", default="", help="such as convolution,matmul; all by default")
    parser.add_argument("--all", action="store_true", help="also run the implementations that are refused")
    parser.add_argument("--replay", default="", help="a case, or the name of a file with one in each line")
    parser.add_argument("--report", type=Path, help="write onednn-sweep.json and onednn-sweep.md to this folder")
    options = parser.parse_args()
    processes.START = 3600.0  # other programs may keep the machine busy

    def drawn() -> Iterator[cases.Case]:
        if options.replay:
            lines = [options.replay] if options.replay.startswith("{") else Path(options.replay).read_text().splitlines()
            yield from map(json.loads, lines)
            return
        families = [name for name in options.families.split(",") if name]
        yield from (cases.draw(options.seed, index, families) for index in range(options.count))
        yield from (plans.drawn(options.seed, index) for index in range(options.plans))

    here = levels()
    chosen = options.levels.split(",") if options.levels else here
    tallies = {level: swept(level, options.all, drawn()) for level in chosen}
    for level, tally in tallies.items():
        print(f"{level}: {tally.cases} cases, {tally.runs} runs, {tally.models} models, {len(tally.faults)} faults")
    if options.report is not None:
        about = {
            "processor": processor(), "onednn": ".".join(map(str, loading.needed().version)), "seed": options.seed,
            "turns": len(running.TURNS), "flush": sum(place in ("end", "start") for place, _ in running.TURNS),
            "absent": [level for level in LEVELS if level not in here],
        }  # fmt: skip
        both = {level: counts(tally) for level, tally in tallies.items()}
        made = report.document(about, {n: one for n, (one, _) in both.items()}, {n: two for n, (_, two) in both.items()})
        print(*report.write(made, options.report), sep="\n")
    return int(any(tally.faults for tally in tallies.values()) and not options.all)


if __name__ == "__main__":
    sys.exit(main())
