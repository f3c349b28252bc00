"""`sonnx reduce`: shrink a model to the smallest part that still fails."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from singa_backend.rendering import printable

from ._common import (
    OUTPUT_FOLDER,
    SECONDS,
    TOLERANCE,
    check_places,
    device_option,
    echo,
    exit_codes,
    json_option,
    write_json,
)
from ._inputs import InputOptions, model_options
from ._progress import progress
from .compare import trusted

if TYPE_CHECKING:
    from singa_backend import debug


@click.command("reduce")
@model_options
@click.option(
    "--against", metavar="ENGINE", help="It fails if its outputs differ from this engine's, an engine of sonnx compare."
)
@click.option("--against-command", "program", metavar="CMD", help="It fails if its outputs differ from this program's.")
@click.option("--raises", metavar="CODE", help="It fails if it raises this error: SX404.")
@click.option("--command", metavar="SHELL", help="It fails if this does not exit with 0; {model} and {data} are replaced.")
@click.option(
    "--rtol", type=TOLERANCE, help="Relative tolerance, instead of that of the dtype and the operator (`sonnx tolerances`)."
)
@click.option("--atol", type=TOLERANCE, help="Absolute tolerance, instead of rtol times the value's usual magnitude.")
@click.option(
    "--timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds for another engine's run, or for the command."
)
@click.option("--tries", default=1000, show_default=True, type=click.IntRange(1), help="The maximum number of candidates to run.")
@click.option("--to", type=OUTPUT_FOLDER, help="The folder to write (default: MODEL-reduced).")
@device_option
@json_option
@exit_codes
def command(
    model: Path,
    inputs: InputOptions,
    against: str | None,
    program: str | None,
    raises: str | None,
    command: str | None,
    rtol: float | None,
    atol: float | None,
    timeout: float,
    tries: int,
    to: Path | None,
    device: str,
    as_json: bool,
) -> None:
    """Shrink MODEL to the nodes, outputs and rows that still fail, and write them with their inputs.

    One of --against, --against-command, --raises and --command defines failure; the default is --against onnxruntime (with
    another --device: --against sonnx, the CPU).
    """
    from singa_backend import debug
    from singa_backend.debug.setting import AGAINST, is_engine

    check_places(folders=(to,))
    if sum(option is not None for option in (against, program, raises, command)) > 1:
        raise click.UsageError("use only one of --against, --against-command, --raises and --command")
    predicate: debug.Predicate
    if raises is not None:
        predicate = debug.raises(raises, device)
    elif command is not None:
        predicate = debug.command(command, timeout)
    else:
        if against is not None and not is_engine(against):
            message = f"must be MODULE:CLASS or one of {', '.join(AGAINST)}, got {against!r}"
            if Path(against).suffix in (".onnx", ".npz"):
                message += "; `sonnx compare` accepts models and saved values, `sonnx bisect` models"
            raise click.BadParameter(message, param_hint="--against")
        predicate = debug.differs(trusted(against, program, device), device=device, rtol=rtol, atol=atol, timeout=timeout)
    source = debug.ComparedModel.of(model)
    feeds = inputs.gather_of(source)
    with progress(None, "reducing", unit="candidates", quiet=as_json) as step:
        found = debug.reduce(source, feeds, predicate, to=to, tries=tries, progress=step)
    if as_json:
        write_json(found.to_dict())
        return
    echo(f"fails when {found.predicate}")
    if isinstance(predicate, debug.command) and predicate.printed:
        echo(f"  the last failure printed: {printable(predicate.printed)}")
    echo(f"left: {found}")
    for name, shape in found.shapes.items():
        echo(f"  input {name!r}: {shape}")
    echo(f"{found.tried} candidates were run; written to {found.folder}")
