"""The nodes of a graph in order, and lists of names: both find an element in constant time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, MutableSequence, Sequence
from itertools import pairwise
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class NameList(MutableSequence[str]):
    """A list of names that finds a name in constant time."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Copy a list.

        Args:
            names: the names, in order.
        """
        self._names = list(names)
        self._times = Counter(self._names)

    def __contains__(self, name: object) -> bool:
        """Return whether a name is in the list."""
        return self._times[name] > 0 if isinstance(name, str) else False

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names in order."""
        return iter(self._names)

    def __getitem__(self, at: Any) -> Any:
        """Return a name, or a list of names for a slice."""
        return self._names[at]

    def __setitem__(self, at: Any, new: Any) -> None:
        """Replace a name, or the names of a slice."""
        self._names[at] = new
        self._times = Counter(self._names)

    def __delitem__(self, at: Any) -> None:
        """Remove a name, or the names of a slice."""
        del self._names[at]
        self._times = Counter(self._names)

    def insert(self, index: int, value: str) -> None:
        """Insert a name.

        Args:
            index: its position.
            value: the name.
        """
        self._names.insert(index, value)
        self._times[value] += 1

    def count(self, value: str) -> int:
        """Return how often a name occurs.

        Args:
            value: the name.

        Returns:
            The number of its places.
        """
        return self._times[value]

    def __eq__(self, other: object) -> bool:
        """Compare with a list of names."""
        return self._names == (other._names if isinstance(other, NameList) else other)

    __hash__ = None  # type: ignore[assignment]  # names of a node compare as a list does


class NodeOrder(Generic[T]):
    """Nodes in order; inserting, removing and comparing places take constant time."""

    _GAP = 1 << 32

    def __init__(self, nodes: Sequence[T]) -> None:
        ring = (None, *nodes, None)  # None is the end, and its successor the first node
        self._next: dict[T | None, T | None] = dict(pairwise(ring))
        self._previous: dict[T | None, T | None] = dict(zip(ring[1:], ring, strict=False))
        self.place = {node: i * self._GAP for i, node in enumerate(nodes)}
        self._all: tuple[T, ...] | None = tuple(nodes)

    def all(self) -> tuple[T, ...]:
        """The nodes in order; kept until the next change."""
        if self._all is None:
            self._all = tuple(self)
        return self._all

    def __iter__(self) -> Iterator[T]:
        node = self._next[None]
        while node is not None:
            yield node
            node = self._next[node]

    def after(self, node: T | None) -> T | None:
        """The next node; the first one after None, None after the last one."""
        return self._next[node]

    def insert(self, node: T, before: T | None) -> None:
        """Insert a node; at the end if `before` is None."""
        previous = self._previous[before]
        self._next[previous] = self._previous[before] = node
        self._next[node], self._previous[node] = before, previous
        self._all = None
        low = -self._GAP if previous is None else self.place[previous]
        if before is None:
            self.place[node] = low + self._GAP
            return
        high = self.place[before]
        self.place[node] = high - self._GAP if previous is None else (low + high) // 2
        if self.place[node] == low:  # no room is left between these two
            self.place = {n: i * self._GAP for i, n in enumerate(self)}

    def remove(self, node: T) -> None:
        """Remove a node."""
        previous, after = self._previous.pop(node), self._next.pop(node)
        self._next[previous], self._previous[after] = after, previous
        del self.place[node]
        self._all = None


def cycle(needs: Sequence[set[int]], stuck: set[int]) -> list[int]:
    """A cycle among the nodes that cannot be ordered."""
    at = min(stuck)
    path: list[int] = []
    while at not in path:  # follow unmet dependencies: eventually a node is met twice
        path.append(at)
        at = min(needs[at] & stuck)
    return path[path.index(at) :][::-1]
