"""Gradients that one call of a plan computes: what they share with other calls, what refuses them, and what a step leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import (
    agree,
    close,
    compare,
    differentiated,
    gradients_of,
    normal,
    record,
    steps_of,
)

from singa import autograd, device, layer, opt
from singa._core.ops import op
from singa._core.tensor import Tensor
from singa._training import step as recorded_step
from singa.model import Model
from singa_backend.errors import SonnxError
from singa_backend.kernels import conv_gradients, convolution, norm_gradients, onednn
from singa_backend.kernels.table import GRADIENT, TRAINING, Options, Site, table
from singa_backend.plans.chains import chains
from singa_backend.plans.gradients import MOST
from singa_backend.plans.planner import NOT_FINITE, Planner
from singa_backend.plans.region import Region

pytestmark = pytest.mark.skipif(onednn.library() is None, reason="there is no oneDNN")

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
    (two_sums, SUMS, (2, 4), ["Conv"]),
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


def test_an_equal_call_whose_result_is_read_earlier() -> None:
    """The gradient of a bias is a sum that the forward pass has computed: its call cannot move behind that reader."""

    def early(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> list[Tensor]:
        factor = op.ReduceSum(op.Mul(op.ReduceSum(r, [0, 2, 3], keepdims=0), F(0.01)), keepdims=0)
        return gradients_of(total(conv(op.Mul(x, factor), w, b), r), [w, b])

    agree(early, [X, filters(), normal(8), normal(*LARGE, seed=1)], (1, 2), joined=["Conv"])


def test_a_gradient_that_a_call_would_make_after_its_reader_is_left_to_the_rule() -> None:
    """The input of the convolution is computed from a value that equals the gradient of its bias."""

    def circle(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> list[Tensor]:
        loss = op.ReduceSum(conv(op.Mul(x, op.ReduceSum(op.Expand(np.float32(1), op.Shape(r)), [0, 2, 3], keepdims=1)), w, b))
        return gradients_of(loss, [b])

    step = record(circle, [X, filters(), normal(8), normal(*LARGE, seed=1)], (2,), Options())
    (found,) = step.run()
    np.testing.assert_allclose(found, 2 * 16 * 17, rtol=1e-6)


def test_what_nothing_reads_is_not_computed() -> None:
    """The indices of a pooling, and the gradient of a trained input that the step does not return."""

    def body(x: Tensor, w: Tensor, r: Tensor) -> list[Tensor]:
        y, _ = op.MaxPool(conv(x, w), kernel_shape=[2, 2], outputs=2)
        return gradients_of(total(y, r), [w])

    step = agree(body, [X, filters(), normal(2, 8, 15, 16)], (0, 1), joined=["Conv", "MaxPool"])
    assert not [k for k in step.kernels if k.startswith("conv by data")]
    assert [k for k in step.kernels if k.startswith("conv by weights")]


def test_new_calls_change_no_value_of_the_graph() -> None:
    """The plan may be made again: the calls of the region are its own, not those of the graph."""
    body, given = differentiated(residual, [X, filters()], (0, 1))
    step = record(body, given, (0, 1), Options())
    before = [(n.op_type, n.inputs, n.outputs) for n in step.step.graph.nodes]
    first = step.run()
    step.planner._renew()
    assert [(n.op_type, n.inputs, n.outputs) for n in step.step.graph.nodes] == before
    assert [a.tobytes() for a in step.run()] == [a.tobytes() for a in first]


def makers_come_first(region: Region) -> None:
    """Fail if a call reads a value before it is made, or two calls make one."""
    known = {*region.inputs, *region.constants}
    for call in region.calls:
        assert set(call.reads) <= known, call.name
        made = {o for o in call.outputs if o >= 0}
        assert not made & known, call.name
        known |= made
    assert set(region.outputs) <= known


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
        refused = [i for i in range(len(planner.gradients.known)) if rng.random() < 0.4]
        planner.gradients.reasons = dict.fromkeys(refused, "of the test")
        planner._renew()
        planner.latest = None
        makers_come_first(planner.region)
        for a, e in zip(step.run(), expected, strict=True):
            close(a, e, 2e-5)


# --- trainings


class Net(Model):
    """A normalized convolution, a sum of two others, a pooling, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = layer.Conv2d(8, 3, padding=1, bias=False), layer.BatchNorm2d()
        self.branch, self.short = layer.Conv2d(16, 3, padding=1), layer.Conv2d(16, 1)
        self.pool, self.flat, self.last = layer.MaxPool2d(2, 2), layer.Flatten(), layer.Linear(3)
        self.optimizer: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = autograd.relu(self.norm(self.first(x)))
        y = autograd.relu(autograd.add(self.branch(y), self.short(y)))
        return self.last(self.flat(self.pool(y)))  # type: ignore[no-any-return]

    def train_one_batch(self, x: Tensor, t: Tensor) -> Tensor:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss  # type: ignore[no-any-return]


JOINED = ["Relu", "Conv", "Conv", "MaxPool", "Relu", "Conv", "BatchNormalization"]
"""The gradients of its operators that one call computes."""


def batch(i: int = 0) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(i)
    return Tensor(data=rng.standard_normal((4, 3, 16, 16)).astype(F)), Tensor(data=rng.integers(0, 3, 4))


def net_of(options: Options, monkeypatch: pytest.MonkeyPatch) -> Net:
    """A net whose recorded steps compute with these options."""
    monkeypatch.setattr(recorded_step, "plan_options", lambda: options)
    device.default_device.SetRandSeed(7)
    net = Net()
    net.optimizer = opt.SGD(lr=0.05, momentum=0.9)
    net.compile([batch()[0]], is_train=True, use_graph=True)
    return net


def state_of(net: Net) -> dict[str, np.ndarray]:
    return {n: np.array(t.data) for n, t in {**net.get_states(), **net.optimizer.get_states()}.items()}


def freeze(net: Net, i: int) -> None:
    if i == 2:
        net.freeze("branch.*")
    if i == 4:
        net.unfreeze("branch.*")


def rates(net: Net, i: int) -> None:
    if i == 2:
        net.optimizer.lr = 0.2
    if i == 4:
        net.optimizer.lr_value.set_value(0.01)


def loads(net: Net, i: int) -> None:
    """Return to the states of two steps ago."""
    if i == 2:
        net.kept = [{n: t.data.copy() for n, t in owner.get_states().items()} for owner in (net, net.optimizer)]
    if i == 4:
        net.set_states(net.kept[0])
        net.optimizer.set_states(net.kept[1])


def evaluations(net: Net, i: int) -> None:
    if i % 2:
        net.eval()
        net(batch()[0])
        net.train()


def nothing(net: Net, i: int) -> None:
    """No change."""


@pytest.mark.parametrize("change", [nothing, freeze, rates, loads, evaluations])
def test_trainings_with_changes_between_steps(change: Callable[[Net, int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters, states of the optimizer and running statistics after six steps, and each loss."""
    found = []
    for options in (Options(), Options(level=0)):
        net, losses = net_of(options, monkeypatch), []
        for i in range(6):
            change(net, i)
            losses.append(np.array(net(*batch(i)).data))
        reasons = [s._session.reason for s in steps_of(net)]
        assert all(reasons) if not options.level else not any(reasons)
        found.append({**state_of(net), "losses": np.array(losses)})
    for name, expected in found[1].items():
        close(found[0][name], expected, 2e-4, name)


def test_the_gradients_of_the_net_are_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    net = net_of(Options(), monkeypatch)
    for i in range(3):
        net(*batch(i))
    (step,) = steps_of(net)
    planner = step._session._planner
    assert planner is not None and not planner.gradients.reasons
    makers_come_first(planner.region)
    assert sorted(c.name for c in planner.region.calls if c.node.domain == GRADIENT) == sorted(JOINED)
    assert sorted(c.name for c in planner.region.calls if c.node.domain == TRAINING) == ["BatchNormalization", "MaxPool"]


def test_arrays_that_are_held_over_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step writes into the array of a parameter, and into no other: arguments and earlier results keep their values."""
    net = net_of(Options(), monkeypatch)
    x, t = batch()
    net(x, t)
    results = [net(x, t) for _ in range(2)]
    held = [x.data, t.data, *(r.data for r in results)]
    parameter = net.first.W.data
    before, was = [a.copy() for a in held], parameter.copy()
    results.append(net(x, t))
    for a, b in zip(held, before, strict=True):
        np.testing.assert_array_equal(a, b)
    assert parameter is net.first.W.data and (parameter != was).any()
    assert len({id(r.data) for r in results}) == 3


def test_an_error_leaves_every_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that does not exist: the definitions report it, and nothing is written."""
    net = net_of(Options(), monkeypatch)
    for i in range(3):
        net(*batch(i))
    before = state_of(net)
    x, _ = batch()
    with pytest.raises(SonnxError):
        net(x, Tensor(data=np.array([0, 1, 2, 7])))
    after = state_of(net)
    assert all(a.tobytes() == after[n].tobytes() for n, a in before.items())
    net(*batch(3))
    assert steps_of(net)[0]._session.reason is None


def test_a_nan_is_computed_by_the_definitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, and later steps use the plan."""
    found = []
    for options in (Options(), Options(level=0)):
        net = net_of(options, monkeypatch)
        for i in range(2):
            net(*batch(i))
        start = [{n: t.data.copy() for n, t in owner.get_states().items()} for owner in (net, net.optimizer)]
        x, t = batch()
        x.data[1, 0, 3, 3] = np.nan
        loss = np.array(net(x, t).data)
        reason = steps_of(net)[0]._session.reason
        assert (reason == NOT_FINITE) if options.level else reason
        found.append((loss, np.array(net.first.W.data)))
        net.set_states(start[0])
        net.optimizer.set_states(start[1])
        assert np.isfinite(net(*batch()).data).all()
        assert (steps_of(net)[0]._session.reason is None) == bool(options.level)
    assert np.isnan(found[0][0]).all()
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


# --- equal bits


@pytest.mark.parametrize(
    "options", [Options(), Options(threads=2), Options(deterministic=True)], ids=["one thread", "two threads", "deterministic"]
)
def test_equal_bits_from_run_to_run(options: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two nets, whose plans are made one after the other."""
    found = []
    for _ in range(2):
        net = net_of(options, monkeypatch)
        for i in range(4):
            net(*batch(i))
        assert steps_of(net)[0]._session.reason is None
        found.append(state_of(net))
    assert all(a.tobytes() == found[1][n].tobytes() for n, a in found[0].items())


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


def refusing(monkeypatch: pytest.MonkeyPatch, name: str, which: Callable[[int], bool], domain: str = GRADIENT) -> list[int]:
    """Let the kernels of an operator refuse some calls; return a list that becomes the numbers of the calls that it was asked."""
    asked: list[int] = []

    def wrapped(body: Any) -> Any:
        def asks(site: Site, *values: Any) -> Any:
            asked.append(site.call.gradient)  # type: ignore[attr-defined]
            site.require(not which(site.call.gradient), "of the test")  # type: ignore[attr-defined]
            return body(site, *values)

        return asks

    changed = [type(k)(wrapped(k.body), k.on, k.rank, k.versions) for k in table[domain, name]]
    monkeypatch.setitem(table, (domain, name), changed)
    return asked


@pytest.mark.parametrize("domain", [GRADIENT, TRAINING])
@pytest.mark.parametrize("name", ["Conv", "BatchNormalization", "MaxPool", "Relu"])
def test_a_refused_gradient_is_left_to_its_rule(name: str, domain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if (domain, name) not in table:
        pytest.skip("it needs no forward call in training form")

    def function(x: Tensor, w: Tensor, *rest: Tensor) -> Tensor:
        return norm(op.MaxPool(op.Relu(conv(x, w)), kernel_shape=[2, 2]), *rest)  # type: ignore[no-any-return]

    refusing(monkeypatch, name, lambda at: True, domain)
    names = {"Conv", "BatchNormalization", "MaxPool", "Relu"}
    left = names - {name} if name != "BatchNormalization" else set()  # by its rule, whose square root may be NaN
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
        rules = [i for i, g in enumerate(step.step.graph.gradient_calls) if g.op_type == name]
        with monkeypatch.context() as patch:
            refusing(patch, name, lambda at, chosen=rules[place]: at == chosen)  # type: ignore[misc]
            found = step.run()
        assert [i for i in step.planner.gradients.reasons if i in rules] == [rules[place]]
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
        joined=["BatchNormalization", "Tanh"] if name == "Conv" else [],
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


def test_a_gradient_after_a_result_of_varying_size() -> None:
    """The plan has segments, and the result may be infinite for all that is known of it: the gradients are refused."""

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
        assert set(steps[0].reasons) == {"Tanh", "Conv"}
    assert all(len(p.segments) > 1 for p in steps[0].planner.plans.values())


@pytest.mark.parametrize("level", [0, 1])
def test_gradient_kernels_are_fusions(level: int) -> None:
    """Plans of single operators do not use them: `optimize=1`."""
    body, given = differentiated(residual, [X, filters()], (0, 1))
    step = record(body, given, (0, 1), Options(level=level))
    step.run()
    if level:
        assert not step.joined and not step.reasons and not step.planner.gradients.known
    else:
        assert step.step._session._planner is None


def test_gradients_are_in_no_chain() -> None:
    """A gradient kernel computes no call that follows: the sum of two gradients is not taken from the one before."""

    def skipped(x: Tensor, w: Tensor) -> Tensor:
        return op.Tanh(op.Add(conv(op.Relu(op.Mul(x, F(1.5))), w), x))  # type: ignore[no-any-return]

    step = compare(skipped, [X, filters()], (0, 1), joined=["Relu", "Conv", "Tanh"])
    groups = chains(step.planner.region.calls, step.planner.region.outputs)
    assert sum(len(g) for g in groups) == len(step.planner.region.calls)
    assert all(len(g) == 1 for g in groups if any(c.gradient >= 0 for c in g))
    assert any(len(g) > 1 for g in groups)


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
    makers_come_first(step.planner.region)
