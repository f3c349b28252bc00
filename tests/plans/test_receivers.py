"""Aliases of `out`: every kind of view is either refused before the run, or has the numbers of a run without `out`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided
from onnx import parser

from singa import sonnx
from singa_backend import InvalidInput, SingaBackend, SingaRep
from singa_backend.backend import _receive
from singa_backend.plans.passed import PASSED
from singa_backend.runtime.feeds import overlaps_itself

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
LARGE = PASSED // 4 // 64  # rows of 64 floats in an input that a plan does not copy

F = np.float32


def normal(*shape: int, dtype: Any = F) -> np.ndarray:
    return (np.random.default_rng(len(shape)).normal(size=shape) * 9).astype(dtype)


MODELS: dict[str, tuple[str, list[np.ndarray]]] = {
    "elementwise": ("(float[n,3] x, float[n,3] h) => (float[n,3] y, float[n,3] z) <float[3] w = {1.0, -2.0, 3.0}>"
                    "{ a = Mul(x, w) y = Add(a, h) z = Relu(y) }", [normal(4, 3), normal(4, 3) + 1]),
    "swapped": ("(float[n,3] x, float[n,3] h) => (float[n,3] y, float[n,3] z) { y = Identity(h) z = Identity(x) }",
                [normal(4, 3), normal(4, 3) + 1]),
    "large": ("(float[n,64] x, float[n,64] h) => (float[n,64] y, float[n,64] z) { y = Relu(h) z = Sub(x, h) }",
              [normal(LARGE, 64), normal(LARGE, 64) + 1]),
    "large, swapped": ("(float[n,64] x, float[n,64] h) => (float[n,64] y, float[n,64] z) { y = Identity(h) z = Identity(x) }",
                       [normal(LARGE, 64), normal(LARGE, 64) + 1]),
    "integers": ("(int64[n,m] x) => (int64[n,m] y, int64[n,m] z) { y = Neg(x) z = Add(x, y) }", [normal(3, 5, dtype=np.int64)]),
    "booleans": ("(float[n,m,k] x) => (bool[n,m,k] y, bool[n,m,k] z) { y = IsNaN(x) z = Not(y) }", [normal(2, 3, 4)]),
    "images": ("(float[n,2,5,5] x) => (float[n,2,5,5] y, float[n,2,5,5] z) <float[2,2,1,1] w = {1.0, 2.0, 3.0, 4.0}>"
               "{ y = Conv(x, w) z = Softmax<axis = 1>(y) }", [normal(2, 2, 5, 5)]),
    "constants": ("(float[n,3] x) => (float[2,3] y, float[n,3] z) <float[2,3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}>"
                  "{ y = Identity(w) z = Abs(x) }", [normal(2, 3)]),
    "branches": ("(float[n,3] x) => (float[n,3] y, float[n,3] z) { s = ReduceSum<keepdims = 0>(x) c = Cast<to = 9>(s)"
                 "y = If(c) <then_branch = g1 () => (float[n,3] a) { a = Neg(x) },"
                 "else_branch = g2 () => (float[n,3] b) { b = Abs(x) }>"
                 "z = Identity(x) }", [normal(4, 3)]),
    "one number": ("(float[n] x) => (float y, float z) { y = ReduceSum<keepdims = 0>(x) z = Neg(y) }", [normal(5)]),
    "nothing": ("(float[n,3] x) => (float[n,3] y, float[n,3] z) { y = Relu(x) z = Neg(x) }", [np.zeros((0, 3), F)]),
    "texts": ("(string[n,3] x) => (string[n,3] y, string[n,3] z) { y = Identity(x) z = StringConcat(x, x) }",
              [np.array([["a", "b", "c"], ["d", "e", "f"]], object)]),
}  # fmt: skip

View = Callable[[np.ndarray, list[np.ndarray], SingaRep], np.ndarray | None]
"""From an output, the inputs and the model: an array for `out`; None where there is no such view."""


def plain(y: np.ndarray) -> np.ndarray:
    made = np.empty(y.shape, y.dtype)
    made.fill("?" if y.dtype == object else 7)
    return made


def every_axis(view: Callable[[np.ndarray, int], np.ndarray | None]) -> Iterator[tuple[str, View]]:
    for axis in range(4):
        yield f"{view.__name__} {axis}", lambda y, xs, rep, axis=axis: view(y, axis) if axis < y.ndim else None  # type: ignore[misc]


def reversed_axis(y: np.ndarray, axis: int) -> np.ndarray:
    return np.flip(plain(y), axis)


def every_third(y: np.ndarray, axis: int) -> np.ndarray:
    wide = plain(np.repeat(y, 3, axis))
    return wide[(*[slice(None)] * axis, slice(1, None, 3))]


def last_axis_first(y: np.ndarray, axis: int) -> np.ndarray:
    return np.moveaxis(plain(np.moveaxis(y, axis, 0)), 0, axis)


def broadcast(y: np.ndarray, axis: int) -> np.ndarray | None:
    if y.shape[axis] < 2 or not y.size:
        return None
    made = plain(y)
    return as_strided(made, made.shape, [0 if i == axis else s for i, s in enumerate(made.strides)])


def windows(y: np.ndarray, axis: int) -> np.ndarray | None:
    """Each row begins one element after the one before it."""
    if y.ndim < 2 or axis == y.ndim - 1 or y.shape[axis] < 2 or y.shape[-1] < 2:
        return None
    made = plain(y)
    return as_strided(made, made.shape, [made.itemsize if i == axis else s for i, s in enumerate(made.strides)])


def half_elements(y: np.ndarray, axis: int) -> np.ndarray | None:
    if y.shape[axis] < 2 or y.itemsize < 2 or y.dtype == object or not y.size:
        return None
    made = plain(y)
    return as_strided(made, made.shape, [made.itemsize // 2 if i == axis else s for i, s in enumerate(made.strides)])


def misaligned(y: np.ndarray, xs: Any, rep: Any) -> np.ndarray | None:
    return None if y.dtype == object else np.frombuffer(bytearray(y.nbytes + 1), y.dtype, y.size, 1).reshape(y.shape)


def interleaved(y: np.ndarray, xs: Any, rep: Any) -> np.ndarray | None:
    """No two elements share memory, although the rows reach into each other."""
    if y.ndim != 2 or y.shape[1] != 3 or not y.size or y.dtype == object:
        return None
    n = len(y) | 1
    return as_strided(np.empty(2 * n + 2 * len(y) + 4, y.dtype), y.shape, [2 * y.itemsize, n * y.itemsize])


def read_only(y: np.ndarray, xs: Any, rep: Any) -> np.ndarray:
    made = plain(y)
    made.flags.writeable = False
    return made


def other_bytes(y: np.ndarray, xs: Any, rep: Any) -> np.ndarray | None:
    return None if y.itemsize < 2 or y.dtype == object else plain(y).astype(y.dtype.newbyteorder())


def an_input(y: np.ndarray, xs: list[np.ndarray], rep: Any) -> np.ndarray | None:
    return next((x for x in xs if x.shape == y.shape and x.dtype == y.dtype), None)


def last_input(y: np.ndarray, xs: list[np.ndarray], rep: Any) -> np.ndarray | None:
    return an_input(y, xs[::-1], rep)


def reversed_input(y: np.ndarray, xs: list[np.ndarray], rep: Any) -> np.ndarray | None:
    x = an_input(y, xs, rep)
    return None if x is None or not x.ndim else x[::-1]


def part_of_an_input(y: np.ndarray, xs: list[np.ndarray], rep: Any) -> np.ndarray | None:
    """The elements of an input and the array are shifted against each other."""
    for i, x in enumerate(xs):
        if x.shape == y.shape and x.dtype == y.dtype and x.size:
            both = np.empty(x.size + 1, x.dtype)
            both[:-1], both[-1] = x.reshape(-1), x.reshape(-1)[0]
            xs[i] = both[:-1].reshape(x.shape)
            return both[1:].reshape(x.shape)
    return None


def initializer(y: np.ndarray, xs: Any, rep: SingaRep) -> np.ndarray | None:
    held = (v for states in rep._session.states.values() for _, v in states)
    return next((v for v in held if v.shape == y.shape and v.dtype == y.dtype), None)


VIEWS: dict[str, View] = {
    "plain": lambda y, xs, rep: plain(y),
    "Fortran order": lambda y, xs, rep: np.asfortranarray(plain(y)) if y.ndim else None,
    "objects": lambda y, xs, rep: None if y.dtype == object else np.empty(y.shape, object),
    "another shape": lambda y, xs, rep: plain(np.stack([y, y])),
    "another dtype": lambda y, xs, rep: None if y.dtype == object else np.empty(y.shape, np.float16),
    **{v.__name__: v for v in (misaligned, interleaved, read_only, other_bytes, an_input, last_input, reversed_input)},
    "part_of_an_input": part_of_an_input,
    "initializer": initializer,
    **dict(itertools.chain(*map(every_axis, (reversed_axis, every_third, last_axis_first, broadcast, windows, half_elements)))),
}

REFUSED = ("read_only", "broadcast", "windows", "half_elements", "initializer")
"""Kinds that are refused before the run."""
FITTING = (
    "plain",
    "Fortran",
    "misaligned",
    "interleaved",
    "an_input",
    "last_input",
    "reversed",
    "part_of",
    "every_third",
    "last_axis",
)
"""Kinds that are written."""


class Counted:
    """The number of runs of a model, by plans and by definitions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from singa_backend.plans.plan import Plan
        from singa_backend.runtime.executor import Executor

        self.runs = 0
        for kind, name in ((Plan, "run"), (Plan, "trace"), (Executor, "run")):
            monkeypatch.setattr(kind, name, self._counting(getattr(kind, name)))

    def _counting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.runs += 1
            return run(*args, **kwargs)

        return counted


def bits(a: np.ndarray) -> Any:
    return a.tolist() if a.dtype == object else a.tobytes()


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bits(a) == bits(b)


@pytest.mark.parametrize("level", [2, 0], ids=["plans", "definitions"])
@pytest.mark.parametrize("name", MODELS)
def test_every_view_is_refused_or_has_the_numbers_of_a_run_without_out(name: str, level: int, monkeypatch: Any) -> None:
    text, given = MODELS[name]
    rep = SingaBackend.prepare(parser.parse_model(f"{HEAD} g {text}"), optimize=level)
    for _ in range(2):
        wanted = [y.copy() for y in rep.run([x.copy() for x in given])]
    counted, written, refused = Counted(monkeypatch), 0, 0
    for (kind, view), other, place in itertools.product(VIEWS.items(), ("none", "plain", "an_input", "last_input"), (0, 1)):
        xs = [x.copy() for x in given]
        a = view(wanted[place], xs, rep)
        b = None if other == "none" else VIEWS[other](wanted[1 - place], xs, rep)
        if a is None or (b is None and other != "none") or (b is not None and np.shares_memory(a, b)):
            continue  # no such view of this output; test_two_arrays_of_out has those that share memory
        out = [a, b] if place == 0 else [b, a]
        before, inputs, runs = bits(a), [bits(x) for x in xs], counted.runs
        case = f"{kind} for output {place}, {other} for the other"
        try:
            got = rep.run(xs, out=out)
        except InvalidInput as error:
            assert error.code == "SX385" and not kind.startswith(FITTING), case
            assert bits(a) == before and [bits(x) for x in xs] == inputs, case
            assert counted.runs == runs or not kind.startswith(REFUSED), case
            refused += 1
            continue
        assert not kind.startswith(REFUSED), case
        assert got[place] is a and (b is None or got[1 - place] is b), case
        assert all(same(y, w) for y, w in zip(got, wanted, strict=True)), case
        written += 1
    assert written >= 8 and refused >= 4
    assert all(same(y, w) for y, w in zip(rep.run([x.copy() for x in given]), wanted, strict=True))


def test_arrays_that_overlap_themselves_by_counting() -> None:
    """`overlaps_itself` on 4,000 drawn layouts, against the bytes of every element."""
    rng, found = np.random.default_rng(5), [0, 0]
    for _ in range(4000):
        shape = rng.integers(1, 5, rng.integers(0, 4)).tolist()
        strides = rng.integers(-14, 15, len(shape)).tolist()
        a = as_strided(np.zeros(400, np.int16)[200:], shape, strides)
        places = [sum(i * s for i, s in zip(at, strides, strict=True)) for at in np.ndindex(*shape)]
        cells = [p + k for p in places for k in range(2)]
        wanted = len(set(cells)) < len(cells)
        assert overlaps_itself(a) is wanted, (shape, strides)
        found[wanted] += 1
    assert min(found) > 500
    assert overlaps_itself(as_strided(np.zeros(1, F), (1 << 30, 1 << 30), (0, 0)))  # without an array of its places
    assert not overlaps_itself(as_strided(np.zeros(1, F), (1 << 30, 0), (0, 0)))


@pytest.mark.parametrize("level", [2, 0], ids=["plans", "definitions"])
def test_two_arrays_of_out_that_share_memory(level: int) -> None:
    text, given = MODELS["elementwise"]
    rep = SingaBackend.prepare(parser.parse_model(f"{HEAD} g {text}"), optimize=level)
    for _ in range(2):
        wanted = rep.run(given)
        memory = np.full(40, 9, F)
        first = memory[:12].reshape(4, 3)
        for second in (first, first[::-1], memory[11:23].reshape(4, 3), memory[::3][:12].reshape(4, 3)):
            for pair in ([first, second], [second, first]):
                with pytest.raises(InvalidInput, match="share memory") as caught:
                    rep.run(given, out=pair)
                assert caught.value.code == "SX385" and (memory == 9).all()
        both = np.zeros((8, 3), F)
        got = rep.run(given, out=[both[::2], both[1::2]])
        assert all(same(y, w) for y, w in zip(got, wanted, strict=True))


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@pytest.mark.parametrize("prepare", [SingaBackend.prepare, sonnx.prepare], ids=["singa_backend", "sonnx"])
def test_an_array_of_the_model_is_refused(prepare: Callable[..., Any], device: str, tmp_path: Path) -> None:
    """Initializers, those of a subgraph, constants, and parameters; also after a run with another array."""
    text = (
        "(float[3] x, bool c) => (float[3] y) <float[3] w = {1.0, 2.0, 3.0}> { k = Constant<value = float[3] {4.0, 5.0, 6.0}>()"
        "a = Add(x, w) b = Mul(a, k)"
        "y = If(c) <then_branch = g1 () => (float[3] d) <float[3] v = {7.0, 8.0, 9.0}> { d = Mul(b, v) },"
        "else_branch = g2 () => (float[3] e) { e = Neg(b) }> }"
    )
    rep = prepare(parser.parse_model(f"{HEAD} g {text}"), device)
    given = [np.ones(3, F), np.array(True)]
    wanted = rep.run(given)[0].copy()
    then = next(g for n in rep.graph.nodes for g in n.graphs if g.states)
    own: list[Any] = [*rep.states.values(), *rep.graph.states.values(), *then.states.values()]
    own += [v for n in rep.nodes for v in n.attributes.values() if isinstance(v, np.ndarray)]
    if isinstance(rep, sonnx.SingaRep):
        own += [t.data for t in rep.imported.tensors().values()]
    tried = 0
    for a in own:
        if not isinstance(a, np.ndarray) or not a.flags.writeable or not _held(a, rep):
            continue  # a copy, or an array of the device
        tried += 1
        spare = np.empty(3, F)
        for _ in range(2):
            rep.run(given, out=[spare])
            with pytest.raises(InvalidInput, match="initializers or constants") as caught:
                rep.run(given, out=[a])
            assert caught.value.code == "SX385"
    assert tried >= 3
    np.testing.assert_array_equal(rep.run(given)[0], wanted)


def _held(a: np.ndarray, rep: Any) -> bool:
    return any(np.shares_memory(a, b) for b in rep._protected())


def test_receivers_that_a_caller_changes_are_checked_again() -> None:
    """An array of the last run is known, but not its strides and flags."""
    text, given = MODELS["elementwise"]
    rep = SingaBackend.prepare(parser.parse_model(f"{HEAD} g {text}"))
    out = np.empty((4, 3), F)
    for _ in range(3):
        rep.run(given, out=[out, None])
    out.flags.writeable = False
    with pytest.raises(InvalidInput, match="read-only"):
        rep.run(given, out=[out, None])


def test_receive_writes_all_or_nothing() -> None:
    a, b = np.zeros(2, F), np.zeros(2)
    with pytest.raises(InvalidInput, match="must be float32"):
        _receive([a, b], [np.ones(2, F), np.ones(2, F)], ["a", "b"])
    assert not a.any()
