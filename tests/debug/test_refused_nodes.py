"""Comparison with a model that has operators of a layout for one processor: what agrees, what was not compared, and why."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, numpy_helper, parser

from singa.cli import main
from singa_backend import debug
from singa_backend.errors import InvalidInput

TEXT = """<ir_version: 9, opset_import: ["" : 17]> g (float[1, 3, 16, 16] x) => (float[1, 5] y) {
    m = Sigmoid(x)
    c = Conv<pads = [1, 1, 1, 1]>(m, w1, b1)
    r = Relu(c)
    p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(r)
    d = Conv<pads = [1, 1, 1, 1]>(p, w2, b2)
    s = Relu(d)
    a = GlobalAveragePool(s)
    f = Flatten(a)
    y = Gemm(f, w3, b3) }"""
SIZES = {"w1": (32, 3, 3, 3), "b1": (32,), "w2": (32, 32, 3, 3), "b2": (32,), "w3": (32, 5), "b3": (5,)}
X = np.random.default_rng(1).normal(size=(1, 3, 16, 16)).astype(np.float32)

OPTIMIZE = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 4
options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, sys.argv[3])
options.optimized_model_filepath = sys.argv[2]
onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
"""


def net() -> ModelProto:
    rng, model = np.random.default_rng(0), parser.parse_model(TEXT)
    for name, shape in SIZES.items():
        model.graph.initializer.append(numpy_helper.from_array(rng.normal(0, 0.3, shape).astype(np.float32), name))
    return model


def blocked() -> ModelProto:
    """What onnxruntime's highest level writes: convolutions with their Relu, in a layout of blocks until ReorderOutput."""
    text = TEXT.replace('["" : 17]', '["" : 17, "com.microsoft.nchwc" : 1]')
    for name in ("Conv", "MaxPool", "GlobalAveragePool"):
        text = text.replace(f"= {name}", f"= com.microsoft.nchwc.{name}")
    text = text.replace("    c =", "    r =").replace("    r = Relu(c)\n", "").replace("    d =", "    s =")
    text = text.replace("    s = Relu(d)\n", "").replace(
        "f = Flatten(a)", "o = com.microsoft.nchwc.ReorderOutput(a)\n    f = Flatten(o)"
    )
    for name in "rpsa":
        text = text.replace(f"    {name} =", f"    {name}_nchwc =").replace(f"({name},", f"({name}_nchwc,")
        text = text.replace(f"({name})", f"({name}_nchwc)")
    model = parser.parse_model(text)
    model.graph.initializer.extend(net().graph.initializer)
    return model


@pytest.fixture
def optimized(tmp_path: Path) -> Any:
    """A function that writes what onnxruntime's optimizer makes of the model at a level."""
    pytest.importorskip("onnxruntime")
    onnx.save(net(), tmp_path / "net.onnx")

    def made(level: str) -> Path:
        target = tmp_path / f"{level}.onnx"
        line = [sys.executable, "-c", OPTIMIZE, str(tmp_path / "net.onnx"), str(target), level]
        subprocess.run(line, check=True, timeout=120)
        return target

    return made


def sonnx(*words: object) -> Any:
    return CliRunner().invoke(main, [str(w) for w in words])


def test_values_up_to_refused_nodes_agree_and_the_rest_is_not_passed_over(tmp_path: Path) -> None:
    found = debug.compare(net(), X, against=blocked())
    assert not found.agrees and [r.value for r in found.rows] == ["m"] and found.first is None
    assert "com.microsoft.nchwc has no operator Conv" in found.refusal
    assert json.loads(json.dumps(found.to_dict()))["refusal"] == found.refusal
    first = debug.bisect(net(), X, against=blocked(), to=tmp_path / "out")
    assert first is not None and "com.microsoft.nchwc has no operator Conv" in first.node.why and not first.alone


def test_a_model_that_differs_before_refused_nodes_does_not_agree() -> None:
    """No value shows where: it is neither equal, nor is an output behind it."""
    wrong = net()
    wrong.graph.node[0].op_type = "Tanh"
    assert not debug.compare(wrong, X, against=blocked()).agrees
    with pytest.raises(InvalidInput, match="nothing could be compared"):
        debug.bisect(wrong, X, against=blocked())


def test_files_of_onnxruntimes_optimizer(optimized: Any, tmp_path: Path) -> None:
    """Its highest level writes blocked layouts on processors that have them; the level below it can be compared."""
    plain = optimized("ORT_ENABLE_EXTENDED")
    assert debug.compare(net(), X, against=plain).agrees
    assert debug.bisect(net(), X, against=plain, to=tmp_path / "out") is None
    path = optimized("ORT_ENABLE_ALL")
    if all(n.domain != "com.microsoft.nchwc" for n in onnx.load(path).graph.node):
        pytest.skip("onnxruntime has no blocked layouts for this processor")
    np.savez(tmp_path / "x.npz", x=X)
    common = (tmp_path / "net.onnx", "--inputs", tmp_path / "x.npz", "--against", path)
    done = sonnx("compare", *common)
    assert done.exit_code == 1 and "com.microsoft.nchwc has no operator Conv" in done.output and "'extended'" in done.output
    done = sonnx("bisect", *common, "--to", tmp_path / "node")
    assert done.exit_code == 1 and "com.microsoft.nchwc has no operator Conv" in done.output


def test_nothing_compared_has_its_reason() -> None:
    first, model = blocked(), net()
    del first.graph.node[0], model.graph.node[0]
    for proto in (first, model):
        proto.graph.node[0].input[0] = "x"
    found = debug.compare(model, X, against=first)
    assert not found.rows and "com.microsoft.nchwc has no operator Conv" in found.refusal
    with pytest.raises(InvalidInput, match="nothing could be compared"):
        debug.bisect(model, X, against=first)
    assert not debug.compare(model, X, against=model).refusal
