"""PyTorch as the peer of the stage `speed` of `sonnx device-check`, here on the CPU."""

from __future__ import annotations

import torch

from singa_backend.conform import device_check_peers as peers


def test_each_mode_is_measured_or_has_a_reason() -> None:
    rates = peers.measure("cpu", 16384, 16384, 64, 120.0)
    assert all(rates[f"PyTorch, eager: {name}"] >= 0 for name in ("copy, GB/s", "chain, GB/s", "product, TFLOP/s"))
    assert rates["PyTorch, CUDA graph"].startswith("not measured: RuntimeError: ") == (not torch.cuda.is_available())
    assert any(name.startswith("PyTorch, compiled") for name in rates)


def test_a_mode_that_takes_too_long_is_not_measured() -> None:
    assert peers.measure("cpu", 16384, 16384, 64, 0.001) == {
        f"PyTorch, {m}": "not measured: no answer within 0.001 s" for m in peers.MODES
    }


def test_the_modes_compute_the_same() -> None:
    x = torch.arange(-3.0, 4.0)
    assert torch.equal(peers.in_mode(torch, "eager", torch.relu, x)(), torch.relu(x))
