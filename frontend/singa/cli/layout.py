"""`sonnx layout`: write a model with channels first or last."""

from __future__ import annotations

from pathlib import Path

import click

from singa_backend.choices import LAYOUTS
from singa_backend.io.places import check

from ._common import OUTPUT, echo, exit_codes, json_option, write_json


@click.command("layout")
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--to", required=True, type=click.Choice(LAYOUTS), help="The layout of the inputs and outputs.")
@click.option(
    "--output",
    "-o",
    "target",
    required=True,
    type=OUTPUT,
    metavar="OUT",
    help="The file to write.",
)
@click.option(
    "--name", "names", multiple=True, metavar="NAME", help="An input or output to change (default: those with 4 or 5 axes)."
)
@json_option
@exit_codes
def command(model: Path, to: str, target: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Write MODEL with its inputs and outputs in the other layout; the values stay the same.

    A Transpose is inserted after each input and before each output; graph passes then move them until they cancel.
    """
    from singa_backend.passes.change_layout import change_layout
    from singa_backend.proto.load import load_model
    from singa_backend.proto.save import save

    check(target)
    proto, folder = load_model(model)
    report = change_layout(proto, to, names or None, folder=folder)
    assert report is not None
    save(proto, target, folder=folder, warnings=report.notes)
    if as_json:
        write_json(report.to_dict())
    else:
        left, first = report.after["Transpose"], report.before["Transpose"]
        echo(f"wrote {target}: {report.after.total()} nodes, {left} of them Transpose; before the passes {first}")
        for note in report.notes:
            echo(note, style="yellow")
