"""What tests of many modules share: onnxruntime beside us, and a tape that no test leaves training."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from singa import tape
from singa_backend.oracle import Oracle


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    """onnxruntime in a child process; where it is not installed, what asks for it is skipped."""
    if find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not installed")
    with Oracle("onnxruntime") as engine:
        yield engine


@pytest.fixture(autouse=True)
def stop_training() -> Iterator[None]:
    yield
    tape.training = False
