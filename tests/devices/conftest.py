"""Fixtures of the tests on emulated CUDA devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def both_orders() -> Iterator[None]:
    """Threads run in both orders, so that a result that depends on it is reported."""
    import fakecuda

    with fakecuda.order("both"):
        yield
    fakecuda.reset()  # a fault stays on a device
