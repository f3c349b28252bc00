"""Writing ONNX: every option, what is refused and how, names, forms, exporters of one's own, and the check of an export."""

from __future__ import annotations

import gc
import tempfile
import warnings
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, checker, helper, numpy_helper, parser
from tests.helpers.paths import TESTS

from singa import autograd, initializer, layer, model, opt, sonnx, tensor
from singa._core import provenance, tape
from singa._core.ops import op
from singa._onnx.fixed_sizes import fixed_sizes
from singa_backend import SingaBackend
from singa_backend.engines.oracle import Oracle
from singa_backend.errors import InvalidInput, InvalidModel, UnsupportedModel
from singa_backend.interpreters.builder import GraphBuilder

F = np.float32
MODELS = sorted((TESTS / "models").glob("*.onnx"))


def values(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(F)


def named(array: Any, name: str) -> tensor.Tensor:
    t = tensor.from_numpy(array)
    t.name = name
    return t


def run(proto: onnx.ModelProto, *arrays: Any) -> list[Any]:
    return list(sonnx.prepare(proto, optimize=0).run(list(arrays)))


class Net(model.Model):
    """A convolution, the two layers that know about training, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = layer.Conv2d(4, 3, padding=1)
        self.bn = layer.BatchNorm2d()
        self.relu = layer.ReLU()
        self.pool = layer.MaxPool2d(2, 2)
        self.flat = layer.Flatten()
        self.drop = layer.Dropout(0.4)
        self.fc = layer.Linear(5)

    def forward(self, x: Any) -> Any:
        return self.fc(self.drop(self.flat(self.pool(self.relu(self.bn(self.conv(x)))))))


def net() -> tuple[Net, tensor.Tensor]:
    x = named(values(2, 3, 8, 8), "x")
    made = Net()
    made.compile([x], is_train=False)
    return made, x


# --- out of tensors


def test_a_function_of_two_inputs_with_two_outputs() -> None:
    a, b = named(values(3, 4), "a"), named(values(3, 4, seed=1), "b")
    total, difference = autograd.add(a, b), autograd.sub(a, b)
    proto = sonnx.to_onnx([a, b], [total, difference], "pair")
    assert proto.graph.name == "pair" and [i.name for i in proto.graph.input] == ["a", "b"]
    for y, z in zip(run(proto, values(3, 4), values(3, 4, seed=1)), (total, difference), strict=True):
        np.testing.assert_array_equal(y, tensor.to_numpy(z))


def test_inputs_are_matched_by_identity_in_the_order_given_and_other_things_are_ignored() -> None:
    xs = [named(values(2, seed=i), f"x{i}") for i in range(12)]
    y = xs[11]
    for x in xs[:11]:
        y = autograd.add(autograd.mul(y, x), x)
    given: list[Any] = [xs[0], "dropped", *xs[1:], 3.0, ()]
    proto = sonnx.to_onnx(given, y)
    assert [i.name for i in proto.graph.input] == [f"x{i}" for i in range(12)] and len(given) == 15
    np.testing.assert_array_equal(run(proto, *(values(2, seed=i) for i in range(12)))[0], tensor.to_numpy(y))


def test_what_an_operator_made_may_be_an_input() -> None:
    x = named(values(3), "x")
    middle = autograd.relu(x)
    y = autograd.exp(middle)
    proto = sonnx.to_onnx([middle], [y], input_names=["middle"])
    assert [n.op_type for n in proto.graph.node] == ["Exp"]


def test_nodes_and_values_are_called_as_singa_calls_them() -> None:
    x = named(values(3), "x")
    proto = sonnx.to_onnx([x], [autograd.relu(autograd.relu(x))])
    assert [n.name for n in proto.graph.node] == ["Relu#0", "Relu#1"]
    assert list(proto.graph.node[1].input) == ["Relu#0:0"]


@pytest.mark.parametrize("training", [False, True])
def test_tensors_know_where_they_came_from_in_both_modes(training: bool) -> None:
    m, x = net()
    m.train(training)
    y = m.forward(x)
    proto = sonnx.to_onnx([x], [y])
    assert [n.op_type for n in proto.graph.node] == ["Conv", "BatchNormalization", "Relu", "MaxPool", "Flatten", "Gemm"]
    assert {t.name for t in proto.graph.initializer} == set(m.get_states())
    m.eval()
    np.testing.assert_allclose(run(proto, tensor.to_numpy(x))[0], tensor.to_numpy(m.forward(x)), rtol=1e-5)


def test_after_a_step_in_graph_mode() -> None:
    m, x = net()
    t = tensor.from_numpy(np.array([1, 2], np.int32))

    def train_one_batch(x: Any, t: Any) -> Any:
        out = m.forward(x)
        loss = autograd.softmax_cross_entropy(out, t)
        optimizer(loss)
        return out, loss

    optimizer = opt.SGD(lr=0.1)
    m.train_one_batch = train_one_batch  # type: ignore[method-assign, assignment]
    m.compile([x], is_train=True, use_graph=True)
    for _ in range(3):
        out, _ = m(x, t)
    proto = sonnx.to_onnx([x], [out])
    m.eval()
    np.testing.assert_allclose(run(proto, tensor.to_numpy(x))[0], tensor.to_numpy(m.forward(x)), rtol=1e-5)


def test_an_output_that_nothing_made_is_refused() -> None:
    x = named(values(3), "x")
    with pytest.raises(InvalidInput, match="must be the result of recorded operators"):
        sonnx.to_onnx([x], [tensor.from_numpy(values(3))])


def test_a_change_in_place_is_refused_and_not_written_as_a_constant() -> None:
    x = named(values(3), "x")
    total = tensor.zeros((3,))
    total += autograd.relu(x)
    with pytest.raises(InvalidInput, match="in place"):
        sonnx.to_onnx([x], [autograd.exp(total)])
    total.copy_from_numpy(values(3))  # from outside: a leaf again
    assert len(sonnx.to_onnx([x], [autograd.add(total, x)]).graph.initializer) == 1


@pytest.mark.parametrize(
    "fill",
    [
        initializer.eye,
        initializer.orthogonal,
        lambda t: tensor.copy_from_numpy(t, np.eye(2)),
        lambda t: tensor.copy_data_to_from(t, tensor.from_numpy(values(4)), 4),
        lambda t: tensor.copy_data_to_from(t, tensor.from_numpy(values(4)), 2, 1),
    ],
)
def test_what_is_written_into_a_tensor_is_exported_and_not_what_it_was_before(fill: Any) -> None:
    x = named(values(3, 2), "x")
    w = tensor.zeros_like(tensor.from_numpy(values(2, 2)))
    fill(w)
    np.testing.assert_array_equal(run(sonnx.to_onnx([x], [op.Add(x, op.MatMul(x, w))]), values(3, 2))[0],
                                  tensor.to_numpy(op.Add(x, op.MatMul(x, w))))  # fmt: skip
    assert np.abs(tensor.to_numpy(w)).max() > 0


@pytest.mark.parametrize("graph", [False, True])
def test_a_parameter_that_an_operator_made_is_exported_as_it_has_become(graph: bool) -> None:
    class Net(model.Model):
        def __init__(self) -> None:
            super().__init__()
            self.w = tensor.from_numpy(values(2, 2)) * 0.5
            self.w.stores_grad = self.w.requires_grad = True

        def forward(self, x: Any) -> Any:
            return op.MatMul(x, self.w)

        def train_one_batch(self, x: Any) -> Any:  # type: ignore[override]
            opt.SGD(lr=0.1)(autograd.mse_loss(self.forward(x), op.full_like(x, 0)))

    x = named(values(3, 2), "x")
    net = Net()
    net.graph(graph)
    for _ in range(3):
        net(x)
    net.eval()
    y = net.forward(x)
    np.testing.assert_allclose(run(sonnx.to_onnx([x], [y]), values(3, 2))[0], tensor.to_numpy(y), rtol=1e-5)


def test_a_state_that_is_fed_back_for_ever_does_not_grow() -> None:
    from singa._core import provenance

    x = tensor.from_numpy(values(1))
    for _ in range(provenance.LONGEST + 10):
        x = autograd.relu(x)
    assert x._origin is None or x._origin.origin.depth < 100


def test_singas_frontend() -> None:
    x = named(values(3), "x")
    y = autograd.relu(x)
    assert sonnx.SingaFrontend.singa_to_onnx_graph([x], [y], "g").name == "g"
    assert sonnx.SingaFrontend.singa_to_onnx_model([x], [y]).graph.name == "sonnx"
    assert sonnx.SingaFrontend._rename_operators["ReLU"] == "Relu"


# --- options


@pytest.mark.row("E6")
@pytest.mark.parametrize("opset", range(7, 29))
def test_every_opset_has_the_least_ir_version_and_the_same_numbers(opset: int) -> None:
    m, x = net()
    proto = sonnx.export(m, [x], opset=opset)
    assert proto.ir_version == helper.find_min_ir_version_for([helper.make_opsetid("", opset)])
    np.testing.assert_array_equal(run(proto, tensor.to_numpy(x))[0], tensor.to_numpy(m.forward(x)))


@pytest.mark.row("E5")
def test_the_opset_is_raised_as_far_as_the_model_needs() -> None:
    x = named(values(2, 3), "x")
    assert sonnx.to_onnx([x], [op.Gelu(x)]).opset_import[0].version == 18  # composed
    bits = named(np.array([1, 2], np.uint8), "b")
    assert sonnx.to_onnx([bits], [op.BitCast(bits, to=3)]).opset_import[0].version == 26


@pytest.mark.row("E4")
def test_too_old_an_opset_names_the_operator_and_the_least() -> None:
    x = named(values(2, 3), "x")
    with pytest.raises(UnsupportedModel, match=r"Erf cannot be written in opset 8.*the minimum opset is 9"):
        sonnx.to_onnx([x], [op.Erf(x)], opset=8)
    with pytest.raises(InvalidInput, match=r"\[7, "):
        sonnx.to_onnx([x], [op.Erf(x)], opset=6)


@pytest.mark.row("E18")
def test_both_forms() -> None:
    m, x = net()
    inferring = sonnx.export(m, [x])
    training = sonnx.export(m, [x], training=True)
    assert Counter(n.op_type for n in training.graph.node) - Counter(n.op_type for n in inferring.graph.node) == {
        "Dropout": 1, "Constant": 1  # the ratio
    }  # fmt: skip
    norm = next(n for n in training.graph.node if n.op_type == "BatchNormalization")
    assert helper.get_node_attr_value(norm, "training_mode") == 1
    assert not m.training and not tape.training


@pytest.mark.row("E12")
def test_dynamic_axes_and_reshapes_that_follow() -> None:
    x, y = named(values(2, 3, 4), "x"), named(values(2, 12, seed=1), "y")

    def forward(x: Any, y: Any) -> Any:
        flat = autograd.add(x.reshape((x.shape[0], 12)), y)
        return flat.reshape((x.shape[0] * 3, 4))

    proto = sonnx.to_onnx([x, y], [forward(x, y)], dynamic_axes={"x": {0: "batch"}, "y": {0: "batch"}})
    assert proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
    a, b = values(5, 3, 4), values(5, 12)
    np.testing.assert_array_equal(run(proto, a, b)[0], (a.reshape(5, 12) + b).reshape(15, 4))
    with pytest.raises(InvalidInput, match=r"dynamic_axes must name inputs \(.*\), got 'z'"):
        sonnx.to_onnx([x], [autograd.relu(x)], dynamic_axes={"z": [0]})


@pytest.mark.row("E10")
def test_shape_override_is_inferred_through_and_left_alone() -> None:
    x = named(values(1, 4), "x")
    wish = {"x": [7, 4]}
    proto = sonnx.to_onnx([x], [autograd.relu(x)], shape_override=wish)
    assert [d.dim_value for d in proto.graph.output[0].type.tensor_type.shape.dim] == [7, 4] and wish == {"x": [7, 4]}
    inner = sonnx.to_onnx([x], [autograd.relu(autograd.relu(x))], dynamic_axes={"x": [0]}, shape_override={"Relu#0:0": [3, 4]})
    assert [d.dim_value for d in inner.graph.output[0].type.tensor_type.shape.dim] == [3, 4]
    with pytest.raises(InvalidInput, match="shape_override must name values of the graph, got 'nowhere'"):
        sonnx.to_onnx([x], [autograd.relu(x)], shape_override={"nowhere": [1]})


def test_a_sum_over_batches_does_not_hold_them() -> None:
    """Origins know what was read without keeping it: a thousand batches of 400 KB leave about as much as a few."""
    total, alive = tensor.from_numpy(np.zeros(1, F)), []
    for i in range(200):
        batch = tensor.from_numpy(np.full((100, 1000), i, F))
        total = autograd.add(total, autograd.reduce_mean(batch, axes=[0, 1], keepdims=0))
        alive.append(weakref.ref(batch))
    gc.collect()
    assert sum(r() is not None for r in alive) <= provenance.RECENT // 400_000
    with pytest.raises(InvalidInput, match=r"\(float32\[100, 1000\]\) no longer exists"):
        sonnx.to_onnx([], [total])


def test_what_a_forward_makes_for_itself_lives_until_it_is_written() -> None:
    class Masked(model.Model):
        def forward(self, x: Any) -> Any:
            for i in range(3):
                x = autograd.add(x, tensor.from_numpy(np.full((2000, 3000), i, F)))  # 24 MB each
            return x

    x = named(values(1, 3000), "x")
    proto = sonnx.export(Masked(), [x])
    assert {tuple(t.dims) for t in proto.graph.initializer} == {(2000, 3000)}
    np.testing.assert_array_equal(run(proto, values(1, 3000))[0], tensor.to_numpy(Masked().forward(x)))


@pytest.mark.row("E1")
def test_names_metadata_and_initializers_as_inputs() -> None:
    m, x = net()
    proto = sonnx.export(m, [x], input_names=["image"], output_names=["score"], keep_initializers_as_inputs=True, doc="a net",
                         metadata={"author": "nobody"}, model_name="n", extra_opsets=[("my.domain", 3)])  # fmt: skip
    assert [i.name for i in proto.graph.input][:1] == ["image"] and proto.graph.output[0].name == "score"
    assert {i.name for i in proto.graph.input} >= set(m.get_states()) and proto.doc_string == "a net"
    assert {p.key: p.value for p in proto.metadata_props} == {"author": "nobody"} and proto.graph.name == "n"
    assert ("my.domain", 3) in {(o.domain, o.version) for o in proto.opset_import}
    with pytest.raises(InvalidInput, match="extra_opsets"):
        sonnx.export(m, [x], extra_opsets={"my.domain": 3})
    with pytest.raises(InvalidInput, match="input_names"):
        sonnx.export(m, [x], input_names=["a", "b"])


@pytest.mark.row("E1")
def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    m, x = net()
    path = tmp_path / "net.onnx"
    _, report = sonnx.export(m, [x], path, with_report=True, external_data=True)
    assert report.path == str(path) and {p.name for p in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}
    checker.check_model(str(path), full_check=True)
    np.testing.assert_array_equal(
        sonnx.prepare(str(path), optimize=0).run([tensor.to_numpy(x)])[0], tensor.to_numpy(m.forward(x))
    )
    with pytest.raises(UnsupportedModel):
        sonnx.export(m, [x], tmp_path / "other.onnx", opset=7, dynamic_axes=None, training=True)
    assert {p.name for p in tmp_path.iterdir()} == {"net.onnx", "net.onnx.data"}


@pytest.mark.row("E11")
def test_weights_whose_names_differ_by_a_dot_stay_apart(tmp_path: Path) -> None:
    x = named(values(300), "x")
    a, b = named(values(300, seed=1), "a.b"), named(values(300, seed=2), "a_b")
    y = autograd.add(autograd.mul(x, a), b)
    proto = sonnx.to_onnx([x], [y])
    assert {t.name for t in proto.graph.initializer} == {"a.b", "a_b"}
    onnx.save(proto, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    found = sonnx.prepare(str(tmp_path / "m.onnx"), optimize=0).run([values(300)])[0]
    np.testing.assert_array_equal(found, tensor.to_numpy(y))


@pytest.mark.row("E16")
def test_a_shared_weight_stays_one() -> None:
    w = named(values(4, 4), "w")
    x = named(values(2, 4), "x")
    proto = sonnx.to_onnx([x], [autograd.matmul(autograd.matmul(x, w), w)])
    assert [t.name for t in proto.graph.initializer] == ["w"]


@pytest.mark.row("E2")
def test_the_report() -> None:
    x = named(values(2, 3), "x")
    y = op.Clip(op.Softmax(autograd.relu(x), axis=0), 0.1, 0.5)
    _, report = sonnx.to_onnx([x], [y], opset=6 + 5, with_report=True)
    assert report.to_dict() == {
        "operations": {"Clip": 1, "Relu": 1, "Softmax": 1}, "attributes": {"axis": 1},
        "mapped": {"Clip": 1, "Relu": 1, "Softmax": 1}, "unmapped": {}, "exceptions": [], "opset": 11, "ir_version": 6,
        "warnings": [], "path": None, "passes": None,
    }  # fmt: skip
    assert "Softmax                              1" in str(report)


@pytest.mark.row("E1")
def test_passes_clean_what_is_written() -> None:
    x = named(values(2, 3), "x")
    y = autograd.transpose(autograd.transpose(autograd.relu(x), (1, 0)), (1, 0))
    proto, report = sonnx.to_onnx([x], [y], optimize=True, with_report=True)
    assert [n.op_type for n in proto.graph.node] == ["Relu"] and report.passes.changes


@pytest.mark.row("E17")
def test_the_printed_report() -> None:
    x = named(values(2, 3), "x")
    y = op.Clip(op.Softmax(autograd.relu(autograd.relu(x)), axis=0), 0.1, 0.5)
    _, report = sonnx.to_onnx([x], [y], opset=11, with_report=True)
    lines = [line.split() for line in str(report).splitlines()]
    assert lines == [
        ["opset", "11,", "IR", "version", "6"],
        ["operations:", "4"], ["Clip", "1"], ["Relu", "2"], ["Softmax", "1"],
        ["attributes:", "1"], ["axis", "1"],
        ["mapped:", "4"], ["Clip", "1"], ["Relu", "2"], ["Softmax", "1"],
        ["unmapped:", "0"], ["not", "written", "to", "a", "file"],
    ]  # fmt: skip


@pytest.mark.row("E13")
def test_twelve_inputs_keep_their_order() -> None:
    xs = [named(values(2, seed=i), f"in{(7 * i) % 12}") for i in range(12)]
    y = xs[0]
    for x in reversed(xs[1:]):
        y = autograd.add(y, x)
    proto = sonnx.to_onnx(xs, [y])
    assert [v.name for v in proto.graph.input] == [x.name for x in xs]
    np.testing.assert_array_equal(run(proto, *(tensor.to_numpy(x) for x in xs))[0], tensor.to_numpy(y))


@pytest.mark.row("E13")
def test_a_thousand_random_graphs_in_any_order() -> None:
    """Nodes that stand in any order are written so that makers come first; those that stand right stay where they are."""
    rng = np.random.default_rng(0)
    for _ in range(1000):
        count = int(rng.integers(2, 12))
        nodes = []
        for i in range(count):
            a, b = (f"v{int(rng.integers(0, i + 1))}" for _ in range(2))
            nodes.append(helper.make_node("Add", [a, b], [f"v{i + 1}"], name=f"n{i}"))
        info = [helper.make_tensor_value_info(n, 1, [2]) for n in ("v0", f"v{count}")]

        def written(order: Any, nodes: Any = nodes, info: Any = info) -> list[str]:
            graph = helper.make_graph([nodes[i] for i in order], "g", info[:1], info[1:])
            proto = sonnx.convert(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7), 14)
            return [n.name for n in proto.graph.node]  # the checker has seen that makers come first

        sorted_once = written(range(count))
        assert sorted_once == sorted(sorted_once, key=lambda n: int(n[1:]))
        assert sorted(written(rng.permutation(count))) == sorted(sorted_once)


@pytest.mark.row("E16")
@pytest.mark.usefixtures("by_definitions")  # bits are compared with those of the tape
def test_nothing_but_the_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No temporary files: export and import work where the folder for these does not take any."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.setenv(name, str(tmp_path / "there is no such folder"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "there is no such folder"))
    m, x = net()
    sonnx.export(m, [x], tmp_path / "net.onnx")
    again = sonnx.SONNXModel(str(tmp_path / "net.onnx"))
    again.eval()
    np.testing.assert_array_equal(tensor.to_numpy(again.forward(x)[0]), tensor.to_numpy(m.forward(x)))
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.row("E16")
def test_a_tied_embedding_is_one_initializer() -> None:
    class Tied(model.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embed = layer.Embedding(11, 4)

        def forward(self, ids: Any) -> Any:
            return autograd.matmul(self.embed(ids), autograd.transpose(self.embed.W, (1, 0)))

    m, ids = Tied(), named(np.array([[1, 2, 10]]), "ids")
    m.compile([ids], is_train=False)
    proto = sonnx.export(m, [ids])
    (weight,) = proto.graph.initializer
    assert weight.name == "embed.W" and list(weight.dims) == [11, 4]
    np.testing.assert_array_equal(run(proto, tensor.to_numpy(ids))[0], tensor.to_numpy(m.forward(ids)))


@pytest.mark.row("E5")
def test_what_was_raised_runs_elsewhere() -> None:
    x = named(values(2, 3), "x")
    proto = sonnx.to_onnx([x], [op.Range(op.Size(x), 12, 2), op.BitwiseXor(op.Size(x), 3), op.Gelu(x)])
    assert proto.opset_import[0].version == 18
    with Oracle("onnxruntime") as oracle:
        found = oracle.run(proto.SerializeToString(), {"x": values(2, 3)}, timeout=60)
    numbers, bits, _ = found.values()
    assert list(numbers) == [6, 8, 10] and bits == 5


@pytest.mark.row("E18")
def test_both_forms_elsewhere() -> None:
    """The training form with dropout of 0 is a function of its inputs: statistics of the batch, in onnxruntime too.

    Its optimizations turn BatchNormalization in training mode into that of inference, so they are switched off.
    """
    m, x = net()
    m.drop.ratio = 0.0
    inferring, training = sonnx.export(m, [x], opset=15), sonnx.export(m, [x], opset=15, training=True)
    feed = {"x": tensor.to_numpy(x)}
    with Oracle("onnxruntime", optimise=False) as oracle:
        plain, batch = (next(iter(oracle.run(p.SerializeToString(), feed, timeout=60).values())) for p in (inferring, training))
    np.testing.assert_allclose(plain, tensor.to_numpy(m.forward(x)), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(batch, SingaBackend.run_model(training, [feed["x"]])[0], rtol=1e-4, atol=1e-5)
    assert np.abs(plain - batch).max() > 1e-3


# --- what cannot be written


class Cube(autograd.Operator):
    """x³, in Python."""

    def forward(self, x: Any) -> Any:
        return x * x * x

    def backward(self, dy: Any) -> Any:
        raise NotImplementedError


class Root(autograd.Operator):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: Any) -> Any:
        return np.sqrt(np.abs(x) + self.shift).astype(x.dtype)


class Broken(Root):
    pass


@pytest.mark.row("E3")
def test_strict_names_everything_and_lenient_writes_the_rest(tmp_path: Path) -> None:
    x = named(values(2, 3), "x")
    y = _Given().forward(x)
    with pytest.raises(UnsupportedModel) as caught:
        sonnx.export(_Given(), [x], tmp_path / "no.onnx", opset=8)
    text = str(caught.value)
    assert all(name in text for name in ("Cube", "Erf", "BitCast")) and not list(tmp_path.iterdir())
    proto, report = sonnx.to_onnx([x], [y], opset=8, continue_on_error=True, with_report=True)
    assert report.unmapped == Counter(Erf=1, BitCast=2, Cube=1) and report.mapped == Counter(Add=1)
    assert len(report.exceptions) == 4 and len(proto.graph.node) == 5


class _Given(model.Model):
    """A model of operators that opset 8 does not have, and of one that has no exporter."""

    def forward(self, x: Any) -> Any:
        return autograd.add(Cube()(op.Erf(x))[0], op.BitCast(op.BitCast(x, to=6), to=1))


def test_an_exporter_in_onnxs_operators() -> None:
    @sonnx.exporter(Root)
    def _(op: Any, root: Root, x: Any) -> Any:
        return op.Sqrt(op.Add(op.Abs(x), root.shift))

    x = named(values(2, 3), "x")
    y = Root(0.25)(autograd.relu(x))[0]
    for opset in (7, 13, 18):
        found = run(sonnx.to_onnx([x], [y], opset=opset), values(2, 3))[0]
        np.testing.assert_allclose(found, tensor.to_numpy(y), rtol=1e-6)
    with pytest.raises(InvalidInput, match="already has an exporter for opset 7"):
        sonnx.exporter(Root)(lambda op, root, x: x)
    derived = sonnx.to_onnx([x], [Broken(0.25)(x)[0]])  # by the class that it derives from
    assert [n.op_type for n in derived.graph.node] == ["Constant", "Abs", "Add", "Sqrt"]


def test_an_operator_may_have_an_attribute_that_is_called_graph() -> None:
    class Edges(Root):
        def __init__(self) -> None:
            super().__init__(0.25)
            self.graph = {0: [1]}

    @sonnx.exporter(Edges)
    def _(op: Any, edges: Edges, x: Any) -> Any:
        return op.Sqrt(op.Add(op.Abs(x), edges.shift))

    x = named(values(2, 3), "x")
    y = Edges()(x)[0]
    proto = sonnx.to_onnx([x], [y])
    assert proto.opset_import[0].version == 18 and proto.graph.node[-1].name == "Edges#0"
    np.testing.assert_allclose(run(proto, values(2, 3))[0], tensor.to_numpy(y), rtol=1e-6)


class Scaled(autograd.Operator):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Any) -> Any:
        return x * np.float32(self.by)


@sonnx.exporter(Scaled, opset=13, domain="my.domain", function=True)
def _scaled(op: Any, scaled: Scaled, x: Any) -> Any:
    return op.Mul(x, scaled.by)


@sonnx.exporter(Scaled, opset=18, domain="my.domain")
def _scaled_node(op: Any, scaled: Scaled, x: Any) -> Any:
    return {"by": scaled.by}


@pytest.mark.row("E7", "E8")
def test_exporters_by_opset_as_functions_and_as_nodes() -> None:
    x = named(values(2, 3), "x")
    y = autograd.add(Scaled(2.0)(x)[0], Scaled(3.0)(Scaled(2.0)(x)[0])[0])
    proto = sonnx.to_onnx([x], [y], opset=13)
    assert [f.name for f in proto.functions] == ["Scaled", "Scaled_1"]
    np.testing.assert_allclose(run(proto, values(2, 3))[0], tensor.to_numpy(y), rtol=1e-6)
    node = sonnx.to_onnx([x], [Scaled(2.0)(x)[0]], opset=18, extra_opsets=[("my.domain", 4)]).graph.node[0]
    assert node.domain == "my.domain" and helper.get_node_attr_value(node, "by") == 2.0
    with pytest.raises(UnsupportedModel, match="the minimum opset of its exporter is 13"):
        sonnx.to_onnx([x], [y], opset=12)


class Corrupt(autograd.Operator):
    """Its exporter puts together what has another rank."""

    def forward(self, x: Any) -> Any:
        return (x > 0).astype(x.dtype)


@sonnx.exporter(Corrupt)
def _corrupt(op: Any, corrupt: Corrupt, x: Any) -> Any:
    return op.Concat(x, op.Reshape(x, [6]), axis=0)


@pytest.mark.row("E14")
def test_an_exporter_that_writes_nonsense_is_an_error_of_the_export(tmp_path: Path) -> None:
    x = named(values(2, 3), "x")

    class Uses(model.Model):
        def forward(self, x: Any) -> Any:
            return Corrupt()(x)[0]

    for write in (lambda: sonnx.to_onnx([x], [Corrupt()(x)[0]]), lambda: sonnx.export(Uses(), [x], tmp_path / "no.onnx")):
        with pytest.raises(InvalidModel, match="checker refuses"):
            write()
    assert not list(tmp_path.iterdir())
    assert sonnx.to_onnx([x], [Corrupt()(x)[0]], check=False).graph.node[-1].op_type == "Concat"


# --- round trips


@pytest.mark.row("I2")
@pytest.mark.parametrize("path", MODELS, ids=lambda p: p.stem)
def test_in_and_out_is_a_fixed_point(path: Path) -> None:
    """What was written once is written again byte for byte, and returns the file's own outputs bit for bit."""
    first = sonnx.SONNXModel(onnx.load(path))
    first.eval()
    once = sonnx.export(first)
    second = sonnx.SONNXModel(once)
    second.eval()
    assert sonnx.export(second).SerializeToString() == once.SerializeToString()
    assert {n.name for n in once.graph.node} <= {n.name for n in onnx.load(path).graph.node}
    assert set(second.get_params()) == set(first.get_params())  # what was a constant is none of them
    rng = np.random.default_rng(0)
    xs = []
    for v in first.imported.graph.inputs:
        shape = [d if isinstance(d, int) else 2 for d in v.shape or ()]
        drawn = rng.integers(0, 4, shape) if v.dtype is not None and v.dtype.kind in "iu" else rng.standard_normal(shape)
        xs.append(drawn.astype(v.dtype))
    for a, b in zip(sonnx.prepare(onnx.load(path), optimize=0).run(xs), run(once, *xs), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_fine_tuned_model_keeps_its_names() -> None:
    path = next(p for p in MODELS if p.stem == "mobilenetv2-script-17")
    m = sonnx.SONNXModel(onnx.load(path))
    m.imported.parameters["classify.weight"].copy_from_numpy(np.zeros(m.imported.parameters["classify.weight"].shape, F))
    m.eval()
    proto = sonnx.export(m)
    tensors = {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}
    assert not tensors["classify.weight"].any()
    assert [o.name for o in proto.graph.output] == [o.name for o in onnx.load(path).graph.output]


# --- checked exports


class Two(model.Model):
    def forward(self, x: Any) -> Any:
        return [autograd.relu(x), Lying()(x)[0]]


class Lying(autograd.Operator):
    """An operator whose exporter writes something else."""

    def forward(self, x: Any) -> Any:
        return x * np.float32(2)


@sonnx.exporter(Lying)
def _lying(op: Any, lying: Lying, x: Any) -> Any:
    return op.Mul(x, 3.0)


class Reshaped(model.Model):
    """To fixed sizes, or to sizes of which one follows from the batch."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.sizes = sizes

    def forward(self, x: Any) -> Any:
        return autograd.reshape(autograd.relu(x), self.sizes)


@pytest.mark.parametrize(("sizes", "axes", "says"), [
    ([6, 6], {"x": {0: "batch"}}, "axis 0"), ([6, 6], {"x": {0: "n", 1: "m"}}, "axes 0, 1"), ([2, 2, 9], {"x": [0]}, "axis 0"),
    ([-1, 9], {"x": {0: "batch"}}, ""), ([4, 3, 3], {"x": {0: "batch"}}, ""), ([6, 6], {}, ""),
])  # fmt: skip
def test_fixed_sizes_of_an_open_value_are_reported(sizes: list[int], axes: Any, says: str) -> None:
    """4 by 9 values: an open axis is followed where its size, or a multiple of it, occurs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        proto, report = sonnx.export(Reshaped(sizes), [named(values(4, 9), "x")], dynamic_axes=axes, with_report=True)
    told = [w for w in report.warnings if "fixed sizes" in w]
    assert [str(w.message) for w in caught if "fixed sizes" in str(w.message)] == told and len(told) == bool(says)
    if says:
        name = next(n.name for n in proto.graph.node if n.op_type == "Reshape")
        assert told[0].startswith(f"{name!r} (Reshape) has the fixed sizes {sizes}, so {says} of its input 'Relu#0:0'")
    elif axes:
        assert sonnx.run_model(proto, [np.ones((5, 9), F)])[0].size == 45


RELU = autograd.relu
EXPANDED: dict[str, tuple[Any, str]] = {
    "halves of the batch": (lambda x: autograd.reshape(RELU(x), [2, -1]), "(Reshape) has the fixed sizes [2, -1], so axis 0"),
    "a part of the batch": (lambda x: autograd.reshape(RELU(x), [-1, 2, 9]), "(Reshape) has the fixed sizes [-1, 2, 9]"),
    "the rest last": (lambda x: autograd.reshape(RELU(x), [x.shape[0], -1]), ""),
    "the rest first": (lambda x: autograd.reshape(RELU(x), [-1, 3, 3]), ""),
    "expanded": (lambda x: autograd.expand(RELU(x), (x.shape[0], 9)), "(Expand) has the fixed sizes [4, 9], so axis 0"),
    "one more axis": (lambda x: autograd.expand(RELU(x), (2, 1, 1)), ""),
    "a row for each sample": (lambda x: autograd.mul(x, autograd.expand(row(), (x.shape[0], 9))), "of which 4 is the size"),
    "a row, repeated": (lambda x: autograd.mul(x, autograd.tile(row(), (x.shape[0], 1))), "(Tile) has the fixed repeats [4, 1]"),
    "columns, repeated": (lambda x: autograd.tile(RELU(x), (1, 2)), ""),
    "up to the last sample": (lambda x: RELU(x)[1 : x.shape[0]], "(Slice) has the fixed ends [4], so axis 0"),
    "without the last sample": (lambda x: autograd.slice(RELU(x), [0], [-1], [0], [1]), ""),
    "columns": (lambda x: RELU(x)[:, 4:9], ""),
}


def row() -> Any:
    return tensor.from_numpy(np.ones((1, 9), F))


class Applied(model.Model):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize("name", EXPANDED)
def test_constants_that_an_open_size_should_change_are_reported(name: str) -> None:
    """If none is, the file has the values of the model at another size too."""
    function, says = EXPANDED[name]
    net, x = Applied(function), values(4, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        proto, report = sonnx.export(net, [named(x, "x")], dynamic_axes={"x": {0: "batch"}}, with_report=True)
    told = [w for w in report.warnings if "has the fixed" in w]
    assert len(told) == bool(says) and all(says in w for w in told), told
    if not says:
        more = np.concatenate([x, -x[:3]])
        np.testing.assert_array_equal(sonnx.run_model(proto, [more])[0], net.forward(tensor.from_numpy(more)).data)


@pytest.mark.parametrize(("attributes", "target", "told"), [
    ("", [4, 1, 6, 6], 1), ("axes = [2, 3], ", [6, 6], 0), ("axes = [0, -1], ", [4, 6], 1), ("", [8, 1, 3, 3], 0),
])  # fmt: skip
def test_sizes_of_a_resize_that_are_those_of_the_example_are_reported(attributes: str, target: list[int], told: int) -> None:
    proto = parser.parse_model(
        '<ir_version: 10, opset_import: ["": 21]> g (float[n, 1, 3, 3] x) => (float[a, b, c, d] y) '
        f'{{ y = Resize <{attributes}mode = "nearest"> (x, , , sizes) }}'
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array(target), "sizes"))
    found = fixed_sizes(proto, {"x": (4, 1, 3, 3)})
    assert len(found) == told and all("(Resize) has the fixed sizes" in w and "axis 0 of its input 'x'" in w for w in found)


class Fixed(model.Model):
    """Right at a batch of 2 only."""

    def forward(self, x: Any) -> Any:
        return autograd.add(x, tensor.from_numpy(np.arange(x.shape[0], dtype=F).reshape(-1, 1)))


def test_an_export_is_run_beside_onnxruntime(tmp_path: Path) -> None:
    m, x = net()
    proto, check = sonnx.export_and_check(m, [x], tmp_path / "net.onnx", dynamic_axes={"x": {0: "batch"}}, opset=17)
    assert len(check.comparisons) == 8 and max(check.errors.values()) < 1e-4 and proto.ir_version == 8


@pytest.mark.row("E15")
def test_a_fault_in_one_output_or_at_one_size_is_caught() -> None:
    x = named(values(2, 3), "x")
    with pytest.raises(sonnx.ExportMismatch, match="output_1") as caught:
        sonnx.export_and_check(Two(), [x])
    assert {c.output for c in caught.value.check.comparisons if not c.agrees} == {"output_1"}
    with pytest.raises(Exception, match=r"batch 3|broadcast|2 by 3|onnxruntime"):
        sonnx.export_and_check(Fixed(), [x], dynamic_axes={"x": [0]})
    with pytest.raises(InvalidInput):
        sonnx.export_and_check(_Given(), [tensor.from_numpy(values(2))], opset=99)


def test_an_operator_of_ones_own_has_not_the_type_of_its_namesake() -> None:
    builder = GraphBuilder(18)
    x = builder.input("x", helper.make_tensor_type_proto(TensorProto.FLOAT, ["n", 3]))
    assert builder.dtype(builder.call("GreaterOrEqual", [x, x], {}, 1)[0]) == np.bool_
    assert builder.type_of(builder.call("GreaterOrEqual", [x, x], {}, 1, domain="own")[0]) is None
