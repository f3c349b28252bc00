"""The training loop: batches in a seeded order, one step for each, and the losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from singa_backend.collectives import Communicator
from singa_backend.collectives.communicator import total
from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor
from ..device import Device


class Trainable(Protocol):
    """The methods of a Model that `fit` and `predict` use."""

    def __call__(self, *input: Any) -> Any: ...

    def forward(self, *input: Any) -> Any: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def get_states(self) -> dict[str, Tensor]: ...


@dataclass
class History:
    """The measurements of a run of `fit`.

    Attributes:
        losses: The loss of each step.
        validation: The result of `evaluate` after each epoch: the loss, and the accuracy if the targets are class numbers.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)


@dataclass
class Position:
    """The point that a run of `fit` has reached.

    Attributes:
        rng: The generator of the orders.
        epoch: The number of finished epochs, those with their validation.
        batch: The number of finished steps of the current epoch.
        order: The order of the samples in the current epoch; None before its first step.
        history: The measurements so far.
    """

    rng: np.random.Generator
    epoch: int = 0
    batch: int = 0
    order: np.ndarray | None = None
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
            infinite (SX343), then the updates before it are kept.
    """
    xs = list(x) if isinstance(x, (list, tuple)) else [x]
    count = len(y)
    if not count or any(len(a) != count for a in xs):
        sizes = f"inputs with {', '.join(str(len(a)) for a in xs)} and targets with {count}"
        raise InvalidInput(f"inputs and targets must have one number of samples, at least 1, got {sizes}", code="SX342")
    if epochs < 1 or batch_size < 1:
        raise InvalidInput(f"epochs and batch_size must be at least 1, got {epochs} and {batch_size}", code="SX342")
    ranks = group.size if group else 1
    if batch_size % ranks:
        what = f"batch_size must be a multiple of the number of workers, got {batch_size} for {ranks}"
        raise InvalidInput(what, code="SX342", hint="each worker computes an equal share of every batch")
    place = start or Position(np.random.default_rng(seed))
    tell = reached or (lambda _: None)
    while place.epoch < epochs:
        model.train()
        if place.order is None:
            place.order = place.rng.permutation(count)
        for first in range(place.batch * batch_size, count, batch_size):
            rows = place.order[first : first + batch_size]
            if group:
                rows = share(rows, place.order, group.rank, group.size)
            batch = [Tensor(data=np.ascontiguousarray(a[rows]), device=_device(model), requires_grad=False) for a in (*xs, y)]
            _, loss = model(*batch)
            value = float(np.asarray(loss.device.backend.get(loss.data)).reshape(-1)[0])
            if group and ranks > 1:
                value = float(total(group, np.array([value]))[0]) / ranks
            place.history.losses.append(value)
            place.batch += 1
            if progress is not None:
                progress(f"epoch {place.epoch + 1}/{epochs}, loss {value:.4g}")
            if stop_at_nan and not np.isfinite(value):
                raise InvalidInput(
                    f"the loss of step {len(place.history.losses)} must be finite, got {value}",
                    code="SX343",
                    hint="lower the learning rate; `sonnx compare` finds the first node with NaN",
                )
            tell(place)
        if validation is not None and evaluate is not None:
            place.history.validation.append(evaluate(predict(model, validation[0], batch_size), validation[1]))
        place.epoch, place.batch, place.order = place.epoch + 1, 0, None
        tell(place)
    return place.history


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


def predict(model: Trainable, x: Any, batch_size: int = 256) -> np.ndarray:
    """Compute the first output of a model for all samples, in inference."""
    xs = list(x) if isinstance(x, (list, tuple)) else [x]
    model.eval()
    parts = []
    for start in range(0, max(len(xs[0]), 1), batch_size):
        batch = [
            Tensor(data=np.ascontiguousarray(a[start : start + batch_size]), device=_device(model), requires_grad=False)
            for a in xs
        ]
        made = model.forward(*batch)
        y = made[0] if isinstance(made, (list, tuple)) else made
        parts.append(np.asarray(y.device.backend.get(y.data)))
    return np.concatenate(parts)


def _device(model: Trainable) -> Device | None:
    return next((t.device for t in model.get_states().values()), None)


def batches(count: int, batch_size: int, epochs: int) -> int:
    """The number of steps of `fit`."""
    return epochs * -(-count // batch_size)


def accuracy(scores: np.ndarray, targets: np.ndarray) -> float:
    """The share of rows in which the target class has the largest score."""
    return float((scores.reshape(len(scores), -1).argmax(1) == targets.reshape(-1)).mean())


__all__: Sequence[str] = ("History", "Position", "accuracy", "batches", "fit", "predict", "share")
