"""PEFT's folders: names of modules, scales, layouts, refusals, folders that are written; PEFT itself is in tests/torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

from singa import sonnx
from singa_backend import run_model
from singa_backend.adapters import Adapter, LowRank, insert, merge
from singa_backend.adapters.files import combined
from singa_backend.adapters.modules import Modules
from singa_backend.adapters.peft import CONFIG, WEIGHTS, read_peft, write_peft
from singa_backend.errors import InvalidInput

st = pytest.importorskip("safetensors.numpy")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


def model_of(text: str, names: Mapping[str, str] | None = None, opset: int = 17, **weights: np.ndarray) -> ModelProto:
    """A model whose nodes have these names, by their outputs; `__` in the name of a weight stands for a dot."""
    model = parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}, "com.microsoft" : 1]> {text}')
    for node in model.graph.node:
        node.name = (names or {}).get(node.output[0], "")
        for i, name in enumerate(node.input):
            node.input[i] = name.replace("__", ".")
    model.graph.initializer.extend(numpy_helper.from_array(w, n.replace("__", ".")) for n, w in weights.items())
    return model


def folder(path: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    """A folder as PEFT writes it; names are those within the network."""
    path.mkdir(exist_ok=True)
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["fc"], **config}
    (path / CONFIG).write_text(json.dumps(settings))
    st.save_file({f"base_model.model.{n}": np.ascontiguousarray(x) for n, x in tensors.items()}, path / WEIGHTS)
    return path


def pair(path: str, inputs: int, outputs: int, rank: int = 2, seed: int = 0) -> dict[str, np.ndarray]:
    return {
        f"{path}.lora_A.weight": normal(rank, inputs, seed=seed),
        f"{path}.lora_B.weight": normal(outputs, rank, seed=seed + 1),
    }


TWO = """g (float[n,6] x) => (float[n,4] y) { h = Gemm<transB=1>(x, a__fc__weight, a__fc__bias)  r = Relu(h)
    p = MatMul(r, w)  y = Add(p, b) }"""


def two(**names: str) -> ModelProto:
    """Two linear modules: of the second only the scope of its node has the name."""
    return model_of(
        TWO, {"p": "/b/b.0/fc/MatMul", "y": "/b/b.0/fc/Add", **names}, a__fc__weight=normal(5, 6), a__fc__bias=normal(5),
        w=normal(5, 4), b=normal(4),
    )  # fmt: skip


def by_hand(
    x: np.ndarray, a: np.ndarray, b: np.ndarray, scale_a: float, scale_b: float, t: Mapping[str, np.ndarray]
) -> np.ndarray:
    h = x @ (normal(5, 6) + scale_a * t["a.fc.lora_B.weight"] @ t["a.fc.lora_A.weight"]).T + a
    r = np.maximum(h, 0)
    return np.asarray(r @ (normal(5, 4) + scale_b * (t["b.0.fc.lora_B.weight"] @ t["b.0.fc.lora_A.weight"]).T) + b)


@pytest.mark.parametrize(
    ("config", "scales"),
    [
        ({}, (2.0, 1.0)),
        ({"use_rslora": True}, (4 / 2**0.5, 2.0)),
        ({"alpha_pattern": {"b.0.fc": 8}, "rank_pattern": {"b.0.fc": 4}}, (2.0, 2.0)),
        ({"alpha_pattern": {"fc": 1}}, (0.5, 0.25)),
        ({"alpha_pattern": {"^fc": 1}}, (2.0, 1.0)),
    ],
)
def test_scales_and_layouts(config: dict[str, Any], scales: tuple[float, float], tmp_path: Path) -> None:
    tensors = pair("a.fc", 6, 5) | pair("b.0.fc", 5, 4, rank=4)
    adapter = read_peft(folder(tmp_path / "p", tensors, **config), two())
    assert {n: (len(c.a), c.scale) for n, c in adapter.changes.items()} == {
        "a.fc.weight": (2, pytest.approx(scales[0])), "w": (4, pytest.approx(scales[1]))
    }  # fmt: skip
    x = normal(3, 6)
    expected = by_hand(x, normal(5), normal(4), *scales, tensors)
    np.testing.assert_allclose(run_model(insert(two(), adapter), [x])[0], expected, rtol=1e-4, atol=1e-5)


def test_biases_and_saved_modules(tmp_path: Path) -> None:
    tensors = pair("a.fc", 6, 5) | {"a.fc.base_layer.bias": normal(5, seed=7), "b.0.fc.weight": normal(4, 5, seed=8),
                                    "b.0.fc.bias": normal(4, seed=9), "b.0.fc.original_module.bias": normal(4)}  # fmt: skip
    adapter = read_peft(folder(tmp_path / "p", tensors, bias="all", modules_to_save=["b.0.fc"]), two())
    assert set(adapter.values) == {"a.fc.bias", "w", "b"}
    np.testing.assert_array_equal(adapter.values["w"], tensors["b.0.fc.weight"].T)
    x = normal(3, 6)
    h = x @ (normal(5, 6) + 2 * tensors["a.fc.lora_B.weight"] @ tensors["a.fc.lora_A.weight"]).T + normal(5, seed=7)
    expected = np.maximum(h, 0) @ normal(4, 5, seed=8).T + normal(4, seed=9)
    np.testing.assert_allclose(run_model(insert(two(), adapter), [x])[0], expected, rtol=1e-4, atol=1e-5)


def test_a_head_of_another_size(tmp_path: Path) -> None:
    tensors = pair("a.fc", 6, 5) | {"b.0.fc.weight": normal(9, 5), "b.0.fc.bias": normal(9)}
    adapter = read_peft(folder(tmp_path / "p", tensors, modules_to_save=["b.0.fc"]), two())
    assert adapter.settings["head"] == 9
    model = insert(two(), adapter)
    assert run_model(model, [normal(3, 6)])[0].shape == (3, 9)
    assert model.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 9


def test_paths_from_scopes_in_metadata(tmp_path: Path) -> None:
    model = two()
    model.graph.node[2].name = "node_MatMul_7"
    model.graph.node[2].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'b', 'b.0', 'b.0.fc', 'linear_1']")
    model.graph.node[0].metadata_props.add(key="pkg.torch.onnx.name_scopes", value="[broken")
    adapter = read_peft(folder(tmp_path / "p", pair("b.0.fc", 5, 4)), model)
    assert list(adapter.changes) == ["w"]


@pytest.mark.parametrize("paths", [("net.a.fc", "net.b.0.fc"), ("base.net.a.fc", "base.net.b.0.fc")])
def test_a_wrapper_adds_a_beginning(paths: tuple[str, str], tmp_path: Path) -> None:
    adapter = read_peft(folder(tmp_path / "p", pair(paths[0], 6, 5) | pair(paths[1], 5, 4)), two())
    assert set(adapter.changes) == {"a.fc.weight", "w"}


def test_a_wrapper_lacks_a_beginning(tmp_path: Path) -> None:
    model = two(p="/inner/b/b.0/fc/MatMul", y="/inner/b/b.0/fc/Add")
    for node in model.graph.node:
        node.input[:] = [n.replace("a.fc", "inner.a.fc") for n in node.input]
    for t in model.graph.initializer:
        t.name = t.name.replace("a.fc", "inner.a.fc")
    adapter = read_peft(folder(tmp_path / "p", pair("a.fc", 6, 5) | pair("b.0.fc", 5, 4)), model)
    assert set(adapter.changes) == {"inner.a.fc.weight", "w"}


def test_names_of_onnxruntime_genai(tmp_path: Path) -> None:
    text = "g (float[n,32] x) => (float[n,16] y) { y = com.microsoft.MatMulNBits<K=32, N=16, block_size=32>(x, q, s) }"
    model = model_of(text, {"y": "/model/layers.0/attn/q_proj/MatMul_Q4"}, q=np.zeros((16, 1, 16), np.uint8), s=normal(16))
    adapter = read_peft(folder(tmp_path / "p", pair("model.layers.0.self_attn.q_proj", 32, 16)), model)
    assert list(adapter.changes) == ["q"]


def test_tables_and_convolutions(tmp_path: Path) -> None:
    text = """g (int64[n,7] i) => (float[n,4,7] y) { e = Gather(emb__weight, i)  t = Transpose<perm=[0,2,1]>(e)
        y = Conv<pads=[1,1], group=2>(t, conv__weight) }"""
    model = model_of(text, emb__weight=normal(10, 6), conv__weight=normal(4, 3, 3))
    tensors = {"emb.lora_embedding_A": normal(2, 10), "emb.lora_embedding_B": normal(6, 2)}
    tensors |= {"conv.lora_A.weight": normal(2, 6, 3), "conv.lora_B.weight": normal(4, 1, 1)}
    adapter = read_peft(folder(tmp_path / "p", tensors), model)
    ids = np.random.default_rng(0).integers(0, 10, (2, 7))
    table = normal(10, 6) + 2 * (tensors["emb.lora_embedding_B"] @ tensors["emb.lora_embedding_A"]).T
    plain = model_of("g (float[n,6,7] t) => (float[n,4,7] y) { y = Conv<pads=[1,1], group=2>(t, w) }", w=normal(4, 3, 3))
    first = model_of("g (float[n,6,7] t) => (float[n,2,7] y) { y = Conv<pads=[1,1]>(t, w) }", w=tensors["conv.lora_A.weight"])
    second = model_of("g (float[n,2,7] t) => (float[n,4,7] y) { y = Conv<group=2>(t, w) }", w=tensors["conv.lora_B.weight"])
    x = table[ids].transpose(0, 2, 1)
    expected = run_model(plain, [x])[0] + 2 * run_model(second, [run_model(first, [x])[0]])[0]
    np.testing.assert_allclose(run_model(insert(model, adapter), [ids])[0], expected, rtol=1e-4, atol=1e-4)


def test_floats_of_16_bits_become_float32(tmp_path: Path) -> None:
    made = folder(tmp_path / "p", pair("a.fc", 6, 5))
    exact = pair("a.fc", 6, 5)
    narrow = {n: x.astype(ml_dtypes.bfloat16) for n, x in exact.items()}
    header: dict[str, Any] = {}
    data = b""
    for n, x in narrow.items():
        header[f"base_model.model.{n}"] = {
            "dtype": "BF16",
            "shape": list(x.shape),
            "data_offsets": [len(data), len(data) + x.nbytes],
        }
        data += x.tobytes()
    text = json.dumps(header).encode()
    (made / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)
    found = read_peft(made, two()).changes["a.fc.weight"]
    assert found.a.dtype == np.float32
    np.testing.assert_array_equal(found.a, narrow["a.fc.lora_A.weight"].astype(np.float32))


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "IA3"}, r"\$\.peft_type must be 'LORA', got 'IA3'"),
        ({"use_dora": True}, "not supported: use_dora=True"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' changed the weights"),
        ({"layer_replication": [[0, 2]], "lora_bias": True}, "layer_replication=.*lora_bias=True"),
        ({"an_option_of_the_future": 3}, "an_option_of_the_future=3"),
        ({"lora_alpha": "x"}, "lora_alpha must be a finite number, got 'x'"),
        ({"r": 0}, r"\$\.r must be an integer from 1 to 2147483647, got 0"),
        ({"bias": "some"}, "bias must be one of none, all, lora_only, got 'some'"),
        ({"alpha_pattern": {"(": 1}}, "regular expressions"),
    ],
)
def test_refused_settings(config: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=text) as caught:
        read_peft(folder(tmp_path / "p", pair("a.fc", 6, 5), **config), two())
    assert caught.value.code == "SX980"


def test_refused_files(tmp_path: Path) -> None:
    for damage, text in (
        (lambda p: (p / CONFIG).unlink(), "must contain adapter_config.json"),
        (lambda p: (p / CONFIG).write_text("[]"), r"\$ must be an object"),
        (lambda p: (p / CONFIG).write_text("{"), "adapter_config.json"),
        (lambda p: (p / WEIGHTS).rename(p / "adapter_model.bin"), "adapter_model.bin, a pickle, which is not read"),
        (lambda p: (p / WEIGHTS).write_bytes(b"\0" * 20), "is damaged"),
        (lambda p: st.save_file({"a.lora_A.weight": np.zeros((2, 6), np.int32)}, p / WEIGHTS), "must be of floats, got I32"),
        (lambda p: st.save_file({"a.lora_A.weight": normal(2, 6)}, p / WEIGHTS), "must have A and B, got only A"),
        (lambda p: st.save_file({"a.fc.lora_B.bias": normal(5)}, p / WEIGHTS), "a bias of B"),
        (lambda p: st.save_file({"a.fc.lora_magnitude_vector": normal(5)}, p / WEIGHTS), "DoRA"),
        (lambda p: st.save_file({}, p / WEIGHTS), "has no tensors"),
    ):  # fmt: skip
        made = folder(tmp_path / text.replace("/", "")[:9], pair("a.fc", 6, 5))
        damage(made)
        with pytest.raises(InvalidInput, match=text) as caught:
            read_peft(made, two())
        assert caught.value.code == "SX980", text
    with pytest.raises(InvalidInput, match="does not exist"):
        read_peft(tmp_path / "nothing", two())


def test_unmatched_and_ambiguous_modules_are_listed_with_candidates(tmp_path: Path) -> None:
    tensors = pair("a.fc", 6, 5) | pair("c.fc", 6, 5) | pair("d.out", 6, 5)
    with pytest.raises(InvalidInput, match=r"c\.fc\.weight is not in the model \(candidates: .*a\.fc") as caught:
        read_peft(folder(tmp_path / "p", tensors), two())
    assert len(caught.value.problems) == 2 and caught.value.code == "SX981"
    assert str(caught.value).count("c.fc.weight is not") == 1 and "2 names of the adapter" in caught.value.message
    with pytest.raises(InvalidInput, match=r"fc\.weight may be '\S+' or '\S+'"):
        read_peft(folder(tmp_path / "p", pair("fc", 6, 5)), two())
    with pytest.raises(InvalidInput, match="which has 6 inputs and 5 outputs"):
        read_peft(folder(tmp_path / "p", pair("a.fc", 5, 6)), two())
    with pytest.raises(InvalidInput, match=r"cannot replace the tensor 'a\.fc\.bias' of shape \(5,\)"):
        read_peft(folder(tmp_path / "p", {"a.fc.bias": normal(2, 2)}), two())


TIED = """g (int64[n] i) => (float[n,10] y) {
    e = Gather(emb__weight, i)  t = Transpose<perm=[1,0]>(emb__weight)  y = MatMul(e, t) }"""
"""An embedding and a last layer with one tensor."""


def tied() -> ModelProto:
    return model_of(TIED, {"e": "/emb/Gather", "y": "/head/MatMul"}, emb__weight=normal(10, 6))


def folded() -> ModelProto:
    """As PyTorch's exporter writes it: the tensor has the name of the last layer, which reads a transposed copy."""
    text = "g (int64[n] i) => (float[n,10] y) { e = Gather(head__weight, i)  y = MatMul(e, val_3) }"
    names = {"e": "/emb/Gather", "y": "/head/MatMul"}
    return model_of(text, names, head__weight=normal(10, 6), val_3=np.ascontiguousarray(normal(10, 6).T))


HEAD = pair("head", 6, 10)
TABLE = {"emb.lora_embedding_A": normal(2, 10, seed=3), "emb.lora_embedding_B": normal(6, 2, seed=4)}
OTHER = normal(10, 6, seed=5)


def product(t: Mapping[str, np.ndarray], path: str) -> np.ndarray:
    """The change of a weight (10, 6) at scale 2."""
    if f"{path}.lora_embedding_A" in t:
        return np.asarray(2 * (t[f"{path}.lora_embedding_B"] @ t[f"{path}.lora_embedding_A"]).T)
    return np.asarray(2 * t[f"{path}.lora_B.weight"] @ t[f"{path}.lora_A.weight"])


@pytest.mark.parametrize("model", [tied, folded])
@pytest.mark.parametrize(
    ("saved", "table", "head"),
    [
        (HEAD, normal(10, 6), normal(10, 6) + product(HEAD, "head")),
        (HEAD | {"head.base_layer.weight": normal(10, 6)}, normal(10, 6), normal(10, 6) + product(HEAD, "head")),
        (HEAD | {"head.base_layer.weight": OTHER, "emb.weight": OTHER}, OTHER, OTHER + product(HEAD, "head")),
        (TABLE, normal(10, 6) + product(TABLE, "emb"), normal(10, 6)),
        (HEAD | TABLE, normal(10, 6) + product(TABLE, "emb"), normal(10, 6) + product(HEAD, "head")),
        ({"head.weight": OTHER}, normal(10, 6), OTHER),
        ({"emb.weight": OTHER}, OTHER, normal(10, 6)),
        ({"emb.weight": OTHER, "head.weight": OTHER + 1}, OTHER, OTHER + 1),
        ({"emb.weight": OTHER, "head.weight": OTHER}, OTHER, OTHER),
    ],
    ids=["head", "head and base", "head and new bases", "table", "both", "new head", "new table", "both new", "new and tied"],
)
def test_tied_modules_change_as_the_adapter_does(
    saved: dict[str, np.ndarray], table: np.ndarray, head: np.ndarray, model: Any, tmp_path: Path
) -> None:
    """PEFT changes one of the modules, and saves the base layer of an embedding or a last layer."""
    ids = np.array([7, 0, 3], np.int64)
    expected = table[ids].astype(np.float64) @ head.T
    adapter = read_peft(folder(tmp_path / "p", saved), model())
    adapter.save(tmp_path / "a.safetensors")
    write_peft(adapter, tmp_path / "q", model())
    before = model().SerializeToString()
    for one in (adapter, Adapter.load(tmp_path / "a.safetensors"), read_peft(tmp_path / "q", model())):
        for join in (insert, merge):
            np.testing.assert_allclose(run_model(join(model(), one), [ids])[0], expected, rtol=1e-4, atol=1e-4)
    rep = sonnx.prepare(model(), adapters={"one": adapter})
    np.testing.assert_allclose(rep.run({"i": ids}, adapter="one")[0], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rep.run({"i": ids})[0], normal(10, 6)[ids] @ normal(10, 6).T, rtol=1e-4, atol=1e-4)
    assert model().SerializeToString() == before


def test_tied_values_are_one_value(tmp_path: Path) -> None:
    both = {"emb.weight": OTHER, "head.weight": OTHER}
    assert [*read_peft(folder(tmp_path / "p", both), tied()).values] == ["emb.weight"]


@pytest.mark.parametrize("names", [("/emb/Gather", "/head/MatMul"), ("/net/emb/Gather", "/net/head/MatMul")])
def test_a_change_of_all_tied_modules_is_written_for_each(names: tuple[str, str], tmp_path: Path) -> None:
    model = model_of(TIED, dict(zip("ey", names, strict=True)), emb__weight=normal(10, 6))
    adapter = Adapter(
        {"emb.weight": LowRank(normal(2, 6), normal(10, 2), 0.5)}, {}, "", {"modules": {"emb.weight": ["head", "weight"]}}
    )
    w, ids = normal(10, 6) + 0.5 * (normal(10, 2) @ normal(2, 6)).astype(np.float64), np.array([7, 0, 3], np.int64)
    _, found = written(adapter, model, tmp_path / "q")
    np.testing.assert_array_equal(found["base_model.model.emb.lora_embedding_A"], normal(10, 2).T)
    np.testing.assert_array_equal(found["base_model.model.head.lora_B.weight"], normal(10, 2))
    assert len(found) == 4
    for one in (adapter, read_peft(tmp_path / "q", model)):
        np.testing.assert_allclose(run_model(merge(model, one), [ids])[0], w[ids] @ w.T, rtol=1e-4, atol=1e-4)


def test_a_changed_head_adds_to_another_one_but_not_to_a_change_of_all_modules(tmp_path: Path) -> None:
    ids = np.array([7, 0], np.int64)
    one = read_peft(folder(tmp_path / "p", HEAD), tied())
    w = normal(10, 6).astype(np.float64)
    two = combined([one, one], [0.5, 0.25], tied())
    np.testing.assert_allclose(run_model(insert(tied(), two), [ids])[0], w[ids] @ (w + 0.75 * product(HEAD, "head")).T, rtol=1e-4)
    whole = Adapter({"emb.weight": LowRank(normal(2, 6), normal(10, 2), 1.0)}, {}, "", {})
    with pytest.raises(
        InvalidInput, match=r"changes the tensor 'emb\.weight' in all modules, another one in 'head' only"
    ) as caught:
        combined([one, whole], [1.0, 1.0], tied())
    assert caught.value.code == "SX971"
    with pytest.raises(InvalidInput, match=r"needs a copy 'head\.weight' of a weight 'emb\.weight' for the module 'head'"):
        insert(model_of(TIED, {"e": "/emb/Gather", "y": "/other/MatMul"}, emb__weight=normal(10, 6)), one)


@pytest.mark.parametrize("join", [insert, merge])
def test_a_saved_base_layer_is_changed_too(tmp_path: Path, join: Any) -> None:
    """PEFT saves the base layer of an adapted embedding or last layer; `merge` lost its change."""
    tensors, base = pair("a.fc", 6, 5), normal(5, 6, seed=9)
    adapter = read_peft(folder(tmp_path / "p", tensors | {"a.fc.base_layer.weight": base}), two())
    x = normal(3, 6)
    w = base.astype(np.float64) + 2 * tensors["a.fc.lora_B.weight"] @ tensors["a.fc.lora_A.weight"]
    expected = np.maximum(x @ w.T + normal(5), 0) @ normal(5, 4) + normal(4)
    np.testing.assert_allclose(run_model(join(two(), adapter), [x])[0], expected, rtol=1e-4, atol=1e-5)


# --- writing


def written(adapter: Adapter, model: ModelProto, path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    write_peft(adapter, path, model)
    return json.loads((path / CONFIG).read_text()), st.load_file(path / WEIGHTS)


def test_what_is_read_is_written(tmp_path: Path) -> None:
    tensors = pair("a.fc", 6, 5) | pair("b.0.fc", 5, 4, rank=4) | {"a.fc.base_layer.bias": normal(5, seed=3)}
    given = folder(tmp_path / "p", tensors, alpha_pattern={"b.0.fc": 2}, bias="lora_only", lora_dropout=0.25)
    config, found = written(read_peft(given, two()), two(), tmp_path / "q")
    assert found.keys() == st.load_file(given / WEIGHTS).keys()
    for name, x in st.load_file(given / WEIGHTS).items():
        np.testing.assert_array_equal(found[name], x)
    again = read_peft(tmp_path / "q", two())
    assert {n: c.scale for n, c in again.changes.items()} == {"a.fc.weight": 2.0, "w": 0.5}
    assert (config["bias"], config["lora_dropout"], config["rank_pattern"]) == ("lora_only", 0.25, {r"^b\.0\.fc": 4})


def test_targets_match_no_other_module(tmp_path: Path) -> None:
    import re

    text = "g (float[n,4] x) => (float[n,4] y) { h = MatMul(x, u)  y = MatMul(h, v) }"
    model = model_of(text, {"h": "/fc/MatMul", "y": "/b/fc/MatMul"}, u=normal(4, 4), v=normal(4, 4))
    only = Adapter({"u": LowRank(normal(2, 4), normal(4, 2), 0.5)}, {}, "", {})
    config, _ = written(only, model, tmp_path / "q")
    assert isinstance(config["target_modules"], str)
    assert [p for p in ("fc", "b.fc") if re.fullmatch(config["target_modules"], p)] == ["fc"]
    both = Adapter({**only.changes, "v": LowRank(normal(1, 4), normal(4, 1), 0.5)}, {}, "", {})
    assert sorted(written(both, model, tmp_path / "r")[0]["target_modules"]) == ["b.fc", "fc"]


def test_a_saved_module_has_all_its_parameters(tmp_path: Path) -> None:
    adapter = Adapter({}, {"w": normal(5, 4, seed=5)}, "", {})
    config, found = written(adapter, two(), tmp_path / "q")
    assert config["modules_to_save"] == ["b.0.fc"]
    np.testing.assert_array_equal(found["base_model.model.b.0.fc.weight"], normal(5, 4, seed=5).T)
    np.testing.assert_array_equal(found["base_model.model.b.0.fc.bias"], normal(4))


def test_groups_become_zeros_in_a(tmp_path: Path) -> None:
    model = model_of(
        "g (float[n,6,7] x) => (float[n,4,7] y) { y = Conv<pads=[1,1], group=2>(x, conv__weight) }", conv__weight=normal(4, 3, 3)
    )
    grouped = Adapter({"conv.weight": LowRank(normal(2, 3, 3), normal(4, 1, 1), 0.5)}, {}, "", {})
    write_peft(grouped, tmp_path / "q", model)
    again = read_peft(tmp_path / "q", model)
    assert again.changes["conv.weight"].a.shape == (2, 6, 3)
    x = normal(2, 6, 7)
    expected = run_model(insert(model, grouped), [x])[0]
    np.testing.assert_allclose(run_model(insert(model, again), [x])[0], expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    nameless = model_of("g (float[n,4] x) => (float[n,4] y) { y = MatMul(x, u) }", u=normal(4, 4))
    adapter = Adapter({"u": LowRank(normal(2, 4), normal(4, 2), 0.5)}, {}, "", {})
    with pytest.raises(InvalidInput, match="tensor 'u' has no module") as caught:
        write_peft(adapter, tmp_path / "q", nameless)
    assert caught.value.code == "SX981" and not (tmp_path / "q").exists()
    taken = folder(tmp_path / "p", pair("a.fc", 6, 5))
    before = {f.name: f.read_bytes() for f in taken.iterdir()}
    with pytest.raises(InvalidInput, match="it holds an adapter"):
        write_peft(read_peft(taken, two()), taken, two())
    assert {f.name: f.read_bytes() for f in taken.iterdir()} == before


def test_a_quantized_model_keeps_the_paths(tmp_path: Path) -> None:
    text = "g (float[n,64] x) => (float[n,16] y) { y = MatMul(x, w) }"
    model = sonnx.quantize_weights(model_of(text, {"y": "/layer/q/MatMul"}, w=normal(64, 16)), "nf4")
    assert Modules.of(model).path_of("w_Bnb4") is not None
    adapter = read_peft(folder(tmp_path / "p", pair("layer.q", 64, 16)), model)
    assert list(adapter.changes) == ["w_Bnb4"]
    again, _ = written(adapter, model, tmp_path / "q")
    assert again["target_modules"] == ["layer.q"]


def test_a_loop_and_its_body(tmp_path: Path) -> None:
    body = parser.parse_graph(
        "b (int64 i, bool c, float[n,4] s) => (bool c2, float[n,4] s2) { c2 = Identity(c)  s2 = MatMul(s, w) }"
    )
    body.node[1].name = "/cell/fc/MatMul"
    model = model_of("g (float[n,4] x) => (float[n,4] y) { y = Identity(x) }", w=normal(4, 4), trips=np.array(2))
    model.graph.node[0].CopyFrom(helper.make_node("Loop", ["trips", "", "x"], ["y"], body=body))
    tensors = pair("cell.fc", 4, 4)
    adapter = read_peft(folder(tmp_path / "p", tensors), model)
    w = normal(4, 4) + 2 * (tensors["cell.fc.lora_B.weight"] @ tensors["cell.fc.lora_A.weight"]).T
    x = normal(3, 4)
    np.testing.assert_allclose(run_model(insert(model, adapter), [x])[0], x @ w @ w, rtol=1e-4, atol=1e-4)


def test_a_packed_product_of_genai(tmp_path: Path) -> None:
    """The rows of q, k and v: two heads and one group of size 16."""
    text = """g (float[n,s,32] x, float[n,1,0,16] past, int32[n] seqlens, int32 total) => (float[n,s,32] y) {
        qkv = MatMul(x, w)
        y, a, b = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=1>(qkv, , , past, past, seqlens, total) }"""
    model = model_of(text, {"qkv": "/model/layers.0/attn/qkv_proj/MatMul"}, w=normal(32, 64))
    front = "model.layers.0.self_attn"
    q, v = pair(f"{front}.q_proj", 32, 32), pair(f"{front}.v_proj", 32, 16, rank=4, seed=5)
    made = folder(tmp_path / "p", q | v, alpha_pattern={"v_proj": 2})
    adapter = read_peft(made, model)
    assert list(adapter.changes) == ["w"] and adapter.changes["w"].a.shape == (6, 32)
    delta = np.zeros((64, 32), np.float32)
    delta[:32] = 2.0 * q[f"{front}.q_proj.lora_B.weight"] @ q[f"{front}.q_proj.lora_A.weight"]
    delta[48:] = 0.5 * v[f"{front}.v_proj.lora_B.weight"] @ v[f"{front}.v_proj.lora_A.weight"]
    found = numpy_helper.to_array(merge(model, adapter).graph.initializer[0])
    np.testing.assert_allclose(found, normal(32, 64) + delta.T, rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidInput, match="packs several modules"):
        write_peft(adapter, tmp_path / "q", model)
    with pytest.raises(InvalidInput, match="32 inputs and 16 outputs"):
        read_peft(folder(tmp_path / "r", pair(f"{front}.k_proj", 32, 32)), model)
