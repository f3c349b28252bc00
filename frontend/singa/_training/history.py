"""The measurements of a training, and the point that it has reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from .loader import Order


@dataclass
class History:
    """The measurements of a training.

    Attributes:
        losses: The loss of each step.
        validation: The measurements after each epoch: the loss, and the accuracy if the targets are class numbers.
        epochs: The mean of the losses of each epoch, each weighted by the weight of its batches.
        weights: The weight of the batches of each step, by default their samples.
    """

    losses: list[float] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)

    def end_epoch(self, first: int) -> None:
        """Append the mean of the losses of an epoch, whose first step has this index."""
        self.epochs.append(weighted_mean(self.losses[first:], self.weights[first:]))


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """The mean of values by their weights; those of weight 0 do not count, and without others it is 0."""
    counted = [(v, w) for v, w in zip(values, weights, strict=True) if w]
    if len(counted) == 1:
        return counted[0][0]
    return float(np.average([v for v, _ in counted], weights=[w for _, w in counted])) if counted else 0.0


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
