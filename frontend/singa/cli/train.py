"""`sonnx train`: fine-tune an ONNX model on arrays."""

from __future__ import annotations

import itertools
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from singa_backend.errors import InvalidInput
from singa_backend.io.places import STANDARD_OUTPUT, check, is_regular

from ._common import (
    OUTPUT,
    SECONDS,
    SEED,
    FiniteNumber,
    OutputPath,
    check_places,
    collected,
    device_option,
    echo,
    err,
    exit_codes,
    json_option,
    model_argument,
    out,
    precision_option,
    processes_option,
    show,
    write_json,
    wrote,
)
from ._curves import Curve, check_plot, line, write_plot
from ._progress import Step, progress
from ._records import RecordOptions, record_options
from ._tables import NUMBER, WHOLE, Columns
from ._train_adapters import LORA, lora_options, node_pattern, with_base, writes_adapter
from ._train_data import BatchFunction, DataPath
from ._train_loss import check_labels, label_options, loss_option
from ._train_options import TrainOptions
from ._train_setup import (
    DISTRIBUTED,
    SCHEDULES,
    TrainSetup,
    freeze_option,
    optimizer_option,
    prepared,
    target_option,
    write_trained,
)
from ._workers import check_launcher, end_with_parent, run_workers

if TYPE_CHECKING:
    from .._training.fit import Position

_CURVES = Columns({"": WHOLE, "steps": NUMBER, "first loss": NUMBER, "last loss": NUMBER, "curve": WHOLE})


class _Train(click.Command):
    """A command that keeps its arguments, with which its workers are started."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        context.meta["arguments"] = list(args)
        return super().parse_args(context, args)


@click.command("train", cls=_Train)
@model_argument
@click.option(
    "--data",
    required=True,
    type=DataPath(),
    help="An .npz with an array for each input of the model, by name (or x), and the targets (y); or module:function.",
)
@click.option(
    "--validation",
    type=DataPath(),
    help="A second .npz or module:function, evaluated after each epoch.",
)
@click.option("--head", type=click.IntRange(1), metavar="N", help="Replace the last layer by a new one with N outputs.")
@click.option("--at", metavar="VALUE", help="Cut the model at this value, and put the new layer of --head there.")
@target_option
@loss_option
@label_options
@optimizer_option
@click.option("--lr", default=0.01, show_default=True, type=FiniteNumber(min=0), help="Learning rate.")
@click.option("--momentum", default=0.9, show_default=True, type=FiniteNumber(min=0), help="The momentum of sgd.")
@click.option("--weight-decay", type=FiniteNumber(min=0), show_default="0, for adamw 0.01", help="Decay of the parameters.")
@click.option(
    "--schedule",
    default=SCHEDULES[0],
    show_default=True,
    type=click.Choice(SCHEDULES),
    help="The learning rate after the warm-up; cosine falls by half a cosine, to 0 after the last step.",
)
@click.option(
    "--warmup",
    default=0,
    show_default=True,
    metavar="STEPS",
    type=click.IntRange(0),
    help="Steps with a rising rate, from 0.",
)
@click.option("--clip-norm", type=FiniteNumber(min=0, min_open=True), help="The bound of the norm of all gradients together.")
@click.option("--epochs", default=1, show_default=True, type=click.IntRange(1))
@click.option("--batch-size", default=32, show_default=True, type=click.IntRange(1))
@click.option(
    "--accumulate",
    default=1,
    show_default=True,
    metavar="N",
    type=click.IntRange(1),
    help="Batches of an update: their gradients are averaged. A step is N batches.",
)
@freeze_option
@lora_options
@click.option(
    "--train-constants", is_flag=True, help="Also train the constants of the model: factors, masks, tables (sonnx check --train)."
)
@click.option("--seed", default=0, show_default=True, type=SEED, help="The seed of the batch order and of dropout.")
@click.option("--output", "-o", "target_file", type=OUTPUT, help="Write the trained model here.")
@click.option(
    "--checkpoint",
    type=OutputPath(dir_okay=False, alone="--resume reads it"),
    help="Keep the state of the training in this file: after each epoch, at the end, and on Ctrl-C.",
)
@click.option("--every", type=click.IntRange(1), metavar="STEPS", help="Write the checkpoint after every STEPS steps instead.")
@click.option("--resume", is_flag=True, help="Continue at the checkpoint, with the same results as an uninterrupted training.")
@click.option(
    "--plot",
    type=OUTPUT,
    help="Draw the losses of training and validation as .html, or as .png (needs matplotlib).",
)
@collected("records", RecordOptions, record_options)
@processes_option(
    "--workers",
    default=1,
    show_default=True,
    help="Processes on this machine that share each batch (needs mpi4py).",
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
    type=FiniteNumber(min=0),
    help="The share (sparseTopK) or the magnitude (sparseThreshold) of the gradients that are exchanged.",
)
@click.option(
    "--sync-batch-norm", is_flag=True, help="Let BatchNormalization use the samples of all workers, not those of each worker."
)
@click.option(
    "--timeout", default=300.0, show_default=True, type=SECONDS, help="Seconds to wait for a worker before the training ends."
)
@click.option("--no-graph", is_flag=True, help="Run the steps on the tape instead of as one graph.")
@precision_option
@device_option
@json_option
@exit_codes
def command(**given: Any) -> None:
    """Fine-tune MODEL on the arrays of an .npz file, and write it with its new weights.

    The names, structure and opset of the model stay unchanged; only the values of its parameters and running statistics change.
    Constants of the model stay as they are: sonnx check --train lists them.

    With --lora, only low-rank changes of weights train.  -o OUT.safetensors, or OUT.onnx_adapter of onnxruntime, writes them
    alone, another OUT the model with them; next to its weights if these are quantized, as with --qlora.

    One of -o and --checkpoint is required.  A training that was stopped continues with the same command and --resume; --epochs,
    --lr, --momentum and --weight-decay may then differ.

    With --workers, or under mpiexec, several processes compute a share of each batch, and exchange gradients.
    """
    end_with_parent()
    chosen = TrainOptions(**given)
    context = click.get_current_context()
    _check_usage(chosen, context)
    if chosen.records.patience is not None and chosen.records.keep_best is None:
        chosen = replace(chosen, records=replace(chosen.records, keep_best="loss"))
    check_plot(chosen.plot)
    named = (chosen.checkpoint, chosen.target_file, chosen.records.metrics, chosen.records.tensorboard)
    chosen = replace(chosen, checkpoint=_target(chosen.checkpoint), target_file=_target(chosen.target_file))
    _check_files(chosen)
    with with_base(chosen) as chosen:
        _run(chosen, context.meta["arguments"], named)


def _run(chosen: TrainOptions, arguments: Sequence[str], named: Sequence[Path | None]) -> None:
    """Train, and write and print the results; or start the workers."""
    import numpy as np

    from singa_backend.collectives import LocalGroup, communicator, launched_size
    from singa_backend.collectives.communicator import total

    if chosen.workers > 1 and launched_size() == 1:
        check_launcher()
        prepared(chosen, LocalGroup(chosen.workers).ranks[0], starts=True)  # what a worker would refuse is refused here, once
        sys.exit(run_workers(chosen.workers, arguments, chosen.checkpoint))
    group = communicator(timeout=chosen.timeout) if launched_size() > 1 else None
    made = prepared(chosen, group)
    loop = _Loop(chosen, made)
    loop.run()
    loop.finish()
    if group:
        total(group, np.zeros(1))  # the end: a worker that is stuck before it ends the training by the timeout
    if made.first:
        _tell(chosen, made)
        if not chosen.as_json:
            wrote(*named)
            if chosen.qlora and writes_adapter(chosen):
                kept = "" if made.head is None else f" --exclude {shlex.quote(node_pattern(made.head))}"
                echo(f"the model of this adapter: sonnx quantize MODEL --weight-only {chosen.qlora}{kept} -o QUANTIZED")


class _Loop:
    """The steps of a training, with its checkpoint and its plot."""

    def __init__(self, chosen: TrainOptions, made: TrainSetup) -> None:
        self.chosen, self.made = chosen, made
        self.losses = made.at.history.losses
        self.written = len(self.losses) if chosen.resume else 0  # the step that the checkpoint holds
        self.received: list[int] = []  # the signals
        self.stops = 0  # those of all workers, at the last step
        self.begins = len(self.losses) - made.at.batch  # the first step of the epoch

    def run(self) -> None:
        """Run the steps; a signal, or Ctrl-C, ends the process."""
        from .._training.fit import stop_signals

        chosen, made = self.chosen, self.made
        with stop_signals(*(signal.SIGINT, signal.SIGTERM) if made.kept else ()) as self.received:
            try:
                left, quiet = made.steps and made.steps - len(self.losses), chosen.as_json or not made.first
                if isinstance(made.data, BatchFunction):
                    made.data.resume(made.at)
                made.records.begin(len(self.losses))
                with progress(left, "training", unit="steps", quiet=quiet) as step, suppress(_Enough):
                    self._look(made.at)
                    self._fit(step)
                if self.written < len(self.losses) or chosen.every:
                    self._keep()
                made.records.close()
            except (_Stopped, KeyboardInterrupt):
                self._stopped()
            except InvalidInput as error:
                self._failed(error)
                raise

    def _fit(self, step: Step) -> None:
        """Run the steps of all epochs."""
        from .._training.fit import Shares, accumulating, device_of, fit, loop

        chosen, made = self.chosen, self.made
        data, tell = made.data, partial(self._counted, step)
        measured = None if made.held_out is None else self._measured
        if isinstance(data, tuple):
            fit(made.model, *data, epochs=chosen.epochs, batch_size=chosen.batch_size, measure=measured,
                progress=tell, start=made.at, reached=self._reached, group=made.group)  # fmt: skip
            return
        device, group = device_of(made.model), made.group
        shares = Shares(group, accumulating(made.model), made.model.batch_weight)
        loop(made.model, lambda: data.batches(made.at, shares, group, device), made.at, epochs=chosen.epochs,
             measure=measured, progress=tell, reached=self._reached, shares=shares)  # fmt: skip

    def _counted(self, step: Step, text: str) -> None:
        """After a step: sum its measurements over the workers, and show the progress."""
        made = self.made
        self.stops = made.records.tally.close_step(made.group, len(self.received))
        accuracy = made.records.tally.accuracy(len(self.losses) - made.at.batch)
        step(text if accuracy is None else f"{text}, accuracy {accuracy:.3g}")

    def finish(self) -> None:
        """Write the model and the plot."""
        chosen, made = self.chosen, self.made
        if made.records.best:
            made.records.best.restore()
        if chosen.target_file and made.first:
            write_trained(chosen, made)
        self._draw()

    def _measured(self) -> dict[str, float]:
        """The measurements of the validation."""
        from .._training.fit import accuracy, device_of, evaluate
        from .._training.loader import ArrayLoader

        made = self.made
        assert made.held_out is not None
        inputs, targets = made.held_out
        classes = made.compute.counts_classes(targets)
        source = ArrayLoader(*inputs, targets, batch_size=self.chosen.batch_size, device=device_of(made.model))
        made.model.eval()
        return evaluate(made.model, source, len(inputs), {"accuracy": accuracy} if classes else {})

    def _reached(self, at: Position) -> None:
        """After a step or an epoch: write the checkpoint if it is due, and stop if a process has received a signal."""
        made, every = self.made, self.chosen.every
        ends_epoch = not at.batch
        if ends_epoch:
            made.records.epoch(at.history, self.begins)
            self.begins = len(self.losses)
        else:
            made.records.step(at.history, at.epoch + 1)
        stops = bool(self.stops) and made.kept is not None
        if stops or (ends_epoch if every is None else not ends_epoch and len(self.losses) % every == 0):
            self._keep()
        made.records.tick()
        if stops:
            raise _Stopped
        self._look(at)

    def _look(self, at: Position) -> None:
        """End the training if the validation has not improved for --patience epochs."""
        best, patience = self.made.records.best, self.chosen.records.patience
        if best is not None and patience is not None and best.epoch and not at.batch and at.epoch - best.epoch >= patience:
            raise _Enough

    def _keep(self) -> None:
        if self.made.kept:
            self.made.kept.write(self.made.at)
            self.written = len(self.losses)

    def _draw(self) -> None:
        chosen, made = self.chosen, self.made
        if chosen.plot and self.losses and made.first:
            write_plot(chosen.plot, _curves(chosen, made), f"{chosen.model.name}: {chosen.loss}")

    def _stopped(self) -> NoReturn:
        chosen, made = self.chosen, self.made
        with suppress(InvalidInput):
            self._draw()
        if made.first:
            point = f"step {len(self.losses)}" + (f" of {made.steps}" if made.steps else "")
            _tell_stopped(point, chosen.checkpoint, self.written, chosen.target_file)
        sys.exit(128 + (self.received[0] if self.received else signal.SIGINT))

    def _failed(self, error: InvalidInput) -> None:
        with suppress(InvalidInput):
            self._draw()
        kept = self.made.kept
        if error.code == "SX343" and kept and self.written > 0:
            error.hint = f"{error.hint}; {kept.path} holds step {self.written}: resume it with a lower --lr"


def _curves(chosen: TrainOptions, made: TrainSetup) -> dict[str, Curve]:
    """The losses of the training and of the validation."""
    found: dict[str, Curve] = {"training": list(enumerate(made.at.history.losses, 1))}
    if made.at.history.validation:
        found["validation"] = [
            (end, seen["loss"]) for end, seen in zip(_ends(chosen, made), made.at.history.validation, strict=False)
        ]
    return found


def _ends(chosen: TrainOptions, made: TrainSetup) -> list[int]:
    """The last step of each epoch."""
    import numpy as np

    if isinstance(made.data, BatchFunction):
        return [int(n) for n in np.cumsum(made.data.counts)]
    each = (made.steps or 0) // chosen.epochs
    return [each * (i + 1) for i in range(made.at.epoch)]


def _tell(chosen: TrainOptions, made: TrainSetup) -> None:
    """Print the losses and the measurements."""
    history, best = made.at.history, made.records.best
    ends = _ends(chosen, made)
    accuracies = [made.records.tally.accuracy(first, last) for first, last in itertools.pairwise([0, *ends])]
    share = made.model._share() if chosen.lora is not None else None
    if chosen.as_json:
        found = {"losses": history.losses, "validation": history.validation, "accuracy": accuracies}
        if best:
            found["best"] = {"epoch": best.epoch, "metric": best.metric, "value": best.value}
        if share:
            found["trained"], found["parameters"] = share
        write_json(found | ({"head": asdict(made.head)} if made.head else {}))
        return
    table = _CURVES.table()
    for name, curve in _curves(chosen, made).items():
        drawn = line(curve, out.encoding, max(8, min(60, out.width - 52)))
        table.add(name, curve[-1][0], curve[0][1], curve[-1][1], drawn)
    show(table)
    for i, accuracy in enumerate(accuracies):
        words = [] if accuracy is None else [f"accuracy {accuracy:.4g}"]
        words += [f"validation {n} {v:.4g}" for n, v in (history.validation[i] if history.validation else {}).items()]
        if words:
            echo(f"epoch {i + 1}: " + ", ".join(words))
    if best:
        echo(f"best epoch: {best.epoch}, validation {best.metric} {best.value:.4g}")
    if share:
        echo(f"trained {share[0]:,} of {share[1]:,} parameters ({share[0] / share[1]:.2%})")


def _check_usage(chosen: TrainOptions, context: click.Context) -> None:
    """Raise UsageError for options that are missing, contradict each other, or would have no effect."""
    from singa_backend.collectives import launched_size

    if not chosen.target_file and not chosen.checkpoint:
        raise click.UsageError("pass -o OUT to write the trained model, or --checkpoint PATH to keep the state of the training")
    launched = launched_size()
    if (chosen.workers > 1 or launched > 1) and STANDARD_OUTPUT in (chosen.target_file, chosen.plot):
        raise click.UsageError("-o and --plot must be files with --workers, got '-': the processes share standard output")
    needs = {
        "every": (chosen.checkpoint, "--checkpoint PATH"),
        "resume": (chosen.checkpoint, "--checkpoint PATH"),
        "at": (chosen.head, "--head N"),
        "momentum": (chosen.optimizer == "sgd", "--optimizer sgd"),
        "precision": (not chosen.no_graph, "steps that run as a graph: it has no effect with --no-graph"),
        "keep_best": (chosen.validation, "--validation DATA"),
        "patience": (chosen.validation, "--validation DATA"),
        "keep": (chosen.checkpoint, "--checkpoint PATH"),
        "sparsity": (chosen.dist_option.startswith("sparse"), "--dist-option sparseTopK or sparseThreshold"),
        **dict.fromkeys(LORA, (chosen.lora, "--lora RANK")),
        "dist_option": (chosen.workers > 1 or launched > 1 or chosen.dist_option == DISTRIBUTED[0], "--workers of at least 2"),
    }
    for name, (there, what) in needs.items():
        passed = context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None)
        if passed and getattr(chosen if hasattr(chosen, name) else chosen.records, name) and not there:
            raise click.UsageError(f"--{name.replace('_', '-')} needs {what}")
    if chosen.at is not None and chosen.lora is not None:
        write = "write the model with its new layer first, sonnx.replace_head(model, N, at=VALUE) in Python"
        raise click.UsageError(f"--at must be passed without --lora: {write}, and train that one with --lora")
    check_labels(chosen.loss, chosen.ignore_index, chosen.class_axis)
    if chosen.target_file and writes_adapter(chosen) and chosen.lora is None:
        raise click.UsageError(f"-o FILE{chosen.target_file.suffix} is the file of an adapter: it needs --lora RANK")
    if launched not in (1, chosen.workers) and chosen.workers > 1:
        raise click.UsageError(f"--workers {chosen.workers} must be the number of processes that mpiexec has started, {launched}")


def _check_files(chosen: TrainOptions) -> None:
    """Raise unless every file can be written, and none replaces another one of the command."""
    check_places(folders=[chosen.records.tensorboard])
    if chosen.records.metrics:
        check(chosen.records.metrics)
    sources = {"--data": chosen.data, "--validation": chosen.validation}
    read = {name: path for name, path in sources.items() if isinstance(path, Path)}
    written = {"-o": chosen.target_file, "--plot": chosen.plot, "--metrics": chosen.records.metrics}
    _check_distinct(read, written)
    _check_distinct({"MODEL": chosen.model, **read, "-o": chosen.target_file}, {"--metrics": chosen.records.metrics})
    _check_distinct({"MODEL": chosen.model, **read, **written}, {"--checkpoint": chosen.checkpoint})
    if chosen.checkpoint and os.path.exists(chosen.checkpoint) and not chosen.resume:
        raise click.UsageError(f"{chosen.checkpoint} exists: pass --resume to continue that training, or another path")
    if chosen.checkpoint and chosen.records.keep > 1 and not chosen.resume:
        from .._training.checkpoint import earlier

        for path in earlier(chosen.checkpoint).values():
            raise click.UsageError(f"{path} exists, a checkpoint of another training with this name: pass another --checkpoint")


def _check_distinct(others: Mapping[str, Path | None], written: Mapping[str, Path | None]) -> None:
    """Raise UsageError if a file that is written is another one of the command."""
    known = {os.path.realpath(path): name for name, path in others.items() if path}
    for flag, path in written.items():
        if path and is_regular(path) and (other := known.setdefault(os.path.realpath(path), flag)) != flag:
            raise click.UsageError(f"{flag} must differ from {other}, got {path}")


def _target(path: Path | None) -> Path | None:
    """The file that a link points to; raises InvalidInput if no file can be written there."""
    if path is None:
        return None
    check(path)
    return path.resolve() if is_regular(path) else path


class _Enough(Exception):
    """The validation has not improved for --patience epochs."""


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
