"""`sonnx guard`: write the behaviour of a model to a small file, and check runtimes against it."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from singa_backend.io.places import check as check_place

from . import _operators
from ._common import (
    NO,
    OUTPUT,
    OUTPUT_FOLDER,
    SECONDS,
    check_places,
    collected,
    echo,
    exit_codes,
    json_option,
    show,
    write_json,
    wrote,
)
from ._feeds import sizes_of
from ._inputs import InputOptions, input_options
from ._progress import progress
from ._tables import NAME, NUMBER, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.debug import guards

_DIFFERING = Columns({"value": NAME, "node": NAME, "case": WORDS, "max abs": NUMBER, "of tolerance": NUMBER, "": WORDS})

_SHOWN = 10

_WRITE = ("target", "inputs", "engine", "most")
_CHECK = ("against", "program", "model", "to", "junit", "allow_weak", "timeout")

_OPTIONS = (
    click.option("--output", "-o", "target", type=OUTPUT, help="write: the guard; inputs: an .npz file."),
    click.option("--by", "engine", default="sonnx", show_default=True, metavar="ENGINE",
                 help="write: what computes the values, an engine of `sonnx compare`."),
    click.option("--most", default=512, show_default=True, type=click.IntRange(4, 16 << 10), metavar="KIB",
                 help="write: the maximum size of the guard."),
    click.option("--against", metavar="ENGINE|FILE", help="check: onnxruntime (the default), sonnx, definition, reference, "
                 "MODULE:CLASS (a class with the functions of onnx.backend.base.Backend, whose code runs), or an .npz file of "
                 "values by name."),
    click.option("--against-command", "program", metavar="CMD",
                 help="check: a program; CMD contains {model}, {inputs} and {outputs} (.npz files)."),
    click.option("--model", type=click.Path(dir_okay=False, path_type=Path),
                 help="check: the model to run, perhaps optimized or converted (default: the guard's, in its folder)."),
    click.option("--case", metavar="CASE", help="check, inputs: only these inputs of the guard."),
    click.option("--to", type=OUTPUT_FOLDER, help="check: the folder of the first wrong node as a model."),
    click.option("--junit", type=OUTPUT, help="check: write JUnit XML to this file."),
    click.option("--allow-weak", is_flag=True, help="check: exit with 0 if nothing differs, but fewer than half of the values "
                 "were compared."),
    click.option("--timeout", default=60.0, show_default=True, type=SECONDS, help="check: seconds for a run of the model."),
)  # fmt: skip


@dataclass(frozen=True)
class GuardOptions:
    """The options, by the names of their parameters."""

    target: Path | None
    engine: str
    most: int
    against: str | None
    program: str | None
    model: Path | None
    case: str | None
    to: Path | None
    junit: Path | None
    allow_weak: bool
    timeout: float


@click.command("guard")
@click.argument("action", type=click.Choice(["write", "check", "inputs"]))
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@input_options
@lambda command: collected("options", GuardOptions, _OPTIONS)(command)
@json_option
@exit_codes
def command(action: str, file: Path, inputs: InputOptions, options: GuardOptions, as_json: bool) -> None:
    """Keep the behaviour of a model in a small file, and check what a runtime computes with it.

    \b
    write MODEL -o GUARD    draw inputs, compute the values, and store some of each, without the weights
    check GUARD             run the model now, and compare; name the first wrong node, and write it as a model
    inputs GUARD -o NPZ     write the inputs, for a runtime elsewhere; check --against reads its values

    The exit code of check is 1 if a value differs, or if fewer than half of the values were compared ("weak").
    """  # noqa: D301  # click reads the character
    _check_options(action, inputs, options)
    {"write": _write, "check": _check, "inputs": _inputs}[action](file, inputs, options, as_json)


def _check_options(action: str, inputs: InputOptions, options: GuardOptions) -> None:
    """Raise for options of another action, and for places that cannot be written."""
    context = click.get_current_context()
    given = {n for n in context.params if context.get_parameter_source(n) is not click.core.ParameterSource.DEFAULT}
    own = {"write": {"target", "engine", "most", "files", "archive", "data", "seed", "sizes"}, "inputs": {"target", "case"},
           "check": set(_CHECK) | {"case"}}[action]  # fmt: skip
    names = {p.name: p.opts[0] for p in context.command.params}
    wrong = sorted(names[n] for n in given - own - {"action", "file", "as_json", _operators.NAME} if n in names)
    if wrong:
        raise click.UsageError(f"{wrong[0]} is not an option of `sonnx guard {action}`")
    if action != "check" and options.target is None:
        raise click.UsageError(f"`sonnx guard {action}` needs -o FILE")
    if options.against is not None and options.program is not None:
        raise click.UsageError("use only one of --against and --against-command")
    check_places(options.junit, folders=(options.to,))


def _write(file: Path, inputs: InputOptions, options: GuardOptions, as_json: bool) -> None:
    """Write a guard."""
    from singa_backend import debug
    from singa_backend.debug import guards
    from singa_backend.debug.setting import AGAINST, is_engine

    assert options.target is not None
    check_place(options.target, parents=True, keeps=(file, inputs.archive))
    if not is_engine(options.engine):
        raise click.BadParameter(
            f"must be MODULE:CLASS or one of {', '.join(AGAINST)}, got {options.engine!r}", param_hint="--by"
        )
    source = debug.ComparedModel.of(file)
    if inputs.sizes and inputs.given:
        raise click.UsageError("--size is for drawn inputs: other inputs have the sizes of their arrays")
    feeds = inputs.gather_of(source) if inputs.given else None
    with progress(None, "computing", unit="nodes", quiet=as_json) as step:
        made = guards.write_guard(
            source, options.target, inputs=feeds, sizes=sizes_of(inputs.sizes, source.inputs), seed=inputs.seed or 0,
            engine=options.engine, size=options.most << 10, progress=step,
        )  # fmt: skip
    cases = [c.name for c in made.cases]
    size = options.target.stat().st_size if os.path.isfile(options.target) else 0
    if as_json:
        write_json({"guard": str(options.target), "bytes": size, "values": len(made.values), "nodes": len(made.nodes),
                    "cases": cases, "notes": made.notes}, name="guard.write")  # fmt: skip
        return
    widest = max((v.covers for v in made.values), default=0)
    echo(f"{len(made.values)} values of {len(made.nodes)} nodes, with {len(cases)} sets of inputs ({', '.join(cases)})")
    echo(f"a value covers at most {widest} node{'s' * (widest != 1)}")
    for note in made.notes:
        echo(f"  {note}")
    echo(f"wrote {options.target} ({size / 1024:.0f} KiB)")


def _inputs(file: Path, inputs: InputOptions, options: GuardOptions, as_json: bool) -> None:
    """Write the inputs of a guard."""
    from singa_backend.debug import guards
    from singa_backend.io.files import write_npz
    from singa_backend.proto.named_arrays import named_arrays

    assert options.target is not None
    check_place(options.target, parents=True, keeps=(file,))
    guard = guards.read_guard(file)
    chosen = guard.chosen(options.case)
    plain = options.case is not None or len(guard.cases) == 1
    arrays = {n if plain else f"{c.name}/{n}": a for c in chosen for n, a in guards.inputs_of(c).items()}
    write_npz(options.target, named_arrays(arrays))
    if as_json:
        write_json({"cases": [c.name for c in chosen], "arrays": sorted(arrays)}, name="guard.inputs")
    else:
        wrote(options.target)


def _check(file: Path, inputs: InputOptions, options: GuardOptions, as_json: bool) -> None:
    """Check a runtime or a file against a guard."""
    from singa_backend import debug
    from singa_backend.debug import guards
    from singa_backend.debug.setting import AGAINST, is_engine

    against = debug.EngineCommand(options.program) if options.program else options.against or "onnxruntime"
    if isinstance(against, str) and not is_engine(against) and Path(against).suffix != ".npz":
        names = ", ".join(AGAINST)
        more = "; --model FILE is the model to run" if Path(against).suffix == ".onnx" else ""
        what = f"must be an .npz file, MODULE:CLASS or one of {names}, got {against!r}{more}"
        raise click.BadParameter(what, param_hint="--against")
    guard = guards.read_guard(file)
    with progress(len(guard.chosen(options.case)), "checking", unit="cases", quiet=as_json) as step:
        found = guards.check_guard(guard, against=against, model=options.model, case=options.case, to=options.to,
                                   timeout=options.timeout, progress=step)  # fmt: skip
    if options.junit:
        found.write_junit(options.junit)
    if as_json:
        write_json(found.to_dict(), name="guard.check")
    else:
        _show(found)
        wrote(options.junit)
    if found.verdict == "fail" or (found.verdict == "weak" and not (options.allow_weak and found.compared)):
        sys.exit(NO)


def _show(found: guards.GuardCheck) -> None:
    """Print the result of a check."""
    worst = sorted(found.differing, key=lambda r: -r.difference.excess)[:_SHOWN]
    if worst:
        table = _DIFFERING.table(f"{found.against} | the guard")
        for row in worst:
            d = row.difference
            table.add(row.value, f"{row.operator} {row.node}", row.case, d.max_abs, d.excess, d.verdict, style="red")
        show(table)
    for case, why in found.failures.items():
        echo(f"{case}: {why}", style="red")
    if found.same_model is False:
        echo(f"{found.model} is not the file that the guard was written from", style="yellow")
    for note in found.notes:
        echo(f"  {note}")
    for (here, there), count in found.mixed.items():
        echo(
            f"{count} value{'s are' if count > 1 else ' is'} {here} here and {there} in the guard: compared as the narrower dtype"
        )
    whole = {n.value for n in found.not_compared} - {r.value for r in found.rows}
    for why, count in Counter({n.value: n.why for n in found.not_compared if n.value in whole}.values()).most_common(4):
        names = sorted({n.value for n in found.not_compared if n.why == why and n.value in whole})
        rest = f" and {count - 4} more (--json lists all)" if count > 4 else ""
        echo(f"not compared: {count} value{'s' * (count != 1)}, {why}: {', '.join(names[:4])}{rest}")
    wrong = len({r.value for r in found.differing})
    echo(f"{found.compared} of {found.stored} values compared, {wrong} differ")
    one = found.culprit
    if one is not None:
        title = "first wrong node: " if one.among == 1 else "first value that differs, of "
        echo(f"{title}{one}", style="red")
        for note in one.notes:
            echo(f"  {note}")
        wrote(one.folder)
    style = {"pass": "green", "weak": "yellow", "fail": "red"}[found.verdict]
    echo(f"{found.verdict}: {found.against} and the guard", style=style)
