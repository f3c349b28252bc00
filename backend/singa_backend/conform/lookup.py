"""Whether an operator version works here, in a word, by the evidence of its row in the support report."""

from __future__ import annotations

from typing import Any

from ..autodiff.support import DIFFERENTIABLE, gradient_support

WORKS = {
    "yes": "every case of ONNX's suite that runs this version passes, on every device of this report",
    "other": "no case of ONNX's suite runs this version; cases of older releases pass, or generated models judged it",
    "partly": "some cases that run this version do not pass on some device; each is listed with its reason",
    "unrun": "this version is declared, and nothing in this report has run it",
    "no": "this version is not declared: a model that uses it is refused before it runs",
}
"""The words of the column "works", and what they mean."""

OF_BACKENDS = {
    "yes": "every case of ONNX's suite that calls this version passes, on every device of this report",
    "partly": "some cases that call this version pass, others do not",
    "unrun": "no case calls this version",
    "no": "no case that calls this version passes",
}
"""What they mean for a backend other than this package."""

UNCHECKED = "unchecked"

GRADIENTS = {
    "checked": "a gradient that agrees with differences in float64",
    "few": "a gradient that agrees with differences in float64, at fewer points than the others",
    "zero": "the gradient is zero almost everywhere",
    "constant": "the outputs do not depend on the values of float inputs",
    "integer": "no output has a float type, so there is no gradient",
    "random": "the outputs are random and do not depend on the inputs",
    "undefined": "the gradient is not defined",
    UNCHECKED: "a gradient is declared; this report has no check of it (sonnx gradients)",
    "wrong": "the declared gradient contradicts the differences at a point",
    "died": "the process that checked the gradient died",
    "timeout": "the check of the gradient took too long",
    "missing": "no gradient",
}
"""The words of the column "gradient", and what they mean."""

AI_ONNX = "ai.onnx"


def works(row: dict[str, Any]) -> str:
    """Return a key of WORKS.  The suite's cases decide if there are any, then those of old releases, then generated models."""
    if not row["declared"]:
        return "no"
    for cells, word in ((row["devices"], "yes"), (row["releases"], "other")):
        ran = [cell for cell in cells.values() if cell["cases"]]
        if ran:
            return word if all(cell["passed"] == cell["cases"] for cell in ran) else "partly"
    return "other" if row["fuzz"] else "unrun"


def gradient(domain: str, name: str, version: int, verdict: str | None) -> str:
    """Return a key of GRADIENTS.

    Args:
        domain: The domain of the operator.
        name: Its name.
        version: The schema version.
        verdict: The verdict of `sonnx gradients`; None if there is none, so that the declaration decides.
    """
    if verdict is not None:
        return verdict
    kind = gradient_support(domain, name, version).kind
    return UNCHECKED if kind == DIFFERENTIABLE else kind


def named(row: dict[str, Any]) -> str:
    """Return the name of a row: "Softmax-13", "ai.onnx.ml:Scaler-1"."""
    prefix = "" if row["domain"] == AI_ONNX else f"{row['domain']}:"
    return f"{prefix}{row['operator']}-{row['version']}"
