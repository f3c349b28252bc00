"""Rewrites of ONNX models that keep every result: `optimize(model)` runs them to a fixed point and reports what each changed.

    report = optimize(model)                                  # in place; print(report)
    report = optimize(model, ["remove_identity", "optimize_transpose"])

Names and order of the graph's inputs and outputs do not change.  Values are equal bit by bit if numbers only move; sums over
axes that moved, and `fold_batch_normalization`, round differently.  Weights that no pass rewrites are neither read nor copied.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from onnx import ModelProto

from ..errors import InvalidInput, InvalidModel, ResourceExhausted
from ..ir.journal import Journal
from ..ir.structure import check_structure
from ..rewriting.activations import activations, hard_sigmoids, leaky_relus, prelus, softplus
from ..rewriting.affine import channels
from ..rewriting.attention import attentions
from ..rewriting.constants import constants
from ..rewriting.identity import identity
from ..rewriting.normalization import group_norms, layer_norms
from ..rewriting.rotary import rotary_embeddings
from ..rewriting.run import run
from .back_to_back import remove_back_to_back
from .cleaning import merge_duplicates, remove_dead, remove_dead_functions
from .loops import move_out_of_loops
from .model import ModelEditor
from .rewriter import ModelRewriter
from .shapes import simplify_shapes
from .transpose import optimize_transpose


@dataclass(frozen=True)
class Pass:
    """A named rewrite.

    Attributes:
        name: the key in `PASSES` or `FUSIONS`.
        summary: what the pass does, in one line.
        run: changes a `ModelEditor` and returns the number of its changes.
    """

    name: str
    summary: str
    run: Callable[[ModelEditor], int]


def _each(rewrite: Callable[[ModelRewriter], int]) -> Callable[[ModelEditor], int]:
    """Apply a rewrite of one graph to all graphs, inner ones first."""

    def apply(editor: ModelEditor) -> int:
        count = 0
        for graph in list(editor.graphs()):
            count += rewrite(ModelRewriter(editor, graph))
            if graph.owner is not None:
                graph.release_captured()
        return count

    return apply


PASSES: dict[str, Pass] = {
    p.name: p
    for p in (
        Pass("remove_identity", "remove nodes whose output equals their input", _each(identity)),
        Pass("simplify_shapes", "replace known sizes by constants", _each(simplify_shapes)),
        Pass("fold_constants", "evaluate nodes whose inputs are all constants", _each(constants)),
        Pass("move_out_of_loops", "move nodes that are the same in every iteration out of loops", _each(move_out_of_loops)),
        Pass("remove_back_to_back", "merge two successive nodes, or remove both", _each(remove_back_to_back)),
        Pass("optimize_transpose", "move Transposes down until they cancel", _each(optimize_transpose)),
        Pass(
            "fold_batch_normalization",
            "fold the scale and shift of channels into the preceding weights",
            _each(lambda rewriter: channels(rewriter, ("Conv", "ConvTranspose", "Gemm"))),
        ),
        Pass("merge_duplicates", "merge equal nodes and equal constants", _each(merge_duplicates)),
        Pass(
            "remove_dead",
            "remove unused nodes, initializers and functions",
            lambda editor: _each(remove_dead)(editor) + remove_dead_functions(editor),
        ),
    )
}
"""All passes by name, in the order in which they run."""

FUSIONS: dict[str, Pass] = {
    p.name: p
    for p in (
        Pass("layer_norms", "fuse LayerNormalization, RMSNormalization and InstanceNormalization", _each(layer_norms)),
        Pass("group_norms", "fuse GroupNormalization", _each(group_norms)),
        Pass("activations", "fuse Gelu, Swish, HardSwish and Mish", _each(activations)),
        Pass("hard_sigmoids", "fuse HardSigmoid", _each(hard_sigmoids)),
        Pass("leaky_relus", "fuse LeakyRelu", _each(leaky_relus)),
        Pass("prelus", "fuse PRelu", _each(prelus)),
        Pass("softplus", "fuse Softplus", _each(softplus)),
        Pass("rotary_embeddings", "fuse RotaryEmbedding", _each(rotary_embeddings)),
        Pass("attentions", "fuse Attention", _each(attentions)),
    )
}
"""The passes that `fuse` adds: they replace primitive forms by operators that the model's opset has, and round."""


@dataclass(frozen=True)
class PassFailure:
    """A pass that raised: its changes were undone, and it did not run again.

    Attributes:
        name: of the pass.
        error: the class of the exception.
        message: the text of the exception.
    """

    name: str
    error: str
    message: str

    def __str__(self) -> str:
        """Return the failure in one line."""
        return f"{self.name} failed and was undone: {self.error}: {self.message}"


@dataclass
class PassReport:
    """The changes of one pass.

    Attributes:
        name: of the pass.
        changes: the number of changes in all rounds.
        seconds: the time that all its runs took.
        before: the number of nodes by operator before its first run.
        after: `before` plus the changes that this pass made.
        changed: the number of changes in its last run.
    """

    name: str
    changes: int = 0
    seconds: float = 0.0
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    changed: int = 0

    @property
    def operators(self) -> dict[str, tuple[int, int]]:
        """The numbers of nodes before and after, for each operator whose number changed."""
        names = sorted(self.before.keys() | self.after.keys())
        return {n: (self.before[n], self.after[n]) for n in names if self.before[n] != self.after[n]}

    def __str__(self) -> str:
        """Return the changes in one line."""
        changed = ", ".join(f"{n} {b - a:+d} ({a} -> {b})" for n, (a, b) in self.operators.items())
        return f"{self.name}: {self.changes} changes" + (f"; {changed}" if changed else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data.

        Returns:
            A dict of pass, changes, seconds and operators.
        """
        return {"pass": self.name, "changes": self.changes, "seconds": round(self.seconds, 4),
                "operators": {n: {"before": a, "after": b} for n, (a, b) in self.operators.items()}}  # fmt: skip


@dataclass
class Report:
    """The result of `optimize`.

    Attributes:
        passes: one report for each pass, in order.
        rounds: how many times all passes ran.
        settled: whether the last round changed nothing.
        before: the number of nodes by operator before, subgraphs and functions included.
        after: the same, after.
        failures: the passes that raised.
        notes: what was not rewritten, and why.
    """

    passes: list[PassReport]
    rounds: int = 0
    settled: bool = False
    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    failures: list[PassFailure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def changes(self) -> int:
        """The number of changes of all passes."""
        return sum(p.changes for p in self.passes)

    def __str__(self) -> str:
        """Return the report as text, a line for each pass that changed something."""
        lines = [f"{self.before.total()} -> {self.after.total()} nodes in {self.rounds} rounds"]
        lines += [f"  {p}" for p in self.passes if p.changes]
        lines += [f"  {f}" for f in self.failures] + [f"  {n}" for n in self.notes]
        if not self.settled:
            lines.append("  not settled: the last round still made changes")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for ``--json``.

        Returns:
            A dict of rounds, settled, changes, nodes, operators, passes, failures and notes.
        """
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
    fuse: bool = False,
    parameters: Collection[str] | None = None,
    rounds: int = 20,
    folder: str | Path | None = None,
    progress: Callable[..., None] | None = None,
) -> Report:
    """Rewrite a model **in place** until no pass changes anything.

    `model` does not change before all passes have finished.  Before IR version 4 every initializer had to be listed as an
    input, and counts as a constant here.  In IR version 4 or later the caller may override an initializer that is listed as
    an input, so it is not a constant.  A pass that raises is undone and reported in `Report.failures`.

    Args:
        model: the model to rewrite.
        passes: names from `PASSES` and `FUSIONS`, in the order in which to run them; by default all of `PASSES`, in their order.
        fuse: whether all of `FUSIONS` run after them.
        parameters: the float constants that train, whose numbers no fusion takes; by default all float initializers.
        rounds: the maximum number of times that all passes run, at least 1.
        folder: the folder of external data, so that small constants there can be read.
        progress: called after each pass, with `note=` its name.

    Returns:
        What each pass changed, and what was not rewritten.

    Raises:
        InvalidInput: a pass is unknown, or `rounds` is less than 1 (SX360).
        InvalidModel: a graph has a cycle (SX101), a value is not defined (SX101) or defined twice (SX102), or a name is not
            UTF-8 (SX107).
        ResourceExhausted: the model is nested too deeply (SX602).

    Example:
        >>> report = optimize(model, ["remove_identity", "remove_dead"])
        >>> print(report)
    """
    chosen = [_named(name) for name in (*(PASSES if passes is None else passes), *(FUSIONS if fuse else ()))]
    if isinstance(rounds, bool) or not isinstance(rounds, int) or rounds < 1:
        raise InvalidInput(f"rounds must be at least 1, got {rounds}", code="SX360")
    try:
        editor = ModelEditor(model, None if folder is None else Path(folder), parameters)
        _check(editor)
        report = Report([PassReport(p.name) for p in chosen], before=_count(editor))
        if editor.open:
            _run(editor, chosen, rounds, report, progress or (lambda note="": None))
            editor.write()
        report.notes = editor.notes()
    except RecursionError as error:
        raise ResourceExhausted("the model is nested too deeply for the Python stack", code="SX602") from error
    except UnicodeDecodeError as error:
        raise InvalidModel(f"a name in the model is not UTF-8: {error}", code="SX107") from None
    report.after = _count(editor)
    return report


def _named(name: str) -> Pass:
    found = PASSES.get(name) or FUSIONS.get(name)
    if found is None:
        raise InvalidInput(f"a pass must be one of {', '.join((*PASSES, *FUSIONS))}, got {name!r}", code="SX360")
    return found


def _run(editor: ModelEditor, chosen: Sequence[Pass], rounds: int, report: Report, progress: Callable[..., None]) -> None:
    failed: set[str] = set()

    def once(rewrite: Pass, did: PassReport) -> int:
        if rewrite.name in failed:
            return 0
        failure = _step(editor, rewrite, did, editor.record())
        if failure is not None:
            failed.add(rewrite.name)
            report.failures.append(failure)
        progress(note=rewrite.name)
        return did.changed

    done = run([partial(once, *both) for both in zip(chosen, report.passes, strict=True)], rounds)
    report.rounds, report.settled = done.rounds, done.settled


def _step(editor: ModelEditor, rewrite: Pass, did: PassReport, journal: Journal) -> PassFailure | None:
    """Run one pass once; if it raises, or leaves an invalid graph, it is undone."""
    before, start = _count(editor), time.perf_counter()
    did.changed = 0
    if not did.before:
        did.before, did.after = before.copy(), before.copy()
    try:
        did.changed = rewrite.run(editor)
        if did.changed:
            editor.forget()
            _check(editor)
    except Exception as error:
        did.changed = 0
        journal.undo()
        editor.forget()
        return PassFailure(rewrite.name, type(error).__name__, str(error))
    finally:
        did.seconds += time.perf_counter() - start
    did.changes += did.changed
    if did.changed:
        did.after.update(_count(editor))
        did.after.subtract(before)
    return None


def _check(editor: ModelEditor) -> None:
    for graph in editor.all_graphs():
        check_structure(graph)


def _count(editor: ModelEditor) -> Counter[str]:
    """Count nodes by operator; the domain is part of the name unless it is ONNX's own."""
    nodes = (n for graph in editor.all_graphs() for n in graph.nodes)
    return Counter(f"{n.domain}.{n.op_type}" if n.domain else n.op_type for n in nodes)
