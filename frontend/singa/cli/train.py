"""`sonnx train`: fine-tune an ONNX model on arrays."""

from __future__ import annotations

import hashlib
import signal
import sys
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from onnx import GraphProto, ModelProto, TensorProto, numpy_helper

from singa_backend.archives import open_arrays
from singa_backend.collectives import communicator, launched_size
from singa_backend.collectives.communicator import total
from singa_backend.errors import InvalidInput, UnsupportedModel
from singa_backend.files import check, is_regular
from singa_backend.proto.load import load_model
from singa_backend.proto.save import save

from ._common import (
    SECONDS,
    SEED,
    Number,
    device_option,
    echo,
    err,
    exit_codes,
    json_option,
    out,
    progress,
    show,
    write_json,
    wrote,
)
from ._curves import Curve, check_plot, line, write_plot
from ._tables import NUMBER, WHOLE, Columns
from ._workers import run_workers

if TYPE_CHECKING:
    from .._onnx.model import SONNXModel
    from .._training.checkpoint import Checkpoint
    from .._training.fit import Position
    from ..opt import DistOpt

_CURVES = Columns({"": WHOLE, "steps": NUMBER, "first loss": NUMBER, "last loss": NUMBER, "curve": WHOLE})

LOSSES = ("softmax_cross_entropy", "mse_loss", "cross_entropy", "binary_cross_entropy")


SCHEDULES = ("constant", "cosine")

DISTRIBUTED = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


class _Train(click.Command):
    """A command that keeps its arguments, with which its workers are started."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta["arguments"] = list(args)
        return super().parse_args(context, args)


@click.command("train", cls=_Train)
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
@click.option("--optimizer", default="sgd", show_default=True, type=click.Choice(["sgd", "adam", "adamw", "rmsprop", "adagrad"]))
@click.option("--lr", default=0.01, show_default=True, type=Number(min=0), help="Learning rate.")
@click.option("--momentum", default=0.9, show_default=True, type=Number(min=0), help="The momentum of sgd.")
@click.option("--weight-decay", type=Number(min=0), show_default="0, for adamw 0.01", help="Decay of the parameters.")
@click.option(
    "--schedule",
    default=SCHEDULES[0],
    show_default=True,
    type=click.Choice(SCHEDULES),
    help="The learning rate after the warm-up; cosine falls to 0 at the last step of --epochs.",
)
@click.option(
    "--warmup",
    default=0,
    show_default=True,
    metavar="STEPS",
    type=click.IntRange(0),
    help="Steps with a rising rate, from 0.",
)
@click.option("--clip-norm", type=Number(min=0, min_open=True), help="The bound of the norm of all gradients together.")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(1))
@click.option("--freeze", multiple=True, metavar="PATTERN", help="Do not train parameters whose names match.")
@click.option("--seed", default=0, show_default=True, type=SEED, help="The seed of the batch order and of dropout.")
@click.option(
    "--output", "-o", "target_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the trained model here."
)
@click.option(
    "--checkpoint",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Keep the state of the training in this file: after each epoch, at the end, and on Ctrl-C.",
)
@click.option("--every", type=click.IntRange(1), metavar="STEPS", help="Write the checkpoint after every STEPS steps instead.")
@click.option("--resume", is_flag=True, help="Continue at the checkpoint, with the same results as an uninterrupted training.")
@click.option(
    "--plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Draw the losses of training and validation as .html, or as .png (needs matplotlib).",
)
@click.option(
    "--workers",
    default=1,
    show_default=True,
    type=click.IntRange(1, 1 << 16),
    help="Processes on this machine that share each batch, started by mpiexec (needs mpi4py).",
)
@click.option(
    "--dist-option",
    default=DISTRIBUTED[0],
    show_default=True,
    type=click.Choice(DISTRIBUTED),
    help="What the workers exchange: gradients, gradients as float16, a part of the parameters, the largest gradients.",
)
@click.option(
    "--sparsity",
    default=0.05,
    show_default=True,
    type=Number(min=0),
    help="The share (sparseTopK) or the magnitude (sparseThreshold) of the gradients that are exchanged.",
)
@click.option(
    "--timeout", default=300.0, show_default=True, type=SECONDS, help="Seconds to wait for a worker before the training ends."
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
    weight_decay: float | None,
    schedule: str,
    warmup: int,
    clip_norm: float | None,
    epochs: int,
    batch_size: int,
    freeze: tuple[str, ...],
    seed: int,
    target_file: Path | None,
    checkpoint: Path | None,
    every: int | None,
    resume: bool,
    plot: Path | None,
    workers: int,
    dist_option: str,
    sparsity: float,
    timeout: float,
    no_graph: bool,
    device: str,
    as_json: bool,
) -> None:
    """Fine-tune MODEL on the arrays of an .npz file, and write it with its new weights.

    The names, structure and opset of the model stay unchanged; only the values of its float initializers change.

    One of -o and --checkpoint is required.  A training that was stopped continues with the same command and --resume; --epochs,
    --lr, --momentum and --weight-decay may then differ.

    With --workers, or under mpiexec, several processes compute a share of each batch, and exchange gradients.
    """
    from .. import autograd, opt
    from .._core.tensor import Tensor
    from .._onnx.model import SONNXModel
    from .._training.checkpoint import Checkpoint
    from .._training.fit import Position, accuracy, batches, fit, stop_signals
    from ..device import resolve

    _check_usage(target_file, checkpoint, every, resume)
    if launched_size() not in (1, workers) and workers > 1:
        raise click.UsageError(f"--workers {workers} must be the number of processes that mpiexec has started, {launched_size()}")
    check_plot(plot)
    named = (checkpoint, target_file)
    target_file, checkpoint = (p and _target(p) for p in (target_file, checkpoint))
    _check_distinct({"--data": data, "--validation": validation}, {"-o": target_file, "--plot": plot})
    _check_distinct(
        {"MODEL": model, "--data": data, "--validation": validation, "-o": target_file, "--plot": plot},
        {"--checkpoint": checkpoint},
    )
    if checkpoint and checkpoint.exists() and not resume:
        raise click.UsageError(f"{checkpoint} exists: pass --resume to continue that training, or another path")
    if workers > 1 and launched_size() == 1:
        sys.exit(run_workers(workers, click.get_current_context().meta["arguments"], checkpoint))
    compute = getattr(autograd, loss)

    class Tuned(SONNXModel):
        def train_one_batch(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
            y = self.forward(*batch[:-1])[0]
            value = compute(y, batch[-1])
            update(value)
            return y, value

    group = communicator(timeout=timeout) if launched_size() > 1 else None
    first = group is None or group.rank == 0
    place = resolve(f"{device}:{group.local_rank}" if group and device.upper() == "CUDA" else device)
    place.SetRandSeed(seed + (group.rank if group else 0))
    tuned = Tuned(str(model), place)
    weight_decay = (0.01 if optimizer == "adamw" else 0.0) if weight_decay is None else weight_decay
    rules: dict[str, Callable[[], Any]] = {
        "sgd": lambda: opt.SGD(lr=lr, momentum=momentum, weight_decay=weight_decay),
        "adam": lambda: opt.Adam(lr=lr, weight_decay=weight_decay),
        "adamw": lambda: opt.AdamW(lr=lr, weight_decay=weight_decay),
        "rmsprop": lambda: opt.RMSProp(lr=lr, weight_decay=weight_decay),
        "adagrad": lambda: opt.AdaGrad(lr=lr, weight_decay=weight_decay),
    }
    rule: Any = rules[optimizer]()
    rule.clip_gradients(norm=clip_norm)
    if group:
        rule = opt.DistOpt(rule, communicator=group)
    update = _exchange(rule, dist_option, sparsity) if group else rule
    for pattern in freeze:
        tuned.freeze(pattern)
    empty, folder = _without_weights(model, tuned)
    xs, y = _arrays(data, tuned, target)
    held_out = _arrays(validation, tuned, target) if validation else None
    tuned.train()
    tuned.graph(not no_graph)

    def measure(scores: np.ndarray, targets: np.ndarray) -> dict[str, float]:
        found = {"loss": float(compute(Tensor(data=scores), Tensor(data=targets)).data.reshape(-1)[0])}
        if loss == LOSSES[0] and targets.ndim == 1:
            found["accuracy"] = accuracy(scores, targets)
        return found

    steps = batches(len(y), batch_size, epochs)
    if warmup >= steps:
        raise click.UsageError(f"--warmup must be below the number of steps, {steps}, got {warmup}")
    falling = opt.CosineDecay(lr, steps - warmup) if schedule == "cosine" else lr
    rule.lr = opt.WarmUp(falling, warmup) if warmup else falling
    at = Position(np.random.default_rng(seed))
    kept: Checkpoint | None = None
    if checkpoint:
        settings = {
            "MODEL": _digest([_structure(empty), *(place.backend.get(t.data) for t in tuned.imported._constants.values())]),
            "--data": _digest([*xs, y]),
            "--validation": _digest([*held_out[0], held_out[1]]) if held_out else "none",
            "--loss": loss,
            "--optimizer": f"{optimizer} without momentum" if optimizer == "sgd" and not momentum else optimizer,
            "--batch-size": str(batch_size),
            "--freeze": ", ".join(sorted(freeze)) or "none",
            "--seed": str(seed),
            **({"--schedule": schedule} if schedule != SCHEDULES[0] else {}),
            **({"--warmup": str(warmup)} if warmup else {}),
            **({"--clip-norm": repr(clip_norm)} if clip_norm is not None else {}),
            **({"--workers": str(group.size), "--dist-option": _exchanged(dist_option, sparsity)} if group else {}),
        }
        rates = {"--lr": repr(lr), "--momentum": repr(momentum), "--weight-decay": repr(weight_decay)}
        if schedule != SCHEDULES[0]:
            rates["--epochs"] = str(epochs)
        kept = Checkpoint(checkpoint, tuned, rule, place, settings, rates, group)
    if kept and resume:
        at = kept.read(len(y), batch_size)
        reached = f"epoch {at.epoch + 1}, step {len(at.history.losses)}" if at.batch else f"the end of epoch {at.epoch}"
        if (at.epoch, at.batch) > (epochs, 0):
            raise click.UsageError(f"--epochs {epochs} is before the point of the checkpoint: {reached}")
        changes = "".join(f"; {n} was {was}, is {rates[n]}" for n, was in kept.changed.items())
        if first:
            err.print(f"resumed {kept.path} at {reached}{changes}", markup=False, highlight=False, soft_wrap=True)
    losses = at.history.losses
    written = len(losses) if resume else 0  # the step that the checkpoint holds

    def keep() -> None:
        nonlocal written
        if kept:
            kept.write(at)
            written = len(losses)

    def curves() -> dict[str, Curve]:
        found: dict[str, Curve] = {"training": list(enumerate(losses, 1))}
        if at.history.validation:
            found["validation"] = [((i + 1) * steps // epochs, seen["loss"]) for i, seen in enumerate(at.history.validation)]
        return found

    def draw() -> None:
        if plot and losses and first:
            write_plot(plot, curves(), f"{model.name}: {loss}")

    with stop_signals(*(signal.SIGINT, signal.SIGTERM) if kept else ()) as received:

        def reached_point(_: Position) -> None:
            ends_epoch = at.order is None
            stops = bool(total(group, np.array([len(received)]))[0]) if group and kept else bool(received)
            if stops or (ends_epoch if every is None else not ends_epoch and len(losses) % every == 0):
                keep()
            if stops:
                raise _Stopped

        try:
            with progress(steps - len(losses), "training", quiet=as_json or not first) as step:
                fit(tuned, xs, y, epochs=epochs, batch_size=batch_size, validation=held_out, evaluate=measure,
                    progress=lambda text: step(text), start=at, reached=reached_point, group=group)  # fmt: skip
            if written < len(losses) or every:
                keep()
        except (_Stopped, KeyboardInterrupt):
            with suppress(InvalidInput):
                draw()
            if first:
                _tell_stopped(f"step {len(losses)} of {steps}", checkpoint, written, target_file)
            sys.exit(128 + (received[0] if received else signal.SIGINT))
        except InvalidInput as error:
            with suppress(InvalidInput):
                draw()
            if error.code == "SX343" and kept and written > 0:
                error.hint = f"{kept.path} holds step {written}: resume it with a lower --lr"
            raise
    if target_file and first:
        save(updated(empty, tuned), target_file, folder=folder, check=False)
    draw()
    if group:
        total(group, np.zeros(1))  # the end: a worker that is stuck before it ends the training by the timeout
    if not first:
        return
    if as_json:
        write_json({"losses": losses, "validation": at.history.validation})
        return
    table = _CURVES.table()
    for name, curve in curves().items():
        drawn = line(curve, out.encoding, max(8, min(60, out.width - 52)))
        table.add(name, curve[-1][0], curve[0][1], curve[-1][1], drawn)
    show(table)
    for i, seen in enumerate(at.history.validation):
        echo(f"epoch {i + 1}: " + ", ".join(f"validation {n} {v:.4g}" for n, v in seen.items()))
    wrote(*named)


def _exchange(rule: DistOpt, dist_option: str, sparsity: float) -> Callable[[Any], None]:
    """The training call of a `--dist-option`."""
    calls: dict[str, Callable[[Any], None]] = {
        "plain": rule.backward_and_update,
        "half": rule.backward_and_update_half,
        "partialUpdate": rule.backward_and_partial_update,
        "sparseTopK": partial(rule.backward_and_sparse_update, spars=sparsity, topK=True),
        "sparseThreshold": partial(rule.backward_and_sparse_update, spars=sparsity),
    }
    return calls[dist_option]


def _exchanged(dist_option: str, sparsity: float) -> str:
    """A `--dist-option` with its argument."""
    return f"{dist_option} {sparsity!r}" if dist_option.startswith("sparse") else dist_option


def _check_usage(target_file: Path | None, checkpoint: Path | None, every: int | None, resume: bool) -> None:
    if not target_file and not checkpoint:
        raise click.UsageError("pass -o OUT to write the trained model, or --checkpoint PATH to keep the state of the training")
    for flag, value in (("--every", every), ("--resume", resume)):
        if value and not checkpoint:
            raise click.UsageError(f"{flag} needs --checkpoint PATH")


def _check_distinct(others: dict[str, Path | None], written: dict[str, Path | None]) -> None:
    """Raise UsageError if a file that is written is another one of the command."""
    known = {path.resolve(): name for name, path in others.items() if path}
    for flag, path in written.items():
        if path and is_regular(path) and (other := known.setdefault(path.resolve(), flag)) != flag:
            raise click.UsageError(f"{flag} must differ from {other}, got {path}")


def _target(path: Path) -> Path:
    """The file that a link points to; raises InvalidInput if no file can be written there."""
    check(path)
    return path.resolve() if is_regular(path) else path


class _Stopped(Exception):
    """A signal has arrived, and the step that ran then is complete."""


def _tell_stopped(point: str, checkpoint: Path | None, written: int, target_file: Path | None) -> None:
    if not checkpoint:
        parts = ["with --checkpoint PATH, it could be continued"]
    elif written:
        parts = [f"{checkpoint} holds step {written}: continue with the same command and --resume"]
    else:
        parts = [f"{checkpoint} is not written"]
    parts += [f"{target_file} is not written"] * bool(target_file)
    err.print(f"stopped after {point}; {'; '.join(parts)}", markup=False, highlight=False, soft_wrap=True, style="yellow")


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


def _without_weights(path: Path, model: SONNXModel) -> tuple[ModelProto, Path | None]:
    """The model without the data of its trained tensors, and its folder; raises UnsupportedModel if it has no place for some."""
    proto, folder = load_model(path)
    names = set(model.get_states())
    for sparse in [t for t in proto.graph.sparse_initializer if t.values.name in names]:
        proto.graph.initializer.add(name=sparse.values.name)
        proto.graph.sparse_initializer.remove(sparse)
    found = set()
    for name, tensor in _stored(proto.graph, names):
        found.add(name)
        tensor.CopyFrom(TensorProto(name=tensor.name))
    if names - found:
        raise UnsupportedModel(f"the trained values of {', '.join(sorted(names - found)[:5])} cannot be written into the model")
    return proto, folder


def _stored(graph: GraphProto, names: Container[str]) -> Iterator[tuple[str, TensorProto]]:
    """The tensors of these names: initializers, and Constant nodes under the name of their output."""
    for tensor in graph.initializer:
        if tensor.name in names:
            yield tensor.name, tensor
    for node in graph.node:
        if node.op_type == "Constant" and node.domain in ("", "ai.onnx") and node.output[0] in names:
            yield from ((node.output[0], a.t) for a in node.attribute if a.name == "value")


def updated(proto: ModelProto, model: SONNXModel) -> ModelProto:
    """Write the current values of the parameters and running statistics into a model of `_without_weights`, and return it."""
    states = model.get_states()
    for name, tensor in _stored(proto.graph, states):
        value = states[name]
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value.device.backend.get(value.data)), tensor.name))
    return proto


def _structure(proto: ModelProto) -> np.ndarray:
    """The bytes of a model without the data of its initializers."""
    bare = ModelProto()
    bare.CopyFrom(proto)
    for tensor in bare.graph.initializer:
        tensor.CopyFrom(TensorProto(name=tensor.name))
    return np.frombuffer(bare.SerializeToString(deterministic=True), np.uint8)


def _digest(arrays: Sequence[Any]) -> str:
    """The identity of arrays: their dtypes, shapes and values."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str} {array.shape} ".encode())
        strings = array.dtype == object
        found.update(repr(array.tolist()).encode() if strings else np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return f"sha256:{found.hexdigest()}"
