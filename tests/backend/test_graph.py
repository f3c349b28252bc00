"""What models may legally be made of, and what is refused, with everything that is wrong told at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, helper, parser

from singa_backend import InvalidModel, OperatorError, ResourceExhausted, SingaBackend, UnsupportedModel

F = np.float32
FLOAT = TensorProto.FLOAT


def parse(text: str, *, opset: int = 21, functions: str = "") -> ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}, "f": 1]> {text} {functions}')


def run(text: str, *inputs: Any, functions: str = "", device: str = "CPU") -> Any:
    return SingaBackend.run_model(parse(text, functions=functions), list(inputs), device)


def info(name: str, shape: Sequence[int] | None = None, kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def model(nodes: Sequence[NodeProto], inputs: Sequence[str] = ("x",), outputs: Sequence[str] = ("y",), opset: int = 21,
          **kwargs: Any) -> ModelProto:  # fmt: skip
    graph = helper.make_graph(list(nodes), "g", [info(n) for n in inputs], [info(n) for n in outputs], **kwargs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def node(op: str, inputs: str, outputs: str, **attributes: Any) -> NodeProto:
    return helper.make_node(op, inputs.split(), outputs.split(), **attributes)


def messages(error: Any) -> list[str]:
    return [p.message for p in error.value.problems]


X = F([1, -2, 3])


# --- legal: scopes


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
def test_capture_through_two_levels(device: str) -> None:
    text = """g (bool c, float[3] x) => (float[3] y) { z = Add(x, x)
        y = If(c)<then_branch = t () => (float[3] a) { w = Neg(x)
                a = If(c)<then_branch = tt () => (float[3] b) { b = Sub(z, w) },
                          else_branch = te () => (float[3] d) { d = Neg(z) }> },
            else_branch = e () => (float[3] f) { f = Identity(x) }> }"""
    np.testing.assert_array_equal(run(text, np.True_, X, device=device)[0], 3 * X)


def test_a_capture_is_the_output() -> None:
    text = """g (bool c, float[3] x) => (float[3] y) { z = Add(x, x)
        y = If(c)<then_branch = t () => (float[3] z) { unused = Neg(z) },
                  else_branch = e () => (float[3] x) { unused = Neg(x) }> }"""
    np.testing.assert_array_equal(run(text, np.True_, X)[0], 2 * X)
    np.testing.assert_array_equal(run(text, np.False_, X)[0], X)


def test_an_empty_branch_gives_its_initializer() -> None:
    """Twice the same value too; and the caller may write on what it gets."""
    one = helper.make_tensor("one", FLOAT, [1], [1.0])
    then = helper.make_graph([], "t", [], [info("one"), info("one")], initializer=[one])
    other = helper.make_graph([], "e", [], [info("x"), info("one")], initializer=[one])
    made = model([helper.make_node("If", ["c"], ["y", "z"], then_branch=then, else_branch=other)], ["x"], ["y", "z"])
    made.graph.input.append(info("c", [], TensorProto.BOOL))
    rep = SingaBackend.prepare(made)
    for cond, first in ((True, F([1])), (False, X)):
        for _ in range(2):
            y, z = rep.run([X.copy(), np.bool_(cond)])
            np.testing.assert_array_equal(y, first)
            np.testing.assert_array_equal(z, F([1]))
            y += 1
            z += 1


def test_sibling_branches_may_use_the_same_names() -> None:
    text = """g (bool c, float[3] x) => (float[3] y, float[3] z) {
        y = If(c)<then_branch = t () => (float[3] a) { h = Neg(x) a = Abs(h) },
                  else_branch = e () => (float[3] a) { h = Abs(x) a = Neg(h) }>
        z = If(c)<then_branch = t () => (float[3] a) { h = Add(y, x) a = Neg(h) },
                  else_branch = e () => (float[3] a) { a = Identity(y) }> }"""
    y, z = run(text, np.True_, X)
    np.testing.assert_array_equal(y, abs(X))
    np.testing.assert_array_equal(z, -(abs(X) + X))
    np.testing.assert_array_equal(run(text, np.False_, X)[1], -abs(X))


def test_a_value_captured_late_lives_long_enough() -> None:
    """z is last used inside a branch of a branch, after every use in its own graph."""
    text = """g (bool c, float[3] x) => (float[3] y) { z = Add(x, x) u = Neg(z) v = Abs(u)
        y = If(c)<then_branch = t () => (float[3] a) {
                a = If(c)<then_branch = tt () => (float[3] b) { b = Add(z, v) },
                          else_branch = te () => (float[3] d) { d = Neg(v) }> },
            else_branch = e () => (float[3] f) { f = Identity(v) }> }"""
    np.testing.assert_array_equal(run(text, np.True_, X)[0], 2 * X + 2 * abs(X))


def test_loop_in_if_in_loop() -> None:
    text = """g (int64 n, bool t, float[3] x) => (float[3] y, float[k, 3] all) {
        y, all = Loop<body = b (int64 i, bool c, float[3] a) => (bool go, float[3] a2, float[3] seen) {
            two = Constant<value = int64 {2}>() even = Mod(i, two) zero = Sub(two, two) is = Equal(even, zero) go = Identity(c)
            a2 = If(is)<then_branch = tb () => (float[3] r) {
                    r = Loop<body = inner (int64 j, bool d, float[3] q) => (bool go2, float[3] q2)
                        { go2 = Identity(d) q2 = Add(q, x) }>(i, t, a) },
                else_branch = eb () => (float[3] s) { s = Neg(a) }>
            seen = Identity(a) }>(n, t, x) }"""
    y, every = run(text, np.int64(5), np.True_, X)
    a, seen = X, []
    for i in range(5):
        seen.append(a)
        a = -a if i % 2 else a + i * X
    np.testing.assert_array_equal(y, a)
    np.testing.assert_array_equal(every, np.stack(seen))


@pytest.mark.row("E13")
def test_order_of_nodes_does_not_matter() -> None:
    """A node may stand before its inputs' makers, also when only its subgraph needs them."""
    text = """g (bool c, float[3] x) => (float[3] y) {
        y = If(c)<then_branch = t () => (float[3] a) { a = Add(b, w) b = Neg(z) },
                  else_branch = e () => (float[3] d) { d = Identity(z) }>
        w = Mul(z, z) z = Add(x, x) }"""
    np.testing.assert_array_equal(run(text, np.True_, X)[0], 4 * X * X - 2 * X)


def test_many_nodes_in_reverse() -> None:
    nodes = [node("Neg", f"v{i}", f"v{i + 1}") for i in range(5000)]
    rep = SingaBackend.prepare(model(nodes[::-1], ["v0"], ["v5000"]))
    np.testing.assert_array_equal(rep.run([X])[0], X)


def test_empty_outputs_and_inputs() -> None:
    """Outputs that nobody wants have no name; several nodes may have such."""
    nodes = [node("Constant", "", "k", value=helper.make_tensor("k", 7, [1], [2])),
             helper.make_node("TopK", ["x", "k"], ["y", ""]), helper.make_node("TopK", ["x", "k"], ["", "at"]),
             helper.make_node("Clip", ["x", "", "low"], ["z"])]  # fmt: skip
    made = model(nodes, ["x", "low"], ["y", "at", "z"])
    y, at, z = SingaBackend.run_model(made, [X, np.array(2, F)])
    assert (y.tolist(), at.tolist(), z.tolist()) == ([3, 1], [2, 0], [1, -2, 2])


def test_initializers_may_be_inputs() -> None:
    w = helper.make_tensor("w", FLOAT, [3], [10, 20, 30])
    rep = SingaBackend.prepare(model([node("Add", "x w", "y")], ["x", "w"], initializer=[w]))
    np.testing.assert_array_equal(rep.run([X])[0], X + F([10, 20, 30]))
    np.testing.assert_array_equal(rep.run({"x": X, "w": X})[0], X + X)
    np.testing.assert_array_equal(rep.run({"x": X})[0], X + F([10, 20, 30]))


def test_outputs_without_nodes() -> None:
    w = helper.make_tensor("w", FLOAT, [3], [10, 20, 30])
    y = SingaBackend.run_model(model([], ["x"], ["x", "w", "x"], initializer=[w]), [X])
    np.testing.assert_array_equal(y[0], X)
    np.testing.assert_array_equal(y[1], F([10, 20, 30]))


@pytest.mark.parametrize("indices, dims", [([1, 5], [2]), ([0, 1, 1, 2], [2, 2])])
def test_sparse_initializers(indices: list[int], dims: list[int]) -> None:
    """Indices count elements, or are coordinates."""
    w = helper.make_sparse_tensor(helper.make_tensor("w", FLOAT, [2], [7, 8]), helper.make_tensor("i", 7, dims, indices), [2, 3])
    made = model([node("Identity", "w", "y")], [], sparse_initializer=[w])
    np.testing.assert_array_equal(SingaBackend.run_model(made, [])[0], F([[0, 7, 0], [0, 0, 8]]))


# --- legal: functions


def test_function_attributes_and_defaults() -> None:
    functions = """
        <domain: "f", opset_import: ["": 21]> leak <alpha>(a) => (b) { b = LeakyRelu<alpha: float = @alpha>(a) }
        <domain: "f", opset_import: ["": 21]> half <alpha: float = 0.5>(a) => (b) { b = LeakyRelu<alpha: float = @alpha>(a) }
        <domain: "f", opset_import: ["": 21, "f": 1]> both <beta: float = 0.25>(a) => (b, c) {
            b = f.leak<alpha: float = @beta>(a) c = f.half(a) }"""
    text = """g (float[3] x) => (float[3] p, float[3] q, float[3] r, float[3] s, float[3] t, float[3] u) {
        p = f.leak<alpha = 0.125>(x) q = f.half(x) r = f.half<alpha = 2.0>(x) s, t = f.both(x) u = f.leak(x) }"""
    got = [y[1].item() for y in run(text, X, functions=functions)]
    # `leak` without alpha is LeakyRelu without alpha: 0.01
    np.testing.assert_allclose(got, [-0.25, -1.0, -4.0, -0.5, -1.0, -0.02], rtol=1e-6)


def test_function_in_a_branch_and_branch_in_a_function() -> None:
    functions = """
        <domain: "f", opset_import: ["": 21]> pick <flag>(a) => (b) {
            k = Constant<value_int: int = @flag>() c = Cast<to = 9>(k)
            b = If(c)<then_branch = t () => (d) { e = Constant<value_int: int = @flag>() h = CastLike(e, a) d = Mul(a, h) },
                      else_branch = o () => (m) { m = Neg(a) }> }
        <domain: "f", opset_import: ["": 21, "f": 1]> twice (a) => (b) { c = f.pick<flag = 3>(a) b = f.pick<flag = 0>(c) }"""
    text = """g (bool c, float[3] x) => (float[3] y) {
        y = If(c)<then_branch = t () => (float[3] a) { a = f.twice(x) },
                  else_branch = e () => (float[3] b) { b = f.pick<flag = 5>(x) }> }"""
    np.testing.assert_array_equal(run(text, np.True_, X, functions=functions)[0], -3 * X)
    np.testing.assert_array_equal(run(text, np.False_, X, functions=functions)[0], 5 * X)


def test_function_inputs_and_outputs_left_out() -> None:
    functions = """<domain: "f", opset_import: ["": 21]> clip (a, low, high) => (b, c) { b = Clip(a, low, high) c = Neg(a) }"""
    made = parse("g (float[3] x, float h) => (float[3] y) { y = f.clip(x) }", functions=functions)
    del made.graph.node[:]
    made.graph.node.extend([
        helper.make_node("clip", ["x", "", "h"], ["y", ""], domain="f"),
        helper.make_node("clip", ["x"], ["", "z"], domain="f"),
        helper.make_node("clip", ["x"], ["w"], domain="f"),
    ])  # fmt: skip
    made.graph.output.extend([info("z"), info("w")])
    y, z, w = SingaBackend.run_model(made, [X, np.array(2, F)])
    assert (y.tolist(), z.tolist(), w.tolist()) == ([1, -2, 2], [-1, 2, -3], X.tolist())


def test_function_output_is_its_input() -> None:
    functions = '<domain: "f", opset_import: ["": 21]> swap (a, b) => (b, a) { }'
    y, z = run("g (float[3] x, float[3] w) => (float[3] y, float[3] z) { y, z = f.swap(x, w) }", X, -X, functions=functions)
    np.testing.assert_array_equal(y, -X)
    np.testing.assert_array_equal(z, X)


def test_a_function_has_its_own_opset() -> None:
    """Softmax means something else at opset 11."""
    functions = '<domain: "f", opset_import: ["": 11]> soft (a) => (b) { b = Softmax(a) }'
    x = np.zeros((2, 3, 4), F)
    y, z = run("g (float[2,3,4] x) => (float[2,3,4] y, float[2,3,4] z) { y = f.soft(x) z = Softmax(x) }", x, functions=functions)
    np.testing.assert_allclose(y, np.full_like(x, 1 / 12))
    np.testing.assert_allclose(z, np.full_like(x, 1 / 4))


def test_a_function_goes_before_an_operator_of_its_name() -> None:
    made = parse("g (float[3] x) => (float[3] y) { y = Neg(x) }")
    f = parser.parse_function('<domain: "", opset_import: ["": 21]> Neg (a) => (b) { b = Abs(a) }')
    f.domain = ""
    made.functions.append(f)
    np.testing.assert_array_equal(SingaBackend.run_model(made, [X])[0], abs(X))


# --- illegal


@pytest.mark.row("E13")
def test_cycle() -> None:
    ring = [node("Add", "x b", "a", name="one"), node("Neg", "a", "b", name="two")]
    made = model([*ring, node("Neg", "b", "y"), node("Relu", "nope", "r")])
    with pytest.raises(InvalidModel) as error:
        SingaBackend.prepare(made)
    assert len(error.value.problems) == 2, messages(error)
    assert "cycle among the nodes 'one', 'two'" in messages(error)[0] and "'nope' is not defined" in messages(error)[1]


def test_a_node_needs_itself() -> None:
    with pytest.raises(InvalidModel, match="cycle"):
        SingaBackend.prepare(model([node("Add", "x y", "y")]))
    text = """g (bool c, float[3] x) => (float[3] y) {
        y = If(c)<then_branch = t () => (float[3] a) { a = Neg(y) }, else_branch = e () => (float[3] b) { b = Neg(x) }> }"""
    with pytest.raises(InvalidModel, match="cycle"):
        SingaBackend.prepare(parse(text))


def w(name: str = "w", dims: Sequence[int] = (3,), values: Sequence[float] = (1, 2, 3)) -> TensorProto:
    return TensorProto(name=name, data_type=FLOAT, dims=dims, float_data=values)


@pytest.mark.parametrize(
    "made, match",
    [
        (model([node("Neg", "x", "y"), node("Abs", "x", "y")]), "'y' is defined more than once"),
        (model([node("TopK", "x x", "y y")]), "'y' is defined more than once"),
        (model([node("Neg", "x", "x")], outputs=["x"]), "'x' is defined more than once|cycle"),
        (model([node("Neg", "x", "y")], inputs=["x", "x"]), "'x' is defined more than once"),
        (model([node("Neg", "x", "y")], initializer=[w(), w()]), "'w' is defined more than once"),
        (model([node("Neg", "x", "y")], inputs=["x", "w", "w"], initializer=[w()]), "'w' is declared more than once"),
        (model([node("Neg", "x", "w")], outputs=["w"], initializer=[w()]), "'w' is defined more than once"),
        (model([node("Neg", "x1", "y")]), "'x1' is not defined; did you mean 'x'"),
        (model([node("Neg", "x", "y")], outputs=["y", "z"]), "output 'z' of graph 'g' is not defined"),
        (model([node("Add", "x w", "y")], initializer=[w(dims=[-3])]), "negative dimension"),
        (model([node("Add", "x w", "y")], initializer=[w(values=[1, 2])]), "must have 3 values in float_data, got 2"),
        (model([node("Add", "x w", "y")], initializer=[w(values=[1, 2, 3, 4])]), "must have 3 values in float_data, got 4"),
        (model([node("Add", "x w", "y")], initializer=[TensorProto(name="w", data_type=FLOAT, dims=[3], raw_data=b"12")]),
         "must have 12 bytes, got 2"),
        (model([node("Add", "x w", "y")], initializer=[TensorProto(name="w", data_type=99, dims=[0])]), "unknown element type"),
        (model([node("Neg", "x", "y")], initializer=[w(name="")]), "has no name"),
        (model([node("Neg", "x", "y", alpha=1.0)]), "Neg has no attribute 'alpha'"),
        (model([node("LeakyRelu", "x", "y", alpha=1)]), "'alpha' of LeakyRelu must be FLOAT, got INT"),
        (model([node("Concat", "x", "y")]), "Concat-13 requires the attribute 'axis'"),
        (model([node("Neg", "x x", "y")]), "must have 1 inputs, got 2"),
        (model([node("Neg", "x", "y z")]), "must have 1 outputs, got 2"),
        (model([helper.make_node("Add", ["x", ""], ["y"])]), "requires the input 'B'"),
        (model([node("Mish", "x", "y")], opset=13), "Mish requires opset 18 of ai.onnx or later, got 13"),
        (model([node("Neg", "x", "y", domain="other")]), "does not import an opset of domain 'other'"),
        (model([node("Neg", "x", "y")], opset=0), "the opset of ai.onnx must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_invalid(made: ModelProto, match: str) -> None:
    with pytest.raises(InvalidModel, match=match):
        SingaBackend.prepare(made)


@pytest.mark.parametrize(("dims", "values", "code"), [([0, 2**62, 8], [], "SX603"), ([1] * 65, [1], "SX607")])
def test_shapes_that_no_array_can_have(dims: list[int], values: list[float], code: str) -> None:
    with pytest.raises(ResourceExhausted, match="'w'") as error:
        SingaBackend.prepare(model([node("Add", "x w", "y")], initializer=[w(dims=dims, values=values)]))
    assert error.value.code == code


def test_invalid_value_types() -> None:
    made = model([node("Neg", "x", "y")])
    made.graph.input[0].type.tensor_type.elem_type = 77
    made.graph.output[0].type.tensor_type.elem_type = 78
    with pytest.raises(InvalidModel) as error:
        SingaBackend.prepare(made)
    assert len(error.value.problems) == 2 and "must be a code of TensorProto.DataType, got 77" in messages(error)[0]


def test_both_opsets() -> None:
    made = model([node("Neg", "x", "y")])
    made.opset_import.append(helper.make_opsetid("ai.onnx", 11))
    with pytest.raises(InvalidModel, match=r"must import one opset of .*, got 21 and 11"):
        SingaBackend.prepare(made)


FUNCTIONS = {
    "direct": '<domain: "f", opset_import: ["f": 1]> a (x) => (y) { y = f.a(x) }',
    "mutual": """<domain: "f", opset_import: ["f": 1]> a (x) => (y) { y = f.b(x) }
        <domain: "f", opset_import: ["f": 1]> b (x) => (y) { y = f.a(x) }""",
    "in a branch": """<domain: "f", opset_import: ["": 21, "f": 1]> a (x) => (y) { c = Constant<value = bool {1}>()
        y = If(c)<then_branch = t () => (p) { p = f.a(x) }, else_branch = e () => (q) { q = Identity(x) }> }""",
}  # fmt: skip


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_recursion(kind: str) -> None:
    with pytest.raises(InvalidModel, match=r"function calls itself: a -> (b -> )?a"):
        run("g (float[3] x) => (float[3] y) { y = f.a(x) }", X, functions=FUNCTIONS[kind])


def test_function_problems() -> None:
    functions = """<domain: "f", opset_import: ["": 21]> a <alpha>(x) => (y) { y = LeakyRelu<alpha: float = @beta>(x) }
        <domain: "f", opset_import: ["": 21]> b (x) => (y) { y = Neg(x) }
        <domain: "f", opset_import: ["": 21]> b (x) => (z) { y = Neg(outside) }"""
    made = parse("g (float[3] x) => (float[3] p, float[3] q) { p = f.a<gamma = 1.0>(x, x) q = f.b(x) }", functions=functions)
    reference = node("LeakyRelu", "x", "r")
    reference.attribute.add(name="alpha", type=1, ref_attr_name="alpha")
    made.graph.node.append(reference)
    with pytest.raises(InvalidModel) as error:
        SingaBackend.prepare(made)
    for part in ("f.b is defined more than once", "function a must have at most 1 inputs",
                 "has no attribute 'gamma' (it has: alpha)", "refers to 'beta'", "'outside' is not defined",
                 "output 'z' of function b", "'alpha' refers to 'alpha': outside a function"):  # fmt: skip
        assert any(part in m for m in messages(error)), (part, messages(error))


def test_everything_at_once() -> None:
    """What contradicts ONNX and what is not implemented, also inside subgraphs and after unknown operators."""
    inner = helper.make_graph([node("Nog", "x", "i")], "t", [], [info("i")])
    outer = helper.make_graph([node("Neg", "x", "o", beta=1)], "e", [], [info("o")])
    nodes = [node("Rellu", "x", "a"), node("Neg", "a", "b", alpha=1), node("If", "x", "c", then_branch=inner, else_branch=outer),
             node("Loop2", "x", "d", body=inner), node("Relu", "nowhere", "y")]  # fmt: skip
    with pytest.raises(InvalidModel) as error:
        SingaBackend.prepare(model(nodes))
    for part in ("no operator Rellu", "did you mean Relu?", "Neg has no attribute 'alpha'", "Neg has no attribute 'beta'",
                 "no operator Nog", "no operator Loop2", "'nowhere' is not defined"):  # fmt: skip
        assert any(part in m for m in messages(error)), (part, messages(error))
    assert sum("Nog" in m for m in messages(error)) == 2
    with pytest.raises(UnsupportedModel) as lacking:
        SingaBackend.prepare(model([*nodes[:1], node("Nag", "a", "y")]))
    assert [p.operator for p in lacking.value.problems] == ["Rellu", "Nag"]
    assert all(p.node and p.code == "SX202" and p.opset == 21 for p in lacking.value.problems)


def test_opsets_of_the_future() -> None:
    with pytest.raises(UnsupportedModel, match="the newest of the installed onnx"):
        SingaBackend.prepare(model([node("Neg", "x", "y")], opset=999))
    made = model([node("Neg", "x", "y")])
    made.opset_import.append(helper.make_opsetid("ai.onnx.ml", 999))
    with pytest.raises(UnsupportedModel, match=r"opset of ai\.onnx\.ml must be at most .* got 999"):
        SingaBackend.prepare(made)


def test_a_graph_as_a_function_attribute() -> None:
    functions = '<domain: "f", opset_import: ["": 21]> a <then>(x) => (y) { y = Neg(x) }'
    made = parse("g (float[3] x) => (float[3] y) { y = f.a(x) }", functions=functions)
    made.graph.node[0].attribute.append(helper.make_attribute("then", helper.make_graph([], "t", [], [])))
    with pytest.raises(UnsupportedModel, match="takes a graph as an attribute"):
        SingaBackend.prepare(made)


# --- depth


def nested_ifs(depth: int) -> ModelProto:
    """Built in place: protobuf copies no message that is nested deeper than 100."""
    made = model([], [], [])
    graph = made.graph
    graph.input.extend([info("c", [], TensorProto.BOOL), info("x")])
    for level in range(depth):
        graph.output.append(info(f"y{level}"))
        branch = graph.node.add(op_type="If", input=["c"], output=[f"y{level}"])
        other = helper.make_graph([node("Abs", "x", f"e{level}")], "e", [], [info(f"e{level}")])
        branch.attribute.append(helper.make_attribute("else_branch", other))
        graph = branch.attribute.add(name="then_branch", type=5).g
    graph.node.append(node("Neg", "x", "z"))
    graph.output.append(info("z"))
    return made


@pytest.mark.parametrize("depth", [30, 60])
def test_deep_branches(depth: int) -> None:
    np.testing.assert_array_equal(SingaBackend.run_model(nested_ifs(depth), [np.True_, X])[0], -X)


@pytest.mark.parametrize("depth", [100, 300])
def test_too_deep_branches(depth: int) -> None:
    with pytest.raises(ResourceExhausted, match="nest deeper than 64"):
        SingaBackend.prepare(nested_ifs(depth))


def functions(count: int) -> list[Any]:
    calls = [f'<domain: "f", opset_import: ["": 21, "f": 1]> f{i} (a) => (b) {{ b = f.f{i - 1}(a) }}' for i in range(1, count)]
    first = '<domain: "f", opset_import: ["": 21]> f0 (a) => (b) { b = Neg(a) }'
    return [parser.parse_function(text) for text in (first, *calls)]


def test_deep_functions() -> None:
    made = parse("g (float[3] x) => (float[3] y) { y = f.f39(x) }")
    made.functions.extend(functions(40))
    np.testing.assert_array_equal(SingaBackend.run_model(made, [X])[0], -X)


def test_too_deep_functions() -> None:
    """Also when each body is met first where it lies shallow."""
    made = parse("g (float[3] x) => (float[3] y) { y = f.f99(x) }")
    made.functions.extend(functions(100))
    with pytest.raises(ResourceExhausted, match="nest deeper than 64"):
        SingaBackend.prepare(made)
    made = model([helper.make_node(f"f{i}", ["x"], [f"y{i}"], domain="f") for i in range(100)], outputs=["y99"])
    made.opset_import.append(helper.make_opsetid("f", 1))
    made.functions.extend(functions(100))
    with pytest.raises(ResourceExhausted, match="nest deeper than 64"):
        SingaBackend.prepare(made)


def test_an_error_inside_names_the_innermost_node() -> None:
    text = """g (bool c, float[3] x) => (float[3] y) { y = If(c)<
        then_branch = t () => (float[3] a) { s = Constant<value = int64[1] {4}>() [inner] a = Reshape(x, s) },
        else_branch = e () => (float[3] b) { b = Neg(x) }> }"""
    with pytest.raises(OperatorError) as error:
        run(text.replace("[inner] ", ""), np.True_, X)
    assert error.value.operator == "Reshape" and error.value.opset == 21 and error.value.dtypes == ("float", "int64")
