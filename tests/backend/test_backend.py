"""The public face: what goes in, what comes out, and what is refused before anything runs."""

from __future__ import annotations

import gc
import threading
import tracemalloc
import warnings
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.backend.base import Device, DeviceType

import singa_backend
from singa import sonnx, tensor
from singa_backend import (
    DeviceUnavailable,
    InvalidInput,
    InvalidModel,
    OperatorError,
    SingaBackend,
    SonnxError,
    UnsupportedModel,
    debug,
)
from singa_backend.errors import UnknownKeyword

LINEAR = """
<ir_version: 10, opset_import: ["" : 17]>
net (float[n, 3] x) => (float[n, 2] y)
<float[3, 2] w = {1, 2, 3, 4, 5, 6}, float[2] b = {10, 20}>
{
    p = MatMul(x, w)
    q = Add(p, b)
    y = Relu(q)
}
"""
X = np.arange(6, dtype=np.float32).reshape(2, 3)
W = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


@pytest.fixture
def model() -> onnx.ModelProto:
    return parser.parse_model(LINEAR)


@pytest.fixture
def rep(model: onnx.ModelProto) -> singa_backend.SingaRep:
    return SingaBackend.prepare(model)


# --- in and out


def test_list_dict_and_single_array(rep: singa_backend.SingaRep) -> None:
    expected = X @ W + np.array([10, 20], np.float32)
    for feed in ([X], (X,), {"x": X}, X):
        outputs = rep.run(feed)
        assert isinstance(outputs, tuple) and len(outputs) == 1
        np.testing.assert_array_equal(outputs[0], expected)
        np.testing.assert_array_equal(outputs["y"], expected)


def test_unknown_output_name(rep: singa_backend.SingaRep) -> None:
    with pytest.raises(KeyError, match="must be one of y"):
        rep.run(X)["z"]


@pytest.mark.row("I18")
def test_path_bytes_and_proto(model: onnx.ModelProto, tmp_path: Path) -> None:
    onnx.save(model, tmp_path / "m.onnx")
    for source in (model, model.SerializeToString(), tmp_path / "m.onnx", str(tmp_path / "m.onnx")):
        assert SingaBackend.run_model(source, [X])[0].shape == (2, 2)


def test_what_tools_can_read(rep: singa_backend.SingaRep) -> None:
    assert [str(v) for v in rep.inputs] == ["x: float[n, 3]"]
    assert [(v.name, v.dtype, v.shape) for v in rep.outputs] == [("y", np.dtype(np.float32), ("n", 2))]
    assert [n.op_type for n in rep.nodes] == ["MatMul", "Add", "Relu"]
    assert set(rep.states) == {"w", "b"}


def test_python_numbers_take_the_declared_dtype(rep: singa_backend.SingaRep) -> None:
    outputs = rep.run({"x": [[1, 2, 3]]})
    assert outputs[0].dtype == np.float32 and outputs[0].shape == (1, 2)


def test_numpy_scalars() -> None:
    m = parser.parse_model('<ir_version: 10, opset_import: ["": 17]> g (float x, float y) => (float z) { z = Add(x, y) }')
    z = SingaBackend.run_model(m, [np.float32(1), np.float32(2)])[0]
    assert isinstance(z, np.ndarray) and z.shape == () and z == 3


def test_outputs_share_nothing_with_the_model() -> None:
    m = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (float[2] x) => (float[2] a, float[2] b, float[2] w)'
        "<float[2] w = {1, 2}> { a = Identity(x) \n b = Identity(w) }"
    )
    rep, x = SingaBackend.prepare(m), np.ones(2, np.float32)
    for value in rep.run([x]):
        value += 7
    np.testing.assert_array_equal(x, [1, 1])
    for again in (rep.run([x])["b"], rep.run([x])["w"]):
        np.testing.assert_array_equal(again, [1, 2])


@pytest.mark.parametrize("where", ["constant", "branch"])
def test_strings_that_the_model_holds_are_not_handed_out(where: str) -> None:
    text = 'y = Constant<value = string[1] {"a"}>()'
    if where == "branch":
        text = f"y = If(c) <then_branch = t () => (string[1] y) {{ {text} }}, else_branch = e () => (string[1] y) {{ {text} }}>"
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g (bool c) => (string[1] y) {{ {text} }}')
    rep = SingaBackend.prepare(model)
    rep.run([True])[0][0] = "mine"
    assert rep.run([True])[0].tolist() == ["a"]


def test_initializers_that_are_inputs_may_be_overridden() -> None:
    m = parser.parse_model(LINEAR)
    m.graph.input.append(helper.make_tensor_value_info("b", TensorProto.FLOAT, [2]))
    rep = SingaBackend.prepare(m)
    assert [v.name for v in rep.inputs] == ["x"]
    plain, other = rep.run([X])[0], rep.run({"x": X, "b": np.zeros(2, np.float32)})[0]
    np.testing.assert_array_equal(plain - other, [[10, 20], [10, 20]])


def test_threads_do_not_meet(rep: singa_backend.SingaRep) -> None:
    wrong: list[int] = []

    def work(i: int) -> None:
        x = np.full((2, 3), i, np.float32)
        for _ in range(50):
            if not np.array_equal(rep.run([x])[0], x @ W + np.array([10, 20], np.float32)):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_model_is_freed_with_its_last_reference(model: onnx.ModelProto) -> None:
    rep = SingaBackend.prepare(model)
    rep.run([X])
    gone = weakref.ref(rep)
    gc.disable()
    try:
        del rep
        assert gone() is None
    finally:
        gc.enable()


def test_intermediates_are_freed_at_their_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")  # the import of llvmlite takes memory
    lines = "\n".join(f"v{i + 1} = Relu(v{i})" for i in range(20))
    m = parser.parse_model(f'<ir_version: 10, opset_import: ["": 17]> g (float[n] v0) => (float[n] v20) {{ {lines} }}')
    rep = SingaBackend.prepare(m)
    import tracemalloc

    x = np.ones(1_000_000, np.float32)
    tracemalloc.start()
    rep.run([x])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * x.nbytes


# --- last_layers and aux_output


@pytest.mark.parametrize(("last", "name"), [(-1, "y"), (-2, "q"), (-3, "p"), (2, "y"), (1, "q"), (0, "p")])
def test_last_layers(rep: singa_backend.SingaRep, last: int, name: str) -> None:
    assert rep.run([X], last_layers=last).names == (name,)


@pytest.mark.parametrize("last", [-4, 3, 99])
def test_last_layers_outside(rep: singa_backend.SingaRep, last: int) -> None:
    with pytest.raises(InvalidInput, match="must select 1 to 3 operators"):
        rep.run([X], last_layers=last)


def test_last_layers_do_not_count_constants() -> None:
    m = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (float[2] x) => (float[2] y)'
        "{ a = Abs(x) \n c = Constant<value_float = 2.0>() \n y = Mul(a, c) }"
    )
    assert SingaBackend.prepare(m).run([np.ones(2, np.float32)], last_layers=-2).names == ("a",)


def test_aux_output(rep: singa_backend.SingaRep) -> None:
    outputs = rep.run([X], aux_output=("p", "w"))
    assert outputs.names == ("y", "p", "w")
    np.testing.assert_array_equal(outputs["p"], X @ W)
    with pytest.raises(InvalidInput, match="must name values of the model's main graph, got 'nothing'"):
        rep.run([X], aux_output=("nothing",))


# --- refusals


@pytest.mark.parametrize(
    ("feed", "message"),
    [
        ([], "takes 1 inputs"),
        ([X, X], "takes 1 inputs"),
        ({"xs": X}, "unknown: 'xs'; missing: 'x'; did you mean 'x'"),
        ([X.astype(np.float64)], r"must be an array of float, got one of double"),
        ([X[0]], r"shape \(3,\)"),
        ([X.T], r"shape \(3, 2\)"),
        ([None], "must have a value, got None"),
        ([[X, X]], r"shape \(2, 2, 3\)"),
    ],
)
def test_inputs_are_refused(rep: singa_backend.SingaRep, feed: object, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        rep.run(feed)


def test_the_message_shows_the_cast(rep: singa_backend.SingaRep) -> None:
    with pytest.raises(InvalidInput) as caught:
        rep.run([X.astype(np.float64)])
    assert "x.astype(np.float32)" in str(caught.value)
    m = parser.parse_model('<ir_version: 10, opset_import: ["": 17]> g (bfloat16[2] x) => (bfloat16[2] y) { y = Abs(x) }')
    with pytest.raises(InvalidInput, match=r"ml_dtypes\.bfloat16"):
        SingaBackend.run_model(m, [np.ones(2, np.float32)])
    assert SingaBackend.run_model(m, [np.ones(2, ml_dtypes.bfloat16)])[0].dtype == ml_dtypes.bfloat16


def test_symbolic_sizes_must_agree() -> None:
    m = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (float[n] x, float[n] y) => (float[n] z) { z = Add(x, y) }'
    )
    with pytest.raises(InvalidInput, match="'n' is 2 in input 'x'"):
        SingaBackend.run_model(m, [np.ones(2, np.float32), np.ones(1, np.float32)])


def test_floats_do_not_slip_into_integers() -> None:
    m = parser.parse_model('<ir_version: 10, opset_import: ["": 17]> g (int64[2] x) => (int64[2] y) { y = Abs(x) }')
    with pytest.raises(InvalidInput, match="Python floats"):
        SingaBackend.run_model(m, {"x": [1.5, 2]})
    with pytest.raises(InvalidInput):
        SingaBackend.run_model(m, {"x": [2**70, 2]})


@pytest.mark.parametrize(
    ("type_name", "feed"),
    [("float", ["1.5"]), ("string", [1]), ("string", np.array([None], object)), ("string", np.array([b"\xff"])),
     ("int4", [1.5]), ("int4", [300]), ("bool", [2]), ("int16", [70000])],
)  # fmt: skip
def test_python_values_are_not_bent_to_fit(type_name: str, feed: object) -> None:
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g ({type_name}[n] x) => ({type_name}[n] y) {{ y = Identity(x) }}'
    )
    with pytest.raises(InvalidInput, match="input x"):
        SingaBackend.run_model(model, [feed])


def test_an_array_that_does_not_come_to_the_host(rep: singa_backend.SingaRep) -> None:
    class Elsewhere:
        def __array__(self) -> np.ndarray:
            raise TypeError("it is on a device")

    with pytest.raises(InvalidInput, match="on a device"):
        rep.run([Elsewhere()])


@pytest.mark.parametrize("op", ["Add", "MatMul", "Sum", "Max", "Where"])
def test_operands_of_one_type_are_not_converted(op: str) -> None:
    before = "c, " if op == "Where" else ""
    model = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21]> g (bool[1] c, int64[1] a, float[1] b) => (y) {{ y = {op}({before}a, b) }}'
    )
    with pytest.raises(OperatorError, match="int64 and float") as caught:
        SingaBackend.run_model(model, [np.ones(1, bool), np.ones(1, np.int64), np.ones(1, np.float32)])
    assert caught.value.code == "SX406"


@pytest.mark.parametrize(
    ("signature", "call", "feed", "match"),
    [
        ("seq(float[n]) x", "Relu(x)", [np.ones(2, np.float32)], "a sequence"),
        ("string[n] x", "Add(x, x)", np.array(["a", "b"]), "strings"),
        ("float[n] x", "SequenceLength(x)", np.ones(2, np.float32), "a tensor"),
        ("float[n] x", "Reshape(x, x)", np.array([1.5], np.float32), "floats"),
        ("int64 x", "Dropout(x, x, x)", np.int64(1), "bool"),
    ],
)
def test_operands_of_the_wrong_kind(signature: str, call: str, feed: object, match: str) -> None:
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g ({signature}) => (y) {{ y = {call} }}')
    with pytest.raises(OperatorError, match=match):
        SingaBackend.run_model(model, {"x": feed})


def test_operator_errors_name_everything() -> None:
    m = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 17]> g (float[n] x, float[m] y) => (float[k] z) { z = Add(x, y) }'
    )
    m.graph.node[0].name = "the_sum"
    with pytest.raises(OperatorError) as caught:
        SingaBackend.run_model(m, [np.ones(2, np.float32), np.ones(3, np.float32)])
    e = caught.value
    assert (e.node, e.operator, e.opset, e.version) == ("the_sum", "Add", 17, 14)
    assert e.dtypes == ("float", "float") and e.shapes == ((2,), (3,)) and e.code.startswith("SX4")
    assert e.to_dict()["node"] == "the_sum"


@pytest.mark.parametrize("junk", [b"", b"not an onnx file", b"\xff" * 100, 7, None])
def test_what_is_no_model(junk: object) -> None:
    with pytest.raises(InvalidModel):
        SingaBackend.prepare(junk)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match="No such file"):
        SingaBackend.prepare(tmp_path / "none.onnx")


@pytest.mark.row("I15")
def test_all_unsupported_operators_together() -> None:
    nodes = [helper.make_node(op, ["x"], [op]) for op in ("Frobnicate", "Rlu", "Abs")]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [info("x", 1, [1])], [info("Abs", 1, [1])])
    with pytest.raises(UnsupportedModel) as caught:
        SingaBackend.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    assert [p.operator for p in caught.value.problems] == ["Frobnicate", "Rlu"]
    assert "did you mean Relu" in str(caught.value)


def test_a_newer_opset_is_a_hole_not_a_guess() -> None:
    m = parser.parse_model(LINEAR)
    m.opset_import[0].version = 999
    with pytest.raises(UnsupportedModel, match=r"opset of ai\.onnx must be at most .* got 999"):
        SingaBackend.prepare(m)


def test_options_do_not_vanish(model: onnx.ModelProto) -> None:
    with pytest.raises(UnknownKeyword, match="'devise'; did you mean 'device'") as caught:
        SingaBackend.prepare(model, devise="CUDA")
    assert caught.value.code == "SX364" and isinstance(caught.value, TypeError)
    with pytest.raises(UnknownKeyword, match="'limit'; did you mean 'limits'"):  # not False: the model is compatible
        SingaBackend.is_compatible(model, limit=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SingaBackend.prepare(model, rtol=1e-3, atol=1e-7, init_inputs=None, keep_initializers_as_inputs=True)


@pytest.mark.parametrize(
    ("options", "code"),
    [({"limits": 3}, "SX309"), ({"limits": {"rank": 4}}, "SX309"), ({"cancel": 3}, "SX309"), ({"aux_output": 3}, "SX305"),
     ({"aux_output": [b"p"]}, "SX305"), ({"last_layers": "x"}, "SX304"), ({"limit": 3}, "SX364")],
)  # fmt: skip
def test_options_of_another_kind_are_refused(options: dict[str, Any], code: str, model: onnx.ModelProto) -> None:
    with pytest.raises(InvalidInput) as caught:
        SingaBackend.prepare(model).run([X], **options)
    assert caught.value.code == code


@pytest.mark.parametrize(
    "options", [{"rtol": -1}, {"atol": float("nan")}, {"timeout": 0}, {"timeout": float("inf")}, {"budget": 0}]
)
def test_numbers_out_of_bounds_are_refused(options: dict[str, Any], model: onnx.ModelProto) -> None:
    for call in (debug.compare, debug.bisect):
        with pytest.raises(InvalidInput) as caught:
            call(model, [X], against="sonnx", **options)
        assert caught.value.code == "SX309"


# --- devices


def test_devices(model: onnx.ModelProto) -> None:
    assert SingaBackend.supports_device("CPU")
    assert not SingaBackend.supports_device("TPU")
    assert not SingaBackend.supports_device("CUDA:99")
    assert SingaBackend.prepare(model, Device("CPU")).device.type == "CPU"
    assert Device("CUDA:1").type == DeviceType.CUDA
    for name in ("TPU", "CUDA:99", "CUDA:x", "CPU:3"):
        with pytest.raises(DeviceUnavailable):
            SingaBackend.prepare(model, name)
    with pytest.raises(DeviceUnavailable, match="CUDA:99"):
        SingaBackend.prepare(model, Device("CUDA:99"))


def test_strict_device_gives_numpy(model: onnx.ModelProto) -> None:
    assert type(SingaBackend.prepare(model, "STRICT").run([X])[0]) is np.ndarray


# --- run_node and module functions


@pytest.mark.row("I18")
def test_run_node() -> None:
    node = helper.make_node("Add", ["a", "b"], ["c"])
    assert singa_backend.run_node(node, [X, X])["c"].shape == (2, 3)
    assert singa_backend.run_node(node, {"a": X, "b": X}, opset_version=7)[0].shape == (2, 3)
    assert singa_backend.run_node(node, [1.0, 2.0])[0] == np.float32(3)
    info = [(np.float32, (2, 3))]
    assert singa_backend.run_node(node, [X, X], outputs_info=info)[0].shape == (2, 3)
    with pytest.raises(InvalidInput, match="outputs_info"):
        singa_backend.run_node(node, [X, X], outputs_info=[(np.float64, (2, 3))])
    with pytest.raises(InvalidInput, match="takes 2 inputs"):
        singa_backend.run_node(node, [X])


def test_run_node_holds_outputs_to_their_info() -> None:
    node = helper.make_node("SequenceConstruct", ["x"], ["y"])
    with pytest.raises(InvalidInput, match="got list"):
        SingaBackend.run_node(node, [X], outputs_info=[(np.float32, (2, 3))])


def test_types_that_onnx_lacks_are_refused() -> None:
    with pytest.raises(InvalidInput, match="must have an element type of ONNX, got "):
        SingaBackend.run_node(helper.make_node("Relu", ["x"], ["y"]), [np.ones(2, np.longdouble)])
    swapped = SingaBackend.run_node(helper.make_node("Relu", ["x"], ["y"]), [np.array([-1, 2], ">f4")])[0]
    assert swapped.dtype == np.float32 and swapped.tolist() == [0, 2]


def test_run_node_of_another_domain() -> None:
    node = helper.make_node("Binarizer", ["x"], ["y"], domain="ai.onnx.ml", threshold=0.5)
    np.testing.assert_array_equal(
        singa_backend.run_node(node, [np.array([0.2, 0.9], np.float32)])[0], np.array([0, 1], np.float32)
    )


def test_module_functions_and_frontend(model: onnx.ModelProto, tmp_path: Path) -> None:
    assert singa_backend.prepare(model).run([X])[0].shape == (2, 2)
    assert singa_backend.run_model(model, [X])[0].shape == (2, 2)
    assert singa_backend.supports_device("CPU") and singa_backend.is_compatible(model)
    assert issubclass(sonnx.SingaBackend, SingaBackend)
    sonnx.save(model, tmp_path / "m.onnx")
    assert sonnx.prepare(sonnx.load(tmp_path / "m.onnx")).run([X])[0].shape == (2, 2)


def test_is_compatible_says_no() -> None:
    m = parser.parse_model(LINEAR)
    m.graph.node[0].op_type = "Frobnicate"
    assert not SingaBackend.is_compatible(m)


# --- external data


def _external(tmp_path: Path, location: str, offset: int = 0, length: int | None = None) -> Path:
    m = parser.parse_model(LINEAR)
    w = next(t for t in m.graph.initializer if t.name == "w")
    data = numpy_helper.to_array(w).tobytes()
    w.ClearField("float_data")
    w.ClearField("raw_data")
    w.data_location = TensorProto.EXTERNAL
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(len(data) if length is None else length))):
        w.external_data.add(key=key, value=value)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(b"\0" * 8 + data)
    (tmp_path / "secret.bin").write_bytes(b"\0" * 8 + data)
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "hard.bin").hardlink_to(tmp_path / "secret.bin")
    (folder / "sub").symlink_to(tmp_path)
    (folder / "m.onnx").write_bytes(m.SerializeToString())
    return folder / "m.onnx"


def test_external_data(tmp_path: Path) -> None:
    path = _external(tmp_path, "w.bin", 8)
    assert SingaBackend.run_model(path, [X])[0].shape == (2, 2)
    with pytest.raises(InvalidModel, match="without its folder"):
        SingaBackend.prepare(path.read_bytes())


@pytest.mark.parametrize(
    ("location", "offset", "length"),
    [
        ("../secret.bin", 8, None), ("/etc/passwd", 0, None), ("link.bin", 8, None), ("hard.bin", 8, None),
        ("sub/secret.bin", 8, None), ("none.bin", 0, None), ("", 0, None), ("w.bin", 16, None), ("w.bin", -8, None),
        ("w.bin", 8, 10**15), ("./w.bin", 8, None), ("w.bin/../../secret.bin", 8, None),
    ],
)  # fmt: skip
def test_external_data_stay_in_the_folder(tmp_path: Path, location: str, offset: int, length: int | None) -> None:
    with pytest.raises(InvalidModel) as caught:
        SingaBackend.prepare(_external(tmp_path, location, offset, length))
    assert caught.value.code == "SX105"


@pytest.mark.parametrize("where", ["initializers", "shifted", "small", "attributes", "subgraphs", "sparse"])
def test_tensors_that_share_bytes_of_a_file_share_memory(tmp_path: Path, where: str) -> None:
    """Many tensors over one file of external data cost the memory of the file, not of their sum."""
    step = 256 if where == "shifted" else 0
    elements, count = (1 << 18) - 1 if where == "small" else 1 << 20, 60
    data = np.arange(elements + step * count, dtype=np.float32)
    (tmp_path / "w.bin").write_bytes(data.tobytes())

    def shared(i: int) -> TensorProto:
        made = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[elements], data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "w.bin"), ("offset", str(4 * step * i)), ("length", str(4 * elements))):
            made.external_data.add(key=key, value=value)
        return made

    float_ = helper.make_tensor_value_info
    graph = onnx.GraphProto(name="g", output=[float_("y", TensorProto.FLOAT, None)])
    constants = [helper.make_node("Constant", [], [f"w{i}"], value=shared(i)) for i in range(count)]
    if where == "attributes":
        graph.node.extend(constants)
    elif where == "subgraphs":
        graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
        for i, node in enumerate(constants):
            body = helper.make_graph([node], "body", [], [float_(f"w{i}", TensorProto.FLOAT, None)])
            graph.node.append(helper.make_node("If", ["yes"], [f"v{i}"], then_branch=body, else_branch=body))
    elif where == "sparse":
        indices = numpy_helper.from_array(np.zeros(1, np.int64))
        for i in range(count):
            values = shared(i)
            values.dims[0], values.external_data[2].value = 1, "4"
            graph.sparse_initializer.add(values=values, indices=indices, dims=[2])
    else:
        graph.initializer.extend(map(shared, range(count)))
    last = f"v{count - 1}" if where == "subgraphs" else f"w{count - 1}"
    graph.node.append(helper.make_node("Identity", [last], ["y"]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())

    tracemalloc.start()
    try:
        rep = SingaBackend.prepare(tmp_path / "m.onnx")
        assert tracemalloc.get_traced_memory()[1] < 3 * data.nbytes
    finally:
        tracemalloc.stop()
    first = 1 if where == "sparse" else elements
    np.testing.assert_array_equal(rep.run([])[0][:first], data[step * (count - 1) :][:first])


def test_tensors_that_share_bytes_of_a_file_are_trained_apart(tmp_path: Path) -> None:
    elements = 1 << 18
    (tmp_path / "w.bin").write_bytes(np.ones(elements, np.float32).tobytes())
    graph = onnx.GraphProto(name="g", output=[helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    for i in range(3):
        made = graph.initializer.add(name=f"w{i}", data_type=TensorProto.FLOAT, dims=[elements])
        made.data_location = TensorProto.EXTERNAL
        made.external_data.add(key="location", value="w.bin")
    graph.node.append(helper.make_node("Sum", ["w0", "w1", "w2"], ["y"]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    params = sonnx.SONNXModel(tmp_path / "m.onnx").get_params()
    for i in (0, 1):
        params[f"w{i}"].set_value(5.0 + i)
    assert [float(tensor.to_numpy(params[f"w{i}"])[0]) for i in range(3)] == [5, 6, 1]
    assert np.fromfile(tmp_path / "w.bin", np.float32).max() == 1


def test_errors_are_one_family() -> None:
    for error in (InvalidModel, UnsupportedModel, InvalidInput, OperatorError, DeviceUnavailable):
        assert issubclass(error, SonnxError)


def test_a_column_and_one_sample_are_told_the_axis_that_they_lack() -> None:
    made = parser.parse_model("""<ir_version: 10, opset_import: ["": 17]> g (string[n, 1] s, float[n, 3] x)
        => (string[n, 1] t, float[n, 3] y) {
        t = Identity (s) y = Identity (x) }""")
    rep = SingaBackend.prepare(made)
    texts, x = np.array([["a"], ["b"]], object), np.zeros((2, 3), np.float32)
    for wrong, hint in (({"s": texts[:, 0], "x": x}, "x[..., None]"), ({"s": texts, "x": x[0]}, "x[None]"),
                        ({"s": np.array([["a"], [None]], object), "x": x}, "replace missing texts"),
                        ({"s": np.array([["a"], [np.nan]], object), "x": x}, "replace missing texts"),
                        ({"s": np.array([["a"], [1]], object), "x": x}, None)):  # fmt: skip
        with pytest.raises(InvalidInput) as caught:
            rep.run(wrong)
        assert (hint or "") in (caught.value.hint or "") and bool(caught.value.hint) == (hint is not None)
