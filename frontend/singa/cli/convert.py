"""`sonnx convert`: the same model at another opset."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from singa._onnx import export

from ._common import echo, exit_codes, json_option, out
from ._writing import given, write_options


@click.command("convert")
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@write_options(values=False)
@json_option
@exit_codes
def command(model: Path, path: Path, as_json: bool, **options: Any) -> None:
    """Write MODEL at another opset, older or newer, and check it; at its own, where none is given.

    Operators are written in the version that the opset has, and composed where it has none. The exit code is 3, and nothing is
    written, where some operator has no form in this opset; the message names each, and the least opset that holds it.
    """
    _, report = export.convert(model, path=path, with_report=True, **given(options))
    if as_json:
        out.print_json(json.dumps(report.to_dict()))
    else:
        echo(str(report))
