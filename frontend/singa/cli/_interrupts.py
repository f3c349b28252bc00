"""The signals that end a command: Ctrl-C, and a request to terminate.

Only modules that Python has imported itself are imported here: the signals are handled before anything else is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from importlib.machinery import ExtensionFileLoader
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143

_PATIENCE = 1.0
"""Seconds in which a second Ctrl-C is ignored: a shell or a supervisor may send two.  A later one ends the process at once."""

_LONGEST_IMPORT = 3.0
"""Seconds that an interrupt waits for an import of an extension module to end."""

_EXTENSION = {ExtensionFileLoader.create_module.__code__, ExtensionFileLoader.exec_module.__code__}


class Interrupts:
    """What happens at a signal.

    An interrupt is raised as KeyboardInterrupt in the main thread.  It waits while an extension module is imported: many print a
    traceback and continue when an import in them is interrupted.  A signal whose exception Python ignores, in a destructor, is
    raised again by a timer: in the hook itself its exception would be ignored too.
    """

    def __init__(self) -> None:
        self.first: float | None = None
        self.terminated = False

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._terminate)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # otherwise ignored, as in the background of a shell
            signal.signal(signal.SIGINT, self._interrupt)
        if hasattr(signal, "SIGALRM"):
            signal.signal(signal.SIGALRM, self._again)
        sys.unraisablehook = self._unraisable

    def _terminate(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True
        sys.exit(TERMINATED)

    def _again(self, number: int, frame: FrameType | None) -> None:
        if self.terminated:
            sys.exit(TERMINATED)
        if self.first is not None:
            self._raise(number, frame)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.first is not None and now - self.first > _PATIENCE:
            os._exit(INTERRUPTED)
        if self.first is None:
            self.first = now
            self._raise(number, frame)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        assert self.first is not None
        if hasattr(signal, "SIGALRM") and time.monotonic() - self.first < _LONGEST_IMPORT and _imports(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return
        raise KeyboardInterrupt

    def _unraisable(self, error: sys.UnraisableHookArgs) -> None:
        ignored = isinstance(error.exc_value, (KeyboardInterrupt, SystemExit)) and (self.terminated or self.first is not None)
        if ignored and hasattr(signal, "SIGALRM"):
            signal.setitimer(signal.ITIMER_REAL, 0.02)
        elif self.first is None:  # otherwise a destructor of what was interrupted
            sys.__unraisablehook__(error)


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an exception is an interrupt, or was raised by what an interrupt left half done."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__context__
    return error is not None


def _imports(frame: FrameType | None) -> bool:
    """Whether an extension module is being imported."""
    while frame is not None:
        if frame.f_code in _EXTENSION:
            return True
        frame = frame.f_back
    return False
