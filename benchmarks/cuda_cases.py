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
from singa_backend.errors import OperatorError

CAPTURING = 3
"""The run that is captured."""
NO_RECORD = "reads or returns values that are not arrays of the device"
DRAWS = "draws random numbers"


def others(rep: Any, inputs: Sequence[Any], seed: int) -> list[Any]:
    """Other values for the inputs on the device: floats in another order, smaller and moved; integers between the same bounds."""
    rng = np.random.default_rng(seed)
    drawn = []
    for declared, x in zip(rep.inputs, inputs, strict=False):
        if not isinstance(x, np.ndarray) or not x.size or isinstance(rep._session.feed(declared.name, x), np.ndarray):
            drawn.append(x)
        elif x.dtype.kind == "b":
            drawn.append(rng.random(x.shape) < 0.5)
        elif x.dtype.kind in "iu":
            drawn.append(rng.integers(x.min(), x.max(), x.shape, x.dtype, endpoint=True))
        elif x.dtype.kind in "fc":
            drawn.append((rng.permutation(x.reshape(-1)).reshape(x.shape) * 0.875 + 0.0625).astype(x.dtype))
        else:
            drawn.append(x)
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
    pairs, described = [], ()
    for k in range(CAPTURING + 4):
        drawn = inputs if k < CAPTURING else others(rep, inputs, k)
        try:
            expected = plain.run(drawn)
        except OperatorError:  # the values do not fit each other
            drawn = inputs
            expected = plain.run(drawn)
        found = rep.run(drawn, to_host=k % 2 == 0)
        pairs.append((found, expected))
        if k + 1 == CAPTURING:
            described = rep._session._executor.graphs_in_words()
    reason = NO_RECORD if not described else described[0].removeprefix("no graph: ")
    if described and described[0].startswith("a graph") and len(described) == 1:
        reason = ""
    elif len(described) > 1 or (described and "outside graphs" in described[0]):
        reason = "; ".join(dict.fromkeys(d.partition("outside graphs: ")[2] for d in described if "outside graphs" in d))
    if DRAWS not in reason:
        for found, expected in pairs:  # after all runs: no output may be memory of a graph
            assert same(rep.device.get_all(found), list(expected)), f"{case.name}: runs by graphs have other bits"
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
