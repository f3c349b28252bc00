"""The comparison of ONNX's own test runner."""

from __future__ import annotations

import unittest
from typing import Any

from onnx.backend.test.runner import Runner


def official(actual: Any, expected: list[Any], rtol: float, atol: float) -> str:
    """Compare as the official runner does: "" if it passes, otherwise its error."""
    try:
        Runner.assert_similar_outputs(expected, list(actual), rtol, atol)
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()}"
    return ""
