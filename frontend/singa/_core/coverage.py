"""Gradient coverage: which parameters get no gradient in a training step, and what to do about it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar

from singa_backend.errors import ConstantTrainsWarning, InvalidInput, NoGradientWarning

from .tensor import Tensor

_SHOWN = 8


class Coverage:
    """The tensors that got a gradient while a step was watched.

    Args:
        params: Returns the parameters by name; called after the step, because layers create theirs at the first call.

    Attributes:
        backward_ran: Whether `backward` was called.
        found: The ids of the tensors that got a gradient.
    """

    def __init__(self, params: Callable[[], dict[str, Tensor]]) -> None:
        self._params = params
        self.backward_ran = False
        self.found: set[int] = set()

    def trains(self) -> dict[str, Tensor]:
        """The parameters that are not frozen, by name."""
        return {n: p for n, p in self._params().items() if p.stores_grad and p.requires_grad}

    def check(self) -> NoGradientWarning | None:
        """The warning after a step, or None; raises InvalidInput if there are parameters and none got a gradient."""
        trains = self.trains()
        missing = [n for n, p in trains.items() if id(p) not in self.found]
        if not self.backward_ran or not missing:
            return None
        if len(missing) == len(trains):
            raise nothing_trains(self)
        return NoGradientWarning(
            f"no gradient reaches {_listed(missing)}: the loss does not depend on it, or an operator on the way has no gradient",
            missing,
            f"if this is intended, call model.freeze({missing[0]!r}), which takes names and patterns; sonnx.trainable_report "
            "reports what blocks a gradient in an ONNX model",
        )

    def check_constants(self, constants: Mapping[str, str]) -> ConstantTrainsWarning | None:
        """The warning after a step that has changed constants of a file, which nobody has unfrozen by name, or None.

        Args:
            constants: The reason why each of them is a constant, by name.
        """
        trains = self.trains()
        named = [n for n in constants if n in trains and id(trains[n]) in self.found]
        if not named:
            return None
        return ConstantTrainsWarning(
            f"the step changes constants of the file, which are not weights by their use: "
            f"{_listed([f'{n} ({constants[n]})' for n in named])}",
            named,
            f"load the model again and freeze them before the first step: model.freeze({named[0]!r}); if they are to train, call "
            f"model.unfreeze({named[0]!r}), or SONNXModel(file, train_constants=True) for all",
        )


def nothing_trains(covered: Coverage | None) -> InvalidInput:
    """The error for a loss from which no parameter gets a gradient."""
    trains = covered.trains() if covered is not None else {}
    every = covered._params() if covered is not None else {}
    if every and not trains:
        return InvalidInput(
            f"no parameter gets a gradient: all {len(every)} are frozen",
            code="SX345",
            hint="unfreeze some: model.unfreeze('head.*')",
        )
    named = f": {_listed(list(trains))}" if trains else ""
    return InvalidInput(
        f"no parameter gets a gradient from the loss{named}",
        code="SX345",
        hint="an operator before the loss has no gradient (integers, comparisons, argmax), or the loss does not depend on the "
        "parameters; freeze those that must not change: model.freeze('name.*')",
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


_current: ContextVar[Coverage | None] = ContextVar("coverage", default=None)


def current() -> Coverage | None:
    """The coverage of the step that is running, or None."""
    return _current.get()


@contextlib.contextmanager
def watch_gradients(params: Callable[[], dict[str, Tensor]]) -> Iterator[Coverage]:
    """The context in which `backward` records the tensors that get a gradient."""
    covered = Coverage(params)
    token = _current.set(covered)
    try:
        yield covered
    finally:
        _current.reset(token)
