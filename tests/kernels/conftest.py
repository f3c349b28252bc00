"""The kernels of oneDNN and NumPy; tests/elementwise compares machine code."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")
