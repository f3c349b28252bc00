"""ONNX's suite through `SONNXModel.forward`: the same verdicts as the backend's.

A case with BatchNormalization or Dropout in training mode runs in training mode, the others in inference mode.  With a tape, all
operators on a path from the inputs are recorded.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

from singa import device
from singa._core import tape
from singa._core.tensor import Tensor
from singa._onnx.imported import _may_train
from singa._onnx.model import SONNXModel
from singa_backend import SingaBackend
from singa_backend.conform import cases, gaps, worker

NAMES = list(json.loads(cases.data_file("manifest.json").read_text())["cases"])
GAPS = gaps.read(cases.data_file("gaps.txt"))


class _Rep:
    """A prepared model whose `run` goes through a SONNXModel."""

    def __init__(self, model: Any, taped: bool) -> None:
        self.model = SONNXModel(model, device.default_device)
        self.taped = taped
        rep = self.model.imported.rep
        self.graph, self._session, self.limits = rep.graph, rep._session, rep.limits
        self._rep = rep
        self.model.train(any(_may_train(n) for n in rep.graph.all_nodes()))

    def run(self, inputs: Any, **kwargs: Any) -> Any:
        feeds, _ = self._rep._feeds(inputs)
        values = [x if not isinstance(x, np.ndarray) else Tensor(data=x, requires_grad=self.taped) for x in feeds]
        tensors = [x if x is None or isinstance(x, Tensor) else Tensor._of(x, device.default_device, False) for x in values]
        tape.training = self.taped
        try:
            return [None if y is None else y._data for y in self.model.forward(*tensors)]
        finally:
            tape.training = False


class Plain(SingaBackend):
    """The backend, through SONNXModel without a tape."""

    @classmethod
    def prepare(cls, model: Any, device: Any = "CPU", **kwargs: Any) -> Any:
        return _Rep(model, taped=False)


class Tape(SingaBackend):
    """The backend, through SONNXModel with a tape: operators run one by one, at the newest opset."""

    @classmethod
    def prepare(cls, model: Any, device: Any = "CPU", **kwargs: Any) -> Any:
        return _Rep(model, taped=True)


@cache
def _cases() -> dict[str, cases.Case]:
    return {c.name: c for c in cases.load()}


@pytest.mark.parametrize("through", [Plain, Tape])
@pytest.mark.parametrize("name", NAMES)
def test_case(name: str, through: Any) -> None:
    result = worker.run_case(_cases()[name], through, "CPU")
    judged = gaps.judge([result], GAPS)
    assert not judged.unexpected, f"{result.strict}: {result.reason}{result.official_reason}"
    assert not judged.closed, f"these gaps pass now: {judged.closed}"
