"""Models of reduced precision against the original: floats of other dtypes, 8-bit tables, layers by their own error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from singa.cli import main
from singa_backend import debug
from singa_backend.comparison.difference import Tolerance, difference
from singa_backend.comparison.tolerances import COMPARE
from singa_backend.debug import guards
from singa_backend.passes.change_dtype import change_dtype

DTYPES = [np.float16, ml_dtypes.bfloat16, np.float64]
X = {"x": np.random.default_rng(1).standard_normal((3, 8)).astype(np.float32)}


def net(layers: int = 5) -> ModelProto:
    """x -> (MatMul, Add, Tanh) of several layers -> Neg -> y."""
    steps = [f"m{i} = MatMul(t{i}, w{i}) a{i} = Add(m{i}, b{i}) t{i + 1} = Tanh(a{i})" for i in range(layers)]
    text = " ".join(["t0 = Identity(x)", *steps, f"y = Neg(t{layers})"])
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[3,8] x) => (float[3,8] y) {{ {text} }}')
    random = np.random.default_rng(0)
    for i in range(layers):
        for name, shape in ((f"w{i}", (8, 8)), (f"b{i}", (8,))):
            value = (random.standard_normal(shape) / 3).astype(np.float32)
            model.graph.initializer.append(numpy_helper.from_array(value, name))
    return model


def scaled(model: ModelProto, name: str, factor: float) -> None:
    tensor = next(t for t in model.graph.initializer if t.name == name)
    value = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array((value.astype(np.float32) * factor).astype(value.dtype), name))


def fed(model: ModelProto) -> dict[str, np.ndarray]:
    return {"x": X["x"].astype(helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type))}


def sonnx(*words: object) -> Any:
    return CliRunner().invoke(main, [str(w) for w in words])


def converted(dtype: Any) -> ModelProto:
    model = net()
    change_dtype(model, dtype)
    return model


def with_float_ends(dtype: int) -> ModelProto:
    """A conversion whose inputs and outputs stay float: Cast nodes at the ends, as converters write them."""
    model = net()
    graph = model.graph
    for tensor in graph.initializer:
        value = numpy_helper.to_array(tensor).astype(helper.tensor_dtype_to_np_dtype(dtype))
        tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
    graph.node[0].input[0], graph.node[-1].output[0] = "x_cast", "y_cast"
    graph.node.insert(0, helper.make_node("Cast", ["x"], ["x_cast"], to=dtype))
    graph.node.append(helper.make_node("Cast", ["y_cast"], ["y"], to=TensorProto.FLOAT))
    return model


FORMS = [converted(d) for d in DTYPES] + [with_float_ends(t) for t in (TensorProto.FLOAT16, TensorProto.BFLOAT16)]
IDS = [np.dtype(d).name for d in DTYPES] + ["float16 with casts", "bfloat16 with casts"]


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@pytest.mark.parametrize("options", [{}, {"rtol": 0.05}, {"local": True}], ids=["default", "rtol", "local"])
def test_a_conversion_agrees_and_all_of_its_values_are_compared(form: ModelProto, options: dict[str, Any]) -> None:
    found = debug.compare(form, fed(form), against=net(), **options)
    assert found.agrees and found.first is None, found.first
    compared = {r.value: r.difference for r in found.rows}
    assert {"t1", "m2", "a4", "t5", "y"} <= compared.keys() and compared["m2"].mixed
    assert compared["m2"].verdict == "agrees" and compared["m2"].dtypes[0] != compared["m2"].dtypes[1] == "float"
    assert {"m2", "t5"} <= {r.value for r in found.mixed} and debug.bisect(form, fed(form), against=net(), **options) is None


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@pytest.mark.parametrize("options", [{}, {"rtol": 0.01}, {"local": True}, {"align": False}], ids=str)
def test_a_doubled_weight_of_a_conversion_names_its_node(form: ModelProto, options: dict[str, Any], tmp_path: Path) -> None:
    wrong = ModelProto()
    wrong.CopyFrom(form)
    scaled(wrong, "w3", 2.0)
    found = debug.compare(wrong, fed(wrong), against=net(), **options)
    assert found.first is not None and found.first.values == ["m3"] and found.first.inputs_agreed
    part = debug.bisect(wrong, fed(wrong), against=net(), to=tmp_path / "part", **options)
    assert part is not None and part.alone and part.node.values == ["m3"]


@pytest.mark.parametrize("a", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("b", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_floats_of_two_dtypes_have_the_tolerance_of_the_narrower(a: Any, b: Any) -> None:
    x = np.linspace(1, 2, 20)
    rtol = max(COMPARE.bound(np.dtype(d)).rtol for d in (a, b))
    near, far = (difference((x * (1 + rtol * f)).astype(a), x.astype(b), Tolerance(atol=0, mixed=True)) for f in (0.2, 3))
    assert near.agrees and not far.agrees and far.verdict == "differs" and near.tolerance and near.tolerance.rtol == rtol
    strict = difference(x.astype(a), x.astype(b))
    assert strict.verdict == ("agrees" if a == b else "dtype")


@pytest.mark.parametrize("other", [np.int32, np.uint8, np.bool_, np.complex64, object])
def test_values_of_another_kind_are_not_compared_in_a_wider_dtype(other: Any) -> None:
    one = np.ones(3, np.float32)
    assert difference(one, one.astype(other), Tolerance(mixed=True)).verdict == "dtype"


def test_the_command_notes_dtypes_and_does_not_blame_them(tmp_path: Path) -> None:
    onnx.save(converted(np.float16), tmp_path / "half.onnx")
    onnx.save(net(), tmp_path / "single.onnx")
    found = sonnx("compare", tmp_path / "half.onnx", "--against", tmp_path / "single.onnx", "--rtol", "0.05")
    assert found.exit_code == 0, found.output
    assert "17 values are float16 here and float there: compared with the tolerance of float16" in " ".join(found.stdout.split())


@pytest.mark.parametrize("form", FORMS, ids=IDS)
@pytest.mark.parametrize("against", ["onnxruntime", "definition"])
def test_a_guard_of_the_original_checks_a_conversion(form: ModelProto, against: str, tmp_path: Path) -> None:
    if against == "onnxruntime" and form.graph.initializer[0].data_type == TensorProto.BFLOAT16:
        against = "sonnx"  # onnxruntime has no products of bfloat16 on the CPU
    onnx.save(net(), tmp_path / "net.onnx")
    guards.write_guard(tmp_path / "net.onnx", tmp_path / "net.guard")
    found = guards.check_guard(tmp_path / "net.guard", model=form, against=against)
    assert found.verdict == "pass" and found.compared == found.stored, (found.culprit, found.failures)
    assert sum(found.mixed.values()) >= 15
    wrong = ModelProto()
    wrong.CopyFrom(form)
    scaled(wrong, "w3", 2.0)
    found = guards.check_guard(tmp_path / "net.guard", model=wrong, against=against, to=tmp_path / "part")
    assert found.verdict == "fail" and found.culprit is not None and found.culprit.value == "m3", found.culprit


# --- other kinds, and equal names -------------------------------------------------------------------------------------


def looked_up(table: str) -> ModelProto:
    """ids -> Gather -> MatMul -> Relu -> MatMul -> y; the table is stored as floats, or as 8 bits with coarse scales."""
    head = {
        "float": "e = Gather(table, ids)",
        "rows": "d = DequantizeLinear<axis=1>(codes, scale, zero) e = Gather(d, ids)",
        "codes": "q = Gather(codes, ids) e = DequantizeLinear<axis=2>(q, scale, zero)",
        "arithmetic": "q = Gather(codes, ids) f = Cast<to=1>(q) s = Sub(f, z) e = Mul(s, scale)",
    }[table]
    body = f"{head} h = MatMul(e, w) r = Relu(h) y = MatMul(r, v)"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (int64[2,3] ids) => (float[2,3,4] y) {{ {body} }}')
    random = np.random.default_rng(5)
    values = random.standard_normal((20, 6)).astype(np.float32)
    scale = np.full(6, 4 / 255, np.float32)
    zero = np.full(6, 128, np.uint8)
    stored = {
        "table": values, "codes": np.clip(np.round(values / scale) + 128, 0, 255).astype(np.uint8), "scale": scale, "zero": zero,
        "z": zero.astype(np.float32), "w": random.standard_normal((6, 5)).astype(np.float32),
        "v": random.standard_normal((5, 4)).astype(np.float32),
    }  # fmt: skip
    used = {n for node in model.graph.node for n in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in stored.items() if n in used)
    return model


IDS_FED = {"ids": np.array([[1, 5, 19], [0, 3, 7]])}


@pytest.mark.parametrize("table", ["rows", "codes", "arithmetic"])
@pytest.mark.parametrize("align", [True, False])
def test_an_8_bit_table_is_named_and_not_a_later_product(table: str, align: bool) -> None:
    found = debug.compare(looked_up(table), IDS_FED, against=looked_up("float"), align=align)
    assert found.first is not None and found.first.values == ["e"], found.first
    assert {"e", "h", "r", "y"} <= {r.value for r in found.rows} and "q" not in {r.value for r in found.rows}


@pytest.mark.parametrize("mine", ["uint8", "int8", "int32", ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("align", [True, False])
def test_a_value_of_another_kind_is_no_partner(mine: str, align: bool) -> None:
    """The name `q` means codes in one model and floats in the other."""
    code = helper.np_dtype_to_tensor_dtype(np.dtype(mine))
    text = f"q = Cast<to={code}>(x) f = Cast<to=1>(q) y = Neg(f)"
    here = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) {{ {text} }}')
    there = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) { q = Floor(x) y = Neg(q) }'
    )
    found = debug.compare(here, {"x": np.float32([1, 2, 3, 4])}, against=there, align=align)
    assert found.agrees and [r.value for r in found.rows if r.value == "q"] == []


def test_equal_names_stay_pairs_when_their_values_differ() -> None:
    other = net()
    for name in ("w0", "w1", "w2", "w3", "w4"):
        scaled(other, name, 1.3)
    extra = helper.make_node("Identity", ["t3"], ["t3_copy"])
    other.graph.node.insert(10, extra)  # so that names do not pair all values
    mine = net()
    mine.graph.node.insert(1, helper.make_node("Identity", ["t0"], ["only_here"]))
    found = debug.compare(mine, X, against=other)
    pairs = {r.value for r in found.rows}
    assert {f"{k}{i}" for k in "ma" for i in range(5)} <= pairs and found.first is not None and found.first.values == ["m0"]


# --- layers by their own error ----------------------------------------------------------------------------------------


def quantized(coarse: int, factor: float) -> ModelProto:
    """The net with 8-bit weights and inputs of every MatMul; the weights of one layer have a scale that is too coarse."""
    model = net()
    graph = model.graph
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        if node.op_type == "MatMul":
            i = int(node.output[0][1:])
            tensor = next(t for t in graph.initializer if t.name == f"w{i}")
            weight = numpy_helper.to_array(tensor)
            scale = np.float32(np.abs(weight).max() / 127 * (factor if i == coarse else 1))
            codes = np.clip(np.round(weight / scale), -127, 127).astype(np.int8)
            graph.initializer.remove(tensor)
            graph.initializer.extend([
                numpy_helper.from_array(codes, f"w{i}_q"), numpy_helper.from_array(scale, f"w{i}_s"),
                numpy_helper.from_array(np.float32(4 / 127), f"t{i}_s"), numpy_helper.from_array(np.int8(0), f"z{i}"),
            ])  # fmt: skip
            graph.node.extend([
                helper.make_node("QuantizeLinear", [node.input[0], f"t{i}_s", f"z{i}"], [f"t{i}_q"]),
                helper.make_node("DequantizeLinear", [f"t{i}_q", f"t{i}_s", f"z{i}"], [f"t{i}_d"]),
                helper.make_node("DequantizeLinear", [f"w{i}_q", f"w{i}_s", f"z{i}"], [f"w{i}_d"]),
            ])  # fmt: skip
            node.input[:] = [f"t{i}_d", f"w{i}_d"]
        graph.node.append(node)
    return model


@pytest.mark.parametrize("coarse", range(5))
def test_layers_are_ranked_by_their_own_error(coarse: int, tmp_path: Path) -> None:
    model = quantized(coarse, 20)
    found = debug.compare(model, X, against=net(), local=True)
    assert found.worst_layers(1)[0].value == f"m{coarse}"
    rows = {r.value: r for r in found.rows}
    inputs = {f"t{i}": v for i, v in enumerate(_hidden())}
    for i in range(5):  # the layer alone, in float64, with the inputs of the original
        tensors = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in model.graph.initializer}
        fed = np.clip(np.round(inputs[f"t{i}"] / tensors[f"t{i}_s"]), -128, 127) * tensors[f"t{i}_s"]
        right = inputs[f"t{i}"] @ numpy_helper.to_array(next(t for t in net().graph.initializer if t.name == f"w{i}"))
        error = fed @ (tensors[f"w{i}_q"] * tensors[f"w{i}_s"]) - right
        rms = np.sqrt(np.square(error).sum() / np.square(right).sum())
        assert rows[f"m{i}"].difference.rms == pytest.approx(rms, rel=1e-3)
        assert rows[f"a{i}"].difference.agrees and rows[f"t{i + 1}"].difference.agrees  # they add nothing
    onnx.save(model, tmp_path / "int8.onnx")
    onnx.save(net(), tmp_path / "float.onnx")
    np.savez(tmp_path / "x.npz", **X)
    words = (tmp_path / "int8.onnx", "--against", tmp_path / "float.onnx", "--local", "--inputs", tmp_path / "x.npz")
    told = sonnx("compare", *words)
    assert f"largest error of its own: 'm{coarse}' of MatMul " in told.stdout, told.stdout
    assert json.loads(sonnx("compare", *words, "--json").stdout)["rows"][0]["rms"] is not None


def _hidden() -> list[np.ndarray]:
    """t0 to t4 of the original, in float64."""
    tensors = {t.name: numpy_helper.to_array(t).astype(np.float64) for t in net().graph.initializer}
    found = [X["x"].astype(np.float64)]
    for i in range(4):
        found.append(np.tanh(found[-1] @ tensors[f"w{i}"] + tensors[f"b{i}"]))
    return found
