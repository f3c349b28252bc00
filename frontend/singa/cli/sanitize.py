"""`sonnx sanitize`: clean a model of what exporters leave in it."""

from __future__ import annotations

from pathlib import Path

import click

from singa_backend.io.places import check

from ._common import NO, OUTPUT, echo, exit_codes, json_option, model_argument, write_json


@click.command("sanitize")
@model_argument
@click.option("--output", "-o", "path", required=True, type=OUTPUT, metavar="OUT",
              help="The file to write.")  # fmt: skip
@click.option(
    "--domains", is_flag=True, help="Add com.microsoft to nodes that lack it, and the imports of domains that the file calls."
)
@json_option
@exit_codes
def command(model: Path, path: Path, domains: bool, as_json: bool) -> None:
    """Write MODEL with folded constants, without dead parts, with a name for each node and the types of all values.

    Results, and the names of values, inputs and outputs, do not change.  OUT may be MODEL.  The exit code is 1 if a pass
    failed (its changes are undone).
    """
    from singa_backend.passes import sanitize
    from singa_backend.passes.domains import add_domains
    from singa_backend.proto.checker import check_model
    from singa_backend.proto.load import load_model
    from singa_backend.proto.save import save

    check(path)
    proto, folder = load_model(model)
    completed = add_domains(proto) if domains else 0
    valid = check_model(proto).valid
    found = sanitize(proto, folder)
    written = save(proto, path, folder=folder, check=bool(valid))
    report = found.report
    if as_json:
        write_json(found.to_dict() | {"domains": completed, "written": [str(p) for p in written]})
    else:
        echo(f"{report.before.total()} -> {report.after.total()} nodes")
        if domains:
            echo(f"{completed} nodes received a domain, or their domain an import")
        echo(f"{found.named} nodes received a name, {found.typed} values a type")
        for note in filter(
            None, (*map(str, report.failures), *report.notes, found.note and f"no types were added: {found.note}")
        ):
            echo(note, style="yellow")
        echo(f"wrote {' and '.join(map(str, written))}")
    if report.failures:
        raise SystemExit(NO)
