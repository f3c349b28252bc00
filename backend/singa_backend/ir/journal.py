"""Records how to undo the changes of graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


class Journal:
    """Changes of graphs that may be undone.

    Attributes:
        touched: the nodes that changed, were inserted or removed.
    """

    def __init__(self) -> None:
        self._steps: list[Undo] = []
        self._undoing = False
        self.touched: dict[Any, None] = {}

    def add(self, undo: Undo, *nodes: Any) -> None:
        """Record a change."""
        if not self._undoing:
            self._steps.append(undo)
            self.touched.update(dict.fromkeys(nodes))

    def __len__(self) -> int:
        """Return the number of changes."""
        return len(self._steps)

    def __bool__(self) -> bool:
        """Return True: a journal without changes is a journal."""
        return True

    def undo(self, since: int = 0) -> None:
        """Undo the changes after the first `since`."""
        self._undoing = True
        try:
            while len(self._steps) > since:
                self._steps.pop()()
        finally:
            self._undoing = False
