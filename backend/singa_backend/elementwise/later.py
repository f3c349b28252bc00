"""Code that is made while the program runs: by a thread that exists while something waits for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable


class Queue:
    """What is to be made, in order.

    The thread ends between two of them when the main thread has ended.  A process that was forked has what its parent had not
    made, and begins a thread of its own when it asks for it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, Callable[[], None]] = {}
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def add(self, key: str, make: Callable[[], None]) -> None:
        """Let something be made, if it does not wait already; `start` begins."""
        with self._lock:
            self._waiting.setdefault(key, make)

    def start(self) -> None:
        """Begin a thread, if something waits and there is none."""
        with self._lock:
            dead = self._thread is None or not self._thread.is_alive()  # it may have failed
            if self._waiting and dead and threading.main_thread().is_alive():
                self._thread = threading.Thread(target=self._work, name="sonnx machine code")
                self._thread.start()

    def is_done(self, keys: Iterable[str]) -> bool:
        """Whether none of these waits; otherwise there is a thread."""
        if not any(key in self._waiting for key in tuple(keys)):
            return True
        self.start()
        return False

    def _work(self) -> None:
        while (key := self._next()) is not None:
            try:
                self._waiting[key]()
            finally:
                del self._waiting[key]

    def _next(self) -> str | None:
        """What the thread makes next; None if it ends."""
        with self._lock:
            key = next(iter(self._waiting), None) if threading.main_thread().is_alive() else None
            self._thread = self._thread if key else None
        return key


QUEUE = Queue()
"""The machine code that plans have asked for."""
