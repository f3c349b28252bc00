"""The guards of an array module take NumPy's forms of a call, and their sizes bound its result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from singa_backend.devices.guards import SIZES

X = np.arange(6.0, dtype=np.float32).reshape(2, 3)

FORMS: list[tuple[Any, ...]] = [
    ("zeros", 3), ("zeros", (2, 3), np.int8), ("ones", [2, 3]), ("empty", (2,), np.float16), ("full", (2, 3), 7),
    ("full", 4, np.float32(1)), ("arange", 5), ("arange", 1, 2, 0.25), ("arange", 5, 0, -2, np.int8),
    ("broadcast_to", X, (4, 2, 3)),
    ("concatenate", [X, X], 1), ("stack", [X, X]), ("repeat", X, 2), ("repeat", X, [2, 0, 1], 1), ("tile", X, 2),
    ("tile", X, (2, 2)), ("take", X, [0, 1], 1), ("take", X, 2), ("take", X, np.zeros((4, 5), np.int64)), ("matmul", X, X.T),
    ("matmul", X, X[0]), ("matmul", np.ones((4, 1, 2, 3)), np.ones((5, 3, 2))), ("where", X > 1), ("where", X > 1, X, 0),
    ("bincount", np.array([1, 2]), None, 9), ("nonzero", X), ("flatnonzero", X),
    ("meshgrid", X[0], X[:, 0]), ("eye", 3), ("eye", 3, 4, 1), ("pad", X, 1), ("pad", X, (1, 2)), ("pad", X, ((1, 0), (0, 2))),
    ("pad", X, ((0, 0), (2, 2)), "edge"), ("pad", X, np.array([[1, 2], [3, 4]]), "constant"),
]  # fmt: skip


def test_every_guarded_function_has_a_form() -> None:
    assert {name for name, *_ in FORMS} == set(SIZES)


@pytest.mark.parametrize("form", FORMS, ids=[f"{name}-{i}" for i, (name, *_) in enumerate(FORMS)])
def test_the_size_of_a_result_is_bounded(form: tuple[Any, ...]) -> None:
    name, *arguments = form
    factors, item = SIZES[name](*arguments)
    result = getattr(np, name)(*arguments)
    results = result if isinstance(result, tuple) else (result,)
    grows = sum(r.nbytes for r in results) > sum(a.nbytes for a in arguments if isinstance(a, np.ndarray))
    assert not grows or sum(r.nbytes for r in results) <= math.prod(factors) * item
