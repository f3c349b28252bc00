"""500 drawn ensembles of trees, in the forms that exporters write, judged by onnxruntime in a child process."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers import drawn_trees

from singa_backend import SingaBackend
from singa_backend.engines.oracle import Oracle

CASES = [*((seed, None, None) for seed in range(490)), *((seed, 1000, depth) for seed, depth in enumerate((1, 3, 4))),
         *((seed, 3, depth) for seed, depth in enumerate((12, 14, 16, 17, 18, 19, 20)))]  # fmt: skip
"""Seeds, with the numbers of trees and levels of large ones."""


def test_labels_and_scores_are_those_of_onnxruntime() -> None:
    pytest.importorskip("onnxruntime")
    assert len(CASES) == 500
    wrong = []
    with Oracle("onnxruntime") as oracle:
        for case in CASES:
            proto, x = drawn_trees.written_case(*case)
            expected = oracle.run(proto.SerializeToString(), {"x": x})
            rep = SingaBackend.prepare(proto)
            rep.run({"x": x})
            found = rep.run({"x": x})
            for name, a in zip(expected, found, strict=True):
                b = np.asarray(expected[name])
                near = a.dtype.kind == "f" and np.allclose(a, b, rtol=1e-5, atol=1e-5, equal_nan=True)
                if a.shape != b.shape or not (near or np.array_equal(a, b)):
                    wrong.append((case, name))
    assert not wrong
