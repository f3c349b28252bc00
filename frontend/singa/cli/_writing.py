"""The options by which a command says how a file is written: those of `singa.exporting.Options`, one for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from singa_backend.opsets.writer import LEAST
from singa_backend.proto.schemas import newest


def _pairs(kind: Callable[[str], Any], form: str) -> Callable[..., dict[str, Any]]:
    def parse(context: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
        found = {}
        for pair in given:
            name, _, value = pair.rpartition("=")
            try:
                found[name] = kind(value)
            except ValueError:
                name = ""
            if not name:
                raise click.BadParameter(f"{pair!r} is not {form}")
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


_OUTPUT = (
    click.option("--output", "-o", "path", required=True, type=click.Path(dir_okay=False, path_type=Path), metavar="OUT",
                 help="The file to write."),
    click.option("--opset", type=click.IntRange(LEAST, newest("")), help="Of the file."),
    click.option("--extra-opset", "extra_opsets", multiple=True, type=(str, int), metavar="DOMAIN VERSION",
                 help="The version of a domain of custom operators."),
    click.option("--shape", "shape_override", multiple=True, callback=_pairs(_shape, "NAME=SIZE,SIZE,..."),
                 metavar="NAME=SIZE,...", help="The shape of a value; what lies behind it is inferred again."),
    click.option("--keep-initializers-as-inputs", is_flag=True, help="List the weights among the inputs too."),
    click.option("--optimize", is_flag=True, help="Run all graph passes on the result (see `sonnx optimize --list`)."),
    click.option("--lenient", "continue_on_error", is_flag=True,
                 help="Write the rest where an operator has no form in this opset."),
    click.option("--check/--no-check", default=True, help="Have ONNX's checker look at the result."),
    click.option("--external-data/--one-file", default=None, help="Weights in a file of their own, or not; else as needed."),
    click.option("--metadata", multiple=True, callback=_pairs(str, "KEY=VALUE"), metavar="KEY=VALUE",
                 help="An entry of the model's metadata."),
    click.option("--doc", default="", help="The model's documentation."),
)  # fmt: skip

_VALUES = (
    click.option("--training", is_flag=True, help="The training form: dropout and batch statistics stay."),
    click.option("--input-name", "input_names", multiple=True, metavar="NAME", help="The inputs' names, in order."),
    click.option("--output-name", "output_names", multiple=True, metavar="NAME", help="The outputs' names, in order."),
    click.option("--dynamic-axes", "dynamic_axes", multiple=True, callback=_pairs(_axes, "NAME=AXIS[:SYMBOL],..."),
                 metavar="NAME=AXIS[:SYMBOL],...", help="Sizes of an input that stay open: x=0:batch."),
)  # fmt: skip


def write_options(*, values: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options; the command takes them as keywords, in the words of `Options`, besides `path`.

    values: with those that concern inputs, outputs and the form of the network.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((*_OUTPUT, *(_VALUES if values else ()))):
            command = option(command)
        return command

    return add


def given(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that were left out."""
    return {name: value for name, value in options.items() if value is not None and value != () and value != {}}
