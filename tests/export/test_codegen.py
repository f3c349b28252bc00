"""Programs that are written from models: equal to the model in values and gradients, readable, whole, and the same each time.

SONNX_CODEGEN_ALL=1 takes every stored model, and ONNX's cases, in place of a few.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser
from tests.helpers import bounded
from tests.helpers.paths import TESTS

from singa import autograd, codegen, device, opt, sonnx
from singa._codegen.text import Identifiers, array_text, number, quoted
from singa._core import ops, tape
from singa._core.tensor import Tensor
from singa.cli import main
from singa_backend import InvalidInput, SingaBackend, UnsupportedModel
from singa_backend.comparison import verdict
from singa_backend.conform import cases, foreign, light_models

ALL = bool(os.environ.get("SONNX_CODEGEN_ALL"))
F = np.float32
RNG = np.random.default_rng(0)


def text_model(body: str, opset: int = 21, **weights: np.ndarray) -> ModelProto:
    """A model out of ONNX's text, with these initializers."""
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}, "ai.onnx.ml": 5, "local": 1]> {body}')
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in weights.items())
    return made


def load(path: Path) -> Any:
    """The module of a program."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def written(model: Any, folder: Path, name: str = "program") -> Any:
    """The module of the program of a model; checks the length of its lines, its characters, and that it is repeatable."""
    program = codegen.generate(model, name)
    path, weights = program.write(folder / f"{name}.py")
    assert weights.name == f"{name}.npz" and all(len(line) <= 130 and line == line.rstrip() for line in program.text.split("\n"))
    assert program.text == codegen.generate(model, name).text and program.text.isascii()
    return load(path)


def tensors(inputs: Sequence[Any], dev: Any = device.default_device) -> list[Any]:
    whole = [x.astype(object) if isinstance(x, np.ndarray) and x.dtype.kind == "U" else x for x in inputs]
    return [x if x is None else Tensor(data=dev.backend.put(x), device=dev, requires_grad=False) for x in whole]


def run(net: Any, inputs: Sequence[Any], dev: Any = device.default_device) -> list[Any]:
    """The outputs of a program's model in inference, by the definitions."""
    net.eval()
    with tape.by_definitions():
        made = net.forward(*tensors(inputs, dev))
    return [None if y is None else dev.backend.get(y.data) for y in (made if isinstance(made, tuple) else (made,))]


def gradients(net: Any, inputs: Sequence[Any], weights: dict[str, Tensor]) -> dict[str, np.ndarray]:
    """The gradients of the mean squared differences of all float outputs from ones, in training; none if nothing trains."""
    device.default_device.SetRandSeed(3)
    net.train()
    made = net.forward(*tensors(inputs))
    loss: Any = None
    for y in made if isinstance(made, (tuple, list)) else (made,):
        if isinstance(y.data, np.ndarray) and y.data.dtype.kind == "f":
            one = autograd.mse_loss(y, Tensor(data=np.ones(y.shape, y.data.dtype), requires_grad=False))
            loss = one if loss is None else autograd.add(loss, ops.op.CastLike(one, loss))
    try:
        found = {id(p): g for p, g in autograd.backward(loss)}
    except InvalidInput as error:
        assert error.code == "SX345"
        return {}
    finally:
        tape.training = False
    return {n: np.asarray(found[id(p)].data) for n, p in weights.items() if id(p) in found}


def equal(ours: Any, theirs: Any) -> str:
    """The first difference of two lists of values, bit for bit; "" if there is none."""
    return verdict.strict(list(ours), list(theirs), 0, 0)


def train_alike(module: Any, model: Any, inputs: Sequence[Any]) -> bool:
    """Gradients, and running statistics after a step, are those of a SONNXModel; whether there are any."""
    theirs, ours = sonnx.SONNXModel(model), module.Model()
    expected, found = gradients(theirs, inputs, theirs.get_params()), gradients(ours, inputs, ours.weights)
    assert found.keys() == expected.keys()
    largest = max((float(np.abs(g).max(initial=0)) for g in expected.values()), default=0)
    for name, g in expected.items():
        np.testing.assert_allclose(
            found[name], g, rtol=1e-5, atol=1e-5 * max(np.abs(g).max(initial=0), 1e-3 * largest), err_msg=name
        )
    for name, t in theirs.get_states().items():
        if name in ours.weights:
            np.testing.assert_allclose(ours.weights[name].data, t.data, rtol=1e-6, atol=1e-6, err_msg=name)
    return bool(found)


# --- stored models ----------------------------------------------------------------------------------------------------

FOLDERS = {"models": TESTS / "models"} | {p.name: p for p in sorted((TESTS / "frameworks").iterdir()) if any(p.glob("*.onnx"))}
STORED = {f"{where}-{m.name}": m for where, folder in FOLDERS.items() for m in foreign.stored(folder)}
FEW = [
    "models-bert-script-11", "models-lstm-dynamo-18", "models-mobilenetv2-dynamo-23", "models-gpt2-script-17",
    "pytorch-densenet-script-12", "tensorflow-xception-tf2onnx-11", "paddle-vit-paddle2onnx-12",
    "paddle26-unet_bicubic-paddle2onnx-12",
]  # fmt: skip
SKLEARN = [n for n in STORED if n.startswith("sklearn-")]


@pytest.mark.row("I13")
@pytest.mark.parametrize("name", STORED if ALL else [*FEW, *SKLEARN[::8], "sklearn-svr-skl2onnx-21"])
def test_a_stored_model(name: str, tmp_path: Path) -> None:
    """Equal to the bit in inference, at both batch sizes; trains alike."""
    stored = STORED[name]
    module, rep = written(stored.path, tmp_path), SingaBackend.prepare(str(stored.path), optimize=0)
    net = module.Model()
    for inputs, _ in stored.data:
        assert not equal(run(net, list(inputs.values())), rep.run(inputs)), name
    if hasattr(module, "TRAINED"):
        assert train_alike(module, str(stored.path), list(stored.data[0][0].values())) or name in SKLEARN


@pytest.mark.parametrize("name", light_models.names() if ALL else ["squeezenet"])
def test_a_light_model(name: str, tmp_path: Path) -> None:
    model = light_models.model(name)
    inputs = cases.light_inputs(model)
    ours, theirs = run(written(model, tmp_path).Model(), inputs), SingaBackend.prepare(model, optimize=0).run(inputs)
    assert max(map(foreign.error, ours, theirs)) <= (1e-6 if name == "zfnet512" else 0)  # LRN divides its alpha, as a double


@pytest.mark.skipif(not ALL, reason="takes minutes: SONNX_CODEGEN_ALL=1")
def test_every_case_of_onnx(tmp_path: Path) -> None:
    """Equal to the bit, but for what draws at random or is in training mode in the file; the text is as ruff would write it."""
    differ = set()
    for case in cases.load([k for k in cases.KINDS if k != "real"]):
        rep = SingaBackend.prepare(onnx.load_model_from_string(case.model), optimize=0)
        net = written(case.model, tmp_path, f"{case.kind}_{case.name}").Model()
        for inputs, _ in case.data:
            if equal(run(net, rep._feeds(inputs)[0]), rep.run(inputs)):
                differ.add(case.name)
    random = {"test_bernoulli", "test_bernoulli_expanded", "test_bernoulli_double", "test_bernoulli_double_expanded"}
    modal = {"test_batchnorm_example_training_mode", "test_batchnorm_epsilon_training_mode", "test_training_dropout",
             "test_training_dropout_default", "test_training_dropout_default_mask", "test_training_dropout_mask"}  # fmt: skip
    assert differ - random == modal
    assert not ruff(tmp_path)


def ruff(folder: Path) -> str:
    """What ruff has against the programs in a folder."""
    out = ""
    for how in (["check", "--select", "E,F,W,I,B,UP,N"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *how, "--isolated", "--line-length=130", str(folder)],
                              capture_output=True, text=True, check=False)  # fmt: skip
        out += done.stdout + done.stderr if done.returncode else ""
    return out


# --- made by hand -----------------------------------------------------------------------------------------------------

X34 = RNG.normal(size=(3, 4)).astype(F)
W44, W45, B5 = (RNG.normal(size=s).astype(F) for s in ((4, 4), (4, 5), (5,)))

MADE: dict[str, tuple[ModelProto, list[Any]]] = {
    "several inputs and outputs, ints and bools": (text_model("""g (float[n, 4] x, int64[n] k, bool[n, 4] mask)
        => (float[n, 4] y, int64[n] twice, bool[n, 4] inverse) {
            picked = Where (mask, x, w) twice = Add (k, k) inverse = Not (mask) y = Mul (picked, w) }""", w=W44[0]),
        [X34, np.array([1, 2, 3]), X34 > 0]),
    "If": (text_model("""g (float[n, 4] x, bool yes) => (float[n, 5] y) {
        y = If (yes) <then_branch = t () => (float[n, 5] a) { a = MatMul (x, w) },
                      else_branch = e () => (float[n, 5] b) { h = MatMul (x, w) two = Constant <value = float {2.0}> ()
                                                                      b = Mul (h, two) }> }""", w=W45), [X34, np.array(False)]),
    "Loop": (text_model("""g (float[n, 4] x, int64 m) => (float[n, 4] y, float[k, n, 4] all) {
        go = Constant <value = bool {1}> ()
        y, all = Loop (m, go, x) <body = b (int64 i, bool c, float[n, 4] h) => (bool d, float[n, 4] h2, float[n, 4] s) {
            d = Identity (c) p = Gemm (h, w) h2 = Tanh (p) f = Cast <to = 1> (i) s = Add (h2, f) }> }""", w=W44),
        [X34, np.array(3)]),
    "Scan whose body has no types": (text_model("""g (float[4] s, float[t, 4] x) => (float[4] last, float[t, 4] all) {
        last, all = Scan <num_scan_inputs = 1, body = b (h, v) => (h2, o) {
            half = Constant <value = float {0.5}> () a = Mul (h, half) h2 = Add (a, v) o = Mul (h2, w) }> (s, x) }""", w=B5[:4]),
        [X34[0], X34]),
    "nested graphs": (text_model("""g (float[n, 4] x, int64 m) => (float[n, 4] y) {
        go = Constant <value = bool {1}> ()
        y = Loop (m, go, x) <body = b (int64 i, bool c, float[n, 4] h) => (bool d, float[n, 4] h2) {
            d = Identity (c) one = Constant <value = int64 {1}> () first = Less (i, one)
            h2 = If (first) <then_branch = t () => (float[n, 4] a) { a = Add (h, w) },
                             else_branch = e () => (float[n, 4] b2) { b2 = Mul (h, x) }> }> }""", w=W44[0]), [X34, np.array(3)]),
    "sequences": (text_model("""g (seq(float[n, 4]) xs, float[n, 4] x) => (seq(float[n, 4]) ys, float[m, 4] y, int64 k) {
        more = SequenceInsert (xs, x) k = SequenceLength (more) y = ConcatFromSequence <axis = 0> (ys)
        ys = SequenceMap (more) <body = b (float[n, 4] v) => (float[n, 4] o) { o = Gemm (v, w) }> }""", w=W44),
        [[X34, X34 + 1], X34]),
    "an optional that is absent": (text_model("""g (optional(float[n, 4]) x, float[n, 4] z) => (bool[] has, float[n, 4] y) {
        has = OptionalHasElement (x) y = Mul (z, w) }""", w=W44[0]), [None, X34]),
    "an optional that is there": (text_model("""g (optional(float[n, 4]) x, float[n, 4] z) => (float[n, 4] y) {
        has = OptionalHasElement (x)
        h = If (has) <then_branch = t () => (float[n, 4] a) { a = OptionalGetElement (x) },
                      else_branch = e () => (float[n, 4] b) { b = Neg (z) }> y = Mul (h, w) }""", w=W44[0]), [X34, X34]),
    "one weight in three places": (text_model("""g (int64[n] ids) => (float[n, 4] y, float[n, 4] z) {
        h = Gather (w, ids) p = MatMul (h, w) q = MatMul (p, w) wt = Transpose <perm = [1, 0]> (w) y = Gemm (q, wt, b)
        z = Add (y, w) }""", w=W44, b=B5[:4]), [np.array([0, 3, 1, 1])]),
    "a bias that something else reads too": (text_model("""g (float[n, 4] x) => (float[n, 5] y, float[n, 5] h) {
        h = MatMul (x, w) y = Add (h, b) }""", w=W45, b=B5), [X34]),
    "Gemm in all its forms": (text_model("""g (float[4, n] x) => (float[n, 5] y, float[n, 4] z) {
        y = Gemm <transA = 1, alpha = 0.3, beta = 1.7> (x, w, b) z = Gemm <transB = 1> (y, w) }""", w=W45, b=B5[None]),
        [X34.T.copy()]),
    "layers": (text_model("""g (float[n, 3, h, w] x) => (float[n, 2] y, float[n, 4, a, b] z) {
        c = Conv <pads = [1, 2, 0, 1], strides = [2, 1], auto_pad = "NOTSET"> (x, k, kb)
        nrm = BatchNormalization <epsilon = 0.01, momentum = 0.7> (c, s, sb, mean, var)
        r = Relu (nrm) d = Dropout (r) p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)
        dw = Conv <group = 4, pads = [1, 1, 1, 1]> (p, k2) z = AveragePool <kernel_shape = [3, 2], auto_pad = "SAME_UPPER"> (dw)
        gp = GlobalAveragePool (z) f = Flatten (gp) g1 = Gemm (f, o) y = Sigmoid (g1) }""",
        k=RNG.normal(size=(4, 3, 2, 3)).astype(F), kb=B5[:4], s=np.abs(B5[:4]), sb=B5[1:], mean=B5[:4] / 2,
        var=np.abs(B5[1:]) + 1, k2=RNG.normal(size=(4, 1, 3, 3)).astype(F), o=W45[:, :2]),
        [RNG.normal(size=(2, 3, 9, 8)).astype(F)]),
    "other ranks": (text_model("""g (float[2, 3, l] x, float[1, 2, d, h, w] v, float c)
        => (float[2, 4, m] y, float[1, 1, a, b, e] z, float s) {
        h1 = Conv (x, k) y = MaxPool <kernel_shape = [2]> (h1) z = Conv (v, q) s = Exp (c) }""",
        k=RNG.normal(size=(4, 3, 3)).astype(F), q=RNG.normal(size=(1, 2, 2, 2, 2)).astype(F)),
        [RNG.normal(size=(2, 3, 7)).astype(F), RNG.normal(size=(1, 2, 3, 4, 5)).astype(F), F(0.5)]),
    "doubles and halves": (text_model("""g (double[n, 4] x, float16[n, 4] h) => (double[n, 4] y, float16[n, 4] z) {
        a = MatMul (x, w) y = LeakyRelu <alpha = 0.1> (a) z = Mul (h, v) }""", w=W44.astype(float), v=W44[0].astype(np.float16)),
        [X34.astype(float), X34.astype(np.float16)]),
    "narrow floats and ints": (text_model("""g (bfloat16[n, 4] x, uint8[n, 4] q) => (float[n, 4] y, int8[n, 4] z, float[4, 4] e) {
        p = MatMul (x, w) y = Cast <to = 1> (p) z = Cast <to = 3> (q) e = Cast <to = 1> (m) }""",
        w=W44.astype(ml_dtypes.bfloat16), m=W44.astype(ml_dtypes.float8_e4m3fn)),
        [X34.astype(ml_dtypes.bfloat16), np.ones((3, 4), np.uint8)]),
    "strings": (text_model("""g (string[n] x) => (string[n] y, int64[n] k) {
        sep = Constant <value_string = "-"> () y = StringConcat (x, tail)
        k = ai.onnx.ml.LabelEncoder <keys_strings = ["a", "b\\"'"], values_int64s = [3, 4], default_int64 = -1> (x) }""",
        tail=np.array(["+é", "", "z\n\"\"\"\\", "w"] * 5, object).reshape(20)), [np.array(["a", "b", "b\"'", "c"] * 5, object)]),
    "a function, an older opset": (text_model("""g (float[n, 4] x) => (float[n, 5] y) { a = local.twice (x, w)
            y = Softmax <axis = 1> (a) }
        <domain: "local", opset_import: ["": 11]> twice (v, m) => (o) { p = MatMul (v, m) c = Constant <value = float {2.0}> ()
            q = Clip (p) o = Mul (q, c) }""", opset=11, w=W45), [X34]),
    "an output_shape before opset 11": (text_model("""g (float[1, 2, 5] x) => (float[1, 3, 8] y, float[1, 3, 8] z) {
        y = ConvTranspose <output_shape = [8], strides = [2], kernel_shape = [1]> (x, w)
        z = ConvTranspose <output_shape = [8], strides = [2], auto_pad = "SAME_UPPER"> (x, w) }""", opset=10,
        w=RNG.normal(size=(2, 3, 1)).astype(F)), [RNG.normal(size=(1, 2, 5)).astype(F)]),
    "nothing but names": (text_model("g (float[n] x, float[n] z) => (float[n] x, float[2] w) { }", w=B5[:2]), [X34[0], X34[1]]),
    "empty arrays": (text_model("""g (float[n, 0] x) => (float[n, 3] y, float[a, 4] z) { y = MatMul (x, w)
        i = Constant <value_ints = [0]> ()
        none = Slice (v, i, i) z = Identity (none) }""", w=np.zeros((0, 3), F), v=W44), [np.zeros((2, 0), F)]),
    "special numbers": (text_model("""g (float[n, 4] x) => (float[n, 4] y) {
        a = Max (x, lo) b = Min (a, hi) c = Add (b, tiny) y = Where (m, c, nan) }""", lo=np.array(-np.inf, F),
        hi=np.array([np.inf], F), tiny=np.array(1e-45, F), m=np.array([True, False, True, True]), nan=np.array(np.nan, F)),
        [X34]),
}  # fmt: skip


UNTRAINED = {"strings"}
"""It has no parameters."""


@pytest.mark.parametrize("name", MADE)
def test_a_model_made_by_hand(name: str, tmp_path: Path) -> None:
    model, inputs = MADE[name]
    module = written(model, tmp_path)
    net, theirs = module.Model(), SingaBackend.prepare(model, optimize=0).run(inputs)
    for _ in range(2):
        assert not equal(run(net, inputs), theirs)
    strict = device.resolve("STRICT")
    elsewhere = module.Model(dev=strict)
    for a, b in zip(run(elsewhere, inputs, strict), theirs, strict=True):
        assert foreign.error(a, b) <= 1e-5
    assert (hasattr(module, "TRAINED") and train_alike(module, model, inputs)) == (name not in UNTRAINED)


ODD = [
    "a.b",
    "a_b",
    "a/b",
    "1x",
    "class",
    "",
    "self",
    "op",
    "input",
    "é",
    'q"\'"""',
    "new\nline",
    "back\\slash",
    "x.npy",
    "y" * 200,
    "w",
]


def test_odd_names_stay_apart(tmp_path: Path) -> None:
    """Weights, values, nodes and inputs by names that are no identifiers; `a.b` and `a_b` are two."""
    names = [n or "nameless" for n in ODD]
    nodes = [
        helper.make_node("Add", [f"in {n}" if i == 0 else f"h {names[i - 1]}", n], [f"h {n}"], name=n)
        for i, n in enumerate(names)
    ]
    floats = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [3]) for n in (f"in {names[0]}", f"h {names[-1]}")]
    weights = {n: RNG.normal(size=3).astype(F) for n in names}
    graph = helper.make_graph(
        nodes, 'a "graph"\\', floats[:1], floats[1:], [numpy_helper.from_array(a, n) for n, a in weights.items()]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    module = written(model, tmp_path)
    net = module.Model()
    assert not equal(run(net, [X34[0, :3]]), SingaBackend.prepare(model, optimize=0).run([X34[0, :3]]))
    no_keys = {"new\nline", "back\\slash", "x.npy", "y" * 200}
    assert set(names) - no_keys <= net.weights.keys() and len(net.weights) == len(names) == len(net.get_params())
    stored = {a.tobytes() for a in dict(np.load(tmp_path / "program.npz")).values()}
    assert stored == {a.tobytes() for a in weights.values()}
    theirs, inputs = sonnx.SONNXModel(model), [X34[0, :3]]
    expected, found = gradients(theirs, inputs, theirs.get_params()), gradients(net, inputs, net.weights)
    assert len(found) == len(names) and {g.tobytes() for g in found.values()} == {g.tobytes() for g in expected.values()}


def test_identifiers() -> None:
    names = Identifiers({"taken"})
    wishes = [
        "a.b",
        "a_b",
        "A/b",
        "/blocks/blocks.0/conv/Conv_output_0",
        "taken",
        "if",
        "len",
        "3d",
        "",
        "/" + "/".join(f"part{i}" for i in range(20)),
    ]
    found = [names.new(w) for w in wishes]
    assert found[:9] == ["a_b", "a_b_2", "a_b_3", "blocks_0_conv", "taken_2", "if_2", "len_2", "value_3d", "value"]
    assert found[9].endswith("part18_part19") and len(found[9]) <= 48


LONG = ("a_" * 45_000, "a/" * 45_000, "/" * 90_000, "._" * 45_000 + "z", "\u4e2d" * 90_000)


def identifier(name: str) -> None:
    assert 1 <= len(Identifiers(set()).new(name)) <= 48


@pytest.mark.skipif(not bounded.available, reason="the system does not show the memory of a process")
def test_the_end_of_a_long_name_is_its_identifier() -> None:
    """The work does not grow with the square of the length: 90,000 characters took minutes."""
    for name, answer in zip(LONG, bounded.calls(identifier, LONG), strict=True):
        assert not answer["code"] and answer["seconds"] < 1, (name[:4], answer)


@pytest.mark.parametrize("text", ["plain", 'a "b"', "it's", "\\", "\n\0", "é漢", "'\""])
def test_literals_of_text(text: str) -> None:
    assert ast.literal_eval(quoted(text)) == text and quoted(text).isascii()


@pytest.mark.parametrize("dtype", [np.float16, F, np.float64])
def test_literals_of_numbers(dtype: Any) -> None:
    for value in np.array(
        [0, -0.0, 1 / 3, 1e-5, 6e4, np.nan, np.inf, -np.inf, np.finfo(dtype).tiny, -np.finfo(dtype).max], dtype
    ):
        assert dtype(eval(number(value, dtype), {"np": np})).tobytes() == value.tobytes()
    assert array_text(np.zeros((2, 2), dtype)) == "[[0.0, 0.0], [0.0, 0.0]]" and array_text(np.zeros(9, dtype)) is None
    assert number(F(1e-5), F) == "1e-05"


def test_what_is_readable(tmp_path: Path) -> None:
    """Layers where a node is one, literals where a constant is small, the names of the nodes at the ends of lines."""
    written(MADE["layers"][0], tmp_path)
    text = (tmp_path / "program.py").read_text()
    for part in (
        "layer.Conv2d(4, (2, 3), stride=(2, 1), padding=(1, 0, 2, 1))",
        "layer.BatchNorm2d(momentum=0.3, epsilon=0.01, unbiased=False)", "layer.Dropout(0.5)", "layer.MaxPool2d(2, stride=2)",
        "layer.Conv2d(4, 3, padding=1, group=4, bias=False)", 'layer.AvgPool2d((3, 2), stride=1, pad_mode="SAME_UPPER")',
        "layer.Linear(4, 2, bias=False)", "self.relu(", "self.sigmoid(", "op.GlobalAveragePool(", "    def forward(self, x):",
        'self.conv_0.W = w.param("k")', "t_0, t_1", '    x: float[n, 3, h, w]',
    ):  # fmt: skip
        assert part in text, part
    body = codegen.generate(MADE["nested graphs"][0]).text
    assert (
        "def loop_1_body(op, i, c, h):" in body
        and "op.Less(i, 1)" in body
        and "then_branch=op.graph(if_3_then_branch, [])" in body
    )
    model = text_model("g (float[n, 2] x) => (float[n, 2] y) { h = Neg (x) y = Add (h, two) }", two=np.array(2, F))
    model.graph.node[0].name = "the node"
    assert '        h = op.Neg(x)  # Neg "the node"\n' in codegen.generate(model).text
    assert codegen.generate(model).facts == {"nodes": 2, "layers": 0, "parameters": 1, "arrays": 1}


@pytest.mark.skipif(find_spec("ruff") is None, reason="ruff is not installed")
def test_the_text_is_as_ruff_would_write_it(tmp_path: Path) -> None:
    for i, (model, _) in enumerate(MADE.values()):
        codegen.generate(model, f"made_{i}").write(tmp_path / f"made_{i}.py")
    for name in FEW:
        codegen.generate(STORED[name].path, name).write(tmp_path / f"{name}.py")
    codegen.generate(MADE["layers"][0], 'a "name"\\').write(tmp_path / "odd.py")
    assert not ruff(tmp_path)


def test_long_attributes_are_in_the_file_of_the_weights(tmp_path: Path) -> None:
    keys = [f"key number {i}" for i in range(40)]
    nodes = [
        helper.make_node("LabelEncoder", ["x"], ["k"], domain="ai.onnx.ml", keys_strings=keys,
                         values_int64s=list(range(40))),
        helper.make_node("Scaler", ["k"], ["y"], domain="ai.onnx.ml", scale=[F(0.1 * i) for i in range(20)], offset=[0.5] * 20),
        helper.make_node("Constant", [], ["long"], value_string="word " * 40),
        helper.make_node("StringConcat", ["x", "long"], ["z"]),
    ]  # fmt: skip
    info = helper.make_tensor_value_info
    ends = [info("y", TensorProto.FLOAT, [2, 20]), info("z", TensorProto.STRING, [2, 20])]
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 3)]
    ends += [info("y.scale", TensorProto.FLOAT, [20])]
    graph = helper.make_graph(nodes, "g", [info("x", TensorProto.STRING, [2, 20])], ends)
    graph.initializer.append(numpy_helper.from_array(np.full(20, 5, F), "y.scale"))  # as the attribute would be called
    model = helper.make_model(graph, opset_imports=imports)
    inputs = [np.array([keys[:20], keys[20:]], object)]
    assert not equal(run(written(model, tmp_path).Model(), inputs), SingaBackend.prepare(model, optimize=0).run(inputs))


# --- in use -----------------------------------------------------------------------------------------------------------


def process(*args: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh process of this interpreter."""
    return subprocess.run(
        [sys.executable, *map(str, args)], capture_output=True, text=True, env=os.environ | environment, check=False
    )


@pytest.mark.row("I13")
def test_in_a_fresh_process(tmp_path: Path) -> None:
    """The command line writes it; it runs on given inputs with equal bits, agrees with onnxruntime, and trains."""
    model, inputs = MADE["layers"]
    onnx.save(model, tmp_path / "m.onnx")
    np.savez(tmp_path / "in.npz", x=inputs[0])
    made = CliRunner().invoke(main, ["codegen", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "net.py")])
    assert made.exit_code == 0 and "9 layers" in made.output and "6 parameters" in made.output, made.output
    args = [
        "--inputs",
        tmp_path / "in.npz",
        "--output",
        tmp_path / "out.npz",
        "--train",
        6,
        "--lr",
        0.01,
        "--onnx",
        tmp_path / "m.onnx",
    ]
    done = process(tmp_path / "net.py", *args)
    assert done.returncode == 0, done.stderr
    outputs = dict(np.load(tmp_path / "out.npz"))
    assert not equal([outputs["y"], outputs["z"]], SingaBackend.prepare(model, optimize=0).run(inputs))
    losses = [float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 6 and losses[-1] < losses[0]
    assert ("differs from onnxruntime by" if find_spec("onnxruntime") else "not compared") in done.stdout


def test_on_seeded_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Open sizes are named; sequences, strings and absent values are drawn; the device is chosen when it runs."""
    for name, args, part in (
        ("layers", ["--size", "h=9", "--size", "w=8", "--size", "n=3", "--device", "STRICT"], "y: float32[3, 2]"),
        ("sequences", ["--size", "n=2", "--device", "STRICT"], "y: float32[6, 4]"),
        ("strings", ["--size", "n=20"], "y: object[20]"),
        ("an optional that is absent", [], "has: bool[]"), ("several inputs and outputs, ints and bools", [], "twice: int64[1]"),
    ):  # fmt: skip
        module = written(MADE[name][0], tmp_path, name.replace(" ", "_").replace(",", ""))
        texts = []
        for seed in ("5", "5", "6"):
            monkeypatch.setattr(sys, "argv", ["program", *args, "--seed", seed])
            assert module.main() == 0
            texts.append(capsys.readouterr().out)
        assert part in texts[0] and texts[0] == texts[1] and (name == "strings" or texts[0] != texts[2])


def test_sequences_out_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model, (xs, x) = MADE["sequences"]
    module = written(model, tmp_path)
    np.savez(tmp_path / "in.npz", xs=np.stack(xs), x=x)
    monkeypatch.setattr(sys, "argv", ["program", "--inputs", str(tmp_path / "in.npz"), "--output", str(tmp_path / "out.npz")])
    assert module.main() == 0 and "k: int64[]\n3" in capsys.readouterr().out
    assert not equal([np.load(tmp_path / "out.npz")["y"]], [SingaBackend.prepare(model, optimize=0).run([xs, x])["y"]])


@pytest.mark.parametrize("graph", [False, True])
def test_it_trains(graph: bool, tmp_path: Path) -> None:
    """The loss goes down, on the tape and as one graph, with the same numbers; statistics move; tied weights stay tied."""
    module = written(MADE["layers"][0], tmp_path)
    nets = [module.Model() for _ in range(2)]
    x = tensors(MADE["layers"][1])[0]
    ts = [Tensor(data=RNG.normal(size=s).astype(F), requires_grad=False) for s in ((2, 2), (2, 4, 2, 4))]
    losses = []
    for net, how in zip(nets, (False, graph), strict=True):
        device.default_device.SetRandSeed(1)
        net.set_optimizer(opt.SGD(lr=0.05))
        net.train()
        net.graph(how)
        losses.append([float(net(x, *ts)[1]) for _ in range(8)])
    assert losses[0][-1] < losses[0][0] and losses[1] == pytest.approx(losses[0], rel=1e-5)
    before = np.load(tmp_path / "program.npz")["mean"]
    assert all(not np.array_equal(net.weights["mean"].data, before) for net in nets)


def test_it_is_a_model_like_any_other(tmp_path: Path) -> None:
    """Copied, and exported again."""
    model, inputs = MADE["one weight in three places"]
    net = written(model, tmp_path).Model()
    assert len(net.get_params()) == 2
    theirs = SingaBackend.prepare(model, optimize=0).run(inputs)
    assert not equal(run(copy.deepcopy(net), inputs), theirs)
    back = sonnx.export(net, tensors(inputs))
    for a, b in zip(SingaBackend.prepare(back, optimize=0).run(inputs), theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.row("I13")
def test_the_same_text_as_alone(tmp_path: Path) -> None:
    """After other models, in another process, with other hashes."""
    path = STORED["models-vit-script-17"].path
    first, other = codegen.generate(path), codegen.generate(STORED["models-gpt2-script-17"].path)
    assert codegen.generate(path).text == first.text != other.text
    first.write(tmp_path / "here.py")
    script = "import sys; from singa import codegen; codegen.generate(sys.argv[1]).write(sys.argv[2])"
    done = process("-c", script, path, tmp_path / "there.py", PYTHONHASHSEED="7")
    assert not done.returncode, done.stderr
    for ending in ("py", "npz"):
        assert (tmp_path / f"here.{ending}").read_bytes() == (tmp_path / f"there.{ending}").read_bytes()


def own_and_one(i: int, folder: Path) -> None:
    """In a child: a program under a name of its own, and one under a name that others want too."""
    made = codegen.generate(text_model("g (float[n, 4] x) => (float[n, 4] y) { y = MatMul (x, w) }", w=W44 + i), "program")
    made.write(folder / f"own{i}.py")
    try:
        made.write(folder / "one.py")
    except InvalidInput as error:
        os._exit(3 if error.code == "SX376" else 4)
    os._exit(0)


@pytest.mark.row("I14")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_four_processes_in_one_folder(tmp_path: Path) -> None:
    """Each writes a program of its own; of one that all want, one is first, and both files are its."""
    context = multiprocessing.get_context("fork")
    started = [context.Process(target=own_and_one, args=(i, tmp_path)) for i in range(4)]
    for p in started:
        p.start()
    for p in started:
        p.join(120)
    codes = [p.exitcode for p in started]
    assert sorted(map(str, codes)) == ["0", "3", "3", "3"]
    for i in range(4):
        np.testing.assert_array_equal(np.load(tmp_path / f"own{i}.npz")["w"], W44 + i)
    np.testing.assert_array_equal(np.load(tmp_path / "one.npz")["w"], W44 + codes.index(0))
    assert (tmp_path / "one.py").read_text() == (tmp_path / "own0.py").read_text() and len(list(tmp_path.iterdir())) == 10


def test_files_that_are_there(tmp_path: Path) -> None:
    """Refused without force; with it both are replaced, or neither."""
    program = codegen.generate(MADE["layers"][0], "net")
    for there in ("net.py", "net.npz"):
        (tmp_path / there).write_text("mine")
        with pytest.raises(InvalidInput, match=there) as found:
            program.write(tmp_path / "net.py")
        assert found.value.code == "SX376"
        assert [p.name for p in tmp_path.iterdir()] == [there] and (tmp_path / there).read_text() == "mine"
        (tmp_path / there).unlink()
    (tmp_path / "net.npz").write_text("mine")
    assert [p.name for p in program.write(tmp_path / "net.py", force=True)] == ["net.py", "net.npz"]
    assert program.write(tmp_path / "net.py", force=True) and len(list(tmp_path.iterdir())) == 2
    assert set(np.load(tmp_path / "net.npz")) == set(program.arrays)
    (tmp_path / "net.py").unlink()
    (tmp_path / "net.py").mkdir()
    before = (tmp_path / "net.npz").read_bytes()
    other = codegen.generate(MADE["Loop"][0], "net")
    with pytest.raises(InvalidInput) as found:
        other.write(tmp_path / "net.py", force=True)
    assert found.value.code == "SX351" and (tmp_path / "net.npz").read_bytes() == before and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name, code", [("net.txt", "SX377"), (".py", "SX377"), ("none/net.py", "SX351")])
def test_where_no_program_can_be(name: str, code: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as found:
        codegen.generate(MADE["If"][0]).write(tmp_path / name)
    assert found.value.code == code and not list(tmp_path.iterdir())


def test_what_cannot_be_written(tmp_path: Path) -> None:
    old = text_model('g (string[n] x) => (int64[n] y) { y = ai.onnx.ml.LabelEncoder <classes_strings = ["a", "b"]> (x) }')
    old.opset_import[1].version = 1
    nul = text_model("g (string[n] x) => (string[n] y) { y = StringConcat (x, w) }", w=np.array(["a\0"] * 20, object))
    for model, part in ((old, "LabelEncoder-1 of ai.onnx.ml differs from LabelEncoder-4"), (nul, "NUL")):
        with pytest.raises(UnsupportedModel, match=part) as found:
            codegen.generate(model)
        assert found.value.code == "SX207"


def test_the_command_line(tmp_path: Path) -> None:
    onnx.save(MADE["a function, an older opset"][0], tmp_path / "m.onnx")
    args = ["codegen", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "net.py"), "--json"]
    facts = json.loads(CliRunner().invoke(main, args).output)
    assert facts["written"] == [str(tmp_path / "net.py"), str(tmp_path / "net.npz")] and facts["layers"] == 1
    assert facts["nodes"] >= 4 and facts["lines"] == (tmp_path / "net.py").read_text().count("\n") and facts["parameters"] == 1
    again = CliRunner().invoke(main, args)
    assert again.exit_code == 3 and json.loads(again.output)["code"] == "SX376"
    assert CliRunner().invoke(main, [*args, "--force"]).exit_code == 0


def test_external_data(tmp_path: Path) -> None:
    model, inputs = MADE["one weight in three places"]
    outside = ModelProto.FromString(model.SerializeToString())
    onnx.save(outside, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data")
    net = written(tmp_path / "m.onnx", tmp_path).Model()
    assert not equal(run(net, inputs), SingaBackend.prepare(model, optimize=0).run(inputs))
