"""Losses of scores of tokens, (N, T, C): the axis of the classes, shifted and ignored labels, and means over tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper, parser

from singa import autograd, layer, opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa._training.fit import fit
from singa_backend.collectives import Communicator, LocalGroup
from singa_backend.errors import InvalidInput

F = np.float32
RNG = np.random.default_rng(0)
N, T, C = 3, 4, 6
SCORES, LABELS = RNG.normal(size=(N, T, C)).astype(F), RNG.integers(0, C, (N, T))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    tape.training = False
    yield
    tape.training = False


def tensor(a: Any, grad: bool = False) -> Tensor:
    return Tensor(data=np.ascontiguousarray(a), requires_grad=grad, stores_grad=grad)


def log_softmax(x: np.ndarray) -> np.ndarray:
    z = x.astype(np.float64) - x.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def by_numpy(x: np.ndarray, t: np.ndarray, ignore: int | None = None) -> tuple[float, np.ndarray]:
    """The mean over tokens of the negative log-likelihood, and its gradient, in float64."""
    counted = np.ones(t.shape, bool) if ignore is None else t != ignore
    ids = np.where(counted, t, 0)
    log = log_softmax(x)
    each = -np.take_along_axis(log, ids[..., None], -1)[..., 0]
    d = (np.exp(log) - np.eye(x.shape[-1])[ids]) * counted[..., None] / counted.sum()
    return float(each[counted].mean()), d


def with_gradient(loss: Any, x: np.ndarray, t: np.ndarray, **options: Any) -> tuple[float, np.ndarray]:
    autograd.training = True
    try:
        scores = tensor(x, grad=True)
        value = loss(scores, tensor(t), **options)
        ((_, g),) = autograd.backward(value)
        return float(value.data[0]), g.data
    finally:
        autograd.training = False


@pytest.mark.parametrize("axis", [None, -1, 2])
@pytest.mark.parametrize("ignore", [None, 2, -1])
def test_the_classes_of_tokens_are_along_the_last_axis(axis: int | None, ignore: int | None) -> None:
    t = LABELS if ignore is None else np.where(RNG.random((N, T)) < 0.4, ignore, LABELS)
    options = {"axis": axis} | ({} if ignore is None else {"ignore_index": ignore})
    loss, d = with_gradient(autograd.softmax_cross_entropy, SCORES, t, **options)
    wanted, slope = by_numpy(SCORES, t, ignore)
    assert loss == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(d, slope, rtol=1e-4, atol=1e-7)


def test_scores_with_the_classes_along_axis_1_mean_what_they_did() -> None:
    second = np.moveaxis(SCORES, -1, 1)
    wanted, slope = by_numpy(SCORES, LABELS)
    for axis in (None, 1):
        loss, d = with_gradient(autograd.softmax_cross_entropy, second, LABELS, axis=axis)
        assert loss == pytest.approx(wanted, rel=1e-6)
        np.testing.assert_allclose(d, np.moveaxis(slope, -1, 1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("options", [{"weight": np.arange(1.0, C + 1)}, {"label_smoothing": 0.2}, {"ignore_index": 1}])
def test_options_mean_the_same_along_both_axes(options: dict[str, Any]) -> None:
    last = with_gradient(autograd.softmax_cross_entropy, SCORES, LABELS, axis=-1, **options)
    second = with_gradient(autograd.softmax_cross_entropy, np.moveaxis(SCORES, -1, 1), LABELS, axis=1, **options)
    assert last[0] == pytest.approx(second[0], rel=1e-6)
    np.testing.assert_allclose(last[1], np.moveaxis(second[1], 1, -1), rtol=1e-4, atol=1e-7)


def test_labels_of_the_shape_of_the_scores_take_the_axis() -> None:
    hot = np.eye(C, dtype=F)[LABELS]
    loss, _ = with_gradient(autograd.softmax_cross_entropy, SCORES, hot, axis=-1)
    assert loss == pytest.approx(by_numpy(SCORES, LABELS)[0], rel=1e-6)


@pytest.mark.parametrize("shape", [(3, 5, 5), (2, 4, 7, 4), (4, 4, 4)])
def test_as_many_tokens_as_classes_need_an_axis(shape: tuple[int, ...]) -> None:
    """(2, 4, 7, 4) is not such a case: the labels decide."""
    x, t = RNG.normal(size=shape).astype(F), RNG.integers(0, 4, shape[:-1])
    if shape == (2, 4, 7, 4):
        assert with_gradient(autograd.softmax_cross_entropy, x, t)[0] == pytest.approx(by_numpy(x, t)[0], rel=1e-6)
        return
    with pytest.raises(InvalidInput, match=r"\[SX334\].* may be along axis 1 or the last axis"):
        autograd.softmax_cross_entropy(tensor(x), tensor(t))
    assert with_gradient(autograd.softmax_cross_entropy, x, t, axis=-1)[0] == pytest.approx(by_numpy(x, t)[0], rel=1e-6)
    second = by_numpy(np.moveaxis(x, 1, -1), t)[0]
    assert with_gradient(autograd.softmax_cross_entropy, x, t, axis=1)[0] == pytest.approx(second, rel=1e-6)
    assert float(layer.SoftMaxCrossEntropy(axis=1)(tensor(x), tensor(t)).data[0]) == pytest.approx(second, rel=1e-6)


def test_labels_that_fit_neither_axis_are_refused() -> None:
    for t in (LABELS.T, LABELS[:, :-1], LABELS[:-1]):
        for axis in (None, -1):
            with pytest.raises(InvalidInput, match="SX334"):
                autograd.softmax_cross_entropy(tensor(SCORES), tensor(t), axis=axis)
    with pytest.raises(ValueError, match="axis must be 1 or -1"):
        autograd.softmax_cross_entropy(tensor(SCORES), tensor(LABELS), axis=0)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.float32])
def test_the_scores_at_a_token_are_those_of_the_next_one(dtype: Any) -> None:
    t = LABELS.copy()
    t[0, :2] = t[1, 2:] = -100
    loss, d = with_gradient(autograd.next_token_cross_entropy, SCORES, t.astype(dtype))
    wanted, slope = by_numpy(SCORES[:, :-1], t[:, 1:], -100)
    assert loss == pytest.approx(wanted, rel=1e-6)
    np.testing.assert_allclose(d[:, :-1], slope, rtol=1e-4, atol=1e-7)
    assert not d[:, -1].any()


def test_next_tokens_have_three_axes_and_numbers_below_the_classes() -> None:
    for x, t in ((SCORES[0], LABELS[0]), (SCORES, LABELS[..., None])):
        with pytest.raises(InvalidInput, match="SX334"):
            autograd.next_token_cross_entropy(tensor(x), tensor(t))
    with pytest.raises(InvalidInput, match="SX335"):
        autograd.next_token_cross_entropy(tensor(SCORES), tensor(LABELS + 3))


class Tokens(sonnx.SONNXModel):
    """Scores of tokens from a table, with a loss that is a mean over the tokens that have one."""

    def __init__(self) -> None:
        model = parser.parse_model(
            '<ir_version: 10, opset_import: ["": 21]> g (int64[n, t] ids) => (float[n, t, 6] y) { y = Gather(w, ids) }'
        )
        model.graph.initializer.append(numpy_helper.from_array(np.linspace(-1, 1, 36, dtype=F).reshape(6, 6) ** 3, "w"))
        super().__init__(model)
        self.optimizer = opt.SGD(lr=0.5)

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        y = self.forward(x)[0]
        loss = autograd.next_token_cross_entropy(y, t)
        self.optimizer(loss)
        return y, loss

    def batch_weight(self, *batch: Any) -> int:
        return int((batch[-1].data[:, 1:] != -100).sum())


def drawn_batch() -> tuple[np.ndarray, np.ndarray]:
    ids = RNG.integers(0, 6, (8, 5))
    t = ids.copy()
    for row, length in enumerate((5, 2, 0, 4, 3, 5, 1, 2)):
        t[row, length:] = -100
    return ids, t


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_accumulated_batches_are_one_large_batch_by_tokens(graph: bool, size: int) -> None:
    """Also if a batch has no token with a loss."""
    ids, t = drawn_batch()
    large, small = Tokens(), Tokens()
    small.optimizer.accumulate_gradients(-(-len(ids) // size))
    small.graph(graph)
    for _ in range(3):
        one = large.fit([(ids, t)])
        parts = small.fit([(ids[i : i + size], t[i : i + size]) for i in range(0, len(ids), size)])
        assert parts.losses == pytest.approx(one.losses, rel=1e-5)
        np.testing.assert_allclose(small.get_params()["w"].data, large.get_params()["w"].data, rtol=1e-5, atol=1e-7)


def test_a_step_without_a_label_changes_nothing_and_does_not_count() -> None:
    ids, t = drawn_batch()
    net = Tokens()
    before = net.get_params()["w"].data.copy()
    nothing = (ids, np.full_like(t, -100))
    history = net.fit([nothing])
    assert history.losses == [0.0] and history.weights == [0]
    np.testing.assert_array_equal(net.get_params()["w"].data, before)
    history = net.fit([(ids, t), nothing])
    assert history.epochs == history.losses[:1]


def test_evaluation_is_a_mean_over_tokens() -> None:
    ids, t = drawn_batch()
    net = Tokens()
    whole = net.evaluate([(ids, t)])
    parts = net.evaluate([(ids[i : i + 3], t[i : i + 3]) for i in range(0, 8, 3)])
    assert parts == {"loss": pytest.approx(whole["loss"], rel=1e-6)}


@pytest.mark.parametrize("size", [3, 5])
def test_workers_count_tokens(size: int) -> None:
    """Parts of a batch with unlike numbers of tokens, of which some have none: as one process."""
    ids, t = drawn_batch()

    def trained(comm: Communicator | None) -> tuple[np.ndarray, list[float], list[float]]:
        net = Tokens()
        if comm is not None:
            net.optimizer = opt.DistOpt(net.optimizer, communicator=comm)
        net.optimizer.accumulate_gradients(2)
        net.train()
        history = fit(net, ids, t, epochs=2, batch_size=size, group=comm)
        return net.get_params()["w"].data, history.losses, history.epochs

    one = trained(None)
    for found in LocalGroup(3).run(trained):
        for mine, theirs in zip(found, one, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss", [autograd.softmax_cross_entropy, autograd.cross_entropy])
def test_labels_of_the_shape_of_the_scores_have_no_ignored_one(loss: Any) -> None:
    labels = tensor(np.full((N, C), 1 / C, F))
    with pytest.raises(InvalidInput, match="ignore_index must be used with class numbers"):
        loss(tensor(np.full((N, C), 1 / C, F)), labels, ignore_index=1)


@pytest.mark.parametrize("graph", [False, True])
def test_the_labels_of_a_step_are_counted_once(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether fit or the sums of gradients need the number, or both; not at all if neither does."""
    counts: list[int] = []
    counted = Tokens.batch_weight
    monkeypatch.setattr(Tokens, "batch_weight", lambda self, *batch: counts.append(1) or counted(self, *batch))
    ids, t = drawn_batch()
    for accumulated in (1, 2):
        net = Tokens()
        net.optimizer.accumulate_gradients(accumulated)
        net.graph(graph)
        history = net.fit([(ids, t)] * 4)
        assert len(counts) == 4 and sum(history.weights) == 4 * (t[:, 1:] != -100).sum()
        counts.clear()
        net.train()
        net(tensor(ids), tensor(t))
        assert len(counts) == accumulated - 1
        counts.clear()
