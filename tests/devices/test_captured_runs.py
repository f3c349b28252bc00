"""Recorded runs that are launched as CUDA graphs, on an emulated device: bits, errors, limits and states of uncaptured runs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fakecuda
import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser
from tests.helpers.paths import PROJECT

from singa_backend import Limits, SingaBackend
from singa_backend.errors import OperatorError

sys.path.insert(0, str(PROJECT / "benchmarks"))
import cuda_counts
import cuda_training

pytestmark = pytest.mark.fakecuda
F = np.float32
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def nothing_wrong() -> Iterator[None]:
    fakecuda.report()
    yield
    assert fakecuda.report() == []


def model(text: str, **weights: np.ndarray) -> ModelProto:
    parsed = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]> {text}')
    parsed.graph.initializer.extend(numpy_helper.from_array(w, n) for n, w in weights.items())
    return parsed


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(F)


def parts(rep: Any) -> list[str]:
    """What computes the runs of the newest signature."""
    return list(rep._session._executor.graphs_in_words())


def outside(during: dict[str, int]) -> int:
    """The launches and products outside of graphs."""
    return during["launches"] + during["products"]


def bits(values: Any) -> list[bytes]:
    return [np.asarray(v).tobytes() for v in values]


def replayed(built: ModelProto, draws: list[Any], **options: Any) -> Any:
    """Run on inputs of one signature, and compare the bits with those of runs without graphs; return the model."""
    rep, plain = SingaBackend.prepare(built, "CUDA", **options), SingaBackend.prepare(built, "CUDA", optimize=0)
    for inputs in draws:
        assert bits(rep.run(inputs)) == bits(plain.run(inputs))
    return rep


def others(inputs: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.permutation(x.reshape(-1)).reshape(x.shape) if x.dtype == F else x for n, x in inputs.items()}


@pytest.mark.parametrize("name", ["bert", "resnet50", "lstm", "scatter", "dynamic"])
def test_from_the_third_run_on_a_net_is_one_launch(name: str) -> None:
    built, inputs = getattr(cuda_counts, name)()
    rep = replayed(built, [others(inputs, k) for k in range(5)])
    assert len(parts(rep)) == 1 and parts(rep)[0].startswith("a graph of")
    with fakecuda.counting() as during:
        rep.run(inputs)
    assert during["graphs"] == 1 and outside(during) == 0 and during["to_host"] == 1
    assert during["to_device"] == len(inputs) and during["on_device"] == 0


TRAINED = {"cnn": cuda_training.cnn, "resnet18": cuda_training.resnet18, "transformer": cuda_training.transformer}


@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_is_one_launch_and_keeps_the_addresses_of_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from singa import device
    from singa_backend.runtime.executor import Executor

    def trained(count: int) -> tuple[list[bytes], list[int], dict[str, int]]:
        device.resolve("CUDA").SetRandSeed(0)
        step = TRAINED[name](graph=True)
        net = next(c.cell_contents for c in step.__closure__ or () if hasattr(c.cell_contents, "optimizer"))
        for _ in range(count):
            with fakecuda.counting() as during:
                step()
        states = [t._data for t in net.get_states().values()]
        return bits(s.get() for s in states), [s.data.ptr for s in states], during

    after, addresses, during = trained(4)
    assert during["graphs"] == 1 and outside(during) == 0
    monkeypatch.setattr(Executor, "_by_graphs", lambda *_: None)
    expected, others, plain = trained(4)
    assert after == expected and plain["graphs"] == 0 and len(set(addresses)) == len(set(others))


def test_a_thousand_replays_allocate_nothing(cupy: Any) -> None:
    built, inputs = cuda_counts.lstm()
    rep = SingaBackend.prepare(built, "CUDA")
    there = {n: cupy.asarray(x) for n, x in inputs.items()}
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        for _ in range(4):
            rep.run(inputs), rep.run(there, to_host=False)
        with fakecuda.counting() as during:
            for _ in range(500):
                rep.run(inputs), rep.run(there, to_host=False)
    assert during["graphs"] == 1000 and during["allocations"] == 0 and outside(during) == 0


DRAWS = {
    "RandomNormalLike": "y = RandomNormalLike(a)",
    "Bernoulli": "p = Sigmoid(a) y = Bernoulli(p)",
    "Dropout": "yes = Constant<value = bool {1}>() y = Dropout(a, half, yes)",
    "a function": "y = RandomUniformLike<high = 2.0>(a)",
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_never_replayed(name: str) -> None:
    text = f"net (float[64] x) => (float[64] z) {{ a = Add(x, x) {DRAWS[name]} b = Mul(y, a) z = Add(b, x) }}"
    rep = SingaBackend.prepare(model(text, half=np.array(0.5, F)), "CUDA")
    x = normal(64)
    found = [rep.run([x])[0] for _ in range(7)]
    assert len({z.tobytes() for z in found}) == 7
    assert any("draws random numbers" in p for p in parts(rep)) and any("a graph" in p for p in parts(rep))


def test_a_draw_with_a_seed_repeats_as_without_graphs() -> None:
    text = "net (float[8] x) => (float[8] z) { a = Add(x, x) y = RandomNormalLike<seed = 3.0>(a) z = Mul(y, a) }"
    replayed(model(text), [[normal(8)] for _ in range(5)])


READS = """net (float[6] x) => (float[k] y, float[6] z) {
    a = Mul(x, two)
    p = Greater(a, zero)
    b = Compress<axis = 0>(a, p)
    y = Neg(b)
    c = Exp(a)
    z = Add(c, a)
}"""


def test_a_step_that_reads_back_is_between_graphs() -> None:
    built = model(READS, two=np.array(2, F), zero=np.array(0, F))
    signs = np.array([1, -1, 1, 1, -1, 1], F)
    rep = replayed(built, [[np.abs(normal(6)) * RNG.permutation(signs)] for _ in range(6)])
    assert [p.partition(":")[2].strip() for p in parts(rep)][1] == "reads values of the device on the host"
    assert [p.startswith("a graph") for p in parts(rep)] == [True, False, True]


def test_a_result_of_another_size_between_graphs_is_computed() -> None:
    built = model(READS, two=np.array(2, F), zero=np.array(0, F))
    draws = [np.array([1, -1, 1, 1, -1, 1], F)] * 4 + [np.array([1, 1, 1, 1, -1, 1], F), np.zeros(6, F)] * 3
    replayed(built, [[x * k] for k, x in enumerate(draws, 1)])


def test_an_error_between_graphs_is_that_of_the_node_and_later_runs_succeed() -> None:
    text = """net (float[4] x, int64[1] n) => (float[m] y) {
        a = Mul(x, two)
        s = Cast<to = 7>(a)
        i = ReduceSum(s)
        j = Reshape(i, one)
        r = Reshape(a, j)
        y = Neg(r)
    }"""
    built = model(text, two=np.array(2, F), one=np.array([1]))
    rep = SingaBackend.prepare(built, "CUDA")
    n = np.array([1])
    good, bad = np.array([0.5, 0.5, 0.5, 0.5], F), np.array([0.5, 0.5, 0.5, 9], F)
    for x in (good, good, good, bad, good, bad):
        if x is good:
            np.testing.assert_array_equal(rep.run([x, n])[0], [-1, -1, -1, -1])
        else:
            with pytest.raises(OperatorError, match="Reshape"):
                rep.run([x, n])


TWO_CHECKS = """net (int64[3] i, int64[3] j) => (float[3,2] y) {
    a = Gather(first, i)
    b = Gather(second, j)
    y = Add(a, b)
}"""


@pytest.mark.parametrize("to_host", [True, False])
def test_a_failed_check_in_a_graph_names_its_node(to_host: bool) -> None:
    rep = SingaBackend.prepare(model(TWO_CHECKS, first=normal(5, 2), second=normal(4, 2)), "CUDA")
    right = [np.array([0, 4, -5]), np.array([3, -4, 0])]
    expected = bits(rep.run(right))
    for _ in range(4):
        rep.run(right, to_host=to_host)
    for wrong, value, place in (([5, 0, 0], 5, 0), ([0, -7, 0], -7, 1)):
        inputs = list(right)
        inputs[place] = np.array(wrong)
        with pytest.raises(OperatorError, match=f"got {value}") as raised:
            rep.run(inputs, to_host=to_host)
        assert (raised.value.operator == "Gather" and (5, 2) in raised.value.shapes) or place
        assert bits(rep.run(right)) == expected
    both = [np.array([9, 0, 0]), np.array([0, 8, 0])]
    with pytest.raises(OperatorError, match="got 9"):
        rep.run(both, to_host=to_host)


def test_a_failed_check_leaves_the_parameters_of_a_captured_step() -> None:
    from singa import autograd, device, layer, opt
    from singa import model as models
    from singa.tensor import Tensor

    class Net(models.Model):
        def __init__(self) -> None:
            super().__init__()
            self.linear = layer.Linear(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x)

        def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
            loss = autograd.softmax_cross_entropy(self.forward(x), t)
            self.optimizer(loss)
            return loss

    where = device.resolve("CUDA")
    x, t = (Tensor(data=v, device=where, requires_grad=False) for v in (normal(3, 5), np.array([0, 1, 3], np.int32)))
    net = Net()
    net.optimizer = opt.SGD(0.1)
    net.compile([x], is_train=True, use_graph=True)
    for _ in range(6):
        with fakecuda.counting() as during:
            net(x, t)
    assert during["graphs"] == 1
    before = bits(v._data.get() for v in net.get_states().values())
    wrong = Tensor(data=np.array([0, 1, 4], np.int32), device=where, requires_grad=False)
    with pytest.raises(OperatorError, match="got 4"):
        net(x, wrong)
    assert bits(v._data.get() for v in net.get_states().values()) == before
    net(x, t)
    assert bits(v._data.get() for v in net.get_states().values()) != before


def test_values_on_the_host_are_never_frozen() -> None:
    text = "net (float[2,6] x, int64[n] s) => (float[a,b] y) { c = Mul(x, x) r = Reshape(c, s) y = Add(r, r) }"
    shapes = [np.array(s) for s in ([3, 4], [3, 4], [3, 4], [3, 4], [4, 3], [12, 1], [3, 4], [4, 3], [4, 3], [4, 3])]
    replayed(model(text), [[normal(2, 6), s] for s in shapes])


def test_runs_on_two_streams_are_ordered(cupy: Any) -> None:
    built, inputs = cuda_counts.lstm()
    rep, plain = SingaBackend.prepare(built, "CUDA"), SingaBackend.prepare(built, "CUDA", optimize=0)
    for _ in range(4):
        rep.run(inputs)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    draws = [others(inputs, k) for k in range(6)]
    found = []
    for k, x in enumerate(draws):
        with streams[k % 2]:
            found.append(rep.run(x, to_host=False))
    for stream in streams:
        stream.synchronize()
    for x, y in zip(draws, found, strict=True):
        assert bits(rep.device.get_all(y)) == bits(plain.run(x))


def test_runs_of_several_threads_have_the_bits_of_each_alone() -> None:
    built, inputs = cuda_counts.lstm()
    rep, plain = SingaBackend.prepare(built, "CUDA"), SingaBackend.prepare(built, "CUDA", optimize=0)
    draws = [others(inputs, k) for k in range(4)]
    expected = [bits(plain.run(x)) for x in draws]
    barrier = threading.Barrier(4, timeout=120)

    def work(k: int) -> bool:
        barrier.wait()
        return all(bits(rep.run(draws[k])) == expected[k] for _ in range(12))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(4)))
    assert len(parts(rep)) == 1


def test_outputs_belong_to_the_caller(cupy: Any) -> None:
    text = (
        "net (float[2,3] x) => (float[2,3] y, float[2,3] z, float[2,3] same) { y = Add(x, w) z = Identity(y) same = Identity(x) }"
    )
    rep = SingaBackend.prepare(model(text, w=normal(2, 3)), "CUDA")
    x = cupy.asarray(normal(2, 3))
    expected = bits(rep.run([x]))
    kept = []
    for k in range(8):
        found = rep.run([x], to_host=bool(k % 2))
        assert bits(found if k % 2 else rep.device.get_all(found)) == expected
        kept.append(found)
        if k < 6:
            for v in found:
                v[...] = 0
    assert bits(rep.device.get_all(kept[-2])) == bits(kept[-1]) == expected


OFF: dict[str, Callable[[Any, Any], Any]] = {
    "a deadline": lambda rep, x: rep.run(x, limits=Limits(deadline=60.0)),
    "a flag": lambda rep, x: rep.run(x, cancel=threading.Event()),
    "validate": lambda rep, x: rep.run(x, validate=True),
}


@pytest.mark.parametrize("why", OFF)
def test_a_run_that_is_watched_launches_its_kernels(why: str) -> None:
    built, inputs = cuda_counts.lstm()
    rep = SingaBackend.prepare(built, "CUDA")
    expected = bits([rep.run(inputs) for _ in range(4)][-1])
    with fakecuda.counting() as during:
        assert bits(OFF[why](rep, inputs)) == expected
    assert during["graphs"] == 0 and outside(during) > 0


def test_optimize_0_and_observers_launch_kernels() -> None:
    built, inputs = cuda_counts.lstm()
    plain, observed = SingaBackend.prepare(built, "CUDA", optimize=0), SingaBackend.prepare(built, "CUDA")
    for _ in range(4):
        observed.run(inputs)
    seen: list[str] = []
    observed._session.observer = lambda node, *_: seen.append(node.op_type)
    with fakecuda.counting() as during:
        for _ in range(4):
            plain.run(inputs), observed.run(inputs)
    assert during["graphs"] == 0 and outside(during) > 0 and seen


def test_limits_count_graphs_and_forget_plans_frees_them() -> None:
    built, inputs = cuda_counts.bert()
    rep = SingaBackend.prepare(built, "CUDA")
    rep.run(inputs), rep.run(inputs)
    before = fakecuda.used(0)
    rep.run(inputs)
    executor = rep._session._executor
    assert executor.graph_bytes > 1 << 16 and rep._session.kept_bytes[0] == executor.graph_bytes
    assert fakecuda.used(0) - before >= executor.graph_bytes - (1 << 16)
    rep._session.forget_plans()
    assert executor.graph_bytes == 0 and fakecuda.used(0) <= before
    expected = bits(rep.run(inputs))
    limit = executor.resident + (3 << 20)  # less than the graph needs
    tight = SingaBackend.prepare(built, "CUDA", limits=Limits(live_bytes=limit))
    for _ in range(6):
        assert bits(tight.run(inputs)) == expected
    assert parts(tight) == ["no graph: needs memory that graphs would keep"]


def test_replaced_initializers_are_read_by_the_next_run() -> None:
    rep = SingaBackend.prepare(
        model("net (float[3] x) => (float[3] y) { a = Mul(x, w) y = Neg(a) }", w=np.array([1, 2, 3], F)), "CUDA"
    )
    x = np.ones(3, F)
    for _ in range(5):
        np.testing.assert_array_equal(rep.run([x])[0], [-1, -2, -3])
    session = rep._session
    session.replace("w", session.feed("w", np.array([4, 5, 6], F)))
    for _ in range(5):
        np.testing.assert_array_equal(rep.run([x])[0], [-4, -5, -6])


TABLES = {
    "Resize": 'y = Resize<mode = "linear">(a, , scales)',
    "Pad": 'y = Pad<mode = "reflect">(a, pads)',
    "AveragePool": "y = AveragePool<kernel_shape = [2, 2], pads = [1, 1, 0, 0]>(a)",
    "Upsampling twice": 'b = Resize<mode = "cubic">(a, , scales) y = Resize<mode = "nearest">(b, , scales)',
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_bodies_are_kept_on_the_device(name: str) -> None:
    text = f"net (float[1,2,4,6] x) => (float[a,b,c,d] z) {{ a = Add(x, x) {TABLES[name]} z = Neg(y) }}"
    weights = {"scales": np.array([1, 1, 2, 1.5], F), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 2])}
    used = {n: w for n, w in weights.items() if n in TABLES[name]}
    rep = replayed(model(text, **used), [[normal(1, 2, 4, 6)] for _ in range(5)])
    assert [p.startswith("a graph") for p in parts(rep)] == [True]


def test_a_profile_names_graphs_and_what_is_outside() -> None:
    rep = SingaBackend.prepare(model(READS, two=np.array(2, F), zero=np.array(0, F)), "CUDA")
    found = rep.profile([normal(6)], runs=2)
    assert [g.startswith("a graph of") for g in found.graphs] == [True, False, True]
    assert "reads values of the device on the host" in found.graphs[1]


def test_a_failed_check_of_a_later_graph_does_not_stay() -> None:
    """The flags of a graph are those of the last run that launched it: a step before it must not read them."""
    text = """net (float[4] x, int64[2] i, int64[2] j) => (float[k] y, float[2] z) {
        a = Mul(x, two)
        u = Gather(first, i)
        p = Greater(a, zero)
        b = Compress<axis = 0>(a, p)
        at = Gather(first, j)
        y = Neg(b)
        z = Add(u, at)
    }"""
    built = model(text, two=np.array(2, F), zero=np.array(0, F), first=normal(3))
    rep, plain = SingaBackend.prepare(built, "CUDA"), SingaBackend.prepare(built, "CUDA", optimize=0)
    x, right, wrong = np.array([1, -1, 2, 3], F), np.array([0, 2]), np.array([0, 3])
    for i, j in [(right, right)] * 4 + [(right, wrong), (right, right), (wrong, right), (wrong, wrong), (right, right)]:
        if i is right and j is right:
            assert bits(rep.run([x, i, j])) == bits(plain.run([x, i, j]))
        else:
            with pytest.raises(OperatorError, match="got 3") as raised:
                rep.run([x, i, j])
            with pytest.raises(OperatorError, match="got 3") as expected:
                plain.run([x, i, j])
            assert raised.value.node == expected.value.node
    longer = np.array([1, 1, 2, 3], F)
    with pytest.raises(OperatorError, match="got 3"):
        rep.run([longer, wrong, right])
    assert bits(rep.run([longer, right, right])) == bits(plain.run([longer, right, right]))


NET = "net (float[64,64] x) => (float[64,64] y) { a = Mul(x, w) b = Exp(a) y = Softmax(b) }"


def prepared(**options: Any) -> Any:
    return SingaBackend.prepare(model(NET, w=np.full((64, 64), 0.5, F)), options.pop("device", "CUDA"), **options)


def test_sequences_share_no_memory_with_graphs(cupy: Any) -> None:
    text = "net (float[4] x) => (seq(float[4]) y) { a = Neg(x) y = SequenceConstruct(a) }"
    rep = SingaBackend.prepare(model(text), "CUDA")
    found = [rep.run([cupy.full(4, k, F)], to_host=False)[0] for k in range(5)]
    assert [float(y[0][0]) for y in found] == [0, -1, -2, -3, -4]


@pytest.mark.parametrize("when", ["forget_plans", "replace"])
def test_what_is_forgotten_during_a_run_is_not_used_by_later_ones(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from singa_backend.runtime.captured import CapturedRun

    rep, x = prepared(), normal(64, 64)
    for _ in range(4):
        rep.run([x])
    session, run = rep._session, CapturedRun.run

    def interrupted(self: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(CapturedRun, "run", run)
        outputs = run(self, *arguments)
        if when == "replace":
            session.replace("w", session.feed("w", np.full((64, 64), 2, F)))
        else:
            session.forget_plans()
        return outputs

    monkeypatch.setattr(CapturedRun, "run", interrupted)
    rep.run([x])
    assert session._executor.graph_bytes == 0 and not session._executor.repeats
    expected = SingaBackend.prepare(model(NET, w=np.full((64, 64), 2 if when == "replace" else 0.5, F)), "CUDA", optimize=0)
    for _ in range(4):
        assert bits(rep.run([x])) == bits(expected.run([x]))


def test_nodes_that_decide_after_graphs_are_computed_before_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from singa_backend.runtime.recorded import RunRecord

    built = model(READS, two=np.array(2, F), zero=np.array(0, F))
    rep, plain = SingaBackend.prepare(built, "CUDA"), SingaBackend.prepare(built, "CUDA", optimize=0)
    for _ in range(4):
        rep.run([np.array([1, -1, 1, 1, -1, 1], F)])
    seen, go_on = [], RunRecord.go_on

    def decides(self: Any, *arguments: Any) -> None:
        seen.append(self.captured._lock.locked())
        go_on(self, *arguments)

    monkeypatch.setattr(RunRecord, "go_on", decides)
    x = np.array([1, 1, 1, 1, -1, 1], F)
    y, z = rep.run([x], to_host=False)
    assert seen == [True] and bits([y.get(), z.get()]) == bits(plain.run([x]))


def test_graphs_keep_their_plans_of_transforms(cupy: Any) -> None:
    text = (
        "net (float[2,64,1] x) => (float[2,64,2] y, float[2,33,2] z) { y = DFT<axis = 1>(x) z = DFT<axis = 1, onesided = 1>(x) }"
    )
    rep = replayed(model(text), [[normal(2, 64, 1)] for _ in range(4)])
    assert [p.startswith("a graph") for p in parts(rep)] == [True]
    for n in range(2, 40):  # more than CuPy keeps
        cupy.fft.fft(cupy.ones(n, np.complex64))
    x = normal(2, 64, 1)
    assert bits(rep.run([x])) == bits(SingaBackend.prepare(model(text), "CUDA", optimize=0).run([x]))


def test_host_inputs_of_a_graph_whose_inputs_were_transposed(cupy: Any) -> None:
    rep, x = prepared(), normal(64, 64)
    for _ in range(4):
        rep.run([cupy.asarray(x.T.copy()).T])
    assert bits(rep.run([x])) == bits(prepared(optimize=0).run([x]))


def test_a_watched_run_leaves_the_graphs() -> None:
    rep, x = prepared(), normal(64, 64)
    for _ in range(4):
        rep.run([x])
    for watched in ({"limits": Limits(deadline=60.0)}, {"cancel": threading.Event()}, {"limits": Limits(live_bytes=1 << 30)}):
        rep.run([x], **watched)
        with fakecuda.counting() as during:
            rep.run([x])
        assert during["graphs"] == 1 and outside(during) == 0


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("collected", [False, True])
def test_the_memory_of_graphs_is_freed_with_the_model(cupy: Any, current: int, collected: bool) -> None:
    import gc

    x = normal(64, 64)
    gc.collect()
    prepared(device="CUDA:1").run([x])  # what is kept for the device: its handle of cuBLAS
    gc.collect()
    gc.disable()
    try:
        before = fakecuda.used(1)
        rep = prepared(device="CUDA:1")
        for _ in range(4):
            rep.run([x])
        with cupy.cuda.Device(current):
            assert 0 < rep._session._executor.graph_bytes <= fakecuda.used(1) - before
            if collected:
                rep.itself = rep  # type: ignore[attr-defined]  # a cycle
            del rep
    finally:
        gc.enable()
    if collected:
        gc.collect()
        other = prepared()  # a capture frees what a collection has left
        for _ in range(4):
            other.run([x])
    assert fakecuda.used(1) <= before


def test_limits_count_graphs_while_a_run_allocates() -> None:
    text = "net (float[n] x) => (float[n] y) { a = Exp(x) b = Reshape(a, s) c = Softmax(b) y = Neg(c) }"
    limits = Limits(live_bytes=52 << 20)
    rep = SingaBackend.prepare(model(text, s=np.array([-1])), "CUDA", limits=limits)
    for _ in range(4):
        rep.run([np.ones(1 << 20, F)])
    executor = rep._session._executor
    assert executor.graph_bytes > 8 << 20
    largest = np.ones(11 << 19, F)  # of which two are live at a time
    rep.run([largest])
    assert executor.graph_bytes == 0  # they would exceed the limit
    assert bits(rep.run([largest])) == bits(
        SingaBackend.prepare(model(text, s=np.array([-1])), "CUDA", optimize=0).run([largest])
    )


def test_a_device_out_of_memory_frees_graphs_first(cupy: Any) -> None:
    from fakecuda import installation

    rep = prepared()
    text = "net (float[n] x) => (float[n] y) { a = Exp(x) b = Neg(a) y = Softmax(b) }"
    rep = SingaBackend.prepare(model(text), "CUDA")
    for size in (1 << 18, (1 << 18) + 1):
        for _ in range(4):
            rep.run([np.ones(size, F)])
    executor = rep._session._executor
    assert executor.graph_bytes > 4 << 20
    bound = fakecuda.used(0) + (2 << 20)

    def small(size: int) -> Any:
        if fakecuda.used(0) + size > bound:
            raise cupy.cuda.memory.OutOfMemoryError(size, fakecuda.used(0))
        return installation._allocate(size)

    cupy.cuda.memory.set_allocator(small)
    try:
        (y,) = rep.run([np.ones(1 << 19, F)])
    finally:
        cupy.cuda.memory.set_allocator(installation._allocate)
    assert y.shape == (1 << 19,) and executor.graph_bytes == 0


def test_too_little_memory_for_a_graph_leaves_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    from singa_backend.devices.graphs import GraphMemory

    def full(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(GraphMemory, "place_for", full)
    rep, x = prepared(), normal(64, 64)
    expected = bits(prepared(optimize=0).run([x]))
    for _ in range(5):
        assert bits(rep.run([x])) == expected
    assert parts(rep)[0].startswith("no graph")


def test_a_graph_that_cannot_be_made_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from singa_backend.devices.graphs import GraphMemory

    tries, capture = [], GraphMemory.capture

    def failing(self: Any, work: Any) -> Any:
        tries.append(1)
        capture(self, work)
        raise RuntimeError("cudaErrorGraphExecUpdateFailure")

    monkeypatch.setattr(GraphMemory, "capture", failing)
    built, inputs = cuda_counts.lstm()
    rep = replayed(built, [inputs] * 5)
    assert len(tries) == 1 and "is not permitted in a capture" in parts(rep)[0]


def test_a_caller_may_capture_a_run(cupy: Any) -> None:
    rep, x = prepared(), cupy.asarray(normal(64, 64))
    for _ in range(4):
        (expected,) = rep.run([x], to_host=False)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream, cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        stream.begin_capture()
        (y,) = rep.run([x], to_host=False)
        graph = stream.end_capture()
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
    assert bits([y.get()]) == bits([expected.get()])


def replacing(text: str, replaced: dict[int, int]) -> Any:
    from singa_backend.session import Session

    session = SingaBackend.prepare(model(text), "CUDA")._session
    return Session(session.graph, session.device, session.options, session.limits, replaced=replaced)


def test_inputs_that_share_memory_are_not_written_in_place(cupy: Any) -> None:
    session = replacing("net (float[4] a, float[4] b) => (float[4] c, float[4] d) { c = Neg(a) d = Exp(b) }", {0: 0, 1: 1})
    w = cupy.full(4, 2, F)
    for _ in range(5):
        c, d = session.run([w, w])
        assert float(c[0]) == -2 and abs(float(d[0]) - np.exp(2)) < 1e-5 and float(w[0]) == 2
    assert "share memory" in session._executor.graphs_in_words()[0]


def test_parameters_may_move_now_and_then(cupy: Any) -> None:
    session = replacing("net (float[4] a) => (float[4] c) { c = Neg(a) }", {0: 0})
    kept = []
    for k in range(8):
        w = cupy.full(4, k, F)
        kept.append(w)
        for _ in range(4):
            (w,) = session.run([w])
        assert (session._executor.graphs_in_words() == ("a graph of 1 step",) and w is kept[-1]) or k == 0
    for k in range(8):
        kept.append(cupy.full(4, k, F))
        session.run([kept[-1]])
    assert "other arrays in each run" in session._executor.graphs_in_words()[0]


def test_sixteen_combinations_of_inputs_are_kept() -> None:
    rep = SingaBackend.prepare(model("net (float[n] x) => (float[n] y) { a = Exp(x) y = Neg(a) }"), "CUDA")
    for n in range(1, 17):
        for _ in range(3):
            rep.run([normal(n)])
    with fakecuda.counting() as during:
        for n in range(1, 17):
            rep.run([normal(n)])
    assert during["graphs"] == 16 and outside(during) == 0


def test_a_profile_is_of_its_inputs(cupy: Any) -> None:
    rep = prepared()
    wide = cupy.asarray(normal(64, 128))[:, ::2]
    for x in (normal(64, 64), wide):
        for _ in range(4):
            rep.run([x])
    assert "gaps" in rep.profile([wide], runs=1).graphs[0]
    assert rep.profile([normal(64, 64)], runs=1).graphs[0].startswith("a graph of")


def test_another_thread_may_wait_for_the_device_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device refuses to be waited for while a stream captures; the wait comes after the capture, which remains valid."""
    from singa_backend.devices.graphs import GraphMemory

    rep, x, threads, capture = prepared(), normal(64, 64), [], GraphMemory.capture

    def shared(self: Any, work: Callable[[], object]) -> Any:
        def both() -> None:
            threads.append(threading.Thread(target=rep.device.synchronize))
            threads[-1].start()
            threads[-1].join(0.2)  # it begins within the capture
            work()

        return capture(self, both)

    monkeypatch.setattr(GraphMemory, "capture", shared)
    for _ in range(4):
        rep.run([x])
    for thread in threads:
        thread.join()
    assert len(threads) == 1 and parts(rep)[0].startswith("a graph of")
