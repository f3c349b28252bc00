"""`sonnx.from_onnx` and what the importers share, without a framework; each importer has further tests of its own."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from singa import autograd, opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa._importers._cleaning import rename, separate
from singa._importers._common import difference, leaves, name_values, open_sizes, outputs, rebuilt
from singa_backend.errors import InvalidInput, InvalidModel, MissingDependency, UnsupportedModel
from singa_backend.proto.messages import names

F = np.float32
HEAD = '<ir_version: 8, opset_import: ["": 18]>'


def model(text: str, **states: Any) -> ModelProto:
    """A model out of ONNX's text form; states: its initializers."""
    made = parser.parse_model(f"{HEAD} g {text}")
    for name, value in states.items():
        made.graph.initializer.append(numpy_helper.from_array(np.asarray(value), name))
    return made


def ours(found: Any, *inputs: Any) -> list[Any]:
    return [y.data.tolist() for y in found.forward(*(Tensor(data=np.asarray(x), requires_grad=False) for x in inputs))]


MIXED = model("(float[n] x, int64[n] i, bool[n] c) => (float[n] y, int64[n] z) "
              "{ p = Mul(x, w) y = Where(c, p, x) z = Add(i, k) }",
              w=F([2, 3]), k=np.int64(1))  # fmt: skip
FEEDS = (F([1, 10]), np.array([5, 6]), np.array([True, False]))


# --- from_onnx in all forms


@pytest.mark.row("I1")
@pytest.mark.parametrize("form", ["model", "bytes", "path", "string"])
def test_a_model_in_every_form(form: str, tmp_path: Path) -> None:
    onnx.save(MIXED, tmp_path / "m.onnx")
    source = {"model": MIXED, "bytes": MIXED.SerializeToString(), "path": tmp_path / "m.onnx", "string": str(tmp_path / "m.onnx")}
    found = sonnx.from_onnx(source[form])
    assert isinstance(found, sonnx.SONNXModel) and found.onnx_model == MIXED
    assert not found.training and not tape.training
    assert ours(found, *FEEDS) == [[2.0, 10.0], [6, 7]]


@pytest.mark.parametrize("name", ["CPU", "STRICT"])
def test_results_that_are_written_to_are_no_parameters_constants_or_inputs(name: str) -> None:
    text = """(float[2] x) => (float[2] y, float[2] a, int64[2] b, float[2] c, int64[2] d) {
        y = Add(x, w) a = Identity(w) b = Identity(k) c = Identity(x) d = Constant<value_ints = [5, 6]>() }"""
    found = sonnx.SONNXModel(model(text, w=F([1, 2]), k=np.int64([3, 4])), name)
    found.eval()
    x = Tensor(data=F([1, 1]), device=name)
    for _ in range(2):
        results = found.forward(x)
        assert [y.numpy().tolist() for y in results] == [[2, 3], [1, 2], [3, 4], [1, 1], [5, 6]]
        for y in results:
            y.copy_from_numpy(np.full(2, 9, y.numpy().dtype))


@pytest.mark.parametrize("where", ["function", "sparse"])
def test_data_in_other_files_wherever_they_are(where: str, tmp_path: Path) -> None:
    """Those of a function's constant, and of a sparse initializer, are read next to the file as those of any other tensor are."""
    values = numpy_helper.from_array(F([2, 3]), "w")
    (tmp_path / "w.bin").write_bytes(values.raw_data)
    values.ClearField("raw_data")
    values.data_location = TensorProto.EXTERNAL
    values.external_data.add(key="location", value="w.bin")
    if where == "function":
        made = parser.parse_model(
            '<ir_version: 8, opset_import: ["": 18, "own": 1]> g (float[2] x) => (float[2] y) { y = own.twice(x) }'
        )
        nodes = [helper.make_node("Constant", [], ["w"], value=values), helper.make_node("Mul", ["x", "w"], ["y"])]
        made.functions.append(helper.make_function("own", "twice", ["x"], ["y"], nodes, [helper.make_opsetid("", 18)]))
    else:
        made = model("(float[2] x) => (float[2] y) { y = Mul(x, w) }")
        places = numpy_helper.from_array(np.array([0, 1]), "places")
        made.graph.sparse_initializer.append(helper.make_sparse_tensor(values, places, [2]))
    onnx.save(made, tmp_path / "m.onnx")
    assert ours(sonnx.from_onnx(tmp_path / "m.onnx"), F([1, 10])) == [[2.0, 30.0]]


def test_what_is_no_model() -> None:
    for source in (b"no", "no/such/file.onnx", 7):
        with pytest.raises(InvalidModel):
            sonnx.from_onnx(source)


@pytest.mark.parametrize("mended", [False, True])
def test_data_beside_the_file(mended: bool, tmp_path: Path) -> None:
    text = "(float[1, 3, 2] x) => (float[1, 3, 2] y) { y = BatchNormalization(x, %s, b, m, v) }" % ("" if mended else "s")
    proto = model(text, b=F([1, 2, 3]), m=F([0, 0, 0]), v=F([1, 1, 1]), s=F([1, 1, 1]))
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    found = sonnx.from_onnx(tmp_path / "m.onnx")
    np.testing.assert_allclose(ours(found, np.zeros((1, 3, 2), F))[0], [[[1, 1], [2, 2], [3, 3]]])
    assert (found.get_params()["b"].data == [1, 2, 3]).all()


@pytest.mark.parametrize("mended", [False, True])
def test_data_of_a_function_beside_the_file(mended: bool, tmp_path: Path) -> None:
    proto = parser.parse_model(f"""<ir_version: 8, opset_import: ["": 18, "own": 1]>
        g (float[1, 3] x) => (float[1, 3] y) {{ a = own.f(x) y = BatchNormalization(a, {"" if mended else "s"}, b, m, v) }}
        <domain: "own", opset_import: ["": 18]>
        f (x) => (y) {{ c = Constant<value: tensor = float[3] {{0, 0, 0}}>() y = Add(x, c) }}""")
    for name, value in (("b", F([1, 2, 3])), ("m", F([0, 0, 0])), ("v", F([1, 1, 1])), ("s", F([1, 1, 1]))):
        proto.graph.initializer.append(numpy_helper.from_array(value, name))
    (tmp_path / "c.bin").write_bytes(F([5, 5, 5]).tobytes())
    held = proto.functions[0].node[0].attribute[0].t
    held.ClearField("float_data")
    held.data_location = TensorProto.EXTERNAL
    held.external_data.add(key="location", value="c.bin")
    (tmp_path / "m.onnx").write_bytes(proto.SerializeToString())
    found = sonnx.from_onnx(tmp_path / "m.onnx")
    np.testing.assert_allclose(ours(found, np.zeros((1, 3), F))[0], [[6, 7, 8]], rtol=1e-4)


def test_a_subclass_trains_on_what_was_read(mean_squares: Any) -> None:
    found = sonnx.from_onnx(model("(float[n] x) => (float[n] y) { y = Mul(x, w) }", w=F([1, 1])), model_class=mean_squares)
    found.optimizer = opt.SGD(lr=0.1)
    found.train()
    found(Tensor(data=F([1, 1])), Tensor(data=F([3, 1])))
    np.testing.assert_allclose(found.get_params()["w"].data, [1.2, 1.0], rtol=1e-6)  # half of d/dw ((w - t)^2), by 0.1


@pytest.mark.row("I15")
def test_everything_that_is_unknown_is_said_at_once() -> None:
    proto = model("(float[n] x) => (float[n] y) { a = Foo(x) b = Bar(a) y = Relu(b) }")
    proto.opset_import.append(helper.make_opsetid("my.domain", 3))
    proto.graph.node[1].domain = "my.domain"
    proto.graph.node.append(helper.make_node("Baz", ["y"], ["z"], domain="my.domain"))
    with pytest.raises(UnsupportedModel) as e:
        sonnx.from_onnx(proto)
    assert len(e.value.problems) == 3
    for what in ("Foo", "Bar", "Baz", "my.domain"):
        assert what in str(e.value)


# --- what exporters write


@pytest.mark.row("I4")
def test_names_of_nodes_are_not_asked_for() -> None:
    proto = model("(float[n] x) => (float[n] y) { a = Add(x, w) b = Mul(a, w) c = Neg(b) y = Abs(c) }", w=F([2]))
    for node, name in zip(proto.graph.node, ["", "same", "same", "/a b:0\n\u00fc.\U0001f600\"'%s"], strict=True):
        node.name = name
    found = sonnx.from_onnx(proto)
    assert ours(found, F([1, -5])) == [[6.0, 6.0]]
    assert sonnx.run_model(sonnx.export(found), [F([1, -5])])[0].tolist() == [6.0, 6.0]


@pytest.mark.row("I4")
def test_names_of_values_may_be_anything() -> None:
    proto = model("(float[n] x) => (float[n] y) { a = Add(x, w) y = Neg(a) }", w=F([2]))
    odd = {"x": "in put:0", "w": "w/kernel.\u00fc;'", "a": "a\nb", "y": "%s{}"}
    rename(proto, list(odd), list(odd.values()))
    found = sonnx.from_onnx(proto)
    assert [v.name for v in found.imported.graph.inputs] == ["in put:0"] and list(found.get_params()) == ["w/kernel.\u00fc;'"]
    assert ours(found, F([1])) == [[-3.0]]


@pytest.mark.row("I4")
def test_an_initializer_that_is_an_input_too_is_a_parameter() -> None:
    proto = model("(float[n] x, float[2] w) => (float[n] y) { y = Mul(x, w) }", w=F([2, 3]))
    found = sonnx.from_onnx(proto)
    assert [v.name for v in found.imported.graph.inputs] == ["x"] and list(found.get_params()) == ["w"]
    assert ours(found, F([1, 1])) == [[2.0, 3.0]]


@pytest.mark.row("I4")
def test_an_initializer_that_nodes_share_stays_one() -> None:
    found = sonnx.from_onnx(model("(float[n] x) => (float[n] y) { a = Mul(x, w) y = Mul(a, w) }", w=F([2, 3])))
    (w,) = found.get_params().values()
    tape.training = True
    try:
        y = found.forward(Tensor(data=F([1, 1]), requires_grad=False))[0]
        ((p, g),) = autograd.backward(autograd.reduce_sum(y, keepdims=0))
    finally:
        tape.training = False
    assert p is w and g.data.tolist() == [4.0, 6.0]


def test_constants_anywhere() -> None:
    text = (
        "(float[n] x, bool c) => (float[n] y) { y = If(c) <then_branch = t () => (float[n] a) { k = Constant<value_float = 2.0>()\
 a = Mul(x, k) }, else_branch = e () => (float[n] b) { k2 = Constant<value_floats = [3.0]>() b = Mul(x, k2) }> }"
    )
    found = sonnx.from_onnx(model(text))
    assert ours(found, F([1, 2]), np.True_) == [[2.0, 4.0]] and ours(found, F([1, 2]), np.False_) == [[3.0, 6.0]]


@pytest.mark.parametrize("lacking", ["s", "b", "sb"])
@pytest.mark.parametrize("constant", [False, True])
def test_a_batch_norm_without_scale_or_bias(lacking: str, constant: bool) -> None:
    given = ["" if n in lacking else n for n in ("s", "b")]
    values = {"s": [2.0, 4.0], "b": [1.0, -1.0], "m": [0.5, 0.5], "v": [1.0, 4.0]}
    node = f"y = BatchNormalization<epsilon = 0.0>(x, {given[0]}, {given[1]}, m, v)"
    if constant:
        inner = " ".join(f"{n} = Constant<value = float[2] {{{a}, {b}}}>()" for n, (a, b) in values.items())
        proto = model(f"(float[1, 2, 1] x) => (float[1, 2, 1] y) {{ {inner} {node} }}")
    else:
        proto = model(f"(float[1, 2, 1] x) => (float[1, 2, 1] y) {{ {node} }}", **{n: F(v) for n, v in values.items()})
    before = proto.SerializeToString()
    found = sonnx.from_onnx(proto)
    scale, bias = [1.0, 1.0] if "s" in lacking else values["s"], [0.0, 0.0] if "b" in lacking else values["b"]
    expected = [(3 - 0.5) * scale[0] + bias[0], (3 - 0.5) / 2 * scale[1] + bias[1]]
    assert ours(found, np.full((1, 2, 1), 3, F)) == [[[[expected[0]], [expected[1]]]]]
    assert proto.SerializeToString() == before and len(found.onnx_model.graph.initializer) > len(proto.graph.initializer)
    onnx.checker.check_model(found.onnx_model)
    with pytest.raises(InvalidModel):
        sonnx.prepare(proto)  # ONNX asks for both


def test_a_batch_norm_of_which_nothing_is_known_is_refused() -> None:
    text = "(float[1, 2] x, float[2] m, float[2] v) => (float[1, 2] y) { y = BatchNormalization(x, , , m, v) }"
    with pytest.raises(InvalidModel):
        sonnx.from_onnx(model(text))


# --- what the importers do with files


def test_values_that_change_names_swap_them_everywhere() -> None:
    text = "(float[n] a, float[n] b, bool c) => (float[n] y) { t = Sub(a, b) y = If(c) <then_branch = p () => (float[n] u) \
{ u = Add(t, a) }, else_branch = q () => (float[n] v) { v = Identity(b) }> }"
    proto = model(text)
    rename(proto, ["a", "b", "y"], ["b", "t", "u"])  # b, t and u exist: they make way
    found = sonnx.prepare(proto)
    assert [v.name for v in proto.graph.input] == ["b", "t", "c"] and proto.graph.output[0].name == "u"
    assert found.run([F([5]), F([3]), np.True_])[0].tolist() == [7.0]
    assert found.run([F([5]), F([3]), np.False_])[0].tolist() == [3.0]
    assert len(names(proto.graph)) == 7


def test_inputs_in_any_order_get_the_names_of_the_call() -> None:
    """An exporter may write its inputs in another order, and leave out one that is not used."""
    proto = model("(float[n] input_2, float[n] input_0) => (float[n] z, float[n] input_1) "
                  "{ z = Sub(input_0, input_2) input_1 = Identity(input_2) }")  # fmt: skip
    name_values(proto, ["a", "b", "z"], None)
    assert [v.name for v in proto.graph.input] == ["z", "a"] and [v.name for v in proto.graph.output] == ["output_0", "output_1"]
    found = sonnx.from_onnx(proto)
    feeds = [F([5]), F([9]), F([3])]
    assert [y.tolist() for y in outputs(found, ["a", "b", "z"], feeds)] == [[2.0], [3.0]]
    assert [y.tolist() for y in outputs(found, [], feeds[:2])] == [[4.0], [5.0]]  # the exporter named them: in order
    with pytest.raises(InvalidInput, match="output_names"):
        name_values(proto, [], ["y"])


def test_outputs_that_are_inputs_or_there_twice_get_names() -> None:
    proto = model("(float[n] x) => (float[n] y) { y = Neg(x) }")
    for name in ("x", "y"):
        proto.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n"]))
    separate(proto)
    assert [v.name for v in proto.graph.output] == ["y", "x_out", "y_out"]
    assert [y.tolist() for y in sonnx.prepare(proto).run([F([1])])] == [[-1.0], [1.0], [-1.0]]


def test_nested_values() -> None:
    value = {"b": [1, (2, None)], "a": 3}
    assert leaves(value) == [1, 2, 3] and rebuilt(value, str) == {"b": ["1", ("2", None)], "a": "3"}
    assert open_sizes("x", (2, 3, 4), {"x": {0: "n", -1: "m"}}) == (None, 3, None) and open_sizes("x", (2,), None) == (2,)
    with pytest.raises(InvalidInput, match="whose shape is"):
        open_sizes("x", (2,), {"x": [1]})


@pytest.mark.parametrize(
    ("a", "b", "says"),
    [(F([1, 2]), F([1, 2.0001]), ""), (F([1, 2]), F([1, 2.1]), "differs by"), (F([1]), F([[1]]), "shape"), (F([]), F([]), ""),
     (np.array([1]), np.array([1], np.int32), ""),
     (np.array([1]), np.array([2]), "not the framework's"), (F([1]), np.array([1]), "float32"),
     (F([np.nan, np.inf]), F([np.nan, np.inf]), ""),
     (F([1, np.inf]), F([1, -np.inf]), "infinite"), (F([1, 2]), F([1, np.nan]), "infinite"),
     (F([0]), F([0]), ""), (F([1e-3]), F([0]), "differs"),
     (np.float16([1]), np.float16([1.005]), ""), (F([np.inf]), F([1]), "differs"),
     (np.array(["a"], object), np.array(["a"], object), ""), (np.array(["a"], object), np.array(["b"], object), "values")],
)  # fmt: skip
def test_the_comparison(a: Any, b: Any, says: str) -> None:
    found = difference(a, b, 1e-4)
    assert (says in found) if says else found == ""


# --- without frameworks


CALLS = {"torch": lambda: sonnx.from_pytorch(None, None), "tensorflow": lambda: sonnx.from_tensorflow(None),
         "paddle": lambda: sonnx.from_paddle(None, None), "skl2onnx": lambda: sonnx.from_sklearn(None, None)}  # fmt: skip


@pytest.mark.row("I9")
@pytest.mark.parametrize(("package", "call"), CALLS.items(), ids=list(CALLS))
def test_what_is_missing_is_named_with_its_command(package: str, call: Any) -> None:
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingDependency) as e:
        call()
    assert e.value.code == "SX700" and package in str(e.value) and "pip install" in e.value.hint


def test_a_package_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise AttributeError('numpy has no float128_')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(MissingDependency, match="float128_") as e:
        sonnx.from_pytorch(None, None)
    assert e.value.code == "SX701" and e.value.__cause__ is not None
    sys.modules.pop("torch", None)


_ALONE = """
import sys
allowed = {"numpy", "onnx", "ml_dtypes", "google", "typing_extensions", "click", "platformdirs", "rich", "singa", "singa_backend"}
class Wall:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names and not top.startswith("_"):
            raise ModuleNotFoundError(f"{name} is behind the wall", name=name)
sys.meta_path.insert(0, Wall())
import numpy as np
from singa import autograd, layer, model, opt, sonnx, tensor
found = sonnx.from_onnx(sys.argv[1])
y, z = found.forward(np.float32([1, 10]), np.array([5, 6]), np.array([True, False]))
frameworks = {"torch", "tensorflow", "paddle", "sklearn", "onnxruntime", "scipy"}
print(y.data.tolist(), z.data.tolist(), sorted(frameworks & set(sys.modules)))
"""


@pytest.mark.row("I8")
def test_numpy_and_onnx_are_enough(tmp_path: Path) -> None:
    onnx.save(MIXED, tmp_path / "m.onnx")
    ran = subprocess.run([sys.executable, "-c", _ALONE, str(tmp_path / "m.onnx")], capture_output=True, text=True, timeout=120)
    assert ran.stdout.strip() == "[2.0, 10.0] [6, 7] []", ran.stderr


@pytest.mark.row("I14")
def test_four_processes_at_once_in_one_folder(tmp_path: Path) -> None:
    """Each with a file of weights for itself, next to one that all of them read."""
    onnx.save(MIXED, tmp_path / "m.onnx")
    code = (
        "import sys, numpy as np, onnx; from onnx import numpy_helper; from singa import sonnx\n"
        "proto = onnx.load('m.onnx'); w = numpy_helper.from_array(np.float32([2, int(sys.argv[1])]), 'w')\n"
        "proto.graph.initializer[0].CopyFrom(w)\n"
        "for source in (proto, 'm.onnx'):\n"
        "    y, z = sonnx.from_onnx(source).forward(np.float32([1, 10]), np.array([5, 6]), np.array([True, True]))\n"
        "    print(y.data.tolist())"
    )
    running = [
        subprocess.Popen([sys.executable, "-c", code, str(k)], cwd=tmp_path, stdout=subprocess.PIPE, text=True) for k in range(4)
    ]
    for k, process in enumerate(running):
        out, _ = process.communicate(timeout=120)
        assert out.splitlines() == [str([2.0, 10.0 * k]), str([2.0, 30.0])]
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
