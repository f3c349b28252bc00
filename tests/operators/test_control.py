"""If, Loop, Scan and SequenceMap; what graphs may be made of is in test_graph.py."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import GraphProto, TensorProto, helper, parser
from tests.helpers import other_device

from singa_backend import InvalidModel, OperatorError, SingaBackend
from singa_backend.devices.device import resolve
from singa_backend.interpreters.eager import Eager

F = np.float32
LOOPS = [1, 11, 13, 16, 19, 21, 23, 24, 25]
SCANS = [9, 11, 16, 19, 21, 23, 24, 25]


def graph(text: str) -> GraphProto:
    return parser.parse_graph(text)


def model(text: str, opset: int) -> Any:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> {text}')


def run(text: str, inputs: list[Any], opset: int = 16, device: str = "CPU") -> Any:
    return SingaBackend.run_model(model(text, opset), inputs, device)


# --- If


@pytest.mark.parametrize("opset", LOOPS)
@pytest.mark.parametrize("cond", [True, False])
def test_if(check: Any, opset: int, cond: bool) -> None:
    one = np.array([1, 2**53 + 1], np.int64)
    branches = {}
    for name, value in (("then_branch", one), ("else_branch", one[::-1])):
        node = helper.make_node("Constant", [], ["y"], value=helper.make_tensor("v", TensorProto.INT64, [2], value))
        branches[name] = helper.make_graph([node], name, [], [helper.make_tensor_value_info("y", TensorProto.INT64, [2])])
    check("If", [np.bool_(cond)], [one if cond else one[::-1]], opset=opset, **branches)
    check("If", [np.array([[cond]])], [one if cond else one[::-1]], opset=opset, **branches)


def test_if_refuses(fails: Any) -> None:
    one = graph("t () => (float y) { y = Constant<value_float = 1.0>() }")
    two = graph("e () => (float y, float z) { y = Constant<value_float = 1.0>() z = Identity(y) }")
    fails("If", [np.array([True, False])], "must hold one value", opset=16, then_branch=one, else_branch=one)
    fails("If", [np.zeros(0, bool)], "must hold one value", opset=16, then_branch=one, else_branch=one)
    fails("If", [np.True_], r"'else_branch' of If must have 1 outputs \(those of the If\), got 2",
          error=InvalidModel, opset=16, then_branch=one, else_branch=two)  # fmt: skip


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
def test_the_result_of_an_eager_if_is_not_a_constant_of_its_branch(device: str) -> None:
    op = Eager(resolve(device))
    branch = op.graph(lambda g: [g.constant(np.arange(2, dtype=F))], [])
    for _ in range(2):
        (y,) = op.call("If", [op.constant(True)], {"then_branch": branch, "else_branch": branch}, 1)
        np.testing.assert_array_equal(op.device.get(y), [0, 1])
        y[...] = 5


# --- Loop

COUNT = graph("""b (int64 i, bool c, float[2] a) => (bool go, float[2] next, float[2] seen, int64 at)
    { one = Constant<value = float {1.0}>() next = Add(a, one) seen = Identity(a) at = Identity(i) go = Identity(c) }""")


@pytest.mark.parametrize("opset", LOOPS)
@other_device.runs
@pytest.mark.parametrize("device", ["CPU", other_device.NAME])
def test_loop(opset: int, device: str) -> None:
    x = F([0, 10])
    node = helper.make_node("Loop", ["M", "c", "x"], ["y", "seen", "at"], body=COUNT if opset >= 7 else legacy())
    for m, cond in ((3, True), (0, True), (3, False), (-1, True)):
        n = max(m, 0) if cond else 0
        y, seen, at = SingaBackend.run_node(node, [np.int64(m), np.bool_(cond), x], device, opset_version=opset)
        np.testing.assert_array_equal(y, x + n)
        np.testing.assert_array_equal(seen, np.stack([x + i for i in range(n)]) if n else np.zeros((0, 2), F))
        np.testing.assert_array_equal(at, np.arange(n))
        assert (y.dtype, seen.dtype, at.dtype) == (F, F, np.int64)


def legacy() -> GraphProto:
    """COUNT without Add's broadcasting, which came with opset 7."""
    text = """b (int64 i, bool c, float[2] a) => (bool go, float[2] next, float[2] seen, int64 at)
        { one = Constant<value = float[2] {1.0, 1.0}>() next = Add(a, one)
          seen = Identity(a) at = Identity(i) go = Identity(c) }"""
    return graph(text)


WHILE = """b (int64 i, bool c, float a) => (bool go, float next)
    { two = Constant<value = float {2.0}>() next = Mul(a, two) nine = Constant<value = float {9.0}>() go = Less(next, nine) }"""


def test_loop_stops_by_its_own_condition() -> None:
    (y,) = run(f'g (bool c, float x) => (float y) {{ y = Loop<body = {WHILE}>("", c, x) }}', [np.True_, F(1)])
    assert y == 16
    text = f"g (int64 m, bool c, float x) => (float y) {{ y = Loop<body = {WHILE}>(m, c, x) }}"
    (y,) = run(text, [np.int64(2), np.True_, F(1)])
    assert y == 4


def test_loop_without_cond_ignores_what_the_body_says() -> None:
    (y,) = run(f'g (int64 m, float x) => (float y) {{ y = Loop<body = {WHILE}>(m, "", x) }}', [np.int64(6), F(1)])
    assert y == 64


def test_loop_sees_its_last_condition_first() -> None:
    """The body's condition input is the node's `cond`, then what the body said."""
    body = """b (int64 i, bool c) => (bool go, bool seen)
        { two = Constant<value = int64 {2}>() go = Less(i, two) seen = Identity(c) }"""
    (seen,) = run(f'g (int64 m) => (bool[n] seen) {{ seen = Loop<body = {body}>(m, "") }}', [np.int64(5)])
    assert seen.tolist() == [True, True, True, False, False]


@other_device.runs
@pytest.mark.parametrize("device", ["CPU", other_device.NAME])
def test_loop_carries_anything(device: str) -> None:
    """Strings, sequences and bfloat16 are carried and, but for sequences, collected."""
    body = """b (int64 i, bool c, string[k] s, seq(float[2]) q, bfloat16[n] h)
        => (bool go, string[j] s2, seq(float[2]) q2, bfloat16[n2] h2, string[2] words)
        { go = Identity(c) s2 = Concat<axis = 0>(s, w) q2 = SequenceInsert(q, x) h2 = Concat<axis = 0>(h, h)
          words = Identity(w) }"""
    y = run(
        f"""g (int64 m, bool c, string[2] w, float[2] x, bfloat16[1] h)
            => (string[a] s, seq(float[2]) q, bfloat16[b] hs, string[n, 2] ws)
        {{ e = SequenceEmpty() s, q, hs, ws = Loop<body = {body}>(m, c, w, e, h) }}""",
        [np.int64(2), np.True_, np.array(["a", "b"], object), F([1, 2]), np.ones(1, ml_dtypes.bfloat16)], 16, device,
    )  # fmt: skip
    assert y["s"].tolist() == ["a", "b"] * 3
    assert [v.tolist() for v in y["q"]] == [[1, 2], [1, 2]]
    assert y["hs"].dtype == ml_dtypes.bfloat16 and y["hs"].shape == (4,)
    assert y["ws"].tolist() == [["a", "b"]] * 2


@other_device.runs
@pytest.mark.parametrize("device", ["CPU", other_device.NAME])
def test_zero_iterations_have_the_declared_type(device: str) -> None:
    text = """g (int64 m, bool c, string[2] w, float16[3] h) => (string[n, 2] ws, float16[n, 3] hs, uint4[n] us)
        <uint4[1] u = {3}> { ws, hs, us = Loop<body = b (int64 i, bool c) => (bool go, string[2] w2, float16[k] h2, uint4 u2)
        { go = Identity(c) w2 = Identity(w) h2 = Identity(h) u2 = Squeeze(u) }>(m, c) }"""
    ws, hs, us = run(text, [np.int64(0), np.True_, np.array(["a", "b"], object), np.ones(3, np.float16)], 21, device)
    assert (ws.shape, hs.shape, us.shape) == ((0, 2), (0, 0), (0,))  # a size that the file leaves open is 0
    assert (ws.dtype, hs.dtype, us.dtype) == (object, np.float16, ml_dtypes.uint4)


@other_device.runs
@pytest.mark.parametrize("device", ["CPU", other_device.NAME])
def test_zero_iterations_of_an_untyped_body(device: str) -> None:
    """As function bodies have them: a run that is thrown away tells what the output would have been."""
    text = """g (int64 m, bool c, float16[3] h) => (float16[n, 3] hs)
        { hs = Loop<body = b (i, c) => (go, h2) { go = Identity(c) h2 = Add(h, h) }>(m, c) }"""
    (hs,) = run(text, [np.int64(0), np.True_, np.ones(3, np.float16)], 21, device)
    assert hs.shape == (0, 3) and hs.dtype == np.float16


def test_loop_errors() -> None:
    x = [np.int64(3), np.True_, F([0, 1, 2])]
    grows = """b (int64 i, bool c, float[n] a) => (bool go, float[m] b2, float[m] s)
        { go = Identity(c) b2 = Concat<axis = 0>(a, a) s = Neg(a) }"""
    with pytest.raises(OperatorError, match=r"scan output 's' changed from float\[3\] to float\[6\]"):
        run(f"g (int64 m, bool c, float[3] x) => (float[n] y, float[k] z) {{ y, z = Loop<body = {grows}>(m, c, x) }}", x)
    short = "b (int64 i, bool c) => (bool go) { go = Identity(c) }"
    with pytest.raises(InvalidModel, match=r"(?s)2 problems.*must have 3 inputs .* got 2.*must have 2 outputs .* got 1"):
        run(f"g (int64 m, bool c, float[3] x) => (float[n] y) {{ y = Loop<body = {short}>(m, c, x) }}", x)
    long = "b (int64 i, bool c, float[3] a, float[3] b) => (bool go, float[3] a2) { go = Identity(c) a2 = Add(a, b) }"
    with pytest.raises(InvalidModel, match=r"must have 3 inputs \(2 and the states of the Loop\), got 4"):
        run(f"g (int64 m, bool c, float[3] x) => (float[n] y) {{ y = Loop<body = {long}>(m, c, x) }}", x)
    wide = "b (int64 i, bool c, float[3] a) => (bool go, float[3] b) { go = Greater(a, a) b = Neg(a) }"
    with pytest.raises(OperatorError, match="condition must hold one value"):
        run(f"g (int64 m, bool c, float[3] x) => (float[n] y) {{ y = Loop<body = {wide}>(m, c, x) }}", x)


def test_loop_in_loop_sees_both_outer_scopes() -> None:
    text = """g (int64 n, bool t, float x) => (float y) { zero = Sub(x, x)
        y = Loop<body = outer (int64 i, bool c, float a) => (bool go, float a3) { fi = Cast<to = 1>(i) go = Identity(c)
            a3 = Loop<body = inner (int64 j, bool d, float b) => (bool go2, float b2) { go2 = Identity(d)
                fj = Cast<to = 1>(j) p = Mul(fi, fj) q = Add(p, x) b2 = Add(b, q) }>(n, t, a) }>(n, t, zero) }"""
    (y,) = run(text, [np.int64(4), np.True_, F(0.5)])
    assert y == sum(i * j + 0.5 for i in range(4) for j in range(4))


# --- Scan


def scan_graph(typed: bool = True) -> GraphProto:
    t = "float[2]" if typed else ""
    return graph(f"b ({t} s, {t} x, {t} y) => ({t} s2, {t} p, {t} q) {{ s2 = Add(s, x) p = Mul(s2, y) q = Identity(x) }}")


def scan_loop(s: Any, x: Any, y: Any, backward: tuple[int, int] = (0, 0)) -> tuple[Any, list[Any], list[Any]]:
    """The recurrence of scan_graph by hand; x and y are lists of elements."""
    ps, qs = [], []
    for a, b in zip(x[::-1] if backward[0] else x, y[::-1] if backward[1] else y, strict=True):
        s = s + a
        ps.append(s * b)
        qs.append(a)
    return s, ps, qs


S0, X, Y = F([0.5, -1]), np.arange(6, dtype=F).reshape(3, 2), F([[1, 2], [3, -4], [5, 6]])


@pytest.mark.parametrize("opset", SCANS)
def test_scan(check: Any, opset: int) -> None:
    s, p, q = scan_loop(S0, X, Y)
    check("Scan", [S0, X, Y], [s, np.stack(p), np.stack(q)], opset=opset, body=scan_graph(), num_scan_inputs=2)
    s, p, q = scan_loop(S0, X, Y, (0, 1))
    q.reverse()
    check("Scan", [S0, X.T, Y], [s, np.stack(p, 1), np.stack(q)], opset=opset, body=scan_graph(), num_scan_inputs=2,
          scan_input_axes=[1, 0], scan_input_directions=[0, 1], scan_output_axes=[1, 0],
          scan_output_directions=[0, 1])  # fmt: skip
    for typed in (True, False):
        check("Scan", [S0, X[:0], Y[:0].T], [S0, np.zeros((2, 0), F), np.zeros((0, 2), F)], opset=opset, body=scan_graph(typed),
              num_scan_inputs=2, scan_input_axes=[0, 1], scan_output_axes=[1, 0])  # fmt: skip
    if opset >= 11:
        s, p, q = scan_loop(S0, X, Y)
        check("Scan", [S0, X.T, Y], [s, np.stack(p, 1), np.stack(q)], opset=opset, body=scan_graph(), num_scan_inputs=2,
              scan_input_axes=[-1, -2], scan_output_axes=[-1, -2])  # fmt: skip


def test_scan_without_states_or_outputs(check: Any) -> None:
    square = graph("b (int64 x) => (int64 y) { y = Mul(x, x) }")
    check("Scan", [np.int64([2, 3])], [np.int64([4, 9])], opset=11, body=square, num_scan_inputs=1)
    last = graph("b (int64 s, int64 x) => (int64 t) { t = Add(s, x) }")
    check("Scan", [np.int64(2**53), np.int64([2, -1])], [np.int64(2**53 + 1)], opset=19, body=last, num_scan_inputs=1)


def test_scan_half(check: Any) -> None:
    x = np.array([60000, 2, 1], np.float16)
    body = graph("b (float16 s, float16 x) => (float16 t, float16 u) { t = Max(s, x) u = Identity(t) }")
    check("Scan", [x[2], x], [x[0], x[[0, 0, 0]]], opset=16, body=body, num_scan_inputs=1)


def test_scan_refuses(fails: Any) -> None:
    given: dict[str, Any] = {"body": scan_graph(), "num_scan_inputs": 2}
    fails("Scan", [S0, X, Y[:2]], r"equal lengths, got \[2, 3\]", opset=11, outputs=3, **given)
    fails("Scan", [S0, X, Y], "axis must be in .* got 2", opset=11, outputs=3, scan_input_axes=[2, 0], **given)
    fails("Scan", [S0, X, Y], "axes of Scan-9 must not be negative", opset=9, outputs=3, scan_input_axes=[-1, 0], **given)
    fails("Scan", [S0, X, Y], "axis must be in .* got 2", opset=11, outputs=3, scan_output_axes=[2, 0], **given)
    fails("Scan", [S0, X, Y], "must have 2 entries, got 1", opset=11, outputs=3, scan_input_directions=[1], **given)
    fails("Scan", [S0, X, Y], r"got \[2, 0\]", opset=11, outputs=3, scan_output_directions=[2, 0], **given)
    fails("Scan", [S0, X, Y], "num_scan_inputs must be in .* got 4", opset=11, outputs=3, body=scan_graph(), num_scan_inputs=4)


@pytest.mark.parametrize("backward", [(0, 0), (1, 0), (1, 1)])
@pytest.mark.parametrize("lengths", [None, [3, 1, 0], [2, 3, 2]])
def test_scan_8(check: Any, backward: tuple[int, int], lengths: list[int] | None) -> None:
    """A batch of sequences, each of its own length, with zeros after its end; backwards begins at its own last element."""
    states = np.stack([S0, S0 * 2, S0 * 3])
    xs, ys = np.stack([X, X + 1, X - 3]), np.stack([Y, -Y, Y * 2])
    finals, ps, qs = [], np.zeros((3, 3, 2), F), np.zeros((3, 3, 2), F)
    for b, n in enumerate(lengths or [3, 3, 3]):
        s, p, q = scan_loop(states[b], xs[b, :n], ys[b, :n], backward)
        finals.append(s)
        if n:
            ps[b, :n], qs[b, :n] = p, q
    given = None if lengths is None else np.int64(lengths)
    check("Scan", [given, states, xs, ys], [np.stack(finals), ps, qs], opset=8, body=scan_graph(), num_scan_inputs=2,
          directions=list(backward))  # fmt: skip


def test_scan_8_edges(check: Any, fails: Any) -> None:
    none = np.zeros((0, 3, 2), F)
    given: dict[str, Any] = {"body": scan_graph(), "num_scan_inputs": 2, "opset": 8}
    check("Scan", [None, none[:, 0], none, none], [none[:, 0], none, none], **given)
    empty = np.zeros((1, 0, 2), F)
    check("Scan", [None, S0[None], empty, empty], [S0[None], empty, empty], **given)
    fails("Scan", [np.int64([4]), S0[None], X[None], Y[None]], r"1 lengths in \[0, 3\], got \[4\]", outputs=3, **given)
    fails("Scan", [None, S0[None], X[None], none], "must have equal lengths", outputs=3, **given)
    fails("Scan", [None, S0, X, Y], "must have equal lengths|batch axis", outputs=3, **given)


# --- SequenceMap


def test_sequence_map(check: Any) -> None:
    body = graph("""b (float[n] x, float[n] y, float[1] z) => (float[n] u, int64[1] v)
        { w = Add(x, y) u = Mul(w, z) v = Shape(x) }""")
    xs, ys, z = [F([1, 2]), F([3])], [F([4, 5]), F([6])], F([10])
    expected = [[(x + y) * z for x, y in zip(xs, ys, strict=True)], [np.int64([2]), np.int64([1])]]
    check("SequenceMap", [xs, ys, z], expected, opset=17, body=body)
    check("SequenceMap", [[], [], z], [[], []], opset=17, body=body)


def test_sequence_map_refuses(fails: Any) -> None:
    body = graph("b (float x, float y) => (float z) { z = Add(x, y) }")
    one = np.array(1, F)
    fails("SequenceMap", [[one, one], [one]], "input sequences must have equal lengths, got 2 and 1", opset=17, body=body)
    fails("SequenceMap", [[one]], "must have 1 inputs .*, got 2", error=InvalidModel, opset=17, body=body)


@other_device.runs
@pytest.mark.parametrize("device", ["CPU", other_device.NAME])
def test_strings_beside_a_device(device: str) -> None:
    """A branch, a scan and a map over strings run on the host; what they capture stays where it is."""
    text = """g (bool c, string[3] s, float[3] x, seq(string[n]) q) => (string[3] y, float[3] z, string[3] w, seq(string[n]) r) {
        y, z = If(c)<then_branch = t () => (string[3] a, float[3] b) { a = Identity(s) b = Add(x, x) },
                     else_branch = e () => (string[3] a2, float[3] b2) { a2 = Identity(s) b2 = Identity(x) }>
        w = Scan<num_scan_inputs = 1, scan_input_directions = [1], body = b (string e) => (string f) { f = Identity(e) }>(s)
        r = SequenceMap<body = m (string[n] e) => (string[n] f) { f = Identity(e) }>(q) }"""
    s, x = np.array(["a", "b", "c"], object), F([1, 2, 3])
    y, z, w, r = run(text, [np.True_, s, x, [s, s[:1]]], 17, device)
    assert y.tolist() == ["a", "b", "c"] and w.tolist() == ["c", "b", "a"] and [v.tolist() for v in r] == [["a", "b", "c"], ["a"]]
    np.testing.assert_array_equal(z, x + x)


def test_memory_of_a_loop_is_its_scan_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan output that is a view must not keep the larger array behind it."""
    monkeypatch.setenv("SONNX_MACHINE_CODE", "off")  # the import of llvmlite takes memory
    text = """g (int64 m, bool c, float[n] x) => (float[k] y, float[m, 1] z)
        { y, z = Loop<body = b (int64 i, bool c, float[n] a) => (bool go, float[n] a2, float[1] s)
        { go = Identity(c) a2 = Add(a, a) first = Constant<value = int64[1] {0}>() last = Constant<value = int64[1] {1}>()
          s = Slice(a2, first, last) }>(m, c, x) }"""
    import tracemalloc

    rep = SingaBackend.prepare(model(text, 16))
    x = np.zeros(2**18, F)
    tracemalloc.start()
    z = rep.run([np.int64(50), np.True_, x])[1]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert z.shape == (50, 1) and peak < 8 * x.nbytes


def test_elements_declared_by_type_only() -> None:
    """A scan output of declared type but without a shape, and no iteration: a vector of length 0."""
    info = helper.make_tensor_value_info("s", TensorProto.DOUBLE, None)
    body = graph("b (int64 i, bool c) => (bool go) { go = Identity(c) k = Constant<value = double {1.0}>() s = Neg(k) }")
    body.output.append(info)
    node = helper.make_node("Loop", ["m", "c"], ["y"], body=body)
    (y,) = SingaBackend.run_node(node, [np.int64(0), np.True_], opset_version=16)
    assert y.shape == (0,) and y.dtype == np.float64
