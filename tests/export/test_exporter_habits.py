"""Forms that exporters write and ONNX's text does not have: open sizes of -1, clip=0, vectors of one value, omitted outputs."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

import singa_backend
from singa import sonnx
from singa.cli import main
from singa_backend.conform.foreign import error
from singa_backend.conform.fuzz import generate
from singa_backend.inspection import check
from singa_backend.proto.schemas import schemas

FLOAT = TensorProto.FLOAT


def model(nodes, inputs, outputs, initializers=(), opset=17, **others):
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(n, t, s) for n, t, s in inputs],
        [helper.make_tensor_value_info(n, t, s) for n, t, s in outputs],
        [numpy_helper.from_array(a, n) for n, a in dict(initializers).items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9, **others)


# --- a size of -1 -------------------------------------------------------------------------------------------------------


def open_model(size=-1):
    """x: float[size, 4] -> y: float[size, 2], with a sequence and an inner value that are declared in the same way."""
    w = np.arange(8, dtype=np.float32).reshape(4, 2)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("SequenceConstruct", ["h"], ["s"]),
        helper.make_node("SequenceAt", ["s", "zero"], ["y"]),
    ]
    made = model(nodes, [("x", FLOAT, [size, 4])], [("y", FLOAT, [size, 2])], {"w": w, "zero": np.int64(0)})
    made.graph.value_info.append(helper.make_tensor_value_info("h", FLOAT, [size, 2]))
    made.graph.value_info.append(helper.make_tensor_sequence_value_info("s", FLOAT, [size, 2]))
    return made


@pytest.mark.parametrize("size", [-1, "-1", "?", "None", "", None])
def test_open_size_is_declared_open(size):
    rep = singa_backend.prepare(open_model(size))
    assert rep.inputs[0].shape == (None, 4) and rep.outputs[0].shape == (None, 2)
    for n in (0, 1, 3):
        x = np.ones((n, 4), np.float32)
        assert rep.run([x])[0].shape == (n, 2)


@pytest.mark.parametrize(
    "command",
    ["check", "run --random 0", "optimize -o {out}", "convert --opset 20 -o {out}",
     "codegen -o {out}.py", "inspect"],
)  # fmt: skip
def test_open_size_in_every_command(command, tmp_path):
    path, out = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(open_model(), path)
    name, *rest = command.format(out=out).split()
    done = CliRunner().invoke(main, [name, str(path), *rest])
    assert not done.exception or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code in (0,), done.output
    if out.exists():
        written = onnx.load(out)
        x = np.ones((3, 4), np.float32)
        assert singa_backend.prepare(written).run([x])[0].shape == (3, 2)


@pytest.mark.parametrize(("name", "equal"), [("?", False), (-1, False), ("n", True)])
def test_open_sizes_are_independent(name, equal):
    made = model([helper.make_node("Identity", ["x"], ["y"])], [("x", FLOAT, [name, name])], [("y", FLOAT, None)])
    rep = singa_backend.prepare(made)
    assert rep.run([np.ones((2, 2), np.float32)])[0].shape == (2, 2)
    if equal:
        with pytest.raises(singa_backend.InvalidInput, match="must have the declared shape"):
            rep.run([np.ones((2, 3), np.float32)])
    else:
        assert rep.run([np.ones((2, 3), np.float32)])[0].shape == (2, 3)


# --- clip=0 -------------------------------------------------------------------------------------------------------------


def recurrent(op, gates, **attributes):
    rng = np.random.default_rng(0)
    w, r = (rng.standard_normal((1, 3 * gates, n)).astype(np.float32) for n in (2, 3))
    node = helper.make_node(op, ["x", "w", "r"], ["y"], name="cell", hidden_size=3, **attributes)
    return model([node], [("x", FLOAT, [4, 2, 2])], [("y", FLOAT, [4, 1, 2, 3])], {"w": w, "r": r})


@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_clip_of_zero_means_no_clip(op, gates, tmp_path):
    x = np.random.default_rng(1).standard_normal((4, 2, 2)).astype(np.float32)
    want = singa_backend.prepare(recurrent(op, gates)).run([x])[0]
    zero = recurrent(op, gates, clip=0.0)
    with pytest.warns(UserWarning, match=rf"clip=0 of {op} 'cell' is read as no clip"):
        rep = singa_backend.prepare(zero)
    np.testing.assert_array_equal(rep.run([x])[0], want)
    assert check(zero).warnings and check(zero).good and not check(recurrent(op, gates)).warnings
    # what is written has no clip: onnxruntime refuses a clip of 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        written = sonnx.convert(zero, opset=20)
    assert all(a.name != "clip" for n in written.graph.node for a in n.attribute)
    np.testing.assert_array_equal(singa_backend.prepare(written).run([x])[0], want)


def test_check_prints_the_warning(tmp_path):
    onnx.save(recurrent("GRU", 3, clip=0.0), tmp_path / "m.onnx")
    done = CliRunner().invoke(main, ["check", str(tmp_path / "m.onnx")])
    assert done.exit_code == 0 and "warning: clip=0 of GRU" in done.output


def test_a_command_prints_a_warning_without_a_place_in_its_code(tmp_path):
    onnx.save(recurrent("GRU", 3, clip=0.0), tmp_path / "m.onnx")
    (tmp_path / "net.py").write_text("import warnings\nwarnings.warn('mine')\nx = 1\n")
    for arguments, start in (
        (["run", "m.onnx", "--random", "0"], "warning: clip=0 of GRU"),
        (["export", "net.py:x"], ".*net.py:2: "),
    ):
        command = [sys.executable, "-m", "singa.cli", *arguments, "-o", "o.npz"]
        lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr.splitlines()
        assert re.match(start, lines[0]) and not any("prepare(" in line for line in lines)


@pytest.mark.parametrize("clip", [-1.0, float("nan")])
@pytest.mark.parametrize(("op", "gates"), [("RNN", 1), ("GRU", 3), ("LSTM", 4)])
def test_clip_without_meaning_is_refused(op, gates, clip):
    with pytest.raises(singa_backend.SonnxError, match="clip must be at least 0"):
        singa_backend.prepare(recurrent(op, gates, clip=clip)).run([np.zeros((4, 2, 2), np.float32)])


# --- the iteration number and the condition of a Loop as vectors of one value ----------------------------------------------


def looping(shape, condition, states=True):
    """Three times: state = state * 2 + iteration, and the iteration as a scan output."""
    body = helper.make_graph(
        [
            helper.make_node("Cast", ["i"], ["f"], to=FLOAT),
            helper.make_node("Mul", ["s", "two"], ["d"]),
            helper.make_node("Add", ["d", "f"], ["t"]),
            helper.make_node("Concat", ["i", "i"], ["pair"], axis=0) if shape else helper.make_node("Identity", ["i"], ["pair"]),
            helper.make_node("Identity", ["c"], ["go"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, shape),
            helper.make_tensor_value_info("c", TensorProto.BOOL, condition),
            helper.make_tensor_value_info("s", FLOAT, [1]),
        ],
        [
            helper.make_tensor_value_info("go", TensorProto.BOOL, condition),
            helper.make_tensor_value_info("t", FLOAT, [1]),
            helper.make_tensor_value_info("pair", TensorProto.INT64, [2] if shape else []),
        ],
    )
    node = helper.make_node("Loop", ["three", "yes", "x"], ["y", "pairs"], body=body)
    states = {"three": np.int64(3), "yes": np.ones(condition, bool), "two": np.float32(2)}
    pairs = [3, 2] if shape else [3]
    return model([node], [("x", FLOAT, [1])], [("y", FLOAT, [1]), ("pairs", TensorProto.INT64, pairs)], states)


@pytest.mark.parametrize("condition", [[], [1]])
@pytest.mark.parametrize("shape", [[], [1]])
def test_loop_takes_the_shapes_that_its_body_declares(shape, condition):
    made = looping(shape, condition)
    onnx.checker.check_model(made, full_check=True)
    x = np.array([1], np.float32)
    y, pairs = singa_backend.prepare(made).run([x])
    np.testing.assert_array_equal(y, [12.0])
    np.testing.assert_array_equal(pairs, [[0, 0], [1, 1], [2, 2]] if shape else [0, 1, 2])
    written = sonnx.convert(made, opset=20)
    np.testing.assert_array_equal(singa_backend.prepare(written).run([x])[1], pairs)


@pytest.mark.parametrize("condition", [[], [1]])
@pytest.mark.parametrize("shape", [[], [1]])
def test_loop_of_vectors_has_its_gradient(shape, condition):
    from singa import autograd, tensor

    net = sonnx.SONNXModel(looping(shape, condition))
    x = tensor.from_numpy(np.array([1], np.float32))
    x.requires_grad = x.stores_grad = True
    autograd.training = True
    try:
        y = net.forward(x)[0]
        grads = {id(p): g for p, g in autograd.backward(y, tensor.from_numpy(np.ones(1, np.float32)))}
    finally:
        autograd.training = False
    np.testing.assert_array_equal(tensor.to_numpy(grads[id(x)]), [8.0])


# --- a branch that the example inputs do not run ----------------------------------------------------------------------------


def two_rates():
    """If(fast): windows of 8 values; otherwise of 4.  Each branch drops the last axis if its size is 1, as exporters write it."""

    def branch(name, window):
        w = np.arange(window, dtype=np.float32).reshape(1, 1, window)
        squeezed = helper.make_graph(
            [helper.make_node("Squeeze", [f"{name}_c", "minus"], [f"{name}_s"])],
            "then",
            [],
            [helper.make_tensor_value_info(f"{name}_s", FLOAT, None)],
        )
        same = helper.make_graph(
            [helper.make_node("Identity", [f"{name}_c"], [f"{name}_k"])],
            "else",
            [],
            [helper.make_tensor_value_info(f"{name}_k", FLOAT, None)],
        )
        nodes = [
            helper.make_node("Conv", ["x", f"{name}_w"], [f"{name}_c"], name=f"{name}_conv", strides=[window]),
            helper.make_node("Shape", [f"{name}_c"], [f"{name}_shape"]),
            helper.make_node("Gather", [f"{name}_shape", "minus"], [f"{name}_size"]),
            helper.make_node("Equal", [f"{name}_size", "one"], [f"{name}_is"]),
            helper.make_node("If", [f"{name}_is"], [f"{name}_if"], then_branch=squeezed, else_branch=same),
            helper.make_node("Gemm", [f"{name}_if", "v"], [f"{name}_y"], name=f"{name}_gemm"),
        ]  # fmt: skip
        return helper.make_graph(
            nodes, name, [], [helper.make_tensor_value_info(f"{name}_y", FLOAT, None)], [numpy_helper.from_array(w, f"{name}_w")]
        )

    node = helper.make_node("If", ["fast"], ["y"], then_branch=branch("fast8", 8), else_branch=branch("slow4", 4))
    states = {"minus": np.array([-1]), "one": np.array([1]), "v": np.ones((1, 1), np.float32)}
    return model([node], [("fast", TensorProto.BOOL, []), ("x", FLOAT, ["batch", 1, "n"])], [("y", FLOAT, ["batch", 1])], states)


def test_a_branch_that_did_not_run_is_written_as_in_the_file(oracle):
    from singa import tensor

    net = sonnx.SONNXModel(two_rates())
    x = np.arange(8, dtype=np.float32).reshape(1, 1, 8)
    inputs = [tensor.Tensor(data=np.array(True), requires_grad=False), tensor.from_numpy(x)]
    written, report = sonnx.export(net, inputs, with_report=True)
    assert any("stay open" in w for w in report.warnings)
    assert singa_backend.prepare(written).inputs[1].shape == ("batch", 1, "n")
    slow = x[:, :, :4]
    for fast, value in ((True, x), (False, slow)):
        want = singa_backend.prepare(two_rates()).run([np.array(fast), value])[0]
        theirs = oracle.run(written.SerializeToString(), {"fast": np.array(fast), "x": value})
        np.testing.assert_allclose(next(iter(theirs.values())), want)
    fits, report = sonnx.export(net, [inputs[0], tensor.from_numpy(x + 1)], dynamic_axes={"x": {0: "b"}}, with_report=True)
    assert singa_backend.prepare(fits).inputs[1].shape[0] == "b"


# --- optional outputs that a node omits by the name "" ----------------------------------------------------------------------


def _with_optional_outputs():
    return [
        (schema.name, version)
        for (domain, _), versions in sorted(schemas.items())
        for version, schema in sorted(versions.items())
        if domain == "" and any(o.option == onnx.defs.OpSchema.FormalParameterOption.Optional for o in schema.outputs)
    ]


@pytest.mark.parametrize(("name", "version"), _with_optional_outputs())
def test_optional_outputs_may_be_omitted_by_an_empty_name(name, version):
    """A drawn node whose optional outputs are all named "" returns the others as if it did not have these names."""
    case = next(filter(None, (generate.draw(3, i, f"^{name}-{version}$") for i in range(20))))
    formal = case.schema.outputs
    required = [o.option == onnx.defs.OpSchema.FormalParameterOption.Single for o in formal]
    names = [f"out{i}" for i in range(max(sum(required), case.schema.min_output))]
    node = onnx.NodeProto()
    node.CopyFrom(case.node)
    made = []
    for outputs in (names, names + [""] * (len(formal) - len(names))):
        del node.output[:]
        node.output.extend(outputs)
        rep = singa_backend.prepare(generate.model(case, [node], names))
        try:
            made.append(rep.run(case.feeds))
        except singa_backend.SonnxError as error:
            made.append(error)
        assert getattr(made[-1], "code", "") != "SX490"
    assert type(made[0]) is type(made[1])
    if not isinstance(made[0], Exception):
        for a, b in zip(*made, strict=True):
            np.testing.assert_array_equal(a, b)


# --- outputs that are not tensors -----------------------------------------------------------------------------------------


def with_every_kind():
    """Softmax with its result as a tensor, as a sequence of maps, as a sequence of tensors and as an empty optional."""
    nodes = [
        helper.make_node("Softmax", ["x"], ["p"]),
        helper.make_node("ZipMap", ["p"], ["maps"], domain="ai.onnx.ml", classlabels_strings=["a", "b", "c"]),
        helper.make_node("SplitToSequence", ["x"], ["rows"]),
        helper.make_node("Optional", [], ["nothing"], type=helper.make_tensor_type_proto(FLOAT, [1])),
    ]
    made = model(nodes, [("x", FLOAT, [2, 3])], [("p", FLOAT, [2, 3])])
    made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    number = helper.make_tensor_type_proto(FLOAT, [])
    made.graph.output.extend(
        [
            helper.make_value_info(
                "maps", helper.make_sequence_type_proto(helper.make_map_type_proto(TensorProto.STRING, number))
            ),
            helper.make_tensor_sequence_value_info("rows", FLOAT, None),
            helper.make_value_info("nothing", helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [1]))),
        ]
    )
    return made


@pytest.mark.parametrize("by", ["run", "codegen"])
def test_outputs_of_every_kind_are_stored(by, tmp_path):
    path, target = tmp_path / "m.onnx", tmp_path / "y.npz"
    onnx.save(with_every_kind(), path)
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.savez(tmp_path / "x.npz", x=x)
    if by == "run":
        done = CliRunner().invoke(main, ["run", str(path), "--inputs", str(tmp_path / "x.npz"), "-o", str(target)])
        assert done.exit_code == 0, done.output
    else:
        done = CliRunner().invoke(main, ["codegen", str(path), "-o", str(tmp_path / "net.py")])
        assert done.exit_code == 0, done.output
        command = [sys.executable, str(tmp_path / "net.py"), "--inputs", str(tmp_path / "x.npz"), "--output", str(target)]
        subprocess.run(command, check=True, capture_output=True)
    p, maps, rows, nothing = singa_backend.prepare(with_every_kind(), optimize=2 if by == "run" else 0).run([x])
    with np.load(target) as stored:
        assert set(stored) == {"p", "rows/0", "rows/1", *(f"maps/{i}/{k}" for i in (0, 1) for k in ("keys", "values"))}
        np.testing.assert_array_equal(stored["p"], p)
        np.testing.assert_array_equal(stored["rows/1"], rows[1])
        assert dict(zip(stored["maps/1/keys"], stored["maps/1/values"], strict=True)) == maps[1]
    assert nothing is None


def test_maps_are_compared_by_their_keys_and_values():
    assert error([{"a": 0.5}], [{"a": 0.5}]) == 0
    assert error([{"a": 0.5}], [{"a": 0.25}]) == 1.0
    assert error([{"a": 0.5}], [{"b": 0.5}]) == error([0.5], [{"a": 0.5}]) == np.inf


# --- windows that are larger than their axis --------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["AveragePool", "MaxPool", "LpPool"])
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(("size", "kernel", "stride", "pad", "dilation"), [
    (1, 2, 2, 0, 1), (1, 3, 3, 0, 1), (1, 3, 2, 0, 1), (2, 4, 3, 0, 1), (2, 3, 2, 0, 1), (1, 2, 1, 0, 1), (1, 5, 2, 1, 1),
    (1, 4, 2, 1, 1), (2, 2, 3, 0, 2), (0, 2, 3, 0, 1),
])  # fmt: skip
def test_a_pool_of_a_short_axis_has_the_cells_that_exist(op, include, size, kernel, stride, pad, dilation, oracle):
    """Recognisers of text pool the height away; on a small image the window is larger than what is left of it."""
    attributes = {"kernel_shape": [kernel], "strides": [stride], "pads": [pad, pad], "dilations": [dilation]}
    attributes |= {"count_include_pad": include} if op == "AveragePool" else {}
    made = model([helper.make_node(op, ["x"], ["y"], **attributes)], [("x", FLOAT, [1, 1, "n"])], [("y", FLOAT, None)], opset=19)
    x = np.arange(5, 5 + size, dtype=np.float32).reshape(1, 1, size)
    mine = singa_backend.prepare(made).run([x])[0]
    if size:  # onnxruntime refuses empty axes
        np.testing.assert_allclose(mine, oracle.run(made.SerializeToString(), {"x": x})["y"], rtol=1e-6)
    else:
        assert mine.shape == (1, 1, 0)


def test_the_average_of_no_cells_is_nan_without_a_warning():
    made = model([helper.make_node("GlobalAveragePool", ["x"], ["y"])], [("x", FLOAT, [1, 2, 0, 3])], [("y", FLOAT, None)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = singa_backend.prepare(made).run([np.zeros((1, 2, 0, 3), np.float32)])[0]
    assert y.shape == (1, 2, 1, 1) and np.isnan(y).all()


# --- operators that ONNX does not define ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("domain", "words"),
    [
        ("com.microsoft", "onnxruntime's own operators"),
        ("com.microsoft.nchwc", "layouts for one processor"),
        ("ai.onnx.contrib", "onnxruntime-extensions"),
        ("org.pytorch.aten", "ATen"),
        ("com.example", "'com.example' is not one of ONNX's"),
    ],
)
def test_foreign_operators_are_explained(domain, words, tmp_path):
    made = model([helper.make_node("Opaque", ["x", "x"], ["y"], domain=domain)], [("x", FLOAT, [2, 2])], [("y", FLOAT, [2, 2])])
    made.opset_import.append(helper.make_opsetid(domain, 1))
    with pytest.raises(singa_backend.UnsupportedModel) as refused:
        singa_backend.prepare(made)
    assert refused.value.code == "SX202" and "did you mean" not in str(refused.value)
    assert words in refused.value.hint and words in refused.value.problems[0].hint
    onnx.save(made, tmp_path / "m.onnx")
    done = CliRunner().invoke(main, ["check", str(tmp_path / "m.onnx")])
    assert done.exit_code == 1 and words.split()[0] in done.output


def test_a_misspelt_operator_of_onnx_has_a_suggestion():
    made = model([helper.make_node("Matmul", ["x", "x"], ["y"])], [("x", FLOAT, [2, 2])], [("y", FLOAT, [2, 2])])
    with pytest.raises(singa_backend.UnsupportedModel, match="did you mean MatMul"):
        singa_backend.prepare(made)


# --- example inputs ---------------------------------------------------------------------------------------------------------


def test_example_inputs_may_be_arrays():
    from singa import opt

    relu = model([helper.make_node("Relu", ["x"], ["y"])], [("x", FLOAT, ["n"])], [("y", FLOAT, ["n"])])
    scaled = model(
        [helper.make_node("Mul", ["x", "w"], ["y"])], [("x", FLOAT, [2])], [("y", FLOAT, [2])], {"w": np.ones(2, np.float32)}
    )
    x = np.ones(2, np.float32)
    for example in ([x], [x.tolist()], (x,)):
        assert singa_backend.prepare(sonnx.export(sonnx.SONNXModel(relu), example)).inputs[0].shape == (2,)
    assert sonnx.to_training_onnx(scaled, "mse_loss", opt.SGD(lr=0.1), inputs=[x]).graph.input
    for wrong in (x, 3, "x"):
        with pytest.raises(singa_backend.InvalidInput, match="inputs must be a list of tensors or arrays"):
            sonnx.export(sonnx.SONNXModel(relu), wrong)
