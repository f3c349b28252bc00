"""The options of commands that write a model: those of `singa.exporting.Options`, under the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from singa_backend.choices import LEAST

from ._common import OUTPUT


def _pairs(kind: Callable[[str], Any], form: str) -> Callable[..., dict[str, Any]]:
    def parse(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for pair in given:
            name, _, value = pair.rpartition("=")
            if name in found:
                raise click.BadParameter(f"the name {name!r} occurs twice")
            try:
                found[name] = kind(value)
            except ValueError:
                name = ""
            if not name:
                raise click.BadParameter(f"must be {form}, got {pair!r}")
        return found

    return parse


def _axes(text: str) -> dict[int, str]:
    axes = {}
    for part in text.split(","):
        axis, _, name = part.partition(":")
        axes[int(axis)] = name or f"axis_{axis}"
    return axes


def _shape(text: str) -> list[int | str]:
    return [int(d) if d.lstrip("-").isdigit() else d for d in filter(None, text.split(","))]


class _Opset(click.IntRange):
    """An opset up to the newest of the installed onnx, which the help does not import."""

    def convert(self, value: Any, param: click.Parameter | None, context: click.Context | None) -> Any:
        from singa_backend.proto.schemas import newest

        return click.IntRange(self.min, newest("")).convert(value, param, context)


_OUTPUT = (
    click.option("--output", "-o", "path", required=True, type=OUTPUT, metavar="OUT",
                 help="The file to write."),
    click.option("--opset", type=_Opset(LEAST), help="The opset of the file."),
    click.option("--extra-opset", "extra_opsets", multiple=True, type=(str, int), metavar="DOMAIN VERSION",
                 help="The version of a domain of custom operators."),
    click.option("--shape", "shape_override", multiple=True, callback=_pairs(_shape, "NAME=SIZE,SIZE,..."),
                 metavar="NAME=SIZE,...", help="The shape of a value; later shapes are inferred again."),
    click.option("--keep-initializers-as-inputs", is_flag=True, help="List the weights among the inputs too."),
    click.option("--optimize", is_flag=True, help="Run all graph passes on the result (see `sonnx optimize --list`)."),
    click.option("--lenient", "continue_on_error", is_flag=True,
                 help="Write the rest if an operator has no form in this opset."),
    click.option("--check/--no-check", default=True, help="Run ONNX's checker on the result."),
    click.option("--external-data/--one-file", default=None, help="Weights in a separate file, or in OUT (default: as needed)."),
    click.option("--metadata", multiple=True, callback=_pairs(str, "KEY=VALUE"), metavar="KEY=VALUE",
                 help="An entry of the model's metadata."),
    click.option("--doc", default="", help="The model's documentation."),
)  # fmt: skip

_VALUES = (
    click.option("--run/--no-run", default=True, help="Run the file once in onnxruntime, if installed, before it is written."),
    click.option("--training", is_flag=True, help="The training form, with dropout and batch statistics."),
    click.option("--input-name", "input_names", multiple=True, metavar="NAME", help="An input's name, in order (repeatable)."),
    click.option("--output-name", "output_names", multiple=True, metavar="NAME", help="An output's name, in order (repeatable)."),
    click.option("--dynamic-axes", "dynamic_axes", multiple=True, callback=_pairs(_axes, "NAME=AXIS[:SYMBOL],..."),
                 metavar="NAME=AXIS[:SYMBOL],...", help="Dynamic axes of an input: x=0:batch."),
)  # fmt: skip


FUNCTIONS = click.option("--functions", is_flag=True, help="Add function bodies of com.microsoft's operators.")
LOWER = click.option("--lower", is_flag=True, help="Write operators of other domains (com.microsoft) in ONNX's operators.")


def write_options(*, values: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options; the command receives `path` and the fields of `Options` as keywords.

    values: whether to add the options for inputs, outputs and the form of the network.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((*_OUTPUT, *(_VALUES if values else ()))):
            command = option(command)
        return command

    return add


def given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None and value != () and value != {}}
