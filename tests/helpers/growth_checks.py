"""The work of a call, as a count that does not depend on the machine.

A garbage collection runs destructors, callbacks of weak references and hooks of other libraries at a moment that depends on
what ran before, so none happens while work is counted.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect no garbage until the block ends."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def lines(call: Callable[[], Any]) -> int:
    """The number of lines of Python that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    with no_collection():
        sys.settrace(trace)
        try:
            call()
        finally:
            sys.settrace(before)
    return count


def calls(call: Callable[[], Any]) -> list[str]:
    """The names of the Python functions that a call enters, in order."""
    names: list[str] = []

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)

    before = sys.getprofile()
    with no_collection():
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(before)
    return names
