"""Newest operators written at old opsets: every rule once, what is refused and how, and that a wrong rule is seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from singa_backend import SingaBackend
from singa_backend.conform.opset_matrix.judge import JudgedProblem, judge
from singa_backend.conform.opset_matrix.problems import OpsetProblem, current, drawn, operators_of
from singa_backend.ir.declaration import OperatorRule, declarations
from singa_backend.ir.reader import read
from singa_backend.opsets import writer as writing
from singa_backend.opsets.convert import convert
from singa_backend.opsets.target_schema import Unwritable
from singa_backend.opsets.writer import ADAPTERS, LEAST, OpsetWriter
from singa_backend.proto.schemas import newest, schema_version

OPSETS = range(LEAST, newest("") + 1)
X = np.array([[-2.0, -0.5, 0.25, 3.0], [1.0, np.nan, -7.0, 0.5]], np.float32)


def model(text: str, opset: int = 21, **constants: np.ndarray) -> ModelProto:
    """A graph in onnx's text form as a model; the constants become initializers."""
    made = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')
    made.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in constants.items())
    return made


def at(proto: ModelProto, opset: int) -> ModelProto:
    """The model at another opset, held to onnx's full check and to the least IR version."""
    written = convert(read(proto), opset)
    onnx.checker.check_model(written, full_check=True)
    assert written.opset_import[0].version == opset
    return written


def run(proto: ModelProto, *feeds: Any) -> list[Any]:
    return list(SingaBackend.prepare(proto).run(list(feeds)))


def same(proto: ModelProto, opset: int, *feeds: Any) -> ModelProto:
    """The model at another opset, which must have the outputs that it has at its own."""
    written = at(proto, opset)
    for ours, expected in zip(run(written, *feeds), run(proto, *feeds), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)
    return written


def kinds(proto: ModelProto) -> list[str]:
    return [n.op_type for n in proto.graph.node]


def refused(proto: ModelProto, opset: int) -> Unwritable:
    with pytest.raises(Unwritable) as caught:
        convert(read(proto), opset)
    return caught.value


def judged(proto: ModelProto, feeds: list[Any], *opsets: int) -> JudgedProblem:
    problem = OpsetProblem("m", "drawn", proto.SerializeToString(), feeds, None, 0, 0, operators_of(proto))
    return judge(problem, opsets or None)


# --- every rule


def one(text: str, *feeds: Any, **constants: np.ndarray) -> list[tuple[ModelProto, list[Any]]]:
    return [(model(text, **constants), list(feeds))]


BY_HAND = {
    "Flatten": one("g (float[2, 4] x) => (float[2, 4] y) { y = Flatten <axis = -1> (x) }", X),
    "Pad": one("g (float[2, 4] x) => (float[2, 6] y) { y = Pad (x, p, v, a) }", X, p=np.array([2, 0], np.int64),
               v=np.float32(1.5), a=np.array([-1], np.int64)),
    "Shape": one("g (float[n, m] x) => (int64[1] y) { y = Shape <start = 1> (x) }", X),
    "Slice": one("g (float[2, 4] x) => (float[2, 2] y) { y = Slice (x, s, e, a) }", X, s=np.array([-3], np.int64),
                 e=np.array([3], np.int64), a=np.array([-1], np.int64)),
    "TopK": one("g (float[2, 4] x) => (float[2, 3] y, int64[2, 3] i) { y, i = TopK <largest = 0> (x, k) }",
                np.nan_to_num(X, nan=9), k=np.array([3], np.int64)),
    "Resize": one("""g (float[1, 1, 2, 4] x) => (float[1, 1, 4, 8] y) {
        y = Resize <coordinate_transformation_mode = "asymmetric", nearest_mode = "floor", mode = "nearest"> (x, , , s) }""",
                  X[None, None], s=np.array([1, 1, 4, 8], np.int64)),
    "QuantizeLinear": one("g (float[2, 4] x) => (uint8[2, 4] y) { y = QuantizeLinear (x, s, z) }", np.nan_to_num(X),
                          s=np.float32(0.5), z=np.uint8(3)),
    "DequantizeLinear": one("g (uint8[2, 4] x) => (float[2, 4] y) { y = DequantizeLinear (x, s, z) }",
                            np.arange(8, dtype=np.uint8).reshape(2, 4), s=np.float32(0.5), z=np.uint8(3)),
    "Scan": one("""g (float[2, 4] x) => (float[2, 4] y) {
        y = Scan <num_scan_inputs = 1, body = b (float[4] e) => (float[4] r) { r = Tanh (e) }> (x) }""", X),
}  # fmt: skip
"""Calls that their old versions hold, of operators of which drawn ones ask for more."""


@pytest.mark.parametrize(("name", "version"), sorted(ADAPTERS))
def test_every_rule(name: str, version: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some call is written by the rule and equal, and none before it, drawn or by hand, is wrong."""
    opset = max(o for o in OPSETS if schema_version("", name, o) == version)
    used: list[int] = []
    rule = ADAPTERS[name, version]
    monkeypatch.setitem(ADAPTERS, (name, version), lambda op, known: used.append(op.target) or rule(op, known))
    by_hand = (judged(proto, feeds, opset) for proto, feeds in BY_HAND.get(name, ()))
    for found in itertools.chain(by_hand, (judge(p, [opset]) for p in drawn("", name, current("", name)))):
        status = found.outcomes[opset].status if found.outcomes else found.skipped
        assert status != "wrong", found.outcomes[opset].says
        if status == "equal" and used:
            return
    pytest.fail("no call was written by it")


WITHOUT_A_RULE = {
    ("Attention", 23), ("Cast", 6), ("Cast", 9), ("Cast", 13), ("Cast", 19), ("CastLike", 15), ("CastLike", 19), ("DFT", 17),
    ("OptionalHasElement", 15), ("Upsample", 7),
}  # fmt: skip
"""Versions of another meaning that need no rule: types, inputs and attributes tell which calls they can represent."""


def test_versions_of_another_meaning_have_a_rule() -> None:
    """Scan-8 took the inputs of Scan-9, and scanned another axis."""
    found = {
        (name, version)
        for (domain, name), known in declarations.items()
        for version in {schema_version("", name, o) for o in range(LEAST, newest("") + 1)} & set(known)
        if not domain and known[version] is not known[max(known)] and (name, version) not in ADAPTERS
    }
    assert found == WITHOUT_A_RULE


# --- arguments: constants, and computed ones

SLICE = "g (float[2, 4] x, int64[1] s, int64[1] e) => (float[2, n] y) { y = Slice (x, s, e, a) }"


def test_slice_is_written_with_attributes_where_it_had_them() -> None:
    constants = {n: np.array([v], np.int64) for n, v in (("s", 1), ("e", 3), ("a", -1))}
    proto = model("g (float[2, 4] x) => (float[2, 2] y) { y = Slice (x, s, e, a) }", **constants)
    (node,) = same(proto, 9, X).graph.node
    assert {a.name: list(a.ints) for a in node.attribute} == {"axes": [1], "starts": [1], "ends": [3]}
    assert list(same(proto, 10, X).graph.node[0].input)[1:3] == ["s", "e"]


def test_slice_by_computed_bounds_needs_them_as_inputs() -> None:
    proto = model(SLICE, a=np.array([1], np.int64))
    error = refused(proto, 9)
    assert (error.operator, error.least, error.code) == ("Slice", 10, "SX206")
    assert error.message.startswith("Slice cannot be written in opset 9: starts of Slice must be a constant in opset 9")
    assert error.message.endswith("the minimum opset is 10")
    same(proto, 10, X, np.array([1]), np.array([3]))


@pytest.mark.parametrize("opset", [7, 10, 11, 13])
def test_clip(opset: int) -> None:
    low, high = np.float32(-1), np.float32(1)
    written = same(model("g (float[2, 4] x) => (float[2, 4] y) { y = Clip (x, a, b) }", a=low, b=high), opset, X)
    (node,) = written.graph.node
    assert [a.f for a in node.attribute] == ([-1, 1] if opset < 11 else []) and len(node.input) == (1 if opset < 11 else 3)


def test_clip_by_bounds_that_no_attribute_holds() -> None:
    computed = model("g (float[2, 4] x, float a, float b) => (float[2, 4] y) { y = Clip (x, a, b) }")
    assert kinds(same(computed, 8, X, np.float32(-1), np.float32(1))) == ["Max", "Min"]
    assert refused(computed, 7).least == 8
    fine = model("g (double[2, 4] x) => (double[2, 4] y) { y = Clip (x, a) }", a=np.array(0.1))
    assert kinds(same(fine, 8, X.astype(np.float64))) == ["Max"]  # float32 does not hold 0.1


@pytest.mark.parametrize(("operator", "since"), [("ReduceSum", 13), ("ReduceMax", 18), ("Squeeze", 13), ("Unsqueeze", 13)])
def test_axes_become_an_input(operator: str, since: int) -> None:
    shape = {"ReduceSum": "[1, 1, 3, 4]", "ReduceMax": "[1, 1, 3, 4]", "Squeeze": "[2, 3, 4]", "Unsqueeze": "[1, 1, 2, 3, 4]"}[
        operator
    ]
    axes = np.array([0 if operator[-7:] in ("Squeeze", "queeze") else 1], np.int64)
    text = f"g (float[1, 2, 3, 4] x) => (float{shape} y) {{ y = {operator} (x, a) }}"
    feed = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    for opset in (since - 1, since):
        (node,) = same(model(text, a=axes), opset, feed).graph.node
        assert len(node.input) == (1 if opset < since else 2)


def test_comparisons_with_nan_before_they_were_operators() -> None:
    proto = model(
        "g (float[2, 4] x, float z) => (bool[2, 4] y, bool[2, 4] u) { y = GreaterOrEqual (x, z) u = LessOrEqual (x, z) }"
    )
    for opset in (11, 12, 15, 16):
        y, u = run(same(proto, opset, X, np.float32(0.5)), X, np.float32(0.5))
        assert y.tolist() == [[False, False, False, True], [True, False, False, True]] and not u[1, 1]


@pytest.mark.parametrize("opset", [7, 9, 10, 11])
@pytest.mark.parametrize(("a", "b", "step"), [(0, 7, 2), (5, -4, -3), (3, 3, 1), (2, 1, 1), (-5, 6, 3)])
def test_range_before_it_was_an_operator(opset: int, a: int, b: int, step: int) -> None:
    proto = model("g (int64 a, int64 b, int64 c) => (int64[n] y) { y = Range (a, b, c) }")
    (y,) = run(same(proto, opset, *map(np.int64, (a, b, step))), *map(np.int64, (a, b, step)))
    np.testing.assert_array_equal(y, np.arange(a, b, step))


def test_casts_to_four_bits_on_both_sides_of_opset_24() -> None:
    x = np.array([-9.7, -1.5, 2.5, 7.6, 100], np.float32)
    text = "g (float[5] x) => (int4[5] y) { y = Cast <to = 22> (x) }"
    assert run(same(model(text, 24), 21, x), x)[0].astype(int).tolist() == [7, -1, 2, 7, 4]  # cut, and the high bits lost
    assert run(same(model(text, 21), 24, x), x)[0].astype(int).tolist() == [-8, -2, 2, 7, 7]  # rounded and saturated


# --- transposed convolutions by their output_shape


def _spread(
    draw: np.random.Generator, *, opset: int, auto_pad: str, rank: int, beyond: bool = False
) -> tuple[ModelProto, list[np.ndarray]]:
    """A ConvTranspose whose output_shape crops an odd or even number of cells, or, with `beyond`, adds some at the end."""
    size, kernel, strides, dilations = (draw.integers(low, high, rank) for low, high in ((2, 6), (1, 5), (1, 4), (1, 3)))
    padding = [int(draw.integers(0, stride)) for stride in strides]  # onnxruntime refuses more
    reach = (size - 1) * strides + (kernel - 1) * dilations + 1 + padding
    room = np.maximum(strides, dilations) - 1 - padding
    out = reach + draw.integers(0, room + 1) if beyond else np.maximum(1, reach - draw.integers(0, 4, rank))
    filters = draw.standard_normal((2, 3, *kernel)).astype(np.float32)
    node = helper.make_node(
        "ConvTranspose", ["x", "w"], ["y"], strides=strides.tolist(), dilations=dilations.tolist(), auto_pad=auto_pad,
        output_padding=padding, output_shape=out.tolist(),
    )  # fmt: skip
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2, *size.tolist()])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None] * (rank + 2))
    graph = helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(filters, "w")])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    return proto, [draw.standard_normal((1, 2, *size)).astype(np.float32)]


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize(("opset", "targets"), [(9, (10, 11, 22)), (11, (8, 10, 22)), (22, (7, 10, 11))])
def test_output_shape_of_a_transposed_convolution_keeps_its_cells(opset: int, targets: tuple[int, ...], auto_pad: str) -> None:
    draw = np.random.default_rng(opset)
    for case in range(24):
        proto, feeds = _spread(draw, opset=opset, auto_pad=auto_pad, rank=1 + case % 2, beyond=case % 4 == 3)
        for target in targets:
            written = same(proto, target, *feeds)
            assert opset < 11 or target > 10 or all(a.name != "output_shape" for a in written.graph.node[0].attribute)


def _by_shape(*out: int) -> ModelProto:
    """A ConvTranspose with a stride of 2, of which 4 cells reach 9 cells of each axis."""
    names = [f"float[1, 2, {', '.join(['4'] * len(out))}] x", f"float[1, 3, {', '.join(map(str, out))}] y"]
    text = (
        f"g ({names[0]}) => ({names[1]}) {{ y = ConvTranspose <strides = {[2] * len(out)}, output_shape = {list(out)}> (x, w) }}"
    )
    return model(text, w=np.arange(1, 7 + 6 * (3 ** len(out) - 1), dtype=np.float32).reshape(2, 3, *[3] * len(out)))


@pytest.mark.parametrize("out", [(11,), (15,), (9, 14), (7, 10), (15, 15)])
def test_an_output_shape_beyond_the_windows_is_written_before_opset_11(out: tuple[int, ...]) -> None:
    same(_by_shape(*out), 10, np.ones((1, 2, *[4] * len(out)), np.float32))


def test_an_output_shape_that_crops_one_axis_and_exceeds_another_is_refused_before_opset_11() -> None:
    error = refused(_by_shape(8, 12), 10)
    assert error.least == 11 and "crop all axes or none" in error.message


@pytest.mark.parametrize("auto_pad", ["NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
def test_written_transposed_convolutions_against_onnxruntime(auto_pad: str, oracle: Any) -> None:
    """onnxruntime has the meaning of opset 11 at every opset: what is written for older ones must not depend on it."""
    draw = np.random.default_rng(43)
    for case in range(24):
        proto, feeds = _spread(draw, opset=22, auto_pad=auto_pad, rank=1 + case % 2)
        expected = run(proto, *feeds)[0]
        for target in (8, 10, 11):
            y = oracle.run(at(proto, target).SerializeToString(), {"x": feeds[0]})["y"]
            np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_output_shape_with_all_axes_is_written_with_the_spatial_ones() -> None:
    text = "g (float[1, 2, 4] x) => (float[1, 3, 8] y) { y = ConvTranspose <output_shape = [1, 3, 8], strides = [2]> (x, w) }"
    written = same(model(text, 8, w=np.arange(18, dtype=np.float32).reshape(2, 3, 3)), 11, np.ones((1, 2, 4), np.float32))
    assert next(list(a.ints) for a in written.graph.node[0].attribute if a.name == "output_shape") == [8]


def test_output_shape_without_known_sizes_is_refused_before_opset_11() -> None:
    text = "g (float[1, 2, n] x) => (float[1, 3, 8] y) { y = ConvTranspose <output_shape = [8], strides = [2]> (x, w) }"
    proto = model(text, w=np.ones((2, 3, 3), np.float32))
    error = refused(proto, 10)
    assert (error.operator, error.least) == ("ConvTranspose", 11) and "known sizes of the input" in error.message
    same(proto, 11, np.ones((1, 2, 4), np.float32))


# --- graphs within nodes

IF = """g (float[2, 4] x, bool c) => (float[2, 4] y) {
  y = If (c) <then_branch = t () => (float[2, 4] a) { one = Constant <value = float {1.0}> () a = Clip (x, one) },
              else_branch = e () => (float[2, 4] b) { b = Relu (x) }>
}"""
LOOP = """g (float[2, 4] x, int64 n) => (float[2, 4] y, float[m, 4] s) {
  k = Constant <value = bool {1}> ()
  y, s = Loop (n, k, x) <body = b (int64 i, bool go, float[2, 4] v) => (bool more, float[2, 4] w, float[4] r) {
    more = Identity (go)  w = Add (v, x)  axis = Constant <value = int64[1] {0}> ()  r = ReduceSum <keepdims = 0> (w, axis)
  }>
}"""
SCAN = """g (float[2, 4] x, float[2] h) => (float[2] y, float[2, 4] s) {
  y, s = Scan <num_scan_inputs = 1, scan_input_axes = [-1], scan_output_axes = [-1], body = b (float[2] v, float[2] e) =>
    (float[2] w, float[2] r) { w = Add (v, e)  r = Tanh (w) }> (h, x)
}"""
SCAN_ROWS = """g (float[2, 4] x, float[4] h) => (float[4] y, float[2, 4] s) {
  y, s = Scan <num_scan_inputs = 1, scan_input_directions = [1], body = b (float[4] v, float[4] e) =>
    (float[4] w, float[4] r) { w = Add (v, e)  r = Tanh (w) }> (h, x)
}"""
SEQUENCE = """g (float[2, 4] x) => (float[2, 4] y) {
  q = SequenceConstruct (x, x)
  s = SequenceMap (q) <body = b (float[2, 4] v) => (float[2, 4] w) { w = Abs (v) }>
  zero = Constant <value = int64 {0}> ()
  y = SequenceAt (s, zero)
}"""


@pytest.mark.parametrize(
    ("text", "feeds", "opsets"),
    [(IF, [X, np.bool_(True)], (7, 11, 13, 28)), (LOOP, [X, np.int64(3)], (7, 11, 13, 28)),
     (SCAN, [X, np.zeros(2, np.float32)], (9, 11, 28)), (SCAN_ROWS, [X, np.zeros(4, np.float32)], (8, 9, 11, 28)),
     (SEQUENCE, [X], (17, 28))],
    ids=["if", "loop", "scan", "scan_rows", "sequence"],
)  # fmt: skip
def test_graphs_within_nodes(text: str, feeds: list[Any], opsets: tuple[int, ...]) -> None:
    for opset in opsets:
        same(model(text), opset, *map(np.asarray, feeds))


@pytest.mark.parametrize(
    ("text", "opset", "operator", "least"),
    [(SCAN, 8, "Scan", 9), (SEQUENCE, 10, "SequenceConstruct", 11), (SEQUENCE, 16, "SequenceMap", 17)],
)
def test_graphs_within_nodes_that_are_refused(text: str, opset: int, operator: str, least: int) -> None:
    error = refused(model(text), opset)
    assert (error.operator, error.least) == (operator, least)


def test_a_refusal_within_a_graph_names_the_operator_there() -> None:
    error = refused(model(IF.replace("Relu (x)", "Erf (x)")), 8)
    assert (error.operator, error.least) == ("Erf", 9)


def test_what_hangs_on_something_unwritable_is_no_second_problem() -> None:
    text = SCAN.replace("=> (float[2] y, float[2, 4] s)", "=> (float[2] z, float[2, 4] s)").replace(
        "(h, x)", "(h, x) z = Mean (y, h)"
    )
    writer = OpsetWriter(7)
    writer.problems = []
    convert(read(model(text)), 7, writer=writer)
    assert [(p.operator, p.least) for p in writer.problems] == [("Scan", 9)]


# --- files


@pytest.mark.parametrize("opset", OPSETS)
def test_the_least_ir_version(opset: int) -> None:
    written = at(model("g (float[2, 4] x) => (float[2, 4] y) { y = Relu (x) }"), opset)
    assert written.ir_version == helper.find_min_ir_version_for([helper.make_opsetid("", opset)])


@pytest.mark.parametrize("operator", ["Erf", "Mod", "NonZero"])
def test_an_operator_that_is_not_there_yet(operator: str) -> None:
    least = {"Erf": 9, "Mod": 10, "NonZero": 9}[operator]
    out = "int64[2, n]" if operator == "NonZero" else "float[2, 4]"
    proto = model(f"g (float[2, 4] x) => ({out} y) {{ y = {operator} ({'x, x' if operator == 'Mod' else 'x'}) }}".replace(
        "Mod (", "Mod <fmod = 1> ("))  # fmt: skip
    error = refused(proto, least - 1)
    assert (error.operator, error.least) == (operator, least)
    assert error.message == (f"{operator} cannot be written in opset {least - 1}: opset {least - 1} has no {operator};"
                             f" the minimum opset is {least}")  # fmt: skip
    assert kinds(at(proto, least)) == [operator]


def test_names_are_kept_and_weights_stay_one() -> None:
    w = np.arange(8, dtype=np.float32).reshape(4, 2)
    text = "g (float[2, 4] first) => (float[2, 2] last, float[2, 2] other) {"
    text += " t = MatMul (first, w) last = Gelu (t) other = Neg (last) }"
    written = same(model(text, w=w), 13, X)
    assert [v.name for v in written.graph.input] == ["first"] and [v.name for v in written.graph.output] == ["last", "other"]
    floats = {t.name: t for t in written.graph.initializer if t.data_type == TensorProto.FLOAT and len(t.dims)}
    assert list(floats) == ["w"]
    np.testing.assert_array_equal(numpy_helper.to_array(floats["w"]), w)
    assert "t" in written.graph.node[0].output


def test_an_output_that_is_a_constant_or_an_input_keeps_its_name() -> None:
    proto = model("g (float[2, 4] x) => (float y, float[2, 4] z) { y = Constant <value = float {2.5}> () z = Identity (x) }")
    written = same(proto, 9, X)
    assert [v.name for v in written.graph.output] == ["y", "z"]
    narrow = model("g () => (int4[1] y) { y = Constant <value = int4[1] {1}> () }")
    assert refused(narrow, 20).least == 21  # no opset below has a node that makes this type


def test_local_functions_are_written_out() -> None:
    proto = parser.parse_model("""<ir_version: 10, opset_import: ["": 21, "here": 1]>
      g (float[2, 4] x) => (float[2, 4] y) { y = here.twice (x) }
      <domain: "here", opset_import: ["": 21]> twice (a) => (b) { c = Gelu (a) b = Add (c, c) }""")
    written = same(proto, 12, X)
    assert {n.domain for n in written.graph.node} == {""} and not written.functions


def test_other_domains_keep_their_version() -> None:
    node = helper.make_node("LabelEncoder", ["x"], ["y"], domain="ai.onnx.ml", classes_strings=["a", "b"])
    info = helper.make_tensor_value_info
    graph = helper.make_graph([node], "g", [info("x", TensorProto.STRING, [2])], [info("y", TensorProto.INT64, [2])])
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 1)]
    written = at(helper.make_model(graph, opset_imports=imports, ir_version=10), 9)
    assert {o.domain: o.version for o in written.opset_import} == {"": 9, "ai.onnx.ml": 1}
    assert run(written, np.array(["b", "a"], object))[0].tolist() == [1, 0]


def test_maps_keep_their_types() -> None:
    kind = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    node = helper.make_node("DictVectorizer", ["x"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b", "c"])
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])]
    graph = helper.make_graph([node], "g", [helper.make_value_info("x", kind)], outputs)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("ai.onnx.ml", 1)]
    written = at(helper.make_model(graph, opset_imports=imports, ir_version=10), 9)
    assert written.graph.input[0].type == kind
    assert run(written, {"c": 2.0, "a": 0.5})[0].reshape(-1).tolist() == [0.5, 0, 2]


def test_types_that_a_version_ties_together_are_checked() -> None:
    text = "g (float[1, 2, 3] x, double[2] s) => (float[1, 2, 3] y) { y = BatchNormalization (x, s, s, s, s) }"
    error = refused(model(text), 14)
    assert error.least == 15 and "takes scale as tensor(float), not tensor(double)" in error.message


# --- what is wrong is seen


@pytest.fixture
def clip() -> ModelProto:
    return model("g (float[2, 4] x) => (float[2, 4] y) { y = Clip (x, a, b) }", a=np.float32(-1), b=np.float32(1))


def wrong(op: Any, x: Any, low: Any, high: Any) -> Any:
    return op.at_target("Clip", [x], {"min": -1.5, "max": 1.0})


def invalid(op: Any, x: Any, low: Any, high: Any) -> Any:
    return op.builder.call("Clip", [x, low, high], {}, 1)


def broken(op: Any, x: Any, low: Any, high: Any) -> Any:
    raise IndexError("beyond")


@pytest.mark.parametrize(
    ("rule", "says"),
    [(wrong, "other values"), (invalid, "onnx's checker"), (broken, "Clip cannot compute with its inputs: beyond")],
)  # fmt: skip
def test_a_wrong_rule_is_caught(clip: ModelProto, monkeypatch: pytest.MonkeyPatch, rule: Callable[..., Any], says: str) -> None:
    assert {o.status for o in judged(clip, [X]).outcomes.values()} == {"equal"}
    monkeypatch.setitem(ADAPTERS, ("Clip", 6), OperatorRule(rule))
    outcomes = judged(clip, [X]).outcomes
    assert {o for o, found in outcomes.items() if found.status == "wrong"} == {7, 8, 9, 10}
    assert all(says in found.says for found in outcomes.values() if found.status == "wrong")


@pytest.mark.parametrize("least", [9, 11, None])
def test_a_wrong_least_opset_is_caught(monkeypatch: pytest.MonkeyPatch, least: int | None) -> None:
    proto = model(SLICE, a=np.array([1], np.int64))
    feeds = [X, np.array([1]), np.array([3])]
    first = judged(proto, feeds).outcomes[7]
    assert first.status == "refused" and first.refusals[0].least == 10
    monkeypatch.setattr(writing.OpsetWriter, "_fits", lambda _, opset, *__: opset == least)
    assert judged(proto, feeds).outcomes[7].status == "wrong"
