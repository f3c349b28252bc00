"""`sonnx run`: run a model once."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import click
from onnx import ModelProto

from singa_backend import Limits, SingaBackend
from singa_backend.comparison import finite, tolerances, verdict
from singa_backend.errors import InvalidInput
from singa_backend.io.files import check, write_npz
from singa_backend.limits import Budget, spend
from singa_backend.proto import test_data
from singa_backend.proto.load import load_model
from singa_backend.proto.named_arrays import named_arrays
from singa_backend.runtime.origins import NonFinite

from . import _feeds
from ._common import (
    NO,
    OUTPUT_PATH,
    SECONDS,
    TOLERANCE,
    device_option,
    echo,
    exit_codes,
    json_option,
    limit_option,
    plan_options,
    show,
    write_json,
    wrote,
)
from ._inputs import gather, input_options
from ._tables import NAME, NUMBER, WORDS, Columns

_RTOL, _ATOL = tolerances.CASES.bounds["float32"].rtol, tolerances.CASES.bounds["float32"].atol
_OUTPUTS = Columns({"output": NAME, "type": WORDS, "min": NUMBER, "max": NUMBER, "NaN": NUMBER, "Inf": NUMBER,
                    "first values": WORDS})  # fmt: skip


@click.command("run")
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@input_options
@click.option(
    "--output",
    "-o",
    "--save-outputs",
    "target",
    type=OUTPUT_PATH,
    help="Write the outputs by name to this .npz file.",
)
@click.option("--save-inputs", type=OUTPUT_PATH, help="Write the inputs by name to this .npz file.")
@click.option(
    "--against", metavar="ENGINE|FILE", help="Compare the outputs with those of an engine of `sonnx compare`, or in an .npz file."
)
@click.option("--against-command", "program", metavar="CMD", help="Compare the outputs with those of a program.")
@click.option("--timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds that another engine may take.")
@click.option("--aux", multiple=True, metavar="NAME", help="Return this intermediate value too (repeatable).")
@click.option("--rtol", type=TOLERANCE, default=_RTOL, show_default=True, help="Relative tolerance for --data and --against.")
@click.option("--atol", type=TOLERANCE, default=_ATOL, show_default=True, help="Absolute tolerance for --data and --against.")
@click.option(
    "--validate", is_flag=True, help="Name the first node that makes NaN or infinity; the exit code is 1 if there is one."
)
@device_option
@plan_options
@limit_option
@json_option
@exit_codes
def command(
    model: Path,
    files: tuple[str, ...],
    archive: Path | None,
    data: Path | None,
    seed: int | None,
    sizes: tuple[str, ...],
    target: Path | None,
    save_inputs: Path | None,
    against: str | None,
    program: str | None,
    timeout: float,
    aux: tuple[str, ...],
    rtol: float,
    atol: float,
    validate: bool,
    device: str,
    threads: int | None,
    precision: str,
    optimize: int,
    limits: Limits,
    as_json: bool,
) -> None:
    """Run MODEL once and show or save its outputs; with --data, compare them with those in the folder.

    With --against or --against-command, compare them with those of another engine, or of an .npz file.
    """
    for path in filter(None, (target, save_inputs)):
        check(path, keeps=(model,))
    other = against is not None or program is not None
    if other and data:
        raise click.UsageError("--data has expected outputs: use --inputs or --input with --against and --against-command")
    rep = SingaBackend.prepare(model, device, limits=limits, threads=threads, precision=precision, optimize=optimize)
    with spend(Budget(limits)):  # the files are read under the limits of the run
        proto = load_model(model)[0] if data else ModelProto()
        needed = [v for v in rep.inputs if v.kind != "optional"]
        if needed and seed is None and not (files or archive or data):
            raise InvalidInput(
                f"the inputs {', '.join(map(str, needed))} must be passed, got none",
                code="SX301",
                hint="--random 0 draws them; arrays are passed by --input NAME=FILE, --inputs FILE.npz or --data FOLDER",
            )
        feeds = gather(
            proto,
            rep.inputs,
            files=files,
            archive=archive,
            data=data,
            seed=seed,
            sizes=sizes,
            draw=False,
            optional=rep.graph.optional_inputs,
        )
        expected = test_data.data_set(data, proto)[1] if data else None
    if save_inputs:
        write_npz(save_inputs, named_arrays(feeds))
    origin = None
    try:
        outputs = rep.run(feeds, aux_output=aux, validate=validate or expected is not None)
    except NonFinite as error:
        outputs, origin = error.outputs, error.origin
    if target:
        write_npz(target, named_arrays(outputs.to_dict()))
    found = list(outputs)[: len(expected)] if expected is not None else []
    if other:
        from singa_backend.debug.compare import outputs_of

        from .compare import trusted

        theirs = outputs_of(model, feeds, outputs.to_dict(), trusted(against, program, device), timeout=timeout)
        found, expected = [outputs.to_dict()[n] for n in theirs], list(theirs.values())
    why = verdict.strict(found, expected, rtol, atol) if expected is not None else ""
    both = 0 if why else finite.shared_nan(list(outputs), expected)
    rows = [_feeds.summary(n, v) for n, v in outputs.to_dict().items()]
    if as_json:
        told = {"outputs": rows, "compared": expected is not None, "difference": why}
        if validate or expected is not None:
            told |= {"both_nan": both, "nonfinite": origin.to_dict() if origin else None}
        write_json(told)
    else:
        _show_outputs(rows)
        wrote(target)
        if expected is not None:
            echo(f"differs: {why}" if why else "equal to the expected outputs", style="red" if why else "green")
        if both:
            echo(f"NaN in the outputs and in the expected outputs: {both} value{'s' * (both != 1)}", style="yellow")
        if origin and (validate or why or both):
            echo(f"first NaN or infinity: {origin}", style="red" if validate else "yellow")
        elif validate:
            given = any(map(any, map(finite.counts, outputs)))
            rest = "; those of the outputs come from inputs or constants" if given else ""
            echo(f"no node makes NaN or infinity{rest}", style="green")
    if why or (validate and origin):
        sys.exit(NO)


def _show_outputs(rows: list[dict[str, Any]]) -> None:
    table = _OUTPUTS.table()
    for r in rows:
        kind = f"{r['dtype']}{r['shape']}" if r["kind"] == "tensor" else f"{r['kind']} of {r['length']}"
        table.add(r["name"], kind, *(r.get(k) for k in ("min", "max", "nan", "inf")), " ".join(map(_six, r.get("first", []))))
    show(table)


def _six(text: str) -> str:
    """Return a value of at most six significant digits if it is a float; other values stay as they are."""
    return f"{float(text):.6g}" if re.fullmatch(r"-?\d+\.\d*(e[-+]\d+)?|-?\d+e[-+]\d+", text) else text
