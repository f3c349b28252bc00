"""Runs on a device that repeat a recorded one: their results, errors and limits are those of runs that decide at each node."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from singa_backend import Limits, SingaBackend
from singa_backend.errors import OperatorError, ResourceExhausted
from singa_backend.runtime.executor import Visitor

F = np.float32
RNG = np.random.default_rng(0)

pytestmark = pytest.mark.parametrize("device", ["STRICT", pytest.param("CUDA", marks=pytest.mark.fakecuda)])


def model(text: str, **weights: np.ndarray) -> ModelProto:
    made = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    made.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return made


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(F)


@pytest.fixture
def visited(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The operators of the nodes that decide."""
    seen: list[str] = []
    visit = Visitor.visit

    def seeing(self: Visitor, node: Any, *rest: Any) -> Any:
        seen.append(node.op_type)
        return visit(self, node, *rest)

    monkeypatch.setattr(Visitor, "visit", seeing)
    yield seen


def repeated(made: ModelProto, device: str, draws: list[list[np.ndarray]]) -> Any:
    """Run on inputs of one signature, and compare with a model that has run once only; return the model."""
    rep = SingaBackend.prepare(made, device)
    for inputs in draws:
        found, expected = rep.run(inputs), SingaBackend.prepare(made, device).run(inputs)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return rep


BLOCK = """net (float[b,t,8] x, int64[b] ids) => (float[b,h,t,w] y, float[b,t,8] z, int64[n] size) {
    s = Shape(x)
    at = Constant<value = int64[2] {0, 1}>()
    lead = Gather(s, at)
    split = Concat<axis = 0>(lead, heads)
    row = Gather(words, ids)
    wide = Unsqueeze(row, at1)
    a = Add(x, wide)
    c = Mul(a, half)
    m = MatMul(c, w)
    parts = Reshape(m, split)
    y = Transpose<perm = [0, 2, 1, 3]>(parts)
    u, v = Split<axis = 2, num_outputs = 2>(m)
    joined = Concat<axis = 2>(v, u)
    n, mean = LayerNormalization(joined, scale)
    z = Softmax(n)
    size = Mul(split, two)
}"""
WEIGHTS = {
    "words": normal(5, 8), "w": normal(8, 8), "heads": np.array([2, 4]), "half": np.array(0.5, F), "scale": normal(8),
    "at1": np.array([1]), "two": np.array([2]),
}  # fmt: skip


def drawn(batch: int = 3, length: int = 4) -> list[np.ndarray]:
    return [normal(batch, length, 8), RNG.integers(0, 5, batch)]


def test_the_third_run_decides_nothing(device: str, visited: list[str]) -> None:
    rep = SingaBackend.prepare(model(BLOCK, **WEIGHTS), device)
    for decides in (True, True, False, False):
        visited.clear()
        rep.run(drawn())
        assert bool(visited) == decides
    rep.run(drawn(batch=2))
    assert visited


def test_results_have_the_bits_of_runs_that_decide(device: str) -> None:
    repeated(model(BLOCK, **WEIGHTS), device, [drawn() for _ in range(4)] + [drawn(2, 5) for _ in range(4)] + [drawn()])


def test_outputs_belong_to_the_caller(device: str) -> None:
    rep = SingaBackend.prepare(model(BLOCK, **WEIGHTS), device)
    inputs = drawn()
    expected = [x.copy() for x in rep.run(inputs)]
    for _ in range(4):
        found = rep.run(inputs)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
            a[...] = 0


def test_outputs_on_the_device_belong_to_the_caller(device: str) -> None:
    """An argument that a record keeps on the device is copied if it is an output."""
    made = model("net (float[a,b] x) => (int64[2] y, float[a,b] z) { s = Shape(x) y = Identity(s) z = Relu(x) }")
    rep = SingaBackend.prepare(made, device)
    for _ in range(5):
        y, _ = rep.run([normal(2, 3)], to_host=False)
        np.testing.assert_array_equal(rep.device.get(y), [2, 3])
        y[...] = 0


def test_a_tight_limit_of_executions_holds_while_a_run_is_recorded(device: str) -> None:
    text = "net (float[n] x) => (float[n] z) { b = Mul(a, a) c = Add(x, b) d = Sub(c, b) z = Relu(d) }"
    made = model(text, a=np.array(3, F))

    def runs(executions: int) -> bool:
        rep = SingaBackend.prepare(made, device, limits=Limits(executions=executions))
        try:
            for _ in range(4):
                rep.run([normal(5)])
        except ResourceExhausted:
            return False
        return True

    first = next(n for n in range(1, 10) if once(made, device, n))
    assert runs(first) and not runs(first - 1)


def once(made: ModelProto, device: str, executions: int) -> bool:
    """Whether the first run needs at most so many executions."""
    try:
        SingaBackend.prepare(made, device, limits=Limits(executions=executions)).run([normal(5)])
    except ResourceExhausted:
        return False
    return True


def test_values_on_the_host_are_a_part_of_the_signature(device: str, visited: list[str]) -> None:
    made = model("net (float[6] x, int64[n] s) => (float[n,m] y) { c = Reshape(x, s) y = Add(c, c) }")
    rep = SingaBackend.prepare(made, device)
    x = normal(6)
    for shape in ([2, 3], [2, 3], [2, 3], [3, 2], [6, 1], [2, 3]):
        visited.clear()
        np.testing.assert_array_equal(rep.run([x, np.array(shape)])[0], 2 * x.reshape(shape))
    assert not visited


def test_a_result_of_another_shape_is_computed_by_deciding(device: str, visited: list[str]) -> None:
    made = model(
        "net (float[6] x) => (int64[1,n] y, int64[1] k) { p = NonZero(x) y = Mul(p, two) k = Size(y) }", two=np.array([2])
    )
    rep = SingaBackend.prepare(made, device)
    for kept in (2, 2, 2, 4, 4, 1):
        x = np.zeros(6, F)
        x[-kept:] = 1
        y, k = rep.run([x])
        np.testing.assert_array_equal(y, 2 * np.arange(6 - kept, 6)[None])
        assert k == kept
    visited.clear()
    rep.run([x])
    assert len(visited) == 3  # its runs differ


def test_subgraphs_decide(device: str) -> None:
    text = """net (bool c, float[n] x) => (float[n] y, int64[1] k) {
        a = Add(x, x)
        b = If(c) <
            then_branch = g () => (float[m] u) { u = Relu(a) },
            else_branch = h () => (float[m] v) { v = Concat<axis = 0>(a, x) }
        >
        y = Neg(b)
        k = Shape(y)
    }"""
    conditions = [True, True, True, False, True]
    repeated(model(text), device, [[np.array(c), normal(3)] for c in conditions])


def test_a_wrong_index_names_its_node(device: str) -> None:
    rep = SingaBackend.prepare(model(BLOCK, **WEIGHTS), device)
    for _ in range(3):
        rep.run(drawn())
    x, ids = drawn()
    with pytest.raises(OperatorError, match=r"index must be in \[-5, 5\), got 9") as raised:
        rep.run([x, np.full_like(ids, 9)])
    first = SingaBackend.prepare(model(BLOCK, **WEIGHTS), device)
    with pytest.raises(OperatorError) as expected:
        first.run([x, np.full_like(ids, 9)])
    assert str(raised.value) == str(expected.value)
    rep.run(drawn())


def test_limits_of_later_runs_hold(device: str) -> None:
    rep = SingaBackend.prepare(model(BLOCK, **WEIGHTS), device)
    for _ in range(3):
        rep.run(drawn())
    flag = threading.Event()
    flag.set()
    with pytest.raises(ResourceExhausted, match="cancelled"):
        rep.run(drawn(), cancel=flag)
    for limits, code in (
        (Limits(executions=5), "SX605"), (Limits(tensor_bytes=100), "SX603"), (Limits(live_bytes=1000), "SX604"),
        (Limits(deadline=1e-6), "SX608"),
    ):  # fmt: skip
        with pytest.raises(ResourceExhausted) as raised:
            rep.run(drawn(), limits=limits)
        assert raised.value.code == code
    rep.run(drawn())


def test_values_are_freed_after_their_last_use(device: str) -> None:
    """Also those whose last use is a node that is not computed again."""
    lines = "".join(f"a{i + 1} = Transpose(a{i}) b{i} = MatMul(a{i + 1}, x) s{i} = Shape(b{i})" for i in range(12))
    made = model(
        f"net (float[300,300] x) => (float[300,300] y, int64[2] k) {{ a0 = Relu(x) {lines} y = Relu(a12) k = Add(s3, s11) }}"
    )
    rep = SingaBackend.prepare(made, device)
    x = normal(300, 300)
    peaks = []
    for _ in range(4):
        tracemalloc.start()  # on CUDA, it measures the copies of the host only
        rep.run([x])
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[3] < 1.1 * peaks[0] + 20_000


def test_other_initializers_are_other_records(device: str) -> None:
    rep = SingaBackend.prepare(
        model("net (float[2,3] x) => (float[a,b] y) { r = Reshape(x, s) y = Add(r, r) }", s=np.array([3, 2])), device
    )
    x = normal(2, 3)
    for _ in range(3):
        assert rep.run([x])[0].shape == (3, 2)
    other = rep.with_states({"s": rep.device.put(np.array([6, 1]))})
    for _ in range(3):
        assert other.run([x])[0].shape == (6, 1)
        assert rep.run([x])[0].shape == (3, 2)


def test_threads_share_a_record(device: str) -> None:
    rep = SingaBackend.prepare(model(BLOCK, **WEIGHTS), device)
    draws = [drawn() for _ in range(8)]
    expected = [[x.copy() for x in SingaBackend.prepare(model(BLOCK, **WEIGHTS), device).run(d)] for d in draws]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            for found, wanted in zip(pool.map(rep.run, draws), expected, strict=True):
                for a, b in zip(found, wanted, strict=True):
                    assert a.tobytes() == b.tobytes()


def test_random_numbers_are_drawn_in_each_run(device: str) -> None:
    made = model("net (float[4] x) => (float[4] y) { r = RandomUniformLike(x) y = Add(r, x) }")
    rep = SingaBackend.prepare(made, device)
    seen = {rep.run([np.zeros(4, F)])[0].tobytes() for _ in range(5)}
    assert len(seen) == 5


def test_half_products_and_absent_inputs(device: str) -> None:
    text = """net (float16[2,4] x, float16[4,3] w) => (float16[2,3] y, float[a] z) {
        m = MatMul(x, w)
        y = Clip(m, , high)
        z = Resize(v, , , to)
    }"""
    made = model(text, high=np.array(1, np.float16), v=normal(3), to=np.array([6]))
    repeated(made, device, [[normal(2, 4).astype(np.float16), normal(4, 3).astype(np.float16)] for _ in range(4)])
