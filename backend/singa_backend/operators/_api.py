"""What an operator family imports to declare operators and their gradients."""

from ..devices.namespaces import Array, Xp
from ..interpreters.base import BOOL, INT, Body, Op, V
from ..ir.declaration import Between, Declaration, Derived, Host, Ints, Run, Version, Wanted, operator

__all__ = [
    "BOOL", "INT", "Array", "Between", "Body", "Declaration", "Derived", "Host", "Ints", "Op", "Run", "V", "Version", "Wanted",
    "Xp", "operator",
]  # fmt: skip
