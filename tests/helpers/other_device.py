"""The second device of tests: STRICT, or an emulated CUDA device with `pytest -m fakecuda`.

A test that uses it has the mark `@other_device.runs`, or its module `pytestmark = other_device.MARKS`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

NAME = os.environ.get("SONNX_OTHER_DEVICE", "STRICT")
MARKS = [pytest.mark.fakecuda] if NAME == "CUDA" else []


def runs(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that uses the device."""
    for mark in MARKS:
        test = mark(test)
    return test


def same(actual: Any, expected: Any) -> None:
    """Assert equal numbers: every bit on STRICT, which is NumPy, and all but rounding on CUDA."""
    if NAME == "STRICT":
        np.testing.assert_array_equal(actual, expected)
    else:
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
