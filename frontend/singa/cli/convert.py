"""`sonnx convert`: write a model at another opset."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.choices import FLOATS

from ._common import echo, exit_codes, json_option, show, write_json
from ._tables import NAME, NUMBER, Columns
from ._writing import FUNCTIONS, LOWER, given, write_options

if TYPE_CHECKING:
    from onnx import ModelProto

    from singa._onnx.export_options import ExportReport

FEW = 6
"""The operators, and the warnings, that are shown without -v."""

_CHANGES = Columns({"operator": NAME, "nodes before": NUMBER, "after": NUMBER})


@click.command("convert")
@click.argument("model", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@write_options(values=False)
@LOWER
@FUNCTIONS
@click.option("--dtype", type=click.Choice(FLOATS), help="The dtype of floats.")
@click.option("--keep-io-types", is_flag=True, help="With --dtype: the inputs and outputs keep their dtypes.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="With --dtype: nodes that keep theirs, by name (repeatable).")
@click.option(
    "--exclude-operator",
    "exclude_operators",
    multiple=True,
    metavar="OPERATOR",
    help="With --dtype: nodes of this operator keep theirs (repeatable).",
)
@click.option("--verbose", "-v", is_flag=True, help="Show every operator, attribute and warning.")
@json_option
@exit_codes
def command(model: Path, path: Path, verbose: bool, as_json: bool, **options: Any) -> None:
    """Write MODEL at another opset, older or newer (default: its own), or with other floats, and check it.

    Operators are written in the opset's version, or composed of others if it has none. If an operator has no form in this opset,
    nothing is written and the exit code is 3; the message names each such operator and its minimum opset.
    """
    convert(model, path, verbose, as_json, options)


def convert(model: Path, path: Path, verbose: bool, as_json: bool, options: dict[str, Any]) -> None:
    """Write the model and show what changed; `options` are the fields of `singa.exporting.Options`."""
    from singa._onnx import export
    from singa_backend.proto.load import load_model

    source, _ = load_model(model)
    before = _operators(source)
    made, report = export.convert(model, path=path, with_report=True, **given(options))
    if as_json:
        write_json(report.to_dict())
    elif verbose:
        echo(str(report))
    else:
        _show(source, before, made, report)


def _show(source: ModelProto, before: Counter[str], made: ModelProto, report: ExportReport) -> None:
    after = _operators(made)
    echo(f"opset {_opset(source)} -> {report.opset}, IR version {source.ir_version} -> {report.ir_version}, "
         f"{before.total()} -> {after.total()} nodes")  # fmt: skip
    changed = sorted((n for n in before | after if before[n] != after[n]), key=lambda n: (-abs(after[n] - before[n]), n))
    table = _CHANGES.table()
    for name in changed[:FEW]:
        table.add(name, before[name], after[name])
    if changed:
        show(table)
    if len(changed) > FEW:
        echo(f"and {len(changed) - FEW} more operators; -v shows all", style="dim")
    told = [*(f"exception: {e}" for e in report.exceptions), *(f"warning: {w}" for w in report.warnings)]
    for text in told[:FEW]:
        echo(text, style="yellow")
    if len(told) > FEW:
        echo(f"and {len(told) - FEW} more; -v shows all", style="dim")
    echo(f"written to {report.path}")


def _operators(model: ModelProto) -> Counter[str]:
    """Count the nodes by operator, those of subgraphs and functions included."""
    from singa_backend.proto.messages import graphs

    left = [*model.graph.node, *(n for f in model.functions for n in f.node)]
    found: Counter[str] = Counter()
    while left:
        node = left.pop()
        found[f"{node.domain}.{node.op_type}" if node.domain else node.op_type] += 1
        left += [n for graph in graphs(node) for n in graph.node]
    return found


def _opset(model: ModelProto) -> int:
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
