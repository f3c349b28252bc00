"""Limits: each raises before memory is allocated, and names the node, the bound and how to raise it; valid runs reach none."""

from __future__ import annotations

import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, parser

from singa_backend import InvalidInput, Limits, OperatorError, ResourceExhausted, SingaBackend, limits

MIB = 1 << 20
HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def model(text: str) -> ModelProto:
    return parser.parse_model(f"{HEAD} {text}")


def refused(m: ModelProto, feeds: Any, code: str, device: str = "CPU", cancel: Any = None, **bounds: Any) -> ResourceExhausted:
    with pytest.raises(ResourceExhausted) as caught:
        SingaBackend.prepare(m, device, limits=Limits(**bounds)).run(feeds, cancel=cancel)
    assert caught.value.code == code, caught.value
    return caught.value


EXPAND = model("g (float[n] x, int64[k] s) => (float[m] y) { y = Expand(x, s) }")
EXPAND.graph.node[0].name = "wide"
ONE, TEN = np.ones(1, np.float32), np.array([10 * MIB])


@pytest.fixture(params=["CPU", "STRICT"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_error_names_the_node_the_bound_and_the_option(device: str) -> None:
    error = refused(EXPAND, [ONE, TEN], "SX603", device, tensor_bytes=MIB)
    assert (error.node, error.operator, error.version, error.shapes) == ("wide", "Expand", 13, ((1,), (1,)))
    for part in ("40.0 MiB", "1.0 MiB", "Limits(tensor_bytes=...)", "--limit tensor_bytes"):
        assert part in str(error)


def test_sizes_at_the_bound() -> None:
    rep = SingaBackend.prepare(EXPAND, limits=Limits(tensor_bytes=MIB))
    assert rep.run([ONE, np.array([MIB // 4])])[0].nbytes == MIB
    with pytest.raises(ResourceExhausted):
        rep.run([ONE, np.array([MIB // 4 + 1])])


def test_a_run_may_have_other_limits() -> None:
    rep = SingaBackend.prepare(EXPAND, limits=Limits(tensor_bytes=MIB))
    assert rep.run([ONE, TEN], limits=Limits())[0].shape == (10 * MIB,)
    with pytest.raises(ResourceExhausted):
        rep.run([ONE, TEN])
    assert limits.current().limits == Limits()  # nothing of the run is left behind


def test_nothing_is_allocated_first(device: str) -> None:
    """The second time: what a first run imports is memory too."""
    cases = ((EXPAND, [ONE, np.array([1 << 45])]),
             (model("g (float[n, 1] x, float[1, m] y) => (float[n, m] z) { z = Add(x, y) }"),
              [np.ones((1 << 18, 1), np.float32), np.ones((1, 1 << 18), np.float32)]),
             (model("g (float[4, 4] x) => (float[n, m] y) <int64[2] to = {16777219, 1024}> { y = Resize(x, , , to) }"),
              [np.ones((4, 4), np.float32)]))  # fmt: skip
    for m, feeds in cases:
        refused(m, feeds, "SX603", device)
    tracemalloc.start()
    for m, feeds in cases:
        refused(m, feeds, "SX603", device)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * MIB


# --- what is alive


def chain(count: int, each: int) -> ModelProto:
    lines = "\n".join(f"v{i + 1} = Neg(v{i})" for i in range(count))
    return model(f"g (float[{each}] v0) => (float[{each}] v{count}) {{ {lines} }}")


def test_what_has_died_does_not_count(device: str) -> None:
    x = np.ones(MIB // 4, np.float32)
    SingaBackend.prepare(chain(200, x.size), device, limits=Limits(live_bytes=4 * MIB)).run([x])
    refused(chain(3, x.size), [x], "SX604", device, live_bytes=MIB * 3 // 2)


def test_views_and_aliases_count_once(device: str) -> None:
    lines = "\n".join(f"v{i + 1} = Identity(v{i})\nt{i} = Transpose(v{i})" for i in range(20))
    outputs = ", ".join(f"float[n] t{i}" for i in range(20))
    m = model(f"g (float[n] v0) => ({outputs}) {{ {lines} }}")
    x = np.ones(MIB // 4, np.float32)
    SingaBackend.prepare(m, device, limits=Limits(live_bytes=3 * MIB)).run([x])


def test_inputs_and_initializers_count() -> None:
    x = np.ones(MIB, np.float32)
    refused(chain(1, x.size), [x], "SX604", live_bytes=6 * MIB)
    m = model(f"g () => (float[{MIB}] y) {{ y = Neg(w) }}")
    m.graph.initializer.append(TensorProto(name="w", dims=[MIB], data_type=1, raw_data=bytes(4 * MIB)))
    refused(m, [], "SX604", live_bytes=6 * MIB)
    error = refused(m, [], "SX604", live_bytes=2 * MIB)  # while it is read
    assert "'w'" in error.message
    for i in range(3):
        m.graph.initializer.append(TensorProto(name=f"w{i}", dims=[MIB], data_type=1, raw_data=bytes(4 * MIB)))
    error = refused(m, [], "SX604", live_bytes=15 * MIB)
    assert "'w2'" in error.message
    refused(m, [], "SX603", tensor_bytes=2 * MIB)


def test_what_a_sequence_holds_counts(device: str) -> None:
    m = model("""g (float[n] x, int64 M, bool c) => (seq(float[n]) q) {
        q0 = SequenceEmpty()
        q = Loop(M, c, q0) <body = b (int64 i, bool c_in, seq(float[n]) a) => (bool c_out, seq(float[n]) z) {
            c_out = Identity(c_in)
            y = Neg(x)
            z = SequenceInsert(a, y)
        }>
    }""")
    x = np.ones(MIB // 4, np.float32)
    feeds = [x, np.array(6), np.array(True)]
    assert len(SingaBackend.prepare(m, device, limits=Limits(live_bytes=16 * MIB)).run(feeds)[0]) == 6
    refused(m, feeds, "SX604", device, live_bytes=5 * MIB)


def test_the_text_of_strings_counts() -> None:
    m = model("g (string[n] x) => (string[n] z) { y = StringConcat(x, x) \n z = StringConcat(y, y) }")
    text = np.array(["a" * MIB], object)
    SingaBackend.prepare(m, limits=Limits(tensor_bytes=5 * MIB)).run([text])
    refused(m, [text], "SX603", tensor_bytes=3 * MIB)


def test_functions_that_are_read_many_times_count() -> None:
    """Two calls with different attributes are two bodies: 40 levels of them would be a million million nodes."""
    imports = '<opset_import: ["": 21, "f": 1], domain: "f">'
    text = '<ir_version: 10, opset_import: ["": 21, "f": 1]> h (float[n] x) => (float[n] y) { y = f.g1 <a0 = 0> (x) }'
    for i in range(1, 20):
        passed = "".join(f"a{k}: int = @a{k}, " for k in range(i))
        calls = f"m = f.g{i + 1} <{passed} a{i} = 0> (x) \n y = f.g{i + 1} <{passed} a{i} = 1> (m)"
        text += f"{imports} g{i} <{', '.join(f'a{k}' for k in range(i))}> (x) => (y) {{ {calls} }}"
    text += f"{imports} g20 <{', '.join(f'a{k}' for k in range(20))}> (x) => (y) {{ y = Neg(x) }}"
    m = parser.parse_model(text)
    with pytest.raises(ResourceExhausted) as caught:
        SingaBackend.prepare(m, limits=Limits(live_bytes=4 * MIB))
    assert caught.value.code == "SX604"
    with pytest.raises(ResourceExhausted, match="more than 1000 nodes") as caught:
        SingaBackend.prepare(m, limits=Limits(nodes=1000))
    assert caught.value.code == "SX611"


# --- how long it runs


LOOP = model("""g (int64 M, bool c, float[n] x) => (float[n] y) {
    y = Loop(M, c, x) <body = b (int64 i, bool c_in, float[n] a) => (bool c_out, float[n] z) {
        t = Not(c_in)
        c_out = Not(t)
        z = Neg(a)
    }>
}""")


def looped(trips: int) -> list[Any]:
    return [np.array(trips), np.array(True), ONE]


def test_a_loop_is_never_cut_short(device: str) -> None:
    rep = SingaBackend.prepare(LOOP, device, limits=Limits(iterations=7))
    np.testing.assert_array_equal(rep.run(looped(7))[0], -ONE)
    with pytest.raises(ResourceExhausted, match="has not ended after 7"):
        rep.run(looped(8))


def test_a_known_trip_count_is_refused_before_the_first_round() -> None:
    m = model("""g (int64 M, float[n] x) => (float[n] y) {
        y = Loop(M, , x) <body = b (int64 i, bool c_in, float[n] a) => (bool c_in, float[n] z) { z = Gather(a, i) }>
    }""")
    error = refused(m, [np.array(2**62), ONE], "SX606")  # Gather would fail in round 1
    assert f"{2**62} iterations" in error.message


def test_executions_count_the_nodes_of_bodies() -> None:
    for trips in (3, 10):  # each round is a body of three nodes
        assert SingaBackend.prepare(LOOP, limits=Limits(executions=1 + 4 * trips)).run(looped(trips))[0].shape == (1,)
        refused(LOOP, looped(trips), "SX605", executions=4 * trips)


def test_loading_the_operators_is_not_part_of_the_deadline() -> None:
    script = """
import numpy as np
from onnx import parser
from singa_backend import Limits, SingaBackend
m = parser.parse_model('<ir_version: 10, opset_import: ["": 21]> g (float[n] x) => (float[n] y) { y = Abs(x) }')
print(SingaBackend.prepare(m, limits=Limits(deadline=0.1)).run([-np.ones(1, np.float32)])[0])
"""
    for _ in range(3):  # on a busy machine even one Abs may take that long
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
        if done.stdout == "[1.]\n":
            return
    raise AssertionError(done.stderr)


def test_the_deadline_and_the_flag() -> None:
    forever = looped(10**6)
    assert "0.05 seconds" in refused(LOOP, forever, "SX608", deadline=0.05).message
    refused(LOOP, forever, "SX608", deadline=1e-9)
    flag = threading.Event()
    timer = threading.Timer(0.05, flag.set)
    timer.start()
    refused(LOOP, forever, "SX609", cancel=flag)
    timer.join()
    with pytest.raises(ResourceExhausted) as caught:
        SingaBackend.prepare(LOOP, cancel=flag)
    assert caught.value.code == "SX609"


def test_each_thread_has_a_budget() -> None:
    found: dict[int, str] = {}
    rep = SingaBackend.prepare(LOOP)

    def work(most: int) -> None:
        try:
            rep.run(looped(500), limits=Limits(iterations=most))
            found[most] = ""
        except ResourceExhausted as error:
            found[most] = error.code

    threads = [threading.Thread(target=work, args=(most,)) for most in (10, 499, 500, 10**6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {10: "SX606", 499: "SX606", 500: "", 10**6: ""}


# --- bounds


@pytest.mark.parametrize(
    "bounds",
    [
        {"tensor_bytes": 0},
        {"iterations": -1},
        {"deadline": float("nan")},
        {"deadline": 0},
        {"rank": 2.5},
        {"nesting": True},
        {"executions": None},
    ],
)
def test_a_bound_is_a_positive_number(bounds: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=f"the limit {next(iter(bounds))} must be") as caught:
        Limits(**bounds)
    assert caught.value.code == "SX309"


def test_the_machine_has_memory() -> None:
    assert MIB < limits.physical_memory() < 1 << 50
    assert [limits.format_bytes(n) for n in (5, 2048, 3 << 20, 4 << 30, 1 << 44, 1 << 80)] == [
        "5 bytes", "2.0 KiB", "3.0 MiB", "4.0 GiB", "16.0 TiB", "2^80 bytes"]  # fmt: skip


def test_rounds() -> None:
    budget = limits.Budget(Limits(iterations=3))
    assert list(budget.rounds(3)) == [0, 1, 2]
    with pytest.raises(ResourceExhausted):
        next(budget.rounds(4))
    endless = budget.rounds(None)
    assert [next(endless) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ResourceExhausted):
        next(endless)


# --- every operator, by mutation: sizes far beyond what its case has


def _mutants(name: str) -> list[tuple[str, list[Any], dict[str, Any], int]]:
    """(operator, inputs, attributes, opset) whose results would be large, for operators that no corpus case names."""
    f, big = np.float32, 1 << 22
    return {
        "rows": [("Softmax", [np.ones((1, big), f)], {}, 13)],
        "views": [("Expand", [ONE, np.array([1 << 10, 1 << 12])], {}, 13), ("Tile", [ONE, np.array([big])], {}, 13)],
        "random": [("RandomUniformLike", [np.ones(big, f)], {}, 22), ("Bernoulli", [np.ones(big, f)], {}, 22)],
        "products": [("MatMul", [np.ones((2048, 1), f), np.ones((1, 2048), f)], {}, 13),
                     ("Gemm", [np.ones((2048, 1), f), np.ones((1, 2048), f)], {}, 13),
                     ("Einsum", [np.ones(2048, f), np.ones(2048, f)], {"equation": "i,j->ij"}, 12)],
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", ["rows", "views", "random", "products"])
def test_every_path_ends_at_the_bound(name: str, device: str) -> None:
    for op, inputs, attributes, opset in _mutants(name):
        names = [f"x{i}" for i in range(len(inputs))]
        node = helper.make_node(op, names, ["y"], **attributes)
        with pytest.raises(ResourceExhausted):
            SingaBackend.run_node(node, inputs, device, opset_version=opset, limits=Limits(tensor_bytes=8 * MIB)), op


def test_operators_that_are_called_directly_have_the_default_limits() -> None:
    from singa_backend.devices.namespaces import numpy as xp
    from singa_backend.ir.declaration import declarations

    with pytest.raises(ResourceExhausted):
        declarations["", "Tile"][13](xp, ONE, (1 << 40,))
    with pytest.raises(OperatorError):
        declarations["", "Tile"][13](xp, ONE, (-1,))


def test_a_part_of_a_call_has_lower_limits_and_the_end_and_flag_of_the_call() -> None:
    flag = threading.Event()
    call = limits.Budget(Limits(nodes=100, deadline=60), flag, 12 * MIB)
    part = call.part(nodes=7, tensor_bytes=1 << 60)
    assert (part.limits.nodes, part.tensor_bytes, part.live_bytes, part.deadline) == (
        7,
        call.tensor_bytes,
        9 * MIB,
        call.deadline,
    )
    flag.set()
    with pytest.raises(ResourceExhausted, match="cancelled"):
        part.watch()
