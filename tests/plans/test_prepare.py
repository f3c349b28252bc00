"""What it takes to prepare a model and to make its first plan: how often weights are read and copied, and what is held."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from tests.helpers.plan_checks import model_of
from tests.helpers.recorded_steps import constants_of

from singa import sonnx
from singa_backend import InvalidModel, OperatorError, SingaBackend
from singa_backend.elementwise.compile import available
from singa_backend.kernels import float_products, onednn
from singa_backend.kernels.values import LazyBuffer, LazyConstant, Value
from singa_backend.plans import planner
from singa_backend.plans.fusion import lazy, products
from singa_backend.proto import tensor_data

pytestmark = pytest.mark.skipif(not hasattr(__import__("mmap").mmap, "madvise"), reason="files are not mapped")
NEEDS_ONEDNN = pytest.mark.skipif(onednn.library() is None, reason="weights are packed for oneDNN only")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32) / 8


def convolutions(layers: int = 3) -> onnx.ModelProto:
    """Convolutions of 64 channels, each with a batch normalization: 147 KB of weights each."""
    nodes, constants, value = [], {}, "x"
    for i in range(layers):
        constants[f"w{i}"] = draw(64, 64, 3, 3)
        for name, low in (("scale", 0.5), ("bias", -1), ("mean", -1), ("var", 0.5)):
            constants[f"{name}{i}"] = np.random.default_rng(i).uniform(low, 1, 64).astype(np.float32)
        nodes.append(helper.make_node("Conv", [value, f"w{i}"], [f"c{i}"], pads=[1] * 4))
        normed = [f"c{i}", *(f"{n}{i}" for n in ("scale", "bias", "mean", "var"))]
        nodes += [helper.make_node("BatchNormalization", normed, [f"n{i}"]), helper.make_node("Relu", [f"n{i}"], [f"r{i}"])]
        value = f"r{i}"
    return model_of(nodes, {"x": draw(1, 64, 14, 14)}, [value], constants)


def attention(blocks: int = 2, width: int = 256) -> onnx.ModelProto:
    """Queries, keys and values of one input, an output, a table that is gathered and multiplied, as in a language model."""
    constants: dict[str, Any] = {"table": draw(500, width), "heads": np.array([1, 16, 4, width // 4])}
    constants["flat"] = np.array([1, 16, width])
    nodes, value = [helper.make_node("Gather", ["table", "ids"], ["e"])], "e"
    for i in range(blocks):
        for part, axes in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            constants[f"{part}w{i}"] = draw(width, width)
            nodes += [
                helper.make_node("MatMul", [value, f"{part}w{i}"], [f"{part}m{i}"]),
                helper.make_node("Reshape", [f"{part}m{i}", "heads"], [f"{part}r{i}"]),
                helper.make_node("Transpose", [f"{part}r{i}"], [f"{part}{i}"], perm=axes),
            ]
        constants[f"o{i}"] = draw(width, width)
        nodes += [
            helper.make_node("MatMul", [f"q{i}", f"k{i}"], [f"qk{i}"]),
            helper.make_node("Softmax", [f"qk{i}"], [f"s{i}"]),
            helper.make_node("MatMul", [f"s{i}", f"v{i}"], [f"h{i}"]),
            helper.make_node("Transpose", [f"h{i}"], [f"t{i}"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", [f"t{i}", "flat"], [f"f{i}"]),
            helper.make_node("MatMul", [f"f{i}", f"o{i}"], [f"y{i}"]),
        ]
        value = f"y{i}"
    nodes += [helper.make_node("Transpose", ["table"], ["columns"]), helper.make_node("MatMul", [value, "columns"], ["y"])]
    return model_of(nodes, {"ids": np.zeros((1, 16), np.int64)}, ["y"], constants)


def inputs_of(model: onnx.ModelProto) -> list[np.ndarray]:
    shapes = [[d.dim_value for d in i.type.tensor_type.shape.dim] for i in model.graph.input]
    return [np.arange(16).reshape(1, 16)] if model.graph.input[0].name == "ids" else [draw(*s) for s in shapes]


MODELS = {"convolutions": convolutions, "attention": attention}


def saved(model: onnx.ModelProto, folder: Path, monkeypatch: pytest.MonkeyPatch, odd: int = 0) -> Path:
    """The path of a file whose tensors of 16 KB and more are mapped; `odd` moves them by so many bytes."""
    monkeypatch.setattr("singa_backend.proto.load.SMALL", 0)
    monkeypatch.setattr("singa_backend.proto.load.MAPPED", 1 << 14)
    model = onnx.ModelProto.FromString(model.SerializeToString())
    model.producer_name = "." * (odd + 1)
    path = folder / f"model-{odd}.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def held_by(rep: Any) -> int:
    """The bytes that the plans of a model hold for constants and values, each buffer once."""
    planner = rep._session._planner
    found: dict[int, int] = {}
    for entry in (e for container in planner.shared.containers() for e in container.values()):
        for v in entry if isinstance(entry, (tuple, list)) else (entry,):
            if isinstance(v, Value):
                memory = v.buffer._held if isinstance(v.buffer, LazyBuffer) else v.buffer.memory
                if memory is not None and not tensor_data.is_mapped(memory):
                    found[memory.__array_interface__["data"][0]] = memory.nbytes
            elif isinstance(v, np.ndarray) and not tensor_data.is_mapped(v):
                found[v.__array_interface__["data"][0]] = v.nbytes
    for v in constants_of(planner.graph):
        if isinstance(v, np.ndarray) and not tensor_data.is_mapped(v):
            found[v.__array_interface__["data"][0]] = v.nbytes
    return sum(found.values()) + planner.latest.arena_bytes


@NEEDS_ONEDNN
@pytest.mark.parametrize(("name", "bound"), [("convolutions", 1.15), ("attention", 1.3)])
def test_weights_of_a_file_are_held_once(name: str, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    rep = SingaBackend.prepare(saved(model, tmp_path, monkeypatch))
    rep.run(inputs_of(model))
    weights = sum(a.nbytes for a in rep.states.values())  # Gather reads the table in the file; it is packed for the product
    assert held_by(rep) <= bound * (weights + rep._session._planner.latest.arena_bytes)


@NEEDS_ONEDNN
@pytest.mark.parametrize("name", list(MODELS))
def test_the_first_run_allocates_little_more_than_it_holds(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutions(12) if name == "convolutions" else attention(8)
    path, inputs = saved(model, tmp_path, monkeypatch), inputs_of(model)
    SingaBackend.prepare(path).run(inputs)  # imports, and caches of oneDNN
    gc.collect()
    tracemalloc.start()
    try:
        rep = SingaBackend.prepare(path)
        rep.run(inputs)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    largest = max(a.nbytes for a in rep.states.values())
    assert peak <= held_by(rep) + 4 * largest + (2 << 20)  # a weight that is being scaled or joined; Python's objects
    assert peak <= 1.3 * (sum(a.nbytes for a in rep.states.values()) + rep._session._planner.latest.arena_bytes) + (2 << 20)


@NEEDS_ONEDNN
@pytest.mark.parametrize("name", list(MODELS))
def test_each_weight_is_computed_and_packed_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the packing reads a scaled or joined weight, in any number of runs at these shapes."""
    counts: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(self: Any) -> Any:
            counts[name] += 1
            return original(self)

        monkeypatch.setattr(owner, name, counted)

    count(LazyConstant, "array")
    count(LazyBuffer, "read")
    model = MODELS[name]()
    rep = SingaBackend.prepare(saved(model, tmp_path, monkeypatch))
    for _ in range(3):
        rep.run(inputs_of(model))
    made = [v for v in constants_of(rep._session._planner.graph) if isinstance(v, LazyConstant)]
    assert len(made) == counts["array"] == {"convolutions": 3, "attention": 2}[name]
    most = {"convolutions": 3, "attention": 5}[name]  # attention: joined, after the heads, and the table
    assert counts["read"] <= most  # some instruction sets read weights as they are


@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize("name", list(MODELS))
def test_mapped_weights_have_the_results_of_others(name: str, odd: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS[name]()
    inputs = inputs_of(model)
    whole = SingaBackend.prepare(model)
    rep = SingaBackend.prepare(saved(model, tmp_path, monkeypatch, odd))
    assert sum(map(tensor_data.is_mapped, rep.states.values())) > 2
    for _ in range(2):
        assert np.array_equal(rep.run(inputs)[0], whole.run(inputs)[0])
    value = model.graph.node[3].output[0]  # by the definitions, which read the weights in the file
    assert np.array_equal(rep.run(inputs, aux_output=[value])[value], whole.run(inputs, aux_output=[value])[value])
    assert {n: a.tobytes() for n, a in rep.states.items()} == {n: a.tobytes() for n, a in whole.states.items()}


def test_definitions_read_aligned_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy copies an operand that is not aligned in every call; definitions may run often, as for shapes that are all new."""
    model = convolutions()
    model.graph.output.add().CopyFrom(helper.make_tensor_value_info("w0", onnx.TensorProto.FLOAT, (64, 64, 3, 3)))
    rep, inputs = SingaBackend.prepare(saved(model, tmp_path, monkeypatch, 1)), inputs_of(model)
    first = rep.run(inputs, validate=True)
    states = [a for held in rep._session.states.values() for _, a in held]
    assert not any(map(tensor_data.is_mapped, states)) and all(a.flags.aligned for a in states)
    assert not any(np.may_share_memory(first["w0"], a) for a in (*states, *rep.states.values()))
    assert np.array_equal(first["w0"], rep.run(inputs)["w0"])


def test_new_shapes_pack_and_scale_again_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutions()
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "h"
    rep, whole = SingaBackend.prepare(saved(model, tmp_path, monkeypatch)), SingaBackend.prepare(model)
    for height in (14, 7, 28, 14):
        x = draw(1, 64, height, 14)
        assert np.array_equal(rep.run([x])[0], whole.run([x])[0])


@pytest.mark.parametrize("bad", [np.inf, np.nan, 3e38])
def test_weights_that_do_not_stay_finite_are_not_scaled_later(bad: float) -> None:
    model = convolutions(1)
    w = draw(64, 64, 3, 3)
    w[1, 2, 0, 1] = bad
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w0"))
    scale = next(t for t in model.graph.initializer if t.name == "scale0")
    scale.CopyFrom(numpy_helper.from_array(np.full(64, 8, np.float32), "scale0"))
    x = draw(1, 64, 14, 14)
    fast = SingaBackend.prepare(model).run([x])[0]
    assert np.array_equal(np.isfinite(fast), np.isfinite(SingaBackend.prepare(model, optimize=0).run([x])[0]))


def test_scaled_and_joined_weights_are_those_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound up to which weights are kept changes no bit."""
    for make in (convolutions, attention):
        model = make()
        later = SingaBackend.prepare(model).run(inputs_of(model))[0]
        with monkeypatch.context() as patch:
            patch.setattr(lazy, "LARGE", sys.maxsize)
            patch.setattr(products, "KEPT", sys.maxsize)
            assert np.array_equal(SingaBackend.prepare(model).run(inputs_of(model))[0], later)


def test_a_file_that_is_overwritten_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutions()
    path = saved(model, tmp_path, monkeypatch)
    rep, inputs = SingaBackend.prepare(path), inputs_of(model)
    before = rep.run(inputs)[0]
    with path.open("r+b") as file:
        file.truncate(1000)
    if onednn.library() is not None:
        assert np.array_equal(rep.run(inputs)[0], before)  # the plan has its own copies
    with pytest.raises(InvalidModel, match="was overwritten after the model was prepared") as error:
        rep.run(inputs, aux_output=["c0"])
    assert error.value.code == "SX110"


def test_a_file_that_is_overwritten_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what was cut off would end the process."""
    model = convolutions()
    path = saved(model, tmp_path, monkeypatch)
    rep, inputs = SingaBackend.prepare(path), inputs_of(model)
    os.utime(path, (1, 1))
    monkeypatch.setattr(planner, "fuse", lambda *_: pytest.fail("the passes read weights"))
    reads: list[Callable[[], Any]] = [lambda: rep.run(inputs), lambda: rep.profile(inputs, runs=1), lambda: rep.states]
    for read in reads:
        with pytest.raises(InvalidModel, match="was overwritten"):
            read()


def test_a_file_that_is_replaced_or_removed_stays_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutions()
    path = saved(model, tmp_path, monkeypatch)
    rep, inputs = SingaBackend.prepare(path), inputs_of(model)
    other = tmp_path / "other.onnx"
    other.write_bytes(b"x")
    os.replace(other, path)
    assert np.array_equal(rep.run(inputs)[0], SingaBackend.prepare(model).run(inputs)[0])
    path.unlink()
    assert rep.run(inputs, aux_output=["c0"])["c0"].shape == (1, 64, 14, 14)


def test_the_place_of_data_in_the_file_cannot_be_forged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for offset, length in (("0", "x"), ("-9", str(64 * 64 * 36)), ("", ""), (str(1 << 40), str(64 * 64 * 36)), (None, None)):
        model = convolutions(1)
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=tensor_data.INSIDE)
        for key, value in (("offset", offset), ("length", length)):
            if value is not None:
                tensor.external_data.add(key=key, value=value)
        with pytest.raises(InvalidModel):
            SingaBackend.prepare(saved(model, tmp_path, monkeypatch))
        with pytest.raises(InvalidModel):
            SingaBackend.prepare(model)


def test_a_tensor_of_the_wrong_length_is_reported_as_in_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutions(1)
    model.graph.initializer[0].raw_data += b"1234"
    with pytest.raises(InvalidModel) as one:
        SingaBackend.prepare(model)
    with pytest.raises(InvalidModel) as two:
        SingaBackend.prepare(saved(model, tmp_path, monkeypatch))
    assert (one.value.code, str(one.value)) == (two.value.code, str(two.value)) and one.value.code == "SX104"


@pytest.mark.skipif(bool(available()), reason="products are not machine code")
@pytest.mark.parametrize("transposed", [0, 1])
def test_weights_are_packed_in_parts_whose_pages_are_released(
    transposed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = (250, 80) if transposed else (80, 250)
    node = helper.make_node("Gemm", ["x", "w"], ["y"], transB=transposed)
    model = model_of([node], {"x": draw(1, 80)}, ["y"], {"w": draw(*shape)})
    path, inputs = saved(model, tmp_path, monkeypatch, 3), inputs_of(model)
    expected = SingaBackend.prepare(path).run(inputs)[0]
    released: list[np.ndarray] = []
    monkeypatch.setattr(float_products, "COPIED", 1 << 14)
    monkeypatch.setattr(float_products, "release", released.append)
    rep = SingaBackend.prepare(path)
    assert np.array_equal(rep.run(inputs)[0], expected)
    assert rep._session._planner.latest.first.steps[-1].kernel == "machine.product"
    weight = rep.states["w"].reshape(-1).view(np.uint8)
    assert all(np.may_share_memory(part, weight) for part in released)
    assert sum(part.nbytes for part in released) == weight.nbytes
    assert len(released) == (6 if transposed else 1)  # of 48 rows; columns are everywhere in the file


def private_bytes(rep: Any) -> int:
    """The bytes of the initializers with which a model computes, without those in its file."""
    return sum(a.nbytes for held in rep._session.states.values() for _, a in held if not tensor_data.is_mapped(a))


@NEEDS_ONEDNN
@pytest.mark.parametrize(("name", "bound"), [("convolutions", 1.15), ("attention", 1.3)])
def test_tensors_copy_the_weights_of_a_file_when_they_are_needed(
    name: str, bound: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = MODELS[name]()
    inputs, rep = inputs_of(model), sonnx.prepare(saved(model, tmp_path, monkeypatch))
    first = rep.run(inputs)[0]
    weights = sum(a.nbytes for a in rep.states.values())
    assert held_by(rep) <= bound * (weights + rep._session._planner.latest.arena_bytes)
    assert private_bytes(rep) < weights / 20 and not rep.imported.has_members
    parameters = rep.imported.parameters
    assert private_bytes(rep) >= sum(t.data.nbytes for t in parameters.values()) > weights / 2
    assert np.array_equal(rep.run(inputs)[0], first)
    changed = max(parameters, key=lambda n: parameters[n].data.nbytes)
    parameters[changed].data[...] *= 2
    tensor = next(t for t in model.graph.initializer if t.name == changed)
    tensor.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(tensor), changed))
    expected = sonnx.prepare(model).run(inputs)[0]
    assert not np.array_equal(expected, first)
    assert not np.array_equal(rep.run(inputs)[0], first)  # by the definitions
    assert np.array_equal(rep.run(inputs)[0], expected)
    assert np.array_equal(rep.states[changed], numpy_helper.to_array(tensor))


def test_copies_of_a_model_without_tensors_have_its_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = convolutions()
    inputs, rep = inputs_of(model), sonnx.prepare(saved(model, tmp_path, monkeypatch))
    expected, states = rep.run(inputs)[0], {n: a.tobytes() for n, a in sonnx.prepare(model).states.items()}
    again = pickle.loads(pickle.dumps(rep))
    assert not rep.imported.has_members and not again.imported.has_members
    for made in (again, copy.deepcopy(rep)):
        assert np.array_equal(made.run(inputs)[0], expected)
        assert {n: a.tobytes() for n, a in made.states.items()} == states
        assert not any(a.flags.writeable for a in made.states.values())
        next(iter(made.imported.parameters.values())).data[...] = 0
    assert np.array_equal(rep.run(inputs)[0], expected)
    assert {n: a.tobytes() for n, a in rep.states.items()} == states


def test_threads_make_the_tensors_of_a_model_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rep = sonnx.prepare(saved(convolutions(), tmp_path, monkeypatch))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: rep.imported.parameters, range(8)))
    assert len({id(p) for p in found}) == 1
    inputs = inputs_of(convolutions())
    for seed in range(4):
        rep = sonnx.prepare(saved(convolutions(), tmp_path, monkeypatch, seed))
        tasks = [lambda rep=rep: rep.imported.parameters, *[lambda rep=rep: rep.run(inputs, validate=True)] * 3]
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda task: task(), tasks))  # definitions copy the same weights
        own = {id(t._data) for t in rep.imported.tensors().values()}
        assert own == {id(a) for held in rep._session.states.values() for _, a in held}
    with pytest.raises(InvalidModel, match="was overwritten after the model was prepared") as error:
        path = saved(convolutions(), tmp_path, monkeypatch, 1)
        rep = sonnx.prepare(path)
        os.truncate(path, 1000)
        rep.imported.parameters  # noqa: B018  # which copies the weights
    assert error.value.code == "SX110"


def lookup(indices: int, width: int = 50) -> onnx.ModelProto:
    """Rows of a table of 80 KB; indices below 0 are counted from the end."""
    node = helper.make_node("Gather", ["table", "ids"], ["y"])
    return model_of([node], {"ids": np.zeros((1, indices), np.int64)}, ["y"], {"table": draw(400, width)})


@pytest.mark.parametrize("indices", [7, 300])
@pytest.mark.parametrize("odd", range(4))
@pytest.mark.parametrize("in_bytes", [False, True])
def test_tables_are_read_where_they_are(
    indices: int, odd: int, in_bytes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = lookup(indices)
    path = saved(model, tmp_path, monkeypatch, odd)
    rep, table = SingaBackend.prepare(path.read_bytes() if in_bytes else path), draw(400, 50)
    for seed in range(3):
        ids = np.random.default_rng(seed).integers(-400, 400, (1, indices))
        assert np.array_equal(rep.run([ids])[0], table[ids])
    for bad in (400, -401):
        with pytest.raises(OperatorError, match="an index must be in"):
            rep.run([np.full((1, indices), bad)])
    (source,) = [v.buffer for v in rep._session._planner.shared.mapped.values()]
    assert isinstance(source, LazyBuffer) and source._held is None
    if not in_bytes:
        os.truncate(path, 1000)
        with pytest.raises(InvalidModel, match="was overwritten") as error:
            rep.run([ids])
        assert error.value.code == "SX110"


def test_memory_of_external_data_that_somebody_writes_to_is_not_released(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    big = draw(600, 600)
    model = model_of([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": draw(4, 600)}, ["y"], {"w": big})
    onnx.save_model(model, path, save_as_external_data=True, size_threshold=0, convert_attribute=False)
    rep = SingaBackend.prepare(path)
    mine = tensor_data.owned(rep.states["w"])
    mine[...] = 2
    x = draw(4, 600)
    rep.run([x])
    tensor_data.release(mine)
    assert (mine == 2).all()


@NEEDS_ONEDNN
def test_weights_of_integers_are_packed_once_and_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w = np.random.default_rng(0).integers(-127, 127, (256, 256)).astype(np.int8)
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    model = model_of([node], {"x": np.zeros((4, 256), np.uint8)}, ["y"], {"w": w})
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "n"
    rep = SingaBackend.prepare(saved(model, tmp_path, monkeypatch))
    for rows in (4, 5, 6):
        assert (rep.run([np.full((rows, 256), 3, np.uint8)])[0] == 3 * w.astype(np.int32).sum(0)).all()
    shared = rep._session._planner.shared
    # without VNNI none is packed
    assert sum(isinstance(k[1], tuple) and k[1][0] == "packed" for k in shared.kernels.derived) <= 1
    (source,) = [v.buffer for v in shared.mapped.values()]
    assert isinstance(source, LazyBuffer)
    assert source._held is None or "vnni" not in str([s.kernel for s in rep._session._planner.latest.first.steps])
