"""The training loop, evaluation and prediction: batches in a seeded order, one step for each, and the losses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
from typing_extensions import override

from singa_backend.collectives import Communicator
from singa_backend.collectives.communicator import total
from singa_backend.dtypes import is_float
from singa_backend.errors import InvalidInput

from .._core import tape
from .._core.tensor import Tensor, to_numpy
from ..device import Device
from .accumulation import Accumulates, rows_of
from .best import KeepBest
from .callbacks import Callbacks
from .history import History as History
from .history import Position as Position
from .history import weighted_mean
from .loader import ArrayLoader, positive
from .nan import StatesBefore
from .sources import ArgumentNames, in_order


class Trainable(Protocol):
    """The methods of a Model that `fit` and `predict` use."""

    def __call__(self, *input: Any) -> Any: ...

    def forward(self, *input: Any) -> Any: ...

    def train_one_batch(self, *input: Any) -> Any: ...

    def batch_weight(self, *batch: Any) -> int: ...

    def _weighed(self, batch: Sequence[Any]) -> int: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def get_states(self) -> dict[str, Tensor]: ...


def fit(
    model: Trainable,
    x: Any,
    y: Any,
    *,
    epochs: int = 1,
    batch_size: int = 32,
    seed: int = 0,
    measure: Callable[[], dict[str, float]] | None = None,
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
        measure: Computes the measurements after an epoch.
        progress: Called with a line of text after each step.
        stop_at_nan: Whether to stop if the loss is NaN or infinite.
        start: The point at which to continue; None for the beginning.
        reached: Called with the point after each step, and after each epoch; it may raise to stop there.
        group: The ranks that train together, each on its share of every batch, which may differ by a sample; None for one.

    Returns:
        The losses and the measurements.

    Raises:
        InvalidInput: The numbers of samples differ, or `epochs` or `batch_size` is below 1 (SX342); or the loss
            is NaN or infinite (SX343): its step has then updated the parameters.
    """
    xs = list(x) if isinstance(x, (list, tuple)) else [x]
    optimizers = accumulating(model)
    micro = max([o._sums.steps for o in optimizers], default=1)
    loader = ArrayLoader(*xs, y, batch_size=batch_size * micro, shuffle=True, device=device_of(model))
    place = start or Position(np.random.default_rng(seed))
    loader._start(place)
    shares = Shares(group, optimizers, model.batch_weight)

    def batches() -> Iterator[tuple[Tensor, ...]]:
        order = place.order
        for step in loader._rows():
            order = place.order
            for first in range(0, len(step), batch_size):
                rows = step[first : first + batch_size]
                yield loader._batch(shares.own(rows, loader.arrays[-1][rows]), loader.device)
        place.order = order  # until the update of the last batches, after which the epoch ends

    return loop(model, batches, place, epochs=epochs, measure=measure, progress=progress, stop_at_nan=stop_at_nan,
                reached=reached, shares=shares)  # fmt: skip


class Shares:
    """The parts of batches that the ranks of a group compute, and the losses of the batches.

    Args:
        group: The ranks; None for one process.
        optimizers: The optimizers of the model, which are told the part of this rank.
        weigh: Computes the weight of a part from its targets; not called without a group.
    """

    def __init__(
        self,
        group: Communicator | None = None,
        optimizers: Sequence[Any] = (),
        weigh: Callable[..., int] = lambda *batch: rows_of(batch),
    ) -> None:
        self.group, self._weigh = group if group is not None and group.size > 1 else None, weigh
        self._optimizers = [o for o in optimizers if hasattr(o, "set_share")]
        self._now: tuple[int, int] | None = None

    def own(self, rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The rows of a batch, with these targets, that this rank computes; the first one, with a weight of 0, if it has none."""
        if self.group is None:
            return rows
        size, rank = self.group.size, self.group.rank
        mine = np.array_split(rows, size)[rank]
        every, part = (Tensor(data=t, requires_grad=False) for t in (targets, np.array_split(targets, size)[rank]))
        self._now = (self._weigh(part) if len(mine) else 0, self._weigh(every))
        for optimizer in self._optimizers:
            optimizer.set_share(self._now[0], max(self._now[1], 1))
        return mine if len(mine) else rows[:1]

    def counted(self, model: Trainable, batch: Sequence[Any]) -> tuple[int, int]:
        """The weight of the batch of the step that a model has run: of the part of this rank, and of all."""
        return self._now or (model._weighed(batch),) * 2

    def mean(self, losses: Sequence[float], counts: Sequence[tuple[int, int]]) -> float:
        """The mean of the losses of a step over the weights of all ranks."""
        if self.group is None:
            return weighted_mean(losses, [n for n, _ in counts])
        summed = sum((value * own for value, (own, _) in zip(losses, counts, strict=True) if own), 0.0)
        return float(total(self.group, np.array([summed]))[0]) / max(sum(n for _, n in counts), 1)


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
    shares: Shares | None = None,
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
        shares: The parts of the batches of several processes; None for one.

    Returns:
        The history of `place`.

    Raises:
        InvalidInput: `epochs` is below 1, or an epoch has no batch (SX342); `train_one_batch` does not return a loss (SX387); or
            the loss is NaN or infinite (SX343): its step has then updated the parameters.
    """
    positive("epochs", epochs)
    tell = reached or (lambda _: None)
    history = place.history
    before = StatesBefore(model) if stop_at_nan else None
    while place.epoch < epochs:
        model.train()
        first = len(history.losses) - place.batch
        why: list[str] = []
        for value, weight in _losses(model, batches(), shares or Shares(), why, before):
            history.losses.append(value)
            history.weights.append(weight)
            place.batch = len(history.losses) - first
            if progress is not None:
                progress(f"epoch {place.epoch + 1}/{epochs}, loss {value:.4g}")
            if stop_at_nan and not np.isfinite(value):
                hint = why[0] if why else "lower the learning rate, or bound the gradients"
                raise InvalidInput(f"the loss of step {len(history.losses)} must be finite, got {value}", code="SX343", hint=hint)
            tell(place)
        if len(history.losses) == first:
            hint = "pass an ArrayLoader, or a list of batches: an iterator has batches for one epoch only"
            raise InvalidInput(f"epoch {place.epoch + 1} must have at least one batch, got none", code="SX342", hint=hint)
        if measure is not None:
            history.validation.append(measure())
        history.end_epoch(first)
        place.epoch, place.batch, place.order = place.epoch + 1, 0, None
        tell(place)
    return history


def _losses(
    model: Trainable, batches: Iterable[Sequence[Any]], shares: Shares, why: list[str], before: StatesBefore | None
) -> Iterator[tuple[float, int]]:
    """Run the steps of an epoch, and yield the loss and the weight of each: of several batches, if gradients are accumulated.

    `why` receives what is wrong with a batch whose loss is not finite; `before` keeps the values with which that is found.
    """
    optimizers = accumulating(model)
    losses: list[float] = []
    counts: list[tuple[int, int]] = []
    try:
        for batch in batches:
            if before is not None and not losses:
                before.note()
            losses.append(number(outcome(model(*batch))[1]))
            counts.append(shares.counted(model, batch))
            if (
                not np.isfinite(losses[-1])
                and counts[-1][0]
                and (found := _nan_in(batch) or (before.cause(batch) if before else ""))
            ):
                why.append(found)
            if not any(o.accumulated for o in optimizers):
                yield shares.mean(losses, counts), sum(n for _, n in counts)
                losses, counts = [], []
        if losses:  # an incomplete group
            for o in optimizers:
                o.flush()
            yield shares.mean(losses, counts), sum(n for _, n in counts)
    finally:  # an exception in a group
        for o in optimizers:
            o.discard_gradients()


def _nan_in(batch: Sequence[Any]) -> str:
    """Which array of a batch holds NaN; "" if none does."""
    for i, value in enumerate(batch):
        a = to_numpy(value) if isinstance(value, Tensor) else value
        if isinstance(a, np.ndarray) and is_float(a.dtype) and (count := int(np.isnan(a.astype(np.float32)).sum())):
            return f"the data hold NaN: {count} values of array {i + 1} of {len(batch)} in its batch; remove or replace them"
    return ""


def accumulating(model: Any) -> list[Any]:
    """The optimizers that are attributes of a model and may accumulate gradients."""
    found = model._optimizers() if hasattr(model, "_optimizers") else []
    return [o for o in found if isinstance(o, Accumulates)]


def after_step(callbacks: Callbacks, received: Sequence[Any], epochs: int | None) -> Callable[[Position], None]:
    """What `fit` does after each step and each epoch; `epochs` is None if it prints no lines."""

    def reached(place: Position) -> None:
        if place.batch:
            callbacks.step(place)
        else:
            if epochs is not None:
                print(_epoch_line(place.epoch, epochs, place.history))
            callbacks.epoch(place)
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


def predict(model: Trainable, source: Any, count: int | None = None, names: ArgumentNames | None = None) -> list[np.ndarray]:
    """Compute the outputs of a model for all samples, in the mode that it is in.

    Args:
        model: The model.
        source: An ArrayLoader, whose samples are taken in the order of the arrays, or batches.
        count: The number of inputs of the model: further values of a batch, such as targets, are not used; None for all.
        names: The names by which batches that are dicts are read; None for those that have none.

    Returns:
        Each output, joined along axis 0.

    Raises:
        InvalidInput: A result is not a Tensor or several, or an output does not have the samples along axis 0 (SX387); or there
            is no batch (SX342).
    """
    parts: list[list[np.ndarray]] = []
    rows: list[int] = []
    for batch in in_order(source, device_of(model), names or ArgumentNames(None, None)):
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
    model: Trainable,
    source: Any,
    count: int | None,
    metrics: Mapping[str, Callable[[Any, Any], float]] | None,
    names: ArgumentNames | None = None,
) -> dict[str, float]:
    """Compute the loss of a model, by its training step without an update, and metrics, in the mode that it is in.

    Args:
        model: The model.
        source: An ArrayLoader, whose samples are taken in the order of the arrays, or batches; the last value of a batch has the
            targets.
        count: The number of inputs of the model; None for all values but the last.
        metrics: Functions of the output and the targets of all samples; None for the accuracy, if the targets are class numbers.
        names: The names by which batches that are dicts are read; None for those that have none.

    Returns:
        "loss", the mean over the batches, each with the weight `batch_weight` of the model; and the metrics by name.

    Raises:
        InvalidInput: The step does not return a loss (SX387), or there is no batch (SX342).
    """
    losses: list[float] = []
    weights: list[int] = []
    scores: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for batch in in_order(source, device_of(model), names or ArgumentNames(None, None)):
        with tape.measuring():
            out, loss = outcome(model.train_one_batch(*batch))
        losses.append(number(loss))
        target = arrayed(batch[-1], "a batch must have Tensors")
        weights.append(model.batch_weight(*batch))
        if not metrics and (metrics is not None or target.dtype.kind not in "iu" or target.ndim != 1):
            continue
        if out is None:
            out = model.forward(*batch[: len(batch) - 1 if count is None else count])
        out = out[0] if isinstance(out, (list, tuple)) and out else out
        scores.append(arrayed(out, "forward must return a Tensor, or a list of Tensors"))
        targets.append(target)
    if not losses:
        raise InvalidInput("there must be at least one batch, got none", code="SX342")
    found = {"loss": weighted_mean(losses, weights)}
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
    """The number of steps of `fit`; with accumulated gradients, `batch_size` is the number of samples of an update."""
    return epochs * -(-count // batch_size)


def accuracy(scores: np.ndarray, targets: np.ndarray) -> float:
    """The share of rows in which the target class has the largest score."""
    return float((scores.reshape(len(scores), -1).argmax(1) == targets.reshape(-1)).mean())
