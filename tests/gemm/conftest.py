from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tests.elementwise.conftest import cache as cache  # these tests have the same fixture
from tests.helpers.gemm_frames import LIMITS

from singa_backend.elementwise.compile import level
from singa_backend.kernels import integer_products, quantized


def pytest_itemcollected(item: pytest.Item) -> None:
    """A test at each level is the same in a run at a lower one."""
    if "limited" in getattr(item, "fixturenames", ()):
        item.add_marker("levels")


@pytest.fixture(params=LIMITS)
def limited(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each level that this processor has."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", LIMITS[request.param])
    if level() != request.param:
        pytest.skip(f"this processor is of the level {level()}")
    return str(request.param)


@pytest.fixture
def inexact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use machine code although this processor has exact products of oneDNN."""
    for module in integer_products, quantized:  # fusion asks the second one
        monkeypatch.setattr(module, "exact_int8", lambda: False)


@pytest.fixture
def ended() -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Return a copy of an array that ends at a page that may not be read."""
    page, protect = mmap.PAGESIZE, ctypes.CDLL(None).mprotect
    closed = []

    def copy(a: np.ndarray) -> np.ndarray:
        size = -(-a.nbytes // page) * page
        whole = np.frombuffer(mmap.mmap(-1, size + page), np.uint8)
        assert protect(ctypes.c_void_p(whole.ctypes.data + size), page, 0) == 0
        closed.append((whole, size))
        found = whole[size - a.nbytes : size].view(a.dtype).reshape(a.shape)
        found[...] = a
        return found

    yield copy
    for whole, size in closed:
        protect(ctypes.c_void_p(whole.ctypes.data + size), page, 3)
