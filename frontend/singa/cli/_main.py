"""The group of all commands, `sonnx`; a command's module is imported when the command is called."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from ._interrupts import INTERRUPTED, is_interrupt

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS = {
    "adapter": ("singa.cli.adapter", "Show an adapter, or write it in another form."),
    "bisect": ("singa.cli.bisect", "Write the first wrong node of MODEL as a model."),
    "check": ("singa.cli.check", "Check whether MODEL is valid, supported, trainable."),
    "codegen": ("singa.cli.codegen", "Write MODEL as a Python program, with its weights."),
    "compare": ("singa.cli.compare", "Compare MODEL, node by node, with another engine."),
    "completion": ("singa.cli.completion", "Print the completion script of a shell."),
    "conform": ("singa.cli.conform", "Run ONNX's own suite under the strict verdict."),
    "convert": ("singa.cli.convert", "Write MODEL at another opset, or with other floats."),
    "device-check": ("singa.cli.device_check", "Test a CUDA device in stages with deadlines."),
    "diff": ("singa.cli.diff", "Show how two models differ as graphs."),
    "doctor": ("singa.cli.doctor", "Show what sonnx computes with, and how to speed it up."),
    "export": ("singa.cli.export", "Write a model that a Python program builds."),
    "extract": ("singa.cli.extract", "Write a part of MODEL as a model."),
    "foreign": ("singa.cli.foreign", "Compare every value of models with onnxruntime."),
    "fuzz": ("singa.cli.fuzz", "Draw valid models and judge their results."),
    "generate": ("singa.cli.generate", "Continue a text by the model of FOLDER."),
    "gradients": ("singa.cli.gradients", "Check the gradients of operator versions."),
    "guard": ("singa.cli.guard", "Keep MODEL's values in a small file; check runtimes."),
    "inspect": ("singa.cli.inspect", "Show the inputs, outputs and operators of MODEL."),
    "layout": ("singa.cli.layout", "Write MODEL with channels first or last."),
    "lower": ("singa.cli.lower", "Write MODEL in ONNX's operators only."),
    "merge": ("singa.cli.merge", "Write MODEL with adapters in its weights."),
    "opsets": ("singa.cli.opsets", "Write operators at every opset, run them and compare."),
    "optimize": ("singa.cli.optimize", "Rewrite MODEL by graph passes."),
    "profile": ("singa.cli.profile", "Show where the time of a run of MODEL goes."),
    "quantize": ("singa.cli.quantize", "Write float MODEL with weights of 8 bits or fewer."),
    "reduce": ("singa.cli.reduce", "Shrink MODEL to the smallest part that still fails."),
    "report": ("singa.cli.report", "Render the support report from the results of runs."),
    "run": ("singa.cli.run", "Run MODEL once and show or save its outputs."),
    "sanitize": ("singa.cli.sanitize", "Fold constants of MODEL; add names and types."),
    "sweep": ("singa.cli.sweep", "Check, run or compare all models of FOLDER."),
    "tolerances": ("singa.cli.tolerances", "Show the tolerances of operators and dtypes, and why."),
    "train": ("singa.cli.train", "Fine-tune MODEL on the arrays of an .npz file."),
}
"""The commands and their lines in `sonnx --help`; each command is `command` in the module of its name."""

SECTIONS = {
    "Use": (
        "run",
        "inspect",
        "check",
        "profile",
        "generate",
    ),
    "Debug": (
        "compare",
        "bisect",
        "reduce",
        "guard",
        "sweep",
        "diff",
        "tolerances",
    ),
    "Train": (
        "train",
        "adapter",
        "merge",
    ),
    "Write": (
        "export",
        "convert",
        "lower",
        "optimize",
        "layout",
        "extract",
        "sanitize",
        "quantize",
        "codegen",
    ),
    "Prove": (
        "conform",
        "fuzz",
        "gradients",
        "opsets",
        "foreign",
        "device-check",
        "report",
    ),
    "Set up": (
        "doctor",
        "completion",
    ),
}
"""The sections of `sonnx --help`; the titles are short, so that the help fits a screen."""


class LazyGroup(click.Group):
    """A group whose commands are modules of this package."""

    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        from . import _operators
        from ._examples import EXAMPLES

        found = import_module(COMMANDS[name][0]).command
        assert isinstance(found, click.Command)
        if name not in _operators.WITHOUT and _operators.OPTION not in found.params:
            found.params.append(_operators.OPTION)
        found.epilog = "\n".join(("\b", "Examples:", *(f"  {line}" for line in EXAMPLES[name])))
        return found

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments of the group; with --json, a usage error is a document."""
        as_json = "--json" in args
        with _documents(as_json):
            context = super().make_context(info_name, args, parent, **extra)
        context.meta[_JSON] = as_json
        return context

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands that start so; none of them is imported."""
        from click.shell_completion import CompletionItem

        found = [CompletionItem(n, help=line) for n, (_, line) in COMMANDS.items() if n.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, context, incomplete)]

    def invoke(self, context: click.Context) -> Any:
        """Run the command; Ctrl-C ends it with exit code 130."""
        try:
            with _documents(context.meta[_JSON]):
                return super().invoke(context)
        except BaseException as error:
            if not is_interrupt(error):
                raise
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a line for each command, with the title of its section in front of the first."""
        wide, rows = max(map(len, SECTIONS)), []
        for title, names in SECTIONS.items():
            for i, name in enumerate(names):
                rows.append((f"{'' if i else title:{wide}}  {name}", COMMANDS[name][1]))
        with formatter.section("Commands"):
            formatter.write_dl(rows, col_max=max(len(row) for row, _ in rows))


_JSON = "singa.cli.json"


@contextmanager
def _documents(as_json: bool) -> Iterator[None]:
    """Print a usage error as JSON, if so requested."""
    try:
        yield
    except click.ClickException as error:
        if not as_json:
            raise
        context = getattr(error, "ctx", None)
        facts = {"schema": "sonnx.error", "schema_version": 1, "error": type(error).__name__, "message": error.format_message()}
        click.echo(json.dumps(facts | {"hint": context.get_usage() if context else None}))
        raise click.exceptions.Exit(error.exit_code) from None


_EPILOG = (
    "An output file - is standard output. Exit codes: 0 success, 1 a check failed, 2 wrong usage, 3 refused, 4 a worker was lost,"
    " 130 interrupted."
)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
    no_args_is_help=True,
    epilog=_EPILOG,
)
@click.option("--version", "show_version", is_flag=True, help="Show the versions of sonnx and its libraries, also with --json.")
@click.option("--json", "as_json", is_flag=True, hidden=True, help="With --version: print them as JSON.")
@click.pass_context
def main(context: click.Context, show_version: bool, as_json: bool) -> None:
    """Run, debug, train and write ONNX models. sonnx COMMAND --help has examples."""
    if show_version:
        from ._versions import versions

        found = versions()
        if as_json:
            click.echo(json.dumps({"schema": "sonnx.version", "schema_version": 1, "versions": found}))
        else:
            click.echo("\n".join(f"{name} {number or 'not installed'}" for name, number in found.items()))
        context.exit()
    if as_json:
        raise click.UsageError("--json in front of the command needs --version", context)
    if context.invoked_subcommand is None:
        raise click.UsageError("Missing command.", context)
