"""Names that an operator family imports to declare operators and their gradients."""

from ..devices.namespaces import Array, Xp
from ..interpreters.base import BOOL, INT, Op, Subgraph, V
from ..ir.declaration import Declaration, Derived, ForwardGraph, Host, Ints, Run, Version, Wanted, operator

__all__ = [
    "BOOL",
    "INT",
    "Array",
    "Declaration",
    "Derived",
    "ForwardGraph",
    "Host",
    "Ints",
    "Op",
    "Run",
    "Subgraph",
    "V",
    "Version",
    "Wanted",
    "Xp",
    "operator",
]  # fmt: skip
