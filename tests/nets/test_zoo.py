"""The zoo (tests/zoo): models on singa's own layers, written at several opsets, run at several batch sizes, read back, trained.

Every output is compared with onnxruntime and with `SingaRep`.  The tolerance is 1e-4, relative and absolute: the outputs are
about 1, after up to fifty layers.
"""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper
from tests.helpers.paths import TESTS

from singa import autograd, device, opt, sonnx, tensor
from singa._core import random, tape
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend.engines.oracle import EngineFailure, Oracle
from singa_backend.errors import UnsupportedModel
from singa_backend.proto.schemas import newest

HERE = TESTS / "zoo"
F = np.float32


def _zoo() -> Any:
    spec = importlib.util.spec_from_file_location("zoo", HERE / "__init__.py", submodule_search_locations=[str(HERE)])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


zoo = _zoo()
ZOO = zoo.ZOO
every = pytest.mark.parametrize("name", ZOO)


@pytest.fixture(scope="module")
def last(oracle: Oracle) -> int:
    """The newest opset that onnxruntime takes."""
    x = helper.make_tensor_value_info("x", 1, [1])
    y = helper.make_tensor_value_info("y", 1, [1])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", [x], [y])
    for opset in range(newest(""), 18, -1):
        imports = [helper.make_opsetid("", opset)]
        model = helper.make_model(graph, opset_imports=imports, ir_version=helper.find_min_ir_version_for(imports))
        try:
            oracle.run(model.SerializeToString(), {"x": np.ones(1, F)})
        except EngineFailure:
            continue
        return opset
    raise AssertionError("onnxruntime takes no opset above 18")


@cache
def _built(name: str) -> tuple[Model, list[Tensor]]:
    made: tuple[Model, list[Tensor]] = ZOO[name].built()
    return made


@cache
def exported(name: str, opset: int = 18) -> ModelProto:
    net, xs = _built(name)
    proto: ModelProto = sonnx.export(net, xs, opset=opset, dynamic_axes=_open(name))
    return proto


def built(name: str) -> tuple[Model, list[Tensor]]:
    """A copy: what a test does to it stays there."""
    net, xs = _built(name)
    return copy.deepcopy(net), xs


def _open(name: str) -> dict[str, dict[int, str]]:
    return {n: {0: "batch"} for n in ZOO[name].shapes}


def several(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


# --- out


@pytest.mark.row("E12")
@pytest.mark.parametrize("opset, sizes", [(10, (1, 3, 7)), (13, (3,)), (18, (1, 7)), ("the newest", (3,))])
@every
def test_exported_at_a_batch_of_two_it_runs_at_others(name: str, opset: Any, sizes: tuple[int, ...], oracle: Oracle,
                                                      last: int) -> None:  # fmt: skip
    net, xs = built(name)
    wanted = last if opset == "the newest" else opset
    with tape.by_definitions():  # the nets are random, and magnify what kernels round otherwise
        proto, check = sonnx.export_and_check(net, xs, opset=wanted, dynamic_axes=_open(name), batch_sizes=sizes, seeds=(0,),
                                              rtol=1e-4, atol=1e-4, oracle=oracle)  # fmt: skip
    assert proto.opset_import[0].version == wanted and {o.domain for o in proto.opset_import} == {""}
    assert len(check.comparisons) == 2 * len(sizes) * len(proto.graph.output)
    assert [d.type.tensor_type.shape.dim[0].dim_param for d in proto.graph.input] == ["batch"] * len(xs)


@every
def test_the_newest_opset_of_all(name: str) -> None:
    """onnxruntime may not know it yet: `SingaRep` alone runs it."""
    net, xs = built(name)
    with tape.by_definitions():
        proto, check = sonnx.export_and_check(net, xs, seeds=(0,), engines=("sonnx",), opset=newest(""))
    assert proto.opset_import[0].version == newest("") and len(check.comparisons) == len(proto.graph.output)


@every
def test_below_the_least_opset_the_operator_is_named(name: str) -> None:
    net, xs = built(name)
    entry = ZOO[name]
    assert sonnx.export(net, xs, opset=entry.least, dynamic_axes=_open(name)).opset_import[0].version == entry.least
    if entry.culprit:
        refusal = rf"{entry.culprit} cannot be written in opset {entry.least - 1}.*the minimum opset is {entry.least}"
        with pytest.raises(UnsupportedModel, match=refusal):
            sonnx.export(net, xs, opset=entry.least - 1, dynamic_axes=_open(name))
    else:
        assert entry.least == 7


@every
def test_weights_are_initializers_under_their_names(name: str) -> None:
    """They and no other floats: bounds, factors and anchors are constants, so that a reader of the file does not train them."""
    net, _ = built(name)
    states = net.get_states()
    arrays = {t.name: numpy_helper.to_array(t) for t in exported(name).graph.initializer}
    written = {n: a for n, a in arrays.items() if a.dtype == F}
    assert set(states) == set(written)
    for n, t in states.items():
        np.testing.assert_array_equal(written[n], tensor.to_numpy(t))
    assert set(sonnx.SONNXModel(exported(name)).get_params()) == set(net.get_params())


@pytest.mark.row("E16")
def test_t5_holds_its_tied_embedding_once() -> None:
    proto = exported("T5")
    users = [node.op_type for node in proto.graph.node if "shared.W" in node.input]
    assert sorted(users) == ["Gather", "Gather", "Transpose"]
    assert sum(list(t.dims) == [40, 16] for t in proto.graph.initializer) == 1


# --- out, in, out


@pytest.mark.row("I2")
@pytest.mark.parametrize("name, opset", [*((n, 18) for n in ZOO), ("YOLOv5", 10), ("MobileNetV3", 10), ("MT5", 10)])
def test_out_in_and_out_is_a_fixed_point(name: str, opset: int) -> None:
    """What was written is written again byte for byte, with the same nodes, and computes the same bits."""
    first = exported(name, opset)
    once = sonnx.export(_inferring(first))
    assert sonnx.export(_inferring(once)).SerializeToString() == once.SerializeToString()
    assert [_node(n) for n in once.graph.node] == [_node(n) for n in first.graph.node]
    assert _ends(once) == _ends(first)
    xs = ZOO[name].arrays(3, seed=1)
    for a, b in zip(sonnx.prepare(first).run(xs), sonnx.prepare(once).run(xs), strict=True):
        np.testing.assert_array_equal(a, b)


def _inferring(proto: ModelProto) -> sonnx.SONNXModel:
    m = sonnx.SONNXModel(proto)
    m.eval()
    return m


def _ends(proto: ModelProto) -> list[str]:
    return [v.name for v in (*proto.graph.input, *proto.graph.output)]


def _node(node: onnx.NodeProto) -> tuple[str, str]:
    return node.name, node.op_type


# --- in, and on with training


def loss_of(made: Any, targets: Sequence[Tensor]) -> Tensor:
    """The sum of the mean squared errors of all outputs except the boxes, which are computed from the others."""
    ys = several(made)
    losses = [autograd.mse_loss(y, t) for y, t in zip(ys[len(ys) > 1 :], targets, strict=True)]
    return autograd.add_all(*losses) if len(losses) > 1 else losses[0]


@cache
def targets_of(name: str, batch: int) -> list[Tensor]:
    net, _ = _built(name)
    net.eval()
    ys = several(net.forward(*ZOO[name].tensors(batch)))
    rng = np.random.default_rng(7)
    return [Tensor(data=rng.standard_normal(y.shape).astype(F), requires_grad=False) for y in ys[len(ys) > 1 :]]


class Fitted(sonnx.SONNXModel):
    """An imported net that is trained by `loss_of`."""

    rule: Any = None

    def train_one_batch(self, xs: list[Tensor], ts: list[Tensor]) -> Tensor:
        loss = loss_of(self.forward(*xs), ts)
        self.rule(loss)
        return loss


@every
def test_gradients_after_import_are_those_of_the_model(name: str) -> None:
    """Of the training form: both draw the same masks for dropout, and both normalize by the batch."""
    net, xs = built(name)
    m = Fitted(sonnx.export(net, xs, training=True, dynamic_axes=_open(name)))
    batch = ZOO[name].tensors(4)
    ts = targets_of(name, 4)
    found = []
    for model in (net, m):
        device.default_device.SetRandSeed(3)
        model.train()
        loss = loss_of(model.forward(*batch), ts)
        names = {id(p): n for n, p in model.get_params().items()}
        found.append((float(loss), {names[i]: tensor.to_numpy(g) for i, g in autograd.gradients(loss).items()}))
    (loss, own), (again, imported) = found
    assert set(own) == set(net.get_params()) == set(imported) and again == pytest.approx(loss, rel=1e-6)
    for n, g in own.items():
        np.testing.assert_allclose(imported[n], g, rtol=1e-5, atol=1e-5 * max(float(np.abs(g).max()), 1e-3), err_msg=n)


@every
def test_the_file_trains(name: str) -> None:
    m = Fitted(exported(name))
    m.rule = opt.Adam(lr=5e-4 if m.imported.statistics else 3e-3)  # normalized by eight samples, small steps go far
    xs, ts = ZOO[name].tensors(8), targets_of(name, 8)
    before = {n: tensor.to_numpy(p) for n, p in m.get_params().items() if p.ndim() > 1}
    m.train()
    losses = [float(m(xs, ts)) for _ in range(4)]
    assert np.isfinite(losses).all() and losses[-1] < 0.98 * losses[0], losses
    assert [n for n, b in before.items() if np.array_equal(b, tensor.to_numpy(m.get_params()[n]))] == []


# --- forms


def test_repvgg_fused_is_the_net_of_three_branches(oracle: Oracle) -> None:
    net, xs = built("RepVGG")
    fused = net.deployed(xs[0])  # type: ignore[attr-defined]
    a, b = tensor.to_numpy(net.forward(*xs)), tensor.to_numpy(fused.forward(*xs))
    np.testing.assert_allclose(b, a, rtol=1e-3, atol=1e-3 * np.abs(a).max())
    proto, _ = sonnx.export_and_check(fused, xs, opset=10, dynamic_axes=_open("RepVGG"), atol=1e-4, oracle=oracle)
    assert {n.op_type for n in proto.graph.node} == {"Conv", "Relu", "GlobalAveragePool", "Flatten", "Gemm"}
    assert sum(n.op_type == "Conv" for n in proto.graph.node) == 22


@pytest.mark.parametrize("opset", [10, 13, 18])
def test_t5_with_sentences_of_any_length(opset: int, oracle: Oracle) -> None:
    """The buckets of relative positions are computed in the file: other lengths than that of the export."""
    net, xs = built("T5")
    axes = {"ids": {0: "batch", 1: "source"}, "mask": {0: "batch", 1: "source"}, "targets": {0: "batch", 1: "target"}}
    with pytest.raises(UnsupportedModel, match=r"Where cannot be written in opset 8.*the minimum opset is 9"):
        sonnx.export(net, xs, opset=8, dynamic_axes=axes)
    proto = sonnx.export(net, xs, opset=opset, dynamic_axes=axes)
    rep = sonnx.prepare(proto)
    for batch, source, target in ((1, 30, 25), (3, 4, 6)):
        rng = np.random.default_rng(batch)
        arrays = [rng.integers(0, 40, (batch, source)), np.ones((batch, source), np.int64), rng.integers(0, 40, (batch, target))]
        wanted = tensor.to_numpy(net.forward(*(Tensor(data=a, requires_grad=False) for a in arrays)))
        theirs = oracle.run(proto.SerializeToString(), dict(zip(axes, arrays, strict=True)))
        for got in (rep.run(arrays)[0], theirs[proto.graph.output[0].name]):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.row("E20")
def test_hard_swish_and_gelu_stay_whole_where_the_opset_has_them() -> None:
    def count(name: str, opset: int, kind: str) -> int:
        return sum(n.op_type == kind for n in exported(name, opset).graph.node)

    assert count("MobileNetV3", 13, "HardSwish") == 0 < count("MobileNetV3", 18, "HardSwish")
    net, xs = built("MT5")
    kinds = {n.op_type for n in sonnx.export(net, xs, opset=24).graph.node}
    assert {"Gelu", "RMSNormalization"} <= kinds and count("MT5", 18, "Gelu") == 0


# --- structure

IMAGE, WORDS = {"x": (3, 32, 32)}, {"ids": (4,), "mask": (4,), "targets": (4,)}
PUBLISHED: dict[str, tuple[Any, dict[str, tuple[int, ...]], int]] = {
    "LeNet": (lambda: zoo.classic.LeNet(), {"x": (1, 28, 28)}, 61_706),
    "AlexNet": (lambda: zoo.classic.AlexNet(), {"x": (3, 63, 63)}, 61_100_840 - 35 * 256 * 4096),  # 36 places there, 1 here
    "VGG16": (lambda: zoo.classic.VGG16(), IMAGE, 138_357_544 - 48 * 512 * 4096),  # 49 places there, 1 here
    "SqueezeNet": (lambda: zoo.classic.SqueezeNet(), {"x": (3, 36, 36)}, 1_235_496),
    "ResNet50": (lambda: zoo.residual.ResNet50(), IMAGE, 25_557_032),
    "RepVGG": (lambda: zoo.residual.RepVGG(deploy=True), IMAGE, 8_309_384),
    "InceptionV3": (lambda: zoo.inception.InceptionV3(), {"x": (3, 75, 75)}, 23_834_568),  # without the auxiliary classifier
    "MobileNetV2": (lambda: zoo.mobile.MobileNetV2(), IMAGE, 3_504_872),
    "MobileNetV3": (lambda: zoo.mobile.MobileNetV3(), IMAGE, 2_542_856),
    "ShuffleNetV2": (lambda: zoo.mobile.ShuffleNetV2(), IMAGE, 2_278_604),
    "YOLOv5": (lambda: zoo.yolo.YOLOv5(), IMAGE, 7_235_389),
    "VGG19": (lambda: zoo.classic.VGG19(), IMAGE, 143_667_240 - 48 * 512 * 4096),
    "ResNet18": (lambda: zoo.residual.ResNet18(), IMAGE, 11_689_512),
    "DenseNet121": (lambda: zoo.dense.DenseNet121(), IMAGE, 7_978_856),
    "ShuffleNetV1": (lambda: zoo.mobile.ShuffleNetV1(), IMAGE, 1_393_320 - 24),  # without the bias of the first convolution
    "TinyYOLOv2": (lambda: zoo.yolo.TinyYOLOv2(), IMAGE, 15_867_885 - 2 * 3056),  # without the statistics
    "ArcFace": (lambda: zoo.residual.ArcFace(), {"x": (3, 112, 112)}, 65_156_160),
    "FERPlus": (lambda: zoo.classic.FERPlus(), {"x": (1, 64, 64)}, 8_757_704),
    "SubPixel": (lambda: zoo.classic.SubPixel(), {"x": (1, 12, 10)}, 59_657),
    "T5": (lambda: zoo.t5.T5(40), WORDS, 60_506_624 - (32_128 - 40) * 512),  # small, with a vocabulary of 40
    "MT5": (lambda: zoo.t5.MT5(40, 512, 8, 6, 64, 1024), WORDS, 300_176_768 - 2 * (250_112 - 40) * 512),
}
"""Each at its full width: how it is made, inputs that are large enough, and the number of parameters that is published."""


@every
def test_at_full_width_it_has_as_many_parameters_as_published(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "normal", lambda mean, std, shape, device, dtype: Tensor(shape, device, dtype))
    make, shapes, count = PUBLISHED[name]
    dtype = np.int64 if shapes is WORDS else F
    net = make()
    net.compile([Tensor(data=np.zeros((1, *shape), dtype), requires_grad=False) for shape in shapes.values()], is_train=False)
    assert sum(p.size() for p in net.get_params().values()) == count
