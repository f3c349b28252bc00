"""`sonnx quantize`: write a float model with 8-bit weights and activations, or with weights of few bits."""

from __future__ import annotations

import math
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from singa_backend.choices import FORMS, METHODS, QUANTIZED
from singa_backend.io.places import check

from ._common import FiniteNumber, echo, exit_codes, json_option, model_argument, model_output, show, write_json
from ._tables import NAME, NUMBER, WORDS, Columns

if TYPE_CHECKING:
    from singa_backend.quantization import ErrorRow, FloatWeight

_ERRORS = Columns({"node": NAME, "operator": NAME, "value": NAME, "output": WORDS, "SNR (dB)": NUMBER, "own SNR (dB)": NUMBER,
                   "max error": NUMBER, "mean error": NUMBER})  # fmt: skip

_LISTED = 5
"""The number of nodes that are listed below the table."""

_INTEGERS = click.Choice(QUANTIZED)


@click.command("quantize")
@model_argument
@click.option(
    "--data",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="CALIBRATION",
    help="An .npz with an array for each input, by name; the first axis counts samples.",
)
@model_output(required=True)
@click.option("--dynamic", is_flag=True, help="Compute the ranges of activations in each run; needs no data to quantize.")
@click.option(
    "--weight-only",
    type=click.Choice(list(FORMS)),
    help="Only weights of MatMul and Gemm, by blocks, in operators of onnxruntime; needs no data to quantize.",
)
@click.option(
    "--block-size",
    type=click.IntRange(16, 1 << 20),
    help="With --weight-only: weights of a block, a power of 2 (default: 32, or 64 for nf4 and fp4).",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default=METHODS[0],
    show_default=True,
    help="How the range of an activation follows from its values.",
)
@click.option("--per-channel", is_flag=True, help="A scale for each output channel of a weight.")
@click.option("--activations", type=_INTEGERS, help="The integers of activations (default: int8, or uint8 with --dynamic).")
@click.option("--weights", type=_INTEGERS, default="int8", show_default=True, help="The integers of weights.")
@click.option("--symmetric-activations", is_flag=True, help="0 is the middle of the integers of activations.")
@click.option("--symmetric-weights/--asymmetric-weights", default=None, help="The same for weights (default: for int8).")
@click.option(
    "--reduce-range",
    is_flag=True,
    help="Weights of 7 bits: without VNNI or AMX, onnxruntime saturates sums of two 8-bit products.",
)
@click.option(
    "--percentile",
    type=FiniteNumber(min=0, max=100, min_open=True),
    default=99.999,
    show_default=True,
    help="The share of the magnitudes within the range, for that method.",
)
@click.option("--bins", type=click.IntRange(128, 1 << 16), help="Bins of a histogram (default: entropy 128, percentile 2048).")
@click.option("--operator", "operators", multiple=True, metavar="OPERATOR", help="Quantize only this operator (repeatable).")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Keep nodes whose whole names match float (repeatable).")
@click.option(
    "--exclude-operator",
    "exclude_operators",
    multiple=True,
    metavar="OPERATOR",
    help="Keep nodes of this operator float (repeatable).",
)
@click.option("--batch-size", type=click.IntRange(1), help="Samples of a run, if the model does not fix it (default: 8).")
@json_option
@exit_codes
def command(
    model: Path,
    data: Path | None,
    target: Path,
    dynamic: bool,
    weight_only: str | None,
    block_size: int | None,
    method: str,
    per_channel: bool,
    activations: str | None,
    weights: str,
    symmetric_activations: bool,
    symmetric_weights: bool | None,
    reduce_range: bool,
    percentile: float,
    bins: int | None,
    operators: tuple[str, ...],
    exclude: tuple[str, ...],
    exclude_operators: tuple[str, ...],
    batch_size: int | None,
    as_json: bool,
) -> None:
    """Write float MODEL with 8-bit weights and activations to OUT, and show the error of every quantized node on the data.

    Without --dynamic and --weight-only, the model runs on the data to find the range of each activation.  With them, data are
    used for the errors only.  Fuse normalizations first: sonnx optimize MODEL -o FUSED.
    """
    from singa_backend.proto.load import load_model
    from singa_backend.proto.save import save
    from singa_backend.quantization import quantization_errors, quantize_weights
    from singa_backend.quantization import quantize as rewrite
    from singa_backend.quantization.accuracy import worst

    if data is None and not dynamic and weight_only is None:
        raise click.UsageError("--data CALIBRATION is required (or --dynamic, or --weight-only FORM)")
    if dynamic and weight_only is not None:
        raise click.UsageError("--dynamic and --weight-only exclude each other")
    if block_size is not None and weight_only is None:
        raise click.UsageError("--block-size needs --weight-only FORM")
    check(target)
    proto = load_model(model)[0]
    chosen: dict[str, Any] = {"operators": operators or None, "exclude": exclude, "exclude_operators": exclude_operators}
    kept: list[FloatWeight] = []
    chosen["kept"] = kept
    if weight_only is not None:
        made = quantize_weights(model, weight_only, block_size=block_size, symmetric=bool(symmetric_weights), **chosen)
    else:
        made = rewrite(
            model, None if dynamic else data, dynamic=dynamic, method=method, per_channel=per_channel, activations=activations,
            weights=weights, symmetric_activations=symmetric_activations, symmetric_weights=symmetric_weights,
            reduce_range=reduce_range, percentile=percentile, bins=bins, batch_size=batch_size, **chosen,
        )  # fmt: skip
    rows = [] if data is None else quantization_errors(model, made, data, batch_size=batch_size)
    large = worst(rows)
    nodes = [len(p.graph.node) for p in (proto, made)]
    notes: list[str] = []
    written = save(made, target, warnings=notes, source=proto)
    if as_json:
        told = {"written": [str(p) for p in written], "nodes": nodes, "errors": [row.to_dict() for row in rows]}
        told |= {"worst": [row.node for row in large], "float": [w.to_dict() for w in kept], "notes": notes}
        write_json(told)
        return
    if rows:
        _show(rows, large)
    _show_float(kept)
    for note in notes:
        echo(note, style="yellow")
    echo(f"{nodes[0]} -> {nodes[1]} nodes; wrote {' and '.join(map(str, written))}")


def _show_float(kept: list[FloatWeight]) -> None:
    """List the largest weights that stay float."""
    if kept:
        echo(f"{len(kept)} {'weight stays' if len(kept) == 1 else 'weights stay'} float:")
    for weight in sorted(kept, key=lambda w: -math.prod(w.shape))[:_LISTED]:
        echo(f"  {weight.name} {list(weight.shape)}: {weight.reason}")
    if len(kept) > _LISTED:
        echo(f"  and {len(kept) - _LISTED} more; --json lists all")


def _show(rows: list[ErrorRow], large: list[ErrorRow]) -> None:
    table = _ERRORS.table()
    for row in rows:
        table.add(row.node, row.operator, row.value, "yes" if row.output else "", row.snr, row.own_snr, row.max_abs, row.mean_abs)
    show(table)
    for row in rows:
        if row.output:
            echo(f"output {row.value!r}: SNR {row.snr:.1f} dB, maximum error {row.max_abs:.6g}")
    if not large:
        return
    echo(f"{len(large)} {'node has a large error of its' if len(large) == 1 else 'nodes have large errors of their'} own:")
    for row in large[:_LISTED]:
        inputs = f"; inputs from {', '.join(row.sources)}" if row.sources else ""
        echo(f"  {row.node} ({row.operator}): own SNR {row.own_snr:.1f} dB{inputs}")
    if len(large) > _LISTED:
        echo(f"  and {len(large) - _LISTED} more")
    nodes = dict.fromkeys(n for row in large for n in (row.node, *row.sources))
    echo(
        f"hint: keep them and the nodes of their inputs float: --exclude {shlex.quote('|'.join(map(re.escape, nodes)))}",
        style="yellow",
    )
