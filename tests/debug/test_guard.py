"""Guards: what is stored, what is found, what is not called a fault, and files that are damaged."""

from __future__ import annotations

import base64
import json
import os
import warnings
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from tests.helpers import bounded, planted
from tests.helpers.paths import PROJECT

from singa import sonnx
from singa.cli import main
from singa_backend import InvalidInput, SingaBackend, SonnxError, debug
from singa_backend.debug import guards
from singa_backend.debug.guards import draws
from singa_backend.debug.guards.draws import EDGES, NORMAL, digest, draw
from singa_backend.debug.guards.summary import LEVELS, judge, positions, summarize
from singa_backend.debug.model import ComparedModel

MODELS = PROJECT / "tests" / "models"
NETS = ("bert-script-17", "gpt2-dynamo-18", "lstm-script-17", "mobilenetv2-script-17", "unet-dynamo-18")


def net(seed: int = 0) -> ModelProto:
    """Two products with activations, in which every value but the last has another size."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 6] x) => (float[n, 3] y) {
        m = MatMul (x, w) a = Add (m, b) t = Tanh (a) s = Softmax <axis = -1> (t) y = MatMul (s, v) }"""
    made = parser.parse_model(text)
    random = np.random.default_rng(seed)
    for name, shape in (("w", (6, 8)), ("b", (8,)), ("v", (8, 3))):
        made.graph.initializer.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), name))
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    onnx.save(net(), tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


@pytest.fixture
def guard(model: Path) -> Path:
    guards.write_guard(model, model.with_suffix(".guard"))
    return model.with_suffix(".guard")


def cli(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["guard", *map(str, arguments)])


# --- what is stored ---------------------------------------------------------------------------------------------------


def split_mix(key: int, at: int) -> int:
    """SplitMix64 in integers of Python."""
    most = (1 << 64) - 1
    z = ((at + 1) * 0x9E3779B97F4A7C15 + key) & most
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & most
    z = (z ^ z >> 27) * 0x94D049BB133111EB & most
    return z ^ z >> 31


def test_inputs_are_the_same_bits_everywhere() -> None:
    """They follow from integers and IEEE 754, so another NumPy, or another machine, draws the same."""
    float32, bits = np.dtype(np.float32), [split_mix(7, i) for i in range(15)]
    sums = [sum(b >> 16 * i & 0xFFFF for i in range(4)) for b in bits]
    expected = np.array([(s - 131070.0) / 37837.0 for s in sums], np.float32).reshape(3, 5)
    assert np.array_equal(draw(NORMAL, float32, (3, 5), 2, 7), expected)
    assert draw(NORMAL, np.dtype(np.int64), (15,), 100, 7).tolist() == [b % 100 for b in bits]
    assert digest(draw(NORMAL, float32, (3, 5), 2, 7)) == "5179588b5147c7f8"
    normal = draw(NORMAL, float32, (100, 100), 2, 1)
    assert abs(normal.mean()) < 0.05 and abs(normal.std() - 1) < 0.05
    assert set(np.unique(draw(EDGES, np.dtype(np.int64), (50,), 60, 3))) == {0, 59}
    assert {-0.0, 8.0, -8.0, 0.5} <= set(np.unique(draw(EDGES, float32, (500,), 2, 3)))


def test_positions_spread_over_every_axis() -> None:
    at = np.unravel_index(positions((4, 64, 9, 9), LEVELS[0], 3), (4, 64, 9, 9))
    assert [len(set(a.tolist())) for a in at] == [4, 64, 9, 9]  # 64 samples reach every channel
    assert positions((3, 4), LEVELS[0], 1).tolist() == list(range(12))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.bool_, np.complex64])
def test_a_summary_sees_one_changed_channel(dtype: Any) -> None:
    random = np.random.default_rng(0)
    value = (random.standard_normal((4, 768, 5)) * 3).astype(dtype)
    stored = summarize(value, LEVELS[1], debug.Tolerance(), "k")
    assert judge(value, stored, LEVELS[1], "k").agrees
    other = value.copy()
    other[:, 431] = ~other[:, 431] if dtype == np.bool_ else other[:, 431] * 2 + 1
    assert not judge(other, stored, LEVELS[1], "k").agrees
    assert judge(value[:, :-1], stored, LEVELS[1], "k").verdict == "shape"
    assert judge(value.astype(np.int8), stored, LEVELS[1], "k").verdict == "dtype"


def test_the_file_is_text_without_weights_and_the_same_each_time(guard: Path, model: Path) -> None:
    first = guard.read_text()
    guards.write_guard(model, guard)
    assert guard.read_text() == first
    document = json.loads(first)
    assert [c["type"] for c in document["cases"]] == ["float[2,6]", "float[2,6]", "float[1,6]", "float[3,6]"]
    assert [v["covers"] for v in document["values"] if "value" in v] == [1] * 5
    assert {name for name, _ in document["weights"]} == {"w", "b", "v"}
    weight = numpy_helper.to_array(onnx.load(model).graph.initializer[0]).tobytes()
    assert base64.b64encode(weight).decode()[:40] not in first
    found = guards.read_guard(guard)
    assert found.model["file"] == "net.onnx" and [n.operator for n in found.nodes] == [
        "MatMul",
        "Add",
        "Tanh",
        "Softmax",
        "MatMul",
    ]


def test_a_large_model_has_a_small_guard(tmp_path: Path) -> None:
    body = " ".join(f"a{i + 1} = MatMul (a{i}, w{i}) " for i in range(6))
    made = parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[n, 1024] a0) => (float[n, 1024] a6) {{ {body} }}'
    )
    scale = np.float32(1 / 32)
    for i in range(6):
        weight = np.random.default_rng(i).standard_normal((1024, 1024), np.float32) * scale
        made.graph.initializer.append(numpy_helper.from_array(weight, f"w{i}"))
    onnx.save(made, tmp_path / "large.onnx")
    guards.write_guard(tmp_path / "large.onnx", tmp_path / "large.guard")
    assert (tmp_path / "large.onnx").stat().st_size > 25e6 and (tmp_path / "large.guard").stat().st_size < 30e3


def test_a_model_of_many_nodes_is_covered_by_chosen_values(tmp_path: Path) -> None:
    body = " ".join(f"a{i + 1} = {'Tanh' if i % 2 else 'Neg'} (a{i}) " for i in range(3000))
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[n, 40] a0) => (float[n, 40] a3000) {{ {body} }}')
    found = guards.write_guard(made, tmp_path / "long.guard", size=128 << 10)
    assert (tmp_path / "long.guard").stat().st_size <= 128 << 10
    assert 20 < len(found.values) < 300 and sum(v.covers for v in found.values) == 3000
    assert max(v.covers for v in found.values) <= 3 * 3000 / len(found.values)
    again = guards.read_guard(tmp_path / "long.guard")
    assert [n.name for n in again.nodes] == [n.name for n in found.nodes] and "packed" in (tmp_path / "long.guard").read_text()


def test_values_that_rounding_decides_are_left_out(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[64, 6] x) => (int64[64] y, float[64, 1] z) {
        k = Constant <value_float = 1e9> () e = Exp (x) h = Mul (e, k) i = Cast <to = 7> (h) r = ReduceSum <keepdims = 0> (i, one)
        y = Identity (r) u = RandomNormalLike (x) z = ReduceSum (u, one) }"""
    made = parser.parse_model(text)
    made.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    found = guards.write_guard(made, tmp_path / "m.guard")
    assert {v.name for v in found.values} == {"e", "h"}
    assert any("random" in n for n in found.notes) and any("rounding" in n and "i, r, y" in n for n in found.notes)


def test_maps_of_a_classifier_are_stored_with_the_tolerance_of_their_floats(tmp_path: Path) -> None:
    """The probabilities of ZipMap are float32: rounding moves them within the tolerance, and onnxruntime's pass."""
    text = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 1]> g (float[n, 3] x) => (seq(map(string, float)) p) {
        s = ai.onnx.ml.LinearClassifier <coefficients = [0.3, -1.1, 0.7, 1.3, 0.2, -0.4], intercepts = [0.1, -0.2],
            classlabels_strings = ["cat", "dog"], post_transform = "SOFTMAX"> (x)
        p = ai.onnx.ml.ZipMap <classlabels_strings = ["cat", "dog"]> (q) }"""
    made = parser.parse_model(text.replace("s = ai", "s, q = ai"))
    found = guards.write_guard(made, tmp_path / "m.guard")
    (maps,) = (v for v in found.values if v.name == "p")
    assert set(maps.cases) == {c.name for c in found.cases} and not found.notes
    assert {s.dtype for s in maps.cases["normal"].values()} == {np.dtype(np.float32), np.dtype(object)}
    assert guards.check_guard(found, model=made, against="onnxruntime").verdict == "pass"


def test_the_largest_values_of_a_mask_are_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = summarize(np.full((64, 64), np.finfo(np.float32).min), LEVELS[-1], debug.Tolerance(), "mask")
    assert judge(np.full((64, 64), np.finfo(np.float32).min), found, LEVELS[-1], "mask").excess <= 1


def test_inputs_of_a_user_are_stored(model: Path, tmp_path: Path) -> None:
    x = np.linspace(-3, 3, 30, dtype=np.float32).reshape(5, 6)
    guards.write_guard(model, tmp_path / "g", inputs={"x": x})
    (case,) = guards.read_guard(tmp_path / "g").cases
    assert case.name == "given" and np.array_equal(guards.inputs_of(case)["x"], x)


def test_a_model_that_refuses_drawn_inputs_is_told(tmp_path: Path) -> None:
    made = parser.parse_model("""<ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x, int64[2] s) => (float[a, b] y) {
        y = Reshape (x, s) }""")
    with pytest.raises(InvalidInput, match="no inputs could be drawn") as refused:
        guards.write_guard(made, tmp_path / "g")
    assert refused.value.code == "SX991" and not (tmp_path / "g").exists()
    found = guards.write_guard(made, tmp_path / "g", inputs={"x": np.zeros((2, 3), np.float32), "s": np.array([3, 2])})
    assert [v.name for v in found.values] == ["y"]
    with pytest.raises(InvalidInput, match="at most 4096 bytes"):
        guards.write_guard(MODELS / "vit-script-14.onnx", tmp_path / "h", size=4096)


# --- what is found ----------------------------------------------------------------------------------------------------

KINDS = ["weight", "attribute", "dtype", "engine", "weight", "attribute", "weight", "engine", "opset", "dtype"]


def faults(count: int, seed: int, write: Callable[[str, Any], guards.Guard]) -> Counter[str]:
    """Plant faults that move a value beyond its tolerance, and count those that are found and named."""
    random, total, at = np.random.default_rng(seed), Counter[str](), 0
    while total["all"] < count:
        kind, at = KINDS[at % len(KINDS)], at + 1
        if kind == "opset":
            model, fault = planted.opset(random)
            source, known = ComparedModel(model), write(f"opset{at}", model)
        else:
            name = NETS[random.integers(len(NETS))]
            source, known = ComparedModel(MODELS / f"{name}.onnx"), write(name, MODELS / f"{name}.onnx")
            floats = [
                v.name
                for v in known.values
                if all(s.dtype == np.float32 and s.shape for c in v.cases.values() for s in c.values())
            ]
            made = planted.planted(onnx.load(MODELS / f"{name}.onnx"), floats, kind, random)
            if made is None:
                continue
            fault = made
        if not moves(fault, source, known):
            continue
        checked = source if fault.engine else ComparedModel(fault.model)
        found = guards.check_guard(known, model=checked, against=fault.engine or "sonnx")
        one = found.culprit
        total["all"] += 1
        total["found"] += found.verdict == "fail"
        total["named"] += one is not None and one.among == 1 and one.node == source.node(fault.node).name
    return total


def moves(fault: planted.Planted, source: ComparedModel, known: guards.Guard) -> bool:
    """Whether a fault moves a value beyond its tolerance, with inputs for which both models run."""
    try:
        for case in known.cases:
            feeds = guards.inputs_of(case)
            if fault.engine:
                found = debug.compare(source, feeds, against=fault.engine)
            else:
                found = debug.compare(ComparedModel(fault.model), feeds, against=source)
                if any(n.side == "mine" for n in found.not_compared):
                    return False
            if any(not r.agrees for r in found.rows):
                return True
    except SonnxError:
        return False
    return False


def test_planted_faults_are_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SONNX_GUARD_FAULTS=200 plants more of them, with other seeds by SONNX_GUARD_SEED."""
    monkeypatch.chdir(tmp_path)
    written: dict[str, guards.Guard] = {}

    def write(name: str, model: Any) -> guards.Guard:
        if name not in written:
            guards.write_guard(model, tmp_path / name)
            written[name] = guards.read_guard(tmp_path / name)
        return written[name]

    count = int(os.environ.get("SONNX_GUARD_FAULTS", "10"))
    total = faults(count, int(os.environ.get("SONNX_GUARD_SEED", "0")), write)
    print(dict(total))
    assert total["found"] >= 0.95 * count and total["named"] >= 0.9 * count, total


@pytest.mark.parametrize("name", ["bert-script-17", "mobilenetv2-script-17"])
def test_a_node_between_stored_values_is_named_too(name: str, tmp_path: Path) -> None:
    """A small guard stores few values: the hashes name a changed node, and running node by node a wrong operator."""
    path = MODELS / f"{name}.onnx"
    found = guards.write_guard(path, tmp_path / "g", size=64 << 10)
    assert max(v.covers for v in found.values) > 3
    model = onnx.load(path)
    inner = next(
        n
        for n in reversed(model.graph.node)
        if n.op_type in ("MatMul", "Conv") and n.output[0] not in {v.name for v in found.values}
    )
    weight = next(t for t in model.graph.initializer if t.name in inner.input)
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.2), weight.name))
    changed = guards.check_guard(tmp_path / "g", model=model, against="sonnx", to=tmp_path / "one")
    assert changed.culprit is not None and (changed.culprit.node, changed.culprit.found) == (inner.name, "hashes")
    engine = f"tests.helpers.planted:Scaled_{'Softmax' if 'bert' in name else 'Clip'}"
    wrong = guards.check_guard(tmp_path / "g", model=path, against=engine, to=tmp_path / "two")
    first = next(n for n in onnx.load(path).graph.node if engine.endswith(n.op_type))
    assert wrong.culprit is not None and (wrong.culprit.node, wrong.culprit.found) == (first.name, "bisect")


def test_the_first_wrong_node_is_written_as_a_model(guard: Path, tmp_path: Path) -> None:
    found = guards.check_guard(guard, against="tests.helpers.planted:Scaled_Tanh", to=tmp_path / "one")
    one = found.culprit
    assert one is not None and (one.operator, one.among, one.alone, one.folder) == ("Tanh", 1, True, tmp_path / "one")
    done = CliRunner().invoke(main, ["run", f"{one.folder}/model.onnx", "--data", f"{one.folder}/test_data_set_0"])
    assert done.exit_code == 0, done.output  # the stored outputs are the right ones
    part, feeds, expected = debug_read(tmp_path / "one")
    assert [n.op_type for n in part.graph.node] == ["Tanh"] and np.allclose(expected, np.tanh(feeds), atol=1e-6)


def debug_read(folder: Path) -> tuple[ModelProto, Any, Any]:
    sides = (numpy_helper.to_array(onnx.load_tensor(folder / "test_data_set_0" / f"{s}_0.pb")) for s in ("input", "output"))
    return onnx.load(folder / "model.onnx"), *sides


def test_a_changed_weight_is_named_with_its_node(guard: Path, model: Path, tmp_path: Path) -> None:
    changed = net()
    weights = numpy_helper.to_array(changed.graph.initializer[1]).copy()
    weights[3] += 1
    changed.graph.initializer[1].CopyFrom(numpy_helper.from_array(weights, "b"))
    onnx.save(changed, model)
    found = guards.check_guard(guard, against="sonnx", to=tmp_path / "one")
    assert found.same_model is False and found.culprit is not None and found.culprit.operator == "Add"
    assert found.culprit.notes[0].startswith("the weight 'b' is another: float[8]")
    assert (tmp_path / "one" / "model.onnx").is_file()


def test_a_dropped_node_is_named(guard: Path, tmp_path: Path) -> None:
    changed = net()
    del changed.graph.node[2]
    changed.graph.node[2].input[0] = "a"
    found = guards.check_guard(guard, model=changed, against="sonnx", to=tmp_path / "one")
    assert found.culprit is not None and found.culprit.operator == "Tanh" and found.culprit.notes == ["it is not in this model"]


def test_an_engine_that_fails_is_named(guard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stops.py").write_text("""
from onnx.reference import ReferenceEvaluator
class Engine:
    @staticmethod
    def run_model(model, inputs, device="CPU", **options):
        if any(n.op_type == "Softmax" for n in model.graph.node):
            raise RuntimeError("no Softmax here")
        session = ReferenceEvaluator(model)
        return tuple(session.run(None, dict(zip(session.input_names, inputs))))
""")
    monkeypatch.syspath_prepend(tmp_path)
    found = guards.check_guard(guard, against="stops:Engine")
    assert found.verdict == "fail" and "no Softmax here" in found.failures["normal"]
    assert found.culprit is not None and (found.culprit.operator, found.culprit.found) == ("Softmax", "failure")


# --- what is not a fault ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NETS[-3:])
def test_another_runtime_and_written_forms_pass(name: str, tmp_path: Path) -> None:
    path = MODELS / f"{name}.onnx"
    guards.write_guard(path, tmp_path / "g")
    optimized = onnx.load(path)
    sonnx.optimize(optimized)
    forms = {"optimized": optimized, "converted": sonnx.convert(str(path), 21), "same": onnx.load(path)}
    for (form, made), engine in zip(forms.items(), ("onnxruntime", "sonnx", "onnxruntime"), strict=True):
        found = guards.check_guard(tmp_path / "g", model=made, against=engine)
        assert not found.differing and not found.failures, (form, engine, found.culprit)
        assert found.verdict == ("pass" if 2 * found.compared >= found.stored else "weak")
        assert form == "optimized" or found.verdict == "pass"


def test_few_compared_values_are_weak(guard: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = net()
    for node in renamed.graph.node:
        for names in (node.input, node.output):
            for i, name in enumerate(names):
                names[i] = f"other_{name}" if name in ("m", "a", "t", "s") else name
    onnx.save(renamed, tmp_path / "renamed.onnx")
    line = ("check", guard, "--model", tmp_path / "renamed.onnx", "--against", "sonnx")
    done = cli(*line)
    assert (
        done.exit_code == 1 and "weak: sonnx and the guard" in done.stdout and "1 of 5 values compared, 0 differ" in done.stdout
    )
    assert "not compared: 4 values, the model has no value of this name: a, m, s, t" in done.stdout
    assert cli(*line, "--allow-weak").exit_code == 0
    found = json.loads(cli(*line, "--json").stdout)
    assert (found["schema"], found["verdict"], found["culprit"], found["compared"]) == ("sonnx.guard.check", "weak", None, 1)


# --- saved values and programs ----------------------------------------------------------------------------------------


def test_values_of_a_device_are_compared(guard: Path, model: Path, tmp_path: Path) -> None:
    """The inputs are written, a program elsewhere runs the model, and its values are read without the model."""
    assert cli("inputs", guard, "-o", tmp_path / "in.npz").exit_code == 0
    rep, values = SingaBackend.prepare(model), {}
    with np.load(tmp_path / "in.npz") as inputs:
        assert sorted(inputs.files) == ["edges/x", "normal/x", "odd/x", "one/x"]
        for key in inputs.files:
            for name, value in rep.run({"x": inputs[key]}, aux_output=["t", "s"]).to_dict().items():
                values[f"{key.split('/')[0]}/{name}"] = value
    np.savez(tmp_path / "out.npz", **values)
    model.unlink()
    found = guards.check_guard(guard, against=tmp_path / "out.npz")
    assert (found.verdict, found.compared) == ("pass", 3) and {n.value for n in found.not_compared} == {"m", "a"}
    values["odd/s"] = values["odd/s"] * np.float32(1.01)
    np.savez(tmp_path / "out.npz", **values)
    found = guards.check_guard(guard, against=tmp_path / "out.npz")
    assert found.culprit is not None and (found.culprit.operator, found.culprit.case) == ("Softmax", "odd")
    values = {k.removeprefix("one/"): v for k, v in values.items() if k.startswith("one/")}
    np.savez(tmp_path / "one.npz", **values)
    with pytest.raises(InvalidInput, match="must be CASE/NAME with the cases normal, edges, one, odd"):
        guards.check_guard(guard, against=tmp_path / "one.npz")
    assert guards.check_guard(guard, against=tmp_path / "one.npz", case="one").verdict == "pass"
    np.savez(tmp_path / "none.npz", z=values["y"])
    with pytest.raises(InvalidInput, match="has no value of the guard"):
        guards.check_guard(guard, against=tmp_path / "none.npz", case="one")


def test_results_of_the_command(guard: Path, model: Path, tmp_path: Path) -> None:
    done = cli(
        "check",
        guard,
        "--against",
        "tests.helpers.planted:Scaled_Softmax",
        "--to",
        tmp_path / "one",
        "--junit",
        tmp_path / "j.xml",
    )
    assert done.exit_code == 1 and "first wrong node: Softmax " in done.stdout and f"wrote {tmp_path / 'one'}" in done.stdout
    suite = ElementTree.parse(tmp_path / "j.xml").getroot()
    assert suite.get("tests") == "21" and int(suite.get("failures", "0")) == len(suite.findall("./testcase/failure")) >= 8
    assert cli("check", guard, "--against", "sonnx", "--junit", tmp_path / "j.xml").exit_code == 0
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("failures") == "0"
    assert (
        cli("check", guard, "-o", "x").exit_code == 2
        and "not an option of `sonnx guard check`" in cli("check", guard, "-o", "x").stderr
    )
    assert cli("write", model).exit_code == 2 and cli("check", guard, "--case", "none").exit_code == 3
    model.unlink()
    refused = cli("check", guard, "--against", "sonnx")
    assert refused.exit_code == 3 and "net.onnx is not in the folder of the guard" in refused.stderr


# --- damaged files ----------------------------------------------------------------------------------------------------


def damaged(document: dict[str, Any], random: np.random.Generator) -> None:
    """Replace one value of a document, somewhere."""
    place: Any = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = keys[random.integers(len(keys))]
        if isinstance(place[key], (dict, list)) and place[key] and random.random() < 0.9:
            place = place[key]
            continue
        strange = [None, -1, 1e308, "", "x", [], {}, True, "float[99999999999,99999999999]", "AAAA", 1 << 70, ["a", "b"]]
        place[key] = strange[random.integers(len(strange))]
        return


def test_damaged_files_are_refused(guard: Path, model: Path, tmp_path: Path) -> None:
    text, random = guard.read_text(), np.random.default_rng(0)
    refused = 0
    for i in range(300):
        document = json.loads(text)
        damaged(document, random)
        (tmp_path / "bad.guard").write_text(json.dumps(document))
        try:
            found = guards.read_guard(tmp_path / "bad.guard")
            for case in found.cases:
                guards.inputs_of(case)
            if i % 10 == 0:
                guards.check_guard(found, model=model, against="sonnx", to=tmp_path / "one")
        except SonnxError:
            refused += 1
    assert refused > 100  # others change a name, a note or a number
    for bad in (b"", b"{", b"[]", b"\xff", text.encode()[:900], b'{"schema": "sonnx.guard", "schema_version": 2}'):
        (tmp_path / "bad.guard").write_bytes(bad)
        with pytest.raises(InvalidInput) as error:
            guards.read_guard(tmp_path / "bad.guard")
        assert error.value.code == "SX990"


def test_packed_data_do_not_unpack_without_bound(guard: Path, tmp_path: Path) -> None:
    document = json.loads(guard.read_text())
    document["packed"] = base64.b64encode(zlib.compress(bytes(1 << 26), 9)).decode()
    (tmp_path / "bomb.guard").write_text(json.dumps(document))
    with pytest.raises(InvalidInput, match="must unpack to at most"):
        guards.read_guard(tmp_path / "bomb.guard")


GIBIBYTE = 1 << 30
LARGE = {
    "drawn": [{"input": "x", "type": f"float[{GIBIBYTE}]", "draw": "normal", "high": 2, "key": "0", "sha256": ""}],
    "stored": [{"input": "x", "type": f"float[{GIBIBYTE}]", "data": "", "sha256": ""}],
    "without end": [{"input": "x", "type": f"float[{10**12 - 1},{10**12 - 1}]", "draw": "normal", "high": 2, "key": "0",
                     "sha256": ""}],
    "several": [{"input": f"x{i}", "type": f"uint8[{GIBIBYTE // 4}]", "draw": "normal", "high": 2, "key": "0", "sha256": ""}
                for i in range(5)],
}  # fmt: skip
"""Inputs of a guard that need more than a gibibyte."""


def read_large(path: str) -> None:
    guards.inputs_of(guards.read_guard(path).cases[0])


def draw_blocks(count: int) -> None:
    draw(NORMAL, np.dtype(np.uint8), (count,), 200, 7)


@pytest.mark.skipif(not bounded.available, reason="the system does not show the memory of a process")
def test_large_inputs_are_refused_before_they_are_made(guard: Path, tmp_path: Path) -> None:
    document = json.loads(guard.read_text())
    paths = []
    for name, rows in LARGE.items():
        rows = [{"case": "normal", **row} for row in rows]
        paths.append(str(tmp_path / f"{name}.guard"))
        Path(paths[-1]).write_text(json.dumps({**document, "cases": rows}))
    for name, answer in zip(LARGE, bounded.calls(read_large, paths), strict=True):
        one_tensor = name == "without end"  # above the limit of every tensor, not only of a guard's inputs
        code, limit = ("SX603", "one tensor is 4.0 GiB") if one_tensor else ("SX600", "at most 1.0 GiB")
        assert answer["code"] == code and limit in answer["message"] and answer["mebibytes"] <= 64, answer
    (answer,) = bounded.calls(draw_blocks, [32 << 20])  # with less memory than two arrays of the result's size
    assert not answer["code"] and answer["mebibytes"] <= 64, answer


def test_blocks_of_drawn_inputs_are_one_stream() -> None:
    count = draws._BLOCK + 3
    found = draw(NORMAL, np.dtype(np.int64), (count,), 1000, 7)
    for at in (1, draws._BLOCK - 1, draws._BLOCK, count - 1):
        assert found[at] == split_mix(7, at) % 1000


def test_a_long_model_of_long_names_has_fewer_values(tmp_path: Path) -> None:
    """The names of nodes and values take more of the file than was estimated."""
    name = lambda i: f"/{'encoder.block/' * 20}{i}"  # noqa: E731
    nodes = [helper.make_node("Add", [name(i), "b"], [name(i + 1)], name=name(i)) for i in range(60)]
    ends = [helper.make_tensor_value_info(name(i), TensorProto.FLOAT, ["n", 300]) for i in (0, 60)]
    weight = numpy_helper.from_array(np.ones(300, np.float32), "b")
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    made = guards.write_guard(model, tmp_path / "long.guard", size=32 << 10)
    assert (tmp_path / "long.guard").stat().st_size <= 32 << 10
    assert 1 < len(made.values) < 60 and made.values[-1].output and max(v.covers for v in made.values) > 1
    assert guards.check_guard(tmp_path / "long.guard", model=model, against="sonnx").verdict == "pass"
