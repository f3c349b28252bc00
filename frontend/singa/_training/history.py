"""The measurements of a training, and the point that it has reached."""

from __future__ import annotations

from dataclasses import dataclass, field

from .loader import Order


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
