"""A prepared model in another process: by its file and its hash, or by its bytes, with everything that was changed since."""

from __future__ import annotations

import copy
import hashlib
import os
import pickle
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

import singa_backend
from singa import autograd, layer, opt, sonnx
from singa._core.tensor import Tensor, to_numpy
from singa.device import Device
from singa_backend import errors
from singa_backend.devices import cuda
from singa_backend.devices import device as devices
from singa_backend.errors import DeviceUnavailable, InvalidModel, UnsupportedModel
from singa_backend.ir.declaration import declarations, operator
from singa_backend.limits import Limits
from singa_backend.proto.schemas import declare_schema, schemas

F = np.float32
X = np.random.default_rng(0).standard_normal((4, 8)).astype(F)


def net(width: int = 8) -> ModelProto:
    """Weights of every kind: trained ones, running statistics, a frozen exponent, integers, and one in a subgraph."""
    rng = np.random.default_rng(1)
    arrays = {"w": rng.standard_normal((8, width)).astype(F), "v": rng.standard_normal((width, 3)).astype(F) / width,
              "scale": np.ones(3, F), "bias": np.zeros(3, F), "mean": np.zeros(3, F), "var": np.ones(3, F),
              "two": np.array(2, F), "shape": np.array([-1, 3], np.int64), "yes": np.array(True)}  # fmt: skip
    value = helper.make_tensor_value_info("z", 1, None)
    inner = [helper.make_graph([helper.make_node("Add", ["r", "c"], ["z"])], name, [], [value],
                               [numpy_helper.from_array(np.full(3, c, F), "c")]) for name, c in (("t", 1), ("e", 2))]  # fmt: skip
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["b"]),
        helper.make_node("MatMul", ["b", "v"], ["m"]),
        helper.make_node("BatchNormalization", ["m", "scale", "bias", "mean", "var"], ["n"]),
        helper.make_node("Reshape", ["n", "shape"], ["r"]),
        helper.make_node("If", ["yes"], ["i"], then_branch=inner[0], else_branch=inner[1]),
        helper.make_node("Pow", ["i", "two"], ["y"]),
    ]  # fmt: skip
    graph = helper.make_graph(
        nodes, "net", [helper.make_tensor_value_info("x", 1, ["N", 8])], [helper.make_tensor_value_info("y", 1, ["N", 3])],
        [numpy_helper.from_array(a, n) for n, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


WIDE = 1 << 16
"""A width whose weights are mapped from the file."""


class Net(sonnx.SONNXModel):
    """A model whose weights are also known by other names, with a new layer and an optimizer."""

    def __init__(self, source: Any) -> None:
        super().__init__(source)
        self.tied = self.imported.parameters["v"]
        self.kept = {"some": [self.imported.parameters["w"], 5]}
        self.head = layer.Linear(3)
        self.head.W = self.imported.parameters["v"]
        self.optimizer = opt.SGD(0.1, momentum=0.9)
        self.note = "mine"

    def forward(self, *x: Any, **kwargs: Any) -> Tensor:
        return super().forward(*x, **kwargs)[0]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        y = self.forward(x)
        loss = autograd.mse_loss(y, t)
        self.optimizer(loss)
        return y, loss


SOURCES = {"path": lambda p: p, "bytes": lambda p: p.read_bytes(), "proto": onnx.load}
by_each_source = pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
MAKERS: dict[str, Callable[[Any], Any]] = {
    "backend": singa_backend.prepare, "prepare": sonnx.prepare, "model": sonnx.SONNXModel, "subclass": Net,
    "from_onnx": sonnx.from_onnx, "device": lambda s: singa_backend.prepare(s, "STRICT"),
    "definitions": lambda s: singa_backend.prepare(s, optimize=0),
}  # fmt: skip
by_each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def saved(folder: Path, model: ModelProto, external: bool = False) -> Path:
    path = folder / "net.onnx"
    onnx.save(model, path, save_as_external_data=external, location="net.data", size_threshold=0)
    return path


def outputs(model: Any, x: np.ndarray = X) -> Any:
    """The bits of the outputs, of a rep or of a model."""
    if not isinstance(model, sonnx.SONNXModel):
        return [y.tobytes() for y in model.run([x])]
    made = model.forward(Tensor(data=x))
    return [to_numpy(y).tobytes() for y in (made if isinstance(made, list) else [made])]


def facts(model: Any) -> Any:
    """What an unpickled model has, in the process that has it."""
    rep = model if not isinstance(model, sonnx.SONNXModel) else model.imported.rep
    states = {} if rep is model else {n: (t.requires_grad, to_numpy(t).tobytes()) for n, t in model.get_states().items()}
    return os.getpid(), outputs(model), str(rep.device), rep.limits, rep.options, states


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        yield pool


@by_each_source
@by_each_maker
def test_a_model_computes_the_same_in_another_process(make: Any, source: Any, worker: Any, tmp_path: Path) -> None:
    model = make(source(saved(tmp_path, net())))
    before = outputs(model)
    found = worker.submit(facts, model).result()
    assert found[0] != os.getpid() and found[1:] == facts(model)[1:] and found[1] == before
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(model))))
    assert type(again) is type(model) and facts(again) == facts(model)


@by_each_maker
@pytest.mark.parametrize("external", [False, True], ids=["inside", "external"])
def test_the_pickle_of_a_model_of_a_path_does_not_grow(make: Any, external: bool, worker: Any, tmp_path: Path) -> None:
    sizes, models = [], []
    for width in (8, WIDE):
        folder = tmp_path / f"w{width:06}"
        folder.mkdir()
        models.append(make(saved(folder, net(width), external)))
        outputs(models[-1])
        sizes.append(len(pickle.dumps(models[-1])))
    assert abs(sizes[1] - sizes[0]) < 64 and sizes[1] < 4096
    found = worker.submit(facts, models[1]).result()
    assert found[1:] == facts(models[1])[1:]


def test_a_model_of_a_path_names_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, net())
    monkeypatch.chdir(tmp_path)
    data = pickle.dumps(singa_backend.prepare("net.onnx"))
    monkeypatch.chdir("/")
    assert len(outputs(pickle.loads(data))) == 1


# --- what was changed since


def trained(model: Net) -> Net:
    model.freeze("w")
    model.compile([Tensor(data=X)], is_train=True)
    for _ in range(2):
        model(Tensor(data=X, requires_grad=False), Tensor(data=np.zeros((4, 3), F), requires_grad=False))
    return model


@by_each_source
def test_training_continues_in_another_process(source: Any, worker: Any, tmp_path: Path) -> None:
    model = trained(Net(source(saved(tmp_path, net()))))
    found = pickle.loads(pickle.dumps(model))
    assert facts(found) == facts(model)
    moved = {n for n, t in model.get_states().items() if to_numpy(t).tobytes() != _file_value(tmp_path, n)}
    assert {"v", "mean", "scale"} <= moved and not {"w", "two"} & moved
    assert not found.imported.parameters["w"].requires_grad and found.training and found.note == "mine"
    for m in (model, found):
        m(Tensor(data=X, requires_grad=False), Tensor(data=np.zeros((4, 3), F), requires_grad=False))
    assert facts(found) == facts(model)
    assert worker.submit(facts, found).result()[1:] == facts(found)[1:]


def _file_value(folder: Path, name: str) -> bytes:
    arrays = {t.name: numpy_helper.to_array(t) for t in onnx.load(folder / "net.onnx").graph.initializer}
    return arrays[name].tobytes() if name in arrays else b""


def test_only_the_trained_weights_are_in_the_pickle(tmp_path: Path) -> None:
    model = sonnx.SONNXModel(saved(tmp_path, net(WIDE)))
    outputs(model)
    small = len(pickle.dumps(model))
    v = model.imported.parameters["v"]
    assert v.data.shape == (WIDE, 3)  # the storage was given away, and not written to
    assert len(pickle.dumps(model)) == small
    v.data[5, 1] = 7
    assert 4 * 3 * WIDE <= len(pickle.dumps(model)) - small < 4 * 3 * WIDE + 4096
    found = pickle.loads(pickle.dumps(model))
    assert found.imported.parameters["v"].data[5, 1] == 7 and outputs(found) == outputs(model)
    assert abs(len(pickle.dumps(found)) - len(pickle.dumps(model))) < 64


@pytest.mark.parametrize("write", [
    lambda t: setattr(t, "data", t.data + 1), lambda t: t.copy_from_numpy(to_numpy(t) * 2), lambda t: t.set_value(3.0),
    lambda t: t.to_type(np.float64), lambda t: t.data.fill(2), lambda t: t.gaussian(0, 1),
    lambda t: t.copy_from_numpy(np.ones(t.shape, F)), lambda t: t.copy_from(Tensor(data=np.ones(3, F)), 6),
], ids=["assigned", "copied", "filled", "dtype", "storage", "random", "copied into", "a part"])  # fmt: skip
@pytest.mark.parametrize("external", [False, True], ids=["inside", "external"])
def test_every_way_to_write_a_weight_arrives(write: Any, external: bool, tmp_path: Path) -> None:
    model = sonnx.SONNXModel(saved(tmp_path, net(WIDE), external))
    write(model.get_params()["v"])
    found = pickle.loads(pickle.dumps(model)).get_params()["v"]
    assert found.data.dtype == model.get_params()["v"].data.dtype
    assert to_numpy(found).tobytes() == to_numpy(model.get_params()["v"]).tobytes()


def test_tied_tensors_stay_tied(tmp_path: Path) -> None:
    for source in (saved(tmp_path, net()), net()):
        model = Net(source)
        found = pickle.loads(pickle.dumps(model))
        held = found.imported.parameters
        assert found.tied is held["v"] and found.head.W is held["v"] and found.kept["some"][0] is held["w"]
        assert list(found.get_params()) == list(model.get_params())
        assert isinstance(model.kept["some"][0], Tensor) and model.tied is model.imported.parameters["v"]
        shallow = copy.copy(model)
        assert shallow.tied is model.tied and shallow.imported is model.imported
    alone = pickle.loads(pickle.dumps(model.tied))
    assert alone is not model.tied and to_numpy(alone).tobytes() == to_numpy(model.tied).tobytes()


class Pair(NamedTuple):
    first: Any
    second: Any


def test_tensors_in_containers_of_other_classes_stay_tied(tmp_path: Path) -> None:
    model = Net(saved(tmp_path, net()))
    w = model.imported.parameters["w"]
    model.kept = OrderedDict(w=w, pair=Pair(w, defaultdict(list, some=[w])))  # type: ignore[assignment]
    looped: list[Any] = [w]
    looped.append(looped)
    model.looped = looped
    found = pickle.loads(pickle.dumps(model))
    own, kept = found.imported.parameters["w"], found.kept
    assert type(kept) is OrderedDict and type(kept["pair"]) is Pair and kept["pair"].second["new"] == []
    assert kept["w"] is own and kept["pair"].first is own and kept["pair"].second["some"][0] is own
    assert found.looped[0] is own and model.looped[0] is w


def test_options_arrive(worker: Any, tmp_path: Path) -> None:
    path = saved(tmp_path, net())
    for prepare in (singa_backend.prepare, sonnx.prepare):
        rep = prepare(path, limits=Limits(rank=7, deadline=60.0), threads=3, precision="bf16", optimize=1)
        rep.remark = {"by": "me"}  # type: ignore[attr-defined]
        found = pickle.loads(pickle.dumps(rep))
        assert (found.limits, found.options, found.remark) == (rep.limits, rep.options, {"by": "me"})
        rep.limits = Limits(rank=9)
        for found in (pickle.loads(pickle.dumps(rep)), copy.deepcopy(rep)):
            assert (found.limits.rank, found.options, found.remark) == (9, rep.options, {"by": "me"})
            assert found.remark is not rep.remark  # type: ignore[attr-defined]
        assert pickle.loads(pickle.dumps(prepare(path, deterministic=True))).options.deterministic
    rep.is_graph = True  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(rep)).is_graph


def test_the_default_number_of_threads_is_that_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONNX_NUM_THREADS", "2")
    path = saved(tmp_path, net())
    default, chosen = pickle.dumps(singa_backend.prepare(path)), pickle.dumps(sonnx.prepare(path, threads=2))
    monkeypatch.setenv("SONNX_NUM_THREADS", "5")
    assert pickle.loads(default).options.threads == 5 and pickle.loads(chosen).options.threads == 2
    assert pickle.loads(pickle.dumps(pickle.loads(default))).options.threads == 5


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@by_each_source
def test_other_states_arrive(source: Any, device: str, tmp_path: Path) -> None:
    rep = singa_backend.prepare(source(saved(tmp_path, net())), device)
    other = rep.with_states({"v": rep.device.put(np.ones((8, 3), F))})
    assert outputs(other) != outputs(rep)
    assert outputs(pickle.loads(pickle.dumps(other))) == outputs(other)
    assert other.states["v"].tolist() == np.ones((8, 3)).tolist() != rep.states["v"].tolist()
    assert outputs(pickle.loads(pickle.dumps(rep))) == outputs(rep)


@by_each_source
def test_other_states_of_a_rep_of_tensors_arrive(source: Any, tmp_path: Path) -> None:
    """In a run on arrays and on Tensors, in `states`, in copies and pickles, of a parameter and of an integer."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 8] x) => (float[a, b] y)
    <float[8] v = {1, 1, 1, 1, 1, 1, 1, 1}, int64[2] shape = {-1, 8}> { z = Mul(x, v) \n y = Reshape(z, shape) }"""
    rep = sonnx.prepare(source(saved(tmp_path, parser.parse_model(text))))
    values = {"v": np.full(8, 2, F), "shape": np.array([2, -1])}
    other = rep.with_states(values)
    wanted = (X * 2).reshape(2, -1)
    for made in (
        other,
        pickle.loads(pickle.dumps(other)),
        copy.deepcopy(other),
        pickle.loads(pickle.dumps(copy.deepcopy(other))),
    ):
        assert made.run([X])[0].tolist() == wanted.tolist()
        for training in (False, True):
            autograd.training = training
            assert to_numpy(made.run([Tensor(data=X)])[0]).tolist() == wanted.tolist()
        autograd.training = False
        assert {n: made.states[n].tolist() for n in values} == {n: a.tolist() for n, a in values.items()}
        made.imported.parameters["v"].set_value(3.0)
        assert outputs(made) == [(X * 3).reshape(2, -1).tobytes()]
    assert values["v"].tolist() == [2] * 8 and outputs(rep) == [X.tobytes()] and other.limits is rep.limits


@by_each_source
def test_the_states_of_a_rep_are_the_present_values(source: Any, tmp_path: Path) -> None:
    rep = sonnx.prepare(source(saved(tmp_path, net())))
    rep.imported.parameters["v"].set_value(3.0)
    for made in (rep, pickle.loads(pickle.dumps(rep)), copy.deepcopy(rep)):
        assert made.states["v"].tolist() == np.full((8, 3), 3.0).tolist()
        assert list(made.states) == list(made.graph.states) and not made.states["v"].flags.writeable


def test_large_examples_of_inputs_are_not_in_the_pickle(tmp_path: Path) -> None:
    model = sonnx.SONNXModel(saved(tmp_path, net()))
    x = np.ones((100_000, 8), F)
    outputs(model, x)
    data = pickle.dumps(model)
    assert len(data) < 4096
    assert [v.shape for v in pickle.loads(data).imported.seen] == [x.shape]


def test_weights_that_are_constants(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[n, 2] x) => (float[n, 2] y)
    { w = Constant<value = float[2, 2] {1, 2, 3, 4}>() \n y = MatMul(x, w) }"""
    path = saved(tmp_path, parser.parse_model(text))
    for source in (path, onnx.load(path)):
        model = sonnx.SONNXModel(source)
        model.get_params()["w"].data[0, 0] = 9
        assert outputs(pickle.loads(pickle.dumps(model)), X[:, :2]) == outputs(model, X[:, :2])


# --- the file


def test_a_missing_or_changed_file_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path, net(WIDE), external=True)
    inside = tmp_path / "inside.onnx"
    onnx.save(net(), inside)
    reps = [pickle.dumps(make(p)) for make in (singa_backend.prepare, sonnx.SONNXModel) for p in (path, inside)]
    assert all(pickle.loads(data) for data in reps)
    for changed in (path, tmp_path / "net.data", inside):
        kept = changed.read_bytes()
        for content in (None, kept[:-1] + bytes([kept[-1] ^ 1]), b""):
            changed.unlink()
            if content is not None:
                changed.write_bytes(content)
            failed = 0
            for data in reps:
                try:
                    pickle.loads(data)
                except InvalidModel as error:
                    failed += 1
                    assert error.code == "SX112" and str(changed) in str(error) and "prepare(onnx.load(path))" in error.hint
            assert failed == 2
            changed.write_bytes(kept)
        assert all(pickle.loads(data) for data in reps)  # the same contents in another file


@pytest.mark.parametrize("width", [8, WIDE])
def test_a_file_that_was_replaced_since_it_was_read(width: int, tmp_path: Path) -> None:
    path = saved(tmp_path, net(width))
    models = [make(path) for make in MAKERS.values()]
    before = [outputs(m) for m in models]
    other = net(width)
    other.graph.initializer[1].raw_data = bytes(len(other.graph.initializer[1].raw_data))
    onnx.save(other, tmp_path / "other.onnx")
    os.replace(tmp_path / "other.onnx", path)
    assert [outputs(pickle.loads(pickle.dumps(m))) for m in models] == before  # by value: the old weights
    path.unlink()
    assert [outputs(pickle.loads(pickle.dumps(m))) for m in models] == before


def test_a_folder_in_place_of_the_file_is_reported(tmp_path: Path) -> None:
    path = saved(tmp_path, net())
    data = pickle.dumps(sonnx.prepare(path))
    path.unlink()
    path.mkdir()
    os.close(free := os.dup(0))  # the lowest unused number
    for _ in range(3):
        with pytest.raises(InvalidModel, match="SX112"):
            pickle.loads(data)
    os.close(now := os.dup(0))
    assert now == free


def test_mapped_data_that_were_written_to_are_not_pickled(tmp_path: Path) -> None:
    path = saved(tmp_path, net(WIDE), external=True)
    rep = singa_backend.prepare(path)
    with (tmp_path / "net.data").open("r+b") as file:
        file.write(b"1234")
        os.utime(file.fileno(), (1, 1))
    with pytest.raises(InvalidModel, match=r"net\.data was overwritten"):
        pickle.dumps(rep)


def test_a_file_is_read_once_for_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = hashlib.file_digest

    def counted(file: Any, name: str) -> Any:
        read.append(file.name if isinstance(file.name, str) else os.readlink(f"/proc/self/fd/{file.name}"))
        return real(file, name)

    monkeypatch.setattr(hashlib, "file_digest", counted)
    path = saved(tmp_path, net(WIDE), external=True)
    rep, model = singa_backend.prepare(path), sonnx.SONNXModel(path)
    assert read == []  # preparing reads only what it needs
    for _ in range(3):
        pickle.loads(pickle.dumps((rep, model, sonnx.prepare(path))))
    assert sorted(read) == [str(tmp_path / "net.data"), str(path)]
    data = pickle.dumps(rep)
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)
    pickle.loads(data)
    assert len(read) == 3


def test_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, net())
    source = singa_backend.prepare(path)._source
    assert source is not None and source.digests() == {"": hashlib.sha256(path.read_bytes()).hexdigest()}


# --- devices, operators, copies, errors


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device named CUDA, without CuPy."""
    monkeypatch.setattr(cuda, "check", lambda ordinal: None)
    monkeypatch.setattr(devices.CudaDevice, "namespace", devices.StrictDevice.namespace)
    monkeypatch.setattr(devices.CudaDevice, "active", devices.Device.active)
    monkeypatch.setattr(devices.CudaDevice, "synchronize", devices.Device.synchronize)
    monkeypatch.setattr(devices.CudaDevice, "memory", 1 << 33)
    yield


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("make", [singa_backend.prepare, sonnx.prepare, sonnx.SONNXModel])
@by_each_source
def test_a_model_on_a_gpu_needs_one_there(make: Any, source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(source(saved(tmp_path, net())), "CUDA")
    data = pickle.dumps(model)
    rep = pickle.loads(data)
    assert str((rep if isinstance(rep, singa_backend.SingaRep) else rep.imported.rep).device) == "CUDA"

    def check(ordinal: int) -> None:
        raise cuda.Cause("SX501", "CuPy is not installed", "").error(ordinal)

    monkeypatch.setattr(cuda, "check", check)
    with pytest.raises(DeviceUnavailable, match=r"what was pickled is on the device CUDA: .*CuPy is not installed") as found:
        pickle.loads(data)
    assert "prepare the model on the CPU" in found.value.hint


def test_a_tensor_moved_to_another_device(tmp_path: Path) -> None:
    model = sonnx.SONNXModel(saved(tmp_path, net()))
    model.get_params()["v"].to_device(Device("STRICT"))
    found = pickle.loads(pickle.dumps(model)).get_params()["v"]
    assert str(found.device.backend) == "STRICT" and to_numpy(found).tobytes() == to_numpy(model.get_params()["v"]).tobytes()


FAMILY = """
from singa_backend.ir.declaration import operator
from singa_backend.proto.schemas import declare_schema

declare_schema("Twice", ["x: tensor(float)"], ["y: tensor(float)"], types={}, domain="test.pickling")


@operator("Twice", 1, domain="test.pickling")
def twice(xp, x):
    return x + x
"""


def test_the_module_of_a_custom_operator_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_family.py").write_text(FAMILY)
    monkeypatch.syspath_prepend(tmp_path)
    __import__("a_family")
    text = """<ir_version: 8, opset_import: ["": 17, "test.pickling": 1]> g (float[n, 8] x) => (float[n, 8] y)
    { y = test.pickling.Twice(x) }"""
    path = saved(tmp_path, parser.parse_model(text))
    data = [pickle.dumps(make(s)) for make in (singa_backend.prepare, sonnx.SONNXModel) for s in (path, onnx.load(path))]
    try:
        for d in data:
            _forget()
            assert outputs(pickle.loads(d)) == [(X + X).tobytes()]
        for d in data:
            _forget()
            (tmp_path / "a_family.py").unlink(missing_ok=True)
            with pytest.raises(UnsupportedModel, match="a_family") as found:
                pickle.loads(d)
            assert found.value.code == "SX202"
    finally:
        _forget()


def _forget() -> None:
    sys.modules.pop("a_family", None)
    declarations.pop(("test.pickling", "Twice"), None)
    schemas.pop(("test.pickling", "Twice"), None)


def test_an_operator_of_the_program_itself() -> None:
    declare_schema("Thrice", ["x: tensor(float)"], ["y: tensor(float)"], types={}, domain="test.pickling")

    def thrice(xp: Any, x: Any) -> Any:
        return x + x + x

    thrice.__module__ = "__main__"
    operator("Thrice", 1, domain="test.pickling")(thrice)
    try:
        text = """<ir_version: 8, opset_import: ["": 17, "test.pickling": 1]> g (float[n, 8] x) => (float[n, 8] y)
        { y = test.pickling.Thrice(x) }"""
        data = pickle.dumps(singa_backend.prepare(parser.parse_model(text)))
        assert outputs(pickle.loads(data)) == [(X + X + X).tobytes()]
    finally:
        declarations.pop(("test.pickling", "Thrice"))
        schemas.pop(("test.pickling", "Thrice"))
    with pytest.raises(UnsupportedModel, match="which this process does not declare"):
        pickle.loads(data)


def test_copies_of_a_prepared_model(tmp_path: Path) -> None:
    rep = singa_backend.prepare(saved(tmp_path, net(WIDE)))
    before = outputs(rep)
    os.remove(tmp_path / "net.onnx")  # a copy needs no file
    for made in (copy.copy(rep), copy.deepcopy(rep), copy.deepcopy([rep])[0]):
        assert type(made) is type(rep) and made is not rep and outputs(made) == before
        assert made.options == rep.options and outputs(pickle.loads(pickle.dumps(made))) == before


@pytest.mark.parametrize("make", [sonnx.prepare, Net])
def test_deep_copies_pickle_as_their_originals(make: Any, tmp_path: Path) -> None:
    model = make(saved(tmp_path, net()))
    twin = copy.deepcopy(model)
    parameters = twin.imported.parameters
    parameters["v"].set_value(2.0)
    found = pickle.loads(pickle.dumps((model, twin)))
    assert outputs(found[0]) == outputs(model) and outputs(found[1]) == outputs(twin) != outputs(model)
    if make is Net:
        assert found[1].tied is found[1].imported.parameters["v"]


def subclasses(kind: type) -> Iterator[type]:
    for cls in kind.__subclasses__():
        yield cls
        yield from subclasses(cls)


def test_every_error_reaches_another_process() -> None:
    found = [*subclasses(errors.SonnxError), *subclasses(errors.ParameterWarning)]
    assert len(found) > 12
    for kind in found:
        error: Any = kind.__new__(kind, "text")
        error.__dict__.update(message="text", code="SX999", hint="do this", node="n", parameters=("p",))
        twin = pickle.loads(pickle.dumps(error))
        assert type(twin) is kind and twin.__dict__ == error.__dict__ and twin.args == ("text",)


def fails(rep: Any) -> None:
    rep.run([X[:, :3]])


def test_an_error_of_a_run_reaches_the_caller(worker: Any) -> None:
    with pytest.raises(errors.InvalidInput, match="SX303") as found:
        worker.submit(fails, singa_backend.prepare(net())).result()
    assert found.value.code == "SX303"


def put_outputs(queue: Any, model: Any) -> None:
    queue.put(outputs(model))


def test_a_process_of_multiprocessing(tmp_path: Path) -> None:
    context = get_context("spawn")
    queue = context.Queue()
    rep = sonnx.prepare(saved(tmp_path, net()))
    process = context.Process(target=put_outputs, args=(queue, rep))
    process.start()
    assert queue.get(timeout=120) == outputs(rep)
    process.join(60)
    assert process.exitcode == 0


def test_a_graph_by_value_has_texts_sequences_narrow_floats_and_functions() -> None:
    text = """<ir_version: 10, opset_import: ["": 21, "local": 1]>
    g (float[n, 8] x, seq(float[n]) s, string[m] t) => (float[n, 8] y, float[n] first, string[m] u, bfloat16[n, 8] b)
    { y = local.f(x) \n zero = Constant<value_int = 0>() \n first = SequenceAt(s, zero) \n u = Identity(t)
      b = Cast<to = 16>(x) }
    <domain: "local", opset_import: ["": 21]> f (a) => (b) { c = Constant<value_float = 2.0>() \n b = Mul(a, c) }"""
    rep = singa_backend.prepare(parser.parse_model(text))
    fed = [X, [X[:, 0], X[:, 1]], np.array(["a", "ß"], object)]
    twin = pickle.loads(pickle.dumps(rep))
    assert twin.inputs == rep.inputs and twin.outputs == rep.outputs and twin.inputs[1].type == rep.inputs[1].type
    for a, b in zip(rep.run(fed), twin.run(fed), strict=True):
        assert a.dtype == b.dtype and a.tolist() == b.tolist()
