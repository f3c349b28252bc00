"""`sonnx extract`: write a part of a model as a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from singa_backend.io.places import check

from ._common import OUTPUT, echo, exit_codes, json_option, model_argument, write_json

if TYPE_CHECKING:
    from singa_backend import debug


@click.command("extract")
@model_argument
@click.option(
    "--inputs", "taken", multiple=True, metavar="NAME", help="A value that becomes an input (repeatable; NAME,NAME too)."
)
@click.option(
    "--outputs", "made", multiple=True, metavar="NAME", help="A value that becomes an output (repeatable; NAME,NAME too)."
)
@click.option("--output", "-o", "path", required=True, type=OUTPUT, metavar="OUT",
              help="The file to write.")  # fmt: skip
@json_option
@exit_codes
def command(model: Path, taken: tuple[str, ...], made: tuple[str, ...], path: Path, as_json: bool) -> None:
    """Write the nodes of MODEL between values as a model, with its weights, opsets and functions.

    Without --inputs it begins at the inputs of MODEL, without --outputs it ends at its outputs.
    """
    from singa_backend import debug

    check(path)
    source = debug.ComparedModel.of(model)
    part = debug.extract(source, _names(source, taken), _names(source, made), path)
    facts = {
        "written": str(path),
        "nodes": len(part.graph.node),
        "of": len(source.proto.graph.node),
        "inputs": [i.name for i in part.graph.input],
        "outputs": [o.name for o in part.graph.output],
    }
    if as_json:
        write_json(facts)
        return
    echo(f"{facts['nodes']} of {facts['of']} nodes, from {_list(facts['inputs'])} to {_list(facts['outputs'])}")
    echo(f"wrote {path}")


def _list(names: object) -> str:
    return ", ".join(map(repr, names)) if isinstance(names, list) and names else "no inputs"


def _names(source: debug.ComparedModel, given: tuple[str, ...]) -> list[str]:
    """The names; a comma separates them unless it belongs to the name of a value."""
    return [n for text in given for n in ([text] if text in source.values else filter(None, text.split(",")))]
