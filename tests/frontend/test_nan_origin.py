"""NaN and infinity have an origin: the first node that makes one, or the input or constant that held one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from singa import autograd, sonnx, tensor
from singa.cli import main
from singa.model import Model
from singa_backend import InvalidInput, NonFinite, OperatorError, SingaBackend, SonnxError, debug, dtypes
from singa_backend.comparison import finite
from singa_backend.inspection import check
from singa_backend.runtime.origins import Origin

HEAD = '<ir_version: 10, opset_import: ["": 21, "own": 1]>'
NAN, INF = np.float32("nan"), np.float32("inf")


def build(text: str, functions: str = "", **weights: Any) -> ModelProto:
    model = parser.parse_model(HEAD + text + functions)
    for name, value in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.float32), name))
    return model


def f32(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def origin(model: ModelProto, *inputs: Any) -> Origin | None:
    """The origin that a validated run names; its outputs are those of a run without validation."""
    rep = SingaBackend.prepare(model)
    plain = rep.run(list(inputs))
    try:
        outputs, found = rep.run(list(inputs), validate=True), None
    except NonFinite as error:
        outputs, found = error.outputs, error.origin
    assert finite.counts(list(plain)) == finite.counts(list(outputs))
    return found


def sonnx_command(*args: Any) -> Result:
    return CliRunner().invoke(main, [str(a) for a in args])


# --- drawn graphs against an independent loop

UNARY = ("Log", "Exp", "Sqrt", "Reciprocal", "Neg", "Tanh", "Relu", "Sin", "Atanh")
BINARY = ("Add", "Sub", "Mul", "Div", "Pow", "Min", "Where", "MatMul", "Softmax", "CumSum", "Concat")
GENTLE = ("Log", "Neg", "Tanh", "Exp", "Softplus", *("Add", "Sub", "Mul", "Max") * 3)


def drawn(seed: int, mask: bool = False) -> tuple[ModelProto, np.ndarray]:
    """A graph of up to 14 nodes over 3x3 values; the names of the nodes are shuffled."""
    rng = np.random.default_rng(seed)
    names, nodes = ["x", "m"], []
    for i in range(int(rng.integers(3, 7 if mask else 15))):
        op = str(rng.choice(GENTLE if mask else UNARY + BINARY))
        a, b = (str(n) for n in rng.choice(names, 2))
        made = {"Where": ["c", a, b], "Softmax": [a], "CumSum": [a, "begin"], "Concat": [a, b]}.get(
            op, [a] if op in (*UNARY, *GENTLE[:5]) else [a, b]
        )
        if op == "Concat":
            nodes.append(helper.make_node("Concat", made, [f"t{i}"], f"n{97 * i % 31}c", axis=0))
            nodes.append(helper.make_node("Slice", [f"t{i}", "begin", "end"], [f"v{i}"], f"n{97 * i % 31}"))
        else:
            nodes.append(helper.make_node(op, made, [f"v{i}"], f"n{97 * i % 31}"))
        names.append(f"v{i}")
    held = rng.standard_normal((3, 3)).astype(np.float32)
    if mask:
        held[rng.random((3, 3)) < 0.4] = -INF
    weights = [numpy_helper.from_array(a, n) for n, a in (
        ("m", held), ("c", rng.random((3, 3)) < 0.5), ("begin", np.array([1])), ("end", np.array([4])),
    )]  # fmt: skip
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "g", [info("x", TensorProto.FLOAT, [3, 3])], [info(names[-1], TensorProto.FLOAT, None)], weights
    )
    x = (rng.standard_normal((3, 3)) * (1 if mask else rng.choice([1, 1, 100]))).astype(np.float32)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), x


def values_of(model: ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    made = [o for n in model.graph.node for o in n.output]
    values = SingaBackend.prepare(model).run([x], aux_output=made).to_dict()
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer} | {"x": x} | values


def test_the_named_node_is_the_first_whose_inputs_are_finite_and_its_output_is_not() -> None:
    found = 0
    for seed in range(80):
        model, x = drawn(seed)
        values = values_of(model, x)
        first = next(
            (n.name for n in model.graph.node
             if not np.isfinite(values[n.output[0]]).all() and all(np.isfinite(values[i]).all() for i in n.input)), None
        )  # fmt: skip
        told = origin(model, x)
        assert (told.name if told else None) == first, seed
        found += first is not None
    assert 25 <= found <= 75


def test_with_a_mask_the_named_node_is_the_first_that_makes_one_at_a_place() -> None:
    found = []
    for seed in range(60):
        model, x = drawn(1000 + seed, mask=True)
        values = values_of(model, x)
        first, of_infinity = [], []
        for n in model.graph.node:
            y, read = values[n.output[0]], [values[i] for i in n.input]
            if (np.isnan(y) & ~np.any([np.isnan(v) for v in read], 0)).any():
                of_infinity.append(n.name)
            if (~np.isfinite(y) & np.all([np.isfinite(v) for v in read], 0)).any():
                first.append(n.name)
        if not first and np.isnan(values[model.graph.output[0].name]).any():
            first = of_infinity
        told = origin(model, x)
        assert (told.name if told else None) == (first[0] if first else None), seed
        assert told is None or told.kind == "node"
        found.append("none" if told is None else "infinity" if told.of_infinity else "node")
    assert min(counts := [found.count(k) for k in ("none", "infinity", "node")]) >= 3, counts


# --- the values that did it


@pytest.mark.parametrize(("text", "inputs", "cause"), [
    ("y = Log(x)", [[1, -1.5, 2]], "Log of -1.5 at [1]"),
    ("y = Exp(x)", [[1000]], "Exp of 1000 at [0]"),
    ("y = Div(x, z)", [[1, 2], [0, 1]], "Div 1 / 0 at [0]"),
    ("y = Div(x, z)", [[[1, 2], [3, 0]], [1, 0]], "Div 2 / 0 at [0, 1], Div 0 / 0 at [1, 1]"),
    ("y = Sqrt(x)", [[-float(i) for i in range(1, 10)]], "Sqrt of -4 at [3], and 5 more places"),
    ("y = MatMul(x, z)", [[[1e30]], [[1e30]]], "MatMul of 'x' float[1, 1] [1e+30], 'z' float[1, 1] [1e+30], first at [0, 0]"),
    ("y = Softmax(x)", [[-np.inf, -np.inf]], "Softmax of 'x' float[2] [-inf, -inf], first at [0]"),
    ("y = ReduceMean<keepdims=0>(x)", [[]], "ReduceMean of 'x' float[0] []"),
])  # fmt: skip
def test_the_values_are_named(text: str, inputs: list[Any], cause: str) -> None:
    arrays = [f32(*i) for i in inputs]
    args = "float x, float z" if len(arrays) == 2 else "float x"
    model = build(f"g ({args}) => (float y) {{ {text} }}")
    for v in (*model.graph.input, *model.graph.output):
        v.type.tensor_type.ClearField("shape")
    told = origin(model, *arrays)
    assert told is not None and cause in str(told) and told.kind == "node"


def test_the_error_has_code_place_outputs_and_data() -> None:
    rep = SingaBackend.prepare(build("g (float[n] x) => (float[n] y, float[n] z) { z = Neg(x) y = Log(z) }"))
    with pytest.raises(OperatorError) as caught:
        rep.run([f32(1, -2)], validate=True)
    error = caught.value
    assert isinstance(error, NonFinite) and (error.code, error.operator, error.version) == ("SX409", "Log", 13)
    assert error.dtypes == ("float",) and error.shapes == ((2,),)
    assert error.outputs["z"].tolist() == [-1, 2] and np.isnan(error.outputs["y"][0])
    assert json.loads(json.dumps(error.origin.to_dict()))["causes"] == ["Log of -1 at [0]"]


def test_a_node_that_fails_later_still_names_the_origin() -> None:
    text = "g (float[n] x) => (float[n] y) { a = Log(x) b = Cast<to=7>(a) y = Gather(x, b) }"
    with pytest.raises(SonnxError, match="before it, Log 'Log_0' makes NaN in 'a': Log of -1"):
        SingaBackend.prepare(build(text)).run([f32(-1)], validate=True)


def test_a_value_that_the_model_removes_is_named_and_the_outputs_are_said_to_be_finite() -> None:
    rep = SingaBackend.prepare(build("g (float[n] x) => (float[n] y) { a = Div(one, x) b = IsInf(a) y = Where(b, x, a) }", one=1))
    with pytest.raises(NonFinite, match="all outputs are finite") as caught:
        rep.run([f32(0, 1)], validate=True)
    assert caught.value.node == "Div_0"


# --- nested graphs


BODY = "b (int64 i, bool go, float s) => (bool k, float t) { k = Identity(go) d = Sub(s, one) t = Log(d) }"
NESTED = {
    "if": (
        "g (float x) => (float y) { c = Less(x, one) y = If<then_branch = a () => (float p) { p = Log(x) },"
        " else_branch = b () => (float q) { q = Neg(x) }>(c) }",
        -1, ("If 'If_1'",), "Log",
    ),
    "loop": (f"g (float x) => (float y) {{ y = Loop<body = {BODY}>(n, , x) }}", 30, ("Loop 'Loop_0' (iteration 2)",), "Log"),
    "scan": (
        "g (float x) => (float y, float[3] z) { y, z = Scan<num_scan_inputs = 1,"
        " body = b (float s, float e) => (float t, float u) { t = Add(s, one) u = Div(t, e) }>(x, xs) }",
        1, ("Scan 'Scan_0' (iteration 1)",), "Div",
    ),
    "function": ("g (float x) => (float y) { a = Exp(x) y = own.Outer(a) }", -1, ("Outer 'Outer_1'", "Inner 'Inner_1'"), "Log"),
}  # fmt: skip
FUNCTIONS = (
    '<domain: "own", opset_import: ["": 21, "own": 1]> Outer (u) => (r) { t = Neg(u) r = own.Inner(t) }'
    '<domain: "own", opset_import: ["": 21]> Inner (u) => (r) { a = Log(u) b = Constant<value = float {2}>() z = Mul(u, b)'
    " c = Constant<value = float {0}>() l = Less(z, c) r = Where(l, z, a) }"
)


@pytest.mark.parametrize("kind", NESTED)
def test_the_path_and_the_iteration_are_named(kind: str) -> None:
    text, x, path, operator = NESTED[kind]
    model = build(text, FUNCTIONS if kind == "function" else "", one=1, xs=[1, 0, 2])
    if kind == "loop":
        model.graph.initializer.append(numpy_helper.from_array(np.array(5, np.int64), "n"))
    told = origin(model, np.float32(x))
    assert told is not None and (told.path, told.operator) == (path, operator)
    assert "".join(f" in {step}" for step in reversed(path)) in str(told)


def test_a_body_that_runs_only_for_the_types_of_its_outputs_is_not_validated() -> None:
    text = (
        "g (float[n] x) => (float[n] y, float[m] z) { y, z = Loop<body = b (int64 i, bool go, float[n] s) =>"
        " (bool k, float[n] t, r) { k = Identity(go) t = Identity(s) r = Log(s) }>(zero, , x) }"
    )
    model = build(text.replace(", r)", ", float r)"))
    model.graph.node[0].attribute[0].g.output[2].type.Clear()
    model.graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), "zero"))
    assert origin(model, f32(-1)) is None


# --- inputs and constants


def test_an_input_or_initializer_with_nan_is_the_origin() -> None:
    model = build("g (float[n] x) => (float[n] y) { a = Neg(x) y = Mul(a, w) }", w=[1, 2])
    assert (told := origin(model, f32(1, NAN))) and (told.kind, told.name) == ("input", "x") and "NaN at [1]" in str(told)
    model = build("g (float[n] x) => (float[n] y) { a = Neg(x) y = Mul(a, w) }", w=[1, NAN])
    assert (told := origin(model, f32(1, 2))) and (told.kind, told.name) == ("initializer", "w")
    model.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, [2]))
    assert origin(model, f32(1, 2)) is not None
    with pytest.raises(NonFinite, match="the input 'w' holds NaN"):
        SingaBackend.prepare(model).run({"x": f32(1, 2), "w": f32(NAN, 1)}, validate=True)
    SingaBackend.prepare(model).run({"x": f32(1, 2), "w": f32(1, 1)}, validate=True)


def test_nan_that_comes_through_a_body_or_a_sequence_is_of_the_input() -> None:
    branch = "If<then_branch = a () => (float p) { p = Identity(w) }, else_branch = b () => (float q) { q = Neg(w) }>"
    told = origin(build(f"g (bool c) => (float y) {{ v = {branch}(c) y = Neg(v) }}", w=NAN), np.bool_(True))
    assert told is not None and (told.kind, told.name) == ("initializer", "w")
    model = build("g (seq(float[n]) s) => (float[m] y) { y = ConcatFromSequence<axis = 0>(s) }")
    told = origin(model, [f32(1), f32(2, NAN)])
    assert told is not None and (told.kind, told.name) == ("input", "s") and "NaN at [1][1]" in str(told)
    model = build(
        "g (seq(float[n]) s) => (seq(float[n]) y) { y = SequenceMap<body = b (float[n] e) => (float[n] r) { r = Log(e) }>(s) }"
    )
    told = origin(model, [f32(1), f32(2, 0)])
    assert told is not None and told.path == ("SequenceMap 'SequenceMap_0' (iteration 1)",)


def test_nan_that_no_operator_passes_on_is_not_an_origin() -> None:
    model = build("g (float[n] x) => (float[n] y) { m = IsNaN(x) l = Not(m) y = Cast<to = 1>(l) }")
    assert origin(model, f32(NAN, 1)) is None


# --- no false alarm

QUIET = {
    "initializer": ("a = Add(x, m) y = Softmax(a)", {"m": [[0, -np.inf], [0, 0]]}),
    "constant": ("m = Constant<value = float[2] {0, -inf}>() a = Add(x, m) y = Softmax(a)", {}),
    "attribute": ("m = Constant<value_float = -inf>() a = Max(x, m) y = Neg(a)", {}),
    "fill": ("s = Shape(x) m = ConstantOfShape<value = float[1] {-inf}>(s) l = Less(x, m) y = Where(l, m, x)", {}),
    "where": ("c = Less(x, m) a = Where(c, x, low) y = Softmax(a)", {"m": [[0, 1], [1, 1]], "low": -np.inf}),
    "clip": ("y = Clip(x, low, high)", {"low": -np.inf, "high": np.inf}),
}  # fmt: skip


@pytest.mark.parametrize("kind", QUIET)
def test_infinities_that_are_meant_are_not_origins(kind: str) -> None:
    text, weights = QUIET[kind]
    model = build(f"g (float[2, 2] x) => (float[2, 2] y) {{ {text} }}", **weights)
    assert origin(model, f32([0.5, -0.5], [-2, -3])) is None


def test_a_softmax_of_a_masked_row_whose_nan_is_removed_is_not_an_origin() -> None:
    text = "a = Add(x, m) s = Softmax(a) n = IsNaN(s) y = Where(n, zero, s)"
    model = build(f"g (float[2] x) => (float[2] y) {{ {text} }}", m=[-INF, -INF], zero=0)
    x = f32(1, 2)
    assert origin(model, x) is None
    assert debug.compare(model, {"x": x}, against="sonnx").nonfinite is None
    model = build(f"g (float[2] x) => (float[2] y, float[2] z) {{ {text} z = Log(x) }}", m=[-INF, -INF], zero=0)
    for told in (origin(model, f32(-1, 2)), debug.compare(model, {"x": f32(-1, 2)}, against="sonnx").nonfinite):
        assert told is not None and told.operator == "Log"
    model = build("g (float[2] x) => (float[2] y) { a = Add(x, m) s = Softmax(a) y = Neg(s) }", m=[-INF, -INF])
    for told in (origin(model, x), debug.compare(model, {"x": x}, against="sonnx").nonfinite):
        assert told is not None and told.operator == "Softmax" and told.of_infinity


def test_attention_with_a_causal_mask_is_not_an_origin() -> None:
    model = build(
        "g (float[1,1,3,4] q) => (float[1,1,3,4] y, float[1,1,3,3] s)"
        " { y, _, _, s = Attention<is_causal = 1, qk_matmul_output_mode = 2>(q, q, q) }"
    )
    model.opset_import[0].version = 23
    for node in model.graph.node:
        node.output[:] = ["y", "", "", "s"]
    q = np.random.default_rng(0).standard_normal((1, 1, 3, 4)).astype(np.float32)
    assert np.isinf(SingaBackend.prepare(model).run([q])["s"]).any()
    assert origin(model, q) is None
    assert origin(model, q * INF) is not None


# --- dtypes


@pytest.mark.parametrize("dtype", sorted(dtypes.FLOATS, key=str), ids=str)
def test_every_float_dtype(dtype: np.dtype[Any]) -> None:
    with np.errstate(all="ignore"):
        x = np.array([1.0, np.nan, np.inf]).astype(dtype)
        wide = x.astype(np.float64)
    assert finite.counts([x, {"k": x}, None]) == (2 * int(np.isnan(wide).sum()), 2 * int(np.isinf(wide).sum()))
    if ml_dtypes.finfo(dtype).bits > 4 and np.isnan(wide).any() and wide[0] == 1:
        cast = f"Cast<to = {dtypes.onnx_code(dtype)}, saturate = 0>(x)"
        model = build(f"g (float[2] x) => (float[2] y) {{ y = {cast} }}")
        model.opset_import[0].version = 25
        model.graph.output[0].type.tensor_type.elem_type = dtypes.onnx_code(dtype)
        told = origin(model, f32(1, NAN))
        assert told is not None and told.kind == "input"


def test_complex_values() -> None:
    assert finite.counts(np.array([1, complex(0, np.nan), complex(np.inf, 0)])) == (1, 1)
    model = build("g (float[1,2,1] x) => (float[1,2,2] y) { a = Mul(x, x) y = DFT(a) }")
    told = origin(model, f32([[1e30], [1]]))
    assert told is not None and told.operator == "Mul"


# --- commands

LOG = "g (float[n] x) => (float[n] y) { a = Neg(x) y = Log(a) }"


@pytest.fixture
def files(tmp_path: Path) -> Path:
    onnx.save(build(LOG), tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=f32(1, -2))
    data = tmp_path / "data"
    data.mkdir()
    (data / "input_0.pb").write_bytes(numpy_helper.from_array(f32(1, -2), "x").SerializeToString())
    (data / "output_0.pb").write_bytes(numpy_helper.from_array(f32(NAN, np.log(2)), "y").SerializeToString())
    return tmp_path


def test_run_validate_shows_the_outputs_and_exits_with_1(files: Path) -> None:
    found = sonnx_command("run", files / "m.onnx", "--inputs", files / "x.npz", "--validate", "-o", files / "y.npz")
    assert found.exit_code == 1 and "float[2]" in found.output and "Log of -1 at [0]" in found.output
    assert np.isnan(np.load(files / "y.npz")["y"][0])
    found = sonnx_command("run", files / "m.onnx", "--inputs", files / "x.npz", "--validate", "--json")
    told = json.loads(found.output)
    assert found.exit_code == 1 and told["nonfinite"]["name"] == "Log_1" and told["outputs"][0]["name"] == "y"
    np.savez(files / "x.npz", x=f32(-1, -2))
    found = sonnx_command("run", files / "m.onnx", "--inputs", files / "x.npz", "--validate")
    assert found.exit_code == 0 and "no node makes NaN or infinity" in found.output


def test_run_with_data_tells_that_both_sides_hold_nan(files: Path) -> None:
    found = sonnx_command("run", files / "m.onnx", "--data", files / "data")
    assert found.exit_code == 0 and "equal to the expected outputs" in found.output
    assert "NaN in the outputs and in the expected outputs: 1 value" in found.output and "Log of -1 at [0]" in found.output


def test_compare_tells_that_both_sides_hold_nan(files: Path) -> None:
    args = ("compare", files / "m.onnx", "--against", "sonnx", "--inputs", files / "x.npz")
    found = sonnx_command(*args)
    assert found.exit_code == 0 and "NaN on both sides: 'y'" in found.output and "Log of -1 at [0]" in found.output
    told = json.loads(sonnx_command(*args, "--json").output)
    assert told["both_nan"] == ["y"] and told["nonfinite"]["operator"] == "Log" and told["agrees"]


def test_compare_names_inputs_weights_and_nested_nodes_and_no_masks() -> None:
    def told(model: ModelProto, **inputs: Any) -> Origin | None:
        return debug.compare(model, inputs, against="sonnx").nonfinite

    model = build("g (float[n] x) => (float[n] y) { a = Neg(x) b = Mul(a, w) y = Relu(b) }", w=[1, NAN])
    found = told(model, x=f32(1, 2))
    assert found is not None and (found.kind, found.name) == ("initializer", "w")
    found = told(model, x=f32(NAN, 2))
    assert found is not None and (found.kind, found.name) == ("input", "x")
    text, weights = QUIET["initializer"]
    assert told(build(f"g (float[2, 2] x) => (float[2, 2] y) {{ {text} }}", **weights), x=np.ones((2, 2), np.float32)) is None
    text, x, path, _ = NESTED["if"]
    found = told(build(text, one=1), x=np.float32(x))
    assert found is not None and found.path == path


def test_check_names_initializers_and_constants(tmp_path: Path) -> None:
    model = build(
        "g (float[2] x) => (float[2] y) { c = Constant<value_float = nan>() a = Add(x, m) b = Add(a, w) y = Mul(b, c) }",
        m=[0, -np.inf], w=[NAN, 1],
    )  # fmt: skip
    onnx.save(model, tmp_path / "m.onnx")
    report = check(tmp_path / "m.onnx")
    assert report.good and report.nonfinite == (
        "the initializer 'w' holds 1 NaN (2 in all)",
        "the attribute 'value_float' of Constant 'Constant_0' holds 1 NaN (1 in all)",
        "the initializer 'm' holds 1 infinite value (2 in all)",
    )
    found = sonnx_command("check", tmp_path / "m.onnx")
    assert found.exit_code == 0 and "initializer 'w' holds 1 NaN" in found.output
    assert len(json.loads(sonnx_command("check", tmp_path / "m.onnx", "--json").output)["nonfinite"]) == 3


class Logs(Model):
    def forward(self, x: Any) -> Any:
        return autograd.log(x)


def test_export_and_check_tells_nan_in_both() -> None:
    x = tensor.from_numpy(f32(1, 2, 3, 4))
    _, found = sonnx.export_and_check(Logs(), [x], engines=("sonnx",), seeds=(0,))
    assert found.comparisons[0].both_nan > 0 and found.nonfinite is not None and found.nonfinite.operator == "Log"
    assert "NaN in both: " in str(found) and "Log of -" in str(found)
    _, found = sonnx.export_and_check(Logs(), [x], engines=("sonnx",), seeds=(0,), input_range=(1, 2))
    assert found.nonfinite is None and "NaN" not in str(found)


def test_a_run_on_tensors_refuses_validate() -> None:
    rep = sonnx.prepare(build(LOG))
    with pytest.raises(InvalidInput, match="validate"):
        rep.run([tensor.from_numpy(f32(1))], validate=True)
    with pytest.raises(NonFinite):
        rep.run([f32(1)], validate=True)


def test_names_are_rendered() -> None:
    model = build(LOG)
    model.graph.node[1].name = "\x1b[2J" + "n" * 5000
    told = origin(model, f32(1))
    assert told is not None and "\x1b" not in str(told) and len(str(told)) < 1000


def test_without_validate_nothing_observes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("singa_backend.runtime.executor.ObservedVisitor", None)
    assert np.isnan(SingaBackend.prepare(build(LOG)).run([f32(1)])[0])
