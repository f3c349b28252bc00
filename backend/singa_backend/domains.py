"""The domains whose operators are declared when something first needs them, because that takes time.

An import of the package alone names their modules; `load_domain` imports one, and the module notes when it has declared all.
"""

from __future__ import annotations

from importlib import import_module

waiting: dict[str, str] = {}
"""Domain -> the module that declares its operators, until that module has been imported."""


def load_domain(domain: str) -> None:
    """Declare the operators of a domain, if that was put off."""
    if module := waiting.get(domain):
        import_module(module)  # which waits for another thread that imports it


def declared(module: str) -> None:
    """Note that a module has declared all its operators."""
    for domain in [d for d, m in waiting.items() if m == module]:
        waiting.pop(domain, None)
