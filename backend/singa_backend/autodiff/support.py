"""Which operator versions have a gradient, by rule or decomposition, and why the others have none.

The answers are those of the declarations; conform/gradient_matrix compares the gradients with finite differences.
"""

from __future__ import annotations

from typing import NamedTuple

from ..interpreters.base import LEAST_OPSET
from ..ir.declaration import Declaration, declarations
from ..proto.schemas import SINGA_DOMAIN, is_custom, schemas, type_strings, version_at

REASONS = {
    "integer": "the outputs are not floats",
    "zero": "the gradient is zero almost everywhere",
    "undefined": "there is no gradient",
    "random": "the outputs are drawn at random, whatever the inputs",
    "constant": "the outputs do not depend on float inputs",
}
"""The reasons why an operator has no gradient.  The first is derived from the schema; the others are declared."""


def no_gradient_reason(declaration: Declaration, version: int | None = None) -> str:
    """The key in REASONS of why a declaration has no gradient, and its details; "" if it has one or none is declared."""
    if declaration.gradient_rule is not None or declaration.decomposition_rule is not None:
        return ""
    if declaration.reason:
        return declaration.reason
    return "integer" if never_float(declaration.domain, declaration.name, version or declaration.versions[-1]) else ""


def never_float(domain: str, name: str, version: int) -> bool:
    """Whether the schema allows floats for no output."""
    schema = schemas[domain, name][version]
    return not any("float" in t or "double" in t for o in schema.outputs for t in type_strings(schema)[o.type_str])


DIFFERENTIABLE = "gradient"
MISSING = "missing"


class GradientSupport(NamedTuple):
    """Whether an operator version has a gradient.

    Attributes:
        kind: "gradient", "missing", or a key of REASONS.
        how: a value of the reports: "rule", "composition" (through the decomposition), or "" if there is neither.
        why: the reason in words, if there is no gradient.
    """

    kind: str
    how: str = ""
    why: str = ""


def gradient_support(domain: str, name: str, version: int) -> GradientSupport:
    """Whether a schema version has a gradient, by its declaration."""
    declaration = declarations.get((domain, name), {}).get(version)
    if declaration is None:
        return GradientSupport(MISSING, why="the operator is not declared")
    how = "rule" if declaration.gradient_rule else "composition" if declaration.decomposition_rule else ""
    if never_float(domain, name, version):
        return GradientSupport("integer", how, REASONS["integer"])
    reason = declaration.reason
    if not reason and how == "composition":  # an old version of an operator without gradient, decomposed to the newest
        last = declarations[domain, name][max(declarations[domain, name])]
        reason = "" if last.gradient_rule or last.decomposition_rule else last.reason
    elif not reason and not how:
        reason = no_gradient_reason(declaration, version)
    if reason:
        kind, _, words = reason.partition(":")
        return GradientSupport(kind, how, words.strip() or REASONS.get(kind, kind))
    if how:
        return GradientSupport(DIFFERENTIABLE, how)
    return GradientSupport(MISSING, why="no gradient is declared, and no reason why there is none")


def gradient_hint(declaration: Declaration) -> str:
    """How to give an operator of the program a gradient; "" for an operator of this package, or one that has a gradient."""
    mine = is_custom(declaration.domain) and declaration.domain != SINGA_DOMAIN
    if not mine or declaration.gradient_rule or declaration.decomposition_rule or declaration.reason:
        return ""
    name = declaration.body.__name__
    return (
        f"write the operator in ONNX operators with `@{name}.function`, or its gradient with `@{name}.gradient`"
        " (docs/operators.md)"
    )


def unwritable(declaration: Declaration, version: int, opset: int = LEAST_OPSET) -> str:
    """Why a node of this version cannot be written at an opset that has gradients; "" if it can."""
    domain, name = declaration.domain, declaration.name
    there = version_at(domain, name, max(opset, LEAST_OPSET))
    known = declarations.get((domain, name), {}).get(there or 0)
    if declaration.decomposition_rule is not None or known is declaration:
        return ""
    return f"{name}-{version} has no decomposition for opset {max(opset, LEAST_OPSET)}"
