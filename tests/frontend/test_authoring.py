"""Graphs as Python functions: `sonnx.graph` and `sonnx.op`."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import pytest
from onnx import ModelProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from tests.helpers import authored_functions as authored
from tests.helpers.paths import TESTS

import sonnx
from singa import tensor
from singa._onnx.types import difference, from_proto
from singa_backend import InvalidInput, InvalidModel, SonnxError, UnsupportedModel
from singa_backend.engines.oracle import Oracle
from singa_backend.proto.messages import graphs
from singa_backend.proto.schemas import newest, schema_version
from sonnx import Bool, Double, Float, Float16, Int32, Int64, OptionalType, SequenceType, String, TensorType, op

AUTHORED = TESTS / "authored"
NAMES = ["linear", "attention", "power", "leaky", "statistics"]

x3 = np.array([[1, 2, 3], [4, 5, 6]], np.float32)


def valid(model: ModelProto) -> ModelProto:
    onnx.checker.check_model(model, full_check=True)
    return model


def operators(model: ModelProto) -> list[str]:
    return [n.op_type for n in model.graph.node if n.op_type != "Constant"]


def refused(code: str, function: Any, text: str = "", **options: Any) -> SonnxError:
    """The error of writing a graph; its traceback must pass the function's own lines."""
    with pytest.raises(SonnxError) as found:
        sonnx.graph(**options)(function)
    assert found.value.code == code, str(found.value)
    assert text in str(found.value)
    assert not isinstance(found.value.__cause__, SonnxError)
    return found.value


# --- against spox and onnxscript


def parts(nodes: Any) -> list[Any]:
    """The nodes with their attributes that differ from the defaults; without constants, copies, and casts of constants."""
    found = []
    for node in nodes:
        if node.op_type in ("Constant", "Identity", "CastLike"):
            continue
        defaults = onnx.defs.get_schema(node.op_type, 21, "").attributes
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute if not a.HasField("g")}
        same = {
            n
            for n in given
            if defaults[n].default_value.name and helper.get_attribute_value(defaults[n].default_value) == given[n]
        }
        bodies = {a.name: parts(a.g.node) for a in node.attribute if a.HasField("g")}
        found.append((node.op_type, len(node.output), {n: v for n, v in given.items() if n not in same}, bodies))
    return found


@pytest.mark.parametrize("other", ["spox", "onnxscript"])
@pytest.mark.parametrize("name", NAMES)
def test_the_same_nodes_and_numbers_as_others(name: str, other: str) -> None:
    ours = valid(getattr(authored, name).model)
    theirs = onnx.parser.parse_model((AUTHORED / f"{other}_{name}.txt").read_text(encoding="utf-8"))
    assert parts(ours.graph.node) == parts(theirs.graph.node)
    feeds = authored.FEEDS[name]
    wanted = authored.expected()[name]
    for model in (ours, theirs):
        for got, want in zip(sonnx.run_model(model, feeds), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_onnxruntime_computes_the_same() -> None:
    with Oracle("onnxruntime") as oracle:
        for name in NAMES:
            f = getattr(authored, name)
            found = oracle.run(f.model.SerializeToString(), dict(zip(f.inputs, authored.FEEDS[name], strict=True)), timeout=60)
            for got, want in zip(found.values(), authored.expected()[name], strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_types_of_different_kinds_are_named() -> None:
    kinds = {"a tensor": Float[3], "a sequence": SequenceType(Float), "an optional": OptionalType(Float)}
    for found, x in kinds.items():
        for wanted, y in kinds.items():
            assert difference(x, y) == ("" if x is y else f"one is {wanted}, the other {found}")


# --- against ONNX's suite


def suite() -> list[ModelProto]:
    """Models of one node at the newest version of its operator, up to two of each operator whose result is not known."""
    found: dict[tuple[str, str], list[ModelProto]] = {}
    for case in collect_testcases(None):
        model = case.model
        node, versions = model.graph.node[0], {o.domain: o.version for o in model.opset_import}
        key = (node.domain, node.op_type)
        current = schema_version(*key, newest(node.domain)) == schema_version(*key, versions.get(node.domain, 0))
        plain = (
            node.op_type not in ("Constant", "Shape", "Size")
            and all(node.output)
            and not any(a.HasField("g") for a in node.attribute)
            and not model.functions
        )
        if current and plain and len(model.graph.node) == 1 and len(found.setdefault(key, [])) < 2:
            found[key].append(model)
    return [m for models in found.values() for m in models]


def test_every_operator_of_the_suite_is_written_as_it_is_there() -> None:
    written = 0
    for model in suite():
        (node,) = model.graph.node
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        types = {f"x{i}": from_proto(v.type) for i, v in enumerate(model.graph.input)}
        places = [[v.name for v in model.graph.input].index(n) if n else None for n in node.input]

        def function(*xs: Any, node: Any = node, attributes: Any = attributes, places: Any = places) -> Any:
            values = [None if i is None else xs[i] for i in places]
            return getattr(op, node.op_type)(*values, outputs=len(node.output), domain=node.domain, **attributes)

        names = ", ".join(types)
        f = sonnx.graph(eval(f"lambda {names}: function({names})", {"function": function}), types=types, opset=newest(""))
        (made,) = f.model.graph.node
        assert (made.domain, made.op_type, len(made.input)) == (node.domain, node.op_type, len(node.input))
        there = {a.name: helper.get_attribute_value(a) for a in made.attribute}
        assert {n: there.get(n) for n in attributes} == attributes
        written += 1
    assert written > 200


# --- the model


def test_the_model_has_the_names_types_and_text_of_the_function() -> None:
    @sonnx.graph(opset=19, name="net")
    def f(x: Float["N", 3], mask: Bool["N", 1], n: Int64[()], words: String["M"], half: Float16[None, 2]):
        """Scale where the mask is true.

        More.
        """
        return op.Where(mask, x, 0.0)

    model = valid(f.model)
    assert model.opset_import[0].version == 19
    assert (model.graph.name, model.graph.doc_string) == ("net", "Scale where the mask is true.\n\nMore.")
    types = {v.name: str(t) for v in model.graph.input for t in [f.inputs[v.name]]}
    assert types == {"x": "float[N, 3]", "mask": "bool[N, 1]", "n": "int64[]", "words": "string[M]", "half": "float16[?, 2]"}
    (half,) = (v.type.tensor_type for v in model.graph.input if v.name == "half")
    assert [d.WhichOneof("value") for d in half.shape.dim] == [None, "dim_value"]
    assert f.outputs == ["y"] and f.__name__ == "f"
    assert repr(f).startswith("<graph f(x: float[N, 3], mask: bool[N, 1],") and repr(f).endswith("-> (y: float[N, 3]), opset 19>")


def test_every_element_type_of_onnx_has_a_name() -> None:
    made = {t.dtype: n for n in sonnx.__all__ if isinstance(t := getattr(sonnx, n), TensorType)}
    codes = {c for n, c in onnx.TensorProto.DataType.items() if n != "UNDEFINED"}
    assert {t["N"].to_proto().tensor_type.elem_type for t in map(TensorType, made)} == codes
    assert all(onnx.TensorProto.DataType.Value(n.upper()) in codes for n in made.values())


def test_forms_of_results() -> None:
    class Both(NamedTuple):
        low: Any
        high: Any

    def named(x: Float["N"]) -> Both:
        return Both(x - 1.0, x + 1.0)

    def keyed(x: Float["N"]):
        return {"low": x - 1.0, "high": x + 1.0}

    def pair(y: Float["N"]):
        return y - 1.0, y + 1.0

    def several(y0: Float["N"]):
        return [y0 - 1.0, y0 + 1.0]

    low, high = [0.0, 1.0], [2.0, 3.0]
    got = sonnx.graph(named)([1, 2])
    assert type(got) is Both and [v.tolist() for v in got] == [low, high]
    assert sonnx.graph(named).outputs == ["low", "high"]
    assert {n: v.tolist() for n, v in sonnx.graph(keyed)([1, 2]).items()} == {"low": low, "high": high}
    assert [v.tolist() for v in sonnx.graph(pair)([1, 2])] == [low, high]
    assert sonnx.graph(pair).outputs == ["y0", "y1"]
    assert sonnx.graph(several).outputs == ["y_0", "y_1"]
    assert sonnx.graph(several, outputs=["a", "b"]).outputs == ["a", "b"]


def test_an_output_may_have_any_name_an_input_and_a_constant_may_be_outputs() -> None:
    @sonnx.graph
    def f(add: Float["N"]):
        y = add + 1.0
        return {"mul": y, "same": add, "again": add, "one": op.constant(1.0), "add_1": y * 2.0, "number": 7}

    valid(f.model)
    assert [v.name for v in f.model.graph.output] == ["mul", "same", "again", "one", "add_1", "number"]
    got = f(np.array([3], np.float32))
    assert {n: v.tolist() for n, v in got.items()} == {
        "mul": [4], "same": [3], "again": [3], "one": 1, "add_1": [8], "number": 7,
    }  # fmt: skip
    assert got["number"].dtype == np.int64


def test_arrays_are_weights_and_numbers_are_constants() -> None:
    weight = np.ones((3, 2), np.float32)

    @sonnx.graph
    def f(x: Float["N", 3]):
        return (x @ weight) * 2.0 + op.constant(np.float32([1, 2]), name="bias") + tensor.Tensor(data=np.float32([0, 1]))

    valid(f.model)
    stored = {t.name: numpy_helper.to_array(t) for t in f.model.graph.initializer}
    assert {"weight", "bias"} < set(stored) and len(stored) == 3
    assert operators(f.model) == ["MatMul", "Mul", "Add", "Add"]
    assert f(x3).tolist() == [[13, 15], [31, 33]]
    assert set(sonnx.SONNXModel(f.model).get_params()) == set(stored)


SIDES = [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b, lambda a, b: a**b,
    lambda a, b: a @ b, lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a > b, lambda a, b: a >= b, lambda a, b: a == b,
    lambda a, b: a != b,
]  # fmt: skip


@pytest.mark.parametrize("f", SIDES)
def test_a_tensor_may_be_on_either_side(f: Any) -> None:
    weight = np.float32([[1, 2], [3, 4]])
    held = tensor.Tensor(data=weight)
    x = np.float32([[2, 2], [1, 3]])
    left = sonnx.graph(lambda x: f(held, x), types={"x": Float[2, 2]})
    right = sonnx.graph(lambda x: f(x, held), types={"x": Float[2, 2]})
    np.testing.assert_allclose(left(x), f(weight, x), rtol=1e-6)
    np.testing.assert_allclose(right(x), f(x, weight), rtol=1e-6)


def test_a_power_has_the_type_of_the_value() -> None:
    f = sonnx.graph(lambda x, n: (2**x, x**2, x**0.5, 2**n, n**2, x**n), types={"x": Float[2], "n": Int64[2]})
    x, n = np.float32([0.5, 2.5]), np.array([1, 3])
    found = f(x, n)
    for value, expected in zip(found, (2**x, x**2, x**0.5, 2**n, n**2, (x**n).astype(np.float32)), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_integers_are_int64_at_any_size() -> None:
    f = sonnx.graph(lambda: (op.constant(2**40), 2**40, op.constant([2**40])))
    assert [v.tolist() for v in f()] == [2**40, 2**40, [2**40]]


@pytest.mark.parametrize("x", [None, "3", b"3", 1j, {}, 10**39, 10**400, [None]])
def test_what_is_not_a_number_of_the_type_is_refused(x: Any) -> None:
    with pytest.raises(InvalidInput, match="SX372"):
        sonnx.graph(lambda x: x + 1, types={"x": Float})(x)
    refused("SX372", lambda: op.constant(x, Float), "must be a number that float can represent")
    if not isinstance(x, (str, int)):
        with pytest.raises(InvalidInput, match="SX372"):
            sonnx.graph(lambda x: op.Identity(x), types={"x": sonnx.String})(x)


def test_a_number_has_the_element_type_of_the_value() -> None:
    @sonnx.graph
    def f(x: Float16["N"], n: Int64["N"], d: Double["N"]):
        return (
            x * np.float64(0.5),
            n + 1,
            2 - d,
            np.array([2.0]) * d,
            np.float64(0.5) * x,
            np.array([6.0]) > d,
            np.array([6.0]) // d,
        )

    found = f(np.float16([3]), np.int64([4]), np.float64([5]))
    assert [(v.dtype, v.tolist()) for v in found] == [
        (np.float16, [1.5]), (np.int64, [5]), (np.float64, [-3]), (np.float64, [10]), (np.float16, [1.5]), (np.bool_, [True]),
        (np.float64, [1]),
    ]  # fmt: skip


def test_the_opset_is_18_or_what_the_operators_need() -> None:
    @sonnx.graph
    def low(x: Float["N"]):
        return op.Mish(x)

    @sonnx.graph
    def high(x: Int64["N"]):
        return op.Cast(x, to=sonnx.Int4)

    assert (low.opset, high.opset) == (18, 21)
    refused("SX206", lambda x: op.Cast(x, to=sonnx.Int4), "minimum opset is 21", types={"x": Int64}, opset=18)
    with pytest.raises(InvalidInput, match="SX323"):
        sonnx.graph(opset=6)


def test_one_function_at_many_opsets() -> None:
    def f(x: Float["N", 3]):
        return op.Softmax(op.HardSwish(x[:, 1:] * 2.0), axis=-1), op.ReduceSum(x, [1], keepdims=0)

    h = x3[:, 1:] * 2
    h = h * np.clip(h / 6 + 0.5, 0, 1)
    for opset in (10, 13, 18, 21, onnx.defs.onnx_opset_version()):
        a, total = sonnx.graph(f, opset=opset)(x3)
        np.testing.assert_allclose(a, authored.softmax(h), rtol=1e-5)
        assert total.tolist() == [6, 15]


# --- operators of Python


BINARY = [
    lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: a / b, lambda a, b: a // b, lambda a, b: a**b,
    lambda a, b: a < b, lambda a, b: a <= b, lambda a, b: a > b, lambda a, b: a >= b, lambda a, b: a == b, lambda a, b: a != b,
]  # fmt: skip


@pytest.mark.parametrize("f", BINARY)
def test_arithmetic_and_comparisons(f: Any) -> None:
    a, b = np.array([3.5, -2, 2, 4], np.float32), np.array([2, 2, 2, -0.5], np.float32)
    made = sonnx.graph(lambda a, b: (f(a, b), f(a, 2), f(2.0, a), f(b, a)), types={"a": Float["N"], "b": Float["N"]})
    with np.errstate(invalid="ignore"):
        wanted = [f(a, b), f(a, np.float32(2)), f(np.float32(2), a), f(b, a)]
    for got, want in zip(made(a, b), wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_integers_truth_values_and_signs() -> None:
    def f(a: Int32["N"], b: Int32["N"], p: Bool["N"], q: Bool["N"]):
        return a % b, a & b, a | b, a ^ b, ~a, p & q, p | q, p ^ q, ~p, -a, abs(a), 7 % b, 6 & a, True ^ p

    a, b = np.array([7, -7], np.int32), np.array([3, 3], np.int32)
    p, q = np.array([True, False]), np.array([True, True])
    for got, want in zip(sonnx.graph(f)(a, b, p, q), f(a, b, p, q), strict=True):
        np.testing.assert_array_equal(got, want)
        assert got.dtype == np.asarray(want).dtype


INDICES: list[Any] = [
    0, -1, slice(1, 3), slice(None, None, -1), slice(-2, None), slice(None, None, 2), (0, 1), (slice(None), 1),
    (slice(None), None), (None, 0), (..., 0), (0, ..., 1), (slice(2, 0, -1), 0), (slice(1, None), ..., slice(None, 2)), ...,
    (0, None, slice(None), 2), [2, 0], np.array([1, 1]), (slice(None), [0, 1, 0]), (None, ..., None), (0, 1, 2),
    (slice(None), slice(None), [1]),
]  # fmt: skip


@pytest.mark.parametrize("key", INDICES, ids=str)
def test_an_index_selects_what_numpy_selects(key: Any) -> None:
    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    got = sonnx.graph(lambda x: x[key] * 1.0, types={"x": Float["A", 2, "C"]})(x)
    np.testing.assert_array_equal(got, x[key])


def test_an_index_may_be_a_value() -> None:
    types = {"x": Float["N", 3], "i": Int64[()], "ids": Int64["M"]}
    f = sonnx.graph(lambda x, i, ids: (x[i], x[ids], x[:i], x[i:, 0], x[:, ids]), types=types)
    wanted = x3[1], x3[[1, 0, 1]], x3[:1], x3[1:, 0], x3[:, [1, 0, 1]]
    for got, want in zip(f(x3, 1, [1, 0, 1]), wanted, strict=True):
        np.testing.assert_array_equal(got, want)
    refused("SX338", lambda x, i, ids: x[0, ids], "may not be combined", types=types)


def test_an_index_may_be_a_list_with_values() -> None:
    f = sonnx.graph(lambda x, i: x[[i, 0]], types={"x": Float["N"], "i": Int64[()]})
    assert f(np.float32([1, 2, 3]), 2).tolist() == [3, 1]


def test_a_shape_may_contain_values() -> None:
    @sonnx.graph
    def f(x: Float["N", 6]):
        n = op.Shape(x)[0]
        return op.Reshape(x, [n, 2, -1]), op.Reshape(x, (n * 2, 3))

    valid(f.model)
    assert [v.shape for v in f(np.zeros((5, 6), np.float32))] == [(5, 2, 3), (10, 3)]


# --- control flow, sequences, functions


def test_a_state_of_a_loop_may_grow() -> None:
    @sonnx.graph
    def f(x: Float["N"], n: Int64[()]):
        return op.Loop(n, True, x, 0, body=lambda i, go, s, k: (go, op.Concat(s, x, axis=0), k + i, s[0] * 2.0))

    body = valid(f.model).graph.node[-1].attribute[0].g
    assert len(body.input[2].type.tensor_type.shape.dim) == 1
    assert not body.input[2].type.tensor_type.shape.dim[0].HasField("dim_param")
    s, k, each = f(np.float32([1, 2]), 3)
    assert (s.tolist(), k.tolist(), each.tolist()) == ([1, 2] * 4, 3, [2, 2, 2])


def test_a_loop_ends_by_its_condition() -> None:
    @sonnx.graph
    def f(x: Float[()]):
        return op.Loop(None, x < 100.0, x, body=lambda i, go, s: (s * 2.0 < 100.0, s * 2.0))

    assert f(3.0).tolist() == 192 and f(200.0).tolist() == 200


def test_scan_and_sequence_map() -> None:
    @sonnx.graph
    def f(x: Float["T", 2], start: Float[2], items: SequenceType(Float["K"])):
        total, sums = op.Scan(start, x, num_scan_inputs=1, body=lambda s, v: (s + v, s + v))
        return total, sums, op.SequenceMap(items, start, body=lambda v, s: v * s[0])

    valid(f.model)
    x = np.float32([[1, 2], [3, 4]])
    total, sums, doubled = f(x, np.float32([2, 0]), [np.float32([1]), np.float32([1, 5])])
    assert (total.tolist(), sums.tolist()) == ([6, 6], [[3, 2], [6, 6]])
    assert [v.tolist() for v in doubled] == [[2], [2, 10]]


def test_bodies_within_bodies() -> None:
    @sonnx.graph
    def f(x: Float["N"], n: Int64[()]):
        def body(i: Any, go: Any, s: Any) -> Any:
            return go, op.If(i % 2 == 0, then_branch=lambda: s + x, else_branch=lambda: s * 2.0)

        return op.Loop(n, None, x, body=body)

    valid(f.model)
    assert f(np.float32([1, 3]), 3).tolist() == [5, 15]


def test_optional_values() -> None:
    @sonnx.graph
    def f(x: OptionalType(Float["N"])):
        return op.OptionalHasElement(x), op.OptionalGetElement(x) + 1.0

    valid(f.model)
    there, y = f(np.float32([1]))
    assert there.tolist() is True and y.tolist() == [2]


def test_a_type_may_be_an_attribute() -> None:
    def f(x: Float["N"]):
        return op.OptionalHasElement(op.Optional(type=Float["N"])), op.OptionalHasElement(op.Optional(x)), op.Cast(x, to=np.int64)

    assert [v.tolist() for v in sonnx.graph(f)([1.0])] == [False, True, [1]]
    valid(sonnx.graph(f).model)


def test_a_graph_within_a_graph_is_inlined() -> None:
    @sonnx.graph
    def dense(x: Float["N", 3]) -> Float["N", 4]:
        return op.Relu(x @ authored.W)

    @sonnx.graph
    def net(x: Float["N", 3]):
        return dense(x) - dense(x=x * 2.0), dense(x3)

    valid(net.model)
    assert operators(net.model).count("MatMul") == 2 and not net.model.functions  # dense(x3) is an array
    assert net.model.graph.initializer[0].name == "W"
    for got, want in zip(net(x3), (np.maximum(x3 @ authored.W, 0) * -1, np.maximum(x3 @ authored.W, 0)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)
    refused("SX393", lambda x: dense(x), "input 'x' of dense must be float[N, 3], got float[N, 5]", types={"x": Float["N", 5]})
    refused("SX301", lambda x: dense(x, x), "it takes x", types={"x": Float["N", 3]})


def test_operators_of_a_program() -> None:
    @sonnx.define_operator(domain="com.example.authoring")
    def Cube(xp: Any, x: "float") -> "float":
        return x * x * x

    @sonnx.define_operator(domain="com.example.authoring", function=lambda op, x, k: op.Mul(x, float(k)))
    def Times(xp: Any, x: "float", *, k: int = 2) -> "float":
        return x * k

    @sonnx.graph
    def f(x: Float["N"]):
        return Cube(Times(x, k=3) + 1.0), Cube(x)

    assert [(n.domain, n.op_type) for n in f.model.graph.node if n.domain] == [("com.example.authoring", "Cube")] * 2
    assert [v.tolist() for v in f([1, 0])] == [[64, 1], [1, 0]]
    assert f.operators == [Times, Cube]
    rep = sonnx.prepare(f.model, operators=f.operators)
    assert rep.run([np.float32([2])])[1].tolist() == [8]


def test_operators_of_other_domains_and_several_results() -> None:
    @sonnx.graph
    def f(x: Float["N", 3]):
        values, where = op.TopK(x, [1], axis=1)
        left, right = op.Split(x, [1, 2], axis=1, outputs=2)
        halves = op.Split(op.Concat(x, x, axis=1), num_outputs=2, axis=1)
        scaled = op.Scaler(x, offset=[1.0], scale=[2.0], domain="ai.onnx.ml")
        return values, where, left, right, *halves, scaled

    valid(f.model)
    got = f(x3)
    assert [v.shape for v in got] == [(2, 1), (2, 1), (2, 1), (2, 2), (2, 3), (2, 3), (2, 3)]
    np.testing.assert_array_equal(got[-1], (x3 - 1) * 2)


# --- mistakes


def test_an_error_is_raised_at_the_line_that_wrote_the_node() -> None:
    def f(x: Float["N", 3]):
        h = x + 1.0
        y = h @ np.ones((4, 2), np.float32)  # this line
        return y + 1.0

    with pytest.raises(InvalidInput) as found:
        sonnx.graph(f)
    lines = [s.line for s in traceback.extract_tb(found.value.__traceback__) if s.filename == __file__]
    assert lines[-1] == "y = h @ np.ones((4, 2), np.float32)  # this line"
    assert found.value.code == "SX393" and found.value.operator == "MatMul"
    assert "float[N, 3], float[4, 2]" in str(found.value) and "Incompatible dimensions" in str(found.value)


N = {"x": Float["N", 3]}


def branches(x: Any, then: Any) -> Any:
    return op.If(x[0, 0] > 0.0, then_branch=then, else_branch=lambda: x)


MISTAKES: dict[str, tuple[str, str, Any]] = {
    "dtype": ("SX393", "Add takes A and B of one type; got float[N, 3] and double[3]", lambda x: x + np.ones(3)),
    "kind": ("SX393", "Cos takes input of", lambda x: op.Cos(op.Cast(x, to=Int64))),
    "broadcast": ("SX393", "Incompatible dimensions", lambda x: x + np.ones(4, np.float32)),
    "concat": ("SX393", "must have same rank", lambda x: op.Concat(x, x[0], axis=0)),
    "unknown": ("SX202", "did you mean 'MatMul'", lambda x: op.Matmul(x, x)),
    "domain": ("SX202", "com.none has no operator", lambda x: op.Foo(x, domain="com.none")),
    "count": ("SX301", "Relu takes the inputs X, got 2", lambda x: op.Relu(x, x)),
    "attribute": ("SX333", "did you mean 'axis'", lambda x: op.Softmax(x, axes=1)),
    "required": ("SX333", "requires the attribute 'to'", lambda x: op.Cast(x)),
    "value as attribute": ("SX394", "must be known while the graph is written", lambda x: op.Softmax(x, axis=op.Shape(x)[0])),
    "outputs": ("SX301", "pass outputs=", lambda x: op.Split(x, [1, 2], axis=1)),
    "too many outputs": ("SX301", "got outputs=3", lambda x: op.TopK(x, [1], outputs=3)),
    "text as number": ("SX333", "the attribute 'axis' of Softmax must be an integer, got 'a'", lambda x: op.Softmax(x, axis="a")),
    "number as list": ("SX333", "must be a list of integers, got 1", lambda x: op.Transpose(x, perm=1)),
    "list as number": ("SX333", "must be an integer, got [1]", lambda x: op.Softmax(x, axis=[1])),
    "number as text": ("SX333", "must be a text, got 1", lambda x: op.Gelu(x, approximate=1)),
    "number as array": ("SX333", "must be an array, got 1", lambda x: op.ConstantOfShape(op.Shape(x), value=1)),
    "function of NumPy": ("SX394", "op.Exp", lambda x: np.exp(x)),
    "fraction": ("SX372", "0.5", lambda x: op.Cast(x, to=Int64) + 0.5),
    "overflow": ("SX372", "float can represent, got 1e+300", lambda x: x * 1e300),
    "underflow": ("SX372", "1e-300", lambda x: x * 1e-300),
    "root of integers": ("SX372", "0.5", lambda x: op.Shape(x) ** 0.5),
    "integers to floats": ("SX393", "would be an integer", lambda x: op.Shape(x) ** x[0]),
    "array of integers to floats": ("SX393", "would be an integer", lambda x: np.array([2]) ** x),
    "fraction to integers": ("SX372", "0.5", lambda x: 0.5 ** op.Shape(x)),
    "division of integers": ("SX393", "rounds toward zero", lambda x: op.Shape(x) / 2),
    "remainder of floats": ("SX393", "fmod=1", lambda x: x % 2.0),
    "object": ("SX311", "an operand of Add", lambda x: x + object()),
    "text as a number of outputs": ("SX301", "got outputs='a'", lambda x: op.TopK(x, [1], outputs="a")),
    "dtype of a constant": ("SX316", "dtype must be a dtype", lambda x: op.constant(1.0, "junk")),
    "complex": ("SX393", "complex", lambda x: x + 1j),
    "large": ("SX372", "int64 can represent", lambda x: op.constant(2**70)),
    "lists": ("SX315", "nested lists of one shape", lambda x: op.constant([1.0, [2.0]], Float)),
    "ragged": ("SX311", "nested lists of one shape", lambda x: op.Add(x, [[1.0], [1.0, 2.0]])),
    "if": ("SX394", "op.Where", lambda x: x if x[0, 0] > 0.0 else -x),
    "and": ("SX394", "truth value", lambda x: (x > 0.0) and (x < 1.0)),
    "for": ("SX394", "op.Loop", lambda x: [v * 2.0 for v in x]),
    "int": ("SX394", "the number", lambda x: x[: int(op.Shape(x)[0])]),
    "range": ("SX394", "the number", lambda x: [x for _ in range(op.Shape(x)[0])]),
    "float": ("SX394", "the number", lambda x: float(x[0, 0])),
    "len": ("SX394", "x.shape[0]", lambda x: x[: len(x)]),
    "in": ("SX394", "the elements", lambda x: 1.0 in x),
    "numpy": ("SX394", "call the finished graph", lambda x: np.asarray(x)),
    "nothing": ("SX392", "is a `return` missing", lambda x: None),
    "empty": ("SX392", "is a `return` missing", lambda x: ()),
    "result": ("SX392", "must return values of the graph, got a object", lambda x: object()),
    "name of an input": ("SX392", "may not have the name of an input", lambda x: {"x": x + 1.0}),
    "empty name": ("SX392", "must have a name", lambda x: {"": x}),
    "index": ("SX338", "must be in [-3, 3), got 3", lambda x: x[:, 3]),
    "indices": ("SX338", "at most 2 indices, got 3", lambda x: x[0, 0, 0]),
    "mask": ("SX338", "Compress", lambda x: x[x > 0.0]),
    "text": ("SX338", "an index must be", lambda x: x["a"]),
    "step": ("SX338", "other than 0", lambda x: x[::0]),
    "branches": ("SX393", "same number of values", lambda x: branches(x, lambda: (x, x))),
    "branch types": ("SX393", "cannot replace", lambda x: branches(x, lambda: op.Shape(x))),
    "no function": ("SX392", "must be a function", lambda x: branches(x, 1)),
    "arguments of a body": ("SX392", "called with 3 values", lambda x: op.Loop(2, None, x, body=lambda s: s)),
    "results of a body": ("SX301", "return cond, state, y", lambda x: op.Loop(2, None, x, body=lambda i, c, s: c)),
    "type of a state": ("SX393", "cannot replace", lambda x: op.Loop(2, None, x, body=lambda i, c, s: (c, op.Shape(s)))),
    "condition": ("SX393", "the condition", lambda x: op.Loop(2, None, x, body=lambda i, c, s: (s, s))),
    "scan inputs": ("SX333", "num_scan_inputs", lambda x: op.Scan(x, num_scan_inputs=2, body=lambda s: s)),
    "list of values": ("SX393", "write op.Concat(*values)", lambda x: op.Concat([x, x], axis=0)),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_typed_error(name: str) -> None:
    code, text, function = MISTAKES[name]
    refused(code, function, text, types=N)


def test_a_value_does_not_leave_its_graph() -> None:
    kept = []

    def keep(i: Any, c: Any, s: Any) -> Any:
        kept.append(s)
        return c, s * 2.0

    refused("SX394", lambda x: op.Loop(2, None, x, body=keep) + kept[-1], "outside of the graph or body", types=N)
    sonnx.graph(lambda x: kept.append(x) or x + 1.0, types=N)
    refused("SX394", lambda x: x + kept[-1], "outside of the graph or body", types=N)
    with pytest.raises(InvalidInput, match="SX394"):
        kept[-1] + 1.0
    with pytest.raises(InvalidInput, match=r"singa\.tape\.op"):
        op.Relu(x3)
    with pytest.raises(AttributeError, match="did you mean 'Relu'"):
        op.relu(x3)


def test_wrong_definitions() -> None:
    def untyped(x: Float["N"], y):
        return x

    def default(x: Float["N"] = 1.0):
        return x

    def several(*xs: Float["N"]):
        return xs[0]

    def plain(x: float):
        return x

    def unknown(x: Flaot["N"]):
        return x

    def returns(x: Float["N", 3]) -> Int64["N", 3]:
        return x

    def size(x: Float["N", 3]) -> Float["N", 4]:
        return x

    def count(x: Float["N", 3]) -> tuple[Float, Float]:
        return x

    refused("SX392", untyped, "'y' of untyped has no type")
    refused("SX392", default, "without a default")
    refused("SX392", several, "one input")
    refused("SX392", plain, "must be one such as sonnx.Float")
    refused("SX392", unknown, "'Flaot' is not defined")
    refused("SX393", returns, "must be int64[N, 3], got float[N, 3]: the element types differ")
    refused("SX393", size, "the sizes differ")
    refused("SX392", count, "its annotation has 2 types")
    refused("SX392", len, "must be written by a Python function")
    refused("SX392", lambda x: x, "has no parameter 'z'", types={"z": Float})
    refused("SX392", lambda x: (x + 1.0, x), "but outputs names 1", types=N, outputs=["a"])
    refused("SX392", lambda x: x + 1.0, "outputs=['scores']", types=N, outputs="scores")
    refused("SX392", lambda x: x + 1.0, "outputs must be a list", types=N, outputs=3)
    refused("SX392", lambda x: x + 1.0, "types must be a dict", types=[Float])
    refused("SX392", lambda x: x + 1.0, "name must be a text, got 3", types=N, name=3)
    refused("SX392", lambda x: (x + 1.0, x), "different names", types=N, outputs=["a", "a"])
    for bad in ((1.5,), (True,), (..., 3), (-1,), ("",), ([2],)):
        with pytest.raises(InvalidInput, match="SX392"):
            Float[bad]
    for make in (SequenceType, OptionalType):
        with pytest.raises(InvalidInput, match="SX392"):
            make(int)


def test_wrong_inputs_of_a_call() -> None:
    f = authored.linear
    cases: list[tuple[str, Any]] = [
        ("SX301", lambda: f()),
        ("SX301", lambda: f(x3, x3)),
        ("SX301", lambda: f(y=x3)),
        ("SX311", lambda: f(tensor.Tensor(data=x3))),
        ("SX372", lambda: authored.power([1.0], 1.5)),
        ("SX372", lambda: authored.power([1.0], 2**70)),
        ("SX315", lambda: f([[1.0], [1.0, 2.0]])),
    ]
    for code, call in cases:
        with pytest.raises(InvalidInput) as found:
            call()
        assert found.value.code == code
    with pytest.raises(InvalidInput):
        f(x3.astype(np.float64))
    with pytest.raises(InvalidInput):
        f(np.ones((2, 4), np.float32))


def test_a_declared_type_completes_what_inference_does_not_know() -> None:
    @sonnx.graph
    def f(x: Float["N"], shape: Int64["R"]) -> Float["A", 7]:
        return op.Reshape(x, shape)

    (y,) = valid(f.model).graph.output
    assert [d.dim_value or d.dim_param for d in y.type.tensor_type.shape.dim] == ["A", 7]


def test_types_and_shapes_are_known_while_the_graph_is_written() -> None:
    seen: list[Any] = []

    @sonnx.graph
    def f(x: Float["N", 3], s: SequenceType(Int64)):
        y = op.Transpose(x) @ x
        seen.extend([x.shape, y.shape, y.dtype, str(op.Shape(x).type), str(s.type), repr(y)])
        return y

    assert f.outputs == ["y"]
    assert seen[:3] == [("N", 3), (3, 3), np.float32]
    assert seen[3:] == ["int64[2]", "seq(int64)", "<value of a graph: float[3, 3]>"]


def test_a_graph_trains_and_is_saved(tmp_path: Path) -> None:
    sonnx.save(authored.linear.model, tmp_path / "linear.onnx")
    np.testing.assert_allclose(sonnx.prepare(tmp_path / "linear.onnx").run([x3])[0], x3 @ authored.W + authored.b, rtol=1e-5)
    assert set(sonnx.SONNXModel(tmp_path / "linear.onnx").get_params()) == {"W", "b"}
    with pytest.raises(InvalidModel, match="pass its attribute `model`"):
        sonnx.prepare(authored.linear)


def test_no_node_of_a_body_is_left_out() -> None:
    inner = [n.op_type for node in authored.power.model.graph.node for g in graphs(node) for n in g.node]
    assert "Mul" in inner


def test_an_unsupported_form_names_the_opset() -> None:
    error = refused("SX206", lambda x: op.Loop(2, None, op.SequenceConstruct(x), body=lambda i, c, s: (c, s)), types=N, opset=12)
    assert isinstance(error, UnsupportedModel)


def test_a_rank_may_be_unknown() -> None:
    for declared in (Float, Float[...]):
        f = sonnx.graph(lambda x: op.Relu(x), types={"x": declared})
        assert not f.model.graph.input[0].type.tensor_type.HasField("shape")
        assert [f(np.full(shape, -1, np.float32)).shape for shape in ((), (2, 3))] == [(), (2, 3)]
