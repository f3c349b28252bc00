"""Elementwise nodes that are computed by one kernel on an emulated CUDA device: the bits of single nodes."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fakecuda
import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper

from singa_backend import Limits, SingaBackend
from singa_backend.errors import OperatorError, ResourceExhausted
from singa_backend.ir.run_order import run_order
from singa_backend.runtime import joined
from singa_backend.runtime.alike import Alike, gather
from singa_backend.runtime.joined import Joined, join

pytestmark = pytest.mark.fakecuda
RNG = np.random.default_rng(0)
F = np.float32
node = helper.make_node


def model(nodes: list[NodeProto], outputs: list[str], inputs: dict[str, np.ndarray]) -> ModelProto:
    """A model of these nodes; the outputs have the dtype of x, or bool for t."""
    takes = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), None) for n, x in inputs.items()]
    dtype = helper.np_dtype_to_tensor_dtype(inputs["x"].dtype)
    made = [helper.make_tensor_value_info(n, TensorProto.BOOL if n == "t" else dtype, None) for n in outputs]
    graph = helper.make_graph(nodes, "g", takes, made)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def normal(*shape: int, dtype: Any = F) -> np.ndarray:
    return RNG.standard_normal(shape).astype(dtype)


CHANNELS = {"scale": normal(3), "b": normal(3), "mean": normal(3), "var": np.abs(normal(3))}
CASES: dict[str, tuple[list[NodeProto], list[str], dict[str, np.ndarray], int]] = {
    "a chain": (
        [node("Add", ["x", "y"], ["a"]), node("Mul", ["a", "x"], ["b"]), node("Relu", ["b"], ["c"]), node("Tanh", ["c"], ["z"])],
        ["z"], {"x": normal(4, 5), "y": normal(5)}, 1),
    "two outputs": (
        [node("Mul", ["m", "k"], ["a"]), node("Add", ["a", "x"], ["n"]), node("Mul", ["n", "r"], ["d"]),
         node("Sub", ["p", "d"], ["q"])],
        ["n", "q"], {"m": normal(4, 5), "x": normal(4, 5), "p": normal(4, 5),
                     "k": np.array(0.9, F), "r": np.array([[0.1]], F)}, 1),
    "an inner result of a smaller shape": (
        [node("Add", ["v", "e"], ["a"]), node("Sqrt", ["a"], ["s"]), node("Div", ["x", "s"], ["z"])],
        ["z"], {"x": normal(4, 5), "v": np.abs(normal(5)), "e": np.array(1e-5, F)}, 1),
    "an output of a smaller shape": (
        [node("Add", ["v", "e"], ["a"]), node("Sqrt", ["a"], ["s"]), node("Div", ["x", "s"], ["z"])],
        ["s", "z"], {"x": normal(4, 5), "v": np.abs(normal(5)), "e": np.array(1e-5, F)}, 2),
    "a test": (
        [node("Greater", ["x", "zero"], ["t"]), node("Where", ["t", "y", "zero"], ["a"]), node("Neg", ["a"], ["z"])],
        ["t", "z"], {"x": normal(4, 5), "y": normal(4, 5), "zero": np.array(0, F)}, 1),
    "doubles": (
        [node("Exp", ["x"], ["a"]), node("Reciprocal", ["a"], ["b"]), node("Erf", ["b"], ["z"])],
        ["z"], {"x": normal(4, 5, dtype=np.float64)}, 1),
    "batch normalization": (
        [node("BatchNormalization", ["x", "scale", "b", "mean", "var"], ["a"], epsilon=1e-3), node("Relu", ["a"], ["c"]),
         node("Add", ["c", "x"], ["z"])],
        ["z"], {"x": normal(2, 3, 4, 4), **CHANNELS}, 1),
    "numbers of the host": (
        [node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["f"], to=1), node("ReduceProd", ["f"], ["n"], keepdims=0),
         node("Mul", ["n", "two"], ["d"]), node("Div", ["x", "d"], ["a"]), node("Add", ["a", "x"], ["z"])],
        ["z"], {"x": normal(4, 5), "two": np.array(2, F)}, 1),
    "values on both sides of a product": (
        [node("Add", ["x", "y"], ["a"]), node("MatMul", ["a", "a"], ["m"]), node("Sub", ["m", "a"], ["b"]),
         node("Abs", ["b"], ["c"]),
         node("Mul", ["c", "b"], ["d"]), node("Add", ["d", "a"], ["z"])],
        ["z"], {"x": normal(4, 4), "y": normal(4)}, 4),
    "activations": (
        [node("Sigmoid", ["x"], ["a"]), node("Mul", ["a", "x"], ["b"]), node("Abs", ["b"], ["c"]), node("Sub", ["c", "x"], ["d"]),
         node("Clip", ["d", "low", "high"], ["z"])],
        ["z"], {"x": 3 * normal(4, 5), "low": np.array(-0.5, F), "high": np.array(1.5, F)}, 1),
    "functions with attributes": (
        [node("Add", ["x", "y"], ["a"]), node("Gelu", ["a"], ["b"]), node("Elu", ["b"], ["c"]), node("LeakyRelu", ["c"], ["d"]),
         node("Gelu", ["d"], ["e"], approximate="tanh"), node("Add", ["e", "x"], ["z"])],
        ["z"], {"x": np.append(normal(4, 4), F([[1e-40, -1e-40, 30, -100]]), 0), "y": F([0, 0.1, -0.1, 0])}, 1),
    "a mask of integers": (
        [node("Cast", ["m"], ["f"], to=1), node("Sub", ["one", "f"], ["a"]), node("Mul", ["a", "low"], ["b"]),
         node("Add", ["x", "b"], ["z"])],
        ["z"], {"x": normal(4, 5), "m": RNG.integers(0, 2, (1, 5)), "one": np.array(1, F), "low": np.array(-1e4, F)}, 1),
    "logic": (
        [node("Equal", ["m", "k"], ["a"]), node("LessOrEqual", ["x", "y"], ["b"]), node("Not", ["b"], ["c"]),
         node("Or", ["a", "c"], ["t"]), node("Where", ["t", "x", "y"], ["z"])],
        ["t", "z"], {"x": normal(4, 5), "y": normal(4, 5), "m": RNG.integers(0, 2, 5), "k": np.array(1)}, 1),
    "integers": (
        [node("Add", ["x", "y"], ["a"]), node("Mul", ["a", "x"], ["b"]), node("Sub", ["b", "y"], ["z"])],
        ["z"], {"x": RNG.integers(-(2**62), 2**62, (4, 5)), "y": np.arange(5)}, 1),
    "two dtypes": (
        [node("Mul", ["x", "x"], ["a"]), node("Cast", ["a"], ["d"], to=11), node("Exp", ["d"], ["e"]),
         node("Cast", ["e"], ["f"], to=1), node("Sub", ["f", "x"], ["z"])],
        ["z"], {"x": normal(4, 5)}, 1),
    "no elements": (
        [node("Add", ["x", "y"], ["a"]), node("Relu", ["a"], ["z"])], ["z"], {"x": normal(0, 5), "y": normal(5)}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_joined_nodes_have_the_bits_of_single_ones(name: str) -> None:
    nodes, outputs, inputs, launches = CASES[name]
    cupy = pytest.importorskip("cupy")
    rep = SingaBackend.prepare(model(nodes, outputs, inputs), "CUDA")
    single = rep.run(inputs, validate=True)  # each node is observed
    there = {n: cupy.asarray(x) for n, x in inputs.items()}
    rep.run(there, to_host=False)
    with fakecuda.counting() as during:
        found = rep.run(there, to_host=False)
    assert during["launches"] <= launches and during["to_host"] == 0
    cpu = SingaBackend.prepare(model(nodes, outputs, inputs)).run(inputs)
    for mine, one, host in zip(found, single, cpu, strict=True):
        assert mine.dtype == host.dtype and mine.get().tobytes() == one.tobytes()
        np.testing.assert_allclose(mine.get(), host, rtol=3e-6, atol=1e-6)
    assert fakecuda.report() == []


@pytest.mark.parametrize("width", [3, 4])
def test_statistics_that_are_computed_are_of_channels(width: int) -> None:
    """The result of an Add that BatchNormalization reads is along the channels, not along the last axis."""
    inputs = {"x": normal(2, 3, 4, width), "e": normal(3), **CHANNELS}
    nodes = [node("Add", ["scale", "e"], ["s"]), node("BatchNormalization", ["x", "s", "b", "mean", "var"], ["a"]),
             node("Relu", ["a"], ["z"])]  # fmt: skip
    found = SingaBackend.prepare(model(nodes, ["z"], inputs), "CUDA").run(inputs)[0]
    np.testing.assert_allclose(found, SingaBackend.prepare(model(nodes, ["z"], inputs)).run(inputs)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [np.inf, np.nan])
def test_an_epsilon_that_is_not_finite(epsilon: float) -> None:
    inputs = {"x": normal(2, 3, 4, 4), **CHANNELS}
    nodes = [node("BatchNormalization", ["x", "scale", "b", "mean", "var"], ["a"], epsilon=epsilon), node("Relu", ["a"], ["z"])]
    found = SingaBackend.prepare(model(nodes, ["z"], inputs), "CUDA").run(inputs)[0]
    np.testing.assert_array_equal(found, SingaBackend.prepare(model(nodes, ["z"], inputs)).run(inputs)[0])


def test_infinities_nan_and_subnormal_numbers_are_those_of_single_nodes() -> None:
    x = np.array([np.nan, np.inf, -np.inf, 0, -0.0, 1e-40, -1e-40, 3e38, -1], F)
    nodes = [node("Add", ["x", "x"], ["a"]), node("Relu", ["a"], ["b"]), node("Clip", ["x", "low", "high"], ["c"]),
             node("Sigmoid", ["c"], ["d"]), node("Mul", ["b", "d"], ["z"])]  # fmt: skip
    inputs = {"x": x, "low": np.array(-2, F), "high": np.array(np.nan, F)}
    rep = SingaBackend.prepare(model(nodes, ["b", "c", "z"], inputs), "CUDA")
    seen: list[Any] = []
    found = rep.run(inputs)
    rep._session.observer = lambda node, inputs, outputs, path: seen.append(outputs[0].get())
    rep.run(inputs)
    np.testing.assert_array_equal(found[0], seen[1])
    np.testing.assert_array_equal(found[1], seen[2])
    np.testing.assert_array_equal(found[2], seen[4])


def test_what_is_not_joined() -> None:
    """Narrow floats, and shapes that do not fit, are computed node by node, with their errors."""
    nodes = [node("Add", ["x", "y"], ["a"], name="first"), node("Mul", ["a", "x"], ["z"], name="second")]
    narrow = np.arange(5).astype(np.float16)
    rep = SingaBackend.prepare(model(nodes, ["z"], {"x": narrow, "y": narrow}), "CUDA")
    np.testing.assert_array_equal(rep.run({"x": narrow, "y": narrow})[0], 2 * narrow * narrow)
    x, y = normal(4, 5), normal(4)
    with pytest.raises(OperatorError, match="broadcast") as caught:
        SingaBackend.prepare(model(nodes, ["z"], {"x": x, "y": y}), "CUDA").run({"x": x, "y": y})
    assert caught.value.node == "first"


def test_limits_hold_for_joined_nodes() -> None:
    nodes = [node("Add", ["x", "y"], ["a"], name="first"), node("Neg", ["a"], ["z"], name="second")]
    inputs = {"x": normal(1, 600), "y": normal(600, 1)}
    rep = SingaBackend.prepare(model(nodes, ["z"], inputs), "CUDA")
    with pytest.raises(ResourceExhausted) as caught:
        rep.run(inputs, limits=Limits(tensor_bytes=1 << 20))
    assert caught.value.node == "first"
    with pytest.raises(ResourceExhausted, match="nodes were executed"):
        rep.run(inputs, limits=Limits(executions=1))


def test_nodes_of_a_graph_that_are_joined() -> None:
    """A node between that reads a result divides a chain; equal chains have equal kernels."""
    nodes, outputs, inputs, _ = CASES["values on both sides of a product"]
    graph = SingaBackend.prepare(model(nodes, outputs, inputs)).graph
    assert [n.op_type for n in join(run_order(graph)).nodes] == ["Add", "MatMul", "Sub+Abs+Mul+Add"]
    nodes, outputs, inputs, _ = CASES["two outputs"]
    graph = SingaBackend.prepare(model(nodes, outputs, inputs)).graph
    made = join(run_order(graph)).nodes
    assert [type(n) for n in made] == [Joined] and made[0].output_names == ("n", "q")


def updates(shapes: dict[str, tuple[int, ...]]) -> tuple[list[NodeProto], list[str], dict[str, np.ndarray]]:
    """Updates of parameters by gradients of these shapes, as SGD with momentum makes them; g1 is transposed by the graph."""
    nodes, outputs, inputs = [], [], {"x": np.array([0.1], F), "k": np.array(0.9, F)}
    for name, shape in shapes.items():
        inputs |= {f"{v}{name}": normal(*shape) for v in "mpg"}
        inputs[f"g{name}"] = inputs[f"g{name}"].T
        nodes += [
            node("Transpose", [f"g{name}"], [f"t{name}"]), node("Mul", [f"m{name}", "k"], [f"a{name}"]),
            node("Add", [f"a{name}", f"t{name}"], [f"n{name}"]), node("Mul", [f"n{name}", "x"], [f"d{name}"]),
            node("Sub", [f"p{name}", f"d{name}"], [f"q{name}"]),
        ]  # fmt: skip
        outputs += [f"n{name}", f"q{name}"]
    return nodes, outputs, inputs


@pytest.mark.parametrize(
    ("shapes", "launches"),
    [
        ({"0": (4, 5), "1": (7,), "2": (1,), "3": (2, 3, 2), "4": (0, 3)}, 1),
        ({str(i): (i + 1,) for i in range(50)}, 4),  # the parameters of a kernel have at most 4096 bytes
    ],
)
def test_updates_of_one_form_are_one_kernel(shapes: dict[str, tuple[int, ...]], launches: int) -> None:
    nodes, outputs, inputs = updates(shapes)
    cupy = pytest.importorskip("cupy")
    rep = SingaBackend.prepare(model(nodes, outputs, inputs), "CUDA")
    assert sum(isinstance(n, Alike) for n in gather(join(run_order(rep.graph))).nodes) == 1
    single = rep.run(inputs, validate=True)
    there = {n: cupy.asarray(x) for n, x in inputs.items()}
    rep.run(there, to_host=False)
    with fakecuda.order("both"), fakecuda.counting() as during:
        found = rep.run(there, to_host=False)
    assert during["launches"] == launches and during["to_host"] == 0
    for mine, one in zip(found, single, strict=True):
        assert mine.shape == one.shape and mine.get().tobytes() == one.tobytes()
    assert fakecuda.report() == []


def test_updates_that_broadcast_are_computed_one_after_the_other() -> None:
    nodes, outputs, inputs = updates({"0": (4, 5), "1": (4, 5)})
    inputs["m1"] = normal(5)
    rep = SingaBackend.prepare(model(nodes, outputs, inputs), "CUDA")
    for mine, one in zip(rep.run(inputs), rep.run(inputs, validate=True), strict=True):
        assert mine.shape == one.shape and mine.tobytes() == one.tobytes()


def test_results_that_a_node_reads_are_not_gathered() -> None:
    nodes, outputs, inputs = updates({"0": (4, 4), "1": (4, 4)})
    graph = SingaBackend.prepare(model([*nodes, node("MatMul", ["n0", "n1"], ["z"])], [*outputs, "z"], inputs)).graph
    assert not any(isinstance(n, Alike) for n in gather(join(run_order(graph))).nodes)


def test_nodes_with_other_attributes_are_not_gathered() -> None:
    inputs = {"x": normal(4), "y": normal(4)}
    for alphas, kinds in (((0.1, 0.1), [Alike]), ((0.1, 0.2), [Joined, Joined])):
        nodes = [node("Mul", [i, i], [f"a{i}"]) for i in "xy"]
        nodes += [node("LeakyRelu", [f"a{i}"], [f"z{i}"], alpha=alpha) for i, alpha in zip("xy", alphas, strict=True)]
        graph = SingaBackend.prepare(model(nodes, ["zx", "zy"], inputs)).graph
        assert [type(n) for n in gather(join(run_order(graph))).nodes] == kinds


def test_updates_of_two_dtypes_are_computed_one_after_the_other() -> None:
    nodes, outputs, inputs = updates({"0": (4, 5), "1": (4, 5)})
    wide = [n for n in (*inputs, *outputs) if n.endswith("1")]
    nodes = [node(n.op_type, [{"k": "kk", "x": "xx"}.get(i, i) for i in n.input], n.output) if "1" in n.output[0] else n
             for n in nodes]  # fmt: skip
    inputs |= {"kk": inputs["k"], "xx": inputs["x"]}
    inputs |= {n: inputs[n].astype(np.float64) for n in (*wide, "kk", "xx") if n in inputs}
    made = model(nodes, outputs, inputs)
    for value in made.graph.output:
        if value.name in wide:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    rep = SingaBackend.prepare(made, "CUDA")
    assert sum(isinstance(n, Alike) for n in gather(join(run_order(rep.graph))).nodes) == 1
    for mine, one in zip(rep.run(inputs), rep.run(inputs, validate=True), strict=True):
        assert mine.dtype == one.dtype and mine.tobytes() == one.tobytes()


def test_threads_have_one_form_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are found by the nodes of a form: all threads must have the same ones."""
    nodes, outputs, inputs, _ = CASES["a chain"]
    one = SingaBackend.prepare(model(nodes, outputs, inputs), "CUDA")._session._executor
    start = threading.Barrier(8)

    def slow(order: Any) -> Any:
        made = join(order)
        start.wait(10)  # every thread makes a form
        return made

    monkeypatch.setattr(joined, "join", slow)
    with ThreadPoolExecutor(8) as pool:
        forms = list(pool.map(lambda _: one.joined(one.graph), range(8)))
    assert len({id(form) for form in forms}) == 1


def test_choices_of_numbers_of_the_host() -> None:
    """No array has the dtype of the result of Where."""
    nodes = [
        node("Shape", ["x"], ["s"]), node("Cast", ["s"], ["f"], to=1), node("ReduceProd", ["f"], ["n"], keepdims=0),
        node("Mul", ["n", "n"], ["m"]), node("Greater", ["x", "y"], ["t"]), node("Where", ["t", "n", "m"], ["w"]),
        node("Neg", ["w"], ["z"]),
    ]  # fmt: skip
    inputs = {"x": normal(4, 5), "y": normal(5)}
    for shown in (["z"], ["t", "z"]):
        found = SingaBackend.prepare(model(nodes, shown, inputs), "CUDA").run(inputs)
        for mine, host in zip(found, SingaBackend.prepare(model(nodes, shown, inputs)).run(inputs), strict=True):
            assert mine.dtype == host.dtype and mine.tobytes() == host.tobytes()
    inputs["t"] = inputs["x"] > 0
    nodes = [n for n in nodes if n.op_type != "Greater"]
    found = SingaBackend.prepare(model(nodes, ["z"], inputs), "CUDA").run(inputs)
    want = SingaBackend.prepare(model(nodes, ["z"], inputs)).run(inputs)
    assert found[0].dtype == want[0].dtype and found[0].tobytes() == want[0].tobytes()
