"""Settings and shapes stay on the host: what a run on a device copies, counted on the strict namespace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, defs, helper, numpy_helper, parser

from singa_backend import InvalidInput, OperatorError, SingaBackend
from singa_backend.devices import strict
from singa_backend.devices.device import resolve
from singa_backend.interpreters.eager import Eager
from singa_backend.ir.declaration import declarations
from singa_backend.runtime.placement import _GROWING, computes_on_host

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """The number of copies between the strict device and the host."""
    counts = {"to_host": 0, "from_host": 0}

    def counted(name: str) -> Any:
        function = getattr(strict.StrictNamespace, name)

        def call(self: Any, *args: Any) -> Any:
            counts[name] += 1
            return function(self, *args)

        return call

    for name in counts:
        monkeypatch.setattr(strict.StrictNamespace, name, counted(name))
    yield counts


def model(text: str, **weights: np.ndarray) -> ModelProto:
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18, "own" : 1]> {text}')
    made.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return made


def run(copies: dict[str, int], made: ModelProto, *inputs: np.ndarray) -> tuple[int, int]:
    """The copies of the second run, whose outputs are those of the CPU."""
    rep = SingaBackend.prepare(made, "STRICT")
    rep.run(list(inputs))
    copies.update(to_host=0, from_host=0)
    found = rep.run(list(inputs))
    counts = copies["to_host"], copies["from_host"]
    for a, b in zip(found, SingaBackend.prepare(made, "CPU").run(list(inputs)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    return counts


SHAPES = """net (float[a,b,c] x) => (float[d,e] y) {
    s = Shape(x)
    first = Gather(s, zero)
    column = Unsqueeze(first, at)
    rest = Slice(s, one, three)
    count = ReduceProd<keepdims = 1>(rest)
    doubled = Mul(count, two)
    half = Div(doubled, two)
    sizes = Concat<axis = 0>(column, half)
    y = Reshape(x, sizes)
}"""
SETTINGS = {"zero": np.array(0), "at": np.array([0]), "one": np.array([1]), "three": np.array([3]), "two": np.array([2])}


def test_arithmetic_on_shapes_stays_on_the_host(copies: dict[str, int]) -> None:
    assert run(copies, model(SHAPES, **SETTINGS), X) == (1, 1)


def test_initializers_that_are_read_on_the_host_are_not_read_back(copies: dict[str, int]) -> None:
    text = "net (float[2,3,4] x) => (float[a,b] y, float[2,12] z) { y = Reshape(x, s) c = Cast<to = 1>(s) z = Mul(y, c) }"
    assert run(copies, model(text, s=np.array([24, 1])), X)[0] == 2
    wide = np.arange(100)  # more than a shape may have
    assert run(
        copies,
        model("net (float[100,2] x) => (float[n,2] y) { y = Slice(x, b, e) }", b=wide[:1], e=wide[99:]),
        np.zeros((100, 2), np.float32),
    ) == (1, 1)


def test_constants_are_put_once(copies: dict[str, int]) -> None:
    text = """net (float[2,3,4] x) => (float[6,4] y) {
        s = Constant<value_ints = [6, 4]>()
        z = Reshape(x, s)
        two = Constant<value_float = 2.0>()
        y = Mul(z, two)
    }"""
    assert run(copies, model(text), X) == (1, 1)


def test_a_long_constant_is_read_on_the_host(copies: dict[str, int]) -> None:
    nodes = [
        helper.make_node("Constant", [], ["sizes"], value_ints=[1] * 70),
        helper.make_node("Split", ["x", "sizes"], [f"part{i}" for i in range(70)]),
        helper.make_node("Add", ["part3", "part69"], ["y"]),
    ]
    made = model("net (float[70] x) => (float[1] y) { y = Identity(x) }")
    del made.graph.node[:]
    made.graph.node.extend(nodes)
    assert run(copies, made, np.arange(70, dtype=np.float32)) == (1, 1)


def test_inputs_that_are_read_on_the_host_stay_there(copies: dict[str, int]) -> None:
    text = "net (float[2,3,4] x, int64[2] s) => (float[a,b] y) { y = Reshape(x, s) }"
    assert run(copies, model(text), X, np.array([8, 3])) == (1, 1)
    both = """net (float[2,3,4] x, int64[2] s) => (float[a,b] y, int64[2] t) {
        y = Reshape(x, s)
        b = BitwiseNot(s)
        t = CumSum(b, zero)
    }"""
    assert run(copies, model(both, zero=np.array(0)), X, np.array([8, 3]))[1] == 1


def test_functions_and_subgraphs_read_shapes_of_the_outer_graph(copies: dict[str, int]) -> None:
    text = """net (float[2,3,4] x) => (float[a,b] y) { s = Shape(x) y = own.Flat(x, s) }
    <domain: "own", opset_import: ["" : 18]> Flat (x, s) => (y) {
        one = Constant<value_ints = [1]>()
        tail = Constant<value_ints = [-1]>()
        none = Constant<value_ints = [0]>()
        head = Slice(s, none, one)
        both = Concat<axis = 0>(head, tail)
        y = Reshape(x, both)
    }"""
    assert run(copies, model(text), X) == (1, 1)
    outer = model("net (float[2,3,4] x, bool c) => (float[a] y) { s = Shape(x) n = ReduceProd<keepdims = 1>(s) y = Identity(x) }")
    flat = helper.make_graph(
        [helper.make_node("Reshape", ["x", "n"], ["z"])],
        "flat",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
    )
    sizes = helper.make_graph(
        [helper.make_node("Cast", ["s"], ["w"], to=1)], "sizes", [], [helper.make_tensor_value_info("w", TensorProto.FLOAT, None)]
    )
    outer.graph.node[-1].CopyFrom(helper.make_node("If", ["c"], ["y"], then_branch=flat, else_branch=sizes))
    assert run(copies, outer, X, np.array(True)) == (1, 1)
    assert run(copies, outer, X, np.array(False))[0] == 1


def test_inputs_that_functions_and_subgraphs_read_stay_on_the_host(copies: dict[str, int]) -> None:
    text = """net (float[2,3,4] x, int64[2] s) => (float[a,b] y) { y = own.Shaped(x, s) }
    <domain: "own", opset_import: ["" : 18]> Shaped (x, s) => (y) { y = Reshape(x, s) }"""
    assert run(copies, model(text), X, np.array([8, 3])) == (1, 1)
    made = model("net (float[2,3,4] x, int64[2] s, bool c) => (float[a,b] y) { y = Identity(x) }")
    out = helper.make_tensor_value_info("z", TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Reshape", ["x", "s"], ["z"])], "branch", [], [out])
    made.graph.node[0].CopyFrom(helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch))
    assert run(copies, made, X, np.array([8, 3]), np.array(True)) == (1, 1)


def test_values_of_the_host_are_put_once_in_a_run(copies: dict[str, int]) -> None:
    text = "net (int64[1,3] a, float[2,3,4] x) => (int64[1,3] y, int64[1,3] z) { s = Shape(x) y = Add(a, s) z = Mul(a, s) }"
    assert run(copies, model(text), np.array([[1, 2, 3]]), X) == (2, 3)


def test_a_loop_whose_values_are_shapes(copies: dict[str, int]) -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"]),
        helper.make_node("Add", ["sum", "s"], ["next"]),
        helper.make_node("Identity", ["go"], ["on"]),
        helper.make_node("Identity", ["next"], ["all"]),
    ]
    takes = [("k", TensorProto.INT64, []), ("go", TensorProto.BOOL, []), ("sum", TensorProto.INT64, [3])]
    makes = [("on", TensorProto.BOOL, []), ("next", TensorProto.INT64, [3]), ("all", TensorProto.INT64, [3])]
    infos = [[helper.make_tensor_value_info(*v) for v in group] for group in (takes, makes)]
    made = model(
        "net (float[2,3,4] x) => (int64[3] y, int64[n,3] z) { y = Identity(zero) z = Identity(y) }",
        zero=np.zeros(3, np.int64),
        n=np.array(4),
    )
    loop = helper.make_node("Loop", ["n", "", "zero"], ["y", "z"], body=helper.make_graph(nodes, "body", *infos))
    del made.graph.node[1]
    made.graph.node[0].CopyFrom(loop)
    run(copies, made, X)


def test_results_that_would_be_large_are_made_on_the_device(copies: dict[str, int]) -> None:
    text = """net (float[2,3,4] x) => (float[a] y) {
        s = Shape(x)
        n = Mul(s, big)
        m = ReduceProd<keepdims = 1>(n)
        y = ConstantOfShape(m)
    }"""
    assert run(copies, model(text, big=np.array([10])), X) == (1, 1)


def test_intermediate_values_and_parts_of_a_graph(copies: dict[str, int]) -> None:
    rep = SingaBackend.prepare(model(SHAPES, **SETTINGS), "STRICT")
    found = rep.run([X], aux_output=["s", "sizes", "zero", "x"])
    assert [v.tolist() for v in found[1:4]] == [[2, 3, 4], [2, 12], 0]
    assert all(isinstance(v, np.ndarray) for v in found)
    assert rep.run([X], last_layers=0)[0].tolist() == [2, 3, 4]
    for value in found:
        value[...] = 0
    assert rep.run([X], aux_output=["sizes"])[1].tolist() == [2, 12]
    assert rep.run([X], validate=True)[0].shape == (2, 12)


def test_initializers_that_are_replaced(copies: dict[str, int]) -> None:
    text = "net (float[2,3,4] x, int64[2] s) => (float[a,b] y) { y = Reshape(x, s) }"
    rep = SingaBackend.prepare(model(text, s=np.array([6, 4])), "STRICT")
    assert rep.run({"x": X})[0].shape == (6, 4)
    assert rep.run({"x": X, "s": np.array([4, 6])})[0].shape == (4, 6)
    changed = rep.with_states({"s": rep.device.put(np.array([3, 8]))})
    assert (changed.run({"x": X})[0].shape, rep.run({"x": X})[0].shape) == ((3, 8), (6, 4))


def test_arrays_of_the_device_in_and_out(copies: dict[str, int]) -> None:
    rep = SingaBackend.prepare(
        model(
            "net (float[2,3,4] x) => (float[2,3,4] y, int64[3] s, float[2] w) { y = Relu(x) s = Shape(x) w = Identity(c) }",
            c=np.float32([1, 2]),
        ),
        "STRICT",
    )
    x = strict.StrictArray(X)
    copies.update(to_host=0, from_host=0)
    y, s, w = rep.run([x], to_host=False)
    assert copies == {"to_host": 0, "from_host": 1}  # the shape
    assert all(isinstance(v, strict.StrictArray) for v in (y, s, w))
    np.testing.assert_array_equal(y._a, np.maximum(X, 0))
    w[...] = 9
    for _ in range(2):
        host = rep.run([x])[2]
        assert host.tolist() == [1, 2]
        host[...] = 9
    cpu = SingaBackend.prepare(model("net (float[2,3,4] x) => (float[2,3,4] y) { y = Relu(x) }"), "CPU")
    assert isinstance(cpu.run([X], to_host=False)[0], np.ndarray)
    with pytest.raises(InvalidInput, match="SX302"):
        cpu.run([x])
    with pytest.raises(InvalidInput, match="SX385"):
        rep.run([X], to_host=False, out=[None, None, np.zeros(2, np.float32)])


def test_errors_of_values_on_the_host_name_their_node() -> None:
    rep = SingaBackend.prepare(
        model("net (float[a,b,c] x) => (int64 y) { s = Shape(x) [wrong] y = Gather(s, far) }", far=np.array(7)), "STRICT"
    )
    with pytest.raises(OperatorError, match="SX401") as error:
        rep.run([X])
    assert error.value.node == "wrong"


def test_single_operators_leave_shapes_on_the_host(copies: dict[str, int]) -> None:
    op = Eager(resolve("STRICT"))
    x = op.device.put(X)
    copies.update(to_host=0, from_host=0)
    sizes = op.Concat(op.Shape(x, start=0, end=1), [-1], axis=0)
    y = op.Reshape(x, sizes)
    assert copies == {"to_host": 0, "from_host": 0}
    assert isinstance(y, strict.StrictArray) and y.shape == (2, 12)
    z = op.Mul(op.Cast(y, to=7), op.Shape(y, start=1))
    assert copies["to_host"] == 0 and z._a[1, 11] == 23 * 12


GROWING = [s for s in defs.get_all_schemas_with_history() if not s.domain and s.name in _GROWING]


@pytest.mark.parametrize("schema", GROWING, ids=lambda s: f"{s.name}-{s.since_version}")
def test_a_result_that_grows_is_bounded_in_every_version(schema: defs.OpSchema) -> None:
    inputs = [np.ones(1, np.int64) for _ in range(schema.max_input)]
    declaration = declarations["", schema.name][schema.since_version]
    assert computes_on_host(declaration, inputs)
    inputs[schema.max_input > 1] *= 1000
    assert not computes_on_host(declaration, inputs)


def test_tile_of_version_1(copies: dict[str, int]) -> None:
    weights = {"w": np.float32([1, 2]), "times": np.float32([2]), "axis": np.float32([0])}
    made = model("net (float[n] x) => (float[k] y) { t = Tile(w, times, axis) y = Identity(t) }", **weights)
    made.opset_import[0].version = 5
    assert run(copies, made, np.ones(4, np.float32)) == (0, 1)
