"""`sonnx compare`: compare two engines, devices or models value by value, and find the first node that differs."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.io.places import check
from singa_backend.rendering import printable

from ._common import (
    MEMORY,
    NO,
    OUTPUT,
    SECONDS,
    TOLERANCE,
    collected,
    device_option,
    echo,
    exit_codes,
    json_option,
    pairs_of,
    show,
    write_json,
    wrote,
)
from ._inputs import InputOptions, model_options
from ._progress import progress
from ._tables import NAME, NUMBER, WORDS, Columns, TextTable

if TYPE_CHECKING:
    from singa_backend import debug

_VALUES = Columns({"value": NAME, "node": NAME, "type": WORDS, "max abs": NUMBER, "max rel": NUMBER, "ULP": NUMBER, "NaN": NUMBER,
                   "Inf": NUMBER, "of tolerance": NUMBER, "": WORDS},
                  optional=("Inf", "NaN", "ULP", "type", "max rel", "max abs"))  # fmt: skip

_LAYERS = Columns({"value": NAME, "node": NAME, "type": WORDS, "own error": NUMBER, "accumulated": NUMBER, "max abs": NUMBER,
                   "of tolerance": NUMBER, "": WORDS}, optional=("type", "max abs", "of tolerance"))  # fmt: skip

_OPTIONS = (
    click.option("--against", metavar="ENGINE|MODEL|FILE", help="The trusted side: onnxruntime (the default), reference, sonnx "
                 "(the CPU; the default with --device), definition (for the plans of the CPU), another .onnx file, MODULE:CLASS "
                 "(a class with the functions of onnx.backend.base.Backend, whose code runs), torch:MODULE:FUNCTION (returns a "
                 "torch.nn.Module; its code runs), or an .npz file of values by name."),
    click.option("--against-command", "program", metavar="CMD", help="The trusted side is a program: "
                 "CMD contains {model}, {inputs} and {outputs} (.npz files); it runs without a shell."),
    click.option("--map", "pairs", multiple=True, metavar="A=B", help="Value A of MODEL has the name B in the other model."),
    click.option("--align/--no-align", default=True, show_default=True,
                 help="Pair the values of two models by what they compute where names do not."),
    click.option("--rtol", type=TOLERANCE,
                 help="Relative tolerance, instead of that of the dtype and the operator (`sonnx tolerances`)."),
    click.option("--atol", type=TOLERANCE, help="Absolute tolerance, instead of rtol times the value's usual magnitude."),
    click.option("--local", is_flag=True, help="Feed each node the trusted side's inputs, so that errors do not accumulate; of "
                 "two models, rank the layers by their own error."),
    click.option("--budget", default=256, show_default=True, type=MEMORY, metavar="MIB",
                 help="Memory for the results of one chunk."),
    click.option("--timeout", default=60.0, show_default=True, type=SECONDS,
                 help="Seconds that another engine may take for one chunk."),
)  # fmt: skip


@dataclass(frozen=True)
class Sides:
    """The options for the two sides and the tolerances, by the names of their parameters."""

    against: str | None
    program: str | None
    pairs: tuple[str, ...]
    align: bool
    rtol: float | None
    atol: float | None
    local: bool
    budget: int
    timeout: float

    def settings(self) -> dict[str, Any]:
        """Return the keywords of `debug.compare` and `debug.bisect`; raises click.BadParameter."""
        return {"names": pairs_of(self.pairs, "--map", "A=B"), "rtol": self.rtol, "atol": self.atol, "local": self.local,
                "align": self.align, "budget": self.budget << 20, "timeout": self.timeout}  # fmt: skip


def side_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for the two sides and the tolerances; the command receives them as `sides`, a `Sides`."""
    return collected("sides", Sides, _OPTIONS)(command)


def trusted(against: str | None, program: str | None, device: str) -> str | debug.EngineCommand:
    """Return the side to compare with; raises click.BadParameter unless it is an engine or a file."""
    from singa_backend import debug
    from singa_backend.debug.setting import AGAINST, is_engine
    from singa_backend.debug.torch_module import is_torch

    if program is not None:
        if against is not None:
            raise click.UsageError("use only one of --against and --against-command")
        return debug.EngineCommand(program)
    if against is None:
        return "onnxruntime" if device.upper() == "CPU" else "sonnx"
    if not is_engine(against) and not is_torch(against) and not os.path.isfile(against):
        names = ", ".join(AGAINST)
        raise click.BadParameter(
            f"must be a file, MODULE:CLASS, torch:MODULE:FUNCTION or one of {names}, got {against!r}", param_hint="--against"
        )
    path = Path(against)
    if path.suffix == ".py" and os.path.isfile(path):
        message = f"must be a model, an .npz file or MODULE:CLASS, got {against!r}; its class is {path.stem}:CLASS"
        raise click.BadParameter(message, param_hint="--against")
    return against


@click.command("compare")
@model_options
@side_options
@click.option("--optimised", is_flag=True, help="Run onnxruntime with its optimizer; only graph outputs are compared.")
@click.option(
    "--worst",
    default=10,
    show_default=True,
    type=click.IntRange(0),
    metavar="N",
    help="Show the N values with the largest differences.",
)
@click.option("--all", "show_all", is_flag=True, help="Show every value, in node order.")
@click.option("--html", "page", type=OUTPUT, help="Write a picture of the graph with the differences.")
@device_option
@json_option
@exit_codes
def command(
    model: Path,
    inputs: InputOptions,
    sides: Sides,
    optimised: bool,
    worst: int,
    show_all: bool,
    page: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Compare MODEL, node by node, with another engine, device or model; the exit code is 1 if they differ.

    Without inputs, random ones with seed 0 are used.  Memory is bounded by the live values plus one chunk of results.
    """
    from singa_backend import debug
    from singa_backend.debug.setting import is_engine
    from singa_backend.inspection import inspect
    from singa_backend.io.files import write_text

    other = trusted(sides.against, sides.program, device)
    if page:
        check(page, parents=True, keeps=(model, sides.against, inputs.archive))
    source = debug.ComparedModel.of(model)
    feeds = inputs.gather_of(source, other)
    with progress(None if optimised else len(source.graph), "comparing", unit="nodes", quiet=as_json) as step:
        found = debug.compare(source, feeds, against=other, device=device, optimised=optimised, progress=step, **sides.settings())
    if page:
        write_text(page, inspect(model).html(comparison=found.to_dict()))
    if as_json:
        write_json(found.to_dict())
    else:
        layers = sides.local and not is_engine(other)
        rows = found.rows if show_all else found.worst_layers(worst) if layers else found.worst(worst)
        _show(found, rows, source, sides.local, layers)
        wrote(page)
    if not found.agrees:
        sys.exit(NO)


def _show(found: debug.Comparison, rows: list[debug.Row], source: debug.ComparedModel, local: bool, layers: bool) -> None:
    from singa_backend.comparison.tolerances import narrowest
    from singa_backend.dtypes import from_type_string, onnx_name

    if rows:
        show(_layers(found, rows) if layers else _table(found, rows))
    _show_not_compared(found)
    first = next((r.value for r in found.rows if not r.agrees), "")
    for line in tolerances((r.difference for r in found.rows if r.judged), 1 if local else _depth(source, first)):
        echo(line)
    wrong = sum(not r.agrees and not r.adds_up for r in found.rows)
    count = len(found.rows)
    echo(f"{count} value{'s' * (count != 1)} compared, {wrong} differ")
    for (here, there), count in Counter(r.difference.dtypes for r in found.mixed).items():
        kinds = [from_type_string(f"tensor({name})") for name in (here, there)]
        narrow = onnx_name(narrowest(d for d in kinds if d is not None))
        verb = "values are" if count > 1 else "value is"
        echo(f"{count} {verb} {here} here and {there} there: compared with the tolerance of {narrow}")
    if found.both_nan:
        echo(f"NaN on both sides: {_names([r.value for r in found.both_nan])}", style="yellow")
    if found.nonfinite:
        echo(f"first NaN or infinity of {found.mine}: {found.nonfinite}", style="yellow")
    if found.first:
        _show_first(found, found.first)
    if found.refusal:
        echo(f"the other model cannot run: {found.refusal}", style="red")
    if layers and rows and rows[0].difference.rms:
        worst = rows[0] if rows is not found.rows else found.worst_layers(1)[0]
        share = f"{worst.difference.rms:.3g} of the value (root mean square)"
        echo(f"largest error of its own: {printable(worst.value)!r} of {worst.operator} {printable(worst.node)!r}: {share}")
    _show_verdict(found)


def _show_verdict(found: debug.Comparison) -> None:
    """Print the last line: whether both sides agree."""
    sides, adding = f"{found.mine} and {found.theirs}", sum(r.adds_up for r in found.rows)
    if adding and not found.first:
        verb = "value is" if adding == 1 else "values are"
        echo(f"{adding} {verb} beyond the tolerance, but no node is wrong: rounding errors add up", style="yellow")
    if found.agrees:
        echo(f"{sides} agree", style="green")
    elif found.is_empty and not any(not r.agrees for r in found.rows):
        echo(f"nothing could be compared{': all values are empty' if found.rows else ''}", style="red")
    elif found.first or any(not r.harmless for r in found.rows):
        where = f": {found.accumulated}" if found.accumulated and not found.first else ""
        echo(f"{sides} differ{where}", style="red")
    else:
        count = len(found.failed)
        echo(f"it is not shown that {sides} agree: {count} node{'s were' if count != 1 else ' was'} not compared", style="red")


def _show_not_compared(found: debug.Comparison) -> None:
    """Print the nodes that failed, and those whose values the other model does not have."""
    failed = found.failed
    for one in failed[:10]:
        echo(f"not compared: {one.operator} {one.node!r}: {one.failure}", style="yellow")
    if len(failed) > 10:
        echo(f"... and {len(failed) - 10} more nodes (--json lists all)", style="yellow")
    absent = len(found.not_compared) - len(failed)
    if found.alignment:
        _show_alignment(found.alignment)
    elif absent:
        alone = [f"{n.operator} {printable(n.node)!r}" for n in found.not_compared if n.failure.how == "absent"]
        rest = f" and {absent - 5} more" if absent > 5 else ""
        verb = "nodes make" if absent > 1 else "node makes"
        echo(f"not compared: {absent} {verb} values whose names the other model does not have: {', '.join(alone[:5])}{rest}")
        echo("  --map A=B pairs values; `sonnx diff` pairs nodes of other names")


def _show_alignment(alignment: debug.Alignment) -> None:
    """Print how much was matched, and the largest parts that were not."""
    echo(f"{alignment}")
    largest = sorted(alignment.gaps, key=lambda g: -len(g.nodes))
    for gap in largest[:5]:
        echo(f"  {gap}", style="yellow")
    if len(largest) > 5:
        rest = largest[5:]
        echo(f"  ... and {sum(len(g.nodes) for g in rest)} nodes in {len(rest)} more places (--json lists all)", style="yellow")


def _show_first(found: debug.Comparison, first: debug.Divergence) -> None:
    """Print the first node that diverges, and the others that diverge by themselves."""
    echo(first.headline, style="red")
    for note in first.notes:
        echo(f"  {note}")
    for agreed, what in ((True, "also diverge although their inputs agree"), (None, "also differ, with inputs not compared")):
        others = [d for d in found.origins if d.index != first.index and d.inputs_agreed is agreed]
        if others:
            echo(f"{what}: {', '.join(f'{d.operator} {d.node!r}' for d in others[:8])}")


def tolerances(differences: Iterable[debug.Difference], nodes: int) -> list[str]:
    """Return a line for each tolerance that applied; the general reason only if a value differs, with the number of nodes.

    nodes: how many nodes add to the error of the first value that differs; 1 for a node alone.
    """
    from singa_backend.comparison.tolerances import ADDS_UP

    found: dict[tuple[str, float, str], list[debug.Difference]] = {}
    for d in differences:
        if d.tolerance is not None:
            found.setdefault((d.dtypes[1], d.tolerance.rtol, d.tolerance.reason), []).append(d)
    lines = []
    for (dtype, rtol, reason), members in found.items():
        atols = [d.tolerance.atol or 0.0 for d in members if d.tolerance is not None]
        if not rtol and not any(atols):
            lines.append(f"tolerance of {dtype}: none ({reason})")
            continue
        if reason.startswith(ADDS_UP):
            reason = reason.removeprefix(ADDS_UP).removeprefix(": ") + (
                f": the errors of {nodes} nodes add up" if nodes > 1 else ""
            )
            reason = "" if all(d.agrees for d in members) else reason
        low, high = (f"{v:.3g}" for v in (min(atols), max(atols)))
        why = f" ({reason})" if reason else ""
        lines.append(f"tolerance of {dtype}: rtol {rtol:g}, atol {low if low == high else f'{low} to {high}'}{why}")
    return lines


def _depth(source: debug.ComparedModel, value: str) -> int:
    """Return the number of nodes that a value depends on."""
    found, waiting = set[object](), [source.values[value]] if value in source.values else []
    while waiting:
        node = waiting.pop().producer
        if node is not None and node not in found:
            found.add(node)
            waiting += node.reads
    return len(found)


def _names(names: Sequence[str]) -> str:
    rest = len(names) - 8
    return ", ".join(f"'{printable(n)}'" for n in names[:8]) + (f" and {rest} more" if rest > 0 else "")


def _table(found: debug.Comparison, rows: list[debug.Row]) -> TextTable:
    table = _VALUES.table(f"{found.mine} | {found.theirs}")
    for row in rows:
        d = row.difference
        shapes = [t if s is None else f"{t}{list(s)}" for t, s in zip(d.dtypes, d.shapes, strict=True)]
        kind = shapes[0] if shapes[0] == shapes[1] else f"{shapes[0]} | {shapes[1]}"
        style = "" if row.agrees else "yellow" if row.adds_up else "red"
        mark = "random" if not row.judged else "ok" if d.agrees else "adds up" if row.adds_up else d.verdict
        table.add(
            row.value,
            f"{row.operator} {row.node}",
            kind,
            *(d.max_abs, d.max_rel, d.ulps),
            _both(d.nan),
            _both(d.inf),
            d.excess,
            mark,
            style=style,
        )
    return table


def _layers(found: debug.Comparison, rows: list[debug.Row]) -> TextTable:
    """The errors of layers with the trusted side's inputs, and with the inputs that they have, in relation to the value."""
    table = _LAYERS.table(f"{found.mine} | {found.theirs}")
    for row in rows:
        d = row.difference
        kind = " | ".join(dict.fromkeys(t if s is None else f"{t}{list(s)}" for t, s in zip(d.dtypes, d.shapes, strict=True)))
        mark = "random" if not row.judged else "ok" if d.agrees else d.verdict
        whole = row.carried.rms if row.carried else None
        table.add(row.value, f"{row.operator} {row.node}", kind, *(d.rms, whole, d.max_abs, d.excess), mark,
                  style="" if row.agrees else "red")  # fmt: skip
    return table


def _both(counts: tuple[int, int]) -> str:
    return str(counts[0]) if counts[0] == counts[1] else f"{counts[0]} | {counts[1]}"
