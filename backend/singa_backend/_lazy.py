"""The modules and public names of the package as attributes, imported on first use; the list of families of operators.

The import of `installation` warns of another package `singa`.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import get_data
from typing import Any

from .domains import listed, waiting
from .io import installation as installation


def _list_families(text: str) -> None:
    """Read families.txt: table|module|domain|names, of which the table `schemas` has no names."""
    for line in text.splitlines():
        table, module, domain, names = line.split("|")
        for name in names.split():
            listed.setdefault(table, {}).setdefault((domain, name), []).append(f"singa_backend.{module}")
        if table == "schemas":
            waiting.setdefault(domain, []).append(f"singa_backend.{module}")


_list_families((get_data(__name__, "families.txt") or b"").decode())  # also from an archive


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # Python looks for `__path__` here before it imports anything
        raise AttributeError(f"module 'singa_backend' has no attribute {name!r}")
    if find_spec(f"singa_backend.{name}"):
        return import_module(f"singa_backend.{name}")
    from . import _names

    if name != "__all__" and name not in _names.__all__:
        raise AttributeError(f"module 'singa_backend' has no attribute {name!r}")
    return getattr(_names, name)


def __dir__() -> list[str]:
    from ._names import __all__

    return list(__all__)
