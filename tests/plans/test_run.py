"""Runs of a model whose plan exists: checks, arrays for the outputs, threads, the plans that are kept."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from onnx import parser

from singa_backend import InvalidInput, Limits, OperatorError, ResourceExhausted, SingaBackend, SingaRep
from singa_backend import deadline as bounds
from singa_backend.kernels.table import Invalid
from singa_backend.plans import planner
from singa_backend.plans.plan import Plan
from singa_backend.plans.trace import Tracer

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
NET = f"""{HEAD} g (float[n, 3] x, float[n, 3] h) => (float[n, 3] y, float[3, n] t)
<float[3] w = {{1.0, -2.0, 3.0}}> {{ a = Mul(x, w)  s = Add(a, h)  y = Relu(s)  t = Transpose(s) }}"""


def rep_of(text: str = NET, **options: Any) -> SingaRep:
    return SingaBackend.prepare(parser.parse_model(text), **options)


@pytest.fixture(params=[2, 0], ids=["plans", "definitions"])
def rep(request: pytest.FixtureRequest) -> SingaRep:
    made = rep_of(optimize=request.param)
    made.run(feeds(0))
    made.run(feeds(1))
    return made


def feeds(seed: int, n: int = 2) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(n, 3)).astype(np.float32) for _ in range(2)]


def expected(x: np.ndarray, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    s = x * np.array([1, -2, 3], np.float32) + h
    return np.maximum(s, 0), s.T


def check(outputs: Any, given: list[np.ndarray]) -> None:
    for got, want in zip(outputs, expected(*given), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        assert got.flags.owndata and got.flags.writeable


# --- inputs


def test_inputs_in_every_form(rep: SingaRep) -> None:
    x, h = given = feeds(3)
    for form in (given, tuple(given), {"x": x, "h": h}, {"h": h, "x": x}, [x.tolist(), h]):
        check(rep.run(form), given)
    wide = np.zeros((4, 6), np.float32)
    wide[::2, ::2] = x
    check(rep.run([wide[::2, ::2], np.asfortranarray(h)]), given)
    check(rep.run([x.view(np.recarray), h]), given)
    check(rep.run([x.astype(">f4"), h]), given)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        ([feeds(0)[0]], "SX301"),
        (feeds(0)[0], "SX301"),
        ({"x": feeds(0)[0]}, "SX301"),
        ({"x": feeds(0)[0], "z": feeds(0)[1]}, "SX301"),
        ([feeds(0)[0].astype(np.float64), feeds(0)[1]], "SX302"),
        ([feeds(0)[0], None], "SX302"),
        ([feeds(0)[0], feeds(0, 3)[1]], "SX303"),
        ([feeds(0)[0][0], feeds(0)[1]], "SX303"),
    ],
    ids=str,
)
def test_a_wrong_input_is_refused_after_right_ones(rep: SingaRep, wrong: Any, code: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        rep.run(wrong)
    assert caught.value.code == code
    check(rep.run(feeds(4)), feeds(4))


def test_results_belong_to_the_caller(rep: SingaRep) -> None:
    first = rep.run(feeds(5))
    kept = [y.copy() for y in first]
    rep.run(feeds(6))
    for y, k in zip(first, kept, strict=True):
        np.testing.assert_array_equal(y, k)
        y[...] = 7
    check(rep.run(feeds(5)), feeds(5))


def test_nan_is_propagated(rep: SingaRep) -> None:
    x, h = feeds(7)
    x[1, 1] = np.nan
    y, _ = rep.run([x, h])
    assert np.isnan(y[1, 1]) and np.isnan(y).sum() == 1
    check(rep.run(feeds(8)), feeds(8))


def test_options_of_a_run_hold(rep: SingaRep) -> None:
    assert rep.run(feeds(1), last_layers=-4)[0].shape == (2, 3)
    assert rep.run(feeds(1), aux_output=["a"]).names == ("y", "t", "a")
    with pytest.raises(InvalidInput):
        rep.run(feeds(1), aux_output=3)
    stop = threading.Event()
    check(rep.run(feeds(1), cancel=stop), feeds(1))
    stop.set()
    with pytest.raises(ResourceExhausted) as caught:
        rep.run(feeds(1), cancel=stop)
    assert caught.value.code == "SX609"
    with pytest.raises(ResourceExhausted):
        rep.run(feeds(1), limits=Limits(executions=1))
    with pytest.raises(ResourceExhausted):
        rep.run(feeds(1), limits=Limits(tensor_bytes=8))
    check(rep.run(feeds(1), validate=True), feeds(1))


class SlowClock:
    """A clock that only a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def before(self, function: Any, seconds: float) -> Any:
        """The function, which takes this time."""

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return function(*args, **kwargs)

        return slow


def refuse(*args: Any) -> Any:
    """A kernel refuses a value in a trace."""
    raise Invalid


@pytest.mark.parametrize("slow", [(planner, "fuse"), (Tracer, "_walk"), (Tracer, "_followers")])
def test_a_deadline_shorter_than_the_making_of_a_plan(slow: tuple[Any, str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowClock()
    monkeypatch.setattr(bounds, "time", clock)
    monkeypatch.setattr(*slow, clock.before(getattr(*slow), 5.0))
    rep = rep_of()
    short = Limits(deadline=1.0)
    with pytest.raises(ResourceExhausted, match="while a plan for these shapes was made") as caught:
        rep.run(feeds(2), limits=short)
    assert caught.value.code == "SX608" and "run again" in caught.value.hint
    check(rep.run(feeds(2), limits=short), feeds(2))
    assert rep._session.reason is None


def test_the_time_of_a_plan_that_is_not_kept_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowClock()
    monkeypatch.setattr(bounds, "time", clock)
    monkeypatch.setattr(Plan, "trace", clock.before(refuse, 5.0))
    rep = rep_of()
    with pytest.raises(ResourceExhausted, match="has passed") as caught:
        rep.run(feeds(2), limits=Limits(deadline=1.0))
    assert caught.value.code == "SX608" and caught.value.node


def test_making_a_plan_ends_after_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowClock()
    monkeypatch.setattr(bounds, "time", clock)
    monkeypatch.setattr(Tracer, "_followers", clock.before(Tracer._followers, bounds.MAKING))
    with pytest.raises(ResourceExhausted, match=r"has passed\n") as caught:
        rep_of().run(feeds(2), limits=Limits(deadline=1.0))
    assert caught.value.code == "SX608" and clock.now < 3 * bounds.MAKING


def test_the_steps_of_a_first_run_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SlowClock()
    monkeypatch.setattr(bounds, "time", clock)
    monkeypatch.setattr(Tracer, "_record", clock.before(Tracer._record, 2.0))  # at the end of a step
    with pytest.raises(ResourceExhausted) as caught:
        rep_of().run(feeds(2), limits=Limits(deadline=1.0))
    assert caught.value.code == "SX608" and "made" not in caught.value.message


def test_limits_of_the_model_hold_in_every_run() -> None:
    made = rep_of()
    rep = SingaRep(made.graph, made.device, Limits(deadline=1e-9))
    for _ in range(3):
        with pytest.raises(ResourceExhausted) as caught:
            rep.run(feeds(1))
        assert caught.value.code == "SX608"
    for _ in range(2):
        made.run(feeds(1))
    made.limits = rep.limits
    with pytest.raises(ResourceExhausted):
        made.run(feeds(1))


def test_floating_point_errors_are_not_reported(recwarn: pytest.WarningsRecorder) -> None:
    rep = rep_of(f"{HEAD} g (float[n] x) => (float[n] y) {{ y = Log(x) }}")
    with np.errstate(all="raise"):
        for _ in range(3):
            assert np.isneginf(rep.run([np.zeros(2, np.float32)])[0]).all()
        with pytest.raises(FloatingPointError):
            np.log(np.zeros(2, np.float32))
    assert not recwarn.list


GATHER = f"{HEAD} g (float[n, m] x, int64[k] i) => (float[k, m] y) {{ y = Gather(x, i) }}"


@pytest.mark.parametrize("width", [1, 9000])
def test_invalid_data_raise_the_error_of_the_definition(width: int) -> None:
    rep = rep_of(GATHER)
    x = np.arange(3 * width, dtype=np.float32).reshape(3, width)
    for _ in range(2):
        np.testing.assert_array_equal(rep.run([x, np.array([2, -3])])[0], x[[2, 0]])
        for wrong in (3, -4):
            with pytest.raises(OperatorError, match=f"got {wrong}") as caught:
                rep.run([x, np.array([0, wrong])])
            assert caught.value.code == "SX401" and caught.value.operator == "Gather"


def test_threads_may_share_a_model() -> None:
    rep, wrong = rep_of(), []
    rep.run(feeds(0))

    def work(seed: int) -> None:
        for k in range(40):
            given = feeds(1000 * seed + k, 2 + k % 2)
            for got, want in zip(rep.run(given), expected(*given), strict=True):
                if not np.allclose(got, want, rtol=1e-5):
                    wrong.append((seed, k))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_plan_that_was_not_used_for_the_longest_time_is_forgotten() -> None:
    """The model states a number, and callers pass others: the inputs of a Loop's body may have any sizes."""
    rep = rep_of(f"""{HEAD} g (float[n] x, int64 count) => (float[m] y) {{
        go = Constant<value: tensor = bool {{1}}>()
        y = Loop(count, go, x) <body = b (int64 i, bool on, float[1] v) => (bool more, float[k] w) {{
            more = Identity(on)
            w = Concat<axis = 0>(v, v)
        }}>
    }}""")
    for count in (3, 6, 3):
        x = np.arange(2, dtype=np.float32)
        y = rep.run([x, np.array(count)])[0]
        np.testing.assert_array_equal(y, np.tile(x, 2**count))


# --- arrays for the outputs


def receivers(n: int = 2) -> list[np.ndarray]:
    return [np.full((n, 3), 9, np.float32), np.full((3, n), 9, np.float32)]


@pytest.mark.parametrize("form", ["list", "tuple", "dict"])
def test_outputs_are_written_into_arrays(rep: SingaRep, form: str) -> None:
    y, t = receivers()
    out: Any = {"list": [y, t], "tuple": (y, t), "dict": {"t": t, "y": y}}[form]
    for seed in (1, 2, 3):
        outputs = rep.run(feeds(seed), out=out)
        assert outputs[0] is y and outputs["t"] is t
        check(outputs, feeds(seed))


def test_some_outputs_may_be_new(rep: SingaRep) -> None:
    y, t = receivers()
    for out, old, new in (([None, t], 1, 0), ({"y": y}, 0, 1)):
        outputs = rep.run(feeds(1), out=out)
        assert outputs[old] is (y, t)[old] and outputs[new] is not (y, t)[new]
        check(outputs, feeds(1))


def test_one_array_receives_the_only_output() -> None:
    rep = rep_of(f"{HEAD} g (float[n] x) => (float[n] y) {{ y = Neg(x) }}")
    out = np.empty(2, np.float32)
    for _ in range(3):
        assert rep.run(np.ones(2, np.float32), out=out)[0] is out
        np.testing.assert_array_equal(out, -1)


def test_a_receiver_may_have_strides_and_may_be_an_input(rep: SingaRep) -> None:
    wide = np.zeros((2, 6), np.float32)
    rep.run(feeds(1), out=[wide[:, ::2], None])
    np.testing.assert_allclose(wide[:, ::2], expected(*feeds(1))[0], rtol=1e-6)
    assert not wide[:, 1::2].any()
    x, h = feeds(2)
    wanted = expected(x, h)
    outputs = rep.run([x, h], out=[h, None])
    assert outputs[0] is h
    np.testing.assert_allclose(h, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(outputs[1], wanted[1], rtol=1e-6)


def test_receivers_of_auxiliary_outputs(rep: SingaRep) -> None:
    a = np.empty((2, 3), np.float32)
    outputs = rep.run(feeds(1), aux_output=["a"], out={"a": a})
    assert outputs["a"] is a
    np.testing.assert_allclose(a, feeds(1)[0] * np.array([1, -2, 3], np.float32))


def read_only() -> np.ndarray:
    a = receivers()[0]
    a.flags.writeable = False
    return a


SHARED = np.zeros(12, np.float32)


@pytest.mark.parametrize(
    ("out", "text"),
    [
        ([receivers()[0]], "2 arrays, one for each output"),
        (receivers()[0], "2 arrays, one for each output"),
        ({"z": receivers()[0]}, "got 'z'"),
        ([receivers()[0].astype(np.float64), None], "must be float32"),
        ([receivers(3)[0], None], r"must be float32\[2, 3\], got float32\[3, 3\]"),
        ([receivers()[0].T, None], r"must be float32\[2, 3\], got float32\[3, 2\]"),
        ([read_only(), None], "read-only"),
        ([[1.0, 2.0], None], "got a list for output 'y'"),
        ([SHARED[:6].reshape(2, 3), SHARED[5:11].reshape(3, 2)], "share memory"),
    ],
    ids=str,
)
def test_a_wrong_receiver_is_refused(rep: SingaRep, out: Any, text: str) -> None:
    spare = np.full((3, 2), 9, np.float32)
    if isinstance(out, list) and len(out) == 2 and out[1] is None:
        out = [out[0], spare]
    with pytest.raises(InvalidInput, match=text) as caught:
        rep.run(feeds(1), out=out)
    assert caught.value.code == "SX385"
    assert (spare == 9).all()


def test_interleaved_receivers_do_not_share_memory(rep: SingaRep) -> None:
    both = np.zeros((2, 6), np.float32)
    outputs = rep.run(feeds(1), out=[both[:, ::2], both[:, 1::2].reshape(3, 2)])
    np.testing.assert_allclose(outputs[0], expected(*feeds(1))[0], rtol=1e-6)


def test_a_receiver_must_not_be_an_initializer(rep: SingaRep) -> None:
    made = rep_of(f"{HEAD} g (float[3] x) => (float[3] y) <float[3] w = {{1.0, 2.0, 3.0}}> {{ y = Add(x, w) }}")
    states = next(v for held in made._session.states.values() for _, v in held)
    for _ in range(2):
        with pytest.raises(InvalidInput, match="initializers"):
            made.run(np.ones(3, np.float32), out=states)


def test_a_sequence_has_no_receiver() -> None:
    rep = rep_of(f"{HEAD} g (float[n] x) => (seq(float[n]) y) {{ y = SequenceConstruct(x, x) }}")
    for _ in range(2):
        with pytest.raises(InvalidInput, match="must have None for output 'y'"):
            rep.run(np.ones(3, np.float32), out=[np.ones(3, np.float32)])
        assert len(rep.run(np.ones(3, np.float32), out=[None])[0]) == 2


def test_one_plan_computes_all_sizes_that_the_model_leaves_open() -> None:
    rep = rep_of()
    for n in (5, 2, 9, 5, 64, 4, *np.random.default_rng(0).integers(4, 300, 30)):
        given = feeds(int(n), int(n))
        check(rep.run(given), given)
    made = rep._session._planner
    assert made is not None and len(made.plans) == 1 and not made.failed
    assert made.bound > 20


@pytest.mark.parametrize("n", [0, 1])
def test_no_and_one_row_have_plans_of_their_own(n: int) -> None:
    rep = rep_of()
    for size in (5, n, 4, n):
        given = feeds(size, size)
        check(rep.run(given), given)
    assert rep._session._planner is not None and len(rep._session._planner.plans) == 2
