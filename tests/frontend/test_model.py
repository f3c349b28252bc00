"""Models: a step on the tape and as a graph, states in files, freezing, imported files that train, training steps as files."""

from __future__ import annotations

import copy
import gc
import json
import sys
import weakref
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, checker, helper, numpy_helper, parser
from tests.helpers.growth_checks import calls
from tests.helpers.paths import MODELS

from singa import autograd, layer, opt, sonnx, tensor
from singa._core import provenance
from singa._core.tensor import Tensor
from singa.model import Model
from singa.tape import Operator
from singa_backend import SingaBackend
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput, SonnxError

F = np.float32


class Net(Model):
    """A small convolutional net."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.conv = layer.Conv2d(4, 3, padding=1)
        self.bn = layer.BatchNorm2d()
        self.flat = layer.Flatten()
        self.fc = layer.Linear(3)
        self.drop = drop
        self.rule: Any = opt.SGD(lr=0.05, momentum=0.9)

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.bn(self.conv(x)))
        if self.drop:
            y = autograd.dropout(y, ratio=self.drop)
        return self.fc(self.flat(y))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)
        loss = autograd.softmax_cross_entropy(y, t)
        self.rule(loss)
        return y, loss


def batch(n: int = 8, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    x = Tensor(data=rng.standard_normal((n, 1, 6, 6)).astype(F), requires_grad=False)
    return x, Tensor(data=rng.integers(0, 3, n), requires_grad=False)


def made(drop: float = 0.0, graph: bool = False) -> Net:
    from singa import device

    device.default_device.SetRandSeed(7)
    net = Net(drop)
    net.compile([batch()[0]], is_train=True, use_graph=graph)
    return net


def states(net: Model) -> dict[str, Any]:
    return {n: t.data.copy() for n, t in net.get_states().items()}


@pytest.mark.parametrize("graph", [False, True])
def test_a_step_keeps_no_batch(graph: bool) -> None:
    net, old = made(graph=graph), []
    for seed in range(4):
        x, t = batch(seed=seed)
        old += [weakref.ref(x), weakref.ref(x.data), weakref.ref(t)]
        net(x, t)
    del x, t
    provenance._recent.leaves.clear()
    gc.collect()
    assert [r() for r in old] == [None] * len(old)


def test_a_step_on_the_tape_costs_few_calls() -> None:
    """Checks that only some operands need, and bookkeeping that only some gradients need, must not slow down every operator."""
    net, (x, t) = made(), batch()
    net(x, t)
    assert len(calls(lambda: net(x, t))) < 9_500


def test_names_are_paths() -> None:
    net = made()
    assert list(net.get_params()) == ["conv.W", "conv.b", "bn.scale", "bn.bias", "fc.W", "fc.b"]
    assert set(net.get_states()) - set(net.get_params()) == {"bn.running_mean", "bn.running_var"}


@pytest.mark.parametrize("drop", [0.0, 0.4])
def test_the_graph_has_the_numbers_of_the_tape(drop: float) -> None:
    """Losses, parameters, running statistics and the random stream."""
    on_tape, as_graph = [], []
    for use_graph, losses in ((False, on_tape), (True, as_graph)):
        net = made(drop, use_graph)
        losses += [net(*batch(seed=i))[1].data[0] for i in range(5)]
        assert not net.not_traceable
        losses.append(states(net))
    a, b = on_tape.pop(), as_graph.pop()
    np.testing.assert_allclose(on_tape, as_graph, rtol=1e-6)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_graph_takes_other_shapes_and_new_tensors() -> None:
    net = made(graph=True)
    for n in (8, 8, 8, 5, 5, 5, 8):
        y, loss = net(*batch(n))
        assert y.shape == (n, 3)
        assert loss.shape == (1,)


def test_compile_changes_nothing_but_what_it_makes() -> None:
    net = made()
    before = states(net)
    stream = net.conv.W.device.random_state.data.copy()
    net.compile([batch()[0]], is_train=True)
    after = states(net)
    assert all(np.array_equal(before[n], after[n]) for n in before)
    assert np.array_equal(stream, net.conv.W.device.random_state.data)


@pytest.mark.parametrize("use_graph", [False, True])
def test_resuming_is_exact(use_graph: bool, tmp_path: Path) -> None:
    """Three steps, a file, and three more in a new model give the bits of six steps."""
    whole = made(graph=use_graph)
    for i in range(6):
        whole(*batch(seed=i))
    first = made(graph=use_graph)
    for i in range(3):
        first(*batch(seed=i))
    first.save_states(tmp_path / "s.zip", first.rule.get_states())
    second = made(graph=use_graph)
    aux = second.load_states(tmp_path / "s.zip")
    second.rule.set_states(aux)
    for i in range(3, 6):
        second(*batch(seed=i))
    a, b = states(whole), states(second)
    assert all(np.array_equal(a[n], b[n]) for n in a)


def test_repeats_give_the_same_bits() -> None:
    def run() -> list[Any]:
        net = made(0.3, graph=True)
        return [net(*batch(seed=i))[1].data.tobytes() for i in range(4)]

    first = run()
    assert all(run() == first for _ in range(10))


@pytest.mark.parametrize("use_graph", [False, True])
def test_memory_stays_where_it_is(use_graph: bool) -> None:
    import tracemalloc

    net = made(graph=use_graph)
    x, t = batch()
    for _ in range(5):
        net(x, t)
    tracemalloc.start()
    try:
        seen = []
        for _ in range(2):
            for _ in range(60):
                net(x, t)
            gc.collect()
            sys._clear_type_cache()  # it holds up to 4096 attribute names, which NumPy's C code makes at each look-up
            seen.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert seen[1] - seen[0] < 10_000


@pytest.mark.row("I11")
def test_freezing_by_pattern() -> None:
    net = made(graph=True)
    assert net.freeze("conv.*") == ["conv.W", "conv.b"]
    before = states(net)
    for _ in range(3):
        net(*batch())
    after = states(net)
    assert np.array_equal(before["conv.W"], after["conv.W"])
    assert not np.array_equal(before["fc.W"], after["fc.W"])
    net.unfreeze()
    for _ in range(3):
        net(*batch())
    assert not np.array_equal(before["conv.W"], states(net)["conv.W"])
    with pytest.raises(InvalidInput, match="no parameter matches 'head"):
        net.freeze("head.*")


def test_states_files(tmp_path: Path) -> None:
    net = made()
    path = tmp_path / "net.zip"
    net.save_states(path, {"epoch": Tensor(data=np.array([3]))})
    with zipfile.ZipFile(path) as pack:
        attributes = json.loads(pack.read("states_attr.json"))
    assert attributes["conv.W"] == {"state_type": 0, "shape": [4, 1, 3, 3], "dtype": 0}
    assert attributes["epoch"]["state_type"] == 1
    with pytest.raises(AssertionError, match="exists already"):
        net.save_states(path)
    other = made()
    other.conv.W.data[...] = 0
    assert other.load_states(path)["epoch"].data.tolist() == [3]
    assert np.array_equal(other.conv.W.data, net.conv.W.data)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.zip"]


def test_states_of_another_model_are_refused_and_change_nothing(tmp_path: Path) -> None:
    net = made()
    net.save_states(tmp_path / "a.zip")

    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.more = layer.Linear(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.more(super().forward(x))  # type: ignore[no-any-return]

    other = Other()
    other.compile([batch()[0]])
    before = states(other)
    with pytest.raises(InvalidInput, match=r"lacks more\.W") as caught:
        other.load_states(tmp_path / "a.zip")
    assert caught.value.code == "SX341"
    assert all(np.array_equal(before[n], v) for n, v in states(other).items())
    (tmp_path / "b.zip").write_bytes(b"no zip")
    with pytest.raises(InvalidInput, match=r"b\.zip: File is not a zip file"):
        net.load_states(tmp_path / "b.zip")


def test_a_step_in_python_stays_on_the_tape_and_says_so() -> None:
    class Twice(Operator):
        def forward(self, x: Any) -> Any:
            return 2 * x

        def backward(self, dy: Any) -> Any:
            return 2 * dy

    class Own(Net):
        def forward(self, x: Tensor) -> Tensor:
            return Twice()(super().forward(x))[0]

    net = Own()
    net.compile([batch()[0]], use_graph=True)
    net(*batch())
    with pytest.warns(UserWarning, match="stay on the tape"):
        net(*batch())
    assert "written in Python" in net.not_traceable
    assert net(*batch())[1].shape == (1,)


# --- imported files ---------------------------------------------------------------------------------------------------


def chain() -> ModelProto:
    """x -> Gemm -> BatchNormalization -> Relu -> Dropout -> Gemm."""
    rng = np.random.default_rng(3)
    held = {"w1": rng.standard_normal((4, 6)), "b1": np.zeros(6), "s": np.ones(6), "b": np.zeros(6), "m": np.zeros(6),
            "v": np.ones(6), "w2": rng.standard_normal((6, 3)), "r": np.array(0.5)}  # fmt: skip
    nodes = [
        helper.make_node("Gemm", ["x", "w1", "b1"], ["h"]),
        helper.make_node("BatchNormalization", ["h", "s", "b", "m", "v"], ["n"]),
        helper.make_node("Relu", ["n"], ["a"]), helper.make_node("Dropout", ["a", "r"], ["d"]),
        helper.make_node("Gemm", ["d", "w2"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(nodes, "chain", [helper.make_tensor_value_info("x", 1, ["N", 4])],
                              [helper.make_tensor_value_info("y", 1, ["N", 3])],
                              [numpy_helper.from_array(a.astype(F), n) for n, a in held.items()])  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


class Tuned(sonnx.SONNXModel):
    rule: Any = None

    def train_one_batch(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.forward(x)[0]
        loss = autograd.softmax_cross_entropy(y, t)
        self.rule(loss)
        return y, loss


def data(n: int = 12) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(5)
    return (Tensor(data=rng.standard_normal((n, 4)).astype(F), requires_grad=False),
            Tensor(data=rng.integers(0, 3, n), requires_grad=False))  # fmt: skip


def test_an_imported_model_lists_every_float_initializer() -> None:
    m = Tuned(chain())
    assert list(m.get_params()) == ["w1", "b1", "s", "b", "w2", "r"]
    assert list(m.get_states()) == ["w1", "b1", "s", "b", "m", "v", "w2", "r"]


def test_inference_is_the_backends() -> None:
    m = Tuned(chain())
    m.eval()
    x = data()[0]
    np.testing.assert_allclose(m(x)[0].data, SingaBackend.run_model(chain(), [x.data])[0], rtol=1e-5, atol=1e-6)


def test_training_moves_weights_and_statistics_and_inference_does_not() -> None:
    m = Tuned(chain())
    m.rule = opt.SGD(lr=0.1)
    before = states(m)
    m.train()
    m(*data())
    after = states(m)
    assert {n for n in before if not np.array_equal(before[n], after[n])} == {"w1", "s", "b", "m", "v", "w2"} | (
        {"b1"} if not np.array_equal(before["b1"], after["b1"]) else set())  # fmt: skip
    m.eval()
    kept = states(m)
    m(data()[0])
    assert all(np.array_equal(kept[n], v) for n, v in states(m).items())


@pytest.mark.row("I11")
@pytest.mark.parametrize(("last_layers", "output"), [(-1, "y"), (-2, "d"), (-3, "a"), (-5, "h")])
@pytest.mark.usefixtures("by_definitions")  # a part of the operators runs by them
def test_last_layers(last_layers: int, output: str) -> None:
    m = Tuned(chain())
    m.eval()
    x = data()[0]
    want = SingaBackend.prepare(chain()).run([x.data], aux_output=[output])[output]
    assert np.array_equal(m.forward(x, last_layers=last_layers)[0].data, want)


def test_constants_are_the_weights_of_a_file_without_initializers() -> None:
    """But for a bound (no axes) and a scale (read on the host); a file with initializers keeps its constants as they are."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["": 13]> net (float[n, 4, 2] x) => (float[n, 4, 6] y) {
        w = Constant <value: tensor = float[2, 3] {1, 2, 3, 4, 5, 6}> ()
        low = Constant <value: tensor = float {0.5}> ()
        scales = Constant <value: tensor = float[3] {1, 1, 2}> ()
        h = MatMul (x, w)
        c = Clip (h, low)
        y = Resize <mode = "nearest"> (c, , scales)
    }""")
    m = Tuned(proto)
    assert list(m.get_params()) == ["w"] and sonnx.trainable_report(proto).trainable == ["w"]
    x = np.random.default_rng(2).random((5, 4, 2)).astype(F)
    m.eval()
    np.testing.assert_allclose(m(Tensor(data=x))[0].data, SingaBackend.prepare(proto, optimize=0).run([x])[0], rtol=1e-6)
    m.get_params()["w"].data[...] *= 2
    doubled = np.maximum(x @ np.array([[2, 4, 6], [8, 10, 12]], F), 0.5).repeat(2, axis=2)
    np.testing.assert_allclose(m(Tensor(data=x))[0].data, doubled, rtol=1e-6)
    written = {t.name: numpy_helper.to_array(t) for t in sonnx.export(m).graph.initializer}
    assert np.array_equal(written["w"], [[2, 4, 6], [8, 10, 12]])
    assert [n.op_type for n in proto.graph.node].count("Constant") == 3, "the model that was given is as it was"
    other = copy.deepcopy(m)
    other.get_params()["w"].data[...] = 0
    assert m.get_params()["w"].data.any() and np.unique(other(Tensor(data=x))[0].data) == F(0.5)
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(1, F), "unused"))
    assert list(Tuned(proto).get_params()) == ["unused"]


@pytest.mark.row("I11")
def test_tied_weights_stay_tied() -> None:
    held = numpy_helper.from_array(np.eye(4, dtype=F) * 0.5, "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("MatMul", ["h", "w"], ["y"])]
    graph = helper.make_graph(nodes, "tied", [helper.make_tensor_value_info("x", 1, ["N", 4])],
                              [helper.make_tensor_value_info("y", 1, ["N", 4])], [held])  # fmt: skip
    m = Tuned(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    m.rule = opt.SGD(lr=0.1)
    m.train()
    m(data()[0], Tensor(data=np.zeros(12, np.int64)))
    assert len(m.get_params()) == 1
    assert not np.array_equal(m.get_params()["w"].data, np.eye(4) * 0.5)


def test_an_exported_model_has_the_same_outputs_elsewhere() -> None:
    m = Tuned(chain())
    m.rule = opt.SGD(lr=0.1)
    m.train()
    for _ in range(3):
        m(*data())
    m.eval()
    proto = sonnx.export(m, opset=21)
    checker.check_model(proto, full_check=True)
    assert [o.name for o in proto.graph.output] == ["y"]
    x = data(7)[0]
    with Oracle("onnxruntime") as oracle:
        theirs = oracle.run(proto.SerializeToString(), {"x": x.data})
    np.testing.assert_allclose(theirs["y"], m(x)[0].data, rtol=1e-4, atol=1e-5)


def test_a_training_step_trains_in_onnxruntime_with_the_same_curve() -> None:
    """100 steps, dropout included: any runtime draws the same masks."""
    from singa import device

    device.default_device.SetRandSeed(11)
    m = Tuned(chain())
    m.rule = opt.SGD(lr=0.02, momentum=0.9)
    step = sonnx.to_training_onnx(m, "softmax_cross_entropy", m.rule)
    checker.check_model(step, full_check=True)
    pairs = sonnx.step_pairs(step)
    assert {"w1", "moments.w1", "m", "step_counter", "random_state"} <= set(pairs)
    held = {t.name: numpy_helper.to_array(t) for t in step.graph.initializer if t.name in pairs}
    x, t = data()
    theirs = []
    with Oracle("onnxruntime") as oracle:
        serialized = step.SerializeToString()
        for _ in range(100):
            made = oracle.run(serialized, {"x": x.data, "target": t.data, **held})
            theirs.append(float(made["loss"][0]))
            held = {name: made[after] for name, after in pairs.items()}
    m.train()
    ours = [float(m(x, t)[1].data[0]) for _ in range(100)]
    np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=1e-3)
    assert ours[-1] < ours[0]


def test_bad_labels_are_named() -> None:
    m = Tuned(chain())
    m.rule = opt.SGD(lr=0.1)
    m.train()
    with pytest.raises(InvalidInput, match=r"class numbers must be in \[0, 3\), got 3 to 3") as caught:
        m(data()[0], Tensor(data=np.full(12, 3)))
    assert caught.value.code == "SX335"
    with pytest.raises(InvalidInput, match=r"one label for each row of x, shape \(12,\), got \(5,\)"):
        m(data()[0], Tensor(data=np.zeros(5, np.int64)))


def test_prepare_takes_tensors_and_shows_layers() -> None:
    rep = sonnx.prepare(chain(), device="CPU")
    x = data()[0]
    (y,) = rep.run([x])
    assert isinstance(y, Tensor)
    np.testing.assert_allclose(y.data, rep.run([x.data])["y"], rtol=1e-5, atol=1e-6)
    assert [node.op_type for node, _ in rep.layers] == ["Gemm", "BatchNormalization", "Relu", "Dropout", "Gemm"]
    node, operator = rep.layers[2]
    assert node.getattr("alpha", 5) == 5
    assert np.array_equal(operator(tensor.from_numpy(np.array([-1.0, 2.0], F)))[0].data, [0, 2])


BRANCHES = """<ir_version: 8, opset_import: ["": 17]> net (float[n, 1, 2, 2] x, bool c) => (float[n, 1, 1, 1] y)
<float[1, 1, 1, 1] w> {
    a = Conv (x, w)
    s = If (c) <then_branch = doubled () => (float[n, 1, 2, 2] t) { two = Constant <value_float = 2.0> () t = Mul (a, two) },
                else_branch = kept () => (float[n, 1, 2, 2] e) { e = Identity (a) }>
    size = Shape (s)
    axis = Constant <value_ints = [1]> ()
    one = Constant <value_int = 1> ()
    channels = Gather (size, axis)
    single = Equal (channels, one)
    flat = If (single) <then_branch = squeezed () => (float[n, h, k] u) { u = Squeeze (s, axis) },
                        else_branch = whole () => (float[n, q, h, k] v) { v = Identity (s) }>
    z = Unsqueeze (flat, axis)
    y = AveragePool <kernel_shape = [2, 2]> (z)
}"""


@pytest.mark.parametrize("doubled", [True, False])
def test_branches_train_on_the_tape_and_as_a_graph(doubled: bool) -> None:
    """A branch that uses a constant, and one that exporters write, whose ranks differ: a recorded step takes it when it knows."""

    class Branching(Tuned):
        def train_one_batch(self, x: Tensor, c: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
            y = self.forward(x, c)[0]
            loss = autograd.mse_loss(y, t)
            self.rule(loss)
            return y, loss

    proto = parser.parse_model(BRANCHES)
    proto.graph.initializer.append(numpy_helper.from_array(np.full((1, 1, 1, 1), 0.5, F), "w"))
    x = np.arange(12, dtype=F).reshape(3, 1, 2, 2) / 4
    found = []
    for use_graph in (False, True):
        m = Branching(proto)
        m.rule = opt.SGD(lr=0.01)
        m.train()
        m.graph(use_graph)
        batch = [Tensor(data=d, requires_grad=False) for d in (x, np.array(doubled), np.ones((3, 1, 1, 1), F))]
        found.append([float(m(*batch)[1].data[0]) for _ in range(4)])
        assert not m.not_traceable
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    mean, factor, w = x.mean((1, 2, 3)), 1 + doubled, 0.5  # the same by hand: y = factor * w * mean
    for seen in found[0]:
        off = factor * w * mean - 1
        assert seen == pytest.approx((off**2).mean(), rel=1e-5)
        w -= 0.01 * (2 * off * factor * mean).mean()


LOOPED = """g (float[n,t,4] x) => (float[n,3] y) {
    h0 = Expand(zero, hs) xt = Transpose <perm = [1, 0, 2]>(x) sizes = Shape <start = 0, end = 1>(xt) rounds = Squeeze(sizes)
    h, all = Loop(rounds, go, h0) <body = b (int64 i, bool c, float[n,3] hp) => (bool d, float[n,3] hn, float[n,3] o) {
        d = Identity(c) xi = Gather(xt, i) a = MatMul(xi, W) e = MatMul(hp, U) s = Add(a, e) hn = Tanh(s) o = Identity(hn) }>
    y = Identity(h) }"""


def test_a_recurrent_loop_trains_on_the_tape_and_as_a_graph() -> None:
    """Rounds take their rows by the loop's own counter: ranks that inference loses are known to the rules."""
    proto = parser.parse_model(f'<ir_version: 9, opset_import: ["": 17]> {LOOPED}')
    rng = np.random.default_rng(2)

    def random(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(F)

    held = {"zero": np.zeros((1, 3), F), "W": random(4, 3), "U": random(3, 3), "go": np.array(True), "hs": np.array([2, 3])}
    proto.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in held.items())
    x, t = tensor.from_numpy(random(2, 5, 4)), tensor.from_numpy(np.array([0, 2]))
    losses = {}
    for use_graph in (False, True):
        m = Tuned(proto)
        m.rule = opt.SGD(lr=0.3)
        m.train()
        m.graph(use_graph)
        losses[use_graph] = [float(m(x, t)[1].data.reshape(())) for _ in range(6)]
        assert not m.not_traceable and losses[use_graph][-1] < 0.8 * losses[use_graph][0]
    np.testing.assert_allclose(losses[True], losses[False], rtol=1e-6)


@pytest.mark.row("I11")
@pytest.mark.parametrize("name", ["bert-script-17", "mobilenetv2-script-17", "unet-script-11", "vit-dynamo-23"])
def test_exported_nets_fine_tune(name: str) -> None:
    """From the file alone: the loss falls by half."""

    class Fitted(sonnx.SONNXModel):
        def train_one_batch(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
            y = self.forward(*batch[:-1])[0]
            loss = autograd.mse_loss(y, batch[-1])
            self.rule(loss)
            return y, loss

    m = Fitted(str(MODELS / f"{name}.onnx"))
    m.rule = opt.Adam(lr=0.01)
    held = np.load(MODELS / f"{name.split('-')[0]}.npz")
    xs = [Tensor(data=held[f"x0_{i}"], requires_grad=False) for i in range(len(m.imported.graph.inputs))]
    t = Tensor(data=np.full(held["y0_0"].shape, 0.2, F), requires_grad=False)
    m.train()
    m.graph(True)
    losses = [float(m(*xs, t)[1].data[0]) for _ in range(60)]
    assert min(losses) < 0.5 * losses[0]


# --- files of states that are damaged ---------------------------------------------------------------------------------


def stored(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as pack:
        return {n: pack.read(n) for n in pack.namelist()}


@pytest.mark.parametrize(
    "change",
    [
        lambda facts: facts.update(more={"state_type": 1, "shape": [1 << 40], "dtype": 0}),
        lambda facts: facts.popitem(),
        lambda facts: next(iter(facts.values())).update(dtype=55), lambda facts: next(iter(facts.values())).update(dtype=108),
        lambda facts: next(iter(facts.values())).update(dtype=1), lambda facts: next(iter(facts.values())).update(shape=[-1]),
        lambda facts: next(iter(facts.values())).update(shape="ab"),
        lambda facts: next(iter(facts.values())).update(state_type=7),
        lambda facts: next(iter(facts.values())).update(shape=[1e3]), lambda facts: facts.update(more=[]),
        lambda facts: next(iter(facts.values())).pop("dtype"),
    ],
)  # fmt: skip
def test_states_that_differ_from_their_description_are_refused(change: Any, tmp_path: Path) -> None:
    net = made()
    net.save_states(tmp_path / "a.zip", {"epoch": Tensor(data=[3])})
    parts = stored(tmp_path / "a.zip")
    facts = json.loads(parts["states_attr.json"])
    change(facts)
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as pack:
        pack.writestr("tensor_dict.npz", parts["tensor_dict.npz"])
        pack.writestr("states_attr.json", json.dumps(facts))
    before = states(net)
    with pytest.raises(SonnxError) as caught:
        net.load_states(tmp_path / "b.zip")
    assert caught.value.code in ("SX340", "SX341", "SX603")
    assert all(np.array_equal(before[n], v) for n, v in states(net).items())


def test_states_of_any_name_are_stored_and_strings_are_refused(tmp_path: Path) -> None:
    net = made()
    aux = {n: Tensor(data=np.full(2, i, np.float32)) for i, n in enumerate(["file", "args", "../up", "a.npy"])}
    net.save_states(tmp_path / "a.zip", aux)
    assert {n: t.data.tolist() for n, t in net.load_states(tmp_path / "a.zip").items()} == {
        n: t.data.tolist() for n, t in aux.items()
    }
    with pytest.raises(InvalidInput, match="must be numeric"):
        net.save_states(tmp_path / "b.zip", {"text": Tensor(data=["a"])})
    with pytest.raises(InvalidInput, match="there is no folder"):
        net.save_states(tmp_path / "none" / "b.zip")
    assert [p.name for p in tmp_path.iterdir()] == ["a.zip"]
