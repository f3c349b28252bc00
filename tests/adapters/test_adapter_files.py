"""Adapters of onnxruntime, sums of adapters, adapters that a run selects, the commands; onnxruntime is in a child process."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser
from tests.helpers.onnxruntime_adapters import in_child

from singa import sonnx
from singa.cli import main
from singa_backend import SingaBackend, backend, run_model
from singa_backend.adapters import Adapter, LowRank, base_digest, insert, merge
from singa_backend.adapters.files import combined, form_to_write, load_adapter, save_adapter
from singa_backend.adapters.flat_file import flat_bytes, read_parameters, write_parameters
from singa_backend.adapters.onnxruntime import adapter_feeds, adapter_inputs, read_onnx_adapter, write_onnx_adapter
from singa_backend.errors import InvalidInput, SonnxError

pytest.importorskip("safetensors")
pytest.importorskip("onnxruntime")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape).astype(np.float32)


NET = """<ir_version: 9, opset_import: ["" : 17]> g (float[n,4,t] x) => (float[n,3] y) {
    c = Conv<pads=[1,1], group=2>(x, conv, cb)
    r = Relu(c)
    p = ReduceMean<axes=[2], keepdims=0>(r)
    h = MatMul(p, w)
    y = Gemm<transB=1>(h, v, b) }"""


def net() -> ModelProto:
    model = parser.parse_model(NET)
    held = {"conv": normal(6, 2, 3), "cb": normal(6), "w": normal(6, 8), "v": normal(3, 8), "b": normal(3)}
    model.graph.initializer.extend(numpy_helper.from_array(x, n) for n, x in held.items())
    for node, name in zip(model.graph.node, ("/conv/Conv", "", "", "/fc/MatMul", "/head/Gemm"), strict=True):
        node.name = name
    return model


def adapter(rank: int, *names: str, seed: int = 0, values: tuple[str, ...] = ()) -> Adapter:
    sizes = {"conv": ((2, 3), (6, rank // 2, 1)), "w": ((6,), (8, rank)), "v": ((8,), (3, rank))}
    changes = {n: LowRank(normal(rank, *sizes[n][0], seed=seed), normal(*sizes[n][1], seed=seed + 1), 0.5) for n in names}
    shapes = {"cb": 6, "b": 3}
    return Adapter(changes, {n: normal(shapes[n], seed=seed + 2) for n in values}, base_digest(net()), {"rank": rank})


ADAPTERS = {
    "small": adapter(4, "conv", "w", "v"),
    "large": adapter(16, "conv", "w", "v", seed=10, values=("b",)),
    "one": adapter(2, "w", seed=20),
    "biases": Adapter({}, {"cb": normal(6, seed=5), "b": normal(3, seed=5)}, "", {}),
}
X = normal(2, 4, 7, seed=3)


def outputs(model: ModelProto, path: Path | None = None) -> np.ndarray:
    """The output in onnxruntime."""
    job = ("run", model.SerializeToString(), {"x": X}, None if path is None else str(path))
    return np.asarray(in_child(job)[0][0])


# --- files of onnxruntime


def test_files_of_onnxruntime_are_read_and_written(tmp_path: Path) -> None:
    tensors = {
        "a.b": normal(3, 4),
        "änderung": normal(2, 5).astype(np.float16),
        "empty": np.zeros((0, 3), np.float32),
        "long": normal(1000),
    }
    write_parameters(tmp_path / "ours", tensors)
    found, _ = in_child(("read", str(tmp_path / "ours")), ("write", str(tmp_path / "theirs"), tensors))
    for read in (found, read_parameters(tmp_path / "theirs"), read_parameters(tmp_path / "ours")):
        assert {n: (x.dtype, x.shape, x.tobytes()) for n, x in read.items()} == {
            n: (x.dtype, x.shape, x.tobytes()) for n, x in tensors.items()
        }


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    good, draw, path = flat_bytes({"a": normal(3, 4), "b": normal(2)}), random.Random(0), tmp_path / "f"
    refused = 0
    for _ in range(1500):
        data = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice([len(data), draw.randrange(len(data))])])
        try:
            read_parameters(path)
        except SonnxError as error:
            assert error.code == "SX982"
            refused += 1
    assert refused > 700
    for tensors, text in (({"s": np.float32(1)}, "must have an axis"),):
        with pytest.raises(InvalidInput, match=text):
            flat_bytes({n: np.asarray(x) for n, x in tensors.items()})


def test_the_model_with_inputs_runs_in_onnxruntime_with_each_adapter(tmp_path: Path) -> None:
    two = adapter_inputs(net(), list(ADAPTERS.values()))
    onnx.checker.check_model(two, full_check=True)
    np.testing.assert_array_equal(outputs(two), outputs(net()))
    for name, given in ADAPTERS.items():
        write_onnx_adapter(given, tmp_path / f"{name}.onnx_adapter")
        expected = outputs(merge(net(), given))
        np.testing.assert_allclose(outputs(two, tmp_path / f"{name}.onnx_adapter"), expected, rtol=1e-5, atol=1e-5)
        again = read_onnx_adapter(tmp_path / f"{name}.onnx_adapter", net())
        np.testing.assert_allclose(outputs(merge(net(), again)), expected, rtol=1e-5, atol=1e-5)
        bound = SingaBackend.prepare(two, adapter=tmp_path / f"{name}.onnx_adapter")
        np.testing.assert_allclose(bound.run([X])[0], expected, rtol=1e-5, atol=1e-5)


def test_names_and_layouts_of_other_tools(tmp_path: Path) -> None:
    a, b = normal(6, 4), normal(4, 8)
    for names in (
        ("/fc/lora_A/MatMul", "/fc/lora_B/MatMul"),
        ("base_model.model.fc.lora_A.weight", "base_model.model.fc.lora_B.weight"),
    ):
        write_parameters(tmp_path / "f", dict(zip(names, (a, b), strict=True)))
        found = read_onnx_adapter(tmp_path / "f", net()).changes["w"]
        np.testing.assert_array_equal(found.a, a.T)
        np.testing.assert_array_equal(found.b, b.T)
    write_parameters(tmp_path / "f", {"fc.lora_A": a, "fc.lora_B": normal(4, 9)})
    with pytest.raises(InvalidInput, match=r"do not fit the weight 'w', which has 6 inputs and 8 outputs"):
        read_onnx_adapter(tmp_path / "f", net())
    write_parameters(tmp_path / "f", {"fc.lora_A": a})
    with pytest.raises(InvalidInput, match="must have A and B"):
        read_onnx_adapter(tmp_path / "f", net())
    write_parameters(tmp_path / "f", {"nothing": a})
    with pytest.raises(InvalidInput, match="'nothing' is not in the model"):
        read_onnx_adapter(tmp_path / "f", net())


# --- sums, forms


def test_adapters_add() -> None:
    one, two = ADAPTERS["small"], ADAPTERS["large"]
    base = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in net().graph.initializer}
    changed = [{t.name: numpy_helper.to_array(t) for t in merge(net(), a).graph.initializer} for a in (one, two)]
    total = {t.name: numpy_helper.to_array(t) for t in merge(net(), combined([one, two], [0.5, -2.0], net())).graph.initializer}
    for name, w in base.items():
        expected = w + 0.5 * (changed[0][name] - w) - 2.0 * (changed[1][name] - w)
        np.testing.assert_allclose(total[name], expected, rtol=1e-4, atol=1e-4)
    assert combined([one], [1.0], net()) is one
    assert len(combined([one, two], [1, 1], net()).changes["w"].a) == 20


def test_adapters_that_do_not_add() -> None:
    other = Adapter({}, {}, "sha256:0", {})
    with pytest.raises(InvalidInput, match="different models"):
        combined([ADAPTERS["small"], other], [1, 1], net())
    wide = Adapter({"w": LowRank(normal(2, 5), normal(8, 2), 1.0)}, {}, "", {})
    with pytest.raises(InvalidInput, match="change 'w' in different shapes"):
        combined([ADAPTERS["small"], wide], [1, 1], net())
    head = Adapter({}, {"b": normal(9)}, "", {"head": "b"})
    with pytest.raises(InvalidInput, match="cannot be scaled or added"):
        combined([ADAPTERS["large"], head], [1, 1], net())


def test_the_three_forms_hold_the_same(tmp_path: Path) -> None:
    given = ADAPTERS["large"]
    expected = run_model(merge(net(), given), [X])[0]
    for name in ("a.safetensors", "a.onnx_adapter", "folder"):
        save_adapter(given, tmp_path / name, net())
        read = load_adapter(tmp_path / name, net())
        np.testing.assert_allclose(run_model(insert(net(), read), [X])[0], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidInput, match=r"\.safetensors or \.onnx_adapter, or to a folder"):
        form_to_write("a.onnx")
    with pytest.raises(InvalidInput, match="only the model knows"):
        save_adapter(given, tmp_path / "other")


# --- runs


def test_runs_select_adapters_without_a_new_prepare(monkeypatch: pytest.MonkeyPatch) -> None:
    rep = sonnx.prepare(net(), adapters=ADAPTERS)
    assert rep.adapters == tuple(ADAPTERS)

    def never(*_: Any) -> None:
        raise AssertionError("the model was read again")

    monkeypatch.setattr(backend, "_prepared", never)
    expected = {name: outputs(merge(net(), a)) for name, a in ADAPTERS.items()}
    for name in ADAPTERS:  # which have factors of other shapes
        for _ in range(2):
            rep.run([X], adapter=name)
    for name in ("small", "large", "one", "biases", "large", "small"):
        for inputs in ([X], {"x": X}, X):
            np.testing.assert_allclose(rep.run(inputs, adapter=name)[0], expected[name], rtol=1e-5, atol=1e-5)
            assert rep._session.reason is None, "a plan ran"
    np.testing.assert_allclose(rep.run([X])[0], outputs(net()), rtol=1e-5, atol=1e-5)
    for other in (pickle.loads(pickle.dumps(rep)), copy.copy(rep), copy.deepcopy(rep)):
        np.testing.assert_allclose(other.run([X], adapter="large")[0], expected["large"], rtol=1e-5, atol=1e-5)


def test_one_session_and_a_plan_for_each_rank() -> None:
    rep = SingaBackend.prepare(net(), adapters=ADAPTERS)
    for _ in range(2):
        for name in ADAPTERS:
            rep.run([X], adapter=name)
    sessions = list(rep._session._replacing.values())
    assert len(sessions) == 1, "the adapters replace the same names"
    plans = sessions[0]._planner
    assert plans is not None
    ranks = {tuple(f[n].shape for n in sorted(f)) for f in rep._adapters.values()}
    assert len(ranks) == 4


def test_an_adapter_in_prepare(tmp_path: Path) -> None:
    sonnx.save(net(), tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    save_adapter(ADAPTERS["small"], tmp_path / "a.safetensors")
    for given in (tmp_path / "a.safetensors", str(tmp_path / "a.safetensors"), ADAPTERS["small"]):
        rep = sonnx.prepare(tmp_path / "m.onnx", adapter=given)
        np.testing.assert_allclose(rep.run([X])[0], outputs(merge(net(), ADAPTERS["small"])), rtol=1e-5, atol=1e-5)
    both = sonnx.prepare(net(), adapter=[tmp_path / "a.safetensors", ADAPTERS["one"]])
    total = merge(net(), combined([ADAPTERS["small"], ADAPTERS["one"]], [1, 1], net()))
    np.testing.assert_allclose(both.run([X])[0], outputs(total), rtol=1e-5, atol=1e-5)


def test_wrong_adapters_of_a_run() -> None:
    rep = sonnx.prepare(net(), adapters={"a": ADAPTERS["one"]})
    for call, text in (
        (lambda: rep.run([X], adapter="b"), "adapter must be one of those of prepare \\('a'\\), got 'b'"),
        (lambda: sonnx.prepare(net()).run([X], adapter="a"), "\\(none\\), got 'a'"),
        (lambda: rep.run([X, X], adapter="a"), "takes 1 inputs"),
        (lambda: sonnx.prepare(net(), adapters={}), "takes adapter, or adapters by name"),
        (lambda: sonnx.prepare(net(), adapter=ADAPTERS["one"], adapters={"a": ADAPTERS["one"]}), "got both"),
        (lambda: sonnx.prepare(net(), adapter="nothing.safetensors"), "nothing.safetensors"),
        (lambda: sonnx.prepare(net(), adapter=Adapter({}, {}, "sha256:00", {})), "trained with another model"),
        (lambda: sonnx.prepare(net(), adapters={"a": Adapter({}, {"b": normal(9)}, "", {"head": 1})}), "it cannot be an input"),
    ):
        with pytest.raises(InvalidInput, match=text):
            call()


# --- commands


def invoke(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(main, [str(a) for a in arguments])
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def files(tmp_path: Path) -> Path:
    sonnx.save(net(), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=X)
    for name, a in ADAPTERS.items():
        a.save(tmp_path / f"{name}.safetensors")
    return tmp_path


def ran(files: Path, model: str, *adapters: str) -> np.ndarray:
    options = [o for a in adapters for o in ("--adapter", files / a)]
    invoke("run", files / model, "--inputs", files / "x.npz", "-o", files / "y.npz", *options)
    with np.load(files / "y.npz") as found:
        return np.asarray(found["y"])


def test_merge_and_run(files: Path) -> None:
    expected = outputs(merge(net(), ADAPTERS["large"]))
    told = json.loads(invoke("merge", files / "m.onnx", files / "large.safetensors", "-o", files / "o.onnx", "--json"))
    assert (told["changed"], told["replaced"], told["form"]) == (["conv", "v", "w"], ["b"], "merged")
    assert [n.op_type for n in onnx.load(files / "o.onnx").graph.node] == [n.op_type for n in net().graph.node]
    np.testing.assert_allclose(ran(files, "o.onnx"), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ran(files, "m.onnx", "large.safetensors"), expected, rtol=1e-5, atol=1e-5)
    invoke("merge", files / "m.onnx", files / "large.safetensors", "-o", files / "f.onnx", "--form", "factors")
    np.testing.assert_allclose(outputs(onnx.load(files / "f.onnx")), expected, rtol=1e-5, atol=1e-5)
    invoke(
        "merge",
        files / "m.onnx",
        files / "large.safetensors",
        files / "one.safetensors",
        "-o",
        files / "i.onnx",
        "--form",
        "inputs",
    )
    invoke("adapter", files / "large.safetensors", "-o", files / "large.onnx_adapter")
    np.testing.assert_allclose(outputs(onnx.load(files / "i.onnx"), files / "large.onnx_adapter"), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ran(files, "i.onnx", "large.onnx_adapter"), expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ran(files, "m.onnx", "large.onnx_adapter"), expected, rtol=1e-5, atol=1e-5)


def test_merge_of_weighted_adapters(files: Path) -> None:
    names = [files / "small.safetensors", files / "one.safetensors"]
    invoke("merge", files / "m.onnx", *names, "--weight", 0.5, "--weight", 2, "-o", files / "o.onnx")
    total = merge(net(), combined([ADAPTERS["small"], ADAPTERS["one"]], [0.5, 2.0], net()))
    np.testing.assert_allclose(ran(files, "o.onnx"), outputs(total), rtol=1e-5, atol=1e-5)
    assert "once for each adapter, 2 times" in invoke(
        "merge", files / "m.onnx", *names, "--weight", 0.5, "-o", files / "o.onnx", code=2
    )


def test_merge_refuses_before_it_writes(files: Path) -> None:
    other = net()
    other.graph.initializer[2].CopyFrom(numpy_helper.from_array(normal(6, 8, seed=9), "w"))
    sonnx.save(other, files / "other.onnx")
    text = invoke("merge", files / "other.onnx", files / "one.safetensors", "-o", files / "o.onnx", code=3)
    assert "SX971" in text and not (files / "o.onnx").exists()
    invoke("merge", files / "other.onnx", files / "one.safetensors", "-o", files / "o.onnx", "--any-base")
    before = (files / "m.onnx").read_bytes()
    assert "SX351" in invoke("merge", files / "m.onnx", files / "one.safetensors", "-o", files / "m.onnx", code=3)
    assert (files / "m.onnx").read_bytes() == before
    invoke("quantize", files / "m.onnx", "--weight-only", "int8", "-o", files / "q.onnx")
    found = Adapter({"w_Q8": ADAPTERS["one"].changes["w"]}, {}, "", {})
    found.save(files / "q.safetensors")
    assert "SX974" in invoke("merge", files / "q.onnx", files / "q.safetensors", "-o", files / "n.onnx", code=3)
    invoke("merge", files / "q.onnx", files / "q.safetensors", "-o", files / "n.onnx", "--form", "factors")
    both = run_model(insert(onnx.load(files / "q.onnx"), found), [X])[0]
    np.testing.assert_allclose(ran(files, "n.onnx"), both, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dtype", "factor"), [(np.float16, 300.0), (np.float32, 1e30), (np.float32, np.nan), (np.float32, np.inf)]
)
def test_a_merged_weight_is_finite(dtype: Any, factor: float) -> None:
    """The base is; a sum beyond the dtype, and factors that are not finite, are refused, and no file is written."""
    text = '<ir_version: 8, opset_import: ["": 17]> g (float[N, 6] x) => (float[N, 8] y) { y = MatMul(x, w) }'
    model = parser.parse_model(text.replace("float[", "float16[") if dtype == np.float16 else text)
    model.graph.initializer.append(numpy_helper.from_array(np.ones((6, 8), dtype), "w"))
    a, b = np.full((2, 6), factor, np.float32), np.full((8, 2), factor, np.float32)
    with pytest.raises(InvalidInput, match="merged values must be finite, got 48 infinities or NaN of 48 in 'w'") as caught:
        merge(model, Adapter({"w": LowRank(a, b, 1.0)}, {}, "", {}))
    assert caught.value.code == "SX974"


def test_the_table_of_an_adapter(files: Path) -> None:
    told = json.loads(invoke("adapter", files / "large.safetensors", "--json"))
    assert told["replaced"] == {"b": [3]} and told["base"] == base_digest(net())
    change = ADAPTERS["large"].changes["w"]
    row = next(r for r in told["changes"] if r["tensor"] == "w")
    assert (row["rank"], row["a"], row["b"]) == (16, [16, 6], [8, 16])
    assert row["norm"] == pytest.approx(np.linalg.norm(0.5 * change.b.astype(float) @ change.a), rel=1e-6)
    conv = next(r for r in told["changes"] if r["tensor"] == "conv")
    merged = {t.name: numpy_helper.to_array(t) for t in merge(net(), ADAPTERS["large"]).graph.initializer}
    assert conv["norm"] == pytest.approx(np.linalg.norm(merged["conv"] - normal(6, 2, 3)), rel=1e-4)
    assert "convolution" in invoke("adapter", files / "large.safetensors")


def test_the_command_converts(files: Path) -> None:
    expected = outputs(merge(net(), ADAPTERS["small"]))
    chain = ["small.safetensors", "peft", "a.onnx_adapter", "b.safetensors"]
    for source, target in itertools.pairwise(chain):
        invoke("adapter", files / source, "--model", files / "m.onnx", "-o", files / target)
        np.testing.assert_allclose(ran(files, "m.onnx", target), expected, rtol=1e-5, atol=1e-5)
    assert load_adapter(files / "b.safetensors", net()).base == base_digest(net())
    assert "needs --model MODEL" in invoke("adapter", files / "peft", code=2)
    assert "needs --model MODEL" in invoke("adapter", files / "one.safetensors", "-o", files / "folder", code=2)
    assert "SX983" in invoke("adapter", files / "one.safetensors", "-o", files / "x.npz2", code=3)
    assert "SX351" in invoke("adapter", files / "one.safetensors", "--model", files / "m.onnx", "-o", files / "peft", code=3)
    assert "SX970" in invoke("adapter", files / "none.safetensors", code=3)


def test_feeds_are_the_values_of_the_inputs() -> None:
    feeds = adapter_feeds(ADAPTERS["large"])
    assert set(feeds) == {"conv.lora_A", "conv.lora_B", "w.lora_A", "w.lora_B", "v.lora_A", "v.lora_B", "b"}
    np.testing.assert_allclose(feeds["w.lora_B"], 0.5 * ADAPTERS["large"].changes["w"].b)
