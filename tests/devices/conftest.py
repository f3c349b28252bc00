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


@pytest.fixture
def capturable_products(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's own products by cuBLAS fail, as they do while a stream captures; only inverses of stacks need it."""
    from cupy_backends.cuda.libs import cublas

    def refused(*_: Any) -> None:
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")

    for name, value in vars(cublas).items():
        if callable(value) and not isinstance(value, type) and name not in ("check_status", "create") and "getr" not in name:
            monkeypatch.setattr(cublas, name, refused)
