"""The best epoch of a training: its parameters and running statistics are kept."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from singa_backend.errors import InvalidInput

_STATE = "state."


class KeepBest:
    """Keeps the parameters and running statistics of the best epoch of a training; a callback of `Model.fit`.

    The best epoch has the lowest validation loss, or the highest value of another metric; of equal ones it is the first. NaN is
    worse than any number.

    Args:
        model: The model.
        metric: The name of a measurement of the validation: "loss", "accuracy" or another metric.

    Attributes:
        metric: The name of the measurement.
        epoch: The number of the best epoch, from 1; 0 before the first epoch.
        value: The measurement of that epoch.
        states: The parameters and running statistics after it, arrays by name.

    Example:
        >>> best = KeepBest(net, "accuracy")
        >>> net.fit(x, y, epochs=10, validation=(x_held, y_held), callbacks=[best])
        >>> best.restore()
    """

    def __init__(self, model: Any, metric: str = "loss") -> None:
        self.model, self.metric = model, metric
        self.epoch, self.value = 0, math.nan
        self.states: dict[str, np.ndarray] = {}

    def __call__(self, history: Any) -> bool:
        """Note an epoch.

        Args:
            history: The history of `fit`, whose last measurement is that of this epoch.

        Returns:
            False: the training goes on.

        Raises:
            InvalidInput: The validation, or this metric of it, does not exist (SX342).
        """
        self.better(history)
        return False

    def better(self, history: Any) -> bool:
        """Note an epoch.

        Args:
            history: The history of `fit`.

        Returns:
            Whether it is the best one so far.

        Raises:
            InvalidInput: The validation, or this metric of it, does not exist (SX342).
        """
        seen = history.validation[-1] if history.validation else {}
        if self.metric not in seen:
            got = ", ".join(seen) or "no validation"
            raise InvalidInput(f"metric must be one of the validation, {self.metric!r} is not: got {got}", code="SX342")
        value = float(seen[self.metric])
        good = value < self.value if self.metric == "loss" else value > self.value
        if self.epoch and not good and not (math.isnan(self.value) and not math.isnan(value)):
            return False
        self.epoch, self.value = len(history.validation), value
        self.states = {n: np.array(t.device.backend.get(t.data)) for n, t in self.model.get_states().items()}
        return True

    def restore(self) -> None:
        """Set the states of the model to those of the best epoch; nothing happens before the first epoch."""
        if self.epoch:
            self.model.set_states(self.states)

    def state_dict(self) -> dict[str, Any]:
        """Return what `load_state_dict` reads.

        Returns:
            The epoch, its measurement, and the arrays ("state.<name>") that differ from the present states of the model.
        """
        now = self.model.get_states()
        arrays = {_STATE + n: a for n, a in self.states.items() if not _same(a, now[n].device.backend.get(now[n].data))}
        return {"metric": self.metric, "epoch": self.epoch, "value": self.value, **arrays}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the best epoch to that of a training that continues; the model must have its states at the same point.

        Args:
            state: What `state_dict` returned.

        Raises:
            ValueError: It is of another model or metric.
            KeyError: It lacks a part.
        """
        arrays = {n.removeprefix(_STATE): a for n, a in state.items() if n.startswith(_STATE)}
        epoch, value = state["epoch"], state["value"]
        if type(epoch) is not int or epoch < 0 or not isinstance(value, (int, float)) or state["metric"] != self.metric:
            raise ValueError(f"the best epoch {epoch!r} by {state['metric']!r}")
        now = self.model.get_states()
        for name, a in arrays.items():
            if name not in now or tuple(now[name].shape) != a.shape or np.dtype(now[name].data.dtype) != a.dtype:
                raise ValueError(f"another state {name} of the best epoch")
        self.epoch, self.value = epoch, float(value)
        self.states = {}
        if epoch:
            self.states = {n: np.array(arrays[n] if n in arrays else t.device.backend.get(t.data)) for n, t in now.items()}


def _same(one: np.ndarray, other: Any) -> bool:
    """Whether two arrays have the same bits."""
    return one.tobytes() == np.asarray(other).tobytes()
