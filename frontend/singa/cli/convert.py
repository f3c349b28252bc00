"""`sonnx convert`: write a model at another opset."""

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
    """Write MODEL at another opset, older or newer (default: its own), and check it.

    Operators are written in the opset's version, or composed of others if it has none. If an operator has no form in this opset,
    nothing is written and the exit code is 3; the message names each such operator and its minimum opset.
    """
    _, report = export.convert(model, path=path, with_report=True, **given(options))
    if as_json:
        out.print_json(json.dumps(report.to_dict()))
    else:
        echo(str(report))
