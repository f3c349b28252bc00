"""The file of an adapter, what is selected by default and by patterns, and what is refused."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from singa import sonnx
from singa_backend.adapters import Adapter, LowRank, base_digest
from singa_backend.errors import InvalidInput, InvalidModel

rng = np.random.default_rng(0)


def net(**weights: np.ndarray) -> ModelProto:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 6] x) => (float[N, 3] y) {
        h = Gemm <transB = 1> (x, w1, b1) n = LayerNormalization(h, scale, shift) r = Relu(n)
        k = MatMul(r, w2) l = Add(k, b2) y = MatMul(l, w3) }"""
    )
    next(n for n in model.graph.node if n.output[0] == "k").name = "second"
    shapes = {"w1": (8, 6), "b1": (8,), "scale": (8,), "shift": (8,), "w2": (8, 5), "b2": (5,), "w3": (5, 3)}
    drawn = {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in (drawn | weights).items())
    return model


NET = net()
X = rng.normal(size=(4, 6)).astype(np.float32)


def trained(model: Any = NET, **options: Any) -> sonnx.SONNXModel:
    """A model whose B is not 0."""
    made = sonnx.lora(model, 2, **options)
    for name, p in made.get_params().items():
        if name.endswith("lora_B"):
            p.data = rng.normal(size=p.shape).astype(np.float32)
    return made


def test_the_file(tmp_path: Path) -> None:
    adapter = trained(bias="lora_only", dropout=0.25, rslora=True).adapter()
    adapter.save(tmp_path / "a.safetensors")
    again = Adapter.load(tmp_path / "a.safetensors")
    assert (again.base, again.settings) == (base_digest(NET), adapter.settings)
    assert again.to_bytes() == adapter.to_bytes()
    assert again.changes["w1"].scale == pytest.approx(2**0.5)
    data = (tmp_path / "a.safetensors").read_bytes()
    for bad in (b"", data[:-1], data[:40], data.replace(b"sonnx-adapter-1", b"sonnx-adapter-9"), b"\xff" * 64):
        (tmp_path / "a.safetensors").write_bytes(bad)
        with pytest.raises(InvalidInput, match="not an adapter") as error:
            Adapter.load(tmp_path / "a.safetensors")
        assert error.value.code == "SX970"
    with pytest.raises(InvalidInput, match=r"none\.safetensors: No such file"):
        Adapter.load(tmp_path / "none.safetensors")


def test_selection() -> None:
    assert list(sonnx.lora(NET).adapter().changes) == ["w1", "w2"]  # not the last layer
    assert list(sonnx.lora(NET, target="w3").adapter().changes) == ["w3"]
    assert list(sonnx.lora(NET, target=["second", "w1"]).adapter().changes) == ["w1", "w2"]
    assert set(sonnx.lora(NET, bias="all").adapter().values) == {"b1", "b2", "shift"}
    assert set(sonnx.lora(NET, target="w1", bias="lora_only").adapter().values) == {"b1"}
    one = sonnx.lora(NET, 4, alpha=2).adapter().changes["w1"]
    assert one.scale == 0.5 and one.a.shape == (4, 6) and one.b.shape == (8, 4) and not one.b.any()
    assert 0.3 < np.abs(one.a).max() <= 6**-0.5


def test_the_seed_decides() -> None:
    def drawn(seed: int) -> np.ndarray:
        model = sonnx.SONNXModel(NET)
        model.imported.device.SetRandSeed(seed)
        return sonnx.lora(model).adapter().changes["w1"].a

    assert np.array_equal(drawn(1), drawn(1)) and not np.array_equal(drawn(1), drawn(2))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"rank": 0}, "SX973"), ({"alpha": 0.0}, "SX973"), ({"dropout": 1.0}, "SX973"), ({"bias": "some"}, "SX973"),
        ({"target": "w9"}, "SX972"),
    ],
)  # fmt: skip
def test_refused_settings(options: dict[str, Any], code: str) -> None:
    with pytest.raises(InvalidInput) as error:
        sonnx.lora(NET, **options)
    assert error.value.code == code


def test_another_base() -> None:
    adapter = trained().adapter()
    other = sonnx.SONNXModel(net(w3=np.zeros((5, 3), np.float32)))
    before = other.forward(X)[0].data
    with pytest.raises(InvalidInput, match="another model"):
        other.load_adapter(adapter)
    assert np.array_equal(other.forward(X)[0].data, before)
    other.load_adapter(adapter, any_base=True)
    assert not other.forward(X)[0].data.any()
    wrong = Adapter({"w1": LowRank(np.zeros((2, 7), np.float32), np.zeros((8, 2), np.float32), 1.0), "w9": adapter.changes["w1"]},
                    {"b7": X}, "", {})  # fmt: skip
    with pytest.raises(InvalidInput) as error:
        sonnx.SONNXModel(NET).load_adapter(wrong)
    assert error.value.code == "SX971" and all(n in str(error.value) for n in ("'w1' needs", "'w9'", "'b7'"))
    with pytest.raises(InvalidInput, match="no adapter"):
        sonnx.SONNXModel(NET).adapter()
    with pytest.raises(InvalidInput, match="has an adapter"):
        sonnx.lora(trained())


def test_swapping_copies_values() -> None:
    model, others = trained(), [trained().adapter() for _ in range(2)]
    model.eval()
    held = model.imported
    for adapter in others:
        model.load_adapter(adapter)
        alone = sonnx.SONNXModel(NET)
        alone.load_adapter(adapter)
        np.testing.assert_array_equal(model.forward(X)[0].data, alone.forward(X)[0].data)
    assert model.imported is held


def test_a_file_with_external_data(tmp_path: Path) -> None:
    big = net(w1=rng.normal(size=(8, 6)).astype(np.float32))
    onnx.save(big, tmp_path / "net.onnx", save_as_external_data=True, size_threshold=0)
    path = str(tmp_path / "net.onnx")
    model = trained(path)
    assert model.adapter().base == base_digest(onnx.load(path)) == sonnx.lora(path).adapter().base
    want = model.forward(X)[0].data
    np.testing.assert_allclose(sonnx.prepare(model.merged()).run([X])[0], want, rtol=1e-5, atol=1e-5)
    for same in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        np.testing.assert_array_equal(same.forward(X)[0].data, want)
        assert same.merged().SerializeToString(deterministic=True) == model.merged().SerializeToString(deterministic=True)
    Path(path).write_bytes(NET.SerializeToString())
    with pytest.raises(InvalidModel, match="was changed"):
        model.merged()


def test_values_that_were_set_before_are_the_base() -> None:
    model = sonnx.SONNXModel(NET)
    model.get_params()["w3"].data = np.zeros((5, 3), np.float32)
    sonnx.lora(model, target="w1")
    assert not model.forward(X)[0].data.any()
    merged = {t.name: numpy_helper.to_array(t) for t in model.merged().graph.initializer}
    assert not merged["w3"].any()


def test_a_quantized_weight_is_not_merged() -> None:
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]> g (float[N, 6] x) => (float[N, 3] y) {
        w = DequantizeLinear(q, s) y = MatMul(x, w) }"""
    )
    values = {"q": rng.integers(-9, 9, (6, 3)).astype(np.int8), "s": np.float32(0.1)}
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(a), n) for n, a in values.items())
    adapted = trained(model)
    assert list(adapted.adapter().changes) == ["q"]
    with pytest.raises(InvalidInput) as error:
        adapted.merged()
    assert error.value.code == "SX974"
    np.testing.assert_allclose(sonnx.prepare(adapted.unmerged()).run([X])[0], adapted.forward(X)[0].data, rtol=1e-6)


def test_a_weight_that_is_unfrozen_is_a_value() -> None:
    model = trained()
    model.unfreeze("w3")
    model.get_params()["w3"].data = np.ones((5, 3), np.float32)
    adapter = model.adapter()
    assert list(adapter.values) == ["w3"] and adapter.base == base_digest(NET)
    other = sonnx.SONNXModel(NET)
    other.load_adapter(adapter)
    np.testing.assert_array_equal(other.forward(X)[0].data, model.forward(X)[0].data)
