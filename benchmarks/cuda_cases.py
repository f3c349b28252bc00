"""Which of ONNX's node cases run as one CUDA graph on an emulated device, and why the others do not.

A case runs until it is captured, and then on three draws of its inputs; the bits must be those of runs without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx

from singa_backend import SingaBackend
from singa_backend.conform.cases import Case

CAPTURING = 3
"""The run that is captured."""
NO_RECORD = "reads or returns values that are not arrays of the device"
DRAWS = "draws random numbers"


def others(rep: Any, inputs: Sequence[Any], seed: int) -> list[Any]:
    """The inputs with the elements of each array on the device in another order, as far as they may be: floats, or many."""
    rng = np.random.default_rng(seed)
    drawn = []
    for declared, x in zip(rep.graph.inputs, inputs, strict=False):
        there = isinstance(x, np.ndarray) and not isinstance(rep._session.feed(declared.name, x), np.ndarray)
        drawn.append(rng.permutation(x.reshape(-1)).reshape(x.shape) if there and x.dtype.kind == "f" and x.size > 1 else x)
    return drawn


def same(found: Any, expected: Any) -> bool:
    """Whether two outputs have equal bits, or are both NaN."""
    if isinstance(expected, (list, tuple)):
        return len(found) == len(expected) and all(map(same, found, expected))
    if not isinstance(expected, np.ndarray):
        return True
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return False
    if expected.dtype.kind in "OSU":
        return bool((found == expected).all())
    return found.tobytes() == expected.tobytes() or (
        expected.dtype.kind in "fcV"
        and bool(np.array_equal(*(a.astype(np.complex128) for a in (found, expected)), equal_nan=True))
    )


def outcome(case: Case) -> str:
    """Run a case; return "" if one graph computes it, and why not otherwise.

    Raises:
        AssertionError: a run by graphs has other bits than one without.
    """
    model = onnx.load_model_from_string(case.model)
    rep, plain = SingaBackend.prepare(model, "CUDA"), SingaBackend.prepare(model, "CUDA", optimize=0)
    inputs = list(case.data[0][0])
    pairs = []
    for k in range(CAPTURING + 3):
        drawn = inputs if k < CAPTURING else others(rep, inputs, k)
        pairs.append((rep.run(drawn), plain.run(drawn)))
    described = rep._session._executor.graphs_in_words
    reason = NO_RECORD if not described else described[0].removeprefix("no graph: ")
    if described and described[0].startswith("a graph") and len(described) == 1:
        reason = ""
    elif len(described) > 1 or (described and "outside graphs" in described[0]):
        reason = "; ".join(dict.fromkeys(d.partition("outside graphs: ")[2] for d in described if "outside graphs" in d))
    if DRAWS not in reason:
        assert all(same(list(a), list(b)) for a, b in pairs), f"{case.name}: runs by graphs have other bits"
    return reason


def section(outcomes: dict[str, str]) -> list[str]:
    """The lines of the report."""
    whole = sum(not reason for reason in outcomes.values())
    reasons: dict[str, list[str]] = {}
    for name, reason in outcomes.items():
        if reason:
            reasons.setdefault(reason, []).append(name.removeprefix("test_"))
    lines = [
        "", "## ONNX's node cases as graphs", "",
        f"{whole:,} of {len(outcomes):,} cases are one graph from the third run on: three more draws of their inputs have the",
        "bits of runs without graphs. The others, by what keeps a step outside:", "",
        "| reason | cases | names |", "|---|---:|---|",
    ]  # fmt: skip
    for reason, names in sorted(reasons.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"| {reason} | {len(names)} | {', '.join(names)} |")
    return lines
