"""Rewrites of ONNX models that leave every result as it is: `optimize(model)` runs them to a fixed point and says what each did.

    report = optimize(model)                                  # in place; print(report)
    report = optimize(model, ["remove_identity", "optimize_transpose"])

Names and order of the graph's inputs and outputs stay.  Values are equal bit by bit where numbers only move; sums over axes
that moved, and `fold_batch_normalization`, round differently.  Weights that nothing rewrites are neither read nor copied.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto

from ..errors import InvalidInput, InvalidModel, ResourceExhausted
from .back_to_back import remove_back_to_back
from .batch_norm import fold_batch_normalization
from .cleaning import merge_duplicates, remove_dead, remove_dead_functions
from .constants import fold_constants
from .graph import GraphEditor
from .identity import remove_identity
from .loops import move_out_of_loops
from .model import ModelEditor
from .shapes import simplify_shapes
from .transpose import optimize_transpose


@dataclass(frozen=True)
class Pass:
    """A rewrite by name.  run: changes an ModelEditor and gives the number of its changes."""

    name: str
    summary: str
    run: Callable[[ModelEditor], int]


def _each(rewrite: Callable[[GraphEditor], int]) -> Callable[[ModelEditor], int]:
    """A rewrite of one graph as one of all, inner graphs first."""

    def run(edit: ModelEditor) -> int:
        count = 0
        for net in list(edit.nets()):
            net.reindex()  # graphs within it may have changed
            count += rewrite(net)
        return count

    return run


PASSES: dict[str, Pass] = {
    p.name: p
    for p in (
        Pass("remove_identity", "drop nodes that give what they are given", _each(remove_identity)),
        Pass("simplify_shapes", "make constants of sizes that are known", _each(simplify_shapes)),
        Pass("fold_constants", "compute what hangs on constants only", _each(fold_constants)),
        Pass("move_out_of_loops", "compute once what is the same in every round", _each(move_out_of_loops)),
        Pass("remove_back_to_back", "join two nodes in a row that one can do, or none", _each(remove_back_to_back)),
        Pass("optimize_transpose", "push Transposes down until they vanish", _each(optimize_transpose)),
        Pass(
            "fold_batch_normalization",
            "put what scales and shifts channels into the weights before it",
            _each(fold_batch_normalization),
        ),
        Pass("merge_duplicates", "compute once what is computed twice", _each(merge_duplicates)),
        Pass(
            "remove_dead",
            "drop nodes, initializers and functions that nobody needs",
            lambda edit: _each(remove_dead)(edit) + remove_dead_functions(edit),
        ),
    )
}
"""All passes, in the order in which they run."""


@dataclass(frozen=True)
class Failure:
    """A pass that raised: what it had changed was undone, and it did not run again."""

    name: str
    error: str
    message: str

    def __str__(self) -> str:
        return f"{self.name} failed and was undone: {self.error}: {self.message}"


@dataclass
class PassReport:
    """What one pass did.  before, after: nodes by operator around its first run, and what is left of them by its own doing."""

    name: str
    changes: int = 0
    seconds: float = 0.0
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    changed: int = 0
    """Changes of the last run."""

    @property
    def operators(self) -> dict[str, tuple[int, int]]:
        """(before, after) for each operator whose number changed."""
        names = sorted(self.before.keys() | self.after.keys())
        return {n: (self.before[n], self.after[n]) for n in names if self.before[n] != self.after[n]}

    def __str__(self) -> str:
        changed = ", ".join(f"{n} {b - a:+d} ({a} -> {b})" for n, (a, b) in self.operators.items())
        return f"{self.name}: {self.changes} changes" + (f"; {changed}" if changed else "")

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {"pass": self.name, "changes": self.changes, "seconds": round(self.seconds, 4),
                "operators": {n: {"before": a, "after": b} for n, (a, b) in self.operators.items()}}  # fmt: skip


@dataclass
class Report:
    """What `optimize` did.

    passes: one report for each pass, in order.  rounds: how often all of them ran.  settled: whether the last round changed
    nothing.  before, after: nodes by operator, those of subgraphs and functions included.  notes: what was left alone, and why.
    """

    passes: list[PassReport]
    rounds: int = 0
    settled: bool = False
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def changes(self) -> int:
        return sum(p.changes for p in self.passes)

    def __str__(self) -> str:
        lines = [f"{self.before.total()} -> {self.after.total()} nodes in {self.rounds} rounds"]
        lines += [f"  {p}" for p in self.passes if p.changes]
        lines += [f"  {f}" for f in self.failures] + [f"  {n}" for n in self.notes]
        if not self.settled:
            lines.append("  the last round still changed something")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for ``--json``."""
        return {
            "rounds": self.rounds, "settled": self.settled, "changes": self.changes,
            "nodes": {"before": self.before.total(), "after": self.after.total()},
            "operators": {n: {"before": self.before[n], "after": self.after[n]}
                          for n in sorted(self.before.keys() | self.after.keys())},
            "passes": [p.to_dict() for p in self.passes],
            "failures": [vars(f) for f in self.failures], "notes": list(self.notes),
        }  # fmt: skip


def optimize(
    model: ModelProto,
    passes: Sequence[str] | None = None,
    *,
    rounds: int = 20,
    folder: str | Path | None = None,
    progress: Callable[..., None] | None = None,
) -> Report:
    """Rewrite a model **in place** until no pass finds anything more to do.

    passes: names from `PASSES`, run in the order given; all of them, in their own order, when absent.
    rounds: how often all passes may run.  folder: where external data lie, so that small constants among them can be read.
    progress: called after each pass, with `note=` its name.
    Until all passes are through, `model` is untouched.  Before IR version 4 every initializer was listed as an input and
    counts as constant here; from 4 on one that is listed as an input may be given by the caller, and is no constant.
    Raises InvalidInput for an unknown pass, InvalidModel for a graph with a cycle or a value that is defined nowhere or twice.
    """
    chosen = [_named(name) for name in (PASSES if passes is None else passes)]
    if rounds < 1:
        raise InvalidInput(f"rounds={rounds} lets no pass run", code="SX360", hint="give 1 or more")
    try:
        edit = ModelEditor(model, None if folder is None else Path(folder))
        _check(edit)
        report = Report([PassReport(p.name) for p in chosen], before=_count(edit), notes=edit.notes())
        if edit.open:
            _run(edit, chosen, rounds, report, progress or (lambda note="": None))
            edit.write()
    except RecursionError as error:
        raise ResourceExhausted("the model nests too deeply for the Python stack", code="SX602") from error
    except UnicodeDecodeError as error:
        raise InvalidModel(f"a name in the model is not UTF-8: {error}", code="SX107") from None
    report.after = _count(edit)
    return report


def _named(name: str) -> Pass:
    if name not in PASSES:
        raise InvalidInput(f"there is no pass {name!r}; there are {', '.join(PASSES)}", code="SX360")
    return PASSES[name]


def _run(edit: ModelEditor, chosen: Sequence[Pass], rounds: int, report: Report, progress: Callable[..., None]) -> None:
    failed: set[str] = set()
    while report.rounds < rounds and not report.settled:
        report.rounds += 1
        report.settled = True
        for rewrite, did in zip(chosen, report.passes, strict=True):
            if rewrite.name in failed:
                continue
            failure = _step(edit, rewrite, did)
            if failure is not None:
                failed.add(rewrite.name)
                report.failures.append(failure)
            elif did.changed:
                report.settled = False
            progress(note=rewrite.name)


def _step(edit: ModelEditor, rewrite: Pass, did: PassReport) -> Failure | None:
    """Run one pass once; whatever it raises undoes it, and so does a graph that it leaves broken."""
    restore, before, start = edit.snapshot(), _count(edit), time.perf_counter()
    did.changed = 0
    if not did.before:
        did.before, did.after = before.copy(), before.copy()
    try:
        did.changed = rewrite.run(edit)
        if did.changed:
            edit.forget()
            _check(edit)
    except Exception as error:
        did.changed = 0
        restore()
        return Failure(rewrite.name, type(error).__name__, str(error))
    finally:
        did.seconds += time.perf_counter() - start
    did.changes += did.changed
    if did.changed:
        did.after.update(_count(edit))
        did.after.subtract(before)
    return None


def _check(edit: ModelEditor) -> None:
    for net in edit.all_nets():
        net.check()


def _count(edit: ModelEditor) -> Counter[str]:
    """Nodes by operator, those of other domains with the domain's name."""
    nodes = (n for net in edit.all_nets() for n in net.nodes)
    return Counter(f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in nodes)
