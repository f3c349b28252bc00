"""The group of all commands, `sonnx`; a command's module is imported when the command is called."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import click

from ._interrupts import INTERRUPTED, is_interrupt

COMMANDS = {
    "bisect": ("singa.cli.bisect", "Find the first node of MODEL that diverges and write it as a model."),
    "check": ("singa.cli.check", "Check whether MODEL is valid and supported, or can be trained."),
    "codegen": ("singa.cli.codegen", "Write MODEL as a readable Python program on singa, with its weights."),
    "compare": ("singa.cli.compare", "Compare MODEL, node by node, with another engine, device or model."),
    "conform": ("singa.cli.conform", "Run ONNX's own suite under the strict verdict."),
    "convert": ("singa.cli.convert", "Write MODEL at another opset, older or newer."),
    "doctor": ("singa.cli.doctor", "Show what sonnx computes with here, and what would make it faster."),
    "export": ("singa.cli.export", "Write a model that a Python program builds as an ONNX file."),
    "foreign": ("singa.cli.foreign", "Compare every value of exported models with onnxruntime."),
    "fuzz": ("singa.cli.fuzz", "Draw valid models of one node, or of many, and judge the results."),
    "gradients": ("singa.cli.gradients", "Check the gradients of operator versions."),
    "inspect": ("singa.cli.inspect", "Show the inputs, outputs, states and operators of MODEL."),
    "layout": ("singa.cli.layout", "Write MODEL with channels first or last."),
    "opsets": ("singa.cli.opsets", "Write operators at every opset, run them and compare."),
    "optimize": ("singa.cli.optimize", "Rewrite MODEL by graph passes."),
    "profile": ("singa.cli.profile", "Show where the time of a run of MODEL goes."),
    "quantize": ("singa.cli.quantize", "Write float MODEL with 8-bit weights and activations."),
    "reduce": ("singa.cli.reduce", "Shrink MODEL to the smallest part that still fails."),
    "report": ("singa.cli.report", "Render the support report from the results of runs."),
    "run": ("singa.cli.run", "Run MODEL once and show or save its outputs."),
    "train": ("singa.cli.train", "Fine-tune MODEL on the arrays of an .npz file."),
}
"""The commands and their lines in `sonnx --help`; each command is `command` in the module of its name."""


class LazyGroup(click.Group):
    """A group whose commands are modules of this package."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        found = import_module(COMMANDS[name][0]).command
        assert isinstance(found, click.Command)
        return found

    def invoke(self, context: click.Context) -> Any:
        """Run the command; Ctrl-C ends it with exit code 130."""
        try:
            return super().invoke(context)
        except BaseException as error:
            if not is_interrupt(error):
                raise
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name][1]) for name in sorted(COMMANDS)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="sonnx")
def main() -> None:
    """Run, check, train and write ONNX models, and test backends with ONNX's suite.

    Exit codes: 0 success, 1 a check failed, 2 wrong usage, 3 a model or an input was refused, 4 a worker of a
    training was lost, 130 interrupted.
    """
