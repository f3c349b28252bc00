"""What trains by default is what the framework trained: weights do, and constants of the exported program do not."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser
from tests.helpers.growth_checks import calls
from tests.helpers.paths import TESTS

from singa import autograd, opt, sonnx
from singa._codegen.lowering import lower
from singa._core.tensor import Tensor
from singa._onnx.model import SONNXModel
from singa.cli import main
from singa_backend import ConstantTrainsWarning, InvalidInput
from singa_backend.autodiff import tables
from singa_backend.autodiff.roles import roles
from singa_backend.conform import light_models
from singa_backend.ir.reader import read
from singa_backend.ir.variants import with_weights

F = np.float32
LISTS = sorted(TESTS.glob("**/parameters.json"))
LOW = np.finfo(F).min
CAUSAL = np.where(np.tril(np.ones((4, 4))) > 0, 0, -np.inf)
W, B, ONES, ZEROS = np.linspace(-1, 1, 16).reshape(4, 4), np.linspace(0.1, 0.2, 4), np.ones(4), np.zeros(4)
NOISE = np.random.default_rng(0).normal(size=(16, 4))
ANGLES = np.arange(16)[:, None] * 100.0 ** (-np.arange(4) / 4)


def model(text: str, functions: str = "", x: str = "float[4, 4] x", **states: Any) -> ModelProto:
    made = parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "local": 1]> g ({x}) => (float[4, 4] y) {{ {text} }} {functions}'
    )
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(a, F), n) for n, a in states.items())
    return made


# --- the frameworks' own lists


@cache
def lists() -> list[tuple[Path, frozenset[str]]]:
    """Each file of the exporting scripts, and what comes from parameters of its framework."""
    found = []
    for path in LISTS:
        for name, names in json.loads(path.read_text(encoding="utf-8")).items():
            found.append((path.parent / name, frozenset(names)))
    return found


def test_every_file_has_a_list() -> None:
    """The lists are those of the exporting scripts: a model that was added without one is found."""
    there = {path for path, _ in lists()}
    folders = {p.parent for p in LISTS}
    assert {f.name for f in folders} == {"models", "trained", "pytorch", "tensorflow", "paddle", "paddle26", "sklearn"}
    assert there == {p for f in folders for p in f.glob("*.onnx")} and len(there) > 150
    assert any(names for _, names in lists())


@pytest.mark.parametrize("folder", [p.parent.name for p in LISTS])
def test_exactly_the_parameters_of_the_framework_train(folder: str) -> None:
    wrong = {}
    for path, names in lists():
        if path.parent.name == folder:
            graph = with_weights(read(onnx.load(path)))
            found = roles(graph)
            trains = {n for n, r in found.items() if r.trains()}
            if trains != names & found.keys() or not names <= found.keys():
                wrong[path.name] = {n: found[n].reason for n in trains ^ names if n in found}
            assert all(r.reason for r in found.values())
    assert wrong == {}


VIT = TESTS / "models" / "vit-dynamo-18.onnx"
CLIP = TESTS / "trained" / "clip-dynamo-18.onnx"
ROTARY = TESTS / "trained" / "rotary-dynamo-18.onnx"
WAVES = TESTS / "trained" / "waves-script-17.onnx"


def frameworks(path: Path) -> frozenset[str]:
    return dict(lists())[path]


@pytest.mark.parametrize("path", [VIT, CLIP, ROTARY, WAVES], ids=lambda p: p.stem)
def test_all_routes_train_the_same(path: Path) -> None:
    names = frameworks(path)
    built = SONNXModel(str(path))
    assert {n for n, p in built.get_params().items() if p.stores_grad and p.requires_grad} == names
    assert {n for n, p in sonnx.from_onnx(path).get_params().items() if p.stores_grad} == names
    assert set(sonnx.trainable_report(path).trainable) == names
    assert set(lower(read(onnx.load(path))).parameters) == names
    shown = json.loads(CliRunner().invoke(main, ["check", str(path), "--train", "--json"]).output)["training"]
    others = {*shown["constants"], *shown["statistics"], *shown["settings"]}
    assert set(shown["trainable"]) == names and shown["reasons"].keys() == names | others and not names & others


def test_a_step_as_a_file_and_the_command_change_parameters_only(tmp_path: Path) -> None:
    names = frameworks(VIT)
    step = sonnx.to_training_onnx(str(VIT), "softmax_cross_entropy", opt.SGD(0.1))
    assert sonnx.step_pairs(step).keys() - {"lr_value", "step_counter"} == names
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(4, 3, 32, 32)).astype(F), y=rng.integers(0, 10, 4))
    out = tmp_path / "o.onnx"
    done = CliRunner().invoke(main, ["train", str(VIT), "--data", str(tmp_path / "d.npz"), "--lr", "0.1", "-o", str(out)])
    assert done.exit_code == 0, done.output
    before, after = ({t.name: numpy_helper.to_array(t) for t in onnx.load(p).graph.initializer} for p in (VIT, out))
    changed = {n for n, a in before.items() if not np.array_equal(a, after[n])}
    assert before.keys() == after.keys() and changed == names and "val_81" in before.keys() - names


# --- cases

ATTENTION = "q = MatMul(x, w) \n s = Mul(q, scale) \n m = Add(s, mask) \n y = Softmax<axis = -1>(m)"
IF = ("h = MatMul(x, w) \n s = ReduceSum<keepdims = 0>(x) \n z = Constant<value = float {0.0}>() \n c = Greater(s, z)"
      "\n y = If (c) <then_branch = t () => (float[4, 4] p) { p = Mul(h, mask) },"
      " else_branch = e () => (float[4, 4] q) { q = MatMul(h, v) }>")  # fmt: skip
FUNCTION = '<domain: "local", opset_import: ["": 21]> both (a, b, c) => (d) { e = MatMul(a, b) d = Add(e, c) }'

CONSTANTS = {
    "a causal mask": (ATTENTION, {"w": W, "scale": 0.5, "mask": CAUSAL}, {"scale": "1/2", "mask": "-inf"}),
    "a mask of large numbers": (ATTENTION, {"w": W, "scale": 0.5, "mask": np.where(CAUSAL < 0, LOW, 0)},
                                {"scale": "", "mask": "mask"}),
    "a mask of -100, as Swin has it": (ATTENTION, {"w": W, "scale": 0.5, "mask": np.where(CAUSAL < 0, -100, 0)},
                                       {"scale": "", "mask": "mask"}),
    "everything is hidden": ("m = Add(x, mask) \n y = MatMul(m, w)", {"w": W, "mask": np.full((4, 4), LOW)}, {"mask": "mask"}),
    "a mask of 0 and 1": ("h = MatMul(x, w) \n y = Mul(h, keep)", {"w": W, "keep": [1, 0, 1, 1]}, {"keep": "0 and 1"}),
    "one minus a mask": ("o = Sub(one, keep) \n h = MatMul(x, w) \n y = Mul(h, o)", {"w": W, "one": 1, "keep": [0, 1, 0, 0]},
                         {"one": "one number", "keep": "0 and 1"}),
    "a mask that is sliced and moved": (
        "i = Constant<value_ints = [0]>() \n j = Constant<value_ints = [4]>() \n k = Slice(mask, i, j) \n t = Transpose(k)"
        " \n h = Add(x, t) \n y = MatMul(h, w)", {"w": W, "mask": np.vstack([CAUSAL, CAUSAL])}, {"mask": "mask"}),
    "the distances of ALiBi": (
        "h = MatMul(x, w) \n s = Add(h, bias) \n p = Softmax(s) \n y = MatMul(p, w)",
        {"w": W, "bias": -np.abs(np.arange(4)) * 0.25 * np.ones((4, 1))}, {"bias": "equal steps"}),
    "a one-hot table": ("i = Constant<value_ints = [0, 1, 1, 0]>() \n o = Gather(table, i) \n h = Add(x, o) \n y = MatMul(h, w)",
                        {"w": W, "table": np.eye(4)}, {"table": "0 and 1"}),
    "sinusoidal positions": (
        "h = MatMul(x, w) \n i = Constant<value_ints = [0, 1, 2, 3]>() \n p = Gather(table, i) \n y = Add(h, p)",
                             {"w": W, "table": np.hstack([np.sin(ANGLES), np.cos(ANGLES)])[:, ::2]}, {"table": "sines"}),
    "frequencies": ("h = MatMul(f, x) \n t = Cos(h) \n y = MatMul(w, t)", {"w": W, "f": 10.0 ** -np.arange(4).reshape(4, 1)},
                    {"f": "frequencies"}),
    "bounds": ("h = MatMul(x, w) \n y = Clip(h, low, high)", {"w": W, "low": 0, "high": 6}, {"low": "bound", "high": "bound"}),
    "an epsilon": (
        "h = MatMul(x, w) \n q = Mul(h, h) \n s = ReduceMean(q) \n v = Add(s, eps) \n r = Sqrt(v) \n y = Div(h, r)",
        {"w": W, "eps": 1e-5}, {"eps": "1e-05"}),
    "image normalization": ("c = Sub(x, mean) \n d = Div(c, std) \n y = MatMul(d, w)", {"w": W, "mean": B, "std": B + 0.1},
                            {"mean": "mean", "std": "deviation"}),
    "image normalization as a scale and a shift": (
        "c = Mul(x, a) \n d = Add(c, b) \n y = MatMul(d, w)", {"w": W, "a": B, "b": -B}, {"a": "normalizes", "b": "normalizes"}),
    "anchors": ("h = MatMul(x, w) \n s = Sigmoid(h) \n e = Mul(s, two) \n p = Mul(e, e) \n y = Mul(p, anchors)",
                {"w": W, "two": 2, "anchors": NOISE[:4]}, {"two": "2", "anchors": "anchors"}),
    "a grid": ("h = MatMul(x, w) \n s = Sigmoid(h) \n y = Add(s, grid)", {"w": W, "grid": np.arange(16).reshape(4, 4) - 0.5},
               {"grid": "equal steps"}),
    "a fill": ("h = MatMul(x, w) \n c = Greater(x, h) \n y = Where(c, h, low)", {"w": W, "low": -1.5}, {"low": "Where"}),
    "the neutral scale of a norm without weights": (
        "h = LayerNormalization(x, val_1) \n y = MatMul(h, w)", {"w": W, "val_1": ONES}, {"val_1": "neutral"}),
    "in a branch": (IF, {"w": W, "v": np.eye(4), "mask": [0, 1, 1, 1]}, {"mask": "0 and 1"}),
    "in a function": ("y = local.both(x, w, mask)", {"w": W, "mask": CAUSAL}, {"mask": "-inf"}),
}  # fmt: skip


def report(text: str, states: dict[str, Any]) -> Any:
    return sonnx.trainable_report(model(text, FUNCTION if "local." in text else "", **states))


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_of_the_program_stay_constant(name: str) -> None:
    text, states, expected = CONSTANTS[name]
    found = report(text, states)
    assert found.constants.keys() == expected.keys()
    assert all(part in found.constants[n] for n, part in expected.items()), found.constants
    assert found.good and found.trainable == [n for n in states if n not in expected]
    assert all(f"stays constant: {n}: " in str(found) for n in expected) and found.to_dict()["constants"] == found.constants
    assert all(f"trains: {n}: " in str(found) for n in found.trainable) and found.reasons.keys() == states.keys()


NORM = (
    "m = ReduceMean(x) \n c = Sub(x, m) \n v = Mul(c, c) \n e = ReduceMean(v) \n r = Sqrt(e) \n n = Div(c, r)"
    " \n g = Mul(n, gamma) \n h = Add(g, beta) \n y = MatMul(h, w)"
)
UNITS = "a = MatMul(x, w) \n n = ReduceL2<keepdims = 1>(a) \n u = Div(a, n) \n t = Transpose(u)"
WEIGHTS = {
    "a fresh bias of zeros": ("h = MatMul(x, w) \n y = Add(h, b)", {"w": W, "b": ZEROS}),
    "a trained bias": ("h = MatMul(x, w) \n y = Add(b, h)", {"w": W, "b": B}),
    "a bias of one output": ("h = MatMul(x, u) \n o = Add(h, b) \n y = MatMul(o, v)",
                             {"u": B.reshape(4, 1), "b": [0], "v": B.reshape(1, 4)}),
    "a forget gate of ones": ("h = MatMul(x, w) \n t = Transpose(h) \n y = Add(t, b)", {"w": W, "b": [0, 0, 1, 1]}),
    "an identity": ("y = MatMul(x, w)", {"w": np.eye(4)}),
    "an identity that is transposed": ("t = Transpose(w) \n y = MatMul(x, t)", {"w": np.eye(4)}),
    "small integers": ("y = Gemm(x, w, b)", {"w": np.arange(16).reshape(4, 4), "b": np.arange(4)}),
    "names of constants": ("h = MatMul(x, val_13) \n y = Add(h, Constant_5)", {"val_13": W, "Constant_5": B}),
    "batch normalization": ("h = BatchNormalization(x, g, b, m, v) \n y = MatMul(h, w)",
                            {"w": W, "g": ONES, "b": ZEROS, "m": ZEROS, "v": ONES}),
    "layer normalization": ("h = LayerNormalization(x, g, b) \n y = MatMul(h, w)", {"w": W, "g": ONES, "b": ZEROS}),
    "layer normalization in parts": (NORM, {"w": W, "gamma": ONES, "beta": ZEROS}),
    "one slope": ("h = PRelu(x, slope) \n y = MatMul(h, w)", {"w": W, "slope": [0.25]}),
    "learned positions": ("h = MatMul(x, w) \n p = Add(h, places) \n y = MatMul(p, w)", {"w": W, "places": NOISE[:4]}),
    "learned positions of zeros": ("h = MatMul(x, w) \n p = Add(h, places) \n y = MatMul(p, w)",
                                   {"w": W, "places": np.zeros((4, 4))}),
    "relative biases of an attention": (
        "h = MatMul(x, w) \n s = Add(h, bias) \n p = Softmax(s) \n y = MatMul(p, w)", {"w": W, "bias": NOISE[:4]}),
    "a learned scale of unit vectors": (f"{UNITS} \n s = MatMul(u, t) \n y = Mul(s, exp)", {"w": W, "exp": 14.28}),
    "a learned scale through Exp": (f"{UNITS} \n s = MatMul(u, t) \n e = Exp(scale) \n y = Mul(s, e)", {"w": W, "scale": 2.6592}),
    "a scale of each channel": ("h = MatMul(x, w) \n s = Mul(h, gamma) \n y = Add(x, s)", {"w": W, "gamma": 0.1 * ONES}),
    "a gain of a branch": ("h = MatMul(x, w) \n s = Mul(h, alpha) \n y = Add(x, s)", {"w": W, "alpha": 0.0}),
    "weights that are quantized": (
        "s = Constant<value = float {0.1}>() \n q = QuantizeLinear(w, s) \n d = DequantizeLinear(q, s) \n y = MatMul(x, d)",
        {"w": W}),
    "a weight norm": ("n = ReduceL2<keepdims = 1>(v) \n u = Div(v, n) \n w = Mul(u, g) \n y = MatMul(x, w)",
                      {"v": NOISE[:4], "g": B.reshape(4, 1)}),
    "in a function": ("y = local.both(x, w, b)", {"w": np.eye(4), "b": [0, 1, 1, 0]}),
    "factors of inputs alone": ("h = Mul(x, a) \n y = Add(h, b)", {"a": B, "b": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_train(name: str) -> None:
    text, states = WEIGHTS[name]
    found = report(text, states)
    assert found.constants == {}
    assert {*found.trainable, *found.blocked, *found.statistics} == set(states)  # QuantizeLinear blocks the gradient of a weight
    assert set(found.statistics) == ({"m", "v"} if "BatchNormalization" in text else set())


def test_published_light_models_train_all() -> None:
    for name in ("shufflenet", "squeezenet"):  # the small ones; the others have layers of the same kinds
        found = sonnx.trainable_report(light_models.model(name))
        assert found.constants == {} and len(found.trainable) > 20


# --- what the values of a table tell

TABLES = {
    "positions in turn": np.stack([np.sin(ANGLES), np.cos(ANGLES)], -1).reshape(16, 8),
    "positions side by side": np.hstack([np.sin(ANGLES), np.cos(ANGLES)])[None],
    "a row of zeros first": np.vstack([np.zeros((1, 8)), np.hstack([np.sin(ANGLES), np.cos(ANGLES)])]),
    "rotary": np.cos(np.hstack([ANGLES, ANGLES]))[None, None],
    "positions of a grid": np.hstack([np.repeat(np.hstack([np.sin(ANGLES), np.cos(ANGLES)]), 16, 0),
                                      np.tile(np.hstack([np.sin(ANGLES), np.cos(ANGLES)]), (16, 1))]),
    "a Fourier transform": np.cos(2 * np.pi * np.outer(np.arange(16), np.arange(16)) / 16)[:, None],
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_tables_of_sines_are_recognized(name: str, dtype: str) -> None:
    assert tables.kind(TABLES[name].astype(dtype)) == tables.WAVES


@pytest.mark.parametrize("seed", range(20))
def test_weights_are_no_tables(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 40, rng.integers(1, 5)))
    for array in (rng.normal(size=shape), rng.uniform(-1, 1, shape), 1e-3 * rng.standard_t(3, size=shape)):
        assert tables.kind(array.astype(F)) in ("", tables.ONE if array.size == 1 else "")
    smooth = np.cumsum(rng.normal(size=(24, 16)), axis=0)  # positions that are like their neighbours
    assert tables.kind(smooth.astype(F)) == "" and tables.kind(np.zeros((24, 16), F)) == tables.UNIFORM


@pytest.mark.parametrize(("value", "text"), [(8**-0.5, "1/sqrt(8)"), (8**-0.25, "1/8**0.25"), (64**0.5, "8"), (0.3, ""), (1, "")])
def test_roots_of_sizes(value: float, text: str) -> None:
    assert tables.root(float(F(value))) == text


def test_the_work_is_proportional_to_the_nodes() -> None:
    """A number that 3,000 nodes read is followed by each of them once: no step is repeated for the nodes before."""
    counts = []
    for n in (300, 3000):
        lines = [f"h{i + 1} = MatMul(h{i}, w) \n e{i} = Clip(h{i + 1}, low)" for i in range(n)]
        graph = read(model("h0 = MatMul(x, w) \n " + "\n".join(lines) + f"\n y = Identity(h{n})", w=W, low=-1.5))
        found = []
        counts.append(len(calls(lambda graph=graph, found=found: found.append(roles(graph)))))
        assert found[0]["w"].trains() and not found[0]["low"].trains()
    assert counts[1] < 11 * counts[0], counts


# --- requests


class Net(SONNXModel):
    def __init__(self, proto: Any, **options: Any) -> None:
        super().__init__(proto, **options)
        self.optimizer = opt.SGD(0.01)

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        y = self.forward(x)[0]
        loss = autograd.mse_loss(y, t)
        self.optimizer(loss)
        return y, loss


def masked() -> ModelProto:
    return model("h = MatMul(x, w) \n y = Mul(h, keep)", w=W, keep=[1, 0, 1, 1])


def changed(net: Net, steps: int = 2) -> tuple[list[str], list[ConstantTrainsWarning]]:
    """Train; return the names of the parameters that change, and the warnings."""
    before = {n: t.data.copy() for n, t in net.get_params().items()}
    net.train()
    rng = np.random.default_rng(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(steps):
            net(*(Tensor(data=rng.normal(size=(4, 4)).astype(F), requires_grad=False) for _ in range(2)))
    moved = [n for n, t in net.get_params().items() if (t.data != before[n]).any()]
    return moved, [w.message for w in seen if isinstance(w.message, ConstantTrainsWarning)]


@pytest.mark.parametrize("graph", [False, True])
def test_a_step_changes_parameters_only(graph: bool) -> None:
    net = Net(masked())
    net.graph(graph)
    assert list(net.get_params()) == ["w", "keep"] == list(net.get_states())  # it is seen, and may be set
    assert changed(net) == (["w"], [])


def test_a_request_wins() -> None:
    assert changed(Net(masked(), train_constants=True)) == (["w", "keep"], [])
    net = Net(masked())
    assert net.unfreeze("keep") == ["keep"] and changed(net) == (["w", "keep"], [])
    net = Net(masked())
    assert net.unfreeze("k*") == ["keep"] and changed(net) == (["w", "keep"], [])
    net = Net(masked(), train_constants=True)
    assert net.freeze("keep") == ["keep"] and changed(net) == (["w"], [])
    net = Net(masked(), train_constants=True)
    assert net.freeze() == ["w", "keep"] == net.unfreeze()


def test_unfreezing_all_restores_the_default() -> None:
    net = Net(masked())
    assert net.freeze("*") == ["w", "keep"] and net.unfreeze("*") == ["w"]
    assert changed(net) == (["w"], [])


@pytest.mark.parametrize("graph", [False, True])
def test_flags_that_a_program_sets_are_named_once(graph: bool) -> None:
    net = Net(masked())
    net.graph(graph)
    for p in net.get_params().values():
        p.requires_grad = p.stores_grad = True
    moved, (warning,) = changed(net)
    assert moved == ["w", "keep"] and warning.parameters == ("keep",) and warning.code == "SX382"
    assert "keep (it is a mask of 0 and 1" in str(warning) and "model.freeze('keep')" in str(warning)
    net.compile([Tensor(data=np.ones((4, 4), F))], is_train=True, use_graph=graph)
    assert changed(net)[1] == []


def test_a_training_step_as_a_file() -> None:
    pairs = sonnx.step_pairs(sonnx.to_training_onnx(masked(), "mse_loss"))
    assert pairs.keys() & {"w", "keep"} == {"w"}
    step = sonnx.to_training_onnx(masked(), "mse_loss", train_constants=True)
    assert {"w", "keep"} <= sonnx.step_pairs(step).keys()
    with pytest.raises(InvalidInput, match="train_constants must be False") as caught:
        sonnx.to_training_onnx(SONNXModel(masked()), "mse_loss", train_constants=True)
    assert caught.value.code == "SX322"
    assert {n for n, p in sonnx.from_onnx(masked(), train_constants=True).get_params().items() if p.stores_grad} == {"w", "keep"}


@pytest.mark.parametrize("constants", [False, True])
def test_copies_and_pickles_keep_what_trains(constants: bool) -> None:
    net = SONNXModel(masked(), train_constants=constants)
    net.unfreeze("keep")
    for made in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert all(p.stores_grad for p in made.get_params().values())
        made.freeze()
        assert made.unfreeze() == (["w", "keep"] if constants else ["w"])
    made = pickle.loads(pickle.dumps(SONNXModel(masked(), train_constants=constants)))
    assert made.get_params()["keep"].stores_grad == constants


def test_exports_keep_constants_and_what_trains() -> None:
    net = SONNXModel(masked())
    net.forward(Tensor(data=np.ones((4, 4), F)))
    proto = sonnx.export(net)
    arrays = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert arrays["keep"].tolist() == [1, 0, 1, 1] and sonnx.trainable_report(proto).trainable == ["w"]
    assert not proto.metadata_props
    net.unfreeze("keep")
    proto = sonnx.export(net)
    assert sonnx.trainable_report(proto).trainable == ["w", "keep"]
    assert sonnx.trainable_report(proto).reasons["keep"] == "the file lists it as a parameter"
    assert json.loads(proto.metadata_props[0].value) == ["keep"]


@pytest.mark.parametrize("text", ["not JSON", '{"w": 1}', "[1, null]", "[" * 100_000])
def test_a_damaged_list_of_parameters_is_ignored(text: str) -> None:
    proto = masked()
    onnx.helper.set_model_props(proto, {"sonnx.parameters": text})
    assert sonnx.trainable_report(proto).trainable == ["w"]


def test_a_name_is_not_a_pattern() -> None:
    made = masked()
    made.graph.initializer[1].name = made.graph.node[1].input[1] = "keep[0]"
    net = Net(made)
    assert net.unfreeze("keep[0]") == ["keep[0]"] and changed(net) == (["w", "keep[0]"], [])
    with pytest.raises(InvalidInput):
        net.freeze("keep[1]")


# --- the commands


def commands(folder: Path) -> tuple[str, list[str]]:
    onnx.save(masked(), folder / "m.onnx")
    rng = np.random.default_rng(0)
    np.savez(folder / "d.npz", x=rng.normal(size=(8, 4)).astype(F), y=rng.normal(size=(8, 4)).astype(F))
    flags = ["--data", str(folder / "d.npz"), "--loss", "mse_loss", "--batch-size", "4"]
    return str(folder / "m.onnx"), flags


def kept(path: Path) -> bool:
    arrays = {t.name: numpy_helper.to_array(t) for t in onnx.load(path).graph.initializer}
    return bool(arrays["keep"].tolist() == [1, 0, 1, 1])


def test_the_commands(tmp_path: Path) -> None:
    file, flags = commands(tmp_path)
    shown = CliRunner().invoke(main, ["check", file, "--train"]).output
    assert "trains: w: it is the weight of MatMul" in shown and "stays constant: keep: it is a mask of 0 and 1" in shown
    out = tmp_path / "o.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConstantTrainsWarning)
        assert CliRunner().invoke(main, ["train", file, *flags, "-o", str(out)]).exit_code == 0 and kept(out)
        done = CliRunner().invoke(main, ["train", file, *flags, "-o", str(out), "--train-constants"])
        assert done.exit_code == 0 and not kept(out)
        done = CliRunner().invoke(main, ["train", file, *flags, "-o", str(out), "--train-constants", "--freeze", "keep"])
        assert done.exit_code == 0 and kept(out)


def test_a_checkpoint_of_an_earlier_version(tmp_path: Path) -> None:
    """It has no entry for constants, which that version trained: it continues with --train-constants, and only so."""
    file, flags = commands(tmp_path)
    path = tmp_path / "run.ckpt"
    flags += ["--checkpoint", str(path)]
    assert CliRunner().invoke(main, ["train", file, *flags, "--train-constants"]).exit_code == 0
    net = SONNXModel(file)
    extra = net.load_states(path)  # states by name
    run = json.loads(np.asarray(extra["fit.run"].data).tobytes())
    assert run["settings"].pop("--train-constants") == "yes"
    extra["fit.run"] = Tensor(data=np.frombuffer(json.dumps(run).encode(), np.uint8).copy(), requires_grad=False)
    path.unlink()
    net.save_states(path, extra)
    refused = CliRunner().invoke(main, ["train", file, *flags, "--resume", "--epochs", "2"])
    said = " ".join(refused.output.split())
    assert refused.exit_code != 0 and "SX381" in said and "--train-constants was yes, got no" in said
    assert "pass --train-constants to continue it" in said
    assert CliRunner().invoke(main, ["train", file, *flags, "--resume", "--epochs", "2", "--train-constants"]).exit_code == 0


def test_a_checkpoint_of_a_model_without_constants_resumes(tmp_path: Path) -> None:
    file, flags = commands(tmp_path)
    onnx.save(model("y = MatMul(x, w)", w=W), file)
    flags += ["--checkpoint", str(tmp_path / "run.ckpt")]
    assert CliRunner().invoke(main, ["train", file, *flags]).exit_code == 0
    stored = np.asarray(SONNXModel(file).load_states(tmp_path / "run.ckpt")["fit.run"].data).tobytes()
    assert "--train-constants" not in json.loads(stored)["settings"]
    assert CliRunner().invoke(main, ["train", file, *flags, "--resume", "--epochs", "2"]).exit_code == 0
