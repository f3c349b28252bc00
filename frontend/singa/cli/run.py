"""`sonnx run`: one model, once."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.table import Table

from singa_backend import SingaBackend
from singa_backend.backend import load_model
from singa_backend.conform import cases, verdict

from .. import _feeding
from ._common import NO, device_option, json_option, out, typed


@click.command()
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--input", "-i", "files", multiple=True, metavar="NAME=FILE", help="An input from a .npy, .npz or .pb file.")
@click.option("--inputs", "archive", type=click.Path(path_type=Path), help="All inputs by name from a .npz file.")
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Inputs, and outputs to compare with, from a test_data_set folder.",
)
@click.option("--random", "seed", type=int, metavar="SEED", help="Random inputs by the declared shapes.")
@click.option("--size", "sizes", multiple=True, metavar="NAME=SIZE", help="A symbolic size, for --random (1 if not given).")
@click.option("--output", "-o", "target", type=click.Path(path_type=Path), help="Write the outputs by name to this .npz file.")
@click.option("--aux", multiple=True, metavar="NAME", help="Return this intermediate value too.")
@click.option("--rtol", default=1e-3, show_default=True, help="Relative tolerance for --data.")
@click.option("--atol", default=1e-7, show_default=True, help="Absolute tolerance for --data.")
@device_option
@json_option
@typed
def run(model: Path, files: tuple[str, ...], archive: Path | None, data: Path | None, seed: int | None, sizes: tuple[str, ...],
        target: Path | None, aux: tuple[str, ...], rtol: float, atol: float, device: str, as_json: bool) -> None:  # fmt: skip
    """Run MODEL once and show, save or compare its outputs."""
    rep = SingaBackend.prepare(model, device)
    expected: list[Any] | None = None
    feeds: Any = _feeding.random_inputs(rep, seed, _feeding.sizes_of(sizes)) if seed is not None else {}
    if archive:
        feeds |= _feeding.from_npz(archive)
    if data:
        values, expected = _data_set(data, model)
        feeds |= dict(zip((v.name for v in rep.inputs), values, strict=False))
    for pair in files:
        name, _, file = pair.partition("=")
        if not file:
            raise click.BadParameter(f"{pair!r} is not NAME=FILE", param_hint="--input")
        feeds[name] = _feeding.from_file(Path(file))
    outputs = rep.run(feeds, aux_output=aux)
    if target:
        arrays: dict[str, Any] = {n: v for n, v in outputs.to_dict().items() if isinstance(v, np.ndarray)}
        np.savez(target, **arrays)
    why = verdict.strict(list(outputs)[: len(expected)], expected, rtol, atol) if expected is not None else ""
    rows = [_feeding.summary(n, v) for n, v in outputs.to_dict().items()]
    if as_json:
        click.echo(json.dumps({"outputs": rows, "compared": expected is not None, "difference": why}))
    else:
        _show_outputs(rows)
        if expected is not None:
            out.print(
                f"[red]differs[/red] {why}" if why else "[green]equal to the expected outputs[/green]",
                highlight=False,
                soft_wrap=True,
            )
    if why:
        sys.exit(NO)


def _data_set(folder: Path, model: Path) -> tuple[list[Any], list[Any]]:
    return cases.data_set(folder, load_model(model)[0])


def _show_outputs(rows: list[dict[str, Any]]) -> None:
    table = Table("output", "type", "min", "max", "NaN", "Inf", "first values")
    for r in rows:
        kind = f"{r['dtype']}{r['shape']}" if r["kind"] == "tensor" else f"{r['kind']} of {r['length']}"
        numbers = [str(r.get(k, "–")) for k in ("min", "max", "nan", "inf")]
        table.add_row(r["name"], kind, *numbers, " ".join(r.get("first", [])))
    out.print(table)
