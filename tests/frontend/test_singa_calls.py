"""What programs written for SINGA call, beyond what its documentation lists."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from onnx import numpy_helper, parser
from tests.helpers.paths import PROJECT

from singa import autograd, opt, sonnx, tensor
from singa.tensor import Tensor
from singa_backend.errors import InvalidInput, NoGradientWarning


def T(values, **kwargs):
    return Tensor(data=np.asarray(values, np.float32), **kwargs)


# --- results that are tensors -------------------------------------------------------------------------------------------


def test_sum_without_axis_is_a_tensor_on_the_tape():
    x = T([[1, 2], [3, 4]], stores_grad=True)
    autograd.training = True
    try:
        y = tensor.sum(x)
        assert isinstance(y, Tensor) and y.shape == (1,) and float(y) == 10
        grads = autograd.gradients(y)
    finally:
        autograd.training = False
    np.testing.assert_array_equal(tensor.to_numpy(grads[id(x)]), np.ones((2, 2)))
    out = T([0])
    assert tensor.sum(x, out=out) is out and float(out) == 10
    assert tensor.sum(Tensor(data=np.arange(3))).shape == (1,)


def test_schedules_return_tensors_and_may_define_call():
    step = Tensor(data=np.zeros(1, np.int64), requires_grad=False)
    rate = opt.Constant(0.25)(step)
    assert isinstance(rate, Tensor) and rate.shape == (1,) and float(rate) == 0.25
    assert float(opt.ExponentialDecay(0.5, 10, 0.9)(step)) == 0.5
    assert float(opt.Constant(0.25)(3)) == 0.25 and float(opt.ExponentialDecay(0.5, 10, 0.9)(0)) == 0.5

    class Halved(opt.DecayScheduler):
        def call(self, step):
            return self.init_value * 0.5 ** int(step)

    class Own(opt.DecayScheduler):
        def __call__(self, step):
            return self.init_value * 0.5 ** int(step)

    for schedule in (Halved(0.5), Own(0.5)):
        sgd = opt.SGD(lr=schedule)
        for want in (0.5, 0.25, 0.125):
            assert float(sgd.lr_value) == want
            sgd.step()
    with pytest.raises(NotImplementedError, match="must define call"):
        opt.DecayScheduler(0.1)(step)


def test_a_constant_rate_keeps_its_precision():
    sgd = opt.SGD(lr=0.1, dtype=tensor.double)
    assert float(sgd.lr_value) == 0.1


# --- truth --------------------------------------------------------------------------------------------------------------


def test_truth_of_one_element_is_its_value():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert T([2]) and T(3) and not T([0]) and not T([[0]])
        assert bool(T([1]) == T([1])) and not bool(T([1]) == T([2])) and not (T([1]) > 2)


def test_truth_of_several_elements_is_true_with_a_warning():
    labels = T([0, 0, 0])
    with pytest.warns(UserWarning, match="write `is not None`"):
        assert labels
    assert labels is not None


@pytest.mark.parametrize("compare", [lambda a, b: a == b, lambda a, b: a < b, lambda a, b: a >= b])
def test_truth_of_a_comparison_is_refused(compare):
    made = compare(T([1, 2]), T([1, 3]))
    with pytest.raises(InvalidInput, match="has no truth value") as refused:
        bool(made)
    assert refused.value.code == "SX336"


def test_truth_of_bools_and_of_nothing_is_refused():
    for values in (np.array([True, True]), np.zeros((0, 2), np.float32)):
        with pytest.raises(InvalidInput, match="has no truth value"):
            bool(Tensor(data=values))


# --- arguments ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [3, np.int64(3), np.array(3), np.array([3]), np.array([[3.0]])])
def test_onehot_takes_an_array_as_depth(depth):
    y = autograd.onehot(-1, Tensor(data=np.array([0, 2])), depth)
    np.testing.assert_array_equal(tensor.to_numpy(y), [[1, 0, 0], [0, 0, 1]])


def test_onehot_refuses_several_depths():
    with pytest.raises(InvalidInput, match="depth must be one integer"):
        autograd.onehot(-1, Tensor(data=np.array([0, 2])), np.array([3, 4]))


def test_ranking_loss_refuses_unequal_shapes():
    assert float(autograd.ranking_loss(T([1, 2]), T([1, 1]))) == pytest.approx(0.1)
    with pytest.raises(InvalidInput, match="pos and neg must have equal shapes") as refused:
        autograd.ranking_loss(T([1, 2]), T([1]))
    assert refused.value.code == "SX334"


@pytest.mark.parametrize("loss", ["mse_loss", "binary_cross_entropy", "ranking_loss"])
def test_losses_accept_open_sizes(loss):
    """A dynamic size may equal any size; known sizes that differ are refused."""
    model = parser.parse_model('<ir_version: 9, opset_import: ["": 18]> g (float[n,3] x) => (float[n,2] y) { y = MatMul(x, w) }')
    w, x, t = (np.random.default_rng(i).random(shape, np.float32) for i, shape in enumerate([(3, 2), (4, 3), (4, 2)]))
    w /= w.sum(axis=0)  # y is in (0, 1)
    model.graph.initializer.append(numpy_helper.from_array(w, "w"))
    function = getattr(autograd, loss)
    for rows in ("n", "m", 4):
        step = sonnx.to_training_onnx(model, function, target=(np.float32, [rows, 2]))
        names = [o.name for o in step.graph.output]
        found = dict(zip(names, sonnx.run_model(step, {"x": x, "target": t}), strict=True))
        assert found["loss"] == pytest.approx(float(function(T(x @ w), T(t))), rel=1e-5)
    with pytest.raises(InvalidInput, match="must have equal shapes"):
        sonnx.to_training_onnx(model, function, target=(np.float32, ["n", 3]))


@pytest.mark.parametrize(
    ("x", "slope"),
    [((2, 3), (3,)), ((2, 3), (2, 1)), ((3,), (2, 3)), ((1, 3), (2, 1)), ((2, 1), (1, 3)), ((), (2,)), ((4, 1, 3), (2, 1))],
)
def test_prelu_broadcasts_both_ways(x, slope):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal(x).astype(np.float32), rng.standard_normal(slope).astype(np.float32)
    tx, ts = T(a, stores_grad=True), T(b, stores_grad=True)
    autograd.training = True
    try:
        y = autograd.prelu(tx, ts)
        grads = autograd.gradients(tensor.sum(y))
    finally:
        autograd.training = False
    wide = np.broadcast_to(a, np.broadcast_shapes(x, slope))
    np.testing.assert_allclose(tensor.to_numpy(y), np.where(wide < 0, wide * b, wide), rtol=1e-6)
    dx, ds = np.where(wide < 0, b, 1.0), np.where(wide < 0, wide, 0.0)
    for t, d in ((tx, dx), (ts, ds)):
        d = np.broadcast_to(d, wide.shape)
        axes = tuple(range(d.ndim - len(t.shape))) + tuple(
            i + d.ndim - len(t.shape) for i, n in enumerate(t.shape) if n == 1 and d.shape[i + d.ndim - len(t.shape)] != 1
        )
        np.testing.assert_allclose(tensor.to_numpy(grads[id(t)]), d.sum(axes).reshape(t.shape), rtol=1e-5, atol=1e-6)


# --- the page -----------------------------------------------------------------------------------------------------------


def test_the_code_of_the_page_runs(tmp_path, monkeypatch):
    """Every block of docs/from-singa.md, in order, in one program; the page has no code outside blocks of Python."""
    page = (PROJECT / "docs" / "from-singa.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    assert len(blocks) > 15 and page.count("```") == 2 * len(blocks)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "page"}
    before = autograd.training
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", NoGradientWarning)
            for i, block in enumerate(blocks):
                exec(compile(block, f"docs/from-singa.md, block {i}", "exec"), scope)
    finally:
        autograd.training = before
