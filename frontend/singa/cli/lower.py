"""`sonnx lower`: write a model in ONNX's operators only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ._common import exit_codes, json_option, model_argument
from ._writing import write_options


@click.command("lower")
@model_argument
@write_options(values=False)
@click.option("--verbose", "-v", is_flag=True, help="Show every operator, attribute and warning.")
@json_option
@exit_codes
def command(model: Path, path: Path, verbose: bool, as_json: bool, **options: Any) -> None:
    """Write MODEL without operators of other domains, such as com.microsoft, at its own opset or another one.

    Each such operator is written as its body in ONNX's operators.  A newer opset has shorter bodies: opset 23 has Attention and
    RMSNormalization, opset 21 weights of 4 bits.  If an operator has no body, nothing is written and the exit code is 3; the
    message names each such operator and why.
    """
    from .convert import convert

    convert(model, path, verbose, as_json, options | {"lower": True})
