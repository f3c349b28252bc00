"""Data that `fit`, `evaluate` and `predict` read: dicts, datasets of columns and iterables; and the callbacks of `fit`."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from onnx import parser

from singa import autograd, layer, model, opt, sonnx
from singa._core import tape
from singa._core.tensor import Tensor
from singa_backend.errors import InvalidInput

F = np.float32
RNG = np.random.default_rng(0)
A, B, LABELS = RNG.normal(size=(10, 3)).astype(F), RNG.normal(size=(10, 3)).astype(F), RNG.integers(0, 2, 10)


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    tape.training = False
    yield
    tape.training = False


class Two(model.Model):
    """Two inputs, whose step has other names than the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = layer.Linear(2)
        self.optimizer = opt.SGD(0.1)

    def forward(self, first: Tensor, second: Tensor) -> Any:
        return self.fc(first - 2.0 * second)

    def train_one_batch(self, a: Tensor, b: Tensor, t: Tensor) -> Any:
        out = self.forward(a, b)
        loss = autograd.softmax_cross_entropy(out, t)
        self.optimizer(loss)
        return out, loss


class Loaded(sonnx.SONNXModel):
    """The same from a file, whose inputs have names."""

    def __init__(self) -> None:
        text = """<ir_version: 9, opset_import: ["": 20]> g (float[N, 3] first, float[N, 3] second) => (float[N, 2] y)
            <float[3, 2] w = {0.5, 0.5, 0.5, 0.5, 0.5, 0.5}, float[1] two = {2}>
            { t = Mul(second, two) d = Sub(first, t) y = MatMul(d, w) }"""
        super().__init__(parser.parse_model(text))
        self.optimizer = opt.SGD(0.1)

    def train_one_batch(self, *batch: Tensor) -> Any:
        (out,) = self.forward(*batch[:-1])
        loss = autograd.softmax_cross_entropy(out, batch[-1])
        self.optimizer(loss)
        return out, loss


def made(kind: Any = Two) -> Any:
    net = kind()
    if kind is Two:
        net.compile([Tensor(data=A[:2]), Tensor(data=B[:2])], is_train=False)
        net.set_params({"fc.W": np.full((3, 2), 0.5, F), "fc.b": np.zeros(2, F)})
    return net


def tuples() -> list[Any]:
    return [(A[i : i + 4], B[i : i + 4], LABELS[i : i + 4]) for i in range(0, 10, 4)]


def dicts(target: str = "labels") -> list[dict[str, Any]]:
    return [{target: t, "second": b, "unused": "text", "first": a} for a, b, t in tuples()]


class Columns:
    """A dataset of columns with the methods of Hugging Face's."""

    def __init__(self, columns: dict[str, Any], kind: str | None = None) -> None:
        self.columns, self.format = columns, {"type": kind}
        self.reads: list[list[int]] = []

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, rows: list[int]) -> dict[str, Any]:
        self.reads.append(rows)
        found = {n: [c[i] for i in rows] for n, c in self.columns.items()}
        if self.format["type"] != "numpy":
            return found
        return {n: np.array(v, F if isinstance(v[0], list) else None) for n, v in found.items()}

    def select_columns(self, names: list[str]) -> Columns:
        return Columns({n: self.columns[n] for n in names}, self.format["type"])

    def with_format(self, kind: str) -> Columns:
        return Columns(self.columns, kind)


class Stream:
    """A dataset that is read in order."""

    column_names = None

    def with_format(self, kind: str) -> Stream:
        return self

    def iter(self, batch_size: int) -> Iterator[dict[str, Any]]:
        for i in range(0, 10, batch_size):
            yield {"first": A[i : i + batch_size], "second": B[i : i + batch_size], "label": LABELS[i : i + batch_size]}


class Again:
    """An iterable without a length, which begins again."""

    def __iter__(self) -> Iterator[Any]:
        return iter(tuples())


SOURCES: dict[str, Callable[[], Any]] = {
    "dicts": dicts,
    "names of the step": lambda: [{"t": t, "b": b, "a": a, "first": b} for a, b, t in tuples()],
    "mappings": lambda: [UserDict(d) for d in dicts("targets")],
    "inputs by name": lambda: [({"second": b, "first": a}, t) for a, b, t in tuples()],
    "nested": lambda: [((a, b), t) for a, b, t in tuples()],
    "lists": lambda: [{"first": a.tolist(), "second": b.tolist(), "y": t.tolist()} for a, b, t in tuples()],
    "no length": Again,
    "tensors": lambda: [tuple(Tensor(data=v) for v in batch) for batch in tuples()],
}


@pytest.mark.parametrize("kind", [Two, Loaded])
@pytest.mark.parametrize("source", SOURCES)
def test_a_source_trains_as_tuples_do(source: str, kind: Any) -> None:
    if kind is Loaded and source == "names of the step":
        pytest.skip("the step takes any number of arguments")
    plain, other = made(kind), made(kind)
    data = SOURCES[source]()
    whole, found = plain.fit(tuples(), epochs=2), other.fit(data, epochs=2)
    assert found.losses == whole.losses and len(whole.losses) == 6
    assert other.evaluate(data) == plain.evaluate(tuples())
    if source != "names of the step":
        np.testing.assert_array_equal(other.predict(data), plain.predict(tuples()))


def test_a_dict_of_arrays_is_data() -> None:
    net, other = made(), made()
    arrays = {"second": B, "label": LABELS, "first": A}
    assert net.fit(arrays, epochs=2, seed=3).losses == other.fit(A, B, LABELS, epochs=2, seed=3).losses
    np.testing.assert_array_equal(net.predict(arrays), other.predict(A, B))


def test_a_dataset_is_shuffled_by_the_seed_and_predicted_in_order() -> None:
    rows = Columns({"id": list(range(10)), "first": A.tolist(), "second": B.tolist(), "label": LABELS.tolist()})
    net, other = made(), made()
    arrays = (A, B, LABELS)  # as the format "numpy" returns them
    found = net.fit(rows, epochs=2, batch_size=4, seed=3).losses
    assert found == other.fit(*arrays, epochs=2, batch_size=4, seed=3).losses
    assert rows.reads == []  # only the columns that are used are read
    np.testing.assert_array_equal(net.predict(rows, batch_size=4), other.predict(*arrays[:2], batch_size=4))
    assert net.evaluate(rows, batch_size=4) == other.evaluate(*arrays, batch_size=4)
    assert net.fit(rows, validation=rows).validation == other.fit(*arrays, validation=arrays).validation


def test_a_stream_of_rows_is_read_in_batches() -> None:
    net, other = made(), made()
    assert net.fit(Stream(), epochs=2, batch_size=4).losses == other.fit(tuples(), epochs=2).losses


def test_an_iterator_is_one_epoch() -> None:
    net = made()
    assert net.fit(iter(dicts())).losses == made().fit(tuples()).losses
    read: list[int] = []
    with pytest.raises(InvalidInput, match="must be iterable 2 times"):
        net.fit((read.append(1) for _ in range(3)), epochs=2)
    assert not read


def test_the_target_has_the_requested_name() -> None:
    net = made()
    data = [{**d, "label": 1 - d["grade"]} for d in dicts("grade")]
    assert net.fit(data, target="grade").losses == made().fit(tuples()).losses
    assert net.evaluate(data, target="grade") != net.evaluate(data)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no input": (lambda: made().fit([{"first": A, "y": LABELS}]), "a batch must have the inputs 'second', got 'first', 'y'"),
    "no target": (lambda: made().fit([{"first": A, "second": B, "grade": LABELS}]), "targets named 'labels', 'label'"),
    "another target": (lambda: made().fit(dicts(), target="grade"), "the targets 'grade', got"),
    "columns": (lambda: made().fit(Columns({"first": A, "label": LABELS})), "must have the inputs 'second'"),
    "no rows": (lambda: made().fit(Columns({"first": [], "second": [], "label": []})), "at least one row"),
    "splits": (lambda: made().fit({"train": Columns({"first": A})}), "one split of a dataset, got the splits 'train'"),
    "any inputs": (lambda: Any_().fit(dicts()), "a model whose inputs have names"),
    "size": (lambda: made().fit(dicts(), batch_size=3), "batch_size must be that of the batches"),
}  # fmt: skip


class Any_(model.Model):
    def forward(self, *xs: Tensor) -> Any:
        return xs[0]

    def train_one_batch(self, *xs: Tensor) -> Any:
        return xs[0]


@pytest.mark.parametrize("case", CASES)
def test_errors_come_before_the_first_step(case: str) -> None:
    call, text = CASES[case]
    with pytest.raises(InvalidInput) as error:
        call()
    assert error.value.code == "SX342" and text in error.value.message


# --- callbacks


class Seen(model.Callback):
    def __init__(self, ends: tuple[int, int] | None = None) -> None:
        self.steps: list[tuple[Any, ...]] = []
        self.epochs: list[tuple[Any, ...]] = []
        self.ends = ends

    def on_step(self, progress: model.FitProgress) -> bool:
        self.steps.append((progress.epoch, progress.step, progress.steps, progress.steps_in_epoch, progress.rate))
        assert progress.history.losses and progress.model.history is progress.history and progress.epochs == 2
        return (progress.epoch, progress.step) == self.ends

    def on_epoch(self, progress: model.FitProgress) -> None:
        self.epochs.append((progress.epoch, progress.steps, len(progress.history.validation), progress.rate))


@pytest.mark.parametrize("micro", [1, 2])
def test_callbacks_follow_each_step_and_epoch(micro: int) -> None:
    """The rate is that of the step: it halves at each."""
    net, seen, epochs = made(), Seen(), []
    net.optimizer = opt.SGD(opt.ExponentialDecay(0.1, 1, 0.5))
    net.optimizer.accumulate_gradients(micro)
    net.fit(tuples(), epochs=2, validation=tuples(), callbacks=[seen, lambda history: epochs.append(len(history.losses))])
    each = 3 if micro == 1 else 2
    rates = [float(F(0.1 * 0.5**i)) for i in range(2 * each)]
    expected = [(1 + i // each, 1 + i % each, i + 1, each) for i in range(2 * each)]
    assert [s[:4] for s in seen.steps] == expected
    np.testing.assert_allclose([s[4] for s in seen.steps], rates, rtol=1e-6)
    assert [e[:3] for e in seen.epochs] == [(1, each, 1), (2, 2 * each, 2)] and epochs == [each, 2 * each]
    np.testing.assert_allclose([e[3] for e in seen.epochs], [rates[each - 1], rates[-1]], rtol=1e-6)


def test_a_callback_ends_the_training_in_an_epoch() -> None:
    net = made()
    history = net.fit(tuples(), epochs=2, callbacks=[Seen(ends=(2, 1))])
    assert len(history.losses) == 4 and len(history.epochs) == 1 and not net.training


def test_a_source_without_a_length_has_no_number_of_steps() -> None:
    seen = Seen()
    made().fit(Again(), epochs=2, callbacks=[seen])
    assert {s[3] for s in seen.steps} == {None}


def test_one_method_is_enough_and_may_change_the_rate() -> None:
    class Half:
        def on_step(self, progress: Any) -> None:
            progress.model.optimizer.lr = progress.rate / 2

    seen = Seen()
    made().fit(tuples(), epochs=2, callbacks=[Half(), seen])
    np.testing.assert_allclose([s[4] for s in seen.steps], [0.1 / 2**i for i in range(6)], rtol=1e-6)


def test_an_exception_of_a_callback_leaves_the_last_step() -> None:
    class Fails:
        def on_step(self, progress: Any) -> None:
            if progress.steps == 2:
                raise KeyError("mine")

    net, other = made(), made()
    with pytest.raises(KeyError, match="mine"):
        net.fit(tuples(), callbacks=[Fails()])
    other.fit(tuples()[:2])
    assert net.history.losses == other.history.losses and not net.training
    assert all(np.array_equal(p.data, other.get_params()[n].data) for n, p in net.get_params().items())
