"""`sonnx train`: fine-tune an ONNX model on arrays."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from onnx import ModelProto, numpy_helper
from rich.table import Table

from singa_backend.archives import open_arrays
from singa_backend.errors import InvalidInput, MissingDependency
from singa_backend.proto.load import load_model
from singa_backend.proto.save import save

from ._common import SEED, Number, check_target, device_option, echo, exit_codes, json_option, out, progress

if TYPE_CHECKING:
    from .._onnx.model import SONNXModel

LOSSES = ("softmax_cross_entropy", "mse_loss", "cross_entropy", "binary_cross_entropy")


@click.command("train")
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An .npz with an array for each input of the model, by name (or x), and the targets (y).",
)
@click.option(
    "--validation",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A second .npz, evaluated after each epoch.",
)
@click.option("--target", default="y", show_default=True, help="The name of the targets in the .npz.")
@click.option("--loss", default=LOSSES[0], show_default=True, type=click.Choice(LOSSES))
@click.option("--optimizer", default="sgd", show_default=True, type=click.Choice(["sgd", "adam", "rmsprop", "adagrad"]))
@click.option("--lr", default=0.01, show_default=True, type=Number(min=0), help="Learning rate.")
@click.option("--momentum", default=0.9, show_default=True, type=Number(min=0), help="The momentum of sgd.")
@click.option("--weight-decay", default=0.0, show_default=True, type=Number(min=0))
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(1))
@click.option("--freeze", multiple=True, metavar="PATTERN", help="Do not train parameters whose names match.")
@click.option("--seed", default=0, show_default=True, type=SEED, help="The seed of the batch order and of dropout.")
@click.option(
    "--output", "-o", "target_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the trained model here."
)
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Write the losses as .html, or as .png (needs matplotlib)."
)
@click.option("--no-graph", is_flag=True, help="Run the steps on the tape instead of as one graph.")
@device_option
@json_option
@exit_codes
def command(
    model: Path,
    data: Path,
    validation: Path | None,
    target: str,
    loss: str,
    optimizer: str,
    lr: float,
    momentum: float,
    weight_decay: float,
    epochs: int,
    batch_size: int,
    freeze: tuple[str, ...],
    seed: int,
    target_file: Path | None,
    plot: Path | None,
    no_graph: bool,
    device: str,
    as_json: bool,
) -> None:
    """Fine-tune MODEL on the arrays of an .npz file, and write it with its new weights.

    The names, structure and opset of the model stay unchanged; only the values of its float initializers change.
    """
    from .. import autograd, opt
    from .._core.tensor import Tensor
    from .._onnx.model import SONNXModel
    from .._training.fit import accuracy, batches, fit
    from ..device import resolve

    _check_plot(plot)
    if plot:
        check_target(plot)
    if target_file:
        check_target(target_file)
        target_file = target_file.resolve()  # a link keeps pointing to the file that is written
    compute = getattr(autograd, loss)

    class Tuned(SONNXModel):
        def train_one_batch(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
            y = self.forward(*batch[:-1])[0]
            value = compute(y, batch[-1])
            rule(value)
            return y, value

    place = resolve(device)
    place.SetRandSeed(seed)
    tuned = Tuned(str(model), place)
    rules: dict[str, Callable[[], Any]] = {
        "sgd": lambda: opt.SGD(lr=lr, momentum=momentum, weight_decay=weight_decay),
        "adam": lambda: opt.Adam(lr=lr, weight_decay=weight_decay),
        "rmsprop": lambda: opt.RMSProp(lr=lr, weight_decay=weight_decay),
        "adagrad": lambda: opt.AdaGrad(lr=lr, weight_decay=weight_decay),
    }
    rule = rules[optimizer]()
    for pattern in freeze:
        tuned.freeze(pattern)
    xs, y = _arrays(data, tuned, target)
    held_out = _arrays(validation, tuned, target) if validation else None
    tuned.train()
    tuned.graph(not no_graph)

    def measure(scores: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        found = {"loss": float(compute(Tensor(data=scores), Tensor(data=targets)).data.reshape(-1)[0])}
        if loss == LOSSES[0] and targets.ndim == 1:
            found["accuracy"] = accuracy(scores, targets)
        return found

    with progress(batches(len(y), batch_size, epochs), "training", quiet=as_json) as step:
        history = fit(
            tuned,
            xs,
            y,
            epochs=epochs,
            batch_size=batch_size,
            seed=seed,
            validation=held_out,
            evaluate=measure,
            progress=lambda text: step(text),
        )
    if target_file:
        proto, folder = load_model(model)
        save(updated(proto, tuned), target_file, folder=folder, check=False)
    if plot:
        _plot(plot, history.losses, f"{model.name}: {loss}")
    if as_json:
        click.echo(json.dumps({"losses": history.losses, "validation": history.validation}))
        return
    table = Table("", "steps", "first loss", "last loss")
    table.add_row("training", str(len(history.losses)), f"{history.losses[0]:.6g}", f"{history.losses[-1]:.6g}")
    out.print(table)
    for i, seen in enumerate(history.validation):
        echo(f"epoch {i + 1}: " + ", ".join(f"validation {n} {v:.4g}" for n, v in seen.items()))
    if target_file:
        echo(f"wrote {target_file}")


def _arrays(path: Path, model: SONNXModel, target: str) -> tuple[list[np.ndarray], np.ndarray]:
    """Read the inputs, in the model's order, and the targets from an .npz file."""
    with open_arrays(path, "SX307") as stored:
        inputs = model.imported.graph.inputs
        names = [v.name for v in inputs]
        if len(names) == 1 and names[0] not in stored.names and "x" in stored.names:
            names = ["x"]
        lacking = [n for n in (*names, target) if n not in stored.names]
        if lacking:
            what = f"{path} must contain {', '.join(map(repr, lacking))}, got {', '.join(map(repr, stored.names)) or 'no arrays'}"
            raise InvalidInput(what, code="SX331", hint="save the arrays by name: np.savez(path, x=..., y=...)")
        headers = {n: stored.header(n) for n in (*names, target)}
        for n, (shape, dtype) in headers.items():
            if dtype.kind in "SU" or not shape:
                raise InvalidInput(
                    f"{path}: {n!r} must be numbers with the samples along axis 0, got {dtype}{list(shape)}", code="SX331"
                )
        arrays = {n: stored[n] for n in headers}
    found = [
        a if v.dtype is None or a.dtype == v.dtype else a.astype(v.dtype)
        for n, v in zip(names, inputs, strict=True)
        for a in [arrays[n]]
    ]
    return found, arrays[target]


def updated(proto: ModelProto, model: SONNXModel) -> ModelProto:
    """Return the model with the current values of its parameters and running statistics."""
    states = model.get_states()
    result = ModelProto()
    result.CopyFrom(proto)
    for tensor in result.graph.initializer:
        if tensor.name in states:
            value = states[tensor.name]
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value.device.backend.get(value.data)), tensor.name))
    return result


def _check_plot(plot: Path | None) -> None:
    """Raise before the training, not after it."""
    if plot is None or plot.suffix == ".html":
        return
    if plot.suffix != ".png":
        raise InvalidInput(f"a plot must be .html or .png, got {plot.suffix or plot.name!r}", code="SX332")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingDependency("a .png needs matplotlib", hint="pip install 'sonnx[plot]', or use an .html file") from None


def _plot(path: Path, losses: list[float], title: str) -> None:
    if path.suffix == ".html":
        path.write_text(page(losses, title), encoding="utf-8")
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def page(losses: list[float], title: str) -> str:
    """Return the losses as a self-contained page with one drawing."""
    from html import escape

    width, height, left, bottom = 800, 360, 64, 40
    low, high = min(losses), max(losses)
    span = (high - low) or 1.0

    def at(i: int, value: float) -> str:
        x = left + (width - left - 12) * (i / max(len(losses) - 1, 1))
        return f"{x:.1f},{12 + (height - bottom - 12) * (1 - (value - low) / span):.1f}"

    points = " ".join(at(i, v) for i, v in enumerate(losses))
    marks = "".join(
        f'<text x="{left - 8}" y="{float(at(0, v).split(",")[1]) + 4:.1f}" text-anchor="end">{v:.4g}</text>'
        f'<line x1="{left}" x2="{width - 12}" y1="{at(0, v).split(",")[1]}" y2="{at(0, v).split(",")[1]}" class="grid"/>'
        for v in (low + span * k / 4 for k in range(5))
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>body {{ font: 15px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 52rem; padding: 0 1rem }}
svg {{ width: 100%; height: auto }} text {{ font-size: 13px; fill: #444 }}
.grid {{ stroke: #ddd }} polyline {{ fill: none; stroke: #1f5fa8; stroke-width: 2 }}</style></head>
<body><h1>{escape(title)}</h1>
<svg viewBox="0 0 {width} {height}" role="img" aria-label="loss by step">{marks}
<polyline points="{points}"/><text x="{left}" y="{height - 12}">step 1</text>
<text x="{width - 12}" y="{height - 12}" text-anchor="end">step {len(losses)}</text></svg>
<p>{len(losses)} steps: first loss {losses[0]:.6g}, last {losses[-1]:.6g}, lowest {low:.6g}.</p></body></html>
"""
