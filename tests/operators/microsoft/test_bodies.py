"""The lowered file of drawn nodes: ONNX's operators only, valid, and with the results of the definition and of onnxruntime."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest

from singa import sonnx
from singa_backend import SingaBackend, UnsupportedModel, dtypes
from singa_backend.comparison import tolerances
from singa_backend.conform.cases import data_file
from singa_backend.conform.fuzz import generate, ledger, witnesses
from singa_backend.conform.fuzz.compare import compare, magnitude
from singa_backend.engines.oracle import EngineFailure, Oracle
from singa_backend.errors import SonnxError
from singa_backend.ir.declaration import declarations, has_trait
from singa_backend.proto.schemas import LAX, MICROSOFT, load_domain

load_domain(MICROSOFT)

SEED, INDICES = 11, 12
BODIES = sorted(
    key
    for key, versions in declarations.items()
    if key[0] in (MICROSOFT, LAX) and versions[1].decomposition_rule is not None and not has_trait(*key, "random")
)
ENTRIES = ledger.read(data_file("ledger.toml"))
OPSETS = (21, 26)
"""The opset that the drawn model imports, and the newest one that onnxruntime knows."""

answered: Counter[bool] = Counter()


@pytest.fixture(scope="module")
def onnxruntime() -> Iterator[Oracle]:
    pytest.importorskip("onnxruntime", reason="the witness is an extra: pip install 'sonnx[oracle]'")
    with Oracle("onnxruntime", optimise=False) as engine:
        yield engine


def drawn(domain: str, name: str) -> list[generate.NodeCase]:
    """Nodes of the operator: one for each opset, and one with values of 16 bits."""
    select = f"^{generate.shown_domain(domain)}:{name}-1$"
    cases = [case for i in range(INDICES) if (case := generate.draw(SEED, i, select)) is not None]
    plain = [c for c in cases if not halves(c)]
    return [*plain[: len(OPSETS)], *[c for c in cases if halves(c)][:1]]


def difference(case: generate.NodeCase, expected: list[Any], found: list[Any], witness: str) -> str:
    """Where two results differ beyond the tolerance of the operator, and the ledger has no reason."""
    rule = tolerances.rule(case.domain, case.operator)
    scale = magnitude(list(case.inputs.values()), rule.power)
    result = compare(expected, found, rule, scale)
    if not result.why:
        return ""
    for name in (witness, "decomposition"):
        entry = ledger.find(ENTRIES, case, name, result.kind, result.why)
        if entry is not None and (entry.blame != "tolerance" or not compare(expected, found, rule, scale, entry.bound).why):
            return ""
    return result.why


def halves(case: generate.NodeCase) -> bool:
    """Whether the body rounds to 16 bits at each operator, and the definition once."""
    values = [v for v in case.inputs.values() if isinstance(v, np.ndarray)]
    return any(v.dtype in dtypes.NARROW_FLOATS for v in values) or "float16" in str(case.types) or "bfloat16" in str(case.types)


@pytest.mark.parametrize(("domain", "name"), BODIES, ids=[n for _, n in BODIES])
def test_the_lowered_file(domain: str, name: str, onnxruntime: Oracle) -> None:
    for case, opset in zip(drawn(domain, name), itertools.cycle(OPSETS), strict=False):
        plan = next(witnesses.plans(case))
        model = onnx.load_from_string(plan.model)
        try:
            expected = list(SingaBackend.run_model(model, plan.feeds))
        except SonnxError:  # the definition refuses the node, as the ledger explains
            continue
        lowered = sonnx.convert(model, opset, lower=True)
        assert {n.domain for n in lowered.graph.node} == {""} and [(o.domain, o.version) for o in lowered.opset_import] == [
            ("", opset)
        ]
        onnx.checker.check_model(lowered, full_check=True)
        if halves(case):
            continue
        names = [o.name for o in model.graph.output]
        ours = plan.decode(dict(zip(names, expected, strict=True)))
        mine = plan.decode(dict(zip(names, SingaBackend.run_model(lowered, plan.feeds), strict=True)))
        assert not (why := difference(case, ours, mine, "decomposition")), (
            f"{case.describe()}: the definition and the lowered file: {why}"
        )
        theirs = run(onnxruntime, lowered.SerializeToString(), plan)
        answered[theirs is not None] += 1
        if theirs is None:
            continue
        assert not (why := difference(case, ours, theirs, "onnxruntime")), (
            f"{case.describe()}: the lowered file in onnxruntime: {why}"
        )
        original = run(onnxruntime, plan.model, plan)
        if original is not None:
            why = difference(case, original, theirs, "onnxruntime")
            assert not why, f"{case.describe()}: the file and the lowered file in onnxruntime: {why}"


def run(engine: Oracle, model: bytes, plan: witnesses.WitnessRun) -> list[Any] | None:
    """The outputs in onnxruntime; None if it has no kernel."""
    try:
        return plan.decode(engine.run(model, plan.feeds, timeout=20))
    except EngineFailure:
        return None


def test_most_lowered_files_run_in_onnxruntime() -> None:
    if sum(answered.values()) < len(BODIES):
        pytest.skip("counts the cases of a run of all operators in one process")
    assert answered[True] > 0.9 * sum(answered.values()), answered


def test_what_has_no_body_is_refused_by_name() -> None:
    without = [key for key, versions in declarations.items() if key[0] == MICROSOFT and versions[1].decomposition_rule is None]
    case = generate.draw(SEED, 0, f"^com.microsoft:{without[0][1]}-1$")
    assert case is not None
    with pytest.raises(UnsupportedModel, match=without[0][1]):
        sonnx.convert(case.model, lower=True)
