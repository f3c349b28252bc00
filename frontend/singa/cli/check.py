"""`sonnx check`: check whether a model can run here, and report every problem at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ._common import NO, SECONDS, echo, err, exit_codes, json_option, model_argument, show, write_json
from ._tables import NAME, NUMBER, WHOLE, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.inspection import CheckReport, TrainableReport

_OPERATORS = Columns({"operator": NAME, "version": NUMBER, "nodes": NUMBER, "dtypes": WORDS, "status": WHOLE})

STYLES = {"unsupported": "red", "deprecated": "yellow", "supported": "", "function": "dim"}


@click.command("check")
@model_argument
@click.option("--strict", is_flag=True, help="Exit with 1 also if only onnx's own checker refuses the model.")
@click.option(
    "--timeout", default=60.0, show_default=True, type=SECONDS, help="Seconds that onnx's checker and shape inference may take."
)
@click.option(
    "--train", is_flag=True, help="Also report what trains, what stays constant, and why; and which parameters get no gradient."
)
@json_option
@exit_codes
def command(model: Path, strict: bool, timeout: float, train: bool, as_json: bool) -> None:
    """Check whether MODEL is valid and supported: its operators, versions, dtypes, and every problem at once.

    The model is not executed.  onnx's own checker runs too, in a separate process, as a second opinion.
    """
    from singa_backend.inspection import check as check_model
    from singa_backend.inspection import trainable_report

    if not as_json and err.is_terminal:
        err.print(f"reading {model.name} ...", style="dim")
    report = check_model(model, timeout=timeout)
    training = trainable_report(model) if train and report.good else None
    if as_json:
        write_json(report.to_dict() | ({"training": training.to_dict() if training else None} if train else {}))
    else:
        _show(report)
        if training:
            _show_training(training)
    if not report.good or (strict and not report.opinion.valid) or (training and not training.good):
        sys.exit(NO)


def _show(report: CheckReport) -> None:
    seen = report.inspection
    opsets = ", ".join(f"{domain} {version}" for domain, version in seen.opsets.items())
    echo(f"{seen.file}: IR {seen.ir_version}, {opsets}" + (f", made by {seen.producer}" if seen.producer else ""))
    table = _OPERATORS.table()
    for use in report.operators:
        name = use.operator if use.domain == "ai.onnx" else f"{use.domain}.{use.operator}"
        dtypes = ", ".join(sorted(use.dtypes)) or "?"
        table.add(name, use.version, use.nodes, dtypes, use.status, style=STYLES[use.status])
    show(table)
    if seen.opinion.inference:
        echo(f"dtypes are incomplete; shape inference reports: {seen.opinion.inference.splitlines()[0][:300]}", style="dim")
    for problem in report.problems:
        echo(f"[{problem.code}] {problem}", style="red")
    for hint in dict.fromkeys(p.hint for p in report.problems if p.hint):
        echo(f"hint: {hint}", style="yellow")
    for text in report.warnings:
        echo(f"warning: {text}", style="yellow")
    for text in report.nonfinite[:10]:
        echo(text, style="yellow" if "NaN" in text else "dim")
    if len(report.nonfinite) > 10:
        echo(f"... and {len(report.nonfinite) - 10} more hold NaN or infinity (--json lists all)")
    opinion = report.opinion
    words = {True: "accepts the model", False: "refuses the model", None: "did not answer"}[opinion.valid]
    echo(
        f"onnx's own checker {words}" + (f": {opinion.message.splitlines()[0][:400]}" if opinion.message else ""),
        style="dim" if opinion.valid else "yellow",
    )
    if report.good:
        old = sum(use.status == "deprecated" for use in report.operators)
        echo("valid, and everything in it is supported" + (f" ({old} deprecated)" if old else ""), style="green")
    else:
        verdict = "valid, but not supported" if report.valid else "not valid"
        echo(f"{verdict}: {len(report.problems)} problem{'s' * (len(report.problems) > 1)}", style="red")


def _show_training(report: TrainableReport) -> None:
    count = len(report.trainable) + len(report.blocked)
    echo(
        f"{len(report.trainable)} of {count} parameters get a gradient of {', '.join(report.outputs)}",
        style="green" if report.good else "red",
    )
    for name, why in report.blocked.items():
        echo(f"no gradient: {name}: {why}", style="red")
    for line in report.groups():
        echo(line)
    if report.constants:
        echo("to train a constant, call model.unfreeze(NAME); sonnx train --train-constants trains all", style="dim")
    for problem in report.problems:
        echo(f"[{problem.code}] {problem}", style="red" if problem in report.fatal else "dim")
    for hint in dict.fromkeys(p.hint for p in report.problems if p.hint):
        echo(f"hint: {hint}", style="yellow")
