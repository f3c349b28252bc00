"""How each operator version stands to gradients: it has one, it rightly has none, or nobody has said.

This is what the declarations say; what differences say of it is judged in conform/matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..interpreters.base import LEAST_OPSET
from ..ir.declaration import Declaration, declarations
from ..proto.schemas import schemas, type_strings, version_at

REASONS = {
    "integer": "the outputs are no floats",
    "zero": "the gradient is zero almost everywhere",
    "undefined": "there is no gradient",
    "random": "the outputs are drawn at random, whatever the inputs",
    "constant": "the outputs do not depend on float inputs",
}
"""Why an operator has no gradient.  The first is found from the schema; the others are declared."""


def no_gradient_reason(declaration: Declaration, version: int | None = None) -> str:
    """The reason why a declaration has no gradient, as it stands in REASONS; empty where it has one, or where nobody has said."""
    if declaration.gradient_rule is not None or declaration.decomposition_rule is not None:
        return ""
    if declaration.reason:
        return declaration.reason
    return "integer" if never_float(declaration.domain, declaration.name, version or declaration.versions[-1]) else ""


def never_float(domain: str, name: str, version: int) -> bool:
    """Whether no output can be of floats."""
    schema = schemas[domain, name][version]
    return not any("float" in t or "double" in t for o in schema.outputs for t in type_strings(schema)[o.type_str])


DIFFERENTIABLE = "gradient"
MISSING = "missing"


@dataclass(frozen=True)
class GradientSupport:
    """kind: "gradient", "missing", or a reason of differentiate.REASONS.  how: "rule" or "composition".  why: in words."""

    kind: str
    how: str = ""
    why: str = ""


def gradient_support(domain: str, name: str, version: int) -> GradientSupport:
    """How a schema version stands, by its declaration."""
    declaration = declarations.get((domain, name), {}).get(version)
    if declaration is None:
        return GradientSupport(MISSING, why="the operator is not declared")
    how = "rule" if declaration.gradient_rule else "composition" if declaration.decomposition_rule else ""
    if never_float(domain, name, version):
        return GradientSupport("integer", how, REASONS["integer"])
    reason = declaration.reason
    if not reason and how == "composition":  # an old version of an operator without gradient, written as the newest one
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


def unwritable(declaration: Declaration, version: int, opset: int = LEAST_OPSET) -> str:
    """Why a node of this version cannot be written at an opset where gradients can; empty where it can."""
    domain, name = declaration.domain, declaration.name
    there = version_at(domain, name, max(opset, LEAST_OPSET))
    known = declarations.get((domain, name), {}).get(there or 0)
    if declaration.decomposition_rule is not None or known is declaration:
        return ""
    return f"{name}-{version} does not say how it is written in opset {max(opset, LEAST_OPSET)}"
