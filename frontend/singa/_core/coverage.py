"""Which parameters a training step reaches: those that get no gradient are named, with what to do about them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from singa_backend.errors import InvalidInput, NoGradientWarning

from .tensor import Tensor

_SHOWN = 8


class Reach:
    """What `backward` gives gradients to, while a step is watched.

    params: asked for when the step has run, as layers make theirs at the first call.  played: whether `backward` was called.
    """

    def __init__(self, params: Callable[[], dict[str, Tensor]]) -> None:
        self._params = params
        self.played = False
        self.found: set[int] = set()

    def trains(self) -> dict[str, Tensor]:
        """The parameters that are not frozen, by name."""
        return {n: p for n, p in self._params().items() if p.stores_grad and p.requires_grad}

    def check(self) -> NoGradientWarning | None:
        """What to warn of after a step; raises InvalidInput where there are parameters and none got a gradient."""
        trains = self.trains()
        missing = [n for n, p in trains.items() if id(p) not in self.found]
        if not self.played or not missing:
            return None
        if len(missing) == len(trains):
            raise nothing_trains(self)
        return NoGradientWarning(
            f"no gradient reaches {_listed(missing)}: the loss does not depend on it, or an operator on the way has no gradient",
            missing,
            f"if that is meant, say so: model.freeze({missing[0]!r}) takes names and patterns; sonnx.trainable_report tells what "
            "blocks a gradient in an ONNX model",
        )


def nothing_trains(reach: Reach | None) -> InvalidInput:
    """The error of a loss that gives no parameter a gradient."""
    trains = reach.trains() if reach is not None else {}
    every = reach._params() if reach is not None else {}
    if every and not trains:
        return InvalidInput(
            f"no parameter gets a gradient: all {len(every)} are frozen",
            code="SX345",
            hint="unfreeze some: model.unfreeze('head.*')",
        )
    named = f": {_listed(list(trains))}" if trains else ""
    return InvalidInput(
        f"the loss gives no parameter a gradient{named}",
        code="SX345",
        hint="an operator before the loss has none (integers, comparisons, argmax), or the loss does not depend on them; freeze "
        "what shall stay: model.freeze('name.*')",
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


_current: ContextVar[Reach | None] = ContextVar("reach", default=None)


def current() -> Reach | None:
    """What watches the step that runs now, or None."""
    return _current.get()


@contextlib.contextmanager
def watch_gradients(params: Callable[[], dict[str, Tensor]]) -> Iterator[Reach]:
    """The context in which `backward` notes what it gives gradients to."""
    reach = Reach(params)
    token = _current.set(reach)
    try:
        yield reach
    finally:
        _current.reset(token)
