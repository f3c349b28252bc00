"""`sonnx codegen`: write a model as a Python program."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ._common import OutputPath, echo, exit_codes, json_option, model_argument, write_json


@click.command("codegen")
@model_argument
@click.option(
    "--output",
    "-o",
    "target",
    required=True,
    type=OutputPath(dir_okay=False, alone="the weights are written next to it"),
    metavar="OUT.py",
    help="The program to write; its weights go to OUT.npz.",
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@json_option
@exit_codes
def command(model: Path, target: Path, force: bool, as_json: bool) -> None:
    """Write MODEL as a readable Python program on singa, with its weights in an .npz file.

    The program can run, train, and compare its outputs with onnxruntime: python OUT.py --help.
    """
    from singa_backend.io.places import check

    from ..codegen import generate

    check(target)

    start = time.perf_counter()
    program = generate(str(model), target.stem)
    written = [str(p) for p in program.write(target, force=force)]
    lines = program.text.count("\n")
    if as_json:
        facts = {"written": written, "lines": lines, "seconds": round(time.perf_counter() - start, 3)}
        write_json(program.facts | facts)
        return
    counts = ", ".join(f"{program.facts[what]} {what}" for what in ("nodes", "layers", "parameters"))
    echo(f"wrote {' and '.join(written)}: {lines} lines, {counts}")
