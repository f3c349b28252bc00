"""The counter-based generator: its paper's vector, the same bits on every device and in other runtimes, and what is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import checker, helper

from singa import autograd, device
from singa._core import ops, random, tape
from singa._core.tensor import Tensor
from singa.device import Device
from singa_backend import SingaBackend
from singa_backend.devices import device as backend
from singa_backend.engines.oracle import Oracle
from singa_backend.interpreters.builder import GraphBuilder
from singa_backend.interpreters.eager import Eager
from singa_backend.operators.philox import philox
from singa_backend.opsets.model import to_model


def words(seed: int, draw: int, *shape: int, on: str = "CPU") -> Any:
    place = backend.resolve(on)
    made = Eager(place).call("Philox", [np.array([seed, draw]), np.array(shape, np.int64)], {}, 1, "ai.singa")[0]
    return place.get(made)


def model(opset: int) -> Any:
    builder = GraphBuilder(opset)
    key = builder.input("key", helper.make_tensor_type_proto(7, [2]))
    shape = builder.input("shape", helper.make_tensor_type_proto(7, [2]))
    return to_model(builder, "p", builder.call("Philox", [key, shape], {}, 1, "ai.singa"), ["bits"])


def test_the_papers_vector() -> None:
    assert [hex(w) for w in words(0, 0, 4).tolist()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]


def test_a_result_is_a_function_of_seed_draw_and_place() -> None:
    whole = words(5, 7, 50)
    assert np.array_equal(words(5, 7, 10), whole[:10])
    assert np.array_equal(words(5, 7, 5, 10).reshape(-1), whole)
    assert not np.array_equal(words(6, 7, 50), whole)
    assert not np.array_equal(words(5, 8, 50), whole)
    assert words(5, 7, 0, 3).shape == (0, 3)
    assert words(5, 7).shape == ()


def test_the_same_bits_on_every_namespace() -> None:
    assert np.array_equal(words(2**62 + 5, 2**40 + 3, 100), words(2**62 + 5, 2**40 + 3, 100, on="STRICT"))


@pytest.mark.parametrize("opset", [18, 21])
@pytest.mark.parametrize("engine", ["onnxruntime", "reference"])
def test_the_same_bits_elsewhere(engine: str, opset: int) -> None:
    proto = model(opset)
    checker.check_model(proto)
    assert [f.name for f in proto.functions] == ["Philox"]
    for seed, draw in ((0, 0), (2**62 + 5, 2**40 + 3), (123456789, 1)):
        feeds = {"key": np.array([seed, draw]), "shape": np.array([3, 7])}
        with Oracle(engine) as oracle:
            made = oracle.run(proto.SerializeToString(), feeds)["bits"]
        assert np.array_equal(made, words(seed, draw, 3, 7))
        assert np.array_equal(SingaBackend.run_model(proto, feeds)[0], made)


def test_it_is_declared_with_its_composition() -> None:
    assert philox.decomposition_rule is not None
    assert philox.reason == "random"


@pytest.fixture
def dev() -> Device:
    return Device("CPU", seed=3)


def test_uniform(dev: Device) -> None:
    u = random.uniform((200_000,), dev).data
    assert u.dtype == np.float32
    assert 0 <= u.min() < 1e-4 < 1 - 1e-4 < u.max() < 1
    assert abs(u.mean() - 0.5) < 3e-3
    assert abs(u.std() - 12**-0.5) < 3e-3
    d = random.uniform((200_000,), dev, np.float64).data
    assert abs(np.corrcoef(d[:-1], d[1:])[0, 1]) < 0.01
    assert (d * 2.0**53 == np.floor(d * 2.0**53)).all()


def test_normal_and_bernoulli(dev: Device) -> None:
    n = random.normal(2.0, 3.0, (200_000,), dev, np.float64).data
    assert abs(n.mean() - 2) < 0.03
    assert abs(n.std() - 3) < 0.03
    assert abs((np.abs(n - 2) < 3).mean() - 0.6827) < 5e-3
    assert abs(random.bernoulli(0.3, (200_000,), dev).data.mean() - 0.3) < 5e-3


def test_normals_are_box_and_mullers_within_a_unit_in_the_last_place(dev: Device) -> None:
    """float32 normals are rounded once from float64."""
    dev.SetRandSeed(9)
    n = random.normal(0.0, 1.0, (5000,), dev).data
    dev.SetRandSeed(9)
    u, v = random.uniform((2, 5000), dev, np.float64).data
    want = np.sqrt(-2 * np.log(1 - u)) * np.cos(2 * np.pi * v)
    assert np.max(np.abs(n - want) / np.spacing(np.abs(n))) <= 1


def test_a_seed_begins_the_stream_anew(dev: Device) -> None:
    first = [random.uniform((5,), dev).data for _ in range(3)]
    dev.SetRandSeed(3)
    assert all(np.array_equal(random.uniform((5,), dev).data, f) for f in first)
    assert not np.array_equal(first[0], first[1])


def test_dropout_keeps_the_mean_and_its_gradient_is_the_mask() -> None:
    device.default_device.SetRandSeed(1)
    tape.training = True
    try:
        x = Tensor(data=np.ones(10_000, np.float64), stores_grad=True, name="x")
        y, mask = random.dropout(x, 0.25)
        kept = mask.data
        assert abs(kept.mean() - 0.75) < 0.02
        np.testing.assert_allclose(y.data, kept / 0.75)
        loss = ops.op.Reshape(ops.op.ReduceSum(y), [1])
        ((_, g),) = list(autograd.backward(loss))
        np.testing.assert_allclose(g.data, kept / 0.75)
    finally:
        tape.training = False
