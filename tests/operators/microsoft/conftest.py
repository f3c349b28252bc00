"""onnxruntime in a child process, as the definition of its own operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from singa_backend.engines.oracle import Oracle


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    """Without its optimizations: the kernels of the operators themselves."""
    pytest.importorskip("onnxruntime", reason="the witness is an extra: pip install 'sonnx[oracle]'")
    with Oracle("onnxruntime", optimise=False) as engine:
        yield engine
