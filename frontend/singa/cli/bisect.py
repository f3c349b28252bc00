"""`sonnx bisect`: find the first diverging node and write it as a model that fails alone."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._common import NO, OUTPUT_FOLDER, check_places, device_option, echo, exit_codes, json_option, write_json
from ._inputs import InputOptions, model_options
from ._progress import progress
from .compare import Sides, side_options, tolerances, trusted

if TYPE_CHECKING:
    from singa_backend import debug


@click.command("bisect")
@model_options
@side_options
@click.option("--to", type=OUTPUT_FOLDER, help="The folder to write; by default named after the node.")
@device_option
@json_option
@exit_codes
def command(model: Path, inputs: InputOptions, sides: Sides, to: Path | None, device: str, as_json: bool) -> None:
    """Find the first node of MODEL that diverges and write it as a separate model, with inputs and expected outputs.

    The folder contains model.onnx and test_data_set_0; they are read back and run before they are reported.  The exit code is 1
    if a node was found, 0 if both sides agree.
    """
    from singa_backend import debug

    check_places(folders=(to,))
    other = trusted(sides.against, sides.program, device)
    source = debug.ComparedModel.of(model)
    feeds = inputs.gather_of(source, other)
    with progress(len(source.graph), "comparing", unit="nodes", quiet=as_json) as step:
        found = debug.bisect(source, feeds, against=other, device=device, to=to, progress=step, **sides.settings())
    if as_json:
        write_json({"diverges": found is not None, "against": sides.program or other} | (found.to_dict() if found else {}))
    elif found is None:
        echo("no node diverges", style="green")
    else:
        _show(found)
    if found is not None:
        sys.exit(NO)


def _show(found: debug.Reproduction) -> None:
    if found.accumulated and found.first:
        echo(found.first.headline, style="red")
        echo("no node diverges by itself: the error accumulates; it grew most at")
        echo(f"  {found.node}")
    else:
        echo(found.node.headline, style="red")
        for note in found.node.notes:
            echo(f"  {note}")
    if found.failure:
        echo(f"alone: {found.failure}")
    for name, apart in found.differences.items():
        echo(f"alone, {name!r}: {apart}")
    for line in tolerances(found.differences.values(), found.node.among):
        echo(line)
    echo(f"reproduces alone: {'yes' if found.alone else 'no'}", style="green" if found.alone else "yellow")
    echo(f"written to {found.folder}")
