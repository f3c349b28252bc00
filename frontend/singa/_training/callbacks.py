"""Callbacks of a training: functions of the history after each epoch, and objects that are told of each step and epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput

from .history import History, Position


@dataclass
class FitProgress:
    """The point of a training that the callbacks of `Model.fit` receive.

    Attributes:
        model: The model, which a callback may change.
        history: The measurements so far; `history.losses[-1]` is the loss of the last step.
        epoch: The number of the current epoch, from 1.
        epochs: The number of epochs.
        step: The number of finished steps of this epoch. A step is an update: with accumulated gradients, several batches.
        steps: The number of finished steps in all.
        steps_in_epoch: The number of steps of an epoch; None if the data have no length.
        rate: The learning rate of the last step, of the model's first optimizer; None if no attribute of the model is one.
    """

    model: Any
    history: History
    epochs: int
    epoch: int = 1
    step: int = 0
    steps: int = 0
    steps_in_epoch: int | None = None
    rate: float | None = None


class Callback:
    """A base class of callbacks of `Model.fit`. Any object that has one of the two methods is a callback, too.

    An exception in a callback ends the training, and leaves the model as the last step has left it.

    Example:
        >>> class Log(model.Callback):
        ...     def on_step(self, progress):
        ...         print(progress.steps, progress.rate, progress.history.losses[-1])
        >>> net.fit(x, y, callbacks=[Log()])
    """

    def on_step(self, progress: FitProgress) -> bool | None:
        """Follow a step.

        Args:
            progress: The point of the training.

        Returns:
            True to end the training.
        """

    def on_epoch(self, progress: FitProgress) -> bool | None:
        """Follow an epoch and its validation.

        Args:
            progress: The point of the training.

        Returns:
            True to end the training.
        """


class Ended(Exception):
    """A callback of `fit` ends the training before the last epoch."""


class Callbacks:
    """Calls the callbacks of a training.

    Args:
        callbacks: Objects with `on_step` or `on_epoch`, or functions of the history that are called after each epoch.
        progress: The point at which the training starts.

    Raises:
        InvalidInput: One is neither (SX342).
    """

    def __init__(self, callbacks: Any, progress: FitProgress) -> None:
        if not isinstance(callbacks, Sequence) or not all(_is_object(c) or callable(c) for c in callbacks):
            what = f"callbacks must be a list of functions, or objects with on_step or on_epoch, got {callbacks!r}"
            raise InvalidInput(what, code="SX342")
        self.progress = progress
        self._on_step = [c.on_step for c in callbacks if hasattr(c, "on_step")]
        self._on_epoch: list[Callable[[], Any]] = [
            partial(c.on_epoch, progress) if hasattr(c, "on_epoch") else partial(c, progress.history)
            for c in callbacks
            if hasattr(c, "on_epoch") or not _is_object(c)
        ]
        self._has_objects = any(map(_is_object, callbacks))
        self._next = self._rate()

    def step(self, place: Position) -> None:
        """Follow a step; raises Ended if the training ends here."""
        at = self.progress
        at.epoch, at.step, at.steps = place.epoch + 1, place.batch, len(place.history.losses)
        if self._has_objects:  # reading the rate takes time
            at.rate = self._next
            self._end_if([told(at) for told in self._on_step])
            self._next = self._rate()

    def epoch(self, place: Position) -> None:
        """Follow an epoch; raises Ended if the training ends here."""
        self.progress.epoch = place.epoch
        self._end_if([told() for told in self._on_epoch])
        self._next = self._rate()

    def _end_if(self, answers: list[Any]) -> None:
        if any(answer is True or answer is np.True_ for answer in answers):
            raise Ended

    def _rate(self) -> float | None:
        """The rate of the next step."""
        for optimizer in self.progress.model._optimizers() if self._has_objects else ():
            value = getattr(optimizer, "lr_value", None)
            if value is not None:
                return float(value)
        return None


def _is_object(callback: Any) -> bool:
    return callable(getattr(callback, "on_step", None)) or callable(getattr(callback, "on_epoch", None))
