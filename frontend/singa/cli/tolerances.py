"""`sonnx tolerances`: the tolerances of operators and dtypes, and their reasons."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from singa_backend.errors import did_you_mean

from ._common import echo, exit_codes, json_option, show, write_json
from ._tables import NUMBER, WHOLE, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.comparison import tolerances

_RULES = Columns({"operators": WORDS, "steps": NUMBER, "of summands": NUMBER, "integers": NUMBER, "in": WHOLE, "reason": WORDS})
_BOUNDS = Columns({"dtype": WORDS, "rtol": NUMBER, "atol": NUMBER, "reason": WORDS})

_SHOWN = 20
"""The operators of a rule that are listed."""


@click.command("tolerances")
@click.argument("operator", required=False)
@json_option
@exit_codes
def command(operator: str | None, as_json: bool) -> None:
    """Show the tolerances of OPERATOR (Softmax, ai.onnx.ml.Scaler), or of all operators and of all commands that compare values.

    A rule bounds the error of one node alone: in steps (ulps) of the value, plus steps of the largest summand, plus units of
    integers.  A command has tolerances by dtype, for values whose errors come from many nodes.
    """
    import numpy as np

    from singa_backend.comparison import tolerances

    rules, uses = list(tolerances.RULES), list(tolerances.USES)
    if operator is not None:
        domain, _, name = operator.rpartition(".")
        operator = tolerances.qualified(domain, name)
        rules = [r for r in rules if operator in r.operators]
        if not rules:
            hint = did_you_mean(operator, [n for r in tolerances.RULES for n in r.operators])
            raise click.BadParameter(f"must be an operator of ONNX, got {operator!r}{hint}", param_hint="OPERATOR")
        found = {d: tolerances.in_model(np.dtype(d), [operator]) for d in ("float64", "complex128")}
        compare = tolerances.COMPARE
        uses = [tolerances.ToleranceUse(compare.where, compare.formula, {**compare.bounds, **found})]
    if as_json:
        write_json({"operator": operator, "rules": [asdict(r) for r in rules], "uses": [asdict(u) for u in uses]})
    else:
        _show(operator, rules, uses)


def _show(operator: str | None, rules: list[tolerances.Allowance], uses: list[tolerances.ToleranceUse]) -> None:
    table = _RULES.table("the error of one node alone")
    for r in rules:
        names = [operator] if operator else r.operators
        listed = ", ".join(names[:_SHOWN]) + (
            f" and {len(names) - _SHOWN} more (--json lists all)" if len(names) > _SHOWN else ""
        )
        table.add(listed, r.ulps, r.norm, r.steps, "float32" if r.single else "its dtype", r.reason)
    show(table)
    for use in uses:
        _show_use(use)
    echo("--rtol and --atol of compare, bisect, reduce and run replace these tolerances")


def _show_use(use: tolerances.ToleranceUse) -> None:
    echo(use.where.replace("`", ""), style="bold")
    echo(use.formula)
    table = _BOUNDS.table()
    for names, bound in use.rows():
        table.add(", ".join(names), bound.rtol, bound.atol, bound.reason)
    show(table)
