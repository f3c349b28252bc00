"""The loop over a data set: batches in a seeded order, one step each, the loss of each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from singa_backend.errors import InvalidInput

from .._core.tensor import Tensor
from ..device import Device


class Trainable(Protocol):
    """What `fit` and `predict` use of a Model."""

    def __call__(self, *input: Any) -> Any: ...

    def forward(self, *input: Any) -> Any: ...

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def get_states(self) -> dict[str, Tensor]: ...


@dataclass
class History:
    """What a run of `fit` saw.

    losses: of each step.  validation: after each epoch, the loss (and the accuracy, where the targets are class numbers).
    """

    losses: list[float] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)


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
) -> History:
    """Train a compiled model on arrays; the same seed gives the same batches in the same order.

    model: a Model whose `train_one_batch(x, y)` gives (output, loss).  x: an array, or several (a list), with the samples along
        axis 0; y: the targets.  The last batch of an epoch may be smaller.
    evaluate: what to measure after each epoch on `validation`, a function of (model output, targets).
    progress: called with a line of text after each step.
    Raises InvalidInput where the arrays do not go together, and where the loss becomes NaN (what was trained so far stands).
    """
    xs = list(x) if isinstance(x, (list, tuple)) else [x]
    count = len(y)
    if not count or any(len(a) != count for a in xs):
        raise InvalidInput(f"the inputs hold {', '.join(str(len(a)) for a in xs)} samples, the targets {count}", code="SX342")
    if epochs < 1 or batch_size < 1:
        raise InvalidInput(f"epochs={epochs} and batch_size={batch_size} must be 1 or more", code="SX342")
    rng = np.random.default_rng(seed)
    history = History()
    for epoch in range(epochs):
        model.train()
        order = rng.permutation(count)
        for start in range(0, count, batch_size):
            rows = order[start : start + batch_size]
            batch = [Tensor(data=np.ascontiguousarray(a[rows]), device=_device(model), requires_grad=False) for a in (*xs, y)]
            _, loss = model(*batch)
            value = float(np.asarray(loss.device.backend.get(loss.data)).reshape(-1)[0])
            history.losses.append(value)
            if progress is not None:
                progress(f"epoch {epoch + 1}/{epochs}, loss {value:.4g}")
            if stop_at_nan and not np.isfinite(value):
                raise InvalidInput(
                    f"the loss of step {len(history.losses)} is {value}",
                    code="SX343",
                    hint="lower the learning rate; `sonnx compare` finds the first node with NaN",
                )
        if validation is not None and evaluate is not None:
            history.validation.append(evaluate(predict(model, validation[0], batch_size), validation[1]))
    return history


def predict(model: Trainable, x: Any, batch_size: int = 256) -> np.ndarray:
    """The model's (first) output for all samples, in inference."""
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
    """How many steps `fit` will take."""
    return epochs * -(-count // batch_size)


def accuracy(scores: np.ndarray, targets: np.ndarray) -> float:
    """The share of rows whose largest score stands at the target class."""
    return float((scores.reshape(len(scores), -1).argmax(1) == targets.reshape(-1)).mean())


__all__: Sequence[str] = ("History", "accuracy", "batches", "fit", "predict")
