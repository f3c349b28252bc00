"""Fixtures of many test modules: emulated CUDA devices, onnxruntime, the end of training mode, gradients against differences."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from singa import autograd, sonnx
from singa._core import ops, tape
from singa._core.tensor import Tensor
from singa_backend import session
from singa_backend.engines.oracle import Oracle

# A shell starts a command in the background with Ctrl-C ignored, which the children of the tests would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


os.environ.setdefault("SONNX_MACHINE_CODE", "wait")  # what a first run computes does not depend on what was compiled before

sys.path.insert(0, str(Path(__file__).parent / "fakecuda"))
_emulation = "pytest -m fakecuda runs it"  # why there is no emulated device; "" if there is one


def pytest_configure(config: pytest.Config) -> None:
    """Emulate CUDA devices before anything imports CuPy, in this process and in those that tests start."""
    global _emulation
    if config.option.markexpr != "fakecuda":
        return
    import fakecuda

    try:
        fakecuda.install()
    except (fakecuda.Unavailable, ModuleNotFoundError) as error:  # the latter: of pyelftools, or of a part of CuPy
        if os.environ.get("SONNX_REQUIRE_FAKECUDA"):
            raise pytest.UsageError(f"fakecuda: {error}") from None
        _emulation = str(error)
    else:
        os.environ.update(fakecuda.environment(), SONNX_OTHER_DEVICE="CUDA")
        _emulation = ""


def pytest_collection_finish() -> None:
    """Exempt the tests themselves from garbage collection: looking at millions of objects again and again takes time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def by_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run recorded steps and imported models by the definitions, whose bits are those of the tape."""
    monkeypatch.setattr(session.Session, "_refusal", lambda self: session.NO_PLANS)


@pytest.fixture(autouse=True)
def plans(request: pytest.FixtureRequest) -> None:
    """With `--without-plans`, every test runs by the definitions."""
    if request.config.option.without_plans:
        request.getfixturevalue("by_definitions")


@pytest.fixture(autouse=True)
def emulated_devices(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test on emulated devices is skipped without them, and fails if it leaves a fault, a race or a foreign access unread."""
    if request.node.get_closest_marker("fakecuda") is None:
        yield
        return
    if _emulation:
        pytest.skip(_emulation)
    import fakecuda

    from singa_backend.devices import cuda

    cuda.check(0)  # the first use in a process computes a product, which no test counts
    fakecuda.reset()
    yield
    assert fakecuda.report() == []


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest) -> None:
    """What a test draws from a generator of its module does not depend on which tests ran before it in its process."""
    for name, value in vars(request.module).items():
        if isinstance(value, np.random.Generator):
            seed = crc32(f"{request.node.nodeid} {name}".encode())
            value.bit_generator.state = np.random.default_rng(seed).bit_generator.state


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    """onnxruntime in a child process; tests that request it are skipped if it is not installed."""
    if find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not installed")
    with Oracle("onnxruntime") as engine:
        yield engine


@pytest.fixture(autouse=True)
def stop_training() -> Iterator[None]:
    """End training mode after each test."""
    yield
    tape.training = False


@pytest.fixture
def mean_squares() -> type[sonnx.SONNXModel]:
    """The class of an imported model whose first output is trained by the mean squared error."""

    class Fitted(sonnx.SONNXModel):
        def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
            y = self.forward(x)[0]
            loss = autograd.mse_loss(y, t)
            self.optimizer(loss)
            return y, loss

    return Fitted


@pytest.fixture
def against_formula() -> Callable[..., None]:
    """Return against_formula(function, want, arrays, rtol, atol): compare a function of tensors with `want`, the same in NumPy.

    Values are compared, and the slopes in a random direction for each argument, whose tolerances are rtol and atol.
    """

    def run(function: Callable[..., Any], want: Callable[..., Any], arrays: Sequence[Any], rtol: float, atol: float) -> None:
        xs = [Tensor(data=np.array(a), stores_grad=True, name=f"x{i}") for i, a in enumerate(arrays)]
        y = function(*xs)
        np.testing.assert_allclose(y.data, want(*arrays), rtol=1e-6, atol=1e-9)
        dy = np.random.default_rng(1).standard_normal(y.shape)
        loss = ops.op.Reshape(ops.op.ReduceSum(ops.op.Mul(y, Tensor(data=dy))), [1])
        grads = {p.name: g.data for p, g in autograd.backward(loss)}
        for i, a in enumerate(arrays):
            v = np.random.default_rng(2 + i).standard_normal(a.shape)
            moved = [[b + t * 1e-5 * v if j == i else b for j, b in enumerate(arrays)] for t in (1, -1)]
            slope = sum(s * (want(*m) * dy).sum() for s, m in zip((1, -1), moved, strict=True)) / 2e-5
            np.testing.assert_allclose((grads[f"x{i}"] * v).sum(), slope, rtol=rtol, atol=atol)

    return run
