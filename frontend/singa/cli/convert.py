"""`sonnx convert`: the same model at another opset."""

from __future__ import annotations

import json
from pathlib import Path

import click

from singa import exporting
from singa_backend.vocabulary import newest
from singa_backend.writer import LEAST

from ._common import json_option, out, say, typed


@click.command()
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--output", "-o", "target", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="OUT",
              help="The file to write.")  # fmt: skip
@click.option("--opset", type=click.IntRange(LEAST, newest("")), help="Of the file; that of MODEL when absent.")
@click.option("--optimize", is_flag=True, help="Run all graph passes on the result (see `sonnx optimize --list`).")
@click.option("--external-data/--one-file", default=None, help="Weights in a file of their own, or not; as needed when absent.")
@click.option("--lenient", is_flag=True, help="Write the rest where an operator has no form in this opset.")
@json_option
@typed
def convert(model: Path, target: Path, opset: int | None, optimize: bool, external_data: bool | None,
            lenient: bool, as_json: bool) -> None:  # fmt: skip
    """Write MODEL at another opset, older or newer, and check it.

    Operators are written in the version that the opset has, and composed where it has none. The exit code is 3, and nothing is
    written, where some operator has no form in this opset; the message names each, and the least opset that holds it.
    """
    _, report = exporting.convert(model, opset, target, with_report=True, optimize=optimize, external_data=external_data,
                                  continue_on_error=lenient)  # fmt: skip
    if as_json:
        out.print_json(json.dumps(report.to_dict()))
    else:
        say(str(report))
