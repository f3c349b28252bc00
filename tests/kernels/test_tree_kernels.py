"""Kernels of tree ensembles against their definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import ModelProto
from tests.helpers import drawn_trees

from singa_backend import SingaBackend


def agree(proto: ModelProto, x: np.ndarray, kernel: bool = True) -> None:
    """The plans of several batches return what the definition returns; `kernel`: whether no definition may compute."""
    rep = SingaBackend.prepare(proto)
    for batch in (x, x[:1], x[-1:], x[len(x) // 2 :][:1], x[: len(x) // 2 + 1], x[:2], x):
        expected = SingaBackend.run_model(proto, {"x": batch}, optimize=0)
        for _ in range(2):
            found = rep.run({"x": batch})
            for a, b in zip(found, expected, strict=True):
                same(a, b)
    kernels = {s.kernel for s in rep.profile({"x": x}).steps}
    assert not kernel or not any("definition" in k for k in kernels), kernels


def same(a: Any, b: Any) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    if a.dtype.kind == "f":
        assert np.allclose(a, b, rtol=2e-6, atol=2e-7, equal_nan=True)
    else:
        assert np.array_equal(a, b)


@pytest.mark.parametrize("seed", range(150))
def test_drawn_ensembles(seed: int) -> None:
    agree(*drawn_trees.drawn_case(seed))


@pytest.mark.parametrize("seed", range(60))
def test_drawn_tree_ensembles(seed: int) -> None:
    agree(*drawn_trees.numbered_case(seed))


@pytest.mark.parametrize("trees, depth", [(1000, 3), (3, 20), (60, 12)])
def test_many_and_deep_trees(trees: int, depth: int) -> None:
    agree(*drawn_trees.drawn_case(7, trees, depth))
