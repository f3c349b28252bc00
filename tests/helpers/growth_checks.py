"""The work of a call, as a count that does not depend on the machine.

A garbage collection runs destructors, callbacks of weak references and hooks of other libraries at a moment that depends on
what ran before, so none happens while work is counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from singa_backend.machine import without_collections


def lines(call: Callable[[], Any]) -> int:
    """The number of lines of Python that a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    with without_collections():
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
    with without_collections():
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(before)
    return names
