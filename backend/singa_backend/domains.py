"""Tables that modules fill when something first needs an entry, because an import of all of them takes time.

`families.txt` lists the modules and what each adds to a table.  It is generated, and tests/operators/test_families.py compares it
with the modules.  An import of the package reads only the list (`_lazy`).
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

Key: TypeAlias = tuple[str, str]
"""A domain and the name of an operator."""
V = TypeVar("V")

listed: dict[str, dict[Key, list[str]]] = {}
"""Table -> key -> the modules that add to its entry, in the order of the list."""


class Families(MutableMapping[Key, V]):
    """A table of operators that families of modules fill: the first use of a key imports its modules, an iteration imports all.

    A key is listed as waiting until its modules are imported, so that other threads wait too, for Python's lock of the module.
    While a module is imported, it must not look up keys to which it adds.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._entries: dict[Key, V] = {}
        self._waiting = dict(listed.get(name, {}))
        self._modules = listed.get(name, {})
        self._order = {key: i for i, key in enumerate(self._modules)}

    def present(self, key: Key, empty: V) -> V:
        """The entry of a key, `empty` if there is none, without an import: for the modules that add to it."""
        return self._entries.get(key, empty)

    def lists(self, key: Key, module: str) -> bool:
        """Whether a module is one of the families that add to a key."""
        return module in self._modules.get(key, ())

    def place(self, key: Key, module: str) -> int:
        """The position of a module among those that add to a key; those that are not listed are last."""
        modules = self._modules.get(key, [])
        return modules.index(module) if module in modules else len(modules)

    def _load(self, key: Key) -> None:
        for module in self._waiting.get(key, ()):
            import_module(module)
        self._waiting.pop(key, None)

    def __getitem__(self, key: Key) -> V:
        if key in self._waiting:
            self._load(key)
        return self._entries[key]

    def get(self, key: Key, default: Any = None) -> Any:
        """As that of a dict; that of the base class raises an error for each absent key."""
        if key in self._waiting:
            self._load(key)
        return self._entries.get(key, default)

    def __contains__(self, key: object) -> bool:
        """Whether there is an entry, without an import."""
        return key in self._waiting or key in self._entries

    def __setitem__(self, key: Key, value: V) -> None:
        self._entries[key] = value

    def __delitem__(self, key: Key) -> None:
        del self._entries[key]

    def __iter__(self) -> Iterator[Key]:
        for key in list(self._waiting):
            self._load(key)
        return iter(sorted(self._entries, key=lambda key: self._order.get(key, len(self._order))))  # whatever was imported first

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Remove all entries at once."""
        self._entries.clear()


waiting: dict[str, list[str]] = {}
"""Domain -> the modules that declare its schemas, until they are imported."""


def load_domain(domain: str) -> None:
    """Declare the schemas of a domain, if that was put off."""
    for module in waiting.get(domain, ()):
        import_module(module)  # which waits for another thread that imports it
    waiting.pop(domain, None)
