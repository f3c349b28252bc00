"""`precision="bf16"` of recorded steps: opt-in, within the bounds of bfloat16, checked, and kept by what describes a model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
from tests.helpers.recorded_steps import steps_of

from singa import autograd, layer, opt
from singa._core.tensor import Tensor
from singa.model import Model
from singa_backend.errors import InvalidInput
from singa_backend.kernels import rounding

F = np.float32
X = np.random.default_rng(0).standard_normal((64, 96)).astype(F)
Y = np.random.default_rng(1).integers(0, 32, 64)
ROUNDS = rounding.rounding() != rounding.NONE


class Wide(Model):
    """Two products that are large enough for bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layer.Linear(128), layer.Linear(32)
        self.set_optimizer(opt.SGD(lr=0.05, momentum=0.9))

    def forward(self, x: Tensor) -> Any:
        return self.last(autograd.tanh(self.first(x)))

    def train_one_batch(self, x: Tensor, t: Tensor) -> Any:
        loss = autograd.softmax_cross_entropy(self.forward(x), t)
        self.optimizer(loss)
        return loss


def wide(**options: Any) -> Wide:
    net = Wide()
    net.compile([Tensor(data=X)], is_train=True, **options)
    rng = np.random.default_rng(2)
    for p in net.get_params().values():
        p.copy_from_numpy((rng.standard_normal(p.shape) * 0.1).astype(F))
    return net


def losses(net: Model, steps: int = 5) -> np.ndarray:
    return np.array([float(net(Tensor(data=X), Tensor(data=Y)).data.item()) for _ in range(steps)])


def test_products_are_in_bfloat16_only_if_requested() -> None:
    exact, again = (losses(wide(use_graph=True)) for _ in range(2))
    named = losses(wide(use_graph=True, precision="float32"))
    assert exact.tobytes() == again.tobytes() == named.tobytes()
    net = wide(use_graph=True, precision="bf16")
    rough = losses(net)
    assert rough[0] == exact[0]  # the first step is on the tape
    np.testing.assert_allclose(rough, exact, rtol=1e-3)
    assert (rough[2:] != exact[2:]).all() == ROUNDS
    (step,) = steps_of(net)
    assert step._session.reason is None and step._session.options.precision == "bf16"


def test_parameters_and_states_stay_float32_and_are_near() -> None:
    nets = [wide(use_graph=True, precision=p) for p in ("float32", "bf16")]
    for net in nets:
        losses(net)
    for (name, e), r in zip(nets[0].get_params().items(), nets[1].get_params().values(), strict=True):
        assert r.data.dtype == F
        assert np.abs(r.data - e.data).max() <= 2**-7 * np.abs(e.data).max(), name
    assert {t.data.dtype for t in nets[1].optimizer.get_states().values()} == {np.dtype(F), np.dtype(np.int64)}


def test_a_change_of_precision_records_another_step() -> None:
    net = wide(use_graph=True)
    losses(net, 3)
    net.graph(True, precision="bf16")
    losses(net, 2)
    (step,) = steps_of(net)
    assert step._session.options.precision == "bf16" == net.precision
    net.graph(False)
    losses(net, 1)
    net.graph(True)
    assert net.precision == "bf16"
    net.precision = "float32"
    losses(net, 1)
    assert [s._session.options.precision for s in steps_of(net)] == ["float32"]


@pytest.mark.parametrize("value", ["bfloat16", "float16", 16, True, ["bf16"], "BF16"], ids=str)
def test_another_value_is_refused(value: Any) -> None:
    net = Wide()
    for call in (
        lambda: net.compile([Tensor(data=X)], use_graph=True, precision=value),
        lambda: net.graph(True, precision=value),
    ):
        with pytest.raises(InvalidInput, match="precision must be 'float32' or 'bf16'") as error:
            call()
        assert error.value.code == "SX384"
    assert net.precision == "float32" and not net.get_params()


def test_the_tape_has_no_other_precision() -> None:
    net = Wide()
    with pytest.raises(InvalidInput, match="'float32' without use_graph=True, got 'bf16'") as error:
        net.compile([Tensor(data=X)], precision="bf16")
    assert error.value.code == "SX384" and "tape" in str(error.value)
    with pytest.raises(InvalidInput, match="'float32' without mode=True, got 'bf16'"):
        net.graph(False, precision="bf16")
    assert not net.get_params() and not net.graph_mode


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))], ids=["deepcopy", "pickle"])
def test_copies_keep_the_precision_and_the_bits(copied: Any) -> None:
    net = wide(use_graph=True, precision="bf16")
    losses(net, 3)
    other = copied(net)
    assert other.precision == "bf16"
    assert losses(net, 3).tobytes() == losses(other, 3).tobytes()
