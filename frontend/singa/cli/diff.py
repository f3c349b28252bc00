"""`sonnx diff`: the differences of two models as graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from singa_backend import debug

from ._common import NO, echo, exit_codes, json_option, write_json

_STYLES = {"added": "green", "removed": "red", "changed": "yellow"}


@click.command("diff")
@click.argument("first", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("second", type=click.Path(dir_okay=False, path_type=Path))
@json_option
@exit_codes
def command(first: Path, second: Path, as_json: bool) -> None:
    """Show how SECOND differs from FIRST as a graph: nodes, attributes, weights, inputs and outputs; nothing is run.

    The exit code is 1 if they differ.  Other names of values between nodes are not a difference.
    """
    found = debug.diff(first, second)
    if as_json:
        write_json(found.to_dict())
    else:
        for change in found.changes:
            echo(str(change), style=_STYLES[change.how])
        if found.renamed:
            echo(f"{len(found.renamed)} values have other names")
        before, after = found.nodes
        count = f"{len(found.changes)} difference{'s' * (len(found.changes) > 1)}"
        echo(f"{count}; {before} and {after} nodes" if found.changes else "the models are equal",
             style=None if found.changes else "green")  # fmt: skip
    if not found.equal:
        sys.exit(NO)
