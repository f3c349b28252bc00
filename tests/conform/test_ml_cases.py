"""ONNX's own cases of ai.onnx.ml and of texts: plans compute each by kernels, and return what the definitions do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import load_model_from_string

from singa_backend import SingaBackend
from singa_backend.backend import SingaRep
from singa_backend.conform import cases, worker

KERNELS = {
    "ai_onnx_ml_array_feature_extractor": {"numpy.take"},
    "ai_onnx_ml_binarizer": {"numpy.binarizer"},
    "ai_onnx_ml_label_encoder": {"numpy.categories"},
    "ai_onnx_ml_tree_ensemble": {"numpy.trees", "numpy.scores"},
    "tfidfvectorizer": {"numpy.n-grams"},
    "strnormalizer": {"numpy.strings"},
}
"""The kernels of the plans, by the beginning of a case's name."""


@pytest.fixture(scope="module")
def found() -> list[cases.Case]:
    return cases.load(["node"], rf"^test_({'|'.join(KERNELS)})")


def test_each_case_runs_by_kernels_as_by_its_definition(found: list[cases.Case]) -> None:
    assert {n for n in KERNELS if any(c.name.startswith(f"test_{n}") for c in found)} == KERNELS.keys()
    for case in found:
        model = load_model_from_string(case.model)
        rep = SingaBackend.prepare(model)
        for inputs, expected in case.data:
            defined = SingaBackend.run_model(model, inputs, optimize=0)
            for _ in range(2):
                for planned, a, b in zip(rep.run(inputs), defined, expected, strict=True):
                    same(planned, a)
                    same(planned, b)
            profile = rep.profile(inputs, runs=1)
            kernels = {s.kernel for s in profile.steps}
            assert kernels == next(k for n, k in KERNELS.items() if case.name.startswith(f"test_{n}")), (
                case.name,
                profile.reason,
            )


def test_conform_judges_the_plans(found: list[cases.Case], monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs whose outputs are judged are those of plans; one more run by the definitions records what was executed."""
    reasons: list[Any] = []
    run = SingaRep.run

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = run(self, *args, **kwargs)
        reasons.append(self._session.reason)
        return outputs

    monkeypatch.setattr(SingaRep, "run", watched)
    for case in found:
        reasons.clear()
        result = worker.run_case(case, SingaBackend, "CPU")
        assert (result.strict, result.official) == ("passed", "passed") and result.executed
        assert [r is None for r in reasons] == [False, True, True] * len(case.data)


def same(a: Any, b: Any) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype.kind == "f":
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)
    else:
        np.testing.assert_array_equal(a, b)
