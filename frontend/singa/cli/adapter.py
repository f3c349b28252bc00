"""`sonnx adapter`: show what an adapter holds, or write it in another form."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.io.places import check, check_folder

from ._common import OutputPath, echo, exit_codes, json_option, show, write_json
from ._tables import NAME, NUMBER, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.adapters import Adapter, LowRank

_CHANGES = Columns({"tensor": NAME, "kind": WORDS, "rank": NUMBER, "scale": NUMBER, "A": WORDS, "B": WORDS, "norm": NUMBER})


@click.command("adapter")
@click.argument("adapter", type=click.Path(path_type=Path))
@click.option(
    "--output",
    "-o",
    "target",
    type=OutputPath(alone="its name selects the form"),
    metavar="OUT",
    help="Write it: to a file .safetensors or .onnx_adapter, or as a new folder of PEFT.",
)
@click.option(
    "--model",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="MODEL",
    help="The model of the adapter; forms of PEFT and onnxruntime need it.",
)
@json_option
@exit_codes
def command(adapter: Path, target: Path | None, model: Path | None, as_json: bool) -> None:
    """Show the weights that ADAPTER changes, and write it in another form.

    ADAPTER is a file .safetensors of sonnx train --lora, a folder of PEFT, or a file .onnx_adapter of onnxruntime. The norm is
    that of the change of the weight, the root of the sum of squares.
    """
    from singa_backend.adapters import Adapter, base_digest
    from singa_backend.adapters.files import SONNX, form_of, form_to_write, load_adapter, save_adapter
    from singa_backend.proto.load import open_light

    form = form_of(adapter)
    if model is None and form != SONNX:
        raise click.UsageError(f"an adapter of {form} needs --model MODEL, to whose tensors its names are matched")
    if target is not None:
        written = form_to_write(target)
        check_folder(target) if written == "PEFT" else check(
            target, keeps=(adapter, model) if os.path.isfile(adapter) else (model,)
        )
        if written == "PEFT" and model is None:
            raise click.UsageError("a folder of PEFT needs --model MODEL, which has the paths of the modules")
    proto, folder = (None, None) if model is None else open_light(model)
    found = Adapter.load(adapter) if proto is None else load_adapter(adapter, proto, folder=folder)
    if proto is not None and not found.base:
        found = Adapter(found.changes, found.values, base_digest(proto, folder), found.settings)
    if target is not None:
        save_adapter(found, target, proto, folder=folder)
    rows = [_row(n, c) for n, c in found.changes.items()]
    if as_json:
        replaced = {n: list(v.shape) for n, v in found.values.items()}
        told: dict[str, Any] = {
            "form": form,
            "base": found.base,
            "settings": found.settings,
            "changes": rows,
            "replaced": replaced,
        }
        write_json(told | {"written": None if target is None else os.fspath(target)})
        return
    _tell(form, found, rows)
    if target is not None:
        echo(f"wrote {target}")


def _row(name: str, change: LowRank) -> dict[str, Any]:
    a, b = change.a, change.b
    kind = "convolution" if a.ndim > 2 else "matrix"
    return {"tensor": name, "kind": kind, "rank": len(a), "scale": change.scale, "a": list(a.shape), "b": list(b.shape),
            "norm": _norm(change)}  # fmt: skip


def _norm(change: LowRank) -> float:
    """The Frobenius norm of scale B A, without the product: the groups of a convolution are separate blocks."""
    import numpy as np

    group = len(change.a) // change.b.shape[1] if change.b.shape[1] else 1
    a = change.a.reshape(group, -1, math.prod(change.a.shape[1:])).astype(np.float64)
    b = change.b.reshape(group, -1, change.b.shape[1]).astype(np.float64)
    total = np.sum((b.transpose(0, 2, 1) @ b) * (a @ a.transpose(0, 2, 1)))
    return abs(change.scale) * math.sqrt(max(0.0, float(total)))


def _tell(form: str, found: Adapter, rows: list[dict[str, Any]]) -> None:
    """Print the adapter as text."""
    table = _CHANGES.table()
    for r in rows:
        shapes = ["x".join(map(str, r[k])) for k in ("a", "b")]
        table.add(r["tensor"], r["kind"], r["rank"], f"{r['scale']:.6g}", *shapes, f"{r['norm']:.4g}")
    if rows:
        show(table)
    count = sum(c.a.size + c.b.size for c in found.changes.values()) + sum(v.size for v in found.values.values())
    echo(f"adapter of {form}: {len(rows)} weights changed, {len(found.values)} tensors replaced, {count:,} values")
    for name, value in found.values.items():
        echo(f"  replaced: {name} {list(value.shape)}")
    echo(f"base: {found.base or 'unknown'}")
