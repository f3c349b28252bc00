"""Signals that wait until an update is complete: Ctrl-C leaves the states of before a step, or those after it."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """The context in which signals wait whose handlers are functions in Python; they are raised at its end.

    Such a handler, as that of Ctrl-C, may raise in the main thread between any two operations. Other threads have no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting = _Waiting()
    try:
        with contextlib.ExitStack() as stack:  # which restores the second handler even if the first one raises meanwhile
            for s in _SIGNALS:
                handler = signal.getsignal(s)
                if callable(handler) and not isinstance(handler, _Waiting):
                    stack.callback(signal.signal, s, handler)
                    signal.signal(s, waiting)
            yield
    finally:
        for number in waiting.received:
            signal.raise_signal(number)


class _Waiting:
    """A handler that notes signals."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __call__(self, number: int, _: Any) -> None:
        self.received.append(number)  # a second one may end the program at once
