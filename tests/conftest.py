"""What tests of many modules share: onnxruntime beside us, a tape that no test leaves training, a model to train."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from singa import autograd, sonnx, tape
from singa.tensor import Tensor
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


@pytest.fixture
def mean_squares() -> type[sonnx.SONNXModel]:
    """The class of an imported model whose first output is trained under mean squares."""

    class Fitted(sonnx.SONNXModel):
        def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
            y = self.forward(x)[0]
            loss = autograd.mse_loss(y, t)
            self.optimizer(loss)
            return y, loss

    return Fitted
