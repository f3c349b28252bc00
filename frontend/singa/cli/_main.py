"""The group of all commands, `sonnx`."""

from __future__ import annotations

import click

from .bisect import bisect
from .check import check
from .codegen import codegen
from .compare import compare
from .conform import conform
from .convert import convert
from .export import export_
from .foreign import foreign
from .fuzz import fuzz
from .gradients import gradients
from .inspect import inspect
from .layout import layout
from .opsets import opsets
from .optimize import optimize
from .reduce import reduce
from .report import write_report
from .run import run
from .train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sonnx")
def main() -> None:
    """Run ONNX models, hold the backend to ONNX's own suite, and write the support report.

    Exit codes: 0 as it should be, 1 a check says no, 2 wrong usage, 3 a model or input was refused.
    """


for command in (
    run,
    train,
    check,
    inspect,
    compare,
    bisect,
    reduce,
    optimize,
    layout,
    export_,
    convert,
    codegen,
    conform,
    foreign,
    fuzz,
    gradients,
    opsets,
    write_report,
):
    main.add_command(command)
