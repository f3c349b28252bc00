"""Files of training steps list the calls of gradient rules, so that a prepared file computes gradients by kernels."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, parser

import singa_backend
from singa import opt, sonnx
from singa_backend.ir import gradient_calls

NET = """<ir_version: 10, opset_import: ["": 21]>
net (float[8, 3, 16, 16] x) => (float[8, 4] y) <float[4, 3, 3, 3] w = {%s}> {
    h = Conv <pads = [1, 1, 1, 1]> (x, w)
    a = Relu (h)
    p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (a)
    g = GlobalAveragePool (p)
    y = Flatten (g)
}"""


@pytest.fixture(scope="module")
def step() -> ModelProto:
    rng = np.random.default_rng(0)
    weights = ", ".join(map(str, rng.standard_normal(108).round(3)))
    return sonnx.to_training_onnx(parser.parse_model(NET % weights), "softmax_cross_entropy", opt.SGD(lr=0.1, momentum=0.9))


def feeds() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"x": rng.standard_normal((8, 3, 16, 16)).astype(np.float32), "target": rng.integers(0, 4, 8)}


def entry(model: ModelProto) -> Any:
    return next(e for e in model.metadata_props if e.key == gradient_calls.KEY)


def test_a_file_runs_with_gradient_kernels(step: ModelProto) -> None:
    rep, plain = sonnx.prepare(step), sonnx.prepare(step, optimize=0)
    for _ in range(2):
        made = rep.run(feeds())
    for value, expected in zip(made, plain.run(feeds()), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    profile = rep.profile(feeds())
    assert (profile.gradients, profile.refused_gradients) == (4, {})
    kernels = " ".join(s.kernel for s in profile.steps)
    assert (
        "conv by weights" in kernels
        and "pooling gradient" in kernels
        and "eltwise gradient" in kernels
        and "loss_gradient" in kernels
    )


def test_a_file_with_other_nodes_has_no_calls(step: ModelProto) -> None:
    assert [c.op_type for c in singa_backend.read(step).gradient_calls][-1] == "Conv"
    changed = ModelProto.FromString(step.SerializeToString())
    node = next(n for n in changed.graph.node if n.op_type == "Greater")
    node.op_type = "GreaterOrEqual"
    assert singa_backend.read(changed).gradient_calls == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '"x"', "[" * 9999, '{"digest": 3, "calls": []}'])
def test_an_entry_of_another_form_is_ignored(step: ModelProto, text: str) -> None:
    changed = ModelProto.FromString(step.SerializeToString())
    entry(changed).value = text
    assert singa_backend.read(changed).gradient_calls == ()


@pytest.mark.parametrize(
    "row",
    [
        [],
        ["", "Conv", 22, {}, ["x"], ["y"], ["z"]],
        ["", "Conv", "22", {}, [], [], [], []],
        ["", "Conv", 22, [], [], [], [], []],
        ["", "Conv", 22, {}, [], [], [""], [], [[0, "float32", [], "1"]]],
        ["", "Conv", 22, {}, [], [], [""], [], [[0, "int64", [], 1.0]]],
        ["", "Conv", 22, {}, [], [], [""], [], [[0, "float32", [2], 1.0]]],
        ["", "Conv", 22, {}, [], [], [""], [], [[0, "float32", [1] * 65, 1.0]]],
        ["", "Conv", 22, {}, [], [], [""], [], [[0.0, "float32", [], 1.0]]],
        ["", "Conv", 22, {}, [], [], [""], [], [[0, "float32", []]]],
        ["", "Conv", 22, {}, [], [], [""], [], [], []],
    ],
)
def test_calls_of_another_form_are_ignored(step: ModelProto, row: list[Any]) -> None:
    changed = ModelProto.FromString(step.SerializeToString())
    found = json.loads(entry(changed).value)
    entry(changed).value = json.dumps(found | {"calls": [row]})
    assert singa_backend.read(changed).gradient_calls == ()


def test_calls_that_name_no_values_change_nothing(step: ModelProto) -> None:
    changed = ModelProto.FromString(step.SerializeToString())
    found = json.loads(entry(changed).value)
    rows = [[d, o, v, a, ["nothing"], ["at"], ["all"], ["here"]] for d, o, v, a, *_ in found["calls"]]
    entry(changed).value = json.dumps(found | {"calls": rows})
    rep = sonnx.prepare(changed)
    expected = sonnx.prepare(step, optimize=0).run(feeds())
    for value, other in zip(rep.run(feeds()), expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-5, atol=1e-6)


def test_an_inference_file_has_no_entry() -> None:
    exported = sonnx.export(sonnx.SONNXModel(parser.parse_model(NET % ", ".join(["0.5"] * 108))))
    assert not any(e.key == gradient_calls.KEY for e in exported.metadata_props)
