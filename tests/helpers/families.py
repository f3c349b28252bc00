"""The list of families, backend/singa_backend/families.txt: which module declares each operator and each kernel.

python -m tests.helpers.families           print the list of the present modules
python -m tests.helpers.families --write   write it
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from tests.helpers.paths import PROJECT

LIST = PROJECT / "backend/singa_backend/families.txt"
ROOMS = ("operators", "operators/microsoft", "kernels")


def current() -> Iterator[str]:
    """The lines of the list, in the order of the imports; it needs a process that has imported no operators."""
    from singa_backend import _lazy, domains  # noqa: F401 - the list that `_lazy` has read is not used
    from singa_backend.proto import schemas

    domains.listed.clear()
    domains.waiting.clear()
    lines: dict[tuple[str, str, str], dict[str, None]] = {}

    def note(table: str, domain: str, name: str) -> None:
        frame: Any = sys._getframe(2)
        while frame.f_code.co_name != "<module>":
            frame = frame.f_back
        lines.setdefault((table, frame.f_globals["__name__"].removeprefix("singa_backend."), domain), {})[name] = None

    def add(table: domains.Families[Any], key: domains.Key, value: Any) -> None:
        note(table.name, *key)
        table._entries[key] = value

    def declare_schema(name: str, *args: Any, domain: str = schemas.SINGA_DOMAIN, **rest: Any) -> Any:
        note("schemas", domain, "")
        return declare(name, *args, domain=domain, **rest)

    declare, schemas.declare_schema, domains.Families.__setitem__ = schemas.declare_schema, declare_schema, add  # type: ignore[method-assign]  # to see who adds
    for room in ROOMS:
        for path in sorted((LIST.parent / room).glob("*.py")):
            import_module(f"singa_backend.{room.replace('/', '.')}.{path.stem}")
    for (table, module, domain), names in lines.items():
        yield "|".join((table, module, domain, " ".join(names)))


if __name__ == "__main__":
    text = "".join(f"{line}\n" for line in current())
    if "--write" in sys.argv:
        LIST.write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)
