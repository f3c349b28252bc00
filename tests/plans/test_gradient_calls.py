"""Gradients that one call of a plan computes: what they share with other calls, threads, and what refuses them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import agree, close, compare, differentiated, gradients_of, makers_come_first, normal, record

from singa import autograd
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa_backend.kernels import conv_gradients, convolution, norm_gradients, onednn
from singa_backend.kernels.table import GRADIENT, TRAINING, Options, Site, table
from singa_backend.plans import contention
from singa_backend.plans.chains import chains
from singa_backend.plans.gradients import MOST
from singa_backend.plans.planner import Planner

library = onednn.library()
pytestmark = pytest.mark.skipif(library is None, reason="there is no oneDNN")
needs_openmp = pytest.mark.skipif(library is None or library.runtime != "OpenMP", reason="only OpenMP has a number of threads")

F = np.float32
SAME = {"pads": [1, 1, 1, 1]}
LARGE = (2, 8, 16, 17)
"""A shape whose Relu is not small."""

conv = partial(op.Conv, **SAME)
norm = partial(op.BatchNormalization, training_mode=1)


def filters(seed: int = 1, outputs: int = 8, inputs: int = 8) -> np.ndarray:
    return normal(outputs, inputs, 3, 3, seed=seed) * F(0.2)


def affine(seed: int = 3, channels: int = 8) -> list[np.ndarray]:
    """Scale, bias, mean and variance."""
    return [*(normal(channels, seed=seed + i) for i in range(3)), np.abs(normal(channels, seed=seed + 3)) + F(0.5)]


def updates(loss: Tensor, xs: list[Tensor]) -> list[Tensor]:
    """The next value of each trained argument; each is computed as soon as its gradient is known, as optimizers do."""
    place = {id(x): i for i, x in enumerate(xs)}
    made = {place[id(p)]: op.Sub(p, op.Mul(g, F(0.1))) for p, g in autograd.backward(loss)}
    return [made[i] for i in sorted(made)]


def total(y: Tensor, r: Tensor) -> Tensor:
    return op.ReduceSum(op.Mul(y, r), keepdims=0)  # type: ignore[no-any-return]


# --- values that several calls share


def tied(x: Any, w: Any) -> Any:
    return conv(op.Relu(conv(x, w)), w)


def residual(x: Any, w: Any) -> Any:
    return op.Relu(op.Add(x, conv(op.Relu(x), w)))


def downsampling(x: Any, w: Any, *rest: Any) -> Any:
    """The sum of two normalized branches, which share a gradient."""
    return op.Relu(op.Add(norm(op.Conv(x, w, strides=[1, 1], **SAME), *rest[:4]), norm(op.Conv(x, rest[4]), *rest[5:])))


def two_sums(x: Any, w: Any, b: Any, v: Any, c: Any) -> Any:
    """Two convolutions with a bias whose gradients are equal, and equal calls."""
    return op.Add(conv(x, w, b), conv(op.Tanh(x), v, c))


def one_twice(x: Any, w: Any, b: Any) -> Any:
    """Three equal calls, whose results have gradients of their own."""
    return op.Add(op.Mul(conv(x, w, b), op.Sigmoid(conv(x, w, b))), conv(x, w, b))


def three_readers(x: Any) -> Any:
    """Functions that share a gradient, which is read after each of them."""
    return op.Tanh(op.Add(op.Add(op.Relu(x), op.Sigmoid(x)), x))


def pooled_twice(x: Any) -> Any:
    return op.Add(op.MaxPool(x, kernel_shape=[3, 3], **SAME), op.AveragePool(x, kernel_shape=[3, 3], **SAME))


X = normal(*LARGE)
BRANCHES = [X, filters(), *affine(), normal(8, 8, 1, 1), *affine(9)]
SUMS = [X, filters(1), normal(8), filters(2), normal(8, seed=1)]
SHARED: list[tuple[Callable[..., Any], list[np.ndarray], tuple[int, ...], list[str]]] = [
    (tied, [X, filters()], (0, 1), ["Conv", "Relu", "Conv"]),
    (residual, [X, filters()], (0, 1), ["Conv", "Relu", "Relu"]),
    (downsampling, BRANCHES, (0, 1, 2, 3, 6, 7, 8), ["Conv", "Conv", "BatchNormalization", "BatchNormalization", "Relu"]),
    (downsampling, BRANCHES, (2, 3, 7, 8), ["BatchNormalization", "BatchNormalization", "Relu"]),
    (downsampling, BRANCHES, (0, 1), ["Conv", "Conv", "BatchNormalization", "BatchNormalization", "Relu"]),
    (two_sums, SUMS, (0, 1, 2, 3, 4), ["Conv", "Conv", "Tanh"]),
    (two_sums, SUMS, (1, 2, 3), ["Conv", "Conv"]),
    (two_sums, SUMS, (2, 4), ["Conv", "Conv"]),
    (one_twice, [X, filters(), normal(8)], (0, 1, 2), ["Conv", "Conv", "Conv", "Sigmoid"]),
    (three_readers, [X], (0,), ["Tanh", "Relu", "Sigmoid"]),
    (pooled_twice, [X], (0,), ["MaxPool", "AveragePool"]),
]
"""The function, its arguments, those that are trained, and the operators with a gradient by one call."""


@pytest.mark.parametrize("steps", [False, True], ids=["gradients", "updates"])
@pytest.mark.parametrize(("function", "arrays", "needs", "joined"), SHARED, ids=lambda v: getattr(v, "__name__", ""))
def test_shared_values(function: Any, arrays: list[np.ndarray], needs: tuple[int, ...], joined: list[str], steps: bool) -> None:
    """An update reads a gradient before the rules of further calls have run."""

    def body(*xs: Tensor) -> list[Tensor]:
        y = function(*xs[:-1])
        return [y, *updates(total(y, xs[-1]), list(xs))]

    if steps:
        agree(body, [*arrays, normal(*LARGE, seed=50)], needs, joined=joined, tolerance=1e-5)
    else:
        compare(function, arrays, needs, joined=joined, tolerance=1e-5)


def test_what_nothing_reads_is_not_computed() -> None:
    """The indices of a pooling, and the gradient of a trained input that the step does not return."""

    def body(x: Tensor, w: Tensor, r: Tensor) -> list[Tensor]:
        y, _ = op.MaxPool(conv(x, w), kernel_shape=[2, 2], outputs=2)
        return gradients_of(total(y, r), [w])

    step = agree(body, [X, filters(), normal(2, 8, 15, 16)], (0, 1), joined=["Conv", "MaxPool"])
    assert not [k for k in step.kernels if k.startswith("conv by data")]
    assert [k for k in step.kernels if k.startswith("conv by weights")]


def test_new_calls_change_no_value_of_the_graph() -> None:
    """The plan may be made again: the nodes of the plan are its own, not those of the graph."""
    body, given = differentiated(residual, [X, filters()], (0, 1))
    step = record(body, given, (0, 1), Options())
    before = [(n.op_type, n.inputs, n.outputs) for n in step.step.graph.nodes]
    first = step.run()
    step.planner._renew()
    assert [(n.op_type, n.inputs, n.outputs) for n in step.step.graph.nodes] == before
    assert [a.tobytes() for a in step.run()] == [a.tobytes() for a in first]


@pytest.mark.parametrize("seed", range(6))
def test_the_order_of_calls_if_some_gradients_are_refused(seed: int) -> None:
    """Of any set of refused gradients, in a net with everything that calls share."""

    def net(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        y = downsampling(x, w, *rest[:9])
        return op.MaxPool(op.Add(two_sums(y, w, *rest[9:]), residual(y, w)), kernel_shape=[2, 2])  # type: ignore[no-any-return]

    def body(*xs: Tensor) -> list[Tensor]:
        return updates(op.ReduceSum(op.Mul(net(*xs), F(0.1)), keepdims=0), list(xs))

    arrays = [X, filters(), *affine(), normal(8, 8, 1, 1), *affine(9), normal(8), filters(2), normal(8, seed=1)]
    needs = (1, 2, 3, 6, 7, 8, 11, 12, 13)
    step, other = (record(body, arrays, needs, o) for o in (Options(), Options(level=0)))
    expected = other.run()
    step.run()
    rng, planner = np.random.default_rng(seed), step.planner
    for _ in range(3):
        every = [n.gradient for n in step.step.graph.nodes if n.domain == GRADIENT and n.gradient is not None]
        planner.gradients.reasons = dict.fromkeys((g for g in every if rng.random() < 0.4), "of the test")
        planner._renew()
        planner.latest = None
        makers_come_first(planner.graph)
        for a, e in zip(step.run(), expected, strict=True):
            close(a, e, 2e-5)


# --- threads


BIG: list[tuple[Callable[..., Any], list[np.ndarray], str, float]] = [
    (conv, [normal(4, 16, 24, 24), filters(1, 32, 16), normal(32)], "Conv", 1e-5),
    (op.ConvTranspose, [normal(4, 16, 24, 24), filters(1, 16, 32), normal(32)], "ConvTranspose", 1e-5),
    (partial(op.Conv, group=16), [normal(4, 16, 48, 48), filters(1, 16, 1)], "Conv", 1e-5),
    (partial(op.MaxPool, kernel_shape=[3, 3], strides=[2, 2]), [normal(4, 16, 64, 64)], "MaxPool", 2e-6),
    (partial(op.AveragePool, kernel_shape=[3, 3], strides=[2, 2]), [normal(4, 16, 64, 64)], "AveragePool", 2e-6),
    (op.Tanh, [normal(4, 16, 128, 64)], "Tanh", 2e-6),
]  # fmt: skip
"""Above the size from which primitives use several threads."""


@pytest.mark.parametrize(("function", "arrays", "name", "tolerance"), BIG, ids=lambda v: v if isinstance(v, str) else "")
def test_two_threads(function: Any, arrays: list[np.ndarray], name: str, tolerance: float) -> None:
    compare(function, arrays, range(len(arrays)), joined=[name], tolerance=tolerance, threads=2)
    body, given = differentiated(function, arrays, range(len(arrays)))
    runs = [record(body, given, range(len(arrays)), Options(threads=2)) for _ in range(2)]
    for _ in range(2):
        assert [a.tobytes() for a in runs[0].run()] == [a.tobytes() for a in runs[1].run()]


SINGLE = [*BIG, (norm, [normal(8, 16, 32, 32), *affine(1, 16)], "BatchNormalization", 1e-5)]


@needs_openmp
@pytest.mark.parametrize(("function", "arrays", "name", "tolerance"), SINGLE, ids=lambda v: v if isinstance(v, str) else "")
def test_steps_of_two_threads_on_one(
    function: Any, arrays: list[np.ndarray], name: str, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While other programs use the cores, a run uses one thread: each step for two threads has one with its layouts."""
    needs = range(3 if name == "BatchNormalization" else len(arrays))
    body, given = differentiated(function, arrays, needs)
    step, other = record(body, given, needs, Options(threads=2, adaptive=True)), record(body, given, needs, Options(level=0))
    for busy in (False, True, False):
        monkeypatch.setattr(contention.contention, "present", busy)
        before = contention.contention.single_runs
        monkeypatch.setattr(contention.contention, "expected", lambda threads, busy=busy: busy)
        for a, e in zip(step.run(), other.run(), strict=True):
            close(a, e, tolerance)
        assert contention.contention.single_runs == before + 1 or not busy
        assert step.joined == [name]
    monkeypatch.setattr(contention.contention, "expected", lambda threads: True)
    traced = record(body, given, needs, Options(threads=2, adaptive=True))
    for a, e in zip(traced.run(), other.run(), strict=True):
        close(a, e, tolerance)


def test_batch_normalization_on_two_threads() -> None:
    arrays = [normal(8, 16, 32, 32), *affine(1, 16)]
    compare(norm, arrays, (0, 1, 2), joined=["BatchNormalization"], tolerance=1e-5, threads=2)


def test_running_statistics() -> None:
    def body(*xs: Tensor) -> list[Tensor]:
        y, mean, var = op.BatchNormalization(*xs[:5], training_mode=1, momentum=0.8, outputs=3)
        return [mean, var, *gradients_of(total(y, xs[5]), list(xs[:3]))]

    for shape in ((6, 3), (4, 16, 5), (4, 33, 5, 5)):
        given = [normal(*shape), *affine(1, shape[1]), normal(*shape, seed=1)]
        agree(body, given, (0, 1, 2), joined=["BatchNormalization"], exact=True, tolerance=1e-5)


# --- refusals


def refusing(monkeypatch: pytest.MonkeyPatch, name: str, which: Callable[[Any], bool], domain: str = GRADIENT) -> None:
    """Let the kernels of an operator refuse the gradients of some calls."""

    def wrapped(body: Any) -> Any:
        def asks(site: Site, *values: Any) -> Any:
            site.require(not which(site.call.gradient), "of the test")  # type: ignore[attr-defined]
            return body(site, *values)

        return asks

    changed = [type(k)(wrapped(k.body), k.on, k.rank, k.versions) for k in table[domain, name]]
    monkeypatch.setitem(table, (domain, name), changed)


REFUSING = [*((GRADIENT, n) for n in ("Conv", "BatchNormalization", "MaxPool", "Relu")),
            (TRAINING, "BatchNormalization"), (TRAINING, "MaxPool")]  # fmt: skip


@pytest.mark.parametrize(("domain", "name"), REFUSING)
def test_a_refused_gradient_is_left_to_its_rule(name: str, domain: str, monkeypatch: pytest.MonkeyPatch) -> None:

    def function(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        return norm(op.MaxPool(op.Relu(conv(x, w)), kernel_shape=[2, 2]), *rest)  # type: ignore[no-any-return]

    refusing(monkeypatch, name, lambda of: True, domain)
    names = {"Conv", "BatchNormalization", "MaxPool", "Relu"}
    left = names - {name}
    step = compare(function, [X, filters(), *affine()], (0, 1, 2, 3), joined=sorted(left), tolerance=1e-5)
    assert "of the test" in step.reasons[name] and set(step.reasons) == names - left
    assert set(step.in_training) == {"BatchNormalization", "MaxPool"} & left


@pytest.mark.parametrize("place", [0, 1])
def test_one_of_two_rules_that_share_a_gradient_is_refused(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, arrays, needs, name in (
        (two_sums, SUMS, (1, 2, 3, 4), "Conv"),
        (downsampling, BRANCHES, (2, 3, 7, 8), "BatchNormalization"),
    ):

        def body(*xs: Tensor, function: Any = function) -> list[Tensor]:
            return updates(total(function(*xs[:-1]), xs[-1]), list(xs))

        given = [*arrays, normal(*LARGE, seed=50)]
        step, other = record(body, given, needs, Options()), record(body, given, needs, Options(level=0))
        rules = [n.gradient for n in step.step.graph.nodes if n.domain == GRADIENT and n.op_type.startswith(f"{name}_")]
        with monkeypatch.context() as patch:
            refusing(patch, name, lambda of, chosen=rules[place]: of is chosen)  # type: ignore[misc]
            found = step.run()
        assert [*step.planner.gradients.reasons] == [rules[place]]
        for a, e in zip(found, other.run(), strict=True):
            close(a, e, 1e-5)


def count_renewals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that becomes as long as the number of times that plans of a graph were begun."""
    made: list[int] = []
    original = Planner._renew

    def counted(self: Planner) -> None:
        made.append(1)
        original(self)

    monkeypatch.setattr(Planner, "_renew", counted)
    return made


@pytest.mark.parametrize("count", [3, 20])
def test_the_number_of_renewals(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a net whose functions are all refused: the first plan is made again at most MOST + 1 times."""

    def deep(x: Tensor) -> Tensor:
        for _ in range(count):
            x = op.Relu(op.Add(x, F(0.1)))
        return x

    refusing(monkeypatch, "Relu", lambda of: True)
    made = count_renewals(monkeypatch)
    step = compare(deep, [normal(3, 5)], [0], joined=[])
    assert len(made) == 1 + min(count, MOST + 1)
    assert len(step.planner.gradients.reasons) == count
    step.run()
    assert len(made) == 1 + min(count, MOST + 1)


FAILING = [("Conv", "conv by data"), ("Conv", "conv by weights"), ("BatchNormalization", "batch_normalization gradient")]


@pytest.mark.parametrize(("name", "fails"), FAILING)
def test_a_primitive_that_fails_leaves_no_steps(name: str, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status is read while the plan is made; the steps that the kernel has emitted before do not remain."""
    for module in (conv_gradients, norm_gradients):
        original = module.emit

        def emit(site: Site, *given: Any, original: Any = original) -> None:
            original(site, *given)
            if given[-1] == fails:
                bind = site.steps[-1].bind
                site.steps[-1].bind = lambda: [(lambda *arguments: 2, arguments) for _, arguments in bind()]

        monkeypatch.setattr(module, "emit", emit)
    step = compare(
        lambda x, w, *rest: op.Tanh(norm(conv(x, w), *rest)), [X, filters(), *affine()], (0, 1, 2, 3), tolerance=1e-5,
        joined=["BatchNormalization" if name == "Conv" else "Conv", "Tanh"],
    )  # fmt: skip
    assert f"execute {fails}" in step.reasons[name]
    assert not any(k.startswith(("conv by", "unpack") if name == "Conv" else fails) for k in step.kernels)


def test_a_forward_primitive_that_fails_leaves_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The filters are packed by a step before; the definition computes the convolution in the same plan."""
    original = convolution.emit

    def emit(site: Site, *given: Any) -> None:
        original(site, *given)
        bind = site.steps[-1].bind
        site.steps[-1].bind = lambda: [(lambda *arguments: 2, arguments) for _, arguments in bind()]

    given = [normal(2, 16, 16, 16), filters(1, 16, 16)]
    usual = compare(conv, given, (1,), joined=["Conv"]).kernels
    assert any(k.startswith("pack weights") for k in usual)
    monkeypatch.setattr(convolution, "emit", emit)
    step = compare(conv, given, (1,), joined=["Conv"])
    assert not any(k.startswith(("pack weights", "convolution")) for k in step.kernels)


def quotients(x: Tensor, w: Tensor) -> Tensor:
    """A function whose gradient is finite, as far as its values are known to be."""
    return op.Log(op.Div(F(1), op.Sigmoid(conv(op.Relu(x), w))))  # type: ignore[no-any-return]


def test_a_gradient_that_may_be_infinite_is_checked_once() -> None:
    """The gradients of Log and Div are not known to be finite: the first kernel checks, and the others rely on it."""
    step = compare(quotients, [X, filters()], (0, 1), joined=["Sigmoid", "Conv", "Relu"])
    assert not step.reasons and step.kernels.count("numpy.isfinite") <= 2


def test_definitions_compute_a_run_whose_gradient_is_not_finite() -> None:
    """A finite step makes the plan; its check refuses the run in which a sigmoid is 0, and no other run."""
    body, given = differentiated(quotients, [X, filters()], (0, 1))
    steps = [record(body, given, (0, 1), o) for o in (Options(), Options(level=0))]
    broken = [X, filters() * F(1e30), given[2]]
    for arrays in (given, broken, given):
        for s in steps:
            s.set(arrays)
        found, expected = steps[0].run(), steps[1].run()
        refused = steps[0].step._session.reason
        assert (refused is None) == (arrays is given) == all(np.isfinite(e).all() for e in expected), refused
        for a, e in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.isfinite(a), np.isfinite(e))
            close(np.nan_to_num(a, posinf=0, neginf=0), np.nan_to_num(e, posinf=0, neginf=0), 1e-5, "")


def test_a_gradient_after_a_result_of_varying_size() -> None:
    """The plan has segments, and the result may be infinite for all that is known of it: a step checks it."""

    def body(x: Tensor, w: Tensor, r: Tensor) -> list[Tensor]:
        y = op.Compress(op.Reshape(conv(x, w), [-1]), op.Greater(r, F(0)))
        loss = op.ReduceSum(op.Mul(op.Tanh(y), op.Compress(r, op.Greater(r, F(0)))), keepdims=0)
        return [loss, *gradients_of(loss, [w])]

    large = normal(4, 8, 16, 17)
    weights = normal(large.size)
    small = np.where(np.arange(large.size) < 50, weights, F(-1))
    steps = [record(body, [large, filters(), weights], (1,), o) for o in (Options(), Options(level=0))]
    for i, w in enumerate((weights, weights[::-1].copy(), small, weights, small)):
        for s in steps:
            s.set([large, filters(), w])
        for a, e in zip(steps[0].run(), steps[1].run(), strict=True):
            close(a, e, 1e-5, f"run {i}")
        assert set(steps[0].joined) == {"Tanh", "Conv"} and not steps[0].reasons
    assert all(len(p.segments) > 1 for p in steps[0].planner.plans.values())


@pytest.mark.parametrize("level", [0, 1])
def test_gradient_kernels_are_fusions(level: int) -> None:
    """Plans of single operators do not use them: `optimize=1`."""
    body, given = differentiated(residual, [X, filters()], (0, 1))
    step = record(body, given, (0, 1), Options(level=level))
    step.run()
    if level:
        assert not step.joined and not step.reasons and not step.planner.gradients.taken
    else:
        assert step.step._session._planner is None


def test_gradients_are_in_no_chain() -> None:
    """A gradient kernel computes no call that follows: the sum of two gradients is not taken from the one before."""

    def skipped(x: Tensor, w: Tensor) -> Tensor:
        return op.Tanh(op.Add(conv(op.Relu(op.Mul(x, F(1.5))), w), x))  # type: ignore[no-any-return]

    step = compare(skipped, [X, filters()], (0, 1), joined=["Relu", "Conv", "Tanh"])
    groups = chains(step.planner.graph.nodes, step.planner.graph.outputs)
    assert sum(len(g) for g in groups) == len(step.planner.graph.nodes)
    assert all(len(g) == 1 for g in groups if any(c.domain in (GRADIENT, TRAINING) for c in g))
    assert any(len(g) > 1 for g in groups)


def test_a_rule_that_calls_another_rule() -> None:
    """The gradient of Attention is that of its parts, of which a kernel computes that of Tanh."""
    q, k, v = (normal(2, 2, 5, 8, seed=s) for s in range(3))
    compare(lambda *x: op.Attention(*x, softcap=2.0), [q, k, v], (0, 1, 2), joined=["Tanh"], tolerance=1e-5)


# --- gradients of gradients


def penalized(function: Callable[..., Any], count: int, needs: int, *xs: Tensor) -> list[Tensor]:
    """The gradients of a loss with a penalty of the gradient of the first argument."""
    y = total(function(*xs[:count]), xs[-1])
    g = autograd.gradients(y, create_graph=True, inputs=[xs[0]])[id(xs[0])]
    loss = op.Add(y, op.ReduceSum(op.Mul(op.Mul(g, g), F(0.5)), keepdims=0))
    found = autograd.gradients(loss, inputs=list(xs[:needs]))
    return [loss, g, *(found[id(x)] for x in xs[:needs])]


SECOND: list[tuple[Callable[..., Any], list[np.ndarray], int]] = [
    (lambda x, w, b: op.Tanh(conv(x, w, b)), [X, filters(), normal(8)], 3),
    (lambda x, w: op.Sigmoid(op.ConvTranspose(op.Tanh(x), w, pads=[1, 1, 1, 1])), [X, filters()], 2),
    (lambda x, w: op.Relu(conv(op.Relu(conv(x, w)), w)), [X, filters()], 2),
    (lambda *v: op.Tanh(norm(*v)), [X, *affine()], 3),
    (lambda x, w, *v: op.Relu(norm(conv(x, w), *v)), [X, filters(), *affine()], 4),
    (lambda x: op.AveragePool(op.Tanh(x), kernel_shape=[3, 3], **SAME), [X], 1),
    (lambda x: op.MaxPool(op.Tanh(x), kernel_shape=[3, 3], **SAME), [X], 1),
]


@pytest.mark.parametrize(("function", "arrays", "needs"), SECOND, ids=[
    "Conv", "ConvTranspose", "tied", "BatchNormalization", "block", "AveragePool", "MaxPool",
])  # fmt: skip
def test_a_gradient_penalty(function: Callable[..., Any], arrays: list[np.ndarray], needs: int) -> None:
    shape = np.asarray(function(*(Tensor(data=a.copy()) for a in arrays)).data).shape
    body = partial(penalized, function, len(arrays), needs)
    step, other = (record(body, [*arrays, normal(*shape, seed=9)], range(needs), o) for o in (Options(), Options(level=0)))
    for _ in range(2):
        for n, (a, e) in enumerate(zip(step.run(), other.run(), strict=True)):
            close(a, e, 2e-5, f"result {n}")
    assert step.joined or step.reasons
    makers_come_first(step.planner.graph)
