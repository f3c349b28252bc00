"""The training loop, evaluation and prediction: batches in a seeded order, one step for each, and the losses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from singa_backend.collectives import Communicator
from singa_backend.collectives.communicator import total
from singa_backend.errors import InvalidInput

from .._core import tape
from .._core.tensor import Tensor
from ..device import Device
from .best import KeepBest
from .loader import ArrayLoader, Order, positive


class Trainable(Protocol):
    """The methods of a Model that `fit` and `predict` use."""

    def __call__(self, *input: Any) -> Any: ...

    def forward(self, *input: Any) -> Any: ...

    def train_one_batch(self, *input: Any) -> Any: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def get_states(self) -> dict[str, Tensor]: ...


@dataclass
class History:
    """The measurements of a training.

    Attributes:
        losses: The loss of each step.
        validation: The measurements after each epoch: the loss, and the accuracy if the targets are class numbers.
        epochs: The mean of the losses of each epoch.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)


@dataclass
class Position(Order):
    """The point that a run of `fit` has reached.

    Attributes:
        rng: The generator of the orders.
        batch: The number of finished steps of the current epoch.
        order: The order of the samples in the current epoch; None before its first step.
        epoch: The number of finished epochs, those with their validation.
        history: The measurements so far.
    """

    epoch: int = 0
    history: History = field(default_factory=History)


def fit(
    model: Trainable,
    x: Any,
    y: Any,
    *,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    validation: tuple[Any, Any] | None = None,
    evaluate: Callable[[Any, Any], dict[str, float]] | None = None,
    progress: Callable[..., None] | None = None,
    stop_at_nan: bool = True,
    start: Position | None = None,
    reached: Callable[[Position], None] | None = None,
    group: Communicator | None = None,
) -> History:
    """Train a compiled model on arrays.

    Args:
        model: A Model whose `train_one_batch(*x, y)` returns (output, loss).
        x: An array with the samples along axis 0, or a list of several.
        y: The targets, an array with the samples along axis 0.
        epochs: The number of passes over the samples.
        batch_size: The number of samples in a batch; the last batch of an epoch may be smaller.
        seed: The seed of the order of samples: the same seed produces the same batches in the same order.
        validation: Inputs and targets to evaluate after each epoch.
        evaluate: Computes measurements from the output for the validation inputs and from the targets.
        progress: Called with a line of text after each step.
        stop_at_nan: Whether to stop if the loss is NaN or infinite.
        start: The point at which to continue; None for the beginning.
        reached: Called with the point after each step, and after each epoch; it may raise to stop there.
        group: The ranks that train together, each on its share of every batch; None for one process.

    Returns:
        The losses and the measurements.

    Raises:
        InvalidInput: The numbers of samples differ, or `epochs` or `batch_size` is below 1, or the ranks
            cannot share a batch equally (SX342); or the loss is NaN or
            infinite (SX343): its step has then updated the parameters.
    """
    xs = list(x) if isinstance(x, (list, tuple)) else [x]
    ranks = group.size if group else 1
    loader = ArrayLoader(*xs, y, batch_size=batch_size, shuffle=True, device=device_of(model))
    check_shares(batch_size, ranks)
    place = start or Position(np.random.default_rng(seed))
    loader._start(place)

    def batches() -> Iterator[tuple[Tensor, ...]]:
        for rows in loader._rows():
            assert place.order is not None
            yield loader._batch(share(rows, place.order, group.rank, ranks) if group else rows, loader.device)

    def mean(value: float) -> float:
        return float(total(group, np.array([value]))[0]) / ranks if group and ranks > 1 else value

    def measure() -> dict[str, float]:
        assert validation is not None and evaluate is not None
        inputs = validation[0] if isinstance(validation[0], (list, tuple)) else [validation[0]]
        model.eval()
        source = ArrayLoader(*inputs, batch_size=batch_size, device=loader.device)
        return evaluate(predict(model, source, len(inputs))[0], validation[1])

    measured = measure if validation is not None and evaluate is not None else None
    return loop(model, batches, place, epochs=epochs, measure=measured, progress=progress, stop_at_nan=stop_at_nan,
                reached=reached, mean=mean)  # fmt: skip


def loop(
    model: Trainable,
    batches: Callable[[], Iterable[Sequence[Any]]],
    place: Position,
    *,
    epochs: int,
    measure: Callable[[], dict[str, float]] | None = None,
    progress: Callable[..., None] | None = None,
    stop_at_nan: bool = True,
    reached: Callable[[Position], None] | None = None,
    mean: Callable[[float], float] = float,
) -> History:
    """Train a model on the batches of several epochs.

    Args:
        model: A Model whose `train_one_batch` returns the loss, or (output, loss).
        batches: Returns the batches of an epoch; those that remain, if `place` is in an epoch.
        place: The point at which to begin, which is advanced.
        epochs: The number of epochs, those before `place` included.
        measure: Computes the measurements after an epoch.
        progress: Called with a line of text after each step.
        stop_at_nan: Whether to stop if the loss is NaN or infinite.
        reached: Called with the point after each step, and after each epoch; it may raise to stop there.
        mean: Computes the loss of the batch from that of this process.

    Returns:
        The history of `place`.

    Raises:
        InvalidInput: `epochs` is below 1, or an epoch has no batch (SX342); `train_one_batch` does not return a loss (SX387); or
            the loss is NaN or infinite (SX343): its step has then updated the parameters.
    """
    positive("epochs", epochs)
    tell = reached or (lambda _: None)
    history = place.history
    while place.epoch < epochs:
        model.train()
        first = len(history.losses) - place.batch
        for batch in batches():
            value = mean(number(outcome(model(*batch))[1]))
            history.losses.append(value)
            place.batch = len(history.losses) - first
            if progress is not None:
                progress(f"epoch {place.epoch + 1}/{epochs}, loss {value:.4g}")
            if stop_at_nan and not np.isfinite(value):
                raise InvalidInput(
                    f"the loss of step {len(history.losses)} must be finite, got {value}",
                    code="SX343",
                    hint="lower the learning rate; `sonnx compare` finds the first node with NaN",
                )
            tell(place)
        if len(history.losses) == first:
            hint = "pass an ArrayLoader, or a list of batches: an iterator has batches for one epoch only"
            raise InvalidInput(f"epoch {place.epoch + 1} must have at least one batch, got none", code="SX342", hint=hint)
        if measure is not None:
            history.validation.append(measure())
        history.epochs.append(float(np.mean(history.losses[first:])))
        place.epoch, place.batch, place.order = place.epoch + 1, 0, None
        tell(place)
    return history


class Ended(Exception):
    """A callback of `fit` ends the training before the last epoch."""


def after_step(
    callbacks: Sequence[Callable[[History], Any]], received: Sequence[Any], epochs: int | None
) -> Callable[[Position], None]:
    """What `fit` does after each step and each epoch; `epochs` is None if it prints no lines."""

    def reached(place: Position) -> None:
        if not place.batch:
            if epochs is not None:
                print(_epoch_line(place.epoch, epochs, place.history))
            if sum(answer is True or answer is np.True_ for answer in [ask(place.history) for ask in callbacks]):
                raise Ended
        if received:
            raise KeyboardInterrupt

    return reached


def _epoch_line(epoch: int, epochs: int, history: History) -> str:
    """The line that `fit` prints after an epoch."""
    seen = history.validation[-1].items() if history.validation else ()
    return ", ".join([f"epoch {epoch}/{epochs}: loss {history.epochs[-1]:.6g}", *(f"validation {n} {v:.6g}" for n, v in seen)])


def outcome(made: Any) -> tuple[Any, Tensor]:
    """The output, or None, and the loss that a step has returned; raises InvalidInput for other results."""
    out, loss = made if isinstance(made, (list, tuple)) and len(made) == 2 else (None, made)
    if not isinstance(loss, Tensor) or loss.size() != 1:
        got = f"a loss of shape {loss.shape}" if isinstance(loss, Tensor) else f"a {type(made).__name__}"
        what = f"train_one_batch must return the loss, a Tensor of one element, or (output, loss), got {got}"
        raise InvalidInput(what, code="SX387")
    return out, loss


def number(t: Tensor) -> float:
    """The value of a tensor of one element."""
    return float(np.asarray(t.device.backend.get(t.data)).reshape(-1)[0])


def check_shares(batch_size: int, ranks: int) -> None:
    """Raise InvalidInput unless the ranks can share a batch equally."""
    if batch_size % ranks:
        what = f"batch_size must be a multiple of the number of workers, got {batch_size} for {ranks}"
        raise InvalidInput(what, code="SX342", hint="each worker computes an equal share of every batch")


def share(rows: np.ndarray, order: np.ndarray, rank: int, size: int) -> np.ndarray:
    """The rows of a batch that one rank computes; all ranks have equally many.

    Args:
        rows: The rows of the batch.
        order: The order of all rows in this epoch; a batch that cannot be divided is completed by its first ones.
        rank: The rank.
        size: The number of ranks.
    """
    each = -(-len(rows) // size)
    whole = np.concatenate([rows, np.resize(order, each * size - len(rows))])
    return whole[rank * each : (rank + 1) * each]


def predict(model: Trainable, source: Any, count: int | None = None) -> list[np.ndarray]:
    """Compute the outputs of a model for all samples, in the mode that it is in.

    Args:
        model: The model.
        source: An ArrayLoader, whose samples are taken in the order of the arrays, or batches.
        count: The number of inputs of the model: further values of a batch, such as targets, are not used; None for all.

    Returns:
        Each output, joined along axis 0.

    Raises:
        InvalidInput: A result is not a Tensor or several, or an output does not have the samples along axis 0 (SX387); or there
            is no batch (SX342).
    """
    parts: list[list[np.ndarray]] = []
    rows: list[int] = []
    for batch in in_order(source, device_of(model)):
        made = model.forward(*batch[:count])
        ys = list(made) if isinstance(made, (list, tuple)) else [made]
        parts.append([arrayed(y, "forward must return a Tensor, or a list of Tensors") for y in ys])
        rows.append(len(batch[0]) if len(batch[0].shape) else 1)
    if not parts:
        raise InvalidInput("there must be at least one batch, got none", code="SX342")
    if len(parts) == 1:
        return parts[0]
    for found, n in zip(parts, rows, strict=True):
        for i, a in enumerate(found):
            if not a.ndim or len(a) != n or len(found) != len(parts[0]):
                what = f"output {i} must have the {n} samples of the batch along axis 0, got shape {a.shape}"
                raise InvalidInput(what, code="SX387", hint="pass a batch_size of all samples for the output of one batch")
    return [np.concatenate(ys) for ys in zip(*parts, strict=True)]


def evaluate(
    model: Trainable, source: Any, count: int | None, metrics: Mapping[str, Callable[[Any, Any], float]] | None
) -> dict[str, float]:
    """Compute the loss of a model, by its training step without an update, and metrics, in the mode that it is in.

    Args:
        model: The model.
        source: An ArrayLoader, whose samples are taken in the order of the arrays, or batches; the last value of a batch has the
            targets.
        count: The number of inputs of the model; None for all values but the last.
        metrics: Functions of the output and the targets of all samples; None for the accuracy, if the targets are class numbers.

    Returns:
        "loss", the mean over the samples, and the metrics by name.

    Raises:
        InvalidInput: The step does not return a loss (SX387), or there is no batch (SX342).
    """
    losses: list[float] = []
    rows: list[int] = []
    scores: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for batch in in_order(source, device_of(model)):
        with tape.measuring():
            out, loss = outcome(model.train_one_batch(*batch))
        losses.append(number(loss))
        target = arrayed(batch[-1], "a batch must have Tensors")
        rows.append(len(target) if target.ndim else 1)
        if metrics is None and (target.dtype.kind not in "iu" or target.ndim != 1):
            continue
        if out is None:
            out = model.forward(*batch[: len(batch) - 1 if count is None else count])
        out = out[0] if isinstance(out, (list, tuple)) and out else out
        scores.append(arrayed(out, "forward must return a Tensor, or a list of Tensors"))
        targets.append(target)
    if not losses:
        raise InvalidInput("there must be at least one batch, got none", code="SX342")
    found = {"loss": float(np.average(losses, weights=rows))}
    if scores:
        every, wanted = np.concatenate(scores), np.concatenate(targets)
        if metrics is None:
            metrics = {"accuracy": accuracy} if every.ndim == 2 and every.shape[1] > 1 else {}
        found |= {name: _measured(name, metric(every, wanted)) for name, metric in metrics.items()}
    return found


def check_metrics(metrics: Any) -> None:
    """Raise InvalidInput unless `metrics` is None, or functions by names other than that of the loss."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or not all(isinstance(n, str) and callable(f) for n, f in metrics.items()):
        raise InvalidInput(f"metrics must be a dict of functions by name, got {metrics!r}", code="SX342")
    if "loss" in metrics:
        raise InvalidInput("a metric must have another name than the loss, got 'loss'", code="SX342")


def _measured(name: str, value: Any) -> float:
    """The value of a metric; raises InvalidInput unless it is one number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        got = f"an array of shape {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"
        raise InvalidInput(f"the metric {name!r} must return a number, got {got}", code="SX342") from None


def in_order(source: Any, device: Device | None) -> Iterator[Sequence[Any]]:
    """The batches of an epoch: of an ArrayLoader all samples in the order of the arrays."""
    if isinstance(source, ArrayLoader):
        return (source._batch(rows, source.device or device) for rows in source._in_order())
    return tensors(source, device)


def one_epoch(source: Any, device: Device | None) -> Iterator[Sequence[Any]]:
    """The batches of an epoch, for a training."""
    if isinstance(source, ArrayLoader):
        return (source._batch(rows, source.device or device) for rows in source._rows())
    return tensors(source, device)


def tensors(batches: Iterable[Any], device: Device | None) -> Iterator[Sequence[Any]]:
    """The batches of another source; arrays become Tensors."""
    for batch in batches:
        if not isinstance(batch, (list, tuple)):
            hint = "pass the arrays of all samples as a tuple" if hasattr(batch, "__array__") else ""
            raise InvalidInput(
                f"a batch must be a tuple of Tensors or arrays, got a {type(batch).__name__}", code="SX342", hint=hint
            )
        yield [x if isinstance(x, Tensor) else Tensor(data=x, device=device, requires_grad=False) for x in batch]


def source_of(data: Sequence[Any], batch_size: int | None, seed: int = 0, shuffle: bool = False) -> Any:
    """The ArrayLoader, or other source of batches, of the positional arguments of a call.

    Args:
        data: Arrays, or one tuple of arrays, or one source of batches.
        batch_size: The number of samples in a batch of arrays; None for 32.
        seed: The seed of the order of arrays.
        shuffle: Whether the order of arrays changes.

    Raises:
        InvalidInput: The arrays cannot form batches, or `batch_size` is passed with batches (SX342).
    """
    if len(data) == 1 and isinstance(data[0], tuple):
        data = data[0]
    if len(data) != 1 or isinstance(data[0], Tensor) or hasattr(data[0], "__array__"):
        return ArrayLoader(*data, batch_size=32 if batch_size is None else batch_size, seed=seed, shuffle=shuffle)
    if not isinstance(data[0], Iterable):
        what = f"data must be arrays, an ArrayLoader or a list of batches, got a {type(data[0]).__name__}"
        raise InvalidInput(what, code="SX342")
    if batch_size is not None:
        raise InvalidInput(f"batch_size must be that of the batches, which exist already, got {batch_size}", code="SX342")
    return data[0]


def arrayed(t: Any, rule: str) -> np.ndarray:
    """The values of a tensor; raises InvalidInput for another value."""
    if not isinstance(t, Tensor) or isinstance(t._data, list):
        raise InvalidInput(f"{rule}, got {'a sequence' if isinstance(t, Tensor) else f'a {type(t).__name__}'}", code="SX387")
    return np.asarray(t.device.backend.get(t.data))


class EarlyStop(KeepBest):
    """Stops a training whose validation loss falls no more, and restores the parameters and statistics of its best epoch.

    Args:
        model: The model.
        patience: The number of epochs without a lower loss after which the training ends.
    """

    def __init__(self, model: Any, patience: int) -> None:
        super().__init__(model)
        self.patience, self.waited = positive("patience", patience), 0

    @override
    def __call__(self, history: History) -> bool:
        """Note an epoch; return whether the training ends."""
        self.waited = 0 if self.better(history) else self.waited + 1
        return self.waited >= self.patience


@contextmanager
def stop_signals(*signals: int) -> Iterator[list[int]]:
    """The context in which the first of these signals is noted in the list; a second one ends the process as usual.

    In a thread other than the main one, nothing is noted.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {s: signal.getsignal(s) for s in signals}

    def note(number: int, _: Any) -> None:
        received.append(number)
        os.write(2, b"stopping after this step; a second signal stops at once\n")  # print may be running already
        for s, handler in before.items():
            signal.signal(s, handler)

    for s in before:
        signal.signal(s, note)
    try:
        yield received
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def device_of(model: Trainable) -> Device | None:
    """The device of the states of a model; None if it has none."""
    return next((t.device for t in model.get_states().values()), None)


def batches(count: int, batch_size: int, epochs: int) -> int:
    """The number of steps of `fit`."""
    return epochs * -(-count // batch_size)


def accuracy(scores: np.ndarray, targets: np.ndarray) -> float:
    """The share of rows in which the target class has the largest score."""
    return float((scores.reshape(len(scores), -1).argmax(1) == targets.reshape(-1)).mean())
