"""`sonnx merge`: write a model with adapters in its weights, or next to them."""

from __future__ import annotations

import os
from pathlib import Path

import click

from singa_backend.io.places import check

from ._common import FiniteNumber, echo, exit_codes, json_option, model_argument, model_output, write_json

_FORMS = ("merged", "factors", "inputs")


@click.command("merge")
@model_argument
@click.argument("adapters", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="ADAPTER...")
@model_output(required=True)
@click.option(
    "--weight",
    "weights",
    multiple=True,
    type=FiniteNumber(),
    metavar="W",
    help="The factor of each adapter, in order (default: 1).",
)
@click.option(
    "--form",
    type=click.Choice(_FORMS),
    default=_FORMS[0],
    show_default=True,
    help="Changed weights; low-rank factors as initializers; or factors as inputs, for several adapters.",
)
@click.option("--any-base", is_flag=True, help="Accept a model with other weights than those that an adapter was trained with.")
@json_option
@exit_codes
def command(
    model: Path,
    adapters: tuple[Path, ...],
    target: Path,
    weights: tuple[float, ...],
    form: str,
    any_base: bool,
    as_json: bool,
) -> None:
    """Write MODEL with the adapters in its weights to OUT; the changes of several adapters add.

    ADAPTER is a file .safetensors of sonnx train --lora, a folder of PEFT, or a file .onnx_adapter of onnxruntime. With --form
    inputs, OUT computes as MODEL, and with the values of an adapter (sonnx adapter -o NAME.onnx_adapter) as that.
    """
    from singa_backend.adapters import insert, merge
    from singa_backend.adapters.files import check_bases, combined, load_adapter
    from singa_backend.adapters.onnxruntime import adapter_inputs
    from singa_backend.proto.load import load_model
    from singa_backend.proto.save import save

    if weights and len(weights) != len(adapters):
        raise click.UsageError(f"--weight must be given once for each adapter, {len(adapters)} times, got {len(weights)}")
    if weights and form == "inputs":
        raise click.UsageError("--weight needs --form merged or factors: with inputs, a run selects one adapter")
    check(target, keeps=(model, *(p for p in adapters if os.path.isfile(p))))
    proto, folder = load_model(model)
    found = [load_adapter(p, proto, folder=folder) for p in adapters]
    if not any_base:
        check_bases(found, proto, folder)
    if form == "inputs":
        made = adapter_inputs(proto, found, folder=folder, any_base=True)
    else:
        one = combined(found, weights or [1.0] * len(found), proto, folder=folder)
        made = (merge if form == "merged" else insert)(proto, one, folder=folder, any_base=True)
    notes: list[str] = []
    written = save(made, target, folder=folder, warnings=notes, source=proto)
    changed = sorted({n for a in found for n in a.changes})
    replaced = sorted({n for a in found for n in a.values})
    if as_json:
        facts = {"written": [os.fspath(p) for p in written], "form": form, "changed": changed, "replaced": replaced}
        write_json(facts | {"notes": notes})
        return
    what = f"{len(changed)} weights changed" + (f", {len(replaced)} tensors replaced" if replaced else "")
    for note in notes:
        echo(note, style="yellow")
    echo(f"{what}; wrote {' and '.join(map(str, written))}")
