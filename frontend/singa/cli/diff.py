"""`sonnx diff`: the differences of two models as graphs."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from singa_backend.io.places import check

from ._common import NO, OUTPUT, echo, exit_codes, json_option, show, write_json, wrote
from ._tables import NAME, NUMBER, WORDS, Columns

_STYLES = {"added": "green", "removed": "red", "changed": "yellow"}
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_CHANGES = Columns({"": WORDS, "kind": WORDS, "name": NAME, "max abs": NUMBER, "differ": NUMBER, "of": NUMBER, "change": WORDS})


@click.command("diff")
@click.argument("first", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("second", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--html", "page", type=OUTPUT, help="Write a picture of both graphs with the differences.")
@json_option
@exit_codes
def command(first: Path, second: Path, page: Path | None, as_json: bool) -> None:
    """Show how SECOND differs from FIRST as a graph: nodes, attributes, weights, inputs and outputs; nothing is run.

    The exit code is 1 if they differ.  Other names of values between nodes are not a difference.
    """
    from singa_backend import debug
    from singa_backend.io.files import write_text

    if page:
        check(page, parents=True, keeps=(first, second))
    found = debug.diff(first, second)
    if page:
        write_text(page, debug.diff_page(first, second, found))
    if as_json:
        write_json(found.to_dict())
    else:
        if found.changes:
            table = _CHANGES.table(f"{first.name} -> {second.name}")
            for c in found.changes:
                change = (f"{_SIGNS[c.how]} {c.how}", c.operator or c.kind, c.name, c.max_abs, c.differing, c.elements, c.what)
                table.add(*change, style=_STYLES[c.how])
            show(table)
        if found.renamed:
            echo(f"{len(found.renamed)} values have other names")
        before, after = found.nodes
        count = f"{len(found.changes)} difference{'s' * (len(found.changes) > 1)}"
        echo(f"{count}; {before} and {after} nodes" if found.changes else "the models are equal",
             style=None if found.changes else "green")  # fmt: skip
        wrote(page)
    if not found.equal:
        sys.exit(NO)
