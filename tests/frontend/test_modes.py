"""The mode of a model: every operator that depends on it, by every way to set it, and programs that set the flag by hand."""

from __future__ import annotations

import copy
import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from singa import autograd, layer, opt, quantization, sonnx, tape
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend.errors import InvalidInput

F = np.float32
X = (np.arange(24, dtype=F).reshape(4, 6) + 1) ** 1.5


@pytest.fixture(autouse=True)
def off() -> None:
    autograd.training = False


def tensor() -> Tensor:
    return Tensor(data=X.copy(), requires_grad=False)


# --- the operators that depend on the mode: files of every version, and layers


def file_of(op_type: str, opset: int, extra: int = 0, **attributes: Any) -> ModelProto:
    """A file of one node; y is its first output."""
    names = ["scale", "bias", "mean", "var"] if op_type == "BatchNormalization" else []
    values = [np.ones(6, F), np.zeros(6, F), np.zeros(6, F), np.ones(6, F)]
    weights = [numpy_helper.from_array(v, n) for v, n in zip(values, names, strict=False)]
    if op_type == "Dropout" and opset >= 12:
        names = ["ratio", "training"][: 1 + extra]
        weights = [numpy_helper.from_array(v, n) for v, n in zip((np.array(0.5, F), np.array(True)), names, strict=False)]
        extra = 0
    outputs = ["y", *(f"y{i}" for i in range(extra))]
    node = helper.make_node(op_type, ["x", *names], outputs, **attributes)
    info = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [None, 6]) for n in ("x", "y")]
    graph = helper.make_graph([node], "g", info[:1], info[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


FILES: dict[str, Callable[[], ModelProto]] = {
    "BatchNormalization-1": lambda: file_of("BatchNormalization", 5, consumed_inputs=[0, 0, 0, 1, 1]),
    "BatchNormalization-1, is_test=1": lambda: file_of("BatchNormalization", 5, consumed_inputs=[0, 0, 0, 1, 1], is_test=1),
    "BatchNormalization-6": lambda: file_of("BatchNormalization", 6),
    "BatchNormalization-6, is_test=1": lambda: file_of("BatchNormalization", 6, is_test=1),
    "BatchNormalization-7": lambda: file_of("BatchNormalization", 7),
    "BatchNormalization-7, 5 outputs": lambda: file_of("BatchNormalization", 7, 4),
    "BatchNormalization-9": lambda: file_of("BatchNormalization", 9),
    "BatchNormalization-14": lambda: file_of("BatchNormalization", 14),
    "BatchNormalization-14, training_mode=1": lambda: file_of("BatchNormalization", 14, 2, training_mode=1),
    "BatchNormalization-15": lambda: file_of("BatchNormalization", 15),
    "BatchNormalization-15, training_mode=1": lambda: file_of("BatchNormalization", 15, 2, training_mode=1),
    "Dropout-1": lambda: file_of("Dropout", 1),
    "Dropout-6": lambda: file_of("Dropout", 6),
    "Dropout-6, is_test=1": lambda: file_of("Dropout", 6, is_test=1),
    "Dropout-7": lambda: file_of("Dropout", 7),
    "Dropout-10": lambda: file_of("Dropout", 10),
    "Dropout-12": lambda: file_of("Dropout", 12),
    "Dropout-12, training_mode": lambda: file_of("Dropout", 12, 1),
    "Dropout-13": lambda: file_of("Dropout", 13),
    "Dropout-13, training_mode": lambda: file_of("Dropout", 13, 1),
    "Dropout-22": lambda: file_of("Dropout", 22),
    "Dropout-22, seed": lambda: file_of("Dropout", 22, 1, seed=7),
}


class Recurrent(layer.Layer):
    """Two layers of an RNN with dropout between them, on images of one row."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = layer.RNN(6, 6, num_layers=2, dropout=0.5)

    def forward(self, x: Tensor) -> Tensor:
        xs = [autograd.mul(x, Tensor(data=np.full((), s, F), requires_grad=False)) for s in (1.0, 0.5)]
        return self.rnn(xs, Tensor(data=np.zeros((2, 4, 6), F), requires_grad=False))[0][-1]  # type: ignore[no-any-return]


LAYERS: dict[str, Callable[[], Any]] = {
    "layer.BatchNorm2d": layer.BatchNorm2d,
    "layer.Dropout": lambda: layer.Dropout(0.5),
    "autograd.dropout": lambda: lambda x: autograd.dropout(x, ratio=0.5),
    "layer.RNN": Recurrent,
    "quantization.FakeQuantize": lambda: quantization.FakeQuantize(),
}


class Net(Model):
    """A model of one layer."""

    def __init__(self, made: Any) -> None:
        super().__init__()
        self.body = made

    def forward(self, x: Tensor) -> Any:
        y = self.body(x)
        return y[0] if isinstance(y, list) else y


class Loaded(sonnx.SONNXModel):
    """A loaded model that returns one tensor."""

    def forward(self, *xs: Any, **kwargs: Any) -> Any:
        return super().forward(*xs, **kwargs)[0]


OPERATORS: dict[str, Callable[[], Model]] = {
    **{n: lambda make=make: Loaded(make()) for n, make in FILES.items()},  # type: ignore[misc]
    **{f"{n} in a model": lambda make=make: Net(Loaded(make())) for n, make in FILES.items()},  # type: ignore[misc]
    **{n: lambda make=make: Net(make()) for n, make in LAYERS.items()},  # type: ignore[misc]
    **{f"{n} in a model": lambda make=make: Net(Net(make())) for n, make in LAYERS.items()},  # type: ignore[misc]
}


def trains(model: Model, run: Callable[[Tensor], Any]) -> bool:
    """Whether a run changes a state, draws, or returns something else than inference does."""
    before = {n: t.data.copy() for n, t in model.get_states().items()}
    with model._in_mode(False):
        inference = run(tensor()).data.copy()
    first, second = (run(tensor()).data.copy() for _ in range(2))
    after = {n: t.data for n, t in model.get_states().items()}
    moved = any(n not in before or not np.array_equal(before[n], after[n]) for n in after)
    return moved or not np.array_equal(first, second) or not np.array_equal(first, inference)


def ready(name: str) -> Model:
    """A model whose parameters exist, in no mode of its own."""
    model = OPERATORS[name]()
    model.forward(tensor())
    return model


def flag(model: Model, on: bool) -> None:
    autograd.training = on


def own(model: Model, on: bool) -> None:
    model.train(on)


def by_method(model: Model, on: bool) -> None:
    model.train() if on else model.eval()


def compiled(model: Model, on: bool) -> None:
    model.compile([tensor()], is_train=on)


def compiled_as_a_graph(model: Model, on: bool) -> None:
    model.compile([tensor()], is_train=on, use_graph=True)


def after_the_other(model: Model, on: bool) -> None:
    model.train(not on)
    model.train(on)


WAYS = [flag, own, by_method, compiled, compiled_as_a_graph, after_the_other]


@pytest.mark.parametrize("name", OPERATORS)
def test_every_operator_follows_every_way_to_set_the_mode(name: str) -> None:
    model = ready(name)
    assert not trains(model, model.forward) and not model.training  # as it was loaded
    for way in WAYS:
        for on in (True, False):
            autograd.training = False
            model = ready(name)
            way(model, on)
            assert trains(model, model.forward) is on, (way.__name__, on)
            assert model.training is on and autograd.training is on


def batch_norm() -> ModelProto:
    return FILES["BatchNormalization-9"]()


def mean(model: Model) -> Any:
    return model.get_states()["mean"].data.copy()


# --- loaded models


def test_a_loaded_model_infers_by_every_call() -> None:
    for name, make in FILES.items():
        proto = make()
        for model in (sonnx.SONNXModel(proto), sonnx.from_onnx(proto)):
            assert not trains(model, lambda x, m=model: m.forward(x)[0]), name
            assert not trains(model, lambda x, m=model: m(x)[0]), name
        rep = sonnx.prepare(proto)
        for run in (lambda x, r=rep: r.run([x])[0], lambda x, r=rep: r.layers[-1].operator(x, *r.imported.tensors().values())[0]):
            before = {n: t.data.copy() for n, t in rep.imported.tensors().items()}
            first = run(tensor()).data.copy()
            np.testing.assert_array_equal(first, run(tensor()).data)
            for n, t in rep.imported.tensors().items():
                np.testing.assert_array_equal(t.data, before[n])


def test_the_flag_after_the_own_mode_only_records() -> None:
    """A model that was set to inference keeps its statistics, also if gradients through it are recorded."""
    model = Loaded(batch_norm())
    model.eval()
    autograd.training = True
    before = mean(model)
    assert not model.forward(tensor()).is_dummy()
    np.testing.assert_array_equal(mean(model), before)
    model.train()
    autograd.training = False
    model.forward(tensor())
    assert (mean(model) != before).all()


def test_an_assignment_sets_the_own_mode() -> None:
    model = Loaded(batch_norm())
    model.training = True
    assert model.training and not autograd.training and trains(model, model.forward)


def test_repr_reports_the_mode() -> None:
    model = sonnx.SONNXModel(batch_norm())
    assert "mode: inference (follows autograd.training)" in repr(model) and "SONNXModel" in repr(model)
    autograd.training = True
    assert "mode: training (follows autograd.training)" in repr(model)
    model.eval()
    assert repr(model).endswith("mode: inference>")
    model.train()
    assert repr(model).endswith("mode: training>") and repr(model) != repr(sonnx.SONNXModel(batch_norm()))


def test_copies_have_the_same_mode() -> None:
    model = Loaded(batch_norm())
    assert copy.deepcopy(model)._mode is None
    for mode in (True, False):
        model.train(mode)
        assert copy.deepcopy(model).training is mode


# --- models in models


def test_a_mode_is_that_of_all_models_in_a_model() -> None:
    inner = Loaded(batch_norm())
    outer = Net(Net(inner))
    inner.train()
    outer.eval()
    assert not inner.training and not trains(inner, outer.forward)
    outer.train()
    assert inner.training and trains(inner, outer.forward)
    inner.eval()  # later than the outer mode: the inner statistics stay
    before = mean(inner)
    autograd.training = True
    outer.forward(tensor())
    np.testing.assert_array_equal(mean(inner), before)


def test_compile_moves_no_statistic_of_a_model_in_a_model() -> None:
    inner = Loaded(batch_norm())
    inner.train()
    outer = Net(inner)
    before = mean(inner)
    outer.compile([tensor()], is_train=True)
    np.testing.assert_array_equal(mean(inner), before)
    assert inner.training


def test_an_export_restores_every_mode() -> None:
    inner = Loaded(batch_norm())
    outer = Net(inner)
    for mode in (None, True, False):
        inner._mode, outer._mode, autograd.training = mode, None, True
        sonnx.export(outer, [tensor()])
        assert inner._mode is mode and outer._mode is None and autograd.training


def test_a_failing_compile_restores_the_modes() -> None:
    model = Net(lambda x: 1 / 0)
    autograd.training = True
    with pytest.raises(ZeroDivisionError):
        model.compile([tensor()])
    assert model._mode is None and autograd.training


# --- threads


def test_each_thread_has_its_own_flag() -> None:
    model = Loaded(batch_norm())
    found: dict[str, bool] = {}
    wait = threading.Barrier(2, timeout=60)

    def run(name: str, on: bool) -> None:
        autograd.training = on
        wait.wait()
        found[name] = model.training
        wait.wait()

    threads = [threading.Thread(target=run, args=(str(on), on)) for on in (True, False)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == {"True": True, "False": False}


# --- programs that are written as SINGA's


def head() -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    W = Tensor(data=rng.normal(size=(6, 2)).astype(F), requires_grad=True, stores_grad=True, name="W")
    return W, Tensor(data=np.array([0, 1, 0, 1]), requires_grad=False)


def test_a_loop_written_by_hand_trains_batch_normalization_and_dropout() -> None:
    model = sonnx.SONNXModel(batch_norm())
    drop = layer.Dropout(0.5)
    W, t = head()
    sgd = opt.SGD(lr=0.05)
    before, scale = mean(model), model.get_params()["scale"].data.copy()
    autograd.training = True
    dropped = []
    for _ in range(3):
        y = drop(model.forward(tensor())[0])
        dropped.append((y.data == 0).any())
        loss = autograd.softmax_cross_entropy(autograd.matmul(y, W), t)
        for p, g in autograd.backward(loss):
            sgd.apply(p.name, p, g)
        sgd.step()
    assert all(dropped)
    assert (mean(model) != before).all() and (model.get_params()["scale"].data != scale).all()
    autograd.training = False
    model.eval()
    after = mean(model)
    first, second = (drop(model.forward(tensor())[0]).data for _ in range(2))
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(mean(model), after)


def test_a_validation_between_epochs_by_the_flag_alone() -> None:
    model = sonnx.SONNXModel(batch_norm())
    for on in (True, False, True, False):
        autograd.training = on
        before = mean(model)
        model.forward(tensor())
        assert (mean(model) != before).all() == on


class Tuned(sonnx.SONNXModel):
    """SINGA's program that trains a loaded model."""

    def __init__(self, proto: ModelProto) -> None:
        super().__init__(proto)
        self.head = layer.Linear(2)

    def forward(self, *x: Any) -> Any:
        return self.head(super().forward(*x)[0])

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, t)
        self.optimizer.backward_and_update(loss)
        return out, loss

    def set_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer


class Step(Model):
    """A model whose step takes an input and targets, and whose forward takes the input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layer.Linear(2)
        self.set_optimizer(opt.SGD(lr=0.01))

    def forward(self, x: Tensor) -> Any:
        return self.head(x)

    def train_one_batch(self, x: Tensor, t: Tensor, dist_option: str = "fp32") -> Any:
        out = self.forward(x)
        loss = autograd.softmax_cross_entropy(out, t)
        self.optimizer(loss)
        return out, loss


class Coder(Step):
    """A model whose step takes the arguments of its forward."""

    def train_one_batch(self, x: Tensor) -> Any:  # type: ignore[override]
        loss = autograd.mse_loss(self.forward(x), Tensor(data=np.zeros((4, 2), F), requires_grad=False))
        self.optimizer(loss)
        return loss


def tuned() -> Tuned:
    made = Tuned(batch_norm())
    made.set_optimizer(opt.SGD(lr=0.01))
    return made


NEW: dict[str, tuple[Callable[[], Model], tuple[Any, ...], dict[str, Any]]] = {
    "a step": (Step, (tensor(), head()[1]), {}),
    "a step with an option": (Step, (tensor(), head()[1]), {"dist_option": "fp32"}),
    "a step with the inputs of forward": (Coder, (tensor(),), {}),
    "a loaded model": (tuned, (tensor(), head()[1]), {}),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", NEW)
def test_calling_a_new_model_with_the_arguments_of_its_step_trains(name: str, graph: bool) -> None:
    """As in SINGA's page of optimizers: neither `compile` nor `train` is called; the numbers are those after `train()`."""
    make, args, kwargs = NEW[name]
    new, other = make(), make()
    for m in (new, other):
        m.graph(graph)
        m.forward(args[0])  # creates the parameters
    other.set_states({n: Tensor(data=t.data.copy()) for n, t in new.get_states().items()})
    assert not new.training
    other.train()
    autograd.training = False
    wanted = [other(*args, **kwargs) for _ in range(3)]
    autograd.training = False
    before = {n: t.data.copy() for n, t in new.get_params().items()}
    found = [new(*args, **kwargs) for _ in range(3)]
    assert new.training and autograd.training and repr(new).endswith("mode: training>")
    for a, b in zip(found, wanted, strict=True):
        a, b = (v[-1] if isinstance(v, tuple) else v for v in (a, b))
        np.testing.assert_array_equal(a.data, b.data)
    assert all((t.data != before[n]).any() for n, t in new.get_params().items() if n.startswith("head"))
    new.eval()
    last = {n: t.data.copy() for n, t in new.get_states().items()}
    new(args[0])
    for n, t in new.get_states().items():
        np.testing.assert_array_equal(t.data, last[n])


def test_a_new_model_infers_with_the_arguments_of_forward() -> None:
    for make in (Step, tuned):
        m = make()
        m(tensor())
        before = {n: t.data.copy() for n, t in m.get_states().items()}
        assert m(tensor()).shape == (4, 2) and not m.training and not autograd.training
        for n, t in m.get_states().items():
            np.testing.assert_array_equal(t.data, before[n])


def test_a_new_model_without_a_tape_does_not_train() -> None:
    m = Coder()
    with tape.no_tape():
        assert m(tensor()).shape == (4, 2)
    assert not m.training


@pytest.mark.parametrize(
    ("mode", "args", "text", "hint"),
    [
        (
            True,
            1,
            r"in training must have the arguments of train_one_batch\(x, t, dist_option='fp32'\), got 1 argument$",
            "eval()",
        ),
        (False, 2, r"in inference must have the arguments of forward\(x\), got 2 arguments$", "train() or compile"),
        (False, 4, r"in inference must have the arguments of forward\(x\), got 4 arguments$", "train_one_batch(x, t"),
        (True, 4, "train_one_batch", "the other mode runs forward(x)"),
        (None, 4, r"in inference must have the arguments of forward\(x\), got 4 arguments$", "train_one_batch(x, t"),
        (None, 0, "got 0 arguments", "train_one_batch(x, t"),
    ],
)
def test_a_call_with_arguments_of_the_other_mode_names_it(mode: bool | None, args: int, text: str, hint: str) -> None:
    m = Step()
    if mode is not None:
        m.train(mode)
    given = (tensor(), head()[1], "fp32", None)[:args]
    with pytest.raises(InvalidInput) as refused:
        m(*given)
    assert refused.value.code == "SX301" and re.search(text, refused.value.message) and hint in refused.value.hint
    assert refused.value.__suppress_context__


def test_a_type_error_of_a_step_is_its_own() -> None:
    class Wrong(Step):
        def forward(self, x: Tensor) -> Any:
            return int(None)  # type: ignore[call-overload]

    with pytest.raises(TypeError, match="int\\(\\)"):
        Wrong()(tensor())
    with pytest.raises(TypeError, match="int\\(\\)"):
        Wrong()(tensor(), head()[1])


def test_a_model_without_an_optimizer_names_set_optimizer() -> None:
    m = Net(layer.Linear(2))
    assert not hasattr(m, "optimizer") and getattr(m, "other", 3) == 3
    with pytest.raises(AttributeError, match="call set_optimizer"):
        m.optimizer  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        m.nothing  # type: ignore[attr-defined]  # noqa: B018
    sgd = opt.SGD(lr=0.1)
    m.set_optimizer(sgd)
    assert m.optimizer is sgd and copy.deepcopy(m).optimizer is not sgd


@pytest.mark.parametrize("graph", [False, True])
def test_a_program_compiles_trains_and_evaluates(graph: bool) -> None:
    m = Tuned(batch_norm())
    m.set_optimizer(opt.SGD(lr=0.005, momentum=0.9, weight_decay=1e-5))
    tx, ty = tensor(), head()[1]
    m.compile([tx], is_train=True, use_graph=graph, sequential=True)
    before = mean(m)
    for _ in range(3):
        last = mean(m)
        m(tx, ty)
        assert (mean(m) != last).all()
    m.eval()
    last = mean(m)
    np.testing.assert_array_equal(m(tx).data, m(tx).data)
    np.testing.assert_array_equal(mean(m), last)
    assert (last != before).all()


def test_a_recorded_step_follows_the_mode_of_a_model_in_it() -> None:
    class Outer(Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Loaded(batch_norm()), layer.Linear(2)
            self.optimizer = opt.SGD(lr=0.01)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.inner.forward(x))  # type: ignore[no-any-return]

        def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
            loss = autograd.softmax_cross_entropy(self.forward(x), t)
            self.optimizer(loss)
            return loss

    m = Outer()
    m.compile([tensor()], is_train=True, use_graph=True)
    t = head()[1]
    for on in (True, True, True, False, False, True):
        m.inner.training = on
        before = mean(m.inner)
        m(tensor(), t)
        assert (mean(m.inner) != before).all() == on
    assert any(m._steps.values())


def test_an_inference_program_of_singa_infers() -> None:
    m = sonnx.SONNXModel(batch_norm())
    x = tensor()
    m.compile([x], is_train=False, use_graph=True, sequential=True)
    before = mean(m)
    np.testing.assert_array_equal(m.forward(x)[0].data, m(x)[0].data)
    np.testing.assert_array_equal(mean(m), before)
