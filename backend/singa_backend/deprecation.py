"""Old names of public functions and classes, which still work and warn."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping


def old_names(module: str, renamed: Mapping[str, object]) -> Callable[[str], object]:
    """Return a module's `__getattr__` that finds what was renamed, with a DeprecationWarning.

    Args:
        module: The module's name.
        renamed: Each old name, and the class or function that it means now.
    """

    def __getattr__(name: str) -> object:
        if name not in renamed:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = renamed[name]
        warnings.warn(f"{module}.{name} is now {getattr(found, '__name__', found)}", DeprecationWarning, stacklevel=2)
        return found

    return __getattr__
